"""Descriptors, by which a copy engine reads and writes tiles of tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], getattr(gl, str(dtype).removeprefix("torch.")))


def laid_out(descriptor: Any) -> Any:
    """A descriptor of Triton's as one of Gluon's, which says how a tile lies in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    x, block = descriptor.base, descriptor.block_shape
    return TensorDescriptor(x, descriptor.shape, descriptor.strides, block, _layout(*block[2:], x.dtype))


def descriptor(x: torch.Tensor, rows: int, columns: int = 0, gluon: bool = False) -> Any:
    """A descriptor by which a copy engine reads or writes tiles of `rows` rows of x, [B, H, N, D], of Triton's class or of Gluon's.

    A tile has `columns` columns; without them as many as the next power of two from D on. Those beyond D are zeros. Rows have to start at
    multiples of 16 bytes. A tensor whose rows do not is copied.
    """
    if not x.numel():
        x = x.new_zeros((1, 1, 1, x.shape[3]))  # no tile of it is read
    form = None if x.data_ptr() % 16 else _form(gluon, rows, columns, x.dtype, x.shape, x.stride())
    if form is None:
        x = x.clone(memory_format=torch.contiguous_format)
        form = _form(gluon, rows, columns, x.dtype, x.shape, x.stride())
        assert form is not None
    made: Any = object.__new__(form[0])
    vars(made).update(form[1], base=x)
    return made


@functools.lru_cache(maxsize=1024)
def _form(
    gluon: bool, rows: int, columns: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[type, dict[str, Any]] | None:
    """The class of a descriptor and its fields, but for the tensor; None if rows do not start at multiples of 16 bytes.

    To make one anew, with all that its class checks, takes ten times as long as to fill it in.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    unit = 16 // dtype.itemsize
    if any(s % unit for n, s in zip(shape, strides[:3]) if n > 1):
        return None
    steps = [*(s if n > 1 else unit for n, s in zip(shape, strides[:3])), 1]
    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    made: Any = TensorDescriptor(like, list(shape), steps, [1, 1, rows, columns or triton.next_power_of_2(shape[3])])
    made = laid_out(made) if gluon else made
    return type(made), dict(vars(made))
