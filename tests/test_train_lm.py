"""The training study in examples/train_lm.py: its runs, the page of their results, and sentences for wrong options."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers import ROOT

SIZES = {
    "layers": 2,
    "d-model": 32,
    "heads": 2,
    "seq": 16,
    "batch": 1,
    "vocabulary": 300,
    "epoch-tokens": 16,
    "val-tokens": 16,
}
SMALL = ["--device", "cpu", *(word for name, size in SIZES.items() for word in (f"--{name}", str(size)))]
EXACT = """
import torch
from torch.nn import functional as F

MASK, SHARING, HEAD_DIM_QK, HEAD_DIM_V, DTYPES = "causal", "mha", 64, 64, (torch.bfloat16,)


def attention(q, k, v, *, scale=None, return_lse=False):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""
DROPPING = EXACT.replace("return_lse=False", "return_lse=False, dropout_p=0.0, seed=None").replace(
    "k, v, is", "k, v, None, dropout_p, is"
)


def train(*options: object) -> str:
    """Return the output of a study. It has its own process, because it sets Triton's interpreter, and one thread,
    because its tensors are tiny."""
    command = [sys.executable, str(ROOT / "examples" / "train_lm.py"), *SMALL, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def examples() -> tuple[ModuleType, ModuleType]:
    """Import train_lm.py and lm_page.py as scripts do. The functions that tests call here import no Triton."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module("train_lm"), importlib.import_module("lm_page")
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of twenty texts, each with its own word, and a file that is not text."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(20):
        (folder / f"{i:02}.txt").write_text(f"the word of this file is word{i}, and it says word{i} again.\n" * 4)
    (folder / "picture.png").write_bytes(b"\0" * 100)
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, str]:
    """Return the folder and the output of a study of naive attention, SDPA and a module, with two seeds."""
    out = tmp_path_factory.mktemp("out")
    options = ["--attention", "naive", "sdpa", "causal_mqa", "--seeds", "0", "1", "--lr", "0.003", "--speed", "1x16"]
    return out, train(*options, "--data", data, "--out", out)


@pytest.mark.share(8)
def test_a_module_learns_as_naive_attention_does(study: tuple[Path, str]) -> None:
    out, printed = study
    results = json.loads((out / "results.json").read_text())
    curves = {(run["attention"], run["seed"]): run["perplexity"] for run in results["runs"]}
    assert len(curves) == 6
    for (_, seed), curve in curves.items():
        assert curve == pytest.approx(curves["naive", seed], rel=1e-2)
        assert 600 > curve[0] > curve[1] > curve[2] > 1 and len(curve) == 3
    assert printed.count("epoch 2   perplexity") == 6 and "causal_mqa, dropout 0: perplexity" in printed
    assert [(r["attention"], r["way"]) for r in results["speed"]] == [
        (name, way) for way in ("kept", "checkpointed") for name in ("naive", "sdpa", "causal_mqa")
    ]
    rows = list(csv.reader((out / "curves.csv").open()))
    assert rows[0] == ["attention", "dropout", "seed", "epoch", "perplexity"] and len(rows) == 1 + 6 * 3
    assert float(rows[3][-1]) == curves["naive", 0][2]


@pytest.mark.share(32)
def test_the_page_says_what_the_results_say(
    examples: tuple[ModuleType, ModuleType], study: tuple[Path, str], tmp_path: Path
) -> None:
    train_lm, lm_page = examples
    pages = [tmp_path / "a" / "page.md", tmp_path / "b" / "page.md"]
    for page in pages:
        page.parent.mkdir()
        train_lm.main(["--report", str(page), "--from", str(study[0])])
    text = pages[0].read_text()
    results = lm_page.load([study[0]])
    ours = next(v for v in lm_page.verdicts(results["runs"]) if v.attention == "causal_mqa")
    assert (
        f"| 0 | **causal_mqa** | {sum(ours.ours) / 2:.2f} | {sum(ours.naive) / 2:.2f} | {ours.difference:+.2f} " in text
    )
    assert (
        "| 1 x 16 | 0 | causal_mqa | " in text
        and "(page.svg)" in text
        and max(map(len, text.split("\n|")[0].splitlines())) <= 120
    )
    first, second = ({file.name: file.read_bytes() for file in page.parent.iterdir()} for page in pages)
    assert first == second and first.keys() == {"page.md", "page.svg", "page-dark.svg", "page.json"}
    assert b">causal_mqa<" in first["page.svg"]
    drawn = lm_page.plots(json.loads(first["page.json"]), "page")
    assert {name: svg.encode() for name, svg in drawn.items()} == {n: t for n, t in first.items() if n in drawn}

    merged = lm_page.load([study[0], study[0]])
    assert len(merged["runs"]) == 12 and len(merged["speed"]) == 12
    other = tmp_path / "results.json"
    other.write_text(json.dumps({**results, "settings": {**results["settings"], "lr": 1.0}}))
    with pytest.raises(SystemExit, match="its settings are not those of"):
        lm_page.load([study[0], tmp_path])


@pytest.mark.nightly
def test_a_module_on_two_ranks_learns_as_naive_attention_does(data: Path, tmp_path: Path) -> None:
    """Sequences of 80 tokens lie in two chunks; losses and gradients are those of one process, so the curves agree."""
    script = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "examples" / "train_lm.py"), *SMALL]
    sizes = ["--seq", "80", "--epoch-tokens", "80", "--val-tokens", "80", "--heads", "2", "--lr", "0.003"]
    names = ["naive", "causal_mqa", "causal_dropout_mqa"]
    options = ["--context-parallel", "2", "--attention", *names, "--data", str(data), "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *script, *sizes, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    curves = {run["attention"]: run["perplexity"] for run in results["runs"]}
    assert [*curves] == names and results["settings"]["context_parallel"] == 2
    for curve in curves.values():
        assert curve == pytest.approx(curves["naive"], rel=1e-2) and curve[0] > curve[1] > curve[2]
    assert done.stdout.count("epoch 2   perplexity") == 3  # one rank prints


def test_without_a_plotting_library_the_report_says_so(
    examples: tuple[ModuleType, ModuleType], study: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="--report: the plot needs matplotlib; `pip install matplotlib`"):
        examples[0].main(["--report", str(tmp_path / "page.md"), "--from", str(study[0])])
    assert list(tmp_path.iterdir()) == []


def test_the_verdict_compares_with_the_spread_of_naive_attention(examples: tuple[ModuleType, ModuleType]) -> None:
    _, lm_page = examples
    naive = (70.0, 70.5, 71.0)
    assert lm_page.Verdict("ours", 0.0, (71.4, 71.5, 71.5), naive).agrees
    off = lm_page.Verdict("ours", 0.0, (73.0, 73.33, 73.5), naive)
    assert not off.agrees and off.sentence().endswith(
        ", naive's 70.50, +2.78; naive's 3 seeds spread over 1.00: DIFFERS"
    )
    assert not lm_page.Verdict("ours", 0.0, (float("nan"),) * 3, naive).agrees
    assert lm_page.false_alarm(3) == pytest.approx(0.145, abs=3e-3)
    runs = [{"attention": a, "dropout": 0.0, "seed": 0, "perplexity": [9.0]} for a in ("naive", "ours")]
    assert lm_page.verdicts(runs) == []  # a single seed has no spread


def test_validation_text_is_held_out(examples: tuple[ModuleType, ModuleType], data: Path, tmp_path: Path) -> None:
    train_lm, _ = examples
    text = train_lm.read_text(data, 256)  # a vocabulary of bytes only
    train, held = bytes(text.train.tolist()), bytes(text.held.tolist())
    files = [f.read_bytes() for f in sorted(data.glob("*.txt"))]
    assert held == files[9] + files[19] and train == b"".join(files[:9] + files[10:19])
    words = train_lm.read_text(data, 1000)
    assert words.train.max() < 1000 and len(words.train) < len(train)
    # word9 and word19 are spelt in pieces, because training never saw them.
    assert len(words.held) / len(held) > len(words.train) / len(train)
    single = tmp_path / "one.txt"
    single.write_bytes(bytes(range(100)))
    assert train_lm.read_text(single, 256).held.tolist() == list(range(90, 100))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make folders of two modules in eager PyTorch, one with dropout and one without."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as main does; pytest restores the environment
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, source in (("exact_module", EXACT), ("dropping_module", DROPPING)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
    return tmp_path


@pytest.mark.share(16)
def test_dropout_trains_and_checkpointing_changes_nothing(data: Path, modules: Path) -> None:
    runs = []
    for more in ([], ["--checkpoint"]):
        options = [
            "--attention",
            "naive",
            modules / "dropping_module",
            "--dropout",
            0,
            0.5,
            "--lr",
            0.01,
            "--data",
            data,
        ]
        train(*options, "--out", modules / "out", *more)
        results = json.loads((modules / "out" / "results.json").read_text())
        runs.append({(r["attention"], r["dropout"]): r["perplexity"][-1] for r in results["runs"]})
    assert runs[0] == runs[1] and len(runs[0]) == 4
    assert runs[0]["naive", 0.0] == pytest.approx(runs[0]["dropping_module", 0.0], rel=1e-2)
    for name in ("naive", "dropping_module"):
        assert runs[0][name, 0.0] != runs[0][name, 0.5]


def test_a_spent_budget_starts_nothing(
    examples: tuple[ModuleType, ModuleType], data: Path, modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples[0].main([*SMALL, "--data", str(data), "--attention", "naive", "--seeds", "0", "1", "--budget", "1e-9"])
    assert "2 of 2 runs and measurements left out: --budget 1e-09" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, error",
    [
        (
            "--attention nosuch",
            "--attention nosuch: expected `naive`, `sdpa`, a module's folder, or one in generated/: ",
        ),
        ("--attention naive --data /nosuch", r"--data /nosuch: cannot be read \(No such file or directory\)"),
        ("--attention naive --data MODULES", "--data .*: no file with one of .md, .py, .rst, .txt below it"),
        ("--attention naive --data DATA --seq 9999", "tokens for training; expected 10000 or more, for --seq"),
        ("--attention naive --data DATA --speed 1x9999", "tokens for training; expected 10000 or more, for --speed"),
        (
            "--attention MODULES/exact_module --dropout 0.1",
            "--dropout 0.1: exact_module was built without dropout; its spec needs",
        ),
        ("--report page.md --from /nosuch", "--from /nosuch: no results.json that can be read"),
    ],
)
def test_wrong_options_are_one_sentence(
    examples: tuple[ModuleType, ModuleType], data: Path, modules: Path, options: str, error: str
) -> None:
    if options.endswith("MODULES"):
        (modules / "empty").mkdir()
        options = f"{options}/empty"
    with pytest.raises(SystemExit, match=error) as stopped:
        examples[0].main([*SMALL, *options.replace("MODULES", str(modules)).replace("DATA", str(data)).split()])
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize(
    "options", ["--dropout 1", "--epochs 0", "--report page.md", "--vocabulary 256", "--graph", "--speed 512"]
)
def test_options_out_of_range_are_refused(
    examples: tuple[ModuleType, ModuleType], options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        examples[0].main(options.split())
    assert ": expected " in capsys.readouterr().err
