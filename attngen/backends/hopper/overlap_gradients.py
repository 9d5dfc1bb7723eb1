"""overlap-gradients: products of the backward run beside what does not need them.

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

The last three products run one after another, and beside what the other consumer computes. Where sums take most of the registers, the
loop computes its numbers again in each turn, and dQ is issued last:

             issue dV with P; issue dK with dS
             await dV; give dO; await dK; give Q
             issue dQ with the dS of all; await dQ
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx

from attngen.backends.hopper.choice import work
from attngen.backends.hopper.facts import FUSED, NAME, ROWS
from attngen.backends.hopper.forward import with_backward
from attngen.backends.hopper.gradients import is_late, is_wide
from attngen.backends.hopper.hide_tiles import as_pipeline
from attngen.bounds.turns import differs, whole_range
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Loop, Op, Yield
from attngen.ir.roles import Await, Give, Hold, Issue, Near, Own, Pack, Read, Share, Take
from attngen.passes.base import Pass

LIGHT = 11  # operations for each score, at most, of masks whose weights may be packed early without registers that spill


@dataclass(frozen=True)
class OverlapGradients(Pass):
    name: ClassVar[str] = "overlap-gradients"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        narrow = all(row.block_q <= ROWS for row in module.rows(FUSED, NAME))

        def change(kernel: Kernel) -> Kernel:
            late = is_late(module)
            light = module.dropout or late or work(module.kernel(FUSED)) <= LIGHT
            wide = is_wide(module)
            return _overlapped(kernel, narrow and light and not wide, late, wide)

        return with_backward(module, change)


def _overlapped(kernel: Kernel, early: bool, late: bool, last: bool) -> Kernel:
    """One loop over the tiles of both classes in all roles.

    Tiles come by their numbers where the mask bounds or lists them: a program then comes to a tile after those whose turns are before its
    own. Where all programs visit the same tiles, partial ones come first, as in loops that are apart.
    """
    loops = [[op for op in role.ops if isinstance(op, Loop)] for role in kernel.roles]
    visited = whole_range([pair for loop in loops[0] for pair in loop.ranges])
    bounded = visited is not None and (loops[0][0].listed is not None or any(differs(kernel, end) for end in visited))
    whole = {same[0].name: replace(as_pipeline(same), in_order=bounded, recompute=last and bool(same[0].carry)) for same in loops}
    later = [op for same in loops for op in same[1:]]
    results = {f"{op.name}.{field}": f"{whole[same[0].name].name}.{field}" for same in loops for op in same for field, _ in op.carry}
    kept_tiles = [op for op in kernel.block("consumer").ops if isinstance(op, (Own, Take))]
    blocks = []
    for block in kernel.blocks:
        ops = block.ops
        if any(isinstance(op, Issue) for op in ops):
            ops = _with_addresses(kept_tiles, tuple(_ordered(kernel, ops, early, late, last)))
        elif block.name == "consumer":
            ops = tuple(op for op in ops if not isinstance(op, Own))
        kept = (whole.get(op.name, op) for op in ops if op not in later)
        blocks.append(replace(block, ops=tuple(op if op.name in whole else op.with_operands(results) for op in kept)))
    return replace(kernel, blocks=tuple(blocks))


def _with_addresses(tiles: Sequence[Own | Take], ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The ops of a turn, with tiles that are taken before the loop at addresses that are computed here."""
    names = {op.name: f"{op.name}_near" if isinstance(op, Take) else op.name for op in tiles}
    made = [Near(names[op.name], op.name, op.type) if isinstance(op, Take) else op.with_operands(names) for op in tiles]
    args = [op for op in ops if isinstance(op, Arg)]
    return (*args, *made, *(op.with_operands(names) for op in ops if op not in args))


def _ordered(kernel: Kernel, ops: tuple[Op, ...], early: bool, late: bool, last: bool) -> Iterator[Op]:
    """early: weights are packed before dP is awaited. Otherwise they are held after that: else registers spill.

    late: dP is issued once all that S alone gives is computed, of which what dS needs is held, so that it is all that registers hold.
    last: dQ is issued once the other products have been awaited, in registers that their operands have left.
    """
    graph = kernel.graph
    awaits = {op.value: op for op in ops if isinstance(op, Await)}
    issues = [op for op in ops if isinstance(op, Issue)]
    takes = {op.name: op for op in ops if isinstance(op, Take)}
    gives = {op.value: op for op in ops if isinstance(op, Give)}
    reads = [op for op in ops if isinstance(op, Read)]
    shares = {op.value: op for op in ops if isinstance(op, Share)}
    sums = [op for op in issues if op.acc]
    dq = next(op for op in issues if op.a in takes)  # of dS that all consumers share
    dp, s = sorted((op for op in issues if not op.acc and op is not dq), key=lambda op: len(nx.descendants(graph, op.name)))
    of_s, of_dp = (nx.descendants(graph, op.name) for op in (s, dp))
    placed = {*issues, *awaits.values(), *takes.values(), *gives.values(), *reads, *shares.values()}
    rest = [op for op in ops if op not in placed and not isinstance(op, (Arg, Yield))]
    packs = [op for op in rest if isinstance(op, Pack)]
    weights = next(op.value for op in packs if op.name in of_s - of_dp)
    needed = [op.name for op in rest if op.name in of_s - of_dp and op not in packs and of_dp & set(graph.successors(op.name))]
    held = {name: f"{name}_held" for name in (needed if late else [] if early else [weights])}
    stages = [{op.name for op in rest} - of_s - of_dp, of_s - of_dp, of_dp]  # what needs no product, what needs S, what needs both

    def stage(at: int) -> Iterator[Op]:
        """The ops of a stage. What lies beside a tile is read just before, so that registers hold it for no longer."""
        earlier, mine = set().union(*stages[:at]), stages[at]
        waiting = [op for op in reads if mine & set(graph.successors(op.name)) and not earlier & set(graph.successors(op.name))]
        for op in (op for op in rest if op.name in mine and op not in packs):
            beside = [read for read in waiting if read.name in op.operands()]
            waiting = [read for read in waiting if read not in beside]
            yield from (*beside, op.with_operands(held) if at == 2 else op)

    yield from (op for op in ops if isinstance(op, Arg))
    yield from (takes[s.b], s, *(() if late else (takes[dp.b], dp)))
    yield from stage(0)
    yield awaits[s.name]
    yield from stage(1)
    first = [op for op in packs if early and op.value == weights]
    yield from first
    if late:
        yield from (Hold(made, name, kernel.type_of(name)) for name, made in held.items())
        yield from (takes[dp.b], dp)
    yield awaits[dp.name]
    if not (early or late):
        yield Hold(held[weights], weights, kernel.type_of(weights))
    yield from stage(2)
    for op in (op for op in packs if op not in first):
        yield op.with_operands(held)
        yield from (shares[op.name],) if op.name in shares else ()
    awaited = [op for product in sums for op in (awaits[product.name], gives[product.b])]
    yield from (*sums, takes[dq.a], *((*awaited, dq) if last else (dq, *awaited)))
    yield from (awaits[dq.name], gives[dq.a], shares[awaits[dq.name].name])
    yield from (op for op in ops if isinstance(op, Yield))
