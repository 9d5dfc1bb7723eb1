"""Warp-specialized kernels compiled ahead of time: exact shared memory, certificates, and `attngen verify`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attngen.certify.certificate import chosen, keep, record, recorded, stale, violations, why_not
from attngen.cli import main
from attngen.codegen.render import render
from attngen.ir import Module, parse, to_text
from attngen.lowering.pipeline import lower
from attngen.report.explain import Line, fit_table
from attngen.spec import make_spec
from attngen.targets.common.base import CompileReport
from attngen.targets.hopper.toolchain.compiler import Job, compile_all, job, marks, source_digest
from attngen.targets.hopper.toolchain.resources import pipeline_bytes, row_formula, sram_bytes, why_not_fit
from attngen.tiles.sizes import sizes
from attngen.tiles.tiles import evaluate
from tests import record as known_reports
from tests.helpers import edit
from tests.hopper.common import lowered


def causal_forward(head_dim: object, dtype: str, **schedule: object) -> Module:
    """The module of a causal forward with this head_dim, dtype and schedule."""
    parts = {"head_dim": head_dim, "mask": "causal", "dtype": [dtype], "backward": False}
    return lower(make_spec({"name": "made", **parts, "schedule": {"backend": "hopper", **schedule}}))


COMPILED: dict[str, Callable[[], Module]] = {
    "two consumers": lambda: causal_forward(64, "bf16", block_q=128, block_kv=128, stages=2),
    "two CTAs per SM": lambda: lowered("causal_mqa"),
    "block lists and dropout": lambda: replace(lowered("local_global_dropout_mha"), dtypes=("fp16",)),
    "a pipeline of outputs, three stages": lambda: causal_forward({"qk": 128, "v": 64}, "fp16", block_kv=64, stages=3),
    "three consumers in ping-pong order": lambda: lowered("full_mha"),
    "tiles in column pieces, outputs in halves": lambda: lowered("mla_dims"),
    "column pieces and a tile of V padded with zeros": lambda: causal_forward({"qk": 80, "v": 48}, "fp16"),
}
Compiled = dict[str, tuple[Module, CompileReport]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder, modules = tmp_path_factory.mktemp("hopper"), {name: build() for name, build in COMPILED.items()}
    reports = known_reports.compile_all(
        compile_all, [job_of(module, folder / f"{i}.py") for i, module in enumerate(modules.values())], 1
    )
    return {
        name: (module, found)
        for (name, module), found in zip(modules.items(), reports)
        if isinstance(found, CompileReport)
    }


def job_of(module: Module, file: Path) -> Job:
    file.write_text(render(module)["hopper.py"], encoding="utf-8")
    return job(module, module.warp_specialized[0], module.configs("fwd", "hopper")[0], file)


def test_compiled_kernels_have_the_predicted_shared_memory_and_a_certificate(compiled: Compiled) -> None:
    assert list(compiled) == list(COMPILED)
    for name, (module, report) in compiled.items():
        (config,) = module.configs("fwd", "hopper")
        assert sram_bytes(module, module.warp_specialized[0], config) == report.shared_bytes, name
        assert why_not(module, module.warp_specialized[0], config, report) is None, name


def test_a_config_that_fails_says_why(compiled: Compiled) -> None:
    module, report = compiled["two consumers"]
    (config,), warp_specialized = module.configs("fwd", "hopper"), module.warp_specialized[0]
    assert report.machine is not None
    broken = replace(report, spilled_bytes=980, machine={**report.machine, "serialised": ["C7512"]})
    where = "made: on sm90 the kernel @fwd of hopper.py with BLOCK_Q=128, BLOCK_KV=128, num_warps=4, num_stages=2"
    spills, waits = (
        f"{where} {fault}" for fault in ("spills 980 bytes; expected none", "has products that wait for each other")
    )
    messages = list(violations(module, warp_specialized, config, broken))
    assert messages[0] == spills and messages[1].startswith(waits) and len(messages) == 2
    assert why_not(module, warp_specialized, config, broken) == "; ".join(messages)
    reloading = replace(report, machine={**report.machine, "reloads": 3})
    (message,) = violations(module, warp_specialized, config, reloading)
    assert message == f"{where} stores or loads spilled registers in its loops, 3 times; expected them only outside"
    assert (
        why_not(module, warp_specialized, config, "no such instruction")
        == f"{where} does not compile: no such instruction"
    )
    files = record(module, render(module), {("fwd", config): broken})
    entry = next(
        e for e in json.loads(files["report.json"])["kernels"]["fwd"]["schedules"] if e.get("backend") == "hopper"
    )
    assert entry["reading"]["states"].startswith(
        "spills 980 bytes; expected none; has products that wait for each other, as ptxas"
    )
    *_, last = fit_table(json.loads(files["report.json"]))
    assert isinstance(last, Line) and last.text.startswith(
        "On sm90 the kernel @fwd with 128x128x4x2 hopper gets no certificate: it spills 980 bytes; expected none; has"
    )


def test_compile_reports_are_kept_while_kernel_and_config_are_the_same(compiled: Compiled, tmp_path: Path) -> None:
    module, report = compiled["two consumers"]
    (config,), warp_specialized, bare = module.configs("fwd", "hopper"), module.warp_specialized[0], render(module)
    files = record(module, bare, {("fwd", config): report})
    (tmp_path / "report.json").write_text(files["report.json"])
    assert keep(module, bare, tmp_path) == files
    compile_job = job_of(module, tmp_path / "hopper.py")
    assert (
        recorded(module, warp_specialized, config, compile_job, files) == report
        and list(stale(module, warp_specialized, config, report, files)) == []
    )
    edited = {**files, "report.json": files["report.json"].replace('"HGMMA": ', '"HGMMA": 1')}
    assert recorded(module, warp_specialized, config, compile_job, edited) is None
    (message,) = stale(module, warp_specialized, config, report, edited)
    assert "has another compile report in report.json: machine {" in message
    other = {**bare, "hopper.py": bare["hopper.py"].replace("    # The maximum of each row", "    # Maxima of rows")}
    assert '"machine"' not in keep(module, other, tmp_path)["report.json"]


@pytest.mark.share(4)
def test_the_digest_of_a_source_ignores_its_docstring() -> None:
    text = render(lowered("causal_gqa"))["hopper.py"]
    assert source_digest(text.replace("for Hopper. Generated by", "generated by"), "fwd") == source_digest(text, "fwd")
    assert source_digest(text.replace("count=1", "count=2"), "fwd") != source_digest(text, "fwd")


@pytest.mark.parametrize("name", ["butterfly_gqa", "causal_d256", "dense_bias_dropout_mha", "full_mha", "mla_dims"])
def test_the_closed_form_gives_the_shared_memory_in_bytes(name: str) -> None:
    """Everything except tiles and their barriers takes less than 1 KB."""
    module = lowered(name)
    (config,), warp_specialized = module.configs("fwd", "hopper"), module.warp_specialized[0]
    assert (warp_specialized, config) in chosen(module, ["sm90"], False) and why_not_fit(
        module, warp_specialized, config
    ) is None
    assert list(marks(warp_specialized)) == [("producer", "UTMALDG"), ("consumer", "HGMMA")]
    need = sram_bytes(module, warp_specialized, config)
    assert evaluate(parse(to_text(row_formula(module, warp_specialized, config))), sizes(module, config)) == need
    assert 0 < need - pipeline_bytes(module, warp_specialized, config) < 1024


@pytest.fixture()
def built(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    spec = tmp_path / "small.yaml"
    spec.write_text(
        "name: small\nhead_dim: 64\nmask: none\nbackward: false\nschedule: {backend: hopper, block_q: 128}\n"
    )
    yield str(spec), ["--target", "sm90", "--jobs", "1", "--out", str(tmp_path / "generated")]


@pytest.mark.share(16)
def test_verify_certifies_warp_specialized_configs(
    built: tuple[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, to = built
    run_command("verify", spec, *to, "--write")
    assert "128x128x4x2 hopper  115,096" in capsys.readouterr().out
    ir = tmp_path / "generated" / "small" / "schedule.ir"
    ir.write_text(
        edit(
            ir.read_text(),
            (
                "BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend",
                "BLOCK_KV=256 num_warps=4 num_stages=2 TMA=1 backend",
            ),
        )
    )
    with pytest.raises(SystemExit):
        main(["verify", spec, *to, "--changed"])
    output = capsys.readouterr()
    assert "128x256x4x2 hopper" in output.out and "spills " in output.out
    where = (
        "error: small: on sm90 the kernel @fwd of hopper.py with BLOCK_Q=128, BLOCK_KV=256, num_warps=4, num_stages=2"
    )
    text = output.err.replace("\n", " ")
    assert f"{where} spills " in text
    assert "small: until it has its certificate, `schedule: {backend: triton}` keeps the portable kernel" in text


def run_command(*args: str) -> None:
    """Run the command line, which must succeed."""
    with pytest.raises(SystemExit) as done:
        main(list(args))
    assert done.value.code in (0, None)
