"""The passes that divide the forward into roles: what each changes, and what is refused."""

from __future__ import annotations

import re

import pytest

from attngen.codegen.render import render
from attngen.errors import BuildError, VerifyError
from attngen.ir.graph import Row
from attngen.ir.pipe import Turn
from attngen.ir.text import parse_module, print_kernel, print_module
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.targets.hopper.configs.common import FEW
from attngen.targets.hopper.configs.common import row as chosen_row
from attngen.targets.hopper.configs.sm90 import TANGENTS
from attngen.targets.hopper.passes.defer_row_reduction import ChainSums
from attngen.targets.hopper.passes.split_softmax import HalveSoftmax
from attngen.targets.hopper.passes.warp_specialize import AssignRoles
from attngen.verify import verify
from tests.helpers import edit, spec, target
from tests.hopper.common import DIVIDED, after, asking, edited, kernel, whole


def lines(module_after: str, block: str, name: str = "causal_gqa") -> list[str]:
    """The ops of a block of the divided kernel after a pass, as text."""
    text = print_kernel(after(name)[module_after].divided[0])
    found = re.split(rf"(?:block|role) @{block}\b", text, maxsplit=1)[1].split("\n  block ")[0].split("\n  role ")[0]
    return [line.strip() for line in found.splitlines()[1:] if not line.strip().startswith("about")]


def at(ops: list[str], name: str) -> int:
    """Where the op of a name stands among ops."""
    return next(i for i, op in enumerate(ops) if op.startswith(f"{name} ="))


def kinds(module_after: str, block: str, name: str = "causal_gqa") -> list[str]:
    """The kinds of a block's ops."""
    return [line.partition(" = ")[2].split()[0] if line.startswith("%") else line.split()[0] for line in lines(module_after, block, name)]


def test_assign_roles_leaves_all_work_to_the_consumer() -> None:
    text = print_module(after("causal_gqa")["assign-roles"])
    assert "kernel @fwd backend(hopper) own(q) grid(q in cdiv(Nq, BLOCK_Q) descending abreast(8), h in Hq, b in B)" in text
    assert "  role @producer copies(1) warps(1) registers(24)\n  role @consumer copies(2) rows(64) warps(4) registers(240)\n" in text
    assert "  sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend=hopper\n" in text
    assert lines("assign-roles", "entry")[-1].startswith("%kv_full_end = map")
    assert kinds("assign-roles", "consumer").count("loop") == 2 and "load" in kinds("assign-roles", "step")
    assert print_module(parse_module(text)) == text


def test_make_rings_moves_loads_to_the_producer() -> None:
    assert lines("make-rings", "entry")[-3:] == [
        "%Q_ring = ring slots(1) each(consumer) : T[BLOCK_Q, D_QK] @sram",
        "%K_ring = ring slots(num_stages) : T[BLOCK_KV, D_QK] @sram",
        "%V_ring = ring slots(num_stages) : T[BLOCK_KV, D_V] @sram",
    ]
    assert lines("make-rings", "producer") == [
        "fill %Q_ring %Q[b, h, q, d_qk]",
        "%copy_keys_full = loop kv ranges(0 .. kv_full_end) body(@copy) cls(full)",
        "%copy_keys_partial = loop kv ranges(kv_full_end .. kv_end) body(@copy) cls(partial)",
        "drain %K_ring",
        "drain %V_ring",
    ]
    assert lines("make-rings", "copy") == ["fill %K_ring %K[b, h // group, kv, d_qk]", "fill %V_ring %V[b, h // group, kv, d_v]", "yield"]
    step = kinds("make-rings", "step")
    assert step.index("take") < step.index("dot") < step.index("give") and "load" not in step


def test_issue_products_awaits_each_where_it_was() -> None:
    assert kinds("make-rings", "step").count("dot") == 2
    step = kinds("issue-products", "step")
    assert "dot" not in step and [k for k in step if k in ("issue", "await", "give", "pack")] == [
        *("issue", "await", "give"),
        *("pack", "issue", "await", "give"),
    ]
    assert "%acc_next = await %acc_flight holds(%p_cast) : f32[BLOCK_Q, D_V] @reg" in lines("issue-products", "step")


def test_overlap_softmax_issues_the_next_product_before_it_awaits_the_last() -> None:
    steps = {block: [k for k in kinds("overlap-softmax", block) if k != "arg"] for block in ("first", "step", "last")}
    assert steps["first"][:5] == ["take", "issue", "await", "give", "mask"]
    assert steps["step"][:6] == ["take", "issue", "take", "issue", "await", "give"]
    order = steps["step"]
    assert order.index("softmax_step") < order.index("await", order.index("await") + 1) < len(order) - 1
    assert steps["last"] == ["take", "issue", "await", "give", "yield"]
    assert lines("overlap-softmax", "producer")[1:3] == [
        "%copy_keys_partial = loop kv ranges(kv_full_end .. kv_end) body(@copy) cls(partial)",
        "%copy_keys_full = loop kv ranges(0 .. kv_full_end) body(@copy) cls(full)",
    ]
    (pipeline,) = (line for line in lines("overlap-softmax", "consumer") if "pipeline" in line)
    assert pipeline == (
        "%keys = pipeline kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end) carry(m=%m_init, l=%l_init, acc=%acc_init) "
        "first(@first) step(@step) last(@last)"
    )


def test_halve_softmax_awaits_the_product_halfway() -> None:
    before, after_it = (lines(name, "step") for name in ("overlap-softmax", "halve-softmax"))
    start, end = at(before, "%soft"), at(before, "%acc_next")
    assert after_it[:start] == before[:start]
    assert after_it[start:] == [
        "%soft = softmax_rows %masked m(%m) scale(%qk_scale) : f32[BLOCK_Q] @reg",
        "%soft_halves = halve %masked over(BLOCK_KV) : f32[BLOCK_Q, HALF_KV] @reg",
        "%soft_left = weigh %soft_halves.left base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, HALF_KV] @reg",
        "%p_sum_left = reduce sum %soft_left over(HALF_KV) : f32[BLOCK_Q] @reg",
        "%l_next_left = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum_left) : f32[BLOCK_Q] @reg",
        *before[end:-1],
        "%soft_right = weigh %soft_halves.right base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, HALF_KV] @reg",
        "%p_sum_right = reduce sum %soft_right over(HALF_KV) : f32[BLOCK_Q] @reg",
        "%l_next = map expr(before + p_sum) uses(before=%l_next_left, p_sum=%p_sum_right) : f32[BLOCK_Q] @reg",
        "%soft_joined = join %soft_left %soft_right over(BLOCK_KV) : f32[BLOCK_Q, BLOCK_KV] @reg",
        "%p_cast = pack %soft_joined : T[BLOCK_Q, BLOCK_KV] @reg",
        before[-1],
    ]
    for block in ("first", "last", "consumer", "producer", "entry"):
        assert lines("halve-softmax", block) == lines("overlap-softmax", block)


def test_chain_sums_adds_up_rows_at_the_end() -> None:
    before, made = ({block: lines(name, block) for block in ("consumer", "first", "step")} for name in ("halve-softmax", "chain-sums"))
    changed = {block: [line for line in made[block] if line not in before[block]] for block in made}
    assert changed["consumer"] == [
        "%l_init = init 0 : f32[BLOCK_Q, CHAINS] @reg",
        "%keys_l = reduce sum %keys.l over(CHAINS) : f32[BLOCK_Q] @reg",
        "%inv_l = map expr(select(l > 0, 1/l, 0)) uses(l=%keys_l) : f32[BLOCK_Q] @reg",
        *(line.replace("%keys.l,", "%keys_l,") for line in before["consumer"] if line.startswith("%lse = map")),
    ]
    assert changed["step"] == [
        "%l = arg carry : f32[BLOCK_Q, CHAINS] @reg",
        "%p_sum_left = chains %soft_left over(HALF_KV) : f32[BLOCK_Q, CHAINS] @reg",
        "%l_next_left = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum_left) : f32[BLOCK_Q, CHAINS] @reg",
        "%p_sum_right = chains %soft_right over(HALF_KV) : f32[BLOCK_Q, CHAINS] @reg",
        "%l_next = map expr(before + p_sum) uses(before=%l_next_left, p_sum=%p_sum_right) : f32[BLOCK_Q, CHAINS] @reg",
    ]
    assert "%p_sum_in_first = chains %soft_in_first.p over(BLOCK_KV) : f32[BLOCK_Q, CHAINS] @reg" in changed["first"]


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
    made = after("full_mha")["halve-softmax"]
    before, at_kernel, rest = print_module(made).partition("kernel @fwd backend(hopper)")
    other = parse_module(before + at_kernel + edit(rest, (old, new)))
    assert ChainSums().run(made).divided[0] != made.divided[0]
    found = zip(ChainSums().run(other).divided, other.divided, strict=True)
    assert all(new == old for new, old in found if old.name != TANGENTS)


def test_dropout_drops_each_half_after_its_weights() -> None:
    step = lines("halve-softmax", "step", "causal_dropout_mqa")
    left = at(step, "%l_next_left")
    assert step[left + 1 : left + 3] == [
        "%keep_halves = halve %keep over(BLOCK_KV) : b1[BLOCK_Q, HALF_KV] @reg",
        "%p_kept_left = dropout %soft_left keep(%keep_halves.left) : f32[BLOCK_Q, HALF_KV] @reg",
    ]
    assert left < at(step, "%acc_next") < at(step, "%soft_right")
    right = at(step, "%p_kept_right")
    assert step[right : right + 2] == [
        "%p_kept_right = dropout %soft_right keep(%keep_halves.right) : f32[BLOCK_Q, HALF_KV] @reg",
        "%p_kept = join %p_kept_left %p_kept_right over(BLOCK_KV) : f32[BLOCK_Q, BLOCK_KV] @reg",
    ]
    assert not any("%soft_joined" in line for line in step)


def test_a_half_is_dropped_by_its_own_half() -> None:
    with pytest.raises(VerifyError, match="`types`: .*keeps the type of an f32 value, by a b1 of its dimensions"):
        verify(edited("causal_dropout_mqa", ("keep(%keep_halves.left)", "keep(%keep)")))


def test_dropout_drops_of_whole_weights_where_others_read_these() -> None:
    made = after("causal_dropout_mqa")["overlap-softmax"]
    before, at_kernel, rest = print_module(made).partition("kernel @fwd backend(hopper)")
    drop, reader = "    %p_kept = dropout %soft.p", "    %twice = map expr(2*p) uses(p=%soft.p) : f32[BLOCK_Q, BLOCK_KV] @reg\n"
    other = parse_module(before + at_kernel + edit(rest, (drop, reader + drop)))
    step = print_kernel(HalveSoftmax().run(other).divided[0])
    assert "%p_kept = dropout %soft_joined keep(%keep)" in step and "halve %keep" not in step


def test_short_tiles_and_other_sums_are_not_halved() -> None:
    made = after("full_mha")["overlap-softmax"]
    assert HalveSoftmax().run(made).divided != made.divided
    for old, new in (
        ("BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend", "BLOCK_KV=32 num_warps=4 num_stages=3 TMA=1 backend"),
        ("    %l_next = map expr(alpha*l + p_sum)", "    %l_next = map expr(alpha*l + 2*p_sum)"),
        ("reduce sum %soft.p", "reduce max %soft.p"),
    ):
        before, at_kernel, rest = print_module(made).partition("kernel @fwd backend(hopper)")
        other = parse_module(before + at_kernel + edit(rest, (old, new)))
        assert HalveSoftmax().run(other).divided == other.divided


def test_what_depends_on_no_product_stands_under_it() -> None:
    step = [line.split(" = ")[0] for line in lines("overlap-softmax", "step", "relative_bias_mha")]
    assert step.index("%acc_flight") < step.index("%relative_bias") < step.index("%s")


def test_legalize_gluon_converts_holds_and_puts() -> None:
    made = lines("legalize-gluon", "step")
    assert "%weights_operand = convert %weights to(operand) : T[BLOCK_Q, BLOCK_KV] @reg" in made
    assert made.index("%l_next_left_held = hold %l_next_left : f32[BLOCK_Q, CHAINS] @reg") + 1 == at(made, "%acc_next")
    assert "%soft_alpha_chains = convert %soft.alpha to(chains) : f32[BLOCK_Q] @reg" in made
    assert made.index("%soft_base_deferred = defer %soft.base : f32[BLOCK_Q] @reg") + 1 == at(made, "%soft_right")
    assert "%soft_alpha_sums = convert %soft.alpha to(sums) : f32[BLOCK_Q] @reg" in made
    assert made[-1] == "yield values(m=%soft.m, l=%l_next, acc=%rescaled, weights=%p_cast)"
    consume = lines("legalize-gluon", "consume")
    assert "put %O[b, h, q, d_v] %o through(%O_ring)" in consume and "store %LSE_head[q] %lse check(q)" in consume
    assert lines("legalize-gluon", "consumer")[-1] == "flush %O_ring"
    alone = lines("legalize-gluon", "consumer", "causal_d256")  # a program of one tile stores through the queries' slot
    assert alone.index("put %O[b, h, q, d_v] %o through(%Q_ring)") < alone.index("flush %Q_ring")


def test_schedule_work_gives_programs_tile_after_tile() -> None:
    drains = ["drain %Q_ring", "drain %K_ring", "drain %V_ring", "drain %Work_ring"]
    assert lines("schedule-work", "producer") == ["%drawn = work %Work_ring of(@tile) body(@produce) draws(yes)", *drains]
    assert lines("schedule-work", "consumer") == ["%work = work %Work_ring of(@tile) body(@consume)"]
    assert [line.split(" = ")[0] for line in lines("schedule-work", "tile")] == ["%kv_end", "%kv_full_end"]
    assert lines("schedule-work", "produce") == [line for line in lines("overlap-softmax", "producer") if "drain" not in line]
    consume = lines("schedule-work", "consume")
    assert [line for line in consume if line not in ("give %q", "recall %Work_ring")] == lines("chain-sums", "consumer")
    assert consume.index("give %q") == [line.startswith("%keys = pipeline") for line in consume].index(True) + 1
    rings = [line for line in lines("schedule-work", "entry") if "ring" in line]
    assert rings[0].startswith("%Q_ring = ring slots(2) each(consumer)") and rings[-1] == "%Work_ring = ring slots(2) : i32[] @sram"


def test_take_turns_brackets_the_products_of_each_body() -> None:
    before, made = (after("full_mha")[name].divided[0] for name in ("schedule-work", "take-turns"))
    assert lines("take-turns", "consumer", "full_mha") == ["turn start", *lines("schedule-work", "consumer", "full_mha"), "turn end"]
    for block, products in (("first", ["issue"]), ("step", ["issue", "take", "issue"])):
        found = [kind for kind in kinds("take-turns", block, "full_mha") if kind != "arg"]
        assert found[: len(products) + 4] == ["take", "turn", *products, "turn", "await"]
        was = lines("schedule-work", block, "full_mha")
        assert [line for line in lines("take-turns", block, "full_mha") if line not in ("turn take", "turn pass")] == was
    unchanged = {"entry", "producer", "tile", "produce", "consume", "last", "copy"}
    assert all(before.block(name) == made.block(name) for name in unchanged)


def test_who_takes_turns() -> None:
    """Three consumers of narrow heads; two of wider ones with dropout, beyond 128 columns, or if all tiles visit as many keys."""
    taking = [name for name in DIVIDED if any(isinstance(op, Turn) for op in whole(name).divided[0].ops())]
    assert taking == ["causal_d256", "cross_mha", "full_mha"]
    for head_dim, mask, takes in ((128, "causal", True), (96, "none", True), (64, "causal", False)):
        data = {"name": "drops", "head_dim": head_dim, "mask": mask, "dropout": True, "schedule": {"backend": "hopper"}}
        assert any(isinstance(op, Turn) for op in lower(make_spec(data)).divided[0].ops()) == takes
    assert [name for name in DIVIDED if whole(name).rows("fwd", "hopper")[0].block_q == 192] == ["full_mha"]
    assert {"causal_gqa", "mla_dims", "padding_mha"} <= set(DIVIDED) - set(taking)


def test_two_consumers_in_turns_have_no_loop_for_one_tile() -> None:
    """@first takes the tile that the end of the keys cuts. Three have a loop for each class, as ptxas spills without."""
    for module, loops in ((whole("cross_mha"), 1), (whole("full_mha"), 2)):
        text = render(module)["hopper.py"].partition("def fwd_consumer(")[2].partition("@gluon.jit")[0]
        assert text.count("# this copy's turn") == loops + 1 and text.count("            for ") == loops, module.name


def test_rings_that_leave_no_room_keep_a_program_for_each_tile() -> None:
    before, made = (after("causal_d256")[name].divided[0] for name in ("hide-tiles", "schedule-work"))
    assert made is before


@pytest.mark.parametrize("name", DIVIDED)
def test_the_text_of_each_module_prints_as_it_parses(name: str) -> None:
    text = print_module(whole(name))
    assert "backend(hopper)" in text and print_module(verify(parse_module(text))) == text


def test_other_kernels_stay_as_they_are() -> None:
    made, plain = whole("causal_gqa"), target("causal_gqa")
    assert [print_kernel(k) for k in made.kernels] == [print_kernel(k) for k in plain.kernels]
    assert made.rows("fwd") == plain.rows("fwd") and len(made.rows("fwd", "hopper")) == 1


@pytest.mark.parametrize(
    "name, why",
    [
        ("causal_fa1", "its programs own no tile of queries (`order: kv_outer`)"),
        ("causal_fp32", "no dtype of the spec has 16 bits"),
    ],
)
def test_what_cannot_be_divided_gets_one_sentence(name: str, why: str) -> None:
    assert name not in DIVIDED
    with pytest.raises(BuildError, match="is hopper, and the kernel @fwd cannot be divided into roles: ") as error:
        lower(asking(name))
    assert str(error.value).endswith(why)


def test_bounds_of_numbers_of_queries_divide_where_data_lists_blocks() -> None:
    """A role would need a row of numbers before it starts. Lists of data have the blocks that count, so their ends need none."""
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
    row = lower(make_spec(data)).rows("fwd", "hopper")[0]
    assert (row.block_q, row.block_kv, row.num_stages) == (64, 64, 4)  # so many slots leave no named barrier for tile after tile
    with pytest.raises(BuildError, match="is 32; expected 64 or 128 or 192 on the backend hopper"):
        lower(make_spec({**data, "schedule": {"backend": "hopper", "block_q": 32}}))
    with pytest.raises(BuildError, match="is 256; expected 64 or 128 or 192 on the backend hopper"):
        AssignRoles(lambda division, module: (chosen_row(module, block_q=256),)).run(after("causal_gqa")["dce"])


def test_the_spec_says_so_in_its_hash_alone_where_it_asks() -> None:
    assert "backend" not in spec("causal_gqa").canonical()["schedule"]
    assert asking("causal_gqa").hash() != spec("causal_gqa").hash()


# What a hand may write into the text, and the rule that says what is wrong with it.
REFUSED = {
    "rows": ("copies(2) rows(64)", "copies(1) rows(64)", "`roles`: .* @consumer has 1 copies of 64 rows, and sm90 has BLOCK_Q=128"),
    "copies": ("copies(2) rows(64)", "copies(4) rows(32)", "`roles`: .* @consumer has 4 copies; expected 1 to 3"),
    "registers": ("registers(240)", "registers(241)", "`roles`: .* has 241 registers; expected a multiple of 8"),
    "all registers": ("registers(24)", "registers(40)", "`roles`: .* have 520 registers for each lane; a program has 504"),
    "a body's name": ("last(@last)", "last(@lost)", "`scopes`: .* %keys runs @lost, which is no body"),
    "an order": ("full(0 .. kv_full_end)", "full(1 .. kv_full_end)", "`walks`: .* runs over other tiles of class full"),
    "a bound": ("%kv_full_end = map expr(max(0", "%kv_full_end = map expr(max(1", "`walks`: .* %kv_full_end is"),
    "a field": ("l=%l_next, acc", "acc", "`bodies`: .* take and yield does not fit what it carries"),
    "an await": (" holds(%weights_operand)", "", "`flights`: .* %acc_next holds nothing; expected %weights_operand"),
    "a flight": ("%masked = mask %s ", "%masked = mask %s_flight ", "`types`: "),
    "a type": ("%k = take %K_ring : T[BLOCK_KV, D_QK]", "%k = take %K_ring : T[BLOCK_KV, D_V]", "`types`: .* takes a tile of another type"),
    "a space": (
        "= ring slots(2) each(consumer) : T[BLOCK_Q, D_QK] @sram",
        "= ring slots(2) each(consumer) : T[BLOCK_Q, D_QK] @reg",
        "`types`",
    ),
    "numbers": (
        "%Work_ring = ring slots(2) : i32[]",
        "%Work_ring = ring slots(2) : i64[]",
        "`types`: .* is of tiles, of rows that a role shares, or of places i32",
    ),
    "no one draws": (" draws(yes)", "", "`types`: .* belongs to roles of which one draws"),
    "a role without tiles": (
        "    %work = work %Work_ring of(@tile) body(@consume)\n",
        "",
        "`scopes`: .* @consume is run by the ops of 0 blocks",
    ),
    "a tile of its own": (
        "of(@tile) body(@consume)",
        "of(@copy) body(@consume)",
        "`scopes`: .* @copy comes before each tile, and is a body too",
    ),
    "another ring": (
        "work %Work_ring of(@tile) body(@consume)",
        "work %K_ring of(@tile) body(@consume)",
        "`types`: .* which pass places through one ring",
    ),
    "an output that stays": ("    flush %O_ring\n", "", "`protocol`: .* ends while the copy engine stores from %O_ring"),
    "a role": ("each(consumer)", "each(producer)", "`protocol`: .* takes from %Q_ring, which belongs to another role"),
    "a deferred row": (
        "%soft_base_deferred = defer %soft.base",
        "%soft_base_deferred = defer %qk_scale",
        "`types`: .* changes the type of a value",
    ),
    "a row that nothing defers": (
        "    %k = take",
        "    %m_deferred = defer %m : f32[BLOCK_Q] @reg\n    %k = take",
        "`types`: .* is deferred until after an await",
    ),
    "rows of scores": ("softmax_rows %masked m(%m)", "softmax_rows %m m(%m)", "`types`: .*needs scores in f32, m of their rows"),
    "a guard": ("scale(%qk_scale) : f32[BLOCK_Q] @reg", "scale(%qk_scale) guard(no) : f32[BLOCK_Q] @reg", "`types`: .* guards `no`"),
    "whole scores": ("weigh %soft_halves.right", "weigh %masked", "`types`: .*needs scores of its own type, f32, a base for each row"),
    "halves of rows": (
        "halve %masked over(BLOCK_KV)",
        "halve %masked over(BLOCK_Q)",
        "`types`: .* has halves of f32\\[BLOCK_Q, HALF_KV\\] over BLOCK_Q",
    ),
    "halves as wholes": (
        "halve %masked over(BLOCK_KV) : f32[BLOCK_Q, HALF_KV]",
        "halve %masked over(BLOCK_KV) : f32[BLOCK_Q, BLOCK_KV]",
        "`types`: .*expected f32\\[BLOCK_Q, HALF_KV\\]",
    ),
    "chains of other columns": (
        "chains %soft_right over(HALF_KV)",
        "chains %soft_right over(BLOCK_KV)",
        "`types`: .* adds up f32\\[BLOCK_Q, HALF_KV\\] over BLOCK_KV",
    ),
    "a hold of scores": (
        "%masked = mask %s",
        "%held = hold %s : f32[BLOCK_Q, BLOCK_KV] @reg\n    %masked = mask %held",
        "`types`: .*: holds f32\\[BLOCK_Q, BLOCK_KV\\]; expected a row of f32",
    ),
    "other halves": (
        "join %soft_left %soft_right",
        "join %soft_left %masked",
        "`types`: .* joins %soft_left and %masked, whose types differ",
    ),
    "a spread": ("to(operand)", "to(memory)", "`types`: .* converts to\\(memory\\); expected scores, sums, chains, operand"),
    "memory": ("128 num_warps=4 num_stages=2 TMA", "128 num_warps=4 num_stages=4 TMA", "`fits`: .* needs 360,6.. bytes of shared memory"),
    "barriers": (
        "KV=128 num_warps=4 num_stages=2 TMA",
        "KV=16 num_warps=4 num_stages=6 TMA",
        "`fits`: .* the slots of its rings take 16 named barriers; expected 11 at most",
    ),
}


# The same of a kernel whose copies take turns.
REFUSED_TURNS = {
    "a word": ("turn start", "turn begin", "`types`: .* does `begin`; expected start, take, pass, end"),
    "a role of one copy": ("    drain %Q_ring\n", "    drain %Q_ring\n    turn take\n", "`types`: .* is in a role of one copy"),
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
    text = print_module(whole("causal_gqa")).replace("backend(hopper)", "backend(other)").replace("backend=hopper", "backend=other")
    with pytest.raises(VerifyError, match="is for the backend `other`; expected hopper"):
        verify(parse_module(text))


def test_rows_and_a_divided_kernel_go_together() -> None:
    text = print_module(whole("causal_gqa"))
    made = text[text.index("kernel @fwd backend(hopper)") : text.index("\n\nschedule @fwd")]
    with pytest.raises(VerifyError, match="`header`: kernel @fwd: `backend hopper`; expected one of triton"):
        verify(parse_module(text.replace(f"\n\n{made}", "")))
    with pytest.raises(VerifyError, match="`roles`: kernel @other: no kernel of the module is @other"):
        verify(parse_module(text.replace(made, f"{made}\n\n{made.replace('kernel @fwd', 'kernel @other')}")))


def test_slots_and_tiles_by_hand_give_that_kernel() -> None:
    made = verify(
        edited("causal_gqa", ("BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend", "BLOCK_KV=64 num_warps=4 num_stages=3 TMA=1 backend"))
    )
    from attngen.codegen.render import render

    assert (
        '("sm90", 2, "hopper"): (\n            (None, {"BLOCK_Q": 128, "BLOCK_KV": 64, "SLOTS": 3, "num_warps": 4}),'
        in render(made)["kernels.py"]
    )


def test_a_role_that_is_written_wrongly_is_one_sentence() -> None:
    from attngen.errors import IRError

    with pytest.raises(IRError, match="not a role; expected `role @consumer copies\\(2\\) rows\\(64\\) warps\\(4\\) registers\\(240\\)`"):
        edited("causal_gqa", ("copies(2) rows(64)", "twice"))
    assert kernel("causal_gqa").roles[1].role is not None


def auto(**data: object) -> list[str]:
    """The backends that a spec's forward has rows for, if the spec leaves the choice to attngen."""
    module = lower(make_spec({"name": "auto", "head_dim": 128, "mask": "causal", **data}))
    return [row.backend for row in dict(module.schedules)["fwd"] if isinstance(row, Row) and row.backend != module.backend]


def test_without_a_word_of_the_spec_kernels_are_divided_where_that_pays() -> None:
    assert auto() == ["hopper"] and auto(head_dim=256, mask="none") == ["hopper"]
    assert all(auto(head_dim=wide, mask=mask) == ["hopper"] for wide in (16, 32, 40, 64) for mask in ("none", "causal"))
    looked_up = {"head_dim": 64, "score": {"relative_bias": {"max_distance": 128}}}
    assert auto(**looked_up) == auto(**{**looked_up, "head_dim": 48}) == ["hopper"]
    for other in ({"mask": "key_padding"}, {"mask": {"all_of": ["causal", "document"]}}, {"score": "dense_bias"}, {"dropout": True}):
        assert auto(**{**looked_up, **other}) == []  # registers would spill, or it is slower
    drops = {"head_dim": 96, "heads": {"sharing": "mqa"}, "mask": "none", "dropout": True}  # of which nothing was measured
    assert auto(**drops) == auto(**{**drops, "mask": {"key_padding": {"lengths": True}}, "score": {"softcap": 30.0}}) == ["hopper"]
    for other in ({"mask": "causal"}, {"head_dim": 64}, {"head_dim": 256}, {"score": "alibi"}, {"mask": "key_padding"}):
        assert auto(**{**drops, **other}) == []  # not known to be faster, or registers would spill
    limit = {"expr": "kv_idx <= limit[b, q_idx]", "params": {"limit": {"tensor": ["B", "Nq"], "dtype": "int32"}}}
    parity = {"expr": "(q_idx*7 + kv_idx*3) % 5 != 0 and (q_idx//3 + kv_idx//7) % 3 != 1"}
    assert auto(mask={"all_of": [limit, "key_padding"]}) == auto(**{**drops, "mask": parity}) == []  # registers would spill
    assert auto(mask=limit, score={"relative_bias": {"max_distance": 9}}) == auto(mask=limit, score="alibi", head_dim=256) == []
    assert auto(mask={"all_of": [limit, "key_padding"]}, head_dim=64) == ["hopper"]
    assert auto(dtype="fp32", fp32_precision="tf32") == auto(schedule={"backend": "triton"}) == []
    assert auto(schedule={"block_q": 64}) == auto(schedule={"order": "kv_outer"}) == []  # tiles are those of the portable kernel
    parts = ("floor(sqrt(abs(q_idx - kv_idx))) % 3 == 0", "int(log(1.0 + kv_idx) * 2.5) != round(0.25 * (q_idx + h))", "kv_idx <= q_idx")
    heavy = {"expr": " and ".join(parts)}
    assert auto(mask=heavy) == [] and auto(mask=heavy, schedule={"backend": "hopper"}) == ["hopper"]
    capped, activated = ({"mask": "none", "score": [{"expr": e}]} for e in ("9 * tanh(s / 9)", "log(relu(s) + 1)"))
    assert auto(**capped) == ["hopper"] and auto(**activated) == []  # a logarithm is as many operations as a library takes
    (row,) = target("causal_gqa").rows("fwd", "hopper")
    assert row.min_rows == FEW and whole("causal_gqa").rows("fwd", "hopper")[0].min_rows == 0
    text = print_module(target("causal_gqa"))
    assert "  sm90 bytes=2 rows>64 : BLOCK_Q=128 BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend=hopper\n" in text
    assert print_module(parse_module(text)) == text
