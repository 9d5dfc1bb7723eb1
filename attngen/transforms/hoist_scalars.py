"""hoist-scalars: compute expressions of scalars once, before the loop whose body uses them.

before:  @step:   %score = map expr(30.0*LOG2E*t1) ...
after:   @entry:  %score_scale = map expr(30.0*LOG2E) : f32[]
         @step:   %score = map expr(score_scale*t1) ...

The scalar factors of a product, or the scalar terms of a sum, become one scalar. A sign does not count as a factor.
Scalars that depend on the head stay in the loop over heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
from sympy.logic.boolalg import Boolean

from attngen.ir import Expr, Kernel, Module, Op, Type, symbol, tile
from attngen.transforms.base import Pass

CONSTANTS = {"LOG2E", "LN2"}


@dataclass(frozen=True)
class HoistScalars(Pass):
    name: ClassVar[str] = "hoist-scalars"
    phase: ClassVar[str] = "logical"

    def run(self, module: Module) -> Module:
        return module.map_kernels(lambda k: _Hoisting(k).kernel())


class _Hoisting:
    def __init__(self, source: Kernel) -> None:
        self.source = source
        self.made: dict[tuple[str, Expr], str] = {}  # block and expression -> name
        self.homes = {loop.body: (source.graph.nodes[loop.name]["block"], loop.var) for loop in source.loops}

    def kernel(self) -> Kernel:
        def change(block: str, op: Op) -> list[Op]:
            if not isinstance(op, tile.Map) or block not in self.homes or not op.type.dims:
                return [op]
            expr = self._hoisted(op.expr, op, block)
            names = {str(s) for s in expr.free_symbols}
            new = tuple((n, n) for n in self.made.values() if n in names)
            return [replace(op, expr=expr, uses=(*(u for u in op.uses if u[0] in names), *new))]

        changed = self.source.rewrite(change)

        def put(block: str, op: Op) -> Iterator[Op]:
            if isinstance(op, tile.Loop):
                yield from (m for home, m in self._maps() if home == block)
            yield op

        return changed.rewrite(put) if self.made else self.source

    def _maps(self) -> Iterator[tuple[str, tile.Map]]:
        for (home, e), name in self.made.items():
            uses = tuple((str(s), str(s)) for s in sorted(e.free_symbols, key=str) if str(s) in self.source.graph)
            yield home, tile.Map(name, e, uses, Type("f32"))

    def _hoisted(self, e: Any, op: tile.Map, block: str) -> Any:
        if not e.args or isinstance(e, Boolean):
            return e
        if e.is_Add or e.is_Mul:
            scalars = [a for a in e.args if self._home(a, op, block) is not None]
            rest = [self._hoisted(a, op, block) for a in e.args if a not in scalars]
            group = e.func(*scalars)
            if (
                rest
                and len([a for a in scalars if a != -1]) > 1
                and group.free_symbols
                and not self._is_integer(group, op)
            ):
                return e.func(self._named(group, "scale" if e.is_Mul else "shift", op, block), *rest)
            return e.func(*scalars, *rest)
        return e.func(*(self._hoisted(a, op, block) for a in e.args))

    def _is_integer(self, e: Any, op: tile.Map) -> bool:
        refs = {s: dict(op.uses).get(str(s), str(s)) for s in e.free_symbols if not s.is_integer}
        of_integers = [
            s for s, r in refs.items() if r.split(".")[0] in self.source.graph and self.source.type_of(r).dtype == "i32"
        ]
        return e.xreplace({s: sympy.Symbol(str(s), integer=True) for s in of_integers}).is_integer is True

    def _home(self, e: Any, op: tile.Map, block: str) -> str | None:
        """Return the outermost block that can compute the expression; None if it reads more than scalars, or if no
        outer block can."""
        names = {str(s) for s in e.free_symbols} - CONSTANTS
        nodes = self.source.graph.nodes
        refs = [dict(op.uses).get(n, n) for n in names]
        values = [ref for ref in refs if ref.split(".")[0] in nodes]
        if names & {"q_idx", "kv_idx"} or any(self.source.type_of(ref).dims for ref in values):
            return None
        home = block
        while home in self.homes:
            outer, var = self.homes[home]
            if names & {var, f"{var}_start"} or any(nodes[ref.split(".")[0]]["block"] == home for ref in values):
                break
            home = outer
        return home if home != block else None

    def _named(self, e: Expr, word: str, op: tile.Map, block: str) -> Expr:
        key = (self._home(e, op, block) or "entry", e)
        if key not in self.made:
            stem = f"{op.name}_{word}"
            taken = {*self.made.values(), *self.source.graph}
            self.made[key] = next(n for n in (stem, *(f"{stem}{i}" for i in range(2, 99))) if n not in taken)
        return symbol(self.made[key])
