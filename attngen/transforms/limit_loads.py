"""limit-loads: where data says which rows a program's pairs have, partial tiles are loaded without the others.

before:  %v = load %V[b, h // group, kv, d_v] check(kv if partial) ...
after:   %kv_needed_end = map expr(min(Nk, document_end_greatest)) uses(...) : i32[]
         %v = load %V[b, h // group, kv, d_v] check(kv if partial) needed(document_first_least .. kv_needed_end) ...

The weight of a hidden score is 0, but 0 times NaN or infinity is NaN: no weight must meet a row that is in no visible
pair, such as one behind the last packed sequence. The range has the bounds of data from which classify-tiles has made
those of the loop. Its check takes the place of that against the tensor's end. Bounds that sizes alone give are left
out, and so are those that leave out rows of pairs in other programs alone.

Divided kernels are made before, and keep their loads: a copy engine checks the ends of tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir.expr import Expr, symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Barrier, Load, Loop, Map, Op, Type
from attngen.tiles.ranges import needed_rows
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class LimitLoads(Pass):
    name: ClassVar[str] = "limit-loads"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return module.map_kernels(_limited)


def _limited(kernel: Kernel) -> Kernel:
    axis = kernel.loop_axis
    bodies = dict.fromkeys(loop.body for loop in kernel.loops if loop.cls != "all" and loop.var == axis)
    found = {
        body: rows
        for body in bodies
        if any(limitable(kernel, op) for op in kernel.block(body).ops) and (rows := needed_rows(kernel, body))
    }
    ranges = {
        body: [_named(kernel, axis, word, e) for word, e in zip(("first", "end"), rows)] for body, rows in found.items()
    }
    made = {_first(kernel, body): [op for _, op in ends if op] for body, ends in ranges.items()}

    def change(block: str, op: Op) -> Iterable[Op]:
        if op.name in made:
            return [*made[op.name], op]
        if isinstance(op, Load) and block in ranges and limitable(kernel, op):
            (first, _), (end, _) = ranges[block]
            return [replace(op, needed=((first, end),))]
        return [op]

    return kernel.rewrite(change) if ranges else kernel


def _first(kernel: Kernel, body: str) -> str:
    """The first loop over a body, or a barrier right before it: numbers that the loop needs come before that."""
    ops = next(
        block.ops for block in kernel.blocks if any(isinstance(op, Loop) and op.body == body for op in block.ops)
    )
    at = next(i for i, op in enumerate(ops) if isinstance(op, Loop) and op.body == body)
    return ops[at - 1].name if at and isinstance(ops[at - 1], Barrier) else ops[at].name


def _named(kernel: Kernel, axis: str, word: str, e: Expr) -> tuple[Expr, Map | None]:
    """An end of the range, and the op that gives it a name, unless it has one."""
    if e.is_Symbol or e.is_Integer:
        return e, None
    uses = tuple(
        (name, name)
        for name in sorted(map(str, e.free_symbols))
        if name in kernel.graph and not isinstance(kernel.op(name), Arg)
    )
    made = Map(f"{axis}_needed_{word}", e, uses, Type("i32", (), "reg"))
    return symbol(made.name), made


def limitable(kernel: Kernel, op: Op) -> bool:
    """Whether a load reads numbers that are multiplied, along the loop's axis, and checks its end."""
    return isinstance(op, Load) and kernel.loop_axis in dict(op.check) and op.type.dtype not in ("b1", "i32")
