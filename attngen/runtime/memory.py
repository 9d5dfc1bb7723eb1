"""Tensors as kernels need them: which are read in place, how results lie in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from attngen.runtime.private import current_device, empty_cpu, empty_cuda

MAX_ROW_STRIDE = 2**23  # elements: offsets inside a tile have 32 bits, and a tile has at most 256 rows
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def addressable(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, N, D], or a copy where kernels cannot read it in place: rows not contiguous or too far apart, or a lazy sign."""
    if x.is_neg():
        x = x.resolve_neg()
    if x.stride(3) == 1 and (x.stride(2) <= MAX_ROW_STRIDE or x.shape[2] <= 1):
        return x
    return x.contiguous()


def strides(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    """The strides of tensors, but for their last dimensions."""
    return [x.stride()[:-1] for x in tensors]


def rows_layout(x: torch.Tensor, width: int) -> Layout:
    """Shape and strides of a [B, H, N, width] that lies in memory in the order of x's dimensions, unless that puts rows too far apart."""
    b, h, n, _ = x.shape
    if x.is_contiguous():
        return (b, h, n, width), (h * n * width, n * width, width, 1)
    order = sorted(range(3), key=x.stride, reverse=True)
    if width * math.prod(x.shape[d] for d in order[order.index(2) + 1 :]) > MAX_ROW_STRIDE:
        order = [0, 1, 2]
    strides, step = [0, 0, 0, 1], width
    for d in reversed(order):
        strides[d] = step
        step = step * max(x.shape[d], 1)
    return (b, h, n, width), tuple(strides)


def empty(x: torch.Tensor, shape: tuple[int, ...], steps: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor of a shape and strides on the device of x, which is the current one."""
    made: torch.Tensor = (empty_cuda if x.is_cuda else empty_cpu)(shape, steps, dtype)
    return made


def empty_rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """An uninitialised [B, H, N, width] of the dtype of x, laid out as `rows_layout` says."""
    if not x.is_contiguous():
        return empty(x, *rows_layout(x, width), x.dtype)
    b, h, n, _ = x.shape
    return empty(x, (b, h, n, width), (h * n * width, n * width, width, 1), x.dtype)


def nothing(x: torch.Tensor, dimensions: int = 1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor without elements, of the dtype of x unless another is given."""
    return x.new_empty((0,) * dimensions, dtype=dtype or x.dtype)


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs with the device of its first argument, a tensor, as the current one, on which Triton launches."""

    def run(x: torch.Tensor, *args: Any) -> Any:
        if not x.is_cuda or x.get_device() == current_device():
            return function(x, *args)
        with torch.cuda.device(x.device):
            return function(x, *args)

    return run


def by_group(x: torch.Tensor, group: int, fresh: bool = False) -> tuple[torch.Tensor, tuple[int, ...]]:
    """(tensor, strides) by which x [B, Hq, N, ...] is read as [B, Hkv, group * N, ...]: the queries of a group's heads, head after head.

    The tensor is x itself where its heads follow one another in memory. Otherwise it is a copy, or, where it is `fresh`, room for results.
    """
    n, strides = x.shape[2], x.stride()
    if (n > 1 and strides[1] != strides[2] * n) or strides[1] > MAX_ROW_STRIDE * n:
        x = x.new_empty(x.shape) if fresh else x.contiguous()
        strides = x.stride()
    return x, (strides[0], group * strides[1], strides[2] if n > 1 else strides[1], *strides[3:])


def copy_back(x: torch.Tensor, to: torch.Tensor) -> None:
    """Write the elements of x to another tensor of its shape, unless they are there."""
    if x is not to:
        to.copy_(x)


def room_for_splits(x: torch.Tensor, splits: int) -> torch.Tensor:
    """Room for one part of x [B, Hkv, Nk, D] from each split: [B, Hkv, splits, Nk, D]. It is x itself where there is one split."""
    if splits == 1:
        return x.unsqueeze(2)
    b, h, n, d = x.shape
    return empty(x, (b, h, splits, n, d), (h * splits * n * d, splits * n * d, n * d, d, 1), x.dtype)
