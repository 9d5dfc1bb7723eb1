"""schedule-work: programs that stay, and take one tile of the grid after another.

before:  block @entry                                after:  block @entry
           (arguments, rings)                                  (arguments, rings)
           %kv_end = map expr(...)                             %Work_ring = ring slots(2) : i32[] @sram
         role @producer ...                                  role @producer ...
           fill %Q_ring %Q[b, h, q, d_qk]                      %drawn = work %Work_ring of(@tile) body(@produce) draws(yes)
           %copy_keys = loop kv ...                            drain %Q_ring; drain %K_ring; drain %V_ring; drain %Work_ring
           drain %K_ring; drain %V_ring                      role @consumer ...
         role @consumer ...                                    %work = work %Work_ring of(@tile) body(@consume)
           %q = take %Q_ring                                 block @tile
           %keys = pipeline kv ...                             %kv_end = map expr(...)
           store %O[b, h, q, d_v] ...                        block @produce
                                                               fill %Q_ring %Q[b, h, q, d_qk]
                                                               %copy_keys = loop kv ...
                                                             block @consume
                                                               %q = take %Q_ring
                                                               %keys = pipeline kv ...
                                                               give %q
                                                               recall %Work_ring
                                                               store %O[b, h, q, d_v] ...

The producer runs ahead: it fills the rings for a program's next tile while consumers end the one before, so the ring of queries gets more
slots. It is worth most where tiles are short. Where rings leave no room for that, each tile keeps a program of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.backends.hopper.choice import PLACE_SLOTS, staying
from attngen.backends.hopper.forward import with_forwards
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Block, Loop, Op, Type
from attngen.ir.roles import Drain, Give, Pipeline, Recall, Ring, Take, Work
from attngen.passes.base import Pass

PLACES = "Work_ring"


@dataclass(frozen=True)
class ScheduleWork(Pass):
    name: ClassVar[str] = "schedule-work"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        def changed(kernel: Kernel) -> Kernel:
            slots = min(staying(module, row) for row in module.rows(kernel.name, kernel.backend))
            return _staying(kernel, slots) if slots else kernel

        return with_forwards(module, changed)


def _staying(kernel: Kernel, slots: int) -> Kernel:
    blocks = {block.name: block for block in kernel.blocks}
    entry, producer, consumer = (blocks.pop(name) for name in ("entry", "producer", "consumer"))
    once = {op.ring: op.name for op in consumer.ops if isinstance(op, Take)}
    kept = [replace(op, slots=sympy.Integer(slots)) if op.name in once else op for op in entry.ops if isinstance(op, (Arg, Ring))]
    places = Ring(PLACES, Type("i32", (), "sram"), sympy.Integer(PLACE_SLOTS))
    drains = [op for op in producer.ops if isinstance(op, Drain)]
    at_end = [*(Drain(f"drain_{name}", ring) for ring, name in once.items()), *drains, Drain("drain_work", PLACES)]
    consumed: list[Op] = []
    *_, last = (op for op in consumer.ops if isinstance(op, (Loop, Pipeline)))
    for op in consumer.ops:
        consumed.append(op)
        if op is last:
            consumed += [*(Give(f"give_{name}", name) for name in once.values()), Recall("recall_work", PLACES)]
    return replace(
        kernel,
        blocks=(
            replace(entry, ops=(*kept, places)),
            replace(producer, ops=(Work("drawn", PLACES, "tile", "produce", draws=True), *at_end)),
            replace(consumer, ops=(Work("work", PLACES, "tile", "consume"),)),
            Block("tile", tuple(op for op in entry.ops if not isinstance(op, (Arg, Ring))), about="what all roles know of a tile"),
            Block("produce", tuple(op for op in producer.ops if op not in drains), about="copy what consumers of this tile take"),
            Block("consume", tuple(consumed), about="attend"),
            *blocks.values(),
        ),
    )
