"""Block-causal: a query sees all of its own block of positions, and all blocks before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import sympy
from pydantic import Field

from attngen.ir import Bool, floordiv
from attngen.masks import KV, MAX_OFFSET, Mask, Q, Sizes
from attngen.masks.causal import Align, position_offset

if TYPE_CHECKING:
    import torch


class BlockCausal(Mask):
    """Blocks of `size` positions, causal between them and open inside (block diffusion, frames of video). Aligned as
    `causal` is."""

    name: ClassVar[str] = "block_causal"
    size: int = Field(ge=1, le=MAX_OFFSET, description="positions of a block")
    align: Align = "bottom_right"

    def expression(self) -> Bool:
        size = sympy.Integer(self.size)
        return floordiv(KV, size) <= floordiv(Q + position_offset(self.align), size)

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        mask = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=device)
        shift = sizes.n_kv - sizes.n_q if self.align == "bottom_right" else 0
        for q in range(sizes.n_q):
            if q + shift >= 0:
                mask[q, : ((q + shift) // self.size + 1) * self.size] = True
        return mask[None, None]
