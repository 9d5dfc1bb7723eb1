"""Elements and bytes between HBM and the chip, from the loads and stores in the IR; and those of standard attention.

`hbm_bytes` is what programs load and store. `dram_bytes` is what of that passes the cache that all of them share: it serves what
programs in flight at one time read in common, and what a program reads again, where it has room for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import sympy

from attngen.analysis.algorithms import kernels
from attngen.analysis.flops import TILES
from attngen.bounds.sizes import tile_bytes
from attngen.bounds.tiles import extent, heads, own_tiles
from attngen.ir.expr import Expr, select, symbol
from attngen.ir.graph import Kernel
from attngen.ir.ops import Arg, Base, Load, Op, Scatter, Store, Type

CACHE = sympy.Symbol("cache", positive=True)  # bytes of the last cache before device memory
IN_FLIGHT = sympy.Symbol("in_flight", positive=True)  # programs that the chip runs at one time


class Traffic(NamedTuple):
    """What is read, and what is written."""

    read: Expr
    written: Expr

    @property
    def total(self) -> Expr:
        return self.read + self.written


def _moves(kernel: Kernel, size: Callable[[Type], Expr]) -> Iterator[tuple[str, Op, Expr, Expr]]:
    """Of each op that moves a tile: its block, what it reads and what it writes."""
    none: Expr = sympy.Integer(0)
    for block in kernel.blocks:
        for op in block.ops:
            if isinstance(op, Load) and op.type.dims:
                yield block.name, op, size(op.type), none
            elif isinstance(op, Scatter):
                yield block.name, op, size(kernel.type_of(op.value)), size(kernel.type_of(op.value))
            elif isinstance(op, Store):
                sums = Type("f32", ("BLOCK_KV",))  # of two turns of the diagonals
                yield block.name, op, none, 2 * size(sums) if op.by else size(kernel.type_of(op.value))


def loads_and_stores(kernel: Kernel, size: Callable[[Type], Expr], times: Callable[[str], Expr]) -> Traffic:
    """What the loads and stores of tiles move: size(type) of each, where times(block) says how often a block runs."""
    moves = [(times(block) * read, times(block) * written) for block, _, read, written in _moves(kernel, size)]
    return Traffic(sympy.Add(*(read for read, _ in moves)), sympy.Add(*(written for _, written in moves)))


def traffic(kernel: Kernel, size: Callable[[Type], Expr], times: Callable[[str], Expr]) -> Expr:
    """The same, read and written together."""
    return loads_and_stores(kernel, size, times).total


def _walked(kernel: Kernel) -> set[str]:
    """The blocks that run once for each tile that programs own."""
    return {"entry", *(loop.body for loop in kernel.loops if loop.var == kernel.own_axis)}


def _heads(kernel: Kernel) -> Expr:
    """Heads that programs own: of queries, or of keys, which as many own as the group is split among."""
    shared = "group" in {b.name for b in kernel.blocks}
    return heads(kernel) / symbol("group") * (symbol("splits") if kernel.is_split else 1) if shared else heads(kernel)


def l2_bytes(kernel: Kernel) -> Traffic:
    """Bytes that the programs of an emitted kernel load and store: tiles once per tile that a program owns, and once per tile visited.

    In `tiles` (see flops.TILES), B, Hq, group and the sizes; where heads are packed, `queries` of each.
    """
    owned = _heads(kernel) * own_tiles(kernel)
    return loads_and_stores(kernel, tile_bytes, lambda block: owned if block in _walked(kernel) else TILES)


def hbm_bytes(kernel: Kernel) -> Expr:
    """The same together: an upper bound of what device memory moves, reached if nothing is found in a cache."""
    return l2_bytes(kernel).total


def dram_bytes(kernel: Kernel) -> Traffic:
    """Bytes that device memory moves for an emitted kernel, in the symbols of `l2_bytes`, CACHE and IN_FLIGHT.

    Programs run in the order of the grid. What a program keeps for its own tile is moved once. What it streams, tile by tile:

    - is moved once, if the cache has room for the heads in flight: for each, all that its programs stream;
    - else once for all the programs of a head that run at one time, fewer where heads run abreast, which are at the same tile;
    - else, by a program that walks over its tiles, once for each of them, and what it rewrites is written as often.
    """
    owned, tiles = _heads(kernel) * own_tiles(kernel), own_tiles(kernel)
    kept, streamed = [sympy.Integer(0)] * 2, [sympy.Integer(0)] * 2
    once: dict[str, tuple[Expr, Expr]] = {}
    for block, op, read, written in _moves(kernel, tile_bytes):
        if block in _walked(kernel):
            kept = [kept[0] + owned * read, kept[1] + owned * written]
            continue
        streamed = [streamed[0] + TILES * read, streamed[1] + TILES * written]
        arg = _tensor(kernel, op)
        once[arg.name] = (
            tile_bytes(arg.type) if arg.role in ("in", "inout") else sympy.Integer(0),
            tile_bytes(arg.type) if arg.role in ("out", "inout") else sympy.Integer(0),
        )
    if not once:
        return Traffic(kept[0], kept[1])
    every = [sympy.Min(streamed[i], sympy.Add(*(pair[i] for pair in once.values()))) for i in (0, 1)]
    abreast = sympy.Min(kernel.grid[0].abreast, _heads(kernel)) if kernel.grid[0].abreast > 1 else sympy.Integer(1)
    at_once = sympy.Min(_heads(kernel), IN_FLIGHT if kernel.walks else sympy.Max(abreast, IN_FLIGHT / tiles))
    fits = sympy.Add(*(sympy.Max(*pair) for pair in once.values())) * at_once / _heads(kernel) <= CACHE
    together = sympy.Integer(1) if kernel.walks else sympy.Max(1, sympy.Min(IN_FLIGHT / abreast, tiles))
    again = sympy.Max(every[0], streamed[0] / together), streamed[1]
    return Traffic(*(kept[i] + select(fits, every[i], again[i]) for i in (0, 1)))


def left_in_cache(moved: Traffic) -> Expr:
    """Of what a kernel writes, the bytes that the cache still holds when it ends, which counters of device memory do not see.

    What was last moved is in the cache, read and written in the shares that all of it has.
    """
    return moved.written * sympy.Min(1, CACHE / moved.total)


def _tensor(kernel: Kernel, op: Op) -> Arg:
    """The tensor that a load or a store leads to."""
    access = op.src if isinstance(op, Load) else op.dst if isinstance(op, (Scatter, Store)) else None
    assert access is not None
    source = kernel.op(access.tensor)
    arg = kernel.op(source.src.tensor) if isinstance(source, Base) else source
    assert isinstance(arg, Arg)
    return arg


def compulsory_bytes(kernel: Kernel) -> Expr:
    """Bytes of each tensor that a kernel reads or writes, moved once; tensors that it does both to, twice. The LSE has no gradient."""
    times = {"scalar": 0, "in": 1, "out": 1, "inout": 2}
    moved = sympy.Add(*(times[arg.role] * tile_bytes(arg.type) for arg in kernel.args))
    return moved.subs({symbol("Nq"): extent(kernel, "q"), symbol("Nlse"): 0})


def standard_bytes(direction: str) -> Expr:
    """Bytes of attention as separate operations, the score matrix in HBM (FlashAttention, section 2.2), per query head.

    Each operation moves its operands and its result once, as if it had all the room on chip that this takes.
    """
    one_head = {symbol(name): 1 for name in ("B", "Hq", "Hkv")}
    return sympy.Add(*(compulsory_bytes(kernel) for kernel in kernels("standard", direction))).subs(one_head)
