"""Assign the chunks of a sequence to ranks: equal numbers of rows, nearly equal numbers of visible scores, and few keys
to receive.

Rows come first: ranks differ by at most one chunk, or by the rows that the last chunk of the sequence lacks. Where the
number of chunks is not a multiple of the number of ranks, the first ranks have one chunk more; with fewer chunks than
ranks, the last ranks have none. Work is then balanced as far as chunks allow:

1. Candidates. `contiguous`: each rank has neighbouring chunks. `head_tail`: each rank has a piece of the first half and
   the mirrored piece of the second half. `greedy`: chunks by falling work, in rounds of one chunk for each rank, the
   largest to the rank with the least work. After it, two ranks with equal numbers of chunks differ by at most the
   greatest difference of two chunks in one round: where two ranks' order in work is kept, their difference changes by
   the difference of their chunks in the other direction.
2. Exchanges of equally long pieces between two ranks, from long pieces to single chunks. While a rank has more than
   TOLERANCE above the mean, the exchange that lowers the larger of two ranks' work most; after that, exchanges that
   lower the rows to receive and keep the work within TOLERANCE.
3. The least cost among results within TOLERANCE. The cost is the greatest work of a rank, and ROW scores for each row
   that a rank receives in the mean. A result above TOLERANCE is taken if none is within, or if its cost is at most
   half: a short sequence under a window is not scattered to make up for its first queries, which see fewer keys.

The result depends on the counts alone, not on time or on chance, so all ranks find the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from attngen.distributed.layout import Layout
from attngen.distributed.pieces import Owned, balance_work, lower_received, received
from attngen.distributed.visible import Visible
from attngen.errors import AttngenError, suggest

Balance = Literal["auto", "contiguous", "head_tail", "greedy"]
TOLERANCE = 0.02  # greatest work of a rank above the mean
# Scores of a head whose computation takes as long as the transfer of a row of keys and values between nodes: 32 query
# heads on 8, head_dim 128, bf16, at 50 GB/s and 600 TFLOP/s. Within a node it is a fifth.
ROW = 3000


@dataclass(frozen=True)
class Balanced:
    """A layout, and how good it is.

    excess: the greatest work of a rank over the mean, minus 1.
    received: rows of keys that all ranks together receive, if each receives the chunks that its queries may see.
    method: the candidate that it was made from.
    """

    layout: Layout
    excess: float
    received: int
    method: str


def balance(visible: Visible, ranks: int, method: Balance = "auto", tolerance: float = TOLERANCE) -> Balanced:
    """Assign the chunks of a sequence to ranks.

    method: `auto`, or one candidate as it is.
    tolerance: greatest work of a rank above the mean that `auto` accepts in exchange for fewer rows to receive.
    Raises AttngenError for an unknown method, or less than one rank.
    """
    if method not in get_args(Balance):
        raise AttngenError(f"balance `{method}` is unknown; {suggest(method, get_args(Balance))}")
    if ranks < 1:
        raise AttngenError(f"a layout over {ranks} ranks; expected at least one")
    if method != "auto":
        return _judged(visible, CANDIDATES[method](visible, ranks), method)
    made = dict[tuple[tuple[int, ...], ...], tuple[Owned, str]]()  # each assignment once
    for name, candidate in CANDIDATES.items():
        for owned in _improved(visible, candidate(visible, ranks), tolerance):
            made.setdefault(tuple(map(tuple, owned)), (owned, name))
    found = [_judged(visible, *each) for each in made.values()]

    def cost(b: Balanced) -> float:
        return ((1 + b.excess) * visible.total + ROW * b.received) / ranks

    best = min(found, key=cost)
    within = min((b for b in found if b.excess <= tolerance), key=cost, default=best)
    return best if 2 * cost(best) <= cost(within) else within


def excess(visible: Visible, owned: Owned) -> float:
    """Return the greatest work of a rank over the mean, minus 1."""
    work = [int(visible.work[chunks].sum()) for chunks in owned]
    return max(work) * len(work) / max(1, sum(work)) - 1


def capacities(chunks: int, ranks: int) -> list[int]:
    """Return the number of chunks of each rank: equal, or one more on the first ranks."""
    return [chunks // ranks + (rank < chunks % ranks) for rank in range(ranks)]


def contiguous(visible: Visible, ranks: int) -> Owned:
    """Return neighbouring chunks for each rank."""
    ends = np.cumsum(capacities(len(visible.work), ranks)).tolist()
    return [list(range(first, end)) for first, end in zip([0, *ends], ends)]


def head_tail(visible: Visible, ranks: int) -> Owned:
    """Return a piece of the first half and the mirrored one of the second half for each rank."""
    sizes = capacities(len(visible.work), ranks)
    heads = [size // 2 for size in sizes]
    first = np.cumsum([0, *heads]).tolist()
    end = len(visible.work) - np.cumsum([0, *(size - head for size, head in zip(sizes, heads))])
    return [[*range(first[rank], first[rank + 1]), *range(int(end[rank + 1]), int(end[rank]))] for rank in range(ranks)]


def greedy(visible: Visible, ranks: int) -> Owned:
    """Return chunks assigned in rounds, by falling work, the largest of a round to the rank with the least work."""
    order = np.argsort(-visible.work, kind="stable").tolist()
    load, owned = [0] * ranks, [list[int]() for _ in range(ranks)]
    sizes = capacities(len(order), ranks)
    while order:
        for rank in sorted((r for r in range(ranks) if len(owned[r]) < sizes[r]), key=lambda r: (load[r], r)):
            chunk = order.pop(0)
            owned[rank].append(chunk)
            load[rank] += int(visible.work[chunk])
    return [sorted(chunks) for chunks in owned]


CANDIDATES: dict[str, Callable[[Visible, int], Owned]] = {
    "contiguous": contiguous,
    "head_tail": head_tail,
    "greedy": greedy,
}


def _improved(visible: Visible, owned: Owned, tolerance: float) -> Iterator[Owned]:
    """Yield a candidate, and what exchanges of ever shorter pieces make of it."""
    yield owned
    if excess(visible, owned) <= tolerance:
        yield balance_work(visible, owned, 1, tolerance / 8)
    length = max(1, max(map(len, owned)) // 2)
    while True:
        if excess(visible, owned) > tolerance:
            owned = balance_work(visible, owned, length, tolerance / 2)
        if excess(visible, owned) <= tolerance:
            owned = lower_received(visible, owned, length, tolerance)
        yield owned
        if length == 1:
            break
        length //= 2
    yield balance_work(visible, owned, 1, tolerance / 8)


def _judged(visible: Visible, owned: Owned, method: str) -> Balanced:
    layout = Layout(visible.seq_len, visible.chunk, tuple(map(tuple, owned)))
    return Balanced(layout, excess(visible, owned), received(visible, owned), method)
