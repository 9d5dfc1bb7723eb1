"""Roofline times (Williams, Waterman and Patterson 2009) of a module on a device."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from attngen.cost.flops import executed_flops
from attngen.cost.io import CACHE, IN_FLIGHT, dram_bytes, hbm_bytes, standard_bytes
from attngen.devices import CLASSES, Device
from attngen.heuristics import UNIT
from attngen.interp.numeric import compiled
from attngen.ir import WHOLE, Config, Kernel, Module, only, tile
from attngen.ir.dtypes import ELEMENTS, of_size
from attngen.ir.names import SHARES
from attngen.targets.registry import SPECIALIZERS, backend_of, maker_of
from attngen.tiles.sizes import elem_sizes, lengths, sizes
from attngen.tiles.tiles import count_tiles, evaluate


@dataclass(frozen=True)
class Problem:
    """The sizes for which a table is computed: sequences, heads, and queries and keys per sequence."""

    batch: int = 1
    q_heads: int = 16
    kv_heads: int = 16
    n_q: int = 16384
    n_kv: int = 16384


class RooflineTimes:
    """The times that compute and memory need at their peak rates; the larger one is the lower bound."""

    compute_s: float
    memory_s: float

    @property
    def binds(self) -> str:
        return "compute" if self.compute_s >= self.memory_s else "memory"

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)


@dataclass(frozen=True)
class Estimate(RooflineTimes):
    """One kernel on one device: its config, shared memory, traffic, FLOPs, and times at the peak rates."""

    kernel: str
    config: Config
    sram: int  # bytes of shared memory that a program needs
    limit: int  # bytes of shared memory that a program may have
    loaded: float  # bytes that programs load and store
    bytes: float  # the part of `loaded` that HBM moves; the cache serves the rest
    flops: float
    compute_s: float
    memory_s: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes


def rows_of_call(kernel: Kernel, problem: Problem) -> int:
    """The number of rows by which a call chooses a kernel's config: those of the program axis; with pack-GQA those of
    all heads of a group; for a kernel that combines splits those of all heads and sequences."""
    if kernel.traits.combines_splits:
        return problem.batch * problem.q_heads * problem.n_q
    if kernel.pack_gqa:
        return problem.q_heads // problem.kv_heads * problem.n_q
    return problem.n_q if kernel.program_axis == "q" else problem.n_kv


def config_for(module: Module, kernel: Kernel, device: Device, rows: int) -> Config | None:
    """The config that the generated code uses on a device, at the smallest element size; None if no tile fits."""
    return config_of(module, kernel, device.cls, rows)


def config_of(module: Module, kernel: Kernel, cls: str, rows: int) -> Config | None:
    """The config that the generated code uses on a device class, at the smallest element size; None if no tile fits."""
    size = min(elem_sizes(module, kernel))
    mine = [r for r in module.configs(kernel.name) if (r.device, r.elem_bytes) == (cls, size)]
    return next((r for r in mine if r.max_rows is None or rows <= r.max_rows), None)


def values(module: Module, kernel: Kernel, config: Config, problem: Problem) -> dict[str, Any]:
    """Values for the symbols of one kernel's formulas: sizes, tile sizes and visited tiles. Programs are assumed not to
    split loops."""
    own, loop = (problem.n_q, problem.n_kv) if kernel.program_axis == "q" else (problem.n_kv, problem.n_q)
    group, heads = problem.q_heads // problem.kv_heads, problem.q_heads
    if kernel.pack_gqa:
        own, heads = group * own, problem.kv_heads
    tiles = count_tiles(kernel, own, loop, config.block_q, config.block_kv, queries=problem.n_q) if kernel.loops else 0
    return {
        **sizes(module, config),
        "B": problem.batch,
        "Hq": problem.q_heads,
        "Hkv": problem.kv_heads,
        "group": group,
        **dict.fromkeys(SHARES.values(), 1),
        "queries": problem.n_q,
        **lengths(module, problem.n_q, problem.n_kv),
        "tiles": tiles * problem.batch * heads,
    }


def counts(module: Module, known: dict[str, Any], device: Device) -> dict[str, int]:
    """The numbers that host programs compute on a device, by name, such as the number of programs that split a group of
    heads. Assumptions: those of `numbers_of_call`."""
    found = numbers_of_call(module, known, device)
    scalars = (op for host in module.hosts for op in only(host.ops(), tile.Map) if not op.type.dims)
    return {op.name: found[op.name] for op in scalars}


def numbers_of_call(module: Module, known: dict[str, Any], device: Device) -> dict[str, Any]:
    """All numbers that host programs read or compute on a device, by name.

    Assumptions: sequences fill their caches, pages have UNIT keys if the call gives their size, and all gradients are
    needed.
    """
    ops = [op for host in module.hosts for op in host.ops()]
    needed = {op.name: True for op in only(ops, tile.Arg) if op.role == "flag"}
    fused_configs = (
        config
        for kernel in module.warp_specialized
        if kernel.traits.adds_in_order
        for config in module.configs(kernel.name, kernel.backend)
    )
    fused = any(config.device == device.cls and known["Nk"] > config.min_rows for config in fused_configs)
    page = int(module.cache.page) if module.cache and module.cache.page.isdigit() else UNIT
    of_cache = {"Nc": known["Nk"], "Nn": 0, "page_rows": page, "max_pages": -(-known["Nk"] // page)}
    found: dict[str, Any] = {
        **of_cache,
        **known,
        **needed,
        "fused": fused,
        "num_SMs": device.sms,
        "Gq": known["group"] * known["Nq"],
    }
    for op in ops:
        if isinstance(op, tile.Map) and not op.type.dims:
            found[op.name] = int(compiled(op.expr)(found))
    return found


def chip(module: Module, kernel: Kernel, config: Config, device: Device) -> dict[str, Any]:
    """Values that `dram_bytes` needs in addition to `values`: the size of the cache in bytes, the number of programs in
    flight, and head dimensions without padding."""
    parts = {own: module.widths[whole] for own, whole in WHOLE.items() if config.columns and whole in module.widths}
    return {
        **module.widths,
        **{own: Fraction(width, -(-width // config.columns)) for own, width in parts.items()},
        str(CACHE): device.cache_bytes,
        str(IN_FLIGHT): device.sms * _ctas_per_sm(module, kernel, config),
    }


def _ctas_per_sm(module: Module, kernel: Kernel, config: Config) -> int:
    """The number of programs that share an SM."""
    if config.backend in SPECIALIZERS:
        return kernel.ctas_per_sm
    return backend_of(config).cost.occupancy(module, kernel, config)


def peak(module: Module, config: Config, device: Device) -> float:
    """Peak FLOP/s of a device in the element type of a config."""
    element = ELEMENTS[of_size(module.dtypes, config.elem_bytes)]
    return device.flops["tf32" if (element.products or module.precision) == "tf32" else element.rate]


def estimate(
    module: Module, kernel: Kernel, device: Device, problem: Problem, config: Config | None = None
) -> Estimate | None:
    """The roofline estimate of one kernel on one device; None if no tile fits.

    config: instead of that of the portable kernel, such as one of the warp-specialized kernel that stands in for it,
    which does the same work with other tiles.
    """
    config = config or config_for(module, kernel, device, rows_of_call(kernel, problem))
    if config is None:
        return None
    known = values(module, kernel, config, problem)
    numbers = known | counts(module, known, device)
    rate = peak(module, config, device)
    flops, loaded = float(evaluate(executed_flops(kernel), numbers)), float(evaluate(hbm_bytes(kernel), numbers))
    resources, made = maker_of(config).resources, _made_under(module, kernel, config)
    assert resources.why_not_fit(module, made, config) is None
    moved = float(evaluate(dram_bytes(kernel).total, numbers | chip(module, made, config, device)))
    return Estimate(
        made.name,
        config,
        resources.sram_bytes(module, made, config),
        CLASSES[device.cls].smem_per_block,
        loaded,
        moved,
        flops,
        flops / rate,
        moved / device.hbm_bytes_per_s,
    )


def _made_under(module: Module, kernel: Kernel, config: Config) -> Kernel:
    """The kernel that runs under a config: the kernel itself, or a warp-specialized one that stands in for it."""
    return next((made for made, known in module.stand_ins(kernel.name) if known == config), kernel)


def standard_total(module: Module, direction: str, config: Config, problem: Problem) -> float:
    """Bytes that standard attention moves for all sequences and query heads of a problem."""
    numbers = {**sizes(module, config), "Nq": problem.n_q, "Nk": problem.n_kv}
    return float(evaluate(standard_bytes(direction), numbers)) * problem.batch * problem.q_heads
