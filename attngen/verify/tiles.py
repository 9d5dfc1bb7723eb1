"""Loops over tiles: they visit what the mask shows, and take as full what it proves full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy

from attngen.heuristics import STRIP
from attngen.ir.expr import conjuncts, select, symbol, symbol_names, to_text
from attngen.ir.graph import Kernel, Module
from attngen.ir.names import BLOCK_LISTS, FULL_RANKS
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Access, Base, Dot, Gather, ListPosition, Load, Map, Mask, Op, Reduce
from attngen.ir.prove import prove_le
from attngen.ir.split_axes import ranges
from attngen.tiles.boundary import PLACES, cut_by, data_of, is_whole_without
from attngen.tiles.intervals import GREATEST, greatest, implies, last_row, least, with_rows
from attngen.tiles.ranges import is_of_packed, needed_rows, rows_of, tile_ranges


def classified(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every loop over tiles has a class."""
    for loop in kernel.loops:
        if loop.cls == "unknown":
            yield f"%{loop.name} has class unknown; classify-tiles and split-loops come first"


def extremes(module: Module, kernel: Kernel) -> Iterator[str]:
    """What bounds take as the least or greatest number of the own tile's rows is so: a minimum or maximum over rows
    that exist, or, of numbers that never fall along the rows, that of the first or the last. In tiles of packed
    rows, that of the first or the last query is no greater or no less than all of these."""
    own = kernel.program_axis
    rising = {name.upper() for d in module.derived for name in d.rising}
    for name in sorted(rows_of(kernel)):
        for made, end, kind, other in (
            (str(least(name)), symbol(f"{own}_start"), "min", GREATEST),
            (str(greatest(name)), last_row(own), "max", -GREATEST),
        ):
            if made not in kernel.graph:
                continue
            known = name in kernel.graph and (
                _at_end(kernel, made, name, end, rising) or _reduced(kernel, made, name, kind, other)
            )
            if not known:
                yield f"%{made} is not proven to be the {kind} of %{name} over the rows of the program's own tile"


def _at_end(kernel: Kernel, made: str, name: str, end: Any, rising: set[str]) -> bool:
    """Whether a value is that of the first or last row of a tensor whose numbers never fall, of which another has
    all rows."""
    one, rows = kernel.op(made), kernel.op(name)
    if isinstance(one, Gather) and isinstance(rows, Gather):
        queries = sympy.Integer(0) if end == symbol("q_start") else symbol("queries") - 1
        whole = (
            kernel.pack_gqa
            and is_of_packed(rows)
            and not one.type.dims
            and one.where == sympy.true
            and rows.src.tensor in rising
        )
        return whole and one.src == Access(rows.src.tensor, (*rows.src.index[:-1], queries))
    if not isinstance(one, Load) or not isinstance(rows, Load):
        return False
    (tensor, at), (whole, index) = kernel.accessed(one), kernel.accessed(rows)
    return (
        tensor is whole
        and tensor.name in rising
        and at == tuple(end if str(e) == kernel.program_axis else e for e in index)
    )


def _reduced(kernel: Kernel, made: str, name: str, kind: str, other: int) -> bool:
    """Whether a value is the minimum or maximum of another's rows that exist."""
    own, reduce = kernel.program_axis, kernel.op(made)
    rows: Op | None = (
        kernel.op(reduce.value)
        if isinstance(reduce, Reduce) and (reduce.op, reduce.over) == (kind, AXIS_DIM[own])
        else None
    )
    inside = symbol(f"{own}_idx") < symbol(AXIS_EXTENT[own])
    return (
        isinstance(rows, Map)
        and rows.expr == select(inside, symbol(name), sympy.Integer(other))
        and dict(rows.uses) == {name: name}
    )


def covers(module: Module, kernel: Kernel) -> Iterator[str]:
    """Loops over tiles visit, between them and once each, every tile that holds something visible, and none before the
    first.

    Programs that share a loop visit its tiles between them. Parts of a range that rises rise, and lie in it.
    """
    for loop in kernel.loops:
        found = [*zip(ranges(kernel, loop), loop.ranges)]
        for ((_, before), (_, end)), ((after, _), (start, _)) in zip(found, found[1:]):
            if not _le(kernel, before, after):
                yield f"%{loop.name} runs up to {to_text(end)} and then from {to_text(start)}, which is not proven to be further on"
        for (lo, hi), (start, end) in found:
            if not _le(kernel, sympy.Integer(0), lo) or not _le(kernel, lo, hi):
                yield f"%{loop.name} runs {to_text(start)} .. {to_text(end)}, which is not proven to rise from 0 or more"
    for body in dict.fromkeys(loop.body for loop in kernel.loops if loop.cls != "all"):
        runs = _runs(tuple(_known(kernel, e) for e in tile_ranges(kernel, body)))
        mine = [loop for loop in kernel.loops if loop.body == body]
        apart = (
            module.blocks is not None and module.blocks.data and all(loop.listed for loop in mine)
        )  # no block is in two lists
        for loops in [[loop] for loop in mine] if apart else [mine]:
            pieces = [tuple(_known(kernel, e) for e in pair) for loop in loops for pair in ranges(kernel, loop)]
            if not _covered(runs, pieces):
                have, need = (
                    ", ".join(f"{to_text(p[0])} .. {to_text(p[-1])}" for p in some) for some in (pieces, runs)
                )
                yield f"the loops over @{body} run {have}, which is not proven to be all of {need}, once each"
        if apart and sorted(loop.cls for loop in mine) != ["full", "partial"]:
            yield f"the loops over @{body} are {', '.join(loop.cls for loop in mine)}; expected full and partial, for both lists of blocks"


def _runs(tiles: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The bounds of each run of tiles."""
    return [tiles[i : i + 4] for i in range(0, len(tiles), 4)]


def _covered(runs: list[tuple[Any, ...]], pieces: list[tuple[Any, Any]]) -> bool:
    """Whether the pieces are chains, in rising order, that cover the runs: all in one chain, or each run in its own."""
    pieces = [p for p in pieces if p[0] != p[1]]  # for programs whose tile has a row, the others are empty
    if any(
        len(c) == len(pieces) and prove_le(c[0][0], runs[0][0]) and prove_le(runs[-1][3], c[-1][1])
        for c in _chains(pieces)
    ):
        return True
    left: list[tuple[Any, Any]] = list(pieces)
    last: list[tuple[Any, Any]] = []
    for run in (r for r in runs if r[0] != r[3]):
        candidates = [last] * bool(last) + sorted(
            _chains(left), key=len, reverse=True
        )  # a shorter one would leave empty pieces
        chain = next((c for c in candidates if prove_le(c[0][0], run[0]) and prove_le(run[3], c[-1][1])), None)
        if chain is None or (last and chain is not last and not prove_le(last[-1][1], chain[0][0])):
            return False
        left, last = [p for p in left if p not in chain], chain
    return not left


def _le(kernel: Kernel, a: Any, b: Any) -> bool:
    """Whether a <= b is proven for a program whose tile has a row."""
    return prove_le(_known(kernel, a), _known(kernel, b))


def _known(kernel: Kernel, e: Any) -> Any:
    """An expression with what a program knows of the tile that it owns."""
    return with_rows(e, kernel.program_axis, rows_of(kernel))


def _chains(pieces: list[tuple[Any, Any]]) -> list[list[tuple[Any, Any]]]:
    """Orders in which each range starts where the one before it ends."""
    chains = []
    for first in range(len(pieces)):
        chain, rest = [pieces[first]], [p for i, p in enumerate(pieces) if i != first]
        while following := next((p for p in rest if p[0] == chain[-1][1]), None):
            chain.append(following)
            rest.remove(following)
        chains.append(chain)
    return chains


def ends_hidden(module: Module, kernel: Kernel) -> Iterator[str]:
    """A program that sums over keys masks keys past the end. They are loaded as zeros, which would count as scores."""
    inside = symbol("kv_idx") < symbol("Nk")
    sums = {loop.body for loop in kernel.loops if loop.var == "kv" and loop.cls != "all"}
    sums |= {b.name for b in kernel.blocks if any(isinstance(op, Dot) and op.over == "BLOCK_KV" for op in b.ops)}
    for body in (b.name for b in kernel.blocks if b.name in sums):
        parts = [p for op in kernel.block(body).ops if isinstance(op, Mask) for p in conjuncts(op.where)]
        if sympy.false not in parts and not any(p == inside or implies(p, inside, "q", "kv") for p in parts):
            yield f"no mask in @{body} hides the keys from Nk on; expected a condition from which `kv_idx < Nk` follows"


def needed(module: Module, kernel: Kernel) -> Iterator[str]:
    """A load that is limited to a range of rows has all rows that are in visible pairs of the program's tile, and
    none past the end."""
    bodies = {loop.body for loop in kernel.loops if loop.cls != "all" and loop.var == kernel.loop_axis}
    extent = symbol(AXIS_EXTENT[kernel.loop_axis])
    for body, op in ((b.name, op) for b in kernel.blocks for op in b.ops if isinstance(op, Load) and op.needed):
        if len(op.needed) > 1 or body not in bodies or kernel.loop_axis not in dict(op.check):
            yield f"%{op.name} is limited to rows; expected one range, in a loop over tiles, of a load that checks {kernel.loop_axis}"
            continue
        ((first, end),) = op.needed
        least_row, last_end = needed_rows(kernel, body) or (sympy.Integer(0), extent)
        if not _le(kernel, kernel.resolve(first), least_row) or not _le(kernel, last_end, kernel.resolve(end)):
            yield f"%{op.name} reads rows {to_text(first)} .. {to_text(end)}, which are not proven to be all of visible pairs"
        if not _le(kernel, kernel.resolve(end), extent):
            yield f"%{op.name} reads rows up to `{to_text(end)}`, which is not proven to be at most {extent}"


def full_is_proven(module: Module, kernel: Kernel) -> Iterator[str]:
    """A loop of class full runs only over tiles that the mask's expression proves full, or over blocks that are
    listed as full."""
    data = module.blocks is not None and module.blocks.data
    for loop in kernel.loops:
        if loop.cls != "full" or (data and loop.listed):
            continue
        runs = _runs(tile_ranges(kernel, loop.body))
        for lo, hi in ranges(kernel, loop):
            if not any(_le(kernel, start, lo) and _le(kernel, hi, end) for _, start, end, _ in runs):
                proven = ", ".join(f"{to_text(start)} .. {to_text(end)}" for _, start, end, _ in runs)
                yield (
                    f"%{loop.name} runs {to_text(lo)} .. {to_text(hi)} as class full, but only {proven} is proven to hold "
                    "nothing masked or out of bounds; class partial is right for any range"
                )


def cuts(module: Module, kernel: Kernel) -> Iterator[str]:
    """A mask is passed over only in tiles for all pairs of which its formula is proven."""
    for op in kernel.ops():
        if not isinstance(op, Mask) or op.unswitch is None:
            continue
        data = data_of(kernel, op)
        if not kernel.backend:
            yield f"%{op.name} is passed over in some tiles; expected that of copies of a role, which have rows of their own"
        elif (
            strangers := set(symbol_names(op.unswitch))
            - (set(symbol_names(op.where)) - data - {"q_idx", "kv_idx"})
            - {*PLACES}
        ):
            named = ", ".join(f"`{name}`" for name in sorted(strangers))
            known = f"{', '.join(sorted(PLACES))} and numbers of its condition"
            yield f"%{op.name} asks for {named} to know whether it cuts a tile; expected {known}"
        elif not is_whole_without(op.unswitch, op.where, data):
            expected = cut_by(op.where, data)
            hint = f"a weaker condition, such as `cut({to_text(expected)})`" if expected is not None else "no `cut`"
            yield f"%{op.name} is passed over in tiles that `{to_text(op.where)}` is not proven for; expected {hint}"


def lists(module: Module, kernel: Kernel) -> Iterator[str]:
    """With block sparsity, every loop over tiles visits listed tiles, between positions in its program's own row. Tiles
    divide blocks.

    Where data makes the lists, full loops run over the full blocks, which come first, and partial loops over the
    others. The kernel that finds the blocks has strips of blocks as tiles.
    """
    rank, listed = BLOCK_LISTS[kernel.program_axis]
    data = module.blocks is not None and module.blocks.data
    for loop in kernel.loops if kernel.dots else ():
        base = kernel.op(loop.listed) if loop.listed else None
        lists = isinstance(base, Base) and base.src.tensor == listed
        if loop.cls != "all" and module.blocks and not lists:
            yield f"%{loop.name} visits tiles of blocks that do not count; expected `listed` with a row of %{listed}"
        if base is not None and (loop.cls == "all" or not module.blocks):
            yield f"%{loop.name} visits listed tiles; expected all of them: " + (
                "it is over no tiles" if module.blocks else "blocks no"
            )
        ranked = FULL_RANKS[kernel.program_axis] if data and loop.cls == "full" else rank
        start = ranked != rank or not data  # what is ranked there comes first
        for e in (e for pair in loop.ranges for e in pair) if lists else ():
            bound = kernel.op(str(e)) if str(e) in kernel.graph else None
            ranks = kernel.op(bound.src) if isinstance(bound, ListPosition) else None
            if not (e == 0 and start) and not (isinstance(ranks, Base) and ranks.src.tensor == ranked):
                yield f"%{loop.name} runs to or from `{to_text(e)}`; expected {'0 or ' * start}a position among %{ranked}"
    size = module.blocks.size if module.blocks and (kernel.dots or kernel.counts_pairs) else None
    for row in module.configs(kernel.name):
        if size and max(row.block_q, row.block_kv) > size:
            yield f"{row.device}: tiles of {row.block_q}x{row.block_kv} do not divide blocks of {size}"
        if size and kernel.counts_pairs and (row.block_q, row.block_kv) != (size, STRIP):
            yield f"{row.device}: tiles of {row.block_q}x{row.block_kv}; expected strips of blocks, {size}x{STRIP}"
