"""Ops that order warp groups and run their loops: barriers, semaphores, the work loop and software-pipelined loops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from attngen.ir.core import Access
from attngen.ir.expr import Expr
from attngen.ir.fields import BlockName, Ranges, Ref, Uses, Word
from attngen.ir.op import Dialect, Op
from attngen.ir.tile import TILE, Loop

PIPE = Dialect("pipe", uses=TILE.own.values())


@PIPE.op("scheduler_barrier do", result=False)
@dataclass(frozen=True)
class SchedulerBarrier(Op):
    """Order the instances of a warp group (ping-pong), by one named barrier per instance.

    do: the step of the protocol:

    - `init`: the last instance arrives at the barrier of instance 0, which comes first; other instances do nothing.
    - `sync`: wait until the previous instance has arrived at this one's barrier; for instance 0 that is the last one.
    - `arrive`: arrive at the next instance's barrier, without waiting for it.
    - `tail`: instance 0 syncs once more, with the last arrival, so that the CTA does not exit with an arrival pending;
      other instances do nothing.
    """

    do: Word


@PIPE.op("semaphore_acquire semaphore", result=False)
@dataclass(frozen=True)
class SemaphoreAcquire(Op):
    """Wait until the semaphore equals `order`, the number of programs that store or add before this one (see
    ordered_add and ordered_accumulate). Then order the TMA operations that follow after the wait (fence.proxy.async).

    In a warp group with rows, each instance has its own semaphore, because the index of `semaphore` contains the
    instance's first row. An instance whose rows are all past the end neither acquires nor releases; the same instance
    of all other programs has the same rows, so nobody waits for it.
    """

    semaphore: Access
    order: Expr


@PIPE.op("semaphore_release semaphore", result=False)
@dataclass(frozen=True)
class SemaphoreRelease(Op):
    """Increment the semaphore, so that the next program may store or add (see semaphore_acquire). In a warp-specialized
    kernel with this op, ordered_add and ordered_accumulate do not increment it themselves.

    Before that, each warp waits until the TMA stores and adds that it has issued are complete in device memory
    (cp.async.bulk.wait_group, without .read). Then one thread per warp increments by red.release.gpu, which the
    ld.acquire.gpu of semaphore_acquire observes. If four warps release, an `order` of n means 4 n increments.
    """

    semaphore: Access


@PIPE.op("work_loop pipeline")
@dataclass(frozen=True)
class WorkLoop(Op):
    """Run `body` for each work tile (a point of the grid) that the persistent program processes, until none is left.
    Before `body`, the block `of` computes the scalars of the work tile that all warp groups share, such as loop bounds.

    pipeline: carries the work tile's coordinates in the grid, and the integers that `of` computes, from the warp group
    that fetches to the others; -1 ends the loop. Each of the others releases the stage after the body.
    fetches: set in one warp group, the producer. It gets the number of each next work tile by an atomic add on a
    counter in device memory, which all programs share (dynamic scheduler). The first work tile has the program's
    number, except in kernels whose programs wait for others (see ordered_add): these fetch it too, so that work tiles
    start in order however many programs are resident.
    """

    pipeline: Ref
    of: BlockName
    body: BlockName
    fetches: bool = False


@PIPE.op("reload_tile pipeline", result=False)
@dataclass(frozen=True)
class ReloadTile(Op):
    """Reload the work tile's coordinates from the stage of the work_loop's pipeline, so that no registers hold them
    while products run."""

    pipeline: Ref


@PIPE.op("prefetch_tile pipeline", result=False)
@dataclass(frozen=True)
class PrefetchTile(Op):
    """In the body of the work_loop that fetches: get the next work tile here and compute its scalars (the block `of`),
    not after the body. Loads that follow are of the work tile that the body runs for.

    pipeline: that of the work_loop.
    """

    pipeline: Ref


@PIPE.op("pipelined_loop var")
@dataclass(frozen=True)
class PipelinedLoop(Op):
    """A software-pipelined loop over tiles: `first` (the prologue) runs for the first tile, `step` (the steady state)
    for each later one, and `last` (the epilogue) once at the end. Masks and checks in `step` apply by the class of its
    tile; `first` is compiled for class partial. Without tiles nothing runs, and the results are the values of `carry`.

    Order of tiles: those of `partial`, then those of `full`, each in rising order. `reversed` lets those of `partial`
    run down; `in_order` lets all run in rising order instead. All warp groups use the same order (rule `same-tiles`).

    There are three forms of loop: first/step/last or step only; step for even and `odd` for odd iterations; and `pair`
    for two iterations at once, with `step` for a single one that is left.

    var: the axis whose tiles are visited.
    partial, full: ranges of tiles that are masked and checked, and of tiles that are not.
    carry: the carried fields, each with its initial value.
    first: takes the carried fields and may yield more, which `step` takes and yields too. Without it `step` runs for
    all tiles.
    last: takes the fields of `step` and yields the results.
    listed: as in loop.
    tile_indices: the pipeline of metadata that carries the indices of listed tiles. Without it, each warp group reads
    the indices from the list.
    reversed: partial tiles are visited from the last to the first.
    instance_partial: start .. end, the tiles that are partial for the instance's own rows; BLOCK_Q in it is the number
    of these rows. Among the loop's partial tiles, those with a number of at least `end` are fully masked for these
    rows, and are skipped; those with a number below `start` are fully visible for them.
    skip: waits for and releases a tile that the instance skips. With `reversed`, which it requires, such tiles come
    first.
    in_order: tiles are visited in rising order: partial tiles below the full ones, the full ones, and partial tiles
    above them. In programs of a `reversed_group` of the grid the order is falling.
    recompute: as in loop.
    heads: all iterations run once for each of these query heads, as in loop; with `by_tile`, for all heads at each
    tile.
    round_robin: instances of the warp group split the iterations by the stages of this pipeline. An instance runs those
    whose tile is in the stage with the instance's number, and skips the others without waiting.
    odd: iterations are counted from 0; `step` runs for even ones and `odd` for odd ones.
    pair: runs for two tiles at once, with the position of the second one; `step` runs for a last tile without a
    partner.
    """

    var: Word
    partial: Ranges
    full: Ranges
    carry: Uses
    first: BlockName = ""
    step: BlockName = ""
    last: BlockName = ""
    listed: Ref | None = None
    reversed: bool = False
    skip: BlockName = ""
    instance_partial: Ranges = ()
    tile_indices: Ref | None = None
    in_order: bool = False
    recompute: bool = False
    heads: Ranges = ()
    by_tile: bool = False
    round_robin: Ref | None = None
    odd: BlockName = ""
    pair: BlockName = ""

    def field_of(self, arg: str, body: str) -> str:
        """The field that an argument of a body stands for: in @first and @last, names end in `_in_first` and
        `_in_last`."""
        return arg.removesuffix(f"_in_{body}")

    @property
    def by_class(self) -> tuple[Loop, Loop]:
        """Loops that run @step for the partial tiles, and then for the full ones, with nothing carried."""
        partial = Loop(f"{self.name}_partial", self.var, self.partial, (), self.step, "partial", listed=self.listed)
        full = replace(partial, name=f"{self.name}_full", ranges=self.full, cls="full")
        return replace(partial, reversed=self.reversed), full

    @property
    def bodies(self) -> tuple[str, ...]:
        return tuple(body for body in (self.first, self.step, self.last, self.skip, self.odd, self.pair) if body)


def bodies_of(op: Op) -> tuple[str, ...]:
    """The blocks that an op runs, except the block `of` of a work loop."""
    return tuple(name for field in op.declared.blocks if field != "of" and (name := getattr(op, field)))


class MaskedFullTiles(NamedTuple):
    """Numbers of full tiles that @first of a pipelined loop may mask, if the program visits no tile of `before`."""

    numbers: tuple[Expr, ...]
    before: Ranges


def masked_full_tiles(ops: Iterable[Op]) -> tuple[MaskedFullTiles, ...]:
    """Return the full tiles that pipelined loops among these ops may mask. @first masks the first tile that an instance
    does not skip. If that tile is full, it begins a range of full tiles, and the instance skipped all partial tiles, or
    there are none."""
    loops = (op for op in ops if isinstance(op, PipelinedLoop) and op.first and op.full)
    return tuple(
        MaskedFullTiles(tuple(first for first, _ in loop.full), () if loop.skip else loop.partial) for loop in loops
    )
