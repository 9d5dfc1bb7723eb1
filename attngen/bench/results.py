"""Measured results: lines of figures, one per cell and peer; as JSON, CSV and tables, and compared with an older run.

JSON has one line per cell and peer, so that two runs can be read as a diff. Keys of a line: `call` if the cell has one,
those of FIGURES if there is a figure, `why` if one is missing or the results differ, `note` for a remark.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attngen import __version__
from attngen.bench.cases.grids import Cell
from attngen.errors import AttngenError, shown
from attngen.ir.dtypes import ELEMENTS, result_of
from attngen.spec import make_spec

DIRECTIONS = ("fwd", "bwd", "both")
WORK = {"fwd": 1.0, "bwd": 2.5, "both": 3.5}  # FLOPs over the forward's, as FlashAttention's papers count them
HOST = ("host_us", "host_nograd_us", "host_compiled_us", "host_compiled_nograd_us", "host_graph_us")
MASKS = ("mask_ms", "mask_eager_ms", "mask_mib", "whole_fwd_ms", "whole_fwd_spread", "whole_mib")
CACHE = ("read_mib", "read_tb_s", "read_copy")
# Results with separate figures for their differences; `learned` is the largest of all inputs with gradients.
RESULTS = ("out", "dq", "dk", "dv", "learned")
FIGURES = (
    *(f"{d}_{figure}" for d in DIRECTIONS for figure in ("ms", "spread", "tflops", "roof")),
    "allocated_mib",
    "reserved_mib",
    *HOST,
    "first_fwd_s",
    "first_s",
    "visible",
    *CACHE,
    *MASKS,
    "differs",
    *(f"{result}_differs" for result in RESULTS),
)
KEYS = ("grid", "spec", "dtype", "batch", "heads", "kv_heads", "n_q", "n_kv", "peer")
FLOOR = 0.02  # smallest relative change of a time that counts as one
DIFFERS = 2e-2  # relative difference of results above which a comparison has failed


@dataclass(frozen=True)
class Line:
    """One peer in one cell; `figures` by the names of FIGURES: ms, TFLOP/s, fractions of the roofline, MiB,
    microseconds, seconds.

    `visible` is the share of visible scores. `mask_*` are figures of preparing the mask, `whole_*` of calls that
    include it. With a KV cache, `read_mib` of K and V must be read; a call reads them at `read_tb_s`, which is the
    share `read_copy` of a copy's rate.
    """

    cell: Cell
    peer: str
    figures: dict[str, float]
    why: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that the same line has in another run."""
        c, dim = self.cell, self.cell.spec.head_dim
        means = (c.spec.mask.describe(), c.score, dim.qk, dim.v)
        return (c.spec.name, *means, c.dtype, c.batch, c.heads, c.kv_heads, c.n_q, c.n_kv, c.call, self.peer)

    def data(self) -> dict[str, Any]:
        """Return the line as data for JSON and CSV."""
        c = self.cell
        keys = (c.grid, c.spec.name, c.dtype, c.batch, c.heads, c.kv_heads, c.n_q, c.n_kv, self.peer)
        words = {name: text for name, text in (("why", self.why), ("note", self.note)) if text}
        call = {"call": dict(c.call)} if c.call else {}
        return {
            **dict(zip(KEYS, keys)),
            **call,
            **{name: self.figures[name] for name in FIGURES if name in self.figures},
            **words,
        }


@dataclass(frozen=True)
class Results:
    """A run. `machine`: gpu, torch, triton, and the measured peaks matmul_tflops and copy_tb_s."""

    machine: dict[str, Any]
    lines: list[Line] = field(default_factory=list)

    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(line.cell for line in self.lines))

    def peers(self) -> list[str]:
        return list(dict.fromkeys(line.peer for line in self.lines))

    def failed(self) -> list[Line]:
        """Return the lines with failures: ours without a figure, and results that differ."""
        return [x for x in self.lines if x.peer == "ours" and x.why or not x.figures.get("differs", 0.0) <= DIFFERS]

    def shared(self, other: Results) -> int:
        """Return the number of lines that the other run has too."""
        return len({line.key for line in self.lines} & {line.key for line in other.lines})

    def text(self) -> str:
        """Return the run as JSON."""
        specs = {c.spec.name: c.spec.canonical() for c in self.cells()}
        head = {"attngen": __version__, **self.machine}
        parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        parts.append(
            '"specs": ' + _listed("{", [f"{json.dumps(n)}: {json.dumps(s)}" for n, s in sorted(specs.items())], "}")
        )
        parts.append('"lines": ' + _listed("[", [json.dumps(line.data()) for line in self.lines], "]"))
        return _listed("{", parts, "}") + "\n"

    def csv(self) -> str:
        made = io.StringIO()
        writer = csv.DictWriter(made, [*KEYS, "call", *FIGURES, "why", "note"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(line.data() for line in self.lines)
        return made.getvalue()


def _listed(begin: str, parts: Sequence[str], end: str) -> str:
    return f"{begin}\n" + ",\n".join(parts) + f"\n{end}"


def read_results(path: Path) -> Results:
    """Read a run from its JSON; AttngenError if the file has none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        specs = {name: make_spec(spec, str(path)) for name, spec in data["specs"].items()}
        cells: dict[tuple[Any, ...], Cell] = {}
        lines = []
        for line in data["lines"]:
            at = (*(line[key] for key in KEYS[:-1]), tuple(line.get("call", {}).items()))
            cell = cells.setdefault(at, Cell(at[0], specs[at[1]], *at[2:]))
            figures = {name: float(line[name]) for name in FIGURES if name in line}
            lines.append(Line(cell, line["peer"], figures, line.get("why", ""), line.get("note", "")))
        machine = {key: data[key] for key in data if key not in ("attngen", "specs", "lines")}
        for key, kind in (
            ("matmul_tflops", float),
            ("copy_tb_s", float),
            ("gpu", str),
            ("torch", str),
            ("triton", str),
        ):
            kind(machine[key])  # raises if it is missing or not a number
    except (ValueError, KeyError, TypeError, AttributeError):
        raise AttngenError(f"{path}: not the results of `attngen bench`; expected its results.json") from None
    return Results(machine, lines)


# ---------------------------------------------------------------------------------------------- figures


def rates(cell: Cell, machine: dict[str, Any], pairs: int, read: int, direction: str, ms: float) -> dict[str, float]:
    """Return the TFLOP/s of a time, and the share of it that the roofline would take; with a KV cache also the figures
    in CACHE.

    read: bytes of K and V that a forward must read.

    FLOPs are 4 D per visible pair of query and key, with D the mean of both head dimensions. The roofline is the larger
    of two times: of this run's bf16 matrix product for these FLOPs, and of its copy for the bytes that must be read and
    written.
    """
    dim, size, out_size = cell.spec.head_dim, ELEMENTS[cell.dtype].bytes, ELEMENTS[result_of(cell.dtype)].bytes
    flops = WORK[direction] * 2 * (dim.qk + dim.v) * pairs
    rows_q, rows_kv = cell.batch * cell.heads * cell.n_q, cell.batch * cell.kv_heads * cell.n_kv
    forward = size * rows_q * dim.qk + read + out_size * rows_q * dim.v + 4 * rows_q
    backward = size * (rows_q * 2 * (dim.qk + dim.v) + rows_kv * 2 * (dim.qk + dim.v)) + 4 * rows_q
    moved = {"fwd": forward, "bwd": backward, "both": forward + backward}[direction]
    roofline_ms = max(flops / machine["matmul_tflops"] / 1e9, moved / machine["copy_tb_s"] / 1e9)
    found = {f"{direction}_tflops": round(flops / ms / 1e9, 2), f"{direction}_roof": round(roofline_ms / ms, 4)}
    if cell.cached:
        tb_s = read / ms / 1e9
        found |= {
            "read_mib": round(read / 2**20, 2),
            "read_tb_s": round(tb_s, 3),
            "read_copy": round(tb_s / machine["copy_tb_s"], 4),
        }
    return found


def sentence(text: str) -> str:
    """Return an error in one short line, without the folders of paths."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return shorten(re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", first))


def shorten(text: str, most: int = 120) -> str:
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean if len(clean) <= most else f"{clean[: most - 3]}..."


# ---------------------------------------------------------------------------------------------- tables

HEADINGS = ("cell", "peer", "fwd ms", "TFLOP/s", "of peak", "bwd ms", "TFLOP/s", "of peak", "both ms", "TFLOP/s",
            "+-", "MiB", "reserved", "host us", "first s", "")  # fmt: skip


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the table under HEADINGS, of cells without a KV cache; a cell's name is on its first line. `+-` is the
    largest of the three spreads."""
    before: Cell | None = None
    for line in (line for line in results.lines if not line.cell.cached):
        f = line.figures
        found = [str(line.cell) if line.cell is not before else "", line.peer]
        for d in DIRECTIONS:
            found += [
                _number(f, f"{d}_ms", ".3f"),
                _number(f, f"{d}_tflops", ".0f"),
                *([_number(f, f"{d}_roof", ".0%")] if d != "both" else []),
            ]
        spread = max((f[f"{d}_spread"] for d in DIRECTIONS if f"{d}_spread" in f), default=None)
        found.append("" if spread is None else f"{spread:.1%}")
        found += [
            _number(f, "allocated_mib", ".0f"),
            _number(f, "reserved_mib", ".0f"),
            _number(f, "host_us", ".0f"),
            _number(f, "first_s", ".1f"),
        ]
        before = line.cell
        yield (*found, "; ".join(filter(None, (line.why, line.note))))


CACHE_HEADINGS = (
    "KV cache",
    "peer",
    "us",
    "+-",
    "MiB to read",
    "TB/s",
    "of the copy",
    "TFLOP/s",
    "host us",
    "first s",
    "",
)


def cache_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the table under CACHE_HEADINGS, of cells with a KV cache."""
    before: Cell | None = None
    for line in (line for line in results.lines if line.cell.cached):
        f = line.figures
        forms = {
            "fwd_spread": ".1%",
            "read_mib": ".1f",
            "read_tb_s": ".2f",
            "read_copy": ".0%",
            "fwd_tflops": ".0f",
            "host_us": ".0f",
        }
        us = f"{f['fwd_ms'] * 1e3:.1f}" if "fwd_ms" in f else "-"
        found = (us, *(_number(f, name, form) for name, form in forms.items()), _number(f, "first_fwd_s", ".1f"))
        yield (
            str(line.cell) if line.cell is not before else "",
            line.peer,
            *found,
            "; ".join(filter(None, (line.why, line.note))),
        )
        before = line.cell


HOST_HEADINGS = ("host us of a forward call", "peer", "eager", "no gradients", "compiled", "no gradients", "CUDA graph")


def host_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the table under HOST_HEADINGS, of lines that have more than the first of these figures."""
    before: Cell | None = None
    for line in results.lines:
        if any(name in line.figures for name in HOST[1:]):
            yield (
                str(line.cell) if line.cell is not before else "",
                line.peer,
                *(_number(line.figures, name, ".1f") for name in HOST),
            )
            before = line.cell


MASK_HEADINGS = ("what the mask takes", "peer", "ms", "eager ms", "MiB", "fwd ms with it", "MiB with it")


def mask_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the table under MASK_HEADINGS, of lines that have one of these figures."""
    before: Cell | None = None
    forms = {"mask_ms": ".3f", "mask_eager_ms": ".3f", "mask_mib": ".1f", "whole_fwd_ms": ".3f", "whole_mib": ".0f"}
    for line in results.lines:
        if any(name in line.figures for name in forms):
            figures = (_number(line.figures, name, form) for name, form in forms.items())
            yield (str(line.cell) if line.cell is not before else "", line.peer, *figures)
            before = line.cell


def _number(figures: dict[str, float], name: str, form: str) -> str:
    return format(figures[name], form) if name in figures else "-"


def ratios(results: Results) -> Iterator[str]:
    """Yield our speedups over each peer, over the cells that have both: the geometric mean and the least."""
    times = {
        (line.cell, line.peer, d): line.figures[f"{d}_ms"]
        for line in results.lines
        for d in DIRECTIONS
        if f"{d}_ms" in line.figures
    }
    for peer in results.peers():
        parts, count = [], 0
        for d, name in (("fwd", "forward"), ("bwd", "backward")):
            found = [
                (times[c, peer, d] / times[c, "ours", d], c)
                for c in results.cells()
                if (c, peer, d) in times and (c, "ours", d) in times
            ]
            if peer != "ours" and found:
                least, where = min(found, key=lambda pair: pair[0])
                count = max(count, len(found))
                mean = math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found))
                parts.append(f"{name} {mean:.2f}x on average, {least:.2f}x at least ({where})")
        if parts:
            yield f"ours over {peer}, {count} cells: {'; '.join(parts)}"


# ---------------------------------------------------------------------------------------------- an older run


@dataclass(frozen=True)
class Move:
    """A time that changed by more than its spread. `before` or `after` is None if there is no figure."""

    line: Line
    direction: str
    before: float | None
    after: float | None
    least: float  # the smallest relative change that counts as one

    @property
    def slower(self) -> bool:
        return self.after is None or self.before is not None and self.after > self.before

    def __str__(self) -> str:
        text = f"{self.line.cell} {self.line.peer} {self.direction}: {_ms(self.before)} before, {_ms(self.after)} now"
        if self.before is None or self.after is None:
            return f"{text}{f' ({self.line.why})' if self.line.why else ''}"
        return f"{text}: {self.after / self.before - 1:+.1%} (spread {self.least:.1%})"


def _ms(value: float | None) -> str:
    return "no figure" if value is None else f"{value:.3f} ms"


def moves(new: Results, old: Results) -> list[Move]:
    """Return the times, of lines in both runs, that changed by more than both spreads together and FLOOR; also lost and
    gained figures."""
    known = {line.key: line for line in old.lines}
    found = []
    for line in new.lines:
        if line.key not in known:
            continue
        for d in DIRECTIONS:
            before, after = (x.figures.get(f"{d}_ms") for x in (known[line.key], line))
            least = max(FLOOR, sum(x.figures.get(f"{d}_spread", 0.0) for x in (known[line.key], line)))
            if before is None and after is None:
                continue
            if before is None or after is None or abs(after / before - 1) > least:
                found.append(Move(line, d, before, after, least))
    return found


def other_machine(new: Results, old: Results) -> str:
    """Return the differences of the machines in one line; empty if there are none."""
    keys = [key for key in ("gpu", "torch", "triton") if old.machine[key] != new.machine[key]]
    return "; ".join(f"{key} {shown(old.machine[key])} then, {shown(new.machine[key])} now" for key in keys)


def failures(found: Iterable[Move]) -> list[Move]:
    """Return the changes that fail a comparison: ours became slower, or lost its figure."""
    return [move for move in found if move.slower and move.line.peer == "ours"]
