"""assign-memory-space: assign a memory space to every value.

before:  %k = load %K[...] : T[BLOCK_KV, D_QK] @?
after:   %k = load %K[...] : T[BLOCK_KV, D_QK] @sram

Tensors are in HBM, loaded tiles that are operands of a matrix product are in SRAM, and all other values are in
registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from attngen.ir import TENSORS, Kernel, Module, Op, tile
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class AssignMemorySpace(Pass):
    name: ClassVar[str] = "assign-memory-space"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return module.map_kernels(_place)


def _place(kernel: Kernel) -> Kernel:
    def change(_: str, op: Op) -> list[Op]:
        if not hasattr(op, "type"):
            return [op]
        space = "reg"
        if isinstance(op, tile.Arg) and op.role in TENSORS:
            space = "hbm"
        elif isinstance(op, tile.Load) and any(kernel.traits.multiplies(dot, op) for dot in kernel.traits.dots):
            space = "sram"
        placed: Any = op
        return [replace(placed, type=replace(placed.type, space=space))]

    return kernel.rewrite(change)
