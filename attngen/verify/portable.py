"""The rule `same-tiles`: a warp-specialized kernel visits, loads and stores the same tiles as its portable kernel.

Its portable kernel is the one in whose place it runs, and which errors call "the portable @name".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from attngen.ir import SIDES, Kernel, Module, Op, Ranges, only, pipe, tile, to_text
from attngen.tiles.order import order_ops
from attngen.verify.caches import of_all_columns, page_of, places


def same_tiles(module: Module, kernel: Kernel) -> Iterator[str]:
    """All warp groups run over the same tiles in the same order, full and partial: those of the portable kernel.

    The grid, the named integers and the order in which programs add are those of the portable kernel, too. Tiles are
    loaded from where it loads them, and stored to where it stores them.
    """
    portable = module.kernel(kernel.stands_for)
    if kernel.grid != portable.grid:
        yield f"its grid is not that of the portable @{portable.name}"
    own, expected = (
        [(op.semaphore, op.order, order_ops(k, op)) for op in only(k.ops(), tile.OrderedAdd)]
        for k in (kernel, portable)
    )
    if own != expected:
        yield f"its programs add in another order than those of the portable @{portable.name}"
    yield from _same_accumulations(kernel, portable)
    yield from _same_places(kernel, portable)
    scalars = dict(portable.traits.named)
    for name, expr in kernel.traits.named:
        if scalars.get(name) != expr:
            there = to_text(scalars.get(name, expr))
            yield f"%{name} is `{to_text(expr)}`; in the portable @{portable.name} it is `{there}`"
    yield from _same_loops(kernel, portable)


def _same_loops(kernel: Kernel, portable: Kernel) -> Iterator[str]:
    """Each warp group that has a loop over tiles runs over all tiles of the portable kernel's loops, and all of them
    in one order."""
    around = portable.traits.of_heads  # a warp-specialized kernel has this loop over heads inside its loops over tiles
    expected: dict[str, Any] = {
        loop.cls: (loop.ranges, loop.listed, (around.ranges if around else loop.heads, loop.by_tile))
        for loop in portable.loops
        if loop is not around
    }
    orders = {}
    for warp_group in kernel.warp_groups:
        runs = [run for op in kernel.within(warp_group.name) for run in _runs(op)]
        orders[warp_group.name] = [run for run in runs if run[1]]
        for cls, ranges, *rest, _ in runs:
            if (ranges, *rest) != expected.get(cls, ((), *rest)) and ranges:
                yield f"@{warp_group.name} runs over other tiles of class {cls} than the portable @{portable.name}"
        if runs and {run[0] for run in runs if run[1]} != expected.keys():
            classes = ", ".join(run[0] for run in runs if run[1])
            yield f"@{warp_group.name} runs over tiles of class {classes}; expected {', '.join(expected)}"
    if len({repr(order) for order in orders.values() if order}) > 1:
        yield f"{' and '.join(f'@{name}' for name in orders)} run over tiles in different orders"


def _same_places(kernel: Kernel, portable: Kernel) -> Iterator[str]:
    """TMA loads tiles only from places at which the portable kernel loads. Both kernels store equally often to each
    place."""
    loads = {(*_target(portable, op), page_of(portable, op)) for op in only(portable.ops(), tile.Load)}
    for op in kernel.ops():
        if isinstance(op, pipe.ProducerLoad):
            place = (op.src.tensor, of_all_columns(op.src.index), page_of(kernel, op))
            if place not in loads:
                yield f"%{op.name} loads from where the portable @{portable.name} loads nothing"
    in_halves = any(
        {*map(str, _target(kernel, op)[1])} & {*SIDES} for op in only(kernel.ops(), pipe.TmaStore, tile.Store)
    )
    stored, expected = (
        Counter(
            place for op in only(k.ops(), pipe.TmaStore, tile.Store) for place in places(*_target(k, op), in_halves)
        )
        for k in (kernel, portable)
    )
    for tensor, index in {**expected, **stored}:
        times, most = stored[tensor, index], expected[tensor, index]
        if times != most:
            at = f"%{tensor}[{', '.join(map(to_text, index))}]"
            yield f"it stores {times} times at {at}; the portable @{portable.name} stores {most} times there"


def _same_accumulations(kernel: Kernel, portable: Kernel) -> Iterator[str]:
    """Tiles that programs accumulate in order are those of the portable kernel.

    Instances either have the same ordered_accumulates, or each of them does it by TMA: it acquires the semaphore of the
    program before, stores all tiles, waits for these stores, and releases the semaphore.
    """
    merges, own = (list(only(k.ops(), tile.OrderedAccumulate)) for k in (portable, kernel))
    expected = [(*_target(portable, op), op.order) for op in merges]
    if own:
        if [(*_target(kernel, op), op.order, op.semaphore, op.ends) for op in own] != [
            (*place, op.semaphore, op.ends) for place, op in zip(expected, merges)
        ]:
            yield f"it accumulates other tiles than the portable @{portable.name}"
        return
    semaphores = {portable.accessed(op.semaphore) for op in merges if op.semaphore}
    steps = [op for op in kernel.ops() if _accumulates(kernel, op, semaphores)]
    if [(*_target(kernel, op), op.order) for op in only(steps, pipe.TmaStore)] != expected:
        yield f"it stores other tiles in order than those that the portable @{portable.name} accumulates"
    acquires = list(only(steps, pipe.SemaphoreAcquire))
    if not merges:
        yield from (f"%{op.name} acquires a semaphore, and nothing is accumulated" for op in acquires)
        return
    kinds = [type(op) for op in steps]
    waits = kinds.count(pipe.TmaStoreWait)
    in_order = [
        pipe.SemaphoreAcquire,
        *[pipe.TmaStore] * len(merges),
        *[pipe.TmaStoreWait] * waits,
        pipe.SemaphoreRelease,
    ]
    one_block = len({kernel.graph.nodes[op.name]["block"] for op in steps}) == 1
    orders = [(kernel.accessed(op.semaphore), op.order) for op in acquires]
    if kinds != in_order or not waits or not one_block or orders != [(*semaphores, merges[0].order)]:
        yield (
            "its instances accumulate tiles; expected one semaphore_acquire, all tma_stores, their tma_store_waits and "
            "then one semaphore_release, in one block"
        )


def _accumulates(kernel: Kernel, op: Op, semaphores: set[Any]) -> bool:
    """True if an op is a step by which TMA accumulates tiles under these semaphores."""
    match op:
        case pipe.SemaphoreAcquire():
            adds = {o.semaphore.tensor for o in only(kernel.ops(), tile.OrderedAdd) if o.semaphore}
            return op.semaphore.tensor not in adds
        case pipe.SemaphoreRelease():
            return kernel.accessed(op.semaphore) in semaphores
        case pipe.TmaStore():
            return op.order is not None
        case pipe.TmaStoreWait():
            return any(o.order is not None and o.staging == op.staging for o in only(kernel.ops(), pipe.TmaStore))
    return False


def _target(kernel: Kernel, op: tile.Load | pipe.TmaStore | tile.Store) -> tuple[str, tuple[Any, ...]]:
    """The tensor that an op loads from or stores to, and the indices."""
    if isinstance(op, pipe.TmaStore):
        return op.dst.tensor, op.dst.index
    tensor, index = kernel.accessed(op)
    return tensor.name, index


def _runs(op: Op) -> Iterator[tuple[str, Ranges, str | None, tuple[Ranges, bool], tuple[bool, bool]]]:
    """The tiles of a loop, by class: (class, ranges, list, heads and whether all heads run at each tile, whether tiles
    are reversed and whether they are visited in order)."""
    if isinstance(op, tile.Loop):
        yield op.cls, op.ranges, op.listed, (op.heads, op.by_tile), (op.reversed, False)
    if isinstance(op, pipe.PipelinedLoop):
        yield "partial", op.partial, op.listed, (op.heads, op.by_tile), (op.reversed, op.in_order)
        yield "full", op.full, op.listed, (op.heads, op.by_tile), (False, op.in_order)
