"""simplify: drop conditions that others imply, and write the rest in the form that is cheapest to test.

before:  mask %s where(kv_idx <= Nk - Nq + q_idx and kv_idx < Nk)
after:   mask %s where(kv_idx <= Nk - Nq + q_idx)          # for valid queries the first implies the second

Each linear condition gets the loop's index alone on one side. The other side is then a vector that does not change in
the loop. So of several upper bounds of the index only the least is compared, and of lower ones the greatest: one
comparison for each score in place of two.

before:  mask %s where(kv_idx <= Nk - Nq + q_idx and kv_idx < document_end)
after:   mask %s where(kv_idx < min(document_end, Nk - Nq + q_idx + 1))

A mask that is too long to be solved in full for the tiles that it leaves stays as it is: of a shorter one more would be
solved, and the loops, which have been made, may not be proven to visit just that.

If no full loop runs a body, what is marked `if partial` in it becomes unconditional.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir.expr import Bool, conjuncts, symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import AXIS_DIM, Gather, Load, Mask, Op, SoftmaxStep
from attngen.tiles.intervals import implies, is_cut_short, linear_parts, mentions
from attngen.tiles.ranges import mask_of, scene_of
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class Simplify(Pass):
    name: ClassVar[str] = "simplify"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return module.map_kernels(_simplify)


def _simplify(kernel: Kernel) -> Kernel:
    own = kernel.program_axis
    loop = "kv" if own == "q" else "q"
    types = {op.name: t for op in kernel.ops() if (t := op.results().get(""))}
    reals = frozenset(name for name, t in types.items() if t.dtype == "f32")
    moving = frozenset(name for name, t in types.items() if AXIS_DIM[loop] in t.dims)
    loaded = frozenset(op.name for op in kernel.ops() if isinstance(op, (Gather, Load)))
    with_full = {x.body for x in kernel.loops if x.cls == "full"}
    too_long = {x.body for x in kernel.loops if is_cut_short(mask_of(kernel, x.body), scene_of(kernel, x.body))}
    unmasked: dict[str, str] = {}  # a mask that is always true -> its value, which ops after it read instead

    def change(block: str, op: Op) -> list[Op]:
        op = op.with_operands(unmasked) if unmasked else op
        always = block != "entry" and block not in with_full
        if isinstance(op, Mask):
            where = (
                simplify_condition(op.where, own, loop, reals, loaded, moving) if block not in too_long else op.where
            )
            if where == sympy.true:
                unmasked[op.name] = op.value
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


def simplify_condition(
    where: Bool,
    own: str,
    loop: str,
    reals: frozenset[str] = frozenset(),
    loaded: frozenset[str] = frozenset(),
    moving: frozenset[str] = frozenset(),
) -> Bool:
    """The conjunction without parts that the others imply for valid rows. Comparisons of integers are solved for the
    loop's index.

    reals: values that are no integers; loaded: those that are data, which may be the least or greatest integer; moving:
    those that change along the loop's axis.
    """
    said = conjuncts(where)
    fixed = [p for p in said if mentions(p, reals)]
    parts = [p for p in said if p not in fixed]
    kept = list(parts)
    for part in parts:
        others = [p for p in kept if p is not part]
        if any(implies(p, part, own, loop) for p in others):
            kept = others
    solved = [_solved(p, own, loop, loaded) for p in kept]
    return sympy.And(*fixed, *_one_bound_a_side(solved, symbol(f"{loop}_idx"), loaded, moving))


def _solved(p: Bool, own: str, loop: str, loaded: frozenset[str]) -> Bool:
    if isinstance(p, (sympy.And, sympy.Or)):
        # Vectors of keys would take registers beside the sums of dK and dV. Of data, a sum may be too large.
        return (
            p if own != "q" or mentions(p, loaded) else p.func(*(_solved(part, own, loop, loaded) for part in p.args))
        )
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


def _one_bound_a_side(
    parts: list[Bool], index: sympy.Symbol, loaded: frozenset[str], moving: frozenset[str]
) -> list[Bool]:
    """The parts with one upper and one lower bound of the index, of those that are plain sums and do not change along
    the loop.

    Data is compared as it is: one more or less than the least or greatest integer is another one.
    """
    for strict, weak, nearest, step in ((sympy.Lt, sympy.Le, sympy.Min, 1), (sympy.Gt, sympy.Ge, sympy.Max, -1)):
        alike = [
            p
            for p in parts
            if isinstance(p, (strict, weak)) and p.lhs == index and _is_plain(p.rhs) and not mentions(p, moving)
        ]
        of_data = [p.func for p in alike if mentions(p, loaded)]
        kind = of_data[0] if of_data else strict if all(isinstance(p, strict) for p in alike) else weak
        alike = [p for p in alike if isinstance(p, kind) or not mentions(p, loaded)]
        if len(alike) > 1:
            shift = step if kind is strict else -step
            bound = nearest(*(p.rhs if isinstance(p, kind) else p.rhs + shift for p in alike))
            parts = [*(p for p in parts if p not in alike), kind(index, bound)]
    return parts


def _is_plain(e: sympy.Expr) -> bool:
    """Whether it is a sum of integers, each once: others may need 64 bits, which the comparison would then have for
    every score."""
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(e) if not term.is_Integer]
    return all(abs(factor) == 1 and term.is_Symbol for factor, term in terms)
