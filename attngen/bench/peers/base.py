"""The type of a peer: what it cannot do, and the call that it prepares for a problem."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from attngen.bench.cases.grids import Cell

if TYPE_CHECKING:
    import torch

    from attngen.bench.cases.problem import Inputs, Problem


Forward = Callable[["Inputs"], "torch.Tensor"]


class Call(NamedTuple):
    """A peer prepared for a problem: its forward, a context manager around it (such as the choice of a backend), and a
    remark for the reader.

    For a peer that prepares the mask before its calls, `masks` has functions that prepare it again, by the name of the
    figure for their time. `whole` returns a forward that prepares the mask itself; it is called after all other
    measurements.
    """

    forward: Forward
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    note: str = ""
    masks: Mapping[str, Callable[[], object]] = MappingProxyType({})
    whole: Callable[[], Forward] | None = None


@dataclass(frozen=True)
class Peer:
    """An implementation. `cannot` returns why it cannot do a cell, in a few words, or an empty string. `compiles`: its
    first call compiles for seconds."""

    title: str
    cannot: Callable[[Cell], str]
    prepare: Callable[[Problem], Call]
    compiles: bool = False


def undropped(cannot: Callable[[Cell], str], cell: Cell) -> str:
    """Return the reason for a peer without dropout."""
    return "no dropout" if cell.asked("dropout_p") else cannot(cell)


def uncached(cannot: Callable[[Cell], str], cell: Cell) -> str:
    """Return the reason for a peer without a KV cache here."""
    return "not with a KV cache" if cell.cached else cannot(cell)


def unquantised(cannot: Callable[[Cell], str], cell: Cell) -> str:
    """Return the reason for a peer without 8-bit keys here."""
    return "no keys of 8 bits" if cell.quantised else cannot(cell)


def importable(name: str) -> bool:
    """True if a package is installed; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # from a parent package
        return False
