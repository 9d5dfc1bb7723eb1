"""What the handlers of lower-pipelines share: the kernel, the warp group at which they are, and new ops."""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from attngen.ir import AXIS_DIM, SIDES, Access, Block, Expr, Kernel, Module, Op, first_row, only, pipe, symbol, tile
from attngen.ir import gl as g
from attngen.ir.behaviour import Handlers
from attngen.ir.expr import mod
from attngen.ir.names import STARTS
from attngen.targets.hopper.configs.common import SCORE_DIMS
from attngen.targets.hopper.configs.mla_decode import is_mla_decode
from attngen.targets.hopper.lowering.counters import ZERO, Counting
from attngen.targets.hopper.lowering.shapes import HALF, Shapes


def threads_of(kernel: Kernel, pipeline: str) -> int:
    """The number of threads that meet at the named barrier of a free stage: the producer's, and those of all consumers.
    0 stands for those of all warp groups that take part in such barriers."""
    if not is_mla_decode(kernel):
        return 0
    using = (pipe.ProducerLoad, pipe.ConsumerWait)
    groups = (
        b.warp_group
        for b in kernel.warp_groups
        if any(o.pipeline == pipeline for o in only(kernel.within(b.name), *using))
    )
    return sum(32 * group.warps * group.instances for group in groups if group)


class Lowering(Handlers):
    """The state of lowering one kernel, and the ops that it makes."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module, self.kernel = module, kernel
        self.shapes, self.counting = Shapes(module, kernel), Counting(kernel)
        self.pipelines, self.stored = self.shapes.pipelines, self.counting.stored
        self.own, self.loop = kernel.program_axis, kernel.loop_axis
        # With score modifiers, ptxas would move their arithmetic up past the wait for P V, if nothing stood there.
        self.modifies = any(set(op.type.dims) == SCORE_DIMS for op in only(kernel.ops(), tile.Map))
        self.made: list[Block] = []  # the bodies of new ops
        self.count = 0
        self.block = kernel.block("entry")  # whose ops are being lowered
        self.group = self.block  # the warp group that runs it

    # ------------------------------------------------------------------ new ops

    def _name(self, kind: str) -> str:
        self.count += 1
        return f"_{kind}_gl{self.count}"

    def _body(self, kind: str, ops: Iterable[Op]) -> str:
        """The name of a new block with these ops."""
        name = self._name(kind).removeprefix("_")
        self.made.append(Block(name, tuple(ops)))
        return name

    def _if(self, where: Expr, ops: Iterable[Op], orelse: Iterable[Op] = (), note: str = "") -> g.If:
        otherwise = tuple(orelse)
        body = self._body("if", ops)
        return g.If(self._name("if"), where, body, self._body("else", otherwise) if otherwise else "", note)

    def _static_for(self, var: str, count: Expr | int, ops: Iterable[Op]) -> g.StaticFor:
        return g.StaticFor(self._name("for"), var, sympy.sympify(count), self._body("for", ops))

    def _wait(self, barrier: str, index: Expr, phase: Expr, note: str = "") -> g.MbarrierWait:
        return g.MbarrierWait(self._name("wait"), barrier, index, phase, note)

    def _arrive(self, barrier: str, index: Expr) -> g.MbarrierArrive:
        return g.MbarrierArrive(self._name("arrive"), barrier, index)

    def _sync(self, barrier: str, index: Expr, threads: Expr | int = 0, note: str = "") -> g.NamedSync:
        return g.NamedSync(self._name("sync"), barrier, index, sympy.sympify(threads), note)

    def _signal(self, barrier: str, index: Expr, threads: Expr | int = 0, note: str = "", early: bool = False) -> Op:
        return g.NamedArrive(self._name("signal"), barrier, index, sympy.sympify(threads), early, note)

    def _fence(self) -> g.FenceAsync:
        return g.FenceAsync(self._name("fence"))

    def _let(self, var: str, expr: Expr, note: str = "") -> g.Let:
        return g.Let(self._name("let"), var, sympy.sympify(expr), note)

    # ------------------------------------------------------------------ places in tensors

    def _row(self, axis: str) -> str:
        """The variable of the first row of a tile, in the tensors of the call."""
        return first_row(axis, self.kernel.traits.places and axis in STARTS)

    def _place(self, access: Access, moved: Expr = ZERO, column: Expr = ZERO) -> tuple[Expr, ...]:
        """The coordinates of a tile's first element; `moved` is added to its row, for a part of the tile."""
        moving = self.own if set(access.axes()) == {self.own, self.loop} else access.axes()[0]
        starts = {
            axis: symbol(self.kernel.traits.first_row(access, at, axis)) + (moved if axis == moving else 0)
            for at, axis in enumerate(map(str, access.index))
            if axis in (self.own, self.loop)
        }
        batch, *heads, rows, columns = access.index
        # Two indices are a head and one of its splits.
        head = heads[0] if len(heads) == 1 else heads[0] * symbol(self.kernel.type_of(access.tensor).dims[2]) + heads[1]
        return tuple(starts.get(str(i), column if str(i) in AXIS_DIM else i) for i in (batch, head, rows, columns))

    def _cache_place(self, op: pipe.ProducerLoad) -> tuple[Expr, ...]:
        """The coordinates of a tile's first element in a page or in a sequence; at half of the columns, if it has the
        second half."""
        *heads, rows, columns = op.src.index
        tensor, axis = self.kernel.type_of(op.src.tensor), str(rows)
        start: Expr = symbol(f"{axis}_start")
        if op.page:
            size = tensor.dims[2]
            blocks = {config.rows_of(axis) for config in self.module.configs(self.kernel.name, self.kernel.backend)}
            start = ZERO if blocks == {int(size)} else mod(start, sympy.Integer(size))
        column = symbol(HALF) if str(columns) == list(SIDES)[-1] else ZERO
        return (*heads, start, column)
