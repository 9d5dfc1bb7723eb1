"""The meaning of a spec in sympy: its score, its mask, their derivatives and the tensors that they read."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import sympy
from sympy.logic.boolalg import Boolean

from attngen.heuristics import LISTED
from attngen.ir import Blocks, Fact, Meaning, Read, input_tensors
from attngen.ir.dtypes import by_precision
from attngen.ir.expr import Expr, clamp, cos, erf, log, select, sigmoid, sin, size, sqrt, symbol
from attngen.lang.part import KV, NATURAL, Q
from attngen.spec import Spec
from attngen.tiles.intervals import MaskContext, mentions, terms
from attngen.tiles.sampled import worth_listing

S, SCALE = symbol("s"), symbol("scale")
MOST_BRANCHED = 2000  # most nodes of an expression whose abs, min and max are rewritten as choices
MOST_FACTORED_NODES = 500  # most nodes of two derivatives whose ratio is factored
# functions that are computed once if they occur twice
SHARED = (sympy.exp, log, sympy.tanh, sigmoid, sqrt, erf, sin, cos, sympy.Pow)


def meaning(spec: Spec) -> Meaning:
    """The meaning of the spec, for the module's header. The verifier checks every kernel against it."""
    where, by_key = spec.visible(), spec.visible_by_key()
    known = tuple(fact for fact in spec.mask.facts() if where.has(fact.literal) or by_key.has(fact.literal))
    score, sink = spec.modified(), next((s.sink() for s in spec.score if s.sink() is not None), None)
    types = input_tensors(spec.inputs(), spec.derived())
    expressions = [where, by_key, *(e for fact in known for e in fact), score, *([] if sink is None else [sink])]
    named = {str(s) for e in expressions for s in e.free_symbols}
    reads: list[Read] = []
    for read in reversed(spec.reads()):  # from the last to the first, because an index may name earlier reads
        if read.name in named:
            named |= {str(s) for e in read.index for s in e.free_symbols}
            natural = read.name == read.tensor and read.index == tuple(NATURAL.get(d) for d in types[read.tensor].dims)
            reads += [] if natural else [read]
    return Meaning(where, None if by_key == where else by_key, known, score, sink, tuple(reversed(reads)))


def varies(spec: Spec, read: Read, position: Expr) -> bool:
    """True if the index of a read depends on a position, directly or through another read."""
    names = {s for e in read.index for s in e.free_symbols}
    return position in names or any(
        varies(spec, other, position) for other in spec.reads() if symbol(other.name) in names
    )


def named_by(spec: Spec, expressions: Iterable[Expr]) -> set[str]:
    """The names in expressions, and in the indices of the reads named there."""
    found = {str(s) for e in expressions for s in e.free_symbols}
    for read in reversed(spec.reads()):
        found |= {str(s) for e in read.index for s in e.free_symbols} if read.name in found else set()
    return found


def usable_fact(fact: Fact, along: set[str]) -> Fact:
    """A fact about a condition, without the parts that vary along the loop."""

    def usable(e: Boolean) -> bool:
        return along.isdisjoint(str(s) for s in e.free_symbols)

    return Fact(
        fact.literal,
        sympy.And(*(part for part in sympy.And.make_args(fact.needs) if usable(part))),
        sympy.Or(*(part for part in sympy.Or.make_args(fact.enough) if usable(part))),
    )


def _per_score(spec: Spec) -> set[Expr]:
    """The symbols whose values differ inside a tile."""
    return {S, Q, KV, *(symbol(r.name) for r in spec.reads() if varies(spec, r, Q) or varies(spec, r, KV))}


def listed_blocks(spec: Spec) -> Blocks | None:
    """The blocks that a mask names, or blocks found by evaluating it, or None.

    A mask is evaluated if a condition on data bounds no loop, or if the bounds leave too many blocks.
    """
    if spec.mask.blocks():
        return spec.mask.blocks()
    return Blocks(LISTED, data=True) if any(_by_data(spec, axis) for axis in ("q", "kv")) or _by_formula(spec) else None


def _by_formula(spec: Spec) -> bool:
    """True if the mask depends only on positions and lengths, and block lists are worth their cost (see
    `worth_listing`)."""
    where, lists = spec.visible(), spec.cache is None and spec.schedule.order == "q_outer"
    return lists and not spec.mask.inputs() and not spec.mask.derived() and worth_listing(where)


def _by_data(spec: Spec, axis: str) -> bool:
    """True if part of the mask is data that does not bound the loops of kernels whose programs own tiles of `axis`."""
    loop = "kv" if axis == "q" else "q"
    types = input_tensors(spec.inputs(), spec.derived())
    along, rows = ({r.name for r in spec.reads() if varies(spec, r, symbol(f"{over}_idx"))} for over in (loop, axis))
    others = along | {r.name for r in spec.reads() if r.name in rows and types[r.tensor].dtype != "i32"}
    context = MaskContext(axis, loop, frozenset(rows - others), frozenset(others), spec.mask.facts())
    known = {fact.literal for fact in context.facts}
    where = spec.visible() if axis == "q" else spec.visible_by_key()
    return any(mentions(x, context.others) for term in terms(where, context) for x in term.unsolved if x not in known)


def singular(spec: Spec, e: Expr) -> bool:
    """True if an expression of a score, or its derivative, may be infinite or undefined for some pair, such as one past
    the ends."""
    inside = _per_score(spec)
    return any(
        isinstance(f, (log, sqrt)) or (f.is_Pow and not (f.exp.is_Integer and f.exp > 0))
        for f in sympy.preorder_traversal(e)
        if f.args and inside & f.args[0].free_symbols
    )


def unbounded(spec: Spec) -> bool:
    """True if scores may be -inf without a mask, as a bias per score can make them."""
    score = spec.modified()
    kinds = {i.name: i.dtype for i in spec.inputs()}
    read = {symbol(r.name) for r in spec.reads() if kinds.get(r.tensor) in ("f32", "T")}
    return singular(spec, score) or bool(read & _per_score(spec) & score.free_symbols)


def only_fp32(spec: Spec) -> bool:
    return all(by_precision([dtype]) for dtype in spec.dtype)


def exact_partials(spec: Spec) -> bool:
    """True if the splits of a row's keys are combined by maximum and sum, not by the LSE.

    Rounding a split's LSE to fp32 would scale its weight by the exponential of the error.
    """
    return by_precision(spec.dtype)


def exact_sums(spec: Spec) -> bool:
    """True if weights are recomputed from the row's maximum and sum, not from the LSE.

    Rounding the LSE to fp32 would scale each weight by the exponential of the error.
    """
    return by_precision(spec.dtype) and (spec.trains or "key_mass" in spec.outputs)


def keeps_extremes(spec: Spec) -> bool:
    """True if a score too large or too low for fp32 to base 2 stays finite there, so that a row with only lowest scores
    gets the mean of its values.

    This takes four operations per score. Modules that also accept 16-bit types do without: there a row of such scores
    sees no key.
    """
    return only_fp32(spec) and unbounded(spec)


def of_product(e: Expr) -> Expr:
    """Rewrite an expression in the scaled score as one in the product q k^T, which kernels name `s`."""
    return e.xreplace({S: S * SCALE})


def whole_numbers(e: Expr) -> Expr:
    """Replace floats that are whole by integers: 1.0 x is x."""
    found = {x: sympy.Integer(int(x)) for x in e.atoms(sympy.Float) if x == int(x) and abs(x) < 2**24}
    return e.xreplace(found)


def derivative(e: Expr, by: Expr) -> Expr:
    """The derivative by `sympy.diff`, with PyTorch's conventions where it does not exist.

    abs has 0 at 0; min and max of equal arguments give half to each; clamp has 1 at its bounds; conditions, `//` and
    `%` have 0.
    """
    return sympy.diff(_branches(e, by), by) if _branched_size(e, by) <= MOST_BRANCHED else _by_chain_rule(e, by)


@cache
def _branched_size(e: Any, by: Expr) -> int:
    """Estimate how many nodes `_branches` makes: it repeats the arguments of abs, min and max several times."""
    if _has_no_slope(e, by):
        return 1
    if isinstance(e, (sympy.Min, sympy.Max)):
        sizes = [_branched_size(a, by) for a in e.args]
        return int(sum(5 * x * 4 ** (len(sizes) - 1) for x in sizes)) if len(sizes) < 32 else MOST_BRANCHED + 1
    times = 4 if isinstance(e, sympy.Abs) else 3 if isinstance(e, clamp) else 1
    return 1 + times * sum(_branched_size(a, by) for a in e.args)


@cache
def _by_chain_rule(e: Any, by: Expr) -> Any:
    """The same derivative with the slope of an abs, min or max as a factor, so that nested ones give a product."""
    if _has_no_slope(e, by) or e == by:
        return sympy.Integer(int(e == by))
    if isinstance(e, sympy.Abs):
        (x,) = e.args
        return select(x > 0, sympy.Integer(1), select(x < 0, sympy.Integer(-1), sympy.Integer(0))) * _by_chain_rule(
            x, by
        )
    if isinstance(e, (sympy.Min, sympy.Max)):
        value, *rest = sorted(e.args, key=sympy.default_sort_key)
        slope, half = _by_chain_rule(value, by), sympy.Rational(1, 2)
        for other in rest:
            ahead, behind = (
                (value < other, other < value) if isinstance(e, sympy.Min) else (value > other, other > value)
            )
            share = select(ahead, sympy.Integer(1), select(behind, sympy.Integer(0), half))
            slope = share * slope + (1 - share) * _by_chain_rule(other, by)
            value = e.func(value, other)
        return slope
    if isinstance(e, clamp):
        x, low, high = e.args
        slopes = [_by_chain_rule(a, by) for a in e.args]
        return select(sympy.Or(x > high, low > high), slopes[2], select(x < low, slopes[1], slopes[0]))
    if isinstance(e, select):
        return select(e.args[0], *(_by_chain_rule(a, by) for a in e.args[1:]))
    marks = [sympy.Dummy(extended_real=True) if a.has(by) else a for a in e.args]
    back = dict(zip(marks, e.args))
    outer = e.func(*marks)
    return sympy.Add(
        *(outer.diff(m).xreplace(back) * _by_chain_rule(a, by) for m, a in zip(marks, e.args) if a.has(by))
    )


def without_common(spec: Spec, e: Expr) -> tuple[Expr, Expr]:
    """Split an expression into (factors that are the same for all scores of a head, the other factors).

    For (1 - tanh(s/t)**2) / t, with a t per head, the first is 1/t. The first is 1 if no real input occurs in these
    factors, because they may then be an integer.
    """
    common, rest = whole_numbers(e).as_independent(*_per_score(spec), as_Add=False)
    real = {i.name for i in spec.inputs() if i.dtype in ("f32", "T")}
    named = {str(s) for s in common.free_symbols}
    if named & real or any(r.name in named and r.tensor in real for r in spec.reads()):
        return common, rest
    return sympy.Integer(1), e


def sum_ratio(spec: Spec, slope: Expr, by_s: Expr) -> Expr | None:
    """The ratio of two sums over keys, of `slope` and of by_s * s; None if it depends on the key.

    It is slope / (by_s * s), if that is the same for all keys and divides by nothing that `slope` does not divide by.
    With a learned t, the scores s / t, s * t, s * exp(t), tanh(s / t) and s / t + bias have one, whereas (s + bias) / t
    and tanh(s) / t do not. Long formulas, which sympy may factor for minutes, count as ones without.
    """
    if size(slope) + size(by_s) > MOST_FACTORED_NODES:
        return None
    e = sympy.factor(slope / (S * by_s))
    by_key = {S, KV, *(symbol(r.name) for r in spec.reads() if varies(spec, r, KV))}
    return e if by_key.isdisjoint(e.free_symbols) and _divisors(e) <= _divisors(slope) else None


def _divisors(e: Expr) -> set[Any]:
    """The expressions by which an expression divides, or may divide."""
    return {f.base for f in sympy.preorder_traversal(e) if f.is_Pow and not (f.exp.is_Integer and f.exp > 0)}


def _has_no_slope(e: Any, by: Expr) -> bool:
    """True if a part of an expression has no derivative or the derivative 0: it is a condition, an integer, or does not
    depend on `by`."""
    return isinstance(e, Boolean) and not e.is_Symbol or bool(getattr(e, "is_integer", False)) or not e.has(by)


def _branches(e: Any, by: Expr) -> Any:
    """Rewrite abs, min, max and clamp as choices, where they have a slope.

    The derivative of a choice is that of the chosen branch.
    """
    if _has_no_slope(e, by) or not e.has(sympy.Abs, sympy.Min, sympy.Max, clamp):
        return e
    args = [_branches(a, by) for a in e.args]
    if isinstance(e, sympy.Abs):
        (x,) = args
        return select(x > 0, x, select(x < 0, -x, sympy.Integer(0)))
    if isinstance(e, clamp):
        x, low, high = args
        return select(sympy.Or(x > high, low > high), high, select(x < low, low, x))
    if isinstance(e, (sympy.Min, sympy.Max)):
        first, *rest = sorted(args, key=sympy.default_sort_key)
        for other in rest:
            ahead, behind = (
                (first < other, other < first) if isinstance(e, sympy.Min) else (first > other, other > first)
            )
            first = select(ahead, first, select(behind, other, (first + other) / 2))
        return first
    return e.func(*args)


def shared(*expressions: Expr) -> tuple[list[tuple[str, Expr]], list[Expr]]:
    """(named values, the expressions in terms of these): functions that occur more than once become values `t1`, `t2`,
    ...

    Each value is in terms of earlier ones.
    """
    counts: dict[Expr, int] = {}
    for e in expressions:
        for sub in sympy.preorder_traversal(e):
            if isinstance(sub, SHARED) and sub.free_symbols and not (sub.is_Pow and sub.exp.is_Integer):
                counts[sub] = counts.get(sub, 0) + 1
    found = sorted((e for e, n in counts.items() if n > 1), key=lambda e: (e.count_ops(), sympy.default_sort_key(e)))
    names: dict[Expr, Expr] = {}
    made: list[tuple[str, Expr]] = []
    for e in found:
        made.append((f"t{len(made) + 1}", _replaced(e, names)))
        names[e] = symbol(made[-1][0])
    return made, [_replaced(e, names) for e in expressions]


def _replaced(e: Any, names: dict[Expr, Expr]) -> Any:
    """The expression with its largest known parts replaced by their names."""
    if e in names:
        return names[e]
    if not e.args:
        return e
    args = [_replaced(a, names) for a in e.args]
    return e if all(a is b for a, b in zip(args, e.args)) else e.func(*args)
