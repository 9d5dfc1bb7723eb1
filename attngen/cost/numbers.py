"""The closed forms of `theory`, evaluated for one problem: bytes moved, FLOPs and bytes saved, by schedule and device
class.

For a module without a backward, the numbers of all algorithms are those of the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from attngen.cost.algorithms import kernels
from attngen.cost.flops import executed_flops, flops, useful_flops
from attngen.cost.io import hbm_bytes, standard_bytes, traffic
from attngen.cost.roofline import Problem, config_of, values
from attngen.cost.theory import saved_tensors
from attngen.devices import CLASSES
from attngen.ir import Kernel, Module
from attngen.ir.names import DIRECTIONS
from attngen.tiles.sizes import elem_sizes, lengths, tile_bytes
from attngen.tiles.tiles import evaluate, runs

SPARSE = 8  # the block-sparse rows assume that one tile in this many is visited
ONE = (1, 1)  # (queries, keys) of a tile, for formulas that do not depend on tile sizes
CLASS = "sm90"  # the device class whose tile sizes are used to count the FLOPs of emitted kernels


@dataclass(frozen=True)
class Moved:
    """Bytes that a schedule loads and stores in one layer, with tiles of these (queries, keys)."""

    schedule: str
    cls: str
    tiles: tuple[tuple[int, int], ...]
    forward: float
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Done:
    """FLOPs of one layer, and the tensors that are kept only for its backward, with their size `saved` in bytes."""

    schedule: str
    forward: float
    backward: float
    kept: tuple[str, ...]
    saved: float


def moved(module: Module, problem: Problem) -> Iterator[Moved]:
    """Yield the bytes of standard attention; then, for each device class, those of FlashAttention-1, of our schedule,
    and of ours on one tile in SPARSE.

    Standard attention and FlashAttention-1 visit all tiles, ours those that the mask leaves.
    """
    numbers = textbook_values(module, problem, ONE)
    heads = problem.batch * problem.q_heads
    yield Moved(
        "standard",
        "",
        (),
        *(heads * float(evaluate(standard_bytes(direction), numbers)) for direction in module.directions),
    )
    for cls in CLASSES:
        numbers = textbook_values(module, problem, tile := flash1_tile(module, cls))
        flash1 = (
            sum(_value(traffic(k, tile_bytes, partial(runs, k)), numbers) for k in kernels("flash1", d))
            for d in module.directions
        )
        yield Moved("FlashAttention-1", cls, (tile,), *flash1)
        found = [
            config_of(module, kernel, cls, problem.n_q)
            for d in module.directions
            for kernel in module.kernels_of(d)
            if kernel.loops
        ]
        tiles = tuple((config.block_q, config.block_kv) for config in found if config)
        if len(tiles) < len(found):  # for some kernel no tile fits
            continue
        yield Moved("ours", cls, tiles, *(emitted_bytes(module, d, cls, problem) for d in module.directions))
        yield Moved(
            f"ours, s = 1/{SPARSE}",
            cls,
            tiles,
            *(emitted_bytes(module, d, cls, problem, 1 / SPARSE) for d in module.directions),
        )


def done(module: Module, problem: Problem) -> Iterator[Done]:
    """Yield the FLOPs of standard attention, of FlashAttention-1, and of ours, with each product counted once, and as
    run: our backward computes some products twice, and with split-D each program computes all scores.
    """
    numbers = textbook_values(module, problem, ONE)
    for name, shown in (("standard", "standard"), ("flash1", "FlashAttention-1")):
        forward, backward = (
            kernels(name, direction) if direction in module.directions else () for direction in DIRECTIONS
        )
        work = [sum(_value(flops(k, partial(runs, k)), numbers) for k in some) for some in (forward, backward)]
        yield Done(shown, work[0], work[1], *_kept(forward, backward, numbers))
    forward, backward = (module.kernels_of(direction) for direction in DIRECTIONS)
    kept, saved = _kept(forward, backward, numbers)
    of = {
        kernel.name: _emitted_values(module, kernel, CLASS, problem) for kernel in (*forward, *backward) if kernel.loops
    }
    last = {d: next(k.name for k in reversed(module.kernels_of(d)) if k.loops) for d in module.directions}
    useful = {d: _value(useful_flops(module, d), of[name]) for d, name in last.items()}
    run = [
        sum(_value(executed_flops(kernel), of[kernel.name]) for kernel in some if kernel.loops)
        for some in (forward, backward)
    ]
    yield Done("ours", useful["forward"], useful.get("backward", 0.0), kept, saved)
    yield Done("ours, as run", run[0], run[1], kept, saved)


def _kept(
    forward: Iterable[Kernel], backward: Iterable[Kernel], numbers: dict[str, Any]
) -> tuple[tuple[str, ...], float]:
    args = saved_tensors(forward, backward)
    return tuple(arg.name for arg in args), sum(_value(tile_bytes(arg.type), numbers) for arg in args)


def flash1_tile(module: Module, cls: str) -> tuple[int, int]:
    """B_r queries and B_c keys of a tile of FlashAttention-1 (Algorithm 1, line 1) on a device class, where d is the
    larger head dimension."""
    width = max(module.head_dim_qk, module.head_dim_v)
    columns = -(-(CLASSES[cls].smem_per_block // elem_sizes(module)[0]) // (4 * width))
    return min(columns, width), columns


def emitted_bytes(module: Module, direction: str, cls: str, problem: Problem, share: float = 1) -> float:
    """Bytes that a module's kernels load and store in one direction, with their tile sizes on a device class.

    share: the part of the tiles left by the mask that the kernels visit.
    """
    found = ((kernel, _emitted_values(module, kernel, cls, problem)) for kernel in module.kernels_of(direction))
    return sum(_value(hbm_bytes(kernel), {**numbers, "tiles": numbers["tiles"] * share}) for kernel, numbers in found)


def textbook_values(module: Module, problem: Problem, tile: tuple[int, int]) -> dict[str, int]:
    """Values for the symbols of `standard` and `flash1`, for a tile of (queries, keys). Each query head has its own K
    and V."""
    sizes = {"B": problem.batch, "Hq": problem.q_heads, "Hkv": problem.q_heads}
    sizes |= lengths(module, problem.n_q, problem.n_kv)
    return {**sizes, **module.widths, "elem": elem_sizes(module)[0], "BLOCK_Q": tile[0], "BLOCK_KV": tile[1]}


def _emitted_values(module: Module, kernel: Kernel, cls: str, problem: Problem) -> dict[str, Any]:
    rows = problem.n_q if kernel.program_axis == "q" else problem.n_kv
    config = config_of(module, kernel, cls, rows)
    assert config is not None
    return values(module, kernel, config, problem)


def _value(e: Any, numbers: dict[str, Any]) -> float:
    return float(evaluate(e, numbers))
