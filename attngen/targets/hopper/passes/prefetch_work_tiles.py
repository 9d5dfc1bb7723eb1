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

from attngen.ir import Kernel, Module, Op, only, pipe, tile
from attngen.targets.hopper.configs.families import with_chunks
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class PrefetchWorkTiles(Pass):
    name: ClassVar[str] = "prefetch-work-tiles"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_chunks(module, _prefetching)


def _prefetching(kernel: Kernel) -> Kernel:
    work = next((op for op in only(kernel.ops(), pipe.WorkLoop) if op.fetches), None)
    if work is None or kernel.traits.adds_in_order or kernel.kv_split:
        return kernel
    kernel = kernel.rewrite(lambda block, op: _in_two(op) if block == work.body else [op])
    loops = list(only(kernel.block(work.body).ops, tile.Loop))
    fetch = pipe.PrefetchTile("_prefetch_tile", work.pipeline)

    def change(_: str, op: Op) -> Iterator[Op]:
        if len(loops) > 1 and op is loops[-1]:
            yield fetch
        yield op

    return kernel.rewrite(change)


def _in_two(op: Op) -> Sequence[Op]:
    """The loop over partial tiles and that over full ones, if the op is one loop over both that reverses the partial
    ones."""
    if isinstance(op, pipe.PipelinedLoop) and op.reversed and not op.listed and op.bodies == (op.step,):
        return op.by_class
    return [op]
