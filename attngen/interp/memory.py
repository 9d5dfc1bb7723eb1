"""Ops that load and store tiles and elements, on NumPy."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from attngen.errors import AttngenError
from attngen.interp.numeric import compiled
from attngen.interp.values import Evaluator, OutsideTensor, Program, Values, Window, applies, spread
from attngen.ir import AXIS_DIM, AXIS_EXTENT, PADDED, Access, Checks, Expr, Op, axis_of, symbol, tile, unpadded
from attngen.ir.behaviour import handles
from attngen.ir.names import START_RANKS


def keys_of(length: int, values: Mapping[str, Any]) -> int:
    """The number of keys of a sequence that had `length` keys before the call (see CacheLength)."""
    return min(int(values["Nc"]), max(0, int(length) + int(values["Nn"])))


class MemoryOps(Evaluator):
    """Ops that read and write tensors."""

    def must_be_inside(self, op: Op, access: Access, at: int, start: int, end: int, length: int) -> None:
        """Raise OutsideTensor unless start .. end is inside the tensor's dimension `at`, of this length."""
        if not 0 <= start <= end <= length:
            raise OutsideTensor(
                f"@{self.kernel.name}: {op.kind} %{op.name} goes to {start} .. {end} along dimension {at} "
                f"of %{access.tensor}; expected 0 .. {length} at most, or a check"
            )

    def window(
        self, op: Op, access: Access, checks: Checks, dims: tuple[str, ...], values: Values, cls: str
    ) -> tuple[Window, Window]:
        """Return two indices: that of a tile with dimensions `dims` in the tensor, and that of the tile's part before
        the checked ends."""
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
            start = values.get(self.kernel.traits.first_row(access, at, axis), 0)
            end = start + values[dim]
            if axis in inside:
                left = values[AXIS_EXTENT[axis]] - values.get(f"{axis}_start", 0)
                end = max(start, min(end, start + left))
            further = 0 if e.is_Symbol else int(self.expression(e - symbol(axis), values))
            if start < end:
                self.must_be_inside(op, access, at, further + start, further + end, length)
            places.append(slice(further + start, further + end))
            parts[dim] = slice(0, end - start)
        return tuple(places), tuple(parts[d] for d in dims)

    def _axes(self, access: Access, dims: tuple[str, ...]) -> tuple[str, ...]:
        """The dimensions of a tile in the order of the access's index; a transposed tile has another order."""
        return tuple(d for e in access.index for d in dims if axis_of(e) and unpadded(d) == AXIS_DIM[axis_of(e)])

    @handles(tile.Base)
    def _base(self, op: tile.Base, values: Values, cls: str) -> Any:
        """A view of the rows of one (batch, head), through which stores reach the tensor."""
        places, _ = self.window(op, op.src, (), (), values, cls)
        return values[op.src.tensor][places]

    @handles(tile.CacheLength)
    def _cache_length(self, op: tile.CacheLength, values: Values, cls: str) -> int:
        return keys_of(values[op.src.tensor][values["b"]], values)

    def _load_pages(self, op: tile.Load, values: Values, cls: str) -> Any:
        """Rows by their pages; checked rows past the end are `other`."""
        assert op.pages is not None
        head, axis, column = op.src.index
        rows, pages = values[f"{axis}_idx"], values[op.pages]
        tensor = values[op.src.tensor]
        inside = (rows < values[AXIS_EXTENT[str(axis)]]) & self.needed(op, values, cls)
        if not any(a == str(axis) and applies(when, cls) for a, when in op.check):
            self.must_be_inside(op, op.src, 2, int(rows.min()), int(rows.max()) + 1, values[AXIS_EXTENT[str(axis)]])
        if inside.any():
            self.must_be_inside(op, op.src, 0, int(pages[inside].min()), int(pages[inside].max()) + 1, len(tensor))
        result = np.full(self.shape(op.type.dims, values), compiled(op.other)(values), self.dtypes[op.type.dtype])
        first = values.get(f"{axis_of(column)}_start", 0)
        read = tensor[
            pages[inside],
            int(self.expression(head, values)),
            rows[inside] % tensor.shape[2],
            first : first + result.shape[1],
        ]
        result[inside, : read.shape[1]] = read
        return result

    @handles(tile.Load)
    def _load(self, op: tile.Load, values: Values, cls: str) -> Any:
        if op.pages:
            return self._load_pages(op, values, cls)
        places, part = self.window(op, op.src, op.check, op.type.dims, values, cls)
        read = values[op.src.tensor][places]
        if not op.type.dims:
            return self.tile(read, op.type, values)
        result = np.full(self.shape(op.type.dims, values), compiled(op.other)(values), self.dtypes[op.type.dtype])
        result[part] = spread(read, self._axes(op.src, op.type.dims), op.type.dims)
        rows = self.needed(op, values, cls)
        if rows is not True:
            others = ~spread(rows, (AXIS_DIM[self.kernel.loop_axis],), op.type.dims)
            result[np.broadcast_to(others, result.shape)] = compiled(op.other)(values)
        return result

    def needed(self, op: tile.Load, values: Values, cls: str) -> Any:
        """A mask of the rows in the load's `needed` range; True for all rows if there is no range or the tile is not
        checked."""
        axis = self.kernel.loop_axis
        if not op.needed or not applies(dict(op.check)[axis], cls):
            return True
        ((first, end),) = (tuple(int(self.expression(e, values)) for e in pair) for pair in op.needed)
        return (values[f"{axis}_idx"] >= first) & (values[f"{axis}_idx"] < end)

    @handles(tile.Store)
    def _store(self, op: tile.Store, values: Values, cls: str) -> None:
        if op.first_along and values[f"{op.first_along}_start"]:
            return None
        if op.by == "distance":
            return self._store_distances(op, values)
        dims = self.dims[op.value]
        places, part = self.window(op, op.dst, op.check, dims, values, cls)
        written = values[op.value][part] if dims else values[op.value]
        values[op.dst.tensor][places] = spread(written, dims, self._axes(op.dst, dims))
        return None

    @handles(tile.Append)
    def _append(self, op: tile.Append, values: Values, cls: str) -> None:
        """Write each row to the row that `rows` names, of its sequence or of a page, if that is below Nc."""
        *heads, axis, _ = op.dst.index
        tensor, rows = values[op.dst.tensor], values[op.rows]
        inside = (values[f"{axis}_idx"] < values[AXIS_EXTENT[str(axis)]]) & (rows >= 0) & (rows < values["Nc"])
        places: list[Any] = [int(self.expression(e, values)) for e in heads]
        if op.pages:
            places = [values[op.pages][inside], *places, rows[inside] % tensor.shape[2]]
        else:
            places.append(rows[inside])
        tensor[tuple(places)] = values[op.value][inside, : tensor.shape[3]]

    def add_in_order(self, op: tile.OrderedAdd | tile.OrderedAccumulate, values: Values, cls: str) -> Program:
        """Add a tile when the semaphore has the op's order; pause until then."""
        assert op.semaphore is not None and op.order is not None
        order = yield from self.wait_for_order(op.semaphore, op.order, values)
        self._ordered_add(op, values, cls, order == 0)
        if isinstance(op, tile.OrderedAdd) or op.ends:
            self.release(op.semaphore, values)
        return values

    def wait_for_order(self, semaphore: Access, e: Expr, values: Values) -> Generator[None, None, int]:
        """Pause until the semaphore has the program's order, and return it."""
        semaphores, at = self.semaphore_at(semaphore, values)
        order = int(self.expression(e, values))
        while semaphores[at] != order:
            if semaphores[at] > order:
                raise AttngenError(
                    f"@{self.kernel.name}: the semaphore in %{semaphore.tensor} is {semaphores[at]}, and a program has "
                    f"order {order}; expected {semaphores[at]} or more"
                )
            yield
        return order

    def semaphore_at(self, access: Access, values: Values) -> tuple[Any, tuple[int, ...]]:
        """Return the tensor of semaphores and the index of a tile's semaphore."""
        tensor, index = self.kernel.accessed(access)
        return values[tensor.name], tuple(int(self.expression(e, values)) for e in index)

    def release(self, semaphore: Access, values: Values) -> None:
        """Increment a semaphore, so that the next program may go on."""
        semaphores, at = self.semaphore_at(semaphore, values)
        semaphores[at] += 1

    @handles(tile.OrderedAdd)
    def _ordered_add(self, op: tile.OrderedAdd | tile.OrderedAccumulate, values: Values, cls: str, first: bool) -> None:
        dims = self.dims[op.value]
        places, part = self.window(op, op.dst, op.check, dims, values, cls)
        written = spread(values[op.value][part], dims, self._axes(op.dst, dims))
        values[op.dst.tensor][places] = written if first else values[op.dst.tensor][places] + written

    def _store_distances(self, op: tile.Store, values: Values) -> None:
        """Sum a tile of scores by distance (key minus query), and store the sums at index distance + Nq in the
        program's rows.

        In each row a tile has BLOCK_KV elements, so that no two tiles of a program write one element: the BLOCK_KV
        distances from that of its corner on are in the first row, the BLOCK_KV distances before these in the next row,
        and so on.
        """
        n_q, n_kv, block_q, block_kv = (values[name] for name in ("Nq", "Nk", "BLOCK_Q", "BLOCK_KV"))
        distance = np.arange(block_kv) - np.arange(block_q)[:, None]  # less the corner's
        sums = np.zeros(((block_q + block_kv - 2) // block_kv + 1, block_kv))
        np.add.at(sums, (-(distance // block_kv), distance % block_kv), values[op.value])
        parts = values[op.dst.tensor][self.window(op, op.dst, (), (), values, "")[0]]
        for row, of_row in enumerate(sums, values["_q_row"] // block_q * len(sums)):
            index = values["kv_start"] - values["q_start"] + n_q - row % len(sums) * block_kv + np.arange(block_kv)
            inside = (index >= 0) & (index < n_q + n_kv)
            parts[row, index[inside]] = of_row[inside]

    def places(
        self, op: tile.Gather | tile.Scatter, access: Access, dims: tuple[str, ...], values: Values
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the tensor indices of the elements where the condition holds, and the condition for all elements."""
        shape = self.shape(dims, values)
        inside = np.broadcast_to(self.expression(op.where, values, dims, op.uses), shape)
        found = []
        for at, (e, length) in enumerate(zip(access.index, values[access.tensor].shape)):
            index = np.broadcast_to(self.expression(e, values, dims, op.uses), shape)[inside]
            if index.size:
                self.must_be_inside(op, access, at, int(index.min()), int(index.max()) + 1, length)
            found.append(index)
        return tuple(found), inside

    @handles(tile.Gather)
    def _gather(self, op: tile.Gather, values: Values, cls: str) -> Any:
        places, inside = self.places(op, op.src, op.type.dims, values)
        result = np.zeros(inside.shape, self.dtypes[op.type.dtype])
        result[inside] = values[op.src.tensor][places]
        return result if op.type.dims else self.tile(result, op.type, values)

    @handles(tile.Scatter)
    def _scatter(self, op: tile.Scatter, values: Values, cls: str) -> None:
        places, inside = self.places(op, op.dst, self.dims[op.value], values)
        written = np.asarray(values[op.value])[inside]
        if op.op == "put":
            values[op.dst.tensor][places] = written
        else:
            {"add": np.add, "min": np.minimum, "max": np.maximum}[op.op].at(values[op.dst.tensor], places, written)

    @handles(tile.CountTiles)
    def _count_tiles(self, op: tile.CountTiles, values: Values, cls: str) -> int:
        *place, axis = op.src.index
        row = values[op.src.tensor][tuple(int(self.expression(e, values)) for e in place)]
        return int((row[:: values[AXIS_DIM[axis_of(axis)]]] <= self.expression(op.most, values)).sum())

    @handles(tile.ListPosition)
    def _list_position(self, op: tile.ListPosition, values: Values, cls: str) -> int:
        axis = self.kernel.traits.ranked_axis(op)
        if isinstance(self.kernel.op(op.src), tile.Arg):
            return self.tile_of_call(axis, op.tile, values)
        ranks, ratio = values[op.src], self.tiles_in_a_block(axis, values)
        block, rest = divmod(int(self.expression(op.tile, values)), ratio)
        before = int(ranks[block])
        listed = rest > 0 and ranks[block + 1] > before  # the tile's block is listed
        return before * ratio + (rest if listed else 0)

    def tile_of_call(self, axis: str, tile: Expr, values: Values) -> int:
        """The number of tiles that a call with chunks of a sequence has before a tile of the whole sequence."""
        ranks, rows, size = values[START_RANKS[axis][0]], int(values[AXIS_DIM[axis]]), self.module.unit
        unit, rest = divmod(int(self.expression(tile, values)) * rows, size)
        before = int(ranks[unit])
        has = rest > 0 and ranks[unit + 1] > before  # the call has the unit in which the tile starts
        return (before * size + (rest if has else 0)) // rows
