"""Edits of a module's text that its kernels allow, but with which the wrapper could not launch them, are refused."""

from __future__ import annotations

import re

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.verify import verify
from attngen.verify.host import reasons
from tests.helpers import SPECS, edit, target

BROKEN = [
    ("causal_fa1", "interface", "  order kv_outer\n", "  order inner\n", "`order inner`; expected q_outer or kv_outer"),
    (
        "padding_mha",
        "interface",
        "= key_span(key_padding)",
        "= key_span(visible)",
        "is of `visible`, which is no input",
    ),
    (
        "padding_mha",
        "interface",
        "  input key",
        "  input scale : f32[B] why\n  input key",
        "`scale` is declared twice, is a name of the",
    ),
    (
        "padding_mha",
        "interface",
        "  input key",
        "  input k_strides : f32[B] why\n  input key",
        "`k_strides` is declared twice, is a name",
    ),
    (
        "temperature_mha",
        "host-arguments",
        "input temperature :",
        "input dtemperature : f32[Hq] why\n  input temperature :",
        "%dTEMPERATURE and the input `dtemperature` are one variable",
    ),
    (
        "temperature_mha",
        "interface",
        "gradient temperature[h]",
        "gradient temperature[far + distance]",
        "has `far`; expected Nk, Nq, b, distance",
    ),
    (
        "causal_gqa",
        "interface",
        "  dropout no\n",
        "  dropout no\n  input unused : b1[B] why\n",
        "`input unused` is read by no kernel",
    ),
    (
        "causal_gqa",
        "scheduled-everywhere",
        "schedule @fwd",
        "schedule @forward",
        "no device class has a config at 2 bytes",
    ),
    (
        "padding_mha",
        "host-arguments",
        "input key_padding : b1[B, Nk]",
        "input key_padding : i32[B, Nk]",
        "%KEY_PADDING is b1[B, Nk]; expected i32[",
    ),
    (
        "padding_mha",
        "mask",
        "key_padding_run[B]",
        "key_padding_run[Nk]",
        "assumes more about `key_padding` than the header states",
    ),
    (
        "padding_mha",
        "interface",
        "  dropout no\n",
        "  dropout no\n  input more : i64[B] why\n",
        "expected b1, i32, f32 or T of B, Hq, Hkv, Nq, Nk, *, numbers",
    ),
]


@pytest.mark.parametrize(("spec", "rule", "old", "new", "reason"), BROKEN, ids=[case[4][:40] for case in BROKEN])
def test_an_edit_that_the_wrapper_cannot_launch_is_refused(
    spec: str, rule: str, old: str, new: str, reason: str
) -> None:
    module = parse_module(edit(print_module(target(spec)), (old, new)), "edited.ir")
    with pytest.raises(VerifyError, match=re.escape(reason)) as error:
        render(verify(module))
    assert error.value.rule == rule


@pytest.mark.share(32)
@pytest.mark.parametrize("name", SPECS)
def test_no_kernel_may_be_missing(name: str) -> None:
    """A kernel may also not have another name than the one that a host program launches, and there may be no additional
    kernel. Warp-specialized variants are exempt."""
    text = print_module(target(name))
    for kernel in re.findall(r"kernel @\w+ (?!backend|variant_of).*?(?=\n\n|\nschedule)", text, re.DOTALL):
        called = re.match(r"kernel @(\w+)", kernel)[1]
        more = kernel.replace(f"@{called}", "@more", 1)
        for edited, reason in (
            (text.replace(kernel, ""), f"it launches @{called}; the kernels are"),
            (text.replace(kernel, more), f"it launches @{called}; the kernels are"),
            (text.replace(kernel, f"{kernel}\n\n{more}"), "no host program launches @more"),
        ):
            assert any(reason in sentence for _, sentence in reasons(parse_module(edited, "edited.ir")))
