"""pipeline-loads chooses the number of stages of each config."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.errors import VerifyError
from attngen.lowering.pipeline import stages
from attngen.schedule.pipeline_loads import PipelineLoads
from attngen.targets.triton.cost import cost
from attngen.verify import verify
from tests.helpers import changes, edit, lowered, module, spec

CONFIG = "sm90 bytes=2 rows<=inf : BLOCK_Q=64 BLOCK_KV=64 num_warps=4"
LOOP = f"""
kernel @fwd grid(q in cdiv(Nq, BLOCK_Q))
  block @entry
    %Q = arg in : T[Nq, D_QK] @hbm
    %K = arg in : T[Nk, D_QK] @hbm
    %SUMS = arg out : f32[Nq, D_QK] @hbm
    %Nq = arg scalar : i32[] @reg
    %Nk = arg scalar : i32[] @reg
    %q = load %Q[q, d_qk] check(q) : T[BLOCK_Q, D_QK] @sram
    %zero = init 0 : f32[BLOCK_Q] @reg
    %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(sum=%zero) body(@step) cls(partial)
    store %SUMS[q] %keys.sum check(q)
  block @step
    %sum = arg carry : f32[BLOCK_Q] @reg
    %k = load %K[kv, d_qk] check(kv) : T[BLOCK_KV, D_QK] @sram
    %s = dot %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @reg
    %masked = mask %s where(kv_idx < Nk) when(always) : f32[BLOCK_Q, BLOCK_KV] @reg
    %row = reduce sum %masked over(BLOCK_KV) : f32[BLOCK_Q] @reg
    %next = map expr(row + sum) uses(sum=%sum, row=%row) : f32[BLOCK_Q] @reg
    yield values(sum=%next)
schedule @fwd
  {CONFIG} num_stages=1
""".replace("f32[Nq, D_QK]", "f32[Nq]")


def test_a_config_gets_the_number_of_stages_with_the_least_cost():
    before = module(LOOP, "scheduled")
    kernel, (config,) = before.kernels[0], before.configs("fwd")
    best = min((1, 2, 3), key=lambda s: cost(before, kernel, replace(config, num_stages=s)))
    assert best > 1
    assert changes(PipelineLoads(), before) == [f"- {CONFIG} num_stages=1", f"+ {CONFIG} num_stages={best}"]


def test_an_override_is_used():
    assert changes(PipelineLoads(num_stages=2), module(LOOP, "scheduled"))[1:] == [f"+ {CONFIG} num_stages=2"]


def test_a_kernel_without_loops_needs_no_stages():
    before, after = (lowered("causal_mha")[stage].configs("delta") for stage in ("select-tiles", "pipeline-loads"))
    assert before == after
    assert {config.num_stages for config in after} == {1}


def test_stages_that_do_not_fit_are_refused():
    before = module(edit(LOOP, ("BLOCK_KV=64", "BLOCK_KV=512")), "scheduled", head_dim=128)
    with pytest.raises(VerifyError, match="rule `fits`: .*on sm90 .* num_stages=8 .*; a smaller BLOCK_Q"):
        verify(PipelineLoads(num_stages=8).run(before))


@pytest.mark.share(8)
def test_a_decode_kernel_has_the_most_stages_with_which_two_programs_fit_an_sm():
    """Tiles of 64 keys have three buffers with 16 rows and two with 64; tiles of 128 keys have two. A program of 8
    warps has the SM to itself."""
    found = {}
    for name in ("decode_gqa", "decode_window_paged_gqa", "decode_mla"):
        modelled = dict(stages(spec(name), {}))  # without measured schedules
        before, after = (modelled[stage] for stage in ("select-tiles", "pipeline-loads"))
        assert {config.num_stages for config in before.configs("decode")} == {1}
        found[name] = [
            (r.block_q, r.block_kv, r.num_warps, r.num_stages) for r in after.configs("decode") if r.device == "sm90"
        ]
    assert found["decode_gqa"] == [(16, 64, 4, 3), (64, 64, 4, 2)]
    assert found["decode_mla"][-1] == (64, 64, 8, 2)
    assert found["decode_window_paged_gqa"] == [(16, 128, 4, 2), (64, 128, 8, 2)]  # a third buffer would spill


def test_an_override_is_used_for_decode_kernels_too():
    after = PipelineLoads(num_stages=1).run(dict(stages(spec("decode_gqa"), {}))["select-tiles"])
    assert {config.num_stages for config in after.configs("decode")} == {1}
