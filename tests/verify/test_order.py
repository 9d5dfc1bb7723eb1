"""Turns of programs that add to one tile: the formula against a count, and the rule that holds it."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from attngen.conformance.derive import derive
from attngen.errors import VerifyError
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import CountTiles, ListPosition, Load, OrderedAdd
from attngen.ir.sizes import Sizes
from attngen.ir.text import parse_module, print_module
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from attngen.tiles.order import either_way, first_first, last_first
from attngen.tiles.tiles import evaluate, unbounded
from attngen.verify import verify
from tests.helpers import edit

Data = dict[str, np.ndarray]

BLOCK = 32  # rows of listed blocks
MASKS: dict[str, Any] = {
    "none": "none",
    "causal": "causal",
    "ahead": {"expr": "kv_idx <= q_idx + 5"},
    "behind": {"expr": "kv_idx + 70 <= q_idx + kv_len - q_len"},
    "window": {"sliding_window": {"left": 40, "right": 0}},
    "both sides": {"sliding_window": {"left": 40, "right": 20}},
    "chunked": {"chunked": {"size": 48}},
    "chunks from 20 before": {"all_of": ["causal", {"expr": "q_pos // 48 <= (kv_idx + 20) // 48"}]},
    "chunks from 130 on": {"all_of": ["causal", {"expr": "q_pos // 48 <= (kv_idx - 130) // 48 + 3"}]},
    "padded window": {"all_of": [{"sliding_window": {"left": 40, "right": 0}}, "key_padding"]},
    "first keys": {"any_of": ["causal", {"expr": "kv_idx < 16"}]},
    "streaming": {"all_of": ["causal", {"any_of": [{"sliding_window": {"left": 9}}, {"sink_tokens": {"count": 4}}]}]},
    "more first keys": {"any_of": [{"sliding_window": {"left": 20, "right": 9}}, {"sink_tokens": {"count": 35}}]},
    "prefix": {"prefix_lm": {"length": 50}},
    "prefixes": {"prefix_lm": {"per": "batch"}},
    "lengths": {"all_of": ["causal", {"key_padding": {"lengths": True}}]},
    "padding": "key_padding",
    "documents": {"all_of": ["causal", "document"]},
    "sorted": {"document": {"sorted": True}},
    "packed": {"document": {"packed": True}},
    "packed, causal": {"document": {"packed": True, "causal": True}},
    "packed in a window": {"all_of": [{"document": {"packed": True}}, {"sliding_window": {"left": 40, "right": 20}}]},
    "blocks": {"block_sparse": {"block": BLOCK}},
    "blocks, causal": {"all_of": ["causal", {"block_sparse": {"block": BLOCK}}]},
    "blocks in a window": {
        "all_of": [{"sliding_window": {"left": 40, "right": 20}}, {"block_sparse": {"block": BLOCK}}]
    },
    "blocks of packed": {
        "all_of": [{"document": {"packed": True, "causal": True}}, {"block_sparse": {"block": BLOCK}}]
    },
}
RANDOM = 6  # calls of each size, where data says what a query sees
SIZES = [
    (n_q, n_kv, q, kv)
    for (n_q, n_kv), (q, kv) in product(
        [(1, 1), (17, 90), (90, 17), (128, 128), (129, 127), (150, 200)], [(16, 16), (16, 32), (32, 16)]
    )
]


@cache
def spec_of(mask: str) -> Spec:
    return make_spec({"name": "one_pass", "head_dim": 128, "mask": MASKS[mask]})


@cache
def made(mask: str, stage: str | None = None) -> Module:
    return lower(spec_of(mask), stage)


def fused(mask: str) -> Kernel:
    return next(kernel for kernel in made(mask, "dce").kernels if kernel.adds)


def some_data(mask: str, generator: torch.Generator, n_q: int, n_kv: int) -> Data:
    """What kernels read of random inputs of a call: lengths, the span of keys that count, where documents lie."""
    asked, sizes = spec_of(mask), Sizes(1, 1, 1, n_q, n_kv)
    given = asked.mask.sample(sizes, generator)
    if "kv_lengths" in given and torch.rand((), generator=generator) < 0.3:  # all keys count
        given["kv_lengths"] = torch.full_like(given["kv_lengths"], 2**31 - 1)
    tensors = given | derive(asked, sizes, given, "cpu")
    if asked.mask.blocks():
        tensors["blocks"] = torch.rand((-(-n_q // BLOCK), -(-n_kv // BLOCK)), generator=generator) < 0.6
    return {name.upper(): x.numpy() for name, x in tensors.items() if isinstance(x, torch.Tensor)}


def read(kernel: Kernel, numbers: dict[str, Any], data: Data) -> dict[str, Any]:
    """The numbers that a program reads at its start, beside those that it knows."""
    found = {**unbounded(kernel), **numbers, "b": 0}
    for op in kernel.ops():
        if isinstance(op, Load) and not op.type.dims:
            found[op.name] = int(data[op.src.tensor][tuple(int(evaluate(e, found)) for e in op.src.index)])
    return found


def counted(kernel: Kernel, numbers: dict[str, Any], data: Data) -> dict[str, Any]:
    """And how many tiles start where data says, up to the tile of queries that it is at; and how many of the first
    ones it lists."""
    ops = [op for op in kernel.block("step").ops if isinstance(op, (CountTiles, ListPosition))]
    for op in ops:
        if isinstance(op, CountTiles):
            found = int((data[op.src.tensor][..., :: numbers["BLOCK_KV"]] <= evaluate(op.most, numbers)).sum())
        else:
            tiles = range(int(evaluate(op.tile, numbers)))
            found = sum(counts(data, numbers["q_start"], tile * numbers["BLOCK_KV"]) for tile in tiles)
        numbers = numbers | {op.name: found}
    return numbers


def counts(data: Data, q_start: int, kv_start: int) -> bool:
    """Whether the mask of blocks shows the block that has a tile."""
    return "BLOCKS" not in data or bool(data["BLOCKS"][q_start // BLOCK, kv_start // BLOCK])


def visits(kernel: Kernel, sizes: dict[str, int], data: Data) -> set[tuple[int, int]]:
    """The first rows of all tiles of queries and of keys that meet in the kernel's loops."""
    found = set()
    for start in range(0, sizes["Nk"], sizes["BLOCK_KV"]):
        numbers = read(kernel, {**sizes, "kv_start": start}, data)
        for loop in kernel.loops:
            for lo, hi in loop.ranges:
                tiles = range(*(int(evaluate(kernel.resolve(bound), numbers)) for bound in (lo, hi)))
                found |= {
                    (first, start)
                    for first in (tile * sizes["BLOCK_Q"] for tile in tiles)
                    if counts(data, first, start)
                }
    return found


@pytest.mark.parametrize("mask", MASKS)
def test_a_turn_is_how_many_later_tiles_come_to_the_same_tile(mask: str) -> None:
    kernel, generator = fused(mask), torch.Generator().manual_seed(0)
    (turn,) = (op.order for op in kernel.ops() if isinstance(op, OrderedAdd))
    found = last_first(made(mask, "dce"), kernel)
    reversed_group = first_first(made(mask, "dce"), kernel) if kernel.grid[0].reversed_group else None
    assert found is not None and turn == either_way(reversed_group, found.expr)
    ways = (0, 1) if kernel.grid[0].reversed_group else (0,)
    for n_q, n_kv, block_q, block_kv in SIZES * (
        RANDOM if spec_of(mask).mask.inputs() or spec_of(mask).mask.blocks() else 1
    ):
        sizes = {"Nq": n_q, "Nk": n_kv, "BLOCK_Q": block_q, "BLOCK_KV": block_kv}
        data = some_data(mask, generator, n_q, n_kv)
        met = visits(kernel, sizes, data)
        for (q_start, kv_start), way in product(met, ways):
            place = {**sizes, "q_start": q_start, "kv_start": kv_start, "mirrored": way}
            numbers = counted(kernel, read(kernel, place, data), data)
            before = range(kv_start) if way else range(kv_start + 1, n_kv)
            assert evaluate(turn, numbers) == sum((q_start, other) in met for other in before), (
                sizes,
                q_start,
                kv_start,
                way,
            )


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ({"expr": "kv_idx + q_idx <= q_len"}, "its loops end earlier for later keys"),
        (
            {"expr": "kv_idx >= starts[b, q_idx]", "params": {"starts": {"tensor": ["B", "Nq"], "dtype": "int32"}}},
            "nobody says that the tensor's numbers rise",
        ),
        ({"any_of": [{"sliding_window": {"left": 9, "right": 0}}, {"expr": "q_idx < 4"}]}, "two ranges"),
        (
            {"any_of": [{"sliding_window": {"left": 9, "right": 0}}, {"expr": "kv_idx >= kv_len - 4"}]},
            "the last keys have another end",
        ),
        (
            {
                "any_of": [
                    {"all_of": [{"expr": "q_idx >= kv_idx + 30"}, {"expr": "q_idx <= kv_idx + 60"}]},
                    {"sink_tokens": {"count": 4}},
                ]
            },
            "the window may have ended before the last keys, which is not solved",
        ),
        (
            {"any_of": [{"all_of": ["causal", {"expr": "q_idx >= kv_idx + 7"}]}, {"expr": "kv_idx >= 50"}]},
            "loops start earlier for some later keys",
        ),
    ],
)
def test_without_a_formula_there_is_no_kernel_in_one_pass(mask: Any, reason: str) -> None:
    module = lower(make_spec({"name": "apart", "head_dim": 128, "mask": mask}))
    assert [kernel.name for kernel in module.kernels if kernel.adds] == [], reason


def test_there_are_turns_even_if_no_order_is_asked_for() -> None:
    specs = (
        {"name": "free", "head_dim": 128, "mask": "causal", "backward": {"deterministic": order}}
        for order in (False, True)
    )
    made = [lower(make_spec(spec)) for spec in specs]
    adds = [
        [op for kernel in (*m.kernels, *m.warp_specialized) for op in kernel.ops() if isinstance(op, OrderedAdd)]
        for m in made
    ]
    assert len(adds[0]) == 2 and adds[0] == adds[1]


# ---------------------------------------------------------------------------------------------- the rule

TURN = "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)"
REFUSED = {
    "the first tile first": (
        TURN,
        "order(kv_start // BLOCK_KV)",
        r"`turns`: kernel @bwd: %ordered_add_\d+ has the turn `kv_start // BLOCK_KV`; expected `cdiv\(Nk, BLOCK_KV\) - ",
    ),
    "a turn that nobody has": (TURN, TURN.replace("- 1)", "+ 1)"), "`turns`: .* as many as come there before"),
    "a grid that starts with the first tiles": (
        "grid(kv in cdiv(Nk, BLOCK_KV) reversed swizzle_rows(16384), h",
        "grid(kv in cdiv(Nk, BLOCK_KV) swizzle_rows(16384), h",
        "`turns`: .* expected the grid to start with these, descending",
    ),
    "a turn without a place": (
        f" semaphore(%DQ_SEMAPHORE[b, h, q_start]) {TURN}",
        f" {TURN}",
        "`signature`: .*nothing is stored to %DQ_SEMAPHORE",
    ),
    "a place without a turn": (f" {TURN}", "", "`types`: .* adds as it comes; expected turns, and a turn"),
    "turns of another tensor": (
        "semaphore(%DQ_SEMAPHORE[b, h, q_start])",
        "semaphore(%LSE2[b, h, q_start])",
        "`signature`: .*nothing is stored to %DQ_SEMAPHORE",
    ),
    "a turn that is no integer": (TURN, "order(0.5)", "`types`: .*has a turn, or a place of turns, that is no integer"),
    "sums that are only written": ("%DQ_SEMAPHORE = arg sum", "%DQ_SEMAPHORE = arg out", "`(signature|types)`: .*"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_wrong_turn_is_refused(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    head, at, kernels = print_module(made("none")).partition("\nkernel @bwd program_axis")
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(parse_module(head + at + edit(kernels, (old, new))))


REVERSED_GROUP = {
    "a grid without heads that go together": (
        "reversed swizzle_rows(16384) reversed_group",
        "reversed reversed_group",
        "`signature`: .*the grid axis kv is mirrored; expected that of a kernel that adds, with heads that are taken together",
    ),
    "one turn for both ways": (
        "select(mirrored > 0, (kv_start // BLOCK_KV), ",
        "max(0, ",
        "`turns`: .*as many as come there before",
    ),
    "a turn that no head has": (
        "order(select(mirrored > 0, (kv_start // BLOCK_KV)",
        "order(select(mirrored > 0, (kv_start // BLOCK_KV) + 1",
        "`turns`: .*as many as come there before",
    ),
    "a grid that is not mirrored": (
        "swizzle_rows(16384) reversed_group",
        "swizzle_rows(16384)",
        "`types`: .*has a turn, or a place of turns, that is no integer",
    ),
}


@pytest.mark.parametrize("mistake", REVERSED_GROUP)
def test_a_wrong_mirror_is_refused(mistake: str) -> None:
    old, new, reason = REVERSED_GROUP[mistake]
    head, at, kernels = print_module(made("causal", "dce")).partition("\nkernel @bwd program_axis")
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(parse_module(head + at + edit(kernels, (old, new))))


@pytest.mark.parametrize("mask", ["none", "streaming"])
def test_a_grid_is_mirrored_only_where_loops_start_later_and_it_is_known_how_many_have_ended(mask: str) -> None:
    text = print_module(made(mask, "dce"))
    head, at, kernels = text.partition("\nkernel @bwd program_axis")
    turn = kernels.partition(" order(")[2].partition(")\n")[0]
    reversed_group = edit(
        kernels,
        ("swizzle_rows(16384)", "swizzle_rows(16384) reversed_group"),
        (f"order({turn})", f"order(select(mirrored > 0, (kv_start // BLOCK_KV), {turn}))"),
    )
    assert parse_module(head + at + reversed_group).kernel("bwd").grid[0].reversed_group
    with pytest.raises(
        VerifyError, match="rule `turns`: .*its grid is mirrored along kv; expected loops that start later"
    ):
        verify(parse_module(head + at + reversed_group))


COUNTED = {
    "tiles that start later": (
        "most(BLOCK_Q + q_start - 1)",
        "most(BLOCK_Q + q_start)",
        "`turns`: .*%document_q_first_count counts tiles that start at `BLOCK_Q \\+ q_start` at most in %DOCUMENT_Q_FIRST\\[kv\\], ",
    ),
    "numbers that may fall": (
        "document_q_first[Nk] rising",
        "document_q_first[Nk]",
        "`(extremes|turns)`: .*",
    ),
    "tiles of the other axis": (
        "count_tiles %DOCUMENT_Q_FIRST[kv]",
        "count_tiles %DOCUMENT_Q_FIRST[q]",
        "`.*`: .*counted in a row of an input of i32 along kv",
    ),
    "a number that is no integer": (
        "most(BLOCK_Q + q_start - 1)",
        "most(0.5)",
        "`types`: .*counts up to `0.5`, which is no integer",
    ),
    "a count beside": (
        "    %document_q_first_count = count_tiles",
        "    %odd_count = count_tiles %DOCUMENT_Q_END[kv] most(0) : i32[] @reg\n    %document_q_first_count = count_tiles",
        "`turns`: .*%odd_count counts tiles that start at `0` at most in %DOCUMENT_Q_END\\[kv\\], of which no turn is made",
    ),
    "no count": (
        "    %document_q_first_count = count_tiles %DOCUMENT_Q_FIRST[kv] most(BLOCK_Q + q_start - 1) : i32[] @reg\n",
        "",
        "`types`: .*has a turn, or a place of turns, that is no integer",
    ),
}


@pytest.mark.parametrize("mistake", COUNTED)
def test_a_wrong_count_is_refused(mistake: str) -> None:
    old, new, reason = COUNTED[mistake]
    text = print_module(made("packed, causal", "dce"))
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(parse_module(edit(text, (old, new))))


ROW = f"base %KV_RANK[b, h, q_start // {BLOCK}]"
LISTED = {
    "the own tile among those before": (
        "tile((kv_start // BLOCK_KV) + 1)",
        "tile(kv_start // BLOCK_KV)",
        r"`turns`: .*%kv_next_at is the position of the tile `kv_start // BLOCK_KV` in %KV_RANK_row, of which no turn is made",
    ),
    "an end before that of the loops": (
        "%kv_end_at = list_position %KV_RANK_row tile(cdiv(Nk, BLOCK_KV))",
        "%kv_end_at = list_position %KV_RANK_row tile(Nk // BLOCK_KV)",
        r"`turns`: .*%kv_end_at is the position of the tile `Nk // BLOCK_KV` in %KV_RANK_row, of which no turn is made",
    ),
    "the list of the own tile": (
        ROW,
        f"base %Q_RANK[b, h, kv_start // {BLOCK}]",
        rf"`turns`: .*%KV_RANK_row points to %Q_RANK\[b, h, kv_start // {BLOCK}\], of which no turn is made",
    ),
    "the list of another tile": (
        ROW,
        f"base %KV_RANK[b, h, kv_start // {BLOCK}]",
        "`indexing`: .*%KV_RANK_row indexes Tq of %KV_RANK by",
    ),
    "a turn among all tiles": (
        "order(kv_end_at - kv_next_at)",
        TURN,
        r"`turns`: .*; expected `kv_end_at - kv_next_at`, as many as come",
    ),
    "all that are listed": (
        "order(kv_end_at - kv_next_at)",
        "order(kv_end_at)",
        "`turns`: .*as many as come there before",
    ),
}


@pytest.mark.parametrize("mistake", LISTED)
def test_a_wrong_turn_among_listed_tiles_is_refused(mistake: str) -> None:
    old, new, reason = LISTED[mistake]
    head, at, kernels = print_module(made("blocks", "dce")).partition("\nkernel @bwd program_axis")
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(parse_module(head + at + edit(kernels, (old, new))))


def test_heads_are_not_mirrored_where_tiles_are_listed() -> None:
    """Of earlier tiles, too, only those come that are listed."""
    text = print_module(made("blocks, causal", "dce"))
    head, at, kernels = text.partition("\nkernel @bwd program_axis")
    turn = "order(select(mirrored > 0, (kv_start // BLOCK_KV), kv_end_at - kv_next_at))"
    reversed_group = edit(
        kernels, ("swizzle_rows(32768)", "swizzle_rows(32768) reversed_group"), ("order(kv_end_at - kv_next_at)", turn)
    )
    with pytest.raises(
        VerifyError, match="rule `turns`: .*its grid is mirrored along kv; expected loops that start later"
    ):
        verify(parse_module(head + at + reversed_group))
