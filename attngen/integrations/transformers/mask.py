"""Masks as attngen passes them through a model: objects with a formula and without elements.

transformers requests one mask for each kind of layer in every forward, and passes it to each layer of the kind. It must
be a tensor or a BlockMask of four dimensions, because other masks are processed again where `generate` makes masks
ahead of a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from attngen.errors import AttngenError
from attngen.integrations.transformers.formula import OFFSET, Formula, MaskFunction, formula


class Mask(BlockMask):
    """A mask [B, 1, Nq, Nk] of one kind of layers. If a model reads its elements, `dense` computes them.

    formula: the mask without padding. inputs: the tensors and numbers that the formula's spec takes.
    padding: bool [B, Nk], False where a key is padding, or None. span: if the other keys are known to be contiguous in
    each sequence, the first and the end of them, int32 [B] each. start: the position of the first query, an int or an
    int tensor on the device.
    make: computes the mask's elements. plans: tensors that kernels derive from the inputs, by module; all layers share
    them.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        formula: Formula,
        inputs: dict[str, Any],
        padding: torch.Tensor | None,
        start: int | torch.Tensor,
        make: Callable[[], torch.Tensor],
        span: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """sizes: (B, Nq, Nk)."""
        self.sizes, self.formula, self.inputs, self.padding, self.start, self.make = (
            sizes,
            formula,
            inputs,
            padding,
            start,
            make,
        )
        self.span = span
        self.plans: dict[Any, Any] = {}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, n_q, n_kv = self.sizes
        return batch, 1, n_q, n_kv

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def contiguous(self) -> Mask:
        return self

    def detach(self) -> Mask:
        return self

    def clone(self) -> Mask:
        return self

    def dense(self) -> torch.Tensor:
        """The mask's elements: bool, of a shape that broadcasts to [B, 1, Nq, Nk], True where a query sees a key."""
        return self.make()

    def __getitem__(self, at: Any) -> torch.Tensor:  # type: ignore[override]
        return self.dense().expand(self.shape)[at]

    def to(self, device: Any, *_: Any, **__: Any) -> Mask:
        """The same mask for layers on another device."""

        def moved(x: Any) -> Any:
            return x.to(device) if isinstance(x, torch.Tensor) else x

        make = self.make
        inputs = {name: moved(x) for name, x in self.inputs.items()}
        span = None if self.span is None else (moved(self.span[0]), moved(self.span[1]))
        return Mask(
            self.sizes, self.formula, inputs, moved(self.padding), moved(self.start), lambda: moved(make()), span
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _no_elements(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise AttngenError when a function of torch or an operator of a tensor gets a mask."""
        raise _no_elements(getattr(func, "__name__", str(func)).strip("_"))

    def __repr__(self) -> str:
        return f"Mask({list(self.shape)}, {list(self.formula.parts)})"


def _no_elements(name: str) -> AttngenError:
    return AttngenError(
        f"transformers: the model asks for `{name}` of its mask, which has no elements; attngen cannot run this model: "
        f'use another attn_implementation for it, such as "eager"'
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    device: Any = "cpu",
    **more: Any,
) -> Mask:
    """Make the mask of a kind of layers; transformers calls this (its AttentionMaskInterface).

    Args:
        batch_size, q_length, kv_length: the sizes of the call.
        q_offset: the position of the first query; a tensor if a static cache keeps it on the device.
        kv_offset: the position of the first existing key.
        mask_function: mask_function(batch, head, query, key) -> bool, of positions; None means causal.
        attention_mask: bool [B, keys so far], False where a key is padding.
        device: the device of the model's inputs.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = mask_function or causal_mask_function
    # A static cache increments this tensor in place, layer by layer.
    q_offset = q_offset.clone() if isinstance(q_offset, torch.Tensor) else q_offset
    found, tensors = formula(mask_function, kv_offset)
    padding, span = None, None
    if attention_mask is not None:
        padding, span = _padding(_part(attention_mask, (1,), kv_offset, kv_length), kv_length, found.causal)
    inputs: dict[str, Any] = {}
    for name, number, at in found.tables:
        x = _part(tensors[number], at, kv_offset, kv_length) if tensors[number].dim() else tensors[number][None]
        inputs[name] = x if x.dtype in (torch.bool, torch.int32, torch.int64) or x.is_floating_point() else x.int()
    if found.offset:
        inputs[OFFSET] = kv_offset

    def make() -> torch.Tensor:
        given = {
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": mask_function,
            "attention_mask": attention_mask,
        }
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(
            batch_size, q_length, kv_length, **given, **skips, use_vmap=more.get("use_vmap", False), device=device
        )

    start = q_offset - kv_offset
    return Mask((batch_size, q_length, kv_length), found, inputs, padding, start, make, span)


def _part(x: torch.Tensor, dims: tuple[int, ...], first: int, count: int) -> torch.Tensor:
    """Return the part of a tensor for the `count` keys from `first` on, along `dims`; less if the tensor ends
    earlier."""
    for d in dims:
        first = min(first, x.shape[d])
        x = x.narrow(d, first, min(count, x.shape[d] - first))
    return x


def _padding(
    padding: torch.Tensor, kv_length: int, causal: bool
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return the padding and the span of a Mask, both None if no key is padding.

    padding: of the keys so far. A static cache may have room for more, up to `kv_length`, which a causal mask hides.
    """
    span = None
    if not torch.is_grad_enabled() and not _capturing(padding):
        # This waits for the device, as `generate` does at every token.
        filled = padding.shape[1] == kv_length or causal
        if filled and bool(padding.all()):
            return None, None
        span = _span(padding)
    if missing := kv_length - padding.shape[1]:
        padding = torch.nn.functional.pad(padding, (0, missing))
    return padding, span


def _capturing(x: torch.Tensor) -> bool:
    """True if a CUDA graph is being captured, so that the host must not wait for the device."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _span(padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the first key of each sequence and the end of its keys, int32 [B] each; None if keys between them are
    padding."""
    at = torch.arange(padding.shape[1], device=padding.device, dtype=torch.int32)
    first = torch.where(padding, at, padding.shape[1]).amin(1)
    end = torch.where(padding, at + 1, 0).amax(1)
    return (first.int(), end.int()) if bool((padding.sum(1) == (end - first).clamp(min=0)).all()) else None
