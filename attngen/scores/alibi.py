"""ALiBi: scores fall with distance, by a slope per head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import sympy
from pydantic import model_validator

from attngen.ir import Derived, Expr, Input, symbol
from attngen.scores import KV, NK, NQ, Q, S, Score, Sizes

if TYPE_CHECKING:
    import torch


def standard_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """ALiBi's slopes, fp32 [heads]: 2^(-8/n), 2^(-16/n), ... if n heads are a power of two. Other numbers add every
    second slope of 2n."""
    whole = 1 << (heads.bit_length() - 1) if heads else 0
    head = torch.arange(heads, device=device, dtype=torch.float32)
    exponent = torch.where(head < whole, (head + 1) / max(1, whole), (head - whole + 0.5) / max(1, whole))
    return torch.exp2(-8.0 * exponent)


class Alibi(Score):
    """s - slope[h] * |distance| (Press et al. 2022), queries aligned with the last keys; `slopes: given` are
    `alibi_slopes`, fp32 [Hq]."""

    name: ClassVar[str] = "alibi"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (standard_slopes,)
    slopes: Literal["standard", "given"] = "standard"
    learnable: bool = False

    @model_validator(mode="after")
    def _given_are_learnable(self) -> Alibi:
        if self.learnable and self.slopes == "standard":
            raise ValueError("has `learnable` with standard slopes; expected `slopes: given`")
        return self

    def inputs(self) -> tuple[Input, ...]:
        if self.slopes == "standard":
            return ()
        return (
            Input(
                "alibi_slopes",
                "f32",
                ("Hq",),
                "by how much each head's scores fall per position",
                ("grad",) * self.learnable,
            ),
        )

    def derived(self) -> tuple[Derived, ...]:
        if self.slopes == "given":
            return ()
        return (Derived(("alibi_slopes",), (("Hq",),), standard_slopes.__name__, ("Hq", "device"), "f32"),)

    def expression(self) -> Expr:
        return S - symbol("alibi_slopes") * sympy.Abs(Q + NK - NQ - KV)

    def sample(self, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor | float]:
        import torch

        return {"alibi_slopes": torch.rand(sizes.q_heads, generator=generator)} if self.slopes == "given" else {}

    def reference(self, s: torch.Tensor, sizes: Sizes, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        slopes = (
            inputs["alibi_slopes"] if self.slopes == "given" else torch.tensor(_paper(sizes.q_heads), device=s.device)
        )
        q, kv = (
            torch.arange(sizes.n_q, device=s.device) + sizes.n_kv - sizes.n_q,
            torch.arange(sizes.n_kv, device=s.device),
        )
        return s - slopes.to(s.dtype)[:, None, None] * (q[:, None] - kv).abs()


def _paper(heads: int) -> list[float]:
    """The slopes as in the paper's code."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8 * (i + 1) / heads) for i in range(heads)]
    below = 1 << (heads.bit_length() - 1)
    return _paper(below) + _paper(2 * below)[0::2][: heads - below]
