"""Running a generated module beside naive attention: what `attngen test`, the test suite and the GPU report share."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attngen.reference import naive_attention, reference_mask, relative_error
from attngen.spec import Spec

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLOOR = {torch.bfloat16: 2e-3, torch.float16: 2.5e-4, torch.float32: 2e-6}  # naive's error where rounding barely shows
TF32_FLOOR = 1e-3


@dataclass(frozen=True)
class Case:
    """One problem: sizes of the tensors, and how their memory is laid out (`bhnd`, or `bnhd` seen as [B, H, N, D])."""

    batch: int
    q_heads: int
    kv_heads: int
    n_q: int
    n_kv: int
    layout: str = "bhnd"

    def __str__(self) -> str:
        heads = f"{self.q_heads}" if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        return f"B{self.batch} H{heads} Nq{self.n_q} Nk{self.n_kv}{'' if self.layout == 'bhnd' else ' ' + self.layout}"


@dataclass(frozen=True)
class Result:
    """Relative errors of one case, ours and naive's, in the same dtype against fp64 (fp32 for large cases)."""

    case: Case
    dtype: str
    ours: dict[str, float]
    naive: dict[str, float]
    floor: float

    def ratio(self, key: str) -> float:
        """Our error over naive's, which counts as at least the dtype's own rounding."""
        return self.ours[key] / max(self.naive[key], self.floor)

    @property
    def ok(self) -> bool:
        """Nothing NaN, and no error above twice naive's."""
        return all(self.ratio(k) <= 2.0 for k in self.ours)


def load_module(folder: Path) -> ModuleType:
    """Import a generated module from its folder, under a name of its own."""
    name = f"attngen_generated_{folder.resolve().as_posix().replace('/', '_').replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    for stale in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[stale]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def heads_for(spec: Spec, q_heads: int = 4) -> tuple[int, int]:
    """(query heads, K/V heads) that fit the spec's sharing."""
    return q_heads, {"mha": q_heads, "mqa": 1, "gqa": max(1, q_heads // 2)}[spec.heads.sharing]


def make_inputs(spec: Spec, case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Any, ...]:
    """(q, k, v, mask inputs) of a case: normal values, random masks."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(heads: int, rows: int, width: int) -> torch.Tensor:
        shape = (case.batch, heads, rows, width) if case.layout == "bhnd" else (case.batch, rows, heads, width)
        x = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        return x if case.layout == "bhnd" else x.transpose(1, 2)

    q = tensor(case.q_heads, case.n_q, spec.head_dim.qk)
    k = tensor(case.kv_heads, case.n_kv, spec.head_dim.qk)
    v = tensor(case.kv_heads, case.n_kv, spec.head_dim.v)
    sizes = {"B": case.batch, "Hq": case.q_heads, "Nq": case.n_q, "Nk": case.n_kv}
    inputs: dict[str, torch.Tensor] = {}
    for i in spec.mask.inputs():
        shape = [sizes[d] for d in i.shape]
        if i.dtype == "b1":
            inputs[i.name] = (torch.rand(shape, generator=generator) < 0.7).to(device)
        else:
            inputs[i.name] = torch.randint(0, case.n_kv + 1, shape, generator=generator, dtype=torch.int32).to(device)
    return q, k, v, inputs


def run_case(module: ModuleType, spec: Spec, case: Case, dtype: str, device: str, seed: int = 0) -> Result:
    """Forward and all gradients, ours and naive's in the same dtype, against naive in higher precision.

    The loss weighs both the output and the LSE, so the gradient through the LSE is checked too.
    """
    torch_dtype = TORCH_DTYPES[dtype]
    q, k, v, inputs = make_inputs(spec, case, torch_dtype, device, seed)
    scale = spec.head_dim.qk**-0.5
    mask = reference_mask(spec.mask, q, k, inputs)
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn((*q.shape[:3], spec.head_dim.v), generator=generator).to(device=device, dtype=torch_dtype)
    lse_weight = torch.randn(q.shape[:3], generator=generator).to(device)

    def gradients(attend: Any, high: torch.dtype | None) -> dict[str, torch.Tensor]:
        leaves = [x.detach().to(high or x.dtype).requires_grad_() for x in (q, k, v)]
        if high is None:  # keep the layout under test
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = attend(*leaves)
        seen = lse > -torch.inf
        loss = (out * weight.to(out.dtype)).sum() + (torch.where(seen, lse, 0.0) * lse_weight.to(lse.dtype)).sum()
        grads = torch.autograd.grad(loss, leaves)
        finite = torch.where(seen, lse, 0.0)
        return {"out": out, "lse": finite, **dict(zip(("dq", "dk", "dv"), grads))}

    def by_batch(dtype_: torch.dtype | None) -> dict[str, torch.Tensor]:
        return gradients(lambda a, b, c: naive_attention(a, b, c, mask, scale), dtype_)

    ours = gradients(lambda a, b, c: module.attention(a, b, c, **inputs, return_lse=True), None)
    large = case.batch * case.q_heads * case.n_q * case.n_kv > 2**26
    truth = by_batch(torch.float32 if large and dtype != "fp32" else torch.float64)
    naive = by_batch(None)
    errors = [{key: relative_error(x[key], truth[key]) for key in truth} for x in (ours, naive)]
    floor = TF32_FLOOR if dtype == "fp32" and spec.fp32_precision == "tf32" else FLOOR[torch_dtype]
    return Result(case, dtype, errors[0], errors[1], floor)


def cli_cases(spec: Spec, cuda: bool) -> list[tuple[Case, str]]:
    """What `attngen test` runs: ragged, unequal and strided cases, small ones in the interpreter.

    Triton's interpreter cannot multiply bf16, so there a module without fp16 is run in what the wrapper falls back to.
    """
    heads = heads_for(spec)
    sizes = [(1, 1), (129, 129), (100, 300), (300, 100)] + ([(1000, 1000), (4096, 4096)] if cuda else [])
    dtypes = [d for d in spec.dtype if cuda or d != "bf16"] or list(spec.dtype)
    cases = [Case(2, *heads, n_q, n_kv) for n_q, n_kv in sizes] + [Case(1, *heads, 127, 127, "bnhd")]
    return [(case, dtype) for dtype in dtypes for case in cases]
