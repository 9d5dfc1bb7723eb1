"""The registry of backends: the only place that imports one by name."""

from __future__ import annotations

from attngen.ir.graph import Config, Kernel, Module
from attngen.targets.common.base import Backend, Specializer
from attngen.targets.hopper import HOPPER
from attngen.targets.triton import TRITON

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TRITON,)}
SPECIALIZERS: dict[str, Specializer] = {specializer.name: specializer for specializer in (HOPPER,)}


def backend_of(user: Module | Config) -> Backend:
    """The backend that a module, or a schedule row, names; the verifier has found it in the registry."""
    return BACKENDS[user.backend]


def maker_of(config: Config) -> Backend | Specializer:
    """The one that prints and compiles the kernel of a schedule row."""
    return SPECIALIZERS[config.backend] if config.backend in SPECIALIZERS else BACKENDS[config.backend]


def kernel_of(module: Module, name: str, config: Config) -> Kernel:
    """The kernel of a name that runs under a schedule row: a divided one where the row is a divider's."""
    return next(
        (k for k in module.warp_specialized if (k.name, k.backend) == (name, config.backend)), None
    ) or module.kernel(name)
