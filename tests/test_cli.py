"""The command line: help, `build`, `list`, `new`, `schema`, `tune`, `test`; output, errors and exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attngen import cli
from attngen.cli import main, testing
from attngen.cli.specs import renamed
from attngen.spec import load_spec, parse_spec
from tests import cli_common
from tests.cli_common import GOOD, WRONG, Cli, files
from tests.helpers import ROOT, SPECS

project, attngen = cli_common.project, cli_common.attngen  # fixtures


COMMANDS = (
    "build",
    "verify",
    "emit",
    "explain",
    "dump",
    "test",
    "bench",
    "tune",
    "profile",
    "list",
    "new",
    "schema",
    "specs-for",
    "doctor",
    "cache",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(attngen: Cli, command: str) -> None:
    assert f"\n  attngen {command}" in attngen(command, "--help")


def test_help_lists_every_command(attngen: Cli) -> None:
    help_ = attngen("--help")
    assert sorted(COMMANDS) == sorted(cli.COMMANDS)
    shown = [help_.index(f"\n  {word} ") for word in cli.COMMANDS]
    headings = [help_.index(f"\n{group}:") for group in cli.GROUPS]
    assert shown == sorted(shown) and sorted([*shown, *headings])[0] == headings[0]
    assert "..." not in help_.partition("Write a spec:")[2]


def test_version(attngen: Cli) -> None:
    assert attngen("--version") == "attngen 0.1.0\n"


@pytest.mark.parametrize(
    "args",
    [
        ["build"],
        ["bild"],
        ["build", "--al"],
        ["dump"],
        ["explain", "x.yaml", "--seq", "0"],
        ["test", "x", "--seed", "a"],
    ],
)
def test_wrong_usage_exits_with_2(project: Path, attngen: Cli, args: list[str]) -> None:
    assert "Error: " in attngen(*args, code=2)


def test_build_writes_a_module_and_says_so(project: Path, attngen: Cli) -> None:
    lines = attngen("build", "specs/good.yaml").splitlines()
    assert lines[0].startswith("good: causal, mha, head dim 64; kernels of long calls")
    assert lines[3].split() == [
        "sm90",
        "portable",
        "fwd",
        "64x64",
        "portable",
        "dq",
        "64x64,",
        "portable",
        "dkdv",
        "64x64",
    ]
    assert lines[-2].startswith("generated/good: __init__.py, kernels.py, ") and lines[-2].endswith(" written")
    assert lines[-1] == "next, in Python, in this folder: from generated.good import attention"
    assert files(project / "generated") == {
        f"good/{name}" for name in ("__init__.py", "kernels.py", "report.json", "runtime.py", "schedule.ir")
    }
    assert " unchanged\n" in attngen("build", "specs/good.yaml", "specs/good.yaml", "--all")
    (project / "specs" / "other.yaml").write_text(GOOD.replace("good", "other"))
    lines = attngen("build", "--all").splitlines()
    assert lines[1].split() == ["good", "causal", "mha", "64", "64x64", "64x64", "64x64", "same"]
    assert lines[-1] == "1 module written to generated, 1 unchanged"


@pytest.mark.share(16)
def test_the_summary_is_never_truncated(project: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    long = (
        f"name: {'n' * 60}\nhead_dim: {{qk: 192, v: 128}}\n"
        "mask: {all_of: [{sliding_window: {left: 1023, right: 0}}, {key_padding: {lengths: true}}]}\n"
    )
    (project / "specs" / "long.yaml").write_text(long)
    monkeypatch.setenv("COLUMNS", "60")
    output = attngen("build", "specs/long.yaml")
    assert "n" * 60 in output and "key_padding(lengths=True)" in output and "…" not in output


def test_nothing_is_written_if_one_spec_is_wrong(project: Path, attngen: Cli) -> None:
    (project / "specs" / "bad.yaml").write_text("name: bad\nhead_dim: 63\nmask: windw\n")
    assert attngen("build", "specs/good.yaml", "specs/bad.yaml", code=1).splitlines() == [
        "error: specs/bad.yaml, line 2: `head_dim` is the number 63; expected a whole number from 16 to 512 that is "
        "a multiple of 8, or {qk: ..., v: ...}",
        "error: specs/bad.yaml, line 3: `mask` is `windw`, which is not a mask; did you mean `sliding_window`?",
    ]
    assert not (project / "generated").exists()


def test_nothing_is_written_if_a_schedule_does_not_fit(project: Path, attngen: Cli) -> None:
    text = "name: big\nhead_dim: 256\ndtype: fp32\nschedule: {block_q: 256, block_kv: 256}\n"
    (project / "specs" / "big.yaml").write_text(text)
    assert "bytes of shared memory" in attngen("build", "specs/good.yaml", "specs/big.yaml", code=1)
    assert not (project / "generated").exists()


@pytest.mark.parametrize("command", ["build", "explain", "dump", "test"])
@pytest.mark.parametrize(
    "below, where, keys",
    [
        ("mask: causal\nschedule: {block_q: 256}", "line 4: `schedule`", "block_q"),
        ("schedule:\n  block_kv: 64\n  stages: 5", "line 3: `schedule`", "block_kv or stages"),
    ],
)
def test_the_error_of_a_schedule_that_does_not_fit_names_file_and_key(
    project: Path, attngen: Cli, command: str, below: str, where: str, keys: str
) -> None:
    (project / "specs" / "big.yaml").write_text(f"name: wide\nhead_dim: 256\n{below}\n")
    error = attngen(command, "specs/big.yaml", code=1)
    assert error.startswith(f"error: specs/big.yaml, {where} does not fit: on ") and error.count("\n") == 1
    assert error.endswith(f"; a smaller {keys} needs less\n")


def test_every_wrong_spec_is_named_and_nothing_is_written(project: Path, attngen: Cli) -> None:
    for name, (text, _) in WRONG.items():
        (project / "specs" / f"{name}.yaml").write_text(text)
    expected = sorted(f"error: specs/{name}.yaml, {sentence}" for name, (_, sentence) in WRONG.items())
    assert sorted(attngen("build", "--all", code=1).splitlines()) == expected
    assert not (project / "generated").exists()


def test_list_shows_good_specs_and_the_errors_of_wrong_ones(project: Path, attngen: Cli) -> None:
    (project / "specs" / "typo.yaml").write_text(WRONG["typo"][0])
    (project / "specs" / "worse.yaml").write_text("- a list\n")
    errors = attngen("list", code=1).splitlines()
    assert errors[0] == f"error: specs/typo.yaml, {WRONG['typo'][1]}" and errors[1].startswith(
        "error: specs/worse.yaml: "
    )
    assert len(errors) == 2 and "\ngood " in attngen.output and "softcap" in attngen.output


def test_two_specs_of_one_name(project: Path, attngen: Cli) -> None:
    (project / "specs" / "twin.yaml").write_text(GOOD)
    assert "another spec of this build is named `good` too" in attngen("build", "--all", code=1)


def test_a_folder_that_attngen_did_not_write_is_not_overwritten(project: Path, attngen: Cli) -> None:
    (project / "generated" / "good").mkdir(parents=True)
    (project / "generated" / "good" / "mine.py").write_text("mine")
    assert "is not a generated module" in attngen("build", "specs/good.yaml", code=1)
    assert files(project / "generated") == {"good/mine.py"}


def test_check_passes_until_something_changes(project: Path, attngen: Cli) -> None:
    assert "generated/good does not exist" in attngen("build", "--all", "--check", code=1) + attngen.output
    assert not (project / "generated").exists()
    attngen("build", "--all")
    assert attngen("build", "--all", "--check") == "generated is what 1 spec gives\n"
    kernels = project / "generated" / "good" / "kernels.py"
    kernels.write_text(kernels.read_text().replace("BLOCK_Q", "BLOCK_R", 1))
    assert (
        attngen("build", "--all", "--check", code=1)
        == "error: generated is not what the specs give; run `attngen build` without --check\n"
    )
    assert "--- generated/good/kernels.py\n+++ kernels.py from the spec\n" in attngen.output
    assert "BLOCK_R" in kernels.read_text()
    attngen("build", "--all")
    shutil.copytree(project / "generated" / "good", project / "generated" / "orphan")
    attngen("build", "--all", "--check", code=1)
    assert "generated/orphan has no spec" in attngen.output
    shutil.rmtree(project / "generated" / "orphan")
    (project / "generated" / "stray.py").touch()
    (project / "generated" / "empty").mkdir()
    (project / "generated" / "good" / "mine.py").touch()
    attngen("build", "--all", "--check", code=1)
    assert all(
        f"generated/{line}" in attngen.output
        for line in ("stray.py has no spec", "empty has no spec", "good/mine.py is not written")
    )


def test_no_specs(tmp_path: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert attngen("build", "--all", code=1).startswith(
        "error: no *.yaml in specs/; run attngen in the folder that holds specs/"
    )
    assert attngen("build", "specs/x.yaml", code=1).startswith("error: specs/x.yaml: there is no such file")


@pytest.mark.share(4)
def test_new_then_build_then_check(project: Path, attngen: Cli) -> None:
    assert attngen("new", "mine") == "specs/mine.yaml\nnext: attngen build specs/mine.yaml\n"
    attngen("build", "specs/mine.yaml")
    attngen("build", "specs/mine.yaml", "--check")
    before = (project / "specs" / "mine.yaml").read_text()
    assert attngen("new", "mine", code=1) == "error: specs/mine.yaml exists already; choose another name\n"
    assert (project / "specs" / "mine.yaml").read_text() == before


def test_new_copies_a_spec_with_its_comments(project: Path, attngen: Cli) -> None:
    assert attngen("new", "mine", "--like", "window_gqa").startswith("specs/mine.yaml\n")
    shipped = (ROOT / "specs" / "window_gqa.yaml").read_text()
    assert (project / "specs" / "mine.yaml").read_text() == shipped.replace("name: window_gqa\n", "name: mine\n")
    (project / "kept.yaml").write_text('# as good\nname: "kept"  # for kept.yaml\nhead_dim: 16\n')
    attngen("new", "other", "--like", "./kept.yaml")
    copied = (project / "specs" / "other.yaml").read_text()
    assert copied == "# as good\nname: other  # for kept.yaml\nhead_dim: 16\n"
    assert attngen("new", "x", "--like", "windw_gqa", code=1) == (
        "error: there is no spec `windw_gqa`; expected one of specs/, one that attngen ships, or a path; did you mean "
        "`window_gqa`?\n"
    )
    (project / "flow.yaml").write_text("{name: flow, head_dim: 16}\n")
    flow = "error: flow.yaml: its name cannot be replaced; expected a line `name: flow`\n"
    assert attngen("new", "x", "--like", "flow.yaml", code=1) == flow
    assert not (project / "specs" / "x.yaml").exists()


def test_every_shipped_spec_can_be_copied() -> None:
    for path in (ROOT / "specs" / f"{name}.yaml" for name in SPECS):
        assert parse_spec(renamed(path, "mine")) == load_spec(path).model_copy(update={"name": "mine"}), path


def test_a_name_stands_for_a_spec(project: Path, attngen: Cli) -> None:
    """That of specs/ in the current folder, or else the one that attngen ships."""
    assert attngen("dump", "good", "--after", "build") == attngen("dump", "specs/good.yaml", "--after", "build")
    shipped = attngen("dump", str(ROOT / "specs" / "causal_mqa.yaml"), "--after", "build")
    assert attngen("dump", "causal_mqa", "--after", "build") == shipped != attngen("dump", "good", "--after", "build")
    (project / "specs" / "causal_mqa.yaml").write_text("name: causal_mqa\nhead_dim: 16\n")
    assert attngen("dump", "causal_mqa", "--after", "build") != shipped
    for command in ("build", "test", "tune", "verify", "bench", "explain", "profile", "dump"):
        assert attngen(command, "godd", code=1).endswith("a path; did you mean `good`?\n"), command


def test_without_specs_the_shipped_ones_are_listed(
    tmp_path: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listed = [line.split() for line in attngen("list").partition("\n\n")[0].splitlines()]
    assert sorted(line[0] for line in listed[1:]) == SPECS


@pytest.mark.parametrize(
    "name", ["../x", "/tmp/x", "a/b", "Causal", "1x", "class", "ünï", "", "a # ../b", "a\nmask: none", "x" * 65]
)
def test_new_refuses_a_bad_name_and_writes_nothing(
    tmp_path: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    errors = attngen("new", "--", name, code=1)
    assert errors.startswith("error: attngen new: `name` is ") and errors.count("\n") == 1
    assert files(tmp_path) == set() and not (tmp_path / "specs").exists()


def test_list_names_specs_and_masks(project: Path, attngen: Cli) -> None:
    lines = [line.split() for line in attngen("list").splitlines()]
    assert lines[0][0] == "specs/*.yaml" and ["good", "causal", "mha", "64", "bf16"] in lines
    assert {"causal", "key_padding", "none", "sliding_window"} <= {line[0] for line in lines if line}
    assert ["softcap", "cap", "*", "tanh(s", "/", "cap)"] in [line[:6] for line in lines]
    (project / "specs" / "capped.yaml").write_text("name: capped\nhead_dim: 64\nscore: [{softcap: 30.0}, sink]\n")
    assert ["capped", "none", "+", "softcap(cap=30.0)", "+", "sink", "mha"] in [
        line.split()[:7] for line in attngen("list").splitlines()
    ]


def test_schema_is_json(attngen: Cli) -> None:
    schema = json.loads(attngen("schema"))
    assert schema["required"] == ["name", "head_dim"]
    assert {"causal"} <= set(schema["properties"]["mask"]["anyOf"][0]["enum"])


def test_a_dry_run_of_tune_shows_candidates_and_reasons(project: Path, attngen: Cli) -> None:
    lines = attngen("tune", "specs/good.yaml", "--dry-run", "--device", "a100").splitlines()
    heading = r"good @(\w+) bf16( up to 512 rows)?: (\d+) of (\d+): \d+x\d+x\d+x\d(, \d+x\d+x\d+x\d)*"
    found = {i: re.fullmatch(heading, line) for i, line in enumerate(lines) if line[0] != " "}
    few = " up to 512 rows"
    assert [m and m.group(1, 2) for m in found.values()] == [
        (k, rows) for k in ("fwd", "dq", "dkdv", "jvp") for rows in (few, None)
    ]
    for (i, m), end in zip(found.items(), [*found, len(lines)][1:]):
        counts = [int(line.split()[0]) for line in lines[i + 1 : end]]
        assert int(m[3]) + sum(counts) == int(m[4]) == 128 and counts == sorted(counts, reverse=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_tune_without_a_gpu_says_what_it_needs(project: Path, attngen: Cli) -> None:
    assert "attngen tune measures on a CUDA device, and there is none; expected one, or `--dry-run`" in attngen(
        "tune", "--all", code=1
    )
    sizes = "--whole-grid 5 is not a size that is measured; expected one of 512, 1024, 4096, 16384"
    assert sizes in attngen("tune", "--all", "--whole-grid", "5", code=1)


@pytest.mark.share(32)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_tune_makes_a_table_from_results_without_a_gpu(project: Path, attngen: Cli) -> None:
    from attngen.schedule.table import read_table
    from attngen.spec import load_spec
    from attngen.tune.run import read_results
    from attngen.tune.tuner import Outcome, Tried, plan

    plans = [plan(load_spec(project / "specs" / "good.yaml"), "sm90")]
    results = read_results(project / "r.jsonl", "H200", plans)
    cell, found = next(plans[0].cells())
    tried = [Tried(row, 1.0 + i, ms) for i, (row, ms) in enumerate(zip(found.kept, (0.5, 0.25, 1.0)))]
    results.keep(Outcome(cell, tuple(tried), 0, 1.0), {"gpu": "NVIDIA H200", "torch": "2", "triton": "3"})
    lines = attngen("tune", "specs/good.yaml", "--results", "r.jsonl", "--table", "t.json").splitlines()
    assert lines[1].split()[:4] == ["good", "fwd", "512", "3"] and lines[1].split()[-2:] == ["100.0%", "0.50"]
    assert lines[2:4] == [
        "@fwd: rank correlation of modelled costs and times 0.50 (median of 1, 0.50 to 0.50)",
        "faster than the model's choice in 1 of 1, by 100.0% (median), 100.0% at most",
    ]
    assert lines[4] == "t.json has 1 measured schedules"
    assert [entry.ms for entry in read_table(project / "t.json").entries.values()] == [0.25]


def run(*args: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attngen", *args]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True
    )


@pytest.mark.share(4)
def test_test_shows_each_case(project: Path) -> None:
    (project / "specs" / "small.yaml").write_text("name: small\nhead_dim: 16\ndtype: fp16\nmask: causal\n")
    (project / "specs" / "typo.yaml").write_text(WRONG["typo"][0])
    # A wrong spec does not keep the others from being tested.
    done = run("test", "specs/typo.yaml", "specs/small.yaml", folder=project)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("testing: ")]  # of a slow machine
    assert (done.returncode, errors) == (1, [f"error: specs/typo.yaml, {WRONG['typo'][1]}"])
    cases = [line for line in done.stdout.splitlines() if line.startswith("B")]
    assert len(cases) >= 5 and all(line.endswith(" ok") for line in cases)
    head, *worst = done.stdout.partition("at worst")[2].splitlines()
    assert head.split() == ["ours", "naive", "over", "naive", "case"]
    assert [line.split()[0] for line in worst[:7]] == ["out", "lse", "dq", "dk", "dv", "jvp(out)", "jvp(lse)"]
    legend = (
        "fp64",
        "lse: log-sum-exp",
        "dx: gradient",
        "jvp(x): tangent",
        "over naive: our error over naive",
        "2x fails",
    )
    assert all(word in done.stdout.splitlines()[-1 - at] for at, word in zip((2, 2, 1, 1, 0, 0), legend))


@pytest.mark.share(8)
def test_test_shows_each_gradient_and_refuses_a_numpy_that_the_interpreter_cannot_use(project: Path) -> None:
    (project / "specs" / "small.yaml").write_text(
        "name: small\nhead_dim: 16\ndtype: fp16\nscore: [sink, temperature]\n"
    )
    code = """
import sys
from importlib import metadata
from attngen.cli import main
version = metadata.version
metadata.version = lambda name: {"triton": "3.6.0", "numpy": sys.argv[1]}.get(name) or version(name)
main(["test", "specs/small.yaml"])
"""
    done = [
        subprocess.run(
            [sys.executable, "-c", code, numpy],
            cwd=project,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        for numpy in ("2.3.5", "2.4.0")
    ]
    assert done[0].returncode == 0, done[0].stderr
    heading, *cases = (line for line in done[0].stdout.splitlines() if line.startswith(("case", "B")))
    assert heading.split()[:11] == [
        "case",
        "dtype",
        "out",
        "lse",
        "dq",
        "dk",
        "dv",
        "dsink",
        "dtemperature",
        "jvp(out)",
        "jvp(lse)",
    ]
    assert cases and all(len(re.findall(r" [0-9.]+e[-+][0-9]+", line)) == 9 for line in cases)
    sentence = (
        "the interpreter of Triton 3.6.0 does not work with numpy 2.4.0; expected numpy below 2.4: pip install "
        "'numpy<2.4'"
    )
    assert done[1].returncode == 1 and done[1].stderr == f"error: {sentence}\n"
    tests = code.replace("from attngen.cli import main\n", "import pytest\n").replace(
        'main(["test", "specs/small.yaml"])', 'pytest.main(["--co"])'
    )
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    refused = subprocess.run([sys.executable, "-c", tests, "2.4.0"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert sentence in refused.stdout + refused.stderr and "test_" not in refused.stdout


@pytest.mark.share(8)
def test_build_does_not_import_torch(project: Path) -> None:
    code = """
import sys
from attngen.cli import main
try:
    main(["build", "specs/good.yaml"])
finally:
    print([name for name in ("torch", "triton") if name in sys.modules])
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=project, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.share(4)
def test_build_notes_positions_that_count_from_zero(tmp_path, capsys):
    """The note is one line, and the module is built."""
    spec = tmp_path / "n.yaml"
    spec.write_text('name: n\nhead_dim: 16\nmask: {expr: "kv_idx <= q_idx"}\n')
    with pytest.raises(SystemExit) as end:
        main(["build", str(spec), "--out", str(tmp_path / "made")])
    assert not end.value.code and (tmp_path / "made" / "n" / "kernels.py").is_file()
    notes = [line for line in capsys.readouterr().err.splitlines() if "note: " in line]
    assert len(notes) == 1 and notes[0].startswith(f"{spec}, line 3: note: `mask` compares `q_idx` with `kv_idx`")


@pytest.mark.parametrize(
    ("mask", "far"),
    [
        ("causal", []),
        ({"sliding_window": {"left": 1023, "right": 0}}, ["left: 1023"]),
        ({"any_of": [{"sliding_window": {"left": 99}}, {"expr": "kv_idx < 4096"}]}, ["4096"]),
    ],
)
def test_numbers_of_a_mask_beyond_the_longest_case_are_noted(mask: object, far: list[str]) -> None:
    assert list(testing._beyond(mask, 300)) == far
