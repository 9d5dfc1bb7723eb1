"""Builds take configs of warp-specialized kernels from the table of measured schedules, or say why a kernel has
none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attngen.codegen.render import render
from attngen.errors import AttngenError
from attngen.ir import Config, Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.lowering.pipeline import unspecialized as sentences
from attngen.schedule.table import Entry, Table, WarpSpecialized, read_table
from attngen.spec import Spec, make_spec
from attngen.spec.sections import Schedule
from attngen.tiles.classes import key
from tests.helpers import spec

# Portable where nothing was measured.
TEXT = {
    "name": "narrow",
    "head_dim": 64,
    "mask": {"all_of": ["causal", {"sliding_window": {"left": 99}}, "document"]},
}
TILES = {"block_q": 192, "block_kv": 64, "num_warps": 4, "num_stages": 2, "tma": True}
OTHER = {**TILES, "block_q": 64}


def tables(
    faster: Mapping[int | None, tuple[dict[str, int], ...] | None], data: Mapping[str, Any] = TEXT
) -> dict[str, Table]:
    """Return a table with the schedules that are faster than the portable kernel, by range; None: not measured."""
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


def configs_of(
    faster: Mapping[int | None, tuple[dict[str, int], ...] | None], data: Mapping[str, Any] = TEXT, **schedule: Any
) -> tuple[Config, ...]:
    """Return the configs of the warp-specialized forwards of a spec, with a table."""
    made = make_spec({**data, **({"schedule": schedule} if schedule else {})})
    return tuple(config for _, config in lower(made, tables=tables(faster, data)).stand_ins("fwd"))


EVERYWHERE = {2048: (TILES,), 8192: (OTHER, TILES), None: (TILES, OTHER)}


@pytest.mark.share(8)
def test_a_winner_of_the_table_gives_a_warp_specialized_kernel_with_its_config(tmp_path: Path) -> None:
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
    ]  # the portable config stays


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("faster", "above"),
    [
        (EVERYWHERE, 512),
        ({**EVERYWHERE, 2048: ()}, 2048),
        ({**EVERYWHERE, 8192: ()}, 8192),
        ({8192: (TILES,), None: (TILES,)}, 2048),  # fewer rows were not measured, and heads are narrow
        ({**EVERYWHERE, None: ()}, None),
        ({**EVERYWHERE, None: None}, None),
        ({2048: None, 8192: None, None: None}, None),
        ({**EVERYWHERE, None: ({**TILES, "block_q": 256},)}, None),  # not a tile of this kernel
    ],
)
def test_the_portable_config_stays_where_it_won(faster: Any, above: int | None) -> None:
    assert [config.min_rows for config in configs_of(faster)] == ([] if above is None else [above])


@pytest.mark.share(8)
def test_another_tile_that_wins_for_fewer_rows_has_its_own_kernel() -> None:
    made = {**EVERYWHERE, 2048: (OTHER,), 8192: (TILES,)}
    assert [(r.block_q, r.min_rows, r.max_rows) for r in configs_of(made)] == [(64, 64, 2048), (192, 2048, None)]
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


@pytest.mark.share(8)
def test_without_measurements_the_heuristic_decides() -> None:
    wide = {**TEXT, "head_dim": 128}
    mine = {**TILES, "block_q": 128}
    shown = [
        [(r.block_q, r.min_rows, r.measured) for r in configs_of(faster, wide)]
        for faster in ({}, {None: (mine,)}, {2048: ()}, {None: ()})
    ]
    assert shown == [[(128, 64, False)], [(128, 64, True)], [(128, 2048, False)], []]


@pytest.mark.share(8)
def test_of_equally_fast_configs_the_one_with_the_most_ranges_wins() -> None:
    made = tables({**EVERYWHERE, 2048: (OTHER,)})["sm90"]
    for ms, expected in ((0.505, [(64, 64)]), (0.52, [(64, 64), (192, 2048)])):
        rivals = (WarpSpecialized("hopper", TILES, 0.5), WarpSpecialized("hopper", OTHER, ms))
        entries = {k: replace(e, warp_specialized=rivals) if k.max_rows is None else e for k, e in made.entries.items()}
        configs = lower(make_spec(TEXT), tables={"sm90": replace(made, entries=entries)}).stand_ins("fwd")
        assert [(config.block_q, config.min_rows) for _, config in configs] == expected


@pytest.mark.share(8)
def test_the_spec_precedes_the_table() -> None:
    assert configs_of(EVERYWHERE, backend="triton") == configs_of(EVERYWHERE, block_q=64) == ()
    assert configs_of(EVERYWHERE, {**TEXT, "mask": "causal"}, order="kv_outer") == ()
    (asked,) = configs_of({None: ()}, backend="hopper")
    (tiled,) = configs_of(EVERYWHERE, backend="hopper", block_q=64)
    (tuned,) = configs_of(EVERYWHERE, backend="hopper")
    assert [(r.block_q, r.min_rows, r.measured) for r in (asked, tiled, tuned)] == [
        (128, 0, False),
        (64, 0, False),
        (192, 0, True),
    ]


@pytest.mark.share(16)
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
def test_mla_decode_is_warp_specialized_where_it_was_measured_to_be_faster(
    faster: dict[int | None, bool], above: int | None
) -> None:
    """Ranges count rows that share a latent; without measurements the kernel is warp-specialized for any number."""
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


def test_a_kernel_that_cannot_be_warp_specialized_ignores_the_table() -> None:
    data = {**TEXT, "mask": {"block_sparse": {"block": 32}}}
    assert configs_of({None: (TILES,)}, data) == ()


def test_a_table_that_names_no_backend_is_refused(tmp_path: Path) -> None:
    text = tables(EVERYWHERE)["sm90"].text()
    (tmp_path / "t.json").write_text(text.replace('"backend": "hopper"', '"backend": "hoper"'))
    with pytest.raises(
        AttngenError, match="t.json: cannot be read .*`hoper` specializes no kernels; did you mean `hopper`"
    ):
        read_table(tmp_path / "t.json")


def why(faster: Mapping[int | None, Any], kernel: str = "fwd", **data: Any) -> list[str]:
    made: Spec = make_spec({**TEXT, **data})
    before: Module = lower(made, "dce", {})
    found = "On sm90 the kernel @{} has no config for hopper: ".format
    return [sentence for sentence in sentences(made, before, tables(faster)) if sentence.startswith(found(kernel))]


@pytest.mark.share(16)
def test_a_sentence_says_why_the_forward_has_no_config() -> None:
    none_found = "On sm90 the kernel @fwd has no config for hopper: "
    narrow = "its head_dim is 64, and with such a mask and modifiers the portable kernel is about as fast."
    none = partial(why, {})
    assert none() == [none_found + narrow] and why(EVERYWHERE) == none(schedule={"backend": "hopper"}) == []
    assert why({None: ()}) == [f"{none_found}the portable kernel was measured to be as fast (attngen/schedule, H200)."]
    assert none(schedule={"backend": "triton"}) == [f"{none_found}the spec says `schedule: {{backend: triton}}`."]
    (sentence,) = none(schedule={"block_q": 64, "stages": 2})
    assert sentence.startswith(
        f"{none_found}the spec's `schedule` has block_q and stages, which is for portable kernels"
    )
    assert none(head_dim=48) == [none_found + narrow.replace("64", "48")]
    dropping = "with dropout and such heads, mask and modifiers the portable kernel is about as fast."
    assert none(dropout=True) == [none_found + dropping]
    heavy = {
        "expr": (
            "floor(sqrt(abs(q_idx - kv_idx))) % 3 == 0 and int(log(1.0 + kv_idx) * 2.5) != round(0.25 * (q_idx + h))"
        )
    }
    (sentence,) = none(head_dim=128, mask=heavy)
    assert sentence.startswith(f"{none_found}its mask and modifiers take ") and sentence.endswith(
        "with more than 16, registers may spill."
    )


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"mask": "causal"}, ""),
        ({"mask": "causal", "heads": {"sharing": "gqa"}}, ""),
        ({}, None),  # the module has no fused backward
        ({"mask": {"expr": "kv_idx + q_idx <= q_len"}}, None),  # the order of accumulation is unknown
        ({"mask": {"sliding_window": {"left": 99}}, "backward": {"deterministic": False}}, ""),
        ({"mask": "causal", "score": "alibi"}, ""),
        ({"mask": "causal", "dropout": True}, None),
        (
            {"head_dim": 128, "mask": "causal", "score": ["alibi", {"softcap": 50.0}]},
            "its mask and modifiers take 26 operations for each score; with more than 23, registers may spill.",
        ),
        (
            {"mask": "none", "head_dim": {"qk": 128, "v": 64}},
            "its head_dims are 128 and 64; expected one power of two for q, k and v, or 192 and 128.",
        ),
        ({"mask": "none", "dtype": "fp32"}, "no dtype of the spec has 16 bits."),
        (
            {"mask": "none", "score": {"expr": "s + t[q_idx, kv_idx]", "params": {"t": {"tensor": ["Nq", "Nk"]}}}},
            "what is read for each score is no tensor [B, Hq, Nq, Nk] of the element type.",
        ),
        ({"mask": "causal", "schedule": {"backend": "triton"}}, "the spec says `schedule: {backend: triton}`."),
    ],
)
def test_a_sentence_says_why_the_fused_backward_has_no_config(data: dict[str, Any], reason: str | None) -> None:
    assert why({}, "bwd", **data) == ([f"On sm90 the kernel @bwd has no config for hopper: {reason}"] if reason else [])
