"""No mask: every query sees every key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import sympy

from attngen.ir.expr import Bool
from attngen.masks import Mask

if TYPE_CHECKING:
    import torch


class NoMask(Mask):
    """Every query sees every key."""

    name: ClassVar[str] = "none"

    def expression(self) -> Bool:
        return sympy.true

    def reference(self, n_q: int, n_kv: int, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        return torch.ones(1, 1, n_q, n_kv, dtype=torch.bool, device=device)
