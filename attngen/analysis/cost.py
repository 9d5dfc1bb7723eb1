"""The model that tile selection minimises: cycles of one SM per tile, times the tiles that the mask leaves.

    cycles = MATRIX * (flops of the tile's dots / rate) + ALU * scores + STREAM * bytes loaded + LATENCY(stages) / occupancy

Programs of 8 warps pay SPLIT of the first two more, for keeping their halves in step. Partial tiles of the forward take MASKED *
scores / occupancy on top: its running maximum waits for the mask (where data lists blocks it is not known which are partial). Where
data bounds the loop row by row, rows up to REACH away count. The constants are a least-squares fit to measured schedules of the three
kernels on one H200, on which the model's choice is 2 to 3% slower than the best on average, and MASKED to masked tiles alone; REACH is
half a document of usual length (docs/perf-log.md, sections 2 and 12).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from attngen.analysis.sram import SCORES, misfit, registers_per_thread, score_tile, sizes, sram_bytes, streamed_bytes, tile_width
from attngen.analysis.tiles import count_tiles
from attngen.devices import CLASSES
from attngen.ir.graph import Kernel, Module, Row
from attngen.ir.ops import Dot, Gather, Load, SoftmaxStep

MATRIX = 0.62
ALU = 0.032  # cycles per score: the exponential and the arithmetic around it
STREAM = 0.008  # cycles per byte that a turn loads from L2
LATENCY = {1: 2500, 2: 1080, 3: 665}  # cycles per turn that only other programs on the SM hide, by depth of the ring
SPLIT_MATRIX, SPLIT_ALU = 0.2, 0.019
MASKED = 0.17  # cycles per score of a partial tile of the forward that only other programs on the SM hide
REACH = 500  # rows before and after a tile that stand for what documents and the like let it see
# Triton's compiler, as measured (docs/perf-log.md); the limits of the hardware are in devices.py
OTHER_REGISTERS = 70  # per thread: what it takes besides live tiles
LIVE_LIMIT = 170  # registers per thread that live tiles may take before it spills
FMA_LIMIT = 512  # multiply-adds of one dot per thread, where products are not on matrix units, before it spills
MANY_ROWS = 4096  # rows that stand for "any number"


def mode(module: Module, elem_bytes: int) -> str:
    """How products of elements of that size are computed: `16-bit`, `tf32` or `ieee`."""
    return "16-bit" if elem_bytes == 2 else module.precision


@cache
def _listed() -> frozenset[str]:
    lines = Path(__file__).with_name("spills.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def spills(module: Module, kernel: Kernel, row: Row) -> bool:
    """Whether a schedule is known to spill registers (spills.txt), though the model says that it need not; `attngen verify` finds such."""
    key = schedule_key(module, kernel, row)
    return any(line in _listed() for line in (key, f"{key} mask={module.mask}"))


def schedule_key(module: Module, kernel: Kernel, row: Row) -> str:
    """A schedule as spills.txt names it: `sm80 dkdv+group 128/128 bytes=2 64x32x4x2`, for all masks but lists of blocks.

    Its loop over heads, lists of blocks and what they are made of, dropout and what modifies scores are part of the name.
    """
    name = kernel.name + "".join(f"+{loop.body}" for loop in kernel.loops if loop.cls == "all")
    if module.blocks is not None and kernel.dots:
        name += "+blocks" if not module.blocks.data else "+data+pairs" if _reads_pairs(kernel) else "+data"
    name += "+dropout" * kernel.draws
    qk, v = tile_width(module.head_dim_qk), tile_width(module.head_dim_v)
    tile = f"{row.block_q}x{row.block_kv}x{row.num_warps}x{row.num_stages}"
    score = f" score={module.score}" if module.score != "none" and kernel.loops else ""
    return f"{row.device} {name} {qk}/{v} bytes={row.elem_bytes} {tile}{score}"


def _reads_pairs(kernel: Kernel) -> bool:
    """Whether the mask reads something for each score."""
    return any(isinstance(op, (Gather, Load)) and set(op.type.dims) == SCORES for op in kernel.ops())


def cost(module: Module, kernel: Kernel, row: Row) -> float:
    """Modelled SM cycles of a kernel over one head with as many rows as the schedule row is for; inf if it cannot run."""
    if misfit(module, kernel, row) or registers_per_thread(module, kernel, row) > LIVE_LIMIT or spills(module, kernel, row):
        return float("inf")
    device = CLASSES[row.device]
    threads = row.num_warps * device.threads_per_warp
    tiled = any(loop.cls != "all" for loop in kernel.loops)
    how = mode(module, row.elem_bytes)
    rows_of_scores = score_tile(module, kernel, row)[0] if kernel.dots else 0
    crowded = how != "ieee" and row.num_warps > max(4, rows_of_scores // 16)  # warps that share rows split the columns, at half the rate
    matrix = 0.0
    for op in kernel.dots:
        flops = dot_flops(module, kernel, op, row, device.matrix_rows if how != "ieee" else 1)
        if how == "ieee" and flops / 2 / threads > FMA_LIMIT:
            return float("inf")
        matrix += flops / device.flops_per_cycle[how] * (2 if crowded else 1)
    scores = row.block_q * row.block_kv
    split = row.num_warps > 4
    cycles = (MATRIX + SPLIT_MATRIX * split) * matrix + (ALU + SPLIT_ALU * split) * scores
    cycles += STREAM * streamed_bytes(module, kernel, row)
    programs = occupancy(module, kernel, row)
    cycles += LATENCY[min(row.num_stages, 3)] / programs
    if not tiled:
        return cycles
    rows = row.max_rows or MANY_ROWS
    shape = (rows, MANY_ROWS, row.block_q, row.block_kv)
    cycles *= count_tiles(kernel, *shape, reach=REACH)
    listed = module.blocks is not None and module.blocks.data  # data alone says which tiles are partial
    if not listed and any(isinstance(op, SoftmaxStep) for op in kernel.ops()):
        cycles += MASKED * scores / programs * count_tiles(kernel, *shape, "partial", REACH)
    return cycles


def occupancy(module: Module, kernel: Kernel, row: Row) -> int:
    """Programs that share an SM: bound by shared memory and by registers."""
    device = CLASSES[row.device]
    threads = row.num_warps * device.threads_per_warp
    registers = min(device.registers_per_thread, registers_per_thread(module, kernel, row) + OTHER_REGISTERS)
    by_sram = device.smem_per_sm // max(1, sram_bytes(module, kernel, row) + device.smem_reserved)
    return max(1, min(by_sram, device.registers_per_sm // (registers * threads)))


def dot_flops(module: Module, kernel: Kernel, op: Dot, row: Row, least_rows: int = 1) -> int:
    """FLOPs of one dot on one tile; an accumulator of fewer rows than the matrix instruction still takes all of its."""
    dims = sizes(module, row)
    a, b = (dims[d.removesuffix("_PAD")] for d in op.type.dims)
    return 2 * max(a, least_rows) * b * dims[op.over.removesuffix("_PAD")]


def best_stages(module: Module, kernel: Kernel, row: Row) -> Row:
    """The row with the ring depth that costs least; where all may spill, the deepest that fits."""

    def price(r: Row) -> tuple[float, bool]:
        return cost(module, kernel, r), misfit(module, kernel, r) is not None

    return min((replace(row, num_stages=s) for s in (3, 2, 1)), key=price)
