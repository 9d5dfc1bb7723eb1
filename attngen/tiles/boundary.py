"""Boundary tiles of a mask condition: the tiles that may have a pair for which the condition is false."""

from __future__ import annotations

import sympy

from attngen.ir import INEQUALITIES, Bool, Expr, Kernel, conjuncts, symbol, tile
from attngen.ir.prove import excess, prove_le
from attngen.tiles.intervals import Bound, MaskContext, extremes, solve
from attngen.tiles.ranges import mask_context

PLACES = ("q_start", "BLOCK_Q", "kv_start", "BLOCK_KV")  # first row and size of a tile, along each axis
FIRST_ROW, ROWS, FIRST_KEY, KEYS = map(symbol, PLACES)


def data_of(kernel: Kernel, op: tile.Mask) -> frozenset[str]:
    """Return the names in a mask's condition, other than positions, that are not integers or vary per row or pair."""
    context = mask_context(kernel, kernel.graph.nodes[op.name]["block"])
    return context.rows | context.others


def unswitch_condition(where: Bool, data: frozenset[str]) -> Bool | None:
    """Return a condition on a tile's place that is true for boundary tiles. If it is false, all pairs meet `where`.

    In the forward pass an instance of a warp group has BLOCK_Q rows from q_start on, as in the bounds of its tiles (see
    warp_groups.py). In the backward pass it has BLOCK_KV keys from kv_start on.

    Return None if nothing is known: a comparison is not linear in the key's position, reads data, or names neither keys
    nor rows. In a disjunction only the comparisons of keys with rows count.
    """
    condition = _derived(where, data)
    return condition if condition is not None and is_full_unless(condition, where, data) else None


def _derived(where: Bool, data: frozenset[str]) -> Bool | None:
    """Return the condition before its proof. It may be constant if the bounds of some parts are."""
    if len(parts := conjuncts(where)) > 1:
        conditions = [_derived(part, data) for part in parts]
        return None if None in conditions else sympy.Or(*conditions)
    several = sympy.Or.make_args(where)
    found = [_beyond(part, data) for part in several if len(several) == 1 or part.has(symbol("q_idx"))]
    beyond = [key > end for key, end in filter(None, found)]
    return sympy.And(*beyond) if beyond else None


def is_full_unless(boundary: Bool, where: Bool, data: frozenset[str]) -> bool:
    """True if `where` is proven for all pairs of the tiles for which `boundary` is false."""

    def is_shown(part: Bool) -> bool:
        bounds = [key - end for key, end in filter(None, (_beyond(e, data) for e in sympy.Or.make_args(part)))]
        return any(_follows(bounds, term) for term in sympy.Or.make_args(boundary))

    return all(map(is_shown, conjuncts(where)))


def _follows(bounds: list[Expr], boundary: Bool) -> bool:
    """True if, for each comparison in `boundary`, one of the bounds is proven to be at most 0 where the comparison is
    false."""
    parts = sympy.And.make_args(boundary)
    return all(
        isinstance(part, INEQUALITIES) and any(prove_le(bound, excess(sympy.Not(part))) for bound in bounds)
        for part in parts
    )


def _beyond(comparison: Bool, data: frozenset[str]) -> tuple[Expr, Expr] | None:
    """Return (a, b) such that the comparison is true for all pairs of a tile if a <= b; None if unknown."""
    context = MaskContext("q", "kv", others=data)
    if not isinstance(comparison, INEQUALITIES):
        return None
    solved = solve(comparison, context)
    if not isinstance(solved, Bound):
        return None
    over_rows = extremes(solved.rest, context, (FIRST_ROW, FIRST_ROW + ROWS - 1))
    if over_rows is None:
        return None
    if not solved.side:  # it compares only rows
        return (over_rows[1], sympy.Integer(0)) if comparison.has(symbol("q_idx")) else None
    return (FIRST_KEY + KEYS, 1 - over_rows[1]) if solved.side > 0 else (over_rows[1], FIRST_KEY)
