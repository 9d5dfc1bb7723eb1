"""FlashAttention-1's loop order, for specs that specs/ does not have: grouped heads, unions of masks, modifiers, other
head_dims."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.conformance.cases import Case, heads_for
from attngen.conformance.harness import run_case
from attngen.spec import make_spec
from tests.helpers import module_of

pytestmark = pytest.mark.numerics

VARIANTS = {
    "grouped, a union, a softcap": {
        "heads": {"sharing": "gqa"},
        "mask": {"any_of": [{"sliding_window": {"left": 20, "right": 3}}, {"sink_tokens": {"count": 4}}]},
        "score": [{"softcap": 5.0}],
    },
    "one key head, padded widths, a number": {
        "heads": {"sharing": "mqa"},
        "head_dim": {"qk": 24, "v": 40},
        "mask": {"expr": "kv_idx <= q_idx - 40 + far", "params": {"far": {"scalar": "int"}}},
    },
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_against_naive(name: str, seed: int, device: str, tmp_path: Path) -> None:
    """Results are right where tiles of keys and queries pass the end, for rows that see no key, and wherever the first
    key of a row is in its tile."""
    spec = make_spec(
        {"name": "kv_outer", "head_dim": 32, "dtype": ["fp16"], "schedule": {"order": "kv_outer"}, **VARIANTS[name]}
    )
    module, case = module_of(spec, tmp_path / "kv_outer"), Case(1, *heads_for(spec, 2), 130, 70, "bnhd")
    result = run_case(module, spec, case, "fp16", device, seed)
    assert result.ok, str(result)
