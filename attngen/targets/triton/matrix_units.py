"""The matrix instruction that products run on, and the tiles that change layout for it."""

from __future__ import annotations

from functools import cache
from typing import TypeGuard

from attngen.devices import CLASSES
from attngen.ir import Config, Kernel, Module, Op, only, tile
from attngen.tiles.sizes import mode, sizes

MFMA_ROWS = 32  # rows of the largest matrix instruction of gfx942
GROUP_WARPS = 4  # warps that issue one of the largest matrix instructions of sm90 and sm100
SCORES = {"BLOCK_Q", "BLOCK_KV"}  # dimensions of a tile of scores


def in_tf32(module: Module, config: Config) -> bool:
    return CLASSES[config.device].backend == "cuda" and mode(module, config.elem_bytes) == "tf32"


def on_matrix_units(module: Module, kernel: Kernel, config: Config) -> bool:
    """True if products run on the device's own matrix instruction: they have enough rows, and are not in full fp32."""
    if not kernel.traits.dots:
        return False
    return (
        score_tile(module, kernel, config)[0] >= CLASSES[config.device].matrix_rows
        and mode(module, config.elem_bytes) != "ieee"
    )


def from_shared(module: Module, kernel: Kernel, config: Config) -> bool:
    """True if products run on a matrix instruction that reads its operands from shared memory."""
    return CLASSES[config.device].reads_shared and on_matrix_units(module, kernel, config)


def by_warp_groups(module: Module, kernel: Kernel, config: Config) -> bool:
    """True if products run on matrix instructions of four warps, which read operands from shared memory."""
    return config.num_warps >= GROUP_WARPS and from_shared(module, kernel, config)


def score_tile(module: Module, kernel: Kernel, config: Config) -> tuple[int, int]:
    """Rows and columns of the tile of scores as products compute it: queries by keys, or transposed."""
    dims = sizes(module, config)
    rows, columns = next(op.type.dims for op in kernel.traits.dots if set(op.type.dims) == SCORES)
    return dims[rows], dims[columns]


def moved_scores(module: Module, kernel: Kernel, config: Config) -> int:
    """Number of tiles of scores that pass through shared memory at one time on their way from product to product.

    They do because Triton gives the first product's result another warp layout than the second one's; in results that
    are wider than high, warps are next to each other in a row. Tiles that a cast makes move one by one. Of the others,
    all that are ready move at once.
    """
    if not _moves_scores(module, kernel, config):
        return 0
    if config.elem_bytes < 4 or CLASSES[config.device].shares_stationary:
        return 1
    return _ready_scores(kernel)


@cache
def _ready_scores(kernel: Kernel) -> int:
    """Number of tiles of scores that are computed when the first product that reads one starts."""
    (body,) = {loop.body for loop in kernel.loops if loop.cls != "all"}
    ops = kernel.walk(body)
    first = next(i for i, op in enumerate(ops) if isinstance(op, tile.Dot) and _accumulates_scores(kernel, op))
    ready = {op.name for op in ops[:first]}
    sources = [kernel.op(op.a) for op in only(ops, tile.Dot) if _accumulates_scores(kernel, op)]
    made = [
        op.uses[0][1] if isinstance(op, tile.Map) and op.type.dtype == "T" else op.name for op in sources
    ]  # of a cast, its operand
    return sum(name.split(".")[0] in ready for name in made)


def _accumulates_scores(kernel: Kernel, op: tile.Dot) -> bool:
    """True if a product accumulates scores, or a function of them, times another tile."""
    return bool(op.acc) and takes_scores(kernel, op)


def takes_scores(kernel: Kernel, op: tile.Dot) -> bool:
    """True if the left operand of a product is a tile of scores, or a function of one."""
    return set(kernel.type_of(op.a).dims) == SCORES


def random_bytes(kernel: Kernel, config: Config) -> int:
    """Bytes per score through which dropout's random words change layout."""
    return 4 if kernel.traits.has_dropout and CLASSES[config.device].moves_random else 0


def _moves_scores(module: Module, kernel: Kernel, config: Config) -> bool:
    device, dims = CLASSES[config.device], sizes(module, config)
    summed = [op for op in kernel.traits.dots if _accumulates_scores(kernel, op)]  # the others get the same warp layout
    results = [tuple(dims[d] for d in op.type.unpadded) for op in summed]
    if not results or from_shared(module, kernel, config):
        return False
    if device.shares_stationary:  # instructions of 32 rows leave scores where the next product reads them
        own, other = score_tile(module, kernel, config)
        return own < MFMA_ROWS * config.num_warps and not own == MFMA_ROWS <= other
    return not on_matrix_units(module, kernel, config) or any(rows < columns for rows, columns in results)


def in_sram(op: Op) -> TypeGuard[tile.Load]:
    return isinstance(op, tile.Load) and op.type.space == "sram"


def aligned(module: Module) -> bool:
    """True if rows of tensors are known to start at multiples of 16 bytes, which Triton requires to copy ahead."""
    return not (module.head_dim_qk % 16 or module.head_dim_v % 16)
