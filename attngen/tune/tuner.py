"""Tuning: what is measured in which order, within a budget, and which schedule wins."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from attngen.heuristics import NOISE
from attngen.ir.dtypes import ELEMENTS, of_size
from attngen.ir.graph import Config, Kernel, Module
from attngen.lowering.pipeline import specialize, stages
from attngen.schedule.table import Entry, WarpSpecialized, schedule_of, usable
from attngen.spec import Schedule, Spec
from attngen.targets.registry import SPECIALIZERS, backend_of
from attngen.tiles.classes import Key, key, ranges
from attngen.tiles.sizes import elem_sizes
from attngen.tune.candidates import Search, runs, search, warp_specialized
from attngen.tune.workers import Lost

NO_LIMIT = 2**30  # rows
LIMIT_S = 30.0  # for one request
SCREEN_ROUNDS, FINAL_ROUNDS = 2, 7  # of every candidate alone; of the best, interleaved
MOST_LOST = 3  # of a cell and a backend: what it measures against may be what hangs
UNCERTIFIED = "gets no certificate: it "  # what divided kernels are out for before they are measured, and its reason
FINALISTS = 3  # of each backend, besides the model's choice

Answer = tuple[float, ...] | str  # milliseconds of each round, or why there are none


class Cell(NamedTuple):
    """What candidates compete for: a kernel of a spec's module, for as many queries and keys as `rows`; of a kernel
    that deals keys, for so many rows of queries that share a K/V head."""

    spec: str
    kernel: str
    rows: int
    dtype: str


Ask = Callable[
    [tuple[Cell, Sequence[Config], int], float], list[Answer]
]  # of a request, and a limit in seconds; raises Lost


def home(spec: str, config: Config) -> str:
    """The name of the folder of the module whose kernel a row is measured with: of divided kernels, each row has a
    module."""
    tile = f"{config.tile}x{config.num_warps}x{config.num_stages}"
    return f"{spec}-{config.backend}-{tile}" if config.backend in SPECIALIZERS else spec


@dataclass(frozen=True)
class Plan:
    """A spec's module, made without measured schedules, and what is to be measured: by kernel, dtype, whether rows
    are few."""

    module: Module  # all of it portable
    placed: Module  # as select-tiles meets it, for the model
    whole: Module  # as backends meet it that divide kernels
    searches: dict[tuple[str, str, bool], Search]

    def cells(self) -> Iterator[tuple[Cell, Search]]:
        """For each number of rows all kernels, which share its inputs."""
        cells = []
        for (kernel, dtype, few), found in self.searches.items():
            least, *others = ranges(self.placed.kernel(kernel))
            cells += [(Cell(self.module.name, kernel, rows, dtype), found) for _, rows in ([least] if few else others)]
        yield from sorted(cells, key=lambda pair: pair[0].rows)

    def ahead(self, cell: Cell) -> Cell:
        """The cell with the fewest rows for which the same is compiled. Kernels that deal keys are compiled for
        numbers of a call."""
        kernel = self.kernel(cell)
        return cell if kernel.kv_split else cell._replace(rows=ranges(kernel)[0][1])

    @cached_property
    def warp_specialized(self) -> dict[Config, Module]:
        """The module with its kernel divided, for each such row that is to be measured."""
        return {
            row: specialize(self.whole, kernel, row)
            for (kernel, *_), found in self.searches.items()
            for row in found.warp_specialized
        }

    def kernel(self, cell: Cell) -> Kernel:
        return self.placed.kernel(cell.kernel)

    def key(self, cell: Cell) -> Key:
        """The key of the cell's entry in the table."""
        limit = next(limit for limit, rows in ranges(self.kernel(cell)) if rows == cell.rows)
        return key(self.placed, self.kernel(cell), ELEMENTS[cell.dtype].bytes, limit)


def plan(spec: Spec, device_class: str) -> Plan:
    """What to measure of a spec, whatever schedule it asks for, on a device class: one dtype of each size, kernels
    that have one there."""
    made = dict(stages(spec.model_copy(update={"schedule": Schedule(backend="triton")}), {}))
    placed, whole, module = made["use-tma"], made["dce"], made["legalize-triton"]
    searches = {}
    dealing = [placed.dealing] if placed.dealing else []
    directions = {name: placed.kernels_of(name) for name in ("forward", "backward", "jvp", "decode")}
    for kernel in (
        *directions["forward"],
        *directions["backward"],
        *directions["jvp"],
        *dealing,
        *directions["decode"],
    ):
        (least, _), *_ = ranges(kernel)
        for elem, rows in product(elem_sizes(module), (least or NO_LIMIT, NO_LIMIT)):
            dtype = of_size(module.dtypes, elem)
            mine = [r for r in module.configs(kernel.name) if (r.device, r.elem_bytes) == (device_class, elem)]
            chosen = next((r for r in mine if rows <= (r.max_rows or NO_LIMIT)), None)
            if chosen:
                few = rows != NO_LIMIT
                chosen = replace(chosen, max_rows=least if few else None)
                found = search(placed, kernel, chosen)
                searches[kernel.name, dtype, few] = replace(
                    found, warp_specialized=warp_specialized(whole, kernel, chosen)
                )
    return Plan(module, placed, whole, searches)


@dataclass(frozen=True)
class Tried:
    """One schedule: its modelled cost, milliseconds when measured alone, those of each round beside the best; or why
    there are none."""

    config: Config
    cost: float | None  # None: there is no model of kernels that are divided
    ms: float | None = None
    rounds: tuple[float, ...] = ()
    failed: str = ""

    @property
    def median(self) -> float:
        """Milliseconds: beside the best if it was, else alone."""
        return statistics.median(self.rounds) if self.rounds else self.ms or float("inf")

    @property
    def portable(self) -> bool:
        """Whether its kernel is the portable one, not one that a backend divided."""
        return self.config.backend not in SPECIALIZERS

    def beats(self, other: Tried) -> bool:
        """Whether it is faster by more than noise, and in all rounds but one. A GPU that grows slower as it warms
        slows both of a round."""
        ratios = [mine / theirs for mine, theirs in zip(self.rounds, other.rounds)] or [self.median / other.median]
        lost = sum(ratio >= 1 for ratio in ratios)
        most = 1 if len(ratios) == FINAL_ROUNDS else 0
        return lost <= most and 1 - statistics.median(ratios) > NOISE


@dataclass(frozen=True)
class Outcome:
    """What was found for a cell: the model's choice first, then the others as modelled; how many the budget left
    out; seconds taken."""

    cell: Cell
    tried: tuple[Tried, ...]
    left_out: int
    seconds: float

    def winner(self, plan: Plan) -> Tried | None:
        """The fastest portable one that select-tiles would take, if it beats the model's choice."""
        model, *_ = self.tried
        kernel = plan.kernel(self.cell)
        ran = [t for t in self.tried if t.ms is not None and t.portable and usable(plan.placed, kernel, t.config)]
        if not ran:
            return None
        fastest = min(ran, key=lambda t: (not t.rounds, t.median))
        return model if model in ran and not fastest.beats(model) else fastest

    def warp_specialized(self, plan: Plan) -> list[Tried]:
        """Those of divided kernels that beat the fastest portable one, the fastest first."""
        best = self.winner(plan)
        ran = [t for t in self.tried if t.ms is not None and not t.portable and best and t.beats(best)]
        return sorted(ran, key=lambda t: (not t.rounds, t.median))

    def entry(self, plan: Plan, triton: str) -> Entry | None:
        """Its entry of the table; None where nothing ran."""
        model, *_ = self.tried
        best = self.winner(plan)
        if best is None:
            return None
        known = round(model.median, 4) if model.ms is not None else None
        faster = tuple(
            WarpSpecialized(t.config.backend, schedule_of(t.config), round(t.median, 4))
            for t in self.warp_specialized(plan)
        )
        return Entry(
            schedule_of(best.config),
            round(best.median, 4),
            schedule_of(model.config),
            known,
            triton,
            faster if self._compares() else None,
        )

    def _compares(self) -> bool:
        """Whether it says how divided kernels do: one ran, or none has a certificate. Others may fail for want of a
        driver."""
        mine = [t for t in self.tried if not t.portable]
        return any(t.ms is not None for t in mine) or (
            bool(mine) and all(t.failed.startswith(UNCERTIFIED) for t in mine)
        )

    def correlation(self) -> float | None:
        """Spearman's, of modelled costs and measured times."""
        ran = [(t.cost, t.ms) for t in self.tried if t.cost is not None and t.ms is not None]
        return spearman([cost for cost, _ in ran], [ms for _, ms in ran])

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        tried = [{"row" if name == "config" else name: value for name, value in asdict(t).items()} for t in self.tried]
        return asdict(self) | {"cell": self.cell._asdict(), "tried": tried}


def outcome(data: dict[str, Any]) -> Outcome:
    """An outcome from what `plain` gave."""
    tried = (Tried(Config(**t.pop("row")), **{**t, "rounds": tuple(t["rounds"])}) for t in map(dict, data["tried"]))
    return Outcome(Cell(**data["cell"]), tuple(tried), data["left_out"], data["seconds"])


def compete(
    cell: Cell,
    plan: Plan,
    rows: Iterable[Config],
    ask: Ask,
    budget_s: float = float("inf"),
    faults: Mapping[Config, str] | None = None,
) -> Outcome:
    """Measure schedules one after another, until the budget is spent; then the best of each backend and the model's
    choice, interleaved.

    One that hangs, crashes, spills or is wrong is out, with the reason; so is one of `faults`, which gets no
    certificate, for its reason. Where too many hang or crash, the rest is left out.
    """
    started, kernel = time.perf_counter(), plan.kernel(cell)
    tried: list[Tried] = []
    left_out = 0
    lost: Counter[str] = Counter()
    for config in rows:
        if tried and time.perf_counter() - started > budget_s or lost[config.backend] == MOST_LOST:
            left_out += 1
            continue
        price = None if config.backend in SPECIALIZERS else backend_of(config).cost.cycles(plan.placed, kernel, config)
        if faults and config in faults:
            tried.append(Tried(config, price, failed=UNCERTIFIED + faults[config]))
            continue
        try:
            (answer,) = ask((cell, [config], SCREEN_ROUNDS), LIMIT_S)
        except Lost as error:
            answer = str(error)
            lost[config.backend] += 1
        tried.append(
            Tried(config, price, failed=answer)
            if isinstance(answer, str)
            else Tried(config, price, statistics.median(answer))
        )
    ran = sorted((t for t in tried if t.ms is not None), key=lambda t: t.median)
    model = [t for t in tried[:1] if t in ran]
    rest = [t for t in ran if t not in model]
    final = [
        *model,
        *(t for backend in dict.fromkeys(t.config.backend for t in rest) for t in _of(rest, backend)[:FINALISTS]),
    ]
    beside = {t.config: t for t in _together(ask, cell, final)}
    return Outcome(cell, tuple(beside.get(t.config, t) for t in tried), left_out, time.perf_counter() - started)


def _of(tried: Sequence[Tried], backend: str) -> list[Tried]:
    return [t for t in tried if t.config.backend == backend]


def _together(ask: Ask, cell: Cell, tried: Sequence[Tried]) -> list[Tried]:
    """Schedules that ran alone, measured beside each other; where that fails, their times stand."""
    answers: Sequence[Answer] = [""] * len(tried)
    if tried:
        with suppress(Lost):
            answers = ask((cell, [t.config for t in tried], FINAL_ROUNDS), LIMIT_S)
    return [t if isinstance(answer, str) else replace(t, rounds=answer) for t, answer in zip(tried, answers)]


@dataclass(frozen=True)
class Compared:
    """A pruned search beside the whole grid, of one cell: schedules, seconds with their compilation, and the best of
    each."""

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


def compare(
    cell: Cell, plan: Plan, found: Search, ask: Ask, compile_ahead: Callable[[Cell, Sequence[Config]], float]
) -> Compared | None:
    """Search what is left of a kernel's grid, then all of it that fits and is not known to spill; None where nothing
    ran.

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
    """The rank correlation of two series (Spearman 1904); equal numbers share their mean rank. None where one does
    not vary."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(numbers: Sequence[float]) -> list[float]:
    ordered = sorted(numbers)
    return [ordered.index(x) + (ordered.count(x) - 1) / 2 for x in numbers]
