"""Builds the views of ops that read and write memory: their addresses, bounds checks and descriptors."""

from __future__ import annotations

from typing import Any

import sympy

from attngen.ir import Access, only, tile
from attngen.ir.behaviour import handles
from attngen.ir.dims import AXIS_DIM, AXIS_EXTENT, COLUMN_DIM, SPLIT_DIM, WHOLE, axis_of, dimension, first_row
from attngen.ir.expr import Bool, symbol
from attngen.ir.names import ROW_AXES, STARTS, stride_names
from attngen.targets.printing.expressions import ExpressionContext

NEAR_ROWS = 256  # offsets in so many rows fit 32 bits, because calls keep the row stride below 2**23 elements


def in_range(index: str, first: str, end: str) -> str:
    """The condition that rows, which are not negative, are in a range."""
    return f"{index} < {end}" if first == "0" else f"({index} >= {first}) & ({index} < {end})"


def _as_tile(access: Access, tile: tuple[str, ...]) -> tuple[str, ...]:
    """The dimensions of an access, in the tile's order if the tile has transposed scores."""
    dims = tuple(AXIS_DIM[a] for a in access.axes())
    return tile if tile == dims[::-1] else dims


def applies(when: str, cls: str) -> bool:
    """True if loops of class `cls` run an op that is marked `always` or `partial`."""
    return when == "always" or (when == "partial" and cls == "partial")


class MemoryContext(ExpressionContext):
    """Builds the views of loads, stores and other accesses."""

    @property
    def _loops_over_splits(self) -> bool:
        return any(axis.var == "KV_split" for axis in self.kernel.grid)

    def _pages_by_tile(self, op: tile.Loop) -> tile.Gather | None:
        """The page numbers of a loop's tiles, if each tile lies in one page: then TMA reads the tiles."""
        loads = [load for load in only(self.kernel.block(op.body).ops, tile.Load) if load.pages and load.via]
        table = self.kernel.op(loads[0].pages) if loads and loads[0].pages else None
        return table if isinstance(table, tile.Gather) else None

    @property
    def lookup_options(self) -> str:
        """More arguments of the functions that look up positions, as text to append."""
        return ""

    def _tile_position(self, axis: str, number: str, words: set[str]) -> list[str]:
        """Lines that compute where the tile with this number lies along an axis: its first row and its positions, as
        far as `words` name them. If calls have chunks of a sequence, a tile's position in the whole is looked up."""
        row, start, index = self.row(axis), f"{axis}_start", f"{axis}_idx"
        lines = [f"{row} = {number} * {AXIS_DIM[axis]}"]
        if row != start and {start, index} & words:
            lines.append(f"{start} = _position_of({STARTS[axis][0]}, {row}, {AXIS_DIM[axis]}{self.lookup_options})")
        return [*lines, *([f"{index} = {start} + {axis}_off"] if index in words else [])]

    def row(self, axis: str) -> str:
        """The variable of the first row of a tile, in the tensors of the call."""
        return first_row(axis, self.kernel.traits.places and axis in STARTS)

    @handles(tile.Base)
    def _base(self, op: Any, cls: str) -> dict[str, Any]:
        tensor = self.kernel.op(op.src.tensor)
        assert isinstance(tensor, tile.Arg)
        users = [self.kernel.op(name) for name in self.kernel.graph.successors(op.name)]
        described = "yes" if all(isinstance(u, tile.Load) and u.via for u in users) else ""
        return {"var": op.name, "expr": self._start(op.src, tensor), "described": described}

    def _start(self, access: Access, tensor: tile.Arg) -> str:
        """The address of the first row of one (batch, head) of a tensor, in 64 bits."""
        indices = (
            (i, stride) for i, stride in zip(access.index, stride_names(tensor.name, tensor.type.dims)) if i != 0
        )
        return " + ".join(
            [access.tensor, *(f"tl.cast({self.scalar(i)}, tl.int64) * {stride}" for i, stride in indices)]
        )

    def _row_of_tile(self, axis: str, tile: tuple[str, ...]) -> str:
        """The variable of a tile's rows along an axis, counted from the tile's first row."""
        return f"{axis}_off"

    def _row_of_tensor(self, axis: str, tile: tuple[str, ...]) -> str:
        """The same, counted from the tensor's first row."""
        return f"{axis}_idx"

    def _pointer(self, access: Access, shape: tuple[str, ...] = ()) -> str:
        """The address of a tile: the start of its rows as a 64-bit scalar, plus 32-bit offsets inside the tile."""
        source = self.kernel.op(access.tensor)
        tensor = source if isinstance(source, tile.Arg) else self.kernel.op(source.src.tensor)  # type: ignore[attr-defined]
        assert isinstance(tensor, tile.Arg)
        strides = [*stride_names(tensor.name, tensor.type.dims), ""][-len(access.index) :]
        scalars, tiles = [access.tensor], []
        dims = _as_tile(access, shape)
        for at, (index, stride) in enumerate(zip(access.index, strides)):
            if index == 0:
                continue
            axis = axis_of(index)
            times = f" * {stride}" if stride else ""
            if not axis:
                scalars.append(f"{self.scalar(index)}{times}")
                continue
            spread = (
                "" if len(dims) == 1 else "[" + ", ".join(":" if d == AXIS_DIM[axis] else "None" for d in dims) + "]"
            )
            if axis == self.kernel.program_axis and times and spread and self._loops_over_splits:
                # One product per iteration: offsets that are the same in all iterations would be kept in registers.
                row = self._row_of_tensor(axis, shape)
                tiles.append(f"{row if row.isidentifier() else f'({row})'}.to(tl.int64){spread}{times}")
            elif axis in ROW_AXES:
                start = self.scalar(index.subs(symbol(axis), symbol(self.kernel.traits.first_row(access, at, axis))))
                scalars.append(f"tl.cast({start}, tl.int64){times}" if times else start)
                tiles.append(f"{self._row_of_tile(axis, shape)}{spread}{times}")
            else:
                tiles.append(f"{axis}{spread}")
        inner = " + ".join(tiles)
        return " + ".join([*scalars, f"({inner})" if len(tiles) > 1 else inner] if tiles else scalars)

    def _check(self, checks: Any, access: Access, cls: str, tile: tuple[str, ...] = (), needed: Any = ()) -> str:
        """The condition that elements are in bounds and, along the loop's axis, in the range of rows `needed`."""
        dims = _as_tile(access, tile)
        conditions = []
        for axis, when in checks:
            if applies(when, cls):
                index = self._row_of_tensor(axis, tile) if axis in ROW_AXES else axis
                text = (
                    in_range(index, *map(self.scalar, *needed))
                    if needed and axis == self.kernel.loop_axis
                    else f"{index} < {AXIS_EXTENT[axis]}"
                )
                if len(dims) > 1:
                    text = f"({text})[{', '.join(':' if d == AXIS_DIM[axis] else 'None' for d in dims)}]"
                conditions.append(text)
        return " & ".join(conditions)

    @handles(tile.CacheLength)
    def _cache_length(self, op: tile.CacheLength, cls: str) -> dict[str, Any]:
        return {"var": op.name, "tensor": op.src.tensor}

    def _rows_in_cache(self, access: Access, pages: str | None, rows: str) -> str:
        """The address of the rows `rows` of a sequence in a cache, each at its own place; `pages` holds their pages if
        the cache is paged."""
        tensor = self.kernel.op(access.tensor)
        assert isinstance(tensor, tile.Arg)
        strides = [*stride_names(tensor.name, tensor.type.dims), ""]
        *heads, _, column = access.index
        terms = [tensor.name]
        if pages:
            page, strides = strides[0], strides[1:]
            rows = f"({rows} % {self.scalar(dimension(tensor.type.dims[2]))})"
            terms.append(f"{self.var(pages)}.to(tl.int64)[:, None] * {page}")
        terms += [f"tl.cast({self.scalar(i)}, tl.int64) * {stride}" for i, stride in zip(heads, strides) if i != 0]
        near = (
            tensor.type.dims[2].isdigit() and int(tensor.type.dims[2]) <= NEAR_ROWS
        )  # then offsets in a page have 32 bits
        of_row = (
            f"{rows}[:, None] * {strides[-2]}" if pages and near else f"{rows}.to(tl.int64)[:, None] * {strides[-2]}"
        )
        return " + ".join([*terms, of_row, f"{column}[None, :]"])

    @handles(tile.Append)
    def _append(self, op: tile.Append, cls: str) -> dict[str, Any]:
        rows = self.var(op.rows)
        inside = f"((kv_idx < Nk) & ({rows} >= 0) & ({rows} < Nc))[:, None]"
        columns = [(axis, when) for axis, when in op.check if axis not in ("q", "kv")]
        check = " & ".join([inside, *([self._check(columns, op.dst, cls)] if columns else [])])
        ptr = self._rows_in_cache(op.dst, op.pages, rows)
        return {"input_gradient": False, "distances": (), "ptr": ptr, "value": self.var(op.value), "check": check}

    @handles(tile.Load)
    def _load(self, op: tile.Load, cls: str) -> dict[str, Any]:
        check = self._check(op.check, op.src, cls, op.type.dims, op.needed)
        other = "False" if op.type.dtype == "b1" else "0" if op.type.quantised else self._constant(op.other)
        pointer = self._rows_in_cache(op.src, op.pages, "kv_idx") if op.pages else self._pointer(op.src, op.type.dims)
        text = {"var": self.var(op.name), "ptr": pointer, "check": check, "other": other, **self._own_columns(op)}
        return {**text, "described": self._described(op, cls) if op.via else ""}

    def _own_columns(self, op: tile.Load) -> dict[str, str]:
        """For a load of some columns of a tile: that tile, and the condition that they are not all its columns."""
        if not op.columns_of:
            return {"whole": ""}
        own = SPLIT_DIM[axis_of(op.src.index[-1])]
        letter = next(axis for axis, dim in COLUMN_DIM.items() if dim == WHOLE[own])
        return {"whole": self.var(op.columns_of), "part": f"{own} < {self._width(letter)}"}

    def _described(self, op: tile.Load, cls: str) -> str:
        """The expression of a tile read by descriptor, whose sequence and head are dimensions of one element.

        A page holds whole tiles. Rows of the cache past the sequence's end may hold NaN: if rows are summed over, they
        become zeros, as rows past the end of a tensor are; elsewhere the mask hides the scores that they give.
        """
        tensor, index = self.kernel.accessed(op)
        rows, _ = op.src.axes()
        places, start = [self.scalar(i) for i in index[:-2]], self.row(rows)
        if op.pages:
            assert isinstance(tensor, tile.Arg)
            places = [f"{self.var(op.pages)}_of_tile", *places]
            start = f"{start} % {self.scalar(dimension(tensor.type.dims[2]))}"
        read = f"{tensor.name}.load([{', '.join([*places, start, '0'])}]).reshape({', '.join(op.type.dims)})"
        check = self._check(
            [(axis, when) for axis, when in op.check if axis == rows], op.src, cls, op.type.dims, op.needed
        )
        zero = "0" if op.type.quantised else "0.0"
        return f"tl.where({check}, {read}, {zero})" if check and self.kernel.traits.zeroes_past_end(op) else read

    @handles(tile.Gather)
    def _gather(self, op: tile.Gather, cls: str) -> dict[str, Any]:
        pointer, condition = self._places(op.src, op.where, dict(op.uses), op.type.dims)
        other = "False" if op.type.dtype == "b1" else "0"
        return {
            "var": self.var(op.name),
            "ptr": pointer,
            "check": condition,
            "other": other,
            "whole": "",
            "described": self._page_of_tile(op),
        }

    def _page_of_tile(self, op: tile.Gather) -> str:
        """The variable of the tile's page number, if `op` reads that and the loop has read it for TMA; else empty."""
        if op.src.tensor != "PAGE_TABLE" or op.type.dims:
            return ""
        block = self.kernel.graph.nodes[op.name]["block"]
        pages = next((self._pages_by_tile(loop) for loop in self.kernel.loops if loop.body == block), None)
        return f"{pages.name}_of_tile" if pages else ""

    @handles(tile.Scatter)
    def _scatter(self, op: tile.Scatter, cls: str) -> dict[str, Any]:
        pointer, condition = self._places(op.dst, op.where, dict(op.uses), self.kernel.type_of(op.value).dims)
        return {"ptr": pointer, "value": self.var(op.value), "check": condition, "op": op.op}

    def _places(self, access: Access, where: Bool, uses: dict[str, str], shape: tuple[str, ...]) -> tuple[str, str]:
        """The address of each element, with heads and sequences in 64 bits and offsets in the last dimension in 32;
        and the condition, if any."""
        tensor = self.kernel.op(access.tensor)
        assert isinstance(tensor, tile.Arg)
        terms, offset = [access.tensor], ""
        for index, stride in zip(access.index, [*stride_names(tensor.name, tensor.type.dims), ""]):
            if index == 0:
                continue
            text = self._text(index, uses, shape)
            spread = self._spread(index.free_symbols, uses, shape)
            text = f"({text}){spread}" if spread else text
            if stride:
                terms.append(
                    f"({text}).to(tl.int64) * {stride}"
                    if shape and spread is not None
                    else f"tl.cast({text}, tl.int64) * {stride}"
                )
            else:
                offset = text
        condition = "" if where == sympy.true else self._text(where, uses, shape)
        spread = self._spread(where.free_symbols, uses, shape) if condition else None
        return " + ".join([*terms, offset] if offset else terms), f"({condition}){spread}" if spread else condition

    def _is_input_gradient(self, tensor: str) -> bool:
        return tensor in {x.partials for x in self.module.input_gradients if x.reduction != "delta"}

    @handles(tile.Store)
    def _store(self, op: tile.Store, cls: str) -> dict[str, Any]:
        input_gradient = self._is_input_gradient(self.kernel.accessed(op)[0].name)
        if op.by:
            tensor = self.kernel.op(op.dst.tensor)
            assert isinstance(tensor, tile.Arg)
            args = [
                self._start(op.dst, tensor),
                self.var(op.value),
                "q_start",
                "kv_start",
                *([self.row("q")] if self.kernel.traits.places else []),
                "Nq",
                "Nk",
                "BLOCK_Q",
                "BLOCK_KV",
            ]
            return {
                "input_gradient": input_gradient,
                "distances": args,
                "where": f"{op.first_along}_start == 0" if op.first_along else "",
            }
        shape = self.kernel.type_of(op.value).dims
        check = self._check(op.check, op.dst, cls, shape)
        if op.first_along:
            rows = check if len(shape) > 1 else f"({check})"
            check = f"{rows} & ({op.first_along}_start == 0)"
        return {
            "input_gradient": input_gradient,
            "distances": (),
            "ptr": self._pointer(op.dst, shape),
            "value": self.var(op.value),
            "check": check,
        }

    @handles(tile.OrderedAdd, tile.OrderedAccumulate)
    def _ordered_add(self, op: tile.OrderedAdd | tile.OrderedAccumulate, cls: str) -> dict[str, Any]:
        assert op.semaphore is not None
        semaphore = self.kernel.op(op.semaphore.tensor)
        assert isinstance(semaphore, tile.Arg)
        return {"semaphore": self._start(Access(semaphore.name, op.semaphore.index[:-1]), semaphore)}

    @handles(tile.CountTiles)
    def _count_tiles(self, op: tile.CountTiles, cls: str) -> dict[str, Any]:
        """The address of the numbers to count, and the bound `most` that the counted ones do not exceed."""
        tensor = self.kernel.op(op.src.tensor)
        assert isinstance(tensor, tile.Arg)
        (axis,) = op.src.axes()
        rows = {"own": f"{axis}_start", "end": AXIS_EXTENT[axis], "rows": AXIS_DIM[axis]}
        start = self._start(Access(op.src.tensor, op.src.index[:-1]), tensor)
        return {"var": op.name, "start": start, "most": self.scalar(op.most), **rows}
