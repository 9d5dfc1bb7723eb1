"""Proofs that hold for every value of the symbols: that one expression is at most another, or that one condition
implies another."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import sympy

from attngen.ir.expr import INEQUALITIES, Bool, Expr, cdiv, floordiv, select

MOST_STEPS = 400  # budget of a proof

LessEqual = Callable[[Expr, Expr], bool]


def prove_le(a: Expr, b: Expr) -> bool:
    """Return True only if a <= b for every value of the symbols; False means not proven.

    A proof splits minima, maxima and selects into cases, which may be exponentially many, so a question has a budget of
    MOST_STEPS steps. The answer depends only on the question: a cached answer costs the steps that it took.
    """
    return _proof(a, b)[0]


def is_given_up(a: Expr, b: Expr) -> bool:
    """True if the proof of a <= b ran out of steps."""
    return _proof(a, b)[1] >= MOST_STEPS


@cache
def _proof(a: Expr, b: Expr) -> tuple[bool, int]:
    """Return whether a <= b is proven, and the steps that this takes, including those of cached answers."""
    steps = 1

    def le(x: Expr, y: Expr) -> bool:
        nonlocal steps
        if steps >= MOST_STEPS:
            return False
        proven, taken = _proof(x, y)
        steps += taken
        return proven

    proven = _decide(a, b, le)
    return proven and steps < MOST_STEPS, min(steps, MOST_STEPS)


def _decide(a: Expr, b: Expr, le: LessEqual) -> bool:
    """True if a <= b is proven, given answers of `le` to simpler questions."""
    if a == b:
        return True
    if isinstance(a, sympy.Max):
        return all(le(x, b) for x in a.args)
    if isinstance(b, sympy.Min):
        return all(le(a, x) for x in b.args)
    difference = b - a
    if difference.is_nonnegative:
        return True
    if isinstance(a, sympy.Min) and any(le(x, b) for x in a.args):
        return True
    if isinstance(b, sympy.Max) and any(le(a, x) for x in b.args):
        return True
    if isinstance(a, (floordiv, cdiv)) and isinstance(b, (floordiv, cdiv)) and a.args[1] == b.args[1]:
        return not (isinstance(a, cdiv) and isinstance(b, floordiv)) and le(a.args[0], b.args[0])
    if a.is_zero and isinstance(b, (floordiv, cdiv)):
        return le(a, b.args[0])
    (m, x), (n, y) = a.as_coeff_Mul(), b.as_coeff_Mul()
    if m == n and m != 1 and not m.is_zero and (x.is_Function or y.is_Function):
        return le(x, y) if m > 0 else le(y, x)
    if isinstance(a, select) and isinstance(b, select) and a.args[0] == b.args[0]:
        return le(a.args[1], b.args[1]) and le(a.args[2], b.args[2])
    if isinstance(a, select) and isinstance(b, select) and _entails(a.args[0], b.args[0], le):
        return le(a.args[1], _chosen(b.args[1], a.args[0], le)) and all(le(a.args[2], x) for x in b.args[1:])
    if isinstance(a, select):
        return all(le(x, b) for x in a.args[1:])
    if isinstance(b, select):
        return all(le(a, x) for x in b.args[1:])
    for term in sympy.Add.make_args(difference):  # minima and maxima inside a sum, one by one
        factor, extreme = term.as_coeff_Mul()
        if isinstance(extreme, (sympy.Min, sympy.Max)) and difference != extreme:
            enough = all if isinstance(extreme, sympy.Min) == (factor > 0) else any
            return enough(le(sympy.Integer(0), difference - term + factor * x) for x in extreme.args)
    if difference.has(floordiv):
        return bool(sympy.factor_terms(difference).is_nonnegative)
    return bool(_at_least(difference) >= 0)


def _at_least(total: Expr) -> Expr:
    """A lower bound of a sum: a positive integer term counts as at least 1, a non-negative term as at least 0; -oo if
    some term has no bound."""
    least = sympy.Integer(0)
    for term in sympy.Add.make_args(total):
        factor, x = term.as_coeff_Mul()
        if x != 1 and (factor < 0 or not x.is_nonnegative):
            return -sympy.oo
        least += factor if x == 1 or (x.is_integer and x.is_positive) else 0
    return least


def excess(comparison: Bool) -> Expr:
    """An expression that is at most 0 exactly where a comparison of integers, not an (in)equality, holds."""
    strict = isinstance(comparison, (sympy.Lt, sympy.Gt))
    return comparison.lts - comparison.gts + (1 if strict else 0)


def entails(first: Bool, second: Bool) -> bool:
    """Return True only if the second comparison of integers holds wherever the first does."""
    return _entails(first, second, prove_le)


def _entails(first: Bool, second: Bool, le: LessEqual) -> bool:
    if not all(isinstance(c, INEQUALITIES) for c in (first, second)):
        return bool(first == second)
    return le(excess(second), excess(first))


def _chosen(e: Expr, condition: Bool, le: LessEqual) -> Expr:
    """The branch of a select that is taken where `condition` implies its own condition; other expressions unchanged."""
    while isinstance(e, select) and _entails(condition, e.args[0], le):
        e = e.args[1]
    return e
