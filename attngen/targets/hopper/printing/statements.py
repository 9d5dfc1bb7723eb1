"""Prints Gluon's statements, one line per op."""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from attngen.ir import AXIS_DIM, Access, Expr, Op, gl, only, pipe, tile
from attngen.ir.behaviour import handles
from attngen.ir.names import STARTS
from attngen.targets.hopper.configs.common import SCORE_DIMS
from attngen.targets.hopper.lowering.shapes import side_of
from attngen.targets.hopper.printing.shapes import ShapeContext
from attngen.targets.printing.layout import call, fold
from attngen.targets.printing.memory_views import applies
from attngen.targets.printing.printer import to_triton

ELEMENTS = {"i32": "gl.int32", "f32": "gl.float32"}
Lines = dict[str, list[str]]


def _lines(*lines: str) -> Lines:
    return {"lines": list(lines)}


class StatementContext(ShapeContext):
    """Prints the statements of one kernel. The method for an op returns its lines."""

    def _idle(self, op: Op, cls: str) -> bool:
        if isinstance(op, pipe.LoadTileStart):
            return not any(applies(o.when, cls) for o in only(self.kernel.ops(), gl.WriteTileStart))
        if isinstance(op, gl.WriteTileStart):
            return not applies(op.when, cls) and not pipe.masked_full_tiles(self.kernel.ops())
        return super()._idle(op, cls)

    def integer(self, e: Expr, small: bool = False) -> str:
        """The source of an expression over integers. Stages, phases and numbers of copies are small,
        and so are others that are `small`."""
        counted = {
            s: sympy.Symbol(str(s), integer=True)
            for s in e.free_symbols
            if s.is_integer is None and not self._is_integer(str(s))
        }
        if not counted and not small:
            return self.scalar(e)
        whole = {s: sympy.Symbol(str(s), integer=True) for s in e.free_symbols if s.is_integer is None}
        return to_triton(e.xreplace(whole), self._lookup({}, ()), (), small=True)

    def _row_of_tile(self, axis: str, tile: tuple[str, ...]) -> str:
        """The variable of a tile's rows. A tile as wide as the output accumulator has the accumulator's layout."""
        return f"{axis}_rows" if _is_wide(tile) else super()._row_of_tile(axis, tile)

    def _row_of_tensor(self, axis: str, tile: tuple[str, ...]) -> str:
        return f"{axis}_start + {axis}_rows" if _is_wide(tile) else super()._row_of_tensor(axis, tile)

    def _at(self, ref: str, index: Expr, opaque: bool = False) -> str:
        """A buffer or a barrier: `K_smem.index(K_stage)`."""
        return f"{self.variables.get(ref, ref)}.index({self._opaque(index) if opaque else self.integer(index)})"

    def _opaque(self, index: Expr) -> str:
        """An index from which the compiler computes addresses where it stands, not before the loop."""
        return "_opaque_zero()" if index == 0 else f"{self.integer(index)} + _opaque_zero()"

    def _list(self, items: Iterable[Expr]) -> str:
        return f"[{', '.join(map(self.integer, items))}]"

    @staticmethod
    def _noted(line: str, note: str) -> str:
        """A line with a comment, which stands above it if they do not fit on one line."""
        return f"{line}  # {note}" if note else line

    def _body(self, header: str, block: str, cls: str, note: str = "") -> list[str]:
        """A statement's header and the lines of its body."""
        lines = [line for op in self.kernel.block(block).ops for line in self.handler(op)(op, cls)["lines"]]
        return [self._noted(f"{header}:", note), *("    " + line.replace("\n", "\n    ") for line in lines)]

    # ------------------------------------------------------------------ allocation

    @handles(gl.AllocShared)
    def _alloc_shared(self, op: gl.AllocShared, cls: str) -> Lines:
        count, shape = self.integer(op.count), [*map(self.integer, op.shape)]
        if op.like:
            args = [f"{op.like}.dtype", f"[{', '.join([count, '1', '1', *shape])}]", f"{op.like}.layout"]
        elif op.type.dtype in ELEMENTS:
            args = [ELEMENTS[op.type.dtype], f"[{', '.join([count, *(shape or ['1'])])}]"]
            args.append("gl.SwizzledSharedLayout(1, 1, 1, [0])")
        else:
            dtype = f"{self._output()}.dtype"
            args = [dtype, f"[{', '.join([count, *shape])}]", f"_shared_layout({', '.join(shape)}, {dtype})"]
        return _lines(f"{op.name} = gl.allocate_shared_memory({', '.join(args)})")

    @handles(gl.AllocMbarriers)
    def _alloc_mbarriers(self, op: gl.AllocMbarriers, cls: str) -> Lines:
        args = f"gl.int64, [{self.integer(op.count)}, 1], mbarrier.MBarrierLayout()"
        return _lines(f"{op.name} = gl.allocate_shared_memory({args})")

    @handles(gl.NamedBarriers)
    def _named_barriers(self, op: gl.NamedBarriers, cls: str) -> Lines:
        return _lines()

    @handles(gl.MbarrierInit)
    def _mbarrier_init(self, op: gl.MbarrierInit, cls: str) -> Lines:
        return _lines(f"mbarrier.init({self._at(op.barrier, op.index)}, count={op.arrivals})")

    # ------------------------------------------------------------------ barriers

    @handles(gl.MbarrierExpect)
    def _mbarrier_expect(self, op: gl.MbarrierExpect, cls: str) -> Lines:
        return _lines(f"mbarrier.expect({self._at(op.barrier, op.index)}, {self.integer(op.bytes, small=True)})")

    @handles(gl.MbarrierArrive)
    def _mbarrier_arrive(self, op: gl.MbarrierArrive, cls: str) -> Lines:
        return _lines(f"mbarrier.arrive({self._at(op.barrier, op.index)}, count=1)")

    @handles(gl.MbarrierWait)
    def _mbarrier_wait(self, op: gl.MbarrierWait, cls: str) -> Lines:
        line = f"mbarrier.wait({self._at(op.barrier, op.index)}, {self.integer(op.phase)})"
        return _lines(self._noted(line, op.note))

    def _named(self, op: gl.NamedArrive | gl.NamedSync) -> str:
        """The arguments of a named barrier: its number, and how many threads take part."""
        barriers = self.kernel.op(op.barrier)
        assert isinstance(barriers, gl.NamedBarriers)
        threads = "THREADS" if op.threads == 0 else self.integer(op.threads)
        return f"{self.integer(barriers.first + op.index)}, {threads}"

    @handles(gl.NamedArrive)
    def _named_arrive(self, op: gl.NamedArrive, cls: str) -> Lines:
        return _lines(self._noted(f"_barrier_arrive{'_early' * op.early}({self._named(op)})", op.note))

    @handles(gl.NamedSync)
    def _named_sync(self, op: gl.NamedSync, cls: str) -> Lines:
        return _lines(self._noted(f"_barrier_sync({self._named(op)})", op.note))

    @handles(gl.FenceAsync)
    def _fence_async(self, op: gl.FenceAsync, cls: str) -> Lines:
        return _lines("fence_async_shared()")

    # ------------------------------------------------------------------ variables and control

    @handles(gl.Comment)
    def _comment(self, op: gl.Comment, cls: str) -> Lines:
        return _lines(f"# {op.text}")

    @handles(gl.Let)
    def _let(self, op: gl.Let, cls: str) -> Lines:
        return _lines(self._noted(fold(f"{op.var} = {self.integer(op.expr)}"), op.note))

    @handles(gl.Counters)
    def _counters(self, op: gl.Counters, cls: str) -> Lines:
        starts = {op.stage: "0", op.count: str(op.start)}
        starts.pop("", None)
        return _lines(f"{', '.join(starts)} = {', '.join(starts.values())}")

    @handles(gl.NextStage)
    def _next_stage(self, op: gl.NextStage, cls: str) -> Lines:
        if not op.stage:
            return _lines(f"{op.phase} ^= 1")
        return _lines(f"{op.stage}, {op.phase} = _next_stage({op.stage}, {op.phase}, {self.integer(op.stages)})")

    @handles(gl.NextLoad)
    def _next_load(self, op: gl.NextLoad, cls: str) -> Lines:
        if not op.stage:
            return _lines(f"{op.loads} += 1")
        following = f"gl.where({op.stage} + 1 == {self.integer(op.stages)}, 0, {op.stage} + 1)"
        return _lines(f"{op.stage}, {op.loads} = {following}, {op.loads} + 1")

    @handles(gl.If)
    def _if(self, op: gl.If, cls: str) -> Lines:
        lines = self._body(f"if {self.integer(op.where)}", op.body, cls, op.note)
        return _lines(*lines, *(self._body("else", op.orelse, cls) if op.orelse else []))

    @handles(gl.StaticFor)
    def _static_for(self, op: gl.StaticFor, cls: str) -> Lines:
        return _lines(*self._body(f"for {op.var} in gl.static_range({self.integer(op.count)})", op.body, cls))

    @handles(gl.For)
    def _for(self, op: gl.For, cls: str) -> Lines:
        return _lines(*self._body(f"for {op.var} in range({self.integer(op.count)})", op.body, cls))

    # ------------------------------------------------------------------ shared memory

    def _dtype_shape(self, shape: Iterable[Expr]) -> str:
        return f".reshape({self._list(shape)})"

    @handles(gl.SmemView)
    def _smem_view(self, op: gl.SmemView, cls: str) -> Lines:
        names = self._tile_vars(op.name)
        smem = self.kernel.op(op.smem)
        assert isinstance(smem, gl.AllocShared)
        reshaped = self._dtype_shape(smem.shape) if smem.like else ""
        if op.opaque and op.pieces > 1:
            first = f"{op.pieces} * {self._opaque(op.index)}"
            at = [f"{op.smem}.index({first}{f' + {i}' if i else ''})" for i in range(op.pieces)]
        else:
            at = [self._at(op.smem, op.pieces * op.index + i, op.opaque) for i in range(op.pieces)]
        return _lines(*(f"{name} = {buffer}{reshaped}" for name, buffer in zip(names, at)))

    @handles(gl.SmemReinterpret)
    def _smem_reinterpret(self, op: gl.SmemReinterpret, cls: str) -> Lines:
        shape = ", ".join(map(self.integer, op.shape))
        args = f"{self._at(op.smem, op.index)}, dtype, [{op.count}, 1, 1, {shape}], {op.like}.layout"
        return _lines(fold(f"{self.var(op.name)} = _reinterpret({args})"))

    @handles(gl.SmemRows)
    def _smem_rows(self, op: gl.SmemRows, cls: str) -> Lines:
        pairs = zip(self._tile_vars(op.name), self._tile_vars(op.value))
        return _lines(*(f"{var} = {value}.slice(_WARP_GROUP * ROWS, ROWS, 0)" for var, value in pairs))

    @handles(gl.SmemLoad)
    def _smem_load(self, op: gl.SmemLoad, cls: str) -> Lines:
        layout = f"gl.SliceLayout({op.axis}, SCORES)"
        return _lines(f"{self.var(op.name)} = {self._at(op.smem, op.index)}.load({layout})")

    @handles(pipe.LocalLoad)
    def _local_load(self, op: pipe.LocalLoad, cls: str) -> Lines:
        layout = "SCORES" if set(op.type.dims) == SCORE_DIMS else "ACC"
        tile = self.var(op.value) + ".permute((1, 0))" * (self.kernel.type_of(op.value).dims != op.type.dims)
        return _lines(f"{self.var(op.name)} = {tile}.load({layout})")

    @handles(gl.SmemStore)
    def _smem_store(self, op: gl.SmemStore, cls: str) -> Lines:
        value = f"{self.var(op.value)}_{op.piece}" if op.piece else self.var(op.value)
        type_ = self.kernel.type_of(op.value)
        packed = type_.dtype == "T" and isinstance(self.kernel.op(op.value), (pipe.Pack, pipe.PinBeforeWait))
        value = f"_unpack({value}, dtype)" if packed else value
        buffer = self._at(op.smem, op.index, op.opaque)
        buffer += self._dtype_shape(op.shape) if op.shape else ""
        buffer += ".slice(_WARP_GROUP * ROWS, ROWS, 0)" * op.rows + ".permute((1, 0))" * op.transposed
        return _lines(f"{buffer}.store({value})")

    @handles(gl.SmemStoreAcc)
    def _smem_store_acc(self, op: gl.SmemStoreAcc, cls: str) -> Lines:
        value = f"{self.var(op.value)}_{op.piece}" if op.piece else self.var(op.value)
        if op.piece.endswith(("_left", "_right")):
            value = f"gl.convert_layout({value}, {op.layout}, assert_trivial=True)"
        buffer = self._at(op.smem, op.index) + self._dtype_shape(op.shape)
        return _lines(fold(f"_store_acc({buffer}, {value}, {op.layout})"))

    @handles(gl.SplitPiece)
    def _split_piece(self, op: gl.SplitPiece, cls: str) -> Lines:
        value = f"{self.var(op.value)}_{op.piece}"
        return _lines(f"{value}_left, {value}_right = _split_halves({value})")

    @handles(gl.WriteIndex)
    def _write_index(self, op: gl.WriteIndex, cls: str) -> Lines:
        return _lines(f"_write_index({self.integer(op.value)}, {self._at(op.smem, op.index)})")

    @handles(gl.ReadIndex)
    def _read_index(self, op: gl.ReadIndex, cls: str) -> Lines:
        warps = f", {op.warps}" if op.warps != 4 else ""
        return _lines(f"{op.var} = _read_index({self._at(op.smem, op.index)}{warps})")

    # ------------------------------------------------------------------ positions of tiles in the whole sequence

    @property
    def lookup_options(self) -> str:
        """`NC=True` if the kernel waits for semaphores, which drops what ordinary loads leave in the L1 cache."""
        return ", NC=True" if self.source.traits.adds_in_order else ""

    @handles(pipe.LoadTileStart)
    def _load_tile_start(self, op: pipe.LoadTileStart, cls: str) -> Lines:
        return _lines(f"{self.var(op.name)} = {self._start_of_tile()}")

    def _start_of_tile(self) -> str:
        """The lookup of where the loop's tile lies."""
        number = f"{STARTS[self.loop][0]} + {self.loop}_tile * ({AXIS_DIM[self.loop]} // UNIT)"
        return f"_lookup({number}{self.lookup_options})"

    @handles(gl.WriteTileStart)
    def _write_tile_start(self, op: gl.WriteTileStart, cls: str) -> Lines:
        """The line that writes a tile's start. A loop of full tiles loads it only for the tile that consumers mask,
        and only then."""
        full = () if applies(op.when, cls) else pipe.masked_full_tiles(self.kernel.ops())
        start = self._start_of_tile() if full else self.var(op.value)
        line = f"_write_index({start}, {self._at(op.smem, op.index)})"
        if not full:
            return _lines(line)
        among = _any_of([self._is_among(tiles) for tiles in full])
        return _lines(f"if {among}:  # the consumers' first tile, which they mask", f"    {line}")

    def _is_among(self, tiles: pipe.MaskedFullTiles) -> str:
        """The condition under which the loop's tile is one of these, and the program visits none of those before."""
        among = _any_of([f"{self.loop}_tile == {self.scalar(number)}" for number in tiles.numbers])
        return f"({among}) & ({self._number(tiles.before)} == 0)" if tiles.before else among

    @handles(gl.ReadTileStart)
    def _read_tile_start(self, op: gl.ReadTileStart, cls: str) -> Lines:
        """The line that reads the position of a tile. `_define_position` adds those that need its value: where a loop
        computes with it only in some tiles, the others do not wait for it. With `when` partial, full tiles read a
        number of another tile, and use it nowhere."""
        return _lines(f"{self.loop}_start = _read_index({self._at(op.smem, op.index)})")

    # ------------------------------------------------------------------ copies and semaphores

    @handles(gl.TmaLoad)
    def _tma_load(self, op: gl.TmaLoad, cls: str) -> Lines:
        page = f"[{self.var(op.page)}, " if op.page else "["
        args = [
            op.tensor,
            page + self._list(op.place)[1:],
            self._at(op.barrier, op.index),
            self._at(op.smem, op.buffer),
        ]
        return _lines(call("_tma_load", args))

    @handles(gl.CopyRow)
    def _copy_row(self, op: gl.CopyRow, cls: str) -> Lines:
        args = [self._address(op.src), self.integer(op.left), self._at(op.smem, op.index)]
        return _lines(call("_load_row_vector", [*args, self._at(op.barrier, op.index)]))

    def _address(self, access: Access) -> str:
        """The address of an element in the last dimension of a tensor."""
        tensor, (*head, row) = self.kernel.op(access.tensor), access.index
        if isinstance(tensor, tile.Base):
            return f"{self.var(tensor.name)} + {self.scalar(row)}"
        assert isinstance(tensor, tile.Arg)
        return f"{self._start(Access(access.tensor, tuple(head)), tensor)} + {self.integer(row)}"

    @handles(gl.TmaWrite)
    def _tma_write(self, op: gl.TmaWrite, cls: str) -> Lines:
        args = [op.tensor, self._list(op.place), self._at(op.smem, op.buffer, op.opaque)]
        if op.order is None:
            return _lines(f"_tma_store({', '.join(args)})")
        store, add = ("    " + call(name, args).replace("\n", "\n    ") for name in ("_tma_store", "_tma_reduce_add"))
        return _lines(f"if {self.integer(op.order)} == 0:", store, "else:", add)

    @handles(gl.TmaWriteWait)
    def _tma_write_wait(self, op: gl.TmaWriteWait, cls: str) -> Lines:
        return _lines(self._noted("_store_wait_read()" if op.relaxed else "tma.store_wait(0)", op.note))

    @handles(gl.WaitSemaphore)
    def _wait_semaphore(self, op: gl.WaitSemaphore, cls: str) -> Lines:
        args = [self._address(op.counter), self.integer(op.seen), self.integer(op.order)]
        return _lines(call("_semaphore_acquire", args))

    @handles(gl.ReadSemaphore)
    def _read_semaphore(self, op: gl.ReadSemaphore, cls: str) -> Lines:
        return _lines(fold(f"{op.var} = _semaphore_value({self._address(op.counter)})"))

    @handles(gl.IncrementSemaphore)
    def _increment_semaphore(self, op: gl.IncrementSemaphore, cls: str) -> Lines:
        return _lines(call("_semaphore_release", [self._address(op.counter)]))


def _is_wide(tile: tuple[str, ...]) -> bool:
    """True if a tile is as wide as the output accumulator, or as half of it."""
    return tile[1:] == ("D_V",) or bool(side_of(tile))


def _any_of(conditions: list[str]) -> str:
    """A condition that is true if one of these is; empty text if there are none."""
    return conditions[0] if len(conditions) == 1 else " | ".join(f"({text})" for text in conditions)
