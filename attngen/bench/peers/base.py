"""What a peer is: what it cannot do, and a call that it prepares for a problem."""

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
    """A peer ready for a problem: its forward, what has to be around it (the choice of a backend, say), and a remark
    for the reader.

    Of a peer that prepares the mask before its calls: `masks`, functions that prepare it anew, by the name of the
    figure that their time is; `whole` makes a forward that prepares the mask itself, and is called once nothing else is
    measured any more.
    """

    forward: Forward
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    note: str = ""
    masks: Mapping[str, Callable[[], object]] = MappingProxyType({})
    whole: Callable[[], Forward] | None = None


@dataclass(frozen=True)
class Peer:
    """`cannot` gives the reason why it cannot do a cell in a few words, or nothing; `compiles`: its first call
    compiles for seconds."""

    title: str
    cannot: Callable[[Cell], str]
    prepare: Callable[[Problem], Call]
    compiles: bool = False


def undropped(cannot: Callable[[Cell], str], cell: Cell) -> str:
    """Of a peer that cannot drop."""
    return "no dropout" if cell.asked("dropout_p") else cannot(cell)


def uncached(cannot: Callable[[Cell], str], cell: Cell) -> str:
    """Of a peer that reads no cache here."""
    return "not over a cache" if cell.cached else cannot(cell)


def unquantised(cannot: Callable[[Cell], str], cell: Cell) -> str:
    """Of a peer that reads no keys of 8 bits here."""
    return "no keys of 8 bits" if cell.quantised else cannot(cell)


def importable(name: str) -> bool:
    """Whether a package is at hand; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a package around it
        return False
