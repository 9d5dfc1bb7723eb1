"""Variables of a warp-specialized kernel's tiles and of their pieces, in the kernel that lower-pipelines has made."""

from __future__ import annotations

from attngen.ir import Module, Op, Type, gl, only
from attngen.targets.hopper.lowering.counters import Counting
from attngen.targets.hopper.lowering.lowered import lowered
from attngen.targets.hopper.lowering.shapes import Shapes
from attngen.targets.hopper.printing.exchange_views import ExchangeContext
from attngen.targets.printing.context import KernelContext


class ShapeContext(ExchangeContext):
    """Shapes of one kernel's tiles, and the variables of their pieces."""

    def __init__(self, module: Module, name: str) -> None:
        self.source = next(kernel for kernel in module.warp_specialized if kernel.name == name)
        self.shapes, self.counting = Shapes(module, self.source), Counting(self.source)
        self.pipelines = self.shapes.pipelines
        self.own, self.loop = self.source.program_axis, self.source.loop_axis
        super().__init__(module, self.source)
        self.kernel = lowered(module, self.source)
        self.variables |= {op.name: "pieces" for op in only(self.kernel.ops(), gl.SmemReinterpret)}
        for op in self.kernel.ops():
            for field in op.results():
                ref = f"{op.name}.{field}" if field else op.name
                self.variables.setdefault(ref, ref.replace("_halves.", "_").replace(".", "_"))
        self.portable = KernelContext(module, module.kernel(self.source.stands_for))

    def _dims(self, dims: tuple[str, ...], each: bool = True) -> list[str]:
        return [*map(str, self.shapes.dims(dims, each))]

    def _widths(self, type_: Type) -> list[int]:
        return self.shapes.widths(type_)

    def _parts(self, ref: str) -> list[str]:
        """The variables of a value in registers: one per piece."""
        var, n = self.var(ref), len(self._widths(self.kernel.type_of(ref)))
        return [f"{var}_{i}" for i in range(n)] or [var]

    def _output(self) -> str:
        """The first tensor of the element type: an output, or an input if outputs have another type."""
        return next(
            a.name for role in ("out", "in") for a in self.kernel.args if a.role == role and a.type.dtype == "T"
        )

    def _tile_vars(self, ref: str) -> list[str]:
        """The variables of a tile in shared memory: one per piece."""
        op, var = self.kernel.op(ref), self.var(ref)
        while isinstance(op, gl.SmemRows):
            op = self.kernel.op(op.value)
        n = op.pieces if isinstance(op, gl.SmemView) else 1
        return [f"{var}_{i}" for i in range(n)] if n > 1 else [var]

    def _warps(self, op: Op) -> int:
        """The number of warps of the warp group that an op belongs to."""
        warp_group = self.kernel.warp_group_of(op)
        assert warp_group is not None
        return warp_group.warps
