"""One run of `attngen tune`: modules and their candidates, the process that measures them, what is kept of it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from attngen.certify.certificate import reason
from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.devices import CLASSES, DEVICES
from attngen.errors import AttngenError, suggest
from attngen.ir.graph import Config
from attngen.schedule.table import Entry, Table
from attngen.targets.common.base import short_digest
from attngen.targets.registry import backend_of, maker_of
from attngen.tiles.classes import Key
from attngen.tune.tuner import Cell, Compared, Outcome, Plan, compare, compete, home, outcome
from attngen.tune.workers import Lost, Worker, share

COMPILE_S = 400.0  # for what is compiled ahead; the rest is compiled as it is measured


def which_device(asked: str | None, dry_run: bool, results: Path | None) -> tuple[str, bool]:
    """A name of devices.DEVICES, and whether it is the GPU here: the one that is asked for, or is here, or whose table
    there is.

    AttngenError if a GPU is needed and there is none, or another than was asked for, or one that is not known.
    """
    name = next((known for known in DEVICES if asked and known.lower() == asked.lower()), None)
    if asked and name is None:
        raise AttngenError(f"--device {asked} is not a device; {suggest(asked, DEVICES)}")
    here = None if dry_run else _device_here()
    if here is None and not dry_run and not (results and results.is_file()):
        raise AttngenError(
            "attngen tune measures on a CUDA device, and there is none; expected one, or `--dry-run`, which shows what would be measured, "
            "or `--results` of a run on one"
        )
    if here and name and name != here:
        raise AttngenError(f"--device {name} is not the GPU here, which is {here}; expected it, or `--dry-run`")
    return name or here or next(c.tuned_on for c in CLASSES.values() if c.tuned_on), here is not None


def _device_here() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_name()
    known = [name for name in DEVICES if name.lower() in gpu.lower()]
    if not known:
        raise AttngenError(
            f"{gpu} is not in attngen/devices.py, which has {', '.join(DEVICES)}; expected a `Device` of its name there"
        )
    return max(known, key=len)


@dataclass(frozen=True)
class Results:
    """Outcomes of a run, kept in a file line by line, so that another one goes on where it ended; or in memory
    alone."""

    path: Path | None
    device: str
    sources: Mapping[tuple[str, str], str]  # digests of kernels, by spec and kernel: others' times do not count
    outcomes: dict[Cell, Outcome]
    by: dict[str, str]  # what measured the last: gpu, torch, triton

    def keep(self, found: Outcome, by: Mapping[str, str]) -> None:
        """Put an outcome in, and write it."""
        self.outcomes[found.cell] = found
        self.by.update(by)
        if self.path:
            line = {
                "device": self.device,
                **by,
                "source": self.sources[found.cell.spec, found.cell.kernel],
                **found.plain(),
            }
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def read_results(path: Path | None, device: str, plans: Sequence[Plan]) -> Results:
    """The results in a file, of the plans' kernels as they are now; none where there is no file."""
    sources = _digests(plans)
    found = Results(path, device, sources, {}, {})
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            read, by = outcome(data), {name: data[name] for name in ("gpu", "torch", "triton")}
            theirs, source = data["device"], data["source"]
        except (ValueError, KeyError, TypeError):
            raise AttngenError(
                f"{path}, line {number}: not a result of `attngen tune`; expected a file that --results wrote"
            ) from None
        if theirs != device:
            raise AttngenError(
                f"{path}, line {number}: measured on {theirs}; expected results of {device}, or another file"
            )
        if sources.get((read.cell.spec, read.cell.kernel)) == source:
            found.outcomes[read.cell] = read
            found.by.update(by)
    return found


def _digests(plans: Sequence[Plan]) -> dict[tuple[str, str], str]:
    """The digests of the plans' kernels, by spec and kernel: of one that is divided too, of all its sources."""
    found: dict[tuple[str, str], str] = {}
    for plan in plans:
        text, digest = render(plan.module)["kernels.py"], backend_of(plan.module).compiler.source_digest
        found |= {(plan.module.name, kernel.name): digest(text, kernel.name) for kernel in plan.module.kernels}
        sources: dict[tuple[str, str], list[str]] = {}
        for row, module in plan.warp_specialized.items():
            maker, (kernel,) = maker_of(row), module.warp_specialized
            sources.setdefault((module.name, kernel.name), []).append(
                maker.compiler.source_digest(render(module)[maker.file], kernel.name) + home("", row)
            )
        found |= {of: short_digest([found[of], *texts]) for of, texts in sources.items()}
    return found


class Machine:
    """The GPU: a process that measures, and as many as there are cores that compile for it."""

    def __init__(self, folder: Path, specs: Mapping[str, Path], jobs: int | None) -> None:
        from attngen.tune.measure import compile_some, serve

        self.folder = folder
        self.args = (folder, dict(specs))
        self.worker = Worker(serve, *self.args)
        self.compile_some = compile_some
        self.jobs = jobs or max(1, len(os.sched_getaffinity(0)) - 1)

    def start(self) -> dict[str, str]:
        """What measures: gpu, torch, triton."""
        try:
            by: dict[str, str] = self.worker.start()
        except Lost as error:
            raise AttngenError(
                f"the process that measures {error}; expected a CUDA device, and a torch and a triton that run on it"
            ) from None
        return by

    def ask(self, request: tuple[Cell, Sequence[Config], int], limit_s: float) -> Any:
        return self.worker.ask(request, limit_s)

    def faults(self, plans: Sequence[Plan]) -> dict[tuple[str, Config], str]:
        """Why divided kernels get no certificate, by spec and row, as the ends of sentences; those that get one are
        not in it."""
        work = [(module, config) for plan in plans for config, module in plan.warp_specialized.items()]
        found: dict[tuple[str, Config], str] = {}
        for backend in dict.fromkeys(config.backend for _, config in work):
            mine = [
                (module, module.warp_specialized[0], config) for module, config in work if config.backend == backend
            ]
            maker = maker_of(mine[0][-1])
            files = (self.folder / home(module.name, config) / maker.file for module, _, config in mine)
            jobs = [maker.compiler.job(*what, file) for what, file in zip(mine, files)]
            for (module, kernel, config), reading in zip(mine, maker.compiler.compile_all(jobs, self.jobs)):
                why = (
                    f"does not compile: {reading}"
                    if isinstance(reading, str)
                    else reason(module, kernel, config, reading)
                )
                found |= {(module.name, config): why} if why else {}
        return found

    def compile_ahead(self, tasks: Sequence[tuple[Cell, Config]]) -> float:
        """Compile schedules of cells; seconds taken."""
        return share(self.compile_some, tasks, self.args, self.jobs, COMPILE_S)


@contextmanager
def machine(plans: Sequence[Plan], specs: Mapping[str, Path], jobs: int | None) -> Iterator[Machine]:
    """The GPU, with the plans' modules to measure; `specs` are their files by name."""
    from attngen.runtime.warp_specialized import CHOICE

    with tempfile.TemporaryDirectory(prefix="attngen-tune-") as folder:
        for plan in plans:
            write_module(render(plan.module), Path(folder) / plan.module.name)
            for row, module in plan.warp_specialized.items():
                write_module(render(module), Path(folder) / home(module.name, row))
        kept = dict(os.environ)
        for name in ("TRITON_INTERPRET", CHOICE):
            os.environ.pop(name, None)
        os.environ["TRITON_CACHE_DIR"] = str(
            Path(folder) / ".triton"
        )  # what is compiled ahead is found by the process that measures
        found = Machine(Path(folder), specs, jobs)
        try:
            yield found
        finally:
            found.worker.stop()
            os.environ.clear()
            os.environ.update(kept)


def tune(plans: Sequence[Plan], gpu: Machine, results: Results, budget_s: float) -> Iterator[tuple[Plan, Outcome]]:
    """Measure the cells that have no results yet, and keep them: each in its share of the seconds that are left.

    Divided kernels without a certificate are not measured.
    """
    by = gpu.start()
    left = [(plan, cell, found) for plan in plans for cell, found in plan.cells() if cell not in results.outcomes]
    faults = gpu.faults(
        [plan for plan in plans if any(plan is one and found.warp_specialized for one, _, found in left)]
    )
    tasks = (
        (plan.ahead(cell), row) for plan, cell, found in left for row in found.rows if (cell.spec, row) not in faults
    )
    gpu.compile_ahead(list(dict.fromkeys(tasks)))
    end = time.perf_counter() + budget_s
    for i, (plan, cell, found) in enumerate(left):
        without = {row: why for (spec, row), why in faults.items() if spec == cell.spec}
        made = compete(cell, plan, found.rows, gpu.ask, (end - time.perf_counter()) / (len(left) - i), without)
        results.keep(made, by)
        yield plan, made


def known(plans: Sequence[Plan], results: Results) -> Iterator[tuple[Plan, Outcome]]:
    """The plans' cells that have results."""
    for plan in plans:
        yield from ((plan, results.outcomes[cell]) for cell, _ in plan.cells() if cell in results.outcomes)


def _ahead(gpu: Machine, plan: Plan, cell: Cell, rows: Sequence[Config]) -> float:
    return gpu.compile_ahead([(plan.ahead(cell), row) for row in rows])


def compare_all(plans: Sequence[Plan], gpu: Machine, rows: int) -> Iterator[tuple[Cell, Compared | None]]:
    """Pruned searches beside the whole grid, for one number of rows."""
    gpu.start()
    for plan in plans:
        for cell, found in plan.cells():
            if cell.rows == rows:
                ahead = partial(_ahead, gpu, plan)
                yield cell, compare(cell, plan, found, gpu.ask, ahead)


def tabled(table: Table, plans: Sequence[Plan], results: Results) -> Table:
    """The table with the entries that the results give, and what measured them. Of cells that share a key, the first
    counts.

    Where the table is of another GPU of the class, it stays so, and the entries say which GPU is theirs.
    """
    entries: dict[Key, Entry] = {}
    other = bool(table.gpu) and results.by.get("gpu", table.gpu) != table.gpu
    for plan, found in known(plans, results):
        made = found.entry(plan, results.by["triton"])
        if made:
            entries.setdefault(plan.key(found.cell), replace(made, gpu=results.by["gpu"] if other else ""))
    return replace(table, **({} if other else results.by), entries={**table.entries, **entries})
