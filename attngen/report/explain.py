"""`attngen explain` as rich renderables: formulas, fit per device, traffic, roofline."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import sympy
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from attngen.cost.flops import executed_flops, total_tiles, useful_flops
from attngen.cost.io import dram_bytes, hbm_bytes, standard_bytes
from attngen.cost.memory import scratch
from attngen.cost.roofline import Problem, config_for, estimate, rows_of_call, standard_total
from attngen.cost.serving import call_flops, decoding, partial_result_bytes, read_bytes
from attngen.cost.split_d import split_d_costs
from attngen.devices import DEVICES
from attngen.heuristics import LISTED, SAMPLED_LENGTHS
from attngen.ir.expr import Expr
from attngen.ir.expr_text import to_text
from attngen.ir.kernel import Kernel
from attngen.ir.module import Module
from attngen.ir.ops import Mask
from attngen.targets.registry import backend_of
from attngen.tiles.intervals import MaskContext
from attngen.tiles.ranges import inexact
from attngen.tiles.sampled import counted, samples
from attngen.tiles.tiles import tile_loops

FOLDED = textwrap.TextWrapper(
    120, initial_indent="  ", subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
)


def explain(
    module: Module, problem: Problem, report: dict[str, Any], unspecialized: Iterable[str] = ()
) -> Iterator[RenderableType]:
    """Yield everything that the analysis knows about a target module, for one problem size.

    report: its report.json, with compile reports.
    unspecialized: sentences on why kernels are not warp-specialized.
    """
    yield Text(
        f"{module.name}: {module.mask}, {module.sharing}, head dim {module.head_dim_qk}/{module.head_dim_v}",
        style="bold",
    )
    yield from _tiles(module)
    yield from tile_shares(module, problem)
    yield from _formulas(module, problem)
    size = f"B={problem.batch} Hq={problem.q_heads} Hkv={problem.kv_heads} Nq={problem.n_q} Nk={problem.n_kv}"
    yield Text(f"\nPer device, for {size}", style="bold")
    yield device_table(module, problem)
    yield Text(
        "GB load: all that programs load and store; /std: over the bytes of standard attention, which keeps the score\n"
        "matrix in HBM; GB HBM: bytes left if the device's cache holds what the programs in flight stream; bound, ms:\n"
        "whether compute or memory bounds the time, and the time on the roofline.",
        style="dim",
    )
    yield from map(_line, split_d_costs(module, problem))
    if module.splitting_kernel:
        yield from decode_costs(module, problem)
    yield Text(
        "\nFit: shared memory as predicted and as the compiler reports it; registers and spilled bytes of a thread",
        style="bold",
    )
    yield from fit_table(report)
    yield from map(_line, unspecialized)


def _tiles(module: Module) -> Iterator[RenderableType]:
    """Yield the ranges of each loop over tiles, in closed form, and the masks."""
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


def _formulas(module: Module, problem: Problem) -> Iterator[RenderableType]:
    """Yield closed forms of FLOPs, bytes, shared memory and scratch memory."""
    yield Text("\nFormulas", style="bold")
    for direction in module.directions:
        yield _line(f"{direction} FLOPs = {to_text(useful_flops(module, direction))}")
        yield _line(f"{direction} bytes of standard attention = {to_text(standard_bytes(direction))}")
    for kernel in module.kernels:
        config = config_for(module, kernel, DEVICES["H100"], rows_of_call(kernel, problem))
        if tile_loops(kernel):
            yield _line(f"@{kernel.name} tiles = {total_tiles(kernel)}")
            yield _line(f"@{kernel.name} FLOPs = {to_text(executed_flops(kernel))}")
        yield _line(f"@{kernel.name} bytes loaded and stored = {to_text(hbm_bytes(kernel))}")
        moved = dram_bytes(kernel)
        yield _line(f"@{kernel.name} HBM bytes = {to_text(moved.read)} read, {to_text(moved.written)} written")
        if config:
            formula = backend_of(config).resources.formula(module, kernel, config)
            yield _line(f"@{kernel.name} SRAM bytes (H100) = {to_text(formula)}")
    for part in scratch(module):
        condition = "" if part.where == sympy.true else f", where {to_text(part.where)}"
        yield _line(
            f"@{part.host} in @{part.block}: scratch bytes = {to_text(part.bytes)}, of "
            f"{', '.join(part.tensors)}{condition}"
        )


def tile_shares(module: Module, problem: Problem) -> Iterator[RenderableType]:
    """Yield the shares of tiles inside the bounds and in block lists, if the mask is a formula of positions and
    lengths."""
    where = module.meaning.where
    if not samples(where):
        return
    n = min(-(-problem.n_kv // LISTED) * LISTED, SAMPLED_LENGTHS[-1])
    tiles = f"{n} x {n}, in {LISTED} x {LISTED}"
    yield Text(f"\nTiles visited of {tiles}, counted in a sample of rows (partial tiles in brackets)", style="bold")
    visits = "lists" if module.blocks is not None and module.blocks.data else "bounds"
    for context, rows in ((MaskContext("q", "kv"), "queries"), (MaskContext("kv", "q"), "keys")):
        found = counted(where, context, n)
        bounded, bounded_partial, listed, listed_partial = (f"{x / found.all:.1%}" for x in found[1:])
        yield _line(
            f"program tiles of {rows}: bounds leave {bounded} ({bounded_partial}), lists {listed} ({listed_partial}); "
            f"kernels visit what {visits} leave"
        )


def decode_costs(module: Module, problem: Problem) -> Iterator[RenderableType]:
    """Yield the costs of one query per head with a KV cache: closed forms, and one line per device."""
    size = f"B={problem.batch} Hq={problem.q_heads} Hkv={problem.kv_heads}, {problem.n_kv} keys"
    yield Text(f"\nDecoding one token of each sequence, for {size}", style="bold")
    yield _line(f"@decode bytes of K and V, a sequence = {to_text(read_bytes(module))}")
    yield _line(f"@decode, @combine bytes of partial outputs, a sequence = {to_text(partial_result_bytes())}")
    yield _line(f"@decode FLOPs, a sequence = {to_text(call_flops(module))}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = (
        "device",
        "tile",
        "programs",
        "filling",
        "splits",
        "MB K, V",
        "MB partial",
        "FLOP/B",
        "bound",
        "us",
        "tokens/s",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("device", "tile", "bound") else "right", no_wrap=True)
    for device in DEVICES.values():
        found = decoding(module, device, problem)
        if found is None:
            table.add_row(device.name, "none")
            continue
        config = found.config
        table.add_row(
            device.name,
            f"{config.block_q}x{config.block_kv}x{config.num_warps}x{config.num_stages}",
            f"{found.programs}",
            f"{found.splits_to_fill}",
            f"{found.splits}",
            f"{found.read / 1e6:.1f}",
            f"{found.partials / 1e6:.2f}",
            f"{found.flops / found.moved:.1f}",
            found.binds,
            f"{found.seconds * 1e6:.1f}",
            f"{problem.batch / found.seconds:,.0f}",
        )
    yield table
    yield Text(
        "programs: number that the device holds at once; filling: splits of a sequence's keys with which they are all\n"
        "busy (more only add bytes); splits: of a call, all of one length, so that longer sequences have more; MB\n"
        "partial: partial outputs, which @decode stores and @combine reads; bound, us: whether compute or memory\n"
        "bounds the time, and the time on the roofline.",
        style="dim",
    )


def fit_table(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield predictions for each kernel on each target, next to the compiler's numbers, and sentences on why no tile
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
            rows, reported = " ".join(f"{sign}{limit}" for sign, limit in limits if limit), row["reading"] or {}
            numbers = (reported.get(key) for key in ("shared_bytes", "registers", "spilled_bytes", "code_bytes"))
            verified |= bool(reported)
            cells = ("" if n is None else f"{n:,}" for n in numbers)
            table.add_row(
                name, row["device"], f"{row['elem_bytes']}", rows or "any", tile, f"{row['sram_bytes']:,}", *cells
            )
            if row.get("backend") and reported.get("states"):
                none.append(
                    f"On {row['device']} the kernel @{name} with {tile} gets no certificate: it {reported['states']}."
                )
    yield table
    yield from (_line(reason) for reason in none)
    if not verified:
        yield _line("Nothing is reported: `attngen verify --write` was not run on these kernels.")


def bounds(kernel: Kernel) -> list[tuple[Expr, Expr]]:
    """Return the named scalars that bound the loops over tiles, as (name, closed form); each may use earlier ones."""
    used = {s for loop in tile_loops(kernel) for pair in loop.ranges for bound in pair for s in bound.free_symbols}
    for name, value in reversed(kernel.named):
        if name in used:
            used |= value.free_symbols
    return [(name, value) for name, value in kernel.named if name in used]


def _line(text: str) -> Text:
    """Return an indented line, folded at spaces if it has more than 120 characters."""
    return Text(FOLDED.fill(text))


def device_table(module: Module, problem: Problem) -> Table:
    """Return a table with one line per device and kernel."""
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
        "bound",
        "ms",
    )
    for heading in headings:
        table.add_column(
            heading, justify="left" if heading in ("device", "kernel", "tile", "bound") else "right", no_wrap=True
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
