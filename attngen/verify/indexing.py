"""Rules of indices into tensors, `indexing` and `bounds-checked`, and of the symbols in expressions, `names`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy

from attngen.heuristics import STRIP
from attngen.ir import Kernel, Module, only, tile
from attngen.ir.dims import AXIS_DIM, AXIS_EXTENT, MEMBER, SPLIT_DIM, dimension, first_row
from attngen.ir.expr import Bool, conjuncts, floordiv, select, span, symbol, symbol_names
from attngen.ir.expr_text import to_text
from attngen.ir.grid import GridAxis
from attngen.ir.heads import SHARINGS
from attngen.ir.names import AXES, CALL_ROWS, PAIRS, ROW_AXES
from attngen.ir.prove import prove_le
from attngen.ir.split_axes import sharing as sharing_axes
from attngen.ir.split_kv import combined_work_items, work_item
from attngen.tiles.intervals import last_row


def indexing(module: Module, kernel: Kernel) -> Iterator[str]:
    """Each dimension is indexed by the axis that counts it, and heads as the module's head sharing says. No program
    reads or writes rows or elements of another one, and single elements are in bounds and put once."""
    letters, heads = _letters(module, kernel), _heads(module)
    by_entry = {x.partials for x in module.input_gradients if x.reduction == "entry"}
    for op in kernel.ops():
        if isinstance(op, (tile.Base, tile.CountTiles, tile.CacheLength, tile.Load, tile.Store)):
            yield from _tile_indices(module, kernel, op, letters, heads, by_entry)
        if isinstance(op, tile.Store) and not isinstance(op, tile.OrderedAdd):
            yield from _rows_of_others(kernel, op)
    yield from _entries(kernel, by_entry)
    for op in kernel.ops():
        if isinstance(op, tile.Scatter) and op.op == "put":
            yield from _put_twice(kernel, op)
        if isinstance(op, (tile.Gather, tile.Scatter)):
            yield from _elements_of_others(kernel, op)
            yield from _out_of_bounds(module, kernel, op, letters, heads)
    yield from _dropout_heads(kernel)


def _heads(module: Module) -> dict[str, list[Any]]:
    """The indices into dimensions of query heads and KV heads that a kernel may have."""
    sharing = SHARINGS[module.sharing]
    return {
        "Hq": list(dict.fromkeys((symbol("h"), sharing.member))),
        "Hkv": list(dict.fromkeys((sharing.read, sharing.owned))),
    }


def _letters(module: Module, kernel: Kernel) -> dict[str, Any]:
    """The index into each other dimension."""
    letters: dict[str, Any] = {size: symbol(axis) for axis, size in AXES.items() if size not in ("Hq", "Hkv")}
    letters |= {extent: symbol(axis) for axis, extent in AXIS_EXTENT.items() if axis not in SPLIT_DIM}
    letters |= {CALL_ROWS[extent]: symbol(axis) for axis, extent in AXIS_EXTENT.items() if extent in CALL_ROWS}
    letters |= {"items": combined_work_items() if kernel.traits.combines_splits else work_item(), "Nc": symbol("kv")}
    letters |= {module.cache.page: symbol("kv")} if module.cache else {}
    if sharing_axes(kernel.grid):
        letters[PAIRS] = floordiv(symbol(sharing_axes(kernel.grid)[-1].var), sympy.Integer(2))
    if module.blocks:
        size = sympy.Integer(module.blocks.size)
        q, kv = (symbol(first_row(axis, kernel.traits.places)) for axis in ("q", "kv"))
        letters |= {"Tq": floordiv(q, size), "Tk": floordiv(kv, size)}
        letters["Ts"] = floordiv(kv, sympy.Integer(STRIP))
    return letters


def _tile_indices(
    module: Module,
    kernel: Kernel,
    op: tile.Base | tile.CountTiles | tile.CacheLength | tile.Load | tile.Store,
    letters: dict[str, Any],
    heads: dict[str, list[Any]],
    by_entry: set[str],
) -> Iterator[str]:
    """The indices at which an op accesses a tensor are those of its dimensions.

    by_entry: tensors with parts of gradients by entry, whose entries have integers as indices.
    """
    tensor, indices = kernel.accessed(op)
    dims, axis = kernel.type_of(tensor.name).dims, kernel.program_axis
    split = {AXIS_EXTENT[a.var]: symbol(a.var) for a in kernel.grid if a.var in SPLIT_DIM}
    for dim, index in zip(dims[1:] if in_pages(op) else dims, indices):
        found = f"%{op.name} indexes {dim} of %{tensor.name} by `{to_text(index)}`"
        if tensor.name in by_entry and dim.isdigit():
            if not (index.is_Integer and 0 <= index < int(dim)):
                yield f"{found}; expected a number from 0 to {int(dim) - 1}"
            continue
        right = [letters[dim]] if dim in letters else heads.get(dim, [])
        right += [split[dim]] if dim in split else []
        if isinstance(op, tile.Load) and not op.type.dims and AXIS_EXTENT[axis] == dim:
            right = [
                symbol(f"{axis}_start"),
                last_row(axis),
            ]  # one element: of the first or last row of the program tile
        if index not in right:
            expected = " or ".join(map(to_text, right))
            yield f"{found}; expected `{expected}` (heads {module.sharing})"


def _rows_of_others(kernel: Kernel, op: tile.Store) -> Iterator[str]:
    """A store writes rows that no program at another place of the grid writes: its index names each axis of the grid,
    or something that differs along that axis."""
    tensor, indices = kernel.accessed(op)
    named = {name for e in indices for name in symbol_names(e)}
    named |= {"b"} if "first_item" in named or in_pages(op) else set()  # work items and pages differ between sequences
    named |= {kernel.program_axis} if op.by else set()  # a sum by distance is stored to rows of the program tile
    if MEMBER in named:  # programs that split a group have different heads of it
        named |= {axis.var for axis in sharing_axes(kernel.grid)}
    named |= {op.first_along} if op.first_along else set()
    for axis in kernel.grid:
        in_pair = not isinstance(op, tile.OrderedAccumulate) and floordiv(symbol(axis.var), sympy.Integer(2)) in indices
        if in_pair or not {axis.var, f"{axis.var}_start", f"_{axis.var}_row"} & named:
            yield f"%{op.name} writes rows of %{tensor.name} that the other programs along {axis.var} write, too"


def _dropout_heads(kernel: Kernel) -> Iterator[str]:
    """Dropout bits are generated for the head of the queries that the kernel loads."""
    queries = [
        op.src.index[1]
        for op in only(kernel.ops(), tile.Load, tile.Base)
        if op.src.tensor == "Q" and len(op.src.index) > 1
    ]
    for op in kernel.ops():
        if isinstance(op, tile.DropoutMask) and op.head not in queries:
            expected = " or ".join(map(to_text, queries))
            yield f"%{op.name} has the dropout of head `{to_text(op.head)}`; expected that of %Q, `{expected}`"


def _entries(kernel: Kernel, by_entry: set[str]) -> Iterator[str]:
    """A kernel that stores parts of a gradient by entry stores each entry once."""
    stored: dict[str, list[Any]] = {}
    for op in kernel.ops():
        if isinstance(op, tile.Store):
            tensor, indices = kernel.accessed(op)
            if tensor.name in by_entry:
                pairs = zip(kernel.type_of(tensor.name).dims, indices)
                stored.setdefault(tensor.name, []).extend(i for dim, i in pairs if dim.isdigit() and i.is_Integer)
    for name, entries in stored.items():
        count = next(int(dim) for dim in kernel.type_of(name).dims if dim.isdigit())
        if sorted(entries) != list(range(count)):
            found = ", ".join(map(to_text, entries))
            yield f"%{name} is stored at {found} of {count} entries; expected each of them once"


def in_pages(op: Any) -> bool:
    """True if an op accesses rows by their pages, and so has no index for the dimension of pages."""
    return isinstance(op, (tile.Append, tile.Load)) and op.pages is not None


def is_page_of(module: Module, index: Any) -> bool:
    """True if an index is that of a row's page among the pages of its sequence."""
    return bool(module.cache and isinstance(index, floordiv) and index.args[1] == dimension(module.cache.page))


def _is_page(kernel: Kernel, op: tile.Gather | tile.Scatter, index: Any) -> bool:
    """True if an index is a page number that was read under conditions of the access, so only where the sequence has
    the row."""
    table = next((kernel.op(ref) for name, ref in op.uses if symbol(name) == index), None)
    return (
        isinstance(table, tile.Gather)
        and table.src.tensor == "PAGE_TABLE"
        and set(conjuncts(table.where)) <= set(conjuncts(op.where))
    )


def _out_of_bounds(
    module: Module, kernel: Kernel, op: tile.Gather | tile.Scatter, letters: dict[str, Any], heads: dict[str, Any]
) -> Iterator[str]:
    """Each index of a single element is proven to be in bounds, or the condition of the access implies it."""
    conditions = conjuncts(op.where)

    def checked(condition: Bool) -> bool:
        return set(conjuncts(condition)) <= set(conditions)

    does, access = ("write", op.dst) if isinstance(op, tile.Scatter) else ("read", op.src)
    for dim, index in zip(kernel.type_of(access.tensor).dims, access.index):
        # A sequence has no more keys (Nk) than its capacity (Nc).
        extent = symbol("Nk") if dim == "Nc" and kernel.traits.reads_cache else dimension(dim)
        low, high = span(index)
        if kernel.traits.places and index in (
            symbol(f"{a}_idx") - symbol(f"{a}_start") + symbol(f"_{a}_row") for a in ("q", "kv")
        ):
            low = sympy.Integer(0)  # the row of an element of the tile, in the tensors of the call
        if dim == "max_pages" and is_page_of(module, index):
            row = index.args[0]
            end = symbol("Nk" if kernel.traits.reads_cache else "Nc")  # no entry of the table past the sequence is read
            if (row < end) in conditions and (row.is_nonnegative or (row >= 0) in conditions):
                continue  # the table of a sequence has entries for Nc keys, and the sequence has no more keys
        if dim == "pages" and _is_page(kernel, op, index):
            continue  # page tables contain numbers of existing pages
        of_row = SHARINGS[module.sharing].owned * symbol("group") + floordiv(symbol("q_idx"), symbol("queries"))
        if dim == "Hq" and kernel.pack_gqa and index == of_row and (symbol("q_idx") < symbol("Nq")) in conditions:
            continue  # the head of a row in a tile of packed rows
        if dim not in ("Nq", "Nk") and index in [letters.get(dim), *heads.get(dim, [])]:
            continue
        if (
            isinstance(index, select) and index.args[1] == index.args[2] + extent
        ):  # a negative index counts from the end
            low = low if not prove_le(-extent, span(index.args[2])[0]) else sympy.Integer(0)
            high = span(index.args[2])[1]
        if not (low >= 0 or index.is_nonnegative or checked(index >= 0)):
            place = f"%{access.tensor} before its start, at `{to_text(index)}`"
            yield f"%{op.name} may {does} {place}; expected a condition in `where` that excludes it"
        if not (prove_le(high, extent - 1) or prove_le(index, extent - 1) or checked(index < extent)):
            place = f"%{access.tensor} past its end, at `{to_text(index)}`"
            yield f"%{op.name} may {does} {place}; expected a condition in `where` that excludes it"


def _put_twice(kernel: Kernel, op: tile.Scatter) -> Iterator[str]:
    """No two threads put the same element: the last index is a position along the tile, forwards or backwards, plus or
    minus sizes."""
    (dim, *more) = kernel.type_of(op.value).dims or ("",)
    position = next((symbol(f"{axis}_idx") for axis, of in AXIS_DIM.items() if of == dim), symbol("none"))
    last = op.dst.index[-1]
    sizes = {a.name for a in kernel.args if a.role == "scalar"}
    if (
        more
        or sympy.diff(last, position) not in (1, -1)
        or not set(symbol_names(last - position)) <= sizes | {str(position)}
    ):
        expected = "the last index to be a position of its tile, or a size minus that"
        yield f"%{op.name} may put two elements at one index; expected {expected}"


def _elements_of_others(kernel: Kernel, op: tile.Gather | tile.Scatter) -> Iterator[str]:
    """Elements of scratch memory, and elements that a program puts, belong to one program: the index names each axis of
    the grid. It may leave out an axis along which only one program puts elements, the same one in all puts.
    """
    access = op.src if isinstance(op, tile.Gather) else op.dst
    tensor = kernel.op(access.tensor)
    puts = isinstance(op, tile.Scatter) and op.op == "put"
    owned = puts or (isinstance(tensor, tile.Arg) and tensor.role == "scratch")
    others = (
        [x for x in only(kernel.ops(), tile.Scatter) if x.op == "put" and x.dst.tensor == access.tensor] if puts else []
    )
    owners = {axis.var: {_only_program(axis, x.where) for x in others} for axis in kernel.grid}
    axes = [axis for axis, found in owners.items() if len(found) != 1 or None in found]
    if owned and sorted(map(str, access.index[:-1])) != sorted(axes):
        yield f"%{op.name} accesses elements of %{access.tensor} of other programs; expected [{', '.join(axes)}, ...]"


def _only_program(axis: GridAxis, where: Bool) -> str | None:
    """The only program along an axis for which a condition holds, `first` or `last`; None if it may hold for more."""
    at, last = symbol(axis.var), axis.extent - 1
    forms = {"first": (at < 1,), "last": (at > last - 1, at >= last)}
    return next((which for which, form in forms.items() if set(form) & set(conjuncts(where))), None)


def bounds_checked(module: Module, kernel: Kernel) -> Iterator[str]:
    """Accesses to rows are bounds-checked: in all tiles, or along the loop's axis in partial tiles."""
    looped = {loop.body: loop.var for loop in kernel.loops if loop.cls != "all"}
    for block in kernel.blocks:
        for op in block.ops:
            if not isinstance(op, (tile.Load, tile.Store)):
                continue
            access = op.dst if isinstance(op, tile.Store) else op.src
            for axis in set(ROW_AXES) & set(access.axes()):
                when = dict(op.check).get(axis)
                if when != "always" and not (when == "partial" and looped.get(block.name) == axis):
                    yield f"%{op.name} in @{block.name} does not check {axis}" + (" in full tiles too" if when else "")
