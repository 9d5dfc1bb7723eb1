"""`attngen explain --html`: everything that the compiler knows about a spec, as one HTML page that loads no other
files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import yaml
from markupsafe import Markup

from attngen.codegen.signature import signatures
from attngen.cost.flops import executed_flops, useful_flops
from attngen.cost.io import compulsory_bytes, hbm_bytes, standard_bytes
from attngen.cost.report import schedule
from attngen.cost.roofline import Estimate, Problem, estimate, standard_total
from attngen.cost.split_d import split_d_costs
from attngen.devices import CLASSES, DEVICES, Device
from attngen.errors import AttngenError
from attngen.ir.expr import INEQUALITIES, Bool, Expr, symbol
from attngen.ir.expr_text import to_text
from attngen.ir.host import If, Launch
from attngen.ir.kernel import Kernel
from attngen.ir.module import Module
from attngen.ir.ops import ListPosition, Map, Mask
from attngen.ir.split_axes import whole_range
from attngen.lowering.pipeline import unspecialized
from attngen.report.charts import NARROW, UNLISTED, Bar, Drawing, Point, bars, roofline
from attngen.report.elements import Sample
from attngen.report.environment import environment as environment
from attngen.report.explain import bounds
from attngen.report.lanes import lanes
from attngen.report.listing import changes, highlight
from attngen.report.mathml import SYMBOLS, MathML
from attngen.report.tilemap import TileMap, chosen, configs_on, tile_maps
from attngen.spec import Spec
from attngen.targets.registry import SPECIALIZERS, backend_of
from attngen.tiles.tiles import extent, heads, tile_loops

KV = symbol("kv_idx")
SEES = "query q sees key k"  # the label of a mask's formula
TIGHT = 0.9  # share of a device's shared memory from which on bars have another colour


def check_path(path: Path) -> None:
    """Raise AttngenError, in one sentence, if no page can be written to the path."""
    if path.suffix not in (".html", ".htm"):
        raise AttngenError(f"--html {path}: expected a name that ends in .html")
    if path.is_dir():
        raise AttngenError(f"--html {path}: is a folder; expected the name of a file")
    if not path.parent.is_dir():
        raise AttngenError(f"--html {path}: there is no folder {path.parent}; make it, or give another name")


def page(spec: Spec, text: str, steps: list[tuple[str, Module]], files: dict[str, str], problem: Problem) -> str:
    """Return the page of a spec, from its file's text, the module after each pass (`steps`), the generated files, and a
    problem size."""
    module = steps[-1][1]
    typeset = MathML()
    report, sample = json.loads(files["report.json"]), Sample(spec)
    heads = f"Hq = {problem.q_heads}, Hkv = {problem.kv_heads}"
    context = {
        "module": module,
        "size": f"B = {problem.batch}, {heads}, Nq = {problem.n_q}, Nk = {problem.n_kv}",
        "spec_text": text,
        "canonical": yaml.safe_dump(spec.canonical(), sort_keys=False, allow_unicode=True),
        "general": meaning(steps[0][1], module, typeset),
        "kernels": [_kernel(module, kernel, problem, typeset) for kernel in module.kernels],
        "signatures": list(signatures(files["__init__.py"])),
        "pictures": sample.pictures,
        "maps": (maps := tile_maps(sample, module, problem)),
        "unlisted": any(isinstance(m, TileMap) and m.count(UNLISTED) for _, m in maps),
        "lanes": [(kernel.name, lanes(module, kernel)) for kernel in module.warp_specialized],
        "other_kernels": [sentence for kernel in module.kernels if (sentence := _other_kernel(module, kernel))],
        "tight": f"{TIGHT:.0%}",
        "unspecialized": list(unspecialized(spec, dict(steps)["dce"])),
        "fits": [_fit(module, cls, problem, report) for cls in CLASSES],
        "devices": [_device(module, device, problem) for device in DEVICES.values()],
        "passes": list(changes(spec, steps)),
        "code_files": [(name, highlight(files[name], name.rpartition(".")[2])) for name in _code(module)],
    }
    context["symbols"] = _legend(steps[0][1], module, typeset)
    return environment().get_template("page.html.jinja").render(context)


def _code(module: Module) -> list[str]:
    """Return the names of the generated files that the page shows."""
    return [
        "__init__.py",
        "kernels.py",
        *dict.fromkeys(SPECIALIZERS[kernel.backend].file for kernel in module.warp_specialized),
        "schedule.ir",
    ]


# ---------------------------------------------------------------------------------------------- formulas


class Formula(NamedTuple):
    """A label, a formula, and the relation between them."""

    label: str
    math: str  # MathML as Markup, or words
    relation: str = "="


class Group(NamedTuple):
    """Formulas under a heading."""

    title: str
    formulas: list[Formula]


def meaning(logical: Module, module: Module, typeset: MathML) -> list[Group]:
    """Return formulas for the mask and scores, before any choice of tiles, and for their FLOPs and bytes."""
    kernel = logical.kernels[0]
    masks = [op.where for op in kernel.ops() if isinstance(op, Mask)]
    visible = [Formula(SEES, typeset.math(where.replace(_is_inequality, _solved)), "where") for where in masks]
    if not masks:
        visible = [Formula(SEES, "always", "")]
    if module.blocks and not module.blocks.data:
        given = f"`{module.blocks.pattern}` makes" if module.blocks.pattern else "`block_mask=` of a call gives"
        visible.append(
            Formula(
                "",
                f"and where their block of {module.blocks.size} × {module.blocks.size} scores counts, as {given} them",
                "",
            )
        )
    visible += [Formula(name, typeset.math(expr)) for name, expr in _scores(kernel).items()]
    if module.dropout:
        visible.append(
            Formula("dropout", "of probabilities, by random numbers that depend only on (seed, b, h, q, kv)", "")
        )
    work = []
    for direction in module.directions:
        work.append(Formula(f"{direction}, FLOPs", typeset.math(useful_flops(module, direction))))
        work.append(
            Formula(f"{direction}, bytes of standard attention, a head", typeset.math(standard_bytes(direction)))
        )
    return [Group("What a query sees", visible), Group("Work", work)]


def _is_inequality(e: Any) -> bool:
    return isinstance(e, INEQUALITIES)


def _solved(inequality: Bool) -> Bool:
    """Return an inequality solved for the key's index; unchanged if it cannot be solved."""
    excess = sympy.expand(inequality.lts - inequality.gts)  # at most 0
    slope = excess.coeff(KV)
    if slope not in (1, -1) or KV in (excess - slope * KV).free_symbols:
        return inequality
    strict = isinstance(inequality, (sympy.Lt, sympy.Gt))
    relation = ((sympy.Lt if strict else sympy.Le), (sympy.Gt if strict else sympy.Ge))[slope == -1]
    return relation(KV, -slope * (excess - slope * KV))


def _scores(kernel: Kernel) -> dict[str, Expr]:
    """Return the steps from a product of a query and a key to its score, by name, with the kernel's scalars
    inlined."""
    maps = {op.name: op for op in kernel.ops() if isinstance(op, Map)}
    scalars = {symbol(name): op.expr for name, op in maps.items() if not op.type.dims}
    found: dict[str, Expr] = {}

    def add(op: Map) -> None:
        for _, ref in op.uses:
            if ref in maps and symbol(ref) not in scalars:
                add(maps[ref])
        found[op.name] = op.expr.xreplace({symbol(name): symbol(ref) for name, ref in op.uses}).xreplace(scalars)

    for op in maps.values():
        if op.score:
            add(op)
    return found


def _kernel(module: Module, kernel: Kernel, problem: Problem, typeset: MathML) -> Group:
    found = [
        Formula("mask, where tiles need one", typeset.math(op.where), "") for op in kernel.ops() if isinstance(op, Mask)
    ]
    iterations: Expr = sympy.Integer(0)
    for loop in tile_loops(kernel):
        parts = []
        for lo, hi in loop.ranges:
            _, (first, end) = whole_range(kernel.grid, lo, hi)
            iterations += end - first
            parts.append(typeset.between(lo, "j", hi))
        found.append(Formula(f"{loop.cls} tiles", Markup(" and ").join(parts), ""))
    positions = {op.name for op in kernel.ops() if isinstance(op, ListPosition)}
    for name, value in bounds(kernel):
        if str(name) in positions:
            found.append(
                Formula(
                    str(name), Markup("how many of the tiles listed come before tile {}").format(typeset.math(value))
                )
            )
        else:
            found.append(Formula(str(name), typeset.math(value)))
    if tile_loops(kernel):
        factors = symbol("B"), heads(kernel) / symbol("B")
        found.append(
            Formula(
                "tiles",
                typeset.sum_over_programs(
                    factors, iterations, kernel.program_axis, extent(kernel, kernel.program_axis)
                ),
            )
        )
        found.append(Formula("FLOPs", typeset.math(executed_flops(kernel))))
    found.append(Formula("bytes loaded and stored", typeset.math(hbm_bytes(kernel))))
    found.append(Formula("bytes, each tensor once", typeset.math(compulsory_bytes(kernel))))
    fits: dict[Expr, list[str]] = {}
    for cls in CLASSES:
        if config := chosen(module, kernel, cls, problem):
            fits.setdefault(backend_of(config).resources.formula(module, kernel, config), []).append(cls)
    found += [Formula(f"SRAM bytes, {', '.join(names)}", typeset.math(formula)) for formula, names in fits.items()]
    return Group(f"@{kernel.name}", found)


def _legend(logical: Module, module: Module, typeset: MathML) -> list[tuple[Markup, str, str]]:
    """Return the symbols that the formulas use: their notation, their names in the IR, and their meaning."""
    meanings = {name: meaning for name, (_, _, meaning) in SYMBOLS.items()}
    meanings |= {i.name: i.help for i in module.inputs}
    meanings |= {name: f"computed by {d.function} before the kernels run" for d in module.derived for name in d.names}
    ops = (op for m in (logical, module) for kernel in m.kernels for op in kernel.ops())
    defined = {op.name for op in ops if isinstance(op, (Map, ListPosition))}
    order = [*meanings, *sorted(typeset.used - set(meanings))]
    used = [name for name in order if name in typeset.used and name not in defined]
    return [
        (typeset.math(symbol(name)), name, meanings.get(name, "a number that the kernel reads or computes"))
        for name in used
    ]


# ---------------------------------------------------------------------------------------------- devices


class Table(NamedTuple):
    """Headings and rows of text; columns of numbers are aligned to the right."""

    caption: str
    headings: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Panel:
    """A device or a class of devices: its charts, a table, and remarks on what these leave out."""

    title: str
    charts: list[Drawing]
    table: Table
    remarks: list[str] = field(default_factory=list)


def _fit(module: Module, cls: str, problem: Problem, report: dict[str, Any]) -> Panel:
    """Return the shared memory of the tiles chosen for a device class, compared with its limit."""
    limit = CLASSES[cls].smem_per_block
    lines, rows = [], []
    for kernel in module.kernels:
        launched = configs_on(module, kernel, cls, problem)
        if not launched:
            elsewhere = " and ".join(dict.fromkeys(config.device for _, config in module.stand_ins(kernel.name)))
            says = (
                f"runs only on {elsewhere}"
                if elsewhere and not any(u.device == cls for u in module.not_fitting(kernel.name))
                else "no tile fits"
            )
            lines.append(Bar(f"@{kernel.name}: {says}"))
            rows.append([f"@{kernel.name}", "none", "", "", "", ""])
        for one, config in launched:
            name = f"@{kernel.name}" + (f", {config.backend}" if config.backend != module.backend else "")
            of_report = report["kernels"].get(one.name, report["kernels"][kernel.name])["schedules"]
            known = next(
                r
                for r in of_report
                if schedule(config).items() <= r.items() and r.get("backend", module.backend) == config.backend
            )
            need = known["sram_bytes"]
            colour = "bar tight" if need >= TIGHT * limit else "bar"
            lines.append(Bar(name, f"{need / 1024:.1f} KiB, {need / limit:.0%}", need, colour))
            reported = f"{known['reading']['shared_bytes']:,}" if known["reading"] else "not read"
            tile = config.tile.replace("x", " × ")
            rows.append([name, tile, str(config.num_warps), str(config.num_stages), f"{need:,}", reported])
    headings = ["kernel", "tile", "warps", "stages", "predicted", "compiler"]
    title = f"{cls}: {limit // 1024} KiB"
    reasons = [u.reason for kernel in module.kernels for u in module.not_fitting(kernel.name) if u.device == cls]
    table = Table(f"Bytes of {limit:,}, as predicted and as the compiler reports them", headings, rows)
    return Panel(
        title,
        [bars(f"Shared memory of each kernel on {cls}, of {limit // 1024} KiB", lines, limit, NARROW)],
        table,
        reasons,
    )


def _device(module: Module, device: Device, problem: Problem) -> Panel:
    """Return the bytes moved on a device, and its roofline."""
    rows, remarks, points, moved = [], [], [], []
    found: list[Estimate] = []
    for direction in module.directions:
        mine: list[Estimate] = []
        for kernel in module.kernels_of(direction):
            try:
                e = estimate(module, kernel, device, problem)
            except KeyError as error:  # a symbol without a value
                remarks.append(f"What @{kernel.name} moves depends on {error.args[0]}, which is not known here.")
                continue
            if e is None:
                remarks.append(f"No tile of @{kernel.name} fits.")
                continue
            mine.append(e)
            share = e.loaded / standard_total(module, direction, e.config, problem)
            cells = [
                e.config.tile.replace("x", " × "),
                _si(e.flops, "FLOP"),
                _si(e.loaded, "B"),
                f"{share:.3f}",
                _si(e.bytes, "B"),
            ]
            rows.append([f"@{kernel.name}", *cells, f"{e.intensity:,.0f}", e.binds, _si(e.seconds, "s")])
            if e.flops:
                points.append(Point(f"@{kernel.name}", e.intensity, e.flops / e.loaded))
            else:
                remarks.append(
                    f"@{kernel.name} has no matrix product: memory bounds it, and the roofline leaves it out."
                )
        found += mine
        if len(mine) == len(module.kernels_of(direction)):
            moved += _bytes_moved(direction, standard_total(module, direction, mine[0].config, problem), mine)
    charts = []
    if points:
        first = next(e for e in found if e.flops)
        peak = first.flops / first.compute_s
        name = next(name for name, rate in device.flops.items() if isclose(rate, peak, rel_tol=1e-6))
        charts.append(roofline(f"Roofline of {device.name}", points, peak, device.hbm_bytes_per_s, name))
    if moved:
        charts.append(bars(f"Bytes moved on {device.name}", moved, max(bar.value or 0.0 for bar in moved)))
    headings = ["kernel", "tile", "work", "loaded", "/ standard", "HBM", "FLOP / B", "bound", "roofline time"]
    remarks += split_d_costs(module, problem, [device])
    return Panel(
        f"{device.name} ({device.cls})",
        charts,
        Table(f"Work, bytes and time on {device.name}", headings, rows),
        remarks,
    )


def _bytes_moved(direction: str, standard: float, estimates: list[Estimate]) -> list[Bar]:
    """Return the bars of one direction: the bytes of standard attention, those that our kernels load and store, and
    those of them that reach HBM."""
    loaded, from_hbm = sum(e.loaded for e in estimates), sum(e.bytes for e in estimates)
    return [
        Bar(direction),
        Bar("standard attention", _si(standard, "B"), standard, "bar other"),
        Bar("loaded and stored by programs", _si(loaded, "B"), loaded),
        Bar("of that, from and to HBM", _si(from_hbm, "B"), from_hbm, "bar deep"),
    ]


def _other_kernel(module: Module, kernel: Kernel) -> str:
    """Return a description of a kernel that most calls of a direction do not launch, so that the page shows no bytes
    and time for it; empty for other kernels."""
    if any(kernel in module.kernels_of(direction) for direction in module.directions):
        return ""
    forward = module.host("forward")
    launching = {
        block.name
        for block in forward.blocks
        if any(isinstance(op, Launch) and op.kernel == kernel.name for op in block.ops)
    }
    where = next((to_text(op.where) for op in forward.ops() if isinstance(op, If) and op.then in launching), "")
    return f"@{kernel.name}{f', in place of @fwd where {where}' if where else ''}. {kernel.about}"


def _si(value: float, unit: str) -> str:
    """Return a quantity to three digits, with an SI prefix."""
    for factor, prefix in (
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
        (1.0, ""),
        (1e-3, "m"),
        (1e-6, "µ"),
    ):
        if value >= 0.9995 * factor:
            shown = value / factor
            return f"{shown:.{2 if shown < 9.995 else 1 if shown < 99.95 else 0}f} {prefix}{unit}"
    return f"0 {unit}" if not value else f"{value:.1e} {unit}"
