"""Programs that add to one tile in a fixed order: each has its turn, and none waits for ever.

A program waits for those whose turns come before its own: they own later tiles, or in mirrored heads earlier ones, and
have lower numbers. If a program has several heads, one after another, those that it waits for have the same ones.
Programs are started in the order of their numbers, and so each waits for programs that have started. By induction on
these numbers each ends, however many there is room for at one
time: the one of the lowest number that is left waits for nobody. Lists of blocks leave some of these programs out, and
change no order.

The two programs of a pair own the same tile, of heads that follow one another. The second one has the higher number,
and waits for the first, when it has summed all it has: so it waits for a program that has started, too.

Programs that stay draw tiles in this order, each when it starts one, the first one too. So the first tile that is left
waits for nobody. Either the program that has drawn it has ended its earlier ones; or nobody has drawn it, and a program
that starts, or ends a tile, does.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from attngen.ir.expr import floordiv, mod, symbol, to_text
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Access, Base, CountTiles, ListPosition, Op, OrderedAccumulate, OrderedAdd
from attngen.ir.split_axes import sharing
from attngen.tiles.order import either_way, first_first, last_first, makers_of


def turns(module: Module, kernel: Kernel) -> Iterator[str]:
    """The turn of a program is how many come to the tile before it: those of later tiles, or in mirrored heads of
    earlier ones.

    What it counts in data, for that alone, is how many tiles have started there. With lists of blocks, it is how many
    tiles the list of the tile has behind the program's own, up to the end that the formula gives.
    """
    adds = [op for op in kernel.ops() if isinstance(op, OrderedAdd) and op.order is not None]
    counts = [op for op in kernel.ops() if isinstance(op, CountTiles)]
    if not adds:
        yield from (f"%{op.name} counts tiles, and no program takes turns by that" for op in counts)
        return
    expected = last_first(module, kernel)
    if expected is None:
        yield "it is not known how many programs come to each tile of its loops; expected one range, whose start and end rise"
        return
    own = kernel.grid[0]
    reversed_group = first_first(module, kernel) if own.reversed_group else None
    if own.reversed_group and reversed_group is None:
        yield f"its grid is mirrored along {own.var}; expected loops that start later for later tiles, and a known number that ended"
        return
    wanted = either_way(reversed_group, expected.expr)
    for op in adds:
        if op.order != wanted:
            yield f"%{op.name} has the turn `{to_text(op.order)}`; expected `{to_text(wanted)}`, as many as come there before"
    known, found = (
        {_said(op) for op in ops}
        for ops in (expected.makers, (*counts, *(m for op in adds for m in makers_of(kernel, op))))
    )
    yield from (f"{said}, of which no turn is made" for said in sorted(found - known))
    yield from (f"the turn is made of what the body has not: {said}" for said in sorted(known - found))
    if module.schedules and (own.var != kernel.program_axis or not own.reversed):
        yield f"its programs take turns from the last tile of {kernel.program_axis} on; expected the grid to start with these, descending"


def merges(module: Module, kernel: Kernel) -> Iterator[str]:
    """Programs along the axis of shares are paired: numbers 0 and 1, 2 and 3, and so on. Both store to the tiles of
    their pair, in turn.

    A program stores once to each tensor, at the end, all in one turn, which the last of these ends.
    """
    found = [op for op in kernel.ops() if isinstance(op, OrderedAccumulate)]
    if not found:
        return
    axes = sharing(kernel.grid)
    if len(axes) != 1 or not kernel.adds or any(op not in kernel.block("entry").ops for op in found):
        yield "its programs merge tiles; expected an axis of programs that share heads, all merges in @entry, and another add"
        return
    number, two = symbol(axes[0].var), sympy.Integer(2)
    places = [op.semaphore.tensor for op in found if op.semaphore] or [""]
    for op in found:
        if op.order != mod(number, two):
            yield f"%{op.name} has the turn `{to_text(op.order)}`; expected `{to_text(mod(number, two))}`, the number in its pair"
        _, place = kernel.accessed(op)
        wanted = (*place[:-2], symbol(f"{kernel.program_axis}_start"))
        if op.semaphore != Access(places[0], wanted) or floordiv(number, two) not in place:
            yield f"%{op.name} has not the place of its pair, [{', '.join(map(to_text, wanted))}], in one tensor of turns"
    tensors = [kernel.accessed(op)[0].name for op in found]
    if len(set(tensors)) < len(tensors) or [op.ends for op in found] != [False] * (len(found) - 1) + [True]:
        yield "a program merges one tile of each tensor in its turn, and the last merge ends that"


def _said(op: Op) -> str:
    """What an op is that makes a turn."""
    match op:
        case CountTiles(src=src, most=most):
            what = f"counts tiles that start at `{to_text(most)}` at most in {_place(src)}"
        case ListPosition(src=src, tile=tile):
            what = f"is the position of the tile `{to_text(tile)}` in %{src}"
        case Base(src=src):
            what = f"points to {_place(src)}"
        case _:
            what = "is no number of tiles"
    return f"%{op.name} {what}"


def _place(access: Access) -> str:
    return f"%{access.tensor}[{', '.join(map(to_text, access.index))}]"
