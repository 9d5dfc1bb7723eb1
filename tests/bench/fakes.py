"""Peers and a clock for the CPU. The peers fail on purpose, in a real child process, in the ways peers fail on a
GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attngen.bench.cases.problem import Inputs, Problem
from attngen.bench.peers import PEERS as REAL
from attngen.bench.peers import Call, Peer
from attngen.bench.timing import Times


def machine() -> dict[str, Any]:
    return {"gpu": "none", "torch": "2", "triton": "3", "matmul_tflops": 0.5, "copy_tb_s": 0.5}


def wait() -> None:
    pass


def settle() -> None:
    pass


def free_bytes() -> int:
    return 2**40


def held_bytes() -> int:
    return 0


def peak_bytes(function: Callable[[], object]) -> tuple[int, int]:
    function()
    return 3 * 2**20, 4 * 2**20


def host_us(call: Callable[[int], object], iterations: int) -> float:
    call(0)
    return 10.0 + iterations


def wall_ms(function: Callable[[], object]) -> float:
    function()
    return 0.25


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, backend="eager")


capturing = False


def captured(function: Callable[[], object]) -> Callable[[], object]:
    global capturing
    capturing = True
    try:
        function()
    finally:
        capturing = False
    return function


def device_times(
    calls: Mapping[str, Callable[[int], object]], rounds: int, say: Callable[[str], object]
) -> dict[str, Times]:
    """Time of the n-th call: n + 0.5 milliseconds."""
    found = {}
    for i, (name, call) in enumerate(calls.items(), 1):
        say(name)
        call(0), call(1)
        found[name] = Times(tuple(i + 0.5 + 0.01 * r for r in range(rounds)))
    return found


def step_times(
    calls: Mapping[str, Callable[[int], object]], sets: int, rounds: int, say: Callable[[str], object]
) -> dict[str, Times]:
    """Time of the n-th call: n + 0.5 microseconds."""
    assert sets > 1
    return {
        name: Times(tuple(x / 1000 for x in times.rounds)) for name, times in device_times(calls, rounds, say).items()
    }


def _fails(problem: Problem) -> Call:
    raise ValueError(f"{problem.folder}/x.cu: no kernel image\nand more")


def _wrong(problem: Problem) -> Call:
    right = REAL["naive"].prepare(problem).forward
    return Call(lambda x: 2 * right(x), note="doubled")


def _hangs(problem: Problem) -> Call:
    time.sleep(1000)
    raise AssertionError


def _dies(problem: Problem) -> Call:
    right, calls = REAL["naive"].prepare(problem).forward, [0]

    def forward(x: Inputs) -> torch.Tensor:
        calls[0] += 1
        if calls[0] > 3:  # the first call, memory and results come first, then the timed calls
            os.abort()
        return right(x)

    return Call(forward)


def _late(problem: Problem) -> Call:
    """A peer whose second backward fails."""
    right, calls = REAL["naive"].prepare(problem).forward, [0]

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
            return grad

    late: Callable[[torch.Tensor], torch.Tensor] = Late.apply
    return Call(lambda x: late(right(x)))


def _awkward(problem: Problem) -> Call:
    """A peer that can be neither compiled nor captured."""
    right = REAL["naive"].prepare(problem).forward

    def forward(x: Inputs) -> torch.Tensor:
        torch._dynamo.graph_break()
        if capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return right(x)

    return Call(forward)


def _prepares(problem: Problem) -> Call:
    """A peer that prepares the mask before the call. One of its two ways to prepare it fails."""
    right = REAL["naive"].prepare(problem).forward
    made: list[int] = []

    def fails() -> object:
        raise RuntimeError("no eager mask here")

    def whole() -> Callable[[Inputs], torch.Tensor]:
        assert made, "`whole` is called last"
        return right

    return Call(right, masks={"mask_ms": lambda: made.append(1), "mask_eager_ms": fails}, whole=whole)


def _no_reason(cell: object) -> str:
    return ""


PEERS = {
    "ours": Peer("ours", _no_reason, REAL["naive"].prepare, compiles=True),
    "fails": Peer("fails", _no_reason, _fails),
    "wrong": Peer("wrong", _no_reason, _wrong),
    "hangs": Peer("hangs", _no_reason, _hangs, compiles=True),
    "dies": Peer("dies", _no_reason, _dies),
    "late": Peer("late", _no_reason, _late),
    "awkward": Peer("awkward", _no_reason, _awkward),
    "prepares": Peer("prepares", _no_reason, _prepares),
    "refuses": Peer("refuses", lambda cell: "not today", _fails),
    "math": REAL["math"],
}
