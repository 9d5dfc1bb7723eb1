"""Forward mode: tangents of every committed module against torch.func.jvp of naive attention, and PyTorch's ways to ask for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen.testing import run_case
from tests.helpers import KINDS, SMALLER, WRAPPERS, built
from tests.helpers import spec as spec_of
from tests.test_numerics import dtypes, small

SHAPES = [(1, 1, "bhnd"), (17, 17, "bhnd"), (127, 127, "bnhd"), (129, 129, "bhnd"), (65, 65, "packed"), (100, 130, "island"), (130, 100, "island")]


@pytest.mark.parametrize(("name", "shape"), [(n, s) for n in WRAPPERS for s in SHAPES])
def test_against_naive(name: str, shape: tuple[int, int, str], device: str) -> None:
    result = run_case(built(name), spec_of(name), small(name, *shape), dtypes(name)[0], device, tangents=True)
    print(result)
    assert result.ok, str(result)
