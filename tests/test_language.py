"""Modules with expressions of the language: results and all gradients against attention written by hand.

The oracles are plain PyTorch in fp64 on positions and tensors, and share no code with the language, its evaluator or
its masks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from tests.helpers import ROOT, module_of

pytestmark = pytest.mark.numerics

FREE = {"backward": {"deterministic": False}}
# (scores, positions (h, q, kv, q_pos), inputs) -> (new scores, visible pairs)
Oracle = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Variant(NamedTuple):
    """The keys of a spec, its inputs for (heads, queries, keys), and its oracle."""

    parts: dict[str, Any]
    inputs: Callable[[int, int, int], dict[str, Any]]
    oracle: Oracle


def numbers(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, math.prod(shape)).roll(5).reshape(shape)


def bits(*shape: int) -> torch.Tensor:
    """Return a tensor that is True in about half of its elements."""
    return (torch.arange(math.prod(shape)) * 7 % 5 < 3).reshape(shape)


def tensor(*dims: str | int, **options: Any) -> dict[str, Any]:
    return {"tensor": list(dims), **options}


def everywhere(s: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(s, dtype=torch.bool)


NUMBER = {"scalar": "float"}
BUCKET = (
    "where(kv_idx > q_pos, 16, 0) + where(abs(q_pos - kv_idx) < 8, abs(q_pos - kv_idx), "
    "min(15, 8 + int(log(max(abs(q_pos - kv_idx), 1) / 8) / log(16) * 8)))"
)


def t5_bucket(distance: int) -> int:
    """Return T5's bucket of the distance key - query: 32 buckets up to 128, half of them for later keys (Raffel et al.
    2020)."""
    later, far = (16 if distance > 0 else 0), abs(distance)
    return later + (far if far < 8 else min(15, 8 + int(math.log(far / 8) / math.log(16) * 8)))


def t5(s: torch.Tensor, h: Any, q: Any, kv: Any, q_pos: Any, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bucket = torch.tensor([[t5_bucket(d) for d in row] for row in (kv - q_pos).tolist()])
    return s + bias[:, bucket], everywhere(s)


def scalar_score(s: torch.Tensor, h: Any, q: Any, kv: Any, q_pos: Any, t: float) -> tuple[torch.Tensor, torch.Tensor]:
    slope = torch.log(1 - 2.0 ** (-5.0 - h))
    return s * torch.exp(-0.1 * h) + slope * (q_pos - kv) / (1 + math.exp(-t)) + torch.tanh(
        h - 1.0
    ) * kv / 64, everywhere(s)


def scalar_mask(
    s: torch.Tensor, h: Any, q: Any, kv: Any, q_pos: Any, t: float, n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    edge = kv <= q_pos + 2.0**h
    return s, (edge & (kv > t - torch.log(h + 2.0))) | (kv < math.sqrt(n)) & (torch.exp(0.5 * h) < 2)


def rounded_mask(s: torch.Tensor, h: Any, q: Any, kv: Any, q_pos: Any, x: float) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = kv <= torch.floor(x * q_pos) + torch.round(1.5 * h)
    return s, wanted & (torch.trunc(x * kv - 9) % 3 != 1) & (torch.round((kv - q_pos) / 4) != 2)


def rounded_score(
    s: torch.Tensor, h: Any, q: Any, kv: Any, q_pos: Any, t: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    more = (
        torch.round(0.375 * (kv - q_pos)) / 8 + (kv > q).double() / 4 + torch.floor(t.double())[:, None, None, :] / 10
    )
    return s * (h + 1.0) + more + torch.trunc((q_pos - kv) / 3.0) / 16, everywhere(s)


def block_mask(
    s: torch.Tensor, h: Any, q: Any, kv: Any, q_pos: Any, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return s, kept.repeat_interleave(32, 1).repeat_interleave(16, 2)[:, : s.shape[2], : s.shape[3]].expand_as(s)


def block_score(
    s: torch.Tensor, h: Any, q: Any, kv: Any, q_pos: Any, near: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return s + near.repeat_interleave(8, 1).repeat_interleave(16, 2)[:, : s.shape[2], : s.shape[3]], everywhere(s)


def blocks_or_window(
    s: torch.Tensor, h: Any, q: Any, kv: Any, q_pos: Any, block_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = block_mask.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, : s.shape[2], : s.shape[3]]
    return s, blocks | ((kv <= q_pos) & (kv >= q_pos - 5))


def butterfly_or_first(s: torch.Tensor, h: Any, q: Any, kv: Any, q_pos: Any) -> tuple[torch.Tensor, torch.Tensor]:
    differ = (q // 16) ^ (kv // 16)
    return s, (kv <= q_pos) & ((differ & (differ - 1) == 0) | (kv < 3)) & s.isfinite()


def pair_classes(
    s: torch.Tensor,
    h: Any,
    q: Any,
    kv: Any,
    q_pos: Any,
    pair: torch.Tensor,
    w: torch.Tensor,
    t: torch.Tensor,
    u: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with tables by the class of a pair. A class outside of a table reads zero; negative ones count from the
    end."""

    def read(table: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Read a table [..., n] at classes, as [..., queries, keys]."""
        n = table.shape[-1]
        return sum(
            (table[..., c, None, None] * ((classes == c) | (classes == c - n)) for c in range(n)), torch.zeros(())
        )

    rows = torch.stack([read(t[:, i], pair[i : i + 1] - 3)[0] for i in range(len(pair))])
    return s * (1 + read(w, pair) / 4) + rows + read(u, abs(pair)).repeat_interleave(len(w) // len(u), 0), everywhere(s)


def no_diagonal(s: torch.Tensor, h: Any, q: Any, kv: Any, q_pos: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = -(-s.shape[2] // 16), -(-s.shape[3] // 16)
    return s, (q // 16 + columns - rows != kv // 16) & (q // 16 >= 1) & (kv // 16 >= 1) & s.isfinite()


VARIANTS: dict[str, Variant] = {
    "functions of scalars in a score": Variant(
        {
            "score": {
                "expr": (
                    "s * exp(-0.1 * h) + log(1 - 2 ** (-5 - h)) * (q_pos - kv_idx) * sigmoid(t) + tanh(h - 1) * "
                    "kv_idx / 64"
                ),
                "params": {"t": NUMBER},
            }
        },
        lambda h, q, kv: {"t": 0.7},
        scalar_score,
    ),
    "functions of scalars in a mask": Variant(
        {
            "mask": {
                "expr": (
                    "kv_idx <= q_pos + 2 ** h and kv_idx > t - log(h + 2) or kv_idx < n ** 0.5 and exp(0.5 * h) < 2"
                ),
                "params": {"t": NUMBER, "n": {"scalar": "int", "min": 1}},
            }
        },
        lambda h, q, kv: {"t": 4.5, "n": 10},
        scalar_mask,
    ),
    "floor, round and int in a mask": Variant(
        {
            "mask": {
                "expr": (
                    "kv_idx <= floor(x * q_pos) + round(1.5 * h) and int(x * kv_idx - 9) % 3 != 1 and "
                    "round((kv_idx - q_pos) / 4) != 2"
                ),
                "params": {"x": NUMBER},
            }
        },
        lambda h, q, kv: {"x": 0.625},
        rounded_mask,
    ),
    "floor, round and casts in a score": Variant(
        {
            "score": {
                "expr": "s * float(h + 1) + round(0.375 * (kv_idx - q_pos)) / 8 + int(kv_idx > q_idx) / 4 + "
                "floor(t[b, kv_idx]) * 0.1 + int((q_pos - kv_idx) / 3) / 16",
                "params": {"t": tensor("B", "Nk")},
            }
        },
        lambda h, q, kv: {"t": 3 * numbers(1, kv)},
        rounded_score,
    ),
    "a mask by blocks": Variant(
        {
            "mask": {
                "expr": "kept[h, q_idx // 32, kv_idx // 16]",
                "params": {"kept": tensor("H", "Nq/32", "Nk/16", dtype="bool")},
            }
        },
        lambda h, q, kv: {"kept": bits(h, -(-q // 32), -(-kv // 16))},
        block_mask,
    ),
    "a bias by blocks": Variant(
        {
            **FREE,
            "score": {
                "expr": "s + near[h, q_idx // 8, kv_idx // 16]",
                "params": {"near": tensor("H", "Nq/8", "Nk/16", grad=True)},
            },
        },
        lambda h, q, kv: {"near": numbers(h, -(-q // 8), -(-kv // 16))},
        block_score,
    ),
    "T5's buckets, summed in order": Variant(
        {"score": {"expr": f"s + bias[h, {BUCKET}]", "params": {"bias": tensor("H", 32, grad=True)}}},
        lambda h, q, kv: {"bias": numbers(h, 32)},
        t5,
    ),
    "T5's buckets, summed in no order": Variant(
        {**FREE, "score": {"expr": f"s + bias[h, {BUCKET}]", "params": {"bias": tensor("H", 32, grad=True)}}},
        lambda h, q, kv: {"bias": numbers(h, 32)},
        t5,
    ),
    "classes of pairs": Variant(
        {
            "mask": "causal",
            "score": {
                "expr": (
                    "s * (1 + w[h, pair[q_idx, kv_idx]] / 4) + t[pair[q_idx, kv_idx] - 3, q_idx] + u[hkv, "
                    "abs(pair[q_idx, kv_idx])]"
                ),
                "params": {
                    "pair": tensor("Nq", "Nk", dtype="int32"),
                    "w": tensor("H", 5, grad=True),
                    "t": tensor(4, "Nq", grad=True),
                    "u": tensor("Hkv", 3, grad=True),
                },
            },
        },
        lambda h, q, kv: {
            "pair": (torch.arange(q * kv, dtype=torch.int32) * 7 % 17 - 8).view(q, kv),
            "w": numbers(h, 5),
            "t": numbers(4, q),
            "u": numbers(h // 2, 3),
        },
        lambda s, h, q, kv, q_pos, **given: (pair_classes(s, h, q, kv, q_pos, **given)[0], kv <= q_pos),
    ),
    "blocks or a window": Variant(
        {"mask": {"any_of": [{"block_sparse": {"block": 32}}, {"sliding_window": {"left": 5, "right": 0}}]}},
        lambda h, q, kv: {"block_mask": bits(1, h, -(-q // 32), -(-kv // 32))},
        blocks_or_window,
    ),
    "a pattern of blocks or the first keys, and causal": Variant(
        {
            "mask": {
                "all_of": [
                    "causal",
                    {
                        "any_of": [
                            {"block_sparse": {"block": 16, "pattern": "butterfly"}},
                            {"sink_tokens": {"count": 3}},
                        ]
                    },
                ]
            }
        },
        lambda h, q, kv: {},
        butterfly_or_first,
    ),
    "not a pattern of blocks": Variant(
        {"mask": {"not": {"block_sparse": {"block": 16, "pattern": "local_global", "local": 0, "globals": 1}}}},
        lambda h, q, kv: {},
        no_diagonal,
    ),
}


def spec_of(variant: Variant) -> Spec:
    fixed = {"head_dim": 16, "dtype": "fp32", "heads": {"sharing": "gqa"}, "schedule": {"block_q": 16, "block_kv": 16}}
    return make_spec({"name": "gained", **fixed, **variant.parts})


def attended(q: Any, k: Any, v: Any, oracle: Oracle, given: dict[str, Any]) -> torch.Tensor:
    """Return the softmax of the oracle's visible scores, times v; zero for a query that sees nothing."""
    (_, heads, n_q, width), n_kv = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    h = torch.arange(heads)[:, None, None]
    rows, kv = torch.arange(n_q)[:, None], torch.arange(n_kv)
    s, visible = oracle(q @ k.transpose(2, 3) / width**0.5, h, rows, kv, rows + n_kv - n_q, **given)
    visible = visible.expand_as(s)
    weights = torch.softmax(s.masked_fill(~visible, -1e30), -1) * visible
    return weights @ v


def compare(module: Any, oracle: Oracle, given: dict[str, Any], device: str, sizes: tuple[int, int, int, int]) -> None:
    """Compare the output and the gradients of q, k, v and the gradient inputs: the module in fp32, the oracle in fp64
    on the CPU."""
    heads, n_q, n_kv, width = sizes
    generator = torch.Generator().manual_seed(1)
    shapes = (1, heads, n_q, width), (1, max(1, heads // 2), n_kv, width), (1, max(1, heads // 2), n_kv, width)
    tensors = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    if "mha" in module.__doc__:
        tensors[1:] = [
            torch.randn(1, heads, n_kv, width, generator=generator).to(device).requires_grad_() for _ in "kv"
        ]
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    learned = {
        n: x.clone().requires_grad_()
        for n, x in given.items()
        if isinstance(x, torch.Tensor) and f"{n}: torch.float32" in doc(module)
    }
    learned = {n: x for n, x in learned.items() if re.search(rf"{n}: .*differentiable", doc(module))}
    given = {**given, **learned}
    out = module.attention(*tensors, **given)
    dout = torch.randn(out.shape, generator=generator).to(device)
    ours = torch.autograd.grad(out, [*tensors, *learned.values()], dout)
    exact = [x.detach().cpu().double().requires_grad_() for x in (*tensors, *learned.values())]
    read = {n: x.detach().cpu() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    right = attended(*exact[:3], oracle, {**read, **dict(zip(learned, exact[3:]))})
    for x, y in zip((out, *ours), (right, *torch.autograd.grad(right, exact, dout.cpu().double()))):
        assert (x.cpu().double() - y).norm() <= 2e-5 * y.norm() + 1e-6


def doc(module: Any) -> str:
    return str(module.attention.__doc__ or module.attention.__call__.__doc__)


@pytest.mark.share(16)
@pytest.mark.parametrize("name", VARIANTS)
def test_what_the_language_gained(name: str, device: str, tmp_path: Path) -> None:
    """Lengths leave partial tiles, and queries are fewer than keys."""
    variant = VARIANTS[name]
    module = module_of(spec_of(variant), tmp_path / "gained")
    compare(module, variant.oracle, variant.inputs(4, 40, 57), device, (4, 40, 57, 16))


def window_and_first_keys(
    s: torch.Tensor, h: Any, q: Any, kv: Any, q_pos: Any, first: int, slope: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    biased = 30 * torch.tanh(s / 30) - slope[:, None, None] * (q_pos - kv).abs()
    return biased, (kv <= q_pos) & ((kv >= q_pos - 255) | (kv < first))


@pytest.mark.share(4)
def test_the_example_of_getting_started_decodes(device: str, tmp_path: Path) -> None:
    """One query for 400 keys is at position 399: it sees the window's 256 keys and the first 4, and its distances count
    from there."""
    example = next(
        found
        for found in re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/getting-started.md").read_text(), re.M | re.S)
        if "mine" in found
    )
    spec = make_spec({**yaml.safe_load(example), "dtype": "fp32", "schedule": {"block_q": 16, "block_kv": 64}})
    assert spec.notes() == ()
    module = module_of(spec, tmp_path / "mine")
    given = {"first": 4, "slope": torch.tensor([0.5, 0.01])}
    compare(module, window_and_first_keys, given, device, (2, 1, 400, 64))
    q, k, v = (torch.zeros(1, 2, n, 64, device=device) for n in (1, 400, 400))
    flat = torch.zeros(2, device=device)
    v[:, :, 4:144] = 1.0  # keys that it must not see
    assert module.attention(q, k, v, first=4, slope=flat).abs().max() == 0
    v[:, :, 144:] = v[:, :, :4] = 2.0
    assert (module.attention(q, k, v, first=4, slope=flat) - 2).abs().max() < 1e-5


def test_buckets_at_their_edges_are_exact() -> None:
    """fp32's logarithm does not move a power of two into the bucket below, because constant factors are folded into
    one."""
    module = lower(spec_of(VARIANTS["T5's buckets, summed in order"]))
    texts = {str(e) for op in module.kernel("fwd").ops() if op.name == "bias_place" for e in [op.expr]}
    assert len(texts) == 1 and "2.0" in texts.pop()
