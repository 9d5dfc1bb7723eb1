"""Specs of every mask and score modifier, small enough to cut through small tiles; tests/test_masks.py runs their
modules, and tests/test_mask_arguments.py makes wrong calls of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attngen.conformance.cases import Case, heads_for
from attngen.spec import Spec, make_spec
from tests.helpers import module_of

INT, HEAD = {"scalar": "int"}, {"tensor": ["H"], "grad": True}
KEYS, FREE = {"tensor": ["H", "Nk"], "grad": True}, {"backward": {"deterministic": False}}
UNEQUAL = [(40, 97), (97, 40)]
GQA = {"heads": {"sharing": "gqa"}}
WRITTEN_MASK = {
    "expr": "abs(q_idx - kv_idx) <= reach[h] or kv_idx % step == 0 and kv_idx <= q_idx",
    "params": {"reach": {"tensor": ["H"], "dtype": "int32"}, "step": {"scalar": "int", "min": 1}},
}
WRITTEN_BOUNDS = {  # several bounds on each side, from data and from positions
    "expr": "kv_idx < limit[b, q_idx] and kv_idx <= q_idx + 9 and kv_idx > first[b, q_idx] and kv_idx >= q_idx - 20",
    "params": {name: {"tensor": ["B", "Nq"], "dtype": "int32"} for name in ("limit", "first")},
}
WRITTEN_ROWS = {
    "expr": "first[b, q_idx] <= kv_idx and not hidden[kv_idx]",
    "params": {"first": {"tensor": ["B", "Nq"], "dtype": "int32"}, "hidden": {"tensor": ["Nk"], "dtype": "bool"}},
}
# By name: the other keys of a spec, and sizes to run. Two of three schedules have tiles with unequal numbers of queries
# and keys.
SPECS: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "chunked": (
        {**GQA, "mask": {"chunked": {"size": 40}}, "schedule": {"block_q": 16, "block_kv": 16}},
        [(1, 1), (65, 65), (97, 40)],
    ),
    "chunked_top_left": ({"mask": {"chunked": {"size": 24, "align": "top_left"}}}, [(97, 40)]),
    "dilated": ({"mask": {"dilated": {"step": 3, "reach": 50}}}, UNEQUAL),
    "prefix": ({**GQA, "mask": {"prefix_lm": {"length": 30}}}, [(40, 97)]),
    "tree": ({**GQA, "mask": "tree"}, [(33, 70), (20, 9)]),
    "prefix_argument": ({"mask": "prefix_lm"}, [(40, 33)]),
    "prefix_per_batch": ({"mask": {"prefix_lm": {"per": "batch"}}}, [(33, 65)]),
    "streaming": (
        {
            **GQA,
            "mask": {
                "all_of": ["causal", {"any_of": [{"sliding_window": {"left": 20}}, {"sink_tokens": {"count": 4}}]}]
            },
        },
        [(40, 97)],
    ),
    "not_causal": ({"mask": {"not": "causal"}}, [(1, 1), (97, 40)]),
    "documents": ({**GQA, "mask": {"all_of": ["causal", "document"]}}, [(1, 1), (40, 65)]),
    "packed": ({**GQA, "mask": {"document": {"packed": True}}}, [(40, 65)]),
    "packed_causal": ({"mask": {"document": {"packed": True, "causal": True}}}, [(1, 1), (97, 40)]),
    "sinks": ({**GQA, "mask": {"sliding_window": {"left": 20, "right": 0}}, "score": "sink"}, [(1, 1), (40, 65)]),
    "softcap": ({"mask": {"sliding_window": {"left": 20, "right": 0}}, "score": [{"softcap": 2}]}, [(65, 65)]),
    "alibi": ({**GQA, "mask": "causal", "score": {"alibi": {"slopes": "given", "learnable": True}}}, [(40, 65)]),
    "relative": ({"score": {"relative_bias": {"max_distance": 10}}}, UNEQUAL),
    "dense": ({**GQA, "mask": "causal", "score": "dense_bias"}, [(1, 1), (65, 40)]),
    "temperature": ({"mask": "causal", "score": "temperature"}, [(40, 40)]),
    "written_mask": ({**GQA, "mask": WRITTEN_MASK}, [(65, 40)]),
    "written_rows": ({"mask": WRITTEN_ROWS}, [(40, 65)]),
    "written_bounds": ({"mask": WRITTEN_BOUNDS}, [(40, 65)]),
    "beyond_32_bits": (
        {
            "mask": {
                "any_of": [
                    {"expr": "(q_idx + 99000) * (kv_idx + 99000) % 7 < 3"},
                    {"expr": "kv_idx * 100000000 + 7 <= q_idx * 100000000"},
                ]
            },
            "score": {"expr": "s + ((q_idx + 99000) * (99000 - kv_idx) // 1000000) / 9000"},
        },
        [(40, 65)],
    ),
    "written_score": (
        {**GQA, "mask": "causal", "score": {"expr": "s - slope[h] * abs(q_idx - kv_idx)", "params": {"slope": HEAD}}},
        [(40, 65)],
    ),
    "written_number": (
        {
            "score": {
                "expr": "where(kv_idx <= q_idx, s * sharp, s - far)",
                "params": {"sharp": {"scalar": "float"}, "far": {"value": 0.5}},
            }
        },
        [(33, 65)],
    ),
    "bucketed": (
        {
            **FREE,
            "score": {
                "expr": "s + table[h, bucket[b, q_idx, kv_idx]]",
                "params": {
                    "table": {"tensor": ["H", 40], "grad": True},
                    "bucket": {"tensor": ["B", "Nq", "Nk"], "dtype": "int32"},
                },
            },
        },
        [(40, 65)],
    ),
    "few_buckets": (
        {
            **GQA,
            "mask": "causal",
            "dropout": True,
            "score": {
                "expr": "s * (1 + table[h, bucket[b, q_idx, kv_idx] % 7])",
                "params": {
                    "table": {"tensor": ["H", 6], "grad": True},
                    "bucket": {"tensor": ["B", "Nq", "Nk"], "dtype": "int32"},
                },
            },
        },
        [(40, 65)],
    ),
    "key_bias": (
        {
            **FREE,
            **GQA,
            "mask": "causal",
            "dropout": True,
            "score": {"expr": "s * (1 + w[h, kv_idx] / 4)", "params": {"w": KEYS}},
        },
        [(40, 65)],
    ),
    "pieces": (
        {
            **FREE,
            "score": {
                "expr": "s * across[q_idx // 16, h] + pairs[h // 2] * kv_idx / 32 + near[q_idx // 8, kv_idx // 8]",
                "params": {
                    "across": {"tensor": [3, "H"], "grad": True},
                    "pairs": {"tensor": [3], "grad": True},
                    "near": {"tensor": [5, 9], "grad": True},
                },
            },
        },
        [(40, 65)],
    ),
    "softcap_alibi": ({"score": [{"softcap": 2}, {"alibi": {"slopes": "given", "learnable": True}}]}, [(40, 40)]),
    "alibi_softcap": ({"score": [{"alibi": {"slopes": "given", "learnable": True}}, {"softcap": 2}]}, [(40, 40)]),
}
SCHEDULES = [{"block_q": 16, "block_kv": 32}, {"block_q": 32, "block_kv": 16}, {"block_q": 32, "block_kv": 32}]


def spec(name: str) -> Spec:
    place = list(SPECS).index(name)
    fixed = {"head_dim": 32 if place < 3 else 16, "dtype": "fp16", "schedule": SCHEDULES[place % 3]}
    return make_spec({"name": name, **fixed, **SPECS[name][0]})


def case(name: str, n_q: int, n_kv: int, batch: int = 2) -> Case:
    return Case(batch, *heads_for(spec(name), 2 if spec(name).heads.sharing == "mha" else 4), n_q, n_kv)


Built = Callable[[str], ModuleType]


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def builder(folder: Path) -> Built:
    """Return a function that returns the module of a spec, and builds it in a folder at the first call."""
    known: dict[str, ModuleType] = {}

    def of(name: str) -> ModuleType:
        if name not in known:
            known[name] = module_of(spec(name), folder / name)
        return known[name]

    return of
