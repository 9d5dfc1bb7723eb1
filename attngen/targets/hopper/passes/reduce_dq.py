"""reduce-dq: consumers write what each has of a sum to shared memory, multiply parts of all, and a writer adds the
products.

before:  block @entry
           %K_pipeline = pipeline stages(1) per_instance(consumer) : T[BLOCK_KV, D_QK]
         warp_group @consumer ...
           %k = consumer_wait %K_pipeline
         block @step
           %dk_next = dot %ds %q ...
           %dq = dot %ds %k over(BLOCK_KV)
           ordered_add %DQ_ACC[b, h, q, d_qk] %dq ...
         warp_group @writer ...
after:   block @entry
           %K_pipeline = pipeline stages(1) : T[TILE_KV, D_QK]
           %dS_pipeline = pipeline stages(num_stages) : T[TILE_KV, BLOCK_Q]
           %dQ_pipeline = pipeline stages(2) : f32[BLOCK_Q, D_QK]
         warp_group @consumer ...
           %k_all = consumer_wait %K_pipeline
           %k = slice_rows %k_all
         block @step
           %ds_cast = pack %ds
           producer_store %dS_pipeline %ds_cast
           %dk_next = dot %ds_cast %q ...
           %ds_all = consumer_wait %dS_pipeline
           %dq_flight = wgmma %ds_all %k_all over(TILE_KV)
           %dq = wgmma_wait %dq_flight : f32[BLOCK_Q, PART_QK]
           consumer_release %ds_all
           producer_store %dQ_pipeline %dq
         warp_group @writer ...
           %write_total = loop q ranges(...) body(@write)
         block @write
           %dq_tile = consumer_wait %dQ_pipeline
           ordered_add %DQ_ACC[b, h, q, d_qk] %dq_tile ...
           consumer_release %dq_tile
           semaphore_release %DQ_SEMAPHORE[b, h, q_start]

A tile of dQ sums over the keys of all consumers. So each writes its rows of dS to shared memory, and multiplies those
of all for its part of dQ: half of the columns, or of the rows of tiles of more than 64 queries. What it would wait for,
turns and the copy engine, is the writer's to wait for. Of wide heads there is room for one slot of dO and one of dQ,
which lies in pieces if tiles of keys do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.expr import symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import AXIS_DIM, Block, Dot, Loop, Op, OrderedAdd, Yield
from attngen.ir.pipe import (
    PARTS,
    WHOLE,
    ConsumerRelease,
    ConsumerWait,
    Pack,
    Pipeline,
    ProducerStore,
    SemaphoreRelease,
    SliceRows,
    Wgmma,
    WgmmaWait,
)
from attngen.targets.hopper.configs.common import NARROW
from attngen.targets.hopper.configs.families import with_backward
from attngen.targets.hopper.configs.fused_backward import INSTANCES, is_wide
from attngen.targets.hopper.configs.head_dims import piece_of
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.tiles.order import makers_of
from attngen.transforms.base import Pass

# slots of dQ: the writer adds one tile while consumers write the next. Of wide heads there is room for one, and for one
# of dO
SUMS = 2


@dataclass(frozen=True)
class ReduceDQ(Pass):
    name: ClassVar[str] = "reduce-dq"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_backward(module, lambda kernel: _shared(module, kernel))


def _shared(module: Module, kernel: Kernel) -> Kernel:
    add = next(op for op in kernel.ops() if isinstance(op, OrderedAdd))
    product = kernel.op(add.value)
    assert isinstance(product, Dot)
    keys = kernel.op(product.b)
    assert isinstance(keys, ConsumerWait)
    own = AXIS_DIM[kernel.program_axis]
    wide = all(row.block_q > ROWS for row in module.configs(kernel.name, kernel.backend))
    warp_specialized = "BLOCK_Q" if wide else "D_QK"
    part = replace(product.type, dims=tuple(PARTS[d] if d == warp_specialized else d for d in product.type.dims))
    source = kernel.type_of(product.a)
    ds = replace(source, dtype="T")
    whole = replace(ds, dims=tuple(WHOLE.get(d, d) if d == own else d for d in ds.dims), space="sram")
    all_keys = replace(keys.type, dims=tuple(WHOLE[own] if d == own else d for d in keys.type.dims))
    tile = replace(product.type, space="sram")
    cast, everyone = f"{product.a}_cast", f"{product.a}_all"
    one = is_wide(module)
    stages = 1 if one or (kernel.reads_pairs and module.head_dim_v > NARROW) else SUMS
    sums = Pipeline("dQ_pipeline", tile, sympy.Integer(stages), columns=piece_of(module.head_dim_qk) // INSTANCES)
    pipelines = (Pipeline("dS_pipeline", whole, symbol("num_stages")), sums)
    makers = makers_of(kernel, add)
    users = [op for op in kernel.ops() if isinstance(op, Dot) and op.a == product.a]

    def change(_: str, op: Op) -> Iterator[Op]:
        if isinstance(op, Pipeline) and op.name == keys.pipeline:
            yield replace(op, type=all_keys, per_instance="")
        elif isinstance(op, Pipeline) and one and op.type.dims == ("BLOCK_Q", "D_V"):
            yield replace(op, stages=sympy.Integer(1))
        elif op is keys:
            yield replace(keys, name=f"{keys.name}_all", type=all_keys)
            yield SliceRows(keys.name, f"{keys.name}_all", keys.type)
        elif op is product:
            yield ConsumerWait(everyone, "dS_pipeline", whole)
            yield Wgmma(
                f"{product.name}_flight", everyone, f"{keys.name}_all", WHOLE[own], replace(part, space="flight")
            )
            yield WgmmaWait(product.name, f"{product.name}_flight", part)
            yield ConsumerRelease(f"give_{everyone}", everyone)
        elif op is add:
            yield ProducerStore("share_dq", "dQ_pipeline", product.name)
        elif op in makers:
            return  # the writer, whose turn it is, has them
        elif op in users:
            if op is users[0]:
                yield Pack(cast, product.a, ds)
                yield ProducerStore("share_ds", "dS_pipeline", cast)
            yield op.with_operands({product.a: cast})
        else:
            yield op

    changed = kernel.rewrite(change)
    turns = add.semaphore
    assert turns is not None
    write = (
        *makers,
        ConsumerWait("dq_tile", "dQ_pipeline", tile),
        replace(add, value="dq_tile"),
        ConsumerRelease("give_dq_tile", "dq_tile"),
        SemaphoreRelease("raise_turn", turns),
        Yield("yield_write", ()),
    )
    loops = [op for op in kernel.block("consumer").ops if isinstance(op, Loop)]
    writing = tuple(replace(loop, name=f"write_{loop.name}", carry=(), body="write", tiles=()) for loop in loops)
    more = {"entry": pipelines, "writer": writing}
    blocks = tuple(replace(b, ops=(*b.ops, *more.get(b.name, ()))) for b in changed.blocks)
    return replace(changed, blocks=(*blocks, Block("write", write, about="add what consumers have of a tile to dQ")))
