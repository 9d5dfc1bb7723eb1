"""assign-barriers: number the named barriers of a kernel.

before:  %K_free = named_barriers count(STAGES)
after:   %K_free = named_barriers count(STAGES) first(5)

A CTA has 16. Barriers of stages have the smallest numbers that are left, in the order in which they are declared.
Others, such as those of ping-pong, have the largest ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from attngen.ir import Expr, Kernel, Module, gl, only
from attngen.targets.hopper.configs.sm90 import FIRST_BARRIER, NAMED_BARRIERS
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class AssignBarriers(Pass):
    """Number the named barriers of all warp-specialized kernels of Hopper."""

    name = "assign-barriers"
    phase = "target"

    def run(self, module: Module) -> Module:
        return replace(module, warp_specialized=tuple(map(assign_barriers, module.warp_specialized)))


def assign_barriers(kernel: Kernel) -> Kernel:
    """The kernel with numbered barriers."""
    first: Expr = sympy.Integer(FIRST_BARRIER)
    end = sympy.Integer(NAMED_BARRIERS)
    numbers: dict[str, Expr] = {}
    for op in only(kernel.block("entry").ops, gl.NamedBarriers):
        if op.at_end:
            end = numbers[op.name] = end - op.count
        else:
            numbers[op.name], first = first, first + op.count

    return kernel.rewrite(
        lambda _, op: [replace(op, first=numbers[op.name]) if isinstance(op, gl.NamedBarriers) else op]
    )
