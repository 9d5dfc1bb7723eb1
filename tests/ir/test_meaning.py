"""Kernels must compute the mask and the scores of their module's header: edits are refused, and so are kernels of
another module.

Whole kernels are exchanged, so that loop bounds agree with the mask and all other rules hold.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import sympy

from attngen.errors import VerifyError
from attngen.ir import parse, symbol, to_text
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.verify import verify
from attngen.verify.algebra import normal, same
from tests.helpers import edit

TABLE = {"params": {"table": {"tensor": ["H", 9]}}}
HEADS = {"params": {"by_head": {"tensor": ["H"]}, "by_key_head": {"tensor": ["Hkv", "Nk"]}}}
GROUPS = {"params": {"by_key_head": {"tensor": ["Hkv", "Nk"]}}}
SPECS: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "window": {"mask": {"sliding_window": {"left": 100, "right": 0}}},
    "wider": {"mask": {"sliding_window": {"left": 101, "right": 0}}},
    "full": {"mask": "none"},
    "single": {"mask": "causal", "dtype": "fp32"},
    "entropies": {"mask": "causal", "dtype": "fp32", "outputs": ["entropy"]},
    "capped": {"mask": "causal", "score": [{"softcap": 30.0}]},
    "lower": {"mask": "causal", "score": [{"softcap": 20.0}]},
    "near": {"score": [{"expr": "s + table[h, clamp(q_idx - kv_idx, -4, 4) + 4]", **TABLE}]},
    "far": {"score": [{"expr": "s + table[h, clamp(kv_idx - q_idx, -4, 4) + 4]", **TABLE}]},
    "sink": {"mask": "causal", "score": ["sink"]},
    "by heads": {"score": [{"expr": "s + by_head[h] * h + by_key_head[hkv, kv_idx]", **HEADS}]},
    "packed": {"score": [{"expr": "s - 0.125 * h * kv_idx + by_key_head[hkv, kv_idx]", **GROUPS}]},
}


@cache
def text_of(given: str, sharing: str = "gqa") -> str:
    """Return the target IR of one of the SPECS."""
    return print_module(
        lower(
            make_spec({"name": "one", "head_dim": 16, "heads": {"sharing": sharing}, "dtype": "fp16", **SPECS[given]})
        )
    )


def kernel_of(text: str, name: str) -> str:
    found = re.search(rf"kernel @{name} .*?(?=\n\n|\nschedule)", text, re.DOTALL)
    assert found
    return found[0]


def refused(text: str) -> VerifyError:
    with pytest.raises(VerifyError) as error:
        verify(parse_module(text))
    return error.value


MORE, LESS = "hides more than the header's mask", "hides less than the header's mask"
NOT_IN = "`Nk - Nq + q_idx >= kv_idx` does not follow from its conditions"


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("given", "other", "kernel", "rule", "reason"),
    [
        (
            "causal",
            "window",
            "dq",
            "mask",
            f"{MORE}: `kv_idx >= Nk - Nq + q_idx - 100` does not follow from `Nk - Nq + q_idx >= kv_idx`",
        ),
        ("causal", "window", "fwd", "mask", MORE),
        ("causal", "window", "packed", "mask", MORE),
        ("window", "wider", "dkdv", "mask", LESS),
        ("wider", "window", "dkdv", "mask", MORE),
        ("causal", "full", "dkdv", "mask", f"{LESS}: {NOT_IN}"),
        ("causal", "full", "dq", "mask", f"{LESS}: {NOT_IN}"),
        ("full", "causal", "packed", "mask", MORE),
        (
            "capped",
            "lower",
            "dkdv",
            "scores",
            "computes weights by exp2(20.0*LOG2E*(1 - 2/(exp2(0.1*LOG2E*s*scale) + 1)) - LSE2[b, g + ",
        ),
        (
            "capped",
            "causal",
            "dq",
            "scores",
            "expected exp2(30.0*LOG2E*tanh(0.03333333333333333*s*scale) - select(LSE[b, h, q_idx] > ",
        ),
        ("causal", "capped", "fwd", "scores", "expected exp2(LOG2E*s*scale), by the header's score"),
        ("near", "far", "dkdv", "scores", "TABLE[g + group*hkv, clamp(kv_idx - q_idx, -4, 4) + 4]"),
    ],
)
def test_a_kernel_of_another_module_is_refused(given: str, other: str, kernel: str, rule: str, reason: str) -> None:
    text = text_of(given)
    error = refused(text.replace(kernel_of(text, kernel), kernel_of(text_of(other), kernel)))
    assert (error.rule, reason in error.reason) == (rule, True), error
    assert error.reason.startswith(f"kernel @{kernel}: %")


WEIGHT = "expr(exp2(-lse2 + masked*qk_scale))"
UNNORMALISED_WEIGHT = "expr(inv_l_all*exp2(-m_all + masked*qk_scale))"
NOT_NORMALISED = (
    "%p is `exp2(%masked*LOG2E*scale - M_ALL[b, h, q_idx])`; expected the weights of "
    "M_ALL, or all sums of them, times INV_L_ALL"
)


@pytest.mark.parametrize(
    ("given", "old", "new", "reason"),
    [
        ("causal", "where(Nk - Nq + q_idx >= kv_idx)", "where(Nk - Nq + q_idx > kv_idx)", f"@fwd: %soft {LESS}"),
        ("causal", " where(Nk - Nq + q_idx >= kv_idx)\n", "\n", f"@fwd: %soft {MORE}"),
        (
            "causal",
            "  dropout no\n",
            "  dropout no\n  score twice expr(2*s)\n",
            "@fwd: %soft computes weights by exp2(LOG2E*s*scale)",
        ),
        ("capped", "expr(30.0*tanh(", "expr(31.0*tanh(", "@fwd: %soft computes weights by exp2(30.0*LOG2E*"),
        ("capped", "%score = map expr(", "%score = map expr(1 + ", "@fwd: %soft computes weights by exp2("),
        (
            "causal",
            WEIGHT,
            "expr(exp2(-lse2 + masked*qk_scale + 1))",
            "@dq: %p computes weights by exp2(LOG2E*s*scale - select(",
        ),
        ("causal", WEIGHT, "expr(exp2(-lse2 - masked*qk_scale))", "@dq: %p computes weights by exp2(-LOG2E*s*scale"),
        ("causal", WEIGHT, "expr(exp2(-lse2)*exp2(masked*qk_scale))", "@dq: computes no weights of its scores"),
        ("causal", WEIGHT, "expr(2*exp2(-lse2 + masked*qk_scale))", "@dq: computes no weights of its scores"),
        ("single", UNNORMALISED_WEIGHT, "expr(exp2(-m_all + masked*qk_scale))", f"@dq: {NOT_NORMALISED}"),
        ("single", "expr(acc*inv_l_all)", "expr(acc*inv_l_all**2)", f"@jvp: {NOT_NORMALISED}"),
        ("single", "expr(inv_l_all*tlse)", "expr(inv_l_all + tlse)", f"@jvp: {NOT_NORMALISED}"),
        ("single", "tLSE_head[q] %tlse_divided", "tLSE_head[q] %keys_partial.tlse", f"@jvp: {NOT_NORMALISED}"),
        ("causal", "m(%m) scale(%qk_scale)", "m(%m)", "@fwd: %soft computes weights by exp2(s)"),
        (
            "near",
            "clamp(-kv_idx + q_idx, -4, 4) + 4]",
            "clamp(-kv_idx + q_idx, -4, 4) + 3]",
            "@fwd: %soft computes weights by",
        ),
        ("sink", "sink(sink)", "sink(2*sink)", "@fwd: %m_all is `max("),
        ("sink", "expr(s) sink(sink)", "expr(s)", "@fwd: 1 sinks are added to a row's softmax; expected none"),
    ],
)
def test_an_edit_of_header_or_kernel_is_refused(given: str, old: str, new: str, reason: str) -> None:
    assert refused(edit(text_of(given), (old, new))).reason.startswith(f"kernel {reason}")


@pytest.mark.share(4)
def test_a_kernel_may_normalise_its_sums_instead_of_the_weights() -> None:
    """It may not where it takes logarithms of the weights, because its sums are then not linear in the weights."""
    normalise = (
        "%dq_normalised = map expr(dq*inv_l_all) "
        "uses(dq=%keys_partial.dq, inv_l_all=%inv_l_all) : f32[BLOCK_Q, D_QK] @reg"
    )
    changes = (
        (f"{UNNORMALISED_WEIGHT} uses(inv_l_all=%inv_l_all, ", "expr(exp2(-m_all + masked*qk_scale)) uses("),
        (
            "%dq_out = map expr(dq*scale) uses(dq=%keys_partial.dq",
            f"{normalise}\n    %dq_out = map expr(dq*scale) uses(dq=%dq_normalised",
        ),
    )
    verify(parse_module(edit(text_of("single"), *changes)))
    assert NOT_NORMALISED in refused(edit(text_of("entropies"), *changes)).reason
    exponent = (
        "select(p > 0, -m_all + masked*qk_scale, 0)) uses(p=%p, m_all=%m_all, masked=%masked, qk_scale=%qk_scale)"
    )
    whole = ("select(p > 0, log2(p), 0)) uses(p=%p)", exponent)
    assert NOT_NORMALISED in refused(edit(text_of("entropies"), *changes, whole)).reason


def test_masked_scores_are_read_only_for_weights() -> None:
    text = text_of("causal")
    line = "    %dp = dot %do %v over(D_V) : f32[BLOCK_Q, BLOCK_KV] @reg\n"
    more = line + "    %again = map expr(x + y) uses(x=%masked, y=%dp) : f32[BLOCK_Q, BLOCK_KV] @reg\n"
    made = text.replace(line, more, 1).replace("uses(p=%p, dp=%dp", "uses(p=%p, dp=%again", 1)
    assert refused(made.replace("phase target", "phase scheduled")).reason.startswith(
        "kernel @dq: %again reads the masked scores %masked"
    )


@pytest.mark.share(16)
@pytest.mark.parametrize("sharing", ["mha", "mqa", "gqa"])
def test_every_sharing_of_heads_is_compared_with_the_header(sharing: str) -> None:
    """Inputs are indexed by query head and by K/V head, in kernels over queries, over keys and with pack-GQA."""
    text = text_of("by heads", sharing)
    error = refused(edit(text, ("expr(by_head*h +", "expr(by_head*(h + 1) +")))
    assert (error.rule, error.reason[:11]) == ("scores", "kernel @fwd")
    text = text_of("packed", sharing)
    assert ("q_idx // queries" in text) == (sharing != "mha")
    assert refused(edit(text, ("expr(by_key_head - 0.125*h*", "expr(by_key_head - 0.125*(h + 1)*"))).rule == "scores"


def test_limits_of_fp32_are_those_of_the_score() -> None:
    """The limit keeps a score of -inf. For a score that is never -inf, the lower limit may be a plain number."""
    bias = {"params": {"bias": {"tensor": ["B", "H", "Nq", "Nk"]}}}

    def text_with(score: str) -> str:
        spec = {"name": "one", "head_dim": 16, "dtype": "fp32", "score": [{"expr": score, **bias}]}
        return print_module(lower(make_spec(spec), "build"))

    lowest = "select(score_base > -inf, -3.4028234663852886e+38, -inf)"
    assert (
        refused(edit(text_with("s + bias[b, h, q_idx, kv_idx]"), (lowest, "-3.4028234663852886e+38"))).rule == "scores"
    )
    # The kernel has the select, whose normal form is the plain number, and the verifier accepts it.
    assert lowest in text_with("sqrt(abs(s + bias[b, h, q_idx, kv_idx]))")


def test_an_element_at_the_larger_of_two_places_is_inside_if_both_are() -> None:
    ids = {"params": {"ids": {"tensor": ["any"], "dtype": "int32"}}}
    spec = {"name": "one", "head_dim": 16, "dtype": "fp16", "mask": {"expr": "ids[max(h, 3)] <= kv_idx", **ids}}
    text = print_module(lower(make_spec(spec), "build"))
    for inside in ("h < ids_len", "3 < ids_len"):
        assert refused(edit(text, ("where(max(3, h) < ids_len)", f"where({inside})"))).rule == "indexing"


NORMALISED = ["exp(x)", "log(2 + x*x)", "tanh(3*x)", "sigmoid(x - 1)", "3**x", "2**(-x)", "(1 + x)*(2 - x)"]
NORMALISED += ["0.3*(x + 1)/(1 + 2*x*x)", "-1/(2 - 4*x*x)", "1/(1 + x*x)**2", "abs(sigmoid(x))"]


@pytest.mark.parametrize("text", NORMALISED)
def test_the_normal_form_has_the_same_value(text: str) -> None:
    x = np.linspace(-0.6, 0.6, 7)
    functions: dict[str, Any] = {"power2": np.exp2, "inverse": np.reciprocal, "log2": np.log2, "log": np.log}
    functions["sigmoid"] = lambda v: 1 / (1 + np.exp(-v))
    constants = {symbol("LOG2E"): np.log2(np.e), symbol("LN2"): np.log(2)}
    e = parse(text)
    values = [sympy.lambdify([symbol("x")], made.subs(constants), [functions, "numpy"])(x) for made in (e, normal(e))]
    np.testing.assert_allclose(*values, rtol=1e-12)


def test_different_expressions_are_not_the_same() -> None:
    texts = (
        "0.1*x + tanh(0.3*y)",
        "tanh(0.30000000000000004*y) + x/10",
        "0.1*x + tanh(0.3001*y)",
        "0.1*x + tanh(0.3*x)",
    )
    first, *others = (normal(parse(text)) for text in texts)
    assert [same(first, other) for other in others] == [True, False, False]
    less, more = (parse(text) for text in ("kv_idx < Nk - Nq + q_idx + 1", "q_idx >= -Nk + Nq + kv_idx"))
    assert normal(less) == normal(more) != normal(parse("kv_idx < Nk - Nq + q_idx"))
    below, at_most = (normal(parse(text)) for text in ("x < y", "x <= y - 1"))  # x and y may be no integers
    assert not same(below, at_most)


def test_powers_of_a_number_are_printed_and_parsed() -> None:
    assert [to_text(parse(text)) for text in ("3**(x + 1)", "2**(-x)", "x*2**(-x)")] == [
        "3**(x + 1)",
        "2**(-x)",
        "x/2**x",
    ]
