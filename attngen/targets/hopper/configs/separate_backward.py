"""Decide if the separate kernels of dQ, dK and dV, for a head_dim of 256, are warp-specialized, and under which
configs."""

from __future__ import annotations

from attngen.ir import MEMBER, Config, Kernel, Module, Op, only, symbol, symbol_names, tile
from attngen.targets.hopper.configs.common import infeasible_in_any_family, is_row_vector, is_shared, ops_per_score
from attngen.targets.hopper.configs.sm90 import DEVICE, DV_KERNEL, NAME, ROWS, SEPARATE_BACKWARD

HEAD_DIM = 256  # an accumulator of as many columns takes half of a consumer's registers
OUTPUTS = {"dq": {"dQ", "DELTA", "LSE2"}, "dk": {"dK"}, "dv": {"dV"}}  # the tensors that each kernel writes
PROGRAM_ROWS, LOOP_ROWS = 2 * ROWS, ROWS  # rows of the program tile, and of the tiles that its loop visits
# Stages of the pipelines of visited tiles. If two products read one of the tiles and one product the other, the latter
# has one stage (see insert_pipelines.py).
STAGES = 2
MOST_OPS = 18  # operations per score: those of a dilated mask; with a soft cap, which has 22, registers spill
# The same with a score modifier: those of ALiBi; with a number per query and padding, which have 17, registers spill.
MOST_OPS_WITH_MODIFIER = 14


def infeasible(name: str, module: Module) -> str:
    """Return why a kernel cannot be warp-specialized, as the end of a sentence; empty text if it can."""
    kernel = module.kernel(name)
    if (head_dims := (module.head_dim_qk, module.head_dim_v)) != (HEAD_DIM, HEAD_DIM):
        return f"its head_dims are {head_dims[0]} and {head_dims[1]}; expected {HEAD_DIM}"
    if module.blocks and module.blocks.size < PROGRAM_ROWS:
        return f"its mask lists blocks of {module.blocks.size} rows, and a program has {PROGRAM_ROWS}"
    if kernel.traits.writes - OUTPUTS[name]:
        return f"it writes {', '.join(sorted(kernel.traits.writes - OUTPUTS[name]))}, too"
    if kernel.traits.of_pairs:
        return "a number is read for each score"
    if kernel.traits.of_heads and any(_differs(op) for op in kernel.block(kernel.traits.of_heads.body).ops):
        return "what it reads or runs over differs among the query heads of a group"
    return infeasible_in_any_family(module, kernel)


def _differs(op: Op) -> bool:
    """True if an op in the loop over a group's query heads computes different results for different heads."""
    if isinstance(op, (tile.Arg, tile.Loop, tile.Yield)):
        return isinstance(op, tile.Loop) and op.listed is not None
    return not is_shared(op) or MEMBER in set().union(*(symbol_names(e) for e in op.expressions))


def not_preferred(name: str, module: Module) -> str:
    """Return why a kernel stays portable, as the end of a sentence; empty text if it is warp-specialized."""
    if why := infeasible(name, module):
        return why
    kernel = module.kernel(name)
    if module.dropout:
        return "with dropout registers spill"
    modified = module.meaning.score != symbol("s")
    if kernel.program_axis == "q" and modified:
        return "with a modifier of scores registers spill"
    most = MOST_OPS_WITH_MODIFIER if modified and computes_dp(kernel) else MOST_OPS
    if (ops := ops_per_score(kernel)) > most:
        return f"its mask and modifiers take {ops} operations for each score; with more than {most}, registers spill"
    of_keys = (op for op in only(kernel.ops(), tile.Gather, tile.Load) if op.type.dims == ("BLOCK_KV",))
    if kernel.program_axis == "q" and not all(is_row_vector(kernel, op) for op in of_keys):
        return "with numbers for keys that cannot be copied with their tile registers spill"
    return ""


def computes_dp(kernel: Kernel) -> bool:
    """True if the kernel multiplies dP in addition to scores, as those of dQ and of dK do."""
    return kernel.stands_for in SEPARATE_BACKWARD and kernel.stands_for != DV_KERNEL


def is_pipelined_as_forward(kernel: Kernel) -> bool:
    """True if a tile's weights are computed while the product of the previous tile runs, as in the forward. The kernel
    of dV does so if it has one head."""
    return kernel.stands_for == DV_KERNEL and not kernel.traits.takes_heads


def config(
    name: str, module: Module, block_q: int | None = None, block_kv: int | None = None, stages: int | None = None
) -> Config:
    """Return a kernel's config, for any number of rows."""
    queries_first = module.kernel(name).program_axis == "q"
    q, kv = (PROGRAM_ROWS, LOOP_ROWS) if queries_first else (LOOP_ROWS, PROGRAM_ROWS)
    return Config(DEVICE, 2, None, block_q or q, block_kv or kv, 4, stages or STAGES, tma=True, backend=NAME)
