"""Writes the header's mask and score, and a kernel's values, as expressions of the same symbols, so that the rules of
this package can compare them.

The header's expressions are rewritten in the kernel's coordinates: the query head of a program, the numbers of packed
rows. The kernel's values are expanded to positions, sizes and elements of tensors. Both are then compared in a normal
form (see `algebra`), and where these differ, by their values at many points (see `points`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import sympy

from attngen.ir import AXIS_EXTENT, Access, Kernel, Module, Op, Read, Type, dimension, only, tile
from attngen.ir.expr import Bool, Expr, conjuncts, floordiv, mod, select, span, symbol
from attngen.ir.expr_text import to_text
from attngen.ir.heads import SHARINGS
from attngen.ir.names import SCALES
from attngen.verify.algebra import normal

PRODUCT = symbol("s")


SCALE = symbol("scale")


NATURAL = {"B": symbol("b"), "Hq": symbol("h"), "Hkv": symbol("hkv"), "Nq": symbol("q_idx"), "Nk": symbol("kv_idx")}


def coordinates(module: Module, kernel: Kernel) -> dict[Expr, Expr]:
    """The header's heads and positions, as expressions of a kernel. Its programs each have a query head, a KV head with
    its group of query heads, or packed rows."""
    h, hkv, group, q_idx, queries = map(symbol, ("h", "hkv", "group", "q_idx", "queries"))
    sharing = SHARINGS[module.sharing]
    if kernel.pack_gqa:
        head = sharing.owned * group + floordiv(q_idx, queries)
        return {h: head, hkv: sharing.owned, q_idx: mod(q_idx, queries), symbol("Nq"): queries}
    if kernel.traits.has_groups:
        return {h: sharing.member, hkv: sharing.owned}
    return {hkv: sharing.read}


FROM_START = sympy.Function("from_start")  # of an index that may be negative, where an element reads as 0


class Header:
    """The module's mask and score in the coordinates of one kernel."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.meaning, self.own = module.meaning, kernel.program_axis
        args = {arg.name: arg.type for arg in kernel.args}  # they have the element types
        declared = module.tensors_of_kernels
        self.types = {name: replace(t, dtype=args.get(name.upper(), t).dtype) for name, t in declared.items()}
        self.named: dict[Expr, Expr] = {**coordinates(module, kernel), PRODUCT: PRODUCT * SCALE}
        self.named |= {symbol(i.name): _number(i.name, i.dtype) for i in module.inputs if not i.shape}
        read = {r.name: r for r in module.meaning.reads}
        for name, type_ in self.types.items():
            if name not in read and all(d in NATURAL for d in type_.dims):
                self._declare(Read(name, name, tuple(NATURAL[d] for d in type_.dims)))
        for r in module.meaning.reads:
            self._declare(r)

    def _declare(self, read: Read) -> None:
        if read.tensor in self.types:
            index = [_from_start(dim, e) for dim, e in zip(self.types[read.tensor].dims, read.index)]
            at = [e.xreplace(self.named) for e in index]
            self.named[symbol(read.name)] = _element(read.tensor.upper(), at, (), self.types[read.tensor])

    def here(self, e: Any) -> Any:
        """An expression of the header in this kernel's coordinates."""
        return _replaced(e, self.named)

    @property
    def where(self) -> Bool:
        """The mask; in a kernel whose programs each have a tile of keys, in terms of tensors over keys."""
        meaning = self.meaning
        return self.here(meaning.where if meaning.by_key is None or self.own == "q" else meaning.by_key)


def _from_start(dim: str, e: Expr) -> Expr:
    """An index of the header, counted from the start of a dimension: one that is always negative counts from its
    end."""
    if span(e)[1] >= 0:
        return e
    index = e + dimension(dim)
    return index if index.is_nonnegative else FROM_START(index)


def _number(name: str, dtype: str) -> Expr:
    """The symbol of a scalar or of an element; an integer symbol for an i32."""
    known = symbol(name)
    return known if known.is_integer or dtype != "i32" else sympy.Symbol(name, integer=True)


def _element(tensor: str, index: Iterable[Expr], guard: Iterable[Bool], type_: Type) -> Expr:
    """The symbol of an element of a tensor, one for each index and each condition under which it is read."""
    at = ", ".join(to_text(normal(e)) for e in index)
    conditions = "".join(f" if {to_text(normal(c))}" for c in guard)
    return _number(f"{tensor}[{at}{conditions}]", type_.dtype)


def _replaced(e: Any, named: dict[Expr, Expr]) -> Any:
    """An expression with its symbols replaced. Cached, because the same mask is verified after each pass."""
    return _replaced_of(e, frozenset(named.items()))


@cache
def _replaced_of(e: Any, named: frozenset[tuple[Expr, Expr]]) -> Any:
    return e.xreplace(dict(named))


class Values:
    """A kernel's values as expressions: maps are expanded, elements of tensors are symbols, and the product q k^T is
    `s`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.made: dict[str, Expr] = {}
        self.elements: dict[Expr, str] = {}  # symbol of an element -> its tensor
        self.others: dict[Expr, str] = {}  # symbol of a value that is not expanded -> the value

    def of(self, ref: str) -> Expr:
        if ref not in self.made:
            self.made[ref] = self._expanded(ref)
        return self.made[ref]

    def expression(self, e: Any, op: Op) -> Any:
        """An expression of an op, with its values and the scalars that it names expanded."""
        uses = {symbol(s): self.of(ref) for s, ref in getattr(op, "uses", ())}
        return _replaced(e, {**uses, **{symbol(n): self.of(n) for n in self.kernel.traits.scalars_of(op)}})

    def _expanded(self, ref: str) -> Expr:
        op = self.kernel.op(ref)
        if isinstance(op, tile.Map):
            return self.expression(op.expr, op)
        if isinstance(op, tile.Dot) and self._is_product(op):
            return PRODUCT
        if isinstance(op, tile.Dot) and (factors := self._half_product(op)):
            return PRODUCT / sympy.Mul(*factors)
        if isinstance(op, tile.Load):
            tensor, index = self.kernel.accessed(op)
            letters = {symbol(axis): symbol(f"{axis}_idx") for axis in ("q", "kv")}
            return self.element(tensor.name, [self.expression(e.xreplace(letters), op) for e in index], (), op.type)
        if isinstance(op, tile.Gather):
            return self.gathered(op)
        if isinstance(op, tile.CacheLength):
            return symbol(op.name)
        if isinstance(op, tile.Arg) and op.role == "scalar":
            return _number(op.name, op.type.dtype)
        made = sympy.Symbol(f"%{ref}", extended_real=True)
        self.others[made] = ref
        return made

    def element(self, tensor: str, index: Iterable[Expr], guard: Iterable[Bool], type_: Type) -> Expr:
        made = _element(tensor, index, guard, type_)
        self.elements[made] = tensor
        return made

    def _is_product(self, op: tile.Dot) -> bool:
        """True if a dot sums over all of head_dim of q and k. Over a latent, this takes two products, one accumulated
        onto the other."""
        if self.kernel.traits.rotates and {self._loaded(op.a), self._loaded(op.b)} == {"Q", "K"}:
            rest = self.kernel.op(op.acc) if op.acc else None
            return (
                isinstance(rest, tile.Dot)
                and {self._loaded(rest.a), self._loaded(rest.b)} == {"Q_ROPE", "K_ROPE"}
                and not rest.acc
            )
        return {self._loaded(op.a), self._loaded(op.b)} == {"Q", "K"} and not op.acc

    def _half_product(self, op: tile.Dot) -> tuple[Expr, Expr] | None:
        """The factors of a score that two products compute, one over even columns of q and 8-bit keys, one over odd
        columns. The factors are the largest size in each row of q, by which the row was divided, and the scale of the
        keys.

        `op` is the second product. None for other products.
        """
        first, pairs = self.kernel.op(op.acc) if op.acc else None, quantised_load(self.kernel, op.b)
        if not isinstance(first, tile.Dot) or first.acc or pairs is None or not pairs.src.tensor.startswith("K"):
            return None
        q, k = (self.kernel.op(ref) for ref in (op.a, op.b))
        halves = [f"{x.name}.{half}" for half in tile.HALVES for x in (q, k)]
        if not isinstance(q, tile.Deinterleave) or [first.a, first.b, op.a, op.b] != halves:
            return None
        scaled = self.of(q.value)
        x = next((s for s in scaled.free_symbols if self.elements.get(s) == "Q"), None)
        size = next(
            (s for s in scaled.free_symbols if isinstance(self.kernel.op(self.others.get(s, q.name)), tile.Reduce)),
            None,
        )
        if x is None or size is None or scaled != select(size > 0, x / size, x):
            return None
        largest = self.kernel.op(self.others[size])
        assert isinstance(largest, tile.Reduce)
        return (
            (size, scale_of(self.kernel, self, pairs))
            if largest.op == "max" and self.of(largest.value) == sympy.Max(x, -x)
            else None
        )

    def _loaded(self, ref: str) -> str:
        op = latent_load(self, ref) or self.kernel.op(ref)
        return self.kernel.accessed(op)[0].name if isinstance(op, tile.Load) else ""

    def gathered(self, op: tile.Gather) -> Expr:
        """The element that a gather reads, by the header's rules: a negative index counts from the end, and an element
        out of bounds is 0."""
        conditions, inside, at = conjuncts(op.where), set(pair_exists()), []
        for dim, e in zip(self.kernel.type_of(op.src.tensor).dims, op.src.index):
            extent = dimension(dim)
            bounds = [set(conjuncts(c)) for c in (e >= 0, e < extent)]
            inside |= set().union(*(parts for parts in bounds if parts <= set(conditions)))
            wrapped = isinstance(e, select) and e.args[0] == (e.args[2] < 0) and e.args[1] == e.args[2] + extent
            if wrapped or e.is_nonnegative or span(e)[0] >= 0:
                at.append(self.expression(e.args[2] if wrapped else e, op))
            else:
                at.append(FROM_START(self.expression(e, op)))
        guard = [self.expression(c, op) for c in conditions if c not in inside]
        return self.element(op.src.tensor, at, guard, op.type)

    def conditions(self, ref: str) -> tuple[list[Bool], Expr]:
        """The conditions of the masks that have been applied to a value, and the value before them."""
        found: list[Bool] = []
        while isinstance(op := self.kernel.op(ref), tile.Mask):
            found += conjuncts(self.expression(op.where, op))
            ref = op.value
        return found, self.of(ref)


def quantised_load(kernel: Kernel, ref: str) -> tile.Load | None:
    """The load of 8-bit pairs whose even or odd columns a value has; None for other values."""
    op = kernel.op(ref)
    source = kernel.op(op.value) if isinstance(op, tile.Deinterleave) else None
    return source if isinstance(source, tile.Load) and source.type.quantised else None


def latent_load(values: Values, ref: str) -> tile.Load | None:
    """The load of the 8-bit pairs from which a tile of latents is computed; None for other values. The tile has all
    columns of each row, each times its group's scale, in the element type."""
    kernel, op = values.kernel, values.kernel.op(ref)
    tiles = (
        [made for _, used in op.uses if isinstance(made := kernel.op(used), tile.Interleave)]
        if isinstance(op, tile.Map) and op.type.dtype == "T"
        else []
    )
    load = quantised_load(kernel, tiles[0].a) if len(tiles) == 1 else None
    if load is None or kernel.accessed(load)[0].name != "K":
        return None
    columns = tiles[0].a.rpartition(".")[0]
    whole = (tiles[0].a, tiles[0].b) == tuple(f"{columns}.{half}" for half in tile.HALVES)
    return load if whole and values.of(ref) == values.of(tiles[0].name) * scale_of(kernel, values, load) else None


def scale_of(kernel: Kernel, values: Values, op: tile.Append | tile.Load) -> Expr:
    """The element of K_SCALE or V_SCALE by which an op scales a row that it loads or appends. There is one per head,
    per page and head, or, for a latent, per group of its columns."""
    declared, index = kernel.accessed(op)
    tensor, head = SCALES[declared.name], index[-3]
    if len(kernel.type_of(tensor).dims) == 4:
        row = [symbol("kv_idx") if e == symbol("kv") else values.expression(e, op) for e in index[:-1]]
        return values.element(tensor, [*row, symbol("group_v")], (), kernel.type_of(tensor))
    page = kernel.op(op.pages) if op.pages else None
    if len(kernel.type_of(tensor).dims) == 1 or not isinstance(page, tile.Gather):
        return values.element(tensor, [values.expression(head, op)], (), kernel.type_of(tensor))
    read = next((o for o in only(kernel.ops(), tile.Gather) if o.src.tensor == tensor), page)
    if kernel.traits.tile_page and not read.type.dims:  # all rows of the tile are in one page
        first = next(o for o in only(kernel.ops(), tile.Gather) if o.src.tensor == "PAGE_TABLE" and not o.type.dims)
        of_row = {symbol("kv_idx"): symbol("kv_start")}
        moved = replace(
            page,
            src=replace(page.src, index=tuple(e.xreplace(of_row) for e in page.src.index)),
            where=page.where.xreplace(of_row),
        )
        page = first if values.gathered(moved) == values.gathered(first) else page
    at = Access(tensor, (symbol(page.name), head))
    return values.gathered(
        tile.Gather("", at, (*page.uses, (page.name, page.name)), kernel.type_of(tensor), page.where)
    )


def pair_exists() -> list[Bool]:
    """The conditions that a pair's query and key exist."""
    return [symbol(f"{axis}_idx") < symbol(AXIS_EXTENT[axis]) for axis in ("q", "kv")]
