"""pipeline-loads: choose how many buffers the tiles of a loop have, so that copies run ahead of the arithmetic.

before:  sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=64 num_warps=4 num_stages=1
after:   sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=64 num_warps=4 num_stages=3

Every row of the schedule gets the number of stages that the cost model finds cheapest. A deeper ring of buffers hides more latency, but
leaves less room for other programs on the same SM. Measured rows keep their number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.backends import backend_of
from attngen.ir.graph import Kernel, Module, Row, Unfit
from attngen.passes.base import Pass
from attngen.passes.select_tiles import depths, joined


@dataclass(frozen=True)
class PipelineLoads(Pass):
    name: ClassVar[str] = "pipeline-loads"
    phase: ClassVar[str] = "scheduled"
    num_stages: int | None = None  # the spec's override

    def run(self, module: Module) -> Module:
        schedules = ((name, joined([self._deepen(module, module.kernel(name), r) for r in rows])) for name, rows in module.schedules)
        return replace(module, schedules=tuple((name, tuple(rows)) for name, rows in schedules))

    def _deepen(self, module: Module, kernel: Kernel, row: Row | Unfit) -> Row | Unfit:
        if not kernel.dots or isinstance(row, Unfit) or row.measured:  # Triton copies ahead what products wait for
            return row
        if self.num_stages is not None:
            return replace(row, num_stages=self.num_stages)
        return best_stages(module, kernel, row)


def best_stages(module: Module, kernel: Kernel, row: Row) -> Row:
    """The row with the ring depth that costs least; where all may spill, the deepest that fits."""
    backend = backend_of(row)

    def price(r: Row) -> tuple[float, bool]:
        return backend.cost.cycles(module, kernel, r), backend.footprint.misfit(module, kernel, r) is not None

    return min(depths(row), key=price)
