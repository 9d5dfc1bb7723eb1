"""How large a spec's heads, its expressions, their numbers and their parameters may be."""

from __future__ import annotations

MAX_TEXT = 4000  # characters
MAX_NODES = 1000  # nodes of Python's tree
MAX_DEPTH = 64  # depth of Python's tree
MAX_SIZE = 2000  # nodes of the sympy expression
MAX_UNROLLED = 128  # iterations of `any`, `all` and `sum`, which are unrolled; nested ones multiply
MAX_EXTREMES = 32  # arguments of all min and max together, because sympy compares each with each
MAX_POWER = 9  # largest exponent in the IR's grammar
MAX_INT = 2**30 - 1  # kernels sum an integer, a position and a length in 32 bits
MAX_BITMASK = 2**31 - 1  # a number next to `&`, `|` or `^`
MAX_REAL = 3.4028234663852886e38  # the largest fp32 number
LEAST_REAL = 2.0**-126  # the least normal fp32 number; kernels treat subnormal ones as zero
MAX_BITS = 127  # bits of a fraction's numerator and denominator
MAX_DIM = 2**24
# largest head_dim; of a latent; of the rotated part
WIDEST_HEAD, WIDEST_LATENT, WIDEST_ROPE = 512, 512, 128
