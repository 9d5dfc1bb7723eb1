"""The passes that warp-specialize the fused backward: the changes of each to the IR."""

from __future__ import annotations

import re

import pytest

from attngen.codegen.render import render
from attngen.ir.printer import print_kernel, print_module
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from tests.helpers import SPECS, target
from tests.hopper.fused_backward import (
    CASES,
    after_passes,
    backward,
    changed,
    lines,
    lines_of,
    lowered,
)


def test_the_specs_with_a_fused_backward() -> None:
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


@pytest.mark.share(16)
@pytest.mark.parametrize("name", CASES)
def test_a_fused_backward_has_a_dq_reduction_warp(name: str) -> None:
    assert [b.name for b in backward(lowered(name)).warp_groups] == ["producer", "consumer", "dq_reducer"]


def test_split_loops_updates_the_order_of_adds() -> None:
    before, after = (
        re.findall(r" order\((.*)\)\n", print_module(after_passes("wide_causal")[stage]))
        for stage in ("classify-tiles", "split-loops")
    )
    (last,) = (op for op in ("q_start", "BLOCK_Q + Nk - Nq + q_start - 1") if f"max(0, {op})" in after[0])
    assert (
        after == [f"-(kv_start // BLOCK_KV) + min((max(0, {last}) // BLOCK_KV) + 1, cdiv(Nk, BLOCK_KV)) - 1"]
        and before != after
    )


@pytest.mark.share(4)
def test_split_loops_visits_a_tile_for_all_heads_where_some_keys_visit_more_tiles_than_earlier_keys() -> None:
    """Keys of documents and of chunks do: where one ends, the loops of the next keys end later by its length. In
    windows all loops have the same length."""
    chunks = {"heads": {"sharing": "gqa"}, "mask": {"chunked": {"size": 40}}}
    by_data = {"heads": {"sharing": "gqa"}, "mask": {"all_of": ["causal", "document"]}}
    made = {"chunks": lower(make_spec({"name": "one_pass", "head_dim": 128, **chunks}), "split-loops")}
    made["documents"] = lower(make_spec({"name": "one_pass", "head_dim": 128, **by_data}), "split-loops")
    made |= {name: after_passes(name)["split-loops"] for name in ("packed", "shared", "shared_in_a_window")}
    loops = {name: [op for op in module.kernel("bwd").loops if op.heads] for name, module in made.items()}
    assert {name: {op.by_tile for op in found} for name, found in loops.items()} == {
        "chunks": {True},
        "documents": {True},
        "packed": {True},
        "shared": {False},
        "shared_in_a_window": {False},
    }


def test_split_loops_counts_tiles_from_data() -> None:
    before, after = (
        lines_of(after_passes("packed")[stage].kernel("bwd"), "step") for stage in ("classify-tiles", "split-loops")
    )
    head, order = (
        "b, g + group*hkv",
        "order(-(kv_start // BLOCK_KV) + min(document_q_first_count, cdiv(Nk, BLOCK_KV)) - 1)",
    )
    assert [line.replace("@? ", "") for line in after if line not in before] == [
        "%document_q_first_count = count_tiles %DOCUMENT_Q_FIRST[kv] most(BLOCK_Q + q_start - 1) : i32[] @?",
        (
            f"ordered_add %DQ_ACC[{head}, q, d_qk] %dq check(q if partial) semaphore(%dQ_SEMAPHORE[{head}, q_start]) "
            f"{order}"
        ),
    ]


def test_split_loops_looks_up_listed_tiles_at_the_end_of_loops() -> None:
    before, after = (
        lines_of(after_passes("blocks_causal")[stage].kernel("bwd"), "step")
        for stage in ("classify-tiles", "split-loops")
    )
    made = [
        "%KV_RANK_row = base %KV_RANK[b, h, q_start // 128] : ptr[] @?",
        "%kv_end_at = list_position %KV_RANK_row tile({}) : i32[] @?",
        "%kv_next_at = list_position %KV_RANK_row tile((kv_start // BLOCK_KV) + 1) : i32[] @?",
        (
            "ordered_add %DQ_ACC[b, h, q, d_qk] %dq check(q if partial) semaphore(%dQ_SEMAPHORE[b, h, q_start]) "
            "order(kv_end_at - kv_next_at)"
        ),
    ]
    end = "min((max(0, BLOCK_Q + Nk - Nq + q_start - 1) // BLOCK_KV) + 1, cdiv(Nk, BLOCK_KV))"
    for found, tiles in ((before, "cdiv(Nk, BLOCK_KV)"), (after, end)):
        assert [line for line in found if "KV_RANK" in line or line.startswith("ordered_add ")] == [
            line.format(tiles) for line in made
        ]


@pytest.mark.parametrize("name", ["blocks", "blocks_of_packed"])
def test_reduce_dq_moves_lookups_of_listed_tiles_to_the_dq_reduction_warp(name: str) -> None:
    removed, added = changed(name, "insert-pipelines", "reduce-dq", "step")
    made = [line for line in removed if re.search(" = (base|count_tiles|list_position) ", line)]
    assert [line.split()[0] for line in made] == [
        *["%document_q_first_count"] * (name == "blocks_of_packed"),
        *("%KV_RANK_row", "%kv_end_at", "%kv_next_at"),
    ]
    assert not [line for line in added if "KV_RANK" in line]
    assert lines("reduce-dq", "write", name)[: len(made) + 1] == [
        *made,
        "%dq_tile = consumer_wait %dQ_pipeline : f32[BLOCK_Q, D_QK] @sram",
    ]


def test_reduce_dq_moves_the_count_of_tiles_to_the_dq_reduction_warp() -> None:
    removed, added = changed("packed", "insert-pipelines", "reduce-dq", "step")
    (count,) = (line for line in removed if " = count_tiles " in line)
    assert not any(" = count_tiles " in line for line in added) and lines("reduce-dq", "write", "packed")[:2] == [
        count,
        "%dq_tile = consumer_wait %dQ_pipeline : f32[BLOCK_Q, D_QK] @sram",
    ]


def test_warp_specialize_splits_the_keys_between_consumers() -> None:
    text = print_kernel(backward(after_passes("wide")["warp-specialize"]))
    assert text.startswith(
        "kernel @bwd backend(hopper) program_axis(kv) grid(kv in cdiv(Nk, BLOCK_KV) reversed "
        "swizzle_rows(16384), h in Hq, b in B)"
    )
    assert (
        "  warp_group @consumer instances(2) rows(64) warps(4) registers(240)\n" in text
        and "  warp_group @dq_reducer instances(1) warps(1)" in text
    )


def test_select_tiles_reverses_the_last_group_of_heads_where_earlier_keys_see_more_queries() -> None:
    made = after_passes("wide_causal")
    stage = [*made][[*made].index("select-tiles") - 1]
    before, after = (print_kernel(made[name].kernel("bwd")).splitlines() for name in (stage, "select-tiles"))
    order = (
        "-(kv_start // BLOCK_KV) + min((max(0, BLOCK_Q + Nk - Nq + q_start - 1) // BLOCK_KV) + 1, cdiv(Nk, "
        "BLOCK_KV)) - 1"
    )
    add = "ordered_add %DQ_ACC[b, h, q, d_qk] %dq check(q if partial) semaphore(%dQ_SEMAPHORE[b, h, q_start])"
    assert [line.strip() for line in after if line not in before] == [
        (
            "kernel @bwd program_axis(kv) grid(kv in cdiv(Nk, BLOCK_KV) reversed swizzle_rows(16384) reversed_group, "
            "h in Hq, b in B)"
        ),
        f"{add} order(select(reversed_L2_group > 0, (kv_start // BLOCK_KV), {order}))",
    ]
    assert not [name for name in ("wide", "streaming", "packed") if backward(lowered(name)).grid[0].reversed_group]


def test_windows_and_padded_sequences_have_a_reversed_group_too() -> None:
    """A program's position in the order of adds is the number of earlier key tiles that also add to the query tile: all
    except those whose loops have ended before it, and those that see only padding."""
    skipped = {
        "window": "(max(0, Nk - Nq + q_start - 40) // BLOCK_KV)",
        "dropping": "(max(0, key_padding_first) // BLOCK_KV)",
    }
    for name, tiles in skipped.items():
        text = print_kernel(backward(lowered(name)))
        assert f"order(select(reversed_L2_group > 0, (kv_start // BLOCK_KV) - {tiles}, " in text, name


def test_select_tiles_groups_few_heads_where_programs_have_two_wide_ones() -> None:
    grids = {
        name: print_kernel(backward(lowered(name))).splitlines()[0]
        for name in ("shared", "wide_causal", "one_head", "dropping_wide")
    }
    few = {name: "reversed swizzle(4) swizzle_rows(16384)" in grid for name, grid in grids.items()}
    assert few == {"shared": True, "wide_causal": False, "one_head": False, "dropping_wide": True}
    text = render(lowered("shared"))["hopper.py"].partition("\ndef bwd(")[2]
    assert "    _swizzle_heads = gl.maximum(1, gl.minimum(4, 16384 // Nk))\n" in text


def test_legalize_gluon_makes_the_second_program_of_a_pair_add_after_the_first() -> None:
    assert changed("shared", "ping-pong", "legalize-gluon", "consumer") == (
        [
            f"ordered_accumulate %{name}[b, hkv, split // 2, kv, {width}] %{name.lower()}_out check(kv) "
            f"semaphore(%dKdV_SEMAPHORE[b, hkv, split // 2, kv_start]) order(split % 2){ends}"
            for name, width, ends in (("dK", "d_qk", ""), ("dV", "d_v", " ends(yes)"))
        ],
        [
            "semaphore_acquire %dKdV_SEMAPHORE_pair[kv_start] order(split % 2)",
            "tma_store %dK[b, hkv, split // 2, kv, d_qk] %dk_out staging(%V_pipeline) order(split % 2)",
            "tma_store %dV[b, hkv, split // 2, kv, d_v] %dv_out staging(%V_pipeline) order(split % 2)",
            "tma_store_wait %V_pipeline",
            "semaphore_release %dKdV_SEMAPHORE_pair[kv_start]",
        ],
    )
    assert "%dKdV_SEMAPHORE_pair = base %dKdV_SEMAPHORE[b, hkv, split // 2] : ptr[] @reg" in lines(
        "legalize-gluon", "entry", "shared"
    )


def test_mask_out_of_bounds_queries_masks_queries_past_the_end() -> None:
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


def test_split_boundary_masks_tests_each_bound_of_a_window_and_the_ends() -> None:
    removed, added = changed("window", "hoist-bias", "split-boundary-masks", "step")
    assert [line.partition(" : ")[0] for line in removed] == [
        (
            "%masked = mask %s where(q_idx >= -Nk + Nq + kv_idx and q_idx <= -Nk + Nq + kv_idx + 40 and kv_idx < Nk "
            "and q_idx < Nq)"
        )
    ]
    assert [line.partition(" : ")[0] for line in added] == [
        "%masked_1 = mask %s where(q_idx >= -Nk + Nq + kv_idx) unswitch(BLOCK_KV + kv_start > Nk - Nq + q_start + 1)",
        (
            "%masked_2 = mask %masked_1 where(q_idx <= -Nk + Nq + kv_idx + 40) unswitch(BLOCK_Q + Nk - Nq + q_start "
            "- 41 > kv_start)"
        ),
        (
            "%masked = mask %masked_2 where(kv_idx < Nk and q_idx < Nq) unswitch(BLOCK_KV + kv_start > Nk or BLOCK_Q "
            "- Nq + q_start > 0)"
        ),
    ]


def test_split_boundary_masks_tests_all_bounds_at_once_where_another_mask_applies_in_all_tiles() -> None:
    removed, added = changed("dilated", "hoist-bias", "split-boundary-masks", "step")
    assert len(removed) == 1 and len(added) == 2
    assert "where(((Nk - Nq + q_idx) % 2) == (kv_idx % 2)) when(always) :" in added[0]
    assert (
        "%masked = mask %masked_1 where(q_idx >= -Nk + Nq + kv_idx and " in added[1]
        and " when(always) unswitch(" in added[1]
    )


@pytest.mark.parametrize("name", ["wide_causal", "documents", "lengths", "padding"])
def test_split_boundary_masks_does_not_split_other_masks(name: str) -> None:
    assert changed(name, "hoist-bias", "split-boundary-masks", "step") == ([], [])


def test_insert_pipelines_loads_row_vectors_of_queries_as_metadata() -> None:
    assert "%LSE2_pipeline = pipeline stages(num_stages) metadata_of(%Q_pipeline) : f32[BLOCK_Q] @sram" in lines(
        "insert-pipelines", "entry"
    )
    assert lines("insert-pipelines", "copy") == [
        "producer_load %LSE2_pipeline %LSE2[b, h, q]",
        "producer_load %DELTA_pipeline %DELTA[b, h, q]",
        "producer_load %Q_pipeline %Q[b, h, q, d_qk]",
        "producer_load %dO_pipeline %dO[b, h, q, d_v]",
        "yield",
    ]


@pytest.mark.parametrize(("name", "part"), [("wide", "BLOCK_Q, SLICE_QK"), ("narrow", "SLICE_Q, D_QK")])
def test_reduce_dq_multiplies_ds_of_both_consumers(name: str, part: str) -> None:
    removed, added = changed(name, "insert-pipelines", "reduce-dq", "step")
    order = "semaphore(%dQ_SEMAPHORE[b, h, q_start]) order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)"
    assert removed == [
        "%dk_next = dot %ds %q over(BLOCK_Q) acc(%dk) : f32[BLOCK_KV, D_QK] @reg",
        "%dq = dot %ds %k over(BLOCK_KV) : f32[BLOCK_Q, D_QK] @reg",
        f"ordered_add %DQ_ACC[b, h, q, d_qk] %dq check(q if partial) {order}",
    ]
    assert added == [
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
        f"ordered_add %DQ_ACC[b, h, q, d_qk] %dq_tile check(q if partial) {order}",
        "consumer_release %dq_tile",
        "semaphore_release %dQ_SEMAPHORE[b, h, q_start]",
        "yield",
    ]


@pytest.mark.parametrize("name", ["wide", "narrow"])
def test_software_pipeline_gradients_issues_scores_and_dp_together(name: str) -> None:
    """P is packed before the wait for dP if a tile has at most 64 queries."""
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
        "%k_all_ADDR = rematerialize %k_all : T[TILE_KV, D_QK] @sram",
        "%k = slice_rows %k_all_ADDR : T[BLOCK_KV, D_QK] @sram",
        "%v_ADDR = rematerialize %v : T[BLOCK_KV, D_V] @sram",
    ]


def test_reduce_dq_gives_do_and_dq_one_stage_where_tiles_take_most_of_the_memory() -> None:
    """dQ lies in column pieces half as wide as those of K, because an instance has one and a half of those."""
    removed, added = changed("pieces", "insert-pipelines", "reduce-dq", "entry")
    assert removed == [
        "%K_pipeline = pipeline stages(1) per_instance(consumer) columns(64) : T[BLOCK_KV, D_QK] @sram",
        "%dO_pipeline = pipeline stages(num_stages) : T[BLOCK_Q, D_V] @sram",
    ]
    assert added == [
        "%K_pipeline = pipeline stages(1) columns(64) : T[TILE_KV, D_QK] @sram",
        "%dO_pipeline = pipeline stages(1) : T[BLOCK_Q, D_V] @sram",
        "%dS_pipeline = pipeline stages(num_stages) : T[TILE_KV, BLOCK_Q] @sram",
        "%dQ_pipeline = pipeline stages(1) columns(32) : f32[BLOCK_Q, D_QK] @sram",
    ]


def test_software_pipeline_gradients_issues_dq_last_where_registers_do_not_suffice() -> None:
    """Then P is packed together with dS, dQ reuses the registers of the other products' operands, and the loop
    recomputes its scalars."""
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
        for warp_group in ("consumer", "dq_reducer")
        for line in lines("software-pipeline-gradients", warp_group, "pieces")
        if " = pipelined_loop " in line
    ]
    assert ["recompute(yes)" in line for line in loops] == [True, False]


@pytest.mark.parametrize("name", ["capped_wide", "capped_whole"])
def test_software_pipeline_gradients_issues_dp_late_where_registers_do_not_suffice(name: str) -> None:
    """Then dP has no scheduler barrier, and the value of S that dS needs is pinned before it."""
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
            (
                "partial(q_full_end_at .. q_end_at) full(0 .. q_full_end_at) step(@write) listed(%Q_LIST_row) "
                "in_order(yes)"
            ),
        ),
    ],
)
def test_software_pipeline_gradients_merges_two_loops(name: str, order: str) -> None:
    """Where a mask bounds or lists tiles, they are visited in order."""
    assert len([line for line in lines("reduce-dq", "dq_reducer", name) if " = loop q " in line]) == 2
    (writing,) = [
        line for line in lines("software-pipeline-gradients", "dq_reducer", name) if " = pipelined_loop q " in line
    ]
    assert writing.endswith(order)


def test_persistent_scheduler_makes_programs_of_one_head_persistent() -> None:
    tails = [f"producer_tail %{pipeline}_pipeline" for pipeline in ("K", "V", "Q", "dO", "Work")]
    assert lines("persistent-scheduler", "producer") == [
        "%Fetched = work_loop %Work_pipeline of(@tile) body(@produce) fetches(yes)",
        *tails,
    ]
    assert lines("ping-pong", "consumer") == [
        "scheduler_barrier init",
        "%work = work_loop %Work_pipeline of(@tile) body(@consume)",
        "scheduler_barrier tail",
    ]
    assert lines("persistent-scheduler", "dq_reducer") == [
        "%Work_dQ = work_loop %Work_pipeline of(@tile) body(@reduce_dq)"
    ]
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
    assert lines("persistent-scheduler", "reduce_dq") == lines("skip-masked-tiles", "dq_reducer")
    assert lines("legalize-gluon", "consume")[-3:] == [
        "tma_store %dV[b, h, kv, d_v] %dv_out staging(%V_pipeline)",
        "tma_store_wait %V_pipeline",
        "consumer_release %v",
    ]


@pytest.mark.parametrize("name", ["shared", "pieces"])
def test_programs_of_several_heads_or_wide_heads_are_not_persistent(name: str) -> None:
    assert lines("persistent-scheduler", "consumer", name) == lines("skip-masked-tiles", "consumer", name)


def test_ping_pong_orders_two_groups_of_products_per_tile() -> None:
    ordered = [
        line for line in lines("ping-pong", "step") if line.startswith("scheduler_barrier ") or "= wgmma " in line
    ]
    assert [line.split()[0] if "=" in line else line for line in ordered] == [
        *("scheduler_barrier sync", "%s_flight", "%dp_flight", "scheduler_barrier arrive"),
        *("scheduler_barrier sync", "%dv_flight", "%dk_flight", "%dq_flight", "scheduler_barrier arrive"),
    ]
    consumer = lines("ping-pong", "consumer")
    assert (consumer[0], consumer[-1]) == ("scheduler_barrier init", "scheduler_barrier tail")
