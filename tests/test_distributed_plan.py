"""Plans of context parallelism: counts of visible scores against the masks' hand-written oracles, balance, transfers,
and the proof that each visible pair is computed once."""

from __future__ import annotations

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

from attngen.conformance.cases import make_mask_inputs
from attngen.conformance.oracle import reference_mask
from attngen.distributed.balance import Balanced, balance
from attngen.distributed.layout import Layout
from attngen.distributed.proof import PlanError, verify
from attngen.distributed.transfers import METHODS, Plan, elements, plan
from attngen.distributed.visible import Visible, count
from attngen.errors import AttngenError
from attngen.ir.sizes import Sizes
from attngen.spec import Spec, load_spec
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
    assert not ring.is_active(0, 1)
    assert ring.source(3, 1) == 2


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
    n, chunk = 128 * 1024, 128
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
