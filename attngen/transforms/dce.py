"""dce: remove ops that no store depends on.

before:  %score = map expr(qk_scale*s) ...          # folded into the softmax, read by nothing
after:   (gone)

A loop's carried fields are removed one by one. A loop whose body stores stays, and so do the kernel's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Barrier, GridDependencyWait, Loop, Map, Op, Scatter, Store, Yield
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class Dce(Pass):
    name: ClassVar[str] = "dce"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return module.map_kernels(prune)


def prune(kernel: Kernel) -> Kernel:
    """The kernel with only its arguments and what its stores depend on."""
    live = _live(kernel)
    names = {ref.partition(".")[0] for ref in live}
    fields = {loop.body: {f for f, _ in loop.carry if f"{loop.name}.{f}" in live} for loop in kernel.loops}

    def change(block: str, op: Op) -> list[Op]:
        if isinstance(op, Yield):
            return [replace(op, values=tuple(pair for pair in op.values if pair[0] in fields[block]))]
        if isinstance(op, Loop) and (op.name in names or op.body in kernel.storing):
            return [replace(op, carry=tuple(pair for pair in op.carry if pair[0] in fields[op.body]))]
        kept = (
            isinstance(op, (Barrier, Scatter, Store, GridDependencyWait))
            or (isinstance(op, Arg) and op.role != "carry")
            or op.name in names
        )
        return [op] if kept else []

    return kernel.rewrite(change)


def _live(kernel: Kernel) -> set[str]:
    """The references that the stores depend on; for a loop these are its fields."""
    found: set[str] = set()
    stores = [op for op in kernel.ops() if isinstance(op, (Scatter, Store))]
    todo = [ref for op in stores for ref in (*op.operands(), *kernel.scalars_of(op))]
    for loop in (loop for loop in kernel.loops if loop.body in kernel.storing):
        todo += kernel.scalars_of(loop)
        todo += [loop.listed] if loop.listed else []
    while todo:
        ref = todo.pop()
        if ref in found:
            continue
        found.add(ref)
        op, field = kernel.op(ref), ref.partition(".")[2]
        if isinstance(op, Loop):  # the field's start, what the body yields for it, and the body's argument
            (last,) = (o for o in kernel.block(op.body).ops if isinstance(o, Yield))
            todo += [dict(op.carry)[field], dict(last.values)[field], field]
            todo += [op.listed] if op.listed else []
        elif isinstance(op, Arg) and op.role == "carry":  # what a turn reads, the turn before it gives
            body = kernel.graph.nodes[op.name]["block"]
            todo += [f"{loop.name}.{op.name}" for loop in kernel.loops if loop.body == body]
        else:
            todo += op.operands()
        todo += kernel.scalars_of(op) if not isinstance(op, Map) else []  # a map reads operands alone
    return found
