"""How much less a mask's blocks would cost if they were listed: counted in a sample of rows of blocks.

Bounds in closed form are exact for most masks. For others, such as neighbourhoods on a canvas whose positions run along
a curve, a range of tiles has many that hold nothing. A list of blocks leaves these out. It is made by a kernel that
evaluates the mask once.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import sympy

from attngen.heuristics import LISTED, MASKED_TILE, SAMPLED_LENGTHS, SAMPLED_ROWS, WORTH_LISTING
from attngen.interp.numeric import value
from attngen.ir.expr import Bool
from attngen.tiles.intervals import Scene, terms
from attngen.tiles.ranges import classify
from attngen.tiles.tiles import evaluate


@cache
def worth_listing(where: Bool) -> bool:
    """Whether lists of blocks would cost less than WORTH_LISTING of what bounds in closed form leave, for a mask of
    positions and lengths: in kernels whose programs own queries, or in those whose programs own keys.

    Each row of blocks that is counted is one of SAMPLED_ROWS, evenly spaced, of as many queries as keys: the shortest
    of SAMPLED_LENGTHS that no number in the mask passes.
    """
    largest = max((abs(int(x)) for x in where.atoms(sympy.Integer)), default=0)
    n = next((n for n in SAMPLED_LENGTHS if n >= largest), SAMPLED_LENGTHS[-1])
    scenes = (Scene("q", "kv"), Scene("kv", "q"))
    return any(
        _share(where, scene, n) < WORTH_LISTING
        for scene in scenes
        if any(term.unsolved for term in terms(where, scene))
    )


class Counted(NamedTuple):
    """Blocks in a sample of rows of blocks: all; those that bounds leave, and of these those that are masked; the
    same of lists."""

    all: int
    bounded: int
    bounded_cut: int
    listed: int
    listed_cut: int


def samples(where: Bool) -> bool:
    """Whether a mask can be counted in a sample: it is a formula of positions and lengths, and hides something."""
    known = {"q_idx", "kv_idx", *_sizes(0)}
    return where not in (sympy.true, sympy.false) and {s.name for s in where.free_symbols} <= known


def counted(where: Bool, scene: Scene, n: int) -> Counted:
    """Blocks of a mask of n queries and n keys, a multiple of LISTED, in SAMPLED_ROWS rows of blocks along the axis
    that programs own."""
    runs = classify(where, scene)
    every_row = np.arange(n, dtype=np.int32)[None]
    rows = sorted(set((np.linspace(0, n // LISTED - 1, SAMPLED_ROWS).astype(int) * LISTED).tolist()))
    bounded = bounded_cut = listed = listed_cut = 0
    for start in rows:
        here = _sizes(n) | {f"{scene.own}_start": start}
        ends = [[int(evaluate(e, here)) for e in runs[i : i + 4]] for i in range(0, len(runs), 4)]
        bounded += sum(end - first for first, _, _, end in ends)
        bounded_cut += sum(end - first - (full_end - full) for first, full, full_end, end in ends)
        own = np.arange(start, start + LISTED, dtype=np.int32)[:, None]
        with np.errstate(all="ignore"):  # of places that other conditions hide
            seen = value(where, {**here, f"{scene.own}_idx": own, f"{scene.loop}_idx": every_row})
        blocks = np.broadcast_to(seen, (LISTED, n)).reshape(LISTED, -1, LISTED)
        some, every = int(blocks.any((0, 2)).sum()), int(blocks.all((0, 2)).sum())
        listed += some
        listed_cut += some - every
    return Counted(len(rows) * (n // LISTED), bounded, bounded_cut, listed, listed_cut)


def _sizes(n: int) -> dict[str, int]:
    return {"Nq": n, "Nk": n, "BLOCK_Q": LISTED, "BLOCK_KV": LISTED, "b": 0, "h": 1, "hkv": 0, "g": 0, "group": 1}


def _share(where: Bool, scene: Scene, n: int) -> float:
    """The cost of the blocks that hold something visible, over that of what bounds leave, of n queries and n keys."""
    found = counted(where, scene, n)
    bounded, listed = found.bounded + MASKED_TILE * found.bounded_cut, found.listed + MASKED_TILE * found.listed_cut
    return listed / bounded if bounded else 1.0
