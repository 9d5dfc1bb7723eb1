"""Dense bias: a tensor as large as the scores, added to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attngen.ir import Expr, Input, symbol
from attngen.scores import S, Score, Sizes

if TYPE_CHECKING:
    import torch


class DenseBias(Score):
    """s + bias: `bias` is [B or 1, Hq or 1, Nq, Nk] of q's dtype; with `learnable` it gets a gradient."""

    name: ClassVar[str] = "dense_bias"
    learnable: bool = True

    def inputs(self) -> tuple[Input, ...]:
        return (
            Input(
                "bias",
                "T",
                ("B", "Hq", "Nq", "Nk"),
                "the bias added to the scores",
                ("grad",) * self.learnable + ("broadcast",),
            ),
        )

    def expression(self) -> Expr:
        return S + symbol("bias")

    def sample(self, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor | float]:
        import torch

        return {"bias": torch.randn(1, sizes.q_heads, sizes.n_q, sizes.n_kv, generator=generator)}

    def reference(self, s: torch.Tensor, sizes: Sizes, inputs: dict[str, Any]) -> torch.Tensor:
        return s + inputs["bias"].to(s.dtype)
