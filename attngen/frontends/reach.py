"""Checks that the tensors that functions read are as long as the positions of a call.

A read outside of a tensor gives 0 in expressions. PyTorch raises IndexError, so a call with FlexAttention's functions
raises it too, for indices that are computed from positions. An index that is read from another tensor is data, and is
not checked.
"""

from __future__ import annotations

import ast

import torch

from attngen.frontends.trace import Place, Traced
from attngen.ir.sizes import Sizes
from attngen.lang.evaluate import value_of

POINTS = 1 << 16  # maximum number of points at which an index is evaluated


def check_reads(traced: Traced, sizes: Sizes) -> None:
    """Raise IndexError if an index that is computed from positions is outside of its tensor in a call of these
    sizes."""
    for place in traced.places:
        found = _outside(place, traced, sizes)
        if found is not None:
            tensor = f"`{place.tensor}`" if place.tensor else "a tensor that it makes"
            raise IndexError(
                f"{place.function}: reads {tensor} at `{place.index}`, which comes to {found} in this call, where the "
                f"dimension has the length {place.length}; expected a tensor as long as the call, or an index inside "
                "of it"
            )


def _outside(place: Place, traced: Traced, sizes: Sizes) -> int | None:
    """Return the largest or else the smallest index outside of the dimension; None if all are inside or not known.
    Negative indices count from the end."""
    tree = ast.parse(place.index, mode="eval").body
    counts = {"b": sizes.batch, "h": sizes.q_heads, "q_idx": sizes.n_q, "kv_idx": sizes.n_kv, **traced.index_sizes}
    names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & counts.keys())
    most = int(POINTS ** (1 / len(names))) if names else 1
    axes = {}
    for axis, name in enumerate(names):
        n = counts[name]
        points = (
            torch.arange(n, device="cpu")
            if n <= most
            else torch.linspace(0, n - 1, most, dtype=torch.float64, device="cpu").long()
        )
        axes[name] = points.view(-1, *[1] * (len(names) - 1 - axis))
    try:
        at = torch.as_tensor(value_of(tree, axes))
    except KeyError:  # it reads a tensor
        return None
    if not at.numel():
        return None
    low, high = int(at.min()), int(at.max())
    return high if high >= place.length else low if low < -place.length else None
