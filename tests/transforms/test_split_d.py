"""split-d splits the head_dim of wide accumulators over programs, and the rule `split-d` checks such kernels."""

from __future__ import annotations

import random

import pytest

from attngen.builders import build_module
from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import passes
from attngen.spec import parse_spec
from attngen.tiles.sizes import block_d_choices
from attngen.transforms.split_d import SplitD
from attngen.transforms.split_dkdv import SplitDkdv
from attngen.verify import verify
from tests.helpers import changes, edit, module
from tests.transforms.equality import Call, check_steps

# A sum over values, and a number per query, which is the same in all programs of a tile.
FORWARD = """
kernel @fwd grid(q in cdiv(Nq, BLOCK_Q), h in Hq, b in B)
  about Sums of values, one program per query tile.
  block @entry
    %Q = arg in : T[B, Hq, Nq, D_QK] @?
    %K = arg in : T[B, Hkv, Nk, D_QK] @?
    %V = arg in : T[B, Hkv, Nk, D_V] @?
    %O = arg out : T[B, Hq, Nq, D_V] @?
    %DELTA = arg out : f32[B, Hq, Nq] @?
    %Hq = arg scalar : i32[] @?
    %Nq = arg scalar : i32[] @?
    %Nk = arg scalar : i32[] @?
    %q = load %Q[b, h, q, d_qk] check(q) : T[BLOCK_Q, D_QK] @?
    %l_init = init 0 : f32[BLOCK_Q] @?
    %acc_init = init 0 : f32[BLOCK_Q, D_V] @?
    %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(l=%l_init, acc=%acc_init) body(@step)
    %o = map expr(x) uses(x=%keys.acc) : T[BLOCK_Q, D_V] @?
    store %O[b, h, q, d_v] %o check(q)
    store %DELTA[b, h, q] %keys.l check(q)
  block @step
    %l = arg carry : f32[BLOCK_Q] @?
    %acc = arg carry : f32[BLOCK_Q, D_V] @?
    %k = load %K[b, h, kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @?
    %s = dot %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @?
    %masked = mask %s where(kv_idx < Nk) : f32[BLOCK_Q, BLOCK_KV] @?
    %v = load %V[b, h, kv, d_v] check(kv if partial) : T[BLOCK_KV, D_V] @?
    %acc_next = dot %masked %v over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @?
    %sum = reduce sum %masked over(BLOCK_KV) : f32[BLOCK_Q] @?
    %l_next = map expr(l + sum) uses(l=%l, sum=%sum) : f32[BLOCK_Q] @?
    yield values(l=%l_next, acc=%acc_next)
"""
# A sum over keys; scores need all of the head_dim of keys.
GRADIENT = """
kernel @dq grid(q in cdiv(Nq, BLOCK_Q), h in Hq, b in B)
  block @entry
    %Q = arg in : T[B, Hq, Nq, D_QK] @?
    %K = arg in : T[B, Hkv, Nk, D_QK] @?
    %dQ = arg out : T[B, Hq, Nq, D_QK] @?
    %Hq = arg scalar : i32[] @?
    %Nq = arg scalar : i32[] @?
    %Nk = arg scalar : i32[] @?
    %q = load %Q[b, h, q, d_qk] check(q) : T[BLOCK_Q, D_QK] @?
    %dq_init = init 0 : f32[BLOCK_Q, D_QK] @?
    %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(dq=%dq_init) body(@step)
    %dq_out = map expr(x) uses(x=%keys.dq) : T[BLOCK_Q, D_QK] @?
    store %dQ[b, h, q, d_qk] %dq_out check(q)
  block @step
    %dq = arg carry : f32[BLOCK_Q, D_QK] @?
    %k = load %K[b, h, kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @?
    %s = dot %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @?
    %masked = mask %s where(kv_idx < Nk) : f32[BLOCK_Q, BLOCK_KV] @?
    %dq_next = dot %masked %k over(BLOCK_KV) acc(%dq) : f32[BLOCK_Q, D_QK] @?
    yield values(dq=%dq_next)
"""


def added(text, head_dim=512):
    return [line[2:] for line in changes(SplitD(), module(text, head_dim=head_dim)) if line.startswith("+")]


def test_each_program_has_its_own_part_of_the_head_dim():
    """Results that are the same for all parts are stored by the first program."""
    assert added(FORWARD) == [
        "kernel @fwd grid(q in cdiv(Nq, BLOCK_Q), split_V in cdiv(D_V, D_V_split), h in Hq, b in B)",
        "about Sums of values, one program per query tile; D_V_split columns each.",
        "%acc_init = init 0 : f32[BLOCK_Q, D_V_split] @?",
        "%o = map expr(x) uses(x=%keys.acc) : T[BLOCK_Q, D_V_split] @?",
        "store %O[b, h, q, split_V] %o check(q)",
        "store %DELTA[b, h, q] %keys.l check(q) first_along(split_V)",
        "%acc = arg carry : f32[BLOCK_Q, D_V_split] @?",
        "%v = load %V[b, h, kv, split_V] check(kv if partial) : T[BLOCK_KV, D_V_split] @?",
        "%acc_next = dot %masked %v over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V_split] @?",
    ]


def test_a_tile_that_scores_need_stays_whole():
    """The program also loads its own part of the head_dim separately."""
    assert added(GRADIENT) == [
        "kernel @dq grid(q in cdiv(Nq, BLOCK_Q), split_QK in cdiv(D_QK, D_QK_split), h in Hq, b in B)",
        "%dq_init = init 0 : f32[BLOCK_Q, D_QK_split] @?",
        "%dq_out = map expr(x) uses(x=%keys.dq) : T[BLOCK_Q, D_QK_split] @?",
        "store %dQ[b, h, q, split_QK] %dq_out check(q)",
        "%dq = arg carry : f32[BLOCK_Q, D_QK_split] @?",
        "%k_own = load %K[b, h, kv, split_QK] check(kv if partial) columns_of(%k) : T[BLOCK_KV, D_QK_split] @?",
        "%dq_next = dot %masked %k_own over(BLOCK_KV) acc(%dq) : f32[BLOCK_Q, D_QK_split] @?",
    ]


def test_a_head_dim_that_is_no_power_of_two_is_checked():
    assert "store %O[b, h, q, split_V] %o check(q, split_V)" in added(FORWARD, 320)
    assert "%v = load %V[b, h, kv, split_V] check(kv if partial, split_V) : T[BLOCK_KV, D_V_split] @?" in added(
        FORWARD, 320
    )


@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_narrow_accumulators_stay_whole(head_dim):
    assert changes(SplitD(), module(FORWARD, head_dim=head_dim)) == []


@pytest.mark.parametrize(
    ("head_dim", "split"),
    [
        ("512", {"fwd": "split_V", "dq": "split_QK", "dk": "split_QK", "dv": "split_V", "jvp": "split_V"}),
        ("{qk: 512, v: 64}", {"dq": "split_QK", "dk": "split_QK"}),
        ("{qk: 64, v: 264}", {"fwd": "split_V", "dv": "split_V", "jvp": "split_V"}),
        ("{qk: 256, v: 256}", {}),
    ],
)
def test_the_width_of_the_accumulators_decides(head_dim, split):
    spec = parse_spec(f"name: wide\nhead_dim: {head_dim}\nmask: causal\n")
    made = verify(SplitD().run(SplitDkdv().run(build_module(spec))))
    assert {k.name: k.traits.split_d_axis.var for k in made.kernels if k.traits.split_d_axis} == split
    choices = {k.name: block_d_choices(made, k) for k in made.kernels}
    assert set(choices.values()) == {(0,)} | ({(512, 256, 128)} if split else set())


def test_decode_kernels_and_kernels_of_latents_stay_whole():
    wide = "head_dim: 512\n"
    latent = "heads: {sharing: mqa}\nhead_dim: {qk: 576, v: 512}\nkv: {latent: {rope: 64}}\n"
    for text, expected in ((wide, {"fwd"}), (latent, set())):
        spec = parse_spec(f"name: decode\nmask: causal\ncache: contiguous\nbackward: false\n{text}")
        made = verify(SplitD().run(build_module(spec)))
        assert {k.name for k in made.kernels if k.traits.split_d_axis} == expected


@pytest.mark.parametrize(
    ("text", "old", "new", "rule", "reason"),
    [
        (
            FORWARD,
            "in cdiv(D_V, D_V_split)",
            "in 2",
            "split-d",
            "expected one such axis, after tiles, in cdiv(D_V, D_V_split)",
        ),
        (
            FORWARD,
            " first_along(split_V)",
            "",
            "indexing",
            "rows of %DELTA that the other programs along split_V write, too",
        ),
        (
            FORWARD,
            "store %O[b, h, q, split_V] %o check(q)",
            "store %O[b, h, q, split_V] %o check(q) first_along(split_V)",
            "split-d",
            "no index of its columns",
        ),
        (FORWARD, "%V[b, h, kv, split_V]", "%V[b, h, kv, d_v]", "types", "the access is of [BLOCK_KV, D_V]"),
        (GRADIENT, "%K[b, h, kv, split_QK]", "%Q[b, h, kv, split_QK]", "indexing", "indexes Nq of %Q by `kv`"),
        (GRADIENT, "check(kv if partial) columns_of(%k)", "check(kv) columns_of(%k)", "split-d", "is no part of %k"),
        (GRADIENT, "columns_of(%k)", "columns_of(%q)", "split-d", "is no part of %q"),
        (
            GRADIENT,
            "%dq_next = dot %masked %k_own",
            "%dq_next = dot %masked %k",
            "types",
            "the product is f32[BLOCK_Q, D_QK]",
        ),
    ],
)
def test_a_wrong_part_of_the_head_dim_is_refused(text, old, new, rule, reason):
    after = print_module(SplitD().run(module(text, head_dim=512)))
    with pytest.raises(VerifyError) as error:
        verify(parse_module(edit(after, (old, new)), "edited.ir"))
    assert error.value.rule == rule and reason in error.value.reason


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("BLOCK_D=512", "BLOCK_D=96", "BLOCK_D=96; expected a power of two from 128 to 512"),
        ("BLOCK_D=512", "BLOCK_D=64", "BLOCK_D=64; expected a power of two from 128 to 512"),
        ("BLOCK_D=512 ", "", "BLOCK_D=0; expected a power of two"),
        ("check(q, split_V)", "check(q)", "does not check split_V"),
    ],
)
def test_configs_that_leave_a_part_of_the_head_dim_out_are_refused(old, new, reason):
    """A config gives the width of a part; parts that may pass the end of the head_dim are checked."""
    configs = (
        "\nschedule @fwd\n  sm90 bytes=2 rows<=inf : BLOCK_Q=16 BLOCK_KV=16 BLOCK_D=512 num_warps=4 num_stages=1\n"
    )
    after = print_module(SplitD().run(module(FORWARD, head_dim=320)))
    with pytest.raises(VerifyError) as error:
        verify(parse_module(edit(after + configs, (old, new)), "edited.ir"))
    assert error.value.rule == "split-d" and reason in error.value.reason


def test_a_kernel_that_does_not_split_the_head_dim_takes_no_block_d():
    configs = "\nschedule @fwd\n  sm90 bytes=2 rows<=inf : BLOCK_Q=16 BLOCK_KV=16 BLOCK_D=64 num_warps=4 num_stages=1\n"
    with pytest.raises(VerifyError, match="its programs do not split columns"):
        module(FORWARD + configs)
    with pytest.raises(VerifyError, match="a store of the first program only, and no grid axis splits columns"):
        module(edit(FORWARD, ("%keys.l check(q)", "%keys.l check(q) first_along(split_V)")))


@pytest.mark.share(16)
@pytest.mark.parametrize(
    "more",
    [
        "head_dim: 264\nmask: causal\n",
        (
            "head_dim: {qk: 320, v: 40}\nheads: {sharing: gqa}\nmask: {sliding_window: {left: 9, right: 2}}\n"
            "score: {softcap: 2.0}\n"
        ),
        "head_dim: {qk: 16, v: 384}\ndropout: true\noutputs: [lse, entropy, max_score]\n",
        "head_dim: {qk: 264, v: 272}\nheads: {sharing: mqa}\nmask: {block_sparse: {block: 16}}\n"
        "score:\n  expr: s * t[q_idx] + bias[h, q_idx - kv_idx + 64]\n"
        "  params: {t: {tensor: [Nq], grad: true}, bias: {tensor: [H, 129], grad: true}}\n",
    ],
)
def test_every_pass_keeps_what_wide_modules_compute(more):
    """Programs with half of the head_dim compute results and all gradients, also accumulated ones, in the executor."""
    spec = parse_spec(f"name: wide\n{more}")
    made = verify(build_module(spec))
    assert check_steps(spec, made, Call.random(random.Random(3), spec, made), passes(spec, made)) > 3
