"""Where normal forms differ, values decide: equal expressions agree, near misses are refuted, and expressions that have
no value anywhere are not equal."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from mpmath import iv

from attngen.ir import parse
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.verify.algebra import alike, equal, normal
from attngen.verify.points import Unknown, agree, value

EQUAL = [
    ("20*tanh((s - x*abs(q_idx - kv_idx))/20)", "-20*tanh((x*abs(q_idx - kv_idx) - s)/20)"),
    ("tanh(s)", "1 - 2/(1 + exp2(2*LOG2E*s))"),
    ("sigmoid(-s)", "1 - sigmoid(s)"),
    ("abs(s)", "max(s, -s)"),
    ("0.1*(s + 3*x)", "0.1*s + 0.30000000000000004*x"),
    ("select(kv_idx <= q_idx, s, x)", "select(q_idx < kv_idx, x, s)"),
    ("(q_idx + 5) // 5", "1 + q_idx // 5"),
    # Some of these values have too many digits to be computed.
    ("20*tanh(exp2(abs(s)/x)/20)", "20 - 40/(1 + exp2(0.1*LOG2E*exp2(abs(s)/x)))"),
]
NEAR = [
    ("20*tanh(s/20)", "20.02*tanh(s/20)"),
    ("20*tanh(s/20)", "20*tanh(s/20.02)"),
    ("s + 0.00001*kv_idx", "s + 0.00001001*kv_idx"),
    ("tanh(s - x)", "tanh(s + x)"),
    ("tanh(s - x)", "tanh(x - s)"),
    ("select(q_idx == kv_idx, s, x)", "x"),
    ("select(q_idx > kv_idx, s, x)", "select(q_idx >= kv_idx, s, x)"),
    ("select(kv_idx > 12345, s, x)", "select(kv_idx >= 12345, s, x)"),
    ("select(s > 0.5, s, x)", "select(s >= 0.5, s, x)"),
    ("clamp(s, -2, 2)", "clamp(s, -2, 2.002)"),
    ("min(s, x)", "max(s, x)"),
    ("(q_idx + 1) // 2", "q_idx // 2"),
    ("bitand(q_idx, 5)", "bitor(q_idx, 5)"),
    ("erf(s)", "erf(1.001*s)"),
]


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_equal_expressions_agree(a: str, b: str) -> None:
    assert agree(parse(a), parse(b)) is True and equal(parse(a), parse(b))


@pytest.mark.parametrize(("a", "b"), NEAR)
def test_near_misses_are_refuted(a: str, b: str) -> None:
    assert agree(parse(a), parse(b)) is False and not equal(parse(a), parse(b))


def test_expressions_without_any_value_are_undecided() -> None:
    a, b = parse("log(-1 - x*x)"), parse("1 + log(-1 - x*x)")
    assert agree(a, b) is None and not equal(a, b)


def test_a_value_with_too_many_digits_is_unknown() -> None:
    """At s = 4000 and x = 1/1024 the exponent has four million bits: computing it would take minutes."""
    with pytest.raises(Unknown):
        value(parse("20*tanh(exp2(abs(s)/x)/20)"), {"s": iv.mpf(4000), "x": iv.mpf(1 / 1024)})


def alike_texts(a: str, b: str) -> bool:
    return alike(normal(parse(a)), normal(parse(b)))


def test_conditions_of_real_numbers_are_alike_by_value() -> None:
    assert alike_texts("abs(sigmoid(x)) <= s", "1/abs(1 + exp2(-LOG2E*x)) <= s")
    assert alike_texts(
        "kv_idx <= q_idx and (abs(sigmoid(x)) < s or x == s)",
        "kv_idx <= q_idx and (s == x or 1/abs(1 + exp2(-LOG2E*x)) < s)",
    )


def test_two_forms_of_a_condition_that_never_holds_are_alike() -> None:
    """The normal form of the first is `false`, because an exponential is positive; that of the second is undecided."""
    a, b = parse("0.75 + 0.75*exp2(-LOG2E*x) < 0.5"), parse("0.75/sigmoid(x) < 0.5")
    assert normal(a) == sympy.false and normal(b) != sympy.false and alike(a, b)
    never = {"expr": "0.75 / sigmoid(weight[b, kv_idx]) < 0.5", "params": {"weight": {"tensor": ["B", "Nk"]}}}
    lower(make_spec({"name": "never", "head_dim": 16, "mask": never}), "assign-memory-space")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("abs(sigmoid(x)) <= s", "abs(sigmoid(x)) < s"),
        ("abs(sigmoid(x)) <= s", "abs(sigmoid(1.001*x)) <= s"),
        ("abs(sigmoid(x)) <= s", "s <= abs(sigmoid(x))"),
        ("abs(sigmoid(x)) <= s + 0.001*kv_idx", "abs(sigmoid(x)) <= s + 0.001*q_idx"),
        ("abs(sigmoid(x)) <= s and kv_idx <= q_idx", "abs(sigmoid(x)) <= s and kv_idx < q_idx"),
        ("abs(sigmoid(x)) <= s and kv_idx <= q_idx", "abs(sigmoid(x)) <= s or kv_idx <= q_idx"),
        ("abs(sigmoid(x)) == s", "abs(sigmoid(x)) != s"),
        # These are equal, but integer conditions are compared only by their normal form.
        ("(q_idx + 5) // 5 <= kv_idx", "1 + q_idx // 5 <= kv_idx"),
    ],
)
def test_different_conditions_are_not_alike(a: str, b: str) -> None:
    assert not alike_texts(a, b)


SLOPE = {"slope": {"tensor": ["H"], "grad": True}}


@pytest.mark.share(16)
@pytest.mark.parametrize("mask", ["none", "document", {"expr": "(q_idx - kv_idx) % 3 == 0"}], ids=str)
def test_a_soft_cap_of_a_modified_score_builds(mask: Any) -> None:
    text = "20 * tanh((s - slope[h] * abs(q_idx - kv_idx)) / 20)"
    lower(
        make_spec(
            {"name": "x", "head_dim": 16, "dtype": "fp32", "mask": mask, "score": [{"expr": text, "params": SLOPE}]}
        )
    )
