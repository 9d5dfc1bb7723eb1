"""Every committed module against naive attention: forward, all gradients, layouts, empty rows, edge sizes.

The same tests run on CUDA and, with smaller shapes, in Triton's interpreter; `attngen test --report` adds the largest.
The bar is `Result.ok`: no error above twice naive attention's in the same dtype, both against fp64.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.builders import build_module
from attngen.conformance.harness import (
    KEYS,
    Case,
    fp32_products,
    heads_for,
    load_module,
    make_gradients,
    make_inputs,
    run_case,
    torch_dtype,
)
from attngen.conformance.oracle import naive_attention, reference_mask, relative_error, rows_matmul, truncated_matmul
from attngen.heuristics import SPLIT_KEYS
from attngen.masks import MAX_OFFSET
from attngen.spec import make_spec
from tests.conftest import CUDA
from tests.helpers import FEW, KINDS, NIGHTLY, ROOT, SMALLER, SPECS, WRAPPERS, built, module_of
from tests.helpers import spec as spec_of

SQUARE = [(1, 1), (17, 17), (127, 127), (129, 129)]
SHAPES = [*((n, m, "bhnd") for n, m in [*SQUARE, (100, 300), (300, 100)])]
SHAPES += [(129, 129, "bnhd"), (65, 65, "packed"), (40, 129, "expanded"), (100, 130, "island"), (130, 100, "island")]
LONG = {
    "causal_mqa": [(1000, 1000)],
    "padding_mha": [(700, 700)],
    "window_gqa": [(140, 1200), (33, 1500)],
}  # in the interpreter
SEQUENCES = 2 if CUDA else 1  # where a second one says nothing more
EMPTY_SIZES = {
    "no batch": (0, 4, 65, 65),
    "no heads": (2, 0, 65, 65),
    "no queries": (2, 4, 0, 65),
    "no keys": (2, 4, 65, 0),
}


def dtypes(name: str) -> list[str]:
    """Element types to test a spec in: the interpreter cannot multiply bf16, so there one test covers what stands in
    for it."""
    return [d for d in spec_of(name).dtype if CUDA or d != "bf16"] or list(spec_of(name).dtype)


def first_dtype(name: str) -> torch.dtype:
    return torch_dtype(dtypes(name)[0])


def with_dtypes(names: list[str]) -> list[tuple[str, str]]:
    return [(name, dtype) for name in names for dtype in dtypes(name)]


def small(name: str, n_q: int = 65, n_kv: int = 65, layout: str = "bhnd", batch: int = 2) -> Case:
    """A case of four query heads; in the interpreter of two, where these are two K/V heads, or one."""
    q_heads = 4 if CUDA or spec_of(name).heads.sharing == "gqa" else 2
    return Case(batch, *heads_for(spec_of(name), q_heads), n_q, n_kv, layout)


def problem(
    name: str, case: Case, device: str, **changed: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Any]:
    """(leaves q, k, v; mask inputs; gradients of out and LSE) of a case, in the first dtype tested."""
    q, k, v, inputs = make_inputs(spec_of(name), case, first_dtype(name), device)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return leaves, {**inputs, **changed}, make_gradients(spec_of(name), case, first_dtype(name), device)


def run(
    name: str, leaves: list[torch.Tensor], inputs: dict[str, torch.Tensor], grads: Any, **options: Any
) -> dict[str, torch.Tensor]:
    """Results and gradients of the built module, under KEYS."""
    out, lse = built(name).attention(*leaves, **inputs, **options, return_lse=True)
    return dict(zip(KEYS, (out, lse, *torch.autograd.grad((out, lse), leaves, grads))))


def mask_inputs(name: str) -> set[str]:
    return {i.name for i in spec_of(name).mask.inputs()}


PADDED = [n for n in SPECS if mask_inputs(n) & {"key_padding", "kv_lengths"}]


def padding(name: str, lengths: list[int], n_kv: int, device: str) -> dict[str, torch.Tensor]:
    """Inputs of a padding mask under which sequence b keeps its first lengths[b] keys."""
    ends = torch.tensor(lengths, dtype=torch.int32, device=device)
    if "kv_lengths" in mask_inputs(name):
        return {"kv_lengths": ends}
    return {"key_padding": torch.arange(n_kv, device=device) < ends[:, None]}


# ---------------------------------------------------------------------------------------- the products of the oracle


def test_products_in_tf32_ignore_the_last_thirteen_bits() -> None:
    """Of the operands, and of the gradient; what has no more bits is multiplied exactly."""
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
    """Sums as in tiles of 16 rows in the interpreter, and of 2 on a GPU; in TF32 where the spec asks, but in the
    interpreter."""
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
    """Where queries see few keys too: delta is no product, and dP is."""
    spec = make_spec(
        {"name": "quick", "head_dim": 64, "mask": {"dilated": {"step": 7}}, "dtype": "fp32", "fp32_precision": "tf32"}
    )
    module = module_of(spec, tmp_path / "quick")
    for shape in ((1, 33), (17, 129), (129, 70), *([(1000, 1000)] if CUDA else [])):
        result = run_case(module, spec, Case(4, 2, 2, *shape), "fp32", device)
        assert result.ok, str(result)
        assert not CUDA or result.ours["out"] > 1e-4  # in fp32 it would be smaller


# ------------------------------------------------------------------------------------------------- against naive


def cases() -> list[Any]:
    """Every spec, element type and shape; in the interpreter one shape for those of SMALLER, and five where heads
    alone differ."""

    def shapes(name: str) -> list[tuple[int, int, str]]:
        return SHAPES if CUDA or name in KINDS else SHAPES[-2:-1] if name in SMALLER else SHAPES[3:8]

    def marks(name: str, layout: str) -> Any:
        """Where heads alone differ, wrappers read heads inside the rows as for the others."""
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
    """Down to nearly uniform weights, up to scores in the hundreds; an integer too."""
    result = run_case(built(name), spec_of(name), small(name, batch=SEQUENCES), dtypes(name)[0], device, scale=scale)
    assert result.ok, str(result)


@pytest.mark.parametrize("name", [n for n in KINDS if "bf16" in spec_of(n).dtype])
def test_bf16(name: str, device: str) -> None:
    """bf16 in, bf16 out, with bf16's accuracy; the interpreter computes it in fp32."""
    case = small(name, 129, 129)
    q, k, v, inputs = make_inputs(spec_of(name), case, torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = built(name).attention(*leaves, **inputs, return_lse=True)
    (out.sum() + lse.masked_fill(lse.isinf(), 0).sum()).backward()
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert all(x.grad.dtype == torch.bfloat16 for x in leaves)
    result = run_case(built(name), spec_of(name), case, "bf16", device)
    assert result.ok, str(result)


@pytest.mark.parametrize("bounds", [{"left": MAX_OFFSET, "right": 0}, {"left": 0, "right": MAX_OFFSET}], ids=str)
def test_a_window_as_wide_as_there_is(bounds: dict[str, int], device: str, tmp_path: Path) -> None:
    """Bounds of loops are sums with the window's sides, in 32 bits."""
    spec = make_spec({"name": "wide", "head_dim": 64, "mask": {"sliding_window": bounds}})
    result = run_case(module_of(spec, tmp_path / "wide"), spec, Case(1, 2, 2, 100, 300), "fp16", device)
    assert result.ok, str(result)


PATTERNS = {
    "right": [129, 40],
    "tile": [64, 128],
    "one key": [1, 129],
    "none": [0, 77],
    "none at all": [0, 0],
    "beyond": [1000, -5],  # lengths past the ends are the ends, where calls do not check them
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", PADDED)
def test_padding(name: str, pattern: str, device: str) -> None:
    inputs = padding(name, PATTERNS[pattern], 129, device) | ({"check": False} if pattern == "beyond" else {})
    result = run_case(built(name), spec_of(name), small(name, 100, 129), dtypes(name)[0], device, inputs=inputs)
    assert result.ok, str(result)


@pytest.mark.parametrize("name", [n for n in SPECS if "key_padding" in mask_inputs(n)])
def test_padding_on_any_side(name: str, device: str) -> None:
    """Keys that count in the middle, at the end, in stripes, in a single place; seen through strides and an expanded
    batch."""
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
    """Mask inputs transposed in memory, and one element expanded to all."""
    leaves, inputs, grads = problem(name, small(name, 40, 70), device)
    ((key, x),) = inputs.items()
    transposed = torch.stack([x, x.roll(1)], -1)[..., 0]
    for view in (transposed, x.flatten()[0].expand(x.shape)):
        assert view.stride(-1) != 1
        expected, found = (
            run(name, leaves, {key: y}, grads) for y in (view.clone(memory_format=torch.contiguous_format), view)
        )
        assert all(found[k].equal(expected[k]) for k in KEYS)


# ------------------------------------------------------------------------------------------------- rows that see nothing


def alone(name: str, inputs: dict[str, Any], lse: torch.Tensor) -> torch.Tensor:
    """The LSE of a row that sees no key: -inf, or its sink."""
    sinks = [part.reference_sink(inputs) for part in spec_of(name).score]
    sink = next((s for s in sinks if s is not None), torch.full((1,), -torch.inf, device=lse.device))
    two = (
        torch.exp2(torch.log2(torch.ones_like(sink))) * (sink * 1.4426950408889634) * 0.6931471805599453
    )  # as the kernel rounds it
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
    """Zeros, LSE -inf and zero gradients, exactly; whatever gradient comes back into such a row's LSE."""
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
        grad_lse = grad_lse.masked_fill(empty, torch.nan)  # as logaddexp of -inf and -inf gives
    found = run(name, leaves, inputs, (grad_out, grad_lse))
    assert (found["lse"] == alone(name, inputs, found["lse"])).equal(empty)
    for key in ("out", "dq"):
        assert (found[key][empty] == 0).all(), key
    group = case.q_heads // case.kv_heads
    ignored = unseen.unflatten(1, (case.kv_heads, group)).all(2)
    for key in ("dk", "dv"):
        assert (found[key][ignored] == 0).all(), key
    assert all(found[key].isfinite().all() for key in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("sizes", EMPTY_SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_empty_tensors(name: str, sizes: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, heads, n_q, n_kv = EMPTY_SIZES[sizes]
    kv_heads = 1 if spec_of(name).heads.sharing == "mqa" else heads_for(spec_of(name), heads)[1] if heads else 0
    leaves, inputs, grads = problem(name, Case(batch, heads, kv_heads, n_q, n_kv), device)
    guarded = fill_fresh_buffers(monkeypatch, built(name))
    found = run(name, leaves, inputs, grads)
    monkeypatch.undo()
    guarded.check()
    for key, x in zip(KEYS, (grads[0], grads[1], *leaves)):
        assert found[key].shape == x.shape
        assert (found[key] == (alone(name, inputs, x) if key == "lse" else 0)).all(), key


# ------------------------------------------------------------------------------------------------- memory


class Guarded:
    """Stands in for torch.empty and the like: buffers come full of NaN, inside margins that must stay as they are."""

    MARGIN, FILL = 4096, 12345.0

    def __init__(self) -> None:
        self.buffers: list[tuple[torch.Tensor, int]] = []

    def empty(self, *size: Any, device: Any = None, dtype: Any = None, **options: Any) -> torch.Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        buffer = torch.full((shape.numel() + 2 * self.MARGIN,), self.FILL, device=device, dtype=dtype)
        self.buffers.append((buffer, shape.numel()))
        inside = buffer[self.MARGIN : self.MARGIN + shape.numel()]
        return (inside.fill_(torch.nan) if buffer.is_floating_point() else inside).view(shape)

    def empty_like(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.empty(x.shape, device=x.device, dtype=options.get("dtype", x.dtype))

    def new_empty(self, x: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        return self.empty(*size, **{"device": x.device, "dtype": x.dtype, **options})

    def empty_strided(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str
    ) -> torch.Tensor:
        reach = 1 + sum((n - 1) * step for n, step in zip(size, stride)) if 0 not in size else 0
        x = self.empty(reach, device=device, dtype=dtype)
        return x.as_strided(size, stride, x.storage_offset())

    def holds(self, x: torch.Tensor) -> bool:
        return any(buffer.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for buffer, _ in self.buffers)

    def check(self) -> None:
        for buffer, size in self.buffers:
            fill = torch.full((), self.FILL, dtype=buffer.dtype, device=buffer.device)
            assert (buffer[: self.MARGIN] == fill).all(), "written before a buffer's start"
            assert (buffer[self.MARGIN + size :] == fill).all(), "written past a buffer's end"


def fill_fresh_buffers(monkeypatch: pytest.MonkeyPatch, module: Any) -> Guarded:
    """Guard every buffer that calls of a generated module make."""
    guarded = Guarded()
    monkeypatch.setattr(torch, "empty", guarded.empty)
    monkeypatch.setattr(torch, "empty_like", guarded.empty_like)
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: guarded.empty(*size, **options).zero_())
    monkeypatch.setattr(torch, "zeros_like", lambda x: guarded.empty_like(x).zero_())
    monkeypatch.setattr(torch, "full_like", lambda x, value: guarded.empty_like(x).fill_(value))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **options: guarded.new_empty(x, *size, **options))
    for name in ("empty_strided", "empty_permuted"):
        monkeypatch.setattr(torch, name, None)  # the wrapper has no use for these
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(module.runtime, f"empty_{device}", partial(guarded.empty_strided, device=device))
    return guarded


@pytest.mark.parametrize(
    "shape", [(129, 129, "bhnd"), (300, 100, "island"), (1, 130, "bhnd"), (17, 130, "bnhd")], ids=str
)
@pytest.mark.parametrize("name", list(dict.fromkeys([*FEW, "causal_gqa"])))  # and one whose heads share tiles
def test_every_element_is_written_and_no_other(
    name: str, shape: tuple[int, int, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = built(name)
    leaves, inputs, grads = problem(name, small(name, *shape, batch=SEQUENCES), device)
    split = hasattr(module, "SPLIT_KEYS")
    if split:  # every query head by a program of its own, so that the wrapper makes room for parts of dK and dV
        monkeypatch.setattr(module, "SPLIT_KEYS", 2**30)
    with monkeypatch.context() as patches:
        guarded = fill_fresh_buffers(patches, module)
        found = run(name, leaves, inputs, grads)
    # out, lse, delta, lse2, dq, dk, dv; the two of parts
    assert sum(size > 0 for _, size in guarded.buffers) >= (9 if split else 7)
    guarded.check()
    expected = run(name, leaves, inputs, grads)  # last: what is written outside of its buffers may end the process
    for key in KEYS:
        assert guarded.holds(found[key]), key
        assert found[key].equal(expected[key]), f"{key} depends on what was in its buffer before"


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("name", FEW)
def test_results_lie_as_the_inputs_do(name: str, layout: str, device: str) -> None:
    leaves, inputs, grads = problem(name, small(name, layout=layout), device)
    for x in run(name, leaves, inputs, grads).values():
        assert (x.transpose(1, 2) if layout == "bnhd" and x.dim() == 4 else x).is_contiguous()


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "expanded rows"])
@pytest.mark.parametrize("limit", [100, 2**23])
@pytest.mark.parametrize("name", FEW)
def test_rows_too_far_apart(name: str, limit: int, layout: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments whose rows are further apart than 32-bit offsets reach are copied, and no result has such rows."""
    case = small(name, 3, 3, layout if layout == "bnhd" else "bhnd")
    leaves, inputs, grads = problem(name, case, device)
    if layout == "expanded rows":  # in the order of their strides the rows of results are the outermost dimension
        leaves = [x.detach()[:1, :1].expand(x.shape).requires_grad_() for x in leaves]
        grads = grads[0][:1, :1].expand(grads[0].shape), grads[1]
    expected = run(
        name, [x.detach().contiguous().requires_grad_() for x in leaves], inputs, (grads[0].contiguous(), grads[1])
    )
    monkeypatch.setattr(built(name).runtime, "MAX_ROW_STRIDE", limit)
    found = run(name, leaves, inputs, grads)
    for key in KEYS:
        x, y = (r[key].detach().nan_to_num(neginf=0.0) for r in (found, expected))
        assert relative_error(x, y) < 4 * torch.finfo(x.dtype).eps, key
        if limit == 100 and key != "lse":
            assert found[key].is_contiguous(), key


@pytest.mark.parametrize("sharing", ["gqa", "mqa"])
@pytest.mark.parametrize("n_q", [1, 5, 17, 63, 64])
def test_few_queries_of_heads_that_differ(sharing: str, n_q: int, device: str, tmp_path: Path) -> None:
    """Heads that share tiles keep their own masks and scores; from 64 queries on they share none."""
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
    """Heads that share tiles may lie anywhere; results lie as the inputs do."""
    leaves, inputs, grads = problem("causal_gqa", Case(2, 4, 2, n_q, 70), device)
    expected = run("causal_gqa", leaves, inputs, grads)
    back = [order.index(d) for d in range(3)]
    moved = [x.detach().permute(*order, 3).contiguous().permute(*back, 3).requires_grad_() for x in leaves]
    found = run("causal_gqa", moved, inputs, grads)
    for key in KEYS:
        assert relative_error(found[key], expected[key]) < 4 * torch.finfo(found[key].dtype).eps, key
        assert key == "lse" or found[key].permute(*order, 3).is_contiguous(), key


def test_what_reads_by_query_or_head_shares_no_tiles() -> None:
    """Whose sizes are others there: of a tensor that has an element for each, wherever it is read."""
    for dim, place in (("Nq", "kv_idx"), ("H", "2"), ("H", "h")):
        score = {"expr": f"s + t[{place}]", "params": {"t": {"tensor": [dim]}}}
        made = make_spec({"name": "one", "heads": {"sharing": "gqa"}, "head_dim": 16, "score": [score]})
        assert "packed" not in {kernel.name for kernel in build_module(made).kernels}


@pytest.mark.parametrize(("heads", "keys", "splits"), [((6, 2), 1, 1), ((12, 2), 141, 3), ((7, 1), 100, 7)])
def test_groups_split_among_programs(
    heads: tuple[int, int], keys: int, splits: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that share a tile of keys, each for some query heads: the fewer keys there are, the more; their sums
    are the gradients."""
    name = "causal_gqa" if heads[1] > 1 else "causal_mqa"
    module = built(name)
    room, found = module.runtime.room_for_splits, set()
    monkeypatch.setattr(module.runtime, "STEPS", {})  # nothing is remembered of the processors that there are
    monkeypatch.setattr(
        module.runtime, "processors", lambda device: Fraction(2 * keys, SPLIT_KEYS)
    )  # as two, of `keys` keys each
    monkeypatch.setattr(module.runtime, "room_for_splits", lambda x, n: (found.add(n), room(x, n))[1])
    result = run_case(module, spec_of(name), Case(1, *heads, 40, 70), dtypes(name)[0], device)
    assert result.ok, str(result)
    assert found == {splits}


# ------------------------------------------------------------------------------------------------- calls and autograd


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
    """Through the output alone and through the LSE alone: together they are the gradient of both."""
    leaves, inputs, (grad_out, grad_lse) = problem(name, small(name), device)
    out, lse = built(name).attention(*leaves, **inputs, return_lse=True)
    both = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse), retain_graph=True)
    of_out = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    of_lse = torch.autograd.grad(lse, leaves, grad_lse)
    assert (of_lse[2] == 0).all()
    for x, a, b in zip(both, of_out, of_lse):
        assert relative_error(a.double() + b.double(), x) < 2 * torch.finfo(x.dtype).eps + 1e-5


# ------------------------------------------------------------------------------------------------- the bar itself


def wrong_module(name: str, mistake: str) -> Any:
    """Attention in fp32, rounded once at the end, and wrong in one way."""

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
def test_the_bar_sees_a_wrong_kernel(old: str, new: str, device: str, tmp_path: Path) -> None:
    for path in (ROOT / "generated" / "causal_mqa").glob("*.py"):
        text = path.read_text()
        if path.name == "kernels.py":
            assert old in text
            text = text.replace(old, new)
        (tmp_path / path.name).write_text(text)
    assert not run_case(
        load_module(tmp_path), spec_of("causal_mqa"), small("causal_mqa"), dtypes("causal_mqa")[0], device
    ).ok


# ------------------------------------------------------------------------------------------------- large, on CUDA only


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        (name, dtype, shape)
        for name, dtype in with_dtypes(WRAPPERS)
        for shape in [(4096, 4096, 4), (8191, 8191, 2), (1, 32768, 2)]
        # one query over many keys in fp32: cuBLAS splits naive's sum over the keys, ours is one sum (docs/perf-log.md,
        # section 4)
        if dtype != "fp32" or shape[0] > 1
    ],
    ids=str,
)
def test_large(name: str, dtype: str, shape: tuple[int, int, int], device: str) -> None:
    n_q, n_kv, heads = shape
    spec = spec_of(name)
    result = run_case(built(name), spec, Case(1, *heads_for(spec, heads), n_q, n_kv), dtype, device)
    torch.cuda.empty_cache()
    assert result.ok, str(result)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "strides", [(2**31 + 128, 2**26, 128), (2**21, 2**31 + 128, 128), (2**21, 128, 2**22)], ids=["batch", "head", "row"]
)
@pytest.mark.parametrize("name", ["causal_mqa", "causal_mha", "padding_mha", "full_mha"])
def test_offsets_beyond_32_bits(name: str, strides: tuple[int, int, int], device: str) -> None:
    """q, k, v and dO as views of a buffer of more than 2**31 elements give what their dense copies give.

    But for rounding: Triton compiles kernels of their own for strides of 64 bits.
    """
    case = Case(2, *heads_for(spec_of(name), 2), 600, 600)
    leaves, inputs, (grad_out, grad_lse) = problem(name, case, device)
    expected = run(name, leaves, inputs, (grad_out, grad_lse))

    def spread(x: torch.Tensor) -> torch.Tensor:
        steps = (*strides, 1)
        reach = 1 + sum((size - 1) * step for size, step in zip(x.shape, steps))
        if strides[2] > 2**20:
            reach = max(reach, 2**31)
        view = torch.empty(reach, device=device, dtype=x.dtype).as_strided(x.shape, steps)
        return view.copy_(x)

    for i, x in enumerate((*leaves, grad_out)):  # one at a time: each buffer is gigabytes
        moved = [*leaves, grad_out]
        moved[i] = spread(x.detach()).requires_grad_(i < 3)
        assert (
            moved[i].storage_offset() + sum((s - 1) * t for s, t in zip(x.shape, moved[i].stride())) >= 2**31
            or x.shape[1] == 1
        )
        found = run(name, moved[:3], inputs, (moved[3], grad_lse))
        for key in KEYS:
            error = relative_error(found[key], expected[key])
            assert error < 4 * torch.finfo(expected[key].dtype).eps, f"{key} with argument {i} spread out: {error}"
        del moved, found
        torch.cuda.empty_cache()


@pytest.mark.gpu
def test_more_than_2_31_elements(device: str) -> None:
    """Results with that many elements: the last heads are what they are alone, to the bit."""
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    attention = built("full_mha").attention
    shape = (3, 2**15 // 3 * 2 + 1024, 520, 64)
    assert torch.Size(shape).numel() > 2**31
    q, k, v, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, return_lse=True)
    grads = torch.autograd.grad(out, leaves, grad)
    ends = [x[-1:, -2:].detach().clone().requires_grad_() for x in leaves]
    out_end, lse_end = attention(*ends, return_lse=True)
    grads_end = torch.autograd.grad(out_end, ends, grad[-1:, -2:].clone())
    for whole, end in zip((out, lse, *grads), (out_end, lse_end, *grads_end)):
        assert whole[-1:, -2:].equal(end)


@pytest.mark.gpu
def test_expanded_arguments_and_more_than_2_31_elements(device: str) -> None:
    """Expanded over batch and heads: in the order of such strides, rows of results would be too far apart. All heads
    are alike."""
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    shape = (1024, 264, 132, 64)  # rows as the outermost dimension would be more than 2**24 elements apart
    one = [torch.randn(1, 1, *shape[2:], device=device, dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, grad = (x.expand(shape) for x in one)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    alone = [x.detach().requires_grad_() for x in one[:3]]
    out, out_alone = built("full_mha").attention(*leaves), built("full_mha").attention(*alone)
    assert out.numel() > 2**31
    found, expected = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(out_alone, alone, one[3])
    for x, y in zip((out, *found), (out_alone, *expected)):
        assert all(part.equal(x[:1, :1].expand(part.shape)) for part in x.split(32))
        assert relative_error(x[:1, :1].detach(), y.detach()) < 4 * torch.finfo(y.dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal_gqa", "padding_mha"])
def test_a_device_that_is_not_current(name: str, device: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.cuda.device(0):
        result = run_case(built(name), spec_of(name), small(name, 129, 200), dtypes(name)[0], "cuda:1")
    assert result.ok, str(result)
