"""The rule `host-written`: on every path of a host program, tensors are written before they are read."""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from attngen.ir import Bool, Host, Module, Op, launch, only, tile
from attngen.ir.names import (
    INTEGERS,
)

POSITIVE = {name for name, n in INTEGERS.items() if n.least and not n.source}  # sizes that are never 0


def written(module: Module, host: Host) -> Iterator[str]:
    """On every path, a tensor is written before it is read, unless it has no elements.

    Kernels do not write all elements of gradients by score if a mask hides scores, nor of gradients to which they add
    at any element.
    """
    yield from _Writes(module, host).reasons()


class _Writes:
    """Visits the ops of a program, with the set of tensors that are written so far."""

    def __init__(self, module: Module, host: Host) -> None:
        self.host, self.kernels = host, {kernel.name: kernel for kernel in module.kernels}
        self.except_where: dict[str, Bool] = {}  # tensor -> the condition under which it is not written
        self.partial = {
            x.partials
            for x in module.input_gradients
            if x.reduction in ("score", "element", *(("query", "entry", "distance") if module.chunk else ()))
            and not module.covers(x)
        }
        self.found: list[str] = []

    def reasons(self) -> list[str]:
        done = self._block("entry", {op.name for op in self.host.args})
        for name, ref in self.host.results.items():
            if self._tensor(ref) not in done and not self._is_field(ref):
                self.found.append(f"its result {name} is not written on every path")
        return self.found

    def _is_field(self, ref: str) -> bool:
        return isinstance(self.host.by_name[ref.partition(".")[0]], launch.If)

    def _tensor(self, ref: str) -> str:
        """The tensor that has the elements of a value; for a view, its source."""
        op = self.host.by_name[ref.partition(".")[0]]
        return self._tensor(op.src) if isinstance(op, launch.View) else op.name

    def _block(self, block: str, state: set[str]) -> set[str]:
        for op in self.host.block(block).ops:
            state = self._op(op, state)
        return state

    def _op(self, op: Op, state: set[str]) -> set[str]:
        match op:
            case launch.Alloc():
                filled = op.fill is not None and op.fill_where == sympy.true
                return state | {op.name} if filled or op.where == sympy.false else state
            case launch.If():
                return self._if(op, state)
            case launch.Launch() if op.kernel in self.kernels:
                return self._launch(op, state)
            case launch.Copy():
                return state | {op.into} if op.src in state else state
            case launch.View():
                return state
        reads = (
            [ref for _, ref in op.values if not self._is_field(ref)]
            if isinstance(op, tile.Yield)
            else list(op.operands())
        )
        for ref in reads:
            self._read(op.name, ref, state)
        return state | {op.name}

    def _read(self, reader: str, ref: str, state: set[str]) -> None:
        name = self._tensor(ref)
        if not {name, ref.partition(".")[0]} & state:
            self.found.append(f"{reader} reads %{ref}, which is not written on every path to it")

    def _launch(self, op: launch.Launch, state: set[str]) -> set[str]:
        given = dict(op.args)
        args = self.kernels[op.kernel].args
        moved = {op.dst.tensor for op in only(self.kernels[op.kernel].ops(), tile.Scatter) if op.op in ("min", "max")}
        for arg in args:
            if arg.role in ("in", "inout", "sum") or (arg.role == "out" and arg.name in moved):
                self._read(f"@{op.kernel}", given.get(arg.name, arg.name), state)
        for arg in args:
            if arg.role in ("out", "inout", "sum") and arg.name not in self.partial:
                state = state | self._write(given.get(arg.name, arg.name))
        return state

    def _write(self, ref: str) -> set[str]:
        """The tensors that are written when a kernel writes to a value."""
        op = self.host.by_name.get(ref)
        if isinstance(op, launch.View):
            source = self.host.by_name[op.src]
            contiguous = isinstance(source, launch.Alloc) and not source.like
            # A view of another layout may be a new tensor, which `copy` writes back.
            return {ref, op.src} if contiguous else {ref}
        if isinstance(op, launch.Alloc) and op.otherwise:
            self.except_where[op.otherwise] = op.where
        return {ref}

    def _if(self, op: launch.If, state: set[str]) -> set[str]:
        inside = self._block(op.then, state)
        if op.where != sympy.true and not op.of:
            # Tensors that are written unless this condition holds; if it holds, the branch writes them.
            inside_all = {name for name, where in self.except_where.items() if where == op.where and name in inside}
            state = state | inside_all
        outside = state | (self._empty(op.of) if op.where == sympy.true else set())
        outside = self._block(op.orelse, outside) if op.orelse else outside
        return (inside & outside) | state | {op.name}

    def _empty(self, tensors: tuple[str, ...]) -> set[str]:
        """The tensors that are empty if all of these are."""
        found = set(tensors)
        for name in tensors:
            dims, where = self._extent(name)
            for other in (op.name for op in only(self.host.ops(), launch.Alloc)):
                more, when = self._extent(other)
                if dims <= more and (where in (sympy.true, when) or when in sympy.Or.make_args(where)):
                    found.add(other)
        return found

    def _extent(self, name: str) -> tuple[set[str], Bool]:
        """The dimensions of a tensor that may be 0, and the condition of its allocation."""
        op = self.host.by_name[name]
        return set(self.host.type_of(name).dims) - POSITIVE, op.where if isinstance(op, launch.Alloc) else sympy.true
