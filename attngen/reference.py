"""The oracle: eager attention in PyTorch, written by hand. It shares nothing with the symbolic path."""

from __future__ import annotations

import torch

from attngen.masks import Mask


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q @ k^T) @ v with the whole score matrix in memory, in the dtype of its inputs.

    q [B, Hq, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv] with Hq a multiple of Hkv; mask: bool, broadcastable to
    [B, Hq, Nq, Nk], True where a query may look. Returns (out [B, Hq, Nq, Dv], natural-log LSE [B, Hq, Nq]). A row that sees
    nothing gives zeros and LSE -inf, and zero gradients.
    """
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    empty = ~mask.any(-1, keepdim=True).expand(*scores.shape[:-1], 1)
    probabilities = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0).float() if scores.dtype.itemsize < 4 else scores, -1)
    if not scores.shape[-1]:
        return scores.new_zeros(*scores.shape[:-1], v.shape[-1]), scores.new_full(scores.shape[:-1], -torch.inf)
    return probabilities @ v, lse.masked_fill(empty[..., 0], -torch.inf) if scores.shape[-1] else lse


def reference_mask(mask: Mask, q: torch.Tensor, k: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mask of a call by the masks' hand-written oracles: bool, broadcastable to [B, Hq, Nq, Nk]."""
    return mask.reference(q.shape[2], k.shape[2], q.device, inputs)


def relative_error(x: torch.Tensor, ref: torch.Tensor) -> float:
    """||x - ref|| / ||ref|| in fp64; where ref is zero, ||x||. NaN stays NaN."""
    x, ref = x.detach().double(), ref.detach().double()
    difference, size = (x - ref).norm(), ref.norm()
    return float(difference / size if size > 0 else difference)
