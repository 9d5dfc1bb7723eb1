"""The attention function that transformers calls in every layer (its AttentionInterface): it runs the kernels of the
layer's spec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch

from attngen.errors import AttngenError
from attngen.frontends.pairs import plan_arguments
from attngen.integrations.transformers.fallback import run_by_eager
from attngen.integrations.transformers.formula import Formula, in_documents
from attngen.integrations.transformers.layer import SPAN, Layer, Padded, layer_of, module_of
from attngen.integrations.transformers.mask import Mask, mask_of
from attngen.lang.limits import WIDEST_HEAD

# Keyword arguments that are ignored: the mask includes them, or they are for other parts of a model.
_KNOWN = frozenset(
    (
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "labels",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
    )
) | frozenset(
    (
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "shift_labels",
        "sliding_window",
    )
)
_KNOWN |= {
    "use_cache",
    "past_key_values",
    "cross_attention_kwargs",
    "deterministic",
    "kernel_options",
    "training",
    "return_loss",
}
MOST_QUERIES = 16  # maximum number of queries of a sequence for split-KV kernels
_RECORDING: list[tuple[list[tuple[Layer, Formula]], list[str]]] = []


@contextmanager
def recording() -> Iterator[tuple[list[tuple[Layer, Formula]], list[str]]]:
    """Record layers instead of running them, with the formulas of their masks, and the reasons why others cannot run.
    All return zeros."""
    _RECORDING.append(([], []))
    try:
        yield _RECORDING[-1]
    finally:
        _RECORDING.pop()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention of one layer.

    Args:
        module: the layer.
        query: [B, Hq, Nq, D]. key, value: [B, Hkv, Nk, D], including those of a cache.
        attention_mask: a Mask; None if the model makes no mask: then the layer is causal or sees all keys, as with
            SDPA.
        dropout: probability to drop a weight.
        scaling: factor on the scores; None means 1 / sqrt(D).
        is_causal: whether a layer without a mask is causal; None means the layer's own setting.
        softcap, s_aux, position_bias: score modifiers of the model: a cap, sink logits [Hq], a bias [1 or B, Hq, Nq,
            Nk].

    Returns:
        ([B, Nq, Hq, D], None). A layer that attngen does not support runs by the model's own eager function, with one
        warning for each reason and class of layers, and returns weights too.
    """
    query, key, value = cast_for_autocast(query, key, value)
    mask = attention_mask
    if mask is None:
        mask = _implied(module, query, key, is_causal)
        key, value = key[:, :, : mask.shape[3]], value[:, :, : mask.shape[3]]
    if more.get("cu_seq_lens_q") is not None and isinstance(mask, Mask):
        mask = _with_documents(mask, more["cu_seq_lens_q"], more.get("cu_seq_lens_k"))
    given = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
    why = unsupported(mask, query, key, value, more)
    if not why and isinstance(mask, Mask):
        forward_only = not dropout and not _needs_gradients(query, key, value, s_aux, position_bias)
        decodes = forward_only and _can_decode(mask, query, key)
        if not decodes:
            mask, key, value, position_bias, why = _aligned_at_end(mask, query, key, value, position_bias)
    if why and _RECORDING:
        _RECORDING[-1][1].append(why)
        return _zeros(query, value), None
    if why or not isinstance(mask, Mask):
        return run_by_eager(why, module, query, key, value, mask, {**given, **more})
    layer = layer_of(query, key, value, dropout, softcap, s_aux is not None, position_bias is not None, decodes)
    if _RECORDING:
        _RECORDING[-1][0].append((layer, mask.formula))
        return _zeros(query, value), None
    out = _run(layer, mask, query, key, value, dropout, scaling, s_aux, position_bias)
    return out.transpose(1, 2).contiguous(), None


def cast_for_autocast(*qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return q, k and v in autocast's dtype if it is on, as SDPA does. Rotations may have promoted the dtype of q and k
    above that of v."""
    device = qkv[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return qkv
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in qkv)


def _needs_gradients(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _run(
    layer: Layer,
    mask: Mask,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Call the module of a layer, and return its output [B, Hq, Nq, D]."""
    decodes = layer.decodes
    padded: Padded = "" if mask.padding is None else "spans" if decodes and mask.span else "padded"
    built = module_of(layer, mask.formula, padded)
    inputs = dict(mask.inputs)
    if padded == "spans" and mask.span:
        inputs |= dict(zip(SPAN["params"], mask.span))
    elif padded:
        inputs["key_padding"] = mask.padding
    inputs |= {} if sink is None else {"sink": sink.float()}
    inputs |= {} if bias is None else {"bias": bias.to(query.dtype)}
    if decodes:
        keys = (key.transpose(1, 2), value.transpose(1, 2))
        lengths = _lengths(mask, query)
        out = built.attention.with_kvcache(query, *keys, cache_seqlens=lengths, **inputs, scale=scaling)
    else:
        inputs |= {"dropout_p": dropout} if dropout > 0 else {}
        out = built.attention(query, key, value, **_with_plan(built, mask, query, key, inputs), scale=scaling)
    return cast(torch.Tensor, out)


def _zeros(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the result of a layer that does not run: [B, Nq, Hq, D]."""
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _implied(module: Any, query: torch.Tensor, key: torch.Tensor, is_causal: bool | None) -> Mask:
    """Return the mask of a layer without one, as SDPA takes it: causal from the first key on if there are several
    queries, or bidirectional."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    batch, _, n_q, _ = query.shape
    if causal and n_q > 1:
        return mask_of(batch, n_q, min(n_q, key.shape[2]), mask_function=causal_mask_function, device=query.device)
    return mask_of(batch, n_q, key.shape[2], mask_function=bidirectional_mask_function, device=query.device)


def _with_documents(mask: Mask, starts: torch.Tensor, starts_k: torch.Tensor | None) -> Mask:
    """Return the mask restricted to each of the sequences that a call packs into one, if it is not already."""
    if mask.formula.packed:
        return mask
    batch, _, n_q, n_kv = mask.shape
    if batch != 1 or n_q != n_kv or starts_k is not None and starts_k.shape != starts.shape:
        raise AttngenError(
            f"transformers: cu_seq_lens_q comes with {batch} sequences of {n_q} queries and {n_kv} keys; expected one "
            f"row of packed sequences, with as many queries as keys"
        )
    if "documents" not in mask.plans:
        ids = torch.searchsorted(
            starts[1:].contiguous(), torch.arange(n_kv, device=starts.device, dtype=starts.dtype), right=True
        )
        inputs = {**mask.inputs, "document_ids": ids.int()[None]}
        packed = in_documents(mask.formula)

        def make() -> torch.Tensor:
            return mask.dense() & (ids[:, None] == ids)

        mask.plans["documents"] = Mask((batch, n_q, n_kv), packed, inputs, mask.padding, mask.start, make)
    documents: Mask = mask.plans["documents"]
    return documents


def unsupported(mask: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, more: dict[str, Any]) -> str:
    """Return why attngen does not support a layer; empty text if it does."""
    if not isinstance(mask, Mask):
        return f"the model was given a mask [{', '.join(map(str, mask.shape))}] of its own"
    if mask.formula.why:
        return mask.formula.why
    if more.get("output_attentions"):
        return "`output_attentions` asks for weights, which kernels do not keep"
    if unknown := next(
        (name for name, x in more.items() if name not in _KNOWN and x is not None and x is not False), ""
    ):
        return f"the layer gives its attention `{unknown}`, which attngen does not know"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the layer computes in {query.dtype}"
    if odd := next((n for n in (query.shape[3], value.shape[3]) if n % 8 or not 16 <= n <= WIDEST_HEAD), 0):
        return f"the head_dim is {odd}, and attngen's are multiples of 8, 16 to {WIDEST_HEAD}"
    if mask.shape[3] != key.shape[2] or mask.shape[2] != query.shape[2]:
        sizes = f"{mask.shape[2]} queries and {mask.shape[3]} keys"
        return f"the mask is of {sizes}, and the layer has {query.shape[2]} and {key.shape[2]}"
    if mask.shape[0] != query.shape[0] and (mask.padding is not None or mask.inputs):
        return f"the mask is of {mask.shape[0]} sequences, and the layer has {query.shape[0]}"
    return ""


def _can_decode(mask: Mask, query: torch.Tensor, key: torch.Tensor) -> bool:
    """True if a call without gradients can use its keys as a KV cache: its queries are few and the last ones of their
    sequence."""
    few = query.shape[2] <= MOST_QUERIES and key.shape[2] > query.shape[2]
    at_end = not isinstance(mask.start, torch.Tensor) and mask.start + query.shape[2] == key.shape[2]
    return few and (at_end or mask.formula.causal) and _has_cache(mask.formula)


@cache
def _has_cache(formula: Formula) -> bool:
    """True if the mask has kernels with a KV cache. It has none if it needs block lists, for example because it reads
    data: these lists are made for all keys of a call."""
    from attngen.builders.semantics import listed_blocks
    from attngen.spec import make_spec

    mask = {"all_of": list(formula.parts)} if formula.parts else "none"
    return listed_blocks(make_spec({"name": "decode", "head_dim": 64, "mask": mask})) is None


def _lengths(mask: Mask, query: torch.Tensor) -> torch.Tensor:
    """Return the number of keys of each sequence, including those of the queries: int32 [B] on the device, made once
    for all layers."""
    if "lengths" not in mask.plans:
        batch, _, n_q, _ = query.shape
        end = mask.start + n_q
        if isinstance(end, torch.Tensor):
            mask.plans["lengths"] = end.to(torch.int32).expand(batch).contiguous()
        else:
            mask.plans["lengths"] = torch.full((batch,), end, dtype=torch.int32, device=query.device)
    lengths: torch.Tensor = mask.plans["lengths"]
    return lengths


def _aligned_at_end(
    mask: Mask, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> tuple[Any, ...]:
    """Return (mask, key, value, bias, why) of a call whose last query has the position of the last key, as in specs.

    A static cache has room after the last query, which a causal mask hides: these keys are left out.
    """
    n_q, n_kv = query.shape[2], key.shape[2]
    if (
        not mask.formula.parts
        or mask.start is not None
        and not isinstance(mask.start, torch.Tensor)
        and mask.start + n_q == n_kv
    ):
        return mask, key, value, bias, ""
    if not mask.formula.causal:
        return mask, key, value, bias, "queries are not the last positions of a cache, and the mask is not causal"
    if "aligned" not in mask.plans:
        mask.plans["aligned"] = _first_keys(mask, int(mask.start) + n_q)
    aligned: Mask = mask.plans["aligned"]
    end = aligned.shape[3]
    return aligned, key[:, :, :end], value[:, :, :end], bias if bias is None else bias[..., :end], ""


def _first_keys(mask: Mask, end: int) -> Mask:
    """Return the mask for only the keys before `end`."""
    along = {name: dims for name, _, dims in mask.formula.tables}

    def part(name: str, x: Any) -> Any:
        for d in along.get(name, ()):
            x = x.narrow(d, 0, end)
        return x

    batch, _, n_q, _ = mask.shape
    inputs = {name: part(name, x) for name, x in mask.inputs.items()}
    padding = None if mask.padding is None else mask.padding[:, :end]
    return Mask((batch, n_q, end), mask.formula, inputs, padding, end - n_q, lambda: mask.dense()[..., :end])


def _with_plan(
    built: ModuleType, mask: Mask, query: torch.Tensor, key: torch.Tensor, inputs: dict[str, Any]
) -> dict[str, Any]:
    """Return the inputs of a call, with their plan if the module has one. Layers that share a mask share its plan."""
    make = getattr(built.attention, "plan", None)
    if make is None:
        return inputs
    at = built, query.shape[1], key.shape[1]
    if at not in mask.plans:
        given = {"q": query, "k": key, "n_q": query.shape[2], "n_kv": key.shape[2], **inputs}
        mask.plans[at] = make(**{name: given[name] for name in plan_arguments(built) if name in given})
    return {**inputs, "plan": mask.plans[at]}
