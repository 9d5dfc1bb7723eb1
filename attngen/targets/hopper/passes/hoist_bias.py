"""hoist-bias: split a bias that is linear in the distance (ALiBi) into a term per column, the same in all tiles, and a
term per row and tile, which the softmax adds (`shift`).

A distance is an integer that changes by one from key to key. Computed per score, it takes a conversion per column of a
tile and three operations per score; split, it takes one operation per column and one per score.

before:  %score = map expr(s*score_scale + score_scale2*abs(Nk - Nq - kv_idx + q_idx)) ... : f32[BLOCK_Q, BLOCK_KV]
         %masked = mask %score where(kv_idx <= Nk - Nq + q_idx)
         %soft = softmax_step %masked m(%m)
after:   %score_step = map expr(-score_scale2) uses(score_scale2=%score_scale2) : f32[]          # before the loop
         %score_row = map expr(score_scale2*(Nk - Nq - kv_start + q_idx)) ... : f32[BLOCK_Q]
         %score_column = scaled_iota %score_step : f32[BLOCK_KV]
         %score = map expr(s*score_scale + score_column) ... : f32[BLOCK_Q, BLOCK_KV]
         %masked = mask %score where(kv_idx <= Nk - Nq + q_idx)
         %soft = softmax_step %masked m(%m) shift(%score_row)

Here score_scale2 is -log2(e) times the head's slope. The step is computed before the loop, and so are the terms per
column where registers hold them (`kept` of scaled_iota); the term per row is computed for each tile.

Both terms count keys from the tile's first one, kv_start. Weights matter mostly for keys near the query: in their tiles
both terms are small, and so are their rounding errors. An absolute value is dropped if the mask shows only pairs for
which its argument has one sign.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy

from attngen.ir import Expr, Kernel, Module, Op, Type, conjuncts, only, pipe, symbol, tile
from attngen.targets.hopper.configs.families import with_forward
from attngen.targets.hopper.configs.forward_schedule import keeps_column_bias
from attngen.tiles.intervals import implies
from attngen.transforms.base import Pass

KEY, QUERY, START = symbol("kv_idx"), symbol("q_idx"), symbol("kv_start")


@dataclass(frozen=True)
class HoistBias(Pass):
    name: ClassVar[str] = "hoist-bias"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        return with_forward(module, lambda kernel: _hoist(kernel, keeps_column_bias(module, kernel)))


def _hoist(kernel: Kernel, keeps_columns: bool) -> Kernel:
    """keeps_columns: whether registers hold the number per column through the loop."""
    for softmax in (op for op in only(kernel.ops(), tile.SoftmaxStep) if not op.scale and not op.shift):
        masks, score = _masks_of(kernel, softmax.s)
        found = (
            _find_distance(kernel, score, masks)
            if isinstance(score, tile.Map) and _is_read_once(kernel, score, masks)
            else None
        )
        if found and isinstance(score, tile.Map):
            return _split(kernel, score, softmax, keeps_columns, *found)
    return kernel


def _masks_of(kernel: Kernel, ref: str) -> tuple[list[tile.Mask], Op]:
    """The masks that were applied to a value, and the op that computes it."""
    masks = []
    while isinstance(op := kernel.op(ref), tile.Mask):
        masks.append(op)
        ref = op.value
    return masks, op


def _is_read_once(kernel: Kernel, score: tile.Map, masks: list[tile.Mask]) -> bool:
    """True if the score and the masked scores have one reader each: the next mask or the softmax."""
    return all(kernel.graph.out_degree(op.name) == 1 for op in (score, *masks))


def _find_distance(kernel: Kernel, score: tile.Map, masks: list[tile.Mask]) -> tuple[Expr, Expr, Expr] | None:
    """Return (a term of the score, its factor, the distance) if a term is a scalar factor times a distance, an integer
    that changes by one from key to key."""
    conditions = [part for mask in masks for part in conjuncts(mask.where)]
    for term in sympy.Add.make_args(score.expr):
        factors = sympy.Mul.make_args(term)
        of_key = [f for f in factors if f.has(KEY)]
        rest = sympy.Mul(*(f for f in factors if f not in of_key))
        scalar = all(not kernel.type_of(ref).dims for name, ref in score.uses if symbol(name) in rest.free_symbols)
        if len(of_key) != 1 or not scalar or rest.has(QUERY):
            continue
        distance = _as_linear(of_key[0], conditions)
        if (
            distance is not None
            and abs(sympy.expand(distance).coeff(KEY)) == 1
            and not (distance - distance.coeff(KEY) * KEY).has(KEY)
        ):
            return term, rest, distance
    return None


def _as_linear(e: Any, conditions: list[Any]) -> Any:
    """Return an expression if it is a linear combination of integers, q_idx among them, else None. An absolute value is
    dropped if its argument has one sign wherever the mask's conditions hold."""
    if isinstance(e, sympy.Abs):
        inner = e.args[0]
        below = any(implies(part, inner <= 0, "q", "kv") for part in conditions)
        above = any(implies(part, inner >= 0, "q", "kv") for part in conditions)
        e = inner if above else sympy.expand(-inner) if below else None
    is_sum = e is not None and (e.is_Add or e == KEY) and all(s.is_integer for s in e.free_symbols) and e.has(QUERY)
    plain = is_sum and all(
        t.is_Symbol or t.is_Integer or (t.is_Mul and len(t.free_symbols) == 1) for t in sympy.Add.make_args(e)
    )
    return e if plain else None


def _split(
    kernel: Kernel,
    score: tile.Map,
    softmax: tile.SoftmaxStep,
    keeps_columns: bool,
    term: Expr,
    factor: Expr,
    distance: Expr,
) -> Kernel:
    """Replace a term of the score, factor * distance, by a number per row and a number per column."""
    sign = sympy.expand(distance).coeff(KEY)
    row = sympy.expand(distance - sign * (KEY - START))
    names = {name: f"{score.name}_{name}" for name in ("row", "column", "step")}
    body = kernel.graph.nodes[score.name]["block"]
    uses = dict(score.uses)

    def uses_of(e: Expr, more: tuple[tuple[str, str], ...] = ()) -> tuple[tuple[str, str], ...]:
        return (*((name, ref) for name, ref in uses.items() if name in {str(s) for s in e.free_symbols}), *more)

    remaining = score.expr - term
    step = tile.Map(names["step"], sign * factor, uses_of(factor), Type("f32", (), "reg"))
    split: list[Op] = [
        tile.Map(names["row"], factor * row, uses_of(factor * row), Type("f32", ("BLOCK_Q",), "reg")),
        pipe.ScaledIota(names["column"], names["step"], Type("f32", ("BLOCK_KV",), "reg"), keeps_columns),
        replace(
            score,
            expr=remaining + symbol(names["column"]),
            uses=uses_of(remaining, ((names["column"], names["column"]),)),
        ),
    ]

    first = next(op for op in only(kernel.ops(), tile.Loop) if op.body == body)

    def change(_: str, op: Op) -> list[Op]:
        if op is score:
            return split
        if op is first:
            return [step, op]
        return [replace(softmax, shift=names["row"]) if op is softmax else op]

    return kernel.rewrite(change)
