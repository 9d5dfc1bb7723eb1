"""Two dQ reduction warps: the pass split-dq-reduction, IR that is refused, the protocol between warp groups, and the
generated code."""

from __future__ import annotations

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.verify import verify
from attngen.verify.automata import Protocol, Step, TileLoop, WarpGroupSteps
from attngen.verify.machine import violation
from tests.hopper.fused_backward import after_passes, backward, changed, edited, lines, lowered


def test_a_dq_reduction_warp_adds_every_second_tile_and_acquires_the_semaphore_first() -> None:
    removed, added = changed("wide", "ping-pong", "split-dq-reduction", "write")
    assert (removed, added) == (
        [],
        ["semaphore_acquire %dQ_SEMAPHORE[b, h, q_start] order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)"],
    )
    assert [line.split()[0] for line in lines("split-dq-reduction", "write")] == [
        "semaphore_acquire",
        "%dq_tile",
        "ordered_add",
        "consumer_release",
        "semaphore_release",
        "yield",
    ]
    ((old,), (new,)) = changed("wide", "ping-pong", "split-dq-reduction", "reduce_dq")
    assert new == f"{old} round_robin(%dQ_pipeline)"
    instances = [
        {b.name: b.warp_group.instances for b in backward(after_passes("wide")[step]).warp_groups if b.warp_group}
        for step in ("ping-pong", "split-dq-reduction")
    ]
    assert [found["dq_reducer"] for found in instances] == [1, 2] and instances[0]["consumer"] == instances[1][
        "consumer"
    ] == 2


@pytest.mark.parametrize(
    ("name", "instances"),
    [
        ("narrow", 1),
        ("wide", 2),
        ("dropping", 2),
        ("pieces", 1),
        ("biased_wide", 1),
        ("blocks", 2),
        ("blocks_causal", 2),
    ],
)
def test_two_dq_reduction_warps_are_used_where_they_fit_and_one_is_too_slow(name: str, instances: int) -> None:
    """One is too slow for tiles of 64 queries, and where the order of adds is read from lists. Each needs a stage."""
    assert [
        b.warp_group.instances for b in backward(lowered(name)).warp_groups if b.warp_group and b.name == "dq_reducer"
    ] == [instances]


ACQUIRE = "    semaphore_acquire %dQ_SEMAPHORE[b, h, q_start] order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)\n"
RELEASE = "    semaphore_release %dQ_SEMAPHORE[b, h, q_start]\n"
REFUSED = {
    "three dQ reduction warps of two stages": (
        "warp_group @dq_reducer instances(2)",
        "warp_group @dq_reducer instances(3)",
        (
            "`loop-bodies`: .*%dQ_total splits iterations by the 2 stages of %dQ_pipeline; expected as many "
            "stages as the warp group has"
        ),
    ),
    "a stage for only one of two dQ reduction warps": (
        "%dQ_pipeline = pipeline stages(2)",
        "%dQ_pipeline = pipeline stages(1)",
        "`loop-bodies`: .*the 1 stages of .*; expected as many",
    ),
    "two dQ reduction warps of the same tiles": (
        " round_robin(%dQ_pipeline)",
        "",
        "`warp-groups`: .*%dQ_pipeline is written by @consumer and read by @dq_reducer; expected ",
    ),
    "tiles split by the stages of a pipeline that another warp group reads": (
        " round_robin(%dQ_pipeline)",
        " round_robin(%Q_pipeline)",
        "`warp-groups`: .*%dQ_pipeline is written by @consumer and read by @dq_reducer; expected ",
    ),
    "a tile that is not released": (
        "    consumer_release %dq_tile\n",
        "",
        "`loop-bodies`: .*from which @step waits for a tile and releases it",
    ),
    "a tile released twice": (
        "    consumer_release %dq_tile\n",
        "    consumer_release %dq_tile\n" * 2,
        "`loop-bodies`: .*waits for a tile and releases it",
    ),
    "an acquire of the semaphore of another tile": (
        "semaphore_acquire %dQ_SEMAPHORE[b, h, q_start]",
        "semaphore_acquire %dQ_SEMAPHORE[b, h, q_start + BLOCK_Q]",
        "`types`: .*is not the only acquire of the semaphore of an add after it",
    ),
    "an acquire at another position in the order": (
        "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)\n    %dq_tile",
        "order(0)\n    %dq_tile",
        "`types`: .*is not the only acquire of the semaphore of an add after it, in the same block",
    ),
    "two acquires": (
        "    %dq_tile = consumer_wait",
        f"{ACQUIRE}    %dq_tile = consumer_wait",
        "`types`: .*is not the only acquire of the semaphore of an add",
    ),
    "a release by a consumer as well": (
        "    producer_store %dQ_pipeline %dq\n",
        f"    producer_store %dQ_pipeline %dq\n{RELEASE}",
        "`types`: .*has a semaphore, which is not released once after it",
    ),
    "a release before the tile is loaded": (
        "    %dq_tile = consumer_wait",
        f"{RELEASE}    %dq_tile = consumer_wait",
        "`types`: .*has a semaphore, which is not released once after it",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_ir_is_refused_with_a_reason(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("wide", (old, new)))


def test_an_acquire_after_the_add_is_refused() -> None:
    late = (ACQUIRE, ""), ("    consumer_release %dq_tile\n", f"    consumer_release %dq_tile\n{ACQUIRE}")
    with pytest.raises(
        VerifyError, match="rule `types`: .*is not the only acquire of the semaphore of an add after it"
    ):
        verify(edited("wide", *late))


def test_a_stage_is_not_released_before_its_tile_is_added() -> None:
    """This holds for one dQ reduction warp as well."""
    for name in ("wide", "narrow"):
        early = (
            ("    consumer_release %dq_tile\n", ""),
            ("    ordered_add %DQ_ACC", "    consumer_release %dq_tile\n    ordered_add %DQ_ACC"),
        )
        with pytest.raises(VerifyError, match="rule `types`: .*adds %dq_tile, which is not released once after that"):
            verify(edited(name, *early))


def test_a_dq_reducer_has_one_warp_which_waits_for_its_own_tma_reductions() -> None:
    two = (
        ("registers(240)", "registers(232)"),
        ("warp_group @dq_reducer instances(2) warps(1)", "warp_group @dq_reducer instances(2) warps(2)"),
    )
    with pytest.raises(VerifyError, match="rule `types`: .*is a TMA reduction of several warps, or of no warp group"):
        verify(edited("wide", *two))


def test_tiles_are_not_split_for_a_single_dq_reduction_warp() -> None:
    one = (
        ("%dQ_pipeline = pipeline stages(2)", "%dQ_pipeline = pipeline stages(1)"),
        ("warp_group @dq_reducer instances(2)", "warp_group @dq_reducer instances(1)"),
    )
    with pytest.raises(
        VerifyError,
        match=(
            "rule `loop-bodies`: .*the 1 stages of .*; expected as many stages as the warp group has instances, and two"
        ),
    ):
        verify(edited("wide", *one))


def test_a_position_in_the_order_that_another_program_has_is_refused() -> None:
    own, other = "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)", "order(kv_start // BLOCK_KV)"
    with pytest.raises(VerifyError, match="rule `same-tiles`: .*add in another order"):
        verify(edited("wide", (own, other), (own, other)))


# ---------------------------------------------------------------------------------------------- the protocol


def two_consumers(reducers: int, steps: str, stages: int = 2, stores: str = "producer_store") -> Protocol:
    """Two consumers store parts of tiles, and dQ reduction warps do `steps` per iteration; if there are several, each
    has a stage."""

    def program(name: str, kinds: str, instances: int) -> WarpGroupSteps:
        iteration = tuple(Step(kind, "X") for kind in kinds.split())
        return WarpGroupSteps(name, (), TileLoop(iteration, iteration), (), instances)

    programs = (program("consumer", stores, 2), program("dq_reducer", steps, reducers))
    return Protocol(programs, (("X", stages),), (("X", ""),), frozenset({"X"}) if reducers > 1 else frozenset())


def test_tiles_are_split_among_as_many_instances_as_there_are_stages() -> None:
    assert (
        violation(two_consumers(3, "consumer_wait consumer_release", 2))
        == "%X of 2 stages serves 3 instances in round-robin order"
    )


@pytest.mark.share(16)
@pytest.mark.parametrize("reducers, stages", [(1, 1), (1, 2), (1, 3), (2, 2), (3, 3)])
@pytest.mark.parametrize(
    ("steps", "stores", "reason"),
    [
        ("consumer_wait consumer_release", "producer_store", ""),
        (
            "consumer_wait",
            "producer_store",
            "can wait for ever|not all parts of a tile of %X are read and released at the end",
        ),
        ("consumer_release consumer_wait", "producer_store", "releases a tile of %X that it has not waited for"),
        (
            "consumer_wait consumer_release consumer_release",
            "producer_store",
            "releases a tile of %X that it has not waited for",
        ),
        ("consumer_wait consumer_release consumer_wait consumer_release", "producer_store", "can wait for ever"),
        (
            "consumer_wait consumer_release",
            "producer_store producer_store",
            "can wait for ever|not all parts of a tile of %X are read and released at the end",
        ),
    ],
)
def test_the_proof_agrees_with_a_search_of_every_order(
    reducers: int, stages: int, steps: str, stores: str, reason: str
) -> None:
    protocol = two_consumers(reducers, steps, stages, stores)
    for found in (violation(protocol), violation(protocol, all_orders=True)):
        assert bool(found) == bool(reason) and any(part in found for part in reason.split("|"))


# ---------------------------------------------------------------------------------------------- generated code


def test_a_dq_reduction_warp_acquires_the_semaphore_before_it_waits_for_the_tile() -> None:
    text = render(lowered("wide"))["hopper.py"].partition("\ndef bwd_dq_reducer(")[2]
    assert "            if dQ_stage == _WARP_GROUP:  # else the other dQ reduction warp adds the tile\n" in text
    assert (
        text.index("_semaphore_acquire(")
        < text.index("mbarrier.wait(dQ_full.index(dQ_stage), dQ_phase)")
        < text.index("_tma_reduce_add(")
    )
    # both dQ reduction warps advance the stage, after the add
    after = "                )\n            dQ_stage, dQ_phase = _next_stage(dQ_stage, dQ_phase, 2)\n"
    assert text.count(after) == 2 and "_order_seen" not in text  # full and partial tiles
    assert "Work_empty.index(at), count=4)" in text and text.count("                bwd_dq_reducer,\n") == 2


def test_a_single_dq_reduction_warp_reads_the_next_semaphore_ahead() -> None:
    text = render(lowered("narrow"))["hopper.py"]
    assert (
        "def _semaphore_value(counter):" in text
        and "_WARP_GROUP" not in text.partition("\ndef bwd_dq_reducer(")[2].partition("@gluon")[0]
    )
    assert "def _semaphore_value(counter):" not in render(lowered("wide"))["hopper.py"]
