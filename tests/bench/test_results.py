"""Results of benchmarks as JSON, CSV, tables and plots, comparisons with an older run, and the command that shows
them."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from attngen.bench import plots
from attngen.bench.cases.catalog import paper
from attngen.bench.cases.grids import cell
from attngen.bench.figures import FORMS, spread, theme
from attngen.bench.results import (
    FIGURES,
    Line,
    Results,
    failures,
    host_rows,
    moves,
    other_machine,
    rates,
    ratios,
    read_results,
    rows,
    sentence,
)
from attngen.bench.run import Setup
from attngen.bench.work import select
from attngen.cli import main
from attngen.errors import AttngenError
from attngen.spec import make_spec
from tests.helpers import ROOT

MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "matmul_tflops": 800.0, "copy_tb_s": 4.0}
CELLS = paper().cells[:3]
COLOURS_AND_IDS = r"#[0-9a-f]{6}\b|\b[mp][0-9a-f]{10}\b"
PLOTS = ["paper-tflops.svg", "paper-tflops-dark.svg", "paper-memory.svg", "paper-memory-dark.svg"]


def line(at: int, peer: str, fwd: float | None, bwd: float | None = None, spread: float = 0.01, why: str = "") -> Line:
    figures = {}
    for d, ms in (("fwd", fwd), ("bwd", bwd)):
        if ms is not None:
            figures |= {f"{d}_ms": ms, f"{d}_spread": spread} | rates(CELLS[at], MACHINE, 1000, 0, d, ms)
    return Line(
        CELLS[at],
        peer,
        {**figures, "allocated_mib": 100.0 + at, "host_us": 20.0},
        why,
        "a remark" if peer == "flash" else "",
    )


def results(*lines: Line) -> Results:
    return Results(dict(MACHINE), list(lines))


RUN = results(
    line(0, "ours", 1.0, 2.5),
    line(0, "flash", 2.0, 2.5),
    line(0, "naive", None, why='first call: "out of\nmemory"'),
    line(1, "ours", 4.0, 9.0),
    line(1, "flash", 2.0, 18.0),
)


def test_results_are_read_back_from_json(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(RUN.text())
    back = read_results(path)
    assert back.text() == RUN.text() and back.machine == RUN.machine
    assert [x.key for x in back.lines] == [x.key for x in RUN.lines]
    assert [(x.figures, x.why, x.note) for x in back.lines] == [(x.figures, x.why, x.note) for x in RUN.lines]
    assert len([x for x in RUN.text().splitlines() if '"peer": ' in x]) == len(RUN.lines)  # one per line
    assert moves(back, RUN) == []


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"specs": {}, "lines": []}', RUN.text().replace('"spec": "causal_mha_d64"', '"spec": "x"')],
)
def test_a_file_without_results_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(AttngenError, match=r"x.json: not the results of `attngen bench`; expected its results.json"):
        read_results(path)


def test_csv_has_a_row_for_each_line() -> None:
    found = list(csv.DictReader(io.StringIO(RUN.csv())))
    assert [x["peer"] for x in found] == ["ours", "flash", "naive", "ours", "flash"]
    assert float(found[0]["fwd_ms"]) == 1.0 and found[2]["fwd_ms"] == "" and found[2]["why"].startswith("first call")
    assert set(FIGURES) < set(found[0])


def test_host_times_have_a_table_where_they_were_measured() -> None:
    assert list(host_rows(RUN)) == []
    figures = {"host_us": 30.0, "host_nograd_us": 20.04, "host_graph_us": 4.0}
    asked = [replace(x, figures=figures) if x.why == "" else x for x in RUN.lines]
    assert list(host_rows(replace(RUN, lines=asked)))[:2] == [
        (str(CELLS[0]), "ours", "30.0", "20.0", "-", "-", "4.0"),
        ("", "flash", "30.0", "20.0", "-", "-", "4.0"),
    ]


def test_rates_equal_formulas_by_hand() -> None:
    spec = make_spec({"name": "x", "heads": {"sharing": "mqa"}, "head_dim": {"qk": 192, "v": 128}})
    c = cell("", spec, 100, 200, batch=2, heads=8)
    pairs = 10**9  # compute-bound
    read = 2 * 2 * 200 * 320  # bytes of K and V
    assert rates(c, MACHINE, pairs, read, "fwd", 2.0) == {"fwd_tflops": 320.0, "fwd_roof": 0.4}
    assert rates(c, MACHINE, pairs, read, "bwd", 2.0) == {"bwd_tflops": 800.0, "bwd_roof": 1.0}
    assert rates(c, MACHINE, pairs, read, "both", 2.8) == {"both_tflops": 800.0, "both_roof": 1.0}
    # Memory-bound: the forward moves q, k, v, out and the LSE; the backward moves these, dO and three gradients.
    rows_q, rows_kv = 2 * 8 * 100, 2 * 200
    forward = 2 * (rows_q + rows_kv) * 320 + 4 * rows_q
    assert rates(c, MACHINE, 1, read, "fwd", 1e-3)["fwd_roof"] == pytest.approx(forward / 4e12 / 1e-6, abs=1e-4)
    backward = 2 * (rows_q * (192 + 128 + 128 + 192) + rows_kv * 2 * (192 + 128)) + 4 * rows_q
    assert rates(c, MACHINE, 1, read, "bwd", 1e-3)["bwd_roof"] == pytest.approx(backward / 4e12 / 1e-6, abs=1e-4)


def test_the_table_and_the_ratios() -> None:
    found = list(rows(RUN))
    assert found[0][:3] == (str(CELLS[0]), "ours", "1.000") and found[1][:2] == ("", "flash")
    assert found[2][2:5] == ("-", "-", "-") and found[2][-1].startswith("first call")
    (text,) = ratios(RUN)  # naive has no figures
    assert text == (
        f"ours over flash, 2 cells: forward 1.00x on average, 0.50x at least ({CELLS[1]}); "
        f"backward 1.41x on average, 1.00x at least ({CELLS[0]})"
    )


@pytest.mark.parametrize(
    ("before", "after", "spread", "moved"),
    [
        (1.0, 1.019, 0.001, ""),  # below the floor
        (1.0, 1.03, 0.001, "+3.0%"),
        (1.0, 0.95, 0.001, "-5.0%"),
        (1.0, 1.05, 0.03, ""),  # within the sum of both spreads
        (1.0, 1.07, 0.03, "+7.0%"),
        (1.0, None, 0.01, "1.000 ms before, no figure now"),
        (None, 1.0, 0.01, "no figure before, 1.000 ms now"),
        (None, None, 0.01, ""),
    ],
)
@pytest.mark.parametrize("peer", ["ours", "flash"])
def test_figures_that_changed_by_more_than_noise(
    before: float | None, after: float | None, spread: float, moved: str, peer: str
) -> None:
    found = moves(
        results(line(0, peer, after, spread=spread)), results(line(0, peer, before, spread=spread), line(1, peer, 9.0))
    )
    assert len(found) == bool(moved) and all(moved in str(move) for move in found)
    slower = peer == "ours" and bool(moved) and (after is None or before is not None and after > before)
    assert bool(failures(found)) == slower


def test_a_comparison_names_the_other_machine() -> None:
    other = Results({**MACHINE, "gpu": "NVIDIA B200", "triton": "3.9.0"})
    assert other_machine(other, RUN) == "gpu NVIDIA H200 then, NVIDIA B200 now; triton 3.6.0 then, 3.9.0 now"
    assert other_machine(RUN, RUN) == ""


def test_the_cells_of_an_older_run_are_measured_again(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(RUN.text())
    old = read_results(tmp_path / "old.json")
    work = select([], [], old, None, None, {})
    assert [(str(c), peers) for c, peers in work.items()] == [
        (str(CELLS[0]), ("ours", "flash", "naive")),
        (str(CELLS[1]), ("ours", "flash")),
    ]
    assert [c.spec.hash() for c in work] == [c.spec.hash() for c in CELLS[:2]]


def test_error_sentences_have_no_folders() -> None:
    assert sentence("\n  /home/me/x/y.cu(3): a / b is not /tmp/z\nmore") == "y.cu(3): a / b is not z"
    assert len(sentence("x" * 500)) == 120


# ---------------------------------------------------------------------------------------------- plots


def test_plots_are_the_same_to_the_byte() -> None:
    if not plots.available():
        pytest.fail("matplotlib is missing; it comes with the dev extra")
    found = plots.plots(RUN)
    assert list(found) == PLOTS and found == plots.plots(RUN)
    for text in found.values():
        assert text.startswith("<?xml") and "<dc:date>" not in text and str(ROOT) not in text
    assert ">causal</text>" not in found["paper-tflops.svg"], "what all panels share is in the heading"
    assert ">TFLOP/s over N: causal, mha, D=64, H=16, fp16</text>" in found["paper-tflops.svg"]
    assert ">attngen</text>" in found["paper-tflops.svg"] and ">FA2</text>" in found["paper-memory.svg"]


def test_the_dark_form_differs_in_colours_only() -> None:
    found = plots.plots(RUN)
    for name in PLOTS[::2]:
        light, dark = (re.sub(COLOURS_AND_IDS, "", found[n]) for n in (name, name.replace(".svg", "-dark.svg")))
        assert light == dark and found[name] != found[name.replace(".svg", "-dark.svg")]
    assert theme("dark").colours.keys() == theme("light").colours.keys() and theme("dark")["page"] == "#0f1317"


@pytest.mark.parametrize("form", FORMS)
def test_labels_are_legible_on_the_page(form: str) -> None:
    """The contrast that WCAG 2 asks of small text."""

    def light(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))

    page = light(theme(form)["page"])
    for colour in {style[1] for style in plots.STYLES.values()} | {"text"}:
        high, low = sorted((page, light(theme(form)[colour])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, colour


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([10, 50], [10, 50]),
        ([10, 12], [6, 16]),
        ([10, 12, 17, 80], [3, 13, 23, 80]),
        ([1, 2], [0, 10]),
        ([98, 99, 99], [80, 90, 100]),
        ([88, 99, 99], [80, 90, 100]),
        ([], []),
    ],
)
def test_labels_are_moved_apart(places: list[float], expected: list[float]) -> None:
    assert spread(places, 10, 0, 100) == expected


# ---------------------------------------------------------------------------------------------- the command


def command(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *args])
    return (caught.value.code or 0), *capsys.readouterr()


def test_a_run_is_shown_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.json").write_text(RUN.text())
    code, output, _ = command(capsys, "--from", "old.json", "--compare", "old.json", "--out", "bench")
    assert (
        code == 0
        and "peaks: 800 TFLOP/s bf16 matrix product, 4.00 TB/s copy" in output
        and output.endswith("0 times moved; 5 lines in both runs\n")
    )
    assert {p.name for p in Path("bench").iterdir()} == {
        "results.json",
        "results.csv",
        *PLOTS,
    }
    assert Path("bench/results.json").read_text() == RUN.text()
    slow = replace(
        RUN, lines=[line(0, "ours", 1.5, 2.5), line(0, "flash", 9.0, 2.5)], machine={**MACHINE, "torch": "2.15.0"}
    )
    Path("slow.json").write_text(slow.text())
    monkeypatch.setattr(plots, "available", lambda: False)
    code, output, errors = command(capsys, "--from", "slow.json", "--compare", "old.json", "--out", "b2")
    assert code == 1 and "another machine: torch 2.11.0 then, 2.15.0 now" in output and "2 times moved" in output
    assert errors == (
        f"error: slower than in old.json: {CELLS[0]} ours fwd: 1.000 ms before, 1.500 ms now: +50.0% (spread 2.0%)\n"
    )
    assert "no plots: matplotlib is not installed; `pip install attngen[plot]` brings it" in output
    assert {p.name for p in Path("b2").iterdir()} == {"results.json", "results.csv"}


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (
            ["--from", "x.json", "--grid", "fa3"],
            "--from shows a run as it is; leave out SPEC, --grid, --only and --list",
        ),
        (["--from", "x.json"], "x.json: No such file or directory"),
        (
            [],
            (
                "nothing to measure; expected `attngen bench specs/NAME.yaml`, `attngen bench --grid fa3` or "
                "--compare FILE"
            ),
        ),
    ],
)
def test_a_wrong_command_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(capsys, *args)[0::2] == (1, f"error: {error}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.share(8)
def test_a_run_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock is that of tests/bench/fakes.py, and our kernels run in Triton's interpreter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("attngen.bench.run.Setup", partial(Setup, device="cpu", clock="tests.bench.fakes"))
    (tmp_path / "small.yaml").write_text("name: small\nhead_dim: 16\ndtype: fp16\nmask: {all_of: [causal, document]}\n")
    code, output, errors = command(
        capsys,
        "small.yaml",
        "--n",
        "48",
        "--batch",
        "1",
        "--heads",
        "2",
        "--peers",
        "naive,ours,flash",
        "--rounds",
        "2",
    )
    assert code == 0, errors
    assert re.search(
        (
            r"^\[\d+ s\] 1/1 small fp16 B1 H2 N48: ours \d+/\d+; flash -/- \(no mask but causal and none\); naive "
            r"\d+/\d+ TFLOP/s$"
        ),
        errors,
        re.M,
    )
    found = read_results(tmp_path / "bench" / "results.json")
    assert [x.peer for x in found.lines] == ["ours", "flash", "naive"] and not found.failed()
    assert 0 < found.lines[2].figures["differs"] < 1e-2
    assert "bench/specs-tflops.svg" in output
