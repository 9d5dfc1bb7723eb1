"""Times and memory of forward mode, compared with the forward and with naive attention and SDPA. Needs a CUDA GPU.

    python -m attngen.bench.jvp specs/causal_mha.yaml specs/causal_mqa.yaml --n 4096 --n 16384

A jvp is a call with tangents of q, k and v: its forward and the kernel for the output's tangent. `kernel` is the time
of the latter, and `/ fwd` is a time over that of the same peer's forward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from attngen.bench import timing
from attngen.bench.cases.grids import Cell
from attngen.bench.cases.problem import Inputs, Problem
from attngen.bench.peers.base import Call
from attngen.bench.peers.naive import naive
from attngen.bench.peers.ours import ours
from attngen.bench.peers.sdpa import sdpa, sdpa_cannot
from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.ir.heads import SHARINGS
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, load_spec

TOKENS = 16384  # queries of all sequences
HIDDEN = 2048  # elements of all query heads
GROUP = 4  # query heads per K/V head, if they share one
HEADINGS: tuple[str, ...] = (
    "spec",
    "n",
    "peer",
    "fwd ms",
    "jvp ms",
    "/ fwd",
    "kernel ms",
    "/ fwd",
    "MiB fwd",
    "MiB jvp",
)


def cell_of(spec: Spec, n: int) -> Cell:
    """Return a cell with as many sequences and heads as make TOKENS tokens of HIDDEN elements."""
    heads = max(1, HIDDEN // spec.head_dim.v)
    shared = SHARINGS[spec.heads.sharing].kv_heads(heads, GROUP)
    return Cell("", spec, spec.dtype[0], max(1, TOKENS // n), heads, shared, n, n)


def peers(problem: Problem) -> Iterator[tuple[str, Call]]:
    """Yield ours and the peers that run: naive attention, and SDPA's MATH backend, the only one with a jvp."""
    yield "ours", ours(problem)
    yield "naive", naive(problem)
    if not sdpa_cannot(problem.cell):
        yield "sdpa math", sdpa("math", problem)


def with_tangents(call: Call, x: Inputs, along: Inputs) -> Callable[[int], object]:
    """Return a call whose output has a tangent."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return call.forward(Inputs(q, k, v, x.learned, x.grad))

    return lambda iteration: torch.func.jvp(forward, (x.q, x.k, x.v), (along.q, along.k, along.v))


def rows(spec: Spec, n: int, folder: Path, clock: Any = timing, device: str = "cuda") -> Iterator[tuple[str, ...]]:
    """Yield a line per peer; one that runs out of memory says so."""
    write_module(render(lower(spec)), folder)
    problem = Problem(cell_of(spec, n), device, folder)
    x, along = (_detached(problem.make_inputs(number)) for number in (0, 1))
    for name, call in peers(problem):
        try:
            with call.around(), torch.no_grad():
                calls: dict[str, Callable[[int], object]] = {
                    "fwd": partial(_forward, call, x),
                    "jvp": with_tangents(call, x, along),
                }
                memory = {mode: clock.peak_bytes(partial(run, 0))[0] / 2**20 for mode, run in calls.items()}
                times = clock.device_times(calls)
        except torch.OutOfMemoryError:
            yield (spec.name, f"{n}", name, "out of memory", *[""] * 6)
            continue
        fwd, jvp = (times[mode].median for mode in calls)
        kernel = jvp - fwd
        numbers = (f"{fwd:.3f}", f"{jvp:.3f}", f"{jvp / fwd:.2f}", f"{kernel:.3f}", f"{kernel / fwd:.2f}")
        yield (spec.name, f"{n}", name, *numbers, *(f"{memory[mode]:,.0f}" for mode in calls))


def _forward(call: Call, x: Inputs, iteration: int) -> object:
    return call.forward(x)


def _detached(x: Inputs) -> Inputs:
    return Inputs(x.q.detach(), x.k.detach(), x.v.detach(), tuple(y.detach() for y in x.learned), x.grad)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="attngen.bench.jvp", description="Times and memory of forward mode; needs a CUDA GPU."
    )
    parser.add_argument("specs", nargs="+", type=Path, help="spec files")
    parser.add_argument(
        "--n", type=int, action="append", help="queries and keys [default: 4096]; may be given several times"
    )
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no CUDA device")
    machine = timing.machine()
    print(
        f"{machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}; {TOKENS} tokens, hidden size {HIDDEN}"
    )
    table: list[tuple[str, ...]] = [HEADINGS]
    with TemporaryDirectory() as folder:
        for path in given.specs:
            spec = load_spec(path)
            for n in given.n or [4096]:
                table += rows(spec, n, Path(folder) / spec.name)
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADINGS))]
    for line in table:
        print(
            "  ".join(
                text.ljust(w) if i < 3 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths))
            ).rstrip()
        )


if __name__ == "__main__":
    main()
