"""Kernels compiled ahead of time, for GPUs that need not be here: certificates hold, and what breaks them is told."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace

import pytest

from attngen.certify.certificate import (
    SHARE,
    chosen,
    commit,
    drawn,
    keep,
    percent,
    reason,
    record,
    recorded,
    stale,
    violations,
)
from attngen.cli import main
from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.devices import CLASSES
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec, parse_spec
from attngen.targets.common.base import CompileReport
from attngen.targets.triton.compiler import Job, compile_all, job, source_digest, triton_version
from attngen.targets.triton.sram import random_bytes, sram_bytes
from tests.helpers import target
from tests.test_language import VARIANTS

READING = CompileReport(shared_bytes=65536, registers=200, spilled_bytes=0, code_bytes=4096, triton="0", seconds=1.0)


def compiled(tmp_path, *asked):
    """(module, kernel, row, reading) for each (spec, kernel, class, architecture or None, fields of the row to
    change)."""
    found, jobs = [], []
    for name, kernel, cls, arch, changes in asked:
        module = target(name)
        file = tmp_path / f"{name}.py"
        file.write_text(render(module)["kernels.py"])
        row = replace([r for r in module.configs(kernel) if r.device == cls][-1], **changes)
        found.append((module, module.kernel(kernel), row))
        jobs.append(job(module, module.kernel(kernel), row, file, arch))
    return [(*what, reading) for what, reading in zip(found, compile_all(jobs, 1))]


def test_what_is_compiled_is_what_is_predicted(tmp_path):
    """Also for GPUs that take the rows of another: compute capability 8.6 those of `any`, gfx90a those of gfx942."""
    asked = [("mla_dims", kernel, "any", 86, {}) for kernel in ("fwd", "dk", "dv", "dq")]
    asked += [("mla_dims", kernel, "gfx942", "gfx90a", {}) for kernel in ("fwd", "dv")]
    asked += [("causal_fp32", "delta", "sm90", None, {})]
    for module, kernel, row, reading in compiled(tmp_path, *asked):
        assert isinstance(reading, CompileReport), reading
        assert list(violations(module, kernel, row, reading)) == []
        assert reading.shared_bytes <= sram_bytes(module, kernel, row) <= 1.05 * reading.shared_bytes, (
            kernel.name,
            row,
        )
        assert reading.code_bytes > 1000 and 0 < reading.registers <= CLASSES[row.device].registers_per_thread


def test_machine_code_that_reads_what_nothing_has_written_is_refused(tmp_path):
    """ptxas 12.8 makes it of a forward for sm90 whose tiles of V are narrow, and not copied ahead; no schedule has
    such a row."""
    module = lower(make_spec({"name": "narrow", "head_dim": {"qk": 40, "v": 24}, "mask": "causal", "dtype": "fp16"}))
    kernel, file = module.kernel("fwd"), tmp_path / "kernels.py"
    file.write_text(render(module)["kernels.py"])
    chosen_row = next(row for row in module.configs("fwd") if row.device == "sm90")
    wrong = replace(chosen_row, block_q=64, block_kv=128, num_stages=3, tma=False)
    said, right = compile_all([job(module, kernel, row, file) for row in (wrong, chosen_row)], 1)
    assert isinstance(right, CompileReport), right
    (violation,) = violations(module, kernel, wrong, said)
    assert re.search(
        r"ptxas makes wrong machine code of it: instruction \d+, .*, reads UR\d+, which not every path has written",
        violation,
    )


def test_what_dropout_draws_for_tiles_of_32_keys_is_predicted(tmp_path):
    """On sm90 no random word changes layout, there or in other tiles; nor in dK/dV, whose scores are transposed."""
    warps = {"num_warps": 4, "num_stages": 2, "tma": False}
    tiles = (("fwd", 64, 32), ("dq", 64, 32), ("dq", 64, 64), ("dkdv", 64, 64))
    asked = [
        ("causal_dropout_mqa", name, "sm90", None, {"block_q": q, "block_kv": kv, **warps}) for name, q, kv in tiles
    ]
    for module, kernel, row, reading in compiled(tmp_path, *asked):
        assert isinstance(reading, CompileReport), reading
        assert reading.shared_bytes == sram_bytes(module, kernel, row)
        assert random_bytes(kernel, row) == 0


def test_products_in_tf32_fit_as_predicted(tmp_path):
    """Tiles that several products read change layout for one of them."""
    found, jobs = [], []
    for name, head_dim, asked in (
        ("square", "128", (("dq", "sm80", 32, 32, 2), ("dkdv", "sm100", 64, 64, 1))),
        ("mla", "{qk: 192, v: 128}", (("dk", "sm90", 64, 16, 2), ("dq", "sm90", 64, 16, 1))),
    ):
        text = f"name: {name}\nhead_dim: {head_dim}\nmask: causal\ndtype: fp32\nfp32_precision: tf32\nheads: {{sharing: mqa}}\n"
        module = lower(parse_spec(text))
        file = tmp_path / f"{name}.py"
        file.write_text(render(module)["kernels.py"])
        for kernel, cls, block_q, block_kv, stages in asked:
            row = next(r for r in module.configs(kernel) if r.device == cls)
            row = replace(row, block_q=block_q, block_kv=block_kv, num_warps=4, num_stages=stages)
            found.append((module, module.kernel(kernel), row))
            jobs.append(job(*found[-1], file))
    for what, reading in zip(found, compile_all(jobs, 1)):
        assert isinstance(reading, CompileReport), reading
        assert reading.shared_bytes <= sram_bytes(*what), what
        assert not [said for said in violations(*what, reading) if "shared memory" in said]


def test_a_tile_that_is_too_large_spills_or_does_not_fit(tmp_path):
    """And the compiler, asked for the impossible, says so."""
    large = {"block_q": 128, "block_kv": 128, "num_warps": 4}
    asked = [("full_mha", "dkdv", "sm80", None, large), ("full_mha", "fwd", "sm90", None, {"block_q": 96})]
    spilling, impossible = compiled(tmp_path, *asked)
    assert "spills" in next(violations(*spilling))
    assert "does not compile: " in next(violations(*impossible))


def test_few_rewritten_rows_fit_as_predicted(tmp_path):
    """Too few for the large matrix instruction: the product that sums them takes K in another layout."""
    few = {"block_q": 16, "block_kv": 64, "num_warps": 4, "num_stages": 3}
    ((module, kernel, row, reading),) = compiled(tmp_path, ("causal_fa1", "bwd", "sm90", None, few))
    assert 41_216 == reading.shared_bytes <= sram_bytes(module, kernel, row)
    assert not list(violations(module, kernel, row, reading))


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, None),
        (
            {"spilled_bytes": 8},
            "spills 8 bytes; tile selection leaves it out once attngen/targets/triton/spills.txt lists `sm80 fwd 64/64",
        ),
        ({"shared_bytes": 10**6}, "needs 1,000,000 bytes of shared memory, and has 166,912"),
        ({"shared_bytes": 160_000}, "needs 160,000 bytes of shared memory, more than the"),
        ({"shared_bytes": 1000}, "and needs 1,000; no reason is known"),
    ],
)
def test_a_reading_that_breaks_its_certificate_is_told(change, said):
    module = target("full_mha")
    kernel, row = module.kernel("fwd"), [r for r in module.configs("fwd") if r.device == "sm80"][-1]
    reading = replace(READING, shared_bytes=sram_bytes(module, kernel, row))
    told = list(violations(module, kernel, row, replace(reading, **change)))
    assert said in told[0] if said else told == []


def test_rows_that_are_not_aligned_have_their_reason(tmp_path):
    """A head dimension of 72: the compiler does not know that rows start at multiples of 16 bytes."""
    module = lower(parse_spec("name: odd\nhead_dim: 72\n"))
    file = tmp_path / "odd.py"
    file.write_text(render(module)["kernels.py"])
    rows = [(module.kernel(name), module.configs(name)[-1]) for name in ("delta", "dq")]
    delta, dq = compile_all([job(module, kernel, row, file) for kernel, row in rows], 1)
    assert delta.shared_bytes == sram_bytes(module, *rows[0]) == 1024
    assert "are not copied ahead" in reason(module, *rows[1], dq)


def test_blocks_that_data_lists_are_found_within_what_is_predicted(tmp_path):
    """By a kernel that copies nothing ahead, and by those that read the mask's booleans where blocks are cut."""
    found, jobs = [], []
    for name, expr, tensor, asked in (
        (
            "pairs",
            "ids[b, q_idx, kv_idx]",
            "{tensor: [B, Nq, Nk], dtype: bool}",
            ("blocks sm90", "blocks gfx942", "fwd sm90", "dkdv gfx942"),
        ),
        (
            "equal",
            "ids[b, q_idx] == ids[b, kv_idx]",
            "{tensor: [B, Nk], dtype: int32}",
            ("blocks sm90", "blocks gfx942"),
        ),
    ):
        module = lower(parse_spec(f'name: {name}\nhead_dim: 64\nmask: {{expr: "{expr}", params: {{ids: {tensor}}}}}\n'))
        file = tmp_path / f"{name}.py"
        file.write_text(render(module)["kernels.py"])
        for kernel, cls in (x.split() for x in asked):
            row = next(r for r in reversed(module.configs(kernel)) if r.device == cls)
            found.append((module, module.kernel(kernel), row))
            jobs.append(job(*found[-1], file))
    for (module, kernel, row), reading in zip(found, compile_all(jobs, 1)):
        assert isinstance(reading, CompileReport), reading
        assert list(violations(module, kernel, row, reading)) == []


def test_spills_break_the_certificate_on_nvidia_alone():
    module = target("causal_mha")
    for cls, told in (("sm90", 1), ("gfx942", 0)):
        row = [r for r in module.configs("dkdv") if r.device == cls][-1]
        reading = replace(READING, shared_bytes=sram_bytes(module, module.kernel("dkdv"), row), spilled_bytes=72)
        assert len(list(violations(module, module.kernel("dkdv"), row, reading))) == told


def test_without_a_ring_a_difference_has_its_reason():
    module = target("full_mha")
    kernel, row = module.kernel("fwd"), replace(module.configs("fwd")[0], num_stages=1)
    reading = replace(READING, shared_bytes=sram_bytes(module, kernel, row) // 2)
    assert list(violations(module, kernel, row, reading)) == []
    assert "share room" in reason(module, kernel, row, reading)


# ---------------------------------------------------------------------------------------------- report.json


@pytest.fixture
def kept(tmp_path):
    """The files of a module with one reading recorded, in a folder; the module, the row and its reading."""
    module = target("full_mha")
    row = module.configs("fwd")[-1]
    files = record(module, render(module), {("fwd", row): READING})
    write_module(files, tmp_path / "full_mha")
    return module, row, files, tmp_path / "full_mha"


def test_a_reading_is_kept_while_its_kernel_and_row_are_the_same(kept):
    module, row, files, folder = kept
    assert keep(module, render(module), folder) == files != render(module)
    assert list(stale(module, module.kernel("fwd"), row, READING, files)) == []


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("kernels.py", "# Forward: online softmax", "# Forward:"),  # the kernel's source
        ("kernels.py", "D_QK = tl.constexpr(64)", "D_QK = tl.constexpr(32)"),  # what it uses
        ("report.json", '"sram_limit": 101376', '"sram_limit": 1'),  # the row's report
    ],
)
def test_a_reading_of_something_else_is_dropped(kept, name, old, new):
    module, row, files, folder = kept
    changed = render(module)
    assert old in changed[name]
    changed[name] = changed[name].replace(old, new)
    assert keep(module, changed, folder) == changed


def test_a_reading_of_another_kernel_does_not_matter(kept):
    module, row, files, folder = kept
    changed = render(module)
    changed["kernels.py"] = changed["kernels.py"].replace("# Backward, dQ:", "# dQ:")
    assert keep(module, changed, folder)["report.json"] == files["report.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kernels": 1}', '{"kernels": {"fwd": {"schedules": [{"reading": 1}]}}}']
)
def test_what_is_no_report_has_no_readings(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    assert keep(target("full_mha"), render(target("full_mha")), tmp_path) == render(target("full_mha"))


def test_a_doctored_reading_is_told(kept):
    module, row, files, _ = kept
    doctored = {**files, "report.json": files["report.json"].replace('"registers": 200', '"registers": 100')}
    (said,) = stale(module, module.kernel("fwd"), row, READING, doctored)
    assert "another reading in report.json: registers 100 for 200; run `attngen verify --write`" in said
    assert (
        list(stale(module, module.kernel("fwd"), row, replace(READING, triton="1"), doctored)) == []
    )  # by another compiler
    (said,) = stale(module, module.kernel("fwd"), row, READING, render(module))
    assert "has no reading in report.json" in said


def test_a_digest_is_of_what_triton_compiles():
    """A kernel's own source, constants and functions of the device; not what Python alone runs, and not the other
    kernels."""
    text = render(target("causal_dropout_mqa"))["kernels.py"]
    for old, new, counts in (
        ("DEVICE_CLASSES = {", "CLASSES_OF_DEVICES = {", False),
        ("INTERPRETED_BYTES = 2", "INTERPRETED_BYTES = 4", False),
        ('"num_stages": 2', '"num_stages": 5', False),
        ("# Backward, dQ:", "# dQ:", False),
        ("# Forward: online softmax", "# Forward:", True),
        ("D_QK = tl.constexpr(64)", "D_QK = tl.constexpr(32)", True),
        ("def dropout_keep(", "def dropout_kept(", True),
    ):
        assert old in text
        assert (source_digest(text.replace(old, new), "fwd") != source_digest(text, "fwd")) is counts, old


@pytest.fixture
def known(tmp_path):
    """The files of a module with one reading recorded; the arguments of `recorded`, without them."""
    module = target("full_mha")
    files, row, kernel = render(module), module.configs("fwd")[-1], module.kernel("fwd")
    (tmp_path / "kernels.py").write_text(files["kernels.py"])
    made = job(module, kernel, row, tmp_path / "kernels.py")
    reading = replace(READING, triton=triton_version(), job=made.digest)
    return record(module, files, {("fwd", row): reading}), (module, kernel, row, made), reading


def test_a_reading_whose_digest_holds_is_not_compiled_again(known):
    files, what, reading = known
    assert recorded(*what, files) == reading
    assert list(stale(*what[:3], recorded(*what, files), files)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"registers": 200', '"registers": 100'),
        ('"spilled_bytes": 0', '"spilled_bytes": 1'),
        (f'"triton": "{triton_version()}"', '"triton": "0"'),
        ('"digest": ', '"digests": '),
        ('"code_bytes": 4096,', ""),
    ],
)
def test_an_edited_reading_is_compiled_again(known, old, new):
    files, what, _ = known
    assert old in files["report.json"]
    assert recorded(*what, {**files, "report.json": files["report.json"].replace(old, new)}) is None


@pytest.mark.parametrize(
    "change", [{"types": ()}, {"tiles": ()}, {"options": ()}, {"arch": 80}, {"aligned_rows": False}, {"source": "0"}]
)
def test_a_reading_of_what_was_compiled_otherwise_is_compiled_again(known, change):
    files, (module, kernel, row, made), _ = known
    assert recorded(module, kernel, row, replace(made, **change), files) is None
    assert recorded(module, kernel, row, made, render(module)) is None  # and one that is missing


def test_a_share_is_drawn_and_in_time_all_are(tmp_path):
    jobs = [Job(tmp_path, f"kernel_{i}", (), (), (), 90, 32, True) for i in range(100)]
    shares = [drawn(jobs, f"commit {i}") for i in range(200)]
    assert {len(share) for share in shares} == {-(-100 // SHARE)} and shares[0] != shares[1]
    assert drawn(reversed(jobs), "commit 0") == shares[0]
    assert set().union(*shares) == {one.digest for one in jobs}
    assert len(drawn(jobs[:1], "")) == 1


def test_the_commit_draws_and_without_git_the_jobs_do(tmp_path):
    jobs = [Job(tmp_path, name, (), (), (), 90, 32, True) for name in ("fwd", "dq")]
    without = commit(tmp_path, jobs)
    assert without == commit(tmp_path, reversed(jobs)) != commit(tmp_path, jobs[:1])
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    found = []
    for message in ("one", "two"):
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", message], check=True)
        found.append(commit(tmp_path, jobs))
    assert len({without, *found}) == 3


def test_verify_compiles_writes_and_checks(tmp_path, capsys):
    spec, to = "specs/butterfly_gqa.yaml", ["--target", "sm90", "--jobs", "1", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(["verify", spec, *to])
    assert "not built: there is no" in capsys.readouterr().err
    run("build", spec, "--out", str(tmp_path))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["verify", spec, *to])
    assert "error: butterfly_gqa: on sm90 the kernel @fwd with " in capsys.readouterr().err
    run("verify", spec, *to, "--write")
    rows = len(chosen(target("butterfly_gqa"), ["sm90"], False))
    assert rows == 6 and f"{rows} kernels compiled for sm90" in capsys.readouterr().out
    assert len(chosen(target("causal_mha"), ["sm90"], False)) > 4  # measured ones for few rows too
    run("verify", spec, *to)
    assert f"{rows} kernels compiled for sm90" in capsys.readouterr().out
    run("verify", spec, *to, "--changed")
    said = capsys.readouterr().out
    assert "1 kernel compiled for sm90" in said and f"{rows - 1} readings of the same kernels" in said
    run("build", spec, "--out", str(tmp_path), "--check")
    report = json.loads((tmp_path / "butterfly_gqa" / "report.json").read_text())
    readings = [
        r["reading"]
        for k in report["kernels"].values()
        for r in k["schedules"]
        if r["device"] == "sm90" and r["max_rows"] is None
    ]
    assert [sorted(r) for r in readings] == [
        ["code_bytes", "digest", "registers", "shared_bytes", "source", "spilled_bytes", "states", "target", "triton"]
    ] * rows
    readings[0]["registers"] += 1
    (tmp_path / "butterfly_gqa" / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    with pytest.raises(SystemExit):
        main(["verify", spec, *to, "--changed"])
    assert capsys.readouterr().err.count("has another reading in report.json: registers") == 1
    with pytest.raises(SystemExit):
        main(["verify", spec, *to[:-1], str(tmp_path / "elsewhere"), "--changed"])
    assert "specs/butterfly_gqa.yaml: not built: there is no" in capsys.readouterr().err


def run(*args):
    """The command line, which must succeed."""
    with pytest.raises(SystemExit) as done:
        main(list(args))
    assert done.value.code in (0, None)


def test_functions_of_scalars_and_casts_compile(tmp_path):
    """What is computed of a head, of numbers of the call, and integers of reals: in scores and masks, each kernel
    for each kind of GPU."""
    names = ["functions of scalars in a score", "functions of scalars in a mask", "floor, round and casts in a score"]
    classes = ("sm80", "sm90", "gfx942")
    asked, jobs = [], []
    for i, name in enumerate(names):
        module = lower(make_spec({"name": f"scalars_{i}", "head_dim": 64, **VARIANTS[name].parts}))
        file = tmp_path / f"{module.name}.py"
        file.write_text(render(module)["kernels.py"])
        for kernel, cls in zip(("fwd", "dq", "dkdv"), (classes * 2)[i:]):
            asked.append((name, kernel, cls))
            row = next(r for r in reversed(module.configs(kernel)) if r.device == cls)
            jobs.append(job(module, module.kernel(kernel), row, file))
    wrong = [(*what, found) for what, found in zip(asked, compile_all(jobs, 2)) if not isinstance(found, CompileReport)]
    assert wrong == []
    assert {(kernel, cls) for _, kernel, cls in asked} == {(k, c) for k in ("fwd", "dq", "dkdv") for c in classes}


def test_a_prediction_is_compared_with_what_is_reported() -> None:
    assert [percent(*pair) for pair in ((64, 64), (0, 0), (105, 100), (128, 0))] == ["", "", "+5.0%", "above 0"]
