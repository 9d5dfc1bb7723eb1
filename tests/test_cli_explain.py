"""`attngen dump`, `emit`, `verify` and `explain`: the IR of a spec, and what is computed from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import cli_common
from tests.cli_common import GOOD, Cli, files

project, attngen = cli_common.project, cli_common.attngen  # fixtures

PASSES = (
    "build", "inline-scores", "exp2-softmax", "hoist-scalars", "classify-tiles", "split-loops", "simplify",
    "assign-memory-space", "select-tiles",
    "pipeline-loads", "dce", "legalize-triton",
)  # fmt: skip


@pytest.mark.share(16)
@pytest.mark.parametrize("name", PASSES)
def test_dump_after_each_pass_parses_back(project: Path, attngen: Cli, name: str) -> None:
    from attngen.ir.parser import parse_module
    from attngen.ir.printer import print_module

    text = attngen("dump", "specs/good.yaml", "--after", name)
    assert print_module(parse_module(text)) == text


def test_dump_refuses_a_pass_that_does_not_exist(project: Path, attngen: Cli) -> None:
    error = attngen("dump", "specs/good.yaml", "--after", "split-loop", code=1)
    assert error == "error: `split-loop` is not a pass; did you mean `split-loops`?\n"


@pytest.mark.share(4)
def test_dump_writes_graphs(project: Path, attngen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_emit_writes_the_module_that_build_writes(project: Path, attngen: Cli) -> None:
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


def test_errors_of_emit_show_the_ir_only_with_verbose(project: Path, attngen: Cli) -> None:
    (project / "x.ir").write_text(attngen("dump", "specs/good.yaml").replace("num_warps=4", "num_warps=3"))
    error = attngen("emit", "x.ir", "--out", "o", code=1)
    assert error.startswith("error: x.ir: the IR breaks rule `powers-of-two`: kernel @") and error.count("\n") == 1
    verbose = attngen("emit", "x.ir", "--out", "o", "--verbose", code=1)
    assert "\nmodule @good\n" in verbose and verbose.endswith(f"\n{error}")


@pytest.mark.share(4)
@pytest.mark.parametrize("many", [[], ["--all"]])
def test_verify_names_a_module_that_is_not_built(project: Path, attngen: Cli, many: list[str]) -> None:
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


@pytest.mark.share(8)
def test_explain_counts_the_tiles_that_bounds_and_block_lists_leave(project: Path, attngen: Cli) -> None:
    """It does so for masks of positions, and says whether kernels use bounds or lists."""
    loose = "abs(q_idx // 64 % 8 - kv_idx // 64 % 8) < 1"
    for mask, expected in (
        ("causal", "62.5% (25.0%) by the formula's bounds, 62.5% (25.0%) by block lists; used: bounds"),
        (
            f'{{expr: "{loose}"}}',
            "100.0% (100.0%) by the formula's bounds, 25.0% (25.0%) by block lists; used: block lists",
        ),
    ):
        (project / "specs" / "x.yaml").write_text(f"name: x\nhead_dim: 64\nmask: {mask}\n")
        lines = attngen("explain", "specs/x.yaml", "--seq", "500").splitlines()
        at = lines.index(
            "Tiles visited of 512 x 512, in 128 x 128, counted in a sample of rows (partial tiles in brackets)"
        )
        assert lines[at + 1 : at + 3] == [f"  program tiles of {own}: {expected}" for own in ("queries", "keys")]
    (project / "specs" / "x.yaml").write_text("name: x\nhead_dim: 64\nmask: document\n")
    assert "Tiles visited" not in attngen("explain", "specs/x.yaml")


@pytest.mark.share(4)
def test_explain_says_why_no_kernel_is_warp_specialized(project: Path, attngen: Cli, tmp_path: Path) -> None:
    (project / "specs" / "x.yaml").write_text(
        "name: x\nhead_dim: 64\nmask: {all_of: [causal, document]}\nscore: {softcap: 30.0}\nbackward: false\n"
    )
    assert "On sm90 the kernel @fwd has no config for hopper: its head_dim is 64, and" in attngen(
        "explain", "specs/x.yaml"
    )
    attngen("explain", "specs/x.yaml", "--html", str(tmp_path / "x.html"))
    assert "On sm90 the kernel @fwd has no config for hopper" in (tmp_path / "x.html").read_text()


@pytest.mark.share(16)
@pytest.mark.parametrize(
    "mask", ["none", "causal", "{sliding_window: {left: 9, right: 9}}", "{all_of: [causal, key_padding]}"]
)
def test_explain_defines_every_name_and_fits_a_screen(project: Path, attngen: Cli, mask: str) -> None:
    (project / "specs" / "x.yaml").write_text(f"name: x\nhead_dim: 64\nmask: {mask}\n")
    lines = attngen("explain", "specs/x.yaml", "--loops", "--formulas").splitlines()
    assert max(map(len, lines)) <= 120
    named = {name for line in lines if " <= j < " in line for name in re.findall(r"[a-z]+_\w+", line)}
    assert (
        {"kv_full_end", "kv_end", "q_full_end", "q_end"}
        <= named
        <= {line.split()[0] for line in lines if line.startswith("    ")}
    )


@pytest.mark.share(16)
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
    assert "roofline" not in output


@pytest.mark.share(16)
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
            (
                "--model llama-8b is gqa with head dim 128, and specs/good.yaml is mha with head dim 64; expected a "
                "spec that agrees"
            ),
        ),
    ],
)
def test_a_wrong_model_gets_one_sentence(project: Path, attngen: Cli, args: list[str], message: str) -> None:
    assert attngen("explain", "specs/good.yaml", *args, code=1) == f"error: {message}\n"


@pytest.mark.share(2)
@pytest.mark.parametrize(("name", "inputs"), [("prefix_lm_gqa", ["prefix_length"]), ("causal_gqa", [])])
def test_figures_say_which_inputs_hide_nothing(name: str, inputs: list[str], project: Path, attngen: Cli) -> None:
    """A call where such an input hides keys takes less than the figures."""
    shown = attngen("explain", name)
    assert json.loads(attngen("explain", name, "--json"))["inputs_that_hide_nothing"] == inputs
    assert all(f"values of `{given}` that hide no key" in shown for given in inputs)
    assert ("that hide no key" in shown) == bool(inputs)
