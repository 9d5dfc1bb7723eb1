"""Which rows of a sequence each rank holds: chunks of rows, assigned to the ranks of a group.

A sequence of `seq_len` rows is cut into chunks of `chunk` rows; the last one may be shorter. Each chunk belongs to one
rank. A rank holds its chunks in rising order, one after another: local row i of a rank is row i % chunk of its chunk
number i // chunk. Only the last chunk of the sequence is short, and it is the last one of its rank, so all other
chunks start at multiples of `chunk` also in the rank's own tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

Chunks = tuple[int, ...]  # numbers of chunks, in rising order


@dataclass(frozen=True)
class Layout:
    """An assignment of the chunks of a sequence to ranks.

    seq_len: rows of the whole sequence.
    chunk: rows of a chunk.
    owned: for each rank the numbers of its chunks, in rising order. Each chunk of the sequence occurs once.
    """

    seq_len: int
    chunk: int
    owned: tuple[Chunks, ...]

    @property
    def ranks(self) -> int:
        return len(self.owned)

    @property
    def chunks(self) -> int:
        """Number of chunks of the sequence."""
        return -(-self.seq_len // self.chunk)

    def rows_of(self, chunk: int) -> range:
        """The rows of a chunk in the whole sequence."""
        return range(chunk * self.chunk, min((chunk + 1) * self.chunk, self.seq_len))

    def rows(self, rank: int) -> int:
        """Number of rows that a rank holds."""
        return sum(len(self.rows_of(chunk)) for chunk in self.owned[rank])

    def starts(self, rank: int) -> list[int]:
        """The first row, in the whole sequence, of each chunk that a rank holds."""
        return [chunk * self.chunk for chunk in self.owned[rank]]

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """For each chunk of the sequence, the rank that holds it."""
        found = {chunk: rank for rank, chunks in enumerate(self.owned) for chunk in chunks}
        return tuple(found[chunk] for chunk in range(self.chunks))

    @cached_property
    def digest(self) -> str:
        """A digest of the assignment, by which ranks notice that they hold different ones."""
        return hashlib.sha256(repr((self.seq_len, self.chunk, self.owned)).encode()).hexdigest()


def without_heads(layout: Layout, ranks: int) -> Layout:
    """Return the layout over groups of `ranks` consecutive ranks, each of which holds the rows of its ranks. Keys
    are sent between these groups where the ranks of a group divide heads."""
    groups = range(0, layout.ranks, ranks)
    owned = (tuple(sorted(c for chunks in layout.owned[i : i + ranks] for c in chunks)) for i in groups)
    return Layout(layout.seq_len, layout.chunk, tuple(owned))
