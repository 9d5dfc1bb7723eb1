"""Decide if the forward is warp-specialized, and under which configs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from attngen.heuristics import SHORT_ROWS
from attngen.ir import Config, Kernel, Module, only, tile
from attngen.targets.hopper.configs.common import (
    FEW_ROWS,
    LIGHT_OPS,
    MEDIUM,
    NARROW,
    has_positional_modifier,
    infeasible_in_any_family,
    ops_per_score,
)
from attngen.targets.hopper.configs.forward_schedule import (
    FULL_REGISTERS,
    TWO_CTAS_ROWS,
    allows_two_ctas,
    can_skip_masked_tiles,
    ctas_per_sm,
    fits_smem,
    is_balanced,
    is_light,
    is_narrow,
    is_plain,
    tile_registers,
    uses_three_consumers,
)
from attngen.targets.hopper.configs.sm90 import DEVICE, FORWARD, NAME, REGISTERS, ROWS
from attngen.tiles.classes import mask_class

# The largest head_dim of Q and K, and of V -> BLOCK_Q, BLOCK_KV, num_stages (docs/perf-log.md, section 26: measured
# with 64, 128 and 256).
TILES = {(192, 128): (128, 128, 2), (256, 256): (128, 64, 2)}
# Narrow heads, three consumers: two compute while the products of the third run.
TILES_OF_THREE_CONSUMERS = (192, 128, 2)
TILES_OF_TWO_CTAS = (TWO_CTAS_ROWS, 64, 3)  # other narrow heads, two programs per SM
# Rows beyond which three consumers are faster than two programs under a causal mask, too (docs/perf-log.md,
# section 26).
LONG_ROWS = 3072
BLOCK_KV, NUM_STAGES = (64, 128), (2, 3)  # values that are worth measuring
MOST_KEYS_WITH_SCORE_LOADS = 64  # of BLOCK_KV where a number is loaded per score: with more, registers spill
SPARE_REGISTERS = 32  # of a consumer in addition to its tiles: for addresses, and for maxima and sums of rows
MOST_OPS = 16  # per score: those of the specs that were compiled, which do not spill, are 14 at most


def infeasible(module: Module, kernel: Kernel) -> str:
    """Return why the forward cannot be warp-specialized, as the end of a sentence; empty text if it can."""
    if kernel.name != FORWARD or kernel.traits.visits_all_tiles or kernel.pack_gqa:
        return "its programs own no tile of queries (`order: kv_outer`)"
    if kernel.traits.rotates:
        return "its keys come from two tensors (`kv: {latent: ...}`)"
    if module.blocks and module.blocks.size < ROWS:
        return f"its mask lists blocks of {module.blocks.size} queries, and a consumer has {ROWS}"
    return infeasible_in_any_family(module, kernel)


def not_preferred(module: Module) -> str:
    """Return why the forward stays portable if a spec asks for no backend, as the end of a sentence; empty text if it
    is warp-specialized.

    It stays portable if it cannot be warp-specialized, or if the warp-specialized kernel is not known to be faster.
    That is so with dropout, except for heads of 65 to 128 columns whose masks and modifiers do little; with narrow
    heads, except with three consumers, two programs per SM, or scores that are looked up; and with masks and modifiers
    that compute more per score than those that were compiled, because registers may spill.
    """
    kernel, wide = module.kernel(FORWARD), max(module.head_dim_qk, module.head_dim_v)
    if why := infeasible(module, kernel):
        return why
    bare = not kernel.traits.reads_pairs and is_plain(module, kernel)
    if module.dropout and not (NARROW < wide <= MEDIUM and is_balanced(kernel) and bare):
        return "with dropout and such heads, mask and modifiers the portable kernel is about as fast"
    fast = uses_three_consumers(module, kernel) or allows_two_ctas(module) or _looks_up_scores(module, kernel)
    if wide <= NARROW and not fast:
        return f"its head_dim is {wide}, and with such a mask and modifiers the portable kernel is about as fast"
    if wide > NARROW and _is_crowded(module, kernel):
        return "its mask of data and its modifiers read so much that registers may spill"
    ops, most = ops_per_score(kernel), LIGHT_OPS if module.dropout else MOST_OPS
    spills = f"its mask and modifiers take {ops} operations for each score; with more than {most}, registers may spill"
    return spills if ops > most else ""


def _looks_up_scores(module: Module, kernel: Kernel) -> bool:
    """True if scores get numbers from a table, such as one of distances, and masks and modifiers do little else.

    Then two consumers are 2.4 to 7 times as fast as the portable kernel (docs/perf-log.md, section 30). The portable
    kernel is faster at reading a tensor with a number per score.
    """
    return kernel.traits.looks_up and not module.dropout and is_plain(module, kernel)


def _is_crowded(module: Module, kernel: Kernel) -> bool:
    """True if the mask lists blocks by data, and heads wider than 64 leave no registers for the other loads: such
    kernels spilled when compiled.

    Those loads are booleans per key; or numbers per query, together with numbers per score or, if head_dim of V is more
    than 128, with a modifier that depends on positions.
    """
    read = [op for op in only(kernel.ops(), tile.Gather, tile.Load) if not kernel.traits.only_known(op)]
    booleans = any(op.type.dims == ("BLOCK_KV",) and op.type.dtype == "b1" for op in read)
    of_queries = any(op.type.dims == ("BLOCK_Q",) for op in read)
    more = kernel.traits.reads_pairs or (module.head_dim_v > MEDIUM and has_positional_modifier(kernel))
    return bool(module.blocks and module.blocks.data) and (booleans or (of_queries and more))


def config(
    module: Module, block_q: int | None = None, block_kv: int | None = None, stages: int | None = None
) -> Config:
    """Return the forward's config for any number of queries: values that were measured to be fast, except those that
    the spec sets."""
    three = is_narrow(module) and uses_three_consumers(module, module.kernel(FORWARD))
    fitting = (tiles for (qk, v), tiles in TILES.items() if module.head_dim_qk <= qk and module.head_dim_v <= v)
    others = TILES_OF_TWO_CTAS if allows_two_ctas(module) else next(fitting, [*TILES.values()][-1])
    usual = TILES_OF_THREE_CONSUMERS if three else others
    q, kv, depth = (given or best for given, best in zip((block_q, block_kv, stages), usual))
    kv = kv if block_kv else min(kv, _most_keys(module))
    most = module.blocks.size if module.blocks else max(q, kv)  # tiles divide the blocks of a mask
    return Config(DEVICE, 2, None, min(q, most), min(kv, most), 4, depth, tma=True, backend=NAME)


def least_rows(module: Module, config: Config) -> int:
    """The number of rows beyond which the warp-specialized kernel is at least as fast as the portable one
    (docs/perf-log.md, section 28)."""
    return FEW_ROWS if config.block_q <= ROWS * FULL_REGISTERS else SHORT_ROWS


def long_config(module: Module) -> Config | None:
    """Return a config of three consumers for long sequences, where two programs per SM are the usual choice; None where
    it is not known to be faster.

    It is faster where longer sequences visit more keys, as under a causal mask: then the mask cuts few of their tiles.
    """
    kernel, chosen = module.kernel(FORWARD), config(module, *TILES_OF_THREE_CONSUMERS)
    two_ctas = ctas_per_sm(module, config(module)) > 1
    able = two_ctas and is_light(module, kernel) and can_skip_masked_tiles(module, chosen)
    able = able and module.chunk % chosen.block_q == 0
    causal = able and mask_class(module, kernel, 2 * LONG_ROWS).startswith("causal")
    return replace(chosen, min_rows=LONG_ROWS) if causal else None


def candidates(module: Module) -> tuple[Config, ...]:
    """The forward's configs that are worth measuring: those whose pipelines fit shared memory, and whose tiles fit a
    consumer's registers."""
    if infeasible(module, module.kernel(FORWARD)):
        return ()
    keys = [n for n in BLOCK_KV if n <= _most_keys(module)]
    found = (config(module, ROWS * instances, *tiles) for instances in REGISTERS for tiles in product(keys, NUM_STAGES))
    return tuple(dict.fromkeys(one for one in found if _fits(module, one)))


def _most_keys(module: Module) -> int:
    """The largest BLOCK_KV that attngen chooses."""
    loads_scores = any(only(module.kernel(FORWARD).traits.of_pairs, tile.Load))
    return MOST_KEYS_WITH_SCORE_LOADS if loads_scores else max(BLOCK_KV)


def _fits(module: Module, config: Config) -> bool:
    """True if shared memory holds the pipelines of Q, K and V, a consumer's registers hold its accumulator, scores and
    weights, and the mask's blocks consist of whole query tiles."""
    programs, tiles = ctas_per_sm(module, config), tile_registers(module, config)
    divides = not module.blocks or module.blocks.size % config.block_q == 0
    divides = divides and module.chunk % config.block_q == 0
    fits = programs > 1 or tiles + SPARE_REGISTERS <= REGISTERS[config.block_q // ROWS][0]
    return divides and fits and fits_smem(module, config, programs, 1)
