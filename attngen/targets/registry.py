"""The registry of backends: the only place that imports one by name."""

from __future__ import annotations

from attngen.ir.graph import Kernel, Module, Row
from attngen.targets.common.base import Backend, Divider
from attngen.targets.hopper import HOPPER
from attngen.targets.triton import TRITON

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TRITON,)}
DIVIDERS: dict[str, Divider] = {divider.name: divider for divider in (HOPPER,)}


def backend_of(user: Module | Row) -> Backend:
    """The backend that a module, or a schedule row, names; the verifier has found it in the registry."""
    return BACKENDS[user.backend]


def maker_of(row: Row) -> Backend | Divider:
    """The one that prints and compiles the kernel of a schedule row."""
    return DIVIDERS[row.backend] if row.backend in DIVIDERS else BACKENDS[row.backend]


def kernel_of(module: Module, name: str, row: Row) -> Kernel:
    """The kernel of a name that runs under a schedule row: a divided one where the row is a divider's."""
    return next((k for k in module.divided if (k.name, k.backend) == (name, row.backend)), None) or module.kernel(name)
