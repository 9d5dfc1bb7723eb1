"""Sampled counts of the blocks that bounds visit and that lists hold, compared with brute force where the sample is
complete."""

from __future__ import annotations

import numpy as np
import pytest

from attngen.heuristics import LISTED, SAMPLED_ROWS
from attngen.spec import make_spec
from attngen.tiles.intervals import MaskContext
from attngen.tiles.sampled import Counted, counted, samples, worth_listing

N = LISTED * SAMPLED_ROWS
MASKS = {
    "causal": lambda q, k: k <= q,
    "window": lambda q, k: (q - k < 300) & (k <= q),
    "columns": lambda q, k: (q % 256 - k % 256 < 9) & (k % 256 - q % 256 < 9) & (q // 256 == k // 256),
}
TEXTS = {
    "causal": "kv_idx <= q_idx",
    "window": "q_idx - kv_idx < 300 and kv_idx <= q_idx",
    "columns": "abs(q_idx % 256 - kv_idx % 256) < 9 and q_idx // 256 == kv_idx // 256",
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("context", [MaskContext("q", "kv"), MaskContext("kv", "q")], ids=["rows", "columns"])
def test_counts_equal_those_of_brute_force(name: str, context: MaskContext) -> None:
    where = make_spec({"name": "x", "head_dim": 16, "mask": {"expr": TEXTS[name]}}).mask.expression()
    seen = MASKS[name](*np.ogrid[:N, :N]).reshape(SAMPLED_ROWS, LISTED, -1, LISTED)
    some, every = seen.any((1, 3)).sum(), seen.all((1, 3)).sum()
    found = counted(where, context, N)
    assert samples(where) and (found.all, found.listed, found.listed_partial) == (SAMPLED_ROWS**2, some, some - every)
    assert found.listed <= found.bounded <= found.all and found.listed_partial <= found.bounded_partial
    if name != "columns":  # bounds are not solved for its remainders
        assert (found.bounded, found.bounded_partial) == (found.listed, found.listed_partial)


def test_masks_that_read_data_or_hide_nothing_are_not_sampled() -> None:
    reads_data = {"expr": "kv_idx < lengths[b]", "params": {"lengths": {"tensor": ["B"], "dtype": "int32"}}}
    reads_a_scalar = {"expr": "kv_idx < n", "params": {"n": {"scalar": "int"}}}
    for mask in (reads_data, reads_a_scalar, "none"):
        assert not samples(make_spec({"name": "x", "head_dim": 16, "mask": mask}).mask.expression())


def test_listing_blocks_is_worthwhile_where_bounds_are_loose() -> None:
    for text, worth in (("kv_idx <= q_idx", False), ("abs(q_idx // 64 % 8 - kv_idx // 64 % 8) < 1", True)):
        assert (
            worth_listing(make_spec({"name": "x", "head_dim": 16, "mask": {"expr": text}}).mask.expression()) == worth
        )


def test_an_empty_mask_leaves_nothing() -> None:
    where = make_spec({"name": "x", "head_dim": 16, "mask": {"expr": "kv_idx > q_idx + 100000"}}).mask.expression()
    assert counted(where, MaskContext("q", "kv"), N) == Counted(SAMPLED_ROWS**2, 0, 0, 0, 0)
