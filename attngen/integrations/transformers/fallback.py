"""Layers that attngen cannot run: they run by the model's own eager function, or are refused."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Hashable
from typing import Any

import torch

from attngen.errors import AttngenError
from attngen.integrations.transformers.mask import Mask

CHOSEN = ("indices", "block_indices")  # arguments with the keys that a layer chose: only eager's mask includes them
WARNED: set[Hashable] = set()  # the subjects of printed warnings


def warn_once(text: str, about: Hashable) -> None:
    """Warn, once per `about`."""
    if about not in WARNED:
        WARNED.add(about)
        warnings.warn(f"attngen: {text}", stacklevel=5)


def run_by_eager(
    why: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    more: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the layer by the model's own eager function. Warn with the reason, once per reason and class of layers."""
    if refused := _refusal(type(module), key, mask, more):
        raise AttngenError(
            f"transformers: {type(module).__name__} {refused}; attngen cannot run this model: use another "
            f'attn_implementation for it, such as "eager"'
        )
    eager = _eager(type(module))
    if eager is None:
        raise AttngenError(f"transformers: {why}, and {type(module).__name__} has no eager function to fall back to")
    without_sizes = re.sub(r"\d+", "n", why)  # sizes of a call grow with each token
    warn_once(f"{why}; such layers run by the model's eager attention", (type(module), without_sizes))
    dense = mask.dense() if isinstance(mask, Mask) else mask
    if dense.dtype == torch.bool:
        hidden = torch.full((), torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device)
        dense = torch.where(dense, torch.zeros_like(hidden), hidden)
    optional = ("softcap", "s_aux", "position_bias")
    return eager(
        module, query, key, value, dense, **{k: x for k, x in more.items() if k not in optional or x is not None}
    )


def _refusal(layer: type, key: torch.Tensor, mask: Any, more: dict[str, Any]) -> str:
    """Return why the model's eager function would not give its results either; empty text if it would."""
    if chosen := next((name for name in CHOSEN if more.get(name) is not None), ""):
        return f"gives its attention `{chosen}`, the keys that it chose, in place of a mask"
    if isinstance(mask, Mask):
        keys = mask.shape[3], key.shape[2]
        return f"has a mask of {keys[0]} keys and attends to {keys[1]}" if keys[0] < keys[1] else ""
    if any("BlockMask" in getattr(getattr(x, "__code__", None), "co_names", ()) for x in vars(layer).values()):
        return "drops the model's mask, which has no elements"
    return ""


def _eager(layer: type) -> Any:
    """Return the eager function that a layer's class names in its `forward`; None if there is none."""
    for cls in layer.__mro__:
        code = getattr(cls.__dict__.get("forward"), "__code__", None)
        for name in getattr(code, "co_names", ()):
            if name.endswith("eager_attention_forward"):
                return getattr(sys.modules[cls.__module__], name, None)
    return None
