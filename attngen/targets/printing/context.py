"""Builds the views from which templates print a kernel: one view per op, every string ready to print.

This module makes names and source strings; passes decided what a kernel does. Python variables are named after the
IR's values, and a carried field has one variable from its start to its end.
"""

from __future__ import annotations

import re
from typing import Any

import sympy

from attngen.ir import AXIS_DIM, GROUPED, TILED, Access, Op, only, symbol, tile
from attngen.ir.behaviour import handles
from attngen.ir.dtypes import ELEMENTS
from attngen.ir.names import SIZES, STATISTICS, stride_names
from attngen.targets.printing.memory_views import applies, in_range
from attngen.targets.printing.program_views import ProgramContext
from attngen.targets.printing.split_kv import split_args
from attngen.targets.printing.views import LOOP_COMMENTS, KernelView, Node, gathered, names_in

VARYING = (
    "Nq",
    "Nk",
    "Rq",
    "Rk",
    "Nlse",
    "Nentropy",
    "Nc",
    "Nn",
    "max_pages",
    "dropout_threshold",
)  # integers that differ from call to call, on which kernels are not specialized
_TYPES = {"f32": "tl.float32", "i32": "tl.int32"}


class KernelContext(ProgramContext, complete=tile.TILE, control=(tile.Arg,)):
    """Builds the views of one kernel."""

    def view(self) -> KernelView:
        """The view of the kernel."""
        kernel = self.kernel
        args = kernel.args
        nodes = self.block("entry", "entry")
        used = names_in(nodes) | ({*split_args(kernel)} if kernel.kv_split else set())
        scalars = [a.name for a in args if a.role == "scalar"]
        numbers, sizes = [s for s in scalars if s not in SIZES], [s for s in scalars if s in SIZES]
        tensors = [a for a in args if a.role != "scalar"]
        strides = [s for a in tensors for s in stride_names(a.name, a.type.dims) if s in used]
        # Statistics, also those of splits, are stored row by row, so their strides are lengths: kernels are not
        # specialized on them.
        stored = [a for a in tensors if a.name in STATISTICS and (a.role == "out" or "items" in a.type.dims)]
        lengths = [s for a in stored for s in stride_names(a.name, a.type.dims) if s in strides]
        prologue, iteration, iterations = self._prologue(used)
        words = used | set(re.findall(r"\w+", " ".join([*prologue, *iteration])))
        described = any(op.via for op in only(kernel.ops(), tile.Load))
        flags = {"TMA": described, "CONVERTS": kernel.traits.reads_quantised, "OVERLAPS": kernel.traits.overlaps}
        if kernel.launches_dependents:
            condition = "if OVERLAPS:  # let programs of the next launch start; they wait for the end of this one"
            prologue = [condition, "    tl.extra.cuda.gdc_launch_dependents()", *prologue]
        return KernelView(
            name=kernel.name,
            summary=kernel.about,
            params=[*(a.name for a in tensors), *numbers, *sizes, *strides],
            tiles=[t for t in TILED if t in words],
            dropout=kernel.traits.has_dropout,
            flags=[name for name, has in flags.items() if has],
            sums_input_gradients=any(a.role == "out" and self._is_input_gradient(a.name) for a in args),
            not_specialized=[s for s in (*numbers, *sizes) if s in VARYING or (kernel.kv_split and s in ("B", "items"))]
            + lengths,
            prologue=prologue,
            iteration=iteration,
            iterations=iterations,
            nodes=nodes,
            words=words,
        )

    def block(self, name: str, cls: str) -> list[Node]:
        """The views of a block's ops, as a loop of class `cls` (full, partial, all) runs them."""
        nodes = []
        for op in self.kernel.walk(name):
            if isinstance(op, tile.Arg) or self._idle(op, cls):
                continue
            text = self.handler(op)(op, cls)
            body = self.block(op.body, op.cls) if isinstance(op, tile.Loop) else []
            if isinstance(op, tile.Loop):
                self._loop_header(op, text, body)
            nodes.append(Node(op.kind, text, body))
        return gathered(nodes)

    def _idle(self, op: Op, cls: str) -> bool:
        """True if an op is not printed: a mask that loops of this class do not apply, or a value that only such masks
        in the same body read."""
        if isinstance(op, tile.Mask):
            return not applies(op.when, cls)
        graph = self.kernel.graph
        read = (
            graph.successors(op.name)
            if isinstance(op, tile.Base)
            else (op.name,)
            if isinstance(op, (tile.Gather, tile.Load))
            else ()
        )
        if read and all(self.kernel.traits.only_known(self.kernel.op(n)) for n in read):
            return True  # the bounds of the loops already contain these facts
        nodes = self.kernel.graph.nodes
        users = [nodes[n] for n in self.kernel.graph.successors(op.name)]
        masks = [u["op"] for u in users if isinstance(u["op"], tile.Mask) and u["block"] == nodes[op.name]["block"]]
        return 0 < len(users) == len(masks) and all(m.value != op.name and self._idle(m, cls) for m in masks)

    @handles(tile.Loop)
    def _loop(self, op: tile.Loop, cls: str) -> dict[str, Any]:
        return {"ranges": [(self.scalar(lo), self.scalar(hi)) for lo, hi in op.ranges], "cls": op.cls}

    def _loop_header(self, op: tile.Loop, text: dict[str, Any], body: list[Node]) -> None:
        """Add to `text` the loop's variable and range, the lines before it, and those that start each iteration."""
        used = self._names_of_loop(body)
        ranges = text["ranges"]
        over_tiles = op.var in AXIS_DIM
        number = f"{op.var}_tile" if over_tiles else op.var
        (lo, hi), *more = ranges
        pages = self._pages_by_tile(op)
        counter = "at" if op.listed or (pages and more) else number if over_tiles or number in used else "_"
        stop = hi
        before: list[str] = []
        steps: list[str] = [f"{number} = at"] if pages and more else []
        moved = f"{op.var}_at" if op.listed else number
        for (_, end), (next_lo, next_hi) in zip(ranges, more):  # names or numbers, so they need no brackets
            stop += f" + ({next_hi} - {next_lo})"
            steps.append(f"{moved} = tl.where({moved} < {end}, {moved}, {moved} + ({next_lo} - {end}))")
        if op.listed:
            if more:
                before, stop = [f"{op.var}_stop = {stop}"], f"{op.var}_stop"
            before += self._read_ahead(op, lo, stop, moved, steps)
            steps = [f"{number} = {op.var}_ahead", *self._read_ahead(op, "at + 1", stop, moved, steps)]
        if pages:
            jumps = [step.replace(number, f"{op.var}_next") for step in steps[1:]]
            before += [f"{op.var}_next = {lo}", *jumps] if jumps else []
            before.append(self._page_ahead(pages, f"{op.var}_next" if jumps else lo, f"{stop} > {lo}"))
            following = [f"{op.var}_next = {counter} + 1", *jumps]
            steps += [f"{pages.name}_of_tile = {pages.name}_ahead", *following]
            steps.append(self._page_ahead(pages, f"{op.var}_next", f"{counter} + 1 < {stop}"))
        if over_tiles:
            steps += self._tile_position(op.var, number, used)
        options = ", disable_licm=True" * op.recompute
        kind = op.var if op.var in ("split", "KV_splits") else "own" if over_tiles and op.cls == "all" else op.cls
        comment = self.kernel.block(op.body).about or LOOP_COMMENTS[kind]
        text.update(before=before, var=counter, start=lo, stop=stop, options=options, steps=steps, comment=comment)

    def _names_of_loop(self, body: list[Node]) -> set[str]:
        """The names that a loop's body needs and does not define itself, among others."""
        return names_in(body)

    def _page_ahead(self, pages: tile.Gather, number: str, there: str) -> str:
        """The line that reads the page number of a tile, if the tile exists. Loops run it one iteration ahead, because
        the tile's copy waits for it."""
        tensor = self.kernel.op(pages.src.tensor)
        assert isinstance(tensor, tile.Arg)
        of_sequence = self._start(Access(tensor.name, pages.src.index[:-1]), tensor)
        return f"{pages.name}_ahead = _page_of({of_sequence}, {number} * BLOCK_KV, {there}, TMA)"

    def _read_ahead(self, op: tile.Loop, at: str, stop: str, moved: str, jumps: list[str]) -> list[str]:
        """Lines that read the number of the listed tile at a position, past the gaps between concatenated ranges.

        Loops run them one iteration ahead, so the loads of a tile need not wait for its number, and Triton pipelines
        them through all stages.
        """
        place = [f"{moved} = {at}", *jumps] if jumps else []
        args = (self.var(str(op.listed)), moved if jumps else at, f"{stop} > {at}", f"BLOCK // {AXIS_DIM[op.var]}")
        return [*place, f"{op.var}_ahead = _tile_at({', '.join(args)})"]

    @handles(tile.ListPosition)
    def _list_position(self, op: tile.ListPosition, cls: str) -> dict[str, Any]:
        rows, ranks, number = AXIS_DIM[self.kernel.traits.ranked_axis(op)], self.var(op.src), self.scalar(op.tile)
        if isinstance(self.kernel.op(op.src), tile.Arg):
            return {"var": op.name, "expr": f"_tile_of_call({ranks}, {number}, {rows}{self.lookup_options})"}
        return {"var": op.name, "expr": f"_list_position({ranks}, {number}, BLOCK // {rows})"}

    @handles(tile.Seed)
    def _seed(self, op: tile.Seed, cls: str) -> dict[str, Any]:
        return {"var": self.var(op.name), "src": op.src}

    @handles(tile.DropoutMask)
    def _dropout_mask(self, op: tile.DropoutMask, cls: str) -> dict[str, Any]:
        """The random words of a tile. The scores to keep are computed from them where scores are dropped: until then
        the four scores of a word take one register."""
        args = [
            self.var(op.seed),
            "b",
            self.scalar(op.head),
            "q_start",
            "kv_start",
            "BLOCK_Q",
            "BLOCK_KV",
            str(transposed(op)),
        ]
        return {"var": self._words(op.name), "args": args}

    @handles(tile.Dropout)
    def _dropout(self, op: tile.Dropout, cls: str) -> dict[str, Any]:
        threshold = self.var(self._philox(op.keep).threshold)
        zero = "0.0 * keep_scale" if self._is_only_cast(op) and "keep_scale" in self.kernel.graph else "0.0"
        args = [self.var(op.value), self._words(op.keep), threshold, zero, str(transposed(op))]
        return {"var": self.var(op.name), "value": self.var(op.value), "args": args}

    def _philox(self, keep: str) -> tile.DropoutMask:
        """The Philox op that produces this tile's dropout mask."""
        op = self.kernel.op(keep)
        assert isinstance(op, tile.DropoutMask)
        return op

    def _words(self, keep: str) -> str:
        """The variable of the random words of a tile."""
        return f"{self.var(keep)}_words"

    def _is_only_cast(self, op: Op) -> bool:
        """True if the only use of a value is a cast to the element type. A compiler may then move the cast before the
        value's own op."""
        readers = [self.kernel.op(name) for name in self.kernel.graph.successors(op.name)]
        casts = [
            r for r in only(readers, tile.Map) if r.type.dtype == "T" and [str(r.expr)] == [name for name, _ in r.uses]
        ]
        return len(readers) == len(casts) == 1

    @handles(tile.Init)
    def _init(self, op: tile.Init, cls: str) -> dict[str, Any]:
        value = self._constant(op.value) if op.type.dtype == "f32" else self.scalar(op.value)
        return {"var": self.var(op.name), "shape": ", ".join(op.type.dims), "value": value, "of": _TYPES[op.type.dtype]}

    @handles(tile.Dot)
    def _dot(self, op: tile.Dot, cls: str) -> dict[str, Any]:
        a, b = self.kernel.type_of(op.a), self.kernel.type_of(op.b)
        left = self.var(op.a) if a.dims[1] == op.over else f"tl.trans({self.var(op.a)})"
        right = self.var(op.b) if b.dims[0] == op.over else f"tl.trans({self.var(op.b)})"
        acc = self.var(op.acc) if op.acc else ""
        return {"var": self.var(op.name), "a": left, "b": right, "acc": acc, "precision": op.precision}

    @handles(tile.Map)
    def _map(self, op: tile.Map, cls: str) -> dict[str, Any]:
        uses = dict(op.uses)
        casting = op.type.dtype == "T" or op.type.dtype in ELEMENTS
        text = self._text(op.expr, uses, op.type.dims, fp32=not casting)
        if op.type.dtype == "i32" and "tl.int64" in text:
            text = f"tl.cast({text}, tl.int32)"
        if casting:
            dtype = "dtype" if op.type.dtype == "T" else f"tl.{ELEMENTS[op.type.dtype].torch}"
            text = f"{text}.to({dtype})" if re.fullmatch(r"\w+", text) else f"({text}).to({dtype})"
        described = [load for load in only(self.kernel.ops(), tile.Load) if load.via]
        needed = next((load.needed for load in described if load.needed), ((sympy.Integer(0), symbol("Nk")),))
        clears = cls == "partial" and self.kernel.traits.zeroes_past_end(op) and described
        return {
            "var": self.var(op.name),
            "expr": text,
            "cleared": f"({in_range('kv_idx', *map(self.scalar, *needed))})[:, None]" if clears else "",
        }

    @handles(tile.Mask)
    def _mask(self, op: tile.Mask, cls: str) -> dict[str, Any]:
        condition = self._text(op.where, dict(op.uses), op.type.dims)
        spread = self._spread(op.where.free_symbols, dict(op.uses), op.type.dims)
        condition = f"({condition}){spread}" if spread else condition
        return {"var": self.var(op.name), "condition": condition}

    @handles(tile.SoftmaxStep)
    def _softmax_step(self, op: tile.SoftmaxStep, cls: str) -> dict[str, Any]:
        scale = self.var(op.scale) if op.scale else ""
        shift = self.var(op.shift) if op.shift else ""
        return {
            "s": self.var(op.s),
            "m": self.var(op.m),
            "scale": scale,
            "shift": shift,
            "guard": applies(op.guard, cls),
        }

    @handles(tile.Reduce)
    def _reduce(self, op: tile.Reduce, cls: str) -> dict[str, Any]:
        value, axis = self.var(op.value), self.kernel.type_of(op.value).dims.index(op.over)
        if (groups := GROUPED.get(op.over, "")) in op.type.dims:
            value, axis = f"{value}.reshape({op.type.dims[0]}, {groups}, {op.over} // {groups})", 2
        return {"var": self.var(op.name), "value": value, "op": op.op, "axis": axis}

    @handles(tile.Scan)
    def _scan(self, op: tile.Scan, cls: str) -> dict[str, Any]:
        axis = self.kernel.type_of(op.value).dims.index(op.over)
        return {"var": self.var(op.name), "value": self.var(op.value), "axis": axis}

    @handles(tile.Barrier)
    def _barrier(self, op: tile.Barrier, cls: str) -> dict[str, Any]:
        return {}

    @handles(tile.GridDependencyWait)
    def _grid_dependency_wait(self, op: tile.GridDependencyWait, cls: str) -> dict[str, Any]:
        return {}

    @handles(tile.Deinterleave)
    def _deinterleave(self, op: tile.Deinterleave, cls: str) -> dict[str, Any]:
        value, of = self.var(op.value), self.kernel.type_of(op.value)
        rows, columns = op.type.dims
        expr = f"_from_pairs({value}, CONVERTS)" if of.quantised else f"tl.split({value}.reshape({rows}, {columns}, 2))"
        return {"var": f"{self.var(f'{op.name}.even')}, {self.var(f'{op.name}.odd')}", "expr": expr}

    @handles(tile.Interleave)
    def _interleave(self, op: tile.Interleave, cls: str) -> dict[str, Any]:
        a, b = self.var(op.a), self.var(op.b)
        quantised = op.type.quantised
        return {
            "var": self.var(op.name),
            "expr": f"_to_pairs({a}, {b})" if quantised else f"tl.join({a}, {b}).reshape({', '.join(op.type.dims)})",
        }

    @handles(tile.Yield)
    def _yield(self, op: tile.Yield, cls: str) -> dict[str, Any]:
        pairs = [(self.var(f), self.var(ref)) for f, ref in op.values]
        return {"pairs": [(f, v) for f, v in pairs if f != v]}


def transposed(op: tile.DropoutMask | tile.Dropout) -> bool:
    """True if the rows of a tile of scores are keys."""
    return op.type.dims[0] == "BLOCK_KV"
