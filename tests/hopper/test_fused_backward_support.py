"""Which specs have a fused backward, which gradients it computes, and the reported reasons where there is none."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from attngen.builders import build_module
from attngen.errors import BuildError, VerifyError
from attngen.ir.printer import print_kernel, print_module
from attngen.lowering.pipeline import lower, stages, unspecialized
from attngen.spec import make_spec
from attngen.targets.hopper.configs.common import smem_limit
from attngen.targets.hopper.configs.fused_backward import MOST_NUMBERS, config
from attngen.targets.hopper.passes.warp_specialize import WarpSpecialize
from attngen.targets.hopper.toolchain.resources import sram_bytes
from attngen.verify import verify
from tests.hopper.fused_backward import (
    BASE,
    BLOCKS,
    after_passes,
    lowered,
    with_gradient_of_t,
)


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ({"block_sparse": {"block": 64}}, "its mask lists blocks of 64 keys, and a program has 128"),
        (
            {
                "expr": "allowed[b, q_idx, kv_idx]",
                "params": {"allowed": {"tensor": ["B", "Nq", "Nk"], "dtype": "bool"}},
            },
            "",
        ),
    ],
)
def test_small_blocks_and_blocks_of_data_have_no_kernel(mask: Any, reason: str) -> None:
    """Blocks from data have separate lists of full and partial blocks, so the build makes no fused kernel."""
    made = dict(stages(spec := make_spec({**BASE, "mask": mask})))
    reasons = list(unspecialized(spec, made["dce"]))
    assert [text for text in reasons if "@bwd" in text] == [
        f"On sm90 the kernel @bwd has no config for hopper: {reason}."
    ] * bool(reason)
    assert [kernel.name for kernel in made["legalize-triton"].kernels if kernel.traits.adds_in_order] == []


@pytest.mark.parametrize(
    ("fields", "of_ds", "part"),
    [
        ({"score": "temperature"}, "1/temperature", "-dq_rows*scale/temperature**2"),
        (with_gradient_of_t("tanh(s / t[h])", "H"), "1/t", "-dq_rows*scale/t**2"),
        ({"score": ["temperature", "alibi"]}, "1/temperature", "-dq_rows*scale/temperature**2"),
        (with_gradient_of_t("s * t[h]", "H"), "t", "dq_rows*scale"),
        (with_gradient_of_t("2 * s * t[h] ** 2", "H"), "2*t**2", "4*dq_rows*scale*t"),
        (with_gradient_of_t("s * abs(t[h])", "H"), "abs(t)", "dq_rows*scale*select(t > 0, 1, select(t < 0, -1, 0))"),
        (with_gradient_of_t("log(1 + exp(s * t[h]))", "H"), "t", "dq_rows*scale"),
        (with_gradient_of_t("s * t[h] * float(kv_idx)", "H"), "t", "dq_rows*scale"),
        (with_gradient_of_t("s * exp(t[q_idx])", "Nq"), "", "dq_rows*scale"),
        (with_gradient_of_t("s / (1 + t[q_idx] ** 2)", "Nq"), "", "-2*dq_rows*scale*t/(t**2 + 1)"),
    ],
)
def test_dq_end_computes_gradients_of_factors_of_scores(fields: dict[str, Any], of_ds: str, part: str) -> None:
    """A factor of all scores of a head is a factor of dQ and dK that is applied at the end, so nothing divides by it
    where it is 0."""
    text = print_kernel(build_module(make_spec({**BASE, **fields})).kernel("dq_end"))
    assert re.findall(r"%ds_scale = map expr\((.*)\) uses", text) == [of_ds] * bool(of_ds)
    assert re.findall(r"%d\w+_out = map expr\((.*)\) uses.* : f32\[BLOCK_Q\]", text) == [part]


@pytest.mark.parametrize(
    "fields",
    [
        {"score": [{"softcap": 4.0}, "temperature"]},  # the output of tanh is divided by the temperature, not the score
        {"score": ["alibi", "temperature"]},
        {"score": [{"alibi": {"slopes": "given", "learnable": True}}]},
        with_gradient_of_t("s * t[q_idx]", "Nq"),  # where t is 0, dQ is 0 and does not determine the gradient of t
        with_gradient_of_t("s * t[kv_idx]", "Nk"),
        with_gradient_of_t("s * t[h] + t[h] * t[h] * float(kv_idx)", "H"),
        with_gradient_of_t("min(s * t[h], 5)", "H"),
    ],
)
def test_gradients_of_other_inputs_need_sums_over_keys(fields: dict[str, Any]) -> None:
    made = build_module(make_spec({**BASE, "backward": {"deterministic": False}, **fields}))
    assert "bwd" not in [kernel.name for kernel in made.kernels]


def test_drop_unspecialized_removes_kernels_that_stay_portable() -> None:
    plain = dict(stages(make_spec({**BASE, "mask": "causal", "schedule": {"backend": "triton"}})))
    before, after = plain["dce"], plain["drop-unspecialized"]
    assert [k.name for k in before.kernels] == ["fwd", "dq", "delta", "dkdv", "bwd", "dq_end", "jvp"]
    assert [k.name for k in after.kernels] == ["fwd", "dq", "delta", "dkdv", "jvp"]
    assert "@fused" in print_module(before) and "@fused" not in print_module(after)
    assert after_passes("wide")["drop-unspecialized"] == after_passes("wide")["legalize-gluon"]


def test_drop_unspecialized_removes_the_split_of_heads() -> None:
    plain = dict(
        stages(make_spec({**BASE, "mask": "causal", "heads": {"sharing": "gqa"}, "schedule": {"backend": "triton"}}))
    )
    before, after = (print_module(plain[stage]) for stage in ("dce", "drop-unspecialized"))
    assert "_use_fused" in before and "_heads" in before and "_use_fused" not in after and "_heads" not in after
    assert "%splits = map expr(max(1, (group // divisor(group, min(group, max(1, " in after


def test_a_kernel_that_adds_and_is_not_warp_specialized_is_refused() -> None:
    made = lowered("wide")
    without_backward = replace(
        made,
        warp_specialized=made.warp_specialized[:1],
        schedules=tuple((k, rows) for k, rows in made.schedules if k != "bwd"),
    )
    with pytest.raises(VerifyError, match="@bwd: it has ordered adds, which only warp-specialized kernels run"):
        verify(replace(without_backward, schedules=(*without_backward.schedules, ("bwd", ()))))


@pytest.mark.share(4)
def test_a_spec_cannot_select_the_backend_for_a_kernel_that_cannot_be_warp_specialized() -> None:
    before = dict(stages(make_spec({**BASE, "head_dim": {"qk": 128, "v": 64}})))["dce"]
    with pytest.raises(BuildError, match="the kernel @bwd cannot be warp-specialized: its head_dims are 128 and 64"):
        WarpSpecialize(
            lambda specialization, module: (config(module),) if specialization.kernel == "bwd" else "not selected"
        ).run(before)


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "with head_dims of 192 and 128 and loops over all queries registers spill"),
        (
            {"mask": {"document": {"packed": True, "causal": True}}},
            "head_dims of 192 and 128 and a number for each key registers spill",
        ),
        (
            {"mask": "causal", "score": "temperature"},
            "head_dims of 192 and 128 and a modifier of scores registers spill",
        ),
        ({"mask": {"all_of": ["causal", BLOCKS]}}, "head_dims of 192 and 128 and lists of blocks registers spill"),
        (
            {"mask": {"chunked": {"size": 48}}},
            "take 15 operations for each score; with more than 14, registers may spill",
        ),
    ],
)
def test_wide_heads_have_no_kernel_where_registers_would_spill(fields: dict[str, Any], reason: str) -> None:
    made = make_spec({**BASE, "head_dim": {"qk": 192, "v": 128}, **fields})
    module = dict(stages(made))
    assert not list(module.values())[-1].stand_ins("bwd")
    assert reason in " ".join(unspecialized(made, module["dce"]))


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"head_dim": 256}, "its heads have head_dim 256 for k and 256 for v, and dK and dV have room for 320 in all"),
        ({"score": [{"relative_bias": {"max_distance": 16}}]}, "the gradient of `relative_bias` needs separate sums"),
        (
            {"mask": {"expr": "kv_idx + q_idx <= q_len"}},
            "it is not known how many programs add to a tile of dQ before each one",
        ),
    ],
)
def test_explain_gives_the_reason_for_the_separate_kernels(fields: dict[str, Any], reason: str) -> None:
    made = make_spec({"name": "separate", "head_dim": 128, **fields})
    reasons = [text for text in unspecialized(made, lower(made, "dce")) if "@fwd" not in text and "@jvp" not in text]
    assert reasons == [f"There is no fused backward: {reason}."]


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            with_gradient_of_t("s + t[q_idx, kv_idx]", "Nq", "Nk"),
            "what is read for each score is no tensor [B, Hq, Nq, Nk] of the element type",
        ),
        (
            with_gradient_of_t("s + t[b, h, q_idx, kv_idx]", "B", "H", "Nq", "Nk"),
            "what is read for each score is no tensor [B, Hq, Nq, Nk] of the",
        ),
        (
            {"score": [{"expr": "s + t[abs(q_idx - kv_idx)]", "params": {"t": {"tensor": ["Nk"]}}}]},
            "a number is looked up for each score",
        ),
    ],
)
def test_values_per_score_that_tma_cannot_load_have_no_kernel(fields: dict[str, Any], reason: str) -> None:
    made = make_spec({"name": "separate", "head_dim": 64, **fields})
    assert reason in " ".join(unspecialized(made, lower(made, "dce")))


@pytest.mark.share(8)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_row_vectors_of_queries_fit_next_to_tiles(head_dim: int) -> None:
    for many in (1, 2, 3):
        params = {f"x{i}": {"tensor": ["B", "H", "Nq"]} for i in range(many)}
        score = [{"expr": " * ".join(["s", *(f"{name}[b, h, q_idx]" for name in params)]), "params": params}]
        made = dict(stages(spec := make_spec({**BASE, "head_dim": head_dim, "score": score})))
        module = list(made.values())[-1]
        if many <= MOST_NUMBERS:
            ((kernel, row),) = module.stand_ins("bwd")
            assert sram_bytes(module, kernel, row) <= smem_limit(1)
        else:
            assert "it reads 3 numbers for each query, and there is room for 2" in " ".join(
                unspecialized(spec, made["dce"])
            )


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"head_dim": {"qk": 192, "v": 128}, "mask": "causal"},
            "with head_dims of 192 and 128 and dropout registers spill",
        ),
        (
            {"score": [{"softcap": 5.0}]},
            "with dropout, a head_dim of more than 64 and a modifier of scores registers spill",
        ),
        (
            {"mask": {"all_of": ["causal", "document"]}},
            "take 19 operations for each score; with more than 17, registers may spill",
        ),
    ],
)
def test_dropout_has_no_kernel_where_registers_would_spill(fields: dict[str, Any], reason: str) -> None:
    made = make_spec({**BASE, "dropout": True, **fields})
    module = dict(stages(made))
    assert not list(module.values())[-1].stand_ins("bwd")
    assert reason in " ".join(unspecialized(made, module["dce"]))
