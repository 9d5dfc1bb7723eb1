"""hoist-scalars combines scalar factors and terms before the loop, once each."""

from __future__ import annotations

import pytest

from attngen.errors import VerifyError
from attngen.ir import parse
from attngen.transforms.hoist_scalars import HoistScalars
from attngen.verify import verify
from attngen.verify.types import _integers_of
from tests.helpers import SMALL, changes, edit, lowered, module, unverified

SCORE = "    %score = map expr({}) uses(s=%s, a=%a, b2=%b2) : f32[BLOCK_Q, BLOCK_KV] @?\n    %masked = mask %score"
ARGS = "    %a = arg scalar : f32[] @?\n    %b2 = arg scalar : f32[] @?\n    %Nq = arg"


def with_score(expr: str) -> str:
    return edit(SMALL, ("    %masked = mask %s", SCORE.format(expr)), ("    %Nq = arg", ARGS))


def test_factors_are_combined() -> None:
    assert changes(HoistScalars(), module(with_score("a*b2*s"))) == [
        "+ %score_scale = map expr(a*b2) uses(a=%a, b2=%b2) : f32[] @?",
        "- %score = map expr(a*b2*s) uses(s=%s, a=%a, b2=%b2) : f32[BLOCK_Q, BLOCK_KV] @?",
        "+ %score = map expr(s*score_scale) uses(s=%s, score_scale=%score_scale) : f32[BLOCK_Q, BLOCK_KV] @?",
    ]


def test_terms_are_combined_also_inside_a_function() -> None:
    assert changes(HoistScalars(), module(with_score("exp2(2*a*s) + a + b2"))) == [
        "+ %score_scale = map expr(2*a) uses(a=%a) : f32[] @?",
        "+ %score_shift = map expr(a + b2) uses(a=%a, b2=%b2) : f32[] @?",
        "- %score = map expr(a + b2 + exp2(2*a*s)) uses(s=%s, a=%a, b2=%b2) : f32[BLOCK_Q, BLOCK_KV] @?",
        "+ %score = map expr(score_shift + exp2(s*score_scale)) "
        "uses(s=%s, score_scale=%score_scale, score_shift=%score_shift) : f32[BLOCK_Q, BLOCK_KV] @?",
    ]


@pytest.mark.parametrize("expr", ["a*s + b2", "-a*s + b2", "a + s*b2 - q_idx", "s*(a + kv_idx) - b2"])
def test_single_scalars_and_values_that_vary_in_the_loop_stay(expr: str) -> None:
    assert changes(HoistScalars(), module(with_score(expr))) == []


def test_scalars_that_are_the_same_for_all_heads_leave_the_loop_over_heads() -> None:
    """In dK/dV of softcap_window_gqa, both scales are equal for all heads, so the entry block computes them."""
    kernel = lowered("softcap_window_gqa")["hoist-scalars"].kernel("dkdv")
    blocks = {op.name: kernel.graph.nodes[op.name]["block"] for op in kernel.ops()}
    assert blocks["t1_scale"] == blocks["score_scale"] == "entry"


def test_a_tile_in_place_of_a_scalar_is_refused() -> None:
    before = unverified(with_score("a*b2*s").replace("a=%a, b2=%b2)", "a=%a, b2=%zero)"))
    with pytest.raises(VerifyError):
        verify(HoistScalars().run(before))


def test_scalars_that_make_an_integer_stay() -> None:
    """A combined value is fp32. A rounded value is an integer, whatever its operands are; a real number times an
    integer is not."""
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
