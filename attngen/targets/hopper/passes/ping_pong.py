"""ping-pong: copies of the consumer issue their products in turns, so that the softmax of one runs while the products
of another do.

before:  warp_group @consumer instances(3) ...   after:  warp_group @consumer instances(3) ...
                                                   scheduler_barrier init
           %work = work_loop %Work_pipeline ...    %work = work_loop %Work_pipeline ...
                                                   scheduler_barrier tail
         block @step                             block @step
           %k = consumer_wait %K_pipeline          %k = consumer_wait %K_pipeline
                                                   scheduler_barrier sync
           %s_flight = wgmma %q %k ...             %s_flight = wgmma %q %k ...
           %v = consumer_wait %V_pipeline          %v = consumer_wait %V_pipeline
           %acc_flight = wgmma %weights %v ...     %acc_flight = wgmma %weights %v ...
                                                   scheduler_barrier arrive
           %s = wgmma_wait %s_flight               %s = wgmma_wait %s_flight

A turn is from the first product that a body issues to the last. @first and @step have one each, and @skip has one
without products, so all copies have as many turns as tiles. @last has none: after it no softmax runs that another's
products could cover. Turns are for three consumers of narrow heads, where the softmax takes as long as the products,
and for two of some wider heads: see `in_turns`.

Consumers of the backward have two turns for each tile, so that one computes weights and dS while products of the other
run:

         take Q; scheduler_barrier sync; issue S; take dO; issue dP; scheduler_barrier arrive
         await S; weights; await dP; dS
         scheduler_barrier sync; issue dV; issue dK; issue dQ; scheduler_barrier arrive

Where dP is issued later than S, it is in no turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import ClassVar

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Block, Op
from attngen.ir.pipe import PipelinedLoop, SchedulerBarrier, Wgmma, WgmmaWait
from attngen.targets.hopper.configs.common import in_turns
from attngen.targets.hopper.configs.families import with_apart, with_backward, with_forwards
from attngen.targets.hopper.configs.sm90 import FORWARD
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class PingPong(Pass):
    name: ClassVar[str] = "ping-pong"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        def chosen(kernel: Kernel) -> bool:
            return all(in_turns(module, row) for row in module.configs(kernel.name, kernel.backend))

        module = with_forwards(module, lambda kernel: _in_turns(kernel) if chosen(kernel) else kernel)
        return with_apart(with_backward(module, _in_turns), _in_turns)


def _in_turns(kernel: Kernel) -> Kernel:
    loop = next(
        op for op in kernel.ops() if isinstance(op, PipelinedLoop) and op.carry
    )  # the consumers', which has sums
    two = (
        kernel.stands_for != FORWARD and not loop.first
    )  # else sums are multiplied together with the scores of the next tile
    blocks = []
    for block in kernel.blocks:
        ops = block.ops
        if block.name in (loop.first, loop.step):
            ops = tuple(_turns(block, two))
        elif block.name == loop.skip:
            ops = (SchedulerBarrier("turn_take_skip", "sync"), SchedulerBarrier("turn_pass_skip", "arrive"), *ops)
        elif block.name == "consumer":
            ops = (SchedulerBarrier("turn_start", "init"), *ops, SchedulerBarrier("turn_end", "tail"))
        blocks.append(replace(block, ops=ops))
    return replace(kernel, blocks=tuple(blocks))


def _turns(block: Block, two: bool) -> Iterator[Op]:
    """The ops of a body, with a turn around the products that it issues.

    Or with two: around those that it issues before it awaits one, and around those from the first on that adds to sums.
    """
    products = [op for op in block.ops if isinstance(op, Wgmma)]
    sums = next(i for i, op in enumerate(products) if op.acc) if two else 0
    at_once = takewhile(lambda op: not isinstance(op, WgmmaWait), block.ops)
    groups = [group for group in ([op for op in at_once if op in products[:sums]], products[sums:]) if group]
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
