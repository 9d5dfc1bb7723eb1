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
from tests.hopper.common import WARP_SPECIALIZED, edited, kernel, whole


def of(stages: int = 2) -> Protocol:
    return protocol_of(kernel("causal_gqa"), {"num_stages": stages})


@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_every_kernel_is_proved(name: str) -> None:
    for row in whole(name).configs("fwd", "hopper"):
        assert broken(protocol_of(kernel(name), {"num_stages": row.num_stages})) == ""


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_it_holds_for_any_number_of_stages(stages: int) -> None:
    assert broken(of(stages)) == ""


def test_one_two_and_three_consumers_are() -> None:
    for instances in (1, 2, 3):
        programs = tuple(replace(p, instances=instances) if p.name == "consumer" else p for p in of().programs)
        assert broken(replace(of(), programs=programs)) == ""


# Edits of the text, and what the rule `protocol` finds.
TEXT = {
    "a give that is missing": ("    consumer_release %k\n", "", "wait for ever"),
    "a give in the last turn alone that is missing": ("    consumer_release %v_in_last\n", "", "wait for ever"),
    "a give in the first turn that is missing": ("    consumer_release %k_in_first\n", "", "wait for ever"),
    "a tile given back twice": (
        "    consumer_release %k\n",
        "    consumer_release %k\n    consumer_release %k\n",
        "gives back a tile of %K_pipeline that it has not taken",
    ),
    "a tile given back while a product reads it": (
        "    %acc_next = wgmma_wait %acc_flight keep_alive(%weights_operand) : f32[BLOCK_Q, D_V] @reg\n    consumer_release %v\n",
        "    consumer_release %v\n    %acc_next = wgmma_wait %acc_flight keep_alive(%weights_operand) : f32[BLOCK_Q, D_V] @reg\n",
        "gives back a tile of %V_pipeline while %acc_flight reads it",
    ),
    "K given back before S is there": (
        "    %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n    consumer_release %k\n",
        "    consumer_release %k\n    %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n",
        "gives back a tile of %K_pipeline while %s_flight reads it",
    ),
    "a ring that is not filled": ("    producer_load %V_pipeline %V[b, h // group, kv, d_v]\n", "", "wait for ever"),
    "a ring filled twice a turn": (
        "    producer_load %V_pipeline %V[b, h // group, kv, d_v]\n",
        "    producer_load %V_pipeline %V[b, h // group, kv, d_v]\n    producer_load %V_pipeline %V[b, h // group, kv, d_v]\n",
        "can wait for ever|at the end",
    ),
    "arrivals that nothing awaits": (
        "    producer_tail %K_pipeline\n",
        "",
        "arrivals at the barrier of %K_pipeline are awaited by nothing at the end",
    ),
    "queries that are not filled": ("    producer_load %Q_pipeline %Q[b, h, q, d_qk]\n", "", "wait for ever"),
    "queries filled in each turn": (
        "    producer_load %K_pipeline",
        "    producer_load %Q_pipeline %Q[b, h, q, d_qk]\n    producer_load %K_pipeline",
        "can wait for ever",
    ),
    "a drain too early": (
        "    %copy_keys_full = loop kv ranges(0 .. kv_full_end) body(@copy) cls(full)\n",
        "    producer_tail %K_pipeline\n    %copy_keys_full = loop kv ranges(0 .. kv_full_end) body(@copy) cls(full)\n",
        "@producer has a producer_tail between its loops; expected it before or after them",
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


# Edits of the text of a kernel whose copies take turns, and what the rule finds. @first and @step have a take and a
# pass each.
TURNS = {
    "no pass": ("    scheduler_barrier arrive\n    %s = wgmma_wait", "    %s = wgmma_wait", "can wait for ever"),
    "no take": (
        "    scheduler_barrier sync\n    %s_flight =",
        "    %s_flight =",
        "passes its turn before .* has taken the one before",
    ),
    "no pass in the first turn": (
        "    scheduler_barrier arrive\n    %s_in_first = wgmma_wait",
        "    %s_in_first = wgmma_wait",
        "can wait for ever",
    ),
    "no take in the first turn": (
        "    scheduler_barrier sync\n    %s_flight_in_first =",
        "    %s_flight_in_first =",
        "passes its turn before .* has taken",
    ),
    "no start": ("    scheduler_barrier init\n", "", "can wait for ever"),
    "no end": ("    scheduler_barrier tail\n", "", "a turn is passed to consumer 0, which takes none at the end"),
    "a start for each tile": (
        "    %q = consumer_wait %Q_pipeline",
        "    scheduler_barrier init\n    %q = consumer_wait %Q_pipeline",
        "passes its turn before .* has taken",
    ),
    "an end for each tile": (
        "    consumer_release %q\n",
        "    consumer_release %q\n    scheduler_barrier tail\n",
        "can wait for ever",
    ),
    "two passes": (
        "    scheduler_barrier arrive\n    %s = wgmma_wait",
        "    scheduler_barrier arrive\n    scheduler_barrier arrive\n    %s = wgmma_wait",
        "passes its turn before .* has taken",
    ),
    "two takes": (
        "    scheduler_barrier sync\n    %s_flight =",
        "    scheduler_barrier sync\n    scheduler_barrier sync\n    %s_flight =",
        "can wait for ever",
    ),
    "a pass before its take": (
        "    scheduler_barrier sync\n    %s_flight =",
        "    scheduler_barrier arrive\n    scheduler_barrier sync\n    %s_flight =",
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
    issue = "    %s_flight_in_first = wgmma %q %k_in_first over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @flight\n"
    verify(edited(SINGLE, (f"{issue}    scheduler_barrier arrive\n", f"    scheduler_barrier arrive\n{issue}")))


@pytest.mark.parametrize("instances", [2, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_turns_hold_for_any_number_of_instances_and_stages(instances: int, stages: int) -> None:
    found = protocol_of(kernel(SINGLE), {"num_stages": stages})
    assert any(step.kind == "scheduler_barrier" for program in found.programs for step in program.steps)
    assert (
        broken(
            replace(
                found,
                programs=tuple(replace(p, instances=instances) if p.name == "consumer" else p for p in found.programs),
            )
        )
        == ""
    )


def taking(
    instances: int, stays: bool, of: Callable[[tuple[Step, ...]], tuple[Step, ...]] = lambda steps: steps
) -> Protocol:
    """Copies that take turns, with a ring of one slot; `of` changes what a copy does for a tile of keys."""
    each = (
        ("consumer_wait", "K"),
        ("scheduler_barrier", "sync"),
        ("wgmma", "s"),
        ("scheduler_barrier", "arrive"),
        ("wgmma_wait", "s"),
        ("consumer_release", "K"),
    )
    body = of(tuple(Step(kind, what, ("K",) if kind == "wgmma" else ()) for kind, what in each))
    start, end = (Step("scheduler_barrier", "init"),), (Step("scheduler_barrier", "tail"),)
    filled = Walk((Step("producer_load", "K"),), (Step("producer_load", "K"),))
    if not stays:
        consumer = Program("consumer", start, Walk(body, body), end, instances)
        producer = Program("producer", (), filled, (Step("producer_tail", "K"),), 1)
        return Protocol((producer, consumer), (("K", 1),), (("K", ""),))
    fill, take, give, drain = (
        Step(kind, "W") for kind in ("producer_load", "consumer_wait", "consumer_release", "producer_tail")
    )
    producer = Program("producer", (fill,), filled, (), 1, stays=True, end=(fill, Step("producer_tail", "K"), drain))
    consumer = Program(
        "consumer", (), Walk(body, body), (give, take), instances, stays=True, start=(*start, take), end=(give, *end)
    )
    return Protocol((producer, consumer), (("K", 1), ("W", 1)), (("K", ""), ("W", "")))


@pytest.mark.parametrize("instances, stays", [(2, False), (2, True), (3, False)])
def test_all_orders_of_turns_give_the_same_verdict(instances: int, stays: bool) -> None:
    """Of the protocol as it should be, and with each of its steps left out, or done twice."""
    assert broken(taking(instances, stays)) == broken(taking(instances, stays), all_orders=True) == ""
    for at in range(6):
        for times in (0, 2):
            made = taking(
                instances,
                stays,
                lambda steps, at=at, times=times: (*steps[:at], *steps[at : at + 1] * times, *steps[at + 1 :]),
            )  # type: ignore[misc]
            assert bool(broken(made)) == bool(broken(made, all_orders=True))


def test_one_turn_less_in_one_copy_is_found() -> None:
    """Copy 0 ends without its last turn, which `end` stands for; or it takes a turn at the start that it does not
    pass."""
    producer, consumer = taking(2, False).programs
    for part in (
        replace(consumer, after=()),
        replace(consumer, before=(*consumer.before, Step("scheduler_barrier", "tail"))),
    ):
        found = broken(replace(taking(2, False), programs=(producer, part)))
        assert found.endswith(("which takes none at the end", "can wait for ever"))


def test_one_turn_less_in_one_warp_group_is_found() -> None:
    """The consumer's first turn takes nothing: it is a tile behind the producer at the end."""
    made = change("consumer", lambda p: replace(p, walk=replace(p.walk, first=())))
    assert "%K_pipeline" in broken(made) or "wait for ever" in broken(made)


def test_a_product_that_is_not_awaited_is_found() -> None:
    made = change(
        "consumer",
        lambda p: replace(
            p, walk=Walk(p.walk.first, p.walk.later, tuple(s for s in p.walk.last if s.kind != "wgmma_wait"))
        ),
    )
    assert "reads it" in broken(made) or "before it has awaited" in broken(made)


def test_writing_through_queries_that_are_read_is_found() -> None:
    issue = Step("wgmma", "late", ("Q_pipeline",))
    made = change("consumer", lambda p: replace(p, after=(issue, *p.after)))
    assert broken(made).endswith(" gives back a tile of %Q_pipeline while %late reads it")
    put = Step("tma_store", "Q_pipeline")
    made = change("consumer", lambda p: replace(p, before=(*p.before, issue, put)))
    assert broken(made).endswith(" writes to %Q_pipeline while %late reads it")


def test_an_await_of_nothing_is_found() -> None:
    made = change("consumer", lambda p: replace(p, after=(Step("wgmma_wait", "s_flight"), *p.after)))
    assert broken(made).endswith(" awaits %s_flight, which is not in flight")


def test_a_product_of_a_tile_that_is_gone_is_found() -> None:
    made = change("consumer", lambda p: replace(p, after=(Step("wgmma", "late", ("V_pipeline",)), *p.after)))
    assert "reads a tile of %V_pipeline that it has given back or never taken" in broken(made)


def test_warp_groups_in_different_orders_wait_for_each_other() -> None:
    """V before K, with one slot of each: the producer fills K, and the consumer asks for two K before the first V."""

    def swapped(p: Program) -> Program:
        return replace(p, walk=Walk(*(tuple(reversed(steps)) for steps in (p.walk.first, p.walk.later, p.walk.last))))

    stages = tuple((pipeline, 1) for pipeline, _ in of().stages)
    made = replace(change("producer", swapped), stages=stages)
    assert broken(replace(of(), stages=stages)) == ""
    assert "can wait for ever" in broken(made)


def test_a_stage_too_few_is_found() -> None:
    """A consumer that takes two tiles of K before it gives one back needs two slots."""
    two = (
        Step("consumer_wait", "K_pipeline"),
        Step("consumer_wait", "K_pipeline"),
        Step("consumer_release", "K_pipeline"),
        Step("consumer_release", "K_pipeline"),
    )
    fill = (Step("producer_load", "K_pipeline"), Step("producer_load", "K_pipeline"))
    programs = (
        Program("producer", (), Walk(fill, fill), (Step("producer_tail", "K_pipeline"),), 1),
        Program("consumer", (), Walk(two, two), (), 2),
    )
    made = Protocol(programs, (("K_pipeline", 2),), (("K_pipeline", ""),))
    assert broken(made) == "" and "can wait for ever" in broken(replace(made, stages=(("K_pipeline", 1),)))


def test_a_warp_group_that_runs_ahead_without_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("attngen.verify.machine"), "MOST_STATES", 50)
    made = replace(of(), each=(*of().each, ("spare", "")), stages=(*of().stages, ("spare", 1)))
    assert "the roles have more than 50 states" in broken(made)
