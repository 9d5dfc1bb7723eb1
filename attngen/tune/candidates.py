"""Which schedules are worth measuring: the whole grid, less what cannot run, would spill, or is modelled to be slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from attngen.heuristics import MANY_ROWS, REACH
from attngen.ir.graph import Kernel, Module, Row
from attngen.targets.registry import DIVIDERS, backend_of
from attngen.tiles.sizes import column_choices, lies_in_pages, sizes, streamed_bytes
from attngen.tiles.tiles import count_tiles, evaluate, repeats

MOST = 16  # candidates of a kernel
SLOWER = 1.6  # times the cheapest's modelled cost, at most
BYTES = 4  # times the fewest bytes that a schedule loads, at most

MISFIT = "needs more shared memory than there is"
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
    """What is left of a kernel's grid for a device class and element size, cheapest first, and how many were rejected, by reason.

    divided: rows of kernels that backends divide into roles, which are measured beside those that are kept.
    """

    kept: tuple[Row, ...]
    grid: tuple[Row, ...]
    rejected: dict[str, int]
    divided: tuple[Row, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """All that is measured, in order: the model's choice, divided kernels, the others from the cheapest on."""
        return (*self.kept[:1], *self.divided, *self.kept[1:])


def choices(chosen: Row, columns: tuple[int, ...] = (0,)) -> dict[str, tuple[int, ...]]:
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


def grid(module: Module, kernel: Kernel, chosen: Row) -> Iterator[Row]:
    """Every schedule that the axes give for the range of rows of one, `chosen` by the model, which is the first."""
    yield chosen
    axes = choices(chosen, column_choices(module, kernel))
    axes |= (
        {"block_q": (chosen.block_q,)} if kernel.deal else {}
    )  # it has all rows: with another one keys are read twice, or rows are empty
    most = module.blocks.size if module.blocks else axes["block_kv"][-1]  # tiles divide blocks
    for values in product(*axes.values()):
        made: dict[str, Any] = dict(zip(axes, values))
        row = replace(chosen, **made)
        if row != chosen and max(row.block_q, row.block_kv) <= most:
            yield row


def runs(module: Module, kernel: Kernel, rows: Iterable[Row]) -> list[Row]:
    """Those that fit, and are not known to spill: the rest is for the compiler to say."""
    backends = ((row, backend_of(row)) for row in rows)
    able = [row for row, b in backends if not (b.footprint.misfit(module, kernel, row) or b.cost.spills(module, kernel, row))]
    return [row for row in able if lies_in_pages(module, kernel, row)]


def divided(module: Module, kernel: Kernel, chosen: Row) -> tuple[Row, ...]:
    """Rows of a kernel that backends divide, for the device class and element size of a portable row. `module` is as after the pass dce.

    Such kernels read tiles by descriptors, which cost the host of a short call more than they save the device, so few rows have none.
    Where keys are dealt among programs, calls only ever have few rows, and all have one.
    """
    measured = chosen.max_rows is None or kernel.deal is not None
    on_device = (divider for divider in DIVIDERS.values() if divider.device == chosen.device and measured)
    able = (division for divider in on_device for division in divider.divisions if division.kernel == kernel.name)
    return tuple(row for division in able for row in division.candidates(module) if row.elem_bytes == chosen.elem_bytes)


def search(module: Module, kernel: Kernel, chosen: Row) -> Search:
    """Prune the grid by symbols alone: fit, registers, bytes loaded, and the cost model. `chosen`, the model's own, is kept first.

    Of a module and its kernel, which has loops over tiles, as select-tiles meets them.
    """
    rows = tuple(grid(module, kernel, chosen))
    rejected: Counter[str] = Counter()
    left = []
    for row in rows:
        reason = _cannot(module, kernel, row)
        if reason and row != chosen:
            rejected[reason] += 1
        else:
            left.append(row)
    least = min(_loaded(module, kernel, row) for row in left)
    best = backend_of(chosen).cost.cycles(module, kernel, chosen)
    kept: list[Row] = []
    for row in sorted(left, key=lambda r: (r != chosen, backend_of(r).cost.cycles(module, kernel, r))):
        reason = _loses(module, kernel, row, least, best, len(kept)) if row != chosen else None
        if reason:
            rejected[reason] += 1
        else:
            kept.append(row)
    return Search(tuple(kept), rows, dict(rejected))


def _cannot(module: Module, kernel: Kernel, row: Row) -> str | None:
    footprint, cost = backend_of(row).footprint, backend_of(row).cost
    if footprint.misfit(module, kernel, row):
        return MISFIT
    if footprint.registers(module, kernel, row) > cost.register_limit(row):
        return REGISTERS
    if cost.spills(module, kernel, row):
        return SPILLS
    if not lies_in_pages(module, kernel, row):
        return PAGES
    return PRODUCTS if cost.cycles(module, kernel, row) == float("inf") else None


def _loses(module: Module, kernel: Kernel, row: Row, least: int, best: float, kept: int) -> str | None:
    if _loaded(module, kernel, row) > BYTES * least:
        return STREAMS
    shallower = replace(row, num_stages=max(1, row.num_stages - 1))
    cycles = backend_of(row).cost.cycles
    if row.num_stages > 1 and cycles(module, kernel, shallower) <= cycles(module, kernel, row):
        return DEEP
    if cycles(module, kernel, row) > SLOWER * best:
        return SLOW
    return MANY if kept >= MOST else None


def _loaded(module: Module, kernel: Kernel, row: Row) -> int:
    """Bytes that the loops over tiles load for one head of many rows."""
    tiles = count_tiles(kernel, MANY_ROWS, MANY_ROWS, row.block_q, row.block_kv, reach=REACH)
    return tiles * streamed_bytes(module, kernel, row) * int(evaluate(repeats(kernel), {**sizes(module, row), **module.widths}))
