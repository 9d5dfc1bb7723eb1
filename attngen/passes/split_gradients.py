"""split-gradients: dK and dV of wide heads get a kernel each.

before:  kernel @dkdv ... %total = loop q ... carry(dk=%dk_init, dv=%dv_init) ... store %dK ... store %dV
after:   kernel @dk ... carry(dk=%dk_init) ... store %dK, and kernel @dv ... carry(dv=%dv_init) ... store %dV

Two accumulators of more than WIDEST columns together leave a tile no registers: it would be small, or spill. Computing the scores
once more costs less (docs/perf-log.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.analysis.sram import tile_width
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Loop, Op, Store, Yield
from attngen.passes.base import Pass

WIDEST = 256  # columns of dK and dV together that one kernel holds


@dataclass(frozen=True)
class SplitGradients(Pass):
    name: ClassVar[str] = "split-gradients"
    phase: ClassVar[str] = "logical"

    def run(self, module: Module) -> Module:
        if tile_width(module.head_dim_qk) + tile_width(module.head_dim_v) <= WIDEST:
            return module
        kernels: list[Kernel] = []
        for kernel in module.kernels:
            kernels += [_only(kernel, out) for out in ("dK", "dV")] if kernel.name == "dkdv" else [kernel]
        return replace(module, kernels=tuple(kernels))


def _only(kernel: Kernel, out: str) -> Kernel:
    """The kernel without its other output, and without what only that one needs. Arguments that neither needs yet stay: lists of blocks."""
    every = [op for op in kernel.ops() if isinstance(op, Store)]
    stores = {op.name for op in every if op.dst.tensor == out}
    live = _live(kernel, stores)
    names, dropped = _names(live), _names(_live(kernel, {op.name for op in every})) - _names(live)
    body_of = {loop.name: loop.body for loop in kernel.loops}
    carried = {body: [ref.partition(".")[2] for ref in live if ref.startswith(f"{name}.")] for name, body in body_of.items()}

    def change(block: str, op: Op) -> list[Op]:
        if isinstance(op, Yield):
            return [replace(op, values=tuple(pair for pair in op.values if pair[0] in carried[block]))]
        if isinstance(op, Loop):
            return [replace(op, carry=tuple(pair for pair in op.carry if pair[0] in carried[op.body]))]
        if isinstance(op, Store):
            return [op] if op.name in stores else []
        return [op] if op.name in names or (isinstance(op, Arg) and (op.role == "scalar" or op.name not in dropped)) else []

    return replace(kernel.rewrite(change), name=out.lower())


def _names(refs: set[str]) -> set[str]:
    return {ref.partition(".")[0] for ref in refs}


def _live(kernel: Kernel, stores: set[str]) -> set[str]:
    """References that some of the stores depend on: of a loop, the fields."""
    found: set[str] = set()
    todo = [ref for name in stores for ref in kernel.op(name).operands()]
    while todo:
        ref = todo.pop()
        if ref in found:
            continue
        found.add(ref)
        op, field = kernel.op(ref), ref.partition(".")[2]
        if isinstance(op, Loop):
            (last,) = (o for o in kernel.block(op.body).ops if isinstance(o, Yield))
            todo += [dict(op.carry)[field], dict(last.values)[field], field]
        else:
            todo += op.operands()
    return found
