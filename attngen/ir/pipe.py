"""The ops of warp-specialized kernels: warp groups that run concurrently and pass tiles through pipelines in shared
memory.

A warp-specialized kernel computes what the kernel that it stands in for does, for one backend. After @entry come its
warp groups: the producer issues TMA loads into pipelines, and consumers read tiles from them. A pipeline is a circular
buffer. Each of its stages has two barriers, which the text does not name: `full`, completed by a load and awaited by
consumer_wait, and `empty`, completed when all consumers have released the tile and awaited before the next load into
that stage. Stages are used in order: the n-th load, and the n-th wait of each consumer, are of stage n % stages.

Matrix products are asynchronous. `wgmma` starts one, whose result is @flight; `wgmma_wait` waits for it, and so for all
that were started before it. Instances of a warp group may start theirs alternately (ping-pong), so that one runs its
softmax while the products of another run: see scheduler_barrier.

Ops that order warp groups and run loops are in ir/pipe_control.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from attngen.ir.core import OPERAND, Access, Op, Type, Uses
from attngen.ir.expr import Expr
from attngen.ir.ops import KIND, OPS
from attngen.ir.pipe_control import (
    PipelinedLoop,
    ReloadTile,
    SchedulerBarrier,
    SemaphoreAcquire,
    SemaphoreRelease,
    WorkLoop,
)

PARTIALS = "PARTIALS"  # dimension of the partial sums of a row, whose number a backend chooses (see partial_reduce)
PLACE = frozenset({"kv_idx", "kv_start"})  # symbols that say where a tile of keys is
TILE_DIM = {"BLOCK_Q": "TILE_Q", "BLOCK_KV": "TILE_KV"}  # an instance's rows -> the rows of all instances
# Dimension -> that of an instance's part of it, where instances split a product.
SLICE_DIM = {"BLOCK_Q": "SLICE_Q", "D_QK": "SLICE_QK"}
HALF_DIM = {"BLOCK_KV": "HALF_KV"}  # dimension -> that of the halves of a value (see split_halves)


class Types(Protocol):
    """A kernel, as the source of the types of values."""

    def type_of(self, ref: str) -> Type: ...


@dataclass(frozen=True)
class Pipeline(Op):
    """Declare a pipeline: `stages` buffers of a tile in shared memory. One of `i32[]` passes tile indices (see
    work_loop).

    per_instance: a warp group, each instance of which has its own buffers, for its part of the rows. A load fills the
    buffers of all instances, once the stage of each is empty.
    columns: a tile is stored in pieces of this many columns, one after another; the last piece is padded with zeros. A
    product over the columns sums the products of the pieces; a product whose result has these columns has them in such
    pieces.
    mbarrier_release: an mbarrier counts the consumers that have released a stage. Other pipelines use named barriers,
    which are few and work only between consumers and the producer.
    exchange: two warp groups exchange tiles through the single stage, and each reads what the other has written. No
    write waits, because the program's other waits ensure that both have released the previous tile.
    metadata_of: another pipeline, whose tile metadata this one holds: row vectors of the tile's keys, or its index as
    `i32[]`. It has as many stages, each of which is filled, waited for and released with that pipeline's stage.
    """

    type: Type
    stages: Expr
    per_instance: str = ""
    columns: int = 0
    mbarrier_release: bool = False
    exchange: bool = False
    metadata_of: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class ProducerLoad(Op):
    """Load a tile of `src` by TMA into the pipeline's next stage, once that is empty. Elements out of bounds are 0, but
    rows of a cache past the end of the sequence are whatever the cache holds there. A pipeline of metadata is loaded by
    threads, which do not wait for it; the load of the tile comes next.

    page: the number of the page that has the tile. The access then has no index for pages.
    """

    pipeline: str = field(metadata=OPERAND)
    src: Access = field(metadata=OPERAND)
    page: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class WriteTileIndex(Op):
    """Write the index of the loop's tile to a pipeline of metadata. The load of the tile comes next."""

    pipeline: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class ConsumerWait(Op):
    """Wait until the pipeline's next stage is full. The result is its tile, which the consumer may read until it
    releases it."""

    pipeline: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class ReadMetadata(Op):
    """Read the metadata of a tile, a row vector or its index, into registers, after the tile's consumer_wait and before
    its release.

    pipeline: the pipeline of the metadata.
    tile: the tile.
    """

    pipeline: str = field(metadata=OPERAND)
    tile: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class LocalLoad(Op):
    """Load a tile that has been waited for from shared memory to registers. A tile with one number per score may be
    transposed to the order of the scores' dimensions."""

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class ConsumerRelease(Op):
    """Release a tile: this consumer reads it no more, and its stage is empty when all consumers have released it."""

    value: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class ZeroOutOfBounds(Op):
    """Set the rows of a tile of keys that are past the end of the sequence to 0, because a cache may hold NaN there.
    Only partial tiles have such rows. Other consumers may read the tile only afterwards."""

    value: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class SliceRows(Op):
    """Select the instance's own rows of a tile that has the rows of all instances."""

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Rematerialize(Op):
    """A tile that was waited for before the loop, with its address recomputed in each iteration, where registers are
    too few to keep it."""

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class ProducerStore(Op):
    """Write the instance's part of a tile from registers to the pipeline's next stage, which is full when all instances
    have written theirs. If another warp group consumes the tile, the write first waits until the stage is empty. If the
    instances themselves do, or the pipeline is an exchange, it does not wait, because the previous tile has been
    released.

    value: the instance's rows; the whole tile if the warp group has one instance.
    metadata: pipelines of metadata of this one, each with the row vector that is written there.
    """

    pipeline: str = field(metadata=OPERAND)
    value: str = field(metadata=OPERAND)
    metadata: Uses = field(default=(), metadata=OPERAND)


@dataclass(frozen=True)
class ProducerTail(Op):
    """Wait until every stage of a pipeline is empty. It is the last op of the warp group that fills the pipeline, so
    that no arrival is left without a wait."""

    pipeline: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class Wgmma(Op):
    """Start the matrix product of `a` and `b` over the dimension `over`, accumulated in fp32. Products finish in the
    order in which they are started.

    acc: a value to which the product is added. If it is itself in flight, the product continues its accumulation, and
    one wait is for both.
    """

    a: str = field(metadata=OPERAND)
    b: str = field(metadata=OPERAND)
    over: str
    type: Type
    acc: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class WgmmaWait(Op):
    """Wait for a product in flight and return its result.

    keep_alive: operands in registers that must not be overwritten before the wait: that of the product, and of each
    product whose accumulation it continues.
    """

    value: str = field(metadata=OPERAND)
    type: Type
    keep_alive: tuple[str, ...] = field(default=(), metadata=OPERAND)


@dataclass(frozen=True)
class Pack(Op):
    """Cast a value to the element type of q, k and v, two numbers per register, in the order of its computation."""

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class ConvertLayout(Op):
    """Convert a value to another register layout without changing it.

    to: `scores` (the accumulator of scores), `sums` (rows of the output accumulator), `chains` (partial sums of rows)
    or `operand` (a wgmma operand in registers).
    """

    value: str = field(metadata=OPERAND)
    to: str
    type: Type


@dataclass(frozen=True)
class PinBeforeWait(Op):
    """Return `value` unchanged, a row vector or a tile without negative numbers, and keep its computation before the
    next
    wgmma_wait: the compiler moves no instruction past it.
    """

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class PinAfterWait(Op):
    """Return the row vector `value` unchanged, and keep computations that use it after the preceding wgmma_wait: the
    compiler does not hoist them to where products are in flight."""

    value: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class SoftmaxStats(Op):
    """The row part of an online softmax update (see softmax_step): m', alpha, and `base`, which softmax_weights
    subtracts. base = scale m' - shift, where m' counts as 0 if the guard holds and the row has seen no key yet.

    shift and guard: as in softmax_step.
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
    """Compute the weights of scores, 2^(scale s - base), with one `base` per row."""

    s: str = field(metadata=OPERAND)
    base: str = field(metadata=OPERAND)
    type: Type
    scale: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class PartialReduce(Op):
    """Sum each row into PARTIALS partial sums, each over every PARTIALS-th column. Their sum is the row's sum."""

    value: str = field(metadata=OPERAND)
    over: str
    type: Type


@dataclass(frozen=True)
class ScaledIota(Op):
    """Compute `value` times the position of each key in its tile, counted from 0. The result is the same in all tiles.

    kept: registers hold the numbers of all keys except the last eight, which are recomputed for each tile.
    """

    value: str = field(metadata=OPERAND)
    type: Type
    kept: bool = False


@dataclass(frozen=True)
class SplitHalves(Op):
    """Split a value along the dimension `over` into `left`, the lower half of its positions, and `right`. `type` is the
    type of each half."""

    value: str = field(metadata=OPERAND)
    over: str
    type: Type

    def results(self) -> dict[str, Type]:
        return {"left": self.type, "right": self.type}


@dataclass(frozen=True)
class ConcatHalves(Op):
    """Concatenate `a` and `b` along the dimension `over`."""

    a: str = field(metadata=OPERAND)
    b: str = field(metadata=OPERAND)
    over: str
    type: Type


@dataclass(frozen=True)
class TmaStore(Op):
    """Write a tile to the instance's stage of a pipeline, from which TMA stores it to `dst` later. The write first
    waits until TMA has read what the previous tma_store wrote. Rows and columns out of bounds are not stored.

    staging: the pipeline. With a stage of half the columns, such as `T[BLOCK_Q, 64]`, the halves go through it one
    after the other. A tile of scores goes transposed through the stage that the instance has waited for last.
    order: the tile is stored in the program's place in the order (see ordered_accumulate); if it is not 0, TMA adds the
    tile to what is there.
    """

    dst: Access = field(metadata=OPERAND)
    value: str = field(metadata=OPERAND)
    staging: str = field(metadata=OPERAND)
    order: Expr | None = None

    def is_of_scores(self, kernel: Types) -> bool:
        """Whether it stores scores, which are transposed in the tensor and so in the stage."""
        return kernel.type_of(self.value).dims == kernel.type_of(self.staging).dims[::-1]


@dataclass(frozen=True)
class TmaStoreWait(Op):
    """Wait until TMA has read everything that this warp group's tma_store ops have written: before the stage is
    released, or at the end of the warp group."""

    staging: str = field(metadata=OPERAND)


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
