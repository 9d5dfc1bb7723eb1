"""What a divided kernel computes, on NumPy: its roles as coroutines that wait for each other, in a random order.

Slots of rings are arrays. A fill is complete at a random later time, before which its slot holds NaN; so it does again when all takers have
given the tile back. A product reads its operands when it is awaited. So what a role reads too early or too late shows in the results.
A role that can never go on raises RolesStuck.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attngen.errors import AttngenError
from attngen.ir.execute import Launch, Program, Values, spread
from attngen.ir.expr import Expr
from attngen.ir.numeric import compiled
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Block, Loop, Op, Role
from attngen.ir.roles import ROLE_KIND, Await, Convert, Drain, Fill, Give, Hold, Issue, Pack, Pipeline, Put, Ring, Take

SLOTS = 2  # of a ring whose number of slots is the schedule's


class RolesStuck(AttngenError):
    """Every role that is not done waits for another one: names the kernel and the roles."""


@dataclass
class _Buffers:
    """A ring: the tile in each slot, how often it was filled, who has yet to give it back."""

    shape: tuple[int, ...]
    takers: int
    tiles: list[Any] = field(default_factory=list)
    fills: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    started: int = 0

    def poison(self, slot: int) -> None:
        self.tiles[slot][...] = np.nan


class DividedLaunch(Launch):
    """The ops of a divided kernel, beside those that all kernels have."""

    chance = random.Random(0)

    def program(self, place: Mapping[str, int], start: Values) -> Program:
        """All roles of the program at a place of the grid, in turns."""
        values = {"num_stages": SLOTS, **start}
        for axis, number in place.items():
            values |= self.turn(axis, number, values)
        self.pending: list[Callable[[], None]] = []
        yield from self.block("entry", values, "entry")
        waiting = {}
        for block in self.kernel.roles:
            assert block.role is not None
            for copy in range(block.role.copies):
                waiting[f"{block.name} {copy}"] = self.role(block, block.role, copy, values)
        stuck = 0
        while waiting:
            if self.pending and self.chance.random() < 0.3:
                self.pending.pop(self.chance.randrange(len(self.pending)))()
                stuck = 0
            name = self.chance.choice(sorted(waiting))
            try:
                stuck = stuck + 1 if next(waiting[name]) else 0
            except StopIteration:
                del waiting[name]
                stuck = 0
            if stuck > 200 * len(waiting) and not self.pending:
                raise RolesStuck(f"@{self.kernel.name}: {', '.join(sorted(waiting))} wait for ever")
        return {}

    def role(self, block: Block, role: Role, copy: int, values: Values) -> Generator[bool, None, Values]:
        """A copy of a role: the program's tile is divided among those that have rows. It yields whether it is waiting."""
        mine = {**values, "copy": copy, "taken": {}, "role copies": role.copies}
        if role.rows:
            mine |= self.share(copy, role.copies, values)
        return (yield from self.block(block.name, mine, "entry"))

    @staticmethod
    def share(copy: int, copies: int, values: Values) -> Values:
        """What one copy's part of the program's rows is."""
        rows = values["BLOCK_Q"] // copies
        first = values["q_start"] + copy * rows
        return {"BLOCK_Q": rows, "q_start": first, "q_idx": first + np.arange(rows)}

    # ------------------------------------------------------------------ control

    def block(self, name: str, values: Values, cls: str) -> Any:
        """Run a block's ops; those of roles may wait."""
        body = self.kernel.block(name)
        plain: list[Op] = []
        for op in body.ops:
            if type(op) not in ROLE_KIND:
                plain.append(op)
                found = yield from self.ops((op,), values, cls)
                if found:
                    return found
                continue
            yield from getattr(self, f"_{ROLE_KIND[type(op)]}")(op, values)
        return {}

    def _pipeline(self, op: Pipeline, values: Values) -> Any:
        carried = {field: values[ref] for field, ref in op.carry}
        turns = [
            (cls, n) for cls, ranges in (("partial", op.partial), ("full", op.full)) for n in self.numbers(_loop(op, cls, ranges), values)
        ]
        for at, (cls, number) in enumerate(turns):
            body = op.step if at else op.first
            inside = {**values, **self.named(op, body, carried), **self.turn(op.var, number, values)}
            carried = yield from self.block(body, inside, cls if at else "partial")
        if turns:
            carried = yield from self.block(op.last, {**values, **self.named(op, op.last, carried)}, "full")
        values |= {f"{op.name}.{field}": x for field, x in carried.items()}

    def named(self, op: Pipeline, body: str, carried: Values) -> Values:
        """The carried values by the names of a body's arguments."""
        return {arg.name: carried[op.field(arg.name, body)] for arg in self.args(body)}

    def args(self, body: str) -> Iterator[Op]:
        return (op for op in self.kernel.block(body).ops if hasattr(op, "role"))

    # ------------------------------------------------------------------ rings

    def _ring(self, op: Ring, values: Values) -> Any:
        owner = next((b.role for b in self.kernel.roles if b.name == op.each), None)
        copies = owner.copies if owner else 1
        sizes = {**values, "BLOCK_Q": values["BLOCK_Q"] // copies}
        takers = sum(b.role.copies for b in self.kernel.roles if b.role and self.takes(b.name, op.name))
        slots = int(compiled(op.slots)(values))
        found = []
        for _ in range(copies):
            buffers = _Buffers(self.shape(op.type.dims, sizes), 1 if op.each else takers, [], [0] * slots, [0] * slots)
            buffers.tiles = [np.full(buffers.shape, np.nan, self.dtypes["T"]) for _ in range(slots)]
            found.append(buffers)
        values[op.name] = found
        yield from ()

    def takes(self, block: str, ring: str) -> bool:
        """Whether a role takes tiles from a ring."""
        for op in self.kernel.block(block).ops:
            bodies = (op.body,) if isinstance(op, Loop) else op.bodies if isinstance(op, Pipeline) else ()
            if (isinstance(op, Take) and op.ring == ring) or any(self.takes(body, ring) for body in bodies):
                return True
        return False

    def _fill(self, op: Fill, values: Values) -> Any:
        for copy, buffers in enumerate(values[op.ring]):
            slot = buffers.started % len(buffers.tiles)
            while buffers.given[slot] < buffers.takers * (buffers.started // len(buffers.tiles)):
                yield True
            buffers.started += 1
            part = {**values, **(self.share(copy, len(values[op.ring]), values) if len(values[op.ring]) > 1 else {})}
            self.pending.append(self.arrival(buffers, slot, self.read(op, part)))
            yield False

    @staticmethod
    def arrival(buffers: _Buffers, slot: int, tile: Any) -> Callable[[], None]:
        def arrive() -> None:
            buffers.tiles[slot][...] = tile
            buffers.fills[slot] += 1

        return arrive

    def read(self, op: Fill, values: Values) -> Any:
        """A tile as the copy engine reads it: 0 where it is out of bounds."""
        ring = self.kernel.op(op.ring)
        assert isinstance(ring, Ring)
        places: list[Any] = []
        tile = np.zeros(self.shape(ring.type.dims, values), self.dtypes["T"])
        part = []
        for e in op.src.index:
            axis = str(e)
            if axis not in AXIS_DIM:
                places.append(int(self.expression(e, values)))
                continue
            start = values.get(f"{axis}_start", 0)
            end = max(start, min(start + values[AXIS_DIM[axis]], values[AXIS_EXTENT[axis]]))
            places.append(slice(start, end))
            part.append(slice(0, end - start))
        tile[tuple(part)] = values[op.src.tensor][tuple(places)]
        return tile

    def mine(self, ring: str, values: Values) -> _Buffers:
        of: list[_Buffers] = values[ring]
        return of[values["copy"] if len(of) > 1 else 0]

    def _take(self, op: Take, values: Values) -> Any:
        buffers, taken = self.mine(op.ring, values), values["taken"]
        use = taken.get(op.ring, 0)
        slot = use % len(buffers.tiles)
        while buffers.fills[slot] <= use // len(buffers.tiles):
            yield True
        taken[op.ring] = use + 1
        values[op.name] = buffers.tiles[slot]
        yield False

    def _give(self, op: Give, values: Values) -> Any:
        take = self.kernel.op(op.value)
        assert isinstance(take, Take)
        buffers = self.mine(take.ring, values)
        slot = next(i for i, tile in enumerate(buffers.tiles) if tile is values[op.value])
        buffers.given[slot] += 1
        if buffers.given[slot] % buffers.takers == 0:
            buffers.poison(slot)
        yield False

    def _drain(self, op: Drain, values: Values) -> Any:
        for buffers in values[op.ring]:
            for slot in range(len(buffers.tiles)):
                while buffers.given[slot] < buffers.takers * len(range(slot, buffers.started, len(buffers.tiles))):
                    yield True
        yield False

    def _put(self, op: Put, values: Values) -> Any:
        """Through the copy's own slot, from which all rows inside the tensor are stored."""
        buffers = self.mine(op.through, values)
        buffers.tiles[0][..., :1] = np.nan  # what was there is overwritten
        places: list[Any] = []
        part = []
        for e in op.dst.index:
            axis = str(e)
            if axis not in AXIS_DIM:
                places.append(int(self.expression(e, values)))
                continue
            start = values.get(f"{axis}_start", 0)
            end = max(start, min(start + values[AXIS_DIM[axis]], values[AXIS_EXTENT[axis]]))
            places.append(slice(start, end))
            part.append(slice(0, end - start))
        values[op.dst.tensor][tuple(places)] = values[op.value][tuple(part)]
        yield False

    # ------------------------------------------------------------------ products

    def _issue(self, op: Issue, values: Values) -> Any:
        values[op.name] = op
        yield False

    def _await(self, op: Await, values: Values) -> Any:
        """The product, of its operands as they are now."""
        issue = self.kernel.op(op.value)
        assert isinstance(issue, Issue)
        of_a, of_b = self.dims[issue.a], self.dims[issue.b]
        rows, columns = (next(d for d in dims if d != issue.over) for dims in (of_a, of_b))
        a, b = spread(values[issue.a], of_a, (rows, issue.over)), spread(values[issue.b], of_b, (issue.over, columns))
        found = np.matmul(a, b, dtype=self.dtypes[op.type.dtype])
        values[op.name] = found if issue.acc is None else found + values[issue.acc]
        yield False

    def _convert(self, op: Convert | Hold | Pack, values: Values) -> Any:
        values[op.name] = self.tile(values[op.value], op.type, values)
        yield from ()

    _hold = _pack = _convert


def _loop(op: Pipeline, cls: str, ranges: tuple[tuple[Expr, Expr], ...]) -> Loop:
    return Loop(op.name, op.var, ranges, (), op.step, cls, listed=op.listed)
