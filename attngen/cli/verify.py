"""The command `verify`: what the compiler reports of each kernel, beside what was predicted."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli.common import GENERATED, Every, SpecPaths, given, load_specs, make_each, make_module
from attngen.cli.console import count, err, new_table, out
from attngen.devices import CLASSES, FALLBACK_CUDA
from attngen.errors import AttngenError, suggest

if TYPE_CHECKING:
    from rich.table import Table

    from attngen.certify.certificate import Found
    from attngen.ir.graph import Config, Kernel, Module
    from attngen.spec import Spec
    from attngen.targets.common.base import CompileReport

    Work = list[tuple[Module, Kernel, Config]]
Changed = typer.Option(
    "--changed",
    help="of the modules as they are built: compile kernels whose reading in report.json is not of them, and one in 16 of the others, "
    "which the commit draws",
)
HEADINGS = ("module", "kernel", "target", "tile", "predicted", "reported", "", "registers", "spills", "code", "s", "")


def verify(
    specs: SpecPaths = None,
    out_dir: Annotated[Path, typer.Option("--out", help="folder that holds one folder per spec")] = GENERATED,
    every: Every = False,
    target: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(CLASSES)} [default: all but `any`]")] = None,
    rows: Annotated[
        bool, typer.Option("--every-row", help="compile the schedules for few rows, and for every element size, too")
    ] = False,
    changed: Annotated[bool, Changed] = False,
    write: Annotated[
        bool, typer.Option("--write", help="build the modules, and record the readings in their report.json")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, max=256, help="processes [default: one a core]")] = None,
) -> None:
    """Compile kernels, without a GPU, beside what was predicted.

    For each target, without a GPU: shared memory predicted and reported, registers, spilled bytes, code size. It fails
    where a kernel spills on an NVIDIA target, needs more than predicted, or more than 10% less without a reason, or
    where the readings in report.json are not these; where warps have roles, also where the machine code is not what
    docs/fit.md says, and of other kernels for sm90, where it reads a register that nothing has written.

    \b
    attngen verify specs/causal_mqa.yaml                 after attngen build, and verify --write
    attngen verify specs/causal_mqa.yaml --target sm90 --write
    attngen verify --all                                 every kernel of every spec
    attngen verify --all --changed                       for CI: what has changed, and a share of the rest
    """
    from attngen.certify.certificate import chosen, record
    from attngen.codegen.files import write_module

    targets = target or [name for name in CLASSES if name != FALLBACK_CUDA]
    for name in targets:
        if name not in CLASSES:
            raise typer.BadParameter(f"`{name}` is not a target; {suggest(name, CLASSES)}", param_hint="--target")
    loaded = load_specs(given(specs, every, "verify"))
    if not write:
        _check_built(loaded, out_dir)
    made, unbuilt = (
        ([_emitted(out_dir / spec.name) for _, spec in loaded], [])
        if changed
        else make_each(make_module, loaded, out_dir, workers=jobs)
    )
    if unbuilt:
        raise AttngenError("\n".join(unbuilt))
    modules, files = [module for module, _ in made], {module.name: texts for module, texts in made}
    work = [(module, kernel, config) for module in modules for kernel, config in chosen(module, targets, rows)]
    start = time.perf_counter()
    table, found, wrong, kept = _compiled(work, files, jobs, None if write else out_dir, changed)
    _add_not_fitting(table, modules, targets)
    out.print(table)
    print(
        f"{count(len(work) - kept, 'kernel')} compiled for {', '.join(targets)} in {time.perf_counter() - start:.0f} s"
    )
    if changed:
        print(f"{count(kept, 'reading')} of the same kernels by the same compiler taken from report.json")
    if write:
        for module in modules:
            write_module(record(module, files[module.name], found.get(module.name, {})), out_dir / module.name)
    if wrong:
        raise AttngenError("\n".join(wrong))


def _check_built(loaded: Sequence[tuple[Path, Spec]], out_dir: Path) -> None:
    """Modules are there, and of these specs; otherwise AttngenError, before anything is compiled."""
    wrong = []
    for path, spec in loaded:
        ir = out_dir / spec.name / "schedule.ir"
        if not ir.is_file():
            wrong.append(f"{path}: not built: there is no {ir}; run `attngen build {path}` first, or give --write")
        elif f"\n  spec {spec.hash()}\n" not in ir.read_text(encoding="utf-8", errors="replace"):
            wrong.append(f"{path}: {ir.parent} is of another spec; run `attngen build {path}` first, or give --write")
    if wrong:
        raise AttngenError("\n".join(wrong))


def _emitted(folder: Path) -> tuple[Module, dict[str, str]]:
    """The module that the schedule.ir in a folder gives, and its files, with the readings that the folder has of
    them."""
    from attngen.certify.certificate import keep
    from attngen.codegen.render import render
    from attngen.ir.text import parse_module
    from attngen.verify import verify as verified

    ir = folder / "schedule.ir"
    module = verified(parse_module(ir.read_text(encoding="utf-8"), str(ir)))
    return module, keep(module, render(module), folder)


def _compiled(
    work: Work, files: dict[str, dict[str, str]], jobs: int | None, built: Path | None, changed: bool
) -> tuple[Table, dict[str, Found], list[str], int]:
    """Compile kernels: a table of them, what the compiler reports by module, what is wrong, and how many were not
    compiled.

    The readings are held against those of the modules in `built`. With `changed` those of the same kernels are taken
    from there.
    """
    from attngen.certify.certificate import known, stale, violations
    from attngen.targets.common.base import CompileReport
    from attngen.targets.registry import maker_of

    found: dict[str, Found] = {}
    wrong: list[str] = []
    table = new_table(*HEADINGS)
    with tempfile.TemporaryDirectory() as folder, err.status("compiling") as status:
        sources = {
            (name, file): Path(folder) / f"{name}_{file}"
            for name, file in {(m.name, maker_of(config).file) for m, _, config in work}
        }
        for (name, file), path in sources.items():
            path.write_text(files[name][file], encoding="utf-8")
        asked = [
            maker_of(config).compiler.job(m, kernel, config, sources[m.name, maker_of(config).file])
            for m, kernel, config in work
        ]
        taken = known(work, asked, files, built) if changed and built else [None] * len(work)
        makers = {config.backend: maker_of(config) for _, _, config in work}
        rest = [(config.backend, one) for (_, _, config), one, before in zip(work, asked, taken) if before is None]
        compiled = {
            name: makers[name].compiler.compile_all([j for of, j in rest if of == name], jobs) for name, _ in rest
        }
        for i, ((module, kernel, config), before) in enumerate(zip(work, taken), 1):
            reading = before or next(compiled[config.backend])
            status.update(f"{i} of {len(work)}: {module.name} @{kernel.name} on {config.device}")
            faults = list(violations(module, kernel, config, reading))
            if faults and kernel.backend:
                faults.append(
                    f"{module.name}: until it has its certificate, `schedule: {{backend: triton}}` keeps the portable kernel"
                )
            wrong += faults
            tile = f"{config.tile}x{config.num_warps}x{config.num_stages}{f' {config.backend}' * (config.backend != module.backend)}"
            predicted = maker_of(config).resources.sram_bytes(module, kernel, config)
            cells = [module.name, kernel.name, config.device, tile, f"{predicted:,}"]
            if isinstance(reading, CompileReport):
                found.setdefault(module.name, {})[kernel.name, config] = reading
                wrong += stale(module, kernel, config, reading, files[module.name]) if built else []
                cells += _read_cells(module, kernel, config, reading, predicted)
            if before is None:
                table.add_row(*cells)
    return table, found, wrong, len(taken) - taken.count(None)


def _read_cells(module: Module, kernel: Kernel, config: Config, reading: CompileReport, predicted: int) -> list[str]:
    """What the compiler reports, as cells of the table."""
    from attngen.certify.certificate import percent, reason

    cells = [f"{reading.shared_bytes:,}", percent(predicted, reading.shared_bytes), f"{reading.registers}"]
    cells += [f"{reading.spilled_bytes:,}", f"{reading.code_bytes:,}", f"{reading.seconds:.1f}"]
    return [*cells, reason(module, kernel, config, reading)]


def _add_not_fitting(table: Table, modules: Sequence[Module], targets: Sequence[str]) -> None:
    """Lines for kernels that no tile makes fit."""
    for module in modules:
        for kernel in module.kernels:
            for not_fitting in module.not_fitting(kernel.name):
                if not_fitting.device in targets:
                    table.add_row(module.name, kernel.name, not_fitting.device, "none", *[""] * 7, not_fitting.reason)
