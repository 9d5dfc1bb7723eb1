"""Kernels compiled ahead of time, also for absent GPUs, hold their certificates; each violation is reported."""

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
    keep,
    percent,
    reason,
    record,
    recorded,
    sampled_jobs,
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
from attngen.targets.triton.matrix_units import random_bytes
from attngen.targets.triton.sram import sram_bytes
from tests import record as known_reports
from tests.helpers import target
from tests.test_language import VARIANTS

REPORT = CompileReport(shared_bytes=65536, registers=200, spilled_bytes=0, code_bytes=4096, triton="0", seconds=1.0)


def compiled(tmp_path, *asked):
    """Compile each (spec, kernel, device class, architecture or None, changed fields of the config); return (module,
    kernel, config, compile report) of each."""
    found, jobs = [], []
    for name, kernel, cls, arch, changes in asked:
        module = target(name)
        file = tmp_path / f"{name}.py"
        file.write_text(render(module)["kernels.py"])
        config = replace([r for r in module.configs(kernel) if r.device == cls][-1], **changes)
        found.append((module, module.kernel(kernel), config))
        jobs.append(job(module, module.kernel(kernel), config, file, arch))
    return [(*case, report) for case, report in zip(found, known_reports.compile_all(compile_all, jobs, 1))]


def test_compiled_kernels_have_the_predicted_resources(tmp_path):
    """So do kernels for GPUs with another class's configs: compute capability 8.6 (`any`) and gfx90a (gfx942)."""
    asked = [("mla_dims", kernel, "any", 86, {}) for kernel in ("fwd", "dk", "dv", "dq")]
    asked += [("mla_dims", kernel, "gfx942", "gfx90a", {}) for kernel in ("fwd", "dv")]
    asked += [("causal_fp32", "delta", "sm90", None, {})]
    for module, kernel, config, report in compiled(tmp_path, *asked):
        assert isinstance(report, CompileReport), report
        assert list(violations(module, kernel, config, report)) == []
        assert report.shared_bytes <= sram_bytes(module, kernel, config) <= 1.05 * report.shared_bytes, (
            kernel.name,
            config,
        )
        assert report.code_bytes > 1000 and 0 < report.registers <= CLASSES[config.device].registers_per_thread


@pytest.mark.share(16)
def test_machine_code_that_reads_an_unwritten_register_is_refused(tmp_path):
    """ptxas 12.8 generates it for a forward on sm90 with narrow tiles of V that are not copied ahead; no schedule has
    such a config."""
    module = lower(make_spec({"name": "narrow", "head_dim": {"qk": 40, "v": 24}, "mask": "causal", "dtype": "fp16"}))
    kernel, file = module.kernel("fwd"), tmp_path / "kernels.py"
    file.write_text(render(module)["kernels.py"])
    right_config = next(config for config in module.configs("fwd") if config.device == "sm90")
    wrong = replace(right_config, block_q=64, block_kv=128, num_stages=3, tma=False)
    wrong_report, right = known_reports.compile_all(
        compile_all, [job(module, kernel, config, file) for config in (wrong, right_config)], 1
    )
    assert isinstance(right, CompileReport), right
    (violation,) = violations(module, kernel, wrong, wrong_report)
    assert re.search(
        r"ptxas makes wrong machine code of it: instruction \d+, .*, reads UR\d+, which not every path has written",
        violation,
    )


@pytest.mark.share(16)
def test_shared_memory_of_dropout_is_predicted_for_tiles_of_32_keys(tmp_path):
    """On sm90 no random word changes layout, in these tiles or in others, nor in dK/dV, whose scores are transposed."""
    warps = {"num_warps": 4, "num_stages": 2, "tma": False}
    tiles = (("fwd", 64, 32), ("dq", 64, 32), ("dq", 64, 64), ("dkdv", 64, 64))
    asked = [
        ("causal_dropout_mqa", name, "sm90", None, {"block_q": q, "block_kv": kv, **warps}) for name, q, kv in tiles
    ]
    for module, kernel, config, report in compiled(tmp_path, *asked):
        assert isinstance(report, CompileReport), report
        assert report.shared_bytes == sram_bytes(module, kernel, config)
        assert random_bytes(kernel, config) == 0


@pytest.mark.share(8)
def test_products_in_tf32_fit_as_predicted(tmp_path):
    """Tiles that several products read change layout for one of them."""
    found, jobs = [], []
    for name, head_dim, asked in (
        ("square", "128", (("dq", "sm80", 32, 32, 2), ("dkdv", "sm100", 64, 64, 1))),
        ("mla", "{qk: 192, v: 128}", (("dk", "sm90", 64, 16, 2), ("dq", "sm90", 64, 16, 1))),
    ):
        text = (
            f"name: {name}\nhead_dim: {head_dim}\nmask: causal\ndtype: fp32\nfp32_precision: tf32\n"
            f"heads: {{sharing: mqa}}\n"
        )
        module = lower(parse_spec(text))
        file = tmp_path / f"{name}.py"
        file.write_text(render(module)["kernels.py"])
        for kernel, cls, block_q, block_kv, stages in asked:
            config = next(r for r in module.configs(kernel) if r.device == cls)
            config = replace(config, block_q=block_q, block_kv=block_kv, num_warps=4, num_stages=stages)
            found.append((module, module.kernel(kernel), config))
            jobs.append(job(*found[-1], file))
    for case, report in zip(found, known_reports.compile_all(compile_all, jobs, 1)):
        assert isinstance(report, CompileReport), report
        assert report.shared_bytes <= sram_bytes(*case), case
        assert not [text for text in violations(*case, report) if "shared memory" in text]


@pytest.mark.share(16)
def test_a_tile_that_is_too_large_spills_or_does_not_fit(tmp_path):
    """The compiler also reports a tile size that it cannot compile."""
    large = {"block_q": 128, "block_kv": 128, "num_warps": 4}
    asked = [("full_mha", "dkdv", "sm80", None, large), ("full_mha", "fwd", "sm90", None, {"block_q": 96})]
    spilling, impossible = compiled(tmp_path, *asked)
    assert "spills" in next(violations(*spilling))
    assert "does not compile: " in next(violations(*impossible))


def test_a_narrow_tile_of_accumulated_rows_fits_as_predicted(tmp_path):
    """16 rows are too few for the large matrix instruction, so the product that sums them reads K in another layout."""
    few = {"block_q": 16, "block_kv": 64, "num_warps": 4, "num_stages": 3}
    ((module, kernel, config, report),) = compiled(tmp_path, ("causal_fa1", "bwd", "sm90", None, few))
    assert 41_216 == report.shared_bytes <= sram_bytes(module, kernel, config)
    assert not list(violations(module, kernel, config, report))


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, None),
        (
            {"spilled_bytes": 8},
            (
                "spills 8 bytes; tile selection leaves it out once attngen/targets/triton/spills.txt lists `sm80 fwd "
                "64/64"
            ),
        ),
        ({"shared_bytes": 10**6}, "needs 1,000,000 bytes of shared memory, and has 166,912"),
        ({"shared_bytes": 160_000}, "needs 160,000 bytes of shared memory, more than the"),
        ({"shared_bytes": 1000}, "and needs 1,000; no reason is known"),
    ],
)
def test_a_compile_report_that_breaks_its_certificate_is_reported(change, expected):
    module = target("full_mha")
    kernel, config = module.kernel("fwd"), [r for r in module.configs("fwd") if r.device == "sm80"][-1]
    report = replace(REPORT, shared_bytes=sram_bytes(module, kernel, config))
    found = list(violations(module, kernel, config, replace(report, **change)))
    assert expected in found[0] if expected else found == []


@pytest.mark.share(16)
def test_the_reason_for_unaligned_rows_is_known(tmp_path):
    """With a head_dim of 72, the compiler does not know that rows start at multiples of 16 bytes."""
    module = lower(parse_spec("name: odd\nhead_dim: 72\n"))
    file = tmp_path / "odd.py"
    file.write_text(render(module)["kernels.py"])
    pairs = [(module.kernel(name), module.configs(name)[-1]) for name in ("delta", "dq")]
    delta, dq = known_reports.compile_all(
        compile_all, [job(module, kernel, config, file) for kernel, config in pairs], 1
    )
    assert delta.shared_bytes == sram_bytes(module, *pairs[0]) == 1024
    assert "are not copied ahead" in reason(module, *pairs[1], dq)


@pytest.mark.share(8)
def test_kernels_for_data_dependent_blocks_hold_their_certificates(tmp_path):
    """The kernel that lists blocks copies nothing ahead; the others read the mask's booleans in partial blocks."""
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
            config = next(r for r in reversed(module.configs(kernel)) if r.device == cls)
            found.append((module, module.kernel(kernel), config))
            jobs.append(job(*found[-1], file))
    for (module, kernel, config), report in zip(found, known_reports.compile_all(compile_all, jobs, 1)):
        assert isinstance(report, CompileReport), report
        assert list(violations(module, kernel, config, report)) == []


def test_spills_break_the_certificate_only_on_nvidia():
    module = target("causal_mha")
    for cls, count in (("sm90", 1), ("gfx942", 0)):
        config = [r for r in module.configs("dkdv") if r.device == cls][-1]
        report = replace(REPORT, shared_bytes=sram_bytes(module, module.kernel("dkdv"), config), spilled_bytes=72)
        assert len(list(violations(module, module.kernel("dkdv"), config, report))) == count


def test_without_a_pipeline_the_reason_for_a_difference_is_known():
    module = target("full_mha")
    kernel, config = module.kernel("fwd"), replace(module.configs("fwd")[0], num_stages=1)
    report = replace(REPORT, shared_bytes=sram_bytes(module, kernel, config) // 2)
    assert list(violations(module, kernel, config, report)) == []
    assert "share room" in reason(module, kernel, config, report)


# ---------------------------------------------------------------------------------------------- report.json


@pytest.fixture
def kept(tmp_path):
    """A module, a config, the module's files with the config's compile report, and the folder that has these files."""
    module = target("full_mha")
    config = module.configs("fwd")[-1]
    files = record(module, render(module), {("fwd", config): REPORT})
    write_module(files, tmp_path / "full_mha")
    return module, config, files, tmp_path / "full_mha"


def test_a_compile_report_is_kept_while_its_kernel_and_config_are_unchanged(kept):
    module, config, files, folder = kept
    assert keep(module, render(module), folder) == files != render(module)
    assert list(stale(module, module.kernel("fwd"), config, REPORT, files)) == []


@pytest.mark.share(8)
@pytest.mark.parametrize(
    "name, old, new",
    [
        ("kernels.py", "# Forward: online softmax", "# Forward:"),  # the kernel's source
        ("kernels.py", "D_QK = tl.constexpr(64)", "D_QK = tl.constexpr(32)"),  # a constant that it uses
        ("report.json", '"sram_limit": 101376', '"sram_limit": 1'),  # the report of the config
    ],
)
def test_a_compile_report_of_changed_code_is_dropped(kept, name, old, new):
    module, config, files, folder = kept
    changed = render(module)
    assert old in changed[name]
    changed[name] = changed[name].replace(old, new)
    assert keep(module, changed, folder) == changed


def test_a_change_of_another_kernel_keeps_the_compile_report(kept):
    module, config, files, folder = kept
    changed = render(module)
    changed["kernels.py"] = changed["kernels.py"].replace("# Backward, dQ:", "# dQ:")
    assert keep(module, changed, folder)["report.json"] == files["report.json"]


@pytest.mark.share(16)
@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kernels": 1}', '{"kernels": {"fwd": {"schedules": [{"reading": 1}]}}}']
)
def test_a_malformed_report_has_no_compile_reports(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    assert keep(target("full_mha"), render(target("full_mha")), tmp_path) == render(target("full_mha"))


def test_an_edited_compile_report_is_reported(kept):
    module, config, files, _ = kept
    edited = {**files, "report.json": files["report.json"].replace('"registers": 200', '"registers": 100')}
    (sentence,) = stale(module, module.kernel("fwd"), config, REPORT, edited)
    assert "another compile report in report.json: registers 100 for 200; run `attngen verify --write`" in sentence
    by_another_compiler = replace(REPORT, triton="1")
    assert list(stale(module, module.kernel("fwd"), config, by_another_compiler, edited)) == []
    (sentence,) = stale(module, module.kernel("fwd"), config, REPORT, render(module))
    assert "has no compile report in report.json" in sentence


def test_a_digest_is_of_what_triton_compiles():
    """The digest covers the kernel's own source, its constants and its device functions, but neither host code nor
    other kernels."""
    text = render(target("causal_dropout_mqa"))["kernels.py"]
    for old, new, counts in (
        ("DEVICE_CLASSES = {", "CLASSES_OF_DEVICES = {", False),
        ("INTERPRETED_BYTES = 2", "INTERPRETED_BYTES = 4", False),
        ('"num_stages": 2', '"num_stages": 5', False),
        ("# Backward, dQ:", "# dQ:", False),
        ("# Forward: online softmax", "# Forward:", True),
        ("D_QK = tl.constexpr(64)", "D_QK = tl.constexpr(32)", True),
        ("def _dropout_keep(", "def dropout_kept(", True),
    ):
        assert old in text
        assert (source_digest(text.replace(old, new), "fwd") != source_digest(text, "fwd")) is counts, old


@pytest.fixture
def known(tmp_path):
    """The files of a module with one compile report, the other arguments of `recorded`, and the compile report."""
    module = target("full_mha")
    files, config, kernel = render(module), module.configs("fwd")[-1], module.kernel("fwd")
    (tmp_path / "kernels.py").write_text(files["kernels.py"])
    made = job(module, kernel, config, tmp_path / "kernels.py")
    report = replace(REPORT, triton=triton_version(), job=made.digest)
    return record(module, files, {("fwd", config): report}), (module, kernel, config, made), report


def test_a_kernel_whose_digest_is_recorded_is_not_compiled_again(known):
    files, case, report = known
    assert recorded(*case, files) == report
    assert list(stale(*case[:3], recorded(*case, files), files)) == []


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
def test_a_kernel_whose_compile_report_was_edited_is_compiled_again(known, old, new):
    files, case, _ = known
    assert old in files["report.json"]
    assert recorded(*case, {**files, "report.json": files["report.json"].replace(old, new)}) is None


@pytest.mark.share(16)
@pytest.mark.parametrize(
    "change", [{"types": ()}, {"tiles": ()}, {"options": ()}, {"arch": 80}, {"aligned_rows": False}, {"source": "0"}]
)
def test_a_kernel_that_was_compiled_differently_is_compiled_again(known, change):
    files, (module, kernel, config, made), _ = known
    assert recorded(module, kernel, config, replace(made, **change), files) is None
    without_reports = render(module)
    assert recorded(module, kernel, config, made, without_reports) is None


def test_each_commit_samples_a_share_of_jobs_and_in_time_all_of_them(tmp_path):
    jobs = [Job(tmp_path, f"kernel_{i}", (), (), (), 90, 32, True) for i in range(100)]
    shares = [sampled_jobs(jobs, f"commit {i}") for i in range(200)]
    assert {len(share) for share in shares} == {-(-100 // SHARE)} and shares[0] != shares[1]
    assert sampled_jobs(reversed(jobs), "commit 0") == shares[0]
    assert set().union(*shares) == {one.digest for one in jobs}
    assert len(sampled_jobs(jobs[:1], "")) == 1


def test_the_sample_depends_on_the_commit_and_without_git_on_the_jobs(tmp_path):
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


@pytest.mark.share(8)
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
    configs = len(chosen(target("butterfly_gqa"), ["sm90"], False))
    assert configs == 6 and f"{configs} kernels compiled for sm90" in capsys.readouterr().out
    assert len(chosen(target("causal_mha"), ["sm90"], False)) > 4  # the measured configs for few rows, too
    run("verify", spec, *to)
    assert f"{configs} kernels compiled for sm90" in capsys.readouterr().out
    run("verify", spec, *to, "--changed")
    output = capsys.readouterr().out
    assert "1 kernel compiled for sm90" in output and f"{configs - 1} compile reports of the same kernels" in output
    run("build", spec, "--out", str(tmp_path), "--check")
    report = json.loads((tmp_path / "butterfly_gqa" / "report.json").read_text())
    reports = [
        r["reading"]
        for k in report["kernels"].values()
        for r in k["schedules"]
        if r["device"] == "sm90" and r["max_rows"] is None
    ]
    assert [sorted(r) for r in reports] == [
        ["code_bytes", "digest", "registers", "shared_bytes", "source", "spilled_bytes", "states", "target", "triton"]
    ] * configs
    reports[0]["registers"] += 1
    (tmp_path / "butterfly_gqa" / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    with pytest.raises(SystemExit):
        main(["verify", spec, *to, "--changed"])
    assert capsys.readouterr().err.count("has another compile report in report.json: registers") == 1
    with pytest.raises(SystemExit):
        main(["verify", spec, *to[:-1], str(tmp_path / "elsewhere"), "--changed"])
    assert "specs/butterfly_gqa.yaml: not built: there is no" in capsys.readouterr().err


def run(*args):
    """Run the command line, which must succeed."""
    with pytest.raises(SystemExit) as done:
        main(list(args))
    assert done.value.code in (0, None)


@pytest.mark.share(8)
def test_functions_of_scalars_and_casts_compile(tmp_path):
    """Functions of the head index and of scalars, and casts of reals to integers, compile in scores and masks, in each
    kernel and for each kind of GPU."""
    names = ["functions of scalars in a score", "functions of scalars in a mask", "floor, round and casts in a score"]
    classes = ("sm80", "sm90", "gfx942")
    asked, jobs = [], []
    for i, name in enumerate(names):
        module = lower(make_spec({"name": f"scalars_{i}", "head_dim": 64, **VARIANTS[name].parts}))
        file = tmp_path / f"{module.name}.py"
        file.write_text(render(module)["kernels.py"])
        for kernel, cls in zip(("fwd", "dq", "dkdv"), (classes * 2)[i:]):
            asked.append((name, kernel, cls))
            config = next(r for r in reversed(module.configs(kernel)) if r.device == cls)
            jobs.append(job(module, module.kernel(kernel), config, file))
    wrong = [
        (*case, found)
        for case, found in zip(asked, known_reports.compile_all(compile_all, jobs, 2))
        if not isinstance(found, CompileReport)
    ]
    assert wrong == []
    assert {(kernel, cls) for _, kernel, cls in asked} == {(k, c) for k in ("fwd", "dq", "dkdv") for c in classes}


def test_a_prediction_is_compared_with_the_reported_number() -> None:
    assert [percent(*pair) for pair in ((64, 64), (0, 0), (105, 100), (128, 0))] == ["", "", "+5.0%", "above 0"]
