"""Tuning: what is measured in which order, within a budget, and which schedule wins."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from attngen.backends import backend_of
from attngen.bounds.sizes import elem_sizes
from attngen.ir.dtypes import ELEMENTS, of_size
from attngen.ir.graph import Kernel, Module, Row
from attngen.passes.pipeline import stages
from attngen.policy import RANGES, SHORT_ROWS
from attngen.schedules.classes import Key, key
from attngen.schedules.table import Entry, schedule_of, usable
from attngen.spec import Schedule, Spec
from attngen.tune.candidates import Search, runs, search
from attngen.tune.workers import Lost

NO_LIMIT = 2**30  # rows
LIMIT_S = 30.0  # for one request
NOISE = 0.02  # what is faster by less is not faster
SCREEN_ROUNDS, FINAL_ROUNDS = 2, 7  # of every candidate alone; of the best, interleaved
MOST_LOST = 3  # of a cell: what it measures against may be what hangs
FINALISTS = 3  # besides the model's choice

Answer = tuple[float, ...] | str  # milliseconds of each round, or why there are none


class Cell(NamedTuple):
    """What candidates compete for: a kernel of a spec's module, for as many queries and keys as `rows`."""

    spec: str
    kernel: str
    rows: int
    dtype: str


Ask = Callable[[tuple[Cell, Sequence[Row], int], float], list[Answer]]  # of a request, and a limit in seconds; raises Lost


@dataclass(frozen=True)
class Plan:
    """A spec's module, made without measured schedules, and what is to be measured: by kernel, dtype, whether rows are few."""

    module: Module
    placed: Module  # as select-tiles meets it, for the model
    searches: dict[tuple[str, str, bool], Search]

    def cells(self) -> Iterator[tuple[Cell, Search]]:
        """For each number of rows all kernels, which share its inputs."""
        for limit, rows in RANGES:
            for (kernel, dtype, few), found in self.searches.items():
                if few == (limit == SHORT_ROWS):
                    yield Cell(self.module.name, kernel, rows, dtype), found

    def kernel(self, cell: Cell) -> Kernel:
        return self.placed.kernel(cell.kernel)

    def key(self, cell: Cell) -> Key:
        """The key of the cell's entry in the table."""
        limit = next(limit for limit, rows in RANGES if rows == cell.rows)
        return key(self.placed, self.kernel(cell), ELEMENTS[cell.dtype].bytes, limit)


def plan(spec: Spec, device_class: str) -> Plan:
    """What to measure of a spec, whatever schedule it asks for, on a device class: one dtype of each size, kernels that have one there."""
    made = dict(stages(spec.model_copy(update={"schedule": Schedule()}), {}))
    placed, module = made["describe-loads"], made["legalize-triton"]
    searches = {}
    for kernel in (*placed.kernels_of("forward"), *placed.kernels_of("backward")):
        for elem, rows in product(elem_sizes(module), (SHORT_ROWS, NO_LIMIT)):
            dtype = of_size(module.dtypes, elem)
            mine = [r for r in module.rows(kernel.name) if (r.device, r.elem_bytes) == (device_class, elem)]
            chosen = next((r for r in mine if rows <= (r.max_rows or NO_LIMIT)), None)
            if chosen:
                few = rows == SHORT_ROWS
                searches[kernel.name, dtype, few] = search(placed, kernel, replace(chosen, max_rows=SHORT_ROWS if few else None))
    return Plan(module, placed, searches)


@dataclass(frozen=True)
class Tried:
    """One schedule: its modelled cost, milliseconds when measured alone, those of each round beside the best; or why there are none."""

    row: Row
    cost: float
    ms: float | None = None
    rounds: tuple[float, ...] = ()
    failed: str = ""

    @property
    def median(self) -> float:
        """Milliseconds: beside the best if it was, else alone."""
        return statistics.median(self.rounds) if self.rounds else self.ms or float("inf")

    @property
    def spread(self) -> float:
        """(largest - smallest) / median of the rounds."""
        return (max(self.rounds) - min(self.rounds)) / self.median if self.rounds else 0.0


@dataclass(frozen=True)
class Outcome:
    """What was found for a cell: the model's choice first, then the others as modelled; how many the budget left out; seconds taken."""

    cell: Cell
    tried: tuple[Tried, ...]
    left_out: int
    seconds: float

    def winner(self, plan: Plan) -> Tried | None:
        """The fastest that select-tiles would take, if it is faster than the model's choice by more than both spread."""
        model, *_ = self.tried
        ran = [t for t in self.tried if t.ms is not None and usable(plan.placed, plan.kernel(self.cell), t.row)]
        if not ran:
            return None
        fastest = min(ran, key=lambda t: (not t.rounds, t.median))
        gain = 1 - fastest.median / model.median
        return model if model in ran and gain <= max(NOISE, fastest.spread, model.spread) else fastest

    def entry(self, plan: Plan, triton: str) -> Entry | None:
        """Its entry of the table; None where nothing ran."""
        model, *_ = self.tried
        best = self.winner(plan)
        if best is None:
            return None
        known = round(model.median, 4) if model.ms is not None else None
        return Entry(schedule_of(best.row), round(best.median, 4), schedule_of(model.row), known, triton)

    def correlation(self) -> float | None:
        """Spearman's, of modelled costs and measured times."""
        ran = [t for t in self.tried if t.ms is not None]
        return spearman([t.cost for t in ran], [t.ms for t in ran if t.ms is not None])

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        return asdict(self) | {"cell": self.cell._asdict()}


def outcome(data: dict[str, Any]) -> Outcome:
    """An outcome from what `plain` gave."""
    tried = (Tried(**{**t, "row": Row(**t["row"]), "rounds": tuple(t["rounds"])}) for t in data["tried"])
    return Outcome(Cell(**data["cell"]), tuple(tried), data["left_out"], data["seconds"])


def compete(cell: Cell, plan: Plan, rows: Iterable[Row], ask: Ask, budget_s: float = float("inf")) -> Outcome:
    """Measure schedules one after another, until the budget is spent; then the best of them and the model's choice, interleaved.

    One that hangs, crashes, spills or is wrong is out, with the reason. Where too many hang or crash, the rest is left out.
    """
    started, kernel = time.perf_counter(), plan.kernel(cell)
    tried: list[Tried] = []
    left_out = lost = 0
    for row in rows:
        if tried and time.perf_counter() - started > budget_s or lost == MOST_LOST:
            left_out += 1
            continue
        price = backend_of(row).cost.cycles(plan.placed, kernel, row)
        try:
            (answer,) = ask((cell, [row], SCREEN_ROUNDS), LIMIT_S)
        except Lost as error:
            answer, lost = str(error), lost + 1
        tried.append(Tried(row, price, failed=answer) if isinstance(answer, str) else Tried(row, price, statistics.median(answer)))
    ran = sorted((t for t in tried if t.ms is not None), key=lambda t: t.median)
    model = [t for t in tried[:1] if t in ran]
    final = model + [t for t in ran if t not in model][:FINALISTS]
    beside = {t.row: t for t in _together(ask, cell, final)}
    return Outcome(cell, tuple(beside.get(t.row, t) for t in tried), left_out, time.perf_counter() - started)


def _together(ask: Ask, cell: Cell, tried: Sequence[Tried]) -> list[Tried]:
    """Schedules that ran alone, measured beside each other; where that fails, their times stand."""
    answers: Sequence[Answer] = [""] * len(tried)
    if tried:
        with suppress(Lost):
            answers = ask((cell, [t.row for t in tried], FINAL_ROUNDS), LIMIT_S)
    return [t if isinstance(answer, str) else replace(t, rounds=answer) for t, answer in zip(tried, answers)]


@dataclass(frozen=True)
class Compared:
    """A pruned search beside the whole grid, of one cell: schedules, seconds with their compilation, and the best of each."""

    cell: Cell
    pruned: int
    pruned_s: float
    pruned_best: Tried
    whole: int
    whole_s: float
    whole_best: Tried

    @property
    def loss(self) -> float:
        """By how much the pruned search's best is slower."""
        return self.pruned_best.median / self.whole_best.median - 1


def compare(cell: Cell, plan: Plan, found: Search, ask: Ask, compile_ahead: Callable[[Cell, Sequence[Row]], float]) -> Compared | None:
    """Search what is left of a kernel's grid, then all of it that fits and is not known to spill; None where nothing ran.

    `compile_ahead` gives the seconds that it took. The best of each are measured once more, beside each other.
    """
    kernel = plan.kernel(cell)
    rest = [row for row in runs(plan.placed, kernel, found.grid) if row not in found.kept]
    compile_s = compile_ahead(cell, found.kept)
    pruned = compete(cell, plan, found.kept, ask)
    rest_s = compile_ahead(cell, rest)
    whole = compete(cell, plan, [*found.kept, *rest], ask)
    best = [min(o.tried, key=lambda t: (not t.rounds, t.median)) for o in (pruned, whole)]
    if any(t.ms is None for t in best):
        return None
    mine, theirs = _together(ask, cell, best)
    seconds = compile_s + pruned.seconds, compile_s + rest_s + whole.seconds
    return Compared(cell, len(pruned.tried), seconds[0], mine, len(whole.tried), seconds[1], theirs)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The rank correlation of two series (Spearman 1904); equal numbers share their mean rank. None where one does not vary."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(numbers: Sequence[float]) -> list[float]:
    ordered = sorted(numbers)
    return [ordered.index(x) + (ordered.count(x) - 1) / 2 for x in numbers]
