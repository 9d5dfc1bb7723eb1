"""Equality of expressions by their values, where their normal forms differ: rigorous enclosures at many points.

Points are random, with a seed that depends on the expressions, and cover special cases: equal positions, zeros, ones,
the numbers in the expressions and their neighbours, and points at which the sides of a comparison are equal or differ
by 1. At each point mpmath's interval arithmetic encloses both values; a number that may have been rounded is an
interval, too. Disjoint enclosures refute equality. Points at which a side is undefined, or its enclosure is wide,
decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, reduce
from random import Random
from typing import Any

import mpmath
import sympy
from mpmath import iv

from attngen.ir.expr import (
    BITS,
    Expr,
    cdiv,
    clamp,
    cos,
    erf,
    exp2,
    floor,
    floordiv,
    log,
    log2,
    mod,
    nearest,
    select,
    sigmoid,
    sin,
    sqrt,
    trunc,
)
from attngen.ir.expr_text import to_text

TOLERANCE = 1e-9  # relative error of a product that passes may have computed in another order
NARROW = 1e-6  # relative width up to which overlapping enclosures count as agreement
POINTS, ENOUGH = 192, 24  # random points, and the number of points at which values must agree
LARGE = 2**20  # exponents and angles below this are computed
CONSTANTS = {"LOG2E": 1 / math.log(2), "LN2": math.log(2)}
Point = dict[str, Any]


class Unknown(Exception):
    """A value is undefined at a point, or its enclosure does not decide a comparison."""


def _number(x: float) -> Any:
    """The enclosure of a number: exact if the number has few bits, otherwise an interval around it."""
    return iv.mpf(x) if math.isinf(x) or (x * 2**12).is_integer() else _around(x)


def _around(x: float) -> Any:
    spread = abs(x) * TOLERANCE
    return iv.mpf([x - spread, x + spread])


def _whole(x: Any) -> int:
    if x.a != x.b or x.a != mpmath.floor(x.a):
        raise Unknown
    return int(mpmath.mpf(x.a))


def _monotone(of: Callable[[Any], Any], pad: float = 0.0) -> Callable[[Any], Any]:
    """A non-decreasing function of intervals, from one of numbers: it maps the ends."""
    return lambda x: iv.mpf([of(mpmath.mpf(x.a)) - pad, of(mpmath.mpf(x.b)) + pad])


def _extreme(of: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *xs: iv.mpf([reduce(of, (mpmath.mpf(x.a) for x in xs)), reduce(of, (mpmath.mpf(x.b) for x in xs))])


def _small(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function limited to arguments below LARGE, which would need too many digits otherwise."""

    def checked(x: Any) -> Any:
        if not -LARGE < x.a <= x.b < LARGE:
            raise Unknown
        return of(x)

    return checked


_exp = _small(iv.exp)


def _power(base: Any, exponent: Any) -> Any:
    if exponent.a == exponent.b and abs(exponent.a) < LARGE and exponent.a == int(exponent.a):
        return base ** int(exponent.a)
    if not base.a > 0:
        raise Unknown
    return _exp(exponent * iv.log(base))


def _positive(of: Callable[[Any], Any], least: int = 0) -> Callable[[Any], Any]:
    def checked(x: Any) -> Any:
        if not (x.a > 0 or least and x.a >= 0):
            raise Unknown
        return of(x)

    return checked


def _divided(a: Any, b: Any) -> Any:
    if not b.a > 0:
        raise Unknown
    return _monotone(mpmath.floor)(a / b) if a.a != a.b or b.a != b.b else iv.mpf(_whole(a) // _whole(b))


_MIN, _MAX = _extreme(min), _extreme(max)
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    sympy.Add: lambda *xs: reduce(lambda a, b: a + b, xs),
    sympy.Mul: lambda *xs: reduce(lambda a, b: a * b, xs),
    sympy.Pow: _power,
    sympy.Min: _MIN,
    sympy.Max: _MAX,
    sympy.Abs: abs,
    clamp: lambda x, low, high: _MIN(_MAX(x, low), high),
    sympy.exp: _exp,
    exp2: lambda x: _exp(x * iv.log(2)),
    log: _positive(iv.log),
    log2: _positive(lambda x: iv.log(x) / iv.log(2)),
    sqrt: _positive(iv.sqrt, 1),
    sympy.tanh: lambda x: 1 - 2 / (1 + _exp(2 * x)),
    sigmoid: lambda x: 1 / (1 + _exp(-x)),
    erf: _monotone(mpmath.erf, 1e-14),
    sin: _small(iv.sin),
    cos: _small(iv.cos),
    floor: _monotone(mpmath.floor),
    nearest: _monotone(mpmath.nint),
    trunc: _monotone(lambda x: mpmath.floor(x) if x >= 0 else mpmath.ceil(x)),
    floordiv: _divided,
    cdiv: lambda a, b: -_divided(-a, b),
    mod: lambda a, b: a - b * _divided(a, b),
    **{kind: lambda a, b, kind=kind: iv.mpf(kind.of(_whole(a), _whole(b))) for kind in BITS},
}
_COMPARED: dict[Any, Callable[[Any, Any], Any]] = {
    sympy.Lt: lambda a, b: a < b,
    sympy.Le: lambda a, b: a <= b,
    sympy.Gt: lambda a, b: a > b,
    sympy.Ge: lambda a, b: a >= b,
    sympy.Eq: lambda a, b: a == b,
    sympy.Ne: lambda a, b: a != b,
}


def value(e: Any, at: Point) -> Any:
    """The enclosure of a number, or the bool of a condition, at a point. Raises Unknown."""
    if e.is_Symbol:
        return at[e.name]
    if e in (sympy.true, sympy.false):
        return e == sympy.true
    if e.is_Integer:
        return iv.mpf(int(e))
    if e.is_Number:
        return _number(float(e))
    if isinstance(e, select):
        return value(e.args[1 if _holds(e.args[0], at) else 2], at)
    if isinstance(e, (sympy.And, sympy.Or)):
        return (all if isinstance(e, sympy.And) else any)([_holds(a, at) for a in e.args])
    if isinstance(e, sympy.Not):
        return not _holds(e.args[0], at)
    args = [value(a, at) for a in e.args]
    try:
        if e.func in _COMPARED:
            decided = args[0] == args[1] if not hasattr(args[0], "a") else _COMPARED[e.func](*args)
            if decided is None:
                raise Unknown
            return bool(decided)
        found = _FUNCTIONS[e.func](*args)
    except (KeyError, ArithmeticError, ValueError, TypeError, NotImplementedError) as error:
        raise Unknown from error
    if mpmath.isnan(mpmath.mpf(found.a)) or mpmath.isnan(mpmath.mpf(found.b)):
        raise Unknown
    return found


def _holds(e: Any, at: Point) -> bool:
    """True if a condition holds at a point. A symbol that is a condition holds where it is not 0. Raises Unknown."""
    found = value(e, at)
    return found if isinstance(found, bool) else bool(found != 0)


def _conditions(e: Any) -> set[Any]:
    """The symbols that an expression uses as conditions."""
    found: set[Any] = set()
    for x in sympy.preorder_traversal(e):
        if isinstance(x, (sympy.And, sympy.Or, sympy.Not, select)):
            found |= {a for a in (x.args[:1] if isinstance(x, select) else x.args) if a.is_Symbol}
    return found


def points(*expressions: Any) -> Iterator[Point]:
    """Yield points for these expressions, the same ones in each run."""
    chance = Random("\n".join(map(to_text, expressions)))
    symbols = sorted({s for e in expressions for s in e.free_symbols}, key=str)
    numbers = sorted(
        {x for e in expressions for x in e.atoms(sympy.Number) if x.is_finite}, key=lambda x: (float(x), str(x))
    )
    near = [int(x) + d for x in numbers if x.is_Integer for d in (-1, 0, 1)]
    flags = set().union(*(_conditions(e) for e in expressions))
    relations = sorted(
        {r for e in expressions for r in e.atoms(sympy.core.relational.Relational)}, key=sympy.default_sort_key
    )
    lines = [
        line for r in relations if not any(a.is_Boolean for a in r.args) for line in _lines(r.lhs - r.rhs, symbols)
    ]
    for i in range(POINTS):
        pool = [chance.randrange((2, 9, 70, 5000)[i % 4]) for _ in range(2)]
        plain: dict[str, Any] = {s.name: _sample(s, chance, pool, near, [float(x) for x in numbers]) for s in symbols}
        plain |= {s.name: chance.randrange(2) for s in sorted(flags, key=str)}
        yield {name: _around(CONSTANTS[name]) if name in CONSTANTS else iv.mpf(x) for name, x in plain.items()}
        for x, factor, rest in lines if i < 8 else ():
            for d in (-1, 0, 1):
                at = {name: _around(CONSTANTS[name]) if name in CONSTANTS else iv.mpf(v) for name, v in plain.items()}
                try:
                    solved = (d - value(rest, at)) / int(factor)
                    at[x.name] = iv.mpf(_whole(solved)) if x.is_integer else solved
                    allowed = not x.is_integer or at[x.name].a >= (
                        1 if x.is_positive else 0 if x.is_nonnegative else -math.inf
                    )
                except (Unknown, ArithmeticError):
                    continue
                if allowed:
                    yield at


def _lines(difference: Expr, symbols: list[Any]) -> Iterator[tuple[Any, Expr, Expr]]:
    """The symbols in which a difference is linear with an integer factor, as (symbol, factor, remaining terms)."""
    total = sympy.expand(difference)
    for x in symbols:
        factor = total.coeff(x)
        rest = total - factor * x
        if factor.is_Integer and factor != 0 and not rest.has(x) and x.name not in CONSTANTS:
            yield x, factor, rest


def _sample(s: Any, chance: Random, pool: list[int], near: list[int], numbers: list[float]) -> float:
    """A random value of a symbol: from `pool`; from `near`, the integers next to those in the expressions; from the
    numbers in the expressions; or any value of its kind."""
    least = 1 if s.is_positive else 0 if s.is_nonnegative else -4000
    kind = chance.randrange(4)
    if s.is_integer:
        sample = (
            chance.choice(near) if kind == 0 and near else chance.choice(pool) if kind < 3 else chance.randrange(4000)
        )
        return max(sample if least >= 0 or chance.random() < 0.7 else -sample, least)
    if kind == 0:
        return chance.choice([0.0, 1.0, -1.0, *pool, *numbers])
    return chance.randrange(-4096, 4097) / (1024.0 if kind == 1 else 128.0)


@cache
def agree(a: Expr, b: Expr) -> bool | None:
    """True if two expressions have the same value; None if too few points decide it."""
    count = 0
    for at in points(a, b):
        try:
            x, y = value(a, at), value(b, at)
        except Unknown:
            continue
        if isinstance(x, bool) or isinstance(y, bool):
            if x is not y:
                return False
            count += 1
        elif x.b < y.a or y.b < x.a:
            return False
        else:
            count += all(v.a == v.b or v.delta <= NARROW * max(abs(v.a), abs(v.b)) for v in (x, y))
    return True if count >= ENOUGH else None
