"""The protocol of divided kernels: it is proved for every spec, and mistakes of many kinds are found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from attngen.errors import VerifyError
from attngen.verify import verify
from attngen.verify.machine import Program, Protocol, Step, Walk, broken
from attngen.verify.protocol import protocol_of
from tests.hopper.common import DIVIDED, edited, kernel, whole


def of(slots: int = 2) -> Protocol:
    return protocol_of(kernel("causal_gqa"), {"num_stages": slots})


@pytest.mark.parametrize("name", DIVIDED)
def test_every_kernel_is_proved(name: str) -> None:
    for row in whole(name).rows("fwd", "hopper"):
        assert broken(protocol_of(kernel(name), {"num_stages": row.num_stages})) == ""


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_it_holds_for_any_number_of_slots(slots: int) -> None:
    assert broken(of(slots)) == ""


def test_one_two_and_three_consumers_are() -> None:
    for copies in (1, 2, 3):
        programs = tuple(replace(p, copies=copies) if p.name == "consumer" else p for p in of().programs)
        assert broken(replace(of(), programs=programs)) == ""


# Edits of the text, and what the rule `protocol` finds.
TEXT = {
    "a give that is missing": ("    give %k\n", "", "wait for ever"),
    "a give in the last turn alone that is missing": ("    give %v_in_last\n", "", "wait for ever"),
    "a give in the first turn that is missing": ("    give %k_in_first\n", "", "wait for ever"),
    "a tile given back twice": ("    give %k\n", "    give %k\n    give %k\n", "gives back a tile of %K_ring that it has not taken"),
    "a tile given back while a product reads it": (
        "    %acc_next = await %acc_flight holds(%weights_operand) : f32[BLOCK_Q, D_V] @reg\n    give %v\n",
        "    give %v\n    %acc_next = await %acc_flight holds(%weights_operand) : f32[BLOCK_Q, D_V] @reg\n",
        "gives back a tile of %V_ring while %acc_flight reads it",
    ),
    "K given back before S is there": (
        "    %s = await %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n    give %k\n",
        "    give %k\n    %s = await %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n",
        "gives back a tile of %K_ring while %s_flight reads it",
    ),
    "a ring that is not filled": ("    fill %V_ring %V[b, h // group, kv, d_v]\n", "", "wait for ever"),
    "a ring filled twice a turn": (
        "    fill %V_ring %V[b, h // group, kv, d_v]\n",
        "    fill %V_ring %V[b, h // group, kv, d_v]\n    fill %V_ring %V[b, h // group, kv, d_v]\n",
        "can wait for ever|at the end",
    ),
    "arrivals that nothing awaits": ("    drain %K_ring\n", "", "arrivals at the barrier of %K_ring are awaited by nothing at the end"),
    "queries that are not filled": ("    fill %Q_ring %Q[b, h, q, d_qk]\n", "", "wait for ever"),
    "queries filled in each turn": (
        "    fill %K_ring",
        "    fill %Q_ring %Q[b, h, q, d_qk]\n    fill %K_ring",
        "can wait for ever",
    ),
    "a drain too early": (
        "    %copy_keys_full = loop kv ranges(0 .. kv_full_end) body(@copy) cls(full)\n",
        "    drain %K_ring\n    %copy_keys_full = loop kv ranges(0 .. kv_full_end) body(@copy) cls(full)\n",
        "@producer has a drain between its loops; expected it before or after them",
    ),
}


@pytest.mark.parametrize("mistake", TEXT)
def test_a_mistake_in_the_text_is_found(mistake: str) -> None:
    old, new, reason = TEXT[mistake]
    with pytest.raises(VerifyError, match="rule `protocol`: .*" + reason):
        verify(edited("causal_gqa", (old, new)))


def change(name: str, part: Callable[[Program], Program]) -> Protocol:
    """The protocol with one role changed."""
    return replace(of(), programs=tuple(part(p) if p.name == name else p for p in of().programs))


def without(steps: tuple[Step, ...], kind: str, what: str) -> tuple[Step, ...]:
    return tuple(s for s in steps if (s.kind, s.what) != (kind, what))


# Edits of the text of a kernel whose copies take turns, and what the rule finds. @first and @step have a take and a pass each.
TURNS = {
    "no pass": ("    turn pass\n    %s = await", "    %s = await", "can wait for ever"),
    "no take": ("    turn take\n    %s_flight =", "    %s_flight =", "passes its turn before .* has taken the one before"),
    "no pass in the first turn": ("    turn pass\n    %s_in_first = await", "    %s_in_first = await", "can wait for ever"),
    "no take in the first turn": (
        "    turn take\n    %s_flight_in_first =",
        "    %s_flight_in_first =",
        "passes its turn before .* has taken",
    ),
    "no start": ("    turn start\n", "", "can wait for ever"),
    "no end": ("    turn end\n", "", "a turn is passed to consumer 0, which takes none at the end"),
    "a start for each tile": ("    %q = take %Q_ring", "    turn start\n    %q = take %Q_ring", "passes its turn before .* has taken"),
    "an end for each tile": ("    give %q\n", "    give %q\n    turn end\n", "can wait for ever"),
    "two passes": ("    turn pass\n    %s = await", "    turn pass\n    turn pass\n    %s = await", "passes its turn before .* has taken"),
    "two takes": ("    turn take\n    %s_flight =", "    turn take\n    turn take\n    %s_flight =", "can wait for ever"),
    "a pass before its take": (
        "    turn take\n    %s_flight =",
        "    turn pass\n    turn take\n    %s_flight =",
        "passes its turn before .* has taken",
    ),
}
SINGLE = "full_mha"  # heads of 64 columns


@pytest.mark.parametrize("mistake", TURNS)
def test_a_mistake_in_turns_is_found(mistake: str) -> None:
    old, new, reason = TURNS[mistake]
    with pytest.raises(VerifyError, match="rule `protocol`: .*" + reason):
        verify(edited(SINGLE, (old, new)))


def test_a_turn_may_end_before_its_products_are_issued() -> None:
    """That is right, if slower: turns order when products start, and no result depends on that."""
    issue = "    %s_flight_in_first = issue %q %k_in_first over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @flight\n"
    verify(edited(SINGLE, (f"{issue}    turn pass\n", f"    turn pass\n{issue}")))


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("slots", [1, 2])
def test_turns_hold_for_any_number_of_copies_and_slots(copies: int, slots: int) -> None:
    found = protocol_of(kernel(SINGLE), {"num_stages": slots})
    assert any(step.kind == "turn" for program in found.programs for step in program.steps)
    assert broken(replace(found, programs=tuple(replace(p, copies=copies) if p.name == "consumer" else p for p in found.programs))) == ""


def taking(copies: int, stays: bool, of: Callable[[tuple[Step, ...]], tuple[Step, ...]] = lambda steps: steps) -> Protocol:
    """Copies that take turns, with a ring of one slot; `of` changes what a copy does for a tile of keys."""
    each = ("take", "K"), ("turn", "take"), ("issue", "s"), ("turn", "pass"), ("await", "s"), ("give", "K")
    body = of(tuple(Step(kind, what, ("K",) if kind == "issue" else ()) for kind, what in each))
    start, end = (Step("turn", "start"),), (Step("turn", "end"),)
    filled = Walk((Step("fill", "K"),), (Step("fill", "K"),))
    if not stays:
        consumer = Program("consumer", start, Walk(body, body), end, copies)
        producer = Program("producer", (), filled, (Step("drain", "K"),), 1)
        return Protocol((producer, consumer), (("K", 1),), (("K", ""),))
    fill, take, give, drain = (Step(kind, "W") for kind in ("fill", "take", "give", "drain"))
    producer = Program("producer", (fill,), filled, (), 1, stays=True, end=(fill, Step("drain", "K"), drain))
    consumer = Program("consumer", (), Walk(body, body), (give, take), copies, stays=True, start=(*start, take), end=(give, *end))
    return Protocol((producer, consumer), (("K", 1), ("W", 1)), (("K", ""), ("W", "")))


@pytest.mark.parametrize("copies, stays", [(2, False), (2, True), (3, False)])
def test_all_orders_of_turns_give_the_same_verdict(copies: int, stays: bool) -> None:
    """Of the protocol as it should be, and with each of its steps left out, or done twice."""
    assert broken(taking(copies, stays)) == broken(taking(copies, stays), all_orders=True) == ""
    for at in range(6):
        for times in (0, 2):
            made = taking(copies, stays, lambda steps, at=at, times=times: (*steps[:at], *steps[at : at + 1] * times, *steps[at + 1 :]))  # type: ignore[misc]
            assert bool(broken(made)) == bool(broken(made, all_orders=True))


def test_one_turn_less_in_one_copy_is_found() -> None:
    """Copy 0 ends without its last turn, which `end` stands for; or it takes a turn at the start that it does not pass."""
    producer, consumer = taking(2, False).programs
    for part in (replace(consumer, after=()), replace(consumer, before=(*consumer.before, Step("turn", "end")))):
        found = broken(replace(taking(2, False), programs=(producer, part)))
        assert found.endswith(("which takes none at the end", "can wait for ever"))


def test_one_turn_less_in_one_role_is_found() -> None:
    """The consumer's first turn takes nothing: it is a tile behind the producer at the end."""
    made = change("consumer", lambda p: replace(p, walk=replace(p.walk, first=())))
    assert "%K_ring" in broken(made) or "wait for ever" in broken(made)


def test_a_product_that_is_not_awaited_is_found() -> None:
    made = change(
        "consumer", lambda p: replace(p, walk=Walk(p.walk.first, p.walk.later, tuple(s for s in p.walk.last if s.kind != "await")))
    )
    assert "reads it" in broken(made) or "before it has awaited" in broken(made)


def test_writing_through_queries_that_are_read_is_found() -> None:
    issue = Step("issue", "late", ("Q_ring",))
    made = change("consumer", lambda p: replace(p, after=(issue, *p.after)))
    assert broken(made).endswith(" gives back a tile of %Q_ring while %late reads it")
    put = Step("put", "Q_ring")
    made = change("consumer", lambda p: replace(p, before=(*p.before, issue, put)))
    assert broken(made).endswith(" writes to %Q_ring while %late reads it")


def test_an_await_of_nothing_is_found() -> None:
    made = change("consumer", lambda p: replace(p, after=(Step("await", "s_flight"), *p.after)))
    assert broken(made).endswith(" awaits %s_flight, which is not in flight")


def test_a_product_of_a_tile_that_is_gone_is_found() -> None:
    made = change("consumer", lambda p: replace(p, after=(Step("issue", "late", ("V_ring",)), *p.after)))
    assert "reads a tile of %V_ring that it has given back or never taken" in broken(made)


def test_roles_in_different_orders_wait_for_each_other() -> None:
    """V before K, with one slot of each: the producer fills K, and the consumer asks for two K before the first V."""

    def swapped(p: Program) -> Program:
        return replace(p, walk=Walk(*(tuple(reversed(steps)) for steps in (p.walk.first, p.walk.later, p.walk.last))))

    slots = tuple((ring, 1) for ring, _ in of().slots)
    made = replace(change("producer", swapped), slots=slots)
    assert broken(replace(of(), slots=slots)) == ""
    assert "can wait for ever" in broken(made)


def test_a_slot_too_few_is_found() -> None:
    """A consumer that takes two tiles of K before it gives one back needs two slots."""
    two = (Step("take", "K_ring"), Step("take", "K_ring"), Step("give", "K_ring"), Step("give", "K_ring"))
    fill = (Step("fill", "K_ring"), Step("fill", "K_ring"))
    programs = (
        Program("producer", (), Walk(fill, fill), (Step("drain", "K_ring"),), 1),
        Program("consumer", (), Walk(two, two), (), 2),
    )
    made = Protocol(programs, (("K_ring", 2),), (("K_ring", ""),))
    assert broken(made) == "" and "can wait for ever" in broken(replace(made, slots=(("K_ring", 1),)))


def test_a_role_that_runs_ahead_without_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("attngen.verify.machine"), "MOST_STATES", 50)
    made = replace(of(), each=(*of().each, ("spare", "")), slots=(*of().slots, ("spare", 1)))
    assert "the roles have more than 50 states" in broken(made)
