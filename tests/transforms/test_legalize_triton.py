"""legalize-triton computes pointers once, casts operands and pads head dimensions."""

from __future__ import annotations

import pytest

from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.targets.triton.legalize import LegalizeTriton
from attngen.verify import verify
from tests.helpers import SMALL, changes, edit, module, target

DEVICES = ("sm80", "sm90", "sm100", "gfx942", "any")
CONFIGS = "schedule @fwd\n" + "".join(
    f"  {d} bytes=2 rows<=inf : BLOCK_Q=64 BLOCK_KV=64 num_warps=4 num_stages=1\n" for d in DEVICES
)
# SMALL with heads and memory spaces; all values are in registers.
SCHEDULED = edit(
    SMALL.replace("@?", "@reg"),
    ("body(@step)", "body(@step) cls(partial)"),
    ("BLOCK_Q))", "BLOCK_Q), h in Hq, b in B)"),
    ("%Nq = arg scalar", "%Hq = arg scalar : i32[] @reg\n    %Nq = arg scalar"),
    ("T[Nq, D_QK]", "T[B, Hq, Nq, D_QK]"),
    ("T[Nk, D_QK]", "T[B, Hq, Nk, D_QK]"),
    ("T[Nq, D_QK]", "T[B, Hq, Nq, D_QK]"),
    ("%Q[q, d_qk]", "%Q[b, h, q, d_qk]"),
    ("%K[kv, d_qk]", "%K[b, h, kv, d_qk]"),
    ("%O[q, d_qk]", "%O[b, h, q, d_qk]"),
)


def added(before):
    return [line for line in changes(LegalizeTriton(), before) if line[0] == "+"]


def test_heads_are_addressed_once_and_operands_are_cast():
    assert added(module(SCHEDULED + CONFIGS, "scheduled")) == [
        "+ %Q_head = base %Q[b, h] : ptr[] @reg",
        "+ %O_head = base %O[b, h] : ptr[] @reg",
        "+ %K_head = base %K[b, h] : ptr[] @reg",
        "+ %q = load %Q_head[q, d_qk] check(q) : T[BLOCK_Q, D_QK] @reg",
        "+ store %O_head[q, d_qk] %o check(q)",
        "+ %k = load %K_head[kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @reg",
        "+ %masked_cast = map expr(masked) uses(masked=%masked) : T[BLOCK_Q, BLOCK_KV] @reg",
        "+ %next = dot %masked_cast %k over(BLOCK_KV) acc(%sum) : f32[BLOCK_Q, D_QK] @reg",
    ]


def test_a_head_dim_that_is_no_power_of_two_is_padded_and_checked():
    lines = added(module(SCHEDULED + CONFIGS, "scheduled", head_dim=80))
    assert "+ %q = load %Q_head[q, d_qk] check(q, d_qk) : T[BLOCK_Q, D_QK_PAD] @reg" in lines
    assert "+ %k = load %K_head[kv, d_qk] check(kv if partial, d_qk) : T[BLOCK_KV, D_QK_PAD] @reg" in lines
    assert "+ %s = dot %q %k over(D_QK_PAD) : f32[BLOCK_Q, BLOCK_KV] @reg" in lines
    assert "+ store %O_head[q, d_qk] %o check(q, d_qk)" in lines
    assert not any("= arg" in line and "_PAD" in line and "carry" not in line for line in lines)


def test_fp32_products_have_a_precision():
    configs = CONFIGS.replace("bytes=2", "bytes=4")
    lines = added(module(SCHEDULED + configs, "scheduled", dtype="fp32"))
    assert "+ %s = dot %q %k over(D_QK) precision(ieee) : f32[BLOCK_Q, BLOCK_KV] @reg" in lines
    assert not any("precision" in line for line in added(module(SCHEDULED + CONFIGS, "scheduled")))


def test_a_pointer_is_computed_outside_the_loops_that_do_not_change_it():
    """In dK/dV of grouped heads, keys are fixed for the program, and queries change with each head of the group."""
    kernel = target("causal_gqa").kernel("dkdv")
    assert {
        op.name: kernel.graph.nodes[op.name]["block"] for op in kernel.ops() if op.name in ("K_head", "Q_head")
    } == {
        "K_head": "entry",
        "Q_head": "group",
    }


@pytest.mark.parametrize("head_dim, recomputed", [(128, False), (192, True), (256, True)])
def test_a_loop_with_a_wide_accumulator_recomputes_invariants(head_dim, recomputed):
    loops = [line for line in added(module(SCHEDULED + CONFIGS, "scheduled", head_dim=head_dim)) if " = loop " in line]
    assert [line.endswith("cls(partial) recompute(yes)") for line in loops] == [True] * recomputed


def test_a_loop_with_two_accumulators_or_a_loop_in_it_recomputes():
    made = target("causal_mqa")
    flags = {
        kernel.name: {loop.cls: loop.recompute for loop in kernel.loops} for kernel in made.kernels if kernel.loops
    }
    assert flags == {
        "fwd": {"full": False, "partial": False},
        "dkdv": {"all": True, "full": True, "partial": True},
        "bwd": {"full": True, "partial": True},
        "dkdv_end": {"all": True},
        "dq": {"full": False, "partial": False},
        "packed": {"full": False, "partial": False},
        "jvp": {"full": False, "partial": False},
    }


@pytest.mark.parametrize(
    "old, new, rule, reason",
    [
        (CONFIGS, "", "scheduled-everywhere", "no device class has a config at 2 bytes"),
        ("BLOCK_Q=64", "BLOCK_Q=48", "powers-of-two", "sm80: BLOCK_Q=48; Triton needs a power of two, 16 at least"),
    ],
)
def test_schedules_that_triton_cannot_run_are_refused(old, new, rule, reason):
    before = module(edit(SCHEDULED + CONFIGS, (old, new)), "scheduled")
    with pytest.raises(VerifyError, match=f"rule `{rule}`: .*{reason}"):
        verify(LegalizeTriton().run(before))


@pytest.mark.parametrize(
    "old, new, rule",
    [("dot %masked_cast %k", "dot %masked %k", "dot-operands"), ("check(q, d_qk)", "check(q)", "padding-checked")],
)
def test_undoing_the_legalization_is_refused(old, new, rule):
    text = print_module(LegalizeTriton().run(module(SCHEDULED + CONFIGS, "scheduled", head_dim=80)))
    with pytest.raises(VerifyError, match=f"rule `{rule}`"):
        verify(parse_module(edit(text, (old, new))))
