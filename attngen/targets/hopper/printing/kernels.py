"""hopper.py of a generated module: what its template sees."""

from __future__ import annotations

from typing import Any

from attngen.ir.graph import Module
from attngen.ir.ops import CountTiles, OrderedAdd, Reduce
from attngen.ir.pipe import (
    HALVES,
    PARTIALS,
    PartialReduce,
    PinBeforeWait,
    PipelinedLoop,
    ReadMetadata,
    Rematerialize,
    ScaledIota,
    SplitHalves,
    WriteTileIndex,
    ZeroOutOfBounds,
)
from attngen.targets.hopper.configs.common import PAIR, follow_of
from attngen.targets.hopper.configs.fused_backward import is_signed
from attngen.targets.hopper.configs.head_dims import is_power_of_two
from attngen.targets.hopper.configs.mla_decode import is_of_latents
from attngen.targets.hopper.configs.sm90 import DECODE, FIRST_BARRIER, FORWARD, ROWS, TANGENTS
from attngen.targets.hopper.printing.context import WarpSpecializedContext
from attngen.targets.hopper.printing.exchange_views import HALF
from attngen.targets.hopper.printing.loop_views import gluon
from attngen.targets.hopper.printing.views import WarpSpecializedView
from attngen.targets.printing.split_kv import dealing
from attngen.tiles.sizes import tile_width

TEMPLATE = "hopper/kernels.py.jinja"


def context(module: Module) -> dict[str, Any]:
    """What the template of hopper.py sees."""
    views = [WarpSpecializedContext(module, kernel.name).warp_specialized() for kernel in module.warp_specialized]
    stand_in = {kernel.stands_for for kernel in module.warp_specialized}
    summing = [kernel for kernel in module.warp_specialized if kernel.stands_for in (FORWARD, DECODE, TANGENTS)]
    chained = [any(isinstance(op, PartialReduce) for op in kernel.ops()) for kernel in summing]
    ops = [op for kernel in module.warp_specialized for op in kernel.ops()]
    adds = [(kernel, op) for kernel in module.warp_specialized for op in kernel.ops() if isinstance(op, OrderedAdd)]
    kinds, held = {type(op) for op in ops}, [{*op.type.dims} for op in ops if isinstance(op, PinBeforeWait)]
    constants = [("D_QK", module.head_dim_qk), ("D_V", module.head_dim_v)]
    constants += [] if is_power_of_two(module.head_dim_v) else [("D_V_PAD", tile_width(module.head_dim_v))]
    constants += [("BLOCK", module.blocks.size)] if module.blocks else []
    if latents := any(map(is_of_latents, module.warp_specialized)):
        constants = [("D_ROPE", module.rope), (HALF, module.head_dim_v // 2)]
    return {
        "module": module,
        "constants": constants,
        "rows": ROWS,
        "first_barrier": FIRST_BARRIER,
        "softmax": bool(stand_in & {FORWARD, DECODE}),
        "natural": any("LN2" in view.words for view in views),
        "of_queries": any(kernel.program_axis == "q" for kernel in module.warp_specialized),
        "of_keys": [
            f"`{kernel.name}`" for kernel in module.warp_specialized if kernel.program_axis == "kv" and not kernel.adds
        ],
        "chains": any(chained),
        "sums": not all(chained),
        "tells": WriteTileIndex in kinds,
        "ramps": ScaledIota in kinds,
        "rows_beside": ReadMetadata in kinds and not latents,
        "weighs_halves": SplitHalves in kinds,
        "adds": bool(adds),
        "releases": any(kernel.launches_dependents for kernel in module.warp_specialized),
        "looks_ahead": any(not follow_of(kernel, op) for kernel, op in adds),
        "writers": max(
            (warp_group.instances for kernel, op in adds if (warp_group := kernel.warp_group_of(op))), default=0
        ),
        "recomputes": any(isinstance(op, PipelinedLoop) and op.recompute for op in ops),
        "counts": CountTiles in kinds,
        "heads_by_tile": any(isinstance(op, PipelinedLoop) and op.by_tile for op in ops),
        "turned": any("store_sums" in view.words for view in views),
        "nears": Rematerialize in kinds,
        "relays": latents,
        "clears": ZeroOutOfBounds in kinds,
        "deals": gluon(dealing(module)) if latents else {},
        "holds_tiles": PAIR in held,
        "holds": bool([dims for dims in held if dims != PAIR]),
        "sums_beside": any(isinstance(op, Reduce) and op.over in (PARTIALS, *HALVES.values()) for op in ops),
        "signs": any(is_signed(module, kernel) for kernel in module.warp_specialized),
        "floors": any(view.words & {"floor_div", "floor_mod"} for view in views),
        "casts": any(view.words & {"to_floor", "to_int", "to_round"} for view in views),
        "halves": any("halves" in view.words for view in views),
        "in_parts": any(len(tile) > 2 for view in views for tile in view.described),
        "kernels": [{**vars(view), **parts(view)} for view in views],
    }


def parts(view: WarpSpecializedView) -> dict[str, Any]:
    """The groups of warps, those of the program's own first: consumers, and then the producer, as Gluon is given
    them."""
    warp_groups = sorted(view.warp_groups, key=lambda warp_group: -warp_group.warps)
    parts = [(warp_group, copy) for warp_group in warp_groups for copy in range(warp_group.instances)]
    workers = [
        warp_group for warp_group, _ in parts[1:]
    ]  # the first part has the warps that the kernel is launched with
    return {
        "parts": parts,
        "warps": [warp_group.warps for warp_group in workers],
        "registers": [warp_group.registers for warp_group in workers],
        "threads": sum(32 * warp_group.warps for warp_group, _ in parts if warp_group.meets),
    }
