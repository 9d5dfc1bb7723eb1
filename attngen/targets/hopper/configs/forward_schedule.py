"""Choose the optimizations of the warp-specialized forward under a config, as its registers, shared memory and named
barriers allow: three consumers, two programs per SM, ping-pong, persistence, skipped tiles."""

from __future__ import annotations

from collections.abc import Sequence

from sympy.core.relational import Relational

from attngen.ir import Bool, Config, Kernel, Module, only, tile
from attngen.targets.hopper.configs.common import (
    LIGHT_OPS,
    MEDIUM,
    NARROW,
    has_positional_modifier,
    is_row_vector,
    ops_per_score,
    smem_limit,
)
from attngen.targets.hopper.configs.head_dims import is_power_of_two, smem_widths
from attngen.targets.hopper.configs.sm90 import (
    CTAS_PER_SM,
    FIRST_BARRIER,
    FORWARD,
    NAMED_BARRIERS,
    REGISTERS,
    ROWS,
    SHARED_REGISTERS,
)
from attngen.targets.hopper.configs.work_tiles import WORK_STAGES
from attngen.tiles.warp_groups import instance_bounds

SPARE_SMEM = 1024  # the most bytes of shared memory that barriers and Triton itself take
TWO_CTAS_ROWS = 128  # queries of a program, where two programs share an SM
# Registers of a consumer in addition to its tiles, where two programs share an SM: for addresses, and for maxima and
# sums of rows.
SPARE_OF_TWO_CTAS = 24
FULL_REGISTERS = 2  # the most consumers for which each thread has as many registers as a thread can have
MOST_OPS_OF_THREE = 4  # operations per score with three consumers, which share the registers
# Operations per score with two programs per SM where numbers are loaded both per row and per key: those of documents
# under a causal mask.
MOST_OPS_WITH_LOADS = 12
# Stages of the pipeline of Q in persistent kernels, in the order in which they are tried.
Q_STAGES = (2, 1)


# ---------------------------------------------------------------------- how much a kernel does per score


def is_narrow(module: Module) -> bool:
    """True if heads are so narrow that the softmax takes as long as the matrix products."""
    return max(module.head_dim_qk, module.head_dim_v) <= NARROW


def is_balanced(kernel: Kernel) -> bool:
    """True if all query tiles visit equally many keys, as far as that does not depend on data."""
    return all(axis.swizzle == 1 for axis in kernel.grid)


def is_plain(module: Module, kernel: Kernel) -> bool:
    """True if loops run over one range of tiles per class, no number is loaded per key, and no modifier depends on
    positions.

    Kernels that are not plain spilled in the specs that were compiled, if they had three consumers, generated dropout
    bits, or looked up a number per score.
    """
    loops = list(only(kernel.block("entry").ops, tile.Loop))
    several = any(len(loop.ranges) > 1 or loop.listed for loop in loops)
    of_keys = any(op.type.dims == ("BLOCK_KV",) for op in only(kernel.ops(), tile.Gather, tile.Load))
    return not (module.blocks or several or of_keys or has_positional_modifier(kernel))


def is_light(module: Module, kernel: Kernel) -> bool:
    """True if masks and modifiers do so little that a consumer needs a third of the registers; never with dropout."""
    few = not (module.dropout or kernel.traits.reads_pairs) and ops_per_score(kernel) <= MOST_OPS_OF_THREE
    return few and is_plain(module, kernel)


def uses_three_consumers(module: Module, kernel: Kernel) -> bool:
    """True if a third of the registers is enough for a consumer, and a program of 192 queries is fast.

    If the mask lets some tiles visit fewer keys, as a causal mask does, wider tiles compute more hidden scores.
    """
    divides = module.chunk % (3 * ROWS) == 0
    return divides and is_balanced(kernel) and is_light(module, kernel)


def _loads_rows_and_keys(kernel: Kernel) -> bool:
    return len({op.type.dims for op in only(kernel.ops(), tile.Load) if len(op.type.dims) == 1}) > 1


# ---------------------------------------------------------------------- registers and shared memory


def allows_two_ctas(module: Module) -> bool:
    """True if two programs may share an SM, so that the softmax of each consumer overlaps with matrix products of the
    other three consumers.

    That takes narrow heads. A consumer then has half of the registers. Kernels that need more are excluded: those with
    dropout, those that load a number per score, and those that load numbers both per row and per key and compute more
    than masks of documents do.
    """
    kernel = module.kernel(FORWARD)
    with_loads = _loads_rows_and_keys(kernel) and ops_per_score(kernel) > MOST_OPS_WITH_LOADS
    heavy = module.dropout or kernel.traits.reads_pairs or with_loads
    return is_narrow(module) and not heavy and not (module.blocks and module.blocks.size < TWO_CTAS_ROWS)


def ctas_per_sm(module: Module, config: Config) -> int:
    """Number of programs that share an SM: two where the kernel allows it and tiles leave room for both; else one."""
    registers = tile_registers(module, config) + SPARE_OF_TWO_CTAS
    two = allows_two_ctas(module) and config.block_q == TWO_CTAS_ROWS and registers <= SHARED_REGISTERS[0]
    return CTAS_PER_SM if two and fits_smem(module, config, CTAS_PER_SM, 1) else 1


def tile_registers(module: Module, config: Config) -> int:
    """Registers per thread of a consumer for its tiles: 128 threads share 64 rows, and weights have 16 bits."""
    _, v = smem_widths(module)
    return v // 2 + config.block_kv // 2 + config.block_kv // 4


def fits_smem(module: Module, config: Config, programs: int, q_stages: int, output_columns: int = 0) -> bool:
    """True if shared memory holds the pipelines of K and V, `q_stages` stages of Q and `output_columns` columns of
    outputs for each of the programs that share an SM."""
    qk, v = smem_widths(module)
    elements = config.block_q * (q_stages * qk + output_columns) + config.num_stages * config.block_kv * (qk + v)
    return 2 * elements + row_vector_bytes(module, config) + SPARE_SMEM <= smem_limit(programs)


def row_vector_bytes(module: Module, config: Config) -> int:
    """Bytes of shared memory for row vectors of K: numbers per key that are copied with each tile."""
    kernel = module.kernel(FORWARD)
    tensors = {op.src.tensor for op in only(kernel.ops(), tile.Load) if is_row_vector(kernel, op)}
    return 4 * config.block_kv * config.num_stages * len(tensors)


def outputs_fit_q_stage(module: Module) -> bool:
    """True if outputs can be stored from the stage of Q: both tiles have the same width, without padding."""
    return module.head_dim_qk == module.head_dim_v and is_power_of_two(module.head_dim_v)


def output_stage_width(module: Module, config: Config, q_stages: int) -> int:
    """Columns of the output pipeline that fits next to `q_stages` stages of Q: all columns, or half of them; else 0.

    Halves are stored one after the other. Where outputs fit the stage of Q, a program with one tile can store them from
    there. With tiles of different lengths, as under a causal mask, that is faster than halves.
    """
    _, v = smem_widths(module)
    programs = ctas_per_sm(module, config)
    whole = outputs_fit_q_stage(module) and not is_balanced(module.kernel(FORWARD))
    return next((n for n in ((v,) if whole else (v, v // 2)) if fits_smem(module, config, programs, q_stages, n)), 0)


# ---------------------------------------------------------------------- optimizations


def keeps_column_bias(module: Module, kernel: Kernel) -> bool:
    """True if a consumer has registers for one number per column that stays the same in all tiles. Other kernels
    spilled when they kept it."""
    consumer = kernel.traits.sharing_warp_group
    light = ops_per_score(kernel) <= LIGHT_OPS and max(module.head_dim_qk, module.head_dim_v) <= MEDIUM
    return light and consumer.registers == REGISTERS[FULL_REGISTERS][0]


def splits_mask(module: Module, kernel: Kernel, op: tile.Mask, bounds: Sequence[Bool], others: Sequence[Bool]) -> bool:
    """True if the bounds of a mask become masks of their own, which a tile skips unless a bound cuts it.

    others: the parts of the condition for which no unswitch condition is known.

    False if all tiles apply the mask: tiles that no bound cuts would pay for the branch, too (4% of the time of a
    dilated mask). False also where kernels spilled when they were compiled. With other parts, those had more than one
    comparison of bounds, or wide heads. Without other parts, they had listed tiles, or wide heads and more than two
    comparisons.
    """
    if op.when != "partial":
        return False
    wide = max(module.head_dim_qk, module.head_dim_v) > MEDIUM
    compared = len({e for bound in bounds for e in bound.atoms(Relational)})
    if others:
        return compared == 1 and not wide
    return not any(loop.listed for loop in kernel.loops) and not (wide and compared > 2)


def persistent_q_stages(module: Module, config: Config) -> int:
    """Stages of the pipeline of Q in a persistent kernel; 0 where the other pipelines leave no room for persistence.

    Outputs need a pipeline of their own. Each stage that is filled again takes a named barrier, also in the pipeline of
    work tiles; so does each consumer in ping-pong order. Q has one stage if a consumer has a loop for each class of
    tiles and no product before both loops: ptxas 12.8 computes a stage's address at the start of only one of the loops
    (see attngen/targets/common/unset.py).
    """
    kernel = module.kernel(FORWARD)
    if kernel.traits.reads_pairs:
        return 0  # it would spill: the values from which addresses of data are computed are live during all products
    two_loops = ctas_per_sm(module, config) > 1 and len(kernel.loops) > 1
    separate = two_loops and not can_skip_masked_tiles(module, config)
    for stages in Q_STAGES[-1:] if separate else Q_STAGES:
        barriers = stages + 2 * config.num_stages + WORK_STAGES + ping_pong_consumers(module, config)
        if output_stage_width(module, config, stages) and barriers <= NAMED_BARRIERS - FIRST_BARRIER:
            return stages
    return 0


def can_skip_masked_tiles(module: Module, config: Config) -> bool:
    """True if a consumer can skip tiles that its own rows do not see.

    It can if the rows of all consumers except one are at least as many as the keys of a tile, no mask reads data that
    is loaded per key tile, and the loop bounds tell which tiles each consumer's rows see.
    """
    kernel = module.kernel(FORWARD)
    loads = only(kernel.ops(), tile.Gather, tile.Load)
    of_masks = (op for op in loads if not {"D_QK", "D_V"} & set(op.type.unpadded))
    if config.block_q - ROWS < config.block_kv or any("BLOCK_KV" in op.type.dims for op in of_masks):
        return False
    ranges = {loop.cls: loop.ranges for loop in kernel.loops}
    listed = next((loop.listed for loop in kernel.loops if loop.listed), None)
    return instance_bounds(kernel, ranges.get("partial", ()), ranges.get("full", ()), listed) is not None


def ping_pong_consumers(module: Module, config: Config) -> int:
    """Number of consumers that issue their matrix products in ping-pong order; 0 where they do not.

    With narrow heads, three consumers do. Two would be slower in this order: the products of one end before the other's
    softmax does. With wider heads and light masks, two consumers are faster in this order if all query tiles visit
    equally many keys, or if head_dim of V is more than 128 (docs/perf-log.md, section 27): programs that keep in step
    read the same keys at the same time, and the L2 serves fewer reads. Two that generate dropout bits are faster, too
    (section 30): while one computes, products of the other run.
    """
    kernel, instances = module.kernel(FORWARD), config.block_q // ROWS
    in_step = (is_balanced(kernel) or module.head_dim_v > MEDIUM) and is_light(module, kernel)
    faster = instances > 2 if is_narrow(module) else instances > 1 and (in_step or module.dropout)
    barriers = 2 * config.num_stages + instances  # at least: for the stages of K and V, and for the ping-pong order
    return instances if faster and barriers <= NAMED_BARRIERS - FIRST_BARRIER else 0
