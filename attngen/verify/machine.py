"""Roles as automata that share rings, and all the states that they can reach.

A state says where each role is, what is in each slot, and what has been decided: at the end of a turn, whether there is
another one. The first role that asks decides, both ways, and the others get the same answer. Answers count from the
slowest role on, and uses of a slot modulo a number that no role can be ahead of another by. So there are finitely many
states.

Not every order of steps leads to states of its own. Where no other role can do anything, before an agent's next step,
that this step depends on or changes, the step is taken at once: what is found after it is found, too, where others go
first. That is the method of persistent sets (Godefroid, Partial-Order Methods for the Verification of Concurrent
Systems, 1996, section 4.1): it loses no deadlock and no mistake of any order. A give is such a step, as nobody passes
the barrier without it; a fill, a take and the end of a copy are, while each taker's next tile in that slot is the one
that is copied, or taken. All steps with a tile that copies share for another role are: each waits for others until it
can be taken, and then always can. Copies that share for themselves wait for nobody: there a mistake may show in some
orders alone. Nor is the clearing of rows such a step: others may take the tile before. A pass is, as the next copy
cannot take its turn without it; a take of a turn is, while no other copy can pass one before. Where this does not hold,
all orders are followed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

_PERIOD = 2
MOST_STATES = 400_000
_OWN = (
    "wgmma",
    "wgmma_wait",
    "tma_store",
    "tma_store_wait",
)  # steps that touch nothing of other roles: they need no state of their own


class Step(NamedTuple):
    """What a role does: `fill`, `share`, `take`, `clear`, `give`, `drain` of a ring, `put` and `flush`; `turn`;
    `issue`, `await`."""

    kind: str
    what: str  # a ring, or a product; what is done about turns, as Turn says
    tiles: tuple[str, ...] = ()  # rings whose taken tiles a product reads


@dataclass(frozen=True)
class Walk:
    """A role's loop over tiles of keys: the steps of its first turn, of each later one, and after the last one, if
    there was any.

    With `skip`, a copy may pass over any number of tiles before its first turn, all of them too: these are the steps
    for each. With `odd`, these are the steps of every other turn, from the second one on. With `pair`, they are those
    of two turns together, and `later` are those of a last one that is alone.
    """

    first: tuple[Step, ...]
    later: tuple[Step, ...]
    last: tuple[Step, ...] = ()
    skip: tuple[Step, ...] = ()
    odd: tuple[Step, ...] = ()
    pair: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Program:
    """A role: steps before its loop, the loop, steps after it. If it `stays`, all that for each tile, after `start`
    and before `end`."""

    name: str
    before: tuple[Step, ...]
    walk: Walk
    after: tuple[Step, ...]
    instances: int
    stays: bool = False
    start: tuple[Step, ...] = ()
    end: tuple[Step, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        walk = self.walk
        turns = (*walk.first, *walk.later, *walk.odd, *walk.pair, *walk.last)
        return (*self.start, *self.before, *walk.skip, *turns, *self.after, *self.end)


@dataclass(frozen=True)
class Protocol:
    """All that a kernel's roles do with its rings, under one number of slots of each."""

    programs: tuple[Program, ...]
    stages: tuple[tuple[str, int], ...]  # of each ring
    each: tuple[tuple[str, str], ...]  # of each ring, the role whose copies have one of their own; or nothing
    round_robin: frozenset[str] = (
        frozenset()
    )  # rings of which each taker has the slot of its copy's number, and passes over the others
    relays: frozenset[str] = (
        frozenset()
    )  # rings through which two roles share tiles, each of which takes what the other has shared


class Place(NamedTuple):
    """A place in a role: a step and the place after it; or, without a step, where to go on if there is another turn,
    and if not.

    Where `own` is set, the agent itself decides, at any time anew.
    """

    step: Step | None
    then: int
    otherwise: int = -1
    own: bool = False


def places(program: Program) -> list[Place]:
    """A role as places from the first, 0, to the end, which is the number after the last."""
    found: list[Place] = []

    def straight(steps: tuple[Step, ...]) -> None:
        found.extend([Place(step, len(found) + 1 + i) for i, step in enumerate(steps)])

    def question() -> int:
        found.append(Place(None, len(found) + 1))
        return len(found) - 1

    straight(program.start)
    top = question() if program.stays else len(found)
    straight(program.before)
    walk = program.walk
    if walk.odd or walk.pair:
        _by_twos(found, walk)
    elif program.stays or walk.first or walk.later or walk.last:
        any_ = question()
        if walk.skip:
            skips = question()
            straight(walk.skip)
            found[-1] = found[-1]._replace(then=any_)
            found[skips] = Place(None, skips + 1, len(found), own=True)
        straight(walk.first)
        more = question()
        straight(walk.later)
        found[-1] = found[-1]._replace(then=more) if walk.later else found[-1]
        found[more] = Place(None, more + 1 if walk.later else more, len(found))
        straight(walk.last)
        found[any_] = found[any_]._replace(otherwise=len(found))
    straight(program.after)
    if program.stays:
        past = len(found)  # from where the role goes back to the question
        to = {past: top}
        found[top:] = [
            p._replace(then=to.get(p.then, p.then), otherwise=to.get(p.otherwise, p.otherwise)) for p in found[top:]
        ]
        found[top] = Place(None, top + 1, past)
    straight(program.end)
    return found


def _by_twos(found: list[Place], walk: Walk) -> None:
    """Append the places of a loop whose even and odd turns differ. There are questions for each turn, as in all
    loops over these tiles."""

    def straight(steps: tuple[Step, ...]) -> None:
        found.extend([Place(step, len(found) + 1 + i) for i, step in enumerate(steps)])

    top = len(found)
    found.append(Place(None, top + 1))
    straight(walk.later if walk.odd else ())
    more = len(found)
    found.append(Place(None, more + 1))
    straight(walk.odd or walk.pair)
    found[-1] = found[-1]._replace(then=top)
    found[more] = found[more]._replace(otherwise=len(found))
    straight(walk.later if walk.pair else ())  # of a last turn that is alone
    found[top] = found[top]._replace(otherwise=len(found))


def of_copy(program: Program, copy: int) -> Program:
    """The program of one copy of a role: `start` and `end` of turns are a pass of the last copy and a take of the
    first."""
    own = {"init": "arrive" if copy == program.instances - 1 else "", "tail": "sync" if copy == 0 else ""}

    def steps(of: tuple[Step, ...]) -> tuple[Step, ...]:
        done = (s if s.kind != "scheduler_barrier" else Step("scheduler_barrier", own.get(s.what, s.what)) for s in of)
        return tuple(s for s in done if s != Step("scheduler_barrier", ""))

    walk = program.walk
    return replace(
        program,
        before=steps(program.before),
        walk=Walk(*map(steps, (walk.first, walk.later, walk.last, walk.skip, walk.odd, walk.pair))),
        after=steps(program.after),
        start=steps(program.start),
        end=steps(program.end),
    )


def _passing(of: list[Place]) -> frozenset[int]:
    """The places from which a role may come to a pass without taking a turn before."""
    found: set[int] = set()
    while True:
        more = {
            at
            for at, place in enumerate(of)
            if place.step != Step("scheduler_barrier", "sync")
            and (place.step == Step("scheduler_barrier", "arrive") or {place.then, place.otherwise} & found)
        }
        if more == found:
            return frozenset(found)
        found = more


class Agent(NamedTuple):
    """A copy of a role: where it is, and how often it has used each ring, modulo `_PERIOD` times its slots."""

    at: int  # a place; past the last one it is done
    asked: int  # answers that it has had, from the slowest agent's on
    uses: tuple[int, ...]  # fills, or takes; of each ring
    given: tuple[int, ...]
    full: tuple[bool, ...]  # whether it has filled all slots of the ring once
    flying: tuple[int, ...] = ()  # places of products that are not awaited
    storing: frozenset[int] = frozenset()  # rings from which the copy engine stores what it has put there
    shared: tuple[int, ...] = ()  # parts that it has written; of each ring


class Slot(NamedTuple):
    """A slot of a ring."""

    tile: int  # the number of the fill, as `uses` counts; -1 before the first
    filling: bool
    phase: int  # fills that are complete, modulo 2
    arrived: frozenset[int]  # agents at its named barrier


class State(NamedTuple):
    agents: tuple[Agent, ...]
    pipelines: tuple[tuple[Slot, ...], ...]
    answers: tuple[bool, ...] = ()  # to whether there is another turn, from the slowest agent's next question on
    passed: frozenset[int] = frozenset()  # agents at whose named barrier the agent before has arrived, to pass its turn


class Broken(Exception):
    """What is wrong, in words."""


class _Machine:
    """The states that follow a state."""

    def __init__(self, of: Protocol) -> None:
        self.names: list[tuple[str, str]] = []  # (ring, agent it belongs to): a ring with `each` stands for several
        self.programs = [
            (program, f"{program.name} {copy}") for program in of.programs for copy in range(program.instances)
        ]
        for pipeline, each in of.each:
            self.names += [
                (pipeline, owner) for owner in [who for program, who in self.programs if program.name == each] or [""]
            ]
        self.stages = [dict(of.stages)[pipeline] for pipeline, _ in self.names]
        owns = self.instances = [copy for program in of.programs for copy in range(program.instances)]
        self.round_robin, self.relays = of.round_robin, of.relays
        self.tile_indices = [places(of_copy(program, copy)) for (program, _), copy in zip(self.programs, owns)]
        self.next = [
            i + 1 if copy + 1 < p.instances else i - copy for i, ((p, _), copy) in enumerate(zip(self.programs, owns))
        ]
        self.passes = [_passing(of_places) for of_places in self.tile_indices]
        kinds = [{s.what for s in p.steps if s.kind in ("consumer_wait", "consumer_release")} for p, _ in self.programs]
        self.takers = [
            frozenset(i for i, (_, who) in enumerate(self.programs) if pipeline in kinds[i] and owner in ("", who))
            for pipeline, owner in self.names
        ]
        self.sharers = [
            frozenset(i for i, (p, _) in enumerate(self.programs) if Step("producer_store", pipeline) in p.steps)
            for pipeline, _ in self.names
        ]
        # Parts and takes of a tile that is handed over are less than two rounds of slots apart; if tiles are dealt,
        # less than four.
        self.periods = [
            (8 if pipeline in of.round_robin else 4 if sharers else _PERIOD) * n
            for (pipeline, _), sharers, n in zip(self.names, self.sharers, self.stages)
        ]
        for r, (pipeline, _) in enumerate(self.names):
            if pipeline in of.relays and not (
                self.takers[r] == self.sharers[r] and len(self.takers[r]) == 2 and self.stages[r] == 1
            ):
                raise Broken(
                    f"%{pipeline} is no slot through which two roles share tiles, each of which takes those of the other"
                )
            if pipeline in of.round_robin and len(self.takers[r]) != self.stages[r]:
                raise Broken(f"%{pipeline} of {self.stages[r]} slots is dealt to {len(self.takers[r])} copies")
        gives = {s.what for p, _ in self.programs for s in p.steps if s.kind == "consumer_release"}
        self.returned = [pipeline in gives for pipeline, _ in self.names]
        self.filler = [
            next(
                (
                    i
                    for i, (p, _) in enumerate(self.programs)
                    if any(s.kind == "producer_load" and s.what == pipeline for s in p.steps)
                ),
                -1,
            )
            for pipeline, _ in self.names
        ]

    def start(self) -> State:
        none = (0,) * len(self.names)
        agents = [Agent(0, 0, none, none, (False,) * len(self.names), shared=none) for _ in self.programs]
        state = State(tuple(agents), tuple((Slot(-1, False, 0, frozenset()),) * n for n in self.stages))
        for i in range(len(agents)):
            state = self.onward(state, i)
        return state

    def following(self, state: State, all_orders: bool = False) -> list[State]:
        """The states that one step of one agent, or of the copy engine, leads to; of one that can be taken at once, if
        there is one.

        all_orders: of every agent and copy, in any case."""
        found: list[State] = []
        for r, pipeline in enumerate(state.pipelines):
            for s, stage in enumerate(pipeline):
                if stage.filling:
                    found.append(_with_stage(state, r, s, stage._replace(filling=False, phase=stage.phase ^ 1)))
                    if not all_orders and self.awaited(state, r, stage.tile):
                        return found[-1:]
        for i in range(len(state.agents)):
            place = self.place(state, i)
            if place and place.step:
                if after := self.step(state, i, place.step):
                    found.append(self.settled(self.onward(_moved(after, i, place.then), i)))
                    if not all_orders and self.comes_first(state, i, place.step):
                        return found[-1:]
            elif place and place.own:
                both = [self.settled(self.onward(_moved(state, i, to), i)) for to in (place.then, place.otherwise)]
                if not all_orders:
                    return both
                found += both
            elif place:  # no one has asked before: both answers
                asked = (state._replace(answers=(*state.answers, answer)) for answer in (True, False))
                both = [self.settled(self.onward(after, i)) for after in asked]
                if not all_orders:
                    return both
                found += both
        return found

    def awaited(self, state: State, r: int, tile: int) -> bool:
        """Whether a tile is the next one that each of the ring's takers takes from its slot: none can pass the
        slot's barrier before."""
        n = self.stages[r]
        return all((tile - state.agents[i].uses[r]) % (_PERIOD * n) < n for i in self.takers[r])

    def comes_first(self, state: State, i: int, step: Step) -> bool:
        """Whether nothing that others can do before an agent's next step bears on it (see above)."""
        agent = state.agents[i]
        pipelines = [
            r
            for r, (pipeline, owner) in enumerate(self.names)
            if pipeline == step.what and owner in ("", self.programs[i][1])
        ]
        if step == Step("scheduler_barrier", "sync"):  # no other copy passes before this one has
            instances = (j for j, (program, _) in enumerate(self.programs) if program is self.programs[i][0] and j != i)
            return not any(self.may_pass(state, j) for j in instances)
        if any(self.sharers[r] for r in pipelines):
            return all(self.takers[r] != self.sharers[r] for r in pipelines)
        if step.kind == "zero_out_of_bounds":
            return False
        if step.kind == "consumer_wait":
            return all(i not in state.pipelines[r][agent.uses[r] % self.stages[r]].arrived for r in pipelines)
        if step.kind == "producer_load":
            return all(
                self.awaited(state, r, agent.uses[r])
                for r, (pipeline, _) in enumerate(self.names)
                if pipeline == step.what
            )
        return True

    def place(self, state: State, i: int) -> Place | None:
        """Where an agent is; None where it is done."""
        at = state.agents[i].at
        return self.tile_indices[i][at] if at < len(self.tile_indices[i]) else None

    def onward(self, state: State, i: int) -> State:
        """The state after the agent's next steps that concern no other, up to one that does, or to a question
        without an answer yet."""
        while place := self.place(state, i):
            agent = state.agents[i]
            if not place.step:
                if place.own or agent.asked == len(state.answers):
                    break
                to = place.then if state.answers[agent.asked] else place.otherwise
                state = _with_agent(state, i, agent._replace(at=to, asked=agent.asked + 1))
            elif place.step.kind in _OWN or self.passes_over(state, i, place.step):
                state = _moved(self.step(state, i, place.step) or state, i, place.then)
            else:
                break
        else:
            self.ended(state, i)
        return state

    def passes_over(self, state: State, i: int, step: Step) -> bool:
        """Whether a step takes or gives back a tile that is dealt to another copy: it only counts it."""
        if step.what not in self.round_robin or step.kind not in ("consumer_wait", "consumer_release"):
            return False
        agent, r = state.agents[i], self.index(step.what, self.programs[i][1])
        return (agent.uses if step.kind == "consumer_wait" else agent.given)[r] % self.stages[r] != self.instances[i]

    def ended(self, state: State, i: int) -> None:
        agent, who = state.agents[i], self.programs[i][1]
        if agent.flying:
            raise Broken(f"{who} ends before it has awaited %{self.product(i, agent.flying[0]).what}")
        if agent.storing:
            raise Broken(f"{who} ends while the copy engine stores from %{self.names[min(agent.storing)][0]}")

    def product(self, i: int, at: int) -> Step:
        """The product that an agent has issued at a place."""
        step = self.tile_indices[i][at].step
        assert step is not None
        return step

    def settled(self, state: State) -> State:
        """The same state: answers counted from the slowest agent on, uses of a ring from its next fill on once all
        slots were filled."""
        busy = [agent.asked for i, agent in enumerate(state.agents) if agent.at < len(self.tile_indices[i])]
        base = min(busy, default=len(state.answers))
        if base > 0:
            agents = tuple(agent._replace(asked=max(0, agent.asked - base)) for agent in state.agents)
            state = state._replace(agents=agents, answers=state.answers[base:])
        for r, n in enumerate(self.stages):
            if self.sharers[r]:
                state = self.recounted(state, r)
                continue
            filler = state.agents[self.filler[r]]
            if filler.full[r] and filler.uses[r]:
                state = self.turned(state, r, filler.uses[r], n)
        return state

    def recounted(self, state: State, r: int) -> State:
        """The same state with parts, takes and gives of a shared ring counted from the least of these numbers on."""
        period = self.periods[r]
        if self.names[r][0] in self.relays:
            return self.recounted_relay(state, r)
        numbers = [state.agents[i].shared[r] for i in self.sharers[r]]
        numbers += [n for i in self.takers[r] for n in (state.agents[i].uses[r], state.agents[i].given[r])]
        by = min((n - numbers[0] + period // 2) % period - period // 2 for n in numbers) + numbers[0]
        by -= (
            by % self.stages[r] if self.names[r][0] in self.round_robin else 0
        )  # a number says in which slot a tile is
        if not by % period:
            return state
        agents = list(state.agents)
        for i in self.sharers[r]:
            agents[i] = agents[i]._replace(shared=_set(agents[i].shared, r, (agents[i].shared[r] - by) % period))
        for i in self.takers[r]:
            uses, given = ((n - by) % period for n in (agents[i].uses[r], agents[i].given[r]))
            agents[i] = agents[i]._replace(uses=_set(agents[i].uses, r, uses), given=_set(agents[i].given, r, given))
        return state._replace(agents=tuple(agents))

    def other(self, r: int, i: int) -> int:
        """The one with whom an agent shares tiles through a ring in relay."""
        return next(j for j in self.takers[r] if j != i)

    def recounted_relay(self, state: State, r: int) -> State:
        """The same state with what each agent shares through a ring in relay counted from what the other one has
        given back."""
        period = self.periods[r]
        for i in self.sharers[r]:
            j = self.other(r, i)
            by, agent, taker = state.agents[j].given[r], state.agents[i], state.agents[j]
            if not by:
                continue
            state = _with_agent(state, i, agent._replace(shared=_set(agent.shared, r, (agent.shared[r] - by) % period)))
            uses, given = ((n - by) % period for n in (taker.uses[r], taker.given[r]))
            state = _with_agent(
                state, j, taker._replace(uses=_set(taker.uses, r, uses), given=_set(taker.given, r, given))
            )
        return state

    def turned(self, state: State, r: int, by: int, n: int) -> State:
        """The same state with the uses of a ring counted from `by` on."""
        period = _PERIOD * n
        agents = []
        for i, agent in enumerate(state.agents):
            if i == self.filler[r] or i in self.takers[r]:
                agent = agent._replace(uses=_set(agent.uses, r, (agent.uses[r] - by) % period))
            if i in self.takers[r]:
                agent = agent._replace(given=_set(agent.given, r, (agent.given[r] - by) % period))
            agents.append(agent)
        stages = [Slot(0, False, 0, frozenset())] * n
        for s, stage in enumerate(state.pipelines[r]):
            at = (s - by) % period
            stages[at % n] = stage._replace(tile=(stage.tile - by) % period, phase=stage.phase ^ at // n % 2)
        return state._replace(agents=tuple(agents), pipelines=_set(state.pipelines, r, tuple(stages)))

    def step(self, state: State, i: int, step: Step) -> State | None:
        """The state after an agent's step; None while it has to wait."""
        agent = state.agents[i]
        who = self.programs[i][1]
        if step.kind == "wgmma":
            for pipeline in step.tiles:
                r = self.index(pipeline, who)
                if agent.given[r] == agent.uses[r]:
                    raise Broken(
                        f"{who} issues %{step.what}, which reads a tile of %{pipeline} that it has given back or never taken"
                    )
            return _with_agent(state, i, agent._replace(flying=(*agent.flying, agent.at)))
        if step.kind == "wgmma_wait":
            names = [self.product(i, at).what for at in agent.flying]
            if step.what not in names:
                raise Broken(f"{who} awaits %{step.what}, which is not in flight")
            return _with_agent(state, i, agent._replace(flying=agent.flying[names.index(step.what) + 1 :]))
        if step.kind == "scheduler_barrier":
            return self.turn(state, i, step.what)
        if step.kind in ("producer_load", "producer_tail"):
            pipelines = [r for r, (pipeline, _) in enumerate(self.names) if pipeline == step.what]
            return self.fill(state, i, pipelines) if step.kind == "producer_load" else self.drain(state, i, pipelines)
        r = self.index(step.what, who)
        if step.kind == "producer_store":
            return self.share(state, i, r)
        if step.kind == "zero_out_of_bounds":
            return self.clear(state, i, r)
        if step.kind == "tma_store":
            for reader in (self.product(i, at) for at in agent.flying):
                if step.what in reader.tiles:
                    raise Broken(f"{who} writes to %{step.what} while %{reader.what} reads it")
            return _with_agent(state, i, agent._replace(storing=agent.storing | {r}))
        if step.kind == "tma_store_wait":
            return _with_agent(state, i, agent._replace(storing=agent.storing - {r}))
        return self.take(state, i, r) if step.kind == "consumer_wait" else self.give(state, i, r)

    def turn(self, state: State, i: int, do: str) -> State | None:
        """Take a turn once it is there, or pass it to the next copy."""
        if do == "sync":
            return state._replace(passed=state.passed - {i}) if i in state.passed else None
        to = self.next[i]
        if to in state.passed:
            raise Broken(
                f"{self.programs[i][1]} passes its turn before {self.programs[to][1]} has taken the one before"
            )
        return state._replace(passed=state.passed | {to})

    def may_pass(self, state: State, i: int) -> bool:
        """Whether an agent may pass a turn before another one passes to it: it has a turn, or passes without taking
        one."""
        return i in state.passed or state.agents[i].at in self.passes[i]

    def index(self, pipeline: str, who: str) -> int:
        found = [r for r, (name, owner) in enumerate(self.names) if name == pipeline and owner in ("", who)]
        if not found:
            raise Broken(f"{who} takes from %{pipeline}, which belongs to another role")
        return found[0]

    def fill(self, state: State, i: int, pipelines: list[int]) -> State | None:
        """Fill the next slot of a ring, or of those of all copies, once all have been given back."""
        for r in pipelines:
            if state.agents[i].full[r] and not self.returned[r]:
                raise Broken(f"%{self.names[r][0]} is filled again, and nothing gives its tiles back")
            if (
                state.agents[i].full[r]
                and state.pipelines[r][state.agents[i].uses[r] % self.stages[r]].arrived != self.takers[r]
            ):
                return None
        for r in pipelines:
            agent, n = state.agents[i], self.stages[r]
            s = agent.uses[r] % n
            stage = state.pipelines[r][s]
            stage = stage._replace(arrived=frozenset()) if agent.full[r] else stage
            if stage.filling:
                raise Broken(f"%{self.names[r][0]} is filled while an earlier copy to the slot is in flight")
            holders = [who for a, (_, who) in zip(state.agents, self.programs) if self.holds(a, r, s)]
            if holders:
                raise Broken(
                    f"{self.programs[i][1]} overwrites a tile of %{self.names[r][0]}, which {holders[0]} has not given back"
                )
            state = _with_stage(state, r, s, stage._replace(tile=agent.uses[r], filling=True))
            uses = (agent.uses[r] + 1) % (_PERIOD * n)
            full: Any = agent.full[r] or uses >= n
            state = _with_agent(
                state, i, agent._replace(uses=_set(agent.uses, r, uses), full=_set(agent.full, r, full))
            )
        return state

    def share(self, state: State, i: int, r: int) -> State | None:
        """Write a part of the next slot, once another role that takes from the ring has given back what was there."""
        agent, n, who = state.agents[i], self.stages[r], self.programs[i][1]
        if self.names[r][0] in self.relays:
            self.must_be_back(state, i, r)
        for j in self.takers[r] if self.names[r][0] not in self.relays else ():
            if self.names[r][0] in self.round_robin and self.instances[j] != agent.shared[r] % n:
                continue
            if (
                n <= (agent.shared[r] - state.agents[j].given[r]) % self.periods[r] < self.periods[r] // 2
            ):  # else it may be ahead
                if self.takers[r] != self.sharers[r]:
                    return None
                raise Broken(
                    f"{who} overwrites its part of a tile of %{self.names[r][0]}, which {self.programs[j][1]} has not given back"
                )
        for reader in (self.product(i, at) for at in agent.flying):
            if self.names[r][0] in reader.tiles and self.stages[r] == 1:
                raise Broken(f"{who} writes to %{self.names[r][0]} while %{reader.what} reads it")
        return _with_agent(
            state, i, agent._replace(shared=_set(agent.shared, r, (agent.shared[r] + 1) % self.periods[r]))
        )

    def must_be_back(self, state: State, i: int, r: int) -> None:
        """Raise Broken where an agent writes to a ring in relay before both have given back what was written to it."""
        agent, j = state.agents[i], self.other(r, i)
        for writer, taker, has in ((agent, state.agents[j], j), (state.agents[j], agent, i)):
            if writer.shared[r] != taker.given[r]:
                who, whom = self.programs[i][1], self.programs[has][1]
                raise Broken(f"{who} overwrites a tile of %{self.names[r][0]}, which {whom} has not given back")

    def clear(self, state: State, i: int, r: int) -> State:
        """Overwrite rows of a tile that the agent has taken. No other has taken it, and no product reads it."""
        agent, (pipeline, _), who = state.agents[i], self.names[r], self.programs[i][1]
        if agent.given[r] == agent.uses[r]:
            raise Broken(f"{who} clears rows of a tile of %{pipeline} that it has given back or never taken")
        for product in (self.product(i, at) for at in agent.flying):
            if pipeline in product.tiles:
                raise Broken(f"{who} clears rows of a tile of %{pipeline} while %{product.what} reads it")
        for j in self.takers[r] - {i}:
            if 0 < (state.agents[j].uses[r] - agent.given[r]) % self.periods[r] <= self.stages[r]:
                raise Broken(f"{who} clears rows of a tile of %{pipeline} that {self.programs[j][1]} has taken")
        return state

    def holds(self, agent: Agent, r: int, s: int) -> bool:
        """Whether an agent has a tile in this slot that it has not given back."""
        period = _PERIOD * self.stages[r]
        taken = (agent.uses[r] - agent.given[r]) % period
        return (
            self.returned[r]
            and not agent.full[r]
            and any((agent.given[r] + k) % self.stages[r] == s for k in range(taken))
        )

    def take(self, state: State, i: int, r: int) -> State | None:
        agent, n = state.agents[i], self.stages[r]
        use = agent.uses[r]
        if self.sharers[r]:
            writers = self.sharers[r] - {i} if self.names[r][0] in self.relays else self.sharers[r]
            missing = (use - state.agents[j].shared[r] for j in writers)  # one who passes over tiles may be ahead
            if not self.passes_over(state, i, Step("consumer_wait", self.names[r][0])) and any(
                m % self.periods[r] < n for m in missing
            ):
                return None
            return _with_agent(state, i, agent._replace(uses=_set(agent.uses, r, (use + 1) % self.periods[r])))
        stage = state.pipelines[r][use % n]
        if stage.phase == use // n % 2:  # the phase that it waits for is not complete
            return None
        if stage.filling or stage.tile != use:
            raise Broken(
                f"{self.programs[i][1]} takes a tile of %{self.names[r][0]} that is not there yet: the phase is that of another one"
            )
        return _with_agent(state, i, agent._replace(uses=_set(agent.uses, r, (use + 1) % (_PERIOD * n))))

    def give(self, state: State, i: int, r: int) -> State | None:
        agent, n, (pipeline, _) = state.agents[i], self.stages[r], self.names[r]
        who = self.programs[i][1]
        if agent.given[r] == agent.uses[r]:
            raise Broken(f"{who} gives back a tile of %{pipeline} that it has not taken")
        if r in agent.storing:
            raise Broken(f"{who} gives back a tile of %{pipeline} from which the copy engine stores")
        for product in (self.product(i, at) for at in agent.flying):
            if pipeline in product.tiles and (agent.uses[r] - agent.given[r]) % self.periods[r] == 1:
                raise Broken(f"{who} gives back a tile of %{pipeline} while %{product.what} reads it")
        if self.sharers[r]:
            return _with_agent(
                state, i, agent._replace(given=_set(agent.given, r, (agent.given[r] + 1) % self.periods[r]))
            )
        s = agent.given[r] % n
        stage = state.pipelines[r][s]
        if i in stage.arrived:
            raise Broken(f"{who} arrives twice at the barrier of a slot of %{pipeline}")
        state = _with_stage(state, r, s, stage._replace(arrived=stage.arrived | {i}))
        return _with_agent(state, i, agent._replace(given=_set(agent.given, r, (agent.given[r] + 1) % (_PERIOD * n))))

    def drain(self, state: State, i: int, pipelines: list[int]) -> State | None:
        agent = state.agents[i]
        used = [(r, s) for r in pipelines for s in range(self.stages[r] if agent.full[r] else agent.uses[r])]
        if any(state.pipelines[r][s].arrived != self.takers[r] for r, s in used):
            return None
        for r, s in used:
            state = _with_stage(state, r, s, state.pipelines[r][s]._replace(arrived=frozenset()))
        return state

    def left(self, state: State) -> str:
        """What is left when all agents are done; empty if nothing is."""
        for (pipeline, _), stages in zip(self.names, state.pipelines):
            if any(stage.filling for stage in stages):
                return f"a copy to %{pipeline} is in flight at the end"
            if any(stage.arrived for stage in stages):
                return f"arrivals at the barrier of %{pipeline} are awaited by nothing at the end"
        for i in sorted(state.passed):
            return f"a turn is passed to {self.programs[i][1]}, which takes none at the end"
        for r, (pipeline, _) in enumerate(self.names):
            if pipeline in self.relays:
                if any(state.agents[i].shared[r] != state.agents[self.other(r, i)].given[r] for i in self.sharers[r]):
                    return f"not all tiles of %{pipeline} are taken and given back at the end"
            elif (
                len(
                    {agent.shared[r] for i, agent in enumerate(state.agents) if i in self.sharers[r]}
                    | self.taken(state, r)
                )
                > 1
            ):
                return f"not all parts of a tile of %{pipeline} are taken and given back at the end"
        for r, (pipeline, owner) in enumerate(self.names):
            for agent, (_, who) in zip(state.agents, self.programs):
                if (
                    self.returned[r]
                    and owner in ("", who)
                    and not agent.full[r]
                    and agent.given[r] != agent.uses[r]
                    and who not in self.fillers(r)
                ):
                    return f"{who} keeps a tile of %{pipeline} at the end"
        return ""

    def taken(self, state: State, r: int) -> set[int]:
        """How many tiles of a shared ring the agents that take from it have taken and given back."""
        found = (state.agents[i] for i in self.takers[r] if self.sharers[r])
        return {n for agent in found for n in (agent.uses[r], agent.given[r])}

    def fillers(self, r: int) -> set[str]:
        return {
            who
            for program, who in self.programs
            if any(s.kind == "producer_load" and s.what == self.names[r][0] for s in program.steps)
        }


def _set(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _with_agent(state: State, i: int, agent: Agent) -> State:
    return state._replace(agents=_set(state.agents, i, agent))


def _with_stage(state: State, r: int, s: int, stage: Slot) -> State:
    return state._replace(pipelines=_set(state.pipelines, r, _set(state.pipelines[r], s, stage)))


def _moved(state: State, i: int, at: int) -> State:
    return _with_agent(state, i, state.agents[i]._replace(at=at))


@cache
def broken(of: Protocol, all_orders: bool = False) -> str:
    """What can go wrong, in words; empty text if nothing can. all_orders: follow every order of steps, which finds
    the same."""
    try:
        machine = _Machine(of)
        start = machine.start()
        seen, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            after = machine.following(state, all_orders)
            waiting += set(after) - seen
            seen.update(after)
            if len(seen) > MOST_STATES:
                raise Broken(
                    f"the roles have more than {MOST_STATES:,} states; expected that no role runs ahead of another without bound"
                )
            if not after:
                stuck = [who for i, (_, who) in enumerate(machine.programs) if machine.place(state, i)]
                if stuck:
                    raise Broken(f"{' and '.join(stuck)} can wait for ever")
                if reason := machine.left(state):
                    raise Broken(reason)
    except Broken as error:
        return str(error)
    return ""
