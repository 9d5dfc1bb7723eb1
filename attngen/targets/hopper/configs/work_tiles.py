"""The metadata of a work tile: the integers that a persistent kernel's producer passes to the other warp groups with
each tile that it fetches."""

from __future__ import annotations

from attngen.ir import AXIS_DIM, REVERSED_GROUP, SPLIT_SYMBOLS, Kernel, first_row, only, pipe

WORK_STAGES = 2  # of the pipeline of work tiles


def tile_scalars(kernel: Kernel) -> list[str]:
    """The integers computed from a tile's coordinates that warp groups read. The warp group that fetches tiles computes
    them, and passes them along with the coordinates."""
    tile = next((op.of for op in only(kernel.ops(), pipe.WorkLoop)), "")
    read = {
        name
        for block in kernel.blocks
        if block.name != tile
        for op in block.ops
        for name in (*op.operands(), *kernel.traits.scalars_of(op))
    }
    ops = [op for op in kernel.block(tile).ops if op.name in read and not kernel.traits.only_known(op)] if tile else []
    return [op.name for op in ops if not op.results()[""].dims and op.results()[""].dtype == "i32"]


def tile_coordinates(kernel: Kernel) -> list[str]:
    """The variables that say where a program's tile is, and whether its head is reversed within its group. The first is
    never negative."""
    axes = [first_row(axis.var, kernel.traits.places) if axis.var in AXIS_DIM else axis.var for axis in kernel.grid]
    axes[1:1] = [f"{kernel.grid[0].var}_start"] if kernel.traits.places else []
    # among the KV splits of all sequences, the first one of the tile's
    split = [SPLIT_SYMBOLS[-1]] if kernel.kv_split else []
    return [*axes, *split, *([REVERSED_GROUP] if kernel.grid[0].reversed_group else [])]


def tile_metadata(kernel: Kernel) -> list[str]:
    """All integers that are passed for a tile: its coordinates, and the integers computed from them."""
    return [*tile_coordinates(kernel), *tile_scalars(kernel)]
