"""select-tiles: choose tile sizes and warps for every device class, element size and range of rows, and the order of
programs.

before:  (no schedule)                        grid(q in cdiv(Nq, BLOCK_Q), ...)
after:   schedule @fwd
           sm90 bytes=2 rows<=inf : BLOCK_Q=128 BLOCK_KV=64 num_warps=4 num_stages=1
                                              grid(q in cdiv(Nq, BLOCK_Q) reversed swizzle(8), ...)

The spec's overrides have priority. Otherwise the config is the one that was measured to be the fastest for such kernels
(the tables in attngen/schedule, which `attngen tune` writes), and its line ends in `measured`; without a measurement,
the candidate that fits and that the cost model finds cheapest. If none fits, a line says why, as in `gfx942 bytes=4
none : on gfx942 the kernel @fwd needs ...`.

Programs with the most tiles start first, so that the last ones to finish are short (longest first). SWIZZLE heads run
at a time, so that their keys stay in the L2. A kernel that accumulates in order only runs warp-specialized, and gets
its configs from the pass that specializes it.
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
    COMBINE_SPLITS,
    COMPARE_PAIRS_PER_THREAD,
    COMPARE_TILE,
    ELEMENTWISE_ROWS,
    FEW_QUERIES,
    MANY_ROWS,
    MODELLED,
    MOST_THREADS,
    MULTI_HEAD_DIM,
    MULTI_HEAD_SWIZZLE,
    PACKED,
    QUANTISE_ROWS,
    RANGES,
    SCAN_POSITIONS,
    SCAN_POSITIONS_PER_THREAD,
    SHORT_ROWS,
    SPLIT_RANGES,
    STRIP,
    SUM_ROWS,
    SWIZZLE,
    SWIZZLE_GROUP_BYTES,
    SWIZZLE_GROUP_BYTES_LISTED,
    UNEVEN,
    UNIT,
    WIDEST_ACC,
)
from attngen.ir import Config, DoesNotFit, Kernel, Module, Op, Type, only, select, tile
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
    tables: Mapping[str, Table] = field(default_factory=committed)  # measured configs, by device class

    def run(self, module: Module) -> Module:
        if any(kernel.traits.takes_heads and _is_uneven(kernel) for kernel in module.kernels):
            module = replace(module, hosts=tuple(host.rewrite(_with_one_head_per_program) for host in module.hosts))
        module = module.map_kernels(
            lambda kernel: (
                _accumulation_order(module, kernel) if kernel.traits.adds_in_order else _longest_first(kernel)
            )
        )
        schedules = tuple(
            (k.name, () if k.traits.adds_in_order else tuple(self._configs(module, k))) for k in module.kernels
        )
        return replace(module, schedules=schedules)

    def _configs(self, module: Module, kernel: Kernel) -> Iterator[Config | DoesNotFit]:
        reasons: dict[int, dict[str, FitError]] = {elem: {} for elem in elem_sizes(module, kernel)}
        for device, elem in product(CLASSES, elem_sizes(module, kernel)):
            if kernel.traits.prepares:
                yield from [_pairwise_config(device, elem)] if _is_pairwise(kernel) else _scan_configs(device, elem)
                continue
            if kernel.traits.combines_splits:
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
            yield from merged_configs([*self._by_rows(module, kernel, *modelled)])

    def _modelled(self, module: Module, kernel: Kernel, device: str, elem: int) -> list[Config]:
        """Return the cost model's configs for the fewest rows (at most 64; with pack-GQA at most PACKED), for few rows
        (at most SHORT_ROWS) and for any number of rows.

        Raise FitError if the device cannot multiply such elements.
        """
        if kernel.traits.dots and (how := mode(module, elem)) not in CLASSES[device].flops_per_cycle:
            raise FitError(
                ("dtype",), f"on {device} the kernel @{kernel.name} has no {how} products; expected another dtype"
            )
        if not kernel.pack_gqa:
            return [self._choose(module, kernel, device, elem, limit) for limit in (*MODELLED, None)]
        fewest, more = (self._choose(module, kernel, device, elem, limit) for limit in (PACKED, FEW_QUERIES))
        return [fewest, replace(more, max_rows=SHORT_ROWS), replace(more, max_rows=None)]

    def _by_rows(
        self, module: Module, kernel: Kernel, fewest: Config, few: Config, any_rows: Config
    ) -> Iterator[Config]:
        """Yield the configs of a schedule, for rising numbers of rows: in each range the measured config if there is
        one, else the cost model's, which are `fewest`, `few` and `any_rows`."""
        asked = any((self.block_q, self.block_kv, self.num_warps, self.num_stages))
        table, elem = None if asked else self.tables.get(any_rows.device), any_rows.elem_bytes
        if kernel.kv_split:
            for (limit, _), modelled in zip(SPLIT_RANGES, (fewest, any_rows)):
                yield table and table.config(module, kernel, elem, limit) or modelled
            return
        yield fewest
        if kernel.pack_gqa:  # for any number of heads per group, each of its programs has few iterations
            yield replace(table and table.config(module, kernel, elem, SHORT_ROWS) or few, max_rows=None)
            return
        for limit, _ in RANGES:
            modelled = few if limit == SHORT_ROWS else replace(any_rows, max_rows=limit)
            yield table and table.config(module, kernel, elem, limit) or modelled

    def _choose(self, module: Module, kernel: Kernel, device: str, elem: int, limit: int | None) -> Config:
        """Return the cost model's config for at most `limit` rows (None: any number)."""

        def candidates(
            blocks_q: tuple[int, ...], blocks_kv: tuple[int, ...], warps: tuple[int, ...]
        ) -> Iterator[Config]:
            tma = elem == 2 and CLASSES[device].tma and any(op.via for op in only(kernel.ops(), tile.Load))
            prefers_tma = limit is None or kernel.kv_split is not None
            for q, kv, w, columns in product(blocks_q, blocks_kv, warps, block_d_choices(module, kernel)):
                by_pointers = Config(
                    device, elem, limit, q, kv, w, self.num_stages or 1, backend=module.backend, columns=columns
                )
                by_tma = replace(by_pointers, tma=tma)
                by_tma = by_tma if lies_in_pages(module, kernel, by_tma) else by_pointers
                # Calls of few rows load by pointers, because encoding TMA descriptors costs the host time; by
                # descriptors only if the variant with pointers does not fit.
                variants = [by_tma] if prefers_tma else [by_pointers, by_tma]
                if not self.num_stages:
                    variants.append(replace(by_tma, num_stages=2))
                yield next(
                    (config for config in variants if not backend.resources.why_not_fit(module, kernel, config)),
                    variants[0],
                )

        def cycles(config: Config) -> float:
            choices = [config] if self.num_stages else stage_choices(config)
            return min(backend.cost.cycles(module, kernel, c) for c in choices)

        backend = backend_of(module)
        largest = (
            module.blocks.size if module.blocks else backend.choices.blocks[-1]
        )  # tiles divide the mask's blocks, and chunks
        blocks = tuple(b for b in backend.choices.blocks if b <= largest and module.chunk % b == 0)
        blocks_q, blocks_kv = (self.block_q,) if self.block_q else blocks, (self.block_kv,) if self.block_kv else blocks
        warps = (self.num_warps,) if self.num_warps else backend.choices.warps
        if kernel.kv_split and limit == PACKED and not self.block_q:
            blocks_q = (PACKED,)  # the keys take the time, and more rows would be empty
        if kernel.kv_split and not self.block_kv:
            by_rows = any(op.pages and not op.via for op in only(kernel.ops(), tile.Load))
            # Looking up the pages of single rows has a latency that longer tiles hide.
            lengths = (2 * UNIT if by_rows else UNIT, UNIT, UNIT // 2, UNIT // 4)
            fit = (kv for kv in lengths if any(cycles(c) < float("inf") for c in candidates(blocks_q, (kv,), warps)))
            blocks_kv = (next(fit, UNIT),)
        if kernel.traits.tile_page:
            blocks_kv = tuple(kv for kv in blocks_kv if kernel.traits.tile_page % kv == 0)
        if not tile_loops(kernel):
            return self._config_without_scores(module, kernel, device, elem, limit)
        if kernel.traits.counts_pairs:
            return Config(device, elem, limit, largest, STRIP, 8, 1, backend=module.backend)
        configs = list(candidates(blocks_q, blocks_kv, warps))
        best = min(configs, key=cycles)
        if cycles(best) < float("inf"):
            return best
        # Every candidate spills or does not fit: take the smallest one that fits, though it spills.
        fitting = [c for c in configs if not backend.resources.why_not_fit(module, kernel, c)]
        if not fitting:
            smallest = min(configs, key=lambda c: (c.block_q * c.block_kv, c.block_q, c.columns))
            raise self._too_large(module, kernel, smallest, [*candidates(blocks, blocks, (smallest.num_warps,))])
        return min(fitting, key=lambda c: (c.block_q * c.block_kv, c.num_warps, c.columns))

    @staticmethod
    def _config_without_scores(module: Module, kernel: Kernel, device: str, elem: int, limit: int | None) -> Config:
        """Return the config of a kernel without a loop over tiles. It has one axis of rows, so only one of BLOCK_Q and
        BLOCK_KV occurs in it; both are the same here."""
        rounds = any("GROUPS_V" in t.dims for op in kernel.ops() for t in op.results().values())
        rows = SUM_ROWS if kernel.loops else QUANTISE_ROWS if rounds else ELEMENTWISE_ROWS
        rows //= 1 if module.rope else _head_dim_ratio(module)
        return Config(device, elem, limit, rows, rows, 4, 1, backend=module.backend)

    def _too_large(self, module: Module, kernel: Kernel, config: Config, without_overrides: list[Config]) -> FitError:
        """Return the error for a smallest config that does not fit. It blames the spec's overrides, unless no config
        `without_overrides` fits with one stage either."""
        resources = backend_of(module).resources
        configs = [replace(c, num_stages=1) for c in without_overrides]
        if all(resources.why_not_fit(module, kernel, c) for c in configs):
            large = [c for c in configs if resources.sram_bytes(module, kernel, c) > CLASSES[c.device].smem_per_block]
            if not large:  # tiles that divide the mask's blocks are not supported by the compiler
                return FitError(("mask",), str(resources.why_not_fit(module, kernel, configs[0])))
            change = "head_dim or dtype" if config.elem_bytes > 2 else "head_dim"
            return FitError(("head_dim",), str(resources.why_not_fit(module, kernel, large[0], change)))
        given = {"block_q": self.block_q, "block_kv": self.block_kv, "stages": self.num_stages}
        change = " or ".join(name for name, value in given.items() if value)
        return FitError(("schedule",), str(resources.why_not_fit(module, kernel, config, change)))


def _head_dim_ratio(module: Module) -> int:
    """Return the ratio of head_dim to WIDEST_ACC, at least 1. Tiles of kernels without scores have fewer rows by this
    factor."""
    return max(1, tile_width(max(module.head_dim_qk, module.head_dim_v)) // WIDEST_ACC)


def _scan_configs(device: str, elem: int) -> Iterator[Config]:
    """Yield the configs of a kernel that scans all positions of a sequence, SCAN_POSITIONS at a time."""
    for block in SCAN_POSITIONS:
        warps = max(1, min(block // SCAN_POSITIONS_PER_THREAD, MOST_THREADS) // CLASSES[device].threads_per_warp)
        yield Config(device, elem, None if block == SCAN_POSITIONS[-1] else block, block, block, warps, 1)


def _combine_configs(module: Module, device: str, elem: int) -> Iterator[Config]:
    """Yield the configs of a combine kernel, whose programs have one row of a call each: several warps share the row's
    head_dim if the call has few rows, and one warp has all of it otherwise."""
    for most, splits in COMBINE_SPLITS:
        warps = 1 if most is None else combine_warps(module, device)
        yield Config(device, elem, most and most // warps, 1, splits, warps, 1, backend=module.backend)


def _is_pairwise(kernel: Kernel) -> bool:
    """True if a kernel that prepares tensors compares each query of a tile with each key of a tile."""
    return any(set(op.type.dims) == {"BLOCK_Q", "BLOCK_KV"} for op in only(kernel.ops(), tile.Map))


def _pairwise_config(device: str, elem: int) -> Config:
    """Return the config of a kernel that compares queries with keys without computing scores."""
    block_q, block_kv = COMPARE_TILE
    return Config(
        device,
        elem,
        None,
        block_q,
        block_kv,
        block_q * block_kv // COMPARE_PAIRS_PER_THREAD // CLASSES[device].threads_per_warp,
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
    """Return a kernel that accumulates in order with the launch order of its programs.

    Programs of the last tiles start first, because they add first. A swizzle group has as many heads as have their
    streamed tiles in the L2 together. If the programs of earlier tiles visit more tiles, the last group of heads starts
    with the first tiles instead (`reversed_group`), so that the last programs to end are short.
    """
    # A streamed row has q and dO in 16 bits, and dQ in fp32.
    row_bytes = 2 * (module.head_dim_qk + module.head_dim_v) + 4 * module.head_dim_qk
    several_wide_heads = kernel.traits.takes_heads and module.head_dim_qk > MULTI_HEAD_DIM
    most_heads = MULTI_HEAD_SWIZZLE if several_wide_heads else 1  # 1: no limit
    order_if_reversed = first_first_order(module, kernel)
    group_bytes = SWIZZLE_GROUP_BYTES_LISTED if module.blocks else SWIZZLE_GROUP_BYTES
    tiles = replace(
        kernel.grid[0],
        reversed=True,
        swizzle=most_heads,
        swizzle_rows=group_bytes // row_bytes,
        reversed_group=order_if_reversed is not None,
    )

    def change(_: str, op: Op) -> list[Op]:
        if order_if_reversed is None or not isinstance(op, tile.OrderedAdd) or op.order is None:
            return [op]
        makers = (replace(made, type=Type("i32", (), "reg")) for made in only(order_if_reversed.ops, tile.ListPosition))
        return [*makers, replace(op, order=order_by_direction(order_if_reversed.expr, op.order))]

    return replace(kernel, grid=(tiles, *kernel.grid[1:])).rewrite(change)


def _is_uneven(kernel: Kernel) -> bool:
    """True if the longest program visits more than UNEVEN times as many tiles as the average program. Such a program
    would end long after the others, even later if it had several query heads."""
    tiles = [_visited(kernel, start) for start in range(0, MANY_ROWS, 64)]
    return max(tiles) * len(tiles) > UNEVEN * sum(tiles)


def _with_one_head_per_program(op: Op) -> list[Op]:
    """Rewrite `splits`, the number of programs that share the query heads of a group: if the fused backward runs, each
    has one head.

    In a host program it depends on the most heads per program, `select(_use_fused > 0, FUSED_HEADS, group)`; here that
    becomes `select(_use_fused > 0, 1, group)`.
    """
    if not isinstance(op, tile.Map) or op.name != "splits":
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
    """Return the kernel with the last tiles first if their programs visit more tiles, and with SWIZZLE heads per group
    if programs visit different numbers of tiles.

    With chunks of a sequence there is also a group if the formula does not say which programs visit more, as with
    documents: a call has few query tiles, which may be of one long document. Then the last query tile comes first: it
    is the last one of a document.
    """
    if kernel.traits.visits_all_tiles or not tile_loops(kernel):
        return kernel
    first, last = (_visited(kernel, x) for x in (0, MANY_ROWS - 64))
    of_chunks = kernel.traits.places and last == first
    from_last = last > first or (of_chunks and kernel.program_axis == "q")
    swizzle = SWIZZLE if last != first or of_chunks else 1
    return replace(kernel, grid=(replace(kernel.grid[0], reversed=from_last, swizzle=swizzle), *kernel.grid[1:]))
