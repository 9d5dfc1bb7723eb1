"""Hypothesis strategies for whole specs, as the plain data that YAML gives, with any combination of features.

`spec_data()` combines masks and combinations of masks, modifiers, sharing, head dims, dtypes, dropout, loop orders,
overrides of the schedule, and the order in which gradients are summed. Half of its specs build. The others are refused
for reasons that a user can meet: a schedule that does not fit, a mask that hides everything, a gradient without a fixed
order of summation. `cache_data()` does the same for specs with a KV cache of any kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests import lang_strategies

Data = dict[str, Any]
MASKS: list[Any] = [
    "none",
    "causal",
    {"causal": {"align": "top_left"}},
    {"sliding_window": {"left": 19, "right": 0}},
    {"sliding_window": {"right": 3, "align": "top_left"}},
    {"sink_tokens": {"count": 4}},
    "prefix_lm",
    "tree",
    {"prefix_lm": {"length": 30}},
    {"prefix_lm": {"per": "batch"}},
    {"chunked": {"size": 24}},
    {"dilated": {"step": 3, "reach": 40}},
    {"block_causal": {"size": 8}},
    "key_padding",
    {"key_padding": {"lengths": True}},
    "document",
    {"document": {"sorted": True}},
    {"document": {"packed": True}},
    {"document": {"packed": True, "causal": True}},
]
BLOCKS: list[Any] = [
    {"block_sparse": {"block": 16}},
    {"block_sparse": {"block": 32}},
    {"block_sparse": {"block": 128}},
    {"block_sparse": {"block": 64, "pattern": "butterfly"}},
    {"block_sparse": {"block": 32, "pattern": "local_global", "local": 1, "globals": 1}},
]
# Conditions on tensors of the call: some give loop bounds, others are data, for which calls make block lists.
MASK_EXPRESSIONS: list[Any] = [
    {"expr": "seen[b, kv_idx]", "params": {"seen": {"tensor": ["B", "Nk"], "dtype": "bool"}}},
    {"expr": "awake[b, q_idx]", "params": {"awake": {"tensor": ["B", "Nq"], "dtype": "bool"}}},
    {"expr": "kv_idx <= limit[b, q_idx]", "params": {"limit": {"tensor": ["B", "Nq"], "dtype": "int32"}}},
    {
        "expr": "allowed[b, h, q_idx, kv_idx]",
        "params": {"allowed": {"tensor": ["B", "H", "Nq", "Nk"], "dtype": "bool"}},
    },
    {"expr": "kv_idx < far and kv_idx <= q_idx", "params": {"far": {"scalar": "int"}}},
    {"expr": "q_idx - kv_idx < reach[h]", "params": {"reach": {"tensor": ["H"], "dtype": "int32"}}},
    {"expr": "(q_idx - kv_idx) % step == 0", "params": {"step": {"scalar": "int", "min": 1}}},
    {"expr": "weight[hkv] * kv_idx < 2.5", "params": {"weight": {"tensor": ["Hkv"]}}},
    {"expr": "kv_idx < 4 or true"},
]
SCORES: list[Any] = [
    {"softcap": 5.0},
    "alibi",
    {"alibi": {"slopes": "given"}},
    {"alibi": {"slopes": "given", "learnable": True}},
    {"relative_bias": {"max_distance": 16}},
    {"relative_bias": {"max_distance": 3, "learnable": False}},
    "dense_bias",
    {"dense_bias": {"learnable": False}},
    "sink",
    {"sink": {"learnable": False}},
    "temperature",
]
# Gradient inputs, read where sums have a fixed order and where they have none; functions with several branches.
SCORE_EXPRESSIONS: list[Any] = [
    {"expr": "s * 0.5 + tanh(s)"},
    {"expr": "s - rate * abs(q_idx - kv_idx)", "params": {"rate": {"scalar": "float"}}},
    {"expr": "s + row[b, h, q_idx]", "params": {"row": {"tensor": ["B", "H", "Nq"], "grad": True}}},
    {"expr": "s + column[kv_idx]", "params": {"column": {"tensor": ["Nk"], "grad": True}}},
    {"expr": "s * gain[h]", "params": {"gain": {"tensor": ["H"], "grad": True}}},
    {"expr": "s * gain[hkv]", "params": {"gain": {"tensor": ["Hkv"], "grad": True}}},
    {"expr": "s + table[clamp(kv_idx - q_idx, -4, 4) + 4]", "params": {"table": {"tensor": [9], "grad": True}}},
    {
        "expr": "s + table[h, bucket[b, q_idx, kv_idx]]",
        "params": {
            "table": {"tensor": ["H", 8], "grad": True},
            "bucket": {"tensor": ["B", "Nq", "Nk"], "dtype": "int32"},
        },
    },
    {"expr": "where(kv_idx < 4, s, max(s, cap))", "params": {"cap": {"value": -2.0}}},
    {"expr": "s + bound[5]", "params": {"bound": {"tensor": [4], "grad": True}}},
    {"expr": "s - s + rise[h]", "params": {"rise": {"tensor": ["H"], "grad": True}}},
]
HEAD_DIMS: list[Any] = [16, 24, 40, 64, 80, 128, 192, 256, {"qk": 24, "v": 40}, {"qk": 192, "v": 128}]
BLOCK_SIZES = [16, 32, 64, 128, 256]


def _expression(sample: lang_strategies.Sample) -> Data:
    params = {name: param.model_dump(mode="json") for name, param in sample.params.items()}
    return {"expr": sample.text, "params": params} if params else {"expr": sample.text}


def _single_masks() -> st.SearchStrategy[Any]:
    return st.sampled_from(MASKS) | st.sampled_from(MASK_EXPRESSIONS) | lang_strategies.masks(1).map(_expression)


def _combined(several: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(several, min_size=1, max_size=3, unique_by=str)
    return st.one_of(
        lists.map(lambda found: {"all_of": found}),
        lists.map(lambda found: {"any_of": found}),
        several.map(lambda mask: {"not": mask}),
    )


def masks(depth: int = 2) -> st.SearchStrategy[Any]:
    """Masks as in a spec: named, fixed and generated expressions, and combinations of these and of block masks."""
    if not depth:
        return _single_masks()
    several = masks(depth - 1)
    return _single_masks() | _combined(several) | _block_masks(several)


def _block_masks(others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Block masks, alone or combined with another mask; a spec refuses some of the combinations."""
    blocks = st.sampled_from(BLOCKS)
    pairs = st.tuples(blocks, others).map(list)
    return blocks | pairs.map(lambda pair: {"all_of": pair}) | pairs.map(lambda pair: {"any_of": pair})


def scores() -> st.SearchStrategy[list[Any]]:
    """Lists of up to three modifiers: named, fixed or generated expressions."""
    generated = lang_strategies.scores(1).filter(lambda sample: re.search(r"\bs\b", sample.text)).map(_expression)
    one = st.sampled_from(SCORES) | st.sampled_from(SCORE_EXPRESSIONS) | generated
    return st.lists(
        one,
        max_size=3,
        unique_by=lambda score: str(score) if isinstance(score, str) else str(next(iter(score.items()))),
    )


def schedules() -> st.SearchStrategy[Data]:
    """Loop orders and overrides; some fit no device."""
    return st.fixed_dictionaries(
        {},
        optional={
            "order": st.sampled_from(["q_outer", "kv_outer"]),
            "block_q": st.sampled_from(BLOCK_SIZES),
            "block_kv": st.sampled_from(BLOCK_SIZES),
            "stages": st.integers(1, 5),
            "warps": st.sampled_from([1, 2, 4, 8, 16]),
        },
    )


def _precision(data: Data) -> Data:
    """Remove `fp32_precision` from a spec without fp32."""
    return data if "fp32" in data["dtype"] else {key: value for key, value in data.items() if key != "fp32_precision"}


# What the FlashAttention-1 loop order supports: no tensors, blocks or dropout, and the head_dims of dK and dV sum to at
# most 256.
KV_OUTER: dict[str, st.SearchStrategy[Any]] = {
    "head_dim": st.sampled_from([dim for dim in HEAD_DIMS if isinstance(dim, int) and dim <= 128]),
    "mask": st.sampled_from(
        [
            "none",
            "causal",
            {"sliding_window": {"left": 20}},
            {"any_of": [{"chunked": {"size": 24}}, {"expr": "kv_idx < 3"}]},
        ]
    ),
    "score": st.sampled_from([[], ["alibi"], [{"softcap": 5.0}]]),
    "dropout": st.just(False),
    "schedule": st.just({"order": "kv_outer"}),
}


def spec_data(replace: Mapping[str, st.SearchStrategy[Any]] | None = None) -> st.SearchStrategy[Data]:
    """Specs as plain data, with any combination of features. `replace` gives a key another strategy, as
    {"head_dim": st.just(16)}.

    One in eight has the order `kv_outer` and nothing that this loop order refuses, because few of the other specs with
    it build.
    """
    keys: dict[str, st.SearchStrategy[Any]] = {
        "name": st.just("drawn"),
        "head_dim": st.sampled_from(HEAD_DIMS),
        "heads": st.sampled_from(["mha", "mqa", "gqa"]).map(lambda sharing: {"sharing": sharing}),
        "dtype": st.lists(st.sampled_from(["bf16", "fp16", "fp32"]), min_size=1, max_size=2, unique=True),
        "fp32_precision": st.sampled_from(["ieee", "tf32"]),
        "mask": masks(),
        "score": scores(),
        "dropout": st.sampled_from([False, False, True]),
        "backward": st.sampled_from([{"deterministic": True}, {"deterministic": False}, False]),
        "schedule": schedules(),
    }
    free, kv_outer_only = (st.fixed_dictionaries({**keys, **more, **(replace or {})}) for more in ({}, KV_OUTER))
    return st.integers(0, 7).flatmap(lambda n: free if n else kv_outer_only).map(_precision)


# Kinds of caches, and what their rows hold. Half of the page sizes are no tile size.
PAGES: list[Any] = [
    None,
    None,
    {"page_size": "any"},
    {"page_size": 2},
    {"page_size": 16},
    {"page_size": 48},
    {"page_size": 64},
    {"page_size": 128},
]
EIGHT_BITS: list[Data] = [
    {"dtype": "fp8_e4m3"},
    {"dtype": "fp8_e4m3", "scale": "head"},
    {"dtype": "fp8_e4m3", "scale": "page"},
]
LATENTS: list[Data] = [{"qk": 48, "v": 32}, {"qk": 112, "v": 96}, {"qk": 80, "v": 64}]


def _cache(pages: Any, more: Data) -> Any:
    return {**({"paged": pages} if pages else {}), **more} or "contiguous"


def cache_data() -> st.SearchStrategy[Data]:
    """Specs with a KV cache as plain data: any kind of cache with any mask, modifier, backward, dtype and schedule.

    Masks of `packed` documents, masks of tensors with an element for each row, and dropout are left out, because calls
    with a cache refuse them. Of eight caches three have the dtype of q, three have 8-bit elements and two hold latents,
    one in four of these in 8 bits.
    """
    pages = st.sampled_from(PAGES)
    optional: dict[str, st.SearchStrategy[Any]] = {
        "split": st.sampled_from(["balanced", {"keys": 64}, {"keys": 128}]),
        "block_q": st.sampled_from(BLOCK_SIZES),
        "block_kv": st.sampled_from(BLOCK_SIZES),
        "stages": st.integers(1, 3),
        "warps": st.sampled_from([4, 8]),
    }
    cached = _single_masks().filter(lambda mask: not re.search(r"document.*packed|\"N[qk]\"", json.dumps(mask)))
    overrides = st.fixed_dictionaries({}, optional=optional)
    keys: dict[str, st.SearchStrategy[Any]] = {
        "name": st.just("drawn"),
        "heads": st.sampled_from(["mha", "mqa", "gqa"]).map(lambda sharing: {"sharing": sharing}),
        "head_dim": st.sampled_from([16, 24, 32, 64, 80, 128, {"qk": 24, "v": 40}, {"qk": 96, "v": 64}]),
        "dtype": st.lists(st.sampled_from(["bf16", "fp16", "fp32"]), min_size=1, max_size=2, unique=True),
        "fp32_precision": st.sampled_from(["ieee", "ieee", "tf32"]),
        "mask": st.sampled_from(["causal", "none"]) | cached | _combined(cached),
        "score": scores(),
        "cache": pages.map(lambda pages: _cache(pages, {})),
        "backward": st.sampled_from([{"deterministic": True}, {"deterministic": False}, False, False]),
        "schedule": st.just({}) | overrides,
    }
    two = st.lists(st.sampled_from(["bf16", "fp16"]), min_size=1, max_size=2, unique=True)
    eight = {
        "cache": st.tuples(pages, st.sampled_from(EIGHT_BITS)).map(lambda both: _cache(*both)),
        "dtype": two,
        "head_dim": st.sampled_from([32, 48, 64, 128, {"qk": 48, "v": 80}, {"qk": 64, "v": 32}]),
    }
    latent: dict[str, st.SearchStrategy[Any]] = {"heads": st.just({"sharing": "mqa"}), "backward": st.just(False)}
    wide = {
        **latent,
        "cache": pages.map(lambda pages: _cache(pages, EIGHT_BITS[0])),
        "dtype": two,
        "head_dim": st.just({"qk": 576, "v": 512}),
        "kv": st.just({"latent": {"rope": 64}}),
    }
    narrow = {**latent, "head_dim": st.sampled_from(LATENTS), "kv": st.just({"latent": {"rope": 16}})}
    kinds = [*[{}] * 6, *[eight] * 6, *[narrow] * 3, wide]
    return st.integers(0, 15).flatmap(lambda n: st.fixed_dictionaries({**keys, **kinds[n]})).map(_precision)


def drawn(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """`count` examples of a strategy; the seed `number` fixes which."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found
