"""Which schedules are worth measuring: the whole grid, less what cannot run, would spill, or is modelled to be slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from attngen.heuristics import MANY_ROWS, REACH
from attngen.ir.graph import Config, Kernel, Module
from attngen.targets.registry import SPECIALIZERS, backend_of
from attngen.tiles.sizes import column_choices, lies_in_pages, sizes, streamed_bytes
from attngen.tiles.tiles import count_tiles, evaluate, repeats

MOST = 16  # candidates of a kernel
SLOWER = 1.6  # times the cheapest's modelled cost, at most
BYTES = 4  # times the fewest bytes that a schedule loads, at most

WHY_NOT_FIT = "needs more shared memory than there is"
REGISTERS = "live tiles take more registers than are spared for them"
SPILLS = "is known to spill (spills.txt of its backend)"
PAGES = "its tiles by descriptor do not lie in pages"
PRODUCTS = "its products spill where they are not on matrix units"
STREAMS = f"loads over {BYTES} times the fewest bytes"
DEEP = "modelled to gain nothing by its deeper ring"
SLOW = f"modelled at over {SLOWER} times the cheapest"
MANY = f"not among the {MOST} cheapest"


@dataclass(frozen=True)
class Search:
    """What is left of a kernel's grid for a device class and element size, cheapest first, and how many were rejected,
    by reason.

    divided: rows of kernels that backends divide into roles, which are measured beside those that are kept.
    """

    kept: tuple[Config, ...]
    grid: tuple[Config, ...]
    rejected: dict[str, int]
    warp_specialized: tuple[Config, ...] = ()

    @property
    def rows(self) -> tuple[Config, ...]:
        """All that is measured, in order: the model's choice, divided kernels, the others from the cheapest on."""
        return (*self.kept[:1], *self.warp_specialized, *self.kept[1:])


def choices(chosen: Config, columns: tuple[int, ...] = (0,)) -> dict[str, tuple[int, ...]]:
    """What a schedule can choose, by the names of a row's fields; rings of one tile more than the model tries.

    columns: of a sum, that a program may have.
    """
    given = backend_of(chosen).choices
    return {
        "block_q": given.blocks,
        "block_kv": given.blocks,
        "num_warps": given.warps,
        "num_stages": (*reversed(given.stages), given.stages[0] + 1),
        "tma": (False, True) if chosen.tma else (False,),  # select-tiles takes it wherever it can be had
        "columns": columns,
    }


def grid(module: Module, kernel: Kernel, chosen: Config) -> Iterator[Config]:
    """Every schedule that the axes give for the range of rows of one, `chosen` by the model, which is the first."""
    yield chosen
    axes = choices(chosen, column_choices(module, kernel))
    axes |= (
        {"block_q": (chosen.block_q,)} if kernel.kv_split else {}
    )  # it has all rows: with another one keys are read twice, or rows are empty
    most = module.blocks.size if module.blocks else axes["block_kv"][-1]  # tiles divide blocks
    for values in product(*axes.values()):
        made: dict[str, Any] = dict(zip(axes, values))
        config = replace(chosen, **made)
        if config != chosen and max(config.block_q, config.block_kv) <= most:
            yield config


def runs(module: Module, kernel: Kernel, rows: Iterable[Config]) -> list[Config]:
    """Those that fit, and are not known to spill: the rest is for the compiler to say."""
    backends = ((config, backend_of(config)) for config in rows)
    able = [
        config
        for config, b in backends
        if not (b.resources.why_not_fit(module, kernel, config) or b.cost.spills(module, kernel, config))
    ]
    return [config for config in able if lies_in_pages(module, kernel, config)]


def warp_specialized(module: Module, kernel: Kernel, chosen: Config) -> tuple[Config, ...]:
    """Rows of a kernel that backends divide, for the device class and element size of a portable row. `module` is as
    after the pass dce.

    Such kernels read tiles by descriptors, which cost the host of a short call more than they save the device, so few
    rows have none. Where keys are dealt among programs, calls only ever have few rows, and all have one.
    """
    measured = chosen.max_rows is None or kernel.kv_split is not None
    on_device = (
        specializer for specializer in SPECIALIZERS.values() if specializer.device == chosen.device and measured
    )
    able = (
        specialization
        for specializer in on_device
        for specialization in specializer.specializations
        if specialization.kernel == kernel.name
    )
    return tuple(
        config
        for specialization in able
        for config in specialization.candidates(module)
        if config.elem_bytes == chosen.elem_bytes
    )


def search(module: Module, kernel: Kernel, chosen: Config) -> Search:
    """Prune the grid by symbols alone: fit, registers, bytes loaded, and the cost model. `chosen`, the model's own, is
    kept first.

    Of a module and its kernel, which has loops over tiles, as select-tiles meets them.
    """
    rows = tuple(grid(module, kernel, chosen))
    rejected: Counter[str] = Counter()
    left = []
    for config in rows:
        reason = _cannot(module, kernel, config)
        if reason and config != chosen:
            rejected[reason] += 1
        else:
            left.append(config)
    least = min(_loaded(module, kernel, config) for config in left)
    best = backend_of(chosen).cost.cycles(module, kernel, chosen)
    kept: list[Config] = []
    for config in sorted(left, key=lambda r: (r != chosen, backend_of(r).cost.cycles(module, kernel, r))):
        reason = _loses(module, kernel, config, least, best, len(kept)) if config != chosen else None
        if reason:
            rejected[reason] += 1
        else:
            kept.append(config)
    return Search(tuple(kept), rows, dict(rejected))


def _cannot(module: Module, kernel: Kernel, config: Config) -> str | None:
    resources, cost = backend_of(config).resources, backend_of(config).cost
    if resources.why_not_fit(module, kernel, config):
        return WHY_NOT_FIT
    if resources.registers(module, kernel, config) > cost.register_limit(config):
        return REGISTERS
    if cost.spills(module, kernel, config):
        return SPILLS
    if not lies_in_pages(module, kernel, config):
        return PAGES
    return PRODUCTS if cost.cycles(module, kernel, config) == float("inf") else None


def _loses(module: Module, kernel: Kernel, config: Config, least: int, best: float, kept: int) -> str | None:
    if _loaded(module, kernel, config) > BYTES * least:
        return STREAMS
    shallower = replace(config, num_stages=max(1, config.num_stages - 1))
    cycles = backend_of(config).cost.cycles
    if config.num_stages > 1 and cycles(module, kernel, shallower) <= cycles(module, kernel, config):
        return DEEP
    if cycles(module, kernel, config) > SLOWER * best:
        return SLOW
    return MANY if kept >= MOST else None


def _loaded(module: Module, kernel: Kernel, config: Config) -> int:
    """Bytes that the loops over tiles load for one head of many rows."""
    tiles = count_tiles(kernel, MANY_ROWS, MANY_ROWS, config.block_q, config.block_kv, reach=REACH)
    return (
        tiles
        * streamed_bytes(module, kernel, config)
        * int(evaluate(repeats(kernel), {**sizes(module, config), **module.widths}))
    )
