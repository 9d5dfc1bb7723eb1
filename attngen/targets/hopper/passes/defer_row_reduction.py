"""defer-row-reduction: sums of rows stay in the threads that add them up, until the last tile is done.

before:  %l_init = init 0 : f32[BLOCK_Q] @reg
         %keys = pipelined_loop kv ... carry(m=%m_init, l=%l_init, acc=%acc_init) first(@first) step(@step) last(@last)
         %inv_l = map expr(select(l > 0, 1/l, 0)) uses(l=%keys.l) : f32[BLOCK_Q] @reg
         ...
         %p_sum = reduce sum %soft.p over(BLOCK_KV) : f32[BLOCK_Q] @reg
         %l_next = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum) : f32[BLOCK_Q] @reg
after:   %l_init = init 0 : f32[BLOCK_Q, PARTIALS] @reg
         %keys = pipelined_loop kv ... carry(m=%m_init, l=%l_init, acc=%acc_init) first(@first) step(@step) last(@last)
         %keys_l = reduce sum %keys.l over(PARTIALS) : f32[BLOCK_Q] @reg
         %inv_l = map expr(select(l > 0, 1/l, 0)) uses(l=%keys_l) : f32[BLOCK_Q] @reg
         ...
         %p_sum = partial_reduce %soft.p over(BLOCK_KV) : f32[BLOCK_Q, PARTIALS] @reg
         %l_next = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum) : f32[BLOCK_Q, PARTIALS] @reg

Threads that share a row would tell each other their sums in each turn, and the wait for a product would come after
that.

A kernel stays as it is if its sums of rows do not start at 0, or are more than multiples of sums added up: then chains
have another sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy

from attngen.ir.expr import symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Arg, Init, Map, Op, Reduce, Type, Yield
from attngen.ir.pipe import HALVES, PARTIALS, PartialReduce, PipelinedLoop
from attngen.targets.hopper.configs.families import with_forwards, with_latents, with_tangents
from attngen.transforms.base import Pass

_KEYS = (*HALVES, *HALVES.values())


@dataclass(frozen=True)
class DeferRowReduction(Pass):
    name: ClassVar[str] = "defer-row-reduction"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_tangents(with_latents(with_forwards(module, _chained), _chained), _chained)


def _chained(kernel: Kernel) -> Kernel:
    for name in [op.name for op in kernel.ops() if isinstance(op, PipelinedLoop) and op.carry]:
        pipelined = kernel.op(name)
        assert isinstance(pipelined, PipelinedLoop)
        kernel = _with_chains(kernel, pipelined)
    return kernel


def _with_chains(kernel: Kernel, pipelined: PipelinedLoop) -> Kernel:
    found = _sums(kernel, pipelined)
    fields = {field for field, ref in pipelined.carry if ref in found}
    if not fields or not all(_adds(kernel, op, found) for body in pipelined.bodies for op in kernel.block(body).ops):
        return kernel
    starts = [kernel.op(ref) for field, ref in pipelined.carry if field in fields]
    if not all(
        isinstance(op, Init) and op.value == 0 and list(kernel.graph.successors(op.name)) == [pipelined.name]
        for op in starts
    ):
        return kernel
    whole = {f"{pipelined.name}.{field}": f"{pipelined.name}_{field}" for field in sorted(fields)}

    def change(_: str, op: Op) -> Iterator[Op]:
        yield _in_chains(op) if op.name in found else op.with_operands(whole)
        if op is pipelined:
            yield from (Reduce(name, ref, "sum", PARTIALS, kernel.type_of(ref)) for ref, name in whole.items())

    return kernel.rewrite(change)


def _sums(kernel: Kernel, pipelined: PipelinedLoop) -> set[str]:
    """The sums over keys in the bodies, what is made of these, and the carried fields that get this, with what they
    start from."""
    ops = [op for body in pipelined.bodies for op in kernel.block(body).ops]
    found = {op.name for op in ops if isinstance(op, Reduce) and op.op == "sum" and op.over in _KEYS}
    before: set[str] = set()
    while found != before:
        before = set(found)
        found |= {op.name for op in ops if isinstance(op, Map) and found & set(op.operands())}
        fields = {field for op in ops if isinstance(op, Yield) for field, ref in op.values if ref in found}
        found |= {
            op.name
            for body in pipelined.bodies
            for op in kernel.block(body).ops
            if _field(pipelined, op, body) in fields
        }
        found |= {ref for field, ref in pipelined.carry if field in fields}
    return found


def _field(pipelined: PipelinedLoop, op: Op, body: str) -> str:
    return pipelined.field(op.name, body) if isinstance(op, Arg) else ""


def _adds(kernel: Kernel, op: Op, found: set[str]) -> bool:
    """Whether an op reads no sums, or passes them on, or adds up multiples of sums of rows."""
    if isinstance(op, Yield) or not found & set(op.operands()):
        return op.name not in found or kernel.type_of(op.name).dims == ("BLOCK_Q",)
    if not isinstance(op, Map) or op.type.dims != ("BLOCK_Q",):
        return False
    terms = [symbol(name) for name, ref in op.uses if ref in found]
    return bool(sympy.expand(op.expr - sum(x * sympy.diff(op.expr, x) for x in terms)) == 0) and not any(
        set(terms) & sympy.diff(op.expr, x).free_symbols for x in terms
    )


def _in_chains(op: Any) -> Op:
    """The op on chains in place of whole rows."""
    type_: Type = replace(op.type, dims=(*op.type.dims, PARTIALS))
    return PartialReduce(op.name, op.value, op.over, type_) if isinstance(op, Reduce) else replace(op, type=type_)
