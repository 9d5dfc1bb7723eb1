"""Build kernels: add typed ops to blocks, declare arguments, and index K and V by head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import sympy

from attngen.builders.semantics import (
    S,
    keeps_extremes,
    listed_blocks,
    named_by,
    of_product,
    shared,
    usable_fact,
    varies,
    whole_numbers,
)
from attngen.builders.signature import Signature, grid, partial_tensors, tensor_args
from attngen.errors import BuildError
from attngen.ir import Access, Block, Checks, Fact, InputGradient, Kernel, Op, Read, Type, input_tensors, tile
from attngen.ir.dims import AXIS_DIM, AXIS_EXTENT, dimension, first_row
from attngen.ir.expr import LARGEST, Bool, cdiv, floordiv, mod, select, span, symbol
from attngen.ir.expr_text import to_text
from attngen.ir.grid import KVSplit
from attngen.ir.heads import SHARINGS
from attngen.ir.names import CALL_ROWS, DROPOUT_SCALARS, PAIRS, ROW_AXES, SCALARS
from attngen.ir.prove import prove_le
from attngen.ir.split_axes import sharing
from attngen.lang.part import NATURAL
from attngen.spec import Spec
from attngen.tiles.order import order_of

POSITIONS = {"Nq": "q", "Nk": "kv"}  # dimensions that are visited in tiles
LONG = 16  # an index with more operations than this becomes a value, computed once
AXIS_OF = {dim: axis for axis, dim in AXIS_DIM.items()}


class KernelBuilder:
    """Collects the ops of one kernel, and gives each value its type."""

    def __init__(self, spec: Spec, signature: Signature, extra: Iterable[Any] = ()) -> None:
        """`extra`: expressions that the kernel computes in addition to the score.

        Together with score and mask they determine which inputs are read.
        """
        self.spec, self.signature = spec, signature._replace(chunk=spec.chunk)
        signature = self.signature
        axis = signature.axis
        self.program_axis, self.loop_axis = axis, "kv" if axis == "q" else "q"
        self.score_dims = ("BLOCK_KV", "BLOCK_Q") if signature.transposed else ("BLOCK_Q", "BLOCK_KV")
        self.ops: dict[str, list[Op]] = {"entry": []}
        self.types: dict[str, Type] = {}
        self.grid = grid(signature, spec.heads.sharing)
        self.split_axis = next(iter(sharing(self.grid)), None)  # the axis whose programs share a loop
        self.kv_split: KVSplit | None = None  # how keys of a cache are split among programs
        self.heads = _heads(spec, signature)
        self.score = spec.modified()
        self.tensor_types = input_tensors(spec.inputs(), spec.derived())
        self.scalar_dtypes = {i.name: i.dtype for i in spec.inputs() if not i.shape}
        self.lengths = {i.name for i in spec.inputs() if i.is_size}
        along = {read.name for read in spec.reads() if varies(spec, read, symbol(f"{self.loop_axis}_idx"))}
        visible = spec.visible() if axis == "q" else spec.visible_by_key()
        self.where = visible if signature.masks else sympy.true
        facts = [fact for fact in spec.mask.facts() if self.where.has(fact.literal)]
        self.facts = tuple(usable_fact(fact, along) for fact in facts)
        self.extra = (*([self.score] if signature.scores else []), *extra)
        needed = named_by(spec, (self.where, *(e for f in self.facts for e in f), *self.extra))
        self.index_values: dict[tuple[str, Any], str] = {}  # (block, long index) -> the name of its value
        self.needed = tuple(read for read in spec.reads() if read.name in needed)
        self.needed_scalars = tuple(name for name in self.scalar_dtypes if name in needed)

    def add(self, op: Op, block: str = "entry") -> str:
        self.ops.setdefault(block, []).append(op)
        self.types.update({f"{op.name}.{f}".rstrip("."): t for f, t in op.results().items()})
        return op.name

    def read_tangents(self, reads: Iterable[Read]) -> None:
        """Also read the tangents of inputs: `tslope` from %tSLOPE where `slope` is read."""
        for read in reads:
            tensor = f"t{read.tensor.upper()}"
            self.tensor_types[tensor] = self.tensor_types[read.tensor]
            self.needed += (Read(f"t{read.name}", tensor, read.index),)

    def declare_tensors(self, gradients: Iterable[InputGradient] = ()) -> None:
        """Declare all tensors that the kernel reads and writes, including those of mask and modifiers."""
        read = {_argument(read.tensor): self._in_cache(self.tensor_types[read.tensor]) for read in self.needed}
        outs = partial_tensors(gradients, self.spec.inputs(), self.signature.places)
        for arg in tensor_args(self.signature, read, listed_blocks(self.spec), self.spec.dropout, outs):
            self.add(arg)

    def _in_cache(self, type_: Type) -> Type:
        """The type of an input in this kernel.

        With a cache, a dimension of keys has room for all keys that a sequence may have. If rows are the queries of all
        heads of a group, a dimension of queries has `queries` elements, those of one head.
        """
        named = ({"Nk": "Nc"} if self.signature.cache else {}) | ({"Nq": "queries"} if self.signature.pack_gqa else {})
        return replace(type_, dims=tuple(named.get(d, d) for d in type_.dims))

    def declare_scalar(self, name: str) -> None:
        self.add(tile.Arg(name, "scalar", Type({**SCALARS, **DROPOUT_SCALARS, **self.scalar_dtypes}[name])))

    def declare_sizes(self) -> None:
        """Declare the scalars: sizes, those needed to index by head, and the scalar inputs of mask and modifiers."""
        names = [str(a.extent) for a in self.grid if a.var in ("h", "hkv")]
        packed, heads = self.signature.pack_gqa, SHARINGS[self.spec.heads.sharing]
        names += ["queries"] if packed else []
        named = _symbols((self.where, *self.extra, *(e for read in self.needed for e in read.index)))
        shared = heads.counts_group and not packed and (self.signature.scores or symbol("hkv") in named)
        if (
            shared
            or (packed and symbol("h") in named)
            or (heads.is_shared and not heads.counts_group and self.signature.by_key_head and not packed)
        ):
            names.append("group")
        names += [str(self.split_axis.extent)] if self.split_axis and not self.kv_split else []
        names += ["B", "items"] if self.kv_split else []
        names += ["Nc", "Nn"] if self.signature.cache or self.kv_split else []
        names += ["page_rows"] if self.signature.cache and self.signature.cache.page == "page_rows" else []
        names += [PAIRS] if self.signature.merges else []
        places = [e for read in self.needed for at, where in [self._inside(read)] for e in (*at, where)]
        bounds = {str(s) for s in _symbols(places)} & {"B", "Hq", "Hkv", *self.lengths}
        by_keys = (self.signature.masks or symbol("Nk") in named | _symbols(places)) and not self.signature.cache
        rows = CALL_ROWS.values() if self.signature.places else ()
        for name in dict.fromkeys(
            (*names, *sorted(bounds), "Nq", *(["Nk"] if by_keys else []), *rows, *self.needed_scalars)
        ):
            self.declare_scalar(name)
        if self.signature.cache and self.signature.masks:
            self.add(tile.CacheLength("Nk", _access("CACHE_SEQLENS", ("b",)), Type("i32")))

    def load_keys(self, name: str, tensor: str, head: Any, column: str, block: str) -> None:
        """Load a tile of K or V of the sequence and head; in a paged cache, from the sequence's pages."""
        cache = self.signature.cache
        if cache is None or not cache.page:
            self.load(name, tensor, ("b", head, "kv", column), block)
            return
        self.pages("page", symbol("kv_idx"), block)
        self.load(name, tensor, (head, "kv", column), block, pages="page")

    def pages(self, name: str, row: Any, block: str) -> None:
        """Look up the page that holds each row of a sequence, for rows within the sequence; once per block."""
        assert self.signature.cache is not None
        if name not in self.types:
            where = sympy.And(in_bounds("kv"), *([row >= 0, row < symbol("Nc")] if row != symbol("kv_idx") else []))
            at = Access("PAGE_TABLE", (symbol("b"), floordiv(row, dimension(self.signature.cache.page))))
            self.add(tile.Gather(name, at, self.uses((*at.index, where)), Type("i32", ("BLOCK_KV",)), where), block)

    def load(
        self,
        name: str,
        tensor: str,
        index: tuple[Any, ...],
        block: str = "entry",
        other: Any = 0,
        pages: str | None = None,
    ) -> str:
        """Load the tile of `tensor` at `index`; rows are bounds-checked if the tile can extend past the end."""
        access = _access(tensor, index)
        dims = tuple(AXIS_DIM[a] for a in access.axes())
        if set(access.axes()) == {"q", "kv"}:  # in the order of the scores' dimensions
            dims = self.score_dims
        always = (self.program_axis, "KV_splits", *(("q", "kv") if block == "entry" else ()))
        check: Checks = tuple((a, "always" if a in always else "partial") for a in access.axes() if a in ROW_AXES)
        return self.add(
            tile.Load(name, access, Type(self.types[tensor].dtype, dims), check, sympy.sympify(other), "", pages), block
        )

    def store(self, tensor: str, index: tuple[Any, ...], value: str, block: str = "entry") -> None:
        access = _access(tensor, index)
        own = self.program_axis
        check: Checks = tuple(
            (a, "always" if a == own or block == "entry" else "partial") for a in access.axes() if a in ROW_AXES
        )
        self.add(tile.Store(f"_store_{sum(map(len, self.ops.values()))}", access, value, check), block)

    def ordered_accumulate(self, tensor: str, index: tuple[Any, ...], value: str, ends: bool) -> None:
        """Store the program's tile of `tensor`, or add it to the tile that the other program of its pair has stored.

        Programs along the split axis form pairs.
        """
        (axis,) = sharing(self.grid)
        access, number = _access(tensor, index), symbol(axis.var)
        semaphore = _access(
            "dKdV_SEMAPHORE", (*(i for i in index[:-1] if i != self.program_axis), self.row(self.program_axis))
        )
        ticket = mod(number, sympy.Integer(2))
        self.add(
            tile.OrderedAccumulate(
                f"_merge_{value}", access, value, ((self.program_axis, "always"),), "", semaphore, ticket, ends
            ),
            "entry",
        )

    def ordered_add(self, tensor: str, index: tuple[Any, ...], value: str, semaphore: str) -> None:
        """Add a tile to a tensor that other programs add to, in the order of their tiles, from the last one to the
        first."""
        access = _access(tensor, index)
        check: Checks = tuple((a, "partial") for a in access.axes() if a == self.loop_axis)
        own = self.program_axis
        counter = _access(semaphore, tuple(self.row(i) if i == self.loop_axis else i for i in index[:-1]))
        tiles = cdiv(symbol(AXIS_EXTENT[own]), symbol(AXIS_DIM[own]))  # all of them add, unless a pass knows better
        ticket, makers = order_of(own, tiles, listed_blocks(self.spec), places=self.signature.places)
        for op in makers:
            self.add(op, "step")
        self.add(tile.OrderedAdd(f"_add_{value}", access, value, check, "", counter, ticket), "step")

    def row(self, axis: str) -> str:
        """The name of the first row of a tile of an axis, in tensors with a row for each query or key of the call."""
        return first_row(axis, self.signature.places)

    def extent(self, axis: str) -> Any:
        """The number of rows of an axis that a call has."""
        extent = AXIS_EXTENT[axis]
        return symbol(CALL_ROWS[extent] if self.signature.places else extent)

    def init(self, name: str, value: Any, *dims: str, block: str = "entry") -> str:
        return self.add(tile.Init(name, sympy.sympify(value), Type("f32", dims)), block)

    def carried(self, block: str, **starts: str) -> None:
        """Declare a loop body's arguments, typed as the values they start from."""
        for name, start in starts.items():
            self.add(tile.Arg(name, "carry", self.types[start]), block)

    def loop(
        self,
        name: str,
        var: str,
        extent: Any,
        body: str,
        block: str = "entry",
        cls: str = "unknown",
        first: Any = 0,
        heads: Any = (),
        **starts: str,
    ) -> str:
        self.add(
            tile.Loop(name, var, ((sympy.sympify(first), extent),), tuple(starts.items()), body, cls, heads=heads),
            block,
        )
        self.types.update({f"{name}.{f}": self.types[s] for f, s in starts.items()})
        return name

    def dot(self, name: str, a: str, b: str, over: str, block: str, acc: str | None = None) -> str:
        dims = tuple(d for v in (a, b) for d in self.types[v].dims if d != over)
        return self.add(tile.Dot(name, a, b, over, Type("f32", dims), acc), block)

    def map(
        self, name: str, expr: Any, block: str = "entry", dtype: str = "f32", score: bool = False, **uses: str
    ) -> str:
        """Add an elementwise expression. The result has the dimensions of its widest operand."""
        dims = max((self.types[r].dims for r in uses.values()), key=len, default=())
        return self.add(tile.Map(name, expr, tuple(uses.items()), Type(dtype, dims), score), block)

    def deinterleave(self, name: str, value: str, columns: str, block: str = "entry") -> str:
        """Split a tile into its even and odd columns, `name.even` and `name.odd`, each with dimension `columns`.

        Pairs of 8-bit numbers become fp16.
        """
        of = self.types[value]
        dtype = "fp16" if of.quantised else of.dtype
        return self.add(tile.Deinterleave(name, value, Type(dtype, (*of.dims[:1], columns))), block)

    def interleave(self, name: str, columns: str, type_: Type, block: str = "entry") -> str:
        """Interleave two tiles: the even columns are the value `columns` + `even`, the odd ones the value `columns` +
        `odd`."""
        return self.add(tile.Interleave(name, f"{columns}even", f"{columns}odd", type_), block)

    def reduce_sum(self, name: str, value: str, over: str, block: str = "entry") -> str:
        dims = tuple(d for d in self.types[value].dims if d != over)
        return self.add(tile.Reduce(name, value, "sum", over, Type("f32", dims)), block)

    def load_inputs(self) -> None:
        """Load the inputs of mask and modifiers: in the loop's body if they vary along the loop or with its head, else
        before the loop."""
        for read in self.needed:
            self._read(read, self._home([e for _, e, _ in self._natural(read)]))

    def _home(self, index: Iterable[Any]) -> str:
        """The block in which a read with this index belongs."""
        names = _symbols(index)
        homes = {block for block, ops in self.ops.items() if {op.name for op in ops} & {str(s) for s in names}}
        if symbol(f"{self.loop_axis}_idx") in names or "step" in homes:
            return "step"
        return "group" if symbol("g") in names or "group" in homes else "entry"

    def _read(self, read: Read, block: str) -> None:
        tensor = _argument(read.tensor)
        plain = self._natural(read)
        rows = [d in POSITIONS for d, _, _ in plain]
        if all(e == natural for _, e, natural in plain) and rows == sorted(rows) and not self._is_packed(read):
            self.load(read.name, tensor, tuple(POSITIONS.get(d, e) for d, e, _ in plain), block)
            return
        at, inside = self._inside(read, block)
        value = Type(self.tensor_types[read.tensor].dtype, self._dims(_symbols((*at, inside))))
        self.add(tile.Gather(read.name, Access(tensor, at), self.uses((*at, inside)), value, inside), block)

    def scatter(self, read: Read, tensor: str, value: str, block: str = "entry") -> None:
        """Add a value to `tensor` where `read` reads, summed first over the dimensions on which the index does not
        depend."""
        at, inside = self._inside(read, block)
        dims = self._dims(_symbols((*at, inside)))
        for over in [d for d in self.types[value].dims if d not in dims]:
            value = self.reduce_sum(f"{tensor.lower()}_{AXIS_OF[over]}_sum", value, over, block)
        name = f"scatter_{sum(map(len, self.ops.values()))}"
        self.add(tile.Scatter(name, Access(tensor, at), value, self.uses((*at, inside)), inside), block)

    def index_value(self, read: Read, dim: int, name: str, block: str) -> str:
        """The index along a dimension at which a tensor is read, as a value; a negative one counts from the end."""
        at, _ = self._inside(read, block)
        return self.compute(name, at[dim], block, "i32")

    def _is_packed(self, read: Read) -> bool:
        """True if a tile has rows of several heads and the read depends on the head or the query."""
        return self.signature.pack_gqa and not {"Hq", "Nq"}.isdisjoint(self.tensor_types[read.tensor].dims)

    def _natural(self, read: Read) -> list[tuple[str, Any, Any]]:
        """For each dimension of a read: its name, its index in this kernel, and the dimension's natural index."""
        dims = zip(self.tensor_types[read.tensor].dims, read.index)
        return [(d, e.xreplace(self.heads), NATURAL[d].xreplace(self.heads) if d in NATURAL else None) for d, e in dims]

    def _short_index(self, read: Read, e: Any, block: str) -> Any:
        """An index; a long one becomes a value that is computed once per block."""
        if sympy.count_ops(e) <= LONG:
            return e
        if (block, e) not in self.index_values:
            taken = {*self.types, *self.scalar_dtypes, *(r.name for r in self.spec.reads())}
            names = (f"{read.name}_place{number or ''}" for number in range(len(taken) + 1))
            self.index_values[block, e] = self.compute(
                next(name for name in names if name not in taken), e, block, "i32"
            )
        return symbol(self.index_values[block, e])

    def _inside(self, read: Read, block: str | None = None) -> tuple[tuple[Any, ...], Bool]:
        """(indices of a read, condition under which they are inside the tensor). Negative indices count from the end.

        With a block, long indices become values of it. Raises BuildError if no index is inside.
        """
        inside: list[Any] = []
        at = []
        for dim, e, natural in self._natural(read):
            e = e if block is None else self._short_index(read, e, block)
            extent = dimension(dim).xreplace(self.heads)
            low, high = span(e)
            if e != natural and low < 0:  # from the end
                e = select(e < 0, e + extent, e)
                if not prove_le(-extent, low):
                    inside.append(e >= 0)
            if not (prove_le(high, extent - 1) or (e == natural and dim not in POSITIONS)):
                inside.append(e < extent)
            at.append(e)
        where = sympy.And(*inside, *([in_bounds("q")] if self._is_packed(read) else []))
        if where == sympy.false:
            places = ", ".join(map(to_text, read.index))
            outside = f"reads `{read.tensor}` at `{places}`, which is outside of it; expected places inside"
            raise BuildError(self.spec.key_of(read.tensor), outside)
        return tuple(at), where

    def uses(self, expressions: Iterable[Any]) -> tuple[tuple[str, str], ...]:
        """The values that occur in expressions, as operands."""
        names = sorted(str(s) for s in _symbols(expressions))
        return tuple((n, n) for n in names if n in self.types)

    def _dims(self, symbols: Iterable[Any]) -> tuple[str, ...]:
        """Dimensions of an expression in these symbols, in the order of the scores."""
        names = {str(s) for s in symbols}
        found = {d for n in names & self.types.keys() for d in self.types[n].dims}
        found |= {AXIS_DIM[a] for a in ROW_AXES if f"{a}_idx" in names}
        return tuple(d for d in self.score_dims if d in found)

    def compute(self, name: str, e: Any, block: str = "step", dtype: str = "f32", score: bool = False) -> str:
        """Add an expression in values of the kernel and positions. The result has all of their dimensions."""
        e = e.xreplace(self.heads)
        return self.add(tile.Map(name, e, self.uses((e,)), Type(dtype, self._dims(e.free_symbols)), score), block)

    def mask(self, name: str, value: str, where: Bool, block: str) -> str:
        """Apply a condition to a value; a condition that is always true leaves the value as it is."""
        if where == sympy.true:
            return value
        where = where.xreplace(self.heads)
        used = _symbols((where,))
        uses = tuple((read.name, read.name) for read in self.needed if symbol(read.name) in used)
        facts = tuple(Fact(*(e.xreplace(self.heads) for e in fact)) for fact in self.facts)
        return self.add(tile.Mask(name, value, where, uses, self.types[value], facts), block)

    def compute_scale(self) -> None:
        """Compute the factor from product to score in base 2, if nothing else modifies scores."""
        if self.score == S:
            self.map("qk_scale", symbol("scale") * symbol("LOG2E"), scale="scale")

    def declare_seed(self) -> None:
        """Declare the dropout scalars and the key of the random numbers, if the spec has dropout."""
        if self.spec.dropout:
            for name in DROPOUT_SCALARS:
                self.declare_scalar(name)
            self.add(tile.Seed("seed", "SEED", Type("i64")))

    def dropout_mask(self, head: Any, *dims: str) -> None:
        """Generate the dropout mask of a tile of probabilities in the loop's body, if the spec has dropout."""
        if self.spec.dropout:
            self.add(tile.DropoutMask("keep", "seed", "dropout_threshold", head, Type("b1", dims)), "step")

    def dropped(self, value: str) -> str:
        """A tile of probabilities in the loop body after dropout; without dropout the tile itself."""
        return (
            self.add(tile.Dropout("p_kept", value, "keep", self.types[value]), "step") if self.spec.dropout else value
        )

    def kernel(self) -> Kernel:
        blocks = tuple(Block(n, tuple(ops)) for n, ops in self.ops.items())
        of = self.signature
        return Kernel(of.name, self.grid, blocks, self.program_axis, of.pack_gqa, of.about, kv_split=self.kv_split)


def _symbols(expressions: Iterable[Any]) -> set[Any]:
    return {s for e in expressions for s in e.free_symbols}


def _heads(spec: Spec, signature: Signature) -> dict[Any, Any]:
    """Query head, key head and, with packed heads, query index, as expressions in the program's own indices."""
    h, hkv, sharing = symbol("h"), symbol("hkv"), SHARINGS[spec.heads.sharing]
    if not signature.by_key_head:
        return {hkv: sharing.read}
    if signature.pack_gqa:
        row, queries = symbol("q_idx"), symbol("queries")
        head = sharing.owned * symbol("group") + floordiv(row, queries)
        return {h: head, hkv: sharing.owned, row: mod(row, queries), symbol("Nq"): queries}
    return {at: e for at, e in ((h, sharing.member), (hkv, sharing.owned)) if at != e}


def _argument(tensor: str) -> str:
    """The kernel argument of an input or a derived tensor; a tangent has the name of its argument."""
    return tensor.upper() if tensor == tensor.lower() else tensor


def _access(tensor: str, index: tuple[Any, ...]) -> Access:
    return Access(tensor, tuple(symbol(i) if isinstance(i, str) else i for i in index))


def scores(b: KernelBuilder, *more: Any) -> list[Any]:
    """Compute the score of the softmax, in base 2, from the product `s`.

    Returns the expressions `more`, in terms of computed values.
    """
    if b.score == S:
        b.map("score", symbol("s") * symbol("qk_scale"), "step", score=True, s="s", qk_scale="qk_scale")
        return list(more)
    made, (first, *rest) = shared(*(whole_numbers(of_product(e)) for e in (b.score, *more)))
    for name, e in made:
        b.compute(name, e)
    to_base_two = sympy.Add(*(symbol("LOG2E") * term for term in sympy.Add.make_args(first)))
    if keeps_extremes(b.spec):
        b.compute("score_base", first)
        lowest = select(symbol("score_base") > -sympy.oo, -LARGEST, -sympy.oo)
        to_base_two = sympy.Min(sympy.Max(symbol("LOG2E") * symbol("score_base"), lowest), LARGEST)
    b.compute("score", to_base_two, score=True)
    return rest


def kv_head(spec: Spec) -> Any:
    """The K/V head that query head `h` reads. K and V are indexed, never expanded."""
    return SHARINGS[spec.heads.sharing].read


def in_bounds(axis: str) -> Bool:
    return symbol(f"{axis}_idx") < symbol(AXIS_EXTENT[axis])
