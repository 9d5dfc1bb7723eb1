"""Large scores: gradients, tangents and outputs in fp32 are as accurate as those of naive attention.

An LSE of a thousand has an error of 3e-5 in fp32, which becomes a factor of each weight that is recomputed from it. So
fp32 modules store more per query than its LSE.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen.conformance.cases import Case, heads_for
from attngen.conformance.harness import run_case
from attngen.conformance.oracle import naive_attention, reference_mask, relative_error
from attngen.spec import make_spec
from tests.helpers import cached_module

pytestmark = pytest.mark.numerics

WINDOW = {"sliding_window": {"left": 20, "right": 0}}
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "a window, groups of heads": {"mask": WINDOW, "heads": {"sharing": "gqa"}},
    "tf32": {"mask": WINDOW, "fp32_precision": "tf32"},
    "one key head": {"mask": "causal", "heads": {"sharing": "mqa"}},
    "keys in the outer loop": {"mask": "causal", "schedule": {"order": "kv_outer"}},
    "padding": {"mask": "key_padding"},
    "blocks": {"mask": {"block_sparse": {"block": 64, "pattern": "butterfly"}}},
    "a mask of data": {
        "mask": {"expr": "far[q_idx] or (kv_idx <= q_idx)", "params": {"far": {"tensor": ["Nq"], "dtype": "bool"}}}
    },
    "a sink": {"mask": WINDOW, "score": "sink", "heads": {"sharing": "gqa"}},
    "a learned temperature": {"mask": "causal", "score": {"temperature": {"learnable": True}}},
    "a learned bias": {"score": {"relative_bias": {"max_distance": 16}}},
    "a bias": {"score": "dense_bias"},
    "slopes": {"mask": "causal", "score": "alibi"},
    "dropout": {"mask": "causal", "dropout": True},
    "outputs": {"mask": "causal", "outputs": ["entropy", "max_score", "key_mass"]},
    "outputs and a sink": {
        "mask": WINDOW,
        "score": "sink",
        "outputs": ["entropy", "key_mass"],
        "heads": {"sharing": "gqa"},
    },
    "entropies, dropout and a sink": {"mask": "causal", "dropout": True, "score": "sink", "outputs": ["entropy"]},
    "several element types": {"mask": "causal", "dtype": ["fp16", "fp32"], "heads": {"sharing": "gqa"}},
}


def spec_of(kind: str) -> Any:
    """Return a spec with one tile size in all kernels, because NumPy's products of other sizes differ in the last
    bit."""
    schedule = {"block_q": 32, "block_kv": 32, **KINDS[kind].get("schedule", {})}
    return make_spec({"name": "large", "head_dim": 32, "dtype": "fp32", **KINDS[kind], "schedule": schedule})


@pytest.mark.share(16)
@pytest.mark.parametrize("scale", [30.0, 3e4])
@pytest.mark.parametrize("kind", KINDS)
def test_against_naive(kind: str, scale: float, device: str) -> None:
    """Every result, gradient and tangent is right for scores of hundreds, and of hundreds of thousands."""
    spec = spec_of(kind)
    result = run_case(
        cached_module(spec),
        spec,
        Case(1, *heads_for(spec), 70, 90),
        "fp32",
        device,
        scale=scale,
        tangents=True,
        of_lse=0.0,
    )
    assert result.ok, str(result)


@pytest.mark.share(4)
@pytest.mark.parametrize(("keys", "score"), [(40, 8e2), (40, 8e4), (3, 8e6)])
@pytest.mark.parametrize("kind", ["causal", "a window, groups of heads", "keys in the outer loop", "a sink"])
def test_equal_keys(kind: str, keys: int, score: float, device: str) -> None:
    """Queries see equal keys, so all weights are 1 / n for any score; gradients of v have at most twice the error of
    naive attention."""
    spec = spec_of(kind)
    heads, kv_heads = heads_for(spec)
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, kv_heads, 1, 32, generator=generator)
    k, v = (
        row.expand(1, kv_heads, keys, 32).contiguous().to(device),
        torch.randn(1, kv_heads, keys, 32, generator=generator).to(device),
    )
    toward = (row / row.norm(dim=-1, keepdim=True) ** 2).repeat_interleave(heads // kv_heads, 1)
    q = (toward * score * 32**0.5 * torch.linspace(0.5, 1.0, keys)[:, None]).to(device)
    grad = torch.randn(q.shape, generator=generator).to(device)
    given = {"sink": torch.zeros(heads, device=device)} if kind == "a sink" else {}
    mask = reference_mask(spec.mask, q, k, given)

    def gradient(attend: Any, dtype: torch.dtype) -> torch.Tensor:
        x = v.to(dtype).requires_grad_()
        (found,) = torch.autograd.grad(attend(q.to(dtype), k.to(dtype), x), x, grad.to(dtype))
        return found.double()

    def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return naive_attention(q, k, v, mask, 32**-0.5, sink=given["sink"].to(q.dtype) if given else None)[0]

    truth = gradient(naive, torch.float64)
    ours = gradient(lambda q, k, v: cached_module(spec).attention(q, k, v, **given), torch.float32)
    bar = 2 * max(relative_error(gradient(naive, torch.float32), truth), torch.finfo(torch.float32).eps)
    assert relative_error(ours, truth) <= bar


CACHES: dict[str, dict[str, Any]] = {
    "causal": {"cache": "contiguous"},
    "pages, groups of heads": {"cache": {"paged": {"page_size": 16}}, "heads": {"sharing": "gqa"}},
    "a sink": {"cache": "contiguous", "score": "sink", "heads": {"sharing": "gqa"}},
    "several element types": {"cache": "contiguous", "dtype": ["fp16", "fp32"]},
}


@pytest.mark.share(16)
@pytest.mark.parametrize("score", [8e2, 8e4, 8e6])
@pytest.mark.parametrize("kind", CACHES)
def test_equal_keys_in_a_cache(kind: str, score: float, device: str) -> None:
    """Programs have splits of 1,500 keys, of different lengths, whose weights need more digits than an fp32 LSE has."""
    spec = make_spec(
        {"name": "large", "head_dim": 32, "dtype": "fp32", "mask": "causal", "backward": False, **CACHES[kind]}
    )
    heads, kv_heads = (
        (4 if spec.heads.sharing == "gqa" else 1),
        1,
    )  # with one key head even the interpreter splits the keys
    keys, room = 1500, 1504
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, kv_heads, 1, 32, generator=generator)
    k, v = (
        row.expand(1, kv_heads, room, 32).to(device),
        torch.randn(1, kv_heads, room, 32, generator=generator).to(device),
    )
    q = (row / row.norm(dim=-1, keepdim=True) ** 2 * score * 32**0.5).repeat_interleave(heads // kv_heads, 1).to(device)
    sink = torch.zeros(heads, device=device) if kind == "a sink" else None
    stored = [x.transpose(1, 2).contiguous() for x in (k, v)]
    given = {"cache_seqlens": torch.tensor([keys], dtype=torch.int32, device=device)}
    if sink is not None:
        given["sink"] = sink
    if kind.startswith("pages"):
        stored = [x.view(room // 16, 16, kv_heads, 32) for x in stored]
        given["page_table"] = torch.arange(room // 16, dtype=torch.int32, device=device)[None]

    def naive(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device)
        inputs = (q.to(dtype), k[:, :, :keys].to(dtype), v[:, :, :keys].to(dtype))
        return naive_attention(*inputs, seen, 32**-0.5, sink=None if sink is None else sink.to(dtype))

    ours = cached_module(spec).attention.with_kvcache(q, *stored, **given, return_lse=True)
    for found, in_fp32, truth in zip(ours, naive(torch.float32), naive(torch.float64), strict=True):
        assert relative_error(found, truth) <= 2 * max(relative_error(in_fp32, truth), torch.finfo(torch.float32).eps)
