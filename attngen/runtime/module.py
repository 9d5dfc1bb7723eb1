"""`attention` as a torch.nn.Module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch


class AttentionModule(torch.nn.Module):
    """Attention as a module without parameters. It holds scale and dropout_p; `forward` takes the other arguments of `attention`."""

    attention: ClassVar[Callable[..., Any]]
    spec: ClassVar[str]
    drops: ClassVar[bool]  # whether the spec has dropout, which applies in training

    def __init__(self, *, scale: float | None = None, dropout_p: float = 0.0) -> None:
        super().__init__()
        if dropout_p and not self.drops:
            raise TypeError(f"attention: dropout_p is {dropout_p}; expected none, as the spec has no dropout")
        self.scale, self.dropout_p = scale, dropout_p

    def forward(self, *args: Any, **inputs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        dropping = {"dropout_p": self.dropout_p if self.training else 0.0} if self.drops else {}
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self.attention(*args, **inputs, **dropping, scale=self.scale)
        return found

    def extra_repr(self) -> str:
        return f"spec={self.spec}, {f'dropout_p={self.dropout_p}, ' if self.drops else ''}scale={self.scale}"
