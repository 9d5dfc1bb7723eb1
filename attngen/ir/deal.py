"""How the keys of all sequences in a cache are dealt among programs."""

from __future__ import annotations

from collections.abc import Sequence

from attngen.policy import LEAST_UNITS, WAVES


def unit_of_parts(work: Sequence[int], items: int, each: int) -> int:
    """Units of work of a part, at most, of sequences with so many units.

    each: the number itself, where it is not 0. Otherwise there may be no more than `items` parts, and no more than a WAVES-th of these
    where parts would have less than LEAST_UNITS units.
    """
    total, sequences = sum(work), len(work)
    most, few = (max(1, n - sequences) for n in (items, items // WAVES))  # a sequence has one part more than units of whole parts
    balanced = max(1, -(-total // most), min(-(-total // few), LEAST_UNITS))
    return each or balanced


def deal(work: Sequence[int], items: int, each: int) -> list[int]:
    """How many parts each sequence has: together no more than `items`."""
    unit = unit_of_parts(work, items, each)
    return [-(-units // unit) for units in work]
