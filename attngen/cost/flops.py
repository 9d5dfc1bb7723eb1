"""FLOPs as formulas, from the dots in the IR and the symbolic number of tiles that the mask leaves."""

from __future__ import annotations

from collections.abc import Callable

import sympy

from attngen.ir import WHOLE, Expr, Kernel, Module, only, symbol, tile, unpadded
from attngen.tiles.tiles import heads, repeats, tile_sum

TILES = sympy.Symbol("tiles", positive=True)  # tiles visited, over all heads and sequences


def tile_flops(dot: tile.Dot) -> Expr:
    """FLOPs of one product on one tile: 2 m n k."""
    return 2 * sympy.Mul(*(symbol(d) for d in (*dot.type.unpadded, unpadded(dot.over))))


def flops(kernel: Kernel, times: Callable[[str], Expr]) -> Expr:
    """FLOPs of a kernel's products. times(block) is the number of times that a block runs."""
    return sympy.Add(
        *(tile_flops(op) * times(block.name) for block in kernel.blocks for op in only(block.ops, tile.Dot))
    )


def executed_flops(kernel: Kernel) -> Expr:
    """FLOPs that a generated kernel executes, as a formula in `tiles`."""
    return TILES * repeats(kernel) * flops(kernel, lambda block: sympy.Integer(1))


def useful_flops(module: Module, direction: str) -> Expr:
    """FLOPs of the algorithm, as a formula in `tiles`: 4 N^2 d in the forward, 10 N^2 d in the backward, which
    recomputes the scores once.

    Each product counts once, even if several kernels compute it. FlashAttention-2, section 3.1, counts five products in
    the backward.
    """
    kernels = module.kernels_of(direction)
    products = {op.name: tile_flops(op) for kernel in kernels for op in kernel.traits.dots}
    return TILES * sympy.Add(*products.values()).subs({symbol(own): symbol(whole) for own, whole in WHOLE.items()})


def total_tiles(kernel: Kernel) -> Expr:
    """Tiles visited over all heads and sequences: the number of heads times the sum for one head."""
    return heads(kernel) * tile_sum(kernel)
