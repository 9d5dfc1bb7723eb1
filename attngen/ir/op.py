"""Ops: their base class, the dialects that declare them, and blocks of ops.

An op is a frozen dataclass in a dialect. Its declaration says everything about it that is no behaviour: its fields by
kind (ir/fields.py), its text, its results. What it means for the verifier, the executor and each target is registered
by class (ir/behaviour.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar, get_type_hints, overload

from attngen.ir.core import Type
from attngen.ir.expr import symbol_names
from attngen.ir.fields import BLOCK, Kind, Names, expressions_in, kind_of

SomeOp = TypeVar("SomeOp", bound="Op")


class Declaration:
    """What the declaration of an op says.

    kind: its name in text.
    positional: the fields whose values follow the kind in text, without the field's name.
    has_result: ops without a result, such as stores, have no name in text. The parser names them by their position.
    """

    def __init__(self, cls: type[Op], text: str, has_result: bool) -> None:
        self.cls, self.has_result = cls, has_result
        self.kind, *positional = text.split()
        self.positional = tuple(positional)

    @cached_property
    def kinds(self) -> Mapping[str, Kind]:
        """The kind of each field, without that of the op's name."""
        hints = get_type_hints(self.cls, include_extras=True)
        return {f.name: kind_of(hints[f.name]) for f in fields(self.cls) if f.name != "name"}

    @cached_property
    def operands(self) -> tuple[tuple[str, Callable[[Any], Iterable[str]]], ...]:
        """The fields that name values, each with the function that lists these."""
        return tuple((name, kind.refs) for name, kind in self.kinds.items() if kind.refs)

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The fields that name blocks."""
        return tuple(name for name, kind in self.kinds.items() if kind is BLOCK)

    @cached_property
    def omitted(self) -> Mapping[str, Any]:
        """The values of fields that text may leave out although they have no default: empty tuples."""
        kinds = self.kinds
        return {
            f.name: kinds[f.name].empty
            for f in fields(self.cls)
            if f.name in kinds and f.default is MISSING and kinds[f.name].empty is not None
        }


@dataclass(frozen=True)
class Op:
    """Base class of all ops. `name` is the name of the op's value."""

    name: str
    declared: ClassVar[Declaration]

    @property
    def kind(self) -> str:
        """The op's name in text, such as `load`."""
        return self.declared.kind

    def operands(self) -> Iterator[str]:
        """The references that this op reads, in the order of its fields."""
        for name, refs in self.declared.operands:
            value = getattr(self, name)
            if value is not None:
                yield from refs(value)

    @cached_property
    def expressions(self) -> tuple[Any, ...]:
        """All expressions in its fields: indices, conditions, bounds, numbers."""
        return tuple(e for f in fields(self) for e in expressions_in(getattr(self, f.name)))

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The names of the symbols in its expressions."""
        return frozenset(name for e in self.expressions for name in symbol_names(e))

    def results(self) -> dict[str, Type]:
        """Result types by field; the key is empty for an op with one result."""
        return {"": self.type} if hasattr(self, "type") else {}

    def with_operands(self: SomeOp, rename: Names) -> SomeOp:
        """The same op with its references renamed."""
        new: dict[str, Any] = {}
        for name, _ in self.declared.operands:
            value, renamed = getattr(self, name), self.declared.kinds[name].renamed
            if value is not None and renamed:
                new[name] = renamed(value, rename)
        return replace(self, **new)


class Dialect:
    """The ops of one level of the IR, by their names in text, in the order in which they are declared.

    name: `tile`, `pipe`, ...
    uses: ops of other dialects that programs of this level have, too.
    """

    def __init__(self, name: str, uses: Iterable[type[Op]] = ()) -> None:
        self.name = name
        self.own: dict[str, type[Op]] = {}
        self.ops: dict[str, type[Op]] = {cls.declared.kind: cls for cls in uses}

    def op(self, text: str, *, result: bool = True) -> Callable[[type[SomeOp]], type[SomeOp]]:
        """Declare an op. `text` has its kind, and the fields that follow it in text without their names."""

        def declare(cls: type[SomeOp]) -> type[SomeOp]:
            cls.declared = Declaration(cls, text, result)
            kind = cls.declared.kind
            if kind in self.ops:
                raise TypeError(f"the dialect {self.name} has two ops `{kind}`")
            self.own[kind] = self.ops[kind] = cls
            return cls

        return declare


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
