"""The protocol of a divided kernel, proved: every interleaving of its roles, for every number of turns of their loops.

A role is a list of steps: it fills, takes or gives back a slot, issues or awaits a product. Loops of all roles run over the same tiles, as
the rule `walks` says, so one number of turns holds for all. It is not chosen before: the role that is the first to reach a turn decides
whether there is one, and the others follow. Turns count from the slowest role on, and uses of a slot modulo a number that no role
can be ahead of another by. So there are finitely many states, and all are visited: what is found holds for any number of turns.

What is modelled, as the hardware does it: a slot is full when the barrier's phase changes, which the copy engine does at any time after the
fill; a wait for a phase passes on its parity alone. A slot is free by a named barrier, which opens when all takers and the producer have
arrived. Products run until they are awaited, in the order in which they were issued, and read their tiles until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from attngen.ir.graph import Kernel, Module
from attngen.ir.numeric import compiled
from attngen.ir.ops import Block, Loop
from attngen.ir.roles import Await, Drain, Fill, Give, Issue, Pipeline, Put, Ring, Take


class Step(NamedTuple):
    """What a role does: `fill`, `take`, `give`, `drain` of a ring; `issue` and `await` of a product, `put` through a ring."""

    kind: str
    what: str = ""  # a ring, or a product
    tiles: tuple[str, ...] = ()  # rings whose taken tiles a product reads; `put`: the rings that are written


@dataclass(frozen=True)
class Walk:
    """A role's loop over tiles: the steps of its first turn, of each later one, and after the last one, if there was any."""

    first: tuple[Step, ...]
    later: tuple[Step, ...]
    last: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Program:
    """A role: steps before its loop, the loop, steps after it."""

    name: str
    before: tuple[Step, ...]
    walk: Walk
    after: tuple[Step, ...]
    copies: int


@dataclass(frozen=True)
class Protocol:
    """All that a kernel's roles do with its rings, under one number of slots of each."""

    programs: tuple[Program, ...]
    slots: tuple[tuple[str, int], ...]  # of each ring
    each: tuple[tuple[str, str], ...]  # of each ring, the role whose copies have one of their own; or nothing


def protocol(module: Module, kernel: Kernel) -> Iterator[str]:
    """No deadlock; no tile is read before it is there, or overwritten before all have given it back; at the end nothing is left."""
    for role in kernel.roles:
        if why := _shape(kernel, role):
            yield f"@{role.name} {why}"
            return
    for row in module.rows(kernel.name, kernel.backend):
        values = {"num_stages": row.num_stages}
        reason = broken(protocol_of(kernel, values))
        if reason:
            yield f"with num_stages={row.num_stages}, {reason}"


def _shape(kernel: Kernel, role: Block) -> str:
    """Why a role is not one loop over tiles, with steps before and after it, as the proof takes it to be; empty text if it is."""
    loops = [op for op in role.ops if isinstance(op, (Loop, Pipeline))]
    bodies = {(op.body,) if isinstance(op, Loop) else op.bodies for op in loops}
    if len(bodies) > 1 or sum(isinstance(op, Pipeline) for op in loops) > 1:
        return "has loops over several bodies; expected one body, or one pipeline"
    if any(isinstance(op, (Loop, Pipeline)) for names in bodies for name in names for op in kernel.block(name).ops):
        return "has a loop inside a loop"
    between = role.ops[role.ops.index(loops[0]) : role.ops.index(loops[-1])] if loops else ()
    steps = [step.kind for step in _steps(kernel, Block("", tuple(op for op in between if op not in loops)))]
    return f"has a {steps[0]} between its loops; expected it before or after them" if steps else ""


def protocol_of(kernel: Kernel, values: dict[str, int]) -> Protocol:
    """The protocol of a kernel under a row of its schedule."""
    rings = [op for op in kernel.ops() if isinstance(op, Ring)]
    slots = tuple((ring.name, int(compiled(ring.slots)(values))) for ring in rings)
    programs = tuple(_program(kernel, role) for role in kernel.roles)
    return Protocol(programs, slots, tuple((ring.name, ring.each) for ring in rings))


def _program(kernel: Kernel, role: Block) -> Program:
    assert role.role is not None
    parts: list[list[Step]] = [[], []]
    walk = Walk((), ())
    for op in role.ops:
        if isinstance(op, Pipeline):
            walk = Walk(*(tuple(_steps(kernel, kernel.block(body))) for body in op.bodies))
        elif isinstance(op, Loop):
            body = tuple(_steps(kernel, kernel.block(op.body)))
            walk = Walk(body, body)
        else:
            parts[walk != Walk((), ())] += _steps(kernel, Block("", (op,)))
    if not any(step.kind in _SHARED for step in (*walk.first, *walk.later, *walk.last)):
        walk = Walk((), ())  # no one waits for its turns, and it for no one
    return Program(role.name, tuple(parts[0]), walk, tuple(parts[1]), role.role.copies)


def _steps(kernel: Kernel, block: Block) -> Iterator[Step]:
    for op in block.ops:
        match op:
            case Fill():
                yield Step("fill", op.ring)
            case Take():
                yield Step("take", op.ring)
            case Give():
                yield Step("give", _ring_of(kernel, op.value))
            case Drain():
                yield Step("drain", op.ring)
            case Put():
                yield Step("put", "", (op.through,))
            case Issue():
                yield Step("issue", op.name, tuple(_ring_of(kernel, ref) for ref in (op.a, op.b) if isinstance(kernel.op(ref), Take)))
            case Await():
                yield Step("await", op.value)


def _ring_of(kernel: Kernel, ref: str) -> str:
    take = kernel.op(ref)
    return take.ring if isinstance(take, Take) else ""


# ---------------------------------------------------------------------------------------------- states


class Agent(NamedTuple):
    """A copy of a role: where it is, and how often it has used each ring, modulo `_PERIOD` times its slots."""

    part: int  # 0 before the loop, 1 a turn, 2 after the last turn, 3 after the loop, 4 done
    at: int  # the next step of the part
    turn: int  # of the loop, from the slowest agent's on
    begun: bool  # it has had a turn
    uses: tuple[int, ...]  # fills, or takes; of each ring
    given: tuple[int, ...]
    full: tuple[bool, ...]  # whether it has filled all slots of the ring once
    flying: tuple[Step, ...]  # products that are not awaited


class Slot(NamedTuple):
    """A slot of a ring."""

    tile: int  # the number of the fill, as `uses` counts; -1 before the first
    filling: bool
    phase: int  # fills that are complete, modulo 2
    arrived: frozenset[int]  # agents at its named barrier


class State(NamedTuple):
    agents: tuple[Agent, ...]
    rings: tuple[tuple[Slot, ...], ...]
    known: int  # turns that exist, from the slowest agent's on
    end: int  # the number of turns, likewise; -1 before it is decided


_PERIOD = 2
MOST_STATES = 400_000
_SHARED = ("fill", "take", "give", "drain")
_OWN = ("issue", "await", "put")


class _Broken(Exception):
    """What is wrong, in words."""


class _Machine:
    """The states that follow a state."""

    def __init__(self, of: Protocol) -> None:
        self.names: list[tuple[str, str]] = []  # (ring, agent it belongs to): a ring with `each` stands for several
        self.programs = [(program, f"{program.name} {copy}") for program in of.programs for copy in range(program.copies)]
        for ring, each in of.each:
            self.names += [(ring, owner) for owner in [who for program, who in self.programs if program.name == each] or [""]]
        self.slots = [dict(of.slots)[ring] for ring, _ in self.names]
        kinds = [{s.what for s in self._all(p) if s.kind in ("take", "give")} for p, _ in self.programs]
        self.takers = [
            frozenset(i for i, (_, who) in enumerate(self.programs) if ring in kinds[i] and owner in ("", who))
            for ring, owner in self.names
        ]
        gives = {s.what for p, _ in self.programs for s in self._all(p) if s.kind == "give"}
        self.returned = [ring in gives for ring, _ in self.names]
        self.filler = [
            next((i for i, (p, _) in enumerate(self.programs) if any(s.kind == "fill" and s.what == ring for s in self._all(p))), -1)
            for ring, _ in self.names
        ]

        self.alike: list[tuple[list[int], list[list[int]]]] = []
        for program in of.programs:
            if program.copies > 1:
                copies = [i for i, (p, _) in enumerate(self.programs) if p is program]
                kept = [ring for ring, each in of.each if each == program.name]
                self.alike.append((copies, [[r for r, (name, _) in enumerate(self.names) if name == ring] for ring in kept]))

    @staticmethod
    def _all(program: Program) -> tuple[Step, ...]:
        walk = program.walk
        return (*program.before, *walk.first, *walk.later, *walk.last, *program.after)

    def start(self) -> State:
        none = (0,) * len(self.names)
        agent = Agent(0, 0, 0, False, none, none, (False,) * len(self.names), ())
        return State((agent,) * len(self.programs), tuple((Slot(-1, False, 0, frozenset()),) * n for n in self.slots), 0, -1)

    def following(self, state: State) -> Iterator[State]:
        """Every state that one step of one agent, or of the copy engine, leads to."""
        for r, ring in enumerate(state.rings):
            for s, slot in enumerate(ring):
                if slot.filling:
                    yield _with_slot(state, r, s, slot._replace(filling=False, phase=slot.phase ^ 1))
        for i, agent in enumerate(state.agents):
            if agent.part < 4:
                yield from self.steps(state, i)

    def steps(self, state: State, i: int) -> Iterator[State]:
        agent, (program, _) = state.agents[i], self.programs[i]
        walk = program.walk
        steps = (program.before, walk.later if agent.begun else walk.first, walk.last, program.after)[agent.part]
        if agent.at < len(steps):
            after = self.step(state, i, steps[agent.at])
            if after:
                after = _with_agent(after, i, after.agents[i]._replace(at=agent.at + 1))
                for step in steps[agent.at + 1 :]:  # what touches nothing of others needs no state of its own
                    if step.kind not in _OWN:
                        break
                    after = self.step(after, i, step) or after
                    after = _with_agent(after, i, after.agents[i]._replace(at=after.agents[i].at + 1))
                yield self.settled(after)
            return
        if agent.part == 0 and not (walk.first or walk.later):
            yield self.settled(_with_agent(state, i, agent._replace(part=3, at=0)))
        elif agent.part == 0:
            yield from self.head(state, i, agent._replace(part=1, at=0))
        elif agent.part == 1:
            yield from self.head(state, i, agent._replace(at=0, turn=agent.turn + 1, begun=True))
        else:
            self.ended(i, agent)
            yield self.settled(_with_agent(state, i, agent._replace(part=agent.part + 1, at=0)))

    def settled(self, state: State) -> State:
        """The same state: turns counted from the slowest agent's on, uses of a ring from its next fill on once all slots were filled."""
        base = min((agent.turn for agent in state.agents if agent.part < 2), default=state.end)
        if base > 0:
            agents = tuple(agent._replace(turn=max(0, agent.turn - base)) for agent in state.agents)
            state = State(agents, state.rings, state.known - base, state.end - base if state.end >= 0 else -1)
        for r, n in enumerate(self.slots):
            filler = state.agents[self.filler[r]]
            if filler.full[r] and filler.uses[r]:
                state = self.turned(state, r, filler.uses[r], n)
        for copies, own in self.alike:
            state = self.sorted(state, copies, own)
        return state

    def sorted(self, state: State, copies: list[int], own: list[list[int]]) -> State:
        """The same state with a role's copies, which are alike, in a fixed order. `own`: the rings of which each copy has one."""
        shared = [r for r, (_, owner) in enumerate(self.names) if not owner]

        def key(c: int) -> tuple[Any, ...]:
            agent = state.agents[copies[c]]
            mine = [r for rings in own for r in (rings[c],)] + shared
            arrived = tuple(copies[c] in slot.arrived for r in shared for slot in state.rings[r])
            used = tuple((agent.uses[r], agent.given[r]) for r in mine)
            filled = tuple((slot.tile, slot.filling, slot.phase) for rings in own for slot in state.rings[rings[c]])
            return (agent[:4], used, filled, arrived, agent.flying)

        order = sorted(range(len(copies)), key=key)
        if order == list(range(len(copies))):
            return state
        place = {copies[c]: copies[at] for at, c in enumerate(order)}  # agent -> its new number
        moved = {rings[c]: rings[at] for rings in own for at, c in enumerate(order)}  # ring -> its new number
        index = {new: old for old, new in moved.items()}
        rings = tuple(state.rings[index.get(r, r)] for r in range(len(self.names)))
        rings = tuple(
            tuple(slot._replace(arrived=frozenset(place.get(i, i) for i in slot.arrived)) if slot.arrived else slot for slot in slots)
            for slots in rings
        )
        agents = list(state.agents)
        for i, agent in enumerate(state.agents):
            of: list[Any] = [tuple(x[index.get(r, r)] for r in range(len(x))) for x in (agent.uses, agent.given, agent.full)]
            agents[place.get(i, i)] = agent._replace(uses=of[0], given=of[1], full=of[2])
        return State(tuple(agents), rings, state.known, state.end)

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
        slots = [Slot(0, False, 0, frozenset())] * n
        for s, slot in enumerate(state.rings[r]):
            at = (s - by) % period
            slots[at % n] = slot._replace(tile=(slot.tile - by) % period, phase=slot.phase ^ at // n % 2)
        return state._replace(agents=tuple(agents), rings=_set(state.rings, r, tuple(slots)))

    def head(self, state: State, i: int, agent: Agent) -> Iterator[State]:
        """Before a turn: whether there is one."""
        if state.end < 0 or agent.turn < state.end:
            known = max(state.known, agent.turn + 1)
            yield self.settled(_with_agent(state, i, agent)._replace(known=known))
        if agent.turn == state.end or (state.end < 0 and state.known <= agent.turn):
            part = 2 if agent.begun else 3
            yield self.settled(_with_agent(state, i, agent._replace(part=part, at=0))._replace(end=agent.turn))

    def ended(self, i: int, agent: Agent) -> None:
        if agent.part == 3 and agent.flying:
            raise _Broken(f"{self.programs[i][1]} ends before it has awaited %{agent.flying[0].what}")

    def step(self, state: State, i: int, step: Step) -> State | None:
        """The state after an agent's step; None while it has to wait."""
        agent = state.agents[i]
        who = self.programs[i][1]
        if step.kind == "issue":
            for ring in step.tiles:
                r = self.index(ring, who)
                if agent.given[r] == agent.uses[r]:
                    raise _Broken(f"{who} issues %{step.what}, which reads a tile of %{ring} that it has given back or never taken")
            return _with_agent(state, i, agent._replace(flying=(*agent.flying, step)))
        if step.kind == "await":
            names = [s.what for s in agent.flying]
            if step.what not in names:
                raise _Broken(f"{who} awaits %{step.what}, which is not in flight")
            return _with_agent(state, i, agent._replace(flying=agent.flying[names.index(step.what) + 1 :]))
        if step.kind == "put":
            for reader in agent.flying:
                if set(step.tiles) & set(reader.tiles):
                    raise _Broken(f"{who} writes to %{step.tiles[0]} while %{reader.what} reads it")
            return state
        if step.kind == "fill":
            return self.put_in_flight(state, i, [r for r, (ring, _) in enumerate(self.names) if ring == step.what])
        r = self.index(step.what, who)
        return {"take": self.take, "give": self.give, "drain": self.drain}[step.kind](state, i, r)

    def index(self, ring: str, who: str) -> int:
        found = [r for r, (name, owner) in enumerate(self.names) if name == ring and owner in ("", who)]
        if not found:
            raise _Broken(f"{who} takes from %{ring}, which belongs to another role")
        return found[0]

    def put_in_flight(self, state: State, i: int, rings: list[int]) -> State | None:
        for r in rings:
            agent, n = state.agents[i], self.slots[r]
            s = agent.uses[r] % n
            slot = state.rings[r][s]
            if agent.full[r]:
                if not self.returned[r]:
                    raise _Broken(f"%{self.names[r][0]} is filled again, and nothing gives its tiles back")
                if slot.arrived != self.takers[r]:
                    return None
                slot = slot._replace(arrived=frozenset())
            if slot.filling:
                raise _Broken(f"%{self.names[r][0]} is filled while an earlier copy to the slot is in flight")
            holders = [who for a, (_, who) in zip(state.agents, self.programs) if self.holds(a, r, s)]
            if holders:
                raise _Broken(f"{self.programs[i][1]} overwrites a tile of %{self.names[r][0]}, which {holders[0]} has not given back")
            state = _with_slot(state, r, s, slot._replace(tile=agent.uses[r], filling=True))
            uses = (agent.uses[r] + 1) % (_PERIOD * n)
            full: Any = agent.full[r] or uses >= n
            state = _with_agent(state, i, agent._replace(uses=_set(agent.uses, r, uses), full=_set(agent.full, r, full)))
        return state

    def holds(self, agent: Agent, r: int, s: int) -> bool:
        """Whether an agent has a tile in this slot that it has not given back."""
        period = _PERIOD * self.slots[r]
        taken = (agent.uses[r] - agent.given[r]) % period
        return self.returned[r] and not agent.full[r] and any((agent.given[r] + k) % self.slots[r] == s for k in range(taken))

    def take(self, state: State, i: int, r: int) -> State | None:
        agent, n = state.agents[i], self.slots[r]
        use = agent.uses[r]
        slot = state.rings[r][use % n]
        if slot.phase == use // n % 2:  # the phase that it waits for is not complete
            return None
        if slot.filling or slot.tile != use:
            raise _Broken(
                f"{self.programs[i][1]} takes a tile of %{self.names[r][0]} that is not there yet: the phase is that of another one"
            )
        return _with_agent(state, i, agent._replace(uses=_set(agent.uses, r, (use + 1) % (_PERIOD * n))))

    def give(self, state: State, i: int, r: int) -> State | None:
        agent, n, (ring, _) = state.agents[i], self.slots[r], self.names[r]
        who = self.programs[i][1]
        if agent.given[r] == agent.uses[r]:
            raise _Broken(f"{who} gives back a tile of %{ring} that it has not taken")
        for product in agent.flying:
            if ring in product.tiles and (agent.uses[r] - agent.given[r]) % (_PERIOD * n) == 1:
                raise _Broken(f"{who} gives back a tile of %{ring} while %{product.what} reads it")
        s = agent.given[r] % n
        slot = state.rings[r][s]
        if i in slot.arrived:
            raise _Broken(f"{who} arrives twice at the barrier of a slot of %{ring}")
        state = _with_slot(state, r, s, slot._replace(arrived=slot.arrived | {i}))
        return _with_agent(state, i, agent._replace(given=_set(agent.given, r, (agent.given[r] + 1) % (_PERIOD * n))))

    def drain(self, state: State, i: int, r: int) -> State | None:
        agent, n = state.agents[i], self.slots[r]
        used = range(n) if agent.full[r] else range(agent.uses[r])
        if any(state.rings[r][s].arrived != self.takers[r] for s in used):
            return None
        for s in used:
            state = _with_slot(state, r, s, state.rings[r][s]._replace(arrived=frozenset()))
        return state

    def left(self, state: State) -> str:
        """What is left when all agents are done; empty if nothing is."""
        for (ring, _), slots in zip(self.names, state.rings):
            if any(slot.filling for slot in slots):
                return f"a copy to %{ring} is in flight at the end"
            if any(slot.arrived for slot in slots):
                return f"arrivals at the barrier of %{ring} are awaited by nothing at the end"
        for r, (ring, owner) in enumerate(self.names):
            for agent, (_, who) in zip(state.agents, self.programs):
                if (
                    self.returned[r]
                    and owner in ("", who)
                    and not agent.full[r]
                    and agent.given[r] != agent.uses[r]
                    and who not in self.fillers(r)
                ):
                    return f"{who} keeps a tile of %{ring} at the end"
        return ""

    def fillers(self, r: int) -> set[str]:
        return {who for program, who in self.programs if any(s.kind == "fill" and s.what == self.names[r][0] for s in self._all(program))}


def _set(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _with_agent(state: State, i: int, agent: Agent) -> State:
    return state._replace(agents=_set(state.agents, i, agent))


def _with_slot(state: State, r: int, s: int, slot: Slot) -> State:
    return state._replace(rings=_set(state.rings, r, _set(state.rings[r], s, slot)))


@cache
def broken(of: Protocol) -> str:
    """What can go wrong, in words; empty text if nothing can."""
    machine = _Machine(of)
    start = machine.start()
    seen, waiting = {start}, [start]
    try:
        while waiting:
            state = waiting.pop()
            stuck = True
            for after in machine.following(state):
                stuck = False
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
            if len(seen) > MOST_STATES:
                raise _Broken(f"the roles have more than {MOST_STATES:,} states; expected that no role runs ahead of another without bound")
            if stuck:
                at = [who for agent, (_, who) in zip(state.agents, machine.programs) if agent.part < 4]
                if at:
                    raise _Broken(f"{' and '.join(at)} can wait for ever")
                if reason := machine.left(state):
                    raise _Broken(reason)
    except _Broken as error:
        return str(error)
    return ""
