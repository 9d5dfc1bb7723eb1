"""`attention` as a torch.nn.Module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch

from attngen.runtime.unknown import refuse_arguments


class AttentionModule(torch.nn.Module):
    """A module without parameters that computes attention. It holds scale and dropout_p; `forward` takes the other
    arguments of `attention`."""

    attention: ClassVar[Callable[..., Any]]
    spec: ClassVar[str]
    drops: ClassVar[bool]  # whether the spec has dropout, which applies in training

    def __init__(self, *, scale: float | None = None, dropout_p: float = 0.0, **unknown: NoReturn) -> None:
        super().__init__()
        if unknown:
            refuse_arguments("Attention", type(self).__init__, unknown)
        if dropout_p and not self.drops:
            raise TypeError(f"attention: dropout_p is {dropout_p}; expected none, as the spec has no dropout")
        self.scale, self.dropout_p = scale, dropout_p

    def forward(self, *args: Any, **inputs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if held := next((name for name in ("scale", "dropout_p") if name in inputs), ""):
            raise TypeError(
                f"Attention: {held} is given to a call; expected it where the module is made, as in "
                f"Attention({held}=0.1)"
            )
        dropping = {"dropout_p": self.dropout_p if self.training else 0.0} if self.drops else {}
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self.attention(
            *args, **inputs, **dropping, scale=self.scale
        )
        return found

    def extra_repr(self) -> str:
        return f"spec={self.spec}, {f'dropout_p={self.dropout_p}, ' if self.drops else ''}scale={self.scale}"
