"""Calls with chunks of a sequence in float64 by the IR's executor, as the ranks of context parallelism make them: their
results together are compared with those of naive attention over the whole sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import torch

from attngen.builders import build_module
from attngen.conformance.derive import function
from attngen.interp.host import execute
from attngen.interp.values import DOUBLE
from attngen.interp.warp_groups import WarpSpecializedLaunch
from attngen.ir import Kernel, Module
from attngen.runtime.blocks import blocks_of_call
from attngen.spec import Spec, make_spec
from tests.helpers import stages_of, use_fused
from tests.transforms.equality import Call, Results, must_be_equal, naive, with_many_queries

chunk_positions = function("chunk_positions")
TABLES = ("q_starts", "kv_starts", "q_start_rank", "kv_start_rank")

PACKED = {"document": {"packed": True, "causal": True}}
ALLOWED = {"expr": "allowed[b, q_idx, kv_idx]", "params": {"allowed": {"tensor": ["B", "Nq", "Nk"], "dtype": "bool"}}}
CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal", "heads": {"sharing": "gqa"}},
    "full": {},
    "window": {"mask": {"sliding_window": {"left": 40, "right": 0}}},
    "both sides": {"mask": {"sliding_window": {"left": 20, "right": 9}}, "heads": {"sharing": "mqa"}},
    "streaming": {
        "mask": {"all_of": ["causal", {"any_of": [{"sliding_window": {"left": 9}}, {"sink_tokens": {"count": 4}}]}]}
    },
    "many sinks": {"mask": {"any_of": [{"sliding_window": {"left": 9, "right": 0}}, {"sink_tokens": {"count": 99}}]}},
    "packed": {"mask": PACKED, "heads": {"sharing": "gqa"}},
    "documents": {"mask": {"all_of": ["causal", "document"]}},
    "prefix": {"mask": "prefix_lm"},
    "padding": {"mask": {"all_of": ["causal", {"key_padding": {"lengths": True}}]}},
    "blocks": {"mask": {"all_of": ["causal", {"block_sparse": {"block": 64}}]}, "heads": {"sharing": "gqa"}},
    "alibi": {"mask": "causal", "score": [{"alibi": {}}]},
    "dropout": {"mask": "causal", "dropout": True, "heads": {"sharing": "gqa"}},
    "sink": {"mask": {"sliding_window": {"left": 40, "right": 0}}, "score": "sink"},
    "relative bias": {"mask": "causal", "score": [{"relative_bias": {"max_distance": 16}}]},
    "dense bias": {"score": "dense_bias"},
    "temperature": {"mask": "causal", "score": [{"temperature": {}}]},
    "of queries": {
        "score": [{"expr": "s * exp(t[b, h, q_idx])", "params": {"t": {"tensor": ["B", "H", "Nq"], "grad": True}}}]
    },
    "of keys": {
        "score": [{"expr": "s + t[b, kv_idx]", "params": {"t": {"tensor": ["B", "Nk"], "grad": True}}}],
        "backward": {"deterministic": False},
    },
    "of entries": {
        "mask": "causal",
        "score": [
            {
                "expr": "s + table[h, bucket[q_idx, kv_idx]]",
                "params": {
                    "table": {"tensor": ["H", 3], "grad": True},
                    "bucket": {"tensor": ["Nq", "Nk"], "dtype": "int32"},
                },
            }
        ],
    },
    "entropy": {"mask": "causal", "outputs": ["lse", "entropy", "max_score"]},
    "data": {"mask": ALLOWED},
}
LISTED = ("data",)  # lists of blocks of 128 rows, which chunks and calls of several of them need


def spec_of(name: str, chunk: int = 384, **more: Any) -> Spec:
    """The spec of a case; without positions if `chunk` is 0."""
    data = {"name": "chunks", "head_dim": 16, **CASES[name], **more}
    return make_spec({**data, "positions": {"chunk": chunk}} if chunk else data)


@cache
def lowered(name: str, backend: str = "", head_dim: int = 16) -> Module:
    """The module of a case after the last pass."""
    more = {"schedule": {"backend": backend}} if backend else {}
    return list(stages_of(spec_of(name, head_dim=head_dim, **more)).values())[-1]


def warp_specialized(module: Module, *names: str) -> Module:
    """The module with the warp-specialized kernels of these names in place of the portable ones that they stand for."""
    found = {k.stands_for: replace(k, name=k.stands_for) for k in module.warp_specialized if k.name in names}
    assert len(found) == len(names), f"{names} are not all warp-specialized"
    return replace(module, kernels=tuple(found.get(kernel.name, kernel) for kernel in module.kernels))


def in_both_orders(module: Module) -> Module:
    """The module with groups of one head in the fused backward: the last head visits its tiles in reversed order."""

    def regrouped(kernel: Kernel) -> Kernel:
        assert kernel.grid[0].reversed_group
        return replace(
            kernel, grid=tuple(replace(axis, swizzle_rows=min(1, axis.swizzle_rows)) for axis in kernel.grid)
        )

    return replace(module, kernels=tuple(regrouped(k) if k.name == "bwd" else k for k in module.kernels))


def rows_of(chunks: Iterable[int], chunk: int, length: int) -> np.ndarray:
    """The rows of the whole sequence that a call with these chunks has."""
    return np.array([row for c in chunks for row in range(c * chunk, min((c + 1) * chunk, length))], np.int64)


def assigned(chance: Random, count: int, ranks: int) -> list[list[int]]:
    """A random assignment of `count` chunks to ranks; some may have none."""
    owner = [chance.randrange(ranks) for _ in range(count)]
    return [[c for c in range(count) if owner[c] == rank] for rank in range(ranks)]


@dataclass(frozen=True)
class Sequence:
    """A call of the whole sequence, which ranks compute in chunks of `module.chunk` rows."""

    module: Module
    call: Call
    given: dict[str, Any]  # the executor's inputs of the whole sequence

    def part(self, queries: list[int], keys: list[int], **more: Any) -> Results:
        """The results of a rank that has these chunks of queries and keys."""
        chunk, sizes = self.module.chunk, self.call.sizes
        starts = [torch.tensor(chunks, dtype=torch.int32) * chunk for chunks in (queries, keys)]
        tables = chunk_positions(*starts, sizes.n_q, sizes.n_kv, chunk, self.module.unit)
        q_rows, kv_rows = rows_of(queries, chunk, sizes.n_q), rows_of(keys, chunk, sizes.n_kv)
        given = {**self.given, "q_len": sizes.n_q, "kv_len": sizes.n_kv}
        given |= {name: x.numpy() for name, x in zip(("q_chunks", "kv_chunks"), starts)}
        given |= {name: x.numpy() for name, x in zip(TABLES, tables)}
        for name in ("q", "grad_out", "grad_lse", "grad_entropy"):
            if name in given and given[name].shape[2]:
                given[name] = given[name][:, :, q_rows]
        given |= {name: given[name][:, :, kv_rows] for name in ("k", "v")}
        if "block_mask" in given:
            mask, block = torch.from_numpy(given["block_mask"]), self.module.blocks and self.module.blocks.size
            given["block_mask"] = blocks_of_call(mask, *starts, len(q_rows), len(kv_rows), chunk, block or 1).numpy()
        given |= {name: x[:, :, q_rows] for name, x in more.items()}
        return execute(self.module, given, self.call.tiles, DOUBLE)


def merged(parts: list[Results]) -> tuple[np.ndarray, np.ndarray]:
    """Out and LSE of all keys, from those of ranks that have some of them each."""
    lse = np.logaddexp.reduce([part["lse"] for part in parts])
    shift = np.where(np.isfinite(lse), lse, 0)
    out = sum(np.exp(part["lse"] - shift)[..., None] * part["out"] for part in parts)
    return np.asarray(out), lse


def whole_results(of: Sequence, chance: Random, ranks: int, split_keys: bool) -> Results:
    """The results of the whole sequence, from calls of ranks with random chunks of the queries.

    split_keys: whether each call also has only a part of the keys; then out and LSE of these are merged, and the
    backward of each gets the merged ones.
    """
    module, sizes, chunk = of.module, of.call.sizes, of.module.chunk
    count = [math.ceil(n / chunk) for n in (sizes.n_q, sizes.n_kv)]
    shares = assigned(chance, count[1], ranks) if split_keys else [[*range(count[1])]]
    once = {f"d_{x.input}" for x in module.input_gradients if x.reduction == "delta"}  # it follows from out and LSE
    found: Results = {"dk": np.zeros(of.given["k"].shape), "dv": np.zeros(of.given["v"].shape)}
    for queries in filter(None, assigned(chance, count[0], ranks)):
        rows = rows_of(queries, chunk, sizes.n_q)
        parts = [of.part(queries, keys) for keys in shares]
        if split_keys:
            out, lse = merged(parts)
            whole = [np.zeros((*x.shape[:2], sizes.n_q, *x.shape[3:])) for x in (out, lse)]
            for to, x in zip(whole, (out, lse)):
                to[:, :, rows] = x
            parts = [{**of.part(queries, keys, out=whole[0], lse=whole[1]), "out": out, "lse": lse} for keys in shares]
        for name in ("out", *module.outputs):
            found.setdefault(name, np.full((*parts[0][name].shape[:2], sizes.n_q, *parts[0][name].shape[3:]), np.nan))
            found[name][:, :, rows] = parts[0][name]
        for at, (part, keys) in enumerate(zip(parts, shares)):
            found.setdefault("dq", np.zeros(of.given["q"].shape))[:, :, rows] += part["dq"]
            for name in ("dk", "dv"):
                found[name][:, :, rows_of(keys, chunk, sizes.n_kv)] += part[name]
            for name in (n for n in part if n.startswith("d_") and (at == 0 or n not in once)):
                found[name] = found.get(name, 0) + part[name]
    return found


def sides(chance: Random, module: Module, chunk: int) -> int:
    """Rows of a tile that divides chunks, and blocks of the mask."""
    rows = math.gcd(chunk, module.blocks.size) if module.blocks else chunk
    return chance.choice([n for n in range(8, rows + 1, 8) if rows % n == 0])


def call_of(chance: Random, plain: Spec, lengths: tuple[int, int]) -> Call:
    """A random call of the whole sequence, in which score modifiers read integers as indices of a small table."""
    call = Call.random(chance, plain, build_module(plain), lengths)
    for i in (i for part in plain.score for i in part.inputs() if i.shape and i.dtype == "i32"):
        call.inputs[i.name] = torch.from_numpy(np.random.default_rng(0).integers(0, 3, call.inputs[i.name].shape)).int()
    return call


def compare(
    name: str,
    module: Module,
    seed: int,
    chunk: int,
    lengths: tuple[int, int],
    tiles: tuple[int, int] | None = None,
    fused: bool = False,
    split_keys: bool = False,
    head_dim: int = 16,
) -> None:
    """Raise Unequal where ranks with random chunks of `chunk` rows do not compute naive attention."""
    chance, plain = Random(seed), spec_of(name, 0, head_dim=head_dim)
    call = call_of(chance, plain, lengths)
    if name == "documents":
        call.inputs["document_ids"] = call.inputs["document_ids"].sort(1).values
    block_q, block_kv = tiles or (sides(chance, module, chunk), sides(chance, module, chunk))
    call = replace(call, tiles={"BLOCK_Q": block_q, "BLOCK_KV": block_kv})
    made = use_fused(module) if fused else with_many_queries(module)
    WarpSpecializedLaunch.chance = chance
    given = call.of_module(plain) | {"fused": int(fused)}
    found = whole_results(Sequence(replace(made, chunk=chunk), call, given), chance, 3, split_keys)
    expected = {n: x for n, x in naive(plain, call).items() if not n.startswith("tangent")}
    must_be_equal(found, expected, f"{name}, seed {seed}, chunks of {chunk}, {call}")
