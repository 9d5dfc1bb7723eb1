"""The passes that warp-specialize the forward: the changes of each to the IR."""

from __future__ import annotations

import pytest

from attngen.codegen.render import render
from attngen.ir import only, pipe
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_kernel, print_module
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.targets.hopper.passes.defer_row_reduction import DeferRowReduction
from attngen.targets.hopper.passes.split_softmax import SplitSoftmax
from attngen.verify import verify
from tests.helpers import target
from tests.hopper.common import (
    WARP_SPECIALIZED,
    after_passes,
    edited_module,
    index_of,
    lines,
    lowered,
    op_kinds,
)
from tests.hopper.texts import texts_of

FORWARD = texts_of("causal_gqa", "fwd")


def test_warp_specialize_gives_all_work_to_the_consumer() -> None:
    text = print_module(FORWARD.module("warp-specialize"))
    assert (
        "kernel @fwd backend(hopper) program_axis(q) grid(q in cdiv(Nq, BLOCK_Q) reversed swizzle(8), h in Hq, b in B)"
    ) in text
    assert (
        "  warp_group @producer instances(1) warps(1) registers(24)\n"
        "  warp_group @consumer instances(2) rows(64) warps(4) registers(240)\n"
    ) in text
    assert "  sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend=hopper\n" in text
    assert lines("warp-specialize", "entry")[-1].startswith("%kv_full_end = map")
    assert op_kinds("warp-specialize", "consumer").count("loop") == 2 and "load" in op_kinds("warp-specialize", "step")
    assert print_module(parse_module(text)) == text


def test_insert_pipelines_moves_loads_to_the_producer() -> None:
    assert lines("insert-pipelines", "entry")[-3:] == [
        "%Q_pipeline = pipeline stages(1) per_instance(consumer) : T[BLOCK_Q, D_QK] @sram",
        "%K_pipeline = pipeline stages(num_stages) : T[BLOCK_KV, D_QK] @sram",
        "%V_pipeline = pipeline stages(num_stages) : T[BLOCK_KV, D_V] @sram",
    ]
    assert lines("insert-pipelines", "producer") == [
        "producer_load %Q_pipeline %Q[b, h, q, d_qk]",
        "%copy_keys_full = loop kv ranges(0 .. kv_full_end) body(@copy) cls(full)",
        "%copy_keys_partial = loop kv ranges(kv_full_end .. kv_end) body(@copy) cls(partial)",
        "producer_tail %K_pipeline",
        "producer_tail %V_pipeline",
    ]
    assert lines("insert-pipelines", "copy") == [
        "producer_load %K_pipeline %K[b, h // group, kv, d_qk]",
        "producer_load %V_pipeline %V[b, h // group, kv, d_v]",
        "yield",
    ]
    step = op_kinds("insert-pipelines", "step")
    assert step.index("consumer_wait") < step.index("dot") < step.index("consumer_release") and "load" not in step


def test_async_mma_waits_for_each_product_where_it_was() -> None:
    assert op_kinds("insert-pipelines", "step").count("dot") == 2
    step = op_kinds("async-mma", "step")
    assert "dot" not in step and [k for k in step if k in ("wgmma", "wgmma_wait", "consumer_release", "pack")] == [
        *("wgmma", "wgmma_wait", "consumer_release"),
        *("pack", "wgmma", "wgmma_wait", "consumer_release"),
    ]
    assert "%acc_next = wgmma_wait %acc_flight keep_alive(%p_cast) : f32[BLOCK_Q, D_V] @reg" in lines(
        "async-mma", "step"
    )


def test_software_pipeline_softmax_issues_the_next_product_before_it_waits_for_the_last() -> None:
    steps = {
        block: [k for k in op_kinds("software-pipeline-softmax", block) if k != "arg"]
        for block in ("first", "step", "last")
    }
    assert steps["first"][:5] == ["consumer_wait", "wgmma", "wgmma_wait", "consumer_release", "mask"]
    assert steps["step"][:6] == ["consumer_wait", "wgmma", "consumer_wait", "wgmma", "wgmma_wait", "consumer_release"]
    order = steps["step"]
    assert order.index("softmax_step") < order.index("wgmma_wait", order.index("wgmma_wait") + 1) < len(order) - 1
    assert steps["last"] == ["consumer_wait", "wgmma", "wgmma_wait", "consumer_release", "yield"]
    assert lines("software-pipeline-softmax", "producer")[1:3] == [
        "%copy_keys_partial = loop kv ranges(kv_full_end .. kv_end) body(@copy) cls(partial)",
        "%copy_keys_full = loop kv ranges(0 .. kv_full_end) body(@copy) cls(full)",
    ]
    (pipelined,) = (line for line in lines("software-pipeline-softmax", "consumer") if "pipelined_loop" in line)
    assert pipelined == (
        "%keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end) carry(m=%m_init, l=%l_init, "
        "acc=%acc_init) "
        "first(@first) step(@step) last(@last)"
    )


def test_split_softmax_waits_for_the_product_between_halves() -> None:
    before, after_it = (lines(name, "step") for name in ("software-pipeline-softmax", "split-softmax"))
    start, end = index_of(before, "%soft"), index_of(before, "%acc_next")
    assert after_it[:start] == before[:start]
    assert after_it[start:] == [
        "%soft = softmax_stats %masked m(%m) scale(%qk_scale) : f32[BLOCK_Q] @reg",
        "%soft_halves = split_halves %masked over(BLOCK_KV) : f32[BLOCK_Q, HALF_KV] @reg",
        (
            "%soft_left = softmax_weights %soft_halves.left base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, "
            "HALF_KV] @reg"
        ),
        "%p_sum_left = reduce sum %soft_left over(HALF_KV) : f32[BLOCK_Q] @reg",
        (
            "%l_next_left = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum_left) : "
            "f32[BLOCK_Q] @reg"
        ),
        *before[end:-1],
        (
            "%soft_right = softmax_weights %soft_halves.right base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, "
            "HALF_KV] @reg"
        ),
        "%p_sum_right = reduce sum %soft_right over(HALF_KV) : f32[BLOCK_Q] @reg",
        "%l_next = map expr(before + p_sum) uses(before=%l_next_left, p_sum=%p_sum_right) : f32[BLOCK_Q] @reg",
        "%soft_all = concat_halves %soft_left %soft_right over(BLOCK_KV) : f32[BLOCK_Q, BLOCK_KV] @reg",
        "%p_cast = pack %soft_all : T[BLOCK_Q, BLOCK_KV] @reg",
        before[-1],
    ]
    for block in ("first", "last", "consumer", "producer", "entry"):
        assert lines("split-softmax", block) == lines("software-pipeline-softmax", block)


def test_defer_row_reduction_reduces_rows_after_the_loop() -> None:
    before, made = (
        {block: lines(name, block) for block in ("consumer", "first", "step")}
        for name in ("split-softmax", "defer-row-reduction")
    )
    changed = {block: [line for line in made[block] if line not in before[block]] for block in made}
    assert changed["consumer"] == [
        "%l_init = init 0 : f32[BLOCK_Q, _PARTIALS] @reg",
        "%keys_l = reduce sum %keys.l over(_PARTIALS) : f32[BLOCK_Q] @reg",
        "%inv_l = map expr(select(l > 0, 1/l, 0)) uses(l=%keys_l) : f32[BLOCK_Q] @reg",
        *(line.replace("%keys.l,", "%keys_l,") for line in before["consumer"] if line.startswith("%lse = map")),
    ]
    assert changed["step"] == [
        "%l = arg carry : f32[BLOCK_Q, _PARTIALS] @reg",
        "%p_sum_left = partial_reduce %soft_left over(HALF_KV) : f32[BLOCK_Q, _PARTIALS] @reg",
        (
            "%l_next_left = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum_left) : "
            "f32[BLOCK_Q, _PARTIALS] @reg"
        ),
        "%p_sum_right = partial_reduce %soft_right over(HALF_KV) : f32[BLOCK_Q, _PARTIALS] @reg",
        (
            "%l_next = map expr(before + p_sum) uses(before=%l_next_left, p_sum=%p_sum_right) : f32[BLOCK_Q, "
            "_PARTIALS] @reg"
        ),
    ]
    assert (
        "%p_sum_in_first = partial_reduce %soft_in_first.p over(BLOCK_KV) : f32[BLOCK_Q, _PARTIALS] @reg"
        in changed["first"]
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%l_init = init 0", "%l_init = init 1"),
        ("%l_next = map expr(before + p_sum)", "%l_next = map expr(before + p_sum + 1)"),
        ("%l_next = map expr(before + p_sum)", "%l_next = map expr(before*p_sum)"),
        ("%l_next = map expr(before + p_sum)", "%l_next = map expr(max(before, p_sum))"),
        ("uses(acc=%acc_next, alpha=%soft.alpha)", "uses(acc=%acc_next, alpha=%l_next_left)"),
    ],
)
def test_other_sums_are_not_deferred(old: str, new: str) -> None:
    made = FORWARD.module("split-softmax")
    other = edited_module(made, (old, new))
    assert DeferRowReduction().run(made).warp_specialized != made.warp_specialized
    assert DeferRowReduction().run(other).warp_specialized == other.warp_specialized


def test_split_softmax_applies_dropout_to_each_half() -> None:
    step = lines("split-softmax", "step", "causal_dropout_mqa")
    left = index_of(step, "%l_next_left")
    assert step[left + 1 : left + 3] == [
        "%keep_halves = split_halves %keep over(BLOCK_KV) : b1[BLOCK_Q, HALF_KV] @reg",
        "%p_kept_left = dropout %soft_left keep(%keep_halves.left) : f32[BLOCK_Q, HALF_KV] @reg",
    ]
    assert left < index_of(step, "%acc_next") < index_of(step, "%soft_right")
    right = index_of(step, "%p_kept_right")
    assert step[right : right + 2] == [
        "%p_kept_right = dropout %soft_right keep(%keep_halves.right) : f32[BLOCK_Q, HALF_KV] @reg",
        "%p_kept = concat_halves %p_kept_left %p_kept_right over(BLOCK_KV) : f32[BLOCK_Q, BLOCK_KV] @reg",
    ]
    assert not any("%soft_all" in line for line in step)


def test_split_softmax_applies_dropout_to_whole_weights_that_another_op_reads() -> None:
    made = after_passes("causal_dropout_mqa")["software-pipeline-softmax"]
    dropout, reader = (
        "    %p_kept = dropout %soft.p",
        "    %twice = map expr(2*p) uses(p=%soft.p) : f32[BLOCK_Q, BLOCK_KV] @reg\n",
    )
    other = edited_module(made, (dropout, reader + dropout))
    step = print_kernel(SplitSoftmax().run(other).warp_specialized[0])
    assert "%p_kept = dropout %soft_all keep(%keep)" in step and "split_halves %keep" not in step


def test_split_softmax_does_not_split_short_tiles_and_other_sums() -> None:
    made = FORWARD.module("software-pipeline-softmax")
    assert SplitSoftmax().run(made).warp_specialized != made.warp_specialized
    for old, new in (
        ("BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend", "BLOCK_KV=32 num_warps=4 num_stages=3 TMA=1 backend"),
        ("    %l_next = map expr(alpha*l + p_sum)", "    %l_next = map expr(alpha*l + 2*p_sum)"),
        ("reduce sum %soft.p", "reduce max %soft.p"),
    ):
        other = edited_module(made, (old, new))
        assert SplitSoftmax().run(other).warp_specialized == other.warp_specialized


def test_software_pipeline_softmax_moves_independent_ops_between_issue_and_wait() -> None:
    step = [line.split(" = ")[0] for line in lines("software-pipeline-softmax", "step", "relative_bias_mha")]
    assert step.index("%acc_flight") < step.index("%relative_bias") < step.index("%s")


def test_legalize_gluon_adds_layout_conversions_pins_and_tma_stores() -> None:
    made = lines("legalize-gluon", "step")
    assert "%weights_operand = convert_layout %weights to(operand) : T[BLOCK_Q, BLOCK_KV] @reg" in made
    assert made.index(
        "%l_next_left_held = pin_before_wait %l_next_left : f32[BLOCK_Q, _PARTIALS] @reg"
    ) + 1 == index_of(made, "%acc_next")
    assert "%soft_alpha_PARTIALS = convert_layout %soft.alpha to(partials) : f32[BLOCK_Q] @reg" in made
    assert made.index("%soft_base_deferred = pin_after_wait %soft.base : f32[BLOCK_Q] @reg") + 1 == index_of(
        made, "%soft_right"
    )
    assert "%soft_alpha_ACC = convert_layout %soft.alpha to(acc) : f32[BLOCK_Q] @reg" in made
    assert made[-1] == "yield values(m=%soft.m, l=%l_next, acc=%rescaled, weights=%p_cast)"
    consume = lines("legalize-gluon", "consume")
    assert (
        "tma_store %O[b, h, q, d_v] %o staging(%O_pipeline)" in consume
        and "store %LSE_head[q] %lse check(q)" in consume
    )
    assert lines("legalize-gluon", "consumer")[-1] == "tma_store_wait %O_pipeline"
    # A program of one tile stages outputs in the stage of the queries.
    one_tile = lines("legalize-gluon", "consumer", "causal_d256")
    store, wait = "tma_store %O[b, h, q, d_v] %o staging(%Q_pipeline)", "tma_store_wait %Q_pipeline"
    assert one_tile.index(store) < one_tile.index(wait)


def test_persistent_scheduler_adds_work_loops() -> None:
    tails = [
        "producer_tail %Q_pipeline",
        "producer_tail %K_pipeline",
        "producer_tail %V_pipeline",
        "producer_tail %Work_pipeline",
    ]
    assert lines("persistent-scheduler", "producer") == [
        "%Fetched = work_loop %Work_pipeline of(@tile) body(@produce) fetches(yes)",
        *tails,
    ]
    assert lines("persistent-scheduler", "consumer") == ["%work = work_loop %Work_pipeline of(@tile) body(@consume)"]
    assert [line.split(" = ")[0] for line in lines("persistent-scheduler", "tile")] == ["%kv_end", "%kv_full_end"]
    assert lines("persistent-scheduler", "produce") == [
        line for line in lines("software-pipeline-softmax", "producer") if "producer_tail" not in line
    ]
    consume = lines("persistent-scheduler", "consume")
    assert [line for line in consume if line not in ("consumer_release %q", "reload_tile %Work_pipeline")] == lines(
        "defer-row-reduction", "consumer"
    )
    assert (
        consume.index("consumer_release %q")
        == [line.startswith("%keys = pipelined_loop") for line in consume].index(True) + 1
    )
    pipelines = [line for line in lines("persistent-scheduler", "entry") if " = pipeline " in line]
    assert (
        pipelines[0].startswith("%Q_pipeline = pipeline stages(2) per_instance(consumer)")
        and pipelines[-1] == "%Work_pipeline = pipeline stages(2) : i32[] @sram"
    )


def test_ping_pong_puts_scheduler_barriers_around_the_products_of_each_body() -> None:
    assert lines("ping-pong", "consumer", "full_mha") == [
        "scheduler_barrier init",
        *lines("persistent-scheduler", "consumer", "full_mha"),
        "scheduler_barrier tail",
    ]
    for block, products in (("first", ["wgmma"]), ("step", ["wgmma", "consumer_wait", "wgmma"])):
        found = [kind for kind in op_kinds("ping-pong", block, "full_mha") if kind != "arg"]
        assert found[: len(products) + 4] == [
            "consumer_wait",
            "scheduler_barrier",
            *products,
            "scheduler_barrier",
            "wgmma_wait",
        ]
        was = lines("persistent-scheduler", block, "full_mha")
        assert [
            line
            for line in lines("ping-pong", block, "full_mha")
            if line not in ("scheduler_barrier sync", "scheduler_barrier arrive")
        ] == was
    for block in ("entry", "producer", "tile", "produce", "consume", "last", "copy"):
        assert lines("persistent-scheduler", block, "full_mha") == lines("ping-pong", block, "full_mha")


@pytest.mark.share(16)
def test_the_specs_with_ping_pong_order() -> None:
    """These are three consumers of narrow heads, and two consumers of wider heads with dropout, with a head_dim over
    128, or where all tiles visit the same number of keys."""
    with_barriers = [
        name for name in WARP_SPECIALIZED if any(only(lowered(name).warp_specialized[0].ops(), pipe.SchedulerBarrier))
    ]
    assert with_barriers == ["causal_d256", "cross_mha", "full_mha"]
    for head_dim, mask, has_barriers in ((128, "causal", True), (96, "none", True), (64, "causal", False)):
        data = {"name": "drops", "head_dim": head_dim, "mask": mask, "dropout": True, "schedule": {"backend": "hopper"}}
        assert any(only(lower(make_spec(data)).warp_specialized[0].ops(), pipe.SchedulerBarrier)) == has_barriers
    assert [name for name in WARP_SPECIALIZED if lowered(name).configs("fwd", "hopper")[0].block_q == 192] == [
        "full_mha"
    ]
    assert {"causal_gqa", "mla_dims", "padding_mha"} <= set(WARP_SPECIALIZED) - set(with_barriers)


@pytest.mark.share(4)
def test_two_consumers_in_ping_pong_order_have_no_loop_for_one_tile() -> None:
    """@first computes the partial tile at the end of the keys. Three consumers have separate loops for full and partial
    tiles, because ptxas spills registers otherwise."""
    for module, loops in ((lowered("cross_mha"), 1), (lowered("full_mha"), 2)):
        text = render(module)["hopper.py"].partition("def fwd_consumer(")[2].partition("@gluon.jit")[0]
        assert (
            text.count("# this instance may issue its products") == loops + 1
            and text.count("            for ") == loops
        ), module.name


def test_pipelines_that_leave_no_shared_memory_keep_a_program_per_tile() -> None:
    before, made = (
        after_passes("causal_d256")[name].warp_specialized[0] for name in ("skip-masked-tiles", "persistent-scheduler")
    )
    assert made is before


@pytest.mark.share(16)
@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_the_ir_of_each_module_round_trips(name: str) -> None:
    text = print_module(lowered(name))
    assert "backend(hopper)" in text and print_module(verify(parse_module(text))) == text


def test_other_kernels_do_not_change() -> None:
    made, plain = lowered("causal_gqa"), target("causal_gqa")
    assert [print_kernel(k) for k in made.kernels] == [print_kernel(k) for k in plain.kernels]
    assert made.configs("fwd") == plain.configs("fwd") and len(made.configs("fwd", "hopper")) == 1
