"""Results of warp-specialized forwards are those of naive attention; warp groups run as coroutines in random orders."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from attngen.builders import build_module
from attngen.interp.host import execute
from attngen.interp.values import DOUBLE
from attngen.interp.warp_groups import Deadlock, WarpSpecializedLaunch
from attngen.ir import Module
from attngen.spec import Spec
from tests.hopper.common import WARP_SPECIALIZED, edited, hopper_spec, lowered
from tests.transforms.equality import Call, Unequal, must_be_equal, naive, with_many_queries


def with_warp_specialized_forward(module: Module) -> Module:
    """The module with its warp-specialized forward in place of the portable one."""
    return with_many_queries(replace(module, kernels=(*module.warp_specialized, *module.kernels[1:])))


def compare_with_naive(
    module: Module, name: str, seed: int, lengths: tuple[int, int] | None = None, of: Spec | None = None
) -> None:
    """Raise Unequal where results of the warp-specialized forward differ from naive attention.

    of: the spec, where it is not in specs/.
    """
    spec, chance = of or hopper_spec(name), random.Random(seed)
    call = Call.random(chance, spec, build_module(spec), lengths)
    data = module.blocks is not None and module.blocks.data
    instances = max(block.warp_group.instances for block in module.warp_specialized[0].warp_groups if block.warp_group)
    rows, keys = (chance.choice((8, 16)) * (4 if data else 1) for _ in range(2))
    call = replace(call, tiles={"BLOCK_Q": rows // 2 * max(instances, 2), "BLOCK_KV": keys})
    WarpSpecializedLaunch.chance = chance
    found = execute(with_warp_specialized_forward(module), call.of_module(spec), call.tiles, DOUBLE)
    expected = naive(spec, call)
    must_be_equal(found, {key: expected[key] for key in ("out", *spec.outputs)}, name)


@pytest.mark.share(16)
@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_results_are_those_of_naive_attention(name: str) -> None:
    for seed in range(6):
        compare_with_naive(lowered(name), name, seed)


@pytest.mark.share(16)
@pytest.mark.parametrize("lengths", [(1, 1), (17, 1), (1, 17), (33, 65), (65, 33), (0, 5), (5, 0)])
def test_ragged_sizes_and_empty_rows(lengths: tuple[int, int]) -> None:
    for name in ("causal_gqa", "window_gqa", "full_mha"):
        compare_with_naive(lowered(name), name, 1, lengths)


def test_a_tile_that_is_released_too_early_shows() -> None:
    """K is released before S is complete, so the product may read the next tile, or a stage that is not loaded yet."""
    made = edited(
        "full_mha",
        (
            "    %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n    consumer_release %k\n",
            "    consumer_release %k\n    %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n",
        ),
    )
    with pytest.raises(Unequal):
        for seed in range(20):
            compare_with_naive(made, "full_mha", seed, (20, 40))


def test_a_missing_release_stops_all_warp_groups() -> None:
    with pytest.raises(Deadlock, match="@fwd: consumer 0, consumer 1, consumer 2, producer 0 wait for ever"):
        compare_with_naive(edited("full_mha", ("    consumer_release %k\n", "")), "full_mha", 3, (20, 60))


def test_halves_that_are_concatenated_in_the_wrong_order_show() -> None:
    made = edited("full_mha", ("concat_halves %soft_left %soft_right", "concat_halves %soft_right %soft_left"))
    with pytest.raises(Unequal):
        compare_with_naive(made, "full_mha", 3, (20, 60))


def test_a_half_with_the_dropout_mask_of_the_other_half_shows() -> None:
    made = edited("causal_dropout_mqa", ("%soft_left keep(%keep_halves.left)", "%soft_left keep(%keep_halves.right)"))
    with pytest.raises(Unequal):
        compare_with_naive(made, "causal_dropout_mqa", 3, (20, 60))


def test_a_missing_arrival_at_the_scheduler_barrier_stops_all_warp_groups() -> None:
    with pytest.raises(Deadlock, match="@fwd: consumer 0, consumer 1, consumer 2, producer 0 wait for ever"):
        compare_with_naive(
            edited("full_mha", ("    scheduler_barrier arrive\n    %s = wgmma_wait", "    %s = wgmma_wait")),
            "full_mha",
            3,
            (20, 60),
        )


def test_partial_sums_that_are_not_rescaled_show() -> None:
    made = edited(
        "full_mha", ("%l_next_left = map expr(alpha*l + p_sum)", "%l_next_left = map expr(0*alpha + l + p_sum)")
    )
    with pytest.raises(Unequal):
        compare_with_naive(made, "full_mha", 3, (20, 60))


def test_an_accumulator_that_is_not_rescaled_shows() -> None:
    made = edited(
        "full_mha",
        (
            "%rescaled = map expr(acc*alpha) uses(acc=%acc_next",
            "%rescaled = map expr(acc + 0*alpha) uses(acc=%acc_next",
        ),
    )
    with pytest.raises(Unequal):
        compare_with_naive(made, "full_mha", 3, (20, 60))
