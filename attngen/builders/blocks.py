"""The kernel `blocks` for masks of arbitrary data: evaluate the mask in every block of scores, to find the blocks that
a call visits."""

from __future__ import annotations

import sympy

from attngen.builders.common import KernelBuilder, in_bounds
from attngen.builders.signature import Signature
from attngen.heuristics import LISTED, STRIP
from attngen.ir import AXIS_DIM, Access, Kernel, Type, cdiv, floordiv, select, symbol, tile
from attngen.spec import Spec

BLOCKS = Signature(
    "blocks", "q", (), ("COUNT",), about="Before the others: the number of visible pairs in each strip of a block."
)


def build_blocks(spec: Spec) -> Kernel:
    """The number of visible pairs in each strip of a block: zero scores are masked to -inf, and those above -inf are
    counted."""
    b = KernelBuilder(spec, BLOCKS)
    b.declare_tensors()
    b.declare_sizes()
    b.load_inputs()
    scores = (AXIS_DIM["q"], AXIS_DIM["kv"])
    row, strip = (floordiv(symbol(b.row(axis)), sympy.Integer(n)) for axis, n in (("q", LISTED), ("kv", STRIP)))
    b.add(tile.Base("COUNT_row", Access("COUNT", (symbol("b"), symbol("h"), row)), Type("ptr")))
    b.loop("keys", "kv", cdiv(b.extent("kv"), symbol("BLOCK_KV")), "step")
    b.add(tile.Init("score", sympy.Integer(0), Type("f32", scores)), "step")
    b.mask("masked", "score", sympy.And(b.where, in_bounds("q"), in_bounds("kv")), "step")
    b.map("visible", select(symbol("masked") > -sympy.oo, sympy.Float(1.0), sympy.Float(0.0)), "step", masked="masked")
    b.reduce_sum("count_rows", "visible", scores[1], "step")
    b.reduce_sum("count", "count_rows", scores[0], "step")
    b.store("COUNT_row", (strip,), "count", "step")
    b.add(tile.Yield("_yield_step", ()), "step")
    return b.kernel()
