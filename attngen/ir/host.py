"""The ops of host programs, on one screen: what Python does at a call to allocate tensors, launch kernels and sum their
results.

`host @forward` gives the output and the LSE, `host @backward` the gradients. `host @count` and `host @lists` find the
blocks of scores that count. Values have the types of kernels' arguments. A tensor may have no elements. Sizes are
symbols, as in `Nq`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import sympy

from attngen.errors import VerifyError
from attngen.ir.expr import Bool, Expr
from attngen.ir.names import DIMS
from attngen.ir.ops import OPERAND, Arg, Block, Map, Op, Type, Uses, Yield

Given = tuple[tuple[str, Expr], ...]  # (size as the kernel names it, its value)


@dataclass(frozen=True)
class Alloc(Op):
    """A new tensor, not initialised or filled with the number `fill`. With `like`, it is laid out in memory as that
    tensor is.

    where: if the condition is false, nothing is allocated. The value is then a tensor without elements, or, with
    `otherwise`, that tensor with a dimension of length 1, for parts, after that of heads.
    """

    type: Type
    like: str | None = field(default=None, metadata=OPERAND)
    fill: Expr | None = None
    where: Bool = sympy.true
    otherwise: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class View(Op):
    """The same elements under another type.

    by `expand`: dimensions of length 1 are repeated. by `heads`: the dimension Hq becomes two, [Hkv, group]. by
    `first_columns`, `last_columns`: of the columns of a head those of the latent, D_V, or the others, D_ROPE. by
    `group`: the queries of all heads of a group become rows of their K/V head, head after head. If the layout in memory
    does not allow a view, it is a copy; with `fresh`, it is then a new tensor without a copy, for results.
    """

    src: str = field(metadata=OPERAND)
    by: str
    type: Type
    fresh: bool = False


@dataclass(frozen=True)
class Copy(Op):
    """Copy a `fresh` view's elements back to the tensor `into`, of which it is a view. If no new tensor was made, it
    does nothing."""

    src: str = field(metadata=OPERAND)
    into: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class Launch(Op):
    """Run a kernel. An argument gets the host's value of its name, unless `args` names another value or `sizes`
    another size."""

    kernel: str
    args: Uses = field(default=(), metadata=OPERAND)
    sizes: Given = ()


@dataclass(frozen=True)
class If(Op):
    """Run the block `then` if some tensor of `of` has elements and the condition holds; otherwise the block `orelse`,
    if there is one.

    Both blocks yield the same fields, which are its results.
    """

    then: str
    of: tuple[str, ...] = field(default=(), metadata=OPERAND)
    where: Bool = sympy.true
    orelse: str = ""


@dataclass(frozen=True)
class Sum(Op):
    """Sum over named dimensions. The result has its dimensions in the order of `type`."""

    value: str = field(metadata=OPERAND)
    over: tuple[str, ...]
    type: Type


@dataclass(frozen=True)
class Place(Op):
    """A tensor shaped as `like`: the value at the place `at`, where `:` means all of a dimension, and zero
    elsewhere."""

    value: str = field(metadata=OPERAND)
    like: str = field(metadata=OPERAND)
    at: tuple[str, ...]
    type: Type


@dataclass(frozen=True)
class SumDistances(Op):
    """The gradient of a table that is read by distance, kv_idx - q_idx. `value` has a sum for each distance.

    at: the place at which the table is read: `b`, `h` and one expression in `distance`.
    """

    value: str = field(metadata=OPERAND)
    like: str = field(metadata=OPERAND)
    at: tuple[str, ...]
    type: Type


@dataclass(frozen=True)
class CutBlocks(Op):
    """Two masks of blocks, made from the number of visible pairs in each strip of a block: `seen`, some pair is
    visible, and `full`."""

    src: str = field(metadata=OPERAND)
    type: Type

    def results(self) -> dict[str, Type]:
        return {"seen": self.type, "full": self.type}


@dataclass(frozen=True)
class ListBlocks(Op):
    """Lists of blocks for kernels that own tiles of `own`: in each row of blocks, the numbers of those that count, and
    `rank`s.

    `src` is a mask of blocks. `full` is a mask of the blocks in which nothing is hidden: these then come first, with a
    `full_rank`.
    """

    src: str = field(metadata=OPERAND)
    own: str
    type: Type  # of the list
    full: str | None = field(default=None, metadata=OPERAND)

    def results(self) -> dict[str, Type]:
        *rows, last = self.type.dims
        ranks = replace(self.type, dims=(*rows, f"{last}1"))
        return {"full_rank": ranks, "rank": ranks, "list": self.type}


COLUMNS = {"first_columns": "D_V", "last_columns": "D_ROPE"}  # views of some columns, and how many they have
HOST_OPS: dict[str, type[Op]] = {
    "arg": Arg,
    "alloc": Alloc,
    "view": View,
    "copy": Copy,
    "launch": Launch,
    "if": If,
    "map": Map,
    "sum": Sum,
    "place": Place,
    "sum_distances": SumDistances,
    "cut_blocks": CutBlocks,
    "list_blocks": ListBlocks,
    "yield": Yield,
}
HOST_KIND = {cls: kind for kind, cls in HOST_OPS.items()}


@dataclass(frozen=True, eq=False)
class Host:
    """One host program. The block `entry` has its arguments and yields its results; each branch of an `if` has a
    block of its own."""

    name: str
    blocks: tuple[Block, ...]

    def block(self, name: str) -> Block:
        return next(b for b in self.blocks if b.name == name)

    def ops(self) -> Iterable[Op]:
        return (op for block in self.blocks for op in block.ops)

    @cached_property
    def by_name(self) -> dict[str, Op]:
        """Its ops by name. Raises VerifyError if two ops have one name."""
        found: dict[str, Op] = {}
        for op in self.ops():
            if op.name in found:
                raise VerifyError("defined-once", f"%{op.name} is defined twice in host @{self.name}", "")
            found[op.name] = op
        return found

    @cached_property
    def args(self) -> tuple[Arg, ...]:
        return tuple(op for op in self.block("entry").ops if isinstance(op, Arg))

    @cached_property
    def sizes(self) -> set[str]:
        """The sizes that its arguments' dimensions name, besides widths of heads."""
        return {d for arg in self.args for d in arg.type.dims if d in DIMS}

    @property
    def results(self) -> dict[str, str]:
        """Its results, by name: references to the values that @entry yields."""
        last = self.block("entry").ops[-1]
        return dict(last.values) if isinstance(last, Yield) else {}

    def fields(self, op: If) -> dict[str, str]:
        """The fields of an `if`, with the references that its first branch yields for them."""
        last = self.block(op.then).ops[-1]
        return dict(last.values) if isinstance(last, Yield) else {}

    def type_of(self, ref: str) -> Type:
        """The type of a value. A field of an `if` has the type of what its first branch yields."""
        name, _, member = ref.partition(".")
        op = self.by_name[name]
        if isinstance(op, If):
            return self.type_of(self.fields(op)[member])
        return op.results()[member]

    def common_launches(self, block: str = "entry") -> list[str]:
        """The kernels that most calls launch: those in branches for tensors with elements, not in branches for
        special sizes."""
        found: list[str] = []
        for op in self.block(block).ops:
            if isinstance(op, Launch):
                found.append(op.kernel)
            elif isinstance(op, If) and (op.where == sympy.true or op.orelse):
                found += self.common_launches(op.then if op.where == sympy.true else op.orelse)
        return found

    def rewrite(self, change: Callable[[Op], Iterable[Op]]) -> Host:
        """A host program with every op replaced by those that change(op) gives."""
        return replace(
            self, blocks=tuple(replace(b, ops=tuple(n for op in b.ops for n in change(op))) for b in self.blocks)
        )
