"""Tree: drafted tokens that see all keys before the draft, and those drafted tokens that the call selects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import sympy

from attngen.ir import Bool, Fact, Input, Read, symbol
from attngen.masks import KV, NK, NQ, Mask, Q, Sizes

if TYPE_CHECKING:
    import torch


class Tree(Mask):
    """The last Nq keys are a draft, aligned with the queries; `tree_mask` (bool [B, Nq, Nq]) says which of them a query
    sees.

    In a tree of drafted tokens these are its ancestors and itself (speculative decoding: Miao et al. 2024, SpecInfer,
    section 4.2).
    """

    name: ClassVar[str] = "tree"

    def inputs(self) -> tuple[Input, ...]:
        return (Input("tree_mask", "b1", ("B", "Nq", "Nq"), "True where a query sees one of the last Nq keys"),)

    def reads(self) -> tuple[Read, ...]:
        return (Read("tree_mask", "tree_mask", (symbol("b"), Q, KV + NQ - NK)),)

    def facts(self) -> tuple[Fact, ...]:
        return (Fact(symbol("tree_mask"), sympy.true, sympy.false),)

    def expression(self) -> Bool:
        newest = NK - NQ
        return sympy.Or(newest > KV, sympy.And(newest <= KV, symbol("tree_mask")))

    def sample(self, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor | float]:
        """Trees in which each token follows one of those before it."""
        import torch

        tree = torch.zeros(sizes.batch, sizes.n_q, sizes.n_q, dtype=torch.bool)
        for b in range(sizes.batch):
            for token in range(sizes.n_q):
                parent = int(torch.randint(-1, token, (), generator=generator)) if token else -1
                if parent >= 0:
                    tree[b, token] = tree[b, parent]
                tree[b, token, token] = True
        return {"tree_mask": tree}

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        import torch

        mask = torch.ones(sizes.batch, 1, sizes.n_q, sizes.n_kv, dtype=torch.bool, device=device)
        drafted = min(sizes.n_q, sizes.n_kv)
        if drafted:
            mask[:, 0, :, sizes.n_kv - drafted :] = inputs["tree_mask"][:, :, sizes.n_q - drafted :]
        return mask
