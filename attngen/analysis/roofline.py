"""Roofline times (Williams, Waterman and Patterson 2009) of a module on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attngen.analysis.cost import occupancy
from attngen.analysis.flops import executed_flops
from attngen.analysis.io import compulsory_bytes, hbm_bytes, standard_bytes
from attngen.analysis.sram import elem_sizes, misfit, sizes, sram_bytes, tile_width
from attngen.analysis.tiles import count_tiles, evaluate
from attngen.devices import CLASSES, Device
from attngen.ir.graph import Kernel, Module, Row


@dataclass(frozen=True)
class Problem:
    """Sizes that a table is made for."""

    batch: int = 1
    q_heads: int = 16
    kv_heads: int = 16
    n_q: int = 16384
    n_kv: int = 16384


@dataclass(frozen=True)
class Estimate:
    """One kernel on one device: schedule, fit, traffic, work and the roof that binds."""

    kernel: str
    row: Row
    sram: int
    limit: int
    loaded: float  # bytes that programs load and store
    bytes: float  # bytes of them that HBM moves, with the device's cache
    flops: float
    compute_s: float
    memory_s: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def binds(self) -> str:
        return "compute" if self.compute_s >= self.memory_s else "memory"

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)


def row_for(module: Module, kernel: Kernel, device: Device, rows: int) -> Row | None:
    """The schedule row that the generated code takes on a device, at the smallest element size; None if no tile fits there."""
    return row_of(module, kernel, device.cls, rows)


def row_of(module: Module, kernel: Kernel, cls: str, rows: int) -> Row | None:
    """The schedule row that the generated code takes on a device class, at the smallest element size; None if no tile fits it."""
    size = min(elem_sizes(module))
    mine = [r for r in module.rows(kernel.name) if (r.device, r.elem_bytes) == (cls, size)]
    return next((r for r in mine if r.max_rows is None or rows <= r.max_rows), None)


def values(module: Module, kernel: Kernel, row: Row, problem: Problem) -> dict[str, Any]:
    """Numbers for the formulas of one kernel: sizes, tiles on chip, tiles visited."""
    own, loop = (problem.n_q, problem.n_kv) if kernel.own_axis == "q" else (problem.n_kv, problem.n_q)
    tiles = count_tiles(kernel, own, loop, row.block_q, row.block_kv) if kernel.loops else 0
    return {
        **sizes(module, row),
        "B": problem.batch,
        "Hq": problem.q_heads,
        "group": problem.q_heads // problem.kv_heads,
        "Nq": problem.n_q,
        "Nk": problem.n_kv,
        "tiles": tiles * problem.batch * problem.q_heads,
    }


def estimate(module: Module, kernel: Kernel, device: Device, problem: Problem) -> Estimate | None:
    """Fit and roofline of one kernel on one device; None if no tile fits there."""
    rows = problem.n_q if kernel.own_axis == "q" else problem.n_kv
    row = row_for(module, kernel, device, rows)
    if row is None:
        return None
    numbers = values(module, kernel, row, problem)
    rate = device.flops[("tf32" if module.precision == "tf32" else "fp32") if row.elem_bytes == 4 else "bf16"]
    flops, loaded = float(evaluate(executed_flops(kernel), numbers)), float(evaluate(hbm_bytes(kernel), numbers))
    assert misfit(module, kernel, row) is None
    cached = working_set(module, kernel, row, device, problem) <= device.cache_bytes
    moved = min(loaded, compulsory_total(module, kernel, problem, row.elem_bytes)) if cached else loaded
    return Estimate(
        kernel.name,
        row,
        sram_bytes(module, kernel, row),
        CLASSES[device.cls].smem_per_block,
        loaded,
        moved,
        flops,
        flops / rate,
        moved / device.hbm_bytes_per_s,
    )


def working_set(module: Module, kernel: Kernel, row: Row, device: Device, problem: Problem) -> float:
    """Bytes that the programs in flight at one time stream through: the other axis' rows of as many heads as they span."""
    own, other = (problem.n_q, problem.n_kv) if kernel.own_axis == "q" else (problem.n_kv, problem.n_q)
    block = row.block_q if kernel.own_axis == "q" else row.block_kv
    in_flight = device.sms * occupancy(module, kernel, row)
    heads = min(-(-in_flight * block // max(1, own)), problem.batch * problem.q_heads)
    per_row = (tile_width(module.head_dim_qk) + tile_width(module.head_dim_v)) * row.elem_bytes
    return float(heads * other * per_row)


def compulsory_total(module: Module, kernel: Kernel, problem: Problem, elem: int) -> float:
    """Bytes of each tensor moved once, for the whole problem: what is left if the cache serves every re-read."""
    numbers = {
        "B": problem.batch,
        "Hq": problem.q_heads,
        "Hkv": problem.kv_heads,
        "Nq": problem.n_q,
        "Nk": problem.n_kv,
        "D_QK": module.head_dim_qk,
        "D_V": module.head_dim_v,
        "elem": elem,
    }
    if module.blocks:
        rows, columns = -(-problem.n_q // module.blocks.size), -(-problem.n_kv // module.blocks.size)
        numbers |= {"Tq": rows, "Tk": columns, "Tq1": rows + 1, "Tk1": columns + 1}
    return float(evaluate(compulsory_bytes(kernel), numbers))


def standard_total(module: Module, direction: str, row: Row, problem: Problem) -> float:
    """Bytes of standard attention for the whole problem."""
    numbers = {**sizes(module, row), "Nq": problem.n_q, "Nk": problem.n_kv}
    return float(evaluate(standard_bytes(direction), numbers)) * problem.batch * problem.q_heads
