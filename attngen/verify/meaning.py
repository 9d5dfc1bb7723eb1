"""Rules across kernels: each kernel masks and scores as the module's header says.

The header's expressions are rewritten in a kernel's coordinates: which query head a program has, how packed rows are
numbered. The kernel's values are written out in positions, sizes and elements of tensors. Both are then compared in one
form (see `algebra`), and by their values at many points where the forms differ (see `points`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import sympy

from attngen.ir.expr import (
    LARGEST,
    Bool,
    Expr,
    conjuncts,
    exp2,
    finite,
    floordiv,
    log2,
    mod,
    select,
    span,
    symbol,
    to_text,
)
from attngen.ir.graph import Kernel, Module, Read, input_tensors
from attngen.ir.heads import SHARINGS
from attngen.ir.names import SCALES
from attngen.ir.ops import (
    AXIS_EXTENT,
    HALVES,
    Access,
    Append,
    Arg,
    CacheLength,
    Deinterleave,
    Dot,
    Gather,
    Interleave,
    Load,
    Loop,
    Map,
    Mask,
    Op,
    Reduce,
    Scatter,
    SoftmaxStep,
    Store,
    Type,
    dimension,
)
from attngen.tiles.intervals import implies
from attngen.verify.algebra import alike, equal, normal, same

LOG2E, PRODUCT, SCALE = symbol("LOG2E"), symbol("s"), symbol("scale")
ROW_SUMS = (
    "LSE",
    "LSE2",
    "M_ALL",
)  # tensors with the logarithm of each row's sum of weights, natural and to base 2; or with its maximum
NATURAL = {"B": symbol("b"), "Hq": symbol("h"), "Hkv": symbol("hkv"), "Nq": symbol("q_idx"), "Nk": symbol("kv_idx")}


def coordinates(module: Module, kernel: Kernel) -> dict[Expr, Expr]:
    """The header's heads and positions, in terms of a kernel whose programs own a query head, a key head with its
    group, or packed rows."""
    h, hkv, group, q_idx, queries = map(symbol, ("h", "hkv", "group", "q_idx", "queries"))
    sharing = SHARINGS[module.sharing]
    if kernel.pack_gqa:
        head = sharing.owned * group + floordiv(q_idx, queries)
        return {h: head, hkv: sharing.owned, q_idx: mod(q_idx, queries), symbol("Nq"): queries}
    if kernel.has_groups:
        return {h: sharing.member, hkv: sharing.owned}
    return {hkv: sharing.read}


FROM_START = sympy.Function("from_start")  # of a place that may be before the start, where an element reads as 0


class Header:
    """The module's meaning in the coordinates of one kernel."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.meaning, self.own = module.meaning, kernel.program_axis
        args = {arg.name: arg.type for arg in kernel.args}  # their element types
        declared = input_tensors(module.inputs, module.derived)
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
            places = [_from_start(dim, e) for dim, e in zip(self.types[read.tensor].dims, read.index)]
            at = [e.xreplace(self.named) for e in places]
            self.named[symbol(read.name)] = _element(read.tensor.upper(), at, (), self.types[read.tensor])

    def here(self, e: Any) -> Any:
        """An expression of the header in this kernel's coordinates."""
        return _replaced(e, self.named)

    @property
    def where(self) -> Bool:
        """The mask; in a kernel that owns keys, in terms of tensors over keys."""
        meaning = self.meaning
        return self.here(meaning.where if meaning.by_key is None or self.own == "q" else meaning.by_key)


def _from_start(dim: str, e: Expr) -> Expr:
    """A place of the header counted from the start of a dimension: one that is always negative counts from its end."""
    if span(e)[1] >= 0:
        return e
    place = e + dimension(dim)
    return place if place.is_nonnegative else FROM_START(place)


def _number(name: str, dtype: str) -> Expr:
    """The symbol of a number or of an element. An i32 has an integer symbol."""
    known = symbol(name)
    return known if known.is_integer or dtype != "i32" else sympy.Symbol(name, integer=True)


def _element(tensor: str, index: Iterable[Expr], guard: Iterable[Bool], type_: Type) -> Expr:
    """The symbol for an element of a tensor. There is one for each place and each condition under which it is read."""
    places = ", ".join(to_text(normal(e)) for e in index)
    conditions = "".join(f" if {to_text(normal(c))}" for c in guard)
    return _number(f"{tensor}[{places}{conditions}]", type_.dtype)


def _replaced(e: Any, named: dict[Expr, Expr]) -> Any:
    """An expression with others in place of its symbols. The same mask is verified after each pass: what becomes of
    it is made once."""
    return _replaced_of(e, frozenset(named.items()))


@cache
def _replaced_of(e: Any, named: frozenset[tuple[Expr, Expr]]) -> Any:
    return e.xreplace(dict(named))


class Values:
    """A kernel's values, written out: maps are expanded, elements of tensors are symbols, and the product q k^T is
    `s`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.made: dict[str, Expr] = {}
        self.elements: dict[Expr, str] = {}  # symbol of an element -> its tensor
        self.others: dict[Expr, str] = {}  # symbol of a value that is not written out -> the value

    def of(self, ref: str) -> Expr:
        if ref not in self.made:
            self.made[ref] = self._written_out(ref)
        return self.made[ref]

    def expression(self, e: Any, op: Op) -> Any:
        """An expression of an op, with its values and the scalars it names written out."""
        uses = {symbol(s): self.of(ref) for s, ref in getattr(op, "uses", ())}
        return _replaced(e, {**uses, **{symbol(n): self.of(n) for n in self.kernel.scalars_of(op)}})

    def _written_out(self, ref: str) -> Expr:
        op = self.kernel.op(ref)
        if isinstance(op, Map):
            return self.expression(op.expr, op)
        if isinstance(op, Dot) and self._is_product(op):
            return PRODUCT
        if isinstance(op, Dot) and (parts := self._of_halves(op)):
            return PRODUCT / sympy.Mul(*parts)
        if isinstance(op, Load):
            tensor, index = self.kernel.accessed(op)
            letters = {symbol(axis): symbol(f"{axis}_idx") for axis in ("q", "kv")}
            return self.element(tensor.name, [self.expression(e.xreplace(letters), op) for e in index], (), op.type)
        if isinstance(op, Gather):
            return self.gathered(op)
        if isinstance(op, CacheLength):
            return symbol(op.name)
        if isinstance(op, Arg) and op.role == "scalar":
            return _number(op.name, op.type.dtype)
        made = sympy.Symbol(f"%{ref}", extended_real=True)
        self.others[made] = ref
        return made

    def element(self, tensor: str, index: Iterable[Expr], guard: Iterable[Bool], type_: Type) -> Expr:
        made = _element(tensor, index, guard, type_)
        self.elements[made] = tensor
        return made

    def _is_product(self, op: Dot) -> bool:
        """Whether it multiplies all columns of q and k: those of a latent in two products, of which one is added to
        the other."""
        if self.kernel.rotates and {self._loaded(op.a), self._loaded(op.b)} == {"Q", "K"}:
            rest = self.kernel.op(op.acc) if op.acc else None
            return (
                isinstance(rest, Dot)
                and {self._loaded(rest.a), self._loaded(rest.b)} == {"Q_ROPE", "K_ROPE"}
                and not rest.acc
            )
        return {self._loaded(op.a), self._loaded(op.b)} == {"Q", "K"} and not op.acc

    def _of_halves(self, op: Dot) -> tuple[Expr, Expr] | None:
        """Of the second of two products that sum even and odd columns of q and of 8-bit keys: by what rows of q were
        divided, which is the largest number of each, and the factors of the keys. None for other products."""
        first, pairs = self.kernel.op(op.acc) if op.acc else None, quantised_load(self.kernel, op.b)
        if not isinstance(first, Dot) or first.acc or pairs is None or not pairs.src.tensor.startswith("K"):
            return None
        q, k = (self.kernel.op(ref) for ref in (op.a, op.b))
        halves = [f"{x.name}.{half}" for half in HALVES for x in (q, k)]
        if not isinstance(q, Deinterleave) or [first.a, first.b, op.a, op.b] != halves:
            return None
        divided = self.of(q.value)
        x = next((s for s in divided.free_symbols if self.elements.get(s) == "Q"), None)
        size = next(
            (s for s in divided.free_symbols if isinstance(self.kernel.op(self.others.get(s, q.name)), Reduce)), None
        )
        if x is None or size is None or divided != select(size > 0, x / size, x):
            return None
        largest = self.kernel.op(self.others[size])
        assert isinstance(largest, Reduce)
        return (
            (size, scale_of(self.kernel, self, pairs))
            if largest.op == "max" and self.of(largest.value) == sympy.Max(x, -x)
            else None
        )

    def _loaded(self, ref: str) -> str:
        op = latent_load(self, ref) or self.kernel.op(ref)
        return self.kernel.accessed(op)[0].name if isinstance(op, Load) else ""

    def gathered(self, op: Gather) -> Expr:
        """An element read as the header reads: a negative index counts from the end, and an element outside is 0."""
        said, inside, at = conjuncts(op.where), set(_inside()), []
        for dim, e in zip(self.kernel.type_of(op.src.tensor).dims, op.src.index):
            extent = dimension(dim)
            bounds = [set(conjuncts(c)) for c in (e >= 0, e < extent)]
            inside |= set().union(*(parts for parts in bounds if parts <= set(said)))
            wrapped = isinstance(e, select) and e.args[0] == (e.args[2] < 0) and e.args[1] == e.args[2] + extent
            if wrapped or e.is_nonnegative or span(e)[0] >= 0:
                at.append(self.expression(e.args[2] if wrapped else e, op))
            else:
                at.append(FROM_START(self.expression(e, op)))
        guard = [self.expression(c, op) for c in said if c not in inside]
        return self.element(op.src.tensor, at, guard, op.type)

    def conditions(self, ref: str) -> tuple[list[Bool], Expr]:
        """The conditions of the masks that a value has passed, and the value before them."""
        found: list[Bool] = []
        while isinstance(op := self.kernel.op(ref), Mask):
            found += conjuncts(self.expression(op.where, op))
            ref = op.value
        return found, self.of(ref)


def quantised_load(kernel: Kernel, ref: str) -> Load | None:
    """The load of the pairs of 8-bit numbers whose even or odd columns a value is; None for other values."""
    op = kernel.op(ref)
    source = kernel.op(op.value) if isinstance(op, Deinterleave) else None
    return source if isinstance(source, Load) and source.type.quantised else None


def latent_load(values: Values, ref: str) -> Load | None:
    """The load of the pairs of which a tile of latents is made: all numbers of each row, each times the factor of
    its group of columns, in the element type. None for other values."""
    kernel, op = values.kernel, values.kernel.op(ref)
    tiles = (
        [made for _, used in op.uses if isinstance(made := kernel.op(used), Interleave)]
        if isinstance(op, Map) and op.type.dtype == "T"
        else []
    )
    load = quantised_load(kernel, tiles[0].a) if len(tiles) == 1 else None
    if load is None or kernel.accessed(load)[0].name != "K":
        return None
    columns = tiles[0].a.rpartition(".")[0]
    whole = (tiles[0].a, tiles[0].b) == tuple(f"{columns}.{half}" for half in HALVES)
    return load if whole and values.of(ref) == values.of(tiles[0].name) * scale_of(kernel, values, load) else None


def scale_of(kernel: Kernel, values: Values, op: Append | Load) -> Expr:
    """The element of K_SCALE or V_SCALE with which a row goes that an op loads or appends: its head's, or its page's
    and head's; of a latent, with which a group of the row's columns goes."""
    declared, index = kernel.accessed(op)
    tensor, head = SCALES[declared.name], index[-3]
    if len(kernel.type_of(tensor).dims) == 4:
        row = [symbol("kv_idx") if e == symbol("kv") else values.expression(e, op) for e in index[:-1]]
        return values.element(tensor, [*row, symbol("group_v")], (), kernel.type_of(tensor))
    page = kernel.op(op.pages) if op.pages else None
    if len(kernel.type_of(tensor).dims) == 1 or not isinstance(page, Gather):
        return values.element(tensor, [values.expression(head, op)], (), kernel.type_of(tensor))
    read = next((o for o in kernel.ops() if isinstance(o, Gather) and o.src.tensor == tensor), page)
    if kernel.tile_page and not read.type.dims:  # of the page in which all of the tile's rows are
        first = next(
            o for o in kernel.ops() if isinstance(o, Gather) and o.src.tensor == "PAGE_TABLE" and not o.type.dims
        )
        of_row = {symbol("kv_idx"): symbol("kv_start")}
        moved = replace(
            page,
            src=replace(page.src, index=tuple(e.xreplace(of_row) for e in page.src.index)),
            where=page.where.xreplace(of_row),
        )
        page = first if values.gathered(moved) == values.gathered(first) else page
    at = Access(tensor, (symbol(page.name), head))
    return values.gathered(Gather("", at, (*page.uses, (page.name, page.name)), kernel.type_of(tensor), page.where))


def _inside() -> list[Bool]:
    """Conditions of every pair that counts: its query and its key exist."""
    return [symbol(f"{axis}_idx") < symbol(AXIS_EXTENT[axis]) for axis in ("q", "kv")]


def softmaxes(kernel: Kernel, values: Values) -> Iterator[tuple[Op, Expr, list[Expr]]]:
    """The ops that turn scores into weights: (op, its exponent of 2, terms that may be subtracted from the score).

    The online softmax subtracts its running maximum itself. A kernel that recomputes weights subtracts the log2 of the
    row's sum: an element of LSE2, or the expression in LSE from which LSE2 is made. Or it subtracts an element of
    M_ALL, and multiplies by that of INV_L_ALL at the same place: the weights, or what it sums of them (see
    `_normalised`).
    """
    for op in kernel.ops():
        if isinstance(op, SoftmaxStep):
            shift = values.of(op.shift) if op.shift else sympy.Integer(0)
            yield (
                op,
                (values.of(op.scale) if op.scale else sympy.Integer(1)) * values.of(op.s) + shift,
                [sympy.Integer(0)],
            )
        elif isinstance(op, Map) and (power := power_of(op)) is not None:
            exponent = values.expression(power, op).args[0]
            sums = {x: values.elements[x] for x in sorted(exponent.free_symbols, key=str) if x in values.elements}
            rows = [e for x, tensor in sums.items() if tensor in ROW_SUMS for e in _subtracted(x, tensor)]
            if rows:
                yield op, exponent, rows


def power_of(op: Map) -> Expr | None:
    """The power of 2 that a map is, or is times a number of each row; None for other maps."""
    e = op.expr
    if e.is_Mul and len(e.args) == 2 and any(x.is_Symbol for x in e.args):
        e = next((x for x in e.args if not x.is_Symbol), e)
    return e if isinstance(e, exp2) else None


def _subtracted(x: Expr, tensor: str) -> list[Expr]:
    """What an element says of the row's sum of weights: from LSE, +inf where that is -inf, or is so to base 2."""
    if tensor != "LSE":
        return [x]
    return [select(e > -sympy.oo, LOG2E * x, sympy.oo) for e in (x, LOG2E * x)]


def _normalised(op: Map, values: Values) -> bool:
    """Whether weights that a map makes again are multiplied by one over the row's sum of them, if it subtracts the
    row's maximum.

    The map does that. Or every value that a loop carries is multiplied by it where it is read, after the loops: then
    loops store nothing, and take no logarithms of the weights.
    """
    factor = op.expr / power_of(op) if power_of(op) is not None else op.expr
    elements = {x: values.elements[x] for x in values.of(op.name).free_symbols if x in values.elements}
    maxima = [str(x) for x, tensor in elements.items() if tensor == "M_ALL"]
    if len(maxima) != 1:
        return not maxima and factor == 1
    inverse = maxima[0].replace("M_ALL", "INV_L_ALL", 1)
    if factor != 1:
        found = values.expression(factor, op)
        return values.elements.get(found) == "INV_L_ALL" and str(found) == inverse
    kernel = values.kernel
    results = [f"{loop.name}.{field}" for loop in kernel.loops for field, _ in loop.carry]
    in_loops = [other for loop in kernel.loops for other in kernel.block(loop.body).ops]
    readers = [
        (other, ref)
        for other in kernel.ops()
        if not isinstance(other, Loop)
        for ref in other.operands()
        if ref in results
    ]
    divided = [
        isinstance(other, Map) and str(values.of(other.name) / values.of(ref)) == inverse for other, ref in readers
    ]
    linear = not any(isinstance(other, (Scatter, Store)) or is_logarithm(kernel, values, other) for other in in_loops)
    return linear and all(divided)


def scores_as_said(module: Module, kernel: Kernel) -> Iterator[str]:
    """Weights are made of the header's score, nothing but their logarithms reads masked scores, and a sink is the
    header's."""
    if not {"Q", "K"} <= {arg.name for arg in kernel.args}:
        yield from _sinks(kernel, Header(module, kernel), Values(kernel))
        return
    header, values = Header(module, kernel), Values(kernel)
    made_by = list(softmaxes(kernel, values))
    weights = {op.name for op, _, _ in made_by}
    scored = any(values.of(op.name) == PRODUCT for op in kernel.dots)
    if scored and not weights and any(arg.name in ROW_SUMS for arg in kernel.args):
        yield "makes no weights of its scores: expected a softmax_step, or exp2 of scores less an element of LSE2 or M_ALL"
    for op in kernel.ops():
        strangers = {n for n in kernel.graph.successors(op.name) if not isinstance(kernel.op(n), Mask)} - weights
        strangers = {n for n in strangers if not is_logarithm(kernel, values, kernel.op(n))}
        if isinstance(op, Mask) and weights and strangers:
            yield f"%{min(strangers)} reads the masked scores %{op.name}, and makes no weights of them"
    for op, exponent, subtracted in made_by:
        masked = {
            s: values.others[s]
            for s in exponent.free_symbols
            if s in values.others and isinstance(kernel.op(values.others[s]), Mask)
        }
        factor = sympy.expand(exponent).coeff(next(iter(masked))) if masked else sympy.Integer(1)
        number, rest = factor.as_coeff_Mul()
        score = header.here(module.meaning.score)
        made = _unlimited(exponent.xreplace({s: values.conditions(ref)[1] for s, ref in masked.items()}), score)
        right = LOG2E * score
        rising = len(masked) < 2 and number > 0 and rest in (sympy.Integer(1), SCALE, LOG2E, LOG2E * SCALE)
        if isinstance(op, Map) and not _normalised(op, values):
            said = "expected weights of M_ALL, or all that the loop sums of them, times INV_L_ALL of their row, and other weights alone"
            yield f"%{op.name} is `{to_text(values.of(op.name))}`; {said}"
        if not (rising and any(equal(made, right - x) for x in subtracted)):
            expected = to_text(right - subtracted[0])
            yield f"%{op.name} weighs scores by exp2({to_text(made)}); expected exp2({expected}), by the header's score"
    yield from _sinks(kernel, header, values)


def _unlimited(e: Expr, score: Expr) -> Expr:
    """An expression without the limits of fp32: LOG2E * x for min(LARGEST, max(LOG2E * x, -LARGEST if x > -inf else
    -inf)).

    The inner limit is -LARGEST alone where the score is never -inf, as a square is not.
    """

    def limited(x: Any) -> Expr | None:
        top = x.args if isinstance(x, sympy.Min) and len(x.args) == 2 and LARGEST in x.args else ()
        inner = next((y.args for y in top if isinstance(y, sympy.Max) and len(y.args) == 2), None)
        if inner is None:
            return None
        if -LARGEST in inner:
            (value,) = (y for y in inner if y != -LARGEST)
            return value if (score > -sympy.oo) == sympy.true else None
        for value, lowest in (inner, inner[::-1]):
            if isinstance(lowest, select) and lowest.args[0].is_Relational:
                natural = lowest.args[0].args[0]
                holds = lowest.args == (natural > -sympy.oo, -LARGEST, -sympy.oo) and same(
                    normal(value), normal(LOG2E * natural)
                )
                return value if holds else None
        return None

    return e.replace(lambda x: limited(x) is not None, limited)


def is_logarithm(kernel: Kernel, values: Values, op: Op) -> bool:
    """Whether it is the logarithm to base 2 of a weight where that is positive, and 0 elsewhere, so that no 0 meets
    an infinity."""
    if not isinstance(op, Map) or not isinstance(op.expr, select):
        return False
    positive, logarithm, otherwise = op.expr.args
    compared = dict(op.uses).get(str(positive.args[0]), "") if positive.is_Relational else ""
    weight = kernel.op(compared) if compared else None
    if isinstance(weight, SoftmaxStep):
        scale = values.of(weight.scale) if weight.scale else sympy.Integer(1)
        expected = scale * (values.of(weight.s) - values.of(f"{weight.name}.m"))
    elif isinstance(weight, Map) and isinstance(weight.expr, exp2):
        expected = values.of(weight.name).args[0]
    elif isinstance(weight, Map) and power_of(weight) is not None:
        return positive == (positive.args[0] > 0) and otherwise == 0 and logarithm == log2(positive.args[0])
    else:
        return False
    return positive == (positive.args[0] > 0) and otherwise == 0 and equal(values.expression(logarithm, op), expected)


def _sinks(kernel: Kernel, header: Header, values: Values) -> Iterator[str]:
    """Kernels that store LSE join each row's maximum with the header's sink, if there is one."""
    steps = [op for op in kernel.ops() if isinstance(op, SoftmaxStep)]
    names = {arg.name for arg in kernel.args}
    if not (steps or kernel.combines_splits) or "LSE" not in names:
        return
    sink = header.meaning.sink
    scale = values.of(steps[0].scale) if steps and steps[0].scale else sympy.Integer(1)
    joined = [
        op
        for op in kernel.block("entry").ops
        if isinstance(op, Map) and isinstance(op.expr, sympy.Max) and len(op.type.dims) == 1
    ]
    if len(joined) != (sink is not None):
        yield f"{len(joined)} logits join a row's softmax; expected {'one, as the header has a sink' if sink is not None else 'none'}"
    for op in joined if sink is not None else ():
        maxima = [values.of(ref) for _, ref in op.uses if isinstance(kernel.op(ref), Loop)]
        right = (sympy.Max(scale * m, finite(LOG2E * header.here(sink))) for m in maxima)
        if not any(equal(values.of(op.name), x) for x in right):
            yield f"%{op.name} is `{to_text(values.of(op.name))}`; expected the row's maximum and the header's sink, `{to_text(sink)}`"


def masks_as_said(module: Module, kernel: Kernel) -> Iterator[str]:
    """A kernel hides the same pairs of a query and a key as the header's mask, among pairs that exist."""
    header, values = Header(module, kernel), Values(kernel)
    said = conjuncts(header.where)
    used = [(op, ref) for op, exponent, _ in softmaxes(kernel, values) for ref in _scores_of(kernel, op)]
    ends = used or [(op, op.name) for op in kernel.ops() if isinstance(op, Mask) and not _masked_again(kernel, op)]
    for op, ref in ends:
        done, _ = values.conditions(ref)
        for c in _unproven(done, [*said, *_inside()], kernel.program_axis):
            yield f"%{op.name} hides more than the header's mask: `{to_text(c)}` does not follow from `{to_text(header.where)}`"
        for c in _unproven(said, [*done, *_inside()], kernel.program_axis):
            yield f"%{op.name} hides less than the header's mask: `{to_text(c)}` does not follow from its conditions"
    for op in kernel.ops():
        if isinstance(op, Mask):
            yield from _facts(op, header, values)


def _scores_of(kernel: Kernel, op: Op) -> list[str]:
    """The scores that a softmax step, or a map that makes weights, reads: the masked ones, if there are any."""
    if isinstance(op, SoftmaxStep):
        return [op.s]
    masked = [ref for ref in op.operands() if isinstance(kernel.op(ref), Mask)]
    return masked or [next(iter(op.operands()))]


def _masked_again(kernel: Kernel, op: Mask) -> bool:
    return any(isinstance(kernel.op(n), Mask) for n in kernel.graph.successors(op.name))


def _unproven(conclusions: Iterable[Bool], premises: Iterable[Bool], own: str) -> list[Bool]:
    """The conclusions that are not among the premises and follow from none of them, for rows that exist.

    Of two forms of a condition one may be decided where it becomes normal, as one that never holds: then they are
    compared as they stand.
    """
    premises, loop = tuple(premises), "kv" if own == "q" else "q"
    known = dict.fromkeys(normal(p) for p in premises)
    left = []
    for c in conclusions:
        wanted = normal(c)
        if wanted in known:
            continue
        if wanted == sympy.true or any(
            alike(p, wanted) or (_whole(p, wanted) and implies(p, wanted, own, loop)) for p in known
        ):
            continue
        if not any(alike(p, c) for p in premises):
            left.append(c)
    return left


@cache
def _whole(*conditions: Bool) -> bool:
    """Whether conditions are only about integers."""
    return all(s.is_integer for c in conditions for s in c.free_symbols)


def _facts(op: Mask, header: Header, values: Values) -> Iterator[str]:
    """A mask uses only facts about data that the header states."""
    said = [tuple(normal(header.here(e)) for e in fact) for fact in header.meaning.known]
    for fact in op.known:
        literal, needs, enough = (normal(values.expression(e, op)) for e in fact)
        known = [f for f in said if same(f[0], literal)]
        needed = {c for f in known for c in conjuncts(f[1])}
        sufficient = {c for f in known for c in sympy.Or.make_args(f[2])}
        if set(conjuncts(needs)) - needed or (enough != sympy.false and set(sympy.Or.make_args(enough)) - sufficient):
            yield f"%{op.name} takes more as known of `{to_text(fact.literal)}` than the header says"
