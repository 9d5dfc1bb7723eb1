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

from attngen.ir import AXIS_DIM, Block, Kernel, Module, Op, Type, only, pipe, symbol, tile
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
    add = next(only(kernel.ops(), tile.OrderedAdd))
    product = kernel.op(add.value)
    assert isinstance(product, tile.Dot)
    keys = kernel.op(product.b)
    assert isinstance(keys, pipe.ConsumerWait)
    program_dim = AXIS_DIM[kernel.program_axis]
    long_tiles = all(config.block_q > ROWS for config in module.configs(kernel.name, kernel.backend))
    split_dim = "BLOCK_Q" if long_tiles else "D_QK"
    part = replace(product.type, dims=tuple(pipe.SLICE_DIM[d] if d == split_dim else d for d in product.type.dims))
    ds = replace(kernel.type_of(product.a), dtype="T")
    whole = replace(ds, dims=tuple(pipe.TILE_DIM.get(d, d) if d == program_dim else d for d in ds.dims), space="sram")
    all_keys = replace(
        keys.type, dims=tuple(pipe.TILE_DIM[program_dim] if d == program_dim else d for d in keys.type.dims)
    )
    buffer = replace(product.type, space="sram")
    cast, ds_all = f"{product.a}_cast", f"{product.a}_all"
    one_stage = is_wide(module)
    stages = 1 if one_stage or (kernel.traits.reads_pairs and module.head_dim_v > NARROW) else DQ_STAGES
    dq = pipe.Pipeline("dQ_pipeline", buffer, sympy.Integer(stages), columns=piece_of(module.head_dim_qk) // INSTANCES)
    pipelines = (pipe.Pipeline("dS_pipeline", whole, symbol("num_stages")), dq)
    order = order_ops(kernel, add)
    users = [op for op in only(kernel.ops(), tile.Dot) if op.a == product.a]

    def change(_: str, op: Op) -> Iterator[Op]:
        if isinstance(op, pipe.Pipeline) and op.name == keys.pipeline:
            yield replace(op, type=all_keys, per_instance="")
        elif isinstance(op, pipe.Pipeline) and one_stage and op.type.dims == ("BLOCK_Q", "D_V"):
            yield replace(op, stages=sympy.Integer(1))
        elif op is keys:
            yield replace(keys, name=f"{keys.name}_all", type=all_keys)
            yield pipe.SliceRows(keys.name, f"{keys.name}_all", keys.type)
        elif op is product:
            yield pipe.ConsumerWait(ds_all, "dS_pipeline", whole)
            yield pipe.Wgmma(
                f"{product.name}_flight",
                ds_all,
                f"{keys.name}_all",
                pipe.TILE_DIM[program_dim],
                replace(part, space="flight"),
            )
            yield pipe.WgmmaWait(product.name, f"{product.name}_flight", part)
            yield pipe.ConsumerRelease(f"_release_{ds_all}", ds_all)
        elif op is add:
            yield pipe.ProducerStore("_store_dq", "dQ_pipeline", product.name)
        elif op in order:
            return  # the dQ reduction warp gets them
        elif op in users:
            if op is users[0]:
                yield pipe.Pack(cast, product.a, ds)
                yield pipe.ProducerStore("_store_ds", "dS_pipeline", cast)
            yield op.with_operands({product.a: cast})
        else:
            yield op

    changed = kernel.rewrite(change)
    more = {"entry": pipelines, "dq_reducer": _reducer_loops(kernel)}
    blocks = tuple(replace(b, ops=(*b.ops, *more.get(b.name, ()))) for b in changed.blocks)
    return replace(changed, blocks=(*blocks, _reducer_body(add, order, buffer)))


def _reducer_loops(kernel: Kernel) -> tuple[Op, ...]:
    """The loops of the consumers, for the dQ reduction warp."""
    loops = only(kernel.block("consumer").ops, tile.Loop)
    return tuple(replace(loop, name=f"dQ_{loop.name}", carry=(), body="write", tiles=()) for loop in loops)


def _reducer_body(add: tile.OrderedAdd, order: Sequence[Op], buffer: Type) -> Block:
    """The body of the dQ reduction warp's loops; order: the ops that compute the position in the semaphore's order."""
    assert add.semaphore is not None
    ops = (
        *order,
        pipe.ConsumerWait("dq_tile", "dQ_pipeline", buffer),
        replace(add, value="dq_tile"),
        pipe.ConsumerRelease("_release_dq_tile", "dq_tile"),
        pipe.SemaphoreRelease("_release_dq_semaphore", add.semaphore),
        tile.Yield("_yield_write", ()),
    )
    return Block("write", ops, about="add the consumers' tiles of dQ to device memory")
