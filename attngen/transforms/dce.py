"""dce: remove ops that no store depends on.

before:  %score = map expr(qk_scale*s) ...          # folded into the softmax, so nothing reads it
after:   (removed)

A loop's carried fields are removed individually. Loops whose body stores stay, and so do the kernel's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir import Kernel, Module, Op, only, tile
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class Dce(Pass):
    name: ClassVar[str] = "dce"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return module.map_kernels(prune)


def prune(kernel: Kernel) -> Kernel:
    """Return the kernel with only its arguments and the ops that its stores depend on."""
    live = _live(kernel)
    names = {ref.partition(".")[0] for ref in live}
    fields = {loop.body: {f for f, _ in loop.carry if f"{loop.name}.{f}" in live} for loop in kernel.loops}

    def change(block: str, op: Op) -> list[Op]:
        if isinstance(op, tile.Yield):
            return [replace(op, values=tuple(pair for pair in op.values if pair[0] in fields[block]))]
        if isinstance(op, tile.Loop) and (op.name in names or op.body in kernel.traits.storing):
            return [replace(op, carry=tuple(pair for pair in op.carry if pair[0] in fields[op.body]))]
        kept = (
            isinstance(op, (tile.Barrier, tile.Scatter, tile.Store, tile.GridDependencyWait))
            or (isinstance(op, tile.Arg) and op.role != "carry")
            or op.name in names
        )
        return [op] if kept else []

    return kernel.rewrite(change)


def _live(kernel: Kernel) -> set[str]:
    """Return the references that the stores depend on; for a loop these are its fields."""
    found: set[str] = set()
    stores = list(only(kernel.ops(), tile.Scatter, tile.Store))
    todo = [ref for op in stores for ref in (*op.operands(), *kernel.traits.scalars_of(op))]
    for loop in (loop for loop in kernel.loops if loop.body in kernel.traits.storing):
        todo += kernel.traits.scalars_of(loop)
        todo += [loop.listed] if loop.listed else []
    while todo:
        ref = todo.pop()
        if ref in found:
            continue
        found.add(ref)
        op, field = kernel.op(ref), ref.partition(".")[2]
        if isinstance(
            op, tile.Loop
        ):  # the field's initial value, the value that the body yields, and the body's argument
            (last,) = only(kernel.block(op.body).ops, tile.Yield)
            todo += [dict(op.carry)[field], dict(last.values)[field], field]
            todo += [op.listed] if op.listed else []
        elif isinstance(op, tile.Arg) and op.role == "carry":  # an iteration reads what the one before it yields
            body = kernel.graph.nodes[op.name]["block"]
            todo += [f"{loop.name}.{op.name}" for loop in kernel.loops if loop.body == body]
        else:
            todo += op.operands()
        todo += kernel.traits.scalars_of(op) if not isinstance(op, tile.Map) else []  # a map reads only operands
    return found
