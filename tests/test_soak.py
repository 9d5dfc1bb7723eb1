"""`make soak`: it finds runs that give other bits, and its long call uses the fused backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.conformance.cases import Case
from attngen.conformance.kv_cache import CacheCase, cache_cases
from attngen.heuristics import FUSED_KEYS, FUSED_ROWS
from attngen.ir.printer import print_module
from tests.helpers import CUDA, built, spec, target
from tests.soak import cases, differing

pytestmark = pytest.mark.numerics

CASE = Case(1, 4, 2, 5, 7)


def unsteady(every: int) -> Any:
    """Return a fake module whose results have another last bit in every `every`-th run."""
    runs = iter(range(1000))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        off = 2.0**-10 * (next(runs) % every == every - 1)
        out = q * (1 + off) + k.mean() + v.mean()
        return out, out.float().sum(-1)

    return SimpleNamespace(attention=attention)


@pytest.mark.parametrize(("every", "wrong"), [(1000, 0), (5, 2), (11, 1)])
def test_runs_with_other_bits_are_counted(every: int, wrong: int) -> None:
    assert differing(unsteady(every), spec("causal_gqa"), CASE, "fp16", "cpu", repeats=10) == wrong


def test_calls_with_a_cache_run_too() -> None:
    """All calls of `attngen test` run, and one that gives other bits is found."""
    made, small = spec("decode_gqa"), CacheCase(2, 1, 1, (0, 5), 1, 8)
    assert [c for c in cases(made, 132) if isinstance(c, CacheCase)] == cache_cases(made, True)
    right, runs = built("decode_gqa"), iter(range(100))

    def attend(*args: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right.attention.with_kvcache(*args, **given)
        return out * (1 + 2.0**-10 * (next(runs) % 4 == 3)), lse

    unsteady = SimpleNamespace(attention=SimpleNamespace(with_kvcache=attend))
    device = "cuda" if CUDA else "cpu"
    assert differing(right, made, small, "fp16", device, repeats=3) == 0
    assert differing(unsteady, made, small, "fp16", device, repeats=8) == 2


def test_the_long_case_takes_the_backward_in_one_pass() -> None:
    for name in ("causal_gqa", "causal_mqa", "full_mha"):
        enough = f"Nk >= {FUSED_ROWS} and Nq >= {FUSED_ROWS} and B*Hq*Nk >= {FUSED_KEYS}*num_SMs"
        assert enough in print_module(target(name))
        *_, long = cases(spec(name), 132)
        assert isinstance(long, Case)
        assert min(long.n_q, long.n_kv) >= FUSED_ROWS and long.batch * long.q_heads * long.n_kv >= FUSED_KEYS * 132
