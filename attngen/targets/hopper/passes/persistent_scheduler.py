"""persistent-scheduler: programs that stay, and take one tile of the grid after another.

before:  block @entry
           (arguments, pipelines)
           %kv_end = map expr(...)
         warp_group @producer ...
           producer_load %Q_pipeline %Q[b, h, q, d_qk]
           %copy_keys = loop kv ...
           producer_tail %K_pipeline; producer_tail %V_pipeline
         warp_group @consumer ...
           %q = consumer_wait %Q_pipeline
           %keys = pipelined_loop kv ...
           store %O[b, h, q, d_v] ...
after:   block @entry
           (arguments, pipelines)
           %Work_pipeline = pipeline stages(2) : i32[] @sram
         warp_group @producer ...
           %drawn = work_loop %Work_pipeline of(@tile) body(@produce) draws(yes)
           producer_tail %Q_pipeline; producer_tail %K_pipeline; producer_tail %V_pipeline
           producer_tail %Work_pipeline
         warp_group @consumer ...
           %work = work_loop %Work_pipeline of(@tile) body(@consume)
         block @tile
           %kv_end = map expr(...)
         block @produce
           producer_load %Q_pipeline %Q[b, h, q, d_qk]
           %copy_keys = loop kv ...
         block @consume
           %q = consumer_wait %Q_pipeline
           %keys = pipelined_loop kv ...
           consumer_release %q
           reload_tile %Work_pipeline
           store %O[b, h, q, d_v] ...

The producer runs ahead: it fills the rings for a program's next tile while consumers end the one before, so the ring of
queries gets more slots. It is worth most where tiles are short. Where rings leave no room for that, each tile keeps a
program of its own.

In the backward, three roles take the place of a tile: the writer does, too. K and V are taken once for each tile, and
what frees their slots is counted, as named barriers would be too few. V is given back at the end: dK and dV leave
through its slot. Programs that have several heads take one tile each: they end half as often, and gain 0 to 2% by
staying.

Over a cache of latents, a tile of queries has parts of the keys of a sequence. How many parts there are, programs find
out on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Block, Loop, Op, Type
from attngen.ir.pipe import (
    ConsumerRelease,
    ConsumerWait,
    Pipeline,
    PipelinedLoop,
    ProducerLoad,
    ProducerTail,
    ReloadTile,
    WorkLoop,
)
from attngen.targets.hopper.configs import jvp
from attngen.targets.hopper.configs.common import PLACE_STAGES, staying
from attngen.targets.hopper.configs.families import with_backward, with_forwards, with_latents, with_tangents
from attngen.targets.hopper.configs.fused_backward import may_stay
from attngen.targets.hopper.configs.mla_decode import is_of_latents
from attngen.transforms.base import Pass

PLACES = "Work_pipeline"
BODIES = {  # role -> the name of its `work`, that of its body, and what the body does
    "producer": ("drawn", "produce", "copy what consumers of this tile take"),
    "consumer": ("work", "consume", "what each copy does for its rows of this tile"),
    "left": ("work_left", "consume_left", "the left columns of outputs"),
    "right": ("work_right", "consume_right", "the right columns of outputs"),
    "writer": ("written", "deliver", "add what consumers have of this tile to dQ"),
}


@dataclass(frozen=True)
class PersistentScheduler(Pass):
    name: ClassVar[str] = "persistent-scheduler"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        def changed(kernel: Kernel) -> Kernel:
            stages = min(staying(module, row) for row in module.configs(kernel.name, kernel.backend))
            return (
                _staying(kernel, lambda pipeline: replace(pipeline, stages=sympy.Integer(stages))) if stages else kernel
            )

        module = with_forwards(module, changed)
        module = with_latents(module, lambda kernel: _staying(kernel, _counted))
        module = with_tangents(module, lambda kernel: _staying(kernel, _counted) if jvp.may_stay(module) else kernel)
        return with_backward(module, lambda kernel: _staying(kernel, _counted) if may_stay(module, kernel) else kernel)


def _counted(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, mbarrier_release=True)


def _staying(kernel: Kernel, change: Callable[[Pipeline], Pipeline]) -> Kernel:
    """The kernel whose programs stay; change: what becomes of the rings from which consumers take once for each
    tile."""
    entry = kernel.block("entry")
    filled = {op.pipeline for op in kernel.ops() if isinstance(op, ProducerLoad)}
    of_warp_groups = {
        warp_group.name: {
            op.pipeline: op.name for op in warp_group.ops if isinstance(op, ConsumerWait) and op.pipeline in filled
        }
        for warp_group in kernel.warp_groups
        if warp_group.warp_group and warp_group.warp_group.rows
    }
    once = {pipeline: name for taken in of_warp_groups.values() for pipeline, name in taken.items()}
    kept = [
        change(op) if isinstance(op, Pipeline) and op.name in once else op
        for op in entry.ops
        if isinstance(op, (Arg, Pipeline))
    ]
    by_count = kernel.adds or is_of_latents(kernel)  # as there are too few named barriers
    places = Pipeline(PLACES, Type("i32", (), "sram"), sympy.Integer(PLACE_STAGES), mbarrier_release=by_count)
    drains = [op for warp_group in kernel.warp_groups for op in warp_group.ops if isinstance(op, ProducerTail)]
    at_end = [
        *(ProducerTail(f"drain_{name}", pipeline) for pipeline, name in once.items()),
        *drains,
        ProducerTail("drain_work", PLACES),
    ]
    warp_groups, bodies = [], []
    for warp_group in kernel.warp_groups:
        name, body, about = BODIES[warp_group.name]
        taken = of_warp_groups.get(warp_group.name, {})
        ops = tuple(
            _giving_back(kernel, warp_group, taken) if taken else (op for op in warp_group.ops if op not in drains)
        )
        draws = warp_group.name == "producer"
        warp_groups.append(
            replace(warp_group, ops=(WorkLoop(name, PLACES, "tile", body, draws), *(at_end if draws else ())))
        )
        bodies.append(Block(body, ops, about=about))
    known = Block(
        "tile",
        tuple(op for op in entry.ops if not isinstance(op, (Arg, Pipeline))),
        about="what all roles know of a tile",
    )
    others = [block for block in kernel.blocks if not block.warp_group and block is not entry]
    return replace(kernel, blocks=(replace(entry, ops=(*kept, places)), *warp_groups, known, *bodies, *others))


def _giving_back(kernel: Kernel, warp_group: Block, once: dict[str, str]) -> Iterator[Op]:
    """A consumer's ops for a tile, with what it takes once given back: after its loops; or at the end, if outputs
    leave through it."""
    *_, last = (op for op in warp_group.ops if isinstance(op, (Loop, PipelinedLoop)))
    through = [
        name
        for pipeline, name in once.items()
        if kernel.adds and isinstance(op := kernel.op(pipeline), Pipeline) and op.per_instance
    ]
    for op in warp_group.ops:
        yield op
        if op is last:
            yield from (ConsumerRelease(f"give_{name}", name) for name in once.values() if name not in through)
            yield ReloadTile(f"recall_{warp_group.name}", PLACES)
    yield from (ConsumerRelease(f"give_{name}", name) for name in through)
