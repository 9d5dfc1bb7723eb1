"""The command `tune`: measures schedules on a GPU, and writes a table of the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli.common import Every, SpecPaths, given, load_specs, make_each
from attngen.cli.console import progress
from attngen.cli.conventions import choice
from attngen.devices import CLASSES, DEVICES
from attngen.errors import AttngenError, SpecError

if TYPE_CHECKING:
    from attngen.spec import Spec
    from attngen.tune.tuner import Cell, Plan


Budget = typer.Option(min=1, help="seconds of measuring [default: no limit]")
DryRun = typer.Option("--dry-run", help="show what would be measured, and why the rest would not; needs no GPU")
WholeGrid = typer.Option(metavar="N", help="compare with the whole grid, for N queries and keys, instead")
Times = typer.Option(metavar="FILE", help="keep all times here, and reuse those that it has")
TablePath = typer.Option(metavar="FILE", help="the table [default: that of the device's class, in attngen/schedule]")
Jobs = typer.Option(min=1, max=256, help="processes that compile [default: one per core]")


def tune(
    specs: SpecPaths = None,
    every: Every = False,
    device: Annotated[str | None, choice(list(DEVICES), help="GPU to make a table for [default: the one here]")] = None,
    budget: Annotated[float | None, Budget] = None,
    dry_run: Annotated[bool, DryRun] = False,
    whole_grid: Annotated[int | None, WholeGrid] = None,
    results: Annotated[Path | None, Times] = None,
    table: Annotated[Path | None, TablePath] = None,
    jobs: Annotated[int | None, Jobs] = None,
) -> None:
    """Measure schedules of the cost model; keep the fastest.

    Schedules that fit, would not spill, and are fast by the model are compiled by several processes, and measured
    kernel by kernel, for 512, 1k, 4k and 16k queries and keys; split-KV kernels for 8 sequences of 16k keys, and for 4
    and 64 rows of queries that share a K/V head. The fastest go into a table, which `attngen build` uses for every
    kernel of their class; the model's choice stays unless another schedule is faster by 2%, in all rounds except one.
    On Hopper, warp-specialized forwards compete from 1k on, if their machine code gets a certificate; a build uses
    them where they beat the portable kernel.

    \b
    attngen tune causal_mha --dry-run                the candidates; needs no GPU
    attngen tune causal_mha --budget 60
    attngen tune specs/*.yaml --results tune.jsonl   resume; rewrite the table
    attngen tune causal_mha --whole-grid 4096
    """
    from attngen.heuristics import RANGES
    from attngen.tune import run, summary

    loaded = load_specs(given(specs, every, "tune"))
    sources = {spec.name: path for path, spec in loaded}
    if len(sources) < len(loaded):
        raise SpecError("two of the specs have one name; expected each once")
    if whole_grid is not None and whole_grid not in (sizes := [rows for _, rows in RANGES]):
        raise AttngenError(
            f"--whole-grid {whole_grid} is not a size that is measured; expected one of {', '.join(map(str, sizes))}"
        )
    name, here = run.which_device(device, dry_run, results)
    plans, unbuilt = make_each(_plan, loaded, DEVICES[name].cls)
    if unbuilt:
        raise SpecError("\n".join(unbuilt))
    if dry_run:
        for plan in plans:
            print("\n".join(summary.candidates(plan)))
    elif whole_grid is not None:
        _compare(plans, sources, jobs, whole_grid)
    else:
        _measure(plans, sources, jobs, name, here, budget or float("inf"), results, table)


def _named(cell: Cell) -> str:
    """Return a kernel and its rows as text."""
    return f"{cell.spec} @{cell.kernel} {cell.dtype} {cell.rows}"


def _plan(path: Path, spec: Spec, device_class: str) -> Plan:
    from attngen.spec import naming
    from attngen.tune.tuner import plan

    with naming(path):
        return plan(spec, device_class)


def _compare(plans: Sequence[Plan], sources: dict[str, Path], jobs: int | None, whole_grid: int) -> None:
    """Measure the whole grid of schedules, and compare it with those that the cost model selected."""
    from attngen.tune import run, summary

    with run.machine(plans, sources, jobs) as gpu:
        print(summary.aligned(summary.COMPARED, summary.COMPARED_WIDTHS))
        cells = [cell for plan in plans for cell, _ in plan.cells() if cell.rows == whole_grid]
        with progress("measuring", len(cells)) as watch:
            for cell, pair in run.compare_all(plans, gpu, whole_grid):
                print(summary.compared(cell, pair), flush=True)
                watch.done(_named(cell))


def _measure(
    plans: Sequence[Plan],
    sources: dict[str, Path],
    jobs: int | None,
    device: str,
    here: bool,
    budget: float,
    results: Path | None,
    table: Path | None,
) -> None:
    """Measure times that `results` lacks, if the device is here, and write the table."""
    from attngen.codegen.files import write_file
    from attngen.schedule.table import Table, path_of, read_table
    from attngen.tune import run, summary

    of_class = DEVICES[device].cls
    home = CLASSES[of_class].tuned_on or device  # modules of the class use this device's table
    path = table or path_of(home)
    before = read_table(path) if path.is_file() else Table(home)
    if DEVICES[before.device].cls != of_class:
        raise AttngenError(
            f"{path}: a table of {before.device}; expected one of the class {of_class}, as {device} is, or no file yet"
        )
    found = run.read_results(results, device, plans)
    print(summary.aligned(summary.MEASURED))
    for plan, known in run.known(plans, found):
        print("\n".join(summary.measured(plan, known)))
    if here:
        left = [cell for plan in plans for cell, _ in plan.cells() if cell not in found.outcomes]
        with run.machine(plans, sources, jobs) as gpu, progress("measuring", len(left)) as watch:
            watch.show("compiling")
            for (plan, made), coming in zip(run.tune(plans, gpu, found, budget), [*left[1:], None]):
                print("\n".join(summary.measured(plan, made)), flush=True)
                watch.done(_named(made.cell))
                watch.show(_named(coming) if coming else "")
    print("\n".join(summary.totals(run.known(plans, found))))
    after = run.tabled(before, plans, found)
    write_file(path, after.text())
    print(
        f"{path} has {len(after.entries)} measured schedules\nnext: attngen build --all; attngen verify --all --write"
    )
