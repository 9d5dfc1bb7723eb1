"""The plot of `attngen profile`: bytes over the rows of the tile that stays on chip, measured and predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attngen.bench.figures import Label, Theme, both, footer, heading, label_ends, panels
from attngen.bench.plots import MISSING, available
from attngen.bench.profile_results import NAIVE, ORDERS, Found, Line
from attngen.errors import AttngenError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"kv_outer": "tight", "q_outer": "bar", NAIVE: "faint"}
LABELS = {"kv_outer": "FA1 order", "q_outer": "FA2 order", NAIVE: "naive"}
LEVELS = {"dram": "device memory", "l2": "requests to the L2"}
ACROSS, DOWN = 2.35, 2.0  # inches of a panel
MARGINS, BETWEEN, BELOW = (0.65, 0.8, 0.75), (1.3, 0.6), 0.85  # inches: left, right, top; between panels; below them


def plot(found: Found) -> dict[str, str]:
    """Return the SVG of the forward by file name, a column for each length: device memory above, the L2 below."""
    if not available():
        raise AttngenError(f"no plot: {MISSING}")
    forward = [line for line in found.lines if line.direction == "forward" and line.kernel != "torch"]
    lengths = sorted({line.n for line in forward if line.tile})
    if not lengths:
        raise AttngenError("there is no forward call with tiles to plot; expected --tiles, and calls that did not fail")
    tiles = sorted({line.tile for line in forward if line.tile})
    left, right, top = MARGINS
    width = max(6.9, left + right + len(lengths) * ACROSS + (len(lengths) - 1) * BETWEEN[0])
    height = top + len(LEVELS) * DOWN + BETWEEN[1] + BELOW
    title = f"Bytes of {found.spec} on {found.device}: forward, B={found.batch}, {found.heads} heads"

    def paint(figure: Figure, look: Theme) -> None:
        grid = panels(figure, (len(LEVELS), len(lengths)), (*MARGINS, BELOW), BETWEEN)
        heading(figure, title, 0.08, 0.2, fontsize=10, fontweight="bold")
        for (level, words), row in zip(LEVELS.items(), grid):
            for n, axes in zip(lengths, row):
                _draw(axes, forward, level, n, tiles, look)
                axes.set_title(f"N = {n}, {words}" if n == lengths[0] else f"N = {n}", fontweight="bold")
        for axes in grid[-1]:
            axes.set_xlabel("rows of the tile on chip")
        notes = ["FA1 order and FA2 order: the loop orders of FlashAttention-1 and -2; naive: naive attention",
                 "lines: predicted; points, and dotted for naive attention: measured"]  # fmt: skip
        footer(figure, notes, 0.08, look["faint"])

    return both("profile", (width, height), title, paint)


def _draw(axes: Axes, lines: list[Line], level: str, n: int, tiles: list[int], look: Theme) -> None:
    """Draw predicted and measured bytes of a level of memory at a length, over the tiles' rows."""
    labels = []
    for order in reversed(ORDERS):
        series = [(t, _total(lines, level, order, t, n)) for t in tiles]
        if points := [(t, *pair) for t, pair in series if pair]:
            x, predicted, counted = zip(*points)
            colour = look[COLOURS[order]]
            axes.plot(x, predicted, color=colour, linewidth=1.5)
            axes.plot(x, counted, "o", color=colour, markersize=5)
            labels.append(Label(predicted[-1], LABELS[order], colour, strong=True))
    if pair := _total(lines, level, NAIVE, None, n):
        for value, dashes in zip(pair, ("-", ":")):
            axes.axhline(value, color=look[COLOURS[NAIVE]], linewidth=1.5, linestyle=dashes)
        labels.append(Label(pair[0], LABELS[NAIVE], look[COLOURS[NAIVE]]))
    axes.set(xscale="log", yscale="log", xticks=tiles, xticklabels=[str(t) for t in tiles])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1e9:g} GB")
    label_ends(axes, labels)


def _total(lines: list[Line], level: str, order: str, tile: int | None, n: int) -> tuple[Any, Any] | None:
    """Return (predicted, measured) bytes of the kernels of one call."""
    mine = [line for line in lines if (line.order, line.tile, line.n) == (order, tile, n) and line.predicted]
    if not mine:
        return None
    return tuple(
        sum(getattr(moved, level) for moved in some)
        for some in ([x.predicted for x in mine], [x.measured for x in mine])
    )
