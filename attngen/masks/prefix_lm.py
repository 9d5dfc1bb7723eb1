"""Prefix LM: every query sees the prefix; after it, attention is causal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import sympy
from pydantic import Field, model_validator

from attngen.ir import Bool, Input, symbol
from attngen.masks import KV, MAX_OFFSET, Mask, Q, Sizes
from attngen.masks.causal import Align, position_offset

if TYPE_CHECKING:
    import torch


class PrefixLM(Mask):
    """All queries see the keys of the prefix, and the others causally (Raffel et al. 2020, section 3.2.1).

    `length` fixes the prefix length; otherwise it is an argument, `prefix_length`: an int, or with `per: batch` an
    int32 tensor [B].
    """

    name: ClassVar[str] = "prefix_lm"
    length: int | None = Field(default=None, ge=0, le=MAX_OFFSET, description="keys of the prefix")
    per: str | None = Field(default=None, pattern="^batch$", description="batch: each sequence has a prefix of its own")
    align: Align = "bottom_right"

    @model_validator(mode="after")
    def _one(self) -> PrefixLM:
        if self.length is not None and self.per is not None:
            raise ValueError("has `length` and `per`; expected one of them, or none for an argument `prefix_length`")
        return self

    def inputs(self) -> tuple[Input, ...]:
        if self.length is not None:
            return ()
        help = "number of keys, from the first, that all queries see"
        return (Input("prefix_length", "i32", ("B",) if self.per else (), help, ("least=0",)),)

    def expression(self) -> Bool:
        prefix = symbol("prefix_length") if self.length is None else sympy.Integer(self.length)
        return sympy.Or(prefix > KV, Q + position_offset(self.align) >= KV)

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        shift = sizes.n_kv - sizes.n_q if self.align == "bottom_right" else 0
        mask = (
            torch.ones(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=device)
            .tril(shift)[None, None]
            .repeat(sizes.batch, 1, 1, 1)
        )
        lengths: Any = inputs["prefix_length"] if self.length is None else self.length
        for b in range(sizes.batch):
            mask[b, :, :, : max(0, int(lengths[b]) if self.per else lengths)] = True
        return mask
