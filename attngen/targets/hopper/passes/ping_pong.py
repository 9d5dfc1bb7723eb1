"""ping-pong: make the consumers issue their matrix products one after another, so that the softmax of one overlaps with
the products of another (FlashAttention-3's warpgroup scheduling barrier).

before:  warp_group @consumer instances(3) ...   after:  warp_group @consumer instances(3) ...
                                                           scheduler_barrier init
           %work = work_loop %Work_pipeline ...            %work = work_loop %Work_pipeline ...
                                                           scheduler_barrier tail
         block @step                                     block @step
           %k = consumer_wait %K_pipeline                  %k = consumer_wait %K_pipeline
                                                           scheduler_barrier sync
           %s_flight = wgmma %q %k ...                     %s_flight = wgmma %q %k ...
           %v = consumer_wait %V_pipeline                  %v = consumer_wait %V_pipeline
           %acc_flight = wgmma %weights %v ...             %acc_flight = wgmma %weights %v ...
                                                           scheduler_barrier arrive
           %s = wgmma_wait %s_flight                       %s = wgmma_wait %s_flight

A consumer syncs with its scheduler barrier before the first product that a body issues, and arrives at the barrier of
the next consumer after the last one. @first and @step do so once per tile. @skip does so without products, so that all
consumers pass the barriers equally often. @last has no barriers: no softmax runs after it that another consumer's
products could cover. The pass changes forwards with three consumers of narrow heads, whose softmax takes as long as the
products, and with two of some wider heads: see `forward_schedule.ping_pong_consumers`, which decides by measurements.

Consumers of the backward sync and arrive twice per tile, so that one computes weights and dS while products of the
other run:

         wait for Q; scheduler_barrier sync; issue S; wait for dO; issue dP; scheduler_barrier arrive
         wait for S; weights; wait for dP; dS
         scheduler_barrier sync; issue dV; issue dK; issue dQ; scheduler_barrier arrive

If dP is issued after the wait for S (see software-pipeline-gradients), it is issued without a barrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import ClassVar

from attngen.ir import Block, Kernel, Module, Op, only, pipe
from attngen.targets.hopper.configs.families import with_forward, with_fused_backward, with_separate_backward
from attngen.targets.hopper.configs.forward_schedule import ping_pong_consumers
from attngen.targets.hopper.configs.sm90 import FORWARD
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class PingPong(Pass):
    name: ClassVar[str] = "ping-pong"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        def alternates(kernel: Kernel) -> bool:
            return all(ping_pong_consumers(module, config) for config in module.configs(kernel.name, kernel.backend))

        module = with_forward(module, lambda kernel: _with_scheduler_barriers(kernel) if alternates(kernel) else kernel)
        return with_separate_backward(with_fused_backward(module, _with_scheduler_barriers), _with_scheduler_barriers)


def _with_scheduler_barriers(kernel: Kernel) -> Kernel:
    loop = next(op for op in only(kernel.ops(), pipe.PipelinedLoop) if op.carry)  # the consumers' loop
    # Twice per tile in the backward: for products of scores, and for those that accumulate. Once in the forward and in
    # the kernel of dV, which is pipelined as the forward is: they issue both kinds of products together.
    twice = kernel.stands_for != FORWARD and not loop.first
    blocks = []
    for block in kernel.blocks:
        ops = block.ops
        if block.name in (loop.first, loop.step):
            ops = tuple(_with_barriers(block, twice))
        elif block.name == loop.skip:
            ops = (pipe.SchedulerBarrier("_sync_skip", "sync"), pipe.SchedulerBarrier("_arrive_skip", "arrive"), *ops)
        elif block.name == "consumer":
            ops = (
                pipe.SchedulerBarrier("_init_scheduler", "init"),
                *ops,
                pipe.SchedulerBarrier("_tail_scheduler", "tail"),
            )
        blocks.append(replace(block, ops=ops))
    return replace(kernel, blocks=tuple(blocks))


def _with_barriers(block: Block, twice: bool) -> Iterator[Op]:
    """Enclose the products that a body issues in `sync` and `arrive`.

    twice: enclose separately the products of scores that are issued before the first wait, and all products from the
    first one that accumulates.
    """
    products = list(only(block.ops, pipe.Wgmma))
    accumulating = next(i for i, op in enumerate(products) if op.acc) if twice else 0
    of_scores, others = products[:accumulating], products[accumulating:]
    before_wait = takewhile(lambda op: not isinstance(op, pipe.WgmmaWait), block.ops)
    groups = [group for group in ([op for op in before_wait if op in of_scores], others) if group]
    for op in block.ops:
        yield from (
            pipe.SchedulerBarrier(f"_sync_{n}_{block.name}", "sync") for n, group in enumerate(groups) if op is group[0]
        )
        yield op
        yield from (
            pipe.SchedulerBarrier(f"_arrive_{n}_{block.name}", "arrive")
            for n, group in enumerate(groups)
            if op is group[-1]
        )
