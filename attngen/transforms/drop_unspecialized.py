"""drop-unspecialized: what runs divided alone goes where nothing divides it, and so does what a call would do around
it.

before:  host @backward                                  after:  host @backward
           block @entry                                            block @entry
             %In_one_pass = if then(@one_pass)                       %By_query = if then(@queries) ...
               where(... fused > 0) orelse(@apart)                   %By_key = if then(@keys) ...
           block @one_pass
             launch @delta; launch @bwd; launch @dq_end
           block @apart
             %By_query = if then(@queries) ...
             %By_key = if then(@keys) ...
         kernel @bwd ...; kernel @dq_end ...                     (gone)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.expr import symbol
from attngen.ir.graph import Module
from attngen.ir.host import Host, If, Launch
from attngen.ir.ops import Map, Op
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class DropUnspecialized(Pass):
    name: ClassVar[str] = "drop-unspecialized"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return without(
            module, {kernel.name for kernel in module.kernels if kernel.adds and not module.stand_ins(kernel.name)}
        )


def without(module: Module, gone: set[str]) -> Module:
    """The module without some kernels that add, and what a call does around them."""
    if not gone:
        return module
    hosts = tuple(_without(host, gone) for host in module.hosts)
    left = {op.kernel for host in hosts for op in host.ops() if isinstance(op, Launch)}
    kept = tuple(kernel for kernel in module.kernels if kernel.name in left)
    schedules = tuple(
        (name, rows) for name, rows in module.schedules if name in left or module.warp_specialized_named(name)
    )
    return replace(module, hosts=hosts, kernels=kept, schedules=schedules)


def _without(host: Host, gone: set[str]) -> Host:
    """The host program without the branches that launch these kernels: the other branches take their place.

    A number that says whether a call takes such a branch is 0 for all calls.
    """
    launching = {
        block.name for block in host.blocks if any(isinstance(op, Launch) and op.kernel in gone for op in block.ops)
    }
    taken = [op for op in host.ops() if isinstance(op, If) and op.then in launching]
    instead = {op.name: host.block(op.orelse).ops for op in taken}
    inside = {op.then for block in host.blocks if block.name in launching for op in block.ops if isinstance(op, If)}
    dropped = launching | inside | {op.orelse for op in taken}
    says = {
        symbol(o.name): sympy.Integer(0)
        for o in host.ops()
        if isinstance(o, Map) and any(o.name in op.symbols for op in taken)
    }
    instead |= {str(name): () for name in says}

    def known(op: Op) -> Op:
        return replace(op, expr=op.expr.xreplace(says)) if isinstance(op, Map) else op

    blocks = (
        replace(b, ops=tuple(known(o) for op in b.ops for o in instead.get(op.name, (op,))))
        for b in host.blocks
        if b.name not in dropped
    )
    return replace(host, blocks=tuple(blocks))
