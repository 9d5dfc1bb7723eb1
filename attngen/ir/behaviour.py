"""What ops mean to one reader of the IR, such as the executor or a printer: a method for each class of ops.

    class Launch(Handlers, complete=TILE):
        @handles(tile.Load)
        def _load(self, op: tile.Load, values: Values) -> Any: ...

`self.handler(op)` is the method for an op. A class that says `complete` has a method for every op of that dialect, but
for those of `control`, such as loops, which it treats itself; otherwise it cannot be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from attngen.ir.op import Dialect, Op

F = TypeVar("F", bound=Callable[..., Any])


class Table:
    """A function for each class of ops, such as the rule that checks its types:

    @TYPES.of(tile.Dot)
    def _dot_errors(kernel: Kernel, op: tile.Dot) -> Iterator[str]: ...
    """

    def __init__(self) -> None:
        self.functions: dict[type[Op], Callable[..., Any]] = {}

    def of(self, *classes: type[Op]) -> Callable[[F], F]:
        """Register a function for classes of ops."""

        def register(function: F) -> F:
            self.functions |= dict.fromkeys(classes, function)
            return function

        return register

    def complete(self, ops: Iterable[type[Op]], without: Iterable[type[Op]]) -> None:
        """Raise TypeError if some op has no function and is not among those that need none."""
        if missing := set(ops) - {*without, *self.functions}:
            kinds = ", ".join(sorted(op.declared.kind for op in missing))
            raise TypeError(f"no function is registered for {kinds}")


def handles(*classes: type[Op]) -> Callable[[F], F]:
    """Register a method for classes of ops. In a subclass, a method of the same name replaces it for them."""

    def register(method: F) -> F:
        method._handles = classes  # type: ignore[attr-defined]
        return method

    return register


class Handlers:
    """Base of classes that have a method for each class of ops."""

    handlers: ClassVar[dict[type[Op], str]] = {}  # class of ops -> name of the method

    def __init_subclass__(cls, complete: Dialect | None = None, control: Iterable[type[Op]] = ()) -> None:
        methods = ((name, method) for base in reversed(cls.__mro__) for name, method in vars(base).items())
        cls.handlers = {op: name for name, method in methods for op in getattr(method, "_handles", ())}
        if complete and (missing := set(complete.ops.values()) - {*control, *cls.handlers}):
            kinds = ", ".join(sorted(op.declared.kind for op in missing))
            raise TypeError(f"{cls.__name__} has no method for {kinds} of the dialect {complete.name}")

    def handler(self, op: Op) -> Callable[..., Any]:
        """The method for an op."""
        method: Callable[..., Any] = getattr(self, self.handlers[type(op)])
        return method
