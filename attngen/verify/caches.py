"""Warp-specialized kernels that read a KV cache: the sources of tiles, and the rule `zero-out-of-bounds` about rows
past the end of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attngen.ir import AXIS_DIM, SIDES, Kernel, Module, only, pipe, symbol, tile


def of_all_columns(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index of a whole tile, given its own index or that of the left or right half of its columns."""
    return tuple(symbol("d_v") if str(e) in SIDES else e for e in index)


def places(tensor: str, index: tuple[Any, ...], in_halves: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the place of a tile as (tensor, index); with `in_halves`, the places of its left and right halves."""
    halves = [tuple(symbol(side) if str(e) == "d_v" else e for e in index) for side in SIDES]
    yield from ((tensor, half) for half in halves) if in_halves and index != halves[0] else [(tensor, index)]


def page_of(kernel: Kernel, op: pipe.ProducerLoad | tile.Load) -> Any:
    """The tensor, index and condition of the read of a tile's page number, for the tile's first row; None if the cache
    is not paged."""
    ref = op.page if isinstance(op, pipe.ProducerLoad) else op.pages
    if ref is None:
        return None
    page, of_row = kernel.op(ref), {symbol("kv_idx"): symbol("kv_start")}
    return (
        (page.src.tensor, tuple(e.xreplace(of_row) for e in page.src.index), page.where.xreplace(of_row))
        if isinstance(page, tile.Gather)
        else ref
    )


def zero_out_of_bounds(module: Module, kernel: Kernel) -> Iterator[str]:
    """The rows of a cached tile past the end of the sequence are zeroed before weights are multiplied by them, since
    they may hold NaN. The warp group that zeroes rows of a pipeline's tiles does so for all tiles that it reads."""
    if not kernel.traits.reads_cache:
        return
    zeroing = list(only(kernel.ops(), pipe.ZeroOutOfBounds))
    zeroed = {wait.pipeline: op for op in zeroing if (wait := kernel.traits.wait_of(op.value))}
    for warp_group in kernel.warp_groups:
        ops = list(kernel.within(warp_group.name))
        mine = {wait.pipeline for op in zeroing if op in ops and (wait := kernel.traits.wait_of(op.value))}
        for wait in (op for op in only(ops, pipe.ConsumerWait) if op.pipeline in mine):
            if wait.name not in {op.value for op in zeroing}:
                yield f"@{warp_group.name} zeroes rows of tiles of %{wait.pipeline}, and not those of %{wait.name}"
    for op in kernel.ops():
        wait = kernel.traits.wait_of(op.b) if isinstance(op, pipe.Wgmma) else None
        if not isinstance(op, pipe.Wgmma) or wait is None or op.over != AXIS_DIM[kernel.loop_axis]:
            continue
        zero = zeroed.get(wait.pipeline)
        product = f"%{op.name} multiplies weights by a tile of %{wait.pipeline}"
        if zero is None:
            yield f"{product}, and nothing zeroes its rows past the end of the sequence"
            continue
        ops = list(kernel.block_of(zero).ops)
        if op in ops and ops.index(op) < ops.index(zero):
            yield f"{product}, whose rows past the end are zeroed later"
