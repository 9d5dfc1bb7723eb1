"""The ops of tile-level kernels.

An op's docstring says what it computes and what its fields mean. Fields marked `operand` are references to other
values: `name`, or `name.field` for an op with several results. Dimensions are names (`BLOCK_Q`, `BLOCK_KV`, `D_QK`,
`D_V`, ...), so dot products and broadcasts are checked by name, not by size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import sympy

from attngen.ir.core import OPERAND, Access, Checks, Fact, Op, Type, Uses
from attngen.ir.dims import MEMBER
from attngen.ir.expr import Bool, Expr


@dataclass(frozen=True)
class Arg(Op):
    """A parameter of a kernel, of a host program, or of a loop body.

    role: `in`, `out` and `inout` are tensors that the kernel reads, writes, or both; `scalar` is a number; `carry` is a
    carried field of a loop body. A `scratch` tensor is private to the kernel: each program writes its own part and
    reads it back. A `sum` tensor is 0 before the launch, and programs add to it.
    """

    role: str
    type: Type


@dataclass(frozen=True)
class Base(Op):
    """Compute the pointer to the first row of one (batch, head) of a tensor, in 64-bit arithmetic."""

    src: Access = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Load(Op):
    """Load a tile of the tensor `src`. In a loop, a tile in shared memory has `num_stages` buffers.

    check: axes along which bounds are checked, always or only in loops of class partial.
    other: the value of elements out of bounds.
    via: with `descriptor` and `TMA=1` in the config, TMA loads the tile by a descriptor of the tensor and checks its
    bounds.
    pages: for each row of the tile, the number of its page. The tensor's first dimension then counts pages, its third
    dimension the rows of a page, and the access has no index for the page: row i of the axis is row i modulo the page
    length of its page.
    columns_of: a loaded tile of all columns. The result is the program's own columns of it, or that tile itself if each
    program has all columns (see split-d).
    needed: one range of rows along the loop's axis, set by limit-loads. No row outside it is in a visible pair of the
    program's tile. Where the axis is checked, such rows are `other` too, except that a descriptor of a tensor that is
    not a cache loads them as they are.
    """

    src: Access = field(metadata=OPERAND)
    type: Type
    check: Checks = ()
    other: Expr = sympy.Integer(0)
    via: str = ""
    pages: str | None = field(default=None, metadata=OPERAND)
    columns_of: str | None = field(default=None, metadata=OPERAND)
    needed: tuple[tuple[Expr, Expr], ...] = ()


@dataclass(frozen=True)
class CacheLength(Op):
    """Compute the number of keys of the program's sequence in the cache: the length before the call, read from `src`,
    plus the `Nn` new keys, at most `Nc`. The value is named `Nk`, as the number of keys is in other kernels."""

    src: Access = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Gather(Op):
    """Load one element of the tensor `src` for each element of the result, at computed indices.

    uses: the values that the symbols in the indices and in `where` stand for.
    where: condition on each element; the result is 0 where it is false.
    """

    src: Access = field(metadata=OPERAND)
    uses: Uses = field(metadata=OPERAND)
    type: Type
    where: Bool = sympy.true


@dataclass(frozen=True)
class ListPosition(Op):
    """Compute the position of the tile `tile` in a row of a block list: the number of listed tiles before it. Positions
    increase with tiles, so bounds on ranges of tiles also hold for ranges of positions.

    src: pointer to the row's ranks.
    """

    src: str = field(metadata=OPERAND)
    tile: Expr
    type: Type


@dataclass(frozen=True)
class CountTiles(Op):
    """Count the tiles of an axis whose first row has, in the integer tensor `src`, a number of at most `most`. The
    numbers never decrease along the axis, and the program's tile and all tiles before it are counted."""

    src: Access = field(metadata=OPERAND)
    most: Expr
    type: Type


@dataclass(frozen=True)
class Init(Op):
    """Create a tile filled with one value, such as the initial value of a field that a loop carries."""

    value: Expr
    type: Type


@dataclass(frozen=True)
class Loop(Op):
    """Run `body` for each tile of the ranges, in order. The results are the carried fields after the last iteration.

    var: the axis whose tiles are counted, or the variable that counts.
    ranges: (start, end) pairs of tile numbers.
    carry: the carried fields, each with its initial value.
    cls: `full`, all pairs of the tiles are visible and in bounds; `partial`, tiles are masked and checked; `all`, the
    loop is not over tiles, or it is over all tiles of the program axis, one by one; `unknown`, not classified yet.
    tiles: visible start, full start, full end, visible end; set by classify-tiles.
    listed: a row of a block list. Ranges are then positions in it (see ListPosition), and each tile's number is read
    one iteration ahead.
    recompute: loop-invariant values are recomputed in each iteration instead of being kept in registers.
    heads: the whole loop runs once for each of these query heads of a group; `g` is the number of the head in its
    group.
    by_tile: with `heads`, each tile is visited once instead, and the body runs for all of the heads there.
    """

    var: str
    ranges: tuple[tuple[Expr, Expr], ...]
    carry: Uses = field(metadata=OPERAND)
    body: str
    cls: str = "unknown"
    tiles: tuple[Expr, ...] = ()
    listed: str | None = field(default=None, metadata=OPERAND)
    recompute: bool = False
    heads: tuple[tuple[Expr, Expr], ...] = ()
    by_tile: bool = False

    @property
    def variables(self) -> frozenset[str]:
        """The symbols that change from iteration to iteration."""
        return frozenset({self.var, MEMBER} if self.heads else {self.var})


@dataclass(frozen=True)
class Dot(Op):
    """Matrix product of `a` and `b` over the dimension `over`, accumulated in fp32.

    acc: a value to which the product is added.
    precision: `ieee` or `tf32` for fp32 operands.
    """

    a: str = field(metadata=OPERAND)
    b: str = field(metadata=OPERAND)
    over: str
    type: Type
    acc: str | None = field(default=None, metadata=OPERAND)
    precision: str = ""


@dataclass(frozen=True)
class Map(Op):
    """Evaluate an elementwise expression. Operands broadcast by dimension name; an operand with one element per group
    of columns broadcasts to the columns of each group. A narrower result type is a cast.

    score: marks score modifiers.
    """

    expr: Any
    uses: Uses = field(metadata=OPERAND)
    type: Type
    score: bool = False


@dataclass(frozen=True)
class Mask(Op):
    """Set scores to -inf where the condition `where` is false.

    when: `partial`, only loops of class partial apply the mask; `always`, all loops do.
    known: a fact for each part of the condition that is data, such as a tensor of booleans, by which classify-tiles
    bounds tiles. Facts name values of the kernel: numbers, or one value per row of the program's tile.
    unswitch: a condition on the tile's position. Where it is false, `where` holds for all pairs of the tile, and the
    mask is skipped.
    """

    value: str = field(metadata=OPERAND)
    where: Bool
    uses: Uses = field(metadata=OPERAND)
    type: Type
    known: tuple[Fact, ...] = ()
    when: str = "partial"
    unswitch: Bool | None = None


@dataclass(frozen=True)
class SoftmaxStep(Op):
    """One online softmax update in base 2 (Milakov and Gimelshein 2018; FlashAttention-2, Algorithm 1): m' = max(m,
    rowmax s); p = 2^(scale (s - m')); alpha = 2^(scale (m - m')), by which sums that used the old maximum are
    multiplied. The results are `p`, `alpha` and `m`, which is m'.

    shift: one number per row, added to its scores; the scale is then 1.
    guard: where rows that have seen no key yet (m' = -inf) are kept free of NaN: `always`, or in `partial` loops.
    """

    s: str = field(metadata=OPERAND)
    m: str = field(metadata=OPERAND)
    type: Type
    scale: str | None = field(default=None, metadata=OPERAND)
    guard: str = "partial"
    shift: str | None = field(default=None, metadata=OPERAND)
    FIELDS: ClassVar[tuple[str, ...]] = ("p", "alpha", "m_new", "m_seen")  # variables of the printed kernel

    def results(self) -> dict[str, Type]:
        row = replace(self.type, dims=self.type.dims[:1])
        return {"p": self.type, "alpha": row, "m": row}


@dataclass(frozen=True)
class Seed(Op):
    """Load the key of dropout's random numbers from memory. A call without dropout does not read it."""

    src: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class DropoutMask(Op):
    """Generate the dropout mask of a tile: Philox random numbers keyed on (seed, b, query head, q_idx, kv_idx). A score
    is kept if its random number, in units of 1 / 65536, is at least `threshold`.

    head: the query head.
    """

    seed: str = field(metadata=OPERAND)
    threshold: str = field(metadata=OPERAND)
    head: Expr
    type: Type


@dataclass(frozen=True)
class Dropout(Op):
    """Set `value` to zero where the mask `keep` is false. The sum of the results is later multiplied by 1 / (kept
    share)."""

    value: str = field(metadata=OPERAND)
    keep: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Reduce(Op):
    """Reduce the dimension `over` by `op`: `sum`, `min` or `max`. If the result has a dimension of groups of these
    columns, each group is reduced separately."""

    value: str = field(metadata=OPERAND)
    op: str
    over: str
    type: Type


@dataclass(frozen=True)
class Scan(Op):
    """Running maximum along the dimension `over`: each element becomes the maximum of itself and all elements before
    it."""

    value: str = field(metadata=OPERAND)
    op: str
    over: str
    type: Type


HALVES = ("even", "odd")  # columns of a tile


@dataclass(frozen=True)
class Deinterleave(Op):
    """Split a tile into its even and its odd columns, the results `even` and `odd`. For a tile of packed 8-bit pairs
    these are the first and the second number of each pair, in fp16."""

    value: str = field(metadata=OPERAND)
    type: Type

    def results(self) -> dict[str, Type]:
        return dict.fromkeys(HALVES, self.type)


@dataclass(frozen=True)
class Interleave(Op):
    """Interleave two tiles: `a` becomes the even columns of the result and `b` the odd ones. If the result is packed
    8-bit pairs, numbers are rounded to nearest even and saturate at the largest finite number."""

    a: str = field(metadata=OPERAND)
    b: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Yield(Op):
    """End a block: `values` are the carried fields of a loop's next iteration, or the results of a host program's
    block."""

    values: Uses = field(metadata=OPERAND)


@dataclass(frozen=True)
class Store(Op):
    """Store a tile to `dst`.

    check: axes along which bounds are checked, always or only in loops of class partial.
    by: with `distance`, store the sums of the tile over pairs of equal distance kv_idx - q_idx, to rows that only this
    program writes.
    first_along: an axis of the grid; only the first program along it stores the tile.
    """

    dst: Access = field(metadata=OPERAND)
    value: str = field(metadata=OPERAND)
    check: Checks = ()
    by: str = ""
    first_along: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Scatter(Op):
    """Store each element of `value` to an element of a tensor at computed indices, where the condition `where` holds.

    uses: the values that the symbols in the indices and in `where` stand for.
    op: `add`, `min` and `max` combine atomically with the element there, in no fixed order; `put` replaces it, and each
    element has one writer.
    """

    dst: Access = field(metadata=OPERAND)
    value: str = field(metadata=OPERAND)
    uses: Uses = field(metadata=OPERAND)
    where: Bool = sympy.true
    op: str = "add"


@dataclass(frozen=True)
class OrderedAdd(Store):
    """Add a tile to one of a tensor to which other programs add too, in a fixed order. The program waits until the
    semaphore equals `order`, adds its tile, and increments the semaphore; the program whose `order` is 0 stores instead
    of adding.

    semaphore: an integer in memory that is 0 before the launch and counts the programs that have added.
    order: the number of programs that add before this one.
    """

    semaphore: Access | None = field(default=None, metadata=OPERAND)
    order: Expr | None = None


@dataclass(frozen=True)
class OrderedAccumulate(Store):
    """Store the sum of a tile and the one that another program has stored there, in the fixed order of OrderedAdd. The
    program whose `order` is 0 stores its tile without adding.

    semaphore and order: as in OrderedAdd. A program that accumulates several tiles at one semaphore names it at each.
    ends: set on the last of these tiles, after which the semaphore is incremented.
    """

    semaphore: Access | None = field(default=None, metadata=OPERAND)
    order: Expr | None = None
    ends: bool = False


@dataclass(frozen=True)
class Append(Store):
    """Store the rows of a tile in a cache: row i becomes row `rows[i]` of its sequence, unless the sequence has no room
    for it.

    pages: as in Load; row i goes to the page whose number `pages` has for it.
    """

    rows: str = field(default="", metadata=OPERAND)
    pages: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class Barrier(Op):
    """Wait for all threads of the program. Loads after the barrier see what was stored before it, and none starts
    earlier."""


@dataclass(frozen=True)
class GridDependencyWait(Op):
    """Wait until all programs of the previous launch have ended (programmatic dependent launch). Loads after it see
    what they stored."""


OPS: dict[str, type[Op]] = {
    "arg": Arg,
    "base": Base,
    "load": Load,
    "cache_length": CacheLength,
    "gather": Gather,
    "list_position": ListPosition,
    "count_tiles": CountTiles,
    "init": Init,
    "loop": Loop,
    "dot": Dot,
    "map": Map,
    "mask": Mask,
    "softmax_step": SoftmaxStep,
    "seed": Seed,
    "dropout_mask": DropoutMask,
    "dropout": Dropout,
    "reduce": Reduce,
    "scan": Scan,
    "deinterleave": Deinterleave,
    "interleave": Interleave,
    "yield": Yield,
    "store": Store,
    "scatter": Scatter,
    "ordered_add": OrderedAdd,
    "ordered_accumulate": OrderedAccumulate,
    "append": Append,
    "barrier": Barrier,
    "grid_dependency_wait": GridDependencyWait,
}
KIND = {cls: kind for kind, cls in OPS.items()}
