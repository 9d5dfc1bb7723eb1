"""The divided kernels of the backward: what the passes make of them, what is refused, and what they compute, in
random orders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

from attngen.builders import build_module
from attngen.codegen.render import render
from attngen.errors import BuildError, VerifyError
from attngen.interp.host import execute
from attngen.interp.tile import DOUBLE
from attngen.interp.warp_groups import Deadlock, WarpSpecializedLaunch
from attngen.ir.graph import Kernel, Module
from attngen.ir.text import parse_module, print_kernel, print_module
from attngen.lang.names import name_problem
from attngen.lowering.pipeline import lower, stages, unspecialized
from attngen.spec import Spec, make_spec
from attngen.targets.hopper.configs.common import room_of
from attngen.targets.hopper.configs.fused_backward import MOST_NUMBERS, config
from attngen.targets.hopper.configs.sm90 import NAMED_BARRIERS
from attngen.targets.hopper.passes.warp_specialize import WarpSpecialize
from attngen.targets.hopper.toolchain.resources import sram_bytes
from attngen.tiles.launches import groups, lane_registers
from attngen.verify import verify
from attngen.verify.machine import broken
from attngen.verify.protocol import protocol_of
from tests.helpers import SPECS, edit, in_one_pass, spec, target
from tests.hopper.common import edited_module, gone_and_come
from tests.transforms.test_equality import Call, must_be_equal, naive

BASE: dict[str, Any] = {"name": "gradients", "head_dim": 128, "backward": {"deterministic": True}}
MADE: dict[str, dict[str, Any]] = {
    "wide": {},
    "wide_causal": {"mask": "causal"},
    "narrow": {"head_dim": 64},
    "narrow_causal": {"head_dim": 64, "mask": "causal"},
    "small": {"head_dim": 16, "mask": "causal", "score": [{"expr": "s * t[h]", "params": {"t": {"tensor": ["H"]}}}]},
    "shared": {"mask": "causal", "heads": {"sharing": "gqa"}},
    "shared_in_a_window": {"mask": {"sliding_window": {"left": 40, "right": 0}}, "heads": {"sharing": "gqa"}},
    "apart": {
        "mask": "causal",
        "heads": {"sharing": "gqa"},
        "score": [{"expr": "s * t[h]", "params": {"t": {"tensor": ["H"]}}}],
    },
    "one_head": {"head_dim": 32, "heads": {"sharing": "mqa"}},
    "window": {"mask": {"sliding_window": {"left": 40, "right": 0}}},
    "dilated": {"head_dim": 64, "mask": {"dilated": {"step": 2, "reach": 30}}},
    "streaming": {
        "heads": {"sharing": "gqa"},
        "mask": {"all_of": ["causal", {"any_of": [{"sliding_window": {"left": 9}}, {"sink_tokens": {"count": 4}}]}]},
    },
    "first_keys": {
        "head_dim": 64,
        "mask": {"any_of": [{"sliding_window": {"left": 20, "right": 9}}, {"sink_tokens": {"count": 11}}]},
    },
    "both_sides": {"head_dim": 64, "mask": {"sliding_window": {"left": 20, "right": 9}}},
    "chunked": {"mask": {"chunked": {"size": 48}}},
    "prefix": {"mask": "prefix_lm"},
    "padding": {"head_dim": 64, "mask": "key_padding"},
    "padded_sink": {"mask": {"all_of": ["causal", {"key_padding": {"lengths": True}}]}, "score": "sink"},
    "lengths": {"mask": {"all_of": ["causal", {"key_padding": {"lengths": True}}]}},
    "documents": {"mask": {"all_of": ["causal", "document"]}},
    "sorted": {"head_dim": 64, "mask": {"document": {"sorted": True}}},
    "packed": {"heads": {"sharing": "gqa"}, "mask": {"document": {"packed": True, "causal": True}}},
    "packed_narrow": {
        "head_dim": 64,
        "heads": {"sharing": "gqa"},
        "mask": {"document": {"packed": True, "causal": True}},
    },
    "packed_both_ways": {"mask": {"document": {"packed": True}}},
    "dropping": {"head_dim": 64, "mask": {"all_of": ["causal", "key_padding"]}, "dropout": True},
    "dropping_wide": {"mask": {"all_of": ["causal", "key_padding"]}, "heads": {"sharing": "gqa"}, "dropout": True},
    "capped_wide": {"mask": {"sliding_window": {"left": 40, "right": 0}}, "score": [{"softcap": 5.0}]},
    "capped_whole": {"score": [{"softcap": 5.0}]},
    "capped": {"head_dim": 64, "mask": "causal", "score": [{"softcap": 5.0}]},
    "of_queries": {
        "head_dim": 64,
        "score": [{"expr": "s * exp(t[b, h, q_idx])", "params": {"t": {"tensor": ["B", "H", "Nq"]}}}],
    },
    "pieces": {"head_dim": {"qk": 192, "v": 128}, "mask": "causal"},
    "pieces_shared": {
        "head_dim": {"qk": 192, "v": 128},
        "mask": {"sliding_window": {"left": 40, "right": 0}},
        "heads": {"sharing": "gqa"},
    },
}
BLOCKS = {"block_sparse": {"block": 128}}


def learned(e: str, *dims: str) -> dict[str, Any]:
    """A score with a learned `t`."""
    return {"score": [{"expr": e, "params": {"t": {"tensor": list(dims), "grad": True}}}]}


MADE |= {
    "temperature": {"head_dim": 64, "mask": "causal", "score": "temperature"},
    "temperature_capped": {"mask": "causal", "score": ["temperature", {"softcap": 5.0}], "heads": {"sharing": "gqa"}},
    "temperature_dropping": {"head_dim": 64, "mask": "key_padding", "score": ["temperature", "sink"], "dropout": True},
    "multiplied": {"head_dim": 64, "mask": "causal", **learned("s * t[h]", "H")},
    "multiplied_rows": {
        "head_dim": 64,
        "heads": {"sharing": "gqa"},
        **learned("s * exp(t[b, h, q_idx])", "B", "H", "Nq"),
    },
    "multiplied_by_lengths": {"head_dim": 64, "score": [{"expr": "s * log(float(kv_len)) * float(b + 1)"}]},
    "multiplied_unordered": {
        "mask": "causal",
        "backward": {"deterministic": False},
        **learned("s / (2 + t[h, q_idx] ** 2)", "H", "Nq"),
    },
}
MADE |= {
    "biased": {"head_dim": 64, "score": "dense_bias"},
    "biased_capped": {"head_dim": 64, "score": ["dense_bias", {"softcap": 5.0}]},
    "biased_wide": {"mask": "causal", "score": "dense_bias", "heads": {"sharing": "gqa"}},
    "biased_dropping": {"head_dim": 64, "mask": "key_padding", "score": "dense_bias", "dropout": True},
    "biased_blocks": {"head_dim": 64, "mask": {"block_sparse": {"block": 128}}, "score": "dense_bias"},
    "biased_blocks_wide": {"mask": {"block_sparse": {"block": 128}}, "score": "dense_bias"},
    "biased_times": {
        "mask": "causal",
        "score": ["dense_bias", {"expr": "s * t[h]", "params": {"t": {"tensor": ["H"]}}}],
        "heads": {"sharing": "gqa"},
    },
    "biased_alone": {"head_dim": 64, "mask": "causal", "score": [{"dense_bias": {"learnable": False}}]},
}
LISTED: dict[str, dict[str, Any]] = {
    "blocks": {"mask": BLOCKS},
    "blocks_causal": {"head_dim": 64, "heads": {"sharing": "gqa"}, "mask": {"all_of": ["causal", BLOCKS]}},
    "blocks_in_a_window": {
        "mask": {"all_of": [{"sliding_window": {"left": 150, "right": 30}}, BLOCKS]},
        "score": "sink",
    },
    "blocks_of_packed": {"mask": {"all_of": [{"document": {"packed": True, "causal": True}}, BLOCKS]}},
    "butterfly": {"head_dim": 64, "mask": {"block_sparse": {"block": 128, "pattern": "butterfly"}}},
    "local_global": {
        "head_dim": 64,
        "mask": {"block_sparse": {"block": 256, "pattern": "local_global", "local": 0, "globals": 1}},
    },
}
MADE |= LISTED


@cache
def asked(name: str) -> Spec:
    return make_spec({**BASE, **MADE[name]})


@cache
def steps(name: str) -> dict[str, Module]:
    """The verified module after every pass."""
    return dict(stages(asked(name)))


def whole(name: str) -> Module:
    return list(steps(name).values())[-1]


def backward(module: Module) -> Any:
    """The divided kernel of a module's backward."""
    return next(kernel for kernel in module.warp_specialized if kernel.stands_for != "fwd")


def lines(after: str, block: str, name: str = "wide") -> list[str]:
    """The ops of a block of it after a pass, as text."""
    return lines_of(backward(steps(name)[after]), block)


def lines_of(kernel: Kernel, block: str) -> list[str]:
    """The ops of a block of a kernel, as text."""
    text = print_kernel(kernel)
    found = (
        re.split(rf"(?:block|warp_group) @{block}\b", text, maxsplit=1)[1]
        .split("\n  block ")[0]
        .split("\n  warp_group ")[0]
    )
    return [line.strip() for line in found.splitlines()[1:] if not line.strip().startswith("about")]


def changed(name: str, before: str, after: str, block: str) -> tuple[list[str], list[str]]:
    """The lines of a block that go, and those that come, from one pass to another."""
    return gone_and_come(lines(before, block, name), lines(after, block, name))


def edited(name: str, *changes: tuple[str, str]) -> Module:
    """The module with its text edited from the divided kernel of the backward on; not verified."""
    return edited_module(whole(name), *changes, kernel=backward(whole(name)).name)


# ---------------------------------------------------------------------------------------------- passes


def test_which_specs_have_one() -> None:
    assert [n for n in SPECS if target(n).stand_ins("bwd")] == [
        *(
            "alibi_mha",
            "block_sparse_mha",
            "causal_dropout_mqa",
            "causal_gqa",
            "causal_mha",
            "causal_mqa",
            "causal_padding_dropout_mha",
        ),
        *("causal_padding_gqa", "chunked_gqa", "cross_mha", "dense_bias_dropout_mha", "dilated_mha", "document_gqa"),
        *("full_mha", "mla_dims", "packed_document_gqa", "padding_mha", "prefix_lm_gqa", "qk_clip_gqa"),
        *("sinks_window_gqa", "softcap_window_gqa", "streaming_gqa", "temperature_mha", "window_gqa"),
    ]
    for name in MADE:
        assert [b.name for b in backward(whole(name)).warp_groups] == ["producer", "consumer", "writer"], name


def test_split_loops_gives_a_program_its_turn() -> None:
    before, after = (
        re.findall(r" order\((.*)\)\n", print_module(steps("wide_causal")[stage]))
        for stage in ("classify-tiles", "split-loops")
    )
    (last,) = (op for op in ("q_start", "BLOCK_Q + Nk - Nq + q_start - 1") if f"max(0, {op})" in after[0])
    assert (
        after == [f"-(kv_start // BLOCK_KV) + min((max(0, {last}) // BLOCK_KV) + 1, cdiv(Nk, BLOCK_KV)) - 1"]
        and before != after
    )


def test_split_loops_comes_to_tiles_for_all_heads_where_some_keys_visit_more_than_earlier_ones() -> None:
    """Documents do, and chunks: where one ends, the next keys' loops end later by its length. In windows all are as
    long."""
    chunks = {"heads": {"sharing": "gqa"}, "mask": {"chunked": {"size": 40}}}
    by_data = {"heads": {"sharing": "gqa"}, "mask": {"all_of": ["causal", "document"]}}
    made = {"chunks": lower(make_spec({"name": "one_pass", "head_dim": 128, **chunks}), "split-loops")}
    made["documents"] = lower(make_spec({"name": "one_pass", "head_dim": 128, **by_data}), "split-loops")
    made |= {name: steps(name)["split-loops"] for name in ("packed", "shared", "shared_in_a_window")}
    loops = {name: [op for op in module.kernel("bwd").loops if op.heads] for name, module in made.items()}
    assert {name: {op.by_tile for op in found} for name, found in loops.items()} == {
        "chunks": {True},
        "documents": {True},
        "packed": {True},
        "shared": {False},
        "shared_in_a_window": {False},
    }


def test_split_loops_counts_what_data_says() -> None:
    before, after = (
        lines_of(steps("packed")[stage].kernel("bwd"), "step") for stage in ("classify-tiles", "split-loops")
    )
    head, turn = (
        "b, g + group*hkv",
        "order(-(kv_start // BLOCK_KV) + min(document_q_first_count, cdiv(Nk, BLOCK_KV)) - 1)",
    )
    assert [line.replace("@? ", "") for line in after if line not in before] == [
        "%document_q_first_count = count_tiles %DOCUMENT_Q_FIRST[kv] most(BLOCK_Q + q_start - 1) : i32[] @?",
        f"ordered_add %DQ_ACC[{head}, q, d_qk] %dq check(q if partial) semaphore(%DQ_SEMAPHORE[{head}, q_start]) {turn}",
    ]


def test_split_loops_ends_what_is_listed_where_loops_do() -> None:
    before, after = (
        lines_of(steps("blocks_causal")[stage].kernel("bwd"), "step") for stage in ("classify-tiles", "split-loops")
    )
    made = [
        "%KV_RANK_row = base %KV_RANK[b, h, q_start // 128] : ptr[] @?",
        "%kv_end_at = list_position %KV_RANK_row tile({}) : i32[] @?",
        "%kv_next_at = list_position %KV_RANK_row tile((kv_start // BLOCK_KV) + 1) : i32[] @?",
        "ordered_add %DQ_ACC[b, h, q, d_qk] %dq check(q if partial) semaphore(%DQ_SEMAPHORE[b, h, q_start]) order(kv_end_at - kv_next_at)",
    ]
    end = "min((max(0, BLOCK_Q + Nk - Nq + q_start - 1) // BLOCK_KV) + 1, cdiv(Nk, BLOCK_KV))"
    for found, tiles in ((before, "cdiv(Nk, BLOCK_KV)"), (after, end)):
        assert [line for line in found if "KV_RANK" in line or line.startswith("ordered_add ")] == [
            line.format(tiles) for line in made
        ]


@pytest.mark.parametrize("name", ["blocks", "blocks_of_packed"])
def test_reduce_dq_has_the_writer_read_what_is_listed(name: str) -> None:
    gone, come = changed(name, "insert-pipelines", "reduce-dq", "step")
    made = [line for line in gone if re.search(" = (base|count_tiles|list_position) ", line)]
    assert [line.split()[0] for line in made] == [
        *["%document_q_first_count"] * (name == "blocks_of_packed"),
        *("%KV_RANK_row", "%kv_end_at", "%kv_next_at"),
    ]
    assert not [line for line in come if "KV_RANK" in line]
    assert lines("reduce-dq", "write", name)[: len(made) + 1] == [
        *made,
        "%dq_tile = consumer_wait %dQ_pipeline : f32[BLOCK_Q, D_QK] @sram",
    ]


def test_reduce_dq_has_the_writer_count() -> None:
    gone, come = changed("packed", "insert-pipelines", "reduce-dq", "step")
    (count,) = (line for line in gone if " = count_tiles " in line)
    assert not any(" = count_tiles " in line for line in come) and lines("reduce-dq", "write", "packed")[:2] == [
        count,
        "%dq_tile = consumer_wait %dQ_pipeline : f32[BLOCK_Q, D_QK] @sram",
    ]


def test_warp_specialize_divides_the_keys_among_consumers() -> None:
    text = print_kernel(backward(steps("wide")["warp-specialize"]))
    assert text.startswith(
        "kernel @bwd backend(hopper) program_axis(kv) grid(kv in cdiv(Nk, BLOCK_KV) reversed swizzle_rows(16384), h in Hq, b in B)"
    )
    assert (
        "  warp_group @consumer instances(2) rows(64) warps(4) registers(240)\n" in text
        and "  warp_group @writer instances(1) warps(1)" in text
    )


def test_select_tiles_mirrors_the_last_heads_where_earlier_keys_see_more() -> None:
    made = steps("wide_causal")
    stage = [*made][[*made].index("select-tiles") - 1]
    before, after = (print_kernel(made[name].kernel("bwd")).splitlines() for name in (stage, "select-tiles"))
    turn = "-(kv_start // BLOCK_KV) + min((max(0, BLOCK_Q + Nk - Nq + q_start - 1) // BLOCK_KV) + 1, cdiv(Nk, BLOCK_KV)) - 1"
    add = "ordered_add %DQ_ACC[b, h, q, d_qk] %dq check(q if partial) semaphore(%DQ_SEMAPHORE[b, h, q_start])"
    assert [line.strip() for line in after if line not in before] == [
        "kernel @bwd program_axis(kv) grid(kv in cdiv(Nk, BLOCK_KV) reversed swizzle_rows(16384) reversed_group, h in Hq, b in B)",
        f"{add} order(select(mirrored > 0, (kv_start // BLOCK_KV), {turn}))",
    ]
    assert not [name for name in ("wide", "streaming", "packed") if backward(whole(name)).grid[0].reversed_group]


def test_windows_and_padded_sequences_are_mirrored_too() -> None:
    """There a program's turn is how many of the earlier tiles come: those that neither have ended there nor see
    padding alone."""
    turns = {
        "window": "(max(0, Nk - Nq + q_start - 40) // BLOCK_KV)",
        "dropping": "(max(0, key_padding_first) // BLOCK_KV)",
    }
    for name, gone in turns.items():
        text = print_kernel(backward(whole(name)))
        assert f"order(select(mirrored > 0, (kv_start // BLOCK_KV) - {gone}, " in text, name


def test_select_tiles_takes_few_heads_together_where_programs_have_two_wide_ones() -> None:
    grids = {
        name: print_kernel(backward(whole(name))).splitlines()[0]
        for name in ("shared", "wide_causal", "one_head", "dropping_wide")
    }
    few = {name: "reversed swizzle(4) swizzle_rows(16384)" in grid for name, grid in grids.items()}
    assert few == {"shared": True, "wide_causal": False, "one_head": False, "dropping_wide": True}
    text = render(whole("shared"))["hopper.py"].partition("\ndef bwd(")[2]
    assert "    abreast = gl.maximum(1, gl.minimum(4, 16384 // Nk))\n" in text


def test_legalize_gluon_has_the_second_program_of_a_pair_add_in_its_turn() -> None:
    assert changed("shared", "ping-pong", "legalize-gluon", "consumer") == (
        [
            f"ordered_accumulate %{name}[b, hkv, split // 2, kv, {width}] %{name.lower()}_out check(kv) "
            f"semaphore(%DKDV_SEMAPHORE[b, hkv, split // 2, kv_start]) order(split % 2){ends}"
            for name, width, ends in (("dK", "d_qk", ""), ("dV", "d_v", " ends(yes)"))
        ],
        [
            "semaphore_acquire %DKDV_SEMAPHORE_pair[kv_start] order(split % 2)",
            "tma_store %dK[b, hkv, split // 2, kv, d_qk] %dk_out staging(%V_pipeline) order(split % 2)",
            "tma_store %dV[b, hkv, split // 2, kv, d_v] %dv_out staging(%V_pipeline) order(split % 2)",
            "tma_store_wait %V_pipeline",
            "semaphore_release %DKDV_SEMAPHORE_pair[kv_start]",
        ],
    )
    assert "%DKDV_SEMAPHORE_pair = base %DKDV_SEMAPHORE[b, hkv, split // 2] : ptr[] @reg" in lines(
        "legalize-gluon", "entry", "shared"
    )


def test_mask_out_of_bounds_queries_hides_those_past_the_end() -> None:
    assert changed("wide", "warp-specialize", "mask-out-of-bounds-queries", "step") == (
        [
            "%lse2 = load %LSE2[b, h, q] check(q if partial) other(inf) : f32[BLOCK_Q] @reg",
            "%masked = mask %s where(kv_idx < Nk) : f32[BLOCK_KV, BLOCK_Q] @reg",
        ],
        [
            "%lse2 = load %LSE2[b, h, q] check(q if partial) : f32[BLOCK_Q] @reg",
            "%masked = mask %s where(kv_idx < Nk and q_idx < Nq) : f32[BLOCK_KV, BLOCK_Q] @reg",
        ],
    )


def test_split_boundary_masks_asks_for_each_bound_of_a_window_and_for_the_ends() -> None:
    gone, come = changed("window", "hoist-bias", "split-boundary-masks", "step")
    assert [line.partition(" : ")[0] for line in gone] == [
        "%masked = mask %s where(q_idx >= -Nk + Nq + kv_idx and q_idx <= -Nk + Nq + kv_idx + 40 and kv_idx < Nk and q_idx < Nq)"
    ]
    assert [line.partition(" : ")[0] for line in come] == [
        "%masked_1 = mask %s where(q_idx >= -Nk + Nq + kv_idx) unswitch(BLOCK_KV + kv_start > Nk - Nq + q_start + 1)",
        "%masked_2 = mask %masked_1 where(q_idx <= -Nk + Nq + kv_idx + 40) unswitch(BLOCK_Q + Nk - Nq + q_start - 41 > kv_start)",
        "%masked = mask %masked_2 where(kv_idx < Nk and q_idx < Nq) unswitch(BLOCK_KV + kv_start > Nk or BLOCK_Q - Nq + q_start > 0)",
    ]


def test_split_boundary_masks_asks_once_for_all_that_cuts_few_tiles_where_a_mask_applies_in_all() -> None:
    gone, come = changed("dilated", "hoist-bias", "split-boundary-masks", "step")
    assert len(gone) == 1 and len(come) == 2
    assert "where(((Nk - Nq + q_idx) % 2) == (kv_idx % 2)) when(always) :" in come[0]
    assert (
        "%masked = mask %masked_1 where(q_idx >= -Nk + Nq + kv_idx and " in come[1]
        and " when(always) unswitch(" in come[1]
    )


@pytest.mark.parametrize("name", ["wide_causal", "documents", "lengths", "padding"])
def test_split_boundary_masks_leaves_others_whole(name: str) -> None:
    assert changed(name, "hoist-bias", "split-boundary-masks", "step") == ([], [])


CUTS_REFUSED = {
    "a row too few": ("q_start - 41 > kv_start", "q_start - 42 > kv_start"),
    "a key too few": ("kv_start > Nk - Nq + q_start + 1", "kv_start > Nk - Nq + q_start + 2"),
    "queries past the end": ("BLOCK_Q - Nq + q_start > 0", "BLOCK_Q - Nq + q_start > 1"),
    "keys past the end": ("unswitch(BLOCK_KV + kv_start > Nk or ", "unswitch("),
}


@pytest.mark.parametrize("mistake", CUTS_REFUSED)
def test_a_question_that_leaves_out_a_tile_is_refused(mistake: str) -> None:
    with pytest.raises(VerifyError, match="rule `cuts`: .* is passed over in tiles that .* is not proven for"):
        verify(edited("window", CUTS_REFUSED[mistake]))


def test_insert_pipelines_puts_numbers_of_queries_beside_their_tile() -> None:
    assert "%LSE2_pipeline = pipeline stages(num_stages) beside(%Q_pipeline) : f32[BLOCK_Q] @sram" in lines(
        "insert-pipelines", "entry"
    )
    assert lines("insert-pipelines", "copy") == [
        "producer_load %LSE2_pipeline %LSE2[b, h, q]",
        "producer_load %DELTA_pipeline %DELTA[b, h, q]",
        "producer_load %Q_pipeline %Q[b, h, q, d_qk]",
        "producer_load %dO_pipeline %dO[b, h, q, d_v]",
        "yield",
    ]


@pytest.mark.parametrize(("name", "part"), [("wide", "BLOCK_Q, PART_QK"), ("narrow", "PART_Q, D_QK")])
def test_reduce_dq_multiplies_what_both_consumers_have(name: str, part: str) -> None:
    gone, come = changed(name, "insert-pipelines", "reduce-dq", "step")
    turn = "semaphore(%DQ_SEMAPHORE[b, h, q_start]) order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)"
    assert gone == [
        "%dk_next = dot %ds %q over(BLOCK_Q) acc(%dk) : f32[BLOCK_KV, D_QK] @reg",
        "%dq = dot %ds %k over(BLOCK_KV) : f32[BLOCK_Q, D_QK] @reg",
        f"ordered_add %DQ_ACC[b, h, q, d_qk] %dq check(q if partial) {turn}",
    ]
    assert come == [
        "%ds_cast = pack %ds : T[BLOCK_KV, BLOCK_Q] @reg",
        "producer_store %dS_pipeline %ds_cast",
        "%dk_next = dot %ds_cast %q over(BLOCK_Q) acc(%dk) : f32[BLOCK_KV, D_QK] @reg",
        "%ds_all = consumer_wait %dS_pipeline : T[TILE_KV, BLOCK_Q] @sram",
        f"%dq_flight = wgmma %ds_all %k_all over(TILE_KV) : f32[{part}] @flight",
        f"%dq = wgmma_wait %dq_flight : f32[{part}] @reg",
        "consumer_release %ds_all",
        "producer_store %dQ_pipeline %dq",
    ]
    assert lines("reduce-dq", "write", name) == [
        "%dq_tile = consumer_wait %dQ_pipeline : f32[BLOCK_Q, D_QK] @sram",
        f"ordered_add %DQ_ACC[b, h, q, d_qk] %dq_tile check(q if partial) {turn}",
        "consumer_release %dq_tile",
        "semaphore_release %DQ_SEMAPHORE[b, h, q_start]",
        "yield",
    ]


def order(after: str, name: str) -> list[str]:
    """The products and what waits, in order: `issue` and `await` with what they are of, takes and gives of tiles,
    turns."""
    words = (line.replace("= ", "").split() for line in lines(after, "step", name))
    named = {
        "wgmma": lambda w: f"issue {w[0]}",
        "wgmma_wait": lambda w: f"await {w[2]}",
        "consumer_wait": lambda w: f"take {w[0]}",
        "pin_before_wait": lambda w: "pin_before_wait",
    }
    kinds = [(w[1] if w[0].startswith("%") else w[0], w) for w in words]
    return [
        named[k](w).replace("%", "").replace("_flight", "") if k in named else " ".join(w[:2])
        for k, w in kinds
        if k in {*named, "scheduler_barrier", "pack", "producer_store"}
    ]


@pytest.mark.parametrize("name", ["wide", "narrow"])
def test_software_pipeline_gradients_issues_scores_and_dp_together(name: str) -> None:
    """And packs weights before dP is awaited, if a tile has no more than 64 queries."""
    packed = [
        line.split()[0]
        for line in lines("software-pipeline-gradients", "step", name)
        if "= pack" in line or "= wgmma_wait" in line or "= pin_before_wait" in line
    ]
    early = ["%s", "%p_cast", "%dp", "%ds_cast"] if name == "wide" else ["%s", "%dp", "%p_held", "%p_cast", "%ds_cast"]
    assert packed == [*early, "%dv_next", "%dk_next", "%dq"]
    issued = [line.split()[0] for line in lines("software-pipeline-gradients", "step", name) if "= wgmma " in line]
    assert issued == ["%s_flight", "%dp_flight", "%dv_flight", "%dk_flight", "%dq_flight"]
    assert lines("software-pipeline-gradients", "step", name)[2:5] == [
        "%k_all_near = rematerialize %k_all : T[TILE_KV, D_QK] @sram",
        "%k = slice_rows %k_all_near : T[BLOCK_KV, D_QK] @sram",
        "%v_near = rematerialize %v : T[BLOCK_KV, D_V] @sram",
    ]


def test_reduce_dq_has_one_stage_where_tiles_take_most_of_the_memory() -> None:
    """Of dO and of the sums. These lie in pieces of half the columns of one of keys, as a copy has one and a half of
    those."""
    gone, come = changed("pieces", "insert-pipelines", "reduce-dq", "entry")
    assert gone == [
        "%K_pipeline = pipeline stages(1) per_instance(consumer) columns(64) : T[BLOCK_KV, D_QK] @sram",
        "%dO_pipeline = pipeline stages(num_stages) : T[BLOCK_Q, D_V] @sram",
    ]
    assert come == [
        "%K_pipeline = pipeline stages(1) columns(64) : T[TILE_KV, D_QK] @sram",
        "%dO_pipeline = pipeline stages(1) : T[BLOCK_Q, D_V] @sram",
        "%dS_pipeline = pipeline stages(num_stages) : T[TILE_KV, BLOCK_Q] @sram",
        "%dQ_pipeline = pipeline stages(1) columns(32) : f32[BLOCK_Q, D_QK] @sram",
    ]


def test_software_pipeline_gradients_issues_dq_last_where_registers_would_not_do() -> None:
    """Then weights are packed when dS is, dQ has the registers of what the other products read, and a loop keeps no
    numbers of its own."""
    kinds = ("= wgmma ", "= wgmma_wait", "= pin_before_wait", "= pack")
    ordered = [
        line.split()[0]
        for line in lines("software-pipeline-gradients", "step", "pieces")
        if any(kind in line for kind in kinds)
    ]
    assert ordered == [
        *("%s_flight", "%s", "%p_held", "%dp_flight", "%dp", "%p_cast", "%ds_cast"),
        *("%dv_flight", "%dk_flight", "%dv_next", "%dk_next", "%dq_flight", "%dq"),
    ]
    loops = [
        line
        for warp_group in ("consumer", "writer")
        for line in lines("software-pipeline-gradients", warp_group, "pieces")
        if " = pipelined_loop " in line
    ]
    assert ["recompute(yes)" in line for line in loops] == [True, False]


@pytest.mark.parametrize("name", ["capped_wide", "capped_whole"])
def test_software_pipeline_gradients_issues_dp_late_where_registers_would_not_do(name: str) -> None:
    """Then it is in no turn, and what dS needs of S is held before it."""
    kinds = ("= wgmma ", "= wgmma_wait", "= pin_before_wait", "= pack", "scheduler_barrier ")
    ordered = [line for line in lines("ping-pong", "step", name) if any(kind in line for kind in kinds)]
    assert [line.split()[0] if line.startswith("%") else line for line in ordered[:10]] == [
        *(
            "scheduler_barrier sync",
            "%s_flight",
            "scheduler_barrier arrive",
            "%s",
            "%p_cast",
            "%p_steep_held",
            "%dp_flight",
            "%dp",
            "%ds_cast",
            "scheduler_barrier sync",
        ),
    ]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("wide", "partial(q_full_end .. q_end) full(0 .. q_full_end) step(@write)"),
        ("wide_causal", "full(q_full_first .. q_full_end) step(@write) in_order(yes)"),
        ("window", "full(q_full_first .. q_full_end) step(@write) in_order(yes)"),
        (
            "blocks",
            "partial(q_full_end_at .. q_end_at) full(0 .. q_full_end_at) step(@write) listed(%Q_LIST_row) in_order(yes)",
        ),
    ],
)
def test_software_pipeline_gradients_makes_one_loop_of_two(name: str, order: str) -> None:
    """Where a mask bounds or lists tiles, they come by their numbers."""
    assert len([line for line in lines("reduce-dq", "writer", name) if " = loop q " in line]) == 2
    (writing,) = [
        line for line in lines("software-pipeline-gradients", "writer", name) if " = pipelined_loop q " in line
    ]
    assert writing.endswith(order)


def test_persistent_scheduler_has_programs_of_one_head_take_tile_after_tile() -> None:
    drains = [f"producer_tail %{pipeline}_pipeline" for pipeline in ("K", "V", "Q", "dO", "Work")]
    assert lines("persistent-scheduler", "producer") == [
        "%drawn = work_loop %Work_pipeline of(@tile) body(@produce) draws(yes)",
        *drains,
    ]
    assert lines("ping-pong", "consumer") == [
        "scheduler_barrier init",
        "%work = work_loop %Work_pipeline of(@tile) body(@consume)",
        "scheduler_barrier tail",
    ]
    assert lines("persistent-scheduler", "writer") == ["%written = work_loop %Work_pipeline of(@tile) body(@deliver)"]
    before, pipelines = (
        lines("skip-masked-tiles", "consumer"),
        [line for line in lines("persistent-scheduler", "entry") if "mbarrier_release" in line],
    )
    assert pipelines == [
        "%K_pipeline = pipeline stages(1) mbarrier_release(yes) : T[TILE_KV, D_QK] @sram",
        "%V_pipeline = pipeline stages(1) per_instance(consumer) mbarrier_release(yes) : T[BLOCK_KV, D_V] @sram",
        "%Work_pipeline = pipeline stages(2) mbarrier_release(yes) : i32[] @sram",
    ]
    at = next(i for i, line in enumerate(before) if " = pipelined_loop " in line) + 1
    assert lines("persistent-scheduler", "consume") == [
        *before[:at],
        "consumer_release %k_all",
        "reload_tile %Work_pipeline",
        *before[at:],
        "consumer_release %v",
    ]
    assert lines("persistent-scheduler", "deliver") == lines("skip-masked-tiles", "writer")
    assert lines("legalize-gluon", "consume")[-3:] == [
        "tma_store %dV[b, h, kv, d_v] %dv_out staging(%V_pipeline)",
        "tma_store_wait %V_pipeline",
        "consumer_release %v",
    ]


@pytest.mark.parametrize("name", ["shared", "pieces"])
def test_programs_of_several_heads_or_wide_ones_have_one_tile(name: str) -> None:
    assert lines("persistent-scheduler", "consumer", name) == lines("skip-masked-tiles", "consumer", name)


def test_ping_pong_has_two_turns_in_each_tile() -> None:
    turns = [line for line in lines("ping-pong", "step") if line.startswith("scheduler_barrier ") or "= wgmma " in line]
    assert [line.split()[0] if "=" in line else line for line in turns] == [
        *("scheduler_barrier sync", "%s_flight", "%dp_flight", "scheduler_barrier arrive"),
        *("scheduler_barrier sync", "%dv_flight", "%dk_flight", "%dq_flight", "scheduler_barrier arrive"),
    ]
    consumer = lines("ping-pong", "consumer")
    assert (consumer[0], consumer[-1]) == ("scheduler_barrier init", "scheduler_barrier tail")


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        ({"block_sparse": {"block": 64}}, "its mask lists blocks of 64 keys, and a program has 128"),
        (
            {
                "expr": "allowed[b, q_idx, kv_idx]",
                "params": {"allowed": {"tensor": ["B", "Nq", "Nk"], "dtype": "bool"}},
            },
            "",
        ),
    ],
)
def test_small_blocks_and_blocks_of_data_have_none(mask: Any, why: str) -> None:
    """Of blocks that data lists, full ones and others have lists of their own: the build makes no kernel in one
    pass."""
    made = dict(stages(asked_for := make_spec({**BASE, "mask": mask})))
    reasons = list(unspecialized(asked_for, made["dce"]))
    assert [reason for reason in reasons if "@bwd" in reason] == [
        f"On sm90 the kernel @bwd has no row for hopper: {why}."
    ] * bool(why)
    assert [kernel.name for kernel in made["legalize-triton"].kernels if kernel.adds] == []


@pytest.mark.parametrize(
    ("asked", "of_ds", "part"),
    [
        ({"score": "temperature"}, "1/temperature", "-dq_rows*scale/temperature**2"),
        (learned("tanh(s / t[h])", "H"), "1/t", "-dq_rows*scale/t**2"),
        ({"score": ["temperature", "alibi"]}, "1/temperature", "-dq_rows*scale/temperature**2"),
        (learned("s * t[h]", "H"), "t", "dq_rows*scale"),
        (learned("2 * s * t[h] ** 2", "H"), "2*t**2", "4*dq_rows*scale*t"),
        (learned("s * abs(t[h])", "H"), "abs(t)", "dq_rows*scale*select(t > 0, 1, select(t < 0, -1, 0))"),
        (learned("log(1 + exp(s * t[h]))", "H"), "t", "dq_rows*scale"),
        (learned("s * t[h] * float(kv_idx)", "H"), "t", "dq_rows*scale"),
        (learned("s * exp(t[q_idx])", "Nq"), "", "dq_rows*scale"),
        (learned("s / (1 + t[q_idx] ** 2)", "Nq"), "", "-2*dq_rows*scale*t/(t**2 + 1)"),
    ],
)
def test_dq_end_has_gradients_of_what_multiplies_scores(asked: dict[str, Any], of_ds: str, part: str) -> None:
    """What multiplies all scores of a head is a factor of dQ and dK that is left to the end: where it is 0, nothing
    divides by it."""
    text = print_kernel(build_module(make_spec({**BASE, **asked})).kernel("dq_end"))
    assert re.findall(r"%ds_scale = map expr\((.*)\) uses", text) == [of_ds] * bool(of_ds)
    assert re.findall(r"%d\w+_out = map expr\((.*)\) uses.* : f32\[BLOCK_Q\]", text) == [part]


@pytest.mark.parametrize(
    "asked",
    [
        {"score": [{"softcap": 4.0}, "temperature"]},  # the tangent of the score is divided, not the score
        {"score": ["alibi", "temperature"]},
        {"score": [{"alibi": {"slopes": "given", "learnable": True}}]},
        learned("s * t[q_idx]", "Nq"),  # where t is 0, dQ is 0 too, and says nothing of its gradient
        learned("s * t[kv_idx]", "Nk"),
        learned("s * t[h] + t[h] * t[h] * float(kv_idx)", "H"),
        learned("min(s * t[h], 5)", "H"),
    ],
)
def test_gradients_of_other_inputs_need_sums_over_keys(asked: dict[str, Any]) -> None:
    made = build_module(make_spec({**BASE, "backward": {"deterministic": False}, **asked}))
    assert "bwd" not in [kernel.name for kernel in made.kernels]


def test_what_nothing_divides_drops_out() -> None:
    plain = dict(stages(make_spec({**BASE, "mask": "causal", "schedule": {"backend": "triton"}})))
    before, after = plain["dce"], plain["drop-unspecialized"]
    assert [k.name for k in before.kernels] == ["fwd", "dq", "delta", "dkdv", "bwd", "dq_end", "jvp"]
    assert [k.name for k in after.kernels] == ["fwd", "dq", "delta", "dkdv", "jvp"]
    assert "one_pass" in print_module(before) and "one_pass" not in print_module(after)
    assert steps("wide")["drop-unspecialized"] == steps("wide")["legalize-gluon"]


def test_how_heads_are_split_drops_out_with_it() -> None:
    plain = dict(
        stages(make_spec({**BASE, "mask": "causal", "heads": {"sharing": "gqa"}, "schedule": {"backend": "triton"}}))
    )
    before, after = (print_module(plain[stage]) for stage in ("dce", "drop-unspecialized"))
    assert "in_one_pass" in before and "_heads" in before and "in_one_pass" not in after and "_heads" not in after
    assert "%splits = map expr(max(1, (group // divisor(group, min(group, max(1, " in after


def test_a_kernel_that_adds_and_is_not_warp_specialized_is_refused() -> None:
    made = whole("wide")
    alone = replace(
        made,
        warp_specialized=made.warp_specialized[:1],
        schedules=tuple((k, rows) for k, rows in made.schedules if k != "bwd"),
    )
    with pytest.raises(VerifyError, match="@bwd: it adds to what others add to, and runs divided alone"):
        verify(replace(alone, schedules=(*alone.schedules, ("bwd", ()))))


def test_a_spec_cannot_ask_for_what_cannot_be_warp_specialized() -> None:
    before = dict(stages(make_spec({**BASE, "head_dim": {"qk": 128, "v": 64}})))["dce"]
    with pytest.raises(
        BuildError, match="the kernel @bwd cannot be divided into roles: its heads have 128 and 64 columns"
    ):
        WarpSpecialize(
            lambda specialization, module: (config(module),) if specialization.kernel == "bwd" else "nobody asked"
        ).run(before)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, "with heads of 192 and 128 columns and loops over all queries registers spill"),
        (
            {"mask": {"document": {"packed": True, "causal": True}}},
            "heads of 192 and 128 columns and a number for each key registers spill",
        ),
        (
            {"mask": "causal", "score": "temperature"},
            "heads of 192 and 128 columns and a modifier of scores registers spill",
        ),
        ({"mask": {"all_of": ["causal", BLOCKS]}}, "heads of 192 and 128 columns and lists of blocks registers spill"),
        (
            {"mask": {"chunked": {"size": 48}}},
            "take 15 operations for each score, and of more than 14 registers may spill",
        ),
    ],
)
def test_wide_heads_have_none_where_registers_would_spill(asked: dict[str, Any], why: str) -> None:
    made = make_spec({**BASE, "head_dim": {"qk": 192, "v": 128}, **asked})
    module = dict(stages(made))
    assert not list(module.values())[-1].stand_ins("bwd")
    assert why in " ".join(unspecialized(made, module["dce"]))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"head_dim": 256}, "its heads have 256 columns of k and 256 of v, and dK and dV have room for 320 in all"),
        ({"score": [{"relative_bias": {"max_distance": 16}}]}, "the gradient of `relative_bias` needs sums of its own"),
        (
            {"mask": {"expr": "kv_idx + q_idx <= q_len"}},
            "it is not known how many tiles of keys come to each tile of queries",
        ),
    ],
)
def test_explain_says_why_there_is_no_kernel_in_one_pass(asked: dict[str, Any], why: str) -> None:
    made = make_spec({"name": "apart", "head_dim": 128, **asked})
    said = [text for text in unspecialized(made, lower(made, "dce")) if "@fwd" not in text and "@jvp" not in text]
    assert said == [f"No kernel computes all gradients in one pass: {why}."]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            learned("s + t[q_idx, kv_idx]", "Nq", "Nk"),
            "what is read for each score is no tensor [B, Hq, Nq, Nk] of the element type",
        ),
        (
            learned("s + t[b, h, q_idx, kv_idx]", "B", "H", "Nq", "Nk"),
            "what is read for each score is no tensor [B, Hq, Nq, Nk] of the",
        ),
        (
            {"score": [{"expr": "s + t[abs(q_idx - kv_idx)]", "params": {"t": {"tensor": ["Nk"]}}}]},
            "a number is looked up for each score",
        ),
    ],
)
def test_what_the_copy_engine_cannot_read_for_each_score_has_none(asked: dict[str, Any], why: str) -> None:
    made = make_spec({"name": "apart", "head_dim": 64, **asked})
    assert why in " ".join(unspecialized(made, lower(made, "dce")))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_numbers_of_queries_fit_beside_tiles(head_dim: int) -> None:
    for many in (1, 2, 3):
        params = {f"x{i}": {"tensor": ["B", "H", "Nq"]} for i in range(many)}
        score = [{"expr": " * ".join(["s", *(f"{name}[b, h, q_idx]" for name in params)]), "params": params}]
        made = dict(stages(asked_for := make_spec({**BASE, "head_dim": head_dim, "score": score})))
        module = list(made.values())[-1]
        if many <= MOST_NUMBERS:
            ((kernel, row),) = module.stand_ins("bwd")
            assert sram_bytes(module, kernel, row) <= room_of(1)
        else:
            assert "it reads 3 numbers for each query, and there is room for 2" in " ".join(
                unspecialized(asked_for, made["dce"])
            )


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            {"head_dim": {"qk": 192, "v": 128}, "mask": "causal"},
            "with heads of 192 and 128 columns and dropout registers spill",
        ),
        (
            {"score": [{"softcap": 5.0}]},
            "with dropout, heads of more than 64 columns and a modifier of scores registers spill",
        ),
        (
            {"mask": {"all_of": ["causal", "document"]}},
            "take 19 operations for each score, and of more than 17 registers may spill",
        ),
    ],
)
def test_dropout_has_none_where_registers_would_spill(asked: dict[str, Any], why: str) -> None:
    made = make_spec({**BASE, "dropout": True, **asked})
    module = dict(stages(made))
    assert not list(module.values())[-1].stand_ins("bwd")
    assert why in " ".join(unspecialized(made, module["dce"]))


# ---------------------------------------------------------------------------------------------- what is refused

REFUSED = {
    "a share of another type": (
        "producer_store %dS_pipeline %ds_cast",
        "producer_store %dS_pipeline %p",
        "`types`: .*",
    ),
    "a share of a part of another size": ("f32[BLOCK_Q, PART_QK] @reg", "f32[BLOCK_Q, D_QK] @reg", "`types`: .*"),
    "own rows of a tile that is the copy's": (
        "%v_near = rematerialize %v",
        "%v_own = slice_rows %v : T[BLOCK_KV, D_V] @sram\n    %v_near = rematerialize %v",
        "`types`: .*",
    ),
    "near of what is no tile": (
        "%k = slice_rows %k_all_near",
        "%far = rematerialize %s : f32[BLOCK_KV, BLOCK_Q] @sram\n    %k = slice_rows %k_all_near",
        "`.*`: .*",
    ),
    "a turn that another has": (
        "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)",
        "order(kv_start // BLOCK_KV)",
        "`types`: .*is not the one wait for the turn of an add after it",
    ),
    "a turn that is not passed": ("    semaphore_release %DQ_SEMAPHORE[b, h, q_start]\n", "", "`.*`: .*"),
    "a turn of another tile": (
        "semaphore_release %DQ_SEMAPHORE[b, h, q_start]",
        "semaphore_release %DQ_SEMAPHORE[b, h, q_start + BLOCK_Q]",
        "`.*`: .*",
    ),
    "a grid of another order": (
        "reversed swizzle_rows(16384)",
        "swizzle_rows(16384)",
        "`walks`: .*its grid is not that of @bwd",
    ),
    "no give of dS": ("    consumer_release %ds_all\n", "", "`protocol`: .*%dS_pipeline"),
    "no give of the sums": (
        "    consumer_release %dq_tile\n",
        "",
        "`bodies`: .*from which @step takes a tile and gives it back",
    ),
    "sums that nobody shares": ("    producer_store %dQ_pipeline %dq\n", "", "`.*`: .*"),
    "dS given back while a product reads it": (
        "    %dq = wgmma_wait %dq_flight : f32[BLOCK_Q, PART_QK] @reg\n    consumer_release %ds_all\n",
        "    consumer_release %ds_all\n    %dq = wgmma_wait %dq_flight : f32[BLOCK_Q, PART_QK] @reg\n",
        "`protocol`: .*gives back a tile of %dS_pipeline while %dq_flight reads it",
    ),
    "one slot of dS": (
        "%dS_pipeline = pipeline stages(num_stages)",
        "%dS_pipeline = pipeline stages(1)",
        "`protocol`: .*overwrites its part of a tile of %dS_pipeline",
    ),
    "pieces where tiles are whole": (
        "%dQ_pipeline = pipeline stages(2) :",
        "%dQ_pipeline = pipeline stages(2) columns(32) :",
        "`fits`: .*%dQ_pipeline has pieces of 32 columns; expected whole tiles",
    ),
    "no room": (
        "num_stages=2 TMA=1 backend=hopper\n\nschedule @dq_end",
        "num_stages=4 TMA=1 backend=hopper\n\nschedule @dq_end",
        "`fits`: .*",
    ),
}


PIECES_REFUSED = {
    "sums in whole pieces": (
        "%dQ_pipeline = pipeline stages(1) columns(32)",
        "%dQ_pipeline = pipeline stages(1) columns(64)",
        "`fits`: .*expected columns.32.",
    ),
    "whole sums": (
        "%dQ_pipeline = pipeline stages(1) columns(32)",
        "%dQ_pipeline = pipeline stages(1)",
        "`fits`: .*whole tiles of 192 columns; .*columns.32.",
    ),
    "narrow pieces": (
        "%Q_pipeline = pipeline stages(num_stages) columns(64)",
        "%Q_pipeline = pipeline stages(num_stages) columns(32)",
        "`(types|fits)`: .*",
    ),
    "a product of all columns": (
        "over(TILE_KV) : f32[BLOCK_Q, PART_QK] @flight",
        "over(TILE_KV) : f32[BLOCK_Q, D_QK] @flight",
        "`types`: .*",
    ),
    "a writer that computes numbers again": (
        " step(@write) in_order(yes)",
        " step(@write) in_order(yes) recompute(yes)",
        "`bodies`: .*with sums",
    ),
}
_FOLLOW = "    semaphore_acquire %DKDV_SEMAPHORE_pair[kv_start] order(split % 2)\n"
_RAISE = "    semaphore_release %DKDV_SEMAPHORE_pair[kv_start]\n"
PAIRS_REFUSED = {
    "one that does not wait": (_FOLLOW, "", "`walks`: .*expected one follow, all puts, their flush and then one raise"),
    "one that waits for itself": (_FOLLOW, _FOLLOW.replace("split % 2", "split"), "`walks`: .*expected one follow"),
    "one that waits late": (
        f"{_FOLLOW}    tma_store %dK[b, hkv, split // 2, kv, d_qk] %dk_out staging(%V_pipeline) order(split % 2)\n",
        f"    tma_store %dK[b, hkv, split // 2, kv, d_qk] %dk_out staging(%V_pipeline) order(split % 2)\n{_FOLLOW}",
        "`walks`: .*expected one follow",
    ),
    "a turn that is not passed": (_RAISE, "", "`walks`: .*expected one follow"),
    "a turn that is passed early": (
        f"    tma_store_wait %V_pipeline\n{_RAISE}",
        f"{_RAISE}    tma_store_wait %V_pipeline\n",
        "`walks`: .*expected one follow",
    ),
    "turns of another pair": (
        "base %DKDV_SEMAPHORE[b, hkv, split // 2]",
        "base %DKDV_SEMAPHORE[b, hkv, 0]",
        "`(indexing|walks)`: .*",
    ),
    "an output that replaces": (
        "%dv_out staging(%V_pipeline) order(split % 2)",
        "%dv_out staging(%V_pipeline)",
        "`walks`: .*puts other tiles in turn than those that @bwd merges",
    ),
    "the tile of another pair": (
        "tma_store %dK[b, hkv, split // 2,",
        "tma_store %dK[b, hkv, 0,",
        "`walks`: .*puts other tiles in turn",
    ),
    "turns counted in an output": (
        "semaphore_acquire %DKDV_SEMAPHORE_pair[kv_start]",
        "semaphore_acquire %dK[b, hkv, 0, kv_start, 0]",
        "`types`: .*takes turns by %dK; expected one element of a tensor of i32 of role sum",
    ),
    "a turn of half": (
        "semaphore_acquire %DKDV_SEMAPHORE_pair[kv_start] order(split % 2)",
        "semaphore_acquire %DKDV_SEMAPHORE_pair[kv_start] order(split/2)",
        "`types`: .*",
    ),
}
MERGES_REFUSED = {
    "tiles of all pairs": (
        "base %dK[b, hkv, split // 2]",
        "base %dK[b, hkv, 0]",
        "`indexing`: .*expected `split // 2`",
    ),
    "no turns": (
        " semaphore(%DKDV_SEMAPHORE[b, hkv, split // 2, kv_start]) order(split % 2)\n",
        "\n",
        "`types`: .*adds as it comes; expected turns, and a turn",
    ),
    "a store": (
        "ordered_accumulate %dK_head[kv, d_qk] %dk_out check(kv) semaphore(%DKDV_SEMAPHORE[b, hkv, split // 2, kv_start]) order(split % 2)",
        "store %dK_head[kv, d_qk] %dk_out check(kv)",
        "`indexing`: .*writes rows of %dK that the other programs along split write, too",
    ),
}


@pytest.mark.parametrize("mistake", PAIRS_REFUSED)
def test_wrong_pairs_are_refused(mistake: str) -> None:
    old, new, reason = PAIRS_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("shared", (old, new)))


@pytest.mark.parametrize("mistake", MERGES_REFUSED)
def test_wrong_merges_are_refused(mistake: str) -> None:
    old, new, reason = MERGES_REFUSED[mistake]
    head, at, rest = print_module(whole("shared")).partition("kernel @bwd program_axis")
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(parse_module(head + at + edit(rest, (old, new))))


def test_a_pair_of_which_none_is_first_waits_for_ever() -> None:
    with pytest.raises(Deadlock, match="@bwd: programs wait for turns for ever"):
        run("shared", 0, (40, 40), ((_FOLLOW, _FOLLOW.replace("split % 2", "1 + split % 2")),))


BY_TILE_REFUSED = {
    "one role by head": (
        "step(@write) in_order(yes) heads(g_first .. g_end) by_tile(yes)",
        "step(@write) in_order(yes) heads(g_first .. g_end)",
        "`walks`: .*@writer runs over other tiles of class",
    ),
    "partial tiles first": (
        "step(@write) in_order(yes) heads(g_first .. g_end) by_tile(yes)",
        "step(@write) heads(g_first .. g_end) by_tile(yes)",
        "`bodies`: .*expected heads, and a loop over tiles in their order, of no list",
    ),
    "no heads": (
        "step(@write) in_order(yes) heads(g_first .. g_end) by_tile(yes)",
        "step(@write) in_order(yes) by_tile(yes)",
        "`(bodies|walks)`: .*",
    ),
}


@pytest.mark.parametrize("mistake", BY_TILE_REFUSED)
def test_wrong_heads_by_tile_are_refused(mistake: str) -> None:
    old, new, reason = BY_TILE_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("packed", (old, new)))


HEADS_REFUSED = {
    "one role with other heads": (
        " step(@write) in_order(yes) heads(g_first .. g_end)",
        " step(@write) in_order(yes)",
        "`walks`: .*",
    ),
    "all heads of the group": (
        "heads(g_first .. g_end)",
        "heads(0 .. group)",
        "`walks`: .*runs over other tiles of class",
    ),
}
ORDERS_REFUSED = {
    "one role in an order of its own": (
        " step(@write) in_order(yes)",
        " step(@write)",
        "`walks`: .*run over tiles in different orders",
    ),
    "an order over a gap": (
        "partial(q_first .. q_full_first, q_full_end .. q_end)",
        "partial(q_first .. q_full_first, q_full_end + 1 .. q_end)",
        "`bodies`: .*comes to tiles in their order; expected @step alone, one range of full ones, and others beside it",
    ),
}


STAYING_REFUSED = {
    "K and V that are not counted": (
        (
            "%K_pipeline = pipeline stages(1) mbarrier_release(yes) : T[TILE_KV, D_QK] @sram\n"
            "    %V_pipeline = pipeline stages(1) per_instance(consumer) mbarrier_release(yes)"
        ),
        "%K_pipeline = pipeline stages(1) : T[TILE_KV, D_QK] @sram\n    %V_pipeline = pipeline stages(1) per_instance(consumer)",
        "`fits`: .*the slots of its rings take 10 named barriers; expected 9 at most",
    ),
    "places that are not counted": (
        "%Work_pipeline = pipeline stages(2) mbarrier_release(yes)",
        "%Work_pipeline = pipeline stages(2)",
        "`fits`: .*@writer takes from %Work_pipeline, and meets at no named barrier; expected mbarrier_release",
    ),
    "three places": (
        "%Work_pipeline = pipeline stages(2)",
        "%Work_pipeline = pipeline stages(3)",
        "`fits`: .*%Work_pipeline has 3 slots and is counted; expected 2",
    ),
    "K of two slots": (
        "%K_pipeline = pipeline stages(1)",
        "%K_pipeline = pipeline stages(2)",
        "`fits`: .*%K_pipeline has 2 slots and is counted; expected 1",
    ),
    "Q that is counted": (
        "%Q_pipeline = pipeline stages(num_stages)",
        "%Q_pipeline = pipeline stages(num_stages) mbarrier_release(yes)",
        "`fits`: .*%Q_pipeline is counted, and is taken in @step; expected it once for each tile of the grid",
    ),
    "no give of K": ("    consumer_release %k_all\n", "", "`protocol`: .*producer 0 can wait for ever"),
    "V given back while outputs leave through it": (
        "    tma_store_wait %V_pipeline\n    consumer_release %v\n",
        "    consumer_release %v\n    tma_store_wait %V_pipeline\n",
        "`protocol`: .*gives back a tile of %V_pipeline from which the copy engine stores",
    ),
    "K given back before its products": (
        "    %total = pipelined_loop",
        "    consumer_release %k_all\n    %total = pipelined_loop",
        "`protocol`: .*a tile of %K_pipeline that it has (given back or never|not) taken",
    ),
    "a writer of one tile": (
        "    %written = work_loop %Work_pipeline of(@tile) body(@deliver)\n",
        "",
        "`scopes`: .*@deliver is run by the ops of 0 blocks",
    ),
    "no end of K": (
        "    producer_tail %K_pipeline\n",
        "",
        "`protocol`: .*arrivals at the barrier of %K_pipeline are awaited by nothing at the end",
    ),
}


@pytest.mark.parametrize("mistake", STAYING_REFUSED)
def test_wrong_programs_that_stay_are_refused(mistake: str) -> None:
    old, new, reason = STAYING_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("wide", (old, new)))


@pytest.mark.parametrize("mistake", HEADS_REFUSED)
def test_wrong_heads_are_refused(mistake: str) -> None:
    old, new, reason = HEADS_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("shared", (old, new)))


@pytest.mark.parametrize("mistake", ORDERS_REFUSED)
def test_a_wrong_order_of_tiles_is_refused(mistake: str) -> None:
    old, new, reason = ORDERS_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("window", (old, new)))


LISTED_REFUSED = {
    "a turn that another tile has": (
        "tile((kv_start // BLOCK_KV) + 1)",
        "tile(kv_start // BLOCK_KV)",
        "`walks`: .*its programs add in other turns than those of @bwd",
    ),
    "ranks of another tile": (
        "base %KV_RANK[b, h, q_start // 128]",
        "base %KV_RANK[b, h, 0]",
        "`walks`: .*its programs add in other turns",
    ),
    "places of tiles that are told": (
        "step(@write) listed(%Q_LIST_row) in_order(yes)",
        "step(@write) listed(%Q_LIST_row) tile_indices(%LSE2_pipeline) in_order(yes)",
        "`bodies`: .*%write_total comes to tiles in their order",
    ),
}


@pytest.mark.parametrize("mistake", LISTED_REFUSED)
def test_a_wrong_turn_among_listed_tiles_is_refused(mistake: str) -> None:
    old, new, reason = LISTED_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("blocks", (old, new)))


@pytest.mark.parametrize("mistake", PIECES_REFUSED)
def test_wrong_pieces_are_refused(mistake: str) -> None:
    old, new, reason = PIECES_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("pieces", (old, new)))


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_wrong_text_is_refused_with_a_reason(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("wide", (old, new)))


@pytest.mark.parametrize("name", MADE)
def test_the_protocol_of_every_kernel_is_proved(name: str) -> None:
    for depth in (2, 3):
        assert broken(protocol_of(backward(whole(name)), {"num_stages": depth})) == ""


# ---------------------------------------------------------------------------------------------- what they compute


def run(
    name: str, seed: int, lengths: Any = None, changes: tuple[tuple[str, str], ...] = ()
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What the divided kernels compute, in a random order and under random tiles, and what naive attention does."""
    module, chance = edited(name, *changes) if changes else whole(name), Random(seed)
    instead = {kernel.stands_for: kernel for kernel in module.warp_specialized if kernel.stands_for != "fwd"}
    module = replace(module, kernels=tuple(instead.get(kernel.name, kernel) for kernel in module.kernels))
    call = Call.random(chance, asked(name), build_module(asked(name)), lengths)
    if name == "sorted":
        call.inputs["document_ids"] = call.inputs["document_ids"].sort(1).values
    if name == "multiplied":
        call.inputs["t"][0] = 0.0  # all scores of a head are 0, and so is dQ
    sides = (32, 64, 128) if name in LISTED else (8, 16)
    call = replace(call, tiles={"BLOCK_Q": chance.choice(sides), "BLOCK_KV": chance.choice(sides)})
    if "block_mask" in call.inputs:  # queries and keys of which no block counts
        call.inputs["block_mask"][:, :, 1:2], call.inputs["block_mask"][..., 2:3] = False, False
    if chance.random() < 0.5:  # each head alone: the last one may be mirrored
        alone = {
            "bwd": tuple(replace(axis, swizzle_rows=min(1, axis.swizzle_rows)) for axis in module.kernel("bwd").grid)
        }
        module = replace(module, kernels=tuple(replace(k, grid=alone.get(k.name, k.grid)) for k in module.kernels))
    WarpSpecializedLaunch.chance = chance
    return execute(in_one_pass(module), call.of_module(asked(name)) | {"fused": 1}, call.tiles, DOUBLE), naive(
        asked(name), call
    )


@pytest.mark.parametrize("name", MADE)
def test_they_compute_what_naive_attention_does(name: str) -> None:
    few = [None, (1, 17), (17, 1), (33, 65), (65, 33), (0, 5), (40, 40)]
    for seed, lengths in enumerate([(129, 390), (390, 129), (0, 200), (384, 384)] if name in LISTED else few):
        must_be_equal(*run(name, seed, lengths), f"{name} {seed}")


def test_what_waits_for_ever_is_named() -> None:
    """The rule walks refuses such a turn, which no program has first; the executor, which nobody asked to verify it,
    stops."""
    turn = "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV)"
    with pytest.raises(Deadlock, match="@bwd: programs wait for turns for ever"):
        run("wide", 0, (40, 40), ((f"{turn} - 1)", f"{turn})"),))


# ---------------------------------------------------------------------------------------------- as printed


def test_a_copy_without_rows_takes_no_turn_in_a_pair() -> None:
    """Beyond the last key, the place of its turns would be another pair's."""
    text = render(whole("shared"))["hopper.py"].partition("\ndef bwd_consumer(")[2]
    follow = "    if kv_start < Nk:\n        semaphore_acquire(DKDV_SEMAPHORE_pair + kv_start, 0, 4 * (split % 2))\n"
    put = (
        "    if split % 2 == 0:\n        tma_store(\n            dK,\n            [b, hkv * split_pairs + split // 2, kv_start, 0],\n"
        "            v_smem.index(WARP_GROUP),\n"
    )
    assert (
        text.index(follow)
        < text.index(put)
        < text.index("    if kv_start < Nk:\n        semaphore_release(DKDV_SEMAPHORE_pair + kv_start)\n")
    )


def test_heads_by_tile_are_one_loop() -> None:
    text = render(whole("packed_narrow"))["hopper.py"]
    assert text.count("    q_tile, g = q_first, g_first\n") == 3  # once in each role
    assert text.count("    for _ in range((q_end - q_first) * (g_end - g_first)):\n") == 3
    assert text.count("        q_tile, g = next_head(q_tile, g, g_first, g_end)\n") == 3
    writer = text.partition("\ndef bwd_writer(")[2]
    assert (
        "        q_ahead = gl.where(g + 1 < g_end, q_start, q_start + BLOCK_Q)\n" in writer
    )  # the next turn is of the next head
    assert "hkv * group + gl.where(1 + g < g_end, 1 + g, g_first)" in writer


def test_mirrored_heads_go_through_their_tiles_backwards() -> None:
    text = render(whole("wide_causal"))["hopper.py"]
    assert "    mirrored = gl.where(first_head + abreast >= TILES // kv_tiles, 1, 0)  # the last heads\n" in text
    turned = "q_tile = gl.where(mirrored > 0, q_first + q_end - 1 - at, at)\n"
    assert text.count(turned) == 3 and turned not in render(whole("wide"))["hopper.py"]  # once in each role


def test_signs_of_weights_say_what_dropout_keeps_where_registers_would_not_do() -> None:
    both = "p, p_kept = with_dropped(p, keep_words, dropout_threshold, True) if DROPOUT else (p, p)"
    assert both in render(whole("dropping_wide"))["hopper.py"]
    assert "with_dropped" not in render(whole("dropping"))["hopper.py"]


def test_the_turn_of_the_next_listed_tile_is_read_ahead() -> None:
    """Loops over lists read the number of the next tile a turn ahead, and the writer how many programs have added to
    it."""
    text = render(whole("biased_blocks_wide"))["hopper.py"].partition("\ndef bwd_writer(")[2]
    assert "        for at in range(q_end_at):\n            q_tile = q_ahead\n" in text
    assert text.index("q_ahead = tile_at(Q_LIST_row, at + 1, ") < text.index(
        "q_next = q_ahead * BLOCK_Q\n            order_seen = semaphore_value("
    )
    assert (
        "gl.where(q_start == q_next, order_seen, -1)," in text
        and "kv_next_at = list_position(KV_RANK_row, 1 + " in text
    )


def test_sums_of_wide_heads_lie_in_pieces() -> None:
    """Each has a product of its own, and leaves by itself: two at a time through the slot of V."""
    text = render(whole("pieces"))["hopper.py"].partition("\ndef bwd_consumer(")[2].partition("\ndef bwd_writer(")[0]
    for i in range(3):
        assert f"dk_flight_{i} = warpgroup_mma(ds_cast_operand, q_{i}, dk_{i}, is_async=True)" in text
        assert f"tma_store(dK, [b, h, kv_start, {64 * i}], pieces.index({i % 2}))" in text
    assert (
        "k_all_near_0 if WARP_GROUP == 0 else k_all_near_2," in text
        and "k_all_near_1.slice(WARP_GROUP * 32, 32, 1)," in text
    )
    assert "for at in tl.range(q_first, q_end, disable_licm=True):" in text
    assert (
        "mbarrier.wait(dq_empty.index(0), do_phase)" in text and "dq_phase" not in text
    )  # both slots are alone, and in one phase
    masked = text.partition("if (q_tile < q_full_first)")[2].partition("lse2 = ")[0]
    assert "            kv_idx = kv_start + gl.arange(" in masked and text.count("kv_idx = ") == 1


@pytest.mark.parametrize("name", MADE)
def test_named_barriers_are_apart(name: str) -> None:
    """Those at which the printed roles meet: of the slots of each ring, of parts of tiles, and of turns, for each
    slot and copy."""
    text = render(whole(name))["hopper.py"].partition(f"\ndef {backward(whole(name)).name}_producer(")[2]
    text = text.partition("\ndef jvp_producer(")[0]
    of: dict[str, set[int]] = {}
    for number in re.findall(
        r"\b(?:barrier_sync|barrier_arrive|barrier_arrive_early)\(([^,()]+(?:\([^()]*\)[^,()]*)*),", text
    ):
        if re.search("_(full|empty)", number) is None:  # those are in shared memory
            first = re.sub(
                r"\d \* |\w+_stage|1 - WARP_GROUP|\(WARP_GROUP \+ 1\) % 2|WARP_GROUP|[ +]", "", number
            )  # where its ring's barriers start
            sizes = [
                {"STAGES": 2, "q_stage": stage, "do_stage": stage, "WARP_GROUP": copy}
                for stage in (0, 1)
                for copy in (0, 1)
            ]
            of.setdefault(first, set()).update(eval(number, {}, size) for size in sizes)
    numbers = [number for found in of.values() for number in found]
    assert set(of) in ({"5", "5STAGES", "14", "5STAGESSTAGES"}, {"5", "5STAGES", "14", "6STAGES"})
    assert len(numbers) == len(set(numbers)) and min(numbers) == 5 and max(numbers) < NAMED_BARRIERS


def test_warp_groups_have_the_registers_that_a_program_has() -> None:
    ((kernel, row),) = whole("wide").stand_ins("bwd")
    assert groups(kernel) == [240, 240, 24]  # the producer and the writer are two warps of one group
    assert sum(groups(kernel)) <= lane_registers(kernel, row)


def host_lines(name: str, *words: str) -> list[str]:
    """The lines of @backward with one of these words."""
    host = print_module(whole(name)).partition("host @backward")[2].partition("kernel @")[0]
    return [line.strip() for line in host.splitlines() if any(word in line for word in words)]


def test_programs_of_one_head_draw_their_tiles() -> None:
    """Each when it starts it, the first one too: others wait for it."""
    text = render(whole("wide_causal"))["hopper.py"].partition("\ndef bwd_producer(")[2]
    assert "    # tiles are drawn in the order in which they are started" in text
    assert "what waits for a tile has a larger number\n    pid = broadcast(fetch_next(COUNTER))\n" in text
    assert text.count("pid = broadcast(fetch_next(COUNTER))") == 2 and "    while pid < TILES:\n" in text
    writer = text.partition("\ndef bwd_writer(")[2]
    assert "    kv_start = read_index(work_smem.index(8 * work_stage), 1)\n    while kv_start >= 0:\n" in writer
    shared = (
        render(whole("shared"))["hopper.py"].partition("\ndef bwd_producer(")[2].partition("\ndef jvp_producer(")[0]
    )
    assert "work_smem" not in shared
    narrow = render(whole("narrow_causal"))["hopper.py"].partition("\ndef bwd_writer(")[2]
    assert "\n        q_ahead, order_seen = -1, 0\n" in narrow  # what is known of turns is of this tile
    heads = render(whole("packed_narrow"))["hopper.py"].partition("\ndef bwd_writer(")[2]
    assert "\n    q_ahead, order_seen = -1, 0\n" in heads


def test_programs_share_the_query_heads_of_a_group() -> None:
    """A program has some of them, one after another. Two store the sum of what they have, and a kernel adds up these
    sums."""
    assert host_lines("shared", "_heads", "@dkdv_end", "DKDV_SEMAPHORE", "%split_pairs") == [
        "%split_pairs = map expr((splits + 1) // 2) : i32[] @reg",
        "%DKDV_SEMAPHORE = alloc fill(0) : i32[B, Hkv, split_pairs, Nk] @hbm",
        "%dK_heads = alloc where(split_pairs > 1) otherwise(%dK) : T[B, Hkv, split_pairs, Nk, D_QK] @hbm",
        "%dV_heads = alloc where(split_pairs > 1) otherwise(%dV) : T[B, Hkv, split_pairs, Nk, D_V] @hbm",
        "launch @bwd args(dK=%dK_heads, dV=%dV_heads)",
        "%Summed_heads = if then(@sum_heads) where(split_pairs > 1)",
        "block @sum_heads",
        "launch @dkdv_end args(DK_PARTS=%dK_heads, DV_PARTS=%dV_heads) sizes(splits=split_pairs)",
        "launch @dkdv_end args(DK_PARTS=%dK_parts, DV_PARTS=%dV_parts)",
    ]
    assert "select(in_one_pass > 0, 2, group)" in host_lines("shared", "%splits = ")[0]
    text = print_kernel(backward(whole("shared")))
    assert text.splitlines()[0].endswith("reversed_group, split in splits, hkv in Hkv, b in B)")
    assert text.count(" heads(g_first .. g_end)") == 3 and "%g_first = map expr((group*split) // splits) " in text
    assert (
        "producer_load %Q_pipeline %Q[b, g + group*hkv, q, d_qk]" in text
        and "tma_store %dK[b, hkv, split // 2, kv, d_qk]" in text
    )


def test_a_program_has_one_query_head_where_their_numbers_differ() -> None:
    """A kernel adds up what the programs of a group have."""
    text = print_module(whole("apart"))
    assert host_lines("apart", "_HEADS", "_parts", "@dkdv_end") == [
        "%DK_HEADS = alloc : T[B, Hq, Nk, D_QK] @hbm",
        "%DV_HEADS = alloc : T[B, Hq, Nk, D_V] @hbm",
        "launch @bwd args(dK=%DK_HEADS, dV=%DV_HEADS)",
        "%DK_PARTS = view %DK_HEADS by(heads) : T[B, Hkv, group, Nk, D_QK] @hbm",
        "%DV_PARTS = view %DV_HEADS by(heads) : T[B, Hkv, group, Nk, D_V] @hbm",
        "launch @dkdv_end sizes(splits=group)",
        "%dK_parts = alloc where(splits > 1) otherwise(%dK) : T[B, Hkv, splits, Nk, D_QK] @hbm",
        "%dV_parts = alloc where(splits > 1) otherwise(%dV) : T[B, Hkv, splits, Nk, D_V] @hbm",
        "launch @dkdv args(dK=%dK_parts, dV=%dV_parts)",
        "%Summed_parts = if then(@sum_parts) where(splits > 1)",
        "block @sum_parts",
        "launch @dkdv_end args(DK_PARTS=%dK_parts, DV_PARTS=%dV_parts)",
    ]
    assert "kernel @dkdv_end program_axis(kv) grid(kv in cdiv(Nk, BLOCK_KV), hkv in Hkv, b in B)\n" in text
    assert "    %dK = arg out : T[B, Hq, Nk, D_QK] @hbm\n" in text


def test_an_input_cannot_have_the_name_of_what_the_host_sums() -> None:
    for name in re.findall(r"^ +(d[kv]_\w+) = ", render(whole("shared"))["__init__.py"], re.MULTILINE):
        assert name_problem(name), name


def test_calls_choose_by_their_sizes() -> None:
    text = print_module(whole("wide"))
    enough = "Nk >= 1024 and Nq >= 1024 and B*Hq*Nk >= 480*processors"
    short = "(Nk >= 512 and Nq >= 512 and B*Hq*Nk >= 1536*processors)"
    assert (
        f"if then(@one_pass) where(need_kv and need_q and ({short} or ({enough})) and fused > 0) orelse(@apart)" in text
    )
    assert f"{enough} and Nk <= 8192 and fused > 0) orelse(@apart)" in print_module(whole("blocks"))
    printed = render(lower(spec("full_mha")))["__init__.py"]
    assert 'fused = runtime.is_scheduled(kernels, "bwd", q, k.shape[2])' in printed
