"""Candidates for measurement: the whole grid of schedules, except those that cannot run, spill, or are modelled as
slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from attngen.heuristics import MANY_ROWS, REACH
from attngen.ir import Config, Kernel, Module
from attngen.targets.registry import SPECIALIZERS, backend_of
from attngen.tiles.sizes import block_d_choices, lies_in_pages, sizes, streamed_bytes
from attngen.tiles.tiles import count_tiles, evaluate, repeats

MOST = 16  # most candidates of a kernel
SLOWER = 1.6  # largest ratio of a candidate's modelled cost to the cheapest one's
BYTES = 4  # largest ratio of the bytes that a candidate loads to the fewest

WHY_NOT_FIT = "needs more shared memory than there is"
REGISTERS = "live tiles take more registers than are reserved for them"
SPILLS = "is known to spill (spills.txt of its backend)"
PAGES = "its tiles by descriptor do not lie in pages"
PRODUCTS = "its products spill where they are not on matrix units"
STREAMS = f"loads over {BYTES} times the fewest bytes"
DEEP = "modelled to gain nothing by its deeper pipeline"
SLOW = f"modelled at over {SLOWER} times the cheapest"
MANY = f"not among the {MOST} cheapest"


@dataclass(frozen=True)
class Search:
    """The candidates of a kernel's grid for a device class and element size, cheapest first, and the number of rejected
    configs by reason.

    warp_specialized: configs of the kernel's warp-specialized variants, which are measured along with the candidates.
    """

    kept: tuple[Config, ...]
    grid: tuple[Config, ...]
    rejected: dict[str, int]
    warp_specialized: tuple[Config, ...] = ()

    @property
    def configs(self) -> tuple[Config, ...]:
        """All configs to measure, in order: the cost model's choice, warp-specialized ones, the others from the
        cheapest on."""
        return (*self.kept[:1], *self.warp_specialized, *self.kept[1:])


def choices(chosen: Config, columns: tuple[int, ...] = (0,)) -> dict[str, tuple[int, ...]]:
    """Return the choices of a schedule, by the names of a config's fields, with one more pipeline stage than the cost
    model tries.

    columns: the possible widths of a program's slice of head_dim.
    """
    given = backend_of(chosen).choices
    return {
        "block_q": given.blocks,
        "block_kv": given.blocks,
        "num_warps": given.warps,
        "num_stages": (*reversed(given.stages), given.stages[0] + 1),
        "tma": (False, True) if chosen.tma else (False,),  # select-tiles chooses TMA if possible
        "columns": columns,
    }


def grid(module: Module, kernel: Kernel, chosen: Config) -> Iterator[Config]:
    """Yield `chosen`, the cost model's choice, and then every other schedule of the grid for the same range of rows."""
    yield chosen
    axes = choices(chosen, block_d_choices(module, kernel))
    # The tile of a split-KV kernel has all rows: with another size keys are read twice, or rows are empty.
    axes |= {"block_q": (chosen.block_q,)} if kernel.kv_split else {}
    most = module.blocks.size if module.blocks else axes["block_kv"][-1]  # tiles divide blocks
    for values in product(*axes.values()):
        made: dict[str, Any] = dict(zip(axes, values))
        config = replace(chosen, **made)
        if config != chosen and max(config.block_q, config.block_kv) <= most:
            yield config


def runs(module: Module, kernel: Kernel, configs: Iterable[Config]) -> list[Config]:
    """Return the configs that fit and are not known to spill. Only the compiler can tell more."""
    backends = ((config, backend_of(config)) for config in configs)
    able = [
        config
        for config, b in backends
        if not (b.resources.why_not_fit(module, kernel, config) or b.cost.spills(module, kernel, config))
    ]
    return [config for config in able if lies_in_pages(module, kernel, config)]


def warp_specialized(module: Module, kernel: Kernel, chosen: Config) -> tuple[Config, ...]:
    """Return the configs of a kernel's warp-specialized variants, for the device class and element size of a portable
    config. `module` is the module after the pass dce.

    Such kernels load by TMA descriptors, whose encoding costs the host of a short call more than they save on the
    device, so there are none for few rows. Split-KV kernels always have few rows, so they have them for all ranges.
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
    """Prune the grid without compiling: by the resource model, registers, bytes loaded, and the cost model. `chosen`,
    the cost model's choice, is kept first.

    The module and its kernel, which has loops over tiles, are those before select-tiles.
    """
    configs = tuple(grid(module, kernel, chosen))
    rejected: Counter[str] = Counter()
    left = []
    for config in configs:
        reason = _cannot(module, kernel, config)
        if reason and config != chosen:
            rejected[reason] += 1
        else:
            left.append(config)
    least = min(_loaded(module, kernel, config) for config in left)
    best = backend_of(chosen).cost.cycles(module, kernel, chosen)
    kept: list[Config] = []
    for config in sorted(left, key=lambda c: (c != chosen, backend_of(c).cost.cycles(module, kernel, c))):
        reason = _loses(module, kernel, config, least, best, len(kept)) if config != chosen else None
        if reason:
            rejected[reason] += 1
        else:
            kept.append(config)
    return Search(tuple(kept), configs, dict(rejected))


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
    """Return the bytes that the loops over tiles load for one head of MANY_ROWS rows."""
    tiles = count_tiles(kernel, MANY_ROWS, MANY_ROWS, config.block_q, config.block_kv, reach=REACH)
    return (
        tiles
        * streamed_bytes(module, kernel, config)
        * int(evaluate(repeats(kernel), {**sizes(module, config), **module.widths}))
    )
