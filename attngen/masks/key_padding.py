"""Key padding: each sequence of the batch has its own visible keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import sympy

from attngen.ir import Bool, Derived, Fact, Input, symbol
from attngen.masks import KV, Mask, Sizes

if TYPE_CHECKING:
    import torch


def key_span(visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row of a bool [B, Nk], int32 [B]: its first True, the end of the unbroken run from there, the end of
    its last True."""
    n = visible.shape[1]
    if n == 0:
        return (torch.zeros(visible.shape[0], device=visible.device, dtype=torch.int32),) * 3
    position = torch.arange(n, device=visible.device)
    first = torch.where(visible, position, n).amin(1)
    end = torch.where(visible, position + 1, 0).amax(1)
    run = torch.where(visible | (position < first[:, None]), n, position).amin(1)
    return first.int(), run.int(), end.int()


# for each sequence: its first visible key, the end of the unbroken run from there, the end of its last visible key
SPAN = ("key_padding_first", "key_padding_run", "key_padding_end")


class KeyPadding(Mask):
    """Visible keys per sequence: `key_padding` (bool [B, Nk], True = visible), or with `lengths` the first
    kv_lengths[b] keys."""

    name: ClassVar[str] = "key_padding"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (key_span,)
    lengths: bool = False

    def inputs(self) -> tuple[Input, ...]:
        if self.lengths:
            help = "number of keys of each sequence that count, from the first"
            return (Input("kv_lengths", "i32", ("B",), help, ("least=0", "most=Nk")),)
        return (Input("key_padding", "b1", ("B", "Nk"), "True where a key may be attended to"),)

    def derived(self) -> tuple[Derived, ...]:
        return () if self.lengths else (Derived(SPAN, (("B",),) * 3, key_span.__name__, ("key_padding",)),)

    def facts(self) -> tuple[Fact, ...]:
        first, run, end = map(symbol, SPAN)
        needs, enough = sympy.And(first <= KV, end > KV), sympy.And(first <= KV, run > KV)
        return () if self.lengths else (Fact(symbol("key_padding"), needs, enough),)

    def expression(self) -> Bool:
        return symbol("kv_lengths") > KV if self.lengths else symbol("key_padding")

    def workload(self, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor | float]:
        """Sequences of half the keys to all of them."""
        import torch

        lengths = torch.randint(sizes.n_kv // 2, sizes.n_kv + 1, (sizes.batch,), generator=generator, dtype=torch.int32)
        return {"kv_lengths": lengths} if self.lengths else {"key_padding": torch.arange(sizes.n_kv) < lengths[:, None]}

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        positions = torch.arange(sizes.n_kv, device=device)[None, :]
        visible: torch.Tensor = positions < inputs["kv_lengths"][:, None] if self.lengths else inputs["key_padding"]
        return visible[:, None, None, :]
