"""Plots of a run, as SVG that is the same to the byte for the same figures: TFLOP/s and memory over N; TB/s of calls
with a KV cache."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attngen.bench.cases.catalog import TABLED
from attngen.bench.cases.grids import Cell
from attngen.bench.peers import PEERS
from attngen.bench.results import Line, Results
from attngen.masks.none import NoMask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "matplotlib is not installed; `pip install attngen[plot]` brings it"
COLOURS = (  # in the order of PEERS
    "#0b6bcb",
    "#d1495b",
    "#3a7d44",
    "#8d5a97",
    "#b3761d",
    "#5b6770",
    "#17a2a2",
    "#222222",
    "#c2410c",
    "#9a9a00",
)
NAMES = {"fwd": "forward", "bwd": "backward"}
WIDTH, HEIGHT = 3.1, 2.7  # inches of a panel
BAR, GAP = 0.11, 0.8  # inches of a bar's height; the gap between two cells in bars
RATE = "K and V that must be read, TB/s"
CURVE = 3  # fewest numbers of keys for a curve; fewer become bars
Panel = tuple[str, list[Line]]


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plots(results: Results) -> dict[str, str]:
    """Return SVG texts by file name: TFLOP/s and memory for each grid of the run without separate tables; TB/s for
    calls with a KV cache."""
    found = {}
    for grid in dict.fromkeys(line.cell.grid for line in results.lines if line.cell.grid not in TABLED):
        panels = _panels(line for line in results.lines if line.cell.grid == grid and not line.cell.cached)
        curves, bars = _cached(line for line in results.lines if line.cell.grid == grid and line.cell.cached)
        if panels:
            found[f"{grid}-tflops.svg"] = _tflops(panels, results)
            found[f"{grid}-memory.svg"] = _memory(panels, results)
        if curves:
            found[f"{grid}-rate.svg"] = _rate(curves, results)
        if bars:
            found[f"{grid}-bars.svg"] = _bars(bars, results)
    return found


def _panels(lines: Iterable[Line]) -> list[Panel]:
    """Return one panel per spec and shape of heads, with its title."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(_title(line.cell), []).append(line)
    return list(found.items())


def _title(c: Cell) -> str:
    dim = c.spec.head_dim
    width = f"D={dim.qk}" if dim.qk == dim.v else f"D={dim.qk}/{dim.v}"
    heads = f"H={c.heads}" if c.heads == c.kv_heads else f"H={c.heads}/{c.kv_heads}"
    mask = "no mask" if isinstance(c.spec.mask, NoMask) else c.spec.mask.describe()
    modifiers = f", {c.score}" if c.score else ""
    return f"{mask}{modifiers}, {c.spec.heads.sharing}\n{width}, {heads}, {c.dtype}"


def _cached(lines: Iterable[Line]) -> tuple[list[Panel], list[Line]]:
    """Return panels of cells that differ only in the number of keys, and the lines of the other cells."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        c = line.cell
        found.setdefault((c.spec.name, c.dtype, c.batch, c.heads, c.kv_heads, c.n_q, c.call), []).append(line)
    curves = [group for group in found.values() if len({line.cell.n_kv for line in group}) >= CURVE]
    bars = [line for group in found.values() if group not in curves for line in group]
    return [(f"B={group[0].cell.batch}, N keys each\n{_title(group[0].cell)}", group) for group in curves], bars


def _tflops(panels: Sequence[Panel], results: Results) -> str:
    peak = results.machine["matmul_tflops"]

    def draw(axes: Axes, row: int, lines: list[Line]) -> None:
        direction = ("fwd", "bwd")[row]
        _curves(axes, lines, f"{direction}_tflops", "-")
        axes.axhline(peak, color="#888888", linestyle="--", linewidth=1)
        axes.set_ylim(0, 1.08 * peak)

    note = f"dashed: {peak:.0f} TFLOP/s, a bf16 matrix product in the same run"
    return _figure(panels, [f"{NAMES[d]}, TFLOP/s" for d in NAMES], draw, results, note)


def _memory(panels: Sequence[Panel], results: Results) -> str:
    def draw(axes: Axes, row: int, lines: list[Line]) -> None:
        _curves(axes, lines, "allocated_mib", "-")
        _curves(axes, lines, "reserved_mib", ":")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")

    return _figure(panels, ["peak MiB, forward and backward"], draw, results, "solid: allocated; dotted: reserved")


def _rate(panels: Sequence[Panel], results: Results) -> str:
    peak = results.machine["copy_tb_s"]

    def draw(axes: Axes, row: int, lines: list[Line]) -> None:
        _curves(axes, lines, "read_tb_s", "-")
        axes.axhline(peak, color="#888888", linestyle="--", linewidth=1)
        axes.set_ylim(0, 1.25 * peak)

    return _figure(panels, [RATE], draw, results, _copy(results))


def _copy(results: Results) -> str:
    return f"dashed: {results.machine['copy_tb_s']:.2f} TB/s, a copy in the same run"


def _bars(lines: Sequence[Line], results: Results) -> str:
    """Return the SVG of one bar per line, cell below cell."""
    cells: dict[Cell, dict[str, float]] = {}
    for line in lines:
        if "read_tb_s" in line.figures:
            cells.setdefault(line.cell, {})[line.peer] = line.figures["read_tb_s"]
    colours = dict(zip(PEERS, COLOURS))

    def paint(figure: Figure) -> dict[str, Any]:
        axes = figure.subplots()
        place, middles, handles = 0.0, [], {}
        for rates in cells.values():
            middles.append(place + (len(rates) - 1) / 2)
            for peer, rate in rates.items():
                handles[_label(peer)] = axes.barh(place, rate, 0.9, color=colours[peer])
                place += 1
            place += GAP
        axes.axvline(results.machine["copy_tb_s"], color="#888888", linestyle="--", linewidth=1)
        axes.set_yticks(middles, [str(c) for c in cells])
        axes.margins(y=0.01)
        axes.invert_yaxis()
        axes.set_xlabel(RATE)
        return handles

    height = BAR * sum(len(rates) + GAP for rates in cells.values()) + 1.2
    return _drawn((2.5 * WIDTH, height), paint, results, _copy(results))


def _label(peer: str) -> str:
    return "attngen" if peer == "ours" else peer


def _curves(axes: Axes, lines: list[Line], figure: str, style: str) -> None:
    for peer, colour in zip(PEERS, COLOURS):
        points = sorted(
            (line.cell.n_kv, line.figures[figure]) for line in lines if line.peer == peer and figure in line.figures
        )
        if points:
            line: Any = {"linewidth": 2.2, "zorder": 3} if peer == "ours" else {"linewidth": 1.2}
            xs, ys = zip(*points)
            label = _label(peer) if style == "-" else None
            axes.plot(xs, ys, style, color=colour, marker="o", markersize=3, label=label, **line)


def _figure(panels: Sequence[Panel], rows: Sequence[str], draw: Any, results: Results, note: str) -> str:
    """Return the SVG of a grid of panels: a column per panel, a row per kind of figure."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    def paint(figure: Figure) -> dict[str, Any]:
        grid = figure.subplots(len(rows), len(panels), squeeze=False)
        handles: dict[str, Any] = {}
        for column, (title, lines) in enumerate(panels):
            ticks = sorted({line.cell.n_kv for line in lines})
            for row, label in enumerate(rows):
                axes = grid[row][column]
                draw(axes, row, lines)
                axes.set_xscale("log", base=2)
                axes.set_xticks(ticks)
                axes.xaxis.set_major_formatter(
                    FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n % 1024 == 0 else f"{n:g}")
                )
                axes.xaxis.set_minor_locator(NullLocator())
                axes.grid(color="#e4e4e4", linewidth=0.6)
                if row == 0:
                    axes.set_title(title)
                if column == 0:
                    axes.set_ylabel(label)
                if row == len(rows) - 1:
                    axes.set_xlabel("N")
                handles |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels())}
        return handles

    return _drawn((max(2, len(panels)) * WIDTH, len(rows) * HEIGHT + 0.9), paint, results, note)


def _drawn(size: tuple[float, float], paint: Callable[[Figure], dict[str, Any]], results: Results, note: str) -> str:
    """Return a figure of a size in inches, as SVG. `paint` fills its axes, and returns the handles of its legend by
    their texts."""
    import matplotlib
    from matplotlib.figure import Figure

    fixed: Any = {"svg.hashsalt": "attngen", "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 8}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(fixed)
        figure = Figure(figsize=size, layout="constrained")
        handles = paint(figure)
        m = results.machine
        figure.supxlabel(f"{m['gpu']}, torch {m['torch']}, triton {m['triton']}; {note}", fontsize=7)
        if handles:
            figure.legend(
                handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), frameon=False
            )
        made = io.StringIO()
        figure.savefig(made, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in made.getvalue().splitlines()) + "\n"
