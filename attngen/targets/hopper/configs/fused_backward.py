"""Decide if the fused backward is warp-specialized, and under which config."""

from __future__ import annotations

from attngen.ir import AXIS_DIM, Config, Kernel, Module, only, symbol, tile
from attngen.targets.hopper.configs.common import MEDIUM, NARROW, infeasible_in_any_family, ops_per_score
from attngen.targets.hopper.configs.head_dims import is_power_of_two
from attngen.targets.hopper.configs.sm90 import DEVICE, FUSED, NAME, ROWS
from attngen.tiles.order import differs, visited_range

WIDE = (192, 128)  # head_dim of Q and K, and of V, in multi-head latent attention: Q and K are stored in three pieces
INSTANCES = 2  # of the consumer: each has two accumulator tiles, which take half of its registers
QUERIES = {NARROW: 128, MEDIUM: 64}  # head_dim, at most -> BLOCK_Q
STAGES = 2  # of the pipelines of Q and dO
# Numbers per query in addition to `lse2` and `delta` for which there is shared memory next to tiles of 128 columns.
MOST_NUMBERS = 2

# Limits on operations per score; beyond them registers spill, or may spill.
MOST_OPS = 23  # those of a soft cap under a window, the most that were compiled
MOST_OPS_IF_WIDE = 14  # head_dims of 192 and 128: those of a window; chunks, which have 15, spill
MOST_OPS_IF_SIGNED = 17  # dropout and head_dim 128; documents, which have 19, spill
MOST_OPS_WITH_EARLY_DP = 18  # wide heads whose dP is multiplied at the same time; a soft cap, which has 19, spills
MOST_OPS_OF_LONG_TILES = 15  # tiles of 128 queries; a dilated mask, which has 19, spills


def infeasible(module: Module) -> str:
    """Return why the fused backward cannot be warp-specialized, as the end of a sentence; empty text if it can."""
    kernel = module.kernel(FUSED)
    if module.blocks and module.blocks.size < INSTANCES * ROWS:
        return f"its mask lists blocks of {module.blocks.size} keys, and a program has {INSTANCES * ROWS}"
    qk, v = module.head_dim_qk, module.head_dim_v
    if (qk, v) != WIDE and (qk != v or not is_power_of_two(v)):
        expected = f"one power of two for q, k and v, or {WIDE[0]} and {WIDE[1]}"
        return f"its head_dims are {qk} and {v}; expected {expected}"
    if why := _not_loadable_by_tma(kernel):
        return why
    if (numbers := _numbers_per_query(kernel)) > MOST_NUMBERS:
        return f"it reads {numbers} numbers for each query, and there is room for {MOST_NUMBERS}"
    return infeasible_in_any_family(module, kernel)


def _not_loadable_by_tma(kernel: Kernel) -> str:
    """Return why TMA cannot load the numbers that are read per score; empty text if it can, or if there are none."""
    if any(only(kernel.traits.of_pairs, tile.Gather)):
        return "a number is looked up for each score"
    if any(op.type.dtype != "T" or len(op.src.index) != 4 for op in kernel.traits.of_pairs):
        return "what is read for each score is no tensor [B, Hq, Nq, Nk] of the element type"
    return ""


def not_preferred(module: Module) -> str:
    """Return why the module has no fused backward, as the end of a sentence; empty text if its fused backward is
    warp-specialized.

    A fused backward that is not warp-specialized is dropped.
    """
    if why := infeasible(module):
        return why
    kernel = module.kernel(FUSED)
    if is_wide(module) and (why := _spills_if_wide(module, kernel)):
        return f"with head_dims of {WIDE[0]} and {WIDE[1]} and {why} registers spill"
    sloped = {"dscore", "p_steep"} & set(kernel.graph)  # a modifier's slope is live together with the weights
    if kernel.traits.reads_pairs and sloped and module.head_dim_v > NARROW:
        return (
            f"with a head_dim of more than {NARROW}, a number for each score and a modifier that bends scores "
            "registers spill"
        )
    signed = is_signed(module, kernel)
    if signed and module.meaning.score != symbol("s"):
        return f"with dropout, a head_dim of more than {NARROW} and a modifier of scores registers spill"
    most = MOST_OPS_IF_WIDE if is_wide(module) else MOST_OPS_IF_SIGNED if signed else MOST_OPS
    if (ops := ops_per_score(kernel)) > most:
        return (
            f"its mask and modifiers take {ops} operations for each score; with more than {most}, registers may spill"
        )
    return ""


def _spills_if_wide(module: Module, kernel: Kernel) -> str:
    """Return the feature that leaves too few registers to the accumulators of wide heads, as a noun; empty text if none
    does."""
    if kernel.traits.has_dropout:
        return "dropout"
    if module.meaning.score != symbol("s"):
        return "a modifier of scores"
    if module.blocks:
        return "lists of blocks"
    visited = visited_range(kernel)
    if visited and not differs(kernel, visited[0]):
        return "loops over all queries"
    of_keys = any(op.type.dims == (AXIS_DIM[kernel.program_axis],) for op in only(kernel.ops(), tile.Gather, tile.Load))
    return "a number for each key" if of_keys else ""


def _numbers_per_query(kernel: Kernel) -> int:
    """Count the numbers that the kernel loads per query in addition to `lse2` and `delta`. They are kept in shared
    memory, next to tiles of queries."""
    dims = (AXIS_DIM[kernel.loop_axis],)
    return sum(
        isinstance(op, tile.Load) and op.type.dims == dims and op.name not in ("lse2", "delta") for op in kernel.ops()
    )


def config(
    module: Module, block_q: int | None = None, block_kv: int | None = None, stages: int | None = None
) -> Config:
    """Return the kernel's config, for any number of keys."""
    kernel = module.kernel(FUSED)
    many_ops = ops_per_score(kernel) > MOST_OPS_OF_LONG_TILES
    crowded = module.dropout or many_ops or _numbers_per_query(kernel) > 0 or kernel.traits.reads_pairs
    queries = ROWS if crowded else next(rows for columns, rows in QUERIES.items() if module.head_dim_v <= columns)
    return Config(
        DEVICE, 2, None, block_q or queries, block_kv or INSTANCES * ROWS, 4, stages or STAGES, tma=True, backend=NAME
    )


def issues_dp_late(module: Module) -> bool:
    """True if dP is multiplied only after everything that depends on S alone, because registers do not hold both at
    once."""
    kernel = module.kernel(FUSED)
    sloped = "p_steep" in kernel.graph  # dS needs weights times the slope of a modifier, in addition to the weights
    wider = module.head_dim_v > NARROW
    return is_wide(module) or (wider and (sloped or ops_per_score(kernel) > MOST_OPS_WITH_EARLY_DP))


def is_wide(module: Module) -> bool:
    """True if the accumulators of dK and dV take more than half of a consumer's registers, and tiles most of the shared
    memory."""
    return (module.head_dim_qk, module.head_dim_v) == WIDE


def can_be_persistent(module: Module, kernel: Kernel) -> bool:
    """True if programs fetch one tile after another. They do if they process one query head (docs/perf-log.md, section
    31), except with wide heads, which spill."""
    return not (is_wide(module) or kernel.traits.takes_heads)


def is_signed(module: Module, kernel: Kernel) -> bool:
    """True if the sign of a weight stores whether dropout keeps it. Registers do not hold weights and a separate mask,
    nor weights and dropout bits."""
    return kernel.name == FUSED and kernel.traits.has_dropout and module.head_dim_v > NARROW
