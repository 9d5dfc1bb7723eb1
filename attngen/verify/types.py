"""The rule `types`: dimensions agree by name; element types are those of the loaded, stored and computed values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import sympy
from sympy.logic.boolalg import Boolean

from attngen.ir import AXIS_DIM, GROUPED, Access, Kernel, Module, Type, dimension, tile
from attngen.ir.behaviour import Table
from attngen.ir.expr import REAL, TO_INTEGER, Expr, cdiv, conjuncts, floordiv, mod, select, symbol, symbol_names
from attngen.ir.expr_text import to_text
from attngen.ir.names import INTEGERS, ROW_AXES, START_RANKS

SCORES = ("BLOCK_Q", "BLOCK_KV")
TYPES = Table()  # what the types of an op must be: a sentence for each fault
POSITIONS = frozenset(name for name, n in INTEGERS.items() if n.is_("everywhere"))  # positions and sizes of tiles


def types(module: Module, kernel: Kernel) -> Iterator[str]:
    """Dimensions agree by name, in contractions, broadcasts and accesses. Element types are those of the loaded, stored
    and computed values."""
    for op in kernel.ops():
        for e in op.expressions:
            if _computes_with_a_condition(e):
                yield f"%{op.name}: `{to_text(e)}` computes with a condition"
        errors = TYPES.functions.get(type(op))
        yield from (f"%{op.name}: {reason}" for reason in errors(kernel, op)) if errors else ()


@TYPES.of(tile.Dot)
def _dot_errors(kernel: Kernel, op: tile.Dot) -> Iterator[str]:
    of = kernel.type_of
    a, b = of(op.a), of(op.b)
    if len(a.dims) != 2 or len(b.dims) != 2 or op.over not in a.dims or op.over not in b.dims:
        yield f"cannot contract [{', '.join(a.dims)}] with [{', '.join(b.dims)}] over {op.over}"
        return
    dims = tuple(d for t in (a, b) for d in t.dims if d != op.over)
    if dims != op.type.dims or op.type.dtype != "f32":
        yield f"the product is f32[{', '.join(dims)}]"
    if op.acc and of(op.acc).dtype != "f32":
        yield f"the accumulator is {of(op.acc).dtype}; expected f32"
    if op.acc and of(op.acc).dims != dims:
        yield f"the accumulator is [{', '.join(of(op.acc).dims)}], the product [{', '.join(dims)}]"


@TYPES.of(tile.Mask)
def _mask_errors(kernel: Kernel, op: tile.Mask) -> Iterator[str]:
    of = kernel.type_of
    yield from (f"`{to_text(e)}` is no condition" for e in op.expressions if not isinstance(e, Boolean))
    yield from _uses_errors(kernel, op)
    if of(op.value) != op.type:
        yield "a masked value keeps its type"
    if op.when not in ("always", "partial"):
        yield f"applies `{op.when}`; expected always or partial"


@TYPES.of(tile.Loop)
def _loop_errors(kernel: Kernel, op: tile.Loop) -> Iterator[str]:
    of = kernel.type_of
    for e in (e for r in op.ranges for e in r):
        if _is_condition(e) or not is_integral(kernel, e, {}):
            yield f"runs to or from `{to_text(e)}`, which is no integer"
    if op.listed and of(op.listed).dtype != "ptr":
        yield f"visits tiles of the list %{op.listed}, which is no pointer"


@TYPES.of(tile.ListPosition)
def _list_position_errors(kernel: Kernel, op: tile.ListPosition) -> Iterator[str]:
    of = kernel.type_of
    ranks = {name for name, _ in START_RANKS.values()}
    if (of(op.src).dtype != "ptr" and op.src not in ranks) or op.type.dtype != "i32" or op.type.dims:
        yield "needs a pointer to ranks, and is one i32"
    if _is_condition(op.tile) or not is_integral(kernel, op.tile, {}):
        yield f"`{to_text(op.tile)}` is no integer"


@TYPES.of(tile.CountTiles)
def _count_tiles_errors(kernel: Kernel, op: tile.CountTiles) -> Iterator[str]:
    source, axis = kernel.op(op.src.tensor), op.src.index[-1]
    of_rows = (
        isinstance(source, tile.Arg)
        and source.role == "in"
        and source.type.dtype == "i32"
        and len(op.src.index) == len(source.type.dims)
    )
    if not of_rows or axis != symbol(kernel.program_axis) or (op.type.dtype, op.type.dims) != ("i32", ()):
        yield f"is one i32, counted in a row of an input of i32 along {kernel.program_axis}"
    if _is_condition(op.most) or not is_integral(kernel, op.most, {}):
        yield f"counts up to `{to_text(op.most)}`, which is no integer"


@TYPES.of(tile.Seed)
def _seed_errors(kernel: Kernel, op: tile.Seed) -> Iterator[str]:
    of = kernel.type_of
    if of(op.src) not in (Type("i64", (), s) for s in ("hbm", "?")) or (op.type.dtype, op.type.dims) != ("i64", ()):
        yield "is one i64, read from a tensor of one i64"


@TYPES.of(tile.DropoutMask)
def _dropout_mask_errors(kernel: Kernel, op: tile.DropoutMask) -> Iterator[str]:
    of = kernel.type_of
    one = [(of(r).dtype, of(r).dims) for r in (op.seed, op.threshold)]
    if one != [("i64", ()), ("i32", ())] or op.type.dtype != "b1" or sorted(op.type.dims) != ["BLOCK_KV", "BLOCK_Q"]:
        yield "needs a seed (i64) and a threshold (i32), and is b1 of BLOCK_Q and BLOCK_KV"


@TYPES.of(tile.Dropout)
def _dropout_errors(kernel: Kernel, op: tile.Dropout) -> Iterator[str]:
    of = kernel.type_of
    if (
        of(op.value) != op.type
        or op.type.dtype != "f32"
        or (of(op.keep).dtype, of(op.keep).dims) != ("b1", op.type.dims)
    ):
        yield "keeps the type of an f32 value, by a b1 of its dimensions"


@TYPES.of(tile.Init)
def _init_errors(kernel: Kernel, op: tile.Init) -> Iterator[str]:
    whole = op.value.is_Integer and -(2**31) <= op.value < 2**31
    if not op.value.is_number or not (op.type.dtype == "f32" or (op.type.dtype == "i32" and whole)):
        value = to_text(op.value)
        yield f"starts at `{value}` as {op.type.dtype}; expected a number as f32, or an integer of 32 bits as i32"


@TYPES.of(tile.SoftmaxStep)
def _softmax_errors(kernel: Kernel, op: tile.SoftmaxStep) -> Iterator[str]:
    of = kernel.type_of
    row = op.type.dims[:1]
    if {of(r).dtype for r in (op.s, op.m)} != {"f32"} or (op.scale and of(op.scale).dims):
        yield "needs s and m in f32, and one number as scale"
    if of(op.s).dims != op.type.dims or of(op.m).dims != row:
        yield f"needs s of [{', '.join(op.type.dims)}], and m of its rows"
    if op.shift and (op.scale or (of(op.shift).dtype, of(op.shift).dims) != ("f32", row)):
        yield "shifts scores by an f32 of each row, and has no scale then"
    if op.guard not in ("always", "partial"):
        yield f"guards `{op.guard}`; expected always or partial"


@TYPES.of(tile.Reduce)
def _reduce_errors(kernel: Kernel, op: tile.Reduce) -> Iterator[str]:
    of = kernel.type_of
    value = of(op.value).dims
    left = tuple(d for d in value if d != op.over)
    if op.over not in value or op.type.dims not in (left, (*left, GROUPED.get(op.over, ""))):
        yield f"cannot reduce [{', '.join(value)}] over {op.over} to [{', '.join(op.type.dims)}]"
    if op.op not in ("sum", "min", "max"):
        yield f"`{op.op}` is not a reduction; expected sum, min or max"


@TYPES.of(tile.Scan)
def _scan_errors(kernel: Kernel, op: tile.Scan) -> Iterator[str]:
    if kernel.type_of(op.value) != op.type or op.over not in op.type.dims:
        yield f"a scan keeps the type of its value, which has the dimension {op.over}"
    if op.op != "max" or op.type.dtype not in ("f32", "i32"):
        yield f"`{op.op}` of {op.type.dtype} is not a scan; expected max of f32 or i32"


@TYPES.of(tile.Deinterleave)
def _deinterleave_errors(kernel: Kernel, op: tile.Deinterleave) -> Iterator[str]:
    of = kernel.type_of(op.value)
    paired = of.quantised
    columns = of.unpadded[1:] if paired else _halved(of)
    if (
        len(of.dims) != 2
        or op.type.unpadded != (of.dims[0], *columns)
        or op.type.dtype != ("fp16" if paired else of.dtype)
    ):
        found = f"{of.dtype}[{', '.join(of.dims)}]"
        yield f"splits the columns of {found}; expected halves of D_QK or D_V, of its type, or fp16 of pairs"


@TYPES.of(tile.Interleave)
def _interleave_errors(kernel: Kernel, op: tile.Interleave) -> Iterator[str]:
    a, b = kernel.type_of(op.a), kernel.type_of(op.b)
    paired = op.type.quantised
    columns = op.type.unpadded[1:] if paired else _halved(op.type)
    if (
        (a.dtype, a.dims) != (b.dtype, b.dims)
        or a.unpadded != (*op.type.dims[:1], *columns)
        or (a.dtype != op.type.dtype and not paired)
    ):
        found = " and ".join(f"{t.dtype}[{', '.join(t.dims)}]" for t in (a, b))
        yield f"is of {found}; expected two tiles of one type, of half its columns"


def _halved(t: Type) -> tuple[str, ...]:
    """The dimension of each half of a tile's columns."""
    return tuple(d.replace("D_", "PAIRS_") for d in t.unpadded[1:])


@TYPES.of(tile.Gather)
def _gather_errors(kernel: Kernel, op: tile.Gather) -> Iterator[str]:
    source = kernel.op(op.src.tensor)
    if not isinstance(source, tile.Arg) or source.role not in ("in", "scratch") or source.type.dtype != op.type.dtype:
        yield f"gathers {op.type.dtype} from %{op.src.tensor}, which is no input of this type"
    elif len(op.src.index) != len(source.type.dims):
        yield f"%{op.src.tensor} has {len(source.type.dims)} dimensions, the access {len(op.src.index)}"
    if not all(is_integral(kernel, e, dict(op.uses)) for e in op.src.index):
        yield "has an index that is no integer"
    yield from _uses_errors(kernel, op)


_SCATTERS = {  # operation -> roles and type of the target
    "add": (("out",), "f32"),
    "min": (("out", "scratch"), "i32"),
    "max": (("out",), "i32"),
    "put": (("out", "scratch"), "i32"),
}


@TYPES.of(tile.Scatter)
def _scatter_errors(kernel: Kernel, op: tile.Scatter) -> Iterator[str]:
    of = kernel.type_of
    target = kernel.op(op.dst.tensor)
    if op.op not in _SCATTERS:
        yield f"`{op.op}` is no operation of a scatter; expected {', '.join(_SCATTERS)}"
        return
    roles, dtype = _SCATTERS[op.op]
    if (
        not isinstance(target, tile.Arg)
        or target.role not in roles
        or {target.type.dtype, of(op.value).dtype} != {dtype}
    ):
        target_of = {"out": "an output", "scratch": "scratch memory"}
        expected = f"{dtype}, and {' or '.join(target_of[role] for role in roles)} of that"
        yield f"writes {of(op.value).dtype} to %{op.dst.tensor} by `{op.op}`; expected {expected}"
    elif len(op.dst.index) != len(target.type.dims):
        yield f"%{op.dst.tensor} has {len(target.type.dims)} dimensions, the access {len(op.dst.index)}"
    if not all(is_integral(kernel, e, dict(op.uses)) for e in op.dst.index):
        yield "has an index that is no integer"
    yield from _uses_errors(kernel, op)


@TYPES.of(tile.CacheLength)
def _cache_length_errors(kernel: Kernel, op: tile.CacheLength) -> Iterator[str]:
    source = kernel.op(op.src.tensor)
    if op.name != "Nk" or (op.type.dtype, op.type.dims) != ("i32", ()):
        yield "is a number of keys; expected `%Nk`, of i32[]"
    if not isinstance(source, tile.Arg) or (source.name, source.type.dtype, source.type.dims) != (
        "CACHE_SEQLENS",
        "i32",
        ("B",),
    ):
        yield f"is of %{op.src.tensor}; expected %CACHE_SEQLENS, of i32[B]"
    if lacking := [name for name in ("Nc", "Nn") if name not in kernel.graph]:
        yield f"needs the number `{lacking[0]}`, which the kernel does not have"


def _pages_errors(kernel: Kernel, op: tile.Append | tile.Load) -> Iterator[str]:
    """An access to rows in pages has the page of each row, and a tensor of pages. An append also has each row's index
    in the sequence."""
    tensor, _ = kernel.accessed(op)
    rows = AXIS_DIM["kv"]
    given = [ref for ref in (op.pages, getattr(op, "rows", None)) if ref]
    if any((kernel.type_of(ref).dtype, kernel.type_of(ref).dims) != ("i32", (rows,)) for ref in given):
        yield f"has pages or rows that are not i32[{rows}]"
    dims = kernel.type_of(tensor.name).dims
    if op.pages and dims[:2] != ("pages", "Hkv"):
        yield f"accesses %{tensor.name} by pages; expected [pages, Hkv, ...]"
    elif op.pages:
        yield from _table_errors(kernel, op, dims[2])


def _table_errors(kernel: Kernel, op: tile.Append | tile.Load, rows: str) -> Iterator[str]:
    """The page of a row is read from the page table, where the sequence has the row."""
    table = kernel.op(str(op.pages))
    row = symbol(op.rows) if isinstance(op, tile.Append) else symbol("kv_idx")
    inside = [symbol("kv_idx") < symbol("Nk"), *([row >= 0, row < symbol("Nc")] if isinstance(op, tile.Append) else [])]
    at = Access("PAGE_TABLE", (symbol("b"), floordiv(row, dimension(rows))))
    if not isinstance(table, tile.Gather) or table.src != at or set(conjuncts(table.where)) != set(inside):
        where = " and ".join(map(to_text, inside))
        index = to_text(at.index[1])
        yield f"has %{op.pages} as pages of its rows; expected those of %PAGE_TABLE[b, {index}] where({where})"


@TYPES.of(tile.Append)
def _append_errors(kernel: Kernel, op: tile.Append) -> Iterator[str]:
    """New rows are stored after those of the cache: at CACHE_SEQLENS[b] + kv_idx."""
    yield from _access_errors(kernel, op)
    rows = kernel.op(op.rows) if op.rows else None
    fits = False
    if isinstance(rows, tile.Map):
        length = next((kernel.op(ref) for _, ref in rows.uses), None)
        fits = isinstance(length, tile.Load) and length.src == Access("CACHE_SEQLENS", (symbol("b"),))
        fits = fits and length is not None and rows.expr == symbol(length.name) + symbol("kv_idx")
    if not fits or "Nc" not in kernel.graph:
        yield "appends rows elsewhere than after CACHE_SEQLENS[b] rows, or without the capacity `Nc` of a sequence"


@TYPES.of(tile.Base, tile.Load, tile.Store)
def _access_errors(kernel: Kernel, op: tile.Base | tile.Load | tile.Store) -> Iterator[str]:
    of = kernel.type_of
    access = op.dst if isinstance(op, tile.Store) else op.src
    declared, index = kernel.accessed(op)
    tensor = of(declared.name)
    if isinstance(op, tile.Store) and op.by:
        if (
            op.by != "distance"
            or tensor.dims != ("B", "Hq", "Td", "Nd")
            or len(index) != 2
            or set(of(op.value).dims) != set(SCORES)
        ):
            yield "has another form than a store of a tile of scores, summed by distance, to a row of [B, Hq, Td, Nd]"
        return
    paged = isinstance(op, (tile.Append, tile.Load)) and op.pages is not None
    if isinstance(op, (tile.Append, tile.Load)):
        yield from _pages_errors(kernel, op)
    if not isinstance(op, tile.Base) and len(index) + paged != len(tensor.dims):
        yield f"%{access.tensor} has {len(tensor.dims)} dimensions, the access {len(index) + paged}"
    moved = of(op.value) if isinstance(op, tile.Store) else op.type
    if not isinstance(op, tile.Base) and moved.dtype != tensor.dtype:
        yield f"%{access.tensor} holds {tensor.dtype}, the value is {moved.dtype}"
    shape = of(op.value) if isinstance(op, tile.Store) else op.type
    dims = tuple(AXIS_DIM[a] for a in access.axes())
    of_scores = set(access.axes()) == {"q", "kv"}  # a tile of scores may be loaded transposed
    if not isinstance(op, tile.Base) and shape.unpadded not in (dims, dims[::-1] if of_scores else dims):
        yield f"the access is of [{', '.join(dims)}], the value of [{', '.join(shape.dims)}]"
    checks = () if isinstance(op, tile.Base) else op.check
    if len({axis for axis, _ in checks}) < len(checks):
        yield "checks an axis twice"
    for axis, when in checks:
        if axis not in access.axes() or when not in ("always", "partial"):
            yield f"cannot check `{axis} if {when}`; expected one of {', '.join(access.axes())}, always or partial"


@TYPES.of(tile.Map)
def _map_errors(kernel: Kernel, op: tile.Map) -> Iterator[str]:
    value = op.type.dtype
    for ref in (r for _, r in op.uses if kernel.type_of(r).dtype == "ptr"):
        yield f"%{ref} is a pointer"
    of_columns = {GROUPED[d]: d for d in op.type.dims if d in GROUPED}
    dims = {of_columns.get(d, d) for _, ref in op.uses for d in kernel.type_of(ref).dims}
    dims |= {AXIS_DIM[a] for a in ROW_AXES if f"{a}_idx" in op.symbols}
    if dims != set(op.type.dims):
        yield f"the expression is of [{', '.join(sorted(dims))}], the value of [{', '.join(op.type.dims)}]"
    if _is_condition(op.expr) != (value == "b1"):
        yield f"`{to_text(op.expr)}` is {'a number' if value == 'b1' else 'a condition'}, the value {value}"
    if value == "T" and not op.type.dims:
        yield "a value of no dimensions is of T; expected f32 or i32"
    for quotient in op.expr.atoms(floordiv, cdiv, mod):
        if not is_integral(kernel, quotient, dict(op.uses)):
            yield f"`{to_text(quotient)}` needs integer operands"
    whole = is_integral(kernel, op.expr, dict(op.uses))
    if op.expr.free_symbols and whole != (value == "i32") and (value == "i32" or not dims):
        yield f"`{to_text(op.expr)}` is {'an integer' if whole else 'no integer'}, the value {value}"
    yield from _uses_errors(kernel, op)


@TYPES.of(tile.OrderedAdd, tile.OrderedAccumulate)
def _ordered_add_errors(kernel: Kernel, op: tile.OrderedAdd | tile.OrderedAccumulate) -> Iterator[str]:
    yield from _access_errors(kernel, op)
    if op.semaphore is None or op.order is None:
        yield "adds in no fixed order; expected a semaphore, and an order"
        return
    yield from semaphore_errors(kernel, op.semaphore, op.order)


def semaphore_errors(kernel: Kernel, semaphore: Access, order: Expr) -> Iterator[str]:
    """Errors in the element that is a semaphore, or in the value for which a program waits."""
    declared, index = kernel.accessed(semaphore)
    of = kernel.type_of(declared.name)
    if not isinstance(declared, tile.Arg) or declared.role != "sum" or of.dtype != "i32" or len(index) != len(of.dims):
        yield f"has a semaphore in %{semaphore.tensor}; expected one element of a tensor of i32 of role sum"
    if not all(is_integral(kernel, e, {}) for e in (*semaphore.index, order)):
        yield "has an order, or an index of its semaphore, that is no integer"


def _uses_errors(kernel: Kernel, op: tile.Gather | tile.Map | tile.Mask | tile.Scatter) -> Iterator[str]:
    whole = dimensions(kernel, op)
    for _, ref in op.uses:
        dims = kernel.type_of(ref).dims
        if (
            isinstance(op, tile.Map) and GROUPED.get(whole[-1] if whole else "") in dims
        ):  # one value for each group of columns
            dims = (*dims[:-1], whole[-1])
        if not set(dims) <= set(whole) or (len(dims) > 1 and dims != tuple(d for d in whole if d in dims)):
            yield f"%{ref} of [{', '.join(dims)}] does not broadcast to [{', '.join(whole)}]"


def dimensions(kernel: Kernel, op: tile.Gather | tile.Map | tile.Mask | tile.Scatter) -> tuple[str, ...]:
    """The dimensions of an op's result, or for a scatter those of the value that it writes."""
    return kernel.type_of(op.value).dims if isinstance(op, tile.Scatter) else op.type.dims


def _is_condition(e: Any) -> bool:
    return isinstance(e, Boolean) and not e.is_Symbol


@cache
def _computes_with_a_condition(e: Any) -> bool:
    return any(_is_condition(arg) for sub in sympy.preorder_traversal(e) for arg in _numbers_in(sub))


def _numbers_in(e: Any) -> tuple[Any, ...]:
    """The arguments of an expression that must be numbers, not conditions."""
    if isinstance(e, (sympy.And, sympy.Or, sympy.Not)):
        return ()
    return e.args[1:] if isinstance(e, select) else e.args


def is_integral(kernel: Kernel, e: Any, uses: dict[str, str]) -> bool:
    """True if an expression is computed only from integers: positions, sizes, and integer values of the kernel."""
    names, conditions, whole = _integers_of(e)
    refs, others = (
        {uses.get(name, name) for name in of} - POSITIONS - kernel.traits.variables for of in (names, conditions)
    )
    known = all(ref.split(".")[0] in kernel.graph for ref in refs | others)
    return whole and known and all(kernel.type_of(ref).dtype == "i32" for ref in refs)


@cache
def _integers_of(e: Any) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return three things: the names that must be integers for an expression to be one; the names in conditions by
    which it selects among integers, of any type; and whether everything else in it is an integer."""
    if isinstance(e, TO_INTEGER):  # integers for any arguments
        return (), (), True
    if not e.args:
        return symbol_names(e), (), not e.is_Number or e.is_Integer
    parts = [_integers_of(a) for a in (e.args[1:] if isinstance(e, select) else e.args)]
    names = tuple(dict.fromkeys(name for part, _, _ in parts for name in part))
    conditions = [name for _, part, _ in parts for name in part] + [
        *(symbol_names(e.args[0]) if isinstance(e, select) else ())
    ]
    real = isinstance(e, REAL) or e.is_Pow and e.exp.is_negative
    return names, tuple(dict.fromkeys(conditions)), not real and all(whole for _, _, whole in parts)


# The errors in the types of each kind of op.


TYPES.complete(tile.TILE.own.values(), (tile.Arg, tile.Barrier, tile.GridDependencyWait, tile.Yield))
