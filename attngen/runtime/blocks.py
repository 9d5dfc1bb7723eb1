"""Lists of visible blocks of scores. Kernels visit the blocks of a list one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from attngen.runtime.checks import check_input, kind

_MOST = 64  # number of sizes whose plans are kept; one more clears them
_KEPT: dict[Any, dict[int, Any]] = {}


def kept_plan(make: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, sizes: tuple[int, ...]) -> Any:
    """Return the plan of a mask that reads no data and depends only on `sizes`: made once for each device and stream.

    A plan that is made while a graph is captured, or while torch.compile traces, belongs to the graph and is not kept.
    """
    if type(q) is not torch.Tensor and type(q) is not torch.nn.Parameter or torch.compiler.is_compiling():
        return make(q, k)
    plans = _KEPT.get((make, q.device, sizes), {})
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        # Existing plans are complete, because a capture starts with a wait for the device.
        return next(iter(plans.values()), None) or make(q, k)
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    if stream not in plans:
        if len(_KEPT) >= _MOST:
            _KEPT.clear()
        _KEPT[make, q.device, sizes] = plans = {**plans, stream: make(q, k)}
    return plans[stream]


class BlockPlan(NamedTuple):
    """The visible blocks per row and per column of the block mask [B or 1, Hq or 1, Tq, Tk]. All tensors are int32.

    `kv_list` [B or 1, Hq or 1, Tq, Tk] has a list for each row of blocks: first the indices of visible blocks, in
    rising order, then the others. `kv_rank` [..., Tq, Tk + 1] has for each block the number of visible blocks before it
    in its row. `q_list` and `q_rank` are the same for the transposed mask.
    """

    kv_rank: torch.Tensor
    kv_list: torch.Tensor
    q_rank: torch.Tensor
    q_list: torch.Tensor


def transposed(mask: torch.Tensor) -> torch.Tensor:
    """Return a block mask [B, H, Tq, Tk] as [B, H, Tk, Tq]."""
    return mask.transpose(2, 3).contiguous()


def list_blocks(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ranks, lists) of every row of a block mask [B, H, Tq, Tk], as in BlockPlan."""
    rank = torch.nn.functional.pad(mask.cumsum(3, dtype=torch.int32), (1, 0))
    listed = torch.sort(mask, dim=3, descending=True, stable=True).indices.to(torch.int32)
    return rank.contiguous(), listed.contiguous()


def list_partial_blocks(seen: torch.Tensor, full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (full ranks, ranks, lists) of every row. A list has first the full blocks, then the partial ones; a rank
    is a position in it."""
    full_rank = torch.nn.functional.pad(full.cumsum(3, dtype=torch.int32), (1, 0))
    rank = torch.nn.functional.pad((seen & ~full).cumsum(3, dtype=torch.int32), (1, 0)) + full_rank[..., -1:]
    listed = torch.sort(seen.to(torch.int8) + full, dim=3, descending=True, stable=True).indices.to(torch.int32)
    return full_rank.contiguous(), rank.contiguous(), listed.contiguous()


def seen_and_full(count: torch.Tensor, n_q: int, n_kv: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two masks [B, H, Tq, Tk]: blocks with a visible pair, and full blocks, in which all pairs are visible and
    in bounds.

    `count` [B, H, Tq, strips] has the number of visible pairs in each strip of a block.
    """
    columns = -(-n_kv // block)
    count = count.unflatten(3, (columns, count.shape[3] // max(columns, 1))).sum(4) if columns else count
    inside = torch.arange(count.shape[2], device=count.device) < n_q // block
    return count > 0, (count == block * block) & inside[:, None]


def check_block_mask(block_mask: torch.Tensor) -> torch.Tensor:
    """Return a block mask as [B or 1, Hq or 1, Tq, Tk].

    Raises:
        ValueError or TypeError: one sentence that says what the mask is and what was expected.
    """
    if not isinstance(block_mask, torch.Tensor) or block_mask.layout != torch.strided or block_mask.dtype != torch.bool:
        given = block_mask.dtype if isinstance(block_mask, torch.Tensor) else kind(block_mask)
        raise TypeError(
            f"attention: block_mask is a {given}; expected a dense torch.bool tensor of blocks, or what attention.plan "
            "made of one"
        )
    if not 2 <= block_mask.dim() <= 4:
        raise ValueError(
            f"attention: block_mask has shape {list(block_mask.shape)}; expected [B, Hq, Tq, Tk], or what broadcasts "
            "to it"
        )
    return block_mask.reshape((1,) * (4 - block_mask.dim()) + tuple(block_mask.shape))


def blocks_of_call(
    block_mask: torch.Tensor,
    q_chunks: torch.Tensor,
    kv_chunks: torch.Tensor,
    n_q: int,
    n_kv: int,
    chunk: int,
    block: int,
) -> torch.Tensor:
    """Return the part of a sequence's block mask that a call with chunks of the sequence has, [B or 1, Hq or 1, Tq, Tk]
    with the blocks of the call.

    block_mask: torch.bool [Tq, Tk] of the whole sequence, with up to two leading dimensions that broadcast to B and Hq.
    q_chunks, kv_chunks: where each chunk of `chunk` rows starts. n_q, n_kv: rows of the call. block: rows of a block.

    Raises:
        ValueError or TypeError: one sentence that says what the mask is and what was expected.
    """
    mask = check_block_mask(block_mask)
    for dim, starts, rows in ((2, q_chunks, n_q), (3, kv_chunks, n_kv)):
        row = torch.arange(0, rows, block, device=starts.device)
        at = (starts[row // chunk] + row % chunk) // block
        mask = mask.index_select(dim, at.to(mask.device))
    return mask


def check_blocks(q: torch.Tensor, k: torch.Tensor, blocks: BlockPlan, block: int) -> None:
    """Raise ValueError, in one sentence, if lists of blocks do not have the shapes for this call."""
    rows, columns = -(-q.shape[2] // block), -(-k.shape[2] // block)
    shape = list(blocks.kv_list.shape)
    if shape[2:] != [rows, columns] or shape[0] not in (1, q.shape[0]) or shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"attention: block_mask has shape {shape}; expected {[q.shape[0], q.shape[1], rows, columns]}, or what "
            f"broadcasts to it: one element for each {block} x {block} scores"
        )
    shapes = ([rows, columns + 1], [rows, columns], [columns, rows + 1], [columns, rows])
    for name, x, last in zip(blocks._fields, blocks, shapes):
        if x.device != q.device:
            raise ValueError(f"attention: block_mask is on {x.device} and q on {q.device}; expected one device")
        if x.dtype != torch.int32 or list(x.shape) != shape[:2] + last or not x.is_contiguous():
            raise ValueError(
                f"attention: {name} of the BlockPlan is not what attention.plan makes; expected its tensors unchanged"
            )


def check_plan(q: torch.Tensor, k: torch.Tensor, plan: Any, lists: Sequence[Any], block: int, heads: list[int]) -> None:
    """Raise ValueError or TypeError, in one sentence, if a plan's lists do not fit a call.

    lists: (name, names of its last two dimensions) of each list: numbers of blocks of queries (Tq) or of keys (Tk), or
    one more (Tq1, Tk1). heads: the lists' lengths along B and H.
    """
    if (plan.n_q, plan.n_kv) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"attention: plan is of {plan.n_q} queries and {plan.n_kv} keys, the call of {q.shape[2]} and "
            f"{k.shape[2]}; expected what attention.plan makes of these q and k"
        )
    rows, columns = -(-q.shape[2] // block), -(-k.shape[2] // block)
    lengths = {"Tq": rows, "Tq1": rows + 1, "Tk": columns, "Tk1": columns + 1}
    for name, dims in lists:
        x = getattr(plan, name)
        check_input(
            q, f"plan.{name}", x, torch.int32, [*heads, *(lengths[d] for d in dims)], "what attention.plan makes"
        )
        if not x.is_contiguous():
            raise ValueError(f"attention: plan.{name} is not contiguous; expected what attention.plan makes")
