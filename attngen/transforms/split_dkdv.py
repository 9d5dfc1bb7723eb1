"""split-dkdv: for a wide head_dim, compute dK and dV in separate kernels.

before:  kernel @dkdv ... %total = loop q ... carry(dk=%dk_init, dv=%dv_init) ... store %dK ... store %dV
         host @backward ... launch @dkdv
after:   kernel @dk   ... %total = loop q ... carry(dk=%dk_init) ... store %dK
         kernel @dv   ... %total = loop q ... carry(dv=%dv_init) ... store %dV
         host @backward ... launch @dk, launch @dv

Two accumulators with a combined width above WIDEST take so many registers that tiles would be small, or spill.
Computing the scores twice costs less (docs/perf-log.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.heuristics import WIDEST
from attngen.ir import Kernel, Module, Op, launch, tile
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
    """True if each program has a tile of keys and accumulates dK and dV, and no dQ."""
    return (
        kernel.traits.writes.issuperset(GRADIENTS)
        and bool(kernel.traits.dots)
        and not (kernel.traits.visits_all_tiles or kernel.traits.adds_in_order)
    )


def _launch_each(op: Op, both: set[str]) -> list[Op]:
    """Replace the launch of a kernel in `both` by the launches of @dk and @dv."""
    if not isinstance(op, launch.Launch) or op.kernel not in both:
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
    """Return the kernel with one output and only the ops that it needs. Block lists, which no op reads yet, stay as
    arguments."""
    one = prune(kernel.rewrite(lambda _, op: [] if isinstance(op, tile.Store) and op.dst.tensor != out else [op]))
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
