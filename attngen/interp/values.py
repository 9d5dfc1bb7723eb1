"""Values of ops on NumPy: element types, broadcasting by dimension name, and the evaluation of expressions.

An expression is computed in the types of its operands, with integers of any size, and its value is rounded to the type
of the op. Where an op says `partial`, it means loops of class partial, and loops that are not classified yet.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from attngen.errors import AttngenError
from attngen.interp.numeric import compiled
from attngen.ir import AXIS_DIM, GROUPED, Expr, Kernel, Module, Type, Uses, symbol_names
from attngen.ir.behaviour import Handlers
from attngen.ir.dtypes import ELEMENTS, QUANTISED
from attngen.ir.names import ROW_AXES

Values = dict[str, Any]  # by name: values of ops, numbers of the call, sizes, positions
Program = Generator[None, None, Values]
Window = tuple[Any, ...]  # an index of an array: numbers and slices

_FLOATS = ("T", "f32", *ELEMENTS)
# NumPy's types for the IR's. Integers have 64 bits, so that none wraps.
SINGLE = {
    **dict.fromkeys(_FLOATS, np.float32),
    **dict.fromkeys(QUANTISED.values(), np.int16),
    "i32": np.int64,
    "i64": np.int64,
    "b1": np.bool_,
}
DOUBLE = {**SINGLE, **dict.fromkeys(_FLOATS, np.float64)}
CONSTANTS = {"LOG2E": 1 / math.log(2), "LN2": math.log(2)}


class OutsideTensor(AttngenError):
    """An access that no check keeps inside its tensor. Names the kernel, the op, the index and the tensor's length
    there."""


def spread(x: Any, dims: tuple[str, ...], over: tuple[str, ...]) -> Any:
    """A value of dimensions `dims`, transposed and expanded so that it broadcasts to the dimensions `over`."""
    if dims == over or not dims:
        return x
    x = x.transpose([dims.index(d) for d in over if d in dims])
    return x[tuple(slice(None) if d in dims else None for d in over)]


def applies(when: str, cls: str) -> bool:
    """True if an op whose field says `always` or `partial` applies in the body of a loop of class `cls`."""
    return when == "always" or (when == "partial" and cls in ("partial", "unknown"))


class Evaluator(Handlers):
    """Evaluates the expressions of one kernel, and shapes values as their types say."""

    def __init__(self, module: Module, kernel: Kernel, dtypes: Mapping[str, Any]) -> None:
        self.module, self.kernel, self.dtypes = module, kernel, dtypes

    @cached_property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """The dimensions of every value, keyed by its reference, including results of loops and positions."""
        found = {f"{op.name}.{f}".rstrip("."): t.dims for op in self.kernel.ops() for f, t in op.results().items()}
        found |= {f"{axis}_idx": (AXIS_DIM[axis],) for axis in ROW_AXES}
        return found | {
            f"{loop.name}.{f}": self.kernel.type_of(start).dims for loop in self.kernel.loops for f, start in loop.carry
        }

    def expression(self, e: Expr, values: Values, dims: tuple[str, ...] = (), uses: Uses = ()) -> Any:
        """The value of an expression, with the values of its symbols broadcast to `dims` by dimension name."""
        renamed, named = dict(uses), {}
        if e.is_Symbol:  # most expressions are: an index, a size
            ref = renamed.get(e.name, e.name)
            return spread(values[ref], self.dims.get(ref, ()), dims)
        for name in symbol_names(e):
            ref = renamed.get(name, name)
            x, of = values[ref], self.dims.get(ref, ())
            if of and dims and GROUPED.get(dims[-1]) == of[-1]:
                x, of = np.repeat(x, values[dims[-1]] // x.shape[-1], axis=-1), (*of[:-1], dims[-1])
            named[name] = spread(x, of, dims)
        return compiled(e)(named)

    def shape(self, dims: tuple[str, ...], values: Values) -> tuple[int, ...]:
        return tuple(int(d) if d.isdigit() else values[d] for d in dims)

    def tile(self, x: Any, type_: Type, values: Values) -> Any:
        """A value with the element type and shape of its type. Numbers are a Python int, or of the element type."""
        dtype = self.dtypes[type_.dtype]
        if not type_.dims:
            return dtype(x) if type_.dtype in ("T", "f32") else int(x)
        x, shape = np.asarray(x, dtype), self.shape(type_.dims, values)
        return x if x.shape == shape else np.broadcast_to(x, shape)

    def tiles_in_a_block(self, axis: str, values: Values) -> int:
        assert self.module.blocks is not None
        return self.module.blocks.size // int(values[AXIS_DIM[axis]])
