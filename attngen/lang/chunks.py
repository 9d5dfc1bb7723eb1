"""The function by which generated modules rank the chunks of a sequence, in plain torch."""

from __future__ import annotations

import torch


def chunk_ranks(
    q_chunks: torch.Tensor, kv_chunks: torch.Tensor, q_len: int, kv_len: int, chunk: int
) -> tuple[torch.Tensor, ...]:
    """Return, for each chunk of the whole sequence, and for its end, how many chunks of the call start before it: int32
    [chunks + 1], for queries and for keys.

    q_chunks, kv_chunks: int32, the rows at which the call's chunks of `chunk` rows start, in rising order.
    q_len, kv_len: rows of the whole sequence.
    """
    found = []
    for starts, length in ((q_chunks, q_len), (kv_chunks, kv_len)):
        rows = torch.arange(-(-length // chunk) + 1, device=starts.device, dtype=torch.int32) * chunk
        found.append(torch.searchsorted(starts, rows).int())
    return tuple(found)
