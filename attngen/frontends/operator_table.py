"""The table of PyTorch's operators that have an expression: a function for each, by its name without the overload."""

from __future__ import annotations

from collections.abc import Callable

from attngen.frontends.tracer import Value

Operator = Callable[..., Value]
OPERATORS: dict[str, Operator] = {}
# Operators of other libraries -> PyTorch's operator with the same meaning. An in-place operator's name ends in `_`.
SAME_AS = {
    "approx::tanh": "aten::tanh",
    "attngen_mods::tanh_approx": "aten::tanh",
    "aten::__ilshift__": "aten::__lshift___",
    "aten::__irshift__": "aten::__rshift___",
}


def implements(*names: str) -> Callable[[Operator], Operator]:
    """Enter the decorated function in the table under each of these names of `aten`."""

    def enter(function: Operator) -> Operator:
        OPERATORS.update({f"aten::{name}": function for name in names})
        return function

    return enter
