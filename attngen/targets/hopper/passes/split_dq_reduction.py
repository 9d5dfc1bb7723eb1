"""split-dq-reduction: two copies of the writer take tiles of sums in turn, so that one waits while the other adds.

before:  warp_group @writer instances(1) ...
           %write_total = pipelined_loop q ... step(@write)
         block @write
           %dq_tile = consumer_wait %dQ_pipeline
           ordered_add %DQ_ACC[b, h, q, d_qk] %dq_tile ...
           consumer_release %dq_tile
           semaphore_release %DQ_SEMAPHORE[b, h, q_start]
after:   warp_group @writer instances(2) ...
           %write_total = pipelined_loop q ... step(@write) round_robin(%dQ_pipeline)
         block @write
           semaphore_acquire %DQ_SEMAPHORE[b, h, q_start] order(...)
           %dq_tile = consumer_wait %dQ_pipeline
           ordered_add %DQ_ACC[b, h, q, d_qk] %dq_tile ...
           consumer_release %dq_tile
           semaphore_release %DQ_SEMAPHORE[b, h, q_start]

What a writer does for a tile takes about as long as consumers take to compute one: it reads whose turn it is, has the
copy engine add, and waits until that has been added. One that falls behind stays so, and with it all programs whose
turns come later. With two copies, each has the time of two tiles. So a copy can ask for its turn before the tile is
there, and no turn has to be read ahead.

Each copy needs a slot of its own. Where there is room for one slot, one writer is left; so it is where tiles have more
than 64 queries and no blocks are listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Block, Op, OrderedAdd
from attngen.ir.pipe import ConsumerWait, Pipeline, PipelinedLoop, SemaphoreAcquire
from attngen.targets.hopper.configs.common import takes_from
from attngen.targets.hopper.configs.families import with_backward
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.transforms.base import Pass

WRITERS = 2


@dataclass(frozen=True)
class SplitDQReduction(Pass):
    name: ClassVar[str] = "split-dq-reduction"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_backward(module, lambda kernel: _round_robin(kernel) if _pays(module, kernel) else kernel)


def _pays(module: Module, kernel: Kernel) -> bool:
    """Whether there is a slot for each copy, and a writer has hardly the time for a tile: of few queries, or whose turn
    is read from lists.

    Measured: docs/perf-log.md, section 31.
    """
    few = all(row.block_q == ROWS for row in module.configs(kernel.name, kernel.backend))
    return _sums(kernel, _add(kernel)).stages == WRITERS and (few or module.blocks is not None)


def _add(kernel: Kernel) -> OrderedAdd:
    return next(op for op in kernel.ops() if isinstance(op, OrderedAdd))


def _sums(kernel: Kernel, add: OrderedAdd) -> Pipeline:
    """The ring of what the writer adds."""
    take = kernel.take_of(add.value)
    assert take is not None
    pipeline = kernel.op(take.pipeline)
    assert isinstance(pipeline, Pipeline)
    return pipeline


def _round_robin(kernel: Kernel) -> Kernel:
    add = _add(kernel)
    pipeline = _sums(kernel, add)
    assert add.semaphore is not None and add.order is not None
    body, follow = kernel.block_of(add).name, SemaphoreAcquire("follow_dq", add.semaphore, add.order)

    def change(_: str, op: Op) -> Iterator[Op]:
        if isinstance(op, PipelinedLoop) and op.step == body:
            yield replace(op, round_robin=pipeline.name)
        elif isinstance(op, ConsumerWait) and op.name == add.value:
            yield from (follow, op)
        else:
            yield op

    changed = kernel.rewrite(change)

    def copied(block: Block) -> Block:
        writes = block.warp_group is not None and takes_from(kernel, block, pipeline.name)
        return (
            replace(block, warp_group=replace(block.warp_group, instances=WRITERS))
            if writes and block.warp_group
            else block
        )

    return replace(changed, blocks=tuple(map(copied, changed.blocks)))
