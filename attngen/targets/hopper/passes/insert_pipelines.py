"""insert-pipelines: move loads of tiles to the producer, which passes them to the consumers through pipelines (circular
buffers in shared memory).

The producer runs over the same tiles as the consumers, in the same order, and runs ahead by up to num_stages tiles.

before:  warp_group @producer ...
         warp_group @consumer ...
           %keys = loop kv ranges(0 .. kv_end) ... body(@step) cls(full)
         block @step
           %k = load %K[b, h, kv, d_qk] via(descriptor) : T[BLOCK_KV, D_QK] @sram
           %s = dot %q %k over(D_QK)
after:   block @entry
           %K_pipeline = pipeline stages(num_stages) : T[BLOCK_KV, D_QK] @sram
         warp_group @producer ...
           %copy_keys = loop kv ranges(0 .. kv_end) body(@copy) cls(full)
           producer_tail %K_pipeline
         block @copy
           producer_load %K_pipeline %K[b, h, kv, d_qk]
         warp_group @consumer ...
           %keys = loop kv ranges(0 .. kv_end) ... body(@step) cls(full)
         block @step
           %k = consumer_wait %K_pipeline : T[BLOCK_KV, D_QK] @sram
           %s = dot %q %k over(D_QK)
           consumer_release %k

A tile that is loaded once, such as that of Q, has a pipeline of one stage per consumer, which holds that consumer's
rows. It is filled once, so it is never released.

The producer also copies row vectors, such as the document ids of keys, next to the tile of K. So their latency from
device memory is hidden, and consumers read them from shared memory:

before:  %k = load %K[...] ; %ids = load %IDS[b, kv]
after:   %k = consumer_wait %K_pipeline ; %ids = read_metadata %IDS_pipeline tile(%k)

Buffers in shared memory have shapes of powers of two in Gluon. Tiles of other widths, such as 192 columns, lie in
pieces:

         %K_pipeline = pipeline stages(num_stages) columns(64) : T[BLOCK_KV, D_QK] @sram
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir import Block, Kernel, Module, Op, only, pipe, symbol, tile
from attngen.targets.hopper.configs.common import is_row_vector
from attngen.targets.hopper.configs.head_dims import piece_of
from attngen.targets.hopper.configs.mla_decode import is_mla_decode
from attngen.targets.hopper.configs.separate_backward import computes_dp
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class InsertPipelines(Pass):
    name: ClassVar[str] = "insert-pipelines"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        piece = piece_of(module.head_dim_qk)
        return replace(
            module,
            warp_specialized=tuple(
                k if is_mla_decode(k) else _with_pipelines(k, piece) for k in module.warp_specialized
            ),
        )


def _with_pipelines(kernel: Kernel, piece: int) -> Kernel:
    """Move a kernel's loads to its producer. `piece`: width of the pieces of Q and K tiles, 0 if tiles are whole."""
    blocks = {block.name: block for block in kernel.blocks}
    loads = [(name, op) for name, block in blocks.items() for op in only(block.ops, tile.Load) if op.via]
    once = [op for home, op in loads if home == "consumer"]
    pipelines = []
    for _, op in loads:
        stages = sympy.Integer(1) if op in once or _has_one_stage(kernel, op) else symbol("num_stages")
        each = "consumer" if op in once else ""
        pipelines.append(
            pipe.Pipeline(f"{op.src.tensor}_pipeline", op.type, stages, each, piece if "D_QK" in op.type.dims else 0)
        )
    loops = list(only(blocks["consumer"].ops, tile.Loop))
    producer: list[Op] = [pipe.ProducerLoad(f"_load_{op.name}", f"{op.src.tensor}_pipeline", op.src) for op in once]
    producer += [replace(loop, name=f"copy_{loop.name}", carry=(), body="copy", tiles=()) for loop in loops]
    streamed = [op for home, op in loads if home != "consumer"]
    producer += [pipe.ProducerTail(f"_tail_{op.name}", f"{op.src.tensor}_pipeline") for op in streamed]
    first_tile = streamed[0]  # the tile that an iteration loads first: K, or Q in the backward. Metadata comes with it.
    row_vectors = [op for op in only(kernel.ops(), tile.Load) if is_row_vector(kernel, op)]
    sources: dict[str, tile.Load] = {}
    for op in row_vectors:  # a mask and a score modifier may read one tensor
        sources.setdefault(op.src.tensor, op)
    for op in sources.values():
        vector = replace(op.type, space="sram")
        tiles = f"{first_tile.src.tensor}_pipeline"
        pipelines.append(pipe.Pipeline(f"{op.src.tensor}_pipeline", vector, symbol("num_stages"), metadata_of=tiles))
    copied = (*sources.values(), *streamed)
    copy_ops = (
        *(pipe.ProducerLoad(f"_load_{op.name}", f"{op.src.tensor}_pipeline", op.src) for op in copied),
        tile.Yield("_yield_copy", ()),
    )
    made = {
        "entry": replace(blocks["entry"], ops=(*blocks["entry"].ops, *pipelines)),
        "producer": replace(blocks["producer"], ops=tuple(producer)),
    }
    replacements: dict[str, Op] = {
        op.name: pipe.ConsumerWait(op.name, f"{op.src.tensor}_pipeline", op.type) for _, op in loads
    }
    replacements |= {
        op.name: pipe.ReadMetadata(op.name, f"{op.src.tensor}_pipeline", first_tile.name, op.type) for op in row_vectors
    }
    for block in kernel.blocks:
        if block.name not in made:
            made[block.name] = replace(
                block, ops=tuple(_with_waits(block.ops, replacements, {op.name for op in streamed}))
            )
    return replace(
        kernel,
        blocks=(*made.values(), Block("copy", copy_ops, about="load the tiles that consumers use in one iteration")),
    )


def _has_one_stage(kernel: Kernel, load: tile.Load) -> bool:
    """True if the pipeline of a tile has one stage. In the separate kernels of dQ and dK, that is the tile that only
    one product reads; two read the other tile.

    The tile is released early in an iteration, and there is room for only one stage of it.
    """
    readers = [op for op in kernel.traits.dots if load.name in (op.a, op.b)]
    return computes_dp(kernel) and len(readers) == 1


def _with_waits(ops: tuple[Op, ...], replacements: dict[str, Op], streamed: set[str]) -> Iterable[Op]:
    """Replace loads by waits, and release each streamed tile after the last op that needs it.

    A row vector is read where it is first needed, so that registers do not hold it for long; its tile is kept until
    then. The tile of a product onto which another one is accumulated is kept until the end of the latter, because one
    wait is for both.
    """
    changed = list(_with_late_reads([replacements.get(op.name, op) for op in ops]))
    tiles = {name: name for name in streamed} | {op.name: op.tile for op in only(changed, pipe.ReadMetadata)}
    added = {op.acc: op.name for op in only(changed, tile.Dot)}
    last: dict[str, str] = {}
    for op in changed:
        reader = op.name
        while reader in added:
            reader = added[reader]
        last |= {
            tiles[name]: reader for name in op.operands() if name in tiles and not isinstance(op, pipe.ReadMetadata)
        }
    for op in changed:
        yield op
        yield from (
            pipe.ConsumerRelease(f"_release_{name}", name) for name, reader in last.items() if reader == op.name
        )


def _with_late_reads(ops: list[Op]) -> Iterable[Op]:
    """Defer each read of a row vector to just before the first op that needs it. If that op comes before the
    consumer_wait of the vector's tile, defer it, too: until an op needs it that comes after this wait."""
    deferred: dict[str, tuple[Op, set[str]]] = {}  # name of a deferred op -> the op, the tiles whose vectors it needs
    available: set[str] = set()  # tiles whose consumer_wait has been emitted

    def emit_deferred(name: str) -> Iterable[Op]:
        """Emit a deferred op, after the deferred ops that it needs; nothing for any other op."""
        if name in deferred:
            op, _ = deferred.pop(name)
            yield from (x for operand in op.operands() for x in emit_deferred(operand))
            yield op

    for op in ops:
        tiles = (
            {op.tile}
            if isinstance(op, pipe.ReadMetadata)
            else set().union(*(deferred[name][1] for name in op.operands() if name in deferred))
        )
        if isinstance(op, pipe.ReadMetadata) or tiles - available:
            deferred[op.name] = op, tiles
            continue
        yield from (x for operand in op.operands() for x in emit_deferred(operand))
        yield op
        available |= {op.name} if isinstance(op, pipe.ConsumerWait) else set()
