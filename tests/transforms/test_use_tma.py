"""use-tma loads tiles by tensor descriptor where TMA can copy them."""

from __future__ import annotations

import pytest

from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.targets.triton.use_tma import UseTMA
from attngen.verify import verify
from tests.helpers import changes, edit, lowered, module, target

# The sums of scores of SMALL, for each head of two tensors.
HEADS = """
kernel @fwd grid(q in cdiv(Nq, BLOCK_Q), h in Hq, b in B)
  block @entry
    %Q = arg in : T[B, Hq, Nq, D_QK] @hbm
    %K = arg in : T[B, Hkv, Nk, D_QK] @hbm
    %O = arg out : T[B, Hq, Nq, D_QK] @hbm
    %Hq = arg scalar : i32[] @reg
    %Nq = arg scalar : i32[] @reg
    %Nk = arg scalar : i32[] @reg
    %q = load %Q[b, h, q, d_qk] check(q) : T[BLOCK_Q, D_QK] @sram
    %zero = init 0 : f32[BLOCK_Q, D_QK] @reg
    %keys = loop kv ranges(0 .. cdiv(Nk, BLOCK_KV)) carry(sum=%zero) body(@step)
    %o = map expr(x) uses(x=%keys.sum) : T[BLOCK_Q, D_QK] @reg
    store %O[b, h, q, d_qk] %o check(q)
  block @step
    %sum = arg carry : f32[BLOCK_Q, D_QK] @reg
    %k = load %K[b, h, kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @sram
    %s = dot %q %k over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @reg
    %masked = mask %s where(kv_idx < Nk) : f32[BLOCK_Q, BLOCK_KV] @reg
    %next = dot %masked %k over(BLOCK_KV) acc(%sum) : f32[BLOCK_Q, D_QK] @reg
    yield values(sum=%next)
"""


def test_tiles_of_a_heads_rows_are_loaded_by_descriptor():
    assert changes(UseTMA(), module(HEADS)) == [
        "- %q = load %Q[b, h, q, d_qk] check(q) : T[BLOCK_Q, D_QK] @sram",
        "+ %q = load %Q[b, h, q, d_qk] check(q) via(descriptor) : T[BLOCK_Q, D_QK] @sram",
        "- %k = load %K[b, h, kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @sram",
        "+ %k = load %K[b, h, kv, d_qk] check(kv if partial) via(descriptor) : T[BLOCK_KV, D_QK] @sram",
    ]


def test_a_tile_in_registers_is_not():
    text = edit(
        HEADS, ("check(kv if partial) : T[BLOCK_KV, D_QK] @sram", "check(kv if partial) : T[BLOCK_KV, D_QK] @reg")
    )
    assert [line.split()[1] for line in changes(UseTMA(), module(text))] == ["%q", "%q"]


def test_row_statistics_and_outputs_are_not():
    after = print_module(lowered("causal_gqa")["use-tma"])
    described = {line.split()[0] for line in after.splitlines() if "via(descriptor)" in line}
    assert described == {"%q", "%k", "%v", "%do", "%tq", "%tk", "%tv"}


def test_a_descriptor_for_row_statistics_is_refused():
    text = edit(
        print_module(target("causal_gqa")),
        ("%lse = load %LSE_head[q] check(q)", "%lse = load %LSE_head[q] check(q) via(descriptor)"),
    )
    with pytest.raises(
        VerifyError, match=r"rule `described`: .*%lse is read via\(descriptor\); expected `descriptor`, of a tile"
    ):
        verify(parse_module(text))
