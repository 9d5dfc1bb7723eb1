"""Programs along an axis of the grid that share a loop: each runs a part of its range."""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from attngen.ir import tile
from attngen.ir.expr import Expr, floordiv, portion, symbol
from attngen.ir.grid import GridAxis
from attngen.ir.kernel import Kernel
from attngen.ir.names import SHARES

Range = tuple[Expr, Expr]
ONE_HEAD: Range = (sympy.Integer(0), sympy.Integer(1))  # the heads of a loop that runs for one head


def sharing(grid: Iterable[GridAxis]) -> tuple[GridAxis, ...]:
    """The axes of a grid whose programs split the range of a loop."""
    return tuple(axis for axis in grid if axis.var in SHARES)


def part(lo: Expr, hi: Expr, axis: GridAxis) -> Range:
    """The part of the range lo .. hi that one program along an axis runs.

    If lo <= hi, the parts of all programs cover the range, each number once, and differ in length by at most one. Along
    the axis `KV_split` the first parts are the longer ones, because a number of keys times a number of parts may
    overflow.
    """
    if axis.var == "KV_split":
        return lo + portion(hi - lo, symbol(axis.var), axis.extent), lo + portion(
            hi - lo, symbol(axis.var) + 1, axis.extent
        )
    scaled = (hi - lo) * symbol(axis.var)
    return lo + floordiv(scaled, axis.extent), lo + floordiv(scaled + hi - lo, axis.extent)


def whole(lo: Expr, hi: Expr, axis: GridAxis) -> Range | None:
    """The range that all programs along an axis run if one of them runs lo .. hi; None if lo .. hi is not the result of
    `part`."""
    number = symbol(axis.var)
    start = lo.xreplace({number: sympy.Integer(0)})
    past = lo.xreplace({number: axis.extent})  # the start of a program after the last one
    end = past.replace(
        lambda e: isinstance(e, floordiv) and e.args[1] == axis.extent, lambda e: e.args[0] / axis.extent
    )
    return (start, end) if part(start, end, axis) == (lo, hi) else None


def whole_range(grid: Iterable[GridAxis], lo: Expr, hi: Expr) -> tuple[GridAxis | None, Range]:
    """If lo .. hi is one program's part of a range, the axis whose programs split the range, and the whole range.
    Otherwise None and lo .. hi."""
    for axis in sharing(grid):
        pair = whole(lo, hi, axis)
        if pair and pair != (lo, hi):
            return axis, pair
    return None, (lo, hi)


def shared(kernel: Kernel, loop: tile.Loop) -> list[tuple[GridAxis | None, Range]]:
    """The result of `whole_range` for each range of a loop, with named scalars written out."""
    return [whole_range(kernel.grid, kernel.resolve(lo), kernel.resolve(hi)) for lo, hi in loop.ranges]


def head_range(kernel: Kernel, loop: tile.Loop) -> tuple[GridAxis | None, Range]:
    """The range of query heads that a loop runs one after another, and the axis whose programs split it, or None."""
    return whole_range(kernel.grid, *map(kernel.resolve, loop.heads[0])) if loop.heads else (None, ONE_HEAD)


def ranges(kernel: Kernel, loop: tile.Loop) -> list[Range]:
    """The ranges of a loop with named scalars written out; for a range that programs split, the whole range."""
    return [pair for _, pair in shared(kernel, loop)]
