"""What the operators and functions of the language give, for its reference."""

from __future__ import annotations

OPERATORS = {
    "+ - *": "as in Python; of integers, an integer",
    "/": "a quotient, a real number",
    "// %": "quotient and remainder, rounded down as in Python",
    "**": "a power: by a whole constant from -8 to 8, by 0.5, or of a positive constant",
    "< <= > >= == !=": "a condition; chains as in Python: `0 <= a < b`",
    "and or not": "of conditions",
    "& | ^": "of the bits of integers",
    "<< >>": "shifts of 32 bits; by less than 0 or more than 31, all bits are gone: 0, or -1 of a negative number by `>>`",
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
    "any": "whether the condition holds in one of the turns, as in `any(i, 8, chosen[b, q_idx // 64, i] == kv_idx // 64)`",
    "all": "whether it holds in all of them",
    "sum": "the sum over the turns",
    "int": "the integer towards zero; of a condition 1 or 0",
    "float": "the same number as a real; of a condition 1 or 0",
}
