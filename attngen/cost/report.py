"""report.json: the closed forms of a module, and their values for each config."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from attngen.cost.flops import executed_flops, total_tiles, useful_flops
from attngen.cost.io import hbm_bytes
from attngen.devices import CLASSES
from attngen.ir import Config, Kernel, Module, to_text
from attngen.targets.registry import maker_of
from attngen.tiles.tiles import tile_loops

# Fields that are left out of a config's entry if they have these default values.
OMITTED = {
    "measured": Config.measured,
    "backend": Config.backend,
    "min_rows": Config.min_rows,
    "columns": Config.columns,
}


def report(module: Module) -> dict[str, Any]:
    """Formulas as text and predictions as numbers, by kernel; plain data for JSON."""
    return {
        "module": module.name,
        "attngen": module.version,
        "spec": module.spec_hash,
        "mask": module.mask,
        "flops": {d: to_text(useful_flops(module, d)) for d in module.directions},
        "kernels": {kernel.name: _kernel(module, kernel) for kernel in module.kernels},
    }


def _kernel(module: Module, kernel: Kernel) -> dict[str, Any]:
    return {
        "tiles": str(total_tiles(kernel)) if tile_loops(kernel) else "0",
        "flops": to_text(executed_flops(kernel)),
        "hbm_bytes": to_text(hbm_bytes(kernel)),
        "schedules": [
            *(_row(module, kernel, config) for config in module.configs(kernel.name)),
            *(
                _row(module, k, config) | ({"kernel": k.name} if k.of else {})
                for k, config in module.stand_ins(kernel.name)
            ),
            *(
                {"device": u.device, "elem_bytes": u.elem_bytes, "none": u.reason}
                for u in module.not_fitting(kernel.name)
            ),
        ],
    }


def schedule(config: Config) -> dict[str, Any]:
    """The fields of a config; those of OMITTED only if they differ from their defaults."""
    return {name: value for name, value in asdict(config).items() if name not in OMITTED or value != OMITTED[name]}


def _row(module: Module, kernel: Kernel, config: Config) -> dict[str, Any]:
    resources = maker_of(config).resources
    return {
        **schedule(config),
        "sram_formula": to_text(resources.formula(module, kernel, config)),
        "sram_bytes": resources.sram_bytes(module, kernel, config),
        "sram_limit": CLASSES[config.device].smem_per_block,
        "registers_per_thread": resources.registers(module, kernel, config),
        "reading": None,  # filled in by attngen.certify
    }
