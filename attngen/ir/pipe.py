"""The ops of warp-specialized kernels: warp groups that run concurrently and pass tiles through pipelines in shared
memory.

A warp-specialized kernel replaces a portable kernel on one backend. After @entry come its warp groups: the producer
issues TMA loads into pipelines, and consumers read tiles from them. A pipeline is a circular buffer. Each of its stages
has two barriers, which are implicit in the IR: `full`, completed by a load and awaited by consumer_wait, and `empty`,
completed when all consumers have released the tile and awaited before the next load into that stage. Stages are used in
order: the n-th load, and the n-th wait of each consumer, are of stage n % stages.

A warp group, as in `warp_group @consumer instances(2) rows(64) warps(4)`, runs one block of ops. Several instances
may run it at the same time, here two of four warps each. So an instance that issues wgmma is what PTX calls a
warpgroup (128 threads), and the producer is a warp group of a single warp.

BLOCK_Q has two sizes, if the program axis is q (the same holds for BLOCK_KV, if it is kv), from warp-specialize on. In
the config, in the grid and in the scalars of @entry and @tile it is the program tile, such as 128 rows. In a warp group
with rows(64), from then on, it is the rows of one instance: in types, in instance_partial and in unswitch conditions;
`q_start` and `q_idx` are then the instance's rows, too. TILE_Q is the program tile in types of such a warp group (see
slice_rows). SLICE_Q and SLICE_QK are an instance's part of a product that the instances split (see reduce-dq); HALF_KV
is half a tile of keys (see split_halves).

Matrix products are asynchronous. `wgmma` issues one, whose result is @flight; `wgmma_wait` waits for it, and so for all
that were issued before it. Instances of a warp group may issue theirs alternately (ping-pong), so that one runs its
softmax while the products of another run: see scheduler_barrier.

Ops that order warp groups and run loops are in ir/pipe_control.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from attngen.ir.core import Access, Type
from attngen.ir.expr import Expr
from attngen.ir.fields import Ref, Refs, Uses, Word
from attngen.ir.op import Op
from attngen.ir.pipe_control import *  # noqa: F403  `pipe.WorkLoop` and the others
from attngen.ir.pipe_control import PIPE
from attngen.ir.tile import DropoutMask

PARTIALS = "_PARTIALS"  # dimension of the partial sums of a row, whose number a backend chooses (see partial_reduce)
PLACE = frozenset({"kv_idx", "kv_start"})  # symbols that depend on the position of a tile of keys
TILE_DIM = {"BLOCK_Q": "TILE_Q", "BLOCK_KV": "TILE_KV"}  # an instance's rows -> the program tile (all instances' rows)
# Dimension -> that of an instance's part of it, where instances split a product.
SLICE_DIM = {"BLOCK_Q": "SLICE_Q", "D_QK": "SLICE_QK"}
HALF_DIM = {"BLOCK_KV": "HALF_KV"}  # dimension -> that of the halves of a value (see split_halves)


class Types(Protocol):
    """A kernel, as the source of the types of values."""

    def type_of(self, ref: str) -> Type: ...


@PIPE.op("pipeline")
@dataclass(frozen=True)
class Pipeline(Op):
    """Declare a pipeline: `stages` buffers of a tile in shared memory. A pipeline of type `i32[]` carries the
    coordinates of work tiles (see work_loop), or with `metadata_of` the indices or starts of tiles. An output's staging
    buffer is declared as a pipeline, too: one stage, which only tma_store uses.

    per_instance: a warp group, each instance of which has its own buffers, for its part of the rows. A load fills the
    buffers of all instances, once the stage of each is empty.
    columns: a tile is stored in pieces of this many columns, one after another; the last piece is padded with zeros. A
    product over these columns is a sum of one product per piece. An accumulator with these columns is split into the
    same pieces.
    mbarrier_release: the empty barrier is an mbarrier that counts the consumers that have released the stage. Without
    it, the empty barrier is a named barrier at which consumers arrive and the producer syncs. A CTA has 16 of these,
    and only the producer and consumers with rows of the program tile use them (rule `fits`). The full barrier of a
    stage that TMA loads is an mbarrier in any case.
    exchange: two warp groups exchange tiles through the single stage, and each reads the tiles that the other has
    written. A write does not wait until the stage is empty, and a release prints no barrier: the warp groups alternate,
    so that a warp group writes only after it has read and released the other's tile, which the other wrote after it had
    read and released the tile before. The rule `protocol` refuses a kernel in which that fails.
    metadata_of: another pipeline, whose tile metadata this one holds: row vectors of the tile's keys, or its index or
    start as `i32[]`. It has as many stages, each of which is filled, waited for and released with that pipeline's
    stage.
    """

    type: Type
    stages: Expr
    per_instance: Word = ""
    columns: int = 0
    mbarrier_release: bool = False
    exchange: bool = False
    metadata_of: Ref | None = None


@PIPE.op("producer_load pipeline src", result=False)
@dataclass(frozen=True)
class ProducerLoad(Op):
    """Load a tile of `src` by TMA into the pipeline's next stage, once that is empty. Elements out of bounds are 0.
    Rows of a cache past the end of the sequence have arbitrary values, which the cache holds there.

    A load into a pipeline of metadata is not TMA: the 32 threads of the producer copy the row vector by cp.async, and
    cp.async.mbarrier.arrive ties the copies to the `full` mbarrier of the tile's stage. So that barrier completes only
    when the metadata is there, too, and no thread waits in between. The loads of a tile's metadata come right before
    the load of the tile.

    page: the number of the page that has the tile. The access then has no index for pages.
    early: issued before the kernel's entry computes scalars and starts the warp groups. Only the first loads of a warp
    group can be, whose place needs none of these scalars.
    """

    pipeline: Ref
    src: Access
    page: Ref | None = None
    early: bool = False


@PIPE.op("write_tile_index pipeline", result=False)
@dataclass(frozen=True)
class WriteTileIndex(Op):
    """Write the index of the loop's tile from a register to a pipeline of metadata. The load of the tile comes next:
    consumers read the index when that stage is full."""

    pipeline: Ref


@PIPE.op("load_tile_start")
@dataclass(frozen=True)
class LoadTileStart(Op):
    """Load where the loop's tile lies in the whole sequence, of which calls have chunks: one number of the call's
    starts. A load of the tile comes later, so the producer has the number before the tile's stage is free."""

    type: Type


@PIPE.op("write_tile_start pipeline value", result=False)
@dataclass(frozen=True)
class WriteTileStart(Op):
    """Write the number that load_tile_start loaded to a pipeline of metadata. The load of the tile comes next.

    when: `partial`, it is needed only for partial tiles, and for a full tile that @first of a pipelined loop masks (see
        masked_full_tiles); `always`, for all tiles. Loops of full tiles alone write none for others.
    """

    pipeline: Ref
    value: Ref
    when: Word = "always"


@PIPE.op("consumer_wait pipeline")
@dataclass(frozen=True)
class ConsumerWait(Op):
    """Wait until the pipeline's next stage is full. The result is its tile, which the consumer may read until it
    releases it."""

    pipeline: Ref
    type: Type


@PIPE.op("read_metadata pipeline")
@dataclass(frozen=True)
class ReadMetadata(Op):
    """Read the metadata of a tile, a row vector or its index, into registers, after the tile's consumer_wait and before
    its release.

    pipeline: the pipeline of the metadata.
    tile: the tile.
    """

    pipeline: Ref
    tile: Ref
    type: Type


@PIPE.op("read_tile_start pipeline", result=False)
@dataclass(frozen=True)
class ReadTileStart(Op):
    """Read where a tile lies in the whole sequence, after the tile's consumer_wait and before its release. The block's
    ops after it compute with this position of the loop's tile (`kv_start` and `kv_idx`, or `q_start` and `q_idx`).

    pipeline: the pipeline of metadata to which write_tile_start writes it.
    tile: the tile.
    when: as in write_tile_start; for other tiles the number is that of another tile.
    """

    pipeline: Ref
    tile: Ref
    when: Word = "always"


@PIPE.op("local_load value")
@dataclass(frozen=True)
class LocalLoad(Op):
    """Load a tile that has been waited for from shared memory to registers. A tile with one number per score may be
    transposed to the order of the scores' dimensions."""

    value: Ref
    type: Type


@PIPE.op("consumer_release value", result=False)
@dataclass(frozen=True)
class ConsumerRelease(Op):
    """Release a tile: this consumer does not read it again. The stage is empty when all consumers have released it."""

    value: Ref


@PIPE.op("zero_out_of_bounds value", result=False)
@dataclass(frozen=True)
class ZeroOutOfBounds(Op):
    """Set the rows of a tile of keys that are past the end of the sequence to 0, because a cache may hold NaN there.
    Only partial tiles have such rows. A fence (fence.proxy.async) and a barrier of the warp group follow, because wgmma
    reads the tile.

    Precondition: no other consumer has passed its consumer_wait for the tile, because each other consumer first waits
    for data that this one sends later (see exchange-p). The rule `protocol` checks that.
    """

    value: Ref


@PIPE.op("slice_rows value")
@dataclass(frozen=True)
class SliceRows(Op):
    """Select the instance's own rows of a tile that has the rows of all instances."""

    value: Ref
    type: Type


@PIPE.op("rematerialize value")
@dataclass(frozen=True)
class Rematerialize(Op):
    """Recompute the shared-memory address of a tile that was waited for before the loop, in each iteration, because
    registers are too few to keep it. The tile itself stays where it is."""

    value: Ref
    type: Type


@PIPE.op("producer_store pipeline value", result=False)
@dataclass(frozen=True)
class ProducerStore(Op):
    """Write the instance's part of a tile from registers to the pipeline's next stage, which is full when all instances
    have written theirs. The writers are consumers of other pipelines that here produce P, row sums, dS or dQ. The
    stores are followed by fence.proxy.async, because wgmma or TMA may read the tile.

    If another warp group consumes the tile, the write first waits until the stage is empty. If the instances themselves
    consume it, or the pipeline is an exchange, it does not wait: all have released the stage's previous tile before, as
    the rule `protocol` checks.

    value: the instance's rows; the whole tile if the warp group has one instance.
    metadata: pipelines of metadata of this one, each with the row vector that is written there.
    """

    pipeline: Ref
    value: Ref
    metadata: Uses = ()


@PIPE.op("producer_tail pipeline", result=False)
@dataclass(frozen=True)
class ProducerTail(Op):
    """Wait until every stage of a pipeline is empty. It comes last in the warp group that loads the pipeline, so that
    the CTA does not exit with arrivals pending at a barrier."""

    pipeline: Ref


@PIPE.op("wgmma a b")
@dataclass(frozen=True)
class Wgmma(Op):
    """Issue the matrix product of `a` and `b` over the dimension `over`, accumulated in fp32. Products finish in the
    order in which they are issued.

    acc: a value to which the product is added. If it is itself in flight, the product continues its accumulation, and
    one wait is for both.
    """

    a: Ref
    b: Ref
    over: Word
    type: Type
    acc: Ref | None = None


@PIPE.op("wgmma_wait value")
@dataclass(frozen=True)
class WgmmaWait(Op):
    """Wait for a product in flight and return its result.

    keep_alive: operands in registers that must not be overwritten before the wait: those of the product, and of each
    product whose accumulation it continues.
    """

    value: Ref
    type: Type
    keep_alive: Refs = ()


@PIPE.op("pack value")
@dataclass(frozen=True)
class Pack(Op):
    """Cast a value to the element type of q, k and v, two numbers per 32-bit register, at this place in the program:
    the compiler does not sink it to its use, as it would a plain cast."""

    value: Ref
    type: Type


@PIPE.op("convert_layout value")
@dataclass(frozen=True)
class ConvertLayout(Op):
    """Convert a value to another register layout without changing it.

    to: `scores`, the layout of the accumulator of scores, and of row vectors computed from it; `acc`, that of the
    output accumulator; `partials`, that of partial sums of rows (see partial_reduce); `operand`, that of a wgmma
    operand in registers.
    """

    value: Ref
    to: Word
    type: Type


@PIPE.op("pin_before_wait value")
@dataclass(frozen=True)
class PinBeforeWait(Op):
    """Return `value` unchanged, and keep its computation before the next wgmma_wait. `value` is a row vector, partial
    sums of rows, or a tile of weights.

    It is a fence against ptxas, which would sink arithmetic below the wait. It is printed as inline PTX with a branch
    to a nanosleep, past which ptxas moves no instruction. The branch depends on `value`, so `value` is computed before
    it. It would be taken only for negative numbers, so `value` should have none: a sleep would cost time. The result
    would be the same.
    """

    value: Ref
    type: Type


@PIPE.op("pin_after_wait value")
@dataclass(frozen=True)
class PinAfterWait(Op):
    """Return the row vector `value` unchanged, and keep computations that use it after the preceding wgmma_wait. It is
    a fence against LLVM, which would hoist them above the wait. It is printed as a `mov` in volatile inline PTX."""

    value: Ref
    type: Type


@PIPE.op("softmax_stats s")
@dataclass(frozen=True)
class SoftmaxStats(Op):
    """The row part of an online softmax update (see softmax_step): m', alpha, and `base`, the offset that
    softmax_weights subtracts. base = scale m' - shift. In a loop where `guard` applies, m' counts as 0 here for a row
    that has seen no key yet (m' = -inf).

    shift and guard: as in softmax_step.
    """

    s: Ref
    m: Ref
    type: Type
    scale: Ref | None = None
    guard: Word = "partial"
    shift: Ref | None = None

    def results(self) -> dict[str, Type]:
        return dict.fromkeys(("base", "alpha", "m"), self.type)


@PIPE.op("softmax_weights s")
@dataclass(frozen=True)
class SoftmaxWeights(Op):
    """Compute the unnormalized weights P of scores: 2^(scale s - base), with one `base` per row."""

    s: Ref
    base: Ref
    type: Type
    scale: Ref | None = None


@PIPE.op("partial_reduce value")
@dataclass(frozen=True)
class PartialReduce(Op):
    """Sum each row into _PARTIALS partial sums, each over every _PARTIALS-th column. Their sum is the row's sum."""

    value: Ref
    over: Word
    type: Type


@PIPE.op("scaled_iota value")
@dataclass(frozen=True)
class ScaledIota(Op):
    """Compute `value` times the position of each key in its tile, counted from 0. The result is the same in all tiles.

    kept: registers hold the results through the loop, except those of the last eight keys (one step of the accumulator
    layout: two columns for each of four threads), which are recomputed for each tile. Without it, all are recomputed.
    """

    value: Ref
    type: Type
    kept: bool = False


@PIPE.op("split_halves value")
@dataclass(frozen=True)
class SplitHalves(Op):
    """Split a value along the dimension `over` into `left`, the lower half of its positions, and `right`. `type` is the
    type of each half."""

    value: Ref
    over: Word
    type: Type

    def results(self) -> dict[str, Type]:
        return {"left": self.type, "right": self.type}


@PIPE.op("concat_halves a b")
@dataclass(frozen=True)
class ConcatHalves(Op):
    """Concatenate `a` and `b` along the dimension `over`."""

    a: Ref
    b: Ref
    over: Word
    type: Type


@PIPE.op("tma_store dst value", result=False)
@dataclass(frozen=True)
class TmaStore(Op):
    """Write a tile to the instance's stage of a pipeline, from which TMA stores it to `dst` later. The write first
    waits until TMA has read the tile of the previous tma_store. Rows and columns out of bounds are not stored.

    staging: the pipeline. With a stage of half the columns, such as `T[BLOCK_Q, 64]`, the halves go through it one
    after the other. In the backward, the gradient of a bias per score goes, transposed, through the stage in which that
    tile of the bias came: the stage of the instance's latest consumer_wait on this pipeline (see stage-score-bias).
    order: the program's semaphore order (see ordered_accumulate). If it is 0, TMA stores the tile; otherwise TMA adds
    it to the sum that is stored there. A semaphore_acquire precedes.
    recompute: addresses in the stage are computed at the store, so that no registers hold them from one work tile to
    the next.
    """

    dst: Access
    value: Ref
    staging: Ref
    order: Expr | None = None
    recompute: bool = False

    def is_of_scores(self, kernel: Types) -> bool:
        """True if it stores scores, which are transposed in the tensor and so in the stage."""
        return kernel.type_of(self.value).dims == kernel.type_of(self.staging).dims[::-1]


@PIPE.op("tma_store_wait staging", result=False)
@dataclass(frozen=True)
class TmaStoreWait(Op):
    """Wait until TMA has read, from shared memory, everything that this instance's tma_store ops have written there
    (cp.async.bulk.wait_group.read). Then the stage may be released or written again, and the warp group may end.

    It does not wait until the data has arrived in device memory. Later launches see the data because the kernel has
    ended, and programs that acquire the semaphore because semaphore_release waits.
    """

    staging: Ref


def needs_position(op: Op, axis: str) -> bool:
    """True if an op in a loop over an axis depends on the position of the loop's tile."""
    return isinstance(op, DropoutMask) or bool(op.symbols & {axis, f"{axis}_idx", f"{axis}_start"})
