"""The registry of backends: the only place that imports one by name."""

from __future__ import annotations

from attngen.backends.base import Backend, Divider
from attngen.backends.hopper import HOPPER
from attngen.backends.triton import TRITON
from attngen.ir.graph import Module, Row

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TRITON,)}
DIVIDERS: dict[str, Divider] = {divider.name: divider for divider in (HOPPER,)}


def backend_of(user: Module | Row) -> Backend:
    """The backend that a module, or a schedule row, names; the verifier has found it in the registry."""
    return BACKENDS[user.backend]
