"""software-pipeline-gradients: products of the backward run beside what does not need them.

before:  block @step                                 after:  block @step
           take Q; take dO                                     take Q; issue S; take dO; issue dP
           issue dP; await dP                                  await S; weights P of S
           issue S; await S                                    await dP; gradients dS of P and dP
           weights P of S; gradients dS of P and dP            issue dV with P; issue dK with dS
           issue dV with P; await dV; give dO                  issue dQ with the dS of all
           issue dK with dS; await dK; give Q                  await dV; give dO
           issue dQ with the dS of all; await dQ               await dK; give Q; await dQ

So exponentials of P may run beside the product dP. Where registers would not do for both, dP is issued after them:

             take Q; issue S; await S; weights P of S
             take dO; issue dP; await dP; gradients dS of P and dP

The last three products run one after another, and beside what the other consumer computes. Where sums take most of the
registers, the loop computes its numbers again in each turn, and dQ is issued last:

             issue dV with P; issue dK with dS
             await dV; give dO; await dK; give Q
             issue dQ with the dS of all; await dQ

Kernels of dQ and of dK alone have two products of scores, and one of sums. The tile of dP is given back first:

             take dO; issue dP; take Q; issue S
             await dP; give dO; await S; weights P of S; gradients dS of P and dP
             issue dK with dS; await dK; give Q
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx

from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Loop, Op, Yield
from attngen.ir.pipe import (
    ConsumerRelease,
    ConsumerWait,
    Pack,
    PinBeforeWait,
    ProducerStore,
    ReadMetadata,
    Rematerialize,
    SliceRows,
    Wgmma,
    WgmmaWait,
)
from attngen.targets.hopper.configs.common import work
from attngen.targets.hopper.configs.families import with_apart, with_backward
from attngen.targets.hopper.configs.fused_backward import is_late, is_wide
from attngen.targets.hopper.configs.separate_backward import runs_ahead
from attngen.targets.hopper.configs.sm90 import FUSED, NAME, ROWS
from attngen.targets.hopper.passes.skip_masked_tiles import as_pipelined_loop
from attngen.tiles.order import differs, whole_range
from attngen.transforms.base import Pass

LIGHT = (
    11  # operations for each score, at most, of masks whose weights may be packed early without registers that spill
)


@dataclass(frozen=True)
class SoftwarePipelineGradients(Pass):
    name: ClassVar[str] = "software-pipeline-gradients"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        narrow = all(row.block_q <= ROWS for row in module.configs(FUSED, NAME))

        def change(kernel: Kernel) -> Kernel:
            late = is_late(module)
            light = module.dropout or late or work(module.kernel(FUSED)) <= LIGHT
            wide = is_wide(module)
            return joined(kernel, lambda ops: _ordered(kernel, ops, narrow and light and not wide, late, wide), wide)

        def apart(kernel: Kernel) -> Kernel:
            return kernel if runs_ahead(kernel) else joined(kernel, lambda ops: _ordered_apart(kernel, ops))

        return with_apart(with_backward(module, change), apart)


def joined(kernel: Kernel, order: Callable[[tuple[Op, ...]], Iterable[Op]], recompute: bool = False) -> Kernel:
    """One loop over the tiles of both classes in all roles.

    Tiles come by their numbers where the mask bounds or lists them: a program then comes to a tile after those whose
    turns are before its own. Where all programs visit the same tiles, partial ones come first, as in loops that are
    apart.
    """
    loops = [[op for op in warp_group.ops if isinstance(op, Loop)] for warp_group in kernel.warp_groups]
    visited = whole_range([pair for loop in loops[0] for pair in loop.ranges])
    ordered = visited is not None and (
        not kernel.adds or loops[0][0].listed is not None or any(differs(kernel, end) for end in visited)
    )
    whole = {
        same[0].name: replace(as_pipelined_loop(same), in_order=ordered, recompute=recompute and bool(same[0].carry))
        for same in loops
    }
    later = [op for same in loops for op in same[1:]]
    results = {
        f"{op.name}.{field}": f"{whole[same[0].name].name}.{field}"
        for same in loops
        for op in same
        for field, _ in op.carry
    }
    kept_tiles = [op for op in kernel.block("consumer").ops if isinstance(op, (SliceRows, ConsumerWait))]
    blocks = []
    for block in kernel.blocks:
        ops = block.ops
        if any(isinstance(op, Wgmma) for op in ops):
            ops = _with_addresses(kept_tiles, tuple(order(ops)))
        elif block.name == "consumer":
            ops = tuple(op for op in ops if not isinstance(op, SliceRows))
        kept = (whole.get(op.name, op) for op in ops if op not in later)
        blocks.append(replace(block, ops=tuple(op if op.name in whole else op.with_operands(results) for op in kept)))
    return replace(kernel, blocks=tuple(blocks))


def _with_addresses(tiles: Sequence[SliceRows | ConsumerWait], ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The ops of a turn, with tiles that are taken before the loop at addresses that are computed here."""
    names = {op.name: f"{op.name}_near" if isinstance(op, ConsumerWait) else op.name for op in tiles}
    made = [
        Rematerialize(names[op.name], op.name, op.type) if isinstance(op, ConsumerWait) else op.with_operands(names)
        for op in tiles
    ]
    args = [op for op in ops if isinstance(op, Arg)]
    return (*args, *made, *(op.with_operands(names) for op in ops if op not in args))


class Kinds:
    """The ops of a turn, by what they do."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.args = [op for op in ops if isinstance(op, Arg)]
        self.takes = {op.name: op for op in ops if isinstance(op, ConsumerWait)}
        self.reads = [op for op in ops if isinstance(op, ReadMetadata)]
        self.issues = [op for op in ops if isinstance(op, Wgmma)]
        self.sums = [op for op in self.issues if op.acc]  # the products that add to carried sums
        self.awaits = {op.value: op for op in ops if isinstance(op, WgmmaWait)}
        self.shares = {op.value: op for op in ops if isinstance(op, ProducerStore)}
        self.gives = {op.value: op for op in ops if isinstance(op, ConsumerRelease)}
        self.yields = [op for op in ops if isinstance(op, Yield)]
        placed = {
            *self.args,
            *self.takes.values(),
            *self.reads,
            *self.issues,
            *self.awaits.values(),
            *self.shares.values(),
        }
        placed |= {*self.gives.values(), *self.yields}
        self.computed = [op for op in ops if op not in placed]

    def ends(self, products: Sequence[Wgmma]) -> Iterator[Op]:
        """Products awaited, one after another, each with its tile given back."""
        return (op for product in products for op in (self.awaits[product.name], self.gives[product.b]))


def _ordered(kernel: Kernel, ops: tuple[Op, ...], early: bool, late: bool, last: bool) -> Iterator[Op]:
    """early: weights are packed before dP is awaited. Otherwise they are held after that: else registers spill.

    late: dP is issued once all that S alone gives is computed, of which what dS needs is held, so that it is all that
    registers hold.
    last: dQ is issued once the other products have been awaited, in registers that their operands have left.
    """
    graph, of = kernel.graph, Kinds(ops)
    takes, issues, awaits, shares, gives, sums, rest = (
        of.takes,
        of.issues,
        of.awaits,
        of.shares,
        of.gives,
        of.sums,
        of.computed,
    )
    dq = next(op for op in issues if op.a in takes)  # of dS that all consumers share
    dp, s = sorted(
        (op for op in issues if not op.acc and op is not dq), key=lambda op: len(nx.descendants(graph, op.name))
    )
    of_s, of_dp = (nx.descendants(graph, op.name) for op in (s, dp))
    packs = [op for op in rest if isinstance(op, Pack)]
    weights = next(op.value for op in packs if op.name in of_s - of_dp)
    needed = [
        op.name for op in rest if op.name in of_s - of_dp and op not in packs and of_dp & set(graph.successors(op.name))
    ]
    held = {name: f"{name}_held" for name in (needed if late else [] if early else [weights])}
    stages = [
        {op.name for op in rest} - of_s - of_dp,
        of_s - of_dp,
        of_dp,
    ]  # what needs no product, what needs S, what needs both

    def stage(at: int) -> Iterator[Op]:
        """The ops of a stage. What lies beside a tile is read just before, so that registers hold it for no longer."""
        earlier, mine = set().union(*stages[:at]), stages[at]
        waiting = [
            op
            for op in of.reads
            if mine & set(graph.successors(op.name)) and not earlier & set(graph.successors(op.name))
        ]
        for op in (op for op in rest if op.name in mine and op not in packs):
            beside = [read for read in waiting if read.name in op.operands()]
            waiting = [read for read in waiting if read not in beside]
            yield from (*beside, op.with_operands(held) if at == 2 else op)

    yield from of.args
    yield from (takes[s.b], s, *(() if late else (takes[dp.b], dp)))
    yield from stage(0)
    yield awaits[s.name]
    yield from stage(1)
    first = [op for op in packs if early and op.value == weights]
    yield from first
    if late:
        yield from (PinBeforeWait(made, name, kernel.type_of(name)) for name, made in held.items())
        yield from (takes[dp.b], dp)
    yield awaits[dp.name]
    if not (early or late):
        yield PinBeforeWait(held[weights], weights, kernel.type_of(weights))
    yield from stage(2)
    for op in (op for op in packs if op not in first):
        yield op.with_operands(held)
        yield from (shares[op.name],) if op.name in shares else ()
    yield from (*sums, takes[dq.a], *((*of.ends(sums), dq) if last else (dq, *of.ends(sums))))
    yield from (awaits[dq.name], gives[dq.a], shares[awaits[dq.name].name])
    yield from of.yields


def _ordered_apart(kernel: Kernel, ops: tuple[Op, ...]) -> Iterator[Op]:
    """The products of scores at once, that of dP first, whose tile is given back while the other one runs; then that of
    the sums.

    A tile beside which numbers lie is given back once these have been read, each just before it is needed.
    """
    of = Kinds(ops)
    scores = sorted((op for op in of.issues if not op.acc), key=lambda op: len(nx.descendants(kernel.graph, op.name)))
    early, summed, beside = [op.b for op in scores], {op.b for op in of.sums}, {read.beside for read in of.reads}
    later = {read.name for read in of.reads}.union(
        *(nx.descendants(kernel.graph, op.name) for op in (*scores, *of.reads))
    )

    yield from of.args
    yield from (one for op in scores for one in (of.takes[op.b], op))
    yield from (op for op in of.computed if op.name not in later)
    for op in scores:
        yield of.awaits[op.name]
        yield from [] if op.b in summed | beside else [of.gives[op.b]]
    yield from (op for op in ops if op.name in later and (op in of.reads or op in of.computed))
    yield from (of.gives[name] for name in early if name in beside - summed)
    yield from (of.takes[op.b] for op in of.sums if op.b not in early)
    yield from (*of.sums, *of.ends(of.sums), *of.yields)
