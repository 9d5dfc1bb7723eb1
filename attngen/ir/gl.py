"""The ops of Gluon statements: mbarriers and named barriers, TMA, views of shared memory, counters, branches and loops.

Passes of a target make them from ops of the dialect pipe, and each is printed as one line, or as one line and its body.
Arrays of buffers and barriers are values. Variables that change, such as the next stage of a pipeline, are not: `let`
and `next_stage` assign them, and expressions name them.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from attngen.ir.core import Access, Type
from attngen.ir.expr import Bool, Expr
from attngen.ir.fields import BlockName, Exprs, Ref, Text, Word
from attngen.ir.op import Dialect, Op
from attngen.ir.pipe import PIPE

GL = Dialect("gl", uses=PIPE.ops.values())

# ------------------------------------------------------------------ allocation


@GL.op("alloc_shared")
@dataclass(frozen=True)
class AllocShared(Op):
    """Allocate `count` buffers in shared memory. Elements of type `T` have the layout of wgmma's operands.

    shape: of a buffer; empty for one number.
    like: the tensor whose element type and layout the buffers have, because TMA copies tiles of it.
    """

    count: Expr
    shape: Exprs
    type: Type
    like: Word = ""


@GL.op("alloc_mbarriers")
@dataclass(frozen=True)
class AllocMbarriers(Op):
    """Allocate `count` mbarriers in shared memory."""

    count: Expr


@GL.op("named_barriers")
@dataclass(frozen=True)
class NamedBarriers(Op):
    """Declare `count` named barriers.

    first: the number of the first one. The pass assign-barriers gives it.
    at_end: they have the largest numbers, not the smallest that are left.
    """

    count: Expr
    first: Expr | None = None
    at_end: bool = False


@GL.op("mbarrier_init barrier", result=False)
@dataclass(frozen=True)
class MbarrierInit(Op):
    """Initialise an mbarrier whose phase completes after `arrivals` arrivals."""

    barrier: Ref
    index: Expr
    arrivals: int


# ------------------------------------------------------------------ barriers


@GL.op("mbarrier_expect barrier", result=False)
@dataclass(frozen=True)
class MbarrierExpect(Op):
    """Arrive at an mbarrier, and let its phase also wait for a number of bytes that TMA will have copied."""

    barrier: Ref
    index: Expr
    bytes: Expr


@GL.op("mbarrier_arrive barrier", result=False)
@dataclass(frozen=True)
class MbarrierArrive(Op):
    """Arrive at an mbarrier, once for all threads of the warp group."""

    barrier: Ref
    index: Expr


@GL.op("mbarrier_wait barrier", result=False)
@dataclass(frozen=True)
class MbarrierWait(Op):
    """Wait until a phase of an mbarrier has completed. `phase` is its parity.

    note: a comment.
    """

    barrier: Ref
    index: Expr
    phase: Expr
    note: Text = ""


@GL.op("named_arrive barrier", result=False)
@dataclass(frozen=True)
class NamedArrive(Op):
    """Arrive at a named barrier, without waiting.

    threads: how many threads take part in the barrier; 0 for the consumers and the producer together.
    early: ptxas may move arithmetic past it.
    """

    barrier: Ref
    index: Expr
    threads: Expr = sympy.Integer(0)
    early: bool = False
    note: Text = ""


@GL.op("named_sync barrier", result=False)
@dataclass(frozen=True)
class NamedSync(Op):
    """Wait at a named barrier until all of its threads have arrived. `threads` is as in named_arrive."""

    barrier: Ref
    index: Expr
    threads: Expr = sympy.Integer(0)
    note: Text = ""


@GL.op("fence_async", result=False)
@dataclass(frozen=True)
class FenceAsync(Op):
    """Order stores to shared memory before reads of it by TMA and wgmma (fence.proxy.async)."""


# ------------------------------------------------------------------ variables and control


@GL.op("let var", result=False)
@dataclass(frozen=True)
class Let(Op):
    """Assign integers to variables, at the same time."""

    var: Word
    expr: Expr
    note: Text = ""


@GL.op("comment", result=False)
@dataclass(frozen=True)
class Comment(Op):
    """A comment on a line of its own."""

    text: Text


@GL.op("counters", result=False)
@dataclass(frozen=True)
class Counters(Op):
    """Start the counters of a pipeline: its next stage, and `count`, the phase of that stage or a number of loads.

    stage: empty if the pipeline has one stage.
    """

    stage: Word = ""
    count: Word = ""
    start: int = 0


@GL.op("next_stage", result=False)
@dataclass(frozen=True)
class NextStage(Op):
    """Go on to a pipeline's next stage, and flip `phase` after the last one.

    stage: empty if the pipeline has one stage.
    """

    phase: Word
    stages: Expr
    stage: Word = ""


@GL.op("next_load", result=False)
@dataclass(frozen=True)
class NextLoad(Op):
    """Go on to the next stage that the producer loads, and count the load."""

    loads: Word
    stages: Expr
    stage: Word = ""


@GL.op("if", result=False)
@dataclass(frozen=True)
class If(Op):
    """Run `body` if a condition holds, and otherwise `orelse`."""

    where: Bool
    body: BlockName
    orelse: BlockName = ""
    note: Text = ""


@GL.op("static_for var", result=False)
@dataclass(frozen=True)
class StaticFor(Op):
    """Run `body` for each number below `count`, unrolled."""

    var: Word
    count: Expr
    body: BlockName


@GL.op("for var", result=False)
@dataclass(frozen=True)
class For(Op):
    """Run `body` for each number below `count`."""

    var: Word
    count: Expr
    body: BlockName


# ------------------------------------------------------------------ shared memory


@GL.op("smem_view smem")
@dataclass(frozen=True)
class SmemView(Op):
    """View a buffer in shared memory as a tile.

    index: of the tile.
    pieces: buffers of a tile, one for each piece of its columns.
    opaque: the address is computed here, and not kept in registers.
    """

    smem: Ref
    index: Expr
    type: Type
    pieces: int = 1
    opaque: bool = False


@GL.op("smem_rows value")
@dataclass(frozen=True)
class SmemRows(Op):
    """The instance's own rows of a tile in shared memory."""

    value: Ref
    type: Type


@GL.op("smem_load smem")
@dataclass(frozen=True)
class SmemLoad(Op):
    """Load a row vector of shared memory to registers, in the layout of scores without the dimension `axis`."""

    smem: Ref
    index: Expr
    axis: int
    type: Type


@GL.op("smem_store smem value", result=False)
@dataclass(frozen=True)
class SmemStore(Op):
    """Store a value from registers to a buffer in shared memory.

    shape: of the buffer, if that has dimensions of length 1 before those of the tile.
    rows: only to the instance's own rows of the buffer.
    transposed: to the transposed buffer.
    piece, columns: as in smem_store_acc.
    opaque: as in smem_view.
    """

    smem: Ref
    value: Ref
    index: Expr
    shape: Exprs = ()
    rows: bool = False
    transposed: bool = False
    piece: Word = ""
    columns: Exprs = ()
    opaque: bool = False


@GL.op("smem_store_acc smem value", result=False)
@dataclass(frozen=True)
class SmemStoreAcc(Op):
    """Store a wgmma accumulator of fp32 to a buffer in shared memory that TMA reads, without bank conflicts.

    piece: the piece of the accumulator, or half of a piece as in `0_left`; empty for all of it.
    columns: the first column of the piece among those of the value, and how many it has.
    layout: of what is stored.
    """

    smem: Ref
    value: Ref
    index: Expr
    shape: Exprs
    layout: Word
    piece: Word = ""
    columns: Exprs = ()


@GL.op("split_piece value", result=False)
@dataclass(frozen=True)
class SplitPiece(Op):
    """Split a piece of an accumulator into halves of its columns."""

    value: Ref
    piece: Word


@GL.op("smem_reinterpret smem")
@dataclass(frozen=True)
class SmemReinterpret(Op):
    """View a buffer as `count` buffers of another shape, in the layout of the tensor `like`."""

    smem: Ref
    index: Expr
    count: int
    shape: Exprs
    like: Word
    type: Type


@GL.op("write_index smem", result=False)
@dataclass(frozen=True)
class WriteIndex(Op):
    """Write one integer to shared memory."""

    smem: Ref
    index: Expr
    value: Expr


@GL.op("read_index var smem", result=False)
@dataclass(frozen=True)
class ReadIndex(Op):
    """Read one integer from shared memory to a variable, in a warp group of `warps` warps."""

    var: Word
    smem: Ref
    index: Expr
    warps: int = 4


@GL.op("gl_write_tile_start smem value", result=False)
@dataclass(frozen=True)
class WriteTileStart(Op):
    """Write the position of a tile, as write_tile_start does, to shared memory."""

    smem: Ref
    value: Ref
    index: Expr
    when: Word = "always"


@GL.op("gl_read_tile_start smem", result=False)
@dataclass(frozen=True)
class ReadTileStart(Op):
    """Read the position of a tile, as read_tile_start does, from shared memory."""

    smem: Ref
    index: Expr
    when: Word = "always"


# ------------------------------------------------------------------ copies


@GL.op("tma_load tensor", result=False)
@dataclass(frozen=True)
class TmaLoad(Op):
    """Copy a tile from a tensor to a buffer by TMA, which arrives with its bytes at an mbarrier.

    place: coordinates of the tile's first element; without that of its page, if it has a `page`.
    """

    tensor: Ref
    place: Exprs
    barrier: Ref
    index: Expr
    smem: Ref
    buffer: Expr
    page: Ref | None = None


@GL.op("copy_row src", result=False)
@dataclass(frozen=True)
class CopyRow(Op):
    """Copy the row vector of a tile to a buffer by cp.async, which arrives at an mbarrier. Rows from `left` on are 0.

    src: the vector's row; its last index is the first row of the tile.
    """

    src: Access
    left: Expr
    barrier: Ref
    index: Expr
    smem: Ref


@GL.op("tma_write tensor", result=False)
@dataclass(frozen=True)
class TmaWrite(Op):
    """Copy a buffer to a tile of a tensor by TMA, or add it there.

    order: the tile is stored if it is 0, and added otherwise; without it the tile is stored.
    opaque: as in smem_view.
    """

    tensor: Ref
    place: Exprs
    smem: Ref
    buffer: Expr
    order: Expr | None = None
    opaque: bool = False


@GL.op("tma_write_wait", result=False)
@dataclass(frozen=True)
class TmaWriteWait(Op):
    """Wait until TMA has read the buffers of all earlier tma_write ops of this warp.

    relaxed: by inline PTX, after which the warp's threads meet.
    """

    relaxed: bool = False
    note: Text = ""


# ------------------------------------------------------------------ semaphores in device memory


@GL.op("wait_semaphore counter", result=False)
@dataclass(frozen=True)
class WaitSemaphore(Op):
    """Wait until a semaphore equals `order`. `seen` is a value of it that was read before, or 0."""

    counter: Access
    order: Expr
    seen: Expr = sympy.Integer(0)


@GL.op("read_semaphore var counter", result=False)
@dataclass(frozen=True)
class ReadSemaphore(Op):
    """Read a semaphore to a variable."""

    var: Word
    counter: Access


@GL.op("increment_semaphore counter", result=False)
@dataclass(frozen=True)
class IncrementSemaphore(Op):
    """Wait until all stores of this warp have been done, and add 1 to a semaphore."""

    counter: Access
