"""use-block-lists makes loops visit only the tiles of listed blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from attngen.errors import VerifyError
from attngen.ir import Blocks, Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_kernel, print_module
from attngen.lowering.pipeline import lower, stages
from attngen.spec import make_spec, parse_spec
from attngen.transforms.use_block_lists import UseBlockLists
from attngen.verify import verify
from attngen.verify.host import reasons
from attngen.verify.tiles import block_lists
from tests.helpers import changes, edit, lowered, module

BEFORE = """
kernel @fwd grid(q in cdiv(Nq, BLOCK_Q), h in Hq, b in B)
  block @entry
    %Q = arg in : T[B, Hq, Nq, D_QK] @?
    %K = arg in : T[B, Hkv, Nk, D_QK] @?
    %KV_RANK = arg in : i32[B, Hq, Tq, Tk1] @?
    %KV_LIST = arg in : i32[B, Hq, Tq, Tk] @?
    %O = arg out : T[B, Hq, Nq, D_QK] @?
    %Hq = arg scalar : i32[] @?
    %Nq = arg scalar : i32[] @?
    %Nk = arg scalar : i32[] @?
    %q = load %Q[b, h, q, d_qk] check(q) : T[BLOCK_Q, D_QK] @?
    %zero = init 0 : f32[BLOCK_Q, D_QK] @?
    %kv_end = map expr(cdiv(Nk, BLOCK_KV)) : i32[] @?
    %kv_full_end = map expr(Nk // BLOCK_KV) : i32[] @?
    %keys_full = loop kv ranges(0 .. kv_full_end) carry(sum=%zero) body(@step) cls(full)
    %keys_partial = loop kv ranges(kv_full_end .. kv_end) carry(sum=%keys_full.sum) body(@step) cls(partial)
    %o = map expr(x) uses(x=%keys_partial.sum) : T[BLOCK_Q, D_QK] @?
    store %O[b, h, q, d_qk] %o check(q)
  block @step
    %sum = arg carry : f32[BLOCK_Q, D_QK] @?
    %k = load %K[b, h, kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @?
    %s = dot %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @?
    %masked = mask %s where(kv_idx < Nk) : f32[BLOCK_Q, BLOCK_KV] @?
    %next = dot %masked %k over(BLOCK_KV) acc(%sum) : f32[BLOCK_Q, D_QK] @?
    yield values(sum=%next)
"""


def test_ranges_of_tiles_become_ranges_of_positions():
    before = replace(module(BEFORE, "scheduled"), blocks=Blocks(128))
    assert [line for line in changes(UseBlockLists(), before) if line[0] == "+"] == [
        "+ %KV_RANK_row = base %KV_RANK[b, h, q_start // 128] : ptr[] @?",
        "+ %KV_LIST_row = base %KV_LIST[b, h, q_start // 128] : ptr[] @?",
        "+ %kv_full_end_at = list_position %KV_RANK_row tile(kv_full_end) : i32[] @?",
        (
            "+ %keys_full = loop kv ranges(0 .. kv_full_end_at) carry(sum=%zero) body(@step) cls(full) "
            "listed(%KV_LIST_row)"
        ),
        "+ %kv_end_at = list_position %KV_RANK_row tile(kv_end) : i32[] @?",
        (
            "+ %keys_partial = loop kv ranges(kv_full_end_at .. kv_end_at) carry(sum=%keys_full.sum) body(@step) "
            "cls(partial) listed(%KV_LIST_row)"
        ),
    ]


def test_per_row_bounds_are_left_out_where_data_lists_blocks():
    """A list made from data ends with the last visible block, so programs need not load a bound per row before their
    loops."""
    limit = {"expr": "kv_idx <= limit[b, q_idx]", "params": {"limit": {"tensor": ["B", "Nq"], "dtype": "int32"}}}
    made = list(stages(make_spec({"name": "limit", "head_dim": 64, "mask": limit, "backward": False})))
    at = [name for name, _ in made].index("use-block-lists")
    before, after = (print_kernel(one.kernel("fwd")).splitlines() for _, one in made[at - 1 : at + 1])
    added = [line.strip() for line in after if line not in before]
    assert any("kv_end" in line and "limit_greatest" in line for line in before)
    assert [line for line in added if not line.startswith("%KV")] == [
        "%kv_all = map expr(cdiv(Nk, BLOCK_KV)) : i32[] @?",
        "%kv_all_full_at = list_position %KV_FULL_RANK_row tile(kv_all) : i32[] @?",
        (
            "%keys_full = loop kv ranges(0 .. kv_all_full_at) carry(m=%m_init, l=%l_init, acc=%acc_init) body(@step) "
            "cls(full) listed(%KV_LIST_row)"
        ),
        "%kv_0_at = list_position %KV_RANK_row tile(0) : i32[] @?",
        "%kv_all_at = list_position %KV_RANK_row tile(kv_all) : i32[] @?",
        (
            "%keys_partial = loop kv ranges(kv_0_at .. kv_all_at) "
            "carry(m=%keys_full.m, l=%keys_full.l, acc=%keys_full.acc) body(@step) cls(partial) listed(%KV_LIST_row)"
        ),
    ]


def test_blocks_listed_from_data_are_visited_full_ones_first():
    """The full and the partial loop both run over all tiles, each over its own blocks, because the mask's expression
    cannot separate full from partial tiles."""
    ranks = "    %KV_FULL_RANK = arg in : i32[B, Hq, Tq, Tk1] @?\n    %KV_RANK ="
    before = replace(module(edit(BEFORE, ("    %KV_RANK =", ranks)), "scheduled"), blocks=Blocks(128, data=True))
    assert [line for line in changes(UseBlockLists(), before) if line[0] == "+"] == [
        "+ %KV_FULL_RANK_row = base %KV_FULL_RANK[b, h, q_start // 128] : ptr[] @?",
        "+ %KV_RANK_row = base %KV_RANK[b, h, q_start // 128] : ptr[] @?",
        "+ %KV_LIST_row = base %KV_LIST[b, h, q_start // 128] : ptr[] @?",
        "+ %kv_end_full_at = list_position %KV_FULL_RANK_row tile(kv_end) : i32[] @?",
        (
            "+ %keys_full = loop kv ranges(0 .. kv_end_full_at) carry(sum=%zero) body(@step) cls(full) "
            "listed(%KV_LIST_row)"
        ),
        "+ %kv_0_at = list_position %KV_RANK_row tile(0) : i32[] @?",
        "+ %kv_end_at = list_position %KV_RANK_row tile(kv_end) : i32[] @?",
        (
            "+ %keys_partial = loop kv ranges(kv_0_at .. kv_end_at) carry(sum=%keys_full.sum) body(@step) "
            "cls(partial) listed(%KV_LIST_row)"
        ),
    ]


DATA = parse_spec(
    """
name: data
head_dim: 32
mask:
  any_of:
    - {sliding_window: {left: 5, right: 0}}
    - {expr: "allowed[q_idx, kv_idx]", params: {allowed: {tensor: [Nq, Nk], dtype: bool}}}
"""
)


@cache
def data() -> Module:
    """Return the target module of DATA."""
    return lower(DATA)


@pytest.mark.parametrize(
    ("rule", "old", "new", "reason"),
    [
        (
            "block-lists",
            "ranges(0 .. kv_end_full_at)",
            "ranges(0 .. kv_end)",
            "`kv_end`; expected 0 or a position in %KV_FULL_RANK",
        ),
        (
            "block-lists",
            "ranges(kv_0_at .. kv_end_at)",
            "ranges(0 .. kv_end_at)",
            "runs to or from `0`; expected a position in %KV_RANK",
        ),
        (
            "block-lists",
            "list_position %KV_RANK_row tile(0)",
            "list_position %KV_FULL_RANK_row tile(0)",
            "`kv_0_at`; expected a position in %KV_RANK",
        ),
        (
            "covers",
            "list_position %KV_FULL_RANK_row tile(kv_end)",
            "list_position %KV_FULL_RANK_row tile(0)",
            "run 0 .. 0, which is not proven to be",
        ),
        (
            "covers",
            "cls(full) listed",
            "cls(partial) listed",
            "the loops over @step are partial, partial; expected full and partial",
        ),
        (
            "block-lists",
            "BLOCK_Q=128 BLOCK_KV=32 num_warps=8 num_stages=1",
            "BLOCK_Q=64 BLOCK_KV=32 num_warps=8 num_stages=1",
            "64x32; expected",
        ),
        ("full-is-proven", " listed(%KV_LIST_row)", "", "is proven to hold nothing masked"),
    ],
)
def test_wrong_uses_of_lists_from_data_are_refused(rule, old, new, reason):
    text = print_module(data())
    with pytest.raises(VerifyError) as caught:
        verify(parse_module(edit(text, (old, new)), "edited.ir"))
    assert (caught.value.rule, reason in caught.value.reason) == (rule, True), caught.value.reason


def test_a_module_without_the_kernel_that_lists_its_blocks_is_refused():
    found = data()
    without = replace(found, kernels=found.kernels[:-1], schedules=found.schedules[:-1])
    assert ("host-launches", "host @count: it launches @blocks; the kernels are fwd, dq, delta, dkdv, jvp") in list(
        reasons(without)
    )


def test_a_module_without_blocks_is_unchanged():
    before = module(BEFORE, "scheduled")
    assert UseBlockLists().run(before) is before


def test_each_head_of_a_group_has_its_own_lists():
    """In dK/dV of GQA, lists are found inside the loop over heads, by the query head."""
    after = lowered("butterfly_gqa")["use-block-lists"].kernel("dkdv")
    row = after.op("Q_LIST_row")
    assert after.graph.nodes["Q_LIST_row"]["block"] == "group"
    assert [str(i) for i in row.src.index[:2]] == ["b", "g + group*hkv"]


def test_lists_without_blocks_and_tiles_larger_than_blocks_are_refused():
    dense, target = (lowered(name)["legalize-triton"] for name in ("causal_mha", "butterfly_gqa"))
    fwd = dense.kernel("fwd").rewrite(lambda _, op: [replace(op, listed="K_head") if op.name == "keys_full" else op])
    with pytest.raises(VerifyError, match="%keys_full visits listed tiles, and is in a module without blocks"):
        verify(dense.map_kernels(lambda k: fwd if k.name == "fwd" else k))
    schedules = tuple((name, tuple(replace(r, block_q=128) for r in rows)) for name, rows in target.schedules)
    found = list(block_lists(replace(target, schedules=schedules), target.kernel("fwd")))
    assert found and all("do not divide blocks of 64" in reason for reason in found)


@pytest.mark.parametrize("name", ["keys_full", "keys_partial"])
def test_a_loop_without_a_list_is_refused(name):
    """If one loop visited all tiles, the verifier of the target phase would refuse the module."""
    target = lowered("block_sparse_mha")["legalize-triton"]

    def without_list(kernel):
        return kernel.rewrite(lambda _, op: [replace(op, listed=None) if op.name == name else op])

    with pytest.raises(VerifyError, match=f"%{name} also visits tiles of masked blocks"):
        verify(target.map_kernels(without_list))
