"""classify-tiles: derive from the mask's expression which tiles along the loop are empty, partial or full.

before:  %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) ...
after:   the same, with tiles(visible start; full start; full end; visible end), in tiles, in closed form

The mask is brought to a union of conjunctions. Each linear inequality is bounded over the box (this program's tile) x
(tile j of the loop): its least value says which tiles may hold something visible, its greatest value which tiles hold
nothing hidden. A union, such as a window or the first tokens, gives several runs of tiles, with four bounds each. Runs
are in rising order, and no tile is in two. A run that has all tiles of another one, or none, is one run with it.

A condition on data, such as a tensor of booleans, is bounded by what the mask knows of it (`known`). With nothing
known, its tiles are partial. If `known` has a value for each row of the program's own tile, its least or greatest over
the rows becomes a scalar:

after:   %first_least = load %FIRST[b, q_start] : i32[]                     # of one that rises along the rows
after:   %first_least = gather %FIRST[b, 0] : i32[]                         # the same, where tiles pack the queries of several heads
after:   %first_rows = map expr(select(q_idx < Nq, first, 2147483647)) ... ; %first_least = reduce min %first_rows over(BLOCK_Q)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.expr import select, symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Access, Gather, Load, Loop, Map, Op, Reduce, Type
from attngen.tiles.intervals import GREATEST, greatest, last_row, least
from attngen.tiles.ranges import is_of_packed, scene_of, tile_ranges
from attngen.transforms.base import Pass


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
    """Ops for the least and greatest value over the valid rows of the own tile. Of rising values these are the first
    and the last; where tiles pack the queries of several heads, those of all queries."""
    own = kernel.program_axis
    ends = {least: symbol(f"{own}_start"), greatest: last_row(own)}
    of_all = {least: sympy.Integer(0), greatest: symbol("queries") - 1}
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
            elif name in rising and isinstance(load, Gather) and is_of_packed(load):
                at = of_all[which]
                uses = tuple((str(s), str(s)) for s in sorted(at.free_symbols, key=str))
                yield Gather(str(made), Access(load.src.tensor, (*load.src.index[:-1], at)), uses, Type("i32"))
            else:
                rows = Map(
                    f"{made}_rows",
                    select(inside, symbol(name), sympy.Integer(other)),
                    ((name, name),),
                    Type("i32", (AXIS_DIM[own],)),
                )
                yield rows
                yield Reduce(str(made), rows.name, op, AXIS_DIM[own], Type("i32"))
