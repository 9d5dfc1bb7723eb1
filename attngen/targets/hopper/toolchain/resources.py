"""Shared memory of a divided kernel, to the byte: rings, barriers, and what Triton adds to them.

Triton puts all of it side by side, the largest first, each at a multiple of its alignment (Allocation.cpp):

- the tiles of a ring, at multiples of eight rows of their swizzle;
- 8 bytes for the barrier of each slot, at multiples of 16;
- what all groups of warps but the first are given, once for all of them (WarpSpecializeOp::getCaptureSizeAlign): 4
  bytes for a number, 8 for a pointer or a descriptor, 8 and 4 for each dimension for buffers;
- a byte for each warp of these groups, which are filled up to four warps.

Conversions between the layouts of a consumer take nothing: each value stays in its thread.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import sympy

from attngen.ir.expr import Expr, symbol
from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.ops import AXIS_DIM, DTYPE_BYTES, Arg
from attngen.ir.pipe import WHOLE, Pipeline, ProducerLoad, WorkLoop
from attngen.targets.hopper.configs.common import handed_over, instances_of, room_of, told_numbers
from attngen.targets.hopper.configs.head_dims import width_of
from attngen.targets.hopper.configs.sm90 import COUNTER
from attngen.targets.hopper.printing.context import WarpSpecializedContext
from attngen.targets.hopper.printing.kernels import parts
from attngen.tiles.sizes import STAGES, sizes, tile_bytes
from attngen.tiles.tiles import evaluate

BARRIER_BYTES, BARRIER_ALIGNMENT = 8, 16
SWIZZLED = 128  # bytes of a row of the widest swizzle, of which eight rows repeat
TILE_DIMS = 3  # of the buffers of tiles, before those of a tile: the slot, and the tensor's batch and head


def sram_bytes(module: Module, kernel: Kernel, config: Config) -> int:
    """Bytes of shared memory of a divided kernel as it is printed."""
    given, warps = _given(module, kernel)
    buffers = [*_pipelines(module, kernel, config), (given, DTYPE_BYTES["ptr"]), (warps, 1)]
    end = 0
    for size, alignment in sorted(buffers, key=lambda buffer: -buffer[0]):
        end = -(-end // alignment) * alignment + size
    return end


def row_formula(module: Module, kernel: Kernel, config: Config) -> Expr:
    """Bytes of tiles in closed form, and the number of bytes beside them under a row."""
    tiles: Expr = sympy.Add(*(_tiles(module, kernel, pipeline) for pipeline in pipelines(kernel)))
    return tiles + (sram_bytes(module, kernel, config) - int(evaluate(tiles, sizes(module, config))))


def pipeline_bytes(module: Module, kernel: Kernel, config: Config) -> int:
    """Bytes of a kernel's rings alone, with their barriers: what is known before all of it can be printed."""
    return sum(size for size, _ in _pipelines(module, kernel, config))


def registers(module: Module, kernel: Kernel, config: Config) -> int:
    """Registers of a thread that has most of them, as roles say."""
    return max(block.warp_group.registers for block in kernel.warp_groups if block.warp_group)


def why_not_fit(module: Module, kernel: Kernel, config: Config, change: str = "") -> str | None:
    """One sentence on why a row does not fit, or None."""
    need, has = sram_bytes(module, kernel, config), room_of(kernel.ctas_per_sm)
    tile = f"BLOCK_Q={config.block_q}, BLOCK_KV={config.block_kv} and num_stages={config.num_stages}"
    return (
        f"with {tile} the kernel @{kernel.name} needs {need:,} bytes of shared memory, and has {has:,}"
        if need > has
        else None
    )


def pipelines(kernel: Kernel) -> list[Pipeline]:
    """The rings of a kernel."""
    return [op for op in kernel.ops() if isinstance(op, Pipeline)]


def stages_of(pipeline: Pipeline, config: Config) -> int:
    """The slots of a ring under a row."""
    return int(evaluate(pipeline.stages, {"num_stages": config.num_stages}))


def _tiles(module: Module, kernel: Kernel, pipeline: Pipeline) -> Expr:
    """Bytes of a ring's tiles. Copies that have a ring each share the rows of the program's tile."""
    whole = {whole: own for own, whole in WHOLE.items()}
    tile = replace(pipeline.type, dims=tuple(whole.get(d, d) for d in pipeline.type.dims))
    tile = replace(tile, dims=(*tile.dims[:-1], str(width_of(module, pipeline)))) if pipeline.columns else tile
    times = 1 if AXIS_DIM[kernel.program_axis] in pipeline.type.dims else instances_of(kernel, pipeline)
    return times * pipeline.stages.subs(symbol("num_stages"), STAGES) * tile_bytes(tile)


def _pipelines(module: Module, kernel: Kernel, config: Config) -> list[tuple[int, int]]:
    """The bytes and the alignment of each ring's tiles, and of its barriers."""
    known, buffers, shared = sizes(module, config), list[tuple[int, int]](), handed_over(kernel)
    for pipeline in pipelines(kernel):
        if pipeline.beside or len(pipeline.type.dims) == 1:  # numbers of keys, of tiles or of rows
            buffers.append((int(evaluate(_tiles(module, kernel, pipeline), known)), BARRIER_ALIGNMENT))
        elif pipeline.type.dims:
            width = (
                SWIZZLED
                if pipeline.name in shared
                else config.elem_bytes * (pipeline.columns or width_of(module, pipeline))
            )
            buffers.append((int(evaluate(_tiles(module, kernel, pipeline), known)), 8 * min(SWIZZLED, width)))
        else:
            numbers = len(told_numbers(kernel))  # where a tile is, and what is known of it
            buffers.append(
                (stages_of(pipeline, config) * numbers * DTYPE_BYTES[pipeline.type.dtype], BARRIER_ALIGNMENT)
            )
        for _ in range(
            2 if shared.get(pipeline.name) or pipeline.mbarrier_release else pipeline.name in _filled(kernel)
        ):
            buffers.append(
                (stages_of(pipeline, config) * instances_of(kernel, pipeline) * BARRIER_BYTES, BARRIER_ALIGNMENT)
            )
    return buffers


def _filled(kernel: Kernel) -> set[str]:
    """The rings that something fills, but for those beside others. Nothing waits for the barriers of another one:
    they take no room."""
    filled = {op.pipeline for op in kernel.ops() if isinstance(op, (ProducerLoad, WorkLoop))}
    return filled - {pipeline.name for pipeline in pipelines(kernel) if pipeline.beside}


@lru_cache(maxsize=256)
def _given(module: Module, kernel: Kernel) -> tuple[int, int]:
    """Bytes of what groups of warps are given beside the first, and how many warps these have: a byte is kept for each.

    A group is given what its role's function takes. Groups share what they have in common.
    """
    context = WarpSpecializedContext(module, kernel.name)
    printed = parts(context.warp_specialized())
    names = {name for warp_group, _ in printed["parts"][1:] for name in warp_group.params}
    buffers: dict[str, int] = {}  # dimensions by name
    for pipeline, op in context.pipelines.items():
        short = pipeline.removesuffix("_pipeline").lower()
        handed = context.shared.get(pipeline)
        alone = (
            handed is False or op.exchange or len(op.type.dims) == 1
        )  # what only consumers share has no batch and no head
        tile = len(op.type.dims) + (1 if alone else TILE_DIMS)
        buffers |= {
            f"{short}_smem": tile if op.type.dims and not op.beside else 2,
            f"{short}_full": 2,
            f"{short}_empty": 2,
        }
        names -= set() if pipeline in _filled(kernel) or handed else {f"{short}_full"}
    given = (
        DTYPE_BYTES["ptr"] + 4 * buffers[name] if name in buffers else DTYPE_BYTES[_dtype(kernel, name)]
        for name in names
    )
    return sum(given), 4 * -(-sum(printed["warps"]) // 4)


def _dtype(kernel: Kernel, name: str) -> str:
    """The type of a function's parameter: of tensors and descriptors `ptr`; of strides, sizes and places of programs
    `i32`."""
    op = next((op for op in kernel.block("entry").ops if op.name == name), None)
    if name == COUNTER:
        return "ptr"
    if isinstance(op, Arg):
        return op.type.dtype if op.role == "scalar" else "ptr"
    return next(iter(op.results().values())).dtype if op is not None else "i32"
