"""Wrong IR of the fused backward, which the verifier refuses, and the proof of its barrier protocol."""

from __future__ import annotations

import pytest

from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.verify import verify
from attngen.verify.machine import violation
from attngen.verify.protocol import protocol_of
from tests.helpers import edit
from tests.hopper.fused_backward import (
    CASES,
    PAIR_ACQUIRE,
    backward,
    edited,
    lowered,
)

UNSWITCH_REFUSED = {
    "a row too few": ("q_start - 41 > kv_start", "q_start - 42 > kv_start"),
    "a key too few": ("kv_start > Nk - Nq + q_start + 1", "kv_start > Nk - Nq + q_start + 2"),
    "queries past the end": ("BLOCK_Q - Nq + q_start > 0", "BLOCK_Q - Nq + q_start > 1"),
    "keys past the end": ("unswitch(BLOCK_KV + kv_start > Nk or ", "unswitch("),
}


@pytest.mark.parametrize("mistake", UNSWITCH_REFUSED)
def test_an_unswitch_condition_that_skips_a_hidden_pair_is_refused(mistake: str) -> None:
    with pytest.raises(VerifyError, match="rule `unswitch`: .* is skipped in tiles in which .* is not proven to hold"):
        verify(edited("window", UNSWITCH_REFUSED[mistake]))


REFUSED = {
    "a stored tile of another type": (
        "producer_store %dS_pipeline %ds_cast",
        "producer_store %dS_pipeline %p",
        "`types`: .*",
    ),
    "a stored part of another size": ("f32[BLOCK_Q, SLICE_QK] @reg", "f32[BLOCK_Q, D_QK] @reg", "`types`: .*"),
    "rows of a tile that belongs to the instance": (
        "%v_ADDR = rematerialize %v",
        "%v_own = slice_rows %v : T[BLOCK_KV, D_V] @sram\n    %v_ADDR = rematerialize %v",
        "`types`: .*",
    ),
    "a rematerialization of no tile": (
        "%k = slice_rows %k_all_ADDR",
        "%far = rematerialize %s : f32[BLOCK_KV, BLOCK_Q] @sram\n    %k = slice_rows %k_all_ADDR",
        "`.*`: .*",
    ),
    "a position in the order that another program has": (
        "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)",
        "order(kv_start // BLOCK_KV)",
        "`types`: .*is not the only acquire of the semaphore of an add after it",
    ),
    "a semaphore that is not released": ("    semaphore_release %dQ_SEMAPHORE[b, h, q_start]\n", "", "`.*`: .*"),
    "the semaphore of another tile": (
        "semaphore_release %dQ_SEMAPHORE[b, h, q_start]",
        "semaphore_release %dQ_SEMAPHORE[b, h, q_start + BLOCK_Q]",
        "`.*`: .*",
    ),
    "a grid in another order": (
        "reversed swizzle_rows(16384)",
        "swizzle_rows(16384)",
        "`same-tiles`: .*its grid is not that of the portable @bwd",
    ),
    "no release of dS": ("    consumer_release %ds_all\n", "", "`protocol`: .*%dS_pipeline"),
    "no release of dQ": (
        "    consumer_release %dq_tile\n",
        "",
        "`loop-bodies`: .*from which @step waits for a tile and releases it",
    ),
    "no store of dQ": ("    producer_store %dQ_pipeline %dq\n", "", "`.*`: .*"),
    "dS released while a product reads it": (
        "    %dq = wgmma_wait %dq_flight : f32[BLOCK_Q, SLICE_QK] @reg\n    consumer_release %ds_all\n",
        "    consumer_release %ds_all\n    %dq = wgmma_wait %dq_flight : f32[BLOCK_Q, SLICE_QK] @reg\n",
        "`protocol`: .*releases a tile of %dS_pipeline while %dq_flight reads it",
    ),
    "one stage of dS": (
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
    "dQ in pieces as wide as those of K": (
        "%dQ_pipeline = pipeline stages(1) columns(32)",
        "%dQ_pipeline = pipeline stages(1) columns(64)",
        "`fits`: .*expected columns.32.",
    ),
    "whole tiles of dQ": (
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
        "over(TILE_KV) : f32[BLOCK_Q, SLICE_QK] @flight",
        "over(TILE_KV) : f32[BLOCK_Q, D_QK] @flight",
        "`types`: .*",
    ),
    "a dQ reduction warp that recomputes scalars": (
        " step(@write) in_order(yes)",
        " step(@write) in_order(yes) recompute(yes)",
        "`loop-bodies`: .*carried sums",
    ),
}

PAIR_RELEASE = "    semaphore_release %dKdV_SEMAPHORE_pair[kv_start]\n"

PAIRS_REFUSED = {
    "a pair without an acquire": (
        PAIR_ACQUIRE,
        "",
        "`same-tiles`: .*expected one semaphore_acquire, all tma_stores, their tma_store_waits",
    ),
    "a program that waits for itself": (
        PAIR_ACQUIRE,
        PAIR_ACQUIRE.replace("split % 2", "split"),
        "`same-tiles`: .*expected one semaphore_acquire",
    ),
    "a late acquire": (
        (
            f"{PAIR_ACQUIRE}    tma_store %dK[b, hkv, split // 2, kv, d_qk] %dk_out staging(%V_pipeline) order(split "
            f"% 2)\n"
        ),
        (
            f"    tma_store %dK[b, hkv, split // 2, kv, d_qk] %dk_out staging(%V_pipeline) order(split % 2)\n"
            f"{PAIR_ACQUIRE}"
        ),
        "`same-tiles`: .*expected one semaphore_acquire",
    ),
    "no release": (PAIR_RELEASE, "", "`same-tiles`: .*expected one semaphore_acquire"),
    "an early release": (
        f"    tma_store_wait %V_pipeline\n{PAIR_RELEASE}",
        f"{PAIR_RELEASE}    tma_store_wait %V_pipeline\n",
        "`same-tiles`: .*expected one semaphore_acquire",
    ),
    "the semaphore of another pair": (
        "base %dKdV_SEMAPHORE[b, hkv, split // 2]",
        "base %dKdV_SEMAPHORE[b, hkv, 0]",
        "`(indexing|same-tiles)`: .*",
    ),
    "an output that is not accumulated": (
        "%dv_out staging(%V_pipeline) order(split % 2)",
        "%dv_out staging(%V_pipeline)",
        "`same-tiles`: .*stores other tiles in order than those that the portable @bwd accumulates",
    ),
    "the tile of another pair": (
        "tma_store %dK[b, hkv, split // 2,",
        "tma_store %dK[b, hkv, 0,",
        "`same-tiles`: .*stores other tiles in order",
    ),
    "a semaphore in an output": (
        "semaphore_acquire %dKdV_SEMAPHORE_pair[kv_start]",
        "semaphore_acquire %dK[b, hkv, 0, kv_start, 0]",
        "`types`: .*has a semaphore in %dK; expected one element of a tensor of i32 of role sum",
    ),
    "an order that is no integer": (
        "semaphore_acquire %dKdV_SEMAPHORE_pair[kv_start] order(split % 2)",
        "semaphore_acquire %dKdV_SEMAPHORE_pair[kv_start] order(split/2)",
        "`types`: .*",
    ),
}

MERGES_REFUSED = {
    "tiles of all pairs": (
        "base %dK[b, hkv, split // 2]",
        "base %dK[b, hkv, 0]",
        "`indexing`: .*expected `split // 2`",
    ),
    "no semaphore": (
        " semaphore(%dKdV_SEMAPHORE[b, hkv, split // 2, kv_start]) order(split % 2)\n",
        "\n",
        "`types`: .*adds in no fixed order; expected a semaphore, and an order",
    ),
    "a store": (
        (
            "ordered_accumulate %dK_head[kv, d_qk] %dk_out check(kv) semaphore(%dKdV_SEMAPHORE[b, hkv, split // 2, "
            "kv_start]) order(split % 2)"
        ),
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
    head, at, rest = print_module(lowered("shared")).partition("kernel @bwd program_axis")
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(parse_module(head + at + edit(rest, (old, new))))


BY_TILE_REFUSED = {
    "one warp group in order of heads": (
        "step(@write) in_order(yes) heads(g_first .. g_end) by_tile(yes)",
        "step(@write) in_order(yes) heads(g_first .. g_end)",
        "`same-tiles`: .*@dq_reducer runs over other tiles of class",
    ),
    "partial tiles first": (
        "step(@write) in_order(yes) heads(g_first .. g_end) by_tile(yes)",
        "step(@write) heads(g_first .. g_end) by_tile(yes)",
        "`loop-bodies`: .*expected heads, and tiles that are in order and not listed",
    ),
    "no heads": (
        "step(@write) in_order(yes) heads(g_first .. g_end) by_tile(yes)",
        "step(@write) in_order(yes) by_tile(yes)",
        "`(loop-bodies|same-tiles)`: .*",
    ),
}


@pytest.mark.parametrize("mistake", BY_TILE_REFUSED)
def test_wrong_loops_over_heads_by_tile_are_refused(mistake: str) -> None:
    old, new, reason = BY_TILE_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("packed", (old, new)))


HEADS_REFUSED = {
    "one warp group with other heads": (
        " step(@write) in_order(yes) heads(g_first .. g_end)",
        " step(@write) in_order(yes)",
        "`same-tiles`: .*",
    ),
    "all heads of the group": (
        "heads(g_first .. g_end)",
        "heads(0 .. group)",
        "`same-tiles`: .*runs over other tiles of class",
    ),
}

ORDERS_REFUSED = {
    "one warp group in another order": (
        " step(@write) in_order(yes)",
        " step(@write)",
        "`same-tiles`: .*run over tiles in different orders",
    ),
    "an order over a gap": (
        "partial(q_first .. q_full_first, q_full_end .. q_end)",
        "partial(q_first .. q_full_first, q_full_end + 1 .. q_end)",
        (
            "`loop-bodies`: .*visits tiles in order; expected @step only, and one range of full tiles with the "
            "partial ones next to it"
        ),
    ),
}

PERSISTENT_REFUSED = {
    "K and V without mbarrier_release": (
        (
            "%K_pipeline = pipeline stages(1) mbarrier_release(yes) : T[TILE_KV, D_QK] @sram\n"
            "    %V_pipeline = pipeline stages(1) per_instance(consumer) mbarrier_release(yes)"
        ),
        (
            "%K_pipeline = pipeline stages(1) : T[TILE_KV, D_QK] @sram\n"
            "    %V_pipeline = pipeline stages(1) per_instance(consumer)"
        ),
        "`fits`: .*the stages of its pipelines take 10 named barriers; expected 9 at most",
    ),
    "work tiles without mbarrier_release": (
        "%Work_pipeline = pipeline stages(2) mbarrier_release(yes)",
        "%Work_pipeline = pipeline stages(2)",
        "`fits`: .*@dq_reducer consumes from %Work_pipeline, and waits at no named barrier; expected mbarrier_release",
    ),
    "three stages of work tiles": (
        "%Work_pipeline = pipeline stages(2)",
        "%Work_pipeline = pipeline stages(3)",
        "`fits`: .*%Work_pipeline has mbarrier_release and 3 stages; expected 2",
    ),
    "two stages of K": (
        "%K_pipeline = pipeline stages(1)",
        "%K_pipeline = pipeline stages(2)",
        "`fits`: .*%K_pipeline has mbarrier_release and 2 stages; expected 1",
    ),
    "Q with mbarrier_release": (
        "%Q_pipeline = pipeline stages(num_stages)",
        "%Q_pipeline = pipeline stages(num_stages) mbarrier_release(yes)",
        "`fits`: .*%Q_pipeline has mbarrier_release, and is consumed in @step; expected it once per work tile",
    ),
    "no release of K": ("    consumer_release %k_all\n", "", "`protocol`: .*producer 0 can wait for ever"),
    "V released while outputs are stored through it": (
        "    tma_store_wait %V_pipeline\n    consumer_release %v\n",
        "    consumer_release %v\n    tma_store_wait %V_pipeline\n",
        "`protocol`: .*releases a tile of %V_pipeline that a TMA store reads",
    ),
    "K released before its products": (
        "    %total = pipelined_loop",
        "    consumer_release %k_all\n    %total = pipelined_loop",
        "`protocol`: .*a tile of %K_pipeline that it has (released or never|not) waited for",
    ),
    "a dQ reduction warp that is not persistent": (
        "    %Work_dQ = work_loop %Work_pipeline of(@tile) body(@reduce_dq)\n",
        "",
        "`defined`: .*@reduce_dq is run by the ops of 0 blocks",
    ),
    "no producer_tail of K": (
        "    producer_tail %K_pipeline\n",
        "",
        "`protocol`: .*arrivals at the barrier of %K_pipeline are awaited by nothing at the end",
    ),
}


@pytest.mark.parametrize("mistake", PERSISTENT_REFUSED)
def test_wrong_persistent_programs_are_refused(mistake: str) -> None:
    old, new, reason = PERSISTENT_REFUSED[mistake]
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
    "the order of another tile": (
        "tile((kv_start // BLOCK_KV) + 1)",
        "tile(kv_start // BLOCK_KV)",
        "`same-tiles`: .*its programs add in another order than those of the portable @bwd",
    ),
    "ranks of another tile": (
        "base %KV_RANK[b, h, q_start // 128]",
        "base %KV_RANK[b, h, 0]",
        "`same-tiles`: .*its programs add in another order",
    ),
    "tile indices from metadata": (
        "step(@write) listed(%Q_LIST_row) in_order(yes)",
        "step(@write) listed(%Q_LIST_row) tile_indices(%LSE2_pipeline) in_order(yes)",
        "`loop-bodies`: .*%dQ_total visits tiles in order",
    ),
}


@pytest.mark.parametrize("mistake", LISTED_REFUSED)
def test_a_wrong_order_among_listed_tiles_is_refused(mistake: str) -> None:
    old, new, reason = LISTED_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("blocks", (old, new)))


@pytest.mark.parametrize("mistake", PIECES_REFUSED)
def test_wrong_pieces_are_refused(mistake: str) -> None:
    old, new, reason = PIECES_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("pieces", (old, new)))


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_ir_is_refused_with_a_reason(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("wide", (old, new)))


@pytest.mark.share(4)
@pytest.mark.parametrize("name", CASES)
def test_the_protocol_of_every_kernel_is_proven(name: str) -> None:
    for depth in (2, 3):
        assert violation(protocol_of(backward(lowered(name)), {"num_stages": depth})) == ""
