"""Additional outputs of calls."""

from __future__ import annotations

import torch

from attngen.runtime.checks import kind


def check_max_score(requested: bool | str) -> None:
    """Raise ValueError or TypeError, in one sentence, if a call's `return_max_score` is neither a bool nor "head"."""
    if not isinstance(requested, (bool, str)):
        raise TypeError(f'attention: return_max_score is a {kind(requested)}; expected True, False or "head"')
    if requested not in (True, False, "head"):
        raise ValueError(
            f'attention: return_max_score is "{requested}"; expected True, for each query, or "head", for each head'
        )


def largest(max_score: torch.Tensor, requested: bool | str) -> torch.Tensor:
    """Return the largest scores [B, Hq, Nq] as they are, or for "head" the largest of each head [Hq]; -inf where no key
    is visible."""
    if requested != "head":
        return max_score
    return max_score.amax((0, 2)) if max_score.numel() else max_score.new_full(max_score.shape[1:2], -torch.inf)
