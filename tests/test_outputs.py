"""Additional outputs of calls: the entropy and the largest score of each query, and the total weight of each key."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Any

import pytest
import torch

from attngen.codegen.render import render
from attngen.conformance.cases import Case, heads_for, make_all_gradients, make_inputs, torch_dtype
from attngen.conformance.harness import run_case
from attngen.conformance.oracle import naive_max_score, reference_mask
from attngen.errors import SpecError
from attngen.ir.names import OF_OUTPUTS, OUTPUTS
from attngen.lang.names import NAME as NAME_OF_INPUT
from attngen.lang.names import name_problem
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from tests.conftest import CUDA
from tests.helpers import built, module_of
from tests.helpers import spec as spec_of
from tests.hopper.test_numerics import compare_with_naive

pytestmark = pytest.mark.numerics

NAME = "causal_outputs_gqa"
ALL: dict[str, Any] = {
    "name": "outputs",
    "head_dim": 32,
    "dtype": ["fp16"],
    "heads": {"sharing": "gqa"},
    "outputs": list(OUTPUTS),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped, causal": {"mask": "causal"},
    "one key head, a window, capped": {
        "heads": {"sharing": "mqa"},
        "mask": {"sliding_window": {"left": 20, "right": 3}},
        "score": [{"softcap": 5.0}],
    },
    "a sink, which all rows see": {"mask": {"sliding_window": {"left": 9, "right": 0}}, "score": ["sink"]},
    "padding, in fp32": {"heads": {"sharing": "mha"}, "dtype": ["fp32"], "mask": "key_padding"},
    "documents, data that lists blocks, dropout": {"mask": "document", "dropout": True},
    "blocks, a learned temperature": {
        "heads": {"sharing": "mha"},
        "mask": {"block_sparse": {"block": 64}},
        "score": ["temperature"],
    },
    "learned biases, widths of their own": {
        "head_dim": {"qk": 40, "v": 24},
        "mask": "none",
        "score": [{"relative_bias": {"max_distance": 16}}, "dense_bias"],
    },
    "slopes, dropout": {
        "mask": "causal",
        "score": [{"alibi": {"slopes": "given", "learnable": True}}],
        "dropout": True,
    },
}
SIZES = [(1, 1), (17, 40), (127, 129), (130, 70)] + ([(1000, 1000)] if CUDA else [])


@cache
def variant(name: str) -> Spec:
    return make_spec({**ALL, **VARIANTS[name]})


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns the module of a variant, built once."""
    return cache(lambda name: module_of(variant(name), tmp_path_factory.mktemp("outputs") / "outputs"))


@pytest.mark.share(32)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", VARIANTS)
def test_against_naive(name: str, sizes: tuple[int, int], modules: Any, device: str) -> None:
    """All outputs and gradients are right for few queries, partial tiles, and rows that see nothing."""
    spec = variant(name)
    result = run_case(modules(name), spec, Case(2, *heads_for(spec, 4), *sizes, "bnhd"), spec.dtype[0], device)
    assert set(spec.outputs) <= result.ours.keys() and result.ok, str(result)


def problem(device: str, n_q: int = 70, n_kv: int = 50) -> tuple[torch.Tensor, ...]:
    *qkv, _ = make_inputs(spec_of(NAME), Case(2, *heads_for(spec_of(NAME)), n_q, n_kv), torch_dtype("fp16"), device)
    return tuple(x.requires_grad_() for x in qkv)


@pytest.mark.parametrize("sizes", [(70, 50), (20, 60), (0, 9), (9, 0)])
def test_the_largest_of_each_head_is_that_of_its_queries(sizes: tuple[int, int], device: str) -> None:
    """The maximum per head, [Hq], is the one that QK-clipping needs; it is -inf where nothing is visible."""
    q, k, v = problem(device, *sizes)
    attention = built(NAME).attention
    out, of_rows = attention(q, k, v, return_max_score=True)
    also, of_heads = attention(q, k, v, return_max_score="head")
    mask = reference_mask(spec_of(NAME).mask, q, k, {})
    expected = naive_max_score(q.double(), k.double(), mask, q.shape[3] ** -0.5)
    assert out.equal(also) and of_rows.shape == q.shape[:3] and of_heads.shape == q.shape[1:2]
    assert of_rows.dtype == of_heads.dtype == torch.float32 and not (of_rows.requires_grad or of_heads.requires_grad)
    torch.testing.assert_close(of_rows.double(), expected, rtol=1e-5, atol=1e-5)
    assert of_heads.equal(of_rows.amax((0, 2)) if of_rows.numel() else torch.full_like(of_heads, -torch.inf))


def test_results_come_in_the_order_of_the_arguments(device: str) -> None:
    q, k, v = problem(device)
    attention, names = built(NAME).attention, spec_of(NAME).outputs
    out, *every = attention(q, k, v, **{f"return_{name}": True for name in names})
    assert isinstance(attention(q, k, v), torch.Tensor) and len(every) == len(names)
    for name, x in zip(names, every):
        also, one = attention(q, k, v, **{f"return_{name}": True})
        assert also.equal(out) and one.equal(x)
    with torch.no_grad():
        assert all(
            a.equal(b) for a, b in zip((out, *every), attention(q, k, v, **{f"return_{name}": True for name in names}))
        )


def test_a_column_of_weights_sums_to_the_queries_that_see_a_key(device: str) -> None:
    """With as many queries as keys only the last query sees the last key."""
    q, k, v = problem(device, 50, 50)
    out, lse, key_mass = built(NAME).attention(q, k, v, return_lse=True, return_key_mass=True)
    assert (
        key_mass.shape == (*q.shape[:2], k.shape[2]) and key_mass.dtype == torch.float32 and not key_mass.requires_grad
    )
    torch.testing.assert_close(key_mass.sum(2), torch.full_like(key_mass[..., 0], 50.0))
    keys = k.repeat_interleave(2, 1)
    last = ((q[:, :, -1] * keys[:, :, -1]).float().sum(-1) * 0.125 - lse[:, :, -1]).exp()
    torch.testing.assert_close(key_mass[..., -1], last.detach(), rtol=1e-3, atol=1e-3)


def test_operators_and_compiled_calls(device: str) -> None:
    """Schemas, fake implementations and autograd of all operators are right. A compiled call is one graph, and gives
    the same bits and gradients."""
    module, asked = built(NAME), {f"return_{name}": True for name in spec_of(NAME).outputs}
    q, k, v = problem(device, 20, 30)
    grads = make_all_gradients(spec_of(NAME), Case(2, *heads_for(spec_of(NAME)), 20, 30), torch.float16, device)
    torch.library.opcheck(module.FORWARD, (q, k, v, 0.125))
    plain = [x.detach() for x in (q, k, v)]
    out, lse, entropy, *_ = module.FORWARD(*plain, 0.125)
    torch.library.opcheck(module.MASS, (*plain[:2], lse, 0.125))
    torch.library.opcheck(module.BACKWARD, (*grads, *plain, out, lse, entropy, 0.125, True, True))
    torch.library.opcheck(module.BACKWARD, (grads[0], None, grads[2], *plain, out, lse, entropy, 0.125, False, True))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return module.attention(q, k, v, **{**asked, "return_max_score": "head"})

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="inductor" if CUDA else "aot_eager", fullgraph=True)
    found = [(*r, *torch.autograd.grad(r[:3], (q, k, v), grads)) for r in (call(q, k, v), compiled(q, k, v))]
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    for at in range(3):  # of each result by itself
        made = [torch.autograd.grad(f(q, k, v)[at], (q, k), grads[at]) for f in (call, compiled)]
        assert all(a.equal(b) for a, b in zip(*made)) and any(x.any() for x in made[0])


def test_wrong_calls_are_refused(device: str) -> None:
    q, k, v = problem(device)
    with pytest.raises(
        ValueError, match=r'return_max_score is "row"; expected True, for each query, or "head", for each head$'
    ):
        built(NAME).attention(q, k, v, return_max_score="row")
    with pytest.raises(TypeError, match=r'return_max_score is a int; expected True, False or "head"$'):
        built(NAME).attention(q, k, v, return_max_score=1)


@pytest.mark.parametrize(
    "more, sentence",
    [
        ({"outputs": ["max"]}, "`outputs[0]` is the text `max`; expected `lse`"),
        ({"outputs": ["lse", "lse"]}, "`outputs` names an output twice; expected each once"),
        (
            {"outputs": ["max_score"], "cache": "contiguous", "backward": False},
            "asks for `max_score`, which calls with a cache do not return",
        ),
        (
            {"outputs": ["key_mass"], "cache": {"paged": {}}, "backward": False},
            "asks for `key_mass`, which calls with a cache do not return",
        ),
        (
            {"outputs": ["max_score"], "schedule": {"order": "kv_outer"}},
            "asks for `max_score`, which `order: kv_outer` does not return",
        ),
        (
            {"outputs": ["max_score"], "mask": {"expr": "kv_idx < results", "params": {"results": {"scalar": "int"}}}},
            "declares `results`, which is a name of modules with `outputs`; expected another one",
        ),
    ],
)
def test_wrong_specs_are_refused(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        make_spec({"name": "wrong", "head_dim": 32, "mask": "causal", **more})
    assert sentence in str(error.value)


def variables(spec: Spec) -> set[str]:
    """Return the names of arguments and variables in a generated module."""
    made = render(lower(spec))
    nodes = [node for file in ("kernels.py", "__init__.py") for node in ast.walk(ast.parse(made[file]))]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {
        name
        for name in names | {node.arg for node in nodes if isinstance(node, ast.arg)}
        if re.fullmatch(NAME_OF_INPUT, name)
    }


@pytest.mark.share(8)
@pytest.mark.parametrize("name", ["grouped, causal", "a sink, which all rows see"])
def test_names_that_outputs_bring_are_reserved(name: str) -> None:
    """Inputs of masks and modifiers are variables of kernels and host programs, too, and must not collide."""
    brought = variables(variant(name)) - variables(make_spec({**ALL, **VARIANTS[name], "outputs": "lse"}))
    free = {n for n in brought if not name_problem(n) and not n.endswith("_strides")}
    assert {"entropy", "e", "results"} <= free <= OF_OUTPUTS


def test_the_lse_is_always_among_outputs_and_their_order_says_nothing() -> None:
    plain, said, one = (
        make_spec({"name": "x", "head_dim": 32, **more}) for more in ({}, {"outputs": "lse"}, {"outputs": "max_score"})
    )
    assert plain.hash() == said.hash() and "outputs" not in plain.canonical()
    assert (
        one == make_spec({"name": "x", "head_dim": 32, "outputs": ["max_score", "lse"]}) == make_spec(one.canonical())
    )


@pytest.mark.share(16)
@pytest.mark.parametrize("score", [[], ["alibi"], [{"softcap": 5.0}], ["sink"]])
def test_the_largest_score_comes_from_warp_specialized_kernels_too(score: list[Any]) -> None:
    """They keep the running maximum as portable kernels do, wherever they compute the row terms of scores."""
    more = {
        "head_dim": 128,
        "mask": "causal",
        "score": score,
        "outputs": ["max_score"],
        "schedule": {"backend": "hopper"},
    }
    spec = make_spec({**ALL, **more})
    module = lower(spec)
    assert [kernel.name for kernel in module.warp_specialized if "MAX_SCORE" in kernel.traits.writes] == ["fwd"]
    for seed in range(4):
        compare_with_naive(module, "outputs", seed, of=spec)
