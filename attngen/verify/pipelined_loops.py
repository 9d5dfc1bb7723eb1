"""The rule `loop-bodies`: the values that loops of warp-specialized kernels carry, and the tiles that they visit, in
order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attngen.interp.numeric import compiled
from attngen.ir import Kernel, Module, only, pipe, tile, to_text
from attngen.tiles.order import whole_range
from attngen.tiles.warp_groups import instance_bounds


def loop_bodies(module: Module, kernel: Kernel) -> Iterator[str]:
    """The values that a loop carries, that its bodies take, and that they yield have the same fields and types.

    A pipelined loop visits tiles in one of the orders that its attributes allow.
    """
    for op in kernel.ops():
        if isinstance(op, pipe.PipelinedLoop):
            if not op.step or bool(op.first) != bool(op.last):
                yield f"%{op.name} has other bodies than @first, @step and @last, or @step only"
                continue
            yield from _carried(kernel, op)
            yield from _instance_tiles(kernel, op)
            yield from _tile_order(op)
            yield from _round_robin(module, kernel, op)
        elif isinstance(op, tile.Loop):
            carried = {field: kernel.type_of(ref) for field, ref in op.carry}
            if not carried == _taken(kernel, op.body, "") == _yielded(kernel, op.body):
                yield f"%{op.name}: what @{op.body} takes and yields does not fit what the loop carries"
            if op.reversed and (op.carry or op.listed or op.heads or len(op.ranges) > 1):
                yield f"%{op.name} is reversed; expected one range, nothing carried, no list and no heads"


def _carried(kernel: Kernel, op: pipe.PipelinedLoop) -> Iterator[str]:
    """The first body takes the fields that the loop carries, each other body takes those that the body before it
    yields, and the last one yields the carried fields. Bodies of even and odd iterations all take and yield the carried
    fields, and exclude other options."""
    starts = {field: kernel.type_of(ref) for field, ref in op.carry}
    names = [body for body in op.bodies if body != op.skip]
    takes = [_taken(kernel, body, f"_in_{body}") for body in names]
    yields = [_yielded(kernel, body) for body in names]
    if op.odd or op.pair:
        others = (op.first, op.listed, op.reversed, op.skip, op.in_order, op.recompute, op.heads, op.round_robin)
        if any(others) or (op.odd and op.pair):
            yield (
                f"%{op.name} has other options than @step and @{op.odd or op.pair}; expected only these two bodies "
                f"where even and odd iterations differ, or two run at once"
            )
        fits = all(starts == types for types in (*takes, *yields))
    else:
        fits = starts == takes[0] == yields[-1]
        fits &= len(names) == 1 or yields[0] == takes[1] == yields[1] == takes[2]
    if not fits:
        who = ", ".join(f"@{body}" for body in names)
        yield f"%{op.name}: what {who} take and yield does not fit what the loop carries"


def _tile_order(op: pipe.PipelinedLoop) -> Iterator[str]:
    """Loops have a range. Loops that visit tiles in order, that run for all heads at each tile, or that recompute
    values have the form that these options require."""
    if not (op.partial or op.full):
        yield f"%{op.name} has no range"
    step_only = not (op.first or op.tile_indices or op.reversed)
    if op.in_order and not (step_only and len(op.full) <= 1 and whole_range((*op.partial, *op.full))):
        yield (
            f"%{op.name} visits tiles in order; expected @step only, and one range of full tiles with the partial ones "
            f"next to it"
        )
    if op.by_tile and not (op.in_order and op.heads and not op.listed):
        yield f"%{op.name} runs each tile for all heads; expected heads, and tiles that are in order and not listed"
    if op.recompute and not (op.in_order and op.carry):
        yield f"%{op.name} recomputes values in each iteration; expected tiles that are in order, and carried sums"


def _round_robin(module: Module, kernel: Kernel, op: pipe.PipelinedLoop) -> Iterator[str]:
    """Instances that split iterations by the stages of a pipeline have one stage each. Each iteration reads one tile
    of that pipeline, which nothing else reads."""
    if op.round_robin is None:
        return
    pipeline, warp_group = kernel.op(op.round_robin), kernel.warp_group_of(op)
    waits = [
        o
        for b in kernel.warp_groups
        for o in only(kernel.within(b.name), pipe.ConsumerWait)
        if o.pipeline == op.round_robin
    ]
    steps = [
        type(o)
        for o in kernel.block(op.step).ops
        if isinstance(
            o,
            (
                pipe.ConsumerWait,
                pipe.ConsumerRelease,
                pipe.SchedulerBarrier,
                pipe.ProducerLoad,
                pipe.ProducerStore,
                pipe.Wgmma,
            ),
        )
    ]
    if (
        not isinstance(pipeline, pipe.Pipeline)
        or op.bodies != (op.step,)
        or op.carry
        or len(waits) != 1
        or steps != [pipe.ConsumerWait, pipe.ConsumerRelease]
        or waits[0] not in kernel.block(op.step).ops
    ):
        yield (
            f"%{op.name} splits iterations by the stages of %{op.round_robin}; expected a pipeline from which @step "
            f"waits for a tile and releases it, and nothing carried"
        )
        return
    stages = compiled(pipeline.stages)
    for config in module.configs(kernel.name, kernel.backend):
        n = int(stages({"num_stages": config.num_stages}))
        if warp_group is None or warp_group.instances != n or n < 2:
            yield (
                f"%{op.name} splits iterations by the {n} stages of %{op.round_robin}; expected as many stages as the "
                f"warp group has instances, and two or more"
            )


def _instance_tiles(kernel: Kernel, op: pipe.PipelinedLoop) -> Iterator[str]:
    """The tiles that an instance skips are those in which its own rows see nothing, by the bounds of the loop."""
    if not (op.reversed or op.skip or op.instance_partial):
        return
    own, skips = instance_bounds(kernel, op.partial, op.full, op.listed), bool(op.skip or op.instance_partial)
    if own is None:
        yield f"%{op.name} reverses or skips partial tiles; expected one range of them, right after one of full tiles"
    elif (skips or op.carry) and not (op.skip and op.instance_partial and op.reversed):
        yield f"%{op.name} skips tiles; expected all of reversed, skip and instance_partial"
    elif skips and op.instance_partial != (own,):
        bounds = " .. ".join(map(to_text, own))
        yield f"%{op.name}: for the rows of an instance, the bounds of the loop are instance_partial({bounds})"


def _taken(kernel: Kernel, body: str, suffix: str) -> dict[str, Any]:
    """The types of a body's arguments, by field."""
    return {op.name.removesuffix(suffix): op.type for op in only(kernel.block(body).ops, tile.Arg)}


def _yielded(kernel: Kernel, body: str) -> dict[str, Any]:
    """The types that a body yields, by field."""
    last = kernel.block(body).ops[-1:]
    return {field: kernel.type_of(ref) for op in only(last, tile.Yield) for field, ref in op.values}
