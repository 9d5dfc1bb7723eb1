"""Masks of arbitrary data: the blocks of scores that a call visits are found by a kernel that evaluates the mask in each."""

from __future__ import annotations

import sympy

from attngen.build.common import KernelBuilder, in_bounds
from attngen.build.semantics import LISTED
from attngen.ir.expr import cdiv, floordiv, symbol
from attngen.ir.graph import Kernel
from attngen.ir.ops import AXIS_DIM, Access, Base, Init, Reduce, Type, Yield
from attngen.spec import Spec


def build_blocks(spec: Spec) -> Kernel:
    """The greatest and the least score of each block, if every score is 0 before the mask: -inf and -inf where all are hidden, 0 and
    -inf where some are, 0 and 0 where none is."""
    b = KernelBuilder(spec, "blocks")
    b.tensors()
    b.sizes()
    b.reads()
    row, column = (floordiv(symbol(f"{axis}_start"), sympy.Integer(LISTED)) for axis in ("q", "kv"))
    for tensor in ("MOST", "LEAST"):
        b.add(Base(f"{tensor}_row", Access(tensor, (symbol("b"), symbol("h"), row)), Type("ptr")))
    b.loop("keys", "kv", cdiv(symbol("Nk"), symbol("BLOCK_KV")), "step")
    scores = (AXIS_DIM["q"], AXIS_DIM["kv"])
    b.add(Init("score", sympy.Integer(0), Type("f32", scores)), "step")
    b.mask("masked", "score", sympy.And(b.where, in_bounds("kv")), "step")
    for name, op in (("most", "max"), ("least", "min")):
        b.add(Reduce(f"{name}_rows", "masked", op, scores[1], Type("f32", scores[:1])), "step")
        b.add(Reduce(name, f"{name}_rows", op, scores[0], Type("f32")), "step")
        b.store(f"{name.upper()}_row", (column,), name, "step")
    b.add(Yield("yield_step", ()), "step")
    return b.kernel()
