"""Run cells, one process per cell: several prepare at once, one measures.

Up to `jobs` processes at a time make the first calls of peers that compile, so these seconds are those of a busy
machine; `--jobs 1` gives clean ones. Then one process at a time measures. A peer that fails, hangs beyond the limit or
crashes its process only loses its own figures: the cell starts again without it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attngen.bench.cases.catalog import TABLED
from attngen.bench.cases.grids import Cell
from attngen.bench.results import DIRECTIONS, FIGURES, Line, Results, rates, sentence
from attngen.errors import AttngenError, BuildError, SpecError
from attngen.spec import Spec

Work = Mapping[Cell, Sequence[str]]  # the cells, and the peers to measure in each

START_S = 180.0  # limit for a process's imports
GONE_S = 10.0  # limit for a process to end by itself
# Digits of figures after the point, by the last part of their names; significant digits for `ms` and `spread`.
DIGITS = {"ms": 5, "spread": 2, "mib": 1, "us": 1, "s": 2}


@dataclass(frozen=True)
class Setup:
    """Settings of a run. `peers_from` and `clock` name modules with PEERS and with the functions of timing.py."""

    rounds: int = 5
    jobs: int = 1
    limit_s: float = 120.0  # for one step: a first call, one measurement of a peer
    host: bool = False  # measure all kinds of host times
    masks: bool = False  # measure the preparation of masks, as always for grids with tables of it
    device: str = "cuda"
    peers_from: str = "attngen.bench.peers"
    clock: str = "attngen.bench.timing"

    def cannot(self, cell: Cell, peer: str) -> str:
        """Return why a peer cannot do a cell; empty if it can."""
        reason: str = importlib.import_module(self.peers_from).PEERS[peer].cannot(cell)
        return reason


@dataclass
class Attempt:
    """A cell to run, the peers that are left, and the findings so far."""

    cell: Cell
    peers: list[str]
    lost: dict[str, str] = field(default_factory=dict)
    pairs: int = 0
    read: int = 0
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    whys: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def take(self, message: dict[str, Any]) -> None:
        """Store the findings of a message."""
        if "pairs" in message:
            self.pairs, self.read = message["pairs"], message["read"]
        if name := message.get("peer"):
            self.figures.setdefault(name, {}).update({key: x for key, x in message.items() if key in FIGURES})
            self.whys.setdefault(name, []).extend([message["why"]] if "why" in message else [])
            self.notes[name] = message.get("note", self.notes.get(name, ""))

    def lines(self, asked: Sequence[str], setup: Setup, machine: dict[str, Any]) -> list[Line]:
        """Return the cell's lines, for all requested peers."""
        found = []
        for name in asked:
            figures = {key: _rounded(key, x) for key, x in self.figures.get(name, {}).items()}
            for direction in (d for d in DIRECTIONS if f"{d}_ms" in figures):
                figures |= rates(self.cell, machine, self.pairs, self.read, direction, figures[f"{direction}_ms"])
            if figures:
                figures["visible"] = float(
                    f"{self.pairs / (self.cell.batch * self.cell.heads * self.cell.n_q * self.cell.n_kv):.5g}"
                )
            why = (
                setup.cannot(self.cell, name)
                or self.lost.get(name)
                or "; ".join(dict.fromkeys(self.whys.get(name, [])))
            )
            found.append(
                Line(
                    self.cell,
                    name,
                    {key: figures[key] for key in FIGURES if key in figures},
                    why,
                    self.notes.get(name, ""),
                )
            )
        return found


def _rounded(name: str, x: float) -> float:
    unit = name.rpartition("_")[2]
    return (
        float(f"{x:.{DIGITS[unit]}g}")
        if unit in ("ms", "spread")
        else round(x, DIGITS[unit])
        if unit in DIGITS
        else float(f"{x:.2g}")
    )


class Lost(Exception):
    """A process that ended, or sent nothing within the limit; `peer` is the one whose step it was, or empty."""

    def __init__(self, peer: str, why: str) -> None:
        self.peer, self.why = peer, why
        super().__init__(why)


class Child:
    """A process that measures one cell, or without one the machine."""

    def __init__(self, attempt: Attempt | None, setup: Setup, folder: Path, module: Path) -> None:
        self.attempt, self.setup, self.folder = attempt, setup, folder
        self.step = self.doing = ""
        self.imported = False
        self.rest = b""
        folder.mkdir()
        caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, len(os.sched_getaffinity(0)) // setup.jobs))}
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "attngen.bench.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**threads, **os.environ, **caches},
                start_new_session=True,  # so that its children can be ended with it
            )
        job: dict[str, Any] = {"clock": setup.clock, "peers_from": setup.peers_from, "spec": None}
        if attempt:
            c = attempt.cell
            job |= {
                "spec": c.spec.canonical(),
                "sizes": [c.dtype, c.batch, c.heads, c.kv_heads, c.n_q, c.n_kv],
                "call": dict(c.call),
            }
            job |= {"device": setup.device, "folder": str(module), "peers": attempt.peers, "rounds": setup.rounds}
            job |= {"host": setup.host, "masks": setup.masks or c.grid in TABLED}
        self.send(json.dumps(job))

    def send(self, line: str) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):  # the process has died, which reading from it will show
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def until(self, key: str, limit_s: float) -> dict[str, Any]:
        """Process its messages up to one with a key; Lost if it ends before, or sends nothing within the limit."""
        while True:
            message = self._message(limit_s)
            if key in message:
                return message
            if "error" in message:
                raise AttngenError(message["error"])
            self.step, self.doing = message.get("step", self.step), message.get("doing", self.doing)
            if self.attempt:
                self.attempt.take(message)

    def go(self) -> Lost | None:
        """Let it run its next stage; return what was lost if it did not reach the end."""
        try:
            if not self.imported:
                self.until("imported", START_S)
                self.imported = True
            self.send("go")
            self.until("ready", self.setup.limit_s)
        except Lost as lost:
            self.stop()
            return lost
        return None

    def _message(self, limit_s: float) -> dict[str, Any]:
        assert self.process.stdout
        deadline = time.monotonic() + limit_s
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Lost(self.step, f"{self.doing or 'start'}: no end within {limit_s:g} s")
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                raise Lost(self.step, f"{self.doing or 'start'}: {self._end()}")
            self.rest += read
        line, _, self.rest = self.rest.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _end(self) -> str:
        """Return how it ended, and the last error that it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GONE_S)
        code = self.process.poll()
        state = (
            "still runs"
            if code is None
            else f"ended by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with status {code}"
        )
        log = (self.folder / "log").read_text(errors="replace").splitlines()
        last = next((line for line in reversed(log) if "Error" in line), "")
        return f"its process {state}" + (f" ({sentence(last)})" if last else "")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End it and its children."""
        if self.process.returncode is not None and not self.folder.exists():
            return
        self.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        shutil.rmtree(self.folder, ignore_errors=True)


def machine(setup: Setup, folder: Path) -> dict[str, Any]:
    """Return the GPU, the versions and the peaks of this run; AttngenError if there is no device."""
    child = Child(None, setup, folder / "machine", folder)
    try:
        found: dict[str, Any] = child.until("machine", START_S)["machine"]
    except Lost as lost:
        raise AttngenError(f"the GPU cannot be measured: {lost.why}") from None
    finally:
        child.stop()
    return {**found, **{key: round(found[key], 3) for key in ("matmul_tflops", "copy_tb_s")}}


def build(specs: Sequence[Spec], folder: Path) -> dict[str, Path]:
    """Generate the modules of specs; return their folders by name."""
    from attngen.codegen.files import write_module
    from attngen.codegen.render import render
    from attngen.lowering.pipeline import lower

    for spec in specs:
        try:
            write_module(render(lower(spec)), folder / spec.name)
        except BuildError as error:
            raise SpecError(f"the spec {spec.name}: {error}") from None
    return {spec.name: folder / spec.name for spec in specs}


def run(work: Work, setup: Setup, folder: Path, results: Results, watch: Callable[[str], None]) -> Iterator[list[Line]]:
    """Measure each cell with its peers; yield the lines of each cell when it is done.

    `results` has the machine, and gets the lines, in the order of the cells. `watch` gets progress messages.
    """
    watch("generating modules")
    cells, peers = list(work), dict(work)
    modules = build(list({c.spec.name: c.spec for c in cells if not c.asked("function")}.values()), folder)
    attempts = [Attempt(c, [p for p in peers[c] if not setup.cannot(c, p)]) for c in cells]
    pending = deque(a for a in attempts if a.peers)
    count = 0
    done: list[Child] = []

    def keep(attempt: Attempt) -> list[Line]:
        lines = attempt.lines(peers[attempt.cell], setup, results.machine)
        results.lines.extend(lines)
        results.lines.sort(key=lambda line: cells.index(line.cell))
        return lines

    def start() -> list[Child]:
        """Start the next processes, which import what they need and wait."""
        nonlocal count
        found: list[Child] = []
        while pending and len(found) < setup.jobs:
            attempt, count = pending.popleft(), count + 1
            found.append(Child(attempt, setup, folder / f"cell{count}", modules.get(attempt.cell.spec.name, folder)))
            done.append(found[-1])
        return found

    for attempt in attempts:
        if not attempt.peers:
            yield keep(attempt)
    try:
        batch = start()
        while batch:
            watch(f"compiling {len(batch)} of {len(batch) + len(pending)} cells that are left")
            with ThreadPoolExecutor(len(batch)) as pool:
                try:
                    lost = list(pool.map(Child.go, batch))
                except BaseException:  # on an interrupt, do not wait for them
                    for child in batch:
                        child.kill()
                    raise
            upcoming = start()
            for child, gone in zip(batch, lost):
                assert child.attempt
                watch(f"measuring {child.attempt.cell}")
                gone = gone or child.go()
                child.stop()
                again = _without(child.attempt, gone) if gone else None
                if again:
                    pending.append(again)
                    continue
                yield keep(child.attempt)
            batch = upcoming or start()
    finally:
        for child in done:
            child.stop()


def _without(attempt: Attempt, gone: Lost) -> Attempt | None:
    """Return the cell without the lost peer, or None if no peer is left. If the step had no peer, all are lost."""
    if not gone.peer:
        attempt.lost |= dict.fromkeys(attempt.peers, gone.why)
        return None
    reasons = attempt.whys.get(gone.peer, [])
    lost = {**attempt.lost, gone.peer: reasons[-1] if reasons else gone.why}
    rest = [name for name in attempt.peers if name != gone.peer]
    if not rest:
        attempt.lost = lost
        attempt.figures.clear()
        return None
    return Attempt(attempt.cell, rest, lost)


def progress(lines: Sequence[Line]) -> str:
    """Return a cell in one line: TFLOP/s forward and backward of each peer; TB/s with a KV cache."""
    if lines and lines[0].cell.cached:
        return (
            "; ".join(f"{x.peer} {x.figures.get('read_tb_s', '-')}{f' ({x.why})' if x.why else ''}" for x in lines)
            + " TB/s"
        )
    return (
        "; ".join(f"{x.peer} {_rate(x, 'fwd')}/{_rate(x, 'bwd')}{f' ({x.why})' if x.why else ''}" for x in lines)
        + " TFLOP/s"
    )


def _rate(line: Line, direction: str) -> str:
    rate = line.figures.get(f"{direction}_tflops")
    return "-" if rate is None else f"{rate:.0f}"
