"""What ranks send to each other, and what each of them computes in which launch, as plain data.

Four methods. Ranks `c * ulysses + u` form a mesh: ranks with the same c are a group, in which heads are divided, and
groups divide the sequence. `ulysses` is 1 for the first two methods and the number of ranks for the third.

    all_gather    a rank receives the chunks of keys and values that its queries may see, and computes in one launch
    ring          in step s a rank receives what it needs of the rank s places before it, while it computes with what it
                  received in the step before; a step in which nobody needs anything is left out
    ulysses       ranks exchange heads for rows (all-to-all): each has its part of the heads for the whole sequence
    ulysses_ring  heads are divided inside groups, and each u has a ring over the groups

Chunks travel from the rank that holds them straight to the rank that needs them, so chunks that nobody sees do not
move. In a step of a ring each rank sends to one rank and receives from one.

Chunks that ranks need, and the steps of a ring, are those of a call's `Shard`, whose plan is proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from attngen.distributed.layout import Chunks, Layout, without_heads
from attngen.distributed.visible import Visible
from attngen.errors import AttngenError, suggest

Method = Literal["all_gather", "ring", "ulysses", "ulysses_ring"]
METHODS: tuple[Method, ...] = get_args(Method)
Steps = Sequence[Sequence[tuple[int, Chunks]]]


@dataclass(frozen=True)
class Send:
    """In a step, one rank sends the keys and values of chunks, of the heads that the receiver has, to another."""

    step: int
    sender: int
    receiver: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """In a step, after its sends have arrived, a rank computes the scores of the queries of chunks with the keys of
    chunks, for the query heads from `heads[0]` up to `heads[1]`."""

    step: int
    rank: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: tuple[int, int]


@dataclass(frozen=True)
class Plan:
    """The transfers and launches of a method.

    layout: the rows that each rank holds before and after the call.
    ulysses: number of ranks among which heads are divided, by an exchange before the first step and after the last.
    """

    method: Method
    layout: Layout
    q_heads: int
    kv_heads: int
    ulysses: int
    sends: tuple[Send, ...]
    launches: tuple[Launch, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are made, in order; step 0 is the first launch of a ring, for which nothing is sent."""
        return tuple(sorted({send.step for send in self.sends} | {launch.step for launch in self.launches}))

    @cached_property
    def groups(self) -> Layout:
        """The layout over groups: the chunks that the ranks of a group hold together."""
        return without_heads(self.layout, self.ulysses)


def divided(layout: Layout, ulysses: int) -> Layout:
    """Return a layout over ranks from one over groups: each rank of a group has neighbouring chunks of the group's."""
    found = list[tuple[int, ...]]()
    for chunks in layout.owned:
        ends = [len(chunks) * (u + 1) // ulysses for u in range(ulysses)]
        found += [chunks[first:end] for first, end in zip([0, *ends], ends)]
    return Layout(layout.seq_len, layout.chunk, tuple(found))


def plan(
    visible: Visible, layout: Layout, method: Method, q_heads: int = 1, kv_heads: int = 1, ulysses: int | None = None
) -> Plan:
    """Plan the transfers and launches of a method for a layout.

    ulysses: for `ulysses_ring`, the number of ranks of a group.
    Raises AttngenError if heads or ranks cannot be divided so.
    """
    ulysses = check_method(method, layout.ranks, q_heads, kv_heads, ulysses)
    if (visible.seq_len, visible.chunk) != (layout.seq_len, layout.chunk):
        raise AttngenError(
            f"the layout has {layout.seq_len} rows in chunks of {layout.chunk}, and the counts are of "
            f"{visible.seq_len} in chunks of {visible.chunk}; expected the same"
        )
    groups = without_heads(layout, ulysses)
    needs = tuple(map(visible.needed, groups.owned))
    steps = ring_steps(visible, groups) if method.endswith("ring") else ()
    return expanded(method, layout, ulysses, needs, steps, q_heads, kv_heads)


def expanded(
    method: Method,
    layout: Layout,
    ulysses: int,
    needs: Sequence[Chunks],
    steps: Steps,
    q_heads: int,
    kv_heads: int,
) -> Plan:
    """Return the transfers and launches of all ranks.

    needs: for each group the chunks of keys that its queries see. steps: with a ring, for each step and group the group
        whose keys it computes with, and the chunks of its queries that see any of them; none with other methods.
    """
    owned, share = without_heads(layout, ulysses).owned, q_heads // ulysses
    sends, launches = list[Send](), list[Launch]()
    for group in range(len(owned)):
        for step, source, chunks, queries, keys in _steps_of(owned, group, needs, steps):
            for u in range(ulysses):
                rank = group * ulysses + u
                if source != group and chunks:
                    sends.append(Send(step, source * ulysses + u, rank, chunks))
                if queries and keys:
                    launches.append(Launch(step, rank, queries, keys, (u * share, (u + 1) * share)))
    return Plan(method, layout, q_heads, kv_heads, ulysses, tuple(sends), tuple(launches))


def _steps_of(
    owned: Sequence[Chunks], group: int, needs: Sequence[Chunks], steps: Steps
) -> Iterator[tuple[int, int, Chunks, Chunks, Chunks]]:
    """Yield what a group receives and computes with: the step, the sender, the chunks sent, the queries and the keys of
    a launch."""
    needed = set(needs[group])
    seen = [tuple(chunk for chunk in chunks if chunk in needed) for chunks in owned]
    for step, row in enumerate(steps):
        source, queries = row[group]
        keys = seen[source] if step else owned[group]
        yield step, source, keys, queries, keys
    if not steps:
        for source, chunks in enumerate(seen):
            yield 0, source, chunks, (), ()
        yield 0, group, (), owned[group], needs[group]


def ring_steps(visible: Visible, groups: Layout) -> Steps:
    """Return the steps of a ring, as in `expanded`: in each, every group has the keys of the one so many places before
    it. Steps in which none sees any key are left out, except the first."""
    found = []
    for step in range(groups.ranks):
        sources = [(group - step) % groups.ranks for group in range(groups.ranks)]
        row = tuple(
            (of, visible.seeing(own, groups.owned[of]) if step else own) for own, of in zip(groups.owned, sources)
        )
        if step == 0 or any(queries for _, queries in row):
            found.append(row)
    return tuple(found)


def check_method(method: str, ranks: int, q_heads: int, kv_heads: int, ulysses: int | None = None) -> int:
    """Return the number of ranks among which a method divides heads. Raise AttngenError if it cannot."""
    if method not in METHODS:
        raise AttngenError(f"method `{method}` is unknown; {suggest(method, METHODS)}")
    if method == "ulysses_ring" and (ulysses is None or ulysses < 1 or ranks % ulysses):
        raise AttngenError(f"ulysses_ring over {ranks} ranks has groups of {ulysses}; expected a divisor of {ranks}")
    size = {"ulysses": ranks, "ulysses_ring": ulysses or 1}.get(method, 1)
    for heads, kind in ((q_heads, "query"), (kv_heads, "K/V")):
        if heads % size:
            raise AttngenError(
                f"{method} divides {heads} {kind} heads among {size} ranks; expected a multiple of {size}: "
                "take `all_gather` or `ring`, or `ulysses_ring` with smaller groups"
            )
    return size


def needed_by_rank(visible: Visible, layout: Layout) -> np.ndarray:
    """Return which chunks of keys the queries of each rank may see: bool [ranks, chunks]."""
    return np.stack([visible.needs[list(own)].any(0) for own in layout.owned])


def rows_between(visible: Visible, layout: Layout) -> np.ndarray:
    """Return the rows of keys of rank s that the queries of rank r may see: int64 [r, s], with its own on the
    diagonal."""
    rows = needed_by_rank(visible, layout) * visible.weights.astype(np.float64)
    return np.rint(rows @ held_by_rank(layout)).astype(np.int64)


def queries_between(visible: Visible, layout: Layout) -> np.ndarray:
    """Return the queries of rank r that may see keys of rank s: int64 [r, s]."""
    sees = np.stack([visible.needs[:, list(own)].any(1) for own in layout.owned], axis=1)
    rows = sees * visible.weights.astype(np.float64)[:, None]
    return np.rint(held_by_rank(layout).T @ rows).astype(np.int64)


def held_by_rank(layout: Layout) -> np.ndarray:
    """Return which rank has which chunk: float64 [chunks, ranks], 1 or 0."""
    held = np.zeros((layout.chunks, layout.ranks))
    held[np.arange(layout.chunks), list(layout.owner)] = 1
    return held
