"""pipeline-loads: choose how many buffers the tiles of a loop have, so that copies run ahead of the arithmetic.

before:  sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=64 num_warps=4 num_stages=1
after:   sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=64 num_warps=4 num_stages=3

Every row of the schedule gets the number of stages that the cost model finds cheapest. A deeper ring of buffers hides more latency, but
leaves less room for other programs on the same SM. Measured rows keep their number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.analysis.cost import best_stages
from attngen.ir.graph import Kernel, Module, Row, Unfit
from attngen.passes.base import Pass
from attngen.passes.select_tiles import joined


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
