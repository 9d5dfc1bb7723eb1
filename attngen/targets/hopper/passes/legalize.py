"""legalize-gluon: make explicit what Gluon needs: conversions between register layouts, values pinned before or after a
wait, outputs stored by TMA, and one base pointer per tensor and head.

before:  %acc_flight = wgmma %p %v over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @flight
         %acc_next = wgmma_wait %acc_flight keep_alive(%p) : f32[BLOCK_Q, D_V] @reg
         %rescaled = map expr(acc*alpha) uses(acc=%acc_next, alpha=%soft.alpha) : f32[BLOCK_Q, D_V] @reg
         store %O[b, h, q, d_v] %o check(q)
after:   %p_operand = convert_layout %p to(operand) : T[BLOCK_Q, BLOCK_KV] @reg
         %acc_flight = wgmma %p_operand %v over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @flight
         %acc_next = wgmma_wait %acc_flight keep_alive(%p_operand) : f32[BLOCK_Q, D_V] @reg
         %alpha_acc = convert_layout %soft.alpha to(acc) : f32[BLOCK_Q] @reg
         %rescaled = map expr(acc*alpha) uses(acc=%acc_next, alpha=%alpha_acc) : f32[BLOCK_Q, D_V] @reg
         tma_store %O[b, h, q, d_v] %o staging(%Q_pipeline)
         tma_store_wait %Q_pipeline

- Layouts: a value has the layout of scores, or, if one of its dimensions is D_V or PARTIALS, that of accumulators or of
  partial sums. A row vector that these need is converted (`convert_layout`); so is an operand of a product in
  registers.
- What is computed from a tile in shared memory, such as delta from dO, is computed from a copy in registers
  (`local_load`).
- ptxas may move arithmetic past a wait that does not name it, so that it would not overlap with the product. Row sums
  are therefore pinned before the wait (`pin_before_wait`).
- LLVM may move arithmetic up past a wait. The base of the weights after the wait is therefore hidden from it until
  then (`pin_after_wait`).
- TMA stores outputs from shared memory that is no longer needed: the stage of Q, or of V in the backward. They have a
  pipeline of their own where widths differ, Q is stored in pieces, or the kernel is persistent. If there is room for
  only half a tile, T[BLOCK_Q, 64], its halves are stored one after the other. A stage is released when TMA has read
  what is stored from it.
- Outputs that two programs accumulate (`ordered_accumulate`) are ordered by a semaphore: a consumer acquires it after
  the previous program, stores all, waits for the stores, and releases it.
- The address of a head is computed once, in 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.core import Access, Block, Op, Type
from attngen.ir.dims import SIDES, axis_of
from attngen.ir.kernel import Kernel
from attngen.ir.module import Module
from attngen.ir.ops import Base, Load, Map, OrderedAccumulate, OrderedAdd, Reduce, Store
from attngen.ir.pipe import (
    PARTIALS,
    ConsumerRelease,
    ConsumerWait,
    ConvertLayout,
    LocalLoad,
    PartialReduce,
    PinAfterWait,
    PinBeforeWait,
    Pipeline,
    SoftmaxWeights,
    TmaStore,
    TmaStoreWait,
    Wgmma,
    WgmmaWait,
)
from attngen.ir.pipe_control import SemaphoreAcquire, SemaphoreRelease
from attngen.targets.hopper.configs.barriers import is_consumed_in_loop
from attngen.targets.hopper.configs.common import overlaps_softmax
from attngen.targets.hopper.configs.forward_schedule import output_stage_width, outputs_fit_q_stage
from attngen.targets.hopper.configs.head_dims import smem_widths
from attngen.targets.hopper.configs.mla_decode import is_mla_decode
from attngen.targets.hopper.configs.sm90 import JVP
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class LegalizeGluon(Pass):
    name: ClassVar[str] = "legalize-gluon"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        pinned = (_pin(k) if overlaps_softmax(k) and k.stands_for != JVP else k for k in module.warp_specialized)
        converted = (_convert_layouts(kernel) for kernel in pinned)
        return replace(
            module,
            warp_specialized=tuple(_with_bases(k if is_mla_decode(k) else _store_by_tma(k, module)) for k in converted),
        )


def _convert_layouts(kernel: Kernel) -> Kernel:
    """Convert layouts where other threads need a value than those that have it."""

    def change(_: str, op: Op) -> Iterator[Op]:
        if isinstance(op, Wgmma) and kernel.type_of(op.a).space == "reg":
            yield ConvertLayout(_operand(op.a), op.a, "operand", kernel.type_of(op.a))
            yield replace(op, a=_operand(op.a))
        elif isinstance(op, WgmmaWait) and op.keep_alive:
            yield replace(op, keep_alive=tuple(map(_operand, op.keep_alive)))
        elif isinstance(op, Map) and op.type.unpadded[1:] in (
            ("D_V",),
            (PARTIALS,),
            *((side,) for side in SIDES.values()),
        ):
            to = "partials" if PARTIALS in op.type.dims else "acc"
            types = {ref: kernel.type_of(ref) for _, ref in op.uses}
            names = {
                ref: f"{ref.replace('.', '_')}_{to}"
                for ref, of in types.items()
                if of.space == "sram" or of.dims == ("BLOCK_Q",)
            }
            for ref, name in names.items():
                of = types[ref]
                yield (
                    LocalLoad(name, ref, replace(of, space="reg"))
                    if of.space == "sram"
                    else ConvertLayout(name, ref, to, of)
                )
            yield op.with_operands(names)
        else:
            yield op

    return kernel.rewrite(change)


def _pin(kernel: Kernel) -> Kernel:
    """Pin row sums before the wait for another product that follows them, and the base of later weights after it.

    Kernels of forward mode are excluded: the row sums of tangents may be negative.
    """
    blocks = []
    for block in kernel.blocks:
        ops: list[Op] = []
        renamed: dict[str, str] = {}
        sums = ""  # the last sum over keys that may be moved past a wait
        before_wait: set[str] = set()  # ops before that wait
        for op in block.ops:
            if isinstance(op, SoftmaxWeights) and op.base.split(".")[0] in before_wait:
                renamed[op.base] = f"{op.base.replace('.', '_')}_deferred"
                ops.append(PinAfterWait(renamed[op.base], op.base, kernel.type_of(op.base)))
            if isinstance(op, WgmmaWait) and op.keep_alive:
                before_wait = {o.name for o in ops}
            if isinstance(op, WgmmaWait) and (op.keep_alive or _is_of_exchanged_p(kernel, op)) and sums:
                renamed[sums] = f"{sums}_held"
                ops.append(PinBeforeWait(renamed[sums], sums, kernel.type_of(sums)))
                sums = ""
            sums = (
                op.name
                if isinstance(op, Map) and any(isinstance(kernel.op(r), (PartialReduce, Reduce)) for _, r in op.uses)
                else sums
            )
            ops.append(op.with_operands(renamed))
        blocks.append(replace(block, ops=tuple(ops)))
    return replace(kernel, blocks=tuple(blocks))


def _is_of_exchanged_p(kernel: Kernel, op: WgmmaWait) -> bool:
    """Whether a product is of weights that another warp group has computed."""
    issue = kernel.op(op.value)
    wait = kernel.wait_of(issue.a) if isinstance(issue, Wgmma) else None
    pipeline = kernel.op(wait.pipeline) if wait else None
    return isinstance(pipeline, Pipeline) and pipeline.exchange


def _operand(ref: str) -> str:
    return f"{ref}_operand"


def _store_by_tma(kernel: Kernel, module: Module) -> Kernel:
    """Store outputs of two dimensions by TMA: through a stage that the kernel no longer needs, or through a pipeline of
    their own."""
    stores = [
        op
        for op in kernel.ops()
        if isinstance(op, Store) and not isinstance(op, OrderedAdd) and len(kernel.type_of(op.value).dims) == 2
    ]
    fits = outputs_fit_q_stage(module)
    reused = _reused_stages(kernel) if kernel.adds_in_order or (fits and not kernel.is_persistent) else {}
    names = {op.name: reused.get(op.dst.tensor, f"{op.dst.tensor}_pipeline") for op in stores}
    made = (op for op in stores if op.dst.tensor not in reused)
    pipelines = tuple(
        Pipeline(names[op.name], _stage_of(kernel, module, op), sympy.Integer(1), "consumer") for op in made
    )
    waited = {
        op.name: op.pipeline for op in kernel.ops() if isinstance(op, ConsumerWait) and op.pipeline in reused.values()
    }
    released = {
        waited[op.value]: op.name for op in kernel.ops() if isinstance(op, ConsumerRelease) and op.value in waited
    }
    accumulations = [op for op in kernel.ops() if isinstance(op, OrderedAccumulate)]
    ends = [op.semaphore for op in accumulations if op.ends and op.semaphore]  # the last one releases the semaphore
    bases = [Base(f"{end.tensor}_pair", Access(end.tensor, end.index[:-1]), Type("ptr", (), "reg")) for end in ends]
    semaphores = [Access(base.name, of.index[-1:]) for base, of in zip(bases, ends)]

    def change(_: str, op: Op) -> Iterator[Op]:
        if not isinstance(op, Store) or op.name not in names:
            yield op
            return
        if isinstance(op, OrderedAccumulate) and op is accumulations[0] and op.order is not None:
            yield from (SemaphoreAcquire("follow_pair", of, op.order) for of in semaphores)
        yield TmaStore(
            f"put_{op.value}", op.dst, op.value, names[op.name], op.order if isinstance(op, OrderedAccumulate) else None
        )

    kernel = kernel.rewrite(change)
    store_waits = [TmaStoreWait(f"flush_{pipeline}", pipeline) for pipeline in dict.fromkeys(names.values())]
    store_ends = [SemaphoreRelease("raise_pair", of) for of in semaphores]
    last = {
        "entry": (*bases, *pipelines),
        "consumer": (*(op for op in store_waits if op.staging not in released), *store_ends),
    }
    before = {released[op.staging]: op for op in store_waits if op.staging in released}
    kernel = kernel.rewrite(lambda _, op: [before[op.name], op] if op.name in before else [op])
    return replace(kernel, blocks=tuple(replace(b, ops=(*b.ops, *last.get(b.name, ()))) for b in kernel.blocks))


def _reused_stages(kernel: Kernel) -> dict[str, str]:
    """Output -> the pipeline through whose stage it leaves: one of those that hold an instance's rows of the program
    tile.

    The first output leaves through the first such pipeline, and so on. Outputs that are left over go through the last
    one, one after another.
    """
    pipelines = (op for op in kernel.block("entry").ops if isinstance(op, Pipeline) and op.per_instance)
    stages = [op.name for op in pipelines if not is_consumed_in_loop(kernel, op.name)]
    outputs = [arg.name for arg in kernel.args if arg.role == "out" and arg.type.dtype == "T"]
    return {name: stages[min(at, len(stages) - 1)] for at, name in enumerate(outputs)} if stages else {}


def _stage_of(kernel: Kernel, module: Module, op: Store) -> Type:
    """The type of the stage through which a tile leaves: that of the tile, or of half its columns, under every
    config."""
    if kernel.stands_for == JVP:
        return replace(kernel.type_of(op.value), space="sram")
    queries, value = kernel.op("Q_pipeline"), kernel.type_of(op.value)
    assert isinstance(queries, Pipeline)
    found = [
        output_stage_width(module, config, int(queries.stages))
        for config in module.configs(kernel.name, kernel.backend)
    ]
    narrow = 0 < min(found) < smem_widths(module)[1]
    return replace(value, dims=(value.dims[0], str(min(found))) if narrow else value.dims, space="sram")


def _with_bases(kernel: Kernel) -> Kernel:
    """Compute one pointer per tensor and head, in the warp group that accesses it: where it is first needed, or before
    the loops."""
    accesses = (op for op in kernel.ops() if isinstance(op, (Load, Store)) and not isinstance(op, OrderedAdd))
    found = [op for op in accesses if (op.dst if isinstance(op, Store) else op.src).axes()]
    made: dict[str, Base] = {}
    homes: dict[str, str] = {}  # name of a base -> the block that computes it
    moved: dict[str, Op] = {}
    for op in found:
        access = op.dst if isinstance(op, Store) else op.src
        home = kernel.block_of(op).name
        side = home.removeprefix("consume")
        name = f"{access.tensor}_head{side if is_mla_decode(kernel) else ''}"
        homes[name] = home if is_mla_decode(kernel) else "consume" if kernel.is_persistent else "consumer"
        rows = tuple(i for i in access.index if axis_of(i))
        made[name] = Base(
            name, Access(access.tensor, tuple(i for i in access.index if not axis_of(i))), Type("ptr", (), "reg")
        )
        moved[op.name] = (
            replace(op, dst=Access(name, rows)) if isinstance(op, Store) else replace(op, src=Access(name, rows))
        )

    def insert_bases(block: Block) -> Block:
        ops: list[Op] = [made[name] for name in made if block.name == homes[name] and name in elsewhere]
        for op in block.ops:
            access_op = moved.get(op.name, op)
            ops += [
                made[name]
                for name in access_op.operands()
                if name in made and made[name] not in ops and block.name == homes[name]
            ]
            ops.append(access_op)
        return replace(block, ops=tuple(ops))

    elsewhere = {
        name
        for op in moved.values()
        for name in op.operands()
        if name in made and kernel.graph.nodes[op.name]["block"] != homes[name]
    }
    return replace(kernel, blocks=tuple(map(insert_bases, kernel.blocks)))
