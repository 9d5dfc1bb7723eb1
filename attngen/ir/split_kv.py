"""Split-KV: how the keys of all sequences in a cache are split among programs."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from attngen.heuristics import LEAST_UNITS, UNIT, WAVES
from attngen.ir.expr import Expr, cdiv, floordiv, symbol


def work_item() -> Expr:
    """The index of a program's work item: of its split, among the splits of all sequences."""
    return symbol("first_item") + symbol("KV_split")


def combined_work_items() -> Expr:
    """The numbers of the splits that an iteration combines. They are splits of one sequence, numbered among the splits
    of all sequences."""
    return symbol("first_item") + symbol("KV_splits")


def units_of(work: Expr) -> Expr:
    """The units of work of a sequence whose kernel counts `work`: at least one if the sequence has a key, and at most
    the number of its tiles."""
    keys = symbol("Nk")
    return sympy.Max(sympy.Min(1, keys), sympy.Min(cdiv(keys, sympy.Integer(UNIT)), work))


def max_work_items(each: int) -> Expr:
    """The largest number of splits that all sequences together may have, for which memory must be allocated. With
    splits of a fixed length, that is the number if all sequences fill the cache."""
    batch, rows = symbol("B"), sympy.Integer(UNIT * each)
    return batch * floordiv(symbol("Nc") + rows - 1, rows) if each else 2 * batch


def split_size(work: Sequence[int], items: int, each: int, waves: int = WAVES) -> int:
    """The largest number of work units in a split, for sequences with `work` units.

    each: the result, if it is not 0. Otherwise there are at most `items` work items, which run in up to `waves` waves
    of items / waves programs. The number of waves is the one that splits of LEAST_UNITS units would fill, and splits
    have the length with which they fill these waves. That is an estimate: on average a sequence has half a split more
    than its units fill.
    """
    total, sequences, busy = sum(work), len(work), max(1, items // waves)
    used = min(waves, max(1, -(-sum(-(-units // LEAST_UNITS) for units in work) // busy)))  # waves
    balanced = max(1, -(-total // max(1, items - sequences)), -(-total // max(1, used * busy - sequences // 2)))
    return each or balanced


def kv_split(work: Sequence[int], items: int, each: int, waves: int = WAVES) -> list[int]:
    """The number of splits of each sequence. Their sum is at most `items`, if that is at least `max_work_items`."""
    unit = split_size(work, items, each, waves)
    return [-(-units // unit) for units in work]
