"""inline-scores: fold a scale of the scores into the softmax.

before:  %score = map expr(qk_scale*s) score(yes)
         %masked = mask %score
         %soft = softmax_step %masked
after:   %masked = mask %s
         %soft = softmax_step %masked scale(%qk_scale)

A modifier that only scales by a positive number commutes with max and mask, so it is folded into the exponent, where
it costs one fused multiply-add instead of a separate multiplication. Any other modifier stays a separate map.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir import Kernel, Module, Op, only, symbol, tile
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class InlineScores(Pass):
    name: ClassVar[str] = "inline-scores"
    phase: ClassVar[str] = "logical"

    def run(self, module: Module) -> Module:
        return module.map_kernels(_inline)


def _inline(kernel: Kernel) -> Kernel:
    for op in list(kernel.ops()):
        if isinstance(op, tile.Map) and op.score:
            kernel = _fold(kernel, op) if _scaling(kernel, op) else _keep(kernel, op)
    return kernel


def _scaling(kernel: Kernel, op: tile.Map) -> tuple[str, str] | None:
    """Return (score value, scale value) if the modifier is their product and the scale is a scalar; else None."""
    if len(op.uses) != 2 or op.expr != symbol(op.uses[0][0]) * symbol(op.uses[1][0]):
        return None
    scalars = [ref for _, ref in op.uses if not kernel.type_of(ref).dims]
    tiles = [ref for _, ref in op.uses if kernel.type_of(ref).dims]
    return (tiles[0], scalars[0]) if len(scalars) == len(tiles) == 1 else None


def _keep(kernel: Kernel, op: tile.Map) -> Kernel:
    return kernel.rewrite(lambda _, o: [replace(op, score=False) if o is op else o])


def _fold(kernel: Kernel, score: tile.Map) -> Kernel:
    raw, scale = _scaling(kernel, score) or ("", "")
    scaled = {score.name}  # values that are now in units of raw scores
    for op in kernel.ops():
        if isinstance(op, tile.Mask) and op.value in scaled:
            scaled.add(op.name)
    folded = [o for o in only(kernel.ops(), tile.SoftmaxStep) if o.s in scaled]
    steps = {o.name for o in folded}
    maxima = {f"{o.name}.{f}" for o in kernel.loops for f, _ in o.carry if steps and f == "m"}
    maxima |= {ref for o in folded for ref in (o.m, f"{o.name}.m")}

    def change(_: str, op: Op) -> list[Op]:
        if isinstance(op, tile.Mask) and op.value == score.name:
            return [replace(op, value=raw)]
        if isinstance(op, tile.SoftmaxStep) and op.name in steps:
            return [replace(op.with_operands({score.name: raw}), scale=scale)]
        if isinstance(op, tile.Map) and op is not score:
            used = [s for s, ref in op.uses if ref in scaled | maxima]
            if used:
                factor = scale.split(".")[0]
                expr = op.expr.subs({symbol(s): symbol(s) * symbol(factor) for s in used})
                renamed = op.with_operands({score.name: raw})
                return [replace(renamed, expr=expr, uses=(*renamed.uses, (factor, scale)))]
        return [op]

    return kernel.rewrite(change)
