"""insert-pipelines: the producer fills rings with the tiles that consumers load.

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

The producer runs over the tiles that consumers run over, in their order. A tile that is loaded once, such as that of
queries, has a ring of one slot for each consumer, with its rows; it is filled once, so it is never given back.

Numbers of keys, such as the documents that they belong to, lie beside the tile of keys. Consumers would wait longer for
device memory:

before:  %k = load %K[...] ; %ids = load %IDS[b, kv]
after:   %k = consumer_wait %K_pipeline ; %ids = read_metadata %IDS_pipeline beside(%k)

The copy engine fills buffers of powers of two. Tiles whose width is none, such as 192 columns, lie in pieces:

         %K_pipeline = pipeline stages(num_stages) columns(64) : T[BLOCK_KV, D_QK] @sram
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.expr import symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Block, Dot, Load, Loop, Op, Yield
from attngen.ir.pipe import ConsumerRelease, ConsumerWait, Pipeline, ProducerLoad, ProducerTail, ReadMetadata
from attngen.targets.hopper.configs.common import is_of_keys
from attngen.targets.hopper.configs.head_dims import piece_of
from attngen.targets.hopper.configs.mla_decode import is_of_latents
from attngen.targets.hopper.configs.separate_backward import has_dp
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
                k if is_of_latents(k) else _with_pipelines(k, piece) for k in module.warp_specialized
            ),
        )


def _with_pipelines(kernel: Kernel, piece: int) -> Kernel:
    """piece: the columns of a piece of a tile of Q or K; 0 where such a tile is whole."""
    blocks = {block.name: block for block in kernel.blocks}
    loads = [(name, op) for name, block in blocks.items() for op in block.ops if isinstance(op, Load) and op.via]
    once = [op for home, op in loads if home == "consumer"]
    pipelines = []
    for _, op in loads:
        stages = sympy.Integer(1) if op in once or _is_lone(kernel, op) else symbol("num_stages")
        each = "consumer" if op in once else ""
        pipelines.append(
            Pipeline(f"{op.src.tensor}_pipeline", op.type, stages, each, piece if "D_QK" in op.type.dims else 0)
        )
    loops = [op for op in blocks["consumer"].ops if isinstance(op, Loop)]
    producer: list[Op] = [ProducerLoad(f"fill_{op.name}", f"{op.src.tensor}_pipeline", op.src) for op in once]
    producer += [replace(loop, name=f"copy_{loop.name}", carry=(), body="copy", tiles=()) for loop in loops]
    streamed = [op for home, op in loads if home != "consumer"]
    producer += [ProducerTail(f"drain_{op.name}", f"{op.src.tensor}_pipeline") for op in streamed]
    keys, beside = streamed[0], [op for op in kernel.ops() if isinstance(op, Load) and is_of_keys(kernel, op)]
    sources: dict[str, Load] = {}
    for op in beside:  # a mask and a score may read one tensor
        sources.setdefault(op.src.tensor, op)
    for op in sources.values():
        numbers = replace(op.type, space="sram")
        pipelines.append(
            Pipeline(f"{op.src.tensor}_pipeline", numbers, symbol("num_stages"), beside=f"{keys.src.tensor}_pipeline")
        )
    copied = (*sources.values(), *streamed)
    instances = (
        *(ProducerLoad(f"fill_{op.name}", f"{op.src.tensor}_pipeline", op.src) for op in copied),
        Yield("yield_copy", ()),
    )
    made = {
        "entry": replace(blocks["entry"], ops=(*blocks["entry"].ops, *pipelines)),
        "producer": replace(blocks["producer"], ops=tuple(producer)),
    }
    taken: dict[str, Op] = {op.name: ConsumerWait(op.name, f"{op.src.tensor}_pipeline", op.type) for _, op in loads}
    taken |= {op.name: ReadMetadata(op.name, f"{op.src.tensor}_pipeline", keys.name, op.type) for op in beside}
    for block in kernel.blocks:
        if block.name not in made:
            made[block.name] = replace(block, ops=tuple(_taking(block.ops, taken, {op.name for op in streamed})))
    return replace(kernel, blocks=(*made.values(), Block("copy", instances, about="what consumers take in a turn")))


def _is_lone(kernel: Kernel, tile: Load) -> bool:
    """Whether one product reads a tile that lies beside one of which two products read, in a kernel of dQ or dK.

    It is given back early in a turn. There is room for one slot.
    """
    readers = [op for op in kernel.dots if tile.name in (op.a, op.b)]
    return has_dp(kernel) and len(readers) == 1


def _taking(ops: tuple[Op, ...], taken: dict[str, Op], streamed: set[str]) -> Iterable[Op]:
    """The ops with takes in place of loads, and streamed tiles given back after what needs them last.

    What lies beside a tile is read where it is first needed, so that registers do not hold it for long; the tile is
    kept until then. So is one of a product to which another one is added: both will be awaited together.
    """
    changed = list(_as_needed([taken.get(op.name, op) for op in ops]))
    tiles = {name: name for name in streamed} | {op.name: op.beside for op in changed if isinstance(op, ReadMetadata)}
    added = {op.acc: op.name for op in changed if isinstance(op, Dot)}
    last: dict[str, str] = {}
    for op in changed:
        reader = op.name
        while reader in added:
            reader = added[reader]
        last |= {tiles[name]: reader for name in op.operands() if name in tiles and not isinstance(op, ReadMetadata)}
    for op in changed:
        yield op
        yield from (ConsumerRelease(f"give_{name}", name) for name, reader in last.items() if reader == op.name)


def _as_needed(ops: list[Op]) -> Iterable[Op]:
    """The ops with each read of what lies beside a tile where it is first needed. What needs one before the tile is
    taken waits, too."""
    waiting: dict[str, tuple[Op, set[str]]] = {}  # the tiles whose neighbours an op needs
    had: set[str] = set()

    def due(name: str) -> Iterable[Op]:
        if name in waiting:
            op, _ = waiting.pop(name)
            yield from (x for operand in op.operands() for x in due(operand))
            yield op

    for op in ops:
        tiles = (
            {op.beside}
            if isinstance(op, ReadMetadata)
            else set().union(*(waiting[name][1] for name in op.operands() if name in waiting))
        )
        if isinstance(op, ReadMetadata) or tiles - had:
            waiting[op.name] = op, tiles
            continue
        yield from (x for operand in op.operands() for x in due(operand))
        yield op
        had |= {op.name} if isinstance(op, ConsumerWait) else set()
