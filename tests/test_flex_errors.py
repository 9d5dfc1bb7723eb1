"""Refused functions and calls of `attngen.flex_attention`: each gets one sentence."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

import attngen
from attngen.conformance.oracle import relative_error
from attngen.errors import SpecError
from attngen.frontends.trace import TraceError
from attngen.frontends.tracer import OUTSIDE
from tests import flex_common
from tests.flex_common import DOC, D, Tensor, cumulative_score, lower_triangle
from tests.helpers import ROOT

cache = flex_common.cache  # a fixture


def test_errors_of_the_front_end_name_no_module_of_attngen() -> None:
    """A user can do nothing with the name of a module, so no text of a `raise` has one."""
    for path in (ROOT / "attngen" / "frontends").glob("*.py"):
        raised = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Raise)]
        texts = [
            x.value
            for node in raised
            for x in ast.walk(node)
            if isinstance(x, ast.Constant) and isinstance(x.value, str)
        ]
        assert not [text for text in texts if re.search(r"attngen\.[a-z_]+\.", text)], path


def _branching(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s if q_idx > 3 else -s


def _infinite(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.exp(torch.where(q_idx > 3, s, -math.inf))


def _no_condition(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx - kv_idx


def _a_condition(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s > 0


def _long_sum(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s + torch.ones(500).mul(q_idx).sum()


def _a_row(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s + torch.arange(3)


def _detached(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s - s.detach() / 2


def _sum_of_infinite(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(q_idx > 3, s, -math.inf).sum()


def _infinite_as_condition(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(torch.where(q_idx > 3, s, -math.inf).bool(), s, 0.0)


def _power(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s * 2 ** (-(h + 1))


def _rounded(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.round(s, decimals=2)


def _isin_many(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.isin(kv_idx, torch.arange(200))


def _changes_view(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    row = s.view(1)
    row += 1
    return s


def _changes_table(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    table = DOC
    table += 1
    return s + table[q_idx]


def _changes_type(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    h += 0.5
    return s + h


def _line(function: Any, further: int = 1) -> int:
    """A line of the function: the first one of its body by default."""
    return int(function.__code__.co_firstlineno) + further


def _place(function: Any, further: int = 1) -> str:
    return f"line {_line(function, further)} of {function.__code__.co_filename}"


@pytest.mark.parametrize(
    ("score", "mask", "sentence"),
    [
        (
            cumulative_score,
            None,
            f"score_mod `cumulative_score`, {_place(cumulative_score)}: `aten::cumsum` has no expression; "
            f"expected arithmetic, comparisons, `torch.where` and the like, or {OUTSIDE}",
        ),
        (
            _infinite,
            None,
            f"score_mod `_infinite`, {_place(_infinite)}: `aten::exp` computes with -inf; expected -inf as a side of "
            "`torch.where`, and only sums after that",
        ),
        (
            _detached,
            None,
            f"score_mod `_detached`, {_place(_detached)}: `aten::detach` stops a gradient, which expressions do not; "
            "expected a tensor that was detached outside of the function",
        ),
        *(
            (
                function,
                None,
                f"score_mod `{function.__name__}`, {_place(function)}: `aten::{operator}` computes with -inf; "
                "expected -inf as a side of `torch.where`, and only sums after that",
            )
            for function, operator in ((_sum_of_infinite, "sum"), (_infinite_as_condition, "_to_copy"))
        ),
        (
            _power,
            None,
            f"score_mod `_power`, {_place(_power)}: `aten::pow` of integers is an integer, so that `2 ** -3` is 0; "
            "expected a real base, as in `2.0 ** x`, or an exponent that is not negative",
        ),
        (None, _no_condition, "mask_mod `_no_condition` gives a number; expected a condition"),
        (_a_condition, None, "score_mod `_a_condition` gives a condition; expected a number"),
        (_a_row, None, "score_mod `_a_row` gives a tensor of shape [3]; expected a number"),
        (
            _long_sum,
            None,
            f"score_mod `_long_sum`, {_place(_long_sum)}: `aten::sum` reduces 500 elements; expected at most 128, "
            f"which are written out: {OUTSIDE}",
        ),
        (
            _rounded,
            None,
            f"score_mod `_rounded`, {_place(_rounded)}: `aten::round` has no expression with these arguments; "
            f"expected fewer, or {OUTSIDE}",
        ),
        (
            None,
            _isin_many,
            f"mask_mod `_isin_many`, {_place(_isin_many)}: `aten::isin` compares with 200 elements; "
            "expected at most 128, or a bool tensor that `torch.isin` made for all positions outside of the function, "
            "read at one",
        ),
        *(
            (
                function,
                None,
                f"score_mod `{function.__name__}`, {_place(function, further)}: `aten::add_` changes {what}, in place; "
                f"expected a new one, as in `x = x + {by}`",
            )
            for function, further, what, by in (
                (_changes_view, 2, "a view, or a tensor that has one", 1),
                (_changes_table, 2, "a captured tensor", 1),
                (_changes_type, 1, "the type or the shape of a tensor", 0.5),
            )
        ),
    ],
)
def test_refused_functions(score: Any, mask: Any, sentence: str) -> None:
    with pytest.raises(TraceError) as error:
        attngen.spec_from_mods(score, mask)
    assert str(error.value) == sentence


def test_a_branch_on_a_position_is_refused_in_one_sentence() -> None:
    with pytest.raises(TraceError) as error:
        attngen.spec_from_mods(_branching)
    reason = (
        "a number is taken out of a tensor, as by `if`, `and` and `int`; expected `torch.where`, `&`, or an index "
        "that is a tensor"
    )
    assert str(error.value) == f"score_mod `_branching`, line {_line(_branching)} cannot be traced: {reason}"


def test_values_kept_from_a_trace_cannot_be_used() -> None:
    kept: list[Tensor] = []
    attngen.spec_from_mods(None, lambda b, h, q_idx, kv_idx: kept.append(q_idx) or q_idx > kv_idx)
    with pytest.raises(RuntimeError, match="a position or a score is used after the function has ended"):
        kept[0] + 1


def test_refused_calls() -> None:
    q = torch.zeros(1, 4, 8, 16)
    for args, kwargs, sentence in (
        (
            (q, q[:, :2], q[:, :2]),
            {},
            "flex_attention: 4 query heads and 2 key heads without enable_gqa; expected as many, or enable_gqa=True",
        ),
        ((q[0], q, q), {}, "flex_attention: query has 3 dimensions; expected a tensor [B, H, N, D]"),
        (
            (q, q.half(), q.double()),
            {},
            "flex_attention: value is torch.float64; expected torch.bfloat16, torch.float16 or torch.float32",
        ),
        ((q, q, None), {}, "flex_attention: value is a NoneType; expected a tensor [B, H, N, D]"),
        ((q, q, q, 3), {}, "flex_attention: score_mod is a int; expected a function or None"),
        (
            (q, q, q, None, q),
            {},
            (
                "flex_attention: block_mask is a Tensor; expected a BlockMask, a function of (b, h, q_idx, kv_idx) "
                "or None"
            ),
        ),
        (
            (q, q, q),
            {"return_lse": True, "return_aux": AuxRequest(lse=True)},
            (
                "flex_attention: return_lse and return_aux are both given; expected one of them: "
                "AuxRequest(lse=True) means the same"
            ),
        ),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            attngen.flex_attention(*args, **kwargs)  # type: ignore[arg-type]
        assert str(error.value) == sentence


IDS, HEADS, ROWS = torch.arange(128) // 30, torch.arange(2.0), torch.zeros(2, 128, dtype=torch.int64)
READS: dict[str, Any] = {  # of score, batch, head, query and key, in calls of 2 sequences, 4 heads and 150 positions
    "a position": lambda s, b, h, q, k: s + IDS[k],
    "both positions": lambda s, b, h, q, k: torch.where(IDS[q] == IDS[k], s, 0.0),
    "the second dimension": lambda s, b, h, q, k: s + ROWS[b, q],
    "a head of a table of key heads": lambda s, b, h, q, k: s + HEADS[h],
    "a key head": lambda s, b, h, q, k: s + HEADS[h // 2],
    "a sequence": lambda s, b, h, q, k: s + HEADS[b],
    "a sequence of one": lambda s, b, h, q, k: s + ROWS[:1][b, 0],
    "a distance": lambda s, b, h, q, k: s + IDS[(q - k).abs()],
    "a distance that is clamped": lambda s, b, h, q, k: s + IDS[(q - k).clamp(-128, 127)],
    "a distance that is clamped beyond": lambda s, b, h, q, k: s + IDS[(q - k).clamp(-129, 127)],
    "a remainder": lambda s, b, h, q, k: s + IDS[(q + k) % 128],
    "blocks": lambda s, b, h, q, k: s + HEADS[q // 64],
    "fewer blocks": lambda s, b, h, q, k: s + HEADS[q // 75],
    "a number": lambda s, b, h, q, k: s + HEADS[2],
    "a negative number": lambda s, b, h, q, k: s + HEADS[-2],
    "a selected number": lambda s, b, h, q, k: s + HEADS.select(0, 1),
    "a view": lambda s, b, h, q, k: s + IDS[:100][q % 101],
    "the end of a view": lambda s, b, h, q, k: s + IDS[:100][-1] + IDS[3:][k % 2 - 2] + torch.arange(5)[-1],
    "what the function makes": lambda s, b, h, q, k: s + torch.arange(4)[h + 1],
    "where it does not count": lambda s, b, h, q, k: torch.where(k < 128, s + IDS[k], s),
    "each iteration": lambda s, b, h, q, k: s + IDS[torch.arange(4) * 40 + h].sum(),
    "fewer iterations": lambda s, b, h, q, k: s + IDS[torch.arange(3) * 40 + h].sum(),
}


@pytest.mark.share(16)
@pytest.mark.parametrize("name", READS)
def test_reads_out_of_bounds_are_refused_if_pytorch_refuses_them(name: str) -> None:
    """Other reads give PyTorch's results. Some of the tensors are shorter than the call in a dimension."""
    q, k, v = (torch.randn(2, 4, 150, D) for _ in range(3))
    found: list[Any] = []
    for call in (flex_attention, attngen.flex_attention):
        try:
            found.append(call(q, k, v, READS[name]))
        except IndexError as error:
            found.append(str(error))
    right, ours = found
    assert isinstance(right, str) == isinstance(ours, str), found
    if isinstance(right, str):
        assert ours.startswith(f"score_mod `<lambda>`, {_place(READS[name], 0)}: reads ")
        assert ours.endswith("; expected a tensor as long as the call, or an index inside of it")
    else:
        assert relative_error(ours, right) < 1e-5


@pytest.mark.share(4)
@pytest.mark.parametrize("n_q", [64, 128, 256])
@pytest.mark.parametrize("n_kv", [64, 128, 256])
@pytest.mark.parametrize("listed", [False, True])
def test_block_masks_are_for_calls_of_their_lengths(n_q: int, n_kv: int, listed: bool) -> None:
    """Other lengths are refused as in PyTorch, whether or not the lists say more than the function."""
    block_mask = create_block_mask(lower_triangle, None, None, n_q, n_kv, device="cpu", BLOCK_SIZE=64)
    if listed:
        lists = block_mask.kv_num_blocks, block_mask.kv_indices
        block_mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, seq_lengths=(n_q, n_kv))
    q, k, v = (torch.zeros(1, 1, 128, D) for _ in range(3))
    calls: list[Any] = [flex_attention, attngen.flex_attention]
    if (n_q, n_kv) == (128, 128):
        assert calls[0](q, k, v, block_mask=block_mask).equal(calls[1](q, k, v, block_mask=block_mask))
        return
    for call in calls:
        with pytest.raises(ValueError) as error:
            call(q, k, v, block_mask=block_mask)
    sentence = (
        f"flex_attention: block_mask is for {n_q} queries and {n_kv} keys, and the call has 128 and 128; expected "
        f"one that "
    )
    assert str(error.value).startswith(sentence + "`create_block_mask` made for these")
    assert ("_adjust" in str(error.value)) == (min(n_q, n_kv) >= 128)


@pytest.mark.share(16)
def test_a_block_mask_has_lists_for_the_sequences_heads_and_lengths_of_the_call() -> None:
    q = torch.zeros(3, 4, 128, D)

    def call(counts: Any, indices: Any, heads: int = 1, n: int = 128) -> Any:
        count, at = torch.tensor(counts, dtype=torch.int32), torch.tensor(indices, dtype=torch.int32)
        count, at = (x.expand(x.shape[0], heads, *x.shape[2:]).contiguous() for x in (count, at))
        mask = BlockMask.from_kv_blocks(count, at, BLOCK_SIZE=64, seq_lengths=(n, n), compute_q_blocks=False)
        return attngen.flex_attention(q, q, q, block_mask=mask)

    one, two = [[[1, 1]]], [[[[0, 1], [1, 0]]]]
    for heads in (1, 4):
        assert call(one, two, heads).shape == q.shape
    with pytest.raises(
        ValueError, match="has lists of blocks for 2 sequences, and the call has 3; expected as many, or one for all"
    ):
        call(one * 2, two * 2)
    with pytest.raises(
        ValueError, match="has lists of blocks for 2 heads, and the call has 4; expected as many, or one for all"
    ):
        call(one, two, 2)
    with pytest.raises(ValueError, match="block_mask lists 1 rows of blocks; expected 2, by its lengths"):
        call([[[1]]], [[[[0, 1]]]])
    with pytest.raises(
        ValueError, match="block_mask lists blocks beyond the last; expected numbers from 0 to 1, by its lengths"
    ):
        call(one, [[[[0, 1], [2, 0]]]])


def test_a_mask_that_hides_all_is_refused() -> None:
    with pytest.raises(SpecError, match="^the spec of `flex_lambda`: `mask` hides every key from every query"):
        attngen.spec_from_mods(None, lambda b, h, q, k: q < 0)
