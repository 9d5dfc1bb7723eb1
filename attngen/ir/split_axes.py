"""Shares: programs along one axis of the grid that share what a loop runs over, each a part of it."""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from attngen.ir.expr import Expr, floordiv, portion, symbol
from attngen.ir.graph import GridAxis, Kernel
from attngen.ir.names import SHARES
from attngen.ir.ops import Loop

Range = tuple[Expr, Expr]
ALONE: Range = (sympy.Integer(0), sympy.Integer(1))  # of heads, where a loop runs for one


def sharing(grid: Iterable[GridAxis]) -> tuple[GridAxis, ...]:
    """The axes of a grid whose programs share what a loop runs over."""
    return tuple(axis for axis in grid if axis.var in SHARES)


def part(lo: Expr, hi: Expr, axis: GridAxis) -> Range:
    """What one program has of the range lo .. hi, which the programs along an axis share.

    If lo <= hi, together they have each number of it once. Their parts differ in length by one at most. Of keys, of
    which there may be too many to be multiplied by a number of parts, the first parts are the longer ones.
    """
    if axis.var == "part":
        return lo + portion(hi - lo, symbol(axis.var), axis.extent), lo + portion(
            hi - lo, symbol(axis.var) + 1, axis.extent
        )
    scaled = (hi - lo) * symbol(axis.var)
    return lo + floordiv(scaled, axis.extent), lo + floordiv(scaled + hi - lo, axis.extent)


def whole(lo: Expr, hi: Expr, axis: GridAxis) -> Range | None:
    """The range that programs along an axis share if one of them has lo .. hi; None if that is no `part`."""
    number = symbol(axis.var)
    start, past = (
        lo.xreplace({number: sympy.Integer(0)}),
        lo.xreplace({number: axis.extent}),
    )  # where a program after the last would start
    end = past.replace(
        lambda e: isinstance(e, floordiv) and e.args[1] == axis.extent, lambda e: e.args[0] / axis.extent
    )
    return (start, end) if part(start, end, axis) == (lo, hi) else None


def joined(grid: Iterable[GridAxis], lo: Expr, hi: Expr) -> tuple[GridAxis | None, Range]:
    """The axis whose programs share a range, of which lo .. hi is a part, and the range. If there is none, lo .. hi
    itself."""
    for axis in sharing(grid):
        pair = whole(lo, hi, axis)
        if pair and pair != (lo, hi):
            return axis, pair
    return None, (lo, hi)


def shared(kernel: Kernel, loop: Loop) -> list[tuple[GridAxis | None, Range]]:
    """What `joined` gives for each range of a loop, with named scalars written out."""
    return [joined(kernel.grid, kernel.resolve(lo), kernel.resolve(hi)) for lo, hi in loop.ranges]


def in_turn(kernel: Kernel, loop: Loop) -> tuple[GridAxis | None, Range]:
    """The query heads for which a loop runs, one after another; the axis whose programs share these, if there is
    one."""
    return joined(kernel.grid, *map(kernel.resolve, loop.heads[0])) if loop.heads else (None, ALONE)


def ranges(kernel: Kernel, loop: Loop) -> list[Range]:
    """The ranges of a loop with named scalars written out; of those that programs share, what these have together."""
    return [pair for _, pair in shared(kernel, loop)]
