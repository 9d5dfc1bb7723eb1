"""hoist-scalars: factors and terms that are scalars are gathered before the loop, once each."""

from __future__ import annotations

import pytest

from attngen.errors import VerifyError
from attngen.ir.expr import parse
from attngen.transforms.hoist_scalars import HoistScalars
from attngen.verify import verify
from attngen.verify.types import _integers_of
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
    """The learned window of softcap_window_gqa's dK/dV: its scale is the same for all heads; a slope of a head is
    not."""
    kernel = lowered("softcap_window_gqa")["hoist-scalars"].kernel("dkdv")
    homes = {op.name: kernel.graph.nodes[op.name]["block"] for op in kernel.ops()}
    assert homes["t1_scale"] == homes["score_scale"] == "entry"


def test_what_is_no_scalar_is_refused() -> None:
    before = unverified(with_score("a*b2*s").replace("a=%a, b2=%b2)", "a=%a, b2=%zero)"))
    with pytest.raises(VerifyError):
        verify(HoistScalars().run(before))


def test_scalars_that_make_an_integer_stay() -> None:
    """A value that is gathered is fp32. What is rounded is an integer whatever it is made of, and a number times
    that is none."""
    assert changes(HoistScalars(), module(with_score("s*(floor(a) // 2)*max(1, nearest(exp2(b2)))"))) == []
    made = changes(HoistScalars(), module(with_score("s*0.05*((2*floor(a) + 7) // 14)*max(1, nearest(exp2(b2)))")))
    assert made[0].startswith("+ %score_scale = map expr(0.05*((2*floor(a) + 7) // 14)*max(1, nearest(exp2(b2))))")


def test_the_verifier_takes_no_product_with_a_real_number_for_an_integer() -> None:
    whole = [
        _integers_of(parse(text))[2]
        for text in ("(2*floor(a) + 7) // 14", "select(a > 0.5, 1, 0)", "max(1, nearest(0.5*a))", "h**2")
    ]
    real = (
        "0.05*((2*floor(a) + 7) // 14)",
        "0.5*select(a > 0, 1, 0) - 0.5*select(b2 > 0, 1, 0)",
        "0.5*floor(a) - 0.5*floor(b2)",
        "1/h",
    )
    assert all(whole) and not any(_integers_of(parse(text))[2] for text in real)
