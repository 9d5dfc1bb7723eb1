"""FLOPs, from the dots in the IR and the symbolic count of tiles that the mask leaves."""

from __future__ import annotations

from collections.abc import Callable

import sympy

from attngen.bounds.tiles import heads, tile_sum
from attngen.ir.expr import Expr, symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Dot, unpadded

TILES = sympy.Symbol("tiles", positive=True)  # tiles visited, of all heads and sequences


def tile_flops(dot: Dot) -> Expr:
    """2 m n k of one product on one tile."""
    return 2 * sympy.Mul(*(symbol(d) for d in (*dot.type.unpadded, unpadded(dot.over))))


def flops(kernel: Kernel, times: Callable[[str], Expr]) -> Expr:
    """FLOPs of a kernel's products, where times(block) says how often a block runs."""
    return sympy.Add(*(tile_flops(op) * times(block.name) for block in kernel.blocks for op in block.ops if isinstance(op, Dot)))


def executed_flops(kernel: Kernel) -> Expr:
    """FLOPs that an emitted kernel executes, in `tiles`."""
    return TILES * flops(kernel, lambda block: sympy.Integer(1))


def useful_flops(module: Module, direction: str) -> Expr:
    """FLOPs of the algorithm, in `tiles`: 4 N^2 d forward; 10 N^2 d backward, where scores are recomputed once.

    Each product counts once, however many kernels recompute it (FlashAttention-2, section 3.1, counts five backward).
    """
    kernels = module.kernels_of(direction)
    products = {op.name: tile_flops(op) for kernel in kernels for op in kernel.dots}
    return TILES * sympy.Add(*products.values())


def total_tiles(kernel: Kernel) -> Expr:
    """Tiles of all heads and sequences: as many times the sum over one head."""
    return heads(kernel) * tile_sum(kernel)
