"""deal-sums: two copies of the writer take tiles of sums in turn, so that one waits while the other adds.

before:  role @writer copies(1) ...                  after:  role @writer copies(2) ...
           %write_total = pipeline q ...                       %write_total = pipeline q ... dealt(%dQ_ring)
             step(@write)                                        step(@write)
         block @write                                        block @write
           %dq_tile = take %dQ_ring                            follow %DQ_TURNS[b, h, q_start] turn(...)
           add %DQ_ACC[b, h, q, d_qk] %dq_tile ...             %dq_tile = take %dQ_ring
           give %dq_tile                                       add %DQ_ACC[b, h, q, d_qk] %dq_tile ...
           raise %DQ_TURNS[b, h, q_start]                      give %dq_tile
                                                               raise %DQ_TURNS[b, h, q_start]

What a writer does for a tile takes about as long as consumers take to compute one: it reads whose turn it is, has the copy engine add, and
waits until that has been added. One that falls behind stays so, and with it all programs whose turns come later. With two copies, each has
the time of two tiles. So a copy can ask for its turn before the tile is there, and no turn has to be read ahead.

Each copy needs a slot of its own. Where there is room for one slot, one writer is left; so it is where tiles have more than 64 queries and
no blocks are listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Add, Block, Op
from attngen.ir.pipe import Follow, Pipeline, Ring, Take
from attngen.targets.hopper.configs.common import takes_from
from attngen.targets.hopper.configs.families import with_backward
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.transforms.base import Pass

WRITERS = 2


@dataclass(frozen=True)
class DealSums(Pass):
    name: ClassVar[str] = "deal-sums"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_backward(module, lambda kernel: _dealt(kernel) if _pays(module, kernel) else kernel)


def _pays(module: Module, kernel: Kernel) -> bool:
    """Whether there is a slot for each copy, and a writer has hardly the time for a tile: of few queries, or whose turn is read from lists.

    Measured: docs/perf-log.md, section 31.
    """
    few = all(row.block_q == ROWS for row in module.rows(kernel.name, kernel.backend))
    return _sums(kernel, _add(kernel)).slots == WRITERS and (few or module.blocks is not None)


def _add(kernel: Kernel) -> Add:
    return next(op for op in kernel.ops() if isinstance(op, Add))


def _sums(kernel: Kernel, add: Add) -> Ring:
    """The ring of what the writer adds."""
    take = kernel.take_of(add.value)
    assert take is not None
    ring = kernel.op(take.ring)
    assert isinstance(ring, Ring)
    return ring


def _dealt(kernel: Kernel) -> Kernel:
    add = _add(kernel)
    ring = _sums(kernel, add)
    assert add.turns is not None and add.turn is not None
    body, follow = kernel.block_of(add).name, Follow("follow_dq", add.turns, add.turn)

    def change(_: str, op: Op) -> Iterator[Op]:
        if isinstance(op, Pipeline) and op.step == body:
            yield replace(op, dealt=ring.name)
        elif isinstance(op, Take) and op.name == add.value:
            yield from (follow, op)
        else:
            yield op

    changed = kernel.rewrite(change)

    def copied(block: Block) -> Block:
        writes = block.role is not None and takes_from(kernel, block, ring.name)
        return replace(block, role=replace(block.role, copies=WRITERS)) if writes and block.role else block

    return replace(changed, blocks=tuple(map(copied, changed.blocks)))
