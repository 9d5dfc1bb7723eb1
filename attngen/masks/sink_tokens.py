"""Sink tokens: the first keys, which every query sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from attngen.ir import Bool
from attngen.masks import KV, MAX_OFFSET, Mask, Sizes

if TYPE_CHECKING:
    import torch


class SinkTokens(Mask):
    """The first `count` keys, even after the query. Streaming attention: {all_of: [causal, {any_of: [window,
    sink_tokens]}]}.

    That is StreamingLLM (Xiao et al. 2023); without `causal`, the first queries see later keys.
    """

    name: ClassVar[str] = "sink_tokens"
    count: int = Field(ge=1, le=MAX_OFFSET, description="keys, from the first")

    def expression(self) -> Bool:
        return self.count > KV

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        mask = torch.zeros(1, 1, sizes.n_q, sizes.n_kv, dtype=torch.bool, device=device)
        mask[..., : self.count] = True
        return mask
