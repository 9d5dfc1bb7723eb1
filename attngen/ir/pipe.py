"""The ops of divided kernels: roles that run beside each other, and pass tiles through rings in shared memory.

A divided kernel computes what the kernel of its name does, by the means of one backend. After @entry come its roles:
the producer has the copy engine fill rings, consumers take tiles from them. Each slot of a ring has two barriers that
no text names: `full`, which a fill completes and a take awaits, and `free`, which all takers complete when they give
the tile back, and the next fill of the slot awaits. Slots are used in turn: the n-th fill, and the n-th take of each
taker, is of slot n % slots.

Products are asynchronous. `issue` starts one, whose result is @flight; `await` waits for it, and so for all that were
issued before. Copies of a role may issue theirs in turns, so that one computes while the products of another run: see
Turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from attngen.ir.expr import Expr
from attngen.ir.ops import KIND, OPERAND, OPS, Access, Loop, Op, Type, Uses

Ranges = tuple[tuple[Expr, Expr], ...]
PARTIALS = "PARTIALS"  # dimension of the sums of a row, whose number a backend chooses (see Chains)
PLACE = frozenset({"kv_idx", "kv_start"})  # symbols that say where a tile of keys is
WHOLE = {"BLOCK_Q": "TILE_Q", "BLOCK_KV": "TILE_KV"}  # dimension of a copy's own rows -> that of those of all copies
PARTS = {
    "BLOCK_Q": "PART_Q",
    "D_QK": "PART_QK",
}  # dimension -> that of a copy's part of it, where copies divide a product
HALVES = {"BLOCK_KV": "HALF_KV"}  # dimension -> that of the halves of a value (see Halve)


class Types(Protocol):
    """What knows the types of values: a kernel."""

    def type_of(self, ref: str) -> Type: ...


@dataclass(frozen=True)
class Pipeline(Op):
    """`stages` buffers of a tile in shared memory. With `each`, every copy of that role has a ring of its own, for its
    part of the rows.

    All these are filled together, once the slot of each is free. A ring of `i32[]` passes places of tiles (see Work).

    With `columns`, a tile lies in pieces of so many columns, one after another. A product over the columns adds up
    those of the pieces; one whose own columns they are has its columns in such pieces. Where the last piece reaches
    beyond the tensor, it ends with zeros.

    With `beside`, it has numbers of keys: as many slots as that ring, each filled, taken and given back with the slot
    of that ring. One of `i32[]` has the number of the tile there.

    With `counted`, a barrier in shared memory counts who has given a slot back. Named barriers do that for other rings:
    they are few, and for consumers and the producer alone.

    With `relay`, two roles share tiles through its one slot, and each takes what the other has shared. Nobody waits to
    write: the program's other waits are such that every tile has been given back when the next one is written.
    """

    type: Type
    stages: Expr
    per_instance: str = ""
    columns: int = 0
    mbarrier_release: bool = False
    exchange: bool = False
    beside: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class ProducerLoad(Op):
    """Have the copy engine copy a tile to the ring's next slot, once that is free. Elements out of bounds are 0.

    A ring that lies beside another one is filled by threads, which do not wait for it. The fill of that ring's slot
    comes next.

    Of a cache, rows past the end of the sequence are what lies there. With `page`, that is the number of the page in
    which the tile is, and the access has no index for pages.
    """

    pipeline: str = field(metadata=OPERAND)
    src: Access = field(metadata=OPERAND)
    page: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class WriteTileIndex(Op):
    """Write the number of the loop's tile to a ring that lies beside that of the tile. The fill of the tile comes
    next."""

    pipeline: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class ConsumerWait(Op):
    """The tile in the ring's next slot, once it is full. It is the taker's until it gives it back."""

    pipeline: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class ReadMetadata(Op):
    """The numbers in the slot of a ring that lies beside that of a tile, in registers. The tile is taken, and not
    given back yet."""

    pipeline: str = field(metadata=OPERAND)
    beside: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class LocalLoad(Op):
    """The numbers of a taken tile, in registers. Of one for each score, in the order of the scores' dimensions,
    which may be transposed."""

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class ConsumerRelease(Op):
    """Give a taken tile back: nothing reads it any more, and its slot is free when all takers have done so."""

    value: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class ZeroOutOfBounds(Op):
    """Set rows of a taken tile of keys to 0 that are past the end of the sequence: what a cache has there may be no
    number.

    Only partial tiles have such rows. Others may take the tile after that alone.
    """

    value: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class SliceRows(Op):
    """The copy's own rows of a taken tile that has those of all copies."""

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Rematerialize(Op):
    """The same tile, taken before the loop. Its address is computed in each turn, where registers are too few to
    keep it."""

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class ProducerStore(Op):
    """Write the copy's own part of a tile to the ring's next slot. The slot is full when all copies have.

    If another role takes from the ring, it first waits until that has given the slot back. If the copies themselves do,
    nobody waits: each has given back what was there before it writes. So it is with a ring in relay.

    A role of one copy writes the whole tile. `beside` has rings that lie beside that one, with the rows that are
    written there.
    """

    pipeline: str = field(metadata=OPERAND)
    value: str = field(metadata=OPERAND)
    beside: Uses = field(default=(), metadata=OPERAND)


@dataclass(frozen=True)
class ProducerTail(Op):
    """Wait until every slot of a ring is free: the last op of a role that fills it, so that no arrival is left
    unawaited."""

    pipeline: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class Wgmma(Op):
    """Start a matrix product over a named dimension, accumulated in fp32; with an `acc`, added to that. Products finish
    in this order.

    If `acc` is itself in flight, the product goes on from it: one await is for both.
    """

    a: str = field(metadata=OPERAND)
    b: str = field(metadata=OPERAND)
    over: str
    type: Type
    acc: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class WgmmaWait(Op):
    """The result of a product in flight, once it is there.

    `holds` is its operand in registers, which nothing may overwrite before; of products that go on from one another,
    that of each.
    """

    value: str = field(metadata=OPERAND)
    type: Type
    keep_alive: tuple[str, ...] = field(default=(), metadata=OPERAND)


@dataclass(frozen=True)
class Pack(Op):
    """A value cast to the tensors' element type, two numbers to a register, in the order in which it is computed."""

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class ConvertLayout(Op):
    """The same value, in the registers of other threads: spread as `to`, which is `scores`, `sums`, `chains` or
    `operand`."""

    value: str = field(metadata=OPERAND)
    to: str
    type: Type


@dataclass(frozen=True)
class PinBeforeWait(Op):
    """The same numbers, of rows or of a tile, none negative. What computes them comes before the next await: no
    compiler moves it past."""

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class PinAfterWait(Op):
    """The same row of numbers. What is computed of it comes after the await before it: no compiler moves it up to
    where products run."""

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class SoftmaxStats(Op):
    """What one online softmax update (see SoftmaxStep) computes of rows: m', alpha, and `base`, which weights are
    measured from.

    base = scale m', or 0 where the guard holds and the row has seen no key yet; less the shift. The weights are
    2^(scale s - base): see Weigh.
    """

    s: str = field(metadata=OPERAND)
    m: str = field(metadata=OPERAND)
    type: Type
    scale: str | None = field(default=None, metadata=OPERAND)
    guard: str = "partial"
    shift: str | None = field(default=None, metadata=OPERAND)

    def results(self) -> dict[str, Type]:
        return dict.fromkeys(("base", "alpha", "m"), self.type)


@dataclass(frozen=True)
class SoftmaxWeights(Op):
    """The weights of scores: 2^(scale s - base), with one `base` for each row."""

    s: str = field(metadata=OPERAND)
    base: str = field(metadata=OPERAND)
    type: Type
    scale: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class PartialReduce(Op):
    """Sums of each row, of which each has its share of the columns: every PARTIALS-th one. Their sum is that of the
    row."""

    value: str = field(metadata=OPERAND)
    over: str
    type: Type


@dataclass(frozen=True)
class ScaledIota(Op):
    """Numbers of a tile's keys: the number `value` times a key's place in the tile, from 0 on.

    They are the same in all tiles. If they are `kept`, registers hold those of all keys but the last eight.
    """

    value: str = field(metadata=OPERAND)
    type: Type
    kept: bool = False


@dataclass(frozen=True)
class SplitHalves(Op):
    """The two halves of a value along a dimension, the lower half of its positions first. `type` is that of each."""

    value: str = field(metadata=OPERAND)
    over: str
    type: Type

    def results(self) -> dict[str, Type]:
        return {"left": self.type, "right": self.type}


@dataclass(frozen=True)
class ConcatHalves(Op):
    """The value whose halves along a dimension are `a` and `b`."""

    a: str = field(metadata=OPERAND)
    b: str = field(metadata=OPERAND)
    over: str
    type: Type


@dataclass(frozen=True)
class SchedulerBarrier(Op):
    """Take turns with the other copies of the role, by one named barrier for each copy; `do` says what:

    start  the last copy passes to copy 0, whose turn comes first; other copies do nothing
    take   wait until the copy before has passed to this one; that of copy 0 is the last copy
    pass   hand over to the next copy, without waiting for it
    end    copy 0 takes once more, so that no pass is left unawaited; other copies do nothing
    """

    do: str


@dataclass(frozen=True)
class SemaphoreAcquire(Op):
    """Wait for the program's turn to store tiles (see Merge), or to add to one (see Add): until so many programs have
    had theirs.

    Each copy of a role with rows takes turns for its own. One whose rows all lie past the end takes none, here and in
    Raise.
    """

    semaphore: Access = field(metadata=OPERAND)
    order: Expr


@dataclass(frozen=True)
class SemaphoreRelease(Op):
    """Say that this program has had its turn (see Add and Merge): the next one's comes. In a divided kernel no add does
    so itself.

    In a role of several copies each takes turns for its own rows (see Follow).
    """

    semaphore: Access = field(metadata=OPERAND)


@dataclass(frozen=True)
class TmaStore(Op):
    """Write a tile to the calling copy's slot of a ring, from which the copy engine stores it later: `flush` waits for
    that.

    It first waits until the copy engine has read what the last put wrote. Rows and columns out of bounds are left out.
    Through a slot of half the columns, such as `T[BLOCK_Q, 64]`, the halves go one after the other.

    order: it is stored in the program's turn (see Merge). Where that is not 0, the copy engine adds it to what is
    there. A tile of scores goes through the slot that the copy has taken last, in the order of the tensor's dimensions.
    """

    dst: Access = field(metadata=OPERAND)
    value: str = field(metadata=OPERAND)
    staging: str = field(metadata=OPERAND)
    order: Expr | None = None

    def is_of_scores(self, kernel: Types) -> bool:
        """Whether it writes numbers of scores, which lie transposed in the tensor, and so in the slot."""
        return kernel.type_of(self.value).dims == kernel.type_of(self.staging).dims[::-1]


@dataclass(frozen=True)
class TmaStoreWait(Op):
    """Wait until the copy engine has read all that this role's puts have written: before their slot is given back,
    or at the role's end."""

    staging: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class WorkLoop(Op):
    """Run `body` for each tile of the grid that the program gets. Before it `of` computes what all roles know of a
    tile.

    Programs stay until no tile is left. A program's number is that of its first tile. In one role `draws` is set: it
    takes the number of each next tile from a counter that all programs share. Before it starts a tile it passes the
    tile's place through the ring, with the integers that `of` computes; at the end it passes -1. The other roles take
    these from there, and give the slot back after the body.

    Programs that wait for others (see Add) draw their first tile, too: so tiles are started in their order, however
    many programs there is room for.
    """

    pipeline: str = field(metadata=OPERAND)
    of: str
    body: str
    draws: bool = False


@dataclass(frozen=True)
class ReloadTile(Op):
    """Read the place of the tile anew, from the ring that passed it: so no registers hold it while products run."""

    pipeline: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class PipelinedLoop(Op):
    """A loop over tiles whose turns overlap: `first` for the first tile, `step` for each later one, and at the end
    `last`.

    The tiles are those of `partial`, then those of `full`; in `step` they have these classes, `first` is of class
    partial. If there are none, nothing runs, and the results are what `carry` names. `first` takes the carried fields
    and may yield more, which `step` takes and yields too; `last` takes these and yields the results. Where `step` is
    alone, all turns are its. If tiles are listed, their numbers may come with them, through the ring `places`.

    With `backwards`, partial tiles come from the last to the first. `own_partial` are those that are partial for the
    copy's own rows, whose number is BLOCK_Q here. The copy sees nothing of the tiles behind these. It comes to them
    first: `skip` takes them and gives them back, and the other bodies have the turns after that. Tiles before its own
    partial ones are full for the copy.

    With `in_order`, tiles come by their numbers: full ones follow one another, and partial ones are before and behind
    them. With `recompute`, values that do not change from turn to turn are computed again in each turn, as in a loop
    (see ops.Loop). With `heads`, all these turns come once for each of these query heads, as in a loop; with `by_tile`,
    for all of them at each tile. With `round_robin`, copies of the role share the turns: a copy has those whose tile is
    in the slot of its own number in this ring, and passes over the others. It waits for nothing there.

    With `odd`, turns are counted from 0: `step` is for the even ones, `odd` for the others. With `pair`, two tiles have
    one turn, `pair`, whose place is that of the second one; `step` is for a last tile that has none after it.
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
    """The blocks that an op runs, but for what comes before each tile."""
    return op.bodies if isinstance(op, PipelinedLoop) else (op.body,) if isinstance(op, (Loop, WorkLoop)) else ()


PIPE_OPS: dict[str, type[Op]] = {
    "pipeline": Pipeline,
    "producer_load": ProducerLoad,
    "write_tile_index": WriteTileIndex,
    "consumer_wait": ConsumerWait,
    "read_metadata": ReadMetadata,
    "local_load": LocalLoad,
    "consumer_release": ConsumerRelease,
    "zero_out_of_bounds": ZeroOutOfBounds,
    "slice_rows": SliceRows,
    "rematerialize": Rematerialize,
    "producer_store": ProducerStore,
    "producer_tail": ProducerTail,
    "wgmma": Wgmma,
    "wgmma_wait": WgmmaWait,
    "pack": Pack,
    "convert_layout": ConvertLayout,
    "pin_before_wait": PinBeforeWait,
    "pin_after_wait": PinAfterWait,
    "softmax_stats": SoftmaxStats,
    "softmax_weights": SoftmaxWeights,
    "partial_reduce": PartialReduce,
    "scaled_iota": ScaledIota,
    "split_halves": SplitHalves,
    "concat_halves": ConcatHalves,
    "scheduler_barrier": SchedulerBarrier,
    "semaphore_acquire": SemaphoreAcquire,
    "semaphore_release": SemaphoreRelease,
    "tma_store": TmaStore,
    "tma_store_wait": TmaStoreWait,
    "work_loop": WorkLoop,
    "reload_tile": ReloadTile,
    "pipelined_loop": PipelinedLoop,
}
PIPE_KIND = {cls: kind for kind, cls in PIPE_OPS.items()}
ALL_OPS = {**OPS, **PIPE_OPS}
ALL_KINDS = {**KIND, **PIPE_KIND}
