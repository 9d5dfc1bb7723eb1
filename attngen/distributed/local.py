"""What one rank computes: attention of some chunks of queries with some chunks of keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Stats = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Backward:
    """The tensors that a backward starts from, of some chunks of queries and of keys.

    grad_out: [B, Hq, queries, Dv]. grad_lse: fp32 [B, Hq, queries], None if it is zero. q: [B, Hq, queries, D]. k, v:
    [B, Hkv, keys, D or Dv]. out: [B, Hq, queries, Dv], and stats: fp32 [B, Hq, queries] each, those of the rows'
    softmax over all keys of the sequence.
    """

    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    stats: Stats

    def of_queries(self, take: Callable[[torch.Tensor], torch.Tensor]) -> Backward:
        """Return the same of some queries, which `take` takes of a tensor [B, Hq, queries, ...]."""
        return Backward(
            take(self.grad_out),
            None if self.grad_lse is None else take(self.grad_lse),
            take(self.q),
            self.k,
            self.v,
            take(self.out),
            {name: take(x) for name, x in self.stats.items()},
        )


class LocalKernel(Protocol):
    """Attention of any chunks of a sequence, computed on one rank. Masks, scores and dropout are of positions in the
    whole sequence.

    digest: a name that is equal on all ranks if they compute the same.
    rows: names of the row vectors that `forward` returns, "lse" among them.
    learned: names of the inputs that have a gradient.
    sinks: names of the inputs that are a logit of each row of scores, such as a sink. Such a logit takes part in a
        row's softmax once, however many parts its keys are divided into; -inf removes it, and its gradient is then 0.
    dims: for each input that is a tensor the names of its dimensions, such as ("Hq",) or ("B", "Nk"). "Hq" and "Hkv"
        are heads; inputs are given in part along them where a rank computes a part of the heads, and whole along all
        other dimensions.
    """

    digest: str
    rows: tuple[str, ...]
    learned: tuple[str, ...]
    sinks: tuple[str, ...]
    dims: Mapping[str, tuple[str, ...]]

    def problem(self, inputs: Mapping[str, Any]) -> str:
        """Return what is wrong with the inputs of a call, as a clause; empty text if nothing is."""
        ...

    def needs_all_heads(self, inputs: Mapping[str, Any]) -> str:
        """Return why a rank cannot compute a part of the heads, as a clause such as "dropout depends on the number of a
        head"; empty text if it can."""
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_chunks: tuple[int, ...],
        kv_chunks: tuple[int, ...],
        inputs: Mapping[str, Any],
    ) -> tuple[torch.Tensor, Stats]:
        """Return the output [B, Hq, rows of q_chunks, Dv] in q's dtype, and `rows`, fp32 [B, Hq, rows of q_chunks].

        q: [B, Hq, rows of q_chunks, D]. k, v: [B, Hkv, rows of kv_chunks, D or Dv]. Any strides with the last
        dimension contiguous. q_chunks, kv_chunks: numbers of chunks of the layout, in rising order, which may
        be none. inputs: the other arguments of a call by name, tensors and numbers.

        "lse" is the natural logarithm. A row that sees no key of kv_chunks has output 0 and an LSE of -inf, or of its
        sink. The results have memory of their own, to which the caller may write.
        """
        ...

    def backward(
        self,
        of: Backward,
        q_chunks: tuple[int, ...],
        kv_chunks: tuple[int, ...],
        inputs: Mapping[str, Any],
        wanted: Collection[str],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the gradients of q, k and v, and those of the learned inputs in `wanted` by name, of these chunks.

        Probabilities are exp(score - lse), and delta = rowsum(out * grad_out) - grad_lse. Gradients of q, k and v have
        their dtype or fp32, and memory of their own, to which the caller may write; those of inputs have any
        floating-point dtype. A sink's is -exp(sink - lse) * delta, summed over rows, so it is counted once if only one
        part of the keys has the sink.
        """
        ...
