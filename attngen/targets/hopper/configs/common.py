"""Functions for the configs of all kernel families: whether a kernel can be warp-specialized at all, and how much work
its masks and modifiers do per score."""

from __future__ import annotations

from attngen.devices import CLASSES
from attngen.heuristics import WIDEST_ACC
from attngen.ir import AXIS_DIM, Kernel, Module, Op, cos, erf, log2, only, sin, tile
from attngen.targets.hopper.configs.sm90 import DEVICE, FORWARD, ROWS

NARROW = 64  # head_dim up to which the softmax takes as long as the matrix products
MEDIUM = 128  # head_dim beyond which heads are wide
SCORE_DIMS = {"BLOCK_Q", "BLOCK_KV"}
FEW_ROWS = 64  # calls of at most this many rows run the portable kernel, which has smaller tiles for them
LIGHT_OPS = 10  # operations per score: those of ALiBi under a causal mask
# Library functions, counted as so many operations each: with a logarithm per score, the portable forward takes 0.70 of
# the time of the warp-specialized one, and with erf in addition 0.52 (docs/perf-log.md, section 34).
LONG_FUNCTIONS, LONG_FUNCTION_OPS = (log2, erf, sin, cos), 20


def infeasible_in_any_family(module: Module, kernel: Kernel) -> str:
    """Return why a kernel of any family cannot be warp-specialized, as the end of a sentence; empty text if nothing
    rules it out."""
    if (wide := max(module.head_dim_qk, module.head_dim_v)) > WIDEST_ACC and not module.rope:
        too_wide = f"an accumulator of more than {WIDEST_ACC} columns takes all registers of a consumer"
        return f"its head_dim is {wide}, and {too_wide}"
    if kernel.traits.of_entropy:
        return "it computes entropies of queries, or gradients from these (`outputs`)"
    if not any(config.elem_bytes == 2 for config in module.configs(FORWARD)):
        return "no dtype of the spec has 16 bits"
    if module.chunk % (2 * ROWS):
        return f"its calls have chunks of {module.chunk} rows, and a program has {2 * ROWS}"
    read = {name for op in kernel.block("entry").ops if is_shared(op) for name in op.operands()}
    if any(t.space == "reg" and t.dims for name in read for t in kernel.op(name).results().values()):
        row = "query" if kernel.program_axis == "q" else "key"
        return f"the bounds of its loops are computed from a number for each {row} of a tile"
    return ""


def is_shared(op: Op) -> bool:
    """True if all warp groups have the op's result: it is an argument of the kernel, or a single integer or pointer,
    such as a loop bound."""
    types = op.results().values()
    return isinstance(op, tile.Arg) or (bool(types) and all(not t.dims and t.dtype in ("i32", "ptr") for t in types))


def has_positional_modifier(kernel: Kernel) -> bool:
    maps = (op for op in only(kernel.ops(), tile.Map) if set(op.type.dims) == SCORE_DIMS)
    return any({"q_idx", "kv_idx"} & set(map(str, op.expr.free_symbols)) for op in maps)


def ops_per_score(kernel: Kernel) -> int:
    """Count the operations of masks, modifiers and gradients per score, including those of library functions."""
    scores = (
        op
        for op in only(kernel.ops(), tile.Gather, tile.Map, tile.Mask)
        if any(set(t.dims) == SCORE_DIMS for t in op.results().values())
    )
    return sum(
        e.count_ops() + LONG_FUNCTION_OPS * e.count(lambda x: isinstance(x, LONG_FUNCTIONS))
        for op in scores
        for e in op.expressions
    )


def is_row_vector(kernel: Kernel, op: Op) -> bool:
    """True if the op loads a 32-bit number for each row of a loop's tile, so that the producer can copy the numbers
    with the tile.

    Rows past the end of the tensor have the number 0.
    """
    if (
        not isinstance(op, tile.Load)
        or op.type.dims != (AXIS_DIM[kernel.loop_axis],)
        or op.type.dtype not in ("f32", "i32")
    ):
        return False
    return op.other == 0 and not kernel.traits.only_known(op)


def smem_limit(programs: int) -> int:
    """Bytes of shared memory for each program, if `programs` of them share an SM."""
    device = CLASSES[DEVICE]
    return min(device.smem_per_block, device.smem_per_sm // programs - device.smem_reserved)


def overlaps_softmax(kernel: Kernel) -> bool:
    """True if a consumer overlaps its softmax with its own matrix products. Where programs share an SM, the softmax of
    one overlaps with products of the others instead."""
    return kernel.ctas_per_sm == 1
