"""The separate warp-specialized kernels of dQ, dK and dV of wide heads: passes, IR that is refused, results, and
generated code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

from attngen.builders import build_module
from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.interp.host import execute
from attngen.interp.values import DOUBLE
from attngen.interp.warp_groups import WarpSpecializedLaunch
from attngen.ir import Kernel, Module
from attngen.lowering.pipeline import stages, unspecialized
from attngen.spec import Spec, make_spec
from attngen.targets.hopper.configs.common import smem_limit
from attngen.targets.hopper.configs.sm90 import SEPARATE_BACKWARD
from attngen.targets.hopper.toolchain.resources import sram_bytes
from attngen.verify import verify
from attngen.verify.machine import violation
from attngen.verify.protocol import protocol_of
from tests.helpers import SPECS, spec, stages_of, target
from tests.hopper.common import edited_module, lines_of, removed_and_added
from tests.transforms.equality import Call, must_be_equal, naive

BASE: dict[str, Any] = {"name": "separate", "head_dim": 256}
BLOCKS = {"block_sparse": {"block": 128}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": "causal"},
    "shared": {"mask": "causal", "heads": {"sharing": "gqa"}},
    "one_head": {"heads": {"sharing": "mqa"}},
    "window": {"mask": {"sliding_window": {"left": 40, "right": 3}}, "heads": {"sharing": "gqa"}},
    "dilated": {"mask": {"dilated": {"step": 2, "reach": 30}}},
    "documents": {"mask": {"all_of": ["causal", "document"]}},
    "packed": {"heads": {"sharing": "gqa"}, "mask": {"document": {"packed": True, "causal": True}}},
    "lengths": {"mask": {"all_of": ["causal", {"key_padding": {"lengths": True}}]}},
    "blocks": {"mask": {"all_of": ["causal", BLOCKS]}},
}
# dQ of these specs stays portable because registers would spill.
PORTABLE_DQ: dict[str, dict[str, Any]] = {
    "alibi": {"mask": "causal", "score": "alibi"},
    "scaled": {"score": [{"expr": "s * exp(t[b, h, q_idx])", "params": {"t": {"tensor": ["B", "H", "Nq"]}}}]},
    "padding": {"mask": "key_padding"},
    "limited": {
        "mask": {
            "all_of": [
                {"expr": "kv_idx <= limit[b, q_idx]", "params": {"limit": {"tensor": ["B", "Nq"], "dtype": "int32"}}},
                "key_padding",
            ]
        }
    },
}


@cache
def spec_for(name: str) -> Spec:
    return make_spec({**BASE, **{**CASES, **PORTABLE_DQ}[name]})


@cache
def after_passes(name: str) -> dict[str, Module]:
    """The verified module after every pass."""
    return stages_of(spec_for(name))


def lowered(name: str) -> Module:
    return list(after_passes(name).values())[-1]


def kernel_of(module: Module, kernel: str) -> Kernel:
    return next(k for k in module.warp_specialized if k.name == kernel)


def lines(name: str, after: str, kernel: str, block: str) -> list[str]:
    """The ops of a block of a warp-specialized kernel after a pass, as text."""
    return lines_of(kernel_of(after_passes(name)[after], kernel), block)


def changed(name: str, before: str, after: str, kernel: str, block: str) -> tuple[list[str], list[str]]:
    """The lines of a block that were removed, and those that were added, between two passes."""
    return removed_and_added(lines(name, before, kernel, block), lines(name, after, kernel, block))


def edited(name: str, kernel: str, *changes: tuple[str, str]) -> Module:
    """The module with its text edited from a warp-specialized kernel on; not verified."""
    return edited_module(lowered(name), *changes, kernel=kernel)


# ---------------------------------------------------------------------------------------------- passes

HEADS_OF_GROUP = "(group*split) // splits .. (group*split + group) // splits"


@pytest.mark.share(16)
def test_the_specs_with_separate_backward_kernels() -> None:
    assert [name for name in SPECS if any(target(name).stand_ins(kernel) for kernel in SEPARATE_BACKWARD)] == [
        "causal_d256"
    ]
    assert {
        name: [k.name for k in lowered(name).warp_specialized if k.name in SEPARATE_BACKWARD] for name in CASES
    } == dict.fromkeys(CASES, [*SEPARATE_BACKWARD])
    assert {
        name: [k.name for k in lowered(name).warp_specialized if k.name in SEPARATE_BACKWARD] for name in PORTABLE_DQ
    } == dict.fromkeys(PORTABLE_DQ, ["dk", "dv"])


def test_warp_specialize_merges_the_loop_over_heads_into_the_loops_over_tiles() -> None:
    portable = after_passes("shared")["dce"].kernel("dk")
    assert f"%total = loop g ranges({HEADS_OF_GROUP}) carry(dk=%dk_init) body(@group) cls(all)" in lines_of(
        portable, "entry"
    )
    bounds = [line for line in lines_of(portable, "group") if " = map " in line]
    assert len(bounds) == 4 and lines("shared", "warp-specialize", "dk", "entry")[-4:] == bounds
    loops = [line for line in lines("shared", "warp-specialize", "dk", "consumer") if " = loop " in line]
    partial = "q_first .. q_full_first, q_full_end .. q_end"
    assert loops == [
        (
            f"%queries_full = loop q ranges(q_full_first .. q_full_end) carry(dk_step=%dk_init) body(@step) "
            f"cls(full) heads({HEADS_OF_GROUP})"
        ),
        (
            f"%queries_partial = loop q ranges({partial}) carry(dk_step=%queries_full.dk_step) body(@step) "
            f"cls(partial) heads({HEADS_OF_GROUP})"
        ),
    ]
    assert "group" not in {block.name for block in kernel_of(after_passes("shared")["warp-specialize"], "dk").blocks}


@pytest.mark.share(4)
def test_mask_out_of_bounds_queries_masks_queries_past_the_end() -> None:
    """It extends the mask, or adds one where there is none. dQ needs none because queries are its program axis."""
    lse2 = "%lse2 = load %LSE2[b, h, q] check(q if partial){} : f32[BLOCK_Q] @reg"
    removed, added = changed("causal", "warp-specialize", "mask-out-of-bounds-queries", "dv", "step")
    mask = "%masked = mask %s where(q_idx >= -Nk + Nq + kv_idx{}) : f32[BLOCK_KV, BLOCK_Q] @reg"
    assert removed == [lse2.format(" other(inf)"), mask.format("")] and added == [
        lse2.format(""),
        mask.format(" and q_idx < Nq"),
    ]
    removed, added = changed("plain", "warp-specialize", "mask-out-of-bounds-queries", "dk", "step")
    weights = (
        "%p = map expr(exp2(-lse2 + qk_scale*score)) uses(lse2=%lse2, score=%{}, qk_scale=%qk_scale) : f32[BLOCK_KV, "
        "BLOCK_Q] @reg"
    )
    assert removed == [lse2.format(" other(inf)"), weights.format("s")]
    assert added == [
        lse2.format(""),
        "%masked = mask %s where(q_idx < Nq) : f32[BLOCK_KV, BLOCK_Q] @reg",
        weights.format("masked"),
    ]
    assert changed("causal", "warp-specialize", "mask-out-of-bounds-queries", "dq", "step") == ([], [])


@pytest.mark.parametrize(("kernel", "single"), [("dq", ["V"]), ("dk", ["dO"]), ("dv", [])])
def test_insert_pipelines_gives_the_tile_that_one_product_reads_one_stage(kernel: str, single: list[str]) -> None:
    streamed = {"dq": ("K", "V")}.get(kernel, ("Q", "dO"))
    found = [
        line
        for line in lines("plain", "insert-pipelines", kernel, "entry")
        if " = pipeline " in line and "metadata_of" not in line
    ]
    stages = {name: "1" if name in single else "num_stages" for name in streamed}
    assert [line.split(" : ")[0] for line in found if "per_instance" not in line] == [
        f"%{n}_pipeline = pipeline stages({of})" for n, of in stages.items()
    ]


def test_software_pipeline_gradients_issues_dp_first_and_releases_its_tile_while_scores_are_multiplied() -> None:
    assert lines("plain", "software-pipeline-gradients", "dk", "step")[3:] == [
        "%do = consumer_wait %dO_pipeline : T[BLOCK_Q, D_V] @sram",
        "%dp_flight = wgmma %v_ADDR %do over(D_V) : f32[BLOCK_KV, BLOCK_Q] @flight",
        "%q = consumer_wait %Q_pipeline : T[BLOCK_Q, D_QK] @sram",
        "%s_flight = wgmma %k_ADDR %q over(D_QK) : f32[BLOCK_KV, BLOCK_Q] @flight",
        "%dp = wgmma_wait %dp_flight : f32[BLOCK_KV, BLOCK_Q] @reg",
        "consumer_release %do",
        "%s = wgmma_wait %s_flight : f32[BLOCK_KV, BLOCK_Q] @reg",
        "%masked = mask %s where(q_idx < Nq) : f32[BLOCK_KV, BLOCK_Q] @reg",
        "%lse2 = read_metadata %LSE2_pipeline tile(%q) : f32[BLOCK_Q] @reg",
        (
            "%p = map expr(exp2(-lse2 + qk_scale*score)) uses(lse2=%lse2, score=%masked, qk_scale=%qk_scale) : "
            "f32[BLOCK_KV, BLOCK_Q] @reg"
        ),
        "%delta = read_metadata %DELTA_pipeline tile(%q) : f32[BLOCK_Q] @reg",
        "%ds = map expr(p*(-delta + dp)) uses(p=%p, dp=%dp, delta=%delta) : f32[BLOCK_KV, BLOCK_Q] @reg",
        "%ds_cast = pack %ds : T[BLOCK_KV, BLOCK_Q] @reg",
        "%dk_flight = wgmma %ds_cast %q over(BLOCK_Q) acc(%dk) : f32[BLOCK_KV, D_QK] @flight",
        "%dk_next = wgmma_wait %dk_flight keep_alive(%ds_cast) : f32[BLOCK_KV, D_QK] @reg",
        "consumer_release %q",
        "yield values(dk=%dk_next)",
    ]


def test_weights_for_dv_are_computed_while_the_product_of_the_tile_before_runs() -> None:
    """This holds for one head. For several heads, an iteration has both products of its tile."""

    def products(name: str, after: str) -> list[str]:
        body = lines(name, after, "dv", "step")
        return [line.split()[0].lstrip("%") for line in body if " = wgmma " in line or " = wgmma_wait " in line]

    assert products("plain", "software-pipeline-softmax") == ["s_flight", "dv_flight", "s", "dv_next"]
    assert products("shared", "software-pipeline-gradients") == ["s_flight", "s", "dv_flight", "dv_next"]
    kept, released = (
        lines("shared", "software-pipeline-gradients", "dv", "step").index(line)
        for line in ("%p_cast = pack %p : T[BLOCK_KV, BLOCK_Q] @reg", "consumer_release %q")
    )
    assert kept < released  # LSE2 is metadata of Q


@pytest.mark.parametrize(("kernel", "phases"), [("dq", 2), ("dk", 2), ("dv", 1)])
def test_ping_pong_orders_products_of_scores_and_of_gradients(kernel: str, phases: int) -> None:
    body = [
        line
        for line in lines("plain", "ping-pong", kernel, "step")
        if line.startswith("scheduler_barrier ") or " = wgmma " in line
    ]
    of = {"dq": ["dp", "s", "dq"], "dk": ["dp", "s", "dk"], "dv": ["s", "dv"]}[kernel]
    groups = [of[:2], of[2:]] if phases == 2 else [of]
    expected = [
        word
        for group in groups
        for word in ("scheduler_barrier sync", *(f"%{name}_flight" for name in group), "scheduler_barrier arrive")
    ]
    assert [line if line.startswith("scheduler_barrier") else line.split()[0] for line in body] == expected


def test_legalize_gluon_loads_the_tile_for_delta_to_registers() -> None:
    removed, added = changed("plain", "ping-pong", "legalize-gluon", "dq", "consumer")
    product = "%product = map expr(do*o) uses(o=%o, do=%{}) : f32[BLOCK_Q, D_V] @reg"
    assert product.format("do") in removed and product.format("do_ACC") in added
    assert "%do_ACC = local_load %do : T[BLOCK_Q, D_V] @reg" in added
    assert added[-2:] == ["tma_store %dQ[b, h, q, d_qk] %dq_out staging(%Q_pipeline)", "tma_store_wait %Q_pipeline"]


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"head_dim": {"qk": 256, "v": 192}},
            "@dv has no config for hopper: its head_dims are 256 and 192; expected 256.",
        ),
        (
            {"heads": {"sharing": "gqa"}, "mask": "causal", "score": "alibi"},
            "@dk has no config for hopper: what it reads or runs over differs among the query heads of a group.",
        ),
        (
            {
                "mask": {"all_of": ["causal", "key_padding"]},
                "score": [{"expr": "s * exp(t[b, h, q_idx])", "params": {"t": {"tensor": ["B", "H", "Nq"]}}}],
            },
            (
                "@dk has no config for hopper: its mask and modifiers take 17 operations for each score; with more "
                "than 14, registers spill"
            ),
        ),
        ({"dropout": True}, "@dk has no config for hopper: with dropout registers spill"),
        (
            {"mask": {"block_sparse": {"block": 64}}},
            "@dq has no config for hopper: its mask lists blocks of 64 rows, and a program has 128",
        ),
        ({"score": "dense_bias"}, "@dk has no config for hopper: a number is read for each score"),
        ({"score": "temperature"}, "@dq has no config for hopper: it writes "),
        ({"score": "alibi"}, "@dq has no config for hopper: with a modifier of scores registers spill"),
        (
            {"mask": "key_padding"},
            (
                "@dq has no config for hopper: with numbers for keys that cannot be copied with their tile registers "
                "spill"
            ),
        ),
        (
            {"mask": {"sliding_window": {"left": 40, "right": 0}}, "score": [{"softcap": 5.0}]},
            (
                "@dk has no config for hopper: its mask and modifiers take 22 operations for each score; with more "
                "than 14, registers spill"
            ),
        ),
        (
            {"heads": {"sharing": "gqa"}, "mask": {"all_of": ["causal", BLOCKS]}},
            "@dv has no config for hopper: what it reads or runs over differs among the query heads of a group",
        ),
        ({"dtype": "fp32"}, "@dk has no config for hopper: no dtype of the spec has 16 bits"),
    ],
)
def test_the_reason_for_a_portable_kernel_is_reported(fields: dict[str, Any], reason: str) -> None:
    made = make_spec({**BASE, **fields})
    assert reason in " ".join(unspecialized(made, dict(stages(made))["dce"]))


@pytest.mark.share(4)
def test_no_reason_is_reported_for_narrow_heads() -> None:
    """The fused backward computes their gradients, or its absence is reported; a portable @dq needs no report."""
    for name in ("full_mha", "butterfly_gqa"):
        made = spec(name)
        assert "@dq" not in " ".join(unspecialized(made, dict(stages(made))["dce"])), name


# ---------------------------------------------------------------------------------------------- IR that is refused

REFUSED = {
    "a tile released while its product runs": (
        ("plain", "dk"),
        [
            (
                "    %dp = wgmma_wait %dp_flight : f32[BLOCK_KV, BLOCK_Q] @reg\n    consumer_release %do\n",
                "    consumer_release %do\n    %dp = wgmma_wait %dp_flight : f32[BLOCK_KV, BLOCK_Q] @reg\n",
            )
        ],
        "`protocol`: .*releases a tile of %dO_pipeline while %dp_flight reads it",
    ),
    "a tile that is not released": (
        ("plain", "dk"),
        [("    consumer_release %do\n", "")],
        "`protocol`: .*producer 0 can wait for ever",
    ),
    "a second stage for the tile of one product": (
        ("plain", "dq"),
        [("%V_pipeline = pipeline stages(1)", "%V_pipeline = pipeline stages(num_stages)")],
        "`fits`: .*it needs 262,208 bytes of shared memory; sm90 has 232,448",
    ),
    "heads of another program": (
        ("shared", "dk"),
        [(f"heads({HEADS_OF_GROUP})", "heads(0 .. group)")],
        "`same-tiles`: .*@producer runs over other tiles of class partial than the portable @dk",
    ),
    "a tile released before its metadata is read": (
        ("plain", "dk"),
        [
            (
                "    %lse2 = read_metadata %LSE2_pipeline tile(%q)",
                "    consumer_release %q\n    %lse2 = read_metadata %LSE2_pipeline tile(%q)",
            )
        ],
        "`types`: .*reads metadata of %q where this block has not waited for it, or has released it",
    ),
    "the previous tile released while dV is multiplied": (
        ("plain", "dv"),
        [
            (
                (
                    "    %dv_next = wgmma_wait %dv_flight keep_alive(%weights_operand) : f32[BLOCK_KV, D_V] @reg\n"
                    "    consumer_release %do\n"
                ),
                (
                    "    consumer_release %do\n    %dv_next = wgmma_wait %dv_flight keep_alive(%weights_operand) : "
                    "f32[BLOCK_KV, D_V] @reg\n"
                ),
            )
        ],
        "`protocol`: .*releases a tile of %dO_pipeline while %dv_flight reads it",
    ),
    "a local_load of a value in registers": (
        ("plain", "dq"),
        [("local_load %do :", "local_load %o :")],
        "`types`: .*loads %o as .*; expected a tile of a stage",
    ),
    "a local_load to another type": (
        ("plain", "dq"),
        [("%do_ACC = local_load %do : T[BLOCK_Q, D_V]", "%do_ACC = local_load %do : f32[BLOCK_Q, D_V]")],
        "`types`: .*loads %do as f32.*; expected a tile of a stage",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_ir_is_refused_with_a_reason(mistake: str) -> None:
    (name, kernel), changes, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited(name, kernel, *changes))


@pytest.mark.share(16)
@pytest.mark.parametrize("name", [*CASES, *PORTABLE_DQ])
def test_the_protocol_of_every_kernel_is_proven(name: str) -> None:
    for kernel in (k for k in lowered(name).warp_specialized if k.name in SEPARATE_BACKWARD):
        for depth in (2, 3):
            assert violation(protocol_of(kernel, {"num_stages": depth})) == "", kernel.name


@pytest.mark.parametrize("name", CASES)
def test_tiles_fit_shared_memory(name: str) -> None:
    module = lowered(name)
    for kernel in SEPARATE_BACKWARD:
        for made, row in module.stand_ins(kernel):
            assert (
                row.num_stages == 2
                and row.rows_of(made.program_axis) == 128
                and sram_bytes(module, made, row) <= smem_limit(1)
            )


# ---------------------------------------------------------------------------------------------- results


def run(name: str, seed: int, lengths: Any = None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Results of the warp-specialized kernels, in a random order and with random tiles, and of naive attention."""
    module, chance = lowered(name), Random(seed)
    replacements = {
        kernel.stands_for: kernel for kernel in module.warp_specialized if kernel.stands_for in SEPARATE_BACKWARD
    }
    module = replace(module, kernels=tuple(replacements.get(kernel.name, kernel) for kernel in module.kernels))
    call = Call.random(chance, spec_for(name), build_module(spec_for(name)), lengths)
    sides = (32, 64, 128) if module.blocks else (8, 16)
    call = replace(call, tiles={"BLOCK_Q": chance.choice(sides), "BLOCK_KV": chance.choice(sides)})
    assert replacements and all(kernel.warp_groups for kernel in replacements.values())
    WarpSpecializedLaunch.chance = chance
    return execute(module, call.of_module(spec_for(name)), call.tiles, DOUBLE), naive(spec_for(name), call)


@pytest.mark.share(16)
@pytest.mark.parametrize("name", [*CASES, *PORTABLE_DQ])
def test_results_are_those_of_naive_attention(name: str) -> None:
    few = [None, (1, 17), (17, 1), (33, 65), (65, 33), (0, 5), (40, 40)]
    for seed, lengths in enumerate([(129, 390), (390, 129), (0, 200)] if lowered(name).blocks else few):
        must_be_equal(*run(name, seed, lengths), f"{name} {seed}")


# ---------------------------------------------------------------------------------------------- generated code


def test_threads_load_outputs_in_the_layout_of_the_accumulator() -> None:
    """delta is a sum over columns, so a thread loads the columns that it has of dQ."""
    text = render(lowered("plain"))["hopper.py"].partition("\ndef dq_consumer(")[2].partition("\n@gluon.jit")[0]
    assert (
        "    q_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))\n"
        "    d_v = gl.arange(0, D_V, layout=gl.SliceLayout(0, ACC))\n"
    ) in text
    assert "(q_rows[:, None] * stride_o_n + d_v[None, :]),\n        mask=(q_start + q_rows < Nq)[:, None],\n" in text
    assert "    do_ACC = do.load(ACC)\n    product = do_ACC.to(gl.float32) * o.to(gl.float32)\n" in text
    assert "    o_do = _row_vector(gl.sum(product, 1), SCORES)\n" in text


def test_the_index_of_a_listed_tile_is_its_metadata() -> None:
    """dV needs it because its first tile is masked before the loop over the others."""
    text = render(lowered("limited"))["hopper.py"]
    producer, consumer = (
        text.partition(f"\ndef dv_{warp_group}(")[2].partition("\n@gluon.jit")[0]
        for warp_group in ("producer", "consumer")
    )
    assert "_write_index(q_tile, Q_TILES_smem.index(Q_stage))\n" in producer
    assert "q_tile = _read_index(Q_TILES_smem.index(Q_stage))\n" in consumer


def test_programs_split_the_query_heads_of_a_group() -> None:
    text = render(lowered("shared"))["hopper.py"]
    for warp_group, var in (("dk_producer", "g"), ("dk_consumer", "_"), ("dv_consumer", "_")):
        body = text.partition(f"\ndef {warp_group}(")[2].partition("\n@gluon.jit")[0]
        assert f"    for {var} in range(split * group // splits, (group + split * group) // splits):\n" in body, (
            warp_group
        )
