"""Plans of context parallelism: counts of visible scores against the masks' hand-written oracles, balance, transfers,
and the proof that each visible pair is computed once."""

from __future__ import annotations

import importlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from attngen.cli import app
from attngen.conformance.cases import make_mask_inputs
from attngen.conformance.oracle import reference_mask
from attngen.distributed.balance import Balanced, balance
from attngen.distributed.bounds import bound
from attngen.distributed.choose import choose, predictions, simulate
from attngen.distributed.inputs import ir_of
from attngen.distributed.layout import Layout
from attngen.distributed.model import Cluster, Heads, predict
from attngen.distributed.proof import PlanError, verify
from attngen.distributed.transfers import METHODS, Plan, divided, plan
from attngen.distributed.visible import Visible, count
from attngen.errors import AttngenError
from attngen.heuristics import STREAMED
from attngen.ir.sizes import Sizes
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, load_spec
from tests.distributed_elements import elements
from tests.helpers import ROOT

NAMES = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))
HEADS = 4  # query heads of random cases


@cache
def spec_of(name: str) -> Spec:
    return load_spec(ROOT / "specs" / f"{name}.yaml")


def folder(name: str) -> Path:
    return ROOT / "generated" / name


def random_inputs(name: str, n: int, seed: int) -> dict[str, Any]:
    """Random inputs of a spec's mask for two sequences."""
    sizes = Sizes(2, HEADS, HEADS, n, n)
    return make_mask_inputs(spec_of(name), sizes, torch.float32, "cpu", torch.Generator().manual_seed(seed))


def oracle(name: str, n: int, chunk: int, inputs: dict[str, Any]) -> np.ndarray:
    """Visible scores by chunks, [2 * HEADS, chunks, chunks], by the mask's oracle."""
    q = torch.zeros(2, HEADS, n, 1)
    mask = reference_mask(spec_of(name).mask, q, q, inputs).expand(2, HEADS, n, n).numpy().reshape(-1, n, n)
    rest = -n % chunk
    chunks = (n + rest) // chunk
    padded = np.pad(mask, ((0, 0), (0, rest), (0, rest))).reshape(-1, chunks, chunk, chunks, chunk)
    return padded.sum((2, 4))


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_the_oracle(name: str) -> None:
    for seed, (n, chunk) in enumerate(((203, 32), (517, 128), (96, 96), (5, 16))):
        inputs = random_inputs(name, n, seed)
        found = count(folder(name), n, chunk, inputs, q_heads=HEADS, kv_heads=HEADS)
        expected = oracle(name, n, chunk, inputs)
        assert found.exact
        assert np.array_equal(found.scores * (2 * HEADS // found.planes), expected.sum(0)), (n, chunk)


def test_counts_without_evaluation_miss_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.distributed.visible.MOST_EVALUATED", 0)
    bounded = set()
    for name in NAMES:
        inputs = random_inputs(name, 203, 0)
        found = count(folder(name), 203, 32, inputs, q_heads=HEADS, kv_heads=HEADS)
        excess = found.scores * (2 * HEADS // found.planes) - oracle(name, 203, 32, inputs).sum(0)
        assert (excess >= 0).all()
        assert not (found.exact and excess.any())
        bounded |= set() if found.exact else {name}
    assert "dilated_mha" in bounded
    assert "causal_gqa" not in bounded


def test_masks_may_depend_on_the_head() -> None:
    spec = {"name": "heads", "head_dim": 64, "mask": {"expr": "kv_idx <= q_idx and q_idx - kv_idx < 16 * (h + 1)"}}
    module = lower(Spec.model_validate(spec))
    found = count(module, 200, 32, q_heads=3, kv_heads=3)
    rows, keys = np.arange(200)[:, None], np.arange(200)
    assert found.planes == 3
    assert found.exact
    assert found.total * 3 == sum(((keys <= rows) & (rows - keys < 16 * (h + 1))).sum() for h in range(3))


def cases(seeds: int) -> Iterator[tuple[int, random.Random, Visible]]:
    """Random visible scores: a committed spec's mask, a length that nothing divides, and chunks of some rows."""
    for seed in range(seeds):
        pick = random.Random(seed)
        name, n, chunk = pick.choice(NAMES), pick.randint(1, 700), pick.choice((16, 24, 48, 128))
        inputs = random_inputs(name, n, seed)
        yield seed, pick, count(folder(name), n, chunk, inputs, q_heads=HEADS, kv_heads=HEADS)


def random_layout(pick: random.Random, visible: Visible, ranks: int) -> Layout:
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for chunk in range(len(visible.work)):
        owned[pick.randrange(ranks)].append(chunk)
    return Layout(visible.seq_len, visible.chunk, tuple(map(tuple, owned)))


def random_plan(pick: random.Random, visible: Visible) -> Plan:
    method = pick.choice(METHODS)
    ulysses = pick.choice((1, 2, 4))
    ranks = {"ulysses": ulysses, "ulysses_ring": ulysses * pick.choice((1, 2))}.get(method, pick.randint(1, 8))
    layout = random_layout(pick, visible, ranks) if pick.random() < 0.7 else balance(visible, ranks).layout
    return plan(visible, layout, method, HEADS, HEADS, ulysses)


def test_random_plans_compute_each_visible_pair_once() -> None:
    methods = set()
    for _, pick, visible in cases(200):
        made = random_plan(pick, visible)
        verify(made, visible)
        methods.add(made.method)
        moved = elements(made, 8, 8)
        rows = sum(len(made.layout.rows_of(c)) for send in made.sends for c in send.chunks)
        inside = made.layout.seq_len * (made.ulysses - 1)  # each row goes to the other ranks of its group
        assert moved["k"].sum() == (rows + inside) * HEADS // made.ulysses * 8
        assert not np.trace(moved["k"])
    assert methods == {*METHODS}


def mutated(pick: random.Random, made: Plan) -> tuple[str, Plan] | None:
    """A plan with one mistake, or None if it has no place for that one."""
    kind = pick.choice(("drop a key", "drop a send", "send twice", "swap", "twice", "drop a launch", "late"))
    launches, sends = list(made.launches), list(made.sends)
    at = pick.randrange(len(launches)) if launches else 0
    if kind in ("drop a send", "send twice", "late", "swap") and not sends:
        return None
    if not launches:
        return None
    if kind == "drop a key":
        launches[at] = replace(launches[at], keys=launches[at].keys[1:])
    elif kind == "drop a launch":
        del launches[at]
    elif kind == "twice":
        launches.append(launches[at])
    elif kind == "drop a send":
        del sends[pick.randrange(len(sends))]
    elif kind == "send twice":
        sends.append(pick.choice(sends))
    elif kind == "late":
        i = pick.randrange(len(sends))
        sends[i] = replace(sends[i], step=sends[i].step + 1)
    elif kind == "swap":
        i = pick.randrange(len(sends))
        sends[i] = replace(sends[i], sender=sends[i].receiver, receiver=sends[i].sender)
    return kind, replace(made, launches=tuple(launches), sends=tuple(sends))


def test_mistakes_in_plans_are_found() -> None:
    found = Counter[str]()
    for _, pick, visible in cases(120):
        made = random_plan(pick, visible)
        for _ in range(4):
            wrong = mutated(pick, made)
            if wrong is None or not visible.total:
                continue
            with pytest.raises(PlanError):
                verify(wrong[1], visible)
            found[wrong[0]] += 1
    assert len(found) == 7, found


def test_a_window_needs_its_neighbours_only() -> None:
    visible = count(folder("window_gqa"), 16384, 128)
    layout = balance(visible, 8).layout
    gathered, ring = (plan(visible, layout, method) for method in ("all_gather", "ring"))
    assert {send.receiver - send.sender for send in gathered.sends} == {1}
    assert ring.steps == (0, 1)
    assert {send.receiver - send.sender for send in ring.sends} == {1}
    assert (0, 1) not in {(launch.rank, launch.step) for launch in ring.launches}
    assert {send.sender for send in ring.sends if (send.receiver, send.step) == (3, 1)} == {2}


def test_heads_that_do_not_divide_are_refused() -> None:
    visible = count(folder("causal_gqa"), 64, 16)
    layout = balance(visible, 4).layout
    with pytest.raises(AttngenError, match=r"ulysses divides 2 K/V heads among 4 ranks; expected a multiple of 4"):
        plan(visible, layout, "ulysses", 8, 2)
    with pytest.raises(AttngenError, match=r"groups of 3; expected a divisor of 4"):
        plan(visible, layout, "ulysses_ring", 8, 2, 3)
    with pytest.raises(AttngenError, match=r"did you mean `ring`"):
        plan(visible, layout, "rings")  # type: ignore[arg-type]


def documents(n: int, seed: int) -> list[int]:
    """Starts of documents, and the end of the last, with lengths from 1k to 64k, uniform in their logarithm."""
    pick, starts = random.Random(seed), [0]
    while starts[-1] < n:
        starts.append(min(n, starts[-1] + int(1000 * 64 ** pick.random())))
    return starts


def check_bar(visible: Visible, ranks: int) -> Balanced:
    """A layout within 2%, whose ranks differ by at most one chunk."""
    found = balance(visible, ranks)
    assert found.excess <= 0.02
    rows = [len(own) for own in found.layout.owned]
    assert max(rows) - min(rows) <= 1
    assert sorted(c for own in found.layout.owned for c in own) == list(range(found.layout.chunks))
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_masks_of_positions_are_balanced(ranks: int) -> None:
    n, chunk = 128 * 1024, 256
    for name in ("causal_gqa", "window_gqa", "streaming_gqa", "chunked_gqa", "full_mha"):
        check_bar(count(folder(name), n, chunk), ranks)
    check_bar(count(folder("prefix_lm_gqa"), n, chunk, {"prefix_length": 20000}), ranks)


def test_block_lists_are_balanced() -> None:
    rows = np.arange(512)[:, None]
    listed = np.random.default_rng(0).random((512, 512)) < 0.02 * (1 + rows / 128)  # later rows see more
    visible = count(folder("block_sparse_mha"), 512 * 128, 384, {"block_mask": listed})
    assert balance(visible, 8, "contiguous").excess > 0.2
    check_bar(visible, 8)


@pytest.mark.parametrize("seed", range(20))
def test_documents_are_balanced(seed: int) -> None:
    visible = count(folder("packed_document_gqa"), 256 * 1024, 384, cu_seqlens=documents(256 * 1024, seed))
    for ranks in (2, 4, 8):
        check_bar(visible, ranks)


def test_causal_gets_head_and_tail_and_a_window_stays_contiguous() -> None:
    causal = count(folder("causal_gqa"), 64 * 1024, 128)
    found, head_tail = balance(causal, 8), balance(causal, 8, "head_tail")
    assert found.excess <= head_tail.excess + 1e-9
    assert found.received <= 1.01 * head_tail.received
    window = count(folder("window_gqa"), 64 * 1024, 128)
    assert balance(window, 8).layout == balance(window, 8, "contiguous").layout


def test_received_rows_are_those_of_the_transfers() -> None:
    for _, pick, visible in cases(10):
        found = balance(visible, pick.randint(1, 6))
        made = plan(visible, found.layout, "all_gather")
        assert found.received == sum(len(made.layout.rows_of(c)) for send in made.sends for c in send.chunks)


def test_few_chunks_leave_ranks_empty() -> None:
    visible = count(folder("causal_gqa"), 40, 16)
    for method in ("auto", "contiguous", "head_tail", "greedy"):
        layout = balance(visible, 5, method).layout
        assert sorted(map(len, layout.owned)) == [0, 0, 1, 1, 1]
        for transfers in ("all_gather", "ring"):
            verify(plan(visible, layout, transfers), visible)


def test_a_million_rows_are_planned_in_seconds() -> None:
    begun = time.process_time()
    visible = count(folder("causal_gqa"), 1_000_000, 384)
    verify(plan(visible, balance(visible, 128).layout, "all_gather"), visible)
    assert time.process_time() - begun < 10


HEADS_8 = Heads(q_heads=32, kv_heads=8)


def test_formulas_are_the_elements_of_plans() -> None:
    """Bytes in closed form are those of the transfers, for ranks with equal rows."""
    visible = count(folder("causal_gqa"), 4096, 128)
    heads = Heads(2, 8, 4, 64, 32, 2)
    for method, ulysses in (("all_gather", 1), ("ring", 1), ("ulysses", 4), ("ulysses_ring", 2)):
        groups = balance(visible, 4 // ulysses).layout
        made = plan(visible, divided(groups, ulysses), method, 8, 4, ulysses)
        found = predict(visible, Cluster("H200", 4, 1), heads, method, ulysses, groups)  # type: ignore[arg-type]
        for costs, backward in ((found.forward, False), (found.backward, True)):
            parts = elements(made, 64, 32, 2, backward)
            total = sum(x * (4 if name == "lse" else 2) for name, x in parts.items())
            assert costs.nvlink_bytes == max(total.sum(0).max(), total.sum(1).max()), (method, backward)
            assert costs.network_bytes == 0
        work = [visible.work[list(own)].sum() for own in groups.owned]
        assert found.forward.flops == max(work) * 2 * 8 // ulysses * 2 * (64 + 32)


def test_predictions_of_two_gpus_are_near_what_was_measured() -> None:
    """Shares of one GPU's rate by all-gather: 0.91 in the forward and 0.96 in both for 32k rows, 0.975 and 0.986 for
    128k (docs/perf-log.md, section 41)."""
    for n, forward, both in ((32768, 0.91, 0.96), (131072, 0.975, 0.986)):
        visible = count(folder("causal_gqa"), n, 256)
        found = predict(visible, Cluster("H200", 2, 1), HEADS_8, "all_gather")
        assert found.forward_efficiency == pytest.approx(forward, abs=0.05)
        assert found.efficiency == pytest.approx(both, abs=0.05)


@pytest.mark.parametrize("name", ["causal_gqa", "window_gqa", "full_mha"])
def test_predictions_respect_the_lower_bounds(name: str) -> None:
    visible = count(folder(name), 32768, 128)
    for cluster in (Cluster("H200", 2, 1), Cluster("H100", 8, 1), Cluster("B200", 8, 4)):
        layout = balance(visible, cluster.ranks).layout
        least = bound(visible, cluster, HEADS_8, layout)
        for found in predictions(visible, cluster, HEADS_8):
            moved = found.forward.nvlink_bytes + found.forward.network_bytes
            assert 2 * moved >= least.received_bytes
            assert found.forward.hbm_bytes >= 0.99 * least.hbm_bytes
            assert found.forward.seconds >= least.seconds
            if found.ulysses == 1:
                assert moved >= 0.99 * least.queries_stay_bytes
            assert 0 < found.efficiency <= 1 + STREAMED


def test_the_choice_follows_the_mask() -> None:
    """A window overlaps its neighbours' keys with its own; between nodes, heads are divided inside nodes."""
    window, causal = (count(folder(name), 131072, 128) for name in ("window_gqa", "causal_gqa"))
    assert choose(window, Cluster("H200", 8, 4), HEADS_8).ulysses == 1
    large = choose(causal, Cluster("H200", 8, 8), HEADS_8)
    assert large.method == "ulysses_ring"
    assert 8 % large.ulysses == 0
    alone, node, cluster = (p.efficiency for p in simulate(causal, Cluster(), HEADS_8, (1, 8, 64)).values())
    assert alone == pytest.approx(1)
    assert cluster < alone < node  # the queries of a rank fit in the L2


def test_unknown_links_are_refused() -> None:
    visible = count(folder("causal_gqa"), 256, 128)
    with pytest.raises(AttngenError, match="the links of MI300X are not known; expected A100, H100, H200, B200"):
        predict(visible, Cluster("MI300X", 2, 1), HEADS_8, "ring")


def test_explain_prints_methods_bounds_and_scaling() -> None:
    run = CliRunner().invoke(
        app, ["explain", "causal_gqa", "--gpus", "8", "--nodes", "2", "--seq", "65536", "--formulas"]
    )
    assert run.exit_code == 0, run.output
    for words in (
        "all_gather",
        "ulysses+ring 4 x 4",
        "least, any method",
        "chosen: ",
        "1024",
        "bytes of k, v received =",
    ):
        assert words in run.output
    dropped = CliRunner().invoke(app, ["explain", "causal_dropout_mqa", "--gpus", "8", "--seq", "4096"])
    assert "without Ulysses, which divides heads: dropout depends on the number of a head" in dropped.output
    assert "\nulysses" not in dropped.output
    cached = CliRunner().invoke(app, ["explain", "decode_gqa", "--gpus", "8"])
    assert cached.exit_code == 1 and "expected a spec without `cache`" in str(cached.exception)
    for name in ("packed_document_gqa", "block_sparse_mha"):
        assert CliRunner().invoke(app, ["explain", name, "--gpus", "2", "--seq", "2048"]).exit_code == 0


def test_errors_are_sentences(tmp_path: Path) -> None:
    for wrong, sentence in (
        (lambda: count(folder("prefix_lm_gqa"), 64, 16), "needs `prefix_length`; pass it in `inputs`"),
        (lambda: count(folder("document_gqa"), 64, 16), "needs `document_ids`"),
        (lambda: count(folder("block_sparse_mha"), 64, 16), "needs `block_mask`"),
        (lambda: count(folder("causal_gqa"), 64, 16, cu_seqlens=[0, 64]), "reads no cu_seqlens"),
        (lambda: count(folder("causal_gqa"), 0, 16), "expected a row or more"),
        (lambda: count(tmp_path, 64, 16), "expected the IR of a generated module"),
        (lambda: count(print, 64, 16), "belongs to no generated module"),
    ):
        with pytest.raises(AttngenError, match=sentence):
            wrong()


def test_the_ir_is_found_beside_a_module() -> None:
    module = importlib.import_module("generated.causal_gqa")
    assert ir_of(module).meaning == ir_of(module.attention).meaning == ir_of(folder("causal_gqa")).meaning


MEASURED = {  # ms of a forward and of a backward on one H200, 32 query heads on 8 (docs/perf-log.md, section 41)
    ("causal", 64, 1, 65536): (33.95, 89.1),
    ("causal", 64, 2, 8192): (1.185, 2.92),
    ("causal", 128, 1, 65536): (54.9, 171.0),
    ("causal", 128, 2, 8192): (1.82, 5.34),
    ("causal", 128, 1, 131072): (217.1, 691.6),
    ("window", 64, 1, 65536): (1.51, 3.67),
    ("window", 64, 2, 8192): (0.365, 0.932),
    ("window", 128, 1, 65536): (2.137, 6.41),
    ("window", 128, 2, 8192): (0.522, 1.70),
    ("documents", 64, 1, 65536): (0.977, 2.70),
    ("documents", 64, 2, 8192): (0.259, 0.72),
    ("documents", 128, 1, 65536): (1.57, 4.29),
    ("documents", 128, 2, 8192): (0.396, 1.13),
}
OF_MASKS = {"causal": "causal_gqa", "window": "window_gqa", "documents": "packed_document_gqa"}


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_launches_are_predicted_within_a_tenth_of_what_was_measured(case: tuple[str, int, int, int]) -> None:
    mask, dim, sequences, rows = case
    ends = {"cu_seqlens": [*range(0, rows, 1000), rows]} if mask == "documents" else {}
    visible = count(folder(OF_MASKS[mask]), rows, 384, **ends)
    found = predict(visible, Cluster("H200", 1, 1), Heads(batch=sequences, d_qk=dim, d_v=dim), "all_gather")
    predicted = [1e3 * costs.compute_s for costs in (found.forward, found.backward)]
    assert predicted == pytest.approx(list(MEASURED[case]), rel=0.1)
