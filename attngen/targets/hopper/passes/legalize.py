"""legalize-gluon: make explicit what Gluon asks of a divided kernel.

before:  %acc_flight = wgmma %p %v over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @flight
         %acc_next = wgmma_wait %acc_flight keep_alive(%p) : f32[BLOCK_Q, D_V] @reg
         %rescaled = map expr(acc*alpha) uses(acc=%acc_next, alpha=%soft.alpha) : f32[BLOCK_Q, D_V] @reg
         store %O[b, h, q, d_v] %o check(q)
after:   %p_operand = convert_layout %p to(operand) : T[BLOCK_Q, BLOCK_KV] @reg
         %acc_flight = wgmma %p_operand %v over(BLOCK_KV) acc(%acc) : f32[BLOCK_Q, D_V] @flight
         %acc_next = wgmma_wait %acc_flight keep_alive(%p_operand) : f32[BLOCK_Q, D_V] @reg
         %alpha_sums = convert_layout %soft.alpha to(sums) : f32[BLOCK_Q] @reg
         %rescaled = map expr(acc*alpha) uses(acc=%acc_next, alpha=%alpha_sums) : f32[BLOCK_Q, D_V] @reg
         tma_store %O[b, h, q, d_v] %o staging(%Q_pipeline)
         tma_store_wait %Q_pipeline

- A value is spread over threads as scores are, or, if one of its dimensions is D_V or PARTIALS, as sums or chains are.
  A row that these need is converted; so is an operand of a product in registers.
- What is computed of a tile in shared memory, such as delta of dO, is computed of its numbers in registers (`lift`).
- ptxas may move arithmetic past an await that does not name it, so that it would not run beside the product: the sums
  of a row are held.
- LLVM may move arithmetic up past an await: of what weights after it are measured from it knows nothing before
  (`defer`).
- The copy engine stores outputs, from shared memory that nothing needs any more: the slot of queries, or of V in the
  backward; or a ring of their own, where widths differ, queries lie in pieces, or the program has more tiles. Where
  half a tile has room alone, T[BLOCK_Q, 64], halves leave in turn. A slot is given back when the copy engine has read
  what left through it.
- What two programs merge is put in turn: a copy follows the program before, puts all, flushes, and raises the turn.
- The address of a head is computed once, in 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import (
    SIDES,
    Access,
    Base,
    Block,
    Load,
    Map,
    Op,
    OrderedAccumulate,
    OrderedAdd,
    Reduce,
    Store,
    Type,
    axis_of,
)
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
    SemaphoreAcquire,
    SemaphoreRelease,
    SoftmaxWeights,
    TmaStore,
    TmaStoreWait,
    Wgmma,
    WgmmaWait,
)
from attngen.targets.hopper.configs.common import is_taken_in_turns, output_columns, overlaps, shares_stage
from attngen.targets.hopper.configs.head_dims import laid_out
from attngen.targets.hopper.configs.mla_decode import is_of_latents
from attngen.targets.hopper.configs.sm90 import TANGENTS
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class LegalizeGluon(Pass):
    name: ClassVar[str] = "legalize-gluon"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        held = (_held(k) if overlaps(k) and k.stands_for != TANGENTS else k for k in module.warp_specialized)
        spread = (_spread(kernel) for kernel in held)
        return replace(
            module, warp_specialized=tuple(_bases(k if is_of_latents(k) else _put(k, module)) for k in spread)
        )


def _spread(kernel: Kernel) -> Kernel:
    """Conversions where a value is needed by other threads than those that have it."""

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
            to = "chains" if PARTIALS in op.type.dims else "sums"
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


def _held(kernel: Kernel) -> Kernel:
    """Row sums are held where another product's await follows them; what later weights are measured from is deferred.

    Sums of tangents may be negative: they are not held.
    """
    blocks = []
    for block in kernel.blocks:
        ops: list[Op] = []
        renamed: dict[str, str] = {}
        sums = ""  # the last sum over keys that may be moved past an await
        awaited: set[str] = set()  # ops before that await
        for op in block.ops:
            if isinstance(op, SoftmaxWeights) and op.base.split(".")[0] in awaited:
                renamed[op.base] = f"{op.base.replace('.', '_')}_deferred"
                ops.append(PinAfterWait(renamed[op.base], op.base, kernel.type_of(op.base)))
            if isinstance(op, WgmmaWait) and op.keep_alive:
                awaited = {o.name for o in ops}
            if isinstance(op, WgmmaWait) and (op.keep_alive or _is_of_relay(kernel, op)) and sums:
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


def _is_of_relay(kernel: Kernel, op: WgmmaWait) -> bool:
    """Whether a product is of weights that another role has shared."""
    issue = kernel.op(op.value)
    take = kernel.take_of(issue.a) if isinstance(issue, Wgmma) else None
    pipeline = kernel.op(take.pipeline) if take else None
    return isinstance(pipeline, Pipeline) and pipeline.exchange


def _operand(ref: str) -> str:
    return f"{ref}_operand"


def _put(kernel: Kernel, module: Module) -> Kernel:
    """Outputs by the copy engine: the tiles of two dimensions that are stored."""
    stores = [
        op
        for op in kernel.ops()
        if isinstance(op, Store) and not isinstance(op, OrderedAdd) and len(kernel.type_of(op.value).dims) == 2
    ]
    fits = shares_stage(module)
    own = _stages_of_own(kernel) if kernel.adds or (fits and not kernel.is_persistent) else {}
    names = {op.name: own.get(op.dst.tensor, f"{op.dst.tensor}_pipeline") for op in stores}
    made = (op for op in stores if op.dst.tensor not in own)
    pipelines = tuple(
        Pipeline(names[op.name], _stage_of(kernel, module, op), sympy.Integer(1), "consumer") for op in made
    )
    taken = {
        op.name: op.pipeline for op in kernel.ops() if isinstance(op, ConsumerWait) and op.pipeline in own.values()
    }
    given = {taken[op.value]: op.name for op in kernel.ops() if isinstance(op, ConsumerRelease) and op.value in taken}
    merges = [op for op in kernel.ops() if isinstance(op, OrderedAccumulate)]
    ends = [op.semaphore for op in merges if op.ends and op.semaphore]  # of the turn in which a program merges
    pairs = [
        Base(f"{turns.tensor}_pair", Access(turns.tensor, turns.index[:-1]), Type("ptr", (), "reg")) for turns in ends
    ]
    turns = [Access(base.name, of.index[-1:]) for base, of in zip(pairs, ends)]

    def put(_: str, op: Op) -> Iterator[Op]:
        if not isinstance(op, Store) or op.name not in names:
            yield op
            return
        if isinstance(op, OrderedAccumulate) and op is merges[0] and op.order is not None:
            yield from (SemaphoreAcquire("follow_pair", of, op.order) for of in turns)
        yield TmaStore(
            f"put_{op.value}", op.dst, op.value, names[op.name], op.order if isinstance(op, OrderedAccumulate) else None
        )

    kernel = kernel.rewrite(put)
    flushes = [TmaStoreWait(f"flush_{pipeline}", pipeline) for pipeline in dict.fromkeys(names.values())]
    raised = [SemaphoreRelease("raise_pair", of) for of in turns]
    last = {"entry": (*pairs, *pipelines), "consumer": (*(op for op in flushes if op.staging not in given), *raised)}
    before = {given[op.staging]: op for op in flushes if op.staging in given}
    kernel = kernel.rewrite(lambda _, op: [before[op.name], op] if op.name in before else [op])
    return replace(kernel, blocks=tuple(replace(b, ops=(*b.ops, *last.get(b.name, ()))) for b in kernel.blocks))


def _stages_of_own(kernel: Kernel) -> dict[str, str]:
    """Output -> the ring of the copy's own tile through which it leaves: the first output through the first such ring,
    and so on.

    Others go through the last, one after another.
    """
    pipelines = (op for op in kernel.block("entry").ops if isinstance(op, Pipeline) and op.per_instance)
    own = [op.name for op in pipelines if not is_taken_in_turns(kernel, op.name)]
    outputs = [arg.name for arg in kernel.args if arg.role == "out" and arg.type.dtype == "T"]
    return {name: own[min(at, len(own) - 1)] for at, name in enumerate(outputs)} if own else {}


def _stage_of(kernel: Kernel, module: Module, op: Store) -> Type:
    """The type of the slot through which a tile leaves: that of the tile, or of half its columns, under every row of
    the schedule."""
    if kernel.stands_for == TANGENTS:
        return replace(kernel.type_of(op.value), space="sram")
    queries, value = kernel.op("Q_pipeline"), kernel.type_of(op.value)
    assert isinstance(queries, Pipeline)
    found = [
        output_columns(module, config, int(queries.stages)) for config in module.configs(kernel.name, kernel.backend)
    ]
    narrow = 0 < min(found) < laid_out(module)[1]
    return replace(value, dims=(value.dims[0], str(min(found))) if narrow else value.dims, space="sram")


def _bases(kernel: Kernel) -> Kernel:
    """One pointer per tensor and head, in the role that reads or writes there: where it is needed first, or before
    the loops."""
    accesses = (op for op in kernel.ops() if isinstance(op, (Load, Store)) and not isinstance(op, OrderedAdd))
    found = [op for op in accesses if (op.dst if isinstance(op, Store) else op.src).axes()]
    made: dict[str, Base] = {}
    homes: dict[str, str] = {}  # the block in which a base is made
    moved: dict[str, Op] = {}
    for op in found:
        access = op.dst if isinstance(op, Store) else op.src
        home = kernel.block_of(op).name
        side = home.removeprefix("consume")
        name = f"{access.tensor}_head{side if is_of_latents(kernel) else ''}"
        homes[name] = home if is_of_latents(kernel) else "consume" if kernel.is_persistent else "consumer"
        rows = tuple(i for i in access.index if axis_of(i))
        made[name] = Base(
            name, Access(access.tensor, tuple(i for i in access.index if not axis_of(i))), Type("ptr", (), "reg")
        )
        moved[op.name] = (
            replace(op, dst=Access(name, rows)) if isinstance(op, Store) else replace(op, src=Access(name, rows))
        )

    def with_bases(block: Block) -> Block:
        ops: list[Op] = [made[name] for name in made if block.name == homes[name] and name in elsewhere]
        for op in block.ops:
            own = moved.get(op.name, op)
            ops += [
                made[name]
                for name in own.operands()
                if name in made and made[name] not in ops and block.name == homes[name]
            ]
            ops.append(own)
        return replace(block, ops=tuple(ops))

    elsewhere = {
        name
        for op in moved.values()
        for name in op.operands()
        if name in made and kernel.graph.nodes[op.name]["block"] != homes[name]
    }
    return replace(kernel, blocks=tuple(map(with_bases, kernel.blocks)))
