"""Nsight Compute's counters of the bytes that kernels move: its command line and its CSV."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from attngen.errors import AttngenError

SECTOR = 32  # bytes
_UNITS = {"": 1, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 1, "Ksector": 1e3, "Msector": 1e6}
_DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
# Loads and stores that SMs request from the L2; on chips without such counters, all requests to the L2.
METRICS = tuple(
    (*_DRAM, f"lts__t_sectors_{source}op_read.sum", f"lts__t_sectors_{source}op_write.sum")
    for source in ("srcunit_tex_", "")
)
_REASONS = {
    "ERR_NVGPUCTRPERM": (
        "the driver lets only administrators read the counters; run as root, or set "
        "NVreg_RestrictProfilingToAdminUsers=0"
    ),
    "LibraryNotLoaded": (
        "the machine's runtime gives no access to the counters; expected one on which `ncu` profiles any CUDA program"
    ),
}


@dataclass(frozen=True)
class Bytes:
    """Bytes that one or several kernels move from and to device memory, and request from the L2."""

    dram_read: float
    dram_written: float
    l2_read: float
    l2_written: float

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def dram(self) -> float:
        return self.dram_read + self.dram_written

    @property
    def l2(self) -> float:
        return self.l2_read + self.l2_written


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: str
    moved: Bytes


def find_ncu() -> str:
    """Return the path of Nsight Compute's command line; AttngenError if there is none."""
    found = shutil.which("ncu")
    if found is None:
        raise AttngenError(
            "`ncu` is not on the PATH; expected NVIDIA Nsight Compute, which comes with the CUDA toolkit"
        )
    return found


def command(ncu: str, metrics: Sequence[str], log: Path, module: str, args: Iterable[str]) -> list[str]:
    """Return the command that runs a Python module of attngen under `ncu`, which writes its CSV to `log`.

    Clocks are not changed. Caches are flushed before each kernel, so that all reads count. Kernels are profiled between
    cudaProfilerStart and cudaProfilerStop.
    """
    options = [
        "--clock-control",
        "none",
        "--cache-control",
        "all",
        "--profile-from-start",
        "off",
        "--target-processes",
        "all",
    ]
    output = [
        "--metrics",
        ",".join(metrics),
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--kernel-name-base",
        "function",
    ]
    return [ncu, *options, *output, "--log-file", str(log), sys.executable, "-m", module, *args]


def profile(module: str, args: Sequence[str], seconds: float, watch: Callable[[str], None]) -> list[Launch]:
    """Run a Python module under `ncu`; return every launch that it profiles, in order. `watch` gets the printed lines.

    Raises AttngenError: no `ncu`, no permission, not within so many seconds, or another error of `ncu`.
    """
    ncu = find_ncu()
    with tempfile.TemporaryDirectory(prefix="attngen-") as folder:
        for metrics in METRICS:
            log = Path(folder) / "ncu.csv"
            log.unlink(missing_ok=True)
            printed = _run(command(ncu, metrics, log, module, args), seconds, watch)
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            if "Failed to find metric" in text and metrics != METRICS[-1]:
                continue
            launches = parse(text)
            if launches:
                return launches
            raise AttngenError(_why_nothing(text, printed))
    raise AssertionError("the last metrics are returned or refused")


def _run(line: Sequence[str], seconds: float, watch: Callable[[str], None]) -> list[str]:
    """Run a command and return the lines that it prints, also passed to `watch`; AttngenError if it takes longer."""
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    late: list[bool] = []

    def stop() -> None:
        late.append(True)
        _end_group(process.pid)

    timer = threading.Timer(seconds, stop)
    timer.start()
    printed: list[str] = []
    try:
        assert process.stdout is not None
        for text in process.stdout:
            printed.append(text.rstrip())
            watch(printed[-1])
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            _end_group(process.pid)
            process.wait()
    if late:
        raise AttngenError(
            f"ncu did not end within {seconds:.0f} s; expected fewer or smaller calls, or a larger --budget"
        )
    return printed


def _end_group(group: int) -> None:
    """End a process that we started, and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _why_nothing(log: str, printed: Sequence[str]) -> str:
    """Return a sentence on why `ncu` has profiled nothing."""
    lines = [line.strip() for line in (*log.splitlines(), *printed) if line.strip()]
    for mark, reason in _REASONS.items():
        if any(mark in line for line in lines):
            return f"ncu read no counters: {reason}"
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if "ERROR" in line or "Error" in line]
    return f"ncu read no counters: {(errors or lines or ['it says no reason'])[-1]}"


def parse(text: str) -> list[Launch]:
    """Return the launches in the output of `ncu --csv --page raw`: a row of headings, a row of units, a row per launch.

    Other lines (`==PROF== ...`, output of programs) are skipped. AttngenError for a counter that was not read.
    """
    rows = csv.reader(line for line in text.splitlines() if line.startswith('"'))
    headings = next((row for row in rows if "Kernel Name" in row), None)
    units = next(rows, None)
    if headings is None or units is None:
        return []
    columns = [next((i for i, h in enumerate(headings) if h in names), None) for names in zip(*METRICS)]
    name = headings.index("Kernel Name")
    found = []
    for row in (row for row in rows if len(row) == len(headings)):
        values = [None if at is None else _number(row[at], units[at]) for at in columns]
        if None in values:
            counter = METRICS[0][values.index(None)]
            raise AttngenError(
                f"ncu gave no number for {counter} of the kernel {row[name]}; expected a GPU that has this counter"
            )
        numbers = [value for value in values if value is not None]
        found.append(Launch(row[name], Bytes(numbers[0], numbers[1], SECTOR * numbers[2], SECTOR * numbers[3])))
    return found


def _number(text: str, unit: str) -> float | None:
    """Return a counter in its base unit; None if it is not a number, such as `n/a`."""
    try:
        return float(text.replace(",", "")) * _UNITS[unit]
    except (KeyError, ValueError):
        return None
