"""A normal form of expressions, by which rules compare them. It shares no code with the passes that it checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import sympy
from sympy.logic.boolalg import Boolean

from attngen.ir import BITS, INEQUALITIES, TO_INTEGER, Expr, exp2, log, log2, sigmoid, symbol
from attngen.verify.points import agree

LOG2E, LN2 = symbol("LOG2E"), symbol("LN2")
NUMBERS = {LOG2E: sympy.Float(1 / math.log(2)), LN2: sympy.Float(math.log(2))}
TOLERANCE = 1e-9  # relative difference of products in different orders, far below the precision of fp32
COMMUTATIVE = (sympy.Add, sympy.And, sympy.Or, sympy.Min, sympy.Max, *BITS)


class power2(sympy.Function):  # noqa: N801
    """2 ** x, as a function that sympy knows to be positive."""

    nargs = 1
    is_extended_real = True
    is_extended_positive = True

    @classmethod
    def eval(cls, x: Expr) -> Expr | None:
        return 2**x if x.is_Integer and abs(x) < 128 else None


class inverse(sympy.Function):  # noqa: N801
    """1 / x for a sum x, as a function that `expand` does not multiply out."""

    nargs = 1
    is_extended_real = True

    def _eval_is_extended_positive(self) -> bool | None:
        return True if self.args[0].is_extended_positive else None


@cache
def normal(e: Any) -> Any:
    """The normal form: sums multiplied out, decimals as fractions, exponentials in base 2, comparisons with zero.

    A comparison of integers becomes `x <= 0`; of other numbers, `x <= 0` or `x < 0`.
    """
    if isinstance(e, sympy.Float):
        return sympy.Rational(float(e))
    if not e.args:
        return e
    if isinstance(e, TO_INTEGER):
        # Constants in a function that rounds are evaluated as floats, so that 2 * LN2 * log2(x) has its exact value.
        whole = e.args[0].replace(log, lambda x: LN2 * log2(x)).xreplace(NUMBERS)
        return e.func(normal(normal(whole).xreplace(NUMBERS)))  # also constants that a change to base 2 has added
    args = [normal(a) for a in e.args]
    if isinstance(e, INEQUALITIES):
        return _compared(args, isinstance(e, (sympy.Ge, sympy.Gt)), isinstance(e, (sympy.Lt, sympy.Gt)))
    if isinstance(e, (sympy.Eq, sympy.Ne)) and not any(a.is_Boolean and not a.is_Symbol for a in args):
        difference = sympy.expand(args[0] - args[1])
        return e.func(-difference if difference.could_extract_minus_sign() else difference, 0)
    made = _in_base_two(e, args)
    if made is None:
        made = (
            _inverse(*args)
            if e.is_Pow and args[0].is_Add and args[1].is_negative and args[1].is_Integer
            else e.func(*args)
        )
    return sympy.expand(made) if made.is_Add or made.is_Mul or made.is_Pow else made


def _inverse(e: Expr, power: Expr) -> Expr:
    """A negative power of a sum, by the function `inverse`. The sum is scaled, so that its first term has the factor
    1."""
    if e.is_Number:
        return e**power
    raised = e - 1  # 1 / (1 + 2**x) and 1 - 1 / (1 + 2**-x) are equal: one of them is the normal form
    if isinstance(raised, power2) and raised.args[0].could_extract_minus_sign():
        return (1 - _inverse(1 + power2(-raised.args[0]), sympy.Integer(-1))) ** -power
    first = min(e.args, key=sympy.default_sort_key).as_coeff_Mul()[0]
    return (inverse(sympy.expand(e / first)) / first) ** -power


def _compared(args: list[Expr], swapped: bool, strict: bool) -> Any:
    """The comparison args[0] <= args[1]; with `strict` it is <, and with `swapped` the arguments are swapped."""
    less, greater = args[::-1] if swapped else args
    kind = sympy.Lt if strict else sympy.Le
    if any(a.is_infinite for a in args):
        return kind(less, greater)
    difference = sympy.expand(less - greater)
    if difference.is_integer:
        return sympy.Le(difference + int(strict), 0)
    return kind(difference, 0)


def _in_base_two(e: Any, args: list[Expr]) -> Any:
    """An exponential, logarithm, tanh or sigmoid, written to base 2; None for other expressions."""
    if isinstance(e, (exp2, sympy.exp)):
        return power2(sympy.expand(args[0] if isinstance(e, exp2) else LOG2E * args[0]))
    if isinstance(e, log):
        return LN2 * log2(args[0])
    if isinstance(e, sympy.tanh):  # (e^2x - 1) / (e^2x + 1)
        return 1 - 2 * _inverse(1 + power2(sympy.expand(2 * LOG2E * args[0])), sympy.Integer(-1))
    if isinstance(e, sigmoid):
        return _inverse(1 + power2(sympy.expand(-LOG2E * args[0])), sympy.Integer(-1))
    if e.is_Pow and e.base.is_number and not e.exp.is_number:
        return power2(sympy.expand(args[1] * (1 if e.base == 2 else sympy.Rational(math.log2(float(e.base))))))
    return None


def same(a: Any, b: Any) -> bool:
    """True if two normal expressions are equal, up to TOLERANCE in their numbers."""
    if a == b:
        return True
    if a.is_Number and b.is_Number:
        return math.isclose(float(a), float(b), rel_tol=TOLERANCE)
    if a.is_Mul or b.is_Mul:
        (m, x), (n, y) = a.as_coeff_Mul(), b.as_coeff_Mul()
        return same(m, n) and _matched(sympy.Mul.make_args(x), sympy.Mul.make_args(y))
    if a.func != b.func or len(a.args) != len(b.args) or not a.args:
        return False
    return _matched(a.args, b.args) if isinstance(a, COMMUTATIVE) else all(map(same, a.args, b.args))


def equal(a: Any, b: Any) -> bool:
    """True if two expressions are equal in their normal forms or by their values at enough points."""
    return same(normal(a), normal(b)) or agree(a, b) is True


def alike(a: Any, b: Any) -> bool:
    """True if two conditions are built of equal comparisons: equal in form, or for real numbers in value."""
    if same(a, b):
        return True
    if a.func != b.func or len(a.args) != len(b.args):
        return False
    if isinstance(a, (sympy.And, sympy.Or, sympy.Not)):
        return _matched(a.args, b.args, alike)
    if not isinstance(a, sympy.core.relational.Relational) or not (_of_reals(a) and _of_reals(b)):
        return False
    x, y = ((e.lhs - e.rhs).replace(power2, exp2).replace(inverse, lambda x: 1 / x) for e in (a, b))
    return agree(x, y) is True or (isinstance(a, (sympy.Eq, sympy.Ne)) and agree(x, -y) is True)


def _of_reals(e: Any) -> bool:
    """True if some number in an expression is not known to be an integer."""
    return any(
        x.is_integer is not True for x in sympy.preorder_traversal(e) if not isinstance(x, Boolean) or x.is_Symbol
    )


def _matched(some: tuple[Any, ...], others: tuple[Any, ...], like: Callable[[Any, Any], bool] = same) -> bool:
    """True if two collections have the same expressions, in any order."""
    left = list(others)
    for x in some:
        found = next((y for y in left if like(x, y)), None)
        if found is None:
            return False
        left.remove(found)
    return not left
