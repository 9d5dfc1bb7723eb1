"""Score modifiers, one file each. A new one is a new file here; it is found by discovery, with no other edit.

A file holds one subclass of `Score`: its parameters (pydantic fields), its run-time inputs, its expression over `s`
(the scaled score), `q_idx`, `kv_idx`, `Nq`, `Nk`, `b`, `h` and the inputs' names, and a hand-written eager oracle. Its
backward is derived from the expression.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from attngen.ir import Expr, symbol
from attngen.ir.sizes import Sizes
from attngen.lang.chunks import chunk_positions
from attngen.lang.expression import Expression, parse_score
from attngen.lang.part import KV, NK, NQ, Part, Q, WrittenPart, discover, evaluated
from attngen.masks import registry

if TYPE_CHECKING:
    import torch

__all__ = ["KV", "NK", "NQ", "Q", "S", "Score", "Sizes", "WrittenScore", "score_registry"]

S = symbol("s")


class Score(Part):
    """Base of every modifier. A spec may set the fields of the subclass as parameters, and the field `short` without
    its name."""

    short: ClassVar[str] = ""

    def expression(self) -> Expr:
        """The new score, from the current score `s`; modifiers apply in the spec's order, before the mask."""
        return S

    def sink(self) -> Expr | None:
        """A logit in every row's softmax that has no value vector; None if the modifier has none."""
        return None

    def reference(self, s: torch.Tensor, sizes: Sizes, inputs: dict[str, Any]) -> torch.Tensor:
        """The oracle: new scores [B, Hq, Nq, Nk] from scores, written by hand, independent of `expression`."""
        return s

    def reference_sink(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """The oracle of `sink`: [Hq]."""
        return None


class WrittenScore(WrittenPart, Score):
    """A modifier that a spec writes out as an expression over `s` with parameters."""

    @cached_property
    def parsed(self) -> Expression:
        return parse_score(self.expr, self.params, self.let)

    def reference(self, s: torch.Tensor, sizes: Sizes, inputs: dict[str, Any]) -> torch.Tensor:
        return evaluated(self.parsed, sizes, s.device, inputs, s)


@cache
def score_registry() -> dict[str, type[Score]]:
    """Every named modifier by name, from the files of this folder."""
    return discover(__name__, __path__, Score)


def derive_functions() -> dict[str, Callable[..., Any]]:
    """Every function that a mask or a modifier declares, by name."""
    found = {f.__name__: f for part in (*registry().values(), *score_registry().values()) for f in part.functions}
    return found | {chunk_positions.__name__: chunk_positions}
