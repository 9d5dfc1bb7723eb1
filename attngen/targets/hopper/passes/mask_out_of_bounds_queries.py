"""mask-out-of-bounds-queries: the mask hides queries past the end, in place of an LSE that makes their weights zero.

before:  %lse2 = load %LSE2[b, h, q] check(q if partial) other(inf) : f32[BLOCK_Q] @reg
         %masked = mask %s where(q_idx >= -Nk + Nq + kv_idx) : f32[BLOCK_KV, BLOCK_Q] @reg
after:   %lse2 = load %LSE2[b, h, q] check(q if partial) : f32[BLOCK_Q] @reg
         %masked = mask %s where(q_idx < Nq and q_idx >= -Nk + Nq + kv_idx) : f32[BLOCK_KV, BLOCK_Q] @reg

Whoever copies numbers of queries to lie beside their tile leaves zeros past the end. The kernel has a mask, which hides
keys past the end. Masks are applied in partial tiles alone, of which one is at the end of the queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.expr import symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Load, Map, Mask, Op
from attngen.targets.hopper.configs.families import with_apart, with_backward
from attngen.transforms.base import Pass

INSIDE = symbol("q_idx") < symbol("Nq")


@dataclass(frozen=True)
class MaskOutOfBoundsQueries(Pass):
    name: ClassVar[str] = "mask-out-of-bounds-queries"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_apart(
            with_backward(module, _hiding), lambda kernel: _hiding(kernel) if kernel.program_axis == "kv" else kernel
        )


def _hiding(kernel: Kernel) -> Kernel:
    lse2 = next(op for op in kernel.ops() if isinstance(op, Load) and op.other == sympy.oo)
    weights = next(op for op in kernel.ops() if isinstance(op, Map) and lse2.name in op.operands())
    scores = next(ref for _, ref in weights.uses if kernel.type_of(ref).dims == weights.type.dims)
    masked = any(isinstance(op, Mask) for op in kernel.ops())

    def change(_: str, op: Op) -> Iterator[Op]:
        if op is lse2:
            yield replace(lse2, other=sympy.Integer(0))
        elif op is weights and not masked:
            yield Mask("masked", scores, INSIDE, (), weights.type)
            yield weights.with_operands({scores: "masked"})
        elif isinstance(op, Mask):
            yield replace(op, where=sympy.And(op.where, INSIDE))
        else:
            yield op

    return kernel.rewrite(change)
