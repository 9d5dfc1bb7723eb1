"""Charts as lists of shapes. The page's template prints them as SVG; colours are classes of its style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

PLOT = 300  # side of a map of tiles or elements
WIDTH, NARROW = 380, 340  # widths of other charts
UNLISTED = "unlisted"  # the class of tiles that only the sample data hides
LINE, HEADING = 38, 26  # height of a bar with the text above it, and of text only


class Shape(NamedTuple):
    """One SVG element."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    hint: str = ""  # tooltip


class Drawing(NamedTuple):
    """A chart, and the text `says` that describes it for screen readers."""

    width: int
    height: int
    title: str
    says: str
    shapes: list[Shape]


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def rect(x: float, y: float, width: float, height: float, cls: str, hint: str = "") -> Shape:
    sides = {"x": _n(x), "y": _n(y), "width": _n(width), "height": _n(height)}
    return Shape("rect", {"class": cls, **sides}, hint=hint)


def text(x: float, y: float, words: str, cls: str = "", anchor: str = "start", rotation: float = 0) -> Shape:
    attributes = {"class": cls, "x": _n(x), "y": _n(y), "text-anchor": anchor}
    if rotation:
        attributes["transform"] = f"rotate({_n(rotation)} {_n(x)} {_n(y)})"
    return Shape("text", attributes, words)


def path(points: Iterable[tuple[float, float]], cls: str) -> Shape:
    return Shape("path", {"class": cls, "d": "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)})


# ---------------------------------------------------------------------------------------------- tiles


def tile_map(name: str, cells: list[list[str]], own: str, n: int, blocks: tuple[int, int]) -> Drawing:
    """Draw the score matrix, n queries down and n keys across; cells[p][j] is the class of tile j of program p.

    `own` is the program axis, "q" or "kv". `blocks` are the rows of a tile along that axis and along the other.
    """
    left, top = 20, 20
    across, down = blocks if own == "kv" else blocks[::-1]  # keys and queries of a tile
    shapes = [
        text(left, top - 7, f"keys 0 … {n - 1} →"),
        text(left - 13, top, f"queries 0 … {n - 1} →", rotation=90),
        rect(left, top, PLOT, PLOT, "empty"),
    ]

    def at(tile: int, block: int) -> float:
        return PLOT * min(n, tile * block) / n

    for p, row in enumerate(cells):
        for cls, j, count in _runs(row):
            if cls == "empty":
                continue
            first, last = at(p, blocks[0]), at(p + 1, blocks[0])
            begin, end = at(j, blocks[1]), at(j + count, blocks[1])
            x, y, right, bottom = (begin, first, end, last) if own == "q" else (first, begin, last, end)
            hint = f"program {p}: {cls} {j} .. {j + count}"
            shapes.append(rect(left + x, top + y, right - x, bottom - y, cls, hint))
    lines = [f"M{_n(left + at(i, across))} {top}v{PLOT}" for i in range(-(-n // across) + 1)]
    lines += [f"M{left} {_n(top + at(i, down))}h{PLOT}" for i in range(-(-n // down) + 1)]
    shapes.append(Shape("path", {"class": "grid", "d": "".join(lines)}))
    counts = {cls: sum(row.count(cls) for row in cells) for cls in ("full", "partial", UNLISTED, "empty")}
    says = f"{-(-n // down)} by {-(-n // across)} tiles: " + ", ".join(
        f"{count} {cls}" for cls, count in counts.items() if count or cls != UNLISTED
    )
    return Drawing(left + PLOT + 2, top + PLOT + 2, f"Tiles of the score matrix that {name} visits", says, shapes)


def element_map(name: str, seen: list[list[bool]], q0: int, k0: int) -> Drawing:
    """Draw elements of the score matrix, queries down from q0 and keys across from k0; visible elements are blue."""
    left, top = 44, 34
    side = PLOT / max(len(seen), len(seen[0]))
    shapes = [text(left + PLOT, 12, "keys →", "faint", "end"), text(0, 12, "queries ↓", "faint")]
    shapes += [text(left + side * (i + 0.5), top - 5, str(k0 + i), anchor="middle") for i in range(0, len(seen[0]), 4)]
    shapes += [text(left - 5, top + side * (i + 0.5) + 4, str(q0 + i), anchor="end") for i in range(0, len(seen), 4)]
    shapes.append(rect(left, top, side * len(seen[0]), side * len(seen), "empty"))
    for i, row in enumerate(seen):
        for cls, j, count in _runs(["full" if x else "empty" for x in row]):
            if cls == "full":
                hint = f"query {q0 + i} sees keys {k0 + j} .. {k0 + j + count - 1}"
                shapes.append(rect(left + side * j, top + side * i, side * count, side, cls, hint))
    lines = [f"M{_n(left + side * i)} {top}v{_n(side * len(seen))}" for i in range(len(seen[0]) + 1)]
    lines += [f"M{left} {_n(top + side * i)}h{_n(side * len(seen[0]))}" for i in range(len(seen) + 1)]
    shapes.append(Shape("path", {"class": "grid", "d": "".join(lines)}))
    count = sum(map(sum, seen))
    says = f"{len(seen)} queries from {q0} by {len(seen[0])} keys from {k0}: {count} elements visible"
    return Drawing(left + PLOT + 2, top + PLOT + 2, f"The mask, {name}", says, shapes)


def _runs(row: list[str]) -> Iterable[tuple[str, int, int]]:
    """Yield runs of equal neighbours, each as (class, index of the first, count)."""
    at = 0
    for cls, group in groupby(row):
        count = len(list(group))
        yield cls, at, count
        at += count


# ---------------------------------------------------------------------------------------------- bars


class Bar(NamedTuple):
    """A line of a bar chart; without a value it is a heading or a remark."""

    label: str
    shown: str = ""
    value: float | None = None
    cls: str = "bar"


def bars(title: str, lines: list[Bar], whole: float, width: int = WIDTH) -> Drawing:
    """Draw bars one below another; a bar of value `whole` is as wide as the chart."""
    shapes: list[Shape] = []
    y = 0
    for line in lines:
        shapes.append(text(0, y + 15, line.label, "" if line.value is not None else "strong"))
        if line.value is None:
            y += HEADING
            continue
        shapes.append(text(width, y + 15, line.shown, anchor="end"))
        shapes.append(rect(0, y + 21, width, 9, "track"))
        shapes.append(
            rect(0, y + 21, max(1.0, width * min(1.0, line.value / whole)), 9, line.cls, f"{line.label}: {line.shown}")
        )
        y += LINE
    says = "; ".join(f"{line.label} {line.shown}".strip() for line in lines)
    return Drawing(width, y, title, says, shapes)


# ---------------------------------------------------------------------------------------------- roofline


class Point(NamedTuple):
    """A kernel in the roofline. Its intensities are in FLOP per byte: `cached` with the device's cache, `loaded` as if
    every load went to memory."""

    label: str
    cached: float
    loaded: float


def roofline(title: str, points: list[Point], peak: float, bandwidth: float, peak_name: str) -> Drawing:
    """Draw FLOP/B across and TFLOP/s up, both on logarithmic scales; `peak` is in FLOP/s, `bandwidth` in bytes/s."""
    left, right, top, bottom = 44, WIDTH - 18, 44, 236
    ridge = peak / bandwidth
    values = [ridge, *(p.cached for p in points), *(p.loaded for p in points)]
    low, high = math.floor(math.log10(min(values)) - 0.5), math.ceil(math.log10(max(values)) + 0.1)
    y_high = math.log10(peak)
    y_low = math.log10(bandwidth) + low

    def x_of(intensity: float) -> float:
        return left + (right - left) * (math.log10(intensity) - low) / (high - low)

    def y_of(rate: float) -> float:
        return bottom - (bottom - top) * (math.log10(rate) - y_low) / (y_high - y_low)

    def under(intensity: float) -> float:
        return min(peak, intensity * bandwidth)

    shapes: list[Shape] = []
    for exponent in range(low, high + 1):
        x = x_of(10.0**exponent)
        shapes += [path([(x, top), (x, bottom)], "axis"), text(x, bottom + 16, _short(10.0**exponent), anchor="middle")]
    marks = (1, 2, 5) if y_high - y_low < 2.5 else (1,)
    for rate in (m * 10.0**e for e in range(math.floor(y_low), math.ceil(y_high)) for m in marks):
        if y_low <= math.log10(rate) <= y_high:
            y = y_of(rate)
            shapes += [path([(left, y), (right, y)], "axis"), text(left - 6, y + 4, _short(rate / 1e12), anchor="end")]
    corner, start = (x_of(ridge), y_of(peak)), (x_of(10.0**low), y_of(under(10.0**low)))
    shapes.append(path([start, corner, (right, corner[1])], "roofline"))
    slope = math.atan2(corner[1] - start[1], corner[0] - start[0])
    drawn = [x_of(intensity) for p in points for intensity in (p.cached, p.loaded)]
    middles = [start[0] + share * (corner[0] - start[0]) for share in (0.5, 0.25, 0.75)]
    middle = max(middles, key=lambda x: min(40.0, *(abs(x - other) for other in drawn)))  # away from the points
    height = start[1] + (middle - start[0]) * math.tan(slope)
    label_at = (middle - 15 * math.sin(slope), height + 15 * math.cos(slope))
    peaks = (f"{peak / 1e12:,.1f}".removesuffix(".0") + f" TFLOP/s {peak_name}", f"{bandwidth / 1e12:.2f} TB/s")
    shapes.append(text(*label_at, peaks[1], "faint", "middle", math.degrees(slope)))
    shapes.append(text(right, corner[1] + 18, peaks[0], "faint", "end"))
    shapes.append(text(right, bottom + 34, "FLOP / B", "faint", "end"))
    shapes.append(text(0, bottom + 34, "↑ TFLOP/s", "faint"))
    ordered = sorted(points, key=lambda p: p.cached)
    gap = 10.0 + 8 * max(len(p.label) for p in points)  # between the middles of labels
    for point, label_x in zip(ordered, _spread([x_of(p.cached) for p in ordered], gap, left + 20, right - gap / 2)):
        x, y = x_of(point.cached), y_of(under(point.cached))
        shapes.append(path([(label_x, 18), (x, y)], "leader"))
        shapes.append(text(label_x, 14, point.label, "strong", "middle"))
        for intensity, cls in ((point.loaded, "hollow"), (point.cached, "point")):
            hint = f"{point.label}: {intensity:,.0f} FLOP/B, at most {under(intensity) / 1e12:,.0f} TFLOP/s"
            at = {"cx": _n(x_of(intensity)), "cy": _n(y_of(under(intensity))), "r": "5"}
            shapes.append(Shape("circle", {"class": cls, **at}, hint=hint))
    labels = (f"{p.label} {p.cached:,.0f} FLOP/B, {under(p.cached) / 1e12:,.0f} TFLOP/s at most" for p in ordered)
    says = f"Peaks: {peaks[0]} and {peaks[1]}. " + "; ".join(labels)
    return Drawing(WIDTH, bottom + 42, title, says, shapes)


def _short(value: float) -> str:
    """Return a round number in few letters: 0.5, 20, 10k."""
    return next(
        (f"{value / size:g}{letter}" for size, letter in ((1e6, "M"), (1e3, "k")) if value >= size), f"{value:g}"
    )


def _spread(positions: list[float], gap: float, least: float, most: float) -> list[float]:
    """Return rising positions near the given ones, at least `gap` from each other, at most `most`, and at least `least`
    if they fit."""
    found: list[float] = []
    for x in positions:
        found.append(max(x, least, found[-1] + gap if found else least))
    limit = most
    for i in reversed(range(len(found))):
        found[i] = min(found[i], limit)
        limit = found[i] - gap
    return found
