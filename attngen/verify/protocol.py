"""The rule `protocol`: proves the synchronization of a warp-specialized kernel, for every interleaving of its warp
groups and for any number of tiles and of loop iterations.

A warp group is a list of steps: it loads, waits for or releases a stage, issues a wgmma or waits for one, or stores
through a stage. The loops of all warp groups run over the same tiles of the same heads, as the rule `same-tiles` says,
so one number of iterations holds for all; and persistent programs have the same work tiles in all warp groups. Both
numbers are left open: the warp group that first reaches the end of an iteration decides whether there is another one,
and the others follow (see `attngen.verify.machine`).

The model does what the hardware does:

- A stage is full when the phase of its barrier changes, which TMA does at any time after the load. A wait for a phase
  passes on its parity only.
- A stage is empty by a named barrier, which opens when all consumers and the producer have arrived; or by an mbarrier,
  which opens when all consumers have arrived, and which the producer sees at any time after that.
- A tile that instances write is there when all of them have arrived with their parts. One that writes its next part
  waits for another warp group that reads the pipeline and for nobody else; in round-robin order, for the instance that
  has the stage. One that writes to an exchange waits for nobody.
- Rows of a tile are zeroed at once, and no other warp group holds the tile then.
- Scheduler barriers are named barriers at which two instances meet: an arrival for an instance that has not synced with
  the last arrival would be taken for that instance's own.
- Products run until they are waited for, in the order in which they were issued, and read their tiles until then.
- A TMA store reads its stage until the next TMA store or the tma_store_wait.
- A program that waits for a semaphore goes on at some time, as the rule `semaphore-order` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attngen.interp.numeric import compiled
from attngen.ir.core import Block, Op
from attngen.ir.kernel import Kernel
from attngen.ir.module import Module
from attngen.ir.ops import Loop
from attngen.ir.pipe import (
    ConsumerRelease,
    ConsumerWait,
    Pipeline,
    ProducerLoad,
    ProducerStore,
    ProducerTail,
    TmaStore,
    TmaStoreWait,
    Wgmma,
    WgmmaWait,
    ZeroOutOfBounds,
)
from attngen.ir.pipe_control import PipelinedLoop, SchedulerBarrier, WorkLoop
from attngen.verify.automata import Program, Protocol, Step, TileLoop
from attngen.verify.machine import violation


def protocol(module: Module, kernel: Kernel) -> Iterator[str]:
    """There is no deadlock; no tile is read before it is there or overwritten before all have released it; nothing is
    unfinished at the end."""
    for warp_group in kernel.warp_groups:
        if why := _shape(kernel, warp_group):
            yield f"@{warp_group.name} {why}"
            return
    for config in module.configs(kernel.name, kernel.backend):
        values = {"num_stages": config.num_stages}
        if reason := violation(protocol_of(kernel, values)):
            yield f"with num_stages={config.num_stages}, {reason}"


def _tile_of(kernel: Kernel, warp_group: Block) -> Block:
    """The block that a warp group runs for a work tile: the body of its `work_loop`, or its own block."""
    work = next((op for op in warp_group.ops if isinstance(op, WorkLoop)), None)
    return kernel.block(work.body) if work else warp_group


def _shape(kernel: Kernel, warp_group: Block) -> str:
    """Why the work of a warp group for a tile is not one loop with steps before and after it, as the proof assumes;
    empty text if it is."""
    ops = _tile_of(kernel, warp_group).ops
    loops = [op for op in ops if isinstance(op, (Loop, PipelinedLoop))]
    bodies = {(op.body,) if isinstance(op, Loop) else op.bodies for op in loops}
    if len(bodies) > 1 or sum(isinstance(op, PipelinedLoop) for op in loops) > 1:
        return "has loops over several bodies; expected one body, or one pipelined_loop"
    if any(
        isinstance(op, (Loop, PipelinedLoop, WorkLoop))
        for names in bodies
        for name in names
        for op in kernel.block(name).ops
    ):
        return "has a loop inside a loop"
    if ops is not warp_group.ops and any(isinstance(op, (Loop, PipelinedLoop)) for op in warp_group.ops):
        return "has a loop outside of its work_loop"
    between = ops[ops.index(loops[0]) : ops.index(loops[-1])] if loops else ()
    steps = [step.kind for step in _steps(kernel, (op for op in between if op not in loops))]
    return f"has a {steps[0]} between its loops; expected it before or after them" if steps else ""


def protocol_of(kernel: Kernel, values: dict[str, int]) -> Protocol:
    """The protocol of a kernel for the values of a config."""
    # Pipelines of tile metadata (`metadata_of`) have the barriers of the pipeline of tiles.
    pipelines = [op for op in kernel.ops() if isinstance(op, Pipeline) and not op.metadata_of]
    stages = tuple((pipeline.name, int(compiled(pipeline.stages)(values))) for pipeline in pipelines)
    programs = tuple(_program(kernel, warp_group) for warp_group in kernel.warp_groups)
    per_instance = tuple((pipeline.name, pipeline.per_instance) for pipeline in pipelines)
    exchanges = frozenset(pipeline.name for pipeline in pipelines if pipeline.exchange)
    return Protocol(programs, stages, per_instance, kernel.round_robin, exchanges)


def _program(kernel: Kernel, warp_group: Block) -> Program:
    """The automaton's program of a warp group. In a persistent kernel, the warp group that fetches work tiles passes
    them to the others through a pipeline."""
    assert warp_group.warp_group is not None
    parts: list[list[Step]] = [[], []]
    loop = TileLoop((), ())
    for op in _tile_of(kernel, warp_group).ops:
        if isinstance(op, PipelinedLoop):
            first = op.first or op.step
            bodies = (
                kernel.block(body).ops if body else () for body in (first, op.step, op.last, op.skip, op.odd, op.pair)
            )
            loop = TileLoop(*(tuple(_steps(kernel, ops)) for ops in bodies))
        elif isinstance(op, Loop):
            body = tuple(_steps(kernel, kernel.block(op.body).ops))
            loop = TileLoop(body, body)
        else:
            parts[loop != TileLoop((), ())] += _steps(kernel, (op,))
    before, after = map(tuple, parts)
    work = next((op for op in warp_group.ops if isinstance(op, WorkLoop)), None)
    if not work:
        return Program(warp_group.name, before, loop, after, warp_group.warp_group.instances)
    at = warp_group.ops.index(work)
    start, end = (tuple(_steps(kernel, ops)) for ops in (warp_group.ops[:at], warp_group.ops[at + 1 :]))
    load, wait, release = (Step(kind, work.pipeline) for kind in ("producer_load", "consumer_wait", "consumer_release"))
    if work.fetches:
        before, end = (load, *before), (load, *end)
    else:
        start, after, end = (*start, wait), (*after, release, wait), (release, *end)
    instances = warp_group.warp_group.instances
    return Program(warp_group.name, before, loop, after, instances, persistent=True, start=start, end=end)


def _steps(kernel: Kernel, ops: Iterable[Op]) -> Iterator[Step]:
    for op in ops:
        match op:
            case ProducerLoad() if not _is_metadata(kernel, op.pipeline):
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


def _is_metadata(kernel: Kernel, name: str) -> bool:
    """Whether a pipeline has metadata of another one's tiles, and so the barriers of that."""
    pipeline = kernel.op(name)
    return isinstance(pipeline, Pipeline) and bool(pipeline.metadata_of)


def _pipeline_of(kernel: Kernel, ref: str) -> str:
    """The pipeline of whose tile a value is; "" for a value in registers."""
    take = kernel.wait_of(ref)
    return take.pipeline if take else ""
