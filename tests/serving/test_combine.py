"""The rule `joins`: outputs of parts of the keys are what programs say, and are weighed by their LSE."""

from __future__ import annotations

from functools import cache

import pytest

from attngen.errors import VerifyError
from attngen.ir.graph import Module
from attngen.ir.text import parse_module, print_module
from attngen.lowering.pipeline import lower, stages
from attngen.spec import make_spec
from attngen.verify import verify
from tests.helpers import edit, lowered, target

_SINGLE = make_spec({"name": "single", "head_dim": 32, "dtype": "fp32", "mask": "causal", "cache": "contiguous"})


@cache
def _text(name: str) -> str:
    """The target IR of a committed spec, or of one for fp32."""
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
        "%lse2_part is",
    ),
    ("decode_gqa", "decode", "m*qk_scale + log2(l), -inf", "m*qk_scale + log2(l), 0", "%lse2_part is"),
    ("decode_gqa", "decode", "expr(acc*inv_l)", "expr(acc*inv_l**2)", "%o_part is"),
    ("decode_gqa", "decode", "select(l > 0, 1/l, 0)", "select(l > 1, 1/l, 0)", "%o_part is"),
    ("decode_gqa", "decode", "expr(acc*inv_l)", "expr(acc + inv_l)", "%o_part is"),
    ("decode_gqa", "decode", "expr(acc*inv_l)", "expr(2*acc*inv_l)", "%o_part is"),
    ("decode_paged_fp8_gqa", "decode", "expr(acc*inv_l)", "expr(-acc*inv_l)", "%o_part is"),
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
    ("decode_gqa", "combine", "expr(alpha*l + l_parts)", "expr(l + l_parts)", "%l_next is"),
    ("decode_gqa", "combine", "%l_parts = reduce sum", "%l_parts = reduce max", "%l_next is"),
    ("decode_gqa", "combine", "expr(acc*alpha + o_sum)", "expr(acc*alpha + 2*o_sum)", "%acc_next is"),
    ("decode_gqa", "combine", "expr(o_parts*weights)", "expr(o_parts + weights)", "%acc_next is"),
    ("decode_gqa", "combine", "other(-inf)", "other(0)", "%lse2_parts is 0 past the last part; expected -inf"),
    (
        "decode_gqa",
        "combine",
        "d_v] check(joined, q)",
        "d_v] check(joined, q) other(-inf)",
        "%o_parts is -inf past the last part",
    ),
    ("decode_gqa", "combine", "expr(exp2(-base + m))", "expr(exp2(-base + 2*m))", "%l_next is"),
    ("decode_gqa", "combine", "%l_init = init 0", "%l_init = init 1", "%l_init is where l starts; expected 0"),
    ("decode_gqa", "combine", "LN2*(m + log2(l)), -inf", "m + log2(l), -inf", "%lse is"),
    ("decode_gqa", "combine", "expr(acc*inv_l)", "expr(2*acc)", "%o is"),
    ("decode_sinks_paged_gqa", "combine", "expr(l*shrunk + exp2(", "expr(l + exp2(", "%o is"),
    ("fp32", "decode", "expr(select(l > 0, m*qk_scale, -inf))", "expr(select(l > 0, m, -inf))", "%max_part is"),
    ("fp32", "decode", "store %SUM_PARTS_head[q] %keys_partial.l", "store %SUM_PARTS_head[q] %inv_l", "%inv_l is"),
    ("fp32", "combine", "expr(sum_parts*exp2(", "expr(sum_parts**2*exp2(", "%l_next is"),
    (
        "fp32",
        "combine",
        "check(joined, q) : f32[BLOCK_PARTS, BLOCK_Q]",
        "check(joined, q) other(1) : f32[BLOCK_PARTS, BLOCK_Q]",
        "%sum_parts is 1 past",
    ),
]


@pytest.mark.parametrize(("name", "kernel", "old", "new", "said"), CHANGES)
def test_other_sums_are_refused(name: str, kernel: str, old: str, new: str, said: str) -> None:
    with pytest.raises(VerifyError, match="rule `joins`") as error:
        verify(_changed(name, kernel, old, new))
    assert said in str(error.value) and "expected" in str(error.value)


def test_halves_do_not_take_each_others_sums() -> None:
    """Each is rescaled, and takes products of its own columns."""
    text = print_module(target("decode_paged_fp8_gqa"))
    at = text.index("kernel @decode ")
    even, odd = (f"uses(acc=%acc_{half}, alpha=%soft.alpha)" for half in ("even", "odd"))
    swapped = text[at:].replace(even, "uses(other)", 1).replace(odd, even, 1).replace("uses(other)", odd, 1)
    with pytest.raises(VerifyError, match="rule `joins`: .*%acc_even_next is .*; expected acc_even.soft.alpha"):
        verify(parse_module(text[:at] + swapped))


@pytest.mark.parametrize("name", ["decode_gqa", "fp32"])
@pytest.mark.parametrize("kernel", ["decode", "combine"])
def test_each_part_has_its_own_place(kernel: str, name: str) -> None:
    """Items count the parts of all sequences. Other rules see that too, so this one is asked alone."""
    from attngen.verify.combine import joins

    places = {
        "decode": ("[hkv, first_item + part]", "[hkv, part]"),
        "combine": ("_head[first_item + joined, q", "_head[joined, q"),
    }
    old, new = (place.replace("hkv", "h" if name == "fp32" else "hkv") for place in places[kernel])
    for tensor in ("O_PARTS", *(("MAX_PARTS", "SUM_PARTS") if name == "fp32" else ("LSE2_PARTS",))):
        module = _changed(name, kernel, f"%{tensor}{old}", f"%{tensor}{new}")
        assert [
            reason
            for reason in joins(module, module.kernel(kernel))
            if "expected" in reason and "first_item + " in reason
        ]


def test_a_turn_loads_each_tensor_once() -> None:
    """Two loads of LSEs might differ in what they have past the last part."""
    text = print_module(target("decode_gqa"))
    line = next(line for line in text.splitlines() if "%lse2_parts = load" in line)
    twice = line.replace("%lse2_parts", "%lse2_more").replace("other(-inf)", "other(0)")
    with pytest.raises(VerifyError, match="rule `joins`: .* loads LSE2_PARTS, O_PARTS; expected"):
        verify(
            parse_module(edit(text, (line, f"{twice}\n{line}"), ("reduce max %lse2_parts", "reduce max %lse2_more")))
        )


def test_a_part_is_stored_whole() -> None:
    """The sum of its weights, too. Other rules see that as well, so this one is asked alone."""
    from attngen.verify.combine import joins

    module = _changed("fp32", "decode", "store %SUM_PARTS_head[q]", "store %MAX_PARTS_head[q]")
    said = "it stores MAX_PARTS, O_PARTS; expected O_PARTS and LSE2_PARTS, or O_PARTS, MAX_PARTS and SUM_PARTS"
    assert list(joins(module, module.kernel("decode"))) == [said]


def test_the_maximum_is_carried_by_its_name() -> None:
    text = print_module(target("decode_gqa"))
    at = text.index("kernel @combine ")
    end = text.index("\nkernel ", at + 1)
    renamed = text[at:end].replace("carry(m=", "carry(mx=").replace("%m =", "%mx =").replace("values(m=", "values(mx=")
    renamed = renamed.replace("=%m,", "=%mx,").replace("=%m)", "=%mx)").replace("parts_of_keys.m,", "parts_of_keys.mx,")
    with pytest.raises(VerifyError, match="rule `joins`: .*%parts_of_keys carries mx, l, acc; expected m, l and sums"):
        verify(parse_module(text[:at] + renamed + text[end:]))


def test_turns_join_all_parts() -> None:
    """Other rules see that too."""
    from attngen.verify.combine import joins

    module = _changed(
        "decode_gqa", "combine", "ranges(0 .. cdiv(parts, BLOCK_PARTS))", "ranges(1 .. cdiv(parts, BLOCK_PARTS))"
    )
    assert [reason for reason in joins(module, module.kernel("combine")) if reason.endswith("and turns for all parts")]
    with pytest.raises(VerifyError, match="%parts_of_keys does not run over all tiles of joined"):
        verify(module)


def test_the_rule_holds_in_every_phase() -> None:
    for name in ("decode_gqa", "decode_sinks_paged_gqa", "decode_paged_fp8_gqa", "decode_mla", "decode_fp8_mla"):
        for step in ("build", "split-kv", "dce"):
            verify(lowered(name)[step])
    for module in stages(_SINGLE):
        verify(module[1])
