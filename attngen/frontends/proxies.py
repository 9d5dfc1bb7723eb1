"""Runs a function on tensors that have no data. Each operator that it calls gives an expression, and a tensor that
stands for it.

PyTorch's own tracers import its compiler, which takes longer than all else of a first call that does not compile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attngen.frontends.tracer import Untold, Value

if TYPE_CHECKING:
    from attngen.lang.params import Kind

_DTYPES: dict[Kind, torch.dtype] = {"bool": torch.bool, "int": torch.int32, "real": torch.float32}


class StandIn(torch.Tensor):
    """A tensor that has a shape, a device and an expression for its elements, and no data. Its type is one of the
    value's kind."""

    value: Value
    shared = False  # whether it is a view of another, or another is one of it

    @staticmethod
    def __new__(cls, value: Value, device: torch.device) -> StandIn:
        made: StandIn = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=_DTYPES[value.kind], device=device)
        made.value = value
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError("a position or a score is used after the function has ended")


class Operators(TorchDispatchMode):
    """While this mode is on, operators are evaluated: `evaluate` gives a value for an operator and its arguments.

    Of these, stand-ins are values, and other tensors are as they are. `line` is that of the last operator in the
    function's file, 0 for one that was called from elsewhere.
    """

    def __init__(
        self, evaluate: Callable[[Any, list[Any], dict[str, Any]], Value], device: torch.device, file: str
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.evaluate, self.device, self.file, self.line = evaluate, device, file, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: where a mode says True, PyTorch imports its compiler, to have it leave the mode alone."""
        return False

    def run(self, function: Callable[..., Any], inputs: list[Value]) -> Any:
        """What a function gives of these values; of a stand-in, its value."""
        with _Indexing(), torch.no_grad(), self:
            return _given(function(*(StandIn(value, self.device) for value in inputs)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back  # type: ignore[assignment]
        self.line = frame.f_lineno if frame is not None else 0
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError(
                "a number is taken out of a tensor, as by `if`, `and` and `int`; expected `torch.where`, `&`, or an index that is a tensor"
            )
        value = self.evaluate(func, [*map(_given, args)], {k: _given(v) for k, v in (kwargs or {}).items()})
        if func._schema.is_mutable:  # as `s += 1`
            changed = args[0]
            if not isinstance(changed, StandIn) or changed.shared:
                what = "a view, or a tensor that has one" if isinstance(changed, StandIn) else "a captured tensor"
                raise Untold(f"`{func._schema.name}` changes {what}, in place; expected a new one, as in `x = x + 1`")
            changed.value = value
            return changed
        made = StandIn(value, self.device)
        if any(r.alias_info is not None for r in func._schema.returns) and isinstance(args[0], StandIn):
            made.shared = args[0].shared = True
        return made


class _Indexing(TorchFunctionMode):
    """Has `table[h]` read an element, as FlexAttention does; else PyTorch would take the number out of `h`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            x, index = args
            parts = index if isinstance(index, tuple) else (index,)
            if all(isinstance(i, torch.Tensor) or type(i) is int for i in parts):
                return torch.ops.aten.index(x, [i if isinstance(i, torch.Tensor) else torch.tensor(i) for i in parts])
        return func(*args, **(kwargs or {}))


def _given(x: Any) -> Any:
    """An argument, with values for stand-ins."""
    return [*map(_given, x)] if isinstance(x, (list, tuple)) else x.value if isinstance(x, StandIn) else x
