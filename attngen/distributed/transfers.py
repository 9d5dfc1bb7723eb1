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

The cost model predicts these plans; a call transfers what its `Shard` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from attngen.distributed.layout import Layout, without_heads
from attngen.distributed.visible import Visible
from attngen.errors import AttngenError, suggest

Method = Literal["all_gather", "ring", "ulysses", "ulysses_ring"]
METHODS: tuple[Method, ...] = get_args(Method)


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

    def source(self, rank: int, step: int) -> int:
        """Return the rank from which a rank receives in a step of a ring."""
        return (rank - step * self.ulysses) % self.layout.ranks

    def is_active(self, rank: int, step: int) -> bool:
        """True if a rank has something to compute in a step."""
        return (rank, step) in self._active

    @cached_property
    def _active(self) -> frozenset[tuple[int, int]]:
        return frozenset((launch.rank, launch.step) for launch in self.launches)


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
    steps = list(_gather(visible, groups) if method == "all_gather" else _ring(visible, groups))
    share = q_heads // ulysses
    sends, launches = [], []
    for step, group, source, chunks, keys in steps:
        for u in range(ulysses):
            rank = group * ulysses + u
            if source is not None and chunks:
                sends.append(Send(step, source * ulysses + u, rank, chunks))
            if keys:
                launches.append(Launch(step, rank, groups.owned[group], keys, (u * share, (u + 1) * share)))
    return Plan(method, layout, q_heads, kv_heads, ulysses, tuple(sends), tuple(launches))


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


Step = tuple[int, int, int | None, tuple[int, ...], tuple[int, ...]]  # step, group, source, chunks sent, keys


def _gather(visible: Visible, groups: Layout) -> Iterator[Step]:
    """Yield one send for each source, and a launch with all that was needed."""
    for group, own in enumerate(groups.owned):
        needed = np.array(visible.needed(own), int)
        owner = np.array(groups.owner, int)[needed]
        for source in sorted({*owner.tolist()} - {group}):
            yield 0, group, source, tuple(needed[owner == source].tolist()), ()
        if len(needed):
            yield 0, group, None, (), tuple(needed.tolist())


def _ring(visible: Visible, groups: Layout) -> Iterator[Step]:
    """Yield one step for each distance between a group and a source of which it needs something."""
    needs = needed_by_rank(visible, groups)
    for step in range(groups.ranks):
        for group in range(groups.ranks):
            source = (group - step) % groups.ranks
            chunks = tuple(c for c in groups.owned[source] if needs[group, c])
            if chunks:
                yield step, group, source if step else None, chunks if step else (), chunks


def needed_by_rank(visible: Visible, layout: Layout) -> np.ndarray:
    """Return which chunks of keys the queries of each rank may see: bool [ranks, chunks]."""
    return np.stack([visible.needs[list(own)].any(0) for own in layout.owned])


def rows_between(visible: Visible, layout: Layout) -> np.ndarray:
    """Return the rows of keys of rank s that the queries of rank r may see: int64 [r, s], with its own on the
    diagonal."""
    rows = needed_by_rank(visible, layout) * visible.weights.astype(np.float64)
    held = np.zeros((layout.chunks, layout.ranks))
    held[np.arange(layout.chunks), list(layout.owner)] = 1
    return np.rint(rows @ held).astype(np.int64)


def sent_rows(made: Plan) -> np.ndarray:
    """Return the rows of keys and values that rank s sends to rank r in all steps: int64 [s, r]."""
    found = np.zeros((made.layout.ranks,) * 2, np.int64)
    for send in made.sends:
        found[send.sender, send.receiver] += sum(len(made.layout.rows_of(chunk)) for chunk in send.chunks)
    return found


def elements(made: Plan, d_qk: int, d_v: int, batch: int = 1, backward: bool = False) -> dict[str, np.ndarray]:
    """Return the elements that rank s sends to rank r in a call, by tensor: int64 [s, r].

    backward: those of the backward. Steps send keys and values again, and their gradients the other way; the exchange
        of heads brings dO in, and dQ, dK and dV out.
    """
    size, ranks = made.ulysses, made.layout.ranks
    q_heads, kv_heads = batch * made.q_heads // size, batch * made.kv_heads // size
    steps = sent_rows(made)
    held = np.array([made.layout.rows(rank) for rank in range(ranks)], np.int64)
    group = np.arange(ranks) // size
    others = (group[:, None] == group[None]) & ~np.eye(ranks, dtype=bool)
    into, out = others * held[:, None], others * held[None]  # a rank sends its rows of others' heads, and back
    k, v = kv_heads * d_qk, kv_heads * d_v
    if backward:
        return {
            "k": steps * k,
            "v": steps * v,
            "dk": steps.T * k + out * k,
            "dv": steps.T * v + out * v,
            "dout": into * q_heads * d_v,
            "dq": out * q_heads * d_qk,
        }
    return {
        "q": into * q_heads * d_qk,
        "k": steps * k + into * k,
        "v": steps * v + into * v,
        "out": out * q_heads * d_v,
        "lse": out * q_heads,
    }
