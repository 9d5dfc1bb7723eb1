"""The barriers of a warp-specialized kernel's pipelines: which warp groups wait at them, and which are named barriers.

A stage that the producer fills has an mbarrier that says when it is full. The release of a stage is signalled by a
named barrier, or, in pipelines with `mbarrier_release`, by a second mbarrier that counts arrivals.
"""

from __future__ import annotations

from attngen.ir import Block, Kernel, only, pipe, tile

EXCHANGING = 2  # warp groups that exchange tiles of P through a pipeline


def ping_pong_barriers(kernel: Kernel) -> int:
    """Number of warp groups that issue their matrix products in ping-pong order: each has a named barrier."""
    found = (
        b.warp_group
        for b in kernel.warp_groups
        if b.warp_group and any(only(kernel.within(b.name), pipe.SchedulerBarrier))
    )
    return sum(warp_group.instances for warp_group in found)


def mma_warp_groups(kernel: Kernel) -> list[str]:
    """The warp groups that issue matrix products."""
    return [
        warp_group.name for warp_group in kernel.warp_groups if any(only(kernel.within(warp_group.name), pipe.Wgmma))
    ]


def zeroing_warp_groups(kernel: Kernel) -> list[str]:
    """The warp groups that zero rows past the end. The warps of each such group meet at a named barrier, because a
    product reads the rows that all of them have zeroed."""
    return [
        warp_group.name
        for warp_group in kernel.warp_groups
        if any(only(kernel.within(warp_group.name), pipe.ZeroOutOfBounds))
    ]


def instances_of(kernel: Kernel, pipeline: pipe.Pipeline) -> int:
    """Number of copies of a pipeline: one per instance of the warp group that it names, else 1."""
    return next(
        (b.warp_group.instances for b in kernel.warp_groups if b.warp_group and b.name == pipeline.per_instance), 1
    )


def stored_pipelines(kernel: Kernel) -> dict[str, bool]:
    """The pipelines that warp groups fill from registers, except exchanges of P -> whether another warp group consumes
    the tile."""
    stores = {
        op.pipeline: warp_group.name
        for warp_group in kernel.warp_groups
        for op in only(kernel.within(warp_group.name), pipe.ProducerStore)
    }
    waits = {
        op.pipeline: warp_group.name
        for warp_group in kernel.warp_groups
        for op in only(kernel.within(warp_group.name), pipe.ConsumerWait)
    }
    exchanges = {op.name for op in only(kernel.ops(), pipe.Pipeline) if op.exchange}
    return {
        pipeline: waits.get(pipeline) != warp_group
        for pipeline, warp_group in stores.items()
        if pipeline not in exchanges
    }


def named_barriers_per_stage(kernel: Kernel, pipeline: str) -> int:
    """Number of named barriers per stage of a pipeline.

    An exchange of P has one for each of its two warp groups. A tile that instances of one warp group store and read has
    one per instance. A tile that one warp group stores and another reads has none, because mbarriers say when a stage
    is full and when it is free. Any other pipeline has one if its stages are reused and it has no `mbarrier_release`.
    """
    stored, of = stored_pipelines(kernel), kernel.op(pipeline)
    if isinstance(of, pipe.Pipeline) and of.exchange:
        return EXCHANGING
    if pipeline in stored:
        return 0 if stored[pipeline] else kernel.traits.sharing_warp_group.instances
    return int(is_reused(kernel, pipeline) and not release_arrivals(kernel, pipeline))


def release_arrivals(kernel: Kernel, name: str) -> int:
    """Number of arrivals that free a stage of a pipeline with `mbarrier_release`; 0 where a named barrier frees it."""
    pipeline = kernel.op(name)
    if not isinstance(pipeline, pipe.Pipeline) or not pipeline.mbarrier_release:
        return 0
    consumers = [
        warp_group.warp_group.instances
        for warp_group in kernel.warp_groups
        if warp_group.warp_group and consumes(kernel, warp_group, name)
    ]
    return 1 if pipeline.per_instance else sum(consumers)


def is_consumed_in_loop(kernel: Kernel, pipeline: str) -> bool:
    """True if a pipeline is consumed once per tile of a loop, rather than once per work tile."""
    steps = {op.step for op in only(kernel.ops(), pipe.PipelinedLoop)}
    return any(
        isinstance(op, pipe.ConsumerWait) and op.pipeline == pipeline for step in steps for op in kernel.block(step).ops
    )


def acquire_of(kernel: Kernel, add: tile.OrderedAdd) -> pipe.SemaphoreAcquire | None:
    """The semaphore acquire that precedes this accumulation, before its tile is consumed; None where the accumulation
    itself waits."""
    ops = kernel.block_of(add).ops
    return next((op for op in only(ops, pipe.SemaphoreAcquire) if op.semaphore == add.semaphore), None)


def consumes(kernel: Kernel, warp_group: Block, pipeline: str) -> bool:
    """True if a warp group consumes tiles, or the coordinates of work tiles, from a pipeline."""
    return any(
        op.pipeline == pipeline and not (isinstance(op, pipe.WorkLoop) and op.fetches)
        for op in only(kernel.within(warp_group.name), pipe.ConsumerWait, pipe.WorkLoop)
    )


def is_reused(kernel: Kernel, pipeline: str) -> bool:
    """True if the stages of a pipeline are released and filled again."""
    users = [kernel.op(name) for name in kernel.graph.successors(pipeline)]
    waited = [kernel.op(name) for op in only(users, pipe.ConsumerWait) for name in kernel.graph.successors(op.name)]
    return any(only(users, pipe.WorkLoop)) or any(only(waited, pipe.ConsumerRelease))
