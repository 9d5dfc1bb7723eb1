"""Exchanges of pieces of a sequence between ranks, which make an assignment of chunks better.

A piece is a number of neighbouring chunks of one rank. All pieces have the same number of chunks, so an exchange keeps
the number of rows of both ranks; chunks that are left over at the end of a run stay where they are. Sums are of
integers that their types hold exactly, so results do not depend on the order of additions, nor on the machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attngen.distributed.visible import Visible

Owned = list[list[int]]  # the chunks of each rank
BUDGET = 1 << 31  # multiplications in a search for fewer rows to receive
MOST_ROUNDS = 50  # rounds of exchanges with pieces of one length
MOST_OFFERED = 128  # pieces of the rank with the most work that are compared with all others, from light to heavy ones


def received(visible: Visible, owned: Owned) -> int:
    """Return the rows of keys that all ranks together receive, if each receives the chunks that its queries may see and
    that it does not hold."""
    total = 0
    for chunks in owned:
        needed = np.asarray(visible.needs[chunks].any(0))
        needed[chunks] = False
        total += int(visible.weights[needed].sum())
    return total


class Pieces(NamedTuple):
    """Pieces of equal length: their chunks [pieces, length], and the rank and the work of each."""

    chunks: np.ndarray
    ranks: np.ndarray
    work: np.ndarray


def cut(visible: Visible, owned: Owned, length: int) -> Pieces:
    """Return the pieces of `length` chunks. The last chunk of the sequence, which may be short, is in none."""
    found, ranks = list[list[int]](), list[int]()
    for rank, chunks in enumerate(owned):
        run = list[int]()
        for chunk in chunks:
            run = [*run, chunk] if run and run[-1] == chunk - 1 else [chunk]
            if len(run) == length and chunk != len(visible.work) - 1:
                found.append(run)
                ranks.append(rank)
                run = []
    groups = np.array(found, int).reshape(-1, length)
    return Pieces(groups, np.array(ranks, int), visible.work[groups].sum(1))


def balance_work(visible: Visible, owned: Owned, length: int, tolerance: float) -> Owned:
    """Return the assignment after exchanges that each lower the larger work of two ranks most, one of which is the rank
    with the most work. They end within `tolerance` above the mean, or where none helps."""
    pieces = cut(visible, owned, length)
    ranks, load = pieces.ranks.copy(), np.array([int(visible.work[chunks].sum()) for chunks in owned])
    for _ in range(MOST_ROUNDS * len(owned)):
        top = int(load.argmax())
        mine, others = np.flatnonzero(ranks == top), np.flatnonzero(ranks != top)
        if load[top] * len(load) <= (1 + tolerance) * load.sum() or not len(mine) or not len(others):
            break
        mine = mine[np.argsort(pieces.work[mine], kind="stable")]
        mine = mine[np.linspace(0, len(mine) - 1, min(len(mine), MOST_OFFERED)).astype(int)]
        moved = pieces.work[mine][:, None] - pieces.work[others][None]
        larger = np.maximum(load[top] - moved, load[ranks[others]][None] + moved)
        a, b = np.unravel_index(int(larger.argmin()), larger.shape)
        if larger[a, b] >= load[top]:
            break
        one, other = mine[a], others[b]
        load[top] -= moved[a, b]
        load[ranks[other]] += moved[a, b]
        ranks[one], ranks[other] = ranks[other], top
    return _assigned(owned, pieces, ranks)


def lower_received(visible: Visible, owned: Owned, length: int, tolerance: float) -> Owned:
    """Return the assignment after rounds of exchanges that each lower the rows to receive, and that keep the work of
    each rank at most `tolerance` above the mean. In a round each rank takes part in one exchange."""
    pieces = cut(visible, owned, length)
    rounds = min(MOST_ROUNDS, BUDGET // (max(1, len(pieces.ranks)) ** 2 * len(visible.work)))
    if len(pieces.ranks) < 2 or not rounds:
        return owned
    ranks, load = pieces.ranks.copy(), np.array([int(visible.work[chunks].sum()) for chunks in owned])
    limit = (1 + tolerance) * load.sum() / len(load)
    search = _Search(visible, owned, pieces)
    for _ in range(rounds):
        now, gain = search.rows_by_rank(ranks), search.rows_after(ranks)
        change = gain + gain.T - now[ranks][:, None] - now[ranks][None]
        moved = pieces.work[:, None] - pieces.work[None]  # from the first piece's rank to the other's
        after = load[ranks][:, None] - moved
        change[(after > limit) | (limit < after.T) | (ranks[:, None] == ranks[None])] = 0
        best, used = change.argmin(1), set[int]()
        for one in np.argsort(change[np.arange(len(best)), best], kind="stable"):
            other = best[one]
            r, s = int(ranks[one]), int(ranks[other])
            if change[one, other] >= 0 or {r, s} & used:
                continue
            used |= {r, s}
            load[r] -= moved[one, other]
            load[s] += moved[one, other]
            ranks[one], ranks[other] = s, r
        if not used:
            break
    return _assigned(owned, pieces, ranks)


class _Search:
    """The rows that ranks receive, by pieces: what each piece needs, and what the chunks that are in no piece need."""

    def __init__(self, visible: Visible, owned: Owned, pieces: Pieces) -> None:
        count, chunks = len(pieces.ranks), len(visible.work)
        self.chunks = pieces.chunks
        self.weights = visible.weights.astype(np.float32 if visible.seq_len < 1 << 24 else np.float64)
        self.needs = np.asarray(visible.needs[pieces.chunks].any(1))
        self.members = np.zeros((count, chunks), bool)
        np.put_along_axis(self.members, pieces.chunks, True, 1)
        self.foreign = (self.needs & ~self.members).T.astype(self.weights.dtype)
        inside = np.asarray(self.members.any(0))
        self.rest_needs = np.zeros((len(owned), chunks), np.int32)
        self.rest_holds = np.zeros((len(owned), chunks), bool)
        for rank, own in enumerate(owned):
            rest = [chunk for chunk in own if not inside[chunk]]
            self.rest_needs[rank] = visible.needs[rest].sum(0)
            self.rest_holds[rank, rest] = True

    def _ranks(self, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many pieces of each rank need each chunk, and which chunks it holds."""
        needs, holds = self.rest_needs.copy(), self.rest_holds.copy()
        for rank in range(len(needs)):
            needs[rank] += self.needs[ranks == rank].sum(0, dtype=np.int32)
            holds[rank] |= self.members[ranks == rank].any(0)
        return needs, holds

    def rows_by_rank(self, ranks: np.ndarray) -> np.ndarray:
        """Return the rows that each rank receives."""
        needs, holds = self._ranks(ranks)
        found: np.ndarray = ((needs > 0) & ~holds) @ self.weights
        return found

    def rows_after(self, ranks: np.ndarray) -> np.ndarray:
        """Return the rows that the rank of piece p receives with piece q instead of p, [p, q]: those that its other
        pieces need, without q's own; and those that only q needs."""
        needs, holds = self._ranks(ranks)
        without = needs[ranks] - self.needs
        missing = np.where(holds[ranks] & ~self.members, 0, self.weights)
        of_rest = np.where(without > 0, missing, 0)
        own = sum((of_rest[:, column] for column in self.chunks.T), np.zeros((len(ranks),) * 2, self.weights.dtype))
        found: np.ndarray = of_rest.sum(1)[:, None] - own + (missing - of_rest) @ self.foreign
        return found


def _assigned(owned: Owned, pieces: Pieces, ranks: np.ndarray) -> Owned:
    """Return the chunks of each rank, if the pieces are on these ranks."""
    inside = set(pieces.chunks.ravel().tolist())
    found = [[chunk for chunk in chunks if chunk not in inside] for chunks in owned]
    for chunks, rank in zip(pieces.chunks.tolist(), ranks.tolist()):
        found[rank] += chunks
    return [sorted(chunks) for chunks in found]
