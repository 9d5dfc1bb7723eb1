"""split-dq-reduction: use two dQ reduction warps, which take tiles of dQ alternately, so that one waits while the other
adds.

A dQ reduction warp takes about as long for a tile as consumers take to compute one: it waits for the semaphore, has TMA
add, and waits until the sums are in device memory (semaphore_release). A warp that falls behind stays behind, and
delays all programs that come later in the semaphore's order. With two instances, each has the time of two tiles, and
can acquire the semaphore before the tile is there. For the fused backward.

before:  warp_group @dq_reducer instances(1) ...
           %dQ_total = pipelined_loop q ... step(@write)
         block @write
           %dq_tile = consumer_wait %dQ_pipeline
           ordered_add %DQ_ACC[b, h, q, d_qk] %dq_tile ...
           consumer_release %dq_tile
           semaphore_release %dQ_SEMAPHORE[b, h, q_start]
after:   warp_group @dq_reducer instances(2) ...
           %dQ_total = pipelined_loop q ... step(@write) round_robin(%dQ_pipeline)
         block @write
           semaphore_acquire %dQ_SEMAPHORE[b, h, q_start] order(...)
           %dq_tile = consumer_wait %dQ_pipeline
           ordered_add %DQ_ACC[b, h, q, d_qk] %dq_tile ...
           consumer_release %dq_tile
           semaphore_release %dQ_SEMAPHORE[b, h, q_start]

There are two of them if the pipeline of dQ has two stages, one for each, and if a tile has 64 queries or the kernel
visits listed blocks. Otherwise there is one, which reads the semaphore of the next tile while TMA adds this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir import Block, Kernel, Module, Op, only, pipe, tile
from attngen.targets.hopper.configs.barriers import consumes
from attngen.targets.hopper.configs.families import with_fused_backward
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.transforms.base import Pass

DQ_REDUCERS = 2


@dataclass(frozen=True)
class SplitDQReduction(Pass):
    name: ClassVar[str] = "split-dq-reduction"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_fused_backward(module, lambda kernel: _round_robin(kernel) if _pays(module, kernel) else kernel)


def _pays(module: Module, kernel: Kernel) -> bool:
    """True if there is a stage for each instance, and one warp hardly has the time for a tile: tiles have few
    queries, or the semaphore order is read from lists.

    Measured: docs/perf-log.md, section 31.
    """
    few = all(config.block_q == ROWS for config in module.configs(kernel.name, kernel.backend))
    return _sums(kernel, _add(kernel)).stages == DQ_REDUCERS and (few or module.blocks is not None)


def _add(kernel: Kernel) -> tile.OrderedAdd:
    return next(only(kernel.ops(), tile.OrderedAdd))


def _sums(kernel: Kernel, add: tile.OrderedAdd) -> pipe.Pipeline:
    """The pipeline of the tiles that the dQ reduction warps add."""
    wait = kernel.traits.wait_of(add.value)
    assert wait is not None
    pipeline = kernel.op(wait.pipeline)
    assert isinstance(pipeline, pipe.Pipeline)
    return pipeline


def _round_robin(kernel: Kernel) -> Kernel:
    add = _add(kernel)
    pipeline = _sums(kernel, add)
    assert add.semaphore is not None and add.order is not None
    body, acquire = kernel.block_of(add).name, pipe.SemaphoreAcquire("_acquire_dq_semaphore", add.semaphore, add.order)

    def change(_: str, op: Op) -> Iterator[Op]:
        if isinstance(op, pipe.PipelinedLoop) and op.step == body:
            yield replace(op, round_robin=pipeline.name)
        elif isinstance(op, pipe.ConsumerWait) and op.name == add.value:
            yield from (acquire, op)
        else:
            yield op

    changed = kernel.rewrite(change)

    def with_instances(block: Block) -> Block:
        writes = block.warp_group is not None and consumes(kernel, block, pipeline.name)
        return (
            replace(block, warp_group=replace(block.warp_group, instances=DQ_REDUCERS))
            if writes and block.warp_group
            else block
        )

    return replace(changed, blocks=tuple(map(with_instances, changed.blocks)))
