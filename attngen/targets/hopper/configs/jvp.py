"""Decide if the kernel of forward mode is warp-specialized, and under which config."""

from __future__ import annotations

from attngen.ir import Config, Module, only, symbol, tile
from attngen.targets.hopper.configs.common import NARROW, infeasible_in_any_family, is_row_vector, ops_per_score
from attngen.targets.hopper.configs.sm90 import DEVICE, JVP, NAME, ROWS

HEAD_DIMS = (64, 128)  # those that were compiled
BLOCK_Q, STAGES = 2 * ROWS, 2  # queries of a program; stages of each pipeline of tiles of keys
# Rows of a tile of keys. A consumer has two tiles of scores, so there are half as many where registers would spill.
BLOCK_KV, SHORT_BLOCK_KV = 128, 64
# Operations per score in tiles of 128 keys: those of a dilated mask, the most that were compiled.
MOST_OPS_OF_LONG_TILES = 18
CAUSAL_OPS = 8  # per score: those of a causal mask
MOST_OPS = 22  # per score: those of a soft cap under a window, the most that were compiled


def infeasible(module: Module) -> str:
    """Return why the kernel cannot be warp-specialized, as the end of a sentence; empty text if it can."""
    kernel = module.kernel(JVP)
    qk, v = module.head_dim_qk, module.head_dim_v
    if qk != v or v not in HEAD_DIMS:
        return f"its head_dims are {qk} and {v}; expected {' or '.join(map(str, HEAD_DIMS))}, the same for q, k and v"
    if module.blocks and module.blocks.size < BLOCK_Q:
        return f"its mask lists blocks of {module.blocks.size} queries, and a program has {BLOCK_Q}"
    if any(arg.name == f"t{i.name.upper()}" for arg in kernel.args for i in module.inputs):
        return "its learned inputs have tangents, which only the portable kernel computes"
    return infeasible_in_any_family(module, kernel)


def not_preferred(module: Module) -> str:
    """Return why the kernel stays portable, as the end of a sentence; empty text if it is warp-specialized."""
    if why := infeasible(module):
        return why
    if module.dropout:
        return "with dropout registers may spill"
    kernel = module.kernel(JVP)
    if kernel.traits.reads_pairs and module.head_dim_v > NARROW:
        return f"with a head_dim of more than {NARROW} and a number for each score registers may spill"
    if (ops := ops_per_score(kernel)) > MOST_OPS:
        return (
            f"its mask and modifiers take {ops} operations for each score; with more than {MOST_OPS}, registers "
            "may spill"
        )
    return ""


def config(
    module: Module, block_q: int | None = None, block_kv: int | None = None, stages: int | None = None
) -> Config:
    """Return the kernel's config, for any number of rows."""
    keys = SHORT_BLOCK_KV if module.head_dim_v > NARROW or _is_crowded(module) else BLOCK_KV
    return Config(DEVICE, 2, None, block_q or BLOCK_Q, block_kv or keys, 4, stages or STAGES, tma=True, backend=NAME)


def can_be_persistent(module: Module) -> bool:
    """True if programs fetch one tile after another.

    A causal kernel with a head_dim of 128 is 4% faster at 4k if each tile has a program of its own, and as fast at 1k
    (measured). Such a kernel is still persistent if its mask takes more operations than a causal one: with a program
    per tile it would spill, because the tile's coordinates are live during all products.
    """
    kernel = module.kernel(JVP)
    return module.head_dim_v <= NARROW or not kernel.grid[0].reversed or ops_per_score(kernel) > CAUSAL_OPS


def _is_crowded(module: Module) -> bool:
    """True if registers may spill next to two tiles of 128 columns.

    They may with a score modifier, a number per score, a number per key that cannot be copied with its tile, or a mask
    that takes many operations.
    """
    kernel = module.kernel(JVP)
    of_keys = (op for op in only(kernel.ops(), tile.Gather, tile.Load) if op.type.dims == ("BLOCK_KV",))
    heavy_mask = ops_per_score(kernel) > MOST_OPS_OF_LONG_TILES
    much = module.meaning.score != symbol("s") or kernel.traits.reads_pairs or heavy_mask
    return much or not all(is_row_vector(kernel, op) for op in of_keys)
