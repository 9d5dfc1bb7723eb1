"""`attngen explain` as rich renderables: formulas, fit per device, traffic, roofline."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import sympy
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from attngen.cost.columns import parts_of_columns
from attngen.cost.flops import executed_flops, total_tiles, useful_flops
from attngen.cost.io import dram_bytes, hbm_bytes, standard_bytes
from attngen.cost.memory import scratch
from attngen.cost.roofline import Problem, estimate, row_for, scheduled_rows, standard_total
from attngen.cost.serving import call_flops, decoding, joined_bytes, read_bytes
from attngen.devices import DEVICES
from attngen.heuristics import LISTED, SAMPLED_LENGTHS
from attngen.ir.expr import Expr, to_text
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Mask
from attngen.targets.registry import backend_of
from attngen.tiles.intervals import Scene
from attngen.tiles.ranges import inexact
from attngen.tiles.sampled import counted, samples
from attngen.tiles.tiles import tile_loops

FOLDED = textwrap.TextWrapper(
    120, initial_indent="  ", subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
)


def explain(
    module: Module, problem: Problem, report: dict[str, Any], unspecialized: Iterable[str] = ()
) -> Iterator[RenderableType]:
    """Everything that the analysis knows of a target module, for one problem size.

    report: its report.json, with compiler readings. undivided: sentences on why backends divide none of its kernels.
    """
    yield Text(
        f"{module.name}: {module.mask}, {module.sharing}, head dim {module.head_dim_qk}/{module.head_dim_v}",
        style="bold",
    )
    yield Text(
        "\nTiles that the mask leaves (per program, from row q_start or kv_start on; j counts tiles along the loop)",
        style="bold",
    )
    for kernel in module.kernels:
        for loop in tile_loops(kernel):
            ranges = ", ".join(f"{to_text(lo)} <= j < {to_text(hi)}" for lo, hi in loop.ranges)
            yield _line(f"@{kernel.name} {loop.cls}: {ranges}")
        for name, bound in bounds(kernel):
            yield _line(f"  {name} = {to_text(bound)}")
        for op in kernel.ops():
            if isinstance(op, Mask):
                yield _line(f"@{kernel.name} mask: {to_text(op.where)}")
        listed = module.blocks is not None and module.blocks.data and bool(kernel.dots)
        for body in dict.fromkeys(loop.body for loop in tile_loops(kernel)):
            yield from (_line(f"@{kernel.name} not exact: {sentence}") for sentence in inexact(kernel, body, listed))
    yield from tile_shares(module, problem)
    yield Text("\nFormulas", style="bold")
    for direction in module.directions:
        yield _line(f"{direction} FLOPs = {to_text(useful_flops(module, direction))}")
        yield _line(f"{direction} bytes of standard attention = {to_text(standard_bytes(direction))}")
    for kernel in module.kernels:
        row = row_for(module, kernel, DEVICES["H100"], scheduled_rows(kernel, problem))
        if tile_loops(kernel):
            yield _line(f"@{kernel.name} tiles = {total_tiles(kernel)}")
            yield _line(f"@{kernel.name} FLOPs = {to_text(executed_flops(kernel))}")
        yield _line(f"@{kernel.name} bytes loaded and stored = {to_text(hbm_bytes(kernel))}")
        moved = dram_bytes(kernel)
        yield _line(f"@{kernel.name} HBM bytes = {to_text(moved.read)} read, {to_text(moved.written)} written")
        if row:
            yield _line(
                f"@{kernel.name} SRAM bytes (H100) = {to_text(backend_of(row).resources.formula(module, kernel, row))}"
            )
    for part in scratch(module):
        condition = "" if part.where == sympy.true else f", where {to_text(part.where)}"
        yield _line(
            f"@{part.host} in @{part.block}: bytes beside results = {to_text(part.bytes)}, of {', '.join(part.tensors)}{condition}"
        )
    size = f"B={problem.batch} Hq={problem.q_heads} Hkv={problem.kv_heads} Nq={problem.n_q} Nk={problem.n_kv}"
    yield Text(f"\nPer device, for {size}", style="bold")
    yield device_table(module, problem)
    yield Text(
        "GB load: all that programs load and store; /std: over the bytes of standard attention, which keeps the score matrix\n"
        "in HBM; GB HBM: what is left where the device's cache holds what the programs in flight stream; ms: the roof that binds.",
        style="dim",
    )
    yield from map(_line, parts_of_columns(module, problem))
    if module.dealing:
        yield from over_cache(module, problem)
    yield Text(
        "\nFit: shared memory as predicted and as the compiler reports it; registers and spilled bytes of a thread",
        style="bold",
    )
    yield from fit_table(report)
    yield from map(_line, unspecialized)


def tile_shares(module: Module, problem: Problem) -> Iterator[RenderableType]:
    """Which share of the tiles bounds leave, and which lists of blocks would, where the mask is a formula of
    positions and lengths."""
    where = module.meaning.where
    if not samples(where):
        return
    n = min(-(-problem.n_kv // LISTED) * LISTED, SAMPLED_LENGTHS[-1])
    yield Text(
        f"\nTiles visited of {n} x {n}, in {LISTED} x {LISTED}, counted in a sample of rows (those that are masked)",
        style="bold",
    )
    visits = "lists" if module.blocks is not None and module.blocks.data else "bounds"
    for scene, own in ((Scene("q", "kv"), "queries"), (Scene("kv", "q"), "keys")):
        found = counted(where, scene, n)
        bounded, cut, listed, listed_cut = (f"{x / found.all:.1%}" for x in found[1:])
        yield _line(
            f"programs that own {own}: bounds leave {bounded} ({cut}), lists {listed} ({listed_cut}); kernels visit what {visits} leave"
        )


def over_cache(module: Module, problem: Problem) -> Iterator[RenderableType]:
    """What one query of each head costs over a cache: closed forms, and a line per device."""
    size = f"B={problem.batch} Hq={problem.q_heads} Hkv={problem.kv_heads}, {problem.n_kv} keys"
    yield Text(f"\nA token of each sequence over the cache, for {size}", style="bold")
    yield _line(f"@decode bytes of K and V, a sequence = {to_text(read_bytes(module))}")
    yield _line(f"@decode, @combine bytes of parts, a sequence = {to_text(joined_bytes())}")
    yield _line(f"@decode FLOPs, a sequence = {to_text(call_flops(module))}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = (
        "device",
        "tile",
        "programs",
        "filling",
        "parts",
        "MB K, V",
        "MB parts",
        "FLOP/B",
        "roof",
        "us",
        "tokens/s",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("device", "tile", "roof") else "right", no_wrap=True)
    for device in DEVICES.values():
        found = decoding(module, device, problem)
        if found is None:
            table.add_row(device.name, "none")
            continue
        row = found.config
        table.add_row(
            device.name,
            f"{row.block_q}x{row.block_kv}x{row.num_warps}x{row.num_stages}",
            f"{found.programs}",
            f"{found.filling}",
            f"{found.parts}",
            f"{found.read / 1e6:.1f}",
            f"{found.joined / 1e6:.2f}",
            f"{found.flops / found.moved:.1f}",
            found.binds,
            f"{found.seconds * 1e6:.1f}",
            f"{problem.batch / found.seconds:,.0f}",
        )
    yield table
    yield Text(
        "programs: those that the device holds at once; filling: parts of a sequence's keys with which they are all busy, and more only\n"
        "add bytes of parts; parts: those that a call has: of one length, and longer sequences have more; us: at the roof that binds.",
        style="dim",
    )


def fit_table(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Predictions for each kernel on each target, beside what the compiler reported; sentences below say why no tile
    fits."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (
        "kernel",
        "target",
        "bytes",
        "rows",
        "tile",
        "predicted",
        "reported",
        "registers",
        "spills",
        "code",
    ):
        table.add_column(heading, justify="left" if heading in ("kernel", "target", "tile") else "right", no_wrap=True)
    none, verified = [], False
    for name, kernel in report["kernels"].items():
        for row in kernel["schedules"]:
            if "none" in row:
                table.add_row(name, row["device"], f"{row['elem_bytes']}", "", "none")
                none.append(row["none"])
                continue
            columns = f"/{row['columns']}" if "columns" in row else ""
            tile = f"{row['block_q']}x{row['block_kv']}{columns}x{row['num_warps']}x{row['num_stages']}"
            tile += " measured" * row.get("measured", False) + f" {row.get('backend', '')}".rstrip()
            limits = ((">", row.get("min_rows")), ("<=", row["max_rows"]))
            rows, reading = " ".join(f"{sign}{limit}" for sign, limit in limits if limit), row["reading"] or {}
            read = (reading.get(key) for key in ("shared_bytes", "registers", "spilled_bytes", "code_bytes"))
            verified |= bool(reading)
            cells = ("" if n is None else f"{n:,}" for n in read)
            table.add_row(
                name, row["device"], f"{row['elem_bytes']}", rows or "any", tile, f"{row['sram_bytes']:,}", *cells
            )
            if row.get("backend") and reading.get("states"):
                none.append(
                    f"On {row['device']} the kernel @{name} with {tile} gets no certificate: it {reading['states']}."
                )
    yield table
    yield from (_line(reason) for reason in none)
    if not verified:
        yield _line("Nothing is reported: `attngen verify --write` was not run on these kernels.")


def bounds(kernel: Kernel) -> list[tuple[Expr, Expr]]:
    """The named scalars that bound the loops over tiles, as (name, closed form); each may use those before it."""
    used = {s for loop in tile_loops(kernel) for pair in loop.ranges for bound in pair for s in bound.free_symbols}
    for name, value in reversed(kernel.named):
        if name in used:
            used |= value.free_symbols
    return [(name, value) for name, value in kernel.named if name in used]


def _line(text: str) -> Text:
    """A line, indented, and folded at spaces if it has more than 120 characters."""
    return Text(FOLDED.fill(text))


def device_table(module: Module, problem: Problem) -> Table:
    """One line per device and kernel."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = (
        "device",
        "kernel",
        "tile",
        "warps",
        "stages",
        "SRAM",
        "free",
        "TFLOP",
        "GB load",
        "/std",
        "GB HBM",
        "FLOP/B",
        "roof",
        "ms",
    )
    for heading in headings:
        table.add_column(
            heading, justify="left" if heading in ("device", "kernel", "tile", "roof") else "right", no_wrap=True
        )
    for device in DEVICES.values():
        for direction in (*module.directions, "jvp"):
            for kernel in module.kernels_of(direction):
                e = estimate(module, kernel, device, problem)
                if e is None:
                    table.add_row(device.name, kernel.name, "none")
                    continue
                standard = (
                    standard_total(module, direction, e.config, problem) if direction in module.directions else None
                )
                table.add_row(
                    device.name,
                    kernel.name,
                    e.config.tile,
                    str(e.config.num_warps),
                    str(e.config.num_stages),
                    f"{e.sram / 1024:.0f}K",
                    f"{100 * (1 - e.sram / e.limit):.0f}%",
                    f"{e.flops / 1e12:.2f}",
                    f"{e.loaded / 1e9:.2f}",
                    f"{e.loaded / standard:.2f}" if standard else "-",
                    f"{e.bytes / 1e9:.2f}",
                    f"{e.intensity:.0f}",
                    e.binds,
                    f"{e.seconds * 1e3:.2f}",
                )
    return table
