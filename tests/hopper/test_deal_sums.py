"""Two writers of dQ: the pass deal-sums, what is refused, the proof of what roles hand over, and the code."""

from __future__ import annotations

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.verify import verify
from attngen.verify.machine import Program, Protocol, Step, Walk, broken
from tests.hopper.test_gradients import backward, changed, edited, lines, steps, whole


def test_a_writer_has_every_second_tile_and_waits_for_its_turn_first() -> None:
    gone, come = changed("wide", "take-turns", "deal-sums", "write")
    assert (gone, come) == ([], ["follow %DQ_TURNS[b, h, q_start] turn(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)"])
    assert [line.split()[0] for line in lines("deal-sums", "write")] == ["follow", "%dq_tile", "add", "give", "raise", "yield"]
    ((old,), (new,)) = changed("wide", "take-turns", "deal-sums", "deliver")
    assert new == f"{old} dealt(%dQ_ring)"
    copies = [{b.name: b.role.copies for b in backward(steps("wide")[step]).roles if b.role} for step in ("take-turns", "deal-sums")]
    assert [found["writer"] for found in copies] == [1, 2] and copies[0]["consumer"] == copies[1]["consumer"] == 2


@pytest.mark.parametrize(
    ("name", "copies"),
    [("narrow", 1), ("wide", 2), ("dropping", 2), ("pieces", 1), ("biased_wide", 1), ("blocks", 2), ("blocks_causal", 2)],
)
def test_there_are_two_where_there_is_room_and_a_writer_has_little_time(name: str, copies: int) -> None:
    """Tiles of 64 queries, or whose turn is read from lists; and a slot for each."""
    assert [b.role.copies for b in backward(whole(name)).roles if b.role and b.name == "writer"] == [copies]


FOLLOW = "    follow %DQ_TURNS[b, h, q_start] turn(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)\n"
RAISE = "    raise %DQ_TURNS[b, h, q_start]\n"
REFUSED = {
    "three writers of two slots": (
        "role @writer copies(2)",
        "role @writer copies(3)",
        "`bodies`: .*%write_total deals turns by %dQ_ring, of 2 slots; expected as many as the role has copies",
    ),
    "a slot for one of two writers": ("%dQ_ring = ring slots(2)", "%dQ_ring = ring slots(1)", "`bodies`: .*of 1 slots; expected as many"),
    "two writers of the same tiles": (" dealt(%dQ_ring)", "", "`roles`: .*%dQ_ring is shared by @consumer and taken by @writer; expected "),
    "tiles dealt by a ring from which another role takes": (
        " dealt(%dQ_ring)",
        " dealt(%Q_ring)",
        "`roles`: .*%dQ_ring is shared by @consumer and taken by @writer; expected ",
    ),
    "a tile that is kept": ("    give %dq_tile\n", "", "`bodies`: .*from which @step takes a tile and gives it back"),
    "a tile that is given back twice": ("    give %dq_tile\n", "    give %dq_tile\n" * 2, "`bodies`: .*takes a tile and gives it back"),
    "the turn of another tile awaited": (
        "follow %DQ_TURNS[b, h, q_start]",
        "follow %DQ_TURNS[b, h, q_start + BLOCK_Q]",
        "`types`: .*is not the one wait for the turn of an add after it",
    ),
    "another turn awaited": (
        "turn(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)\n    %dq_tile",
        "turn(0)\n    %dq_tile",
        "`types`: .*is not the one wait for the turn of an add after it, in the same block",
    ),
    "a turn awaited twice": (
        "    %dq_tile = take",
        f"{FOLLOW}    %dq_tile = take",
        "`types`: .*is not the one wait for the turn of an add",
    ),
    "a turn passed by a consumer, too": (
        "    share %dQ_ring %dq\n",
        f"    share %dQ_ring %dq\n{RAISE}",
        "`types`: .*has a turn, and it is not raised once after it",
    ),
    "a turn passed before the tile is there": (
        "    %dq_tile = take",
        f"{RAISE}    %dq_tile = take",
        "`types`: .*has a turn, and it is not raised once after it",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_wrong_text_is_refused_with_a_reason(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited("wide", (old, new)))


def test_a_turn_that_is_awaited_when_the_tile_has_been_added_is_refused() -> None:
    late = (FOLLOW, ""), ("    give %dq_tile\n", f"    give %dq_tile\n{FOLLOW}")
    with pytest.raises(VerifyError, match="rule `types`: .*is not the one wait for the turn of an add after it"):
        verify(edited("wide", *late))


def test_a_slot_is_not_given_back_before_what_is_in_it_is_added() -> None:
    """In one writer, too."""
    for name in ("wide", "narrow"):
        early = ("    give %dq_tile\n", ""), ("    add %DQ_ACC", "    give %dq_tile\n    add %DQ_ACC")
        with pytest.raises(VerifyError, match="rule `types`: .*adds %dq_tile, which is not given back once after that"):
            verify(edited(name, *early))


def test_a_writer_has_one_warp_which_waits_for_what_it_has_told_the_engine() -> None:
    two = ("registers(240)", "registers(232)"), ("role @writer copies(2) warps(1)", "role @writer copies(2) warps(2)")
    with pytest.raises(VerifyError, match="rule `types`: .*is told to the copy engine by several warps, or outside of roles"):
        verify(edited("wide", *two))


def test_tiles_are_not_dealt_to_one_writer() -> None:
    one = ("%dQ_ring = ring slots(2)", "%dQ_ring = ring slots(1)"), ("role @writer copies(2)", "role @writer copies(1)")
    with pytest.raises(VerifyError, match="rule `bodies`: .*of 1 slots; expected as many as the role has copies, and two or more"):
        verify(edited("wide", *one))


def test_a_turn_that_another_program_has_is_refused() -> None:
    own, other = "turn(cdiv(Nk, BLOCK_KV) - (kv_start // BLOCK_KV) - 1)", "turn(kv_start // BLOCK_KV)"
    with pytest.raises(VerifyError, match="rule `walks`: .*add in other turns"):
        verify(edited("wide", (own, other), (own, other)))


# ---------------------------------------------------------------------------------------------- the protocol


def handing(writers: int, steps: str, slots: int = 2, shares: str = "share") -> Protocol:
    """Two consumers share tiles, which writers do `steps` with in each turn; with several writers, slot by slot."""

    def program(name: str, kinds: str, copies: int) -> Program:
        turn = tuple(Step(kind, "X") for kind in kinds.split())
        return Program(name, (), Walk(turn, turn), (), copies)

    programs = (program("consumer", shares, 2), program("writer", steps, writers))
    return Protocol(programs, (("X", slots),), (("X", ""),), frozenset({"X"}) if writers > 1 else frozenset())


def test_tiles_are_dealt_to_as_many_copies_as_there_are_slots() -> None:
    assert broken(handing(3, "take give", 2)) == "%X of 2 slots is dealt to 3 copies"


@pytest.mark.parametrize("writers, slots", [(1, 1), (1, 2), (1, 3), (2, 2), (3, 3)])
@pytest.mark.parametrize(
    ("does", "shares", "reason"),
    [
        ("take give", "share", ""),
        ("take", "share", "can wait for ever|not all parts of a tile of %X are taken and given back at the end"),
        ("give take", "share", "gives back a tile of %X that it has not taken"),
        ("take give give", "share", "gives back a tile of %X that it has not taken"),
        ("take give take give", "share", "can wait for ever"),
        ("take give", "share share", "can wait for ever|not all parts of a tile of %X are taken and given back at the end"),
    ],
)
def test_what_is_handed_over_is_proved_as_in_every_order(writers: int, slots: int, does: str, shares: str, reason: str) -> None:
    protocol = handing(writers, does, slots, shares)
    for found in (broken(protocol), broken(protocol, all_orders=True)):
        assert bool(found) == bool(reason) and any(part in found for part in reason.split("|"))


# ---------------------------------------------------------------------------------------------- as printed


def test_a_writer_asks_for_its_turn_before_the_tile_is_there() -> None:
    text = render(whole("wide"))["hopper.py"].partition("\ndef bwd_writer(")[2]
    assert "            if dq_slot == COPY:  # else the tile is the other writer's\n" in text
    assert text.index("await_turn(") < text.index("mbarrier.wait(dq_full.index(dq_slot), dq_phase)") < text.index("add_out(DQ_ACC")
    after = "                )\n            dq_slot, dq_phase = following(dq_slot, dq_phase, 2)\n"  # counted by both, after the turn
    assert text.count(after) == 2 and "turn_seen" not in text  # tiles of both classes
    assert "work_free.index(slot), count=4)" in text and text.count("                bwd_writer,\n") == 2


def test_one_writer_reads_the_next_turn_ahead() -> None:
    text = render(whole("narrow"))["hopper.py"]
    assert "def turns_passed(counter):" in text and "COPY" not in text.partition("\ndef bwd_writer(")[2].partition("@gluon")[0]
    assert "def turns_passed(counter):" not in render(whole("wide"))["hopper.py"]
