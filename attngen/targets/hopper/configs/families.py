"""What passes share: those of the forward leave the divided kernels of the backward as they are, and the other way
round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attngen.ir.graph import Kernel, Module
from attngen.targets.hopper.configs.sm90 import APART, DECODE, FORWARD, FUSED, TANGENTS

Change = Callable[[Kernel], Kernel]


def with_forwards(module: Module, change: Change) -> Module:
    """The module with its divided forwards changed."""
    return _with(module, (FORWARD,), change)


def with_backward(module: Module, change: Change) -> Module:
    """The module with its divided backward in one pass changed, if it has one."""
    return _with(module, (FUSED,), change)


def with_latents(module: Module, change: Change) -> Module:
    """The module with its divided decoding of latents changed, if it has one."""
    return _with(module, (DECODE,), change)


def with_apart(module: Module, change: Change) -> Module:
    """The module with its divided kernels of dQ, dK and dV changed, if it has some."""
    return _with(module, APART, change)


def with_tangents(module: Module, change: Change) -> Module:
    """The module with its divided kernel of forward mode changed, if it has one."""
    return _with(module, (TANGENTS,), change)


def _with(module: Module, portable: tuple[str, ...], change: Change) -> Module:
    return replace(
        module,
        warp_specialized=tuple(
            change(kernel) if kernel.stands_for in portable else kernel for kernel in module.warp_specialized
        ),
    )
