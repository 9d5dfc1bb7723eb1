"""classify-tiles: from the mask's expression, which tiles along the loop are empty, partial or full.

before:  %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) ...
after:   the same, with tiles(visible start; full start; full end; visible end), in tiles, in closed form

Each linear inequality of the conjunction is bounded over the box of (this program's tile) x (tile j of the loop): its
least value says where tiles may hold something visible, its greatest where they hold nothing hidden. A condition that
is not linear in the indices (a tensor of booleans, say) is bounded by what the mask says of it (`needs`, `enough`); with
nothing known, its tiles are partial.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import sympy

from attngen.ir.expr import Bool, Expr, cdiv, conjuncts, floordiv, prove_le, select, symbol, with_rows
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Loop, Mask, Op
from attngen.passes.base import Pass

Tiles = tuple[Expr, Expr, Expr, Expr]


@dataclass(frozen=True)
class ClassifyTiles(Pass):
    name: ClassVar[str] = "classify-tiles"
    phase: ClassVar[str] = "logical"

    def run(self, module: Module) -> Module:
        def change(kernel: Kernel, op: Op) -> Op:
            if isinstance(op, Loop) and op.cls == "unknown":
                return replace(op, tiles=tile_ranges(kernel, op.body))
            return op

        return module.map_kernels(lambda k: k.rewrite(lambda _, op: [change(k, op)]))


def tile_ranges(kernel: Kernel, body: str) -> Tiles:
    """Visible start, full start, full end, visible end of the loops over `body`, in tiles, from the mask in it."""
    masks = [op for op in kernel.block(body).ops if isinstance(op, Mask)]
    where, needs, enough = (sympy.And(*(getattr(m, f) for m in masks)) for f in ("where", "needs", "enough"))
    own = kernel.own_axis
    return classify(where, own=own, loop="kv" if own == "q" else "q", needs=needs, enough=enough)


@cache
def classify(where: Bool, own: str, loop: str, needs: Bool = sympy.true, enough: Bool = sympy.false) -> Tiles:
    """Bounds of tiles j along the axis `loop`, for the program that owns the tile of `own` at `own`_start.

    `needs` holds wherever the parts of `where` that are not linear do; they all hold wherever `enough` does.

    Sound: every tile with a visible in-bounds pair is in [visible start, visible end), and a tile in [full start, full end)
    holds no hidden or out-of-bounds pair among valid rows. visible start <= full start <= full end <= visible end.
    """
    block, extent = symbol(AXIS_DIM[loop]), symbol(AXIS_EXTENT[loop])
    lows: list[Expr] = [sympy.Integer(0)]
    highs: list[Expr] = [extent]
    full_lows: list[Expr] = [sympy.Integer(0)]
    full_highs: list[Expr] = [extent]
    shown: list[Bool] = []  # conditions on the program's own tile alone: without them it has no visible tile,
    full: list[Bool] = []  # and no full one
    linear, others = _linear(where, own, loop)
    if others:  # they hold nowhere outside `needs`, and everywhere inside `enough`
        known, unknown = _linear(enough, own, loop)
        full_highs += [sympy.Integer(0)] * len(unknown)
    else:
        known = []
    needed = _linear(needs, own, loop)[0]
    for a, c, rest in [*linear, *needed]:  # the condition is a*own + c*loop + rest <= 0
        _bound(c, rest + _extremes(a, own)[0], lows, highs, shown)
    for a, c, rest in [x for x in needed if x[1]]:  # where nothing is visible, `enough` may start beyond the visible end
        _bound(c, rest + _extremes(a, own)[0], full_lows, full_highs, full)
    for a, c, rest in [*linear, *known]:
        _bound(c, rest + _extremes(a, own)[1], full_lows, full_highs, full)

    def at_most(e: Expr, end: Expr) -> Expr:
        """Cut at the end unless proven never to pass it: `needs` and `enough` are data, which nothing relates."""
        return e if prove_le(with_rows(e, own), with_rows(end, own)) else sympy.Min(e, end)

    last = cdiv(sympy.Max(0, sympy.Min(*highs)), block)
    end = _where(shown, last)
    start = _where(shown, sympy.Min(floordiv(sympy.Max(*lows), block), last))
    full_start = _where(shown, at_most(cdiv(sympy.Max(*full_lows), block), last))  # >= start: each bound is at least the visible one
    full_end = sympy.Max(full_start, _where(full, floordiv(sympy.Max(0, sympy.Min(*full_highs)), block)))
    return start, full_start, at_most(full_end, end), end


def _where(conditions: list[Bool], tile: Expr) -> Expr:
    """The tile where all conditions hold, 0 elsewhere."""
    for condition in conditions:
        tile = select(condition, tile, sympy.Integer(0))
    return tile


def _bound(c: int, rest: Expr, lows: list[Expr], highs: list[Expr], conditions: list[Bool]) -> None:
    """Positions x with c*x + rest <= 0, as a lower or an upper (exclusive) bound; as a condition where x does not matter."""
    if c > 0:
        highs.append(1 - rest if c == 1 else floordiv(sympy.Max(0, c - rest), sympy.Integer(c)))
    elif c < 0:
        lows.append(rest if c == -1 else cdiv(sympy.Max(0, rest), sympy.Integer(-c)))
    else:
        conditions.append(_condition(rest))


def _condition(rest: Expr) -> Bool:
    """rest <= 0 over integers, with every term on the side where it is positive."""
    terms = sympy.Add.make_args(sympy.expand(rest))
    right = sympy.Add(*(-t for t in terms if t.could_extract_minus_sign()))
    left = sympy.expand(rest + right)
    return left - 1 < right if left.as_coeff_Add()[0] >= 1 else left <= right


def _extremes(a: int, own: str) -> tuple[Expr, Expr]:
    """Least and greatest a*x over the program's valid rows x."""
    first = symbol(f"{own}_start")
    last = sympy.Min(first + symbol(AXIS_DIM[own]), symbol(AXIS_EXTENT[own])) - 1
    return (a * first, a * last) if a >= 0 else (a * last, a * first)


def _linear(where: Bool, own: str, loop: str) -> tuple[list[tuple[int, int, Expr]], list[Bool]]:
    """The linear parts of a conjunction, and the parts that are not."""
    found = [(part, linear_parts(part, own, loop)) for part in conjuncts(where)]
    return [x for _, x in found if x is not None], [part for part, x in found if x is None]


def linear_parts(condition: Bool, own: str, loop: str) -> tuple[int, int, Expr] | None:
    """(a, c, rest) with the condition equal to a*own_idx + c*loop_idx + rest <= 0 over integers; None if not linear."""
    if not isinstance(condition, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)):
        return None
    difference: Any = condition.lts - condition.gts
    if isinstance(condition, (sympy.Lt, sympy.Gt)):
        difference = difference + 1
    own_idx, loop_idx = symbol(f"{own}_idx"), symbol(f"{loop}_idx")
    a, c = difference.coeff(own_idx), difference.coeff(loop_idx)
    rest = sympy.expand(difference - a * own_idx - c * loop_idx)
    if not (a.is_Integer and c.is_Integer) or rest.has(own_idx, loop_idx):
        return None
    if rest.has(sympy.Pow) or not all(n.is_Integer for n in rest.atoms(sympy.Number)):  # may not be an integer
        return None
    return int(a), int(c), rest
