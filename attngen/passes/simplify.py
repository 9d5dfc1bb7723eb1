"""simplify: drop conditions that others imply, and write the rest in the form that is cheapest to test.

before:  mask %s where(kv_idx <= Nk - Nq + q_idx and kv_idx < Nk)
after:   mask %s where(kv_idx <= Nk - Nq + q_idx)          # for valid queries the first implies the second

Each linear condition gets the loop's index alone on one side. The other side is then a vector that does not change in the loop.
If no full loop runs a body, what is marked `if partial` in it becomes unconditional.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.bounds.intervals import implies, linear_parts
from attngen.ir.expr import Bool, conjuncts, symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Load, Mask, Op, SoftmaxStep
from attngen.passes.base import Pass


@dataclass(frozen=True)
class Simplify(Pass):
    name: ClassVar[str] = "simplify"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return module.map_kernels(_simplify)


def _simplify(kernel: Kernel) -> Kernel:
    own = kernel.own_axis
    loop = "kv" if own == "q" else "q"
    reals = frozenset(op.name for op in kernel.ops() for t in [op.results().get("")] if t and t.dtype == "f32")
    with_full = {x.body for x in kernel.loops if x.cls == "full"}

    def change(block: str, op: Op) -> list[Op]:
        always = block != "entry" and block not in with_full
        if isinstance(op, Mask):
            where = simplify_condition(op.where, own, loop, reals)
            if where == sympy.true:
                return []
            used = {str(s) for s in where.free_symbols}
            uses = tuple(u for u in op.uses if u[0] in used)
            return [replace(op, where=where, uses=uses, when="always" if always else op.when)]
        if isinstance(op, Load) and always:
            return [replace(op, check=tuple((axis, "always") for axis, _ in op.check))]
        if isinstance(op, SoftmaxStep) and always:
            return [replace(op, guard="always")]
        return [op]

    return kernel.rewrite(change)


def simplify_condition(where: Bool, own: str, loop: str, reals: frozenset[str] = frozenset()) -> Bool:
    """The conjunction without parts that the others imply for valid rows. Comparisons of integers are solved for the loop's index."""
    fixed = [p for p in conjuncts(where) if not reals.isdisjoint(str(s) for s in p.free_symbols)]
    parts = [p for p in conjuncts(where) if p not in fixed]
    kept = list(parts)
    for part in parts:
        others = [p for p in kept if p is not part]
        if any(implies(p, part, own, loop) for p in others):
            kept = others
    return sympy.And(*fixed, *(_solved(p, own, loop) for p in kept))


def _solved(p: Bool, own: str, loop: str) -> Bool:
    linear = linear_parts(p, own, loop)
    if linear is None or linear[1] not in (1, -1):
        return p
    a, c, rest = linear
    bound = -c * (a * symbol(f"{own}_idx") + rest)
    index = symbol(f"{loop}_idx")
    if c == 1:  # index <= bound; written with < where that drops a constant
        return index < bound + 1 if _shorter(bound + 1, bound) else index <= bound
    return index > bound - 1 if _shorter(bound - 1, bound) else index >= bound


def _shorter(a: sympy.Expr, b: sympy.Expr) -> bool:
    return len(sympy.Add.make_args(a)) < len(sympy.Add.make_args(b))
