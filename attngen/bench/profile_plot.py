"""The plot of `attngen profile`: bytes over the rows of the tile that stays on chip, measured and predicted."""

from __future__ import annotations

import io
from typing import Any

from attngen.bench.plots import MISSING, available
from attngen.bench.profile_results import NAIVE, ORDERS, Found, Line
from attngen.errors import AttngenError

COLORS = {"kv_outer": "#c2410c", "q_outer": "#1d4ed8", NAIVE: "#6b7280"}
LEVELS = {"dram": "device memory", "l2": "loads and stores requested from the L2"}


def plot(found: Found) -> str:
    """Return the SVG of the forward, a column per length: device memory above, the L2 below; the same text for the same
    figures."""
    if not available():
        raise AttngenError(f"no plot: {MISSING}")
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    forward = [line for line in found.lines if line.direction == "forward" and line.kernel != "torch"]
    lengths = sorted({line.n for line in forward if line.tile})
    if not lengths:
        raise AttngenError("there is no forward call with tiles to plot; expected --tiles, and calls that did not fail")
    tiles = sorted({line.tile for line in forward if line.tile})
    style: Any = {
        "svg.hashsalt": "profile",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with pyplot.rc_context(style):
        size = (1.5 + 3 * len(lengths), 6.5)
        figure, axes = pyplot.subplots(2, len(lengths), sharex=True, squeeze=False, figsize=size, layout="constrained")
        for column, n in enumerate(lengths):
            for axis, level in zip(axes[:, column], LEVELS):
                for order in reversed(ORDERS):
                    series = [(t, _total(forward, level, order, t, n)) for t in tiles]
                    points = [(t, *pair) for t, pair in series if pair]
                    if points:
                        x, guess, counted = zip(*points)
                        axis.plot(
                            x, guess, color=COLORS[order], linewidth=1.2, label=f"{ORDERS[order]}'s order, predicted"
                        )
                        axis.plot(x, counted, "o", color=COLORS[order], markersize=5, label="measured")
                if pair := _total(forward, level, NAIVE, None, n):
                    axis.axhline(pair[0], color=COLORS[NAIVE], linewidth=1.2, label="naive attention, predicted")
                    axis.axhline(pair[1], color=COLORS[NAIVE], linewidth=1.2, linestyle=":", label="measured")
                axis.set(xscale="log", yscale="log", xticks=tiles, xticklabels=[str(t) for t in tiles])
                axis.minorticks_off()
            axes[0, column].set_title(f"N = {n}")
            axes[1, column].set_xlabel("rows of the tile on chip")
        for axis, level in zip(axes[:, 0], LEVELS.values()):
            axis.set_ylabel(f"bytes: {level}")
        axes[0, 0].legend(frameon=False, fontsize=7)
        figure.suptitle(f"{found.spec} on {found.device}: forward, B={found.batch}, {found.heads} heads", fontsize=10)
        made = io.StringIO()
        figure.savefig(made, format="svg", metadata={"Date": None})
        pyplot.close(figure)
        return made.getvalue()


def _total(lines: list[Line], level: str, order: str, tile: int | None, n: int) -> tuple[Any, Any] | None:
    """Return (predicted, measured) bytes of the kernels of one call."""
    mine = [line for line in lines if (line.order, line.tile, line.n) == (order, tile, n) and line.predicted]
    if not mine:
        return None
    return tuple(
        sum(getattr(moved, level) for moved in some)
        for some in ([x.predicted for x in mine], [x.measured for x in mine])
    )
