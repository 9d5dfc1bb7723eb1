"""Certificates: compiler readings in report.json, kept while kernel and schedule are unchanged, and compared with predictions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from attngen.cost.report import schedule
from attngen.devices import CLASSES
from attngen.ir.graph import Kernel, Module, Row
from attngen.targets.common.base import Job, Reading, short_digest
from attngen.targets.registry import BACKENDS, DIVIDERS, kernel_of, maker_of
from attngen.tiles.sizes import elem_sizes

TOLERANCE = 1.1  # greatest ratio of a prediction to its reading that needs no reason
NUMBERS = ("shared_bytes", "registers", "spilled_bytes", "code_bytes", "triton")  # the fields of a reading that report.json stores
SHARE = 16  # one job in this many is compiled although report.json has its reading
Found = dict[tuple[str, Row], Reading]  # by kernel and schedule row


def chosen(module: Module, targets: Sequence[str], every: bool) -> list[tuple[Kernel, Row]]:
    """The schedule rows to certify on the targets: all with `every`; otherwise those of the smallest element size that are for any
    number of rows or were measured, and all of kernels among whose programs keys are dealt: these have few rows as a rule. Rows of divided
    kernels are certified always."""
    least = {kernel.name: min(elem_sizes(module, kernel)) for kernel in module.kernels}
    pairs = [(kernel, row) for kernel in module.kernels for row in module.rows(kernel.name) if row.device in targets]
    divided = [(kernel, row) for kernel in module.divided for row in module.rows(kernel.name, kernel.backend) if row.device in targets]
    usual = [
        (kernel, row)
        for kernel, row in pairs
        if every or (row.elem_bytes == least[kernel.name] and (row.max_rows is None or row.measured or kernel.deal))
    ]
    return usual + divided


def record(module: Module, files: dict[str, str], found: Found) -> dict[str, str]:
    """The files of a module with readings put into their rows of report.json."""
    report = json.loads(files["report.json"])
    for (kernel, row), reading in found.items():
        compiled = kernel_of(module, kernel, row)
        _entry(report, compiled, row)["reading"] = plain(module, compiled, row, reading, files)
    return {**files, "report.json": json.dumps(report, indent=2) + "\n"}


def _entry(report: dict[str, Any], kernel: Kernel, row: Row) -> dict[str, Any]:
    """The entry of a schedule row in report.json."""
    return next(entry for entry in report["kernels"][kernel.stands_for]["schedules"] if schedule(row).items() <= entry.items())


def plain(module: Module, kernel: Kernel, row: Row, reading: Reading, files: dict[str, str]) -> dict[str, Any]:
    """A reading as report.json stores it, with the reason for a difference. The compile time is left out, because no two runs share it."""
    numbers = {key: getattr(reading, key) for key in NUMBERS}
    numbers |= {"machine": reading.machine} if reading.machine is not None else {}
    digests = {"source": _source_digest(files, kernel.name, row.backend), "digest": reading.digest}
    return {"target": row.device, **numbers, **digests, "states": reason(module, kernel, row, reading)}


def _source_digest(files: dict[str, str], kernel: str, backend: str) -> str:
    """The digest of a kernel's source in the file of its backend."""
    maker = DIVIDERS[backend] if backend in DIVIDERS else BACKENDS[backend]
    return maker.compiler.source_digest(files[maker.file], kernel)


def keep(module: Module, files: dict[str, str], folder: Path) -> dict[str, str]:
    """The files of a module, with the readings that `folder` has for the same schedule rows of kernels with the same source."""
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


def recorded(module: Module, kernel: Kernel, row: Row, job: Job, files: dict[str, str]) -> Reading | None:
    """The reading that report.json has for a row; None unless its digest shows that it is of this job, by this Triton, and not edited."""
    entry = _entry(json.loads(files["report.json"]), kernel, row)["reading"]
    try:
        reading = Reading(**{key: entry[key] for key in NUMBERS}, job=job.digest, seconds=0.0, machine=entry.get("machine"))
        return reading if (reading.digest, reading.triton) == (entry["digest"], maker_of(row).compiler.version()) else None
    except (KeyError, TypeError):  # there is none, or it is not one of ours
        return None


def known(
    work: Sequence[tuple[Module, Kernel, Row]], jobs: Sequence[Job], files: dict[str, dict[str, str]], folder: Path
) -> list[Reading | None]:
    """The reading in report.json for each kernel and row, or None where the kernel is to be compiled.

    A kernel is compiled if report.json has no valid reading of its job, or if the commit of `folder` draws the job (see `drawn`).
    files: the files of each module, by the module's name.
    """
    again = drawn(jobs, commit(folder, jobs))
    return [None if job.digest in again else recorded(*what, job, files[what[0].name]) for what, job in zip(work, jobs)]


def drawn(jobs: Iterable[Job], seed: str) -> set[str]:
    """The digests of one job in SHARE, and of at least one. Different seeds draw different jobs, so in time all are drawn."""
    digests = sorted({job.digest for job in jobs}, key=lambda digest: short_digest(f"{seed} {digest}"))
    return set(digests[: ceil(len(digests) / SHARE)])


def commit(folder: Path, jobs: Iterable[Job]) -> str:
    """A seed for `drawn`: the commit that git has checked out in `folder`; without git, a digest of all jobs."""
    try:
        found = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return short_digest(sorted({job.digest for job in jobs}))


def reason(module: Module, kernel: Kernel, row: Row, reading: Reading) -> str:
    """What a report states of a reading.

    Of a portable row, the known reason why a prediction is above its reading by more than TOLERANCE; empty if it is not, or if no reason
    is known. Of a divider's row, why it gets no certificate; empty if it gets one.
    """
    if row.backend in DIVIDERS:
        return "; ".join(DIVIDERS[row.backend].faults(module, kernel, row, reading))
    footprint = BACKENDS[row.backend].footprint
    differs = footprint.sram_bytes(module, kernel, row) > TOLERANCE * reading.shared_bytes
    return (footprint.slack(module, kernel, row) or "") if differs else ""


def violations(module: Module, kernel: Kernel, row: Row, reading: Reading | str) -> Iterator[str]:
    """A sentence for each reason why a row gets no certificate. `reading` is the compiler's message if the kernel does not compile."""
    where = _where(module, kernel, row)
    if isinstance(reading, str):
        yield f"{where} does not compile: {reading}"
    elif row.backend in DIVIDERS:
        yield from (f"{where} {fault}" for fault in DIVIDERS[row.backend].faults(module, kernel, row, reading))
    else:
        yield from (f"{where} {fault}" for fault in _faults(module, kernel, row, reading))


def why_not(module: Module, kernel: Kernel, row: Row, reading: Reading | str) -> str | None:
    """Why a schedule row may not be chosen, by what the compiler says of it; None if it gets its certificate."""
    return "; ".join(violations(module, kernel, row, reading)) or None


def _faults(module: Module, kernel: Kernel, row: Row, reading: Reading) -> Iterator[str]:
    """Why a portable row gets no certificate: the ends of sentences."""
    backend, limit = BACKENDS[row.backend], CLASSES[row.device].smem_per_block
    predicted = backend.footprint.sram_bytes(module, kernel, row)
    if reading.spilled_bytes and CLASSES[row.device].backend == "cuda":
        line = f"{backend.cost.spilling} lists `{backend.cost.row_key(module, kernel, row)} @ {reading.triton}`"
        yield f"spills {reading.spilled_bytes:,} bytes; tile selection leaves it out once {line}"
    if reading.shared_bytes > limit:
        yield f"needs {reading.shared_bytes:,} bytes of shared memory, and has {limit:,}"
    if reading.shared_bytes > predicted:
        yield f"needs {reading.shared_bytes:,} bytes of shared memory, more than the {predicted:,} that the closed form predicts"
    if predicted > TOLERANCE * reading.shared_bytes and not backend.footprint.slack(module, kernel, row):
        yield f"is predicted to need {predicted:,} bytes of shared memory, and needs {reading.shared_bytes:,}; no reason is known"


def stale(module: Module, kernel: Kernel, row: Row, reading: Reading, files: dict[str, str]) -> Iterator[str]:
    """A sentence if report.json has no reading for a row, or has a different one by the same version of Triton."""
    before = _entry(json.loads(files["report.json"]), kernel, row)["reading"]
    if before is None:
        yield f"{_where(module, kernel, row)} has no reading in report.json; run `attngen verify --write`"
    elif before.get("triton") == reading.triton:
        now = plain(module, kernel, row, reading, files)
        wrong = ", ".join(f"{k} {before.get(k)} for {v}" for k, v in now.items() if before.get(k) != v)
        if wrong:
            yield f"{_where(module, kernel, row)} has another reading in report.json: {wrong}; run `attngen verify --write`"


def percent(predicted: int, reported: int) -> str:
    """By how many percent a prediction is above the reported number, as text; empty if they are equal."""
    if predicted == reported:
        return ""
    return f"{100 * (predicted / reported - 1):+.1f}%" if reported else "above 0"


def _where(module: Module, kernel: Kernel, row: Row) -> str:
    columns = f"COLUMNS={row.columns}, " if row.columns else ""
    tile = f"BLOCK_Q={row.block_q}, BLOCK_KV={row.block_kv}, {columns}num_warps={row.num_warps}, num_stages={row.num_stages}"
    of = f" of {DIVIDERS[row.backend].file}" if row.backend in DIVIDERS else ""
    return f"{module.name}: on {row.device} the kernel @{kernel.name}{of} with {tile}"
