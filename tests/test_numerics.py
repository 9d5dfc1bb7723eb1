"""Every committed module against naive attention: forward, all gradients, layouts, empty rows, edge sizes.

The same tests run on CUDA and, with smaller shapes, in Triton's interpreter; `attngen test --report` adds the largest.
The bar is `Result.ok`: errors are at most twice those of naive attention in the same dtype, both against fp64.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.builders import build_module
from attngen.conformance.cases import Case, heads_for, make_gradients, make_inputs, torch_dtype
from attngen.conformance.harness import fp32_products, load_module, run_case
from attngen.conformance.oracle import naive_attention, reference_mask, relative_error, rows_matmul, truncated_matmul
from attngen.conformance.result import KEYS
from attngen.heuristics import SPLIT_KEYS
from attngen.masks import MAX_OFFSET
from attngen.spec import make_spec
from tests.conftest import CUDA
from tests.helpers import FEW, KINDS, NIGHTLY, ROOT, SMALLER, SPECS, WRAPPERS, built, module_of
from tests.helpers import spec as spec_of

pytestmark = pytest.mark.numerics

SQUARE = [(1, 1), (17, 17), (127, 127), (129, 129)]
SHAPES = [*((n, m, "bhnd") for n, m in [*SQUARE, (100, 300), (300, 100)])]
SHAPES += [(129, 129, "bnhd"), (65, 65, "packed"), (40, 129, "expanded"), (100, 130, "island"), (130, 100, "island")]
# Longer shapes in the interpreter, by spec
LONG = {"causal_mqa": [(1000, 1000)], "padding_mha": [(700, 700)], "window_gqa": [(140, 1200), (33, 1500)]}
SEQUENCES = 2 if CUDA else 1  # where a second sequence would test nothing more


def dtypes(name: str) -> list[str]:
    """Return the element types to test a spec in. The interpreter cannot multiply bf16, so there one test covers its
    fp32 substitute."""
    return [d for d in spec_of(name).dtype if CUDA or d != "bf16"] or list(spec_of(name).dtype)


def first_dtype(name: str) -> torch.dtype:
    return torch_dtype(dtypes(name)[0])


def with_dtypes(names: list[str]) -> list[tuple[str, str]]:
    return [(name, dtype) for name in names for dtype in dtypes(name)]


def small(name: str, n_q: int = 65, n_kv: int = 65, layout: str = "bhnd", batch: int = 2) -> Case:
    """Return a case with four query heads; with two in the interpreter, except for gqa."""
    q_heads = 4 if CUDA or spec_of(name).heads.sharing == "gqa" else 2
    return Case(batch, *heads_for(spec_of(name), q_heads), n_q, n_kv, layout)


def problem(
    name: str, case: Case, device: str, **changed: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Any]:
    """Return (leaves q, k, v; mask inputs; gradients of out and LSE) of a case, in the first tested dtype."""
    q, k, v, inputs = make_inputs(spec_of(name), case, first_dtype(name), device)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return leaves, {**inputs, **changed}, make_gradients(spec_of(name), case, first_dtype(name), device)


def run(
    name: str, leaves: list[torch.Tensor], inputs: dict[str, torch.Tensor], grads: Any, **options: Any
) -> dict[str, torch.Tensor]:
    """Return results and gradients of the built module, by KEYS."""
    out, lse = built(name).attention(*leaves, **inputs, **options, return_lse=True)
    return dict(zip(KEYS, (out, lse, *torch.autograd.grad((out, lse), leaves, grads))))


def mask_inputs(name: str) -> set[str]:
    return {i.name for i in spec_of(name).mask.inputs()}


PADDED = [n for n in SPECS if mask_inputs(n) & {"key_padding", "kv_lengths"}]


def padding(name: str, lengths: list[int], n_kv: int, device: str) -> dict[str, torch.Tensor]:
    """Return inputs of a padding mask that shows the first lengths[b] keys of sequence b."""
    ends = torch.tensor(lengths, dtype=torch.int32, device=device)
    if "kv_lengths" in mask_inputs(name):
        return {"kv_lengths": ends}
    return {"key_padding": torch.arange(n_kv, device=device) < ends[:, None]}


# ---------------------------------------------------------------------------------------- matrix products of the oracle


def test_products_in_tf32_ignore_the_last_thirteen_bits() -> None:
    """The bits are ignored in operands and in gradients; products of operands without such bits are exact."""
    whole = torch.randint(-1023, 1024, (2, 40, 30)).float().requires_grad_()
    near_one = (1 + torch.rand(2, 30, 20) * 2**-11).requires_grad_()
    product = truncated_matmul(whole, near_one)
    assert torch.equal(product, whole.sum(-1, keepdim=True).expand(2, 40, 20))
    by_whole, by_near_one = torch.autograd.grad(product, (whole, near_one), 1 + torch.rand_like(product) * 2**-11)
    assert torch.equal(by_whole, torch.full_like(whole, 20.0))
    assert torch.equal(by_near_one, whole.sum(1)[..., None].expand(2, 30, 20))


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_product_of_one_row_is_that_of_matrices(rows: int) -> None:
    a, b = (torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in ((rows, 30), (30, 20)))
    found, wanted = rows_matmul(a, b), a @ b
    assert torch.allclose(found, wanted)
    upstream = torch.randn_like(wanted)
    assert all(torch.allclose(*x) for x in zip(*(torch.autograd.grad(y, (a, b), upstream) for y in (found, wanted))))


def test_products_of_naive_attention_are_those_of_kernels() -> None:
    """Sums are those of tiles of 16 rows in the interpreter and of 2 on a GPU. Products are in TF32 if the spec asks
    for it, except in the interpreter."""
    whole, quick = (
        make_spec({"name": "one", "head_dim": 64, "dtype": "fp32", "fp32_precision": p}) for p in ("ieee", "tf32")
    )
    a, b = torch.randn(1, 128), torch.randn(128, 200)
    for spec, queries in ((whole, 1), (whole, 15), (quick, 1)):
        product, operand = fp32_products(spec, "fp32", "cpu", queries)
        assert torch.equal(product(a, b), (a.repeat(16, 1) @ b)[:1]) and operand == 0
    assert fp32_products(whole, "fp32", "cpu", 16) == fp32_products(whole, "fp32", "cuda", 2) == (torch.matmul, 0.0)
    assert fp32_products(quick, "fp32", "cuda", 1) == (truncated_matmul, 2**-11)


def test_modules_in_tf32_are_as_exact_as_its_products(tmp_path: Path, device: str) -> None:
    """This holds for queries that see few keys, too, as delta is not a TF32 product, but dP is."""
    spec = make_spec(
        {"name": "quick", "head_dim": 64, "mask": {"dilated": {"step": 7}}, "dtype": "fp32", "fp32_precision": "tf32"}
    )
    module = module_of(spec, tmp_path / "quick")
    for shape in ((1, 33), (17, 129), (129, 70), *([(1000, 1000)] if CUDA else [])):
        result = run_case(module, spec, Case(4, 2, 2, *shape), "fp32", device)
        assert result.ok, str(result)
        assert not CUDA or result.ours["out"] > 1e-4  # in fp32 it would be smaller


# ---------------------------------------------------------------------------------------- against naive


def cases() -> list[Any]:
    """Return every spec, element type and shape; in the interpreter one shape for specs in SMALLER, and five for specs
    that differ only in heads."""

    def shapes(name: str) -> list[tuple[int, int, str]]:
        return SHAPES if CUDA or name in KINDS else SHAPES[-2:-1] if name in SMALLER else SHAPES[3:8]

    def marks(name: str, layout: str) -> Any:
        """Specs that differ only in heads repeat the layout bnhd, so this runs nightly."""
        return NIGHTLY if name not in (*KINDS, *SMALLER) and layout == "bnhd" else ()

    found = ((n, d, s) for n, d in with_dtypes(SPECS) for s in shapes(n))
    return [pytest.param(n, d, s, id=f"{n}-{d}-{s[0]}x{s[1]}-{s[2]}", marks=marks(n, s[2])) for n, d, s in found]


@pytest.mark.parametrize(("name", "dtype", "shape"), cases())
def test_against_naive(name: str, dtype: str, shape: tuple[int, int, str], device: str) -> None:
    batch = SEQUENCES if shape in SHAPES[2:6] else 2
    result = run_case(built(name), spec_of(name), small(name, *shape, batch=batch), dtype, device)
    assert result.ok, str(result)


@pytest.mark.parametrize(
    ("name", "shape"), [(n, s) for n in SPECS for s in ([(1000, 1000), (33, 1500)] if CUDA else LONG.get(n, []))]
)
def test_longer(name: str, shape: tuple[int, int], device: str) -> None:
    spec = spec_of(name)
    result = run_case(built(name), spec, Case(1, *heads_for(spec, 2), *shape), dtypes(name)[0], device)
    assert result.ok, str(result)


@pytest.mark.parametrize("scale", [0.02, 1, 4.0])
@pytest.mark.parametrize("name", KINDS)
def test_scale(name: str, scale: float, device: str) -> None:
    """Scales give nearly uniform weights up to scores in the hundreds; one is an integer."""
    result = run_case(built(name), spec_of(name), small(name, batch=SEQUENCES), dtypes(name)[0], device, scale=scale)
    assert result.ok, str(result)


@pytest.mark.parametrize("name", [n for n in KINDS if "bf16" in spec_of(n).dtype])
def test_bf16(name: str, device: str) -> None:
    """Inputs and outputs are bf16, with bf16's accuracy; the interpreter computes in fp32."""
    case = small(name, 129, 129)
    q, k, v, inputs = make_inputs(spec_of(name), case, torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = built(name).attention(*leaves, **inputs, return_lse=True)
    (out.sum() + lse.masked_fill(lse.isinf(), 0).sum()).backward()
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert all(x.grad.dtype == torch.bfloat16 for x in leaves)
    result = run_case(built(name), spec_of(name), case, "bf16", device)
    assert result.ok, str(result)


@pytest.mark.share(16)
@pytest.mark.parametrize("bounds", [{"left": MAX_OFFSET, "right": 0}, {"left": 0, "right": MAX_OFFSET}], ids=str)
def test_a_window_as_wide_as_there_is(bounds: dict[str, int], device: str, tmp_path: Path) -> None:
    """Loop bounds add the sides of the window, in 32 bits."""
    spec = make_spec({"name": "wide", "head_dim": 64, "mask": {"sliding_window": bounds}})
    result = run_case(module_of(spec, tmp_path / "wide"), spec, Case(1, 2, 2, 100, 300), "fp16", device)
    assert result.ok, str(result)


PATTERNS = {
    "right": [129, 40],
    "tile": [64, 128],
    "one key": [1, 129],
    "none": [0, 77],
    "none at all": [0, 0],
    "beyond": [1000, -5],  # lengths past the ends are clamped in calls without checks
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", PADDED)
def test_padding(name: str, pattern: str, device: str) -> None:
    inputs = padding(name, PATTERNS[pattern], 129, device) | ({"check": False} if pattern == "beyond" else {})
    result = run_case(built(name), spec_of(name), small(name, 100, 129), dtypes(name)[0], device, inputs=inputs)
    assert result.ok, str(result)


@pytest.mark.parametrize("name", [n for n in SPECS if "key_padding" in mask_inputs(n)])
def test_padding_on_any_side(name: str, device: str) -> None:
    """Visible keys are in the middle, at the end, in stripes or at one position, with strided and expanded masks."""
    n = 300
    at = torch.arange(n, device=device)
    for visible in ((at >= 64) & (at < 256), at >= 170, at // 64 % 2 == 1, at == 200, at != 0, (at * 7919) % 3 == 0):
        wide = torch.stack([visible, ~visible]).to(device)
        for mask in (wide, visible.expand(2, n), torch.cat([wide, ~wide], 1)[:, :n])[: 3 if CUDA else 1]:
            result = run_case(
                built(name), spec_of(name), small(name, 70, n), dtypes(name)[0], device, inputs={"key_padding": mask}
            )
            assert result.ok, str(result)


@pytest.mark.parametrize("name", PADDED)
def test_padding_in_any_strides(name: str, device: str) -> None:
    """Mask inputs may be transposed in memory, or one element expanded to all."""
    leaves, inputs, grads = problem(name, small(name, 40, 70), device)
    ((key, x),) = inputs.items()
    transposed = torch.stack([x, x.roll(1)], -1)[..., 0]
    for view in (transposed, x.flatten()[0].expand(x.shape)):
        assert view.stride(-1) != 1
        expected, found = (
            run(name, leaves, {key: y}, grads) for y in (view.clone(memory_format=torch.contiguous_format), view)
        )
        assert all(found[k].equal(expected[k]) for k in KEYS)


# ---------------------------------------------------------------------------------------- rows that see nothing


def alone(name: str, inputs: dict[str, Any], lse: torch.Tensor) -> torch.Tensor:
    """Return the LSE of a row that sees no key: -inf, or its sink."""
    sinks = [part.reference_sink(inputs) for part in spec_of(name).score]
    sink = next((s for s in sinks if s is not None), torch.full((1,), -torch.inf, device=lse.device))
    two = (
        torch.exp2(torch.log2(torch.ones_like(sink))) * (sink * 1.4426950408889634) * 0.6931471805599453
    )  # rounded as in the kernel
    return two[None, :, None].expand(lse.shape) if len(sink) > 1 else torch.full_like(lse, -torch.inf)


def empty_cases() -> list[tuple[str, int, int, str]]:
    cases = [
        (n, 300, 100, "")
        for n in WRAPPERS
        if "causal" in spec_of(n).mask.describe() or "window" in spec_of(n).mask.describe()
    ]
    return (
        cases + [(n, 100, 130, p) for n in PADDED for p in ("none", "none at all")] + [(n, 65, 0, "") for n in WRAPPERS]
    )


@pytest.mark.parametrize(("name", "n_q", "n_kv", "pattern"), empty_cases())
def test_rows_that_see_nothing(name: str, n_q: int, n_kv: int, pattern: str, device: str) -> None:
    """Such rows have exact zeros, an LSE of -inf and zero gradients, for any incoming gradient of their LSE."""
    case = small(name, n_q, n_kv)
    changed = (
        padding(name, PATTERNS[pattern], n_kv, device)
        if pattern
        else padding(name, [n_kv] * 2, n_kv, device)
        if name in PADDED
        else {}
    )
    leaves, inputs, (grad_out, grad_lse) = problem(name, case, device, **changed)
    sees = reference_mask(spec_of(name).mask, leaves[0], leaves[1], inputs).expand(*leaves[0].shape[:3], n_kv)
    empty, unseen = ~sees.any(-1), ~sees.any(-2)
    assert empty.any()
    if (alone(name, inputs, grad_lse) == -torch.inf).all():
        grad_lse = grad_lse.masked_fill(empty, torch.nan)  # as the backward of logaddexp(-inf, -inf)
    found = run(name, leaves, inputs, (grad_out, grad_lse))
    assert (found["lse"] == alone(name, inputs, found["lse"])).equal(empty)
    for key in ("out", "dq"):
        assert (found[key][empty] == 0).all(), key
    group = case.q_heads // case.kv_heads
    ignored = unseen.unflatten(1, (case.kv_heads, group)).all(2)
    for key in ("dk", "dv"):
        assert (found[key][ignored] == 0).all(), key
    assert all(found[key].isfinite().all() for key in ("out", "dq", "dk", "dv"))


# ---------------------------------------------------------------------------------------- heads that share tiles


@pytest.mark.share(16)
@pytest.mark.parametrize("sharing", ["gqa", "mqa"])
@pytest.mark.parametrize("n_q", [1, 5, 17, 63, 64])
def test_few_queries_of_heads_that_differ(sharing: str, n_q: int, device: str, tmp_path: Path) -> None:
    """With pack-GQA heads keep their own masks and scores; with 64 queries or more heads do not share tiles."""
    made = make_spec(
        {
            "name": "by_head",
            "heads": {"sharing": sharing},
            "head_dim": 16,
            "dtype": ["fp16"],
            "mask": {"expr": "kv_idx <= q_idx + kv_len - q_len - 3 * h"},
            "score": [{"expr": "s - 0.1 * h * abs(kv_idx - q_idx)"}],
        }
    )
    module = module_of(made, tmp_path / "by_head")
    for layout in ("bhnd", "bnhd"):
        result = run_case(
            module, made, Case(2, *((6, 2) if sharing == "gqa" else (3, 1)), n_q, 70, layout), "fp16", device
        )
        assert result.ok, str(result)


@pytest.mark.parametrize("n_q", [1, 17])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_few_queries_in_any_layout(order: tuple[int, ...], n_q: int, device: str) -> None:
    """With pack-GQA heads may have any layout, and results have the layout of the inputs."""
    leaves, inputs, grads = problem("causal_gqa", Case(2, 4, 2, n_q, 70), device)
    expected = run("causal_gqa", leaves, inputs, grads)
    back = [order.index(d) for d in range(3)]
    moved = [x.detach().permute(*order, 3).contiguous().permute(*back, 3).requires_grad_() for x in leaves]
    found = run("causal_gqa", moved, inputs, grads)
    for key in KEYS:
        assert relative_error(found[key], expected[key]) < 4 * torch.finfo(found[key].dtype).eps, key
        assert key == "lse" or found[key].permute(*order, 3).is_contiguous(), key


def test_what_reads_by_query_or_head_shares_no_tiles() -> None:
    """pack-GQA changes Nq and Hq, so specs with a tensor of these dimensions do not use it."""
    for dim, place in (("Nq", "kv_idx"), ("H", "2"), ("H", "h")):
        score = {"expr": f"s + t[{place}]", "params": {"t": {"tensor": [dim]}}}
        made = make_spec({"name": "one", "heads": {"sharing": "gqa"}, "head_dim": 16, "score": [score]})
        assert "packed" not in {kernel.name for kernel in build_module(made).kernels}


@pytest.mark.parametrize(("heads", "keys", "splits"), [((6, 2), 1, 1), ((12, 2), 141, 3), ((7, 1), 100, 7)])
def test_groups_split_among_programs(
    heads: tuple[int, int], keys: int, splits: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs share a tile of keys, each for some query heads, and their sums are the gradients. Fewer keys
    give more programs."""
    name = "causal_gqa" if heads[1] > 1 else "causal_mqa"
    module = built(name)
    room, found = module.runtime.room_for_splits, set()
    monkeypatch.setattr(module.runtime, "STEPS", {})  # forget calls with the real number of SMs
    monkeypatch.setattr(
        module.runtime, "num_sms", lambda device: Fraction(2 * keys, SPLIT_KEYS)
    )  # as for two tiles of `keys` keys
    monkeypatch.setattr(module.runtime, "room_for_splits", lambda x, n: (found.add(n), room(x, n))[1])
    result = run_case(module, spec_of(name), Case(1, *heads, 40, 70), dtypes(name)[0], device)
    assert result.ok, str(result)
    assert found == {splits}


# ---------------------------------------------------------------------------------------- calls and autograd


@pytest.mark.parametrize("name", FEW)
def test_twice_the_same_bits(name: str, device: str) -> None:
    leaves, inputs, grads = problem(name, small(name, 129, 200) if CUDA else small(name, 65, 100, batch=1), device)
    first, second = run(name, leaves, inputs, grads), run(name, leaves, inputs, grads)
    for key in KEYS:
        assert first[key].equal(second[key]), key
    out = built(name).attention(*leaves, **inputs)
    once = torch.autograd.grad(out, leaves, grads[0], retain_graph=True)
    assert all(a.equal(b) for a, b in zip(once, torch.autograd.grad(out, leaves, grads[0])))


@pytest.mark.parametrize("name", FEW)
def test_return_lse_and_the_module_twin(name: str, device: str) -> None:
    (q, k, v), inputs, _ = problem(name, small(name), device)
    alone = built(name).attention(q, k, v, **inputs)
    out, lse = built(name).attention(q, k, v, **inputs, return_lse=True)
    assert alone.equal(out)
    assert (out.shape, out.dtype) == ((*q.shape[:3], v.shape[3]), q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    twin = built(name).Attention()
    assert not twin.state_dict()
    assert twin(q, k, v, **inputs).equal(out)
    assert twin(q, k, v, **inputs, return_lse=True)[1].equal(lse)
    scaled = built(name).Attention(scale=0.3)
    assert "0.3" in repr(scaled)
    assert scaled(q, k, v, **inputs).equal(built(name).attention(q, k, v, **inputs, scale=0.3))


@pytest.mark.parametrize("name", FEW)
def test_only_the_gradients_asked_for(name: str, device: str) -> None:
    leaves, inputs, grads = problem(name, small(name, 33, 33, batch=SEQUENCES), device)
    expected = dict(zip(leaves, (run(name, leaves, inputs, grads)[key] for key in ("dq", "dk", "dv"))))
    for wanted in itertools.product([False, True], repeat=3):
        if not any(wanted):
            continue
        for x, need in zip(leaves, wanted):
            x.grad = None
            x.requires_grad_(need)
        out, lse = built(name).attention(*leaves, **inputs, return_lse=True)
        torch.autograd.backward((out, lse), grads)
        for x, need in zip(leaves, wanted):
            assert x.grad is None if not need else x.grad.equal(expected[x])
    for x in leaves:
        x.requires_grad_(False)
    assert not built(name).attention(*leaves, **inputs).requires_grad


@pytest.mark.parametrize("name", FEW)
def test_gradients_of_one_result_alone(name: str, device: str) -> None:
    """The gradients through only the output and only the LSE add up to the gradient of both."""
    leaves, inputs, (grad_out, grad_lse) = problem(name, small(name), device)
    out, lse = built(name).attention(*leaves, **inputs, return_lse=True)
    both = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse), retain_graph=True)
    of_out = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    of_lse = torch.autograd.grad(lse, leaves, grad_lse)
    assert (of_lse[2] == 0).all()
    for x, a, b in zip(both, of_out, of_lse):
        assert relative_error(a.double() + b.double(), x) < 2 * torch.finfo(x.dtype).eps + 1e-5


# ---------------------------------------------------------------------------------------- the bar itself


def wrong_module(name: str, mistake: str) -> Any:
    """Return a fake module: attention in fp32, rounded once at the end, with one mistake."""

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any, return_lse: bool, **inputs: Any
    ) -> Any:
        mask = reference_mask(spec_of(name).mask, q, k, inputs).clone()
        if mistake == "diagonal":
            mask = mask & ~torch.eye(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        if mistake == "one key":
            mask[..., -1, -1] = False
        factor = (scale or q.shape[-1] ** -0.5) * (1.01 if mistake == "scale" else 1.0)
        out, lse = naive_attention(q.float(), k.float(), v.float(), mask, factor)
        if mistake == "lse gradient":
            lse = lse.detach() + 0 * q.float().sum(-1)
        if mistake == "lse base":
            lse = lse / 0.6931
        if mistake in ("row", "nan"):
            out = out.clone()
            out[-1, -1, -1] = torch.nan if mistake == "nan" else out[-1, -1, -2]
        if mistake == "rounding":
            out = out.bfloat16()
        return out.to(q.dtype), lse

    return SimpleNamespace(attention=attention)


@pytest.mark.parametrize(
    "mistake", ["", "diagonal", "one key", "scale", "lse gradient", "lse base", "row", "nan", "rounding"]
)
def test_the_bar_sees_a_mistake(mistake: str) -> None:
    result = run_case(
        wrong_module("causal_mqa", mistake),
        spec_of("causal_mqa"),
        small("causal_mqa", 1000, 1000, batch=1),
        "fp16",
        "cpu",
    )
    assert result.ok == (not mistake), str(result)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LN2 = tl.constexpr(0.6931", "LN2 = tl.constexpr(0.6938"),
        ("dk * scale", "dk"),
        ("D_V = tl.constexpr(64)", "D_V = tl.constexpr(32)"),
    ],
)
def test_the_bar_sees_a_wrong_kernel(
    old: str, new: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_BACKEND", "triton")  # on every device the call runs kernels.py, which has the mistake
    for path in (ROOT / "generated" / "causal_mqa").glob("*.py"):
        text = path.read_text()
        if path.name == "kernels.py":
            assert old in text
            text = text.replace(old, new)
        (tmp_path / path.name).write_text(text)
    assert not run_case(
        load_module(tmp_path), spec_of("causal_mqa"), small("causal_mqa"), dtypes("causal_mqa")[0], device
    ).ok
