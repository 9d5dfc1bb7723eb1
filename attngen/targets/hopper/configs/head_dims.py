"""Heads whose width is no power of two: buffers in shared memory, and tiles in registers, have powers of two of
columns.

A tile of Q or K lies in pieces of equal width. A product over its columns adds up those of the pieces: 192 columns are
three pieces of 64, and 80 are three of 32, the last with 16 columns of zeros. A tile of V, and what is summed with it,
has the next power of two, and outputs leave without the columns that a head does not have.
"""

from __future__ import annotations

from attngen.ir.graph import Module
from attngen.ir.ops import SIDES, unpadded
from attngen.ir.pipe import Pipeline
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.tiles.sizes import tile_width

PIECES = (64, 32)  # columns of a piece: those of a row of the copy engine's widest swizzle, and half of them


def is_power_of_two(width: int) -> bool:
    return width & (width - 1) == 0


def piece_of(width: int) -> int:
    """The columns of a piece of a tile of Q or K: the most that leave the fewest columns of zeros; 0 where the tile
    is whole."""
    return 0 if is_power_of_two(width) else min(PIECES, key=lambda columns: -(-width // columns) * columns)


def laid_out(module: Module) -> tuple[int, int]:
    """The columns of a tile of Q or K, and of V, in shared memory."""
    qk, piece = module.head_dim_qk, piece_of(module.head_dim_qk)
    return (-(-qk // piece) * piece if piece else qk), tile_width(module.head_dim_v)


def width_of(module: Module, pipeline: Pipeline) -> int:
    """The columns of a ring's tiles, as the ring says that they lie there."""
    return pieces(module, pipeline) * pipeline.columns if pipeline.columns else tile_width(_width(module, pipeline))


def pieces(module: Module, pipeline: Pipeline) -> int:
    """The number of pieces of a ring's tiles."""
    return -(-_width(module, pipeline) // pipeline.columns) if pipeline.columns else 1


def part_of(pipeline: Pipeline) -> str:
    """The columns of a ring's buffers, where these have no whole tiles; else empty text."""
    dim = pipeline.type.dims[-1]
    return str(pipeline.columns) if pipeline.columns else dim * dim.isdigit()


def _width(module: Module, pipeline: Pipeline) -> int:
    """The columns of a ring's tiles: those of a head, or a number of them; of scores, the keys of a copy."""
    dim = unpadded(pipeline.type.dims[-1])
    known = {**module.widths, "BLOCK_KV": ROWS, **dict.fromkeys(SIDES.values(), module.head_dim_v // 2)}
    return int(dim) if dim.isdigit() else known[dim]
