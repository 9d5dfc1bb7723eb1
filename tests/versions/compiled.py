"""What the Triton that is installed makes of the committed kernels, without a GPU.

python -m tests.versions.compiled                     prints, as JSON, its findings of a sample of the modules
python -m tests.versions.compiled --all --write       of all modules (half an hour on one core); docs/versions.json keeps them
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from attngen.certify.certificate import TOLERANCE, chosen, reason
from attngen.devices import CLASSES
from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.text import parse_module
from attngen.targets.common.base import CompileReport
from attngen.targets.triton.compiler import compile_all, job, triton_version
from attngen.targets.triton.cost import schedule_key
from attngen.targets.triton.sram import sram_bytes
from tests.versions import warp_specialized

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "versions.json"  # by version of Triton, and by target
SAMPLE = ("causal_mqa",)
TARGETS = (
    "sm80",
    "sm90",
    "sm100",
    "gfx942",
    warp_specialized.NAME,
)  # the last: forwards for sm90 whose warps have roles


def of_target(work: list[tuple[Module, Kernel, Config]], readings: list[CompileReport | str]) -> dict[str, Any]:
    """How many kernels were compiled, and those that spill (bytes), need more shared memory than predicted, or less, or
    do not compile.

    `more` and `less`: bytes predicted and reported; `less` by more than TOLERANCE, with no reason in the report.
    """
    found: dict[str, Any] = {"kernels": len(work), "spill": {}, "more": {}, "less": {}, "unfit": {}, "failed": {}}
    for (module, kernel, config), reading in zip(work, readings):
        name, predicted = f"{module.name} {schedule_key(module, kernel, config)}", sram_bytes(module, kernel, config)
        if isinstance(reading, str):
            found["failed"][name] = reading
            continue
        pair = [predicted, reading.shared_bytes]
        if reading.spilled_bytes:
            found["spill"][name] = reading.spilled_bytes
        if reading.shared_bytes > predicted:
            found["more"][name] = pair
        if reading.shared_bytes > CLASSES[config.device].smem_per_block:
            found["unfit"][name] = pair
        if predicted > TOLERANCE * reading.shared_bytes and not reason(module, kernel, config, reading):
            found["less"][name] = pair
    return found


def findings(names: list[str], targets: list[str], workers: int) -> dict[str, dict[str, Any]]:
    """By target what the installed Triton makes of the modules' kernels, for the rows that `attngen verify` takes.

    Of a sample, if no modules are named.
    """
    modules = []
    for name in names or list(SAMPLE):
        ir = ROOT / "generated" / name / "schedule.ir"
        modules.append((parse_module(ir.read_text(encoding="utf-8"), str(ir)), ir.with_name("kernels.py")))
    found = {}
    for target in targets:
        if target == warp_specialized.NAME:
            found[target] = warp_specialized.findings(None if names else list(warp_specialized.SAMPLE), workers)
            continue
        asked = [
            (module, kernel, config, file) for module, file in modules for kernel, config in portable(module, target)
        ]
        readings = compile_all([job(*what) for what in asked], workers)
        found[target] = of_target([what[:3] for what in asked], list(readings))
    return found


def portable(module: Module, target: str) -> list[tuple[Kernel, Config]]:
    """The rows that `attngen verify` takes of the module's own backend."""
    return [(kernel, config) for kernel, config in chosen(module, [target], False) if config.backend == module.backend]


def main() -> None:
    """Print findings, or put them into docs/versions.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all modules, in place of a sample")
    parser.add_argument("--write", action="store_true", help="keep what was found in docs/versions.json")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    names = sorted(path.parent.name for path in (ROOT / "generated").glob("*/schedule.ir")) if asked.all else []
    found = findings(names, asked.target, asked.jobs)
    if asked.write:
        kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
        kept[triton_version()] = {**kept.get(triton_version(), {}), **found}
        KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
