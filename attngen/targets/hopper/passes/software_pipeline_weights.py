"""software-pipeline-weights: the softmax of an odd tile runs beside the product of the even tile before.

before:  block @both                                  after:  block @both
           S of the odd tile                                    S of the odd tile
           take P of the even tile; issue O; await O            take P of the even tile; issue O
           give P; give V                                       masks and softmax of the odd tile, and its sums of rows
           masks and softmax of the odd tile                    await O; give P; give V
           share P; issue O; await O                            share P; issue O; await O

The sums of rows are held before the await: no compiler moves what they are computed of past it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Block, Op
from attngen.ir.pipe import ConsumerRelease, PipelinedLoop, ProducerStore, WgmmaWait
from attngen.targets.hopper.configs.families import with_latents
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SoftwarePipelineWeights(Pass):
    name: ClassVar[str] = "software-pipeline-weights"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_latents(module, _overlapped)


def _overlapped(kernel: Kernel) -> Kernel:
    pairs = {op.pair for op in kernel.ops() if isinstance(op, PipelinedLoop)}
    return replace(
        kernel, blocks=tuple(_late(kernel, block) if block.name in pairs else block for block in kernel.blocks)
    )


def _late(kernel: Kernel, block: Block) -> Block:
    """The block with the await of the first product of weights, and the gives after it, moved to where the next
    weights are shared."""
    ops = list(block.ops)
    share = next(op for op in ops if isinstance(op, ProducerStore))
    needing = nx.descendants(kernel.graph, share.value.split(".")[0])
    awaits = [
        op
        for op in ops[: ops.index(share)]
        if isinstance(op, WgmmaWait) and share.name not in nx.descendants(kernel.graph, op.name)
    ]
    assert len(awaits) == 1 and awaits[0].name not in needing
    first = ops.index(awaits[0])
    moved: list[Op] = [awaits[0]]
    while isinstance(ops[first + len(moved)], ConsumerRelease):
        moved.append(ops[first + len(moved)])
    rest = [op for op in ops if op not in moved]
    at = rest.index(share)
    return replace(block, ops=(*rest[:at], *moved, *rest[at:]))
