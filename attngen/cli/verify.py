"""The command `verify`: compile reports of each kernel, compared with the prediction."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli.common import GENERATED, Every, SpecPaths, given, load_specs, make_each, make_module
from attngen.cli.console import count, out, progress
from attngen.cli.conventions import choice
from attngen.devices import CLASSES, FALLBACK_CUDA
from attngen.errors import AttngenError
from attngen.report.tables import Rows

if TYPE_CHECKING:
    from attngen.certify.certificate import Found
    from attngen.ir.kernel import Kernel
    from attngen.ir.module import Config, Module
    from attngen.spec import Spec
    from attngen.targets.common.base import CompileReport

    Work = list[tuple[Module, Kernel, Config]]
Changed = typer.Option(
    "--changed",
    help="of the built modules, compile only kernels whose compile report in report.json is outdated, and one in 16 of "
    "the others, selected by the commit",
)
HEADINGS = (
    "module",
    "kernel",
    "target",
    "tile",
    "predicted",
    "reported",
    "",
    "registers",
    "spills",
    "code",
    "s",
    "why",
)


def verify(
    specs: SpecPaths = None,
    out_dir: Annotated[Path, typer.Option("--out", help="folder that holds one folder per spec")] = GENERATED,
    every: Every = False,
    target: Annotated[list[str] | None, choice(list(CLASSES), help="device class [default: all except `any`]")] = None,
    rows: Annotated[
        bool, typer.Option("--every-row", help="also compile the schedules for few rows, and for every element size")
    ] = False,
    changed: Annotated[bool, Changed] = False,
    write: Annotated[
        bool, typer.Option("--write", help="build the modules, and record the compile reports in their report.json")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, max=256, help="processes [default: one per core]")] = None,
) -> None:
    """Compile kernels without a GPU, and compare with the prediction.

    For each target: shared memory predicted and reported, registers, spilled bytes, code size. It fails if a kernel
    spills on an NVIDIA target, needs more shared memory than predicted, or over 10% less without a reason, or if the
    compile reports in report.json differ; for warp-specialized kernels, also if the machine code breaks a rule of
    docs/fit.md, and for other kernels for sm90, if it reads a register that was never written.

    \b
    attngen verify causal_mqa        after attngen build and verify --write
    attngen verify causal_mqa --target sm90 --write
    attngen verify --all             every kernel of every spec
    attngen verify --all --changed   for CI: what changed, some of the rest
    """
    from attngen.certify.certificate import chosen, record
    from attngen.codegen.files import write_module

    targets = target or [name for name in CLASSES if name != FALLBACK_CUDA]
    loaded = load_specs(given(specs, every, "verify"))
    if not write:
        _check_built(loaded, out_dir)
    made = [_emitted(out_dir / spec.name) for _, spec in loaded] if changed else _made(loaded, out_dir, jobs)
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
        print(f"{count(kept, 'compile report')} of the same kernels by the same compiler taken from report.json")
    if write:
        for module in modules:
            write_module(record(module, files[module.name], found.get(module.name, {})), out_dir / module.name)
    if wrong:
        raise AttngenError("\n".join(wrong))


def _made(loaded: Sequence[tuple[Path, Spec]], out_dir: Path, jobs: int | None) -> list[tuple[Module, dict[str, str]]]:
    """Compile specs to modules and their files. Raise AttngenError if some cannot be built."""
    made, unbuilt = make_each(make_module, loaded, out_dir, workers=jobs)
    if unbuilt:
        raise AttngenError("\n".join(unbuilt))
    return made


def _check_built(loaded: Sequence[tuple[Path, Spec]], out_dir: Path) -> None:
    """Raise AttngenError if the modules of these specs are not built, before anything is compiled."""
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
    """Return the module of the schedule.ir in a folder, and its files, with the compile reports that the folder has of
    them."""
    from attngen.certify.certificate import keep
    from attngen.codegen.render import render
    from attngen.ir.parser import parse_module
    from attngen.verify import verify as verified

    ir = folder / "schedule.ir"
    module = verified(parse_module(ir.read_text(encoding="utf-8"), str(ir)))
    return module, keep(module, render(module), folder)


def _compiled(
    work: Work, files: dict[str, dict[str, str]], jobs: int | None, built: Path | None, changed: bool
) -> tuple[Rows, dict[str, Found], list[str], int]:
    """Compile kernels. Return a table of them, their compile reports by module, the errors, and how many kernels were
    not compiled.

    The reports are compared with those of the modules in `built`. With `changed`, reports of the same kernels are taken
    from there.
    """
    from attngen.certify.certificate import known, stale, violations
    from attngen.targets.common.base import CompileReport
    from attngen.targets.registry import maker_of

    found: dict[str, Found] = {}
    wrong: list[str] = []
    table = Rows(*HEADINGS, names=4, folds=("why",))
    with tempfile.TemporaryDirectory() as folder, progress("compiling", len(work)) as watch:
        sources = {
            (name, file): Path(folder) / f"{name}_{file}"
            for name, file in {(m.name, maker_of(config).file) for m, _, config in work}
        }
        for (name, file), path in sources.items():
            path.write_text(files[name][file], encoding="utf-8")
        jobs_of_work = [
            maker_of(config).compiler.job(m, kernel, config, sources[m.name, maker_of(config).file])
            for m, kernel, config in work
        ]
        taken = known(work, jobs_of_work, files, built) if changed and built else [None] * len(work)
        makers = {config.backend: maker_of(config) for _, _, config in work}
        rest = [
            (config.backend, job) for (_, _, config), job, before in zip(work, jobs_of_work, taken) if before is None
        ]
        compiled = {
            name: makers[name].compiler.compile_all([j for of, j in rest if of == name], jobs) for name, _ in rest
        }
        for (module, kernel, config), before in zip(work, taken):
            watch.show(f"{module.name} @{kernel.name} on {config.device}")
            report = before or next(compiled[config.backend])
            watch.done()
            faults = list(violations(module, kernel, config, report))
            if faults and kernel.backend:
                keeps = "`schedule: {backend: triton}` keeps the portable kernel"
                faults.append(f"{module.name}: until it has its certificate, {keeps}")
            wrong += faults
            backend = f" {config.backend}" * (config.backend != module.backend)
            tile = f"{config.tile}x{config.num_warps}x{config.num_stages}{backend}"
            predicted = maker_of(config).resources.sram_bytes(module, kernel, config)
            cells = [module.name, kernel.name, config.device, tile, f"{predicted:,}"]
            if isinstance(report, CompileReport):
                found.setdefault(module.name, {})[kernel.name, config] = report
                wrong += stale(module, kernel, config, report, files[module.name]) if built else []
                cells += _report_cells(module, kernel, config, report, predicted)
            if before is None:
                table.add_row(*cells)
    return table, found, wrong, len(taken) - taken.count(None)


def _report_cells(module: Module, kernel: Kernel, config: Config, report: CompileReport, predicted: int) -> list[str]:
    """Return a compile report as cells of the table."""
    from attngen.certify.certificate import percent, reason

    cells = [f"{report.shared_bytes:,}", percent(predicted, report.shared_bytes), f"{report.registers}"]
    cells += [f"{report.spilled_bytes:,}", f"{report.code_bytes:,}", f"{report.seconds:.1f}"]
    return [*cells, reason(module, kernel, config, report)]


def _add_not_fitting(table: Rows, modules: Sequence[Module], targets: Sequence[str]) -> None:
    """Add rows for kernels of which no tile fits."""
    for module in modules:
        for kernel in module.kernels:
            for not_fitting in module.not_fitting(kernel.name):
                if not_fitting.device in targets:
                    table.add_row(module.name, kernel.name, not_fitting.device, "none", *[""] * 7, not_fitting.reason)
