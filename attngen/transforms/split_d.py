"""split-d: programs may share the columns of a wide sum, so that each holds a part of it.

before:  kernel @fwd grid(q in cdiv(Nq, BLOCK_Q), h in Hq, b in B)
         %v = load %V[b, h, kv, d_v] check(kv if partial) : T[BLOCK_KV, D_V] @?
         %acc_next = dot %p %v over(BLOCK_KV) acc(%rescaled) : f32[BLOCK_Q, D_V] @?
         store %O[b, h, q, d_v] %o check(q)
         store %LSE[b, h, q] %lse check(q)
after:   kernel @fwd grid(q in cdiv(Nq, BLOCK_Q), own_v in cdiv(D_V, OWN_V), h in Hq, b in B)
         %v = load %V[b, h, kv, own_v] check(kv if partial) : T[BLOCK_KV, OWN_V] @?
         %acc_next = dot %p %v over(BLOCK_KV) acc(%rescaled) : f32[BLOCK_Q, OWN_V] @?
         store %O[b, h, q, own_v] %o check(q)
         store %LSE[b, h, q] %lse check(q) first_along(own_v)

A sum of more than WIDEST_SUM columns in fp32 takes so many registers that tiles would be small, or spill. OWN_V columns
of it are a program's own; a row of the schedule says how many these are, all or a part (select-tiles). Each program
computes all scores. What is the same for all is stored by the first one alone.

A tile that products also read as a whole, as keys in dQ = dS K, stays; beside it stand the program's columns of it:

         %k = load %K[b, h, kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @?
         %k_own = load %K[b, h, kv, own_qk] check(kv if partial) columns_of(%k) : T[BLOCK_KV, OWN_QK] @?
         %dq_next = dot %ds %k_own over(BLOCK_KV) acc(%dq) : f32[BLOCK_Q, OWN_QK] @?

Of a tile that is taken beside a sum element by element, as forward mode takes the output, a program loads its own
columns too.

Kernels that read a cache stay as they are, and so do those of latents: tiles of few queries leave room for all columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy

from attngen.heuristics import WIDEST_SUM
from attngen.ir.expr import cdiv, symbol
from attngen.ir.graph import GridAxis, Kernel, Module
from attngen.ir.ops import COLUMN_DIM, OWN, WHOLE, Access, Arg, Dot, Init, Load, Map, Op, Scatter, Store, Type
from attngen.tiles.sizes import tile_width
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SplitD(Pass):
    name: ClassVar[str] = "split-d"
    phase: ClassVar[str] = "logical"

    def run(self, module: Module) -> Module:
        return module if module.rope else module.map_kernels(lambda kernel: _shared(module, kernel))


def _shared(module: Module, kernel: Kernel) -> Kernel:
    """The kernel with an axis of columns, if it holds a sum that is wide, and no other one of columns."""
    sums = {op.type.dims[1] for op in kernel.ops() if isinstance(op, Init) and len(op.type.dims) == 2}
    wide = [own for own, whole in WHOLE.items() if whole in sums and tile_width(module.widths[whole]) > WIDEST_SUM]
    if len(sums) != 1 or not wide or not kernel.dots or kernel.reads_cache or kernel.walks or kernel.adds:
        return kernel
    (own,) = wide
    axis = next(letter for letter, dim in OWN.items() if dim == own)
    return _Columns(kernel, axis, module.widths[WHOLE[own]]).shared()


class _Columns:
    """One kernel, and the letters and dimensions of all columns of its sum, and of those that a program has."""

    def __init__(self, kernel: Kernel, axis: str, width: int) -> None:
        self.kernel, self.axis, self.own = kernel, axis, OWN[axis]
        self.whole = WHOLE[self.own]
        self.letter = next(letter for letter, dim in COLUMN_DIM.items() if dim == self.whole)
        self.uneven = width != tile_width(width)  # then the last program may have fewer columns
        summed = [op for op in kernel.dots if self.whole in op.type.dims]
        operands = {op.b for op in summed}
        self.both = operands & {
            ref for op in kernel.ops() if op not in summed for ref in op.operands()
        }  # that others read as a whole
        self.loaded = operands | set(self._beside_sums())

    def _beside_sums(self) -> Iterator[str]:
        """Loaded tiles that a map takes beside a sum, element by element, as forward mode takes the output."""
        loaded = {op.name for op in self.kernel.ops() if isinstance(op, Load) and self.whole in op.type.dims}
        for op in self.kernel.ops():
            used = {ref for _, ref in op.uses} if isinstance(op, Map) and self.whole in op.type.dims else set()
            if used - loaded and any(self.whole in self.kernel.type_of(ref).dims for ref in used - loaded):
                yield from used & loaded

    def shared(self) -> Kernel:
        first, *rest = self.kernel.grid
        axis = GridAxis(self.axis, cdiv(symbol(self.whole), symbol(self.own)))
        about = f"{self.kernel.about.rstrip('.')}; {self.own} columns each." if self.kernel.about else ""
        made = replace(self.kernel, grid=(first, axis, *rest), about=about)
        return made.rewrite(lambda _, op: self._change(op))

    def _change(self, op: Op) -> list[Op]:
        changed: Any = op
        if isinstance(op, Load) and op.name in self.loaded:
            part = self._access(replace(op, type=self._type(op.type)))
            return [op, replace(part, name=f"{op.name}_own", columns_of=op.name)] if op.name in self.both else [part]
        if isinstance(op, Store):
            return [
                self._access(op)
                if self.whole in self.kernel.type_of(op.value).dims
                else replace(op, first_along=self.axis)
            ]
        if isinstance(op, Scatter):
            return [replace(op, where=sympy.And(op.where, symbol(f"{self.axis}_start") < 1))]
        of_tensor = isinstance(op, Load) or (isinstance(op, Arg) and op.role != "carry")
        if hasattr(op, "type") and not of_tensor:
            changed = replace(changed, type=self._type(changed.type))
        if isinstance(op, Dot) and op.b in self.both and self.whole in op.type.dims:
            changed = replace(changed, b=f"{op.b}_own")
        return [changed]

    def _type(self, type_: Type) -> Type:
        return replace(type_, dims=tuple(self.own if dim == self.whole else dim for dim in type_.dims))

    def _access(self, op: Any) -> Any:
        """An access to the program's columns, which checks them where they may pass the end."""
        field = "dst" if isinstance(op, Store) else "src"
        at: Access = getattr(op, field)
        index = tuple(symbol(self.axis) if e == symbol(self.letter) else e for e in at.index)
        check = (*op.check, (self.axis, "always")) if self.uneven else op.check
        return replace(op, **{field: replace(at, index=index)}, check=check)
