"""Which scores dropout keeps, on NumPy: what the op `keep` means."""

from __future__ import annotations

import numpy as np

WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32 of seven rounds (Salmon et al. 2011): four random words of 32 bits from a counter of four and a key of two, as uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ np.uint64(k0), b & WORD, (a >> HALF) ^ c3 ^ np.uint64(k1), a & WORD
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def keep_scores(seed: int, b: int, h: int, q: np.ndarray, kv: np.ndarray, threshold: int) -> np.ndarray:
    """Bool, of the shape that positions `q` and `kv` broadcast to: which scores of a sequence and a query head are kept.

    16 scores, whose q and kv differ in bits 0 and 3 alone, share a call of Philox. Bit 3 of q and of kv say which word a score takes,
    bit 0 which byte of it. It is kept where its byte reaches the threshold, in 256ths: `threshold` / 256, rounded down or up by the
    query's group of 16.
    """
    q, kv = np.broadcast_arrays(q, kv)
    low, high = seed % 2**32, (seed >> 32) % 2**32
    shared = [np.uint64(1) * (x & ~9).astype(np.uint64) for x in (q, kv)]
    words = philox((*shared, np.full(q.shape, h, np.uint64), np.full(q.shape, b, np.uint64)), (low, high))
    word = np.choose(2 * (q >> 3 & 1) + (kv >> 3 & 1), words)
    byte = word >> (16 * (kv & 1) + 8 * (q & 1)).astype(np.uint64) & np.uint64(255)
    least = (threshold + (q // 16 * 157 + low) % 256) // 256
    kept: np.ndarray = byte.astype(np.int64) >= least
    return kept
