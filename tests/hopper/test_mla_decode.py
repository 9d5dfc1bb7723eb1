"""A divided kernel of latents: two roles that share the columns of outputs, and take turns with the weights of tiles
of keys."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.interp.tile import DOUBLE, execute_kernel
from attngen.interp.warp_groups import Deadlock, WarpSpecializedLaunch
from attngen.ir.graph import Kernel, Module
from attngen.ir.text import print_kernel, print_op
from attngen.lowering.pipeline import lower, stages, unspecialized
from attngen.report.timeline import Timeline
from attngen.spec import Spec, make_spec
from attngen.targets.hopper.configs.mla_decode import not_preferred
from attngen.targets.hopper.toolchain.certificate import given, under_product
from attngen.targets.hopper.toolchain.compiler import marks
from attngen.verify import verify
from attngen.verify.machine import Program, Protocol, Step, Walk, broken
from tests.helpers import spec, target
from tests.hopper.common import edited_module


def edited(*changes: tuple[str, str]) -> Module:
    """The module with its divided kernel edited; not verified."""
    return edited_module(target("decode_mla"), *changes, kernel="decode")


# ---------------------------------------------------------------------------------------------- passes


@cache
def passed() -> dict[str, Module]:
    """The verified module after every pass, by the pass's name."""
    return dict(stages(spec("decode_mla")))


def body(after: str, block: str) -> list[str]:
    """The ops of a block of the divided kernel after a pass, as text."""
    return [print_op(op) for op in passed()[after].warp_specialized[0].block(block).ops]


def at(ops: list[str], start: str) -> int:
    """Where the first op stands whose text starts so."""
    return next(i for i, op in enumerate(ops) if op.startswith(start))


PASSES = (
    "warp-specialize",
    "split-d-warp-groups",
    "exchange-p",
    "async-mma",
    "software-pipeline-weights",
    "defer-row-reduction",
    "persistent-scheduler",
    "legalize-gluon",
)


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_leaves_what_is_computed(name: str) -> None:
    for seed in range(3):
        hold(passed()[name], seed)


def test_parts_of_modules_for_fp32_too_have_their_maxima_and_sums() -> None:
    module = lower(latents(dtype=["bf16", "fp32"], cache={"paged": {"page_size": 64}}))
    text = print_kernel(module.warp_specialized[0])
    assert text.count("store %MAX_PARTS") == text.count("store %SUM_PARTS") == 1 and "LSE2_PARTS" not in text
    for seed in range(3):
        hold(module, seed)


def test_split_d_warp_groups_gives_each_warp_group_half_of_the_columns() -> None:
    text = print_kernel(passed()["split-d-warp-groups"].warp_specialized[0])
    for name in ("left", "right"):
        assert f"  warp_group @{name} instances(1) rows(64) warps(4) registers(224)\n" in text
    step = body("split-d-warp-groups", "step_right")
    assert "%s_own_right = dot %q_right %k_right over(RIGHT_V) acc(%s_rope_right) : f32[BLOCK_Q, BLOCK_KV] @reg" in step
    assert (
        "%s_right = dot %q_other_right %k_other_right over(LEFT_V) acc(%s_own_right) : f32[BLOCK_Q, BLOCK_KV] @reg"
        in step
    )
    stores = [
        op.split()[1]
        for name in ("left", "right")
        for op in body("split-d-warp-groups", name)
        if op.startswith("store")
    ]
    assert stores == ["%O_PARTS[0,", "%LSE2_PARTS[0,", "%O_PARTS[0,"]  # sums of rows are stored once


def test_exchange_p_has_warp_groups_take_turns_with_tiles() -> None:
    own, both, lone = (body("exchange-p", name) for name in ("own", "both", "lone"))
    assert (
        at(own, "%masked_in_own")
        < at(own, "zero_out_of_bounds %k_in_own")
        < at(own, "consumer_release %k_other_in_own")
        < at(own, "producer_store %P_pipeline")
    )
    assert (
        at(own, "producer_store %P_pipeline")
        < at(own, "%acc_next_in_own = dot")
        < at(own, "consumer_release %k_in_own")
    )
    assert (
        at(both, "%s_in_both = dot")
        < at(both, "%p_told_in_both = consumer_wait %P_pipeline")
        < at(both, "%soft_in_both")
        < at(both, "producer_store %P_pipeline")
    )
    assert "softmax_step %masked_in_both m(%m_told_in_both)" in both[at(both, "%soft_in_both")]
    assert not [op for op in lone if "softmax_step" in op or "%M_pipeline" in op]
    assert body("exchange-p", "copy_odd")[2:4] == [
        "producer_load %K_right_odd_pipeline %K[0, kv, right_v] page(%page_odd)",
        "producer_load %K_left_odd_pipeline %K[0, kv, left_v] page(%page_odd)",
    ]


def test_a_product_goes_on_from_one_in_flight() -> None:
    own = body("async-mma", "own")
    assert [op.split(" = ")[0] for op in own if " = wgmma_wait " in op] == ["%s_in_own", "%acc_next_in_own"]
    assert "acc(%s_own_in_own_flight)" in own[at(own, "%s_in_own_flight = wgmma")]


def test_software_pipeline_weights_awaits_a_product_after_the_softmax() -> None:
    for name, late in (("async-mma", False), ("software-pipeline-weights", True)):
        both = body(name, "both")
        awaited = at(both, "%acc_next_told_in_both = wgmma_wait")
        assert (awaited > at(both, "%l_next_in_both =")) is late
        assert both[awaited + 1 : awaited + 3] == [
            "consumer_release %p_told_in_both",
            "consumer_release %v_told_in_both",
        ]


def test_the_softmax_of_odd_tiles_is_drawn_beside_a_product() -> None:
    """The picture of roles over time: nobody waits for ever, and the role on the right always has a product in
    flight in its softmax."""
    line = Timeline(target("decode_mla").warp_specialized[0], 2)
    softmax = [s for s in line.spans if s.lane == "right" and s.label.startswith("softmax")]
    products = [s for s in line.spans if s.lane == "products of right" and s.cls == "bar"]
    assert not line.stuck and softmax
    assert all(any(p.start < s.end and s.start < p.end for p in products) for s in softmax)


def test_strides_of_stored_tiles_are_in_sight() -> None:
    """The compiler stores two numbers at once where it knows that these strides are multiples of 16. Other numbers
    of a call are hidden."""
    text = render(target("decode_mla"))["hopper.py"]
    assert "stride_lse2_parts_i = rematerialize(" in text and "stride_page_table_b = rematerialize(" in text
    assert (
        "* stride_o_parts_n + left_v" in text
        and "* stride_o_parts_n + right_v" in text
        and "stride_o_parts_n = rematerialize(" not in text
    )


def test_all_calls_run_it() -> None:
    """A portable row stays for other versions of Triton, and none of the divided kernel's says from how many rows
    on."""
    (row,) = target("decode_mla").configs("decode", "hopper")
    assert (row.min_rows, row.max_rows) == (0, None)


def test_a_certificate_asks_for_both_warp_groups_and_half_of_the_exponentials() -> None:
    """Those of odd tiles stand under a product, those of even ones do not; of rows, each thread computes as many as
    four columns."""
    module = target("decode_mla")
    kernel, (row,) = module.warp_specialized[0], module.configs("decode", "hopper")
    assert list(marks(kernel)) == [("producer", "UTMALDG"), ("left", "HGMMA")]
    assert (given("producer", kernel, row), given("left", kernel, row)) == ([56], [224, 224])
    assert under_product(kernel, row) == (Fraction(8, 17), Fraction(9, 17))


# ---------------------------------------------------------------------------------------------- what it computes


def results(module: Module, kernel: Kernel, seed: int, page: int = 64) -> dict[str, np.ndarray]:
    """Outputs of parts, and their sums, of a random call whose cache has NaN past the end of each sequence."""
    numbers, chance = np.random.default_rng(seed), random.Random(seed)
    WarpSpecializedLaunch.chance = chance
    batch, queries, heads = chance.choice((1, 2, 3)), chance.choice((1, 2, 3)), chance.choice((1, 4, 8))
    rows, most, pages = heads * queries, 256 // page, 24
    table = np.array([chance.sample(range(pages), most) for _ in range(batch)])
    lengths = np.array([chance.choice((0, 1, 15, 16, 17, 40, 64, 65, 100, 200, 256)) for _ in range(batch)])
    paged = any(arg.name == "PAGE_TABLE" for arg in kernel.args)
    shape = (pages, 1, page) if paged else (batch, 1, page * most)
    latent, rope = np.full((*shape, 512), np.nan), np.full((*shape, 64), np.nan)
    for b, length in enumerate(lengths):
        for row in range(length):
            place = (table[b, row // page], 0, row % page) if paged else (b, 0, row)
            latent[place], rope[place] = numbers.standard_normal(512), numbers.standard_normal(64)
    items = max(2 * batch, chance.choice((4, 8, 12)))
    stored = [arg.name for arg in kernel.args if arg.role == "out"]
    out = {name: np.full((1, items, rows, *((512,) if name == "O_PARTS" else ())), np.nan) for name in stored}
    q = {"Q": numbers.standard_normal((batch, 1, rows, 512)), "Q_ROPE": numbers.standard_normal((batch, 1, rows, 64))}
    tensors = {
        **q,
        "K": latent,
        "K_ROPE": rope,
        "CACHE_SEQLENS": lengths,
        **({"PAGE_TABLE": table} if paged else {}),
        **out,
    }
    scalars = {
        "scale": 576**-0.5,
        "queries": queries,
        "B": batch,
        "items": items,
        "Nc": page * most,
        "Nn": 0,
        "Nq": rows,
    }
    made = WarpSpecializedLaunch if kernel.backend else None
    execute_kernel(module, kernel, tensors, scalars, {"BLOCK_Q": 8, "BLOCK_KV": 16}, DOUBLE, made)
    return out


def hold(module: Module, seed: int, page: int = 64) -> None:
    """Raise AssertionError where the divided kernel's results are not those of the portable one."""
    found, expected = (
        results(module, kernel, seed, page) for kernel in (module.warp_specialized[0], module.kernel("decode"))
    )
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("seed", range(8))
def test_results_are_those_of_the_portable_kernel(seed: int) -> None:
    hold(edited(), seed)


def latents(**more: object) -> Spec:
    """A spec of latents over a contiguous cache, with more, or other, fields."""
    usual = {
        "heads": {"sharing": "mqa"},
        "head_dim": {"qk": 576, "v": 512},
        "mask": "causal",
        "backward": False,
        "cache": "contiguous",
    }
    return make_spec({"name": "latents", **usual, "kv": {"latent": {"rope": 64}}, **more})


@cache
def lowered(name: str) -> Module:
    """The module of a spec of latents with another mask or cache."""
    return lower(latents(**OTHERS[name]))


PAGES: dict[str, object] = {"cache": {"paged": {"page_size": 128}}}
OTHERS: dict[str, dict[str, object]] = {
    "contiguous": {},
    "a window, of which partial tiles are in two ranges": {"mask": {"sliding_window": {"left": 100}}, **PAGES},
    "all tiles are partial": {"mask": {"expr": "kv_idx % 3 != 1"}},
    "all tiles are full but the last": {"mask": "none"},
    "soft caps": {"score": [{"softcap": {"cap": 30}}]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_and_caches(name: str) -> None:
    module = lowered(name)
    for seed in range(4):
        hold(module, seed, page=128 if "window" in name else 64)
    files = render(module)
    assert "def decode_right(" in files["hopper.py"] and '("sm90", 2, "hopper")' in files["kernels.py"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"cache": {"paged": {"page_size": 16}}}, "its cache has pages of 16 rows; expected a multiple of 64"),
        (
            {"cache": {"paged": {"page_size": "any"}}},
            "its cache has pages whose size a call gives; expected a multiple of 64",
        ),
        ({"score": ["alibi"]}, "its modifiers are of positions, and registers spill"),
        ({"mask": "tree"}, "its mask or modifiers read what is loaded for keys (%tree_mask)"),
        (
            {"mask": {"all_of": ["causal", {"chunked": {"size": 50}}]}},
            "its mask and modifiers take 11 operations for each score, and of more than 10 registers may spill",
        ),
        ({"head_dim": {"qk": 320, "v": 256}}, "its latents have 256 columns and 64 rotated ones; expected 512 and 64"),
    ],
)
def test_what_stays_portable(more: dict[str, object], why: str) -> None:
    made = latents(**more)
    module = lower(made, after="dce")
    assert not_preferred(module) == why and not lower(made).warp_specialized
    assert f"On sm90 the kernel @decode has no row for hopper: {why}." in list(unspecialized(made, module))


# Edits of the text that the executor shows: what a role reads is not there yet, is gone, or is another one's.
SHOWN = {
    "rows past the end that are not cleared": ("    zero_out_of_bounds %k_in_own\n", ""),
    "sums that are not rescaled by the other role's factor": (
        "%rescaled_told_in_told = map expr(acc*alpha)",
        "%rescaled_told_in_told = map expr(acc + 0*alpha)",
    ),
    "a tile of weights given back too early": (
        (
            "    %acc_next_told_in_both = wgmma_wait %acc_next_told_in_both_flight : f32[BLOCK_Q, RIGHT_V] @reg\n"
            "    consumer_release %p_told_in_both\n"
        ),
        (
            "    consumer_release %p_told_in_both\n    %acc_next_told_in_both = wgmma_wait %acc_next_told_in_both_flight : f32[BLOCK_Q, "
            "RIGHT_V] @reg\n"
        ),
    ),
    "a maximum that is not the other role's": ("values(m=%m_told_in_told, ", "values(m=%m_in_told, "),
    "sums of one role alone": (
        "expr(l_other + l_own) uses(l_own=%keys_left_l",
        "expr(0*l_other + l_own) uses(l_own=%keys_left_l",
    ),
    "the halves of scores' columns the wrong way round": (
        "producer_load %Q_left_pipeline %Q[b, 0, q, left_v]\n    producer_load %Q_right_pipeline %Q[b, 0, q, right_v]",
        "producer_load %Q_left_pipeline %Q[b, 0, q, right_v]\n    producer_load %Q_right_pipeline %Q[b, 0, q, left_v]",
    ),
}


@pytest.mark.parametrize("mistake", SHOWN)
def test_a_mistake_shows_in_the_results(mistake: str) -> None:
    made = edited(SHOWN[mistake])
    with pytest.raises((AssertionError, Deadlock)):
        for seed in range(8):
            hold(made, seed)


# ---------------------------------------------------------------------------------------------- what is refused

EXCHANGE = "    producer_store %P_pipeline %weights_in_own beside(M_pipeline=%soft_in_own.m, ALPHA_pipeline=%soft_in_own.alpha)\n"
# Edits of the text: (old, new), the rule, the reason.
REFUSED: dict[str, tuple[tuple[str, str], str, str]] = {
    "weights that are not shared": ((EXCHANGE, ""), "roles", "%P_pipeline is in relay; expected two roles"),
    "weights shared twice": (
        (EXCHANGE, EXCHANGE * 2),
        "protocol",
        "overwrites a tile of %P_pipeline, which right 0 has not given back",
    ),
    "weights of the other role kept": (
        ("    consumer_release %p_told_in_told\n", ""),
        "protocol",
        "overwrites a tile of %P_pipeline, which left 0 has not given back",
    ),
    "weights given back while a product reads them": (
        (
            (
                "    %acc_next_told_in_both = wgmma_wait %acc_next_told_in_both_flight : f32[BLOCK_Q, RIGHT_V] @reg\n"
                "    consumer_release %p_told_in_both\n"
            ),
            (
                "    consumer_release %p_told_in_both\n    %acc_next_told_in_both = wgmma_wait %acc_next_told_in_both_flight : "
                "f32[BLOCK_Q, RIGHT_V] @reg\n"
            ),
        ),
        "protocol",
        "right 0 gives back a tile of %P_pipeline while %acc_next_told_in_both_flight reads it",
    ),
    "sums that are not exchanged": (
        (
            "    %l_taken_left = consumer_wait",
            "    producer_store %L_left_pipeline %keys_left_l\n    %l_taken_left = consumer_wait",
        ),
        "protocol",
        "can wait for ever|not all parts of a tile of %L_left_pipeline",
    ),
    "values taken before they are cleared": (
        (
            "    %p_told_in_told = consumer_wait %P_pipeline : T[BLOCK_Q, BLOCK_KV] @sram\n",
            "    %v_early = consumer_wait %K_left_odd_pipeline : T[BLOCK_KV, LEFT_V] @sram\n    consumer_release %v_early\n"
            "    %p_told_in_told = consumer_wait %P_pipeline : T[BLOCK_Q, BLOCK_KV] @sram\n",
        ),
        "protocol",
        "clears rows of a tile of %K_left_odd_pipeline that left 0 has taken|can wait for ever",
    ),
    "rows cleared after the tile is given back": (
        (
            "    zero_out_of_bounds %k_other_in_own\n    consumer_release %k_other_in_own\n",
            "    consumer_release %k_other_in_own\n    zero_out_of_bounds %k_other_in_own\n",
        ),
        "protocol",
        "left 0 clears rows of a tile of %K_right_even_pipeline that it has given back or never taken",
    ),
    "rows cleared while scores are multiplied": (
        (
            "    %s_in_own = wgmma_wait %s_in_own_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n",
            "    zero_out_of_bounds %k_in_own\n    %s_in_own = wgmma_wait %s_in_own_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n",
        ),
        "protocol",
        "left 0 clears rows of a tile of %K_left_even_pipeline while %s_own_in_own_flight reads it",
    ),
    "a piece of the keys kept": (
        ("    consumer_release %k_rope_in_both\n", ""),
        "protocol",
        "can wait for ever|is filled again, and nothing gives its tiles back",
    ),
    "rows that nothing clears": (
        ("    zero_out_of_bounds %k_other_in_both\n", ""),
        "ends-cleared",
        "%K_left_odd_pipeline, and nothing clears rows",
    ),
    "a last tile whose rows nothing clears": (
        (
            "    %v_told_in_lone = consumer_wait %K_right_even_pipeline : T[BLOCK_KV, RIGHT_V] @sram\n",
            (
                "    %v_told_in_lone = consumer_wait %K_right_even_pipeline : T[BLOCK_KV, RIGHT_V] @sram\n"
                "    zero_out_of_bounds %v_told_in_lone\n"
            ),
        ),
        "ends-cleared",
        "@right clears rows of tiles of %K_right_even_pipeline, and not those of %v_told_in_both",
    ),
    "sums lifted after they are given back": (
        (
            "    %l_other_left = local_load %l_taken_left : f32[BLOCK_Q] @reg\n    consumer_release %l_taken_left\n",
            "    consumer_release %l_taken_left\n    %l_other_left = local_load %l_taken_left : f32[BLOCK_Q] @reg\n",
        ),
        "types",
        "lifts %l_taken_left, which has been given back before",
    ),
    "rows cleared too late": (
        ("    zero_out_of_bounds %k_in_own\n", ""),
        "ends-cleared",
        "%acc_next_in_own_flight multiplies weights by a tile of %K_left_even_pipeline, and nothing clears",
    ),
    "the left columns by the right ones": (
        ("wgmma %q_near_in_own %k_in_own over(LEFT_V)", "wgmma %q_other_left %k_in_own over(LEFT_V)"),
        "types",
        "the product is f32",
    ),
    "a product that is left in flight": (
        (
            "%k_other_in_own over(RIGHT_V) acc(%s_own_in_own_flight)",
            "%k_other_in_own over(RIGHT_V) acc(%s_rope_in_own_flight)",
        ),
        "flights",
        "in flight; expected one await",
    ),
    "rows that are not written beside the weights": (
        (
            "beside(M_pipeline=%soft_in_own.m, ALPHA_pipeline=%soft_in_own.alpha)",
            "beside(M_pipeline=%soft_in_own.m)",
        ),
        "types",
        "writes rows to M_pipeline beside %P_pipeline; expected M_pipeline, ALPHA_pipeline",
    ),
    "a relay of two slots": (
        ("pipeline stages(1) exchange(yes)", "pipeline stages(2) exchange(yes)"),
        "types",
        "is in relay; expected one slot",
    ),
    "a relay that one role alone uses": (
        (EXCHANGE, "    producer_store %L_left_pipeline %soft_in_own.m\n"),
        "roles",
        "%P_pipeline is in relay; expected two roles of one copy each that share tiles through it, and take them",
    ),
    "a page of another tile": (
        ("%PAGE_TABLE[b, kv_start // 64]", "%PAGE_TABLE[b, kv_start // 32]"),
        "walks",
        "copies from where @decode loads nothing",
    ),
    "a tile that lies in no page": (
        (" page(%page_even)\n    producer_load %K_left_even", "\n    producer_load %K_left_even"),
        "walks",
        "copies from where @decode loads",
    ),
    "one half that is not stored": (
        ("store %O_PARTS_head_right[q, right_v] %o_part_right check(q)\n", ""),
        "walks",
        "it stores 0 times at %O_PARTS",
    ),
    "turns by twos, and a first one": (
        ("step(@own) odd(@told)", "step(@own) odd(@told) recompute(yes)"),
        "bodies",
        "has turns by twos; expected @step",
    ),
    "an odd turn that yields something else": (
        ("yield values(m=%m_told_in_told, l", "yield values(l"),
        "bodies",
        "take and yield does not fit",
    ),
    "cleared rows of queries": (
        (
            "    zero_out_of_bounds %k_in_own\n",
            "    zero_out_of_bounds %k_in_own\n    zero_out_of_bounds %k_rope_in_both\n",
        ),
        "scopes",
        "where it is not defined",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_refused(mistake: str) -> None:
    change, rule, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule `{rule}`: kernel @decode: .*({reason})"):
        verify(edited(change))


# ---------------------------------------------------------------------------------------------- protocols of a few steps


def relay(left: tuple[Step, ...], told: tuple[Step, ...], both: tuple[Step, ...]) -> Protocol:
    """Two roles and a ring in relay: `left` and `told` by turns; `told` for a last tile, or `both` for two."""
    programs = (
        Program("left", (), Walk(left, left, odd=told), (), 1),
        Program("right", (), Walk(told, told, pair=both), (), 1),
    )
    return Protocol(
        programs, (("P", 1), ("L", 1), ("R", 1)), (("P", ""), ("L", ""), ("R", "")), relays=frozenset({"P"})
    )


SHARE, TOLD = (Step("producer_store", "P"),), (Step("consumer_wait", "P"), Step("consumer_release", "P"))


def test_who_takes_a_tile_shares_the_next_one() -> None:
    """After a number of tiles that is even, all is given back. After an odd number too, so both orders of the end
    are right."""
    made = relay(SHARE, TOLD, (*TOLD, *SHARE))
    assert broken(made) == broken(made, all_orders=True) == ""


@pytest.mark.parametrize("both", [(*SHARE, *TOLD), (*TOLD, *SHARE, *SHARE), TOLD, SHARE, (TOLD[0], *SHARE, TOLD[1])])
def test_all_orders_of_a_relay_give_the_same_verdict(both: tuple[Step, ...]) -> None:
    made = relay(SHARE, TOLD, both)
    assert broken(made) and broken(made, all_orders=True)


def test_a_cleared_tile_that_another_may_have_taken_is_found() -> None:
    """It is found in some order of steps: the other role takes the tile before the weights come, or after."""

    def of(*right: Step) -> Protocol:
        fill, drain = (Step("producer_load", "K"),), (Step("producer_tail", "K"),)
        left = (Step("consumer_wait", "K"), Step("zero_out_of_bounds", "K"), *SHARE, Step("consumer_release", "K"))
        programs = (
            Program("producer", (), Walk(fill, fill), drain, 1),
            Program("left", (), Walk(left, left), (), 1),
            Program("right", (), Walk(right, right), (), 1),
        )
        return Protocol(programs, (("K", 1), ("P", 1)), (("K", ""), ("P", "")))

    after = of(*TOLD, Step("consumer_wait", "K"), Step("consumer_release", "K"))
    assert broken(after) == broken(after, all_orders=True) == ""
    before = of(Step("consumer_wait", "K"), *TOLD, Step("consumer_release", "K"))
    assert "clears rows of a tile of %K that right 0 has taken" in broken(before)
    assert "clears rows of a tile of %K that right 0 has taken" in broken(before, all_orders=True)


def test_warp_groups_that_count_turns_otherwise_are_found() -> None:
    """One goes through tiles by twos, and takes a tile for the second of each two alone."""
    fill, take = (Step("producer_load", "K"),), (Step("consumer_wait", "K"), Step("consumer_release", "K"))
    walk = Walk((), (), odd=take)
    programs = (
        Program("producer", (), Walk(fill, fill), (Step("producer_tail", "K"),), 1),
        Program("left", (), walk, (), 1),
    )
    made = Protocol(programs, (("K", 1),), (("K", ""),))
    assert "wait for ever" in broken(made)
    every = replace(made, programs=(programs[0], replace(programs[1], walk=Walk(take, take, odd=take))))
    assert broken(every) == broken(every, all_orders=True) == ""
