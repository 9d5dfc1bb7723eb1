"""Divided kernels compiled ahead of time: shared memory to the byte, certificates, and `attngen verify`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attngen.certify.certificate import chosen, keep, record, recorded, stale, violations, why_not
from attngen.cli import main
from attngen.codegen.render import render
from attngen.ir.expr import parse, to_text
from attngen.ir.graph import Module
from attngen.lowering.pipeline import lower
from attngen.report.explain import fit_table
from attngen.spec import make_spec
from attngen.targets.common.base import CompileReport
from attngen.targets.hopper.toolchain.compiler import Job, compile_all, job, marks, source_digest
from attngen.targets.hopper.toolchain.resources import pipeline_bytes, row_formula, sram_bytes, why_not_fit
from attngen.tiles.sizes import sizes
from attngen.tiles.tiles import evaluate
from tests.helpers import edit
from tests.hopper.common import whole


def made(head_dim: object, dtype: str, **schedule: object) -> Module:
    """A causal forward of a head, with a schedule."""
    parts = {"head_dim": head_dim, "mask": "causal", "dtype": [dtype], "backward": False}
    return lower(make_spec({"name": "made", **parts, "schedule": {"backend": "hopper", **schedule}}))


COMPILED: dict[str, Callable[[], Module]] = {
    "two consumers": lambda: made(64, "bf16", block_q=128, block_kv=128, stages=2),
    "two programs that share a multiprocessor": lambda: whole("causal_mqa"),
    "one, which walks lists and drops": lambda: replace(whole("local_global_dropout_mha"), dtypes=("fp16",)),
    "outputs with a ring of their own, three slots": lambda: made({"qk": 128, "v": 64}, "fp16", block_kv=64, stages=3),
    "three consumers, in turns": lambda: whole("full_mha"),
    "tiles in pieces, outputs in halves": lambda: whole("mla_dims"),
    "pieces and a tile of V that end with zeros": lambda: made({"qk": 80, "v": 48}, "fp16"),
}
Compiled = dict[str, tuple[Module, CompileReport]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder, modules = tmp_path_factory.mktemp("hopper"), {name: make() for name, make in COMPILED.items()}
    readings = compile_all([job_of(module, folder / f"{i}.py") for i, module in enumerate(modules.values())], 1)
    return {
        name: (module, found)
        for (name, module), found in zip(modules.items(), readings)
        if isinstance(found, CompileReport)
    }


def job_of(module: Module, file: Path) -> Job:
    file.write_text(render(module)["hopper.py"], encoding="utf-8")
    return job(module, module.warp_specialized[0], module.configs("fwd", "hopper")[0], file)


def test_what_is_compiled_has_the_predicted_shared_memory_and_its_certificate(compiled: Compiled) -> None:
    assert list(compiled) == list(COMPILED)
    for name, (module, reading) in compiled.items():
        (row,) = module.configs("fwd", "hopper")
        assert sram_bytes(module, module.warp_specialized[0], row) == reading.shared_bytes, name
        assert why_not(module, module.warp_specialized[0], row, reading) is None, name


def test_a_row_that_fails_says_why(compiled: Compiled) -> None:
    module, reading = compiled["two consumers"]
    (row,), warp_specialized = module.configs("fwd", "hopper"), module.warp_specialized[0]
    assert reading.machine is not None
    broken = replace(reading, spilled_bytes=980, machine={**reading.machine, "serialised": ["C7512"]})
    where = "made: on sm90 the kernel @fwd of hopper.py with BLOCK_Q=128, BLOCK_KV=128, num_warps=4, num_stages=2"
    spills, waits = (
        f"{where} {fault}" for fault in ("spills 980 bytes; expected none", "has products that wait for each other")
    )
    said = list(violations(module, warp_specialized, row, broken))
    assert said[0] == spills and said[1].startswith(waits) and len(said) == 2
    assert why_not(module, warp_specialized, row, broken) == "; ".join(said)
    reloading = replace(reading, machine={**reading.machine, "reloads": 3})
    (why,) = violations(module, warp_specialized, row, reloading)
    assert why == f"{where} stores or loads spilled registers in its loops, 3 times; expected them outside alone"
    assert (
        why_not(module, warp_specialized, row, "no such instruction")
        == f"{where} does not compile: no such instruction"
    )
    files = record(module, render(module), {("fwd", row): broken})
    entry = next(
        e for e in json.loads(files["report.json"])["kernels"]["fwd"]["schedules"] if e.get("backend") == "hopper"
    )
    assert entry["reading"]["states"].startswith(
        "spills 980 bytes; expected none; has products that wait for each other, as ptxas"
    )
    *_, last = fit_table(json.loads(files["report.json"]))
    assert str(last).startswith(
        "  On sm90 the kernel @fwd with 128x128x4x2 hopper gets no certificate: it spills 980 bytes; expected none; has"
    )


def test_readings_are_kept_while_kernel_and_row_are_the_same(compiled: Compiled, tmp_path: Path) -> None:
    module, reading = compiled["two consumers"]
    (row,), warp_specialized, bare = module.configs("fwd", "hopper"), module.warp_specialized[0], render(module)
    files = record(module, bare, {("fwd", row): reading})
    (tmp_path / "report.json").write_text(files["report.json"])
    assert keep(module, bare, tmp_path) == files
    asked = job_of(module, tmp_path / "hopper.py")
    assert (
        recorded(module, warp_specialized, row, asked, files) == reading
        and list(stale(module, warp_specialized, row, reading, files)) == []
    )
    edited = {**files, "report.json": files["report.json"].replace('"HGMMA": ', '"HGMMA": 1')}
    assert recorded(module, warp_specialized, row, asked, edited) is None
    (said,) = stale(module, warp_specialized, row, reading, edited)
    assert "has another reading in report.json: machine {" in said
    other = {**bare, "hopper.py": bare["hopper.py"].replace("    # The maximum of each row", "    # Maxima of rows")}
    assert '"machine"' not in keep(module, other, tmp_path)["report.json"]


def test_the_digest_of_a_source_is_not_of_its_docstring() -> None:
    text = render(whole("causal_gqa"))["hopper.py"]
    assert source_digest(text.replace("for Hopper. Generated by", "generated by"), "fwd") == source_digest(text, "fwd")
    assert source_digest(text.replace("count=1", "count=2"), "fwd") != source_digest(text, "fwd")


@pytest.mark.parametrize("name", ["butterfly_gqa", "causal_d256", "dense_bias_dropout_mha", "full_mha", "mla_dims"])
def test_the_formula_gives_the_bytes(name: str) -> None:
    """Beside tiles and their barriers there is less than a KB."""
    module = whole(name)
    (row,), warp_specialized = module.configs("fwd", "hopper"), module.warp_specialized[0]
    assert (warp_specialized, row) in chosen(module, ["sm90"], False) and why_not_fit(
        module, warp_specialized, row
    ) is None
    assert list(marks(warp_specialized)) == [("producer", "UTMALDG"), ("consumer", "HGMMA")]
    need = sram_bytes(module, warp_specialized, row)
    assert evaluate(parse(to_text(row_formula(module, warp_specialized, row))), sizes(module, row)) == need
    assert 0 < need - pipeline_bytes(module, warp_specialized, row) < 1024


@pytest.fixture()
def built(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    spec = tmp_path / "small.yaml"
    spec.write_text(
        "name: small\nhead_dim: 64\nmask: none\nbackward: false\nschedule: {backend: hopper, block_q: 128}\n"
    )
    yield str(spec), ["--target", "sm90", "--jobs", "1", "--out", str(tmp_path / "generated")]


def test_verify_certifies_warp_specialized_rows(
    built: tuple[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, to = built
    run("verify", spec, *to, "--write")
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
    said = capsys.readouterr()
    assert "128x256x4x2 hopper" in said.out and "spills " in said.out
    where = (
        "error: small: on sm90 the kernel @fwd of hopper.py with BLOCK_Q=128, BLOCK_KV=256, num_warps=4, num_stages=2"
    )
    text = said.err.replace("\n", " ")
    assert f"{where} spills " in text
    assert "small: until it has its certificate, `schedule: {backend: triton}` keeps the portable kernel" in text


def run(*args: str) -> None:
    """The command line, which must succeed."""
    with pytest.raises(SystemExit) as done:
        main(list(args))
    assert done.value.code in (0, None)
