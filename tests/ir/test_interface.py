"""What the wrapper launches: edits of a module's text that its kernels survive, and the wrapper would not."""

from __future__ import annotations

import re

import pytest

from attngen.emit.render import render
from attngen.errors import VerifyError
from attngen.ir.text import parse_module, print_module
from attngen.verify import verify
from tests.helpers import SPECS, edit, target

KERNELS = "expected fwd, dq, delta, dkdv or fwd, dq, delta, dk, dv"
PACKED = f"{KERNELS} or fwd, dq, delta, dkdv, packed or fwd, dq, delta, dk, dv, packed"
BY_KEY = "expected fwd, fwd_end, delta, bwd, dq_end, and a schedule for each"
BROKEN = [
    ("full_mha", "%K = arg in : T[B, Hkv, Nk, D_QK]", "%K = arg in : T[B, Hq, Nk, D_QK]", "expected `arg in : T[B, Hkv, Nk, D_QK]`"),
    ("full_mha", "    %scale =", "    %extra = arg scalar : f32[] @reg\n    %scale =", "%extra is `arg scalar : f32[]`; expected one of"),
    ("causal_gqa", "q in cdiv(Nq, BLOCK_Q)", "q in cdiv(Nq, BLOCK_Q) - 1", "the grid is not q in cdiv(Nq, BLOCK_Q), h in Hq, b in B"),
    ("causal_gqa", "hkv in Hkv, b in B)", "b in B, hkv in Hkv)", "the grid is not kv in cdiv(Nk, BLOCK_KV), split in splits, hkv in"),
    ("causal_fa1", "kernel @fwd grid(h in Hq, b in B)", "kernel @fwd grid(b in B, h in Hq)", "the grid is not h in Hq, b in B, which is"),
    ("causal_fa1", "  order kv_outer\n", "  order inner\n", "`order inner`; expected q_outer or kv_outer"),
    ("causal_fa1", "  order kv_outer\n", "", "the kernels are fwd, fwd_end, delta, bwd, dq_end; expected fwd, dq, delta, dkdv or"),
    ("padding_mha", "derive i32 key", "derive f32 key", "%KEY_PADDING_FIRST is `arg in : i32[B]`; expected `arg in : f32[B]`"),
    ("padding_mha", "= key_span(key_padding)", "= key_span(visible)", "is of `visible`, which is no input"),
    ("padding_mha", "input key_padding : b1[B, Nk]", "input key_padding : i32[B, Nk]", "%KEY_PADDING is `arg in : b1[B, Nk]`; expected"),
    ("padding_mha", "input key_padding : b1", "input key_padding : i64", "expected b1, i32, f32 or T of B, Hq, Hkv, Nq, Nk, *, numbers"),
    ("padding_mha", "  input key", "  input scale : f32[B] why\n  input key", "`scale` is declared twice, is a name of the wrapper"),
    ("temperature_mha", "input temperature :", "input dtemperature : f32[Hq] why\n  input temperature :", "`dtemperature` is declared"),
    ("temperature_mha", "learn temperature[h]", "learn temperature[far + distance]", "has `far`; expected Nk, Nq, b, distance"),
    ("causal_gqa", "  dropout no\n", "  dropout no\n  input unused : b1[B] why\n", "`input unused` is read by no kernel"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "old", "new", "reason"), BROKEN, ids=[case[3][:40] for case in BROKEN])
def test_an_edit_that_the_wrapper_cannot_launch_is_refused(spec: str, old: str, new: str, reason: str) -> None:
    module = verify(parse_module(edit(print_module(target(spec)), (old, new)), "edited.ir"))
    with pytest.raises(VerifyError, match=re.escape(reason)) as error:
        render(module)
    assert (error.value.rule, error.value.ir_text) == ("interface", print_module(module))


@pytest.mark.parametrize("name", SPECS)
def test_no_kernel_may_be_missing(name: str) -> None:
    module = target(name)
    text, known = print_module(module), KERNELS if module.sharing == "mha" or module.blocks else PACKED
    expected = BY_KEY if module.order == "kv_outer" else f"{known}, and a schedule for each"
    for kernel in re.findall(r"kernel @(?!packed ).*?(?=\n\n|\nschedule)", text, re.DOTALL):
        with pytest.raises(VerifyError, match=expected):
            render(parse_module(text.replace(kernel, ""), "edited.ir"))
        with pytest.raises(VerifyError, match=expected):
            render(parse_module(text.replace(kernel, kernel.replace("kernel @", "kernel @my_", 1)), "edited.ir"))
