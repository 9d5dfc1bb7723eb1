"""The model that tile selection minimises: cycles of one SM per tile, times the tiles that the mask leaves.

    cycles = matrix * (flops of the tile's dots / rate) + alu * scores + stream * bytes loaded + latency(stages) /
    occupancy

Programs of 8 warps pay `split` of the first two more, for keeping their halves in step. Partial tiles of the forward
take `masked` * scores / occupancy on top: its running maximum waits for the mask (where data lists blocks it is not
known which are partial). `start`, `tight`, `turn` and `deep` are for what Fit says. Where data bounds the loop row by
row, rows up to REACH away count.

The constants are least-squares fits to measured schedules of the kernels on one H200: POINTERS to tiles that threads
copy, DESCRIPTORS to tiles that the device's engine copies. On these the model's choice is 2 to 3% slower than the best
on average; REACH is half a document of usual length (docs/perf-log.md, sections 2, 12 and 14).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from attngen.devices import CLASSES, DeviceClass
from attngen.heuristics import MANY_ROWS, REACH, WIDEST_SUM
from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.ops import Dot, Load, unpadded
from attngen.targets.triton.sram import (
    TMA_BARRIERS,
    from_shared,
    registers_per_thread,
    score_tile,
    sram_bytes,
    why_not_fit,
)
from attngen.tiles.sizes import mode, sizes, streamed_bytes, tile_width
from attngen.tiles.tiles import count_tiles, evaluate, repeats


@dataclass(frozen=True)
class Fit:
    """The constants of the model, and what Triton's compiler does with registers, as measured."""

    matrix: float
    alu: float  # cycles per score: the exponential and the arithmetic around it
    stream: float  # cycles per byte that a turn loads from L2
    latency: tuple[
        float, float, float
    ]  # cycles per turn that only other programs on the SM hide, by depth of the ring: 1, 2, 3
    split_matrix: float
    split_alu: float
    masked: float  # cycles per score of a partial tile of the forward that only other programs on the SM hide
    start: float  # cycles of a program before and after its loops that only other programs on the SM hide
    tight: float  # cycles per score and register of live tiles above ROOMY, of which the compiler makes worse code
    iteration: float  # cycles per turn and four warps, for keeping them in step
    # cycles per turn that only other programs hide, where four warps have more rows than a matrix instruction
    deep: float
    other_registers: int  # per thread: what it takes besides live tiles
    live_limit: int  # registers per thread that live tiles may take before it spills


POINTERS = Fit(
    matrix=0.62,
    alu=0.032,
    stream=0.008,
    latency=(2500, 1080, 665),
    split_matrix=0.2,
    split_alu=0.019,
    masked=0.17,
    start=0,
    tight=0,
    iteration=0,
    deep=0,
    other_registers=70,
    live_limit=170,
)
DESCRIPTORS = Fit(
    matrix=1.08,
    alu=0,
    stream=0,
    latency=(1710, 636, 415),
    split_matrix=0.16,
    split_alu=0.013,
    masked=0.166,
    start=5200,
    tight=0.0144 / 64,
    iteration=32,
    deep=170,
    other_registers=45,
    live_limit=210,
)
ROOMY = 128
SPILLS = "attngen/targets/triton/spills.txt"  # of schedules that spill
STREAMED, PER_STREAM = (
    3,
    24,
)  # tiles that loops load for products, without more; registers of a CUDA thread that each further one takes
FMA_LIMIT = 512  # multiply-adds of one dot per thread, where products are not on matrix units, before it spills


@cache
def _listed() -> frozenset[str]:
    """The schedules in spills.txt, whichever version of Triton spills them: a module is built once for all of them."""
    lines = Path(__file__).with_name("spills.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line.partition(" @ ")[0] for line in lines if not line.startswith("#"))


def spills(module: Module, kernel: Kernel, config: Config) -> bool:
    """Whether a schedule is known to spill registers (spills.txt), though the model says that it need not; `attngen
    verify` finds such."""
    key = schedule_key(module, kernel, config)
    return any(line in _listed() for line in (key, f"{key} mask={module.mask}"))


def schedule_key(module: Module, kernel: Kernel, config: Config) -> str:
    """A schedule as spills.txt names it: `sm80 dkdv+group 128/128 bytes=2 64x32x4x2`, for all masks but lists of
    blocks.

    Its loop over heads, lists of blocks and what they are made of, dropout, entropies and what modifies scores are part
    of the name.
    """
    name = kernel.name + "".join(f"+{loop.body}" for loop in kernel.loops if loop.cls == "all")
    if module.blocks is not None and kernel.dots:
        name += "+blocks" if not module.blocks.data else "+data+pairs" if kernel.reads_pairs else "+data"
    name += "+dropout" * kernel.has_dropout + "+entropy" * kernel.of_entropy + "+8bit" * kernel.reads_quantised
    v, rope = tile_width(module.head_dim_v), f"+{tile_width(module.rope)}" if module.rope else ""
    qk = f"{v}{rope}" if rope else tile_width(module.head_dim_qk)
    tile = f"{config.block_q}x{config.block_kv}x{config.num_warps}x{config.num_stages}{' TMA' if config.tma else ''}"
    tile += f" columns={config.columns}" if config.columns else ""
    score = f" score={module.score}" if module.score != "none" and kernel.loops else ""
    return f"{config.device} {name} {qk}/{v} bytes={config.elem_bytes} {tile}{score}"


def cost(module: Module, kernel: Kernel, config: Config) -> float:
    """Modelled SM cycles of a kernel over one head with as many rows as the schedule row is for; inf if it cannot
    run."""
    fit, shape = fitted(config), (config.max_rows or MANY_ROWS, MANY_ROWS, config.block_q, config.block_kv)
    cycles, programs = _turn(module, kernel, replace(config, max_rows=None, measured=False))
    if cycles == float("inf") or spills(module, kernel, config):
        return float("inf")
    if all(loop.cls == "all" for loop in kernel.loops):
        return cycles
    cycles *= count_tiles(kernel, *shape, reach=REACH)
    listed = module.blocks is not None and module.blocks.data  # data alone says which tiles are partial
    if not listed and kernel.normalises:
        cycles += (
            fit.masked * config.block_q * config.block_kv / programs * count_tiles(kernel, *shape, "partial", REACH)
        )
    own = config.block_q if kernel.program_axis == "q" else config.block_kv
    return (cycles + fit.start / programs * -(-shape[0] // own)) * evaluate(
        repeats(kernel), {**sizes(module, config), **module.widths}
    )


@lru_cache(maxsize=10_000)  # a few modules' rows
def _turn(module: Module, kernel: Kernel, config: Config) -> tuple[float, int]:
    """SM cycles of one turn of a kernel's loop, whatever the number of rows (inf if it cannot run); the programs
    that share an SM."""
    fit, live = fitted(config), registers_per_thread(module, kernel, config)
    device = CLASSES[config.device]
    more = PER_STREAM * max(0, _streams(kernel) - STREAMED) if device.backend == "cuda" else 0
    if (
        why_not_fit(module, kernel, config)
        or live + more > fit.live_limit
        or _is_crammed(module, kernel, config, device)
    ):
        return float("inf"), 0
    threads = config.num_warps * device.threads_per_warp
    how = mode(module, config.elem_bytes)
    rows_of_scores = score_tile(module, kernel, config)[0] if kernel.dots else 0
    crowded = how != "ieee" and config.num_warps > max(
        4, rows_of_scores // 16
    )  # warps that share rows split the columns, at half the rate
    matrix = 0.0
    for op in kernel.dots:
        flops = dot_flops(module, kernel, op, config, device.matrix_rows if how != "ieee" else 1)
        if how == "ieee" and flops / 2 / threads > FMA_LIMIT:
            return float("inf"), 0
        matrix += flops / device.flops_per_cycle[how] * (2 if crowded else 1)
    scores = config.block_q * config.block_kv
    split = config.num_warps > 4
    cycles = (fit.matrix + fit.split_matrix * split) * matrix
    cycles += (fit.alu + fit.split_alu * split + fit.tight * max(0, live - ROOMY)) * scores
    cycles += fit.stream * streamed_bytes(module, kernel, config)
    programs = (
        1 if kernel.pack_gqa else occupancy(module, kernel, config)
    )  # of few queries there are too few to share SMs
    own = config.block_q if kernel.program_axis == "q" else config.block_kv
    cycles += fit.iteration * config.num_warps / 4
    cycles += (
        fit.latency[min(config.num_stages, 3) - 1] + fit.deep * (own * 4 > device.matrix_rows * config.num_warps)
    ) / programs
    return cycles, programs


def _is_crammed(module: Module, kernel: Kernel, config: Config, device: DeviceClass) -> bool:
    """Whether a wide sum has fewer rows than the matrix instruction that reads its operands from shared memory:
    those of smaller instructions lie in registers, and there is no room for these beside it."""
    on_units = mode(module, config.elem_bytes) != "ieee"
    return device.reads_shared and on_units and config.columns > WIDEST_SUM and not from_shared(module, kernel, config)


@cache
def _streams(kernel: Kernel) -> int:
    """The tiles that a turn of the loop over tiles loads for products."""
    bodies = {loop.body for loop in kernel.loops if loop.cls != "all"}
    return max(
        (sum(isinstance(op, Load) and op.type.space == "sram" for op in kernel.block(body).ops) for body in bodies),
        default=0,
    )


def fitted(config: Config) -> Fit:
    """The constants that hold for a schedule row."""
    return DESCRIPTORS if config.tma else POINTERS


def register_limit(config: Config) -> int:
    """Registers per thread that live tiles may take before the compiler spills."""
    return fitted(config).live_limit


def occupancy(module: Module, kernel: Kernel, config: Config) -> int:
    """Programs that share an SM: bound by shared memory and by registers."""
    device = CLASSES[config.device]
    threads = config.num_warps * device.threads_per_warp
    registers = min(
        device.registers_per_thread, registers_per_thread(module, kernel, config) + fitted(config).other_registers
    )
    spare = TMA_BARRIERS if config.tma else 0  # predicted, and with few exceptions found beside the statistics
    by_sram = device.smem_per_sm // max(1, sram_bytes(module, kernel, config) - spare + device.smem_reserved)
    return max(1, min(by_sram, device.registers_per_sm // (registers * threads)))


def dot_flops(module: Module, kernel: Kernel, op: Dot, config: Config, least_rows: int = 1) -> int:
    """FLOPs of one dot on one tile; an accumulator of fewer rows than the matrix instruction still takes all of its."""
    dims = sizes(module, config)
    a, b = (dims[d] for d in op.type.unpadded)
    return 2 * max(a, least_rows) * b * dims[unpadded(op.over)]
