"""FlexAttention's call, `flex_attention(q, k, v, score_mod, block_mask)`, by kernels that attngen builds.

The functions are traced once, into a spec. Its module is built, cached and called; captured tensors are its inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from attngen.frontends.pairs import call
from attngen.frontends.trace import Mod


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute torch.nn.attention.flex_attention by kernels that attngen builds for the pair of functions.

    Args:
        query: [B, Hq, L, E], any strides with the last dimension contiguous, bf16, fp16 or fp32.
        key: [B, Hkv, S, E], same dtype and device; Hkv divides Hq, and is Hq without `enable_gqa`.
        value: [B, Hkv, S, Ev], same dtype and device.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score, or None.
        block_mask: a BlockMask, or mask_mod(b, h, q_idx, kv_idx) -> bool, or None. A BlockMask's function is used; its
            lists, which are read at the first call with it, are used too where they hide more than the function, or
            its full blocks show more. As in PyTorch, a BlockMask is for calls of its own lengths.
        scale: factor on the scores; None means 1 / sqrt(E).
        enable_gqa: whether query heads may share K/V heads.
        return_lse: also return the natural-log LSE, [B, Hq, L] fp32, differentiable.
        kernel_options: ignored; attngen chooses schedules.
        return_aux: an AuxRequest: `lse`, as above, and `max_scores`, the largest score that each query sees, scaled and
            modified, [B, Hq, L] fp32, without a gradient.

    Returns:
        [B, Hq, L, Ev] in query's layout; with `return_lse` a pair with the LSE, with `return_aux` a pair with an
        AuxOutput. A query that sees no key gets zeros, and -inf as its LSE and largest score. Differentiable in query,
        key, value and captured tensors that require a gradient.

    Raises:
        TraceError: a function has no expression; one sentence with the function, the operation and the line.
        ValueError, TypeError: an argument is not what was expected, such as a block mask for other lengths.
        IndexError: a function reads a tensor outside of its bounds at some position of the call. An index that is read
            from another tensor is not checked: a read outside of a tensor then gives 0.

    The first call with a pair of functions traces them and builds a module, in seconds; later calls and processes take
    it from the cache (see `attngen.build`). The module's element type, head dimension and head sharing are those of the
    call. Captured tensors may change their values between calls. If a captured number or tensor is replaced by another,
    the functions are traced again. The 64 most recently used modules are held in memory
    (docs/cookbook/flexattention.md lists the modules that are held longer).
    """
    _check(query, key, value, enable_gqa, return_lse, return_aux)
    arguments = (query, key, value, score_mod, block_mask, scale, return_lse, return_aux)
    if torch.compiler.is_dynamo_compiling():
        from attngen.frontends import compiled

        return compiled.call(*arguments)
    return call(*arguments)


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool, return_lse: bool, return_aux: Any
) -> None:
    """Raise if the arguments are not those of FlexAttention; the module checks the rest."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            given = f"has {x.dim()} dimensions" if isinstance(x, torch.Tensor) else f"is a {type(x).__name__}"
            raise ValueError(f"flex_attention: {name} {given}; expected a tensor [B, H, N, D]")
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(
                f"flex_attention: {name} is {x.dtype}; expected torch.bfloat16, torch.float16 or torch.float32"
            )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        heads = f"{query.shape[1]} query heads and {key.shape[1]} key heads"
        raise ValueError(f"flex_attention: {heads} without enable_gqa; expected as many, or enable_gqa=True")
    if return_lse and return_aux is not None:
        raise ValueError(
            "flex_attention: return_lse and return_aux are both given; expected one of them: AuxRequest(lse=True) "
            "means the same"
        )
