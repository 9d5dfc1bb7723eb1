"""dependent-launch: launch the combine kernel of split-KV by programmatic dependent launch (PDL).

before:  kernel @decode program_axis(q) pack_gqa grid(...)
         kernel @combine ...
           %over_KV_splits = loop KV_splits ...
after:   kernel @decode program_axis(q) pack_gqa launch_dependents grid(...)
         kernel @combine ...
           grid_dependency_wait
           %over_KV_splits = loop KV_splits ...

The combine kernel starts while the programs that compute the splits still run. So the second launch, and finding the
number of splits of each sequence, take no extra time (docs/perf-log.md, section 33).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir import Kernel, Module, Op, tile
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class DependentLaunch(Pass):
    name: ClassVar[str] = "dependent-launch"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        splitting = module.splitting_kernel
        if splitting is None:
            return module
        return module.map_kernels(
            lambda k: (
                replace(k, launches_dependents=True)
                if k is splitting
                else _waiting(k)
                if k.traits.combines_splits
                else k
            )
        )


def _waiting(kernel: Kernel) -> Kernel:
    """Return the kernel with a grid dependency wait before its loop over the splits, which other programs store."""

    def change(block: str, op: Op) -> list[Op]:
        return (
            [tile.GridDependencyWait("_wait_for_partials"), op]
            if isinstance(op, tile.Loop) and block == "entry"
            else [op]
        )

    return kernel.rewrite(change)
