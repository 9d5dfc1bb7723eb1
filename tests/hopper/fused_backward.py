"""Specs of the fused backward for its tests, their modules after each pass, and edits of the backward's IR text."""

from __future__ import annotations

from functools import cache
from typing import Any

from attngen.ir import Module
from attngen.spec import Spec, make_spec
from tests.helpers import stages_of
from tests.hopper.common import edited_module, lines_of, removed_and_added
from tests.hopper.texts import kernel_after

BASE: dict[str, Any] = {"name": "gradients", "head_dim": 128, "backward": {"deterministic": True}}

CASES: dict[str, dict[str, Any]] = {
    "wide": {},
    "wide_causal": {"mask": "causal"},
    "narrow": {"head_dim": 64},
    "narrow_causal": {"head_dim": 64, "mask": "causal"},
    "small": {"head_dim": 16, "mask": "causal", "score": [{"expr": "s * t[h]", "params": {"t": {"tensor": ["H"]}}}]},
    "shared": {"mask": "causal", "heads": {"sharing": "gqa"}},
    "shared_in_a_window": {"mask": {"sliding_window": {"left": 40, "right": 0}}, "heads": {"sharing": "gqa"}},
    "separate": {
        "mask": "causal",
        "heads": {"sharing": "gqa"},
        "score": [{"expr": "s * t[h]", "params": {"t": {"tensor": ["H"]}}}],
    },
    "one_head": {"head_dim": 32, "heads": {"sharing": "mqa"}},
    "window": {"mask": {"sliding_window": {"left": 40, "right": 0}}},
    "dilated": {"head_dim": 64, "mask": {"dilated": {"step": 2, "reach": 30}}},
    "streaming": {
        "heads": {"sharing": "gqa"},
        "mask": {"all_of": ["causal", {"any_of": [{"sliding_window": {"left": 9}}, {"sink_tokens": {"count": 4}}]}]},
    },
    "first_keys": {
        "head_dim": 64,
        "mask": {"any_of": [{"sliding_window": {"left": 20, "right": 9}}, {"sink_tokens": {"count": 11}}]},
    },
    "both_sides": {"head_dim": 64, "mask": {"sliding_window": {"left": 20, "right": 9}}},
    "chunked": {"mask": {"chunked": {"size": 48}}},
    "prefix": {"mask": "prefix_lm"},
    "padding": {"head_dim": 64, "mask": "key_padding"},
    "padded_sink": {"mask": {"all_of": ["causal", {"key_padding": {"lengths": True}}]}, "score": "sink"},
    "lengths": {"mask": {"all_of": ["causal", {"key_padding": {"lengths": True}}]}},
    "documents": {"mask": {"all_of": ["causal", "document"]}},
    "sorted": {"head_dim": 64, "mask": {"document": {"sorted": True}}},
    "packed": {"heads": {"sharing": "gqa"}, "mask": {"document": {"packed": True, "causal": True}}},
    "packed_narrow": {
        "head_dim": 64,
        "heads": {"sharing": "gqa"},
        "mask": {"document": {"packed": True, "causal": True}},
    },
    "packed_both_ways": {"mask": {"document": {"packed": True}}},
    "dropping": {"head_dim": 64, "mask": {"all_of": ["causal", "key_padding"]}, "dropout": True},
    "dropping_wide": {"mask": {"all_of": ["causal", "key_padding"]}, "heads": {"sharing": "gqa"}, "dropout": True},
    "capped_wide": {"mask": {"sliding_window": {"left": 40, "right": 0}}, "score": [{"softcap": 5.0}]},
    "capped_whole": {"score": [{"softcap": 5.0}]},
    "capped": {"head_dim": 64, "mask": "causal", "score": [{"softcap": 5.0}]},
    "of_queries": {
        "head_dim": 64,
        "score": [{"expr": "s * exp(t[b, h, q_idx])", "params": {"t": {"tensor": ["B", "H", "Nq"]}}}],
    },
    "pieces": {"head_dim": {"qk": 192, "v": 128}, "mask": "causal"},
    "pieces_shared": {
        "head_dim": {"qk": 192, "v": 128},
        "mask": {"sliding_window": {"left": 40, "right": 0}},
        "heads": {"sharing": "gqa"},
    },
}

BLOCKS = {"block_sparse": {"block": 128}}


def with_gradient_of_t(e: str, *dims: str) -> dict[str, Any]:
    """A score with an expression in `t`, a tensor that needs a gradient."""
    return {"score": [{"expr": e, "params": {"t": {"tensor": list(dims), "grad": True}}}]}


CASES |= {
    "temperature": {"head_dim": 64, "mask": "causal", "score": "temperature"},
    "temperature_capped": {"mask": "causal", "score": ["temperature", {"softcap": 5.0}], "heads": {"sharing": "gqa"}},
    "temperature_dropping": {"head_dim": 64, "mask": "key_padding", "score": ["temperature", "sink"], "dropout": True},
    "multiplied": {"head_dim": 64, "mask": "causal", **with_gradient_of_t("s * t[h]", "H")},
    "multiplied_rows": {
        "head_dim": 64,
        "heads": {"sharing": "gqa"},
        **with_gradient_of_t("s * exp(t[b, h, q_idx])", "B", "H", "Nq"),
    },
    "multiplied_by_lengths": {"head_dim": 64, "score": [{"expr": "s * log(float(kv_len)) * float(b + 1)"}]},
    "multiplied_unordered": {
        "mask": "causal",
        "backward": {"deterministic": False},
        **with_gradient_of_t("s / (2 + t[h, q_idx] ** 2)", "H", "Nq"),
    },
}

CASES |= {
    "biased": {"head_dim": 64, "score": "dense_bias"},
    "biased_capped": {"head_dim": 64, "score": ["dense_bias", {"softcap": 5.0}]},
    "biased_wide": {"mask": "causal", "score": "dense_bias", "heads": {"sharing": "gqa"}},
    "biased_dropping": {"head_dim": 64, "mask": "key_padding", "score": "dense_bias", "dropout": True},
    "biased_blocks": {"head_dim": 64, "mask": {"block_sparse": {"block": 128}}, "score": "dense_bias"},
    "biased_blocks_wide": {"mask": {"block_sparse": {"block": 128}}, "score": "dense_bias"},
    "biased_times": {
        "mask": "causal",
        "score": ["dense_bias", {"expr": "s * t[h]", "params": {"t": {"tensor": ["H"]}}}],
        "heads": {"sharing": "gqa"},
    },
    "biased_alone": {"head_dim": 64, "mask": "causal", "score": [{"dense_bias": {"learnable": False}}]},
}

LISTED_CASES: dict[str, dict[str, Any]] = {
    "blocks": {"mask": BLOCKS},
    "blocks_causal": {"head_dim": 64, "heads": {"sharing": "gqa"}, "mask": {"all_of": ["causal", BLOCKS]}},
    "blocks_in_a_window": {
        "mask": {"all_of": [{"sliding_window": {"left": 150, "right": 30}}, BLOCKS]},
        "score": "sink",
    },
    "blocks_of_packed": {"mask": {"all_of": [{"document": {"packed": True, "causal": True}}, BLOCKS]}},
    "butterfly": {"head_dim": 64, "mask": {"block_sparse": {"block": 128, "pattern": "butterfly"}}},
    "local_global": {
        "head_dim": 64,
        "mask": {"block_sparse": {"block": 256, "pattern": "local_global", "local": 0, "globals": 1}},
    },
}

CASES |= LISTED_CASES


@cache
def spec_for(name: str) -> Spec:
    return make_spec({**BASE, **CASES[name]})


@cache
def after_passes(name: str) -> dict[str, Module]:
    """The verified module after every pass."""
    return stages_of(spec_for(name))


def lowered(name: str) -> Module:
    return list(after_passes(name).values())[-1]


def backward(module: Module) -> Any:
    """The warp-specialized kernel of a module's backward."""
    return next(kernel for kernel in module.warp_specialized if kernel.stands_for != "fwd")


def lines(after: str, block: str, name: str = "wide") -> list[str]:
    """The ops of a block of the backward kernel after a pass, as text."""
    return lines_of(kernel_after(name, "bwd", after) or backward(after_passes(name)[after]), block)


def changed(name: str, before: str, after: str, block: str) -> tuple[list[str], list[str]]:
    """The lines of a block that were removed, and those that were added, between two passes."""
    return removed_and_added(lines(before, block, name), lines(after, block, name))


def edited(name: str, *changes: tuple[str, str]) -> Module:
    """The module with its text edited from the warp-specialized backward on; not verified."""
    return edited_module(lowered(name), *changes, kernel=backward(lowered(name)).name)


PAIR_ACQUIRE = "    semaphore_acquire %dKdV_SEMAPHORE_pair[kv_start] order(split % 2)\n"
