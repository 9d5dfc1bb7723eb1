"""Expressions with values computed by hand, and a small evaluator of sympy expressions that must agree with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from attngen.ir.expr import FUNCTIONS as KNOWN
from attngen.ir.expr import (
    bitand,
    bitor,
    bitxor,
    clamp,
    cos,
    erf,
    exp2,
    floor,
    floordiv,
    log2,
    mod,
    nearest,
    select,
    sigmoid,
    sin,
    trunc,
)
from attngen.lang.expression import Expression
from attngen.lang.params import Param

SIZES = {"batch": 2, "q_heads": 4, "kv_heads": 2, "n_q": 8, "n_kv": 10}
INT, POSITIVE, FLOAT = Param(scalar="int"), Param(scalar="int", min=1), Param(scalar="float")
SLOPE = Param(tensor=("H",), dtype="fp32", grad=True)
DOC = Param(tensor=("B", "Nk"), dtype="int32")
TABLE = Param(tensor=(5,), dtype="fp32")
SEEN = Param(tensor=("Nk",), dtype="bool")


@dataclass(frozen=True)
class Row:
    """An expression and its value at one position: `at` has the nonzero ones of q_idx, kv_idx, b, h and s, and the
    arguments of the call; `let` has named parts."""

    text: str
    expected: bool | int | float
    at: Mapping[str, Any]
    params: Mapping[str, Param]
    let: Mapping[str, str]


def row(
    text: str,
    expected: bool | int | float,
    params: Mapping[str, Param] | None = None,
    let: Mapping[str, str] | None = None,
    **at: Any,
) -> Row:
    return Row(text, expected, at, params or {}, let or {})


SLOPES = [0.5, 0.25, 0.125, 2.0]
DOCS = [[0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
FIVE = [10.0, 20.0, 30.0, 40.0, 50.0]
EVEN = [True, False] * 5

ROWS = [
    # // and % round down, as in Python
    row("(q_idx - kv_idx) // 3", -2, q_idx=1, kv_idx=5),
    row("(q_idx - kv_idx) % 3", 2, q_idx=1, kv_idx=5),
    row("(q_idx - kv_idx) // 4", -1, q_idx=1, kv_idx=5),
    row("(q_idx - kv_idx) % 4", 0, q_idx=1, kv_idx=5),
    row("(q_idx - kv_idx) // -3", 1, q_idx=1, kv_idx=5),
    row("(q_idx - kv_idx) % -3", -1, q_idx=1, kv_idx=5),
    row("q_idx // -4", -2, q_idx=7),
    row("q_idx % -4", -1, q_idx=7),
    row("q_idx % -7", 0, q_idx=7),
    row("-q_idx // 2", -4, q_idx=7),
    row("-(q_idx // 2)", -3, q_idx=7),
    row("-7 // 2", -4),
    row("-7 % 4", 1),
    row("7 % -4", -1),
    row("(q_idx - 7) // step", -3, {"step": POSITIVE}, q_idx=1, step=2),
    row("(q_idx - 7) % step", 2, {"step": POSITIVE}, q_idx=1, step=4),
    row("q_idx // block", -4, {"block": Param(value=-2)}, q_idx=7),
    # arithmetic, precedence and powers
    row("2 + 3 * q_idx", 17, q_idx=5),
    row("(2 + 3) * q_idx", 25, q_idx=5),
    row("q_idx - kv_idx - 1", -3, q_idx=2, kv_idx=4),
    row("-q_idx ** 2", -9, q_idx=3),
    row("2 ** 3 ** 2 - 500", 12),
    row("2 ** -1", 0.5),
    row("2 ** (q_idx - 4)", 0.25, q_idx=2),
    row("0.5 ** (h + 1)", 0.0625, h=3),
    row("s ** -2", 0.0625, s=4.0),
    row("q_idx ** 0.5", 2.0, q_idx=4),
    row("q_idx / 4", 1.25, q_idx=5),
    row("(q_idx - kv_idx) / (b + 1)", -1.5, q_idx=1, kv_idx=4, b=1),
    row("q_len * 100 + kv_len", 810),
    row("hkv * 10 + h", 13, h=3),
    # functions
    row("clamp(q_idx - kv_idx, -2, 2)", -2, q_idx=1, kv_idx=9),
    row("clamp(s, 1, -1)", -1.0, s=0.5),
    row("min(q_idx, kv_idx, 3) + max(q_idx, kv_idx, 3)", 9, q_idx=2, kv_idx=7),
    row("abs(q_idx - kv_idx) + abs(-2)", 6, q_idx=1, kv_idx=5),
    row("where(kv_idx > q_idx, s, -s)", -1.5, q_idx=4, kv_idx=4, s=1.5),
    row("where(kv_idx > q_idx, 1, 0.5)", 1.0, kv_idx=4),
    row("cap * tanh(s / cap)", 30 * math.tanh(0.5), {"cap": Param(value=30)}, s=15.0),
    row("exp(s) + log(s) + sqrt(s)", math.exp(4) + math.log(4) + 2, s=4.0),
    row("sigmoid(s) - 0.5", 0.0, s=0.0),
    row("erf(s) + sin(s) + 10 * cos(s)", math.erf(0.75) + math.sin(0.75) + 10 * math.cos(0.75), s=0.75),
    row("relu(s) - relu(-2 * s)", -3.0, s=-1.5),
    row("gelu(s) + relu(3)", 3 + 0.5 * 1.25 * (1 + math.erf(1.25 / math.sqrt(2))), s=1.25),
    row("gelu(2) + erf(1) + sin(3) + cos(0)", 1 + math.erf(math.sqrt(2)) + math.erf(1) + math.sin(3) + 1),
    # bits
    row("(q_idx << 3) + (kv_idx >> 1) + (q_idx - kv_idx >> 1)", 24 + 3 - 2, q_idx=3, kv_idx=6),
    row("q_idx & 6 | kv_idx ^ 5", 6 | 2, q_idx=7, kv_idx=7),
    row("(q_idx - kv_idx) & 12", 12, q_idx=1, kv_idx=5),
    row("(q_idx - kv_idx) & 7", 4, q_idx=1, kv_idx=5),
    row("q_idx & 1 == 1", True, q_idx=3),
    row("kv_idx | 9", 9 | 6, kv_idx=6),
    row("kv_idx ^ q_idx", 6 ^ 3, kv_idx=6, q_idx=3),
    row("(kv_idx * 1000 & 2147483646) + (13 & 7 | 16 ^ 1)", 6000 + (5 | 17), kv_idx=6),
    # loops: any, all, sum
    row("any(i, 5, table[i] == 40) and not any(i, 3, table[i] == 40)", True, {"table": TABLE}, table=FIVE),
    row("all(i, 5, table[i] > 10 * q_idx)", False, {"table": TABLE}, q_idx=1, table=FIVE),
    row("all(i, 5, table[i] > 10 * q_idx)", True, {"table": TABLE}, table=FIVE),
    row("sum(i, 3, i * table[i + 1]) + s", 30 + 2 * 40 + 0.5, {"table": TABLE}, table=FIVE, s=0.5),
    row("sum(i, 3, sum(j, 2, i * 10 + j))", 63),
    # named parts
    row(
        "own == other and far",
        True,
        let={"own": "q_idx // 4", "other": "kv_idx // 4", "far": "kv_idx - own * 4 > 2"},
        q_idx=5,
        kv_idx=7,
    ),
    row("any(i, 2, i * y + y == 9)", True, let={"x": "q_idx + 1", "y": "2 * x - kv_idx"}, q_idx=5, kv_idx=3),
    row(
        "where(near, t * t, t)",
        6.25,
        {"table": TABLE},
        {"t": "s + table[0] / 10", "near": "abs(q_idx - kv_idx) < 2"},
        s=1.5,
        table=FIVE,
    ),
    row("s * scale_by", -4.5, {"scale_by": FLOAT}, s=3.0, scale_by=-1.5),
    # integers of reals, and casts
    row("floor(s) + 10 * round(s) + 100 * int(s)", -112, s=-1.3),
    row("floor(s) + 10 * round(s) + 100 * int(s)", -344, s=-3.5),
    row("round(s)", 2, s=2.5),
    row("round(s)", -4, s=-3.5),
    row("floor(q_idx / 3) + 10 * round(q_idx / 2) + 100 * int((q_idx - 9) / 4)", 20 - 100 + 1, q_idx=5),
    row("floor((q_idx - kv_idx) / 4) + 10 * int((q_idx - kv_idx) / 4)", -12, q_idx=1, kv_idx=6),
    row("round((q_idx - kv_idx) / 2)", -2, q_idx=1, kv_idx=6),
    row("int(kv_idx > q_idx) * 5 + float(h == 1) / 2", 5.5, kv_idx=3, h=1),
    row("float(q_idx) / 4 + floor(2.7) + int(-2.7) + round(0.5)", 1.25, q_idx=5),
    row("int(x) == kv_idx", True, {"x": FLOAT}, kv_idx=3, x=3.99),
    row("int(x * 1000000) == 1000000000", False, {"x": FLOAT}, x=1e9),
    row("q_pos * 10 + q_len - kv_len", 38, q_idx=2),
    row("8 + int(log(max(abs(kv_idx - q_pos), 1) / 8) / log(16) * 8)", 7, q_idx=3),
    # conditions
    row(
        "kv_idx <= q_idx and (q_idx - kv_idx <= window or kv_idx < sinks)",
        True,
        {"window": INT, "sinks": Param(value=4)},
        q_idx=7,
        window=2,
    ),
    row(
        "kv_idx <= q_idx and (q_idx - kv_idx <= window or kv_idx < 1)",
        False,
        {"window": INT},
        q_idx=7,
        kv_idx=4,
        window=2,
    ),
    row("0 <= q_idx - kv_idx < 3", True, q_idx=5, kv_idx=3),
    row("0 <= q_idx - kv_idx < 3", False, q_idx=5, kv_idx=2),
    row("0 <= q_idx - kv_idx < 3", False, q_idx=1, kv_idx=2),
    row("q_idx < kv_idx == 5 != h", True, q_idx=4, kv_idx=5, h=3),
    row("false and true or true", True),
    row("false and (true or true)", False),
    row("not q_idx == kv_idx or q_idx > 100", False, q_idx=2, kv_idx=2),
    row("not (q_idx > 1 and kv_idx > 1)", True, q_idx=2, kv_idx=1),
    row("where(b == 0, kv_idx <= q_idx, kv_idx == q_idx)", False, q_idx=3, kv_idx=2, b=1),
    row("where(h == 0, kv_idx, -3) <= where(kv_idx <= q_idx, 3, q_idx)", False, q_idx=1, kv_idx=6),
    row("where(h == 0, kv_idx, -3) <= where(kv_idx <= q_idx, 3, q_idx)", True, q_idx=1, kv_idx=6, h=1),
    row("abs(where(h == 0, kv_idx, -3)) == 4", True, kv_idx=4),
    row("where(seen[kv_idx], q_idx < 2, false)", True, {"seen": SEEN}, q_idx=1, kv_idx=2, seen=EVEN),
    row("q_idx / 2 == kv_idx", False, q_idx=5, kv_idx=2),
    row("q_idx / 2 == kv_idx + 0.5", True, q_idx=5, kv_idx=2),
    row("causal or kv_idx < 0", True, {"causal": Param(value=True)}),
    # reads
    row("s - slope[h] * abs(q_idx - kv_idx)", 0.5, {"slope": SLOPE}, q_idx=1, kv_idx=5, h=2, s=1.0, slope=SLOPES),
    row("doc[b, q_idx] == doc[b, kv_idx]", True, {"doc": DOC}, q_idx=4, kv_idx=6, doc=DOCS),
    row("doc[b, q_idx] == doc[b, kv_idx]", False, {"doc": DOC}, q_idx=4, kv_idx=7, doc=DOCS),
    row("doc[b, doc[b, q_idx] + 2]", 9, {"doc": DOC}, q_idx=7, b=1, doc=DOCS),
    row("table[q_idx - kv_idx]", 50.0, {"table": TABLE}, q_idx=1, kv_idx=2, table=FIVE),
    row("table[q_idx - kv_idx]", 10.0, {"table": TABLE}, q_idx=1, kv_idx=6, table=FIVE),
    row("table[q_idx - kv_idx]", 0.0, {"table": TABLE}, q_idx=1, kv_idx=7, table=FIVE),
    row("table[q_idx - kv_idx]", 0.0, {"table": TABLE}, q_idx=6, kv_idx=1, table=FIVE),
    row("table[clamp(q_idx - kv_idx, -2, 2) + 2]", 50.0, {"table": TABLE}, q_idx=7, kv_idx=1, table=FIVE),
    row("table[-1] - table[1]", 30.0, {"table": TABLE}, table=FIVE),
    row("seen[kv_idx] and kv_idx <= q_idx", True, {"seen": SEEN}, q_idx=5, kv_idx=4, seen=EVEN),
    row("not seen[kv_idx]", True, {"seen": SEEN}, kv_idx=3, seen=EVEN),
    row("seen[kv_idx + 100]", False, {"seen": SEEN}, kv_idx=2, seen=EVEN),
    row("where(seen[kv_idx], s, 0)", 2.5, {"seen": SEEN}, kv_idx=2, s=2.5, seen=EVEN),
]


def look_up(table: Any, index: list[int]) -> Any:
    """An element of nested lists: a negative index counts from the end, an index out of range gives 0."""
    for i in index:
        if not -len(table) <= i < len(table):
            return 0
        table = table[i]
    return table


def environment(expression: Expression, at: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all symbols of an expression: positions, sizes, scalars, and the elements that it reads from the
    nested lists in `at`."""
    found = {"Nq": SIZES["n_q"], "Nk": SIZES["n_kv"], **dict.fromkeys(("b", "h", "q_idx", "kv_idx", "s"), 0), **at}
    found["hkv"] = found["h"] // (SIZES["q_heads"] // SIZES["kv_heads"])
    values: dict[str, Any] = {name: value for name, value in found.items() if not isinstance(value, list)}
    for read in expression.reads:
        values[read.name] = look_up(found[read.tensor], [number(i, values) for i in read.index])
    return values


def number(e: Any, values: Mapping[str, Any]) -> Any:
    """The value of a sympy expression as a Python number; KeyError for a function that the language lacks."""
    if e.is_Symbol:
        return values[e.name]
    if e in (sympy.true, sympy.false):
        return e == sympy.true
    if e.is_Rational:
        return e.p if e.q == 1 else e.p / e.q
    if e.is_Float:
        return float(e)
    if isinstance(e, select):  # the other branch may have no value
        return number(e.args[1] if number(e.args[0], values) else e.args[2], values)
    return FUNCTIONS[e.func](*(number(a, values) for a in e.args))


def _power(a: float, b: float) -> float:
    return a**b if isinstance(b, int) and b >= 0 else math.pow(a, b)


def _within(x: float) -> float:
    """x clamped to about 2**30 in magnitude, as conversions to integers do."""
    return min(max(x, -(2.0**30)), 2.0**30 - 64)


FUNCTIONS: dict[Any, Any] = {
    sympy.Add: lambda *a: sum(a),
    sympy.Mul: lambda *a: math.prod(a),
    sympy.Pow: _power,
    sympy.Min: min,
    sympy.Max: max,
    sympy.Abs: abs,
    sympy.exp: math.exp,
    sympy.tanh: math.tanh,
    KNOWN["log"]: math.log,
    KNOWN["sqrt"]: math.sqrt,
    sigmoid: lambda x: 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)),
    erf: math.erf,
    sin: math.sin,
    cos: math.cos,
    bitand: lambda a, b: a & b,
    bitor: lambda a, b: a | b,
    bitxor: lambda a, b: a ^ b,
    exp2: lambda x: 2.0**x,
    log2: math.log2,
    floordiv: lambda a, b: a // b,
    mod: lambda a, b: a % b,
    floor: lambda x: math.floor(_within(x)),
    nearest: lambda x: round(_within(x)),
    trunc: lambda x: int(_within(x)),
    clamp: lambda x, least, most: min(max(x, least), most),
    sympy.And: lambda *a: all(a),
    sympy.Or: lambda *a: any(a),
    sympy.Not: lambda a: not a,
    sympy.Lt: lambda a, b: a < b,
    sympy.Le: lambda a, b: a <= b,
    sympy.Gt: lambda a, b: a > b,
    sympy.Ge: lambda a, b: a >= b,
    sympy.Eq: lambda a, b: a == b,
    sympy.Ne: lambda a, b: a != b,
}
