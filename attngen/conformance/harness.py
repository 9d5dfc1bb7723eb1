"""Run a generated module and compare it with naive attention, for `attngen test`, the test suite and the GPU report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attngen.cache.loader import import_folder
from attngen.conformance.cases import Case, make_all_gradients, make_inputs, torch_dtype
from attngen.conformance.exact import Attend, attend_with, exact, exact_tangents, gradients_of, tangents_of
from attngen.conformance.oracle import (
    dropout_weight,
    naive_attention,
    naive_entropy,
    naive_key_mass,
    naive_max_score,
    reference_mask,
    reference_scores,
    rows_matmul,
    truncated_matmul,
)
from attngen.conformance.result import GRADIENTS, Result, errors, rounding_of
from attngen.ir.dtypes import by_precision, result_of
from attngen.ir.names import FLAT, OF_KEYS, OUTPUTS
from attngen.spec import Spec

DROPOUT_P, SEED = 0.2, 0x5EED_0000_0001  # defaults for cases of specs with dropout


def load_module(folder: Path) -> ModuleType:
    """Import a generated module from its folder, under a unique name."""
    name = f"attngen_generated_{folder.resolve().as_posix().replace('/', '_').replace('.', '_')}"
    return import_folder(folder, name)


def result_names(spec: Spec) -> tuple[str, ...]:
    """Return the names of a module's results and gradients: the output, the spec's other outputs, and the gradients,
    also of inputs with gradients."""
    return ("out", *spec.outputs, *(GRADIENTS if spec.trains else ()), *(f"d{i.name}" for i in spec.learned()))


def tangent_names(spec: Spec) -> tuple[str, ...]:
    """Return the names of a module's tangents in forward mode: `t` and the names of the results with gradients.
    None without a forward mode."""
    if not spec.trains or spec.chunk:
        return ()
    return tuple(f"t{name}" for name in ("out", *spec.outputs) if name not in (*FLAT, *OF_KEYS))


def asked(spec: Spec) -> dict[str, Any]:
    """Return the arguments with which a call returns all results of a spec's module, in the order of `result_names`."""
    return {f"return_{name}": True for name in spec.outputs}


def run_case(
    module: ModuleType,
    spec: Spec,
    case: Case,
    dtype: str,
    device: str,
    seed: int = 0,
    *,
    scale: float | None = None,
    inputs: dict[str, torch.Tensor] | None = None,
    dropout_p: float = DROPOUT_P,
    tangents: bool = False,
    of_lse: float = torch.finfo(torch.float32).eps,
) -> Result:
    """Compare a module's results and all gradients with naive attention in the same dtype, both against naive in fp64.
    Without a backward, compare only the results.

    With `tangents` forward mode is also compared, along random tangents of q, k, v and inputs with gradients: `tout`,
    `tlse` and so on.

    If outputs have a separate dtype, naive attention computes in it, and rounds its weights to the dtype of q, k and v.
    If products are in TF32, naive attention's are too, except in the interpreter, which multiplies in fp32.

    Gradients flow into the output, the LSE, and the other results with gradients. `inputs` replaces the random mask
    inputs. Modules with dropout use SEED, and naive attention drops the same weights, according to the oracle.

    of_lse: the relative error of the LSE that recomputed weights may have, from its rounding to fp32. Modules for fp32
    have none if the products of all kernels have the same bits. NumPy's differ in the last bit between tile sizes.
    """
    in_dtype, out_dtype = torch_dtype(dtype), torch_dtype(result_of(dtype))
    q, k, v, sampled = make_inputs(spec, case, in_dtype, device, seed)
    sampled.update(inputs or {})
    grads = make_all_gradients(spec, case, in_dtype, device, seed)
    mask = reference_mask(spec.mask, q, k, sampled)
    learned = {i.name: sampled[i.name] for i in spec.inputs() if i.grad}
    weight = dropout_weight((*q.shape[:3], k.shape[2]), dropout_p, SEED, device) if spec.dropout else None
    fp32_product, operand = fp32_products(spec, dtype, device, case.n_q)
    attend = _oracle(spec, sampled, tuple(learned), scale, dtype, fp32_product)
    ours = _ours(module, spec, sampled, tuple(learned), scale, dropout_p)
    naive_results = partial(attend_with, attend, mask, weight)
    leaves, names = (q, k, v, *learned.values()), result_names(spec)
    truth, *rounded = exact(attend, leaves, mask, grads, weight, names, operand, of_lse, whole=bool(spec.score))
    wide = (*(x.to(out_dtype) for x in (q, k, v)), *learned.values())
    with whole_products():
        naive = errors(gradients_of(naive_results, wide, grads, names), truth)
    found = errors(gradients_of(ours, leaves, grads, names), truth)
    if tangents:
        along = (*make_inputs(spec, case, in_dtype, device, seed + 3)[:3], *map(torch.randn_like, learned.values()))
        smooth = names[: len(grads)]
        true, *changes = exact_tangents(
            attend, leaves, along, mask, weight, smooth, operand, of_lse, whole=bool(spec.score)
        )
        wide_along = (*(x.to(out_dtype) for x in along[:3]), *along[3:])
        with whole_products():
            naive |= errors(tangents_of(naive_results, wide, wide_along, smooth), true)
        found |= errors(tangents_of(ours, leaves, along, smooth), true)
        truth, rounded = truth | true, [*rounded, *changes]
    rounding = rounding_of(truth, _stored(truth, learned, in_dtype, out_dtype), rounded, operand)
    return Result(case, dtype, found, naive, rounding)


def _ours(
    module: ModuleType,
    spec: Spec,
    inputs: dict[str, Any],
    learned: tuple[str, ...],
    scale: float | None,
    dropout_p: float,
) -> Attend:
    """Return the module's attention as a function of (q, k, v, *learned inputs) that returns all results."""
    dropout: dict[str, Any] = {"dropout_p": dropout_p, "seed": SEED} if spec.dropout else {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {**inputs, **dict(zip(learned, x))}
        results: tuple[torch.Tensor, ...] = module.attention(q, k, v, **given, **dropout, scale=scale, **asked(spec))
        return results

    return attend


def _oracle(
    spec: Spec,
    inputs: dict[str, Any],
    learned: tuple[str, ...],
    scale: float | None,
    dtype: str,
    fp32_product: Callable[..., torch.Tensor],
) -> Attend:
    """Return naive attention as a function of (q, k, v, mask, dropout weights, *learned inputs) that returns all
    results of a spec's module."""
    in_dtype, out_dtype = torch_dtype(dtype), torch_dtype(result_of(dtype))
    factor = scale if scale is not None else spec.head_dim.qk**-0.5

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor,
        weight: torch.Tensor | None,
        *x: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        modify, sink = reference_scores(spec.score, q, k, {**inputs, **dict(zip(learned, x))})
        rounded = in_dtype if q.dtype == out_dtype else None
        multiply = fp32_product if q.dtype == torch.float32 else torch.matmul
        more = {
            "entropy": lambda: naive_entropy(q, k, mask, factor, modify, sink, multiply),
            "max_score": lambda: naive_max_score(q, k, mask, factor, modify, multiply),
            "key_mass": lambda: naive_key_mass(q, k, mask, factor, modify, sink, multiply),
        }
        results = naive_attention(q, k, v, mask, factor, weight, modify, sink, rounded, multiply)
        return *results, *(more[name]() for name in spec.outputs if name in more)

    return attend


def _stored(
    truth: dict[str, torch.Tensor], learned: dict[str, torch.Tensor], in_dtype: torch.dtype, out_dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the exact results in the dtypes in which a module stores them."""
    fp32 = {
        *OUTPUTS,
        *(f"t{name}" for name in OUTPUTS),
        *(f"d{name}" for name, x in learned.items() if x.dtype == torch.float32),
    }
    return {
        key: x.to(torch.float32 if key in fp32 else out_dtype if key in ("out", "tout") else in_dtype)
        for key, x in truth.items()
    }


def fp32_products(spec: Spec, dtype: str, device: str, queries: int) -> tuple[Callable[..., torch.Tensor], float]:
    """Return naive attention's product of fp32 tensors for the spec's precision, and the relative error of its
    operands. TF32 has fp16's fraction, truncated.

    The interpreter always multiplies in fp32, with tiles of at least 16 rows. dtype: the call's. queries: their number
    in the call.
    """
    on_cpu = device.startswith("cpu")
    if by_precision([dtype]) and spec.fp32_precision == "tf32" and not on_cpu:
        return truncated_matmul, torch.finfo(torch.float16).eps / 2
    rows = 16 if on_cpu else 2
    return (partial(rows_matmul, rows=rows) if queries < rows else torch.matmul), 0.0


@contextmanager
def whole_products() -> Iterator[None]:
    """Make torch multiply fp32 matrices in full fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
