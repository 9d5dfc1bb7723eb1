"""Whether this backend divides the backward in one pass, and the tiles of its programs."""

from __future__ import annotations

from attngen.ir.expr import symbol
from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.ops import AXIS_DIM, Gather, Load
from attngen.targets.hopper.configs.common import NARROW, STEADY, refused, work
from attngen.targets.hopper.configs.head_dims import is_power_of_two
from attngen.targets.hopper.configs.sm90 import DEVICE, FUSED, NAME, ROWS
from attngen.tiles.order import differs, visited_range

MOST_WORK = 23  # operations for each score: those of a soft cap under a window, the most that were compiled
# operations for each score of heads of 192 and 128 columns: those of a window; of chunks, which have 15, registers
# spill
MOST_OF_WIDE = 14
MOST_SIGNED = (
    17  # operations for each score with dropout in heads of 128 columns: of documents, which have 19, registers spill
)
# operations for each score of wide heads, beside which dP is multiplied: of a soft cap, which has 19, registers spill
MOST_BESIDE = 18
MOST_OF_LONG = 15  # operations for each score in tiles of 128 queries: of a dilated mask, which has 19, registers spill
MOST_NUMBERS = (
    2  # of each query, beside `lse2` and `delta`: beside tiles of 128 columns there is shared memory for these
)
INSTANCES = 2  # of the consumer: each has two tiles of sums, which take half of its registers
QUERIES = {NARROW: 128, STEADY: 64}  # columns of a head, at most -> rows of a tile of queries
STAGES = 2  # of the rings of Q and dO
WIDE = (192, 128)  # columns of q and k, and of v, of multi-head latent attention: Q and K lie in three pieces


def infeasible(module: Module) -> str:
    """Why the kernel in one pass cannot be divided, as the end of a sentence; empty text if it can."""
    kernel = module.kernel(FUSED)
    if module.blocks and module.blocks.size < INSTANCES * ROWS:
        return f"its mask lists blocks of {module.blocks.size} keys, and a program has {INSTANCES * ROWS}"
    qk, v = module.head_dim_qk, module.head_dim_v
    if (qk, v) != WIDE and (qk != v or not is_power_of_two(v)):
        expected = f"as many of q and k as of v, a power of two, or {WIDE[0]} and {WIDE[1]}"
        return f"its heads have {qk} and {v} columns; expected {expected}"
    if why := _beside_scores(kernel):
        return why
    if (numbers := _numbers_of_queries(kernel)) > MOST_NUMBERS:
        return f"it reads {numbers} numbers for each query, and there is room for {MOST_NUMBERS}"
    return refused(module, kernel)


def _beside_scores(kernel: Kernel) -> str:
    """Why what is read for each score cannot come by the copy engine; empty text if it can, or if nothing is."""
    if any(isinstance(op, Gather) for op in kernel.of_pairs):
        return "a number is looked up for each score"
    if any(op.type.dtype != "T" or len(op.src.index) != 4 for op in kernel.of_pairs):
        return "what is read for each score is no tensor [B, Hq, Nq, Nk] of the element type"
    return ""


def not_preferred(module: Module) -> str:
    """Why the kernel in one pass is not divided, and so dropped, as the end of a sentence; empty text if it is
    divided."""
    if why := infeasible(module):
        return why
    kernel = module.kernel(FUSED)
    if is_wide(module) and (why := _spills_if_wide(module, kernel)):
        return f"with heads of {WIDE[0]} and {WIDE[1]} columns and {why} registers spill"
    steep = {"dscore", "p_steep"} & set(kernel.graph)  # a modifier's slope is held beside weights
    if kernel.reads_pairs and steep and module.head_dim_v > NARROW:
        return f"with heads of more than {NARROW} columns, a number for each score and a modifier that bends scores registers spill"
    signed = is_signed(module, kernel)
    if signed and module.meaning.score != symbol("s"):
        return f"with dropout, heads of more than {NARROW} columns and a modifier of scores registers spill"
    most = MOST_OF_WIDE if is_wide(module) else MOST_SIGNED if signed else MOST_WORK
    if (ops := work(kernel)) > most:
        return (
            f"its mask and modifiers take {ops} operations for each score, and of more than {most} registers may spill"
        )
    return ""


def _spills_if_wide(module: Module, kernel: Kernel) -> str:
    """What a kernel has for which sums of wide heads leave no registers; empty text for nothing."""
    if kernel.has_dropout:
        return "dropout"
    if module.meaning.score != symbol("s"):
        return "a modifier of scores"
    if module.blocks:
        return "lists of blocks"
    visited = visited_range(kernel)
    if visited and not differs(kernel, visited[0]):
        return "loops over all queries"
    of_keys = any(
        isinstance(op, (Gather, Load)) and op.type.dims == (AXIS_DIM[kernel.program_axis],) for op in kernel.ops()
    )
    return "a number for each key" if of_keys else ""


def _numbers_of_queries(kernel: Kernel) -> int:
    """How many numbers it loads for each query beside `lse2` and `delta`. They lie in shared memory, beside tiles of
    queries."""
    dims = (AXIS_DIM[kernel.loop_axis],)
    return sum(
        isinstance(op, Load) and op.type.dims == dims and op.name not in ("lse2", "delta") for op in kernel.ops()
    )


def config(
    module: Module, block_q: int | None = None, block_kv: int | None = None, stages: int | None = None
) -> Config:
    """The row of a kernel's schedule, for any number of keys."""
    kernel = module.kernel(FUSED)
    crowded = module.dropout or work(kernel) > MOST_OF_LONG or _numbers_of_queries(kernel) > 0 or kernel.reads_pairs
    queries = ROWS if crowded else next(rows for columns, rows in QUERIES.items() if module.head_dim_v <= columns)
    return Config(
        DEVICE, 2, None, block_q or queries, block_kv or INSTANCES * ROWS, 4, stages or STAGES, tma=True, backend=NAME
    )


def is_late(module: Module) -> bool:
    """Whether dP is multiplied after what S alone gives, for which registers would not do beside it."""
    kernel = module.kernel(FUSED)
    sloped = "p_steep" in kernel.graph  # dS needs weights times the slope of a modifier, beside the weights
    return is_wide(module) or (module.head_dim_v > NARROW and (sloped or work(kernel) > MOST_BESIDE))


def is_wide(module: Module) -> bool:
    """Whether sums of dK and dV take more than half of a consumer's registers, and tiles most of the shared memory."""
    return (module.head_dim_qk, module.head_dim_v) == WIDE


def may_stay(module: Module, kernel: Kernel) -> bool:
    """Whether programs take tile after tile: those of one head (docs/perf-log.md, section 31), but for wide heads,
    which spill."""
    return not (is_wide(module) or kernel.takes_heads)


def is_signed(module: Module, kernel: Kernel) -> bool:
    """Whether the sign of a weight says if dropout keeps it: registers would not do for both, or for weights and
    random words."""
    return kernel.name == FUSED and kernel.has_dropout and module.head_dim_v > NARROW
