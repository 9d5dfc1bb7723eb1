"""The registry of backends, and the only module that imports one by name."""

from __future__ import annotations

from attngen.ir import Config, Kernel, Module
from attngen.targets.common.base import Backend, Specializer
from attngen.targets.hopper import HOPPER
from attngen.targets.triton import TRITON

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TRITON,)}
SPECIALIZERS: dict[str, Specializer] = {specializer.name: specializer for specializer in (HOPPER,)}


def backend_of(user: Module | Config) -> Backend:
    """The backend that a module or a config names; the verifier has checked that it exists."""
    return BACKENDS[user.backend]


def maker_of(config: Config) -> Backend | Specializer:
    """The backend that prints and compiles the kernel of a config."""
    return SPECIALIZERS[config.backend] if config.backend in SPECIALIZERS else BACKENDS[config.backend]


def kernel_of(module: Module, name: str, config: Config) -> Kernel:
    """The kernel of a name that runs under a config: a warp-specialized one if the config is a specializer's."""
    return next(
        (k for k in module.warp_specialized if (k.name, k.backend) == (name, config.backend)), None
    ) or module.kernel(name)
