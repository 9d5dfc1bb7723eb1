"""Programs that add to one tile in a fixed order: each has its turn, and none waits for ever.

A program waits for those whose turns come before its own: they own later tiles, or in mirrored heads earlier ones, and have lower numbers.
If a program has several heads, one after another, those that it waits for have the same ones. Programs are started in the order of their
numbers, and so each waits for programs that have started. By induction on these numbers each ends, however many there is room for at one
time: the one of the lowest number that is left waits for nobody. Lists of blocks leave some of these programs out, and change no order.

Programs that stay draw tiles in this order, each when it starts one, the first one too. So the first tile that is left waits for nobody.
Either the program that has drawn it has ended its earlier ones; or nobody has drawn it, and a program that starts, or ends a tile, does.
"""

from __future__ import annotations

from collections.abc import Iterator

from attngen.bounds.turns import either_way, last_first, makers_of, may_mirror
from attngen.ir.expr import to_text
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Access, Add, Base, Count, Op, Position


def turns(module: Module, kernel: Kernel) -> Iterator[str]:
    """The turn of a program is how many come to the tile before it: those of later tiles, or in mirrored heads of earlier ones.

    What it counts in data, for that alone, is how many tiles have started there. With lists of blocks, it is how many tiles the list of the
    tile has behind the program's own, up to the end that the formula gives.
    """
    adds = [op for op in kernel.ops() if isinstance(op, Add) and op.turn is not None]
    counts = [op for op in kernel.ops() if isinstance(op, Count)]
    if not adds:
        yield from (f"%{op.name} counts tiles, and no program takes turns by that" for op in counts)
        return
    expected = last_first(module, kernel)
    if expected is None:
        yield "it is not known how many programs come to each tile of its loops; expected one range, whose start and end rise"
        return
    wanted = either_way(module, kernel, expected.expr)
    for op in adds:
        if op.turn != wanted:
            yield f"%{op.name} has the turn `{to_text(op.turn)}`; expected `{to_text(wanted)}`, as many as come there before"
    known, found = ({_said(op) for op in ops} for ops in (expected.makers, (*counts, *(m for op in adds for m in makers_of(kernel, op)))))
    yield from (f"{said}, of which no turn is made" for said in sorted(found - known))
    yield from (f"the turn is made of what the body has not: {said}" for said in sorted(known - found))
    own = kernel.grid[0]
    if own.mirrored and not may_mirror(module, kernel):
        yield f"its grid is mirrored along {own.var}; expected loops that start later for later tiles of it, and end alike for all"
    if module.schedules and (own.var != kernel.own_axis or not own.descending):
        yield f"its programs take turns from the last tile of {kernel.own_axis} on; expected the grid to start with these, descending"


def _said(op: Op) -> str:
    """What an op is that makes a turn."""
    match op:
        case Count(src=src, most=most):
            what = f"counts tiles that start at `{to_text(most)}` at most in {_place(src)}"
        case Position(src=src, tile=tile):
            what = f"is the position of the tile `{to_text(tile)}` in %{src}"
        case Base(src=src):
            what = f"points to {_place(src)}"
        case _:
            what = "is no number of tiles"
    return f"%{op.name} {what}"


def _place(access: Access) -> str:
    return f"%{access.tensor}[{', '.join(map(to_text, access.index))}]"
