"""The rule `protocol`: model-checks the synchronization of a warp-specialized kernel.

Method: explicit-state model checking. Each instance of a warp group is a finite automaton of synchronization steps
(`attngen.verify.automata`). The product of these automata and the copy engine is searched exhaustively, for each
config's number of stages (`attngen.verify.machine`; partial-order reduction by persistent sets). The rule holds if no
reachable state is a deadlock or a race (see `protocol` below). It is a proof for any number of loop iterations and work
tiles: these numbers are left open. The warp group that first reaches the end of an iteration decides whether there is
another one (the search follows both decisions), and the others follow. This is sound because all loops run over the
same tiles of the same heads (rule `same-tiles`), and persistent programs have the same work tiles in all warp groups.

The state space is finite. Data and loop counters are not in it. A barrier is a phase bit and a set of arrivals. Each
instance counts its uses of a pipeline modulo a small multiple of the number of stages: no instance can be that far
ahead of another without an error. Decisions about iterations are kept only until the slowest instance has followed
them. If a warp group could get ahead of another without bound, the search would exceed `machine.MOST_STATES`, and the
rule fails.

The model has these parts, as in the hardware:

- A stage is full when the phase of its mbarrier changes, which TMA does at any time after the load. A wait passes on
  the parity of the phase only; it is an error if it passes on the phase of another tile.
- A stage becomes empty by a named barrier, which completes when all consumers and the producer have arrived; or by an
  mbarrier, which completes when all consumers have arrived, and which the producer sees at any time after that.
- A tile that instances write (producer_store) is there when all of them have arrived with their parts. Before an
  instance writes its next part, it waits until the other warp group that reads the pipeline has released the stage (in
  round-robin order, until the instance that owns the stage has). If the writers themselves read the tile, or the
  pipeline is an exchange, it does not wait: then a stage that is not released is an error.
- zero_out_of_bounds is one atomic step. If another consumer has passed its wait for the tile, that is an error.
- Scheduler barriers are named barriers at which two instances meet. A second arrival for an instance that has not
  synced with the first would complete the barrier without it, so it is an error.
- A wgmma reads its tiles from its issue until the wait for it, or for a later one: products finish in order.
- A TMA store reads its stage until the next tma_store through it, which waits for that, or until the tma_store_wait.

The model leaves these parts out; other checks cover them:

- Reads of a tile by other ops than wgmma. The rule `types` demands that local_load, read_metadata and the reads of a
  tile's index come after the tile's consumer_wait and before its consumer_release, and that the release comes after
  ordered_add, which itself waits until TMA has read the tile. slice_rows and rematerialize only compute addresses.
- Metadata (row vectors, tile indices): it is assumed to arrive, and to be released, with its tile.
- The contents of work-tile pipelines, and reload_tile: the interpreter. Tests on GPUs check that the counter gives each
  work tile once.
- Semaphores: a warp group that waits for one is assumed to go on at some time (rule `semaphore-order`).
- Registers of products in flight (keep_alive): the rule `wgmma-wait`.
- The printed code, such as arrival counts and fence.proxy.async after stores to shared memory: tests on GPUs. The order
  in which ptxas and LLVM leave the instructions: certificates of machine code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attngen.interp.numeric import compiled
from attngen.ir import Block, Kernel, Module, Op, only, pipe, tile
from attngen.verify.automata import Protocol, Step, TileLoop, WarpGroupSteps
from attngen.verify.machine import violation


def protocol(module: Module, kernel: Kernel) -> Iterator[str]:
    """There is no deadlock. No tile is read before it is there, or overwritten before all have released it. No load,
    product, store or arrival is unfinished at the end."""
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
    work = next(only(warp_group.ops, pipe.WorkLoop), None)
    return kernel.block(work.body) if work else warp_group


def _shape(kernel: Kernel, warp_group: Block) -> str:
    """The proof assumes that a warp group runs, for a work tile, one loop with steps before and after it. Return why it
    does not; empty text if it does."""
    ops = _tile_of(kernel, warp_group).ops
    loops = list(only(ops, tile.Loop, pipe.PipelinedLoop))
    bodies = {(op.body,) if isinstance(op, tile.Loop) else op.bodies for op in loops}
    if len(bodies) > 1 or sum(isinstance(op, pipe.PipelinedLoop) for op in loops) > 1:
        return "has loops over several bodies; expected one body, or one pipelined_loop"
    if any(
        isinstance(op, (tile.Loop, pipe.PipelinedLoop, pipe.WorkLoop))
        for names in bodies
        for name in names
        for op in kernel.block(name).ops
    ):
        return "has a loop inside a loop"
    if ops is not warp_group.ops and any(only(warp_group.ops, tile.Loop, pipe.PipelinedLoop)):
        return "has a loop outside of its work_loop"
    between = ops[ops.index(loops[0]) : ops.index(loops[-1])] if loops else ()
    steps = [step.kind for step in _steps(kernel, (op for op in between if op not in loops))]
    return f"has a {steps[0]} between its loops; expected it before or after them" if steps else ""


def protocol_of(kernel: Kernel, values: dict[str, int]) -> Protocol:
    """The protocol of a kernel for the values of a config."""
    # Pipelines of tile metadata (`metadata_of`) share the barriers of their tiles' pipeline.
    pipelines = [op for op in only(kernel.ops(), pipe.Pipeline) if not op.metadata_of]
    stages = tuple((pipeline.name, int(compiled(pipeline.stages)(values))) for pipeline in pipelines)
    warp_groups = tuple(_steps_of_warp_group(kernel, warp_group) for warp_group in kernel.warp_groups)
    per_instance = tuple((pipeline.name, pipeline.per_instance) for pipeline in pipelines)
    exchanges = frozenset(pipeline.name for pipeline in pipelines if pipeline.exchange)
    return Protocol(warp_groups, stages, per_instance, kernel.traits.round_robin, exchanges)


def _steps_of_warp_group(kernel: Kernel, warp_group: Block) -> WarpGroupSteps:
    """The steps of a warp group. In a persistent kernel these include the steps of its work_loop on the pipeline that
    passes the coordinates of work tiles."""
    assert warp_group.warp_group is not None
    before: list[Step] = []
    after: list[Step] = []
    loop = TileLoop((), ())
    for op in _tile_of(kernel, warp_group).ops:
        if isinstance(op, pipe.PipelinedLoop):
            first = op.first or op.step
            bodies = (
                kernel.block(body).ops if body else () for body in (first, op.step, op.last, op.skip, op.odd, op.pair)
            )
            loop = TileLoop(*(tuple(_steps(kernel, ops)) for ops in bodies))
        elif isinstance(op, tile.Loop):
            body = tuple(_steps(kernel, kernel.block(op.body).ops))
            loop = TileLoop(body, body)
        else:
            seen_loop = loop != TileLoop((), ())
            (after if seen_loop else before).extend(_steps(kernel, (op,)))
    name, instances = warp_group.name, warp_group.warp_group.instances
    work = next(only(warp_group.ops, pipe.WorkLoop), None)
    if not work:
        return WarpGroupSteps(name, tuple(before), loop, tuple(after), instances)
    at = warp_group.ops.index(work)
    start, end = (list(_steps(kernel, ops)) for ops in (warp_group.ops[:at], warp_group.ops[at + 1 :]))
    load, wait, release = (Step(kind, work.pipeline) for kind in ("producer_load", "consumer_wait", "consumer_release"))
    if work.fetches:
        # It passes the coordinates of each work tile when it begins with it, and -1 when there is none left.
        before, end = [load, *before], [load, *end]
    else:
        # The others wait for the first coordinates at the start, and for the next ones (or -1) after each work tile.
        start, after, end = [*start, wait], [*after, release, wait], [release, *end]
    return WarpGroupSteps(
        name, tuple(before), loop, tuple(after), instances, persistent=True, start=tuple(start), end=tuple(end)
    )


def _steps(kernel: Kernel, ops: Iterable[Op]) -> Iterator[Step]:
    """The synchronization steps of ops; other ops, such as reads and arithmetic, have none."""
    for op in ops:
        match op:
            case pipe.ProducerLoad() if not _is_metadata(kernel, op.pipeline):
                yield Step("producer_load", op.pipeline)
            case pipe.ConsumerWait():
                yield Step("consumer_wait", op.pipeline)
            case pipe.ConsumerRelease():
                yield Step("consumer_release", _pipeline_of(kernel, op.value))
            case pipe.ZeroOutOfBounds():
                yield Step("zero_out_of_bounds", _pipeline_of(kernel, op.value))
            case pipe.ProducerStore():
                yield Step("producer_store", op.pipeline)
            case pipe.ProducerTail():
                yield Step("producer_tail", op.pipeline)
            case pipe.TmaStore():
                yield Step("tma_store", op.staging)
            case pipe.TmaStoreWait():
                yield Step("tma_store_wait", op.staging)
            case pipe.SchedulerBarrier():
                yield Step("scheduler_barrier", op.do)
            case pipe.Wgmma():
                yield Step(
                    "wgmma", op.name, tuple(pipeline for ref in (op.a, op.b) if (pipeline := _pipeline_of(kernel, ref)))
                )
            case pipe.WgmmaWait():
                yield Step("wgmma_wait", op.value)


def _is_metadata(kernel: Kernel, name: str) -> bool:
    """True if a pipeline has metadata of another one's tiles, and so no barriers of its own."""
    pipeline = kernel.op(name)
    return isinstance(pipeline, pipe.Pipeline) and bool(pipeline.metadata_of)


def _pipeline_of(kernel: Kernel, ref: str) -> str:
    """The pipeline that holds a value, if this is a tile; "" for a value in registers."""
    wait = kernel.traits.wait_of(ref)
    return wait.pipeline if wait else ""
