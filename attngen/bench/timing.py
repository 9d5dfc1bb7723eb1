"""Times on a CUDA device, for comparisons: the calls interleaved, the L2 flushed, inputs rotated, clocks warm.

Calls of microseconds, as over a cache, are timed in CUDA graphs of many of them, whose inputs rotate through more than
the L2 holds.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
import triton

Call = Callable[[int], object]  # takes the number of the turn, by which it picks one of several sets of inputs

FLUSH_BYTES = 2**28  # several times the largest L2
ROUND_MS = 12.0  # of device time that one call gets in a round, as far as 3 to 10 turns go
LEAST_CALLS = 8  # of a graph of steps
CYCLES_PER_US = 2000  # of torch.cuda._sleep: no GPU's clock is much faster
_flush: dict[torch.device, torch.Tensor] = {}
_sleep: Callable[[int], None] = torch.cuda._sleep  # these have no types
_cudnn: Callable[[], int] = torch.backends.cudnn.version
_event: Callable[..., Any] = torch.cuda.Event
_stream: Callable[[], Any] = torch.cuda.Stream


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: the median of each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median of the rounds."""
        return (max(self.rounds) - min(self.rounds)) / self.median


def host_us(call: Call, turns: int = 50, rounds: int = 5) -> float:
    """Microseconds of the host's time that one call takes to launch its work: the fastest round, the device kept
    busy meanwhile."""
    call(0)
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        _sleep(CYCLES_PER_US * 100 * turns)  # so that no call waits for the device, or finds it idle
        started = time.perf_counter()
        for turn in range(turns):
            call(turn)
        found.append((time.perf_counter() - started) / turns * 1e6)
    torch.cuda.synchronize()
    return min(found)


def wall_ms(function: Callable[[], object], turns: int = 20) -> float:
    """Milliseconds of a call between synchronisations: the median of some turns, after three that warm it up."""
    found = []
    for _ in range(turns + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) * 1e3)
    return statistics.median(found[3:])


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """It under torch.compile, as one graph of constant sizes, without CUDA graphs; no other compiled function is
    left in memory."""
    torch.compiler.reset()  # else guards of those before it would be tried first
    return torch.compile(function, fullgraph=True, dynamic=False)


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """What launches again all that a function launches: the replay of a CUDA graph."""
    graph, here, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), _stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        function()
    here.wait_stream(side)
    with (
        torch.cuda.stream(here),
        torch.cuda.graph(graph),
    ):  # a capture that fails does not come back to this stream by itself
        results = function()

    def replay(kept: object = results) -> None:
        graph.replay()

    return replay


def device_times(
    calls: Mapping[str, Call], rounds: int = 5, say: Callable[[str], object] = lambda name: None
) -> dict[str, Times]:
    """Times of calls on the device, in milliseconds, without the host's.

    Every call is warmed up; in each round each gets 3 to 10 turns in a row, and rounds go through the calls in
    alternating order. Before a turn the L2 is flushed. The host runs ahead of the device, so that no turn waits for a
    launch. `say` is told whose turns come next.
    """
    names = list(calls)
    turns, host = {}, {}
    for name, call in calls.items():
        say(name)
        call(0)
        host[name] = _launch_us(call)
        turns[name] = max(3, min(10, round(ROUND_MS / statistics.median(_turns(call, 3, host[name])))))
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[:: 1 - i % 2 * 2]:
            say(name)
            found[name].append(statistics.median(_turns(calls[name], turns[name], host[name])))
    return {name: Times(tuple(found[name])) for name in names}


def step_times(
    calls: Mapping[str, Call], sets: int, rounds: int = 5, say: Callable[[str], object] = lambda name: None
) -> dict[str, Times]:
    """Times of calls in milliseconds, as a model makes them in a step: many in a CUDA graph, each on the next of `sets`
    sets of inputs.

    The L2 holds what it holds of the calls before. So inputs of all sets together have to be several times as large as
    it.
    """
    names, turns = list(calls), sets * -(-LEAST_CALLS // sets)
    graphs: dict[str, Callable[[], object]] = {}
    replays: dict[str, int] = {}
    for name, call in calls.items():
        say(name)
        graphs[name] = captured(partial(_each, call, turns))
        replays[name] = max(1, min(20, round(ROUND_MS / max(1e-3, _span(graphs[name], 1)))))
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[:: 1 - i % 2 * 2]:
            say(name)
            found[name].append(_span(graphs[name], replays[name]) / replays[name] / turns)
    return {name: Times(tuple(found[name])) for name in names}


def _each(call: Call, turns: int) -> None:
    for turn in range(turns):
        call(turn)


def _span(replay: Callable[[], object], times: int) -> float:
    """Milliseconds from the first to the last of some replays in a row, after one that is not counted."""
    start, end = _event(enable_timing=True), _event(enable_timing=True)
    replay()
    start.record()
    for _ in range(times):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _launch_us(call: Call) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call(1)
    return (time.perf_counter() - started) * 1e6


def _turns(call: Call, turns: int, host: float) -> Sequence[float]:
    """Milliseconds of each of some turns; `host` is how many microseconds the host takes for one."""
    device = torch.device("cuda", torch.cuda.current_device())
    if device not in _flush:
        _flush[device] = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    torch.cuda.synchronize()
    _sleep(int(CYCLES_PER_US * min(2e5, 1.5 * turns * (host + 20))))
    spans = []
    for turn in range(turns):
        _flush[device].zero_()
        start, end = _event(enable_timing=True), _event(enable_timing=True)
        start.record()
        call(turn)
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in spans]


@dataclass(frozen=True)
class Roofs:
    """What this GPU does now: a large bf16 matrix product in TFLOP/s, a large copy in TB/s (bytes read and written)."""

    matmul_tflops: float
    copy_tb_s: float


def roofs(rounds: int = 3) -> Roofs:
    """Measure both; needs 9 GiB for the moment. The copy is of 4 GiB, which no L2 holds."""
    n, elements = 8192, 2**30
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(elements, device="cuda")
    y = torch.empty_like(x)
    times = device_times({"matmul": lambda turn: torch.mm(a, b), "copy": lambda turn: y.copy_(x)}, rounds)
    return Roofs(2 * n**3 / times["matmul"].median / 1e9, 2 * 4 * elements / times["copy"].median / 1e9)


# ---------------------------------------------------------------------------------------------- the device, apart from time


def machine() -> dict[str, Any]:
    """What was measured on: the GPU, the versions, and the roofs; a RuntimeError where torch sees no CUDA device."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    found = roofs()
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    versions["cudnn"] = str(_cudnn())
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["fa4"] = metadata.version("flash-attn-4")
    return {**versions, "matmul_tflops": found.matmul_tflops, "copy_tb_s": found.copy_tb_s}


def wait() -> None:
    """Until the device has done what it was asked for. Fails where a kernel has failed."""
    torch.cuda.synchronize()


def settle() -> None:
    """Wait, and give back what nothing holds: cached memory, workspaces of libraries."""
    wait()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def free_bytes() -> int:
    """Memory that this process can still get."""
    settle()
    return torch.cuda.mem_get_info()[0]


def held_bytes() -> int:
    """Memory that tensors hold now."""
    return torch.cuda.memory_allocated()


def peak_bytes(function: Callable[[], object]) -> tuple[int, int]:
    """(allocated, reserved) at the peaks of a function, both above what was allocated before.

    Of what is reserved, some may have been before: the rest of blocks that tensors held. It is never less than what is
    allocated.
    """
    settle()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    wait()
    return torch.cuda.max_memory_allocated() - held, torch.cuda.max_memory_reserved() - held
