"""defer-row-reduction: keep row sums as partial sums per thread in the loop, and reduce them across threads after it.

The threads that share a row would otherwise exchange their sums in each iteration, before they wait for a product.

before:  %l_init = init 0 : f32[BLOCK_Q] @reg
         %keys = pipelined_loop kv ... carry(m=%m_init, l=%l_init, acc=%acc_init) first(@first) step(@step) last(@last)
         %inv_l = map expr(select(l > 0, 1/l, 0)) uses(l=%keys.l) : f32[BLOCK_Q] @reg
         ...
         %p_sum = reduce sum %soft.p over(BLOCK_KV) : f32[BLOCK_Q] @reg
         %l_next = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum) : f32[BLOCK_Q] @reg
after:   %l_init = init 0 : f32[BLOCK_Q, _PARTIALS] @reg
         %keys = pipelined_loop kv ... carry(m=%m_init, l=%l_init, acc=%acc_init) first(@first) step(@step) last(@last)
         %keys_l = reduce sum %keys.l over(_PARTIALS) : f32[BLOCK_Q] @reg
         %inv_l = map expr(select(l > 0, 1/l, 0)) uses(l=%keys_l) : f32[BLOCK_Q] @reg
         ...
         %p_sum = partial_reduce %soft.p over(BLOCK_KV) : f32[BLOCK_Q, _PARTIALS] @reg
         %l_next = map expr(alpha*l + p_sum) uses(l=%l, alpha=%soft.alpha, p_sum=%p_sum) : f32[BLOCK_Q, _PARTIALS] @reg

A kernel is unchanged if its row sums do not start at 0, or if an iteration updates them by anything but a linear
combination of row sums without a constant term, such as `alpha*l + p_sum`: the partial sums would not add up to the row
sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy

from attngen.ir.core import Op, Type
from attngen.ir.expr import symbol
from attngen.ir.kernel import Kernel
from attngen.ir.module import Module
from attngen.ir.ops import Arg, Init, Map, Reduce, Yield
from attngen.ir.pipe import HALF_DIM, PARTIALS, PartialReduce
from attngen.ir.pipe_control import PipelinedLoop
from attngen.targets.hopper.configs.families import with_forward, with_jvp, with_mla_decode
from attngen.transforms.base import Pass

_KEYS = (*HALF_DIM, *HALF_DIM.values())


@dataclass(frozen=True)
class DeferRowReduction(Pass):
    name: ClassVar[str] = "defer-row-reduction"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_jvp(with_mla_decode(with_forward(module, _defer), _defer), _defer)


def _defer(kernel: Kernel) -> Kernel:
    for name in [op.name for op in kernel.ops() if isinstance(op, PipelinedLoop) and op.carry]:
        pipelined = kernel.op(name)
        assert isinstance(pipelined, PipelinedLoop)
        kernel = _defer_in_loop(kernel, pipelined)
    return kernel


def _defer_in_loop(kernel: Kernel, pipelined: PipelinedLoop) -> Kernel:
    found = _find_sums(kernel, pipelined)
    fields = {field for field, ref in pipelined.carry if ref in found}
    if not fields or not all(
        _is_linear(kernel, op, found) for body in pipelined.bodies for op in kernel.block(body).ops
    ):
        return kernel
    starts = [kernel.op(ref) for field, ref in pipelined.carry if field in fields]
    if not all(
        isinstance(op, Init) and op.value == 0 and list(kernel.graph.successors(op.name)) == [pipelined.name]
        for op in starts
    ):
        return kernel
    whole = {f"{pipelined.name}.{field}": f"{pipelined.name}_{field}" for field in sorted(fields)}

    def change(_: str, op: Op) -> Iterator[Op]:
        yield _as_partials(op) if op.name in found else op.with_operands(whole)
        if op is pipelined:
            yield from (Reduce(name, ref, "sum", PARTIALS, kernel.type_of(ref)) for ref, name in whole.items())

    return kernel.rewrite(change)


def _find_sums(kernel: Kernel, pipelined: PipelinedLoop) -> set[str]:
    """Find the names of four kinds of values: sums over keys in the loop's bodies, values computed from them, carried
    arguments that receive these, and the initial values of these arguments."""
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
    return pipelined.field_of(op.name, body) if isinstance(op, Arg) else ""


def _is_linear(kernel: Kernel, op: Op, found: set[str]) -> bool:
    """True if an op reads no row sums, passes them on, or is a linear combination of them."""
    if isinstance(op, Yield) or not found & set(op.operands()):
        return op.name not in found or kernel.type_of(op.name).dims == ("BLOCK_Q",)
    if not isinstance(op, Map) or op.type.dims != ("BLOCK_Q",):
        return False
    terms = [symbol(name) for name, ref in op.uses if ref in found]
    return bool(sympy.expand(op.expr - sum(x * sympy.diff(op.expr, x) for x in terms)) == 0) and not any(
        set(terms) & sympy.diff(op.expr, x).free_symbols for x in terms
    )


def _as_partials(op: Any) -> Op:
    """The op on partial sums in place of row sums."""
    type_: Type = replace(op.type, dims=(*op.type.dims, PARTIALS))
    return PartialReduce(op.name, op.value, op.over, type_) if isinstance(op, Reduce) else replace(op, type=type_)
