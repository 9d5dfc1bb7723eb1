"""exp2-softmax: rewrite exponentials, logarithms, tanh and sigmoid with exp2 and log2, which the hardware has.

before:  %t1 = map expr(tanh(s*scale/30.0)) ...
after:   %t1 = map expr(1 - 2/(exp2(2*LOG2E*s*scale/30.0) + 1)) ...

No form overflows into NaN: where exp2 returns infinity or zero, the form returns the function's limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy

from attngen.ir import (
    TO_INTEGER,
    Access,
    Fact,
    Module,
    Op,
    exp2,
    launch,
    log,
    log2,
    parse,
    sigmoid,
    symbol,
    tile,
    to_text,
)
from attngen.transforms.base import Pass

LOG2E, LN2 = symbol("LOG2E"), symbol("LN2")
NUMBERS = {LOG2E: sympy.Float(1 / math.log(2)), LN2: sympy.Float(math.log(2))}


@dataclass(frozen=True)
class Exp2Softmax(Pass):
    name: ClassVar[str] = "exp2-softmax"
    phase: ClassVar[str] = "logical"

    def run(self, module: Module) -> Module:
        def change(_: str, op: Op) -> list[Op]:
            if isinstance(op, tile.Mask):
                known = tuple(Fact(*map(in_base_two, fact)) for fact in op.known)
                return [replace(op, where=in_base_two(op.where), known=known)]
            if isinstance(op, tile.Gather):
                return [replace(op, src=_places(op.src), where=in_base_two(op.where))]
            if isinstance(op, tile.Scatter):
                return [replace(op, dst=_places(op.dst), where=in_base_two(op.where))]
            return [replace(op, expr=in_base_two(op.expr))] if isinstance(op, tile.Map) else [op]

        gradients = tuple(replace(x, index=tuple(map(_on_the_host, x.index))) for x in module.input_gradients)
        hosts = tuple(host.rewrite(_sums) for host in module.hosts)
        return replace(module, input_gradients=gradients, hosts=hosts).map_kernels(lambda k: k.rewrite(change))


def _sums(op: Op) -> list[Op]:
    """Rewrite the places of a host program's sum by distance without natural logarithms."""
    return [replace(op, at=tuple(map(_on_the_host, op.at)))] if isinstance(op, launch.SumDistances) else [op]


def _on_the_host(place: str) -> str:
    return to_text(in_base_two(parse(place)).xreplace(NUMBERS))


def _places(access: Access) -> Access:
    return replace(access, index=tuple(map(in_base_two, access.index)))


def in_base_two(e: Any) -> Any:
    """Return the expression, written with exp2 and log2."""
    if not e.args or not e.has(sympy.exp, log, sympy.tanh, sigmoid, sympy.Pow):
        return e
    args = [in_base_two(a) for a in e.args]
    if isinstance(e, TO_INTEGER):
        # Constants are folded into one number: 2 * LN2 * log2(x), for example, would be below its exact value.
        return e.func(args[0].xreplace(NUMBERS))
    if isinstance(e, sympy.exp):
        return exp2(LOG2E * args[0])
    if isinstance(e, log):
        return LN2 * log2(args[0])
    if isinstance(e, sympy.tanh):
        # Exact to the rounding of 1. Scores near 0 lose digits there, which do not change the softmax.
        return 1 - 2 / (1 + exp2(2 * LOG2E * args[0]))
    if isinstance(e, sigmoid):
        return 1 / (1 + exp2(-LOG2E * args[0]))
    if e.is_Pow and e.base.is_number and not e.exp.is_number:
        return exp2(sympy.Float(sympy.log(e.base, 2)) * args[1]) if e.base != 2 else exp2(args[1])
    return e.func(*args)
