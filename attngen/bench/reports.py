"""Tables as Markdown: of the grids `flex`, `variants` and `mods`, and of calls with a KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attngen.bench.cases.catalog import BLOCK_ROWS, DROPOUT_P, FLEX, MEMORY_ROWS
from attngen.bench.cases.grids import Cell
from attngen.bench.peers import PEERS
from attngen.bench.results import DIRECTIONS as TIMES
from attngen.bench.results import RESULTS, Line, Results
from attngen.cost.numbers import emitted_bytes
from attngen.cost.roofline import Problem
from attngen.ir.names import DIRECTIONS
from attngen.lowering.pipeline import lower

Table = list[list[str]]  # the headings, then the lines
Peers = dict[str, Line]  # the lines of one cell, by peer
SMEM = 227 * 1024  # most shared memory of a program on an H200: M of the lower bound, in elements of 2 bytes


def reports(results: Results) -> dict[str, str]:
    """Return the tables of a run's grids by file name: flex.md, variants.md, mods.md, decode.md."""
    found = {}
    for grid in dict.fromkeys(line.cell.grid for line in results.lines):
        lines = [line for line in results.lines if line.cell.grid == grid]
        tables = [
            markdown(table) for table in {"flex": flex, "variants": variants, "mods": mods}.get(grid, with_cache)(lines)
        ]
        parts = [heading(results), *tables, notes(lines)]
        if tables:
            found[f"{grid}.md"] = "\n\n".join(part for part in parts if part) + "\n"
    return found


def heading(results: Results) -> str:
    m = results.machine
    peaks = f"{m['matmul_tflops']:.0f} TFLOP/s bf16 product, {m['copy_tb_s']:.2f} TB/s copy"
    return f"{m['gpu']}, torch {m['torch']}, triton {m['triton']}; peaks: {peaks}"


def markdown(table: Table) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (table[0], ["---"] * len(table[0]), *table[1:]))


def notes(lines: Sequence[Line]) -> str:
    """Return a list of the failures, except those of cells that a peer cannot do."""
    failed = [line for line in lines if line.why and not PEERS[line.peer].cannot(line.cell)]
    return "\n".join(f"- {_title(line.cell)}: {line.peer}: {line.why}" for line in failed)


def by_cell(lines: Iterable[Line]) -> dict[Cell, Peers]:
    found: dict[Cell, Peers] = {}
    for line in lines:
        found.setdefault(line.cell, {})[line.peer] = line
    return found


def _title(c: Cell) -> str:
    known = FLEX.get(c.spec.name.removeprefix("flex_"))
    return known.title if known and c.grid == "flex" else str(c)


def _figure(peers: Peers, peer: str, name: str, form: str, factor: float = 1.0) -> str:
    found = peers[peer].figures.get(name) if peer in peers else None
    return "-" if found is None else format(found * factor, form)


# ---------------------------------------------------------------------------------------------- flex


def flex(lines: Sequence[Line]) -> Iterator[Table]:
    """Yield tables of times and rates compared with FlexAttention's; of first results, masks, host times and
    differences; of memory."""
    cells = by_cell(lines)
    measured = {c: peers for c, peers in cells.items() if c.n_q != MEMORY_ROWS}
    if measured:
        yield [_SPEED, *([_title(c), *_speed(peers)] for c, peers in measured.items())]
        yield [_REST, *([_title(c), *_rest(peers)] for c, peers in measured.items())]
    large = {c: peers for c, peers in cells.items() if c.n_q == MEMORY_ROWS}
    if large:
        yield [_MEMORY, *(row for c, peers in large.items() for row in _memory(c, peers))]


_SPEED = [
    "variant",
    "visible",
    *(x for d in ("fwd", "bwd") for x in (f"ours {d} ms (TFLOP/s)", f"Flex {d}", "ours / Flex")),
    "spread",
]
_MASKS = ["ours mask ms", "Flex compiled", "Flex eager", "ours fwd ms without a plan"]
_REST = [
    "variant",
    "ours first result s",
    "Flex",
    *_MASKS,
    "ours host us",
    "Flex",
    *(f"{result} differs" for result in RESULTS),
]
_MEMORY = ["memory", "rows", "peak GiB", "above q, k, v, dO", "of the mask", "mask ms"]


def _speed(peers: Peers) -> Iterator[str]:
    yield _figure(peers, "ours", "visible", ".1%")
    for d in ("fwd", "bwd"):
        ms = {peer: line.figures[f"{d}_ms"] for peer, line in peers.items() if f"{d}_ms" in line.figures}
        for peer in ("ours", "flex"):
            yield f"{ms[peer]:.3f} ({_figure(peers, peer, f'{d}_tflops', '.0f')})" if peer in ms else "-"
        yield f"{ms['flex'] / ms['ours']:.2f}" if ms.keys() >= {"ours", "flex"} else "-"
    names = [f"{d}_spread" for d in TIMES]
    spreads = [line.figures[name] for line in peers.values() for name in names if name in line.figures]
    yield f"{max(spreads):.1%}" if spreads else "-"


def _rest(peers: Peers) -> Iterator[str]:
    yield from (_figure(peers, peer, "first_s", ".1f") for peer in ("ours", "flex"))
    yield from (
        _figure(peers, peer, name, ".3f")
        for peer, name in (("ours", "mask_ms"), ("flex", "mask_ms"), ("flex", "mask_eager_ms"))
    )
    yield _figure(peers, "ours", "whole_fwd_ms", ".3f")
    yield from (_figure(peers, peer, "host_us", ".0f") for peer in ("ours", "flex"))
    yield from (_figure(peers, "flex", f"{result}_differs", ".1e") for result in RESULTS)


def _memory(c: Cell, peers: Peers) -> Iterator[list[str]]:
    """Yield one line per peer: the peak of mask, forward and backward, and that without q, k, v and dO."""
    dim = c.spec.head_dim
    inputs = 2 * (c.batch * c.heads * c.n_q + c.batch * c.kv_heads * c.n_kv) * (dim.qk + dim.v) / 2**20
    for peer, line in peers.items():
        whole = line.figures.get("whole_mib")
        gib = ["-", "-"] if whole is None else [f"{whole / 1024:.3f}", f"{(whole - inputs) / 1024:.3f}"]
        yield [
            peer,
            str(c.n_q),
            *gib,
            _figure(peers, peer, "mask_mib", ".3f", 1 / 1024),
            _figure(peers, peer, "mask_ms", ".2f"),
        ]


# ---------------------------------------------------------------------------------------------- variants


def variants(lines: Sequence[Line]) -> Iterator[Table]:
    """Yield tables of the cost of dropout, over the same module's calls without it, and of the saving by block
    sparsity, over all blocks."""
    cells = by_cell(lines)
    dropped = [c for c in cells if c.spec.dropout and not c.call]
    if dropped:
        yield [_DROPOUT, *(_dropout(c, cells) for c in dropped)]
    sparse = {c.asked("share"): c for c in cells if c.asked("share")}
    if sparse:
        plain = next((c for c in cells if c.n_q == BLOCK_ROWS and c not in sparse.values()), None)
        without = [_sum(cells, plain, "ours", parts) for parts in _PARTS[:2]]
        times = [x for ms in without for x in (_number(ms), "")]
        yield [
            _BLOCKS,
            ["no blocks", *times, *[""] * 4],
            *(_blocks(c, sparse.get(1.0), cells) for c in sparse.values()),
        ]


_DROPOUT = ["D", "mask", "p = 0 over no dropout", "ours fwd", "bwd", "both", "FLASH fwd", "bwd", "both"]
_BLOCKS = [
    "s",
    "forward ms",
    "times faster",
    "backward ms",
    "times faster",
    "plan us",
    "forward GB",
    "backward GB",
    "s N^2 d^2 / M GB",
]
_PARTS = (("fwd",), ("bwd",), ("fwd", "bwd"))


def _sum(cells: dict[Cell, Peers], c: Cell | None, peer: str, parts: Sequence[str]) -> float | None:
    """Return the milliseconds of the directions together; None if one is missing."""
    figures = cells[c][peer].figures if c in cells and peer in cells[c] else {}
    found = [figures.get(f"{d}_ms") for d in parts]
    return None if None in found else sum(x for x in found if x is not None)


def _number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.2f}"


def _ratio(above: float | None, below: float | None) -> str:
    return "-" if above is None or not below else f"{above / below:.2f}"


def _dropout(zero: Cell, cells: dict[Cell, Peers]) -> list[str]:
    def twin(dropout: bool, call: tuple[tuple[str, float], ...]) -> Cell | None:
        """Return the cell with the same mask and sizes, for a spec with or without dropout and such calls."""
        key = (zero.spec.mask, zero.spec.head_dim, zero.n_q, dropout, call)
        return next((c for c in cells if (c.spec.mask, c.spec.head_dim, c.n_q, c.spec.dropout, c.call) == key), None)

    plain, drops = twin(False, ()), twin(True, (("dropout_p", DROPOUT_P),))
    row = [str(zero.spec.head_dim.qk), zero.spec.mask.describe()]
    row.append(_ratio(_sum(cells, zero, "ours", ("fwd", "bwd")), _sum(cells, plain, "ours", ("fwd", "bwd"))))
    ratios = (
        _ratio(_sum(cells, drops, peer, parts), _sum(cells, zero, peer, parts))
        for peer in ("ours", "flash")
        for parts in _PARTS
    )
    return [*row, *ratios]


def _blocks(c: Cell, full: Cell | None, cells: dict[Cell, Peers]) -> list[str]:
    """Return a line with times, the bytes of the loads and stores of the IR, and the lower bound s N^2 d^2 / M of one
    direction."""
    share, problem = c.asked("share"), Problem(c.batch, c.heads, c.kv_heads, c.n_q, c.n_kv)
    row = [f"1/{share:g}"]
    for parts in _PARTS[:2]:
        ms = _sum(cells, c, "ours", parts)
        row += [_number(ms), _ratio(_sum(cells, full, "ours", parts), ms)]
    module = lower(c.spec)
    moved = [emitted_bytes(module, direction, "sm90", problem, 1 / share) for direction in DIRECTIONS]
    bound = c.heads * c.n_q**2 * c.spec.head_dim.qk**2 / share / (SMEM / 2) * 2
    return [*row, _figure(cells[c], "ours", "mask_ms", ".0f", 1e3), *(f"{x / 1e9:.2f}" for x in (*moved, bound))]


# ---------------------------------------------------------------------------------------------- mods


def mods(lines: Sequence[Line]) -> Iterator[Table]:
    """Yield a table of each function's milliseconds compared with FlexAttention's; last, the geometric mean of our
    speedups."""
    rows, faster = [], []
    for c, peers in by_cell(lines).items():
        ms = [[_sum({c: peers}, c, peer, parts) for parts in _PARTS] for peer in ("ours", "flex")]
        times = [theirs / mine if mine and theirs else None for mine, theirs in zip(*ms)]
        shown = [f"{x:.3f}" if x is not None else "-" for d in range(2) for x in (ms[0][d], ms[1][d])]
        rows.append(
            [c.spec.name.removeprefix("mod_"), _figure(peers, "ours", "visible", ".1%"), *shown, *map(_number, times)]
        )
        faster.append(times)
    means = [[x for x in column if x is not None] for column in zip(*faster)]
    last = [_number(math.exp(sum(map(math.log, column)) / len(column)) if column else None) for column in means]
    yield [_MODS, *rows, ["geometric mean", *[""] * 5, *last]]


_MODS = ["function", "visible", "ours fwd ms", "Flex", "ours bwd ms", "Flex", "times faster: fwd", "bwd", "both"]


# ---------------------------------------------------------------------------------------------- KV cache


def with_cache(lines: Sequence[Line]) -> Iterator[Table]:
    """Yield a table of times and rates of calls with a KV cache, and the peers' times.

    Ours are also compared with the first cell that reads as many bytes of as many sequences: pages with contiguous
    rows, drafts with one query, a window with a cache of as many keys.
    """
    cells = {c: peers for c, peers in by_cell(lines).items() if c.cached}
    others = [
        p for p in PEERS if p != "ours" and any("fwd_ms" in peers[p].figures for peers in cells.values() if p in peers)
    ]
    first: dict[tuple[Any, ...], float | None] = {}
    rows = []
    for c, peers in cells.items():
        ms = {peer: line.figures["fwd_ms"] for peer, line in peers.items() if "fwd_ms" in line.figures}
        ours, best = ms.get("ours"), min((x for peer, x in ms.items() if peer != "ours"), default=None)
        read = _figure(peers, "ours", "read_mib", ".1f")
        rates = (_figure(peers, "ours", name, form) for name, form in (("read_tb_s", ".2f"), ("read_copy", ".0%")))
        ratios = _ratio(ours, first.setdefault((c.batch, read), ours)), _ratio(best, ours)
        rows.append([str(c), read, _us(ours), *rates, *ratios, *(_us(ms.get(peer)) for peer in others)])
    if rows:
        yield [[*_CACHE, *(f"{peer} us" for peer in others)], *rows]


_CACHE = [
    "cell",
    "MiB to read",
    "ours us",
    "TB/s",
    "of the copy",
    "over the first of as many bytes",
    "best peer over ours",
]


def _us(ms: float | None) -> str:
    return "-" if ms is None else f"{ms * 1e3:.1f}"
