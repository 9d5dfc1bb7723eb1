"""A canonical form of states: counts start from the slowest agent, so that finitely many states are left."""

from __future__ import annotations

from attngen.verify.states import PERIOD, Stage, State, Tables, put, with_agent


def canonical(tables: Tables, state: State) -> State:
    """The same state, with answers counted from the slowest agent, and uses of a pipeline from its next load once all
    its stages were filled."""
    busy = [agent.answered for i, agent in enumerate(state.agents) if agent.at < len(tables.nodes[i])]
    base = min(busy, default=len(state.answers))
    if base > 0:
        agents = tuple(agent._replace(answered=max(0, agent.answered - base)) for agent in state.agents)
        state = state._replace(agents=agents, answers=state.answers[base:])
    for r in range(len(tables.stages)):
        if tables.writers[r]:
            exchange = tables.names[r] in tables.exchanges
            state = _exchange_counts(tables, state, r) if exchange else _store_counts(tables, state, r)
            continue
        loader = state.agents[tables.loaders[r][0] if tables.loaders[r] else -1]
        if loader.wrapped[r] and loader.uses[r]:
            state = _load_counts(tables, state, r, loader.uses[r])
    return state


def _store_counts(tables: Tables, state: State, r: int) -> State:
    """The same state, with writes, waits and releases of a pipeline counted from the least of these counts."""
    period, n = tables.periods[r], tables.stages[r]
    counts = [state.agents[i].stored[r] for i in tables.writers[r]]
    counts += [c for i in tables.consumers[r] for c in (state.agents[i].uses[r], state.agents[i].released[r])]
    by = min((c - counts[0] + period // 2) % period - period // 2 for c in counts) + counts[0]
    if tables.names[r] in tables.round_robin:  # the count of a tile says in which stage it is
        by -= by % n
    if not by % period:
        return state
    agents = list(state.agents)
    for i in tables.writers[r]:
        agents[i] = agents[i]._replace(stored=put(agents[i].stored, r, (agents[i].stored[r] - by) % period))
    for i in tables.consumers[r]:
        uses, released = ((c - by) % period for c in (agents[i].uses[r], agents[i].released[r]))
        agents[i] = agents[i]._replace(uses=put(agents[i].uses, r, uses), released=put(agents[i].released, r, released))
    return state._replace(agents=tuple(agents))


def _exchange_counts(tables: Tables, state: State, r: int) -> State:
    """The same state, with the tiles that an agent has stored in an exchange counted from those that the other one has
    released."""
    period = tables.periods[r]
    for i in tables.writers[r]:
        j = tables.other(r, i)
        by, writer, reader = state.agents[j].released[r], state.agents[i], state.agents[j]
        if not by:
            continue
        stored = put(writer.stored, r, (writer.stored[r] - by) % period)
        uses, released = ((c - by) % period for c in (reader.uses[r], reader.released[r]))
        state = with_agent(state, i, writer._replace(stored=stored))
        state = with_agent(
            state, j, reader._replace(uses=put(reader.uses, r, uses), released=put(reader.released, r, released))
        )
    return state


def _load_counts(tables: Tables, state: State, r: int, by: int) -> State:
    """The same state, with the uses of a pipeline that TMA fills counted from `by`."""
    n = tables.stages[r]
    period = PERIOD * n
    agents = []
    for i, agent in enumerate(state.agents):
        if i in tables.loaders[r][:1] or i in tables.consumers[r]:
            agent = agent._replace(uses=put(agent.uses, r, (agent.uses[r] - by) % period))
        if i in tables.consumers[r]:
            agent = agent._replace(released=put(agent.released, r, (agent.released[r] - by) % period))
        agents.append(agent)
    stages = [Stage(0, False, 0, frozenset())] * n
    for s, stage in enumerate(state.pipelines[r]):
        at = (s - by) % period
        stages[at % n] = stage._replace(tile=(stage.tile - by) % period, phase=stage.phase ^ at // n % 2)
    return state._replace(agents=tuple(agents), pipelines=put(state.pipelines, r, tuple(stages)))
