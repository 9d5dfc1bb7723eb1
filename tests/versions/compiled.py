"""Compile the committed kernels with the installed Triton, without a GPU, and report the findings.

python -m tests.versions.compiled                     prints the findings for a sample of the modules, as JSON
python -m tests.versions.compiled --all --write       writes those for all modules to docs/versions.json (half an hour
                                                      on one core)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from attngen.certify.certificate import TOLERANCE, chosen, reason
from attngen.devices import CLASSES
from attngen.ir import Config, Kernel, Module
from attngen.ir.parser import parse_module
from attngen.targets.common.base import CompileReport
from attngen.targets.triton.compiler import compile_all, job, triton_version
from attngen.targets.triton.cost import schedule_key
from attngen.targets.triton.sram import sram_bytes
from tests.versions import warp_specialized

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "docs" / "versions.json"  # by version of Triton, and by target
SAMPLE = ("causal_mqa",)
# The last target: warp-specialized forwards for sm90.
TARGETS = ("sm80", "sm90", "sm100", "gfx942", warp_specialized.NAME)


def of_target(work: list[tuple[Module, Kernel, Config]], reports: list[CompileReport | str]) -> dict[str, Any]:
    """Return the number of kernels, and those that spill (with bytes), need more or less shared memory than predicted,
    or do not compile.

    `more` and `less` have the bytes predicted and reported. `less` has kernels that need less by more than TOLERANCE
    without a reason in the report.
    """
    found: dict[str, Any] = {"kernels": len(work), "spill": {}, "more": {}, "less": {}, "do_not_fit": {}, "failed": {}}
    for (module, kernel, config), report in zip(work, reports):
        name, predicted = f"{module.name} {schedule_key(module, kernel, config)}", sram_bytes(module, kernel, config)
        if isinstance(report, str):
            found["failed"][name] = report
            continue
        pair = [predicted, report.shared_bytes]
        if report.spilled_bytes:
            found["spill"][name] = report.spilled_bytes
        if report.shared_bytes > predicted:
            found["more"][name] = pair
        if report.shared_bytes > CLASSES[config.device].smem_per_block:
            found["do_not_fit"][name] = pair
        if predicted > TOLERANCE * report.shared_bytes and not reason(module, kernel, config, report):
            found["less"][name] = pair
    return found


def findings(names: list[str], targets: list[str], workers: int) -> dict[str, dict[str, Any]]:
    """Return the findings by target, for the configs that `attngen verify` compiles; for a sample if no modules are
    named."""
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
        reports = compile_all([job(*one) for one in asked], workers)
        found[target] = of_target([one[:3] for one in asked], list(reports))
    return found


def portable(module: Module, target: str) -> list[tuple[Kernel, Config]]:
    """Return the configs of the module's own backend that `attngen verify` compiles."""
    return [(kernel, config) for kernel, config in chosen(module, [target], False) if config.backend == module.backend]


def main() -> None:
    """Print findings, or write them to docs/versions.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all modules, in place of a sample")
    parser.add_argument("--write", action="store_true", help="write the findings to docs/versions.json")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    names = sorted(path.parent.name for path in (ROOT / "generated").glob("*/schedule.ir")) if asked.all else []
    found = findings(names, asked.target, asked.jobs)
    if asked.write:
        recorded = json.loads(FINDINGS.read_text(encoding="utf-8")) if FINDINGS.exists() else {}
        recorded[triton_version()] = {**recorded.get(triton_version(), {}), **found}
        FINDINGS.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
