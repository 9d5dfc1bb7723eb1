"""select-tiles: choose tile sizes and warps for every device class, element size and range of rows, and the order of
programs.

before:  (no schedule)                        grid(q in cdiv(Nq, BLOCK_Q), ...)
after:   schedule @fwd
           sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=64 num_warps=4 num_stages=1
                                              grid(q in cdiv(Nq, BLOCK_Q) reversed swizzle(8), ...)

The spec's overrides have priority. Otherwise the config is the one that was measured to be the fastest for such kernels
(attngen/schedule), as in `... measured`; without a measurement, the candidate that fits and that the cost model finds
cheapest. If none fits, a line says why, as in `gfx942 bytes=4 none : on gfx942 the kernel @fwd needs ...`. Programs
with the most tiles start first (longest first), SWIZZLE heads at a time, so that the last programs to finish are short.
A kernel that accumulates in order only runs warp-specialized, and gets its configs from the pass that specializes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import ClassVar

import sympy

from attngen.devices import CLASSES
from attngen.errors import FitError
from attngen.heuristics import (
    COMBINED,
    COMPARED,
    COMPARED_EACH,
    FEW_QUERIES,
    FEW_SWIZZLE,
    MANY_ROWS,
    MODELLED,
    MOST_THREADS,
    OF_COLUMNS,
    PACKED,
    PLAIN,
    RANGES,
    ROUNDED,
    SCANNED,
    SCANNED_EACH,
    SHORT_ROWS,
    SPLIT_RANGES,
    STRIP,
    SUMMED,
    SWIZZLE,
    SWIZZLE_ROWS,
    SWIZZLE_ROWS_LISTED,
    UNEVEN,
    UNIT,
    WIDEST_SUM,
)
from attngen.ir.core import Op
from attngen.ir.expr import select
from attngen.ir.kernel import Kernel
from attngen.ir.module import Config, DoesNotFit, Module
from attngen.ir.ops import Load, Map, OrderedAdd
from attngen.schedule.table import Table, committed
from attngen.targets.registry import backend_of
from attngen.tiles.launches import combine_warps
from attngen.tiles.order import first_first_order, order_by_direction
from attngen.tiles.sizes import block_d_choices, elem_sizes, lies_in_pages, mode, tile_width
from attngen.tiles.tiles import evaluate, tile_loops, unbounded, visited
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SelectTiles(Pass):
    name: ClassVar[str] = "select-tiles"
    phase: ClassVar[str] = "scheduled"
    block_q: int | None = None  # the spec's overrides
    block_kv: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    tables: Mapping[str, Table] = field(default_factory=committed)  # measured, by device class

    def run(self, module: Module) -> Module:
        if any(kernel.takes_heads and _is_uneven(kernel) for kernel in module.kernels):
            module = replace(module, hosts=tuple(host.rewrite(_one_head) for host in module.hosts))
        module = module.map_kernels(
            lambda kernel: _accumulation_order(module, kernel) if kernel.adds_in_order else _longest_first(kernel)
        )
        schedules = tuple((k.name, () if k.adds_in_order else tuple(self._configs(module, k))) for k in module.kernels)
        return replace(module, schedules=schedules)

    def _configs(self, module: Module, kernel: Kernel) -> Iterator[Config | DoesNotFit]:
        reasons: dict[int, dict[str, FitError]] = {elem: {} for elem in elem_sizes(module, kernel)}
        for device, elem in product(CLASSES, elem_sizes(module, kernel)):
            if kernel.prepares:
                yield from [_comparing_config(device, elem)] if _compares(kernel) else _walking_configs(device, elem)
                continue
            if kernel.combines_splits:
                yield from _combine_configs(module, device, elem)
                continue
            try:
                modelled = self._modelled(module, kernel, device, elem)
            except FitError as error:
                reasons[elem][device] = error
                if len(reasons[elem]) == len(CLASSES):  # no class fits: report the one with the most shared memory
                    raise reasons[elem][max(CLASSES, key=lambda name: CLASSES[name].smem_per_block)] from None
                yield DoesNotFit(device, elem, error.reason)
                continue
            yield from merged_configs([*self._measured(module, kernel, *modelled)])

    def _modelled(self, module: Module, kernel: Kernel, device: str, elem: int) -> list[Config]:
        """Return the cost model's configs for the fewest rows, for few rows and for any number of rows. FitError if the
        device cannot multiply such elements."""
        if kernel.dots and (how := mode(module, elem)) not in CLASSES[device].flops_per_cycle:
            raise FitError(
                ("dtype",), f"on {device} the kernel @{kernel.name} has no {how} products; expected another dtype"
            )
        if not kernel.pack_gqa:
            return [self._choose(module, kernel, device, elem, limit) for limit in (*MODELLED, None)]
        least, more = (self._choose(module, kernel, device, elem, limit) for limit in (PACKED, FEW_QUERIES))
        return [least, replace(more, max_rows=SHORT_ROWS), replace(more, max_rows=None)]

    def _measured(self, module: Module, kernel: Kernel, least: Config, few: Config, chosen: Config) -> Iterator[Config]:
        """Yield configs for rising numbers of rows: measured ones if there are any, else the cost model's."""
        asked = any((self.block_q, self.block_kv, self.num_warps, self.num_stages))
        table = None if asked else self.tables.get(chosen.device)
        if kernel.kv_split:
            for (limit, _), modelled in zip(SPLIT_RANGES, (least, chosen)):
                yield table and table.config(module, kernel, chosen.elem_bytes, limit) or modelled
            return
        yield least
        if kernel.pack_gqa:  # for any number of heads per group, each of its programs has few iterations
            yield replace(table and table.config(module, kernel, chosen.elem_bytes, SHORT_ROWS) or few, max_rows=None)
            return
        for limit, _ in RANGES:
            modelled = few if limit == SHORT_ROWS else replace(chosen, max_rows=limit)
            yield table and table.config(module, kernel, chosen.elem_bytes, limit) or modelled

    def _choose(self, module: Module, kernel: Kernel, device: str, elem: int, limit: int | None) -> Config:
        def candidates(
            blocks_q: tuple[int, ...], blocks_kv: tuple[int, ...], warps: tuple[int, ...]
        ) -> Iterator[Config]:
            able = elem == 2 and CLASSES[device].tma and any(isinstance(op, Load) and op.via for op in kernel.ops())
            always = limit is None or kernel.kv_split is not None
            for q, kv, w, columns in product(blocks_q, blocks_kv, warps, block_d_choices(module, kernel)):
                plain = Config(
                    device, elem, limit, q, kv, w, self.num_stages or 1, backend=module.backend, columns=columns
                )
                described = replace(plain, tma=able)
                described = described if lies_in_pages(module, kernel, described) else plain
                # Calls of few rows load by pointers, because encoding TMA descriptors costs the host time; by
                # descriptors if the pointer variant does not fit.
                variants = [described] if always else [plain, described]
                if not self.num_stages:
                    variants.append(replace(described, num_stages=2))
                yield next(
                    (config for config in variants if not backend.resources.why_not_fit(module, kernel, config)),
                    variants[0],
                )

        def price(config: Config) -> float:
            choices = [config] if self.num_stages else stage_choices(config)
            return min(backend.cost.cycles(module, kernel, c) for c in choices)

        backend = backend_of(module)
        most = module.blocks.size if module.blocks else backend.choices.blocks[-1]  # tiles divide blocks
        blocks = tuple(b for b in backend.choices.blocks if b <= most)
        given_q, given_kv = (self.block_q,) if self.block_q else blocks, (self.block_kv,) if self.block_kv else blocks
        warps = (self.num_warps,) if self.num_warps else backend.choices.warps
        if kernel.kv_split and limit == PACKED and not self.block_q:
            given_q = (PACKED,)  # the keys take the time, and more rows would be empty
        if kernel.kv_split and not self.block_kv:
            by_rows = any(isinstance(op, Load) and op.pages and not op.via for op in kernel.ops())
            # Looking up the pages of single rows has a latency that longer tiles hide.
            lengths = (2 * UNIT if by_rows else UNIT, UNIT, UNIT // 2, UNIT // 4)
            fit = (kv for kv in lengths if any(price(c) < float("inf") for c in candidates(given_q, (kv,), warps)))
            given_kv = (next(fit, UNIT),)
        if kernel.tile_page:
            given_kv = tuple(kv for kv in given_kv if kernel.tile_page % kv == 0)
        if not tile_loops(kernel):
            rounds = any("GROUPS_V" in t.dims for op in kernel.ops() for t in op.results().values())
            side = (SUMMED if kernel.loops else ROUNDED if rounds else PLAIN) // (
                1 if module.rope else _times_as_wide(module)
            )
            return Config(device, elem, limit, side, side, 4, 1, backend=module.backend)
        if kernel.counts_pairs:
            return Config(device, elem, limit, most, STRIP, 8, 1, backend=module.backend)
        configs = list(candidates(given_q, given_kv, warps))
        best = min(configs, key=price)
        if price(best) < float("inf"):
            return best
        # The spec asked for such configs, though they may spill.
        fitting = [c for c in configs if not backend.resources.why_not_fit(module, kernel, c)]
        if not fitting:
            smallest = min(configs, key=lambda c: (c.block_q * c.block_kv, c.block_q, c.columns))
            raise self._too_large(module, kernel, smallest, [*candidates(blocks, blocks, (smallest.num_warps,))])
        return min(fitting, key=lambda c: (c.block_q * c.block_kv, c.num_warps, c.columns))

    def _too_large(self, module: Module, kernel: Kernel, config: Config, free: list[Config]) -> FitError:
        """Return the error for a smallest config that does not fit. It blames the spec's overrides, unless no config in
        `free`, which ignores them, fits with one stage either."""
        resources = backend_of(module).resources
        free = [replace(r, num_stages=1) for r in free]
        if all(resources.why_not_fit(module, kernel, r) for r in free):
            large = [r for r in free if resources.sram_bytes(module, kernel, r) > CLASSES[r.device].smem_per_block]
            if not large:  # tiles that divide the mask's blocks are not supported by the compiler
                return FitError(("mask",), str(resources.why_not_fit(module, kernel, free[0])))
            change = "head_dim or dtype" if config.elem_bytes > 2 else "head_dim"
            return FitError(("head_dim",), str(resources.why_not_fit(module, kernel, large[0], change)))
        given = {"block_q": self.block_q, "block_kv": self.block_kv, "stages": self.num_stages}
        change = " or ".join(name for name, value in given.items() if value)
        return FitError(("schedule",), str(resources.why_not_fit(module, kernel, config, change)))


def _times_as_wide(module: Module) -> int:
    """Return by which factor the head_dim exceeds WIDEST_SUM. Tiles of kernels without scores have fewer rows by this
    factor."""
    return max(1, tile_width(max(module.head_dim_qk, module.head_dim_v)) // WIDEST_SUM)


def _walking_configs(device: str, elem: int) -> Iterator[Config]:
    """Yield the configs of a kernel that runs over all positions of a sequence, in steps of the sizes in SCANNED."""
    for block in SCANNED:
        warps = max(1, min(block // SCANNED_EACH, MOST_THREADS) // CLASSES[device].threads_per_warp)
        yield Config(device, elem, None if block == SCANNED[-1] else block, block, block, warps, 1)


def _combine_configs(module: Module, device: str, elem: int) -> Iterator[Config]:
    """Yield the configs of a combine kernel: a program has one row of a call, and for many rows one warp has all of
    head_dim."""
    for most, parts in COMBINED:
        warps = 1 if most is None else combine_warps(module, device)
        yield Config(device, elem, most and most // warps, 1, parts, warps, 1, backend=module.backend)


def _compares(kernel: Kernel) -> bool:
    """Whether a kernel compares each query of a tile with each key of a tile."""
    return any(set(op.type.dims) == {"BLOCK_Q", "BLOCK_KV"} for op in kernel.ops() if isinstance(op, Map))


def _comparing_config(device: str, elem: int) -> Config:
    """Return the config of a kernel that compares queries with keys without computing scores."""
    block_q, block_kv = COMPARED
    return Config(
        device,
        elem,
        None,
        block_q,
        block_kv,
        block_q * block_kv // COMPARED_EACH // CLASSES[device].threads_per_warp,
        1,
    )


def stage_choices(config: Config) -> list[Config]:
    """Return the config with each number of pipeline stages, deepest first."""
    return [replace(config, num_stages=s) for s in backend_of(config).choices.stages]


def merged_configs(configs: Sequence[Config | DoesNotFit]) -> Iterator[Config | DoesNotFit]:
    """Yield the lines of a schedule, except those that differ from the next one only in `max_rows` or `measured`."""
    for config, after in zip(configs, [*configs[1:], None]):
        same = (
            isinstance(config, Config)
            and isinstance(after, Config)
            and config == replace(after, max_rows=config.max_rows, measured=config.measured)
        )
        if not same:
            yield config


def _accumulation_order(module: Module, kernel: Kernel) -> Kernel:
    """Return the kernel with the last tiles first, which add first, and with as many heads per swizzle group as have
    their streamed tiles in the L2.

    If earlier tiles visit more tiles, the last heads of each group start with the first tiles (reversed within the
    group), so that the last programs to end are short.
    """
    row = 2 * (module.head_dim_qk + module.head_dim_v) + 4 * module.head_dim_qk  # bytes of q and dO, and of dQ in fp32
    few = FEW_SWIZZLE if kernel.takes_heads and module.head_dim_qk > OF_COLUMNS else 1
    reversed_group = first_first_order(module, kernel)
    room = SWIZZLE_ROWS_LISTED if module.blocks else SWIZZLE_ROWS
    first = replace(
        kernel.grid[0], reversed=True, swizzle=few, swizzle_rows=room // row, reversed_group=reversed_group is not None
    )
    made = replace(kernel, grid=(first, *kernel.grid[1:]))
    return made.rewrite(
        lambda _, op: [
            replace(op, order=order_by_direction(reversed_group, op.order))
            if isinstance(op, OrderedAdd) and op.order is not None
            else op
        ]
    )


def _is_uneven(kernel: Kernel) -> bool:
    """Whether some programs visit many more tiles than others. They end last, even more so with several heads each."""
    tiles = [_visited(kernel, start) for start in range(0, MANY_ROWS, 64)]
    return max(tiles) * len(tiles) > UNEVEN * sum(tiles)


def _one_head(op: Op) -> list[Op]:
    """Rewrite a host program's number of splits so that a program of the fused backward has one query head."""
    if not isinstance(op, Map) or op.name != "splits":
        return [op]
    return [
        replace(
            op,
            expr=op.expr.replace(
                lambda e: isinstance(e, select), lambda e: select(e.args[0], sympy.Integer(1), e.args[2])
            ),
        )
    ]


def _visited(kernel: Kernel, start: int) -> int:
    """Return the number of tiles that the program whose tile starts at `start` visits, in a long sequence."""
    sizes = {**unbounded(kernel), "BLOCK_Q": 64, "BLOCK_KV": 64, "Nq": MANY_ROWS, "Nk": MANY_ROWS}
    return int(evaluate(visited(kernel), {**sizes, f"{kernel.program_axis}_start": start}))


def _longest_first(kernel: Kernel) -> Kernel:
    """Return the kernel with the last tiles first if they visit more, and with SWIZZLE heads per group if tiles
    differ."""
    if kernel.visits_all_tiles or not tile_loops(kernel):
        return kernel
    first, last = (_visited(kernel, x) for x in (0, MANY_ROWS - 64))
    grid = (replace(kernel.grid[0], reversed=last > first, swizzle=SWIZZLE if last != first else 1), *kernel.grid[1:])
    return replace(kernel, grid=grid)
