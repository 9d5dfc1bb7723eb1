"""How many scores of each pair of chunks, of queries and of keys, a mask leaves visible.

Counts come from the mask's formula: the runs of keys that each query sees (attngen/distributed/rows.py). They are exact
where the mask is solved for the key. Where it is not, and there are few such pairs, the mask is evaluated there;
otherwise all scores inside the runs count, and the result says that it is an upper bound. A score that is visible is
never missed.

If sequences or heads see different keys, `scores` is the sum over all planes (a sequence and a head): a pair of chunks
with any visible score in any plane is needed, and work is the mean over the planes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import torch

from attngen.conformance.derive import function
from attngen.distributed.inputs import MaskValues, ir_of, mask_values, pair_values, row_values
from attngen.distributed.rows import Run, holds, lengths, runs_of
from attngen.errors import AttngenError
from attngen.ir import Blocks, Module

MOST_EVALUATED = 1 << 26  # pairs at which a mask is evaluated; with more, the runs' scores all count
MOST_ROWS = 1 << 15  # of a chunk, whose scores are counted in 32 bits
STRIP = 1 << 22  # elements of the arrays in which counts are made


@dataclass(frozen=True, eq=False)
class Visible:
    """The visible scores of a sequence, by chunks of `chunk` rows.

    scores: integers [chunks, chunks], visible scores of the queries of a chunk (row) with the keys of a chunk
        (column), summed over the planes.
    planes: number of planes (sequence, head) that were counted; 1 if all have the same mask.
    exact: False if `scores` is an upper bound in some chunks.
    """

    seq_len: int
    chunk: int
    scores: np.ndarray
    planes: int = 1
    exact: bool = True

    @cached_property
    def needs(self) -> np.ndarray:
        """Bool [chunks, chunks]: whether some query of a chunk may see some key of a chunk, in any plane."""
        return self.scores > 0

    @cached_property
    def work(self) -> np.ndarray:
        """Int64 [chunks]: visible scores of the queries of each chunk, summed over the planes."""
        found: np.ndarray = self.scores.sum(1, dtype=np.int64)
        return found

    @property
    def total(self) -> float:
        """Visible scores of one head of one sequence, the mean over the planes."""
        return int(self.work.sum()) / self.planes

    @cached_property
    def weights(self) -> np.ndarray:
        """Int64 [chunks]: the rows of each chunk. Only the last may have fewer than `chunk`."""
        starts = np.arange(len(self.scores)) * self.chunk
        return np.minimum(self.chunk, self.seq_len - starts)

    def needed(self, chunks: Sequence[int]) -> tuple[int, ...]:
        """Return the chunks of keys that the queries of some chunks may see, in rising order."""
        return tuple(np.flatnonzero(self.needs[list(chunks)].any(0)).tolist())

    def seeing(self, queries: Sequence[int], keys: Sequence[int]) -> tuple[int, ...]:
        """Return the chunks among those of queries that may see some key of some chunks, in the order given."""
        sees = self.needs[np.ix_(list(queries), list(keys))].any(1)
        return tuple(np.array(queries, int)[sees].tolist())

    def between(self, queries: Sequence[int], keys: Sequence[int]) -> int:
        """Return the visible scores of the queries of some chunks with the keys of some chunks, over all planes."""
        return int(self.scores[np.ix_(list(queries), list(keys))].sum())


def count(
    source: Module | ModuleType | str | os.PathLike[str] | Any,
    seq_len: int,
    chunk: int,
    inputs: Mapping[str, Any] | None = None,
    cu_seqlens: list[int] | None = None,
    q_heads: int = 1,
    kv_heads: int = 1,
) -> Visible:
    """Count the visible scores of a sequence by chunks, for as many queries as keys.

    source: an IR module, or a generated module, its `attention` function or its folder.
    chunk: rows of a chunk.
    inputs: what the mask reads, by the keywords of a call: numbers, NumPy arrays or torch tensors, of the whole
        sequence.
    cu_seqlens: where each packed document starts, and the end of the last, for masks that read them.
    q_heads, kv_heads: numbers of heads, for masks that depend on the head.
    Raises AttngenError if an input is missing, or a size is not positive.
    """
    if seq_len < 1 or not 1 <= chunk <= MOST_ROWS:
        raise AttngenError(
            f"a sequence of {seq_len} rows in chunks of {chunk}; expected a row or more, in chunks of 1 to {MOST_ROWS}"
        )
    module = ir_of(source)
    known = mask_values(module, seq_len, inputs or {}, cu_seqlens, q_heads, kv_heads)
    planes = [_plane(module, known, plane, seq_len, chunk) for plane in known.planes]
    scores = planes[0][0]
    for found, _ in planes[1:]:
        scores = scores.astype(np.int64) + found
    return Visible(seq_len, chunk, scores, len(planes), all(exact for _, exact in planes))


def _plane(module: Module, known: MaskValues, plane: tuple[int, int], n: int, chunk: int) -> tuple[np.ndarray, bool]:
    """Return the counts of one plane, and whether they are exact."""
    values, others = row_values(module, known, plane)
    outer, inner = runs_of(module, values, others)
    blocks = module.blocks if module.blocks and not module.blocks.data else None
    exact = np.array_equal(lengths(outer, n), lengths(inner, n))
    if blocks:
        listed = _block_mask(module, blocks, known, plane, n)
        return _counts(outer, n, chunk, (blocks.size, listed)), exact
    scores = _counts(outer, n, chunk)
    if exact:
        return scores, True
    differs = scores != _counts(inner, n, chunk)
    if int(differs.sum()) * chunk * chunk > MOST_EVALUATED:
        return scores, False
    for i in np.flatnonzero(differs.any(1)):
        columns = np.flatnonzero(differs[i])
        rows = np.arange(i * chunk, min((i + 1) * chunk, n))[:, None]
        keys = (columns[:, None] * chunk + np.arange(chunk)).ravel()
        inside = keys < n
        found = holds(
            module, pair_values(module, known, plane, rows, np.where(inside, keys, 0)), (len(rows), len(keys))
        )
        scores[i, columns] = (found & inside).sum(0).reshape(-1, chunk).sum(1)
    return scores, True


def _counts(runs: list[Run], n: int, chunk: int, listed: tuple[int, np.ndarray] | None = None) -> np.ndarray:
    """Return the number of keys in the runs of the queries of a chunk, by chunks of keys: int32 [chunks, chunks].

    listed: a size of blocks, and which blocks count: bool [blocks, blocks]; by default all keys of the runs do.
    """
    chunks = -(-n // chunk)
    unit = math.gcd(chunk, listed[0]) if listed else chunk  # counted in squares of this many rows
    per_chunk, columns = chunk // unit, -(-n // unit)
    scores = np.zeros((chunks, chunks), np.int32)
    step = max(1, STRIP // (per_chunk * (columns + 2)))
    for at in range(0, chunks, step):
        rows = slice(at * chunk, min((at + step) * chunk, n))
        found = _squares(runs, rows, unit, columns, min(step, chunks - at) * per_chunk)
        if listed:
            size, mask = listed
            first = at * per_chunk * unit
            of_rows = np.minimum((first + np.arange(len(found)) * unit) // size, len(mask) - 1)
            found = found * mask[np.ix_(of_rows, np.arange(columns) * unit // size)]
        if per_chunk > 1:
            found = np.pad(found, ((0, 0), (0, chunks * per_chunk - columns)))
            found = found.reshape(-1, per_chunk, chunks, per_chunk).sum((1, 3))
        scores[at : at + len(found)] = found
    return scores


def _squares(runs: list[Run], rows: slice, unit: int, columns: int, groups: int) -> np.ndarray:
    """Return the number of keys in the runs of some rows, by squares of `unit` rows and keys: int32 [groups, columns].

    A run from `first` to `end` is the keys from `first` on without those from `end` on. In squares, the keys from p on
    are a step at p // unit, so that a run adds four numbers to the differences between neighbouring squares.
    """
    width = columns + 2
    differences = np.zeros(groups * width)
    group = np.arange(rows.stop - rows.start) // unit * width
    for run in runs:
        for sign, position in zip((1, -1), run):
            square, offset = np.divmod(position[rows], unit)
            places = np.concatenate((group + square, group + square + 1))
            steps = np.concatenate((sign * (unit - offset), sign * offset))
            differences += np.bincount(places, steps, groups * width)
    return np.rint(differences).astype(np.int32).reshape(groups, width).cumsum(1, dtype=np.int32)[:, :columns]


def _block_mask(module: Module, blocks: Blocks, known: MaskValues, plane: tuple[int, int], n: int) -> np.ndarray:
    """Return which blocks of a plane count, as bool [blocks, blocks]: from the call, or from the module's pattern."""
    side = -(-n // blocks.size)
    if blocks.pattern:
        found = function(blocks.pattern)(side, side, torch.device("cpu"), *(number for _, number in blocks.params))
        mask: np.ndarray = found.numpy()
        return mask
    given = np.asarray(known.tensors["block_mask"][1], bool)
    if given.ndim < 2 or given.shape[-2:] != (side, side):
        shape = list(given.shape)
        raise AttngenError(f"block_mask has shape {shape}; expected {side} x {side} blocks of {blocks.size} scores")
    given = given.reshape((1,) * (4 - given.ndim) + given.shape)
    b, h = (0 if given.shape[i] == 1 else plane[i] for i in (0, 1))
    return given[b, h]
