"""Forward mode: tangents of every module against torch.func.jvp of naive attention, by each of PyTorch's interfaces.

tests/transforms/test_equality.py compares random modules with naive attention, in fp64 and after every pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from attngen.builders import build_module
from attngen.conformance.cases import Case, heads_for, make_inputs, torch_dtype
from attngen.conformance.harness import run_case
from attngen.conformance.oracle import naive_attention, reference_mask, relative_error
from attngen.errors import SpecError, VerifyError
from attngen.ir import only, tile
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.spec import make_spec
from attngen.verify import verify
from tests.conftest import CUDA
from tests.helpers import FEW, SMALLER, WRAPPERS, built, cached_module, edit, module_of, target
from tests.helpers import spec as spec_of
from tests.test_numerics import PADDED, dtypes, padding, small

pytestmark = pytest.mark.numerics

NAME = "causal_mqa"
SHAPES = [
    (1, 1, "bhnd"),
    (17, 17, "bhnd"),
    (127, 127, "bhnd"),
    (129, 129, "bhnd"),
    (65, 65, "packed"),
    (100, 130, "island"),
]
SHAPES += [(130, 100, "bnhd"), (40, 129, "expanded")]
TRAINED = sorted({*WRAPPERS, *SMALLER})


def cases() -> list[Any]:
    """On a GPU every spec and shape; in the interpreter all shapes for a few specs, and one for the others."""
    found = [(n, s) for n in TRAINED for s in (SHAPES if CUDA or n in FEW else SHAPES[5:6])]
    return [pytest.param(n, s, id=f"{n}-{s[0]}x{s[1]}-{s[2]}") for n, s in found]


@pytest.mark.parametrize(("name", "shape"), cases())
def test_against_naive(name: str, shape: tuple[int, int, str], device: str) -> None:
    result = run_case(built(name), spec_of(name), small(name, *shape), dtypes(name)[0], device, tangents=True)
    assert result.ok, str(result)


@pytest.mark.parametrize("name", ["causal_mqa", "sinks_window_gqa", "temperature_mha"])
@pytest.mark.parametrize("scale", [0.02, 4.0])
def test_scale(name: str, scale: float, device: str) -> None:
    """Tangents are right from nearly uniform weights to scores in the hundreds."""
    result = run_case(built(name), spec_of(name), small(name), dtypes(name)[0], device, scale=scale, tangents=True)
    assert result.ok, str(result)


def test_bf16(device: str) -> None:
    result = run_case(built(NAME), spec_of(NAME), small(NAME, 129, 129), "bf16", device, tangents=True)
    assert result.ok, str(result)


@pytest.mark.share(16)
def test_tangents_of_16_bits_do_not_overflow_in_a_module_with_fp32(device: str) -> None:
    """A small weight times a large tangent does not overflow, before and after its cast to fp16."""
    spec = make_spec({"name": "both", "head_dim": 32, "dtype": ["fp16", "fp32"]})
    q, k, v = (x.half() for x in torch.randn(3, 1, 1, 512, 32, generator=torch.Generator().manual_seed(0)).to(device))
    q, along = q / 100, (torch.full_like(q, 3e4), torch.zeros_like(k), torch.zeros_like(v))
    attend = cached_module(spec).attention
    found = torch.func.jvp(lambda *x: attend(*x, return_lse=False), (q, k, v), along)[1]

    def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT * 32**-0.5, -1) @ v

    truth = torch.func.jvp(naive, tuple(x.double() for x in (q, k, v)), tuple(x.double() for x in along))[1]
    assert truth.abs().max() < 6e4 and relative_error(found, truth) < 2e-3


@pytest.mark.parametrize("name", PADDED)
def test_rows_that_see_no_key_have_tangents_of_zero(name: str, device: str) -> None:
    case = small(name, 70, 129)
    result = run_case(
        built(name),
        spec_of(name),
        case,
        dtypes(name)[0],
        device,
        inputs=padding(name, [0, 77], 129, device),
        tangents=True,
    )
    assert result.ok, str(result)
    q, k, v, _ = make_inputs(spec_of(name), case, torch_dtype(dtypes(name)[0]), device)
    given = padding(name, [0, 77], 129, device)
    _, tangents = torch.func.jvp(lambda *x: built(name).attention(*x, **given, return_lse=True), (q, k, v), (q, k, v))
    assert all(not x[0].any() and x[1].any() for x in tangents)


VARIANTS: dict[str, dict[str, Any]] = {
    "learned by distance": {"score": [{"relative_bias": {"max_distance": 16}}]},
    "learned by score, of a function": {
        "score": [
            {
                "expr": "tanh(s * w[h]) + 0.1 * bias[b, h, q_idx, kv_idx]",
                "params": {
                    "w": {"tensor": ["H"], "grad": True},
                    "bias": {"tensor": ["B", "H", "Nq", "Nk"], "grad": True},
                },
            }
        ],
        "heads": {"sharing": "gqa"},
    },
    "several reads of one input": {
        "score": [
            {"expr": "s + t[h, 0] * s + sqrt(abs(t[h, 1]) + 1)", "params": {"t": {"tensor": ["H", 2], "grad": True}}}
        ],
    },
    "an infinite slope": {"score": [{"expr": "sqrt(abs(s)) + s"}], "mask": "causal"},
    "a sink and entropies": {
        "score": ["sink"],
        "outputs": ["entropy", "max_score"],
        "mask": {"sliding_window": {"left": 20, "right": 0}},
    },
    "entropies and dropout": {"outputs": ["entropy"], "dropout": True, "heads": {"sharing": "mqa"}, "mask": "causal"},
    "narrow values": {"head_dim": {"qk": 40, "v": 24}, "mask": "causal"},
    "tf32": {"dtype": "fp32", "fp32_precision": "tf32", "mask": {"dilated": {"step": 7}}},
    "a mask of data": {
        "mask": {
            "expr": "allowed[b, q_idx, kv_idx]",
            "params": {"allowed": {"tensor": ["B", "Nq", "Nk"], "dtype": "bool"}},
        },
        "outputs": ["key_mass"],
        "heads": {"sharing": "gqa"},
    },
    "keys outside": {"schedule": {"order": "kv_outer"}, "mask": "causal"},
}


@pytest.mark.share(16)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, device: str, tmp_path: Any) -> None:
    spec = make_spec({"name": "variant", "head_dim": 32, "dtype": "fp16", **VARIANTS[name]})
    module = module_of(spec, tmp_path / "variant")
    for n_q, n_kv in ((70, 70), (33, 90)):
        result = run_case(module, spec, Case(2, *heads_for(spec), n_q, n_kv), spec.dtype[0], device, tangents=True)
        assert result.ok, str(result)


# ------------------------------------------------------------------------------------------------- PyTorch's interfaces


def problem(
    name: str, device: str, n_q: int = 33, n_kv: int = 50
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]:
    """(q, k, v), their tangents, and the inputs of mask, modifiers and dropout."""
    case, dtype = small(name, n_q, n_kv), torch_dtype(dtypes(name)[0])
    *points, inputs = make_inputs(spec_of(name), case, dtype, device)
    *along, _ = make_inputs(spec_of(name), case, dtype, device, seed=1)
    return points, along, {**inputs, **({"dropout_p": 0.3, "seed": 5} if spec_of(name).dropout else {})}


@pytest.mark.parametrize("name", FEW)
def test_dual_tensors_and_jvp_agree(name: str, device: str) -> None:
    """They agree to the bit; their results are those of a call without tangents."""
    points, along, inputs = problem(name, device)
    attention = built(name).attention
    expected = attention(*points, **inputs, return_lse=True)
    results, tangents = torch.func.jvp(lambda *x: attention(*x, **inputs, return_lse=True), tuple(points), tuple(along))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(points, along)]
        for found in (attention(*duals, **inputs, return_lse=True), [attention(*duals, **inputs), None]):
            for x, result, tangent in zip(found, results, tangents):
                if x is not None:
                    primal, along_it = forward_ad.unpack_dual(x)
                    assert primal.equal(result) and along_it is not None and along_it.equal(tangent)
        plain = attention(*points, **inputs, return_lse=True)
        assert all(forward_ad.unpack_dual(x).tangent is None for x in plain)
    assert all(a.equal(b) and a.equal(c) for a, b, c in zip(expected, results, plain))


def test_operators_take_dual_tensors(device: str) -> None:
    (q, k, v), along, _ = problem(NAME, device)
    _, expected = torch.func.jvp(
        lambda *x: built(NAME).attention(*x, scale=0.1, return_lse=True), (q, k, v), tuple(along)
    )
    with torch.no_grad(), forward_ad.dual_level():
        results = built(NAME).FORWARD(*(forward_ad.make_dual(x, t) for x, t in zip((q, k, v), along)), 0.1)
        assert all(forward_ad.unpack_dual(x).tangent.equal(t) for x, t in zip(results, expected))


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_what_has_no_tangent_has_one_of_zero(which: tuple[int, ...], device: str) -> None:
    points, along, _ = problem(NAME, device)
    whole = [t if at in which else torch.zeros_like(t) for at, t in enumerate(along)]
    _, expected = torch.func.jvp(lambda *x: built(NAME).attention(*x), tuple(points), tuple(whole))

    def some(*x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = built(NAME).attention(*(dict(zip(which, x)).get(at, y) for at, y in enumerate(points)))
        return out

    _, found = torch.func.jvp(some, tuple(points[at] for at in which), tuple(along[at] for at in which))
    assert found.equal(expected)


def test_tangents_may_lie_anywhere(device: str) -> None:
    """Tangents may be expanded, transposed, of stride 2, or lazily negated."""
    points, along, _ = problem(NAME, device)
    attention = built(NAME).attention
    views = [
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch._neg_view(-t),
        lambda t: t[:1, :1, :1].expand(t.shape),
    ]
    for view in views:
        given = [view(t) for t in along]
        plain = [t.clone(memory_format=torch.contiguous_format) for t in given]
        found, expected = (torch.func.jvp(attention, tuple(points), tuple(x))[1] for x in (given, plain))
        assert found.equal(expected)


def test_fp32_arguments_under_autocast(device: str) -> None:
    points, along, _ = problem(NAME, device)
    _, expected = torch.func.jvp(built(NAME).attention, tuple(points), tuple(along))
    wide = [[x.float() for x in some] for some in (points, along)]
    with torch.autocast(device, torch_dtype(dtypes(NAME)[0])):
        _, found = torch.func.jvp(built(NAME).attention, tuple(wide[0]), tuple(wide[1]))
    assert found.equal(expected)


class Block(torch.nn.Module):
    """A small network as MeanFlow's, whose velocity u(z, t) is computed with attention."""

    def __init__(self, attention: Any, columns: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.attention = attention
        self.inner, self.outer = (
            torch.nn.Linear(*size, device=device) for size in ((columns, 3 * columns), (columns, columns))
        )
        self.time, self.dtype, self.columns = torch.nn.Parameter(torch.randn(columns, device=device)), dtype, columns

    def forward(self, z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x = self.inner(z + t * self.time).unflatten(-1, (3, 2, self.columns // 2)).permute(2, 0, 3, 1, 4).to(self.dtype)
        out: torch.Tensor = self.attention(*x).to(z.dtype).transpose(1, 2).flatten(2)
        return z + self.outer(out)


def mean_flow(network: Block, z: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """MeanFlow (Geng et al. 2025), algorithm 1: the loss, the tangent of u, and the gradients of the loss, whose
    target has the detached tangent."""
    t, r = torch.full((), 0.8, device=z.device), 0.3
    u, dudt = torch.func.jvp(network, (z, t), (v, torch.ones_like(t)))
    loss = (u - (v - (t - r) * dudt).detach()).square().mean()
    return [loss.detach(), dudt, *torch.autograd.grad(loss, list(network.parameters()))]


def test_a_step_of_mean_flow_has_the_gradients_of_naive_attention(device: str) -> None:
    """The parameters' gradients flow only through u, by the ordinary backward."""
    full = "full_mha"
    spec, dtype = spec_of(full), torch_dtype(dtypes(full)[0])

    def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return naive_attention(q, k, v, reference_mask(spec.mask, q, k, {}), q.shape[3] ** -0.5)[0]

    found = []
    for attention, own in ((built(full).attention, dtype), (naive, dtype), (naive, torch.float64)):
        torch.manual_seed(0)
        network = Block(attention, 128, own, device)
        z, v = torch.randn(2, 2, 40, 128, device=device)
        if own == torch.float64:
            network = network.double()
            z, v = z.double(), v.double()
        found.append(mean_flow(network, z, v))
    for ours, same, exact in zip(*found):
        floor = torch.finfo(dtype).eps / 2
        assert relative_error(ours, exact) <= 2 * max(relative_error(same, exact), floor)


def test_gradients_under_transforms_of_torch_func(device: str) -> None:
    """`grad` and `vjp` give what autograd gives; so does `grad` through a jvp whose tangent is detached."""
    points, along, _ = problem(NAME, device)
    attention = built(NAME).attention
    leaves = [x.requires_grad_() for x in points]
    expected = torch.autograd.grad(attention(*leaves), leaves, torch.ones_like(points[0]))
    plain = tuple(x.detach() for x in points)
    assert all(a.equal(b) for a, b in zip(torch.func.vjp(attention, *plain)[1](torch.ones_like(plain[0])), expected))
    found = torch.func.grad(lambda *x: torch.func.jvp(attention, x, tuple(along))[0].sum(), (0, 1, 2))(*plain)
    assert all(a.equal(b) for a, b in zip(found, expected))


def test_no_ordinary_call_is_a_recorded_operator(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls outside of a dual level take the fast path."""
    points, along, _ = problem(NAME, device)
    seen: list[Any] = []
    operators, apply = built(NAME).OPERATORS, built(NAME).OPERATORS.recorded.apply
    monkeypatch.setattr(operators.recorded, "apply", lambda *args: seen.append(args) or apply(*args))
    for leaves in (points, [x.detach().requires_grad_() for x in points]):
        built(NAME).attention(*leaves)
    assert not seen
    torch.func.jvp(built(NAME).attention, tuple(points), tuple(along))
    assert seen


def test_opcheck_of_the_operator(device: str) -> None:
    for name in (NAME, "temperature_mha"):
        points, along, inputs = problem(name, device, 20, 30)
        module, given = built(name), [inputs[i.name] for i in spec_of(name).inputs()]
        results = module.FORWARD(*points, *given, 0.125)
        torch.library.opcheck(
            module.OPERATORS.jvp, (*points, *results, *along, *given, 0.125, *map(torch.randn_like, given))
        )


# ------------------------------------------------------------------------------------------------- refused calls


def test_the_tangent_has_no_gradient(device: str) -> None:
    points, along, _ = problem(NAME, device)
    leaves = [x.requires_grad_() for x in points]
    sentence = (
        "attention: the tangents that forward mode gives cannot be differentiated again; expected that of the output "
        "detached"
    )
    out, tangent = torch.func.jvp(lambda q: built(NAME).attention(q, *leaves[1:]), (leaves[0].detach(),), (along[0],))
    assert tangent.requires_grad and all(
        x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves[1:], retain_graph=True)
    )
    with pytest.raises(RuntimeError, match=sentence):
        torch.autograd.grad(tangent.sum(), leaves[1])
    with forward_ad.dual_level():
        dual = built(NAME).attention(forward_ad.make_dual(leaves[0], along[0]), *leaves[1:])
        with pytest.raises(RuntimeError, match=sentence):
            torch.autograd.grad(forward_ad.unpack_dual(dual).tangent.sum(), leaves[0])
    for order in (torch.func.grad, lambda f: lambda q: torch.func.jvp(f, (q,), (along[0],))[1]):

        def tangent_of(q: torch.Tensor) -> torch.Tensor:
            return torch.func.jvp(lambda x: built(NAME).attention(x, *points[1:]).sum(), (q,), (along[0],))[1]

        with pytest.raises(RuntimeError, match=sentence):
            order(tangent_of)(points[0].detach())


def test_gradients_have_no_tangent(device: str) -> None:
    """Forward mode over the backward is also a second derivative."""
    points, along, _ = problem(NAME, device)
    gradient = torch.func.grad(lambda q: built(NAME).attention(q, *points[1:]).sum())
    with pytest.raises(RuntimeError, match="attention: its gradients cannot be differentiated again"):
        torch.func.jvp(gradient, (points[0],), (along[0],))


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian, torch.func.jacrev])
def test_transforms_that_map_are_refused(transform: Any, device: str) -> None:
    points, _, _ = problem(NAME, device)
    with pytest.raises(
        NotImplementedError,
        match="attention: torch.func.vmap cannot map it; expected the mapped dimension as part of B",
    ):
        transform(lambda q: built(NAME).attention(q, *points[1:]))(points[0])


def test_an_input_without_gradient_has_no_tangent(device: str, tmp_path: Any) -> None:
    score = {"expr": "s * w[h]", "params": {"w": {"tensor": ["H"]}}}
    module = module_of(make_spec({"name": "fixed", "head_dim": 32, "score": [score]}), tmp_path / "fixed")
    q, w = torch.randn(1, 2, 20, 32, device=device, dtype=torch.float16), torch.ones(2, device=device)
    with pytest.raises(
        NotImplementedError,
        match="attention: w has a tangent; expected one only of q, k, v and inputs with `grad: true`",
    ):
        torch.func.jvp(lambda w: module.attention(q, q, q, w=w), (w,), (w,))
    _, tangent = torch.func.jvp(lambda q: module.attention(q, q, q, w=w), (q,), (q,))
    assert tangent.isfinite().all() and tangent.any()


def test_a_module_without_a_backward_has_no_forward_mode(device: str, tmp_path: Any) -> None:
    module = module_of(make_spec({"name": "with_cache", "head_dim": 32, "backward": False}), tmp_path / "served")
    q = torch.randn(1, 2, 20, 32, device=device, dtype=torch.float16)
    sentence = r"no forward mode \(its spec says `backward: false` or `positions`\)"
    with pytest.raises(NotImplementedError, match=sentence):
        torch.func.jvp(lambda q: module.attention(q, q, q), (q,), (q,))
    with forward_ad.dual_level():
        assert module.attention(q, q, q).equal(module.attention(q, q, q))
        with pytest.raises(NotImplementedError, match=sentence):
            module.attention(forward_ad.make_dual(q, q), q, q)


def test_calls_with_a_cache_have_no_forward_mode(device: str) -> None:
    q = torch.randn(1, 4, 1, 128, device=device, dtype=torch.float16)
    with (
        forward_ad.dual_level(),
        pytest.raises(
            NotImplementedError, match="attention.with_kvcache has no forward mode; expected tensors without tangents"
        ),
    ):
        built("decode_gqa").attention.with_kvcache(forward_ad.make_dual(q, q), q, q, cache_seqlens=None)


# ------------------------------------------------------------------------------------------------- the kernel


def test_there_are_five_products_and_no_running_maximum() -> None:
    kernel = build_module(spec_of(NAME)).kernel("jvp")
    assert len(list(only(kernel.ops(), tile.Dot))) == 5 and not kernel.traits.normalises
    assert all(any(k.name == "jvp" for k in build_module(spec_of(name)).kernels) for name in TRAINED)


CHANGED = {
    "mask": ("logical", "Nk - Nq + q_idx >= kv_idx", "Nk - Nq + q_idx > kv_idx"),
    "scores": ("target", "exp2(-lse2 + masked*qk_scale)", "exp2(-lse2 + 2*masked*qk_scale)"),
    "covers": (
        "target",
        "%keys_full = loop kv ranges(0 .. kv_full_end)",
        "%keys_full = loop kv ranges(1 .. kv_full_end)",
    ),
    "host-structure": ("target", "yield values(tO=%tO, tLSE=%tLSE)", "yield values(tO=%tO)"),
}


@pytest.mark.parametrize("rule", CHANGED)
def test_the_verifier_holds_it(rule: str) -> None:
    """Its mask and scores are the header's, it visits all that the mask shows, and its host program gives all
    tangents."""
    phase, *change = CHANGED[rule]
    text = print_module(build_module(spec_of(NAME)) if phase == "logical" else target(NAME))
    at = "host @jvp" if rule.startswith("host") else "kernel @jvp"
    head, found, rest = text.partition(at)
    with pytest.raises(VerifyError, match="jvp") as caught:
        verify(parse_module(head + found + edit(rest, (change[0], change[1]))))
    assert caught.value.rule == rule


@pytest.mark.parametrize(("other", "what"), [("dfoo", "gradient"), ("tfoo", "tangent")])
def test_names_of_derivatives_are_taken(other: str, what: str) -> None:
    params = {"foo": {"tensor": ["H"], "grad": True}, other: {"tensor": ["H"]}}
    score = [{"expr": f"s * {other}[h] + foo[h]", "params": params}]
    with pytest.raises(
        SpecError,
        match=f"declares `{other}`, the name of the {what} of `foo` in generated code; expected another one",
    ):
        make_spec({"name": "wrong", "head_dim": 32, "score": score})
    assert make_spec({"name": "right", "head_dim": 32, "backward": False, "score": score})
