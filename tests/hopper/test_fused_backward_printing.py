"""The Gluon code of the fused backward."""

from __future__ import annotations

import re
from itertools import product

import pytest

from attngen.codegen.render import render
from attngen.ir import gl, only, symbol
from attngen.targets.hopper.configs.sm90 import NAMED_BARRIERS
from attngen.targets.hopper.lowering.assign_barriers import assign_barriers
from attngen.targets.hopper.lowering.lower_pipelines import lower_pipelines
from attngen.tiles.launches import groups, lane_registers
from tests.hopper.fused_backward import (
    CASES,
    backward,
    lowered,
)


def test_an_instance_without_rows_uses_no_semaphore_of_a_pair() -> None:
    """Past the last key, the address of its semaphore would belong to another pair."""
    text = render(lowered("shared"))["hopper.py"].partition("\ndef bwd_consumer(")[2]
    acquire = "    if kv_start < Nk:\n        _semaphore_acquire(dKdV_SEMAPHORE_pair + kv_start, 0, 4 * (split % 2))\n"
    store = (
        "    if split % 2 == 0:\n        _tma_store(\n            dK,\n"
        "            [b, hkv * split_pairs + split // 2, kv_start, 0],\n"
        "            V_smem.index(_WARP_GROUP),\n"
    )
    assert (
        text.index(acquire)
        < text.index(store)
        < text.index("    if kv_start < Nk:\n        _semaphore_release(dKdV_SEMAPHORE_pair + kv_start)\n")
    )


def test_heads_by_tile_are_one_loop() -> None:
    text = render(lowered("packed_narrow"))["hopper.py"]
    assert text.count("    q_tile, g = q_first, g_first\n") == 3  # once in each warp group
    assert text.count("    for _ in range((q_end - q_first) * (g_end - g_first)):\n") == 3
    assert text.count("        q_tile, g = _next_head(q_tile, g, g_first, g_end)\n") == 3
    reducer = text.partition("\ndef bwd_dq_reducer(")[2]
    assert (
        "        q_ahead = gl.where(1 + g < g_end, q_start, q_start + BLOCK_Q)\n" in reducer
    )  # the next semaphore is that of the next head
    assert "hkv * group + gl.where(1 + g < g_end, 1 + g, g_first)" in reducer


def test_heads_of_the_reversed_group_visit_their_tiles_in_reversed_order() -> None:
    text = render(lowered("wide_causal"))["hopper.py"]
    assert (
        "    reversed_L2_group = gl.where(first_head + _swizzle_heads >= TILES // kv_tiles, 1, 0)  # the last heads\n"
        in text
    )
    reversed_index = "q_tile = gl.where(reversed_L2_group > 0, q_first + q_end - 1 - at, at)\n"
    assert text.count(reversed_index) == 3  # once in each warp group
    assert reversed_index not in render(lowered("wide"))["hopper.py"]


def test_signs_of_weights_hold_the_dropout_mask_where_registers_do_not_suffice() -> None:
    both = "p, p_kept = _with_dropped(p, keep_words, dropout_threshold, True) if DROPOUT else (p, p)"
    assert both in render(lowered("dropping_wide"))["hopper.py"]
    assert "with_dropped" not in render(lowered("dropping"))["hopper.py"]


def test_the_semaphore_of_the_next_listed_tile_is_read_ahead() -> None:
    """Loops over lists read the index of the next tile one iteration ahead; the dQ reduction warp also reads its
    semaphore."""
    text = render(lowered("biased_blocks_wide"))["hopper.py"].partition("\ndef bwd_dq_reducer(")[2]
    assert "        for at in range(q_end_at):\n            q_tile = q_ahead\n" in text
    assert text.index("q_ahead = _tile_at(Q_LIST_row, at + 1, ") < text.index(
        "q_next = q_ahead * BLOCK_Q\n            _order_seen = _semaphore_value("
    )
    assert (
        "gl.where(q_start == q_next, _order_seen, -1)," in text
        and "kv_next_at = _list_position(KV_RANK_row, 1 + " in text
    )


def test_gradients_of_wide_heads_lie_in_column_pieces() -> None:
    """Each piece has its own product and its own store; two at a time are staged in the stage of V."""
    text = (
        render(lowered("pieces"))["hopper.py"].partition("\ndef bwd_consumer(")[2].partition("\ndef bwd_dq_reducer(")[0]
    )
    for i in range(3):
        assert f"dk_flight_{i} = warpgroup_mma(ds_cast_operand, q_{i}, dk_{i}, is_async=True)" in text
        assert f"_tma_store(dK, [b, h, kv_start, {64 * i}], pieces.index({i % 2}))" in text
    assert (
        "k_all_ADDR_0 if _WARP_GROUP == 0 else k_all_ADDR_2," in text
        and "k_all_ADDR_1.slice(_WARP_GROUP * 32, 32, 1)," in text
    )
    assert "for at in tl.range(q_first, q_end, disable_licm=True):" in text
    assert (
        "mbarrier.wait(dQ_empty.index(0), dO_phase)" in text and "dQ_phase" not in text
    )  # both pipelines have one stage, and share a phase
    masked = text.partition("if (q_tile < q_full_first)")[2].partition("lse2 = ")[0]
    assert "            kv_idx = kv_start + gl.arange(" in masked and text.count("kv_idx = ") == 1


@pytest.mark.share(32)
@pytest.mark.parametrize("name", CASES)
def test_named_barriers_are_distinct(name: str) -> None:
    """Barriers of the stages of each pipeline, of parts of tiles, and of ping-pong order have distinct numbers for each
    stage and instance, and no others are used."""
    module = lowered(name)
    kernel = assign_barriers(lower_pipelines(module, backward(module)))
    arrays = list(only(kernel.block("entry").ops, gl.NamedBarriers))
    numbers = [
        n for op in arrays for n in range(*(int(e.subs(symbol("STAGES"), 2)) for e in (op.first, op.first + op.count)))
    ]
    assert len(numbers) == len(set(numbers)) and min(numbers) == 5 and max(numbers) < NAMED_BARRIERS
    text = render(module)["hopper.py"].partition(f"\ndef {backward(module).name}_producer(")[2]
    text = text.partition("\ndef jvp_producer(")[0]
    used = set()
    for number in re.findall(
        r"\b(?:_barrier_sync|_barrier_arrive|_barrier_arrive_early)\(([^,()]+(?:\([^()]*\)[^,()]*)*),", text
    ):
        if re.search("_(full|empty)", number) is None:  # those are in shared memory
            for stage, instance in product((0, 1), (0, 1)):
                size = {"STAGES": 2, "Q_stage": stage, "dO_stage": stage, "_WARP_GROUP": instance}
                used.add(eval(number, {}, size))
    assert used == set(numbers)


def test_warp_groups_use_at_most_the_registers_of_a_program() -> None:
    ((kernel, row),) = lowered("wide").stand_ins("bwd")
    assert groups(kernel) == [240, 240, 24]  # the producer and the dQ reduction warp are two warps of one group
    assert sum(groups(kernel)) <= lane_registers(kernel, row)


@pytest.mark.share(16)
def test_programs_of_one_head_fetch_their_tiles() -> None:
    """A program fetches each tile, also the first, when it starts the tile, because other tiles wait for it."""
    text = render(lowered("wide_causal"))["hopper.py"].partition("\ndef bwd_producer(")[2]
    assert "    # tiles are fetched in the order in which they start" in text
    assert "a tile waits only for tiles with smaller numbers\n    pid = _broadcast(_fetch_next(COUNTER))\n" in text
    assert text.count("pid = _broadcast(_fetch_next(COUNTER))") == 2 and "    while pid < TILES:\n" in text
    reducer = text.partition("\ndef bwd_dq_reducer(")[2]
    assert "    kv_start = _read_index(Work_smem.index(8 * Work_stage), 1)\n    while kv_start >= 0:\n" in reducer
    shared = (
        render(lowered("shared"))["hopper.py"].partition("\ndef bwd_producer(")[2].partition("\ndef jvp_producer(")[0]
    )
    assert "Work_smem" not in shared
    narrow = render(lowered("narrow_causal"))["hopper.py"].partition("\ndef bwd_dq_reducer(")[2]
    assert "\n        q_ahead, _order_seen = -1, 0\n" in narrow  # semaphore values read ahead belong to this tile
    heads = render(lowered("packed_narrow"))["hopper.py"].partition("\ndef bwd_dq_reducer(")[2]
    assert "\n    q_ahead, _order_seen = -1, 0\n" in heads
