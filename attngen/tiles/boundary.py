"""Which tiles a condition cuts: those that may have a pair for which it is false."""

from __future__ import annotations

import sympy

from attngen.ir.expr import INEQUALITIES, Bool, Expr, conjuncts, symbol
from attngen.ir.graph import Kernel
from attngen.ir.ops import Mask
from attngen.ir.prove import excess, prove_le
from attngen.tiles.intervals import Bound, Scene, extremes, solve
from attngen.tiles.ranges import scene_of

PLACES = ("q_start", "BLOCK_Q", "kv_start", "BLOCK_KV")  # where a tile is, and its size
FIRST_ROW, ROWS, FIRST_KEY, KEYS = map(symbol, PLACES)


def data_of(kernel: Kernel, op: Mask) -> frozenset[str]:
    """The names in a mask's condition of what is no integer, or differs from pair to pair but for positions."""
    scene = scene_of(kernel, kernel.graph.nodes[op.name]["block"])
    return scene.rows | scene.others


def cut_by(where: Bool, data: frozenset[str]) -> Bool | None:
    """A condition on the place of a tile: where it is false, `where` holds for all pairs of its keys and rows.

    In the forward a copy of a role has BLOCK_Q rows from q_start on, as in the bounds of its own tiles (see copies.py);
    in the backward it has BLOCK_KV keys from kv_start on.

    None if nothing is known: a comparison is not linear in the key's position, or reads data, or names neither keys nor
    rows. Of several of which one has to hold, those count that compare keys with rows.
    """
    cut = _derived(where, data)
    return cut if cut is not None and is_whole_without(cut, where, data) else None


def _derived(where: Bool, data: frozenset[str]) -> Bool | None:
    """The condition, which may be a constant if bounds of some parts are."""
    if len(parts := conjuncts(where)) > 1:
        cuts = [_derived(part, data) for part in parts]
        return None if None in cuts else sympy.Or(*cuts)
    several = sympy.Or.make_args(where)
    found = [_beyond(part, data) for part in several if len(several) == 1 or part.has(symbol("q_idx"))]
    cuts = [key > end for key, end in filter(None, found)]
    return sympy.And(*cuts) if cuts else None


def is_whole_without(cut: Bool, where: Bool, data: frozenset[str]) -> bool:
    """Whether `where` is proven for all pairs of the tiles for which `cut` is false."""

    def is_shown(part: Bool) -> bool:
        bounds = [key - end for key, end in filter(None, (_beyond(e, data) for e in sympy.Or.make_args(part)))]
        return any(_follows(bounds, not_cut) for not_cut in sympy.Or.make_args(cut))

    return all(map(is_shown, conjuncts(where)))


def _follows(bounds: list[Expr], cut: Bool) -> bool:
    """Whether one of the numbers is proven to be at most 0 wherever any of the cut's comparisons is false."""
    parts = sympy.And.make_args(cut)
    return all(
        isinstance(part, INEQUALITIES) and any(prove_le(bound, excess(sympy.Not(part))) for bound in bounds)
        for part in parts
    )


def _beyond(comparison: Bool, data: frozenset[str]) -> tuple[Expr, Expr] | None:
    """(a, b) where the comparison is true for all pairs of a tile if a <= b; None if that is not known."""
    scene = Scene("q", "kv", others=data)
    if not isinstance(comparison, INEQUALITIES):
        return None
    solved = solve(comparison, scene)
    if not isinstance(solved, Bound):
        return None
    over_rows = extremes(solved.rest, scene, (FIRST_ROW, FIRST_ROW + ROWS - 1))
    if over_rows is None:
        return None
    if not solved.side:  # of rows alone
        return (over_rows[1], sympy.Integer(0)) if comparison.has(symbol("q_idx")) else None
    return (FIRST_KEY + KEYS, 1 - over_rows[1]) if solved.side > 0 else (over_rows[1], FIRST_KEY)
