"""How many tiles the mask leaves: exact counts from the loop ranges in the IR, and their symbolic sum."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import sympy

from attngen.ir.expr import Expr, cdiv, symbol
from attngen.ir.graph import Kernel
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Loop

POSITION = sympy.Symbol("i", integer=True, nonnegative=True)  # index of the program's own tile


def tile_loops(kernel: Kernel) -> list[Loop]:
    """The loops over tiles, all of one body."""
    return [loop for loop in kernel.loops if loop.cls != "all"]


def visited(kernel: Kernel, cls: str | None = None) -> Expr:
    """Tiles that the program at {own}_start visits, of one class or of both."""
    loops = [loop for loop in tile_loops(kernel) if cls in (None, loop.cls)]
    return sympy.Add(*(hi - lo for loop in loops for lo, hi in loop.ranges))


def tile_sum(kernel: Kernel) -> Expr:
    """Tiles of one head as a symbolic sum over the grid's own axis."""
    block, extent = symbol(AXIS_DIM[kernel.own_axis]), symbol(AXIS_EXTENT[kernel.own_axis])
    start = symbol(f"{kernel.own_axis}_start")
    return sympy.Sum(visited(kernel).subs(start, POSITION * block), (POSITION, 0, cdiv(extent, block) - 1))


@cache
def _compiled(e: Expr) -> tuple[list[str], Any]:
    """The expression's symbols and a numpy function of them. Its source is sympy's print of a tree that we built."""
    functions = {"floordiv": lambda a, b: a // b, "cdiv": lambda a, b: -(-a // b), "select": np.where}
    names = sorted(str(s) for s in e.free_symbols)
    return names, sympy.lambdify([symbol(n) for n in names], e, modules=[functions, "numpy"])


def evaluate(e: Expr, values: dict[str, Any]) -> Any:
    """Numbers or arrays for an expression of the IR. Run-time scalars that are not given count as no bound."""
    names, function = _compiled(e)
    return function(*(values.get(n, 2**30) for n in names))


def count_tiles(kernel: Kernel, n_own: int, n_loop: int, block_q: int, block_kv: int, cls: str | None = None) -> int:
    """Tiles visited for one head with so many rows on the grid's own axis and on the loop's; lengths count as full."""
    own, loop = kernel.own_axis, "kv" if kernel.own_axis == "q" else "q"
    block = {"q": block_q, "kv": block_kv}
    starts = np.arange(0, n_own, block[own], dtype=np.int64)
    values = {
        "BLOCK_Q": block_q,
        "BLOCK_KV": block_kv,
        AXIS_EXTENT[own]: n_own,
        AXIS_EXTENT[loop]: n_loop,
        f"{own}_start": starts,
    }
    return int(np.broadcast_to(evaluate(visited(kernel, cls), values), starts.shape).sum())
