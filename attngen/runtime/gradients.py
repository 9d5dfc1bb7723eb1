"""The host's part of the backward: the number of splits of a group of heads, and sums of inputs' gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from attngen.runtime.launch import Kernel, schedule


@functools.lru_cache(maxsize=1024)
def divisor(a: int, b: int) -> int:
    """Return the greatest divisor of a that is at most b; 1 if b is 0."""
    return next((n for n in range(min(a, b), 0, -1) if a % n == 0), 1)


def distance_parts(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, needed: bool, distances: int | None = None
) -> torch.Tensor:
    """Return a zeroed buffer for partial sums by distance, fp32 [B, Hq, rows, distances]; without elements unless
    `needed`.

    distances: their number; None for Nq + Nk, as in calls that have all rows of a sequence. Each query tile of the dQ
    kernel has its own rows, one for each key tile that a diagonal crosses there.
    """
    config = schedule(kernel.kernels, kernel.name, q, q.shape[2])
    crossed = (config["BLOCK_Q"] + config["BLOCK_KV"] - 2) // config["BLOCK_KV"] + 1  # key tiles per diagonal
    rows = triton.cdiv(q.shape[2], config["BLOCK_Q"]) * crossed
    shape = (*q.shape[:2], rows, q.shape[2] + k.shape[2] if distances is None else distances)
    return torch.zeros(shape if needed else (0, 0, 0, 0), device=q.device, dtype=torch.float32)


def by_distance(
    parts: torch.Tensor, x: torch.Tensor, dim: int, kept: tuple[int, ...], index: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of a table x that is read by distance along its dimension `dim`.

    `parts` [B, Hq, rows, distances] are summed over rows, and over B and Hq unless `kept` names them. `index` has the
    table's index of each distance. index_put_ adds in a fixed order, on CUDA too.
    """
    sums = parts.sum((*(d for d in (0, 1) if d not in kept), 2)).movedim(-1, 0)
    whole = torch.zeros_like(x).movedim(dim, 0).contiguous()
    inside = (index >= -len(whole)) & (index < len(whole))
    sums = sums * inside.view(-1, *[1] * (sums.dim() - 1))
    whole.index_put_((index % len(whole),), sums, accumulate=True)
    return whole.movedim(0, dim).contiguous()


def placed(x: torch.Tensor, like: torch.Tensor, *index: Any) -> torch.Tensor:
    """Return the gradient of `like` that is x at `index` and zero elsewhere."""
    whole = torch.zeros_like(like)
    whole[index] = x
    return whole
