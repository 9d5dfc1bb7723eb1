"""The rule `split-d`: programs that split the columns of a wide sum have each column once, and store once the results
that are the same for all of them."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.heuristics import LEAST_SHARED
from attngen.ir import AXIS_EXTENT, COLUMN_DIM, SPLIT_DIM, WHOLE, Config, Kernel, Module, axis_of, only, tile
from attngen.ir.expr import cdiv, conjuncts, symbol
from attngen.ir.expr_text import to_text
from attngen.tiles.sizes import tile_width


def split_d(module: Module, kernel: Kernel) -> Iterator[str]:
    """One axis of the grid, after the axis of tiles, has a program for each part of the columns (split-D). A config
    gives the size of a part: `BLOCK_D` in its text, D_QK_split or D_V_split in types.

    Each program stores its own columns, and the first one stores the results that all of them compute. Products sum
    over all columns. The part of a loaded tile is loaded from the rows of that tile. Columns that a part may lack are
    checked."""
    axes = [axis for axis in kernel.grid if axis.var in SPLIT_DIM]
    split = kernel.traits.split_d_axis
    if split is None:
        found = {axis_of(e) for op in kernel.ops() for e in op.expressions} & SPLIT_DIM.keys()
        if found or any(op.first_along for op in only(kernel.ops(), tile.Store)):
            yield "it has a part of the columns, or a store of the first program only, and no grid axis splits columns"
        yield from (
            f"{config.device}: BLOCK_D={config.columns}, and its programs do not split columns"
            for config in _configs(module, kernel)
            if config.columns
        )
        return
    own = SPLIT_DIM[split.var]
    expected = cdiv(symbol(WHOLE[own]), symbol(own))
    if len(axes) > 1 or split.extent != expected or kernel.grid[0] is split:
        have = ", ".join(axis.var for axis in axes)
        extent = to_text(split.extent)
        yield f"its grid has {have} in {extent}; expected one such axis, after tiles, in {to_text(expected)}"
    for op in kernel.ops():
        if getattr(op, "over", "") == own:
            yield f"%{op.name} sums {own} columns only; expected all of {WHOLE[own]}"
        if isinstance(op, tile.Scatter) and (symbol(f"{split.var}_start") < 1) not in conjuncts(op.where):
            condition = f"`{split.var}_start < 1` in its condition"
            yield f"%{op.name} writes what all programs along {split.var} write; expected {condition}"
        if isinstance(op, (tile.OrderedAdd, tile.OrderedAccumulate)):
            yield f"%{op.name} adds in an order, which programs that split columns do not have"
        elif (
            isinstance(op, tile.Store)
            and op.first_along
            and (op.first_along != split.var or symbol(split.var) in op.dst.index)
        ):
            yield f"%{op.name} has first_along({op.first_along}); expected {split.var}, and no index of its columns"
        if isinstance(op, tile.Load) and op.columns_of and not _is_part(kernel, op):
            part = f"its columns {split.var}, at the same rows of the same tensor"
            yield f"%{op.name} is no part of %{op.columns_of}; expected {part}"
    yield from _sizes(module, kernel, own)


def _is_part(kernel: Kernel, op: tile.Load) -> bool:
    """True if a load has the program's columns of the tile that `columns_of` names, with the same checks of rows."""
    whole = kernel.op(op.columns_of or "")
    axis = axis_of(op.src.index[-1])
    letters = {
        symbol(axis): symbol(next((letter for letter, dim in COLUMN_DIM.items() if dim == AXIS_EXTENT.get(axis)), axis))
    }
    index = tuple(e.xreplace(letters) for e in op.src.index)
    rows = {check for check in op.check if check[0] not in SPLIT_DIM}
    return (
        isinstance(whole, tile.Load)
        and axis in SPLIT_DIM
        and (whole.src.tensor, whole.src.index) == (op.src.tensor, index)
        and rows == {check for check in whole.check if check[0] not in COLUMN_DIM}
        and kernel.graph.nodes[whole.name]["block"] == kernel.graph.nodes[op.name]["block"]
    )


def _sizes(module: Module, kernel: Kernel, own: str) -> Iterator[str]:
    """Configs give parts that are powers of two. If a part does not divide the columns, accesses check columns."""
    axis, width = next(letter for letter, dim in SPLIT_DIM.items() if dim == own), module.widths[WHOLE[own]]
    accesses = [
        op
        for op in only(kernel.ops(), tile.Load, tile.Store)
        if axis in (op.dst if isinstance(op, tile.Store) else op.src).axes()
    ]
    unchecked = [op for op in accesses if (axis, "always") not in op.check]
    for config in _configs(module, kernel):
        whole = tile_width(width)
        if config.columns & (config.columns - 1) or not min(LEAST_SHARED, whole) <= config.columns <= whole:
            yield f"{config.device}: BLOCK_D={config.columns}; expected a power of two from {LEAST_SHARED} to {whole}"
        elif unchecked and width % config.columns:
            yield (
                f"%{unchecked[0].name} does not check {axis}, and {config.device} has "
                f"BLOCK_D={config.columns}, which do not divide {width}"
            )


def _configs(module: Module, kernel: Kernel) -> tuple[Config, ...]:
    return () if kernel.backend else module.configs(kernel.name)
