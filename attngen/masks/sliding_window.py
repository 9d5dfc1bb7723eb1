"""Sliding window: a query sees `left` keys before it and `right` after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import sympy
from pydantic import Field, model_validator

from attngen.ir import Bool
from attngen.masks import KV, MAX_OFFSET, Mask, Q, Sizes
from attngen.masks.causal import Align, position_offset

if TYPE_CHECKING:
    import torch


class SlidingWindow(Mask):
    """Keys from `left` before the query to `right` after it; an omitted side is unbounded. Aligned as `causal` is."""

    name: ClassVar[str] = "sliding_window"
    left: int | None = Field(default=None, ge=0, le=MAX_OFFSET)
    right: int | None = Field(default=None, ge=0, le=MAX_OFFSET)
    align: Align = "bottom_right"

    @model_validator(mode="after")
    def _bounded(self) -> SlidingWindow:
        if self.left is None and self.right is None:
            raise ValueError("needs `left`, `right` or both; for no bound at all use the mask `none`")
        return self

    def expression(self) -> Bool:
        position = Q + position_offset(self.align)
        left = sympy.true if self.left is None else position - KV <= self.left
        right = sympy.true if self.right is None else KV - position <= self.right
        return sympy.And(left, right)

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        shift = sizes.n_kv - sizes.n_q if self.align == "bottom_right" else 0
        distance = (
            torch.arange(sizes.n_q, device=device)[:, None] + shift - torch.arange(sizes.n_kv, device=device)[None, :]
        )
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            visible &= distance <= self.left
        if self.right is not None:
            visible &= -distance <= self.right
        return visible[None, None]
