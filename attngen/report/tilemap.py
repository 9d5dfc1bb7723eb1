"""Which tiles of a small score matrix each program of a kernel visits, for the page's maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType

import sympy

from attngen.cost.roofline import Problem, row_of
from attngen.devices import CLASSES
from attngen.ir.expr import Expr
from attngen.ir.graph import Blocks, Config, Kernel, Module
from attngen.ir.ops import Loop
from attngen.ir.split_axes import ranges as shared_ranges
from attngen.masks import registry
from attngen.report.charts import UNLISTED, Drawing, tile_map
from attngen.report.elements import Sample
from attngen.tiles.tiles import evaluate, tile_loops, unbounded

DRAWN_ON = "sm90"  # the device class whose tiles are drawn, if one fits there
LEAST, MOST = 1024, 64  # fewest rows of a map; most tiles along its side
FIRST = {"b": 0, "h": 0, "hkv": 0}  # the sequence and the head that are drawn, if the mask depends on them


class Unknown(Exception):
    """Raised for tiles that cannot be drawn, with a sentence that says why."""


@dataclass(frozen=True)
class TileMap:
    """The tiles that each program of a kernel visits, of n queries and n keys."""

    kernel: str
    own: str
    n: int
    block_q: int
    block_kv: int
    remarks: list[str]
    loops: list[str]  # the class of each loop, as a heading for its ranges
    cells: list[list[str]]  # cells[p][j] is the class of tile j of program p
    ranges: list[list[str]]  # ranges[p] has the ranges of each loop of program p

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows of a tile on the programs' own axis, and on the other."""
        return (self.block_q, self.block_kv) if self.own == "q" else (self.block_kv, self.block_q)

    @property
    def drawing(self) -> Drawing:
        return tile_map(f"@{self.kernel}", self.cells, self.own, self.n, self.blocks)

    def count(self, cls: str) -> int:
        """The number of tiles of a class, for one head."""
        return sum(row.count(cls) for row in self.cells)

    @property
    def counts(self) -> str:
        """How many tiles there are of each class, in words."""
        return ", ".join(
            f"{self.count(cls)} {cls}"
            for cls in ("full", "partial", UNLISTED, "empty")
            if self.count(cls) or cls != UNLISTED
        )

    def programs(self) -> Iterator[list[str]]:
        """Rows of a table: the program, the rows it owns, the ranges of its loops, how many tiles it visits."""
        block = self.blocks[0]
        for p, (row, ranges) in enumerate(zip(self.cells, self.ranges)):
            rows = f"{p * block} .. {min(self.n, (p + 1) * block)}"
            yield [str(p), rows, *ranges, str(len(row) - row.count("empty") - row.count(UNLISTED))]


def chosen(module: Module, kernel: Kernel, cls: str, problem: Problem) -> Config | None:
    """The schedule row that a kernel takes on a device class for a problem size; None if no tile fits."""
    return row_of(module, kernel, cls, problem.n_q if kernel.program_axis == "q" else problem.n_kv)


def rows_on(module: Module, kernel: Kernel, cls: str, problem: Problem) -> list[tuple[Kernel, Config]]:
    """The portable kernel and the one of another backend that calls of a size run on a device class, each with its
    schedule row.

    A call with few rows takes the first one, where both exist.
    """
    portable = chosen(module, kernel, cls, problem)
    rows = problem.n_q if kernel.program_axis == "q" else problem.n_kv
    others = [
        (k, config) for k, config in module.stand_ins(kernel.name) if config.device == cls and rows > config.min_rows
    ]
    return [*([(kernel, portable)] if portable else []), *others[-1:]]


def tile_maps(sample: Sample, module: Module, problem: Problem) -> list[tuple[str, TileMap | str]]:
    """Each kernel that loops over tiles, with its map or the reason why it has none.

    Left out are the kernel `packed`, which owns few queries of many heads, and `bwd`, whose tiles are those of `dkdv`.
    `sample` says which blocks count if a call's data decides.
    """
    found: list[tuple[str, TileMap | str]] = []
    for kernel in (k for k in module.kernels if tile_loops(k) and not (k.pack_gqa or k.adds)):
        try:
            found.append((kernel.name, draw_tiles(sample, module, kernel, problem)))
        except Unknown as reason:
            found.append((kernel.name, str(reason)))
    return found


def draw_tiles(sample: Sample, module: Module, kernel: Kernel, problem: Problem) -> TileMap:
    """The tile map of a kernel; raises Unknown if no tile fits, or if its tiles depend on what only a call knows."""
    config = next((r for cls in (DRAWN_ON, *CLASSES) if (r := chosen(module, kernel, cls, problem))), None)
    if config is None:
        raise Unknown("No tile fits any device.")
    n, block_q, block_kv = _small(module, kernel, config, min(problem.n_q, problem.n_kv))
    sizes = {"Nq": n, "Nk": n, "BLOCK_Q": block_q, "BLOCK_KV": block_kv}
    remarks = [
        f"Tiles of {block_q} queries by {block_kv} keys"
        + (f", as on {config.device}." if block_q == config.block_q else ".")
    ]
    if block_q != config.block_q:
        remarks.append(f"On {config.device} they are {config.block_q} by {config.block_kv}: too small to draw.")
    used = {str(s) for e in _bounds(kernel) for s in e.free_symbols}
    if used & FIRST.keys():
        remarks.append("Drawn for the first head of the first sequence; others differ.")
    if given := sorted(used & unbounded(kernel).keys() - sizes.keys()):
        remarks.append(f"Drawn for a call that hides nothing by {', '.join(given)}; others visit fewer tiles.")
    own, other = (block_q, block_kv) if kernel.program_axis == "q" else (block_kv, block_q)
    cells: list[list[str]] = []
    ranges: list[list[str]] = []
    for start in range(0, n, own):
        values = {**FIRST, **unbounded(kernel), **sizes, f"{kernel.program_axis}_start": start}
        cells.append(["empty"] * -(-n // other))
        ranges.append([])
        for loop in tile_loops(kernel):
            spans = _spans(kernel, loop, values, len(cells[-1]))
            for lo, hi in spans:
                cells[-1][lo:hi] = [loop.cls] * (hi - lo)
            ranges[-1].append(", ".join(f"{lo} .. {hi}" for lo, hi in spans if lo < hi) or "none")
    if module.blocks and any(loop.listed for loop in tile_loops(kernel)):
        _keep_listed(module.blocks, sample, n, kernel, cells, (own, other))
        remarks.append(_on_lists(module.blocks))
    elif module.blocks:
        remarks.append(
            "It finds out which blocks of scores count, before the other kernels run: it visits all that the mask's bounds leave."
        )
    headings = [loop.cls for loop in tile_loops(kernel)]
    return TileMap(kernel.name, kernel.program_axis, n, block_q, block_kv, remarks, headings, cells, ranges)


def _bounds(kernel: Kernel) -> list[Expr]:
    """The bounds of the loops over tiles, with named scalars written out; of loops that programs share, those of all
    together."""
    return [e for loop in tile_loops(kernel) for pair in shared_ranges(kernel, loop) for e in pair]


def _small(module: Module, kernel: Kernel, config: Config, most: int) -> tuple[int, int, int]:
    """(rows, BLOCK_Q, BLOCK_KV) of a map: rows enough to show what the mask does, at most `most`; tiles of `config`,
    doubled if too many."""
    block = module.blocks.size if module.blocks else None
    reach = max((2 * abs(int(i)) for e in _bounds(kernel) for i in e.atoms(sympy.Integer)), default=0)
    wanted = min(MOST * block, max(16 * block, reach)) if block else reach
    n = LEAST
    while n < wanted:
        n *= 2
    n = min(n, most)
    block_q, block_kv = config.block_q, config.block_kv
    while n > MOST * min(block_q, block_kv) and (block is None or 2 * max(block_q, block_kv) <= block):
        block_q, block_kv = 2 * block_q, 2 * block_kv
    return n, block_q, block_kv


def _spans(kernel: Kernel, loop: Loop, values: dict[str, int], tiles: int) -> list[tuple[int, int]]:
    """The ranges of a loop for one program, within `tiles` tiles; raises Unknown, with the reason, if they cannot be
    told."""
    found = []
    for bounds in shared_ranges(kernel, loop):
        if missing := sorted({str(s) for e in bounds for s in e.free_symbols} - set(values)):
            raise Unknown(f"Its tiles depend on {', '.join(missing)}, which only a call knows.")
        lo, hi = (int(evaluate(e, values)) for e in bounds)
        if not 0 <= lo <= hi <= tiles:
            raise Unknown(f"Its loop over {loop.cls} tiles runs {lo} .. {hi} unless a call's inputs bound it.")
        found.append((lo, hi))
    return found


def _on_lists(blocks: Blocks) -> str:
    """A sentence on what decides which tiles of the ranges are visited."""
    if blocks.pattern:
        return f"Of these ranges, programs visit the tiles of blocks that {blocks.pattern} lists."
    if blocks.data:
        what = (
            f"the sample data, whose blocks of {blocks.size} by {blocks.size} scores hold something visible or do not"
        )
    else:
        what = (
            f"a sample of `block_mask=`, which keeps about 60% of the blocks of {blocks.size} by {blocks.size} scores"
        )
    return f"The ranges are static: all tiles but empty ones are in them. Which of them are visited follows {what}; pale ones are not."


def _keep_listed(
    blocks: Blocks, sample: Sample, n: int, kernel: Kernel, cells: list[list[str]], rows: tuple[int, int]
) -> None:
    """Mark the tiles of blocks that are not listed. If data lists blocks, tiles are full in blocks that are all
    visible, else partial."""
    counts = _pattern(blocks, -(-n // blocks.size)) if blocks.pattern else None
    if counts is None:
        counts = (
            sample.blocks(n, blocks.size)
            if blocks.data
            else [[int(x) for x in row] for row in sample.listed(n, blocks.size)]
        )
    for p, row in enumerate(cells):
        for j in range(len(row)):
            mine, theirs = p * rows[0] // blocks.size, j * rows[1] // blocks.size
            count = counts[mine][theirs] if kernel.program_axis == "q" else counts[theirs][mine]
            if row[j] == "empty" or not count:
                row[j] = "empty" if row[j] == "empty" or blocks.pattern else UNLISTED
            elif blocks.data:
                row[j] = "full" if count == blocks.size**2 else "partial"


def _pattern(blocks: Blocks, side: int) -> list[list[int]]:
    """Which blocks a pattern lists, computed by the function that a generated module has."""
    import torch

    declared = next(f for mask in registry().values() for f in mask.functions if f.__name__ == blocks.pattern)
    pattern = FunctionType(declared.__code__, {"torch": torch})  # in a generated module, it has nothing but torch
    found: list[list[int]] = pattern(side, side, torch.device("cpu"), **dict(blocks.params)).tolist()
    return found
