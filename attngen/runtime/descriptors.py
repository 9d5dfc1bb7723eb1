"""Tensor descriptors, with which TMA reads and writes tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], getattr(gl, str(dtype).removeprefix("torch.")))


def laid_out(descriptor: Any) -> Any:
    """Return a Triton descriptor as a Gluon descriptor, which also has the tile's layout in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    x, block = descriptor.base, descriptor.block_shape
    return TensorDescriptor(x, descriptor.shape, descriptor.strides, block, _layout(*block[2:], x.dtype))


def descriptor(x: torch.Tensor, rows: int, columns: int = 0, gluon: bool = False) -> Any:
    """Return a descriptor with which TMA loads tiles of `rows` rows from x, [B, H, N, D]: Gluon's if `gluon`, else
    Triton's.

    In x [B, H, S, N, D], with S splits per head, each split counts as a head. A tile has `columns` columns; by default
    the next power of two from D on. Columns beyond D read as zeros. Rows have to start at multiples of 16 bytes; a
    tensor whose rows do not is copied.
    """
    if not x.numel():
        x = x.new_zeros((1, 1, 1, max(1, x.shape[-1])))  # a placeholder, of which no tile is read
    form = None if x.data_ptr() % 16 else _form(gluon, rows, columns, x.dtype, *_of_heads(x))
    if form is None:
        x = x.clone(memory_format=torch.contiguous_format)
        form = _form(gluon, rows, columns, x.dtype, *_of_heads(x))
        assert form is not None
    made: Any = object.__new__(form[0])
    vars(made).update(form[1], base=x)
    return made


def _of_heads(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and strides of x [B, H, N, D], or of x [B, H, S, N, D] as [B, H * S, N, D]."""
    if x.dim() == 4:
        return x.shape, x.stride()
    (b, h, parts, n, d), (of_b, of_h, of_part, *rest) = x.shape, x.stride()
    return (b, h * parts, n, d), (of_b, of_part if parts > 1 else of_h, *rest)


@functools.lru_cache(maxsize=1024)
def _form(
    gluon: bool, rows: int, columns: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[type, dict[str, Any]] | None:
    """Return the class of a descriptor and its fields except the tensor; None if rows do not start at multiples of 16
    bytes.

    Constructing a descriptor, with its class's checks, takes ten times as long as filling in these fields.
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


class Described:
    """The arguments of a kernel that are passed by descriptor, and the cache of their encodings for the driver.

    An encoded descriptor is an address, sizes and strides, and holds no tensor. So it can be reused by each later call
    with such a tensor at that address.
    """

    MOST = 1024  # number of cached calls; one more clears the cache

    def __init__(self, places: Sequence[tuple[int, int, int]], gluon: bool = False) -> None:
        self.places = sorted(places)  # (position, rows and columns of a tile), as `descriptor` takes them
        self.gluon = gluon
        self.known: dict[tuple[Any, ...], list[tuple[int, list[Any]]]] = {}

    def put(self, args: list[Any], tensors: Sequence[Any]) -> None:
        """Replace the described arguments by descriptors of their tensors."""
        for at, rows, columns in self.places:
            args[at] = descriptor(tensors[at], rows, columns, self.gluon)

    def encoded(
        self,
        args: list[Any],
        tensors: Sequence[Any],
        strides: tuple[int, ...],
        encode: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:
        """Return the arguments with descriptors as `encode` encodes them; cached by addresses, sizes and strides.

        The list `args` has to stay alive until the launch: it may hold a descriptor of a copy.
        """
        key = strides, *[(args[at], tensors[at].shape) for at, _, _ in self.places]
        known = self.known.get(key)
        if known is not None:
            for at, numbers in known:
                args[at : at + 1] = numbers
            return args
        self.put(args, tensors)
        found = encode(args)
        more = (len(found) - len(args)) // len(self.places)  # arguments of an encoded descriptor after the first
        starts = [at + i * more for i, (at, _, _) in enumerate(self.places)]
        if all(args[at].base is tensors[at] for at, _, _ in self.places) and not any(
            isinstance(x, torch.Tensor) for x in found
        ):
            if len(self.known) >= self.MOST:
                self.known.clear()
            self.known[key] = [(at, found[at : at + more + 1]) for at in starts]
        return found
