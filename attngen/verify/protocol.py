"""The protocol of a divided kernel, proved: every interleaving of its roles, for every number of tiles, and of turns of
their loops.

A role is a list of steps: it fills, takes or gives back a slot, issues or awaits a product, stores through a slot.
Loops of all roles run over the same tiles of the same heads, as the rule `walks` says, so one number of turns holds for
all; and programs that stay have the same tiles in all roles. Both are found out on the way: the role that is the first
to reach the end of a turn decides whether there is another one, and the others follow (verify/machine.py). So what is
found holds for any number of turns and tiles.

What is modelled, as the hardware does it: a slot is full when the barrier's phase changes, which the copy engine does
at any time after the fill; a wait for a phase passes on its parity alone. A slot is free by a named barrier, which
opens when all takers and the producer have arrived; a counted one when all takers have, which the producer sees at any
time after that. A tile that copies share is there when all have arrived with their parts; one that writes its next part
waits for nobody but another role that takes from the ring: for the copy that has the slot, where turns are dealt to
copies. One that writes to a ring in relay waits for nobody. Rows of a tile are cleared at once, and no other role has
the tile then. A turn is passed by a named barrier at which two copies meet: one more pass before the other has come
would be counted as its coming. Products run until they are awaited, in the order in which they were issued, and read
their tiles until then. What is put into a slot is read by the copy engine until the next put, or a flush. A program
that waits for its turn among programs goes on at some time, as the rule `turns` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attngen.interp.numeric import compiled
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Block, Loop, Op
from attngen.ir.pipe import (
    ConsumerRelease,
    ConsumerWait,
    Pipeline,
    PipelinedLoop,
    ProducerLoad,
    ProducerStore,
    ProducerTail,
    SchedulerBarrier,
    TmaStore,
    TmaStoreWait,
    Wgmma,
    WgmmaWait,
    WorkLoop,
    ZeroOutOfBounds,
)
from attngen.verify.machine import Program, Protocol, Step, Walk, broken


def protocol(module: Module, kernel: Kernel) -> Iterator[str]:
    """No deadlock; no tile is read before it is there, or overwritten before all have given it back; at the end
    nothing is left."""
    for warp_group in kernel.warp_groups:
        if why := _shape(kernel, warp_group):
            yield f"@{warp_group.name} {why}"
            return
    for row in module.configs(kernel.name, kernel.backend):
        values = {"num_stages": row.num_stages}
        reason = broken(protocol_of(kernel, values))
        if reason:
            yield f"with num_stages={row.num_stages}, {reason}"


def _tile_of(kernel: Kernel, warp_group: Block) -> Block:
    """What a role does for a tile: the body of its `work`, or all of it."""
    work = next((op for op in warp_group.ops if isinstance(op, WorkLoop)), None)
    return kernel.block(work.body) if work else warp_group


def _shape(kernel: Kernel, warp_group: Block) -> str:
    """Why what a role does for a tile is not one loop, with steps before and after it, as the proof takes it to be;
    empty text if it is."""
    ops = _tile_of(kernel, warp_group).ops
    loops = [op for op in ops if isinstance(op, (Loop, PipelinedLoop))]
    bodies = {(op.body,) if isinstance(op, Loop) else op.bodies for op in loops}
    if len(bodies) > 1 or sum(isinstance(op, PipelinedLoop) for op in loops) > 1:
        return "has loops over several bodies; expected one body, or one pipeline"
    if any(
        isinstance(op, (Loop, PipelinedLoop, WorkLoop))
        for names in bodies
        for name in names
        for op in kernel.block(name).ops
    ):
        return "has a loop inside a loop"
    if ops is not warp_group.ops and any(isinstance(op, (Loop, PipelinedLoop)) for op in warp_group.ops):
        return "has a loop beside the one over its tiles"
    between = ops[ops.index(loops[0]) : ops.index(loops[-1])] if loops else ()
    steps = [step.kind for step in _steps(kernel, (op for op in between if op not in loops))]
    return f"has a {steps[0]} between its loops; expected it before or after them" if steps else ""


def protocol_of(kernel: Kernel, values: dict[str, int]) -> Protocol:
    """The protocol of a kernel under a row of its schedule."""
    pipelines = [
        op for op in kernel.ops() if isinstance(op, Pipeline) and not op.beside
    ]  # others have the barriers of these
    stages = tuple((pipeline.name, int(compiled(pipeline.stages)(values))) for pipeline in pipelines)
    programs = tuple(_program(kernel, warp_group) for warp_group in kernel.warp_groups)
    relays = frozenset(pipeline.name for pipeline in pipelines if pipeline.exchange)
    return Protocol(
        programs,
        stages,
        tuple((pipeline.name, pipeline.per_instance) for pipeline in pipelines),
        kernel.round_robin,
        relays,
    )


def _program(kernel: Kernel, warp_group: Block) -> Program:
    assert warp_group.warp_group is not None
    parts: list[list[Step]] = [[], []]
    walk = Walk((), ())
    for op in _tile_of(kernel, warp_group).ops:
        if isinstance(op, PipelinedLoop):
            first = op.first or op.step
            bodies = (
                kernel.block(body).ops if body else () for body in (first, op.step, op.last, op.skip, op.odd, op.pair)
            )
            walk = Walk(*(tuple(_steps(kernel, ops)) for ops in bodies))
        elif isinstance(op, Loop):
            body = tuple(_steps(kernel, kernel.block(op.body).ops))
            walk = Walk(body, body)
        else:
            parts[walk != Walk((), ())] += _steps(kernel, (op,))
    before, after = map(tuple, parts)
    work = next((op for op in warp_group.ops if isinstance(op, WorkLoop)), None)
    if not work:
        return Program(warp_group.name, before, walk, after, warp_group.warp_group.instances)
    at = warp_group.ops.index(work)
    start, end = (tuple(_steps(kernel, ops)) for ops in (warp_group.ops[:at], warp_group.ops[at + 1 :]))
    fill, take, give = (Step(kind, work.pipeline) for kind in ("producer_load", "consumer_wait", "consumer_release"))
    if work.draws:
        before, end = (fill, *before), (fill, *end)
    else:
        start, after, end = (*start, take), (*after, give, take), (give, *end)
    return Program(
        warp_group.name, before, walk, after, warp_group.warp_group.instances, stays=True, start=start, end=end
    )


def _steps(kernel: Kernel, ops: Iterable[Op]) -> Iterator[Step]:
    for op in ops:
        match op:
            case ProducerLoad() if not _is_beside(kernel, op.pipeline):
                yield Step("producer_load", op.pipeline)
            case ConsumerWait():
                yield Step("consumer_wait", op.pipeline)
            case ConsumerRelease():
                yield Step("consumer_release", _pipeline_of(kernel, op.value))
            case ZeroOutOfBounds():
                yield Step("zero_out_of_bounds", _pipeline_of(kernel, op.value))
            case ProducerStore():
                yield Step("producer_store", op.pipeline)
            case ProducerTail():
                yield Step("producer_tail", op.pipeline)
            case TmaStore():
                yield Step("tma_store", op.staging)
            case TmaStoreWait():
                yield Step("tma_store_wait", op.staging)
            case SchedulerBarrier():
                yield Step("scheduler_barrier", op.do)
            case Wgmma():
                yield Step(
                    "wgmma", op.name, tuple(pipeline for ref in (op.a, op.b) if (pipeline := _pipeline_of(kernel, ref)))
                )
            case WgmmaWait():
                yield Step("wgmma_wait", op.value)


def _is_beside(kernel: Kernel, name: str) -> bool:
    """Whether a ring has the barriers of another one."""
    pipeline = kernel.op(name)
    return isinstance(pipeline, Pipeline) and bool(pipeline.beside)


def _pipeline_of(kernel: Kernel, ref: str) -> str:
    take = kernel.take_of(ref)
    return take.pipeline if take else ""
