"""What the Triton that is installed makes of forwards whose warps have roles, for Hopper, without a GPU."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from attngen.backends.hopper.choice import sram_bytes
from attngen.devices import CLASSES
from attngen.emit.files import write_module
from attngen.emit.render import render
from attngen.errors import last_line
from tests.hopper.common import DIVIDED, whole

NAME = "hopper"  # among the targets
SAMPLE = ("causal_mqa", "causal_gqa")  # heads of 64 and of 128 columns
CAPTURED = 512  # bytes at most, beside rings and barriers, in which Triton keeps what the groups of warps are given


def findings(names: list[str] | None = None) -> dict[str, Any]:
    """What tests.versions.compiled finds of kernels, of the forwards of specs (all that can be divided, if none are named).

    serialised: those whose products wait for each other. reused: those in which a register of a product in flight is written.
    bare: those in which less than 45% of exponentials stand under a product.
    """
    os.environ.pop("TRITON_INTERPRET", None)  # Triton must not interpret here
    from tests.hopper.aot import reading

    found: dict[str, Any] = {"kernels": 0, "spill": {}, "more": {}, "less": {}, "unfit": {}, "failed": {}}
    found |= {"serialised": [], "reused": [], "bare": []}
    for name in names or DIVIDED:
        module = whole(name)
        row = module.rows("fwd", NAME)[0]
        predicted = sram_bytes(module, module.divided[0], row)
        found["kernels"] += 1
        with tempfile.TemporaryDirectory() as made:
            write_module(render(module), Path(made) / name)
            try:
                read = reading(Path(made) / name)
            except Exception as error:  # of many kinds, of Triton's own and of its tools'
                found["failed"][name] = last_line(error)
                continue
        pair = [predicted, read["shared"]]
        if read["spilled"]:
            found["spill"][name] = read["spilled"]
        for key, is_so in (
            ("more", read["shared"] > predicted + CAPTURED),
            ("less", read["shared"] < predicted),
            ("unfit", read["shared"] > CLASSES[row.device].smem_per_block),
        ):
            found[key] |= {name: pair} if is_so else {}
        for key, is_so in (
            ("serialised", read["serialised"]),
            ("reused", bool(read["reused"])),
            ("bare", read["under"] < 0.45 * read["exponentials"]),
        ):
            found[key] += [name] if is_so else []
    return found
