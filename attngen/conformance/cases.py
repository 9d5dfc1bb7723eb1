"""Cases of conformance tests: sizes, memory layouts, and random tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attngen.ir.dtypes import ELEMENTS
from attngen.ir.heads import SHARINGS
from attngen.ir.sizes import Sizes
from attngen.lang.part import Part
from attngen.spec import Spec

LAYOUTS = ("bhnd", "bnhd", "packed", "expanded", "island")


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's element type of a key of ELEMENTS."""
    found: torch.dtype = getattr(torch, ELEMENTS[dtype].torch)
    return found


@dataclass(frozen=True)
class Case:
    """One problem: sizes of the tensors, and the memory layout of q, k, v and the gradients of the results.

    Layouts:
        bhnd      contiguous
        bnhd      heads inside the rows
        packed    slices of one tensor (needs n_q == n_kv), dO with a strided last dimension
        expanded  one K/V head shared by stride 0, gradients as from `out.sum()`
        island    slices of buffers that hold NaN everywhere else
    """

    batch: int
    q_heads: int
    kv_heads: int
    n_q: int
    n_kv: int
    layout: str = "bhnd"

    def __str__(self) -> str:
        heads = f"{self.q_heads}" if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        return f"B{self.batch} H{heads} Nq{self.n_q} Nk{self.n_kv}{'' if self.layout == 'bhnd' else ' ' + self.layout}"


def heads_for(spec: Spec, q_heads: int = 4) -> tuple[int, int]:
    """Return (query heads, K/V heads) that fit the spec's sharing."""
    return q_heads, SHARINGS[spec.heads.sharing].kv_heads(q_heads, 2)


def make_inputs(spec: Spec, case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Any, ...]:
    """Return (q, k, v, mask inputs) of a case: normal values, random masks."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    def tensor(heads: int, rows: int, width: int) -> torch.Tensor:
        if case.layout == "bnhd":
            return normal(case.batch, rows, heads, width).transpose(1, 2)
        if case.layout == "expanded" and heads == case.kv_heads:
            return normal(1, 1, rows, width).expand(case.batch, heads, rows, width)
        x = normal(case.batch, heads, rows, width)
        return _island(x) if case.layout == "island" else x

    widths = (spec.head_dim.qk, spec.head_dim.qk, spec.head_dim.v)
    heads = (case.q_heads, case.kv_heads, case.kv_heads)
    if case.layout == "packed":
        sizes = [h * w for h, w in zip(heads, widths)]
        parts = torch.split(normal(case.batch, case.n_q, sum(sizes)), sizes, -1)
        q, k, v = (p.view(*p.shape[:2], h, w).transpose(1, 2) for p, h, w in zip(parts, heads, widths))
    else:
        q, k, v = (tensor(h, n, w) for h, n, w in zip(heads, (case.n_q, case.n_kv, case.n_kv), widths))
    counts = Sizes(case.batch, case.q_heads, case.kv_heads, case.n_q, case.n_kv)
    return q, k, v, make_mask_inputs(spec, counts, dtype, device, generator)


def make_mask_inputs(
    spec: Spec, sizes: Sizes, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    """Return random inputs of masks and modifiers for a call of these sizes, and a random block mask, as keyword
    arguments."""
    inputs = _placed(spec, dtype, device, lambda part: part.sample(sizes, generator))
    blocks = spec.mask.blocks()
    if blocks and not blocks.pattern:
        shape = [sizes.batch, sizes.q_heads, -(-sizes.n_q // blocks.size), -(-sizes.n_kv // blocks.size)]
        inputs["block_mask"] = (torch.rand(shape, generator=generator) < 0.6).to(device)
    return inputs | all_chunks(spec, sizes, device)


def all_chunks(spec: Spec, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return the arguments by which a call has all chunks of a sequence, in their order; none without positions."""
    if not spec.chunk:
        return {}
    starts = (torch.arange(0, n, spec.chunk, device=device, dtype=torch.int32) for n in (sizes.n_q, sizes.n_kv))
    return {**dict(zip(("q_chunks", "kv_chunks"), starts)), "q_len": sizes.n_q, "kv_len": sizes.n_kv}


def make_workload(spec: Spec, sizes: Sizes, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return typical inputs of masks and modifiers for benchmarks, always the same: half of the blocks are visible,
    including those on the diagonal."""
    generator = torch.Generator().manual_seed(0)
    inputs = _placed(spec, dtype, device, lambda part: part.workload(sizes, generator))
    return inputs | _workload_blocks(spec, sizes, generator, device) | all_chunks(spec, sizes, device)


def make_mask_workload(spec: Spec, sizes: Sizes) -> dict[str, Any]:
    """Return those of `make_workload` that the mask reads, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    return {**spec.mask.workload(sizes, generator), **_workload_blocks(spec, sizes, generator, "cpu")}


def _workload_blocks(spec: Spec, sizes: Sizes, generator: torch.Generator, device: str) -> dict[str, Any]:
    blocks = spec.mask.blocks()
    if not blocks or blocks.pattern:
        return {}
    rows, columns = (-(-n // blocks.size) for n in (sizes.n_q, sizes.n_kv))
    table = torch.rand(1, 1, rows, columns, generator=generator) < 0.5
    return {"block_mask": (table | torch.eye(rows, columns, dtype=torch.bool)).to(device)}


def _placed(
    spec: Spec, dtype: torch.dtype, device: str, sample: Callable[[Part], Mapping[str, torch.Tensor | float]]
) -> dict[str, Any]:
    """Return the sampled inputs of the mask and each modifier, on a device; inputs of the element type in `dtype`."""
    in_dtype = {i.name for i in spec.inputs() if i.dtype == "T"}
    sampled = {name: value for part in (spec.mask, *spec.score) for name, value in sample(part).items()}
    return {
        name: value.to(device, dtype if name in in_dtype else value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in sampled.items()
    }


def make_gradients(
    spec: Spec, case: Case, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dO, gradient of the LSE) of a case, in its memory layout."""
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (case.batch, case.q_heads, case.n_q)
    width = spec.head_dim.v
    grad_lse = torch.randn(shape, generator=generator).to(device)
    grad_out = torch.randn((*shape, width), generator=generator).to(device=device, dtype=dtype)
    if case.layout == "bnhd":
        grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
        grad_lse = grad_lse.transpose(1, 2).contiguous().transpose(1, 2)
    elif case.layout == "packed":
        grad_out = grad_out.transpose(2, 3).contiguous().transpose(2, 3)
    elif case.layout == "expanded":
        grad_out = torch.full((), 0.75, device=device, dtype=dtype).expand(*shape, width)
        grad_lse = torch.full((), -1.5, device=device).expand(shape)
    elif case.layout == "island":
        grad_out = _island(grad_out)
    return grad_out, grad_lse


def make_all_gradients(
    spec: Spec, case: Case, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of all results that have one: those of make_gradients, and that of the entropy."""
    grads = make_gradients(spec, case, dtype, device, seed)
    if "entropy" not in spec.outputs:
        return grads
    shape = (case.batch, case.n_q, case.q_heads)  # heads inside rows, a layout that calls may have
    return *grads, torch.randn(shape, generator=torch.Generator().manual_seed(seed + 2)).to(device).transpose(1, 2)


def _island(x: torch.Tensor) -> torch.Tensor:
    """Return the same values inside a larger buffer that holds NaN elsewhere, so that reads out of bounds show."""
    b, h, n, d = x.shape
    buffer = torch.full((b + 2, h + 2, n + 6, d + 16), torch.nan, device=x.device, dtype=x.dtype)
    view = buffer[1 : b + 1, 1 : h + 1, 3 : n + 3, 8 : d + 8]
    view.copy_(x)
    return view


def cli_cases(spec: Spec, cuda: bool) -> list[tuple[Case, str]]:
    """Return the cases of `attngen test`: ragged, unequal and strided, only small ones in the interpreter.

    Triton's interpreter cannot multiply bf16, so there a module without fp16 runs in the dtype to which the wrapper
    falls back.
    """
    heads = heads_for(spec)
    sizes = [(1, 1), (129, 129), (100, 300), (300, 100)] + ([(1000, 1000), (4096, 4096)] if cuda else [])
    dtypes = [d for d in spec.dtype if cuda or ELEMENTS[d].is_interpreted] or list(spec.dtype)
    cases = [Case(2, *heads, n_q, n_kv) for n_q, n_kv in sizes] + [Case(1, *heads, 127, 127, "bnhd")]
    return [(case, dtype) for dtype in dtypes for case in cases]
