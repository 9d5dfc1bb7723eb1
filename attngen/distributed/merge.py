"""Merging of partial outputs by their LSE, as split-KV kernels do: the parts are of the same queries and of different
keys."""

from __future__ import annotations

import torch

SUMS = (
    "lse",
    "m_all",
    "inv_l_all",
)  # the base-2 maximum of a row's scores, and 1 over its sum of weights relative to it


def can_merge(rows: tuple[str, ...]) -> bool:
    """True if the row vectors of a kernel can be merged."""
    return rows in (("lse",), SUMS)


def merge_parts(
    out: torch.Tensor, stats: dict[str, torch.Tensor], part: torch.Tensor, part_stats: dict[str, torch.Tensor]
) -> None:
    """Add a part to an output and its row vectors in place; see `merge` and `merge_sums`."""
    if len(stats) == 1:
        merge(out, stats["lse"], part, part_stats["lse"])
        return
    merge_sums(out, stats["m_all"], stats["inv_l_all"], part, part_stats["m_all"], part_stats["inv_l_all"])
    stats["lse"].copy_(torch.logaddexp(stats["lse"], part_stats["lse"]))


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add a part to an output in place.

    out: fp32 [..., rows, Dv]. lse: fp32 [..., rows], natural logarithm. part, part_lse: of other keys, any
    floating-point dtype. Where both LSEs are -inf, the output stays 0 and the LSE -inf.
    """
    total = torch.logaddexp(lse, part_lse)
    finite = total.masked_fill(total == -torch.inf, 0)  # -inf - -inf would be NaN
    out.mul_(torch.exp(lse - finite)[..., None]).add_(part * torch.exp(part_lse - finite)[..., None])
    lse.copy_(total)


def merge_sums(
    out: torch.Tensor,
    m_all: torch.Tensor,
    inv_l_all: torch.Tensor,
    part: torch.Tensor,
    part_m_all: torch.Tensor,
    part_inv_l_all: torch.Tensor,
) -> None:
    """Add a part to an output in place, for fp32 arguments, whose weights one LSE in fp32 would make too coarse.

    m_all, inv_l_all: as in SUMS, fp32 [..., rows]; +inf and 0 where a row has no keys.
    """
    pairs = ((m_all, inv_l_all), (part_m_all, part_inv_l_all))
    largest = torch.maximum(*(m.masked_fill(inv == 0, -torch.inf) for m, inv in pairs))
    largest = largest.masked_fill(largest == -torch.inf, 0)
    one, other = (torch.where(inv > 0, torch.exp2(m - largest) / inv, 0) for m, inv in pairs)
    total = one + other
    inverse = torch.where(total > 0, 1 / total, 0)
    out.mul_((one * inverse)[..., None]).add_(part * (other * inverse)[..., None])
    m_all.copy_(largest.masked_fill(total == 0, torch.inf))
    inv_l_all.copy_(inverse)
