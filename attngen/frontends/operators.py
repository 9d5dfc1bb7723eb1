"""What PyTorch's operators mean in expressions of the language: one function for each, by its name without the
overload."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from attngen.frontends.tracer import (
    Fresh,
    Index,
    Note,
    Untold,
    Value,
    as_condition,
    as_number,
    as_real,
    broadcast,
    call,
    constant,
    element,
    finite,
    from_start,
    indexed,
    joined,
    literal,
    mapped,
    moved,
    negated,
    never_negative,
    reduced,
    scalar,
)
from attngen.lang.limits import MAX_TURNS

if TYPE_CHECKING:
    from attngen.lang.params import Kind

Operator = Callable[..., Value]
OPERATORS: dict[str, Operator] = {}
# Operators of other libraries -> the operator of PyTorch that they mean.
SAME_AS = {"approx::tanh": "aten::tanh", "attngen_mods::tanh_approx": "aten::tanh"}
SAME_AS |= {
    "aten::__ilshift__": "aten::__lshift___",
    "aten::__irshift__": "aten::__rshift___",
}  # those that change a tensor end in `_`


def _means(*names: str) -> Callable[[Operator], Operator]:
    def keep(function: Operator) -> Operator:
        OPERATORS.update({f"aten::{name}": function for name in names})
        return function

    return keep


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


@_means("add")
def _add(a: Value, b: Value, alpha: Value | None = None) -> Value:
    if a.kind == b.kind == "bool":  # a sum of conditions is one
        return _OR(a, b)
    b = b if alpha is None else _multiply(b, alpha)
    for x, other in ((a, b), (b, a)):  # 0 is the start of many a sum
        if x.number == 0 and not x.shape and not (isinstance(x.number, float) and other.kind != "real"):
            return as_number(other)
    return _binary(ast.Add, operator.add, a, b)


@_means("sub", "subtract")
def _subtract(a: Value, b: Value, alpha: Value | None = None) -> Value:
    b = b if alpha is None else _multiply(b, alpha)
    return as_number(a) if b.number == 0 and not isinstance(b.number, float) else _binary(ast.Sub, operator.sub, a, b)


@_means("rsub")
def _subtract_from(a: Value, b: Value, alpha: Value | None = None) -> Value:
    return _subtract(b, a if alpha is None else _multiply(a, alpha))


@_means("mul", "multiply")
def _multiply(a: Value, b: Value) -> Value:
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


@_means("div", "divide", "true_divide")
def _divide(a: Value, b: Value, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return _binary(ast.Div, operator.truediv, a, b, "real")
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    return _whole("int", _binary(ast.Div, operator.truediv, a, b, "real"), "int" if _joint(a, b) == "int" else "real")


@_means("floor_divide")
def _floor_divide(a: Value, b: Value) -> Value:
    if _joint(a, b) == "int":
        return _binary(ast.FloorDiv, operator.floordiv, a, b)
    return _whole("floor", _binary(ast.Div, operator.truediv, a, b, "real"), "real")


@_means("remainder")
def _remainder(a: Value, b: Value) -> Value:
    if _joint(a, b) == "int":
        return _binary(ast.Mod, operator.mod, a, b)
    return _subtract(a, _multiply(b, _floor_divide(a, b)))


@_means("pow")
def _power(a: Value, b: Value) -> Value:
    exponent = b.at(tuple(ast.Name("i", ast.Load()) for _ in b.shape))
    if a.kind == b.kind == "int" and b.number is None and not never_negative(exponent):
        hint = "a real base, as in `2.0 ** x`, or an exponent that is not negative"
        raise Untold(f"of integers is one, so that `2 ** -3` is 0; expected {hint}")
    whole = a.kind == "int" and isinstance(b.number, int) and b.number >= 0
    return _binary(ast.Pow, operator.pow, a, b, "int" if whole else "real")


@_means("square")
def _square(x: Value) -> Value:
    return _power(x, constant(2))


@_means("exp2")
def _exp2(x: Value) -> Value:
    return _power(constant(2), x) if x.number is None else constant(2.0**x.number)


@_means("neg", "negative")
def _negative(x: Value) -> Value:
    x = as_number(x)
    finite(x)
    return constant(-x.number) if x.number is not None else mapped(x.kind, lambda e: ast.UnaryOp(ast.USub(), e), x)


@_means("sign", "sgn")
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
    """A number rounded to a whole one; as a real where PyTorch gives one."""
    made = _function(name, None, x, "int")
    return made if kind == "int" else as_real(made)


@_means("floor")
def _floor(x: Value) -> Value:
    return x if x.kind == "int" else _whole("floor", x, "real")


@_means("ceil")
def _ceil(x: Value) -> Value:
    return x if x.kind == "int" else _negative(_whole("floor", _negative(x), "real"))


@_means("round")
def _round(x: Value) -> Value:
    return x if x.kind == "int" else _whole("round", x, "real")


@_means("trunc", "fix")
def _trunc(x: Value) -> Value:
    return x if x.kind == "int" else _whole("int", x, "real")


@_means("abs", "absolute")
def _abs(x: Value) -> Value:
    x = as_number(x)
    return constant(abs(x.number)) if x.number is not None else _function("abs", None, x, x.kind)


@_means("relu")
def _relu(x: Value) -> Value:
    return _function("relu", None, x, as_number(x).kind)


@_means("gelu")
def _gelu(x: Value, approximate: str = "none") -> Value:
    if approximate == "none":
        return _function("gelu", None, x)
    inner = _multiply(constant(math.sqrt(2 / math.pi)), _add(x, _multiply(constant(0.044715), _power(x, constant(3)))))
    return _multiply(_multiply(constant(0.5), x), _add(constant(1.0), OPERATORS["aten::tanh"](inner)))


@_means("silu")
def _silu(x: Value) -> Value:
    return _multiply(x, OPERATORS["aten::sigmoid"](x))


@_means("softplus")
def _softplus(x: Value, beta: Value | None = None, threshold: Value | None = None) -> Value:
    beta = beta or constant(1)
    scaled, most = _multiply(x, beta), threshold or constant(20)
    grown = _divide(_log1p(OPERATORS["aten::exp"](_least(scaled, most))), beta)
    return _where(_compare(ast.Gt, operator.gt, scaled, most), x, grown)


@_means("rsqrt")
def _rsqrt(x: Value) -> Value:
    return _divide(constant(1.0), OPERATORS["aten::sqrt"](x))


@_means("reciprocal")
def _reciprocal(x: Value) -> Value:
    return _divide(constant(1.0), x)


@_means("log2")
def _log2(x: Value) -> Value:
    return _multiply(OPERATORS["aten::log"](x), constant(1 / math.log(2)))


@_means("log1p")
def _log1p(x: Value) -> Value:
    return OPERATORS["aten::log"](_add(constant(1.0), x))


@_means("expm1")
def _expm1(x: Value) -> Value:
    return _subtract(OPERATORS["aten::exp"](x), constant(1.0))


# ---------------------------------------------------------------------------------------------- extremes and choices


def _extreme(name: str, of: Callable[..., Any], a: Value, b: Value) -> Value:
    a, b = as_number(a), as_number(b)
    finite(a, b)
    if a.number is not None and b.number is not None:
        return constant(of(a.number, b.number))
    return mapped(_joint(a, b), lambda x, y: call(name, x, y), a, b)


@_means("minimum", "fmin", "clamp_max")
def _least(a: Value, b: Value) -> Value:
    return _AND(a, b) if a.kind == b.kind == "bool" else _extreme("min", min, a, b)


@_means("maximum", "fmax", "clamp_min")
def _most(a: Value, b: Value) -> Value:
    return _OR(a, b) if a.kind == b.kind == "bool" else _extreme("max", max, a, b)


@_means("clamp", "clip", "hardtanh")
def _clamp(x: Value, min: Value | None = None, max: Value | None = None) -> Value:
    if min is None or max is None:
        x = x if min is None else _most(x, min)
        return x if max is None else _least(x, max)
    parts = [as_number(x), as_number(min), as_number(max)]
    finite(*parts)
    return mapped(_joint(*parts), lambda *e: call("clamp", *e), *parts)


@_means("where")
def _where(c: Value, a: Value, b: Value) -> Value:
    c = as_condition(c)
    if c.number is not None and not c.shape:
        return a if c.number else b
    hidden = [x.number == -math.inf for x in (a, b)]
    if all(hidden):
        raise Untold("gives -inf on both sides of `torch.where`")
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
        raise Untold("gives -inf in a tensor of several elements; expected it for one score")


def _either(c: ast.expr, a: ast.expr, b: ast.expr) -> ast.expr:
    return joined(ast.Or, joined(ast.And, c, a), joined(ast.And, negated(c), b))


@_means("masked_fill")
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


@_means("eq")
def _equal(a: Value, b: Value) -> Value:
    if a.kind == b.kind == "bool":
        return mapped("bool", lambda x, y: _either(x, y, negated(y)), a, b)
    return _compare(ast.Eq, operator.eq, a, b)


@_means("ne")
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


@_means("logical_not")
def _not(x: Value) -> Value:
    x = as_condition(x)
    return constant(not x.number) if x.number is not None else mapped("bool", negated, x)


@_means("bitwise_not")
def _invert(x: Value) -> Value:
    return _not(x) if x.kind == "bool" else _subtract(_negative(x), constant(1))


@_means("__lshift__", "bitwise_left_shift")
def _shift_left(a: Value, b: Value) -> Value:
    if isinstance(b.number, int) and not 0 <= b.number < 31:
        return _shift_left(_shift_left(a, constant(30)), constant(1)) if b.number == 31 else _multiply(a, constant(0))
    return _binary(ast.LShift, operator.lshift, a, b)


@_means("__rshift__", "bitwise_right_shift")
def _shift_right(a: Value, b: Value) -> Value:
    if isinstance(b.number, int) and not 0 <= b.number < 31:
        return _where(_compare(ast.Lt, operator.lt, a, constant(0)), constant(-1), constant(0))
    return _binary(ast.RShift, operator.rshift, a, b)


# ---------------------------------------------------------------------------------------------- types and new tensors


def _cast(x: Value, dtype: torch.dtype | None) -> Value:
    if dtype is None:
        return x
    if dtype == torch.bool:
        return as_condition(x)
    if dtype.is_floating_point:
        made = as_real(x)
        return made if x.visible is None else scalar("real", made.text, x.visible)
    x = as_number(x)
    finite(x)
    if x.number is not None:
        return constant(int(x.number))
    return x if x.kind == "int" else mapped("int", lambda e: call("int", e), x)


@_means("_to_copy", "to")
def _to(x: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _cast(x, dtype)


OPERATORS["prims::convert_element_type"] = _to


@_means("lift_fresh", "lift_fresh_copy", "clone", "alias", "detach", "contiguous", "view_as_real", "positive")
def _same(x: Value, **_: Any) -> Value:
    return x


def _filled(shape: Iterable[Any], value: Value, dtype: torch.dtype | None) -> Value:
    value, sizes = _cast(value, dtype), tuple(_int(n) for n in shape)
    return Value(value.kind, sizes, lambda _: value.text, value.number)


def _int(x: Any) -> int:
    """A whole number that the function was written with."""
    number = x.number if isinstance(x, Value) else x
    if type(number) is not int:
        raise Untold("has a size or a dimension that is computed; expected a number that the function is written with")
    return number


@_means("full", "new_full")
def _full(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> Value:
    shape, value = args[-2:]
    like = args[0] if len(args) == 3 else None
    return _filled(shape, value if like is None or dtype else _alike(value, like), dtype)


@_means("full_like")
def _full_like(x: Value, value: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _filled(x.shape, value if dtype else _alike(value, x), dtype)


def _alike(value: Value, x: Value) -> Value:
    return _cast(value, {"bool": torch.bool, "int": torch.int64, "real": torch.float32}[x.kind])


@_means("zeros", "new_zeros")
def _zeros(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _new(constant(0), args, dtype)


@_means("ones", "new_ones")
def _ones(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _new(constant(1), args, dtype)


def _new(value: Value, args: tuple[Any, ...], dtype: torch.dtype | None) -> Value:
    like = args[0] if len(args) == 2 else None
    return _filled(
        args[-1], value if dtype or like is None else _alike(value, like), dtype or (None if like else torch.float32)
    )


@_means("zeros_like")
def _zeros_like(x: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _full_like(x, constant(0), dtype)


@_means("ones_like")
def _ones_like(x: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _full_like(x, constant(1), dtype)


@_means("scalar_tensor")
def _scalar_tensor(value: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _cast(value, dtype)


@_means("arange")
def _arange(*args: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    numbers = [x.number for x in args if isinstance(x.number, int)]
    if len(numbers) < len(args):
        raise Untold(
            "counts by numbers that are computed, or are no integers; expected integers that the function is written with"
        )
    counted = range(*numbers)
    start, step, count = counted.start, counted.step, len(counted)

    def of(index: Index) -> ast.expr:
        at = from_start(index[0], count)
        return (
            at
            if (start, step) == (0, 1)
            else ast.BinOp(literal(start), ast.Add(), ast.BinOp(at, ast.Mult(), literal(step)))
        )

    return _cast(Value("int", (count,), of), dtype)


# ---------------------------------------------------------------------------------------------- views and reads


@_means("index", "_unsafe_index")
def _index(note: Note, x: Value, indices: list[Value | None]) -> Value:
    if any(i is not None and i.kind == "bool" for i in indices):
        raise Untold(
            "selects by a mask, so that the number of elements is not known; expected `torch.where`, with what others count as"
        )
    return indexed(note, x, [*indices, *[None] * (len(x.shape) - len(indices))])


@_means("embedding")
def _embedding(note: Note, weight: Value, at: Value, *_: Any, **__: Any) -> Value:
    return indexed(note, weight, [at, None])


@_means("select")
def _select(note: Note, x: Value, dim: Value, at: Value) -> Value:
    indices: list[Value | None] = [None] * len(x.shape)
    indices[_int(dim) % len(x.shape)] = at
    return indexed(note, x, indices)


READS = (_index, _embedding, _select)  # these take `note` first


@_means("slice")
def _slice(
    x: Value, dim: Value | None = None, start: Value | None = None, end: Value | None = None, step: Value | None = None
) -> Value:
    place = _int(dim or 0) % len(x.shape)
    ends = [None if v is None or v.number is None else int(v.number) for v in (start, end, step)]
    taken = range(x.shape[place])[slice(*ends)]
    by = taken.step
    if taken == range(x.shape[place]):
        return x

    def places(index: Index) -> Index:
        at = index[place]
        if isinstance(at, ast.Constant):
            moved_to: ast.expr = literal(taken.start + int(at.value) * by)  # type: ignore[arg-type]
        else:
            at = from_start(at, len(taken))
            moved_to = at if by == 1 else ast.BinOp(at, ast.Mult(), literal(by))
            moved_to = ast.BinOp(moved_to, ast.Add(), literal(taken.start)) if taken.start else moved_to
        return (*index[:place], moved_to, *index[place + 1 :])

    return moved(x, (*x.shape[:place], len(taken), *x.shape[place + 1 :]), places)


@_means("unsqueeze")
def _unsqueeze(x: Value, dim: Value) -> Value:
    place = _int(dim) % (len(x.shape) + 1)
    return moved(x, (*x.shape[:place], 1, *x.shape[place:]), lambda index: (*index[:place], *index[place + 1 :]))


@_means("view", "reshape", "_unsafe_view", "squeeze", "flatten")
def _view(x: Value, shape: Any = None, *_: Any) -> Value:
    """Only dimensions of 1 may come or go."""
    if isinstance(shape, Value) or shape is None or not isinstance(shape, (list, tuple)):
        gone = range(len(x.shape)) if shape is None else [_int(shape) % max(1, len(x.shape))]
        new = tuple(n for d, n in enumerate(x.shape) if not (n == 1 and d in gone))
    else:
        wanted = [_int(n) for n in shape]
        rest = math.prod(x.shape) // max(1, math.prod(n for n in wanted if n != -1))
        new = tuple(rest if n == -1 else n for n in wanted)
    if [n for n in new if n != 1] != [n for n in x.shape if n != 1]:
        raise Untold(
            f"views a tensor of shape {list(x.shape)} as {list(new)}; expected dimensions of 1 alone to come or go"
        )

    def places(index: Index) -> Index:
        rest = iter(i for i, n in zip(index, new) if n != 1)
        return tuple(ast.Constant(0) if n == 1 else next(rest) for n in x.shape)

    return moved(x, new, places)


@_means("expand")
def _expand(x: Value, shape: list[Any], **_: Any) -> Value:
    sizes = [_int(n) for n in shape]
    own = (1,) * (len(sizes) - len(x.shape)) + x.shape
    whole = tuple(m if n == -1 else n for n, m in zip(sizes, own))
    return Value(x.kind, whole, lambda index: element(x, index), x.number, x.visible)


@_means("permute")
def _permute(x: Value, dims: list[Any]) -> Value:
    order = [_int(d) % len(x.shape) for d in dims]
    return moved(
        x, tuple(x.shape[d] for d in order), lambda index: tuple(index[order.index(d)] for d in range(len(order)))
    )


@_means("transpose")
def _transpose(x: Value, a: Value, b: Value) -> Value:
    order = list(range(len(x.shape)))
    i, j = (_int(d) % len(order) for d in (a, b))
    order[i], order[j] = order[j], order[i]
    return _permute(x, order)


# ---------------------------------------------------------------------------------------------- reductions


def _dims(x: Value, dim: Any) -> tuple[int, ...]:
    if dim is None or dim == []:
        return tuple(range(len(x.shape)))
    found = dim if isinstance(dim, (list, tuple)) else [dim]
    return tuple(_int(d) for d in found)


def _kept(keepdim: Any) -> bool:
    return bool(keepdim.number if isinstance(keepdim, Value) else keepdim)


@_means("any")
def _any(fresh: Fresh, x: Value, dim: Any = None, keepdim: Any = False) -> Value:
    return reduced(as_condition(x), _dims(x, dim), _kept(keepdim), "any", "bool", fresh)


@_means("all")
def _all(fresh: Fresh, x: Value, dim: Any = None, keepdim: Any = False) -> Value:
    return reduced(as_condition(x), _dims(x, dim), _kept(keepdim), "all", "bool", fresh)


@_means("sum")
def _sum(fresh: Fresh, x: Value, dim: Any = None, keepdim: Any = False, dtype: torch.dtype | None = None) -> Value:
    x = _cast(as_number(x), dtype)
    finite(x)
    return reduced(x, _dims(x, dim), _kept(keepdim), "sum", x.kind, fresh)


@_means("mean")
def _mean(fresh: Fresh, x: Value, dim: Any = None, keepdim: Any = False, dtype: torch.dtype | None = None) -> Value:
    count = math.prod(x.shape[d] for d in _dims(x, dim))
    return _divide(_sum(fresh, x, dim, keepdim, dtype), constant(count))


@_means("dot", "vdot", "inner")
def _dot(fresh: Fresh, a: Value, b: Value) -> Value:
    if broadcast(a.shape, b.shape) != a.shape:
        raise Untold(
            f"multiplies tensors of shapes {list(a.shape)} and {list(b.shape)}; expected one shape, or (a * b).sum()"
        )
    return _sum(fresh, _multiply(a, b))


@_means("isin")
def _isin(fresh: Fresh, x: Value, values: Value, *_: Any, invert: Value | None = None, **__: Any) -> Value:
    if (count := math.prod(values.shape)) > MAX_TURNS:
        instead = (
            "expected at most {}, or what `torch.isin` says of all positions, made outside "
            "of the function: a bool tensor, read at one"
        )
        raise Untold(f"compares with {count} elements; {instead.format(MAX_TURNS)}")
    rank = len(values.shape)
    wide = Value(x.kind, x.shape + (1,) * rank, lambda index: x.at(index[: len(x.shape)]))
    found = reduced(_equal(wide, values), tuple(range(-rank, 0)), False, "any", "bool", fresh)
    return _not(found) if invert is not None and invert.number else found


REDUCTIONS = (_any, _all, _sum, _mean, _dot, _isin)  # these take `fresh` first
