"""Random specs with a KV cache: calls with it are right, or the spec gets one sentence.

A random spec is emitted from the text of its IR, as in tests/test_random_specs.py. Three calls are compared with naive
attention: decode of one token, a few queries with existing keys, and a call that appends many keys. Specs with a
backward also have a call without a cache, with gradients.

`python -m tests.test_random_specs --caches --specs 300 --seed 7` tests more.
"""

from __future__ import annotations

import json

import pytest

from tests.spec_strategies import Data, cache_data, drawn
from tests.test_random_specs import of_caches

pytestmark = pytest.mark.numerics

ON_PUSH, NIGHTLY = (3, 4), (100, 101, 102, 103, 104, 105)  # seeds
FEW, MANY = 20, 50  # specs per seed
KINDS = ("mha", "mqa", "gqa", "contiguous", "paged", "fp8_e4m3", "latent", "page", "split", "all_of", "any_of")


def _hold(number: int, count: int, device: str) -> list[Data]:
    """Return those of `count` random specs that build."""
    found = list(of_caches(number, count, device))
    assert [(data, error) for data, error in found if isinstance(error, Exception)] == []
    return [data for data, what in found if what == "built"]


@pytest.mark.share(8)
@pytest.mark.parametrize("number", ON_PUSH)
def test_each_spec_with_a_cache_is_right_or_gets_one_sentence(number: int, device: str) -> None:
    built = _hold(number, FEW, device)
    assert len(built) >= FEW // 3 and {bool(data["backward"]) for data in built} == {False, True}


@pytest.mark.nightly
@pytest.mark.parametrize("number", NIGHTLY)
def test_many_specs_with_a_cache_are_right_or_get_one_sentence(number: int, device: str) -> None:
    built = _hold(number, MANY, device)
    assert len(built) >= MANY // 3 and {bool(data["backward"]) for data in built} == {False, True}


@pytest.mark.share(4)
def test_all_kinds_of_caches_are_drawn() -> None:
    specs = [data for number in ON_PUSH for data in drawn(cache_data(), FEW, number)]
    assert [kind for kind in KINDS if not any(f'"{kind}"' in json.dumps(data) for data in specs)] == []
