"""The command line as a user meets it: output, errors in one line, exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen import __version__, api
from attngen.cli import machine, main
from tests.helpers import ROOT

COMMANDS = (
    "build",
    "verify",
    "emit",
    "explain",
    "dump",
    "test",
    "bench",
    "tune",
    "list",
    "new",
    "schema",
    "specs-for",
    "doctor",
    "cache",
)
PASSES = (
    "build", "inline-scores", "exp2-softmax", "hoist-scalars", "classify-tiles", "split-loops", "simplify",
    "assign-memory-space", "select-tiles",
    "pipeline-loads", "dce", "legalize-triton",
)  # fmt: skip
GOOD = (
    "name: good\nhead_dim: 64\ndtype: bf16\nmask: causal\nschedule: {block_q: 64, block_kv: 64, stages: 2, warps: 4}\n"
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project with one spec, as the current folder."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "good.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Cli:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *args: str, code: int = 0) -> str:
        """Standard output of a command that ends with that exit code; of one that fails, the error's lines."""
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(args)
        self.output, self.errors = self.capsys.readouterr()
        assert (caught.value.code or 0) == code, self.errors
        assert "Traceback" not in self.errors
        return self.errors if code else self.output


@pytest.fixture
def attngen(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


# ---------------------------------------------------------------------------------------------- help and usage


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(attngen: Cli, command: str) -> None:
    assert f"\n  attngen {command}" in attngen(command, "--help")


def test_help_lists_every_command(attngen: Cli) -> None:
    help_ = attngen("--help")
    assert [word for word in COMMANDS if f"\n  {word} " in help_] == list(COMMANDS)
    assert "..." not in help_.partition("Commands:")[2]


def test_version(attngen: Cli) -> None:
    assert attngen("--version") == "0.1.0\n"


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
def test_wrong_usage_ends_with_2(project: Path, attngen: Cli, args: list[str]) -> None:
    assert "Error: " in attngen(*args, code=2)


# ---------------------------------------------------------------------------------------------- build


def test_build_writes_a_module_and_says_so(project: Path, attngen: Cli) -> None:
    lines = attngen("build", "specs/good.yaml").splitlines()
    assert lines[1].split() == ["good", "causal", "mha", "64", "64x64", "64x64", "64x64", "written"]
    assert lines[-1] == "1 module written to generated, 0 unchanged"
    assert files(project / "generated") == {
        f"good/{name}" for name in ("__init__.py", "kernels.py", "report.json", "runtime.py", "schedule.ir")
    }
    assert "0 modules written to generated, 1 unchanged" in attngen(
        "build", "specs/good.yaml", "specs/good.yaml", "--all"
    )


def test_the_summary_is_never_cut(project: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    long = (
        "name: "
        + "n" * 60
        + "\nhead_dim: {qk: 192, v: 128}\nmask: {all_of: [{sliding_window: {left: 1023, right: 0}}, {key_padding: {lengths: true}}]}\n"
    )
    (project / "specs" / "long.yaml").write_text(long)
    monkeypatch.setenv("COLUMNS", "60")
    output = attngen("build", "specs/long.yaml")
    assert "n" * 60 in output and "key_padding(lengths=True)" in output and "…" not in output


def test_one_wrong_spec_and_nothing_is_written(project: Path, attngen: Cli) -> None:
    (project / "specs" / "bad.yaml").write_text("name: bad\nhead_dim: 63\nmask: windw\n")
    assert attngen("build", "specs/good.yaml", "specs/bad.yaml", code=1).splitlines() == [
        "error: specs/bad.yaml, line 2: `head_dim` is the number 63; expected a whole number from 16 to 512 that is a multiple of 8, "
        "or {qk: ..., v: ...}",
        "error: specs/bad.yaml, line 3: `mask` is `windw`, which is not a mask; did you mean `sliding_window`?",
    ]
    assert not (project / "generated").exists()


def test_a_schedule_that_does_not_fit_and_nothing_is_written(project: Path, attngen: Cli) -> None:
    text = "name: big\nhead_dim: 256\ndtype: fp32\nschedule: {block_q: 256, block_kv: 256}\n"
    (project / "specs" / "big.yaml").write_text(text)
    assert "bytes of shared memory" in attngen("build", "specs/good.yaml", "specs/big.yaml", code=1)
    assert not (project / "generated").exists()


@pytest.mark.parametrize("command", ["build", "explain", "dump", "test"])
@pytest.mark.parametrize(
    "below, where, what",
    [
        ("mask: causal\nschedule: {block_q: 256}", "line 4: `schedule`", "block_q"),
        ("schedule:\n  block_kv: 64\n  stages: 5", "line 3: `schedule`", "block_kv or stages"),
    ],
)
def test_what_does_not_fit_names_the_file_and_the_key(
    project: Path, attngen: Cli, command: str, below: str, where: str, what: str
) -> None:
    (project / "specs" / "big.yaml").write_text(f"name: wide\nhead_dim: 256\n{below}\n")
    error = attngen(command, "specs/big.yaml", code=1)
    assert error.startswith(f"error: specs/big.yaml, {where} does not fit: on ") and error.count("\n") == 1
    assert error.endswith(f"; a smaller {what} needs less\n")


WRONG = {  # of each a file, and what is said of it
    "typo": (
        "name: typo\nhead_dim: 64\nmask: windw\n",
        "line 3: `mask` is `windw`, which is not a mask; did you mean `sliding_window`?",
    ),
    "grad": (
        "name: grad\nhead_dim: 64\nscore:\n- softcap: 5.0\n- expr: s + t[kv_idx]\n  params: {t: {tensor: [Nk], grad: true}}\n",
        "line 5: `score[1]` has `grad: true` for `t`, which is read at `kv_idx`; sums in a fixed order need b, h, hkv, q_idx, q_idx and "
        "kv_idx, numbers, a distance q_pos - kv_idx, or one of at most 16 entries; `backward: {deterministic: false}` adds anywhere, in "
        "no fixed order",
    ),
    "outside": (
        "name: outside\nhead_dim: 64\nscore: {expr: 's + t[7]', params: {t: {tensor: [4]}}}\n",
        "line 3: `score` reads `t` at `7`, which is outside of it; expected places inside",
    ),
    "large": (
        "name: large\nhead_dim: 64\nmask: {block_sparse: {block: 32}}\nschedule:\n  stages: 2\n  block_q: 64\n",
        "line 6: `schedule.block_q` is 64, and the mask lists blocks of 32 x 32 scores (`block_sparse` says which count), which tiles "
        "divide; expected 32 or less",
    ),
    "listed": (
        "name: listed\nhead_dim: 64\nmask: {expr: 'seen[b, kv_idx]', params: {seen: {tensor: [B, Nk], dtype: bool}}}\n"
        "schedule: {block_kv: 256}\n",
        "line 4: `schedule.block_kv` is 256, and the mask lists blocks of 128 x 128 scores (its data says which count), which tiles "
        "divide; expected 128 or less",
    ),
}


def test_every_wrong_spec_is_named_and_nothing_is_written(project: Path, attngen: Cli) -> None:
    for name, (text, _) in WRONG.items():
        (project / "specs" / f"{name}.yaml").write_text(text)
    expected = sorted(f"error: specs/{name}.yaml, {sentence}" for name, (_, sentence) in WRONG.items())
    assert sorted(attngen("build", "--all", code=1).splitlines()) == expected
    assert not (project / "generated").exists()


def test_list_shows_the_good_specs_beside_the_wrong_ones(project: Path, attngen: Cli) -> None:
    (project / "specs" / "typo.yaml").write_text(WRONG["typo"][0])
    (project / "specs" / "worse.yaml").write_text("- a list\n")
    errors = attngen("list", code=1).splitlines()
    assert errors[0] == f"error: specs/typo.yaml, {WRONG['typo'][1]}" and errors[1].startswith(
        "error: specs/worse.yaml: "
    )
    assert len(errors) == 2 and "specs/good.yaml" in attngen.output and "softcap" in attngen.output


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


# ---------------------------------------------------------------------------------------------- new, list, schema


def test_new_then_build_then_check(project: Path, attngen: Cli) -> None:
    assert attngen("new", "mine") == "specs/mine.yaml\nnext: attngen build specs/mine.yaml\n"
    attngen("build", "specs/mine.yaml")
    attngen("build", "specs/mine.yaml", "--check")
    before = (project / "specs" / "mine.yaml").read_text()
    assert attngen("new", "mine", code=1) == "error: specs/mine.yaml exists already; choose another name\n"
    assert (project / "specs" / "mine.yaml").read_text() == before


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
    assert ["specs/good.yaml", "causal", "mha", "64", "bf16"] in lines
    assert {"causal", "key_padding", "none", "sliding_window"} <= {line[0] for line in lines if line}
    assert ["softcap", "cap", "*", "tanh(s", "/", "cap)"] in [line[:6] for line in lines]
    (project / "specs" / "capped.yaml").write_text("name: capped\nhead_dim: 64\nscore: [{softcap: 30.0}, sink]\n")
    assert ["specs/capped.yaml", "none", "softcap(cap=30.0),", "sink", "mha"] in [
        line.split()[:5] for line in attngen("list").splitlines()
    ]


def test_schema_is_json(attngen: Cli) -> None:
    schema = json.loads(attngen("schema"))
    assert schema["required"] == ["name", "head_dim"]
    assert {"causal"} <= set(schema["properties"]["mask"]["anyOf"][0]["enum"])


# ---------------------------------------------------------------------------------------------- dump, emit, explain


@pytest.mark.parametrize("name", PASSES)
def test_dump_after_each_pass_parses_back(project: Path, attngen: Cli, name: str) -> None:
    from attngen.ir.text import parse_module, print_module

    text = attngen("dump", "specs/good.yaml", "--after", name)
    assert print_module(parse_module(text)) == text


def test_dump_refuses_a_pass_that_does_not_exist(project: Path, attngen: Cli) -> None:
    error = attngen("dump", "specs/good.yaml", "--after", "split-loop", code=1)
    assert error == "error: `split-loop` is not a pass; did you mean `split-loops`?\n"


def test_dump_draws_graphs(project: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attngen("dump", "specs/good.yaml", "--graph", "out.dot") == "out.dot\n"
    assert (project / "out.dot").read_text().startswith('digraph "good" {')
    assert "expected a name that ends in .dot or .svg" in attngen(
        "dump", "specs/good.yaml", "--graph", "out.png", code=1
    )
    assert (
        attngen("dump", "specs/good.yaml", "--graph", "no/out.dot", code=1)
        == "error: no/out.dot: No such file or directory\n"
    )
    monkeypatch.setenv("PATH", str(project))
    assert "needs Graphviz's `dot` on the PATH" in attngen("dump", "specs/good.yaml", "--graph", "out.svg", code=1)
    tool = project / "dot"  # stands for Graphviz, which may not be installed: `dot -Tsvg -o FILE`
    tool.write_text('#!/bin/sh\necho "<svg/>" > "$3"\n')
    tool.chmod(0o755)
    assert attngen("dump", "specs/good.yaml", "--graph", "out.svg") == "out.svg\n"
    assert (project / "out.svg").read_text() == "<svg/>\n"
    assert files(project) == {"specs/good.yaml", "out.dot", "out.svg", "dot"}


def test_emit_gives_the_module_that_build_gives(project: Path, attngen: Cli) -> None:
    attngen("build", "specs/good.yaml")
    assert attngen("emit", "generated/good/schedule.ir", "--out", "again") == "again/good\n"
    for name in files(project / "generated"):
        assert (project / "again" / name).read_text() == (project / "generated" / name).read_text()


def test_emit_follows_an_edit(project: Path, attngen: Cli) -> None:
    attngen("build", "specs/good.yaml")
    path = project / "generated" / "good" / "schedule.ir"
    path.write_text(path.read_text().replace("BLOCK_KV=64", "BLOCK_KV=32"))
    attngen("emit", str(path), "--out", "edited")
    assert '"BLOCK_KV": 32' in (project / "edited" / "good" / "kernels.py").read_text()


def test_emit_refuses_what_is_not_target_ir(project: Path, attngen: Cli) -> None:
    ir = project / "x.ir"
    ir.write_text(attngen("dump", "specs/good.yaml", "--after", "split-loops"))
    error = attngen("emit", "x.ir", "--out", "o", code=1)
    assert (
        error == "error: x.ir: the IR is in phase `scheduled`; expected phase `target`, the last, as in schedule.ir\n"
    )
    good = attngen("dump", "specs/good.yaml")
    number = next(i for i, line in enumerate(good.splitlines(), 1) if "= dot " in line)
    ir.write_text(good.replace("= dot ", "= dott ", 1))
    assert attngen("emit", "x.ir", "--out", "o", code=1).startswith(f"error: x.ir, line {number}: `dott` is not an op")
    ir.write_text(good.replace("BLOCK_Q=64", "BLOCK_Q=48"))
    assert "the IR breaks rule `powers-of-two`" in attngen("emit", "x.ir", "--out", "o", code=1)
    ir.write_bytes(b"\xff")
    assert "cannot be read as text" in attngen("emit", "x.ir", "--out", "o", code=1)
    assert "cannot be read as text" in attngen("emit", "specs", "--out", "o", code=1)
    assert not (project / "o").exists()


def test_what_emit_refuses_is_one_sentence_and_the_ir_where_it_is_asked_for(project: Path, attngen: Cli) -> None:
    (project / "x.ir").write_text(attngen("dump", "specs/good.yaml").replace("num_warps=4", "num_warps=3"))
    error = attngen("emit", "x.ir", "--out", "o", code=1)
    assert error.startswith("error: x.ir: the IR breaks rule `powers-of-two`: kernel @") and error.count("\n") == 1
    verbose = attngen("emit", "x.ir", "--out", "o", "--verbose", code=1)
    assert "\nmodule @good\n" in verbose and verbose.endswith(f"\n{error}")


@pytest.mark.parametrize("many", [[], ["--all"]])
def test_verify_says_at_once_what_is_not_built(project: Path, attngen: Cli, many: list[str]) -> None:
    rest = "; run `attngen build specs/good.yaml` first, or give --write\n"
    error = "error: specs/good.yaml: not built: there is no generated/good/schedule.ir"
    assert attngen("verify", *(many or ["specs/good.yaml"]), code=1) == error + rest
    attngen("build", "specs/good.yaml")
    (project / "specs" / "good.yaml").write_text(GOOD.replace("causal", "none"))
    assert (
        attngen("verify", "specs/good.yaml", code=1)
        == "error: specs/good.yaml: generated/good is of another spec" + rest
    )


def test_explain_counts_for_the_sizes_given(project: Path, attngen: Cli) -> None:
    assert "B=2 Hq=8 Hkv=8 Nq=512 Nk=512" in attngen(
        "explain", "specs/good.yaml", "--seq", "512", "--batch", "2", "--heads", "8"
    )
    (project / "specs" / "gqa.yaml").write_text(GOOD.replace("good", "gqa") + "heads: {sharing: gqa}\n")
    error = attngen("explain", "specs/gqa.yaml", "--heads", "6", "--kv-heads", "4", code=1)
    assert error == "error: --heads 6 is not a multiple of --kv-heads 4\n"


def test_explain_says_which_tiles_bounds_and_lists_leave(project: Path, attngen: Cli) -> None:
    """Of masks of positions; the last sentence is what the module does."""
    loose = "abs(q_idx // 64 % 8 - kv_idx // 64 % 8) < 1"
    for mask, expected in (
        ("causal", "bounds leave 62.5% (25.0%), lists 62.5% (25.0%); kernels visit what bounds leave"),
        (f'{{expr: "{loose}"}}', "bounds leave 100.0% (100.0%), lists 25.0% (25.0%); kernels visit what lists leave"),
    ):
        (project / "specs" / "x.yaml").write_text(f"name: x\nhead_dim: 64\nmask: {mask}\n")
        lines = attngen("explain", "specs/x.yaml", "--seq", "500").splitlines()
        at = lines.index(
            "Tiles visited of 512 x 512, in 128 x 128, counted in a sample of rows (those that are masked)"
        )
        assert lines[at + 1 : at + 3] == [f"  programs that own {own}: {expected}" for own in ("queries", "keys")]
    (project / "specs" / "x.yaml").write_text("name: x\nhead_dim: 64\nmask: document\n")
    assert "Tiles visited" not in attngen("explain", "specs/x.yaml")


def test_explain_says_why_no_kernel_is_warp_specialized(project: Path, attngen: Cli, tmp_path: Path) -> None:
    (project / "specs" / "x.yaml").write_text(
        "name: x\nhead_dim: 64\nmask: {all_of: [causal, document]}\nscore: {softcap: 30.0}\nbackward: false\n"
    )
    assert "On sm90 the kernel @fwd has no row for hopper: its heads have 64 columns, and" in attngen(
        "explain", "specs/x.yaml"
    )
    attngen("explain", "specs/x.yaml", "--html", str(tmp_path / "x.html"))
    assert "On sm90 the kernel @fwd has no row for hopper" in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize(
    "mask", ["none", "causal", "{sliding_window: {left: 9, right: 9}}", "{all_of: [causal, key_padding]}"]
)
def test_explain_defines_what_it_names_and_fits_a_screen(project: Path, attngen: Cli, mask: str) -> None:
    (project / "specs" / "x.yaml").write_text(f"name: x\nhead_dim: 64\nmask: {mask}\n")
    lines = attngen("explain", "specs/x.yaml").splitlines()
    assert max(map(len, lines)) <= 120
    named = {name for line in lines if " <= j < " in line for name in re.findall(r"[a-z]+_\w+", line)}
    assert (
        {"kv_full_end", "kv_end", "q_full_end", "q_end"}
        <= named
        <= {line.split()[0] for line in lines if line.startswith("    ")}
    )


@pytest.mark.parametrize(
    "mask", ["none", "causal", "{sliding_window: {left: 9, right: 9}}", "{all_of: [causal, key_padding]}"]
)
def test_theory_prints_every_theorem_and_fits_a_screen(project: Path, attngen: Cli, mask: str) -> None:
    (project / "specs" / "x.yaml").write_text(f"name: x\nhead_dim: 64\nmask: {mask}\n")
    output = attngen("explain", "specs/x.yaml", "--theory", "--seq", "512")
    assert max(map(len, output.splitlines())) <= 120
    orders = (
        "Theta(N**2 + N*d)",
        "Theta(N**2*d**2/M)",
        "Theta(N*d + N**2*d**2*s/M)",
        "4*N**2*d",
        "8*N**2*d",
        "10*N**2*d",
        "LSE in fp32: N",
    )
    assert [order for order in orders if order not in output] == []
    assert "not Theta" not in output and "One layer: 16 heads, 16 K/V heads, head dim 64\nbatch 1, 512 tokens" in output
    assert "roof" not in output


def test_theory_counts_for_a_model(project: Path, attngen: Cli) -> None:
    (project / "specs" / "llama.yaml").write_text("name: llama\nhead_dim: 128\nmask: causal\nheads: {sharing: gqa}\n")
    output = attngen("explain", "specs/llama.yaml", "--theory", "--model", "llama-70b", "--seq", "131072")
    assert "llama-70b: 80 layers, 64 heads, 8 K/V heads, head dim 128, hidden 8192\n[" in output
    assert [line.split()[1:3] for line in output.splitlines() if line.startswith("standard ")] == [
        ["8804.68", "15410.34"],
        ["562.95", "1125.90"],
    ]


@pytest.mark.parametrize(
    "args, message",
    [
        (
            ["--theory", "--model", "lama-70b"],
            "--model `lama-70b` is not a model that attngen knows; did you mean `llama-70b`?",
        ),
        (["--model", "gpt2-small"], "--model is for the numbers of --theory; expected both or neither"),
        (
            ["--theory", "--model", "gpt2-small", "--heads", "4"],
            "--model gpt2-small says how many heads there are; leave out --heads and --kv-heads",
        ),
        (
            ["--theory", "--model", "llama-8b"],
            "--model llama-8b is gqa with head dim 128, and specs/good.yaml is mha with head dim 64; expected a spec that agrees",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_one_sentence(project: Path, attngen: Cli, args: list[str], message: str) -> None:
    assert attngen("explain", "specs/good.yaml", *args, code=1) == f"error: {message}\n"


# ---------------------------------------------------------------------------------------------- tune


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
    assert "--device H2000 is not a device; did you mean `H200`?" in attngen(
        "tune", "--all", "--device", "H2000", code=1
    )
    sizes = "--whole-grid 5 is not a size that is measured; expected one of 512, 1024, 4096, 16384"
    assert sizes in attngen("tune", "--all", "--whole-grid", "5", code=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_tune_makes_the_table_of_results_without_a_gpu(project: Path, attngen: Cli) -> None:
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


# ---------------------------------------------------------------------------------------------- as a process


def run(*args: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attngen", *args]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True
    )


def test_test_shows_each_case(project: Path) -> None:
    (project / "specs" / "small.yaml").write_text("name: small\nhead_dim: 16\ndtype: fp16\nmask: causal\n")
    (project / "specs" / "typo.yaml").write_text(WRONG["typo"][0])
    done = run(
        "test", "specs/typo.yaml", "specs/small.yaml", folder=project
    )  # a wrong one does not keep the others from being tested
    assert (done.returncode, done.stderr) == (1, f"error: specs/typo.yaml, {WRONG['typo'][1]}\n")
    cases = [line for line in done.stdout.splitlines() if line.startswith("B")]
    assert len(cases) >= 5 and all(line.endswith(" ok") for line in cases)


def test_test_shows_each_gradient_and_what_the_interpreter_needs(project: Path) -> None:
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
        "tout",
        "tlse",
    ]
    assert cases and all(len(re.findall(r" [0-9.]+e[-+][0-9]+", line)) == 9 for line in cases)
    sentence = "the interpreter of Triton 3.6.0 does not work with numpy 2.4.0; expected numpy below 2.4: pip install 'numpy<2.4'"
    assert done[1].returncode == 1 and done[1].stderr == f"error: {sentence}\n"
    tests = code.replace("from attngen.cli import main\n", "import pytest\n").replace(
        'main(["test", "specs/small.yaml"])', 'pytest.main(["--co"])'
    )
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    refused = subprocess.run([sys.executable, "-c", tests, "2.4.0"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert sentence in refused.stdout + refused.stderr and "test_" not in refused.stdout


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


def test_build_notes_positions_that_count_from_zero(tmp_path, capsys):
    """One line, and the module is built."""
    spec = tmp_path / "n.yaml"
    spec.write_text('name: n\nhead_dim: 16\nmask: {expr: "kv_idx <= q_idx"}\n')
    with pytest.raises(SystemExit) as end:
        main(["build", str(spec), "--out", str(tmp_path / "made")])
    assert not end.value.code and (tmp_path / "made" / "n" / "kernels.py").is_file()
    notes = [line for line in capsys.readouterr().err.splitlines() if "note: " in line]
    assert len(notes) == 1 and notes[0].startswith(f"{spec}, line 3: note: `mask` compares `q_idx` with `kv_idx`")


# ---------------------------------------------------------------------------------------------- doctor, cache, completion


def said(output: str) -> dict[str, str]:
    """What `doctor` says, by the word that its lines start with."""
    return {line.partition(" ")[0]: line[9:] for line in output.splitlines() if line[0] != " "}


def test_doctor_says_what_is_here_in_a_screen(attngen: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    output = attngen("doctor")
    assert len(output.splitlines()) <= 24
    found = said(output)
    assert list(found)[:6] == ["attngen", "python", "torch", "triton", "numpy", "pair"]
    assert found["attngen"] == f"{__version__}, in {ROOT / 'attngen'}" and torch.__version__.startswith(found["torch"])
    assert found["pair"] == f"torch {found['torch']} and Triton {found['triton']} are supported together"
    assert found["cache"] == f"{tmp_path / 'modules'}: 0 modules, 0.0 MB"
    if not torch.cuda.is_available():
        assert found["gpu"].endswith(
            "kernels run on the CPU, in Triton's interpreter, with TRITON_INTERPRET=1 in the environment"
        )
        assert "TRITON_INTERPRET=1 is set" in output


@pytest.mark.parametrize(
    ("name", "capability", "line"),
    [
        ("NVIDIA H200", (9, 0), "NVIDIA H200, compute capability 9.0: schedules of class sm90"),
        ("NVIDIA L4", (8, 9), "NVIDIA L4, compute capability 8.9: schedules of class any"),
        ("NVIDIA GB300", (10, 3), "NVIDIA GB300, compute capability 10.3: schedules of class sm100"),
    ],
)
def test_doctor_names_the_class_of_a_gpu(
    attngen: Cli, name: str, capability: tuple[int, int], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gpu(monkeypatch, name, capability)
    output = attngen("doctor")
    assert said(output)["gpu"] == line
    assert "TRITON_INTERPRET=1 is set, so kernels run on the CPU all the same" in output


def of_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    """Have torch find one GPU."""
    major, minor = capability
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=name, major=major, minor=minor)
    )


def test_doctor_fails_where_modules_cannot_run(attngen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpu(monkeypatch, "Tesla V100", (7, 0))
    expected = (
        "Tesla V100, compute capability 7.0: it has no schedules; expected a GPU of compute capability 8.0 or later"
    )
    assert attngen("doctor", code=1) == f"error: {expected}\n"
    versions = {"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.4.0"}
    monkeypatch.setattr(machine, "version", lambda package: versions[package])
    assert "error: the interpreter of Triton 3.6.0 does not work with numpy 2.4.0; expected numpy below 2.4" in attngen(
        "doctor", code=1
    )
    assert said(attngen.output)["pair"] == "torch 2.11.0+cu130 and Triton 3.6.0 are supported together"
    versions["triton"] = "3.8.0"
    attngen("doctor", code=1)
    pairs = "2.11.0 and 3.6.0, 2.12.0 and 3.7.0, 2.13.0 and 3.7.1, 2.14.0 and 3.8.0, 2.15.0 and 3.9.0"
    assert (
        said(attngen.output)["pair"]
        == f"torch 2.11.0+cu130 and Triton 3.8.0 are not tested together; supported pairs: {pairs}"
    )
    monkeypatch.setattr(machine, "_installed", lambda package: "" if package == "triton" else versions[package])
    assert (
        attngen("doctor", code=1) == "error: there is no triton; expected it in this environment: pip install triton\n"
    )
    assert said(attngen.output)["triton"] == "not installed"


def test_cache_shows_modules_and_removes_them(project: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project / "kept"
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(root))
    assert attngen("cache") == f"{root}/modules: 0 modules, 0.0 MB\n"
    assert attngen("cache", "--clear") == f"removed {root}/modules: 0 modules, 0.0 MB\n"
    module = api.build("specs/good.yaml")
    heading, line, total = attngen("cache").splitlines()
    assert heading.split() == ["module", "MB", "built"] and line.split()[0] == Path(str(module.__file__)).parent.name
    assert re.fullmatch(rf"{root}/modules: 1 module, 0\.[1-9] MB", total)
    (root / "other").touch()
    assert attngen("cache", "--clear") == f"removed {total}\n"
    assert {path.name for path in root.iterdir()} == {"modules", "other"}
    assert {path.name for path in (root / "modules").iterdir()} == {"CACHEDIR.TAG", ".locks", ".receipts"}
    assert attngen("cache") == f"{root}/modules: 0 modules, 0.0 MB\n"


def test_cache_removes_nothing_that_is_not_its_own(
    project: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "modules" / "mine").mkdir(parents=True)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(project))
    expected = f"error: {project}/modules is not a cache of attngen (it has no CACHEDIR.TAG); expected ATTNGEN_CACHE_DIR to name a folder"
    assert attngen("cache", "--clear", code=1).startswith(expected)
    assert (project / "modules" / "mine").is_dir()


def completed(words: str, folder: Path) -> list[str]:
    """What bash completes the last of some words to."""
    asked = {"_ATTNGEN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-m", "attngen"]
    env = {**os.environ, **asked, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout.split()


def test_shells_complete_commands_and_specs(project: Path) -> None:
    for path in ("specs/goat.yaml", "specs/other.yaml", "elsewhere/its.yaml"):
        (project / path).parent.mkdir(exist_ok=True)
        shutil.copy(project / "specs" / "good.yaml", project / path)
    (project / "specs" / "notes.txt").touch()
    assert completed("attngen d", project) == ["dump", "doctor"]
    for start in ("", "sp", "specs/"):
        assert completed(f"attngen build {start}", project) == [
            "specs/goat.yaml",
            "specs/good.yaml",
            "specs/other.yaml",
        ]
    assert completed("attngen explain specs/go", project) == ["specs/goat.yaml", "specs/good.yaml"]
    assert completed("attngen test ./specs/o", project) == ["./specs/other.yaml"]
    assert completed("attngen test el", project) == ["elsewhere/"]
    assert completed("attngen test elsewhere/", project) == ["elsewhere/its.yaml"]


def test_shells_are_given_a_script(attngen: Cli) -> None:
    assert "--install-completion" in attngen("--help")
    for shell, line in {
        "bash": "complete -o default -F _attngen_completion attngen",
        "zsh": "compdef _attngen_completion attngen",
    }.items():
        env = {**os.environ, "_ATTNGEN_COMPLETE": f"source_{shell}"}
        done = subprocess.run(
            [sys.executable, "-m", "attngen"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        assert line in done.stdout


def test_doctor_fails_where_the_cache_cannot_be_written(
    tmp_path: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "file" / "deep"))
    said = f"{tmp_path}/file/deep/modules: cannot be written (Not a directory: {tmp_path}/file); name another folder in ATTNGEN_CACHE_DIR"
    assert said in attngen("doctor", code=1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert f"modules: cannot be written (Read-only file system: {tmp_path})" in attngen("doctor", code=1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("number", "hint"), [("EROFS", "expected a folder that this user can write"), ("ENOTEMPTY", "Try again")]
)
def test_a_cache_that_cannot_be_removed(
    tmp_path: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch, number: str, hint: str
) -> None:
    """Another try helps where another process builds, and not on a disk that can only be read."""
    (tmp_path / "modules" / "mine_0123456789abcdef").mkdir(parents=True)
    (tmp_path / "modules" / "CACHEDIR.TAG").touch()
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))

    def fails(*_: Any) -> None:
        raise OSError(getattr(errno, number), "no")

    monkeypatch.setattr("attngen.cache.store._remove", fails)
    assert attngen("cache", "--clear", code=1).endswith(
        f"cannot be removed (no); {'is another process building? ' * (hint[0] == 'T')}{hint}\n"
    )
