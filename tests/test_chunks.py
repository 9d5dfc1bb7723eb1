"""Ranks whose calls have chunks of a sequence compute naive attention together: by the IR's executor, in float64.

Chunks are assigned to ranks at random. A rank has some chunks of the queries, and either all keys or some chunks of
them too, as in ring attention. Kernels are the portable ones and, in random orders of their warp groups, the
warp-specialized ones.
"""

from __future__ import annotations

import pytest

from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from tests.chunks import CASES, LISTED, compare, in_both_orders, lowered, warp_specialized
from tests.helpers import edit
from tests.transforms.equality import Unequal

WHOLE_ROWS = ("sink", "entropy")  # results that are not merged from those of some keys each
PUSHED = ("causal", "packed", "window", "many sinks")
# chunk, lengths; the last chunk is cut, rows are fewer or more than keys
SIZES = ((48, (100, 130)), (24, (57, 41)), (32, (17, 90)))
SINKS_SIZES = ((48, (100, 48)), (48, (50, 96)), (24, (57, 80)))  # fewer keys than sinks, in whole chunks
LISTED_SIZES = ((256, (300, 500)), (128, (390, 129)))
BLOCK_SIZES = ((64, (70, 200)), (128, (200, 300)))


def sizes_of(name: str) -> tuple[tuple[int, tuple[int, int]], ...]:
    sizes = {"blocks": BLOCK_SIZES, "many sinks": SINKS_SIZES}
    return LISTED_SIZES if name in LISTED else sizes.get(name, SIZES)


def check_portable(name: str) -> None:
    module = lowered(name)
    backwards = (False, True) if any(kernel.name == "bwd" for kernel in module.kernels) else (False,)
    for seed, (chunk, lengths) in enumerate(sizes_of(name)):
        for fused in backwards:
            compare(name, module, seed, chunk, lengths, fused=fused)
            if name not in WHOLE_ROWS:
                compare(name, module, seed, chunk, lengths, fused=fused, split_keys=True)


@pytest.mark.parametrize("name", PUSHED)
def test_portable_kernels_in_a_push(name: str) -> None:
    check_portable(name)


@pytest.mark.share(8)
@pytest.mark.parametrize("name", [name for name in CASES if name not in PUSHED])
def test_portable_kernels(name: str) -> None:
    check_portable(name)


def check_forward(name: str, kernel: str, seeds: int = 2) -> None:
    """Compare a forward whose instances have 8 rows each, or 16 if the mask has blocks."""
    module = warp_specialized(lowered(name, "hopper", 64), kernel)
    instances = max(block.warp_group.instances for block in module.kernel("fwd").warp_groups if block.warp_group)
    listed = name in LISTED or name == "blocks"
    chunk, lengths = sizes_of(name)[0]
    tiles = (32, 16) if listed else (8 * max(instances, 2), 8)
    for seed in range(seeds):
        split = seed % 2 == 1 and name not in WHOLE_ROWS
        compare(name, module, seed, chunk, lengths, tiles, split_keys=split, head_dim=64)


@pytest.mark.parametrize("kernel", ["fwd", "fwd_long"])
def test_warp_specialized_forwards_in_a_push(kernel: str) -> None:
    """Two and three instances: each skips tiles whose keys are all hidden from its rows."""
    (made,) = (k for k in lowered("causal", "hopper", 64).warp_specialized if k.name == kernel)
    assert any(getattr(op, "instance_partial", ()) for op in made.ops())
    check_forward("causal", kernel, seeds=4)


@pytest.mark.share(8)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("causal", "entropy")])
def test_warp_specialized_forwards(name: str) -> None:
    check_forward(name, "fwd")


SEPARATE = ("data", "blocks", "entropy", "relative bias", "of queries", "of keys", "of entries")
FUSED = [name for name in CASES if name not in SEPARATE]


def check_fused(name: str) -> None:
    module = warp_specialized(lowered(name, "hopper", 64), "bwd")
    if module.kernel("bwd").grid[0].reversed_group:
        module = in_both_orders(module)
    for seed, tiles in enumerate(((16, 8), (8, 24), (48, 16))):
        chunk, lengths = SIZES[0]
        split = seed % 2 == 1 and name not in WHOLE_ROWS
        compare(name, module, seed, chunk, lengths, tiles, fused=True, split_keys=split, head_dim=64)


def test_the_fused_backward_has_both_orders_of_heads_in_a_push() -> None:
    module = lowered("causal", "hopper", 64)
    (axis, *_) = next(k for k in module.warp_specialized if k.stands_for == "bwd").grid
    assert axis.reversed_group
    check_fused("causal")


@pytest.mark.share(8)
@pytest.mark.parametrize("name", [name for name in FUSED if name != "causal"])
def test_the_fused_backward(name: str) -> None:
    check_fused(name)


def test_a_position_that_is_taken_for_a_row_shows() -> None:
    """The comparison finds a kernel that masks by rows of the call, as in a module without positions."""
    head, at, kernels = print_module(lowered("causal")).partition("\nkernel @fwd")
    wrong = edit(kernels, ("where(kv_idx <= Nk - Nq + q_idx)", "where(kv_idx <= Rk - Rq + q_idx)"))
    with pytest.raises(Unequal):
        for seed in range(3):
            compare("causal", parse_module(head + at + wrong), seed, 48, (100, 130))
