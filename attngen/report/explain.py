"""`attngen explain` as rich renderables: formulas, fit per device, traffic, roofline."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from attngen.cost.flops import executed_flops, total_tiles, useful_flops
from attngen.cost.io import dram_bytes, hbm_bytes, standard_bytes
from attngen.cost.memory import scratch
from attngen.cost.roofline import Problem, config_for, estimate, rows_of_call, standard_total
from attngen.cost.serving import call_flops, decoding, partial_result_bytes, read_bytes
from attngen.cost.split_d import split_d_costs
from attngen.devices import DEVICES
from attngen.heuristics import LISTED, SAMPLED_LENGTHS
from attngen.ir import Expr, Kernel, Module, launch, only, symbol, tile, to_text
from attngen.report.summary import kind, summary
from attngen.report.tables import Rows
from attngen.targets.registry import SPECIALIZERS, backend_of
from attngen.tiles.intervals import MaskContext
from attngen.tiles.ranges import inexact
from attngen.tiles.sampled import counted, samples
from attngen.tiles.tiles import tile_loops

NUMBERS = {
    *(
        ">= ms",
        "TFLOP",
        "HBM GB",
        "extra MB",
        "warps",
        "stages",
        "SRAM",
        "free",
        "GB load",
        "/std",
        "GB HBM",
        "ms",
    ),
    *(
        "bytes",
        "rows",
        "predicted",
        "reported",
        "registers",
        "spills",
        "code",
        "programs",
        "filling",
        "splits",
        "FLOP/B",
    ),
    *("MB K, V", "MB partial", "us", "tokens/s"),
}  # headings of numbers
ROOFLINE = """GB load: all that programs load and store; /std: over the bytes of standard attention, which keeps the
score matrix in HBM; GB HBM: bytes left if the device's cache holds what the programs in flight stream; bound, ms:
whether compute or memory bounds the time, and the time on the roofline."""
DECODING = """programs: number that the device holds at once; filling: splits of a sequence's keys with which they are
all busy (more only add bytes); splits: of a call, all of one length, so that longer sequences have more; MB partial:
partial outputs, which @decode stores and @combine reads; bound, us: whether compute or memory bounds the time, and
the time on the roofline."""
SHORT = 60  # characters of a condition that is shown
WIDTH = 120  # columns of a line at most, also where there is no terminal
MORE = """More: --kernels (memory, registers and compile report of each kernel), --formulas, --loops, --theory,
--json, and --html FILE for a page. `attngen bench` measures times on the GPU here."""
LEGEND = """>= ms: the time at least, by the roofline: a prediction, not measured; HBM: bytes of device memory that
move; extra: memory besides arguments and results"""
ELSEWHERE = "other NVIDIA: GPUs whose rates and caches are not known, so without figures"
DECODE = "decode: one query per sequence, with a KV cache of Nk keys"
KINDS = "Kernels are portable, in Triton, or warp-specialized for Hopper."


@dataclass(frozen=True)
class Line:
    """A line of text that is folded at spaces, to the width of the terminal; by default it is indented."""

    text: str
    style: str = ""
    indent: int = 2
    after: str = ""  # what comes before it, such as an empty line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        start, rest = " " * self.indent, " " * (3 * self.indent)
        width = min(WIDTH, options.max_width)
        yield Text(
            self.after
            + textwrap.fill(
                self.text,
                width,
                initial_indent=start,
                subsequent_indent=rest,
                break_long_words=False,
                break_on_hyphens=False,
            ),
            self.style,
        )


def heading(text: str) -> Line:
    """Return a line in bold, with an empty line before it."""
    return Line(text, "bold", 0, "\n")


def remark(text: str) -> Line:
    """Return a legend."""
    return Line(" ".join(text.split()), "dim", 0)


def explain(
    module: Module,
    problem: Problem,
    report: dict[str, Any],
    unspecialized: Iterable[str] = (),
    parts: Container[str] = (),
) -> Iterator[RenderableType]:
    """Yield what the analysis knows about a target module, for one problem size, the answers that users need first.

    report: its report.json, with compile reports.
    unspecialized: sentences on why kernels are not warp-specialized.
    parts: what to show in addition: `kernels`, `formulas` or `loops`.
    """
    known = summary(module, problem, unspecialized)
    dim = f"{module.head_dim_qk}/{module.head_dim_v}"
    yield Text(
        f"{module.name}: {module.mask}, {module.sharing}, head dim {dim}, {', '.join(module.dtypes)}", style="bold"
    )
    yield Line(_size(problem), indent=0)
    if module.chunk:
        chunks = f"Calls have chunks of {module.chunk} rows; figures are of a call with all of them"
        yield Line(f"{chunks}, where its rows, Rq and Rk, are those of the sequence, Nq and Nk.", indent=0)
    yield Text()
    yield call_table(known)
    yield remark(legend(known))
    if known["inputs_that_hide_nothing"]:
        names = ", ".join(f"`{name}`" for name in known["inputs_that_hide_nothing"])
        yield remark(f"Figures assume values of {names} that hide no key; a call in which they hide keys takes less.")
    yield from (Line(f"On {none['class']} @{none['kernel']}: {none['reason']}") for none in known["does_not_fit"])
    yield from kernel_table(known)
    yield from _conditions(module, "formulas" in parts)
    yield from map(Line, known["not_warp_specialized"])
    yield from map(Line, split_d_costs(module, problem))
    yield from tile_shares(module, problem)
    if module.splitting_kernel:
        yield from decode_costs(module, problem)
    if "kernels" in parts:
        yield heading(f"Each kernel on the roofline, for {_size(problem)}; portable kernels")
        yield device_table(module, problem)
        yield remark(ROOFLINE)
        yield heading("Fit: shared memory as predicted and as the compiler reports it; registers and spilled bytes")
        yield from fit_table(report)
    if "loops" in parts:
        yield from _tiles(module)
    if "formulas" in parts:
        yield from _formulas(module, problem)
    yield Text()
    yield remark(MORE)


def _size(problem: Problem) -> str:
    return f"B={problem.batch} Hq={problem.q_heads} Hkv={problem.kv_heads} Nq={problem.n_q} Nk={problem.n_kv}"


def call_table(known: dict[str, Any]) -> Rows:
    """Return a table of the calls of a module on each device: fit, least time, work, memory, kinds of kernels."""
    table = _table("device", "call", "fits", ">= ms", "TFLOP", "HBM GB", "extra MB", "kernels")
    for device in known["devices"]:
        name = f"{device['device']} {device['class']}" if device["device"] else "other NVIDIA"
        for call in device["calls"]:
            if call["call"] == "jvp":
                continue
            cells = [name, call["call"], "yes" if call["fits"] else "no"]
            if call["seconds_at_least"] is None:
                cells += [""] * 4
            else:
                numbers = 1e3 * call["seconds_at_least"], call["flops"] / 1e12, call["hbm_bytes"] / 1e9
                cells += [*map(_digits, numbers), f"{call['extra_bytes'] / 1e6:.0f}"]
            table.add_row(*cells, _kernels(call["kernels"]))
    return table


def legend(known: dict[str, Any]) -> str:
    """Return the legend of the table of calls, with a clause for each kind of row that needs one."""
    rows = [(device["device"], call["call"]) for device in known["devices"] for call in device["calls"]]
    clauses = [LEGEND]
    if any(name is None and call != "jvp" for name, call in rows):
        clauses.append(ELSEWHERE)
    if any(call == "decode" for _, call in rows):
        clauses.append(DECODE)
    return f"{'; '.join(clauses)}. {KINDS}"


def _digits(value: float) -> str:
    """Return a number with three digits, or as an integer."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _kernels(made: Sequence[dict[str, Any]]) -> str:
    """Return the kernels of a call with matrix products, after the kind of each."""
    kinds: dict[str, list[str]] = {}
    for kernel in made:
        if kernel["products"]:
            kinds.setdefault(kind(kernel["backend"]), []).append(kernel["kernel"])
    return ", ".join(f"{how} {' '.join(names)}" for how, names in kinds.items())


def kernel_table(known: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield a table of the kernels with matrix products: their tiles on each device class, by the rows of a call."""
    yield heading("Which kernel for which call: tiles of queries x keys by device class")
    classes = dict.fromkeys(made["class"] for made in known["kernels"])
    table = _table("kernel", *classes, names=1)
    for name in dict.fromkeys(made["for"] for made in known["kernels"]):
        cells = []
        for cls in classes:
            mine = [made for made in known["kernels"] if (made["for"], made["class"]) == (name, cls)]
            cells.append("\n".join(dict.fromkeys(map(_tile_of_range, mine))) or "-")
        table.add_row(name, *cells)
    yield table
    yield remark("<= and >: rows of the call, which are queries, or keys for dK and dV; without one: any number.")


def _tile_of_range(made: dict[str, Any]) -> str:
    """Return a tile, the kind of a warp-specialized kernel, and the rows of the calls that it is for."""
    how = "" if made["backend"] not in SPECIALIZERS else f" {kind(made['backend'])}"
    least = f" >{made['more_than']}" if made["more_than"] and made["at_most"] is None and how else ""
    most = f" <={made['at_most']}" if made["at_most"] is not None else ""
    return f"{made['tile']}{how}{least}{most}"


def _conditions(module: Module, in_full: bool) -> Iterator[Line]:
    """Yield the conditions under which calls launch other kernels; long ones only with `in_full`."""
    for host in module.hosts:
        scalars = {symbol(op.name): op.expr for op in only(host.ops(), tile.Map) if not op.type.dims}
        for op in host.ops():
            if isinstance(op, launch.If) and op.where != sympy.true and op.orelse:
                here, there = (", ".join(f"@{name}" for name in host.common_launches(b)) for b in (op.then, op.orelse))
                where = f"where {to_text(op.where.xreplace(scalars))}"
                if not in_full and len(where) > SHORT:
                    where = "in calls large enough for the device (--formulas has the condition)"
                if here and there:
                    yield Line(f"{host.name}: {here} {where}; otherwise {there}")


def _tiles(module: Module) -> Iterator[RenderableType]:
    """Yield the ranges of each loop over tiles, in closed form, and the masks."""
    yield heading(
        "\nTiles that the mask leaves (per program, from row q_start or kv_start on; j counts tiles along the loop)"
    )
    for kernel in module.kernels:
        for loop in tile_loops(kernel):
            ranges = ", ".join(f"{to_text(lo)} <= j < {to_text(hi)}" for lo, hi in loop.ranges)
            yield Line(f"@{kernel.name} {loop.cls}: {ranges}")
        positions = {op.name for op in only(kernel.ops(), tile.ListPosition)} if kernel.traits.places else set()
        for name, bound in bounds(kernel):
            found = f"tiles of the call before tile {to_text(bound)}" if str(name) in positions else to_text(bound)
            yield Line(f"  {name} = {found}")
        for op in kernel.ops():
            if isinstance(op, tile.Mask):
                yield Line(f"@{kernel.name} mask: {to_text(op.where)}")
        listed = module.blocks is not None and module.blocks.data and bool(kernel.traits.dots)
        for body in dict.fromkeys(loop.body for loop in tile_loops(kernel)):
            yield from (Line(f"@{kernel.name} not exact: {sentence}") for sentence in inexact(kernel, body, listed))


def _formulas(module: Module, problem: Problem) -> Iterator[RenderableType]:
    """Yield closed forms of FLOPs, bytes, shared memory and scratch memory."""
    yield heading("Formulas")
    for direction in module.directions:
        yield Line(f"{direction} FLOPs = {to_text(useful_flops(module, direction))}")
        yield Line(f"{direction} bytes of standard attention = {to_text(standard_bytes(direction))}")
    for kernel in module.kernels:
        config = config_for(module, kernel, DEVICES["H100"], rows_of_call(kernel, problem))
        if tile_loops(kernel):
            yield Line(f"@{kernel.name} tiles = {total_tiles(kernel)}")
            yield Line(f"@{kernel.name} FLOPs = {to_text(executed_flops(kernel))}")
        yield Line(f"@{kernel.name} bytes loaded and stored = {to_text(hbm_bytes(kernel))}")
        moved = dram_bytes(kernel)
        yield Line(f"@{kernel.name} HBM bytes = {to_text(moved.read)} read, {to_text(moved.written)} written")
        if config:
            formula = backend_of(config).resources.formula(module, kernel, config)
            yield Line(f"@{kernel.name} SRAM bytes (H100) = {to_text(formula)}")
    for part in scratch(module):
        condition = "" if part.where == sympy.true else f", where {to_text(part.where)}"
        yield Line(
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
    yield heading(f"Tiles visited of {tiles}, counted in a sample of rows (partial tiles in brackets)")
    visits = "block lists" if module.blocks is not None and module.blocks.data else "bounds"
    for context, rows in ((MaskContext("q", "kv"), "queries"), (MaskContext("kv", "q"), "keys")):
        found = counted(where, context, n)
        bounded, bounded_partial, listed, listed_partial = (f"{x / found.all:.1%}" for x in found[1:])
        yield Line(
            f"program tiles of {rows}: {bounded} ({bounded_partial}) by the formula's bounds, "
            f"{listed} ({listed_partial}) by block lists; used: {visits}"
        )


def decode_costs(module: Module, problem: Problem) -> Iterator[RenderableType]:
    """Yield the costs of one query per head with a KV cache: closed forms, and one line per device."""
    size = f"B={problem.batch} Hq={problem.q_heads} Hkv={problem.kv_heads}, {problem.n_kv} keys"
    yield heading(f"Decoding one token of each sequence, for {size}")
    yield Line(f"@decode bytes of K and V, a sequence = {to_text(read_bytes(module))}")
    yield Line(f"@decode, @combine bytes of partial outputs, a sequence = {to_text(partial_result_bytes())}")
    yield Line(f"@decode FLOPs, a sequence = {to_text(call_flops(module))}")
    table = _table(
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
    yield remark(DECODING)


def fit_table(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield predictions for each kernel on each target, next to the compiler's numbers, and sentences on why no tile
    fits."""
    table = _table(
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
    )
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
    yield from (Line(reason) for reason in none)
    if not verified:
        yield Line("Nothing is reported: `attngen verify --write` was not run on these kernels.")


def bounds(kernel: Kernel) -> list[tuple[Expr, Expr]]:
    """Return the named scalars that bound the loops over tiles, as (name, closed form); each may use earlier ones."""
    used = {s for loop in tile_loops(kernel) for pair in loop.ranges for bound in pair for s in bound.free_symbols}
    for name, value in reversed(kernel.traits.named):
        if name in used:
            used |= value.free_symbols
    return [(name, value) for name, value in kernel.traits.named if name in used]


def device_table(module: Module, problem: Problem) -> Rows:
    """Return a table with one line per device and kernel."""
    table = _table(
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


def _table(*headings: str, names: int = 2, folds: Collection[str] = ()) -> Rows:
    """Return a table whose columns of numbers are aligned to the right."""
    return Rows(*headings, names=names, folds=folds, numbers=NUMBERS)
