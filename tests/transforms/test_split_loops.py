"""split-loops splits a loop into one over the full tiles and one over the partial tiles."""

from __future__ import annotations

import pytest

from attngen.errors import VerifyError
from attngen.transforms.split_loops import SplitLoops
from attngen.verify import verify
from tests.helpers import KV_OUTER, SMALL, changes, edit, lowered, module

FULL = "%keys_full = loop kv ranges(0 .. kv_full_end) carry(sum=%zero) body(@step) cls(full)"
PARTIAL = "%keys_partial = loop kv ranges(kv_full_end .. kv_end) carry(sum=%keys_full.sum) body(@step) cls(partial)"


def classified(tiles, where="kv_idx < Nk"):
    """Return SMALL with the bounds of its tiles."""
    return module(
        edit(SMALL, ("body(@step)", f"body(@step) tiles({tiles})"), ("where(kv_idx < Nk)", f"where({where})"))
    )


def test_one_loop_becomes_two():
    """Bounds become named scalars, and readers of the loop's result read the second loop's."""
    before = classified("0; 0; Nk // BLOCK_KV; cdiv(Nk, BLOCK_KV)")
    assert [line for line in changes(SplitLoops(), before) if line[0] == "+"] == [
        "+ %kv_end = map expr(cdiv(Nk, BLOCK_KV)) : i32[] @?",
        "+ %kv_full_end = map expr(Nk // BLOCK_KV) : i32[] @?",
        f"+ {FULL}",
        f"+ {PARTIAL}",
        "+ %o = map expr(x) uses(x=%keys_partial.sum) : T[BLOCK_Q, D_QK] @?",
    ]


def test_an_empty_range_is_left_out():
    before = classified("0; 0; 0; cdiv(Nk, BLOCK_KV)")
    assert [line for line in changes(SplitLoops(), before) if "loop" in line][1:] == [
        "+ %keys_partial = loop kv ranges(0 .. kv_end) carry(sum=%zero) body(@step) cls(partial)"
    ]


def test_partial_ranges_with_no_full_tile_between_are_merged():
    start, full = "min(cdiv(Nk, BLOCK_KV), (100 // BLOCK_KV))", "min(cdiv(100, BLOCK_KV), cdiv(Nk, BLOCK_KV))"
    before = classified(f"{start}; {full}; {full}; cdiv(Nk, BLOCK_KV)", "kv_idx < Nk and kv_idx >= 100")
    assert [line for line in changes(SplitLoops(), before) if "loop" in line][1:] == [
        "+ %keys_partial = loop kv ranges(kv_first .. kv_end) carry(sum=%zero) body(@step) cls(partial)"
    ]


def test_partial_tiles_on_both_sides_are_two_ranges_of_one_loop():
    start, full = "min(cdiv(Nk, BLOCK_KV), (100 // BLOCK_KV))", "min(cdiv(100, BLOCK_KV), cdiv(Nk, BLOCK_KV))"
    before = classified(
        f"{start}; {full}; max((Nk // BLOCK_KV), {full}); cdiv(Nk, BLOCK_KV)", "kv_idx < Nk and kv_idx >= 100"
    )
    loops = [line for line in changes(SplitLoops(), before) if "loop" in line][1:]
    assert "ranges(kv_full_first .. kv_full_end)" in loops[0]
    assert "ranges(kv_first .. kv_full_first, kv_full_end .. kv_end)" in loops[1]


def test_a_loop_that_is_not_over_tiles_is_unchanged():
    before = lowered("causal_gqa")["classify-tiles"]
    heads = [[loop for loop in m.kernel("dkdv").loops if loop.var == "g"] for m in (before, SplitLoops().run(before))]
    assert len(heads[0]) == 1 and heads[0] == heads[1]


def test_the_bounds_of_an_inner_loop_are_in_the_outer_loop():
    tiles = "0; 0; select(BLOCK_KV + kv_start <= Nk, (Nq // BLOCK_Q), 0); cdiv(Nq, BLOCK_Q)"
    before = module(edit(KV_OUTER, ("body(@step)", f"body(@step) tiles({tiles})")))
    assert [line for line in changes(SplitLoops(), before) if line[0] == "+"] == [
        "+ %q_end = map expr(cdiv(Nq, BLOCK_Q)) : i32[] @?",
        "+ %q_full_end = map expr(select(BLOCK_KV + kv_start <= Nk, (Nq // BLOCK_Q), 0)) : i32[] @?",
        "+ %queries_full = loop q ranges(0 .. q_full_end) body(@step) cls(full)",
        "+ %queries_partial = loop q ranges(q_full_end .. q_end) body(@step) cls(partial)",
    ]
    # With these bounds, the zeros past the last key would count as scores.
    wrong = module(edit(KV_OUTER, ("body(@step)", "body(@step) tiles(0; 0; Nq // BLOCK_Q; cdiv(Nq, BLOCK_Q))")))
    with pytest.raises(VerifyError, match="rule `full-is-proven`: .*proven"):
        verify(SplitLoops().run(wrong))


@pytest.mark.parametrize(
    "tiles, rule",
    [
        ("0; 0; cdiv(Nk, BLOCK_KV); cdiv(Nk, BLOCK_KV)", "full-is-proven"),  # the last tile may pass the end
        ("0; 0; Nk // BLOCK_KV; Nk // BLOCK_KV", "covers"),  # a ragged end is left out
        ("1; 1; Nk // BLOCK_KV; cdiv(Nk, BLOCK_KV)", "covers"),
    ],
)
def test_bounds_that_are_not_proven_are_refused(tiles, rule):
    with pytest.raises(VerifyError, match=f"rule `{rule}`: .*proven"):
        verify(SplitLoops().run(classified(tiles)))


def test_a_loop_without_bounds_is_refused():
    with pytest.raises(
        VerifyError, match="rule `classified`: .*%keys has class unknown; classify-tiles and split-loops come first"
    ):
        verify(SplitLoops().run(module(SMALL)))
