"""The rule of programs that share the columns of a sum: together they have each once, and what is the same for all
is stored once."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.heuristics import LEAST_SHARED
from attngen.ir.expr import cdiv, conjuncts, symbol, to_text
from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.ops import (
    AXIS_EXTENT,
    COLUMN_DIM,
    OWN,
    WHOLE,
    Load,
    OrderedAccumulate,
    OrderedAdd,
    Scatter,
    Store,
    axis_of,
)
from attngen.tiles.sizes import tile_width


def columns(module: Module, kernel: Kernel) -> Iterator[str]:
    """One axis of the grid, behind that of tiles, has a program for each part of the columns, whose size a schedule row
    gives.

    Each program has its own part of what it stores, or else the first one alone stores it. Products over columns are
    over all of them. What is part of a loaded tile is loaded from where that is. Columns that a part may lack are
    checked.
    """
    axes = [axis for axis in kernel.grid if axis.var in OWN]
    shared = kernel.shared_columns
    if shared is None:
        found = {axis_of(e) for op in kernel.ops() for e in op.expressions} & OWN.keys()
        if found or any(isinstance(op, Store) and op.first_along for op in kernel.ops()):
            yield "it takes a part of columns, or stores something alone, and no axis of the grid is of such parts"
        yield from (
            f"{config.device}: COLUMNS={config.columns}, and its programs do not share columns"
            for config in _rows(module, kernel)
            if config.columns
        )
        return
    own = OWN[shared.var]
    expected = cdiv(symbol(WHOLE[own]), symbol(own))
    if len(axes) > 1 or shared.extent != expected or kernel.grid[0] is shared:
        have = ", ".join(axis.var for axis in axes)
        yield f"its grid has {have} in {to_text(shared.extent)}; expected one such axis, behind tiles, in {to_text(expected)}"
    for op in kernel.ops():
        if getattr(op, "over", "") == own:
            yield f"%{op.name} sums {own} columns alone; expected all of {WHOLE[own]}"
        if isinstance(op, Scatter) and (symbol(f"{shared.var}_start") < 1) not in conjuncts(op.where):
            yield f"%{op.name} writes what all programs along {shared.var} do; expected `{shared.var}_start < 1` in its condition"
        if isinstance(op, (OrderedAdd, OrderedAccumulate)):
            yield f"%{op.name} adds to what others store, in turns that parts of columns do not have"
        elif (
            isinstance(op, Store)
            and op.first_along
            and (op.first_along != shared.var or symbol(shared.var) in op.dst.index)
        ):
            yield f"%{op.name} is stored alone along {op.first_along}; expected {shared.var}, and none of its columns"
        if isinstance(op, Load) and op.columns_of and not _is_part(kernel, op):
            yield f"%{op.name} is no part of %{op.columns_of}; expected its columns {shared.var}, at the same rows of the same tensor"
    yield from _fitting(module, kernel, own)


def _is_part(kernel: Kernel, op: Load) -> bool:
    whole = kernel.op(op.columns_of or "")
    axis = axis_of(op.src.index[-1])
    letters = {
        symbol(axis): symbol(next((letter for letter, dim in COLUMN_DIM.items() if dim == AXIS_EXTENT.get(axis)), axis))
    }
    index = tuple(e.xreplace(letters) for e in op.src.index)
    rows = {check for check in op.check if check[0] not in OWN}
    return (
        isinstance(whole, Load)
        and axis in OWN
        and (whole.src.tensor, whole.src.index) == (op.src.tensor, index)
        and rows == {check for check in whole.check if check[0] not in COLUMN_DIM}
        and kernel.graph.nodes[whole.name]["block"] == kernel.graph.nodes[op.name]["block"]
    )


def _fitting(module: Module, kernel: Kernel, own: str) -> Iterator[str]:
    """Rows give a part that is a power of two; where it does not divide the columns, accesses check these."""
    axis, width = next(letter for letter, dim in OWN.items() if dim == own), module.widths[WHOLE[own]]
    accesses = [
        op
        for op in kernel.ops()
        if isinstance(op, (Load, Store)) and axis in (op.dst if isinstance(op, Store) else op.src).axes()
    ]
    unchecked = [op for op in accesses if (axis, "always") not in op.check]
    for config in _rows(module, kernel):
        whole = tile_width(width)
        if config.columns & (config.columns - 1) or not min(LEAST_SHARED, whole) <= config.columns <= whole:
            yield f"{config.device}: COLUMNS={config.columns}; expected a power of two from {LEAST_SHARED} to {whole}"
        elif unchecked and width % config.columns:
            yield (
                f"%{unchecked[0].name} does not check {axis}, and {config.device} has "
                f"COLUMNS={config.columns}, which do not divide {width}"
            )


def _rows(module: Module, kernel: Kernel) -> tuple[Config, ...]:
    return () if kernel.backend else module.configs(kernel.name)
