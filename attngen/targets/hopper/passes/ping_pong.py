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

A consumer holds the order from the first product that a body issues to the last. @first and @step hold it once per
tile, and @skip passes it on without products, so all consumers hold it equally often. @last does not: after it no
softmax runs that another consumer's products could cover. Which forwards are ordered: three consumers of narrow heads,
whose softmax takes as long as the products, and two of some wider heads (`forward_schedule.ping_pong_consumers`).

Consumers of the backward hold the order twice per tile, so that one computes weights and dS while products of the other
run:

         wait for Q; scheduler_barrier sync; issue S; wait for dO; issue dP; scheduler_barrier arrive
         wait for S; weights; wait for dP; dS
         scheduler_barrier sync; issue dV; issue dK; issue dQ; scheduler_barrier arrive

A dP that is issued later than S is outside the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import ClassVar

from attngen.ir.core import Block, Op
from attngen.ir.kernel import Kernel
from attngen.ir.module import Module
from attngen.ir.pipe import Wgmma, WgmmaWait
from attngen.ir.pipe_control import PipelinedLoop, SchedulerBarrier
from attngen.targets.hopper.configs.families import with_forward, with_fused_backward, with_separate_backward
from attngen.targets.hopper.configs.forward_schedule import ping_pong_consumers
from attngen.targets.hopper.configs.sm90 import FORWARD
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class PingPong(Pass):
    name: ClassVar[str] = "ping-pong"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        def is_faster(kernel: Kernel) -> bool:
            return all(ping_pong_consumers(module, config) for config in module.configs(kernel.name, kernel.backend))

        module = with_forward(module, lambda kernel: _in_order(kernel) if is_faster(kernel) else kernel)
        return with_separate_backward(with_fused_backward(module, _in_order), _in_order)


def _in_order(kernel: Kernel) -> Kernel:
    loop = next(op for op in kernel.ops() if isinstance(op, PipelinedLoop) and op.carry)  # that of the consumers
    # In other kernels, the product of the accumulator is issued together with the scores of the next tile.
    twice = kernel.stands_for != FORWARD and not loop.first
    blocks = []
    for block in kernel.blocks:
        ops = block.ops
        if block.name in (loop.first, loop.step):
            ops = tuple(_with_barriers(block, twice))
        elif block.name == loop.skip:
            ops = (SchedulerBarrier("turn_take_skip", "sync"), SchedulerBarrier("turn_pass_skip", "arrive"), *ops)
        elif block.name == "consumer":
            ops = (SchedulerBarrier("turn_start", "init"), *ops, SchedulerBarrier("turn_end", "tail"))
        blocks.append(replace(block, ops=ops))
    return replace(kernel, blocks=tuple(blocks))


def _with_barriers(block: Block, twice: bool) -> Iterator[Op]:
    """Enclose the products that a body issues in `sync` and `arrive`.

    twice: enclose separately the products that are issued before the first wait, and those from the first on that adds
    to an accumulator.
    """
    products = [op for op in block.ops if isinstance(op, Wgmma)]
    sums = next(i for i, op in enumerate(products) if op.acc) if twice else 0
    before_wait = takewhile(lambda op: not isinstance(op, WgmmaWait), block.ops)
    groups = [group for group in ([op for op in before_wait if op in products[:sums]], products[sums:]) if group]
    for op in block.ops:
        yield from (
            SchedulerBarrier(f"turn_take_{n}_{block.name}", "sync") for n, group in enumerate(groups) if op is group[0]
        )
        yield op
        yield from (
            SchedulerBarrier(f"turn_pass_{n}_{block.name}", "arrive")
            for n, group in enumerate(groups)
            if op is group[-1]
        )
