"""Certificates: compiler readings in report.json, kept while kernel and schedule are unchanged, and compared with
predictions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from attngen.cost.report import schedule
from attngen.devices import CLASSES
from attngen.ir.graph import Config, Kernel, Module
from attngen.targets.common.base import CompileReport, Job, short_digest
from attngen.targets.registry import BACKENDS, SPECIALIZERS, kernel_of, maker_of
from attngen.tiles.sizes import elem_sizes

TOLERANCE = 1.1  # greatest ratio of a prediction to its reading that needs no reason
NUMBERS = (
    "shared_bytes",
    "registers",
    "spilled_bytes",
    "code_bytes",
    "triton",
)  # the fields of a reading that report.json stores
SHARE = 16  # one job in this many is compiled although report.json has its reading
Found = dict[tuple[str, Config], CompileReport]  # by kernel and schedule row


def chosen(module: Module, targets: Sequence[str], every: bool) -> list[tuple[Kernel, Config]]:
    """The schedule rows to certify on the targets: all with `every`; otherwise those of the smallest element size
    that are for any number of rows or were measured, and all of kernels among whose programs keys are dealt: these
    have few rows as a rule. Rows of divided kernels are certified always."""
    least = {kernel.name: min(elem_sizes(module, kernel)) for kernel in module.kernels}
    pairs = [
        (kernel, config)
        for kernel in module.kernels
        for config in module.configs(kernel.name)
        if config.device in targets
    ]
    warp_specialized = [
        (kernel, config)
        for kernel in module.warp_specialized
        for config in module.configs(kernel.name, kernel.backend)
        if config.device in targets
    ]
    usual = [
        (kernel, config)
        for kernel, config in pairs
        if every
        or (config.elem_bytes == least[kernel.name] and (config.max_rows is None or config.measured or kernel.kv_split))
    ]
    return usual + warp_specialized


def record(module: Module, files: dict[str, str], found: Found) -> dict[str, str]:
    """The files of a module with readings put into their rows of report.json."""
    report = json.loads(files["report.json"])
    for (kernel, config), reading in found.items():
        compiled = kernel_of(module, kernel, config)
        _entry(report, compiled, config)["reading"] = plain(module, compiled, config, reading, files)
    return {**files, "report.json": json.dumps(report, indent=2) + "\n"}


def _entry(report: dict[str, Any], kernel: Kernel, config: Config) -> dict[str, Any]:
    """The entry of a schedule row in report.json."""
    return next(
        entry
        for entry in report["kernels"][kernel.stands_for]["schedules"]
        if schedule(config).items() <= entry.items()
    )


def plain(
    module: Module, kernel: Kernel, config: Config, reading: CompileReport, files: dict[str, str]
) -> dict[str, Any]:
    """A reading as report.json stores it, with the reason for a difference. The compile time is left out, because no
    two runs share it."""
    numbers = {key: getattr(reading, key) for key in NUMBERS}
    numbers |= {"machine": reading.machine} if reading.machine is not None else {}
    digests = {"source": _source_digest(files, kernel.name, config.backend), "digest": reading.digest}
    return {"target": config.device, **numbers, **digests, "states": reason(module, kernel, config, reading)}


def _source_digest(files: dict[str, str], kernel: str, backend: str) -> str:
    """The digest of a kernel's source in the file of its backend."""
    maker = SPECIALIZERS[backend] if backend in SPECIALIZERS else BACKENDS[backend]
    return maker.compiler.source_digest(files[maker.file], kernel)


def keep(module: Module, files: dict[str, str], folder: Path) -> dict[str, str]:
    """The files of a module, with the readings that `folder` has for the same schedule rows of kernels with the same
    source."""
    try:
        old = json.loads((folder / "report.json").read_text(encoding="utf-8"))["kernels"]
        report = json.loads(files["report.json"])
        for name, kernel in report["kernels"].items():
            for entry in kernel["schedules"]:
                digest = _source_digest(files, entry.get("kernel", name), entry.get("backend", module.backend))
                for before in old[name]["schedules"] if name in old else ():
                    kept = before.get("reading")
                    if kept and kept["source"] == digest and {**before, "reading": None} == {**entry, "reading": None}:
                        entry["reading"] = kept
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # nothing there, or not a report of ours
        return files
    return {**files, "report.json": json.dumps(report, indent=2) + "\n"}


def recorded(module: Module, kernel: Kernel, config: Config, job: Job, files: dict[str, str]) -> CompileReport | None:
    """The reading that report.json has for a row; None unless its digest shows that it is of this job, by this
    Triton, and not edited."""
    entry = _entry(json.loads(files["report.json"]), kernel, config)["reading"]
    try:
        reading = CompileReport(
            **{key: entry[key] for key in NUMBERS}, job=job.digest, seconds=0.0, machine=entry.get("machine")
        )
        return (
            reading
            if (reading.digest, reading.triton) == (entry["digest"], maker_of(config).compiler.version())
            else None
        )
    except (KeyError, TypeError):  # there is none, or it is not one of ours
        return None


def known(
    work: Sequence[tuple[Module, Kernel, Config]], jobs: Sequence[Job], files: dict[str, dict[str, str]], folder: Path
) -> list[CompileReport | None]:
    """The reading in report.json for each kernel and row, or None where the kernel is to be compiled.

    A kernel is compiled if report.json has no valid reading of its job, or if the commit of `folder` draws the job (see
    `drawn`).
    files: the files of each module, by the module's name.
    """
    again = drawn(jobs, commit(folder, jobs))
    return [None if job.digest in again else recorded(*what, job, files[what[0].name]) for what, job in zip(work, jobs)]


def drawn(jobs: Iterable[Job], seed: str) -> set[str]:
    """The digests of one job in SHARE, and of at least one. Different seeds draw different jobs, so in time all are
    drawn."""
    digests = sorted({job.digest for job in jobs}, key=lambda digest: short_digest(f"{seed} {digest}"))
    return set(digests[: ceil(len(digests) / SHARE)])


def commit(folder: Path, jobs: Iterable[Job]) -> str:
    """A seed for `drawn`: the commit that git has checked out in `folder`; without git, a digest of all jobs."""
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return short_digest(sorted({job.digest for job in jobs}))


def reason(module: Module, kernel: Kernel, config: Config, reading: CompileReport) -> str:
    """What a report states of a reading.

    Of a portable row, the known reason why a prediction is above its reading by more than TOLERANCE; empty if it is
    not, or if no reason is known. Of a divider's row, why it gets no certificate; empty if it gets one.
    """
    if config.backend in SPECIALIZERS:
        return "; ".join(SPECIALIZERS[config.backend].faults(module, kernel, config, reading))
    resources = BACKENDS[config.backend].resources
    differs = resources.sram_bytes(module, kernel, config) > TOLERANCE * reading.shared_bytes
    return (resources.slack(module, kernel, config) or "") if differs else ""


def violations(module: Module, kernel: Kernel, config: Config, reading: CompileReport | str) -> Iterator[str]:
    """A sentence for each reason why a row gets no certificate. `reading` is the compiler's message if the kernel
    does not compile."""
    where = _where(module, kernel, config)
    if isinstance(reading, str):
        yield f"{where} does not compile: {reading}"
    elif config.backend in SPECIALIZERS:
        yield from (
            f"{where} {fault}" for fault in SPECIALIZERS[config.backend].faults(module, kernel, config, reading)
        )
    else:
        yield from (f"{where} {fault}" for fault in _faults(module, kernel, config, reading))


def why_not(module: Module, kernel: Kernel, config: Config, reading: CompileReport | str) -> str | None:
    """Why a schedule row may not be chosen, by what the compiler says of it; None if it gets its certificate."""
    return "; ".join(violations(module, kernel, config, reading)) or None


def _faults(module: Module, kernel: Kernel, config: Config, reading: CompileReport) -> Iterator[str]:
    """Why a portable row gets no certificate: the ends of sentences."""
    backend, limit = BACKENDS[config.backend], CLASSES[config.device].smem_per_block
    predicted = backend.resources.sram_bytes(module, kernel, config)
    if reading.spilled_bytes and CLASSES[config.device].backend == "cuda":
        line = f"{backend.cost.spilling} lists `{backend.cost.row_key(module, kernel, config)} @ {reading.triton}`"
        yield f"spills {reading.spilled_bytes:,} bytes; tile selection leaves it out once {line}"
    if reading.shared_bytes > limit:
        yield f"needs {reading.shared_bytes:,} bytes of shared memory, and has {limit:,}"
    if reading.shared_bytes > predicted:
        yield f"needs {reading.shared_bytes:,} bytes of shared memory, more than the {predicted:,} that the closed form predicts"
    if predicted > TOLERANCE * reading.shared_bytes and not backend.resources.slack(module, kernel, config):
        yield f"is predicted to need {predicted:,} bytes of shared memory, and needs {reading.shared_bytes:,}; no reason is known"


def stale(
    module: Module, kernel: Kernel, config: Config, reading: CompileReport, files: dict[str, str]
) -> Iterator[str]:
    """A sentence if report.json has no reading for a row, or has a different one by the same version of Triton."""
    before = _entry(json.loads(files["report.json"]), kernel, config)["reading"]
    if before is None:
        yield f"{_where(module, kernel, config)} has no reading in report.json; run `attngen verify --write`"
    elif before.get("triton") == reading.triton:
        now = plain(module, kernel, config, reading, files)
        wrong = ", ".join(f"{k} {before.get(k)} for {v}" for k, v in now.items() if before.get(k) != v)
        if wrong:
            yield f"{_where(module, kernel, config)} has another reading in report.json: {wrong}; run `attngen verify --write`"


def percent(predicted: int, reported: int) -> str:
    """By how many percent a prediction is above the reported number, as text; empty if they are equal."""
    if predicted == reported:
        return ""
    return f"{100 * (predicted / reported - 1):+.1f}%" if reported else "above 0"


def _where(module: Module, kernel: Kernel, config: Config) -> str:
    columns = f"COLUMNS={config.columns}, " if config.columns else ""
    tile = f"BLOCK_Q={config.block_q}, BLOCK_KV={config.block_kv}, {columns}num_warps={config.num_warps}, num_stages={config.num_stages}"
    of = f" of {SPECIALIZERS[config.backend].file}" if config.backend in SPECIALIZERS else ""
    return f"{module.name}: on {config.device} the kernel @{kernel.name}{of} with {tile}"
