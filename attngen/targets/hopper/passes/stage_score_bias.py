"""ring-scores: what is read and written for each score of the backward goes through shared memory, by the copy engine.

before:  block @step                                     after:  block @entry
           %bias = load %BIAS[b, h, q, kv]                         %BIAS_ring = ring slots(num_stages) each(consumer)
             : T[BLOCK_KV, BLOCK_Q]                                  counted(yes) : T[BLOCK_Q, BLOCK_KV]
           ...                                                   block @copy
           store %dBIAS[b, h, q, kv] %dbias                        fill %BIAS_ring %BIAS[b, h, q, kv]
           ...                                                   block @step
                                                                   %bias_tile = take %BIAS_ring
                                                                   %bias = lift %bias_tile : T[BLOCK_KV, BLOCK_Q]
                                                                   ...
                                                                   put %dBIAS[b, h, q, kv] %dbias through(%BIAS_ring)
                                                                   ...
                                                                   flush %BIAS_ring
                                                                   give %bias_tile

Scores are transposed in the backward, so that neighbours in registers are far apart in the tensor: addresses alone would take as many
registers as the scores. A gradient leaves through the slot of the tile that it belongs to, once that has been read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir.expr import symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import AXIS_DIM, Block, Load, Op, Store, Yield
from attngen.ir.pipe import Drain, Fill, Flush, Give, Lift, Put, Ring, Take
from attngen.targets.hopper.configs.families import with_backward
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class RingScores(Pass):
    name: ClassVar[str] = "ring-scores"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        given = {x.parts: x.input.upper() for x in module.learned if x.by == "score"}
        return with_backward(module, lambda kernel: _through_rings(kernel, given))


def _through_rings(kernel: Kernel, given: dict[str, str]) -> Kernel:
    """given: tensor of a gradient by score -> the tensor that it is the gradient of."""
    loads = [op for op in kernel.of_pairs if isinstance(op, Load)]
    if not loads:
        return kernel
    rings = {op.src.tensor: _ring(op) for op in loads}

    def change(_: str, op: Op) -> Iterator[Op]:
        if op in loads and isinstance(op, Load):
            yield Take(f"{op.name}_tile", rings[op.src.tensor].name, rings[op.src.tensor].type)
            yield Lift(op.name, f"{op.name}_tile", op.type)
        elif isinstance(op, Store) and op.dst.tensor in given:
            yield Put(f"put_{op.value}", op.dst, op.value, rings[given[op.dst.tensor]].name)
        else:
            yield op

    changed = kernel.rewrite(change)
    return replace(changed, blocks=tuple(_with_ends(kernel, block, loads, rings) for block in changed.blocks))


def _ring(op: Load) -> Ring:
    """The ring of what a load reads, whose tiles lie as they do in the tensor."""
    tile = replace(op.type, dims=tuple(AXIS_DIM[axis] for axis in op.src.axes()), space="sram")
    return Ring(f"{op.src.tensor}_ring", tile, symbol("num_stages"), "consumer", counted=True)


def _with_ends(kernel: Kernel, block: Block, loads: list[Load], rings: dict[str, Ring]) -> Block:
    """A block with the rings, with their fills and drains, or with the ends of what a turn takes."""
    if block.name == "entry":
        return replace(block, ops=(*block.ops, *rings.values()))
    if block.name == "producer":
        return replace(block, ops=(*block.ops, *(Drain(f"drain_{op.name}", rings[op.src.tensor].name) for op in loads)))
    if block.name == "copy":
        fills = [Fill(f"fill_{op.name}", rings[op.src.tensor].name, op.src) for op in loads]
        at = next(at for at, op in enumerate(block.ops, 1) if isinstance(op, Fill) and op.ring == "Q_ring")
        return replace(block, ops=(*block.ops[:at], *fills, *block.ops[at:]))
    taken = [op for op in loads if any(isinstance(o, Lift) and o.name == op.name for o in block.ops)]
    if not taken:
        return block
    put = {op.through for op in block.ops if isinstance(op, Put)}
    ends: list[Op] = []
    for op in taken:
        ring = rings[op.src.tensor].name
        ends += [Flush(f"flush_{ring}", ring)] if ring in put else []
        ends.append(Give(f"give_{op.name}_tile", f"{op.name}_tile"))
    return replace(
        block, ops=(*(op for op in block.ops if not isinstance(op, Yield)), *ends, *(op for op in block.ops if isinstance(op, Yield)))
    )
