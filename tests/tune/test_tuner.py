"""Tuning with a fake GPU: pruning, budgets, schedules that crash, winners, and results."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import count
from math import prod

import pytest

from attngen.errors import AttngenError
from attngen.heuristics import RANGES, SHORT_ROWS
from attngen.schedule.table import Table, read_table, schedule_of
from attngen.targets.triton import cost as model
from attngen.targets.triton.cost import cost, schedule_key, spills
from attngen.targets.triton.fit import why_not_fit
from attngen.tune import run, summary, tuner
from attngen.tune.candidates import DEEP, MOST, REGISTERS, SLOWER, SPILLS, STREAMS, WHY_NOT_FIT, choices, search
from attngen.tune.tuner import FINALISTS, Cell, Outcome, Plan, Tried, compare, compete, outcome, plan, spearman
from attngen.tune.workers import Lost
from tests.helpers import spec
from tests.tune.fakes import BY, Gpu, tile

CELL = Cell("causal_mha", "fwd", 1024, "bf16")


@cache
def planned(name: str = "causal_mha") -> Plan:
    return plan(spec(name), "sm90")


def candidates(kernel: str = "fwd", few: bool = False, name: str = "causal_mha"):
    return planned(name).searches[kernel, "bf16", few].kept


def kept(kernel: str = "fwd", few: bool = False) -> list[str]:
    return [tile(config) for config in candidates(kernel, few)]


# ---------------------------------------------------------------------------------------------- candidates


@pytest.mark.share(16)
@pytest.mark.parametrize("name", ["causal_mha", "causal_fp32", "butterfly_gqa", "causal_d256"])
def test_every_schedule_of_the_grid_is_kept_or_rejected_for_one_reason(name):
    p = planned(name)
    for (kernel, dtype, few), found in p.searches.items():
        assert len(set(found.grid)) == len(found.grid) == len(found.kept) + sum(found.rejected.values())
        mine = [
            r for r in p.module.configs(kernel) if (r.device, r.elem_bytes) == ("sm90", 4 if dtype == "fp32" else 2)
        ]
        chosen = next(r for r in mine if r.max_rows is None or (few and r.max_rows >= SHORT_ROWS))
        assert found.kept[0] == replace(chosen, max_rows=SHORT_ROWS if few else None) and len(found.kept) <= MOST
        # For so few rows descriptors cost the host more than they save.
        assert not (few and any(config.tma for config in found.grid))
        most = p.module.blocks.size if p.module.blocks else 128
        assert all(max(r.block_q, r.block_kv) <= most for r in found.grid)


def test_kept_schedules_have_modelled_costs_near_the_best():
    p = planned()
    for (kernel, *_), found in p.searches.items():
        prices = [cost(p.placed, p.placed.kernel(kernel), config) for config in found.kept]
        assert prices == sorted(prices) and prices[-1] <= SLOWER * prices[0]


def test_schedules_are_rejected_for_the_models_reasons(monkeypatch):
    p = planned()
    found, kernel = p.searches["dq", "bf16", False], p.placed.kernel("dq")
    assert set(found.rejected) >= {WHY_NOT_FIT, REGISTERS, STREAMS, DEEP}
    assert found.rejected[WHY_NOT_FIT] == sum(
        why_not_fit(p.placed, kernel, config) is not None for config in found.grid
    )
    assert len(found.grid) == 256 == prod(map(len, choices(found.grid[0]).values()))
    chosen, second, *_ = found.kept
    monkeypatch.setattr(model, "_listed", lambda: frozenset([schedule_key(p.placed, kernel, second)]))
    again = search(p.placed, kernel, chosen)
    assert again.rejected[SPILLS] == 1 and second not in again.kept


@pytest.mark.share(8)
def test_cells_are_all_kernels_for_one_number_of_rows_after_another():
    cells = [cell for cell, _ in planned().cells()]
    assert cells[4] == CELL and [c.rows for c in cells] == [n for _, n in RANGES for _ in range(4)]
    # @delta runs only in calls without a gradient of q.
    assert [c.kernel for c in cells[:4]] == ["fwd", "dq", "dkdv", "jvp"]
    assert all(
        (found is planned().searches[c.kernel, "bf16", True]) == (c.rows == SHORT_ROWS)
        for c, found in planned().cells()
    )
    # @packed uses the entries of @fwd.
    assert [c.kernel for c, _ in planned("causal_gqa").cells()] == [c.kernel for c in cells]
    assert {c.dtype for c, _ in planned("causal_fp32").cells()} == {"fp32"}


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("name", "page"), [("decode_gqa", 0), ("decode_paged_gqa", 64), ("decode_window_paged_gqa", 16)]
)
def test_kernels_with_a_cache_are_measured_too(name, page):
    """Split-KV kernels are measured for few rows of queries and for more; one tile has all rows."""
    p = planned(name)
    cells = [cell for cell, _ in p.cells()]
    assert [(c.kernel, c.rows) for c in cells if c.kernel not in ("fwd", "prefill")] == [("decode", 4), ("decode", 64)]
    assert [c.rows for c in cells if c.kernel == "prefill"] == [n for _, n in RANGES]
    keys = [p.key(c) for c in cells if c.kernel == "decode"]
    assert (
        [k.max_rows for k in keys] == [16, None]
        and {k.kernel for k in keys} == {"decode"}
        and keys[0].mask == keys[1].mask
    )
    assert [p.ahead(c).rows for c in cells[:3]] == [4, 64, SHORT_ROWS]
    for few in (True, False):
        kept = candidates("decode", few, name)
        assert {r.block_q for r in kept} == {16 if few else 64} and len(kept) > 5
        described = [r.block_kv for r in kept if r.tma]
        assert all(page % n == 0 for n in described) if page else 128 in described
        assert not (page == 16 and described)


# ---------------------------------------------------------------------------------------------- winners


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("fastest", "drift", "wins"),
    [
        (0.9, 0.0, True),
        (0.99, 0.0, False),  # faster by less than noise
        (0.95, 0.02, True),  # all slow down equally
        ((0.9, 0.9, 0.9, 1.1, 0.9, 0.9, 0.9), 0.0, True),
        ((0.9, 0.9, 0.9, 1.1, 0.9, 0.9, 1.1), 0.0, False),  # slower in two rounds
    ],
)
def test_the_fastest_wins_if_it_is_faster_in_all_rounds_but_one(fastest, drift, wins):
    gpu = Gpu({kept()[4]: fastest}, drift=drift)
    found = compete(CELL, planned(), candidates(), gpu)
    assert tile(found.winner(planned()).config) == kept()[4 if wins else 0]
    assert gpu.asked[: len(kept())] == [(name,) for name in kept()]
    assert len(gpu.asked[-1]) == FINALISTS + 1 and {kept()[0], kept()[4]} <= set(gpu.asked[-1])


def test_schedules_that_crash_hang_spill_or_are_wrong_lose_and_the_others_continue():
    lost = {
        kept()[1]: Lost("gave no answer within 30 s"),
        kept()[2]: "spills 8 bytes",
        kept()[3]: "its results are 1.0 away",
    }
    found = compete(CELL, planned(), candidates(), Gpu({**lost, kept()[5]: 0.5}))
    assert [t.failed for t in found.tried[:5]] == ["", *(str(x) for x in lost.values()), ""]
    assert tile(found.winner(planned()).config) == kept()[5]
    text = "\n".join(summary.measured(planned(), found))
    assert f"{kept()[1]} gave no answer within 30 s" in text and "1 spill" in text and "100.0%" in text


def test_after_too_many_lost_workers_the_rest_is_left_out():
    lost = {name: Lost("gave no answer within 30 s") for name in kept()[1:]}
    found = compete(CELL, planned(), candidates(), Gpu(lost))
    assert [bool(t.failed) for t in found.tried] == [False, True, True, True] and found.left_out == len(kept()) - 4


def test_if_the_models_choice_fails_any_other_wins():
    found = compete(CELL, planned(), candidates(), Gpu({kept()[0]: "spills 8 bytes", kept()[1]: 0.999}))
    made = found.entry(planned(), "3.6.0")
    assert (made.schedule, made.model, made.model_ms) == (
        schedule_of(candidates()[1]),
        schedule_of(candidates()[0]),
        None,
    )


def test_if_nothing_runs_there_is_no_entry():
    found = compete(CELL, planned(), candidates(), Gpu({}, default="spills 8 bytes"))
    assert found.winner(planned()) is found.entry(planned(), "3") is found.correlation() is None
    assert "none" in "\n".join(summary.measured(planned(), found))


def test_a_schedule_that_runs_only_by_itself_keeps_its_time():
    class Fragile(Gpu):
        def __call__(self, request, limit_s):
            if len(request[1]) > 1:
                raise Lost("ended")
            return super().__call__(request, limit_s)

    found = compete(CELL, planned(), candidates(), Fragile({kept()[3]: 0.5}))
    assert tile(found.winner(planned()).config) == kept()[3] and not any(t.rounds for t in found.tried)


def test_a_schedule_that_another_triton_spills_does_not_win(monkeypatch):
    """A later Triton compiles it with spills, so the table made again from the results omits it."""
    found = compete(CELL, planned(), candidates(), Gpu({kept()[3]: 0.5, kept()[4]: 0.6}))
    monkeypatch.setattr(tuner, "usable", lambda module, kernel, config: tile(config) != kept()[3])
    assert tile(found.winner(planned()).config) == kept()[4]


def test_a_budget_leaves_out_the_schedules_with_the_highest_modelled_cost(monkeypatch):
    clock = count()
    monkeypatch.setattr(tuner.time, "perf_counter", lambda: float(next(clock)))
    found = compete(CELL, planned(), candidates(), Gpu({}), budget_s=3.5)
    assert [tile(t.config) for t in found.tried] == kept()[:4] and found.left_out == len(kept()) - 4
    assert f"{found.left_out} left out" in "\n".join(summary.measured(planned(), found))
    assert len(compete(CELL, planned(), candidates(), Gpu({}), budget_s=0).tried) == 1  # at least the model's choice


@pytest.mark.parametrize(
    ("a", "b", "rho"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 2, 3], [1, 3, 2, 4], 0.9486833),
        ([1, 1], [1, 2], None),
        ([], [], None),
    ],
)
def test_spearman_correlation(a, b, rho):
    assert spearman(a, b) == (None if rho is None else pytest.approx(rho))


def test_the_pruned_search_is_compared_with_the_whole_grid(monkeypatch):
    best = "128x64x4x4"
    assert best not in kept()
    gpu = Gpu({best: 0.4, kept()[2]: 0.5})
    p, pruned = planned(), planned().searches["fwd", "bf16", False]
    kernel = p.placed.kernel("fwd")
    can = sum(
        not why_not_fit(p.placed, kernel, config) and not spills(p.placed, kernel, config) for config in pruned.grid
    )
    clock = count()  # read before each schedule and at the end, so each takes a second
    monkeypatch.setattr(tuner.time, "perf_counter", lambda: float(next(clock)))
    found = compare(CELL, p, pruned, gpu, lambda cell, some: len(some) / 10)
    assert (found.pruned, found.whole) == (MOST, can) and found.loss == pytest.approx(0.25)
    assert (tile(found.pruned_best.config), tile(found.whole_best.config)) == (kept()[2], best)
    # Seconds of compilation and of measurement
    assert found.pruned_s == pytest.approx(MOST / 10 + MOST)
    assert found.whole_s == pytest.approx(can / 10 + can)
    assert "25.0%" in summary.compared(CELL, found)
    assert compare(CELL, p, pruned, Gpu({}, "no"), lambda cell, some: 0.0) is None


# ---------------------------------------------------------------------------------------------- results, tables


def test_an_outcome_is_read_back_from_json():
    found = compete(CELL, planned(), candidates(), Gpu({kept()[1]: "spills 8 bytes"}))
    assert outcome(json.loads(json.dumps(found.plain()))) == found


@pytest.mark.share(8)
def test_a_run_continues_where_another_stopped(tmp_path):
    path, plans = tmp_path / "results.jsonl", [planned()]
    first, gpu = run.read_results(path, "H200", plans), Gpu({kept(few=True)[1]: 0.5})
    for _, found in run.tune(plans, gpu, first, float("inf")):
        if found.cell.kernel == "dkdv":
            break  # the run stops here
    assert len(gpu.compiled) == sum(len(s.configs) for s in planned().searches.values())
    second, gpu = run.read_results(path, "H200", plans), Gpu({})
    assert list(second.outcomes) == [c for c, _ in planned().cells()][:3] and second.by == BY
    assert [o.cell for _, o in run.tune(plans, gpu, second, float("inf"))] == [c for c, _ in planned().cells()][3:]
    table = run.tabled(Table("H200"), plans, run.read_results(path, "H200", plans))
    assert len(table.entries) == 16 and table.gpu == "a GPU"
    assert table.entries[planned().key(CELL._replace(rows=SHORT_ROWS))].schedule == schedule_of(candidates(few=True)[1])
    # The schedule was kept for both kernels.
    assert [key.kernel for key, e in table.entries.items() if e.schedule != e.model] == ["fwd", "dq"]


@pytest.mark.share(8)
def test_results_of_another_device_or_of_other_kernels_do_not_count(tmp_path):
    path, plans = tmp_path / "results.jsonl", [planned()]
    run.read_results(path, "H200", plans).keep(compete(CELL, planned(), candidates(), Gpu({})), BY)
    with pytest.raises(AttngenError, match="line 1: measured on H200; expected results of H100"):
        run.read_results(path, "H100", plans)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "source": "another"}) + "\n")
    assert not run.read_results(path, "H200", plans).outcomes
    path.write_text("{}\n")
    with pytest.raises(AttngenError, match="line 1: not a result"):
        run.read_results(path, "H200", plans)


@pytest.mark.share(16)
def test_of_cells_with_one_key_the_first_counts_and_other_entries_stay():
    results = run.read_results(None, "H200", [planned(), planned("causal_padding_gqa")])
    for p, ms in ((planned(), 2.0), (planned("causal_padding_gqa"), 1.0)):
        for cell, found in p.cells():
            results.keep(Outcome(cell, tuple(Tried(config, 1.0, ms) for config in found.kept[:1]), 0, 0.0), BY)
    once = run.tabled(Table("H200"), [planned()], results)
    both = run.tabled(once, [planned("causal_padding_gqa")], results)
    assert len(once.entries) == 16 and len(both.entries) == 32
    assert {e.ms for k, e in both.entries.items() if k.heads == "mha"} == {2.0}
    assert "nothing faster" in "\n".join(summary.totals(run.known([planned()], results)))


@pytest.mark.share(16)
def test_entries_of_another_gpu_of_the_class_name_it(tmp_path):
    results = run.read_results(None, "H100", [planned()])
    for cell, found in planned().cells():
        results.keep(Outcome(cell, tuple(Tried(config, 1.0, 2.0) for config in found.kept[:1]), 0, 0.0), BY)
    before = Table("H200", gpu="NVIDIA H200", torch="1", triton="1")
    made = run.tabled(before, [planned()], results)
    assert replace(made, entries={}) == before and {e.gpu for e in made.entries.values()} == {"a GPU"}
    (path := tmp_path / "t.json").write_text(made.text())
    assert read_table(path) == made and '"gpu": "a GPU"}' in made.text()
    assert "gpu" not in run.tabled(Table("H200"), [planned()], results).text().partition("entries")[2]
