"""The host program's ops: what Python does at a call between tensors and kernels, on one screen.

`host @forward` makes the output and the LSE, `host @backward` the gradients; `host @count` and `host @lists` find the blocks of scores that
count. A value has the type that the kernels' arguments have; a tensor may have no elements. Sizes are symbols (ir/names.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import sympy

from attngen.errors import VerifyError
from attngen.ir.expr import Bool, Expr
from attngen.ir.ops import OPERAND, Arg, Block, Map, Op, Type, Uses, Yield

Given = tuple[tuple[str, Expr], ...]  # (size as the kernel names it, its value)


@dataclass(frozen=True)
class Alloc(Op):
    """A new tensor: not initialised, or filled with one number. Its rows lie in memory as those of `like` do.

    Where the condition is false it has no elements; or it is `otherwise`, with a dimension of 1 for `splits`.
    """

    type: Type
    like: str | None = field(default=None, metadata=OPERAND)
    fill: Expr | None = None
    where: Bool = sympy.true
    otherwise: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class View(Op):
    """The same elements under another type.

    `expand`: dimensions of 1 are repeated. `heads`: the query heads as [Hkv, group]. `group`: the queries of all heads of a group as rows
    of their K/V head, head after head; a copy where memory does not allow a view, or, with `fresh`, room for what is written there.
    """

    src: str = field(metadata=OPERAND)
    by: str
    type: Type
    fresh: bool = False


@dataclass(frozen=True)
class Copy(Op):
    """Write back what went to room that a view has made, if it has made any, to the tensor that it is of."""

    src: str = field(metadata=OPERAND)
    into: str = field(metadata=OPERAND)


@dataclass(frozen=True)
class Launch(Op):
    """Run a kernel. Each of its arguments gets the host's value of the same name, or what `args` and `sizes` say."""

    kernel: str
    args: Uses = field(default=(), metadata=OPERAND)
    sizes: Given = ()


@dataclass(frozen=True)
class If(Op):
    """Run the block `then` where a tensor of `of` has elements and the condition holds, else the block `orelse`, if there is one.

    Its results are the fields that both blocks yield.
    """

    then: str
    of: tuple[str, ...] = field(default=(), metadata=OPERAND)
    where: Bool = sympy.true
    orelse: str = ""

    def operands(self) -> Iterator[str]:
        yield from self.of


@dataclass(frozen=True)
class Splits(Op):
    """Among how many programs the query heads of a group are split: a multiprocessor gets at least so many keys of all heads."""

    least: int
    type: Type


@dataclass(frozen=True)
class Sum(Op):
    """Sum over named dimensions; the result has the order of its type's. `into`: a tensor that it is written to."""

    value: str = field(metadata=OPERAND)
    over: tuple[str, ...]
    type: Type
    into: str | None = field(default=None, metadata=OPERAND)


@dataclass(frozen=True)
class Place(Op):
    """A tensor as `like`: the value where `at` has numbers and all (`:`) of other dimensions, zero elsewhere."""

    value: str = field(metadata=OPERAND)
    like: str = field(metadata=OPERAND)
    at: tuple[str, ...]
    type: Type


@dataclass(frozen=True)
class SumDistances(Op):
    """The gradient of a table that is read by distance, key less query: `value` has a sum for each distance.

    `at` are the places at which the table is read: `b` and `h`, and an expression in `distance`.
    """

    value: str = field(metadata=OPERAND)
    like: str = field(metadata=OPERAND)
    at: tuple[str, ...]
    type: Type


@dataclass(frozen=True)
class CutBlocks(Op):
    """Of the number of visible pairs of each strip of a block: the blocks in which something is `seen`, and those that are `full`."""

    src: str = field(metadata=OPERAND)
    type: Type

    def results(self) -> dict[str, Type]:
        return {"seen": self.type, "full": self.type}


@dataclass(frozen=True)
class ListBlocks(Op):
    """The blocks that count in each row of blocks, for kernels that own tiles of `own`: their `rank`s and their numbers, a `list`.

    `src` is a mask of blocks. With `full`, a mask of those in which nothing is hidden, these come first and have a `full_rank`.
    """

    src: str = field(metadata=OPERAND)
    own: str
    type: Type  # of the list
    full: str | None = field(default=None, metadata=OPERAND)

    def results(self) -> dict[str, Type]:
        *rows, last = self.type.dims
        ranks = replace(self.type, dims=(*rows, f"{last}1"))
        return {"full_rank": ranks, "rank": ranks, "list": self.type}


HOST_OPS: dict[str, type[Op]] = {
    "arg": Arg,
    "alloc": Alloc,
    "view": View,
    "copy": Copy,
    "launch": Launch,
    "if": If,
    "splits": Splits,
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
    """One host program: its arguments and ops in the block `entry`, which yields its results, and a block for each branch."""

    name: str
    blocks: tuple[Block, ...]

    def block(self, name: str) -> Block:
        return next(b for b in self.blocks if b.name == name)

    def ops(self) -> Iterable[Op]:
        return (op for block in self.blocks for op in block.ops)

    @cached_property
    def by_name(self) -> dict[str, Op]:
        """Its ops by name; VerifyError where two have one."""
        found: dict[str, Op] = {}
        for op in self.ops():
            if op.name in found:
                raise VerifyError("defined-once", f"%{op.name} is defined twice in host @{self.name}", "")
            found[op.name] = op
        return found

    @cached_property
    def args(self) -> tuple[Arg, ...]:
        return tuple(op for op in self.block("entry").ops if isinstance(op, Arg))

    @property
    def results(self) -> dict[str, str]:
        """Its results by name: the values that @entry yields."""
        last = self.block("entry").ops[-1]
        return dict(last.values) if isinstance(last, Yield) else {}

    def fields(self, op: If) -> dict[str, str]:
        """The results of an `if`: fields, and the values of its first branch."""
        last = self.block(op.then).ops[-1]
        return dict(last.values) if isinstance(last, Yield) else {}

    def type_of(self, ref: str) -> Type:
        """The type of a value; a branch's field has the type of what its first block yields."""
        name, _, member = ref.partition(".")
        op = self.by_name[name]
        if isinstance(op, If):
            return self.type_of(self.fields(op)[member])
        return op.results()[member]

    def common_launches(self, block: str = "entry") -> list[str]:
        """The kernels of calls as long as they come: in the branches for tensors with elements, and for sizes that are not small."""
        found: list[str] = []
        for op in self.block(block).ops:
            if isinstance(op, Launch):
                found.append(op.kernel)
            elif isinstance(op, If) and (op.where == sympy.true or op.orelse):
                found += self.common_launches(op.then if op.where == sympy.true else op.orelse)
        return found

    def rewrite(self, change: Callable[[Op], Iterable[Op]]) -> Host:
        """A host program with every op replaced by those that change(op) gives."""
        return replace(self, blocks=tuple(replace(b, ops=tuple(n for op in b.ops for n in change(op))) for b in self.blocks))
