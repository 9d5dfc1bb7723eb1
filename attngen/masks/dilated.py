"""Dilated: a query sees every n-th key before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import sympy
from pydantic import Field

from attngen.ir import Bool, mod
from attngen.masks import KV, MAX_OFFSET, Mask, Q, Sizes
from attngen.masks.causal import Align, position_offset

if TYPE_CHECKING:
    import torch


class Dilated(Mask):
    """Keys at distances of 0, `step`, 2 `step`, ... before the query, at most `reach` (Longformer, Beltagy et al.
    2020, section 3.1)."""

    name: ClassVar[str] = "dilated"
    step: int = Field(ge=2, le=MAX_OFFSET, description="distance between keys")
    reach: int | None = Field(default=None, ge=0, le=MAX_OFFSET, description="largest distance")
    align: Align = "bottom_right"

    def expression(self) -> Bool:
        position = Q + position_offset(self.align)
        near = sympy.true if self.reach is None else position - KV <= self.reach
        return sympy.And(
            position >= KV, near, sympy.Eq(mod(position, sympy.Integer(self.step)), mod(KV, sympy.Integer(self.step)))
        )

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        mask = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=device)
        shift = sizes.n_kv - sizes.n_q if self.align == "bottom_right" else 0
        for q in range(sizes.n_q):
            kv = q + shift
            if kv >= 0:
                steps = min(kv, kv if self.reach is None else self.reach) // self.step
                mask[q, kv - steps * self.step : kv + 1 : self.step] = True
        return mask[None, None]
