"""Sums of gradients over the ranks that share sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from attngen.distributed.mesh import groups_of

BUCKET = 1 << 25  # elements that are sent at once


def sum_gradients(model: torch.nn.Module, mesh: Any) -> None:
    """Add up the gradients of a model's parameters over ranks that have different rows, in place, after the backward.
    All of them call it.

    It is for parameters that every rank of the mesh has, or of which every rank has the same part, as with FSDP over
    other dimensions. It is not needed where FSDP or DDP has the ranks in its own mesh: these take the mean of their
    ranks, so multiply the loss by the number of them.

    Args:
        model: its gradients are those of the rank's part of a loss that is a sum over the ranks, and for learned inputs
            of `attention(sum_gradients=False)`. A parameter with a gradient on some ranks gets one on all.
        mesh: the process group or DeviceMesh of attention's plans.
    """
    groups = groups_of(mesh)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        return
    device = _local(parameters[0]).device
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    for group in groups:
        dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
    for p, wanted in zip(parameters, has.tolist()):
        if wanted and p.grad is None:
            p.grad = torch.zeros_like(p)
    for bucket in _buckets([_local(p.grad) for p in parameters if p.grad is not None]):
        flat = torch.cat([x.flatten() for x in bucket])
        for group in groups:
            dist.all_reduce(flat, group=group)
        for x, total in zip(bucket, flat.split([x.numel() for x in bucket])):
            x.copy_(total.view(x.shape))


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield neighbours of one dtype, of about BUCKET elements together."""
    bucket: list[torch.Tensor] = []
    for x in tensors:
        full = sum(y.numel() for y in bucket) + x.numel() > BUCKET
        if bucket and (full or x.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(x)
    if bucket:
        yield bucket
