"""Evaluates mask and score expressions in eager PyTorch: an oracle that evaluates Python's tree, independent of sympy.

Integers are int64 and reals are `dtype`; numbers in the expression stay Python's until they meet a tensor. In a read, a
negative index counts from the end of its dimension; a read that is still outside gives 0 (false).
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from attngen.lang.expression import Expression
    from attngen.lang.params import Param

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: lambda a, b: _of_32_bits(operator.lshift, a, b),
    ast.RShift: lambda a, b: _of_32_bits(operator.rshift, a, b),
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_SMOOTH: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], float]]] = {
    "exp": (torch.exp, math.exp),
    "log": (torch.log, math.log),
    "tanh": (torch.tanh, math.tanh),
    "sqrt": (torch.sqrt, math.sqrt),
    "sigmoid": (torch.sigmoid, lambda x: 0.5 + 0.5 * math.tanh(0.5 * x)),
    "erf": (torch.erf, math.erf),
    "sin": (torch.sin, math.sin),
    "cos": (torch.cos, math.cos),
    "gelu": (torch.nn.functional.gelu, lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2))),
}


def evaluate(
    expression: Expression,
    *,
    batch: int,
    q_heads: int,
    kv_heads: int,
    n_q: int,
    n_kv: int,
    s: torch.Tensor | None = None,
    values: Mapping[str, torch.Tensor | int | float],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The value at every (b, h, q, kv): a tensor that broadcasts to [batch, q_heads, n_q, n_kv].

    A mask gives bool, a score `dtype`. The result is differentiable in s and in the tensors. Raises KeyError if
    `values` lacks a parameter.

    s: [batch, q_heads, n_q, n_kv], the scores before the modifier.
    values: the tensors and scalars of the call by name.
    """
    axes = {"b": (batch, (-1, 1, 1, 1)), "h": (q_heads, (-1, 1, 1)), "q_idx": (n_q, (-1, 1)), "kv_idx": (n_kv, (-1,))}
    names: dict[str, Any] = {name: torch.arange(n, device=device).view(shape) for name, (n, shape) in axes.items()}
    names["hkv"] = names["h"] // max(1, q_heads // max(1, kv_heads))
    names["q_len"], names["kv_len"] = (torch.tensor(n, device=device) for n in (n_q, n_kv))
    names["q_pos"] = names["q_idx"] + (n_kv - n_q)
    names["true"], names["false"] = True, False
    if s is not None:
        names["s"] = s.to(device, dtype)
    for name, param in expression.params:
        names[name] = param.value if param.value is not None else _given(param, values[name], device, dtype)
    evaluator = _Evaluator(names, device, dtype)
    for name, tree in expression.let.items():
        names[name] = evaluator.value(tree.body)
    value = evaluator.value(expression.tree.body)
    is_condition = isinstance(value, bool) or isinstance(value, torch.Tensor) and value.dtype == torch.bool
    return _tensor(value, device, torch.bool if is_condition else dtype)


def value_of(tree: ast.expr, names: Mapping[str, torch.Tensor]) -> torch.Tensor | bool | int | float:
    """The value of a tree over named integer tensors, which broadcast. Raises KeyError for any other name."""
    found: torch.Tensor | bool | int | float = _Evaluator(dict(names), "cpu", torch.float64).value(tree)
    return found


def _given(
    param: Param, value: torch.Tensor | int | float, device: torch.device | str, dtype: torch.dtype
) -> torch.Tensor:
    """An argument of the call as a tensor of the evaluator's types."""
    element = param.scalar or param.dtype
    kind = {"int": torch.int64, "int32": torch.int64, "bool": torch.bool}.get(element, dtype)
    return _tensor(value, device, kind)


def _tensor(value: Any, device: torch.device | str, kind: torch.dtype) -> torch.Tensor:
    return value.to(device, kind) if isinstance(value, torch.Tensor) else torch.tensor(value, device=device, dtype=kind)


def _of_32_bits(shift: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    return shift(a.int(), b.int()).to(a.dtype) if isinstance(a, torch.Tensor) else shift(a, b)


def _is_real(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)


class _Evaluator:
    """Values of trees: Python's bool, int and float for constants, else tensors."""

    def __init__(self, names: dict[str, Any], device: torch.device | str, dtype: torch.dtype) -> None:
        self.names, self.device, self.dtype = names, device, dtype

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.names[node.id]
            case ast.BinOp():
                return self.binary(node.op, self.value(node.left), self.value(node.right))
            case ast.UnaryOp():
                value = self.value(node.operand)
                if isinstance(node.op, ast.Not):
                    return ~value if isinstance(value, torch.Tensor) else not value
                return -value if isinstance(node.op, ast.USub) else value
            case ast.BoolOp():
                combine = operator.and_ if isinstance(node.op, ast.And) else operator.or_
                return reduce(combine, (self.value(v) for v in node.values))
            case ast.Compare():
                values = [self.value(v) for v in (node.left, *node.comparators)]
                pairs = zip(node.ops, values, values[1:])
                return reduce(operator.and_, (_COMPARISONS[type(op)](*self.alike(a, b)) for op, a, b in pairs))
            case ast.Call(func=ast.Name(id="any" | "all" | "sum" as name), args=[ast.Name(id=index), count, each]):
                return self.over(name, index, int(self.value(count)), each)
            case ast.Call(func=ast.Name(id=name)):
                return self.call(name, [self.value(a) for a in node.args])
            case ast.Subscript(value=ast.Name(id=name)):
                indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                return self.read(self.names[name], [self.value(i) for i in indices])
        raise TypeError(f"{type(node).__name__} is not in the language")

    def over(self, name: str, index: str, count: int, each: ast.expr) -> Any:
        """`any`, `all` or `sum` of a condition or a number, for index values 0, 1, ..."""
        combine = {"any": operator.or_, "all": operator.and_, "sum": operator.add}[name]
        values = []
        for self.names[index] in range(count):  # read by `value`
            values.append(self.value(each))
        del self.names[index]
        return reduce(lambda a, b: combine(*self.alike(a, b)), values)

    def alike(self, *values: Any) -> list[Any]:
        """The values as tensors of one type, or as they are if all are constants."""
        if not any(isinstance(v, torch.Tensor) for v in values):
            return list(values)
        bools = all(isinstance(v, bool) or isinstance(v, torch.Tensor) and v.dtype == torch.bool for v in values)
        kind = torch.bool if bools else self.dtype if any(_is_real(v) for v in values) else torch.int64
        return [_tensor(v, self.device, kind) for v in values]

    def real(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, torch.Tensor) else float(value)

    def binary(self, op: ast.operator, a: Any, b: Any) -> Any:
        if isinstance(op, ast.Pow):
            return self.power(a, b)
        if isinstance(op, ast.Div):
            a, b = self.real(a), self.real(b)
        a, b = self.alike(a, b)
        if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](a, b)
        if isinstance(op, ast.Div):
            return a / b
        if isinstance(op, ast.FloorDiv):
            return torch.div(a, b, rounding_mode="floor") if isinstance(a, torch.Tensor) else a // b
        return torch.remainder(a, b) if isinstance(a, torch.Tensor) else a % b

    def power(self, a: Any, b: Any) -> Any:
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            return a**b
        if isinstance(b, torch.Tensor):  # the base is a positive constant
            return torch.pow(float(a), self.real(b))
        if b == 0.5:
            return torch.sqrt(self.real(a))
        whole = isinstance(b, int) and b >= 0
        return a**b if whole else self.real(a) ** b

    def call(self, name: str, args: list[Any]) -> Any:
        if name in _SMOOTH:
            of_tensor, of_number = _SMOOTH[name]
            return of_tensor(self.real(args[0])) if isinstance(args[0], torch.Tensor) else of_number(float(args[0]))
        if name == "abs":
            return abs(args[0])
        if name == "relu":
            return torch.relu(args[0]) if isinstance(args[0], torch.Tensor) else max(args[0], 0)
        if name in ("int", "float", "floor", "round"):
            return self.cast(name, args[0])
        if name == "where":
            return self.where(args[0], *self.alike(*args[1:]))
        args = self.alike(*args)
        tensors = isinstance(args[0], torch.Tensor)
        if name == "clamp":
            x, least, most = args
            return torch.clamp(x, least, most) if tensors else min(max(x, least), most)
        if name == "min":
            return reduce(torch.minimum, args) if tensors else min(args)
        if name == "max":
            return reduce(torch.maximum, args) if tensors else max(args)
        raise TypeError(f"`{name}` is not in the language")

    def cast(self, name: str, x: Any) -> Any:
        """A number or a condition as an integer, within 2**30 of zero, or as a real."""
        if name == "float":
            return self.real(x)
        if not isinstance(x, torch.Tensor):
            return math.floor(x) if name == "floor" else round(x) if name == "round" else int(x)
        if not x.is_floating_point():
            return x.to(torch.int64)
        whole = {"floor": torch.floor, "round": torch.round, "int": torch.trunc}[name](x)
        return whole.double().nan_to_num(-(2.0**30)).clamp(-(2.0**30), 2.0**30 - 64).to(torch.int64)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        if not isinstance(condition, torch.Tensor):
            return self.select(a, b, condition)
        if not isinstance(a, torch.Tensor):
            kind = torch.bool if isinstance(a, bool) else self.dtype if _is_real(a) or _is_real(b) else torch.int64
            a, b = (_tensor(v, self.device, kind) for v in (a, b))
        return torch.where(condition, a, b)

    def select(self, a: Any, b: Any, first: bool) -> Any:
        """One of the two, in their common type."""
        chosen = a if first else b
        return float(chosen) if not isinstance(chosen, torch.Tensor) and (_is_real(a) or _is_real(b)) else chosen

    def read(self, tensor: torch.Tensor, indices: list[Any]) -> torch.Tensor:
        """The elements at the indices, which broadcast; 0 where one is outside."""
        at = [_tensor(i, self.device, torch.int64) for i in indices]
        wrapped = [torch.where(i < 0, i + n, i) for i, n in zip(at, tensor.shape)]
        inside = reduce(operator.and_, ((i >= 0) & (i < n) for i, n in zip(wrapped, tensor.shape)))
        if not tensor.numel():
            return torch.zeros(inside.shape, dtype=tensor.dtype, device=self.device)
        elements = tensor[tuple(i.clamp(0, n - 1) for i, n in zip(wrapped, tensor.shape))]
        return torch.where(inside, elements, torch.zeros((), dtype=tensor.dtype, device=self.device))
