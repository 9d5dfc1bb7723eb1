"""Elements and bytes between HBM and the chip, from the loads and stores in the IR; and those of standard attention."""

from __future__ import annotations

from collections.abc import Callable

import sympy

from attngen.analysis.algorithms import kernels
from attngen.analysis.flops import TILES
from attngen.analysis.sram import tile_bytes
from attngen.analysis.tiles import own_tiles
from attngen.ir.expr import Expr, symbol
from attngen.ir.graph import Kernel
from attngen.ir.ops import Load, Scatter, Store, Type


def traffic(kernel: Kernel, size: Callable[[Type], Expr], times: Callable[[str], Expr]) -> Expr:
    """What the loads and stores of tiles move: size(type) of each, where times(block) says how often a block runs."""
    total: Expr = sympy.Integer(0)
    for block in kernel.blocks:
        for op in block.ops:
            if isinstance(op, Load) and op.type.dims:
                total += size(op.type) * times(block.name)
            elif isinstance(op, Scatter):  # read and written
                total += 2 * size(kernel.type_of(op.value)) * times(block.name)
            elif isinstance(op, Store):
                stored = kernel.type_of(op.value)
                sums = Type("f32", ("BLOCK_KV",))  # of two turns of the diagonals
                total += (2 * size(sums) if op.by else size(stored)) * times(block.name)
    return total


def hbm_bytes(kernel: Kernel) -> Expr:
    """Bytes that an emitted kernel moves if nothing is found in a cache: tiles loaded once per tile that a program owns, and once per tile visited.

    In `tiles` (see flops.TILES), B, Hq, group and the sizes. An upper bound: the L2 serves part of what programs share.
    """
    shared = "group" in {b.name for b in kernel.blocks}
    owned = symbol("B") * symbol("Hq") / (symbol("group") if shared else 1) * own_tiles(kernel)
    walked = {loop.body for loop in kernel.loops if loop.var == kernel.own_axis}
    return traffic(kernel, tile_bytes, lambda block: owned if block in ("entry", *walked) else TILES)


def compulsory_bytes(kernel: Kernel) -> Expr:
    """Bytes of each tensor that a kernel reads or writes, moved once; tensors that it does both to, twice."""
    times = {"scalar": 0, "in": 1, "out": 1, "inout": 2}
    return sympy.Add(*(times[arg.role] * tile_bytes(arg.type) for arg in kernel.args))


def standard_bytes(direction: str) -> Expr:
    """Bytes of attention as separate operations, the score matrix in HBM (FlashAttention, section 2.2), per query head.

    Each operation moves its operands and its result once, as if it had all the room on chip that this takes.
    """
    one_head = {symbol(name): 1 for name in ("B", "Hq", "Hkv")}
    return sympy.Add(*(compulsory_bytes(kernel) for kernel in kernels("standard", direction))).subs(one_head)
