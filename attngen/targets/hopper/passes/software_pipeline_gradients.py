"""software-pipeline-gradients: order the loop body of the backward so that elementwise work overlaps with products.

Both products of scores, S = Q K^T and dP = dO V^T, are issued first, so that the exponentials of P overlap with dP. The
products dV, dK and dQ run one after another, and overlap with the other consumer's arithmetic. The loops over partial
and full tiles become one `pipelined_loop`.

before:  block @step                               after:  block @step
           wait for Q; wait for dO                           wait for Q; issue S; wait for dO; issue dP
           issue dP; wait for dP                             wait for S; weights P of S
           issue S; wait for S                               wait for dP; dS of P and dP
           weights P of S; dS of P and dP                    issue dV += P dO; issue dK += dS Q
           issue dV; wait for dV; release dO                 issue dQ with dS of all consumers
           issue dK; wait for dK; release Q                  wait for dV; release dO
           issue dQ; wait for dQ                             wait for dK; release Q; wait for dQ

Where registers do not hold both S and dP, dP is issued after the exponentials:

             wait for Q; issue S; wait for S; weights P of S
             wait for dO; issue dP; wait for dP; dS of P and dP

Where accumulators take most of the registers, the loop recomputes its scalars in each iteration, and dQ is issued last:

             issue dV; issue dK
             wait for dV; release dO; wait for dK; release Q
             issue dQ with dS of all consumers; wait for dQ

The separate kernels of dQ and of dK have two products of scores and one accumulator. The tile of dP is released first:

             wait for dO; issue dP; wait for Q; issue S
             wait for dP; release dO; wait for S; weights P of S; dS of P and dP
             issue dK += dS Q; wait for dK; release Q
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx

from attngen.ir import Kernel, Module, Op, only, pipe, tile
from attngen.targets.hopper.configs.common import ops_per_score
from attngen.targets.hopper.configs.families import with_fused_backward, with_separate_backward
from attngen.targets.hopper.configs.fused_backward import is_wide, issues_dp_late
from attngen.targets.hopper.configs.separate_backward import is_pipelined_as_forward
from attngen.targets.hopper.configs.sm90 import FUSED, NAME, ROWS
from attngen.targets.hopper.passes.skip_masked_tiles import as_pipelined_loop
from attngen.tiles.order import differs, whole_range
from attngen.transforms.base import Pass

# Operations per score, at most, with which weights may be packed early without spilling registers.
MOST_OPS_TO_PACK_EARLY = 11


@dataclass(frozen=True)
class SoftwarePipelineGradients(Pass):
    name: ClassVar[str] = "software-pipeline-gradients"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        narrow = all(row.block_q <= ROWS for row in module.configs(FUSED, NAME))

        def change(kernel: Kernel) -> Kernel:
            late = issues_dp_late(module)
            light = module.dropout or late or ops_per_score(module.kernel(FUSED)) <= MOST_OPS_TO_PACK_EARLY
            wide = is_wide(module)
            return merge_loops(
                kernel, lambda ops: _order_fused(kernel, ops, narrow and light and not wide, late, wide), wide
            )

        def change_separate(kernel: Kernel) -> Kernel:
            return (
                kernel
                if is_pipelined_as_forward(kernel)
                else merge_loops(kernel, lambda ops: _order_separate(kernel, ops))
            )

        return with_separate_backward(with_fused_backward(module, change), change_separate)


def merge_loops(kernel: Kernel, order: Callable[[tuple[Op, ...]], Iterable[Op]], recompute: bool = False) -> Kernel:
    """Merge the loops over partial and full tiles into one in all warp groups, and order its bodies.

    The loop visits tiles in ascending order where the mask bounds or lists them: a program then comes to a tile after
    the programs that precede it in the semaphore's order. Where all programs visit the same tiles, partial ones come
    first, as in separate loops.
    """
    loops = [list(only(warp_group.ops, tile.Loop)) for warp_group in kernel.warp_groups]
    visited = whole_range([pair for loop in loops[0] for pair in loop.ranges])
    ordered = visited is not None and (
        not kernel.traits.adds_in_order
        or loops[0][0].listed is not None
        or any(differs(kernel, end) for end in visited)
    )
    merged = {
        same[0].name: replace(as_pipelined_loop(same), in_order=ordered, recompute=recompute and bool(same[0].carry))
        for same in loops
    }
    later = [op for same in loops for op in same[1:]]
    results = {
        f"{op.name}.{field}": f"{merged[same[0].name].name}.{field}"
        for same in loops
        for op in same
        for field, _ in op.carry
    }
    tiles_before_loop = list(only(kernel.block("consumer").ops, pipe.SliceRows, pipe.ConsumerWait))
    blocks = []
    for block in kernel.blocks:
        ops = block.ops
        if any(only(ops, pipe.Wgmma)):
            ops = _with_addresses(tiles_before_loop, tuple(order(ops)))
        elif block.name == "consumer":
            ops = tuple(op for op in ops if not isinstance(op, pipe.SliceRows))
        kept = (merged.get(op.name, op) for op in ops if op not in later)
        blocks.append(replace(block, ops=tuple(op if op.name in merged else op.with_operands(results) for op in kept)))
    return replace(kernel, blocks=tuple(blocks))


def _with_addresses(tiles: Sequence[pipe.SliceRows | pipe.ConsumerWait], ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Compute the addresses of tiles that are waited for before the loop again in its body."""
    names = {op.name: f"{op.name}_ADDR" if isinstance(op, pipe.ConsumerWait) else op.name for op in tiles}
    made = [
        pipe.Rematerialize(names[op.name], op.name, op.type)
        if isinstance(op, pipe.ConsumerWait)
        else op.with_operands(names)
        for op in tiles
    ]
    args = list(only(ops, tile.Arg))
    return (*args, *made, *(op.with_operands(names) for op in ops if op not in args))


class Kinds:
    """The ops of a loop body by kind."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.args = list(only(ops, tile.Arg))
        self.waits = {op.name: op for op in only(ops, pipe.ConsumerWait)}
        self.reads = list(only(ops, pipe.ReadMetadata))
        self.issues = list(only(ops, pipe.Wgmma))
        self.sums = [op for op in self.issues if op.acc]  # the products that add to accumulators
        self.product_waits = {op.value: op for op in only(ops, pipe.WgmmaWait)}
        self.stores = {op.value: op for op in only(ops, pipe.ProducerStore)}
        self.releases = {op.value: op for op in only(ops, pipe.ConsumerRelease)}
        self.yields = list(only(ops, tile.Yield))
        placed = {
            *self.args,
            *self.waits.values(),
            *self.reads,
            *self.issues,
            *self.product_waits.values(),
            *self.stores.values(),
        }
        placed |= {*self.releases.values(), *self.yields}
        self.computed = [op for op in ops if op not in placed]

    def ends(self, products: Sequence[pipe.Wgmma]) -> Iterator[Op]:
        """Wait for products, one after another, and release the tile of each."""
        return (op for product in products for op in (self.product_waits[product.name], self.releases[product.b]))


def _order_fused(kernel: Kernel, ops: tuple[Op, ...], early: bool, late: bool, last: bool) -> Iterator[Op]:
    """Order the body of the fused backward.

    early: pack the weights before the wait for dP. Otherwise they are pinned after it, where packing them early would
    spill registers.
    late: issue dP after all values that depend only on S are computed. Those that dS needs are pinned, so that
    registers hold no others.
    last: issue dQ after the waits for the other products, in the registers of their operands.
    """
    graph, of = kernel.graph, Kinds(ops)
    dq = next(op for op in of.issues if op.a in of.waits)  # its operand is the dS of all consumers
    dp, s = sorted(
        (op for op in of.issues if not op.acc and op is not dq), key=lambda op: len(nx.descendants(graph, op.name))
    )
    of_s, of_dp = (nx.descendants(graph, op.name) for op in (s, dp))
    packs = list(only(of.computed, pipe.Pack))
    weights = next(op.value for op in packs if op.name in of_s - of_dp)
    needed = [
        op.name
        for op in of.computed
        if op.name in of_s - of_dp and op not in packs and of_dp & set(graph.successors(op.name))
    ]
    pinned = {name: f"{name}_held" for name in (needed if late else [] if early else [weights])}
    # Values that need no product, those that need S, and those that need dP.
    stages = [{op.name for op in of.computed} - of_s - of_dp, of_s - of_dp, of_dp]

    def stage(at: int) -> Iterator[Op]:
        """The ops of a stage. Row vectors are read just before they are needed, to keep register lifetimes short."""
        earlier, mine = set().union(*stages[:at]), stages[at]
        waiting = [
            op
            for op in of.reads
            if mine & set(graph.successors(op.name)) and not earlier & set(graph.successors(op.name))
        ]
        for op in (op for op in of.computed if op.name in mine and op not in packs):
            due = [read for read in waiting if read.name in op.operands()]
            waiting = [read for read in waiting if read not in due]
            yield from (*due, op.with_operands(pinned) if at == 2 else op)

    yield from of.args
    yield from (of.waits[s.b], s, *(() if late else (of.waits[dp.b], dp)))
    yield from stage(0)
    yield of.product_waits[s.name]
    yield from stage(1)
    first = [op for op in packs if early and op.value == weights]
    yield from first
    if late:
        yield from (pipe.PinBeforeWait(made, name, kernel.type_of(name)) for name, made in pinned.items())
        yield from (of.waits[dp.b], dp)
    yield of.product_waits[dp.name]
    if not (early or late):
        yield pipe.PinBeforeWait(pinned[weights], weights, kernel.type_of(weights))
    yield from stage(2)
    for op in (op for op in packs if op not in first):
        yield op.with_operands(pinned)
        yield from (of.stores[op.name],) if op.name in of.stores else ()
    yield from (*of.sums, of.waits[dq.a], *((*of.ends(of.sums), dq) if last else (dq, *of.ends(of.sums))))
    yield from (of.product_waits[dq.name], of.releases[dq.a], of.stores[of.product_waits[dq.name].name])
    yield from of.yields


def _order_separate(kernel: Kernel, ops: tuple[Op, ...]) -> Iterator[Op]:
    """Order the body of a separate kernel: issue both products of scores, dP first, whose tile is released while the
    other one runs; then the product of the accumulator.

    A tile with row vectors is released after these have been read, each just before it is needed.
    """
    of = Kinds(ops)
    scores = sorted((op for op in of.issues if not op.acc), key=lambda op: len(nx.descendants(kernel.graph, op.name)))
    early, summed = [op.b for op in scores], {op.b for op in of.sums}
    with_vectors = {read.tile for read in of.reads}
    later = {read.name for read in of.reads}.union(
        *(nx.descendants(kernel.graph, op.name) for op in (*scores, *of.reads))
    )

    yield from of.args
    yield from (one for op in scores for one in (of.waits[op.b], op))
    yield from (op for op in of.computed if op.name not in later)
    for op in scores:
        yield of.product_waits[op.name]
        yield from [] if op.b in summed | with_vectors else [of.releases[op.b]]
    yield from (op for op in ops if op.name in later and (op in of.reads or op in of.computed))
    yield from (of.releases[name] for name in early if name in with_vectors - summed)
    yield from (of.waits[op.b] for op in of.sums if op.b not in early)
    yield from (*of.sums, *of.ends(of.sums), *of.yields)
