"""The warp-specialized decode kernel of MLA, whose two consumer warp groups split the columns of outputs and exchange
P: passes, results, and support."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from attngen.codegen.render import render
from attngen.interp.tile import execute_kernel
from attngen.interp.values import DOUBLE
from attngen.interp.warp_groups import Deadlock, WarpSpecializedLaunch
from attngen.ir import Kernel, Module
from attngen.ir.printer import print_kernel, print_op
from attngen.lowering.pipeline import lower, stages, unspecialized
from attngen.report.timeline import Timeline
from attngen.spec import Spec, make_spec
from attngen.targets.hopper.configs.mla_decode import not_preferred
from attngen.targets.hopper.toolchain.certificate import overlapped_share, registers_of_instances
from attngen.targets.hopper.toolchain.compiler import marks
from tests.helpers import spec, target
from tests.hopper.common import edited_mla_decode


@cache
def after_passes() -> dict[str, Module]:
    """The verified module after every pass, by the pass's name."""
    return dict(stages(spec("decode_mla")))


def body(after: str, block: str) -> list[str]:
    """The ops of a block of the warp-specialized kernel after a pass, as text."""
    return [print_op(op) for op in after_passes()[after].warp_specialized[0].block(block).ops]


def index_of(ops: list[str], start: str) -> int:
    """The index of the first op whose text starts with `start`."""
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
def test_each_pass_keeps_the_results(name: str) -> None:
    for seed in range(3):
        compare_with_portable(after_passes()[name], seed)


def test_splits_store_maxima_and_sums_where_a_spec_also_has_fp32() -> None:
    module = lower(mla_spec(dtype=["bf16", "fp32"], cache={"paged": {"page_size": 64}}))
    text = print_kernel(module.warp_specialized[0])
    assert text.count("store %M_PARTIAL") == text.count("store %L_PARTIAL") == 1 and "LSE2_PARTIAL" not in text
    for seed in range(3):
        compare_with_portable(module, seed)


def test_split_d_warp_groups_gives_each_warp_group_half_of_the_columns() -> None:
    text = print_kernel(after_passes()["split-d-warp-groups"].warp_specialized[0])
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
    assert stores == ["%O_PARTIAL[0,", "%LSE2_PARTIAL[0,", "%O_PARTIAL[0,"]  # row statistics are stored once


def test_exchange_p_alternates_tiles_between_warp_groups() -> None:
    own, both, single = (body("exchange-p", name) for name in ("own", "both", "single"))
    assert (
        index_of(own, "%masked_in_own")
        < index_of(own, "zero_out_of_bounds %k_in_own")
        < index_of(own, "consumer_release %k_other_in_own")
        < index_of(own, "producer_store %P_pipeline")
    )
    assert (
        index_of(own, "producer_store %P_pipeline")
        < index_of(own, "%acc_next_in_own = dot")
        < index_of(own, "consumer_release %k_in_own")
    )
    assert (
        index_of(both, "%s_in_both = dot")
        < index_of(both, "%p_RECEIVED_in_both = consumer_wait %P_pipeline")
        < index_of(both, "%soft_in_both")
        < index_of(both, "producer_store %P_pipeline")
    )
    assert "softmax_step %masked_in_both m(%m_RECEIVED_in_both)" in both[index_of(both, "%soft_in_both")]
    assert not [op for op in single if "softmax_step" in op or "%M_pipeline" in op]
    assert body("exchange-p", "copy_odd")[2:4] == [
        "producer_load %K_right_odd_pipeline %K[0, kv, right_v] page(%page_odd)",
        "producer_load %K_left_odd_pipeline %K[0, kv, left_v] page(%page_odd)",
    ]


def test_async_mma_chains_products_in_flight() -> None:
    own = body("async-mma", "own")
    assert [op.split(" = ")[0] for op in own if " = wgmma_wait " in op] == ["%s_in_own", "%acc_next_in_own"]
    assert "acc(%s_own_in_own_flight)" in own[index_of(own, "%s_in_own_flight = wgmma")]


def test_software_pipeline_weights_waits_for_a_product_after_the_softmax() -> None:
    for name, late in (("async-mma", False), ("software-pipeline-weights", True)):
        both = body(name, "both")
        awaited = index_of(both, "%acc_next_RECEIVED_in_both = wgmma_wait")
        assert (awaited > index_of(both, "%l_next_in_both =")) is late
        assert both[awaited + 1 : awaited + 3] == [
            "consumer_release %p_RECEIVED_in_both",
            "consumer_release %v_RECEIVED_in_both",
        ]


def test_the_softmax_of_odd_tiles_overlaps_a_product_in_the_timeline() -> None:
    """No warp group waits for ever, and @right always has a product in flight during its softmax."""
    line = Timeline(target("decode_mla").warp_specialized[0], 2)
    softmax = [s for s in line.spans if s.lane == "right" and s.label.startswith("softmax")]
    products = [s for s in line.spans if s.lane == "products of right" and s.cls == "bar"]
    assert not line.stuck and softmax
    assert all(any(p.start < s.end and s.start < p.end for p in products) for s in softmax)


def test_strides_of_stored_tiles_are_not_rematerialized() -> None:
    """The compiler stores two elements at once where it knows that these strides are multiples of 16. Other scalars of
    a call are rematerialized, which hides their values from it."""
    text = render(target("decode_mla"))["hopper.py"]
    assert "stride_lse2_partial_i = _rematerialize(" in text and "stride_page_table_b = _rematerialize(" in text
    assert (
        "* stride_o_partial_n + left_v" in text
        and "* stride_o_partial_n + right_v" in text
        and "stride_o_partial_n = _rematerialize(" not in text
    )


def test_all_calls_use_the_warp_specialized_kernel() -> None:
    """A portable config stays for other versions of Triton; the config of the warp-specialized kernel has no range of
    rows."""
    (config,) = target("decode_mla").configs("decode", "hopper")
    assert (config.min_rows, config.max_rows) == (0, None)


def test_a_certificate_expects_both_warp_groups_and_half_of_the_exponentials() -> None:
    """The exponentials of odd tiles overlap a product, those of even tiles do not. Per row a thread computes as many
    exponentials as for four columns."""
    module = target("decode_mla")
    kernel, (row,) = module.warp_specialized[0], module.configs("decode", "hopper")
    assert list(marks(kernel)) == [("producer", "UTMALDG"), ("left", "HGMMA")]
    assert (registers_of_instances("producer", kernel, row), registers_of_instances("left", kernel, row)) == (
        [56],
        [224, 224],
    )
    assert overlapped_share(kernel, row) == (Fraction(8, 17), Fraction(9, 17))


def results(module: Module, kernel: Kernel, seed: int, page: int = 64) -> dict[str, np.ndarray]:
    """Partial outputs of splits, and their row statistics, of a random call whose cache has NaN past each sequence."""
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
    out = {name: np.full((1, items, rows, *((512,) if name == "O_PARTIAL" else ())), np.nan) for name in stored}
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


def compare_with_portable(module: Module, seed: int, page: int = 64) -> None:
    """Raise AssertionError where results of the warp-specialized kernel differ from those of the portable one."""
    found, expected = (
        results(module, kernel, seed, page) for kernel in (module.warp_specialized[0], module.kernel("decode"))
    )
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("seed", range(8))
def test_results_are_those_of_the_portable_kernel(seed: int) -> None:
    compare_with_portable(edited_mla_decode(), seed)


def mla_spec(**more: object) -> Spec:
    """An MLA spec with a contiguous cache, and with these fields added or replaced."""
    usual = {
        "heads": {"sharing": "mqa"},
        "head_dim": {"qk": 576, "v": 512},
        "mask": "causal",
        "backward": False,
        "cache": "contiguous",
    }
    return make_spec({"name": "latents", **usual, "kv": {"latent": {"rope": 64}}, **more})


@cache
def lowered_variant(name: str) -> Module:
    """The module of an MLA spec with another mask or cache."""
    return lower(mla_spec(**OTHERS[name]))


PAGES: dict[str, object] = {"cache": {"paged": {"page_size": 128}}}

OTHERS: dict[str, dict[str, object]] = {
    "contiguous": {},
    "a window, whose partial tiles are in two ranges": {"mask": {"sliding_window": {"left": 100}}, **PAGES},
    "all tiles are partial": {"mask": {"expr": "kv_idx % 3 != 1"}},
    "all tiles except the last are full": {"mask": "none"},
    "soft caps": {"score": [{"softcap": {"cap": 30}}]},
}


@pytest.mark.share(16)
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_and_caches(name: str) -> None:
    module = lowered_variant(name)
    for seed in range(4):
        compare_with_portable(module, seed, page=128 if "window" in name else 64)
    files = render(module)
    assert "def decode_right(" in files["hopper.py"] and '("sm90", 2, "hopper")' in files["kernels.py"]


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cache": {"paged": {"page_size": 16}}}, "its cache has pages of 16 rows; expected a multiple of 64"),
        (
            {"cache": {"paged": {"page_size": "any"}}},
            "its cache has pages whose size a call gives; expected a multiple of 64",
        ),
        ({"score": ["alibi"]}, "its modifiers depend on positions, and registers spill"),
        ({"mask": "tree"}, "its mask or modifiers read what is loaded for keys (%tree_mask)"),
        (
            {"mask": {"all_of": ["causal", {"chunked": {"size": 50}}]}},
            "its mask and modifiers take 11 operations for each score; with more than 10, registers may spill",
        ),
        ({"head_dim": {"qk": 320, "v": 256}}, "its latents have 256 columns and 64 rotated ones; expected 512 and 64"),
    ],
)
def test_the_reason_for_a_portable_kernel_is_reported(fields: dict[str, object], reason: str) -> None:
    made = mla_spec(**fields)
    module = lower(made, after="dce")
    assert not_preferred(module) == reason and not lower(made).warp_specialized
    assert f"On sm90 the kernel @decode has no config for hopper: {reason}." in list(unspecialized(made, module))


# Edits of the IR text whose mistakes show in the interpreter: a warp group reads a value too early, too late, or of the
# other warp group.
SHOWN = {
    "rows past the end that are not zeroed": ("    zero_out_of_bounds %k_in_own\n", ""),
    "an accumulator that is not rescaled by the other warp group's factor": (
        "%rescaled_RECEIVED_in_received = map expr(acc*alpha)",
        "%rescaled_RECEIVED_in_received = map expr(acc + 0*alpha)",
    ),
    "a tile of P released too early": (
        (
            "    %acc_next_RECEIVED_in_both = wgmma_wait %acc_next_RECEIVED_in_both_flight : "
            "f32[BLOCK_Q, RIGHT_V] @reg\n"
            "    consumer_release %p_RECEIVED_in_both\n"
        ),
        (
            "    consumer_release %p_RECEIVED_in_both\n"
            "    %acc_next_RECEIVED_in_both = wgmma_wait %acc_next_RECEIVED_in_both_flight : f32[BLOCK_Q, "
            "RIGHT_V] @reg\n"
        ),
    ),
    "a maximum that is not the other warp group's": ("values(m=%m_RECEIVED_in_received, ", "values(m=%m_in_received, "),
    "row sums of only one warp group": (
        "expr(l_other + l_own) uses(l_own=%keys_left_l",
        "expr(0*l_other + l_own) uses(l_own=%keys_left_l",
    ),
    "the halves of the head_dim of Q in the wrong order": (
        (
            "producer_load %Q_left_pipeline %Q[b, 0, q, left_v]\n"
            "    producer_load %Q_right_pipeline %Q[b, 0, q, right_v]"
        ),
        (
            "producer_load %Q_left_pipeline %Q[b, 0, q, right_v]\n"
            "    producer_load %Q_right_pipeline %Q[b, 0, q, left_v]"
        ),
    ),
}


@pytest.mark.parametrize("mistake", SHOWN)
def test_a_mistake_shows_in_the_results(mistake: str) -> None:
    made = edited_mla_decode(SHOWN[mistake])
    with pytest.raises((AssertionError, Deadlock)):
        for seed in range(8):
            compare_with_portable(made, seed)
