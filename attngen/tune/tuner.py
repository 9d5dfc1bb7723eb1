"""Tuning: the schedules to measure, their order within a budget, and the choice of the fastest."""

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
from attngen.ir import Config, Kernel, Module
from attngen.ir.dtypes import ELEMENTS, of_size
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
SCREEN_ROUNDS, FINAL_ROUNDS = 2, 7  # rounds of every candidate by itself, and of the best, interleaved
MOST_LOST = 3  # lost requests of a cell and backend before the rest is skipped
UNCERTIFIED = "gets no certificate: it "  # prefix of the reason why a warp-specialized kernel is not measured
FINALISTS = 3  # of each backend, besides the model's choice

Answer = tuple[float, ...] | str  # milliseconds of each round, or the reason why there are none


class Cell(NamedTuple):
    """A problem for which candidates compete: a kernel of a spec's module, with `rows` queries and as many keys. For a
    split-KV kernel `rows` counts the queries of all heads that share a K/V head."""

    spec: str
    kernel: str
    rows: int
    dtype: str


# A function of a request (cell, configs, rounds) and a limit in seconds; raises Lost.
Ask = Callable[[tuple[Cell, Sequence[Config], int], float], list[Answer]]


def folder_name(spec: str, config: Config) -> str:
    """Return the name of the folder of the module with a config's kernel. Each config of a warp-specialized kernel has
    a separate module."""
    tile = f"{config.tile}x{config.num_warps}x{config.num_stages}"
    return f"{spec}-{config.backend}-{tile}" if config.backend in SPECIALIZERS else spec


@dataclass(frozen=True)
class Plan:
    """A spec's module, built without measured schedules, and the candidates to measure."""

    module: Module  # the target module, all portable
    placed: Module  # before select-tiles, for the cost model
    whole: Module  # before warp-specialize
    searches: dict[tuple[str, str, bool], Search]  # by kernel, dtype, and whether they are for few rows

    def cells(self) -> Iterator[tuple[Cell, Search]]:
        """Yield the cells, grouped by the number of rows, because kernels share its inputs."""
        cells = []
        for (kernel, dtype, few), found in self.searches.items():
            least, *others = ranges(self.placed.kernel(kernel))
            cells += [(Cell(self.module.name, kernel, rows, dtype), found) for _, rows in ([least] if few else others)]
        yield from sorted(cells, key=lambda pair: pair[0].rows)

    def ahead(self, cell: Cell) -> Cell:
        """Return the cell with the fewest rows that compiles the same kernel. Split-KV kernels are compiled for numbers
        of the call, so theirs is the cell itself."""
        kernel = self.kernel(cell)
        return cell if kernel.kv_split else cell._replace(rows=ranges(kernel)[0][1])

    @cached_property
    def warp_specialized(self) -> dict[Config, Module]:
        """The module with its kernel warp-specialized, for each such config to measure."""
        return {
            config: specialize(self.whole, kernel, config)
            for (kernel, *_), found in self.searches.items()
            for config in found.warp_specialized
        }

    def kernel(self, cell: Cell) -> Kernel:
        return self.placed.kernel(cell.kernel)

    def key(self, cell: Cell) -> Key:
        """Return the key of the cell's entry in the table."""
        limit = next(limit for limit, rows in ranges(self.kernel(cell)) if rows == cell.rows)
        return key(self.placed, self.kernel(cell), ELEMENTS[cell.dtype].bytes, limit)


def plan(spec: Spec, device_class: str) -> Plan:
    """Return the plan for a spec on a device class, ignoring its `schedule`: one dtype per element size, and the
    kernels with a config on the class."""
    made = dict(stages(spec.model_copy(update={"schedule": Schedule(backend="triton")}), {}))
    placed, whole, module = made["use-tma"], made["dce"], made["legalize-triton"]
    searches = {}
    splitting = [placed.splitting_kernel] if placed.splitting_kernel else []
    directions = {name: placed.kernels_of(name) for name in ("forward", "backward", "jvp", "decode")}
    for kernel in (
        *directions["forward"],
        *directions["backward"],
        *directions["jvp"],
        *splitting,
        *directions["decode"],
    ):
        (least, _), *_ = ranges(kernel)
        for elem, rows in product(elem_sizes(module), (least or NO_LIMIT, NO_LIMIT)):
            dtype = of_size(module.dtypes, elem)
            mine = [c for c in module.configs(kernel.name) if (c.device, c.elem_bytes) == (device_class, elem)]
            chosen = next((c for c in mine if rows <= (c.max_rows or NO_LIMIT)), None)
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
    """One schedule: its modelled cost, milliseconds of a first measurement, and milliseconds of each round interleaved
    with the best; or the reason why there are none."""

    config: Config
    cost: float | None  # None for warp-specialized kernels, which have no cost model
    ms: float | None = None
    rounds: tuple[float, ...] = ()
    failed: str = ""

    @property
    def median(self) -> float:
        """Median milliseconds, of the interleaved rounds if there are any, else of the first measurement."""
        return statistics.median(self.rounds) if self.rounds else self.ms or float("inf")

    @property
    def portable(self) -> bool:
        return self.config.backend not in SPECIALIZERS

    def beats(self, other: Tried) -> bool:
        """True if it is faster by more than noise, in all rounds except one. A GPU that slows down as it warms up slows
        both schedules of a round."""
        ratios = [mine / theirs for mine, theirs in zip(self.rounds, other.rounds)] or [self.median / other.median]
        lost = sum(ratio >= 1 for ratio in ratios)
        most = 1 if len(ratios) == FINAL_ROUNDS else 0
        return lost <= most and 1 - statistics.median(ratios) > NOISE


@dataclass(frozen=True)
class Outcome:
    """The results for a cell: the schedules, the model's choice first; the number that the budget left out; the seconds
    taken."""

    cell: Cell
    tried: tuple[Tried, ...]
    left_out: int
    seconds: float

    def winner(self, plan: Plan) -> Tried | None:
        """Return the fastest portable schedule that select-tiles would accept, if it beats the model's choice, else
        that."""
        model, *_ = self.tried
        kernel = plan.kernel(self.cell)
        ran = [t for t in self.tried if t.ms is not None and t.portable and usable(plan.placed, kernel, t.config)]
        if not ran:
            return None
        fastest = min(ran, key=lambda t: (not t.rounds, t.median))
        return model if model in ran and not fastest.beats(model) else fastest

    def warp_specialized(self, plan: Plan) -> list[Tried]:
        """Return the schedules of warp-specialized kernels that beat the fastest portable one, fastest first."""
        best = self.winner(plan)
        ran = [t for t in self.tried if t.ms is not None and not t.portable and best and t.beats(best)]
        return sorted(ran, key=lambda t: (not t.rounds, t.median))

    def entry(self, plan: Plan, triton: str) -> Entry | None:
        """Return the cell's entry for the table; None if nothing ran."""
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
        """True if the outcome is valid for warp-specialized kernels: one ran, or none has a certificate. Other failures
        may be due to a missing driver."""
        mine = [t for t in self.tried if not t.portable]
        return any(t.ms is not None for t in mine) or (
            bool(mine) and all(t.failed.startswith(UNCERTIFIED) for t in mine)
        )

    def correlation(self) -> float | None:
        """Return Spearman's rank correlation of modelled costs and measured times."""
        ran = [(t.cost, t.ms) for t in self.tried if t.cost is not None and t.ms is not None]
        return spearman([cost for cost, _ in ran], [ms for _, ms in ran])

    def plain(self) -> dict[str, Any]:
        """Return the outcome as data for JSON."""
        tried = [{"row" if name == "config" else name: value for name, value in asdict(t).items()} for t in self.tried]
        return asdict(self) | {"cell": self.cell._asdict(), "tried": tried}


def outcome(data: dict[str, Any]) -> Outcome:
    """Return an outcome from the data of `plain`."""
    tried = (Tried(Config(**t.pop("row")), **{**t, "rounds": tuple(t["rounds"])}) for t in map(dict, data["tried"]))
    return Outcome(Cell(**data["cell"]), tuple(tried), data["left_out"], data["seconds"])


def compete(
    cell: Cell,
    plan: Plan,
    configs: Iterable[Config],
    ask: Ask,
    budget_s: float = float("inf"),
    faults: Mapping[Config, str] | None = None,
) -> Outcome:
    """Measure schedules one by one until the budget is spent; then the best of each backend and the model's choice,
    interleaved.

    A schedule that hangs, crashes, spills or is wrong fails with the reason, and so does one of `faults`, which has no
    certificate. If too many hang or crash, the rest is left out.
    """
    started, kernel = time.perf_counter(), plan.kernel(cell)
    tried: list[Tried] = []
    left_out = 0
    lost: Counter[str] = Counter()
    for config in configs:
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
    finals = {t.config: t for t in _interleaved(ask, cell, final)}
    return Outcome(cell, tuple(finals.get(t.config, t) for t in tried), left_out, time.perf_counter() - started)


def _of(tried: Sequence[Tried], backend: str) -> list[Tried]:
    return [t for t in tried if t.config.backend == backend]


def _interleaved(ask: Ask, cell: Cell, tried: Sequence[Tried]) -> list[Tried]:
    """Measure schedules again, interleaved. If that fails, keep their times."""
    answers: Sequence[Answer] = [""] * len(tried)
    if tried:
        with suppress(Lost):
            answers = ask((cell, [t.config for t in tried], FINAL_ROUNDS), LIMIT_S)
    return [t if isinstance(answer, str) else replace(t, rounds=answer) for t, answer in zip(tried, answers)]


@dataclass(frozen=True)
class Compared:
    """A pruned search and the whole grid of one cell: the number of schedules, the seconds with their compilation, and
    the best schedule of each."""

    cell: Cell
    pruned: int
    pruned_s: float
    pruned_best: Tried
    whole: int
    whole_s: float
    whole_best: Tried

    @property
    def loss(self) -> float:
        """Relative slowdown of the pruned search's best schedule."""
        return self.pruned_best.median / self.whole_best.median - 1


def compare(
    cell: Cell, plan: Plan, found: Search, ask: Ask, compile_ahead: Callable[[Cell, Sequence[Config]], float]
) -> Compared | None:
    """Search a kernel's pruned grid, then the whole grid of configs that fit and are not known to spill; None if
    nothing ran.

    `compile_ahead` returns the seconds that it took. The best of each are measured once more, interleaved.
    """
    kernel = plan.kernel(cell)
    rest = [config for config in runs(plan.placed, kernel, found.grid) if config not in found.kept]
    compile_s = compile_ahead(cell, found.kept)
    pruned = compete(cell, plan, found.kept, ask)
    rest_s = compile_ahead(cell, rest)
    whole = compete(cell, plan, [*found.kept, *rest], ask)
    best = [min(o.tried, key=lambda t: (not t.rounds, t.median)) for o in (pruned, whole)]
    if any(t.ms is None for t in best):
        return None
    mine, theirs = _interleaved(ask, cell, best)
    seconds = compile_s + pruned.seconds, compile_s + rest_s + whole.seconds
    return Compared(cell, len(pruned.tried), seconds[0], mine, len(whole.tried), seconds[1], theirs)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the rank correlation of two series (Spearman 1904); equal numbers share their mean rank. None if one does
    not vary."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(numbers: Sequence[float]) -> list[float]:
    ordered = sorted(numbers)
    return [ordered.index(x) + (ordered.count(x) - 1) / 2 for x in numbers]
