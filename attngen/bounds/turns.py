"""Which programs come to a tile that several add to, counted: turns of programs that add in a fixed order (see ops.Add)."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from attngen.ir.expr import Expr, cdiv, floordiv, symbol
from attngen.ir.graph import Kernel
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT


def last_first(kernel: Kernel) -> Expr | None:
    """The turn of a program where those of the last tiles come first: how many of later tiles come to the tile that its loop is at.

    None where that is not known: its loops run over several ranges, or between numbers that programs read; they may end at an earlier tile
    for a later one of the program's own, or start at one by a formula that this does not solve for the program's own tile.

    Loops of later own tiles start later, and end later or alike. So programs that come to a tile own tiles that follow one another: the
    last of them is the last whose loop has started there.
    """
    visited = visited_range(kernel)
    if visited is None:
        return None
    first, end = visited
    own, start = kernel.own_axis, symbol(f"{kernel.own_axis}_start")
    given = {symbol(arg.name) for arg in kernel.args if arg.role == "scalar"} | {symbol(dim) for dim in AXIS_DIM.values()}
    tiles, rows = cdiv(symbol(AXIS_EXTENT[own]), symbol(AXIS_DIM[own])), symbol(AXIS_DIM[own])
    if not first.free_symbols | end.free_symbols <= given | {start} or not _rises(end, start):
        return None
    if start not in first.free_symbols:
        count = tiles
    else:
        most = _solved(first, end, kernel.loop_axis, start)
        if most is None:
            return None
        count = sympy.Min(tiles, 1 + floordiv(sympy.Max(0, most), rows))
    return count - 1 - floordiv(start, rows)


def visited_range(kernel: Kernel) -> tuple[Expr, Expr] | None:
    """The first tile of a kernel's loops over tiles, and their end; None where their ranges do not follow one another."""
    found = whole_range([pair for loop in kernel.loops if loop.cls != "all" for pair in loop.ranges])
    return found and (kernel.resolve(found[0]), kernel.resolve(found[1]))


def whole_range(ranges: Sequence[tuple[Expr, Expr]]) -> tuple[Expr, Expr] | None:
    """The start of ranges that follow one another, in any order, and their end; None for other ones."""
    lows, highs = {lo for lo, _ in ranges}, {hi for _, hi in ranges}
    first, end = lows - highs, highs - lows
    if len(first) != 1 or len(end) != 1 or len(lows) != len(ranges) or len(highs) != len(ranges):
        return None
    return *first, *end


def _solved(first: Expr, end: Expr, loop: str, start: Expr) -> Expr | None:
    """The greatest `start` of an own tile whose loop begins at the tile that the loop is at, or before, of those that come to it."""
    at, rows = symbol(f"{loop}_start"), symbol(AXIS_DIM[loop])  # the tile is number at / rows
    if isinstance(first, sympy.Min):  # the end is behind the tile
        rest = [x for x in first.args if x != end]
        return _solved(rest[0], end, loop, start) if len(rest) == 1 else None
    if not isinstance(first, (floordiv, cdiv)) or first.args[1] != rows:
        return None
    return _at_most(first.args[0], at + rows - 1 if isinstance(first, floordiv) else at, start)


def _at_most(e: Expr, most: Expr, start: Expr) -> Expr | None:
    """The greatest `start` for which an expression is at most `most`, which is not negative."""
    if isinstance(e, sympy.Max):
        rest = [x for x in e.args if x != 0]
        return _at_most(rest[0], most, start) if len(rest) == 1 else None
    left = e - start
    return most - left if start not in left.free_symbols else None


def _rises(e: Expr, start: Expr) -> bool:
    """Whether an expression is seen never to fall as `start` rises."""
    if e == start or start not in e.free_symbols:
        return True
    if isinstance(e, (floordiv, cdiv)):
        return start not in e.args[1].free_symbols and _rises(e.args[0], start)  # divided by the rows of a tile, or a number: more than 0
    if e.is_Mul:
        factor, rest = e.as_coeff_Mul()
        return bool(factor > 0) and _rises(rest, start) and not rest.is_Mul
    return (e.is_Add or isinstance(e, (sympy.Max, sympy.Min))) and all(_rises(x, start) for x in e.args)
