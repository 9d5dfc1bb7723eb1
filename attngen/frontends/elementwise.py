"""Elementwise operators of PyTorch as expressions: arithmetic, functions, choices and conditions."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attngen.frontends.operator_table import OPERATORS, Operator, implements
from attngen.frontends.tracer import (
    NotExpressible,
    Value,
    as_condition,
    as_number,
    as_real,
    call,
    constant,
    finite,
    joined,
    mapped,
    negated,
    never_negative,
    scalar,
)

if TYPE_CHECKING:
    from attngen.lang.params import Kind


def _joint(*values: Value) -> Kind:
    return "real" if any(x.kind == "real" for x in values) else "int"


# ---------------------------------------------------------------------------------------------- arithmetic


def _binary(
    op: type[ast.operator], of: Callable[[Any, Any], Any], a: Value, b: Value, kind: Kind | None = None
) -> Value:
    a, b = as_number(a), as_number(b)
    if a.number is not None and b.number is not None:
        return constant(of(a.number, b.number))
    if op is not ast.Add:
        finite(*((b,) if op is ast.Sub else (a, b)))
    visible = _both(a, b)
    return mapped(kind or _joint(a, b), lambda x, y: ast.BinOp(x, op(), y), a, b, visible=visible)


def _both(a: Value, b: Value) -> ast.expr | None:
    parts = [x.visible for x in (a, b) if x.visible is not None]
    return joined(ast.And, *parts) if parts else None


@implements("add")
def _add(a: Value, b: Value, alpha: Value | None = None) -> Value:
    if a.kind == b.kind == "bool":  # the sum of two conditions is a condition
        return _OR(a, b)
    b = b if alpha is None else multiply(b, alpha)
    for x, other in ((a, b), (b, a)):  # sums often start from 0
        if x.number == 0 and not x.shape and not (isinstance(x.number, float) and other.kind != "real"):
            return as_number(other)
    return _binary(ast.Add, operator.add, a, b)


@implements("sub", "subtract")
def _subtract(a: Value, b: Value, alpha: Value | None = None) -> Value:
    b = b if alpha is None else multiply(b, alpha)
    return as_number(a) if b.number == 0 and not isinstance(b.number, float) else _binary(ast.Sub, operator.sub, a, b)


@implements("rsub")
def _subtract_from(a: Value, b: Value, alpha: Value | None = None) -> Value:
    return _subtract(b, a if alpha is None else multiply(a, alpha))


@implements("mul", "multiply")
def multiply(a: Value, b: Value) -> Value:
    if a.kind == b.kind == "bool":
        return _AND(a, b)
    for x, other in ((a, b), (b, a)):
        if (
            x.number == 0 and not other.shape and other.visible is None and ast.unparse(other.text) == "s"
        ):  # as in `s * 0 + bias[q, k]`
            return constant(0.0)
        if x.number == 1 and not x.shape and not (isinstance(x.number, float) and other.kind != "real"):
            return as_number(other)
    return _binary(ast.Mult, operator.mul, a, b)


@implements("div", "divide", "true_divide")
def divide(a: Value, b: Value, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return _binary(ast.Div, operator.truediv, a, b, "real")
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    return _whole("int", _binary(ast.Div, operator.truediv, a, b, "real"), "int" if _joint(a, b) == "int" else "real")


@implements("floor_divide")
def _floor_divide(a: Value, b: Value) -> Value:
    if _joint(a, b) == "int":
        return _binary(ast.FloorDiv, operator.floordiv, a, b)
    return _whole("floor", _binary(ast.Div, operator.truediv, a, b, "real"), "real")


@implements("remainder")
def _remainder(a: Value, b: Value) -> Value:
    if _joint(a, b) == "int":
        return _binary(ast.Mod, operator.mod, a, b)
    return _subtract(a, multiply(b, _floor_divide(a, b)))


@implements("pow")
def _power(a: Value, b: Value) -> Value:
    exponent = b.at(tuple(ast.Name("i", ast.Load()) for _ in b.shape))
    if a.kind == b.kind == "int" and b.number is None and not never_negative(exponent):
        hint = "a real base, as in `2.0 ** x`, or an exponent that is not negative"
        raise NotExpressible(f"of integers is an integer, so that `2 ** -3` is 0; expected {hint}")
    whole = a.kind == "int" and isinstance(b.number, int) and b.number >= 0
    return _binary(ast.Pow, operator.pow, a, b, "int" if whole else "real")


@implements("square")
def _square(x: Value) -> Value:
    return _power(x, constant(2))


@implements("exp2")
def _exp2(x: Value) -> Value:
    return _power(constant(2), x) if x.number is None else constant(2.0**x.number)


@implements("neg", "negative")
def _negative(x: Value) -> Value:
    x = as_number(x)
    finite(x)
    return constant(-x.number) if x.number is not None else mapped(x.kind, lambda e: ast.UnaryOp(ast.USub(), e), x)


@implements("sign", "sgn")
def _sign(x: Value) -> Value:
    zero = constant(0)
    one = constant(1) if x.kind == "int" else constant(1.0)
    return _where(
        _compare(ast.Gt, operator.gt, x, zero),
        one,
        _where(_compare(ast.Lt, operator.lt, x, zero), _negative(one), zero),
    )


# ---------------------------------------------------------------------------------------------- functions


def _function(name: str, of: Callable[[float], float] | None, x: Value, kind: Kind = "real") -> Value:
    finite(x)
    if x.number is not None and of is not None:
        return constant(of(float(x.number)))
    return mapped(kind, lambda e: call(name, e), as_number(x))


def _smooth(name: str, of: Callable[[float], float] | None) -> Operator:
    return lambda x: _function(name, of, x)


_SMOOTH = {
    "exp": math.exp,
    "log": math.log,
    "tanh": math.tanh,
    "sqrt": math.sqrt,
    "erf": math.erf,
    "sin": math.sin,
    "cos": math.cos,
}
OPERATORS.update({f"aten::{name}": _smooth(name, of) for name, of in _SMOOTH.items()})
OPERATORS["aten::sigmoid"] = _smooth("sigmoid", None)


def _whole(name: str, x: Value, kind: Kind) -> Value:
    """Return the number rounded to an integer, as a real where PyTorch returns a float."""
    made = _function(name, None, x, "int")
    return made if kind == "int" else as_real(made)


@implements("floor")
def _floor(x: Value) -> Value:
    return x if x.kind == "int" else _whole("floor", x, "real")


@implements("ceil")
def _ceil(x: Value) -> Value:
    return x if x.kind == "int" else _negative(_whole("floor", _negative(x), "real"))


@implements("round")
def _round(x: Value) -> Value:
    return x if x.kind == "int" else _whole("round", x, "real")


@implements("trunc", "fix")
def _trunc(x: Value) -> Value:
    return x if x.kind == "int" else _whole("int", x, "real")


@implements("abs", "absolute")
def _abs(x: Value) -> Value:
    x = as_number(x)
    return constant(abs(x.number)) if x.number is not None else _function("abs", None, x, x.kind)


@implements("relu")
def _relu(x: Value) -> Value:
    return _function("relu", None, x, as_number(x).kind)


@implements("gelu")
def _gelu(x: Value, approximate: str = "none") -> Value:
    if approximate == "none":
        return _function("gelu", None, x)
    inner = multiply(constant(math.sqrt(2 / math.pi)), _add(x, multiply(constant(0.044715), _power(x, constant(3)))))
    return multiply(multiply(constant(0.5), x), _add(constant(1.0), OPERATORS["aten::tanh"](inner)))


@implements("silu")
def _silu(x: Value) -> Value:
    return multiply(x, OPERATORS["aten::sigmoid"](x))


@implements("softplus")
def _softplus(x: Value, beta: Value | None = None, threshold: Value | None = None) -> Value:
    beta = beta or constant(1)
    scaled, most = multiply(x, beta), threshold or constant(20)
    grown = divide(_log1p(OPERATORS["aten::exp"](_least(scaled, most))), beta)
    return _where(_compare(ast.Gt, operator.gt, scaled, most), x, grown)


@implements("rsqrt")
def _rsqrt(x: Value) -> Value:
    return divide(constant(1.0), OPERATORS["aten::sqrt"](x))


@implements("reciprocal")
def _reciprocal(x: Value) -> Value:
    return divide(constant(1.0), x)


@implements("log2")
def _log2(x: Value) -> Value:
    return multiply(OPERATORS["aten::log"](x), constant(1 / math.log(2)))


@implements("log1p")
def _log1p(x: Value) -> Value:
    return OPERATORS["aten::log"](_add(constant(1.0), x))


@implements("expm1")
def _expm1(x: Value) -> Value:
    return _subtract(OPERATORS["aten::exp"](x), constant(1.0))


# ---------------------------------------------------------------------------------------------- extremes and choices


def _extreme(name: str, of: Callable[..., Any], a: Value, b: Value) -> Value:
    a, b = as_number(a), as_number(b)
    finite(a, b)
    if a.number is not None and b.number is not None:
        return constant(of(a.number, b.number))
    return mapped(_joint(a, b), lambda x, y: call(name, x, y), a, b)


@implements("minimum", "fmin", "clamp_max")
def _least(a: Value, b: Value) -> Value:
    return _AND(a, b) if a.kind == b.kind == "bool" else _extreme("min", min, a, b)


@implements("maximum", "fmax", "clamp_min")
def _most(a: Value, b: Value) -> Value:
    return _OR(a, b) if a.kind == b.kind == "bool" else _extreme("max", max, a, b)


@implements("clamp", "clip", "hardtanh")
def _clamp(x: Value, min: Value | None = None, max: Value | None = None) -> Value:
    if min is None or max is None:
        x = x if min is None else _most(x, min)
        return x if max is None else _least(x, max)
    parts = [as_number(x), as_number(min), as_number(max)]
    finite(*parts)
    return mapped(_joint(*parts), lambda *e: call("clamp", *e), *parts)


@implements("where")
def _where(c: Value, a: Value, b: Value) -> Value:
    c = as_condition(c)
    if c.number is not None and not c.shape:
        return a if c.number else b
    hidden = [x.number == -math.inf for x in (a, b)]
    if all(hidden):
        raise NotExpressible("gives -inf on both sides of `torch.where`")
    if any(hidden):
        _scalars(c, a, b)
        shown = negated(c.text) if hidden[0] else c.text
        kept = b if hidden[0] else a
        return scalar(
            "real", as_real(kept).text, joined(ast.And, shown, *([] if kept.visible is None else [kept.visible]))
        )
    if a.kind == b.kind == "bool":
        return mapped("bool", _either, c, a, b)
    a, b = as_number(a), as_number(b)
    visible = None
    if a.visible is not None or b.visible is not None:
        _scalars(c, a, b)
        true = ast.Name("true", ast.Load())
        visible = _either(c.text, a.visible or true, b.visible or true)
    return mapped(_joint(a, b), lambda *e: call("where", *e), c, a, b, visible=visible)


def _scalars(*values: Value) -> None:
    if any(x.shape for x in values):
        raise NotExpressible("gives -inf in a tensor of several elements; expected it for one score")


def _either(c: ast.expr, a: ast.expr, b: ast.expr) -> ast.expr:
    return joined(ast.Or, joined(ast.And, c, a), joined(ast.And, negated(c), b))


@implements("masked_fill")
def _masked_fill(x: Value, mask: Value, value: Value) -> Value:
    return _where(mask, value, x)


# ---------------------------------------------------------------------------------------------- conditions


def _compare(op: type[ast.cmpop], of: Callable[[Any, Any], bool], a: Value, b: Value) -> Value:
    finite(a, b)
    a, b = as_number(a), as_number(b)
    if a.number is not None and b.number is not None:
        return constant(of(a.number, b.number))
    return mapped("bool", lambda x, y: ast.Compare(x, [op()], [y]), a, b)


def _comparison(op: type[ast.cmpop], of: Callable[[Any, Any], bool]) -> Operator:
    return lambda a, b: _compare(op, of, a, b)


_ORDERS: dict[str, tuple[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    "lt": (ast.Lt, operator.lt),
    "le": (ast.LtE, operator.le),
    "gt": (ast.Gt, operator.gt),
    "ge": (ast.GtE, operator.ge),
}
OPERATORS.update({f"aten::{name}": _comparison(*order) for name, order in _ORDERS.items()})


@implements("eq")
def equal(a: Value, b: Value) -> Value:
    if a.kind == b.kind == "bool":
        return mapped("bool", lambda x, y: _either(x, y, negated(y)), a, b)
    return _compare(ast.Eq, operator.eq, a, b)


@implements("ne")
def _unequal(a: Value, b: Value) -> Value:
    return _differ(a, b) if a.kind == b.kind == "bool" else _compare(ast.NotEq, operator.ne, a, b)


def _differ(a: Value, b: Value) -> Value:
    return mapped("bool", lambda x, y: _either(x, negated(y), y), a, b)


def _bits(op: type[ast.operator], of: Callable[[Any, Any], Any], of_conditions: Operator) -> Operator:
    return lambda a, b: of_conditions(a, b) if a.kind == b.kind == "bool" else _binary(op, of, a, b)


def _conditions(op: type[ast.boolop]) -> Operator:
    return lambda a, b: mapped("bool", lambda x, y: joined(op, x, y), as_condition(a), as_condition(b))


_AND, _OR = _conditions(ast.And), _conditions(ast.Or)
OPERATORS.update({
    "aten::logical_and": _AND,
    "aten::logical_or": _OR,
    "aten::logical_xor": lambda a, b: _differ(as_condition(a), as_condition(b)),
    **dict.fromkeys(("aten::bitwise_and", "aten::__and__"), _bits(ast.BitAnd, operator.and_, _AND)),
    **dict.fromkeys(("aten::bitwise_or", "aten::__or__"), _bits(ast.BitOr, operator.or_, _OR)),
    **dict.fromkeys(("aten::bitwise_xor", "aten::__xor__"), _bits(ast.BitXor, operator.xor, _differ)),
})  # fmt: skip


@implements("logical_not")
def logical_not(x: Value) -> Value:
    x = as_condition(x)
    return constant(not x.number) if x.number is not None else mapped("bool", negated, x)


@implements("bitwise_not")
def _invert(x: Value) -> Value:
    return logical_not(x) if x.kind == "bool" else _subtract(_negative(x), constant(1))


@implements("__lshift__", "bitwise_left_shift")
def _shift_left(a: Value, b: Value) -> Value:
    if isinstance(b.number, int) and not 0 <= b.number < 31:
        return _shift_left(_shift_left(a, constant(30)), constant(1)) if b.number == 31 else multiply(a, constant(0))
    return _binary(ast.LShift, operator.lshift, a, b)


@implements("__rshift__", "bitwise_right_shift")
def _shift_right(a: Value, b: Value) -> Value:
    if isinstance(b.number, int) and not 0 <= b.number < 31:
        return _where(_compare(ast.Lt, operator.lt, a, constant(0)), constant(-1), constant(0))
    return _binary(ast.RShift, operator.rshift, a, b)
