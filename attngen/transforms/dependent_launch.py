"""dependent-launch: programs that join the parts of keys start while those that compute the parts still run.

before:  kernel @decode program_axis(q) pack_gqa grid(...)
         kernel @combine ...
           %parts_of_keys = loop joined ...
after:   kernel @decode program_axis(q) pack_gqa launch_dependents grid(...)
         kernel @combine ...
           grid_dependency_wait
           %parts_of_keys = loop joined ...

The second launch, and finding how many parts a sequence has, then take no time of their own (docs/perf-log.md, section
33).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import GridDependencyWait, Loop, Op
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class DependentLaunch(Pass):
    name: ClassVar[str] = "dependent-launch"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        dealing = module.dealing
        if dealing is None:
            return module
        return module.map_kernels(
            lambda k: replace(k, launches_dependents=True) if k is dealing else _waiting(k) if k.combines_splits else k
        )


def _waiting(kernel: Kernel) -> Kernel:
    """The kernel with a wait before its loop over parts, which other programs store."""

    def change(block: str, op: Op) -> list[Op]:
        return [GridDependencyWait("wait_for_parts"), op] if isinstance(op, Loop) and block == "entry" else [op]

    return kernel.rewrite(change)
