"""The launch grid of a kernel, and how it splits the keys of sequences among programs."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from attngen.heuristics import CTAS_PER_SM, PACKED, WAVES
from attngen.ir.core import Access
from attngen.ir.dims import AXIS_EXTENT
from attngen.ir.expr import Expr, floordiv, select, symbol

REVERSED_GROUP = "reversed_L2_group"  # symbol in programs (see GridAxis)


@dataclass(frozen=True)
class GridAxis:
    """One axis of the launch grid. Programs are numbered along it; the first axis runs fastest.

    reversed: programs start with the last tile.
    swizzle: heads, counted over all sequences, run in groups of this many. In a group, programs run tile by tile: first
    one tile of every head, then the next tile of every head. So the longest tiles start early and the last to run are
    short (LPT).
    swizzle_rows: the size of a group is the number of heads that have this many rows together, at least 1, and at most
    `swizzle` if that is above 1.
    reversed_group: the last group of heads, which may be the only one, runs in reversed order: it starts with the tile
    at the other end, and loops that visit tiles in order run backwards. In programs, the symbol `reversed_L2_group` is
    1 in that group and 0 elsewhere.
    """

    var: str
    extent: Expr
    reversed: bool = False
    swizzle: int = 1
    swizzle_rows: int = 0
    reversed_group: bool = False

    @property
    def heads(self) -> Expr:
        """The number of heads in a group."""
        most = sympy.Integer(self.swizzle)
        if not self.swizzle_rows:
            return most
        fits = floordiv(sympy.Integer(self.swizzle_rows), symbol(AXIS_EXTENT[self.var]))
        return sympy.Max(1, fits if most == 1 else sympy.Min(most, fits))


@dataclass(frozen=True)
class KVSplit:
    """How the keys of all sequences in a cache are split among programs: a sequence has cdiv(work, each) splits (see
    ir/split_kv.py), each of which is a work item. The symbol `num_KV_splits` is the number of splits of the program's
    sequence, and `first_item` that of all sequences before it.

    work: units of work of a sequence, as a formula in `Nk` (its number of keys), `reads`, and values that are the same
    for all sequences.
    each: the largest number of units in a split. 0: chosen at run time, so that the splits of all sequences, at most
    `items`, keep the device busy.
    ctas_per_sm: resident programs per SM.
    waves: the maximal number of splits per resident program of the device.
    ctas_per_sm_packed: `ctas_per_sm` for at most PACKED rows of queries; 0 if it is the same.
    reads: names in `work`, each with the element of a tensor that it stands for, at sequence `b`.
    """

    work: Expr
    each: int = 0
    ctas_per_sm: int = CTAS_PER_SM
    waves: int = WAVES
    ctas_per_sm_packed: int = 0
    reads: tuple[tuple[str, Access], ...] = ()

    @property
    def programs(self) -> Expr:
        """Resident programs per SM, in terms of `Gq`, the rows of queries."""
        most = sympy.Integer(self.ctas_per_sm)
        return (
            select(symbol("Gq") <= PACKED, sympy.Integer(self.ctas_per_sm_packed), most)
            if self.ctas_per_sm_packed
            else most
        )

    def ctas_per_sm_for(self, rows: int | None) -> int:
        """Resident programs per SM under a config for at most `rows` rows; None means any number of rows."""
        return (
            self.ctas_per_sm_packed
            if self.ctas_per_sm_packed and rows is not None and rows <= PACKED
            else self.ctas_per_sm
        )


SPLIT_SYMBOLS = ("num_KV_splits", "first_item")  # symbols in programs (see KVSplit)
