"""inline-scores makes a scaling modifier part of the softmax step; any other modifier stays a map."""

from __future__ import annotations

import pytest

from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.transforms.inline_scores import InlineScores
from attngen.verify import verify
from tests.helpers import changes, edit, lowered, module, unverified

SOFTMAX = """
kernel @fwd grid(q in cdiv(Nq, BLOCK_Q))
  block @entry
    %S = arg in : f32[Nq, Nk] @?
    %M = arg out : f32[Nq] @?
    %qk_scale = arg scalar : f32[] @?
    %Nq = arg scalar : i32[] @?
    %m0 = init -inf : f32[BLOCK_Q] @?
    %l0 = init 0 : f32[BLOCK_Q] @?
    %keys = loop kv ranges(0 .. 2) carry(m=%m0, l=%l0) body(@step)
    %lse = map expr(m + log2(l)) uses(m=%keys.m, l=%keys.l) : f32[BLOCK_Q] @?
    store %M[q] %lse check(q)
  block @step
    %m = arg carry : f32[BLOCK_Q] @?
    %l = arg carry : f32[BLOCK_Q] @?
    %s = load %S[q, kv] check(q, kv) : f32[BLOCK_Q, BLOCK_KV] @?
    %score = map expr(qk_scale*s) uses(s=%s, qk_scale=%qk_scale) score(yes) : f32[BLOCK_Q, BLOCK_KV] @?
    %masked = mask %score where(kv_idx <= q_idx) : f32[BLOCK_Q, BLOCK_KV] @?
    %soft = softmax_step %masked m(%m) : f32[BLOCK_Q, BLOCK_KV] @?
    %p_sum = reduce sum %soft.p over(BLOCK_KV) : f32[BLOCK_Q] @?
    %l_next = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum) : f32[BLOCK_Q] @?
    yield values(m=%soft.m, l=%l_next)
"""


def test_a_scale_moves_into_the_exponent():
    """The mask reads raw scores, and reads of the maxima are scaled where they are used."""
    assert changes(InlineScores(), module(SOFTMAX)) == [
        "- %lse = map expr(m + log2(l)) uses(m=%keys.m, l=%keys.l) : f32[BLOCK_Q] @?",
        "+ %lse = map expr(m*qk_scale + log2(l)) uses(m=%keys.m, l=%keys.l, qk_scale=%qk_scale) : f32[BLOCK_Q] @?",
        "- %masked = mask %score where(kv_idx <= q_idx) : f32[BLOCK_Q, BLOCK_KV] @?",
        "+ %masked = mask %s where(kv_idx <= q_idx) : f32[BLOCK_Q, BLOCK_KV] @?",
        "- %soft = softmax_step %masked m(%m) : f32[BLOCK_Q, BLOCK_KV] @?",
        "+ %soft = softmax_step %masked m(%m) scale(%qk_scale) : f32[BLOCK_Q, BLOCK_KV] @?",
    ]


def test_reads_of_the_maxima_in_the_loop_are_scaled_too():
    """There the previous and the new running maximum are maxima of raw scores."""
    grown = "%grown = map expr({}) uses(m=%m, m_next=%soft.m{}) : f32[BLOCK_Q] @?"
    text = edit(
        SOFTMAX,
        ("    %l_next", f"    {grown.format('-m + m_next', '')}\n    %l_next"),
        ("expr(alpha*l + p_sum) uses(l=%l", "expr(alpha*l + grown + p_sum) uses(grown=%grown, l=%l"),
    )
    found = changes(InlineScores(), module(text))
    assert f"+ {grown.format('-m*qk_scale + m_next*qk_scale', ', qk_scale=%qk_scale')}" in found


def test_a_scale_without_a_mask_moves_too():
    text = edit(
        SOFTMAX,
        ("    %masked = mask %score where(kv_idx <= q_idx) : f32[BLOCK_Q, BLOCK_KV] @?\n", ""),
        ("%masked", "%score"),
    )
    assert "+ %soft = softmax_step %s m(%m) scale(%qk_scale) : f32[BLOCK_Q, BLOCK_KV] @?" in changes(
        InlineScores(), module(text)
    )


def test_a_scale_moves_past_several_masks():
    text = edit(
        SOFTMAX,
        ("    %soft =", "    %again = mask %masked where(kv_idx > 2) : f32[BLOCK_Q, BLOCK_KV] @?\n    %soft ="),
        ("softmax_step %masked", "softmax_step %again"),
    )
    assert "+ %soft = softmax_step %again m(%m) scale(%qk_scale) : f32[BLOCK_Q, BLOCK_KV] @?" in changes(
        InlineScores(), module(text)
    )


@pytest.mark.parametrize("expr", ["qk_scale*s*s", "qk_scale + s", "qk_scale*s + kv_idx"])
def test_any_other_modifier_stays_as_a_map(expr):
    before = module(edit(SOFTMAX, ("expr(qk_scale*s)", f"expr({expr})")))
    minus, plus = changes(InlineScores(), before)
    assert plus[2:] == minus[2:].replace(" score(yes)", "")


def test_the_backward_scales_inside_its_exponent():
    """P = 2^(score - lse2) is recomputed from raw scores."""
    before, after = (print_module(lowered("causal_mha")[stage]) for stage in ("build", "inline-scores"))
    # The kernels are dq, dkdv, bwd and jvp.
    assert before.count("%p = map expr(exp2(-lse2 + masked)) uses(lse2=%lse2, masked=%masked)") == 4
    assert (
        after.count("%p = map expr(exp2(-lse2 + masked*qk_scale)) uses(lse2=%lse2, masked=%masked, qk_scale=%qk_scale)")
        == 4
    )


def test_a_modifier_with_an_undefined_name_is_refused():
    before = unverified(edit(SOFTMAX, ("expr(qk_scale*s) uses(s=%s,", "expr(qk_scale*s*cap) uses(s=%s,")))
    with pytest.raises(VerifyError, match="rule `names`: .*`cap`, which is no operand, scalar or position"):
        verify(InlineScores().run(before))


def test_the_result_prints_and_parses():
    after = InlineScores().run(module(SOFTMAX))
    assert print_module(parse_module(print_module(after))) == print_module(after)
