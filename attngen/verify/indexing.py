"""Places at which tensors are read and written, and the symbols of expressions."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from typing import Any

import sympy

from attngen.heuristics import STRIP
from attngen.ir.expr import Bool, cdiv, conjuncts, floordiv, mod, select, span, symbol, symbol_names, to_text
from attngen.ir.graph import REVERSED_GROUP, SPLIT_SYMBOLS, GridAxis, Kernel, Module
from attngen.ir.heads import SHARINGS
from attngen.ir.names import AXES, PAIRS, ROW_AXES
from attngen.ir.ops import (
    AXIS_DIM,
    AXIS_EXTENT,
    COLUMN_DIM,
    MEMBER,
    OWN,
    PADDED,
    WHOLE,
    Append,
    Arg,
    Base,
    CacheLength,
    CountTiles,
    DropoutMask,
    Gather,
    ListPosition,
    Load,
    Map,
    Mask,
    OrderedAccumulate,
    OrderedAdd,
    Reduce,
    Scatter,
    SoftmaxStep,
    Store,
    dimension,
)
from attngen.ir.prove import prove_le
from attngen.ir.split_axes import sharing as sharing_axes
from attngen.ir.split_kv import item, joined_items
from attngen.tiles.intervals import last_row
from attngen.verify.types import POSITIONS, dimensions

CONSTANTS = {"LOG2E", "LN2"}
# names in the printed kernel that are not values of the IR
RESERVED = (
    POSITIONS
    | CONSTANTS
    | {f"{axis}_{part}" for axis in ROW_AXES for part in ("ahead", "at", "off", "rows", "stop", "tile", "tiles")}
)
RESERVED |= {
    *PADDED.values(),
    *COLUMN_DIM,
    *OWN,
    *WHOLE,
    *(f"{axis}_start" for axis in OWN),
    "dtype",
    "float",
    "pid",
    "tl",
    "triton",
}
RESERVED |= {"abreast", "first_head", "heads_in_group", "own_head", "q_next", "turn"}
RESERVED |= {
    "at",
    "BLOCK",
    "DROPOUT",
    "TMA",
    "CONVERTS",
    "OVERLAPS",
    "LEARN",
    "floor_div",
    "floor_mod",
    "running_max",
    "store_distances",
    "dropout_keep",
    "dropout_words",
    "dropped",
    "philox_round",
    "list_position",
    "tile_at",
    "keep_mask",
}
TILES = {*(AXIS_DIM[axis] for axis in ROW_AXES), *WHOLE}


def indexing(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every dimension is indexed by what it counts, and heads as the sharing says. No program writes another one's
    rows or elements."""
    sharing = SHARINGS[module.sharing]
    heads = {
        "Hq": list(dict.fromkeys((symbol("h"), sharing.member))),
        "Hkv": list(dict.fromkeys((sharing.read, sharing.owned))),
    }
    letters: dict[str, Any] = {size: symbol(axis) for axis, size in AXES.items() if size not in heads}
    letters |= {extent: symbol(axis) for axis, extent in AXIS_EXTENT.items() if axis not in OWN}
    own = {AXIS_EXTENT[axis.var]: symbol(axis.var) for axis in kernel.grid if axis.var in OWN}
    letters |= {"items": joined_items() if kernel.combines_splits else item(), "Nc": symbol("kv")}
    letters |= {module.cache.page: symbol("kv")} if module.cache else {}
    for axis in sharing_axes(kernel.grid):
        letters[PAIRS] = floordiv(symbol(axis.var), sympy.Integer(2))
    if module.blocks:
        size = sympy.Integer(module.blocks.size)
        letters |= {"Tq": floordiv(symbol("q_start"), size), "Tk": floordiv(symbol("kv_start"), size)}
        letters["Ts"] = floordiv(symbol("kv_start"), sympy.Integer(STRIP))
    by_entry = {x.parts for x in module.learned if x.by == "entry"}
    for op in kernel.ops():
        if not isinstance(op, (Base, CountTiles, CacheLength, Load, Store)):
            continue
        tensor, indices = kernel.accessed(op)
        dims = kernel.type_of(tensor.name).dims
        for dim, index in zip(dims[1:] if in_pages(op) else dims, indices):
            if tensor.name in by_entry and dim.isdigit():
                if not (index.is_Integer and 0 <= index < int(dim)):
                    yield f"%{op.name} indexes {dim} of %{tensor.name} by `{to_text(index)}`; expected a number from 0 to {int(dim) - 1}"
                continue
            right = [letters[dim]] if dim in letters else heads.get(dim, [])
            right += [own[dim]] if dim in own else []
            if (
                isinstance(op, Load) and not op.type.dims and AXIS_EXTENT[kernel.program_axis] == dim
            ):  # the first or last row of the own tile
                right = [symbol(f"{kernel.program_axis}_start"), last_row(kernel.program_axis)]
            if index not in right:
                expected = " or ".join(map(to_text, right))
                yield f"%{op.name} indexes {dim} of %{tensor.name} by `{to_text(index)}`; expected `{expected}` (heads {module.sharing})"
        if isinstance(op, Store) and not isinstance(op, OrderedAdd):
            named = {name for e in indices for name in symbol_names(e)}
            named |= {"b"} if "first_item" in named else set()  # of the program's sequence
            named |= {"b"} if in_pages(op) else set()  # pages to which a sequence appends are its own
            if op.by:  # it writes rows of the own tile
                named.add(kernel.program_axis)
            if MEMBER in named:  # of a head that no other program of the group has
                named |= {axis.var for axis in sharing_axes(kernel.grid)}
            named |= {op.first_along} if op.first_along else set()
            for axis in kernel.grid:
                alone = (
                    not isinstance(op, OrderedAccumulate) and floordiv(symbol(axis.var), sympy.Integer(2)) in indices
                )
                if alone or not {axis.var, f"{axis.var}_start"} & named:
                    yield f"%{op.name} writes rows of %{tensor.name} that the other programs along {axis.var} write, too"
    yield from _entries(kernel, by_entry)
    for op in kernel.ops():
        if isinstance(op, Scatter) and op.op == "put":
            yield from _put_twice(kernel, op)
        if isinstance(op, (Gather, Scatter)):
            yield from _another_programs(kernel, op)
        if isinstance(op, (Gather, Scatter)):
            yield from _outside(module, kernel, op, letters, heads)
    queries = [
        op.src.index[1]
        for op in kernel.ops()
        if isinstance(op, (Load, Base)) and op.src.tensor == "Q" and len(op.src.index) > 1
    ]
    for op in kernel.ops():
        if isinstance(op, DropoutMask) and op.head not in queries:
            yield f"%{op.name} draws for head `{to_text(op.head)}`; expected that of %Q, `{' or '.join(map(to_text, queries))}`"


def _entries(kernel: Kernel, by_entry: set[str]) -> Iterator[str]:
    """A kernel that stores parts of a gradient by entry stores each entry once."""
    stored: dict[str, list[Any]] = {}
    for op in kernel.ops():
        if isinstance(op, Store):
            tensor, indices = kernel.accessed(op)
            if tensor.name in by_entry:
                places = zip(kernel.type_of(tensor.name).dims, indices)
                stored.setdefault(tensor.name, []).extend(i for dim, i in places if dim.isdigit() and i.is_Integer)
    for name, entries in stored.items():
        count = next(int(dim) for dim in kernel.type_of(name).dims if dim.isdigit())
        if sorted(entries) != list(range(count)):
            yield f"%{name} is stored at {', '.join(map(to_text, entries))} of {count} entries; expected each of them once"


def in_pages(op: Any) -> bool:
    """Whether an op accesses rows by their pages, for which it has no index."""
    return isinstance(op, (Append, Load)) and op.pages is not None


def is_page_of(module: Module, index: Any) -> bool:
    """Whether an index is that of the page of a row, among those of a sequence."""
    return bool(module.cache and isinstance(index, floordiv) and index.args[1] == dimension(module.cache.page))


def _is_page(kernel: Kernel, op: Gather | Scatter, index: Any) -> bool:
    """Whether an index is the number of a page, read where the sequence has the row: under the same condition as the
    element."""
    table = next((kernel.op(ref) for name, ref in op.uses if symbol(name) == index), None)
    return (
        isinstance(table, Gather)
        and table.src.tensor == "PAGE_TABLE"
        and set(conjuncts(table.where)) <= set(conjuncts(op.where))
    )


def _outside(
    module: Module, kernel: Kernel, op: Gather | Scatter, letters: dict[str, Any], heads: dict[str, Any]
) -> Iterator[str]:
    """Single elements that may lie outside of their tensor. Each index is proven inside, or the condition says so."""
    conditions = conjuncts(op.where)

    def said(condition: Bool) -> bool:
        return set(conjuncts(condition)) <= set(conditions)

    does, access = ("write", op.dst) if isinstance(op, Scatter) else ("read", op.src)
    for dim, index in zip(kernel.type_of(access.tensor).dims, access.index):
        extent = (
            symbol("Nk") if dim == "Nc" and kernel.reads_cache else dimension(dim)
        )  # a sequence has no more keys than room
        low, high = span(index)
        if dim == "max_pages" and is_page_of(module, index):
            row = index.args[0]
            end = symbol("Nk" if kernel.reads_cache else "Nc")  # no entry past the keys of a sequence is read
            if (row < end) in conditions and (row.is_nonnegative or (row >= 0) in conditions):
                continue  # there are pages for Nc keys of a sequence, and it has no more (see Length)
        if dim == "pages" and _is_page(kernel, op, index):
            continue  # a table names pages that there are
        of_row = SHARINGS[module.sharing].owned * symbol("group") + floordiv(symbol("q_idx"), symbol("queries"))
        if dim == "Hq" and kernel.pack_gqa and index == of_row and (symbol("q_idx") < symbol("Nq")) in conditions:
            continue  # the head of a row of a tile of packed ones
        if dim not in ("Nq", "Nk") and index in [letters.get(dim), *heads.get(dim, [])]:
            continue
        if isinstance(index, select) and index.args[1] == index.args[2] + extent:  # from the end where it is negative
            low = low if not prove_le(-extent, span(index.args[2])[0]) else sympy.Integer(0)
            high = span(index.args[2])[1]
        if not (low >= 0 or index.is_nonnegative or said(index >= 0)):
            yield f"%{op.name} may {does} %{access.tensor} before its start, at `{to_text(index)}`; expected `where` to say it does not"
        if not (prove_le(high, extent - 1) or prove_le(index, extent - 1) or said(index < extent)):
            yield f"%{op.name} may {does} %{access.tensor} past its end, at `{to_text(index)}`; expected `where` to say it does not"


def _put_twice(kernel: Kernel, op: Scatter) -> Iterator[str]:
    """Elements that more than one thread may put: the last index is a position along the tile, forwards or
    backwards, less a size."""
    (dim, *more) = kernel.type_of(op.value).dims or ("",)
    position = next((symbol(f"{axis}_idx") for axis, of in AXIS_DIM.items() if of == dim), symbol("none"))
    last = op.dst.index[-1]
    sizes = {a.name for a in kernel.args if a.role == "scalar"}
    if (
        more
        or sympy.diff(last, position) not in (1, -1)
        or not set(symbol_names(last - position)) <= sizes | {str(position)}
    ):
        yield f"%{op.name} may put two elements at one place; expected the last index to be a position of its tile, or a size less that"


def _another_programs(kernel: Kernel, op: Gather | Scatter) -> Iterator[str]:
    """Elements of another program, where a program has its own: of scratch memory, and of what is put.

    One program alone puts elements where the condition holds for one number of an axis only; the same one at all places
    of that tensor.
    """
    access = op.src if isinstance(op, Gather) else op.dst
    tensor = kernel.op(access.tensor)
    puts = isinstance(op, Scatter) and op.op == "put"
    owned = puts or (isinstance(tensor, Arg) and tensor.role == "scratch")
    others = (
        [x for x in kernel.ops() if isinstance(x, Scatter) and x.op == "put" and x.dst.tensor == access.tensor]
        if puts
        else []
    )
    ways = {axis.var: {_only(axis, x.where) for x in others} for axis in kernel.grid}
    places = [axis for axis, found in ways.items() if len(found) != 1 or None in found]
    if owned and sorted(map(str, access.index[:-1])) != sorted(places):
        yield f"%{op.name} takes elements of %{access.tensor} that other programs take; expected [{', '.join(places)}, ...]"


def _only(axis: GridAxis, where: Bool) -> str | None:
    """Which number of an axis a condition is true for, the `first` or the `last`; None if it may be true for more."""
    at, last = symbol(axis.var), axis.extent - 1
    ways = {"first": (at < 1,), "last": (at > last - 1, at >= last)}
    return next((way for way, said in ways.items() if set(said) & set(conjuncts(where))), None)


def names(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every symbol of an expression is an operand, a scalar of the kernel, a position or a constant. No value has a
    reserved name."""
    scalars = {
        op.name
        for op in kernel.ops()
        if isinstance(op, (Arg, CountTiles, Gather, CacheLength, Load, Map, ListPosition, Reduce))
        and not op.results()[""].dims
    }
    own = kernel.program_axis
    divisors = {i.name for i in module.inputs if i.least is not None and i.least > 0}
    scalars |= {*SPLIT_SYMBOLS} if kernel.kv_split else set()
    for a in kernel.grid:
        widths = {AXIS_EXTENT[a.var]} if a.var in OWN else set()
        yield from _unknown(f"the grid axis {a.var}", a.extent, scalars | {"B"} | TILES | widths)
    for op in kernel.ops():
        known = scalars | CONSTANTS | {a.var for a in kernel.grid} - set(AXIS_DIM) | TILES
        known |= {REVERSED_GROUP for a in kernel.grid if a.reversed_group}
        columns = {a.var for a in kernel.grid if a.var in OWN}
        axes = set() if kernel.walks else {own}
        known |= {f"{axis}_start" for axis in axes | columns}
        for loop in kernel.around(kernel.graph.nodes[op.name]["block"]):
            known |= {f"{name}_start" if name in AXIS_DIM else name for name in loop.variables}
            axes |= {loop.var} & set(AXIS_DIM)
        if isinstance(op, (Gather, Map, Mask, Scatter)):
            known |= {
                f"{a}_idx"
                for a in (AXIS_DIM if isinstance(op, Mask) else axes)
                if AXIS_DIM[a] in dimensions(kernel, op)
            }
            known |= _facts_rows(kernel, op) if isinstance(op, Mask) else set()
        elif isinstance(op, (Base, CountTiles, CacheLength, Load, Store)):
            known |= axes | columns | {*COLUMN_DIM, AXIS_EXTENT[own]}
        for symbol_name, ref in getattr(op, "uses", ()):
            if symbol_name != ref and (symbol_name in known | POSITIONS or not kernel.type_of(ref).dims):
                yield f"%{op.name} takes `{symbol_name}` for %{ref}; a scalar has one name in all expressions"
        for e in op.expressions:
            yield from _unknown(f"%{op.name}", e, known | {s for s, _ in getattr(op, "uses", ())})
            for specialization in e.atoms(floordiv, cdiv, mod):
                if not (specialization.args[1].is_positive or str(specialization.args[1]) in divisors):
                    yield f"%{op.name}: `{to_text(specialization)}` divides by what is not known to be positive"
    steps = sum(isinstance(op, SoftmaxStep) for op in kernel.ops())
    if steps > 1:
        yield f"{steps} softmax steps; expected one"
    taken = RESERVED | kernel.variables - set(AXIS_DIM) | (set(SoftmaxStep.FIELDS) if steps else set())
    for op in kernel.ops():
        plain = op.name.isascii() and op.name.isidentifier() and not op.name.startswith("__")
        if not plain or keyword.iskeyword(op.name) or op.name in taken or op.name.startswith("stride_"):
            yield f"%{op.name} is a name that the printed kernel needs for itself"


def _facts_rows(kernel: Kernel, op: Mask) -> set[str]:
    """The values with one number for each row of the own tile. Facts may name them."""
    names = {str(s) for fact in op.known for e in fact[1:] for s in e.free_symbols} & kernel.graph.nodes.keys()
    return {
        n
        for n in names
        if isinstance(kernel.op(n), (Gather, Load)) and kernel.type_of(n).dims == (AXIS_DIM[kernel.program_axis],)
    }


def _unknown(where: str, e: Any, known: set[str]) -> Iterator[str]:
    for name in symbol_names(e):
        if name not in known:
            yield f"{where}: `{to_text(e)}` has `{name}`, which is no operand, scalar or position"


def bounds_checked(module: Module, kernel: Kernel) -> Iterator[str]:
    """Accesses to rows are bounds-checked: always, or along the loop's axis in partial tiles."""
    looped = {loop.body: loop.var for loop in kernel.loops if loop.cls != "all"}
    for block in kernel.blocks:
        for op in block.ops:
            if not isinstance(op, (Load, Store)):
                continue
            access = op.dst if isinstance(op, Store) else op.src
            for axis in set(ROW_AXES) & set(access.axes()):
                when = dict(op.check).get(axis)
                if when != "always" and not (when == "partial" and looped.get(block.name) == axis):
                    yield f"%{op.name} in @{block.name} does not check {axis}" + (" in full tiles too" if when else "")
