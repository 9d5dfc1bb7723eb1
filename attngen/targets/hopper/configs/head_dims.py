"""Layout of tiles whose head_dim is not a power of two, although buffers in shared memory and tiles in registers need
widths that are.

Tiles of Q and K are stored in pieces of equal width, and a product over head_dim is the sum of the pieces' products.
192 columns are three pieces of 64; 80 columns are three pieces of 32, the last with 16 columns of zeros. Tiles of V and
the accumulator of O are padded to the next power of two; the padding is not stored.
"""

from __future__ import annotations

from attngen.ir import SIDES, Module, pipe, unpadded
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.tiles.sizes import tile_width

PIECES = (64, 32)  # columns of a piece: a row of TMA's widest swizzle, and half of it


def is_power_of_two(width: int) -> bool:
    return width & (width - 1) == 0


def piece_of(width: int) -> int:
    """Width of the pieces of a Q or K tile with `width` columns: the widest that needs the fewest columns of zeros; 0
    if the tile is stored whole."""
    return 0 if is_power_of_two(width) else min(PIECES, key=lambda columns: -(-width // columns) * columns)


def smem_widths(module: Module) -> tuple[int, int]:
    """Columns in shared memory of a tile of Q or K, and of a tile of V."""
    qk, piece = module.head_dim_qk, piece_of(module.head_dim_qk)
    return (-(-qk // piece) * piece if piece else qk), tile_width(module.head_dim_v)


def width_of(module: Module, pipeline: pipe.Pipeline) -> int:
    """Columns of a pipeline's tiles in shared memory, including those that pad the last piece."""
    return pieces(module, pipeline) * pipeline.columns if pipeline.columns else tile_width(_width(module, pipeline))


def pieces(module: Module, pipeline: pipe.Pipeline) -> int:
    """Number of pieces in each tile of a pipeline."""
    return -(-_width(module, pipeline) // pipeline.columns) if pipeline.columns else 1


def part_of(pipeline: pipe.Pipeline) -> str:
    """Columns of a pipeline's buffers, where these do not hold whole tiles; else empty text."""
    dim = pipeline.type.dims[-1]
    return str(pipeline.columns) if pipeline.columns else dim * dim.isdigit()


def _width(module: Module, pipeline: pipe.Pipeline) -> int:
    """Columns of a pipeline's tiles: a head_dim, or a literal number; for scores, the keys of one instance."""
    dim = unpadded(pipeline.type.dims[-1])
    known = {**module.widths, "BLOCK_KV": ROWS, **dict.fromkeys(SIDES.values(), module.head_dim_v // 2)}
    return int(dim) if dim.isdigit() else known[dim]
