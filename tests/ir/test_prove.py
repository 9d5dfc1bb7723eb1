"""Proven inequalities hold at every sampled point, and the inequalities that tile bounds need are proven."""

from __future__ import annotations

from itertools import product

import pytest
import sympy

from attngen.ir import parse, symbol
from attngen.ir.prove import entails, prove_le

SYMBOLS = [symbol(name) for name in ("BLOCK_KV", "BLOCK_Q", "Nq", "kv_start", "q_start")]
POINTS = [
    dict(zip(SYMBOLS, values)) for values in product((1, 16, 32), (1, 16), (0, 1, 2, 40), (0, 1, 16, 48), (0, 1, 15))
]
PROVEN = [
    ("0", "3*min(BLOCK_KV + kv_start, kv_start + q_start + 1) - 3"),
    ("0", "min(cdiv(3*min(BLOCK_KV + kv_start, kv_start + q_start + 1) - 3, BLOCK_Q), cdiv(Nq, BLOCK_Q))"),
    ("1", "BLOCK_KV + kv_start"),
    ("(kv_start // BLOCK_Q)", "cdiv(kv_start + q_start, BLOCK_Q)"),
    ("select(2 < Nq, cdiv(Nq, BLOCK_Q), 0)", "select(1 < Nq, cdiv(Nq, BLOCK_Q), 0)"),
    ("min(Nq, kv_start)", "max(Nq - 1, kv_start)"),
]
FALSE = [
    ("0", "3*min(BLOCK_KV + kv_start, kv_start + q_start + 1) - 4"),
    ("0", "kv_start + q_start - 1"),
    ("2", "BLOCK_KV + kv_start"),
    ("cdiv(kv_start, BLOCK_Q)", "(kv_start // BLOCK_Q)"),
    ("select(1 < Nq, cdiv(Nq, BLOCK_Q), 0)", "select(2 < Nq, cdiv(Nq, BLOCK_Q), 0)"),
    ("Nq", "kv_start"),
]


def holds(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Return whether a <= b at all POINTS."""
    return all(a.subs(point) <= b.subs(point) for point in POINTS)


@pytest.mark.parametrize(("a", "b"), PROVEN)
def test_inequalities_that_bounds_need_are_proven_and_hold(a: str, b: str) -> None:
    left, right = parse(a), parse(b)
    assert prove_le(left, right) and holds(left, right)


@pytest.mark.parametrize(("a", "b"), FALSE)
def test_false_inequalities_are_not_proven(a: str, b: str) -> None:
    left, right = parse(a), parse(b)
    assert not prove_le(left, right) and not holds(left, right)


def test_a_condition_follows_from_a_stricter_one() -> None:
    strict, loose = parse("2 < Nq"), parse("1 < Nq")
    assert entails(strict, loose) and not entails(loose, strict)


def test_an_answer_is_a_python_bool() -> None:
    """Callers count them."""
    assert all(prove_le(*map(parse, pair)) is (pair in PROVEN) for pair in (*PROVEN, *FALSE))
