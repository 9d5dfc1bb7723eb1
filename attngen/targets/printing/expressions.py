"""Names the Python variables of a kernel's values, and prints its expressions."""

from __future__ import annotations

from typing import Any

import sympy

from attngen.ir import AXIS_DIM, GROUPED, PADDED, Expr, Kernel, Module, Op, tile
from attngen.ir.behaviour import Handlers
from attngen.ir.names import ROW_AXES
from attngen.targets.printing.printer import to_triton


class ExpressionContext(Handlers):
    """Python variables of one kernel's values, and the source of expressions over them."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module, self.kernel = module, kernel
        self.variables = self._variables()

    def _variables(self) -> dict[str, str]:
        """IR value -> Python variable."""
        names: dict[str, str] = {}
        for op in self.kernel.ops():
            for f in op.results():
                halved = f"{op.name}_{f}" if isinstance(op, tile.Deinterleave) else f
                names[f"{op.name}.{f}" if f else op.name] = f"{f}_new" if f in ("m", "l") else (halved or op.name)
        for loop in self.kernel.loops:  # outermost first: entry comes before bodies
            for f, start in loop.carry:
                shared = f if isinstance(self.kernel.op(start), tile.Init) else names[start]
                for ref in (start, f, f"{loop.name}.{f}"):
                    names[ref] = shared
        for op in self.kernel.ops():
            if isinstance(op, tile.Mask):  # a loop that does not apply it sees the value unchanged
                names[op.name] = names[op.value]
        for block in self.kernel.blocks:
            for op in block.ops:
                if isinstance(op, tile.Yield):
                    self._reuse_carried(names, op, block.ops)
        return names

    def _reuse_carried(self, names: dict[str, str], yielded: tile.Yield, ops: tuple[Op, ...]) -> None:
        """Let a yielded value take the carried variable if nothing reads the old value once the new one is made."""
        position = {op.name: i for i, op in enumerate(ops)}
        for f, ref in (pair for pair in yielded.values if pair[0] in names):
            made = position.get(ref.split(".")[0], -1)
            old = {r for r, n in names.items() if n == names[f]}
            later = [op for op in ops[made + 1 :] if op is not yielded and old & set(op.operands())]
            later += [
                op for op in self.kernel.ops() if op.name not in position and f in op.operands()
            ]  # in loops inside the body
            defined = self.kernel.op(ref)
            if not later and not isinstance(defined, (tile.Loop, tile.SoftmaxStep)):
                names[ref] = names[f]

    def var(self, ref: str) -> str:
        return self.variables[ref]

    def _lookup(self, uses: dict[str, str], tile: tuple[str, ...], fp32: bool = False) -> Any:
        def look(name: str) -> tuple[str, tuple[str, ...]]:
            if name in uses:
                type_ = self.kernel.type_of(uses[name])
                text = self.var(uses[name])
                if tile and GROUPED.get(tile[-1]) in type_.dims:
                    return f"_of_columns({text}, {tile[-1]})", tile
                return (f"{text}.to(tl.float32)" if fp32 and type_.dtype == "T" else text), type_.dims
            for axis, dim in AXIS_DIM.items():
                if name == f"{axis}_idx":
                    return name, (dim,)
            return self.variables.get(name, name), ()

        return look

    def scalar(self, e: Any) -> str:
        return self._text(e, {})

    def _text(self, e: Any, uses: dict[str, str], tile: tuple[str, ...] = (), fp32: bool = False) -> str:
        """The source of an expression; its symbols become integers where the IR's types say so."""
        refs = {s: uses.get(str(s), str(s)) for s in e.free_symbols}
        whole = {
            s: sympy.Symbol(str(s), integer=True)
            for s, ref in refs.items()
            if s.is_integer is None and self._is_integer(ref)
        }
        return to_triton(e.xreplace(whole), self._lookup(uses, tile, fp32), tile)

    def _is_integer(self, ref: str) -> bool:
        return ref.split(".")[0] in self.kernel.graph and self.kernel.type_of(ref).dtype == "i32"

    def _width(self, axis: str) -> str:
        dim = AXIS_DIM[axis]
        size = self.module.widths[dim]
        return PADDED[dim] if size & (size - 1) else dim

    def _spread(self, symbols: Any, uses: dict[str, str], tile: tuple[str, ...]) -> str | None:
        """The index that broadcasts a row or column over a tile: None for a scalar, empty if no index is needed."""
        names = {str(s) for s in symbols}
        present = {AXIS_DIM[a] for a in ROW_AXES if f"{a}_idx" in names}
        present |= {d for n in names & uses.keys() for d in self.kernel.type_of(uses[n]).dims}
        if not present:
            return None
        return "" if len(tile) == len(present) else "[" + ", ".join(":" if d in present else "None" for d in tile) + "]"

    def _constant(self, e: Expr) -> str:
        return "0.0" if e == 0 else self.scalar(e)
