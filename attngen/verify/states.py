"""States of the protocol's model: where each warp-group instance is and what is in each pipeline stage.

Tables hold facts that do not change: the automaton of each instance, and the agents that fill and read each pipeline.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attngen.verify.automata import Node, Protocol, Step, nodes_before_arrive, nodes_of, of_instance

PERIOD = 2  # uses of a pipeline that TMA fills are counted modulo this many times its stages


class Agent(NamedTuple):
    """The state of one instance of a warp group. Counts per pipeline are modulo `Tables.periods`."""

    at: int  # a node of its automaton; past the last one the instance has ended
    answered: int  # branches that it has passed, counted from those of the slowest instance
    uses: tuple[int, ...]  # per pipeline: loads that it has issued, or tiles that it has waited for
    released: tuple[int, ...]  # per pipeline: tiles that it has released
    wrapped: tuple[bool, ...]  # per pipeline: whether it has filled all stages once
    in_flight: tuple[int, ...] = ()  # nodes of the wgmmas that it has not waited for
    storing: frozenset[int] = frozenset()  # pipelines from which a TMA store of its may still read
    stored: tuple[int, ...] = ()  # per pipeline: tiles, or parts of tiles, that it has written


class Stage(NamedTuple):
    """The state of one stage of a pipeline."""

    tile: int  # number of its latest load, counted as `uses` are; -1 before the first one
    loading: bool
    phase: int  # completed loads, modulo 2
    arrived: frozenset[int]  # agents that have arrived at its empty barrier


class State(NamedTuple):
    """The state of all instances and pipelines."""

    agents: tuple[Agent, ...]
    pipelines: tuple[tuple[Stage, ...], ...]
    answers: tuple[bool, ...] = ()  # whether there is another iteration, from the slowest agent's next branch on
    arrivals: frozenset[int] = frozenset()  # agents for whose scheduler barrier the previous instance has arrived


class Violation(Exception):
    """A violation of the protocol, in words."""


class Tables:
    """The facts of a protocol that no step changes. `r` is the number of a pipeline and `i` that of an agent
    throughout.

    A pipeline that each instance of a warp group has for itself counts as one pipeline per instance.
    """

    def __init__(self, of: Protocol) -> None:
        agents = [(p, instance) for p in of.warp_groups for instance in range(p.instances)]
        self.warp_groups = [p for p, _ in agents]
        self.instance = [instance for _, instance in agents]
        self.who = [f"{p.name} {instance}" for p, instance in agents]
        self.nodes: list[list[Node]] = [nodes_of(of_instance(p, instance)) for p, instance in agents]
        self.next = [i + 1 if n + 1 < p.instances else i - n for i, (p, n) in enumerate(agents)]
        self.before_arrive = [nodes_before_arrive(nodes) for nodes in self.nodes]
        self.round_robin, self.exchanges = of.round_robin, of.exchanges
        self.pipelines: list[tuple[str, str]] = []  # (name, the agent that has it, or "" if it is shared)
        for pipeline, warp_group in of.per_instance:
            owners = [who for p, who in zip(self.warp_groups, self.who) if p.name == warp_group]
            self.pipelines += [(pipeline, owner) for owner in owners or [""]]
        self.names = [name for name, _ in self.pipelines]
        self.stages = [dict(of.stages)[name] for name in self.names]
        self._find_users()
        # Counts of writes and of waits differ by less than two rounds of stages, in round-robin order by less than
        # four.
        self.periods = [
            (8 if name in of.round_robin else 4 if writers else PERIOD) * n
            for name, writers, n in zip(self.names, self.writers, self.stages)
        ]
        self._check_shape()

    def _find_users(self) -> None:
        """Find the agents that load, write, wait for and release tiles of each pipeline."""
        read = [{s.name for s in p.steps if s.kind in ("consumer_wait", "consumer_release")} for p in self.warp_groups]
        self.consumers = [
            frozenset(i for i, who in enumerate(self.who) if name in read[i] and owner in ("", who))
            for name, owner in self.pipelines
        ]
        self.writers = [
            frozenset(i for i, p in enumerate(self.warp_groups) if Step("producer_store", name) in p.steps)
            for name in self.names
        ]
        self.loaders = [
            [i for i, p in enumerate(self.warp_groups) if Step("producer_load", name) in p.steps] for name in self.names
        ]
        released = {s.name for p in self.warp_groups for s in p.steps if s.kind == "consumer_release"}
        self.is_released = [name in released for name in self.names]

    def _check_shape(self) -> None:
        for r, name in enumerate(self.names):
            fits = self.consumers[r] == self.writers[r] and len(self.consumers[r]) == 2 and self.stages[r] == 1
            if name in self.exchanges and not fits:
                raise Violation(
                    f"%{name} is no single stage through which two warp groups exchange tiles, each reading those of "
                    f"the other"
                )
            if name in self.round_robin and len(self.consumers[r]) != self.stages[r]:
                raise Violation(
                    f"%{name} of {self.stages[r]} stages serves {len(self.consumers[r])} instances in round-robin order"
                )

    def other(self, r: int, i: int) -> int:
        """The agent with whom an agent exchanges tiles through a pipeline."""
        return next(j for j in self.consumers[r] if j != i)

    def node(self, state: State, i: int) -> Node | None:
        """The node at which an agent is; None where it has ended."""
        at = state.agents[i].at
        return self.nodes[i][at] if at < len(self.nodes[i]) else None

    def in_flight(self, state: State, i: int) -> list[Step]:
        """The wgmma steps of an agent that are in flight, in the order in which they were issued."""
        return [step for at in state.agents[i].in_flight if (step := self.nodes[i][at].step)]


def put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    """A tuple with one element replaced."""
    return (*values[:at], value, *values[at + 1 :])


def with_agent(state: State, i: int, agent: Agent) -> State:
    return state._replace(agents=put(state.agents, i, agent))


def with_stage(state: State, r: int, s: int, stage: Stage) -> State:
    return state._replace(pipelines=put(state.pipelines, r, put(state.pipelines[r], s, stage)))


def moved(state: State, i: int, at: int) -> State:
    """The state with an agent at another node."""
    return with_agent(state, i, state.agents[i]._replace(at=at))
