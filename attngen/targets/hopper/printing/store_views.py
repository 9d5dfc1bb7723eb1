"""Builds the views of TMA stores, and of accumulation in semaphore order."""

from __future__ import annotations

from typing import Any

from attngen.ir import AXIS_DIM, MEMBER, REVERSED_GROUP, Access, Block, only, pipe, select, symbol, tile
from attngen.ir.behaviour import handles
from attngen.targets.hopper.configs.barriers import acquire_of
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.targets.hopper.printing.tile_start_views import TileStartContext


class StoreContext(TileStartContext):
    """Builds the views of ops that write outputs."""

    def _polls_ahead(self, block: Block) -> bool:
        """True if a warp group adds to tiles in semaphore order, and polls the next tile's semaphore while it adds."""
        return any(not acquire_of(self.kernel, op) for op in only(self.kernel.within(block.name), tile.OrderedAdd))

    @handles(tile.OrderedAdd)
    def _ordered_add(self, op: tile.OrderedAdd | tile.OrderedAccumulate, cls: str) -> dict[str, Any]:
        """The parts of a tile that the copy engine adds, their place, and the program's semaphore ticket."""
        wait = self.kernel.op(op.value)
        assert isinstance(wait, pipe.ConsumerWait)
        assert isinstance(op, tile.OrderedAdd)  # ordered_accumulate became tma_store
        rows, columns = self._part(op)
        moved, column = (f" + piece * {ROWS}", "0") if rows == str(ROWS) else ("", f"piece * {columns}")
        text = self._shared_stage(wait.pipeline)
        tiles = self._tiles_of(self.pipelines[wait.pipeline])
        first = f"{tiles} * {text['stage']} + piece" if text["stage"] else "piece"
        part = {
            **text,
            "pieces": tiles,
            "tensor": op.dst.tensor,
            "place": self._place(op.dst, moved, column),
            "buffer": first,
        }
        if acquire_of(self.kernel, op):
            return {**part, "acquired": True}
        assert op.semaphore is not None and op.order is not None
        start, ahead, rows = self.row(self.loop), self._next_start(), AXIS_DIM[self.loop]
        least = f"gl.maximum({ahead}, 0)" if self.reversed_group else ahead
        clamped = f"gl.minimum({least}, {self.kernel.traits.extent(self.loop)} - 1)"
        counter = self._counter_of(op.semaphore)
        further = (
            f"{start} + gl.where({REVERSED_GROUP} > 0, -{rows}, {rows})" if self.reversed_group else f"{start} + {rows}"
        )
        further = f"{self.loop}_ahead * {rows}" if self.module.blocks else further
        loop = next(o for o in only(self.kernel.ops(), pipe.PipelinedLoop) if op in self.kernel.block(o.step).ops)
        member, following = symbol(MEMBER), op.semaphore
        if loop.by_tile:  # next is the next head at this tile, or, after the last head, the first at the next tile
            ((low, high),) = loop.heads
            further = f"gl.where({MEMBER} + 1 < {self.scalar(high)}, {start}, {further})"
            next_head = select(member + 1 < high, member + 1, low)
            following = Access(following.tensor, tuple(e.xreplace({member: next_head}) for e in following.index))
        order = {
            "start": start,
            "ahead": ahead,
            "further": further,
            "counter": counter,
            "next": self._counter_of(following, clamped),
            "order": self.scalar(op.order),
        }
        return {**part, **order, "acquired": False}

    def _next_start(self) -> str:
        """The variable of the next tile's first row. With listed tiles, `ahead` is the number of the next tile, which
        loops read an iteration early."""
        return f"{self.loop}_{'next' if self.module.blocks else 'ahead'}"

    def _counter_of(self, semaphore: Access, at: str = "") -> str:
        """The address of a tile's semaphore, which counts the programs that have added to the tile.

        at: the first row of another tile, to address that one's semaphore.
        """
        tensor, (*head, row) = self.kernel.op(semaphore.tensor), semaphore.index
        if isinstance(tensor, tile.Base):
            return f"{self.var(tensor.name)} + {self.scalar(row)}"
        assert isinstance(tensor, tile.Arg)
        return f"{self._start(Access(semaphore.tensor, tuple(head)), tensor)} + {at or self.scalar(row)}"

    @handles(pipe.SemaphoreRelease)
    def _semaphore_release(self, op: pipe.SemaphoreRelease, cls: str) -> dict[str, Any]:
        return {"counter": self._counter_of(op.semaphore), "where": self._has_rows(op)}

    @handles(pipe.SemaphoreAcquire)
    def _semaphore_acquire(self, op: pipe.SemaphoreAcquire, cls: str) -> dict[str, Any]:
        """The semaphore value to wait for, counted in warps: each warp of an instance releases by one.

        adds: an ordered add follows, which reads the value, too.
        """
        adds = any(acquire_of(self.kernel, add) is op for add in only(self.kernel.ops(), tile.OrderedAdd))
        order = self.scalar(self._warps(op) * op.order)
        return {"counter": self._counter_of(op.semaphore), "order": order, "where": self._has_rows(op), "adds": adds}

    def _has_rows(self, op: pipe.SemaphoreAcquire | pipe.SemaphoreRelease) -> str:
        """The condition that an instance has rows of the program's tile; empty if the semaphore is another tile's."""
        start = self.row(self.own)
        return f"{start} < {self.kernel.traits.extent(self.own)}" if symbol(start) in op.semaphore.index else ""

    @handles(pipe.TmaStoreWait)
    def _tma_store_wait(self, op: pipe.TmaStoreWait, cls: str) -> dict[str, Any]:
        stores = (o for o in only(self.kernel.ops(), pipe.TmaStore) if o.staging == op.staging)
        return {"flag": "_INPUT_GRADIENTS" * any(self._is_input_gradient(o.dst.tensor) for o in stores)}

    @handles(pipe.TmaStore)
    def _tma_store(self, op: pipe.TmaStore, cls: str) -> dict[str, Any]:
        rows, columns = self._dims(self.kernel.type_of(op.value).dims)
        value, place, half = self.var(op.value), self._place(op.dst), self.pipelines[op.staging].type.dims[-1]
        halves = (
            [(f"{value}_left", place), (f"{value}_right", self._place(op.dst, column=half))] if half.isdigit() else []
        )
        widths, transposed = self._widths(self.kernel.type_of(op.value)), op.is_of_scores(self.kernel)
        index = self._stage(op.staging, "_WARP_GROUP")["index"] if transposed else "_WARP_GROUP"
        stage = f"{self._short(op.staging)}_smem.index({self._recomputed(index) if op.recompute else index})"
        text = {
            "pipeline": self._short(op.staging),
            "tensor": op.dst.tensor,
            "waits_until": self._reuse_comment(op),
            "value": value,
            "transposed": "yes" * transposed,
            "flag": "_INPUT_GRADIENTS" * self._is_input_gradient(op.dst.tensor),
            "order": self.scalar(op.order) if op.order is not None else "",
        }
        if widths:
            return {**text, "split": "", **self._store_pieces(op, stage, f"{rows}, {widths[0]}")}
        groups = [[(part, at, stage)] for part, at in halves or [(value, place)]]
        shape = f"{columns}, {rows}" if transposed else f"{rows}, {half if halves else columns}"
        return {**text, "split": "_split_halves" if halves else "", "seen": "", "groups": groups, "shape": shape}

    def _store_pieces(self, op: pipe.TmaStore, stage: str, shape: str) -> dict[str, Any]:
        """An output in pieces, which are stored through a stage as wide as a tile of V: as many at a time as fit."""
        width = self._widths(self.kernel.type_of(op.value))[0]
        room = self.module.head_dim_v // width
        places = [self._place(op.dst, column=str(i * width)) for i, _ in enumerate(self._parts(op.value))]
        found = [
            (part, at, f"pieces.index({i % room})") for i, (part, at) in enumerate(zip(self._parts(op.value), places))
        ]
        seen = f"pieces = _reinterpret({stage}, dtype, [{room}, 1, 1, {shape}], {op.dst.tensor}.layout)"
        return {"seen": seen, "groups": [found[at : at + room] for at in range(0, len(found), room)], "shape": shape}

    def _reuse_comment(self, op: pipe.TmaStore) -> str:
        """The comment on the wait for the store before this one through the same stage; empty if there is none."""
        same = [o for o in only(self.kernel.ops(), pipe.TmaStore) if o.staging == op.staging]
        flushed = any(only(self.kernel.block_of(op).ops, pipe.TmaStoreWait))
        if self.kernel.traits.is_persistent and not flushed:
            return "the previous tile's outputs have left the stage"
        return "the previous output has left the stage" if same.index(op) else ""
