"""No mask: every query sees every key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import sympy

from attngen.ir import Bool
from attngen.masks import Mask, Sizes

if TYPE_CHECKING:
    import torch


class NoMask(Mask):
    """Every query sees every key."""

    name: ClassVar[str] = "none"

    def expression(self) -> Bool:
        return sympy.true

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        return torch.ones(1, 1, sizes.n_q, sizes.n_kv, dtype=torch.bool, device=device)
