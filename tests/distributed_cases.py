"""Modules with positions and the calls with which tests compare them: each mask and modifier of the committed specs,
with sizes that cut through a sequence of a few hundred rows."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import yaml

import attngen
from attngen.ir.sizes import Sizes
from attngen.spec import Spec, load_spec
from tests.helpers import ROOT, SPECS

CHUNK, BATCH, HEADS = 64, 2, 4
KEPT_WIDTHS = ("causal_d256", "causal_d512_gqa", "mla_dims")  # the others get heads of 32, for speed
SMALLER: dict[str, dict[str, Any]] = {  # masks that would hide nothing from a short sequence
    "window_gqa": {"mask": {"sliding_window": {"left": 70, "right": 0}}},
    "softcap_window_gqa": {"mask": {"sliding_window": {"left": 90, "right": 0}}},
    "streaming_gqa": {
        "mask": {"all_of": ["causal", {"any_of": [{"sliding_window": {"left": 40}}, {"sink_tokens": {"count": 4}}]}]}
    },
    "chunked_gqa": {"mask": {"chunked": {"size": 75}}},
    "dilated_mha": {"mask": {"dilated": {"step": 4, "reach": 120}}},
    "relative_bias_mha": {"score": [{"relative_bias": {"max_distance": 20}}]},
    "sinks_window_gqa": {"mask": {"sliding_window": {"left": 50, "right": 0}}},
    "block_sparse_mha": {"mask": {"block_sparse": {"block": 64}}},
}
# Masks and modifiers that no committed spec has, or not together.
MORE: dict[str, dict[str, Any]] = {
    "trees": {"head_dim": 32, "mask": {"all_of": ["causal", "tree"]}},
    "blocks_of_rows": {"head_dim": 32, "mask": {"block_causal": {"size": 40}}},
    "sinks_fp32": {
        "head_dim": 32,
        "dtype": "fp32",
        "mask": {"sliding_window": {"left": 50, "right": 0}},
        "score": "sink",
    },
    "sinks_and_documents": {
        "head_dim": 32,
        "heads": {"sharing": "gqa"},
        "mask": {"document": {"packed": True, "causal": True}},
        "score": ["temperature", "sink"],
    },
    "heads_apart": {"head_dim": 32, "mask": {"expr": "kv_idx <= q_pos and q_pos - kv_idx < 30 * (h + 1)"}},
    "frozen_sinks": {"head_dim": 32, "mask": "causal", "score": {"sink": {"learnable": False}}},
}


def _with_positions(name: str) -> bool:
    made = load_spec(ROOT / "specs" / f"{name}.yaml")
    return made.cache is None and made.schedule.order == "q_outer"


NAMES = [*filter(_with_positions, SPECS), *MORE]


class Case(NamedTuple):
    """A spec, its plain module and the one with positions, and the inputs of a call, whole."""

    spec: Spec
    plain: Any
    module: Any
    kv_heads: int
    dtype: torch.dtype
    inputs: dict[str, Any]
    learned: tuple[str, ...]


@cache
def data_of(name: str) -> dict[str, Any]:
    """The YAML of a spec, of which outputs are left out that calls with chunks do not have."""
    if name in MORE:
        return {"name": name, **MORE[name]}
    data = yaml.safe_load((ROOT / "specs" / f"{name}.yaml").read_text(encoding="utf-8"))
    data |= SMALLER.get(name, {}) | ({} if name in KEPT_WIDTHS else {"head_dim": 32})
    data["outputs"] = [x for x in data.get("outputs", []) if x != "key_mass"]
    return data if data["outputs"] else {key: x for key, x in data.items() if key != "outputs"}


@cache
def case(name: str, rows: int) -> Case:
    """The case of a spec with `rows` queries and as many keys; equal in all processes."""
    data = data_of(name)
    plain = attngen.build({**data, "name": f"{name}_whole"})
    module = attngen.build({**data, "name": f"{name}_chunks", "positions": {"chunk": CHUNK}})
    spec = attngen.spec.make_spec(data)
    g = torch.Generator().manual_seed(0)
    kv_heads = {"mha": HEADS, "gqa": 2, "mqa": 1}[module.SHARING]
    sizes = Sizes(BATCH, HEADS, kv_heads, rows, rows)
    inputs = dict(spec.mask.sample(sizes, g))
    for modifier in spec.score:
        inputs |= modifier.sample(sizes, g)
    if "cu_seqlens_kv" in inputs:
        inputs["cu_seqlens_q"] = inputs["cu_seqlens_kv"]
    if "temperature" in inputs:
        inputs["temperature"] = inputs["temperature"].abs() + 0.5
    if "prefix_length" in inputs:
        inputs["prefix_length"] = 70
    blocks = spec.mask.blocks()
    if blocks and not blocks.data and not blocks.pattern:
        tiles = -(-rows // blocks.size)
        inputs["block_mask"] = torch.rand(tiles, tiles, generator=g) < 0.6
    if spec.dropout:
        inputs |= {"dropout_p": 0.3, "seed": 7}
    lengths = {i.name for i in spec.inputs() if i.is_size}
    dtype = torch.float16 if torch.float16 in module.DTYPES else torch.float32
    learned = tuple(i.name for i in spec.inputs() if i.grad)
    return Case(spec, plain, module, kv_heads, dtype, {n: x for n, x in inputs.items() if n not in lengths}, learned)


def tensors(of: Case, rows: int) -> list[torch.Tensor]:
    """q, k, v and what a loss weighs the output and LSE with."""
    g = torch.Generator().manual_seed(1)
    widths = (of.module.HEAD_DIM_QK, of.module.HEAD_DIM_V)
    shapes = [(HEADS, widths[0]), (of.kv_heads, widths[0]), (of.kv_heads, widths[1]), (HEADS, widths[1])]
    found = [torch.randn(BATCH, heads, rows, width, generator=g).to(of.dtype) for heads, width in shapes]
    return [*found, torch.randn(BATCH, HEADS, rows, generator=g)]


def results(call: Any, of: Case, given: list[torch.Tensor], inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """out, lse and all gradients of a call(q, k, v, **inputs) -> (out, lse)."""
    *qkv, w_out, w_lse = given
    args = [x.clone().requires_grad_() for x in qkv]
    learned = {name: inputs[name].clone().requires_grad_() for name in of.learned}
    out, lse = call(*args, **{**inputs, **learned})
    seen = lse.detach().isfinite()
    torch.autograd.backward((out, lse), (w_out, torch.where(seen, w_lse, 0)))
    grads = {f"d{name}": x.grad for name, x in (*zip("qkv", args), *learned.items())}
    return {"out": out.detach(), "lse": lse.detach(), **grads}


def expected(name: str, rows: int) -> dict[str, torch.Tensor]:
    """The results of one process with the plain module."""
    of = case(name, rows)

    def call(*qkv: torch.Tensor, **inputs: Any) -> Any:
        return of.plain.attention(*qkv, return_lse=True, **inputs)

    return results(call, of, tensors(of, rows), of.inputs)
