"""simplify: each condition said once, in its cheapest form (equality: test_tiles_bruteforce.py)."""

from __future__ import annotations

import pytest
import sympy

from attngen.errors import VerifyError
from attngen.ir.expr import conjuncts, parse, symbol
from attngen.passes.simplify import Simplify, simplify_condition
from attngen.verify import verify
from tests.helpers import SMALL, changes, edit, module, unverified


def loops(where, full="0", end="cdiv(Nk, BLOCK_KV)"):
    """SMALL with a mask, as two loops, the full one up to `full`; without one if that is 0."""
    line = "%keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(sum=%zero) body(@step)"
    split = [f"%keys_full = loop kv ranges(0 .. {full}) carry(sum=%zero) body(@step) cls(full)"] if full != "0" else []
    carried = "%keys_full.sum" if split else "%zero"
    split.append(f"%keys = loop kv ranges({full} .. {end}) carry(sum={carried}) body(@step) cls(partial)")
    return edit(SMALL, (line, "\n    ".join(split)), ("where(kv_idx < Nk)", f"where({where})"))


@pytest.mark.parametrize(
    "where, simple",
    [
        ("kv_idx <= Nk - Nq + q_idx and kv_idx < Nk", "kv_idx <= Nk - Nq + q_idx"),  # for valid queries the first implies the second
        ("kv_idx < Nk and kv_idx < Nk + 1", "kv_idx < Nk"),
        ("kv_idx < Nk and q_idx - kv_idx <= 3", "kv_idx >= q_idx - 3 and kv_idx < Nk"),
        ("kv_idx < Nk and kv_idx - q_idx < 1", "kv_idx <= min(q_idx, Nk - 1)"),
        ("kv_idx < Nk and kv_idx - 5 < q_idx", "kv_idx < min(Nk, q_idx + 5)"),
        ("kv_idx < Nk and (kv_idx <= q_idx or kv_idx < 9)", "kv_idx <= min(Nk - 1, max(8, q_idx))"),
        ("kv_idx < Nk and (kv_idx >= q_idx or kv_idx < 9)", "(kv_idx >= q_idx or kv_idx < 9) and kv_idx < Nk"),
        ("kv_idx < Nk and kv_idx >= q_idx and kv_idx > 4", "kv_idx >= max(5, q_idx) and kv_idx < Nk"),
        ("kv_idx < Nk and 1 - 2*kv_idx <= q_idx", "1 - 2*kv_idx <= q_idx and kv_idx < Nk"),  # not solved: it would take a division
    ],
)
def test_conditions_are_said_once_and_solved_for_the_loops_index(where, simple):
    before = module(loops(where), "scheduled")
    after = next((line for line in changes(Simplify(), before) if line.startswith("+ %masked")), f"where({where})")
    assert f"where({simple})" in after


def test_bounds_that_change_along_the_loop_stay_apart():
    """Another vector in the bound would be loaded and compared for each turn."""
    q, kv, limit = symbol("q_idx"), symbol("kv_idx"), symbol("limit")
    where = (kv <= q) & (kv < limit)
    assert simplify_condition(where, "q", "kv", moving=frozenset({"limit"})) == where
    assert simplify_condition(where, "q", "kv") == (kv <= sympy.Min(q, limit - 1))


@pytest.mark.parametrize(
    "text, parts",
    [
        ("kv_idx <= min(Nk - 1, max(8, q_idx))", ["kv_idx <= Nk - 1", "kv_idx <= 8 or kv_idx <= q_idx"]),
        ("kv_idx > max(2, q_idx)", ["kv_idx > 2", "kv_idx > q_idx"]),
        ("kv_idx >= min(2, q_idx)", ["kv_idx >= 2 or kv_idx >= q_idx"]),
        ("kv_idx < Nk", ["kv_idx < Nk"]),
    ],
)
def test_a_comparison_with_a_minimum_is_taken_apart_to_be_solved(text, parts):
    assert set(conjuncts(parse(text))) == set(map(parse, parts))


def test_a_mask_that_full_loops_skip_stays_partial():
    assert changes(Simplify(), module(loops("kv_idx < Nk", "Nk // BLOCK_KV"), "scheduled")) == []


def test_where_no_loop_is_full_masks_and_checks_are_unconditional():
    assert changes(Simplify(), module(loops("kv_idx < Nk"), "scheduled")) == [
        "- %k = load %K[kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @?",
        "+ %k = load %K[kv, d_qk] check(kv) : T[BLOCK_KV, D_QK] @?",
        "- %masked = mask %s where(kv_idx < Nk) : f32[BLOCK_Q, BLOCK_KV] @?",
        "+ %masked = mask %s where(kv_idx < Nk) when(always) : f32[BLOCK_Q, BLOCK_KV] @?",
    ]


def test_a_loop_that_claims_too_much_is_not_laundered():
    before = unverified(loops("kv_idx < Nk and kv_idx <= q_idx", "Nk // BLOCK_KV"), "scheduled")
    with pytest.raises(VerifyError, match="rule `full-is-proven`: .*class partial is right for any range"):
        verify(Simplify().run(before))
