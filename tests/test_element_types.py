"""A new element type is one row of a table: these tests add rows, then build, verify, run and interpret modules.

`fp16_wide` has outputs in fp32 and `fp32_short` in fp16; neither has a backward. `fp16_raised` multiplies weights
before it casts them. No committed module has another type of outputs, or such a factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attngen.bench.cases.grids import cell
from attngen.bench.results import rates
from attngen.codegen.render import render
from attngen.conformance.cases import Case, cli_cases, heads_for, make_inputs
from attngen.conformance.harness import run_case
from attngen.conformance.oracle import naive_attention, reference_mask
from attngen.cost.io import hbm_bytes
from attngen.cost.numbers import done
from attngen.cost.roofline import Problem
from attngen.devices import CLASSES, DEVICES
from attngen.errors import SpecError, VerifyError
from attngen.interp.host import execute
from attngen.interp.values import DOUBLE, SINGLE
from attngen.ir import Module, cdiv, symbol
from attngen.ir.dtypes import ELEMENTS, Element, result_type
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import stages
from attngen.report.page import page
from attngen.spec import json_schema, make_spec
from attngen.verify import verify
from tests.helpers import edit, module_of

pytestmark = pytest.mark.numerics

ROWS = {
    "fp16_wide": Element(2, "float16", "16-bit", "fp16", results="fp32", trains=False),
    "fp32_short": Element(4, "float32", "", "fp32", results="fp16", trains=False),
    "bf16_short": Element(2, "bfloat16", "16-bit", "bf16", is_interpreted=False, results="fp16", trains=False),
    "fp16_raised": Element(2, "float16", "16-bit", "fp16", results="fp32", trains=False, weights=8),
}
TORCH = {
    "fp16_wide": torch.float32,
    "fp32_short": torch.float16,
    "bf16_short": torch.float16,
    "fp16_raised": torch.float32,
}  # the dtypes of outputs
SPECS: dict[str, dict[str, Any]] = {
    "fwd": {"mask": "causal", "score": ["temperature"]},
    "packed": {"heads": {"sharing": "gqa"}, "mask": "causal"},
    "kv_outer": {"schedule": {"order": "kv_outer"}, "mask": "causal"},
    "dropout": {"dropout": True},
}


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, row in ROWS.items():
        monkeypatch.setitem(ELEMENTS, name, row)
    yield


def data(name: str, dtype: str = "fp16_wide") -> dict[str, Any]:
    return {"name": "typed", "head_dim": 16, "dtype": dtype, "backward": False, **SPECS[name]}


def lowered(name: str, dtype: str = "fp16_wide") -> Module:
    return list(stages(make_spec(data(name, dtype))))[-1][1]


# ---------------------------------------------------------------------------------------------- specs


def test_the_table_says_what_specs_may_name() -> None:
    assert json_schema()["properties"]["dtype"]["anyOf"][0] == {"enum": ["bf16", "fp16", "fp32", *ROWS]}
    assert make_spec(data("fwd") | {"dtype": ["fp16_wide"]}).dtype == ("fp16_wide",)
    assert all(row.trains for name, row in ELEMENTS.items() if name not in ROWS) and all(
        not e.trains for e in ELEMENTS.values() if e.results or e.weights
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"backward": {}},
            "spec: `dtype` names `fp16_wide`, which has no backward; expected `backward: false` as well",
        ),
        (
            {"dtype": ["fp16", "fp16_wide"]},
            "spec: `dtype` has element types that kernels treat differently: `fp16` gives fp16, of weights times 1, "
            "`fp16_wide` "
            "gives fp32, of weights times 1; expected a spec for each kind",
        ),
        (
            {"dtype": ["fp16_wide", "fp16_raised"]},
            "spec: `dtype` has element types that kernels treat differently: `fp16_wide` gives fp32, of weights "
            "times 1, `fp16_raised` gives fp32, of weights times 256; expected a spec for each kind",
        ),
        (
            {"dtype": "fp16_wid"},
            "spec: `dtype` is the text `fp16_wid`; expected `bf16`, `fp16`, `fp32`, `fp16_wide`, `fp32_short`, "
            "`bf16_short` or `fp16_raised`, or a list of these; did you mean `fp16_wide`?",
        ),
    ],
)
def test_a_wrong_spec_gets_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        make_spec(data("fwd") | change)
    assert str(error.value) == sentence


# ---------------------------------------------------------------------------------------------- IR


@pytest.mark.share(16)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("dtype", "result"), [("fp16_wide", "f32"), ("fp32_short", "fp16")])
def test_the_ir_names_the_type_of_outputs(name: str, dtype: str, result: str) -> None:
    """In every phase the tensor, its views and the stored value have it; no other value does, unless it is f32."""
    for _, module in stages(make_spec(data(name, dtype))):
        assert print_module(parse_module(print_module(module), "text")) == print_module(module)
        assert result_type(module.dtypes) == result and module.host("forward").type_of("O").dtype == result
        for kernel in (k for k in module.kernels if "O" in k.traits.writes):
            assert kernel.type_of("O").dtype == result == kernel.type_of("o").dtype
        if result != "f32":
            typed = [
                op.name
                for k in module.kernels
                for op in k.ops()
                if any(t.dtype == result for t in op.results().values())
            ]
            assert set(typed) <= {"O", "O_head", "o"}
    text = print_module(lowered(name, dtype))
    assert f"%O = alloc like(%Q) : {result}[B, Hq, Nq, D_V]" in text
    assert ("%O_rows = view %O by(group)" in text) == (name == "packed")
    assert name != "packed" or f"fresh(yes) : {result}[B, Hkv, Gq, D_V]" in text


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("%O = arg out : fp16", "%O = arg out : T", "%O is of `T`; expected fp16, as the header's dtype says"),
        (
            "%o = map expr(acc*inv_l) uses(acc=%keys_partial.acc, inv_l=%inv_l) : fp16",
            "%o = map expr(acc*inv_l) uses(acc=%keys_partial.acc, inv_l=%inv_l) : T",
            "%O_head holds fp16, the value is T",
        ),
        (
            "alloc like(%Q) : fp16",
            "alloc like(%Q) : T",
            "%O is T[B, Hq, Nq, D_V]; expected fp16[B, Hq, Nq, D_V] for %O",
        ),
        (
            "%inv_l = map expr(select(l > 0, 1/l, 0)) uses(l=%keys_partial.l) : f32",
            "%inv_l = map expr(select(l > 0, 1/l, 0)) uses(l=%keys_partial.l) : bf16",
            "%inv_l is of `bf16`; expected one of T, f32",
        ),
        ("dtype fp32_short", "dtype fp32", "%O is of `fp16`; expected one of T, f32"),
        ("dtype fp32_short", "dtype fp32 fp32_short", "which kernels treat differently; expected types that agree on"),
    ],
)
def test_another_type_of_outputs_is_refused(old: str, new: str, reason: str) -> None:
    with pytest.raises(VerifyError) as error:
        verify(parse_module(edit(print_module(lowered("fwd", "fp32_short")), (old, new)), "edited"))
    assert reason in str(error.value)


def test_a_backward_in_a_type_that_has_none_is_refused() -> None:
    made = list(stages(make_spec({"name": "typed", "head_dim": 16, "dtype": "fp32"})))[-1][1]
    ELEMENTS["fp32_flat"] = Element(4, "float32", "", "fp32", trains=False)
    try:
        with pytest.raises(VerifyError, match="dtype `fp32_flat`, and there is a host @backward; expected none"):
            verify(parse_module(print_module(made).replace("dtype fp32\n", "dtype fp32_flat\n"), "edited"))
    finally:
        del ELEMENTS["fp32_flat"]


# ---------------------------------------------------------------------------------------------- results


@pytest.mark.share(16)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", ROWS)
def test_results_are_those_of_naive_attention(name: str, dtype: str, tmp_path: Path, device: str) -> None:
    """The error is at most twice that of naive attention in the same dtypes, and `out` has the type of outputs."""
    spec = make_spec(data(name, dtype))
    module = module_of(spec, tmp_path)
    for case in (Case(1, *heads_for(spec), 70, 90), Case(1, *heads_for(spec), 20, 30, "bnhd")):
        found = run_case(module, spec, case, dtype, device)
        assert found.ok, str(found)
    q, k, v, inputs = make_inputs(spec, case, getattr(torch, ROWS[dtype].torch), device)
    out, lse = module.attention(q, k, v, **inputs, return_lse=True)
    assert (out.dtype, lse.dtype, q.dtype) == (TORCH[dtype], torch.float32, module.DTYPES[0])
    assert out.stride() == torch.empty_like(q).stride()
    with pytest.raises(NotImplementedError, match="this module has no backward"):
        module.attention(q.requires_grad_(), k, v, **inputs)
    assert dtype in [d for _, d in cli_cases(spec, True)]


@pytest.mark.share(4)
@pytest.mark.parametrize("dtype", ["fp16_wide", "fp32_short"])
def test_tracers_know_the_type_of_outputs(dtype: str, tmp_path: Path, device: str) -> None:
    spec = make_spec(data("packed", dtype))
    module = module_of(spec, tmp_path)
    q, k, v, _ = make_inputs(spec, Case(1, 4, 2, 70, 70, "bnhd"), getattr(torch, ROWS[dtype].torch), device)
    torch.library.opcheck(module.FORWARD, (q, k, v, 0.25))
    torch._dynamo.reset()
    compiled = torch.compile(module.attention, backend="aot_eager", fullgraph=True)
    assert compiled(q, k, v).equal(module.attention(q, k, v)) and compiled(q, k, v).dtype == TORCH[dtype]


@pytest.mark.share(16)
@pytest.mark.parametrize("name", [n for n in SPECS if n != "dropout"])
@pytest.mark.parametrize("dtype", ["fp16_wide", "fp32_short", "fp16_raised"])
def test_the_executor_runs_it(name: str, dtype: str) -> None:
    spec = make_spec(data(name, dtype))
    generator = np.random.default_rng(0)
    heads = heads_for(spec)
    q, k, v = (generator.standard_normal((1, h, 20, 16)) for h in (heads[0], heads[1], heads[1]))
    given = {"q": q, "k": k, "v": v, "scale": 0.25} | ({"temperature": np.full(heads[0], 2.0)} if spec.score else {})
    wanted = [torch.from_numpy(x) for x in (q, k, v)]
    mask = reference_mask(spec.mask, *wanted[:2], {})
    out, _ = naive_attention(*wanted, mask, 0.125 if spec.score else 0.25)
    for types, tolerance in ((DOUBLE, 1e-12), (SINGLE, 1e-5)):
        found = execute(lowered(name, dtype), given, {"BLOCK_Q": 16, "BLOCK_KV": 16}, types)
        assert found["out"].dtype == types["f32"] and np.allclose(found["out"], out.numpy(), rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------- analysis


@pytest.mark.share(4)
@pytest.mark.parametrize(("dtype", "size"), [("fp16_wide", 4), ("fp32_short", 2)])
def test_bytes_of_outputs_are_those_of_their_type(dtype: str, size: int) -> None:
    plain = list(stages(make_spec(data("fwd", dtype) | {"dtype": "fp16"})))[-1][1]
    typed, same = (hbm_bytes(m.kernel("fwd")) for m in (lowered("fwd", dtype), plain))
    programs = symbol("B") * symbol("Hq") * cdiv(symbol("Nq"), symbol("BLOCK_Q"))
    assert (typed - same).expand() == (programs * symbol("BLOCK_Q") * symbol("D_V") * (size - symbol("elem"))).expand()
    assert any(row.forward > 0 for row in done(lowered("fwd", dtype), Problem()))


def test_a_device_without_such_products_has_no_schedule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    """A device class without a peak rate of such products has a sentence in the table, and calls raise it."""
    monkeypatch.setitem(ELEMENTS, "float24", Element(3, "float16", "24-bit", "fp16", results="fp32", trains=False))
    monkeypatch.setitem(CLASSES["sm90"].flops_per_cycle, "24-bit", 1000)
    made = lowered("fwd", "float24")
    assert {row.device for row in made.configs("fwd")} == {"sm90"} and print_module(
        parse_module(print_module(made), "x")
    ) == print_module(made)
    reasons = {u.device: u.reason for u in made.not_fitting("fwd")}
    assert set(reasons) == set(CLASSES) - {"sm90"}
    assert reasons["sm80"] == "on sm80 the kernel @fwd has no 24-bit products; expected another dtype"
    assert reasons["sm80"] in render(made)["kernels.py"]
    monkeypatch.delitem(CLASSES["sm90"].flops_per_cycle, "24-bit")
    with pytest.raises(SpecError, match="has no 24-bit products; expected another dtype"):
        lowered("fwd", "float24")


def test_bench_counts_the_bytes_of_outputs() -> None:
    """A memory-bound problem moves q, k and v in 2 bytes for each element, O in 4, and the LSE; its head_dim is 16."""
    c = cell("specs", make_spec(data("fwd")), 64, 64, batch=1, heads=2)
    found = rates(c, {"matmul_tflops": 1e9, "copy_tb_s": 1.0}, 1, 2 * 64 * 2 * 16 * 2, "fwd", 1.0)
    moved = 2 * 64 * (3 * 16 * 2 + 16 * 4 + 4)
    assert found["fwd_roof"] == round(moved / 1e9, 4)


def test_the_page_and_the_module_say_it() -> None:
    made, spec = lowered("fwd", "fp32_short"), make_spec(data("fwd", "fp32_short"))
    files = render(made)
    assert "[B, Hq, Nq, 16] of torch.float16, laid out as q is" in files["__init__.py"]
    assert "runtime.empty_rows(q, HEAD_DIM_V, torch.float16)" in files["__init__.py"]
    assert "o = (acc * inv_l[:, None]).to(tl.float16)" in files["kernels.py"]
    assert 'tl.dot(q, tl.trans(k), input_precision="ieee")' in files["kernels.py"]  # as products of fp32 are
    assert "fp16[B, Hq, Nq, D_V]" in page(spec, "name: typed\n", list(stages(spec)), files, Problem())


@pytest.mark.share(4)
def test_8_bit_operands_are_a_row_and_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    """A module has q, k and v in e4m3, without scales, and O in bf16. The interpreter computes in fp32 with types
    that NumPy lacks."""
    monkeypatch.setitem(
        ELEMENTS, "fp8e4nv", Element(1, "float8_e4m3fn", "8-bit", "fp8", False, "bf16", trains=False, weights=8)
    )
    for name in ("sm90", "sm100"):
        monkeypatch.setitem(CLASSES[name].flops_per_cycle, "8-bit", 2 * CLASSES[name].flops_per_cycle["16-bit"])
    for of in DEVICES.values():
        monkeypatch.setitem(of.flops, "fp8", 2 * of.flops["bf16"])
    made = lowered("packed", "fp8e4nv")
    assert {row.device for row in made.configs("fwd")} == {"sm90", "sm100"}
    text = print_module(made)
    assert "%O = alloc like(%Q) : bf16[B, Hq, Nq, D_V]" in text and "%p_raised = map expr(256*p)" in text
    assert "(acc * inv_l[:, None] * 0.00390625).to(tl.bfloat16)" in render(made)["kernels.py"]
    steps = list(stages(make_spec(data("packed", "fp8e4nv"))))
    assert "on sm80 the kernel @fwd has no 8-bit products" in page(
        make_spec(data("packed", "fp8e4nv")), "", steps, render(made), Problem()
    )
    if device == "cpu":
        module = module_of(make_spec(data("packed", "fp8e4nv")), tmp_path)
        found = run_case(
            module, make_spec(data("packed", "fp8e4nv")), Case(1, 4, 2, 70, 90, "island"), "fp8e4nv", device
        )
        assert found.ok and found.ours["out"] < 2**-7 < found.naive["out"], found
