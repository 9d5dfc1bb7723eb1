"""Shared memory of a warp-specialized kernel, to the byte: pipelines, barriers, and Triton's additions to them.

Triton allocates buffers one after another, the largest first, each at a multiple of its alignment (Allocation.cpp):

- the tiles of a pipeline, at multiples of eight rows of their swizzle;
- 8 bytes for the barrier of each stage, at multiples of 16;
- the captures of all partitions except the first, once for all of them (WarpSpecializeOp::getCaptureSizeAlign): 4 bytes
  per number, 8 per pointer or descriptor, and 8 plus 4 per dimension for buffers;
- a byte per warp of these partitions, which are filled up to four warps.

Conversions between the layouts of a consumer take nothing: each value stays in its thread.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import sympy

from attngen.ir import AXIS_DIM, DTYPE_BYTES, Config, Expr, Kernel, Module, only, pipe, symbol, tile
from attngen.targets.hopper.configs.barriers import instances_of, stored_pipelines
from attngen.targets.hopper.configs.common import smem_limit
from attngen.targets.hopper.configs.head_dims import width_of
from attngen.targets.hopper.configs.sm90 import COUNTER
from attngen.targets.hopper.configs.work_tiles import tile_metadata
from attngen.targets.hopper.printing.context import WarpSpecializedContext
from attngen.targets.hopper.printing.kernels import partitions
from attngen.tiles.sizes import STAGES, sizes, tile_bytes
from attngen.tiles.tiles import evaluate

BARRIER_BYTES, BARRIER_ALIGNMENT = 8, 16
SWIZZLE_BYTES = 128  # of a row of the widest swizzle, whose pattern repeats every eight rows
TILE_DIMS = 3  # leading dimensions of a buffer of tiles: the stage, and the tensor's batch and head


def sram_bytes(module: Module, kernel: Kernel, config: Config) -> int:
    """Bytes of shared memory of a warp-specialized kernel as it is printed."""
    captures, warps = _captures(module, kernel)
    buffers = [*_pipelines(module, kernel, config), (captures, DTYPE_BYTES["ptr"]), (warps, 1)]
    end = 0
    for size, alignment in sorted(buffers, key=lambda buffer: -buffer[0]):
        end = -(-end // alignment) * alignment + size
    return end


def row_formula(module: Module, kernel: Kernel, config: Config) -> Expr:
    """Bytes of shared memory under a config: those of tiles in closed form, plus the others as a number."""
    tiles: Expr = sympy.Add(*(_tiles(module, kernel, pipeline) for pipeline in pipelines(kernel)))
    return tiles + (sram_bytes(module, kernel, config) - int(evaluate(tiles, sizes(module, config))))


def pipeline_bytes(module: Module, kernel: Kernel, config: Config) -> int:
    """Bytes of a kernel's pipelines and their barriers only, which are known before the kernel can be printed."""
    return sum(size for size, _ in _pipelines(module, kernel, config))


def registers(module: Module, kernel: Kernel, config: Config) -> int:
    """Registers per thread of the warp group that has most of them."""
    return max(block.warp_group.registers for block in kernel.warp_groups if block.warp_group)


def why_not_fit(module: Module, kernel: Kernel, config: Config, change: str = "") -> str | None:
    """Return one sentence on why a config does not fit, or None."""
    need, limit = sram_bytes(module, kernel, config), smem_limit(kernel.ctas_per_sm)
    tile = f"BLOCK_Q={config.block_q}, BLOCK_KV={config.block_kv} and num_stages={config.num_stages}"
    return (
        f"with {tile} the kernel @{kernel.name} needs {need:,} bytes of shared memory, and has {limit:,}"
        if need > limit
        else None
    )


def pipelines(kernel: Kernel) -> list[pipe.Pipeline]:
    return list(only(kernel.ops(), pipe.Pipeline))


def stages_of(pipeline: pipe.Pipeline, config: Config) -> int:
    """Number of stages of a pipeline under a config."""
    return int(evaluate(pipeline.stages, {"num_stages": config.num_stages}))


def _tiles(module: Module, kernel: Kernel, pipeline: pipe.Pipeline) -> Expr:
    """Bytes of a pipeline's tiles. If each instance has a copy of it, the copies share the rows of the program tile."""
    part_of_whole = {whole: part for part, whole in pipe.TILE_DIM.items()}
    tile = replace(pipeline.type, dims=tuple(part_of_whole.get(d, d) for d in pipeline.type.dims))
    tile = replace(tile, dims=(*tile.dims[:-1], str(width_of(module, pipeline)))) if pipeline.columns else tile
    times = 1 if AXIS_DIM[kernel.program_axis] in pipeline.type.dims else instances_of(kernel, pipeline)
    return times * pipeline.stages.subs(symbol("num_stages"), STAGES) * tile_bytes(tile)


def _pipelines(module: Module, kernel: Kernel, config: Config) -> list[tuple[int, int]]:
    """The bytes and the alignment of each pipeline's tiles, and of its barriers."""
    known, buffers, stored = sizes(module, config), list[tuple[int, int]](), stored_pipelines(kernel)
    for pipeline in pipelines(kernel):
        if pipeline.metadata_of or len(pipeline.type.dims) == 1:  # row vectors and tile indices
            buffers.append((int(evaluate(_tiles(module, kernel, pipeline), known)), BARRIER_ALIGNMENT))
        elif pipeline.type.dims:
            width = (
                SWIZZLE_BYTES
                if pipeline.name in stored
                else config.elem_bytes * (pipeline.columns or width_of(module, pipeline))
            )
            buffers.append((int(evaluate(_tiles(module, kernel, pipeline), known)), 8 * min(SWIZZLE_BYTES, width)))
        else:
            numbers = len(tile_metadata(kernel))
            buffers.append(
                (stages_of(pipeline, config) * numbers * DTYPE_BYTES[pipeline.type.dtype], BARRIER_ALIGNMENT)
            )
        for _ in range(
            2 if stored.get(pipeline.name) or pipeline.mbarrier_release else pipeline.name in _filled(kernel)
        ):
            buffers.append(
                (stages_of(pipeline, config) * instances_of(kernel, pipeline) * BARRIER_BYTES, BARRIER_ALIGNMENT)
            )
    return buffers


def _filled(kernel: Kernel) -> set[str]:
    """The pipelines whose `full` barriers something waits for: those that TMA or a work loop fills, except row vectors,
    which share the barriers of their tile's pipeline. Barriers of other pipelines take no room."""
    filled = {op.pipeline for op in only(kernel.ops(), pipe.ProducerLoad, pipe.WorkLoop)}
    return filled - {pipeline.name for pipeline in pipelines(kernel) if pipeline.metadata_of}


@lru_cache(maxsize=256)
def _captures(module: Module, kernel: Kernel) -> tuple[int, int]:
    """For all partitions except the first: the bytes of their captures, and the number of their warps, each of which
    takes a byte.

    A partition captures the parameters of its warp group's function. Partitions share common captures.
    """
    context = WarpSpecializedContext(module, kernel.name)
    printed = partitions(context.warp_specialized())
    names = {name for warp_group, _ in printed["partitions"][1:] for name in warp_group.params}
    buffers: dict[str, int] = {}  # name -> number of dimensions
    for pipeline, op in context.pipelines.items():
        short = pipeline.removesuffix("_pipeline")
        to_other_group = context.counting.stored.get(pipeline)
        # Tiles that only consumers share have no batch and no head.
        among_consumers = to_other_group is False or op.exchange or len(op.type.dims) == 1
        tile = len(op.type.dims) + (1 if among_consumers else TILE_DIMS)
        buffers |= {
            f"{short}_smem": tile if op.type.dims and not op.metadata_of else 2,
            f"{short}_full": 2,
            f"{short}_empty": 2,
        }
        names -= set() if pipeline in _filled(kernel) or to_other_group else {f"{short}_full"}
    sizes_of_captures = (
        DTYPE_BYTES["ptr"] + 4 * buffers[name] if name in buffers else DTYPE_BYTES[_dtype(kernel, name)]
        for name in names
    )
    return sum(sizes_of_captures), 4 * -(-sum(printed["warps"]) // 4)


def _dtype(kernel: Kernel, name: str) -> str:
    """The type of a function's parameter: `ptr` for tensors and descriptors; `i32` for strides, sizes and tile
    coordinates."""
    op = next((op for op in kernel.block("entry").ops if op.name == name), None)
    if name == COUNTER:
        return "ptr"
    if isinstance(op, tile.Arg):
        return op.type.dtype if op.role == "scalar" else "ptr"
    return next(iter(op.results().values())).dtype if op is not None else "i32"
