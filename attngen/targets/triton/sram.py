"""On-chip bytes of a kernel, in closed form, from the values that are live in its IR."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import TypeGuard

import sympy

from attngen.devices import CLASSES, DeviceClass
from attngen.heuristics import JOINED_EACH
from attngen.ir.expr import Expr, cdiv, symbol
from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.names import STATISTICS
from attngen.ir.ops import (
    AXIS_DIM,
    Deinterleave,
    Dot,
    Dropout,
    Gather,
    Init,
    Interleave,
    Load,
    Map,
    Mask,
    Op,
    Reduce,
    Scan,
    Scatter,
    SoftmaxStep,
    Store,
    unpadded,
)
from attngen.tiles.sizes import ELEM, STAGES, elements, mode, share_of, sizes, tile_bytes, tile_width
from attngen.tiles.tiles import evaluate

BARRIERS = 32  # bytes, of what runs beside the program's warps
BARRIER, FEW_PRODUCTS = 8, 4  # bytes of one; of more products than so many, each has one in each stage
TMA_BARRIERS = 64  # bytes, of the copies in flight
ALIGNMENT = 1024  # bytes, of tiles that matrix instructions read from shared memory
WARPS = 8  # of programs that reduce tiles to single numbers
TENSOR_ROWS = 128  # of a column of tensor memory
MFMA_ROWS = 32  # of the largest matrix instruction of gfx942
GROUP_WARPS = 4  # that join in one of the largest matrix instructions of sm90 and sm100
NARROW = 64  # bytes of a tile's row, at most, with which the tile's descriptor has its highest bit set
JOINED_ROWS = 32  # that four threads of a matrix instruction have, of operands whose elements come from joined words
SCORES = {"BLOCK_Q", "BLOCK_KV"}  # dimensions of what has one element per score

_max = cache(sympy.Max)  # sympy takes its time over it, and kernels are alike


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
    """Shared-memory bytes of one program: tiles loaded once, a ring of buffers for each tile loaded in a loop, scratch.

    How deep a ring of `stages` is depends on whether matrix instructions read their operands from shared memory (see
    DeviceClass); scratch is for the tiles of scores that change layout at one time on their way to a product
    (`moved_scores`), for what dropout draws (`random_bytes` of a score), and for tiles that are rewritten. Of kernels
    with such it is an upper bound.

    tf32: products are in TF32, for which a streamed tile that several of them read changes layout; an upper bound too.
    """
    from_shared = device.reads_shared and matrix_units
    rewrites = bool(kernel.rewriting)
    ahead = _max(1, STAGES - 1)
    shares_stationary = device.shares_stationary and not rewrites  # what is loaded in a loop has room of its own
    stationary: list[Expr] = []
    streamed: Expr = sympy.Integer(0)
    statistics: Expr = sympy.Integer(0)
    scratch: Expr = _made(kernel)
    for op in kernel.ops():
        if (
            isinstance(op, (Scatter, Store)) and set(kernel.type_of(op.value).dims) == SCORES
        ):  # changes layout on its way
            scratch += tile_bytes(kernel.type_of(op.value))
        if (
            isinstance(op, Load) and op.type.dtype == "b1" and set(op.type.dims) == SCORES and kernel.dots
        ):  # too narrow to copy ahead;
            scratch += tile_bytes(op.type)  # it changes layout on its way
            continue
        if isinstance(op, Gather) and set(op.type.dims) == SCORES:  # copied ahead too
            scratch += tile_bytes(op.type) * (1 if device.shares_stationary else STAGES - 1)
        if isinstance(op, Gather) and len(op.type.dims) == 1 and op.type.dtype != "b1" and _in_loop(kernel, op):
            scratch += tile_bytes(op.type) * (STAGES if _are_pages(kernel, op) else STAGES - 1)
        if (
            isinstance(op, Map) and tma and not from_shared and kernel.clears(op)
        ):  # each product then takes a copy in its layout
            scratch += tile_bytes(op.type)
        if not isinstance(op, Load):
            continue
        if op.type.space == "sram" and not _in_loop(kernel, op):
            stationary.append(tile_bytes(op.type))
        elif op.type.space == "sram":
            widened = kernel.reads_quantised and not _is_operand(kernel, op)  # in registers, before products take it
            depth = STAGES if (from_shared and not widened) or rewrites else ahead
            streamed += share_of(op) * tile_bytes(op.type) * _copies(kernel, op, depth, device, from_shared, tf32)
            if (
                tma and not from_shared and kernel.clears(op)
            ):  # beside its ring, a copy whose rows past the end are zeros
                streamed += tile_bytes(op.type) * (2 if kernel.reads_quantised else 1)
        elif is_rewritten(
            kernel, op
        ):  # changes layout on its way out; the sums of matrix units that have memory of their own wait for it
            scratch += tile_bytes(op.type) * (STAGES if device.keeps_reused else 1)
        elif op.type.dims and _in_loop(kernel, op):
            if op.type.dtype == "b1" or len(op.type.dims) > 1 or kernel.accessed(op)[0].name in STATISTICS:
                statistics += tile_bytes(op.type) * (STAGES - 1)
            else:  # beside the statistics, which are aligned
                scratch += tile_bytes(op.type) * (STAGES - 1)
    stationary += [_columns(op) for op in kernel.ops() if isinstance(op, Deinterleave) and not _in_loop(kernel, op)]
    unzips = [op for op in kernel.ops() if isinstance(op, Deinterleave) and _in_loop(kernel, op)]
    # Numbers of 8 bits go there again, once they have 16; so does a tile of all columns, which two products take in
    # different layouts.
    scratch += sympy.Add(
        *(_columns(op) for op in unzips if from_shared or device.shares_stationary or _is_zipped(kernel, op))
    )
    if not shares_stationary:  # rows of statistics are copied ahead too
        beside = BARRIERS if len(kernel.dots) <= FEW_PRODUCTS else BARRIER * len(kernel.dots) * STAGES
        barriers = beside if device.keeps_reused and from_shared else 0
        if from_shared or rewrites:
            barriers += TMA_BARRIERS * tma
            statistics = ALIGNMENT * cdiv(statistics + barriers, ALIGNMENT) + barriers
        streamed += statistics
    streamed += scratch + symbol("BLOCK_Q") * symbol("BLOCK_KV") * _max(moved * ELEM, random)  # not at one time
    if kernel.normalises and not (matrix_units or device.shares_stationary):
        streamed += 4 * symbol("BLOCK_Q")  # maxima and sums of rows that warps share
    streamed += _reduced(kernel, aligned)
    return _max(*stationary, streamed) if shares_stationary else sympy.Add(*stationary, streamed)


def _is_operand(kernel: Kernel, op: Load) -> bool:
    """Whether products take a tile as it is loaded."""
    return any(op.name in (dot.a, dot.b) for dot in kernel.dots)


def _is_zipped(kernel: Kernel, op: Deinterleave) -> bool:
    """Whether even and odd columns become one tile again."""
    return any(isinstance(kernel.op(user), Interleave) for user in kernel.graph.successors(op.name))


def _columns(op: Deinterleave) -> Expr:
    """Bytes of the even and the odd columns of a tile."""
    return 2 * tile_bytes(op.type)


def _are_pages(kernel: Kernel, op: Gather) -> bool:
    """Whether they are the numbers of the pages in which rows of tiles lie."""
    return any(isinstance(user, Load) and user.pages == op.name for user in kernel.ops())


def _joined(module: Module, config: Config) -> Expr:
    """Bytes of a kernel that joins parts, which lie in registers. Several warps add up lengths, of which each has a
    number. Where a row has columns for less than half a warp, it changes layout before it is stored."""
    if config.num_warps > 1:
        return sympy.Integer(4 * config.num_warps)
    width = tile_width(module.head_dim_v)
    return width * ELEM if 2 * width < JOINED_EACH * CLASSES[config.device].threads_per_warp else sympy.Integer(0)


def _made(kernel: Kernel) -> Expr:
    """Bytes of operands that are made on chip, and turned; in fp32 if they are moved before they are cast."""
    made = ((kernel.type_of(dot.a), dot.over) for dot in kernel.dots if not isinstance(kernel.op(dot.a), Load))
    return sympy.Add(*(4 * elements(type_) for type_, over in made if type_.dims[0] == over))


def _copies(kernel: Kernel, op: Load, depth: Expr, device: DeviceClass, from_shared: bool, tf32: bool) -> Expr:
    """How often a streamed tile is in shared memory: the depth of its ring, and what it takes beside that where
    products read it in several ways, over its rows and over its columns.

    In TF32 that is a copy in another layout, beside a ring of one; part of a copy where nothing is copied ahead. What
    several products read in one way has one more where those are ahead of each other, and what a product reads whose
    sums the next one goes on with has one less; on gfx942 the first has one alone, as it is copied ahead to registers.
    """
    parts = [
        1 - share_of(part) for part in kernel.ops() if isinstance(part, Load) and part.columns_of == op.name
    ]  # of all columns: the tile
    readers = [dot for dot in kernel.dots if op.name in (dot.a, dot.b)]
    if not parts and len({dot.over for dot in readers}) < 2:
        if _is_read_alike(kernel, op):
            more = sympy.Min(1, STAGES - 1) if device.keeps_reused else sympy.Integer(0)
            return sympy.Integer(1) if device.shares_stationary else depth + more
        return depth - (sympy.Min(1, STAGES - 1) if device.keeps_reused and _is_continued(kernel, op) else 0)
    # A part that has all columns is the tile itself, which products then read twice.
    if len(parts) + len(readers) < 2:
        return depth
    copies = depth + (sympy.Mul(sympy.Min(1, STAGES - 1), *parts) if device.keeps_reused and from_shared else 0)
    least = sympy.Integer(2) if from_shared else sympy.Min(2, 1 + STAGES / 2)
    return _max(least, copies) if tf32 else copies


def _is_read_alike(kernel: Kernel, op: Load) -> bool:
    """Whether several products read a streamed tile, all in one way."""
    read = [dot.over for dot in kernel.dots if op.name in (dot.a, dot.b)]
    return len(read) > 1 and len(set(read)) == 1 and _in_loop(kernel, op)


def _is_continued(kernel: Kernel, op: Load) -> bool:
    """Whether another product of the same turn goes on with the sums of that of scores and a tile."""
    continued = {dot.acc for dot in kernel.dots}
    return any(op.name in (dot.a, dot.b) and dot.over in SCORES and dot.name in continued for dot in kernel.dots)


def _reduced(kernel: Kernel, aligned: bool) -> Expr:
    """Bytes by which warps share what they sum before it is one number, or a row."""
    shared: Expr = sympy.Integer(0)
    reduced = [op for op in kernel.ops() if isinstance(op, Reduce)]
    counts = any(not op.type.dims and _in_loop(kernel, op) for op in reduced)
    if counts:
        shared += 4 * WARPS  # numbers that warps share, one at a time
    rows = any(
        isinstance(op, (Gather, Load)) and op.type.dims == (AXIS_DIM[kernel.program_axis],) for op in kernel.ops()
    )
    if (counts and rows) or any(not _in_loop(kernel, op) for op in reduced if not kernel.dots):
        # rows change layout; before a loop with a ring, in the room of that
        shared += 4 * symbol(AXIS_DIM[kernel.program_axis]) * (1 if aligned else 4)  # of warps that share rows
    return shared


def _prepared(kernel: Kernel, config: Config) -> Expr:
    """Bytes by which the warps of a kernel that prepares exchange elements: a thread loads several side by side, and
    scans others.

    Where it also reads and writes at places that it computes from data, threads exchange addresses, of 64 bits. Warps
    that compare queries with keys exchange what each has found of a key.
    """
    each = config.block_kv // (config.num_warps * CLASSES[config.device].threads_per_warp)
    if any(isinstance(op, Scan) for op in kernel.ops()) and each > 2:  # one or two are loaded as they are scanned
        computed = any(isinstance(op, (Gather, Scatter)) and op.uses for op in kernel.ops())
        return (8 if computed else 4) * symbol("BLOCK_KV")
    compared = any(isinstance(op, Reduce) and set(kernel.type_of(op.value).dims) == SCORES for op in kernel.ops())
    return 4 * symbol("BLOCK_KV") if compared else sympy.Integer(0)


def _few_rows(kernel: Kernel, config: Config) -> bool:
    """Whether tiles that are rewritten have fewer rows than the matrix instruction that reads its operands from
    shared memory."""
    device = CLASSES[config.device]
    return (
        bool(kernel.rewriting)
        and device.reads_shared
        and not device.keeps_reused
        and config.block_q < device.matrix_rows
    )


def _turned(kernel: Kernel) -> Expr:
    """Bytes of the operands that a smaller instruction takes in another layout, where rows of queries are few."""
    sums = (kernel.op(dot.b) for dot in kernel.dots if dot.type.dims[0] != AXIS_DIM[kernel.program_axis])
    return sympy.Add(*(tile_bytes(op.type) for op in sums if _in_sram(op)))


def is_rewritten(kernel: Kernel, op: Load) -> bool:
    """Whether it loads a tile that is stored again: summed in HBM, not a row of statistics."""
    return len(op.type.dims) == 2 and not _in_sram(op) and kernel.graph.nodes[op.name]["block"] in kernel.rewriting


def _in_loop(kernel: Kernel, op: Op) -> bool:
    """Whether it is run anew for other tiles while its program's own stays."""
    walked = {loop.body for loop in kernel.loops if loop.var == kernel.program_axis}
    return bool(kernel.graph.nodes[op.name]["block"] not in ("entry", *walked))


@cache
def register_formula(kernel: Kernel, from_shared: bool) -> Expr:
    """Bytes of tiles live in registers at the widest point of the loop body: what is carried or rewritten, and the
    scores in flight.

    Tiles loaded once are there too, unless products read them from shared memory.
    """
    carried: Expr = sympy.Integer(0)
    for op in kernel.ops():
        stationary = _in_sram(op) and not from_shared and not _in_loop(kernel, op)
        if isinstance(op, Load) and is_rewritten(kernel, op):  # as it is loaded, summed and stored
            carried += 3 * tile_bytes(op.type)
        if isinstance(op, Init) or stationary:
            carried += tile_bytes(kernel.type_of(op.name))
    bodies = sorted({loop.body for loop in kernel.loops if loop.cls != "all"})
    return carried + sympy.Add(*(_widest(kernel, body, from_shared) for body in bodies))


def _widest(kernel: Kernel, body: str, from_shared: bool) -> Expr:
    """The most bytes of score-shaped values live at once; an operand of a product is live beside its cast to `T`.

    So are operands that are made of numbers of 8 bits and their factors, unless products read them from shared memory.
    """
    ops = kernel.walk(body)
    rows = {f"{op.name}.{f}" for op in ops if isinstance(op, SoftmaxStep) for f in ("alpha", "m")}
    last_use = {ref.split(".")[0]: i for i, op in enumerate(ops) for ref in op.operands() if ref not in rows}
    live: dict[str, Expr] = {}
    peaks: list[Expr] = [sympy.Integer(0)]
    for i, op in enumerate(ops):
        if isinstance(op, Dot):
            casts = [kernel.type_of(ref) for ref in (op.a, op.b) if kernel.type_of(ref).dtype == "f32"]
            peaks.append(sympy.Add(*live.values(), *(tile_bytes(replace(t, dtype="T")) for t in casts)))
        if isinstance(op, Deinterleave):
            live[op.name] = _columns(op)
        live = {n: b for n, b in live.items() if last_use[n] > i}
        if (
            isinstance(op, Dropout) and op.value.split(".")[0] in live
        ):  # one bit a score more: it is the other value, or zero
            continue
        if (
            isinstance(op, (Dot, Dropout, Gather, Load, Map, Mask, SoftmaxStep))
            and set(op.type.dims) == SCORES
            and op.name in last_use
        ):
            live[op.name] = tile_bytes(op.type)
        if (
            isinstance(op, Map)
            and not from_shared
            and any(isinstance(kernel.op(ref), Interleave) for ref in op.operands())
        ):
            live[op.name] = tile_bytes(op.type)
        peaks.append(sympy.Add(*live.values()))
    return max(peaks, key=lambda p: p.subs(dict.fromkeys(p.free_symbols - {ELEM}, 64)).subs(ELEM, 2))


@lru_cache(maxsize=256)  # the rows just looked at, which are asked for again
def sram_bytes(module: Module, kernel: Kernel, config: Config) -> int:
    """Shared-memory bytes of one program under a schedule row."""
    return int(evaluate(row_formula(module, kernel, config), sizes(module, config)))


def row_formula(module: Module, kernel: Kernel, config: Config) -> Expr:
    """The closed form that holds for a schedule row's device, element size and rows."""
    if kernel.prepares:
        return _prepared(kernel, config)
    if kernel.combines_splits:
        return _joined(module, config)
    if not kernel.dots and any(
        isinstance(op, Interleave) for op in kernel.ops()
    ):  # pairs change layout, one tensor's after the other's
        return _max(*(tile_bytes(op.type) for op in kernel.ops() if isinstance(op, Interleave)))
    on_units, moved = on_matrix_units(module, kernel, config), moved_scores(module, kernel, config)
    device, random, tf32 = CLASSES[config.device], random_bytes(kernel, config), _in_tf32(module, config)
    formula = sram_formula(kernel, device, on_units, moved, random, aligned(module), config.tma, tf32) * _side_by_side(
        module, kernel, config
    )
    if on_units and device.shares_stationary and _sums_alone(kernel):
        return formula + 4 * symbol(AXIS_DIM[kernel.program_axis]) * min(
            config.num_warps, score_tile(module, kernel, config)[1] // MFMA_ROWS
        )
    return formula + _turned(kernel) if on_units and _few_rows(kernel, config) else formula


def _side_by_side(module: Module, kernel: Kernel, config: Config) -> int:
    """Of a kernel without products that sums rows, the warps that share each: a thread has 16 bytes of columns side
    by side."""
    summed = any(isinstance(op, Reduce) and (op.over, len(op.type.dims)) == ("D_V", 1) for op in kernel.ops())
    if kernel.dots or not summed or not aligned(module):
        return 1
    of_warp = 16 * CLASSES[config.device].threads_per_warp
    return max(1, tile_width(module.head_dim_v) * config.elem_bytes // of_warp)


def _sums_alone(kernel: Kernel) -> bool:
    """Whether a lone product's scores are summed: warps have parts of their rows then, and exchange what they have
    of a sum."""
    return len(kernel.dots) == 1 and any(isinstance(op, Reduce) for op in kernel.ops())


def _in_tf32(module: Module, config: Config) -> bool:
    """Whether products are in TF32, on an NVIDIA GPU."""
    return CLASSES[config.device].backend == "cuda" and mode(module, config.elem_bytes) == "tf32"


@lru_cache(maxsize=256)
def registers_per_thread(module: Module, kernel: Kernel, config: Config) -> int:
    """32-bit registers of each thread that live tiles take."""
    device = CLASSES[config.device]
    live = register_formula(kernel, from_shared(module, kernel, config))
    if not device.converts:  # numbers of 8 bits that become 16 by arithmetic take a register each
        live += sympy.Add(
            *(_columns(op) for op in kernel.ops() if isinstance(op, Deinterleave) and _in_loop(kernel, op))
        )
    return int(evaluate(live, sizes(module, config))) // 4 // (config.num_warps * device.threads_per_warp)


def on_matrix_units(module: Module, kernel: Kernel, config: Config) -> bool:
    """Whether products run on the device's own matrix instruction: enough rows, and not full fp32 precision."""
    if not kernel.dots:
        return False
    return (
        score_tile(module, kernel, config)[0] >= CLASSES[config.device].matrix_rows
        and mode(module, config.elem_bytes) != "ieee"
    )


def from_shared(module: Module, kernel: Kernel, config: Config) -> bool:
    """Whether products run on a matrix instruction that reads its operands from shared memory."""
    return CLASSES[config.device].reads_shared and on_matrix_units(module, kernel, config)


def _by_groups(module: Module, kernel: Kernel, config: Config) -> bool:
    """Whether products run on instructions of four warps, which read operands from shared memory."""
    return config.num_warps >= GROUP_WARPS and from_shared(module, kernel, config)


def score_tile(module: Module, kernel: Kernel, config: Config) -> tuple[int, int]:
    """Rows and columns of the tile of scores as products make it: queries by keys, or transposed."""
    dims = sizes(module, config)
    rows, columns = next(op.type.dims for op in kernel.dots if set(op.type.dims) == SCORES)
    return dims[rows], dims[columns]


def moved_scores(module: Module, kernel: Kernel, config: Config) -> int:
    """Tiles of scores that pass through shared memory at one time on their way from product to product, because Triton
    spreads the warps of the first over its result in another way than those of the second; results wider than high have
    the warps side by side. Tiles that a cast makes move one by one; others all that are ready.
    """
    if not _moves_scores(module, kernel, config):
        return 0
    if config.elem_bytes < 4 or CLASSES[config.device].shares_stationary:
        return 1
    return _ready_scores(kernel)


@cache
def _ready_scores(kernel: Kernel) -> int:
    """Tiles of scores that are there when the first product that sums them starts."""
    (body,) = {loop.body for loop in kernel.loops if loop.cls != "all"}
    ops = kernel.walk(body)
    first = next(i for i, op in enumerate(ops) if isinstance(op, Dot) and _sums_scores(kernel, op))
    ready = {op.name for op in ops[:first]}
    sources = [kernel.op(op.a) for op in ops if isinstance(op, Dot) and _sums_scores(kernel, op)]
    made = [
        op.uses[0][1] if isinstance(op, Map) and op.type.dtype == "T" else op.name for op in sources
    ]  # of a cast, what it casts
    return sum(name.split(".")[0] in ready for name in made)


def _sums_scores(kernel: Kernel, op: Dot) -> bool:
    """Whether a product adds to the sums of scores, or what is made of these, times another tile."""
    return bool(op.acc) and _takes_scores(kernel, op)


def _takes_scores(kernel: Kernel, op: Dot) -> bool:
    """Whether the left operand of a product is a tile of scores, or what is made of one."""
    return set(kernel.type_of(op.a).dims) == SCORES


def random_bytes(kernel: Kernel, config: Config) -> int:
    """Bytes of each score by which what dropout draws, its random words, changes layout."""
    return 4 if kernel.has_dropout and CLASSES[config.device].moves_random else 0


def _moves_scores(module: Module, kernel: Kernel, config: Config) -> bool:
    device, dims = CLASSES[config.device], sizes(module, config)
    summed = [op for op in kernel.dots if _sums_scores(kernel, op)]  # Triton spreads the others as these
    results = [tuple(dims[d] for d in op.type.unpadded) for op in summed]
    if not results or from_shared(module, kernel, config):
        return False
    if device.shares_stationary:  # instructions of 32 rows leave them where the next product reads them
        own, other = score_tile(module, kernel, config)
        return own < MFMA_ROWS * config.num_warps and not own == MFMA_ROWS <= other
    return not on_matrix_units(module, kernel, config) or any(rows < columns for rows, columns in results)


def _in_sram(op: Op) -> TypeGuard[Load]:
    return isinstance(op, Load) and op.type.space == "sram"


def aligned(module: Module) -> bool:
    """Whether rows of tensors are known to start at multiples of 16 bytes, which Triton asks of what it copies
    ahead."""
    return not (module.head_dim_qk % 16 or module.head_dim_v % 16)


def slack(module: Module, kernel: Kernel, config: Config) -> str | None:
    """Why the closed form may be above what the compiler reports; None where it should not be."""
    if kernel.rewriting:
        return "a tile that is rewritten changes layout through shared memory, in as many steps as the compiler takes"
    if any(isinstance(op, Interleave) for op in kernel.ops()):
        return "even and odd columns change layout where they are joined, in as many steps as the compiler takes"
    if _sums_alone(kernel):
        return "warps exchange sums of rows, of which as many have parts as the compiler lays side by side"
    if not aligned(module):
        return "rows of a head dimension that is no multiple of 16 are not copied ahead"
    if any(isinstance(op, Load) and op.pages for op in kernel.ops()):
        return "rows that lie in pages wait for the numbers of these, and fewer of their tiles are copied ahead"
    if CLASSES[config.device].shares_stationary and any(
        isinstance(op, Load) and _is_read_alike(kernel, op) for op in kernel.ops()
    ):
        return "scores may change layout in the room of a tile that several products have read"
    if config.num_stages == 1 and kernel.loops:
        return "without a ring, tiles whose uses do not overlap share room"
    if kernel.dots and _in_tf32(module, config):
        return "in TF32 a tile that several products read may change layout through shared memory"
    if kernel.dots and any(
        isinstance(op, (Gather, Load)) and op.type.dtype == "b1" and set(op.type.dims) == SCORES for op in kernel.ops()
    ):
        return "a boolean of each pair may be loaded as it is needed, and change no layout"
    if any(isinstance(op, Load) and op.type.dims == ("BLOCK_KV", "BLOCK_Q") for op in kernel.ops()):
        return "a tile of scores that is loaded transposed may not be copied ahead"
    moved = [kernel.type_of(op.value) for op in kernel.ops() if isinstance(op, (Scatter, Store))]
    moved += [op.type for op in kernel.ops() if isinstance(op, Gather)]
    if any(set(t.dims) == SCORES for t in moved):
        return "tiles of scores that are gathered, or stored in the loop, may take room in turn"
    if kernel.has_dropout and CLASSES[config.device].moves_random:
        return "dropout's random words may be computed where they are needed, and change no layout"
    return None


def why_not_fit(
    module: Module, kernel: Kernel, config: Config, change: str = "BLOCK_Q, BLOCK_KV, num_stages or head_dim"
) -> str | None:
    """One sentence on why a row does not fit its device class, and what to `change`, or why it is compiled wrongly;
    or None."""
    device = CLASSES[config.device]
    need = sram_bytes(module, kernel, config)
    if need <= device.smem_per_block:
        return (
            _crowds(module, kernel, config) or _reads_unset(module, kernel, config) or miscounts(module, kernel, config)
        )
    columns = f"COLUMNS={config.columns}, " if config.columns else ""
    return (
        f"on {config.device} the kernel @{kernel.name} needs {need:,} bytes of shared memory with BLOCK_Q={config.block_q}, "
        f"BLOCK_KV={config.block_kv}, {columns}num_stages={config.num_stages} at {config.elem_bytes} bytes per element, and has "
        f"{device.smem_per_block:,}; a smaller {change} needs less"
    )


def _crowds(module: Module, kernel: Kernel, config: Config) -> str | None:
    """One sentence where sums take more tensor memory than there is, so that no launch would start; or None.

    Each product has columns of its own, also one whose sums another product goes on with, and so has an operand that is
    made of scores. Two tiles of half as many rows as a column has share columns.
    """
    device, dims = CLASSES[config.device], sizes(module, config)
    if not (device.tensor_columns and any(isinstance(op, Load) and _is_continued(kernel, op) for op in kernel.ops())):
        return None
    made = [dims[kernel.type_of(dot.a).dims[1]] for dot in kernel.dots if _takes_scores(kernel, dot)]
    columns = sum(dims[dot.type.unpadded[1]] for dot in kernel.dots) + sum(made) * config.elem_bytes // 4
    columns = columns * min(config.block_q, TENSOR_ROWS) // TENSOR_ROWS
    if columns <= device.tensor_columns:
        return None
    return (
        f"on {config.device} the kernel @{kernel.name} needs {columns} columns of tensor memory with BLOCK_KV={config.block_kv}, and has "
        f"{device.tensor_columns}; a smaller BLOCK_KV or head_dim needs less"
    )


def _reads_unset(module: Module, kernel: Kernel, config: Config) -> str | None:
    """One sentence where ptxas would have a product read a register that nothing has written; or None.

    Products of four warps find a tile by its descriptor, whose highest bit is set if a row of the tile has 64 bytes or
    fewer. If each turn of the loop has the tile at the same place, ptxas 12.8 (Triton 3.6.0 to 3.7.1) may leave out
    instructions that compute the descriptors of its later rows (docs/fit.md). It was seen in tiles that one product
    alone reads, narrower than those that make scores.

    The place changes from turn to turn if the tile is fetched by descriptor, into two buffers or more. With pointers,
    the strides of a call decide that, so they are always refused. A tile that is made on chip, as of elements of 8
    bits, always has the same place.
    """
    device, dims = CLASSES[config.device], sizes(module, config)
    if device.name != "sm90" or mode(module, config.elem_bytes) == "tf32" or not _by_groups(module, kernel, config):
        return None
    scores = [dot for dot in kernel.dots if set(dot.type.dims) == SCORES]
    widest = max(dims[unpadded(dot.over)] for dot in scores)

    def width(dot: Dot) -> int:
        return dims[dot.type.unpadded[1]]

    alone = (
        dot
        for dot in kernel.dots
        if _takes_scores(kernel, dot) and sum(dot.b in (other.a, other.b) for other in kernel.dots) == 1
    )
    narrow = [dot for dot in alone if width(dot) < widest and width(dot) * config.elem_bytes <= NARROW]
    made = [dot for dot in narrow if not isinstance(kernel.op(dot.b), Load)]
    wrong = made if config.tma and config.num_stages > 1 else narrow
    if not wrong:
        return None
    rows = scores[0].type.dims[0]
    described = not made and any(isinstance(op, Load) and op.via for op in kernel.ops())
    return (
        f"on {config.device} the kernel @{kernel.name} is wrong with {rows}={dims[rows]}: tiles of {width(wrong[0])} columns stay at one "
        f"place in shared memory, and ptxas has products read a register that nothing has written; expected {rows} below "
        f"{device.matrix_rows}" + (", or num_stages=2 or more with TMA=1" if described else "")
    )


def miscounts(module: Module, kernel: Kernel, config: Config) -> str | None:
    """One sentence where Triton would count some scores twice; or None.

    On its way to a product of warps, an operand that is made on chip is spread over threads by the narrowest elements
    that were loaded for it: each of four threads has as many of them as fill 32 bits side by side, and twice as many
    where dropout joins its words. A product over fewer rows than four threads then have sums some of them twice. Triton
    3.6.0 to 3.7.1 do so; 3.8.0 does not (triton-lang/triton#11691). Instructions of four warps, which read operands
    from shared memory, spread them by their own width.
    """
    device = CLASSES[config.device]
    if device.backend != "cuda" or not kernel.has_dropout or mode(module, config.elem_bytes) == "ieee":
        return None
    if _by_groups(module, kernel, config):
        return None
    narrow = any(isinstance(op, (Gather, Load)) and op.type.dtype == "b1" and op.type.dims for op in kernel.ops())
    dims = sizes(module, config)
    over = next((dot.over for dot in kernel.dots if dot.over in SCORES and dims[dot.over] < JOINED_ROWS), None)
    if over is None or not narrow:
        return None
    blocks = ", and so blocks of the mask," if module.blocks and module.blocks.size < JOINED_ROWS else ""
    return (
        f"on {config.device} the kernel @{kernel.name} is wrong with {over}={dims[over]}: where dropout meets booleans of a mask, Triton "
        f"counts scores twice in tiles of fewer than {JOINED_ROWS}; expected tiles{blocks} of {JOINED_ROWS} or more"
    )
