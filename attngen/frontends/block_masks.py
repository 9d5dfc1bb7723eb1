"""Reads BlockMasks: the mask function; also the lists of blocks, if they hide more than the function, and the full
blocks, if they show more."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from attngen.frontends.trace import Mod
from attngen.ir.sizes import Sizes

ANY_LENGTH = 1 << 30  # block size of PyTorch's masks for calls of any length
CHUNK = 1 << 28  # number of scores that are evaluated at a time to compare a block mask with its function


@dataclass
class Masked:
    """A block mask as a mask function, and its plans by module and sizes.

    mask_mod: the mask's function; where its lists differ from the function, one that also reads the lists.
    lists: number of sequences and of heads for which there are such lists; 1 where all share them.
    """

    mask_mod: Mod | None
    lists: tuple[int, int] = (1, 1)
    plans: weakref.WeakKeyDictionary[ModuleType, dict[Any, Any]] = field(default_factory=weakref.WeakKeyDictionary)


_MASKS: weakref.WeakKeyDictionary[Any, Masked] = weakref.WeakKeyDictionary()


def is_block_mask(x: Any) -> bool:
    return hasattr(x, "kv_num_blocks")


def masked_of(block_mask: Any) -> Masked:
    if block_mask not in _MASKS:
        _MASKS[block_mask] = _with_lists(block_mask)
    return _MASKS[block_mask]


def check_fits(block_mask: Any, sizes: Sizes) -> None:
    """Raise ValueError if a block mask is not one for calls of these sizes, as PyTorch does."""
    if _is_for_any_length(block_mask):
        return
    n_q, n_kv = block_mask.seq_lengths
    if (n_q, n_kv) != (sizes.n_q, sizes.n_kv):
        larger = n_q >= sizes.n_q and n_kv >= sizes.n_kv
        hint = ", or its upper left corner by `block_mask._adjust(q_len, kv_len)`" if larger else ""
        raise ValueError(
            f"flex_attention: block_mask is for {n_q} queries and {n_kv} keys, and the call has {sizes.n_q} and "
            f"{sizes.n_kv}; expected one that `create_block_mask` made for these{hint}"
        )
    for given, count, name in zip(masked_of(block_mask).lists, sizes, ("sequences", "heads")):
        if 1 < given < count:
            raise ValueError(
                f"flex_attention: block_mask has lists of blocks for {given} {name}, and the call has {count}; "
                "expected as many, or one for all"
            )


def _is_for_any_length(block_mask: Any) -> bool:
    return min(block_mask.BLOCK_SIZE) >= ANY_LENGTH


def _with_lists(block_mask: Any) -> Masked:
    """Return the function of a block mask; where its lists differ from the function, one that also reads the lists."""
    mask_mod: Mod | None = block_mask.mask_mod
    if _is_for_any_length(block_mask):
        return Masked(mask_mod)
    rows, columns = block_mask.BLOCK_SIZE
    n_q, n_kv = block_mask.seq_lengths
    tiles_q, tiles_kv = -(-n_q // rows), -(-n_kv // columns)
    partial = _dense(block_mask.kv_num_blocks, block_mask.kv_indices, tiles_q, tiles_kv)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, tiles_q, tiles_kv)
    listed = partial | full
    if mask_mod is not None and _agree(mask_mod, listed, full, (rows, columns), (n_q, n_kv)):
        return Masked(mask_mod)
    by_b, by_h = int(listed.shape[0] > 1), int(listed.shape[1] > 1)

    def in_blocks(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        at = (b if by_b else 0, h if by_h else 0, q_idx // rows, kv_idx // columns)
        inside = full[at] if mask_mod is None else full[at] | mask_mod(b, h, q_idx, kv_idx)
        return listed[at] & inside

    return Masked(in_blocks, (listed.shape[0], listed.shape[1]))


def _dense(counts: torch.Tensor, indices: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a list of blocks as bool [B, H, rows, columns]. Raise ValueError if it lacks rows, or names blocks beyond
    the columns."""
    if indices.shape[-2] < rows:
        raise ValueError(
            f"flex_attention: block_mask lists {indices.shape[-2]} rows of blocks; expected {rows}, by its lengths"
        )
    at = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    if bool((at & ((indices < 0) | (indices >= columns))).any()):
        raise ValueError(
            f"flex_attention: block_mask lists blocks beyond the last; expected numbers from 0 to {columns - 1}, "
            "by its lengths"
        )
    made = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    made.scatter_(-1, torch.where(at, indices, columns).long(), True)
    return made[:, :, :rows, :columns]


def _agree(
    mask_mod: Mod, listed: torch.Tensor, full: torch.Tensor, block: tuple[int, int], lengths: tuple[int, int]
) -> bool:
    """True if the lists hide nothing that the function shows, and the full blocks show nothing that it hides."""
    (rows, columns), (n_q, n_kv), device = block, lengths, listed.device
    each = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    each = torch.vmap(torch.vmap(each, (None, 0, None, None)), (0, None, None, None))
    b, h = (torch.arange(n, device=device, dtype=torch.int32) for n in listed.shape[:2])
    kv = torch.arange(n_kv, device=device, dtype=torch.int32)
    step = max(1, CHUNK // max(1, n_kv * rows * len(b) * len(h))) * rows
    for start in range(0, n_q, step):
        q = torch.arange(start, min(start + step, n_q), device=device, dtype=torch.int32)
        seen = each(b, h, q, kv)
        span = slice(start // rows, -(-(start + len(q)) // rows))
        in_lists, in_full = (
            x[:, :, span].repeat_interleave(rows, 2)[:, :, : len(q)].repeat_interleave(columns, 3)[..., :n_kv]
            for x in (listed, full)
        )
        if bool((seen & ~in_lists).any()) or bool((in_full & ~seen).any()):
            return False
    return True
