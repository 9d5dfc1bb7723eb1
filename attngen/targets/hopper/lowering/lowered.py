"""The statements of a kernel: what all passes of this package make of it."""

from __future__ import annotations

from functools import lru_cache

from attngen.ir import Kernel, Module
from attngen.targets.hopper.lowering.assign_barriers import assign_barriers
from attngen.targets.hopper.lowering.lower_pipelines import lower_pipelines


@lru_cache(maxsize=256)
def lowered(module: Module, kernel: Kernel) -> Kernel:
    """The kernel of a target module in the form in which it is printed. Cached: resources are read from it, too."""
    return assign_barriers(lower_pipelines(module, kernel))
