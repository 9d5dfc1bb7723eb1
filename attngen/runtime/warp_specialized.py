"""Warp-specialized kernels in Gluon: whether this machine can run them, and the tile counters that programs share."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch

from attngen.runtime.private import current_stream

CHOICE = "ATTNGEN_BACKEND"  # environment variable: `triton`, or the name of a file of warp-specialized kernels
# Versions of Triton for which the machine code of these kernels was inspected (docs/versions.md): no wgmma is
# serialized, and nothing writes an operand of a wgmma before its wait. The ptxas of Triton 3.6 to 3.8 can do that
# (triton#11781). Other versions were not inspected.
TRUSTED = ("3.6", "3.7", "3.8", "3.9")


@functools.cache
def warp_specialized(kernels: ModuleType, backend: str) -> ModuleType | None:
    """Return the file of a module's warp-specialized kernels; None if this Triton is not trusted to compile them, or
    the environment says `triton`.

    Raise ValueError if the environment asks for a backend that the module does not have. Warn once of a Triton that is
    not trusted.
    """
    asked = os.environ.get(CHOICE, "")
    if asked not in ("", "triton", backend):
        raise ValueError(
            f"attention: {CHOICE} is `{asked}` in the environment; expected triton or {backend}, or nothing"
        )
    if asked == "triton":
        return None
    try:
        found = ".".join(version("triton").split(".")[:2])
    except PackageNotFoundError:  # Triton is installed under another name
        found = ""
    if found and found not in TRUSTED:
        known = f"{', '.join(TRUSTED)}, whose machine code of its kernels for {backend} was read"
        warnings.warn(f"attention: Triton {found} is not one of {known}: portable kernels are used", stacklevel=2)
        return None
    return importlib.import_module(f"{kernels.__name__.rpartition('.')[0]}.{backend}")


_COUNTERS: dict[tuple[int, int], torch.Tensor] = {}  # by device and stream
# By device: counters that no graph has taken yet. This module has to stay alive while graphs run.
_OF_GRAPHS: dict[int, Iterator[torch.Tensor]] = {}
# Number of captured launches of this module, per device, whose counters are zeroed in advance. Later launches, and
# launches that are captured before any other launch, zero theirs with a kernel of the graph.
CAPTURED = 2**14


def counter_of(device: int) -> torch.Tensor:
    """Return the tile counter of a launch: its first two numbers are 0 before the launch and after it.

    Launches on a stream run one after the other and share a counter. A launch that a graph captures gets its own,
    because the graph may run concurrently with others.
    """
    if torch.cuda.is_current_stream_capturing():
        for found in _OF_GRAPHS.get(device, ()):
            return found
        return torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
    key = device, current_stream(device)
    if key not in _COUNTERS:
        if device not in _OF_GRAPHS:
            _OF_GRAPHS.setdefault(device, map(_zeros(device, CAPTURED).__getitem__, range(CAPTURED)))
        _COUNTERS[key] = _zeros(device, 1)[0]
        # Launches may still run when the module is freed.
        _COUNTERS[key].record_stream(torch.cuda.current_stream(device))
    return _COUNTERS[key]


def _zeros(device: int, rows: int) -> torch.Tensor:
    """Return rows of four zeros: 16 bytes, because kernels need aligned counters.

    A separate thread allocates them: while torch.compile prepares a graph, allocations of its thread belong to the
    graph.
    """

    def made() -> torch.Tensor:
        found = torch.zeros(rows, 4, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.current_stream(device).synchronize()  # graphs and launches run on any stream
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()
