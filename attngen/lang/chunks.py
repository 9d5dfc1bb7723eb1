"""The function by which generated modules find the positions of a call's rows, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # generated modules have it; commands that only build import none


def chunk_positions(
    q_chunks: torch.Tensor, kv_chunks: torch.Tensor, q_len: int, kv_len: int, chunk: int, unit: int
) -> tuple[torch.Tensor, ...]:
    """Return four int32 tensors, for queries and keys: where each `unit` rows of the call start in the whole sequence;
    and for queries and keys how many of these units start before each unit of the whole sequence, and before its end.

    q_chunks, kv_chunks: int32, the rows at which the call's chunks of `chunk` rows start, in rising order.
    q_len, kv_len: rows of the whole sequence.
    """
    starts, ranks = [], []
    for chunks, length in ((q_chunks, q_len), (kv_chunks, kv_len)):
        inside = torch.arange(0, chunk, unit, device=chunks.device, dtype=torch.int32)
        starts.append((chunks[:, None] + inside).flatten())
        count = -(-length // chunk) * (chunk // unit) + 1
        rows = torch.arange(count, device=chunks.device, dtype=torch.int32) * unit
        ranks.append(torch.searchsorted(starts[-1], rows).int())
    return *starts, *ranks
