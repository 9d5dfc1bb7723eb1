"""What the tests of `attngen.flex_attention` share: an empty cache, inputs, naive attention, functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attngen.ir.sizes import Sizes

D = 16
Tensor = torch.Tensor
# The document of each of 12 positions, and the first position of each document.
DOC, STARTS = torch.arange(12, dtype=torch.int32) // 5, torch.tensor([0, 5, 10])


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty cache, so that the tests of a file build each module once, from this source."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def inputs(sizes: Sizes, device: str, dtype: torch.dtype = torch.float32, width: int = D) -> list[Tensor]:
    """Random q, k and v with the head_dim `width`, which need gradients."""
    g = torch.Generator().manual_seed(1)
    lengths = ((sizes.q_heads, sizes.n_q), (sizes.kv_heads, sizes.n_kv), (sizes.kv_heads, sizes.n_kv))
    made = [torch.randn(sizes.batch, heads, n, width, generator=g) for heads, n in lengths]
    return [x.to(device, dtype).requires_grad_() for x in made]


def naive(q: Tensor, k: Tensor, v: Tensor, score: Any = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of naive attention in fp64."""
    group = q.shape[1] // k.shape[1]
    s = q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3) / math.sqrt(q.shape[3])
    s = s if score is None else score(s)
    s = s if mask is None else s.masked_fill(~mask, -math.inf)
    p = torch.softmax(s, -1).nan_to_num(0.0)
    return p @ v.double().repeat_interleave(group, 1), s.logsumexp(-1)


def cumulative_score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s + torch.cumsum(s.view(1), 0)[0]


def lower_triangle(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx
