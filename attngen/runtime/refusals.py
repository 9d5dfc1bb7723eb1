"""Derivatives that calls refuse: each error is one sentence with what was expected."""

from __future__ import annotations

from typing import Any

import torch

from attngen.runtime.private import has_tangents, in_forward_ad


def refuse_second_derivatives(*args: Any) -> Any:
    raise RuntimeError(
        "attention: its gradients cannot be differentiated again; expected only first derivatives, "
        "or naive attention where second ones are needed"
    )


def refuse_derivatives_of_tangents(*args: Any) -> Any:
    raise RuntimeError(
        "attention: the tangents that forward mode gives cannot be differentiated again; expected that of the output "
        "detached, as in MeanFlow's loss, or naive attention where its gradient is needed"
    )


def refuse_vmap(*args: Any) -> Any:
    raise NotImplementedError(
        "attention: torch.func.vmap cannot map it; expected the mapped dimension as part of B, the first of all tensors"
    )


def refuse_gradients(*tensors: Any) -> None:
    """Raise NotImplementedError, in one sentence, if one of these tensors needs a gradient or has a tangent. Modules
    without a backward call this."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors):
        refuse_backward()
    if in_forward_ad(*tensors) and has_tangents(*tensors):
        refuse_forward_mode()


def refuse_backward(*args: Any, **more: Any) -> None:
    raise NotImplementedError(
        "attention: this module has no backward (its spec says `backward: false`); call it under torch.no_grad()"
    )


def refuse_forward_mode() -> None:
    raise NotImplementedError(
        "attention: this module has no forward mode (its spec says `backward: false` or `positions`); expected tensors "
        "without tangents"
    )
