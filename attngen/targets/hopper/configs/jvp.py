"""Whether this backend divides forward mode, and the tiles of its programs."""

from __future__ import annotations

from attngen.ir.expr import symbol
from attngen.ir.graph import Config, Module
from attngen.ir.ops import Gather, Load
from attngen.targets.hopper.configs.common import NARROW, is_of_keys, refused, work
from attngen.targets.hopper.configs.sm90 import DEVICE, NAME, ROWS, TANGENTS

WIDTHS = (64, 128)  # columns of a head that were compiled
OWN, STAGES = 2 * ROWS, 2  # queries of a program; slots of each ring of tiles of keys
KEYS, FEW_KEYS = (
    128,
    64,
)  # rows of a tile of keys; where registers would spill, as a consumer has two tiles of scores, half as many
MOST_OF_LONG = (
    18  # operations for each score in tiles of 128 keys: those of a dilated mask, the most that were compiled
)
ONE_COMPARISON = 8  # operations for each score under a causal mask
MOST_WORK = 22  # operations for each score: those of a soft cap under a window, the most that were compiled


def infeasible(module: Module) -> str:
    """Why the kernel cannot be divided, as the end of a sentence; empty text if it can."""
    kernel = module.kernel(TANGENTS)
    qk, v = module.head_dim_qk, module.head_dim_v
    if qk != v or v not in WIDTHS:
        return (
            f"its heads have {qk} and {v} columns; expected {' or '.join(map(str, WIDTHS))}, as many of q and k as of v"
        )
    if module.blocks and module.blocks.size < OWN:
        return f"its mask lists blocks of {module.blocks.size} queries, and a program has {OWN}"
    if any(arg.name == f"t{i.name.upper()}" for arg in kernel.args for i in module.inputs):
        return "inputs have tangents, too"
    return refused(module, kernel)


def not_preferred(module: Module) -> str:
    """Why the kernel stays portable, as the end of a sentence; empty text if it is divided."""
    if why := infeasible(module):
        return why
    if module.dropout:
        return "with dropout registers may spill"
    kernel = module.kernel(TANGENTS)
    if kernel.reads_pairs and module.head_dim_v > NARROW:
        return f"with heads of more than {NARROW} columns and a number for each score registers may spill"
    if (ops := work(kernel)) > MOST_WORK:
        return f"its mask and modifiers take {ops} operations for each score, and of more than {MOST_WORK} registers may spill"
    return ""


def config(
    module: Module, block_q: int | None = None, block_kv: int | None = None, stages: int | None = None
) -> Config:
    """The row of the kernel's schedule, for any number of rows."""
    keys = FEW_KEYS if module.head_dim_v > NARROW or _is_crowded(module) else KEYS
    return Config(DEVICE, 2, None, block_q or OWN, block_kv or keys, 4, stages or STAGES, tma=True, backend=NAME)


def may_stay(module: Module) -> bool:
    """Whether programs take tile after tile.

    A causal kernel with wide heads is 4% faster at 4k, and as fast at 1k, if each tile has a program of its own
    (measured). Masks of more operations would spill so: where the tile is, lives through all products then.
    """
    kernel = module.kernel(TANGENTS)
    return module.head_dim_v <= NARROW or not kernel.grid[0].reversed or work(kernel) > ONE_COMPARISON


def _is_crowded(module: Module) -> bool:
    """Whether registers may spill beside two tiles of 128 columns.

    So it is with a modifier of scores, with a number for each score or for each key that cannot lie beside its tile,
    and where a mask takes many operations.
    """
    kernel = module.kernel(TANGENTS)
    of_keys = (op for op in kernel.ops() if isinstance(op, (Gather, Load)) and op.type.dims == ("BLOCK_KV",))
    much = module.meaning.score != symbol("s") or kernel.reads_pairs or work(kernel) > MOST_OF_LONG
    return much or not all(is_of_keys(kernel, op) for op in of_keys)
