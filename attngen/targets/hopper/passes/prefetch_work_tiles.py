"""prefetch-work-tiles: fetch the next work tile between the loops of loads for this one, where its place is looked up.

If calls have chunks of a sequence, the producer reads three tables one after another for a work tile: where its rows
lie, for documents the bounds of these rows, and how many of the call's tiles are before these bounds. At the end of a
work tile the consumers would wait for that, because little is left for them to do. Between the loops of the producer
they have tiles in both stages.

before:  block @produce                                after:  block @produce
           producer_load %Q_pipeline %Q[b, h, q, d_qk]           producer_load %Q_pipeline %Q[b, h, q, d_qk]
           %copy_keys_partial = loop kv ...                      %copy_keys_partial = loop kv ...
           %copy_keys_full = loop kv ...                         prefetch_tile %Work_pipeline
                                                                 %copy_keys_full = loop kv ...

A producer that loads partial tiles in reversed order (skip-masked-tiles) has one loop. It becomes two, with the same
tiles in the same order:

before:  %copy_keys = pipelined_loop kv partial(kv_full_end .. kv_end) full(0 .. kv_full_end) step(@copy) reversed(yes)
after:   %copy_keys_partial = loop kv ranges(kv_full_end .. kv_end) body(@copy) cls(partial) reversed(yes)
         prefetch_tile %Work_pipeline
         %copy_keys_full = loop kv ranges(0 .. kv_full_end) body(@copy) cls(full)

Kernels whose programs wait for one another fetch a tile when they start it, and are left as they are; so are those
whose loads have one loop of another form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from attngen.ir.core import Op
from attngen.ir.kernel import Kernel
from attngen.ir.module import Module
from attngen.ir.ops import Loop
from attngen.ir.pipe_control import PipelinedLoop, PrefetchTile, WorkLoop
from attngen.targets.hopper.configs.families import with_chunks
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class PrefetchWorkTiles(Pass):
    name: ClassVar[str] = "prefetch-work-tiles"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_chunks(module, _prefetching)


def _prefetching(kernel: Kernel) -> Kernel:
    work = next((op for op in kernel.ops() if isinstance(op, WorkLoop) and op.fetches), None)
    if work is None or kernel.adds_in_order or kernel.kv_split:
        return kernel
    loops = [
        loop
        for op in kernel.block(work.body).ops
        for loop in (_by_class(op) if isinstance(op, PipelinedLoop) else [op] if isinstance(op, Loop) else [])
    ]
    fetch = PrefetchTile("_prefetch_tile", work.pipeline)

    def change(block: str, op: Op) -> Iterator[Op]:
        for made in _by_class(op) if block == work.body and isinstance(op, PipelinedLoop) else [op]:
            if len(loops) > 1 and made == loops[-1]:
                yield fetch
            yield made

    return kernel.rewrite(change)


def _by_class(op: PipelinedLoop) -> Sequence[Loop | PipelinedLoop]:
    """The loops over the partial tiles and over the full ones, if the op is one over both with @step alone, the partial
    ones in reversed order."""
    if not (op.reversed and op.partial and op.full) or op.listed or op.bodies != (op.step,):
        return [op]
    partial = Loop(f"{op.name}_partial", op.var, op.partial, (), op.step, "partial", reversed=True)
    return [partial, Loop(f"{op.name}_full", op.var, op.full, (), op.step, "full")]
