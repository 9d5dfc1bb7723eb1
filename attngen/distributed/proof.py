"""Prove that a plan computes each visible score exactly once.

The proof does not use how a plan was made. It follows what each rank holds: its own chunks, or those of its group after
the exchange of heads, and what sends bring. Each launch may use only what its rank holds by then. The launches of a
range of heads are added up over all pairs of chunks: a pair with a visible score must occur exactly once, and the
ranges must be all heads, each once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attngen.distributed.transfers import Launch, Plan
from attngen.distributed.visible import Visible
from attngen.errors import AttngenError


class PlanError(AttngenError):
    """A plan would compute a visible score never or twice, or with keys that a rank does not have."""


def verify(made: Plan, visible: Visible) -> None:
    """Prove a plan. Raises PlanError, with the first thing that is wrong."""
    layout = made.layout
    if sorted(c for own in layout.owned for c in own) != list(range(len(visible.work))):
        raise PlanError(f"the ranks do not hold each of the {len(visible.work)} chunks of the sequence once")
    arrival = _arrivals(made)
    launches: dict[tuple[int, int], list[Launch]] = {}
    for launch in made.launches:
        queries, keys = list(launch.queries), list(launch.keys)
        own = made.groups.owned[launch.rank // made.ulysses]
        if not {*queries} <= {*own}:
            raise PlanError(f"rank {launch.rank} computes queries of chunks that it does not hold")
        late = arrival[launch.rank, keys] > launch.step
        if late.any():
            chunk = keys[int(late.argmax())]
            raise PlanError(f"rank {launch.rank} does not have the keys of chunk {chunk} in step {launch.step}")
        launches.setdefault(launch.heads, []).append(launch)
    _check_heads(made, sorted(launches), int(visible.work.sum()))
    proven = set[tuple[tuple[Sequence[int], Sequence[int]], ...]]()
    for of_heads in launches.values():
        pairs = tuple((launch.queries, launch.keys) for launch in of_heads)
        if pairs not in proven:
            _check_pairs(of_heads, visible)
            proven.add(pairs)


def _arrivals(made: Plan) -> np.ndarray:
    """Return the step from which on each rank has the keys of each chunk, [ranks, chunks]. Checks that senders have
    what they send, and that nothing arrives twice."""
    never = 1 + max(made.steps, default=0)
    arrival = np.full((made.layout.ranks, made.layout.chunks), never)
    for rank in range(made.layout.ranks):
        arrival[rank, list(made.groups.owned[rank // made.ulysses])] = -1
    held = arrival < 0
    for send in made.sends:
        place = f"in step {send.step} rank {send.sender} sends to rank {send.receiver}"
        if send.sender % made.ulysses != send.receiver % made.ulysses:
            raise PlanError(f"{place}, which has other heads")
        if len({*send.chunks}) < len(send.chunks) or (arrival[send.receiver, list(send.chunks)] < never).any():
            raise PlanError(f"{place} a chunk that it already has")
        if not held[send.sender, list(send.chunks)].all():
            raise PlanError(f"{place} a chunk that it does not hold")
        arrival[send.receiver, list(send.chunks)] = send.step
    return arrival


def _check_heads(made: Plan, ranges: list[tuple[int, int]], total: int) -> None:
    """Check that the ranges of heads of launches are all heads, each once."""
    expected = 0
    for first, end in ranges:
        if first != expected or end <= first:
            raise PlanError(f"launches compute heads from {first} on after those below {expected}; expected no gap")
        expected = end
    if total and expected != made.q_heads:
        raise PlanError(f"launches compute {expected} of {made.q_heads} query heads")


def _check_pairs(launches: list[Launch], visible: Visible) -> None:
    """Check that each pair of chunks with a visible score occurs in one launch of some heads."""
    times = np.zeros(visible.needs.shape, np.int16)
    for launch in launches:
        times[np.ix_(launch.queries, launch.keys)] += 1
    wrong = visible.needs & (times != 1)
    if wrong.any():
        q, kv = map(int, np.unravel_index(int(wrong.argmax()), wrong.shape))
        often = "never" if not times[q, kv] else f"{times[q, kv]} times"
        raise PlanError(f"scores of the queries of chunk {q} with the keys of chunk {kv} are computed {often}")
