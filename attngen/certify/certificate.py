"""Certificates: compile reports in report.json (key `reading`), which are kept while kernel and schedule are unchanged,
and compared with predictions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from attngen.cost.report import schedule
from attngen.devices import CLASSES
from attngen.ir import Config, Kernel, Module
from attngen.targets.common.base import CompileReport, Job, short_digest
from attngen.targets.registry import BACKENDS, SPECIALIZERS, kernel_of, maker_of
from attngen.tiles.sizes import elem_sizes

TOLERANCE = 1.1  # greatest ratio of a prediction to the reported number that needs no reason
# The fields of a compile report that report.json stores.
NUMBERS = ("shared_bytes", "registers", "spilled_bytes", "code_bytes", "triton")
SHARE = 16  # one job in this many is compiled although report.json has its report
Found = dict[tuple[str, Config], CompileReport]  # by kernel and config


def chosen(module: Module, targets: Sequence[str], every: bool) -> list[tuple[Kernel, Config]]:
    """Return the configs to certify on the targets: all with `every`; otherwise those of the smallest element size that
    are for any number of rows or were measured, and all of split-KV kernels, which usually have few rows. Configs of
    warp-specialized kernels are always certified."""
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
    """Return the files of a module with compile reports added to their entries of report.json."""
    report = json.loads(files["report.json"])
    for (kernel, config), compile_report in found.items():
        compiled = kernel_of(module, kernel, config)
        _entry(report, compiled, config)["reading"] = plain(module, compiled, config, compile_report, files)
    return {**files, "report.json": json.dumps(report, indent=2) + "\n"}


def _entry(report: dict[str, Any], kernel: Kernel, config: Config) -> dict[str, Any]:
    """Return the entry of a config in report.json."""
    return next(
        entry
        for entry in report["kernels"][kernel.stands_for]["schedules"]
        if schedule(config).items() <= entry.items()
    )


def plain(
    module: Module, kernel: Kernel, config: Config, report: CompileReport, files: dict[str, str]
) -> dict[str, Any]:
    """Return a compile report as report.json stores it, with the reason for a difference. The compile time is left out,
    because it differs in every run."""
    numbers = {key: getattr(report, key) for key in NUMBERS}
    numbers |= {"machine": report.machine} if report.machine is not None else {}
    digests = {"source": _source_digest(files, kernel.name, config.backend), "digest": report.digest}
    return {"target": config.device, **numbers, **digests, "states": reason(module, kernel, config, report)}


def _source_digest(files: dict[str, str], kernel: str, backend: str) -> str:
    """Return the digest of a kernel's source in the file of its backend."""
    maker = SPECIALIZERS[backend] if backend in SPECIALIZERS else BACKENDS[backend]
    return maker.compiler.source_digest(files[maker.file], kernel)


def keep(module: Module, files: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the files of a module, with the compile reports that `folder` has for the same configs of kernels with the
    same source."""
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no file, or not a report of ours
        return files
    return {**files, "report.json": json.dumps(report, indent=2) + "\n"}


def recorded(module: Module, kernel: Kernel, config: Config, job: Job, files: dict[str, str]) -> CompileReport | None:
    """Return the compile report in report.json for a config; None unless its digest shows that it is of this job, by
    this Triton, and not edited."""
    entry = _entry(json.loads(files["report.json"]), kernel, config)["reading"]
    try:
        report = CompileReport(
            **{key: entry[key] for key in NUMBERS}, job=job.digest, seconds=0.0, machine=entry.get("machine")
        )
        current = entry["digest"], maker_of(config).compiler.version()
        return report if (report.digest, report.triton) == current else None
    except (KeyError, TypeError):  # there is none, or it is not one of ours
        return None


def known(
    work: Sequence[tuple[Module, Kernel, Config]], jobs: Sequence[Job], files: dict[str, dict[str, str]], folder: Path
) -> list[CompileReport | None]:
    """Return the compile report in report.json for each kernel and config, or None if the kernel must be compiled.

    A kernel is compiled if report.json has no valid report of its job, or if the commit of `folder` selects the job
    (see `sampled_jobs`).
    files: the files of each module, by the module's name.
    """
    again = sampled_jobs(jobs, commit(folder, jobs))
    return [None if job.digest in again else recorded(*one, job, files[one[0].name]) for one, job in zip(work, jobs)]


def sampled_jobs(jobs: Iterable[Job], seed: str) -> set[str]:
    """Return the digests of the jobs that a seed selects; see `sampled`."""
    return sampled({job.digest for job in jobs}, seed)


def sampled(names: Iterable[str], seed: str) -> set[str]:
    """Return one name in SHARE, and at least one. Different seeds select different names, so all are selected in
    time."""
    shuffled = sorted(names, key=lambda name: short_digest(f"{seed} {name}"))
    return set(shuffled[: ceil(len(shuffled) / SHARE)])


def commit(folder: Path, jobs: Iterable[Job]) -> str:
    """Return a seed for `sampled_jobs`: the commit that is checked out in `folder`; without git, a digest of all
    jobs."""
    return checked_out(folder) or short_digest(sorted({job.digest for job in jobs}))


def checked_out(folder: Path) -> str:
    """Return the commit that is checked out in `folder`; empty text without git."""
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def reason(module: Module, kernel: Kernel, config: Config, report: CompileReport) -> str:
    """Return the sentence that report.json states with a compile report.

    For a portable config it is the known reason why a prediction is above the reported number by more than TOLERANCE;
    empty if it is not, or if no reason is known. For a warp-specialized config it is why it gets no certificate; empty
    if it gets one.
    """
    if config.backend in SPECIALIZERS:
        return "; ".join(SPECIALIZERS[config.backend].faults(module, kernel, config, report))
    resources = BACKENDS[config.backend].resources
    differs = resources.sram_bytes(module, kernel, config) > TOLERANCE * report.shared_bytes
    return (resources.slack(module, kernel, config) or "") if differs else ""


def violations(module: Module, kernel: Kernel, config: Config, report: CompileReport | str) -> Iterator[str]:
    """Yield a sentence for each reason why a config gets no certificate. `report` is the compiler's message if the
    kernel does not compile."""
    where = _where(module, kernel, config)
    if isinstance(report, str):
        yield f"{where} does not compile: {report}"
    elif config.backend in SPECIALIZERS:
        yield from (f"{where} {fault}" for fault in SPECIALIZERS[config.backend].faults(module, kernel, config, report))
    else:
        yield from (f"{where} {fault}" for fault in _faults(module, kernel, config, report))


def why_not(module: Module, kernel: Kernel, config: Config, report: CompileReport | str) -> str | None:
    """Return why a config may not be chosen, according to the compiler; None if it gets its certificate."""
    return "; ".join(violations(module, kernel, config, report)) or None


def _faults(module: Module, kernel: Kernel, config: Config, report: CompileReport) -> Iterator[str]:
    """Yield why a portable config gets no certificate, as ends of sentences."""
    backend, limit = BACKENDS[config.backend], CLASSES[config.device].smem_per_block
    predicted = backend.resources.sram_bytes(module, kernel, config)
    needed = f"{report.shared_bytes:,} bytes of shared memory"
    if report.spilled_bytes and CLASSES[config.device].backend == "cuda":
        line = f"{backend.cost.spilling} lists `{backend.cost.row_key(module, kernel, config)} @ {report.triton}`"
        yield f"spills {report.spilled_bytes:,} bytes; tile selection leaves it out once {line}"
    if report.shared_bytes > limit:
        yield f"needs {needed}, and has {limit:,}"
    if report.shared_bytes > predicted:
        yield f"needs {needed}, more than the {predicted:,} that the closed form predicts"
    if predicted > TOLERANCE * report.shared_bytes and not backend.resources.slack(module, kernel, config):
        yield (
            f"is predicted to need {predicted:,} bytes of shared memory, and needs {report.shared_bytes:,}; "
            "no reason is known"
        )


def stale(
    module: Module, kernel: Kernel, config: Config, report: CompileReport, files: dict[str, str]
) -> Iterator[str]:
    """Yield a sentence if report.json has no compile report for a config, or a different one by the same Triton."""
    before = _entry(json.loads(files["report.json"]), kernel, config)["reading"]
    where = _where(module, kernel, config)
    if before is None:
        yield f"{where} has no compile report in report.json; run `attngen verify --write`"
    elif before.get("triton") == report.triton:
        now = plain(module, kernel, config, report, files)
        wrong = ", ".join(f"{k} {before.get(k)} for {v}" for k, v in now.items() if before.get(k) != v)
        if wrong:
            yield f"{where} has another compile report in report.json: {wrong}; run `attngen verify --write`"


def percent(predicted: int, reported: int) -> str:
    """Return by how many percent a prediction is above the reported number, as text; empty if they are equal."""
    if predicted == reported:
        return ""
    return f"{100 * (predicted / reported - 1):+.1f}%" if reported else "above 0"


def _where(module: Module, kernel: Kernel, config: Config) -> str:
    columns = f"BLOCK_D={config.columns}, " if config.columns else ""
    tile = f"BLOCK_Q={config.block_q}, BLOCK_KV={config.block_kv}, {columns}"
    tile += f"num_warps={config.num_warps}, num_stages={config.num_stages}"
    of = f" of {SPECIALIZERS[config.backend].file}" if config.backend in SPECIALIZERS else ""
    return f"{module.name}: on {config.device} the kernel @{kernel.name}{of} with {tile}"
