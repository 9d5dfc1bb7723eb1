"""The soak of `make soak`: it finds runs that give other bits, and its long call is one that a backward in one pass takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.ir.text import print_module
from attngen.policy import FUSED_KEYS, FUSED_ROWS
from attngen.testing import Case
from tests.helpers import spec, target
from tests.soak import cases, differing

CASE = Case(1, 4, 2, 5, 7)


def unsteady(every: int) -> Any:
    """A module whose results have another last bit in each so manieth run."""
    runs = iter(range(1000))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        off = 2.0**-10 * (next(runs) % every == every - 1)
        out = q * (1 + off) + k.mean() + v.mean()
        return out, out.float().sum(-1)

    return SimpleNamespace(attention=attention)


@pytest.mark.parametrize(("every", "wrong"), [(1000, 0), (5, 2), (11, 1)])
def test_runs_with_other_bits_are_counted(every: int, wrong: int) -> None:
    assert differing(unsteady(every), spec("causal_gqa"), CASE, "fp16", "cpu", repeats=10) == wrong


def test_the_long_case_takes_the_backward_in_one_pass() -> None:
    for name in ("causal_gqa", "causal_mqa", "full_mha"):
        enough = f"Nk >= {FUSED_ROWS} and Nq >= {FUSED_ROWS} and B*Hq*Nk >= {FUSED_KEYS}*processors"
        assert enough in print_module(target(name))
        *_, long = cases(spec(name), 132)
        assert min(long.n_q, long.n_kv) >= FUSED_ROWS and long.batch * long.q_heads * long.n_kv >= FUSED_KEYS * 132
