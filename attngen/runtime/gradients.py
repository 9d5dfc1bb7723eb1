"""What the host does for gradients: splits of groups of heads, and sums for the inputs of modifiers."""

from __future__ import annotations

from typing import Any

import torch
import triton

from attngen.runtime.launch import Kernel, processors, schedule


def splits_of(q: torch.Tensor, k: torch.Tensor, least: int) -> int:
    """Among how many programs the query heads of a group are split for dK and dV: more than one where keys are few.

    A multiprocessor gets at least so many keys of all sequences and heads; each program as many query heads as the others.
    """
    group, keys = max(1, q.shape[1] // max(1, k.shape[1])), k.shape[0] * k.shape[1] * k.shape[2]
    most = min(group, max(1, group * keys // (least * processors(k.device))))  # query heads of one program
    return next(group // heads for heads in range(most, 0, -1) if group % heads == 0)


def distance_parts(kernel: Kernel, q: torch.Tensor, k: torch.Tensor, needed: bool) -> torch.Tensor:
    """Room for sums by distance: for each tile of queries of the dQ kernel, a row for each turn of a diagonal around a tile."""
    config = schedule(kernel.kernels, kernel.name, q, q.shape[2])
    turns = (config["BLOCK_Q"] + config["BLOCK_KV"] - 2) // config["BLOCK_KV"] + 1
    rows = triton.cdiv(q.shape[2], config["BLOCK_Q"]) * turns
    shape = (*q.shape[:2], rows, q.shape[2] + k.shape[2])
    return torch.zeros(shape if needed else (0, 0, 0, 0), device=q.device, dtype=torch.float32)


def by_distance(parts: torch.Tensor, x: torch.Tensor, dim: int, kept: tuple[int, ...], index: torch.Tensor) -> torch.Tensor:
    """The gradient of a table x that is read by distance along `dim`, at `index` of each: index_put_ adds in a fixed order, on CUDA too.

    `parts` [B, Hq, rows, distances] are summed over all but the dimensions `kept` and distances.
    """
    sums = parts.sum((*(d for d in (0, 1) if d not in kept), 2)).movedim(-1, 0)
    whole = torch.zeros_like(x).movedim(dim, 0).contiguous()
    inside = (index >= -len(whole)) & (index < len(whole))
    sums = sums * inside.view(-1, *[1] * (sums.dim() - 1))
    whole.index_put_((index % len(whole),), sums, accumulate=True)
    return whole.movedim(0, dim).contiguous()


def placed(x: torch.Tensor, like: torch.Tensor, *index: Any) -> torch.Tensor:
    """A gradient of some of a tensor's elements, zero for the others."""
    whole = torch.zeros_like(like)
    whole[index] = x
    return whole
