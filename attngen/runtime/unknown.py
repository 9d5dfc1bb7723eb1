"""Errors for arguments that a call does not have: one sentence, with the key of a spec that does the same."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

_SPEC = "a module does what its spec says: write "
_CAUSAL = f"{_SPEC}`mask: causal`"
_ALLOWED = "{expr: 'allowed[b, q_idx, kv_idx]', params: {allowed: {tensor: [B, Nq, Nk], dtype: bool}}}"
_MASK = f"{_SPEC}a mask, such as `mask: causal`, or `mask: {_ALLOWED}`"
_BIAS = f"{_SPEC}`score: [dense_bias]`"
_DROPOUT = f"{_SPEC}`dropout: true`"
_SCALE = "write `scale`"
_SINK = f"{_SPEC}`score: [sink]`"
_PADDING = f"{_SPEC}`mask: key_padding`"
_LENGTHS = f"{_SPEC}`mask: {{key_padding: {{lengths: true}}}}`"
_PACKED = f"{_SPEC}`mask: {{document: {{packed: true, causal: true}}}}`"
_WEIGHTS = "kernels do not keep weights; naive attention does"
_CACHE = f"{_SPEC}`cache: contiguous`, and call `attention.with_kvcache`"
# Names of arguments of SDPA, FlashAttention, FlexAttention, xformers, transformers and modules of other specs -> hint.
HINTS = {
    **dict.fromkeys(("is_causal", "causal"), _CAUSAL),
    **dict.fromkeys(("attn_mask", "attention_mask", "mask"), f"{_MASK}; a mask of numbers is `score: [dense_bias]`"),
    **dict.fromkeys(("attn_bias", "bias", "position_bias"), _BIAS),
    **dict.fromkeys(("dropout_p", "dropout", "p", "seed"), _DROPOUT),
    **dict.fromkeys(
        ("enable_gqa", "num_heads", "num_kv_heads"),
        f"{_SPEC}`heads: {{sharing: gqa}}`; numbers of heads are those of the tensors",
    ),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), _SCALE),
    **dict.fromkeys(
        ("window_size", "sliding_window", "window"), f"{_SPEC}`mask: {{sliding_window: {{left: 1023, right: 0}}}}`"
    ),
    **dict.fromkeys(("softcap", "logits_soft_cap"), f"{_SPEC}`score: [{{softcap: 30.0}}]`"),
    **dict.fromkeys(("sink", "sinks", "s_aux", "learnable_sink"), _SINK),
    "alibi_slopes": f"{_SPEC}`score: [{{alibi: {{slopes: given}}}}]`",
    "relative_bias": f"{_SPEC}`score: [{{relative_bias: {{max_distance: 128}}}}]`",
    "temperature": f"{_SPEC}`score: [temperature]`",
    "score_mod": f"{_SPEC}`score: [{{expr: 's - abs(q_pos - kv_idx)'}}]`, or call `attngen.flex_attention`",
    "mask_mod": f"{_SPEC}`mask: {{expr: 'kv_idx <= q_pos'}}`, or call `attngen.flex_attention`",
    "block_mask": f"{_SPEC}`mask: {{block_sparse: {{block: 128}}}}`, or call `attngen.flex_attention`",
    "kernel_options": f"{_SPEC}`schedule: {{block_q: 64}}`",
    **dict.fromkeys(("key_padding", "key_padding_mask"), _PADDING),
    **dict.fromkeys(("kv_lengths", "seqlens", "seqlens_k", "seqused_k"), _LENGTHS),
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_k", "max_seqlen"),
        _PACKED,
    ),
    "document_ids": f"{_SPEC}`mask: {{all_of: [causal, document]}}`",
    "prefix_length": f"{_SPEC}`mask: prefix_lm`",
    "tree_mask": f"{_SPEC}`mask: tree`, with `cache: contiguous`",
    "deterministic": f"{_SPEC}`backward: {{deterministic: false}}`; without it gradients are deterministic",
    **dict.fromkeys(("return_attn_probs", "output_attentions", "need_weights"), _WEIGHTS),
    **dict.fromkeys(("return_softmax_lse", "return_aux"), "write `return_lse=True`"),
    **{f"return_{name}": f"{_SPEC}`outputs: [lse, {name}]`" for name in ("entropy", "max_score", "key_mass")},
    **dict.fromkeys(("k_cache", "v_cache", "cache_seqlens", "page_table", "block_table", "past_key_values"), _CACHE),
    **dict.fromkeys(
        ("tensor_layout", "layout"), "tensors are [B, H, N, D], and `x.transpose(1, 2)` of others costs no copy"
    ),
    "plan": "only masks that read data have a plan; this one reads none",
}


def refuse_arguments(call: str, function: Callable[..., Any], unknown: Iterable[str]) -> None:
    """Raise TypeError, in one sentence, for the first argument that a function does not have. `check` is ignored: the
    module has nothing to check."""
    for name in unknown:
        if name == "check":
            continue
        known = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind is not p.VAR_KEYWORD and p.name != "self"
        ]
        near = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near and name not in HINTS
            else HINTS.get(name, "an argument for each input comes from the spec")
        )
        raise TypeError(f"{call}: {name} is no argument; expected {', '.join(known)}; {hint}")
