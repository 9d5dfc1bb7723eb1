"""Kernels whose warps have roles, of Gluon: whether this machine can run them, and the counters that they share."""

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

CHOICE = "ATTNGEN_BACKEND"  # in the environment: `triton`, or the name of a file of such kernels
# Versions of Triton under which machine code of such kernels was read (docs/versions.md): no product is serialised, and
# nothing writes an operand of a product before its wait. ptxas of 3.6 to 3.8 can do that (triton#11781). Other versions
# are not known to keep to it.
TRUSTED = ("3.6", "3.7", "3.8", "3.9")


@functools.cache
def divided(kernels: ModuleType, backend: str) -> ModuleType | None:
    """The file of a module's divided kernels; None where this Triton cannot run them, or the environment says `triton`.

    Raises ValueError if the environment asks for what the module does not have. Warns once of a Triton that is not
    trusted.
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
    except PackageNotFoundError:  # a Triton of another name
        found = ""
    if found and found not in TRUSTED:
        about = f"Triton {found} is not one of {', '.join(TRUSTED)}, whose machine code of its kernels for {backend} was read"
        warnings.warn(f"attention: {about}: portable kernels are used", stacklevel=2)
        return None
    return importlib.import_module(f"{kernels.__name__.rpartition('.')[0]}.{backend}")


_COUNTERS: dict[tuple[int, int], torch.Tensor] = {}  # of each device and stream
_OF_GRAPHS: dict[
    int, Iterator[torch.Tensor]
] = {}  # of each device: those that no graph has yet. Graphs need this module while they run.
# Launches of this module that graphs capture, on a device, whose counters are 0 already. Later ones, and those before
# any other launch, set theirs to 0 with a kernel of the graph.
CAPTURED = 2**14


def counter_of(device: int) -> torch.Tensor:
    """Numbers by which the programs of a launch share its tiles: the first two are 0 before the launch and after it.

    Launches on one stream follow each other and take the same. One that a graph captures gets its own: the graph may
    run beside others.
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
        _COUNTERS[key].record_stream(
            torch.cuda.current_stream(device)
        )  # launches may still run where the module is forgotten
    return _COUNTERS[key]


def _zeros(device: int, rows: int) -> torch.Tensor:
    """Rows of four zeros, of 16 bytes, as kernels want counters aligned.

    A thread of its own makes them: while torch.compile prepares a graph, what its thread allocates is the graph's.
    """

    def made() -> torch.Tensor:
        found = torch.zeros(rows, 4, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.current_stream(device).synchronize()  # graphs and launches run on any stream
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()
