"""The rule `names`: the symbols of expressions, and the names of values."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from typing import Any

from attngen.ir import Kernel, Module, Op, tile
from attngen.ir.dims import AXIS_DIM, AXIS_EXTENT, COLUMN_DIM, PADDED, SPLIT_DIM, WHOLE
from attngen.ir.expr import cdiv, floordiv, mod, symbol_names
from attngen.ir.expr_text import to_text
from attngen.ir.grid import REVERSED_GROUP, SPLIT_SYMBOLS
from attngen.ir.names import ROW_AXES
from attngen.verify.types import POSITIONS, dimensions

CONSTANTS = {"LOG2E", "LN2"}


# Names in the printed kernel that are not values of the IR. Its other names, of helper functions and of variables for
# its own use, start with an underscore, as no value may.
RESERVED = {
    *POSITIONS,
    *CONSTANTS,
    *(f"{axis}_{part}" for axis in ROW_AXES for part in ("ahead", "at", "off", "rows", "stop", "tile", "tiles")),
    *(f"{axis}_start" for axis in SPLIT_DIM),
    *PADDED.values(),
    *COLUMN_DIM,
    *SPLIT_DIM,
    *WHOLE,
    *("dtype", "float", "pid", "tl", "triton", "at", "BLOCK", "UNIT", "DROPOUT", "TMA", "CONVERTS", "OVERLAPS"),
    *("first_head", "q_next", "keep_mask"),
}
TILES = {*(AXIS_DIM[axis] for axis in ROW_AXES), *WHOLE}


def names(module: Module, kernel: Kernel) -> Iterator[str]:
    """Each symbol of an expression is an operand, a scalar of the kernel, a position or a constant. No value has a
    reserved name."""
    scalars = {
        op.name
        for op in kernel.ops()
        if isinstance(
            op,
            (
                tile.Arg,
                tile.CountTiles,
                tile.Gather,
                tile.CacheLength,
                tile.Load,
                tile.Map,
                tile.ListPosition,
                tile.Reduce,
            ),
        )
        and not op.results()[""].dims
    }
    divisors = {i.name for i in module.inputs if i.least is not None and i.least > 0}
    scalars |= {*SPLIT_SYMBOLS} if kernel.kv_split else set()
    for a in kernel.grid:
        widths = {AXIS_EXTENT[a.var]} if a.var in SPLIT_DIM else set()
        yield from _unknown(f"the grid axis {a.var}", a.extent, scalars | {"B"} | TILES | widths)
    for op in kernel.ops():
        known, uses = scalars | _positions(kernel, op), getattr(op, "uses", ())
        for symbol_name, ref in uses:
            if symbol_name != ref and (symbol_name in known | POSITIONS or not kernel.type_of(ref).dims):
                yield f"%{op.name} names %{ref} `{symbol_name}`; expected the same name of a scalar in all expressions"
        for e in op.expressions:
            yield from _unknown(f"%{op.name}", e, known | {s for s, _ in uses})
            for quotient in e.atoms(floordiv, cdiv, mod):
                if not (quotient.args[1].is_positive or str(quotient.args[1]) in divisors):
                    yield f"%{op.name}: `{to_text(quotient)}` divides by a number that is not known to be positive"
    steps = sum(isinstance(op, tile.SoftmaxStep) for op in kernel.ops())
    if steps > 1:
        yield f"{steps} softmax steps; expected one"
    taken = RESERVED | kernel.traits.variables - set(AXIS_DIM) | (set(tile.SoftmaxStep.FIELDS) if steps else set())
    for op in kernel.ops():
        private = op.name.startswith("_") and op.results()
        plain = op.name.isascii() and op.name.isidentifier() and not private
        if not plain or keyword.iskeyword(op.name) or op.name in taken or op.name.startswith("stride_"):
            yield f"%{op.name} is a name that the printed kernel needs for itself"


def _positions(kernel: Kernel, op: Op) -> set[str]:
    """The constants, sizes and positions that an op's expressions may name: those of the grid, the program tile and the
    loops around the op, and, depending on its kind, the rows and columns that it accesses."""
    known = CONSTANTS | {a.var for a in kernel.grid} - set(AXIS_DIM) | TILES
    known |= {REVERSED_GROUP for a in kernel.grid if a.reversed_group}
    columns = {a.var for a in kernel.grid if a.var in SPLIT_DIM}
    axes = set() if kernel.traits.visits_all_tiles else {kernel.program_axis}
    known |= {f"{axis}_start" for axis in axes | columns}
    known |= {f"_{axis}_row" for axis in axes if kernel.traits.places}
    for loop in kernel.loops_around(kernel.graph.nodes[op.name]["block"]):
        known |= {f"{name}_start" if name in AXIS_DIM else name for name in loop.variables}
        known |= {f"_{loop.var}_row"} if kernel.traits.places and loop.var in AXIS_DIM else set()
        axes |= {loop.var} & set(AXIS_DIM)
    if isinstance(op, (tile.Gather, tile.Map, tile.Mask, tile.Scatter)):
        indexed = AXIS_DIM if isinstance(op, tile.Mask) else axes
        known |= {f"{a}_idx" for a in indexed if AXIS_DIM[a] in dimensions(kernel, op)}
        known |= _facts_rows(kernel, op) if isinstance(op, tile.Mask) else set()
    elif isinstance(op, (tile.Base, tile.CountTiles, tile.CacheLength, tile.Load, tile.Store)):
        known |= axes | columns | {*COLUMN_DIM, AXIS_EXTENT[kernel.program_axis]}
    return known


def _facts_rows(kernel: Kernel, op: tile.Mask) -> set[str]:
    """The values with one number for each row of the program tile, which facts may name."""
    names = {str(s) for fact in op.known for e in fact[1:] for s in e.free_symbols} & kernel.graph.nodes.keys()
    return {
        n
        for n in names
        if isinstance(kernel.op(n), (tile.Gather, tile.Load))
        and kernel.type_of(n).dims == (AXIS_DIM[kernel.program_axis],)
    }


def _unknown(where: str, e: Any, known: set[str]) -> Iterator[str]:
    for name in symbol_names(e):
        if name not in known:
            yield f"{where}: `{to_text(e)}` has `{name}`, which is no operand, scalar or position"
