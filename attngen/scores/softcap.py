"""Softcap: scores kept between -cap and cap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import sympy
from pydantic import Field

from attngen.ir import Expr
from attngen.scores import S, Score, Sizes

if TYPE_CHECKING:
    import torch


class Softcap(Score):
    """cap * tanh(s / cap) (Gemma 2, 2024, section 2)."""

    name: ClassVar[str] = "softcap"
    short: ClassVar[str] = "cap"
    cap: float = Field(ge=1e-3, le=1e6, description="largest size of a score")

    def expression(self) -> Expr:
        return self.cap * sympy.tanh(S / self.cap)

    def reference(self, s: torch.Tensor, sizes: Sizes, inputs: dict[str, Any]) -> torch.Tensor:
        return self.cap * (s / self.cap).tanh()
