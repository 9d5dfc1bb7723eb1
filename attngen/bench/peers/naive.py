"""Naive attention in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attngen.bench.peers.base import Call

if TYPE_CHECKING:
    import torch

    from attngen.bench.cases.problem import Inputs, Problem


def naive(problem: Problem) -> Call:
    """Return softmax(q @ k^T) @ v in plain torch, with the whole score matrix in memory, in the cell's dtype."""
    import torch

    mask = problem.visible()
    hidden = None if mask is None else ~mask
    empty = None if mask is None or bool(mask.any(-1).all()) else ~mask.any(-1, keepdim=True)
    modify, sink = problem.scores()
    scale = problem.cell.spec.head_dim.qk**-0.5

    def forward(x: Inputs) -> torch.Tensor:
        b, heads, n_q, width = x.q.shape
        k, v = problem.rows(x)
        shared, n_kv = k.shape[1:3]
        # The queries that share a K/V head, so that it is not copied.
        rows = (x.q * scale).reshape(b, shared, heads // shared * n_q, width)
        scores = (rows @ k.transpose(-1, -2)).view(b, heads, n_q, n_kv)
        scores = scores if modify is None else modify(scores).to(x.q.dtype)
        scores = scores if hidden is None else scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        if sink is not None:
            scores = torch.cat([scores, sink.to(scores.dtype)[None, :, None, None].expand(b, heads, n_q, 1)], -1)
        probabilities = torch.softmax(scores, -1)[..., :n_kv]
        probabilities = probabilities if empty is None else probabilities.masked_fill(empty, 0.0)
        return (probabilities.reshape(b, shared, heads // shared * n_q, n_kv) @ v).view(b, heads, n_q, -1)

    return Call(forward)
