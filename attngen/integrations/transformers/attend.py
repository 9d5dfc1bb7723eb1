"""The attention function that transformers calls in every layer (its AttentionInterface): it runs the kernels of the
layer's spec."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal, cast

import torch

from attngen.errors import AttngenError
from attngen.frontends.pairs import plan_arguments
from attngen.integrations.transformers.fallback import run_by_eager, warn_once
from attngen.integrations.transformers.formula import Formula, in_documents
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
# The mask of padded keys in a cache: the others are contiguous in each sequence. The tensors of `key_padding` would be
# computed again in every call.
SPAN: dict[str, Any] = {
    "expr": "kv_idx >= span_first[b] and kv_idx < span_end[b]",
    "params": {name: {"tensor": ["B"], "dtype": "int32"} for name in ("span_first", "span_end")},
}
LONGEST_NAME = 64  # maximum length of a spec's name
MOST_QUERIES = 16  # maximum number of queries of a sequence for split-KV kernels


Padded = Literal["", "spans", "padded"]  # which keys are not padding: all, a contiguous span, or any


@dataclass(frozen=True)
class Layer:
    """The properties of a layer that determine its spec, except its mask."""

    sharing: str
    widths: tuple[int, int]
    wide: bool
    tf32: bool
    softcap: float | None
    sink: bool
    bias: bool
    dropout: bool
    decodes: bool

    def spec(self, formula: Formula, padded: Padded) -> dict[str, Any]:
        """Return the spec of a layer with a mask, as plain data."""
        keys: dict[Padded, list[Any]] = {"": [], "spans": [SPAN], "padded": ["key_padding"]}
        parts = [*formula.parts, *keys[padded]]
        scores: list[Any] = [] if self.softcap is None else [{"softcap": self.softcap}]
        scores += [{"dense_bias": {"learnable": not self.decodes}}] if self.bias else []
        scores += [{"sink": {"learnable": not self.decodes}}] if self.sink else []
        qk, v = self.widths
        data = {
            "name": self._name(formula, padded),
            "heads": {"sharing": self.sharing},
            "head_dim": qk if qk == v else {"qk": qk, "v": v},
            "dtype": ["fp32"] if self.wide else ["bf16", "fp16"],
            "mask": parts[0] if len(parts) == 1 else {"all_of": parts} if parts else "none",
        }
        data |= {"fp32_precision": "tf32"} if self.tf32 else {}
        data |= {"score": scores} if scores else {}
        data |= {"dropout": True} if self.dropout else {}
        return data | ({"cache": "contiguous", "backward": False} if self.decodes else {})

    def _name(self, formula: Formula, padded: Padded) -> str:
        """Return a spec's name made from the layer's properties."""
        words = ["decode"] * self.decodes + [_word(part) for part in formula.parts]
        words += [padded] * bool(padded)
        words += ([] if self.softcap is None else [f"softcap_{self.softcap:g}"]) + ["bias"] * self.bias
        words += ["sink"] * self.sink + ["dropout"] * self.dropout + ["tf32" if self.tf32 else "fp32"] * self.wide
        qk, v = self.widths
        name = re.sub(
            "[^a-z0-9]", "_", "_".join(["layer", *words, self.sharing, f"d{qk}" if qk == v else f"d{qk}_{v}"])
        )
        return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 7]}_{_digest(name)}"


def _word(part: Any) -> str:
    if isinstance(part, str):
        return part
    if "expr" in part:
        return f"mask_{_digest(repr(part))}"
    name, fields = next(iter(part.items()))
    if name == "sliding_window":
        return f"window_{fields['left']}_{fields['right']}" if fields["right"] else f"window_{fields['left'] + 1}"
    return {"document": "packed"}.get(name, str(name))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


_MODULES: dict[tuple[Layer, Formula, Padded], ModuleType] = {}
FOUND: dict[str, ModuleType] = {}  # modules built ahead of time, by the hash of their spec; `prefer` adds to them
_RECORDING: list[tuple[list[tuple[Layer, Formula]], list[str]]] = []


def prefer(modules: Iterable[ModuleType]) -> None:
    """Use these modules for layers with their specs from now on, in place of modules of the cache."""
    FOUND.update((module.SPEC_HASH, module) for module in modules)
    _MODULES.clear()


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
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        # SDPA casts too; rotations may have promoted the dtype of q and k above that of v.
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    mask = attention_mask
    if mask is None:
        mask = _implied(module, query, key, is_causal)
        key, value = key[:, :, : mask.shape[3]], value[:, :, : mask.shape[3]]
    if more.get("cu_seq_lens_q") is not None and isinstance(mask, Mask):
        mask = _with_documents(mask, more["cu_seq_lens_q"], more.get("cu_seq_lens_k"))
    given = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
    why = _unsupported(mask, query, key, value, more)
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
    layer = _layer(query, key, value, dropout, softcap, s_aux is not None, position_bias is not None, decodes)
    if _RECORDING:
        _RECORDING[-1][0].append((layer, mask.formula))
        return _zeros(query, value), None
    out = _run(layer, mask, query, key, value, dropout, scaling, s_aux, position_bias)
    return out.transpose(1, 2).contiguous(), None


def _layer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    softcap: float | None,
    sink: bool,
    bias: bool,
    decodes: bool,
) -> Layer:
    wide = query.dtype == torch.float32
    groups = query.shape[1] // max(1, key.shape[1])
    return Layer(
        sharing="mha" if groups == 1 else "mqa" if key.shape[1] == 1 else "gqa",
        widths=(query.shape[3], value.shape[3]),
        wide=wide,
        tf32=wide and torch.get_float32_matmul_precision() != "highest",
        softcap=softcap,
        sink=sink,
        bias=bias,
        dropout=dropout > 0,
        decodes=decodes,
    )


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
    built = _module(layer, mask.formula, padded)
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


def _unsupported(mask: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, more: dict[str, Any]) -> str:
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


def _module(layer: Layer, formula: Formula, padded: Padded) -> ModuleType:
    """Return the module of a layer's spec: built ahead of time, from the cache, or built now."""
    from attngen.api import build
    from attngen.spec import make_spec

    key = (layer, formula, padded)
    found = _MODULES.get(key)
    if found is None:
        data = layer.spec(formula, padded)
        with warnings.catch_warnings():  # about masks that may not mean what their authors intended
            warnings.simplefilter("ignore")
            ahead = FOUND.get(make_spec(data).hash()) if FOUND else None
            found = _MODULES[key] = ahead or build(data)
        if FOUND and ahead is None:
            warn_once(
                f"no module that `register` was given is of `{data['name']}`; it was built now, or is the cache's",
                data["name"],
            )
    return found


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
