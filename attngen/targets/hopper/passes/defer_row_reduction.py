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

from attngen.ir import Kernel, Module, Op, Type, only, pipe, symbol, tile
from attngen.targets.hopper.configs.families import with_forward, with_jvp, with_mla_decode
from attngen.transforms.base import Pass

_KEYS = (*pipe.HALF_DIM, *pipe.HALF_DIM.values())


@dataclass(frozen=True)
class DeferRowReduction(Pass):
    name: ClassVar[str] = "defer-row-reduction"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_jvp(with_mla_decode(with_forward(module, _defer), _defer), _defer)


def _defer(kernel: Kernel) -> Kernel:
    for name in [op.name for op in only(kernel.ops(), pipe.PipelinedLoop) if op.carry]:
        pipelined = kernel.op(name)
        assert isinstance(pipelined, pipe.PipelinedLoop)
        kernel = _defer_in_loop(kernel, pipelined)
    return kernel


def _defer_in_loop(kernel: Kernel, pipelined: pipe.PipelinedLoop) -> Kernel:
    found = _find_sums(kernel, pipelined)
    fields = {field for field, ref in pipelined.carry if ref in found}
    if not fields or not all(
        _is_linear(kernel, op, found) for body in pipelined.bodies for op in kernel.block(body).ops
    ):
        return kernel
    starts = [kernel.op(ref) for field, ref in pipelined.carry if field in fields]
    if not all(
        isinstance(op, tile.Init) and op.value == 0 and list(kernel.graph.successors(op.name)) == [pipelined.name]
        for op in starts
    ):
        return kernel
    whole = {f"{pipelined.name}.{field}": f"{pipelined.name}_{field}" for field in sorted(fields)}

    def change(_: str, op: Op) -> Iterator[Op]:
        yield _as_partials(op) if op.name in found else op.with_operands(whole)
        if op is pipelined:
            yield from (
                tile.Reduce(name, ref, "sum", pipe.PARTIALS, kernel.type_of(ref)) for ref, name in whole.items()
            )

    return kernel.rewrite(change)


def _find_sums(kernel: Kernel, pipelined: pipe.PipelinedLoop) -> set[str]:
    """Find the names of four kinds of values: sums over keys in the loop's bodies, values computed from them, carried
    arguments that receive these, and the initial values of these arguments."""
    ops = [op for body in pipelined.bodies for op in kernel.block(body).ops]
    found = {op.name for op in only(ops, tile.Reduce) if op.op == "sum" and op.over in _KEYS}
    before: set[str] = set()
    while found != before:
        before = set(found)
        found |= {op.name for op in only(ops, tile.Map) if found & set(op.operands())}
        fields = {field for op in only(ops, tile.Yield) for field, ref in op.values if ref in found}
        found |= {
            op.name
            for body in pipelined.bodies
            for op in kernel.block(body).ops
            if _field(pipelined, op, body) in fields
        }
        found |= {ref for field, ref in pipelined.carry if field in fields}
    return found


def _field(pipelined: pipe.PipelinedLoop, op: Op, body: str) -> str:
    return pipelined.field_of(op.name, body) if isinstance(op, tile.Arg) else ""


def _is_linear(kernel: Kernel, op: Op, found: set[str]) -> bool:
    """True if an op reads no row sums, passes them on, or is a linear combination of them."""
    if isinstance(op, tile.Yield) or not found & set(op.operands()):
        return op.name not in found or kernel.type_of(op.name).dims == ("BLOCK_Q",)
    if not isinstance(op, tile.Map) or op.type.dims != ("BLOCK_Q",):
        return False
    terms = [symbol(name) for name, ref in op.uses if ref in found]
    return bool(sympy.expand(op.expr - sum(x * sympy.diff(op.expr, x) for x in terms)) == 0) and not any(
        set(terms) & sympy.diff(op.expr, x).free_symbols for x in terms
    )


def _as_partials(op: Any) -> Op:
    """The op on partial sums in place of row sums."""
    type_: Type = replace(op.type, dims=(*op.type.dims, pipe.PARTIALS))
    return (
        pipe.PartialReduce(op.name, op.value, op.over, type_)
        if isinstance(op, tile.Reduce)
        else replace(op, type=type_)
    )
