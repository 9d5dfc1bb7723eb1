"""reduce-dq: pass tiles of dQ through shared memory to the dQ reduction warp, which adds them to device memory.

A tile of dQ sums over the keys of all consumers. So each consumer writes its rows of dS to shared memory, and computes
its share of dQ from the rows of all consumers. A share is half of the columns, or half of the rows if tiles have more
than 64 queries. The dQ reduction warp waits for the semaphore and for TMA. For the fused backward.

before:  block @entry
           %K_pipeline = pipeline stages(1) per_instance(consumer) : T[BLOCK_KV, D_QK]
         warp_group @consumer ...
           %k = consumer_wait %K_pipeline
         block @step
           %dk_next = dot %ds %q ...
           %dq = dot %ds %k over(BLOCK_KV)
           ordered_add %DQ_ACC[b, h, q, d_qk] %dq ...
         warp_group @dq_reducer ...
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
           %dq = wgmma_wait %dq_flight : f32[BLOCK_Q, SLICE_QK]
           consumer_release %ds_all
           producer_store %dQ_pipeline %dq
         warp_group @dq_reducer ...
           %dQ_total = loop q ranges(...) body(@write)
         block @write
           %dq_tile = consumer_wait %dQ_pipeline
           ordered_add %DQ_ACC[b, h, q, d_qk] %dq_tile ...
           consumer_release %dq_tile
           semaphore_release %dQ_SEMAPHORE[b, h, q_start]

Wide heads leave room for one stage of dO and one of dQ. Tiles of dQ are stored in pieces if tiles of K are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.core import Block, Op, Type
from attngen.ir.dims import AXIS_DIM
from attngen.ir.expr import symbol
from attngen.ir.kernel import Kernel
from attngen.ir.module import Module
from attngen.ir.ops import Dot, Loop, OrderedAdd, Yield
from attngen.ir.pipe import (
    SLICE_DIM,
    TILE_DIM,
    ConsumerRelease,
    ConsumerWait,
    Pack,
    Pipeline,
    ProducerStore,
    SliceRows,
    Wgmma,
    WgmmaWait,
)
from attngen.ir.pipe_control import SemaphoreRelease
from attngen.targets.hopper.configs.common import NARROW
from attngen.targets.hopper.configs.families import with_fused_backward
from attngen.targets.hopper.configs.fused_backward import INSTANCES, is_wide
from attngen.targets.hopper.configs.head_dims import piece_of
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.tiles.order import order_ops
from attngen.transforms.base import Pass

# Stages of dQ: one tile is added while consumers store the next. Wide heads leave room for one, and one of dO.
DQ_STAGES = 2


@dataclass(frozen=True)
class ReduceDQ(Pass):
    name: ClassVar[str] = "reduce-dq"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_fused_backward(module, lambda kernel: _reduce(module, kernel))


def _reduce(module: Module, kernel: Kernel) -> Kernel:
    add = next(op for op in kernel.ops() if isinstance(op, OrderedAdd))
    product = kernel.op(add.value)
    assert isinstance(product, Dot)
    keys = kernel.op(product.b)
    assert isinstance(keys, ConsumerWait)
    program_dim = AXIS_DIM[kernel.program_axis]
    long_tiles = all(config.block_q > ROWS for config in module.configs(kernel.name, kernel.backend))
    split_dim = "BLOCK_Q" if long_tiles else "D_QK"
    part = replace(product.type, dims=tuple(SLICE_DIM[d] if d == split_dim else d for d in product.type.dims))
    ds = replace(kernel.type_of(product.a), dtype="T")
    whole = replace(ds, dims=tuple(TILE_DIM.get(d, d) if d == program_dim else d for d in ds.dims), space="sram")
    all_keys = replace(keys.type, dims=tuple(TILE_DIM[program_dim] if d == program_dim else d for d in keys.type.dims))
    tile = replace(product.type, space="sram")
    cast, ds_all = f"{product.a}_cast", f"{product.a}_all"
    one_stage = is_wide(module)
    stages = 1 if one_stage or (kernel.reads_pairs and module.head_dim_v > NARROW) else DQ_STAGES
    dq = Pipeline("dQ_pipeline", tile, sympy.Integer(stages), columns=piece_of(module.head_dim_qk) // INSTANCES)
    pipelines = (Pipeline("dS_pipeline", whole, symbol("num_stages")), dq)
    order = order_ops(kernel, add)
    users = [op for op in kernel.ops() if isinstance(op, Dot) and op.a == product.a]

    def change(_: str, op: Op) -> Iterator[Op]:
        if isinstance(op, Pipeline) and op.name == keys.pipeline:
            yield replace(op, type=all_keys, per_instance="")
        elif isinstance(op, Pipeline) and one_stage and op.type.dims == ("BLOCK_Q", "D_V"):
            yield replace(op, stages=sympy.Integer(1))
        elif op is keys:
            yield replace(keys, name=f"{keys.name}_all", type=all_keys)
            yield SliceRows(keys.name, f"{keys.name}_all", keys.type)
        elif op is product:
            yield ConsumerWait(ds_all, "dS_pipeline", whole)
            yield Wgmma(
                f"{product.name}_flight",
                ds_all,
                f"{keys.name}_all",
                TILE_DIM[program_dim],
                replace(part, space="flight"),
            )
            yield WgmmaWait(product.name, f"{product.name}_flight", part)
            yield ConsumerRelease(f"_release_{ds_all}", ds_all)
        elif op is add:
            yield ProducerStore("_store_dq", "dQ_pipeline", product.name)
        elif op in order:
            return  # the dQ reduction warp gets them
        elif op in users:
            if op is users[0]:
                yield Pack(cast, product.a, ds)
                yield ProducerStore("_store_ds", "dS_pipeline", cast)
            yield op.with_operands({product.a: cast})
        else:
            yield op

    changed = kernel.rewrite(change)
    more = {"entry": pipelines, "dq_reducer": _reducer_loops(kernel)}
    blocks = tuple(replace(b, ops=(*b.ops, *more.get(b.name, ()))) for b in changed.blocks)
    return replace(changed, blocks=(*blocks, _reducer_body(add, order, tile)))


def _reducer_loops(kernel: Kernel) -> tuple[Op, ...]:
    """The loops of the consumers, for the dQ reduction warp."""
    loops = (op for op in kernel.block("consumer").ops if isinstance(op, Loop))
    return tuple(replace(loop, name=f"dQ_{loop.name}", carry=(), body="write", tiles=()) for loop in loops)


def _reducer_body(add: OrderedAdd, order: Sequence[Op], tile: Type) -> Block:
    """The body of the dQ reduction warp's loops; order: the ops that compute the position in the semaphore's order."""
    assert add.semaphore is not None
    ops = (
        *order,
        ConsumerWait("dq_tile", "dQ_pipeline", tile),
        replace(add, value="dq_tile"),
        ConsumerRelease("_release_dq_tile", "dq_tile"),
        SemaphoreRelease("_release_dq_semaphore", add.semaphore),
        Yield("_yield_write", ()),
    )
    return Block("write", ops, about="add the consumers' tiles of dQ to device memory")
