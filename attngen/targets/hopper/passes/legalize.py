"""legalize-gluon: make explicit what Gluon needs: conversions between register layouts, values pinned before or after a
wait, outputs stored by TMA, and one pointer per tensor and head.

before:  %acc_flight = wgmma %p %v over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @flight
         %acc_next = wgmma_wait %acc_flight keep_alive(%p) : f32[BLOCK_Q, D_V] @reg
         %rescaled = map expr(acc*alpha) uses(acc=%acc_next, alpha=%soft.alpha) : f32[BLOCK_Q, D_V] @reg
         store %O[b, h, q, d_v] %o check(q)
after:   %p_operand = convert_layout %p to(operand) : T[BLOCK_Q, BLOCK_KV] @reg
         %acc_flight = wgmma %p_operand %v over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @flight
         %acc_next = wgmma_wait %acc_flight keep_alive(%p_operand) : f32[BLOCK_Q, D_V] @reg
         %soft_alpha_ACC = convert_layout %soft.alpha to(acc) : f32[BLOCK_Q] @reg
         %rescaled = map expr(acc*alpha) uses(acc=%acc_next, alpha=%soft_alpha_ACC) : f32[BLOCK_Q, D_V] @reg
         tma_store %O[b, h, q, d_v] %o staging(%Q_pipeline)
         tma_store_wait %Q_pipeline

- Layouts: a value has the layout of scores by default, that of accumulators if D_V is one of its dimensions, and that
  of partial sums if _PARTIALS is. A row vector that accumulators or partial sums need is converted (`convert_layout`);
  so is an operand of a product in registers.
- Values that are computed from a tile in shared memory, such as delta from dO, are computed from a copy in registers
  (`local_load`).
- ptxas may sink exponentials and row sums below a wgmma wait, because the wait does not read them. They would then not
  overlap with the product. So row sums are pinned before the wait (`pin_before_wait`), and the values from which they
  are computed stay there, too.
- LLVM may hoist exponentials above a wgmma wait for the same reason. So the softmax offset (`base`) that the
  exponentials after the wait subtract is made opaque there (`pin_after_wait`).
- TMA stores outputs from shared memory that is no longer needed: the stage of Q, or of V in the backward. They have a
  staging buffer of their own, declared as a pipeline of one stage, where widths differ, Q is stored in pieces, or the
  kernel is persistent. If there is room for only half a tile, T[BLOCK_Q, 64], its halves are stored one after the
  other. `tma_store_wait` waits until TMA has read the stage (cp.async.bulk.wait_group.read), and then the stage is
  released.
- The forward of chunks of a sequence has more scalars for each work tile. If it is persistent, its stores compute their
  addresses anew (`recompute(yes)`); consumers would keep them in registers between work tiles, or spill them.
- Outputs that two programs accumulate (`ordered_accumulate`) are ordered by a semaphore. A consumer acquires it after
  the previous program, stores all tiles by TMA, waits until TMA has read them (`tma_store_wait`), and releases the
  semaphore. `semaphore_release` itself waits until the stores are complete in device memory (cp.async.bulk.wait_group),
  before it increments.
- The address of a head is computed once, in 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir import SIDES, Access, Block, Kernel, Module, Op, Type, axis_of, only, pipe, tile
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
            warp_specialized=tuple(
                _with_head_pointers(k if is_mla_decode(k) else _store_by_tma(k, module)) for k in converted
            ),
        )


def _convert_layouts(kernel: Kernel) -> Kernel:
    """Insert a convert_layout where the layout of a value differs from the one that its user needs, and a local_load
    where a map reads a tile in shared memory."""

    def change(_: str, op: Op) -> Iterator[Op]:
        if isinstance(op, pipe.Wgmma) and kernel.type_of(op.a).space == "reg":
            yield pipe.ConvertLayout(_operand(op.a), op.a, "operand", kernel.type_of(op.a))
            yield replace(op, a=_operand(op.a))
        elif isinstance(op, pipe.WgmmaWait) and op.keep_alive:
            yield replace(op, keep_alive=tuple(map(_operand, op.keep_alive)))
        elif isinstance(op, tile.Map) and op.type.unpadded[1:] in (
            ("D_V",),
            (pipe.PARTIALS,),
            *((side,) for side in SIDES.values()),
        ):
            to = "partials" if pipe.PARTIALS in op.type.dims else "acc"
            types = {ref: kernel.type_of(ref) for _, ref in op.uses}
            names = {
                ref: f"{ref.replace('.', '_')}_{to.upper()}"
                for ref, of in types.items()
                if of.space == "sram" or of.dims == ("BLOCK_Q",)
            }
            for ref, name in names.items():
                of = types[ref]
                yield (
                    pipe.LocalLoad(name, ref, replace(of, space="reg"))
                    if of.space == "sram"
                    else pipe.ConvertLayout(name, ref, to, of)
                )
            yield op.with_operands(names)
        else:
            yield op

    return kernel.rewrite(change)


def _pin(kernel: Kernel) -> Kernel:
    """Pin row sums before the wait for P V that follows them, and the softmax offset of later exponentials after it.

    JVP kernels (forward-mode differentiation) are not changed, because the row sums of tangents may be negative, which
    pin_before_wait does not allow.
    """
    blocks = []
    for block in kernel.blocks:
        ops: list[Op] = []
        renamed: dict[str, str] = {}  # value -> the pinned value
        row_sum = ""  # the latest row sum that is not pinned yet
        before_wait: set[str] = set()  # ops before the latest wait for P V
        for op in block.ops:
            if isinstance(op, pipe.SoftmaxWeights) and op.base.split(".")[0] in before_wait:
                renamed[op.base] = f"{op.base.replace('.', '_')}_deferred"
                ops.append(pipe.PinAfterWait(renamed[op.base], op.base, kernel.type_of(op.base)))
            if isinstance(op, pipe.WgmmaWait) and op.keep_alive:
                before_wait = {o.name for o in ops}
            if isinstance(op, pipe.WgmmaWait) and (op.keep_alive or _is_of_exchanged_p(kernel, op)) and row_sum:
                renamed[row_sum] = f"{row_sum}_held"
                ops.append(pipe.PinBeforeWait(renamed[row_sum], row_sum, kernel.type_of(row_sum)))
                row_sum = ""
            row_sum = (
                op.name
                if isinstance(op, tile.Map)
                and any(isinstance(kernel.op(r), (pipe.PartialReduce, tile.Reduce)) for _, r in op.uses)
                else row_sum
            )
            ops.append(op.with_operands(renamed))
        blocks.append(replace(block, ops=tuple(ops)))
    return replace(kernel, blocks=tuple(blocks))


def _is_of_exchanged_p(kernel: Kernel, op: pipe.WgmmaWait) -> bool:
    """True if the wait is for a product whose operand P another warp group has computed."""
    issue = kernel.op(op.value)
    wait = kernel.traits.wait_of(issue.a) if isinstance(issue, pipe.Wgmma) else None
    pipeline = kernel.op(wait.pipeline) if wait else None
    return isinstance(pipeline, pipe.Pipeline) and pipeline.exchange


def _operand(ref: str) -> str:
    return f"{ref}_operand"


def _store_by_tma(kernel: Kernel, module: Module) -> Kernel:
    """Store outputs of two dimensions by TMA: through a stage that the kernel no longer needs, or through a staging
    buffer of their own."""
    stores = [
        op
        for op in only(kernel.ops(), tile.Store)
        if not isinstance(op, tile.OrderedAdd) and len(kernel.type_of(op.value).dims) == 2
    ]
    fits = outputs_fit_q_stage(module)
    reused = _reused_stages(kernel) if kernel.traits.adds_in_order or (fits and not kernel.traits.is_persistent) else {}
    names = {op.name: reused.get(op.dst.tensor, f"{op.dst.tensor}_pipeline") for op in stores}
    made = (op for op in stores if op.dst.tensor not in reused)
    pipelines = tuple(
        pipe.Pipeline(names[op.name], _stage_of(kernel, module, op), sympy.Integer(1), "consumer") for op in made
    )
    waited = {op.name: op.pipeline for op in only(kernel.ops(), pipe.ConsumerWait) if op.pipeline in reused.values()}
    released = {waited[op.value]: op.name for op in only(kernel.ops(), pipe.ConsumerRelease) if op.value in waited}
    accumulations = list(only(kernel.ops(), tile.OrderedAccumulate))
    # The semaphore, at most one, and a pointer to the semaphores of its head (here: of the program's pair of query
    # heads).
    used = [op.semaphore for op in accumulations if op.ends and op.semaphore]
    pointers = [tile.Base(f"{of.tensor}_pair", Access(of.tensor, of.index[:-1]), Type("ptr", (), "reg")) for of in used]
    semaphores = [Access(pointer.name, of.index[-1:]) for pointer, of in zip(pointers, used)]
    recompute = kernel.traits.is_persistent and bool(kernel.traits.places) and not kernel.traits.adds_in_order

    def change(_: str, op: Op) -> Iterator[Op]:
        if not isinstance(op, tile.Store) or op.name not in names:
            yield op
            return
        if isinstance(op, tile.OrderedAccumulate) and op is accumulations[0] and op.order is not None:
            yield from (pipe.SemaphoreAcquire("_acquire_semaphore", of, op.order) for of in semaphores)
        yield pipe.TmaStore(
            f"_tma_store_{op.value}",
            op.dst,
            op.value,
            names[op.name],
            op.order if isinstance(op, tile.OrderedAccumulate) else None,
            recompute=recompute,
        )

    kernel = kernel.rewrite(change)
    store_waits = [
        pipe.TmaStoreWait(f"_tma_store_wait_{pipeline}", pipeline) for pipeline in dict.fromkeys(names.values())
    ]
    semaphore_releases = [pipe.SemaphoreRelease("_release_semaphore", of) for of in semaphores]
    last = {
        "entry": (*pointers, *pipelines),
        "consumer": (*(op for op in store_waits if op.staging not in released), *semaphore_releases),
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
    pipelines = (op for op in only(kernel.block("entry").ops, pipe.Pipeline) if op.per_instance)
    stages = [op.name for op in pipelines if not is_consumed_in_loop(kernel, op.name)]
    outputs = [arg.name for arg in kernel.args if arg.role == "out" and arg.type.dtype == "T"]
    return {name: stages[min(at, len(stages) - 1)] for at, name in enumerate(outputs)} if stages else {}


def _stage_of(kernel: Kernel, module: Module, op: tile.Store) -> Type:
    """The type of the stage through which a tile leaves: that of the tile, or of half its columns, under every
    config."""
    if kernel.stands_for == JVP:
        return replace(kernel.type_of(op.value), space="sram")
    queries, value = kernel.op("Q_pipeline"), kernel.type_of(op.value)
    assert isinstance(queries, pipe.Pipeline)
    found = [
        output_stage_width(module, config, int(queries.stages))
        for config in module.configs(kernel.name, kernel.backend)
    ]
    narrow = 0 < min(found) < smem_widths(module)[1]
    return replace(value, dims=(value.dims[0], str(min(found))) if narrow else value.dims, space="sram")


def _with_head_pointers(kernel: Kernel) -> Kernel:
    """Compute one pointer per tensor and head, in the warp group that accesses it: where it is first needed, or before
    the loops."""
    accesses = (op for op in only(kernel.ops(), tile.Load, tile.Store) if not isinstance(op, tile.OrderedAdd))
    found = [op for op in accesses if (op.dst if isinstance(op, tile.Store) else op.src).axes()]
    made: dict[str, tile.Base] = {}
    homes: dict[str, str] = {}  # name of a pointer -> the block that computes it
    moved: dict[str, Op] = {}
    for op in found:
        access = op.dst if isinstance(op, tile.Store) else op.src
        home = kernel.block_of(op).name
        side = home.removeprefix("consume")
        name = f"{access.tensor}_head{side if is_mla_decode(kernel) else ''}"
        homes[name] = home if is_mla_decode(kernel) else "consume" if kernel.traits.is_persistent else "consumer"
        rows = tuple(i for i in access.index if axis_of(i))
        made[name] = tile.Base(
            name, Access(access.tensor, tuple(i for i in access.index if not axis_of(i))), Type("ptr", (), "reg")
        )
        moved[op.name] = (
            replace(op, dst=Access(name, rows)) if isinstance(op, tile.Store) else replace(op, src=Access(name, rows))
        )

    def insert_pointers(block: Block) -> Block:
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
    return replace(kernel, blocks=tuple(map(insert_pointers, kernel.blocks)))
