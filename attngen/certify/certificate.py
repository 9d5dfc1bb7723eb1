"""Certificates: readings in report.json, kept while what they are of is unchanged, and held against predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attngen.analysis.cost import schedule_key
from attngen.analysis.report import schedule
from attngen.analysis.sram import elem_sizes, slack, sram_bytes
from attngen.certify.compiler import Reading, source_digest
from attngen.devices import CLASSES
from attngen.ir.graph import Kernel, Module, Row

TOLERANCE = 1.1  # of a prediction over its reading, without a reason
Found = dict[tuple[str, Row], Reading]  # by kernel and schedule row


def chosen(module: Module, targets: Sequence[str], every: bool) -> list[tuple[Kernel, Row]]:
    """The schedule rows to certify: for the smallest element size, those for any number of rows and measured ones; or `every` one."""
    least = min(elem_sizes(module))
    pairs = [(kernel, row) for kernel in module.kernels for row in module.rows(kernel.name) if row.device in targets]
    return [(kernel, row) for kernel, row in pairs if every or (row.elem_bytes == least and (row.max_rows is None or row.measured))]


def record(module: Module, files: dict[str, str], found: Found) -> dict[str, str]:
    """The files of a module with readings put into their rows of report.json."""
    report = json.loads(files["report.json"])
    for (kernel, row), reading in found.items():
        _entry(report, kernel, row)["reading"] = plain(module, module.kernel(kernel), row, reading, files)
    return {**files, "report.json": json.dumps(report, indent=2) + "\n"}


def _entry(report: dict[str, Any], kernel: str, row: Row) -> dict[str, Any]:
    """What report.json has of a schedule row."""
    return next(entry for entry in report["kernels"][kernel]["schedules"] if schedule(row).items() <= entry.items())


def plain(module: Module, kernel: Kernel, row: Row, reading: Reading, files: dict[str, str]) -> dict[str, Any]:
    """A reading as report.json has it, with what is to be said of it; without the time, which no two runs share."""
    numbers = {k: v for k, v in vars(reading).items() if k != "seconds"}
    source = source_digest(files["kernels.py"], kernel.name)
    return {"target": row.device, **numbers, "source": source, "states": reason(module, kernel, row, reading)}


def keep(files: dict[str, str], folder: Path) -> dict[str, str]:
    """The files of a module with the readings that `folder` has of the same schedule rows of kernels with the same source."""
    try:
        old = json.loads((folder / "report.json").read_text(encoding="utf-8"))["kernels"]
        report = json.loads(files["report.json"])
        for name, kernel in report["kernels"].items():
            digest = source_digest(files["kernels.py"], name)
            for entry in kernel["schedules"]:
                for before in old[name]["schedules"] if name in old else ():
                    kept = before.get("reading")
                    if kept and kept["source"] == digest and {**before, "reading": None} == {**entry, "reading": None}:
                        entry["reading"] = kept
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # nothing there, or not a report of ours
        return files
    return {**files, "report.json": json.dumps(report, indent=2) + "\n"}


def reason(module: Module, kernel: Kernel, row: Row, reading: Reading) -> str:
    """What the report states of a difference, or nothing."""
    differs = sram_bytes(module, kernel, row) > TOLERANCE * reading.shared_bytes
    return (slack(module, kernel, row) or "") if differs else ""


def violations(module: Module, kernel: Kernel, row: Row, reading: Reading | str) -> Iterator[str]:
    """A sentence for each thing that keeps a row from its certificate."""
    where = _where(module, kernel, row)
    if isinstance(reading, str):
        yield f"{where} does not compile: {reading}"
        return
    predicted, limit = sram_bytes(module, kernel, row), CLASSES[row.device].smem_per_block
    if reading.spilled_bytes and CLASSES[row.device].backend == "cuda":
        line = f"attngen/analysis/spills.txt lists `{schedule_key(module, kernel, row)}`"
        yield f"{where} spills {reading.spilled_bytes:,} bytes; tile selection leaves it out once {line}"
    if reading.shared_bytes > limit:
        yield f"{where} needs {reading.shared_bytes:,} bytes of shared memory, and has {limit:,}"
    if reading.shared_bytes > predicted:
        yield f"{where} needs {reading.shared_bytes:,} bytes of shared memory, more than the {predicted:,} that the closed form predicts"
    if predicted > TOLERANCE * reading.shared_bytes and not slack(module, kernel, row):
        yield f"{where} is predicted to need {predicted:,} bytes of shared memory, and needs {reading.shared_bytes:,}; no reason is known"


def stale(module: Module, kernel: Kernel, row: Row, reading: Reading, files: dict[str, str]) -> Iterator[str]:
    """A sentence if report.json lacks the reading of a row, or has another by the same compiler."""
    before = _entry(json.loads(files["report.json"]), kernel.name, row)["reading"]
    if before is None:
        yield f"{_where(module, kernel, row)} has no reading in report.json; run `attngen verify --write`"
    elif before.get("triton") == reading.triton:
        now = plain(module, kernel, row, reading, files)
        wrong = ", ".join(f"{k} {before.get(k)} for {v}" for k, v in now.items() if before.get(k) != v)
        if wrong:
            yield f"{_where(module, kernel, row)} has another reading in report.json: {wrong}; run `attngen verify --write`"


def percent(predicted: int, reported: int) -> str:
    """By how much a prediction is above what is reported."""
    return f"{100 * (predicted / reported - 1):+.1f}%" if predicted != reported else ""


def _where(module: Module, kernel: Kernel, row: Row) -> str:
    tile = f"BLOCK_Q={row.block_q}, BLOCK_KV={row.block_kv}, num_warps={row.num_warps}, num_stages={row.num_stages}"
    return f"{module.name}: on {row.device} the kernel @{kernel.name} with {tile}"
