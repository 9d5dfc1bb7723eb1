"""Decide if decode with a KV cache of latents (MLA) is warp-specialized, and under which config."""

from __future__ import annotations

from attngen.ir import SIDES, Config, Kernel, Module, only, tile
from attngen.targets.hopper.configs.common import (
    LIGHT_OPS,
    has_positional_modifier,
    infeasible_in_any_family,
    ops_per_score,
)
from attngen.targets.hopper.configs.sm90 import DECODE, DEVICE, NAME, ROWS

# Columns of the latent, and of its rotary part: those of DeepSeek's models, which were compiled.
LATENT, ROPE = (512, 64)
BLOCK_KV = 64  # two tiles of keys, of three pieces each, and the queries fill shared memory
STAGES = 2  # tiles of keys: an even one and an odd one
OTHER = dict(zip(SIDES, reversed(SIDES)))  # half of the columns -> the other half
# Ops that the loop's body may have, in addition to the lookup of a page's number.
OF_STEP = (tile.Arg, tile.Dot, tile.Load, tile.Map, tile.Mask, tile.Reduce, tile.SoftmaxStep, tile.Yield)


def is_mla_decode(kernel: Kernel) -> bool:
    """True if two warp groups split the columns of the kernel's outputs (see split_d_warp_groups.py)."""
    return kernel.stands_for == DECODE


def infeasible(module: Module) -> str:
    """Return why the decode kernel cannot be warp-specialized, as the end of a sentence; empty text if it can."""
    kernel, cache = module.kernel(DECODE), module.cache
    if not kernel.traits.rotates or cache is None:
        return "its keys are no latents"
    if (module.head_dim_v, module.rope) != (LATENT, ROPE):
        return (
            f"its latents have {module.head_dim_v} columns and {module.rope} rotated ones; expected {LATENT} and {ROPE}"
        )
    if cache.dtype:
        return "its keys have 8 bits"
    if cache.page and not (cache.page.isdigit() and int(cache.page) % BLOCK_KV == 0):
        size = f"pages of {cache.page} rows" if cache.page.isdigit() else "pages whose size a call gives"
        return f"its cache has {size}; expected a multiple of {BLOCK_KV}"
    loops = list(only(kernel.ops(), tile.Loop))
    if kernel.kv_split is not None and kernel.kv_split.reads:
        return "its KV splits depend on data of sequences"
    if any(loop.listed for loop in loops):
        return "its mask lists tiles"
    for op in kernel.block(loops[0].body).ops:
        of_pages = isinstance(op, tile.Gather) and op.src.tensor == "PAGE_TABLE"
        if not (of_pages or isinstance(op, OF_STEP)) or (
            isinstance(op, tile.Load) and op.src.tensor not in ("K", "K_ROPE")
        ):
            return f"its mask or modifiers read what is loaded for keys (%{op.name})"
    return infeasible_in_any_family(module, kernel)


def not_preferred(module: Module) -> str:
    """Return why the decode kernel stays portable, as the end of a sentence; empty text if it is warp-specialized."""
    if why := infeasible(module):
        return why
    if has_positional_modifier(module.kernel(DECODE)):
        return "its modifiers depend on positions, and registers spill"
    if (ops := ops_per_score(module.kernel(DECODE))) > LIGHT_OPS:
        return (
            f"its mask and modifiers take {ops} operations for each score; with more than {LIGHT_OPS}, registers "
            "may spill"
        )
    return ""


def config(
    module: Module, block_q: int | None = None, block_kv: int | None = None, stages: int | None = None
) -> Config:
    """Return the kernel's only config, for any number of rows."""
    return Config(DEVICE, 2, None, ROWS, BLOCK_KV, 4, STAGES, tma=True, backend=NAME)


def candidates(module: Module) -> tuple[Config, ...]:
    """The configs that are worth measuring: the only one that fits."""
    return () if infeasible(module) else (config(module),)


def least_rows(module: Module, config: Config) -> int:
    """The number of rows beyond which the warp-specialized kernel is faster. It is faster for any number, except that
    it loses 1 us in the calls that read least (docs/perf-log.md, section 33, has the times)."""
    return 0
