"""Kernels whose warps have roles, of Gluon: whether this machine can run them, and the counters that they share."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch

from attngen.runtime.private import current_stream

CHOICE = "ATTNGEN_BACKEND"  # in the environment: `triton`, or the name of a file of such kernels
# Versions of Triton under which machine code of such kernels was read (docs/versions.md): no product is serialised, and nothing writes an
# operand of a product before its wait. ptxas of 3.6 to 3.8 can do that (triton#11781). Other versions are not known to keep to it.
TRUSTED = ("3.6", "3.7", "3.8", "3.9")


@functools.cache
def divided(kernels: ModuleType, backend: str) -> ModuleType | None:
    """The file of a module's divided kernels; None where this Triton cannot run them, or the environment says `triton`.

    Raises ValueError if the environment asks for what the module does not have. Warns once of a Triton that is not trusted.
    """
    asked = os.environ.get(CHOICE, "")
    if asked not in ("", "triton", backend):
        raise ValueError(f"attention: {CHOICE} is `{asked}` in the environment; expected triton or {backend}, or nothing")
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
_OF_GRAPHS: dict[int, Iterator[torch.Tensor]] = {}  # of each device: those that no graph has yet
CAPTURED = 2**14  # launches that graphs capture, on a device: they get their counters at once. Later ones set theirs to 0, with a kernel.


def counter_of(device: int) -> torch.Tensor:
    """Two numbers by which the programs of a launch share its tiles: they are 0 before the launch and after it.

    Launches on one stream follow each other and take the same. One that a graph captures gets its own: the graph may run beside others.
    """
    if torch.cuda.is_current_stream_capturing():
        for found in _OF_GRAPHS.get(device, ()):
            return found
        return torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
    key = device, current_stream(device)
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
        if device not in _OF_GRAPHS:
            rows = torch.zeros(CAPTURED, 4, dtype=torch.int32, device=f"cuda:{device}")  # of 16 bytes, as kernels want them aligned
            torch.cuda.synchronize(device)  # graphs may run on any stream
            _OF_GRAPHS[device] = map(rows.__getitem__, range(CAPTURED))
    return _COUNTERS[key]
