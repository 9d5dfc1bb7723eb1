"""Figures in a light and a dark form, as SVG that is the same to the byte for the same data and version of matplotlib.

Text stays text, in the reader's system font. It is measured in DejaVu Sans, which matplotlib brings and which is wider
than system fonts, so that labels do not run into each other.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import jinja2

from attngen.codegen.templates import templates_dir

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMS = {"light": "", "dark": "-dark"}  # suffixes of the names of a picture's two files
MEASURED = "DejaVu Sans"
SHOWN = "system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
SIZE, SMALL = 9.0, 8.25  # font sizes in points: 12 and 11 CSS pixels
LINE_HEIGHT = 11.0  # points from one label to the next
INCH = 72.0


@dataclass(frozen=True)
class Theme:
    """One form of the figures: its colours are those of templates/html/colours.css.jinja, by name."""

    form: str
    colours: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.colours[name]


@dataclass(frozen=True)
class Label:
    """A text at the right end of a line that ends at the height `y`, in data coordinates."""

    y: float
    text: str
    colour: str
    strong: bool = False


@cache
def theme(form: str) -> Theme:
    """Return the theme `light` or `dark`."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(templates_dir() / "html"), autoescape=True)
    block = getattr(environment.get_template("colours.css.jinja").module, form)()
    return Theme(form, dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)))


def both(name: str, size: tuple[float, float], title: str, paint: Callable[[Figure, Theme], None]) -> dict[str, str]:
    """Return the SVG of both forms by file name: NAME.svg and NAME-dark.svg. `size` is in inches; `paint` fills a
    figure, with the colours of a theme."""
    return {f"{name}{suffix}.svg": _drawn(size, title, paint, theme(form)) for form, suffix in FORMS.items()}


def _drawn(size: tuple[float, float], title: str, paint: Callable[[Figure, Theme], None], look: Theme) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_style(look))
        figure = Figure(figsize=size)
        paint(figure, look)
        made = io.StringIO()
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(made, format="svg", metadata={"Title": title, **empty})
    return _compact(made.getvalue())


def _style(look: Theme) -> Any:
    """Return matplotlib's parameters."""
    faint = ("xtick.color", "ytick.color", "axes.labelcolor")
    page = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return {
        "svg.hashsalt": "attngen",
        "svg.fonttype": "none",
        "font.family": MEASURED,
        "font.size": SIZE,
        "axes.titlesize": SIZE,
        "axes.titlelocation": "left",
        "axes.labelsize": SMALL,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "xtick.bottom": False,
        "ytick.left": False,
        "xtick.minor.bottom": False,
        "ytick.minor.left": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
        "grid.color": look["line"],
        "axes.edgecolor": look["other"],
        "text.color": look["text"],
        **dict.fromkeys(faint, look["faint"]),
        **dict.fromkeys(page, look["page"]),
    }


def _compact(svg: str) -> str:
    """Return matplotlib's SVG with the system's font, coordinates in tenths, and without indentation and comments."""
    svg = svg.replace(f"font-family: '{MEASURED}'; ", "").replace(
        "butt}</style>", f"butt}}text{{font-family: {SHOWN}}}</style>"
    )
    svg = re.sub(r"<!--.*?-->|<!DOCTYPE.*?>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", svg)
    svg = re.sub(r"(?<=[\s\"(,])-?\d+\.\d{3,}(?=[\s\"),])", lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), svg)
    svg = re.sub(r"\s*\n(?=[LzCQ\"])", " ", svg)
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


# ---------------------------------------------------------------------------------------------- parts of a figure


def panels(
    figure: Figure, shape: tuple[int, int], margins: tuple[float, float, float, float], gaps: tuple[float, float]
) -> list[list[Axes]]:
    """Add a grid of axes, rows of columns. Margins (left, right, top, bottom) and gaps between columns and between rows
    are in inches."""
    (width, height), (rows, columns) = figure.get_size_inches(), shape
    left, right, top, bottom = margins
    across = (width - left - right - (columns - 1) * gaps[0]) / columns
    down = (height - top - bottom - (rows - 1) * gaps[1]) / rows
    return [
        [
            figure.add_axes(
                (
                    (left + column * (across + gaps[0])) / width,
                    1 - (top + row * (down + gaps[1]) + down) / height,
                    across / width,
                    down / height,
                )
            )
            for column in range(columns)
        ]
        for row in range(rows)
    ]


def heading(figure: Figure, words: str, x: float, top: float, **style: Any) -> None:
    """Write text at `x` inches from the left edge, its baseline `top` inches below the upper edge."""
    width, height = figure.get_size_inches()
    figure.text(x / width, 1 - top / height, words, va="baseline", **style)


def footer(figure: Figure, lines: Sequence[str], x: float, colour: str) -> None:
    """Write lines of text at the lower edge."""
    height = figure.get_size_inches()[1]
    for i, words in enumerate(reversed(lines)):
        heading(figure, words, x, height - 0.08 - i * 0.16, fontsize=SMALL, color=colour)


def legend(figure: Figure, axes: Axes, order: Sequence[str], top: float) -> None:
    """Write a legend of the artists of some axes in one row, in a given order, `top` inches below the upper edge."""
    found = dict(zip(*reversed(axes.get_legend_handles_labels())))
    labels = [label for label in order if label in found]
    figure.legend(
        [found[label] for label in labels],
        labels,
        loc="upper left",
        bbox_to_anchor=(0, 1 - top / figure.get_size_inches()[1]),
        ncols=len(labels),
        frameon=False,
        borderaxespad=0.2,
        handletextpad=0.5,
        columnspacing=1.5,
    )


def label_ends(axes: Axes, labels: Sequence[Label]) -> None:
    """Write a label at the right edge of each line, moved up or down so that none overlaps another. Call it when the
    limits of the y axis are final."""
    scale = axes.figure.dpi / INCH
    places = [(axes.transData.transform((1, label.y))[1] / scale, label) for label in labels]
    low, high = axes.bbox.ymin / scale, axes.bbox.ymax / scale
    ordered = sorted(places, key=lambda place: place[0])
    for (at, label), place in zip(ordered, spread([at for at, _ in ordered], LINE_HEIGHT, low, high)):
        axes.annotate(
            label.text,
            (1, label.y),
            (5, place - at),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=label.colour,
            fontweight="bold" if label.strong else "normal",
            fontsize=SMALL,
        )


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return rising places near the given rising ones, at least `gap` apart, between `low` and `high` if they fit.

    Places that are too close form a group, which is centred on the mean of its members' own places.
    """
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _start(groups[-1], gap, low, high) < _start(groups[-2], gap, low, high) + gap * len(
            groups[-2]
        ):
            last = groups.pop()
            groups[-1] += last
    return [at for group in groups for at in _positions(group, gap, low, high)]


def _start(group: Sequence[float], gap: float, low: float, high: float) -> float:
    length = gap * (len(group) - 1)
    return max(low, min(sum(group) / len(group) - length / 2, high - length))


def _positions(group: Sequence[float], gap: float, low: float, high: float) -> Iterator[float]:
    start = _start(group, gap, low, high)
    return (start + gap * i for i in range(len(group)))
