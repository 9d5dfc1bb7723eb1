"""How large a spec's heads, its expressions, their numbers and their parameters may be."""

from __future__ import annotations

MAX_TEXT = 4000  # characters
MAX_NODES = 1000  # of Python's tree
MAX_DEPTH = 64  # of Python's tree
MAX_SIZE = 2000  # nodes of the sympy expression
MAX_TURNS = 128  # of `any`, `all` and `sum`, which are written out; one inside another multiplies
MAX_EXTREMES = 32  # arguments of all min and max together: sympy compares each with each
MAX_POWER = 9  # what the IR's grammar has
MAX_INT = 2**30 - 1  # kernels sum an integer, a position and a length in 32 bits
MAX_BITMASK = 2**31 - 1  # a number beside `&`, `|` or `^`
MAX_REAL = 3.4028234663852886e38  # of fp32
LEAST_REAL = 2.0**-126  # of fp32 that is not subnormal, which kernels take for zero
MAX_BITS = 127  # of the parts of a fraction
MAX_DIM = 2**24
WIDEST_HEAD, WIDEST_LATENT, WIDEST_ROPE = 512, 512, 128  # columns of a head; of a latent, and of what is rotated
