"""What passes share: those of the forward leave the divided kernel of the backward as it is, and the other way round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attngen.backends.hopper.facts import FORWARD, FUSED
from attngen.ir.graph import Kernel, Module

Change = Callable[[Kernel], Kernel]


def with_forwards(module: Module, change: Change) -> Module:
    """The module with its divided forwards changed."""
    return _with(module, FORWARD, change)


def with_backward(module: Module, change: Change) -> Module:
    """The module with its divided backward changed, if it has one."""
    return _with(module, FUSED, change)


def _with(module: Module, portable: str, change: Change) -> Module:
    return replace(module, divided=tuple(change(kernel) if kernel.stands_for == portable else kernel for kernel in module.divided))
