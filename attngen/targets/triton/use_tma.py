"""use-tma: mark the tiles that TMA can load by a descriptor of their tensor.

before:  %k = load %K[b, h // group, kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @sram
after:   %k = load %K[b, h // group, kv, d_qk] check(kv if partial) via(descriptor) : T[BLOCK_KV, D_QK] @sram

These are tiles for shared memory, of consecutive rows of one head. With descriptors, threads compute no addresses and
keep none in registers. A config selects descriptors by TMA=1; only some devices have TMA.

Two kinds of kernels stay as they are. Kernels in FlashAttention-1's loop order exist to show their memory traffic. For
`packed`, the pack-GQA kernel for few queries, the host would make descriptors at each call, which takes longer than all
its other work, and the device gains nothing (docs/perf-log.md, section 19).

Tensors whose columns are split across programs are not read by descriptor, either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.heuristics import UNIT
from attngen.ir import SPLIT_DIM, Kernel, Module, Op, only, tile
from attngen.ir.dtypes import QUANTISED
from attngen.ir.names import CACHED, SCALES
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class UseTMA(Pass):
    name: ClassVar[str] = "use-tma"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return module.map_kernels(lambda kernel: kernel.rewrite(lambda _, op: [_describe(module, kernel, op)]))


def _describe(module: Module, kernel: Kernel, op: Op) -> Op:
    if not isinstance(op, tile.Load) or kernel.traits.visits_all_tiles or not describable(kernel, op):
        return op
    cached = kernel.traits.reads_cache and op.src.tensor in (*CACHED, *SCALES.values())
    by_rows = kernel.pack_gqa and not cached  # rows of several heads have no common start
    if by_rows or (op.pages and not has_tiles(module)) or in_parts(kernel, op.src.tensor):
        return op
    return replace(op, via="descriptor")


def in_parts(kernel: Kernel, tensor: str) -> bool:
    """True if programs read only some columns of a tensor. A descriptor describes tiles of all columns."""
    return any(
        op.src.tensor == tensor and not SPLIT_DIM.keys().isdisjoint(op.src.axes())
        for op in only(kernel.ops(), tile.Load)
    )


def has_tiles(module: Module) -> bool:
    """True if a page of the cache holds whole tiles: its size is known, and a multiple of split-KV's unit."""
    page = module.cache.page if module.cache else ""
    return page.isdigit() and int(page) % UNIT == 0


def describable(kernel: Kernel, op: tile.Load) -> bool:
    """True if a load reads a tile for shared memory: consecutive rows of one head of [batch, head, row, column]."""
    rows = kernel.type_of(op.src.tensor).dims
    return (
        op.type.space == "sram"
        and op.type.dtype in ("T", "f32", *QUANTISED.values())
        and len(rows) == 4
        and len(op.src.axes()) == 2
    )
