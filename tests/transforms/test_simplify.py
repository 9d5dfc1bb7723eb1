"""simplify states each condition once, in its cheapest form (equality: test_tiles_bruteforce.py)."""

from __future__ import annotations

import pytest
import sympy

from attngen.errors import VerifyError
from attngen.ir import conjuncts, only, parse, symbol, tile, to_text
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.transforms.simplify import Simplify, simplify_condition
from attngen.verify import verify
from tests.helpers import SMALL, changes, edit, module, unverified


def loops(where, full="0", end="cdiv(Nk, BLOCK_KV)"):
    """Return SMALL with a mask and two loops: the full loop runs to `full`, and is left out if that is 0."""
    line = "%keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(sum=%zero) body(@step)"
    split = [f"%keys_full = loop kv ranges(0 .. {full}) carry(sum=%zero) body(@step) cls(full)"] if full != "0" else []
    carried = "%keys_full.sum" if split else "%zero"
    split.append(f"%keys = loop kv ranges({full} .. {end}) carry(sum={carried}) body(@step) cls(partial)")
    return edit(SMALL, (line, "\n    ".join(split)), ("where(kv_idx < Nk)", f"where({where})"))


@pytest.mark.parametrize(
    "where, simple",
    [
        # For valid queries, the first condition implies the second.
        ("kv_idx <= Nk - Nq + q_idx and kv_idx < Nk", "kv_idx <= Nk - Nq + q_idx"),
        ("kv_idx < Nk and kv_idx < Nk + 1", "kv_idx < Nk"),
        ("kv_idx < Nk and q_idx - kv_idx <= 3", "kv_idx >= q_idx - 3 and kv_idx < Nk"),
        ("kv_idx < Nk and kv_idx - q_idx < 1", "kv_idx <= min(q_idx, Nk - 1)"),
        ("kv_idx < Nk and kv_idx - 5 < q_idx", "kv_idx < min(Nk, q_idx + 5)"),
        ("kv_idx < Nk and (q_idx - kv_idx <= 3 or kv_idx < 9)", "(kv_idx >= q_idx - 3 or kv_idx < 9) and kv_idx < Nk"),
        (
            "kv_idx < Nk and kv_idx < 20.5 and kv_idx < q_idx/2 and kv_idx <= q_idx",
            "kv_idx <= min(q_idx, Nk - 1) and kv_idx < 20.5 and kv_idx < q_idx/2",
        ),
        ("kv_idx < Nk and kv_idx <= max(5, q_idx)", "kv_idx <= max(5, q_idx) and kv_idx < Nk"),  # unchanged
        ("kv_idx < Nk and kv_idx >= q_idx and kv_idx > 4", "kv_idx >= max(5, q_idx) and kv_idx < Nk"),
        # This is not solved for kv_idx, because that takes a division.
        ("kv_idx < Nk and 1 - 2*kv_idx <= q_idx", "1 - 2*kv_idx <= q_idx and kv_idx < Nk"),
    ],
)
def test_conditions_are_stated_once_and_solved_for_the_loop_index(where, simple):
    before = module(loops(where), "scheduled")
    after = next((line for line in changes(Simplify(), before) if line.startswith("+ %masked")), f"where({where})")
    assert f"where({simple})" in after


def test_loaded_integers_are_compared_unchanged():
    """A loaded integer may be the least or the greatest one, so adding or subtracting 1 could overflow. Bounds of
    positions take the form of its comparison instead."""
    q, kv, low, high = (symbol(name) for name in ("q_idx", "kv_idx", "low", "high"))

    def simple(where):
        return simplify_condition(where, "q", "kv", loaded=frozenset({"low", "high"}))

    assert simple((kv <= q) & (kv < high)) == (kv < sympy.Min(high, q + 1))
    assert simple((kv >= q) & (kv > low)) == (kv > sympy.Max(low, q - 1))
    assert simple((kv < high) & (kv <= low)) == (kv < high) & (kv <= low)
    # The product takes 64 bits.
    assert simple((kv < high * low) & (kv <= q) & (kv < 33)) == (kv < high * low) & (kv <= sympy.Min(q, 32))
    assert simple((q - kv <= low) | (kv < 9)) == (q - kv <= low) | (kv < 9)  # the sum could be too large


@pytest.mark.share(4)
def test_bounds_that_vary_along_the_loop_are_not_merged():
    """A merged bound would compare another vector in each iteration."""
    last = {"last": {"tensor": ["B", "Nk"], "dtype": "int32"}}
    mask = {"expr": "kv_idx <= q_idx and kv_idx < last[b, kv_idx]", "params": last}
    made = lower(make_spec({"name": "t", "head_dim": 16, "mask": mask}))
    masks = {k.name: [to_text(op.where) for op in only(k.ops(), tile.Mask)] for k in made.kernels}
    assert masks["fwd"] == ["kv_idx <= min(q_idx, Nk - 1) and kv_idx < last"]
    assert all("last, " not in text and "(last" not in text for texts in masks.values() for text in texts)


@pytest.mark.parametrize(
    "text, parts",
    [
        ("kv_idx <= min(Nk - 1, q_idx)", ["kv_idx <= Nk - 1", "kv_idx <= q_idx"]),
        ("kv_idx > max(2, q_idx)", ["kv_idx > 2", "kv_idx > q_idx"]),
        ("min(2, q_idx) > kv_idx", ["kv_idx < 2", "kv_idx < q_idx"]),
        ("kv_idx <= max(2, q_idx)", ["kv_idx <= max(2, q_idx)"]),  # one bound, solved as a whole
        ("kv_idx < Nk", ["kv_idx < Nk"]),
    ],
)
def test_a_bound_by_a_minimum_is_split_into_one_condition_for_each_operand(text, parts):
    assert set(conjuncts(parse(text))) == set(map(parse, parts))


def test_a_maximum_of_numbers_is_decided() -> None:
    """`max(0, window) < 1` leaves a comparison of numbers, which is decided and has no operands."""
    window = symbol("window")
    assert conjuncts(sympy.Max(window, 0) < 1) == (sympy.Gt(1, window),)
    assert conjuncts(sympy.Max(window, 0) < 0) == (sympy.false,)


def test_a_mask_that_full_loops_skip_stays_partial():
    assert changes(Simplify(), module(loops("kv_idx < Nk", "Nk // BLOCK_KV"), "scheduled")) == []


def test_where_no_loop_is_full_masks_and_checks_are_unconditional():
    assert changes(Simplify(), module(loops("kv_idx < Nk"), "scheduled")) == [
        "- %k = load %K[kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @?",
        "+ %k = load %K[kv, d_qk] check(kv) : T[BLOCK_KV, D_QK] @?",
        "- %masked = mask %s where(kv_idx < Nk) : f32[BLOCK_Q, BLOCK_KV] @?",
        "+ %masked = mask %s where(kv_idx < Nk) when(always) : f32[BLOCK_Q, BLOCK_KV] @?",
    ]


def test_a_wrongly_labelled_full_loop_stays_refused():
    before = unverified(loops("kv_idx < Nk and kv_idx <= q_idx", "Nk // BLOCK_KV"), "scheduled")
    with pytest.raises(VerifyError, match="rule `full-is-proven`: .*class partial is right for any range"):
        verify(Simplify().run(before))
