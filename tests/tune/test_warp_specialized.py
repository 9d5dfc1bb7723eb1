"""Tuning of kernels that a backend divides into roles: which rows compete, who wins, what the table keeps, what a
build takes from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.devices import CLASSES
from attngen.errors import AttngenError
from attngen.heuristics import RANGES, SHORT_ROWS
from attngen.ir.graph import Config, Module
from attngen.ir.text import parse_module, print_module
from attngen.lowering.pipeline import lower
from attngen.lowering.pipeline import unspecialized as sentences
from attngen.schedule.table import Entry, Table, WarpSpecialized, read_table, schedule_of
from attngen.spec import Spec, load_spec, make_spec
from attngen.spec.model import Schedule
from attngen.targets.common.base import CompileReport
from attngen.targets.hopper.configs.common import config as usual_config
from attngen.targets.hopper.toolchain.resources import sram_bytes
from attngen.targets.registry import SPECIALIZERS
from attngen.tiles.classes import key
from attngen.tune import measure, run, summary
from attngen.tune.measure import Bench
from attngen.tune.tuner import Cell, Outcome, Plan, compete, home, plan
from attngen.tune.workers import Lost
from tests.helpers import spec
from tests.tune.fakes import Gpu, tile

LARGE = [rows for limit, rows in RANGES if limit != SHORT_ROWS]
USUAL = "128x128x4x2 TMA hopper"  # of causal_mqa, whose heads have 64 columns


@cache
def planned(name: str = "causal_mqa", device: str = "sm90") -> Plan:
    return plan(spec(name), device)


def warp_specialized(name: str = "causal_mqa") -> list[str]:
    return [tile(row) for row in planned(name).searches["fwd", "bf16", False].warp_specialized]


# ---------------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "causal_mqa",
            "64x64x2 64x64x3 64x128x2 64x128x3 128x64x2 128x64x3 128x128x2 128x128x3 192x64x2 192x64x3 192x128x2 192x128x3",
        ),
        ("causal_gqa", "64x64x2 64x64x3 64x128x2 64x128x3 128x64x2 128x64x3 128x128x2 128x128x3 192x64x2 192x64x3"),
        ("causal_d256", "64x64x2 64x64x3 128x64x2"),
        (
            "dense_bias_dropout_mha",
            "64x64x2 64x64x3 128x64x2 128x64x3 192x64x2 192x64x3",
        ),  # each score has a number of its own
        ("butterfly_gqa", "64x64x2 64x64x3"),  # tiles divide blocks
        ("mla_dims", "64x64x2 64x64x3 64x128x2 128x64x2 128x64x3 128x128x2 192x64x2 192x64x3"),
        ("causal_fp32", ""),
        ("decode_mla", "64x64x2 64x64x2"),  # of few and of more rows that share a latent
    ],
)
def test_rows_that_compete(name: str, expected: str) -> None:
    found = [
        f"{config.block_q}x{config.block_kv}x{config.num_stages}"
        for s in planned(name).searches.values()
        for config in s.warp_specialized
    ]
    assert found == expected.split()


def test_rows_compete_for_the_forward_of_many_rows_on_the_device_of_the_backend() -> None:
    assert [of for of, found in planned().searches.items() if found.warp_specialized] == [("fwd", "bf16", False)]
    assert not any(found.warp_specialized for found in planned(device="sm80").searches.values())
    found = planned().searches["fwd", "bf16", False]
    assert found.rows[0] == found.kept[0] and set(found.rows) == {*found.kept, *found.warp_specialized}


@pytest.mark.parametrize(
    "name", ["causal_mqa", "causal_gqa", "causal_d256", "document_gqa", "block_sparse_mha", "dense_bias_dropout_mha"]
)
def test_all_of_them_are_proven_and_fit_and_the_usual_config_is_one(name: str) -> None:
    for config, module in planned(name).warp_specialized.items():  # the verifier holds its rules against each
        assert module.configs("fwd", "hopper") == (config,) and config.min_rows == 0
        assert sram_bytes(module, module.warp_specialized[0], config) <= CLASSES["sm90"].smem_per_block
    assert usual_config(planned(name).whole) in planned(name).warp_specialized
    assert f"  and divided into roles: {warp_specialized(name)[0]}, " in "\n".join(summary.candidates(planned(name)))


# ---------------------------------------------------------------------------------------------- who wins


def competed(
    times: Mapping[str, float | str | Lost], rows: int = 4096, name: str = "causal_mqa", **others: Any
) -> Outcome:
    """What is found of the forward, with a GPU that takes a millisecond for all but what is given."""
    found = planned(name).searches["fwd", "bf16", rows <= SHORT_ROWS]
    return compete(Cell(name, "fwd", rows, "bf16"), planned(name), found.rows, Gpu(dict(times)), **others)


def portable(at: int = 2) -> str:
    return tile(planned().searches["fwd", "bf16", False].kept[at])


def test_the_fastest_of_each_kind_is_kept_and_the_warp_specialized_ones_that_beat_it() -> None:
    found = competed({USUAL: 0.5, warp_specialized()[0]: 0.4, warp_specialized()[1]: 0.79, portable(): 0.8})
    entry = found.entry(planned(), "3.6.0")
    assert entry is not None and entry.warp_specialized is not None and entry.ms == 0.8
    assert [(one.backend, one.schedule["block_q"], one.ms) for one in entry.warp_specialized] == [
        ("hopper", 64, 0.4),
        ("hopper", 128, 0.5),
    ]
    (line, *_) = summary.measured(planned(), found)
    assert f"{warp_specialized()[0]} 0.4000" in line and "150.0%" in line
    assert "faster than the model's choice in 1 of 1, by 150.0%" in "\n".join(summary.totals([(planned(), found)]))


def test_a_portable_winner_is_kept_where_no_warp_specialized_kernel_is_faster() -> None:
    found = competed({portable(): 0.5, USUAL: 0.495})
    entry = found.entry(planned(), "3.6.0")
    assert entry is not None and (entry.ms, entry.warp_specialized) == (0.5, ())
    few = competed({}, rows=SHORT_ROWS).entry(planned(), "3.6.0")
    assert few is not None and few.warp_specialized is None


def test_one_without_a_certificate_is_left_out_and_the_summary_says_why() -> None:
    rows = planned().searches["fwd", "bf16", False].warp_specialized
    gpu = Gpu({tile(rows[0]): 0.1, tile(rows[1]): 0.5})
    cell, kept = Cell("causal_mqa", "fwd", 4096, "bf16"), planned().searches["fwd", "bf16", False].rows
    found = compete(cell, planned(), kept, gpu, faults={rows[0]: "spills 980 bytes; expected none"})
    assert (tile(rows[0]),) not in gpu.asked and (tile(rows[1]),) in gpu.asked
    assert [tile(t.config) for t in found.warp_specialized(planned())] == [tile(rows[1])]
    assert f"    {tile(rows[0])} gets no certificate: it spills 980 bytes; expected none" in list(
        summary.measured(planned(), found)
    )


def test_that_all_fail_says_something_of_them_only_for_want_of_certificates() -> None:
    """Where Triton or the driver cannot run them, the table is as if nothing had been measured."""
    rows = planned().searches["fwd", "bf16", False].warp_specialized
    fails = dict.fromkeys(warp_specialized(), "RuntimeError: Triton 3.5.0 does not run kernels for hopper")
    for outcome, expected in (
        (competed(fails), None),
        (competed({}, faults=dict.fromkeys(rows, "spills 980 bytes")), ()),
        (competed(fails, faults=dict.fromkeys(rows[1:], "spills 980 bytes")), None),
        (competed({**fails, USUAL: 2.0}), ()),
    ):
        entry = outcome.entry(planned(), "3.6.0")
        assert entry is not None and entry.warp_specialized == expected


def test_warp_specialized_kernels_that_hang_leave_the_portable_ones_in() -> None:
    found = competed({name: Lost("gave no answer within 30 s") for name in warp_specialized()} | {portable(): 0.5})
    entry = found.entry(planned(), "3.6.0")
    assert (
        entry is not None
        and (entry.ms, entry.warp_specialized) == (0.5, None)
        and found.left_out == len(warp_specialized()) - 3
    )


def test_a_run_measures_what_has_a_certificate(tmp_path: Path) -> None:
    first, second = planned().searches["fwd", "bf16", False].warp_specialized[:2]
    gpu, path = (
        Gpu({tile(first): 0.1, tile(second): 0.5}, faults={("causal_mqa", first): "spills 980 bytes"}),
        tmp_path / "r.jsonl",
    )
    results = run.read_results(path, "H200", [planned()])
    assert len(list(run.tune([planned()], gpu, results, float("inf")))) == len(list(planned().cells()))
    assert first not in [row for _, row in gpu.compiled] and second in [row for _, row in gpu.compiled]
    table = run.tabled(Table("H200"), [planned()], run.read_results(path, "H200", [planned()]))
    faster = {k.max_rows: [tuple(schedule_of(second).values())] for k, e in table.entries.items() if e.warp_specialized}
    assert list(faster) == [2048, 8192, None]
    assert all(
        [tuple(d.schedule.values()) for d in e.warp_specialized] == faster[k.max_rows]
        for k, e in table.entries.items()
        if e.warp_specialized
    )


def test_certificates_are_of_the_modules_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compile_all(jobs: list[Any], workers: int | None) -> Any:
        for job in jobs:
            seen.append((job.file.parent.name, job.file.name, dict(job.tiles)["BLOCK_Q"]))
            module, config = next(
                (m, r)
                for r, m in planned("causal_d256").warp_specialized.items()
                if home("causal_d256", r) == job.file.parent.name
            )
            need = sram_bytes(module, module.warp_specialized[0], config)
            yield (
                "no such instruction"
                if config.num_stages == 3
                else CompileReport(need, 168, 8 * (config.block_q == 64), 1, "3.6.0", 0.0)
            )

    hopper = SPECIALIZERS["hopper"]
    monkeypatch.setitem(
        SPECIALIZERS, "hopper", replace(hopper, compiler=replace(hopper.compiler, compile_all=compile_all))
    )
    with run.machine([planned("causal_d256")], {}, 1) as gpu:
        faults = gpu.faults([planned("causal_d256")])
        assert gpu.faults([planned("causal_fp32")]) == {}
    assert seen == [
        (f"causal_d256-hopper-{name}", "hopper.py", int(name.split("x")[0]))
        for name in ("64x64x4x2", "64x64x4x3", "128x64x4x2")
    ]
    assert {tile(config): why for (_, config), why in faults.items()} == {
        "64x64x4x2 TMA hopper": "spills 8 bytes; expected none",
        "64x64x4x3 TMA hopper": "does not compile: no such instruction",
    }


# ---------------------------------------------------------------------------------------------- how it is measured


class Fast:
    """Stands in for a divided kernel: launches the portable one, under a schedule that the interpreter does in no
    time."""

    def __init__(self, kernels: Any) -> None:
        self.kernels, self.params, self.launched = kernels, (), 0

    def __getitem__(self, grid: object) -> Any:
        def launch(*args: object, STAGES: int, num_warps: int, **options: Any) -> Any:
            self.launched += 1
            return self.kernels.fwd[grid](*args, **options, num_warps=4, num_stages=1, TMA=False)

        return launch


def test_a_warp_specialized_kernel_is_launched_in_the_module_of_its_row(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("name: small\nhead_dim: 64\nmask: causal\nbackward: false\n")
    made = plan(load_spec(path), "sm90")
    row = next(iter(made.warp_specialized))
    write_module(render(made.module), tmp_path / "small")
    write_module(render(made.warp_specialized[row]), tmp_path / home("small", row))
    monkeypatch.setattr(measure, "TOKENS", 64)
    monkeypatch.setattr(measure, "HIDDEN", 64)
    bench = Bench(
        tmp_path,
        {"small": path},
        device,
        lambda calls, rounds: {name: SimpleNamespace(rounds=(call(0) and 1.0 or 1.0,)) for name, call in calls.items()},
    )
    mine = bench._module(home("small", row))
    file = SimpleNamespace(fwd=Fast(mine.kernels), DESCRIBED={"fwd": ()}, PERSISTENT={})
    monkeypatch.setattr(mine.runtime, "divided", lambda kernels, backend: file)
    monkeypatch.setattr(
        mine.runtime, "homes", lambda *_: [(file, None, {"BLOCK_Q": 64, "BLOCK_KV": 64, "STAGES": 2, "num_warps": 4})]
    )
    cell = Cell("small", "fwd", 64, "bf16")
    assert bench.measure(cell, [made.searches["fwd", "bf16", False].kept[0], row], 1) == [(1.0,), (1.0,)]
    assert file.fwd.launched == 2 and isinstance(file.fwd, Fast)
    monkeypatch.setattr(mine.runtime, "divided", lambda kernels, backend: None)
    with pytest.raises(RuntimeError, match="does not run kernels for hopper"):
        bench.measure(cell, [row], 1)


# ---------------------------------------------------------------------------------------------- from the table to a build


TEXT = {
    "name": "narrow",
    "head_dim": 64,
    "mask": {"all_of": ["causal", {"sliding_window": {"left": 99}}, "document"]},
}  # portable, where nothing was measured
TILES = {"block_q": 192, "block_kv": 64, "num_warps": 4, "num_stages": 2, "tma": True}
OTHER = {**TILES, "block_q": 64}


def tables(
    faster: Mapping[int | None, tuple[dict[str, int], ...] | None], data: Mapping[str, Any] = TEXT
) -> dict[str, Table]:
    """A table that comes back from its text, with what is faster than the portable kernel by range; None: that was
    not measured."""
    early = lower(make_spec({**data, "schedule": {"backend": "triton"}}), "use-tma")
    small = {"block_q": 64, "block_kv": 64, "num_warps": 4, "num_stages": 2, "tma": False}
    entries = {}
    for limit, found in faster.items():
        rivals = (
            None
            if found is None
            else tuple(WarpSpecialized("hopper", schedule, 0.5 + 0.1 * i) for i, schedule in enumerate(found))
        )
        entries[key(early, early.kernel("fwd"), 2, limit)] = Entry(small, 1.0, small, 1.0, "3.6.0", rivals)
    return {"sm90": Table("H200", "a GPU", "2", "3.6.0", entries)}


def rows_of(
    faster: Mapping[int | None, tuple[dict[str, int], ...] | None], data: Mapping[str, Any] = TEXT, **schedule: Any
) -> tuple[Config, ...]:
    """The rows of the divided forwards of a spec, with a table."""
    made = make_spec({**data, **({"schedule": schedule} if schedule else {})})
    return tuple(row for _, row in lower(made, tables=tables(faster, data)).stand_ins("fwd"))


EVERYWHERE = {2048: (TILES,), 8192: (OTHER, TILES), None: (TILES, OTHER)}


def test_a_winner_of_the_table_divides_the_kernel_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(tables(EVERYWHERE)["sm90"].text())
    table = read_table(tmp_path / "t.json")
    assert table == tables(EVERYWHERE)["sm90"]
    module = lower(make_spec(TEXT), tables={"sm90": table})
    text = print_module(module)
    assert (
        "  sm90 bytes=2 rows>512 : BLOCK_Q=192 BLOCK_KV=64 num_warps=4 num_stages=2 TMA=1 measured backend=hopper\n"
        in text
    )
    assert (
        "warp_group @consumer instances(3) rows(64) warps(4) registers(160)" in text
        and print_module(parse_module(text)) == text
    )
    config = '{"BLOCK_Q": 192, "BLOCK_KV": 64, "STAGES": 2, "num_warps": 4}'
    made = f'("sm90", 2, "hopper"): (\n            (512, None),\n            (None, {config}),'
    assert made in render(module)["kernels.py"]
    assert [r.block_q for r in module.configs("fwd") if (r.device, r.elem_bytes, r.max_rows) == ("sm90", 2, None)] == [
        64
    ]  # its own row stays


@pytest.mark.parametrize(
    ("faster", "above"),
    [
        (EVERYWHERE, 512),
        ({**EVERYWHERE, 2048: ()}, 2048),
        ({**EVERYWHERE, 8192: ()}, 8192),
        ({8192: (TILES,), None: (TILES,)}, 2048),  # nothing is known of fewer rows, and heads are narrow
        ({**EVERYWHERE, None: ()}, None),
        ({**EVERYWHERE, None: None}, None),
        ({2048: None, 8192: None, None: None}, None),
        ({**EVERYWHERE, None: ({**TILES, "block_q": 256},)}, None),  # no tile of this kernel
    ],
)
def test_the_portable_row_stays_where_it_won(faster: Any, above: int | None) -> None:
    assert [config.min_rows for config in rows_of(faster)] == ([] if above is None else [above])


def test_another_tile_that_wins_for_fewer_rows_has_a_kernel_of_its_own() -> None:
    made = {**EVERYWHERE, 2048: (OTHER,), 8192: (TILES,)}
    assert [(r.block_q, r.min_rows, r.max_rows) for r in rows_of(made)] == [(64, 64, 2048), (192, 2048, None)]
    module = lower(make_spec(TEXT), tables=tables(made))
    assert [(k.name, k.stands_for) for k in module.warp_specialized] == [
        ("fwd", "fwd"),
        ("fwd_long", "fwd"),
        ("bwd", "bwd"),
        ("jvp", "jvp"),
    ]
    configs = render(module)["kernels.py"].partition('("sm90", 2, "hopper"): (\n')[2].splitlines()[:3]
    assert [line.strip() for line in configs] == [
        "(64, None),",
        '(2048, {"BLOCK_Q": 64, "BLOCK_KV": 64, "STAGES": 2, "num_warps": 4}),',
        '(None, {"BLOCK_Q": 192, "BLOCK_KV": 64, "STAGES": 2, "num_warps": 4, "KERNEL": "fwd_long"}),',
    ]


def test_where_nothing_was_measured_the_expectation_stands() -> None:
    wide = {**TEXT, "head_dim": 128}
    mine = {**TILES, "block_q": 128}
    shown = [
        [(r.block_q, r.min_rows, r.measured) for r in rows_of(faster, wide)]
        for faster in ({}, {None: (mine,)}, {2048: ()}, {None: ()})
    ]
    assert shown == [[(128, 64, False)], [(128, 64, True)], [(128, 2048, False)], []]


def test_of_rows_that_are_as_fast_the_one_with_the_most_ranges_is_taken() -> None:
    made = tables({**EVERYWHERE, 2048: (OTHER,)})["sm90"]
    for ms, expected in ((0.505, [(64, 64)]), (0.52, [(64, 64), (192, 2048)])):
        rivals = (WarpSpecialized("hopper", TILES, 0.5), WarpSpecialized("hopper", OTHER, ms))
        entries = {k: replace(e, warp_specialized=rivals) if k.max_rows is None else e for k, e in made.entries.items()}
        rows = lower(make_spec(TEXT), tables={"sm90": replace(made, entries=entries)}).stand_ins("fwd")
        assert [(config.block_q, config.min_rows) for _, config in rows] == expected


def test_the_spec_comes_before_the_table() -> None:
    assert rows_of(EVERYWHERE, backend="triton") == rows_of(EVERYWHERE, block_q=64) == ()
    assert rows_of(EVERYWHERE, {**TEXT, "mask": "causal"}, order="kv_outer") == ()
    (asked,) = rows_of({None: ()}, backend="hopper")
    (tiled,) = rows_of(EVERYWHERE, backend="hopper", block_q=64)
    (tuned,) = rows_of(EVERYWHERE, backend="hopper")
    assert [(r.block_q, r.min_rows, r.measured) for r in (asked, tiled, tuned)] == [
        (128, 0, False),
        (64, 0, False),
        (192, 0, True),
    ]


@pytest.mark.parametrize(
    ("faster", "above"),
    [
        ({}, 0),
        ({16: True, None: True}, 0),
        ({16: False, None: True}, 16),
        ({16: True, None: False}, None),
        ({None: True}, 0),
    ],
)
def test_the_decoding_of_latents_is_warp_specialized_where_that_was_measured_to_be_faster(
    faster: dict[int | None, bool], above: int | None
) -> None:
    """By the rows that share a latent; where nothing was measured, for any number."""
    early = lower(spec("decode_mla").model_copy(update={"schedule": Schedule(backend="triton")}), "use-tma")
    small = {"block_q": 16, "block_kv": 64, "num_warps": 4, "num_stages": 2, "tma": False}
    mine = {"block_q": 64, "block_kv": 64, "num_warps": 4, "num_stages": 2, "tma": True}
    entries = {
        key(early, early.kernel("decode"), 2, limit): Entry(
            small, 1.0, small, 1.0, "3.6.0", (WarpSpecialized("hopper", mine, 0.5),) if won else ()
        )
        for limit, won in faster.items()
    }
    made = lower(spec("decode_mla"), tables={"sm90": Table("H200", "a GPU", "2", "3.6.0", entries)})
    assert [config.min_rows for _, config in made.stand_ins("decode")] == ([] if above is None else [above])


def test_a_kernel_that_cannot_be_warp_specialized_leaves_the_table_alone() -> None:
    data = {**TEXT, "mask": {"block_sparse": {"block": 32}}}
    assert rows_of({None: (TILES,)}, data) == ()


def test_a_table_that_names_no_backend_is_refused(tmp_path: Path) -> None:
    text = tables(EVERYWHERE)["sm90"].text()
    (tmp_path / "t.json").write_text(text.replace('"backend": "hopper"', '"backend": "hoper"'))
    with pytest.raises(
        AttngenError, match="t.json: cannot be read .*`hoper` divides no kernels; did you mean `hopper`"
    ):
        read_table(tmp_path / "t.json")


# ---------------------------------------------------------------------------------------------- why there is none


def why(faster: Mapping[int | None, Any], kernel: str = "fwd", **data: Any) -> list[str]:
    made: Spec = make_spec({**TEXT, **data})
    before: Module = lower(made, "dce", {})
    found = "On sm90 the kernel @{} has no row for hopper: ".format
    return [said for said in sentences(made, before, tables(faster)) if said.startswith(found(kernel))]


def test_a_sentence_says_why_a_kernel_has_no_row() -> None:
    no_row = "On sm90 the kernel @fwd has no row for hopper: "
    narrow = "its heads have 64 columns, and with such a mask and modifiers the portable kernel is about as fast."
    none = partial(why, {})
    assert none() == [no_row + narrow] and why(EVERYWHERE) == none(schedule={"backend": "hopper"}) == []
    assert why({None: ()}) == [f"{no_row}the portable kernel was measured to be as fast (attngen/schedule, H200)."]
    assert none(schedule={"backend": "triton"}) == [f"{no_row}the spec says `schedule: {{backend: triton}}`."]
    (said,) = none(schedule={"block_q": 64, "stages": 2})
    assert said.startswith(f"{no_row}the spec's `schedule` has block_q and stages, which is for portable kernels")
    assert none(head_dim=48) == [no_row + narrow.replace("64", "48")]
    dropping = "with dropout and such heads, mask and modifiers the portable kernel is about as fast."
    assert none(dropout=True) == [no_row + dropping]
    heavy = {
        "expr": "floor(sqrt(abs(q_idx - kv_idx))) % 3 == 0 and int(log(1.0 + kv_idx) * 2.5) != round(0.25 * (q_idx + h))"
    }
    (said,) = none(head_dim=128, mask=heavy)
    assert said.startswith(f"{no_row}its mask and modifiers take ") and said.endswith(
        "of more than 16 registers may spill."
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"mask": "causal"}, ""),
        ({"mask": "causal", "heads": {"sharing": "gqa"}}, ""),
        ({}, None),  # there is no such kernel
        ({"mask": {"expr": "kv_idx + q_idx <= q_len"}}, None),  # it is not known whose turn comes
        ({"mask": {"sliding_window": {"left": 99}}, "backward": {"deterministic": False}}, ""),
        ({"mask": "causal", "score": "alibi"}, ""),
        ({"mask": "causal", "dropout": True}, None),
        (
            {"head_dim": 128, "mask": "causal", "score": ["alibi", {"softcap": 50.0}]},
            "its mask and modifiers take 26 operations for each score, and of more than 23 registers may spill.",
        ),
        (
            {"mask": "none", "head_dim": {"qk": 128, "v": 64}},
            "its heads have 128 and 64 columns; expected as many of q and k as of v, a power of two, or 192 and 128.",
        ),
        ({"mask": "none", "dtype": "fp32"}, "no dtype of the spec has 16 bits."),
        (
            {"mask": "none", "score": {"expr": "s + t[q_idx, kv_idx]", "params": {"t": {"tensor": ["Nq", "Nk"]}}}},
            "what is read for each score is no tensor [B, Hq, Nq, Nk] of the element type.",
        ),
        ({"mask": "causal", "schedule": {"backend": "triton"}}, "the spec says `schedule: {backend: triton}`."),
    ],
)
def test_a_sentence_says_why_the_backward_in_one_pass_has_none(data: dict[str, Any], reason: str | None) -> None:
    assert why({}, "bwd", **data) == ([f"On sm90 the kernel @bwd has no row for hopper: {reason}"] if reason else [])
