"""classify-tiles: derive from the mask's expression which tiles along the loop are empty, partial or full.

before:  %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) ...
after:   %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) ... tiles(visible start; full start; full end; visible end)

The four bounds are tile numbers, in closed form. The mask is rewritten as a union of conjunctions. Each linear
inequality is bounded over all pairs of a row of the program tile and a row of tile j of the loop: its least value says
which tiles may have visible pairs, and its greatest value says which tiles have no hidden pair. A union, such as a
window or the first tokens, gives several runs of tiles with four bounds each. Runs are in rising order, and no tile is
in two runs. A run that contains all tiles of another run for some programs and none for the others is merged with it.

A condition on data, such as a tensor of booleans, is bounded by the facts that the mask states about it (`known`).
Without facts its tiles are partial. If a fact has a value for each row of the program tile, the least or greatest value
over the rows becomes a scalar:

values that rise along the rows:
after:   %first_least = load %FIRST[b, q_start] : i32[]
the same, with pack-GQA:
after:   %first_least = gather %FIRST[b, 0] : i32[]
other values:
after:   %first_rows = map expr(select(q_idx < Nq, first, 2147483647)) ...
         %first_least = reduce min %first_rows over(BLOCK_Q)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir import AXIS_DIM, AXIS_EXTENT, Access, Kernel, Module, Op, Type, select, symbol, tile
from attngen.tiles.intervals import GREATEST, greatest, last_row, least
from attngen.tiles.ranges import gathers_per_query, mask_context, tile_ranges
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
        if not isinstance(op, tile.Loop) or op.cls != "unknown":
            return [op]
        tiles = tile_ranges(kernel, op.body)
        used = {str(s) for e in tiles for s in e.free_symbols}
        return [*_extreme_rows(kernel, op.body, used, rising), replace(op, tiles=tiles)]

    return kernel.rewrite(change)


def _extreme_rows(kernel: Kernel, body: str, used: set[str], rising: set[str]) -> Iterator[Op]:
    """Yield the ops that compute the least and greatest value over the valid rows of the program tile.

    Values that rise along the rows have them at the first and last row. With pack-GQA these are the first and last of
    all queries.
    """
    own = kernel.program_axis
    ends = {least: symbol(f"{own}_start"), greatest: last_row(own)}
    of_all = {least: sympy.Integer(0), greatest: symbol("queries") - 1}
    inside = symbol(f"{own}_idx") < symbol(AXIS_EXTENT[own])
    for name in sorted(mask_context(kernel, body).rows):
        load = kernel.op(name)
        for which, op, other in ((least, "min", GREATEST), (greatest, "max", -GREATEST)):
            made = which(name)
            if str(made) not in used or str(made) in kernel.graph:
                continue
            if name in rising and isinstance(load, tile.Load):
                index = tuple(ends[which] if str(e) == own else e for e in load.src.index)
                yield tile.Load(str(made), Access(load.src.tensor, index), Type("i32"))
            elif name in rising and isinstance(load, tile.Gather) and gathers_per_query(load):
                at = of_all[which]
                uses = tuple((str(s), str(s)) for s in sorted(at.free_symbols, key=str))
                yield tile.Gather(str(made), Access(load.src.tensor, (*load.src.index[:-1], at)), uses, Type("i32"))
            else:
                rows = tile.Map(
                    f"{made}_rows",
                    select(inside, symbol(name), sympy.Integer(other)),
                    ((name, name),),
                    Type("i32", (AXIS_DIM[own],)),
                )
                yield rows
                yield tile.Reduce(str(made), rows.name, op, AXIS_DIM[own], Type("i32"))
