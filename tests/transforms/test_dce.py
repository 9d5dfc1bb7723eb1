"""dce removes ops that no store depends on."""

from __future__ import annotations

import pytest

from attngen.errors import VerifyError
from attngen.ir.printer import print_module
from attngen.transforms.dce import Dce
from attngen.verify import verify
from tests.helpers import SMALL, changes, edit, module, unverified

SCHEDULED = edit(SMALL, ("body(@step)", "body(@step) cls(partial)"))
UNREAD = "    %unread = map expr(2*x) uses(x=%s) : f32[BLOCK_Q, BLOCK_KV] @?\n"


def test_an_unread_value_is_removed_with_the_values_that_only_it_reads():
    chain = UNREAD.replace("%unread", "%first") + UNREAD.replace("x=%s", "x=%first")
    text = edit(SCHEDULED, ("    %masked = mask", chain + "    %masked = mask"))
    assert changes(Dce(), module(text, "scheduled")) == [f"- {line.strip()}" for line in chain.splitlines()]


def test_ops_that_stores_depend_on_stay():
    """They depend through loops on carried and yielded values. Unread arguments also stay."""
    assert changes(Dce(), module(SCHEDULED, "scheduled")) == []


def test_a_loop_that_stores_stays_even_if_it_carries_nothing():
    """The values in its bounds stay, too."""
    text = """
kernel @fwd grid(q in cdiv(Nq, BLOCK_Q))
  block @entry
    %S = arg out : f32[Nq, Nk] @?
    %Nq = arg scalar : i32[] @?
    %Nk = arg scalar : i32[] @?
    %kv_end = map expr(cdiv(Nk, BLOCK_KV)) : i32[] @?
    %keys = loop kv ranges(0 .. kv_end) body(@step) cls(partial)
  block @step
    %ones = init 1 : f32[BLOCK_Q, BLOCK_KV] @?
    %masked = mask %ones where(kv_idx < Nk) : f32[BLOCK_Q, BLOCK_KV] @?
    store %S[q, kv] %masked check(q, kv)
    yield
"""
    assert changes(Dce(), module(text, "scheduled")) == []


def test_a_carried_value_stays_if_later_iterations_read_it():
    """It stays even if nothing reads it after the loop; a carried value that nothing reads is removed."""
    text = """
kernel @fwd program_axis(kv) grid(b in B)
  block @entry
    %IDS = arg in : i32[B, Nk] @?
    %SUMS = arg out : i32[B, Nk] @?
    %Nk = arg scalar : i32[] @?
    %none = init 0 : i32[] @?
    %unread = init 0 : i32[] @?
    %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(before=%none, more=%unread) body(@step) cls(all)
  block @step
    %before = arg carry : i32[] @?
    %more = arg carry : i32[] @?
    %id = load %IDS[b, kv] check(kv) : i32[BLOCK_KV] @?
    %here = scan max %id over(BLOCK_KV) : i32[BLOCK_KV] @?
    %running = map expr(max(here, before)) uses(here=%here, before=%before) : i32[BLOCK_KV] @?
    store %SUMS[b, kv] %running check(kv)
    %last = reduce max %running over(BLOCK_KV) : i32[] @?
    yield values(before=%last, more=%last)
"""
    assert changes(Dce(), module(text, "scheduled")) == [
        "- %unread = init 0 : i32[] @?",
        "- %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(before=%none, more=%unread) body(@step) cls(all)",
        "+ %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(before=%none) body(@step) cls(all)",
        "- %more = arg carry : i32[] @?",
        "- yield values(before=%last, more=%last)",
        "+ yield values(before=%last)",
    ]


def test_unread_carried_values_are_removed_field_by_field():
    """The initial value, the next value and the body's argument are removed with the field."""
    lines = (
        "%none = init 0 : f32[BLOCK_Q, D_QK] @?",
        "%twice = arg carry : f32[BLOCK_Q, D_QK] @?",
        "%more = dot %masked %k over(BLOCK_KV) acc(%twice) : f32[BLOCK_Q, D_QK] @?",
    )
    text = edit(
        SCHEDULED,
        ("    %keys =", f"    {lines[0]}\n    %keys ="),
        ("carry(sum=%zero)", "carry(sum=%zero, twice=%none)"),
        ("    %k = load", f"    {lines[1]}\n    %k = load"),
        ("    yield values(sum=%next)", f"    {lines[2]}\n    yield values(sum=%next, twice=%more)"),
    )
    assert print_module(Dce().run(unverified(text, "scheduled"))) == print_module(module(SCHEDULED, "scheduled"))


def test_scalars_that_ranges_and_masks_name_stay():
    named = "    %n = load %LENGTHS[0] : i32[] @?\n    %n2 = map expr(n) uses(n=%n) : i32[] @?\n"
    text = edit(
        SCHEDULED,
        ("    %O = arg", "    %LENGTHS = arg in : i32[B] @?\n    %O = arg"),
        ("    %keys =", named + "    %keys ="),
        ("cdiv(Nk, BLOCK_KV)", "cdiv(min(Nk, n2), BLOCK_KV)"),
        ("where(kv_idx < Nk)", "where(kv_idx < n) uses(n=%n)"),
    )
    before = unverified(text, "scheduled")
    assert [op.name for op in Dce().run(before).kernels[0].ops()] == [op.name for op in before.kernels[0].ops()]


def test_a_scalar_that_a_map_names_without_reading_it_is_refused():
    """Such a scalar is no operand, so the pass removes it, and the verifier reports that it is missing."""
    named = "    %half = map expr(1/Nk) : f32[] @?\n"
    text = edit(
        SCHEDULED,
        ("    %keys =", named + "    %keys ="),
        ("expr(x) uses(x=%keys.sum)", "expr(half*x) uses(x=%keys.sum)"),
    )
    with pytest.raises(VerifyError, match="rule `names`: .*`half`, which is no operand, scalar or position"):
        verify(Dce().run(module(text, "scheduled")))
