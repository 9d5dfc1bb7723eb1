"""Causal: a query sees no key that comes after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from attngen.ir import Bool
from attngen.masks import KV, NK, NQ, Mask, Q, Sizes

if TYPE_CHECKING:
    import torch

Align = Annotated[
    Literal["bottom_right", "top_left"],
    Field(description="which query and key are aligned: the last ones, or the first ones"),
]


def position_offset(align: Align) -> Any:
    """Key position of query 0, if the last query meets the last key (bottom_right), or the first the first
    (top_left)."""
    return NK - NQ if align == "bottom_right" else 0


class Causal(Mask):
    """A query sees no later key. With Nq != Nk, `bottom_right` (FlashAttention) aligns the ends, `top_left` (SDPA)
    the starts."""

    name: ClassVar[str] = "causal"
    align: Align = "bottom_right"

    def expression(self) -> Bool:
        return Q + position_offset(self.align) >= KV

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        diagonal = sizes.n_kv - sizes.n_q if self.align == "bottom_right" else 0
        return torch.ones(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=device).tril(diagonal)[None, None]
