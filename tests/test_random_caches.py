"""Random specs with a KV cache: calls with it are right, or the spec gets one sentence.

A random spec is emitted from the text of its IR, as in tests/test_random_specs.py. Three calls are compared with naive
attention: decode of one token, a few queries with existing keys, and a call that appends many keys. Specs with a
backward also have a call without a cache, with gradients.

`python -m tests.test_random_specs --caches --specs 300 --seed 7` tests more.
"""

from __future__ import annotations

import json

import pytest

from tests.spec_strategies import cache_data, drawn
from tests.test_random_specs import built_of, of_caches

pytestmark = pytest.mark.numerics

ON_PUSH, NIGHTLY = (3, 4), range(100, 115)  # seeds
COUNT = 20  # specs per seed
KINDS = ("mha", "mqa", "gqa", "contiguous", "paged", "fp8_e4m3", "latent", "page", "split", "all_of", "any_of")


def _hold(number: int, device: str) -> None:
    built = built_of(of_caches(number, COUNT, device))
    assert len(built) >= COUNT // 3 and {bool(data["backward"]) for data in built} == {False, True}


@pytest.mark.share(8)
@pytest.mark.parametrize("number", ON_PUSH)
def test_each_spec_with_a_cache_is_right_or_gets_one_sentence(number: int, device: str) -> None:
    _hold(number, device)


@pytest.mark.nightly
@pytest.mark.parametrize("number", NIGHTLY)
def test_many_specs_with_a_cache_are_right_or_get_one_sentence(number: int, device: str) -> None:
    _hold(number, device)


@pytest.mark.share(4)
def test_all_kinds_of_caches_are_drawn() -> None:
    specs = [data for number in ON_PUSH for data in drawn(cache_data(), COUNT, number)]
    assert [kind for kind in KINDS if not any(f'"{kind}"' in json.dumps(data) for data in specs)] == []
