"""simplify: drop mask conditions that others imply, and write the rest in the form that is cheapest to test.

before:  mask %s where(kv_idx <= Nk - Nq + q_idx and kv_idx < Nk)
after:   mask %s where(kv_idx <= Nk - Nq + q_idx)          # for valid queries the first implies the second

Each linear condition is solved for the loop's index. The other side is then a vector that is invariant in the loop. So
several upper bounds of the index become one, their minimum, and several lower bounds become their maximum: one
comparison per score instead of two.

before:  mask %s where(kv_idx <= Nk - Nq + q_idx and kv_idx < document_end)
after:   mask %s where(kv_idx < min(document_end, Nk - Nq + q_idx + 1))

A mask that exceeds the limits of the interval solver is left unchanged. More of a shorter mask would be solved, and the
existing loops could not be proven to visit exactly those tiles.

If no full loop runs a body, ops marked `if partial` in it become unconditional.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngen.ir import AXIS_DIM, Bool, Kernel, Module, Op, conjuncts, only, symbol, tile
from attngen.tiles.intervals import exceeds_limits, implies, linear_parts, mentions
from attngen.tiles.ranges import mask_context, mask_of
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
    loaded = frozenset(op.name for op in only(kernel.ops(), tile.Gather, tile.Load))
    with_full = {x.body for x in kernel.loops if x.cls == "full"}
    too_long = {x.body for x in kernel.loops if exceeds_limits(mask_of(kernel, x.body), mask_context(kernel, x.body))}
    unmasked: dict[str, str] = {}  # a mask that is always true -> its value, which later ops read instead

    def change(block: str, op: Op) -> list[Op]:
        op = op.with_operands(unmasked) if unmasked else op
        always = block != "entry" and block not in with_full
        if isinstance(op, tile.Mask):
            where = (
                simplify_condition(op.where, own, loop, reals, loaded, moving) if block not in too_long else op.where
            )
            if where == sympy.true:
                unmasked[op.name] = op.value
                return []
            used = {str(s) for s in where.free_symbols}
            uses = tuple(u for u in op.uses if u[0] in used)
            return [replace(op, where=where, uses=uses, when="always" if always else op.when)]
        if isinstance(op, tile.Load) and always:
            return [replace(op, check=tuple((axis, "always") for axis, _ in op.check))]
        if isinstance(op, tile.SoftmaxStep) and always:
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
    """Return the conjunction without parts that the others imply for valid rows. Integer comparisons are solved for the
    loop's index.

    reals: names of values that are not integers.
    loaded: names of loaded values, which may be the least or greatest integer.
    moving: names of values that change along the loop's axis.
    """
    given = conjuncts(where)
    fixed = [p for p in given if mentions(p, reals)]
    parts = [p for p in given if p not in fixed]
    kept = list(parts)
    for part in parts:
        others = [p for p in kept if p is not part]
        if any(implies(p, part, own, loop) for p in others):
            kept = others
    solved = [_solved(p, own, loop, loaded) for p in kept]
    return sympy.And(*fixed, *_one_bound_a_side(solved, symbol(f"{loop}_idx"), loaded, moving))


def _solved(p: Bool, own: str, loop: str, loaded: frozenset[str]) -> Bool:
    if isinstance(p, (sympy.And, sympy.Or)):
        # Vectors along the keys would need registers in addition to dK and dV. A sum with loaded data may overflow.
        return (
            p if own != "q" or mentions(p, loaded) else p.func(*(_solved(part, own, loop, loaded) for part in p.args))
        )
    linear = linear_parts(p, own, loop)
    if linear is None or linear[1] not in (1, -1):
        return p
    a, c, rest = linear
    bound = -c * (a * symbol(f"{own}_idx") + rest)
    index, strict = symbol(f"{loop}_idx"), isinstance(p, (sympy.Lt, sympy.Gt))
    if c == 1:  # index <= bound; written with < if that drops a constant
        return index < bound + 1 if _simpler(bound + 1, bound, strict) else index <= bound
    return index > bound - 1 if _simpler(bound - 1, bound, strict) else index >= bound


def _simpler(a: sympy.Expr, b: sympy.Expr, even: bool) -> bool:
    """True if `a` has fewer terms than `b`; if both have equally many, `even`."""
    terms = len(sympy.Add.make_args(b)) - len(sympy.Add.make_args(a))
    return terms > 0 or (terms == 0 and even)


def _one_bound_a_side(
    parts: list[Bool], index: sympy.Symbol, loaded: frozenset[str], moving: frozenset[str]
) -> list[Bool]:
    """Return the parts with the bounds of the index merged into at most one upper and one lower bound.

    Only bounds that are plain sums and invariant along the loop are merged. Loaded data is compared unchanged, because
    adding or subtracting one wraps at the least or greatest integer.
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
    """True if an expression is a sum of integers with factors 1 or -1. Others may need 64 bits, and so would the
    comparison of every score."""
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(e) if not term.is_Integer]
    return all(abs(factor) == 1 and term.is_Symbol for factor, term in terms)
