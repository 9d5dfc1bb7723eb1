"""hoist-bias: what distances add to scores becomes a number for each column, and one for each row that the softmax
adds.

before:  %score = map expr(s*score_scale + score_scale2*abs(Nk - Nq - kv_idx + q_idx)) ... : f32[BLOCK_Q, BLOCK_KV]
         %masked = mask %score where(kv_idx <= Nk - Nq + q_idx)
         %soft = softmax_step %masked m(%m)
after:   %score_step = map expr(-score_scale2) uses(score_scale2=%score_scale2) : f32[]          # before the loop
         %score_row = map expr(score_scale2*(Nk - Nq - kv_start + q_idx)) ... : f32[BLOCK_Q]
         %score_column = scaled_iota %score_step : f32[BLOCK_KV]
         %score = map expr(s*score_scale + score_column) ... : f32[BLOCK_Q, BLOCK_KV]
         %masked = mask %score where(kv_idx <= Nk - Nq + q_idx)
         %soft = softmax_step %masked m(%m) shift(%score_row)

A distance is an integer that falls or rises by one from key to key. It takes a conversion for each column of a tile and
three operations for each score; parted, one operation for each column and one for each score. Positions count from the
tile's first key. Keys that matter are near, so both numbers are small there, and what rounding takes from them is too.

An absolute value goes if the mask shows only pairs for which its argument has one sign.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy

from attngen.ir.expr import Expr, conjuncts, symbol
from attngen.ir.graph import Kernel, Module
from attngen.ir.ops import Loop, Map, Mask, Op, SoftmaxStep, Type
from attngen.ir.pipe import ScaledIota
from attngen.targets.hopper.configs.common import keeps_columns
from attngen.targets.hopper.configs.families import with_forwards
from attngen.tiles.intervals import implies
from attngen.transforms.base import Pass

KEY, QUERY, START = symbol("kv_idx"), symbol("q_idx"), symbol("kv_start")


@dataclass(frozen=True)
class HoistBias(Pass):
    name: ClassVar[str] = "hoist-bias"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_forwards(module, lambda kernel: _shifted(kernel, keeps_columns(module, kernel)))


def _shifted(kernel: Kernel, kept: bool) -> Kernel:
    for softmax in (op for op in kernel.ops() if isinstance(op, SoftmaxStep) and not op.scale and not op.shift):
        masks, score = _masks_of(kernel, softmax.s)
        found = (
            _distance(kernel, score, masks) if isinstance(score, Map) and _is_read_once(kernel, score, masks) else None
        )
        if found and isinstance(score, Map):
            return _parted(kernel, score, softmax, kept, *found)
    return kernel


def _masks_of(kernel: Kernel, ref: str) -> tuple[list[Mask], Op]:
    """The masks that a value has passed, and what computes it."""
    masks = []
    while isinstance(op := kernel.op(ref), Mask):
        masks.append(op)
        ref = op.value
    return masks, op


def _is_read_once(kernel: Kernel, score: Map, masks: list[Mask]) -> bool:
    """Whether nothing reads the score, or what masks leave of it, but the next mask and the softmax."""
    return all(kernel.graph.out_degree(op.name) == 1 for op in (score, *masks))


def _distance(kernel: Kernel, score: Map, masks: list[Mask]) -> tuple[Expr, Expr, Expr] | None:
    """(a term of the score, its factor, the distance) where the term is a scalar number times an integer that
    changes by one a key."""
    shown = [part for mask in masks for part in conjuncts(mask.where)]
    for term in sympy.Add.make_args(score.expr):
        factors = sympy.Mul.make_args(term)
        placed = [f for f in factors if f.has(KEY)]
        rest = sympy.Mul(*(f for f in factors if f not in placed))
        scalar = all(not kernel.type_of(ref).dims for name, ref in score.uses if symbol(name) in rest.free_symbols)
        if len(placed) != 1 or not scalar or rest.has(QUERY):
            continue
        distance = _signed(placed[0], shown)
        if (
            distance is not None
            and abs(sympy.expand(distance).coeff(KEY)) == 1
            and not (distance - distance.coeff(KEY) * KEY).has(KEY)
        ):
            return term, rest, distance
    return None


def _signed(e: Any, shown: list[Any]) -> Any:
    """A sum of integers, without the absolute value if it has one sign where scores are shown; None where it is no
    such sum."""
    if isinstance(e, sympy.Abs):
        inner = e.args[0]
        below = any(implies(part, inner <= 0, "q", "kv") for part in shown)
        above = any(implies(part, inner >= 0, "q", "kv") for part in shown)
        e = inner if above else sympy.expand(-inner) if below else None
    whole = e is not None and (e.is_Add or e == KEY) and all(s.is_integer for s in e.free_symbols) and e.has(QUERY)
    plain = whole and all(
        t.is_Symbol or t.is_Integer or (t.is_Mul and len(t.free_symbols) == 1) for t in sympy.Add.make_args(e)
    )
    return e if plain else None


def _parted(
    kernel: Kernel, score: Map, softmax: SoftmaxStep, kept: bool, term: Expr, factor: Expr, distance: Expr
) -> Kernel:
    sign = sympy.expand(distance).coeff(KEY)
    row = sympy.expand(distance - sign * (KEY - START))
    names = {name: f"{score.name}_{name}" for name in ("row", "column", "step")}
    body = kernel.graph.nodes[score.name]["block"]
    uses = dict(score.uses)

    def reading(e: Expr, more: tuple[tuple[str, str], ...] = ()) -> tuple[tuple[str, str], ...]:
        return (*((name, ref) for name, ref in uses.items() if name in {str(s) for s in e.free_symbols}), *more)

    left = score.expr - term
    step = Map(names["step"], sign * factor, reading(factor), Type("f32", (), "reg"))
    numbers: list[Op] = [
        Map(names["row"], factor * row, reading(factor * row), Type("f32", ("BLOCK_Q",), "reg")),
        ScaledIota(names["column"], names["step"], Type("f32", ("BLOCK_KV",), "reg"), kept),
        replace(score, expr=left + symbol(names["column"]), uses=reading(left, ((names["column"], names["column"]),))),
    ]

    first = next(op for op in kernel.ops() if isinstance(op, Loop) and op.body == body)

    def change(_: str, op: Op) -> list[Op]:
        if op is score:
            return numbers
        if op is first:
            return [step, op]
        return [replace(softmax, shift=names["row"]) if op is softmax else op]

    return kernel.rewrite(change)
