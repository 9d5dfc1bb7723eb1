"""make-rings: the producer fills rings with the tiles that consumers load.

before:  role @producer ...                          role @consumer ...
                                                       %keys = loop kv ranges(0 .. kv_end) ... body(@step) cls(full)
                                                     block @step
                                                       %k = load %K[b, h, kv, d_qk] via(descriptor) : T[BLOCK_KV, D_QK] @sram
                                                       %s = dot %q %k over(D_QK)
after:   block @entry
           %K_ring = ring slots(num_stages) : T[BLOCK_KV, D_QK] @sram
         role @producer ...                          role @consumer ...
           %copy_keys = loop kv ranges(0 .. kv_end)    %keys = loop kv ranges(0 .. kv_end) ... body(@step) cls(full)
             body(@copy) cls(full)                   block @step
           drain %K_ring                               %k = take %K_ring : T[BLOCK_KV, D_QK] @sram
         block @copy                                   %s = dot %q %k over(D_QK)
           fill %K_ring %K[b, h, kv, d_qk]             give %k

The producer runs over the tiles that consumers run over, in their order. A tile that is loaded once, such as that of queries, has a ring
of one slot for each consumer, with its rows; it is filled once, so it is never given back.

Numbers of keys, such as the documents that they belong to, lie beside the tile of keys. Consumers would wait longer for device memory:

         %k = load %K[...] ; %ids = load %IDS[b, kv]        %k = take %K_ring ; %ids = read %IDS_ring beside(%k)

The copy engine fills buffers of powers of two. Tiles whose width is none, such as 192 columns, lie in pieces:

         %K_ring = ring slots(num_stages) columns(64) : T[BLOCK_KV, D_QK] @sram
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.expr import symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Block, Dot, Load, Loop, Op, Yield
from attngen.ir.pipe import Drain, Fill, Give, Read, Ring, Take
from attngen.targets.hopper.configs.common import is_of_keys
from attngen.targets.hopper.configs.head_dims import piece_of
from attngen.targets.hopper.configs.mla_decode import is_of_latents
from attngen.targets.hopper.configs.separate_backward import has_dp
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class MakeRings(Pass):
    name: ClassVar[str] = "make-rings"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        piece = piece_of(module.head_dim_qk)
        return replace(module, divided=tuple(k if is_of_latents(k) else _with_rings(k, piece) for k in module.divided))


def _with_rings(kernel: Kernel, piece: int) -> Kernel:
    """piece: the columns of a piece of a tile of Q or K; 0 where such a tile is whole."""
    blocks = {block.name: block for block in kernel.blocks}
    loads = [(name, op) for name, block in blocks.items() for op in block.ops if isinstance(op, Load) and op.via]
    once = [op for home, op in loads if home == "consumer"]
    rings = []
    for _, op in loads:
        slots = sympy.Integer(1) if op in once or _is_lone(kernel, op) else symbol("num_stages")
        each = "consumer" if op in once else ""
        rings.append(Ring(f"{op.src.tensor}_ring", op.type, slots, each, piece if "D_QK" in op.type.dims else 0))
    loops = [op for op in blocks["consumer"].ops if isinstance(op, Loop)]
    producer: list[Op] = [Fill(f"fill_{op.name}", f"{op.src.tensor}_ring", op.src) for op in once]
    producer += [replace(loop, name=f"copy_{loop.name}", carry=(), body="copy", tiles=()) for loop in loops]
    streamed = [op for home, op in loads if home != "consumer"]
    producer += [Drain(f"drain_{op.name}", f"{op.src.tensor}_ring") for op in streamed]
    keys, beside = streamed[0], [op for op in kernel.ops() if isinstance(op, Load) and is_of_keys(kernel, op)]
    sources: dict[str, Load] = {}
    for op in beside:  # a mask and a score may read one tensor
        sources.setdefault(op.src.tensor, op)
    for op in sources.values():
        numbers = replace(op.type, space="sram")
        rings.append(Ring(f"{op.src.tensor}_ring", numbers, symbol("num_stages"), beside=f"{keys.src.tensor}_ring"))
    copied = (*sources.values(), *streamed)
    copies = (*(Fill(f"fill_{op.name}", f"{op.src.tensor}_ring", op.src) for op in copied), Yield("yield_copy", ()))
    made = {
        "entry": replace(blocks["entry"], ops=(*blocks["entry"].ops, *rings)),
        "producer": replace(blocks["producer"], ops=tuple(producer)),
    }
    taken: dict[str, Op] = {op.name: Take(op.name, f"{op.src.tensor}_ring", op.type) for _, op in loads}
    taken |= {op.name: Read(op.name, f"{op.src.tensor}_ring", keys.name, op.type) for op in beside}
    for block in kernel.blocks:
        if block.name not in made:
            made[block.name] = replace(block, ops=tuple(_taking(block.ops, taken, {op.name for op in streamed})))
    return replace(kernel, blocks=(*made.values(), Block("copy", copies, about="what consumers take in a turn")))


def _is_lone(kernel: Kernel, tile: Load) -> bool:
    """Whether one product reads a tile that lies beside one of which two products read, in a kernel of dQ or dK.

    It is given back early in a turn. There is room for one slot.
    """
    readers = [op for op in kernel.dots if tile.name in (op.a, op.b)]
    return has_dp(kernel) and len(readers) == 1


def _taking(ops: tuple[Op, ...], taken: dict[str, Op], streamed: set[str]) -> Iterable[Op]:
    """The ops with takes in place of loads, and streamed tiles given back after what needs them last.

    What lies beside a tile is read where it is first needed, so that registers do not hold it for long; the tile is kept until then. So is
    one of a product to which another one is added: both will be awaited together.
    """
    changed = list(_as_needed([taken.get(op.name, op) for op in ops]))
    tiles = {name: name for name in streamed} | {op.name: op.beside for op in changed if isinstance(op, Read)}
    added = {op.acc: op.name for op in changed if isinstance(op, Dot)}
    last: dict[str, str] = {}
    for op in changed:
        reader = op.name
        while reader in added:
            reader = added[reader]
        last |= {tiles[name]: reader for name in op.operands() if name in tiles and not isinstance(op, Read)}
    for op in changed:
        yield op
        yield from (Give(f"give_{name}", name) for name, reader in last.items() if reader == op.name)


def _as_needed(ops: list[Op]) -> Iterable[Op]:
    """The ops with each read of what lies beside a tile where it is first needed. What needs one before the tile is taken waits, too."""
    waiting: dict[str, tuple[Op, set[str]]] = {}  # the tiles whose neighbours an op needs
    had: set[str] = set()

    def due(name: str) -> Iterable[Op]:
        if name in waiting:
            op, _ = waiting.pop(name)
            yield from (x for operand in op.operands() for x in due(operand))
            yield op

    for op in ops:
        tiles = {op.beside} if isinstance(op, Read) else set().union(*(waiting[name][1] for name in op.operands() if name in waiting))
        if isinstance(op, Read) or tiles - had:
            waiting[op.name] = op, tiles
            continue
        yield from (x for operand in op.operands() for x in due(operand))
        yield op
        had |= {op.name} if isinstance(op, Take) else set()
