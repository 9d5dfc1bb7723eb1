"""Benchmark cells with a KV cache: bytes read, peers compared with naive attention per sequence, the clock, tables and
plots."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.bench import plots, timing
from attngen.bench.cases.cache import CacheProblem, problem_of
from attngen.bench.cases.catalog import LEAST_RAGGED, decode
from attngen.bench.cases.grids import Cell, cell
from attngen.bench.child import STEP_BYTES, STEP_SETS
from attngen.bench.peers import PEERS
from attngen.bench.reports import reports
from attngen.bench.results import CACHE, Line, Results, cache_rows, rates, read_results, rows
from attngen.bench.run import Setup, progress, run
from attngen.conformance.oracle import naive_attention, relative_error
from attngen.spec import make_spec
from tests.helpers import ROOT

MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "matmul_tflops": 786.4, "copy_tb_s": 4.0}
DOCUMENTS = {
    order: {"all_of": ["causal", {"document": {"sorted": order == "sorted"}}]} for order in ("sorted", "any order")
}
WINDOW = {"sliding_window": {"left": 31, "right": 0}}
FP8 = {"paged": {"page_size": 32}, "dtype": "fp8_e4m3"}
LATENT = {"heads": {"sharing": "mqa"}, "head_dim": {"qk": 48, "v": 32}, "kv": {"latent": {"rope": 16}}}


def cached_spec(page: int | str = "", **more: Any) -> Any:
    cache = {"paged": {"page_size": page}} if page else "contiguous"
    shape = {"name": "cached", "heads": {"sharing": "gqa"}, "head_dim": 16, "dtype": "fp32", "mask": "causal"}
    return make_spec({**shape, "cache": cache, "backward": False, **more})


def problem(spec: Any, n_q: int = 1, n_kv: int = 160, **call: float) -> CacheProblem:
    found = problem_of(
        cell("", spec, n_q, n_kv, batch=3, heads=4, kv_heads=None if spec.rope else 2, call=call), "cpu", Path()
    )
    assert isinstance(found, CacheProblem)
    return found


CELLS = {
    "rows": problem(cached_spec()),
    "rows, drafts": problem(cached_spec(), 5),
    "rows, ragged": problem(cached_spec(), ragged=20),
    "rows, no mask": problem(cached_spec(mask="none"), 2, ragged=20),
    "pages": problem(cached_spec(32)),
    "pages that tiles do not divide": problem(cached_spec(48), 2),
    "pages, ragged": problem(cached_spec("any"), 3, ragged=20, page=16),
    "pages, window": problem(cached_spec(16, mask=WINDOW), 2, ragged=20),
    "pages, alibi": problem(cached_spec(16, score="alibi"), 2, ragged=20),
    "pages, sinks": problem(cached_spec(16, score="sink"), ragged=20),
    "rows, documents": problem(cached_spec(mask=DOCUMENTS["any order"]), 3, document=30),
    "pages, documents": problem(cached_spec(48, mask=DOCUMENTS["sorted"]), 2, ragged=20, document=30),
    "pages, documents in any order": problem(cached_spec(48, mask=DOCUMENTS["any order"]), 3, ragged=20, document=30),
    "latents": problem(cached_spec(16, **LATENT), ragged=20),
}


def alibi(s: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
    return s - 2.0 ** (-2 * torch.arange(1, 5))[None, :, None, None] * far


def of_sequences(p: CacheProblem) -> tuple[torch.Tensor, int]:
    """Return (out, bytes of K and V that some query sees), computed per sequence from the arguments of
    `with_kvcache`."""
    x, spec, outs, read = p.make_inputs(0), p.cell.spec, [], 0
    left = WINDOW["sliding_window"]["left"] if spec.mask.name == "sliding_window" else p.cell.n_kv
    for b, n in enumerate(p.lengths):
        places = torch.arange(n)
        if p.cell.page:
            table = p.given["page_table"][b].long()
            k, v = (y[table[places // p.cell.page], :, places % p.cell.page].transpose(0, 1)[None] for y in (x.k, x.v))
        else:
            k, v = x.k[b : b + 1, :, :n], x.v[b : b + 1, :, :n]
        at = torch.arange(p.cell.n_q)[:, None] + n - p.cell.n_q
        mask = (
            (places <= at) & (places >= at - left)
            if spec.mask.name != "none"
            else torch.ones(p.cell.n_q, n, dtype=torch.bool)
        )
        if "document_ids" in p.given:
            ids = p.given["document_ids"][b]
            mask = mask & (ids[places] == ids[at])
        modify = partial(alibi, far=(at - places).abs()) if any(part.name == "alibi" for part in spec.score) else None
        outs.append(
            naive_attention(
                x.q[b : b + 1], k, v, mask[None, None], spec.head_dim.qk**-0.5, None, modify, p.given.get("sink")
            )[0]
        )
        read += int(mask.any(0).sum()) * p.cell.kv_heads * 4 * (48 if spec.rope else 32)
    return torch.cat(outs), read


def forward(p: CacheProblem, peer: str) -> torch.Tensor:
    assert not PEERS[peer].cannot(p.cell)
    call = PEERS[peer].prepare(p)
    with call.around():
        return call.forward(p.make_inputs(0))


@pytest.mark.share(4)
@pytest.mark.parametrize("name", CELLS)
def test_naive_attention_reads_the_cache_and_read_bytes_match_a_hand_count(name: str) -> None:
    p = CELLS[name]
    expected, read = of_sequences(p)
    assert relative_error(forward(p, "naive"), expected) < 1e-5
    assert p.read_bytes == read
    x = p.make_inputs(0)
    assert p.set_bytes == 4 * (x.k.numel() + (0 if p.cell.spec.rope else x.v.numel()))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", [name for name in CELLS if name != "pages, sinks"])
def test_flex_attention_reads_the_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention runs eagerly, without torch.compile."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert relative_error(forward(CELLS[name], "flex"), of_sequences(CELLS[name])[0]) < 1e-5


@pytest.mark.parametrize("name", [name for name in CELLS if name.startswith("rows")])
def test_sdpa_reads_contiguous_caches(name: str) -> None:
    """SDPA gets the mask as a tensor where some query does not see all rows."""
    p = CELLS[name]
    assert relative_error(forward(p, "math"), of_sequences(p)[0]) < 1e-5
    note = PEERS["math"].prepare(p).note
    assert note.startswith("mask as a tensor, all 0 MiB of the cache read") == (name != "rows")
    half = replace(p.cell, dtype="fp16")
    assert PEERS["flash"].cannot(half) == ("" if name == "rows" else "no mask as a tensor") and not PEERS[
        "cudnn"
    ].cannot(half)


@pytest.mark.parametrize("scale", ["head", "page"])
def test_8_bit_caches_have_scales_and_half_the_bytes(scale: str) -> None:
    """Elements take one byte. Naive attention multiplies them by their scales; other peers refuse such a cache."""
    cache = {"paged": {"page_size": 32}, "dtype": "fp8_e4m3", "scale": scale}
    p = problem(
        make_spec({**cached_spec().canonical(), "name": "cached", "dtype": "fp16", "head_dim": 32, "cache": cache}),
        ragged=20,
    )
    x, plain = (
        p.make_inputs(0),
        problem(
            make_spec({**cached_spec(32).canonical(), "name": "cached", "dtype": "fp16", "head_dim": 32}), ragged=20
        ),
    )
    assert x.k.dtype == x.v.dtype == torch.float8_e4m3fn and p.set_bytes == x.k.numel() + x.v.numel()
    assert 2 * p.read_bytes == plain.read_bytes
    assert p.given["k_scale"].shape == ((p.pages, 2) if scale == "page" else (2,))
    found, near = forward(p, "naive"), forward(plain, "naive")
    assert 0 < relative_error(found, near) < 0.1  # the same numbers, rounded to 8 bits
    assert {name for name, peer in PEERS.items() if not peer.cannot(p.cell)} == {"ours", "naive"}
    assert PEERS["flex"].cannot(p.cell) == "no keys of 8 bits"


def test_peers_refuse_caches_that_they_do_not_support() -> None:
    assert PEERS["cudnn"].cannot(CELLS["pages"].cell) == "no pages"
    assert (
        PEERS["fa4"].cannot(CELLS["rows"].cell)
        == PEERS["flex_flash"].cannot(CELLS["rows"].cell)
        == "not with a KV cache"
    )
    assert PEERS["flashinfer"].cannot(CELLS["pages"].cell) == "not installed"


class Wrapper:
    """Fake of FlashInfer's wrapper: takes the arguments of its `plan` and `run`, and computes naive attention."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert layout == "NHD" and not use_tensor_cores

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *sizes: int, **options: Any
    ) -> None:
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32 and sizes[:3] == (4, 2, 16)
        self.indptr, self.indices, self.last, self.page, self.left = (
            indptr,
            indices.long(),
            last,
            sizes[3],
            options["window_left"],
        )

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, ...]) -> torch.Tensor:
        outs = []
        for b, last in enumerate(self.last):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]]
            n = (len(pages) - 1) * self.page + int(last)
            k, v = (x[pages].flatten(0, 1)[:n].transpose(0, 1)[None] for x in caches)
            mask = torch.arange(n) >= (n - 1 - self.left if self.left >= 0 else 0)
            outs.append(naive_attention(q[b : b + 1, :, None], k, v, mask[None], 0.25)[0][:, :, 0])
        return torch.cat(outs)


@pytest.mark.parametrize("mask", ["causal", "none", WINDOW])
def test_flashinfer_agrees_where_it_is_installed(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper, __spec__="here")
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    p = problem(cached_spec(16, mask=mask), ragged=20)
    assert relative_error(forward(p, "flashinfer"), of_sequences(p)[0]) < 1e-5
    cannot = PEERS["flashinfer"].cannot
    fp8 = problem(
        make_spec({**cached_spec(32).canonical(), "name": "cached", "dtype": "fp16", "head_dim": 32, "cache": FP8})
    )
    assert (cannot(CELLS["rows"].cell), cannot(fp8.cell)) == ("here only with pages", "no keys of 8 bits")
    for more in ({"mask": WINDOW}, {"score": {"softcap": 5.0}}):
        assert (
            cannot(problem(cached_spec(16, **LATENT, **more)).cell) == "with latents, no window and no score modifier"
        )
    assert cannot(CELLS["pages, ragged"].cell) == "one query of a sequence"
    assert cannot(CELLS["pages, sinks"].cell) == "no score modifier but a softcap"


class LatentWrapper:
    """Fake of FlashInfer's wrapper for MLA."""

    def __init__(self, workspace: torch.Tensor) -> None:
        assert workspace.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        **options: Any,
    ) -> None:
        assert (
            options["num_heads"] == 4
            and (options["head_dim_ckv"], options["head_dim_kpe"]) == (32, 16)
            and options["page_size"] == 16
        )
        assert qo_indptr.tolist() == [0, 1, 2, 3] and all(
            x.dtype == torch.int32 for x in (kv_indptr, kv_indices, kv_len_arr)
        )
        self.indptr, self.indices, self.lengths, self.scale = (
            kv_indptr,
            kv_indices.long(),
            kv_len_arr,
            options["sm_scale"],
        )

    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor
    ) -> torch.Tensor:
        outs = []
        for b, n in enumerate(self.lengths):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]]
            v, k = (x[pages].flatten(0, 1)[:n] for x in (ckv_cache, torch.cat([ckv_cache, kpe_cache], -1)))
            q = torch.cat([q_nope[b], q_pe[b]], -1)[None, :, None]
            outs.append(
                naive_attention(
                    q, k[None, None], v[None, None], torch.ones(1, 1, 1, int(n), dtype=torch.bool), self.scale
                )[0][:, :, 0]
            )
        return torch.cat(outs)


def test_flashinfer_agrees_with_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__spec__="here"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", SimpleNamespace(BatchMLAPagedAttentionWrapper=LatentWrapper))
    p = CELLS["latents"]
    assert relative_error(forward(p, "flashinfer"), of_sequences(p)[0]) < 1e-5


def test_problems_have_ragged_lengths_and_permuted_pages() -> None:
    p = CELLS["pages, ragged"]
    assert (
        p.lengths == CELLS["rows, ragged"].lengths
        and all(20 <= n <= 160 for n in p.lengths)
        and len(set(p.lengths)) == 3
    )
    assert p.page_table.shape == (3, 10)
    named = torch.cat([row[: -(-n // 16)] for row, n in zip(p.page_table, p.lengths)])
    assert sorted(named.tolist()) == list(range(len(p.make_inputs(0).k))) and named.tolist() != sorted(named.tolist())


def test_the_decode_grid_covers_the_sizes_and_fits_in_memory() -> None:
    cells = decode().cells
    assert len({str(c) for c in cells}) == len(cells) and {c.n_q for c in cells} == {1, 4, 16}
    sizes = {(c.batch, c.n_kv) for c in cells if c.spec.name == "decode_rows"}
    assert {(1, 65536), (1, 131072), (8, 8192), (8, 65536), (64, 8192)} < sizes
    assert {c.page for c in cells} == {0, 16, 64, 256} and {c.asked("ragged") for c in cells} == {0, LEAST_RAGGED}
    sizes_of_sets = [CacheProblem(c, "cpu", Path()).set_bytes for c in cells]
    assert max(sizes_of_sets) == 2**34
    concurrent = [sum(sizes_of_sets[i : i + 8]) for i in range(len(sizes_of_sets))]
    assert max(concurrent) <= 60 * 2**30  # cells whose first calls run at the same time


@pytest.mark.share(8)
def test_a_run_measures_cells_with_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run uses child processes and Triton's interpreter: our results agree with naive attention, and have
    figures."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cells = [cell("decode", cached_spec(16, name="pages"), 1, 90, batch=2, heads=4, kv_heads=2, call={"ragged": 40})]
    cells += [cell("decode", cached_spec(16, name="latents", **LATENT), 2, 64, batch=2, heads=4)]
    results = Results(dict(MACHINE))
    setup = Setup(rounds=2, jobs=2, limit_s=60.0, device="cpu", clock="tests.bench.fakes")
    for lines in run(dict.fromkeys(cells, ("ours", "flash", "naive")), setup, tmp_path, results, lambda text: None):
        assert progress(lines).endswith("TB/s") and "flash - (no pages)" in progress(lines)
    assert not results.failed() and list(rows(results)) == []
    for c in cells:
        ours, flash, naive = (line for line in results.lines if line.cell is c)
        assert set(CACHE) < set(ours.figures) and "bwd_ms" not in ours.figures and flash.why == "no pages"
        assert 0 < naive.figures["differs"] < 1e-5 and ours.figures["fwd_ms"] == pytest.approx(1.5e-3, rel=0.01)
        read = CacheProblem(c, "cpu", tmp_path).read_bytes
        assert ours.figures["read_tb_s"] == pytest.approx(read / ours.figures["fwd_ms"] / 1e9, abs=1e-3)
    (tmp_path / "results.json").write_text(results.text())
    assert read_results(tmp_path / "results.json").text() == results.text()


# ---------------------------------------------------------------------------------------------- the clock


def test_steps_rotate_through_all_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake clock counts calls: each call takes one microsecond, also if it is captured and replayed."""
    made: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(made)

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1e3

    monkeypatch.setattr(timing, "_event", Event)
    monkeypatch.setattr(timing, "captured", lambda function: function)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    call: Callable[[int], object] = made.append
    for sets, calls in ((1, 8), (3, 9), (64, 64)):
        made.clear()
        found = timing.step_times({"a": call, "b": call}, sets, rounds=3)
        assert {name: times.rounds for name, times in found.items()} == {
            name: pytest.approx((1e-3,) * 3) for name in "ab"
        }
        assert made[:calls] == list(range(calls)) and {n % sets for n in made} == set(range(sets))


def test_sets_are_many_times_the_l2() -> None:
    assert STEP_BYTES >= 10 * 50 * 2**20
    smallest = min(CacheProblem(c, "cpu", Path()).read_bytes for c in decode().cells if c.n_kv == 1024)
    assert smallest * STEP_SETS >= 4 * 50 * 2**20


# ---------------------------------------------------------------------------------------------- tables and plots


def example_results() -> Results:
    def line(c: Cell, peer: str, us: float) -> Line:
        read = c.batch * c.kv_heads * min(c.n_kv, 1024 if c.spec.name == "decode_window" else c.n_kv) * 512
        return Line(
            c, peer, {"fwd_ms": us / 1e3, "fwd_spread": 0.01, **rates(c, MACHINE, 10**6, read, "fwd", us / 1e3)}
        )

    cells = {str(c).replace(" bf16", "").replace(" H32/8", ""): c for c in decode().cells}
    eights = [c for name, c in cells.items() if name.startswith("decode_rows B8 Nq1")]
    lines = [line(c, peer, 0.01 * c.n_kv * times) for c in eights for peer, times in (("ours", 1.0), ("cudnn", 0.9))]
    lines += [
        line(cells["decode_page64 B8 Nq1 Nk65536"], "ours", 662.0),
        line(cells["decode_rows B8 Nq4 Nk65536"], "ours", 669.0),
    ]
    lines += [line(cells["decode_window B8 Nq1 Nk131072"], "ours", 10.75)]
    return Results(dict(MACHINE), [*lines, Line(eights[0], "flex", {}, "first call: no end within 120 s")])


def test_the_decode_table() -> None:
    ((name, text),) = reports(example_results()).items()
    heading, table, notes = text.split("\n\n")
    found = [row.strip("| ").split(" | ") for row in table.splitlines()]
    assert name == "decode.md" and found[0][-2:] == ["best peer over ours", "cudnn us"]
    assert found[6] == [
        "decode_rows bf16 B8 H32/8 Nq1 Nk65536",
        "2048.0",
        "655.4",
        "3.28",
        "82%",
        "1.00",
        "0.90",
        "589.8",
    ]
    assert [row[5] for row in found[-3:]] == ["1.01", "1.02", "1.05"] and [row[-1] for row in found[-3:]] == ["-"] * 3
    assert notes == "- decode_rows bf16 B8 H32/8 Nq1 Nk1024: flex: first call: no end within 120 s\n"
    assert next(cache_rows(example_results()))[:7] == (
        "decode_rows bf16 B8 H32/8 Nq1 Nk1024",
        "ours",
        "10.2",
        "1.0%",
        "32.0",
        "3.28",
        "82%",
    )


@pytest.mark.share(16)
def test_the_decode_plots() -> None:
    found = plots.plots(example_results())
    assert list(found) == [
        "decode-rate.svg",
        "decode-rate-dark.svg",
        "decode-bars.svg",
        "decode-bars-dark.svg",
    ] and found == plots.plots(example_results())
    assert "over N: B=8, causal, gqa, " in found["decode-rate.svg"] and ">cuDNN</text>" in found["decode-rate.svg"]
    assert ">decode_window</text>" in found["decode-bars.svg"] and ">B8 H32/8 Nq1 Nk131072<" in found["decode-bars.svg"]
