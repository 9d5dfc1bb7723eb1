"""lower-pipelines: make mbarriers, named barriers, stages and phases of pipelines, and TMA copies of their loads.

before:

    %K_pipeline = pipeline stages(num_stages) : T[BLOCK_KV, D_QK] @sram
    producer_load %K_pipeline %K[b, h, kv, d_qk]

    %k = consumer_wait %K_pipeline : T[BLOCK_KV, D_QK] @sram
    consumer_release %k

after:

    %K_smem = alloc_shared count(STAGES) shape(BLOCK_KV; D_QK) like(K) : T[BLOCK_KV, D_QK] @sram
    %K_full = alloc_mbarriers count(STAGES)
    %K_free = named_barriers count(STAGES)
    if where(K_loads >= STAGES) body(@if_1)   // named_sync %K_free index(K_stage)
    mbarrier_expect %K_full index(K_stage) bytes(2*BLOCK_KV*D_QK)
    tma_load %K place(b; h; kv_start; 0) barrier(%K_full) index(K_stage) smem(%K_smem) buffer(K_stage)
    next_load loads(K_loads) stages(STAGES) stage(K_stage)

    mbarrier_wait %K_full index(K_stage) phase(K_phase)
    %k = smem_view %K_smem index(K_stage) : T[BLOCK_KV, D_QK] @sram
    named_arrive %K_free index(K_stage)
    next_stage phase(K_phase) stages(STAGES) stage(K_stage)

A warp group starts with `counters` for the pipelines that it uses. The pipeline of work tiles gets its buffers and
barriers; the work loops still use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import sympy

from attngen.ir import (
    AXIS_DIM,
    AXIS_EXTENT,
    Access,
    Block,
    Expr,
    Kernel,
    Module,
    Op,
    only,
    pipe,
    symbol,
    tile,
)
from attngen.ir import gl as g
from attngen.ir.behaviour import handles
from attngen.ir.expr import mod, select
from attngen.targets.hopper.configs.barriers import (
    instances_of,
    is_reused,
    named_barriers_per_stage,
    ping_pong_barriers,
    release_arrivals,
)
from attngen.targets.hopper.configs.head_dims import pieces
from attngen.targets.hopper.configs.sm90 import ROWS, THREADS
from attngen.targets.hopper.configs.work_tiles import tile_metadata
from attngen.targets.hopper.lowering.counters import COPY, INSTANCE, ZERO, Slot, short
from attngen.targets.hopper.lowering.lower_stores import StoreLowering
from attngen.targets.hopper.lowering.shapes import rematerializes_address
from attngen.targets.hopper.lowering.statements import threads_of
from attngen.transforms.base import Pass

PIECE = symbol("piece")
FREE = "the stage is free"
METADATA = (pipe.WriteTileStart, pipe.ProducerLoad, pipe.WriteTileIndex)


@dataclass(frozen=True)
class LowerPipelines(Pass):
    """Replace the pipelines of all warp-specialized kernels of Hopper."""

    name = "lower-pipelines"
    phase = "target"

    def run(self, module: Module) -> Module:
        return replace(module, warp_specialized=tuple(lower_pipelines(module, k) for k in module.warp_specialized))


def lower_pipelines(module: Module, kernel: Kernel) -> Kernel:
    """The kernel without pipelines."""
    return _Lowering(module, kernel).lowered()


class _Lowering(StoreLowering):
    """Lowers the ops of one kernel, warp group by warp group."""

    def lowered(self) -> Kernel:
        groups = {b.name: self._within(b) for b in self.kernel.warp_groups}
        new: dict[str, tuple[Op, ...]] = {}
        for group in self.kernel.warp_groups:
            for block in groups[group.name]:
                new[block.name] = self._lower_block(group, block)
            new[group.name] = (*self.counting.starts(group), *self._polls(group, False), *new[group.name])
        entry = self.kernel.block("entry")
        self.group, self.block = entry, entry
        args, scalars = (
            [op for op in entry.ops if isinstance(op, (tile.Arg, pipe.Pipeline)) == first] for first in (True, False)
        )
        early = tuple(self._early())
        if early:
            about = g.Comment(self._name("comment"), "these loads run while the scalars below are looked up")
            new["entry"] = (*args, *self._allocations(), about, *early, *scalars)
        else:
            new["entry"] = (*args, *scalars, *self._allocations())
        blocks = (replace(b, ops=new.get(b.name, b.ops)) for b in self.kernel.blocks)
        return replace(self.kernel, blocks=(*blocks, *self.made))

    def _within(self, group: Block) -> list[Block]:
        """A warp group's block and the bodies that it runs."""
        names = [group.name]
        for name in names:
            names += [b for op in self.kernel.block(name).ops for b in pipe.bodies_of(op) if b not in names]
        return [self.kernel.block(name) for name in names]

    def _lower_block(self, group: Block, block: Block) -> tuple[Op, ...]:
        self.group, self.block = group, block
        works = any(block.name == op.body for op in only(self.kernel.ops(), pipe.WorkLoop))
        lowered = (new for op in block.ops for new in (self.handler(op)(op) if type(op) in self.handlers else (op,)))
        return (*(self._polls(group, True) if works else ()), *lowered)

    # ------------------------------------------------------------------ buffers and barriers

    def _allocations(self) -> Iterator[Op]:
        """The ops that allocate a kernel's buffers and barriers, and initialise its mbarriers."""
        inits: dict[str, list[Op]] = {"filled": [], "released": [], "stored": []}
        turns = ping_pong_barriers(self.kernel)
        if turns:
            yield g.NamedBarriers("turns", sympy.Integer(turns), at_end=True)
        for name, pipeline in self.pipelines.items():
            yield from self._allocation(pipeline, inits)
            if per_stage := named_barriers_per_stage(self.kernel, name):
                kind = "written" if pipeline.exchange or name in self.stored else "free"
                yield g.NamedBarriers(f"{short(name)}_{kind}", per_stage * self.counting.stages(name))
        for ops in inits.values():
            yield from ops
        yield self._fence()

    def _allocation(self, pipeline: pipe.Pipeline, inits: dict[str, list[Op]]) -> Iterator[Op]:
        name, stages = pipeline.name, self.counting.stages(pipeline.name)
        s, buffers = short(name), instances_of(self.kernel, pipeline) * stages
        released = release_arrivals(self.kernel, name)
        stored = name in self.stored
        full = (stored and self.stored[name]) or not (
            stored or pipeline.exchange or pipeline.metadata_of or not self._is_loaded(pipeline)
        )
        yield self._buffers(pipeline, stages, buffers)
        count = stages if stored else buffers
        if full:
            yield g.AllocMbarriers(f"{s}_full", count)
        if released or (stored and full):
            yield g.AllocMbarriers(f"{s}_empty", count)
        at = symbol("at")
        if stored and full:
            instances = self.kernel.traits.sharing_warp_group.instances
            both = [self._init(f"{s}_full", at, instances), self._init(f"{s}_empty", at, 1)]
            inits["stored"].append(self._static_for("at", count, both))
        elif full:
            inits["filled"].append(self._static_for("at", count, [self._init(f"{s}_full", at, 1)]))
        if released and not stored:
            inits["released"].append(self._static_for("at", count, [self._init(f"{s}_empty", at, released)]))

    def _init(self, barrier: str, index: Expr, arrivals: int) -> g.MbarrierInit:
        return g.MbarrierInit(self._name("init"), barrier, index, arrivals)

    def _is_loaded(self, pipeline: pipe.Pipeline) -> bool:
        """True if TMA, or the warp group that fetches work tiles, fills the stages."""
        if not pipeline.type.dims and not pipeline.metadata_of:
            return True
        return any(op.pipeline == pipeline.name for op in only(self.kernel.ops(), pipe.ProducerLoad))

    def _buffers(self, pipeline: pipe.Pipeline, stages: Expr, buffers: Expr) -> g.AllocShared:
        name, type_ = f"{short(pipeline.name)}_smem", pipeline.type
        if not type_.dims and not pipeline.metadata_of:  # coordinates of work tiles
            return g.AllocShared(name, len(tile_metadata(self.kernel)) * stages, (), type_)
        if pipeline.metadata_of or self.shapes.is_of_rows(pipeline.name):
            return g.AllocShared(name, stages, self.shapes.dims(type_.dims, False), type_)
        if pipeline.exchange:
            return g.AllocShared(name, buffers, self.shapes.shape(pipeline), type_)
        if pipeline.name in self.stored:
            add = next(only(self.kernel.ops(), tile.OrderedAdd), None)
            if not self.stored[pipeline.name] or add is None:
                return g.AllocShared(name, stages, self.shapes.dims(type_.dims, False), type_)
            count = self.shapes.tiles_of(pipeline) * stages
            return g.AllocShared(name, count, self.shapes.part(add), type_, add.dst.tensor)
        moves = [o for o in only(self.kernel.ops(), pipe.ProducerLoad, pipe.TmaStore) if pipeline.name in o.operands()]
        tensor = next((o.src.tensor for o in moves if isinstance(o, pipe.ProducerLoad)), "")
        tensor = tensor or next(o.dst.tensor for o in moves if isinstance(o, pipe.TmaStore))
        return g.AllocShared(name, pieces(self.module, pipeline) * buffers, self.shapes.shape(pipeline), type_, tensor)

    # ------------------------------------------------------------------ the producer's loads

    def _acquire(self, name: str, slot: Slot) -> Op:
        """Wait until a stage is free."""
        if self.pipelines[name].mbarrier_release:
            return self._wait(f"{short(name)}_empty", slot.index, slot.phase)
        return self._if(slot.loads >= slot.stages, [self._free_sync(name, slot, FREE)])

    def _free_sync(self, name: str, slot: Slot, note: str = "") -> g.NamedSync:
        return self._sync(f"{short(name)}_free", slot.stage, threads_of(self.kernel, name), note)

    def _acquired_first(self, op: Op, name: str) -> list[Op]:
        """The wait for a free stage, before the first of the ops that fill it: metadata of a tile, and then the tile.
        In pipelines with a buffer per instance the wait for an mbarrier stands before each load."""
        ops, pipeline = self.block.ops, self.pipelines[name]
        at = next(i for i, o in enumerate(ops) if o is op)
        before = ops[at - 1] if at else None
        begins = not (isinstance(before, METADATA) and self.pipelines[before.pipeline].metadata_of == name)
        per_load = pipeline.mbarrier_release and pipeline.per_instance
        return [self._acquire(name, self.counting.producer_slot(name))] if begins and not per_load else []

    @handles(pipe.ProducerLoad)
    def _producer_load(self, op: pipe.ProducerLoad) -> Iterator[Op]:
        if not op.early:
            yield from self._load(op)

    def _early(self) -> Iterator[Op]:
        """The loads that are issued before the kernel's warp groups start."""
        for op in only(self.kernel.ops(), pipe.ProducerLoad):
            if op.early:
                yield from self._load(op)

    def _load(self, op: pipe.ProducerLoad) -> Iterator[Op]:
        name, pipeline = op.pipeline, self.pipelines[op.pipeline]
        if pipeline.metadata_of:
            yield from self._load_row_vector(op, pipeline.metadata_of)
            return
        slot, n, s = self.counting.producer_slot(name), pieces(self.module, pipeline), short(name)
        reused = is_reused(self.kernel, name)
        if reused:
            yield from self._acquired_first(op, name)
        rows, columns = self.shapes.shape(pipeline)
        copies: list[Op] = []
        if reused and pipeline.mbarrier_release and pipeline.per_instance:
            copies.append(self._acquire(name, slot))
        copies.append(g.MbarrierExpect(self._name("expect"), f"{s}_full", slot.index, 2 * n * rows * columns))
        buffer = n * slot.index + (PIECE if n > 1 else 0)
        moved = COPY * ROWS if pipeline.per_instance else ZERO
        place = (
            self._cache_place(op)
            if self.counting.of_latents
            else self._place(op.src, moved, PIECE * pipeline.columns if n > 1 else ZERO)
        )
        load = g.TmaLoad(
            self._name("load"), op.src.tensor, place, f"{s}_full", slot.index, f"{s}_smem", buffer, op.page
        )
        copies.append(self._static_for("piece", n, [load]) if n > 1 else load)
        instances = instances_of(self.kernel, pipeline)
        yield from [self._static_for("copy", instances, copies)] if pipeline.per_instance else copies
        if reused:
            yield self._next_load(name, slot)

    def _next_load(self, name: str, slot: Slot) -> Op:
        if self.pipelines[name].mbarrier_release:
            return slot.next_stage(self._name("next"))
        return g.NextLoad(self._name("next"), str(slot.loads), slot.stages, slot.stage_var)

    def _load_row_vector(self, op: pipe.ProducerLoad, tiles: str) -> Iterator[Op]:
        """A vector of row values that accompanies a tile."""
        yield from self._acquired_first(op, tiles)
        slot, row = self.counting.producer_slot(tiles), symbol(self.kernel.traits.first_row(op.src, -1, self.loop))
        of_call = str(row) == self._row(self.loop)
        left = symbol(self.kernel.traits.extent(self.loop) if of_call else AXIS_EXTENT[self.loop]) - row
        src = Access(op.src.tensor, (*op.src.index[:-1], row))
        yield g.CopyRow(self._name("copy"), src, left, f"{short(tiles)}_full", slot.index, f"{short(op.pipeline)}_smem")

    @handles(pipe.WriteTileIndex)
    def _write_tile_index(self, op: pipe.WriteTileIndex) -> Iterator[Op]:
        tiles = str(self.pipelines[op.pipeline].metadata_of)
        yield from self._acquired_first(op, tiles)
        index = self.counting.producer_slot(tiles).index
        yield g.WriteIndex(self._name("write"), f"{short(op.pipeline)}_smem", index, symbol(f"{self.loop}_tile"))

    @handles(pipe.WriteTileStart)
    def _write_tile_start(self, op: pipe.WriteTileStart) -> Iterator[Op]:
        tiles = str(self.pipelines[op.pipeline].metadata_of)
        yield from self._acquired_first(op, tiles)
        index = self.counting.producer_slot(tiles).index
        yield g.WriteTileStart(self._name("write"), f"{short(op.pipeline)}_smem", op.value, index, op.when)

    @handles(pipe.ProducerTail)
    def _producer_tail(self, op: pipe.ProducerTail) -> Iterator[Op]:
        name, slot = op.pipeline, self.counting.producer_slot(op.pipeline)
        instances = instances_of(self.kernel, self.pipelines[name])
        if self.pipelines[name].mbarrier_release:
            wait: Op = self._acquire(name, slot)
            wait = self._static_for("copy", instances, [wait]) if instances > 1 else wait
            last = slot.stages == 1
            yield wait if last else self._static_for("_", slot.stages, [wait, slot.next_stage(self._name("next"))])
        elif slot.stages == 1:
            yield self._if(slot.loads > 0, [self._free_sync(name, slot)])
        else:
            back = self._let(slot.stage_var, select(sympy.Eq(slot.stage, 0), slot.stages - 1, slot.stage - 1))
            body = self._body("for", [back, self._free_sync(name, slot)])
            yield g.For(self._name("for"), "_", sympy.Min(slot.loads, slot.stages), body)

    # ------------------------------------------------------------------ consumers

    def _index_of(self, ref: str) -> Expr:
        """The index of the buffer of a tile that has been waited for."""
        wait = self.kernel.op(ref)
        assert isinstance(wait, pipe.ConsumerWait)
        exchanged = self.pipelines[wait.pipeline].exchange
        return ZERO if exchanged else self.counting.consumer_slot(wait.pipeline, self.group).index

    @handles(pipe.ConsumerWait)
    def _consumer_wait(self, op: pipe.ConsumerWait) -> Iterator[Op]:
        name, pipeline, s = op.pipeline, self.pipelines[op.pipeline], short(op.pipeline)
        if pipeline.exchange:
            yield self._sync(f"{s}_written", self._side(op), 2 * THREADS, "the other warp group has written it")
            yield g.SmemView(op.name, f"{s}_smem", ZERO, op.type)
        elif name in self.stored:
            yield from self._wait_for_stored(op)
        else:
            slot, in_phase = self.counting.consumer_slot(name, self.group), self.counting.alternates(name)
            phase = slot.phase_of(in_phase) if is_reused(self.kernel, name) else ZERO
            note = "the phase flips once per work tile, as this stage does" if in_phase else ""
            yield self._wait(f"{s}_full", slot.index, phase, note)
            readers = (self.kernel.op(reader) for reader in self.kernel.graph.successors(op.name))
            if any(not isinstance(reader, (pipe.ConsumerRelease, pipe.Rematerialize)) for reader in readers):
                opaque = self.counting.of_latents and rematerializes_address(pipeline)
                yield self._view(op.name, pipeline, ZERO if opaque else slot.index, opaque)

    def _view(self, name: str, pipeline: pipe.Pipeline, index: Expr, opaque: bool = False) -> g.SmemView:
        n = pieces(self.module, pipeline)
        return g.SmemView(name, f"{short(pipeline.name)}_smem", index, pipeline.type, n, opaque=opaque)

    def _wait_for_stored(self, op: pipe.ConsumerWait) -> Iterator[Op]:
        name, s, slot = op.pipeline, short(op.pipeline), self.counting.stored_slot(op.pipeline, self.group)
        if self.stored[name]:
            yield self._wait(f"{s}_full", slot.stage, symbol(f"{s}_phase"))
            return
        each = named_barriers_per_stage(self.kernel, name)
        instances = self.kernel.traits.sharing_warp_group.instances
        note = "the other instance's part is written"
        yield self._sync(f"{s}_written", each * slot.stage + 1 - INSTANCE, instances * THREADS, note)
        yield g.SmemView(op.name, f"{s}_smem", slot.stage, op.type)

    @handles(pipe.ConsumerRelease)
    def _consumer_release(self, op: pipe.ConsumerRelease) -> Iterator[Op]:
        wait = self.kernel.op(op.value)
        assert isinstance(wait, pipe.ConsumerWait)
        name, s = wait.pipeline, short(wait.pipeline)
        if self.pipelines[name].exchange:
            return
        if name in self.stored:
            slot = self.counting.stored_slot(name, self.group)
            if self.stored[name]:
                yield self._arrive(f"{s}_empty", slot.stage)
                if name not in self.kernel.traits.round_robin:
                    yield self._next_stored(name, slot)
            elif slot.own:
                yield self._let(slot.stage_var, select(sympy.Eq(slot.stage + 1, slot.stages), ZERO, slot.stage + 1))
            return
        slot = self.counting.consumer_slot(name, self.group)
        if self.pipelines[name].mbarrier_release:
            yield self._arrive(f"{s}_empty", slot.index)
        else:
            readers = only(map(self.kernel.op, self.kernel.graph.successors(wait.name)), pipe.Wgmma)
            product = any(r.b == wait.name and not (r.acc and self.modifies) for r in readers)
            yield self._signal(f"{s}_free", slot.stage, threads_of(self.kernel, name), early=product)
        if slot.own:
            yield slot.next_stage(self._name("next"))

    @handles(pipe.ReadMetadata)
    def _read_metadata(self, op: pipe.ReadMetadata) -> Iterator[Op]:
        of_rows = self.pipelines[op.pipeline].type.dims == (AXIS_DIM[self.own],)
        yield g.SmemLoad(op.name, f"{short(op.pipeline)}_smem", self._index_of(op.tile), int(of_rows), op.type)

    @handles(pipe.ReadTileStart)
    def _read_tile_start(self, op: pipe.ReadTileStart) -> Iterator[Op]:
        yield g.ReadTileStart(self._name("read"), f"{short(op.pipeline)}_smem", self._index_of(op.tile), op.when)

    @handles(pipe.LocalLoad)
    def _local_load(self, op: pipe.LocalLoad) -> Iterator[Op]:
        wait = self.kernel.traits.wait_of(op.value)
        if wait and self.shapes.is_of_rows(wait.pipeline):
            yield g.SmemLoad(op.name, f"{short(wait.pipeline)}_smem", ZERO, 1, op.type)
        else:
            yield op

    @handles(pipe.SliceRows)
    def _slice_rows(self, op: pipe.SliceRows) -> Iterator[Op]:
        yield g.SmemRows(op.name, op.value, op.type)

    @handles(pipe.Rematerialize)
    def _rematerialize(self, op: pipe.Rematerialize) -> Iterator[Op]:
        wait = self.kernel.op(op.value)
        assert isinstance(wait, pipe.ConsumerWait)
        yield self._view(op.name, self.pipelines[wait.pipeline], self._index_of(op.value), True)

    @handles(pipe.SchedulerBarrier)
    def _scheduler_barrier(self, op: pipe.SchedulerBarrier) -> Iterator[Op]:
        instances, threads = ping_pong_barriers(self.kernel), 2 * THREADS
        if op.do == "sync":
            yield self._sync("turns", INSTANCE, threads, "this instance may issue its products")
        elif op.do == "arrive":
            following = mod(INSTANCE + 1, sympy.Integer(instances))
            yield self._signal("turns", following, threads, "the next instance may issue its products")
        elif op.do == "init":
            first = self._signal("turns", ZERO, threads, "the first instance starts")
            yield self._if(sympy.Eq(INSTANCE, instances - 1), [first])
        else:
            last = self._sync("turns", ZERO, threads, "matches the last arrive")
            yield self._if(sympy.Eq(INSTANCE, 0), [last])


LOWERED = frozenset(_Lowering.handlers) - {pipe.LocalLoad}  # classes of ops that no kernel has afterwards
