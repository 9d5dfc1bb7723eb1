"""What a divided kernel computes, on NumPy: its roles as coroutines that wait for each other, in a random order.

Slots of rings are arrays. A fill is complete at a random later time, before which its slot holds NaN; so it does again
when all takers have given the tile back. A product reads its operands when it is awaited. So what a role reads too
early or too late shows in the results. A role that can never go on raises RolesStuck.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from attngen.errors import AttngenError
from attngen.interp.numeric import compiled
from attngen.interp.tile import Launch, Program, Values, applies, spread
from attngen.ir.expr import Expr
from attngen.ir.graph import REVERSED_GROUP
from attngen.ir.ops import (
    AXIS_DIM,
    AXIS_EXTENT,
    SIDES,
    Access,
    Block,
    Loop,
    Op,
    OrderedAccumulate,
    OrderedAdd,
    WarpGroup,
)
from attngen.ir.pipe import (
    HALVES,
    PARTIALS,
    PARTS,
    PIPE_KIND,
    WHOLE,
    ConcatHalves,
    ConsumerRelease,
    ConsumerWait,
    ConvertLayout,
    LocalLoad,
    Pack,
    PartialReduce,
    PinAfterWait,
    PinBeforeWait,
    Pipeline,
    PipelinedLoop,
    ProducerLoad,
    ProducerStore,
    ProducerTail,
    ReadMetadata,
    ReloadTile,
    Rematerialize,
    ScaledIota,
    SchedulerBarrier,
    SemaphoreAcquire,
    SemaphoreRelease,
    SliceRows,
    SoftmaxStats,
    SoftmaxWeights,
    SplitHalves,
    TmaStore,
    TmaStoreWait,
    Wgmma,
    WgmmaWait,
    WorkLoop,
    WriteTileIndex,
    ZeroOutOfBounds,
    bodies_of,
)

POISON = 2**30 + 1  # in a slot of numbers that nothing has filled
STAGES = 2  # of a ring whose number of slots is the schedule's
SUMS = 2  # of a row that is added up in chains


class Deadlock(AttngenError):
    """Every role that is not done waits for another one: names the kernel and the roles."""


@dataclass
class _Buffers:
    """A ring: the tile in each slot, how often it was filled and given back."""

    takers: int
    tiles: list[Any]
    fills: list[int]
    given: list[int]
    started: int = 0
    storing: bool = False  # the copy engine is to read from it
    shared: list[int] = field(default_factory=list)  # how often each copy has written its part of a slot
    beside: dict[str, Any] = field(default_factory=dict)  # rings of numbers that lie beside it, by name
    relayed: dict[str, int] = field(default_factory=dict)  # how many tiles each role has shared through a ring in relay

    def poison(self, stage: int) -> None:
        self.tiles[stage][...] = np.nan
        for numbers in self.beside.values():
            numbers[stage] = POISON


class WarpSpecializedLaunch(Launch):
    """The ops of a divided kernel, beside those that all kernels have."""

    chance = random.Random(0)

    @cached_property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Those of the results of pipelines, too."""
        pipelined_loops = [op for op in self.kernel.ops() if isinstance(op, PipelinedLoop)]
        return super().dims | {
            f"{op.name}.{field}": self.kernel.type_of(ref).dims for op in pipelined_loops for field, ref in op.carry
        }

    def programs(self, places: list[dict[str, int]], start: Values) -> Iterator[Program]:
        """One for each place; of programs that stay, a random number, which share the places by a counter.

        Those that wait for each other run beside each other."""
        if waits := self.kernel.adds:
            first = self.kernel.grid[0]
            places = sorted(
                places,
                key=lambda at: -at[first.var] if first.reversed and not at.get(REVERSED_GROUP) else at[first.var],
            )
        running = super().programs(places, start)
        if self.kernel.is_persistent:
            count = self.chance.randint(1, len(places)) if places else 0
            shared = {**start, "places": places, "counter": iter(range(0 if waits else count, len(places)))}
            running = (self.program({}, {**shared, "own": own}) for own in range(count))
        return iter([self.resident(deque(running))]) if waits else running

    def resident(self, left: deque[Program]) -> Program:
        """Programs that wait for each other: a random number has room at one time, and they start in their order.

        Raises RolesStuck where all that have started wait for ever.
        """
        most, running, stuck = self.chance.randint(1, 4), list[Program](), 0
        while left or running:
            while left and len(running) < most:
                running.append(left.popleft())
            one = self.chance.choice(running)
            try:
                stuck = stuck + 1 if next(one) else 0
            except StopIteration:
                running.remove(one)
                stuck = 0
            if stuck > 50 * most:
                raise Deadlock(f"@{self.kernel.name}: programs wait for turns for ever")
        return {}
        yield

    def program(self, place: Mapping[str, int], start: Values) -> Any:
        """All roles of a program, in turns. It pauses where all that is left to do may wait for other programs."""
        values = {
            "num_stages": STAGES,
            PARTIALS: SUMS,
            **{half: start[whole] // 2 for whole, half in HALVES.items()},
            **start,
        }
        instances = self.kernel.sharing_warp_group.instances
        values |= {whole: start[own] for own, whole in WHOLE.items()}
        values |= {part: start[of] // instances for of, part in PARTS.items() if of in start}
        values |= {**dict.fromkeys(SIDES.values(), start["D_V"] // 2), "right_v_start": start["D_V"] // 2}
        for axis, number in place.items():
            values |= self.turn(axis, number, values)
        pending: list[Callable[[], None]] = []
        values["pending"] = pending
        yield from self.block("entry", values, "entry")
        waiting = {}
        for block in self.kernel.warp_groups:
            assert block.warp_group is not None
            passed: set[int] = set()
            for copy in range(block.warp_group.instances):
                waiting[f"{block.name} {copy}"] = self.warp_group(
                    block, block.warp_group, copy, {**values, "passed": passed}
                )
        stuck = 0
        while waiting:
            if pending and self.chance.random() < 0.3:
                pending.pop(self.chance.randrange(len(pending)))()
                stuck = 0
            name = self.chance.choice(sorted(waiting))
            try:
                stuck = stuck + 1 if next(waiting[name]) else 0
            except StopIteration:
                del waiting[name]
                stuck = 0
            if stuck > 200 * len(waiting) and not pending:
                if not self.kernel.adds:
                    raise Deadlock(f"@{self.kernel.name}: {', '.join(sorted(waiting))} wait for ever")
                yield True
        return {}

    def warp_group(
        self, block: Block, warp_group: WarpGroup, copy: int, values: Values
    ) -> Generator[bool, None, Values]:
        """A copy of a role: the program's tile is divided among those that have rows. It yields whether it is
        waiting."""
        mine = {
            **values,
            "role": block.name,
            "copy": copy,
            "taken": {},
            "parts": warp_group.instances if warp_group.rows else 1,
        }
        mine["own rings"] = {op.pipeline for op in self.kernel.within(block.name) if isinstance(op, ConsumerWait)}
        if f"{self.kernel.program_axis}_start" in values:
            mine |= self.share(copy, mine["parts"], values)
        return (yield from self.block(block.name, mine, "entry"))

    def share(self, copy: int, instances: int, values: Values) -> Values:
        """What one copy's part of the program's rows is: all of them, where `instances` is 1."""
        own = self.kernel.program_axis
        rows = values[AXIS_DIM[own]] // instances
        first = values[f"{own}_start"] + copy % instances * rows
        return {AXIS_DIM[own]: rows, f"{own}_start": first, f"{own}_idx": first + np.arange(rows)}

    # ------------------------------------------------------------------ control

    def block(self, name: str, values: Values, cls: str) -> Any:
        """Run a block's ops; those of roles may wait."""
        values["cls"] = cls
        for op in self.kernel.block(name).ops:
            if type(op) not in PIPE_KIND:
                found = yield from self.ops((op,), values, cls)
                if found:
                    return found
                continue
            yield from getattr(self, f"_{PIPE_KIND[type(op)]}")(op, values)
        return {}

    def add(self, op: OrderedAdd | OrderedAccumulate, values: Values, cls: str) -> Any:
        """The same, and it says that it waits."""
        for _ in super().add(op, values, cls):
            yield True
        return values

    def passed(self, turns: Access, values: Values) -> None:
        if not any(isinstance(op, SemaphoreRelease) for op in self.kernel.ops()):
            super().passed(turns, values)

    def _semaphore_acquire(self, op: SemaphoreAcquire, values: Values) -> Any:
        if self._takes_turns(values):
            for _ in self.await_turn(op.semaphore, op.order, values):
                yield True
        yield False

    def _semaphore_release(self, op: SemaphoreRelease, values: Values) -> Any:
        if self._takes_turns(values):
            super().passed(op.semaphore, values)
        yield False

    def _takes_turns(self, values: Values) -> bool:
        """Whether the copy has rows of the program's tile."""
        own = self.kernel.program_axis
        return bool(values[f"{own}_start"] < values[AXIS_EXTENT[own]])

    def _work_loop(self, op: WorkLoop, values: Values) -> Any:
        """The body for the program's own tile, and for those that are drawn. The place of each, here its number, is
        told to the others."""
        number = next(values["counter"], -1) if op.draws and self.kernel.adds else values["own"]
        while True:
            if op.draws:
                yield from self._start(op.pipeline, values, lambda *_, number=number: np.asarray(number))
            else:
                buffers, stage = yield from self._next(op.pipeline, values)
                number = int(buffers.tiles[stage])
            if number >= 0:
                tile = dict(values)
                for axis, at in values["places"][number].items():
                    tile |= self.turn(axis, at, tile)
                yield from self.block(op.of, tile, "entry")
                yield from self.block(op.body, tile | self.share(values["copy"], values["parts"], tile), "entry")
            if not op.draws:
                self._given(buffers, stage)
            if number < 0:
                return
            number = next(values["counter"], -1) if op.draws else number

    def _reload_tile(self, op: ReloadTile, values: Values) -> Any:
        yield False

    def _pipelined_loop(self, op: PipelinedLoop, values: Values) -> Any:
        carried = {field: values[ref] for field, ref in op.carry}
        partial, full = (
            list(self.numbers(_loop(op, cls, ranges), values))
            for cls, ranges in (("partial", op.partial), ("full", op.full))
        )
        cut, hidden = len(partial), 0
        for first, end in op.instance_partial:
            cut, hidden = (int(self.expression(op.partial[0][1] - bound, values)) for bound in (first, end))
        for _ in range(hidden):
            yield from self.block(op.skip, dict(values), "full")
        numbers = [*(reversed(partial) if op.reversed else partial), *full]
        turns = [("partial" if at < cut else "full", number) for at, number in enumerate(numbers)][hidden:]
        turns = (
            sorted(turns, key=lambda turn: turn[1], reverse=bool(values.get(REVERSED_GROUP))) if op.in_order else turns
        )
        for at, (head, (cls, number)) in enumerate(self.by_head(op, turns, values)):
            if op.round_robin and not self.is_mine(op.round_robin, values):
                continue
            if op.pair and at % 2 == 0 and at + 1 < len(turns):
                continue  # it has one turn with the next tile
            body = (
                (op.odd or op.pair) if (op.odd or op.pair) and at % 2 else op.step if at or not op.first else op.first
            )
            inside = {**values, **head, **self.named(op, body, carried), **self.turn(op.var, number, values)}
            carried = yield from self.block(body, inside, "partial" if body == op.first else cls)
        if turns and op.last:
            carried = yield from self.block(op.last, {**values, **self.named(op, op.last, carried)}, "full")
        values |= {f"{op.name}.{field}": x for field, x in carried.items()}

    def is_mine(self, pipeline: str, values: Values) -> bool:
        """Whether the next tile of a ring is in the slot of the copy's own number. If not, it is counted as taken."""
        taken, stages = values["taken"], len(self.mine(pipeline, values).tiles)
        if taken.get(pipeline, 0) % stages == values["copy"]:
            return True
        taken[pipeline] = taken.get(pipeline, 0) + 1
        return False

    def named(self, op: PipelinedLoop, body: str, carried: Values) -> Values:
        """The carried values by the names of a body's arguments."""
        return {arg.name: carried[op.field(arg.name, body)] for arg in self.args(body)}

    def args(self, body: str) -> Iterator[Op]:
        return (op for op in self.kernel.block(body).ops if hasattr(op, "role"))

    # ------------------------------------------------------------------ rings

    def _pipeline(self, op: Pipeline, values: Values) -> Any:
        if op.beside:
            tiles = values[op.beside][0]
            tiles.beside[op.name] = np.full(
                (len(tiles.tiles), *self.shape(op.type.dims, values)), POISON, self.dtypes[op.type.dtype]
            )
            return
        owner = next((b.warp_group for b in self.kernel.warp_groups if b.name == op.per_instance), None)
        instances = owner.instances if owner else 1
        own = AXIS_DIM[self.kernel.program_axis]
        sizes = {**values, own: values[own] // instances}
        takers = sum(
            b.warp_group.instances for b in self.kernel.warp_groups if b.warp_group and self.takes(b.name, op.name)
        )
        takers = 1 if op.exchange or op.name in self.kernel.round_robin else takers
        stages = int(compiled(op.stages)(values))
        sharing = (
            b.warp_group
            for b in self.kernel.warp_groups
            if any(self.shares(o, op.name) for o in self.kernel.within(b.name))
        )
        writers = sum(warp_group.instances for warp_group in sharing if warp_group)
        found = []
        for _ in range(instances):
            tiles = [np.full(self.lying(op, sizes), np.nan, self.dtypes["T"]) for _ in range(stages)]
            found.append(
                _Buffers(1 if op.per_instance else takers, tiles, [0] * stages, [0] * stages, shared=[0] * writers)
            )
        values[op.name] = found
        yield from ()

    @staticmethod
    def shares(op: Op, pipeline: str) -> bool:
        return isinstance(op, ProducerStore) and op.pipeline == pipeline

    def _producer_store(self, op: ProducerStore, values: Values) -> Any:
        """Write the copy's part of the next slot: of the first dimension of which it has fewer than the tile."""
        (buffers,), copy = values[op.pipeline], values["copy"]
        for pipeline, ref in op.beside:
            buffers.beside[pipeline][0] = values[ref]
        if self.pipeline(op.pipeline).exchange:
            buffers.tiles[0][...] = values[op.value]
            buffers.relayed[values["role"]] = buffers.relayed.get(values["role"], 0) + 1
            yield False
            return
        use, n = buffers.shared[copy], len(buffers.tiles)
        stage = use % n
        while op.pipeline not in values["own rings"] and buffers.given[stage] < buffers.takers * (use // n):
            yield True
        tile, part = buffers.tiles[stage], values[op.value]
        place = [slice(None)] * tile.ndim
        for axis, (whole, mine) in enumerate(zip(tile.shape, part.shape)):
            if whole != mine:
                place[axis] = slice(copy * mine, (copy + 1) * mine)
                break
        tile[tuple(place)] = part
        buffers.shared[copy] += 1
        if min(buffers.shared) > use:
            buffers.fills[stage] += 1
        yield False

    def _slice_rows(self, op: SliceRows, values: Values) -> Any:
        rows = len(values[op.value]) // values["parts"]
        values[op.name] = values[op.value][values["copy"] * rows : (values["copy"] + 1) * rows]
        yield from ()

    def _rematerialize(self, op: Rematerialize, values: Values) -> Any:
        values[op.name] = values[op.value]
        yield from ()

    def lying(self, pipeline: Pipeline, values: Values) -> tuple[int, ...]:
        """The shape of a ring's tile in its slot: pieces are whole."""
        shape = self.shape(pipeline.type.dims, values)
        return (*shape[:-1], -(-shape[-1] // pipeline.columns) * pipeline.columns) if pipeline.columns else shape

    def takes(self, block: str, pipeline: str) -> bool:
        """Whether a role takes tiles from a ring."""
        for op in self.kernel.block(block).ops:
            of_numbers = isinstance(op, WorkLoop) and op.pipeline == pipeline and not op.draws
            if (
                of_numbers
                or (isinstance(op, ConsumerWait) and op.pipeline == pipeline)
                or any(self.takes(body, pipeline) for body in bodies_of(op))
            ):
                return True
        return False

    def _producer_load(self, op: ProducerLoad, values: Values) -> Any:
        if op.pipeline not in values:
            return  # it lies beside another one, whose fill comes next
        instances = len(values[op.pipeline])
        beside = [
            o
            for o in self.kernel.ops()
            if isinstance(o, (ProducerLoad, WriteTileIndex)) and o.pipeline in values[op.pipeline][0].beside
        ]
        numbers = {
            o.pipeline: self.read(o, values) if isinstance(o, ProducerLoad) else self.visited(values) for o in beside
        }
        yield from self._start(
            op.pipeline, values, lambda _, copy: self.read(op, values | self.share(copy, instances, values)), numbers
        )

    def _start(
        self, pipeline: str, values: Values, tile: Callable[[_Buffers, int], Any], numbers: Values | None = None
    ) -> Any:
        """Fill the next slot of every copy's ring, once all are free, and with `numbers` that of rings beside it."""
        for buffers in values[pipeline]:
            while buffers.given[buffers.started % len(buffers.tiles)] < buffers.takers * (
                buffers.started // len(buffers.tiles)
            ):
                yield True
        for copy, buffers in enumerate(values[pipeline]):
            values["pending"].append(
                self.arrival(buffers, buffers.started % len(buffers.tiles), tile(buffers, copy), numbers or {})
            )
            buffers.started += 1
            yield False

    @staticmethod
    def arrival(buffers: _Buffers, stage: int, tile: Any, numbers: Values) -> Callable[[], None]:
        def arrive() -> None:
            buffers.tiles[stage][...] = tile
            for name, x in numbers.items():
                buffers.beside[name][stage] = x
            buffers.fills[stage] += 1

        return arrive

    def pipeline(self, name: str) -> Pipeline:
        found = self.kernel.op(name)
        assert isinstance(found, Pipeline)
        return found

    def read(self, op: ProducerLoad, values: Values) -> Any:
        """A tile as the copy engine reads it: 0 where it is out of bounds."""
        pipeline = self.pipeline(op.pipeline)
        tile = np.zeros(self.lying(pipeline, values), self.dtypes[pipeline.type.dtype])
        if self.kernel.reads_cache:  # of which rows past the end of the sequence are read, too
            values = {**values, "Nk": values["Nc"]}
        places, part = self.inside(op.src, values)
        if op.page:
            head, rows, columns = places
            first = rows.start % values[op.src.tensor].shape[2]
            places = (values[op.page], head, slice(first, first + rows.stop - rows.start), columns)
        tile[part] = values[op.src.tensor][places]
        return tile

    def inside(self, access: Access, values: Values, first: int = 0, columns: int | None = None) -> tuple[Any, Any]:
        """Where a tile, or some of its columns, is in the tensor; and which of its rows and columns are in bounds."""
        places: list[Any] = []
        part = []
        for e in access.index:
            axis = str(e)
            if axis not in AXIS_DIM:
                places.append(int(self.expression(e, values)))
                continue
            start, size = values.get(f"{axis}_start", first), values[AXIS_DIM[axis]]
            size = columns if columns and axis.startswith("d_") else size
            end = max(start, min(start + size, values["D_V" if axis in SIDES else AXIS_EXTENT[axis]]))
            places.append(slice(start, end))
            part.append(slice(0, end - start))
        return tuple(places), tuple(part)

    def mine(self, pipeline: str, values: Values) -> _Buffers:
        of: list[_Buffers] = values[pipeline]
        return of[values["copy"] if len(of) > 1 else 0]

    def visited(self, values: Values) -> Any:
        """The number of the tile that a loop has come to."""
        axis = self.kernel.loop_axis
        return values[f"{axis}_start"] // values[AXIS_DIM[axis]]

    def _consumer_wait(self, op: ConsumerWait, values: Values) -> Any:
        buffers, stage = yield from self._next(op.pipeline, values)
        values[op.name] = buffers.tiles[stage]
        told = [
            buffers.beside[o.pipeline][stage]
            for o in self.kernel.ops()
            if isinstance(o, WriteTileIndex) and o.pipeline in buffers.beside
        ]
        if told and told != [tile := self.visited(values)]:
            raise AttngenError(f"@{self.kernel.name}: the tile {tile} is told to be {told[0]}")
        yield False

    def _next(self, pipeline: str, values: Values) -> Any:
        """The ring, and its slot that this role takes next, once that is full."""
        buffers, taken = self.mine(pipeline, values), values["taken"]
        use = taken.get(pipeline, 0)
        stage = use % len(buffers.tiles)
        relay = self.pipeline(pipeline).exchange
        while (
            (self.shared_by_other(buffers, values) <= use)
            if relay
            else (buffers.fills[stage] <= use // len(buffers.tiles))
        ):
            yield True
        taken[pipeline] = use + 1
        return buffers, stage

    @staticmethod
    def shared_by_other(buffers: _Buffers, values: Values) -> int:
        """How many tiles the other role has shared through a ring in relay."""
        return sum(count for warp_group, count in buffers.relayed.items() if warp_group != values["role"])

    def _read_metadata(self, op: ReadMetadata, values: Values) -> Any:
        buffers, stage = self.held(op.beside, values)
        values[op.name] = buffers.beside[op.pipeline][stage].copy()
        yield from ()

    def _local_load(self, op: LocalLoad, values: Values) -> Any:
        tile = values[op.value]
        values[op.name] = (tile if self.kernel.type_of(op.value).dims == op.type.dims else tile.T).copy()
        yield from ()

    def _write_tile_index(self, op: WriteTileIndex, values: Values) -> Any:
        yield from ()  # the fill of the tile comes next

    def _zero_out_of_bounds(self, op: ZeroOutOfBounds, values: Values) -> Any:
        if values["cls"] == "partial":
            axis = self.kernel.loop_axis
            values[op.value][values[f"{axis}_idx"] >= values[AXIS_EXTENT[axis]]] = 0
        yield False

    def _consumer_release(self, op: ConsumerRelease, values: Values) -> Any:
        self._given(*self.held(op.value, values))
        yield False

    def held(self, ref: str, values: Values) -> tuple[_Buffers, int]:
        """The ring of a tile that is taken, and its slot."""
        take = self.kernel.op(ref)
        assert isinstance(take, ConsumerWait)
        buffers = self.mine(take.pipeline, values)
        return buffers, next(i for i, tile in enumerate(buffers.tiles) if tile is values[ref])

    @staticmethod
    def _given(buffers: _Buffers, stage: int) -> None:
        buffers.given[stage] += 1
        if buffers.given[stage] % buffers.takers == 0:
            buffers.poison(stage)

    def _producer_tail(self, op: ProducerTail, values: Values) -> Any:
        for buffers in values[op.pipeline]:
            for stage in range(len(buffers.tiles)):
                while buffers.given[stage] < buffers.takers * len(range(stage, buffers.started, len(buffers.tiles))):
                    yield True
        yield False

    def _tma_store(self, op: TmaStore, values: Values) -> Any:
        """Through the copy's own slot, from which all rows inside the tensor are stored later; as many columns at a
        time as fit it."""
        if op.is_of_scores(self.kernel):
            yield from self._put_scores(op, values)
            return
        tile = self.mine(op.staging, values).tiles[0]
        width = values[op.value].shape[1]
        columns = min(width, tile.shape[1])
        for first in range(0, width, columns):
            yield from self._tma_store_wait(op, values)
            part = values[op.value][:, first : first + columns]
            tile[:, : part.shape[1]] = part
            self.stored(op, values, tile, first, part.shape[1])
            yield False

    def _put_scores(self, op: TmaStore, values: Values) -> Any:
        """Transposed, through the slot that the copy has taken."""
        yield from self._tma_store_wait(op, values)
        tiles = self.mine(op.staging, values).tiles
        tile = tiles[(values["taken"][op.staging] - 1) % len(tiles)]
        tile[...] = values[op.value].T
        self.stored(op, values, tile, 0, tile.shape[1])
        yield False

    def stored(self, op: TmaStore, values: Values, tile: Any, first: int, columns: int) -> None:
        """Store, at a later time, what is in a slot as the columns of an output from `first` on."""
        places, part = self.inside(op.dst, values, first, columns)
        buffers = self.mine(op.staging, values)

        joins = op.order is not None and int(self.expression(op.order, values)) > 0

        def store() -> None:
            target = values[op.dst.tensor]
            target[places] = target[places] + tile[part] if joins else tile[part]
            buffers.storing = False

        buffers.storing = True
        values["pending"].append(store)

    def _tma_store_wait(self, op: TmaStoreWait | TmaStore, values: Values) -> Any:
        """Until the copy engine has stored what the last put wrote."""
        while self.mine(op.staging, values).storing:
            yield True

    def _scheduler_barrier(self, op: SchedulerBarrier, values: Values) -> Any:
        """`passed` has the copies whose turn it is. A pass before the copy has taken its last turn is lost."""
        passed, copy, instances = values["passed"], values["copy"], values["parts"]
        if op.do == "arrive" or (op.do == "init" and copy == instances - 1):
            passed.add((copy + 1) % instances)
        elif op.do == "sync" or (op.do == "tail" and copy == 0):
            while copy not in passed:
                yield True
            passed.remove(copy)
        yield False

    # ------------------------------------------------------------------ products

    def _wgmma(self, op: Wgmma, values: Values) -> Any:
        values[op.name] = op
        yield False

    def _wgmma_wait(self, op: WgmmaWait, values: Values) -> Any:
        """The product, of its operands as they are now."""
        issue = self.kernel.op(op.value)
        assert isinstance(issue, Wgmma)
        values[op.name] = self.product(issue, values)
        yield False

    def product(self, issue: Wgmma, values: Values) -> Any:
        """A product, with what it goes on from."""
        of_a, of_b = self.dims[issue.a], self.dims[issue.b]
        rows, columns = (next(d for d in dims if d != issue.over) for dims in (of_a, of_b))
        a, b = spread(values[issue.a], of_a, (rows, issue.over)), spread(values[issue.b], of_b, (issue.over, columns))
        n, m = self.shape(issue.type.dims, values)  # of a copy's part, if copies divide the product
        a = a[n * values["copy"] :][:n] if len(a) != n else a
        b = b[:, m * values["copy"] :][:, :m] if b.shape[1] != m else b
        found = np.matmul(a, b, dtype=self.dtypes[issue.type.dtype])
        if issue.acc is None:
            return found
        before = self.kernel.op(issue.acc)
        return found + (self.product(before, values) if isinstance(before, Wgmma) else values[issue.acc])

    def _convert_layout(self, op: ConvertLayout | PinAfterWait | PinBeforeWait | Pack, values: Values) -> Any:
        values[op.name] = self.tile(values[op.value], op.type, values)
        yield from ()

    _pin_before_wait = _pin_after_wait = _pack = _convert_layout

    # ------------------------------------------------------------------ softmax in parts

    def _softmax_stats(self, op: SoftmaxStats, values: Values) -> Any:
        m, scale = values[op.m], values[op.scale] if op.scale else 1
        shift = values[op.shift] if op.shift else 0
        m_new = np.maximum(m, values[op.s].max(axis=1) + shift)
        seen = np.where(m_new == -np.inf, m_new.dtype.type(0), m_new) if applies(op.guard, values["cls"]) else m_new
        values |= {
            f"{op.name}.base": seen * scale - shift,
            f"{op.name}.alpha": np.exp2((m - seen) * scale),
            f"{op.name}.m": m_new,
        }
        yield from ()

    def _softmax_weights(self, op: SoftmaxWeights, values: Values) -> Any:
        values[op.name] = np.exp2(values[op.s] * (values[op.scale] if op.scale else 1) - values[op.base][:, None])
        yield from ()

    def _partial_reduce(self, op: PartialReduce, values: Values) -> Any:
        value = values[op.value]
        values[op.name] = value.reshape(len(value), -1, values[PARTIALS]).sum(axis=1)
        yield from ()

    def _scaled_iota(self, op: ScaledIota, values: Values) -> Any:
        (size,) = self.shape(op.type.dims, values)
        values[op.name] = (values[op.value] * np.arange(size)).astype(self.dtypes[op.type.dtype])
        yield from ()

    def _split_halves(self, op: SplitHalves, values: Values) -> Any:
        halves = np.split(values[op.value], 2, axis=self.dims[op.value].index(op.over))
        values |= {f"{op.name}.{field}": half for field, half in zip(op.results(), halves)}
        yield from ()

    def _concat_halves(self, op: ConcatHalves, values: Values) -> Any:
        values[op.name] = np.concatenate([values[op.a], values[op.b]], axis=op.type.dims.index(op.over))
        yield from ()


def _loop(op: PipelinedLoop, cls: str, ranges: tuple[tuple[Expr, Expr], ...]) -> Loop:
    return Loop(op.name, op.var, ranges, (), op.step, cls, listed=op.listed)
