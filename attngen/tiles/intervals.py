"""Interval analysis of a mask's condition: the tiles along a loop that may have visible pairs, and those without hidden
pairs.

`terms` writes the condition as a union of terms, each a conjunction of literals. `solve` solves a literal over integers
for the loop's index, through sums, products, floor divisions, minima, maxima, absolute values and selects. `extremes`
bounds the rest of the literal from below and above over the rows of the program tile. A literal that cannot be solved
is assumed to hold for some pair of every tile, and for all pairs of no tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import sympy

from attngen.ir import AXIS_DIM, AXIS_EXTENT, Fact
from attngen.ir.expr import (
    INEQUALITIES,
    REAL,
    TO_INTEGER,
    Bool,
    Expr,
    clamp,
    floordiv,
    mod,
    select,
    size,
    split_extremes,
    symbol,
)
from attngen.ir.prove import excess, prove_le

MOST_TERMS = 8  # terms of a union; a union with more becomes one unsolved literal
# Comparisons of a condition that are solved. A split gives more of them; each nested split doubles the count.
MOST_SOLVED = 24
MOST_BOUNDS = 8  # solved bounds of a term; all pairs of them are compared
MOST_NODES = 150  # nodes of a bound's expression
GREATEST = 2**31 - 1  # greatest value of an i32


@dataclass(frozen=True)
class MaskContext:
    """The facts about a kernel that the interval analysis of its mask uses: the axes, and the symbols other than sizes
    and positions.

    axis: the program axis, `q` or `kv`.
    loop: the other axis, along which the loop runs.
    rows: names of integer values with one number for each row of the program tile.
    others: names of values that vary along the loop or are not integers.
    facts: known facts about conditions on data.
    """

    axis: str
    loop: str
    rows: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    facts: tuple[Fact, ...] = ()
    whole: bool = False  # matrix products sum over the rows of the program tile, so rows past the end count too

    @property
    def axis_idx(self) -> Expr:
        return symbol(f"{self.axis}_idx")

    @property
    def loop_idx(self) -> Expr:
        return symbol(f"{self.loop}_idx")


def mentions(e: Any, names: frozenset[str]) -> bool:
    return not names.isdisjoint(str(s) for s in e.free_symbols)


class Bound(NamedTuple):
    """A solved literal: side * loop_idx + rest <= 0. `side` is -1, 0 or 1; `rest` may contain the index along the
    program axis, but not the loop's."""

    side: int
    rest: Expr


class Term(NamedTuple):
    """A conjunction: its solved and its unsolved literals."""

    solved: tuple[Bound, ...]
    unsolved: tuple[Bool, ...]


def terms(where: Bool, context: MaskContext) -> tuple[Term, ...]:
    """Return the condition as a union of conjunctions. A part with more than MOST_TERMS of them becomes one unsolved
    literal.

    So do the comparisons of a condition after the first MOST_SOLVED, and the bounds of a term after the first
    MOST_BOUNDS or with more than MOST_NODES nodes. These limits count steps and sizes, so the result depends only on
    the condition.

    A conjunction is left out if no pair inside the tensors satisfies one of its bounds (`q_idx > q_len`) or two of them
    (`q_idx < 3`, `q_idx == 3`).
    """
    return _solved_terms(where, context)[0]


def exceeds_limits(where: Bool, context: MaskContext) -> bool:
    """True if `terms` reaches a limit before the whole condition is solved."""
    return _solved_terms(where, context)[1]


@cache
def _solved_terms(where: Bool, context: MaskContext) -> tuple[tuple[Term, ...], bool]:
    """Return the terms, and whether a limit left part of the condition unsolved."""
    found = []
    budget = _Budget()
    for literals in _union(_plain(where, context), context, budget):
        each = dict.fromkeys(literals)
        short = [x for x in each if isinstance(x, Bound) and size(x.rest) <= MOST_NODES]
        solved = tuple(short[:MOST_BOUNDS])
        budget.exceeded |= len(solved) < sum(isinstance(x, Bound) for x in each)
        free = [x.rest for x in solved if x.side == 0] + [
            a.rest + b.rest for a, b in combinations(solved, 2) if a.side + b.side == 0
        ]
        if not any(_positive_in_all_rows(rest, context) for rest in free):
            found.append(Term(solved, tuple(_condition(x, context) for x in each if x not in solved)))
    return tuple(dict.fromkeys(found)), budget.exceeded


def _condition(literal: Bound | Bool, context: MaskContext) -> Bool:
    """A literal as a condition."""
    return sympy.Le(literal.side * context.loop_idx + literal.rest, 0) if isinstance(literal, Bound) else literal


@dataclass
class _Budget:
    """Number of comparisons of a condition that may still be solved, and whether more were requested."""

    left: int = MOST_SOLVED
    exceeded: bool = False

    def take(self) -> bool:
        """Count one comparison; return whether it may be solved."""
        self.left -= 1
        self.exceeded |= self.left < 0
        return self.left >= 0


def _positive_in_all_rows(rest: Expr, context: MaskContext) -> bool:
    """True if an expression without the loop's index is proven to be above 0 in every row of the program axis, so that
    no row satisfies the bound `rest <= 0`."""
    found = extremes(rest, context, (sympy.Integer(0), symbol(AXIS_EXTENT[context.axis]) - 1))
    return found is not None and prove_le(sympy.Integer(1), with_rows(found[0], context.axis, context.rows))


Literals = tuple[Any, ...]


def _union(e: Bool, context: MaskContext, budget: _Budget) -> list[Literals]:
    """Return the condition in disjunctive normal form. Its literals are `Bound`s and unsolved conditions."""
    if e == sympy.true:
        return [()]
    if e == sympy.false:
        return []
    if isinstance(e, sympy.Or):
        found = [term for a in _sorted(e) for term in _union(a, context, budget)]
        return found if len(found) <= MOST_TERMS else [(e,)]
    if isinstance(e, sympy.And):
        parts = [_union(a, context, budget) for a in _sorted(e)]
        while math.prod(map(len, parts)) > MOST_TERMS:  # replace the largest union by the whole condition, unsolved
            parts[max(range(len(parts)), key=lambda i: len(parts[i]))] = [(e,)]
        return [tuple(x for literals in choice for x in literals) for choice in product(*parts)]
    if isinstance(e, INEQUALITIES) and not budget.take():
        return [(e,)]
    if (parts := split_extremes(e)) != e:
        return _union(parts, context, budget)
    if isinstance(e, INEQUALITIES):
        solved = solve(e, context)
        if solved is not None:
            return [(solved,)] if isinstance(solved, Bound) else _union(_plain(solved, context), context, budget)
    return [(e,)]


def _sorted(e: Bool) -> list[Bool]:
    return sorted(e.args, key=sympy.default_sort_key)


def _plain(e: Bool, context: MaskContext) -> Bool:
    """Return the condition with negations only on symbols and on literals of facts, and with each equality of integers
    as two comparisons."""
    if any(e == fact.literal for fact in context.facts):
        return e
    if isinstance(e, (sympy.And, sympy.Or)):
        return e.func(*(_plain(a, context) for a in e.args))
    if isinstance(e, sympy.Not):
        inner = e.args[0]
        if any(inner == fact.literal for fact in context.facts):
            return e
        if isinstance(inner, sympy.Not):
            return _plain(inner.args[0], context)
        if isinstance(inner, (sympy.And, sympy.Or)):
            other = sympy.Or if isinstance(inner, sympy.And) else sympy.And
            return other(*(_plain(sympy.Not(a), context) for a in inner.args))
        return e
    numbers = isinstance(e, (sympy.Eq, sympy.Ne)) and not any(x.is_Boolean for x in e.args if not x.is_Symbol)
    if numbers and not mentions(e, context.others) and _whole(e.lhs - e.rhs):
        combine = sympy.And if isinstance(e, sympy.Eq) else sympy.Or
        first, second = (sympy.Le, sympy.Ge) if isinstance(e, sympy.Eq) else (sympy.Lt, sympy.Gt)
        return combine(first(e.lhs, e.rhs), second(e.lhs, e.rhs))
    return e


def _whole(e: Expr) -> bool:
    """True if an expression is an integer whenever its symbols are integers."""
    return not e.has(sympy.Pow, sympy.Float, *REAL, *TO_INTEGER) and all(n.is_Integer for n in e.atoms(sympy.Number))


def solve(condition: Bool, context: MaskContext) -> Any:
    """Solve a comparison. Return a `Bound`, or a condition of simpler comparisons that the caller solves, or None if it
    cannot be solved."""
    difference = excess(condition)
    if mentions(difference, context.others) or not _whole(difference):
        return None
    return _solved(sympy.expand(difference), context)


def _solved(e: Expr, context: MaskContext) -> Any:
    """Solve e <= 0 over integers for the loop's index. Returns the same kinds of results as `solve`."""
    index = context.loop_idx
    if not e.has(index):
        return Bound(0, e)
    inner = [term for term in sympy.Add.make_args(e) if term.has(index)]
    rest = sympy.Add(*(term for term in sympy.Add.make_args(e) if not term.has(index)))
    factor = e.coeff(index)
    if factor.is_Integer and sympy.expand(sympy.Add(*inner) - factor * index) == 0:
        return _linear(int(factor), rest)
    for kind in (sympy.Max, sympy.Min, sympy.Abs, clamp, select):
        for extreme in sorted((x for x in e.atoms(kind) if x.has(index)), key=sympy.default_sort_key):
            split = _split(e, extreme)
            if split is not None:
                return split
    if len(inner) != 1:
        return None
    number, core = inner[0].as_coeff_Mul()
    if (
        not number.is_Integer
        or not isinstance(core, floordiv)
        or not _positive(core.args[1])
        or core.args[1].has(index)
    ):
        return None
    below, by = core.args
    if number > 0:  # floor(below / by) <= most
        most = floordiv(sympy.expand(-rest), number)
        return _solved(sympy.expand(below - by * most - by + 1), context)
    least = -floordiv(sympy.expand(-rest), -number)  # floor(below / by) >= least
    return _solved(sympy.expand(by * least - below), context)


def _positive(e: Expr) -> bool:
    """True if a divisor is known to be positive. Symbols are: the verifier's rule `names` admits only positive
    arguments as divisors."""
    return bool(e.is_positive or e.is_Symbol)


def _linear(factor: int, rest: Expr) -> Bound:
    """Return factor * index + rest <= 0 as a Bound of side 1 or -1. It is scaled by 1 / abs(factor) and rounded so that
    the same integers satisfy it."""
    if abs(factor) == 1:
        return Bound(factor, rest)
    if factor > 0:
        return Bound(1, -floordiv(sympy.expand(-rest), sympy.Integer(factor)))
    return Bound(-1, -floordiv(sympy.expand(-rest), sympy.Integer(-factor)))


def _split(e: Expr, extreme: Expr) -> Any:
    """Return e <= 0 as a condition without `extreme`, a min, max, abs, clamp or select in e. None unless e is an
    integer times `extreme`, plus a rest without it."""
    mark = sympy.Dummy()
    marked = sympy.expand(e.xreplace({extreme: mark}))
    factor = marked.coeff(mark)
    if not factor.is_Integer or factor == 0 or sympy.expand(marked - factor * mark).has(mark):
        return None

    def part(x: Expr) -> Bool:
        return sympy.Le(marked.xreplace({mark: x}), 0)

    if isinstance(extreme, select):
        condition, a, b = extreme.args
        return sympy.Or(sympy.And(condition, part(a)), sympy.And(sympy.Not(condition), part(b)))
    if isinstance(extreme, clamp):
        x, low, high = extreme.args
        return part(sympy.Min(sympy.Max(x, low, evaluate=False), high, evaluate=False))
    alternatives = (extreme.args[0], -extreme.args[0]) if isinstance(extreme, sympy.Abs) else extreme.args
    every = (factor > 0) == (not isinstance(extreme, sympy.Min))
    return (sympy.And if every else sympy.Or)(*(part(x) for x in alternatives))


def extremes(e: Expr, context: MaskContext, rows: tuple[Expr, Expr] | None = None) -> tuple[Expr, Expr] | None:
    """Return the least and greatest value of an expression over rows of the program tile, in closed form; None if
    unknown.

    These are the rows from the first to the last of `rows`; by default the valid rows, or all if `context.whole`. The
    bounds are exact if the program's index occurs once in the expression. Otherwise they may be too wide, but never too
    narrow. Bounds with more than MOST_NODES nodes are unknown.
    """
    first = symbol(f"{context.axis}_start")
    first, last = rows or (
        first,
        first + symbol(AXIS_DIM[context.axis]) - 1 if context.whole else last_row(context.axis),
    )

    def bound(e: Expr) -> tuple[Expr, Expr] | None:
        if e == context.axis_idx:
            return first, last
        if e.is_Symbol and str(e) in context.rows:
            return least(str(e)), greatest(str(e))
        if not e.has(context.axis_idx) and not mentions(e, context.rows):
            return e, e
        if isinstance(e, mod):
            return sympy.Integer(0), e.args[1] - 1
        if isinstance(e, select):
            known = [pair for x in e.args[1:] if (pair := bound(x)) is not None]
            if len(known) < len(e.args) - 1:
                return None
            return sympy.Min(*(low for low, _ in known)), sympy.Max(*(high for _, high in known))
        parts = [bound(x) for x in e.args]
        if any(part is None for part in parts):
            return None
        lows, highs = [part[0] for part in parts], [part[1] for part in parts]  # type: ignore[index]
        if sum(map(size, (*lows, *highs))) > MOST_NODES:  # nested expressions are duplicated at each level
            return None
        if e.is_Add or isinstance(e, (sympy.Min, sympy.Max)):
            return e.func(*lows), e.func(*highs)
        if isinstance(e, clamp):
            return sympy.Min(sympy.Max(lows[0], lows[1]), lows[2]), sympy.Min(sympy.Max(highs[0], highs[1]), highs[2])
        if isinstance(e, floordiv) and _positive(e.args[1]) and lows[1] == highs[1]:
            return floordiv(lows[0], lows[1]), floordiv(highs[0], highs[1])
        if isinstance(e, sympy.Abs):
            return sympy.Max(lows[0], -highs[0], 0), sympy.Max(-lows[0], highs[0])
        if e.is_Mul:
            number, core = e.as_coeff_Mul()
            if number.is_Integer and number != 1:
                low, high = bound(core) or (None, None)
                return (
                    None
                    if low is None
                    else (number * low, number * high)
                    if number > 0
                    else (number * high, number * low)
                )
        return None

    return bound(sympy.expand(e))


@cache
def linear_parts(condition: Bool, own: str, loop: str) -> tuple[int, int, Expr] | None:
    """Return (a, c, rest) such that the condition is a*own_idx + c*loop_idx + rest <= 0 over integers; None if it is
    not linear."""
    if not isinstance(condition, INEQUALITIES):
        return None
    difference = excess(condition)
    own_idx, loop_idx = symbol(f"{own}_idx"), symbol(f"{loop}_idx")
    a, c = difference.coeff(own_idx), difference.coeff(loop_idx)
    rest = sympy.expand(difference - a * own_idx - c * loop_idx)
    if not (a.is_Integer and c.is_Integer) or rest.has(own_idx, loop_idx) or not _whole(rest):
        return None
    return int(a), int(c), rest


@cache
def _without_remainders(p: Bool) -> Bool:
    """Return a comparison that follows from p, without added or subtracted remainders: each is replaced by 0 or by its
    divisor minus 1."""
    if not isinstance(p, INEQUALITIES):
        return p
    total = excess(p)
    for remainder in total.atoms(mod):
        factor = total.coeff(remainder)
        if factor in (1, -1):
            total = total - factor * remainder - (remainder.args[1] - 1 if factor < 0 else 0)
    return total <= 0 if total != excess(p) else p


def implies(p: Bool, q: Bool, own: str, loop: str) -> bool:
    """True if p is proven to imply q for all rows 0 <= own_idx <= extent - 1. Both must be linear, with the same
    coefficient of the loop's index. Only p may contain remainders of a row's index."""
    first, second = linear_parts(_without_remainders(p), own, loop), linear_parts(q, own, loop)
    if first is None or second is None or first[1] != second[1]:
        return False
    (c, x), (d, y) = first[2].as_coeff_Add(), second[2].as_coeff_Add()
    if x == y and second[0] <= first[0]:  # they differ by a constant; `expand` would be slow for many pairs
        return bool(d <= c)
    if x == y:  # the last row's index has no bound
        return False
    slope = second[0] - first[0]  # q's left side is at most p's plus slope*own + difference
    last = symbol(AXIS_EXTENT[own]) - 1
    greatest = second[2] - first[2] + (slope * last if slope > 0 else 0)
    return bool(sympy.expand(greatest).is_nonpositive)


def last_row(own: str) -> Expr:
    """Return the last valid row of the program tile."""
    return sympy.Min(symbol(f"{own}_start") + symbol(AXIS_DIM[own]), symbol(AXIS_EXTENT[own])) - 1


def least(name: str) -> Expr:
    """Return the symbol for the least number of a value over the rows of the program tile."""
    return symbol(f"{name}_least")


def greatest(name: str) -> Expr:
    """Return the symbol for the greatest number of a value over the rows of the program tile."""
    return symbol(f"{name}_greatest")


@cache
def with_rows(e: Expr, own: str, rows: frozenset[str]) -> Expr:
    """Return the expression with the fact substituted that the first row of a program tile is a row of the tensor.

    So the greatest number of each value in `rows`, which have one number per row, is not below its least number.
    """
    extent, first = symbol(AXIS_EXTENT[own]), symbol(f"{own}_start")
    known = {extent: first + 1 + sympy.Symbol("rows_after_first", integer=True, nonnegative=True)}
    for name in rows:
        known[greatest(name)] = least(name) + sympy.Symbol(f"{name}_spread", integer=True, nonnegative=True)
    return e.xreplace(known)
