"""assign-barriers: number the named barriers of a kernel.

before:  %K_free = named_barriers count(STAGES)
after:   %K_free = named_barriers count(STAGES) first(5)

A CTA has 16. Barriers of stages have the smallest numbers that are left, in the order in which they are declared.
Others, such as those of ping-pong, have the largest ones.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from attngen.ir import Expr, Kernel, gl, only
from attngen.targets.hopper.configs.sm90 import FIRST_BARRIER, NAMED_BARRIERS


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
