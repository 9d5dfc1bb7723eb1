"""The lines that a run of `attngen tune` prints."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from attngen.ir import Config
from attngen.schedule.table import schedule_of, shown
from attngen.targets.registry import SPECIALIZERS
from attngen.tune.tuner import Cell, Compared, Outcome, Plan, Tried

WIDTHS = (26, 7, 7, 7, 15, 9, 15, 9, 8, 6)
MEASURED = ("module", "kernel", "N", "tried", "model", "ms", "fastest", "ms", "gain", "rho")
COMPARED_WIDTHS = (26, 7, 7, 7, 25, 6, 7, 25, 6, 6)
COMPARED = ("module", "kernel", "N", "pruned", "best", "s", "grid", "best", "s", "times", "loss")


def aligned(cells: Iterable[object], widths: Sequence[int] = WIDTHS) -> str:
    """Return cells aligned in columns; a cell longer than its column shifts the rest."""
    return " ".join(f"{cell!s:<{width}}" for cell, width in zip(cells, (*widths, 0))).rstrip()


def candidates(plan: Plan) -> Iterator[str]:
    """Yield the candidates of each kernel of a module, and the numbers of rejected configs by reason."""
    for (kernel, dtype, few), found in plan.searches.items():
        rows = f" up to {found.kept[0].max_rows} rows" if few else ""
        kept = ", ".join(map(_tile, found.kept))
        yield f"{plan.module.name} @{kernel} {dtype}{rows}: {len(found.kept)} of {len(found.grid)}: {kept}"
        if found.warp_specialized:
            yield f"  and warp-specialized: {', '.join(map(_tile, found.warp_specialized))}"
        yield from (
            f"  {count:>4} {reason}" for reason, count in sorted(found.rejected.items(), key=lambda item: -item[1])
        )


def measured(plan: Plan, found: Outcome) -> Iterator[str]:
    """Yield one line for a cell, and one for each reason why schedules failed."""
    cell, model, best = found.cell, found.tried[0], _best(plan, found)
    count = f"{len(found.tried)}" + (f"/{len(found.tried) + found.left_out}" if found.left_out else "")
    cells = [cell.spec, cell.kernel, cell.rows, count, _tile(model.config), _ms(model)]
    if best:
        gain = f"{100 * (model.median / best.median - 1):.1f}%" if model.ms is not None and best != model else ""
        cells += [_tile(best.config), _ms(best), gain]
    else:
        cells += ["none", "", ""]
    rho = found.correlation()
    yield aligned([*cells, "" if rho is None else f"{rho:.2f}"])
    reasons = Counter(
        "spills" if t.failed.startswith("spills") and t.portable else f"{_tile(t.config)} {t.failed}"
        for t in found.tried
        if t.failed
    )
    yield from (f"    {count} spill" if reason == "spills" else f"    {reason}" for reason, count in reasons.items())
    if found.left_out:
        yield f"    {found.left_out} left out"


def totals(found: Iterable[tuple[Plan, Outcome]]) -> Iterator[str]:
    """Yield rank correlations by kernel, and how often and by how much the fastest schedule beats the cost model's
    choice."""
    known = list(found)
    outcomes = [o for _, o in known]
    for kernel in dict.fromkeys(o.cell.kernel for o in outcomes):
        rhos = [rho for o in outcomes if o.cell.kernel == kernel and (rho := o.correlation()) is not None]
        if rhos:
            found_rho = f"{statistics.median(rhos):.2f} (median of {len(rhos)}, {min(rhos):.2f} to {max(rhos):.2f})"
            yield f"@{kernel}: rank correlation of modelled costs and times {found_rho}"
    pairs = [(o.tried[0], _best(plan, o)) for plan, o in known]
    gains = [model.median / best.median - 1 for model, best in pairs if best and best != model and model.ms is not None]
    if gains:
        gain = f", by {100 * statistics.median(gains):.1f}% (median), {100 * max(gains):.1f}% at most"
        yield f"faster than the model's choice in {len(gains)} of {len(outcomes)}{gain}"
    else:
        yield f"nothing faster than the model's choice in {len(outcomes)}"


def compared(cell: Cell, found: Compared | None) -> str:
    """Return one line for a cell that compares the pruned search with the whole grid."""
    if found is None:
        return aligned([cell.spec, cell.kernel, cell.rows, "nothing ran"])
    cells: list[object] = [cell.spec, cell.kernel, cell.rows]
    for tried, seconds, best in (
        (found.pruned, found.pruned_s, found.pruned_best),
        (found.whole, found.whole_s, found.whole_best),
    ):
        cells += [tried, f"{_tile(best.config)} {_ms(best)} ms", f"{seconds:.0f}"]
    return aligned([*cells, f"{found.whole_s / found.pruned_s:.1f}", f"{100 * found.loss:.1f}%"], COMPARED_WIDTHS)


def _best(plan: Plan, found: Outcome) -> Tried | None:
    """Return the fastest schedule of a cell, portable or warp-specialized."""
    return next(iter(found.warp_specialized(plan)), None) or found.winner(plan)


def _tile(config: Config) -> str:
    return shown(schedule_of(config)) + f" {config.backend}" * (config.backend in SPECIALIZERS)


def _ms(tried: Tried) -> str:
    return f"{tried.median:.4f}" if tried.ms is not None else "-"
