"""share-gradients: consumers write what each has of a sum to shared memory, multiply parts of all, and a writer adds the products.

before:  block @entry                                    after:  block @entry
           %K_ring = ring slots(1) each(consumer)                  %K_ring = ring slots(1)
             : T[BLOCK_KV, D_QK]                                     : T[TILE_KV, D_QK]
                                                                   %dS_ring = ring slots(num_stages) : T[TILE_KV, BLOCK_Q]
                                                                   %dQ_ring = ring slots(2) : f32[BLOCK_Q, D_QK]
         role @consumer ...                                      role @consumer ...
           %k = take %K_ring                                       %k_all = take %K_ring
                                                                   %k = own %k_all
         block @step                                             block @step
           %dk_next = dot %ds %q ...                               %ds_cast = pack %ds
           %dq = dot %ds %k over(BLOCK_KV)                         share %dS_ring %ds_cast
           add %DQ_ACC[b, h, q, d_qk] %dq ...                      %dk_next = dot %ds_cast %q ...
                                                                   %ds_all = take %dS_ring
                                                                   %dq_flight = issue %ds_all %k_all over(TILE_KV)
                                                                   %dq = await %dq_flight : f32[BLOCK_Q, PART_QK]
                                                                   give %ds_all
                                                                   share %dQ_ring %dq
         role @writer ...                                        role @writer ...
                                                                   %write_total = loop q ranges(...) body(@write)
                                                                 block @write
                                                                   %dq_tile = take %dQ_ring
                                                                   add %DQ_ACC[b, h, q, d_qk] %dq_tile ...
                                                                   give %dq_tile
                                                                   raise %DQ_TURNS[b, h, q_start]

A tile of dQ sums over the keys of all consumers. So each writes its rows of dS to shared memory, and multiplies those of all for its part
of dQ: half of the columns, or of the rows of tiles of more than 64 queries. What it would wait for, turns and the copy engine, is the
writer's to wait for. Of wide heads there is room for one slot of dO and one of dQ, which lies in pieces if tiles of keys do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.expr import symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import AXIS_DIM, Add, Block, Dot, Loop, Op, Yield
from attngen.ir.pipe import PARTS, WHOLE, Await, Give, Issue, Own, Pack, Raise, Ring, Share, Take
from attngen.targets.hopper.configs.common import NARROW
from attngen.targets.hopper.configs.families import with_backward
from attngen.targets.hopper.configs.fused_backward import COPIES, is_wide
from attngen.targets.hopper.configs.head_dims import piece_of
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.tiles.order import makers_of
from attngen.transforms.base import Pass

SUMS = 2  # slots of dQ: the writer adds one tile while consumers write the next. Of wide heads there is room for one, and for one of dO


@dataclass(frozen=True)
class ShareGradients(Pass):
    name: ClassVar[str] = "share-gradients"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_backward(module, lambda kernel: _shared(module, kernel))


def _shared(module: Module, kernel: Kernel) -> Kernel:
    add = next(op for op in kernel.ops() if isinstance(op, Add))
    product = kernel.op(add.value)
    assert isinstance(product, Dot)
    keys = kernel.op(product.b)
    assert isinstance(keys, Take)
    own = AXIS_DIM[kernel.own_axis]
    wide = all(row.block_q > ROWS for row in module.rows(kernel.name, kernel.backend))
    divided = "BLOCK_Q" if wide else "D_QK"
    part = replace(product.type, dims=tuple(PARTS[d] if d == divided else d for d in product.type.dims))
    source = kernel.type_of(product.a)
    ds = replace(source, dtype="T")
    whole = replace(ds, dims=tuple(WHOLE.get(d, d) if d == own else d for d in ds.dims), space="sram")
    all_keys = replace(keys.type, dims=tuple(WHOLE[own] if d == own else d for d in keys.type.dims))
    tile = replace(product.type, space="sram")
    cast, everyone = f"{product.a}_cast", f"{product.a}_all"
    one = is_wide(module)
    slots = 1 if one or (kernel.reads_pairs and module.head_dim_v > NARROW) else SUMS
    sums = Ring("dQ_ring", tile, sympy.Integer(slots), columns=piece_of(module.head_dim_qk) // COPIES)
    rings = (Ring("dS_ring", whole, symbol("num_stages")), sums)
    makers = makers_of(kernel, add)
    users = [op for op in kernel.ops() if isinstance(op, Dot) and op.a == product.a]

    def change(_: str, op: Op) -> Iterator[Op]:
        if isinstance(op, Ring) and op.name == keys.ring:
            yield replace(op, type=all_keys, each="")
        elif isinstance(op, Ring) and one and op.type.dims == ("BLOCK_Q", "D_V"):
            yield replace(op, slots=sympy.Integer(1))
        elif op is keys:
            yield replace(keys, name=f"{keys.name}_all", type=all_keys)
            yield Own(keys.name, f"{keys.name}_all", keys.type)
        elif op is product:
            yield Take(everyone, "dS_ring", whole)
            yield Issue(f"{product.name}_flight", everyone, f"{keys.name}_all", WHOLE[own], replace(part, space="flight"))
            yield Await(product.name, f"{product.name}_flight", part)
            yield Give(f"give_{everyone}", everyone)
        elif op is add:
            yield Share("share_dq", "dQ_ring", product.name)
        elif op in makers:
            return  # the writer, whose turn it is, has them
        elif op in users:
            if op is users[0]:
                yield Pack(cast, product.a, ds)
                yield Share("share_ds", "dS_ring", cast)
            yield op.with_operands({product.a: cast})
        else:
            yield op

    changed = kernel.rewrite(change)
    turns = add.turns
    assert turns is not None
    write = (
        *makers,
        Take("dq_tile", "dQ_ring", tile),
        replace(add, value="dq_tile"),
        Give("give_dq_tile", "dq_tile"),
        Raise("raise_turn", turns),
        Yield("yield_write", ()),
    )
    loops = [op for op in kernel.block("consumer").ops if isinstance(op, Loop)]
    writing = tuple(replace(loop, name=f"write_{loop.name}", carry=(), body="write", tiles=()) for loop in loops)
    more = {"entry": rings, "writer": writing}
    blocks = tuple(replace(b, ops=(*b.ops, *more.get(b.name, ()))) for b in changed.blocks)
    return replace(changed, blocks=(*blocks, Block("write", write, about="add what consumers have of a tile to dQ")))
