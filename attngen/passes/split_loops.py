"""split-loops: one loop over all tiles becomes a loop over the full ones and a loop over the partial ones.

before:  %keys = loop kv ranges(0 .. n) body(@step) tiles(a; b; c; d)
after:   %keys_full = loop kv ranges(b .. c) body(@step) cls(full)
         %keys_partial = loop kv ranges(a .. b, c .. d) carry(...=%keys_full....) body(@step) cls(partial)

Empty tiles are in neither. A range that is provably empty is left out, and so is a loop without ranges. Both loops run
the same body, in which what is marked `partial` applies in the second alone. Order does not matter to online softmax
or to sums of gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Loop, Op
from attngen.passes.base import Pass


@dataclass(frozen=True)
class SplitLoops(Pass):
    name: ClassVar[str] = "split-loops"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return replace(module.map_kernels(_split), phase=self.phase)


def _split(kernel: Kernel) -> Kernel:
    renamed: dict[str, str] = {}

    def change(_: str, op: Op) -> Iterable[Op]:
        op = op.with_operands(renamed)
        if not isinstance(op, Loop) or not op.tiles:
            return [op]
        a, b, c, d = op.tiles
        loops: list[Op] = []
        carry = op.carry
        for cls, pairs in (("full", ((b, c),)), ("partial", ((a, b), (c, d)))):
            ranges = tuple((lo, hi) for lo, hi in pairs if lo != hi)
            if ranges:
                loop = replace(op, name=f"{op.name}_{cls}", ranges=ranges, carry=carry, cls=cls)
                loops.append(loop)
                carry = tuple((f, f"{loop.name}.{f}") for f, _ in carry)
        renamed.update({f"{op.name}.{f}": r for f, r in carry})
        return loops

    return kernel.rewrite(change)
