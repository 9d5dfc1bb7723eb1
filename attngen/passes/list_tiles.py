"""list-tiles: with block sparsity, loops over tiles visit those of the blocks that are listed, in the order of the tiles.

before:  %keys_full = loop kv ranges(0 .. kv_full_end) ...
after:   %KV_RANK_row = base %KV_RANK[b, h, q_start // 128] : ptr[]
         %KV_LIST_row = base %KV_LIST[b, h, q_start // 128] : ptr[]
         %kv_full_end_at = position %KV_RANK_row tile(kv_full_end) : i32[]
         %keys_full = loop kv ranges(0 .. kv_full_end_at) ... listed(%KV_LIST_row)

The lists are sorted, so the tiles between two bounds are a run of positions, and what was proven of the ranges still holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.expr import Expr, floordiv, symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.interface import BLOCK_LISTS
from attngen.ir.ops import Access, Base, Load, Loop, Op, Position, Type
from attngen.passes.base import Pass


@dataclass(frozen=True)
class ListTiles(Pass):
    name: ClassVar[str] = "list-tiles"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        if module.blocks is None:
            return module
        size = module.blocks.size
        return module.map_kernels(lambda k: _listed(k, size))


def _listed(kernel: Kernel, size: int) -> Kernel:
    own = kernel.own_axis
    rank, listed = BLOCK_LISTS[own]
    made: set[str] = set()

    def change(_: str, op: Op) -> list[Op]:
        if not isinstance(op, Loop) or op.cls == "all":
            return [op]
        new: list[Op] = []
        if not made:
            index = (symbol("b"), _head(kernel), floordiv(symbol(f"{own}_start"), sympy.Integer(size)))
            new += [Base(f"{name}_row", Access(name, index), Type("ptr")) for name in (rank, listed)]
            made.add(f"{rank}_row")
        ranges = tuple((_position(lo, rank, made, new), _position(hi, rank, made, new)) for lo, hi in op.ranges)
        return [*new, replace(op, ranges=ranges, listed=f"{listed}_row")]

    return kernel.rewrite(change)


def _position(e: Expr, rank: str, made: set[str], new: list[Op]) -> Expr:
    """The position of a bound, as a named scalar that is made once."""
    if e == 0:
        return e
    name = f"{e}_at"
    if name not in made:
        made.add(name)
        new.append(Position(name, f"{rank}_row", e, Type("i32")))
    return symbol(name)


def _head(kernel: Kernel) -> Expr:
    """The query head of the tiles in the loop, by which lists are indexed: that of the queries, loaded before it or in it."""
    return next(op.src.index[1] for op in kernel.ops() if isinstance(op, Load) and op.src.tensor == "Q")
