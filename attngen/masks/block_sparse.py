"""Block-sparse: a block mask, or a pattern, says which square blocks of scores are visible."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import sympy
from pydantic import Field, field_validator, model_validator

from attngen.ir import Blocks, Bool, Derived, Input, Read, floordiv, symbol
from attngen.masks import KV, Mask, Q, Sizes

if TYPE_CHECKING:
    import torch


def butterfly(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Bool [rows, columns]: block (i, j) counts where i and j differ in one bit at most (Pixelated Butterfly, Dao et
    al. 2021)."""
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    differ = i ^ j
    return differ & (differ - 1) == 0


def local_global(rows: int, columns: int, device: torch.device, local: int, globals: int) -> torch.Tensor:
    """Bool [rows, columns]: blocks at most `local` from the diagonal, which ends in the last corner, and the first
    `globals` rows and columns of blocks (Longformer, Beltagy et al. 2020)."""
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    return ((i + columns - rows - j).abs() <= local) | (i < globals) | (j < globals)


class BlockSparse(Mask):
    """Visible blocks of `block` x `block` scores: `block_mask=` (bool, broadcast to [B, Hq, Tq, Tk]), or those of a
    `pattern`.

    Under `any_of` or `not` it becomes a condition: `block_mask` has all four dimensions, the first two 1 or B and Hq,
    and a pattern needs no block mask.
    """

    name: ClassVar[str] = "block_sparse"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (butterfly, local_global)
    block: int = Field(ge=16, le=4096, description="rows of a block, a power of two")
    pattern: Literal["butterfly", "local_global"] | None = None
    local: int | None = Field(default=None, ge=0, le=10**6)
    globals: int | None = Field(default=None, ge=0, le=10**6)

    @field_validator("block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"is {value}; expected a power of two, as 64 or 128, which tiles divide")
        return value

    @model_validator(mode="after")
    def _parameters(self) -> BlockSparse:
        given = {name for name in ("local", "globals") if getattr(self, name) is not None}
        if self.pattern == "local_global" and given != {"local", "globals"}:
            raise ValueError("has `pattern: local_global`, which needs `local` and `globals`, in blocks")
        if self.pattern != "local_global" and given:
            raise ValueError(f"has `{min(given)}` without `pattern: local_global`, which it belongs to")
        return self

    def blocks(self) -> Blocks:
        params = (("local", self.local), ("globals", self.globals)) if self.pattern == "local_global" else ()
        return Blocks(
            self.block, self.pattern or "", tuple((name, value) for name, value in params if value is not None)
        )

    def names_blocks(self) -> bool:
        return True

    def unlisted(self) -> Mask:
        return _BlocksRead(**self.model_dump())

    def expression(self) -> Bool:
        return sympy.true

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        rows, columns = -(-sizes.n_q // self.block), -(-sizes.n_kv // self.block)
        blocks = inputs.get("block_mask")
        if blocks is None:
            counts = [[self._counts(i, j, columns - rows) for j in range(columns)] for i in range(rows)]
            blocks = torch.tensor(counts, dtype=torch.bool, device=device).reshape(rows, columns)
        blocks = blocks.reshape((1,) * (4 - blocks.dim()) + tuple(blocks.shape))
        scores: torch.Tensor = blocks.repeat_interleave(self.block, 2).repeat_interleave(self.block, 3)
        return scores[:, :, : sizes.n_q, : sizes.n_kv]

    def _counts(self, i: int, j: int, shift: int) -> bool:
        if self.pattern == "butterfly":
            return bin(i ^ j).count("1") <= 1
        local, globals_ = self.local or 0, self.globals or 0
        return abs(i + shift - j) <= local or i < globals_ or j < globals_


class _BlocksRead(BlockSparse):
    """The same mask as a condition on data: kernels read which blocks are visible."""

    def blocks(self) -> None:  # type: ignore[override]
        return None

    def unlisted(self) -> Mask:
        return self

    def _shape(self) -> tuple[str, str]:
        return f"Nq/{self.block}", f"Nk/{self.block}"

    def inputs(self) -> tuple[Input, ...]:
        if self.pattern:
            return ()
        return (Input("block_mask", "b1", ("B", "Hq", *self._shape()), "which blocks of scores count", ("broadcast",)),)

    def derived(self) -> tuple[Derived, ...]:
        if not self.pattern:
            return ()
        numbers = (str(self.local), str(self.globals)) if self.pattern == "local_global" else ()
        return (
            Derived(("pattern_blocks",), (self._shape(),), self.pattern, (*self._shape(), "device", *numbers), "b1"),
        )

    def reads(self) -> tuple[Read, ...]:
        size = sympy.Integer(self.block)
        places = floordiv(Q, size), floordiv(KV, size)
        if self.pattern:
            return (Read("pattern_blocks", "pattern_blocks", places),)
        return (Read("block_mask", "block_mask", (symbol("b"), symbol("h"), *places)),)

    def expression(self) -> Bool:
        return symbol("pattern_blocks" if self.pattern else "block_mask")
