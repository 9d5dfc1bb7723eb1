"""persistent-scheduler: make the kernel persistent: each program computes one work tile of the grid after another.

The first work tile of a program has the program's own index. The producer fetches each later one by an atomic add to a
counter in device memory; the first one, too, where programs wait for one another. It passes the work tile's coordinates
to the other warp groups through %Work_pipeline, and runs ahead: it loads Q, K and V of the next work tile while
consumers finish the previous one. This gains most where work tiles are short.

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
           %Fetched = work_loop %Work_pipeline of(@tile) body(@produce) fetches(yes)
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

The pipeline of Q gets a second stage where shared memory has room. If shared memory or named barriers do not suffice
for a stage of Q, a staging buffer of the outputs and %Work_pipeline, the kernel is unchanged: one program per work
tile.

In the fused backward @dq_reducer has a work loop, too. K and V are consumed once per work tile, and their stages are
released by mbarriers, because there are too few named barriers. V is released at the end, because dK and dV leave
through its stage. A fused backward is not persistent if its programs loop over query heads: they take longer, so starts
and ends matter less, and persistence would gain 0 to 2%. Nor is it with wide heads, where it would spill. For forward
mode see `jvp.can_be_persistent`.

In MLA decode the grid has an axis of KV splits, whose number the programs compute on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir import Block, Kernel, Module, Op, Type, only, pipe, tile
from attngen.targets.hopper.configs import jvp
from attngen.targets.hopper.configs.families import with_forward, with_fused_backward, with_jvp, with_mla_decode
from attngen.targets.hopper.configs.forward_schedule import persistent_q_stages
from attngen.targets.hopper.configs.fused_backward import can_be_persistent
from attngen.targets.hopper.configs.mla_decode import is_mla_decode
from attngen.targets.hopper.configs.work_tiles import WORK_STAGES
from attngen.transforms.base import Pass

WORK = "Work_pipeline"
BODIES = {  # warp group -> the name of its `work_loop`, the name of the loop's body, and a sentence about the body
    "producer": ("Fetched", "produce", "load the tiles that consumers of this work tile use"),
    "consumer": ("work", "consume", "compute the instance's rows of this work tile"),
    "left": ("work_left", "consume_left", "compute the left columns of the outputs"),
    "right": ("work_right", "consume_right", "compute the right columns of the outputs"),
    "dq_reducer": ("Work_dQ", "reduce_dq", "add the consumers' tiles of dQ to device memory"),
}


@dataclass(frozen=True)
class PersistentScheduler(Pass):
    name: ClassVar[str] = "persistent-scheduler"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        def forward(kernel: Kernel) -> Kernel:
            stages = min(persistent_q_stages(module, config) for config in module.configs(kernel.name, kernel.backend))
            if not stages:
                return kernel
            return _make_persistent(kernel, lambda pipeline: replace(pipeline, stages=sympy.Integer(stages)))

        def others(kernel: Kernel) -> Kernel:
            return _make_persistent(kernel, lambda pipeline: replace(pipeline, mbarrier_release=True))

        module = with_forward(module, forward)
        module = with_mla_decode(module, others)
        module = with_jvp(module, lambda kernel: others(kernel) if jvp.can_be_persistent(module) else kernel)
        return with_fused_backward(
            module, lambda kernel: others(kernel) if can_be_persistent(module, kernel) else kernel
        )


def _make_persistent(kernel: Kernel, change: Callable[[pipe.Pipeline], pipe.Pipeline]) -> Kernel:
    """Make a kernel persistent; change: applied to the pipelines that are consumed once per work tile."""
    entry = kernel.block("entry")
    loaded = {op.pipeline for op in only(kernel.ops(), pipe.ProducerLoad)}
    # Warp group -> pipelines that it consumes once per work tile -> the tile.
    of_warp_groups = {
        warp_group.name: {
            op.pipeline: op.name for op in only(warp_group.ops, pipe.ConsumerWait) if op.pipeline in loaded
        }
        for warp_group in kernel.warp_groups
        if warp_group.warp_group and warp_group.warp_group.rows
    }
    once = {pipeline: name for waited in of_warp_groups.values() for pipeline, name in waited.items()}
    kept = [
        change(op) if isinstance(op, pipe.Pipeline) and op.name in once else op
        for op in only(entry.ops, tile.Arg, pipe.Pipeline)
    ]
    # Too few named barriers are left in these kernels.
    by_mbarrier = kernel.traits.adds_in_order or is_mla_decode(kernel)
    work = pipe.Pipeline(WORK, Type("i32", (), "sram"), sympy.Integer(WORK_STAGES), mbarrier_release=by_mbarrier)
    tails = [op for warp_group in kernel.warp_groups for op in only(warp_group.ops, pipe.ProducerTail)]
    at_end = [
        *(pipe.ProducerTail(f"_tail_{name}", pipeline) for pipeline, name in once.items()),
        *tails,
        pipe.ProducerTail("_tail_work", WORK),
    ]
    warp_groups, bodies = [], []
    for warp_group in kernel.warp_groups:
        name, body, about = BODIES[warp_group.name]
        waited = of_warp_groups.get(warp_group.name, {})
        ops = tuple(
            _with_releases(kernel, warp_group, waited) if waited else (op for op in warp_group.ops if op not in tails)
        )
        fetches = warp_group.name == "producer"
        warp_groups.append(
            replace(warp_group, ops=(pipe.WorkLoop(name, WORK, "tile", body, fetches), *(at_end if fetches else ())))
        )
        bodies.append(Block(body, ops, about=about))
    scalars = Block(
        "tile",
        tuple(op for op in entry.ops if not isinstance(op, (tile.Arg, pipe.Pipeline))),
        about="scalars of a tile that all warp groups read",
    )
    others = [block for block in kernel.blocks if not block.warp_group and block is not entry]
    return replace(kernel, blocks=(replace(entry, ops=(*kept, work)), *warp_groups, scalars, *bodies, *others))


def _with_releases(kernel: Kernel, warp_group: Block, once: dict[str, str]) -> Iterator[Op]:
    """Add releases to a consumer's ops for a work tile: a tile that it waits for once is released after its loops,
    or at the end if outputs leave through the stage."""
    *_, last = only(warp_group.ops, tile.Loop, pipe.PipelinedLoop)
    staging = [
        name
        for pipeline, name in once.items()
        if kernel.traits.adds_in_order and isinstance(op := kernel.op(pipeline), pipe.Pipeline) and op.per_instance
    ]
    for op in warp_group.ops:
        yield op
        if op is last:
            yield from (pipe.ConsumerRelease(f"_release_{name}", name) for name in once.values() if name not in staging)
            yield pipe.ReloadTile(f"_reload_{warp_group.name}", WORK)
    yield from (pipe.ConsumerRelease(f"_release_{name}", name) for name in staging)
