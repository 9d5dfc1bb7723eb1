"""The grids `flex`, `variants` and `mods`: their cells, compared with formulas written by hand, and the tables of their
results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attngen.bench.cases.catalog import FLEX, MEMORY_ROWS, flex, mods, variants
from attngen.bench.cases.grids import Cell
from attngen.bench.cases.problem import Problem
from attngen.bench.mods import MODS
from attngen.bench.reports import reports
from attngen.bench.results import Line, Results, read_results
from attngen.bench.run import Setup
from attngen.bench.work import listing, select
from attngen.cli import main

MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "matmul_tflops": 786.4, "copy_tb_s": 4.0}
BY_NAME = {c.spec.name.removeprefix("flex_"): c for c in flex().cells if c.n_q != MEMORY_ROWS}
Positions = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Masks of queries q and keys k, written by hand.
VISIBLE: dict[str, Positions] = {
    "window": lambda q, k: (q >= k) & (q - k < 1024),
    "documents": lambda q, k: (q >= k) & (q // 1000 == k // 1000),
    "prefix": lambda q, k: (k < 1024) | (q >= k),
    "streaming": lambda q, k: (q >= k) & ((q - k < 1024) | (k < 4)),
    "dilated": lambda q, k: (q >= k) & (q - k <= 2048) & ((q - k) % 4 == 0),
}
VISIBLE |= dict.fromkeys(("unsorted", "data"), VISIBLE["documents"])


def small(c: Cell, rows: int) -> Problem:
    return Problem(Cell(c.grid, c.spec, c.dtype, 1, c.heads, c.kv_heads, rows, rows, c.call), "cpu", Path())


@pytest.mark.parametrize("name", FLEX)
def test_masks_of_flex_equal_formulas_by_hand(name: str) -> None:
    rows, zero = 2300, torch.zeros((), dtype=torch.long)
    q, k = torch.arange(rows)[:, None], torch.arange(rows)[None]
    mask = small(BY_NAME[name], rows).mods.mask
    assert mask is not None
    assert torch.equal(mask(zero, zero, q, k).expand(rows, rows), VISIBLE.get(name, lambda q, k: q >= k)(q, k))


@pytest.mark.parametrize("name", ["softcap", "alibi", "relative"])
def test_scores_of_flex_equal_formulas_by_hand(name: str) -> None:
    rows, heads = 300, 16
    problem = small(BY_NAME[name], rows)
    q, k, h = torch.arange(rows)[:, None], torch.arange(rows)[None], torch.tensor(5)
    s = torch.randn(rows, rows, generator=torch.Generator().manual_seed(0))
    by_hand = {
        "softcap": lambda: 30 * torch.tanh(s / 30),
        "alibi": lambda: s - 2.0 ** (-8 * 6 / heads) * (q - k).abs(),
        "relative": lambda: s + problem.given["relative_bias"][5][(q - k).clamp(-128, 128) + 128],
    }[name]()
    modify = problem.mods.score
    assert modify is not None
    torch.testing.assert_close(modify(s, torch.zeros((), dtype=torch.long), h, q, k), by_hand)


def test_cells_of_flex_and_variants() -> None:
    assert len(BY_NAME) == 13 and {(c.batch, c.heads, c.kv_heads, c.n_q, c.dtype) for c in BY_NAME.values()} == {
        (2, 16, 4, 8192, "bf16")
    }
    assert {name for name, c in BY_NAME.items() if c.asked("document") == 1000} == {"documents", "unsorted", "data"}
    assert [str(c) for c in flex().cells if c.n_q == MEMORY_ROWS] == [
        "flex_documents bf16 B1 H16/4 N131072 document=1000"
    ]
    assert [str(c) for c in variants().cells][:3] == [
        "causal_mha_d128 bf16 B4 H16 N4096",
        "causal_dropout_mha_d128 bf16 B4 H16 N4096",
        "causal_dropout_mha_d128 bf16 B4 H16 N4096 dropout_p=0.1",
    ]
    assert [c.asked("share") for c in variants().cells if c.asked("share")] == [1, 2, 4, 8, 16]
    work = select([], ["variants"], None, None, "ours,flash,flex,naive", {})
    found = {row[0]: row[1:] for row in listing(work, Setup())[1]}
    assert found["causal_dropout_mha_d64 bf16 B4 H32 N4096 dropout_p=0.1"] == ["yes", "yes", "no dropout", "no dropout"]
    assert found["block_sparse_d128 bf16 B1 H16 N16384 share=4"][1] == "no mask but causal and none"


def flex_line(c: Cell, peer: str, ms: float, **figures: float) -> Line:
    found = {f"{d}_{x}": n for d in ("fwd", "bwd") for x, n in (("ms", ms), ("tflops", 100 / ms), ("spread", ms / 100))}
    return Line(
        c, peer, {**found, "visible": 0.5, "first_s": 2 * ms, "host_us": 10 * ms, "mask_ms": ms / 10, **figures}
    )


def test_the_tables_of_flex(tmp_path: Path) -> None:
    causal, documents = BY_NAME["causal"], BY_NAME["documents"]
    memory = next(c for c in flex().cells if c.n_q == MEMORY_ROWS)
    differs = dict(zip(("out_differs", "dq_differs", "dk_differs", "dv_differs"), (0.001, 0.002, 0.003, 0.004)))
    lines = [
        flex_line(causal, "ours", 1.0), flex_line(causal, "flex", 1.5, mask_eager_ms=4.0, differs=0.004, **differs),
        flex_line(causal, "cudnn", 1.2),
        flex_line(documents, "ours", 0.5, whole_fwd_ms=0.6),
        Line(documents, "flex", {}, "first call: no end within 120 s"),
        flex_line(memory, "ours", 1.0, whole_mib=4096.0, mask_mib=2.0),
    ]  # fmt: skip
    results = Results(MACHINE, lines)
    (text,) = reports(results).values()
    heading, speed, rest, large, notes = text.split("\n\n")
    assert heading == "NVIDIA H200, torch 2.11.0, triton 3.6.0; peaks: 786 TFLOP/s bf16 product, 4.00 TB/s copy"
    assert speed.splitlines()[2:] == [
        "| GQA causal | 50.0% | 1.000 (100) | 1.500 (67) | 1.50 | 1.000 (100) | 1.500 (67) | 1.50 | 1.5% |",
        "| documents of 1000 | 50.0% | 0.500 (200) | - | - | 0.500 (200) | - | - | 0.5% |",
    ]
    assert rest.splitlines()[2:] == [
        (
            "| GQA causal | 2.0 | 3.0 | 0.100 | 0.150 | 4.000 | - | 10 | 15 | 1.0e-03 | 2.0e-03 | 3.0e-03 | 4.0e-03 "
            "| - |"
        ),
        "| documents of 1000 | 1.0 | - | 0.050 | - | - | 0.600 | 5 | - | - | - | - | - | - |",
    ]
    inputs = 131072 * (2 * 16 + 2 * 4) * 128 * 2 / 2**30  # q, dO, k and v, of two bytes
    assert large.splitlines()[2:] == [f"| ours | 131072 | 4.000 | {4 - inputs:.3f} | 0.002 | 0.10 |"]
    assert notes == "- documents of 1000: flex: first call: no end within 120 s\n"
    (tmp_path / "results.json").write_text(results.text())
    assert reports(read_results(tmp_path / "results.json")) == reports(results)


@pytest.mark.share(8)
def test_the_tables_of_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(c: Cell, peer: str, fwd: float, bwd: float) -> Line:
        return Line(c, peer, {"fwd_ms": fwd, "bwd_ms": bwd, "mask_ms": 0.04})

    cells = {str(c).removeprefix("causal_").replace(" bf16 B4 H16 N4096", ""): c for c in variants().cells}
    plain, zero, drops = (cells[name] for name in ("mha_d128", "dropout_mha_d128", "dropout_mha_d128 dropout_p=0.1"))
    dense, full, quarter = (cells[f"{name} bf16 B1 H16 N16384{share}"] for name, share in (
        ("full_mha_d128", ""), ("block_sparse_d128", " share=1"), ("block_sparse_d128", " share=4")))  # fmt: skip
    lines = [line(plain, "ours", 1.0, 3.0), line(zero, "ours", 1.0, 4.0), line(zero, "flash", 2.0, 2.0)]
    lines += [line(drops, "ours", 1.5, 4.5), line(drops, "flash", 2.2, 2.6)]
    lines += [line(dense, "ours", 4.53, 13.11), line(full, "ours", 4.0, 12.0), line(quarter, "ours", 1.0, 4.0)]
    lines += [Line(quarter, "flash", {}, "no mask but causal and none")]
    results = Results(MACHINE, lines)
    (text,) = reports(results).values()
    _, dropout, blocks = text.split("\n\n")
    assert dropout.splitlines()[2:] == ["| 128 | causal | 1.25 | 1.50 | 1.12 | 1.20 | 1.10 | 1.30 | 1.20 |"]
    without, all_of_them, some = (row.split(" | ") for row in blocks.splitlines()[2:])
    assert without[:4] == ["| no blocks", "4.53", "", "13.11"]
    assert some[:6] == ["| 1/4", "1.00", "4.00", "4.00", "3.00", "40"]
    read = [[float(x.removesuffix(" |")) for x in row[6:]] for row in (all_of_them, some)]
    assert read[0][0] == pytest.approx(34.5, abs=0.1) and [a / b for a, b in zip(*read)] == pytest.approx(
        [4, 4, 4], rel=0.05
    )
    monkeypatch.chdir(tmp_path)
    Path("results.json").write_text(results.text())
    with pytest.raises(SystemExit):
        main(["bench", "--from", "results.json"])
    assert text in capsys.readouterr().out and Path("bench/variants.md").read_text() == text
    assert not list(Path("bench").glob("*.svg"))


@pytest.mark.share(16)
def test_the_table_of_mods(tmp_path: Path) -> None:
    """Every function of mods/ is a cell. The table has times, speedups and the geometric means of the speedups."""
    cells = mods().cells
    assert [c.spec.name.removeprefix("mod_") for c in cells] == list(MODS)
    assert all(
        (c.batch, c.heads, c.kv_heads, c.n_q, c.n_kv) == MODS[c.spec.name.removeprefix("mod_")].bench.sizes
        for c in cells
    )
    assert {(c.dtype, c.spec.head_dim.qk, c.spec.head_dim.v) for c in cells} == {("bf16", 128, 128)}
    times = {
        "causal": ((1.0, 2.0), (2.0, 8.0)),
        "natten": ((2.0, 4.0), (1.0, 1.0)),
        "graphormer_edge": ((3.0, 5.0), None),
    }
    lines = []
    for c in cells:
        for peer, ms in zip(("ours", "flex"), times.get(c.spec.name.removeprefix("mod_"), ())):
            figures = (
                {} if ms is None else {"fwd_ms": ms[0], "bwd_ms": ms[1]} | ({"visible": 0.5} if peer == "ours" else {})
            )
            lines.append(Line(c, peer, figures, "" if ms else "first call: does not compile"))
    made = reports(Results(MACHINE, lines))["mods.md"].splitlines()
    assert made[4:8] == [
        "| causal | 50.0% | 1.000 | 2.000 | 2.000 | 8.000 | 2.00 | 4.00 | 3.33 |",
        "| natten | 50.0% | 2.000 | 1.000 | 4.000 | 1.000 | 0.50 | 0.25 | 0.33 |",
        "| graphormer_edge | 50.0% | 3.000 | - | 5.000 | - | - | - | - |",
        "| geometric mean |  |  |  |  |  | 1.00 | 1.00 | 1.05 |",
    ]
    assert made[-1].startswith("- mod_graphormer_edge") and made[-1].endswith("flex: first call: does not compile")
