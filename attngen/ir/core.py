"""Types of values, and accesses to tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from attngen.ir.dims import axis_of, unpadded
from attngen.ir.dtypes import QUANTISED
from attngen.ir.expr import Bool, Expr

TENSORS = ("in", "out", "inout", "scratch", "sum")  # values of Arg.role for tensors in device memory
# Bytes of the element types that are the same in all modules, so not of `T` and the output types.
DTYPE_BYTES = {"f32": 4, "i32": 4, "i64": 8, "b1": 1, "ptr": 8, **dict.fromkeys(QUANTISED.values(), 2)}


@dataclass(frozen=True)
class Type:
    """The type of a value, written `dtype[dims] @space`.

    dtype: element type; `T` is the element type of q, k and v.
    dims: names of the dimensions, such as `BLOCK_Q` or `D_V`.
    space: `hbm` (device memory), `sram` (shared memory) or `reg`; `?` until assign-memory-space has decided, and
    `flight` for the result of a wgmma that has not been waited for.
    """

    dtype: str
    dims: tuple[str, ...] = ()
    space: str = "?"

    @property
    def unpadded(self) -> tuple[str, ...]:
        """Its dimensions by the names that tensors have."""
        return tuple(map(unpadded, self.dims))

    @property
    def quantised(self) -> bool:
        """True if the elements are packed pairs of 8-bit numbers."""
        return self.dtype in QUANTISED.values()


@dataclass(frozen=True)
class Access:
    """A position in a tensor, as in `%K[b, h // group, kv, d_qk]`. An axis letter stands for the current tile of that
    axis. A number added to it, as in `first_item + KV_splits`, moves the tile's start by that much."""

    tensor: str
    index: tuple[Expr, ...]

    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in map(axis_of, self.index) if axis)


class Fact(NamedTuple):
    """A bound on a condition that is data, which cannot be solved for positions: the condition `literal` implies
    `needs`, and `enough` implies `literal`."""

    literal: Bool
    needs: Bool
    enough: Bool
