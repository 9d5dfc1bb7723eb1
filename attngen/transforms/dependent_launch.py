"""overlap-launches: programs that join the parts of keys start while those that compute the parts still run.

before:  kernel @decode own(q) packs grid(...)                  kernel @combine ... %parts_of_keys = loop joined ...
after:   kernel @decode own(q) packs releases grid(...)         kernel @combine ... wait_for_grid
                                                                                    %parts_of_keys = loop joined ...

The second launch, and finding how many parts a sequence has, then take no time of their own (docs/perf-log.md, section 33).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Loop, Op, WaitForGrid
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class OverlapLaunches(Pass):
    name: ClassVar[str] = "overlap-launches"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        dealing = module.dealing
        if dealing is None:
            return module
        return module.map_kernels(lambda k: replace(k, releases=True) if k is dealing else _waiting(k) if k.joins_parts else k)


def _waiting(kernel: Kernel) -> Kernel:
    """The kernel with a wait before its loop over parts, which other programs store."""

    def change(block: str, op: Op) -> list[Op]:
        return [WaitForGrid("wait_for_parts"), op] if isinstance(op, Loop) and block == "entry" else [op]

    return kernel.rewrite(change)
