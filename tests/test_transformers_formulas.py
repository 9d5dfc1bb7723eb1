"""Mask functions of transformers become formulas: masks with names, traced expressions, and their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils as masks

from attngen.integrations.transformers import attend as attends
from attngen.integrations.transformers.formula import formula
from attngen.integrations.transformers.mask import mask_of
from tests.transformers_models import (
    N,
)


def remap_positions_for_packed_sequence(mask_function: Any, position_ids: torch.Tensor) -> Any:
    """The function of this name in transformers after 5.17; attngen recognises it by the name."""
    return lambda b, h, q_idx, kv_idx: mask_function(b, h, position_ids[b, q_idx], position_ids[b, kv_idx])


def packed(mask: Any, position_ids: torch.Tensor) -> Any:
    """Return a mask within packed sequences, as those versions make it."""
    return masks.and_masks(
        masks.packed_sequence_mask_function(IDS), remap_positions_for_packed_sequence(mask, position_ids)
    )


IDS = torch.zeros(2, 64, dtype=torch.long)
CHUNKS = masks.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long))
WINDOW = masks.sliding_window_causal_mask_function(8)
NAMED = {"sliding_window": {"left": 7, "right": 0}}
DOCUMENTS = {"document": {"sorted": True}}
FORMULAS: dict[str, tuple[Callable[[], Any], int, tuple[Any, ...]]] = {
    "causal": (lambda: masks.causal_mask_function, 0, ("causal",)),
    "none": (lambda: masks.bidirectional_mask_function, 0, ()),
    "in a window": (lambda: WINDOW, 5, (NAMED,)),
    "both sides": (
        lambda: masks.sliding_window_bidirectional_mask_function(8),
        0,
        ({"sliding_window": {"left": 8, "right": 8}},),
    ),
    "packed": (lambda: packed(WINDOW, IDS), 0, (NAMED, DOCUMENTS)),
    "packed, as in 5.17": (
        lambda: masks.and_masks(WINDOW, masks.packed_sequence_mask_function(IDS)),
        0,
        (NAMED, DOCUMENTS),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_masks_of_transformers_have_names(name: str) -> None:
    function, offset, parts = FORMULAS[name]
    assert formula(function(), offset)[0].parts == parts


def test_formulas_are_cached_by_form() -> None:
    """Functions made twice from the same pieces have one formula. Another number or another piece has another
    formula."""
    first, tensors = formula(masks.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)), 0)
    again, others = formula(masks.chunked_causal_mask_function(8, torch.ones(2, dtype=torch.long)), 0)
    assert first is again and tensors[0] is not others[0]
    assert first is not formula(masks.chunked_causal_mask_function(9, torch.zeros(2, dtype=torch.long)), 0)[0]
    assert first is not formula(masks.and_masks(CHUNKS, masks.blockwise_overlay(IDS)), 0)[0]
    distinct, same = (
        masks.or_masks(masks.blockwise_overlay(x), masks.blockwise_overlay(y)) for x, y in ((IDS, IDS + 1), (IDS, IDS))
    )
    assert formula(distinct, 0)[0] is not formula(same, 0)[0] and len(formula(distinct, 0)[1]) == 2


LIMITS = {"window": 4}


class Settings:
    """An object that a user's mask function reads."""

    def __init__(self, window: int) -> None:
        self.window = window

    def read(self) -> int:
        return self.window


def in_window(window: Callable[[], Any]) -> Any:
    return lambda b, h, q, k: (k <= q) & (k > q - window())


def of_settings(window: int) -> Any:
    settings = Settings(window)
    return lambda b, h, q, k: (k <= q) & (k > q - settings.window)


def of_a_module(window: int) -> Any:
    LIMITS["window"] = window
    return lambda b, h, q, k: (k <= q) & (k > q - LIMITS["window"])


def of_a_size(window: int) -> Any:
    x = torch.zeros(2, window)
    return lambda b, h, q, k: (k <= q) & (k > q - x.shape[1])


PIECES: dict[str, Callable[[int], Any]] = {
    "number": lambda window: in_window(lambda: window),
    "object": of_settings,
    "method": lambda window: in_window(Settings(window).read),
    "dictionary": lambda window: (lambda limits: lambda b, h, q, k: (k <= q) & (k > q - limits["window"]))(
        {"window": window}
    ),
    "of the module": of_a_module,
    "size": of_a_size,
}


@pytest.mark.parametrize("name", PIECES)
def test_functions_that_read_other_numbers_have_other_formulas(name: str) -> None:
    """Functions with the same code that read another number get their own formula."""
    for window in (4, 9, 4):
        assert formula(PIECES[name](window), 0)[0].parts == ({"sliding_window": {"left": window - 1, "right": 0}},)


def test_values_of_tensors_are_not_constants_of_formulas() -> None:
    x = torch.tensor([4])
    for function in (lambda b, h, q, k: k > q - x.item(), lambda b, h, q, k: k > q - (4 if x[0] < 5 else 9)):
        assert "a number is taken out of a tensor" in formula(function, 0)[0].why


def test_masks_of_transformers_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (lambda: masks.causal_mask_function, lambda: masks.chunked_causal_mask_function(8, IDS[0])):
        first = formula(make(), 0)[0]
        with monkeypatch.context() as patch:
            patch.setattr("attngen.integrations.transformers.formula.trace", lambda *_: pytest.fail("traces again"))
            assert formula(make(), 0)[0] is first


def test_sequences_in_any_order_and_other_unions() -> None:
    """Only an intersection hides other sequences. Ids that decrease along a row, such as -1 for padding, are not
    sorted."""
    ids = torch.tensor([[0, 0, 1, 1, -1, -1]])
    both = masks.and_masks(masks.bidirectional_mask_function, masks.packed_sequence_mask_function(ids))
    assert formula(both, 0)[0].parts == ("document",)
    either = formula(masks.or_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(IDS)), 0)[0]
    assert not either.packed and not either.causal and " or " in either.parts[0]["expr"]


def test_a_tensor_without_dimensions_becomes_an_input_of_one_element() -> None:
    last = torch.tensor(4)
    mask = mask_of(2, N, N, mask_function=lambda b, h, q, k: (k <= q) & (k > q - last))
    assert [x.tolist() for x in mask.inputs.values()] == [[4]]


def test_a_mask_keeps_the_positions_of_its_creation() -> None:
    """A static cache updates its tensor of positions before a layer attends."""
    first = torch.tensor(5)
    mask = mask_of(1, 3, 12, first, mask_function=masks.causal_mask_function)
    first += 3
    assert mask.dense().sum(-1).flatten().tolist() == [6, 7, 8] and int(mask.start) == 5


def test_masks_with_block_lists_have_no_kv_cache() -> None:
    """Queries with a KV cache run the kernels of ordinary calls under such masks."""
    spans = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(torch.tensor([[-1, 0, 0, -1]])))
    for function, expected in (
        (masks.causal_mask_function, True),
        (masks.bidirectional_mask_function, True),
        (spans, False),
    ):
        assert attends._has_cache(formula(function, 0)[0]) == expected


def test_positions_have_an_offset_where_a_cache_begins() -> None:
    moved = formula(CHUNKS, 5)[0]
    assert moved.offset and "kv_idx + kv_offset - left_padding[b]" in moved.parts[0]["expr"]
    assert not formula(CHUNKS, 0)[0].offset and moved.causal


def test_packed_chunks_read_positions() -> None:
    """Chunks depend on more than distances, so within packed sequences the mask reads the positions."""
    made = formula(packed(CHUNKS, IDS + 1), 0)[0]
    assert "position_ids[b, q_pos]" in made.parts[0]["expr"] and not made.packed
