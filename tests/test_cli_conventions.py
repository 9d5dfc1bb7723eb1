"""Conventions of the command line: -h and -V, metavars, short options, JSON, tables that fit a terminal, progress."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attngen import cli
from attngen.cli import console
from attngen.cli.conventions import SHORT
from attngen.cost.roofline import Problem
from attngen.devices import DEVICES
from attngen.report.explain import legend
from attngen.report.summary import summary
from attngen.report.tables import Rows
from tests import cli_common
from tests.cli_common import GOOD, WRONG, Cli, in_terminal
from tests.helpers import ROOT, target

project, attngen = cli_common.project, cli_common.attngen  # fixtures


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The help of each command, 80 columns wide."""
    from typer.testing import CliRunner

    run = CliRunner().invoke
    return {
        name: run(cli.app, [name, "-h"], prog_name="attngen", env={"COLUMNS": "80"}).stdout for name in cli.COMMANDS
    }


def test_h_is_help_and_capital_v_the_version(attngen: Cli, helps: dict[str, str]) -> None:
    assert attngen("-V") == attngen("--version") and attngen("-h") == attngen("--help")
    for name, text in helps.items():
        assert text.split() == attngen(name, "--help").split()


def test_help_has_usual_metavars_and_fits_80_columns(helps: dict[str, str]) -> None:
    for name, text in helps.items():
        assert not re.search(r"<[\w ]+>|list\[", text), name  # as in <int range>
        assert max(map(len, text.splitlines())) <= 80, name
    assert "Usage: attngen build [OPTIONS] [SPEC...]" in helps["build"]
    assert "Usage: attngen explain [OPTIONS] SPEC\n" in helps["explain"]
    for name, option, metavar in (
        ("explain", "-n, --seq", "INTEGER"),
        ("bench", "--limit", "FLOAT"),
        ("bench", "--only", "WORDS"),
        ("bench", "-o, --out", "DIR"),
        ("bench", "--from", "FILE"),
    ):
        assert re.search(rf"\n  {option} {metavar} ", helps[name]), option
    assert "[default: 8;\n                      1<=x<=64]" in helps["test"] or "[default: 8; 1<=x<=64]" in helps["test"]


@pytest.mark.parametrize(
    ("name", "option", "words"),
    [
        ("specs-for", "--for", ["training", "serving", "both"]),
        ("specs-for", "--dtype", ["bf16", "fp16", "fp32"]),
        ("bench", "--dtype", ["bf16", "fp16", "fp32"]),
        ("profile", "--direction", ["forward", "backward", "both"]),
        ("verify", "--target", ["sm80", "sm90", "sm100", "gfx942", "any"]),
        ("tune", "--device", [*DEVICES]),
    ],
)
def test_choices_are_metavars_and_others_are_refused(
    helps: dict[str, str], attngen: Cli, project: Path, name: str, option: str, words: list[str]
) -> None:
    metavar = re.escape(f"[{'|'.join(words)}]")
    assert re.search(rf"\n  (-\w, )?{option} {metavar}\s", helps[name])
    error = attngen(name, "specs/good.yaml", option, "wrong", code=2)
    assert re.search(rf"\nError: Invalid value for '{option}'.*: `wrong`; expected ", error)
    assert error.endswith(f"; expected {', '.join(words[:-1])} or {words[-1]}\n")


def test_a_letter_means_one_thing_in_all_commands(helps: dict[str, str]) -> None:
    found = {pair for text in helps.values() for pair in re.findall(r"\n  (-\w), (--[\w-]+)", text)}
    assert found - {("-h", "--help")} == {(short, long) for long, short in SHORT.items()}
    several = {short for short, _ in found if len([1 for other, _ in found if other == short]) > 1}
    assert several == {"-n"}  # --n and --seq are both numbers of queries and keys
    for name, text in helps.items():
        for long, short in SHORT.items():
            assert f"  {long} " not in text, (name, short)


def test_help_of_bench_has_groups_and_begins_with_examples(helps: dict[str, str]) -> None:
    text = helps["bench"]
    headings = ["Arguments", "What to measure", "Sizes of the specs", "How to measure", "Results", "Options"]
    at = [text.index(f"\n{heading}:\n") for heading in headings]
    assert at == sorted(at)
    assert text.index("attngen bench causal_gqa") < at[0] < at[-1] < text.index("A cell is")
    paragraphs = [*text[: at[0]].split("\n\n"), *text[at[-1] :].split("\n\n")]
    assert max(paragraph.count("\n") for paragraph in paragraphs) <= 10


def test_short_options_do_what_long_ones_do(project: Path, attngen: Cli) -> None:
    assert attngen("build", "-a", "-o", "made").startswith("good: ") and (project / "made" / "good").is_dir()
    assert "B=2 Hq=16 Hkv=16 Nq=256" in attngen("explain", "specs/good.yaml", "-n", "256", "-b", "2")


# ---------------------------------------------------------------------------------------------------------- JSON


def test_list_as_json(project: Path, attngen: Cli) -> None:
    found = json.loads(attngen("list", "--json"))
    assert list(found) == ["specs", "masks", "scores"]
    head_dim = {"qk": 64, "v": 64}
    expected = {"file": "specs/good.yaml", "name": "good", "mask": "causal", "score": [], "heads": "mha"}
    assert found["specs"] == [{**expected, "head_dim": head_dim, "dtypes": ["bf16"]}]
    assert "causal" in {mask["name"] for mask in found["masks"]} and all(score["about"] for score in found["scores"])
    for part in (*found["masks"], *found["scores"]):  # a sentence, and one alone
        assert part["about"].endswith(".") and not re.search(r"\. [A-Z]", part["about"]), part
        assert part["about"] in attngen("list")
    (project / "specs" / "typo.yaml").write_text(WRONG["typo"][0])
    attngen("list", "--json", code=1)
    assert [spec["name"] for spec in json.loads(attngen.output)["specs"]] == ["good"]


def test_doctor_as_json(attngen: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    found = json.loads(attngen("doctor", "--json"))
    keys = ["attngen", "python", "platform", "torch", "triton", "numpy", "supported_pair", "gpus", "interpreter"]
    assert list(found) == [*keys, "cache", "problems"] and found["problems"] == []
    assert found["cache"] == {"folder": str(tmp_path / "modules"), "modules": 0, "bytes": 0}
    monkeypatch.setattr(cli.machine, "_installed", lambda package: "" if package == "triton" else "1.0")
    error = attngen("doctor", "--json", code=1)
    found = json.loads(attngen.output)
    assert found["triton"] is None and not found["supported_pair"] and error == f"error: {found['problems'][0]}\n"


def test_explain_as_json(project: Path, attngen: Cli) -> None:
    found = json.loads(attngen("explain", "specs/good.yaml", "--json", "-n", "1024"))
    assert found["size"] == {"batch": 1, "q_heads": 16, "kv_heads": 16, "queries": 1024, "keys": 1024}
    assert [device["device"] for device in found["devices"]] == [*DEVICES, None]
    for device in found["devices"][:-1]:
        for call in device["calls"]:
            assert call["fits"] and call["seconds_at_least"] > 0 and call["flops"] > 0 and call["hbm_bytes"] > 0
            assert all(kernel["shared_bytes"] <= kernel["shared_limit"] for kernel in call["kernels"])
    assert all(
        {"for", "class", "more_than", "at_most", "kernel", "backend", "tile"} <= set(k) for k in found["kernels"]
    )
    assert attngen("explain", "specs/good.yaml", "--json", "--theory", code=1).count("\n") == 1


def test_explain_names_hopper_kernels_and_what_does_not_fit() -> None:
    problem = Problem(1, 16, 4)
    found = summary(target("causal_gqa"), problem)
    forward = {d["device"]: d["calls"][0]["kernels"][0]["backend"] for d in found["devices"]}
    assert forward["H100"] == "hopper" and forward["A100"] == forward[None] == "triton"
    hopper = [k for k in found["kernels"] if (k["for"], k["class"], k["backend"]) == ("fwd", "sm90", "hopper")]
    assert [(k["more_than"], k["at_most"]) for k in hopper] == [(64, None)]


# ---------------------------------------------------------------------------------------------------------- explain


def test_explain_begins_with_the_answers(project: Path, attngen: Cli) -> None:
    """The first 20 lines say on each device whether it fits, how fast it is at least, and which kernel runs."""
    (project / "specs" / "x.yaml").write_text((ROOT / "specs" / "causal_gqa.yaml").read_text())
    lines = attngen("explain", "specs/x.yaml").splitlines()
    head = "\n".join(lines[:20])
    for device in DEVICES:
        assert re.search(rf"\n{device} +\w+ +forward +yes +[\d.]+ .* fwd *\n", head), head
    assert re.search(r"\nH100 sm90 .* Hopper fwd", head) and "prediction, not measured" in head and "extra MB" in head
    assert "<= j <" not in "\n".join(lines) and "FLOPs = " not in "\n".join(lines) and len(lines) <= 60
    assert all(option in "\n".join(lines[-3:]) for option in ("--kernels", "--formulas", "--loops", "--json"))


def test_the_legend_of_explain_speaks_of_rows_that_are_shown() -> None:
    """A module with split-KV kernels has decode rows, which are of one query; other NVIDIA GPUs have no figures."""
    shown = summary(target("decode_gqa"), Problem(1, 16, 4))
    text = legend(shown)
    assert "other NVIDIA: GPUs whose rates and caches are not known, so without figures; " in text
    assert "decode: one query per sequence, with a KV cache of Nk keys. " in text
    assert "decode" not in legend(summary(target("causal_gqa"), Problem(1, 16, 4)))
    assert "other NVIDIA" not in legend({**shown, "devices": shown["devices"][:-1]})


@pytest.mark.share(4)
def test_explain_shows_more_if_asked(project: Path, attngen: Cli) -> None:
    for option, text in (
        ("--loops", "@fwd full: 0 <= j < "),
        ("--formulas", "@fwd FLOPs = "),
        ("--kernels", "GB load"),
    ):
        assert text in attngen("explain", "specs/good.yaml", option)


# ---------------------------------------------------------------------------------------------------------- terminals


@pytest.mark.share(4)
@pytest.mark.parametrize("args", [["list"], ["explain", "specs/good.yaml", "--kernels"], ["build", "--all"]])
def test_tables_fit_a_terminal(project: Path, args: list[str]) -> None:
    mask = "{all_of: [{sliding_window: {left: 1023, right: 0}}, {key_padding: {lengths: true}}]}"
    (project / "specs" / "long.yaml").write_text(f"name: long\nhead_dim: {{qk: 192, v: 128}}\nmask: {mask}\n")
    text = in_terminal(*args, folder=project).rpartition("\x1b[2K")[2]  # after the progress
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text


def test_a_wide_table_goes_on_below_and_loses_nothing() -> None:
    from rich.console import Console

    table = Rows("module", "kernel", *(f"column {i}" for i in range(9)), "why", names=2, folds=("why",))
    cells = [f"{i:09d}" for i in range(9)]
    table.add_row("causal_gqa", "fwd", *cells, "it has a reason of some words")
    for width in (60, 80, 200):
        screen = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        screen.print(table)
        text = screen.export_text()
        assert max(map(len, text.splitlines())) <= width and all(cell in text for cell in cells)
        assert text.count("causal_gqa") == (1 if width == 200 else text.count("module"))
        assert {"it", "has", "a", "reason", "of", "some", "words"} <= set(text.split())


@pytest.mark.parametrize("width", [26, 34, 50])
def test_cells_fold_between_arguments_and_not_inside_numbers(width: int) -> None:
    from rich.console import Console

    mask = "sliding_window(left=1023,right=0) and key_padding(lengths=True)"
    table = Rows("spec", "mask", folds=("mask",))
    table.add_row("long", mask)
    screen = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    screen.print(table)
    lines = [line[6:].strip() for line in screen.export_text().splitlines()[1:]]
    assert len(lines) > 1 and "".join(lines).replace(" ", "").startswith(mask.replace(" ", ""))
    assert {"left=1023,", "right=0)", "lengths=True)"} <= set(re.split(r"[ (]|(?<=,)", " ".join(lines)))


@pytest.mark.share(4)
def test_long_work_shows_a_bar_in_a_terminal_and_no_control_characters_in_a_pipe(project: Path) -> None:
    (project / "specs" / "other.yaml").write_text(GOOD.replace("good", "other"))
    with (project / "out").open("w") as file:
        text = in_terminal("build", "--all", folder=project, stdout=file.fileno())
    assert "2/2" in text and "━" in text and "specs/other.yaml" in text and "00:00" in text
    assert "\x1b" not in (out := (project / "out").read_text()) and "2 modules written" in out
    command = [sys.executable, "-m", "attngen", "build", "--all"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr


def test_without_a_terminal_progress_is_a_line_for_every_tenth(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def lines(items: int, seconds: float) -> list[str]:
        with console.progress("compiling", items) as watch:
            for i in range(items):
                watch.show(f"item{i}")
                now[0] += seconds
                watch.done()
        return capsys.readouterr().err.splitlines()

    assert lines(3, 1.0) == []  # a few seconds
    assert lines(2, 9.0) == ["compiling: 1 of 2 (0:00:09 left) item0", "compiling: 2 of 2 item1"]
    slow = lines(200, 9.0)
    assert len(slow) == 10 and slow[0] == "compiling: 20 of 200 (0:27:00 left) item19"
    assert slow[-1] == "compiling: 200 of 200 item199"


def test_steps_at_the_same_time_have_lines_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with console.steps() as begin:
        reading, writing = begin("reading", 20), begin("writing", 2)
        for i in range(20):
            now[0] += 6.0
            reading.done(f"page{i}")
        now[0] += 60.0
        writing.done("page0")
    found = capsys.readouterr().err.splitlines()
    assert found[0] == "reading: 2 of 20 (0:01:48 left) page1" and found[-2:] == [
        "reading: 20 of 20 page19",
        "writing: 1 of 2 (0:03:00 left) page0",
    ]
    assert len(found) == 11


def test_help_starts_without_heavy_imports() -> None:
    code = """
import sys
from attngen.cli import main
try:
    main(["-h"])
finally:
    print([name for name in ("torch", "triton", "sympy", "numpy", "rich.progress", "pydantic") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.nightly
def test_the_demo_prints_under_40_lines() -> None:
    """They are the spec, its kernels, errors (also naive attention's), the files, and the command for the IR."""
    command = ["make", "-s", "demo", "VENV=system", f"PYTHON3={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert text.count("\n") < 40 and (ROOT / "specs" / "causal_mqa.yaml").read_text() in text
    for said in ("Hopper fwd", "over naive", "generated/causal_mqa: ", "attngen dump specs/causal_mqa.yaml"):
        assert said in text


@pytest.mark.share(8)
def test_a_brief_test_shows_the_worst_errors_alone(project: Path) -> None:
    (project / "specs" / "small.yaml").write_text("name: small\nhead_dim: 16\ndtype: fp16\nmask: causal\n")
    command = [sys.executable, "-m", "attngen", "test", "specs/small.yaml", "--brief"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("small", "at", "out", "lse", "dq", "dk", "dv", "jvp(out)", "jvp(lse)"),
        *("Errors:", "dx:", "over"),
    ]
    assert max(map(len, lines)) <= 80
