"""Plans of context parallelism: counts of visible scores against the masks' hand-written oracles, balance, transfers,
and the proof that each visible pair is computed once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attngen.conformance.cases import make_mask_inputs
from attngen.conformance.oracle import reference_mask
from attngen.distributed.visible import count
from attngen.ir.sizes import Sizes
from attngen.spec import Spec, load_spec
from tests.helpers import ROOT

NAMES = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))
HEADS = 4  # query heads of random cases


@cache
def spec_of(name: str) -> Spec:
    return load_spec(ROOT / "specs" / f"{name}.yaml")


def folder(name: str) -> Path:
    return ROOT / "generated" / name


def random_inputs(name: str, n: int, seed: int) -> dict[str, Any]:
    """Random inputs of a spec's mask for two sequences."""
    sizes = Sizes(2, HEADS, HEADS, n, n)
    return make_mask_inputs(spec_of(name), sizes, torch.float32, "cpu", torch.Generator().manual_seed(seed))


def oracle(name: str, n: int, chunk: int, inputs: dict[str, Any]) -> np.ndarray:
    """Visible scores by chunks, [2 * HEADS, chunks, chunks], by the mask's oracle."""
    q = torch.zeros(2, HEADS, n, 1)
    mask = reference_mask(spec_of(name).mask, q, q, inputs).expand(2, HEADS, n, n).numpy().reshape(-1, n, n)
    rest = -n % chunk
    chunks = (n + rest) // chunk
    padded = np.pad(mask, ((0, 0), (0, rest), (0, rest))).reshape(-1, chunks, chunk, chunks, chunk)
    return padded.sum((2, 4))


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_the_oracle(name: str) -> None:
    for seed, (n, chunk) in enumerate(((203, 32), (517, 128), (96, 96), (5, 16))):
        inputs = random_inputs(name, n, seed)
        found = count(folder(name), n, chunk, inputs, q_heads=HEADS, kv_heads=HEADS)
        expected = oracle(name, n, chunk, inputs)
        assert found.exact
        assert np.array_equal(found.scores * (2 * HEADS // found.planes), expected.sum(0)), (n, chunk)
