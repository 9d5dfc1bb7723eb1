"""Symbols and functions of the IR's expressions, which are sympy expressions in memory.

ir/expr_text.py prints and parses them. Integers are floor-divided by `//`; `cdiv` rounds up; `select(c, a, b)` is `a if
c else b`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, TypeAlias

import mpmath
import sympy
from sympy.core.cache import cacheit
from sympy.functions.elementary.miscellaneous import MinMaxBase
from sympy.logic.boolalg import Boolean

from attngen.ir.names import INTEGERS

Expr: TypeAlias = Any  # a sympy expression; sympy has no types of its own
Bool: TypeAlias = Any  # a sympy boolean
Evaluated: TypeAlias = tuple[Callable[[Any], Any], tuple[Any, ...]]  # a function of mpmath, and its arguments
INEQUALITIES = (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)


MOST_COMPARED = 40  # most nodes of two arguments of a Min or Max that are compared; larger arguments are both kept


@cache
def size(e: Any) -> int:
    """The number of nodes of an expression, with shared nodes counted at each use."""
    return 1 + sum(map(size, e.args))


def _compares(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap sympy's comparison of two arguments of a Min or Max: cache answers, and skip large arguments."""
    remembered = cacheit(compare)
    return lambda cls, x, y: size(x) + size(y) <= MOST_COMPARED and remembered(cls, x, y)


# Sympy compares the arguments of each new Min and Max in pairs. That takes most of the time in which bounds are built,
# and the pairs recur. The method is not public: a version of sympy without it is only slower.
if hasattr(MinMaxBase, "_is_connected"):
    MinMaxBase._is_connected = classmethod(_compares(MinMaxBase._is_connected.__func__))


class floordiv(sympy.Function):  # noqa: N801 - printed by its name
    """floor(a / b) of integers, b > 0."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        if a.is_Number and b.is_Number:
            return sympy.floor(a / b)
        return a if b == 1 or a == 0 else None

    def _eval_is_nonnegative(self) -> bool | None:
        return self.args[0].is_nonnegative and self.args[1].is_positive


class cdiv(sympy.Function):  # noqa: N801
    """ceil(a / b) of integers, b > 0."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        if a.is_Number and b.is_Number:
            return sympy.ceiling(a / b)
        return a if b == 1 or a == 0 else None

    def _eval_is_nonnegative(self) -> bool | None:
        return (self.args[0].is_nonnegative and self.args[1].is_positive) or None


class mod(sympy.Function):  # noqa: N801
    """a - b * floor(a / b) of integers, b > 0: never negative, as in Python."""

    nargs = 2
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        if a.is_Integer and b.is_Integer:
            return a % b
        return sympy.Integer(0) if b == 1 or a == 0 else None


class select(sympy.Function):  # noqa: N801
    """a if condition else b."""

    nargs = 3
    is_extended_real = True

    @classmethod
    def eval(cls, condition: Any, a: Expr, b: Expr) -> Expr | None:
        if condition == sympy.true:
            return a
        if condition == sympy.false:
            return b
        return a if a == b else None

    def _eval_is_nonnegative(self) -> bool | None:
        a, b = (e.is_nonnegative for e in self.args[1:])
        return a if a == b else None

    def _eval_is_integer(self) -> bool | None:
        return all(e.is_integer for e in self.args[1:]) or None

    def _eval_derivative(self, s: Expr) -> Expr:
        return select(self.args[0], self.args[1].diff(s), self.args[2].diff(s))


class clamp(sympy.Function):  # noqa: N801
    """x limited to a .. b: min(max(x, a), b)."""

    nargs = 3
    is_extended_real = True

    @classmethod
    def eval(cls, x: Expr, a: Expr, b: Expr) -> Expr | None:
        return sympy.Min(sympy.Max(x, a), b) if all(e.is_number for e in (x, a, b)) else None

    def _eval_is_integer(self) -> bool | None:
        return all(e.is_integer for e in self.args) or None


class portion(sympy.Function):  # noqa: N801
    """The number of items in the first i parts, when n items are split into `parts` parts. Each part has n // parts
    items, and the first n % parts have one more. Requires parts > 0, and i from 0 to parts."""

    nargs = 3
    is_integer = True

    @classmethod
    def eval(cls, n: Expr, i: Expr, parts: Expr) -> Expr | None:
        if n == 0 or i == 0:
            return sympy.Integer(0)
        if all(e.is_Integer for e in (n, i, parts)):
            return i * (n // parts) + sympy.Min(i, n % parts)
        return n if i == parts else None

    def _eval_is_nonnegative(self) -> bool | None:
        return (self.args[0].is_nonnegative and self.args[1].is_nonnegative) or None


class divisor(sympy.Function):  # noqa: N801
    """The greatest divisor of a that is at most b; 1 if b is 0. Only host programs have it."""

    nargs = 2
    is_integer = True
    is_positive = True


class sqrt(sympy.Function):  # noqa: N801
    """The square root of a non-negative number."""

    nargs = 1
    is_extended_real = True
    is_extended_nonnegative = True

    def fdiff(self, argindex: int = 1) -> Expr:
        return 1 / (2 * self)


class log(sympy.Function):  # noqa: N801
    """The natural logarithm of a positive number."""

    nargs = 1
    is_extended_real = True

    @classmethod
    def eval(cls, x: Expr) -> Expr | None:
        return sympy.Integer(0) if x == 1 else None

    def fdiff(self, argindex: int = 1) -> Expr:
        return 1 / self.args[0]


class sigmoid(sympy.Function):  # noqa: N801
    """1 / (1 + exp(-x))."""

    nargs = 1
    is_extended_real = True

    def _eval_mpmath(self) -> Evaluated:
        return (lambda x: 1 / (1 + mpmath.exp(-x))), self.args

    def fdiff(self, argindex: int = 1) -> Expr:
        return self * (1 - self)


class erf(sympy.Function):  # noqa: N801
    """The error function: the integral of exp(-t**2) from 0 to x, times 2 / sqrt(pi)."""

    nargs = 1
    is_extended_real = True

    def fdiff(self, argindex: int = 1) -> Expr:
        return sympy.Float(2 / math.sqrt(math.pi)) * sympy.exp(-(self.args[0] ** 2))


class sin(sympy.Function):  # noqa: N801
    """The sine of an angle in radians."""

    nargs = 1
    is_extended_real = True

    def fdiff(self, argindex: int = 1) -> Expr:
        return cos(self.args[0])


class cos(sympy.Function):  # noqa: N801
    """The cosine of an angle in radians."""

    nargs = 1
    is_extended_real = True

    def fdiff(self, argindex: int = 1) -> Expr:
        return -sin(self.args[0])


class _Bits(sympy.Function):
    """A bitwise operation on two integers in two's complement.

    of: the operation.
    neutral: the number with which it returns its other operand.
    sign: the operator in Python and in Triton.
    """

    nargs = 2
    is_integer = True
    of: ClassVar[Callable[[int, int], int]]
    neutral: ClassVar[int]
    sign: ClassVar[str]

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(cls.of(int(a), int(b)))
        if a.is_Integer or not b.is_Integer and sympy.default_sort_key(b) < sympy.default_sort_key(a):
            return cls(b, a)  # canonical order, a number last
        return a if b == cls.neutral else None

    def _eval_is_nonnegative(self) -> bool | None:
        return all(e.is_nonnegative for e in self.args) or None


class bitand(_Bits):  # noqa: N801
    """Bitwise and. With 2**n - 1 it is the remainder modulo 2**n."""

    of = operator.and_
    neutral = -1
    sign = "&"

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        if b.is_Integer and not a.is_Integer and 0 <= b < 2**30 and int(b) & (int(b) + 1) == 0:
            return mod(a, b + 1)
        return super().eval(a, b)

    def _eval_is_nonnegative(self) -> bool | None:
        return any(e.is_nonnegative for e in self.args) or None


class bitor(_Bits):  # noqa: N801
    """Bitwise or."""

    of = operator.or_
    neutral = 0
    sign = "|"


class bitxor(_Bits):  # noqa: N801
    """Bitwise exclusive or."""

    of = operator.xor
    neutral = 0
    sign = "^"


class _Whole(sympy.Function):
    """An integer made from a real number, saturated at 2**30."""

    nargs = 1
    is_integer = True

    @classmethod
    def eval(cls, x: Expr) -> Expr | None:
        return x if x.is_integer else None

    def _eval_derivative(self, s: Expr) -> Expr:
        return sympy.Integer(0)


class floor(_Whole):  # noqa: N801
    """The greatest integer that is at most x."""


class nearest(_Whole):  # noqa: N801
    """The integer nearest to x; ties go to the even one."""

    def _eval_mpmath(self) -> Evaluated:
        return mpmath.nint, self.args


class trunc(_Whole):  # noqa: N801
    """x rounded towards zero."""

    def _eval_mpmath(self) -> Evaluated:
        return (lambda x: mpmath.floor(x) if x >= 0 else mpmath.ceil(x)), self.args


class exp2(sympy.Function):  # noqa: N801
    """2 ** x, which the hardware computes."""

    nargs = 1
    is_extended_real = True

    @classmethod
    def eval(cls, x: Expr) -> Expr | None:
        return 2**x if x.is_Integer and abs(x) < 128 else None

    def _eval_mpmath(self) -> Evaluated:
        return (lambda x: mpmath.power(2, x)), self.args


class log2(sympy.Function):  # noqa: N801
    """The base-2 logarithm."""

    nargs = 1
    is_extended_real = True

    def _eval_mpmath(self) -> Evaluated:
        return (lambda x: mpmath.log(x, 2)), self.args


LARGEST = sympy.Float((2 - 2**-23) * 2.0**127)  # finite fp32 number


def finite(e: Expr) -> Expr:
    """A real number, with infinities replaced by the largest finite number of the same sign. NaN stays."""
    return select(e > LARGEST, LARGEST, select(e < -LARGEST, -LARGEST, e))


TO_INTEGER = (floor, nearest, trunc)  # functions of real numbers that give integers
BITS = (bitand, bitor, bitxor)
REAL = (exp2, log2, sympy.exp, log, sympy.tanh, sigmoid, sqrt, erf, sin, cos)  # functions with real results

FUNCTIONS: dict[str, Any] = {
    "floordiv": floordiv,
    "cdiv": cdiv,
    "select": select,
    "clamp": clamp,
    "exp2": exp2,
    "log2": log2,
    "exp": sympy.exp,
    "log": log,
    "tanh": sympy.tanh,
    "sigmoid": sigmoid,
    "sqrt": sqrt,
    "erf": erf,
    "sin": sin,
    "cos": cos,
    "bitand": bitand,
    "bitor": bitor,
    "bitxor": bitxor,
    "divisor": divisor,
    "portion": portion,
    "floor": floor,
    "nearest": nearest,
    "trunc": trunc,
    "abs": sympy.Abs,
    "min": sympy.Min,
    "max": sympy.Max,
}


@cache
def symbol(name: str) -> sympy.Symbol:
    """The symbol of a name. Names in INTEGERS are integers, with the sign in that table; any other name is a real
    number."""
    least = INTEGERS[name].least if name in INTEGERS else None
    if least is None:
        return sympy.Symbol(name, extended_real=True)
    return (
        sympy.Symbol(name, integer=True, positive=True) if least else sympy.Symbol(name, integer=True, nonnegative=True)
    )


@cache
def symbol_names(e: Any) -> tuple[str, ...]:
    """The names of an expression's symbols, sorted."""
    return tuple(sorted(s.name for s in e.free_symbols))


def flattened(e: Expr) -> Expr:
    """An expression without a max that is an argument of a max, or a min that is one of a min. Sympy leaves some where
    it extracts common arguments."""
    extremes = e.atoms(sympy.Min, sympy.Max)
    if not any(isinstance(arg, x.func) for x in extremes for arg in x.args):
        return e
    return _rebuilt(e)


def _rebuilt(e: Expr) -> Expr:
    return e.func(*map(_rebuilt, e.args)) if e.args else e


@cache
def conjuncts(e: Bool) -> tuple[Bool, ...]:
    """The parts of a conjunction, with comparisons split by `split_extremes`, in an order that does not depend on
    hashes; empty for `true`."""
    parts = sympy.And.make_args(sympy.And(*map(split_extremes, sympy.And.make_args(e))))
    return tuple(sorted((part for part in parts if part != sympy.true), key=sympy.default_sort_key))


def split_extremes(e: Bool) -> Bool:
    """Split a comparison with a minimum or maximum into a conjunction: `x <= Min(a, b)` is `x <= a and x <= b`."""
    if not isinstance(e, INEQUALITIES):
        return e
    below = e if isinstance(e, (sympy.Le, sympy.Lt)) else e.reversed
    if isinstance(below.rhs, sympy.Min):
        return sympy.And(*(split_extremes(below.func(below.lhs, bound)) for bound in below.rhs.args))
    if isinstance(below.lhs, sympy.Max):
        return sympy.And(*(_exchanged(below.func(bound, below.rhs)) for bound in below.lhs.args))
    return e


def _exchanged(e: Bool) -> Bool:
    """A comparison with its sides exchanged. Where sympy has decided it, the result is unchanged."""
    return e.reversed if isinstance(e, sympy.core.relational.Relational) else e


def span(e: Expr) -> tuple[Expr, Expr]:
    """Lower and upper bound of an integer expression; infinite where its symbols are not bounded."""
    if e.is_Number:
        return e, e
    if e.is_Symbol:
        return (sympy.Integer(1) if e.is_positive else sympy.Integer(0) if e.is_nonnegative else -sympy.oo), sympy.oo
    if isinstance(e, mod) and e.args[1].is_Integer:
        return sympy.Integer(0), e.args[1] - 1
    parts = [
        span(a) for a in (e.args[1:] if isinstance(e, select) else e.args) if a.is_Symbol or not isinstance(a, Boolean)
    ]
    lows, highs = [low for low, _ in parts], [high for _, high in parts]
    low, high = -sympy.oo, sympy.oo
    if e.is_Add and not {-sympy.oo, sympy.oo} <= {*lows, *highs} or isinstance(e, (sympy.Min, sympy.Max)):
        low, high = e.func(*lows), e.func(*highs)
    elif e.is_Add:
        low = -sympy.oo if -sympy.oo in lows else sympy.Add(*lows)
        high = sympy.oo if sympy.oo in highs else sympy.Add(*highs)
    elif isinstance(e, clamp):
        low, high = (sympy.Min(sympy.Max(x[0], x[1]), x[2]) for x in (lows, highs))
    elif isinstance(e, select):
        low, high = sympy.Min(*lows), sympy.Max(*highs)
    elif isinstance(e, sympy.Abs):
        low, high = sympy.Max(lows[0], -highs[0], 0), sympy.Max(-lows[0], highs[0])
    elif e.is_Mul and len(e.args) == 2 and e.args[0].is_Number:
        low, high = (e.args[0] * x for x in (parts[1] if e.args[0] > 0 else parts[1][::-1]))
    elif isinstance(e, BITS) and (most := most_of_bits(e, lows, highs)) is not None:
        low, high = sympy.Integer(0), most
    elif isinstance(e, (floordiv, cdiv)) and e.args[1].is_Integer:
        low, high = (x if not x.is_finite else e.func(x, e.args[1]) for x in parts[0])
    return low, high


def most_of_bits(e: Expr, lows: list[Any], highs: list[Any]) -> Any:
    """An upper bound of a bitwise operation on integers with these bounds, if it is never negative; else None."""
    if isinstance(e, bitand):
        return min((high for low, high in zip(lows, highs) if low >= 0), default=None)
    if any(low < 0 for low in lows):
        return None
    most = max(highs)
    return most if most == sympy.oo else type(most)(2 ** int(most).bit_length() - 1)
