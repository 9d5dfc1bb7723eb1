"""What the templates see: one view per node, every string ready to print.

Names and source strings are made here; what a kernel does was decided by the passes. Python variables are named after
the IR's values; a carried field has one variable from its start to its end.
"""

from __future__ import annotations

import re
from typing import Any

import sympy

from attngen.ir.dtypes import ELEMENTS
from attngen.ir.expr import Bool, Expr, symbol
from attngen.ir.graph import REVERSED_GROUP, SPLIT_SYMBOLS, Kernel, Module
from attngen.ir.names import ROW_AXES, SIZES, STATISTICS, stride_names
from attngen.ir.ops import (
    AXIS_DIM,
    AXIS_EXTENT,
    COLUMN_DIM,
    GROUPED,
    KIND,
    OWN,
    PADDED,
    TILED,
    WHOLE,
    Access,
    Append,
    Arg,
    Barrier,
    Base,
    CacheLength,
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
    Yield,
    axis_of,
    dimension,
)
from attngen.targets.printing.printer import to_triton
from attngen.targets.printing.split_kv import split_args
from attngen.targets.printing.views import LOOP_COMMENTS, KernelView, Node, gathered, names_in

# Lengths of sequences that are read at once: one for each thread of a warp; where there are more sequences, one for
# each thread of four warps.
LANES, LENGTHS = 32, 128
NEAR_ROWS = 256  # whose offsets have 32 bits, as calls keep the step from row to row below 2**23 elements
VARYING = (
    "Nq",
    "Nk",
    "Nlse",
    "Nentropy",
    "Nc",
    "Nn",
    "max_pages",
    "dropout_threshold",
)  # numbers that differ from call to call
_TYPES = {"f32": "tl.float32", "i32": "tl.int32"}


class KernelContext:
    """Builds the views of one kernel."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module, self.kernel = module, kernel
        self.variables = self._variables()

    # ------------------------------------------------------------------ names

    def _variables(self) -> dict[str, str]:
        """Value -> Python variable."""
        names: dict[str, str] = {}
        for op in self.kernel.ops():
            for f in op.results():
                halved = f"{op.name}_{f}" if isinstance(op, Deinterleave) else f
                names[f"{op.name}.{f}" if f else op.name] = f"{f}_new" if f in ("m", "l") else (halved or op.name)
        for loop in self.kernel.loops:  # outermost first: entry comes before bodies
            for f, start in loop.carry:
                shared = f if isinstance(self.kernel.op(start), Init) else names[start]
                for ref in (start, f, f"{loop.name}.{f}"):
                    names[ref] = shared
        for op in self.kernel.ops():
            if isinstance(op, Mask):  # a loop that does not apply it sees the value unchanged
                names[op.name] = names[op.value]
        for block in self.kernel.blocks:
            for op in block.ops:
                if isinstance(op, Yield):
                    self._reuse_carried(names, op, block.ops)
        return names

    def _reuse_carried(self, names: dict[str, str], yielded: Yield, ops: tuple[Op, ...]) -> None:
        """A yielded value takes the carried variable itself when nothing reads the old one after it is made."""
        position = {op.name: i for i, op in enumerate(ops)}
        for f, ref in (pair for pair in yielded.values if pair[0] in names):
            made = position.get(ref.split(".")[0], -1)
            old = {r for r, n in names.items() if n == names[f]}
            later = [op for op in ops[made + 1 :] if op is not yielded and old & set(op.operands())]
            later += [
                op for op in self.kernel.ops() if op.name not in position and f in op.operands()
            ]  # in loops inside the body
            defined = self.kernel.op(ref)
            if not later and not isinstance(defined, (Loop, SoftmaxStep)):
                names[ref] = names[f]

    def var(self, ref: str) -> str:
        return self.variables[ref]

    def _lookup(self, uses: dict[str, str], tile: tuple[str, ...], fp32: bool = False) -> Any:
        def look(name: str) -> tuple[str, tuple[str, ...]]:
            if name in uses:
                type_ = self.kernel.type_of(uses[name])
                text = self.var(uses[name])
                if tile and GROUPED.get(tile[-1]) in type_.dims:
                    return f"of_columns({text}, {tile[-1]})", tile
                return (f"{text}.to(tl.float32)" if fp32 and type_.dtype == "T" else text), type_.dims
            for axis, dim in AXIS_DIM.items():
                if name == f"{axis}_idx":
                    return name, (dim,)
            return self.variables.get(name, name), ()

        return look

    def scalar(self, e: Any) -> str:
        return self._text(e, {})

    def _text(self, e: Any, uses: dict[str, str], tile: tuple[str, ...] = (), fp32: bool = False) -> str:
        """The source of an expression; its symbols are integers where the IR's types say so."""
        refs = {s: uses.get(str(s), str(s)) for s in e.free_symbols}
        whole = {
            s: sympy.Symbol(str(s), integer=True)
            for s, ref in refs.items()
            if s.is_integer is None and self._is_whole(ref)
        }
        return to_triton(e.xreplace(whole), self._lookup(uses, tile, fp32), tile)

    def _is_whole(self, ref: str) -> bool:
        return ref.split(".")[0] in self.kernel.graph and self.kernel.type_of(ref).dtype == "i32"

    # ------------------------------------------------------------------ kernels

    def view(self) -> KernelView:
        kernel = self.kernel
        args = kernel.args
        nodes = self.block("entry", "entry")
        used = names_in(nodes) | ({*split_args(kernel)} if kernel.kv_split else set())
        scalars = [a.name for a in args if a.role == "scalar"]
        numbers, sizes = [s for s in scalars if s not in SIZES], [s for s in scalars if s in SIZES]
        tensors = [a for a in args if a.role != "scalar"]
        strides = [s for a in tensors for s in stride_names(a.name, a.type.dims) if s in used]
        # Statistics are stored row by row, and their strides are lengths: other lengths need no other machine code. So
        # are those of parts.
        stored = [a for a in tensors if a.name in STATISTICS and (a.role == "out" or "items" in a.type.dims)]
        lengths = [s for a in stored for s in stride_names(a.name, a.type.dims) if s in strides]
        prologue, turn, turns = self._prologue(used)
        words = used | set(re.findall(r"\w+", " ".join([*prologue, *turn])))
        described = any(isinstance(op, Load) and op.via for op in kernel.ops())
        flags = {"TMA": described, "CONVERTS": kernel.reads_quantised, "OVERLAPS": kernel.overlaps}
        if kernel.launches_dependents:
            released = "if OVERLAPS:  # programs of the next launch may start, and wait for the end of this one"
            prologue = [released, "    tl.extra.cuda.gdc_launch_dependents()", *prologue]
        return KernelView(
            name=kernel.name,
            summary=kernel.about,
            params=[*(a.name for a in tensors), *numbers, *sizes, *strides],
            tiles=[t for t in TILED if t in words],
            dropout=kernel.has_dropout,
            flags=[name for name, has in flags.items() if has],
            learns=any(a.role == "out" and self._learned(a.name) for a in args),
            not_specialized=[s for s in (*numbers, *sizes) if s in VARYING or (kernel.kv_split and s in ("B", "items"))]
            + lengths,
            prologue=prologue,
            iteration=turn,
            iterations=turns,
            nodes=nodes,
            words=words,
        )

    def _prologue(self, used: set[str]) -> tuple[list[str], list[str], str]:
        """Which tile, head and sequence this program has. Where programs take one part of the keys after another:
        also the lines by which each turn starts, and how many turns all programs have."""
        lines, rest, outer = ["pid = tl.program_id(0)"], "pid", list(self.kernel.grid)
        of_parts = self._takes_parts
        turn: list[str] = []
        turns = ""
        if of_parts:
            (lines, turn, turns), outer = self._place_of_part(), []
        elif not self.kernel.walks:
            own = outer.pop(0)
            tiles = f"{own.var}_tiles"
            lines.append(f"{tiles} = {self.scalar(own.extent)}")
            position, rest = f"pid % {tiles}", f"pid // {tiles}"
            if own.swizzle > 1 or own.swizzle_rows:
                lines += [f"abreast = {self.scalar(own.heads)}"] if own.swizzle_rows else []
                many = "abreast" if own.swizzle_rows else own.swizzle
                lines += [
                    f"first_head = pid // ({many} * {tiles}) * {many}",
                    f"heads_in_group = tl.minimum({many}, tl.num_programs(0) // {tiles} - first_head)  # which take turns",
                    f"turn = pid - first_head * {tiles}",
                    "own_head = first_head + turn % heads_in_group",
                ]
                position, rest = "turn // heads_in_group", "own_head"
            number = f"({f'{tiles} - 1 - {position}' if own.reversed else position})"
            if own.reversed_group:
                lines.append(
                    f"{REVERSED_GROUP} = tl.where(first_head + abreast >= tl.num_programs(0) // {tiles}, 1, 0)  # the last heads"
                )
                number = f"tl.where({REVERSED_GROUP} > 0, {position}, {number[1:-1]})"
            lines.append(f"{own.var}_start = {number} * {AXIS_DIM[own.var]}")
        for head in outer[:-1]:
            extent = self.scalar(head.extent)
            number = f"{rest} % {extent}"
            lines.append(
                f"{head.var}_start = ({number}) * {OWN[head.var]}" if head.var in OWN else f"{head.var} = {number}"
            )
            rest = f"{rest} // {extent}"
        lines += [f"{outer[-1].var} = {rest}"] if outer else []
        if self.kernel.kv_split and not of_parts:
            lines += self._by_sequences(
                [("unit", "split_size", ""), (", ".join(SPLIT_SYMBOLS), "splits_of", "b, unit")]
            )
        for axis in ROW_AXES:
            off = f"{axis}_off"
            if off in used or f"{axis}_idx" in used:
                lines.append(f"{off} = tl.arange(0, {AXIS_DIM[axis]})")
        if "dtype" in used:
            tensors = [a for a in self.kernel.args if a.type.dtype == "T"]
            tensor = next((a.name for a in tensors if a.role == "out"), tensors[0].name)
            loads = (op for op in self.kernel.ops() if isinstance(op, Load) and op.via)
            described = any(self.kernel.accessed(op)[0].name == tensor for op in loads)
            lines.append(f"dtype = {f'{tensor}.dtype if TMA else ' * described}{tensor}.dtype.element_ty")
        if f"{self.kernel.program_axis}_idx" in used and not self.kernel.walks:
            (turn if of_parts else lines).append(
                f"{self.kernel.program_axis}_idx = {self.kernel.program_axis}_start + {self.kernel.program_axis}_off"
            )
        for axis in COLUMN_DIM:
            if axis in used:
                lines.append(f"{axis} = tl.arange(0, {self._width(axis)})")
        if columns := self.kernel.shared_columns:
            lines.append(f"{columns.var} = {columns.var}_start + tl.arange(0, {OWN[columns.var]})")
        return lines, turn, turns

    @property
    def _takes_parts(self) -> bool:
        """Whether its programs take one part of the keys after another."""
        return any(axis.var == "part" for axis in self.kernel.grid)

    def _place_of_part(self) -> tuple[list[str], list[str], str]:
        """Lines that find how many parts of keys there are; those by which each turn of a program starts, which has
        one of them; and how many turns all programs have together. Heads run faster than parts."""
        item, of_place, extents = self._split_place("place")
        before = [
            f"q_tiles = {self.scalar(self.kernel.grid[0].extent)}",
            *self._by_sequences([("unit", "split_size", ""), ("_, all_parts", "splits_of", "B, unit")]),
        ]
        lines = self._by_sequences([(f"b, part, {', '.join(SPLIT_SYMBOLS)}", "split_of", f"{item}, unit")])
        return before, [*lines, *of_place], " * ".join(["all_parts", *extents])

    def _split_place(self, place: str) -> tuple[str, list[str], list[str]]:
        """(the number of the part that a place is of, lines that find its queries and heads, how many places each
        part has, as factors)."""
        own, *others = self.kernel.grid
        lines, item, extents = (
            [f"q_start = ({place} % q_tiles) * {AXIS_DIM[own.var]}"],
            f"{place} // q_tiles",
            ["q_tiles"],
        )
        for head in others:
            if head.var not in ("part", "b"):
                extents.append(self.scalar(head.extent))
                lines.append(f"{head.var} = {item} % {extents[-1]}")
                item += f" // {extents[-1]}"
        return item, lines, extents

    def _by_sequences(self, found: list[tuple[str, str, str]]) -> list[str]:
        """Lines that find (names, function of lengths, its own arguments): of few sequences, whose lengths fit a warp,
        and of more.

        Sums of what a warp has need no other warp. Programs that multiply latents have one form: with two, those of 64
        rows spill.
        """
        few, many = (
            [f"{names} = {self._of_lengths(name, own, n)}" for names, name, own in found] for n in (LANES, LENGTHS)
        )
        if self.module.rope and self.kernel.dots:
            return many
        few, many = ([f"    {line}" for line in lines] for lines in (few, many))
        return [
            f"if B <= {LANES}:  # lengths of so few sequences fit a warp: sums of them need no other",
            *few,
            "else:",
            *many,
        ]

    def _of_lengths(self, name: str, own: str = "", at_once: int = LENGTHS) -> str:
        """A function of all lengths, of which it reads so many at once; own: its arguments after them."""
        return (
            f"{name}({', '.join(['CACHE_SEQLENS', *([own] if own else []), *split_args(self.kernel), str(at_once)])})"
        )

    def _width(self, axis: str) -> str:
        dim = AXIS_DIM[axis]
        size = self.module.widths[dim]
        return PADDED[dim] if size & (size - 1) else dim

    # ------------------------------------------------------------------ nodes

    def block(self, name: str, cls: str) -> list[Node]:
        """Views of a block's ops, as a loop of class `cls` runs them."""
        nodes = []
        for op in self.kernel.walk(name):
            if isinstance(op, Arg) or self._idle(op, cls):
                continue
            text = getattr(self, f"_{KIND[type(op)]}")(op, cls)
            body = self.block(op.body, op.cls) if isinstance(op, Loop) else []
            if isinstance(op, Loop):
                self._loop_header(op, text, body)
            nodes.append(Node(KIND[type(op)], text, body))
        return gathered(nodes)

    def _idle(self, op: Op, cls: str) -> bool:
        """A mask that loops of this class do not apply, or a value in the same body that only such a mask reads."""
        if isinstance(op, Mask):
            return not _applies(op.when, cls)
        graph = self.kernel.graph
        read = (
            graph.successors(op.name) if isinstance(op, Base) else (op.name,) if isinstance(op, (Gather, Load)) else ()
        )
        if read and all(self.kernel.only_known(self.kernel.op(n)) for n in read):
            return True  # the bounds of tiles have what facts say of it
        nodes = self.kernel.graph.nodes
        users = [nodes[n] for n in self.kernel.graph.successors(op.name)]
        masks = [u["op"] for u in users if isinstance(u["op"], Mask) and u["block"] == nodes[op.name]["block"]]
        return 0 < len(users) == len(masks) and all(m.value != op.name and self._idle(m, cls) for m in masks)

    def _loop(self, op: Loop, cls: str) -> dict[str, Any]:
        return {"ranges": [(self.scalar(lo), self.scalar(hi)) for lo, hi in op.ranges], "cls": op.cls}

    def _loop_header(self, op: Loop, text: dict[str, Any], body: list[Node]) -> None:
        """Loop variable, its range, what comes before it, and the lines that every turn starts with."""
        used = names_in(body)
        ranges = text["ranges"]
        over_tiles = op.var in AXIS_DIM
        tile = f"{op.var}_tile" if over_tiles else op.var
        (lo, hi), *more = ranges
        pages = self._pages_by_tile(op)
        counter = "at" if op.listed or (pages and more) else tile if over_tiles or tile in used else "_"
        stop = hi
        before: list[str] = []
        steps: list[str] = [f"{tile} = at"] if pages and more else []
        moved = f"{op.var}_at" if op.listed else tile
        for (_, end), (next_lo, next_hi) in zip(ranges, more):  # names or numbers, as what follows combines them
            stop += f" + ({next_hi} - {next_lo})"
            steps.append(f"{moved} = tl.where({moved} < {end}, {moved}, {moved} + ({next_lo} - {end}))")
        if op.listed:
            if more:
                before, stop = [f"{op.var}_stop = {stop}"], f"{op.var}_stop"
            before += self._read_ahead(op, lo, stop, moved, steps)
            steps = [f"{tile} = {op.var}_ahead", *self._read_ahead(op, "at + 1", stop, moved, steps)]
        if pages:
            jumps = [step.replace(tile, f"{op.var}_next") for step in steps[1:]]
            before += [f"{op.var}_next = {lo}", *jumps] if jumps else []
            before.append(self._page_ahead(pages, f"{op.var}_next" if jumps else lo, f"{stop} > {lo}"))
            following = [f"{op.var}_next = {counter} + 1", *jumps]
            steps += [f"{pages.name}_of_tile = {pages.name}_ahead", *following]
            steps.append(self._page_ahead(pages, f"{op.var}_next", f"{counter} + 1 < {stop}"))
        if over_tiles:
            steps.append(f"{op.var}_start = {tile} * {AXIS_DIM[op.var]}")
            if f"{op.var}_idx" in used:
                steps.append(f"{op.var}_idx = {op.var}_start + {op.var}_off")
        options = ", disable_licm=True" * op.recompute
        kind = op.var if op.var in ("split", "joined") else "own" if over_tiles and op.cls == "all" else op.cls
        comment = self.kernel.block(op.body).about or LOOP_COMMENTS[kind]
        text.update(before=before, var=counter, start=lo, stop=stop, options=options, steps=steps, comment=comment)

    def _pages_by_tile(self, op: Loop) -> Gather | None:
        """The numbers of pages in which rows of a loop's tiles lie, if whole tiles do: then a copy engine reads
        these."""
        loads = [load for load in self.kernel.block(op.body).ops if isinstance(load, Load) and load.pages and load.via]
        table = self.kernel.op(loads[0].pages) if loads and loads[0].pages else None
        return table if isinstance(table, Gather) else None

    def _page_ahead(self, pages: Gather, tile: str, there: str) -> str:
        """The line that reads the number of a tile's page, if there is such a tile. Loops do so a turn ahead, as
        copies wait for it."""
        tensor = self.kernel.op(pages.src.tensor)
        assert isinstance(tensor, Arg)
        of_sequence = self._start(Access(tensor.name, pages.src.index[:-1]), tensor)
        return f"{pages.name}_ahead = page_of({of_sequence}, {tile} * BLOCK_KV, {there}, TMA)"

    def _read_ahead(self, op: Loop, at: str, stop: str, moved: str, jumps: list[str]) -> list[str]:
        """Lines that read the number of the listed tile at a position, past the gaps between joined ranges.

        Loops do so a turn ahead: the loads of a tile need not wait for its number, and get the whole ring of buffers.
        """
        place = [f"{moved} = {at}", *jumps] if jumps else []
        args = (self.var(str(op.listed)), moved if jumps else at, f"{stop} > {at}", f"BLOCK // {AXIS_DIM[op.var]}")
        return [*place, f"{op.var}_ahead = tile_at({', '.join(args)})"]

    def _list_position(self, op: ListPosition, cls: str) -> dict[str, Any]:
        ratio = f"BLOCK // {AXIS_DIM[self.kernel.ranked_axis(op)]}"
        return {"var": op.name, "ranks": self.var(op.src), "tile": self.scalar(op.tile), "ratio": ratio}

    def _seed(self, op: Seed, cls: str) -> dict[str, Any]:
        return {"var": self.var(op.name), "src": op.src}

    def _dropout_mask(self, op: DropoutMask, cls: str) -> dict[str, Any]:
        """Random words. Which scores they keep is found where these are dropped: until then the four scores of a
        word take one register."""
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

    def _dropout(self, op: Dropout, cls: str) -> dict[str, Any]:
        draw = self._draw(op.keep)
        zero = "0.0 * keep_scale" if self._cast_alone(op) and "keep_scale" in self.kernel.graph else "0.0"
        args = [self.var(op.value), self._words(op.keep), self.var(draw.threshold), zero, str(transposed(op))]
        return {"var": self.var(op.name), "value": self.var(op.value), "args": args}

    def _draw(self, keep: str) -> DropoutMask:
        """The op that draws what says which scores are kept."""
        draw = self.kernel.op(keep)
        assert isinstance(draw, DropoutMask)
        return draw

    def _words(self, keep: str) -> str:
        """The variable of the random words of a tile."""
        return f"{self.var(keep)}_words"

    def _cast_alone(self, op: Op) -> bool:
        """Whether a value is only read to be cast to the element type, where a compiler may exchange what makes it
        and the cast."""
        readers = [self.kernel.op(name) for name in self.kernel.graph.successors(op.name)]
        casts = [
            r
            for r in readers
            if isinstance(r, Map) and r.type.dtype == "T" and [str(r.expr)] == [name for name, _ in r.uses]
        ]
        return len(readers) == len(casts) == 1

    def _base(self, op: Any, cls: str) -> dict[str, Any]:
        tensor = self.kernel.op(op.src.tensor)
        assert isinstance(tensor, Arg)
        users = [self.kernel.op(name) for name in self.kernel.graph.successors(op.name)]
        described = "yes" if all(isinstance(u, Load) and u.via for u in users) else ""
        return {"var": op.name, "expr": self._start(op.src, tensor), "described": described}

    def _start(self, access: Access, tensor: Arg) -> str:
        """Where the rows of one (batch, head) of a tensor start, in 64 bits."""
        indices = (
            (i, stride) for i, stride in zip(access.index, stride_names(tensor.name, tensor.type.dims)) if i != 0
        )
        return " + ".join(
            [access.tensor, *(f"tl.cast({self.scalar(i)}, tl.int64) * {stride}" for i, stride in indices)]
        )

    def _row_of_tile(self, axis: str, tile: tuple[str, ...]) -> str:
        """The variable of the rows of a tile along an axis, from its first row on."""
        return f"{axis}_off"

    def _row_of_tensor(self, axis: str, tile: tuple[str, ...]) -> str:
        """The expression for the same from the first row of the tensor on."""
        return f"{axis}_idx"

    def _pointer(self, access: Access, tile: tuple[str, ...] = ()) -> str:
        """Address of a tile: 64-bit scalar start of its rows, 32-bit offsets inside it."""
        source = self.kernel.op(access.tensor)
        tensor = source if isinstance(source, Arg) else self.kernel.op(source.src.tensor)  # type: ignore[attr-defined]
        assert isinstance(tensor, Arg)
        strides = [*stride_names(tensor.name, tensor.type.dims), ""][-len(access.index) :]
        scalars, tiles = [access.tensor], []
        dims = _as_tile(access, tile)
        for index, stride in zip(access.index, strides):
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
            if axis == self.kernel.program_axis and times and spread and self._takes_parts:
                # in one product for each turn: offsets that are the same in all turns would be kept in registers
                row = self._row_of_tensor(axis, tile)
                tiles.append(f"{row if row.isidentifier() else f'({row})'}.to(tl.int64){spread}{times}")
            elif axis in ROW_AXES:
                start = self.scalar(index.subs(symbol(axis), symbol(f"{axis}_start")))
                scalars.append(f"tl.cast({start}, tl.int64){times}" if times else start)
                tiles.append(f"{self._row_of_tile(axis, tile)}{spread}{times}")
            else:
                tiles.append(f"{axis}{spread}")
        inner = " + ".join(tiles)
        return " + ".join([*scalars, f"({inner})" if len(tiles) > 1 else inner] if tiles else scalars)

    def _check(self, checks: Any, access: Access, cls: str, tile: tuple[str, ...] = (), needed: Any = ()) -> str:
        """The condition under which elements are inside and, along the loop's axis, in the range of rows that are
        `needed`."""
        dims = _as_tile(access, tile)
        conditions = []
        for axis, when in checks:
            if _applies(when, cls):
                index = self._row_of_tensor(axis, tile) if axis in ROW_AXES else axis
                text = (
                    _in_range(index, *map(self.scalar, *needed))
                    if needed and axis == self.kernel.loop_axis
                    else f"{index} < {AXIS_EXTENT[axis]}"
                )
                if len(dims) > 1:
                    text = f"({text})[{', '.join(':' if d == AXIS_DIM[axis] else 'None' for d in dims)}]"
                conditions.append(text)
        return " & ".join(conditions)

    def _cache_length(self, op: CacheLength, cls: str) -> dict[str, Any]:
        return {"var": op.name, "tensor": op.src.tensor}

    def _rows_in_cache(self, access: Access, pages: str | None, rows: str) -> str:
        """Address of rows of a cache, each at a place of its own: `rows` of a sequence, which lie in `pages` if
        there are any."""
        tensor = self.kernel.op(access.tensor)
        assert isinstance(tensor, Arg)
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

    def _append(self, op: Append, cls: str) -> dict[str, Any]:
        rows = self.var(op.rows)
        inside = f"((kv_idx < Nk) & ({rows} >= 0) & ({rows} < Nc))[:, None]"
        columns = [(axis, when) for axis, when in op.check if axis not in ("q", "kv")]
        check = " & ".join([inside, *([self._check(columns, op.dst, cls)] if columns else [])])
        ptr = self._rows_in_cache(op.dst, op.pages, rows)
        return {"learned": False, "distances": (), "ptr": ptr, "value": self.var(op.value), "check": check}

    def _load(self, op: Load, cls: str) -> dict[str, Any]:
        check = self._check(op.check, op.src, cls, op.type.dims, op.needed)
        other = "False" if op.type.dtype == "b1" else "0" if op.type.quantised else self._constant(op.other)
        pointer = self._rows_in_cache(op.src, op.pages, "kv_idx") if op.pages else self._pointer(op.src, op.type.dims)
        text = {"var": self.var(op.name), "ptr": pointer, "check": check, "other": other, **self._own_columns(op)}
        return {**text, "described": self._described(op, cls) if op.via else ""}

    def _own_columns(self, op: Load) -> dict[str, str]:
        """Of a part of a loaded tile: that tile, and the condition under which it is not all of it."""
        if not op.columns_of:
            return {"whole": ""}
        own = OWN[axis_of(op.src.index[-1])]
        letter = next(axis for axis, dim in COLUMN_DIM.items() if dim == WHOLE[own])
        return {"whole": self.var(op.columns_of), "part": f"{own} < {self._width(letter)}"}

    def _described(self, op: Load, cls: str) -> str:
        """The tile, read through a descriptor: its sequence and head are dimensions of one element. A page has whole
        tiles.

        Rows of a cache that a sequence has not are there, whatever they hold. Where rows are summed up, they become
        zeros, as those past the end of a tensor are. Elsewhere the mask hides the scores that are made of them.
        """
        tensor, index = self.kernel.accessed(op)
        rows, _ = op.src.axes()
        places, start = [self.scalar(i) for i in index[:-2]], f"{rows}_start"
        if op.pages:
            assert isinstance(tensor, Arg)
            places = [f"{self.var(op.pages)}_of_tile", *places]
            start = f"{start} % {self.scalar(dimension(tensor.type.dims[2]))}"
        read = f"{tensor.name}.load([{', '.join([*places, start, '0'])}]).reshape({', '.join(op.type.dims)})"
        check = self._check(
            [(axis, when) for axis, when in op.check if axis == rows], op.src, cls, op.type.dims, op.needed
        )
        zero = "0" if op.type.quantised else "0.0"
        return f"tl.where({check}, {read}, {zero})" if check and self.kernel.clears(op) else read

    def _gather(self, op: Gather, cls: str) -> dict[str, Any]:
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

    def _page_of_tile(self, op: Gather) -> str:
        """The variable with the number of the tile's page, if `op` reads that, and the loop has read it for a copy
        engine; else empty."""
        if op.src.tensor != "PAGE_TABLE" or op.type.dims:
            return ""
        block = self.kernel.graph.nodes[op.name]["block"]
        pages = next((self._pages_by_tile(loop) for loop in self.kernel.loops if loop.body == block), None)
        return f"{pages.name}_of_tile" if pages else ""

    def _scatter(self, op: Scatter, cls: str) -> dict[str, Any]:
        pointer, condition = self._places(op.dst, op.where, dict(op.uses), self.kernel.type_of(op.value).dims)
        return {"ptr": pointer, "value": self.var(op.value), "check": condition, "op": op.op}

    def _places(self, access: Access, where: Bool, uses: dict[str, str], tile: tuple[str, ...]) -> tuple[str, str]:
        """Address of each element: heads and sequences in 64 bits, offsets in the last dimension in 32; and the
        condition, if any."""
        tensor = self.kernel.op(access.tensor)
        assert isinstance(tensor, Arg)
        terms, offset = [access.tensor], ""
        for index, stride in zip(access.index, [*stride_names(tensor.name, tensor.type.dims), ""]):
            if index == 0:
                continue
            text = self._text(index, uses, tile)
            spread = self._spread(index.free_symbols, uses, tile)
            text = f"({text}){spread}" if spread else text
            if stride:
                terms.append(
                    f"({text}).to(tl.int64) * {stride}"
                    if tile and spread is not None
                    else f"tl.cast({text}, tl.int64) * {stride}"
                )
            else:
                offset = text
        condition = "" if where == sympy.true else self._text(where, uses, tile)
        spread = self._spread(where.free_symbols, uses, tile) if condition else None
        return " + ".join([*terms, offset] if offset else terms), f"({condition}){spread}" if spread else condition

    def _spread(self, symbols: Any, uses: dict[str, str], tile: tuple[str, ...]) -> str | None:
        """How a row or column of numbers is spread over a tile: None for a number, empty where nothing is needed."""
        names = {str(s) for s in symbols}
        present = {AXIS_DIM[a] for a in ROW_AXES if f"{a}_idx" in names}
        present |= {d for n in names & uses.keys() for d in self.kernel.type_of(uses[n]).dims}
        if not present:
            return None
        return "" if len(tile) == len(present) else "[" + ", ".join(":" if d in present else "None" for d in tile) + "]"

    def _constant(self, e: Expr) -> str:
        return "0.0" if e == 0 else self.scalar(e)

    def _learned(self, tensor: str) -> bool:
        return tensor in {x.parts for x in self.module.learned if x.by != "row"}

    def _store(self, op: Store, cls: str) -> dict[str, Any]:
        learned = self._learned(self.kernel.accessed(op)[0].name)
        if op.by:
            tensor = self.kernel.op(op.dst.tensor)
            assert isinstance(tensor, Arg)
            args = [
                self._start(op.dst, tensor),
                self.var(op.value),
                "q_start",
                "kv_start",
                "Nq",
                "Nk",
                "BLOCK_Q",
                "BLOCK_KV",
            ]
            return {
                "learned": learned,
                "distances": args,
                "alone": f"{op.first_along}_start == 0" if op.first_along else "",
            }
        tile = self.kernel.type_of(op.value).dims
        check = self._check(op.check, op.dst, cls, tile)
        if op.first_along:
            rows = check if len(tile) > 1 else f"({check})"
            check = f"{rows} & ({op.first_along}_start == 0)"
        return {
            "learned": learned,
            "distances": (),
            "ptr": self._pointer(op.dst, tile),
            "value": self.var(op.value),
            "check": check,
        }

    def _ordered_add(self, op: OrderedAdd | OrderedAccumulate, cls: str) -> dict[str, Any]:
        assert op.semaphore is not None
        turns = self.kernel.op(op.semaphore.tensor)
        assert isinstance(turns, Arg)
        return {"turns": self._start(Access(turns.name, op.semaphore.index[:-1]), turns)}

    _ordered_accumulate = _ordered_add

    def _count_tiles(self, op: CountTiles, cls: str) -> dict[str, Any]:
        """Where the numbers are, of which so many are at most `most`."""
        tensor = self.kernel.op(op.src.tensor)
        assert isinstance(tensor, Arg)
        (axis,) = op.src.axes()
        rows = {"own": f"{axis}_start", "end": AXIS_EXTENT[axis], "rows": AXIS_DIM[axis]}
        start = self._start(Access(op.src.tensor, op.src.index[:-1]), tensor)
        return {"var": op.name, "start": start, "most": self.scalar(op.most), **rows}

    def _init(self, op: Init, cls: str) -> dict[str, Any]:
        value = self._constant(op.value) if op.type.dtype == "f32" else self.scalar(op.value)
        return {"var": self.var(op.name), "shape": ", ".join(op.type.dims), "value": value, "of": _TYPES[op.type.dtype]}

    def _dot(self, op: Dot, cls: str) -> dict[str, Any]:
        a, b = self.kernel.type_of(op.a), self.kernel.type_of(op.b)
        left = self.var(op.a) if a.dims[1] == op.over else f"tl.trans({self.var(op.a)})"
        right = self.var(op.b) if b.dims[0] == op.over else f"tl.trans({self.var(op.b)})"
        acc = self.var(op.acc) if op.acc else ""
        return {"var": self.var(op.name), "a": left, "b": right, "acc": acc, "precision": op.precision}

    def _map(self, op: Map, cls: str) -> dict[str, Any]:
        uses = dict(op.uses)
        casting = op.type.dtype == "T" or op.type.dtype in ELEMENTS
        text = self._text(op.expr, uses, op.type.dims, fp32=not casting)
        if op.type.dtype == "i32" and "tl.int64" in text:
            text = f"tl.cast({text}, tl.int32)"
        if casting:
            dtype = "dtype" if op.type.dtype == "T" else f"tl.{ELEMENTS[op.type.dtype].torch}"
            text = f"{text}.to({dtype})" if re.fullmatch(r"\w+", text) else f"({text}).to({dtype})"
        described = [load for load in self.kernel.ops() if isinstance(load, Load) and load.via]
        needed = next((load.needed for load in described if load.needed), ((sympy.Integer(0), symbol("Nk")),))
        clears = cls == "partial" and self.kernel.clears(op) and described
        return {
            "var": self.var(op.name),
            "expr": text,
            "cleared": f"({_in_range('kv_idx', *map(self.scalar, *needed))})[:, None]" if clears else "",
        }

    def _mask(self, op: Mask, cls: str) -> dict[str, Any]:
        condition = self._text(op.where, dict(op.uses), op.type.dims)
        spread = self._spread(op.where.free_symbols, dict(op.uses), op.type.dims)
        condition = f"({condition}){spread}" if spread else condition
        return {"var": self.var(op.name), "condition": condition}

    def _softmax_step(self, op: SoftmaxStep, cls: str) -> dict[str, Any]:
        scale = self.var(op.scale) if op.scale else ""
        shift = self.var(op.shift) if op.shift else ""
        return {
            "s": self.var(op.s),
            "m": self.var(op.m),
            "scale": scale,
            "shift": shift,
            "guard": _applies(op.guard, cls),
        }

    def _reduce(self, op: Reduce, cls: str) -> dict[str, Any]:
        value, axis = self.var(op.value), self.kernel.type_of(op.value).dims.index(op.over)
        if (groups := GROUPED.get(op.over, "")) in op.type.dims:
            value, axis = f"{value}.reshape({op.type.dims[0]}, {groups}, {op.over} // {groups})", 2
        return {"var": self.var(op.name), "value": value, "op": op.op, "axis": axis}

    def _scan(self, op: Scan, cls: str) -> dict[str, Any]:
        axis = self.kernel.type_of(op.value).dims.index(op.over)
        return {"var": self.var(op.name), "value": self.var(op.value), "axis": axis}

    def _barrier(self, op: Barrier, cls: str) -> dict[str, Any]:
        return {}

    def _grid_dependency_wait(self, op: GridDependencyWait, cls: str) -> dict[str, Any]:
        return {}

    def _deinterleave(self, op: Deinterleave, cls: str) -> dict[str, Any]:
        value, of = self.var(op.value), self.kernel.type_of(op.value)
        rows, columns = op.type.dims
        expr = f"from_pairs({value}, CONVERTS)" if of.quantised else f"tl.split({value}.reshape({rows}, {columns}, 2))"
        return {"var": f"{self.var(f'{op.name}.even')}, {self.var(f'{op.name}.odd')}", "expr": expr}

    def _interleave(self, op: Interleave, cls: str) -> dict[str, Any]:
        a, b = self.var(op.a), self.var(op.b)
        quantised = op.type.quantised
        return {
            "var": self.var(op.name),
            "expr": f"to_pairs({a}, {b})" if quantised else f"tl.join({a}, {b}).reshape({', '.join(op.type.dims)})",
        }

    def _yield(self, op: Yield, cls: str) -> dict[str, Any]:
        pairs = [(self.var(f), self.var(ref)) for f, ref in op.values]
        return {"pairs": [(f, v) for f, v in pairs if f != v]}


def _in_range(index: str, first: str, end: str) -> str:
    """The condition under which rows, which are not negative, are in a range."""
    return f"{index} < {end}" if first == "0" else f"({index} >= {first}) & ({index} < {end})"


def transposed(op: DropoutMask | Dropout) -> bool:
    """Whether a tile of scores has keys as rows."""
    return op.type.dims[0] == "BLOCK_KV"


def _as_tile(access: Access, tile: tuple[str, ...]) -> tuple[str, ...]:
    """The dimensions of an access, in the order of the tile where that is a transposed tile of scores."""
    dims = tuple(AXIS_DIM[a] for a in access.axes())
    return tile if tile == dims[::-1] else dims


def _applies(when: str, cls: str) -> bool:
    return when == "always" or (when == "partial" and cls == "partial")
