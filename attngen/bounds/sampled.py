"""How much less a mask's blocks would cost if they were listed: counted in a sample of rows of blocks.

Bounds in closed form are exact for most masks. For others, such as neighbourhoods on a canvas whose positions run along a curve, a range
of tiles has many that hold nothing. A list of blocks leaves these out. It is made by a kernel that evaluates the mask once.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import sympy

from attngen.bounds.intervals import Scene, terms
from attngen.bounds.ranges import classify
from attngen.bounds.tiles import evaluate
from attngen.ir.expr import Bool
from attngen.ir.numeric import value
from attngen.policy import LISTED, MASKED_TILE, SAMPLED_LENGTHS, SAMPLED_ROWS, WORTH_LISTING


@cache
def worth_listing(where: Bool) -> bool:
    """Whether lists of blocks would cost less than WORTH_LISTING of what bounds in closed form leave, for a mask of positions and lengths:
    in kernels whose programs own queries, or in those whose programs own keys.

    Each row of blocks that is counted is one of SAMPLED_ROWS, evenly spaced, of as many queries as keys: the shortest of SAMPLED_LENGTHS
    that no number in the mask passes.
    """
    largest = max((abs(int(x)) for x in where.atoms(sympy.Integer)), default=0)
    n = next((n for n in SAMPLED_LENGTHS if n >= largest), SAMPLED_LENGTHS[-1])
    scenes = (Scene("q", "kv"), Scene("kv", "q"))
    return any(_share(where, scene, n) < WORTH_LISTING for scene in scenes if any(term.unsolved for term in terms(where, scene)))


def _share(where: Bool, scene: Scene, n: int) -> float:
    """The cost of the blocks that hold something visible, over that of what bounds leave, of n queries and n keys."""
    runs = classify(where, scene)
    every_row = np.arange(n, dtype=np.int32)[None]
    sizes = {"Nq": n, "Nk": n, "BLOCK_Q": LISTED, "BLOCK_KV": LISTED, "b": 0, "h": 1, "hkv": 0, "g": 0, "group": 1}
    bounded = listed = 0.0
    for start in np.linspace(0, n // LISTED - 1, SAMPLED_ROWS).astype(int) * LISTED:
        here = sizes | {f"{scene.own}_start": int(start)}
        ends = [[int(evaluate(e, here)) for e in runs[i : i + 4]] for i in range(0, len(runs), 4)]
        bounded += sum(end - first + MASKED_TILE * (end - first - (full_end - full)) for first, full, full_end, end in ends)
        own = np.arange(start, start + LISTED, dtype=np.int32)[:, None]
        with np.errstate(all="ignore"):  # of places that other conditions hide
            seen = value(where, {**here, f"{scene.own}_idx": own, f"{scene.loop}_idx": every_row})
        blocks = np.broadcast_to(seen, (LISTED, n)).reshape(LISTED, -1, LISTED)
        some, every = blocks.any((0, 2)).sum(), blocks.all((0, 2)).sum()
        listed += some + MASKED_TILE * (some - every)
    return listed / bounded if bounded else 1.0
