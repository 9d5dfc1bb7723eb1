"""The model checker of the rule `protocol`: it visits the states that warp groups which share pipelines can reach.

A state has the step of each warp-group instance, the contents of each pipeline stage, and the decisions made so far. At
the end of each iteration it is decided whether there is another one. The first instance that asks decides (the search
follows both answers), and the others get the same answer. Answers are counted from the slowest instance. Each instance
counts its uses of a pipeline modulo a multiple of the pipeline's stages, because no instance can be so far ahead of
another. So there are finitely many states.

An agent is one instance of a warp group. The search does not follow every order of their steps. If nothing that other
agents can do before an agent's next step depends on that step or changes it, the search takes the step at once, and
leaves out the other orders. This is the method of persistent sets (Godefroid, Partial-Order Methods for the
Verification of Concurrent Systems, 1996, section 4.1): it loses no deadlock and no violation that some order has. The
search takes these steps at once:

- a release, because nobody passes the empty barrier without it;
- a TMA load, or the end of its copy, if the tile is the next one of each consumer in its stage;
- a wait for a loaded tile, if the instance has not yet released the stage;
- all steps with a tile that instances write for another warp group: each waits for others until it can be taken, and
  from then on it can be taken;
- an arrival at a scheduler barrier, because the next instance cannot sync without it; a sync, while no other instance
  can arrive before it;
- the wait of producer_tail, which no other agent sees; and the end of an iteration, with both decisions.

It follows all orders of steps with a tile that the instances which write it also read, such as dS: `producer_store`
does not wait for the release there, so a store that comes too early shows in some orders only. It also follows all
orders of zero_out_of_bounds, because another consumer may have passed its wait for the tile.
"""

from __future__ import annotations

from functools import cache

from attngen.verify.automata import SYNC, Protocol, Step
from attngen.verify.canonical import canonical
from attngen.verify.states import PERIOD, Agent, Stage, State, Tables, Violation, moved, put, with_agent, with_stage

MOST_STATES = 400_000
_LOCAL = ("wgmma", "wgmma_wait", "tma_store", "tma_store_wait")  # no other instance sees them: no states in between


class _Machine(Tables):
    """The steps of agents. A step leads to another state, or is a violation."""

    def start(self) -> State:
        none = (0,) * len(self.names)
        agents = [Agent(0, 0, none, none, (False,) * len(self.names), stored=none) for _ in self.warp_groups]
        state = State(tuple(agents), tuple((Stage(-1, False, 0, frozenset()),) * n for n in self.stages))
        for i in range(len(agents)):
            state = self.run_local(state, i)
        return state

    def successors(self, state: State, all_orders: bool = False) -> list[State]:
        """The states after one step of any agent or the end of any TMA copy. If a step can be taken at once (see
        above), only the states after that step, unless `all_orders` is set."""
        found: list[State] = []
        for r, stages in enumerate(state.pipelines):
            for s, stage in enumerate(stages):
                if stage.loading:
                    found.append(with_stage(state, r, s, stage._replace(loading=False, phase=stage.phase ^ 1)))
                    if not all_orders and self.is_next_for_all(state, r, stage.tile):
                        return found[-1:]
        for i in range(len(state.agents)):
            node = self.node(state, i)
            if node is None:
                continue
            if node.step:
                if after := self.step(state, i, node.step):
                    found.append(self.go_to(after, i, node.then))
                    if not all_orders and self.comes_first(state, i, node.step):
                        return found[-1:]
                continue
            if node.local:
                both = [self.go_to(state, i, to) for to in (node.then, node.otherwise)]
            else:  # no agent has reached this branch before: both outcomes are possible
                asked = (state._replace(answers=(*state.answers, answer)) for answer in (True, False))
                both = [canonical(self, self.run_local(after, i)) for after in asked]
            if not all_orders:
                return both
            found += both
        return found

    def go_to(self, state: State, i: int, node: int) -> State:
        """The canonical state with an agent at a node, and after its local steps from there."""
        return canonical(self, self.run_local(moved(state, i, node), i))

    def is_next_for_all(self, state: State, r: int, tile: int) -> bool:
        """True if each consumer of the pipeline takes this tile next from the tile's stage, so that none can pass the
        stage's full barrier before the tile arrives."""
        n = self.stages[r]
        return all((tile - state.agents[i].uses[r]) % (PERIOD * n) < n for i in self.consumers[r])

    def comes_first(self, state: State, i: int, step: Step) -> bool:
        """True if nothing that other agents can do before this agent's next step affects the step (see above)."""
        agent = state.agents[i]
        pipelines = [
            r for r, (name, owner) in enumerate(self.pipelines) if name == step.name and owner in ("", self.who[i])
        ]
        if step == SYNC:  # no other instance arrives before this one has synced
            others = (j for j, program in enumerate(self.warp_groups) if program is self.warp_groups[i] and j != i)
            return not any(self.may_arrive(state, j) for j in others)
        if any(self.writers[r] for r in pipelines):
            return all(self.consumers[r] != self.writers[r] for r in pipelines)
        if step.kind == "zero_out_of_bounds":
            return False
        if step.kind == "consumer_wait":
            return all(i not in state.pipelines[r][agent.uses[r] % self.stages[r]].arrived for r in pipelines)
        if step.kind == "producer_load":
            loaded = [r for r, name in enumerate(self.names) if name == step.name]
            return all(self.is_next_for_all(state, r, agent.uses[r]) for r in loaded)
        return True

    def may_arrive(self, state: State, i: int) -> bool:
        """True if an agent may arrive at a scheduler barrier before another one arrives at its own: it can sync, or
        arrives without a sync."""
        return i in state.arrivals or state.agents[i].at in self.before_arrive[i]

    def run_local(self, state: State, i: int) -> State:
        """The state after the agent's next steps that no other agent sees, up to one that others see, or to a
        branch whose outcome is not decided yet."""
        while node := self.node(state, i):
            agent = state.agents[i]
            if not node.step:
                if node.local or agent.answered == len(state.answers):
                    break
                to = node.then if state.answers[agent.answered] else node.otherwise
                state = with_agent(state, i, agent._replace(at=to, answered=agent.answered + 1))
            elif node.step.kind in _LOCAL or self.skips(state, i, node.step):
                state = moved(self.step(state, i, node.step) or state, i, node.then)
            else:
                break
        else:
            self.check_end(state, i)
        return state

    def skips(self, state: State, i: int, step: Step) -> bool:
        """True if a step waits for or releases a round-robin tile of another instance. Then it only counts the tile."""
        if step.name not in self.round_robin or step.kind not in ("consumer_wait", "consumer_release"):
            return False
        agent, r = state.agents[i], self.index(step.name, self.who[i])
        count = (agent.uses if step.kind == "consumer_wait" else agent.released)[r]
        return count % self.stages[r] != self.instance[i]

    def check_end(self, state: State, i: int) -> None:
        """Raise Violation if an agent ends while a product or a TMA store of its is in flight."""
        agent, who = state.agents[i], self.who[i]
        if agent.in_flight:
            raise Violation(f"{who} ends before it has waited for %{self.in_flight(state, i)[0].name}")
        if agent.storing:
            raise Violation(f"{who} ends while a TMA store reads %{self.names[min(agent.storing)]}")

    def index(self, name: str, who: str) -> int:
        """The number of the pipeline that an agent uses under a name."""
        found = [r for r, (pipeline, owner) in enumerate(self.pipelines) if pipeline == name and owner in ("", who)]
        if not found:
            raise Violation(f"{who} uses %{name}, which belongs to another warp group")
        return found[0]

    def step(self, state: State, i: int, step: Step) -> State | None:
        """The state after an agent's step; None while it has to wait."""
        match step.kind:
            case "wgmma":
                return self.wgmma(state, i, step)
            case "wgmma_wait":
                return self.wgmma_wait(state, i, step.name)
            case "scheduler_barrier":
                return self.scheduler_barrier(state, i, step.name)
            case "producer_load" | "producer_tail":
                loaded = [r for r, name in enumerate(self.names) if name == step.name]
                does = self.producer_load if step.kind == "producer_load" else self.producer_tail
                return does(state, i, loaded)
        r = self.index(step.name, self.who[i])
        match step.kind:
            case "producer_store":
                return self.producer_store(state, i, r)
            case "zero_out_of_bounds":
                return self.zero_out_of_bounds(state, i, r)
            case "tma_store":
                self.must_not_be_read(state, i, r, "writes to")
                return with_agent(state, i, state.agents[i]._replace(storing=state.agents[i].storing | {r}))
            case "tma_store_wait":
                return with_agent(state, i, state.agents[i]._replace(storing=state.agents[i].storing - {r}))
            case "consumer_wait":
                return self.consumer_wait(state, i, r)
        return self.consumer_release(state, i, r)

    def must_not_be_read(self, state: State, i: int, r: int, does: str) -> None:
        """Raise Violation if a wgmma that an agent has in flight reads a tile of a pipeline."""
        for product in self.in_flight(state, i):
            if self.names[r] in product.tiles:
                raise Violation(f"{self.who[i]} {does} %{self.names[r]} while %{product.name} reads it")

    def wgmma(self, state: State, i: int, step: Step) -> State:
        agent, who = state.agents[i], self.who[i]
        for name in step.tiles:
            r = self.index(name, who)
            if agent.released[r] == agent.uses[r]:
                raise Violation(
                    f"{who} issues %{step.name}, which reads a tile of %{name} that it has released or never waited for"
                )
        return with_agent(state, i, agent._replace(in_flight=(*agent.in_flight, agent.at)))

    def wgmma_wait(self, state: State, i: int, name: str) -> State:
        """Wait for a product, and so for all that were issued before it."""
        names = [product.name for product in self.in_flight(state, i)]
        if name not in names:
            raise Violation(f"{self.who[i]} waits for %{name}, which is not in flight")
        agent = state.agents[i]
        return with_agent(state, i, agent._replace(in_flight=agent.in_flight[names.index(name) + 1 :]))

    def scheduler_barrier(self, state: State, i: int, does: str) -> State | None:
        """Sync with the arrival of the previous instance, or arrive for the next one."""
        if does == "sync":
            return state._replace(arrivals=state.arrivals - {i}) if i in state.arrivals else None
        to = self.next[i]
        if to in state.arrivals:
            raise Violation(
                f"{self.who[i]} arrives at the scheduler barrier of {self.who[to]}, which has not synced since the "
                f"last arrival"
            )
        return state._replace(arrivals=state.arrivals | {to})

    def producer_load(self, state: State, i: int, pipelines: list[int]) -> State | None:
        """Start a TMA copy into the next stage once it is empty. If each instance has a pipeline of its own, start one
        copy for each, once the next stages of all are empty."""
        for r in pipelines:
            agent = state.agents[i]
            if agent.wrapped[r] and not self.is_released[r]:
                raise Violation(f"%{self.names[r]} is loaded again, and nothing releases its tiles")
            stage = state.pipelines[r][agent.uses[r] % self.stages[r]]
            if agent.wrapped[r] and stage.arrived != self.consumers[r]:
                return None
        for r in pipelines:
            agent, n = state.agents[i], self.stages[r]
            s = agent.uses[r] % n
            stage = state.pipelines[r][s]
            stage = stage._replace(arrived=frozenset()) if agent.wrapped[r] else stage
            if stage.loading:
                raise Violation(f"%{self.names[r]} is loaded while an earlier copy to the stage is in flight")
            if holders := [who for a, who in zip(state.agents, self.who) if self.holds(a, r, s)]:
                raise Violation(
                    f"{self.who[i]} overwrites a tile of %{self.names[r]}, which {holders[0]} has not released"
                )
            state = with_stage(state, r, s, stage._replace(tile=agent.uses[r], loading=True))
            uses = (agent.uses[r] + 1) % (PERIOD * n)
            wrapped = put(agent.wrapped, r, agent.wrapped[r] or uses >= n)
            state = with_agent(state, i, agent._replace(uses=put(agent.uses, r, uses), wrapped=wrapped))
        return state

    def holds(self, agent: Agent, r: int, s: int) -> bool:
        """True if an agent has waited for a tile in this stage that it has not released."""
        n = self.stages[r]
        held = (agent.uses[r] - agent.released[r]) % (PERIOD * n)
        in_stage = any((agent.released[r] + k) % n == s for k in range(held))
        return self.is_released[r] and not agent.wrapped[r] and in_stage

    def producer_tail(self, state: State, i: int, pipelines: list[int]) -> State | None:
        """Wait until all stages that were filled are empty."""
        agent = state.agents[i]
        used = [(r, s) for r in pipelines for s in range(self.stages[r] if agent.wrapped[r] else agent.uses[r])]
        if any(state.pipelines[r][s].arrived != self.consumers[r] for r, s in used):
            return None
        for r, s in used:
            state = with_stage(state, r, s, state.pipelines[r][s]._replace(arrived=frozenset()))
        return state

    def producer_store(self, state: State, i: int, r: int) -> State | None:
        """Write a part of the next tile, once another warp group that reads the pipeline has released the last one."""
        agent, n, name = state.agents[i], self.stages[r], self.names[r]
        exchange = name in self.exchanges
        if exchange:
            self.exchange_must_be_empty(state, i, r)
        for j in self.consumers[r] if not exchange else ():
            if name in self.round_robin and self.instance[j] != agent.stored[r] % n:
                continue
            unreleased = (agent.stored[r] - state.agents[j].released[r]) % self.periods[r]
            if n <= unreleased < self.periods[r] // 2:  # otherwise the consumer may be ahead
                if self.consumers[r] != self.writers[r]:
                    return None
                raise Violation(
                    f"{self.who[i]} overwrites its part of a tile of %{name}, which {self.who[j]} has not released"
                )
        if n == 1:
            self.must_not_be_read(state, i, r, "writes to")
        return with_agent(
            state, i, agent._replace(stored=put(agent.stored, r, (agent.stored[r] + 1) % self.periods[r]))
        )

    def exchange_must_be_empty(self, state: State, i: int, r: int) -> None:
        """Raise Violation if an agent writes to an exchange before both agents have released the earlier tiles."""
        j = self.other(r, i)
        for writer, reader in ((i, j), (j, i)):
            if state.agents[writer].stored[r] != state.agents[reader].released[r]:
                raise Violation(
                    f"{self.who[i]} overwrites a tile of %{self.names[r]}, which {self.who[reader]} has not released"
                )

    def zero_out_of_bounds(self, state: State, i: int, r: int) -> State:
        """Overwrite rows of a tile that the agent holds. No other agent may hold it, and no wgmma may read it."""
        agent, name, who = state.agents[i], self.names[r], self.who[i]
        if agent.released[r] == agent.uses[r]:
            raise Violation(f"{who} zeroes rows of a tile of %{name} that it has released or never waited for")
        self.must_not_be_read(state, i, r, "zeroes rows of a tile of")
        for j in self.consumers[r] - {i}:
            if 0 < (state.agents[j].uses[r] - agent.released[r]) % self.periods[r] <= self.stages[r]:
                raise Violation(f"{who} zeroes rows of a tile of %{name} that {self.who[j]} reads")
        return state

    def consumer_wait(self, state: State, i: int, r: int) -> State | None:
        """Pass the full barrier of the next stage: by its parity, or once all instances have written their parts."""
        agent, n, name = state.agents[i], self.stages[r], self.names[r]
        use = agent.uses[r]
        if self.writers[r]:
            writers = self.writers[r] - {i} if name in self.exchanges else self.writers[r]
            missing = any((use - state.agents[j].stored[r]) % self.periods[r] < n for j in writers)
            if missing and not self.skips(state, i, Step("consumer_wait", name)):  # one that skips tiles may be ahead
                return None
            return with_agent(state, i, agent._replace(uses=put(agent.uses, r, (use + 1) % self.periods[r])))
        stage = state.pipelines[r][use % n]
        if stage.phase == use // n % 2:  # the phase that it waits for is not complete
            return None
        if stage.loading or stage.tile != use:
            raise Violation(
                f"{self.who[i]} takes a tile of %{name} that is not there yet: the phase is that of another tile"
            )
        return with_agent(state, i, agent._replace(uses=put(agent.uses, r, (use + 1) % (PERIOD * n))))

    def consumer_release(self, state: State, i: int, r: int) -> State:
        agent, n, name, who = state.agents[i], self.stages[r], self.names[r], self.who[i]
        if agent.released[r] == agent.uses[r]:
            raise Violation(f"{who} releases a tile of %{name} that it has not waited for")
        if r in agent.storing:
            raise Violation(f"{who} releases a tile of %{name} that a TMA store reads")
        if (agent.uses[r] - agent.released[r]) % self.periods[r] == 1:
            self.must_not_be_read(state, i, r, "releases a tile of")
        if not self.writers[r]:
            s = agent.released[r] % n
            stage = state.pipelines[r][s]
            if i in stage.arrived:
                raise Violation(f"{who} arrives twice at the barrier of a stage of %{name}")
            state = with_stage(state, r, s, stage._replace(arrived=stage.arrived | {i}))
        period = self.periods[r] if self.writers[r] else PERIOD * n
        return with_agent(state, i, agent._replace(released=put(agent.released, r, (agent.released[r] + 1) % period)))

    def left_over(self, state: State) -> str:
        """The copy, arrival or tile that is unfinished after all agents have ended, in words; empty text if none is."""
        for name, stages in zip(self.names, state.pipelines):
            if any(stage.loading for stage in stages):
                return f"a copy to %{name} is in flight at the end"
            if any(stage.arrived for stage in stages):
                return f"arrivals at the barrier of %{name} are awaited by nothing at the end"
        for i in sorted(state.arrivals):
            return f"{self.who[i]} does not sync with the last arrival at its scheduler barrier"
        for r, name in enumerate(self.names):
            if name in self.exchanges:
                if any(
                    state.agents[i].stored[r] != state.agents[self.other(r, i)].released[r] for i in self.writers[r]
                ):
                    return f"not all tiles of %{name} are read and released at the end"
            elif self.writers[r] and len(self.store_counts(state, r)) > 1:
                return f"not all parts of a tile of %{name} are read and released at the end"
        for r, (name, owner) in enumerate(self.pipelines):
            for i, (agent, who) in enumerate(zip(state.agents, self.who)):
                holds = self.is_released[r] and not agent.wrapped[r] and agent.released[r] != agent.uses[r]
                if holds and owner in ("", who) and i not in self.loaders[r]:
                    return f"{who} keeps a tile of %{name} at the end"
        return ""

    def store_counts(self, state: State, r: int) -> set[int]:
        """The numbers of a pipeline's tiles that agents have written, waited for and released."""
        written = {state.agents[i].stored[r] for i in self.writers[r]}
        readers = [state.agents[i] for i in self.consumers[r]]
        return written | {count for agent in readers for count in (agent.uses[r], agent.released[r])}


@cache
def violation(of: Protocol, all_orders: bool = False) -> str:
    """A violation of a protocol that can happen, in words; empty text if none can.

    all_orders: follow every order of steps, which finds the same.
    """
    try:
        machine = _Machine(of)
        start = machine.start()
        seen, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            after = machine.successors(state, all_orders)
            waiting += set(after) - seen
            seen.update(after)
            if len(seen) > MOST_STATES:
                raise Violation(
                    f"the warp groups have more than {MOST_STATES:,} states; expected that none runs ahead of another "
                    f"without bound"
                )
            if not after:
                if stuck := [who for i, who in enumerate(machine.who) if machine.node(state, i)]:
                    raise Violation(f"{' and '.join(stuck)} can wait for ever")
                if reason := machine.left_over(state):
                    raise Violation(reason)
    except Violation as error:
        return str(error)
    return ""
