"""One table of the names that kernels, host programs and generated code share."""

from __future__ import annotations

from attngen.ir.ops import Arg

SIZES = ("B", "Hq", "Hkv", "group", "splits", "queries", "Nq", "Nk", "Nlse")  # scalars that the tensors' shapes give
LETTERS = {
    "B": "b",
    "Hq": "h",
    "Hkv": "h",
    "Nq": "n",
    "Nk": "n",
    "Tq": "t",
    "Tk": "t",
    "splits": "s",
}  # how strides are named; others by number


def stride_names(arg: Arg) -> list[str]:
    """Stride parameters of a tensor: every dimension but the last, which is contiguous."""
    letters = [LETTERS.get(d, str(at)) for at, d in enumerate(arg.type.dims[:-1])]
    return [f"stride_{arg.name.lower()}_{c if letters.count(c) == 1 else at}" for at, c in enumerate(letters)]
