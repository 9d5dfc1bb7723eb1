"""The barrier protocol of warp-specialized kernels is proven for every spec, and mistakes of many kinds are found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from attngen.errors import VerifyError
from attngen.verify import verify
from attngen.verify.automata import Protocol, Step, TileLoop, WarpGroupSteps
from attngen.verify.machine import violation
from attngen.verify.protocol import protocol_of
from tests.hopper.common import WARP_SPECIALIZED, edited, forward_kernel, lowered


def causal_protocol(stages: int = 2) -> Protocol:
    return protocol_of(forward_kernel("causal_gqa"), {"num_stages": stages})


@pytest.mark.share(4)
@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_the_protocol_of_every_kernel_is_proven(name: str) -> None:
    for row in lowered(name).configs("fwd", "hopper"):
        assert violation(protocol_of(forward_kernel(name), {"num_stages": row.num_stages})) == ""


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_protocol_holds_for_any_number_of_stages(stages: int) -> None:
    assert violation(causal_protocol(stages)) == ""


def test_the_protocol_holds_for_one_two_and_three_consumers() -> None:
    for instances in (1, 2, 3):
        programs = tuple(
            replace(p, instances=instances) if p.name == "consumer" else p for p in causal_protocol().warp_groups
        )
        assert violation(replace(causal_protocol(), warp_groups=programs)) == ""


# Edits of the IR text, and the message of the rule `protocol`.
IR_MISTAKES = {
    "a missing release": ("    consumer_release %k\n", "", "wait for ever"),
    "a missing release in the last iteration": ("    consumer_release %v_in_last\n", "", "wait for ever"),
    "a missing release in the first iteration": ("    consumer_release %k_in_first\n", "", "wait for ever"),
    "a tile released twice": (
        "    consumer_release %k\n",
        "    consumer_release %k\n    consumer_release %k\n",
        "releases a tile of %K_pipeline that it has not waited for",
    ),
    "a tile released while a product reads it": (
        (
            "    %acc_next = wgmma_wait %acc_flight keep_alive(%weights_operand) : f32[BLOCK_Q, D_V] @reg\n"
            "    consumer_release %v\n"
        ),
        (
            "    consumer_release %v\n    %acc_next = wgmma_wait %acc_flight keep_alive(%weights_operand) : "
            "f32[BLOCK_Q, D_V] @reg\n"
        ),
        "releases a tile of %V_pipeline while %acc_flight reads it",
    ),
    "K released before S is complete": (
        "    %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n    consumer_release %k\n",
        "    consumer_release %k\n    %s = wgmma_wait %s_flight : f32[BLOCK_Q, BLOCK_KV] @reg\n",
        "releases a tile of %K_pipeline while %s_flight reads it",
    ),
    "a pipeline that is not loaded": (
        "    producer_load %V_pipeline %V[b, h // group, kv, d_v]\n",
        "",
        "wait for ever",
    ),
    "a pipeline loaded twice per iteration": (
        "    producer_load %V_pipeline %V[b, h // group, kv, d_v]\n",
        (
            "    producer_load %V_pipeline %V[b, h // group, kv, d_v]\n"
            "    producer_load %V_pipeline %V[b, h // group, kv, d_v]\n"
        ),
        "can wait for ever|at the end",
    ),
    "arrivals that nothing waits for": (
        "    producer_tail %K_pipeline\n",
        "",
        "arrivals at the barrier of %K_pipeline are awaited by nothing at the end",
    ),
    "queries that are not loaded": ("    producer_load %Q_pipeline %Q[b, h, q, d_qk]\n", "", "wait for ever"),
    "queries loaded in each iteration": (
        "    producer_load %K_pipeline",
        "    producer_load %Q_pipeline %Q[b, h, q, d_qk]\n    producer_load %K_pipeline",
        "can wait for ever",
    ),
    "a producer_tail too early": (
        "    %copy_keys_full = loop kv ranges(0 .. kv_full_end) body(@copy) cls(full)\n",
        (
            "    producer_tail %K_pipeline\n    %copy_keys_full = loop kv ranges(0 .. kv_full_end) body(@copy) "
            "cls(full)\n"
        ),
        "@producer has a producer_tail between its loops; expected it before or after them",
    ),
}


@pytest.mark.parametrize("mistake", IR_MISTAKES)
def test_a_mistake_in_the_text_is_found(mistake: str) -> None:
    old, new, reason = IR_MISTAKES[mistake]
    with pytest.raises(VerifyError, match="rule `protocol`: .*" + reason):
        verify(edited("causal_gqa", (old, new)))


def with_changed(name: str, part: Callable[[WarpGroupSteps], WarpGroupSteps]) -> Protocol:
    """The protocol of causal_gqa with one warp group changed."""
    return replace(
        causal_protocol(), warp_groups=tuple(part(p) if p.name == name else p for p in causal_protocol().warp_groups)
    )


def without(steps: tuple[Step, ...], kind: str, name: str) -> tuple[Step, ...]:
    return tuple(s for s in steps if (s.kind, s.name) != (kind, name))


# Edits of the IR text of a kernel with ping-pong order, and the message of the rule. @first and @step sync and arrive
# once each.
PING_PONG_MISTAKES = {
    "no arrive": ("    scheduler_barrier arrive\n    %s = wgmma_wait", "    %s = wgmma_wait", "can wait for ever"),
    "no sync": (
        "    scheduler_barrier sync\n    %s_flight =",
        "    %s_flight =",
        "arrives at the scheduler barrier of .* not synced since",
    ),
    "no arrive in the first iteration": (
        "    scheduler_barrier arrive\n    %s_in_first = wgmma_wait",
        "    %s_in_first = wgmma_wait",
        "can wait for ever",
    ),
    "no sync in the first iteration": (
        "    scheduler_barrier sync\n    %s_flight_in_first =",
        "    %s_flight_in_first =",
        "arrives at the scheduler barrier of .* not synced since",
    ),
    "no init": ("    scheduler_barrier init\n", "", "can wait for ever"),
    "no tail": (
        "    scheduler_barrier tail\n",
        "",
        "consumer 0 does not sync with the last arrival at its scheduler barrier",
    ),
    "an init for each tile": (
        "    %q = consumer_wait %Q_pipeline",
        "    scheduler_barrier init\n    %q = consumer_wait %Q_pipeline",
        "arrives at the scheduler barrier of .* not synced since",
    ),
    "a tail for each tile": (
        "    consumer_release %q\n",
        "    consumer_release %q\n    scheduler_barrier tail\n",
        "can wait for ever",
    ),
    "two arrivals": (
        "    scheduler_barrier arrive\n    %s = wgmma_wait",
        "    scheduler_barrier arrive\n    scheduler_barrier arrive\n    %s = wgmma_wait",
        "arrives at the scheduler barrier of .* not synced since",
    ),
    "two syncs": (
        "    scheduler_barrier sync\n    %s_flight =",
        "    scheduler_barrier sync\n    scheduler_barrier sync\n    %s_flight =",
        "can wait for ever",
    ),
    "an arrive before its sync": (
        "    scheduler_barrier sync\n    %s_flight =",
        "    scheduler_barrier arrive\n    scheduler_barrier sync\n    %s_flight =",
        "arrives at the scheduler barrier of .* not synced since",
    ),
}
PING_PONG = "full_mha"  # head_dim 64


@pytest.mark.parametrize("mistake", PING_PONG_MISTAKES)
def test_a_mistake_in_ping_pong_order_is_found(mistake: str) -> None:
    old, new, reason = PING_PONG_MISTAKES[mistake]
    with pytest.raises(VerifyError, match="rule `protocol`: .*" + reason):
        verify(edited(PING_PONG, (old, new)))


def test_an_arrival_may_come_before_its_products_are_issued() -> None:
    """That is correct, if slower: scheduler barriers order when products start, and no result depends on that."""
    issue = "    %s_flight_in_first = wgmma %q %k_in_first over(D_QK) : f32[BLOCK_Q, BLOCK_KV] @flight\n"
    verify(edited(PING_PONG, (f"{issue}    scheduler_barrier arrive\n", f"    scheduler_barrier arrive\n{issue}")))


@pytest.mark.parametrize("instances", [2, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_ping_pong_order_holds_for_any_number_of_instances_and_stages(instances: int, stages: int) -> None:
    found = protocol_of(forward_kernel(PING_PONG), {"num_stages": stages})
    assert any(step.kind == "scheduler_barrier" for program in found.warp_groups for step in program.steps)
    assert (
        violation(
            replace(
                found,
                warp_groups=tuple(
                    replace(p, instances=instances) if p.name == "consumer" else p for p in found.warp_groups
                ),
            )
        )
        == ""
    )


def ping_pong(
    instances: int, persistent: bool, of: Callable[[tuple[Step, ...]], tuple[Step, ...]] = lambda steps: steps
) -> Protocol:
    """Instances in ping-pong order and a pipeline of one stage; `of` changes the steps per tile of keys."""
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
    loads = TileLoop((Step("producer_load", "K"),), (Step("producer_load", "K"),))
    if not persistent:
        consumer = WarpGroupSteps("consumer", start, TileLoop(body, body), end, instances)
        producer = WarpGroupSteps("producer", (), loads, (Step("producer_tail", "K"),), 1)
        return Protocol((producer, consumer), (("K", 1),), (("K", ""),))
    load, wait, release, tail = (
        Step(kind, "W") for kind in ("producer_load", "consumer_wait", "consumer_release", "producer_tail")
    )
    producer = WarpGroupSteps(
        "producer", (load,), loads, (), 1, persistent=True, end=(load, Step("producer_tail", "K"), tail)
    )
    consumer = WarpGroupSteps(
        "consumer",
        (),
        TileLoop(body, body),
        (release, wait),
        instances,
        persistent=True,
        start=(*start, wait),
        end=(release, *end),
    )
    return Protocol((producer, consumer), (("K", 1), ("W", 1)), (("K", ""), ("W", "")))


@pytest.mark.parametrize("instances, persistent", [(2, False), (2, True), (3, False)])
def test_all_orders_of_ping_pong_give_the_same_verdict(instances: int, persistent: bool) -> None:
    """The verdicts agree for the correct protocol, and with each of its steps left out or done twice."""
    assert (
        violation(ping_pong(instances, persistent))
        == violation(ping_pong(instances, persistent), all_orders=True)
        == ""
    )
    for at in range(6):
        for times in (0, 2):
            made = ping_pong(
                instances,
                persistent,
                lambda steps, at=at, times=times: (*steps[:at], *steps[at : at + 1] * times, *steps[at + 1 :]),
            )  # type: ignore[misc]
            assert bool(violation(made)) == bool(violation(made, all_orders=True))


def test_a_missing_scheduler_barrier_in_one_instance_is_found() -> None:
    """Instance 0 ends without its last sync, which is `tail`; or it syncs at the start and does not arrive."""
    producer, consumer = ping_pong(2, False).warp_groups
    for part in (
        replace(consumer, after=()),
        replace(consumer, before=(*consumer.before, Step("scheduler_barrier", "tail"))),
    ):
        found = violation(replace(ping_pong(2, False), warp_groups=(producer, part)))
        assert found.endswith(("the last arrival at its scheduler barrier", "can wait for ever"))


def test_one_iteration_less_in_one_warp_group_is_found() -> None:
    """The consumer's first iteration waits for nothing, so the consumer is one tile behind the producer at the end."""
    made = with_changed("consumer", lambda p: replace(p, loop=replace(p.loop, first=())))
    assert "%K_pipeline" in violation(made) or "wait for ever" in violation(made)


def test_a_product_without_a_wait_is_found() -> None:
    made = with_changed(
        "consumer",
        lambda p: replace(
            p, loop=TileLoop(p.loop.first, p.loop.later, tuple(s for s in p.loop.last if s.kind != "wgmma_wait"))
        ),
    )
    assert "reads it" in violation(made) or "before it has waited for" in violation(made)


def test_staging_outputs_in_queries_that_a_product_reads_is_found() -> None:
    issue = Step("wgmma", "late", ("Q_pipeline",))
    made = with_changed("consumer", lambda p: replace(p, after=(issue, *p.after)))
    assert violation(made).endswith(" releases a tile of %Q_pipeline while %late reads it")
    store = Step("tma_store", "Q_pipeline")
    made = with_changed("consumer", lambda p: replace(p, before=(*p.before, issue, store)))
    assert violation(made).endswith(" writes to %Q_pipeline while %late reads it")


def test_a_wait_for_no_product_is_found() -> None:
    made = with_changed("consumer", lambda p: replace(p, after=(Step("wgmma_wait", "s_flight"), *p.after)))
    assert violation(made).endswith(" waits for %s_flight, which is not in flight")


def test_a_product_of_a_released_tile_is_found() -> None:
    made = with_changed("consumer", lambda p: replace(p, after=(Step("wgmma", "late", ("V_pipeline",)), *p.after)))
    assert "reads a tile of %V_pipeline that it has released or never waited for" in violation(made)


def test_warp_groups_in_different_orders_wait_for_each_other() -> None:
    """V before K, with one stage of each: the producer loads K, and the consumer waits for two K before the first V."""

    def swapped(p: WarpGroupSteps) -> WarpGroupSteps:
        return replace(
            p, loop=TileLoop(*(tuple(reversed(steps)) for steps in (p.loop.first, p.loop.later, p.loop.last)))
        )

    stages = tuple((pipeline, 1) for pipeline, _ in causal_protocol().stages)
    made = replace(with_changed("producer", swapped), stages=stages)
    assert violation(replace(causal_protocol(), stages=stages)) == ""
    assert "can wait for ever" in violation(made)


def test_a_stage_too_few_is_found() -> None:
    """A consumer that waits for two tiles of K before it releases one needs two stages."""
    two = (
        Step("consumer_wait", "K_pipeline"),
        Step("consumer_wait", "K_pipeline"),
        Step("consumer_release", "K_pipeline"),
        Step("consumer_release", "K_pipeline"),
    )
    load = (Step("producer_load", "K_pipeline"), Step("producer_load", "K_pipeline"))
    programs = (
        WarpGroupSteps("producer", (), TileLoop(load, load), (Step("producer_tail", "K_pipeline"),), 1),
        WarpGroupSteps("consumer", (), TileLoop(two, two), (), 2),
    )
    made = Protocol(programs, (("K_pipeline", 2),), (("K_pipeline", ""),))
    assert violation(made) == "" and "can wait for ever" in violation(replace(made, stages=(("K_pipeline", 1),)))


def test_a_warp_group_that_runs_ahead_without_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("attngen.verify.machine"), "MOST_STATES", 50)
    found = causal_protocol()
    made = replace(found, per_instance=(*found.per_instance, ("spare", "")), stages=(*found.stages, ("spare", 1)))
    assert "the warp groups have more than 50 states" in violation(made)
