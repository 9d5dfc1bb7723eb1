"""What the passes of the forward share: they leave the divided kernels of the backward as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attngen.backends.hopper.facts import FORWARD
from attngen.ir.graph import Kernel, Module


def with_forwards(module: Module, change: Callable[[Kernel], Kernel]) -> Module:
    """The module with its divided forwards changed."""
    return replace(module, divided=tuple(change(kernel) if kernel.stands_for == FORWARD else kernel for kernel in module.divided))
