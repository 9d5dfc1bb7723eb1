"""What a kernel of the IR computes, on NumPy, op by op, in any phase: the meaning of the IR, written to be read.

A kernel is launched as a grid of programs, each of which owns a tile. A program is a generator: it runs its ops in the
order written, and pauses where its threads wait, at a barrier. The tiles may be of any size, and need not be the
schedule's.

What a GPU would do silently is an error here: to read or write outside a tensor raises OutsideTensor, and whoever
allocates results fills them with NaN, so that what is read before it is written shows.

Where an op says `partial`, it means loops of class partial, and those that nothing has classified yet. An expression is
computed in the types of what it names, integers of any size among them, and its value is rounded to the type that the
op has.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from attngen.errors import AttngenError
from attngen.interp.e4m3 import numbers, pairs
from attngen.interp.numeric import compiled
from attngen.interp.philox import keep_scores
from attngen.ir.dtypes import ELEMENTS, QUANTISED
from attngen.ir.expr import Expr, symbol, symbol_names
from attngen.ir.graph import REVERSED_GROUP, Kernel, Module
from attngen.ir.names import BLOCK_LISTS, ROW_AXES
from attngen.ir.ops import (
    AXIS_DIM,
    AXIS_EXTENT,
    GROUPED,
    KIND,
    MEMBER,
    PADDED,
    WHOLE,
    Access,
    Append,
    Arg,
    Barrier,
    Base,
    CacheLength,
    Checks,
    CountTiles,
    Deinterleave,
    Dot,
    Dropout,
    DropoutMask,
    Gather,
    GridDependencyWait,
    Init,
    Interleave,
    ListPosition,
    Load,
    Loop,
    Map,
    Mask,
    Op,
    OrderedAccumulate,
    OrderedAdd,
    Reduce,
    Scan,
    Scatter,
    Seed,
    SoftmaxStep,
    Store,
    Type,
    Uses,
    Yield,
    axis_of,
    unpadded,
)
from attngen.ir.split_kv import kv_split, units_of

Values = dict[str, Any]  # by name: the op's value, a number of the call, a size, a position
Program = Generator[None, None, Values]
Window = tuple[Any, ...]  # an index of an array: numbers and slices

_FLOATS = ("T", "f32", *ELEMENTS)  # values, and results that have a type of their own
SINGLE = {
    **dict.fromkeys(_FLOATS, np.float32),
    **dict.fromkeys(QUANTISED.values(), np.int16),
    "i32": np.int64,
    "i64": np.int64,
    "b1": np.bool_,
}  # integers of any size, so that none wraps
DOUBLE = {**SINGLE, **dict.fromkeys(_FLOATS, np.float64)}
CONSTANTS = {"LOG2E": 1 / math.log(2), "LN2": math.log(2)}


class OutsideTensor(AttngenError):
    """An access that no check keeps inside its tensor: names the kernel, the op, the place and the tensor's length
    there."""


def execute_kernel(
    module: Module,
    kernel: Kernel,
    tensors: Mapping[str, np.ndarray],
    scalars: Mapping[str, float],
    tiles: Mapping[str, int],
    dtypes: Mapping[str, Any] = SINGLE,
    made: type[Launch] | None = None,
) -> None:
    """Run every program of a kernel's grid. Tensors of role `out` and `inout` are written in place.

    tensors: by the names of the kernel's arguments, shaped as these say; scalars: its numbers by name; tiles: BLOCK_Q
    and BLOCK_KV, and OWN_QK and OWN_V, half of the columns where they are not given; dtypes: NumPy's types for the
    IR's, SINGLE or DOUBLE; made: what runs the ops, in place of Launch. Raises OutsideTensor.
    """
    for arg in kernel.args:
        if arg.role != "scalar" and tensors[arg.name].ndim != len(arg.type.dims):
            shape = list(tensors[arg.name].shape)
            raise AttngenError(
                f"@{kernel.name}: %{arg.name} is given with shape {shape}; expected [{', '.join(arg.type.dims)}]"
            )
    launch = (made or Launch)(module, kernel, dtypes)
    padded = {PADDED[name]: 1 << (width - 1).bit_length() for name, width in module.widths.items()}
    halves = {dim: padded[PADDED[whole]] // 2 for dim, whole in WHOLE.items() if whole in module.widths}
    start = {
        **CONSTANTS,
        "BLOCK_PARTS": tiles["BLOCK_KV"],
        **halves,
        **module.widths,
        **padded,
        **tensors,
        **scalars,
        **tiles,
    }
    if kernel.kv_split:
        places = _split(kernel, start)
    else:
        axes = [[(axis.var, i) for i in range(int(compiled(axis.extent)(start)))] for axis in kernel.grid]
        places = [dict(place) for place in product(*axes)]
    if kernel.grid[0].reversed_group:
        swizzle_rows = int(compiled(kernel.grid[0].heads)(start))
        places = [place | {REVERSED_GROUP: _is_of_last(place, axes[1:], swizzle_rows)} for place in places]
    with np.errstate(all="ignore"):
        run_together(launch.programs(places, start))


def _split(kernel: Kernel, start: Values) -> list[dict[str, int]]:
    """The places of a grid whose programs have parts of the keys of sequences, or, without an axis of parts, all
    parts of a sequence."""
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
    parts = kv_split(work, int(start["items"]), kernel.kv_split.each, kernel.kv_split.waves)
    places = []
    for b, count in enumerate(parts):
        known = {**start, "parts": count}
        rest = [axis for axis in kernel.grid if axis.var != "b"]
        axes = [[(axis.var, i) for i in range(int(compiled(axis.extent)(known)))] for axis in rest]
        places += [{**dict(place), "b": b, "parts": count, "first_item": sum(parts[:b])} for place in product(*axes)]
    return places


def keys_of(length: int, values: Mapping[str, Any]) -> int:
    """How many keys a sequence has that had so many before the call (see Length)."""
    return min(int(values["Nc"]), max(0, int(length) + int(values["Nn"])))


def _is_of_last(place: Mapping[str, int], heads: Sequence[Sequence[tuple[str, int]]], swizzle_rows: int) -> int:
    """1 for a place whose head is of the last ones that are taken together, else 0. The axes of heads: the first one
    runs fastest."""
    head, count = 0, 1
    for axis in heads:
        head, count = head + count * place[axis[0][0]], count * len(axis)
    return int(head >= (count - 1) // swizzle_rows * swizzle_rows)


def run_together(programs: Iterable[Program]) -> None:
    """Run programs in turns, each up to where it next pauses, until all are done: in no order that they may rely on."""
    waiting = deque(programs)
    done = object()
    while waiting:
        program = waiting.popleft()
        if next(program, done) is not done:
            waiting.append(program)


def spread(x: Any, dims: tuple[str, ...], over: tuple[str, ...]) -> Any:
    """A value of dimensions `dims` so that it broadcasts to those of `over`, by their names."""
    if dims == over or not dims:
        return x
    x = x.transpose([dims.index(d) for d in over if d in dims])
    return x[tuple(slice(None) if d in dims else None for d in over)]


def applies(when: str, cls: str) -> bool:
    """Whether what an op says holds in a block that a loop of this class runs."""
    return when == "always" or (when == "partial" and cls in ("partial", "unknown"))


class Launch:
    """The ops of one kernel. The method that has the name of an op's kind gives the op's value, or stores; see
    ir/ops.py for each.

    `values` holds, by name, all that a place in the program knows; a loop's body gets a copy with what its turn knows
    besides.
    """

    def __init__(self, module: Module, kernel: Kernel, dtypes: Mapping[str, Any]) -> None:
        self.module, self.kernel, self.dtypes = module, kernel, dtypes

    @cached_property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """The dimensions of every value by its reference; of the results of loops, of what these start from; of
        positions."""
        found = {f"{op.name}.{f}".rstrip("."): t.dims for op in self.kernel.ops() for f, t in op.results().items()}
        found |= {f"{axis}_idx": (AXIS_DIM[axis],) for axis in ROW_AXES}
        return found | {
            f"{loop.name}.{f}": self.kernel.type_of(start).dims for loop in self.kernel.loops for f, start in loop.carry
        }

    # ------------------------------------------------------------------ control

    def programs(self, places: list[dict[str, int]], start: Values) -> Iterator[Program]:
        """The programs of the launch: one for each place of the grid."""
        return (self.program(place, start) for place in places)

    def program(self, place: Mapping[str, int], start: Values) -> Program:
        """The program at a place of the grid."""
        values = dict(start)
        for axis, number in place.items():
            values |= self.turn(axis, number, values)
        return (yield from self.block("entry", values, "entry"))

    def turn(self, axis: str, number: int, values: Values) -> Values:
        """What a program or a turn of a loop knows of its place on an axis: its number; or where its tile starts,
        and its positions."""
        if axis not in AXIS_DIM:
            return {axis: number}
        rows = values[AXIS_DIM[axis]]
        return {f"{axis}_start": number * rows, f"{axis}_idx": number * rows + np.arange(rows)}

    def block(self, name: str, values: Values, cls: str) -> Program:
        """Run a block's ops, as a loop of class `cls` does; what it yields to the next turn."""
        return (yield from self.ops(self.kernel.block(name).ops, values, cls))

    def ops(self, ops: Iterable[Op], values: Values, cls: str) -> Program:
        """Run some ops of a block."""
        for op in ops:
            match op:
                case Arg() | GridDependencyWait():
                    pass  # its value is there from the start; the launch before has ended
                case Barrier():
                    yield  # all threads of the program are one here: it only pauses
                case Loop():
                    yield from self.loop(op, values)
                case OrderedAdd() | OrderedAccumulate():
                    yield from self.add(op, values, cls)
                case Yield():
                    return {field: values[ref] for field, ref in op.values}
                case SoftmaxStep():
                    values |= self._softmax_step(op, values, cls)
                case Deinterleave():
                    values |= self._deinterleave(op, values)
                case _:
                    values[op.name] = getattr(self, f"_{KIND[type(op)]}")(op, values, cls)
        return {}

    def loop(self, op: Loop, values: Values) -> Program:
        """Run the body for each tile or number of the ranges, in order."""
        carried = {field: values[ref] for field, ref in op.carry}
        for head, number in self.by_head(op, self.numbers(op, values), values):
            inside = {**values, **head, **carried, **self.turn(op.var, number, values)}
            carried = yield from self.block(op.body, inside, op.cls)
        values |= {f"{op.name}.{field}": x for field, x in carried.items()}
        return values

    def by_head(self, op: Any, turns: Iterable[Any], values: Values) -> list[tuple[Values, Any]]:
        """What a loop runs over, with the number of each query head for which it does; with nothing where it runs
        for one head."""
        if not op.heads:
            return [({}, turn) for turn in turns]
        ((first, end),) = op.heads
        heads = [{MEMBER: g} for g in range(int(self.expression(first, values)), int(self.expression(end, values)))]
        return [(head, turn) for turn, head in product(turns, heads)] if op.by_tile else [*product(heads, turns)]

    def numbers(self, op: Loop, values: Values) -> Iterator[int]:
        """What the loop runs over: positions in its ranges stand for themselves, or for the listed tile there."""
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
                elif self.counts(op, position, values):
                    yield position

    def tiles_in_a_block(self, axis: str, values: Values) -> int:
        assert self.module.blocks is not None
        return self.module.blocks.size // int(values[AXIS_DIM[axis]])

    def counts(self, op: Loop, tile: int, values: Values) -> bool:
        """Whether a tile is in a block that counts: with a mask of blocks, loops over ranges that no list stands for
        leave out others.

        The mask is known by its ranks: a block counts if there is one more listed block before the next one than before
        it.
        """
        blocks, own = self.module.blocks, self.kernel.program_axis
        if blocks is None or blocks.data or op.cls == "all":
            return True
        head = next(
            load.src.index[1] for load in self.kernel.ops() if isinstance(load, Load) and load.src.tensor == "Q"
        )
        ranks = values[next(iter(BLOCK_LISTS[own]))]
        row = ranks[values["b"], compiled(head)(values), values[f"{own}_start"] // blocks.size]
        block = tile // self.tiles_in_a_block(op.var, values)
        return bool(row[block] < row[block + 1])

    # ------------------------------------------------------------------ expressions

    def expression(self, e: Expr, values: Values, dims: tuple[str, ...] = (), uses: Uses = ()) -> Any:
        """The value of an expression; what it names is broadcast to `dims` by the names of its dimensions."""
        renamed, named = dict(uses), {}
        if e.is_Symbol:  # most are: an index, a size
            ref = renamed.get(e.name, e.name)
            return spread(values[ref], self.dims.get(ref, ()), dims)
        for name in symbol_names(e):
            ref = renamed.get(name, name)
            x, of = values[ref], self.dims.get(ref, ())
            if of and dims and GROUPED.get(dims[-1]) == of[-1]:
                x, of = np.repeat(x, values[dims[-1]] // x.shape[-1], axis=-1), (*of[:-1], dims[-1])
            named[name] = spread(x, of, dims)
        return compiled(e)(named)

    def shape(self, dims: tuple[str, ...], values: Values) -> tuple[int, ...]:
        return tuple(int(d) if d.isdigit() else values[d] for d in dims)

    def tile(self, x: Any, type_: Type, values: Values) -> Any:
        """A value as its type says: of its element type, in its shape. Numbers are of Python's int, or of the
        element type."""
        dtype = self.dtypes[type_.dtype]
        if not type_.dims:
            return dtype(x) if type_.dtype in ("T", "f32") else int(x)
        x, shape = np.asarray(x, dtype), self.shape(type_.dims, values)
        return x if x.shape == shape else np.broadcast_to(x, shape)

    def _init(self, op: Init, values: Values, cls: str) -> Any:
        return self.tile(compiled(op.value)(values), op.type, values)

    def _map(self, op: Map, values: Values, cls: str) -> Any:
        return self.tile(self.expression(op.expr, values, op.type.dims, op.uses), op.type, values)

    def _mask(self, op: Mask, values: Values, cls: str) -> Any:
        if not applies(op.when, cls) or (op.unswitch is not None and not self.expression(op.unswitch, values)):
            return values[op.value]
        return np.where(
            self.expression(op.where, values, op.type.dims, op.uses),
            values[op.value],
            self.dtypes[op.type.dtype](-np.inf),
        )

    # ------------------------------------------------------------------ memory

    def window(
        self, op: Op, access: Access, checks: Checks, dims: tuple[str, ...], values: Values, cls: str
    ) -> tuple[Window, Window]:
        """Where a tile of dimensions `dims` is in the tensor, and which of its rows and columns these are: those
        before a checked end."""
        inside = {axis for axis, when in checks if applies(when, cls)}
        places: list[Any] = []
        parts = {}
        for at, (e, length) in enumerate(zip(access.index, values[access.tensor].shape)):
            axis = axis_of(e)
            if not axis:
                number = int(self.expression(e, values))
                self.must_be_inside(op, access, at, number, number + 1, length)
                places.append(number)
                continue
            dim = AXIS_DIM[axis] if AXIS_DIM[axis] in dims else PADDED[AXIS_DIM[axis]]
            start = values.get(f"{axis}_start", 0)
            end = start + values[dim]
            end = max(start, min(end, values[AXIS_EXTENT[axis]])) if axis in inside else end
            further = 0 if e.is_Symbol else int(self.expression(e - symbol(axis), values))
            if start < end:
                self.must_be_inside(op, access, at, further + start, further + end, length)
            places.append(slice(further + start, further + end))
            parts[dim] = slice(0, end - start)
        return tuple(places), tuple(parts[d] for d in dims)

    def must_be_inside(self, op: Op, access: Access, at: int, start: int, end: int, length: int) -> None:
        if not 0 <= start <= end <= length:
            raise OutsideTensor(
                f"@{self.kernel.name}: {KIND[type(op)]} %{op.name} goes to {start} .. {end} along dimension {at} of %{access.tensor}; "
                f"expected 0 .. {length} at most, or a check"
            )

    def _axes(self, access: Access, dims: tuple[str, ...]) -> tuple[str, ...]:
        """The dimensions of the tile in the order of the access, which a transposed tile of scores has the other way
        round."""
        return tuple(d for e in access.index for d in dims if axis_of(e) and unpadded(d) == AXIS_DIM[axis_of(e)])

    def _base(self, op: Base, values: Values, cls: str) -> Any:
        """A view of the rows of one (batch, head), through which stores reach the tensor."""
        places, _ = self.window(op, op.src, (), (), values, cls)
        return values[op.src.tensor][places]

    def _cache_length(self, op: CacheLength, values: Values, cls: str) -> int:
        return keys_of(values[op.src.tensor][values["b"]], values)

    def _load_pages(self, op: Load, values: Values, cls: str) -> Any:
        """Rows by their pages: those that are checked and past the end are `other`."""
        assert op.pages is not None
        head, axis, column = op.src.index
        rows, pages = values[f"{axis}_idx"], values[op.pages]
        tensor = values[op.src.tensor]
        inside = (rows < values[AXIS_EXTENT[str(axis)]]) & self.needed(op, values, cls)
        if not any(a == str(axis) and applies(when, cls) for a, when in op.check):
            self.must_be_inside(op, op.src, 2, int(rows.min()), int(rows.max()) + 1, values[AXIS_EXTENT[str(axis)]])
        if inside.any():
            self.must_be_inside(op, op.src, 0, int(pages[inside].min()), int(pages[inside].max()) + 1, len(tensor))
        tile = np.full(self.shape(op.type.dims, values), compiled(op.other)(values), self.dtypes[op.type.dtype])
        first = values.get(f"{axis_of(column)}_start", 0)
        read = tensor[
            pages[inside],
            int(self.expression(head, values)),
            rows[inside] % tensor.shape[2],
            first : first + tile.shape[1],
        ]
        tile[inside, : read.shape[1]] = read
        return tile

    def _load(self, op: Load, values: Values, cls: str) -> Any:
        if op.pages:
            return self._load_pages(op, values, cls)
        places, part = self.window(op, op.src, op.check, op.type.dims, values, cls)
        read = values[op.src.tensor][places]
        if not op.type.dims:
            return self.tile(read, op.type, values)
        tile = np.full(self.shape(op.type.dims, values), compiled(op.other)(values), self.dtypes[op.type.dtype])
        tile[part] = spread(read, self._axes(op.src, op.type.dims), op.type.dims)
        rows = self.needed(op, values, cls)
        if rows is not True:
            others = ~spread(rows, (AXIS_DIM[self.kernel.loop_axis],), op.type.dims)
            tile[np.broadcast_to(others, tile.shape)] = compiled(op.other)(values)
        return tile

    def needed(self, op: Load, values: Values, cls: str) -> Any:
        """Which rows of a checked tile are in the range that the load is limited to; True for all of them."""
        axis = self.kernel.loop_axis
        if not op.needed or not applies(dict(op.check)[axis], cls):
            return True
        ((first, end),) = (tuple(int(self.expression(e, values)) for e in pair) for pair in op.needed)
        return (values[f"{axis}_idx"] >= first) & (values[f"{axis}_idx"] < end)

    def _store(self, op: Store, values: Values, cls: str) -> None:
        if op.first_along and values[f"{op.first_along}_start"]:
            return None
        if op.by == "distance":
            return self._store_distances(op, values)
        dims = self.dims[op.value]
        places, part = self.window(op, op.dst, op.check, dims, values, cls)
        written = values[op.value][part] if dims else values[op.value]
        values[op.dst.tensor][places] = spread(written, dims, self._axes(op.dst, dims))
        return None

    def _append(self, op: Append, values: Values, cls: str) -> None:
        """Rows go to those of their sequence, or of their pages, that `rows` names, if these are below Nc."""
        *heads, axis, _ = op.dst.index
        tensor, rows = values[op.dst.tensor], values[op.rows]
        inside = (values[f"{axis}_idx"] < values[AXIS_EXTENT[str(axis)]]) & (rows >= 0) & (rows < values["Nc"])
        places: list[Any] = [int(self.expression(e, values)) for e in heads]
        if op.pages:
            places = [values[op.pages][inside], *places, rows[inside] % tensor.shape[2]]
        else:
            places.append(rows[inside])
        tensor[tuple(places)] = values[op.value][inside, : tensor.shape[3]]

    def add(self, op: OrderedAdd | OrderedAccumulate, values: Values, cls: str) -> Program:
        """In its turn: until then the program pauses."""
        assert op.semaphore is not None and op.order is not None
        turn = yield from self.await_turn(op.semaphore, op.order, values)
        self._ordered_add(op, values, cls, turn == 0)
        if isinstance(op, OrderedAdd) or op.ends:
            self.passed(op.semaphore, values)
        return values

    def await_turn(self, of: Access, expr: Expr, values: Values) -> Generator[None, None, int]:
        """Pause until it is the program's turn, which is returned."""
        turns, place = self.turns_at(of, values)
        turn = int(self.expression(expr, values))
        while turns[place] != turn:
            if turns[place] > turn:
                raise AttngenError(
                    f"@{self.kernel.name}: {turns[place]} programs have had turns in %{of.tensor}, and turn {turn} comes"
                )
            yield
        return turn

    def turns_at(self, access: Access, values: Values) -> tuple[Any, tuple[int, ...]]:
        """The tensor that counts turns, and the place of those of a tile."""
        tensor, index = self.kernel.through(access)
        return values[tensor.name], tuple(int(self.expression(e, values)) for e in index)

    def passed(self, turns: Access, values: Values) -> None:
        """The next program's turn comes."""
        counted, place = self.turns_at(turns, values)
        counted[place] += 1

    def _ordered_add(self, op: OrderedAdd | OrderedAccumulate, values: Values, cls: str, first: bool) -> None:
        dims = self.dims[op.value]
        places, part = self.window(op, op.dst, op.check, dims, values, cls)
        written = spread(values[op.value][part], dims, self._axes(op.dst, dims))
        values[op.dst.tensor][places] = written if first else values[op.dst.tensor][places] + written

    def _store_distances(self, op: Store, values: Values) -> None:
        """Sums of a tile of scores by distance, key less query, in lines of the program's own, at distance + Nq.

        In each line a tile has BLOCK_KV places, as many as it has keys, so that no two tiles of a program write one
        place: the distances from that of its corner on are in the first line, the BLOCK_KV ones before these in the
        next line, and so on.
        """
        n_q, n_kv, block_q, block_kv = (values[name] for name in ("Nq", "Nk", "BLOCK_Q", "BLOCK_KV"))
        distance = np.arange(block_kv) - np.arange(block_q)[:, None]  # from the corner's
        sums = np.zeros(((block_q + block_kv - 2) // block_kv + 1, block_kv))
        np.add.at(sums, (-(distance // block_kv), distance % block_kv), values[op.value])
        parts = values[op.dst.tensor][self.window(op, op.dst, (), (), values, "")[0]]
        for line, of_line in enumerate(sums, values["q_start"] // block_q * len(sums)):
            place = values["kv_start"] - values["q_start"] + n_q - line % len(sums) * block_kv + np.arange(block_kv)
            inside = (place >= 0) & (place < n_q + n_kv)
            parts[line, place[inside]] = of_line[inside]

    def places(
        self, op: Gather | Scatter, access: Access, dims: tuple[str, ...], values: Values
    ) -> tuple[tuple[Any, ...], Any]:
        """Of the elements of a tile where the condition holds: the index of each in the tensor; and the condition
        for all."""
        shape = self.shape(dims, values)
        inside = np.broadcast_to(self.expression(op.where, values, dims, op.uses), shape)
        found = []
        for at, (e, length) in enumerate(zip(access.index, values[access.tensor].shape)):
            index = np.broadcast_to(self.expression(e, values, dims, op.uses), shape)[inside]
            if index.size:
                self.must_be_inside(op, access, at, int(index.min()), int(index.max()) + 1, length)
            found.append(index)
        return tuple(found), inside

    def _gather(self, op: Gather, values: Values, cls: str) -> Any:
        places, inside = self.places(op, op.src, op.type.dims, values)
        tile = np.zeros(inside.shape, self.dtypes[op.type.dtype])
        tile[inside] = values[op.src.tensor][places]
        return tile if op.type.dims else self.tile(tile, op.type, values)

    def _scatter(self, op: Scatter, values: Values, cls: str) -> None:
        places, inside = self.places(op, op.dst, self.dims[op.value], values)
        written = np.asarray(values[op.value])[inside]
        if op.op == "put":
            values[op.dst.tensor][places] = written
        else:
            {"add": np.add, "min": np.minimum, "max": np.maximum}[op.op].at(values[op.dst.tensor], places, written)

    def _count_tiles(self, op: CountTiles, values: Values, cls: str) -> int:
        *place, axis = op.src.index
        row = values[op.src.tensor][tuple(int(self.expression(e, values)) for e in place)]
        return int((row[:: values[AXIS_DIM[axis_of(axis)]]] <= self.expression(op.most, values)).sum())

    def _list_position(self, op: ListPosition, values: Values, cls: str) -> int:
        ranks, ratio = values[op.src], self.tiles_in_a_block(self.kernel.ranked_axis(op), values)
        block, rest = divmod(int(self.expression(op.tile, values)), ratio)
        before = int(ranks[block])
        listed = rest > 0 and ranks[block + 1] > before  # the block that the tile is in
        return before * ratio + (rest if listed else 0)

    # ------------------------------------------------------------------ arithmetic of tiles

    def _dot(self, op: Dot, values: Values, cls: str) -> Any:
        of_a, of_b = self.dims[op.a], self.dims[op.b]
        rows, columns = (next(d for d in dims if d != op.over) for dims in (of_a, of_b))
        a, b = spread(values[op.a], of_a, (rows, op.over)), spread(values[op.b], of_b, (op.over, columns))
        found = np.matmul(a, b, dtype=self.dtypes[op.type.dtype])
        found = found if op.acc is None else found + values[op.acc]
        return spread(found, (rows, columns), op.type.dims)

    def _softmax_step(self, op: SoftmaxStep, values: Values, cls: str) -> Values:
        s, m, scale = values[op.s], values[op.m], values[op.scale] if op.scale else 1
        shift = values[op.shift] if op.shift else 0
        m_new = np.maximum(m, s.max(axis=1) + shift)
        seen = np.where(m_new == -np.inf, m_new.dtype.type(0), m_new) if applies(op.guard, cls) else m_new
        p = np.exp2(s * scale - (seen * scale - shift)[:, None])
        return {f"{op.name}.p": p, f"{op.name}.alpha": np.exp2((m - seen) * scale), f"{op.name}.m": m_new}

    def _reduce(self, op: Reduce, values: Values, cls: str) -> Any:
        x, axis = values[op.value], self.dims[op.value].index(op.over)
        if GROUPED.get(op.over) in op.type.dims:
            x, axis = x.reshape(*x.shape[:-1], values[GROUPED[op.over]], -1), -1
        reduced = getattr(np, op.op)(x, axis=axis)
        return self.tile(reduced, op.type, values)

    def _scan(self, op: Scan, values: Values, cls: str) -> Any:
        return np.maximum.accumulate(values[op.value], axis=self.dims[op.value].index(op.over))

    def _deinterleave(self, op: Deinterleave, values: Values) -> Values:
        x, of = values[op.value], self.kernel.type_of(op.value)
        even, odd = numbers(x) if of.quantised else (x[:, ::2], x[:, 1::2])
        return {f"{op.name}.even": self.tile(even, op.type, values), f"{op.name}.odd": self.tile(odd, op.type, values)}

    def _interleave(self, op: Interleave, values: Values, cls: str) -> Any:
        a, b = values[op.a], values[op.b]
        x = pairs(a, b) if op.type.quantised else np.stack([a, b], 2).reshape(len(a), -1)
        return self.tile(x, op.type, values)

    def _seed(self, op: Seed, values: Values, cls: str) -> int:
        return int(values[op.src])

    def _dropout_mask(self, op: DropoutMask, values: Values, cls: str) -> Any:
        q, kv = (spread(values[name], self.dims[name], op.type.dims) for name in ("q_idx", "kv_idx"))
        head = int(self.expression(op.head, values))
        return keep_scores(values[op.seed], values["b"], head, q, kv, values[op.threshold])

    def _dropout(self, op: Dropout, values: Values, cls: str) -> Any:
        return np.where(values[op.keep], values[op.value], self.dtypes[op.type.dtype](0))
