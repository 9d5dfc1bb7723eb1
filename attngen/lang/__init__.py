"""The expression language of a spec's masks and scores: text and declared parameters in, sympy out.

Text is parsed with Python's `ast` and a whitelist, and never evaluated. Every part of an expression is a condition, an
integer or a real number; a mask is a condition, a score is a number. `//` and `%` round down, as in Python. A negative
index of a tensor parameter counts from the end, as in Python; a read that is still outside gives 0 (false). Everything
else is refused, by name.

Functions are over real numbers. The root of a negative number and 0 / 0 are undefined, and simplification may hide
them.
"""
