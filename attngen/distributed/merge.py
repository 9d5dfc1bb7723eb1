"""Merging of partial outputs by their LSE, as split-KV kernels do: the parts are of the same queries and of different
keys."""

from __future__ import annotations

import torch


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add a part to an output in place.

    out: fp32 [..., rows, Dv]. lse: fp32 [..., rows], natural logarithm. part, part_lse: of other keys, any
    floating-point dtype. Where both LSEs are -inf, the output stays 0 and the LSE -inf.
    """
    total = torch.logaddexp(lse, part_lse)
    finite = total.masked_fill(total == -torch.inf, 0)  # -inf - -inf would be NaN
    out.mul_(torch.exp(lse - finite)[..., None]).add_(part * torch.exp(part_lse - finite)[..., None])
    lse.copy_(total)
