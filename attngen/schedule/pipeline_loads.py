"""pipeline-loads: choose the number of pipeline stages for the tiles that a loop loads, so that loads run ahead of the
arithmetic.

before:  sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=64 num_warps=4 num_stages=1
after:   sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=64 num_warps=4 num_stages=3

Every config gets the number of stages that the cost model finds cheapest. A deeper pipeline hides more latency, but
leaves less room for other programs on the same SM. Measured configs keep their number. A split-KV kernel gets the
deepest pipeline with which the CTAs per SM that are launched fit, and at least two stages. Programs of more than four
warps take too many registers to share an SM, so they get the deepest pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.devices import CLASSES
from attngen.ir import Config, DoesNotFit, Kernel, Module
from attngen.schedule.select_tiles import merged_configs, stage_choices
from attngen.targets.registry import backend_of
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class PipelineLoads(Pass):
    name: ClassVar[str] = "pipeline-loads"
    phase: ClassVar[str] = "scheduled"
    num_stages: int | None = None  # the spec's override

    def run(self, module: Module) -> Module:
        schedules = (
            (name, merged_configs([self._with_stages(module, module.kernel(name), c) for c in configs]))
            for name, configs in module.schedules
        )
        return replace(module, schedules=tuple((name, tuple(configs)) for name, configs in schedules))

    def _with_stages(self, module: Module, kernel: Kernel, config: Config | DoesNotFit) -> Config | DoesNotFit:
        # Triton only pipelines the loads of matrix operands.
        if not kernel.traits.dots or isinstance(config, DoesNotFit) or config.measured:
            return config
        if self.num_stages is not None:
            return replace(config, num_stages=self.num_stages)
        return best_stages(module, kernel, config)


def best_stages(module: Module, kernel: Kernel, config: Config) -> Config:
    """Return the config with the cheapest number of stages; if all may spill, the deepest pipeline that fits."""
    backend = backend_of(config)

    def price(c: Config) -> tuple[float, bool]:
        return backend.cost.cycles(module, kernel, c), backend.resources.why_not_fit(module, kernel, c) is not None

    choices = stage_choices(config)
    if kernel.kv_split:
        able = [c for c in choices if price(c)[0] < float("inf")]
        deep = [c for c in able if c.num_stages > 2 and (c.num_warps > 4 or _is_resident(module, kernel, c))]
        return next(iter((*deep, *(c for c in able if c.num_stages == 2))), min(choices, key=price))
    return min(choices, key=price)


def _is_resident(module: Module, kernel: Kernel, config: Config) -> bool:
    """True if the config fits, and an SM has shared memory for all CTAs that are launched per SM."""
    assert kernel.kv_split is not None
    backend, device = backend_of(config), CLASSES[config.device]
    each = backend.resources.sram_bytes(module, kernel, config) + device.smem_reserved
    return kernel.kv_split.ctas_per_sm_for(
        config.max_rows
    ) * each <= device.smem_per_sm and not backend.resources.why_not_fit(module, kernel, config)
