"""software-pipeline-weights: overlap the softmax of an odd tile with the product P V of the even tile before it.

It moves the wait for that product, and the releases after it, behind the softmax. For MLA decode, where @right handles
two tiles per iteration.

before:  block @both                               after:  block @both
           S of the odd tile                                 S of the odd tile
           wait for P of the even tile                       wait for P of the even tile
           issue O += P V; wait for O                        issue O += P V
           release P; release V                              masks, softmax and row sums of the odd tile
           masks and softmax of the odd tile                 wait for O; release P; release V
           store P; issue O += P V; wait for O               store P; issue O += P V; wait for O

The order of ops does not bind ptxas, which could sink the exponentials below the wait. So legalize-gluon pins the row
sums above the wait: the exponentials, from which the sums are computed, then stay above it, too.

Nothing moves from one iteration to another: the overlap is between the two tiles of an iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx

from attngen.ir import Block, Kernel, Module, Op, only, pipe
from attngen.targets.hopper.configs.families import with_mla_decode
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SoftwarePipelineWeights(Pass):
    name: ClassVar[str] = "software-pipeline-weights"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_mla_decode(module, _overlap)


def _overlap(kernel: Kernel) -> Kernel:
    pairs = {op.pair for op in only(kernel.ops(), pipe.PipelinedLoop)}
    return replace(
        kernel,
        blocks=tuple(_with_late_wait(kernel, block) if block.name in pairs else block for block in kernel.blocks),
    )


def _with_late_wait(kernel: Kernel, block: Block) -> Block:
    """Move the wait for the first product of weights, and the releases after it, to just before the next weights are
    stored."""
    ops = list(block.ops)
    store = next(only(ops, pipe.ProducerStore))
    needing = nx.descendants(kernel.graph, store.value.split(".")[0])
    waits = [
        op
        for op in only(ops[: ops.index(store)], pipe.WgmmaWait)
        if store.name not in nx.descendants(kernel.graph, op.name)
    ]
    assert len(waits) == 1 and waits[0].name not in needing
    first = ops.index(waits[0])
    moved: list[Op] = [waits[0]]
    while isinstance(ops[first + len(moved)], pipe.ConsumerRelease):
        moved.append(ops[first + len(moved)])
    rest = [op for op in ops if op not in moved]
    at = rest.index(store)
    return replace(block, ops=(*rest[:at], *moved, *rest[at:]))
