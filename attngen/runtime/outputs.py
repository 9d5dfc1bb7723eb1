"""What calls give beside the output."""

from __future__ import annotations

import torch

from attngen.runtime.checks import kind


def check_max_score(wanted: bool | str) -> None:
    """Raise ValueError or TypeError, in one sentence, if what a call says of largest scores is neither a bool nor
    "head"."""
    if not isinstance(wanted, (bool, str)):
        raise TypeError(f'attention: return_max_score is a {kind(wanted)}; expected True, False or "head"')
    if wanted not in (True, False, "head"):
        raise ValueError(
            f'attention: return_max_score is "{wanted}"; expected True, for each query, or "head", for each head'
        )


def largest(max_score: torch.Tensor, wanted: bool | str) -> torch.Tensor:
    """The largest scores [B, Hq, Nq] as a call wants them: of each query, or of each "head" [Hq], -inf where it sees
    nothing."""
    if wanted != "head":
        return max_score
    return max_score.amax((0, 2)) if max_score.numel() else max_score.new_full(max_score.shape[1:2], -torch.inf)
