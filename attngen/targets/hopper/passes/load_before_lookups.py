"""load-before-lookups: issue a program's first loads before it computes which tiles it visits.

If calls have chunks of a sequence, a program that is not persistent starts with lookups, each of which needs the one
before: where its tile lies, for documents the bounds of its rows, and how many of the call's tiles are before these
bounds. The tiles that the program itself owns, such as K and V of the fused backward, are in the call's own rows, so
their loads need no lookup and run meanwhile.

before:  warp_group @producer                              after:  warp_group @producer
           producer_load %K_pipeline %K[b, hkv, kv, d_qk]            producer_load %K_pipeline %K[...] early(yes)
           producer_load %V_pipeline %V[b, hkv, kv, d_v]             producer_load %V_pipeline %V[...] early(yes)
           %copy_total = pipelined_loop q ...                        %copy_total = pipelined_loop q ...

Persistent kernels run ahead: most look up the place of the next work tile while they compute one (prefetch-work-tiles).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import ClassVar

from attngen.ir import Kernel, Module, Op, only, pipe
from attngen.targets.hopper.configs.families import with_chunks
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class LoadBeforeLookups(Pass):
    name: ClassVar[str] = "load-before-lookups"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_chunks(module, lambda kernel: kernel if kernel.traits.is_persistent else _loading_early(kernel))


def _loading_early(kernel: Kernel) -> Kernel:
    metadata = {op.name for op in only(kernel.ops(), pipe.Pipeline) if op.metadata_of}

    def is_tile(op: Op) -> bool:
        return isinstance(op, pipe.ProducerLoad) and op.pipeline not in metadata

    first = [op for block in kernel.warp_groups for op in takewhile(is_tile, block.ops)]

    def change(_: str, op: Op) -> Iterator[Op]:
        yield replace(op, early=True) if isinstance(op, pipe.ProducerLoad) and op in first else op

    return kernel.rewrite(change)
