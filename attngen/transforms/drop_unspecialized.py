"""drop-unspecialized: remove kernels that only run warp-specialized where no target specializes them.

The host programs lose the branches that launch such kernels: the alternative branch takes their place.

before:  host @backward
           block @entry
             %Use_fused = if then(@fused) where(... fused > 0) orelse(@separate)
           block @fused
             launch @delta; launch @bwd; launch @dq_end
           block @separate
             %By_query = if then(@queries) ...
             %By_key = if then(@keys) ...
         kernel @bwd ...; kernel @dq_end ...
after:   host @backward
           block @entry
             %By_query = if then(@queries) ...
             %By_key = if then(@keys) ...
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir import Host, Module, Op, launch, only, symbol, tile
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class DropUnspecialized(Pass):
    name: ClassVar[str] = "drop-unspecialized"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return without(
            module,
            {
                kernel.name
                for kernel in module.kernels
                if kernel.traits.adds_in_order and not module.stand_ins(kernel.name)
            },
        )


def without(module: Module, gone: set[str]) -> Module:
    """Return the module without these kernels, which accumulate in order, and without the host ops around them."""
    if not gone:
        return module
    hosts = tuple(_without(host, gone) for host in module.hosts)
    left = {op.kernel for host in hosts for op in only(host.ops(), launch.Launch)}
    kept = tuple(kernel for kernel in module.kernels if kernel.name in left)
    schedules = tuple(
        (name, configs) for name, configs in module.schedules if name in left or module.warp_specialized_named(name)
    )
    return replace(module, hosts=hosts, kernels=kept, schedules=schedules)


def _without(host: Host, gone: set[str]) -> Host:
    """Return the host program without the branches that launch these kernels: the other branches take their place.

    A number that decides whether a call takes such a branch becomes 0.
    """
    launching = {block.name for block in host.blocks if any(op.kernel in gone for op in only(block.ops, launch.Launch))}
    taken = [op for op in only(host.ops(), launch.If) if op.then in launching]
    instead = {op.name: host.block(op.orelse).ops for op in taken}
    inside = {op.then for block in host.blocks if block.name in launching for op in only(block.ops, launch.If)}
    dropped = launching | inside | {op.orelse for op in taken}
    decides = {
        symbol(o.name): sympy.Integer(0)
        for o in only(host.ops(), tile.Map)
        if any(o.name in op.symbols for op in taken)
    }
    instead |= {str(name): () for name in decides}

    def known(op: Op) -> Op:
        return replace(op, expr=op.expr.xreplace(decides)) if isinstance(op, tile.Map) else op

    blocks = (
        replace(b, ops=tuple(known(o) for op in b.ops for o in instead.get(op.name, (op,))))
        for b in host.blocks
        if b.name not in dropped
    )
    return replace(host, blocks=tuple(blocks))
