"""The value of an IR expression on NumPy: numbers in, a number out; arrays in, an array out.

Integers stay integers and floor-divide, as in Python. This is the meaning that a backend's printer has to keep.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import cache, reduce
from typing import Any

import numpy as np
import sympy

from attngen.errors import AttngenError
from attngen.ir.expr import (
    BITS,
    TO_INTEGER,
    Expr,
    cdiv,
    clamp,
    cos,
    divisor,
    erf,
    exp2,
    floordiv,
    log,
    log2,
    mod,
    portion,
    select,
    sigmoid,
    sin,
    sqrt,
)
from attngen.ir.expr_text import to_text

Function = Callable[[Mapping[str, Any]], Any]


def _power(base: Any, exponent: Any) -> Any:
    """Integer powers as products, negative ones as one over these; any other power of a positive number."""
    if not isinstance(exponent, int):
        return np.power(base * 1.0, exponent)
    return base**exponent if exponent >= 0 else np.divide(1.0, base**-exponent)  # 0 gives inf, in arrays too


def _whole(rounded: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that makes integers from real numbers, saturated at 2**30; NaN becomes -2**30."""
    return lambda x: rounded(
        np.clip(np.nan_to_num(np.asarray(x, np.float64), nan=-(2.0**30)), -(2.0**30), 2.0**30 - 64)
    ).astype(np.int64)


# Functions of any number of arguments -> functions of two, which combine the arguments from left to right.
PAIRS: dict[Any, Callable[[Any, Any], Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Min: np.minimum,
    sympy.Max: np.maximum,
    sympy.And: np.logical_and,
    sympy.Or: np.logical_or,
}
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{func: lambda *x, pair=pair: reduce(pair, x) for func, pair in PAIRS.items()},
    sympy.Pow: _power,
    floordiv: operator.floordiv,
    cdiv: lambda a, b: -(-a // b),
    mod: operator.mod,
    sympy.Abs: np.abs,
    clamp: lambda x, low, high: np.minimum(np.maximum(x, low), high),
    select: np.where,
    exp2: np.exp2,
    log2: np.log2,
    sympy.exp: np.exp,
    sympy.log: np.log,
    log: np.log,
    sympy.tanh: np.tanh,
    sigmoid: lambda x: 1 / (1 + np.exp(-x)),
    sqrt: np.sqrt,
    erf: np.vectorize(math.erf, otypes=[float]),
    sin: np.sin,
    cos: np.cos,
    **{kind: kind.of for kind in BITS},
    **{kind: _whole(rounded) for kind, rounded in zip(TO_INTEGER, (np.floor, np.rint, np.trunc))},
    divisor: lambda a, b: next((n for n in range(min(a, b), 0, -1) if a % n == 0), 1),
    portion: lambda n, i, parts: i * (n // parts) + np.minimum(i, n % parts),
    sympy.Not: np.logical_not,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
}


@cache
def compiled(e: Expr) -> Function:
    """The expression as a function of the values of its symbols, by name.

    Arrays among the values must broadcast with each other. Raises AttngenError for a function that the IR does not
    have.
    """
    if e.is_Symbol:
        return operator.itemgetter(e.name)
    if e in (sympy.true, sympy.false):
        return _constant(e == sympy.true)
    if e.is_Number or e.is_NumberSymbol:
        return _constant(int(e) if e.is_Integer else float(e))
    if e.func not in FUNCTIONS:
        raise AttngenError(f"`{to_text(e)}` has no value: `{e.func.__name__}` is no function of the IR")
    function, args = FUNCTIONS[e.func], tuple(map(compiled, e.args))
    if len(args) == 2:  # nearly all functions: a call with a fixed number of arguments takes half the time
        first, second = args
        pair = PAIRS.get(e.func, function)
        return lambda values: pair(first(values), second(values))
    return lambda values: function(*(arg(values) for arg in args))


def _constant(value: Any) -> Function:
    return lambda values: value


def value(e: Expr, values: Mapping[str, Any]) -> Any:
    """The value of the expression for these values of its symbols, by name."""
    return compiled(e)(values)
