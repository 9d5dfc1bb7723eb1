"""Dropout masks on NumPy: the meaning of the op `dropout_mask`."""

from __future__ import annotations

import numpy as np

WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32 with seven rounds (Salmon et al. 2011): four random 32-bit words from a counter of four words and a
    key of two, as uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ np.uint64(k0), b & WORD, (a >> HALF) ^ c3 ^ np.uint64(k1), a & WORD
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def keep_scores(seed: int, b: int, h: int, q: np.ndarray, kv: np.ndarray, threshold: int) -> np.ndarray:
    """The dropout mask of a sequence and a query head: a bool array of the shape that the positions `q` and `kv`
    broadcast to.

    16 scores share a call of Philox: their q and kv differ only in bits 0 and 3. Bit 0 of q and bit 0 of kv select a
    score's word: the second or first word if q is even, the fourth or third if it is odd. Bit 3 of q and bit 3 of kv
    tell by how many bytes the word is rotated to the left. Its upper half is the score's random number. The score is
    kept if this is at least `threshold`, in 65536ths.

    The four scores of a word share its four bytes: the low byte of one random number is the high byte of another. So
    (q, kv) and (q, kv ^ 8), or (q ^ 8, kv ^ 8), are correlated, by at most 1 / 256. All others are independent.
    """
    q, kv = np.broadcast_arrays(q, kv)
    low, high = seed % 2**32, (seed >> 32) % 2**32
    shared = [np.uint64(1) * (x & ~9).astype(np.uint64) for x in (q, kv)]
    c0, c1, c2, c3 = philox((np.uint64(h), shared[0], np.uint64(b), shared[1]), (low, high))
    word = np.choose(2 * (q & 1) + (kv & 1), [c1, c0, c3, c2])
    left = (24 - 16 * (q >> 3 & 1) - 8 * (kv >> 3 & 1)).astype(np.uint64)
    random = (word << left | word >> (np.uint64(32) - left)) >> np.uint64(16) & np.uint64(0xFFFF)
    kept: np.ndarray = random.astype(np.int64) >= threshold
    return kept
