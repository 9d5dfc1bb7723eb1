"""async-mma: issue matrix products asynchronously (wgmma), and wait for each one separately.

Later passes move ops between the issue and the wait, so that they overlap with the product.

before:  %s = dot %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @reg
         %acc_next = dot %soft.p %v over(BLOCK_KV) acc(%rescaled) : f32[BLOCK_Q, D_V] @reg
after:   %s_flight = wgmma %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @flight
         %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg
         %p_cast = pack %soft.p : T[BLOCK_Q, BLOCK_KV] @reg
         %acc_flight = wgmma %p_cast %v over(BLOCK_KV) acc(%rescaled) : f32[BLOCK_Q, D_V] @flight
         %acc_next = wgmma_wait %acc_flight keep_alive(%p_cast) : f32[BLOCK_Q, D_V] @reg

An operand in registers is cast to the tensors' element type. It is also an operand of the wait (`keep_alive`), so that
nothing takes its registers while the product reads them.

A product that is accumulated onto another product of the same block continues it in flight, and one wait is for both:

before:  %s_rope = dot %q_rope %k_rope over(D_ROPE)
         %s = dot %q %k over(D_V) acc(%s_rope)
after:   %s_rope_flight = wgmma %q_rope %k_rope over(D_ROPE)
         %s_flight = wgmma %q %k over(D_V) acc(%s_rope_flight)
         %s = wgmma_wait %s_flight

Where two CTAs share an SM, the other CTA's products run during a consumer's softmax, so the loop is not
software-pipelined. There, ops that do not need the second product, such as the sum of the weights, move before the wait
for its tile, so that their additions overlap with the exponentials:

before:  %v = consumer_wait %V_pipeline
         %acc_flight = wgmma %p_cast %v ...
         %acc_next = wgmma_wait %acc_flight keep_alive(%p_cast)
         %p_sum = reduce sum %soft.p over(BLOCK_KV)
after:   %p_sum = reduce sum %soft.p over(BLOCK_KV)
         %v = consumer_wait %V_pipeline
         %acc_flight = wgmma %p_cast %v ...
         %acc_next = wgmma_wait %acc_flight keep_alive(%p_cast)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx

from attngen.ir import Kernel, Module, Op, only, pipe, tile
from attngen.targets.hopper.configs.common import overlaps_softmax
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class AsyncMMA(Pass):
    name: ClassVar[str] = "async-mma"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        issued = (k.rewrite(lambda _, op, k=k: _issue(k, op)) for k in module.warp_specialized)  # type: ignore[misc]
        return replace(
            module, warp_specialized=tuple(k if overlaps_softmax(k) else _with_early_sums(k) for k in issued)
        )


def _issue(kernel: Kernel, op: Op) -> Iterator[Op]:
    """Replace a dot by its wgmma and, unless another dot continues it, a wgmma_wait."""
    if not isinstance(op, tile.Dot):
        yield op
        return
    a, type_of_a = _operand(kernel, op), kernel.type_of(op.a)
    if a != op.a:
        yield pipe.Pack(a, op.a, replace(type_of_a, dtype="T"))
    chain = [op]  # the products that this one continues, the earliest first, and itself
    while chain[0].acc and isinstance(before := kernel.op(chain[0].acc), tile.Dot):
        chain.insert(0, before)
    acc = _flight(chain[-2].name) if len(chain) > 1 else op.acc
    yield pipe.Wgmma(_flight(op.name), a, op.b, op.over, replace(op.type, space="flight"), acc)
    if not _is_continued(kernel, op):
        in_registers = tuple(_operand(kernel, dot) for dot in chain if kernel.type_of(dot.a).space != "sram")
        yield pipe.WgmmaWait(op.name, _flight(op.name), op.type, in_registers)


def _operand(kernel: Kernel, op: tile.Dot) -> str:
    """The first operand as the product reads it: from shared memory, or from registers in the element type."""
    type_of_a = kernel.type_of(op.a)
    return op.a if type_of_a.space == "sram" or type_of_a.dtype == "T" else f"{op.a.rpartition('.')[2]}_cast"


def _flight(name: str) -> str:
    return f"{name.removesuffix('_next')}_flight"


def _is_continued(kernel: Kernel, op: tile.Dot) -> bool:
    """True if another product is accumulated onto this one."""
    users = [kernel.op(name) for name in kernel.graph.successors(op.name)]
    return any(user.acc == op.name for user in only(users, tile.Dot))


def _with_early_sums(kernel: Kernel) -> Kernel:
    """Move ops that do not need the second product before the wait for its tile, so that the sum of the weights
    overlaps with their exponentials."""
    return replace(
        kernel, blocks=tuple(replace(block, ops=tuple(_early(kernel, block.ops))) for block in kernel.blocks)
    )


def _early(kernel: Kernel, ops: Sequence[Op]) -> Iterator[Op]:
    tiles = {op.b for op in only(ops, pipe.Wgmma) if op.acc}
    remaining = list(ops)
    while remaining:
        op = remaining.pop(0)
        if op.name in tiles:
            needing = {name for o in only(remaining, pipe.WgmmaWait) for name in nx.descendants(kernel.graph, o.name)}
            early = [o for o in only(remaining, tile.Map, tile.Reduce) if o.name not in needing]
            remaining = [o for o in remaining if o not in early]
            yield from early
        yield op
