"""Wrong IR of warp-specialized forwards, which the parser or the verifier refuses."""

from __future__ import annotations

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.verify import verify
from tests.hopper.common import edited, forward_kernel, lowered


def test_a_half_needs_its_half_of_the_dropout_mask() -> None:
    with pytest.raises(VerifyError, match="`types`: .*keeps the type of an f32 value, by a b1 of its dimensions"):
        verify(edited("causal_dropout_mqa", ("keep(%keep_halves.left)", "keep(%keep)")))


# Edits of the IR text, and the rule that refuses each.
REFUSED = {
    "rows": (
        "instances(2) rows(64)",
        "instances(1) rows(64)",
        "`warp-groups`: .* @consumer has 1 instances of 64 rows, and sm90 has BLOCK_Q=128",
    ),
    "instances": (
        "instances(2) rows(64)",
        "instances(4) rows(32)",
        "`warp-groups`: .* @consumer has 4 instances; expected 1 to 3",
    ),
    "registers": ("registers(240)", "registers(241)", "`warp-groups`: .* has 241 registers; expected a multiple of 8"),
    "all registers": (
        "registers(24)",
        "registers(40)",
        "`warp-groups`: .* have 520 registers for each lane of a warp; a program has 504",
    ),
    "a body's name": ("last(@last)", "last(@lost)", "`defined`: .* %keys runs @lost, which is no body"),
    "an order": (
        "full(0 .. kv_full_end)",
        "full(1 .. kv_full_end)",
        "`same-tiles`: .* runs over other tiles of class full",
    ),
    "a bound": ("%kv_full_end = map expr(max(0", "%kv_full_end = map expr(max(1", "`same-tiles`: .* %kv_full_end is"),
    "a field": ("l=%l_next, acc", "acc", "`loop-bodies`: .* take and yield does not fit what the loop carries"),
    "a wait": (
        " keep_alive(%weights_operand)",
        "",
        "`wgmma-wait`: .* %acc_next keeps nothing alive; expected %weights_operand",
    ),
    "a product in flight": ("%masked = mask %s ", "%masked = mask %s_flight ", "`types`: "),
    "a type": (
        "%k = consumer_wait %K_pipeline : T[BLOCK_KV, D_QK]",
        "%k = consumer_wait %K_pipeline : T[BLOCK_KV, D_V]",
        "`types`: .* waits for a tile of another type",
    ),
    "a memory space": (
        "= pipeline stages(2) per_instance(consumer) : T[BLOCK_Q, D_QK] @sram",
        "= pipeline stages(2) per_instance(consumer) : T[BLOCK_Q, D_QK] @reg",
        "`types`",
    ),
    "work tiles of another type": (
        "%Work_pipeline = pipeline stages(2) : i32[]",
        "%Work_pipeline = pipeline stages(2) : i64[]",
        "`types`: .* is of tiles, of row vectors that a warp group writes, or of work tiles i32",
    ),
    "no work loop that fetches": (
        " fetches(yes)",
        "",
        "`types`: .* is one of several work loops; expected one of them to fetch work tiles",
    ),
    "a warp group without work tiles": (
        "    %work = work_loop %Work_pipeline of(@tile) body(@consume)\n",
        "",
        "`defined`: .* @consume is run by the ops of 0 blocks",
    ),
    "another block of the work tile": (
        "of(@tile) body(@consume)",
        "of(@copy) body(@consume)",
        "`defined`: .* @copy is run before each work tile, and is also the body",
    ),
    "another pipeline": (
        "work_loop %Work_pipeline of(@tile) body(@consume)",
        "work_loop %K_pipeline of(@tile) body(@consume)",
        "`types`: .* and all to use one pipeline",
    ),
    "no wait for the store of an output": (
        "    tma_store_wait %O_pipeline\n",
        "",
        "`protocol`: .* ends while a TMA store reads %O_pipeline",
    ),
    "a pipeline of another warp group": (
        "per_instance(consumer)",
        "per_instance(producer)",
        "`protocol`: .* uses %Q_pipeline, which belongs to another warp group",
    ),
    "a pinned row of another type": (
        "%soft_base_deferred = pin_after_wait %soft.base",
        "%soft_base_deferred = pin_after_wait %qk_scale",
        "`types`: .* changes the type of a value",
    ),
    "a pin after no wait": (
        "    %k = consumer_wait",
        "    %m_deferred = pin_after_wait %m : f32[BLOCK_Q] @reg\n    %k = consumer_wait",
        "`types`: .* is pinned after a wgmma_wait",
    ),
    "rows of scores": (
        "softmax_stats %masked m(%m)",
        "softmax_stats %m m(%m)",
        "`types`: .*needs scores in f32, m of their rows",
    ),
    "a guard": (
        "scale(%qk_scale) : f32[BLOCK_Q] @reg",
        "scale(%qk_scale) guard(no) : f32[BLOCK_Q] @reg",
        "`types`: .* guards `no`",
    ),
    "whole scores": (
        "softmax_weights %soft_halves.right",
        "softmax_weights %masked",
        "`types`: .*needs scores of its own type, f32, a base for each row",
    ),
    "halves of rows": (
        "split_halves %masked over(BLOCK_KV)",
        "split_halves %masked over(BLOCK_Q)",
        "`types`: .* has halves of f32\\[BLOCK_Q, HALF_KV\\] over BLOCK_Q",
    ),
    "halves as wholes": (
        "split_halves %masked over(BLOCK_KV) : f32[BLOCK_Q, HALF_KV]",
        "split_halves %masked over(BLOCK_KV) : f32[BLOCK_Q, BLOCK_KV]",
        "`types`: .*expected f32\\[BLOCK_Q, HALF_KV\\]",
    ),
    "partial sums of other columns": (
        "partial_reduce %soft_right over(HALF_KV)",
        "partial_reduce %soft_right over(BLOCK_KV)",
        "`types`: .* sums f32\\[BLOCK_Q, HALF_KV\\] over BLOCK_KV",
    ),
    "a pin of scores": (
        "%masked = mask %s",
        "%held = pin_before_wait %s : f32[BLOCK_Q, BLOCK_KV] @reg\n    %masked = mask %held",
        "`types`: .*: pins f32\\[BLOCK_Q, BLOCK_KV\\]; expected a row vector of f32",
    ),
    "other halves": (
        "concat_halves %soft_left %soft_right",
        "concat_halves %soft_left %masked",
        "`types`: .* concatenates %soft_left and %masked, whose types differ",
    ),
    "a layout": (
        "to(operand)",
        "to(memory)",
        "`types`: .* converts to\\(memory\\); expected scores, acc, partials, operand",
    ),
    "memory": (
        "128 num_warps=4 num_stages=2 TMA",
        "128 num_warps=4 num_stages=4 TMA",
        "`fits`: .* needs 360,6.. bytes of shared memory",
    ),
    "barriers": (
        "KV=128 num_warps=4 num_stages=2 TMA",
        "KV=16 num_warps=4 num_stages=6 TMA",
        "`fits`: .* the stages of its pipelines take 16 named barriers; expected 11 at most",
    ),
}

# The same for a kernel in ping-pong order.
PING_PONG_REFUSED = {
    "a word": (
        "scheduler_barrier init",
        "scheduler_barrier begin",
        "`types`: .* does `begin`; expected init, sync, arrive, tail",
    ),
    "a warp group of one instance": (
        "    producer_tail %Q_pipeline\n",
        "    producer_tail %Q_pipeline\n    scheduler_barrier sync\n",
        "`types`: .* is in a warp group of one instance",
    ),
    "barriers": (
        "num_stages=2 TMA=1 backend",
        "num_stages=3 TMA=1 backend",
        (
            "`fits`: .* the stages of its pipelines take 10 named barriers; expected 8 at most, because warp groups "
            "in ping-pong order"
        ),
    ),
}


@pytest.mark.parametrize("mistake", PING_PONG_REFUSED)
def test_wrong_scheduler_barriers_are_refused(mistake: str) -> None:
    old, new, reason = PING_PONG_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("full_mha", (old, new)))


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_ir_is_refused_with_a_reason(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("causal_gqa", (old, new)))


def test_a_kernel_for_an_unknown_backend_is_refused() -> None:
    text = (
        print_module(lowered("causal_gqa"))
        .replace("backend(hopper)", "backend(other)")
        .replace("backend=hopper", "backend=other")
    )
    with pytest.raises(VerifyError, match="is for the backend `other`; expected hopper"):
        verify(parse_module(text))


def test_a_hopper_config_needs_a_warp_specialized_kernel_that_replaces_one() -> None:
    text = print_module(lowered("causal_gqa"))
    made = text[text.index("kernel @fwd backend(hopper)") : text.index("\n\nschedule @fwd")]
    with pytest.raises(VerifyError, match="`header`: kernel @fwd: `backend hopper`; expected one of triton"):
        verify(parse_module(text.replace(f"\n\n{made}", "")))
    with pytest.raises(
        VerifyError, match="`warp-groups`: kernel @other: it stands in for @other, which is no kernel of the module"
    ):
        verify(parse_module(text.replace(made, f"{made}\n\n{made.replace('kernel @fwd', 'kernel @other')}")))


def test_tiles_and_stages_edited_by_hand_give_that_kernel() -> None:
    made = verify(
        edited(
            "causal_gqa",
            (
                "BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend",
                "BLOCK_KV=64 num_warps=4 num_stages=3 TMA=1 backend",
            ),
        )
    )

    assert (
        '("sm90", 2, "hopper"): (\n            (None, {"BLOCK_Q": 128, "BLOCK_KV": 64, "STAGES": 3, "num_warps": 4}),'
        in render(made)["kernels.py"]
    )


def test_a_wrong_warp_group_header_gives_one_sentence() -> None:
    from attngen.errors import IRError

    with pytest.raises(
        IRError,
        match=(
            "not a warp group; expected `warp_group @consumer instances\\(2\\) rows\\(64\\) warps\\(4\\) "
            "registers\\(240\\)`"
        ),
    ):
        edited("causal_gqa", ("instances(2) rows(64)", "twice"))
    assert forward_kernel("causal_gqa").warp_groups[1].warp_group is not None
