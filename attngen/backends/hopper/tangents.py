"""Whether this backend divides forward mode, and the tiles of its programs."""

from __future__ import annotations

from attngen.backends.hopper.choice import refused, work
from attngen.backends.hopper.facts import DEVICE, NAME, ROWS, TANGENTS
from attngen.ir.graph import Module, Row

OWN, SLOTS = 2 * ROWS, 2  # queries of a program; slots of each ring of tiles of keys
KEYS = {64: 128, 128: 64}  # columns of a head -> rows of a tile of keys: a consumer has two tiles of scores beside its sums
MOST_WORK = 16  # operations for each score


def obstacle(module: Module) -> str:
    """Why the kernel cannot be divided, as the end of a sentence; empty text if it can."""
    kernel = module.kernel(TANGENTS)
    qk, v = module.head_dim_qk, module.head_dim_v
    if qk != v or v not in KEYS:
        return f"its heads have {qk} and {v} columns; expected {' or '.join(map(str, KEYS))}, as many of q and k as of v"
    if module.blocks and module.blocks.size < OWN:
        return f"its mask lists blocks of {module.blocks.size} queries, and a program has {OWN}"
    if any(arg.name == f"t{i.name.upper()}" for arg in kernel.args for i in module.inputs):
        return "inputs have tangents, too"
    return refused(module, kernel)


def declined(module: Module) -> str:
    """Why the kernel stays portable, as the end of a sentence; empty text if it is divided."""
    if why := obstacle(module):
        return why
    if module.dropout:
        return "with dropout registers spill"
    if (ops := work(module.kernel(TANGENTS))) > MOST_WORK:
        return f"its mask and modifiers take {ops} operations for each score, and of more than {MOST_WORK} registers may spill"
    return ""


def row(module: Module, block_q: int | None = None, block_kv: int | None = None, slots: int | None = None) -> Row:
    """The row of the kernel's schedule, for any number of rows."""
    return Row(DEVICE, 2, None, block_q or OWN, block_kv or KEYS[module.head_dim_v], 4, slots or SLOTS, tma=True, backend=NAME)
