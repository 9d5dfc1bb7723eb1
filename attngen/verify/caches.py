"""Rules of divided kernels over a cache of keys: where tiles come from, and what lies past the end of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attngen.ir.expr import symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import AXIS_DIM, SIDES, Gather, Load
from attngen.ir.pipe import ConsumerWait, ProducerLoad, Wgmma, ZeroOutOfBounds


def of_all_columns(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The place of a tile of which an index has the left or the right half of the columns."""
    return tuple(symbol("d_v") if str(e) in SIDES else e for e in index)


def places(tensor: str, index: tuple[Any, ...], apart: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The place of a tile, or, where halves of the columns are stored apart, those of the halves."""
    halves = [tuple(symbol(side) if str(e) == "d_v" else e for e in index) for side in SIDES]
    yield from ((tensor, half) for half in halves) if apart and index != halves[0] else [(tensor, index)]


def page_of(kernel: Kernel, op: ProducerLoad | Load) -> Any:
    """Of a tile in a page, where its number is read, and under which condition: at the tile's first row. None where
    there are no pages."""
    ref = op.page if isinstance(op, ProducerLoad) else op.pages
    if ref is None:
        return None
    page, of_row = kernel.op(ref), {symbol("kv_idx"): symbol("kv_start")}
    return (
        (page.src.tensor, tuple(e.xreplace(of_row) for e in page.src.index), page.where.xreplace(of_row))
        if isinstance(page, Gather)
        else ref
    )


def ends(module: Module, kernel: Kernel) -> Iterator[str]:
    """Of a cache, rows of keys past the end are cleared by who multiplies scores, before weights are multiplied by
    them."""
    if not kernel.reads_cache:
        return
    clears = [op for op in kernel.ops() if isinstance(op, ZeroOutOfBounds)]
    cleared = {take.pipeline: op for op in clears if (take := kernel.take_of(op.value))}
    for role in kernel.warp_groups:
        ops = list(kernel.within(role.name))
        mine = {take.pipeline for op in clears if op in ops and (take := kernel.take_of(op.value))}
        for taken in (op for op in ops if isinstance(op, ConsumerWait) and op.pipeline in mine):
            if taken.name not in {op.value for op in clears}:
                yield f"@{role.name} clears rows of tiles of %{taken.pipeline}, and not those of %{taken.name}"
    for op in kernel.ops():
        take = kernel.take_of(op.b) if isinstance(op, Wgmma) else None
        if not isinstance(op, Wgmma) or take is None or op.over != AXIS_DIM[kernel.loop_axis]:
            continue
        clear = cleared.get(take.pipeline)
        if clear is None:
            yield f"%{op.name} multiplies weights by a tile of %{take.pipeline}, and nothing clears rows past the end of the sequence"
            continue
        ops = list(kernel.block_of(clear).ops)
        if op in ops and ops.index(op) < ops.index(clear):
            yield f"%{op.name} multiplies weights by a tile of %{take.pipeline}, of which rows past the end are cleared later"
