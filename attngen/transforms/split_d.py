"""split-d: split the head_dim of a wide accumulator across programs, so that each program holds a slice of it.

before:  kernel @fwd grid(q in cdiv(Nq, BLOCK_Q), h in Hq, b in B)
         %v = load %V[b, h, kv, d_v] check(kv if partial) : T[BLOCK_KV, D_V] @?
         %acc_next = dot %p %v over(BLOCK_KV) acc(%rescaled) : f32[BLOCK_Q, D_V] @?
         store %O[b, h, q, d_v] %o check(q)
         store %LSE[b, h, q] %lse check(q)
after:   kernel @fwd grid(q in cdiv(Nq, BLOCK_Q), split_V in cdiv(D_V, D_V_split), h in Hq, b in B)
         %v = load %V[b, h, kv, split_V] check(kv if partial) : T[BLOCK_KV, D_V_split] @?
         %acc_next = dot %p %v over(BLOCK_KV) acc(%rescaled) : f32[BLOCK_Q, D_V_split] @?
         store %O[b, h, q, split_V] %o check(q)
         store %LSE[b, h, q] %lse check(q) first_along(split_V)

An fp32 accumulator wider than WIDEST_ACC takes so many registers that tiles would be small, or spill. Each program has
D_V_split columns of it; the config says how many these are, all or a part (select-tiles). Each program computes all
scores. Results that are the same for all of them are stored only by the first program along the split axis.

A tile that another op reads whole, such as the keys in dQ = dS K, stays, and the program's slice is loaded in addition:

         %k = load %K[b, h, kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @?
         %k_own = load %K[b, h, kv, split_QK] check(kv if partial) columns_of(%k) : T[BLOCK_KV, D_QK_split] @?
         %dq_next = dot %ds %k_own over(BLOCK_KV) acc(%dq) : f32[BLOCK_Q, D_QK_split] @?

A program also loads only its slice of a tile that is combined elementwise with the accumulator, such as the output in
forward mode.

Kernels that read a KV cache and kernels of latents are not split: with tiles of few queries the whole head_dim fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy

from attngen.heuristics import WIDEST_ACC
from attngen.ir import COLUMN_DIM, SPLIT_DIM, WHOLE, Access, GridAxis, Kernel, Module, Op, Type, only, tile
from attngen.ir.expr import cdiv, symbol
from attngen.tiles.sizes import tile_width
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class SplitD(Pass):
    name: ClassVar[str] = "split-d"
    phase: ClassVar[str] = "logical"

    def run(self, module: Module) -> Module:
        return module if module.rope else module.map_kernels(lambda kernel: _shared(module, kernel))


def _shared(module: Module, kernel: Kernel) -> Kernel:
    """Return the kernel with a grid axis over head_dim if it has one width of accumulators and this is too wide."""
    sums = {op.type.dims[1] for op in only(kernel.ops(), tile.Init) if len(op.type.dims) == 2}
    wide = [own for own, whole in WHOLE.items() if whole in sums and tile_width(module.widths[whole]) > WIDEST_ACC]
    if (
        len(sums) != 1
        or not wide
        or not kernel.traits.dots
        or kernel.traits.reads_cache
        or kernel.traits.visits_all_tiles
        or kernel.traits.adds_in_order
    ):
        return kernel
    (own,) = wide
    axis = next(letter for letter, dim in SPLIT_DIM.items() if dim == own)
    return _HeadDimSplit(kernel, axis, module.widths[WHOLE[own]]).kernel_with_axis()


class _HeadDimSplit:
    """One kernel, with the axis letters and dimensions of its accumulator's whole head_dim and of a program's slice."""

    def __init__(self, kernel: Kernel, axis: str, width: int) -> None:
        self.kernel, self.axis, self.own = kernel, axis, SPLIT_DIM[axis]
        self.whole = WHOLE[self.own]
        self.letter = next(letter for letter, dim in COLUMN_DIM.items() if dim == self.whole)
        self.uneven = width != tile_width(width)  # then the last program's slice may be narrower
        summed = [op for op in kernel.traits.dots if self.whole in op.type.dims]
        operands = {op.b for op in summed}
        self.both = operands & {
            ref for op in kernel.ops() if op not in summed for ref in op.operands()
        }  # read whole by other ops
        self.loaded = operands | set(self._elementwise_loads())

    def _elementwise_loads(self) -> Iterator[str]:
        """Yield loaded tiles that a map combines elementwise with an accumulator, such as the output in forward
        mode."""
        loaded = {op.name for op in only(self.kernel.ops(), tile.Load) if self.whole in op.type.dims}
        for op in self.kernel.ops():
            used = {ref for _, ref in op.uses} if isinstance(op, tile.Map) and self.whole in op.type.dims else set()
            if used - loaded and any(self.whole in self.kernel.type_of(ref).dims for ref in used - loaded):
                yield from used & loaded

    def kernel_with_axis(self) -> Kernel:
        first, *rest = self.kernel.grid
        axis = GridAxis(self.axis, cdiv(symbol(self.whole), symbol(self.own)))
        about = f"{self.kernel.about.rstrip('.')}; {self.own} columns each." if self.kernel.about else ""
        made = replace(self.kernel, grid=(first, axis, *rest), about=about)
        return made.rewrite(lambda _, op: self._change(op))

    def _change(self, op: Op) -> list[Op]:
        changed: Any = op
        if isinstance(op, tile.Load) and op.name in self.loaded:
            part = self._access(replace(op, type=self._type(op.type)))
            return [op, replace(part, name=f"{op.name}_own", columns_of=op.name)] if op.name in self.both else [part]
        if isinstance(op, tile.Store):
            return [
                self._access(op)
                if self.whole in self.kernel.type_of(op.value).dims
                else replace(op, first_along=self.axis)
            ]
        if isinstance(op, tile.Scatter):
            return [replace(op, where=sympy.And(op.where, symbol(f"{self.axis}_start") < 1))]
        of_tensor = isinstance(op, tile.Load) or (isinstance(op, tile.Arg) and op.role != "carry")
        if hasattr(op, "type") and not of_tensor:
            changed = replace(changed, type=self._type(changed.type))
        if isinstance(op, tile.Dot) and op.b in self.both and self.whole in op.type.dims:
            changed = replace(changed, b=f"{op.b}_own")
        return [changed]

    def _type(self, type_: Type) -> Type:
        return replace(type_, dims=tuple(self.own if dim == self.whole else dim for dim in type_.dims))

    def _access(self, op: Any) -> Any:
        """Return the access to the program's slice, with a bounds check if the slice may pass the end of head_dim."""
        field = "dst" if isinstance(op, tile.Store) else "src"
        at: Access = getattr(op, field)
        index = tuple(symbol(self.axis) if e == symbol(self.letter) else e for e in at.index)
        check = (*op.check, (self.axis, "always")) if self.uneven else op.check
        return replace(op, **{field: replace(at, index=index)}, check=check)
