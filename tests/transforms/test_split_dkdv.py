"""split-dkdv computes dK and dV of wide heads in separate kernels."""

from __future__ import annotations

import pytest

from attngen.builders import build_module
from attngen.codegen.render import render
from attngen.conformance.cases import Case, heads_for
from attngen.conformance.harness import run_case
from attngen.errors import VerifyError
from attngen.ir import only, tile
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.schedule.table import schedule_of, shown
from attngen.spec import parse_spec
from attngen.transforms.split_dkdv import SplitDkdv
from attngen.verify import verify
from tests.helpers import changes, edit, module, module_of, target

# Outlined gradients: both need %s, and only dK needs %ds.
GRID = "grid(kv in cdiv(Nk, BLOCK_KV), h in Hq, b in B)\n  block @entry\n"
SCALARS = """\
    %scale = arg scalar : f32[] @?
    %Hq = arg scalar : i32[] @?
    %Nq = arg scalar : i32[] @?
    %Nk = arg scalar : i32[] @?
    %k = load %K[b, h, kv, d_qk] check(kv) : T[BLOCK_KV, D_QK] @?
"""
ONE_KERNEL = f"""
kernel @dkdv {GRID}\
    %Q = arg in : T[B, Hq, Nq, D_QK] @?
    %K = arg in : T[B, Hkv, Nk, D_QK] @?
    %dO = arg in : T[B, Hq, Nq, D_V] @?
    %DELTA = arg in : f32[B, Hq, Nq] @?
    %dK = arg out : T[B, Hkv, Nk, D_QK] @?
    %dV = arg out : T[B, Hkv, Nk, D_V] @?
{SCALARS}\
    %dk_init = init 0 : f32[BLOCK_KV, D_QK] @?
    %dv_init = init 0 : f32[BLOCK_KV, D_V] @?
    %total = loop q ranges(0 .. cdiv(Nq, BLOCK_Q)) carry(dk=%dk_init, dv=%dv_init) body(@step)
    %dk_out = map expr(scale*x) uses(x=%total.dk, scale=%scale) : T[BLOCK_KV, D_QK] @?
    store %dK[b, h, kv, d_qk] %dk_out check(kv)
    %dv_out = map expr(x) uses(x=%total.dv) : T[BLOCK_KV, D_V] @?
    store %dV[b, h, kv, d_v] %dv_out check(kv)
  block @step
    %dk = arg carry : f32[BLOCK_KV, D_QK] @?
    %dv = arg carry : f32[BLOCK_KV, D_V] @?
    %q = load %Q[b, h, q, d_qk] check(q) : T[BLOCK_Q, D_QK] @?
    %do = load %dO[b, h, q, d_v] check(q) : T[BLOCK_Q, D_V] @?
    %delta = load %DELTA[b, h, q] check(q) : f32[BLOCK_Q] @?
    %s = dot %k %q over(D_QK) : f32[BLOCK_KV, BLOCK_Q] @?
    %ds = map expr(delta*s) uses(delta=%delta, s=%s) : f32[BLOCK_KV, BLOCK_Q] @?
    %dv_next = dot %s %do over(BLOCK_Q) acc(%dv) : f32[BLOCK_KV, D_V] @?
    %dk_next = dot %ds %q over(BLOCK_Q) acc(%dk) : f32[BLOCK_KV, D_QK] @?
    yield values(dk=%dk_next, dv=%dv_next)
"""
TWO_KERNELS = f"""
kernel @dk {GRID}\
    %Q = arg in : T[B, Hq, Nq, D_QK] @?
    %K = arg in : T[B, Hkv, Nk, D_QK] @?
    %DELTA = arg in : f32[B, Hq, Nq] @?
    %dK = arg out : T[B, Hkv, Nk, D_QK] @?
{SCALARS}\
    %dk_init = init 0 : f32[BLOCK_KV, D_QK] @?
    %total = loop q ranges(0 .. cdiv(Nq, BLOCK_Q)) carry(dk=%dk_init) body(@step)
    %dk_out = map expr(scale*x) uses(x=%total.dk, scale=%scale) : T[BLOCK_KV, D_QK] @?
    store %dK[b, h, kv, d_qk] %dk_out check(kv)
  block @step
    %dk = arg carry : f32[BLOCK_KV, D_QK] @?
    %q = load %Q[b, h, q, d_qk] check(q) : T[BLOCK_Q, D_QK] @?
    %delta = load %DELTA[b, h, q] check(q) : f32[BLOCK_Q] @?
    %s = dot %k %q over(D_QK) : f32[BLOCK_KV, BLOCK_Q] @?
    %ds = map expr(delta*s) uses(delta=%delta, s=%s) : f32[BLOCK_KV, BLOCK_Q] @?
    %dk_next = dot %ds %q over(BLOCK_Q) acc(%dk) : f32[BLOCK_KV, D_QK] @?
    yield values(dk=%dk_next)

kernel @dv {GRID}\
    %Q = arg in : T[B, Hq, Nq, D_QK] @?
    %K = arg in : T[B, Hkv, Nk, D_QK] @?
    %dO = arg in : T[B, Hq, Nq, D_V] @?
    %dV = arg out : T[B, Hkv, Nk, D_V] @?
{SCALARS}\
    %dv_init = init 0 : f32[BLOCK_KV, D_V] @?
    %total = loop q ranges(0 .. cdiv(Nq, BLOCK_Q)) carry(dv=%dv_init) body(@step)
    %dv_out = map expr(x) uses(x=%total.dv) : T[BLOCK_KV, D_V] @?
    store %dV[b, h, kv, d_v] %dv_out check(kv)
  block @step
    %dv = arg carry : f32[BLOCK_KV, D_V] @?
    %q = load %Q[b, h, q, d_qk] check(q) : T[BLOCK_Q, D_QK] @?
    %do = load %dO[b, h, q, d_v] check(q) : T[BLOCK_Q, D_V] @?
    %s = dot %k %q over(D_QK) : f32[BLOCK_KV, BLOCK_Q] @?
    %dv_next = dot %s %do over(BLOCK_Q) acc(%dv) : f32[BLOCK_KV, D_V] @?
    yield values(dv=%dv_next)
"""


def test_wide_heads_get_a_kernel_for_each_gradient():
    """Each kernel has only the ops that its store depends on."""
    after = verify(SplitDkdv().run(module(ONE_KERNEL, head_dim=256)))
    assert print_module(after) == print_module(module(TWO_KERNELS, head_dim=256))


@pytest.mark.parametrize("head_dim", [16, 96, 128])
def test_narrow_heads_keep_one_kernel(head_dim):
    assert changes(SplitDkdv(), module(ONE_KERNEL, head_dim=head_dim)) == []


@pytest.mark.parametrize(
    ("dims", "more"), [("{qk: 192, v: 128}", ["bwd", "dq_end"]), ("{qk: 80, v: 256}", []), ("176", [])]
)
def test_the_sum_of_both_head_dims_decides(dims, more):
    """The fused backward is an exception: its programs hold both accumulators for 64 keys."""
    made = SplitDkdv().run(build_module(parse_spec(f"name: wide\nhead_dim: {dims}\n")))
    assert [k.name for k in verify(made).kernels] == ["fwd", "dq", "delta", "dk", "dv", *more, "jvp"]


def test_both_loops_of_a_group_are_split():
    """Both kernels keep the dropout mask, because both gradients need it."""
    spec = parse_spec("name: wide\nhead_dim: 256\nheads: {sharing: gqa}\nmask: causal\ndropout: true\n")
    for name in ("dk", "dv"):
        kernel = verify(SplitDkdv().run(build_module(spec))).kernel(name)
        assert [[f for f, _ in op.carry] for op in only(kernel.ops(), tile.Loop)] == [
            [name],
            [f"{name}_step"],
        ]
        assert [[f for f, _ in op.values] for op in only(kernel.ops(), tile.Yield)] == [
            [name],
            [f"{name}_step"],
        ]
        assert [op.dst.tensor for op in only(kernel.ops(), tile.Store)] == [f"d{name[1:].upper()}"]
        assert "keep" in kernel.graph


@pytest.mark.share(8)
def test_split_kernels_with_many_features_compute_the_gradients(tmp_path, device):
    """The features are grouped heads, padded head dims, dropout, and block lists, which no gradient reads before
    use-block-lists."""
    spec = parse_spec(
        "name: wide\nheads: {sharing: gqa}\nhead_dim: {qk: 192, v: 144}\ndtype: fp16\ndropout: true\n"
        "mask: {all_of: [causal, {key_padding: {lengths: true}}, {block_sparse: {block: 64}}]}\n"
    )
    result = run_case(module_of(spec, tmp_path / "wide"), spec, Case(1, *heads_for(spec), 100, 150), "fp16", device)
    assert result.ok, str(result)


def test_each_kernel_has_its_own_tile_sizes():
    made = target("mla_dims")
    on_h100 = {
        name: shown(schedule_of([r for r in made.configs(name) if r.device == "sm90"][-1])) for name in ("dk", "dv")
    }
    assert on_h100 == {"dk": "64x128x8x2 TMA", "dv": "64x128x8x3 TMA"}


@pytest.mark.share(8)
@pytest.mark.parametrize(
    "old, new, reason",
    [
        (
            "kernel @dv ",
            "kernel @dkdv ",
            "it launches @dv; the kernels are fwd, dq, delta, dk, dkdv",
        ),
        (
            "%dV = arg out : T[B, Hkv, Nk, D_V]",
            "%dO2 = arg out : T[B, Hkv, Nk, D_V]",
            "launch @dv: %dO2 is neither an argument nor allocated",
        ),
    ],
)
def test_half_a_split_is_refused(old, new, reason):
    portable = parse_spec("name: wide\nhead_dim: 256\nmask: causal\nschedule: {backend: triton}\n")
    text = print_module(lower(portable))
    text = edit(text, (old, new)).replace("%dV[", f"{new.split(' ')[0]}[" if new.startswith("%") else "%dV[")
    if "kernel @" in new:
        text = edit(text, ("schedule @dv\n", "schedule @dkdv\n"))
    with pytest.raises(VerifyError) as error:
        render(verify(parse_module(text, "edited.ir")))
    assert reason in str(error.value)
