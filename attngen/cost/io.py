"""Elements and bytes moved between HBM and the chip, from the loads and stores in the IR; and those of standard
attention.

`hbm_bytes` counts the bytes that programs load and store. `dram_bytes` counts the part that reaches device memory. The
last-level cache serves the rest: data that programs in flight at the same time have in common, and data that a program
reads again, if the cache has room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import sympy

from attngen.cost.algorithms import kernels
from attngen.cost.flops import TILES
from attngen.ir import Expr, Kernel, Op, Type, cdiv, select, symbol, tile
from attngen.ir.split_axes import sharing
from attngen.tiles.sizes import share_of, tile_bytes
from attngen.tiles.tiles import extent, heads, program_tiles, repeats

CACHE = sympy.Symbol("cache", positive=True)  # bytes of the last-level cache
IN_FLIGHT = sympy.Symbol("in_flight", positive=True)  # programs that run at the same time


class Traffic(NamedTuple):
    """Amounts read and written, in elements or bytes, as formulas."""

    read: Expr
    written: Expr

    @property
    def total(self) -> Expr:
        return self.read + self.written


def _moves(kernel: Kernel, size: Callable[[Type], Expr]) -> Iterator[tuple[str, Op, Expr, Expr]]:
    """Yield (block, op, size read, size written) for each op that moves a tile, by size(type) of the tile."""
    none: Expr = sympy.Integer(0)
    for block in kernel.blocks:
        for op in block.ops:
            if isinstance(op, tile.Load) and op.type.dims:
                yield block.name, op, share_of(op) * size(op.type), none
            elif isinstance(op, (tile.OrderedAdd, tile.Scatter)):
                # If programs split columns, only the first one adds.
                moved = size(kernel.type_of(op.value)) / repeats(kernel)
                yield block.name, op, moved, moved
            elif isinstance(op, tile.Store):
                sums = Type("f32", ("BLOCK_KV",))  # sums by distance; a tile has diagonals of two such vectors
                written = 2 * size(sums) if op.by else size(kernel.type_of(op.value))
                yield block.name, op, none, written / repeats(kernel) if op.first_along else written


def loads_and_stores(kernel: Kernel, size: Callable[[Type], Expr], times: Callable[[str], Expr]) -> Traffic:
    """The total that loads and stores of tiles move: size(type) of each tile, times(block) for its block."""
    moves = [(times(block) * read, times(block) * written) for block, _, read, written in _moves(kernel, size)]
    return Traffic(sympy.Add(*(read for read, _ in moves)), sympy.Add(*(written for _, written in moves)))


def traffic(kernel: Kernel, size: Callable[[Type], Expr], times: Callable[[str], Expr]) -> Expr:
    """The sum of reads and writes of `loads_and_stores`."""
    return loads_and_stores(kernel, size, times).total


def _once_per_program_tile(kernel: Kernel) -> set[str]:
    """Names of the blocks that run once for each program tile."""
    return {"entry", *(loop.body for loop in kernel.loops if loop.var == kernel.program_axis)}


def _heads(kernel: Kernel) -> Expr:
    """Heads over which programs are distributed, query heads or KV heads. A head counts once for each of the programs
    that split its loops or its columns."""
    own = heads(kernel) / symbol("group") if kernel.traits.has_groups else heads(kernel)
    return own * repeats(kernel) * sympy.Mul(*(axis.extent for axis in sharing(kernel.grid)))


def l2_bytes(kernel: Kernel) -> Traffic:
    """Bytes that the programs of a generated kernel load and store: a tile once per program tile, or once per visited
    tile.

    The formulas are in `tiles` (see flops.TILES), B, Hq, group and the sizes, and with pack-GQA in `queries`, the rows
    of a head.
    """
    program = _heads(kernel) * program_tiles(kernel)
    tiles = heads(kernel) * cdiv(symbol("Nq"), symbol("BLOCK_Q")) if kernel.traits.prepares else TILES * repeats(kernel)
    return loads_and_stores(
        kernel, tile_bytes, lambda block: program if block in _once_per_program_tile(kernel) else tiles
    )


def hbm_bytes(kernel: Kernel) -> Expr:
    """The sum of reads and writes of `l2_bytes`: an upper bound of the bytes that device memory moves, which is reached
    if the cache serves nothing."""
    return l2_bytes(kernel).total


def dram_bytes(kernel: Kernel) -> Traffic:
    """Bytes that device memory moves for a generated kernel, in the symbols of `l2_bytes`, CACHE and IN_FLIGHT.

    Programs run in the order of the grid. The data of a program tile is moved once. Tiles that a program streams are
    moved:

    - once, if the cache has room for everything that the programs of all heads in flight stream;
    - otherwise, if each program has one tile, once for all programs of a head that run at the same time, because they
      are at the same tile. These are fewer if the grid is swizzled over heads;
    - otherwise, if each program visits all tiles of its axis, once for each of these tiles. Rewritten tiles are written
      as often.
    """
    if kernel.traits.prepares:  # one program has all tensors of a sequence, which the cache holds
        sums = (sympy.Add(*(tile_bytes(arg.type) for arg in kernel.args if arg.role == role)) for role in ("in", "out"))
        return Traffic(*sums)
    owned, tiles = _heads(kernel) * program_tiles(kernel), program_tiles(kernel)
    kept, streamed = [sympy.Integer(0)] * 2, [sympy.Integer(0)] * 2
    once: dict[str, tuple[Expr, Expr]] = {}
    for block, op, read, written in _moves(kernel, tile_bytes):
        if block in _once_per_program_tile(kernel):
            kept = [kept[0] + owned * read, kept[1] + owned * written]
            continue
        visits = TILES * repeats(kernel)
        streamed = [streamed[0] + visits * read, streamed[1] + visits * written]
        arg = _tensor(kernel, op)
        once[arg.name] = (
            tile_bytes(arg.type) if arg.role in ("in", "inout", "sum") else sympy.Integer(0),
            tile_bytes(arg.type) if arg.role in ("out", "inout", "sum") else sympy.Integer(0),
        )
    if not once:
        return Traffic(kept[0], kept[1])
    every = [sympy.Min(streamed[i], sympy.Add(*(pair[i] for pair in once.values()))) for i in (0, 1)]
    swizzle = sympy.Min(kernel.grid[0].heads, _heads(kernel)) if kernel.grid[0].heads != 1 else sympy.Integer(1)
    at_once = sympy.Min(
        _heads(kernel), IN_FLIGHT if kernel.traits.visits_all_tiles else sympy.Max(swizzle, IN_FLIGHT / tiles)
    )
    fits = sympy.Add(*(sympy.Max(*pair) for pair in once.values())) * at_once / _heads(kernel) <= CACHE
    swizzle_rows = (
        sympy.Integer(1) if kernel.traits.visits_all_tiles else sympy.Max(1, sympy.Min(IN_FLIGHT / swizzle, tiles))
    )
    again = sympy.Max(every[0], streamed[0] / swizzle_rows), streamed[1]
    return Traffic(*(kept[i] + select(fits, every[i], again[i]) for i in (0, 1)))


def left_in_cache(moved: Traffic) -> Expr:
    """Bytes written by a kernel that are still in the cache when it ends. Counters of device memory do not see them.

    The cache is assumed to hold the data that was moved last. The share of written bytes in it is the same as in all
    bytes moved.
    """
    return moved.written * sympy.Min(1, CACHE / moved.total)


def _tensor(kernel: Kernel, op: Op) -> tile.Arg:
    """The tensor that a load, a store or a scatter accesses."""
    access = op.src if isinstance(op, tile.Load) else op.dst if isinstance(op, (tile.Scatter, tile.Store)) else None
    assert access is not None
    source = kernel.op(access.tensor)
    arg = kernel.op(source.src.tensor) if isinstance(source, tile.Base) else source
    assert isinstance(arg, tile.Arg)
    return arg


def compulsory_bytes(kernel: Kernel) -> Expr:
    """Bytes that a kernel moves if each tensor is moved once, and twice if it is both read and written. The gradients
    of the LSE and the entropy have no elements. Scratch memory stays in the cache.
    """
    times = {"scalar": 0, "scratch": 0, "in": 1, "out": 1, "inout": 2, "sum": 2}
    moved = sympy.Add(*(times[arg.role] * tile_bytes(arg.type) for arg in kernel.args))
    return moved.subs({symbol("Nq"): extent(kernel, "q"), symbol("Nlse"): 0, symbol("Nentropy"): 0})


def standard_bytes(direction: str) -> Expr:
    """Bytes per query head of attention as separate operations, with the score matrix in HBM (FlashAttention, section
    2.2). Each operation moves its operands and its result once, as if they fit on chip.
    """
    one_head = {symbol(name): 1 for name in ("B", "Hq", "Hkv")}
    return sympy.Add(*(compulsory_bytes(kernel) for kernel in kernels("standard", direction))).subs(one_head)
