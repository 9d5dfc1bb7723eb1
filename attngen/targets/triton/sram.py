"""Shared-memory bytes of a kernel in closed form, from the values that are live in its IR."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import sympy

from attngen.devices import CLASSES, DeviceClass
from attngen.heuristics import COMBINE_COLUMNS_PER_THREAD
from attngen.ir import AXIS_DIM, Config, Expr, Kernel, Module, Op, cdiv, only, symbol, tile
from attngen.ir.names import STATISTICS
from attngen.targets.triton.matrix_units import (
    MFMA_ROWS,
    SCORES,
    aligned,
    in_sram,
    in_tf32,
    moved_scores,
    on_matrix_units,
    random_bytes,
    score_tile,
)
from attngen.tiles.sizes import ELEM, STAGES, elements, share_of, sizes, tile_bytes, tile_width
from attngen.tiles.tiles import evaluate

BARRIERS = 32  # bytes of the barriers of operations that are asynchronous to the program's warps
BARRIER, FEW_PRODUCTS = 8, 4  # bytes of one barrier; with more products than this, each has one per stage
TMA_BARRIERS = 64  # bytes of the barriers of TMA copies in flight
ALIGNMENT = 1024  # bytes: alignment of tiles that matrix instructions read from shared memory
WARPS = 8  # warps of programs that reduce tiles to scalars

_max = cache(sympy.Max)  # cached because sympy is slow here, and kernels are similar


@cache
def sram_formula(
    kernel: Kernel,
    device: DeviceClass,
    matrix_units: bool,
    moved: int,
    random: int,
    aligned: bool = True,
    tma: bool = False,
    tf32: bool = False,
) -> Expr:
    """Shared-memory bytes of one program: tiles loaded once, multi-buffered tiles loaded in a loop, and scratch.

    The number of buffers under `stages` depends on the device: whether its matrix instructions read operands from
    shared memory (see DeviceClass). Scratch is for the tiles of scores that change layout at one time on their way to a
    product (`moved_scores`), for the random words of dropout (`random_bytes` per score), and for tiles that are
    rewritten; for kernels with such tiles the formula is an upper bound.

    tf32: products are in TF32, where a streamed tile that several of them read changes layout; an upper bound, too.
    """
    from_shared = device.reads_shared and matrix_units
    rewrites = bool(kernel.traits.rewriting)
    shares_stationary = device.shares_stationary and not rewrites  # tiles loaded once and in a loop share their room
    loads = [op for op in only(kernel.ops(), tile.Load) if not _is_pair_mask(kernel, op)]
    pairs = list(only(kernel.ops(), tile.Deinterleave))
    stationary = [tile_bytes(op.type) for op in loads if in_sram(op) and not in_loop(kernel, op)]
    stationary += [pair_bytes(op) for op in pairs if not in_loop(kernel, op)]
    scratch = sympy.Add(_made_bytes(kernel), *(_scratch(kernel, op, device, from_shared, tma) for op in kernel.ops()))
    # Values of 8 bits return to shared memory once they have 16; so does a tile of all columns that two products read
    # in different layouts.
    scratch += sympy.Add(
        *(
            pair_bytes(op)
            for op in pairs
            if in_loop(kernel, op) and (from_shared or device.shares_stationary or _is_interleaved_again(kernel, op))
        )
    )
    streamed = sympy.Add(
        *(_streamed(kernel, op, device, from_shared, tma, tf32) for op in loads if in_sram(op) and in_loop(kernel, op))
    )
    if not shares_stationary:  # rows of statistics are copied ahead, too
        statistics = sympy.Add(*(tile_bytes(op.type) * (STAGES - 1) for op in loads if _is_statistic(kernel, op)))
        per_program = (
            BARRIERS if len(kernel.traits.dots) <= FEW_PRODUCTS else BARRIER * len(kernel.traits.dots) * STAGES
        )
        barriers = per_program if device.keeps_reused and from_shared else 0
        if from_shared or rewrites:
            barriers += TMA_BARRIERS * tma
            statistics = ALIGNMENT * cdiv(statistics + barriers, ALIGNMENT) + barriers
        streamed += statistics
    streamed += scratch + symbol("BLOCK_Q") * symbol("BLOCK_KV") * _max(moved * ELEM, random)  # not at one time
    if kernel.traits.normalises and not (matrix_units or device.shares_stationary):
        streamed += 4 * symbol("BLOCK_Q")  # maxima and sums of rows that warps share
    streamed += _reduce_bytes(kernel, aligned)
    return _max(*stationary, streamed) if shares_stationary else sympy.Add(*stationary, streamed)


def _is_pair_mask(kernel: Kernel, op: Op) -> bool:
    """True if the op loads a boolean per score, which is too narrow to be copied ahead."""
    return (
        isinstance(op, tile.Load) and op.type.dtype == "b1" and set(op.type.dims) == SCORES and bool(kernel.traits.dots)
    )


def _is_statistic(kernel: Kernel, op: tile.Load) -> bool:
    """True if a load in a loop has its buffers among those of the statistics, which are aligned."""
    if in_sram(op) or is_rewritten(kernel, op) or not op.type.dims or not in_loop(kernel, op):
        return False
    return op.type.dtype == "b1" or len(op.type.dims) > 1 or kernel.accessed(op)[0].name in STATISTICS


def _scratch(kernel: Kernel, op: Op, device: DeviceClass, from_shared: bool, tma: bool) -> Expr:
    """Bytes of shared memory for one op, other than the buffers of its tile."""
    if isinstance(op, (tile.Scatter, tile.Store)):  # scores change layout on their way out
        type_ = kernel.type_of(op.value)
        return tile_bytes(type_) if set(type_.dims) == SCORES else sympy.Integer(0)
    if isinstance(op, tile.Gather) and set(op.type.dims) == SCORES:  # copied ahead, too
        return tile_bytes(op.type) * (1 if device.shares_stationary else STAGES - 1)
    if isinstance(op, tile.Gather) and len(op.type.dims) == 1 and op.type.dtype != "b1" and in_loop(kernel, op):
        return tile_bytes(op.type) * (STAGES if _are_pages(kernel, op) else STAGES - 1)
    if isinstance(op, tile.Map) and tma and not from_shared and kernel.traits.zeroes_past_end(op):
        return tile_bytes(op.type)  # each product then takes a copy in its layout
    if not isinstance(op, tile.Load):
        return sympy.Integer(0)
    if _is_pair_mask(kernel, op):  # changes layout on its way
        return tile_bytes(op.type)
    if is_rewritten(kernel, op):
        # Changes layout on its way out; the accumulators of matrix units with memory of their own wait for it.
        return tile_bytes(op.type) * (STAGES if device.keeps_reused else 1)
    if not in_sram(op) and op.type.dims and in_loop(kernel, op) and not _is_statistic(kernel, op):
        return tile_bytes(op.type) * (STAGES - 1)
    return sympy.Integer(0)


def _streamed(kernel: Kernel, op: tile.Load, device: DeviceClass, from_shared: bool, tma: bool, tf32: bool) -> Expr:
    """Bytes of the buffers of a tile that a loop loads."""
    widened = kernel.traits.reads_quantised and not _is_operand(kernel, op)  # in registers, before products take it
    depth = STAGES if (from_shared and not widened) or kernel.traits.rewriting else _max(1, STAGES - 1)
    size = share_of(op) * tile_bytes(op.type) * _copies(kernel, op, depth, device, from_shared, tf32)
    if tma and not from_shared and kernel.traits.zeroes_past_end(op):  # also a copy whose rows past the end are zeros
        size += tile_bytes(op.type) * (2 if kernel.traits.reads_quantised else 1)
    return size


def _is_operand(kernel: Kernel, op: tile.Load) -> bool:
    return any(op.name in (dot.a, dot.b) for dot in kernel.traits.dots)


def _is_interleaved_again(kernel: Kernel, op: tile.Deinterleave) -> bool:
    return any(isinstance(kernel.op(user), tile.Interleave) for user in kernel.graph.successors(op.name))


def pair_bytes(op: tile.Deinterleave) -> Expr:
    """Bytes of the even and the odd columns of a tile, together."""
    return 2 * tile_bytes(op.type)


def _are_pages(kernel: Kernel, op: tile.Gather) -> bool:
    """True if a gather reads page numbers, by which tiles are loaded."""
    return any(user.pages == op.name for user in only(kernel.ops(), tile.Load))


def _combine_bytes(module: Module, config: Config) -> Expr:
    """Bytes of a kernel that combines splits, which it holds in registers.

    With several warps, each shares one integer while they add up lengths. A row with columns for less than half a warp
    changes layout before it is stored.
    """
    if config.num_warps > 1:
        return sympy.Integer(4 * config.num_warps)
    width = tile_width(module.head_dim_v)
    return (
        width * ELEM
        if 2 * width < COMBINE_COLUMNS_PER_THREAD * CLASSES[config.device].threads_per_warp
        else sympy.Integer(0)
    )


def _made_bytes(kernel: Kernel) -> Expr:
    """Bytes of operands that are computed on chip and then transposed, in fp32: they may be moved before the cast."""
    made = (
        (kernel.type_of(dot.a), dot.over) for dot in kernel.traits.dots if not isinstance(kernel.op(dot.a), tile.Load)
    )
    return sympy.Add(*(4 * elements(type_) for type_, over in made if type_.dims[0] == over))


def _copies(kernel: Kernel, op: tile.Load, depth: Expr, device: DeviceClass, from_shared: bool, tf32: bool) -> Expr:
    """The number of copies of a streamed tile in shared memory: its buffers, and more if products read it both over its
    rows and over its columns.

    In TF32, products that read it in both ways need a copy in another layout in addition to a single buffer, or part of
    such a copy if nothing is copied ahead. A tile that several products read in one way has one copy more if these
    products run ahead of each other; on gfx942 it has only one, because it is copied ahead to registers. A tile has one
    copy less if the next product continues its product's sum.
    """
    parts = [
        1 - share_of(part) for part in only(kernel.ops(), tile.Load) if part.columns_of == op.name
    ]  # a part of all columns is the tile itself
    readers = [dot for dot in kernel.traits.dots if op.name in (dot.a, dot.b)]
    if not parts and len({dot.over for dot in readers}) < 2:
        if is_read_alike(kernel, op):
            more = sympy.Min(1, STAGES - 1) if device.keeps_reused else sympy.Integer(0)
            return sympy.Integer(1) if device.shares_stationary else depth + more
        return depth - (sympy.Min(1, STAGES - 1) if device.keeps_reused and is_continued(kernel, op) else 0)
    # A part that has all columns is the tile itself, which products then read twice.
    if len(parts) + len(readers) < 2:
        return depth
    copies = depth + (sympy.Mul(sympy.Min(1, STAGES - 1), *parts) if device.keeps_reused and from_shared else 0)
    least = sympy.Integer(2) if from_shared else sympy.Min(2, 1 + STAGES / 2)
    return _max(least, copies) if tf32 else copies


def is_read_alike(kernel: Kernel, op: tile.Load) -> bool:
    """True if several products read a streamed tile, all over the same dimension."""
    read = [dot.over for dot in kernel.traits.dots if op.name in (dot.a, dot.b)]
    return len(read) > 1 and len(set(read)) == 1 and in_loop(kernel, op)


def is_continued(kernel: Kernel, op: tile.Load) -> bool:
    """True if another product of the same iteration accumulates onto the product of scores and this tile."""
    continued = {dot.acc for dot in kernel.traits.dots}
    return any(op.name in (dot.a, dot.b) and dot.over in SCORES and dot.name in continued for dot in kernel.traits.dots)


def _reduce_bytes(kernel: Kernel, aligned: bool) -> Expr:
    """Bytes through which warps reduce to a scalar, or to a row."""
    shared: Expr = sympy.Integer(0)
    reduced = list(only(kernel.ops(), tile.Reduce))
    counts = any(not op.type.dims and in_loop(kernel, op) for op in reduced)
    if counts:
        shared += 4 * WARPS  # one scalar at a time
    rows = any(op.type.dims == (AXIS_DIM[kernel.program_axis],) for op in only(kernel.ops(), tile.Gather, tile.Load))
    if (counts and rows) or any(not in_loop(kernel, op) for op in reduced if not kernel.traits.dots):
        # Rows change layout; before a loop with buffers, in their room. Warps that share rows have one each.
        shared += 4 * symbol(AXIS_DIM[kernel.program_axis]) * (1 if aligned else 4)
    return shared


def _prepare_bytes(kernel: Kernel, config: Config) -> Expr:
    """Bytes through which the warps of a preparing kernel exchange elements: a thread loads consecutive ones, and scans
    others.

    If it also reads and writes at addresses computed from data, threads exchange these, of 64 bits. Warps that compare
    queries with keys exchange their results for each key.
    """
    per_thread = config.block_kv // (config.num_warps * CLASSES[config.device].threads_per_warp)
    if any(only(kernel.ops(), tile.Scan)) and per_thread > 2:  # one or two are loaded as they are scanned
        computed = any(op.uses for op in only(kernel.ops(), tile.Gather, tile.Scatter))
        return (8 if computed else 4) * symbol("BLOCK_KV")
    compared = any(set(kernel.type_of(op.value).dims) == SCORES for op in only(kernel.ops(), tile.Reduce))
    return 4 * symbol("BLOCK_KV") if compared else sympy.Integer(0)


def _few_rows(kernel: Kernel, config: Config) -> bool:
    """True if rewritten tiles have fewer rows than the matrix instruction that reads operands from shared memory."""
    device = CLASSES[config.device]
    return (
        bool(kernel.traits.rewriting)
        and device.reads_shared
        and not device.keeps_reused
        and config.block_q < device.matrix_rows
    )


def _converted_bytes(kernel: Kernel) -> Expr:
    """Bytes of the operands that a smaller matrix instruction reads in another layout, for few rows of queries."""
    sums = (kernel.op(dot.b) for dot in kernel.traits.dots if dot.type.dims[0] != AXIS_DIM[kernel.program_axis])
    return sympy.Add(*(tile_bytes(op.type) for op in sums if in_sram(op)))


def is_rewritten(kernel: Kernel, op: tile.Load) -> bool:
    """True if a load's tile is stored again, because it is accumulated in HBM. Rows of statistics do not count."""
    return (
        len(op.type.dims) == 2 and not in_sram(op) and kernel.graph.nodes[op.name]["block"] in kernel.traits.rewriting
    )


def in_loop(kernel: Kernel, op: Op) -> bool:
    """True if an op runs once per loop tile, not once per program tile."""
    over_program_tiles = {loop.body for loop in kernel.loops if loop.var == kernel.program_axis}
    return bool(kernel.graph.nodes[op.name]["block"] not in ("entry", *over_program_tiles))


def sram_bytes(module: Module, kernel: Kernel, config: Config) -> int:
    """Shared-memory bytes of one program under a config."""
    return _sram_bytes(module, kernel, replace(config, max_rows=None, measured=False))


@lru_cache(maxsize=10_000)  # the configs of a few modules, which are queried again for other numbers of rows
def _sram_bytes(module: Module, kernel: Kernel, config: Config) -> int:
    return int(evaluate(row_formula(module, kernel, config), sizes(module, config)))


def row_formula(module: Module, kernel: Kernel, config: Config) -> Expr:
    """The closed form for a config's device, element size and tiles."""
    if kernel.traits.prepares:
        return _prepare_bytes(kernel, config)
    if kernel.traits.combines_splits:
        return _combine_bytes(module, config)
    if not kernel.traits.dots and any(
        only(kernel.ops(), tile.Interleave)
    ):  # pairs change layout, one tensor's after the other's
        return _max(*(tile_bytes(op.type) for op in only(kernel.ops(), tile.Interleave)))
    on_units, moved = on_matrix_units(module, kernel, config), moved_scores(module, kernel, config)
    device, random, tf32 = CLASSES[config.device], random_bytes(kernel, config), in_tf32(module, config)
    formula = sram_formula(kernel, device, on_units, moved, random, aligned(module), config.tma, tf32) * _warps_per_row(
        module, kernel, config
    )
    if on_units and device.shares_stationary and reduces_single_product(kernel):
        return formula + 4 * symbol(AXIS_DIM[kernel.program_axis]) * min(
            config.num_warps, score_tile(module, kernel, config)[1] // MFMA_ROWS
        )
    return formula + _converted_bytes(kernel) if on_units and _few_rows(kernel, config) else formula


def _warps_per_row(module: Module, kernel: Kernel, config: Config) -> int:
    """The number of warps that share a row, for a kernel without products that sums rows; 1 for others. A thread holds
    16 bytes of consecutive columns."""
    summed = any((op.over, len(op.type.dims)) == ("D_V", 1) for op in only(kernel.ops(), tile.Reduce))
    if kernel.traits.dots or not summed or not aligned(module):
        return 1
    of_warp = 16 * CLASSES[config.device].threads_per_warp
    return max(1, tile_width(module.head_dim_v) * config.elem_bytes // of_warp)


def reduces_single_product(kernel: Kernel) -> bool:
    """True if the scores of the only product are reduced: warps then hold parts of rows, and exchange partial sums."""
    return len(kernel.traits.dots) == 1 and any(only(kernel.ops(), tile.Reduce))
