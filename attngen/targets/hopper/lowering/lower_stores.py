"""The part of lower-pipelines that lowers stores: to shared memory, by TMA to tensors, and in semaphore order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import sympy

from attngen.ir import AXIS_DIM, MEMBER, REVERSED_GROUP, Access, Block, Expr, Op, only, pipe, symbol, tile
from attngen.ir import gl as g
from attngen.ir.behaviour import handles
from attngen.ir.expr import select
from attngen.targets.hopper.configs.barriers import acquire_of, named_barriers_per_stage
from attngen.targets.hopper.configs.sm90 import ROWS, SWIZZLED_COLUMNS, THREADS
from attngen.targets.hopper.lowering.counters import INSTANCE, ZERO, Slot, short
from attngen.targets.hopper.lowering.shapes import sized
from attngen.targets.hopper.lowering.statements import Lowering

PIECE = symbol("piece")


class StoreLowering(Lowering):
    """Lowers these ops."""

    # ------------------------------------------------------------------ to shared memory

    def _side(self, op: pipe.ProducerStore | pipe.ConsumerWait) -> Expr:
        """The index of the named barrier at which the warp group that stores an exchanged tile arrives and its reader
        waits. Each of the two warp groups has one for the tiles that it writes."""
        groups = [
            group.name
            for group in self.kernel.warp_groups
            if any(o.pipeline == op.pipeline for o in only(self.kernel.within(group.name), pipe.ProducerStore))
        ]
        mine = groups.index(self.group.name)
        return sympy.Integer(mine if isinstance(op, pipe.ProducerStore) else 1 - mine)

    def _store(self, smem: str, value: str, index: Expr, **how: bool) -> g.SmemStore:
        return g.SmemStore(self._name("store"), smem, value, index, **how)  # type: ignore[arg-type]

    @handles(pipe.ProducerStore)
    def _producer_store(self, op: pipe.ProducerStore) -> Iterator[Op]:
        name, s = op.pipeline, short(op.pipeline)
        if self.pipelines[name].exchange:
            yield self._store(f"{s}_smem", op.value, ZERO)
            for metadata, ref in op.metadata:
                yield self._store(f"{short(metadata)}_smem", ref, ZERO)
            yield self._fence()
            note = "the other warp group may read them now"
            yield self._signal(f"{s}_written", self._side(op), 2 * THREADS, note, early=True)
            return
        slot = self.counting.stored_slot(name, self.group)
        handed_over = self.stored[name]
        other = "" if self.shapes.is_of_rows(name) else self.counting.in_phase_with(name)
        if handed_over:
            phase = symbol(f"{self.counting.counter(other, self.group) if other else s}_phase")
            note = "the stage is free" + f": in phase with {short(other)}" * bool(other)
            yield self._wait(f"{s}_empty", slot.stage, phase, note)
        yield from self._stored(op, slot)
        yield self._fence()
        if not handed_over:
            instances, each = (
                self.kernel.traits.sharing_warp_group.instances,
                named_barriers_per_stage(self.kernel, name),
            )
            written = "this instance's part is written"
            yield self._signal(f"{s}_written", each * slot.stage + INSTANCE, instances * THREADS, written)
            return
        yield self._arrive(f"{s}_full", slot.stage)
        if not other:
            yield self._next_stored(name, slot)

    def _next_stored(self, name: str, slot: Slot) -> g.NextStage:
        stage = "" if slot.stages == 1 else f"{short(name)}_stage"
        return g.NextStage(self._name("next"), f"{short(name)}_phase", slot.stages, stage)

    def _stored(self, op: pipe.ProducerStore, slot: Slot) -> Iterator[Op]:
        """The stores of a consumer instance's part."""
        name, smem, value = op.pipeline, f"{short(op.pipeline)}_smem", self.kernel.type_of(op.value)
        if self.shapes.is_of_rows(name):
            yield self._store(smem, op.value, ZERO)
        elif not self.stored[name]:
            yield self._store(smem, op.value, slot.stage, rows=True)
        elif self.pipelines[name].columns:
            yield from self._stored_pieces(op, smem)
        else:
            index = INSTANCE + self.kernel.traits.sharing_warp_group.instances * slot.stage
            shape = self.shapes.dims(value.dims)
            if self.shapes.columns(value.dims[1]) >= SWIZZLED_COLUMNS:
                yield g.SmemStoreAcc(self._name("store"), smem, op.value, index, shape, "PARTS")
            else:
                yield g.SmemStore(self._name("store"), smem, op.value, index, shape)

    def _stored_pieces(self, op: pipe.ProducerStore, smem: str) -> Iterator[Op]:
        """Stores of a consumer instance's part of dQ: both halves of its own piece, and its half of the piece between
        the two instances."""
        rows = self.shapes.dims(self.kernel.type_of(op.value).dims)[0]
        shape = rows, sympy.Integer(self.pipelines[op.pipeline].columns)
        yield g.SplitPiece(self._name("split"), op.value, "0")
        whole, rest = self.shapes.widths(self.kernel.type_of(op.value))
        own, half = rest * INSTANCE, sympy.Integer(whole // 2)  # the second instance's share of the rest comes first
        parts = (
            (4 * INSTANCE, "0_left", (own, half)),
            (4 * INSTANCE + 1, "0_right", (own + half, half)),
            (2 + INSTANCE, "1", (whole - whole * INSTANCE, sympy.Integer(rest))),
        )
        for at, piece, columns in parts:
            yield g.SmemStoreAcc(self._name("store"), smem, op.value, at, shape, "REST", piece, columns)

    # ------------------------------------------------------------------ by TMA to tensors

    def _is_input_gradient(self, tensor: str) -> bool:
        return tensor in {x.partials for x in self.module.input_gradients if x.reduction != "delta"}

    def _optional(self, tensor: str, ops: list[Op]) -> Iterator[Op]:
        """Ops that store a gradient of an input run only if the call needs these gradients."""
        yield from [self._if(symbol("_INPUT_GRADIENTS"), ops)] if self._is_input_gradient(tensor) else ops

    @handles(pipe.TmaStoreWait)
    def _tma_store_wait(self, op: pipe.TmaStoreWait) -> Iterator[Op]:
        stores = (o for o in only(self.kernel.ops(), pipe.TmaStore) if o.staging == op.staging)
        optional = next((o.dst.tensor for o in stores if self._is_input_gradient(o.dst.tensor)), "")
        yield from self._optional(optional, [g.TmaWriteWait(self._name("wait"))])

    @handles(pipe.TmaStore)
    def _tma_store(self, op: pipe.TmaStore) -> Iterator[Op]:
        yield from self._optional(op.dst.tensor, list(self._tma_stores(op)))

    def _tma_stores(self, op: pipe.TmaStore) -> Iterator[Op]:
        type_, transposed = self.kernel.type_of(op.value), op.is_of_scores(self.kernel)
        rows, columns = self.shapes.dims(type_.dims)
        smem, half = f"{short(op.staging)}_smem", self.pipelines[op.staging].type.dims[-1]
        index = self.counting.consumer_slot(op.staging, self.group).index if transposed else INSTANCE
        if widths := self.shapes.widths(type_):
            yield from self._store_pieces(op, smem, rows, widths)
            return
        if half.isdigit():
            halves = pipe.SplitHalves(
                f"{op.value}_halves", op.value, type_.dims[1], replace(type_, dims=(type_.dims[0], half))
            )
            yield halves
            parts = [(f"{halves.name}.left", ZERO), (f"{halves.name}.right", sympy.Integer(half))]
        else:
            parts = [(op.value, ZERO)]
        if note := self._reuse_comment(op):
            yield g.TmaWriteWait(self._name("wait"), note=note)
        shape = (columns, rows) if transposed else (rows, sized(half) if half.isdigit() else columns)
        for at, (value, column) in enumerate(parts):
            if at:
                yield g.TmaWriteWait(self._name("wait"), note="the first half has left the stage")
            yield g.SmemStore(
                self._name("store"), smem, value, index, shape, transposed=transposed, opaque=op.recompute
            )
            yield self._fence()
            yield self._write(op, self._place(op.dst, column=column), smem, index, op.recompute)

    def _write(self, op: pipe.TmaStore, place: tuple[Expr, ...], smem: str, index: Expr, opaque: bool = False) -> Op:
        return g.TmaWrite(self._name("write"), op.dst.tensor, place, smem, index, op.order, opaque)

    def _store_pieces(self, op: pipe.TmaStore, smem: str, rows: Expr, widths: list[int]) -> Iterator[Op]:
        """An output in pieces, which are stored through a stage as wide as a tile of V: as many at a time as fit."""
        room, shape = self.module.head_dim_v // widths[0], (rows, sympy.Integer(widths[0]))
        if note := self._reuse_comment(op):
            yield g.TmaWriteWait(self._name("wait"), note=note)
        view = g.SmemReinterpret(
            f"{op.value}_pieces", smem, INSTANCE, room, shape, op.dst.tensor, self.kernel.type_of(op.staging)
        )
        yield view
        for first in range(0, len(widths), room):
            numbers = range(first, min(first + room, len(widths)))
            if first:
                yield g.TmaWriteWait(self._name("wait"), note="the first pieces have left the stage")
            for i in numbers:
                at = sympy.Integer(i % room)
                columns = sympy.Integer(sum(widths[:i])), sympy.Integer(widths[i])
                yield g.SmemStore(self._name("store"), view.name, op.value, at, shape, piece=str(i), columns=columns)
            yield self._fence()
            for i in numbers:
                place = self._place(op.dst, column=sympy.Integer(i * widths[0]))
                yield self._write(op, place, view.name, sympy.Integer(i % room))

    def _reuse_comment(self, op: pipe.TmaStore) -> str:
        """The comment on the wait for the store before this one through the same stage; empty if there is none."""
        same = [o for o in only(self.kernel.ops(), pipe.TmaStore) if o.staging == op.staging]
        flushed = any(only(self.block.ops, pipe.TmaStoreWait))
        if self.kernel.traits.is_persistent and not flushed:
            return "the previous tile's outputs have left the stage"
        return "the previous output has left the stage" if same.index(op) else ""

    # ------------------------------------------------------------------ in semaphore order

    def _warps(self) -> int:
        group = self.group.warp_group
        assert group is not None
        return group.warps

    def _where_rows(self, op: pipe.SemaphoreAcquire | pipe.SemaphoreRelease, does: Op) -> Op:
        """An op that only instances with rows of the program's tile run, if the semaphore is that of their rows."""
        start = symbol(self._row(self.own))
        if start not in op.semaphore.index:
            return does
        return self._if(start < symbol(self.kernel.traits.extent(self.own)), [does])

    @handles(pipe.SemaphoreRelease)
    def _semaphore_release(self, op: pipe.SemaphoreRelease) -> Iterator[Op]:
        yield self._where_rows(op, g.IncrementSemaphore(self._name("increment"), op.semaphore))

    @handles(pipe.SemaphoreAcquire)
    def _semaphore_acquire(self, op: pipe.SemaphoreAcquire) -> Iterator[Op]:
        """The value is counted in warps, because each warp of an instance releases by one. An ordered add that follows
        reads it, too."""
        order = self._warps() * op.order
        if any(acquire_of(self.kernel, add) is op for add in only(self.kernel.ops(), tile.OrderedAdd)):
            yield self._let("_order", order)
            yield g.WaitSemaphore(self._name("wait"), op.semaphore, symbol("_order"))
        else:
            yield self._where_rows(op, g.WaitSemaphore(self._name("wait"), op.semaphore, order))

    def _next_row(self) -> str:
        """The variable of the next tile's first row. With listed tiles, `ahead` is the number of the next tile, which
        loops read an iteration early."""
        return f"{self.loop}_{'next' if self.module.blocks else 'ahead'}"

    def _polls(self, block: Block, in_work_loop: bool) -> Iterator[Op]:
        """The ops that start the variables of a warp group that polls the next tile's semaphore while it adds."""
        polls = any(not acquire_of(self.kernel, op) for op in only(self.kernel.within(block.name), tile.OrderedAdd))
        if polls and in_work_loop == self.kernel.traits.is_persistent:
            yield self._let(self._next_row(), sympy.Integer(-1))
            yield self._let("_order_seen", ZERO)

    @handles(tile.OrderedAdd)
    def _ordered_add(self, op: tile.OrderedAdd) -> Iterator[Op]:
        wait = self.kernel.op(op.value)
        assert isinstance(wait, pipe.ConsumerWait)
        rows, columns = self.shapes.part(op)
        moved, column = (PIECE * ROWS, ZERO) if rows == ROWS else (ZERO, PIECE * columns)
        count = self.shapes.tiles_of(self.pipelines[wait.pipeline])
        slot = self.counting.stored_slot(wait.pipeline, self.group)
        place, smem = self._place(op.dst, moved, column), f"{short(wait.pipeline)}_smem"
        order, buffer = symbol("_order"), count * slot.stage + PIECE
        write = g.TmaWrite(self._name("write"), op.dst.tensor, place, smem, buffer, order)
        acquired = acquire_of(self.kernel, op)
        if not acquired:
            assert op.semaphore is not None and op.order is not None
            start, ahead = symbol(self._row(self.loop)), symbol(self._next_row())
            yield self._let("_order", op.order)
            seen = select(sympy.Eq(start, ahead), symbol("_order_seen"), sympy.Integer(-1))
            yield g.WaitSemaphore(self._name("wait"), op.semaphore, order, seen)
        yield self._static_for("piece", count, [write])
        if not acquired:
            yield from self._poll_ahead(op)
        yield g.TmaWriteWait(self._name("wait"), relaxed=True)

    def _poll_ahead(self, op: tile.OrderedAdd) -> Iterator[Op]:
        """Read the semaphore of the tile that the loop visits next."""
        assert op.semaphore is not None
        start, ahead, rows = symbol(self._row(self.loop)), symbol(self._next_row()), symbol(AXIS_DIM[self.loop])
        reversed_group = self.kernel.grid[0].reversed_group
        step = select(symbol(REVERSED_GROUP) > 0, -rows, rows) if reversed_group else rows
        further = symbol(f"{self.loop}_ahead") * rows if self.module.blocks else start + step
        loop = next(o for o in only(self.kernel.ops(), pipe.PipelinedLoop) if op in self.kernel.block(o.step).ops)
        *head, _ = op.semaphore.index
        if loop.by_tile:  # next is the next head at this tile, or, after the last head, the first at the next tile
            ((low, high),) = loop.heads
            member = symbol(MEMBER)
            further = select(member + 1 < high, start, further)
            following = select(member + 1 < high, member + 1, low)
            head = [e.xreplace({member: following}) for e in head]
        yield self._let(self._next_row(), further)
        least = sympy.Max(ahead, 0) if reversed_group else ahead
        row = sympy.Min(least, symbol(self.kernel.traits.extent(self.loop)) - 1)
        yield g.ReadSemaphore(self._name("read"), "_order_seen", Access(op.semaphore.tensor, (*head, row)))
