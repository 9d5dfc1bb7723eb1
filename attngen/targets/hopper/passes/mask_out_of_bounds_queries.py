"""mask-out-of-bounds-queries: let the mask hide queries past the end, in place of an LSE of inf that makes their
weights zero.

When the producer copies the LSE to shared memory, it leaves zeros past the end, not inf.

before:  %lse2 = load %LSE2[b, h, q] check(q if partial) other(inf) : f32[BLOCK_Q] @reg
         %masked = mask %s where(q_idx >= -Nk + Nq + kv_idx) : f32[BLOCK_KV, BLOCK_Q] @reg
after:   %lse2 = load %LSE2[b, h, q] check(q if partial) : f32[BLOCK_Q] @reg
         %masked = mask %s where(q_idx < Nq and q_idx >= -Nk + Nq + kv_idx) : f32[BLOCK_KV, BLOCK_Q] @reg

For the fused backward and the separate kernels of dK and dV. A kernel without a mask gets one. Masks apply only in
partial tiles, and the tile at the end of the queries is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir import Kernel, Module, Op, only, symbol, tile
from attngen.targets.hopper.configs.families import with_fused_backward, with_separate_backward
from attngen.transforms.base import Pass

INSIDE = symbol("q_idx") < symbol("Nq")


@dataclass(frozen=True)
class MaskOutOfBoundsQueries(Pass):
    name: ClassVar[str] = "mask-out-of-bounds-queries"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_separate_backward(
            with_fused_backward(module, _with_query_mask),
            lambda kernel: _with_query_mask(kernel) if kernel.program_axis == "kv" else kernel,
        )


def _with_query_mask(kernel: Kernel) -> Kernel:
    lse2 = next(op for op in only(kernel.ops(), tile.Load) if op.other == sympy.oo)
    weights = next(op for op in only(kernel.ops(), tile.Map) if lse2.name in op.operands())
    scores = next(ref for _, ref in weights.uses if kernel.type_of(ref).dims == weights.type.dims)
    masked = any(only(kernel.ops(), tile.Mask))

    def change(_: str, op: Op) -> Iterator[Op]:
        if op is lse2:
            yield replace(lse2, other=sympy.Integer(0))
        elif op is weights and not masked:
            yield tile.Mask("masked", scores, INSIDE, (), weights.type)
            yield weights.with_operands({scores: "masked"})
        elif isinstance(op, tile.Mask):
            yield replace(op, where=sympy.And(op.where, INSIDE))
        else:
            yield op

    return kernel.rewrite(change)
