"""Builds the context from which the template prints a generated module's hopper.py."""

from __future__ import annotations

from typing import Any

from attngen.ir import Module, gl, only, pipe, tile
from attngen.targets.hopper.configs.barriers import acquire_of
from attngen.targets.hopper.configs.common import SCORE_DIMS
from attngen.targets.hopper.configs.fused_backward import is_signed
from attngen.targets.hopper.configs.head_dims import is_power_of_two
from attngen.targets.hopper.configs.mla_decode import is_mla_decode
from attngen.targets.hopper.configs.sm90 import DECODE, FIRST_BARRIER, FORWARD, JVP, ROWS
from attngen.targets.hopper.lowering.shapes import HALF
from attngen.targets.hopper.printing.context import WarpSpecializedContext
from attngen.targets.hopper.printing.loop_views import gluon
from attngen.targets.hopper.printing.views import WarpSpecializedView
from attngen.targets.printing.split_kv import split_functions
from attngen.tiles.sizes import tile_width

TEMPLATE = "hopper/kernels.py.jinja"


def context(module: Module) -> dict[str, Any]:
    """The names that the template of hopper.py reads."""
    contexts = [WarpSpecializedContext(module, kernel.name) for kernel in module.warp_specialized]
    views = [context.warp_specialized() for context in contexts]
    lowered = {type(op) for context in contexts for op in context.kernel.ops()}
    stand_in = {kernel.stands_for for kernel in module.warp_specialized}
    summing = [kernel for kernel in module.warp_specialized if kernel.stands_for in (FORWARD, DECODE, JVP)]
    partial = [any(only(kernel.ops(), pipe.PartialReduce)) for kernel in summing]
    ops = [op for kernel in module.warp_specialized for op in kernel.ops()]
    adds = [(kernel, op) for kernel in module.warp_specialized for op in only(kernel.ops(), tile.OrderedAdd)]
    kinds, pinned = {type(op) for op in ops}, [{*op.type.dims} for op in only(ops, pipe.PinBeforeWait)]
    constants = [("D_QK", module.head_dim_qk), ("D_V", module.head_dim_v)]
    constants += [] if is_power_of_two(module.head_dim_v) else [("D_V_PAD", tile_width(module.head_dim_v))]
    constants += [("BLOCK", module.blocks.size)] if module.blocks else []
    constants += [("UNIT", module.unit)] if module.chunk else []
    if latents := any(map(is_mla_decode, module.warp_specialized)):
        constants = [("D_ROPE", module.rope), (HALF, module.head_dim_v // 2)]
    return {
        "module": module,
        "constants": constants,
        "rows": ROWS,
        "first_barrier": FIRST_BARRIER,
        "softmax": bool(stand_in & {FORWARD, DECODE}),
        "reads_ln2": any("LN2" in view.words for view in views),
        "of_queries": any(kernel.program_axis == "q" for kernel in module.warp_specialized),
        "of_keys": [
            f"`{kernel.name}`"
            for kernel in module.warp_specialized
            if kernel.program_axis == "kv" and not kernel.traits.adds_in_order
        ],
        "partial_sums": any(partial),
        "row_sums": not all(partial),
        "writes_indices": bool(kinds & {pipe.WriteTileIndex, pipe.WriteTileStart}),
        "scaled_iotas": pipe.ScaledIota in kinds,
        "loads_row_vectors": pipe.ReadMetadata in kinds and not latents,
        "splits_softmax": pipe.SplitHalves in kinds,
        "adds": bool(adds),
        "launches_dependents": any(kernel.launches_dependents for kernel in module.warp_specialized),
        "polls_ahead": any(not acquire_of(kernel, op) for kernel, op in adds),
        "dq_reducers": max(
            (warp_group.instances for kernel, op in adds if (warp_group := kernel.warp_group_of(op))), default=0
        ),
        "recomputes": any(op.recompute for op in only(ops, pipe.PipelinedLoop)),
        "counts_tiles": tile.CountTiles in kinds,
        "heads_by_tile": any(op.by_tile for op in only(ops, pipe.PipelinedLoop)),
        "swizzles_sums": any("_store_acc" in view.words for view in views),
        "rematerializes": any("_opaque_zero" in view.words for view in views),
        "exchanges": latents,
        "zeroes": pipe.ZeroOutOfBounds in kinds,
        "split_kv": gluon(split_functions(module)) if latents else {},
        "pins_tiles": SCORE_DIMS in pinned,
        "pins": bool([dims for dims in pinned if dims != SCORE_DIMS]),
        "row_vectors": any(op.over in (pipe.PARTIALS, *pipe.HALF_DIM.values()) for op in only(ops, tile.Reduce)),
        "signs": any(is_signed(module, kernel) for kernel in module.warp_specialized),
        "floors": any(view.words & {"_floor_div", "_floor_mod"} for view in views),
        "casts": any(view.words & {"_to_floor", "_to_int", "_to_round"} for view in views),
        "splits_halves": bool(lowered & {pipe.SplitHalves, gl.SplitPiece}),
        "in_parts": any(len(part) > 2 for view in views for part in view.described),
        "kernels": [{**vars(view), **partitions(view)} for view in views],
    }


def partitions(view: WarpSpecializedView) -> dict[str, Any]:
    """The partitions of gl.warp_specialize: consumers first, then the producer.

    The first partition runs in the warps that the kernel is launched with; the others are workers, whose warps and
    registers Gluon is given.
    """
    warp_groups = sorted(view.warp_groups, key=lambda warp_group: -warp_group.warps)
    instances = [(warp_group, number) for warp_group in warp_groups for number in range(warp_group.instances)]
    workers = [warp_group for warp_group, _ in instances[1:]]
    return {
        "partitions": instances,
        "warps": [warp_group.warps for warp_group in workers],
        "registers": [warp_group.registers for warp_group in workers],
        "threads": sum(32 * warp_group.warps for warp_group, _ in instances if warp_group.meets),
    }
