"""The warp-specialized kernel of forward-mode derivatives: passes, IR that is refused, results, and generated code."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import sympy

from attngen.builders import build_module
from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.interp.host import execute
from attngen.interp.values import DOUBLE
from attngen.interp.warp_groups import WarpSpecializedLaunch
from attngen.ir import Kernel, Module, only, pipe, tile
from attngen.lowering.pipeline import lower, specialize, stages, unspecialized
from attngen.spec import Spec, make_spec
from attngen.targets.hopper.configs.common import smem_limit
from attngen.targets.hopper.configs.jvp import config
from attngen.targets.hopper.configs.sm90 import JVP
from attngen.targets.hopper.toolchain.resources import sram_bytes
from attngen.verify import verify
from attngen.verify.machine import violation
from attngen.verify.protocol import protocol_of
from tests.hopper.common import edited_module, lines_of, removed_and_added
from tests.transforms.equality import Call, must_be_equal, naive

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": "causal"},
    "wide": {"mask": "causal", "head_dim": 128},
    "shared": {"mask": "causal", "heads": {"sharing": "gqa"}},
    "window": {"mask": {"sliding_window": {"left": 40, "right": 3}}, "heads": {"sharing": "mqa"}},
    "documents": {"mask": {"all_of": ["causal", "document"]}},
    "padding": {"mask": "key_padding"},
    "allowed": {
        "mask": {
            "expr": "allowed[b, q_idx, kv_idx]",
            "params": {"allowed": {"tensor": ["B", "Nq", "Nk"], "dtype": "bool"}},
        }
    },
    "alibi": {"mask": "causal", "score": "alibi"},
    "capped": {"score": [{"softcap": 5.0}]},
    "blocks": {"mask": {"all_of": ["causal", {"block_sparse": {"block": 128}}]}},
}


@cache
def spec_for(name: str) -> Spec:
    return make_spec({"name": "tangents", "head_dim": 64, **CASES[name]})


@cache
def after_passes(name: str) -> dict[str, Module]:
    """The verified module after every pass."""
    return dict(stages(spec_for(name)))


def lowered(name: str) -> Module:
    return list(after_passes(name).values())[-1]


def jvp_kernel(module: Module) -> Kernel:
    return next(k for k in module.warp_specialized if k.name == JVP)


def lines(name: str, after: str, block: str) -> list[str]:
    """The ops of a block of the warp-specialized kernel after a pass, as text."""
    return lines_of(jvp_kernel(after_passes(name)[after]), block)


def changed(name: str, before: str, after: str, block: str) -> tuple[list[str], list[str]]:
    """The lines of a block that were removed, and those that were added, between two passes."""
    return removed_and_added(lines(name, before, block), lines(name, after, block))


# ---------------------------------------------------------------------------------------------- passes


@pytest.mark.share(32)
def test_the_number_of_keys_per_tile_depends_on_registers() -> None:
    found = {name: made.block_kv for name in CASES for _, made in lowered(name).stand_ins(JVP)}
    few = dict.fromkeys(("wide", "allowed", "padding", "alibi", "capped"), 64)
    assert found == {**dict.fromkeys(CASES, 128), **few}
    assert {(r.block_q, r.num_stages, r.min_rows) for name in CASES for _, r in lowered(name).stand_ins(JVP)} == {
        (128, 2, 64)
    }


def test_insert_pipelines_releases_tiles_after_chained_products() -> None:
    """tK is kept until both products of tS are complete, and tV until both products that add to the accumulator are."""
    removed, added = changed("plain", "warp-specialize", "insert-pipelines", "step")
    assert [line.split(" = ")[0] for line in removed] == ["%k", "%tk", "%tv", "%v"] and all(
        " = load " in line for line in removed
    )
    body = lines("plain", "insert-pipelines", "step")
    order = [
        line.split(" ")[0 if " = dot " in line else 1]
        for line in body
        if " = dot " in line or line.startswith("consumer_release")
    ]
    assert order == ["%ts_part", "%ts", "%tk", "%s", "%k", "%acc_part", "%acc_next", "%tv", "%v"]
    assert [line for line in added if "consumer_release" in line] == [
        "consumer_release %tk",
        "consumer_release %k",
        "consumer_release %tv",
        "consumer_release %v",
    ]


def test_async_mma_keeps_the_operands_of_chained_products_alive() -> None:
    removed, added = changed("plain", "insert-pipelines", "async-mma", "step")
    assert removed[-2:] == [
        "%acc_part = dot %p %tv over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @reg",
        "%acc_next = dot %tp %v over(BLOCK_KV) acc(%acc_part) : f32[BLOCK_Q, D_V] @reg",
    ]
    assert added[-5:] == [
        "%p_cast = pack %p : T[BLOCK_Q, BLOCK_KV] @reg",
        "%acc_part_flight = wgmma %p_cast %tv over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @flight",
        "%tp_cast = pack %tp : T[BLOCK_Q, BLOCK_KV] @reg",
        "%acc_flight = wgmma %tp_cast %v over(BLOCK_KV) acc(%acc_part_flight) : f32[BLOCK_Q, D_V] @flight",
        "%acc_next = wgmma_wait %acc_flight keep_alive(%p_cast, %tp_cast) : f32[BLOCK_Q, D_V] @reg",
    ]


def test_software_pipeline_tangents_computes_while_products_run() -> None:
    """P is computed while the products of the scores' tangents run, and its tangent while P is multiplied by tV."""
    assert lines("causal", "software-pipeline-tangents", "step") == [
        "%acc = arg carry : f32[BLOCK_Q, D_V] @reg",
        "%tlse = arg carry : f32[BLOCK_Q] @reg",
        "%q_ADDR = rematerialize %q : T[BLOCK_Q, D_QK] @sram",
        "%tq_ADDR = rematerialize %tq : T[BLOCK_Q, D_QK] @sram",
        "%k = consumer_wait %K_pipeline : T[BLOCK_KV, D_QK] @sram",
        "%s_flight = wgmma %q_ADDR %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @flight",
        "%tk = consumer_wait %tK_pipeline : T[BLOCK_KV, D_QK] @sram",
        "%ts_part_flight = wgmma %tq_ADDR %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @flight",
        "%ts_flight = wgmma %q_ADDR %tk over(D_QK) acc(%ts_part_flight) : f32[BLOCK_Q, BLOCK_KV] @flight",
        "%s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg",
        "%masked = mask %s where(kv_idx <= Nk - Nq + q_idx) : f32[BLOCK_Q, BLOCK_KV] @reg",
        (
            "%p = map expr(exp2(-lse2 + masked*qk_scale)) uses(lse2=%lse2, masked=%masked, qk_scale=%qk_scale) : "
            "f32[BLOCK_Q, BLOCK_KV] @reg"
        ),
        "%p_cast = pack %p : T[BLOCK_Q, BLOCK_KV] @reg",
        "%tv = consumer_wait %tV_pipeline : T[BLOCK_KV, D_V] @sram",
        "%acc_part_flight = wgmma %p_cast %tv over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @flight",
        "%ts = wgmma_wait %ts_flight : f32[BLOCK_Q, BLOCK_KV] @reg",
        "consumer_release %tk",
        "consumer_release %k",
        "%tscore = map expr(scale*ts) uses(scale=%scale, ts=%ts) : f32[BLOCK_Q, BLOCK_KV] @reg",
        "%tp = map expr(p*tscore) uses(p=%p, tscore=%tscore) : f32[BLOCK_Q, BLOCK_KV] @reg",
        "%tp_cast = pack %tp : T[BLOCK_Q, BLOCK_KV] @reg",
        "%tp_sum = reduce sum %tp over(BLOCK_KV) : f32[BLOCK_Q] @reg",
        "%tlse_next = map expr(tlse + tp_sum) uses(tlse=%tlse, tp_sum=%tp_sum) : f32[BLOCK_Q] @reg",
        "%v = consumer_wait %V_pipeline : T[BLOCK_KV, D_V] @sram",
        "%acc_flight = wgmma %tp_cast %v over(BLOCK_KV) acc(%acc_part_flight) : f32[BLOCK_Q, D_V] @flight",
        "%acc_next = wgmma_wait %acc_flight keep_alive(%p_cast, %tp_cast) : f32[BLOCK_Q, D_V] @reg",
        "consumer_release %tv",
        "consumer_release %v",
        "yield values(acc=%acc_next, tlse=%tlse_next)",
    ]
    removed, added = changed("causal", "async-mma", "software-pipeline-tangents", "consumer")
    assert [line.split(" ")[2] for line in removed if " = loop " in line] == ["loop", "loop"]
    assert "%keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end)" in " ".join(added)


def test_metadata_of_a_tile_is_read_before_the_tile_is_released() -> None:
    """The metadata that a mask needs is read after the scores are complete."""
    body = lines("documents", "software-pipeline-tangents", "step")
    places = [
        next(i for i, line in enumerate(body) if start in line)
        for start in ("%s = wgmma_wait", "= read_metadata ", "%masked", "consumer_release %k")
    ]
    assert places == sorted(places)


def test_software_pipeline_tangents_changes_no_other_kernel() -> None:
    for name in ("plain", "causal"):
        before, after = (
            after_passes(name)[step].warp_specialized
            for step in ("software-pipeline-gradients", "software-pipeline-tangents")
        )
        assert [k.name for k, old in zip(after, before) if k != old] == [JVP]


def test_row_sums_stay_partial_per_thread_and_are_not_pinned() -> None:
    """They may be negative, and values that are pinned before a wait must not be."""
    _, added = changed("plain", "software-pipeline-softmax", "defer-row-reduction", "step")
    assert "%tp_sum = partial_reduce %tp over(BLOCK_KV) : f32[BLOCK_Q, _PARTIALS] @reg" in added
    assert not any(only(jvp_kernel(lowered("plain")).ops(), pipe.PinBeforeWait))
    assert any(
        op.value == 0 and op.type.dims[1:] == ("_PARTIALS",)
        for op in only(jvp_kernel(lowered("plain")).ops(), tile.Init)
    )


def test_skip_masked_tiles_lets_an_instance_skip_tiles_that_its_rows_do_not_see() -> None:
    """Tiles of 64 keys are then visited in reversed order; tiles of 128 keys are visible to both instances."""
    removed, added = changed("wide", "defer-row-reduction", "skip-masked-tiles", "consumer")
    assert len(removed) == len(added) == 1 and removed[0].endswith("in_order(yes)")
    assert (
        "step(@step) reversed(yes) skip(@skip) instance_partial(max(0, min(Nk, Nk - Nq + q_start + 1)) // "
        "BLOCK_KV .. cdiv("
    ) in added[0]
    pipelines = [
        f"%{name}_in_skip = consumer_wait %{pipeline}_pipeline"
        for name, pipeline in (("k", "K"), ("tk", "tK"), ("tv", "tV"), ("v", "V"))
    ]
    assert [
        line.partition(" : ")[0] for line in lines("wide", "skip-masked-tiles", "skip") if "consumer_wait" in line
    ] == pipelines
    assert changed("causal", "defer-row-reduction", "skip-masked-tiles", "consumer") == ([], [])


def test_programs_are_persistent() -> None:
    """Each program computes tile after tile. Stages of Q and tQ are released after the loop, and outputs are stored
    through a staging pipeline of their own."""
    _, added = changed("plain", "skip-masked-tiles", "persistent-scheduler", "entry")
    assert [line for line in added if " = pipeline " in line] == [
        "%Q_pipeline = pipeline stages(1) per_instance(consumer) mbarrier_release(yes) : T[BLOCK_Q, D_QK] @sram",
        "%tQ_pipeline = pipeline stages(1) per_instance(consumer) mbarrier_release(yes) : T[BLOCK_Q, D_QK] @sram",
        "%Work_pipeline = pipeline stages(2) : i32[] @sram",
    ]
    body = lines("plain", "legalize-gluon", "consume")
    at = next(i for i, line in enumerate(body) if " = pipelined_loop " in line)
    assert body[at + 1 : at + 4] == ["consumer_release %q", "consumer_release %tq", "reload_tile %Work_pipeline"]
    assert (
        "tma_store %tO[b, h, q, d_v] %to staging(%tO_pipeline)" in body
        and jvp_kernel(lowered("plain")).traits.is_persistent
    )


@pytest.mark.share(16)
def test_each_tile_has_its_own_program_where_that_is_faster() -> None:
    """It is faster under a causal mask with wide heads; with more operations per score registers would spill."""
    assert changed("wide", "skip-masked-tiles", "persistent-scheduler", "entry") == ([], [])
    assert not jvp_kernel(lowered("wide")).traits.is_persistent
    for mask in ("none", {"sliding_window": {"left": 40, "right": 3}}):
        assert jvp_kernel(lower(make_spec({"name": "others", "head_dim": 128, "mask": mask}))).traits.is_persistent


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"head_dim": {"qk": 192, "v": 128}},
            "its head_dims are 192 and 128; expected 64 or 128, the same for q, k and v.",
        ),
        ({"head_dim": 32}, "its head_dims are 32 and 32; expected 64 or 128, the same for q, k and v."),
        ({"mask": {"block_sparse": {"block": 64}}}, "its mask lists blocks of 64 queries, and a program has 128."),
        ({"score": "temperature"}, "its learned inputs have tangents, which only the portable kernel computes."),
        ({"outputs": ["lse", "entropy"]}, "it computes entropies of queries, or gradients from these (`outputs`)."),
        ({"dtype": "fp32"}, "no dtype of the spec has 16 bits."),
        ({"dropout": True}, "with dropout registers may spill."),
        (
            {"head_dim": 128, **CASES["allowed"]},
            "with a head_dim of more than 64 and a number for each score registers may spill.",
        ),
        (
            {"score": [{"expr": "s + erf(s)"}]},
            "its mask and modifiers take 36 operations for each score; with more than 22, registers may spill.",
        ),
        ({"schedule": {"backend": "triton"}}, "the spec says `schedule: {backend: triton}`."),
    ],
)
def test_the_reason_for_a_portable_kernel_is_reported(fields: dict[str, Any], reason: str) -> None:
    made = make_spec({"name": "tangents", "head_dim": 64, **fields})
    reasons = list(unspecialized(made, dict(stages(made))["dce"]))
    assert f"On sm90 the kernel @jvp has no config for hopper: {reason}" in reasons


# ---------------------------------------------------------------------------------------------- IR that is refused

REFUSED = {
    "an operand that is not kept alive while its product runs": (
        [("keep_alive(%p_cast_operand, %tp_cast_operand)", "keep_alive(%tp_cast_operand)")],
        (
            "`wgmma-wait`: .*%acc_next keeps %tp_cast_operand alive; expected %p_cast_operand and %tp_cast_operand, "
            "which the product reads from reg"
        ),
    ),
    "operands in another order": (
        [("keep_alive(%p_cast_operand, %tp_cast_operand)", "keep_alive(%tp_cast_operand, %p_cast_operand)")],
        "`wgmma-wait`: .*expected %p_cast_operand and %tp_cast_operand",
    ),
    "a product that is chained to one of another shape": (
        [("acc(%acc_part_flight)", "acc(%ts_flight)")],
        "`types`: .*%acc_flight: the accumulator is not f32.BLOCK_Q, D_V., in registers or in flight",
    ),
    "a tile released while the first of two products reads it": (
        [
            ("    consumer_release %tv\n", ""),
            (
                "    %acc_next = wgmma_wait %acc_flight",
                "    consumer_release %tv\n    %acc_next = wgmma_wait %acc_flight",
            ),
        ],
        "`protocol`: .*releases a tile of %tV_pipeline while %acc_part_flight reads it",
    ),
    "a tile that is never released": ([("    consumer_release %tk\n", "")], "`protocol`: .*can wait for ever"),
    "queries released before the loop ends": (
        [
            ("    consumer_release %q\n", ""),
            ("    %keys = pipelined_loop", "    consumer_release %q\n    %keys = pipelined_loop"),
        ],
        "`protocol`: .*reads a tile of %Q_pipeline that it has released",
    ),
    "tiles of another head": (
        [("producer_load %tK_pipeline %tK[b, h, kv", "producer_load %tK_pipeline %tK[b, 0, kv")],
        "`same-tiles`: .*loads from where the portable @jvp loads nothing",
    ),
    "outputs of another head": (
        [("tma_store %tO[b, h, q, d_v]", "tma_store %tO[b, 0, q, d_v]")],
        "`same-tiles`: .*it stores 0 times at %tO",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_ir_is_refused_with_a_reason(mistake: str) -> None:
    changes, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule ({reason})"):
        verify(edited_module(lowered("plain"), *changes, kernel=JVP))


@pytest.mark.share(16)
@pytest.mark.parametrize("name", CASES)
def test_the_protocol_of_every_kernel_is_proven(name: str) -> None:
    for depth in (1, 2, 3):
        assert violation(protocol_of(jvp_kernel(lowered(name)), {"num_stages": depth})) == ""


@pytest.mark.parametrize("name", ["plain", "wide"])
def test_tiles_fit_shared_memory(name: str) -> None:
    ((made, its),) = lowered(name).stand_ins(JVP)
    assert sram_bytes(lowered(name), made, its) == {"plain": 180920, "wide": 197128}[name] <= smem_limit(1)
    before = after_passes(name)["dce"]
    with pytest.raises(
        VerifyError,
        match=f"with BLOCK_KV={2 * its.block_kv} and num_stages=2 it needs .* bytes of shared memory; sm90 has",
    ):
        specialize(before, JVP, config(before, None, 2 * its.block_kv))


# ---------------------------------------------------------------------------------------------- results


def run(name: str, seed: int, lengths: Any = None) -> tuple[Any, Any]:
    """Results of the warp-specialized kernel, in a random order and with random tiles, and of naive attention."""
    module, chance = lowered(name), Random(seed)
    module = replace(module, kernels=tuple(jvp_kernel(module) if k.name == JVP else k for k in module.kernels))
    call = Call.random(chance, spec_for(name), build_module(spec_for(name)), lengths)
    sides = (32, 64, 128) if module.blocks else (8, 16)
    call = replace(call, tiles={"BLOCK_Q": chance.choice(sides), "BLOCK_KV": chance.choice(sides)})
    WarpSpecializedLaunch.chance = chance
    return execute(module, call.of_module(spec_for(name)), call.tiles, DOUBLE), naive(spec_for(name), call)


@pytest.mark.share(16)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_naive_attention(name: str) -> None:
    few = [None, (1, 17), (17, 1), (33, 65), (65, 33), (0, 5), (40, 40)]
    for seed, lengths in enumerate([(129, 390), (390, 129), (0, 200)] if lowered(name).blocks else few):
        must_be_equal(*run(name, seed, lengths), f"{name} {seed}")


def test_tangents_are_compared() -> None:
    found, expected = run("plain", 1)
    assert {"tangent_out", "tangent_lse"} <= {*found} & {*expected}


# ---------------------------------------------------------------------------------------------- generated code


def test_chained_products_have_one_wait() -> None:
    text = render(lowered("causal"))["hopper.py"].partition("\ndef jvp_consumer(")[2].partition("\n@gluon.jit")[0]
    one = "            s = warpgroup_mma_wait(2, deps=[s_flight])\n"
    two = "            ts = warpgroup_mma_wait(1, deps=[ts_flight])\n"
    both = ") = warpgroup_mma_wait(0, deps=[acc_flight, p_cast_operand, tp_cast_operand])\n"
    assert 0 < text.index(one) < text.index(two) < text.index(both) and text.count("warpgroup_mma_wait(") == 3


def test_named_barriers_are_distinct() -> None:
    """They are those of the stages of four pipelines, and of work tiles. Barriers of Q and tQ are in shared memory."""
    text = render(lowered("causal"))["hopper.py"].partition("\ndef jvp_producer(")[2]
    found = {
        sympy.sympify(re.sub(r"\w+_stage", "stage", number))
        for number in re.findall(r"\b(?:_barrier_sync|_barrier_arrive|_barrier_arrive_early)\(([^,()]+), THREADS", text)
    }
    assert found == {sympy.sympify(f"5 + {pipelines} * STAGES + stage") for pipelines in range(5)}
    assert (
        "mbarrier.wait(tQ_empty.index(copy), tQ_phase)" in text
        and "mbarrier.arrive(tQ_empty.index(_WARP_GROUP), count=1)" in text
    )


def test_a_module_has_partial_sums_without_a_warp_specialized_forward() -> None:
    """The forward stays portable under this mask."""
    assert [k.name for k in lowered("allowed").warp_specialized] == [JVP]
    text = render(lowered("allowed"))["hopper.py"]
    assert "def _partial_sums(" in text and "def _row_max(" not in text and "def _row_sum(" not in text
