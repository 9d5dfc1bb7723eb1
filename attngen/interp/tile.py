"""Execute a kernel of the IR on NumPy, op by op, in any phase: the meaning of the IR, written to be read.

A kernel is launched as a grid of programs, each of which has a tile. A program is a generator: it runs its ops in the
order written, and pauses where its threads wait, as at a barrier. Tile sizes are arbitrary and need not be those of the
schedule.

Mistakes that a GPU does not report are errors here: reading or writing outside a tensor raises OutsideTensor, and
callers fill results with NaN, so that a read before the write shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from attngen.errors import AttngenError
from attngen.interp.arithmetic import ArithmeticOps
from attngen.interp.memory import MemoryOps, keys_of
from attngen.interp.numeric import compiled
from attngen.interp.values import CONSTANTS, SINGLE, Program, Values
from attngen.ir import AXIS_DIM, MEMBER, PADDED, REVERSED_GROUP, WHOLE, Kernel, Module, Op, only, tile
from attngen.ir.names import BLOCK_LISTS, STARTS
from attngen.ir.split_kv import kv_split, units_of


def execute_kernel(
    module: Module,
    kernel: Kernel,
    tensors: Mapping[str, np.ndarray],
    scalars: Mapping[str, float],
    tiles: Mapping[str, int],
    dtypes: Mapping[str, Any] = SINGLE,
    launch_class: type[Launch] | None = None,
) -> None:
    """Run every program of a kernel's grid. Tensors of role `out` and `inout` are written in place. Raises
    OutsideTensor.

    tensors: by the names of the kernel's arguments, with the shapes that these say.
    scalars: numbers by name.
    tiles: BLOCK_Q and BLOCK_KV, and D_QK_split and D_V_split, which are half of the columns if they are not given.
    dtypes: NumPy's types for the IR's, SINGLE or DOUBLE.
    launch_class: the class that runs the ops, instead of Launch.
    """
    for arg in kernel.args:
        if arg.role != "scalar" and tensors[arg.name].ndim != len(arg.type.dims):
            shape = list(tensors[arg.name].shape)
            raise AttngenError(
                f"@{kernel.name}: %{arg.name} is given with shape {shape}; expected [{', '.join(arg.type.dims)}]"
            )
    launch = (launch_class or Launch)(module, kernel, dtypes)
    padded = {PADDED[name]: 1 << (width - 1).bit_length() for name, width in module.widths.items()}
    halves = {dim: padded[PADDED[whole]] // 2 for dim, whole in WHOLE.items() if whole in module.widths}
    start = {
        **CONSTANTS,
        "BLOCK_KV_splits": tiles["BLOCK_KV"],
        **halves,
        **module.widths,
        **padded,
        **tensors,
        **scalars,
        **tiles,
    }
    if kernel.kv_split:
        places = _split_places(kernel, start)
    else:
        axes = [[(axis.var, i) for i in range(int(compiled(axis.extent)(start)))] for axis in kernel.grid]
        places = [dict(place) for place in product(*axes)]
    if kernel.grid[0].reversed_group:
        heads_in_group = int(compiled(kernel.grid[0].heads)(start))
        places = [place | {REVERSED_GROUP: _is_in_last_group(place, axes[1:], heads_in_group)} for place in places]
    with np.errstate(all="ignore"):
        run_together(launch.programs(places, start))


def _split_places(kernel: Kernel, start: Values) -> list[dict[str, int]]:
    """The places of a grid with split-KV. A program has one split of a sequence's keys or, if the grid has no axis of
    splits, all splits of a sequence."""
    assert kernel.kv_split is not None
    lengths = start["CACHE_SEQLENS"]
    keys = [keys_of(length, start) for length in lengths]
    work = []
    for b, n in enumerate(keys):
        known = {**start, "b": b, "Nk": n}
        known |= {
            name: start[at.tensor][tuple(int(compiled(e)(known)) for e in at.index)]
            for name, at in kernel.kv_split.reads
        }
        work.append(int(compiled(units_of(kernel.kv_split.work))(known)))
    splits = kv_split(work, int(start["items"]), kernel.kv_split.each, kernel.kv_split.waves)
    places = []
    for b, count in enumerate(splits):
        known = {**start, "num_KV_splits": count}
        rest = [axis for axis in kernel.grid if axis.var != "b"]
        axes = [[(axis.var, i) for i in range(int(compiled(axis.extent)(known)))] for axis in rest]
        places += [
            {**dict(place), "b": b, "num_KV_splits": count, "first_item": sum(splits[:b])} for place in product(*axes)
        ]
    return places


def _is_in_last_group(place: Mapping[str, int], heads: Sequence[Sequence[tuple[str, int]]], heads_in_group: int) -> int:
    """1 for a place whose head is in the last group of heads (see GridAxis), else 0. The first axis of heads runs
    fastest."""
    head, count = 0, 1
    for axis in heads:
        head, count = head + count * place[axis[0][0]], count * len(axis)
    return int(head >= (count - 1) // heads_in_group * heads_in_group)


def run_together(programs: Iterable[Program]) -> None:
    """Run programs alternately, each until it next pauses, until all are done. Programs must not rely on the order."""
    waiting = deque(programs)
    done = object()
    while waiting:
        program = waiting.popleft()
        if next(program, done) is not done:
            waiting.append(program)


# Ops that Launch runs itself.
CONTROL = (
    tile.Arg,
    tile.Barrier,
    tile.GridDependencyWait,
    tile.Loop,
    tile.OrderedAdd,
    tile.OrderedAccumulate,
    tile.Yield,
)


class Launch(MemoryOps, ArithmeticOps, complete=tile.TILE, control=CONTROL):
    """Runs the ops of one kernel. The method for an op returns its value, or stores; see ir/tile.py.

    `values` holds everything that is known at a place in a program, by name; a loop body gets a copy with the values of
    its iteration.
    """

    def programs(self, places: list[dict[str, int]], start: Values) -> Iterator[Program]:
        """The programs of the launch: one for each place of the grid."""
        return (self.program(place, start) for place in places)

    def program(self, place: Mapping[str, int], start: Values) -> Program:
        """The program at a place of the grid."""
        values = dict(start)
        for axis, number in place.items():
            values |= self.position(axis, number, values)
        return (yield from self.block("entry", values, "entry"))

    def position(self, axis: str, number: int, values: Values) -> Values:
        """The values for a number on an axis, at which a program or an iteration is: the number, or its tile's start
        and positions."""
        if axis not in AXIS_DIM:
            return {axis: number}
        rows = values[AXIS_DIM[axis]]
        row = start = number * rows
        if self.kernel.traits.places and axis in STARTS:
            unit, rest = divmod(row, self.module.unit)
            start = int(values[STARTS[axis][0]][unit]) + rest
        return {f"_{axis}_row": row, f"{axis}_start": start, f"{axis}_idx": start + np.arange(rows)}

    def block(self, name: str, values: Values, cls: str) -> Program:
        """Run a block's ops in a loop of class `cls`, and return the values that it yields."""
        return (yield from self.ops(self.kernel.block(name).ops, values, cls))

    def ops(self, ops: Iterable[Op], values: Values, cls: str) -> Program:
        """Run some ops of a block, and return the values of a yield among them."""
        for op in ops:
            match op:
                case tile.Arg() | tile.GridDependencyWait():
                    pass  # arguments have their values from the start, and the previous launch has ended
                case tile.Barrier():
                    yield  # a program is one thread here, so it only pauses
                case tile.Loop():
                    yield from self.loop(op, values)
                case tile.OrderedAdd() | tile.OrderedAccumulate():
                    yield from self.add_in_order(op, values, cls)
                case tile.Yield():
                    return {field: values[ref] for field, ref in op.values}
                case tile.SoftmaxStep():
                    values |= self._softmax_step(op, values, cls)
                case tile.Deinterleave():
                    values |= self._deinterleave(op, values)
                case _:
                    values[op.name] = self.handler(op)(op, values, cls)
        return {}

    def loop(self, op: tile.Loop, values: Values) -> Program:
        """Run the body for each tile or number of the ranges, in order."""
        carried = {field: values[ref] for field, ref in op.carry}
        for head, number in self.by_head(op, self.numbers(op, values), values):
            inside = {**values, **head, **carried, **self.position(op.var, number, values)}
            carried = yield from self.block(op.body, inside, op.cls)
        values |= {f"{op.name}.{field}": x for field, x in carried.items()}
        return values

    def by_head(self, op: Any, tiles: Iterable[Any], values: Values) -> list[tuple[Values, Any]]:
        """The iterations of a loop: each with the number of its query head, or with nothing if the loop runs for one
        head."""
        if not op.heads:
            return [({}, tile) for tile in tiles]
        ((first, end),) = op.heads
        heads = [{MEMBER: g} for g in range(int(self.expression(first, values)), int(self.expression(end, values)))]
        return [(head, tile) for tile, head in product(tiles, heads)] if op.by_tile else [*product(heads, tiles)]

    def numbers(self, op: tile.Loop, values: Values) -> list[int]:
        """The numbers that a loop runs over, in the order in which it does."""
        rising = list(self.rising_numbers(op, values))
        return rising[::-1] if op.reversed else rising

    def rising_numbers(self, op: tile.Loop, values: Values) -> Iterator[int]:
        """The numbers in a loop's ranges, or the listed tiles at these positions."""
        for low, high in op.ranges:
            first, end = (int(compiled(e)(values)) for e in (low, high))
            if first > end:
                raise AttngenError(
                    f"@{self.kernel.name}: a range of %{op.name} ends at {end}, before its start {first}"
                )
            for position in range(first, end):
                if op.listed:
                    block, rest = divmod(position, self.tiles_in_a_block(op.var, values))
                    yield int(values[op.listed][block]) * self.tiles_in_a_block(op.var, values) + rest
                elif self.is_visited(op, position, values):
                    yield position

    def is_visited(self, op: tile.Loop, number: int, values: Values) -> bool:
        """True if a tile is in a visited block. With a block mask, loops over ranges without a block list skip the
        other tiles.

        The mask is known by its ranks. The rank of a block counts the listed blocks before it, so a block is visited if
        the rank of the next block is larger.
        """
        blocks, axis = self.module.blocks, self.kernel.program_axis
        if blocks is None or blocks.data or op.cls == "all":
            return True
        head = next(load.src.index[1] for load in only(self.kernel.ops(), tile.Load) if load.src.tensor == "Q")
        ranks = values[next(iter(BLOCK_LISTS[axis]))]
        row = ranks[values["b"], compiled(head)(values), values[f"_{axis}_row"] // blocks.size]
        block = number // self.tiles_in_a_block(op.var, values)
        return bool(row[block] < row[block + 1])
