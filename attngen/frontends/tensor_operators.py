"""Operators of PyTorch that make, view, index or reduce tensors, as expressions."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable
from typing import Any

import torch

from attngen.frontends.elementwise import divide, equal, logical_not, multiply
from attngen.frontends.operator_table import OPERATORS, implements
from attngen.frontends.tracer import (
    Fresh,
    Index,
    Note,
    NotExpressible,
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
    literal,
    mapped,
    moved,
    reduced,
    scalar,
)
from attngen.lang.limits import MAX_UNROLLED

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


@implements("_to_copy", "to")
def _to(x: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _cast(x, dtype)


OPERATORS["prims::convert_element_type"] = _to


@implements("lift_fresh", "lift_fresh_copy", "clone", "alias", "detach", "contiguous", "view_as_real", "positive")
def _same(x: Value, **_: Any) -> Value:
    return x


def _filled(shape: Iterable[Any], value: Value, dtype: torch.dtype | None) -> Value:
    value, sizes = _cast(value, dtype), tuple(_int(n) for n in shape)
    return Value(value.kind, sizes, lambda _: value.text, value.number)


def _int(x: Any) -> int:
    """Return an integer that the function was written with."""
    number = x.number if isinstance(x, Value) else x
    if type(number) is not int:
        raise NotExpressible(
            "has a size or a dimension that is computed; expected a number that the function is written with"
        )
    return number


@implements("full", "new_full")
def _full(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> Value:
    shape, value = args[-2:]
    like = args[0] if len(args) == 3 else None
    return _filled(shape, value if like is None or dtype else _alike(value, like), dtype)


@implements("full_like")
def _full_like(x: Value, value: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _filled(x.shape, value if dtype else _alike(value, x), dtype)


def _alike(value: Value, x: Value) -> Value:
    return _cast(value, {"bool": torch.bool, "int": torch.int64, "real": torch.float32}[x.kind])


@implements("zeros", "new_zeros")
def _zeros(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _new(constant(0), args, dtype)


@implements("ones", "new_ones")
def _ones(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _new(constant(1), args, dtype)


def _new(value: Value, args: tuple[Any, ...], dtype: torch.dtype | None) -> Value:
    like = args[0] if len(args) == 2 else None
    return _filled(
        args[-1], value if dtype or like is None else _alike(value, like), dtype or (None if like else torch.float32)
    )


@implements("zeros_like")
def _zeros_like(x: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _full_like(x, constant(0), dtype)


@implements("ones_like")
def _ones_like(x: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _full_like(x, constant(1), dtype)


@implements("scalar_tensor")
def _scalar_tensor(value: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _cast(value, dtype)


@implements("arange")
def _arange(*args: Value, dtype: torch.dtype | None = None, **_: Any) -> Value:
    numbers = [x.number for x in args if isinstance(x.number, int)]
    if len(numbers) < len(args):
        raise NotExpressible(
            "counts by numbers that are computed, or are not integers; expected integers that the function is "
            "written with"
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


@implements("index", "_unsafe_index")
def _index(note: Note, x: Value, indices: list[Value | None]) -> Value:
    if any(i is not None and i.kind == "bool" for i in indices):
        raise NotExpressible(
            "selects by a mask, so that the number of elements is not known; expected `torch.where`, "
            "with a value for the others"
        )
    return indexed(note, x, [*indices, *[None] * (len(x.shape) - len(indices))])


@implements("embedding")
def _embedding(note: Note, weight: Value, at: Value, *_: Any, **__: Any) -> Value:
    return indexed(note, weight, [at, None])


@implements("select")
def _select(note: Note, x: Value, dim: Value, at: Value) -> Value:
    indices: list[Value | None] = [None] * len(x.shape)
    indices[_int(dim) % len(x.shape)] = at
    return indexed(note, x, indices)


READS = (_index, _embedding, _select)  # their first parameter is `note`


@implements("slice")
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


@implements("unsqueeze")
def _unsqueeze(x: Value, dim: Value) -> Value:
    place = _int(dim) % (len(x.shape) + 1)
    return moved(x, (*x.shape[:place], 1, *x.shape[place:]), lambda index: (*index[:place], *index[place + 1 :]))


@implements("view", "reshape", "_unsafe_view", "squeeze", "flatten")
def _view(x: Value, shape: Any = None, *_: Any) -> Value:
    """Return a view that adds or removes only dimensions of 1."""
    if isinstance(shape, Value) or shape is None or not isinstance(shape, (list, tuple)):
        gone = range(len(x.shape)) if shape is None else [_int(shape) % max(1, len(x.shape))]
        new = tuple(n for d, n in enumerate(x.shape) if not (n == 1 and d in gone))
    else:
        requested = [_int(n) for n in shape]
        rest = math.prod(x.shape) // max(1, math.prod(n for n in requested if n != -1))
        new = tuple(rest if n == -1 else n for n in requested)
    if [n for n in new if n != 1] != [n for n in x.shape if n != 1]:
        raise NotExpressible(
            f"views a tensor of shape {list(x.shape)} as {list(new)}; expected only dimensions of 1 to come or go"
        )

    def places(index: Index) -> Index:
        rest = iter(i for i, n in zip(index, new) if n != 1)
        return tuple(ast.Constant(0) if n == 1 else next(rest) for n in x.shape)

    return moved(x, new, places)


@implements("expand")
def _expand(x: Value, shape: list[Any], **_: Any) -> Value:
    sizes = [_int(n) for n in shape]
    own = (1,) * (len(sizes) - len(x.shape)) + x.shape
    whole = tuple(m if n == -1 else n for n, m in zip(sizes, own))
    return Value(x.kind, whole, lambda index: element(x, index), x.number, x.visible)


@implements("permute")
def _permute(x: Value, dims: list[Any]) -> Value:
    order = [_int(d) % len(x.shape) for d in dims]
    return moved(
        x, tuple(x.shape[d] for d in order), lambda index: tuple(index[order.index(d)] for d in range(len(order)))
    )


@implements("transpose")
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


@implements("any")
def _any(fresh: Fresh, x: Value, dim: Any = None, keepdim: Any = False) -> Value:
    return reduced(as_condition(x), _dims(x, dim), _kept(keepdim), "any", "bool", fresh)


@implements("all")
def _all(fresh: Fresh, x: Value, dim: Any = None, keepdim: Any = False) -> Value:
    return reduced(as_condition(x), _dims(x, dim), _kept(keepdim), "all", "bool", fresh)


@implements("sum")
def _sum(fresh: Fresh, x: Value, dim: Any = None, keepdim: Any = False, dtype: torch.dtype | None = None) -> Value:
    x = _cast(as_number(x), dtype)
    finite(x)
    return reduced(x, _dims(x, dim), _kept(keepdim), "sum", x.kind, fresh)


@implements("mean")
def _mean(fresh: Fresh, x: Value, dim: Any = None, keepdim: Any = False, dtype: torch.dtype | None = None) -> Value:
    count = math.prod(x.shape[d] for d in _dims(x, dim))
    return divide(_sum(fresh, x, dim, keepdim, dtype), constant(count))


@implements("dot", "vdot", "inner")
def _dot(fresh: Fresh, a: Value, b: Value) -> Value:
    if broadcast(a.shape, b.shape) != a.shape:
        raise NotExpressible(
            f"multiplies tensors of shapes {list(a.shape)} and {list(b.shape)}; expected one shape, or (a * b).sum()"
        )
    return _sum(fresh, multiply(a, b))


@implements("isin")
def _isin(fresh: Fresh, x: Value, values: Value, *_: Any, invert: Value | None = None, **__: Any) -> Value:
    if (count := math.prod(values.shape)) > MAX_UNROLLED:
        raise NotExpressible(
            f"compares with {count} elements; expected at most {MAX_UNROLLED}, or a bool tensor that `torch.isin` made "
            "for all positions outside of the function, read at one"
        )
    rank = len(values.shape)
    wide = Value(x.kind, x.shape + (1,) * rank, lambda index: x.at(index[: len(x.shape)]))
    found = reduced(equal(wide, values), tuple(range(-rank, 0)), False, "any", "bool", fresh)
    return logical_not(found) if invert is not None and invert.number else found


REDUCTIONS = (_any, _all, _sum, _mean, _dot, _isin)  # their first parameter is `fresh`
