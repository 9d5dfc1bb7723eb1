"""What is proven of expressions for every value of their symbols: that one is at most another, that one condition follows from another."""

from __future__ import annotations

from functools import cache

import sympy

from attngen.ir.expr import INEQUALITIES, Bool, Expr, cdiv, floordiv, select


@cache
def prove_le(a: Expr, b: Expr) -> bool:
    """True only if a <= b for every value of the symbols; False means not proven."""
    if a == b:
        return True
    if isinstance(a, sympy.Max):
        return all(prove_le(x, b) for x in a.args)
    if isinstance(b, sympy.Min):
        return all(prove_le(a, x) for x in b.args)
    difference = b - a
    if difference.is_nonnegative:
        return True
    if isinstance(a, sympy.Min) and any(prove_le(x, b) for x in a.args):
        return True
    if isinstance(b, sympy.Max) and any(prove_le(a, x) for x in b.args):
        return True
    if isinstance(a, (floordiv, cdiv)) and isinstance(b, (floordiv, cdiv)) and a.args[1] == b.args[1]:
        return not (isinstance(a, cdiv) and isinstance(b, floordiv)) and prove_le(a.args[0], b.args[0])
    if a.is_zero and isinstance(b, (floordiv, cdiv)):
        return prove_le(a, b.args[0])
    (m, x), (n, y) = a.as_coeff_Mul(), b.as_coeff_Mul()
    if m == n and m != 1 and not m.is_zero and (x.is_Function or y.is_Function):
        return prove_le(x, y) if m > 0 else prove_le(y, x)
    if isinstance(a, select) and isinstance(b, select) and a.args[0] == b.args[0]:
        return prove_le(a.args[1], b.args[1]) and prove_le(a.args[2], b.args[2])
    if isinstance(a, select) and isinstance(b, select) and entails(a.args[0], b.args[0]):
        return prove_le(a.args[1], _chosen(b.args[1], a.args[0])) and all(prove_le(a.args[2], x) for x in b.args[1:])
    if isinstance(a, select):
        return all(prove_le(x, b) for x in a.args[1:])
    if isinstance(b, select):
        return all(prove_le(a, x) for x in b.args[1:])
    for term in sympy.Add.make_args(difference):  # the extremes inside a sum, one by one
        factor, extreme = term.as_coeff_Mul()
        if isinstance(extreme, (sympy.Min, sympy.Max)) and difference != extreme:
            enough = all if isinstance(extreme, sympy.Min) == (factor > 0) else any
            return enough(prove_le(sympy.Integer(0), difference - term + factor * x) for x in extreme.args)
    if difference.has(floordiv):
        return bool(sympy.factor_terms(difference).is_nonnegative)
    return bool(_at_least(difference) >= 0)


def _at_least(total: Expr) -> Expr:
    """A number that a sum is not below: its positive whole numbers are 1 or more, what is not negative is 0 or more; else -oo."""
    least = sympy.Integer(0)
    for term in sympy.Add.make_args(total):
        factor, x = term.as_coeff_Mul()
        if x != 1 and (factor < 0 or not x.is_nonnegative):
            return -sympy.oo
        least += factor if x == 1 or (x.is_integer and x.is_positive) else 0
    return least


def excess(comparison: Bool) -> Expr:
    """What a comparison of integers, none of them (un)equality, says is at most 0."""
    strict = isinstance(comparison, (sympy.Lt, sympy.Gt))
    return comparison.lts - comparison.gts + (1 if strict else 0)


def entails(first: Bool, second: Bool) -> bool:
    """True only if the second comparison of integers holds wherever the first does."""
    if not all(isinstance(c, INEQUALITIES) for c in (first, second)):
        return bool(first == second)
    return prove_le(excess(second), excess(first))


def _chosen(e: Expr, condition: Bool) -> Expr:
    """What a choice gives where a condition holds that implies its own; any other expression as it is."""
    while isinstance(e, select) and entails(condition, e.args[0]):
        e = e.args[1]
    return e
