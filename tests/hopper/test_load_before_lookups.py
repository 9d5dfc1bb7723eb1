"""A program's own tiles are loaded before it looks up which tiles it visits (the pass load-before-lookups)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attngen.certify.certificate import why_not
from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.targets.common.base import CompileReport
from attngen.targets.hopper.toolchain.compiler import compile_all, job
from attngen.targets.hopper.toolchain.resources import sram_bytes
from attngen.verify import verify
from tests import chunks
from tests import record as known_reports
from tests.helpers import stages_of
from tests.hopper.common import edited_module
from tests.hopper.texts import texts_of

CAUSAL = texts_of("causal of chunks", "bwd")
FORWARD = texts_of("window of chunks", "fwd")
Q = "    producer_load %Q_pipeline %Q[b, g + group*hkv, q, d_qk]"
REFUSED = {
    "in a loop": ((Q, f"{Q} early(yes)"), "is issued early; expected one of the first ops of a warp group"),
    "after a load that is not": (
        (
            "    producer_load %K_pipeline %K[b, hkv, kv, d_qk] early(yes)\n",
            "    producer_load %K_pipeline %K[b, hkv, kv, d_qk]\n",
        ),
        "is issued early; expected one of the first ops of a warp group",
    ),
    "into a stage that is loaded again": (
        ("    scheduler_barrier tail\n", "    consumer_release %k_all\n    scheduler_barrier tail\n"),
        "is issued early, and a stage of %K_pipeline is released for another load",
    ),
    "of a place that is not known": (
        ("%K[b, hkv, kv, d_qk] early(yes)", "%K[b, q_first, kv, d_qk] early(yes)"),
        "is issued before %q_first is computed, which it needs",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_early_loads_are_refused(mistake: str) -> None:
    change, reason = REFUSED[mistake]
    module = CAUSAL.module("load-before-lookups")
    with pytest.raises(VerifyError, match=f"`types`: .*{re.escape(reason)}"):
        verify(edited_module(module, change, kernel="bwd"))


def test_persistent_programs_do_not_load_early() -> None:
    load = "    producer_load %Q_pipeline %Q[b, h, q, d_qk]"
    module = FORWARD.module("prefetch-work-tiles")
    with pytest.raises(VerifyError, match="is issued early; expected a tile, and a program of one tile"):
        verify(edited_module(module, (load, f"{load} early(yes)")))


def test_early_loads_come_before_the_lookups() -> None:
    spec = chunks.spec_of("causal", head_dim=128, schedule={"backend": "hopper"})
    source = render(stages_of(spec)["legalize-gluon"])["hopper.py"]
    kernel = source.partition("\ndef bwd(")[2]
    order = ["mbarrier.init(K_full", "fence_async_shared()", "_tma_load(K,", "_tile_of_call(", "gl.warp_specialize("]
    places = [kernel.index(word) for word in order]
    assert places == sorted(places)
    assert "_tma_load(K," not in source.partition("\ndef bwd_producer(")[2].partition("\ndef bwd_consumer(")[0]


def test_the_compiled_kernel_has_the_predicted_shared_memory_and_a_certificate(tmp_path: Path) -> None:
    spec = chunks.spec_of("causal", head_dim=128, schedule={"backend": "hopper"}, dtype="bf16")
    module = stages_of(spec)["legalize-gluon"]
    (kernel,) = (k for k in module.warp_specialized if k.name == "bwd")
    file, (config, *_) = tmp_path / "hopper.py", module.configs("bwd", "hopper")
    file.write_text(render(module)["hopper.py"], encoding="utf-8")
    (report,) = known_reports.compile_all(compile_all, [job(module, kernel, config, file)], 1)
    assert isinstance(report, CompileReport), report
    assert sram_bytes(module, kernel, config) == report.shared_bytes
    assert why_not(module, kernel, config, report) is None
