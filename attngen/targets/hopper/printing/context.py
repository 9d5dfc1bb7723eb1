"""Builds the views from which templates print a warp-specialized kernel: its warp groups, and one view per op.

Every string in a view is ready to print. Expressions are printed as for Triton: Gluon has the same functions under
`gl`.
"""

from __future__ import annotations

from attngen.ir import AXIS_DIM, Block, Op, gl, only, pipe, tile
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.targets.hopper.lowering.lower_pipelines import LOWERED
from attngen.targets.hopper.printing.loop_views import gluon
from attngen.targets.hopper.printing.views import WarpSpecializedView
from attngen.targets.hopper.printing.warp_group_views import WarpGroupContext
from attngen.targets.printing.views import Node, names_in


class WarpSpecializedContext(WarpGroupContext, complete=gl.GL, control=(tile.Arg, pipe.Pipeline, *LOWERED)):
    """Builds the views of one warp-specialized kernel."""

    def _variables(self) -> dict[str, str]:
        """Value -> Python variable. A carried field has one variable in all bodies of its loop."""
        names = super()._variables()
        for op in self.kernel.ops():
            if not isinstance(op, pipe.PipelinedLoop):
                continue
            for field, start in op.carry:
                names |= dict.fromkeys((start, f"{op.name}.{field}"), field)
                names.setdefault(field, field)
            for body in op.bodies:
                self._name_body(names, self.kernel.block(body), f"_in_{body}")
        if self.of_latents:
            for op in self.kernel.ops():
                if isinstance(op, pipe.WorkLoop):
                    self._name_body(names, self.kernel.block(op.body), f"_{op.body.partition('_')[2]}")
        return names

    def _name_body(self, names: dict[str, str], body: Block, suffix: str) -> None:
        for op in body.ops:
            for ref in (f"{op.name}.{f}".rstrip(".") for f in op.results()):
                names[ref] = names[ref].replace(suffix, "")
            if isinstance(op, tile.Mask):
                names[op.name] = names[op.value]
            if isinstance(op, pipe.PinBeforeWait):
                names[op.name] = names[op.value]
            if isinstance(op, tile.Yield):
                args = {o.name.removesuffix(suffix): o.name for o in only(body.ops, tile.Arg)}
                plain = {field: args.get(field, field) for field, _ in op.values}
                self._reuse(names, [(plain[field], ref) for field, ref in op.values], op, body.ops)

    def _reuse(
        self, names: dict[str, str], values: list[tuple[str, str]], yielded: tile.Yield, ops: tuple[Op, ...]
    ) -> None:
        """Let a yielded value take the carried variable if nothing reads the old value once the new one is made."""
        position = {op.name: i for i, op in enumerate(ops)}
        for field, ref in values:
            chain = [ref]
            while (
                isinstance(self.kernel.op(chain[-1]), (pipe.PinBeforeWait, pipe.WgmmaWait))
                and names[chain[-1]] != field
            ):
                source = self.kernel.op(chain[-1]).value  # type: ignore[attr-defined]
                if isinstance(self.kernel.op(chain[-1]), pipe.WgmmaWait):
                    break
                chain.append(source)
            made = position.get(chain[-1].split(".")[0], -1)
            later = [op for op in ops[made + 1 :] if op is not yielded and field in op.operands()]
            if made >= 0 and not later and isinstance(self.kernel.op(chain[-1]), (tile.Map, pipe.Pack, pipe.WgmmaWait)):
                names |= dict.fromkeys(chain, names.get(field, field))

    def warp_specialized(self) -> WarpSpecializedView:
        """The view of the kernel and of its warp groups."""
        portable = self.portable.view()
        nodes = self.block("entry", "entry")
        warp_groups = [self._warp_group(block, portable.params) for block in self.kernel.warp_groups]
        return WarpSpecializedView(
            name=self.kernel.name,
            summary=self.kernel.about,
            params=portable.params,
            not_specialized=portable.not_specialized,
            dropout=portable.dropout,
            sums_input_gradients=portable.sums_input_gradients,
            prologue=[] if self.source.traits.is_persistent else self._program_tile(),
            nodes=nodes,
            warp_groups=warp_groups,
            instances=self.source.traits.sharing_warp_group.instances,
            ctas_per_sm=self.kernel.ctas_per_sm,
            persistent=self.source.traits.is_persistent,
            words=names_in(nodes).union(*(warp_group.words for warp_group in warp_groups)),
            described=self._described_tensors(portable.params),
        )

    def _described_tensors(self, params: list[str]) -> list[tuple[str, ...]]:
        """Tensors that TMA reads or writes: position among the parameters, rows per copy, and columns if not all."""
        rows = {self.own: str(ROWS), self.loop: f'"{AXIS_DIM[self.loop]}"'}
        found = set()
        for op in self.source.ops():
            if isinstance(op, pipe.ProducerLoad) and not self.pipelines[op.pipeline].metadata_of:
                whole = {*pipe.TILE_DIM.values()} & {*self.pipelines[op.pipeline].type.dims}
                height = f'"{AXIS_DIM[self.own]}"' if whole else rows[op.src.axes()[0]]
                found.add((params.index(op.src.tensor), height, self.shapes.part_of(self.pipelines[op.pipeline])))
            elif isinstance(op, pipe.TmaStore):
                pieces_of = self._widths(self.source.type_of(op.value))
                columns = str(pieces_of[0]) if pieces_of else self.shapes.part_of(self.pipelines[op.staging])
                found.add((params.index(op.dst.tensor), rows[op.dst.axes()[0]], columns))
            elif isinstance(op, tile.OrderedAdd):
                height, columns = map(str, self.shapes.part(op))
                found.add((params.index(op.dst.tensor), height if height.isdigit() else f'"{height}"', columns))
        return [(str(at), height, *([columns] if columns else [])) for at, height, columns in sorted(found)]

    def block(self, name: str, cls: str) -> list[Node]:
        """The views of a block's ops, as a loop of class `cls` (full, partial, all) runs them."""
        nodes = []
        for op in self.kernel.block(name).ops:
            if isinstance(op, (tile.Arg, pipe.Pipeline)) or self._idle(op, cls) or self._is_silent(op):
                continue
            kind = op.kind
            text = self._wgmma_wait(op, name) if isinstance(op, pipe.WgmmaWait) else self.handler(op)(op, cls)
            body = self.block(op.body, op.cls) if isinstance(op, tile.Loop) else []
            if isinstance(op, tile.Loop):
                self._loop_header(op, text, body)
                self._name_counter(op, text, body)
            body = self._bodies(op, text) if isinstance(op, pipe.PipelinedLoop) else body
            body = (
                [Node("body", {}, self.block(op.of, cls)), *self.block(op.body, cls)]
                if isinstance(op, pipe.WorkLoop)
                else body
            )
            nodes.append(Node(kind, gluon(text), body))
        return nodes
