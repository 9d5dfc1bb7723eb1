"""What README shows of measured speed: a picture, which also has the tiles of a mask, and a table.

Their figures are in docs/bench/readme.json: the device, the date, the setting, and for each workload the milliseconds
of attngen and of its peers, forward and backward. Peers are FlexAttention, which each workload has, and hand-written
kernels, each under its name. A direction without a figure is absent. After a new measurement, replace the file, run
`python -m docs.site.pictures --write`, and put the table of `python -m docs.site.readme` into README.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from attngen.bench.figures import FORMS, theme
from attngen.cost.calls import ranges
from attngen.ir.parser import parse_module
from attngen.report.charts import Shape, path, rect, text
from attngen.report.elements import Sample
from attngen.report.tilemap import TileMap, draw_tiles
from attngen.spec import load_spec
from docs.site.committed import ROOT
from docs.site.pages import rendered

DATA = ROOT / "docs/bench/readme.json"
FLEX = "FlexAttention"
DIRECTIONS = {"forward": "bar", "backward": "deep"}  # and the class of their bars
Times = dict[str, float]  # milliseconds by direction

SPEC, ROWS = "streaming_gqa", 2048  # whose tiles are drawn: a window and the first keys
WIDTH, HEIGHT = 900, 320
TOP, SIDE = 48, 256  # of the map and the chart; the side of the map
LEFT, BARS, RIGHT = 446, 622, 822  # of the chart: its left edge, and the range of its bars
THICK, EVERY = 15, 40  # of a bar; from one workload to the next
LIMIT = 3.2  # the longest bar, in times; longer ones end in an arrow
MANY = 100  # times that are shown as `>100x`


@dataclass(frozen=True)
class Workload:
    """A row of the table."""

    name: str
    ours: Times
    peers: dict[str, Times]

    def speedup(self, direction: str) -> float:
        """Return how many times as fast as FlexAttention attngen is."""
        return self.peers[FLEX][direction] / self.ours[direction]

    def best(self, direction: str) -> tuple[float, str] | None:
        """Return the time and the name of the fastest peer other than FlexAttention, if one was measured."""
        times = [(t[direction], name) for name, t in self.peers.items() if name != FLEX and direction in t]
        return min(times, default=None)


@dataclass(frozen=True)
class Speed:
    device: str
    date: str
    setting: str
    workloads: tuple[Workload, ...]


def speed() -> Speed:
    """Read docs/bench/readme.json."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    rows = tuple(Workload(row["workload"], row["attngen"], row["peers"]) for row in data["workloads"])
    return Speed(data["device"], data["date"], data["setting"], rows)


# ---------------------------------------------------------------------------------------------- the table


def speed_table() -> str:
    """Return the table of README as Markdown: milliseconds, forward / backward."""
    rows = [["workload", "attngen", "fastest other kernel", FLEX], ["---"] * 4]
    for row in speed().workloads:
        rows.append([row.name, _pair(row.ours), _best(row), _pair(row.peers[FLEX])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def speed_caption() -> str:
    """Return the sentence above the table."""
    found = speed()
    return f"Milliseconds, forward / backward, on one {found.device} ({found.date}; {found.setting}):"


def _best(row: Workload) -> str:
    found = {direction: best for direction in DIRECTIONS if (best := row.best(direction))}
    if not found:
        return "none measured"
    names = list(dict.fromkeys(name for _, name in found.values()))
    return f"{_pair({direction: time for direction, (time, _) in found.items()})} ({', '.join(names)})"


def _pair(times: Times) -> str:
    return " / ".join(_ms(times[direction]) if direction in times else "-" for direction in DIRECTIONS)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.{2 if value >= 1 else 3}f}"


# ---------------------------------------------------------------------------------------------- the picture


@cache
def pictures() -> dict[str, str]:
    """Return README's picture in both forms, by their paths below docs/."""
    found = speed()
    tiles = _tiles()
    ratios = (", ".join(f"{_times(row.speedup(d))} {d}" for d in row.ours) for row in found.workloads)
    chart = "; ".join(f"{row.name} {words}" for row, words in zip(found.workloads, ratios))
    values = {
        "width": WIDTH,
        "height": HEIGHT,
        "title": f"Tiles of a mask, and speed over {FLEX}",
        "says": f"{SPEC}: {tiles.counts} tiles. Times as fast as {FLEX} on one {found.device}: {chart}.",
        "shapes": [*_map(tiles), *_chart(found)],
    }
    return {
        f"assets/attngen{suffix}.svg": rendered("readme.svg.jinja", colours=theme(form).colours, **values)
        for form, suffix in FORMS.items()
    }


def _tiles() -> TileMap:
    module = parse_module((ROOT / "generated" / SPEC / "schedule.ir").read_text(encoding="utf-8"))
    sample = Sample(load_spec(ROOT / "specs" / f"{SPEC}.yaml"))
    kernel = module.kernel("fwd")
    return draw_tiles(sample, module, kernel, ranges(module, kernel, "any")[-1], ROWS)


def _map(tiles: TileMap) -> list[Shape]:
    """Draw the tiles of the score matrix, queries down and keys across, with a legend of their classes."""
    left = 20
    cell = SIDE / len(tiles.cells)
    shapes = [text(left, 30, "Sliding window and sinks, tile by tile", "strong"), rect(left, TOP, SIDE, SIDE, "empty")]
    for i, row in enumerate(tiles.cells):
        start = 0
        for j in range(1, len(row) + 1):
            if j == len(row) or row[j] != row[start]:
                if row[start] != "empty":
                    shapes.append(rect(left + start * cell, TOP + i * cell, (j - start) * cell, cell, row[start]))
                start = j
    lines = "".join(
        f"M{left + i * cell:g} {TOP}v{SIDE}M{left} {TOP + i * cell:g}h{SIDE}" for i in range(len(tiles.cells))
    )
    shapes.append(Shape("path", {"class": "grid", "d": lines}))
    words = {"full": "no mask code", "partial": "masked", "empty": "never visited"}
    for i, (cls, meaning) in enumerate(words.items()):
        x, y = left + SIDE + 16, TOP + 62 + 64 * i
        shapes += [rect(x, y - 13, 15, 15, cls), text(x + 23, y, f"{tiles.count(cls)} {cls}")]
        shapes.append(text(x + 23, y + 21, meaning, "faint"))
    return shapes


def _chart(found: Speed) -> list[Shape]:
    """Draw two bars for each workload: how many times as fast as FlexAttention, forward and backward."""
    one = BARS + (RIGHT - BARS) / LIMIT
    device = found.device.removeprefix("NVIDIA ")
    shapes = [text(LEFT, 30, f"Times as fast as {FLEX}, {device}", "strong")]
    for i, row in enumerate(found.workloads):
        y = TOP + EVERY * i
        shapes.append(text(BARS - 10, y + THICK + 6, row.name, anchor="end"))
        for j, direction in enumerate(row.ours):
            shapes += _bar(y + (THICK + 1) * j, row.speedup(direction), DIRECTIONS[direction])
    shapes.append(path([(one, TOP), (one, TOP + EVERY * len(found.workloads) - 9)], "axis"))
    for x, (direction, cls) in zip((BARS, BARS + 110), DIRECTIONS.items()):
        shapes += [rect(x, HEIGHT - 27, 15, 15, cls), text(x + 23, HEIGHT - 14, direction)]
    return shapes


def _bar(y: int, times: float, cls: str) -> list[Shape]:
    end = BARS + (RIGHT - BARS) * min(times, LIMIT) / LIMIT
    shapes = [rect(BARS, y, end - BARS, THICK, cls)]
    if times > LIMIT:  # the bar goes on
        shapes.append(Shape("path", {"class": cls, "d": f"M{end:g} {y}l9 {THICK / 2:g}l-9 {THICK / 2:g}z"}))
        end += 9
    return [*shapes, text(end + 6, y + 13, _times(times), "value")]


def _times(value: float) -> str:
    return f">{MANY}x" if value > MANY else f"{value:.1f}x"


if __name__ == "__main__":
    print(f"{speed_caption()}\n\n{speed_table()}")
