"""classify-tiles: from the mask's expression, which tiles along the loop are empty, partial or full.

before:  %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) ...
after:   the same, with tiles(visible start; full start; full end; visible end), in tiles, in closed form

The mask is a union of conjunctions of literals; each linear inequality is bounded over the box of (this program's tile) x
(tile j of the loop): its least value says where tiles may hold something visible, its greatest where they hold nothing hidden.
A union (a window, or the first tokens) gives several runs, four bounds each, in rising order, no tile in two. A literal that
cannot be solved (a tensor of booleans, say) is bounded by what the mask says of it (`known`); with nothing known, its tiles
are partial. What `known` says of each row of the own tile becomes a scalar, the least or greatest over the rows:

after:   %first_least = load %FIRST[b, q_start] : i32[]                     # of one that rises along the rows
after:   %first_rows = map expr(select(q_idx < Nq, first, 2147483647)) ... ; %first_least = reduce min %first_rows over(BLOCK_Q)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.bounds.intervals import GREATEST, greatest, last_row, least
from attngen.bounds.ranges import scene_of, tile_ranges
from attngen.ir.expr import select, symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Access, Load, Loop, Map, Op, Reduce, Type
from attngen.passes.base import Pass


@dataclass(frozen=True)
class ClassifyTiles(Pass):
    name: ClassVar[str] = "classify-tiles"
    phase: ClassVar[str] = "logical"

    def run(self, module: Module) -> Module:
        rising = {name for d in module.derived for name in d.rising}
        return module.map_kernels(lambda kernel: _classified(kernel, rising))


def _classified(kernel: Kernel, rising: set[str]) -> Kernel:
    def change(_: str, op: Op) -> list[Op]:
        if not isinstance(op, Loop) or op.cls != "unknown":
            return [op]
        tiles = tile_ranges(kernel, op.body)
        used = {str(s) for e in tiles for s in e.free_symbols}
        return [*_extreme_rows(kernel, op.body, used, rising), replace(op, tiles=tiles)]

    return kernel.rewrite(change)


def _extreme_rows(kernel: Kernel, body: str, used: set[str], rising: set[str]) -> Iterator[Op]:
    """The least and greatest over the valid rows of the own tile of values that bounds name: of rising ones the first and the last."""
    own = kernel.own_axis
    ends = {least: symbol(f"{own}_start"), greatest: last_row(own)}
    inside = symbol(f"{own}_idx") < symbol(AXIS_EXTENT[own])
    for name in sorted(scene_of(kernel, body).rows):
        load = kernel.op(name)
        for which, op, other in ((least, "min", GREATEST), (greatest, "max", -GREATEST)):
            made = which(name)
            if str(made) not in used or str(made) in kernel.graph:
                continue
            if name in rising and isinstance(load, Load):
                index = tuple(ends[which] if str(e) == own else e for e in load.src.index)
                yield Load(str(made), Access(load.src.tensor, index), Type("i32"))
            else:
                rows = Map(
                    f"{made}_rows", select(inside, symbol(name), sympy.Integer(other)), ((name, name),), Type("i32", (AXIS_DIM[own],))
                )
                yield rows
                yield Reduce(str(made), rows.name, op, AXIS_DIM[own], Type("i32"))
