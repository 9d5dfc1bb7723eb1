"""Plots of a run, as SVG in a light and a dark form: TFLOP/s and memory over N; TB/s of calls with a KV cache."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attngen.bench.cases.catalog import TABLED
from attngen.bench.cases.grids import Cell
from attngen.bench.figures import SMALL, Label, Theme, both, footer, heading, label_ends, legend, panels
from attngen.bench.peers import PEERS
from attngen.bench.results import Line, Results, shorten
from attngen.masks.none import NoMask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "matplotlib is not installed; `pip install attngen[plot]` brings it"
# Of each peer: its label, the name of its colour in a theme, its dashes, and its marker where rates are points.
STYLES = {
    "ours": ("attngen", "bar", "-", "s"),
    "flash": ("FA2", "faint", "-", "v"),
    "cudnn": ("cuDNN", "deep", "-", "o"),
    "efficient": ("efficient", "deep", "--", "P"),
    "math": ("math", "faint", ":", "X"),
    "flex": ("Flex", "name", (0, (6, 1.5)), "^"),
    "flex_flash": ("Flex by FA4", "name", ":", ">"),
    "fa4": ("FA4", "tight", (0, (3, 1)), "D"),
    "flashinfer": ("FlashInfer", "tight", (0, (4, 1)), "D"),
    "naive": ("naive", "faint", (0, (1, 1)), "X"),
}
MEANS = {
    "flash": "FA2: FlashAttention-2 by SDPA",
    "cudnn": "cuDNN: by SDPA",
    "flex": "Flex: compiled FlexAttention",
    "fa4": "FA4: FlashAttention-4",
}
WIDTH = 6.9  # inches: 662 CSS pixels
MARGINS = (0.64, 0.82)  # inches left of the first panel, for ticks, and right of the last one, for labels
BETWEEN = (1.26, 0.55)  # inches between columns, for both, and between rows
DOWN = 1.5  # inches of a panel's height
TOP, TITLE = 0.75, 0.2  # inches above the first row; the baseline of the title
LETTERS, HEADING = 104, 78  # characters in a line as wide as a figure: small ones, and those of a heading
NAMES, ROW = 2.65, 0.185  # in bars: inches of the cells' names; of one cell's height
RATE = "TB/s of K and V that must be read"
ORDERS = 8  # largest ratio of memories on a linear scale
CURVE = 3  # fewest numbers of keys for a curve; fewer become bars
Panel = tuple[str, list[Line]]


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plots(results: Results) -> dict[str, str]:
    """Return SVG texts by file name: TFLOP/s and memory for each grid of the run without separate tables; TB/s for
    calls with a KV cache."""
    found: dict[str, str] = {}
    for grid in dict.fromkeys(line.cell.grid for line in results.lines if line.cell.grid not in TABLED):
        lines = [line for line in results.lines if line.cell.grid == grid and not line.cell.cached]
        curves, bars = _cached(line for line in results.lines if line.cell.grid == grid and line.cell.cached)
        if lines:
            found |= _tflops(f"{grid}-tflops", lines, results) | _memory(f"{grid}-memory", lines, results)
        if curves:
            found |= _rate(f"{grid}-rate", curves, results)
        if bars:
            found |= _bars(f"{grid}-bars", bars, results)
    return found


def _parts(c: Cell) -> tuple[str, ...]:
    """Return what a title says of a cell."""
    dim = c.spec.head_dim
    width = f"D={dim.qk}" if dim.qk == dim.v else f"D={dim.qk}/{dim.v}"
    heads = f"H={c.heads}" if c.heads == c.kv_heads else f"H={c.heads}/{c.kv_heads}"
    mask = "no mask" if isinstance(c.spec.mask, NoMask) else c.spec.mask.describe()
    batch = f"B={c.batch}" if c.cached else ""
    return batch, mask, c.score, c.spec.heads.sharing, width, heads, c.dtype


def _split(lines: Iterable[Line]) -> tuple[str, list[Panel]]:
    """Return what all cells have in common, and one panel for each kind of cells, with its title."""
    found: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(_parts(line.cell), []).append(line)
    alike = [len(set(values)) == 1 for values in zip(*found)]
    common = ", ".join(part for part, same in zip(next(iter(found)), alike) if same and part)
    titles = (", ".join(part for part, same in zip(parts, alike) if part and not same) for parts in found)
    return common, list(zip(titles, found.values()))


def _cached(lines: Iterable[Line]) -> tuple[list[Line], list[Line]]:
    """Return the lines of cells that differ only in the number of keys, and the lines of the other cells."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        c = line.cell
        found.setdefault((c.spec.name, c.dtype, c.batch, c.heads, c.kv_heads, c.n_q, c.call), []).append(line)
    curves = [group for group in found.values() if len({line.cell.n_kv for line in group}) >= CURVE]
    bars = [line for group in found.values() if group not in curves for line in group]
    return [line for group in curves for line in group], bars


# ---------------------------------------------------------------------------------------------- curves


def _tflops(name: str, lines: list[Line], results: Results) -> dict[str, str]:
    common, found = _split(lines)
    peak = results.machine["matmul_tflops"]
    columns = {"fwd": "forward", "bwd": "backward"}

    def paint(figure: Figure, look: Theme) -> None:
        grid = _grid(figure, len(found))
        for title, axes in zip(columns.values(), grid[0]):
            heading(figure, title, axes.get_position().x0 * WIDTH, TOP - 0.27, color=look["faint"])
        for (title, group), row in zip(found, grid):
            for direction, axes in zip(columns, row):
                axes.set_ylim(0, 1.08 * peak)
                axes.axhline(peak, color=look["faint"], linestyle=(0, (2, 2)), linewidth=1)
                _curves(axes, group, f"{direction}_tflops", look)
            row[0].set_title(shorten(title, HEADING), fontweight="bold")
        _ends(figure, look, f"TFLOP/s over N: {common}", grid[-1], notes)

    notes = _notes(results, lines, "fwd_tflops", f"dashed: {peak:.0f} TFLOP/s, a bf16 matrix product in the same run")
    return both(name, _size(len(found), notes), f"TFLOP/s, forward and backward, over N: {common}", paint)


def _memory(name: str, lines: list[Line], results: Results) -> dict[str, str]:
    found = [line.figures["allocated_mib"] for line in lines if "allocated_mib" in line.figures]

    def scale(axes: Axes, look: Theme) -> None:
        least, most = min(found, default=1), max(found, default=1)
        if most > ORDERS * least:
            axes.set_yscale("log", base=2)
            axes.set_ylim(least / 1.4, most * 1.4)
        else:
            axes.set_ylim(0, 1.1 * most)
        axes.yaxis.set_major_formatter(lambda n, _: f"{n / 1024:g} GiB" if n >= 1024 else f"{n:g} MiB")

    return _over_keys(name, "Peak memory of forward and backward", lines, "allocated_mib", results, "", scale)


def _rate(name: str, lines: list[Line], results: Results) -> dict[str, str]:
    peak = results.machine["copy_tb_s"]

    def scale(axes: Axes, look: Theme) -> None:
        axes.set_ylim(0, 1.25 * peak)
        axes.axhline(peak, color=look["faint"], linestyle=(0, (2, 2)), linewidth=1)

    return _over_keys(name, RATE, lines, "read_tb_s", results, _copy(results), scale)


def _over_keys(
    name: str, words: str, lines: list[Line], figure_name: str, results: Results, note: str, scale: Callable[..., None]
) -> dict[str, str]:
    """Return the plots of one figure, two panels in a row. `scale` sets the scale of the y axis."""
    common, found = _split(lines)
    title = f"{words}, over N: {common}"

    def paint(figure: Figure, look: Theme) -> None:
        grid = _grid(figure, -(-len(found) // 2))
        every = [axes for row in grid for axes in row]
        for (words, group), axes in zip(found, every):
            scale(axes, look)
            _curves(axes, group, figure_name, look)
            axes.set_title(shorten(words, HEADING // 2), fontweight="bold")
        for axes in every[len(found) :]:
            axes.remove()
        _ends(figure, look, title, every[: len(found)][-2:], notes)

    notes = _notes(results, lines, figure_name, note)
    return both(name, _size(-(-len(found) // 2), notes), title, paint)


def _size(rows: int, notes: list[str]) -> tuple[float, float]:
    return WIDTH, TOP + rows * DOWN + (rows - 1) * BETWEEN[1] + _below(notes)


def _below(notes: list[str]) -> float:
    """Return the inches below the last row: ticks, the axis' name, notes."""
    return 0.5 + 0.16 * len(notes)


def _grid(figure: Figure, rows: int) -> list[list[Axes]]:
    below = figure.get_size_inches()[1] - TOP - rows * DOWN - (rows - 1) * BETWEEN[1]
    return panels(figure, (rows, 2), (*MARGINS, TOP, below), BETWEEN)


def _ends(figure: Figure, look: Theme, title: str, last: Sequence[Axes], notes: list[str]) -> None:
    """Write the title, the name of the x axis below the last panels, and the notes."""
    heading(figure, shorten(title, HEADING), 0.08, TITLE, fontsize=10, fontweight="bold")
    for axes in last:
        axes.set_xlabel("N")
    footer(figure, notes, 0.08, look["faint"])


def _curves(axes: Axes, lines: list[Line], figure: str, look: Theme) -> None:
    """Draw one line for each peer, with its name at the right end."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    labels = []
    for peer in reversed(PEERS):
        label, colour, dashes, marker = STYLES[peer]
        points = sorted(
            (line.cell.n_kv, line.figures[figure]) for line in lines if line.peer == peer and figure in line.figures
        )
        if points:
            ours = peer == "ours"
            style: Any = {"linewidth": 2.4, "marker": "o", "markersize": 4} if ours else {"linewidth": 1.3}
            if len(points) == 1:
                style |= {"marker": marker}  # a line of one point is invisible
            axes.plot(*zip(*points), color=look[colour], linestyle=dashes, **style)
            labels.append(Label(points[-1][1], label, look[colour], ours))
    ticks = sorted({line.cell.n_kv for line in lines})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n % 1024 == 0 else f"{n:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    label_ends(axes, labels)


def _copy(results: Results) -> str:
    return f"dashed: {results.machine['copy_tb_s']:.2f} TB/s, a copy in the same run"


def _notes(results: Results, lines: Iterable[Line], figure: str, note: str) -> list[str]:
    """Return the lines below a plot of a figure: the machine, the meaning of dashed lines and of labels."""
    m, peers = results.machine, {line.peer for line in lines if figure in line.figures}
    machine = f"{m['gpu']}, torch {m['torch']}, triton {m['triton']}"
    means = (MEANS[peer] for peer in MEANS if peer in peers)
    return textwrap.wrap("; ".join(filter(None, (machine, note, *means))), LETTERS)


# ---------------------------------------------------------------------------------------------- bars


def _bars(name: str, lines: Sequence[Line], results: Results) -> dict[str, str]:
    """Return the plots of one row for each cell: a bar for our rate, and a marker for each peer's."""
    cells: dict[Cell, dict[str, float]] = {}
    for line in lines:
        if "read_tb_s" in line.figures:
            cells.setdefault(line.cell, {})[line.peer] = line.figures["read_tb_s"]
    names = list(dict.fromkeys(c.spec.name for c in cells))
    ordered = sorted(cells, key=lambda c: names.index(c.spec.name))
    places = [i + 1.2 * (names.index(c.spec.name) + 1) for i, c in enumerate(ordered)]
    notes = _notes(results, lines, "read_tb_s", _copy(results))
    dtypes = ", ".join(dict.fromkeys(c.dtype for c in cells))

    def paint(figure: Figure, look: Theme) -> None:
        ((axes,),) = panels(figure, (1, 1), (NAMES, 0.2, above, _below(notes)), (0, 0))
        for place, before, c in zip(places, [None, *ordered], ordered):
            baseline = above + (place + 0.5) * ROW + 0.04
            if before is None or c.spec.name != before.spec.name:
                heading(figure, c.spec.name, 0.08, baseline - ROW, fontsize=SMALL, fontweight="bold")
            words = str(c).removeprefix(f"{c.spec.name} {c.dtype} ")
            heading(figure, words, 0.08, baseline, fontsize=SMALL, color=look["faint"])
        _rows(axes, places, [cells[c] for c in ordered], look)
        axes.axvline(results.machine["copy_tb_s"], color=look["faint"], linestyle=(0, (2, 2)), linewidth=1)
        legend(figure, axes, [STYLES[peer][0] for peer in PEERS], TITLE + 0.06)
        axes.set_xlabel("TB/s")
        _ends(figure, look, f"{RATE}: {dtypes}", [], notes)

    above = TOP - 0.2
    height = above + ROW * (places[-1] + 1) + _below(notes)
    return both(name, (WIDTH, height), RATE, paint)


def _rows(axes: Axes, places: list[float], rates: list[dict[str, float]], look: Theme) -> None:
    """Draw our bars, and the markers of each peer."""
    for peer in PEERS:
        label, colour, _, marker = STYLES[peer]
        found = [(rate[peer], place) for rate, place in zip(rates, places) if peer in rate]
        if found and peer == "ours":
            values, at = zip(*found)
            axes.barh(at, values, 0.75, color=look[colour], label=label)
        elif found:
            points: Any = {"marker": marker, "markersize": 6, "markeredgecolor": look["page"], "clip_on": False}
            axes.plot(*zip(*found), color=look[colour], label=label, linestyle="none", **points)
    axes.set_ylim(places[-1] + 0.5, -0.5)
    axes.set_yticks([])
    axes.grid(axis="x")
