"""Chunked: a query sees the keys of its own chunk, causally."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import sympy
from pydantic import Field

from attngen.ir import Bool, floordiv
from attngen.masks import KV, MAX_OFFSET, Mask, Q, Sizes
from attngen.masks.causal import Align, position_offset

if TYPE_CHECKING:
    import torch


class Chunked(Mask):
    """Chunks of `size` keys, causal inside each (Llama 4's local layers). Aligned as `causal` is."""

    name: ClassVar[str] = "chunked"
    size: int = Field(ge=1, le=MAX_OFFSET, description="keys of a chunk")
    align: Align = "bottom_right"

    def expression(self) -> Bool:
        position, size = Q + position_offset(self.align), sympy.Integer(self.size)
        return sympy.And(position >= KV, floordiv(KV, size) >= floordiv(position, size))

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        mask = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=device)
        shift = sizes.n_kv - sizes.n_q if self.align == "bottom_right" else 0
        for q in range(sizes.n_q):
            last = q + shift
            if last >= 0:
                mask[q, last // self.size * self.size : last + 1] = True
        return mask[None, None]
