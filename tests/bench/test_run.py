"""Benchmark runs on the CPU, with real child processes and their protocol: a peer that fails loses only its own
figures."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from attngen.bench.cases.functions import cell_of
from attngen.bench.cases.grids import cell
from attngen.bench.mods import MODS
from attngen.bench.results import CACHE, FIGURES, HOST, MASKS, Line, Results, read_results
from attngen.bench.run import Setup, Work, progress, run
from attngen.spec import make_spec
from tests.helpers import ROOT

SETUP = Setup(rounds=3, jobs=2, limit_s=4.0, device="cpu", peers_from="tests.bench.fakes", clock="tests.bench.fakes")
REAL = "attngen.bench.peers"
DIFFERENCES = [name for name in FIGURES if name.endswith("differs")]
SPEC = make_spec({"name": "small", "heads": {"sharing": "gqa"}, "head_dim": 16, "dtype": "fp32", "mask": "causal"})


def measured(cells: Work, folder: Path, setup: Setup = SETUP) -> tuple[Results, list[str]]:
    results = Results({"matmul_tflops": 0.5, "copy_tb_s": 0.5})
    messages: list[str] = []
    for lines in run(cells, setup, folder, results, messages.append):
        assert "TFLOP/s" in progress(lines)
    return results, messages


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        first, second, third = (cell("specs", SPEC, n, n, batch=2, heads=4) for n in (24, 32, 40))
        work = {
            first: ("ours", "fails", "wrong", "dies", "late", "refuses", "math"),
            second: ("ours", "hangs"),
            third: ("refuses",),
        }
        found, messages = measured(work, folder)
    assert messages[0] == "generating modules" and "measuring small fp32 B2 H4/1 N24" in messages
    assert sorted(p.name for p in folder.iterdir()) == ["small"]  # files of the processes are removed
    return found


def line(results: Results, peer: str, n: int = 24) -> Line:
    (found,) = [x for x in results.lines if x.peer == peer and x.cell.n_q == n]
    return found


@pytest.mark.share(16)
def test_a_spec_without_a_backward_has_figures_of_the_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient inputs are passed like other inputs, and its peers run without gradients, too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    score = {"expr": "s / t[h]", "params": {"t": {"tensor": ["H"], "grad": True}}}
    spec = make_spec({"name": "forward", "head_dim": 16, "dtype": "fp32", "score": score, "backward": False})
    found, _ = measured(
        {cell("specs", spec, 24, 24, batch=2, heads=2): ("ours", "naive")}, tmp_path, replace(SETUP, peers_from=REAL)
    )
    for x in found.lines:
        assert x.why == "" and {"fwd_ms", "allocated_mib", "first_fwd_s"} <= set(x.figures)
        assert set(x.figures).isdisjoint(("bwd_ms", "both_ms", "first_s", "dq_differs", "learned_differs"))
    assert line(found, "naive").figures["out_differs"] < 1e-5


@pytest.mark.share(8)
def test_lines_come_in_order(results: Results) -> None:
    assert [(x.cell.n_q, x.peer) for x in results.lines] == [
        *((24, peer) for peer in ("ours", "fails", "wrong", "dies", "late", "refuses", "math")),
        *((32, peer) for peer in ("ours", "hangs")),
        (40, "refuses"),
    ]


@pytest.mark.share(8)
def test_a_peer_that_works_has_every_figure(results: Results) -> None:
    for n in (24, 32):
        ours = line(results, "ours", n)
        assert set(ours.figures) == set(FIGURES) - {*DIFFERENCES, *HOST[1:], *MASKS, *CACHE} and ours.why == ""
        assert ours.figures["visible"] == pytest.approx((n + 1) / (2 * n), rel=1e-4)
        assert (ours.figures["fwd_ms"], ours.figures["allocated_mib"], ours.figures["reserved_mib"]) == (1.51, 3.0, 4.0)
        assert ours.figures["fwd_spread"] == pytest.approx(0.02 / 1.51, rel=0.05)
        pairs = 2 * 4 * n * (n + 1) / 2
        # At 0.5 TFLOP/s and 0.5 TB/s so small a problem is memory-bound; elements have 4 bytes.
        moved = 4 * 2 * (4 + 1) * n * 2 * 16 + 4 * 2 * 4 * n
        assert ours.figures["fwd_tflops"] == pytest.approx(4 * 16 * pairs / 1.51e9, abs=0.01)
        assert ours.figures["fwd_roof"] == pytest.approx(max(4 * 16 * pairs, moved) / 0.5e9 / 1.51, abs=1e-4)
    found = line(results, "math")
    assert max(found.figures[name] for name in DIFFERENCES[:-1]) == found.figures["differs"] < 1e-5 and found.why == ""
    assert (
        DIFFERENCES[-1] == "learned_differs" and DIFFERENCES[-1] not in found.figures
    )  # this spec has no gradient inputs


@pytest.mark.share(8)
def test_a_peer_that_raises_has_no_figures(results: Results) -> None:
    fails = line(results, "fails")
    assert (fails.figures, fails.why) == ({}, "first call: ValueError: x.cu: no kernel image")


@pytest.mark.share(8)
def test_wrong_results_are_reported(results: Results) -> None:
    wrong = line(results, "wrong")
    assert wrong.why.startswith("out differs from that of ours by 1.0e+00") and wrong.note == "doubled"
    assert wrong in results.failed() and line(results, "math") not in results.failed()


@pytest.mark.share(8)
def test_a_peer_that_aborts_while_it_is_timed_has_no_figures(results: Results) -> None:
    dies = line(results, "dies")
    assert (dies.figures, dies.why) == ({}, "fwd: its process ended by SIGABRT")


@pytest.mark.share(8)
def test_a_peer_that_hangs_has_no_figures(results: Results) -> None:
    hangs = line(results, "hangs", 32)
    assert (hangs.figures, hangs.why) == ({}, "first call: no end within 4 s")


@pytest.mark.share(8)
def test_a_backward_that_runs_out_of_memory_leaves_the_figures_of_the_forward(results: Results) -> None:
    late = line(results, "late")
    assert (
        {"fwd_ms", "host_us", "first_s"} < set(late.figures)
        and "bwd_ms" not in late.figures
        and "allocated_mib" not in late.figures
    )
    assert late.why == "memory: out of memory"


@pytest.mark.share(8)
def test_a_peer_that_cannot_be_compiled_or_captured_lacks_those_host_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    work = {cell("specs", SPEC, 24, 24, batch=2, heads=4): ("ours", "awkward")}
    results, _ = measured(work, tmp_path, replace(SETUP, limit_s=60.0, host=True))
    ours, awkward = results.lines
    assert set(ours.figures) == set(FIGURES) - {*DIFFERENCES, *MASKS, *CACHE} and ours.why == ""
    assert set(awkward.figures) == set(FIGURES) - {
        "learned_differs",
        *MASKS,
        *CACHE,
        "host_compiled_us",
        "host_compiled_nograd_us",
        "host_graph_us",
    }
    compiled, without, graph = awkward.why.split("; ")
    assert compiled.startswith("host time compiled: Unsupported: ") and without.startswith(
        "host time compiled, without gradients: "
    )
    assert graph == "host time in a CUDA graph: operation not permitted when stream is capturing"


@pytest.mark.share(8)
def test_a_cell_that_a_peer_refuses_is_not_run(results: Results) -> None:
    for n in (24, 40):
        assert (line(results, "refuses", n).figures, line(results, "refuses", n).why) == ({}, "not today")


@pytest.mark.share(16)
@pytest.mark.parametrize("grid", ["specs", "flex"])
def test_the_preparation_of_masks_is_measured_on_request(
    grid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--masks` requests it, and so do grids whose tables show it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    work = {cell(grid, SPEC, 24, 24, batch=2, heads=4): ("math", "prepares")}
    results, _ = measured(work, tmp_path, replace(SETUP, limit_s=60.0, masks=grid == "specs"))
    math, prepares = results.lines
    assert not set(math.figures) & set(MASKS)  # it prepares nothing
    assert set(prepares.figures) & set(MASKS) == set(MASKS) - {"mask_eager_ms"}
    assert prepares.why == "preparing the mask: no eager mask here"
    assert {name: prepares.figures[name] for name in MASKS if name in prepares.figures} == {
        "mask_ms": 0.25, "mask_mib": 3.0, "whole_fwd_ms": 1.51, "whole_fwd_spread": 0.013, "whole_mib": 3.0,
    }  # fmt: skip


@pytest.mark.share(8)
def test_a_cell_sets_options_of_its_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our results agree with those of a peer that reads the same inputs; with dropout nothing is compared."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    below = {"head_dim": 16, "dtype": "fp32", "heads": {"sharing": "gqa"}}
    ids = make_spec({"name": "ids", **below, "mask": {"all_of": ["causal", "document"]}})
    blocks = make_spec({"name": "blocks", **below, "mask": {"block_sparse": {"block": 16}}})
    drops = make_spec({"name": "drops", **below, "mask": "none", "dropout": True})
    cells = [
        cell("specs", ids, 24, 24, batch=1, heads=2, call={"document": 10}),
        cell("specs", blocks, 32, 32, batch=1, heads=2, call={"share": 2}),
        cell("specs", drops, 8, 8, batch=1, heads=2, call={"dropout_p": 0.5}),
    ]
    results, _ = measured(
        dict.fromkeys(cells, ("ours", "flash", "naive")),
        tmp_path,
        replace(SETUP, rounds=1, limit_s=60.0, peers_from=REAL),
    )
    found = {(x.cell.spec.name, x.peer): x for x in results.lines}
    assert found["ids", "ours"].figures["visible"] == pytest.approx((2 * 55 + 10) / 24**2, rel=1e-3)
    assert found["blocks", "ours"].figures["visible"] == 0.5
    for name in ("ids", "blocks"):
        assert found[name, "naive"].figures["differs"] < 1e-5 and found[name, "naive"].why == ""
    assert found["drops", "naive"].why == "no dropout" and "differs" not in found["drops", "ours"].figures


@pytest.mark.share(16)
def test_functions_for_flex_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`attngen.flex_attention` agrees with naive attention under the oracle, for a mask that reads data and for a score
    with a gradient input."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = ("document", "graphormer_spatial")
    cells = [cell_of("mods", MODS[name], MODS[name].tests[-1]) for name in names]
    setup = replace(SETUP, peers_from=REAL, limit_s=120.0)
    found, _ = measured(dict.fromkeys(cells, ("ours", "naive")), tmp_path, setup)
    assert [x.cell.spec.name for x in found.lines] == [f"mod_{name}" for name in names for _ in range(2)]
    for x in found.lines:
        assert x.why == "" and {"fwd_ms", "bwd_ms", "both_ms"} <= set(x.figures)
        sizes = MODS[x.cell.spec.name.removeprefix("mod_")].tests[-1].sizes
        assert (x.cell.batch, x.cell.heads, x.cell.kv_heads, x.cell.n_q, x.cell.n_kv) == sizes
    assert [("learned_differs" in x.figures) for x in found.lines if x.peer == "naive"] == [False, True]
    assert 0 < found.lines[0].figures["visible"] < 1 and found.lines[-1].figures["visible"] == 1.0
    file = tmp_path / "results.json"
    file.write_text(Results({"gpu": "none", "torch": "2", "triton": "3", **found.machine}, found.lines).text())
    assert [x.key for x in read_results(file).lines] == [x.key for x in found.lines]
