"""limit-loads: in partial tiles, load only the rows that data allows in the program's visible pairs.

before:  %v = load %V[b, h // group, kv, d_v] check(kv if partial) ...
after:   %kv_needed_end = map expr(min(Nk, document_end_greatest)) uses(...) : i32[]
         %v = load %V[b, h // group, kv, d_v] check(kv if partial) needed(document_first_least .. kv_needed_end) ...

The weight of a hidden score is 0, but 0 times NaN or infinity is NaN. So no weight may be multiplied with a row that is
in no visible pair, such as a row past the last packed sequence. The range has the data-dependent bounds from which
classify-tiles derived the loop's range, and its check replaces the check against the tensor's end. Bounds that follow
from sizes are left out, and so are bounds that only exclude rows of other programs' pairs. A load from a tensor that
the kernel also stores to is not limited: an accumulator that is rewritten in HBM keeps its other rows.

Warp-specialized kernels are created earlier and keep their loads: TMA checks only the ends of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir import Expr, Kernel, Module, Op, Type, only, symbol, tile
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
        if isinstance(op, tile.Load) and block in ranges and limitable(kernel, op):
            (first, _), (end, _) = ranges[block]
            return [replace(op, needed=((first, end),))]
        return [op]

    return kernel.rewrite(change) if ranges else kernel


def _first(kernel: Kernel, body: str) -> str:
    """Return the first loop over a body, or the barrier right before it: the loop's scalars are inserted before it."""
    ops = next(block.ops for block in kernel.blocks if any(op.body == body for op in only(block.ops, tile.Loop)))
    at = next(i for i, op in enumerate(ops) if isinstance(op, tile.Loop) and op.body == body)
    return ops[at - 1].name if at and isinstance(ops[at - 1], tile.Barrier) else ops[at].name


def _named(kernel: Kernel, axis: str, word: str, e: Expr) -> tuple[Expr, tile.Map | None]:
    """Return an end of the range as a symbol, and the op that defines it unless it is already a symbol or constant."""
    if e.is_Symbol or e.is_Integer:
        return e, None
    uses = tuple(
        (name, name)
        for name in sorted(map(str, e.free_symbols))
        if name in kernel.graph and not isinstance(kernel.op(name), tile.Arg)
    )
    made = tile.Map(f"{axis}_needed_{word}", e, uses, Type("i32", (), "reg"))
    return symbol(made.name), made


def limitable(kernel: Kernel, op: Op) -> bool:
    """True if a load reads matrix operands along the loop's axis with a bounds check there."""
    return (
        isinstance(op, tile.Load)
        and kernel.loop_axis in dict(op.check)
        and op.type.dtype not in ("b1", "i32")
        and kernel.accessed(op)[0].name not in kernel.traits.stored
    )
