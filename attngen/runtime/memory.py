"""Memory: which tensors kernels can read in place, and how results are laid out."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attngen.runtime.private import current_device, empty_cpu, empty_cuda

MAX_ROW_STRIDE = 2**23  # in elements: offsets inside a tile have 32 bits, and a tile has at most 256 rows
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def addressable(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, H, N, D], or a copy if kernels cannot read it in place: its rows are not contiguous, the stride
    between them is too large, or its sign is lazy."""
    if x.is_neg():
        x = x.resolve_neg()
    _, _, step, of_column = x.stride()
    if of_column == 1 and (step <= MAX_ROW_STRIDE or x.shape[2] <= 1):
        return x
    return x.contiguous()


def strides(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the strides of each tensor, without that of the last dimension."""
    return [x.stride()[:-1] for x in tensors]


def rows_layout(x: torch.Tensor, width: int) -> Layout:
    """Return shape and strides of a new [B, H, N, width]. Its dimensions have the order in memory of x's dimensions,
    unless the stride between rows would be too large."""
    b, h, n, _ = x.shape
    if x.is_contiguous():
        return (b, h, n, width), (h * n * width, n * width, width, 1)
    return _ordered_layout(x.shape, x.stride(), width)


def _ordered_layout(shape: tuple[int, ...], steps: tuple[int, ...], width: int) -> Layout:
    """Return `rows_layout` of a tensor with this shape and these strides, which is not contiguous."""
    shape = shape[:3]
    order = sorted(range(3), key=steps.__getitem__, reverse=True)
    if width * math.prod(shape[d] for d in order[order.index(2) + 1 :]) > MAX_ROW_STRIDE:
        order = [0, 1, 2]
    strides, step = [0, 0, 0, 1], width
    for d in reversed(order):
        strides[d] = step
        step = step * max(shape[d], 1)
    return (*shape, width), tuple(strides)


_known_layout = functools.lru_cache(maxsize=1024)(_ordered_layout)


def empty(x: torch.Tensor, shape: tuple[int, ...], steps: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor on the device of x, which has to be the current device."""
    made: torch.Tensor = (empty_cuda if x.is_cuda else empty_cpu)(shape, steps, dtype)
    return made


class Notes(threading.local):
    """Records what a host program does in this thread while `taken` is entered: its launches, and the tensors that it
    fills with 0."""

    on = False
    launches: list[Any] = []
    zeros: list[torch.Tensor] = []

    @contextlib.contextmanager
    def taken(self) -> Iterator[tuple[list[Any], list[torch.Tensor]]]:
        """Record into the lists (launches, tensors). The lists are dropped here afterwards, so that the tensors can be
        freed."""
        self.on, self.launches, self.zeros = True, [], []
        try:
            yield self.launches, self.zeros
        finally:
            self.on, self.launches, self.zeros = False, [], []


NOTES = Notes()


def zeros(x: torch.Tensor, shape: tuple[int, ...], steps: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor like that of `empty`, filled with 0."""
    made = empty(x, shape, steps, dtype).zero_()
    if NOTES.on:
        NOTES.zeros.append(made)
    return made


def empty_rows(x: torch.Tensor, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialised [B, H, N, width] with the layout of `rows_layout`, and the dtype of x by default."""
    dtype = dtype or x.dtype
    if not x.is_contiguous():
        return empty(x, *_known_layout(x.shape, x.stride(), width), dtype)
    b, h, n, _ = x.shape
    of_head = n * width
    made: torch.Tensor = (empty_cuda if x.is_cuda else empty_cpu)(
        (b, h, n, width), (h * of_head, of_head, width, 1), dtype
    )
    return made


def nothing(x: torch.Tensor, dimensions: int = 1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor without elements, with the dtype of x by default."""
    return x.new_empty((0,) * dimensions, dtype=dtype or x.dtype)


@functools.cache
def no_rows(device: torch.device) -> torch.Tensor:
    """Return a placeholder for a gradient of the LSE that is zero: [1, 1, 0] fp32. Its strides are multiples of 16 like
    those of most tensors."""
    return torch.empty_strided((1, 1, 0), (16, 16, 1), dtype=torch.float32, device=device)


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that the device of its first argument, a tensor, is the current device while it runs, because
    Triton launches there."""

    def run(x: torch.Tensor, *args: Any) -> Any:
        if not x.is_cuda or x.get_device() == current_device():
            return function(x, *args)
        with torch.cuda.device(x.device):
            return function(x, *args)

    return run


def by_group(
    x: torch.Tensor, group: int, fresh: bool = False, shaped: bool = False
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return (tensor, strides) to read x [B, Hq, N, ...] as [B, Hkv, group * N, ...]: the queries of all heads of a
    group, head after head.

    The tensor is x itself if its heads are contiguous in memory. Otherwise it is a copy; with `fresh`, an
    uninitialised tensor. With `shaped` it has these sizes and strides, as descriptors need; kernels that address rows
    by strides do not need that, and it takes time.
    """
    n, strides = x.shape[2], x.stride()
    if (n > 1 and strides[1] != strides[2] * n) or strides[1] > MAX_ROW_STRIDE * n:
        x = x.new_empty(x.shape) if fresh else x.contiguous()
        strides = x.stride()
    steps = (strides[0], group * strides[1], strides[2] if n > 1 else strides[1], *strides[3:])
    return x.as_strided((x.shape[0], x.shape[1] // group, group * n, *x.shape[3:]), steps) if shaped else x, steps


def copy_back(x: torch.Tensor, to: torch.Tensor) -> None:
    """Copy x to `to`, unless both are the same tensor."""
    if x is not to:
        to.copy_(x)


def room_for_splits(x: torch.Tensor, splits: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return (tensor, strides) of a buffer [B, Hkv, splits, Nk, D] for partial results of x [B, Hkv, Nk, D].

    With one split the tensor is x itself.
    """
    if splits == 1:
        of_batch, of_head, of_row, _ = x.stride()
        return x, (of_batch, of_head, 0, of_row)
    b, h, n, d = x.shape
    steps = (h * splits * n * d, splits * n * d, n * d, d)
    return empty(x, (b, h, splits, n, d), (*steps, 1), x.dtype), steps
