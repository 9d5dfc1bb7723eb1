"""The ops of host programs, which allocate tensors, launch kernels and sum their results in Python at each call.

`host @forward` computes the output and the LSE, `host @backward` the gradients. `host @count` and `host @lists` find
the blocks of scores to visit. Values have the types of kernel arguments; a tensor may have no elements. Sizes are
symbols, such as `Nq`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import sympy

from attngen.errors import VerifyError
from attngen.ir import tile
from attngen.ir.core import Type
from attngen.ir.expr import Bool, Expr
from attngen.ir.fields import BlockName, Places, Ref, Refs, Sizes, Uses, Word, Words
from attngen.ir.names import DIMS
from attngen.ir.op import Block, Dialect, Op, only

HOST = Dialect("host", uses=(tile.Arg, tile.Map, tile.Yield))


@HOST.op("alloc")
@dataclass(frozen=True)
class Alloc(Op):
    """Allocate a tensor, uninitialised or filled with the number `fill`.

    fill_where: if the condition is false, the tensor is not filled.
    like: a tensor whose memory layout the new one gets.
    where: if the condition is false, nothing is allocated: the result has no elements, or is `otherwise`.
    otherwise: a tensor that is then the result, with a dimension of length 1, for splits, after that of heads.
    """

    type: Type
    like: Ref | None = None
    fill: Expr | None = None
    fill_where: Bool = sympy.true
    where: Bool = sympy.true
    otherwise: Ref | None = None


@HOST.op("view src")
@dataclass(frozen=True)
class View(Op):
    """View the elements of `src` under another type. Where its memory layout does not allow a view, the result is a
    copy.

    by: `expand` repeats dimensions of length 1; `heads` splits the dimension Hq into [Hkv, group]; `group` makes the
    queries of all heads of a group the rows of their K/V head, head after head; `first_columns` and `last_columns` take
    the columns of the latent, D_V, or the rotated ones, D_ROPE.
    fresh: where a copy would be made, the result is instead a new tensor for results, without the elements of `src`.
    """

    src: Ref
    by: Word
    type: Type
    fresh: bool = False


@HOST.op("copy src", result=False)
@dataclass(frozen=True)
class Copy(Op):
    """Copy the elements of the `fresh` view `src` back to the tensor `into` that it views. It does nothing if no new
    tensor was made."""

    src: Ref
    into: Ref


@HOST.op("launch kernel", result=False)
@dataclass(frozen=True)
class Launch(Op):
    """Launch a kernel. Each of its arguments gets the host value of the same name, unless `args` names another value or
    `sizes` another size."""

    kernel: BlockName
    args: Uses = ()
    sizes: Sizes = ()


@HOST.op("if")
@dataclass(frozen=True)
class If(Op):
    """Run the block `then` if some tensor of `of` has elements and the condition `where` holds, and otherwise the block
    `orelse`, if there is one. Both blocks yield the same fields, which are the results."""

    then: BlockName
    of: Refs = ()
    where: Bool = sympy.true
    orelse: BlockName = ""


@HOST.op("sum value")
@dataclass(frozen=True)
class Sum(Op):
    """Sum over the dimensions `over`. The result has its dimensions in the order of `type`."""

    value: Ref
    over: Words
    type: Type


@HOST.op("place value")
@dataclass(frozen=True)
class Place(Op):
    """Create a tensor shaped as `like` that is zero except at the index `at`, where it has `value`; `:` in the index
    means a whole dimension."""

    value: Ref
    like: Ref
    at: Places
    type: Type


@HOST.op("sum_distances value")
@dataclass(frozen=True)
class SumDistances(Op):
    """Compute the gradient of a table that is read by distance, kv_idx - q_idx: add each sum of `value`, one per
    distance, to the element that was read for it.

    like: the table.
    at: the index at which the table is read: expressions in `b`, `h` and one in `distance`.
    """

    value: Ref
    like: Ref
    at: Places
    type: Type


@HOST.op("classify_blocks src")
@dataclass(frozen=True)
class ClassifyBlocks(Op):
    """Compute two masks of blocks from the number of visible pairs in each strip of a block: `seen`, some pair is
    visible, and `full`, all pairs are."""

    src: Ref
    type: Type

    def results(self) -> dict[str, Type]:
        return {"seen": self.type, "full": self.type}


@HOST.op("list_blocks src")
@dataclass(frozen=True)
class ListBlocks(Op):
    """Make block lists for kernels with the program axis `own`. For each row of blocks, `list` has the numbers of its
    blocks, those to visit first, and `rank` the number of listed blocks before each block.

    src: a mask of the blocks to visit.
    full: a mask of the blocks in which nothing is hidden. These then come first in `list`, with ranks of their own,
    `full_rank`.
    """

    src: Ref
    own: Word
    type: Type
    full: Ref | None = None

    def results(self) -> dict[str, Type]:
        *rows, last = self.type.dims
        ranks = replace(self.type, dims=(*rows, f"{last}1"))
        return {"full_rank": ranks, "rank": ranks, "list": self.type}


COLUMN_VIEWS = {"first_columns": "D_V", "last_columns": "D_ROPE"}  # `by` of a view of some columns -> their dimension


@dataclass(frozen=True, eq=False)
class Host:
    """A host program. The block `entry` has its arguments and yields its results; each branch of an `if` is a block."""

    name: str
    blocks: tuple[Block, ...]

    def block(self, name: str) -> Block:
        return next(b for b in self.blocks if b.name == name)

    def ops(self) -> Iterable[Op]:
        return (op for block in self.blocks for op in block.ops)

    @cached_property
    def by_name(self) -> dict[str, Op]:
        """Its ops by name. Raises VerifyError if two ops have the same name."""
        found: dict[str, Op] = {}
        for op in self.ops():
            if op.name in found:
                raise VerifyError("defined-once", f"%{op.name} is defined twice in host @{self.name}", "")
            found[op.name] = op
        return found

    @cached_property
    def args(self) -> tuple[tile.Arg, ...]:
        return tuple(only(self.block("entry").ops, tile.Arg))

    @cached_property
    def sizes(self) -> set[str]:
        """The sizes that are dimensions of its arguments, without head dimensions."""
        return {d for arg in self.args for d in arg.type.dims if d in DIMS}

    @property
    def results(self) -> dict[str, str]:
        """References to the values that @entry yields, by name."""
        last = self.block("entry").ops[-1]
        return dict(last.values) if isinstance(last, tile.Yield) else {}

    def fields(self, op: If) -> dict[str, str]:
        """The fields of an `if`, with the references that its first branch yields for them."""
        last = self.block(op.then).ops[-1]
        return dict(last.values) if isinstance(last, tile.Yield) else {}

    def type_of(self, ref: str) -> Type:
        """The type of a value. A field of an `if` has the type of the value that its first branch yields."""
        name, _, member = ref.partition(".")
        op = self.by_name[name]
        if isinstance(op, If):
            return self.type_of(self.fields(op)[member])
        return op.results()[member]

    def common_launches(self, block: str = "entry") -> list[str]:
        """The kernels that most calls launch: those in branches for tensors with elements, not in branches for special
        sizes."""
        found: list[str] = []
        for op in self.block(block).ops:
            if isinstance(op, Launch):
                found.append(op.kernel)
            elif isinstance(op, If) and (op.where == sympy.true or op.orelse):
                found += self.common_launches(op.then if op.where == sympy.true else op.orelse)
        return found

    def rewrite(self, change: Callable[[Op], Iterable[Op]]) -> Host:
        """A host program with every op replaced by the ops that change(op) returns."""
        return replace(
            self, blocks=tuple(replace(b, ops=tuple(n for op in b.ops for n in change(op))) for b in self.blocks)
        )
