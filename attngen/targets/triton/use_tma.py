"""use-tma: mark the tiles that a copy engine can fetch by a descriptor of their tensor.

before:  %k = load %K[b, h // group, kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @sram
after:   %k = load %K[b, h // group, kv, d_qk] check(kv if partial) via(descriptor) : T[BLOCK_KV, D_QK] @sram

These are tiles for shared memory, of consecutive rows of one head. With descriptors, threads compute no addresses and
keep none in registers. A row of the schedule chooses descriptors by TMA=1; only some devices have such an engine.

Two kinds of kernels stay as they are. Those in FlashAttention-1's order are there to show what they move. For `packed`,
the kernel of few queries, the host would make descriptors at each call, which takes longer than all its other work, and
the device gains nothing (docs/perf-log.md, section 19).

Nor are tensors read so of which programs have columns of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.heuristics import UNIT
from attngen.ir.dtypes import QUANTISED
from attngen.ir.graph import Kernel, Module
from attngen.ir.names import CACHED, SCALES
from attngen.ir.ops import OWN, Load, Op
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class UseTMA(Pass):
    name: ClassVar[str] = "use-tma"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return module.map_kernels(lambda kernel: kernel.rewrite(lambda _, op: [_describe(module, kernel, op)]))


def _describe(module: Module, kernel: Kernel, op: Op) -> Op:
    if not isinstance(op, Load) or kernel.walks or not describable(kernel, op):
        return op
    cached = kernel.reads_cache and op.src.tensor in (*CACHED, *SCALES.values())
    by_rows = kernel.pack_gqa and not cached  # rows of several heads have no common start
    if by_rows or (op.pages and not has_tiles(module)) or in_parts(kernel, op.src.tensor):
        return op
    return replace(op, via="descriptor")


def in_parts(kernel: Kernel, tensor: str) -> bool:
    """Whether programs read their own columns of a tensor: a descriptor is of tiles of all columns."""
    return any(
        isinstance(op, Load) and op.src.tensor == tensor and not OWN.keys().isdisjoint(op.src.axes())
        for op in kernel.ops()
    )


def has_tiles(module: Module) -> bool:
    """Whether pages of the cache have room for whole tiles: they are of a known size, which a unit of what is dealt
    divides."""
    page = module.cache.page if module.cache else ""
    return page.isdigit() and int(page) % UNIT == 0


def describable(kernel: Kernel, op: Load) -> bool:
    """Whether a load reads a tile for shared memory: consecutive rows of one head of a tensor [batch, head, row,
    column]."""
    rows = kernel.type_of(op.src.tensor).dims
    return (
        op.type.space == "sram"
        and op.type.dtype in ("T", "f32", *QUANTISED.values())
        and len(rows) == 4
        and len(op.src.axes()) == 2
    )
