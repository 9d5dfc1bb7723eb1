"""The op kinds of the tile-schedule IR, all on one screen, and the values they work on.

A value has a type: element type, named dimensions, memory space. `T` is the element type of q, k and v. Dimensions are
names (`BLOCK_Q`, `BLOCK_KV`, `D_QK`, `D_V`, ...), so a dot product or a broadcast is checked by name, not by size.
Fields marked `operand` are references to other values: `name`, or `name.field` for ops with several results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import sympy

from attngen.ir.expr import Bool, Expr, cdiv, symbol

DTYPE_BYTES = {"f32": 4, "i32": 4, "i64": 8, "b1": 1, "ptr": 8}  # `T` depends on the module
AXIS_DIM = {"q": "BLOCK_Q", "kv": "BLOCK_KV", "d_qk": "D_QK", "d_v": "D_V"}  # index letter -> tile dimension
BLOCKS = "(Nq|Nk)/([1-9][0-9]{0,7})"  # a dimension of blocks of so many queries or keys, the last of which may be cut
AXIS_EXTENT = {"q": "Nq", "kv": "Nk", "d_qk": "D_QK", "d_v": "D_V"}  # index letter -> extent of the whole axis


PADDED = {"D_QK": "D_QK_PAD", "D_V": "D_V_PAD"}  # dimension -> its name where tiles are padded to a power of two
_UNPADDED = {padded: dim for dim, padded in PADDED.items()}


def unpadded(dim: str) -> str:
    """The dimension that a tile's dimension pads, or itself."""
    return _UNPADDED.get(dim, dim)


def dimension(dim: str) -> Expr:
    """How long a dimension of a tensor is: a number, a size of the call, or the number of blocks of so many rows in one."""
    if blocks := re.fullmatch(BLOCKS, dim):
        return cdiv(symbol(blocks[1]), sympy.Integer(int(blocks[2])))
    return sympy.Integer(int(dim)) if dim.isdigit() else symbol(dim)


@dataclass(frozen=True)
class Type:
    """`dtype[dims] @space`; space is `hbm`, `sram` or `reg`, and `?` until place-memory has decided."""

    dtype: str
    dims: tuple[str, ...] = ()
    space: str = "?"

    @property
    def unpadded(self) -> tuple[str, ...]:
        """Its dimensions, as tensors have them."""
        return tuple(map(unpadded, self.dims))


@dataclass(frozen=True)
class Access:
    """A place in a tensor: `%K[b, h // group, kv, d_qk]`. A bare axis letter stands for the current tile of it."""

    tensor: str
    index: tuple[Expr, ...]

    def axes(self) -> tuple[str, ...]:
        return tuple(str(i) for i in self.index if str(i) in AXIS_DIM)


Uses = tuple[tuple[str, str], ...]  # (symbol in the expression, value that it stands for)
Checks = tuple[tuple[str, str], ...]  # (axis letter, `always` or `partial`): where an access is bounds-checked


class Fact(NamedTuple):
    """What is known of a condition that cannot be solved for positions: it needs `needs`, and `enough` is enough for it."""

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
    """What every op has: the name of its value."""

    name: str

    def operands(self) -> Iterator[str]:
        """References this op reads, in field order."""
        for f in fields(self):
            if f.metadata.get("operand"):
                value = getattr(self, f.name)
                if isinstance(value, Access):
                    yield value.tensor
                elif isinstance(value, str):
                    yield value
                elif value is not None:
                    yield from (ref for _, ref in value)

    def expressions(self) -> Iterator[Any]:
        """Every expression in its fields: indices, conditions, bounds, numbers."""
        for f in fields(self):
            yield from _expressions_in(getattr(self, f.name))

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
                new[f.name] = tuple((k, rename.get(r, r)) for k, r in value)
        return replace(self, **new)


@dataclass(frozen=True)
class Arg(Op):
    """A parameter: of the kernel (`in`, `out`, `inout`, `scalar`) or of a loop body (`carry`)."""

    role: str
    type: Type


@dataclass(frozen=True)
class Base(Op):
    """Pointer to the first row of one (batch, head) of a tensor, in 64-bit arithmetic."""

    src: Access = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Load(Op):
    """Read a tile; out of bounds reads give `other`. In a loop, tiles in SRAM have a ring of `num_stages` buffers.

    `via` descriptor: where the schedule says so, a copy engine fetches it by a descriptor of the tensor, and checks its bounds itself.
    """

    src: Access = field(metadata=OPERAND)
    type: Type
    check: Checks = ()
    other: Expr = sympy.Integer(0)
    via: str = ""


@dataclass(frozen=True)
class Gather(Op):
    """Read one element for each position, at computed indices; where the condition is false, 0."""

    src: Access = field(metadata=OPERAND)
    uses: Uses = field(metadata=OPERAND)
    type: Type
    where: Bool = sympy.true


@dataclass(frozen=True)
class Position(Op):
    """How many of the tiles that a row of blocks lists come before tile `tile`; `src` points to the row's ranks.

    It rises with the tile, so what is proven of ranges of tiles holds for ranges of positions.
    """

    src: str = field(metadata=OPERAND)
    tile: Expr
    type: Type


@dataclass(frozen=True)
class Init(Op):
    """A tile filled with one value: where a loop's carried field starts."""

    value: Expr
    type: Type


@dataclass(frozen=True)
class Loop(Op):
    """Run `body` for each tile of the ranges, in order; its results are the carried fields after the last turn.

    Class `full`: everything in these tiles is visible and in bounds; `partial`: masked and checked; `all`: not over tiles, or over
    all that a program owns, one by one; `unknown`: not classified yet.
    `tiles`, set by classify-tiles: visible start, full start, full end, visible end.
    With `listed`, a row of blocks, ranges are of positions in it (see Position), and the tiles are those of its blocks.
    Each tile's number is read a turn ahead.
    With `recompute`, what does not change from turn to turn is computed in each, rather than kept in registers.
    """

    var: str
    ranges: tuple[tuple[Expr, Expr], ...]
    carry: Uses = field(metadata=OPERAND)
    body: str
    cls: str = "unknown"
    tiles: tuple[Expr, ...] = ()
    listed: str | None = field(default=None, metadata=OPERAND)
    recompute: bool = False


@dataclass(frozen=True)
class Dot(Op):
    """Matrix product over a named dimension, accumulated in fp32, onto `acc` when there is one."""

    a: str = field(metadata=OPERAND)
    b: str = field(metadata=OPERAND)
    over: str
    type: Type
    acc: str | None = field(default=None, metadata=OPERAND)
    precision: str = ""


@dataclass(frozen=True)
class Map(Op):
    """Elementwise expression, broadcast by dimension name. A narrower result type is a cast. `score` marks modifiers."""

    expr: Any
    uses: Uses = field(metadata=OPERAND)
    type: Type
    score: bool = False


@dataclass(frozen=True)
class Mask(Op):
    """Where the condition is false, the score is -inf. `partial`: only loops of that class apply it.

    `known` has a fact for each part that cannot be solved for positions (a tensor of booleans, say), by which classify-tiles
    bounds tiles. Facts name values of the kernel: numbers, or one for each row of the program's own tile.
    """

    value: str = field(metadata=OPERAND)
    where: Bool
    uses: Uses = field(metadata=OPERAND)
    type: Type
    known: tuple[Fact, ...] = ()
    when: str = "partial"


@dataclass(frozen=True)
class SoftmaxStep(Op):
    """One online softmax update in base 2 (Milakov and Gimelshein 2018; FlashAttention-2, Algorithm 1).

    m' = max(m, rowmax s); p = 2^(scale (s - m')); alpha = 2^(scale (m - m')), by which sums under the old maximum shrink.
    `guard` keeps rows that have seen nothing yet (m' = -inf) free of NaN.
    """

    s: str = field(metadata=OPERAND)
    m: str = field(metadata=OPERAND)
    type: Type
    scale: str | None = field(default=None, metadata=OPERAND)
    guard: str = "partial"
    FIELDS: ClassVar[tuple[str, ...]] = ("p", "alpha", "m_new", "m_seen")  # variables that it prints

    def results(self) -> dict[str, Type]:
        row = replace(self.type, dims=self.type.dims[:1])
        return {"p": self.type, "alpha": row, "m": row}


@dataclass(frozen=True)
class Seed(Op):
    """The key of dropout's random numbers, read from memory; nothing is read by a call that drops nothing."""

    src: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Keep(Op):
    """Which scores of a tile dropout keeps: Philox keyed on (seed, b, query head, q_idx, kv_idx), see dropout.py.

    A score is kept where its random number reaches `threshold`, in units of 1 / 65536.
    """

    seed: str = field(metadata=OPERAND)
    threshold: str = field(metadata=OPERAND)
    head: Expr
    type: Type


@dataclass(frozen=True)
class Dropout(Op):
    """The value where it is kept, zero elsewhere. Whoever sums the result multiplies by 1 / (share kept)."""

    value: str = field(metadata=OPERAND)
    keep: str = field(metadata=OPERAND)
    type: Type


@dataclass(frozen=True)
class Reduce(Op):
    """Reduce one named dimension: `sum`, `min` or `max`."""

    value: str = field(metadata=OPERAND)
    op: str
    over: str
    type: Type


@dataclass(frozen=True)
class Yield(Op):
    """Carried values for the next turn of the loop."""

    values: Uses = field(metadata=OPERAND)


@dataclass(frozen=True)
class Store(Op):
    """Write a tile; with `by` distance its sums by distance, key less query, to rows of the program's own (see store_distances)."""

    dst: Access = field(metadata=OPERAND)
    value: str = field(metadata=OPERAND)
    check: Checks = ()
    by: str = ""


@dataclass(frozen=True)
class Scatter(Op):
    """Add each element of a value to one of a tensor, at computed indices where the condition holds: atomically, in no fixed order."""

    dst: Access = field(metadata=OPERAND)
    value: str = field(metadata=OPERAND)
    uses: Uses = field(metadata=OPERAND)
    where: Bool = sympy.true


@dataclass(frozen=True)
class Barrier(Op):
    """All of the program's threads wait for each other: loads after it see what stores before it wrote, and none starts before it."""


@dataclass(frozen=True)
class Block:
    """A straight-line list of ops: a kernel's or host program's `entry`, a loop's body, a branch."""

    name: str
    ops: tuple[Op, ...]


OPS: dict[str, type[Op]] = {
    "arg": Arg,
    "base": Base,
    "load": Load,
    "gather": Gather,
    "position": Position,
    "init": Init,
    "loop": Loop,
    "dot": Dot,
    "map": Map,
    "mask": Mask,
    "softmax_step": SoftmaxStep,
    "seed": Seed,
    "keep": Keep,
    "dropout": Dropout,
    "reduce": Reduce,
    "yield": Yield,
    "store": Store,
    "scatter": Scatter,
    "barrier": Barrier,
}
KIND = {cls: kind for kind, cls in OPS.items()}
