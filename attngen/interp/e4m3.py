"""8-bit floating-point numbers on NumPy: e4m3, with a sign, 4 exponent bits and 3 fraction bits, without infinities."""

from __future__ import annotations

from typing import Any

import numpy as np

_NAN = 0x7F
_FRACTION = np.arange(128) % 8 / 8
_EXPONENT = np.arange(128) // 8
# All non-negative numbers; the largest is 448.
POSITIVE = np.where(_EXPONENT == 0, 2.0**-6 * _FRACTION, 2.0 ** (_EXPONENT - 7.0) * (1 + _FRACTION))[:_NAN]
LARGEST = int(POSITIVE[-1])
NUMBERS = np.concatenate([POSITIVE, [np.nan], -POSITIVE, [np.nan]])  # index: the 8 bits


def numbers(pairs: Any) -> tuple[Any, Any]:
    """The first and the second numbers of packed pairs, which are 16-bit integers with the first number in the low
    byte."""
    bits = np.asarray(pairs).astype(np.int64)
    return NUMBERS[bits & 0xFF], NUMBERS[bits >> 8 & 0xFF]


def pairs(first: Any, second: Any) -> Any:
    """Packed pairs of the numbers nearest to these; ties go to the number whose last bit is 0, and numbers beyond the
    largest become the largest."""
    bits = _nearest(first) | _nearest(second) << 8
    return bits.astype(np.uint16).view(np.int16)


def _nearest(x: Any) -> Any:
    x = np.asarray(x, np.float64)
    size = np.minimum(np.abs(x), POSITIVE[-1])
    above = np.searchsorted(POSITIVE, size)
    below = np.maximum(above - 1, 0)
    above = np.minimum(above, len(POSITIVE) - 1)
    to_above, to_below = POSITIVE[above] - size, size - POSITIVE[below]
    found = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    return np.where(np.isnan(x), _NAN, found | np.where(np.signbit(x) & (x != 0), 0x80, 0)).astype(np.int64)
