"""Execute a warp-specialized kernel on NumPy: its warp groups are coroutines that wait for each other, in a random
order.

Loads and stores complete at random later times (interp/pipelines.py), and a product reads its operands when it is
waited for, so that a read that comes too early or too late shows in the results. If no warp group can go on, Deadlock
is raised.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from attngen.errors import AttngenError
from attngen.interp.async_ops import AsyncOps
from attngen.interp.pipelines import PipelineOps
from attngen.interp.tile import CONTROL
from attngen.interp.values import Program, Values
from attngen.ir import AXIS_EXTENT, REVERSED_GROUP, SIDES, Access, Block, Expr, Op, WarpGroup, only, pipe, tile
from attngen.ir.behaviour import handles

STAGES = 2  # of a pipeline with `num_stages` stages


PARTIAL_SUMS = 2  # per row, see partial_reduce


class Deadlock(AttngenError):
    """All unfinished warp groups wait for one another. Names the kernel and the warp groups."""


class WarpSpecializedLaunch(PipelineOps, AsyncOps, complete=pipe.PIPE, control=CONTROL):
    """Runs the ops of a warp-specialized kernel, including those that all kernels have."""

    chance = random.Random(0)

    @cached_property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Also those of the results of pipelined loops."""
        pipelined_loops = list(only(self.kernel.ops(), pipe.PipelinedLoop))
        return super().dims | {
            f"{op.name}.{field}": self.kernel.type_of(ref).dims for op in pipelined_loops for field, ref in op.carry
        }

    def programs(self, places: list[dict[str, int]], start: Values) -> Iterator[Program]:
        """One program per place, or, for persistent programs, a random number of programs that share the places by a
        counter. Programs that wait for each other run concurrently."""
        if waits := self.kernel.traits.adds_in_order:
            first = self.kernel.grid[0]
            places = sorted(
                places,
                key=lambda at: -at[first.var] if first.reversed and not at.get(REVERSED_GROUP) else at[first.var],
            )
        running = super().programs(places, start)
        if self.kernel.traits.is_persistent:
            count = self.chance.randint(1, len(places)) if places else 0
            shared = {**start, "places": places, "counter": iter(range(0 if waits else count, len(places)))}
            running = (self.program({}, {**shared, "own": own}) for own in range(count))
        return iter([self.resident(deque(running))]) if waits else running

    def resident(self, left: deque[Program]) -> Program:
        """Run programs that wait for each other: a random number is resident at a time, and they start in order. Raises
        Deadlock if all that have started wait for ever."""
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
                raise Deadlock(f"@{self.kernel.name}: programs wait for semaphores for ever")
        return {}
        yield

    def program(self, place: Mapping[str, int], start: Values) -> Any:
        """Run all warp groups of a program in a random order. It pauses if everything that is left may wait for other
        programs."""
        values = {
            "num_stages": STAGES,
            pipe.PARTIALS: PARTIAL_SUMS,
            **{half: start[whole] // 2 for whole, half in pipe.HALF_DIM.items()},
            **start,
        }
        instances = self.kernel.traits.sharing_warp_group.instances
        values |= {whole: start[own] for own, whole in pipe.TILE_DIM.items()}
        values |= {part: start[of] // instances for of, part in pipe.SLICE_DIM.items() if of in start}
        values |= {**dict.fromkeys(SIDES.values(), start["D_V"] // 2), "right_v_start": start["D_V"] // 2}
        for axis, number in place.items():
            values |= self.position(axis, number, values)
        pending: list[Callable[[], None]] = []
        values["pending"] = pending
        yield from self.block("entry", values, "entry")
        waiting = {}
        for block in self.kernel.warp_groups:
            assert block.warp_group is not None
            arrived: set[int] = set()
            for instance in range(block.warp_group.instances):
                waiting[f"{block.name} {instance}"] = self.warp_group(
                    block, block.warp_group, instance, {**values, "arrived": arrived}
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
                if not self.kernel.traits.adds_in_order:
                    raise Deadlock(f"@{self.kernel.name}: {', '.join(sorted(waiting))} wait for ever")
                yield True
        return {}

    def warp_group(
        self, block: Block, warp_group: WarpGroup, instance: int, values: Values
    ) -> Generator[bool, None, Values]:
        """Run an instance of a warp group: the program's tile is split among instances with rows. Yields whether it
        waits."""
        mine = {
            **values,
            "warp_group": block.name,
            "instance": instance,
            "taken": {},
            "parts": warp_group.instances if warp_group.rows else 1,
        }
        mine["own pipelines"] = {op.pipeline for op in only(self.kernel.within(block.name), pipe.ConsumerWait)}
        if f"{self.kernel.program_axis}_start" in values:
            mine |= self.share(instance, mine["parts"], values)
        return (yield from self.block(block.name, mine, "entry"))

    def block(self, name: str, values: Values, cls: str) -> Any:
        """Run a block's ops; ops of warp groups may wait."""
        values["cls"] = cls
        for op in self.kernel.block(name).ops:
            if op.kind in tile.TILE.own:
                found = yield from self.ops((op,), values, cls)
                if found:
                    return found
                continue
            yield from self.handler(op)(op, values)
        return {}

    def add_in_order(self, op: tile.OrderedAdd | tile.OrderedAccumulate, values: Values, cls: str) -> Any:
        """As in Launch, and yield that it waits."""
        for _ in super().add_in_order(op, values, cls):
            yield True
        return values

    def release(self, semaphore: Access, values: Values) -> None:
        if not any(only(self.kernel.ops(), pipe.SemaphoreRelease)):
            super().release(semaphore, values)

    @handles(pipe.SemaphoreAcquire)
    def _semaphore_acquire(self, op: pipe.SemaphoreAcquire, values: Values) -> Any:
        if self._has_rows(values):
            for _ in self.wait_for_order(op.semaphore, op.order, values):
                yield True
        yield False

    @handles(pipe.SemaphoreRelease)
    def _semaphore_release(self, op: pipe.SemaphoreRelease, values: Values) -> Any:
        if self._has_rows(values):
            super().release(op.semaphore, values)
        yield False

    def _has_rows(self, values: Values) -> bool:
        """True if the first row of the instance is inside the tensor."""
        axis = self.kernel.program_axis
        return bool(values[f"{axis}_start"] < values[AXIS_EXTENT[axis]])

    @handles(pipe.WorkLoop)
    def _work_loop(self, op: pipe.WorkLoop, values: Values) -> Any:
        """Run the body for the program's own tile and for each that it fetches. The place of each, here its number, is
        passed to the other warp groups."""
        number = next(values["counter"], -1) if op.fetches and self.kernel.traits.adds_in_order else values["own"]
        while True:
            if op.fetches:
                yield from self.pass_on(op, number, values)
            else:
                number = yield from self.receive(op, values)
            if number >= 0:
                tile = dict(values)
                for axis, at in values["places"][number].items():
                    tile |= self.position(axis, at, tile)
                tile["prefetched"] = []
                yield from self.block(op.of, tile, "entry")
                yield from self.block(op.body, tile | self.share(values["instance"], values["parts"], tile), "entry")
            if not op.fetches:
                self.release_work(op, values)
            if number < 0:
                return
            if op.fetches:
                number = tile["prefetched"].pop() if tile["prefetched"] else next(values["counter"], -1)

    def pass_on(self, op: pipe.WorkLoop, number: int, values: Values) -> Any:
        """Pass the number of a work tile to the other warp groups."""
        yield from self._start(op.pipeline, values, lambda *_: np.asarray(number))

    def receive(self, op: pipe.WorkLoop, values: Values) -> Any:
        """The number of the next work tile."""
        buffers, stage = values["work tile"] = yield from self._next(op.pipeline, values)
        return int(buffers.tiles[stage])

    def release_work(self, op: pipe.WorkLoop, values: Values) -> None:
        """Release the stage of the work tile."""
        self._release(*values["work tile"])

    @handles(pipe.PrefetchTile)
    def _prefetch_tile(self, op: pipe.PrefetchTile, values: Values) -> Any:
        values["prefetched"].append(next(values["counter"], -1))
        yield False

    @handles(pipe.ReloadTile)
    def _reload_tile(self, op: pipe.ReloadTile, values: Values) -> Any:
        yield False

    @handles(pipe.PipelinedLoop)
    def _pipelined_loop(self, op: pipe.PipelinedLoop, values: Values) -> Any:
        carried = {field: values[ref] for field, ref in op.carry}
        partial, full = (self.numbers(loop, values) for loop in op.by_class)
        partials, hidden = len(partial), 0
        for first, end in op.instance_partial:
            last = int(self.expression(op.partial[0][1], values))
            partials, hidden = (last - self.tile_of_instance(op.var, bound, values) for bound in (first, end))
        for _ in range(hidden):
            yield from self.block(op.skip, dict(values), "full")
        tiles = [("partial" if at < partials else "full", number) for at, number in enumerate(partial + full)][hidden:]
        if op.in_order:
            tiles = sorted(tiles, key=lambda tile: tile[1], reverse=bool(values.get(REVERSED_GROUP)))
        for at, (head, (cls, number)) in enumerate(self.by_head(op, tiles, values)):
            if op.round_robin and not self.is_mine(op.round_robin, values):
                continue
            if op.pair and at % 2 == 0 and at + 1 < len(tiles):
                continue  # it is visited together with the next tile
            body = (
                (op.odd or op.pair) if (op.odd or op.pair) and at % 2 else op.step if at or not op.first else op.first
            )
            inside = {**values, **head, **self.named(op, body, carried), **self.position(op.var, number, values)}
            carried = yield from self.block(body, inside, "partial" if body == op.first else cls)
        if tiles and op.last:
            carried = yield from self.block(op.last, {**values, **self.named(op, op.last, carried)}, "full")
        values |= {f"{op.name}.{field}": x for field, x in carried.items()}

    def tile_of_instance(self, axis: str, bound: Expr, values: Values) -> int:
        """A bound for the rows of an instance: if calls have chunks of a sequence, its position among their tiles."""
        if self.kernel.traits.places:
            return self.tile_of_call(axis, bound, values)
        return int(self.expression(bound, values))

    def is_mine(self, pipeline: str, values: Values) -> bool:
        """True if the next tile of a pipeline is in the stage with the instance's number. If not, the tile is counted
        as taken."""
        taken, stages = values["taken"], len(self.buffers(pipeline, values).tiles)
        if taken.get(pipeline, 0) % stages == values["instance"]:
            return True
        taken[pipeline] = taken.get(pipeline, 0) + 1
        return False

    def named(self, op: pipe.PipelinedLoop, body: str, carried: Values) -> Values:
        """The carried values by the names of a body's arguments."""
        return {arg.name: carried[op.field_of(arg.name, body)] for arg in self.args(body)}

    def args(self, body: str) -> Iterator[Op]:
        return (op for op in self.kernel.block(body).ops if hasattr(op, "role"))

    @handles(pipe.SchedulerBarrier)
    def _scheduler_barrier(self, op: pipe.SchedulerBarrier, values: Values) -> Any:
        """`arrived` has the instances whose barrier has an arrival. Two arrivals before a sync count once."""
        arrived, instance, instances = values["arrived"], values["instance"], values["parts"]
        if op.do == "arrive" or (op.do == "init" and instance == instances - 1):
            arrived.add((instance + 1) % instances)
        elif op.do == "sync" or (op.do == "tail" and instance == 0):
            while instance not in arrived:
                yield True
            arrived.remove(instance)
        yield False
