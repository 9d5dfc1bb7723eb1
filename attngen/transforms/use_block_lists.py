"""use-block-lists: with block sparsity, loops visit only the tiles of listed blocks, in rising order.

before:  %keys_full = loop kv ranges(0 .. kv_full_end) ...
after:   %KV_RANK_row = base %KV_RANK[b, h, q_start // 128] : ptr[]
         %KV_LIST_row = base %KV_LIST[b, h, q_start // 128] : ptr[]
         %kv_full_end_at = list_position %KV_RANK_row tile(kv_full_end) : i32[]
         %keys_full = loop kv ranges(0 .. kv_full_end_at) ... listed(%KV_LIST_row)

Lists are sorted, so the listed tiles between two bounds have consecutive positions, and the facts proven about the
ranges still hold.

If data determines the blocks, a list has the full blocks first, then the partial ones. One full loop visits the former
and one partial loop the latter, both between the ends of the original ranges. Bounds reduced from one number per row of
a tile are ignored, and the loops run to the end of the list: a block that no row sees is not in it.

after:   %kv_end_full_at = list_position %KV_FULL_RANK_row tile(kv_end) : i32[]
         %keys_full = loop kv ranges(0 .. kv_end_full_at) ... cls(full) listed(%KV_LIST_row)
         %kv_0_at = list_position %KV_RANK_row tile(0) : i32[]
         %kv_end_at = list_position %KV_RANK_row tile(kv_end) : i32[]
         %keys_partial = loop kv ranges(kv_0_at .. kv_end_at) ... cls(partial) listed(%KV_LIST_row)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx
import sympy

from attngen.ir import AXIS_DIM, AXIS_EXTENT, Access, Blocks, Kernel, Module, Op, Type, first_row, only, tile
from attngen.ir.expr import Expr, cdiv, floordiv, symbol
from attngen.ir.names import block_lists
from attngen.ir.prove import prove_le
from attngen.tiles.intervals import with_rows
from attngen.tiles.ranges import rows_of
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class UseBlockLists(Pass):
    name: ClassVar[str] = "use-block-lists"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        blocks = module.blocks
        if blocks is None:
            return module
        return module.map_kernels(lambda kernel: _listed(kernel, blocks) if kernel.traits.dots else kernel)


def _listed(kernel: Kernel, blocks: Blocks) -> Kernel:
    own = kernel.program_axis
    *ranks, listed = block_lists(own, blocks.data)  # lists from data have ranks for the full and for the partial blocks
    made: set[str] = set()
    renamed: dict[str, str] = {}

    def change(_: str, op: Op) -> list[Op]:
        if not isinstance(op, tile.Loop) or op.cls == "all":
            return [op.with_operands(renamed)]
        new: list[Op] = []
        if not made:
            row = symbol(first_row(own, kernel.traits.places))
            index = (symbol("b"), _head(kernel), floordiv(row, sympy.Integer(blocks.size)))
            new += [tile.Base(f"{name}_row", Access(name, index), Type("ptr")) for name in (*ranks, listed)]
            made.add(f"{listed}_row")
        loops = [op]
        if blocks.data:
            group = [loop for loop in kernel.loops if loop.body == op.body]
            if op != group[0]:
                return []
            loops = _by_class(kernel, group)
            renamed.update({f"{loop.name}.{f}": f"{loops[-1].name}.{f}" for loop in group for f, _ in loop.carry})
        for loop in loops:
            rank = ranks[0] if loop.cls == "full" else ranks[-1]
            suffix = "_full_at" if rank != ranks[-1] else "_at"
            ends = (
                e if e == 0 and rank == ranks[0] else _position(e, loop.var, rank, suffix, made, new)
                for pair in loop.ranges
                for e in pair
            )
            new.append(replace(loop, ranges=tuple(zip(ends, ends)), listed=f"{listed}_row"))
        return new

    return kernel.rewrite(change)


def _by_class(kernel: Kernel, group: list[tile.Loop]) -> list[tile.Loop]:
    """Return one full and one partial loop that replace all loops over one body. Each runs over the union of their
    ranges."""

    def at_most(a: Expr, b: Expr) -> bool:
        return prove_le(*(with_rows(kernel.resolve(e), kernel.program_axis, rows_of(kernel)) for e in (a, b)))

    var = group[0].var
    whole = [(sympy.Integer(0), cdiv(symbol(AXIS_EXTENT[var]), symbol(AXIS_DIM[var])))]
    bounds = [pair for loop in reversed(group) for pair in loop.ranges if pair[0] != pair[1]]
    pieces = dict(whole if any(_is_reduced(kernel, e) for pair in bounds for e in pair) else bounds)
    ends = set(pieces.values())
    ranges: list[tuple[Expr, Expr]] = []
    for lo, hi in pieces.items():
        if lo in ends:
            continue
        while hi in pieces:
            hi = pieces[hi]
        before = sum(at_most(other, lo) for _, other in ranges)
        ranges.insert(before, (lo, hi))
    full = replace(
        group[0],
        name=f"{group[0].name.rpartition('_')[0]}_full",
        cls="full",
        ranges=tuple(ranges) or group[0].ranges[:1],
    )
    carried = tuple((f, f"{full.name}.{f}") for f, _ in full.carry)
    return [full, replace(full, name=f"{group[0].name.rpartition('_')[0]}_partial", cls="partial", carry=carried)]


def _is_reduced(kernel: Kernel, e: Expr) -> bool:
    """True if a bound is reduced from one number per row of a tile."""
    used = {str(s) for s in e.free_symbols} & set(kernel.graph)
    return any(isinstance(kernel.op(name), tile.Reduce) for one in used for name in nx.ancestors(kernel.graph, one))


def _position(e: Expr, var: str, rank: str, suffix: str, made: set[str], new: list[Op]) -> Expr:
    """Return a bound's position in the list, as a named scalar that is computed once."""
    if not (e.is_Integer or e.is_Symbol):  # all tiles of the axis
        tiles = f"{var}_all"
        if tiles not in made:
            made.add(tiles)
            new.append(tile.Map(tiles, e, (), Type("i32")))
        e = symbol(tiles)
    name = f"{f'{var}_{e}' if e.is_Integer else e}{suffix}"
    if name not in made:
        made.add(name)
        new.append(tile.ListPosition(name, f"{rank}_row", e, Type("i32")))
    return symbol(name)


def _head(kernel: Kernel) -> Expr:
    """Return the query head that indexes the lists: the one of the loaded queries."""
    return next(op.src.index[1] for op in only(kernel.ops(), tile.Load) if op.src.tensor == "Q")
