"""Bytes between HBM and the chip, from the loads and stores in the IR; and those of standard attention."""

from __future__ import annotations

import sympy

from attngen.analysis.flops import TILES
from attngen.analysis.sram import ELEM, tile_bytes
from attngen.ir.expr import Expr, cdiv, symbol
from attngen.ir.graph import Kernel
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Load, Store

NQ, NK, D_QK, D_V = map(symbol, ("Nq", "Nk", "D_QK", "D_V"))


def hbm_bytes(kernel: Kernel) -> Expr:
    """Bytes moved if nothing is found in a cache: tiles loaded once per program, and once per tile visited in the loop.

    In `tiles` (see flops.TILES), B, Hq, group and the sizes. An upper bound: the L2 serves part of what programs share.
    """
    own = kernel.own_axis
    shared = "group" in {b.name for b in kernel.blocks}
    programs = symbol("B") * symbol("Hq") / (symbol("group") if shared else 1)
    programs *= cdiv(symbol(AXIS_EXTENT[own]), symbol(AXIS_DIM[own]))
    total: Expr = sympy.Integer(0)
    for block in kernel.blocks:
        for op in block.ops:
            if isinstance(op, Load) and op.type.dims:
                total += tile_bytes(op.type) * (programs if block.name == "entry" else TILES)
            elif isinstance(op, Store):
                total += tile_bytes(kernel.type_of(op.value)) * programs
    return total


def standard_bytes(direction: str) -> Expr:
    """Bytes of attention as separate operations, the score matrix in HBM (FlashAttention, section 2.2), per query head.

    Forward: S = QK^T, P = softmax(S), O = PV. Backward: dV = P^T dO, dP = dO V^T, dS from P and dP, dQ = dS K, dK = dS^T Q.
    """
    square = NQ * NK * ELEM
    q, k, v, o = (n * d * ELEM for n, d in ((NQ, D_QK), (NK, D_QK), (NK, D_V), (NQ, D_V)))
    if direction == "forward":
        return (q + k + square) + 2 * square + (square + v + o)
    products = (square + o + v) + (o + v + square) + (square + k + q) + (square + q + k)
    return products + 3 * square
