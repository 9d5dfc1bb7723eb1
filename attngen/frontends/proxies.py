"""Runs a function on proxy tensors without data. Each operator call yields an expression and a proxy for it.

PyTorch's own tracers are not used because they import its compiler, which takes longer than the rest of a first call
that does not compile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attngen.frontends.tracer import NotExpressible, Value

if TYPE_CHECKING:
    from attngen.lang.params import Kind

_DTYPES: dict[Kind, torch.dtype] = {"bool": torch.bool, "int": torch.int32, "real": torch.float32}


class Proxy(torch.Tensor):
    """A tensor without data: it has a shape, a device, and an expression for its elements. Its dtype is one of its
    value's kind."""

    value: Value
    shared = False  # whether it is a view of another tensor, or another tensor is a view of it

    @staticmethod
    def __new__(cls, value: Value, device: torch.device) -> Proxy:
        made: Proxy = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=_DTYPES[value.kind], device=device)
        made.value = value
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError("a position or a score is used after the function has ended")


class Operators(TorchDispatchMode):
    """A dispatch mode in which `evaluate` computes the value of each operator from its arguments.

    Proxies among the arguments are passed as their values, other tensors unchanged. `line` is the line of the last
    operator call in the function's file, or 0 if it was called from elsewhere.
    """

    def __init__(
        self, evaluate: Callable[[Any, list[Any], dict[str, Any]], Value], device: torch.device, file: str
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.evaluate, self.device, self.file, self.line = evaluate, device, file, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because PyTorch imports its compiler for a mode that returns True."""
        return False

    def run(self, function: Callable[..., Any], inputs: list[Value]) -> Any:
        """Call the function on proxies of these values, and return its result; of a proxy, its value."""
        with _Indexing(), torch.no_grad(), self:
            return _given(function(*(Proxy(value, self.device) for value in inputs)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back  # type: ignore[assignment]
        self.line = frame.f_lineno if frame is not None else 0
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError(
                "a number is taken out of a tensor, as by `if`, `and` and `int`; expected `torch.where`, `&`, "
                "or an index that is a tensor"
            )
        value = self.evaluate(func, [*map(_given, args)], {k: _given(v) for k, v in (kwargs or {}).items()})
        if func._schema.is_mutable:  # for example `s += 1`
            changed = args[0]
            if not isinstance(changed, Proxy) or changed.shared:
                kind = "a view, or a tensor that has one" if isinstance(changed, Proxy) else "a captured tensor"
                raise NotExpressible(
                    f"`{func._schema.name}` changes {kind}, in place; expected a new one, as in `x = x + 1`"
                )
            changed.value = value
            return changed
        made = Proxy(value, self.device)
        if any(r.alias_info is not None for r in func._schema.returns) and isinstance(args[0], Proxy):
            made.shared = args[0].shared = True
        return made


class _Indexing(TorchFunctionMode):
    """Makes `table[h]` call `aten::index`, as FlexAttention does; otherwise PyTorch would read the number in `h`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            x, index = args
            parts = index if isinstance(index, tuple) else (index,)
            if all(isinstance(i, torch.Tensor) or type(i) is int for i in parts):
                return torch.ops.aten.index(x, [i if isinstance(i, torch.Tensor) else torch.tensor(i) for i in parts])
        return func(*args, **(kwargs or {}))


def _given(x: Any) -> Any:
    """Return an argument with the values of proxies in their place."""
    return [*map(_given, x)] if isinstance(x, (list, tuple)) else x.value if isinstance(x, Proxy) else x
