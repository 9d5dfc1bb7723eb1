"""Whether this backend divides the decoding of latents, and the tiles of its programs."""

from __future__ import annotations

from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.ops import SIDES, Arg, Dot, Gather, Load, Loop, Map, Mask, Reduce, SoftmaxStep, Yield
from attngen.targets.hopper.configs.common import LITTLE_WORK, is_placed, refused, work
from attngen.targets.hopper.configs.sm90 import DECODE, DEVICE, NAME, ROWS

LATENT, ROPE = (
    512,
    64,
)  # columns of the latent, and those that are rotated: those of DeepSeek's models, which were compiled
KEYS = 64  # rows of a tile of keys: two tiles, in three pieces each, fill shared memory beside the queries
STAGES = 2  # tiles of keys: an even one and an odd one
OTHER = dict(zip(SIDES, reversed(SIDES)))  # half of the columns -> the other half
OF_STEP = (Arg, Dot, Load, Map, Mask, Reduce, SoftmaxStep, Yield)  # what a turn may have beside the number of its page


def is_of_latents(kernel: Kernel) -> bool:
    """Whether two roles share the columns of its outputs (see split_columns.py)."""
    return kernel.stands_for == DECODE


def infeasible(module: Module) -> str:
    """Why the decoding cannot be divided, as the end of a sentence; empty text if it can."""
    kernel, cache = module.kernel(DECODE), module.cache
    if not kernel.rotates or cache is None:
        return "its keys are no latents"
    if (module.head_dim_v, module.rope) != (LATENT, ROPE):
        return (
            f"its latents have {module.head_dim_v} columns and {module.rope} rotated ones; expected {LATENT} and {ROPE}"
        )
    if cache.dtype:
        return "its keys have 8 bits"
    if cache.page and not (cache.page.isdigit() and int(cache.page) % KEYS == 0):
        size = f"pages of {cache.page} rows" if cache.page.isdigit() else "pages whose size a call gives"
        return f"its cache has {size}; expected a multiple of {KEYS}"
    loops = [op for op in kernel.ops() if isinstance(op, Loop)]
    if kernel.kv_split is not None and kernel.kv_split.reads:
        return "its keys are dealt by data of sequences"
    if any(loop.listed for loop in loops):
        return "its mask lists tiles"
    for op in kernel.block(loops[0].body).ops:
        of_pages = isinstance(op, Gather) and op.src.tensor == "PAGE_TABLE"
        if not (of_pages or isinstance(op, OF_STEP)) or (isinstance(op, Load) and op.src.tensor not in ("K", "K_ROPE")):
            return f"its mask or modifiers read what is loaded for keys (%{op.name})"
    return refused(module, kernel)


def not_preferred(module: Module) -> str:
    """Why the decoding stays portable, as the end of a sentence; empty text if it is divided."""
    if why := infeasible(module):
        return why
    if is_placed(module.kernel(DECODE)):
        return "its modifiers are of positions, and registers spill"
    if (ops := work(module.kernel(DECODE))) > LITTLE_WORK:
        return f"its mask and modifiers take {ops} operations for each score, and of more than {LITTLE_WORK} registers may spill"
    return ""


def config(
    module: Module, block_q: int | None = None, block_kv: int | None = None, stages: int | None = None
) -> Config:
    """The row of the kernel's schedule, for any number of rows."""
    return Config(DEVICE, 2, None, ROWS, KEYS, 4, STAGES, tma=True, backend=NAME)


def candidates(module: Module) -> tuple[Config, ...]:
    """Rows that are worth measuring: its own, which is the only one that fits."""
    return () if infeasible(module) else (config(module),)


def least_rows(module: Module, config: Config) -> int:
    """The rows of a call, beyond which the divided kernel is faster: any number, but for 1 us where there is least to
    read.

    docs/perf-log.md, section 33, has the times.
    """
    return 0
