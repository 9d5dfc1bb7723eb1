"""Transfers between ranks: which rows go where, and point-to-point messages of torch.distributed that carry them.

Tensors have the sequence's rows in dimension 0 here, so that chunks are contiguous memory, and messages are received
in place.

All transfers are batches of isend and irecv, which NCCL and gloo both have. NCCL runs them on a stream of its own: a
transfer begins when the kernels that wrote its tensors are done, kernels launched after it run at the same time, and
`Transfer.wait` makes only the current stream wait. gloo's transfers run in threads of their own.

Faults: with gloo, `Transfer.wait` raises within the process group's timeout if another rank has exited or does not
answer. With NCCL the process group's watchdog ends the process after that timeout (TORCH_NCCL_ASYNC_ERROR_HANDLING,
which is on by default). A rank that waits for nothing from the lost rank goes on to its next transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from attngen.distributed.layout import Chunks, Layout

Message = tuple[int, torch.Tensor]  # the other rank, and what is sent to it or received from it


class Run(NamedTuple):
    """Rows that lie one after another in two lists of chunks: the first of them in each list, and their number."""

    source: int
    target: int
    rows: int


def runs(layout: Layout, source: Chunks, target: Chunks) -> tuple[Run, ...]:
    """Return the rows of the chunks that two rising lists of chunks share, in as few runs as possible."""
    first, row = {}, 0
    for chunk in source:
        first[chunk] = row
        row += len(layout.rows_of(chunk))
    found: list[Run] = []
    row = 0
    for chunk in target:
        rows = len(layout.rows_of(chunk))
        if chunk in first:
            last = found[-1] if found else Run(0, 0, 0)
            if found and last.source + last.rows == first[chunk] and last.target + last.rows == row:
                found[-1] = last._replace(rows=last.rows + rows)
            else:
                found.append(Run(first[chunk], row, rows))
        row += rows
    return tuple(found)


@dataclass(frozen=True)
class Route:
    """What one rank sends, receives and copies when each rank has the rows of `sources[rank]` and gets those of
    `targets[rank]`.

    sends, receives: pairs of the other rank and a run of rows. copies: runs that stay on this rank. rows: number of
    rows that this rank gets.
    """

    rank: int
    rows: int
    sends: tuple[tuple[int, Run], ...]
    receives: tuple[tuple[int, Run], ...]
    copies: tuple[Run, ...]


def route(layout: Layout, sources: Sequence[Chunks], targets: Sequence[Chunks], rank: int) -> Route:
    others = [other for other in range(len(sources)) if other != rank]
    return Route(
        rank,
        sum(len(layout.rows_of(chunk)) for chunk in targets[rank]),
        tuple((other, run) for other in others for run in runs(layout, sources[rank], targets[other])),
        tuple((other, run) for other in others for run in runs(layout, sources[other], targets[rank])),
        runs(layout, sources[rank], targets[rank]),
    )


@contextmanager
def one_sentence(peers: Sequence[int]) -> Iterator[None]:
    """Say in one sentence that a transfer with other ranks failed."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"attention: a transfer with the ranks {list(peers)} of the group failed; expected each of them to make "
            f"the same call within the process group's timeout: see the first error in their logs ({error})"
        ) from error


class Transfer:
    """Messages under way. It holds their tensors until `wait` returns."""

    def __init__(self, sends: Sequence[Message], receives: Sequence[Message], group: Any) -> None:
        """Start to send and receive. Messages between two ranks arrive in the order in which they are given."""
        self._sent = [(peer, x.contiguous()) for peer, x in sends if x.numel()]
        self._received = [(peer, x, _contiguous(x)) for peer, x in receives if x.numel()]
        ops = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in self._sent]
        ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, _, x in self._received]
        self._peers = sorted({op.group_peer for op in ops})
        with one_sentence(self._peers):
            self._works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> None:
        """Wait until the tensors are received; on CUDA, let the current stream wait.

        Raises:
            RuntimeError: one sentence, if another rank has exited or does not answer within the group's timeout.
        """
        with one_sentence(self._peers):
            for work in self._works:
                work.wait()
        for _, x, into in self._received:
            if into is not x:
                x.copy_(into)
        self._sent, self._received, self._works = [], [], []


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return x, or memory of its size if x is strided."""
    return x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


def _whole(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x


def move(
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    way: Route,
    group: Any,
    sent: Callable[[torch.Tensor, int], torch.Tensor] = _whole,
    received: Callable[[torch.Tensor, int], torch.Tensor] = _whole,
) -> Transfer:
    """Start to move rows of `tensors` into `results`. sent(x, rank) is the part of a tensor that a rank gets,
    received(y, rank) the part of a result that comes from a rank."""

    def part(x: torch.Tensor, first: int, run: Run) -> torch.Tensor:
        return x[first : first + run.rows]

    transfer = Transfer(
        [(to, part(sent(x, to), run.source, run)) for to, run in way.sends for x in tensors],
        [(of, part(received(y, of), run.target, run)) for of, run in way.receives for y in results],
        group,
    )
    for run in way.copies:
        for x, y in zip(tensors, results):
            part(received(y, way.rank), run.target, run).copy_(part(sent(x, way.rank), run.source, run))
    return transfer


def begin_gather(tensors: Sequence[torch.Tensor], way: Route, group: Any) -> tuple[list[torch.Tensor], Transfer]:
    """Start to receive the rows of each tensor that this rank gets from the ranks that hold them. Return the tensors
    that will have them, and the transfer."""
    results = [x.new_empty((way.rows, *x.shape[1:])) for x in tensors]
    return results, move(tensors, results, way, group)


def gather(tensors: Sequence[torch.Tensor], way: Route, group: Any) -> list[torch.Tensor]:
    """Return the rows of each tensor that this rank gets, received from the ranks that hold them."""
    results, transfer = begin_gather(tensors, way, group)
    transfer.wait()
    return results


class PartsUnderWay:
    """Parts of sums on their way to the ranks that hold the rows."""

    def __init__(self, parts: Sequence[torch.Tensor], way: Route, group: Any) -> None:
        arriving = [(of, run, [x.new_empty((run.rows, *x.shape[1:])) for x in parts]) for of, run in way.receives]
        self._transfer = Transfer(
            [(to, x[run.source : run.source + run.rows]) for to, run in way.sends for x in parts],
            [(of, x) for of, _, xs in arriving for x in xs],
            group,
        )
        own = [(way.rank, run, [x[run.source : run.source + run.rows] for x in parts]) for run in way.copies]
        self._parts = sorted(arriving + own, key=lambda part: part[0])

    def add_to(self, sums: Sequence[torch.Tensor]) -> None:
        """Wait for the parts of this rank's rows and add them in the order of ranks."""
        self._transfer.wait()
        for _, run, xs in self._parts:
            for total, x in zip(sums, xs):
                total[run.target : run.target + run.rows] += x

    def sums(self, results: Sequence[torch.Tensor]) -> None:
        """Wait for the parts of this rank's rows and write their sums to `results`, which may have the memory of this
        rank's parts. Rows of several parts are added in fp32, in the order of ranks; rows without a part are 0."""
        self._transfer.wait()
        ends = {end for _, run, _ in self._parts for end in (run.target, run.target + run.rows)}
        rows = results[0].shape[0] if results else 0
        for first, end in pairwise(sorted({0, rows, *ends})):
            of_rows = [(run, xs) for _, run, xs in self._parts if run.target <= first and end <= run.target + run.rows]
            for at, result in enumerate(results):
                _add([xs[at][first - run.target : end - run.target] for run, xs in of_rows], result[first:end])


def _add(parts: Sequence[torch.Tensor], result: torch.Tensor) -> None:
    """Write the sum of some parts to a tensor, which may be one of them."""
    if not parts:
        result.zero_()
        return
    total = parts[0]
    for part in parts[1:]:
        total = total.float() + part
    if total.data_ptr() != result.data_ptr():
        result.copy_(total)


def add_parts(parts: Sequence[torch.Tensor], way: Route, group: Any) -> list[torch.Tensor]:
    """Return the sums of the parts that ranks have of this rank's rows, in their dtype. Rows of several parts are added
    in fp32, in the order of ranks.

    If this rank has a part of each of its rows, one after another, and these are at least half of its parts, the sums
    are views of the parts: rows of which no other rank has a part are then not touched. Otherwise they are copies, and
    the parts, which may be many times as large, need not be kept.
    """
    (run,) = way.copies if len(way.copies) == 1 else (Run(0, 0, 0),)
    if run.rows == way.rows and 2 * run.rows >= parts[0].shape[0]:
        results = [x[run.source : run.source + run.rows] for x in parts]
    else:
        results = [x.new_empty((way.rows, *x.shape[1:])) for x in parts]
    PartsUnderWay(parts, way, group).sums(results)
    return results


def sum_over_ranks(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of the ranks' tensors x, fp32, added in the order of ranks; the same bits on every rank.

    Each rank adds one slice and sends the sum to the others, so a rank holds two tensors of x's size.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    others = [other for other in range(ranks) if other != rank]
    size = -(-x.numel() // ranks)
    slices = x.new_zeros((ranks, size), dtype=torch.float32)
    slices.view(-1)[: x.numel()] = x.reshape(-1)
    parts = torch.empty_like(slices)
    parts[rank] = slices[rank]
    Transfer([(other, slices[other]) for other in others], [(other, parts[other]) for other in others], group).wait()
    total = parts[0]
    for other in range(1, ranks):
        total = total + parts[other]
    slices[rank] = total
    Transfer([(other, slices[rank]) for other in others], [(other, slices[other]) for other in others], group).wait()
    return slices.view(-1)[: x.numel()].view(x.shape)


def heads_of(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return the heads of a rank, of x [rows, B, H, ...]."""
    heads = x.shape[2] // ranks
    return x[:, :, rank * heads : (rank + 1) * heads]


def rows_to_heads(tensors: Sequence[torch.Tensor], way: Route, group: Any) -> list[torch.Tensor]:
    """Exchange [this rank's rows, B, H, ...] for [all rows of the group, B, this rank's heads, ...]."""
    ranks = dist.get_world_size(group)
    results = [x.new_empty((way.rows, x.shape[1], x.shape[2] // ranks, *x.shape[3:])) for x in tensors]
    move(tensors, results, way, group, sent=lambda x, rank: heads_of(x, rank, ranks)).wait()
    return results


def heads_to_rows(tensors: Sequence[torch.Tensor], way: Route, group: Any) -> list[torch.Tensor]:
    """Exchange [all rows of the group, B, this rank's heads, ...] for [this rank's rows, B, H, ...]."""
    ranks = dist.get_world_size(group)
    results = [x.new_empty((way.rows, x.shape[1], x.shape[2] * ranks, *x.shape[3:])) for x in tensors]
    move(tensors, results, way, group, received=lambda y, rank: heads_of(y, rank, ranks)).wait()
    return results
