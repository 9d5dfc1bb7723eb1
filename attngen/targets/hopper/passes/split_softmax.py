"""split-softmax: compute the exponentials of a tile in two halves, and wait for the product P V of the previous tile
between them.

The product takes about as long as half of the exponentials. So it runs during the left half, and is done when the right
half starts. The rescaling of its accumulator then comes before the right half, and its multiplications overlap with
exponentials. The weights of both halves are packed at the end. Together with defer-row-reduction, this made the forward
3 to 7% faster at head_dim 128 than the kernel without both (a prototype; docs/perf-log.md, section 26).

before:  %soft = softmax_step %masked m(%m) scale(%qk_scale) : f32[BLOCK_Q, BLOCK_KV] @reg
         %p_cast = pack %soft.p : T[BLOCK_Q, BLOCK_KV] @reg
         %p_sum = reduce sum %soft.p over(BLOCK_KV) : f32[BLOCK_Q] @reg
         %l_next = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum) : f32[BLOCK_Q] @reg
         %acc_next = wgmma_wait %acc_flight keep_alive(%weights) : f32[BLOCK_Q, D_V] @reg
         consumer_release %v
         %rescaled = map expr(acc*alpha) uses(acc=%acc_next, alpha=%soft.alpha) : f32[BLOCK_Q, D_V] @reg
after:   %soft = softmax_stats %masked m(%m) scale(%qk_scale) : f32[BLOCK_Q] @reg
         %soft_halves = split_halves %masked over(BLOCK_KV) : f32[BLOCK_Q, HALF_KV] @reg
         %soft_left = softmax_weights %soft_halves.left base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, HALF_KV] @reg
         %p_sum_left = reduce sum %soft_left over(HALF_KV) : f32[BLOCK_Q] @reg
         %l_next_left = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum_left) : f32[BLOCK_Q] @reg
         %acc_next = wgmma_wait %acc_flight keep_alive(%weights) : f32[BLOCK_Q, D_V] @reg
         consumer_release %v
         %rescaled = map expr(acc*alpha) uses(acc=%acc_next, alpha=%soft.alpha) : f32[BLOCK_Q, D_V] @reg
         %soft_right = softmax_weights %soft_halves.right base(%soft.base) scale(%qk_scale) : f32[BLOCK_Q, HALF_KV] @reg
         %p_sum_right = reduce sum %soft_right over(HALF_KV) : f32[BLOCK_Q] @reg
         %l_next = map expr(before + p_sum) uses(before=%l_next_left, p_sum=%p_sum_right) : f32[BLOCK_Q] @reg
         %soft_all = concat_halves %soft_left %soft_right over(BLOCK_KV) : f32[BLOCK_Q, BLOCK_KV] @reg
         %p_cast = pack %soft_all : T[BLOCK_Q, BLOCK_KV] @reg

Masks and modifiers come before both halves, on the whole tile. Dropout applies to each half after its weights, so
dropout of the left half comes before the wait, too:

         %soft_left = softmax_weights ...
         %p_sum_left = reduce sum %soft_left over(HALF_KV) : f32[BLOCK_Q] @reg
         %keep_halves = split_halves %keep over(BLOCK_KV) : b1[BLOCK_Q, HALF_KV] @reg
         %p_kept_left = dropout %soft_left keep(%keep_halves.left) : f32[BLOCK_Q, HALF_KV] @reg

A kernel is unchanged if its tiles have fewer than 128 keys, whose halves are too short, or if it does not add the sum
of the weights to its row sums exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx
import sympy

from attngen.ir import Kernel, Module, Op, Type, only, pipe, symbol, tile
from attngen.targets.hopper.configs.families import with_forward
from attngen.transforms.base import Pass

KEYS = "BLOCK_KV"
LEAST_KEYS = 128  # of a tile that is split


@dataclass(frozen=True)
class SplitSoftmax(Pass):
    name: ClassVar[str] = "split-softmax"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_forward(module, lambda kernel: _split(module, kernel))


@dataclass(frozen=True)
class _Parts:
    """The ops of @step that the split concerns."""

    softmax: tile.SoftmaxStep
    sum: tile.Reduce  # the sum of its weights along each row
    total: tile.Map  # the updated row sums
    term: str  # the symbol of `sum` in the expression of `total`
    dropped: tile.Dropout | None  # dropout of the weights, if only it and their sum read them


def _split(module: Module, kernel: Kernel) -> Kernel:
    steps = [op.step for op in only(kernel.ops(), pipe.PipelinedLoop)]
    short = any(config.block_kv < LEAST_KEYS for config in module.configs(kernel.name, kernel.backend))
    parts = _parts(kernel, kernel.block(steps[0]).ops) if steps and not short else None
    if parts is None:
        return kernel
    blocks = (replace(b, ops=tuple(_ordered(kernel, parts, b.ops))) if b.name == steps[0] else b for b in kernel.blocks)
    return replace(kernel, blocks=tuple(blocks))


def _parts(kernel: Kernel, ops: Sequence[Op]) -> _Parts | None:
    """The parts, or None where the sum of the weights is used for anything but one addition."""
    softmax = next(only(ops, tile.SoftmaxStep), None)
    wait = next((op for op in only(ops, pipe.WgmmaWait) if op.keep_alive), None)
    sums = [op for op in only(ops, tile.Reduce) if softmax and op.value == f"{softmax.name}.p"]
    if softmax is None or wait is None or [(op.op, op.over) for op in sums] != [("sum", KEYS)]:
        return None
    totals = [op for op in ops if sums[0].name in op.operands()]
    if len(totals) != 1 or not isinstance(totals[0], tile.Map):
        return None
    term = next(name for name, ref in totals[0].uses if ref == sums[0].name)
    rest = sympy.expand(totals[0].expr - symbol(term))
    others = [op for op in ops if f"{softmax.name}.p" in op.operands() and op is not sums[0]]
    dropped = others[0] if len(others) == 1 and isinstance(others[0], tile.Dropout) else None
    return None if symbol(term) in rest.free_symbols else _Parts(softmax, sums[0], totals[0], term, dropped)


def _ordered(kernel: Kernel, parts: _Parts, ops: Sequence[Op]) -> list[Op]:
    """Return the ops of the body in their new order:

    1. The ops that do not need the whole weights, in the order that they have. In place of the softmax come its row
       statistics and the left half. The wait for the product, the release of V and the rescaling come after it.
    2. The right half, and both halves concatenated.
    3. The ops that need the whole weights, such as the pack.
    """
    concatenated = {f"{parts.softmax.name}.p": f"{parts.softmax.name}_all"}
    of_weights = {
        name for name in nx.descendants(kernel.graph, parts.softmax.name) if _needs_weights(kernel, parts, name)
    }
    later = [op for op in ops if op.name in of_weights and not isinstance(op, tile.Yield)]
    made: list[Op] = []
    for op in ops:
        if op is parts.softmax:
            made += _left(parts)
        elif op in later or op in (parts.sum, parts.total):
            continue
        elif isinstance(op, tile.Yield):
            others = (o for o in later if o is not parts.dropped)
            made += [*_right(parts), *(o.with_operands(concatenated) for o in others), op.with_operands(concatenated)]
        else:
            made.append(op)
    return made


def _needs_weights(kernel: Kernel, parts: _Parts, name: str) -> bool:
    """True if an op depends on the weights other than through their sum."""
    op = kernel.op(name)
    if op in (parts.sum, parts.total):
        return False
    whole = f"{parts.softmax.name}.p"
    return any(ref == whole or (ref in kernel.graph and _needs_weights(kernel, parts, ref)) for ref in op.operands())


def _left(parts: _Parts) -> list[Op]:
    """The row statistics, the left half of the weights, and the row sums with it."""
    soft, name, drop = parts.softmax, parts.softmax.name, parts.dropped
    row, half = replace(soft.type, dims=soft.type.dims[:1]), _half(soft.type)
    total = replace(
        parts.total.with_operands({parts.sum.name: f"{parts.sum.name}_left"}), name=f"{parts.total.name}_left"
    )
    return [
        pipe.SoftmaxStats(name, soft.s, soft.m, row, soft.scale, soft.guard, soft.shift),
        pipe.SplitHalves(f"{name}_halves", soft.s, KEYS, half),
        pipe.SoftmaxWeights(f"{name}_left", f"{name}_halves.left", f"{name}.base", half, soft.scale),
        replace(parts.sum, name=f"{parts.sum.name}_left", value=f"{name}_left", over=pipe.HALF_DIM[KEYS]),
        total,
        *([pipe.SplitHalves(f"{drop.keep}_halves", drop.keep, KEYS, replace(half, dtype="b1"))] if drop else []),
        *_dropped_half(parts, "left"),
    ]


def _right(parts: _Parts) -> list[Op]:
    """The right half of the weights, the row sums with it, and both halves concatenated."""
    soft, name, drop = parts.softmax, parts.softmax.name, parts.dropped
    half, added = _half(soft.type), symbol("before") + symbol(parts.term)
    uses = (("before", f"{parts.total.name}_left"), (parts.term, f"{parts.sum.name}_right"))
    whole, concatenated = (drop.name, drop.name) if drop else (name, f"{name}_all")
    return [
        pipe.SoftmaxWeights(f"{name}_right", f"{name}_halves.right", f"{name}.base", half, soft.scale),
        replace(parts.sum, name=f"{parts.sum.name}_right", value=f"{name}_right", over=pipe.HALF_DIM[KEYS]),
        replace(parts.total, expr=added, uses=uses),
        *_dropped_half(parts, "right"),
        pipe.ConcatHalves(concatenated, f"{whole}_left", f"{whole}_right", KEYS, soft.type),
    ]


def _dropped_half(parts: _Parts, side: str) -> list[Op]:
    """Dropout of one half of the weights; nothing without dropout."""
    if (drop := parts.dropped) is None:
        return []
    value, keep = f"{parts.softmax.name}_{side}", f"{drop.keep}_halves.{side}"
    return [tile.Dropout(f"{drop.name}_{side}", value, keep, _half(drop.type))]


def _half(whole: Type) -> Type:
    return replace(whole, dims=tuple(pipe.HALF_DIM.get(d, d) for d in whole.dims))
