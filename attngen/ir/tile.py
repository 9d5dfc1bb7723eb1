"""The ops of tile-level kernels.

An op's docstring states its result and the meaning of its fields. Dimensions are names (`BLOCK_Q`, `BLOCK_KV`, `D_QK`,
`D_V`, ...), so dot products and broadcasts are checked by name, not by size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import sympy

from attngen.ir.core import Access, Type
from attngen.ir.dims import MEMBER
from attngen.ir.expr import Bool, Expr
from attngen.ir.fields import BlockName, Checks, Exprs, Facts, Ranges, Ref, Uses, Word
from attngen.ir.op import Dialect, Op

TILE = Dialect("tile")


@TILE.op("arg role")
@dataclass(frozen=True)
class Arg(Op):
    """A parameter of a kernel, of a host program, or of a loop body.

    role: `in`, `out` and `inout` are tensors that the kernel reads, writes, or both; `scalar` is a number; `carry` is a
    carried field of a loop body. A `scratch` tensor is private to the kernel: each program writes its own part and
    reads it back. A `sum` tensor is an accumulator: the host sets it to 0 before the launch, and programs add to it.
    """

    role: Word
    type: Type


@TILE.op("base src")
@dataclass(frozen=True)
class Base(Op):
    """Compute the pointer to the first row of one (batch, head) of a tensor, in 64-bit arithmetic."""

    src: Access
    type: Type


@TILE.op("load src")
@dataclass(frozen=True)
class Load(Op):
    """Load a tile of the tensor `src`. In a loop, a tile in shared memory has `num_stages` buffers.

    check: pairs (axis, `always` or `partial`): bounds along the axis are checked in all loops, or only in loops of
    class partial (see Loop.cls).
    other: the value of elements out of bounds.
    via: `descriptor`: if the config has `TMA=1`, TMA loads the tile by a descriptor of the tensor, and checks its
    bounds; otherwise the tile is loaded by pointers.
    pages: for each row of the tile, the number of its page in a paged KV cache. The tensor's dimensions are then pages,
    heads, rows of a page, columns, and the access has no index for the page: row i of the sequence is row
    i % (page length) of page `pages[i]`.
    columns_of: another load of the same tile with all columns (see split-d). This load reads the program's own columns
    again from memory. If the config gives each program all columns, it loads nothing, and its result is that tile.
    needed: at most one (start, end), a range of rows along the loop's axis, set by limit-loads. A row outside it is
    masked for every query of the program tile. Where the axis is checked, such a row reads as `other`; only TMA from a
    tensor that is not a cache loads it as it is.
    """

    src: Access
    type: Type
    check: Checks = ()
    other: Expr = sympy.Integer(0)
    via: Word = ""
    pages: Ref | None = None
    columns_of: Ref | None = None
    needed: Ranges = ()


@TILE.op("cache_length src")
@dataclass(frozen=True)
class CacheLength(Op):
    """Compute the number of keys of the program's sequence in the KV cache: min(Nc, max(0, len[b] + Nn)), where `src`
    is len, the length before the call, `Nn` the number of keys that the call appends, and `Nc` the rows that the cache
    has per sequence. The value is named `Nk`: in kernels without a cache, that is the size with the number of keys."""

    src: Access
    type: Type


@TILE.op("gather src")
@dataclass(frozen=True)
class Gather(Op):
    """Load one element of the tensor `src` for each element of the result, at computed indices.

    uses: the values that the symbols in the indices and in `where` stand for.
    where: condition on each element; the result is 0 where it is false.
    """

    src: Access
    uses: Uses
    type: Type
    where: Bool = sympy.true


@TILE.op("list_position src")
@dataclass(frozen=True)
class ListPosition(Op):
    """Compute the position of the tile `tile` in a row of a block list: the number of listed tiles before it. Positions
    increase with tiles, so bounds on ranges of tiles also hold for ranges of positions.

    If calls have chunks of a sequence, the tiles of these chunks are such a list: then `tile` is a tile of the whole
    sequence, and the position is that of the tile among those of the call.

    src: pointer to the row's ranks: for each tile, the number of listed tiles before it; or the tensor with the ranks
    of chunks.
    """

    src: Ref
    tile: Expr
    type: Type


@TILE.op("count_tiles src")
@dataclass(frozen=True)
class CountTiles(Op):
    """Count the tiles of the program axis whose first row r has src[r] <= most. If data, such as document ids, decides
    which programs add to a tile, the order of a program is computed from such a count (see tiles/order.py).

    Precondition: src[r] never decreases with r, and src[r] <= most holds for the program's own tile, and so for all
    tiles before it. Only later tiles are searched.
    """

    src: Access
    most: Expr
    type: Type


@TILE.op("init value")
@dataclass(frozen=True)
class Init(Op):
    """Create a tile filled with one value, such as the initial value of a field that a loop carries."""

    value: Expr
    type: Type


@TILE.op("loop var")
@dataclass(frozen=True)
class Loop(Op):
    """Run `body` for each tile of the ranges, in order. The results are the carried fields after the last iteration.

    var: the axis over whose tiles the loop runs (`q`, `kv`), or the name of another counter, such as `g`.
    ranges: (start, end) pairs of tile numbers, or of values of the counter.
    carry: the carried fields, each with its initial value.
    cls: `full`, all pairs of the tiles are visible and in bounds; `partial`, tiles are masked and checked; `unknown`,
    not classified yet; `all`, the class does not apply, because the loop is not over tiles of scores (such as one over
    heads), or because it runs over every tile of its axis.
    tiles: visible start, full start, full end, visible end; set by classify-tiles.
    listed: a row of a block list. Ranges are then positions in it (see ListPosition), and each tile's number is read
    one iteration ahead.
    recompute: loop-invariant values are recomputed in each iteration instead of being kept in registers.
    heads: a range of query heads that share a K/V head. The whole loop runs once per head; the symbol `g` is the number
    of the current head in its group.
    by_tile: with `heads`, the loops are interchanged: tiles outside, heads inside.
    reversed: tiles are visited from the last to the first. Only loops that load tiles for other warp groups have it.
    """

    var: Word
    ranges: Ranges
    carry: Uses
    body: BlockName
    cls: Word = "unknown"
    tiles: Exprs = ()
    listed: Ref | None = None
    recompute: bool = False
    heads: Ranges = ()
    by_tile: bool = False
    reversed: bool = False

    @property
    def variables(self) -> frozenset[str]:
        """The symbols that change from iteration to iteration."""
        return frozenset({self.var, MEMBER} if self.heads else {self.var})


@TILE.op("dot a b")
@dataclass(frozen=True)
class Dot(Op):
    """Matrix product of `a` and `b` over the dimension `over`, accumulated in fp32.

    acc: a value to which the product is added.
    precision: `ieee` or `tf32` for fp32 operands.
    """

    a: Ref
    b: Ref
    over: Word
    type: Type
    acc: Ref | None = None
    precision: Word = ""


@TILE.op("map")
@dataclass(frozen=True)
class Map(Op):
    """Evaluate an elementwise expression. Operands broadcast by dimension name; an operand with one element per group
    of columns broadcasts to the columns of each group. A narrower result type is a cast.

    score: marks score modifiers.
    """

    expr: Any
    uses: Uses
    type: Type
    score: bool = False


@TILE.op("mask value")
@dataclass(frozen=True)
class Mask(Op):
    """Set scores to -inf where the condition `where` is false.

    when: `partial`, only loops of class partial apply the mask; `always`, all loops do.
    known: a Fact (ir/core.py) per part of the condition that reads data and cannot be solved for positions. Example:
    the boolean tensor `key_padding` implies first <= kv_idx < end, and first <= kv_idx < run implies it. classify-tiles
    bounds the loop by these. Facts name values of the kernel: numbers, or one value per row of the program tile.
    unswitch: a condition on the tile's position, tested once per tile: the mask is applied only where it is true. Where
    it is false, `where` holds for all pairs of the tile.
    """

    value: Ref
    where: Bool
    uses: Uses
    type: Type
    known: Facts = ()
    when: Word = "partial"
    unswitch: Bool | None = None


@TILE.op("softmax_step s")
@dataclass(frozen=True)
class SoftmaxStep(Op):
    """One online softmax update in base 2 (Milakov and Gimelshein 2018; FlashAttention-2, Algorithm 1): m' = max(m,
    rowmax s); p = 2^(scale (s - m')); alpha = 2^(scale (m - m')), by which sums that used the old maximum are
    multiplied. The results are `p`, `alpha` and `m`, which is m'.

    shift: one number per row, added to its scores. It requires that there is no `scale`, which then is 1.
    guard: where rows that have seen no key yet (m' = -inf) are kept free of NaN: `always`, or in `partial` loops.
    """

    s: Ref
    m: Ref
    type: Type
    scale: Ref | None = None
    guard: Word = "partial"
    shift: Ref | None = None
    # Names of variables that the op defines where it is printed. No other value may have them (rule `names`).
    FIELDS: ClassVar[tuple[str, ...]] = ("p", "alpha", "m_new", "m_seen")

    def results(self) -> dict[str, Type]:
        row = replace(self.type, dims=self.type.dims[:1])
        return {"p": self.type, "alpha": row, "m": row}


@TILE.op("seed src")
@dataclass(frozen=True)
class Seed(Op):
    """Load the seed of dropout's random numbers from memory. Kernels with dropout are also compiled without it, for
    calls whose dropout_p is 0: then this op, dropout_mask and dropout do nothing."""

    src: Ref
    type: Type


@TILE.op("dropout_mask seed")
@dataclass(frozen=True)
class DropoutMask(Op):
    """Generate the dropout mask of a tile: Philox random numbers keyed on (seed, b, query head, q_idx, kv_idx). A score
    is kept if its random number, in units of 1 / 65536, is at least `threshold`.

    head: the query head.
    """

    seed: Ref
    threshold: Ref
    head: Expr
    type: Type


@TILE.op("dropout value")
@dataclass(frozen=True)
class Dropout(Op):
    """Set `value` to zero where the mask `keep` is false. Sums of the results are later multiplied by
    1 / (1 - dropout_p)."""

    value: Ref
    keep: Ref
    type: Type


@TILE.op("reduce op value")
@dataclass(frozen=True)
class Reduce(Op):
    """Reduce the dimension `over` by `op`: `sum`, `min` or `max`. If the result has a dimension of groups of these
    columns, each group is reduced separately."""

    value: Ref
    op: Word
    over: Word
    type: Type


@TILE.op("scan op value")
@dataclass(frozen=True)
class Scan(Op):
    """Inclusive scan along the dimension `over`. `op` is `max`, the only one: each element becomes the maximum of
    itself and all elements before it."""

    value: Ref
    op: Word
    over: Word
    type: Type


HALVES = ("even", "odd")  # columns of a tile


@TILE.op("deinterleave value")
@dataclass(frozen=True)
class Deinterleave(Op):
    """Split a tile into its even and its odd columns, the results `even` and `odd`. For a tile of `fp8_e4m3x2` (two
    e4m3 numbers of adjacent columns in 16 bits) these are the first and the second number of each pair, in fp16."""

    value: Ref
    type: Type

    def results(self) -> dict[str, Type]:
        return dict.fromkeys(HALVES, self.type)


@TILE.op("interleave a b")
@dataclass(frozen=True)
class Interleave(Op):
    """Interleave two tiles: `a` becomes the even columns of the result and `b` the odd ones. If the result is
    `fp8_e4m3x2`, numbers are rounded to nearest even and saturate at the largest finite number."""

    a: Ref
    b: Ref
    type: Type


@TILE.op("yield", result=False)
@dataclass(frozen=True)
class Yield(Op):
    """End a block: `values` are the carried fields of a loop's next iteration, or the results of a host program's
    block."""

    values: Uses


@TILE.op("store dst value", result=False)
@dataclass(frozen=True)
class Store(Op):
    """Store a tile to `dst`.

    check: as in Load.
    by: with `distance`, store sums along the tile's diagonals, one for each distance kv_idx - q_idx (the gradient of a
    relative position bias), to rows that only this program writes.
    first_along: an axis of the grid; only the first program along it stores the tile.
    """

    dst: Access
    value: Ref
    check: Checks = ()
    by: Word = ""
    first_along: Word = field(default="", kw_only=True)


@TILE.op("scatter dst value", result=False)
@dataclass(frozen=True)
class Scatter(Op):
    """Store each element of `value` to an element of a tensor at computed indices, where the condition `where` holds.

    uses: the values that the symbols in the indices and in `where` stand for.
    op: `add`, `min` and `max` combine atomically with the element there, in no fixed order; `put` replaces it, and each
    element has one writer.
    """

    dst: Access
    value: Ref
    uses: Uses
    where: Bool = sympy.true
    op: Word = "add"


@TILE.op("ordered_add dst value", result=False)
@dataclass(frozen=True)
class OrderedAdd(Store):
    """Add a tile to a tile in device memory to which several programs add in a fixed order, so that the sums have the
    same bits in each run. The program waits until the semaphore equals `order`, adds its tile, and increments the
    semaphore; the program whose `order` is 0 stores instead of adding. The add is a TMA reduction, so a kernel with
    this op runs only warp-specialized; compare OrderedAccumulate.

    semaphore: an integer in device memory that is 0 before the launch and counts the programs that have added.
    order: the number of programs that add before this one.
    """

    semaphore: Access | None = None
    order: Expr | None = None


@TILE.op("ordered_accumulate dst value", result=False)
@dataclass(frozen=True)
class OrderedAccumulate(Store):
    """Add a tile to the sum that earlier programs have stored at the same place, and store the new sum, in the fixed
    order of OrderedAdd. The program whose `order` is 0 stores its tile without adding. Portable kernels read, add and
    write back; warp-specialized ones use TMA (see TmaStore).

    semaphore and order: as in OrderedAdd. If a program accumulates several tiles under one semaphore, such as dK and
    dV, each op names it.
    ends: set on the last of these tiles, after which the semaphore is incremented.
    """

    semaphore: Access | None = None
    order: Expr | None = None
    ends: bool = False


@TILE.op("append dst value", result=False)
@dataclass(frozen=True)
class Append(Store):
    """Store the rows of a tile in a cache: row i becomes row `rows[i]` of its sequence, unless the sequence has no room
    for it.

    pages: as in Load; row i goes to the page whose number `pages` has for it.
    """

    rows: Ref = ""
    pages: Ref | None = None


@TILE.op("barrier", result=False)
@dataclass(frozen=True)
class Barrier(Op):
    """Barrier of all threads of the program (`__syncthreads`). Loads after it see the program's earlier stores, and
    none is hoisted above it."""


@TILE.op("grid_dependency_wait", result=False)
@dataclass(frozen=True)
class GridDependencyWait(Op):
    """Wait until all programs of the previous launch have ended (programmatic dependent launch). Loads after it see the
    stores of these programs."""
