"""Relative bias: a table of numbers that are added to scores, by distance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from attngen.ir import Expr, Input, Read, clamp, symbol
from attngen.scores import KV, NK, NQ, Q, S, Score, Sizes

if TYPE_CHECKING:
    import torch


class RelativeBias(Score):
    """s + table[h, distance + max_distance], distance = q_pos - kv_idx within +-max_distance (T5, Raffel et al. 2020,
    without its buckets).

    `relative_bias` is fp32 [Hq, 2 max_distance + 1]; the queries are the last positions. T5's buckets are an expression
    (docs/cookbook/biases.md).
    """

    name: ClassVar[str] = "relative_bias"
    max_distance: int = Field(ge=1, le=2**20, description="farther keys count as this far")
    learnable: bool = True

    def inputs(self) -> tuple[Input, ...]:
        shape = ("Hq", str(2 * self.max_distance + 1))
        return (
            Input(
                "relative_bias",
                "f32",
                shape,
                "the bias added to the scores, by head and distance",
                ("grad",) * self.learnable,
            ),
        )

    def reads(self) -> tuple[Read, ...]:
        distance = clamp(Q + NK - NQ - KV, -self.max_distance, self.max_distance)
        return (Read("relative_bias", "relative_bias", (symbol("h"), distance + self.max_distance)),)

    def expression(self) -> Expr:
        return S + symbol("relative_bias")

    def reference(self, s: torch.Tensor, sizes: Sizes, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        # Distances fall along the keys. A query's row is a window of them, one position after the next query's window.
        distance = torch.arange(sizes.n_kv, -sizes.n_q, -1, device=s.device).clamp(
            -self.max_distance, self.max_distance
        )
        bias = inputs["relative_bias"].to(s.dtype)[:, distance + self.max_distance]
        return s + bias.unfold(1, sizes.n_kv, 1).flip(1)[:, : sizes.n_q]
