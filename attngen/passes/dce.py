"""dce: ops that no store depends on go.

before:  %score = map expr(qk_scale*s) ...          # folded into the softmax, read by nothing
after:   (gone)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import networkx as nx

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Mask, Position, Store, Yield
from attngen.passes.base import Pass


@dataclass(frozen=True)
class Dce(Pass):
    name: ClassVar[str] = "dce"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return module.map_kernels(_dce)


def _dce(kernel: Kernel) -> Kernel:
    graph = kernel.graph.copy()
    for loop in kernel.loops:  # a loop needs what its body yields, and its body's arguments
        for op in kernel.block(loop.body).ops:
            if isinstance(op, (Yield, Arg)):
                graph.add_edge(op.name, loop.name)
    roots = [op.name for op in kernel.ops() if isinstance(op, Store)]
    live = set(roots).union(*(nx.ancestors(graph, r) for r in roots))
    live |= _named(kernel, live)
    return kernel.rewrite(lambda _, op: [op] if op.name in live or isinstance(op, Arg) else [])


def _named(kernel: Kernel, live: set[str]) -> set[str]:
    """Scalars that loops and masks name rather than take as operands, with what these depend on."""
    exprs = [e for op in kernel.loops if op.name in live for r in (*op.ranges, op.tiles) for e in r]
    exprs += [e for op in kernel.ops() if isinstance(op, Mask) for e in (op.needs, op.enough)]
    exprs += [op.tile for op in kernel.ops() if isinstance(op, Position)]
    symbols = {str(s) for e in exprs for s in e.free_symbols}
    named = {op.name for op in kernel.ops() if op.name in symbols}
    return named.union(*(nx.ancestors(kernel.graph, n) for n in named))
