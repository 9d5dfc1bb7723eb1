"""Rules of loops over tiles: they visit all tiles with a visible pair, and treat a tile as full only if it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy

from attngen.heuristics import STRIP
from attngen.ir import AXIS_DIM, AXIS_EXTENT, Access, Kernel, Module, Op, only, tile
from attngen.ir.expr import conjuncts, select, symbol, symbol_names
from attngen.ir.expr_text import to_text
from attngen.ir.names import BLOCK_LISTS, FULL_RANKS
from attngen.ir.prove import prove_le
from attngen.ir.split_axes import ranges
from attngen.tiles.boundary import PLACES, data_of, is_full_unless, unswitch_condition
from attngen.tiles.intervals import GREATEST, greatest, implies, last_row, least, with_rows
from attngen.tiles.ranges import gathers_per_query, needed_rows, rows_of, tile_ranges


def classified(module: Module, kernel: Kernel) -> Iterator[str]:
    """Every loop over tiles has a class, after the passes that classify them."""
    for loop in kernel.loops:
        if loop.cls == "unknown":
            yield f"%{loop.name} has class unknown; classify-tiles and split-loops come first"


def extremes(module: Module, kernel: Kernel) -> Iterator[str]:
    """If a bound of a loop uses a value as the least or greatest number of the program tile's rows, the value is that
    number. It is the minimum or maximum over the rows that exist, or, if numbers never decrease along the rows, the
    number of the first or last row. In tiles of packed rows it is the number of the first or last query, which bounds
    all others."""
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
                yield f"%{made} is not proven to be the {kind} of %{name} over the rows of the program tile"


def _at_end(kernel: Kernel, made: str, name: str, end: Any, rising: set[str]) -> bool:
    """True if `made` is the first or last row (`end`) of the value `name`, loaded from a tensor whose numbers never
    decrease."""
    one, rows = kernel.op(made), kernel.op(name)
    if isinstance(one, tile.Gather) and isinstance(rows, tile.Gather):
        queries = sympy.Integer(0) if end == symbol("q_start") else symbol("queries") - 1
        packed = kernel.pack_gqa and gathers_per_query(rows) and rows.src.tensor in rising
        always = not one.type.dims and one.where == sympy.true
        return packed and always and one.src == Access(rows.src.tensor, (*rows.src.index[:-1], queries))
    if not isinstance(one, tile.Load) or not isinstance(rows, tile.Load):
        return False
    (tensor, at), (other, index) = kernel.accessed(one), kernel.accessed(rows)
    at_end = tuple(end if str(e) == kernel.program_axis else e for e in index)
    return tensor is other and tensor.name in rising and at == at_end


def _reduced(kernel: Kernel, made: str, name: str, kind: str, other: int) -> bool:
    """True if the value `made` is the minimum or maximum of the existing rows of the value `name`. Rows that do not
    exist count as `other`."""
    own, reduce = kernel.program_axis, kernel.op(made)
    rows: Op | None = (
        kernel.op(reduce.value)
        if isinstance(reduce, tile.Reduce) and (reduce.op, reduce.over) == (kind, AXIS_DIM[own])
        else None
    )
    inside = symbol(f"{own}_idx") < symbol(AXIS_EXTENT[own])
    return (
        isinstance(rows, tile.Map)
        and rows.expr == select(inside, symbol(name), sympy.Integer(other))
        and dict(rows.uses) == {name: name}
    )


def covers(module: Module, kernel: Kernel) -> Iterator[str]:
    """Together the loops over a body visit every tile with a visible pair exactly once, and no tile before the first
    one. Programs that split a loop do so together.

    Each range rises, and so do the parts of a range that programs split.
    """
    for loop in kernel.loops:
        found = [*zip(ranges(kernel, loop), loop.ranges)]
        for ((_, before), (_, end)), ((after, _), (start, _)) in zip(found, found[1:]):
            if not _le(kernel, before, after):
                first, then = to_text(end), to_text(start)
                yield f"%{loop.name} runs up to {first} and then from {then}, which is not proven to come later"
        for (lo, hi), (start, end) in found:
            if not _le(kernel, sympy.Integer(0), lo) or not _le(kernel, lo, hi):
                span = f"{to_text(start)} .. {to_text(end)}"
                yield f"%{loop.name} runs {span}, which is not proven to rise from 0 or more"
    for body in dict.fromkeys(loop.body for loop in kernel.loops if loop.cls != "all"):
        runs = _runs(tuple(_known(kernel, e) for e in tile_ranges(kernel, body)))
        mine = [loop for loop in kernel.loops if loop.body == body]
        # If data makes the block lists, each loop covers all tiles of its own list; no block is in two lists.
        separate = module.blocks is not None and module.blocks.data and all(loop.listed for loop in mine)
        for loops in [[loop] for loop in mine] if separate else [mine]:
            pieces = [tuple(_known(kernel, e) for e in pair) for loop in loops for pair in ranges(kernel, loop)]
            if not _covered(runs, pieces):
                have, need = (
                    ", ".join(f"{to_text(p[0])} .. {to_text(p[-1])}" for p in some) for some in (pieces, runs)
                )
                yield f"the loops over @{body} run {have}, which is not proven to be all of {need}, once each"
        if separate and sorted(loop.cls for loop in mine) != ["full", "partial"]:
            classes = ", ".join(loop.cls for loop in mine)
            yield f"the loops over @{body} are {classes}; expected full and partial, for both lists of blocks"


def _runs(tiles: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The four bounds of each run of tiles: its start, the start and the end of its full tiles, and its end."""
    return [tiles[i : i + 4] for i in range(0, len(tiles), 4)]


def _covered(runs: list[tuple[Any, ...]], pieces: list[tuple[Any, Any]]) -> bool:
    """True if the pieces are contiguous chains, in rising order, that cover the runs: all in one chain, or each run in
    its own."""
    pieces = [p for p in pieces if p[0] != p[1]]  # the others are empty in programs whose tile has a row
    if any(
        len(c) == len(pieces) and prove_le(c[0][0], runs[0][0]) and prove_le(runs[-1][3], c[-1][1])
        for c in _chains(pieces)
    ):
        return True
    left: list[tuple[Any, Any]] = list(pieces)
    last: list[tuple[Any, Any]] = []
    for run in (r for r in runs if r[0] != r[3]):
        # The longest chains first, because a shorter one may leave empty pieces.
        candidates = [last] * bool(last) + sorted(_chains(left), key=len, reverse=True)
        chain = next((c for c in candidates if prove_le(c[0][0], run[0]) and prove_le(run[3], c[-1][1])), None)
        if chain is None or (last and chain is not last and not prove_le(last[-1][1], chain[0][0])):
            return False
        left, last = [p for p in left if p not in chain], chain
    return not left


def _le(kernel: Kernel, a: Any, b: Any) -> bool:
    """True if a <= b is proven for a program whose tile has a row."""
    return prove_le(_known(kernel, a), _known(kernel, b))


def _known(kernel: Kernel, e: Any) -> Any:
    """An expression, simplified by facts that a program knows about the rows of its tile."""
    return with_rows(e, kernel.program_axis, rows_of(kernel))


def _chains(pieces: list[tuple[Any, Any]]) -> list[list[tuple[Any, Any]]]:
    """The longest contiguous chain from each piece: each following piece starts where the previous one ends."""
    chains = []
    for first in range(len(pieces)):
        chain, rest = [pieces[first]], [p for i, p in enumerate(pieces) if i != first]
        while following := next((p for p in rest if p[0] == chain[-1][1]), None):
            chain.append(following)
            rest.remove(following)
        chains.append(chain)
    return chains


def out_of_bounds_keys(module: Module, kernel: Kernel) -> Iterator[str]:
    """A program that sums over keys masks keys past the end: they are loaded as zeros, and would count as scores."""
    inside = symbol("kv_idx") < symbol("Nk")
    sums = {loop.body for loop in kernel.loops if loop.var == "kv" and loop.cls != "all"}
    sums |= {b.name for b in kernel.blocks if any(op.over == "BLOCK_KV" for op in only(b.ops, tile.Dot))}
    for body in (b.name for b in kernel.blocks if b.name in sums):
        parts = [p for op in only(kernel.block(body).ops, tile.Mask) for p in conjuncts(op.where)]
        if sympy.false not in parts and not any(p == inside or implies(p, inside, "q", "kv") for p in parts):
            yield f"no mask in @{body} hides the keys from Nk on; expected a condition from which `kv_idx < Nk` follows"


def load_rows(module: Module, kernel: Kernel) -> Iterator[str]:
    """A load that is limited to a range of rows (`needed`) loads all rows in visible pairs of the program tile, and
    none past the end. The kernel does not store to its tensor, where rows outside the range would be lost."""
    bodies = {loop.body for loop in kernel.loops if loop.cls != "all" and loop.var == kernel.loop_axis}
    extent = symbol(AXIS_EXTENT[kernel.loop_axis])
    for body, op in ((b.name, op) for b in kernel.blocks for op in only(b.ops, tile.Load) if op.needed):
        if len(op.needed) > 1 or body not in bodies or kernel.loop_axis not in dict(op.check):
            expected = f"one range, in a loop over tiles, of a load that checks {kernel.loop_axis}"
            yield f"%{op.name} is limited to rows; expected {expected}"
            continue
        if (tensor := kernel.accessed(op)[0].name) in kernel.traits.stored:
            yield f"%{op.name} is limited to rows of {tensor}, which the kernel also stores; expected all of its rows"
        ((first, end),) = op.needed
        least_row, last_end = needed_rows(kernel, body) or (sympy.Integer(0), extent)
        if not _le(kernel, kernel.resolve(first), least_row) or not _le(kernel, last_end, kernel.resolve(end)):
            rows = f"{to_text(first)} .. {to_text(end)}"
            yield f"%{op.name} reads rows {rows}, which are not proven to be all rows in visible pairs"
        if not _le(kernel, kernel.resolve(end), extent):
            yield f"%{op.name} reads rows up to `{to_text(end)}`, which is not proven to be at most {extent}"


def full_is_proven(module: Module, kernel: Kernel) -> Iterator[str]:
    """A loop of class full runs only over tiles that the mask proves full, or over blocks that are listed as full."""
    data = module.blocks is not None and module.blocks.data
    for loop in kernel.loops:
        if loop.cls != "full" or (data and loop.listed):
            continue
        runs = _runs(tile_ranges(kernel, loop.body))
        for lo, hi in ranges(kernel, loop):
            if not any(_le(kernel, start, lo) and _le(kernel, hi, end) for _, start, end, _ in runs):
                proven = ", ".join(f"{to_text(start)} .. {to_text(end)}" for _, start, end, _ in runs)
                yield (
                    f"%{loop.name} runs {to_text(lo)} .. {to_text(hi)} as class full, but only {proven} is proven to "
                    f"hold nothing masked or out of bounds; class partial is right for any range"
                )


def unswitch(module: Module, kernel: Kernel) -> Iterator[str]:
    """A mask with an `unswitch` condition is skipped only in tiles in which it is proven to hide nothing: where the
    condition does not hold."""
    for op in kernel.ops():
        if not isinstance(op, tile.Mask) or op.unswitch is None:
            continue
        data = data_of(kernel, op)
        if not kernel.backend:
            yield f"%{op.name} has an unswitch condition; expected none in a portable kernel"
        elif unknown := set(symbol_names(op.unswitch)) - _unswitch_symbols(op, data):
            named = ", ".join(f"`{name}`" for name in sorted(unknown))
            known = f"{', '.join(sorted(PLACES))} and integers of the mask"
            yield f"%{op.name} has an unswitch condition on {named}; expected {known}"
        elif not is_full_unless(op.unswitch, op.where, data):
            expected = unswitch_condition(op.where, data)
            hint = "no `unswitch`"
            if expected is not None:
                hint = f"a weaker condition, such as `unswitch({to_text(expected)})`"
            mask = to_text(op.where)
            yield f"%{op.name} is skipped in tiles in which `{mask}` is not proven to hold; expected {hint}"


def _unswitch_symbols(op: tile.Mask, data: frozenset[str]) -> set[str]:
    """The symbols that an unswitch condition may use: positions of tiles, and integers of the mask that do not vary by
    pair or come from data."""
    return (set(symbol_names(op.where)) - data - {"q_idx", "kv_idx"}) | {*PLACES}


def block_lists(module: Module, kernel: Kernel) -> Iterator[str]:
    """With block sparsity, every loop over tiles visits listed tiles, between positions in the program's row of the
    list. Tiles divide blocks.

    If data makes the lists, full loops run over the full blocks, which come first, and partial loops over the others.
    In the kernel that finds these blocks, tiles are strips of a block.
    """
    rank, listed = BLOCK_LISTS[kernel.program_axis]
    data = module.blocks is not None and module.blocks.data
    for loop in kernel.loops if kernel.traits.dots else ():
        base = kernel.op(loop.listed) if loop.listed else None
        lists = isinstance(base, tile.Base) and base.src.tensor == listed
        if loop.cls != "all" and module.blocks and not lists:
            yield f"%{loop.name} also visits tiles of masked blocks; expected `listed` with a row of %{listed}"
        if base is not None and (loop.cls == "all" or not module.blocks):
            reason = "does not run over tiles of scores" if module.blocks else "is in a module without blocks"
            yield f"%{loop.name} visits listed tiles, and {reason}; expected no list"
        ranked = FULL_RANKS[kernel.program_axis] if data and loop.cls == "full" else rank
        from_start = ranked != rank or not data  # the loop's blocks come first in the list
        for e in (e for pair in loop.ranges for e in pair) if lists else ():
            bound = kernel.op(str(e)) if str(e) in kernel.graph else None
            ranks = kernel.op(bound.src) if isinstance(bound, tile.ListPosition) else None
            if not (e == 0 and from_start) and not (isinstance(ranks, tile.Base) and ranks.src.tensor == ranked):
                expected = f"{'0 or ' * from_start}a position in %{ranked}"
                yield f"%{loop.name} runs to or from `{to_text(e)}`; expected {expected}"
    size = module.blocks.size if module.blocks and (kernel.traits.dots or kernel.traits.counts_pairs) else None
    for config in module.configs(kernel.name):
        blocks_of = f"{config.device}: tiles of {config.block_q}x{config.block_kv}"
        if size and max(config.block_q, config.block_kv) > size:
            yield f"{blocks_of} do not divide blocks of {size}"
        if size and kernel.traits.counts_pairs and (config.block_q, config.block_kv) != (size, STRIP):
            yield f"{blocks_of}; expected strips of blocks, {size}x{STRIP}"
