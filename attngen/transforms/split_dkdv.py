"""split-dkdv: dK and dV of wide heads get a kernel each.

before:  kernel @dkdv ... %total = loop q ... carry(dk=%dk_init, dv=%dv_init) ... store %dK ... store %dV
after:   kernel @dk ... carry(dk=%dk_init) ... store %dK, and kernel @dv ... carry(dv=%dv_init) ... store %dV
before:  host @backward ... launch @dkdv
after:   host @backward ... launch @dk, launch @dv

Two accumulators of more than WIDEST columns together take so many registers that tiles would be small, or spill.
Computing the scores twice costs less (docs/perf-log.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.heuristics import WIDEST
from attngen.ir.graph import Kernel, Module
from attngen.ir.host import Launch
from attngen.ir.ops import Op, Store
from attngen.tiles.sizes import tile_width
from attngen.transforms.base import Pass
from attngen.transforms.dce import prune

GRADIENTS = ("dK", "dV")


@dataclass(frozen=True)
class SplitDkdv(Pass):
    name: ClassVar[str] = "split-dkdv"
    phase: ClassVar[str] = "logical"

    def run(self, module: Module) -> Module:
        if tile_width(module.head_dim_qk) + tile_width(module.head_dim_v) <= WIDEST:
            return module
        kernels: list[Kernel] = []
        for kernel in module.kernels:
            kernels += [_only(kernel, out) for out in GRADIENTS] if _has_both(kernel) else [kernel]
        both = {kernel.name for kernel in module.kernels if _has_both(kernel)}
        return replace(
            module,
            kernels=tuple(kernels),
            hosts=tuple(host.rewrite(lambda op: _launch_each(op, both)) for host in module.hosts),
        )


def _has_both(kernel: Kernel) -> bool:
    """Whether its programs own a tile of keys each, and hold the sums of both gradients, and of no other one."""
    return kernel.writes.issuperset(GRADIENTS) and bool(kernel.dots) and not (kernel.walks or kernel.adds)


def _launch_each(op: Op, both: set[str]) -> list[Op]:
    """In place of the launch of a kernel of `both` gradients, those of @dk and @dv."""
    if not isinstance(op, Launch) or op.kernel not in both:
        return [op]
    return [
        replace(
            op,
            name=f"{op.name}_{out.lower()}",
            kernel=out.lower(),
            args=tuple((a, r) for a, r in op.args if a not in GRADIENTS or a == out),
        )
        for out in GRADIENTS
    ]


def _only(kernel: Kernel, out: str) -> Kernel:
    """The kernel with one output, and only what that needs. Lists of blocks, which no op reads yet, stay as
    arguments."""
    one = prune(kernel.rewrite(lambda _, op: [] if isinstance(op, Store) and op.dst.tensor != out else [op]))
    unread = {
        a.name
        for a in kernel.args
        if a.role != "scalar" and kernel.graph.out_degree(a.name) and not one.graph.out_degree(a.name)
    }
    return replace(
        one.rewrite(lambda _, op: [] if op.name in unread else [op]),
        name=out.lower(),
        about=kernel.about.replace(" and ".join(GRADIENTS), out),
    )
