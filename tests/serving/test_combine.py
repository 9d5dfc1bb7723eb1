"""The rule `combine`: split-KV programs store normalised outputs with their LSE, and @combine weighs them by it."""

from __future__ import annotations

import re
from functools import cache

import pytest

from attngen.errors import VerifyError
from attngen.ir import Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower, stages
from attngen.spec import make_spec
from attngen.verify import verify
from tests.helpers import edit, lowered, target

pytestmark = pytest.mark.numerics

_SINGLE = make_spec({"name": "single", "head_dim": 32, "dtype": "fp32", "mask": "causal", "cache": "contiguous"})


@cache
def _text(name: str) -> str:
    """Return the target IR of a committed spec, or of the fp32 spec."""
    if name != "fp32":
        return print_module(target(name))
    return print_module(lower(_SINGLE))


def _changed(name: str, kernel: str, old: str, new: str) -> Module:
    text = _text(name)
    at = text.index(f"kernel @{kernel} ")
    end = text.index("\nkernel ", at + 1)
    return parse_module(text[:at] + edit(text[at:end], (old, new)) + text[end:])


CHANGES = [
    (
        "decode_gqa",
        "decode",
        "expr(select(l > 0, m*qk_scale + log2(l), -inf))",
        "expr(select(l > 0, m + log2(l), -inf))",
        "%lse2_partial is",
    ),
    ("decode_gqa", "decode", "m*qk_scale + log2(l), -inf", "m*qk_scale + log2(l), 0", "%lse2_partial is"),
    ("decode_gqa", "decode", "expr(acc*inv_l)", "expr(acc*inv_l**2)", "%o_partial is"),
    ("decode_gqa", "decode", "select(l > 0, 1/l, 0)", "select(l > 1, 1/l, 0)", "%o_partial is"),
    ("decode_gqa", "decode", "expr(acc*inv_l)", "expr(acc + inv_l)", "%o_partial is"),
    ("decode_gqa", "decode", "expr(acc*inv_l)", "expr(2*acc*inv_l)", "%o_partial is"),
    ("decode_paged_fp8_gqa", "decode", "expr(acc*inv_l)", "expr(-acc*inv_l)", "%o_partial is"),
    (
        "decode_gqa",
        "decode",
        "%rescaled = map expr(acc*alpha)",
        "%rescaled = map expr(2*acc*alpha)",
        "expected acc*soft.alpha",
    ),
    ("decode_gqa", "decode", "expr(alpha*l + p_sum)", "expr(alpha*l + 2*p_sum)", "%l_next is"),
    ("decode_gqa", "decode", "yield values(m=%soft.m,", "yield values(m=%m,", "as its maximum; expected %soft.m"),
    ("decode_gqa", "combine", "expr(acc*inv_l)", "expr(-acc*inv_l)", "%o is"),
    ("decode_gqa", "combine", "expr(max(greatest, m))", "expr(max(greatest, m, 0))", "%m_next is"),
    ("decode_gqa", "combine", "%greatest = reduce max", "%greatest = reduce min", "%m_next is"),
    ("decode_gqa", "combine", "expr(alpha*l + l_sum)", "expr(l + l_sum)", "%l_next is"),
    ("decode_gqa", "combine", "%l_sum = reduce sum", "%l_sum = reduce max", "%l_next is"),
    ("decode_gqa", "combine", "expr(acc*alpha + o_sum)", "expr(acc*alpha + 2*o_sum)", "%acc_next is"),
    ("decode_gqa", "combine", "expr(o_partial*weights)", "expr(o_partial + weights)", "%acc_next is"),
    ("decode_gqa", "combine", "other(-inf)", "other(0)", "%lse2_partial is 0 past the last split; expected -inf"),
    (
        "decode_gqa",
        "combine",
        "d_v] check(KV_splits, q)",
        "d_v] check(KV_splits, q) other(-inf)",
        "%o_partial is -inf past the last split",
    ),
    ("decode_gqa", "combine", "expr(exp2(-base + m))", "expr(exp2(-base + 2*m))", "%l_next is"),
    ("decode_gqa", "combine", "%l_init = init 0", "%l_init = init 1", "%l_init is the start of l; expected 0"),
    ("decode_gqa", "combine", "LN2*(m + log2(l)), -inf", "m + log2(l), -inf", "%lse is"),
    ("decode_gqa", "combine", "expr(acc*inv_l)", "expr(2*acc)", "%o is"),
    ("decode_sinks_paged_gqa", "combine", "expr(l*shrunk + exp2(", "expr(l + exp2(", "%o is"),
    ("fp32", "decode", "expr(select(l > 0, m*qk_scale, -inf))", "expr(select(l > 0, m, -inf))", "%m_partial is"),
    ("fp32", "decode", "store %L_PARTIAL_head[q] %keys_partial.l", "store %L_PARTIAL_head[q] %inv_l", "%inv_l is"),
    ("fp32", "combine", "expr(l_partial*exp2(", "expr(l_partial**2*exp2(", "%l_next is"),
    (
        "fp32",
        "combine",
        "check(KV_splits, q) : f32[BLOCK_KV_splits, BLOCK_Q]",
        "check(KV_splits, q) other(1) : f32[BLOCK_KV_splits, BLOCK_Q]",
        "%l_partial is 1 past",
    ),
]


@pytest.mark.parametrize(("name", "kernel", "old", "new", "said"), CHANGES)
def test_other_sums_are_refused(name: str, kernel: str, old: str, new: str, said: str) -> None:
    with pytest.raises(VerifyError, match="rule `combine`") as error:
        verify(_changed(name, kernel, old, new))
    assert said in str(error.value) and "expected" in str(error.value)


def test_halves_do_not_take_each_others_sums() -> None:
    """Each accumulator of half the columns is rescaled itself, and adds products with its own columns."""
    text = print_module(target("decode_paged_fp8_gqa"))
    at = text.index("kernel @decode ")
    even, odd = (f"uses(acc=%acc_{half}, alpha=%soft.alpha)" for half in ("even", "odd"))
    swapped = text[at:].replace(even, "uses(other)", 1).replace(odd, even, 1).replace("uses(other)", odd, 1)
    with pytest.raises(VerifyError, match="rule `combine`: .*%acc_even_next is .*; expected acc_even.soft.alpha"):
        verify(parse_module(text[:at] + swapped))


@pytest.mark.parametrize("name", ["decode_gqa", "fp32"])
@pytest.mark.parametrize("kernel", ["decode", "combine"])
def test_each_split_has_its_own_place(kernel: str, name: str) -> None:
    """Splits of all sequences are numbered together. Other rules would find the edit too, so only this rule runs."""
    from attngen.verify.combine import combine

    places = {
        "decode": ("KV_split + first_item", "[hkv, KV_split + first_item]", "[hkv, KV_split]"),
        "combine": ("KV_splits + first_item", "_head[KV_splits + first_item, q", "_head[KV_splits, q"),
    }
    expected, old, new = (place.replace("hkv", "h" if name == "fp32" else "hkv") for place in places[kernel])
    for tensor in ("O_PARTIAL", *(("M_PARTIAL", "L_PARTIAL") if name == "fp32" else ("LSE2_PARTIAL",))):
        module = _changed(name, kernel, f"%{tensor}{old}", f"%{tensor}{new}")
        assert [
            reason
            for reason in combine(module, module.kernel(kernel))
            if re.search(rf"; expected .*{re.escape(expected)}", reason)
        ]


def test_an_iteration_loads_each_tensor_once() -> None:
    """Two loads of the LSE might differ in their values past the last split."""
    text = print_module(target("decode_gqa"))
    line = next(line for line in text.splitlines() if "%lse2_partial = load" in line)
    twice = line.replace("%lse2_partial", "%lse2_more").replace("other(-inf)", "other(0)")
    with pytest.raises(VerifyError, match="rule `combine`: .* loads LSE2_PARTIAL, O_PARTIAL; expected"):
        verify(
            parse_module(edit(text, (line, f"{twice}\n{line}"), ("reduce max %lse2_partial", "reduce max %lse2_more")))
        )


def test_a_split_is_stored_whole() -> None:
    """Its sum of weights is stored, too. Other rules would find the edit as well, so only this rule runs."""
    from attngen.verify.combine import combine

    module = _changed("fp32", "decode", "store %L_PARTIAL_head[q]", "store %M_PARTIAL_head[q]")
    said = "it stores M_PARTIAL, O_PARTIAL; expected O_PARTIAL and LSE2_PARTIAL, or O_PARTIAL, M_PARTIAL and L_PARTIAL"
    assert list(combine(module, module.kernel("decode"))) == [said]


def test_the_maximum_is_carried_by_its_name() -> None:
    text = print_module(target("decode_gqa"))
    at = text.index("kernel @combine ")
    end = text.index("\nkernel ", at + 1)
    renamed = text[at:end].replace("carry(m=", "carry(mx=").replace("%m =", "%mx =").replace("values(m=", "values(mx=")
    renamed = (
        renamed.replace("=%m,", "=%mx,").replace("=%m)", "=%mx)").replace("over_KV_splits.m,", "over_KV_splits.mx,")
    )
    with pytest.raises(
        VerifyError, match="rule `combine`: .*%over_KV_splits carries mx, l, acc; expected m, l and sums"
    ):
        verify(parse_module(text[:at] + renamed + text[end:]))


def test_iterations_combine_all_splits() -> None:
    """Other rules find the edit, too."""
    from attngen.verify.combine import combine

    module = _changed(
        "decode_gqa",
        "combine",
        "ranges(0 .. cdiv(num_KV_splits, BLOCK_KV_splits))",
        "ranges(1 .. cdiv(num_KV_splits, BLOCK_KV_splits))",
    )
    assert [
        reason for reason in combine(module, module.kernel("combine")) if reason.endswith("and a loop over all splits")
    ]
    with pytest.raises(VerifyError, match="%over_KV_splits does not run over all tiles of KV_splits"):
        verify(module)


@pytest.mark.share(16)
def test_the_rule_holds_in_every_phase() -> None:
    for name in ("decode_gqa", "decode_sinks_paged_gqa", "decode_paged_fp8_gqa", "decode_mla", "decode_fp8_mla"):
        for step in ("build", "split-kv", "dce"):
            verify(lowered(name)[step])
    for module in stages(_SINGLE):
        verify(module[1])
