"""One cell in a separate process: `python -m attngen.bench.child`, started by run.py, with empty caches of compiled
kernels.

It reads a job as a line of JSON, imports what it needs, and waits for a line. On that line it makes the first calls of
the peers that compile. After a second line, when no other process uses the GPU, it does everything else: the other
peers' first calls, memory, comparison of results with the first peer's, times, host times, costs of preparing the mask.
It reports every finding at once, one JSON message per line, and announces each step with its peer, so that run.py knows
which peer's step it was if the process dies or hangs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attngen.bench.cases.cache import problem_of
from attngen.bench.cases.grids import Cell
from attngen.bench.cases.problem import Inputs
from attngen.bench.peers import Call, Forward, Peer
from attngen.bench.results import DIFFERS, RESULTS, sentence
from attngen.conformance.oracle import relative_error
from attngen.spec import make_spec

SETS = 3  # most sets of inputs through which calls rotate
STEP_SETS = 64  # the same for calls with a KV cache
STEP_BYTES = 2**30  # bytes that all these sets read, if memory allows: many times the largest L2
HEAVY = 1 / 16  # share of the free memory; the backward of a peer that keeps more for it is timed separately
HOST_MS = 100.0  # device time for a round of host times
NAN = 1e9  # stands for NaN, which JSON does not have

Tell = Callable[..., None]


def _channel() -> Tell:
    """Return a function that sends a message to the parent; redirect other output to stderr."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**message: Any) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    return tell


class Bench:
    """The peers of one cell."""

    def __init__(self, job: dict[str, Any], known: dict[str, Peer], clock: Any, tell: Tell) -> None:
        cell = replace(Cell("", make_spec(job["spec"]), *job["sizes"]), call=tuple(job["call"].items()))
        self.problem = problem_of(cell, job["device"], Path(job["folder"]))
        self.peers = {name: known[name] for name in job["peers"]}
        self.rounds, self.host, self.masks, self.clock, self.tell = (
            job["rounds"],
            job["host"],
            job["masks"],
            clock,
            tell,
        )
        self.calls: dict[str, Call] = {}  # of the working peers, those that compile first
        self.no_backward: set[str] = set() if cell.trains else set(self.peers)

    def prepare(self) -> None:
        """Make the first calls of peers that compile."""
        self.tell(step="", doing="making the inputs")
        self.tell(pairs=self.problem.pairs(), read=self.problem.read_bytes)
        self.first_calls(compiles=True)
        self.clock.settle()

    def measure(self) -> None:
        """Run all steps that need exclusive use of the device."""
        self.first_calls(compiles=False)
        self.calls = {name: self.calls[name] for name in self.peers if name in self.calls}
        for name in list(self.calls):
            self.memory(name)
        held = self.check()
        if self.problem.cell.cached:
            self.step_times()
        else:
            self.times(held)
        if self.masks:
            self.mask_times()

    # ------------------------------------------------------------------------------------------ steps

    @contextlib.contextmanager
    def step(self, name: str, doing: str, loses: bool = True) -> Any:
        """Run one peer's step. An error in it is reported and, with `loses`, excludes the peer from all later steps."""
        self.tell(step=name, doing=doing)
        try:
            yield
        except Exception as error:  # peers' libraries raise errors of any kind
            self.lose(name, doing, error, loses)

    def lose(self, name: str, doing: str, error: Exception, loses: bool) -> None:
        text = "out of memory" if isinstance(error, torch.OutOfMemoryError) else sentence(str(error))
        kind = "" if type(error) in (RuntimeError, torch.OutOfMemoryError) else f"{type(error).__name__}: "
        self.tell(peer=name, why=f"{doing}: {kind}{text}")
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        if loses:
            self.calls.pop(name, None)
        try:
            self.clock.settle()
        except Exception:  # the device's context is lost, and this process with it
            os._exit(1)

    @contextlib.contextmanager
    def backward(self, name: str, doing: str) -> Any:
        """Run a step in which an error excludes the peer from all steps with a backward."""
        self.no_backward.add(name)
        with self.step(name, doing, loses=False):
            yield
            if self.problem.cell.trains:
                self.no_backward.discard(name)

    def first_calls(self, compiles: bool) -> None:
        chosen = [name for name, peer in self.peers.items() if peer.compiles == compiles]
        inputs = self.problem.make_inputs(0) if chosen else None
        for name in chosen:
            assert inputs is not None
            self.clock.settle()
            started = time.perf_counter()
            out = None
            with self.step(name, "first call"):
                call = self.peers[name].prepare(self.problem)
                with call.around():
                    out = call.forward(inputs)
                self.clock.wait()
                self.calls[name] = call
                self.tell(peer=name, note=call.note, first_fwd_s=time.perf_counter() - started)
            if out is not None and name in self.calls and name not in self.no_backward:
                with self.backward(name, "first backward"):
                    inputs.gradients(out)
                    self.clock.wait()
                    self.tell(peer=name, first_s=time.perf_counter() - started)
            del out

    def forward(self, name: str, inputs: Inputs) -> torch.Tensor:
        call = self.calls[name]
        with call.around():
            return call.forward(inputs)

    def both(self, name: str, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return (out, gradients) of one call."""
        out = self.forward(name, inputs)
        return (out, *inputs.gradients(out))

    def memory(self, name: str) -> None:
        """Report the peak memory of inputs, forward and backward (if the spec has one), above the memory before."""
        if name not in self.no_backward or not self.problem.cell.trains:
            with self.backward(name, "memory"):
                allocated, reserved = self.clock.peak_bytes(lambda: self.both(name, self.problem.make_inputs(0)))
                self.tell(peer=name, allocated_mib=allocated / 2**20, reserved_mib=reserved / 2**20)

    def check(self) -> dict[str, int]:
        """Compare results with those of the first peer, unless dropout makes them random; return the bytes that each
        peer keeps for its backward."""
        inputs, held = self.problem.make_inputs(0), {}
        reference: tuple[torch.Tensor, ...] | None = None
        first, random = "", bool(self.problem.cell.asked("dropout_p"))
        for name in list(self.calls):
            found: tuple[torch.Tensor, ...] = ()
            with self.step(name, "results"):
                before = self.clock.held_bytes()
                out = self.forward(name, inputs)
                held[name] = self.clock.held_bytes() - before
                found = (out.detach(),)
                if name not in self.no_backward:
                    with self.backward(name, "gradients"):
                        found = (*found, *inputs.gradients(out))
                del out
                if reference is None:
                    reference, first = found, name
                    continue
                if not random:
                    self.differences(name, first, found, reference)
        return held

    def differences(
        self, name: str, first: str, found: tuple[torch.Tensor, ...], reference: tuple[torch.Tensor, ...]
    ) -> None:
        """Report how far each of a peer's results is from the first peer's, and the largest difference."""
        labels = (*RESULTS[:4], *(f"d{i.name}" for i in self.problem.cell.spec.learned()))
        errors = {label: relative_error(x, ref) for label, x, ref in zip(labels, found, reference)}
        numbers = {label: min(error, NAN) if error == error else NAN for label, error in errors.items()}
        worst = max(numbers, key=lambda label: numbers[label])
        figures = {f"{label}_differs": numbers[label] for label in RESULTS if label in numbers}
        if learned := [numbers[label] for label in labels[4:] if label in numbers]:
            figures["learned_differs"] = max(learned)
        self.tell(peer=name, differs=numbers[worst], **figures)
        if not numbers[worst] <= DIFFERS:
            self.tell(peer=name, why=f"{worst} differs from that of {first} by {errors[worst]:.1e}")

    def times(self, held: dict[str, int]) -> None:
        """Measure forward, backward and both, with the peers interleaved; the backward of peers that keep much for it
        separately."""
        self.tell(step="", doing="making the inputs")
        free, one = self.clock.free_bytes(), self.problem.set_bytes
        sets = [self.problem.make_inputs(i) for i in range(max(1, min(SETS, int(free / 8 / one))))]
        light = [name for name in self.calls if held.get(name, 0) <= HEAVY * free]
        heavy = [[name] for name in self.calls if name not in light]

        def rotate(function: Callable[[str, Inputs], object], name: str, number: int) -> object:
            return function(name, sets[number % len(sets)])

        medians = self.timed("fwd", {name: partial(rotate, self.forward, name) for name in self.calls})
        for group in (light, *heavy):
            outs: dict[str, list[torch.Tensor]] = {}
            few = sets[: max(1, min(SETS, int(free / 4 / max(1, sum(held[name] for name in group if name in held)))))]
            for name in group:
                if name in self.calls and name not in self.no_backward:
                    with self.step(name, "bwd", loses=False):
                        outs[name] = [self.forward(name, inputs) for inputs in few]
            pairs = {name: list(zip(few, made)) for name, made in outs.items()}
            self.timed("bwd", {name: partial(_backward, pair) for name, pair in pairs.items()})
            del outs, pairs
            self.clock.settle()
        self.timed(
            "both", {name: partial(rotate, self.both, name) for name in self.calls if name not in self.no_backward}
        )
        self.host_times(sets, medians)

    def step_times(self) -> None:
        """Measure a call with a KV cache as one of many in a CUDA graph, with the peers interleaved."""
        self.tell(step="", doing="making the inputs")
        few = min(
            STEP_SETS,
            -(-STEP_BYTES // max(1, self.problem.read_bytes)),
            int(self.clock.free_bytes() / 4 / self.problem.set_bytes),
        )
        sets = [self.problem.make_inputs(i) for i in range(max(1, few))]

        def rotate(name: str, number: int) -> object:
            return self.forward(name, sets[number % len(sets)])

        measure = partial(self.clock.step_times, sets=len(sets), rounds=self.rounds)
        self.host_times(sets, self.timed("fwd", {name: partial(rotate, name) for name in self.calls}, measure))

    def host_times(self, sets: list[Inputs], medians: dict[str, float]) -> None:
        """Measure the host's time of a forward call: eager with gradients; on request also in the other modes."""
        modes = {
            "host_us": ("host time", True, self.eager),
            "host_nograd_us": ("host time without gradients", False, self.eager),
            "host_compiled_us": ("host time compiled", True, self.compiled),
            "host_compiled_nograd_us": ("host time compiled, without gradients", False, self.compiled),
            "host_graph_us": ("host time in a CUDA graph", False, self.captured),
        }
        for figure in modes if self.host else ("host_us",):
            doing, gradients, prepare = modes[figure]
            for name in list(self.calls):
                iterations = int(HOST_MS / max(medians.get(name, 1.0), 0.01))
                with self.step(name, doing, loses=False), self.calls[name].around(), torch.set_grad_enabled(gradients):
                    us = self.clock.host_us(prepare(self.calls[name].forward, sets), max(3, min(50, iterations)))
                    self.tell(peer=name, **{figure: us})

    def mask_times(self) -> None:
        """Measure the wall time and memory of preparing the mask, for peers that do, and the time and memory of calls
        that include it."""
        wholes: dict[str, Forward] = {}
        for name in [name for name in self.calls if self.calls[name].masks]:
            call = self.calls[name]
            for figure, make in call.masks.items():
                with self.step(name, "preparing the mask", loses=False):
                    self.tell(peer=name, **{figure: self.clock.wall_ms(make)})
            with self.step(name, "memory of the mask", loses=False):
                self.tell(peer=name, mask_mib=self.clock.peak_bytes(call.masks["mask_ms"])[0] / 2**20)
            with self.step(name, "a call that prepares the mask", loses=False):
                assert call.whole
                whole = call.whole()
                self.whole(whole)
                self.tell(peer=name, whole_mib=self.clock.peak_bytes(partial(self.whole, whole))[0] / 2**20)
                wholes[name] = whole
        inputs = self.problem.make_inputs(0)
        self.timed("whole_fwd", {name: partial(_first, whole, inputs) for name, whole in wholes.items()})

    def whole(self, forward: Forward) -> None:
        """Run one forward and, if the spec has one, backward on fresh inputs."""
        inputs = self.problem.make_inputs(0)
        out = forward(inputs)
        if out.requires_grad:
            torch.autograd.grad(out, inputs.leaves, inputs.grad)

    def eager(self, forward: Forward, sets: list[Inputs]) -> Callable[[int], object]:
        return lambda number: forward(sets[number % len(sets)])

    def compiled(self, forward: Forward, sets: list[Inputs]) -> Callable[[int], object]:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *learned: torch.Tensor) -> torch.Tensor:
            return forward(Inputs(q, k, v, learned, q))  # no gradient of the output is read

        function = self.clock.compiled(attend)
        return lambda number: function(*sets[number % len(sets)].leaves)

    def captured(self, forward: Forward, sets: list[Inputs]) -> Callable[[int], object]:
        replay = self.clock.captured(lambda: forward(sets[0]))
        return lambda number: replay()

    def timed(self, direction: str, calls: dict[str, Callable[[int], object]], measure: Any = None) -> dict[str, float]:
        """Report the times of calls, measured by the clock's `device_times` or another of its functions; return their
        medians in ms. If a call fails, it is left out and the others start again."""
        measure = measure or partial(self.clock.device_times, rounds=self.rounds)
        while calls:
            current = [next(iter(calls))]

            def say(name: str, current: list[str] = current) -> None:
                current[0] = name
                self.tell(step=name, doing=direction)

            try:
                found = measure(calls, say=say)
            except Exception as error:  # peers' libraries raise errors of any kind
                self.lose(current[0], direction, error, loses=False)
                calls = {name: call for name, call in calls.items() if name != current[0]}
                continue
            for name, times in found.items():
                self.tell(peer=name, **{f"{direction}_ms": times.median, f"{direction}_spread": times.spread})
            return {name: times.median for name, times in found.items()}
        return {}


def _first(forward: Forward, inputs: Inputs, number: int) -> object:
    return forward(inputs)


def _backward(pairs: list[tuple[Inputs, torch.Tensor]], number: int) -> object:
    inputs, out = pairs[number % len(pairs)]
    return inputs.gradients(out)


def main() -> None:
    tell = _channel()
    warnings.simplefilter("ignore")
    job = json.loads(sys.stdin.readline())
    clock, peers = importlib.import_module(job["clock"]), importlib.import_module(job["peers_from"]).PEERS
    if job["spec"] is None:
        try:
            tell(machine=clock.machine())
        except RuntimeError as error:
            tell(error=f"{sentence(str(error))}; `attngen bench --list` shows what would be measured")
        return
    bench = Bench(job, peers, clock, tell)
    tell(imported=True)
    for stage in (bench.prepare, bench.measure):
        if not sys.stdin.readline():
            return
        stage()
        tell(ready=True)


if __name__ == "__main__":
    main()
