"""Estimate how much block lists would save for a mask, by counting blocks in a sample of their rows.

Bounds in closed form are exact for most masks. For others, such as neighbourhoods on a canvas whose positions run along
a curve, a range of tiles has many empty tiles. A block list, which a kernel makes by evaluating the mask once, leaves
these out.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import sympy

from attngen.heuristics import LISTED, MASKED_TILE, SAMPLED_LENGTHS, SAMPLED_ROWS, WORTH_LISTING
from attngen.interp.numeric import value
from attngen.ir import Bool
from attngen.tiles.intervals import MaskContext, terms
from attngen.tiles.ranges import classify
from attngen.tiles.tiles import evaluate


@cache
def worth_listing(where: Bool) -> bool:
    """True if, for a mask of positions and lengths, block lists would cost less than WORTH_LISTING times as much as
    bounds in closed form, with program tiles of queries or with program tiles of keys.

    SAMPLED_ROWS evenly spaced rows of blocks are counted, for as many queries as keys: the shortest of SAMPLED_LENGTHS
    that is not below any number in the mask.
    """
    largest = max((abs(int(x)) for x in where.atoms(sympy.Integer)), default=0)
    n = next((n for n in SAMPLED_LENGTHS if n >= largest), SAMPLED_LENGTHS[-1])
    contexts = (MaskContext("q", "kv"), MaskContext("kv", "q"))
    return any(
        _share(where, context, n) < WORTH_LISTING
        for context in contexts
        if any(term.unsolved for term in terms(where, context))
    )


class Counted(NamedTuple):
    """Numbers of blocks in the sampled rows: all, inside the bounds, and listed; and how many of the latter two are
    partial."""

    all: int
    bounded: int
    bounded_partial: int
    listed: int
    listed_partial: int


def samples(where: Bool) -> bool:
    """True if a mask can be sampled: it is a formula of positions and lengths, and is not constant."""
    known = {"q_idx", "kv_idx", *_sizes(0)}
    return where not in (sympy.true, sympy.false) and {s.name for s in where.free_symbols} <= known


def counted(where: Bool, context: MaskContext, n: int) -> Counted:
    """Count a mask's blocks in SAMPLED_ROWS rows of blocks along the program axis, for n queries and n keys; n is a
    multiple of LISTED."""
    runs = classify(where, context)
    every_row = np.arange(n, dtype=np.int32)[None]
    rows = sorted(set((np.linspace(0, n // LISTED - 1, SAMPLED_ROWS).astype(int) * LISTED).tolist()))
    bounded = bounded_partial = listed = listed_partial = 0
    for start in rows:
        here = _sizes(n) | {f"{context.axis}_start": start}
        ends = [[int(evaluate(e, here)) for e in runs[i : i + 4]] for i in range(0, len(runs), 4)]
        bounded += sum(end - first for first, _, _, end in ends)
        bounded_partial += sum(end - first - (full_end - full) for first, full, full_end, end in ends)
        own = np.arange(start, start + LISTED, dtype=np.int32)[:, None]
        with np.errstate(all="ignore"):  # errors at pairs that other conditions hide
            seen = value(where, {**here, f"{context.axis}_idx": own, f"{context.loop}_idx": every_row})
        blocks = np.broadcast_to(seen, (LISTED, n)).reshape(LISTED, -1, LISTED)
        some, every = int(blocks.any((0, 2)).sum()), int(blocks.all((0, 2)).sum())
        listed += some
        listed_partial += some - every
    return Counted(len(rows) * (n // LISTED), bounded, bounded_partial, listed, listed_partial)


def _sizes(n: int) -> dict[str, int]:
    return {"Nq": n, "Nk": n, "BLOCK_Q": LISTED, "BLOCK_KV": LISTED, "b": 0, "h": 1, "hkv": 0, "g": 0, "group": 1}


def _share(where: Bool, context: MaskContext, n: int) -> float:
    """Return the cost of the listed blocks over the cost of the blocks inside the bounds, for n queries and n keys."""
    found = counted(where, context, n)
    bounded, listed = (
        found.bounded + MASKED_TILE * found.bounded_partial,
        found.listed + MASKED_TILE * found.listed_partial,
    )
    return listed / bounded if bounded else 1.0
