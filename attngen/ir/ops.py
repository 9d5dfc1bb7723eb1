"""The op kinds of the tile-schedule IR, all on one screen, and the values they work on.

A value has a type: element type, named dimensions, memory space. `T` is the element type of q, k and v. Dimensions are
names (`BLOCK_Q`, `BLOCK_KV`, `D_QK`, `D_V`, ...), so a dot product or a broadcast is checked by name, not by size.
Fields marked `operand` are references to other values: `name`, or `name.field` for ops with several results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import sympy

from attngen.ir.dtypes import QUANTISED
from attngen.ir.expr import Bool, Expr, cdiv, symbol, symbol_names
from attngen.ir.names import BLOCKS

TENSORS = ("in", "out", "inout", "scratch", "sum")  # roles of a kernel's arguments that lie in device memory
DTYPE_BYTES = {
    "f32": 4,
    "i32": 4,
    "i64": 8,
    "b1": 1,
    "ptr": 8,
    **dict.fromkeys(QUANTISED.values(), 2),
}  # `T`, and the type of results, depend on the module
# Index letter -> dimension. Columns may lie in pairs, or in groups that have one factor each.
COLUMN_DIM = {
    "d_qk": "D_QK",
    "d_v": "D_V",
    "d_rope": "D_ROPE",
    "pair_qk": "PAIRS_QK",
    "pair_v": "PAIRS_V",
    "group_v": "GROUPS_V",
}
GROUPED = {
    "D_V": "GROUPS_V",
    "PAIRS_V": "GROUPS_V",
}  # columns -> their groups, each of as many columns that lie side by side
SIDES = {
    "left_v": "LEFT_V",
    "right_v": "RIGHT_V",
}  # index letter -> dimension of the left or the right half of D_V's columns
OWN = {
    "own_qk": "OWN_QK",
    "own_v": "OWN_V",
}  # index letter -> dimension of the columns that a program has, where several share a sum's
WHOLE = {"OWN_QK": "D_QK", "OWN_V": "D_V"}  # that dimension -> the one of all columns
AXIS_DIM = {
    "q": "BLOCK_Q",
    "kv": "BLOCK_KV",
    "joined": "BLOCK_PARTS",
    **COLUMN_DIM,
    **SIDES,
    **OWN,
}  # index letter -> tile dimension
AXIS_EXTENT = {"q": "Nq", "kv": "Nk", "joined": "parts", **COLUMN_DIM}  # index letter -> whole axis
AXIS_EXTENT |= {axis: WHOLE[dim] for axis, dim in OWN.items()}
TILED = {
    "BLOCK_Q": "block_q",
    "BLOCK_KV": "block_kv",
    "BLOCK_PARTS": "block_kv",
}  # tile dimension -> what of a schedule row it is
TILED |= dict.fromkeys(WHOLE, "columns")
MEMBER = "g"  # the number of a query head among those that share a K/V head
PADDED = {
    dim: f"{dim}_PAD" for dim in COLUMN_DIM.values()
}  # dimension -> its name in tiles that are padded to a power of two
_UNPADDED = {padded: dim for dim, padded in PADDED.items()}


def unpadded(dim: str) -> str:
    """The tensor's dimension for a tile's dimension: `D_QK` for `D_QK_PAD`, others as they are."""
    return _UNPADDED.get(dim, dim)


def dimension(dim: str) -> Expr:
    """The length of a tensor's dimension: a number, a size of the call, or for `Nq/32` the number of blocks of 32
    queries."""
    if blocks := re.fullmatch(BLOCKS, dim):
        return cdiv(symbol(blocks[1]), sympy.Integer(int(blocks[2])))
    return sympy.Integer(int(dim)) if dim.isdigit() else symbol(dim)


@cache
def axis_of(index: Expr) -> str:
    """The axis for whose current tile an index stands; empty text for a number."""
    return next((str(term) for term in sympy.Add.make_args(index) if term.is_Symbol and str(term) in AXIS_DIM), "")


@dataclass(frozen=True)
class Type:
    """`dtype[dims] @space`. The space is `hbm`, `sram` or `reg`; it is `?` until assign-memory-space has decided."""

    dtype: str
    dims: tuple[str, ...] = ()
    space: str = "?"

    @property
    def unpadded(self) -> tuple[str, ...]:
        """Its dimensions by the names that tensors have."""
        return tuple(map(unpadded, self.dims))

    @property
    def quantised(self) -> bool:
        """Whether its elements are numbers of 8 bits, two of them as one value."""
        return self.dtype in QUANTISED.values()


@dataclass(frozen=True)
class Access:
    """A place in a tensor, as in `%K[b, h // group, kv, d_qk]`. An axis letter stands for the current tile of that
    axis.

    A number may be added to it, as in `first_item + joined`: then the tile starts so much further.
    """

    tensor: str
    index: tuple[Expr, ...]

    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in map(axis_of, self.index) if axis)


Uses = tuple[tuple[str, str], ...]  # (symbol in the expression, value that it stands for)
Checks = tuple[tuple[str, str], ...]  # (axis letter, `always` or `partial`): where an access is bounds-checked


class Fact(NamedTuple):
    """What is known of a condition on data, which cannot be solved for positions. It implies `needs`, and `enough`
    implies it."""

    literal: Bool
    needs: Bool
    enough: Bool


OPERAND = {"operand": True}
SomeOp = TypeVar("SomeOp", bound="Op")


def _expressions_in(value: Any) -> Iterator[Any]:
    """The expressions in a field's value, which may be one, an access, or a tuple of such."""
    if isinstance(value, sympy.Basic):
        yield value
    elif isinstance(value, Access):
        yield from value.index
    elif isinstance(value, tuple):
        for part in value:
            yield from _expressions_in(part)


@dataclass(frozen=True)
class Op:
    """Base of all ops. `name` is the name of the op's value."""

    name: str

    def operands(self) -> Iterator[str]:
        """The references that this op reads, in the order of its fields."""
        for f in fields(self):
            if f.metadata.get("operand"):
                value = getattr(self, f.name)
                if isinstance(value, Access):
                    yield value.tensor
                elif isinstance(value, str):
                    yield value
                elif value is not None:
                    yield from (part if isinstance(part, str) else part[1] for part in value)

    @cached_property
    def expressions(self) -> tuple[Any, ...]:
        """Every expression in its fields: indices, conditions, bounds, numbers."""
        return tuple(e for f in fields(self) for e in _expressions_in(getattr(self, f.name)))

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The names of the symbols in its expressions."""
        return frozenset(name for e in self.expressions for name in symbol_names(e))

    def results(self) -> dict[str, Type]:
        """Result types by field; the key is empty for ops with one result."""
        return {"": self.type} if hasattr(self, "type") else {}

    def with_operands(self: SomeOp, rename: dict[str, str]) -> SomeOp:
        """The same op reading other values."""
        new: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if not f.metadata.get("operand") or value is None:
                continue
            if isinstance(value, Access):
                new[f.name] = replace(value, tensor=rename.get(value.tensor, value.tensor))
            elif isinstance(value, str):
                new[f.name] = rename.get(value, value)
            else:
                new[f.name] = tuple(
                    rename.get(x, x) if isinstance(x, str) else (x[0], rename.get(x[1], x[1])) for x in value
                )
        return replace(self, **new)


@dataclass(frozen=True)
class Arg(Op):
    """A parameter: of the kernel (`in`, `out`, `inout`, `scratch`, `scalar`) or of a loop body (`carry`).

    A tensor of role `scratch` is the kernel's own: each program fills its part and reads it again, and nothing else
    does. One of role `sum` is 0 before the launch, and programs add to it.
    """

    role: str
    type: Type


@dataclass(frozen=True)
class Base(Op):
    """Pointer to the first row of one (batch, head) of a tensor, in 64-bit arithmetic."""

    src: Access = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Load(Op):
    """Read a tile; elements out of bounds are `other`. In a loop, a tile in SRAM has a ring of `num_stages` buffers.

    With `via` descriptor and `TMA=1` in the schedule, a copy engine fetches the tile by a descriptor of the tensor, and
    checks its bounds. With `pages`, the tensor's first dimension counts pages of so many rows as its third one has; row
    i of the tile's axis lies in the page whose number `pages` has for it, as row i modulo that many. The access has no
    index for pages. With `columns_of`, they are the program's own columns of a loaded tile; where a program has all
    columns, that tile itself.
    needed: one range of rows along the loop's axis, set by limit-loads. Rows outside it are in no visible pair of the
    program's tile; where the axis is checked they are `other` too. A descriptor of a tensor that is no cache reads them
    as they are.
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
    """How many keys of the program's sequence are in the cache: those before the call, in `src`, and the `Nn` new ones;
    at most `Nc`.

    It is named `Nk`, as the number of keys of a sequence is in other kernels.
    """

    src: Access = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Gather(Op):
    """Read one element for each position, at computed indices. The value is 0 where the condition is false."""

    src: Access = field(metadata=OPERAND)
    uses: Uses = field(metadata=OPERAND)
    type: Type
    where: Bool = sympy.true


@dataclass(frozen=True)
class ListPosition(Op):
    """The position of tile `tile` in the list of a row of blocks: how many listed tiles come before it. `src` points to
    the row's ranks.

    Positions rise with tiles, so what is proven of ranges of tiles also holds for ranges of positions.
    """

    src: str = field(metadata=OPERAND)
    tile: Expr
    type: Type


@dataclass(frozen=True)
class CountTiles(Op):
    """How many tiles of an axis have a first row whose number in a tensor is at most `most`; numbers rise along the
    axis.

    The program's own tile is one of them, and so are those before it.
    """

    src: Access = field(metadata=OPERAND)
    most: Expr
    type: Type


@dataclass(frozen=True)
class Init(Op):
    """A tile filled with one value. A loop's carried field starts from it."""

    value: Expr
    type: Type


@dataclass(frozen=True)
class Loop(Op):
    """Run `body` for each tile of the ranges, in order; its results are the carried fields after the last turn.

    cls: `full`, everything in the tiles is visible and in bounds; `partial`, tiles are masked and checked; `all`, the
    loop is not over tiles, or it is over all tiles that the program owns, one by one; `unknown`, not classified yet.
    tiles: set by classify-tiles: visible start, full start, full end, visible end.
    listed: a row of a list of blocks. Ranges are then positions in it (see Position). Each tile's number is read one
    turn ahead.
    recompute: values that do not change from turn to turn are computed again in each turn, not kept in registers.
    heads: the loop runs once for each of these query heads of a group, one after another; `g` is the number of the head
    in its group.
    by_tile: the other way round: it comes to each tile once, for all of these heads, one after another.
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
        """What differs from turn to turn."""
        return frozenset({self.var, MEMBER} if self.heads else {self.var})


@dataclass(frozen=True)
class Dot(Op):
    """Matrix product over a named dimension, accumulated in fp32. If there is an `acc`, the product is added to it."""

    a: str = field(metadata=OPERAND)
    b: str = field(metadata=OPERAND)
    over: str
    type: Type
    acc: str | None = field(default=None, metadata=OPERAND)
    precision: str = ""


@dataclass(frozen=True)
class Map(Op):
    """An elementwise expression. Operands broadcast by dimension name; a narrower result type is a cast. `score` marks
    modifiers.

    An operand with one element for each group of columns broadcasts to these columns.
    """

    expr: Any
    uses: Uses = field(metadata=OPERAND)
    type: Type
    score: bool = False


@dataclass(frozen=True)
class Mask(Op):
    """Set scores to -inf where the condition is false. With `when` partial, only loops of class partial apply it.

    known: a fact for each part of the condition that is data, such as a tensor of booleans. classify-tiles bounds tiles
    by it. A fact names values of the kernel: numbers, or one value for each row of the program's own tile.
    unswitch: a condition on the tile's place. In tiles for which it is false the mask is passed over, as `where` holds
    for all their pairs.
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
    """One online softmax update in base 2 (Milakov and Gimelshein 2018; FlashAttention-2, Algorithm 1).

    m' = max(m, rowmax s); p = 2^(scale (s - m')); alpha = 2^(scale (m - m')), the factor for sums that used the old
    maximum. With a `shift`, a number of each row, scores are s + shift, and the scale is 1. `guard` says where rows
    that have seen no key yet (m' = -inf) are kept free of NaN: `always`, or in `partial` loops.
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
    """The key of dropout's random numbers, read from memory. A call that drops nothing does not read it."""

    src: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class DropoutMask(Op):
    """The scores of a tile that dropout keeps: random numbers by Philox, keyed on (seed, b, query head, q_idx, kv_idx).

    A score is kept if its random number, in units of 1 / 65536, is at least `threshold`.
    """

    seed: str = field(metadata=OPERAND)
    threshold: str = field(metadata=OPERAND)
    head: Expr
    type: Type


@dataclass(frozen=True)
class Dropout(Op):
    """The value where it is kept, zero elsewhere. The sum of the results is multiplied later by 1 / (share that is
    kept)."""

    value: str = field(metadata=OPERAND)
    keep: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Reduce(Op):
    """Reduce one named dimension: `sum`, `min` or `max`. If the result has a dimension of groups of these columns,
    reduce each group."""

    value: str = field(metadata=OPERAND)
    op: str
    over: str
    type: Type


@dataclass(frozen=True)
class Scan(Op):
    """Running maxima along a named dimension: each element becomes the largest of itself and those before it."""

    value: str = field(metadata=OPERAND)
    op: str
    over: str
    type: Type


HALVES = ("even", "odd")  # columns of a tile


@dataclass(frozen=True)
class Deinterleave(Op):
    """The even and the odd columns of a tile. Of a tile of pairs, the first and the second numbers, in fp16."""

    value: str = field(metadata=OPERAND)
    type: Type

    def results(self) -> dict[str, Type]:
        return dict.fromkeys(HALVES, self.type)


@dataclass(frozen=True)
class Interleave(Op):
    """The tile that has one tile as its even columns, and another one as its odd ones.

    As pairs, numbers are rounded to the nearest one that there is, the even one of two; in place of larger ones is the
    largest.
    """

    a: str = field(metadata=OPERAND)
    b: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Yield(Op):
    """The last op of a block: the carried values for a loop's next turn, or the results of a host program's block."""

    values: Uses = field(metadata=OPERAND)


@dataclass(frozen=True)
class Store(Op):
    """Write a tile. With `by` distance, write its sums over pairs of one distance kv_idx - q_idx, to rows that only
    this program writes.

    first_along: an axis of the grid, along which the first program alone writes it.
    """

    dst: Access = field(metadata=OPERAND)
    value: str = field(metadata=OPERAND)
    check: Checks = ()
    by: str = ""
    first_along: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Scatter(Op):
    """Write each element of a value to an element of a tensor, at computed indices, where the condition holds.

    op: `add` adds to what is there, `min` and `max` keep the smaller or the larger of both: atomic, in no fixed order.
    `put` replaces what is there; each element has one writer.
    """

    dst: Access = field(metadata=OPERAND)
    value: str = field(metadata=OPERAND)
    uses: Uses = field(metadata=OPERAND)
    where: Bool = sympy.true
    op: str = "add"


@dataclass(frozen=True)
class OrderedAdd(Store):
    """Add a tile to one of a tensor, to which other programs add theirs.

    They add in a fixed order, by `turns`, an integer that is 0 before the launch: a program waits until it is `turn`,
    which says how many add before, adds, and then raises it by 1. The first one replaces what is there.
    """

    semaphore: Access | None = field(default=None, metadata=OPERAND)
    order: Expr | None = None


@dataclass(frozen=True)
class OrderedAccumulate(Store):
    """Store a tile where another program has stored one, as the sum of both.

    Programs come in a fixed order, by `turns`, as those of Add do: the one whose `turn` is 0 replaces what is there. A
    program that stores several tiles in its turn names it at each of them, and ends it at the last, where `ends` is
    set.
    """

    semaphore: Access | None = field(default=None, metadata=OPERAND)
    order: Expr | None = None
    ends: bool = False


@dataclass(frozen=True)
class Append(Store):
    """Store the rows of a tile in a cache: row i as row `rows[i]` of its sequence, unless that has no room for it.

    With `pages`, the tensor is one of pages, as in Load; row i goes to the page whose number `pages` has for it.
    """

    rows: str = field(default="", metadata=OPERAND)
    pages: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class Barrier(Op):
    """The program's threads wait for each other. Loads after it see what stores before it wrote, and no load after
    it starts earlier."""


@dataclass(frozen=True)
class GridDependencyWait(Op):
    """Wait until all programs of the launch before have ended. Loads after it see what these have stored."""


@dataclass(frozen=True)
class WarpGroup:
    """What some warps of a divided kernel do, beside the other roles (see ir/pipe.py).

    instances: groups of warps that run the role at one time; warps, of each copy; registers, of 32 bits, per thread.
    rows: a tile of the program's own rows is divided among the copies, each of which has so many; 0 where the role has
    none.
    """

    instances: int
    warps: int
    registers: int
    rows: int = 0


@dataclass(frozen=True)
class Block:
    """A list of ops: the `entry` of a kernel or host program, a role, a loop's body, or a branch of an `if`.

    `about` says what a body is for.
    """

    name: str
    ops: tuple[Op, ...]
    about: str = ""
    warp_group: WarpGroup | None = None


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
