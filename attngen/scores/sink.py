"""Sink: a logit per head that takes part in every softmax and has no value vector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attngen.ir import Expr, Input, symbol
from attngen.scores import Score

if TYPE_CHECKING:
    import torch


class Sink(Score):
    """exp(sink[h]) is added to every row's denominator (gpt-oss, 2025), and so to its LSE: `sink` is fp32 [Hq], by
    default learnable."""

    name: ClassVar[str] = "sink"
    learnable: bool = True

    def inputs(self) -> tuple[Input, ...]:
        return (
            Input(
                "sink",
                "f32",
                ("Hq",),
                "a logit of each head, in the softmax of all its rows",
                ("grad",) * self.learnable,
            ),
        )

    def sink(self) -> Expr:
        return symbol("sink")

    def reference_sink(self, inputs: dict[str, Any]) -> torch.Tensor:
        sink: torch.Tensor = inputs["sink"]
        return sink
