"""The passes that divide the forward into roles: what each changes, and what is refused."""

from __future__ import annotations

import re

import pytest

from attngen.codegen.render import render
from attngen.errors import BuildError, VerifyError
from attngen.ir.graph import Config
from attngen.ir.pipe import SchedulerBarrier
from attngen.ir.text import parse_module, print_kernel, print_module
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.targets.hopper.configs.common import FEW
from attngen.targets.hopper.configs.common import config as chosen_config
from attngen.targets.hopper.configs.sm90 import TANGENTS
from attngen.targets.hopper.passes.defer_row_reduction import DeferRowReduction
from attngen.targets.hopper.passes.split_softmax import SplitSoftmax
from attngen.targets.hopper.passes.warp_specialize import WarpSpecialize
from attngen.verify import verify
from tests.helpers import edit, spec, target
from tests.hopper.common import WARP_SPECIALIZED, after, asking, edited, kernel, whole


def lines(module_after: str, block: str, name: str = "causal_gqa") -> list[str]:
    """The ops of a block of the divided kernel after a pass, as text."""
    text = print_kernel(after(name)[module_after].warp_specialized[0])
    found = (
        re.split(rf"(?:block|warp_group) @{block}\b", text, maxsplit=1)[1]
        .split("\n  block ")[0]
        .split("\n  warp_group ")[0]
    )
    return [line.strip() for line in found.splitlines()[1:] if not line.strip().startswith("about")]


def at(ops: list[str], name: str) -> int:
    """Where the op of a name stands among ops."""
    return next(i for i, op in enumerate(ops) if op.startswith(f"{name} ="))


def kinds(module_after: str, block: str, name: str = "causal_gqa") -> list[str]:
    """The kinds of a block's ops."""
    return [
        line.partition(" = ")[2].split()[0] if line.startswith("%") else line.split()[0]
        for line in lines(module_after, block, name)
    ]


def test_warp_specialize_leaves_all_work_to_the_consumer() -> None:
    text = print_module(after("causal_gqa")["warp-specialize"])
    assert (
        "kernel @fwd backend(hopper) program_axis(q) grid(q in cdiv(Nq, BLOCK_Q) reversed swizzle(8), h in Hq, b in B)"
        in text
    )
    assert (
        "  warp_group @producer instances(1) warps(1) registers(24)\n  warp_group @consumer instances(2) rows(64) warps(4) registers(240)\n"
        in text
    )
    assert "  sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend=hopper\n" in text
    assert lines("warp-specialize", "entry")[-1].startswith("%kv_full_end = map")
    assert kinds("warp-specialize", "consumer").count("loop") == 2 and "load" in kinds("warp-specialize", "step")
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
    step = kinds("insert-pipelines", "step")
    assert step.index("consumer_wait") < step.index("dot") < step.index("consumer_release") and "load" not in step


def test_async_mma_awaits_each_where_it_was() -> None:
    assert kinds("insert-pipelines", "step").count("dot") == 2
    step = kinds("async-mma", "step")
    assert "dot" not in step and [k for k in step if k in ("wgmma", "wgmma_wait", "consumer_release", "pack")] == [
        *("wgmma", "wgmma_wait", "consumer_release"),
        *("pack", "wgmma", "wgmma_wait", "consumer_release"),
    ]
    assert "%acc_next = wgmma_wait %acc_flight keep_alive(%p_cast) : f32[BLOCK_Q, D_V] @reg" in lines(
        "async-mma", "step"
    )


def test_software_pipeline_softmax_issues_the_next_product_before_it_awaits_the_last() -> None:
    steps = {
        block: [k for k in kinds("software-pipeline-softmax", block) if k != "arg"]
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
        "%keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end) carry(m=%m_init, l=%l_init, acc=%acc_init) "
        "first(@first) step(@step) last(@last)"
    )


def test_split_softmax_awaits_the_product_halfway() -> None:
    before, after_it = (lines(name, "step") for name in ("software-pipeline-softmax", "split-softmax"))
    start, end = at(before, "%soft"), at(before, "%acc_next")
    assert after_it[:start] == before[:start]
    assert after_it[start:] == [
        "%soft = softmax_stats %masked m(%m) scale(%qk_scale) : f32[BLOCK_Q] @reg",
        "%soft_halves = split_halves %masked over(BLOCK_KV) : f32[BLOCK_Q, HALF_KV] @reg",
        "%soft_left = softmax_weights %soft_halves.left base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, HALF_KV] @reg",
        "%p_sum_left = reduce sum %soft_left over(HALF_KV) : f32[BLOCK_Q] @reg",
        "%l_next_left = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum_left) : f32[BLOCK_Q] @reg",
        *before[end:-1],
        "%soft_right = softmax_weights %soft_halves.right base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, HALF_KV] @reg",
        "%p_sum_right = reduce sum %soft_right over(HALF_KV) : f32[BLOCK_Q] @reg",
        "%l_next = map expr(before + p_sum) uses(before=%l_next_left, p_sum=%p_sum_right) : f32[BLOCK_Q] @reg",
        "%soft_joined = concat_halves %soft_left %soft_right over(BLOCK_KV) : f32[BLOCK_Q, BLOCK_KV] @reg",
        "%p_cast = pack %soft_joined : T[BLOCK_Q, BLOCK_KV] @reg",
        before[-1],
    ]
    for block in ("first", "last", "consumer", "producer", "entry"):
        assert lines("split-softmax", block) == lines("software-pipeline-softmax", block)


def test_defer_row_reduction_adds_up_rows_at_the_end() -> None:
    before, made = (
        {block: lines(name, block) for block in ("consumer", "first", "step")}
        for name in ("split-softmax", "defer-row-reduction")
    )
    changed = {block: [line for line in made[block] if line not in before[block]] for block in made}
    assert changed["consumer"] == [
        "%l_init = init 0 : f32[BLOCK_Q, PARTIALS] @reg",
        "%keys_l = reduce sum %keys.l over(PARTIALS) : f32[BLOCK_Q] @reg",
        "%inv_l = map expr(select(l > 0, 1/l, 0)) uses(l=%keys_l) : f32[BLOCK_Q] @reg",
        *(line.replace("%keys.l,", "%keys_l,") for line in before["consumer"] if line.startswith("%lse = map")),
    ]
    assert changed["step"] == [
        "%l = arg carry : f32[BLOCK_Q, PARTIALS] @reg",
        "%p_sum_left = partial_reduce %soft_left over(HALF_KV) : f32[BLOCK_Q, PARTIALS] @reg",
        "%l_next_left = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum_left) : f32[BLOCK_Q, PARTIALS] @reg",
        "%p_sum_right = partial_reduce %soft_right over(HALF_KV) : f32[BLOCK_Q, PARTIALS] @reg",
        "%l_next = map expr(before + p_sum) uses(before=%l_next_left, p_sum=%p_sum_right) : f32[BLOCK_Q, PARTIALS] @reg",
    ]
    assert (
        "%p_sum_in_first = partial_reduce %soft_in_first.p over(BLOCK_KV) : f32[BLOCK_Q, PARTIALS] @reg"
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
def test_other_sums_are_not_chained(old: str, new: str) -> None:
    made = after("full_mha")["split-softmax"]
    before, at_kernel, rest = print_module(made).partition("kernel @fwd backend(hopper)")
    other = parse_module(before + at_kernel + edit(rest, (old, new)))
    assert DeferRowReduction().run(made).warp_specialized[0] != made.warp_specialized[0]
    found = zip(DeferRowReduction().run(other).warp_specialized, other.warp_specialized, strict=True)
    assert all(new == old for new, old in found if old.name != TANGENTS)


def test_dropout_drops_each_half_after_its_weights() -> None:
    step = lines("split-softmax", "step", "causal_dropout_mqa")
    left = at(step, "%l_next_left")
    assert step[left + 1 : left + 3] == [
        "%keep_halves = split_halves %keep over(BLOCK_KV) : b1[BLOCK_Q, HALF_KV] @reg",
        "%p_kept_left = dropout %soft_left keep(%keep_halves.left) : f32[BLOCK_Q, HALF_KV] @reg",
    ]
    assert left < at(step, "%acc_next") < at(step, "%soft_right")
    right = at(step, "%p_kept_right")
    assert step[right : right + 2] == [
        "%p_kept_right = dropout %soft_right keep(%keep_halves.right) : f32[BLOCK_Q, HALF_KV] @reg",
        "%p_kept = concat_halves %p_kept_left %p_kept_right over(BLOCK_KV) : f32[BLOCK_Q, BLOCK_KV] @reg",
    ]
    assert not any("%soft_joined" in line for line in step)


def test_a_half_is_dropped_by_its_own_half() -> None:
    with pytest.raises(VerifyError, match="`types`: .*keeps the type of an f32 value, by a b1 of its dimensions"):
        verify(edited("causal_dropout_mqa", ("keep(%keep_halves.left)", "keep(%keep)")))


def test_dropout_drops_of_whole_weights_where_others_read_these() -> None:
    made = after("causal_dropout_mqa")["software-pipeline-softmax"]
    before, at_kernel, rest = print_module(made).partition("kernel @fwd backend(hopper)")
    drop, reader = (
        "    %p_kept = dropout %soft.p",
        "    %twice = map expr(2*p) uses(p=%soft.p) : f32[BLOCK_Q, BLOCK_KV] @reg\n",
    )
    other = parse_module(before + at_kernel + edit(rest, (drop, reader + drop)))
    step = print_kernel(SplitSoftmax().run(other).warp_specialized[0])
    assert "%p_kept = dropout %soft_joined keep(%keep)" in step and "split_halves %keep" not in step


def test_short_tiles_and_other_sums_are_not_halved() -> None:
    made = after("full_mha")["software-pipeline-softmax"]
    assert SplitSoftmax().run(made).warp_specialized != made.warp_specialized
    for old, new in (
        ("BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend", "BLOCK_KV=32 num_warps=4 num_stages=3 TMA=1 backend"),
        ("    %l_next = map expr(alpha*l + p_sum)", "    %l_next = map expr(alpha*l + 2*p_sum)"),
        ("reduce sum %soft.p", "reduce max %soft.p"),
    ):
        before, at_kernel, rest = print_module(made).partition("kernel @fwd backend(hopper)")
        other = parse_module(before + at_kernel + edit(rest, (old, new)))
        assert SplitSoftmax().run(other).warp_specialized == other.warp_specialized


def test_what_depends_on_no_product_stands_under_it() -> None:
    step = [line.split(" = ")[0] for line in lines("software-pipeline-softmax", "step", "relative_bias_mha")]
    assert step.index("%acc_flight") < step.index("%relative_bias") < step.index("%s")


def test_legalize_gluon_converts_holds_and_puts() -> None:
    made = lines("legalize-gluon", "step")
    assert "%weights_operand = convert_layout %weights to(operand) : T[BLOCK_Q, BLOCK_KV] @reg" in made
    assert made.index("%l_next_left_held = pin_before_wait %l_next_left : f32[BLOCK_Q, PARTIALS] @reg") + 1 == at(
        made, "%acc_next"
    )
    assert "%soft_alpha_chains = convert_layout %soft.alpha to(chains) : f32[BLOCK_Q] @reg" in made
    assert made.index("%soft_base_deferred = pin_after_wait %soft.base : f32[BLOCK_Q] @reg") + 1 == at(
        made, "%soft_right"
    )
    assert "%soft_alpha_sums = convert_layout %soft.alpha to(sums) : f32[BLOCK_Q] @reg" in made
    assert made[-1] == "yield values(m=%soft.m, l=%l_next, acc=%rescaled, weights=%p_cast)"
    consume = lines("legalize-gluon", "consume")
    assert (
        "tma_store %O[b, h, q, d_v] %o staging(%O_pipeline)" in consume
        and "store %LSE_head[q] %lse check(q)" in consume
    )
    assert lines("legalize-gluon", "consumer")[-1] == "tma_store_wait %O_pipeline"
    alone = lines("legalize-gluon", "consumer", "causal_d256")  # a program of one tile stores through the queries' slot
    assert alone.index("tma_store %O[b, h, q, d_v] %o staging(%Q_pipeline)") < alone.index("tma_store_wait %Q_pipeline")


def test_persistent_scheduler_gives_programs_tile_after_tile() -> None:
    drains = [
        "producer_tail %Q_pipeline",
        "producer_tail %K_pipeline",
        "producer_tail %V_pipeline",
        "producer_tail %Work_pipeline",
    ]
    assert lines("persistent-scheduler", "producer") == [
        "%drawn = work_loop %Work_pipeline of(@tile) body(@produce) draws(yes)",
        *drains,
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


def test_ping_pong_brackets_the_products_of_each_body() -> None:
    before, made = (after("full_mha")[name].warp_specialized[0] for name in ("persistent-scheduler", "ping-pong"))
    assert lines("ping-pong", "consumer", "full_mha") == [
        "scheduler_barrier init",
        *lines("persistent-scheduler", "consumer", "full_mha"),
        "scheduler_barrier tail",
    ]
    for block, products in (("first", ["wgmma"]), ("step", ["wgmma", "consumer_wait", "wgmma"])):
        found = [kind for kind in kinds("ping-pong", block, "full_mha") if kind != "arg"]
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
    unchanged = {"entry", "producer", "tile", "produce", "consume", "last", "copy"}
    assert all(before.block(name) == made.block(name) for name in unchanged)


def test_who_takes_turns() -> None:
    """Three consumers of narrow heads; two of wider ones with dropout, beyond 128 columns, or if all tiles visit as
    many keys."""
    taking = [
        name
        for name in WARP_SPECIALIZED
        if any(isinstance(op, SchedulerBarrier) for op in whole(name).warp_specialized[0].ops())
    ]
    assert taking == ["causal_d256", "cross_mha", "full_mha"]
    for head_dim, mask, takes in ((128, "causal", True), (96, "none", True), (64, "causal", False)):
        data = {"name": "drops", "head_dim": head_dim, "mask": mask, "dropout": True, "schedule": {"backend": "hopper"}}
        assert any(isinstance(op, SchedulerBarrier) for op in lower(make_spec(data)).warp_specialized[0].ops()) == takes
    assert [name for name in WARP_SPECIALIZED if whole(name).configs("fwd", "hopper")[0].block_q == 192] == ["full_mha"]
    assert {"causal_gqa", "mla_dims", "padding_mha"} <= set(WARP_SPECIALIZED) - set(taking)


def test_two_consumers_in_turns_have_no_loop_for_one_tile() -> None:
    """@first takes the tile that the end of the keys cuts. Three have a loop for each class, as ptxas spills
    without."""
    for module, loops in ((whole("cross_mha"), 1), (whole("full_mha"), 2)):
        text = render(module)["hopper.py"].partition("def fwd_consumer(")[2].partition("@gluon.jit")[0]
        assert text.count("# this copy's turn") == loops + 1 and text.count("            for ") == loops, module.name


def test_pipelines_that_leave_no_room_keep_a_program_for_each_tile() -> None:
    before, made = (
        after("causal_d256")[name].warp_specialized[0] for name in ("skip-masked-tiles", "persistent-scheduler")
    )
    assert made is before


@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_the_text_of_each_module_prints_as_it_parses(name: str) -> None:
    text = print_module(whole(name))
    assert "backend(hopper)" in text and print_module(verify(parse_module(text))) == text


def test_other_kernels_stay_as_they_are() -> None:
    made, plain = whole("causal_gqa"), target("causal_gqa")
    assert [print_kernel(k) for k in made.kernels] == [print_kernel(k) for k in plain.kernels]
    assert made.configs("fwd") == plain.configs("fwd") and len(made.configs("fwd", "hopper")) == 1


@pytest.mark.parametrize(
    "name, why",
    [
        ("causal_fa1", "its programs own no tile of queries (`order: kv_outer`)"),
        ("causal_fp32", "no dtype of the spec has 16 bits"),
    ],
)
def test_what_cannot_be_warp_specialized_gets_one_sentence(name: str, why: str) -> None:
    assert name not in WARP_SPECIALIZED
    with pytest.raises(BuildError, match="is hopper, and the kernel @fwd cannot be divided into roles: ") as error:
        lower(asking(name))
    assert str(error.value).endswith(why)


def test_bounds_of_numbers_of_queries_divide_where_data_lists_blocks() -> None:
    """A role would need a row of numbers before it starts. Lists of data have the blocks that count, so their ends
    need none."""
    limit = {"expr": "kv_idx <= limit[b, q_idx]", "params": {"limit": {"tensor": ["B", "Nq"], "dtype": "int32"}}}
    assert auto(mask=limit) == auto(mask={"all_of": ["causal", limit]}) == ["hopper"]
    listed = {"all_of": [{"block_sparse": {"block": 128}}, limit]}
    assert auto(mask=listed) == []
    with pytest.raises(BuildError, match="where its loops end is computed of a number for each query of a tile"):
        auto(mask=listed, schedule={"backend": "hopper"})


def test_specs_may_give_the_tiles() -> None:
    data = {
        "name": "tiles",
        "head_dim": 64,
        "mask": "causal",
        "schedule": {"backend": "hopper", "block_q": 64, "block_kv": 64, "stages": 4},
    }
    config = lower(make_spec(data)).configs("fwd", "hopper")[0]
    assert (config.block_q, config.block_kv, config.num_stages) == (
        64,
        64,
        4,
    )  # so many slots leave no named barrier for tile after tile
    with pytest.raises(BuildError, match="is 32; expected 64 or 128 or 192 on the backend hopper"):
        lower(make_spec({**data, "schedule": {"backend": "hopper", "block_q": 32}}))
    with pytest.raises(BuildError, match="is 256; expected 64 or 128 or 192 on the backend hopper"):
        WarpSpecialize(lambda specialization, module: (chosen_config(module, block_q=256),)).run(
            after("causal_gqa")["dce"]
        )


def test_the_spec_says_so_in_its_hash_alone_where_it_asks() -> None:
    assert "backend" not in spec("causal_gqa").canonical()["schedule"]
    assert asking("causal_gqa").hash() != spec("causal_gqa").hash()


# What a hand may write into the text, and the rule that says what is wrong with it.
REFUSED = {
    "rows": (
        "instances(2) rows(64)",
        "instances(1) rows(64)",
        "`roles`: .* @consumer has 1 copies of 64 rows, and sm90 has BLOCK_Q=128",
    ),
    "copies": ("instances(2) rows(64)", "instances(4) rows(32)", "`roles`: .* @consumer has 4 copies; expected 1 to 3"),
    "registers": ("registers(240)", "registers(241)", "`roles`: .* has 241 registers; expected a multiple of 8"),
    "all registers": (
        "registers(24)",
        "registers(40)",
        "`roles`: .* have 520 registers for each lane; a program has 504",
    ),
    "a body's name": ("last(@last)", "last(@lost)", "`scopes`: .* %keys runs @lost, which is no body"),
    "an order": ("full(0 .. kv_full_end)", "full(1 .. kv_full_end)", "`walks`: .* runs over other tiles of class full"),
    "a bound": ("%kv_full_end = map expr(max(0", "%kv_full_end = map expr(max(1", "`walks`: .* %kv_full_end is"),
    "a field": ("l=%l_next, acc", "acc", "`bodies`: .* take and yield does not fit what it carries"),
    "an await": (
        " keep_alive(%weights_operand)",
        "",
        "`flights`: .* %acc_next holds nothing; expected %weights_operand",
    ),
    "a flight": ("%masked = mask %s ", "%masked = mask %s_flight ", "`types`: "),
    "a type": (
        "%k = consumer_wait %K_pipeline : T[BLOCK_KV, D_QK]",
        "%k = consumer_wait %K_pipeline : T[BLOCK_KV, D_V]",
        "`types`: .* takes a tile of another type",
    ),
    "a space": (
        "= pipeline stages(2) per_instance(consumer) : T[BLOCK_Q, D_QK] @sram",
        "= pipeline stages(2) per_instance(consumer) : T[BLOCK_Q, D_QK] @reg",
        "`types`",
    ),
    "numbers": (
        "%Work_pipeline = pipeline stages(2) : i32[]",
        "%Work_pipeline = pipeline stages(2) : i64[]",
        "`types`: .* is of tiles, of rows that a role shares, or of places i32",
    ),
    "no one draws": (" draws(yes)", "", "`types`: .* belongs to roles of which one draws"),
    "a role without tiles": (
        "    %work = work_loop %Work_pipeline of(@tile) body(@consume)\n",
        "",
        "`scopes`: .* @consume is run by the ops of 0 blocks",
    ),
    "a tile of its own": (
        "of(@tile) body(@consume)",
        "of(@copy) body(@consume)",
        "`scopes`: .* @copy comes before each tile, and is a body too",
    ),
    "another ring": (
        "work_loop %Work_pipeline of(@tile) body(@consume)",
        "work_loop %K_pipeline of(@tile) body(@consume)",
        "`types`: .* which pass places through one ring",
    ),
    "an output that stays": (
        "    tma_store_wait %O_pipeline\n",
        "",
        "`protocol`: .* ends while the copy engine stores from %O_pipeline",
    ),
    "a role": (
        "per_instance(consumer)",
        "per_instance(producer)",
        "`protocol`: .* takes from %Q_pipeline, which belongs to another role",
    ),
    "a deferred row": (
        "%soft_base_deferred = pin_after_wait %soft.base",
        "%soft_base_deferred = pin_after_wait %qk_scale",
        "`types`: .* changes the type of a value",
    ),
    "a row that nothing defers": (
        "    %k = consumer_wait",
        "    %m_deferred = pin_after_wait %m : f32[BLOCK_Q] @reg\n    %k = consumer_wait",
        "`types`: .* is deferred until after an await",
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
    "chains of other columns": (
        "partial_reduce %soft_right over(HALF_KV)",
        "partial_reduce %soft_right over(BLOCK_KV)",
        "`types`: .* adds up f32\\[BLOCK_Q, HALF_KV\\] over BLOCK_KV",
    ),
    "a hold of scores": (
        "%masked = mask %s",
        "%held = pin_before_wait %s : f32[BLOCK_Q, BLOCK_KV] @reg\n    %masked = mask %held",
        "`types`: .*: holds f32\\[BLOCK_Q, BLOCK_KV\\]; expected a row of f32",
    ),
    "other halves": (
        "concat_halves %soft_left %soft_right",
        "concat_halves %soft_left %masked",
        "`types`: .* joins %soft_left and %masked, whose types differ",
    ),
    "a spread": (
        "to(operand)",
        "to(memory)",
        "`types`: .* converts to\\(memory\\); expected scores, sums, chains, operand",
    ),
    "memory": (
        "128 num_warps=4 num_stages=2 TMA",
        "128 num_warps=4 num_stages=4 TMA",
        "`fits`: .* needs 360,6.. bytes of shared memory",
    ),
    "barriers": (
        "KV=128 num_warps=4 num_stages=2 TMA",
        "KV=16 num_warps=4 num_stages=6 TMA",
        "`fits`: .* the slots of its rings take 16 named barriers; expected 11 at most",
    ),
}


# The same of a kernel whose copies take turns.
REFUSED_TURNS = {
    "a word": (
        "scheduler_barrier init",
        "scheduler_barrier begin",
        "`types`: .* does `begin`; expected init, sync, arrive, tail",
    ),
    "a role of one copy": (
        "    producer_tail %Q_pipeline\n",
        "    producer_tail %Q_pipeline\n    scheduler_barrier sync\n",
        "`types`: .* is in a role of one copy",
    ),
    "barriers": (
        "num_stages=2 TMA=1 backend",
        "num_stages=3 TMA=1 backend",
        "`fits`: .* the slots of its rings take 10 named barriers; expected 8 at most, as copies",
    ),
}


@pytest.mark.parametrize("what", REFUSED_TURNS)
def test_turns_that_are_written_wrongly_are_refused(what: str) -> None:
    old, new, reason = REFUSED_TURNS[what]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("full_mha", (old, new)))


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_text_is_refused_with_a_reason(what: str) -> None:
    old, new, reason = REFUSED[what]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("causal_gqa", (old, new)))


def test_a_kernel_for_an_unknown_backend_is_refused() -> None:
    text = (
        print_module(whole("causal_gqa"))
        .replace("backend(hopper)", "backend(other)")
        .replace("backend=hopper", "backend=other")
    )
    with pytest.raises(VerifyError, match="is for the backend `other`; expected hopper"):
        verify(parse_module(text))


def test_rows_and_a_warp_specialized_kernel_go_together() -> None:
    text = print_module(whole("causal_gqa"))
    made = text[text.index("kernel @fwd backend(hopper)") : text.index("\n\nschedule @fwd")]
    with pytest.raises(VerifyError, match="`header`: kernel @fwd: `backend hopper`; expected one of triton"):
        verify(parse_module(text.replace(f"\n\n{made}", "")))
    with pytest.raises(VerifyError, match="`roles`: kernel @other: no kernel of the module is @other"):
        verify(parse_module(text.replace(made, f"{made}\n\n{made.replace('kernel @fwd', 'kernel @other')}")))


def test_stages_and_tiles_by_hand_give_that_kernel() -> None:
    made = verify(
        edited(
            "causal_gqa",
            (
                "BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend",
                "BLOCK_KV=64 num_warps=4 num_stages=3 TMA=1 backend",
            ),
        )
    )
    from attngen.codegen.render import render

    assert (
        '("sm90", 2, "hopper"): (\n            (None, {"BLOCK_Q": 128, "BLOCK_KV": 64, "STAGES": 3, "num_warps": 4}),'
        in render(made)["kernels.py"]
    )


def test_a_warp_group_that_is_written_wrongly_is_one_sentence() -> None:
    from attngen.errors import IRError

    with pytest.raises(
        IRError,
        match="not a warp group; expected `warp_group @consumer instances\\(2\\) rows\\(64\\) warps\\(4\\) registers\\(240\\)`",
    ):
        edited("causal_gqa", ("instances(2) rows(64)", "twice"))
    assert kernel("causal_gqa").warp_groups[1].warp_group is not None


def auto(**data: object) -> list[str]:
    """The backends that a spec's forward has rows for, if the spec leaves the choice to attngen."""
    module = lower(make_spec({"name": "auto", "head_dim": 128, "mask": "causal", **data}))
    return [
        config.backend
        for config in dict(module.schedules)["fwd"]
        if isinstance(config, Config) and config.backend != module.backend
    ]


def test_without_a_word_of_the_spec_kernels_are_warp_specialized_where_that_pays() -> None:
    assert auto() == ["hopper"] and auto(head_dim=256, mask="none") == ["hopper"]
    assert all(auto(head_dim=wide, mask=mask) == ["hopper"] for wide in (16, 32, 40, 64) for mask in ("none", "causal"))
    looked_up = {"head_dim": 64, "score": {"relative_bias": {"max_distance": 128}}}
    assert auto(**looked_up) == auto(**{**looked_up, "head_dim": 48}) == ["hopper"]
    for other in (
        {"mask": "key_padding"},
        {"mask": {"all_of": ["causal", "document"]}},
        {"score": "dense_bias"},
        {"dropout": True},
    ):
        assert auto(**{**looked_up, **other}) == []  # registers would spill, or it is slower
    drops = {
        "head_dim": 96,
        "heads": {"sharing": "mqa"},
        "mask": "none",
        "dropout": True,
    }  # of which nothing was measured
    assert (
        auto(**drops)
        == auto(**{**drops, "mask": {"key_padding": {"lengths": True}}, "score": {"softcap": 30.0}})
        == ["hopper"]
    )
    for other in ({"mask": "causal"}, {"head_dim": 64}, {"head_dim": 256}, {"score": "alibi"}, {"mask": "key_padding"}):
        assert auto(**{**drops, **other}) == []  # not known to be faster, or registers would spill
    limit = {"expr": "kv_idx <= limit[b, q_idx]", "params": {"limit": {"tensor": ["B", "Nq"], "dtype": "int32"}}}
    parity = {"expr": "(q_idx*7 + kv_idx*3) % 5 != 0 and (q_idx//3 + kv_idx//7) % 3 != 1"}
    assert (
        auto(mask={"all_of": [limit, "key_padding"]}) == auto(**{**drops, "mask": parity}) == []
    )  # registers would spill
    assert (
        auto(mask=limit, score={"relative_bias": {"max_distance": 9}})
        == auto(mask=limit, score="alibi", head_dim=256)
        == []
    )
    assert auto(mask={"all_of": [limit, "key_padding"]}, head_dim=64) == ["hopper"]
    assert auto(dtype="fp32", fp32_precision="tf32") == auto(schedule={"backend": "triton"}) == []
    assert (
        auto(schedule={"block_q": 64}) == auto(schedule={"order": "kv_outer"}) == []
    )  # tiles are those of the portable kernel
    parts = (
        "floor(sqrt(abs(q_idx - kv_idx))) % 3 == 0",
        "int(log(1.0 + kv_idx) * 2.5) != round(0.25 * (q_idx + h))",
        "kv_idx <= q_idx",
    )
    heavy = {"expr": " and ".join(parts)}
    assert auto(mask=heavy) == [] and auto(mask=heavy, schedule={"backend": "hopper"}) == ["hopper"]
    capped, activated = ({"mask": "none", "score": [{"expr": e}]} for e in ("9 * tanh(s / 9)", "log(relu(s) + 1)"))
    assert (
        auto(**capped) == ["hopper"] and auto(**activated) == []
    )  # a logarithm is as many operations as a library takes
    (config,) = target("causal_gqa").configs("fwd", "hopper")
    assert config.min_rows == FEW and whole("causal_gqa").configs("fwd", "hopper")[0].min_rows == 0
    text = print_module(target("causal_gqa"))
    assert "  sm90 bytes=2 rows>64 : BLOCK_Q=128 BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend=hopper\n" in text
    assert print_module(parse_module(text)) == text
