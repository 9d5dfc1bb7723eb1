"""Maps of the tiles of a small score matrix that each program of a kernel visits, for the page: those of the kernels
that a call launches on DRAWN_ON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType

import sympy

from attngen.cost.calls import Range, chosen, ranges
from attngen.cost.roofline import Problem, config_of, rows_of_call
from attngen.devices import CLASSES, DEVICES
from attngen.ir import Blocks, Config, Expr, Kernel, Module, tile
from attngen.ir.split_axes import ranges as shared_ranges
from attngen.masks import registry
from attngen.report.charts import UNLISTED, Drawing, tile_map
from attngen.report.elements import Sample
from attngen.report.launches import launches
from attngen.tiles.tiles import evaluate, tile_loops, unbounded

DRAWN_ON = DEVICES["H100"]  # whose kernels and tiles are drawn, if they fit there
LEAST = 1024  # fewest rows of a map
FEWEST, MOST = 10, 64  # tiles along its side
FIRST = {"b": 0, "h": 0, "hkv": 0}  # the sequence and the head to draw, if the mask depends on them


class Unknown(Exception):
    """Raised for tiles that cannot be drawn, with the reason as a sentence."""


@dataclass(frozen=True)
class TileMap:
    """The tiles that each program of a kernel visits, for n queries and n keys."""

    made: Range
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
        """Rows of a tile on the program axis and on the other axis."""
        return (self.block_q, self.block_kv) if self.own == "q" else (self.block_kv, self.block_q)

    @property
    def title(self) -> str:
        """The kernel, its implementation and its tile, such as `@fwd (Hopper, 128 × 128)`."""
        kernel, config = self.made.kernel, self.made.config
        implementation = kernel.backend.title() or "portable"
        return f"@{kernel.name} ({implementation}, {config.block_q} × {config.block_kv})"

    @property
    def drawing(self) -> Drawing:
        return tile_map(f"@{self.made.kernel.name}", self.cells, self.own, self.n, self.blocks)

    def count(self, cls: str) -> int:
        """Return the number of tiles of a class, for one head."""
        return sum(row.count(cls) for row in self.cells)

    @property
    def counts(self) -> str:
        """Numbers of tiles of each class, as text."""
        return ", ".join(
            f"{self.count(cls)} {cls}"
            for cls in ("full", "partial", UNLISTED, "empty")
            if self.count(cls) or cls != UNLISTED
        )

    def programs(self) -> Iterator[list[str]]:
        """Yield rows of a table: the program, the rows of its tile, the ranges of its loops, the number of tiles that
        it visits."""
        block = self.blocks[0]
        for p, (row, spans) in enumerate(zip(self.cells, self.ranges)):
            rows = f"{p * block} .. {min(self.n, (p + 1) * block)}"
            yield [str(p), rows, *spans, str(len(row) - row.count("empty") - row.count(UNLISTED))]


def portable_config(module: Module, kernel: Kernel, cls: str, problem: Problem) -> Config | None:
    """Return the config of a portable kernel on a device class for a problem size; None if no tile fits."""
    return config_of(module, kernel, cls, rows_of_call(kernel, problem))


def configs_on(module: Module, kernel: Kernel, cls: str, problem: Problem) -> list[tuple[Kernel, Config]]:
    """Return the portable kernel and its warp-specialized variant that calls of a size run on a device class, each with
    its config.

    If both exist, calls with few rows run the first one.
    """
    portable = portable_config(module, kernel, cls, problem)
    rows = problem.n_q if kernel.program_axis == "q" else problem.n_kv
    others = [
        (k, config) for k, config in module.stand_ins(kernel.name) if config.device == cls and rows > config.min_rows
    ]
    return [*([(kernel, portable)] if portable else []), *others[-1:]]


def tile_maps(sample: Sample, module: Module, problem: Problem) -> list[tuple[str, TileMap | str]]:
    """Return the kernels with loops over tiles that a call launches on DRAWN_ON, each with its map or the reason why it
    has none.

    Kernels with pack-GQA, whose tile has few queries of many heads, are left out. `sample` decides which blocks are
    visible if a call's data does.
    """
    return [(kernel.name, _map(sample, module, kernel, problem)) for kernel in _drawn(module, problem)]


def _drawn(module: Module, problem: Problem) -> Iterator[Kernel]:
    """Yield the kernels to draw: those that a call launches on DRAWN_ON, those that run before the others, and those of
    which no tile fits there."""
    cls = DRAWN_ON.cls
    launched = {one.kernel.stands_for for one in launches(module, cls) if one.covers(problem, DRAWN_ON)}
    for kernel in (k for k in module.kernels if tile_loops(k) and not k.pack_gqa):
        replaced = kernel.traits.dots and (kernel.traits.adds_in_order or ranges(module, kernel, cls))
        if kernel.name in launched or not replaced:
            yield kernel


def _map(sample: Sample, module: Module, kernel: Kernel, problem: Problem) -> TileMap | str:
    rows = rows_of_call(kernel, problem)
    made = next((r for cls in (DRAWN_ON.cls, *CLASSES) if (r := chosen(module, kernel, cls, rows))), None)
    if made is None:
        return "No tile fits any device."
    try:
        return draw_tiles(sample, module, kernel, made, min(problem.n_q, problem.n_kv))
    except Unknown as reason:
        return str(reason)


def draw_tiles(sample: Sample, module: Module, kernel: Kernel, made: Range, most: int) -> TileMap:
    """Return the map of the tiles that `made` visits, which runs for a kernel, for at most `most` rows; raise Unknown
    if its tiles depend on a call's arguments.

    A warp-specialized kernel visits the tiles of the portable kernel that it stands in for, at its own tile size.
    """
    config = made.config
    n, block_q, block_kv = _small(module, kernel, config, most)
    sizes = {"Nq": n, "Nk": n, "BLOCK_Q": block_q, "BLOCK_KV": block_kv}
    remarks = [
        f"Tiles of {block_q} queries by {block_kv} keys"
        + (f", as on {config.device}." if block_q == config.block_q else ".")
    ]
    if block_q != config.block_q:
        remarks.append(f"On {config.device} they are {config.block_q} by {config.block_kv}: too small to draw.")
    if made.least >= n:
        remarks.append(f"Only calls of more than {made.least:,} rows run it.")
    used = {str(s) for e in _bounds(kernel) for s in e.free_symbols}
    if used & FIRST.keys():
        remarks.append("Drawn for the first head of the first sequence; others differ.")
    if given := sorted(used & unbounded(kernel).keys() - sizes.keys()):
        remarks.append(f"Drawn for a call that hides nothing by {', '.join(given)}; others visit fewer tiles.")
    own, other = (block_q, block_kv) if kernel.program_axis == "q" else (block_kv, block_q)
    cells: list[list[str]] = []
    listed: list[list[str]] = []
    for start in range(0, n, own):
        values = {**FIRST, **unbounded(kernel), **sizes, f"{kernel.program_axis}_start": start}
        cells.append(["empty"] * -(-n // other))
        listed.append([])
        for loop in tile_loops(kernel):
            spans = _spans(kernel, loop, values, len(cells[-1]))
            for lo, hi in spans:
                cells[-1][lo:hi] = [loop.cls] * (hi - lo)
            listed[-1].append(", ".join(f"{lo} .. {hi}" for lo, hi in spans if lo < hi) or "none")
    if module.blocks and any(loop.listed for loop in tile_loops(kernel)):
        _keep_listed(module.blocks, sample, n, kernel, cells, (own, other))
        remarks.append(_on_lists(module.blocks))
    elif module.blocks:
        remarks.append(
            "It finds the visible blocks of scores, before the other kernels run: it visits all that the mask's bounds "
            "leave."
        )
    headings = [loop.cls for loop in tile_loops(kernel)]
    return TileMap(made, kernel.program_axis, n, block_q, block_kv, remarks, headings, cells, listed)


def _bounds(kernel: Kernel) -> list[Expr]:
    """Return the bounds of the loops over tiles, with named scalars inlined; for loops that programs split, the bounds
    of the whole loop."""
    return [e for loop in tile_loops(kernel) for pair in shared_ranges(kernel, loop) for e in pair]


def _small(module: Module, kernel: Kernel, config: Config, most: int) -> tuple[int, int, int]:
    """Return (rows, BLOCK_Q, BLOCK_KV) of a map: enough rows to show the mask, at most `most`; tiles of `config`,
    doubled if there are too many."""
    block = module.blocks.size if module.blocks else None
    reach = max((2 * abs(int(i)) for e in _bounds(kernel) for i in e.atoms(sympy.Integer)), default=0)
    enough = max(reach, FEWEST * max(config.block_q, config.block_kv))
    if block:
        enough = min(MOST * block, max(16 * block, enough))
    n = LEAST
    while n < enough:
        n *= 2
    n = min(n, most)
    block_q, block_kv = config.block_q, config.block_kv
    while n > MOST * min(block_q, block_kv) and (block is None or 2 * max(block_q, block_kv) <= block):
        block_q, block_kv = 2 * block_q, 2 * block_kv
    return n, block_q, block_kv


def _spans(kernel: Kernel, loop: tile.Loop, values: dict[str, int], tiles: int) -> list[tuple[int, int]]:
    """Return the ranges of a loop for one program, within `tiles` tiles; raise Unknown, with the reason, if they are
    unknown."""
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
    """Return a sentence on the lists or data that decide which tiles of the ranges are visited."""
    if blocks.pattern:
        return f"Of these ranges, programs visit the tiles of blocks that {blocks.pattern} lists."
    size = f"{blocks.size} by {blocks.size}"
    if blocks.data:
        source = f"the sample data, whose blocks of {size} scores hold something visible or do not"
    else:
        source = f"a sample of `block_mask=`, which keeps about 60% of the blocks of {size} scores"
    return (
        f"The ranges are static: all tiles except empty ones are in them. Which of them are visited follows {source}; "
        "pale ones are not."
    )


def _keep_listed(
    blocks: Blocks, sample: Sample, n: int, kernel: Kernel, cells: list[list[str]], rows: tuple[int, int]
) -> None:
    """Mark the tiles of blocks that are not listed. If blocks are listed from data, tiles are full in blocks without
    hidden elements, else partial."""
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
    """Return which blocks a pattern lists, computed by the function that a generated module has."""
    import torch

    declared = next(f for mask in registry().values() for f in mask.functions if f.__name__ == blocks.pattern)
    pattern = FunctionType(declared.__code__, {"torch": torch})  # as in a generated module, its only global is torch
    found: list[list[int]] = pattern(side, side, torch.device("cpu"), **dict(blocks.params)).tolist()
    return found
