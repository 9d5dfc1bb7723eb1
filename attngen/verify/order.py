"""Rules of programs that add to one tile in a fixed order, under a semaphore: none waits for ever.

A program waits for the programs that come before it in the order. They have later tiles, or in a reversed group earlier
ones, and lower program numbers. If a program runs for several heads, one after another, the programs for which it waits
run for the same heads. The rules assume that the hardware starts programs in the order of their numbers, as GPUs do and
CUDA does not promise: then each waits only for programs that have started. By induction on these numbers each program
ends, however many run at the same time, because the running one with the lowest number waits for nobody. Block lists
leave some of these programs out, and change no order.

The two programs of a pair have the same tile and consecutive numbers of a head split. The second one has the higher
number and waits for the first, after it has summed everything: so it waits for a program that has started, too.

Persistent programs fetch tiles in this order, each when it starts one, also the first one. So the first unfinished tile
waits for nobody. Either the program that has fetched it has finished its earlier ones; or nobody has fetched it, and a
program that starts, or finishes a tile, does.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from attngen.ir import Access, Kernel, Module, Op, first_row, floordiv, mod, only, symbol, tile, to_text
from attngen.ir.split_axes import sharing
from attngen.tiles.order import first_first_order, last_first_order, order_by_direction, order_ops


def semaphore_order(module: Module, kernel: Kernel) -> Iterator[str]:
    """The order of a program is the number of programs that add to the tile before it. They own later tiles, or in a
    reversed group earlier tiles. Its semaphore is that of the loop's tile.

    If data bounds the loops, count_tiles may compute the order, as the number of tiles whose loops have started at that
    tile. With block lists, the order is the number of listed tiles after the program's own, up to the end that the
    formula gives.
    """
    adds = [op for op in only(kernel.ops(), tile.OrderedAdd) if op.order is not None]
    counts = list(only(kernel.ops(), tile.CountTiles))
    if not adds:
        yield from (f"%{op.name} counts tiles, and no ordered_add uses the count" for op in counts)
        return
    last_first = last_first_order(module, kernel)
    if last_first is None:
        yield "the order of its ordered_adds is not known; expected loops of one range, whose start and end rise"
        return
    own = kernel.grid[0]
    first_first = first_first_order(module, kernel) if own.reversed_group else None
    if own.reversed_group and first_first is None:
        yield (
            f"its grid has reversed_group along {own.var}; expected loops that start later for later tiles, and a "
            f"known number of loops that have ended"
        )
        return
    expected = order_by_direction(first_first and first_first.expr, last_first.expr)
    for op in adds:
        if op.order != expected:
            found, order = to_text(op.order), to_text(expected)
            yield f"%{op.name} has the order `{found}`; expected `{order}`, the number of programs that come before"
        at = op.semaphore.index[-1] if op.semaphore else None
        if at is not None and at != symbol(first_row(kernel.loop_axis, kernel.traits.places)):
            row = first_row(kernel.loop_axis, kernel.traits.places)
            yield f"%{op.name} has its semaphore at `{to_text(at)}`; expected `{row}`, the first row of the loop's tile"
    makers = (*last_first.ops, *(first_first.ops if first_first else ()))
    found_ops = (*counts, *(m for op in adds for m in order_ops(kernel, op)))
    known, used = ({_describe(op) for op in ops} for ops in (makers, found_ops))
    yield from (f"{text}, which is in no order" for text in sorted(used - known))
    yield from (f"the order needs an op that the kernel does not have: {text}" for text in sorted(known - used))
    if module.schedules and (own.var != kernel.program_axis or not own.reversed):
        axis = kernel.program_axis
        yield f"its order starts with the last tile of {axis}; expected a grid that starts with {axis}, reversed"


def ordered_accumulate(module: Module, kernel: Kernel) -> Iterator[str]:
    """Programs along a split axis are paired: 0 and 1, 2 and 3, and so on. Both accumulate to the tiles of their pair,
    one after the other.

    A program accumulates to one tile of each tensor, at the end, and the last of these ops releases the semaphore.
    """
    found = list(only(kernel.ops(), tile.OrderedAccumulate))
    if not found:
        return
    axes = sharing(kernel.grid)
    if len(axes) != 1 or not kernel.traits.adds_in_order or any(op not in kernel.block("entry").ops for op in found):
        yield (
            "its programs accumulate tiles; expected an axis along which they split heads, all ordered_accumulates in "
            "@entry, and an ordered_add"
        )
        return
    number, two = symbol(axes[0].var), sympy.Integer(2)
    tensor = next((op.semaphore.tensor for op in found if op.semaphore), "")
    for op in found:
        if op.order != mod(number, two):
            order, expected = to_text(op.order), to_text(mod(number, two))
            yield f"%{op.name} has the order `{order}`; expected `{expected}`, the program's number in its pair"
        _, index = kernel.accessed(op)
        of_pair = (*index[:-2], symbol(first_row(kernel.program_axis, kernel.traits.places)))
        if op.semaphore != Access(tensor, of_pair) or floordiv(number, two) not in index:
            at = ", ".join(map(to_text, of_pair))
            yield f"%{op.name} has another semaphore than that of its pair, at [{at}] in one tensor of semaphores"
    tensors = [kernel.accessed(op)[0].name for op in found]
    if len(set(tensors)) < len(tensors) or [op.ends for op in found] != [False] * (len(found) - 1) + [True]:
        yield "a program accumulates to one tile of each tensor, and the last ordered_accumulate has `ends`"


def _describe(op: Op) -> str:
    """The value that an op contributes to an order, in words."""
    match op:
        case tile.CountTiles(src=src, most=most):
            what = f"counts tiles that start at `{to_text(most)}` at most in {_element(src)}"
        case tile.ListPosition(src=src, tile=number):
            what = f"is the position of the tile `{to_text(number)}` in %{src}"
        case tile.Base(src=src):
            what = f"points to {_element(src)}"
        case _:
            what = "is not a number of tiles"
    return f"%{op.name} {what}"


def _element(access: Access) -> str:
    return f"%{access.tensor}[{', '.join(map(to_text, access.index))}]"
