"""Naive attention in fp64: exact results, gradients and tangents, and the rounding errors that a fused kernel adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from attngen.conformance.result import GRADIENTS
from attngen.ir.names import OF_KEYS, OUTPUTS

TRUTH_ELEMENTS = 2**27  # scores of the fp64 reference that are in memory at once


Attend = Callable[..., tuple[torch.Tensor, ...]]


def gradients_of(
    attend: Attend, inputs: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor, ...], names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Return the results of `attend` and the gradients of q, k, v and inputs with gradients, by name."""
    leaves = [x.detach().requires_grad_(set(GRADIENTS) <= set(names)) for x in inputs]
    results = attend(*leaves)
    smooth = results[: len(grads)]  # those without a gradient come last
    found: Any = [torch.zeros_like(x) for x in leaves]
    if results[0].requires_grad:  # naive attention over zero keys has no graph
        found = torch.autograd.grad(smooth, leaves, [g.to(r.dtype) for g, r in zip(grads, smooth)])
    return dict(zip(names, (*(r.detach() for r in results), *found)))


def tangents_of(
    attend: Attend, inputs: tuple[torch.Tensor, ...], along: tuple[torch.Tensor, ...], names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Return the tangents of the first results of `attend` along tangents of its inputs, by name with the prefix
    `t`."""
    found = torch.func.jvp(lambda *x: attend(*x)[: len(names)], inputs, along)[1]
    return {f"t{name}": x for name, x in zip(names, found)}


def exact_tangents(
    attend: Attend,
    inputs: tuple[torch.Tensor, ...],
    along: tuple[torch.Tensor, ...],
    mask: torch.Tensor,
    weight: torch.Tensor | None,
    names: tuple[str, ...],
    operand: float,
    of_lse: float,
    whole: bool,
) -> tuple[dict[str, torch.Tensor], ...]:
    """Return three sets of tangents in fp64: those of naive attention, the errors that come from rounding the stored
    output, and the errors that come from the stored LSE and from rounding operands.

    tO = P tV + (P * tS) V - tLSE * O, where tS is the tangent of the scores. If a query sees few keys the last two
    terms cancel, and the rounding of the stored output and of P * tS to the dtype of V remains. P is recomputed from
    the stored LSE, whose error of `of_lse` times the LSE (half a unit in its last place in fp32) is a factor of P.
    `operand` is the relative error of products' operands.

    The query rows are computed in slices, so that large cases fit; all at once if `whole`.
    """
    q, k, v, *rest = (x.double() for x in inputs)
    q_along, *others_along = (x.double() for x in along)
    parts = []
    for at in _slices(q, k, whole):
        results = partial(attend_with, attend, *_rows_of(at, mask, weight))
        given = q[:, :, at], k, v, *rest
        true = tangents_of(results, given, (q_along[:, :, at], *others_along), names)
        out, lse, *_ = results(*given)
        half = of_lse * lse.abs().nan_to_num(posinf=0.0) + operand
        less = (true["tlse"][..., None] * out).abs()
        of_rows = {key: half * x.abs() for key, x in true.items() if key != "tout"}
        by_lse = {"tout": half[..., None] * (true["tout"].abs() + less), **of_rows}
        parts.append((true, {"tout": torch.finfo(inputs[0].dtype).eps / 2 * less}, by_lse))
    return tuple({key: torch.cat([part[key] for part in found], 2) for key in found[0]} for found in zip(*parts))


def attend_with(
    attend: Attend, mask: torch.Tensor, weight: torch.Tensor | None, *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the results of `attend` for q, k, v and learned inputs, with a mask and the factors of dropout."""
    return attend(*inputs[:3], mask, weight, *inputs[3:])


def _slices(q: torch.Tensor, k: torch.Tensor, whole: bool) -> Iterator[slice]:
    """Yield slices of the query rows whose scores fit in memory; one of all rows if `whole`."""
    rows = max(1, q.shape[2] if whole else TRUTH_ELEMENTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, max(1, q.shape[2]), rows):
        yield slice(start, start + rows)


def _rows_of(at: slice, mask: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows `at` of a mask and of the factors of dropout. A mask that all queries share has one row."""
    return mask[:, :, at] if mask.shape[2] > 1 else mask, None if weight is None else weight[:, :, at]


def exact(
    attend: Attend,
    inputs: tuple[torch.Tensor, ...],
    mask: torch.Tensor,
    grads: tuple[torch.Tensor, ...],
    weight: torch.Tensor | None,
    names: tuple[str, ...],
    operand: float,
    of_lse: float,
    whole: bool,
) -> tuple[dict[str, torch.Tensor], ...]:
    """Return the results and gradients of naive attention in fp64, and the errors that two roundings of a
    FlashAttention backward add to the gradients (see `_upstream`).

    The query rows are computed in slices, so that large cases fit; all at once if `whole`.
    """
    q, *others = inputs
    rest = [x.double().requires_grad_() for x in others]
    results = [name for name in names if name in ("out", *OUTPUTS)]
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in results}
    # For the exact gradient, the error by delta and the error by the LSE: the slices of dq, and the sums of the others.
    gradients: list[list[Any]] = [[[], *([0.0] * len(rest))] for _ in range(3)]
    for at in _slices(q, rest[0], whole):
        part = q[:, :, at].double().requires_grad_()
        part_mask, part_weight = _rows_of(at, mask, weight)
        made = attend(part, rest[0], rest[1], part_mask, part_weight, *rest[2:])
        smooth = made[: len(grads)]
        upstream = _upstream(smooth, [g[:, :, at].double() for g in grads], q.dtype, operand, of_lse)
        for sums, flowing in zip(gradients, upstream):
            found = [torch.zeros_like(x) for x in (part, *rest)]
            if smooth[0].requires_grad:  # attention over zero keys has no graph
                given = torch.autograd.grad(smooth, (part, *rest), flowing, retain_graph=True, allow_unused=True)
                found = [zero if x is None else x for zero, x in zip(found, given)]
            sums[0].append(found[0])
            sums[1:] = [total + x for total, x in zip(sums[1:], found[1:])]
        for name, x in zip(results, made):
            parts[name].append(x.detach())
    whole_results = {key: sum(x) if key in OF_KEYS else torch.cat(x, 2) for key, x in parts.items()}
    true, *rounded = (dict(zip(names[len(results) :], (torch.cat(dq, 2), *more))) for dq, *more in gradients)
    return {**whole_results, **true}, *rounded


def _upstream(
    smooth: tuple[torch.Tensor, ...], grads: list[torch.Tensor], dtype: torch.dtype, operand: float, of_lse: float
) -> tuple[Sequence[torch.Tensor], ...]:
    """Return three sets of gradients of the results. The first are exact. The second and third change the inputs'
    gradients by the error that delta causes, and by the error that the LSE causes.

    dS = P (dP - delta) with delta = rowsum(O dO). A FlashAttention backward computes delta from the stored O,
    separately from dP. If a query sees few keys the two cancel, and the rounding of delta remains, and that of dP by
    `operand`, the relative error of products' operands. It recomputes P from the stored LSE and from a separate
    product. Half a unit in the last place of each, in fp32, is a factor of P: `of_lse` times the LSE.
    """
    single = torch.finfo(torch.float32).eps
    (out, lse, *_), (grad_out, *grad_rows) = smooth, grads
    terms = out.detach() * grad_out
    delta = (
        (out.detach().to(dtype).double() * grad_out - terms).sum(-1)
        + single * terms.abs().sum(-1)
        + operand * terms.norm(dim=-1)
    )
    half = of_lse * lse.detach().abs().nan_to_num(posinf=0.0)
    # dS = -P (ln P + H): ln P has the error `half`, and H is stored.
    for entropy, grad_entropy in zip(smooth[2:], grad_rows[1:]):
        delta += (half + single * entropy.detach()) * grad_entropy.abs()
    return (
        grads,
        (torch.zeros_like(grad_out), delta, *map(torch.zeros_like, grad_rows[1:])),
        (grad_out * half[..., None], *(grad * half for grad in grad_rows)),
    )
