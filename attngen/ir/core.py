"""The parts of the IR below a kernel: types of values, accesses to tensors, ops (their base class), blocks of ops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, overload

import sympy

from attngen.ir.dims import axis_of, unpadded
from attngen.ir.dtypes import QUANTISED
from attngen.ir.expr import Bool, Expr, symbol_names

TENSORS = ("in", "out", "inout", "scratch", "sum")  # values of Arg.role for tensors in device memory
# Bytes of the element types that are the same in all modules, so not of `T` and the output types.
DTYPE_BYTES = {"f32": 4, "i32": 4, "i64": 8, "b1": 1, "ptr": 8, **dict.fromkeys(QUANTISED.values(), 2)}


@dataclass(frozen=True)
class Type:
    """The type of a value, written `dtype[dims] @space`.

    dtype: element type; `T` is the element type of q, k and v.
    dims: names of the dimensions, such as `BLOCK_Q` or `D_V`.
    space: `hbm` (device memory), `sram` (shared memory) or `reg`; `?` until assign-memory-space has decided, and
    `flight` for the result of a wgmma that has not been waited for.
    """

    dtype: str
    dims: tuple[str, ...] = ()
    space: str = "?"

    @property
    def unpadded(self) -> tuple[str, ...]:
        """Its dimensions by the names that tensors have."""
        return tuple(map(unpadded, self.dims))

    @property
    def quantised(self) -> bool:
        """True if the elements are packed pairs of 8-bit numbers."""
        return self.dtype in QUANTISED.values()


@dataclass(frozen=True)
class Access:
    """A position in a tensor, as in `%K[b, h // group, kv, d_qk]`. An axis letter stands for the current tile of that
    axis. A number added to it, as in `first_item + KV_splits`, moves the tile's start by that much."""

    tensor: str
    index: tuple[Expr, ...]

    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in map(axis_of, self.index) if axis)


Uses = tuple[tuple[str, str], ...]  # (symbol in the expression, value that it stands for)


Checks = tuple[tuple[str, str], ...]  # (axis letter, `always` or `partial`): where an access is bounds-checked


class Fact(NamedTuple):
    """A bound on a condition that is data, which cannot be solved for positions: the condition `literal` implies
    `needs`, and `enough` implies `literal`."""

    literal: Bool
    needs: Bool
    enough: Bool


OPERAND = {"operand": True}


SomeOp = TypeVar("SomeOp", bound="Op")


def _expressions_in(value: Any) -> Iterator[Any]:
    """Yield the expressions in a field's value: an expression, an access, or a tuple of these."""
    if isinstance(value, sympy.Basic):
        yield value
    elif isinstance(value, Access):
        yield from value.index
    elif isinstance(value, tuple):
        for part in value:
            yield from _expressions_in(part)


@dataclass(frozen=True)
class Op:
    """Base class of all ops. `name` is the name of the op's value."""

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
        """All expressions in its fields: indices, conditions, bounds, numbers."""
        return tuple(e for f in fields(self) for e in _expressions_in(getattr(self, f.name)))

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The names of the symbols in its expressions."""
        return frozenset(name for e in self.expressions for name in symbol_names(e))

    def results(self) -> dict[str, Type]:
        """Result types by field; the key is empty for an op with one result."""
        return {"": self.type} if hasattr(self, "type") else {}

    def with_operands(self: SomeOp, rename: dict[str, str]) -> SomeOp:
        """The same op with its references renamed."""
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


A = TypeVar("A", bound=Op)
B = TypeVar("B", bound=Op)
C = TypeVar("C", bound=Op)
D = TypeVar("D", bound=Op)


@overload
def only(ops: Iterable[Op], a: type[A], /) -> Iterator[A]: ...
@overload
def only(ops: Iterable[Op], a: type[A], b: type[B], /) -> Iterator[A | B]: ...
@overload
def only(ops: Iterable[Op], a: type[A], b: type[B], c: type[C], /) -> Iterator[A | B | C]: ...
@overload
def only(ops: Iterable[Op], a: type[A], b: type[B], c: type[C], d: type[D], /) -> Iterator[A | B | C | D]: ...
def only(ops: Iterable[Op], *kinds: type[Op]) -> Iterator[Op]:
    """Yield the ops of some kinds, such as `only(kernel.ops(), tile.Load)`."""
    return (op for op in ops if isinstance(op, kinds))


@dataclass(frozen=True)
class WarpGroup:
    """The warps of a warp-specialized kernel that run one block of ops (see ir/pipe.py).

    instances: the number of warp groups that run the block at the same time.
    warps: warps per instance.
    registers: 32-bit registers per thread.
    rows: rows of the program's tile per instance, if the instances split that tile; else 0.
    """

    instances: int
    warps: int
    registers: int
    rows: int = 0


@dataclass(frozen=True)
class Block:
    """A list of ops: the `entry` of a kernel or host program, a warp group, a loop body, or a branch of an `if`.

    about: the purpose of a loop body, as a sentence.
    """

    name: str
    ops: tuple[Op, ...]
    about: str = ""
    warp_group: WarpGroup | None = None
