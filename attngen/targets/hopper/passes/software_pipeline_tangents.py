"""software-pipeline-tangents: in forward mode weights are computed while products of tangents of scores run, and these
while sums are added to.

before:  block @step                                   after:  block @step
           take K; take tK                                       take K; issue S
           issue tS with tQ and K, then with Q and tK            take tK; issue tS with tQ and K, then with Q and tK
           await tS                                              await S; weights P of S
           issue S; await S; give K; give tK                     take tV; issue O with P
           weights P of S; changes tP of P and tS                await tS; give K; give tK
           take tV; issue O with P                               changes tP of P and tS
           take V; issue O with tP                               take V; issue O with tP
           await O; give tV; give V                              await O; give tV; give V

So a consumer has a product in flight while it computes, and nothing waits for a product before the last one of a turn
is issued but what is computed of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Op
from attngen.targets.hopper.configs.families import with_tangents
from attngen.targets.hopper.passes.software_pipeline_gradients import Kinds, joined
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SoftwarePipelineTangents(Pass):
    name: ClassVar[str] = "software-pipeline-tangents"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_tangents(module, lambda kernel: joined(kernel, lambda ops: _ordered(kernel, ops)))


def _ordered(kernel: Kernel, ops: tuple[Op, ...]) -> Iterator[Op]:
    """What needs no product comes while the first runs. What lies beside a tile is read just before it is needed,
    and kept until then."""
    of = Kinds(ops)
    goes_on = {op.acc: op for op in of.issues}
    change, s = sorted((op for op in of.issues if not op.acc), key=lambda op: op.name not in goes_on)
    changes, (first, second) = [change, goes_on[change.name]], [op for op in of.sums if op.acc != change.name]
    of_s, of_change = (nx.descendants(kernel.graph, op.name) for op in (s, changes[-1]))
    rest = [op for op in ops if op in of.computed or op in of.reads]
    late = {read.name for read in of.reads}.union(*(nx.descendants(kernel.graph, read.name) for read in of.reads))

    yield from of.args
    yield from (of.takes[s.b], s, of.takes[changes[-1].b], *changes)
    yield from (op for op in rest if op.name not in of_s | of_change | late)
    yield of.awaits[s.name]
    yield from (op for op in rest if op.name in of_s | late and op.name not in of_change)
    yield from (of.takes[first.b], first, of.awaits[changes[-1].name], *(of.gives[op.b] for op in reversed(changes)))
    yield from (op for op in rest if op.name in of_change)
    yield from (of.takes[second.b], second, of.awaits[second.name], of.gives[first.b], of.gives[second.b], *of.yields)
