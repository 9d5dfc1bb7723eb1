"""`attngen test --report`: every case is on the page, and wrong results or other bits in a second run fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import pytest
import torch

from attngen import cli
from attngen.conformance import exact, sweep
from attngen.conformance.cases import Case
from attngen.conformance.harness import load_module
from attngen.conformance.kv_cache import cache_cases
from attngen.conformance.oracle import naive_attention
from attngen.conformance.sweep import Job, Table, cases, failures, page, run_job
from attngen.heuristics import FUSED_KEYS
from attngen.spec import make_spec
from tests.helpers import module_of, spec

SPEC = "name: small\nhead_dim: 16\nmask: causal\ndtype: [fp16, bf16]\n"


class Here:
    """Replaces ProcessPoolExecutor: makes the same calls in this process."""

    def __init__(
        self, workers: int, context: object, initializer: Callable[..., object], initargs: tuple[Any, ...]
    ) -> None:
        self.workers = workers
        initializer(*initargs)

    def __enter__(self) -> Here:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sweep._lock.clear()

    def map(self, function: Callable[..., Table], work: Iterable[Job], *rest: Iterable[Any]) -> Iterator[Table]:
        return map(function, work, *rest)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with one spec and two cases, the second of which counts as large."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "small.yaml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(sweep, "cases", lambda spec, device: [Case(1, 2, 2, 17, 17), Case(1, 2, 2, 33, 40, "bnhd")])
    monkeypatch.setattr(sweep, "LARGE_SCORES", 1000)
    return tmp_path


def locks_of_this_process() -> int:
    return len(sweep._lock)


@pytest.mark.share(32)
def test_processes_share_a_lock() -> None:
    """Two large cases at the same time would not fit on a device."""
    with sweep.processes(1) as pool:
        assert pool.submit(locks_of_this_process).result() == 1


@pytest.mark.share(16)
def test_the_page_has_all_cases(project: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["test", "--all", "--report", "docs/page.md"])
    printed = capsys.readouterr()
    dtypes = ("bf16", "fp16") if device == "cuda" else ("fp16",)
    assert caught.value.code == 0
    assert printed.out == f"docs/page.md: {2 * len(dtypes)} cases, 0 above the bar\n"
    assert [line.partition(": ")[0] for line in printed.err.splitlines() if line.startswith("small ")] == [
        f"small {dtype} {case}" for dtype in dtypes for case in ("B1 H2 Nq17 Nk17", "B1 H2 Nq33 Nk40 bnhd")
    ]
    text = (project / "docs" / "page.md").read_text()
    assert (
        text.count("\n## small, ") == len(dtypes)
        and text.count("\n| B1 H2 ") == 2 * len(dtypes)
        and text.count("| yes |\n") == 2 * len(dtypes)
    )


def test_a_wrong_module_fails(
    project: Path, monkeypatch: pytest.MonkeyPatch, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoiled(folder: Path) -> ModuleType:
        module = load_module(folder)
        right = module.attention
        module.attention = lambda q, k, v, **given: right(q, 1.1 * k, v, **given)  # type: ignore[attr-defined]
        return module

    monkeypatch.setattr(sweep, "load_module", spoiled)
    with pytest.raises(SystemExit) as caught:
        cli.main(["test", "specs/small.yaml", "--report", "page.md"])
    assert caught.value.code == 1
    wrong = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("error: small, fp16: | B1 H2 Nq17 Nk17 | ")
    ]
    assert len(wrong) == 1 and "cases, 0 above" not in (project / "page.md").read_text()


@pytest.mark.share(16)
def test_other_bits_in_a_second_run_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    made = make_spec({"name": "small", "head_dim": 16, "dtype": "fp16"})
    (tmp_path / "small.yaml").write_text("name: small\nhead_dim: 16\ndtype: fp16\n")
    module = module_of(made, tmp_path / "small")
    right, calls = module.attention, [0]

    def shaky(*args: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*args, **given)
        calls[0] += 1
        return out + torch.finfo(torch.float16).smallest_normal * (calls[0] % 2), lse

    monkeypatch.setattr(module, "attention", shaky)
    monkeypatch.setattr(sweep, "load_module", lambda folder: module)
    monkeypatch.setattr(sweep, "cases", lambda spec, device: [Case(1, 2, 2, 17, 17)])
    table = run_job(Job(tmp_path / "small.yaml", tmp_path / "small", "fp16"), device, 0)
    ((line, ok),) = table.lines
    assert line.endswith("| NO |") and not ok and failures([table]) == [f"small, fp16: {line}"]
    assert "1 cases, 1 above the bar." in page([table], device)


@pytest.mark.share(16)
def test_calls_with_a_cache_are_on_the_page_and_fail_if_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Output and LSE of each call are compared, and the bits of a second call."""
    text = {
        "name": "small",
        "head_dim": 16,
        "mask": "causal",
        "dtype": "fp16",
        "cache": "contiguous",
        "backward": False,
    }
    made = make_spec(text)
    (tmp_path / "small.yaml").write_text(json.dumps(text))
    module = module_of(made, tmp_path / "small")
    few = cache_cases(made, False)[:2]
    monkeypatch.setattr(sweep, "load_module", lambda folder: module)
    monkeypatch.setattr(sweep, "cases", lambda spec, device: [])
    monkeypatch.setattr(sweep, "cache_cases", lambda spec, cuda: few)
    job = Job(tmp_path / "small.yaml", tmp_path / "small", "fp16")
    table = run_job(job, device, 0)
    assert [
        (line.startswith(f"| {case} | "), line.endswith(" | yes |"), ok) for case, (line, ok) in zip(few, table.lines)
    ] == [(True,) * 3] * 2
    right, calls = module.attention.with_kvcache, [0]

    def shaky(*args: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*args, **given)
        calls[0] += 1
        return out * (1.1 if calls[0] > 3 else 1 + 2.0**-10 * (calls[0] % 2)), lse

    monkeypatch.setattr(module.attention, "with_kvcache", shaky)
    first, second = run_job(job, device, 0).lines
    assert first[0].endswith("| NO |") and not first[1] and second[0].endswith("| yes |") and not second[1]


def test_cases_reach_the_longest_sequences() -> None:
    """On CUDA cases have up to 32k rows, and 16k with score modifiers, as the oracle stores all scores."""
    assert (
        max(c.n_q for c in cases(spec("causal_mha"), 132)) == 32768
        and max(c.n_q for c in cases(spec("alibi_mha"), 132)) == 16384
    )
    assert (
        max(c.batch * c.q_heads * c.n_kv for c in cases(spec("causal_mha"), 132) if c.n_q == 1029) >= FUSED_KEYS * 132
    )
    assert max(c.n_q for c in cases(spec("causal_mha"))) == 129
    assert {c.layout for c in cases(spec("causal_mha"))} == {"bhnd", "bnhd", "packed", "expanded", "island"}


@pytest.mark.parametrize("drops", [False, True])
def test_the_oracle_computes_slices_of_rows(drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, gradients, tangents and their errors by rounding are those of all rows at once."""
    draw = torch.Generator().manual_seed(5)
    q, k, v, *along = (torch.randn(1, 2, n, 8, generator=draw) for n in (7, 9, 9, 7, 9, 9))
    mask = torch.ones(7, 9, dtype=torch.bool).tril(2)[None, None]
    weight = torch.randint(0, 2, (1, 2, 7, 9), generator=draw) * 2.0 if drops else None
    grads = torch.randn(1, 2, 7, 8, generator=draw), torch.randn(1, 2, 7, generator=draw)
    rows: list[int] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        rows.append(q.shape[2])
        return naive_attention(q, k, v, others[0], 0.3, others[1])

    def both(whole: bool) -> list[dict[str, torch.Tensor]]:
        names = ("out", "lse", "dq", "dk", "dv")
        results = exact.exact(attend, (q, k, v), mask, grads, weight, names, 1e-3, 1e-7, whole)
        return [
            *results,
            *exact.exact_tangents(attend, (q, k, v), tuple(along), mask, weight, names[:2], 1e-3, 1e-7, whole),
        ]

    monkeypatch.setattr(exact, "TRUTH_ELEMENTS", 2 * 2 * 9)  # two rows
    sliced, at_once = both(whole=False), both(whole=True)
    assert rows == [2, 2, 2, 1, *(n for n in (2, 2, 2, 1) for _ in range(2)), 7, 7, 7]
    for one, other in zip(sliced, at_once, strict=True):
        torch.testing.assert_close(one, other)
