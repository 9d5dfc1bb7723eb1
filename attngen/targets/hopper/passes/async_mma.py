"""async-mma: products run beside what does not need them.

before:  %s = dot %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @reg
         %acc_next = dot %soft.p %v over(BLOCK_KV) acc(%rescaled) : f32[BLOCK_Q, D_V] @reg
after:   %s_flight = wgmma %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @flight
         %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg
         %p_cast = pack %soft.p : T[BLOCK_Q, BLOCK_KV] @reg
         %acc_flight = wgmma %p_cast %v over(BLOCK_KV) acc(%rescaled) : f32[BLOCK_Q, D_V] @flight
         %acc_next = wgmma_wait %acc_flight keep_alive(%p_cast) : f32[BLOCK_Q, D_V] @reg

A product that is added to another one of the same block goes on from that one in flight, and one await is for both:

before:  %s_rope = dot %q_rope %k_rope over(D_ROPE)  after:  %s_rope_flight = wgmma %q_rope %k_rope over(D_ROPE)
         %s = dot %q %k over(D_V) acc(%s_rope)               %s_flight = wgmma %q %k over(D_V) acc(%s_rope_flight)
                                                             %s = wgmma_wait %s_flight

Where programs share a multiprocessor, a consumer does not overlap its own products. What needs no second product, such
as the sum of the weights, moves before it: there additions run beside exponentials.

before:  %v = consumer_wait %V_pipeline
         %acc_flight = wgmma %p_cast %v ...
         %acc_next = wgmma_wait %acc_flight keep_alive(%p_cast)
         %p_sum = reduce sum %soft.p over(BLOCK_KV)
after:   %p_sum = reduce sum %soft.p over(BLOCK_KV)
         %v = consumer_wait %V_pipeline
         %acc_flight = wgmma %p_cast %v ...
         %acc_next = wgmma_wait %acc_flight keep_alive(%p_cast)

An operand in registers is cast to the tensors' element type. It stays an operand of the await, so that nothing takes
its registers while the product reads them; so do those of products that go on from one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Dot, Map, Op, Reduce
from attngen.ir.pipe import Pack, Wgmma, WgmmaWait
from attngen.targets.hopper.configs.common import overlaps
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class AsyncMMA(Pass):
    name: ClassVar[str] = "async-mma"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        issued = (k.rewrite(lambda _, op, k=k: _issued(k, op)) for k in module.warp_specialized)  # type: ignore[misc]
        return replace(module, warp_specialized=tuple(k if overlaps(k) else _beside(k) for k in issued))


def _issued(kernel: Kernel, op: Op) -> Iterator[Op]:
    if not isinstance(op, Dot):
        yield op
        return
    a, given = _operand(kernel, op), kernel.type_of(op.a)
    if a != op.a:
        yield Pack(a, op.a, replace(given, dtype="T"))
    together = [op]  # the products that this one goes on from, and itself
    while isinstance(before := kernel.op(together[0].acc or op.name), Dot) and before is not op:
        together.insert(0, before)
    acc = _flight(together[-2].name) if len(together) > 1 else op.acc
    yield Wgmma(_flight(op.name), a, op.b, op.over, replace(op.type, space="flight"), acc)
    if not _goes_on(kernel, op):
        held = tuple(_operand(kernel, dot) for dot in together if kernel.type_of(dot.a).space != "sram")
        yield WgmmaWait(op.name, _flight(op.name), op.type, held)


def _operand(kernel: Kernel, op: Dot) -> str:
    """The first operand of a product as it reads it: from shared memory, or from registers in the element type."""
    given = kernel.type_of(op.a)
    return op.a if given.space == "sram" or given.dtype == "T" else f"{op.a.rpartition('.')[2]}_cast"


def _flight(name: str) -> str:
    return f"{name.removesuffix('_next')}_flight"


def _goes_on(kernel: Kernel, op: Dot) -> bool:
    """Whether another product is added to this one."""
    users = [kernel.op(name) for name in kernel.graph.successors(op.name)]
    return any(isinstance(user, Dot) and user.acc == op.name for user in users)


def _beside(kernel: Kernel) -> Kernel:
    """What needs no second product, moved before that one's tile is taken: the sum of the weights runs beside their
    exponentials."""
    return replace(
        kernel, blocks=tuple(replace(block, ops=tuple(_early(kernel, block.ops))) for block in kernel.blocks)
    )


def _early(kernel: Kernel, ops: Sequence[Op]) -> Iterator[Op]:
    tiles = {op.b for op in ops if isinstance(op, Wgmma) and op.acc}
    left = list(ops)
    while left:
        op = left.pop(0)
        if op.name in tiles:
            needing = {name for o in left if isinstance(o, WgmmaWait) for name in nx.descendants(kernel.graph, o.name)}
            early = [o for o in left if isinstance(o, (Map, Reduce)) and o.name not in needing]
            left = [o for o in left if o not in early]
            yield from early
        yield op
