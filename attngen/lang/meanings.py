"""Descriptions of the operators and functions of the language, for its reference."""

from __future__ import annotations

OPERATORS = {
    "+ - *": "as in Python; integers give an integer",
    "/": "a quotient, a real number",
    "// %": "quotient and remainder, rounded down as in Python",
    "**": "a power with a whole constant from -8 to 8 or 0.5 as exponent, or with a positive constant as base",
    "< <= > >= == !=": "a condition; chains as in Python: `0 <= a < b`",
    "and or not": "combine conditions",
    "& | ^": "operate on the bits of integers",
    "<< >>": "shifts of 32 bits; shifts by less than 0 or more than 31 lose all bits: "
    "0, or -1 for a negative number and `>>`",
    "t[...]": "an element of a tensor of `params`",
}
FUNCTIONS = {
    "min": "the least",
    "max": "the greatest",
    "abs": "the absolute value",
    "clamp": "x between the two bounds",
    "where": "the second argument where the condition holds, else the third; both numbers or both conditions",
    "exp": "e to the power of x",
    "log": "the natural logarithm",
    "tanh": "the hyperbolic tangent",
    "sigmoid": "1 / (1 + exp(-x))",
    "sqrt": "the square root",
    "erf": "the error function",
    "sin": "the sine, of radians",
    "cos": "the cosine, of radians",
    "relu": "x where it is positive, else 0",
    "gelu": "x times the probability that a normal number is below x; not its approximation by tanh",
    "floor": "the integer below",
    "round": "the nearest integer; halves go to the even one",
    "any": "whether the condition holds for one value of the index, as in "
    "`any(i, 8, chosen[b, q_idx // 64, i] == kv_idx // 64)`",
    "all": "whether it holds for all of them",
    "sum": "the sum over all values of the index",
    "int": "the integer towards zero; a condition gives 1 or 0",
    "float": "the same number as a real; a condition gives 1 or 0",
}
