"""Compile warp-specialized forwards for Hopper with the installed Triton, without a GPU, and report the findings."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.devices import CLASSES
from attngen.targets.hopper import HOPPER
from attngen.targets.hopper.toolchain.certificate import overlapped_share
from tests.hopper.common import WARP_SPECIALIZED, lowered

NAME = "hopper"  # among the targets
SAMPLE = ("causal_mqa", "causal_gqa")  # head_dim 64 and 128


def findings(names: list[str] | None = None, workers: int = 1) -> dict[str, Any]:
    """Return the findings of tests.versions.compiled about the warp-specialized forwards of specs (all such forwards if
    none are named), and the kernels in these lists:

    serialised: wgmmas wait for each other.
    reused: an operand register of a wgmma in flight is written.
    unset: a uniform register is read on a path that has not written it.
    bare: fewer exponentials overlap a wgmma than the ops say.
    """
    found: dict[str, Any] = {"kernels": 0, "spill": {}, "more": {}, "less": {}, "do_not_fit": {}, "failed": {}}
    found |= {"serialised": [], "reused": [], "unset": [], "bare": []}
    asked = [
        (lowered(name), kernel, config)
        for name in names or WARP_SPECIALIZED
        for kernel, config in lowered(name).stand_ins("fwd")
    ]
    with tempfile.TemporaryDirectory() as folders:
        jobs = []
        for module, kernel, config in asked:
            folder = Path(folders) / module.name
            write_module(render(module), folder)
            jobs.append(HOPPER.compiler.job(module, kernel, config, folder / HOPPER.file))
        reports = list(HOPPER.compiler.compile_all(jobs, workers))
    for (module, kernel, config), report in zip(asked, reports):
        name = f"{module.name}{' @' + kernel.name if kernel.of else ''}"
        found["kernels"] += 1
        if isinstance(report, str):
            found["failed"][name] = report
            continue
        predicted, code = HOPPER.resources.sram_bytes(module, kernel, config), report.machine or {}
        sizes = {"more": report.shared_bytes > predicted, "less": report.shared_bytes < predicted}
        sizes["do_not_fit"] = report.shared_bytes > CLASSES[config.device].smem_per_block
        for key, is_so in sizes.items():
            found[key] |= {name: [predicted, report.shared_bytes]} if is_so else {}
        found["spill"] |= {name: report.spilled_bytes} if report.spilled_bytes else {}
        bare = code["under"] < overlapped_share(kernel, config)[0] * code["exponentials"]
        for key, is_so in (*((key, bool(code[key])) for key in ("serialised", "reused", "unset")), ("bare", bare)):
            found[key] += [name] if is_so else []
    return found
