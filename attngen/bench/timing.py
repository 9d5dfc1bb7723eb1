"""Times on a CUDA device, for comparisons: the calls interleaved, the L2 flushed, inputs rotated, clocks warm.

Calls of microseconds, such as those with a KV cache, are timed in CUDA graphs. A graph has many calls, whose inputs
rotate through more memory than the L2 has.
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

Call = Callable[[int], object]  # takes the number of the iteration, which selects one of several sets of inputs

FLUSH_BYTES = 2**28  # several times the largest L2
ROUND_MS = 12.0  # device time of one call in a round, within 3 to 10 iterations
LEAST_CALLS = 8  # fewest calls in a graph
CYCLES_PER_US = 2000  # of torch.cuda._sleep: no GPU's clock is much faster
_flush: dict[torch.device, torch.Tensor] = {}
_sleep: Callable[[int], None] = torch.cuda._sleep  # torch has no types for these
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


def host_us(call: Call, iterations: int = 50, rounds: int = 5) -> float:
    """Return the microseconds of host time that one call takes to launch its work, in the fastest round, while the
    device is kept busy."""
    call(0)
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        _sleep(CYCLES_PER_US * 100 * iterations)  # no call waits for the device, or finds it idle
        started = time.perf_counter()
        for i in range(iterations):
            call(i)
        found.append((time.perf_counter() - started) / iterations * 1e6)
    torch.cuda.synchronize()
    return min(found)


def wall_ms(function: Callable[[], object], iterations: int = 20) -> float:
    """Return the milliseconds of a call between synchronisations: the median of its iterations, after three for
    warm-up."""
    found = []
    for _ in range(iterations + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) * 1e3)
    return statistics.median(found[3:])


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function under torch.compile, as one graph of constant sizes, without CUDA graphs; drop all other
    compiled functions."""
    torch.compiler.reset()  # else guards of earlier functions would be tried first
    return torch.compile(function, fullgraph=True, dynamic=False)


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """Capture a function in a CUDA graph; return its replay."""
    graph, here, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), _stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        function()
    here.wait_stream(side)
    with torch.cuda.stream(here), torch.cuda.graph(graph):  # a failed capture does not restore this stream by itself
        results = function()

    def replay(kept: object = results) -> None:
        graph.replay()

    return replay


def device_times(
    calls: Mapping[str, Call], rounds: int = 5, say: Callable[[str], object] = lambda name: None
) -> dict[str, Times]:
    """Return the device times of calls in milliseconds, without the host's.

    Every call is warmed up. In each round each call gets 3 to 10 iterations in a row, and rounds run the calls in
    alternating order. The L2 is flushed before each iteration. The host runs ahead of the device, so that no iteration
    waits for a launch. `say` gets the name of the next call.
    """
    names = list(calls)
    iterations, host = {}, {}
    for name, call in calls.items():
        say(name)
        call(0)
        host[name] = _launch_us(call)
        iterations[name] = max(3, min(10, round(ROUND_MS / statistics.median(_iterations(call, 3, host[name])))))
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[:: 1 - i % 2 * 2]:
            say(name)
            found[name].append(statistics.median(_iterations(calls[name], iterations[name], host[name])))
    return {name: Times(tuple(found[name])) for name in names}


def step_times(
    calls: Mapping[str, Call], sets: int, rounds: int = 5, say: Callable[[str], object] = lambda name: None
) -> dict[str, Times]:
    """Time calls, in milliseconds, as a model runs them in a decoding step. A CUDA graph repeats one call many times,
    each time with the next of `sets` sets of inputs.

    The L2 is not flushed, so the inputs of all sets together must be several times as large as it.
    """
    names, iterations = list(calls), sets * -(-LEAST_CALLS // sets)
    graphs: dict[str, Callable[[], object]] = {}
    replays: dict[str, int] = {}
    for name, call in calls.items():
        say(name)
        graphs[name] = captured(partial(_each, call, iterations))
        replays[name] = max(1, min(20, round(ROUND_MS / max(1e-3, _span(graphs[name], 1)))))
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[:: 1 - i % 2 * 2]:
            say(name)
            found[name].append(_span(graphs[name], replays[name]) / replays[name] / iterations)
    return {name: Times(tuple(found[name])) for name in names}


def _each(call: Call, iterations: int) -> None:
    for i in range(iterations):
        call(i)


def _span(replay: Callable[[], object], times: int) -> float:
    """Return the milliseconds from the first to the last of some replays in a row, after one for warm-up."""
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


def _iterations(call: Call, count: int, host: float) -> Sequence[float]:
    """Return the milliseconds of each iteration; `host` is the number of microseconds that the host takes for one."""
    device = torch.device("cuda", torch.cuda.current_device())
    if device not in _flush:
        _flush[device] = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    torch.cuda.synchronize()
    _sleep(int(CYCLES_PER_US * min(2e5, 1.5 * count * (host + 20))))
    spans = []
    for i in range(count):
        _flush[device].zero_()
        start, end = _event(enable_timing=True), _event(enable_timing=True)
        start.record()
        call(i)
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in spans]


@dataclass(frozen=True)
class Peaks:
    """Measured peaks of this GPU: a large bf16 matrix product in TFLOP/s, a large copy in TB/s (bytes read and
    written)."""

    matmul_tflops: float
    copy_tb_s: float


def peaks(rounds: int = 3) -> Peaks:
    """Measure both; needs 9 GiB temporarily. The copy is of 4 GiB, which no L2 holds."""
    n, elements = 8192, 2**30
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(elements, device="cuda")
    y = torch.empty_like(x)
    times = device_times({"matmul": lambda i: torch.mm(a, b), "copy": lambda i: y.copy_(x)}, rounds)
    return Peaks(2 * n**3 / times["matmul"].median / 1e9, 2 * 4 * elements / times["copy"].median / 1e9)


# ---------------------------------------------------------------------------------------------- the device


def machine() -> dict[str, Any]:
    """Return the GPU, the versions, and the measured peaks; RuntimeError if torch sees no CUDA device."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    found = peaks()
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    versions["cudnn"] = str(_cudnn())
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["fa4"] = metadata.version("flash-attn-4")
    return {**versions, "matmul_tflops": found.matmul_tflops, "copy_tb_s": found.copy_tb_s}


def wait() -> None:
    """Wait until the device is idle. Raises if a kernel has failed."""
    torch.cuda.synchronize()


def settle() -> None:
    """Wait, and release unused memory: caches, workspaces of libraries."""
    wait()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def free_bytes() -> int:
    """Return the bytes that this process can still allocate."""
    settle()
    return torch.cuda.mem_get_info()[0]


def held_bytes() -> int:
    """Return the bytes that tensors hold now."""
    return torch.cuda.memory_allocated()


def peak_bytes(function: Callable[[], object]) -> tuple[int, int]:
    """Return (allocated, reserved) bytes at the peaks of a function, both above the bytes allocated before.

    The reserved bytes may include some that were reserved before, in blocks with tensors. They are never fewer than the
    allocated bytes.
    """
    settle()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    wait()
    return torch.cuda.max_memory_allocated() - held, torch.cuda.max_memory_reserved() - held
