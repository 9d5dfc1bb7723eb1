"""The semaphore order of programs that accumulate to one tile: its formula equals a count, and a rule checks it."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from attngen.conformance.derive import derive
from attngen.errors import VerifyError
from attngen.ir import Kernel, Module, only, tile
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.ir.sizes import Sizes
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from attngen.tiles.order import first_first_order, last_first_order, order_by_direction
from attngen.tiles.tiles import evaluate, unbounded
from attngen.verify import verify
from tests.helpers import edit

Data = dict[str, np.ndarray]

BLOCK = 32  # rows and columns of a block of the block mask
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
RANDOM = 6  # calls of each size, for masks that depend on data
SIZES = [
    (n_q, n_kv, q, kv)
    for (n_q, n_kv), (q, kv) in product(
        [(1, 1), (17, 90), (90, 17), (128, 128), (129, 127), (150, 200)], [(16, 16), (16, 32), (32, 16)]
    )
]


@cache
def spec_of(mask: str) -> Spec:
    return make_spec({"name": "fused", "head_dim": 128, "mask": MASKS[mask]})


@cache
def made(mask: str, stage: str | None = None) -> Module:
    return lower(spec_of(mask), stage)


def fused(mask: str) -> Kernel:
    return next(kernel for kernel in made(mask, "dce").kernels if kernel.traits.adds_in_order)


def some_data(mask: str, generator: torch.Generator, n_q: int, n_kv: int) -> Data:
    """Return the tensors that kernels load in a random call: lengths, spans of visible keys, document bounds."""
    asked, sizes = spec_of(mask), Sizes(1, 1, 1, n_q, n_kv)
    given = asked.mask.sample(sizes, generator)
    if "kv_lengths" in given and torch.rand((), generator=generator) < 0.3:  # no key is past its sequence's end
        given["kv_lengths"] = torch.full_like(given["kv_lengths"], 2**31 - 1)
    tensors = given | derive(asked, sizes, given, "cpu")
    if asked.mask.blocks():
        tensors["blocks"] = torch.rand((-(-n_q // BLOCK), -(-n_kv // BLOCK)), generator=generator) < 0.6
    return {name.upper(): x.numpy() for name, x in tensors.items() if isinstance(x, torch.Tensor)}


def read(kernel: Kernel, numbers: dict[str, Any], data: Data) -> dict[str, Any]:
    """Return the scalars that a program loads at its start, together with the given ones."""
    found = {**unbounded(kernel), **numbers, "b": 0}
    for op in kernel.ops():
        if isinstance(op, tile.Load) and not op.type.dims:
            found[op.name] = int(data[op.src.tensor][tuple(int(evaluate(e, found)) for e in op.src.index)])
    return found


def counted(kernel: Kernel, numbers: dict[str, Any], data: Data) -> dict[str, Any]:
    """Add the results of the loop body's `count_tiles` and `list_position`: the number of tiles whose loop starts at
    `most` or before, and the number of listed tiles before `tile`."""
    ops = list(only(kernel.block("step").ops, tile.CountTiles, tile.ListPosition))
    for op in ops:
        if isinstance(op, tile.CountTiles):
            found = int((data[op.src.tensor][..., :: numbers["BLOCK_KV"]] <= evaluate(op.most, numbers)).sum())
        else:
            tiles = range(int(evaluate(op.tile, numbers)))
            found = sum(is_visible(data, numbers["q_start"], number * numbers["BLOCK_KV"]) for number in tiles)
        numbers = numbers | {op.name: found}
    return numbers


def is_visible(data: Data, q_start: int, kv_start: int) -> bool:
    """Return whether the block mask keeps the block that holds the tile."""
    return "BLOCKS" not in data or bool(data["BLOCKS"][q_start // BLOCK, kv_start // BLOCK])


def visits(kernel: Kernel, sizes: dict[str, int], data: Data) -> set[tuple[int, int]]:
    """Return (first query, first key) of every pair of tiles that the kernel's loops visit."""
    found = set()
    for start in range(0, sizes["Nk"], sizes["BLOCK_KV"]):
        numbers = read(kernel, {**sizes, "kv_start": start}, data)
        for loop in kernel.loops:
            for lo, hi in loop.ranges:
                tiles = range(*(int(evaluate(kernel.resolve(bound), numbers)) for bound in (lo, hi)))
                found |= {
                    (first, start)
                    for first in (tile * sizes["BLOCK_Q"] for tile in tiles)
                    if is_visible(data, first, start)
                }
    return found


@pytest.mark.share(32)
@pytest.mark.parametrize("mask", MASKS)
def test_the_order_is_the_number_of_later_key_tiles_that_add_to_the_same_tile(mask: str) -> None:
    kernel, generator = fused(mask), torch.Generator().manual_seed(0)
    (order,) = (op.order for op in only(kernel.ops(), tile.OrderedAdd))
    found = last_first_order(made(mask, "dce"), kernel)
    reversed_group = first_first_order(made(mask, "dce"), kernel) if kernel.grid[0].reversed_group else None
    assert found is not None and order == order_by_direction(reversed_group and reversed_group.expr, found.expr)
    directions = (0, 1) if kernel.grid[0].reversed_group else (0,)
    for n_q, n_kv, block_q, block_kv in SIZES * (
        RANDOM if spec_of(mask).mask.inputs() or spec_of(mask).mask.blocks() else 1
    ):
        sizes = {"Nq": n_q, "Nk": n_kv, "BLOCK_Q": block_q, "BLOCK_KV": block_kv}
        data = some_data(mask, generator, n_q, n_kv)
        met = visits(kernel, sizes, data)
        for (q_start, kv_start), direction in product(met, directions):
            place = {**sizes, "q_start": q_start, "kv_start": kv_start, "reversed_L2_group": direction}
            numbers = counted(kernel, read(kernel, place, data), data)
            before = range(kv_start) if direction else range(kv_start + 1, n_kv)
            assert evaluate(order, numbers) == sum((q_start, other) in met for other in before), (
                sizes,
                q_start,
                kv_start,
                direction,
            )


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ({"expr": "kv_idx + q_idx <= q_len"}, "its loops end earlier for later keys"),
        (
            {"expr": "kv_idx >= starts[b, q_idx]", "params": {"starts": {"tensor": ["B", "Nq"], "dtype": "int32"}}},
            "the tensor is not declared to rise",
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
def test_without_a_formula_there_is_no_fused_backward(mask: Any, reason: str) -> None:
    module = lower(make_spec({"name": "separate", "head_dim": 128, "mask": mask}))
    assert [kernel.name for kernel in module.kernels if kernel.traits.adds_in_order] == [], reason


@pytest.mark.share(16)
def test_a_backward_that_need_not_be_deterministic_has_the_same_semaphore_order() -> None:
    specs = (
        {"name": "free", "head_dim": 128, "mask": "causal", "backward": {"deterministic": deterministic}}
        for deterministic in (False, True)
    )
    made = [lower(make_spec(spec)) for spec in specs]
    adds = [
        [op for kernel in (*m.kernels, *m.warp_specialized) for op in only(kernel.ops(), tile.OrderedAdd)] for m in made
    ]
    assert len(adds[0]) == 2 and adds[0] == adds[1]


# ---------------------------------------------------------------------------------------------- the rule

ORDER = "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)"
REFUSED = {
    "the first tile first": (
        ORDER,
        "order(kv_start // BLOCK_KV)",
        (
            r"`semaphore-order`: kernel @bwd: %_ordered_add_\d+ has the order `kv_start // BLOCK_KV`; expected "
            r"`cdiv\(Nk, BLOCK_KV\) - "
        ),
    ),
    "an order that no program has": (
        ORDER,
        ORDER.replace("- 1)", "+ 1)"),
        "`semaphore-order`: .* the number of programs that come before",
    ),
    "a grid that starts with the first tiles": (
        "grid(kv in cdiv(Nk, BLOCK_KV) reversed swizzle_rows(16384), h",
        "grid(kv in cdiv(Nk, BLOCK_KV) swizzle_rows(16384), h",
        "`semaphore-order`: .* expected a grid that starts with kv, reversed",
    ),
    "an order without a semaphore": (
        f" semaphore(%dQ_SEMAPHORE[b, h, q_start]) {ORDER}",
        f" {ORDER}",
        "`signature`: .*nothing is stored to %dQ_SEMAPHORE",
    ),
    "a semaphore without an order": (
        f" {ORDER}",
        "",
        "`types`: .* adds in no fixed order; expected a semaphore, and an order",
    ),
    "a semaphore in another tensor": (
        "semaphore(%dQ_SEMAPHORE[b, h, q_start])",
        "semaphore(%LSE2[b, h, q_start])",
        "`signature`: .*nothing is stored to %dQ_SEMAPHORE",
    ),
    "an order that is no integer": (
        ORDER,
        "order(0.5)",
        "`types`: .*has an order, or an index of its semaphore, that is no integer",
    ),
    "sums that are only written": ("%dQ_SEMAPHORE = arg sum", "%dQ_SEMAPHORE = arg out", "`(signature|types)`: .*"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_wrong_order_is_refused(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    head, at, kernels = print_module(made("none")).partition("\nkernel @bwd program_axis")
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(parse_module(head + at + edit(kernels, (old, new))))


REVERSED_GROUP = {
    "a grid without grouped heads": (
        "reversed swizzle_rows(16384) reversed_group",
        "reversed reversed_group",
        "`signature`: .*the grid axis kv has reversed_group; expected swizzle_rows, and a kernel with ordered adds",
    ),
    "one order for both directions": (
        "select(reversed_L2_group > 0, (kv_start // BLOCK_KV), ",
        "max(0, ",
        "`semaphore-order`: .*the number of programs that come before",
    ),
    "an order that no head has": (
        "order(select(reversed_L2_group > 0, (kv_start // BLOCK_KV)",
        "order(select(reversed_L2_group > 0, (kv_start // BLOCK_KV) + 1",
        "`semaphore-order`: .*the number of programs that come before",
    ),
    "a grid without reversed_group": (
        "swizzle_rows(16384) reversed_group",
        "swizzle_rows(16384)",
        "`types`: .*has an order, or an index of its semaphore, that is no integer",
    ),
}


@pytest.mark.parametrize("mistake", REVERSED_GROUP)
def test_a_wrong_order_in_a_reversed_group_is_refused(mistake: str) -> None:
    old, new, reason = REVERSED_GROUP[mistake]
    head, at, kernels = print_module(made("causal", "dce")).partition("\nkernel @bwd program_axis")
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(parse_module(head + at + edit(kernels, (old, new))))


@pytest.mark.share(16)
@pytest.mark.parametrize("mask", ["none", "streaming"])
def test_a_grid_has_a_reversed_group_only_where_loops_start_later_and_the_number_of_ended_loops_is_known(
    mask: str,
) -> None:
    text = print_module(made(mask, "dce"))
    head, at, kernels = text.partition("\nkernel @bwd program_axis")
    order = kernels.partition(" order(")[2].partition(")\n")[0]
    reversed_group = edit(
        kernels,
        ("swizzle_rows(16384)", "swizzle_rows(16384) reversed_group"),
        (f"order({order})", f"order(select(reversed_L2_group > 0, (kv_start // BLOCK_KV), {order}))"),
    )
    assert parse_module(head + at + reversed_group).kernel("bwd").grid[0].reversed_group
    with pytest.raises(
        VerifyError,
        match="rule `semaphore-order`: .*its grid has reversed_group along kv; expected loops that start later",
    ):
        verify(parse_module(head + at + reversed_group))


COUNTED = {
    "tiles that start later": (
        "most(BLOCK_Q + q_start - 1)",
        "most(BLOCK_Q + q_start)",
        (
            "`semaphore-order`: .*%document_q_first_count counts tiles that start at `BLOCK_Q \\+ q_start` at most "
            "in %DOCUMENT_Q_FIRST\\[kv\\], "
        ),
    ),
    "numbers that may fall": (
        "document_q_first[Nk] rising",
        "document_q_first[Nk]",
        "`(extremes|semaphore-order)`: .*",
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
    "a second count": (
        "    %document_q_first_count = count_tiles",
        (
            "    %odd_count = count_tiles %DOCUMENT_Q_END[kv] most(0) : i32[] @reg\n"
            "    %document_q_first_count = count_tiles"
        ),
        (
            "`semaphore-order`: .*%odd_count counts tiles that start at `0` at most in %DOCUMENT_Q_END\\[kv\\], "
            "which is in no order"
        ),
    ),
    "no count": (
        "    %document_q_first_count = count_tiles %DOCUMENT_Q_FIRST[kv] most(BLOCK_Q + q_start - 1) : i32[] @reg\n",
        "",
        "`types`: .*has an order, or an index of its semaphore, that is no integer",
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
    "the program's tile among the earlier ones": (
        "tile((kv_start // BLOCK_KV) + 1)",
        "tile(kv_start // BLOCK_KV)",
        (
            r"`semaphore-order`: .*%kv_next_at is the position of the tile `kv_start // BLOCK_KV` in %KV_RANK_row, "
            r"which is in no order"
        ),
    ),
    "an end before that of the loops": (
        "%kv_end_at = list_position %KV_RANK_row tile(cdiv(Nk, BLOCK_KV))",
        "%kv_end_at = list_position %KV_RANK_row tile(Nk // BLOCK_KV)",
        (
            r"`semaphore-order`: .*%kv_end_at is the position of the tile `Nk // BLOCK_KV` in %KV_RANK_row, which is "
            r"in no order"
        ),
    ),
    "the list of the program's tile": (
        ROW,
        f"base %Q_RANK[b, h, kv_start // {BLOCK}]",
        rf"`semaphore-order`: .*%KV_RANK_row points to %Q_RANK\[b, h, kv_start // {BLOCK}\], which is in no order",
    ),
    "the list of another tile": (
        ROW,
        f"base %KV_RANK[b, h, kv_start // {BLOCK}]",
        "`indexing`: .*%KV_RANK_row indexes Tq of %KV_RANK by",
    ),
    "an order among all tiles": (
        "order(kv_end_at - kv_next_at)",
        ORDER,
        r"`semaphore-order`: .*; expected `kv_end_at - kv_next_at`, the number of programs that come",
    ),
    "the number of all listed tiles": (
        "order(kv_end_at - kv_next_at)",
        "order(kv_end_at)",
        "`semaphore-order`: .*the number of programs that come before",
    ),
}


@pytest.mark.parametrize("mistake", LISTED)
def test_a_wrong_order_among_listed_tiles_is_refused(mistake: str) -> None:
    old, new, reason = LISTED[mistake]
    head, at, kernels = print_module(made("blocks", "dce")).partition("\nkernel @bwd program_axis")
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(parse_module(head + at + edit(kernels, (old, new))))


def test_heads_have_no_reversed_group_where_tiles_are_listed() -> None:
    """Of the earlier tiles, too, only the listed ones are visited, so a tile's number is not its order."""
    text = print_module(made("blocks, causal", "dce"))
    head, at, kernels = text.partition("\nkernel @bwd program_axis")
    order = "order(select(reversed_L2_group > 0, (kv_start // BLOCK_KV), kv_end_at - kv_next_at))"
    reversed_group = edit(
        kernels, ("swizzle_rows(32768)", "swizzle_rows(32768) reversed_group"), ("order(kv_end_at - kv_next_at)", order)
    )
    with pytest.raises(
        VerifyError,
        match="rule `semaphore-order`: .*its grid has reversed_group along kv; expected loops that start later",
    ):
        verify(parse_module(head + at + reversed_group))
