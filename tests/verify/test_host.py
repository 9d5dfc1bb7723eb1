"""Each rule of host programs refuses a text that breaks it."""

from __future__ import annotations

import re

import pytest

from attngen.builders import FORWARD_VARIANTS, build_module
from attngen.builders.host import ForwardVariant, build_hosts
from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.ir import symbol
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.spec import make_spec
from attngen.verify import verify
from attngen.verify.host import reasons
from tests.helpers import SPECS, edit, lowered, target

# (spec, rule, old text, new text, the reason)
BROKEN = [
    ("decode_gqa", "host-launches", "max(2*B, ", "max(B, ", "splits, and keys may have up to 2*B"),
    (
        "decode_sinks_paged_gqa",
        "host-launches",
        "B*((Nc + 1023) // 1024)",
        "B*((Nc + 1023) // 2048)",
        "splits, and keys may have up to B*((Nc + 1023) // 1024)",
    ),
    (
        "decode_paged_gqa",
        "host-launches",
        "expr(64*max_pages)",
        "expr(128*max_pages)",
        "the capacity of a sequence is 128*max_pages; expected `Nc`, 64*max_pages",
    ),
    (
        "decode_gqa",
        "host-launches",
        "launch @combine args(O=%O_rows, LSE=%LSE_rows) sizes(Nq=Gq, queries=Nq)",
        "launch @combine args(O=%O_rows, LSE=%LSE_rows) sizes(Nq=Gq, queries=Nq, Nn=B)",
        "it gives @decode and @combine other sizes or tensors; expected the same",
    ),
    (
        "causal_mha",
        "host-structure",
        "if then(@launches) of(%O)",
        "if then(@launch) of(%O)",
        "@launches is not the branch of one `if`",
    ),
    ("causal_mha", "host-structure", "    yield values(O=%O, LSE=%LSE)\n", "", "it returns nothing; expected O, LSE"),
    (
        "temperature_mha",
        "host-structure",
        ", d_temperature=%Input_gradients.d_temperature",
        "",
        "it returns dQ, dK, dV; expected dQ, dK, dV, d_temperature",
    ),
    (
        "causal_mha",
        "host-structure",
        "%scale = arg scalar : f32[] @reg",
        "%scale = arg out : f32[] @reg",
        "%scale is an argument `out` of @entry",
    ),
    (
        "causal_mha",
        "host-arguments",
        "%V = arg in : T[B, Hkv, Nk, D_V]",
        "%V = arg in : T[B, Hkv, Nk, D_QK]",
        "%V is T[B, Hkv, Nk, D_QK]; expected",
    ),
    (
        "causal_mha",
        "host-defined",
        "alloc like(%Q) : T[B, Hq, Nq, D_V]",
        "alloc like(%LSE) : T[B, Hq, Nq, D_V]",
        "%O reads %LSE where it is not defined",
    ),
    ("causal_mha", "host-defined", "where(need_q)", "where(need_more)", "%dQ reads %need_more where it is not defined"),
    (
        "causal_fa1",
        "host-defined",
        "    yield values(dK=%no_dK, dV=%no_dV)",
        "    yield values(dK=%no_dK)",
        "@both of %Needed yields dK, dV, and @neither yields dK",
    ),
    (
        "causal_gqa",
        "host-types",
        "%Q_rows = view %Q by(group) : T[B, Hkv, Gq, D_QK]",
        "%Q_rows = view %Q by(group) : T[B, Gq, Hkv, D_QK]",
        "%Q_rows is [B, Gq, Hkv, D_QK]; expected [B, Hkv, Gq, D_QK]",
    ),
    (
        "temperature_mha",
        "host-types",
        "over(B, Nq) : f32[Hq]",
        "over(B) : f32[Hq]",
        "_sum is [Hq]; expected [Hq, Nq]",
    ),
    (
        "causal_mha",
        "host-launches",
        "launch @dkdv",
        "launch @dvdk",
        "it launches @dvdk; the kernels are fwd, dq, delta, dkdv, bwd, dq_end",
    ),
    ("butterfly_gqa", "host-launches", "    launch @delta\n", "", "no host program launches @delta"),
    (
        "causal_mha",
        "host-launches",
        "%LSE = alloc : f32[B, Hq, Nq]",
        "%LSE = alloc : f32[B, Hkv, Nq]",
        "%LSE is f32[B, Hkv, Nq]; expected f32[B, Hq, Nq]",
    ),
    (
        "causal_mha",
        "host-launches",
        "%dQ = alloc like(%Q) where(need_q) : T",
        "%dQ = alloc like(%Q) where(need_q) : f32",
        "%dQ is f32[B, Hq, Nq, D_QK]; expected T",
    ),
    (
        "causal_gqa",
        "host-launches",
        "args(dK=%dK_partial, dV=%dV_partial)",
        "args(dK=%dK_partial)",
        "%dV is T[B, Hkv, Nk, D_V]; expected T[B, Hkv, splits, Nk, D_V]",
    ),
    (
        "causal_gqa",
        "host-launches",
        "sizes(Nq=Gq, queries=Nq)",
        "sizes(Nq=Gq)",
        "%queries is neither an argument nor allocated",
    ),
    (
        "causal_gqa",
        "host-launches",
        "sizes(Nq=Gq, queries=Nq)",
        "sizes(queries=Nq)",
        "%Q_rows is T[B, Hkv, Gq, D_QK]; expected T[B, Hkv, Nq, D_QK]",
    ),
    (
        "causal_gqa",
        "host-launches",
        "launch @fwd",
        "launch @fwd args(more=%Q)",
        "launch @fwd: it has no argument %more",
    ),
    (
        "causal_gqa",
        "host-launches",
        "grid(q in cdiv(Nq, BLOCK_Q) ",
        "grid(q in cdiv(Nq, BLOCK_KV) ",
        "its grid has q in cdiv(Nq, BLOCK_KV); expected some of",
    ),
    (
        "causal_gqa",
        "host-launches",
        "hkv in Hkv, b in B)",
        "hkv in Hq, b in B)",
        "its grid has hkv in Hq; expected some of",
    ),
    ("causal_mha", "host-written", "of(%dQ) orelse(@statistics)", "of(%dQ)", "@statistics is not the branch"),
    (
        "causal_mha",
        "host-written",
        "%By_rows = if then(@rows_only) of(%O)",
        "%By_rows = if then(@rows_only) of(%dK)",
        "@dkdv reads %LSE2, which is not written",
    ),
    (
        "causal_mha",
        "host-written",
        "%By_key = if then(@keys) of(%dK)",
        "%By_key = if then(@keys) of(%dQ)",
        "its result dK is not written on every path",
    ),
    (
        "causal_mha",
        "host-written",
        "%Launched = if then(@launches) of(%O)",
        "%Launched = if then(@launches) where(Nq < 64)",
        "its result O is not written",
    ),
    (
        "causal_fa1",
        "host-written",
        "%ROW_MAX = alloc fill(-inf)",
        "%ROW_MAX = alloc",
        "@fwd reads %ROW_MAX, which is not written on every path to it",
    ),
    (
        "causal_fa1",
        "host-written",
        "%DQ_ACC = alloc fill(0)",
        "%DQ_ACC = alloc",
        "@bwd reads %DQ_ACC, which is not written on every path to it",
    ),
    ("causal_gqa", "host-written", "    copy %O_rows into(%O)\n", "", "its result O is not written on every path"),
    (
        "causal_gqa",
        "host-written",
        "%Summed_partial = if then(@sum_partial) where(splits > 1)",
        "%Summed_partial = if then(@sum_partial) where(splits > 2)",
        "its result dK is not written",
    ),
    (
        "temperature_mha",
        "host-written",
        "where(need_inputs or need_q)",
        "where(need_q)",
        "reads %dTEMPERATURE, which is not written on every path",
    ),
    (
        "padding_mha",
        "host-arguments",
        "%DELTA = alloc",
        "%Key_padding = alloc : f32[B] @hbm\n    %DELTA = alloc",
        "and the input `key_padding` are one variable",
    ),
    (
        "causal_mha",
        "host-read",
        "%DELTA = alloc : f32[B, Hq, Nq] @hbm",
        "%DELTA = alloc : f32[B, Hq, Nq] @hbm\n    %more = alloc : f32[B] @hbm",
        "%more is read by nothing",
    ),
]


@pytest.mark.parametrize(("spec", "rule", "old", "new", "reason"), BROKEN, ids=[case[4][:50] for case in BROKEN])
def test_a_program_that_breaks_a_rule_is_refused(spec: str, rule: str, old: str, new: str, reason: str) -> None:
    module = parse_module(edit(print_module(target(spec)), (old, new)), "edited.ir")
    found = list(reasons(module))
    assert any(reason in sentence for _, sentence in found), found
    assert rule in {name for name, _ in found} or "branch" in reason


@pytest.mark.share(16)
@pytest.mark.parametrize("name", SPECS)
def test_programs_print_and_parse(name: str) -> None:
    text = print_module(target(name))
    assert print_module(parse_module(text)) == text and not list(reasons(parse_module(text)))


def test_an_edit_of_a_program_appears_in_the_generated_code() -> None:
    """The edit fills the buffer of DELTA with zeros, and the generated wrapper does so."""
    text = edit(print_module(target("causal_mha")), ("%DELTA = alloc :", "%DELTA = alloc fill(0) :"))
    source = render(verify(parse_module(text)))["__init__.py"]
    assert re.search(r"delta = runtime\.zeros\(.*\)\n", source)


def test_a_refusal_names_the_program() -> None:
    text = edit(print_module(target("causal_mha")), ("    launch @delta\n", ""))
    with pytest.raises(VerifyError, match="host @backward: @bwd reads %LSE2, which is not written on every path to it"):
        verify(parse_module(text))


def test_a_call_takes_the_first_variant_whose_condition_holds() -> None:
    """Each variant is the else branch of the one before it."""
    few = ForwardVariant(
        "By_keys",
        symbol("Nk") < 4,
        "few",
        "more",
        lambda _: True,
        lambda _: (),
        lambda b, block, _: b.launch("fwd", block),
    )
    text = print_module(verify(build_hosts(lowered("causal_gqa")["build"], (few, *FORWARD_VARIANTS), True)))
    assert (
        """
  block @launches
    %By_keys = if then(@few) where(Nk < 4) orelse(@more)
  block @few
    launch @fwd
  block @more
    %By_size = if then(@few_queries) where(Hkv < Hq and Nq < 64) orelse(@many_queries)
  block @few_queries
"""
        in text
    )


def test_sums_that_programs_add_to_atomically_start_from_zero() -> None:
    """A sum with one element per row also does, if the score reads the input at other rows than the score's own row."""
    t = {"tensor": ["B", "H", "Nq"], "grad": True}
    score = [{"expr": "s + t[b, h, q_len - 1 - q_idx]", "params": {"t": t}}]
    text = print_module(
        build_module(
            make_spec({"name": "reversed", "head_dim": 64, "backward": {"deterministic": False}, "score": score})
        )
    )
    assert "%dT = alloc fill(0) where(need_inputs) : f32[B, Hq, Nq] @hbm" in text
    with pytest.raises(VerifyError, match="host @backward: .*%dT, which is not written on every path to it"):
        verify(parse_module(edit(text, ("%dT = alloc fill(0)", "%dT = alloc"))))
