"""insert-cta-barriers: insert a CTA barrier before a loop that loads tiles which the program has rewritten.

before:  %queries_full = loop q ranges(q_full_first .. q_full_end) carry() body(@step) cls(full)
after:   barrier
         %queries_full = loop q ranges(q_full_first .. q_full_end) carry() body(@step) cls(full)

In FlashAttention-1's loop order, a tile that one loop stores is loaded again by other threads of the program: in the
next loop, or in the next iteration of the loop around both. Inside one loop each iteration has a different tile, so
loads may run ahead of stores, but not across the barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngen.ir import Kernel, Module, Op, tile
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class InsertCtaBarriers(Pass):
    name: ClassVar[str] = "insert-cta-barriers"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return module.map_kernels(_place)


def _place(kernel: Kernel) -> Kernel:
    rewriting = kernel.traits.rewriting

    def change(_: str, op: Op) -> list[Op]:
        return [tile.Barrier(f"_barrier_{op.name}"), op] if isinstance(op, tile.Loop) and op.body in rewriting else [op]

    return kernel.rewrite(change) if rewriting else kernel
