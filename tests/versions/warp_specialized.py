"""What the Triton that is installed makes of forwards whose warps have roles, for Hopper, without a GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.devices import CLASSES
from attngen.targets.hopper import HOPPER
from attngen.targets.hopper.toolchain.certificate import under_product
from tests.hopper.common import WARP_SPECIALIZED, whole

NAME = "hopper"  # among the targets
SAMPLE = ("causal_mqa", "causal_gqa")  # heads of 64 and of 128 columns


def findings(names: list[str] | None = None, workers: int = 1) -> dict[str, Any]:
    """What tests.versions.compiled finds of kernels, of the forwards of specs (all that can be divided, if none are
    named).

    serialised: those whose products wait for each other. reused: those in which a register of a product in flight is
    written.
    unset: those in which a uniform register is read that some path has not written.
    bare: those in which fewer exponentials stand under a product than their ops say.
    """
    found: dict[str, Any] = {"kernels": 0, "spill": {}, "more": {}, "less": {}, "unfit": {}, "failed": {}}
    found |= {"serialised": [], "reused": [], "unset": [], "bare": []}
    asked = [
        (whole(name), kernel, row) for name in names or WARP_SPECIALIZED for kernel, row in whole(name).stand_ins("fwd")
    ]
    with tempfile.TemporaryDirectory() as made:
        jobs = []
        for module, kernel, row in asked:
            folder = Path(made) / module.name
            write_module(render(module), folder)
            jobs.append(HOPPER.compiler.job(module, kernel, row, folder / HOPPER.file))
        readings = list(HOPPER.compiler.compile_all(jobs, workers))
    for (module, kernel, row), read in zip(asked, readings):
        name = f"{module.name}{' @' + kernel.name if kernel.of else ''}"
        found["kernels"] += 1
        if isinstance(read, str):
            found["failed"][name] = read
            continue
        predicted, code = HOPPER.resources.sram_bytes(module, kernel, row), read.machine or {}
        sizes = {"more": read.shared_bytes > predicted, "less": read.shared_bytes < predicted}
        sizes["unfit"] = read.shared_bytes > CLASSES[row.device].smem_per_block
        for key, is_so in sizes.items():
            found[key] |= {name: [predicted, read.shared_bytes]} if is_so else {}
        found["spill"] |= {name: read.spilled_bytes} if read.spilled_bytes else {}
        bare = code["under"] < under_product(kernel, row)[0] * code["exponentials"]
        for key, is_so in (*((key, bool(code[key])) for key in ("serialised", "reused", "unset")), ("bare", bare)):
            found[key] += [name] if is_so else []
    return found
