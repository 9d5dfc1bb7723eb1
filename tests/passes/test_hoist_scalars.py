"""hoist-scalars: factors and terms that are scalars are gathered before the loop, once each."""

from __future__ import annotations

import pytest

from attngen.errors import VerifyError
from attngen.passes.hoist_scalars import HoistScalars
from attngen.verify import verify
from tests.helpers import SMALL, changes, edit, lowered, module, unverified

SCORE = "    %score = map expr({}) uses(s=%s, a=%a, b2=%b2) : f32[BLOCK_Q, BLOCK_KV] @?\n    %masked = mask %score"
ARGS = "    %a = arg scalar : f32[] @?\n    %b2 = arg scalar : f32[] @?\n    %Nq = arg"


def with_score(expr: str) -> str:
    return edit(SMALL, ("    %masked = mask %s", SCORE.format(expr)), ("    %Nq = arg", ARGS))


def test_factors_are_gathered() -> None:
    assert changes(HoistScalars(), module(with_score("a*b2*s"))) == [
        "+ %score_scale = map expr(a*b2) uses(a=%a, b2=%b2) : f32[] @?",
        "- %score = map expr(a*b2*s) uses(s=%s, a=%a, b2=%b2) : f32[BLOCK_Q, BLOCK_KV] @?",
        "+ %score = map expr(s*score_scale) uses(s=%s, score_scale=%score_scale) : f32[BLOCK_Q, BLOCK_KV] @?",
    ]


def test_terms_are_gathered_and_so_is_what_is_inside_a_function() -> None:
    assert changes(HoistScalars(), module(with_score("exp2(2*a*s) + a + b2"))) == [
        "+ %score_scale = map expr(2*a) uses(a=%a) : f32[] @?",
        "+ %score_shift = map expr(a + b2) uses(a=%a, b2=%b2) : f32[] @?",
        "- %score = map expr(a + b2 + exp2(2*a*s)) uses(s=%s, a=%a, b2=%b2) : f32[BLOCK_Q, BLOCK_KV] @?",
        "+ %score = map expr(score_shift + exp2(s*score_scale)) uses(s=%s, score_scale=%score_scale, score_shift=%score_shift) "
        ": f32[BLOCK_Q, BLOCK_KV] @?",
    ]


@pytest.mark.parametrize("expr", ["a*s + b2", "-a*s + b2", "a + s*b2 - q_idx", "s*(a + kv_idx) - b2"])
def test_a_lone_scalar_and_what_varies_in_the_loop_stay(expr: str) -> None:
    assert changes(HoistScalars(), module(with_score(expr))) == []


def test_a_scalar_of_the_loop_over_heads_stays_in_that_loop() -> None:
    """The learned window of softcap_window_gqa's dK/dV: its scale is the same for all heads; a slope of a head is not."""
    kernel = lowered("softcap_window_gqa")["hoist-scalars"].kernel("dkdv")
    homes = {op.name: kernel.graph.nodes[op.name]["block"] for op in kernel.ops()}
    assert homes["t1_scale"] == homes["score_scale"] == "entry"


def test_what_is_no_scalar_is_refused() -> None:
    before = unverified(with_score("a*b2*s").replace("a=%a, b2=%b2)", "a=%a, b2=%zero)"))
    with pytest.raises(VerifyError):
        verify(HoistScalars().run(before))
