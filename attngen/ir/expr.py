"""Symbols and expressions of the IR: sympy in memory, a small grammar in text.

Text is parsed with Python's `ast` on a whitelist (never `eval`), and printing then parsing gives the same
expression. Integers are floor-divided with `//`; `cdiv` rounds up; `select(c, a, b)` is `a if c else b`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, TypeAlias

import mpmath
import sympy
from sympy.core.cache import cacheit
from sympy.core.function import Application
from sympy.functions.elementary.miscellaneous import MinMaxBase
from sympy.logic.boolalg import Boolean
from sympy.printing.str import StrPrinter

from attngen.errors import IRError
from attngen.ir.names import INTEGERS

Expr: TypeAlias = Any  # a sympy expression; sympy has no types of its own
Bool: TypeAlias = Any  # a sympy boolean
Evaluated: TypeAlias = tuple[Callable[[Any], Any], tuple[Any, ...]]  # a function of mpmath, and its arguments
INEQUALITIES = (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)


MOST_COMPARED = 40  # nodes of two arguments of a Min or Max; larger ones are not compared, and both stay


@cache
def size(e: Any) -> int:
    """The number of nodes of an expression, written out."""
    return 1 + sum(map(size, e.args))


def _compares(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Sympy's comparison of two arguments of a Min or Max: it remembers answers, and compares no large ones."""
    remembered = cacheit(compare)
    return lambda cls, x, y: size(x) + size(y) <= MOST_COMPARED and remembered(cls, x, y)


# Sympy compares the arguments of each new Min and Max in pairs. That is most of the work of building bounds, and the
# pairs recur. The method is not public: a version without it is slower.
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
    """a - b * floor(a / b) of integers, b > 0: never negative, as Python has it."""

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
    """x, but at least a and at most b: min(max(x, a), b)."""

    nargs = 3
    is_extended_real = True

    @classmethod
    def eval(cls, x: Expr, a: Expr, b: Expr) -> Expr | None:
        return sympy.Min(sympy.Max(x, a), b) if all(e.is_number for e in (x, a, b)) else None

    def _eval_is_integer(self) -> bool | None:
        return all(e.is_integer for e in self.args) or None


class portion(sympy.Function):  # noqa: N801
    """How many of n things the first i of some parts have: each part has n // parts, and the first n % parts of them
    one more.

    For parts > 0, and i from 0 to parts.
    """

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
    """The greatest divisor of a that is not above b; 1 if b is 0. Host programs have it, kernels do not."""

    nargs = 2
    is_integer = True
    is_positive = True


class sqrt(sympy.Function):  # noqa: N801
    """The square root of a number that is not negative."""

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
    """An operation on the bits of two integers, of two's complement."""

    nargs = 2
    is_integer = True
    of: ClassVar[Callable[[int, int], int]]
    neutral: ClassVar[int]  # with which it leaves the other number as it is
    sign: ClassVar[str]  # in Python and in Triton

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(cls.of(int(a), int(b)))
        if a.is_Integer or not b.is_Integer and sympy.default_sort_key(b) < sympy.default_sort_key(a):
            return cls(b, a)  # in one order, a number last
        return a if b == cls.neutral else None

    def _eval_is_nonnegative(self) -> bool | None:
        return all(e.is_nonnegative for e in self.args) or None


class bitand(_Bits):  # noqa: N801
    """The bits that both numbers have. With 2**n - 1 it is what is left in a division by 2**n."""

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
    """The bits that one of two numbers has, or both."""

    of = operator.or_
    neutral = 0
    sign = "|"


class bitxor(_Bits):  # noqa: N801
    """The bits that one of two numbers has, and the other has not."""

    of = operator.xor
    neutral = 0
    sign = "^"


class _Whole(sympy.Function):
    """An integer made of a real number; beyond 2**30 it counts as that."""

    nargs = 1
    is_integer = True

    @classmethod
    def eval(cls, x: Expr) -> Expr | None:
        return x if x.is_integer else None

    def _eval_derivative(self, s: Expr) -> Expr:
        return sympy.Integer(0)


class floor(_Whole):  # noqa: N801
    """The greatest integer that is not above x."""


class nearest(_Whole):  # noqa: N801
    """The integer next to x; of two as near the even one."""

    def _eval_mpmath(self) -> Evaluated:
        return mpmath.nint, self.args


class trunc(_Whole):  # noqa: N801
    """The next integer from x towards zero."""

    def _eval_mpmath(self) -> Evaluated:
        return (lambda x: mpmath.floor(x) if x >= 0 else mpmath.ceil(x)), self.args


class exp2(sympy.Function):  # noqa: N801
    """2 ** x, the exponential that the hardware has."""

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


LARGEST = sympy.Float((2 - 2**-23) * 2.0**127)  # number that fp32 has


def finite(e: Expr) -> Expr:
    """A real number, and in place of an infinity the largest number of that sign. What is no number stays."""
    return select(e > LARGEST, LARGEST, select(e < -LARGEST, -LARGEST, e))


TO_INTEGER = (floor, nearest, trunc)  # functions of real numbers that give integers
BITS = (bitand, bitor, bitxor)
REAL = (exp2, log2, sympy.exp, log, sympy.tanh, sigmoid, sqrt, erf, sin, cos)  # functions that are of no integer

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
    """The symbol of that name, with what the table of names says of its sign; any other name is a real number."""
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


class _Printer(StrPrinter):
    """Prints what `parse` reads."""

    def _print_floordiv(self, e: Any) -> str:
        a, b = (
            self._print(x) if isinstance(x, Application) or x.is_Symbol or x.is_Integer else f"({self._print(x)})"
            for x in e.args
        )
        return f"({a} // {b})"

    def _print_mod(self, e: Any) -> str:
        a, b = (
            self._print(x) if isinstance(x, Application) or x.is_Symbol or x.is_Integer else f"({self._print(x)})"
            for x in e.args
        )
        return f"({a} % {b})"

    def _print_Abs(self, e: Any) -> str:
        return f"abs({self._print(e.args[0])})"

    def _print_Min(self, e: Any) -> str:
        return f"min({self._sorted(e)})"

    def _print_Max(self, e: Any) -> str:
        return f"max({self._sorted(e)})"

    def _sorted(self, e: Any) -> str:
        return ", ".join(self._print(a) for a in sorted(e.args, key=sympy.default_sort_key))

    def _print_And(self, e: Any) -> str:
        return " and ".join(self._wrapped(a) for a in sorted(e.args, key=sympy.default_sort_key))

    def _print_Or(self, e: Any) -> str:
        return " or ".join(self._wrapped(a) for a in sorted(e.args, key=sympy.default_sort_key))

    def _print_Not(self, e: Any) -> str:
        return f"not {self._wrapped(e.args[0])}"

    def _wrapped(self, e: Any) -> str:
        text = self._print(e)
        return f"({text})" if isinstance(e, (sympy.And, sympy.Or)) else text

    def _print_Relational(self, e: Any) -> str:
        return f"{self._print(e.lhs)} {e.rel_op} {self._print(e.rhs)}"

    def _print_BooleanTrue(self, e: Any) -> str:
        return "true"

    def _print_BooleanFalse(self, e: Any) -> str:
        return "false"

    def _print_Infinity(self, e: Any) -> str:
        return "inf"

    def _print_NegativeInfinity(self, e: Any) -> str:
        return "-inf"

    def _print_Float(self, e: Any) -> str:
        return repr(float(e))


@cache
def to_text(e: Any) -> str:
    """The expression in the IR's grammar."""
    text = str(_Printer().doprint(e))
    return text[1:-1] if isinstance(e, (floordiv, mod)) else text


_COMPARE = {
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
}


def parse(text: str, where: str = "expression") -> Any:
    """Parse an expression of the IR's grammar into sympy.

    Raises IRError, naming `where`, on anything outside the grammar.
    """
    shown = text if len(text) <= 100 else f"{text[:97]}..."
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise IRError(f"{where}: `{shown}` is not an expression") from None
    try:
        value = _Builder(shown, where).visit(tree.body)
    except (TypeError, ValueError):
        value = sympy.nan
    except RecursionError:
        raise IRError(f"{where}: `{shown}` is nested too deeply") from None
    if value.has(sympy.nan, sympy.zoo):
        raise IRError(
            f"{where}: `{shown}` has no value: it divides by zero, subtracts infinities, or mixes numbers and conditions"
        )
    return value


def _times(a: Expr, b: Expr) -> Expr:
    """a * b, in which a number times a sum stays a product: it is printed so as a part of a larger product."""
    if b.is_Number and a.is_Add:
        a, b = b, a
    if a.is_Number and b.is_Add and a.is_finite and a not in (0, 1):
        return sympy.Mul(a, b, evaluate=False)
    return a * b


class _Builder(ast.NodeVisitor):
    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where

    def generic_visit(self, node: ast.AST) -> Any:
        raise IRError(f"{self.where}: `{self.text}` uses {type(node).__name__}, which expressions do not have")

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
            return self.generic_visit(node)
        return sympy.Integer(node.value) if isinstance(node.value, int) else sympy.Float(node.value)

    def visit_Name(self, node: ast.Name) -> Any:
        constants = {"true": sympy.true, "false": sympy.false, "inf": sympy.oo}
        return constants.get(node.id, symbol(node.id))

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        a, b = self.visit(node.left), self.visit(node.right)
        match node.op:
            case ast.Add():
                return a + b
            case ast.Sub():
                return a - b
            case ast.Mult():
                return _times(a, b)
            case ast.Div():
                return a / b
            case ast.FloorDiv():
                return floordiv(a, b)
            case ast.Mod():
                return mod(a, b)
            case ast.Pow() if (
                b.is_Integer and abs(b) <= 64 and not (a.is_Number or a.is_Mul)
            ):  # how a product of equals is printed
                return a**b
            case ast.Pow() if a.is_Number and a.is_positive and b.free_symbols:
                return a**b
        return self.generic_visit(node.op)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.visit(node.operand)
        if isinstance(node.op, ast.USub):
            return _times(sympy.Integer(-1), value)
        return sympy.Not(value) if isinstance(node.op, ast.Not) else self.generic_visit(node.op)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        join = sympy.And if isinstance(node.op, ast.And) else sympy.Or
        return join(*(self.visit(v) for v in node.values))

    def visit_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1 or type(node.ops[0]) not in _COMPARE:
            return self.generic_visit(node)
        return _COMPARE[type(node.ops[0])](self.visit(node.left), self.visit(node.comparators[0]))

    def visit_Call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else "?"
        if name not in FUNCTIONS or node.keywords:
            raise IRError(f"{self.where}: `{self.text}` calls `{name}`; known: {', '.join(sorted(FUNCTIONS))}")
        try:
            return FUNCTIONS[name](*(self.visit(a) for a in node.args))
        except TypeError as error:
            raise IRError(f"{self.where}: `{self.text}`: {error}") from None


def flattened(e: Expr) -> Expr:
    """An expression without a max right inside a max, or a min inside a min: sympy leaves some where it takes parts
    out of them."""
    extremes = e.atoms(sympy.Min, sympy.Max)
    if not any(isinstance(arg, x.func) for x in extremes for arg in x.args):
        return e
    return _rebuilt(e)


def _rebuilt(e: Expr) -> Expr:
    return e.func(*map(_rebuilt, e.args)) if e.args else e


@cache
def conjuncts(e: Bool) -> tuple[Bool, ...]:
    """The parts of a conjunction, in an order that does not depend on hashes; none for `true`. See `apart`."""
    parts = sympy.And.make_args(sympy.And(*map(apart, sympy.And.make_args(e))))
    return tuple(sorted((part for part in parts if part != sympy.true), key=sympy.default_sort_key))


def apart(e: Bool) -> Bool:
    """What is below the least of some numbers, or above the greatest, compared with each: `x <= Min(a, b)` is `x <=
    a and x <= b`."""
    if not isinstance(e, INEQUALITIES):
        return e
    below = e if isinstance(e, (sympy.Le, sympy.Lt)) else e.reversed
    if isinstance(below.rhs, sympy.Min):
        return sympy.And(*(apart(below.func(below.lhs, bound)) for bound in below.rhs.args))
    if isinstance(below.lhs, sympy.Max):
        return sympy.And(*(_mirrored(below.func(bound, below.rhs)) for bound in below.lhs.args))
    return e


def _mirrored(e: Bool) -> Bool:
    """A comparison with its sides exchanged; of numbers, it has been decided."""
    return e.reversed if isinstance(e, sympy.core.relational.Relational) else e


def span(e: Expr) -> tuple[Expr, Expr]:
    """Numbers that an expression of integers is never below and never above; infinite where its symbols are not
    bounded."""
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
    """A number that an operation on bits of integers with these bounds is never above, if it is never negative; else
    None."""
    if isinstance(e, bitand):
        return min((high for low, high in zip(lows, highs) if low >= 0), default=None)
    if any(low < 0 for low in lows):
        return None
    most = max(highs)
    return most if most == sympy.oo else type(most)(2 ** int(most).bit_length() - 1)
