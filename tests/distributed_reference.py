"""A local kernel in eager PyTorch, a plan by brute force, and attention of whole tensors, for tests of context
parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from attngen.distributed.layout import Layout
from attngen.distributed.local import Backward, Stats

Mask = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], torch.Tensor]


def positions(layout: Layout, chunks: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([row for chunk in chunks for row in layout.rows_of(chunk)], dtype=torch.int64)


class Eager:
    """Attention of chunks under a mask of positions, with an optional learned sink and an optional learned slope [Hq],
    which multiplies the distance that is subtracted from scores. Computes in fp32, or fp64 if q has it."""

    rows = ("lse",)
    learned = ("sink", "slope")
    sinks = ("sink",)
    dims = {"sink": ("Hq",), "slope": ("Hq",)}

    def __init__(self, layout: Layout, mask: Mask, digest: str = "", whole_heads: str = "") -> None:
        self.layout, self.mask, self.digest, self.whole_heads = layout, mask, digest, whole_heads
        self.launches = 0

    def problem(self, inputs: Mapping[str, Any]) -> str:
        return ""

    def needs_all_heads(self, inputs: Mapping[str, Any]) -> str:
        return self.whole_heads

    def scores(self, q: Any, k: Any, q_chunks: Any, kv_chunks: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [B, Hq, Nq, Nk], -inf where hidden, and distances [Nq, Nk]."""
        at, of = positions(self.layout, q_chunks)[:, None], positions(self.layout, kv_chunks)[None]
        assert q.shape[2] == at.shape[0] and k.shape[2] == of.shape[1]
        distance = (at - of).abs().to(q.dtype)
        s = q @ k.mT * inputs.get("scale", q.shape[-1] ** -0.5)
        if "slope" in inputs:
            s = s - inputs["slope"].to(q.dtype)[:, None, None] * distance
        return s.masked_fill(~self.mask(at, of, inputs), -torch.inf), distance

    def forward(self, q: Any, k: Any, v: Any, q_chunks: Any, kv_chunks: Any, inputs: Any) -> tuple[Any, Stats]:
        self.launches += 1
        dtype = q.dtype
        q, k, v = self._wide(q, k, v)
        s, _ = self.scores(q, k, q_chunks, kv_chunks, inputs)
        if "sink" in inputs:
            s = torch.cat([s, inputs["sink"].to(q.dtype)[:, None, None].expand(*s.shape[:3], 1)], dim=3)
        lse = torch.logsumexp(s, dim=3) if s.shape[3] else s.new_full(s.shape[:3], -torch.inf)
        p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        return (p[..., : k.shape[2]] @ v).to(dtype), {"lse": lse.float()}

    def backward(self, of: Backward, q_chunks: Any, kv_chunks: Any, inputs: Any, wanted: Any) -> Any:
        self.launches += 1
        dtype, group, grad_lse = of.q.dtype, of.q.shape[1] // of.k.shape[1], of.grad_lse
        q, k, v = self._wide(of.q, of.k, of.v)
        grad_out, out, lse = of.grad_out.to(q.dtype), of.out.to(q.dtype), of.stats["lse"].to(q.dtype)[..., None]
        s, distance = self.scores(q, k, q_chunks, kv_chunks, inputs)
        lse = lse.masked_fill(lse == -torch.inf, 0)
        p = torch.exp(s - lse)
        delta = (out * grad_out).sum(3, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse.to(q.dtype)[..., None]
        ds = p * (grad_out @ v.mT - delta)
        scale = inputs.get("scale", q.shape[-1] ** -0.5)
        dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q * scale, p.mT @ grad_out))
        of_inputs = {}
        if "slope" in wanted:
            of_inputs["slope"] = -(ds * distance).sum((0, 2, 3))
        if "sink" in wanted:
            sink = inputs["sink"].to(q.dtype)[:, None, None]
            of_inputs["sink"] = -(torch.exp(sink - lse) * delta).sum((0, 2, 3))
        return (ds @ k * scale).to(dtype), dk.to(dtype), dv.to(dtype), of_inputs

    def _wide(self, q: Any, k: Any, v: Any) -> tuple[torch.Tensor, ...]:
        group = q.shape[1] // k.shape[1]
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.to(dtype), *(x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))


def sees(layout: Layout, mask: Mask, inputs: Any, q_chunks: tuple[int, ...], chunk: int) -> bool:
    at, of = positions(layout, q_chunks)[:, None], positions(layout, (chunk,))[None]
    return bool(mask(at, of, inputs).any())


def needs_of(layout: Layout, mask: Mask, inputs: Any) -> tuple[tuple[int, ...], ...]:
    """For each rank the chunks of keys that its queries see."""
    chunks = range(layout.chunks)
    return tuple(tuple(c for c in chunks if sees(layout, mask, inputs, own, c)) for own in layout.owned)


def steps_of(layout: Layout, mask: Mask, inputs: Any) -> list[list[tuple[int, tuple[int, ...]]]]:
    """The steps of a ring that passes keys to the next rank, with the chunks of queries that see any of them, without
    steps at its end in which no rank sees any."""
    steps = []
    for step in range(layout.ranks):
        sources = [(rank - step) % layout.ranks for rank in range(layout.ranks)]
        steps.append(
            [
                (
                    of,
                    tuple(
                        q for q in own if not step or any(sees(layout, mask, inputs, (q,), c) for c in layout.owned[of])
                    ),
                )
                for own, of in zip(layout.owned, sources)
            ]
        )
    while len(steps) > 1 and not any(queries for _, queries in steps[-1]):
        steps.pop()
    return steps


def whole_attention(q: Any, k: Any, v: Any, mask: Mask, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of whole tensors, by torch's operators, from which autograd derives gradients."""
    at = torch.arange(q.shape[2])
    group = q.shape[1] // k.shape[1]
    s = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
    if "slope" in inputs:
        s = s - inputs["slope"][:, None, None] * (at[:, None] - at).abs()
    weights = torch.exp(s) * mask(at[:, None], at[None], inputs)
    total = weights.sum(3)
    if "sink" in inputs:
        total = total + torch.exp(inputs["sink"])[:, None]
    lse = torch.where(total > 0, total, 1).log().masked_fill(total == 0, -torch.inf)
    weights = weights / torch.where(total > 0, total, 1)[..., None]
    return torch.einsum("bhij,bhjd->bhid", weights, v.repeat_interleave(group, 1)), lse
