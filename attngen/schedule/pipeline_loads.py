"""pipeline-loads: choose how many buffers the tiles of a loop have, so that copies run ahead of the arithmetic.

before:  sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=64 num_warps=4 num_stages=1
after:   sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=64 num_warps=4 num_stages=3

Every row of the schedule gets the number of stages that the cost model finds cheapest. A deeper ring of buffers hides
more latency, but leaves less room for other programs on the same SM. Measured rows keep their number. Where keys of a
cache are dealt among programs, the ring is the deepest with which as many fit in a multiprocessor as are launched for
each, and of two buffers at least. Programs of more than four warps take too many registers to share a multiprocessor:
their ring is the deepest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.devices import CLASSES
from attngen.ir.graph import Config, DoesNotFit, Kernel, Module
from attngen.schedule.select_tiles import depths, joined
from attngen.targets.registry import backend_of
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class PipelineLoads(Pass):
    name: ClassVar[str] = "pipeline-loads"
    phase: ClassVar[str] = "scheduled"
    num_stages: int | None = None  # the spec's override

    def run(self, module: Module) -> Module:
        schedules = (
            (name, joined([self._deepen(module, module.kernel(name), r) for r in rows]))
            for name, rows in module.schedules
        )
        return replace(module, schedules=tuple((name, tuple(rows)) for name, rows in schedules))

    def _deepen(self, module: Module, kernel: Kernel, config: Config | DoesNotFit) -> Config | DoesNotFit:
        if (
            not kernel.dots or isinstance(config, DoesNotFit) or config.measured
        ):  # Triton copies ahead what products wait for
            return config
        if self.num_stages is not None:
            return replace(config, num_stages=self.num_stages)
        return best_stages(module, kernel, config)


def best_stages(module: Module, kernel: Kernel, config: Config) -> Config:
    """The row with the ring depth that costs least; where all may spill, the deepest that fits."""
    backend = backend_of(config)

    def price(r: Config) -> tuple[float, bool]:
        return backend.cost.cycles(module, kernel, r), backend.resources.why_not_fit(module, kernel, r) is not None

    if kernel.kv_split:
        able = [r for r in depths(config) if price(r)[0] < float("inf")]
        deep = [r for r in able if r.num_stages > 2 and (r.num_warps > 4 or _is_resident(module, kernel, r))]
        return next(iter((*deep, *(r for r in able if r.num_stages == 2))), min(depths(config), key=price))
    return min(depths(config), key=price)


def _is_resident(module: Module, kernel: Kernel, config: Config) -> bool:
    """Whether as many programs fit in a multiprocessor as are launched for each."""
    assert kernel.kv_split is not None
    backend, device = backend_of(config), CLASSES[config.device]
    each = backend.resources.sram_bytes(module, kernel, config) + device.smem_reserved
    return kernel.kv_split.ctas_per_sm_for(
        config.max_rows
    ) * each <= device.smem_per_sm and not backend.resources.why_not_fit(module, kernel, config)
