"""The cost model that tile selection minimises: SM cycles per tile, times the tiles that the mask leaves.

    cycles = matrix * (flops of the tile's dots / rate) + alu * scores + stream * bytes loaded + latency(stages) /
    occupancy

Programs of 8 warps pay `split` more of the first two terms, to keep their halves in step. Partial tiles of the forward
add `masked` * scores / occupancy, because the running maximum waits for the mask (if data lists the blocks, it is not
known which are partial). Fit documents `start`, `tight`, `iteration` and `deep`. If data bounds the loop row by row,
rows up to REACH away count.

The constants are least-squares fits to measured configs of the kernels on one H200: POINTERS for tiles that threads
copy, DESCRIPTORS for tiles that TMA copies. For these the model's choice is 2 to 3% slower than the best on average;
REACH is half a document of usual length (docs/perf-log.md, sections 2, 12 and 14).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from attngen.devices import CLASSES, DeviceClass
from attngen.heuristics import MANY_ROWS, REACH, WIDEST_ACC
from attngen.ir import Config, Kernel, Module, tile, unpadded
from attngen.targets.triton.fit import why_not_fit
from attngen.targets.triton.matrix_units import from_shared, score_tile
from attngen.targets.triton.registers import registers_per_thread
from attngen.targets.triton.sram import TMA_BARRIERS, sram_bytes
from attngen.tiles.sizes import mode, sizes, streamed_bytes, tile_width
from attngen.tiles.tiles import count_tiles, evaluate, repeats


@dataclass(frozen=True)
class Fit:
    """The measured constants of the model, and of the register use of Triton's compiler."""

    matrix: float
    alu: float  # cycles per score: the exponential and the arithmetic around it
    stream: float  # cycles per byte that an iteration loads from L2
    # Cycles per iteration that only other programs on the SM hide, with 1, 2 and 3 stages.
    latency: tuple[float, float, float]
    split_matrix: float
    split_alu: float
    masked: float  # cycles per score of a partial tile of the forward that only other programs on the SM hide
    start: float  # cycles of a program before and after its loops that only other programs on the SM hide
    tight: float  # cycles per score and register of live tiles above ROOMY, where the compiler makes worse code
    iteration: float  # cycles per iteration and four warps, to keep warps in step
    # Cycles per iteration that only other programs hide, if four warps have more rows than a matrix instruction.
    deep: float
    other_registers: int  # registers per thread in addition to those of live tiles
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
SPILLS = "attngen/targets/triton/spills.txt"  # lists configs that spill
STREAMED = 3  # tiles that a loop may load for products without extra registers
PER_STREAM = 24  # registers of a CUDA thread for each further tile
FMA_LIMIT = 512  # most multiply-adds of one dot per thread, without matrix units, before it spills


@cache
def _listed() -> frozenset[str]:
    """The configs in spills.txt, for any version of Triton: a module is built once for all versions."""
    lines = Path(__file__).with_name("spills.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line.partition(" @ ")[0] for line in lines if not line.startswith("#"))


def spills(module: Module, kernel: Kernel, config: Config) -> bool:
    """True if spills.txt lists the config: it spills registers although the model does not predict it. `attngen verify`
    finds these."""
    key = schedule_key(module, kernel, config)
    return any(line in _listed() for line in (key, f"{key} mask={module.mask}"))


def schedule_key(module: Module, kernel: Kernel, config: Config) -> str:
    """A config as spills.txt names it: `sm80 dkdv+group 128/128 bytes=2 64x32x4x2`, the same for all masks.

    The loop over heads, block lists and their kind, dropout, entropies and score modifiers are part of the name.
    """
    name = kernel.name + "".join(f"+{loop.body}" for loop in kernel.loops if loop.cls == "all")
    if module.blocks is not None and kernel.traits.dots:
        name += "+blocks" if not module.blocks.data else "+data+pairs" if kernel.traits.reads_pairs else "+data"
    name += (
        "+dropout" * kernel.traits.has_dropout
        + "+entropy" * kernel.traits.of_entropy
        + "+8bit" * kernel.traits.reads_quantised
    )
    v, rope = tile_width(module.head_dim_v), f"+{tile_width(module.rope)}" if module.rope else ""
    qk = f"{v}{rope}" if rope else tile_width(module.head_dim_qk)
    tile = f"{config.block_q}x{config.block_kv}x{config.num_warps}x{config.num_stages}{' TMA' if config.tma else ''}"
    tile += f" columns={config.columns}" if config.columns else ""
    score = f" score={module.score}" if module.score != "none" and kernel.loops else ""
    return f"{config.device} {name} {qk}/{v} bytes={config.elem_bytes} {tile}{score}"


def cost(module: Module, kernel: Kernel, config: Config) -> float:
    """Modelled SM cycles of a kernel over one head with as many rows as the config is for; inf if it cannot run."""
    fit, shape = fitted(config), (config.max_rows or MANY_ROWS, MANY_ROWS, config.block_q, config.block_kv)
    cycles, programs = _iteration(module, kernel, replace(config, max_rows=None, measured=False))
    if cycles == float("inf") or spills(module, kernel, config):
        return float("inf")
    if all(loop.cls == "all" for loop in kernel.loops):
        return cycles
    cycles *= count_tiles(kernel, *shape, reach=REACH)
    listed = module.blocks is not None and module.blocks.data  # only data says which tiles are partial
    if not listed and kernel.traits.normalises:
        cycles += (
            fit.masked * config.block_q * config.block_kv / programs * count_tiles(kernel, *shape, "partial", REACH)
        )
    own = config.block_q if kernel.program_axis == "q" else config.block_kv
    return (cycles + fit.start / programs * -(-shape[0] // own)) * evaluate(
        repeats(kernel), {**sizes(module, config), **module.widths}
    )


@lru_cache(maxsize=10_000)  # the configs of a few modules
def _iteration(module: Module, kernel: Kernel, config: Config) -> tuple[float, int]:
    """SM cycles of one iteration of a kernel's loop (inf if it cannot run), and the programs that share an SM."""
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
    rows_of_scores = score_tile(module, kernel, config)[0] if kernel.traits.dots else 0
    # Warps that share rows split the columns, at half the rate.
    crowded = how != "ieee" and config.num_warps > max(4, rows_of_scores // 16)
    matrix = 0.0
    for op in kernel.traits.dots:
        flops = dot_flops(module, kernel, op, config, device.matrix_rows if how != "ieee" else 1)
        if how == "ieee" and flops / 2 / threads > FMA_LIMIT:
            return float("inf"), 0
        matrix += flops / device.flops_per_cycle[how] * (2 if crowded else 1)
    scores = config.block_q * config.block_kv
    split = config.num_warps > 4
    cycles = (fit.matrix + fit.split_matrix * split) * matrix
    cycles += (fit.alu + fit.split_alu * split + fit.tight * max(0, live - ROOMY)) * scores
    cycles += fit.stream * streamed_bytes(module, kernel, config)
    # With packed heads there are few queries, so too few programs to share SMs.
    programs = 1 if kernel.pack_gqa else occupancy(module, kernel, config)
    own = config.block_q if kernel.program_axis == "q" else config.block_kv
    cycles += fit.iteration * config.num_warps / 4
    cycles += (
        fit.latency[min(config.num_stages, 3) - 1] + fit.deep * (own * 4 > device.matrix_rows * config.num_warps)
    ) / programs
    return cycles, programs


def _is_crammed(module: Module, kernel: Kernel, config: Config, device: DeviceClass) -> bool:
    """True if a wide accumulator has fewer rows than the matrix instruction that reads operands from shared memory.

    Smaller instructions have their operands in registers, which have no room for them next to the accumulator.
    """
    on_units = mode(module, config.elem_bytes) != "ieee"
    return device.reads_shared and on_units and config.columns > WIDEST_ACC and not from_shared(module, kernel, config)


@cache
def _streams(kernel: Kernel) -> int:
    """The number of tiles that an iteration of the loop over tiles loads for products."""
    bodies = {loop.body for loop in kernel.loops if loop.cls != "all"}
    return max(
        (
            sum(isinstance(op, tile.Load) and op.type.space == "sram" for op in kernel.block(body).ops)
            for body in bodies
        ),
        default=0,
    )


def fitted(config: Config) -> Fit:
    """The model's constants for a config."""
    return DESCRIPTORS if config.tma else POINTERS


def register_limit(config: Config) -> int:
    """Registers per thread that live tiles may take before the compiler spills."""
    return fitted(config).live_limit


def occupancy(module: Module, kernel: Kernel, config: Config) -> int:
    """The number of programs that share an SM, as shared memory and registers allow."""
    device = CLASSES[config.device]
    threads = config.num_warps * device.threads_per_warp
    registers = min(
        device.registers_per_thread, registers_per_thread(module, kernel, config) + fitted(config).other_registers
    )
    spare = TMA_BARRIERS if config.tma else 0  # in the formula, but nearly always placed next to the statistics
    by_sram = device.smem_per_sm // max(1, sram_bytes(module, kernel, config) - spare + device.smem_reserved)
    return max(1, min(by_sram, device.registers_per_sm // (registers * threads)))


def dot_flops(module: Module, kernel: Kernel, op: tile.Dot, config: Config, least_rows: int = 1) -> int:
    """FLOPs of one dot on one tile. An accumulator with fewer rows than the matrix instruction takes all its rows."""
    dims = sizes(module, config)
    a, b = (dims[d] for d in op.type.unpadded)
    return 2 * max(a, least_rows) * b * dims[unpadded(op.over)]
