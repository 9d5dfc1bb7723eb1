"""How the keys of all sequences in a cache are dealt among programs."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from attngen.heuristics import LEAST_UNITS, UNIT, WAVES
from attngen.ir.expr import Expr, cdiv, floordiv, symbol


def item() -> Expr:
    """The number of a program's part of the keys, among those of all sequences."""
    return symbol("first_item") + symbol("part")


def joined_items() -> Expr:
    """The numbers of some parts of a sequence that a turn joins, among those of all sequences."""
    return symbol("first_item") + symbol("joined")


def units_of(work: Expr) -> Expr:
    """Units of work of a sequence, of which its kernel says `work`: one at least if it has a key, and no more than
    it has tiles."""
    keys = symbol("Nk")
    return sympy.Max(sympy.Min(1, keys), sympy.Min(cdiv(keys, sympy.Integer(UNIT)), work))


def least_items(each: int) -> Expr:
    """Parts of all sequences together, at most: room for so many holds all of them. With parts of a fixed length, of
    sequences that fill the cache."""
    batch, rows = symbol("B"), sympy.Integer(UNIT * each)
    return batch * floordiv(symbol("Nc") + rows - 1, rows) if each else 2 * batch


def unit_of_parts(work: Sequence[int], items: int, each: int, waves: int = WAVES) -> int:
    """Units of work of a part, at most, of sequences with so many units.

    each: the number itself, where it is not 0. Otherwise there are no more than `items` parts, of which a `waves`-th
    run at one time: a turn. There are as many turns as parts of LEAST_UNITS units would take, and a part is as short as
    fills these. That is an estimate: a sequence has half a part more than its units make, on average.
    """
    total, sequences, busy = sum(work), len(work), max(1, items // waves)
    turns = min(waves, max(1, -(-sum(-(-units // LEAST_UNITS) for units in work) // busy)))
    balanced = max(1, -(-total // max(1, items - sequences)), -(-total // max(1, turns * busy - sequences // 2)))
    return each or balanced


def kv_split(work: Sequence[int], items: int, each: int, waves: int = WAVES) -> list[int]:
    """How many parts each sequence has: together no more than `items`, if that is `least_items` or more."""
    unit = unit_of_parts(work, items, each, waves)
    return [-(-units // unit) for units in work]
