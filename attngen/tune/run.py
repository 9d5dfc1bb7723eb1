"""One run of `attngen tune`: modules and their candidates, the process that measures them, and the saved results."""

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
from attngen.errors import AttngenError
from attngen.ir import Config
from attngen.schedule.table import Entry, Table
from attngen.targets.common.base import short_digest
from attngen.targets.registry import backend_of, maker_of
from attngen.tiles.classes import Key
from attngen.tune.tuner import Cell, Compared, Outcome, Plan, compare, compete, folder_name, outcome
from attngen.tune.workers import Lost, Worker, share

COMPILE_S = 400.0  # limit for compiling ahead; the rest is compiled when it is measured


def which_device(asked: str | None, dry_run: bool, results: Path | None) -> tuple[str, bool]:
    """Return a name of devices.DEVICES, and whether this machine has the GPU. It is the requested device, else this
    machine's GPU, else the device of a committed table.

    AttngenError if a GPU is needed and there is none, or it is not the requested one.
    """
    here = None if dry_run else _device_here()
    if here is None and not dry_run and not (results and results.is_file()):
        raise AttngenError(
            "attngen tune measures on a CUDA device, and there is none; expected one, or `--dry-run`, which shows what "
            "would be measured, or `--results` of a run on one"
        )
    if here and asked and asked != here:
        raise AttngenError(f"--device {asked} is not the GPU here, which is {here}; expected it, or `--dry-run`")
    return asked or here or next(c.tuned_on for c in CLASSES.values() if c.tuned_on), here is not None


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
    """Outcomes of a run, saved to a file line by line, so that another run can continue; without a path only in
    memory."""

    path: Path | None
    device: str
    sources: Mapping[tuple[str, str], str]  # digests by spec and kernel; times of other sources are ignored
    outcomes: dict[Cell, Outcome]
    by: dict[str, str]  # gpu, torch and triton of the last measurement

    def keep(self, found: Outcome, by: Mapping[str, str]) -> None:
        """Add an outcome, and write it to the file."""
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
    """Return the results in a file for the plans' current kernels; none without a file."""
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
    """Return the digests of the plans' kernels, by spec and kernel, each over the sources of all its variants."""
    found: dict[tuple[str, str], str] = {}
    for plan in plans:
        text, digest = render(plan.module)["kernels.py"], backend_of(plan.module).compiler.source_digest
        found |= {(plan.module.name, kernel.name): digest(text, kernel.name) for kernel in plan.module.kernels}
        sources: dict[tuple[str, str], list[str]] = {}
        for config, module in plan.warp_specialized.items():
            maker, (kernel,) = maker_of(config), module.warp_specialized
            sources.setdefault((module.name, kernel.name), []).append(
                maker.compiler.source_digest(render(module)[maker.file], kernel.name) + folder_name("", config)
            )
        found |= {of: short_digest([found[of], *texts]) for of, texts in sources.items()}
    return found


class Machine:
    """The GPU: one process that measures, and one per core that compiles for it."""

    def __init__(self, folder: Path, specs: Mapping[str, Path], jobs: int | None) -> None:
        from attngen.tune.measure import compile_some, serve

        self.folder = folder
        self.args = (folder, dict(specs))
        self.worker = Worker(serve, *self.args)
        self.compile_some = compile_some
        self.jobs = jobs or max(1, len(os.sched_getaffinity(0)) - 1)

    def start(self) -> dict[str, str]:
        """Start the process that measures; return its gpu, torch and triton."""
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
        """Return why warp-specialized kernels get no certificate, by spec and config, as the ends of sentences."""
        work = [(module, config) for plan in plans for config, module in plan.warp_specialized.items()]
        found: dict[tuple[str, Config], str] = {}
        for backend in dict.fromkeys(config.backend for _, config in work):
            mine = [
                (module, module.warp_specialized[0], config) for module, config in work if config.backend == backend
            ]
            maker = maker_of(mine[0][-1])
            files = (self.folder / folder_name(module.name, config) / maker.file for module, _, config in mine)
            jobs = [maker.compiler.job(*one, file) for one, file in zip(mine, files)]
            for (module, kernel, config), report in zip(mine, maker.compiler.compile_all(jobs, self.jobs)):
                why = (
                    f"does not compile: {report}" if isinstance(report, str) else reason(module, kernel, config, report)
                )
                found |= {(module.name, config): why} if why else {}
        return found

    def compile_ahead(self, tasks: Sequence[tuple[Cell, Config]]) -> float:
        """Compile schedules of cells; return the seconds taken."""
        return share(self.compile_some, tasks, self.args, self.jobs, COMPILE_S)


@contextmanager
def machine(plans: Sequence[Plan], specs: Mapping[str, Path], jobs: int | None) -> Iterator[Machine]:
    """Return the GPU with the plans' modules to measure; `specs` are their files by name."""
    from attngen.runtime.warp_specialized import CHOICE

    with tempfile.TemporaryDirectory(prefix="attngen-tune-") as folder:
        for plan in plans:
            write_module(render(plan.module), Path(folder) / plan.module.name)
            for config, module in plan.warp_specialized.items():
                write_module(render(module), Path(folder) / folder_name(module.name, config))
        kept = dict(os.environ)
        for name in ("TRITON_INTERPRET", CHOICE):
            os.environ.pop(name, None)
        # The processes that compile and the one that measures share this cache.
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / ".triton")
        found = Machine(Path(folder), specs, jobs)
        try:
            yield found
        finally:
            found.worker.stop()
            os.environ.clear()
            os.environ.update(kept)


def tune(plans: Sequence[Plan], gpu: Machine, results: Results, budget_s: float) -> Iterator[tuple[Plan, Outcome]]:
    """Measure the cells without results, each in its share of the remaining seconds, and save their outcomes.

    Warp-specialized kernels without a certificate are not measured.
    """
    by = gpu.start()
    left = [(plan, cell, found) for plan in plans for cell, found in plan.cells() if cell not in results.outcomes]
    faults = gpu.faults(
        [plan for plan in plans if any(plan is one and found.warp_specialized for one, _, found in left)]
    )
    tasks = (
        (plan.ahead(cell), config)
        for plan, cell, found in left
        for config in found.configs
        if (cell.spec, config) not in faults
    )
    gpu.compile_ahead(list(dict.fromkeys(tasks)))
    end = time.perf_counter() + budget_s
    for i, (plan, cell, found) in enumerate(left):
        without = {config: why for (spec, config), why in faults.items() if spec == cell.spec}
        made = compete(cell, plan, found.configs, gpu.ask, (end - time.perf_counter()) / (len(left) - i), without)
        results.keep(made, by)
        yield plan, made


def known(plans: Sequence[Plan], results: Results) -> Iterator[tuple[Plan, Outcome]]:
    """Yield the plans' cells that have results."""
    for plan in plans:
        yield from ((plan, results.outcomes[cell]) for cell, _ in plan.cells() if cell in results.outcomes)


def _ahead(gpu: Machine, plan: Plan, cell: Cell, configs: Sequence[Config]) -> float:
    return gpu.compile_ahead([(plan.ahead(cell), config) for config in configs])


def compare_all(plans: Sequence[Plan], gpu: Machine, rows: int) -> Iterator[tuple[Cell, Compared | None]]:
    """Compare pruned searches with the whole grid, for one number of rows."""
    gpu.start()
    for plan in plans:
        for cell, found in plan.cells():
            if cell.rows == rows:
                ahead = partial(_ahead, gpu, plan)
                yield cell, compare(cell, plan, found, gpu.ask, ahead)


def tabled(table: Table, plans: Sequence[Plan], results: Results) -> Table:
    """Return the table with the entries of the results, and their GPU and versions. The first of several cells with one
    key counts.

    If the table is of another GPU of the class, its header stays, and the entries name their GPU.
    """
    entries: dict[Key, Entry] = {}
    other = bool(table.gpu) and results.by.get("gpu", table.gpu) != table.gpu
    for plan, found in known(plans, results):
        made = found.entry(plan, results.by["triton"])
        if made:
            entries.setdefault(plan.key(found.cell), replace(made, gpu=results.by["gpu"] if other else ""))
    return replace(table, **({} if other else results.by), entries={**table.entries, **entries})
