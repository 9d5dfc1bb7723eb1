"""Which kernels this backend can divide, and the tiles of their programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from sympy.core.relational import Relational

from attngen.devices import CLASSES
from attngen.heuristics import SHORT_ROWS, WIDEST_SUM
from attngen.ir.expr import Bool, cos, erf, log2, sin
from attngen.ir.graph import REVERSED_GROUP, SPLIT_SYMBOLS, Config, Kernel, Module
from attngen.ir.ops import AXIS_DIM, Arg, Block, Gather, Load, Loop, Map, Mask, Op, OrderedAdd
from attngen.ir.pipe import (
    ConsumerRelease,
    ConsumerWait,
    Pipeline,
    PipelinedLoop,
    ProducerStore,
    SchedulerBarrier,
    SemaphoreAcquire,
    Wgmma,
    WorkLoop,
    ZeroOutOfBounds,
)
from attngen.targets.hopper.configs.head_dims import is_power_of_two, laid_out
from attngen.targets.hopper.configs.sm90 import (
    DEVICE,
    FIRST_BARRIER,
    FORWARD,
    NAME,
    NAMED_BARRIERS,
    REGISTERS,
    ROWS,
    SHARED_REGISTERS,
    SHARING,
)
from attngen.tiles.classes import mask_class
from attngen.tiles.warp_groups import instance_bounds

PLACE_STAGES = 2  # of the ring of places of tiles
RELAYING = 2  # roles that share tiles through a ring in relay
SPARE = 1024  # bytes of shared memory that barriers, and what Triton keeps there, take at most
# The largest widths of a head, of q and k and of v -> rows of a program's queries, rows of keys, slots of the rings of
# K and V (docs/perf-log.md, section 26: measured with 64, 128 and 256 columns).
TILES = {(192, 128): (128, 128, 2), (256, 256): (128, 64, 2)}
NARROW = 64  # columns of heads whose softmax takes as long as their products
THREE = (192, 128, 2)  # tiles of narrow heads: of three consumers, two compute while the products of the third run
SHARED_ROWS = 128  # of the queries of programs of which two share a multiprocessor
TWICE = (SHARED_ROWS, 64, 3)  # tiles of other narrow heads: of two programs that share a multiprocessor
# rows, beyond which three consumers are faster than two programs under a causal mask, too (docs/perf-log.md, section
# 26)
LONG = 3072
KEYS, STAGES = (64, 128), (2, 3)  # rows of keys and slots that are worth measuring
SPARE_REGISTERS, SPARE_SHARED = (
    32,
    24,
)  # of a consumer's, beside its tiles: for addresses and for maxima and sums of rows
PAIR = {"BLOCK_Q", "BLOCK_KV"}  # the dimensions of scores
# columns of values, beyond which two consumers take turns even if some tiles of queries visit more keys than others
STEADY = 128
MOST_OF_THREE = 4  # operations for each score, where three consumers share the registers
MOST_WORK = 16  # operations for each score: those of the specs at hand, which do not spill, are 14 at most
# Functions of a library, with about so many operations: with a logarithm for each score, the portable forward takes
# 0.70 of the time of the divided one, with erf beside it 0.52 (docs/perf-log.md, section 34).
LONG_FUNCTIONS, LONG_FUNCTION = (log2, erf, sin, cos), 20
FEW = 64  # rows of a call, of which the portable kernel has smaller tiles
ROOMY = 2  # copies of the consumer at most, where each has as many registers as a thread can have
# operations for each score where numbers are loaded for rows and for keys, two programs: those of documents, causal
WORK_OF_BOTH = 12
LITTLE_WORK = 10  # operations for each score: those of ALiBi under a causal mask
QUERIES = (
    2,
    1,
)  # slots of the ring of queries where programs take tile after tile, in the order in which they are tried
PAIRED = 64  # rows of keys at most, where a number is loaded for each score: of more, registers spill


def infeasible(module: Module, kernel: Kernel) -> str:
    """Why a kernel cannot be divided, as the end of a sentence; empty text if it can."""
    if kernel.name != FORWARD or kernel.walks or kernel.pack_gqa:
        return "its programs own no tile of queries (`order: kv_outer`)"
    if kernel.rotates:
        return "its keys are of two tensors each (`kv: {latent: ...}`)"
    if module.blocks and module.blocks.size < ROWS:
        return f"its mask lists blocks of {module.blocks.size} queries, and a consumer has {ROWS}"
    return refused(module, kernel)


def refused(module: Module, kernel: Kernel) -> str:
    """Why a kernel of the forward or the backward cannot be divided, whichever it is; empty text if nothing speaks
    against it."""
    if (wide := max(module.head_dim_qk, module.head_dim_v)) > WIDEST_SUM and not module.rope:
        return f"its heads have {wide} columns, and a sum of more than {WIDEST_SUM} takes all registers of a consumer"
    if kernel.of_entropy:
        return "it computes entropies of queries, or gradients from these (`outputs`)"
    if not any(config.elem_bytes == 2 for config in module.configs(FORWARD)):
        return "no dtype of the spec has 16 bits"
    read = {name for op in kernel.block("entry").ops if is_shared(op) for name in op.operands()}
    if any(t.space == "reg" and t.dims for name in read for t in kernel.op(name).results().values()):
        return f"where its loops end is computed of a number for each {'query' if kernel.program_axis == 'q' else 'key'} of a tile"
    return ""


def is_shared(op: Op) -> bool:
    """Whether it is an argument of the kernel, or one integer or pointer, of which bounds of loops are made: all
    roles have these."""
    types = op.results().values()
    return isinstance(op, Arg) or (bool(types) and all(not t.dims and t.dtype in ("i32", "ptr") for t in types))


def not_preferred(module: Module) -> str:
    """Why the forward stays portable if nobody asks for a divided one, as the end of a sentence; empty text if it is
    divided.

    That is where it cannot be divided, or where the divided kernel is not known to be faster: with dropout, but for
    heads of 65 to 128 columns and little beside it; with narrow heads, but for three consumers, two programs, or
    numbers that are looked up; and of masks and modifiers that compute more for a score than those that were compiled,
    as registers may spill.
    """
    kernel, wide = module.kernel(FORWARD), max(module.head_dim_qk, module.head_dim_v)
    if why := infeasible(module, kernel):
        return why
    bare = not kernel.reads_pairs and _is_plain(module, kernel)
    if module.dropout and not (NARROW < wide <= STEADY and _is_even(kernel) and bare):
        return "with dropout and such heads, mask and modifiers the portable kernel is about as fast"
    if wide <= NARROW and not (takes_three(module, kernel) or may_share(module) or _looks_up(module, kernel)):
        return f"its heads have {wide} columns, and with such a mask and modifiers the portable kernel is about as fast"
    if wide > NARROW and _is_crowded(module, kernel):
        return "its mask of data and its modifiers read so much that registers may spill"
    ops, most = work(kernel), LITTLE_WORK if module.dropout else MOST_WORK
    spills = f"its mask and modifiers take {ops} operations for each score, and of more than {most} registers may spill"
    return spills if ops > most else ""


def is_narrow(module: Module) -> bool:
    """Whether the softmax takes as long as the products."""
    return max(module.head_dim_qk, module.head_dim_v) <= NARROW


def takes_three(module: Module, kernel: Kernel) -> bool:
    """Whether a third of the registers is enough for a consumer, and its program's 192 queries are fast.

    Under a mask that lets some tiles visit fewer keys, as a causal one does, wider tiles compute more that is hidden.
    """
    return _is_even(kernel) and _is_light(module, kernel)


def _is_light(module: Module, kernel: Kernel) -> bool:
    """Whether masks and modifiers take so little that a third of the registers is enough for a consumer, without
    random words."""
    few = not (module.dropout or kernel.reads_pairs) and work(kernel) <= MOST_OF_THREE
    return few and _is_plain(module, kernel)


def _is_plain(module: Module, kernel: Kernel) -> bool:
    """Whether loops run over one range of tiles of each class, no number is loaded for each key, and no modifier is of
    positions.

    Of the kernels that are not so, those at hand spill that have three consumers, draw random words, or look up a
    number for each score.
    """
    loops = [op for op in kernel.block("entry").ops if isinstance(op, Loop)]
    apart = any(len(loop.ranges) > 1 or loop.listed for loop in loops)
    of_keys = any(isinstance(op, (Gather, Load)) and op.type.dims == ("BLOCK_KV",) for op in kernel.ops())
    return not (module.blocks or apart or of_keys or is_placed(kernel))


def _looks_up(module: Module, kernel: Kernel) -> bool:
    """Whether numbers for scores are looked up in tables, such as one of distances, and little is beside that.

    Then two consumers are 2.4 to 7 times as fast as the portable kernel (docs/perf-log.md, section 30). A tensor with a
    number for each score is read faster by that one.
    """
    return kernel.looks_up and not module.dropout and _is_plain(module, kernel)


def _is_crowded(module: Module, kernel: Kernel) -> bool:
    """Whether data lists the blocks, and wide heads leave no registers for what is read beside: kernels at hand that
    are so spill.

    That is booleans of keys; or, beside numbers of queries, numbers for each score, or a modifier of positions where
    values have more than 128 columns.
    """
    read = [op for op in kernel.ops() if isinstance(op, (Gather, Load)) and not kernel.only_known(op)]
    booleans = any(op.type.dims == ("BLOCK_KV",) and op.type.dtype == "b1" for op in read)
    of_queries = any(op.type.dims == ("BLOCK_Q",) for op in read)
    beside = kernel.reads_pairs or (module.head_dim_v > STEADY and is_placed(kernel))
    return bool(module.blocks and module.blocks.data) and (booleans or (of_queries and beside))


def is_placed(kernel: Kernel) -> bool:
    """Whether a modifier of scores is of positions."""
    maps = (op for op in kernel.ops() if isinstance(op, Map) and set(op.type.dims) == PAIR)
    return any({"q_idx", "kv_idx"} & set(map(str, op.expr.free_symbols)) for op in maps)


def work(kernel: Kernel) -> int:
    """The operations of masks, modifiers and gradients for each score; those of a library's functions, too."""
    scores = (
        op
        for op in kernel.ops()
        if isinstance(op, (Gather, Map, Mask)) and any(set(t.dims) == PAIR for t in op.results().values())
    )
    return sum(
        e.count_ops() + LONG_FUNCTION * e.count(lambda x: isinstance(x, LONG_FUNCTIONS))
        for op in scores
        for e in op.expressions
    )


def is_of_keys(kernel: Kernel, op: Op) -> bool:
    """Whether it loads a number of 32 bits for each row of a tile that a loop visits, which the producer can put beside
    the tile.

    Beyond the end it is 0.
    """
    if not isinstance(op, Load) or op.type.dims != (AXIS_DIM[kernel.loop_axis],) or op.type.dtype not in ("f32", "i32"):
        return False
    return op.other == 0 and not kernel.only_known(op)


def key_bytes(module: Module, config: Config) -> int:
    """Bytes of shared memory for numbers that lie beside tiles of keys."""
    kernel = module.kernel(FORWARD)
    tensors = {op.src.tensor for op in kernel.ops() if isinstance(op, Load) and is_of_keys(kernel, op)}
    return 4 * config.block_kv * config.num_stages * len(tensors)


def keeps_columns(module: Module, kernel: Kernel) -> bool:
    """Whether a consumer has registers for numbers of columns that are the same in all tiles: others spill, which
    were compiled."""
    consumer = kernel.sharing_warp_group
    light = work(kernel) <= LITTLE_WORK and max(module.head_dim_qk, module.head_dim_v) <= STEADY
    return light and consumer.registers == REGISTERS[ROOMY][0]


def splits_mask(module: Module, kernel: Kernel, op: Mask, bounds: Sequence[Bool], others: Sequence[Bool]) -> bool:
    """Whether bounds in a mask may be passed over in tiles that they do not cut; others: its parts of which no cut is
    known.

    Not where all tiles apply it, as those that it does not cut pay for the question, too: 4% of a dilated mask's time.
    Nor where registers spill, of which many were compiled: more than one comparison of bounds beside others; with wide
    heads any beside others, or three comparisons; bounds alone where tiles are listed.
    """
    if op.when != "partial":
        return False
    wide = max(module.head_dim_qk, module.head_dim_v) > STEADY
    compared = len({e for bound in bounds for e in bound.atoms(Relational)})
    if others:
        return compared == 1 and not wide
    return not any(loop.listed for loop in kernel.loops) and not (wide and compared > 2)


def staying(module: Module, config: Config) -> int:
    """The slots of the ring of queries where programs take tile after tile; 0 where there is no room for that beside
    the other rings.

    Outputs have a ring of their own, and each slot that is filled again a named barrier, those of places of tiles too;
    so has each copy that takes turns. There is one slot where a consumer has a loop for each class of tiles, and no
    product before both: ptxas 12.8 computes a slot's address at the start of one of the loops alone (see
    attngen/targets/common/unset.py).
    """
    kernel = module.kernel(FORWARD)
    if kernel.reads_pairs:
        return 0  # it would spill: what addresses of data depend on lives through all products
    apart = ctas_per_sm(module, config) > 1 and len(kernel.loops) > 1 and not may_hide(module, config)
    for stages in QUERIES[-1:] if apart else QUERIES:
        barriers = stages + 2 * config.num_stages + PLACE_STAGES + in_turns(module, config)
        if output_columns(module, config, stages) and barriers <= NAMED_BARRIERS - FIRST_BARRIER:
            return stages
    return 0


def may_hide(module: Module, config: Config) -> bool:
    """Whether a copy of the consumer may pass over tiles that its rows do not see.

    So it is where the rows of all copies but one are at least as many as the keys of a tile, no mask reads what is
    loaded for a tile, and the bounds of the loops say which tiles a copy's rows see.
    """
    kernel = module.kernel(FORWARD)
    loads = (op for op in kernel.ops() if isinstance(op, (Gather, Load)))
    of_masks = (op for op in loads if not {"D_QK", "D_V"} & set(op.type.unpadded))
    if config.block_q - ROWS < config.block_kv or any("BLOCK_KV" in op.type.dims for op in of_masks):
        return False
    ranges = {loop.cls: loop.ranges for loop in kernel.loops}
    listed = next((loop.listed for loop in kernel.loops if loop.listed), None)
    return instance_bounds(kernel, ranges.get("partial", ()), ranges.get("full", ()), listed) is not None


def _loads_both(kernel: Kernel) -> bool:
    """Whether numbers of rows are loaded, and others of keys."""
    return len({op.type.dims for op in kernel.ops() if isinstance(op, Load) and len(op.type.dims) == 1}) > 1


def in_turns(module: Module, config: Config) -> int:
    """The copies of the consumer, where they issue their products in turns; 0 where they do not.

    Three copies of narrow heads do. Two are slower in turns there: their products end before the other's softmax does.
    Two copies of wider heads with light masks are faster if all tiles of queries visit as many keys, or if values have
    more than 128 columns (docs/perf-log.md, section 27): programs that keep in step read the same keys at the same
    time, and the L2 serves fewer reads. Two that draw random words are faster, too (section 30): while one computes,
    products of the other run.
    """
    kernel, instances = module.kernel(FORWARD), config.block_q // ROWS
    steady = (_is_even(kernel) or module.head_dim_v > STEADY) and _is_light(module, kernel)
    wanted = instances > 2 if is_narrow(module) else instances > 1 and (steady or module.dropout)
    barriers = 2 * config.num_stages + instances  # at least: of rings of keys and values, and of turns
    return instances if wanted and barriers <= NAMED_BARRIERS - FIRST_BARRIER else 0


def output_columns(module: Module, config: Config, stages: int) -> int:
    """The columns of a ring of outputs, for which there is room beside so many slots of queries: all, or half of them;
    else 0.

    Halves leave one after the other. Where outputs fit the slot of queries, a program with one tile can store them from
    there. With tiles of different lengths, as under a causal mask, that is faster than halves.
    """
    _, v = laid_out(module)
    programs = ctas_per_sm(module, config)
    whole = shares_stage(module) and not _is_even(module.kernel(FORWARD))
    return next((n for n in ((v,) if whole else (v, v // 2)) if _has_room(module, config, programs, stages, n)), 0)


def _is_even(kernel: Kernel) -> bool:
    """Whether all of a program's tiles of queries visit as many keys, but for what data says."""
    return all(axis.swizzle == 1 for axis in kernel.grid)


def _has_room(module: Module, config: Config, programs: int, stages: int, columns: int = 0) -> bool:
    """Whether shared memory has room for rings of keys and values, so many slots of queries, and so many columns of
    outputs.

    It has this room for each of the programs that share a multiprocessor.
    """
    qk, v = laid_out(module)
    elements = config.block_q * (stages * qk + columns) + config.num_stages * config.block_kv * (qk + v)
    return 2 * elements + key_bytes(module, config) + SPARE <= room_of(programs)


def room_of(programs: int) -> int:
    """The bytes of shared memory that each of so many programs on a multiprocessor has."""
    device = CLASSES[DEVICE]
    return min(device.smem_per_block, device.smem_per_sm // programs - device.smem_reserved)


def may_share(module: Module) -> bool:
    """Whether two programs may share a multiprocessor, so that the softmax of each consumer runs beside products of the
    other three.

    So it is with narrow heads. A consumer has half of the registers then. Random words of dropout take more, and so do
    numbers that are loaded for each score; those for rows and for keys, too, if more is computed than masks of
    documents do.
    """
    kernel = module.kernel(FORWARD)
    heavy = module.dropout or kernel.reads_pairs or (_loads_both(kernel) and work(kernel) > WORK_OF_BOTH)
    return is_narrow(module) and not heavy and not (module.blocks and module.blocks.size < SHARED_ROWS)


def ctas_per_sm(module: Module, config: Config) -> int:
    """The programs that share a multiprocessor: two where they may, and tiles leave room for both; else one."""
    registers = _tile_registers(module, config) + SPARE_SHARED
    two = may_share(module) and config.block_q == SHARED_ROWS and registers <= SHARED_REGISTERS[0]
    return SHARING if two and _has_room(module, config, SHARING, 1) else 1


def overlaps(kernel: Kernel) -> bool:
    """Whether the softmax of a consumer runs beside its own products. Where programs share a multiprocessor, those
    of others run."""
    return kernel.ctas_per_sm == 1


def shares_stage(module: Module) -> bool:
    """Whether outputs fit the slot of queries: both are whole, and as wide."""
    return module.head_dim_qk == module.head_dim_v and is_power_of_two(module.head_dim_v)


def config(
    module: Module, block_q: int | None = None, block_kv: int | None = None, stages: int | None = None
) -> Config:
    """The row of the forward's schedule, for any number of queries; with what a spec asks for in place of what was
    measured."""
    three = is_narrow(module) and takes_three(module, module.kernel(FORWARD))
    fitting = (tiles for (qk, v), tiles in TILES.items() if module.head_dim_qk <= qk and module.head_dim_v <= v)
    usual = THREE if three else TWICE if may_share(module) else next(fitting, [*TILES.values()][-1])
    q, kv, depth = (given or best for given, best in zip((block_q, block_kv, stages), usual))
    kv = kv if block_kv else min(kv, _most_keys(module))
    most = module.blocks.size if module.blocks else max(q, kv)  # tiles divide the blocks of a mask
    return Config(DEVICE, 2, None, min(q, most), min(kv, most), 4, depth, tma=True, backend=NAME)


def least_rows(module: Module, config: Config) -> int:
    """The rows of a call, beyond which a divided kernel is faster than the portable one, or as fast
    (docs/perf-log.md, section 28)."""
    return FEW if config.block_q <= ROWS * ROOMY else SHORT_ROWS


def long_row(module: Module) -> Config | None:
    """A row of three consumers where two programs are the usual choice; None where it is not known to be faster for
    long sequences.

    So it is where more keys are visited, the more there are, as under a causal mask: then few of them are in tiles that
    the mask cuts.
    """
    kernel, chosen = module.kernel(FORWARD), config(module, *THREE)
    able = ctas_per_sm(module, config(module)) > 1 and _is_light(module, kernel) and may_hide(module, chosen)
    return (
        replace(chosen, min_rows=LONG) if able and mask_class(module, kernel, 2 * LONG).startswith("causal") else None
    )


def candidates(module: Module) -> tuple[Config, ...]:
    """Rows of the forward that are worth measuring: those whose rings fit shared memory, and whose tiles fit a
    consumer's registers."""
    if infeasible(module, module.kernel(FORWARD)):
        return ()
    keys = [n for n in KEYS if n <= _most_keys(module)]
    rows = (config(module, ROWS * instances, *tiles) for instances in REGISTERS for tiles in product(keys, STAGES))
    return tuple(dict.fromkeys(one for one in rows if _fits(module, one)))


def _most_keys(module: Module) -> int:
    """The rows of keys that a tile has at most, where attngen chooses."""
    paired = any(isinstance(op, Load) for op in module.kernel(FORWARD).of_pairs)
    return PAIRED if paired else max(KEYS)


def _fits(module: Module, config: Config) -> bool:
    """Whether rings of queries, keys and values fit, and a consumer's sums, scores and weights; and whether tiles
    divide blocks."""
    tiles = _tile_registers(module, config)
    divides = not module.blocks or module.blocks.size % config.block_q == 0
    fits = ctas_per_sm(module, config) > 1 or tiles + SPARE_REGISTERS <= REGISTERS[config.block_q // ROWS][0]
    return divides and fits and _has_room(module, config, ctas_per_sm(module, config), 1)


def _tile_registers(module: Module, config: Config) -> int:
    """The registers that a thread of a consumer has for its tiles: 128 share 64 rows, and weights have 16 bits."""
    _, v = laid_out(module)
    return v // 2 + config.block_kv // 2 + config.block_kv // 4


def known_numbers(kernel: Kernel) -> list[str]:
    """The integers of a tile that roles read. The role that draws tiles computes them, and passes them with the
    tile's place."""
    before = next((op.of for op in kernel.ops() if isinstance(op, WorkLoop)), "")
    read = {
        name
        for block in kernel.blocks
        if block.name != before
        for op in block.ops
        for name in (*op.operands(), *kernel.scalars_of(op))
    }
    ops = [op for op in kernel.block(before).ops if op.name in read and not kernel.only_known(op)] if before else []
    return [op.name for op in ops if not op.results()[""].dims and op.results()[""].dtype == "i32"]


def place_names(kernel: Kernel) -> list[str]:
    """The variables that say where a program's tile is, the first of them never negative, and whether its head is
    mirrored."""
    axes = [f"{axis.var}_start" if axis.var in AXIS_DIM else axis.var for axis in kernel.grid]
    round_robin = (
        [SPLIT_SYMBOLS[-1]] if kernel.kv_split else []
    )  # of the parts of all sequences, where those of the tile's start
    return [*axes, *round_robin, *([REVERSED_GROUP] if kernel.grid[0].reversed_group else [])]


def told_numbers(kernel: Kernel) -> list[str]:
    """What is passed of a tile: where it is, and what is known of it."""
    return [*place_names(kernel), *known_numbers(kernel)]


def turns(kernel: Kernel) -> int:
    """The copies that issue their products in turns: each has a named barrier."""
    taking = (
        b.warp_group
        for b in kernel.warp_groups
        if b.warp_group and any(isinstance(op, SchedulerBarrier) for op in kernel.within(b.name))
    )
    return sum(warp_group.instances for warp_group in taking)


def multipliers(kernel: Kernel) -> list[str]:
    """The roles that issue products."""
    return [
        warp_group.name
        for warp_group in kernel.warp_groups
        if any(isinstance(op, Wgmma) for op in kernel.within(warp_group.name))
    ]


def clearing(kernel: Kernel) -> list[str]:
    """The roles that clear rows past the end. Warps of each meet at a named barrier: a product reads what all of
    them have cleared."""
    return [
        warp_group.name
        for warp_group in kernel.warp_groups
        if any(isinstance(op, ZeroOutOfBounds) for op in kernel.within(warp_group.name))
    ]


def instances_of(kernel: Kernel, pipeline: Pipeline) -> int:
    """How many rings there are of one that each copy of a role has; else 1."""
    return next(
        (b.warp_group.instances for b in kernel.warp_groups if b.warp_group and b.name == pipeline.per_instance), 1
    )


def handed_over(kernel: Kernel) -> dict[str, bool]:
    """The rings through which copies share a tile, but for those in relay, and whether another role takes it."""
    shares = {
        op.pipeline: warp_group.name
        for warp_group in kernel.warp_groups
        for op in kernel.within(warp_group.name)
        if isinstance(op, ProducerStore)
    }
    takes = {
        op.pipeline: warp_group.name
        for warp_group in kernel.warp_groups
        for op in kernel.within(warp_group.name)
        if isinstance(op, ConsumerWait)
    }
    relays = {op.name for op in kernel.ops() if isinstance(op, Pipeline) and op.exchange}
    return {
        pipeline: takes.get(pipeline) != warp_group for pipeline, warp_group in shares.items() if pipeline not in relays
    }


def barriers_of(kernel: Kernel, pipeline: str) -> int:
    """The named barriers of each slot of a ring: of one that is filled again, one; of a tile that copies share, one for
    each of them; of a ring in relay, one for each of the two roles.

    Where another role takes that, barriers in shared memory say when it is full, and when it is free. So they do of a
    counted ring.
    """
    shared, of = handed_over(kernel), kernel.op(pipeline)
    if isinstance(of, Pipeline) and of.exchange:
        return RELAYING
    if pipeline in shared:
        return 0 if shared[pipeline] else kernel.sharing_warp_group.instances
    return int(is_reused(kernel, pipeline) and not counted(kernel, pipeline))


def counted(kernel: Kernel, name: str) -> int:
    """How many arrivals free a slot of a ring whose barriers count them; 0 where named barriers do."""
    pipeline = kernel.op(name)
    if not isinstance(pipeline, Pipeline) or not pipeline.mbarrier_release:
        return 0
    takers = [
        warp_group.warp_group.instances
        for warp_group in kernel.warp_groups
        if warp_group.warp_group and takes_from(kernel, warp_group, name)
    ]
    return 1 if pipeline.per_instance else sum(takers)


def is_taken_in_turns(kernel: Kernel, pipeline: str) -> bool:
    """Whether tiles are taken from a ring in each turn of a loop over tiles, not once for each tile of the grid."""
    steps = {op.step for op in kernel.ops() if isinstance(op, PipelinedLoop)}
    return any(
        isinstance(op, ConsumerWait) and op.pipeline == pipeline for step in steps for op in kernel.block(step).ops
    )


def follow_of(kernel: Kernel, add: OrderedAdd) -> SemaphoreAcquire | None:
    """The op that waits for the turn of an add, before its tile is taken; None where the add itself waits."""
    ops = kernel.block_of(add).ops
    return next((op for op in ops if isinstance(op, SemaphoreAcquire) and op.semaphore == add.semaphore), None)


def takes_from(kernel: Kernel, warp_group: Block, pipeline: str) -> bool:
    """Whether a role takes from a ring: tiles, or their places."""
    return any(
        op.pipeline == pipeline and not (isinstance(op, WorkLoop) and op.draws)
        for op in kernel.within(warp_group.name)
        if isinstance(op, (ConsumerWait, WorkLoop))
    )


def is_reused(kernel: Kernel, pipeline: str) -> bool:
    """Whether a ring's slots are given back and filled again: then each has a named barrier, for all copies of the
    roles that take."""
    users = [kernel.op(name) for name in kernel.graph.successors(pipeline)]
    taken = [
        kernel.op(name) for op in users if isinstance(op, ConsumerWait) for name in kernel.graph.successors(op.name)
    ]
    return any(isinstance(op, WorkLoop) for op in users) or any(isinstance(op, ConsumerRelease) for op in taken)
