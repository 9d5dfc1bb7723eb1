"""Ops that order warp groups and run their loops: barriers, semaphores, the work loop and software-pipelined loops."""

from __future__ import annotations

from dataclasses import dataclass, field

from attngen.ir.core import OPERAND, Access, Op, Uses
from attngen.ir.expr import Expr
from attngen.ir.ops import Loop

Ranges = tuple[tuple[Expr, Expr], ...]


@dataclass(frozen=True)
class SchedulerBarrier(Op):
    """Order the instances of a warp group (ping-pong), by one named barrier per instance.

    do: the step of the protocol:

    - `init`: the last instance arrives at the barrier of instance 0, which comes first; other instances do nothing.
    - `sync`: wait until the previous instance has arrived at this one's barrier; for instance 0 that is the last one.
    - `arrive`: arrive at the next instance's barrier, without waiting for it.
    - `tail`: instance 0 syncs once more, so that no arrival is left without a wait; other instances do nothing.
    """

    do: str


@dataclass(frozen=True)
class SemaphoreAcquire(Op):
    """Wait until the semaphore equals `order`, the number of programs that come before this one, and it is the
    program's turn to store or add its tiles (see ordered_add and ordered_accumulate). Each instance of a warp group
    with rows acquires for its own rows; one whose rows are all past the end neither acquires nor releases."""

    semaphore: Access = field(metadata=OPERAND)
    order: Expr


@dataclass(frozen=True)
class SemaphoreRelease(Op):
    """Increment the semaphore, so that the next program may store or add (see semaphore_acquire). In a warp-specialized
    kernel with this op, ordered_add and ordered_accumulate do not increment it themselves."""

    semaphore: Access = field(metadata=OPERAND)


@dataclass(frozen=True)
class WorkLoop(Op):
    """Run `body` for each tile of the grid that the persistent program processes, until no tile is left. Before `body`,
    the block `of` computes what all warp groups know of a tile.

    pipeline: passes the tile's place in the grid, and the integers that `of` computes, to the other warp groups; -1
    ends the loop. They release the stage after the body.
    fetches: set in one warp group, which fetches the number of each next tile from a counter of all programs. The first
    tile has the program's number, except in kernels whose programs wait for others (see ordered_add): these fetch
    it too, so that tiles start in order however many programs are resident.
    """

    pipeline: str = field(metadata=OPERAND)
    of: str
    body: str
    fetches: bool = False


@dataclass(frozen=True)
class ReloadTile(Op):
    """Reload the tile's place in the grid from the pipeline that passed it, so that no registers hold it while products
    run."""

    pipeline: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class PipelinedLoop(Op):
    """A software-pipelined loop over tiles: `first` runs for the first tile, `step` for each later one, and `last` once
    at the end. It visits the tiles of `partial`, then those of `full`. `step` has the class of its tile, and `first`
    the class partial. Without tiles nothing runs, and the results are the values of `carry`.

    var: the axis whose tiles are visited.
    partial, full: ranges of tiles that are masked and checked, and of tiles that are not.
    carry: the carried fields, each with its initial value.
    first: takes the carried fields and may yield more, which `step` takes and yields too. Without it `step` runs for
    all tiles.
    last: takes the fields of `step` and yields the results.
    listed: as in loop.
    tile_indices: the pipeline through which the indices of listed tiles may come.
    reversed: partial tiles are visited from the last to the first.
    instance_partial: the tiles that are partial for the instance's own rows, with BLOCK_Q the number of these rows. The
    instance's rows see none of the partial tiles behind these, and for them the partial tiles before these are full.
    skip: waits for and releases the tiles that the instance's rows do not see. These come first, before all others.
    in_order: tiles are visited by number, partial ones before and after the full ones.
    recompute: as in loop.
    heads: all iterations run once for each of these query heads, as in loop; with `by_tile`, for all heads at each
    tile.
    round_robin: instances of the warp group split the iterations by the stages of this pipeline. An instance runs those
    whose tile is in the stage with the instance's number, and skips the others without waiting.
    odd: iterations are counted from 0; `step` runs for even ones and `odd` for odd ones.
    pair: runs for two tiles at once, with the position of the second one; `step` runs for a last tile without a
    partner.
    """

    var: str
    partial: Ranges
    full: Ranges
    carry: Uses = field(metadata=OPERAND)
    first: str = ""
    step: str = ""
    last: str = ""
    listed: str | None = field(default=None, metadata=OPERAND)
    reversed: bool = False
    skip: str = ""
    instance_partial: Ranges = ()
    tile_indices: str | None = field(default=None, metadata=OPERAND)
    in_order: bool = False
    recompute: bool = False
    heads: Ranges = ()
    by_tile: bool = False
    round_robin: str | None = field(default=None, metadata=OPERAND)
    odd: str = ""
    pair: str = ""

    def field(self, arg: str, body: str) -> str:
        """The field that an argument of a body stands for: in @first and @last, names end in `_in_first` and
        `_in_last`."""
        return arg.removesuffix(f"_in_{body}")

    @property
    def bodies(self) -> tuple[str, ...]:
        return tuple(body for body in (self.first, self.step, self.last, self.skip, self.odd, self.pair) if body)


def bodies_of(op: Op) -> tuple[str, ...]:
    """The blocks that an op runs, except the block `of` of a work loop."""
    return op.bodies if isinstance(op, PipelinedLoop) else (op.body,) if isinstance(op, (Loop, WorkLoop)) else ()
