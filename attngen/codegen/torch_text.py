"""PyTorch source of indices by distance, for host programs that sum gradients. `distance` is an integer tensor, sizes
are numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import sympy

from attngen.errors import AttngenError
from attngen.ir.expr import (
    BITS,
    TO_INTEGER,
    clamp,
    cos,
    erf,
    exp2,
    floor,
    floordiv,
    log2,
    mod,
    nearest,
    select,
    sin,
    sqrt,
    symbol,
    trunc,
)
from attngen.ir.expr_text import to_text

_DISTANCE = symbol("distance")
_REALS = {
    exp2: "torch.exp2",
    log2: "torch.log2",
    sqrt: "torch.sqrt",
    erf: "torch.erf",
    sin: "torch.sin",
    cos: "torch.cos",
}
_REALS |= {floor: "torch.floor", nearest: "torch.round", trunc: "torch.trunc"}
_SIGNS: tuple[tuple[Any, str], ...] = (
    (sympy.Add, " + "),
    (sympy.Mul, " * "),
    (floordiv, " // "),
    (mod, " % "),
    (sympy.And, " & "),
    (sympy.Or, " | "),
    *((kind, f" {kind.sign} ") for kind in BITS),
)


def to_torch(e: Any, sizes: Mapping[str, str]) -> str:
    """Return the PyTorch source of an IR expression; raise AttngenError if it has none. `sizes` has the source of each
    size.

    Reals are fp64, so they round like those of kernels or better.
    """
    args = [to_torch(a, sizes) for a in e.args]
    if e.is_Symbol:
        return sizes.get(str(e), str(e))
    if e.is_Number:
        return str(int(e)) if e.is_Integer else repr(float(e))
    if e in (sympy.true, sympy.false):
        return str(e == sympy.true)
    for kind, sign in _SIGNS:
        if isinstance(e, kind):
            return f"({sign.join(args)})"
    if e.is_Relational:
        return f"({args[0]} {e.rel_op} {args[1]})"
    if isinstance(e, (sympy.Min, sympy.Max)):
        return _extreme(e, args)
    if isinstance(e, sympy.Not):
        return f"~{args[0]}" if e.has(_DISTANCE) else f"(not {args[0]})"
    if isinstance(e, select):
        return (
            f"torch.where({', '.join(args)})"
            if e.args[0].has(_DISTANCE)
            else f"({args[1]} if {args[0]} else {args[2]})"
        )
    if isinstance(e, clamp) and e.args[0].has(_DISTANCE):
        return f"{args[0]}.clamp({args[1]}, {args[2]})"
    if isinstance(e, sympy.Abs):
        return f"{args[0]}.abs()" if e.has(_DISTANCE) else f"abs({args[0]})"
    if e.is_Pow:
        return f"{_real(args[0])} ** {args[1]}"
    if type(e) in _REALS:
        text = f"{_REALS[type(e)]}({_real(args[0])})"
        return f"{text}.clamp(-(2**30), 2**30 - 64).long()" if isinstance(e, TO_INTEGER) else text
    raise AttngenError(f"`{to_text(e)}` has no form in torch")


def _real(text: str) -> str:
    return f"torch.as_tensor({text}, dtype=torch.float64)"


def _extreme(e: Any, args: list[str]) -> str:
    """Return the source of a minimum or maximum: tensors are combined two at a time, a tensor and a number by a
    clamp."""
    least = isinstance(e, sympy.Min)
    tensors, numbers = (
        [text for a, text in zip(e.args, args) if a.has(_DISTANCE) == is_tensor] for is_tensor in (True, False)
    )
    if not tensors:
        return f"{'min' if least else 'max'}({', '.join(numbers)})"
    text = reduce(lambda x, y: f"torch.{'minimum' if least else 'maximum'}({x}, {y})", tensors)
    return text + "".join(f".clamp({'max' if least else 'min'}={number})" for number in numbers)
