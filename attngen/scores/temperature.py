"""Temperature: scores divided by a number per head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attngen.ir import Expr, Input, symbol
from attngen.scores import S, Score, Sizes

if TYPE_CHECKING:
    import torch


class Temperature(Score):
    """s / temperature[h]: `temperature` is fp32 [Hq]; with `learnable` it gets a gradient."""

    name: ClassVar[str] = "temperature"
    per: Literal["head"] = "head"
    learnable: bool = True

    def inputs(self) -> tuple[Input, ...]:
        return (
            Input(
                "temperature",
                "f32",
                ("Hq",),
                "the temperature that divides each head's scores",
                ("grad",) * self.learnable,
            ),
        )

    def expression(self) -> Expr:
        return S / symbol("temperature")

    def sample(self, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor | float]:
        import torch

        return {"temperature": torch.rand(sizes.q_heads, generator=generator) + 0.5}

    def reference(self, s: torch.Tensor, sizes: Sizes, inputs: dict[str, Any]) -> torch.Tensor:
        return s / inputs["temperature"].to(s.dtype)[None, :, None, None]
