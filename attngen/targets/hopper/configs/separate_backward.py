"""Whether this backend divides the kernels of dQ, dK and dV of heads of 256 columns, and the tiles of their
programs."""

from __future__ import annotations

from attngen.ir.expr import symbol, symbol_names
from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.ops import MEMBER, Arg, Gather, Load, Loop, Op, Yield
from attngen.targets.hopper.configs.common import is_of_keys, is_shared, refused, work
from attngen.targets.hopper.configs.sm90 import APART, DEVICE, NAME, OF_WEIGHTS, ROWS

WIDTH = 256  # columns of a head: a sum of as many takes half of a consumer's registers
OUTPUTS = {"dq": {"dQ", "DELTA", "LSE2"}, "dk": {"dK"}, "dv": {"dV"}}  # what each kernel writes
OWN, VISITED = 2 * ROWS, ROWS  # rows of a program's tile, and of the tiles that it visits
# of the rings of tiles that it visits; of those that one product alone reads, where another ring is read by two, there
# is one
STAGES = 2
MOST_WORK = 18  # operations for each score: those of a dilated mask; of a soft cap, which has 22, registers spill
# the same with a modifier of scores: those of ALiBi; of a number of queries beside padding, which has 17, they spill
MOST_MODIFIED = 14


def infeasible(name: str, module: Module) -> str:
    """Why a kernel cannot be divided, as the end of a sentence; empty text if it can."""
    kernel = module.kernel(name)
    if (columns := (module.head_dim_qk, module.head_dim_v)) != (WIDTH, WIDTH):
        return f"its heads have {columns[0]} and {columns[1]} columns; expected {WIDTH}"
    if module.blocks and module.blocks.size < OWN:
        return f"its mask lists blocks of {module.blocks.size} rows, and a program has {OWN}"
    if kernel.writes - OUTPUTS[name]:
        return f"it writes {', '.join(sorted(kernel.writes - OUTPUTS[name]))}, too"
    if kernel.of_pairs:
        return "a number is read for each score"
    if kernel.of_heads and any(_differs(op) for op in kernel.block(kernel.of_heads.body).ops):
        return "what it reads or runs over differs among the query heads of a group"
    return refused(module, kernel)


def _differs(op: Op) -> bool:
    """Whether an op of a turn for a head computes what is not the same in all of them."""
    if isinstance(op, (Arg, Loop, Yield)):
        return isinstance(op, Loop) and op.listed is not None
    return not is_shared(op) or MEMBER in set().union(*(symbol_names(e) for e in op.expressions))


def not_preferred(name: str, module: Module) -> str:
    """Why a kernel stays portable, as the end of a sentence; empty text if it is divided."""
    if why := infeasible(name, module):
        return why
    kernel = module.kernel(name)
    if module.dropout:
        return "with dropout registers spill"
    modified = module.meaning.score != symbol("s")
    if kernel.program_axis == "q" and modified:
        return "with a modifier of scores registers spill"
    most = MOST_MODIFIED if modified and has_dp(kernel) else MOST_WORK
    if (ops := work(kernel)) > most:
        return f"its mask and modifiers take {ops} operations for each score, and of more than {most} registers spill"
    of_keys = (op for op in kernel.ops() if isinstance(op, (Gather, Load)) and op.type.dims == ("BLOCK_KV",))
    if kernel.program_axis == "q" and not all(is_of_keys(kernel, op) for op in of_keys):
        return "with numbers of keys that cannot lie beside their tile registers spill"
    return ""


def has_dp(kernel: Kernel) -> bool:
    """Whether it multiplies dP beside scores, as the kernels of dQ and of dK do."""
    return kernel.stands_for in APART and kernel.stands_for != OF_WEIGHTS


def runs_ahead(kernel: Kernel) -> bool:
    """Whether the weights of a tile are computed while the product of the tile before runs, as in the forward: for
    dV, and one head."""
    return kernel.stands_for == OF_WEIGHTS and not kernel.takes_heads


def config(
    name: str, module: Module, block_q: int | None = None, block_kv: int | None = None, stages: int | None = None
) -> Config:
    """The row of a kernel's schedule, for any number of rows."""
    q, kv = (OWN, VISITED) if module.kernel(name).program_axis == "q" else (VISITED, OWN)
    return Config(DEVICE, 2, None, block_q or q, block_kv or kv, 4, stages or STAGES, tma=True, backend=NAME)
