"""simplify: drop conditions that others imply, and write the rest in the form that is cheapest to test.

before:  mask %s where(kv_idx <= Nk - Nq + q_idx and kv_idx < Nk)
after:   mask %s where(kv_idx <= Nk - Nq + q_idx)          # for valid queries the first implies the second

Each linear condition gets the loop's index alone on one side. The other side is then a vector that does not change in the loop. So of
several upper bounds of the index only the least is compared, and of lower ones the greatest: one comparison for each score in place of two.

before:  mask %s where(kv_idx <= Nk - Nq + q_idx and kv_idx < document_end)
after:   mask %s where(kv_idx <= Min(document_end - 1, Nk - Nq + q_idx))

If no full loop runs a body, what is marked `if partial` in it becomes unconditional.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.bounds.intervals import implies, linear_parts
from attngen.ir.expr import Bool, conjuncts, symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import AXIS_DIM, Load, Mask, Op, SoftmaxStep
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
    moving = frozenset(op.name for op in kernel.ops() for t in [op.results().get("")] if t and AXIS_DIM[loop] in t.dims)
    with_full = {x.body for x in kernel.loops if x.cls == "full"}

    def change(block: str, op: Op) -> list[Op]:
        always = block != "entry" and block not in with_full
        if isinstance(op, Mask):
            where = simplify_condition(op.where, own, loop, reals, moving)
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


def simplify_condition(where: Bool, own: str, loop: str, reals: frozenset[str] = frozenset(), moving: frozenset[str] = frozenset()) -> Bool:
    """The conjunction without parts that the others imply for valid rows. Comparisons of integers are solved for the loop's index.

    reals: values that are no integers; moving: those that change along the loop's axis.
    """
    fixed = [p for p in conjuncts(where) if not reals.isdisjoint(str(s) for s in p.free_symbols)]
    parts = [p for p in conjuncts(where) if p not in fixed]
    kept = list(parts)
    for part in parts:
        others = [p for p in kept if p is not part]
        if any(implies(p, part, own, loop) for p in others):
            kept = others
    return sympy.And(*fixed, _one_bound_a_side(sympy.And(*(_solved(p, own, loop) for p in kept)), symbol(f"{loop}_idx"), moving))


def _solved(p: Bool, own: str, loop: str) -> Bool:
    if isinstance(p, (sympy.And, sympy.Or)) and own == "q":  # of keys, the vectors would take registers beside the sums of dK and dV
        return p.func(*(_solved(part, own, loop) for part in p.args))
    linear = linear_parts(p, own, loop)
    if linear is None or linear[1] not in (1, -1):
        return p
    a, c, rest = linear
    bound = -c * (a * symbol(f"{own}_idx") + rest)
    index, strict = symbol(f"{loop}_idx"), isinstance(p, (sympy.Lt, sympy.Gt))
    if c == 1:  # index <= bound; written with < where that drops a constant
        return index < bound + 1 if _simpler(bound + 1, bound, strict) else index <= bound
    return index > bound - 1 if _simpler(bound - 1, bound, strict) else index >= bound


def _simpler(a: sympy.Expr, b: sympy.Expr, even: bool) -> bool:
    """Whether a has fewer terms than b; `even` if it has as many."""
    terms = len(sympy.Add.make_args(b)) - len(sympy.Add.make_args(a))
    return terms > 0 or (terms == 0 and even)


def _one_bound_a_side(p: Bool, index: sympy.Symbol, moving: frozenset[str]) -> Bool:
    """The condition with one upper and one lower bound of the index in each conjunction and disjunction, of bounds that do not change."""
    if not isinstance(p, (sympy.And, sympy.Or)):
        return p
    parts = [_one_bound_a_side(part, index, moving) for part in p.args]
    both = isinstance(p, sympy.And)
    for strict, weak, upper in ((sympy.Lt, sympy.Le, True), (sympy.Gt, sympy.Ge, False)):
        alike = [
            x for x in parts if isinstance(x, (strict, weak)) and x.lhs == index and moving.isdisjoint(str(s) for s in x.rhs.free_symbols)
        ]
        if len(alike) > 1:
            nearest = sympy.Min if upper == both else sympy.Max
            kind = strict if all(isinstance(x, strict) for x in alike) else weak
            step = -1 if upper else 1
            bound = nearest(*(x.rhs + step if isinstance(x, strict) and kind is weak else x.rhs for x in alike))
            parts = [*(x for x in parts if x not in alike), kind(index, bound)]
    return p.func(*parts)
