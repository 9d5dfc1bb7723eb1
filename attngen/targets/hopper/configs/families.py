"""Apply a change to the kernels of one family, and leave the others as they are.

A pass that serves the forward does not touch the warp-specialized kernels of the backward, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attngen.ir import Kernel, Module
from attngen.targets.hopper.configs.sm90 import DECODE, FORWARD, FUSED, JVP, SEPARATE_BACKWARD

Change = Callable[[Kernel], Kernel]


def with_forward(module: Module, change: Change) -> Module:
    """Change the warp-specialized forward kernels."""
    return _with(module, (FORWARD,), change)


def with_fused_backward(module: Module, change: Change) -> Module:
    """Change the warp-specialized fused backward, if the module has one."""
    return _with(module, (FUSED,), change)


def with_separate_backward(module: Module, change: Change) -> Module:
    """Change the warp-specialized kernels of dQ, dK and dV, if the module has any."""
    return _with(module, SEPARATE_BACKWARD, change)


def with_mla_decode(module: Module, change: Change) -> Module:
    """Change the warp-specialized kernel of MLA decode, if the module has one."""
    return _with(module, (DECODE,), change)


def with_jvp(module: Module, change: Change) -> Module:
    """Change the warp-specialized kernel of forward mode, if the module has one."""
    return _with(module, (JVP,), change)


def with_chunks(module: Module, change: Change) -> Module:
    """Change the warp-specialized kernels that look up where chunks of a sequence lie."""
    return replace(module, warp_specialized=tuple(change(k) if k.traits.places else k for k in module.warp_specialized))


def _with(module: Module, portable: tuple[str, ...], change: Change) -> Module:
    return replace(
        module,
        warp_specialized=tuple(
            change(kernel) if kernel.stands_for in portable else kernel for kernel in module.warp_specialized
        ),
    )
