"""Two writers of dQ: the pass split-dq-reduction, what is refused, the proof of what roles hand over, and the code."""

from __future__ import annotations

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.verify import verify
from attngen.verify.machine import Program, Protocol, Step, Walk, broken
from tests.hopper.test_fused_backward import backward, changed, edited, lines, steps, whole


def test_a_writer_has_every_second_tile_and_waits_for_its_turn_first() -> None:
    gone, come = changed("wide", "ping-pong", "split-dq-reduction", "write")
    assert (gone, come) == (
        [],
        ["semaphore_acquire %DQ_SEMAPHORE[b, h, q_start] order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)"],
    )
    assert [line.split()[0] for line in lines("split-dq-reduction", "write")] == [
        "semaphore_acquire",
        "%dq_tile",
        "ordered_add",
        "consumer_release",
        "semaphore_release",
        "yield",
    ]
    ((old,), (new,)) = changed("wide", "ping-pong", "split-dq-reduction", "deliver")
    assert new == f"{old} round_robin(%dQ_pipeline)"
    instances = [
        {b.name: b.warp_group.instances for b in backward(steps("wide")[step]).warp_groups if b.warp_group}
        for step in ("ping-pong", "split-dq-reduction")
    ]
    assert [found["writer"] for found in instances] == [1, 2] and instances[0]["consumer"] == instances[1][
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
def test_there_are_two_where_there_is_room_and_a_writer_has_little_time(name: str, instances: int) -> None:
    """Tiles of 64 queries, or whose turn is read from lists; and a slot for each."""
    assert [
        b.warp_group.instances for b in backward(whole(name)).warp_groups if b.warp_group and b.name == "writer"
    ] == [instances]


FOLLOW = "    semaphore_acquire %DQ_SEMAPHORE[b, h, q_start] order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)\n"
RAISE = "    semaphore_release %DQ_SEMAPHORE[b, h, q_start]\n"
REFUSED = {
    "three writers of two slots": (
        "warp_group @writer instances(2)",
        "warp_group @writer instances(3)",
        "`bodies`: .*%write_total deals turns by %dQ_pipeline, of 2 slots; expected as many as the role has copies",
    ),
    "a slot for one of two writers": (
        "%dQ_pipeline = pipeline stages(2)",
        "%dQ_pipeline = pipeline stages(1)",
        "`bodies`: .*of 1 slots; expected as many",
    ),
    "two writers of the same tiles": (
        " round_robin(%dQ_pipeline)",
        "",
        "`roles`: .*%dQ_pipeline is shared by @consumer and taken by @writer; expected ",
    ),
    "tiles dealt by a ring from which another role takes": (
        " round_robin(%dQ_pipeline)",
        " round_robin(%Q_pipeline)",
        "`roles`: .*%dQ_pipeline is shared by @consumer and taken by @writer; expected ",
    ),
    "a tile that is kept": (
        "    consumer_release %dq_tile\n",
        "",
        "`bodies`: .*from which @step takes a tile and gives it back",
    ),
    "a tile that is given back twice": (
        "    consumer_release %dq_tile\n",
        "    consumer_release %dq_tile\n" * 2,
        "`bodies`: .*takes a tile and gives it back",
    ),
    "the turn of another tile awaited": (
        "semaphore_acquire %DQ_SEMAPHORE[b, h, q_start]",
        "semaphore_acquire %DQ_SEMAPHORE[b, h, q_start + BLOCK_Q]",
        "`types`: .*is not the one wait for the turn of an add after it",
    ),
    "another turn awaited": (
        "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)\n    %dq_tile",
        "order(0)\n    %dq_tile",
        "`types`: .*is not the one wait for the turn of an add after it, in the same block",
    ),
    "a turn awaited twice": (
        "    %dq_tile = consumer_wait",
        f"{FOLLOW}    %dq_tile = consumer_wait",
        "`types`: .*is not the one wait for the turn of an add",
    ),
    "a turn passed by a consumer, too": (
        "    producer_store %dQ_pipeline %dq\n",
        f"    producer_store %dQ_pipeline %dq\n{RAISE}",
        "`types`: .*has a turn, and it is not raised once after it",
    ),
    "a turn passed before the tile is there": (
        "    %dq_tile = consumer_wait",
        f"{RAISE}    %dq_tile = consumer_wait",
        "`types`: .*has a turn, and it is not raised once after it",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_wrong_text_is_refused_with_a_reason(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("wide", (old, new)))


def test_a_turn_that_is_awaited_when_the_tile_has_been_added_is_refused() -> None:
    late = (FOLLOW, ""), ("    consumer_release %dq_tile\n", f"    consumer_release %dq_tile\n{FOLLOW}")
    with pytest.raises(VerifyError, match="rule `types`: .*is not the one wait for the turn of an add after it"):
        verify(edited("wide", *late))


def test_a_stage_is_not_given_back_before_what_is_in_it_is_added() -> None:
    """In one writer, too."""
    for name in ("wide", "narrow"):
        early = (
            ("    consumer_release %dq_tile\n", ""),
            ("    ordered_add %DQ_ACC", "    consumer_release %dq_tile\n    ordered_add %DQ_ACC"),
        )
        with pytest.raises(VerifyError, match="rule `types`: .*adds %dq_tile, which is not given back once after that"):
            verify(edited(name, *early))


def test_a_writer_has_one_warp_which_waits_for_what_it_has_told_the_engine() -> None:
    two = (
        ("registers(240)", "registers(232)"),
        ("warp_group @writer instances(2) warps(1)", "warp_group @writer instances(2) warps(2)"),
    )
    with pytest.raises(
        VerifyError, match="rule `types`: .*is told to the copy engine by several warps, or outside of roles"
    ):
        verify(edited("wide", *two))


def test_tiles_are_not_dealt_to_one_writer() -> None:
    one = (
        ("%dQ_pipeline = pipeline stages(2)", "%dQ_pipeline = pipeline stages(1)"),
        ("warp_group @writer instances(2)", "warp_group @writer instances(1)"),
    )
    with pytest.raises(
        VerifyError, match="rule `bodies`: .*of 1 slots; expected as many as the role has copies, and two or more"
    ):
        verify(edited("wide", *one))


def test_a_turn_that_another_program_has_is_refused() -> None:
    own, other = "order(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)", "order(kv_start // BLOCK_KV)"
    with pytest.raises(VerifyError, match="rule `walks`: .*add in other turns"):
        verify(edited("wide", (own, other), (own, other)))


# ---------------------------------------------------------------------------------------------- the protocol


def handing(writers: int, steps: str, stages: int = 2, shares: str = "producer_store") -> Protocol:
    """Two consumers share tiles, which writers do `steps` with in each turn; with several writers, slot by slot."""

    def program(name: str, kinds: str, instances: int) -> Program:
        turn = tuple(Step(kind, "X") for kind in kinds.split())
        return Program(name, (), Walk(turn, turn), (), instances)

    programs = (program("consumer", shares, 2), program("writer", steps, writers))
    return Protocol(programs, (("X", stages),), (("X", ""),), frozenset({"X"}) if writers > 1 else frozenset())


def test_tiles_are_dealt_to_as_many_instances_as_there_are_stages() -> None:
    assert broken(handing(3, "consumer_wait consumer_release", 2)) == "%X of 2 slots is dealt to 3 copies"


@pytest.mark.parametrize("writers, stages", [(1, 1), (1, 2), (1, 3), (2, 2), (3, 3)])
@pytest.mark.parametrize(
    ("does", "shares", "reason"),
    [
        ("consumer_wait consumer_release", "producer_store", ""),
        (
            "consumer_wait",
            "producer_store",
            "can wait for ever|not all parts of a tile of %X are taken and given back at the end",
        ),
        ("consumer_release consumer_wait", "producer_store", "gives back a tile of %X that it has not taken"),
        (
            "consumer_wait consumer_release consumer_release",
            "producer_store",
            "gives back a tile of %X that it has not taken",
        ),
        ("consumer_wait consumer_release consumer_wait consumer_release", "producer_store", "can wait for ever"),
        (
            "consumer_wait consumer_release",
            "producer_store producer_store",
            "can wait for ever|not all parts of a tile of %X are taken and given back at the end",
        ),
    ],
)
def test_what_is_handed_over_is_proved_as_in_every_order(
    writers: int, stages: int, does: str, shares: str, reason: str
) -> None:
    protocol = handing(writers, does, stages, shares)
    for found in (broken(protocol), broken(protocol, all_orders=True)):
        assert bool(found) == bool(reason) and any(part in found for part in reason.split("|"))


# ---------------------------------------------------------------------------------------------- as printed


def test_a_writer_asks_for_its_turn_before_the_tile_is_there() -> None:
    text = render(whole("wide"))["hopper.py"].partition("\ndef bwd_writer(")[2]
    assert "            if dq_stage == WARP_GROUP:  # else the tile is the other writer's\n" in text
    assert (
        text.index("semaphore_acquire(")
        < text.index("mbarrier.wait(dq_full.index(dq_stage), dq_phase)")
        < text.index("tma_reduce_add(DQ_ACC")
    )
    # counted by both, after the turn
    after = "                )\n            dq_stage, dq_phase = next_stage(dq_stage, dq_phase, 2)\n"
    assert text.count(after) == 2 and "order_seen" not in text  # tiles of both classes
    assert "work_empty.index(stage), count=4)" in text and text.count("                bwd_writer,\n") == 2


def test_one_writer_reads_the_next_turn_ahead() -> None:
    text = render(whole("narrow"))["hopper.py"]
    assert (
        "def semaphore_value(counter):" in text
        and "WARP_GROUP" not in text.partition("\ndef bwd_writer(")[2].partition("@gluon")[0]
    )
    assert "def semaphore_value(counter):" not in render(whole("wide"))["hopper.py"]
