"""Charts and tables of the page: shared memory by device class; roofline and bytes moved by device. Portable and
warp-specialized kernels have bars and points of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isclose
from typing import Any, NamedTuple

from attngen.cost.report import schedule
from attngen.cost.roofline import Estimate, Problem, estimate, standard_total
from attngen.cost.split_d import split_d_costs
from attngen.devices import CLASSES, DEVICES, Device
from attngen.ir import Config, Kernel, Module
from attngen.report.charts import NARROW, Bar, Drawing, Point, bars, roofline
from attngen.report.launches import PORTABLE, launches
from attngen.report.tilemap import configs_on
from attngen.targets.registry import maker_of

TIGHT = 0.9  # share of a device's shared memory from which on bars have another colour
PORTABLE_KERNELS, SPECIALIZED_KERNELS = "Portable kernels (Triton)", "Warp-specialized kernels ({})"


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


def what_runs(module: Module, cls: str) -> Table:
    """Return the table of what calls launch on a device class."""
    limit = CLASSES[cls].smem_per_block
    rows = []
    for one in launches(module, cls):
        when = f"{one.where}; {one.size}" if one.where and one.size != "any" else one.where or one.size
        need = maker_of(one.config).resources.sram_bytes(module, one.kernel, one.config)
        tile = one.config.tile.replace("x", " × ")
        shared = f"{need / 1024:.0f} KiB ({need / limit:.0%})"
        cells = [tile, str(one.config.num_stages), shared, one.warps]
        rows.append([one.purpose, when, f"@{one.kernel.name}", one.implementation, *cells])
    headings = ["call", "when", "kernel", "implementation", "block_q × block_kv", "stages", "shared memory", "warps"]
    devices = ", ".join(device.name for device in DEVICES.values() if device.cls == cls)
    memory = f"{limit // 1024} KiB of shared memory for a program"
    return Table(f"{devices}: {memory}" if devices else f"Any other device: {memory}", headings, rows)


def fit(module: Module, cls: str, problem: Problem, report: dict[str, Any]) -> Panel:
    """Return the shared memory of the tiles chosen for a device class, compared with its limit. Kernels without matrix
    products, which need next to none, are left out."""
    limit = CLASSES[cls].smem_per_block
    lines: dict[str, list[Bar]] = {}
    rows = []
    for kernel in (k for k in module.kernels if k.traits.dots):
        launched = configs_on(module, kernel, cls, problem)
        if not launched:
            lines.setdefault(PORTABLE_KERNELS, []).append(Bar(f"@{kernel.name}: {_absent(module, kernel, cls)}"))
            rows.append([f"@{kernel.name}", "none", "", "", "", ""])
        for one, config in launched:
            known = _reported(module, kernel, one, config, report)
            need = known["sram_bytes"]
            group = SPECIALIZED_KERNELS.format(config.backend.title()) if one.backend else PORTABLE_KERNELS
            colour = "bar tight" if need >= TIGHT * limit else "bar deep" if one.backend else "bar"
            bar = Bar(f"@{one.name}", f"{need / 1024:.1f} KiB, {need / limit:.0%}", need, colour)
            lines.setdefault(group, []).append(bar)
            compiled = f"{known['reading']['shared_bytes']:,}" if known["reading"] else "not read"
            tile = config.tile.replace("x", " × ")
            name = f"@{kernel.name}" + (f", {config.backend}" if one.backend else "")
            rows.append([name, tile, str(config.num_warps), str(config.num_stages), f"{need:,}", compiled])
    headings = ["kernel", "tile", "warps", "stages", "predicted", "compiler"]
    reasons = [u.reason for kernel in module.kernels for u in module.not_fitting(kernel.name) if u.device == cls]
    title = f"Shared memory of each kernel on {cls}, of {limit // 1024} KiB"
    return Panel(
        f"{cls}: {limit // 1024} KiB",
        [bars(title, [bar for group, found in lines.items() for bar in (Bar(group), *found)], limit, NARROW)],
        Table(f"Bytes of {limit:,}, as predicted and as the compiler reports them", headings, rows),
        reasons,
    )


def _absent(module: Module, kernel: Kernel, cls: str) -> str:
    """Return the reason why a kernel has no config on a device class, in a few words."""
    elsewhere = " and ".join(dict.fromkeys(config.device for _, config in module.stand_ins(kernel.name)))
    if elsewhere and not any(u.device == cls for u in module.not_fitting(kernel.name)):
        return f"runs only on {elsewhere}"
    return "no tile fits"


def _reported(module: Module, kernel: Kernel, one: Kernel, config: Config, report: dict[str, Any]) -> dict[str, Any]:
    """Return the row of report.json for a config."""
    rows = report["kernels"].get(one.name, report["kernels"][kernel.name])["schedules"]
    found: dict[str, Any] = next(
        r for r in rows if schedule(config).items() <= r.items() and r.get("backend", module.backend) == config.backend
    )
    return found


# ---------------------------------------------------------------------------------------------- roofline


@dataclass
class _Implementation:
    """The estimates of one implementation of a direction, and whether they are of all kernels that it launches."""

    direction: str
    name: str
    estimates: list[Estimate] = field(default_factory=list)
    complete: bool = True


def device_panel(module: Module, device: Device, problem: Problem) -> Panel:
    """Return the bytes moved on a device, and a roofline for each implementation."""
    remarks: list[str] = []
    found = [_portable(module, d, device, problem, remarks) for d in module.directions]
    found += _specialized(module, device, problem, remarks)
    rows, moved = [], []
    for direction in module.directions:
        mine = [each for each in found if each.direction == direction and each.estimates]
        for each in mine:
            rows += [_row(module, direction, each.name, e, problem) for e in each.estimates]
        if whole := [each for each in mine if each.complete]:
            standard = standard_total(module, direction, whole[0].estimates[0].config, problem)
            moved += [Bar(direction), Bar("standard attention", _si(standard, "B"), standard, "bar other")]
            moved += [bar for each in whole for bar in _bytes_moved(each)]
    charts = [
        _roofline(device, name, [e for each in found if each.name == name for e in each.estimates if e.flops])
        for name in dict.fromkeys(each.name for each in found)
        if any(e.flops for each in found if each.name == name for e in each.estimates)
    ]
    if moved:
        charts.append(bars(f"Bytes moved on {device.name}", moved, max(bar.value or 0.0 for bar in moved)))
    headings = ["kernel", "implementation", "tile", "work", "loaded", "/ standard", "HBM", "FLOP / B", "bound", "time"]
    remarks += split_d_costs(module, problem, [device])
    table = Table(f"Work, bytes and roofline time on {device.name}", headings, rows)
    return Panel(f"{device.name} ({device.cls})", charts, table, list(dict.fromkeys(remarks)))


def _portable(module: Module, direction: str, device: Device, problem: Problem, remarks: list[str]) -> _Implementation:
    """Return the estimates of the portable kernels of a direction."""
    made = _Implementation(direction, PORTABLE)
    for kernel in module.kernels_of(direction):
        try:
            e = estimate(module, kernel, device, problem)
        except KeyError as error:  # a symbol without a value
            remarks.append(f"What @{kernel.name} moves depends on {error.args[0]}, which is not known here.")
        else:
            if e is None:
                remarks.append(f"No tile of @{kernel.name} fits.")
            else:
                made.estimates.append(e)
                if not e.flops:
                    remarks.append(
                        f"@{kernel.name} has no matrix product: memory bounds it, and the roofline leaves it out."
                    )
    made.complete = len(made.estimates) == len(module.kernels_of(direction))
    return made


def _specialized(module: Module, device: Device, problem: Problem, remarks: list[str]) -> list[_Implementation]:
    """Return the estimates of the warp-specialized kernels that a call of this size launches, by direction."""
    made: dict[tuple[str, str], _Implementation] = {}
    for one in (found for found in launches(module, device.cls) if found.kernel.backend):
        if one.host not in module.directions or not one.covers(problem, device):
            continue
        try:
            e = estimate(module, module.kernel(one.kernel.stands_for), device, problem, one.config)
        except KeyError as error:  # a symbol without a value
            remarks.append(f"What @{one.kernel.name} moves depends on {error.args[0]}, which is not known here.")
            continue
        each = made.setdefault((one.host, one.implementation), _Implementation(one.host, one.implementation))
        if e:
            each.estimates.append(e)
    return list(made.values())


def _row(module: Module, direction: str, name: str, e: Estimate, problem: Problem) -> list[str]:
    """Return the row of a kernel in the table of a device."""
    share = e.loaded / standard_total(module, direction, e.config, problem)
    moved = [_si(e.flops, "FLOP"), _si(e.loaded, "B"), f"{share:.3f}", _si(e.bytes, "B"), f"{e.intensity:,.0f}"]
    return [f"@{e.kernel}", name, e.config.tile.replace("x", " × "), *moved, e.binds, _si(e.seconds, "s")]


def _roofline(device: Device, name: str, estimates: list[Estimate]) -> Drawing:
    """Return the roofline of a device with the kernels of an implementation."""
    points = [Point(f"@{e.kernel}", e.intensity, e.flops / e.loaded) for e in estimates]
    peak = estimates[0].flops / estimates[0].compute_s
    rate = next(name for name, rate in device.flops.items() if isclose(rate, peak, rel_tol=1e-6))
    return roofline(f"Roofline of {device.name}: {name}", points, peak, device.hbm_bytes_per_s, rate)


def _bytes_moved(each: _Implementation) -> list[Bar]:
    """Return the bars of an implementation: the bytes that its programs load and store, and those of them that reach
    HBM."""
    loaded, from_hbm = sum(e.loaded for e in each.estimates), sum(e.bytes for e in each.estimates)
    return [
        Bar(f"{each.name}: loaded, stored", _si(loaded, "B"), loaded),
        Bar("of that, from and to HBM", _si(from_hbm, "B"), from_hbm, "bar deep"),
    ]


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
