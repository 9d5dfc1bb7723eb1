"""software-pipeline-tangents: order the loop body of the JVP kernel (forward-mode differentiation) so that weights are
computed while the products of tangents of scores run, and tangents of weights while the accumulators are updated.

A consumer then has a product in flight whenever it computes, and until the last product of an iteration is issued, only
ops that need a product's result wait for it. `tX` is the tangent of X.

before:  block @step                               after:  block @step
           wait for K; wait for tK                           wait for K; issue S
           issue tS = tQ K^T, then += Q tK^T                 wait for tK; issue tS = tQ K^T, then += Q tK^T
           wait for tS                                       wait for S; weights P of S
           issue S; wait for S; release K, tK                wait for tV; issue tO += P tV
           weights P of S; tP of P and tS                    wait for tS; release K, tK
           wait for tV; issue tO += P tV                     tP of P and tS
           wait for V; issue tO += tP V                      wait for V; issue tO += tP V
           wait for tO; release tV, V                        wait for tO; release tV, V
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx

from attngen.ir import Kernel, Module, Op
from attngen.targets.hopper.configs.families import with_jvp
from attngen.targets.hopper.passes.software_pipeline_gradients import Kinds, merge_loops
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SoftwarePipelineTangents(Pass):
    name: ClassVar[str] = "software-pipeline-tangents"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_jvp(module, lambda kernel: merge_loops(kernel, lambda ops: _order(kernel, ops)))


def _order(kernel: Kernel, ops: tuple[Op, ...]) -> Iterator[Op]:
    """Ops that need no product run during the first one. Row vectors are read just before they are needed, and their
    tile is kept until then."""
    of = Kinds(ops)
    continued_by = {op.acc: op for op in of.issues}
    ts, s = sorted((op for op in of.issues if not op.acc), key=lambda op: op.name not in continued_by)
    tangents, (first, second) = [ts, continued_by[ts.name]], [op for op in of.sums if op.acc != ts.name]
    of_s, of_ts = (nx.descendants(kernel.graph, op.name) for op in (s, tangents[-1]))
    rest = [op for op in ops if op in of.computed or op in of.reads]
    late = {read.name for read in of.reads}.union(*(nx.descendants(kernel.graph, read.name) for read in of.reads))

    yield from of.args
    yield from (of.waits[s.b], s, of.waits[tangents[-1].b], *tangents)
    yield from (op for op in rest if op.name not in of_s | of_ts | late)
    yield of.product_waits[s.name]
    yield from (op for op in rest if op.name in of_s | late and op.name not in of_ts)
    yield from (
        of.waits[first.b],
        first,
        of.product_waits[tangents[-1].name],
        *(of.releases[op.b] for op in reversed(tangents)),
    )
    yield from (op for op in rest if op.name in of_ts)
    yield from (
        of.waits[second.b],
        second,
        of.product_waits[second.name],
        of.releases[first.b],
        of.releases[second.b],
        *of.yields,
    )
