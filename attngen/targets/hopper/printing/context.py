"""What the templates see of a divided kernel: its roles, and a view per op, every string ready to print.

Expressions are printed as for Triton: Gluon has the same functions, under `gl`.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from attngen.ir.expr import select, symbol
from attngen.ir.graph import REVERSED_GROUP, Module
from attngen.ir.names import stride_names
from attngen.ir.ops import (
    AXIS_DIM,
    AXIS_EXTENT,
    MEMBER,
    SIDES,
    Access,
    Arg,
    Base,
    Block,
    Init,
    Loop,
    Map,
    Mask,
    Op,
    OrderedAccumulate,
    OrderedAdd,
    Store,
    Type,
    Yield,
)
from attngen.ir.pipe import (
    ALL_KINDS,
    PARTIALS,
    PARTS,
    WHOLE,
    ConsumerRelease,
    ConsumerWait,
    ConvertLayout,
    LocalLoad,
    Pack,
    PinBeforeWait,
    Pipeline,
    PipelinedLoop,
    ProducerLoad,
    ProducerStore,
    ProducerTail,
    ReadMetadata,
    ReloadTile,
    Rematerialize,
    SchedulerBarrier,
    SemaphoreAcquire,
    SemaphoreRelease,
    SliceRows,
    TmaStore,
    TmaStoreWait,
    Wgmma,
    WgmmaWait,
    WorkLoop,
    WriteTileIndex,
)
from attngen.targets.hopper.configs.common import (
    PAIR,
    barriers_of,
    counted,
    follow_of,
    handed_over,
    instances_of,
    is_reused,
    is_taken_in_turns,
    place_names,
    told_numbers,
    turns,
)
from attngen.targets.hopper.configs.head_dims import part_of, piece_of, pieces
from attngen.targets.hopper.configs.sm90 import FIRST_BARRIER, FORWARD, NAMED_BARRIERS, ROWS, THREADS, TURNED
from attngen.targets.hopper.printing.exchange_views import HALF, RelayContext, near_of, side_of
from attngen.targets.hopper.printing.loop_views import gluon
from attngen.targets.hopper.printing.views import PipelineView, WarpGroupView, WarpSpecializedView
from attngen.targets.printing.context import KernelContext
from attngen.targets.printing.views import Node, names_in

NUMBERS = {"i32": "gl.int32", "f32": "gl.float32"}


def _pipelines_in(nodes: list[Node]) -> set[str]:
    """The rings that nodes and their bodies fill, take from, or write through."""
    used = {node.text["pipeline"] for node in nodes if "pipeline" in node.text} | {
        node.text["row"]["into"] for node in nodes if node.text.get("row")
    }
    return used | {pipeline for node in nodes for pipeline in _pipelines_in(node.body)}


class WarpSpecializedContext(RelayContext):
    """Builds the views of one divided kernel."""

    def __init__(self, module: Module, name: str) -> None:
        warp_specialized = next(kernel for kernel in module.warp_specialized if kernel.name == name)
        self.pipelines = {op.name: op for op in warp_specialized.ops() if isinstance(op, Pipeline)}
        self.shared = handed_over(warp_specialized)
        self.own, self.loop, self.reversed_group = (
            warp_specialized.program_axis,
            warp_specialized.loop_axis,
            warp_specialized.grid[0].reversed_group,
        )
        super().__init__(module, warp_specialized)
        self.portable = KernelContext(module, module.kernel(warp_specialized.stands_for))
        # With modifiers, ptxas would move their arithmetic up past the await of P V, if nothing stood there.
        self.modifies = any(isinstance(op, Map) and set(op.type.dims) == PAIR for op in warp_specialized.ops())

    # ------------------------------------------------------------------ names

    def _variables(self) -> dict[str, str]:
        """Value -> Python variable: a carried field has one from its start to its end, in all bodies."""
        names = super()._variables()
        for op in self.kernel.ops():
            if not isinstance(op, PipelinedLoop):
                continue
            for field, start in op.carry:
                names |= dict.fromkeys((start, f"{op.name}.{field}"), field)
                names.setdefault(field, field)
            for body in op.bodies:
                self._name_body(names, self.kernel.block(body), f"_in_{body}")
        if self.of_latents:
            for op in self.kernel.ops():
                if isinstance(op, WorkLoop):
                    self._name_body(names, self.kernel.block(op.body), f"_{op.body.partition('_')[2]}")
        return names

    def _name_body(self, names: dict[str, str], body: Block, suffix: str) -> None:
        for op in body.ops:
            for ref in (f"{op.name}.{f}".rstrip(".") for f in op.results()):
                names[ref] = names[ref].replace(suffix, "")
            if isinstance(op, Mask):
                names[op.name] = names[op.value]
            if isinstance(op, PinBeforeWait):
                names[op.name] = names[op.value]
            if isinstance(op, Yield):
                args = {o.name.removesuffix(suffix): o.name for o in body.ops if isinstance(o, Arg)}
                plain = {field: args.get(field, field) for field, _ in op.values}
                self._reuse(names, [(plain[field], ref) for field, ref in op.values], op, body.ops)

    def _reuse(self, names: dict[str, str], values: list[tuple[str, str]], yielded: Yield, ops: tuple[Op, ...]) -> None:
        """A yielded value takes the carried variable itself when nothing reads the old one after it is made."""
        position = {op.name: i for i, op in enumerate(ops)}
        for field, ref in values:
            chain = [ref]
            while isinstance(self.kernel.op(chain[-1]), (PinBeforeWait, WgmmaWait)) and names[chain[-1]] != field:
                source = self.kernel.op(chain[-1]).value  # type: ignore[attr-defined]
                if isinstance(self.kernel.op(chain[-1]), WgmmaWait):
                    break
                chain.append(source)
            made = position.get(chain[-1].split(".")[0], -1)
            later = [op for op in ops[made + 1 :] if op is not yielded and field in op.operands()]
            if made >= 0 and not later and isinstance(self.kernel.op(chain[-1]), (Map, Pack, WgmmaWait)):
                names |= dict.fromkeys(chain, names.get(field, field))

    # ------------------------------------------------------------------ the kernel

    def warp_specialized(self) -> WarpSpecializedView:
        """The view of the kernel and of its roles."""
        portable = self.portable.view()
        nodes = self.block("entry", "entry")
        warp_groups = [self._warp_group(block, portable.params) for block in self.kernel.warp_groups]
        return WarpSpecializedView(
            name=self.kernel.name,
            summary=self.kernel.about,
            params=portable.params,
            not_specialized=portable.not_specialized,
            dropout=portable.dropout,
            learns=portable.learns,
            prologue=[] if self.kernel.is_persistent else self._place_of_tile(),
            nodes=nodes,
            pipelines=[self._pipeline(op) for op in self.pipelines.values()],
            warp_groups=warp_groups,
            instances=self.kernel.sharing_warp_group.instances,
            dtype=f"{self._output()}.dtype",
            ctas_per_sm=self.kernel.ctas_per_sm,
            stays=self.kernel.is_persistent,
            words=names_in(nodes) | {word for warp_group in warp_groups for word in names_in(warp_group.nodes)},
            described=self._described_tensors(portable.params),
        )

    def _part(self, op: OrderedAdd) -> tuple[str, str]:
        """The rows, and the columns, of the part of a tile that a copy shares: as numbers, or the name of the rows
        of a tile."""
        take = self.kernel.op(op.value)
        assert isinstance(take, ConsumerWait)
        share = next(o for o in self.kernel.ops() if isinstance(o, ProducerStore) and o.pipeline == take.pipeline)
        dims = self.kernel.type_of(share.value).dims
        return self._dims(dims)[0], str(self.pipelines[take.pipeline].columns or self._columns(dims[1]))

    def _place_of_tile(self) -> list[str]:
        """The rows, the head and the sequence of the program's tile; where it takes several, of the one whose number
        is `pid`."""
        lines: list[str] = gluon(self._prologue(set())[0])
        if not self.kernel.is_persistent:
            return lines
        return [line.replace("gl.num_programs(0)", "TILES") for line in lines[1:]]

    def _described_tensors(self, params: list[str]) -> list[tuple[str, ...]]:
        rows = {self.own: str(ROWS), self.loop: f'"{AXIS_DIM[self.loop]}"'}
        found = set()
        for op in self.kernel.ops():
            if isinstance(op, ProducerLoad) and not self.pipelines[op.pipeline].beside:
                whole = {*WHOLE.values()} & {*self.pipelines[op.pipeline].type.dims}
                of = f'"{AXIS_DIM[self.own]}"' if whole else rows[op.src.axes()[0]]
                found.add((params.index(op.src.tensor), of, self._part_of(self.pipelines[op.pipeline])))
            elif isinstance(op, TmaStore):
                pieces_of = self._widths(self.kernel.type_of(op.value))
                columns = str(pieces_of[0]) if pieces_of else self._part_of(self.pipelines[op.staging])
                found.add((params.index(op.dst.tensor), rows[op.dst.axes()[0]], columns))
            elif isinstance(op, OrderedAdd):
                of, columns = self._part(op)
                found.add((params.index(op.dst.tensor), of if of.isdigit() else f'"{of}"', columns))
        return [(str(at), of, *([columns] if columns else [])) for at, of, columns in sorted(found)]

    def _part_of(self, pipeline: Pipeline) -> str:
        """The columns of a ring's buffers, where these are not those of a tensor: a copy has as many keys of scores
        as it has rows."""
        if side_of(pipeline.type.dims):
            return str(self.module.head_dim_v // 2)
        return str(ROWS) if set(pipeline.type.dims) == PAIR else part_of(pipeline)

    def _pipeline(self, op: Pipeline) -> PipelineView:
        instances = instances_of(self.kernel, op)
        stages = self._stages(op)
        buffers = stages if instances == 1 else str(instances) if stages == "1" else f"{instances} * {stages}"
        if not op.type.dims and not op.beside:
            numbers = f"{len(told_numbers(self.kernel))} * {stages}, 1"
            return PipelineView(
                self._short(op.name),
                stages,
                "",
                "",
                buffers,
                buffers,
                True,
                numbers,
                mbarrier_release=counted(self.kernel, op.name),
            )
        if op.name in self.shared:
            return self._shared_pipeline(op, stages)
        if op.exchange:
            return PipelineView(self._short(op.name), stages, self._shape(op), "", buffers, buffers, False, of="dtype")
        if op.beside:
            numbers = ", ".join([stages, *(op.type.dims or ("1",))])
            return PipelineView(
                self._short(op.name), stages, "", "", buffers, buffers, False, numbers, NUMBERS[op.type.dtype]
            )
        moves = [o for o in self.kernel.ops() if isinstance(o, (ProducerLoad, TmaStore)) and op.name in o.operands()]
        tensor = next((o for o in moves if isinstance(o, ProducerLoad)), moves[0])
        descriptor = (tensor.src if isinstance(tensor, ProducerLoad) else tensor.dst).tensor
        all_pieces = self._times(op, buffers)
        shape, filled, arrivals = self._shape(op), isinstance(tensor, ProducerLoad), counted(self.kernel, op.name)
        return PipelineView(
            self._short(op.name), stages, shape, descriptor, all_pieces, buffers, filled, mbarrier_release=arrivals
        )

    def _shared_pipeline(self, op: Pipeline, stages: str) -> PipelineView:
        """A tile that copies share: for themselves as one buffer; for the copy engine, which has it from there, as
        one for each part."""
        if self._is_of_rows(op.name):
            numbers = f"{stages}, {op.type.dims[0]}"
            return PipelineView(
                self._short(op.name),
                stages,
                "",
                "",
                stages,
                stages,
                False,
                numbers,
                NUMBERS[op.type.dtype],
                emptied=True,
            )
        add = next((o for o in self.kernel.ops() if isinstance(o, OrderedAdd)), None)
        if not self.shared[op.name] or add is None:
            rows, columns = self._dims(op.type.dims, False)
            return PipelineView(
                self._short(op.name), stages, f"{rows}, {columns}", "", stages, stages, False, of="dtype"
            )
        parts = self._tiles_of(op)
        buffers = str(parts) if stages == "1" else f"{parts} * {stages}"
        shape = ", ".join(self._part(add))
        return PipelineView(self._short(op.name), stages, shape, add.dst.tensor, buffers, stages, False, emptied=True)

    def _tiles_of(self, pipeline: Pipeline) -> int:
        """The buffers of a tile that copies share with the copy engine: one for each part, or for each of its
        pieces."""
        return pieces(self.module, pipeline) if pipeline.columns else self.kernel.sharing_warp_group.instances

    def _times(self, pipeline: Pipeline, count: str) -> str:
        """So many tiles of a ring, as a number of buffers: each has as many as its tile has pieces."""
        n = pieces(self.module, pipeline)
        return f"{n} * {f'({count})' if ' ' in count else count}" if n > 1 else count

    def _shape(self, pipeline: Pipeline) -> str:
        """The shape of a buffer: a tile, or a part of one."""
        rows, columns = self._dims(pipeline.type.dims, bool(pipeline.per_instance))
        return f"{rows}, {part_of(pipeline) or columns}"

    def _stages(self, pipeline: Pipeline) -> str:
        return self.scalar(pipeline.stages).replace("num_stages", "STAGES")

    def _dims(self, dims: tuple[str, ...], each: bool = True) -> list[str]:
        whole = {whole: own for own, whole in WHOLE.items()}
        parts = {PARTS["BLOCK_Q"]: str(ROWS), PARTS["D_QK"]: str(self._columns(PARTS["D_QK"]))}
        parts |= dict.fromkeys(SIDES.values(), HALF)
        return ["ROWS" if d == AXIS_DIM[self.own] and each else whole.get(d, parts.get(d, d)) for d in dims]

    def _columns(self, dim: str) -> int:
        """The columns of a tile of sums for dQ, or of a copy's part of it."""
        return self.module.head_dim_qk // (self.kernel.sharing_warp_group.instances if dim == PARTS["D_QK"] else 1)

    def _widths(self, type_: Type) -> list[int]:
        """The columns of the pieces in which sums lie in registers, as their tiles do in shared memory; none where they
        are whole.

        A copy's part of dQ is a piece, and its part of one that all copies share.
        """
        piece, dim = piece_of(self.module.head_dim_qk), type_.dims[-1] if type_.dims else ""
        if not piece or dim not in ("D_QK", PARTS["D_QK"]):
            return []
        whole, rest = divmod(self._columns(dim), piece)
        return [piece] * whole + [rest] * bool(rest)

    def _parts(self, ref: str) -> list[str]:
        """The variables of a value in registers: of its pieces, if it lies in some."""
        var, n = self.var(ref), len(self._widths(self.kernel.type_of(ref)))
        return [f"{var}_{i}" for i in range(n)] or [var]

    def _warp_group(self, block: Block, params: list[str]) -> WarpGroupView:
        assert block.warp_group is not None
        self.mine = block
        nodes = self.block(block.name, "entry")
        work = next((node for node in nodes if node.kind == "work_loop"), None)
        known = work.body.pop(0).body if work else []
        words = names_in(nodes) | {
            f"{pipeline}_{what}" for pipeline in _pipelines_in(nodes) for what in ("smem", "full", "empty", "stage")
        }
        prologue = [*(self._positions(words) if block.warp_group.rows else []), *self._counters(block, words)]
        prologue += [] if self.kernel.is_persistent or not block.warp_group.rows else self._own_rows(words)
        if work:
            self._place_tiles(work, known, block, words, params)
        drawing = (
            {"COUNTER"} if self.kernel.kv_split else {"COUNTER", "TILES"}
        )  # how many parts of keys there are, programs find out
        words |= drawing if any(isinstance(op, WorkLoop) and op.draws for op in block.ops) else set()
        words |= names_in(nodes) | set(re.findall(r"\w+", " ".join(prologue)))
        entry = [op.name for op in self.kernel.block("entry").ops if not isinstance(op, (Arg, Pipeline))]
        shared = [
            f"{pipeline.name}_{what}"
            for pipeline in map(self._pipeline, self.pipelines.values())
            for what in (
                "smem",
                *["full"] * (pipeline.filled or pipeline.emptied),
                *["empty"] * (pipeline.emptied or pipeline.mbarrier_release > 0),
            )
        ]
        stays = self.kernel.is_persistent
        given = [
            *params,
            *entry,
            *([] if stays else place_names(self.kernel)),
            *shared,
            *(["COUNTER", "TILES"] if stays else []),
        ]
        return WarpGroupView(
            f"{self.kernel.name}_{block.name}",
            block.warp_group.instances,
            block.warp_group.warps,
            block.warp_group.registers,
            [name for name in given if name in words],
            [t for t in ("BLOCK_Q", "BLOCK_KV", "STAGES", "DROPOUT", "LEARN") if t in words or t == "STAGES"],
            prologue,
            nodes,
            bool(block.warp_group.rows) or any(isinstance(op, ProducerLoad) for op in self.kernel.within(block.name)),
            [
                "THREADS",
                *(
                    ["WARP_GROUP"]
                    if not self.of_latents and (block.warp_group.rows or block.warp_group.instances > 1)
                    else []
                ),
            ],
        )

    def _place_tiles(self, work: Node, known: list[Node], block: Block, words: set[str], params: list[str]) -> None:
        """What comes before the body of a `work`: what all roles know of its tile, and which rows are the copy's own.

        The call's integers are taken anew for each tile: what is computed of them before the loop would keep registers
        in products. Strides of tiles that threads store are not, as that hides their alignment.
        """
        body = list(work.body)
        wanted = read = names_in([node for node in body if node.kind != "reload_tile"])
        mine = [node for node in known if work.text["draws"] or node.text["var"] not in work.text["numbers"]]
        while (more := wanted | names_in([node for node in mine if node.text["var"] in wanted])) != wanted:
            wanted = more  # what others of these need, too
        of_tile = [node for node in mine if work.text["draws"] or node.text["var"] in wanted]
        rows = self._own_rows(words) if block.warp_group and block.warp_group.rows else []
        start = [f"{self._next_start()}, order_seen = -1, 0"] if self._looks_ahead(block) else []
        at = next((at for at, node in enumerate(body) if node.kind == "reload_tile"), len(body))
        before, axes = names_in([*of_tile, *body[:at]]), self._axes_told()
        numbers = list(enumerate(work.text["numbers"]))
        work.text["before"] = [i for i, name in numbers[1:] if name in before or (i >= axes and name in read)]
        used = names_in([*of_tile, *body]) | set(
            re.findall(r"\w+", " ".join([*work.text["place"], *work.text["parts"]]))
        )
        whole = {a.name for a in self.kernel.args if a.role == "scalar" and a.type.dtype == "i32"}
        seen = self._strides_of_tiles(block)
        work.text["anew"] = [
            name
            for name in params
            if name in used and (name in whole or name.startswith("stride_")) and name not in seen
        ]
        work.body[:] = [Node("body", {}, of_tile), Node("lines", {"lines": [*rows, *start]}), *body]
        for node in body[at : at + 1]:
            later = names_in(body[at + 1 :])
            node.text["rows"] = [line for line in rows if line.split()[0] in later]
            if self.kernel.kv_split:
                node.text["again"] = [i for i, name in numbers[:axes] if i == 0 or name in later]

    def _strides_of_tiles(self, block: Block) -> set[str]:
        """The strides of tensors to which the threads of a role store tiles: that they are multiples of 16 is what
        makes stores wide."""
        stores = [
            op for op in self.kernel.within(block.name) if isinstance(op, Store) and not isinstance(op, OrderedAdd)
        ]
        bases = {op.name: op.src.tensor for op in self.kernel.ops() if isinstance(op, Base)}
        tensors = {
            bases.get(op.dst.tensor, op.dst.tensor) for op in stores if len(self.kernel.type_of(op.value).dims) == 2
        }
        return {
            name for arg in self.kernel.args if arg.name in tensors for name in stride_names(arg.name, arg.type.dims)
        }

    def _positions(self, words: set[str]) -> list[str]:
        """Layouts, and the positions of rows and of keys in their tiles."""
        lines = [f"SCORES: gl.constexpr = layout_of({AXIS_DIM[self.loop]})"]
        if words & {"SUMS", "OPERAND"}:
            lines.append(f"SUMS: gl.constexpr = layout_of({HALF if self.of_latents else self._width('d_v')})")
        if "OPERAND" in words:
            lines.append("OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)")
        if "PARTS" in words:
            part = next(op.type for op in self.kernel.ops() if isinstance(op, Wgmma) and op.over in WHOLE.values())
            lines.append(f"PARTS: gl.constexpr = layout_of({[*self._widths(part), self._dims(part.dims)[1]][0]})")
        if "REST" in words:
            lines.append(f"REST: gl.constexpr = layout_of({self._widths(part)[-1]})")
        if "OPERAND_OF_PARTS" in words:
            lines.append(
                "OPERAND_OF_PARTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PARTS, k_width=2)"
            )
        if "CHAINED" in words:
            lines.append("CHAINED: gl.constexpr = partials_layout()")
        if f"{self.own}_off" in words or (f"{self.own}_idx" in words and not self.places_rows):
            lines.append(f"{self.own}_off = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))")
        if f"{self.own}_rows" in words:
            lines.append(f"{self.own}_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))")
            lines.append("d_v = gl.arange(0, D_V, layout=gl.SliceLayout(0, SUMS))")
        if self.of_latents:
            lines = [line for line in lines if not line.startswith("d_v = ")]
            lines += [
                f"{side} = {at}gl.arange(0, {HALF}, layout=gl.SliceLayout(0, SUMS))"
                for side, at in zip(SIDES, ("", f"{HALF} + "))
                if side in words
            ]
        if words & {f"{self.loop}_off", f"{self.loop}_idx"}:
            lines.append(f"{self.loop}_off = gl.arange(0, {AXIS_DIM[self.loop]}, layout=gl.SliceLayout(0, SCORES))")
        if "dtype" in words:
            lines.append(f"dtype = {self._output()}.dtype")
        return lines

    def _output(self) -> str:
        """A tensor of the element type: the first output, or an input where outputs have a type of their own."""
        return next(
            a.name
            for warp_group in ("out", "in")
            for a in self.kernel.args
            if a.role == warp_group and a.type.dtype == "T"
        )

    def _own_rows(self, words: set[str]) -> list[str]:
        """The positions of the copy's own rows."""
        start, own = f"{self.own}_start", f"{self.own}_idx"
        placed = [f"{own} = {start} + {self.own}_off"] if own in words and not self.places_rows else []
        return placed if self.of_latents else [f"{start} = {start} + WARP_GROUP * ROWS", *placed]

    def _counters(self, block: Block, words: set[str]) -> list[str]:
        """The next slot of each ring that a role fills or takes from; the phase of its barrier, or how often the
        role has filled it."""
        lines = []
        takes = not any(isinstance(op, ProducerLoad) for op in self.kernel.within(block.name))
        for name, pipeline in self.pipelines.items():
            short = self._short(name)
            if pipeline.exchange:
                continue
            if name in self.shared:
                if f"{short}_stage" in words and name not in self.leaders:
                    lines += self._shared_counters(name, block)
                continue
            if (
                f"{short}_stage" in words
                and is_reused(self.kernel, name)
                and not (takes and self._counter(name) != short)
            ):
                what, first = (
                    "phase" if takes or pipeline.mbarrier_release else "loads",
                    int(pipeline.mbarrier_release and not takes),
                )  # all slots are free at first
                lines.append(
                    f"{short}_{what} = {first}"
                    if self._stages(pipeline) == "1"
                    else f"{short}_stage, {short}_{what} = 0, {first}"
                )
        return (
            lines
            if self.kernel.is_persistent or not self._looks_ahead(block)
            else [*lines, f"{self._next_start()}, order_seen = -1, 0"]
        )

    def _looks_ahead(self, block: Block) -> bool:
        """Whether a role adds to what other programs add to, and asks for the next tile's turn while it adds."""
        return any(
            isinstance(op, OrderedAdd) and not follow_of(self.kernel, op) for op in self.kernel.within(block.name)
        )

    def _shared_counters(self, name: str, block: Block) -> list[str]:
        """The next slot of a tile that copies share, if there are several, and the phase of its barrier for who
        waits until it is free."""
        short, pipeline = self._short(name), self.pipelines[name]
        shares = bool(
            block.warp_group and block.warp_group.rows
        )  # the first slots are free, as if they had been given back once
        if self.of_latents:
            shares = any(isinstance(op, ProducerStore) and op.pipeline == name for op in self.kernel.within(block.name))
        found = {f"{short}_stage": "0"} if self._stages(pipeline) != "1" else {}
        found |= (
            {f"{short}_phase": str(int(shares))} if self.shared[name] and not (shares and self._alike(name)) else {}
        )
        return [f"{', '.join(found)} = {', '.join(found.values())}"] if found else []

    def _alike(self, name: str) -> str:
        """A ring of one slot whose tile a turn gives back before it shares one of this ring, of one slot: both are
        in one phase then."""
        for step in (self.kernel.block(op.step).ops for op in self.kernel.ops() if isinstance(op, PipelinedLoop)):
            at = next((i for i, op in enumerate(step) if isinstance(op, ProducerStore) and op.pipeline == name), 0)
            pipelines = {op.name: op.pipeline for op in step if isinstance(op, ConsumerWait)}
            given = [pipelines[op.value] for op in step[:at] if isinstance(op, ConsumerRelease)]
            one = [
                pipeline
                for pipeline in given
                if self.pipelines[pipeline].stages == 1 == self.pipelines[name].stages and pipeline not in self.shared
            ]
            if one:
                return one[-1]
        return ""

    def _free(self, pipeline: str) -> str:
        """The number of the named barrier of a ring's first slot."""
        earlier = list(self.pipelines.items())[: list(self.pipelines).index(pipeline)]
        before = [(self._stages(op), n) for name, op in earlier if (n := barriers_of(self.kernel, name))]
        first = FIRST_BARRIER + sum(n * int(stages) for stages, n in before if stages.isdigit())
        return " + ".join(
            [str(first), *(f"{n} * {stages}" if n > 1 else stages for stages, n in before if not stages.isdigit())]
        )

    # ------------------------------------------------------------------ nodes

    def block(self, name: str, cls: str) -> list[Node]:
        """Views of a block's ops, as a loop of class `cls` runs them."""
        nodes = []
        for op in self.kernel.block(name).ops:
            if isinstance(op, (Arg, Pipeline)) or self._idle(op, cls) or self._is_silent(op):
                continue
            kind = ALL_KINDS[type(op)]
            text = self._wgmma_wait(op, name) if isinstance(op, WgmmaWait) else getattr(self, f"_{kind}")(op, cls)
            body = self.block(op.body, op.cls) if isinstance(op, Loop) else []
            if isinstance(op, Loop):
                self._loop_header(op, text, body)
                self._name_counter(op, text, body)
            body = self._bodies(op, text) if isinstance(op, PipelinedLoop) else body
            body = (
                [Node("body", {}, self.block(op.of, cls)), *self.block(op.body, cls)]
                if isinstance(op, WorkLoop)
                else body
            )
            nodes.append(Node(kind, gluon(text), body))
        return nodes

    def _producer_load(self, op: ProducerLoad, cls: str) -> dict[str, Any]:
        pipeline = self.pipelines[op.pipeline]
        if pipeline.beside:
            return self._fill_beside(op, pipeline.beside)
        instances, n, stage = (
            instances_of(self.kernel, pipeline),
            pieces(self.module, pipeline),
            self._stage(op.pipeline, "copy"),
        )
        return {
            "pipeline": self._short(op.pipeline),
            "tensor": op.src.tensor,
            "place": self._place_of_fill(op)
            if self.of_latents
            else self._place(
                op.src,
                f" + copy * {ROWS}" if pipeline.per_instance else "",
                f"piece * {pipeline.columns}" if n > 1 else "0",
            ),
            "bytes": " * ".join([*([str(n)] if n > 1 else []), *self._shape(pipeline).split(", "), "2"]),
            "pieces": n if n > 1 else 0,
            "buffer": self._times(pipeline, stage["index"]) + (" + piece" if n > 1 else ""),
            "instances": instances if pipeline.per_instance else 0,
            "row": {},
            "waits": bool(stage["free"])
            and not any(other.beside == pipeline.name for other in self.pipelines.values()),
            **stage,
        }

    def _fill_beside(self, op: ProducerLoad, tiles: str) -> dict[str, Any]:
        """Numbers beside a tile: where they start, and how many there are. The first fill of the slot waits until it
        is free."""
        tensor = self.kernel.op(op.src.tensor)
        assert isinstance(tensor, Arg)
        first = next(name for name, pipeline in self.pipelines.items() if pipeline.beside == tiles)
        start = self._start(Access(op.src.tensor, op.src.index[:-1]), tensor)
        at, extent = f"{self.loop}_start", AXIS_EXTENT[self.loop]
        row = {"start": f"{start} + {at}", "left": f"{extent} - {at}", "into": self._short(op.pipeline)}
        return {"pipeline": self._short(tiles), "row": row, "waits": first == op.pipeline, **self._stage(tiles)}

    def _write_tile_index(self, op: WriteTileIndex, cls: str) -> dict[str, Any]:
        tiles = str(self.pipelines[op.pipeline].beside)
        return {
            "pipeline": self._short(op.pipeline),
            "number": f"{self.loop}_tile",
            "index": self._stage(tiles)["index"],
        }

    def _read_metadata(self, op: ReadMetadata, cls: str) -> dict[str, Any]:
        take = self.kernel.op(op.beside)
        assert isinstance(take, ConsumerWait)
        text = {"var": self.var(op.name), "pipeline": self._short(op.pipeline), "axis": int(self._read_of_rows(op))}
        return {
            **text,
            "index": "0"
            if self.pipelines[take.pipeline].exchange
            else self._stage(take.pipeline, "WARP_GROUP")["index"],
        }

    def _stage(self, name: str, copy: str = "") -> dict[str, Any]:
        """Where a ring's next buffer is, how many slots it has, and the barrier of its first free slot, if it is filled
        again.

        In a role that takes, a ring of which it takes one slot for each of its tiles goes on when that of places does.
        """
        pipeline, short = self.pipelines[name], self._short(name)
        if not is_reused(self.kernel, name):
            return {
                "index": copy if pipeline.per_instance else "0",
                "stages": "1",
                "free": "",
                "counted": False,
                "threads": "THREADS",
            }
        stages, counter = self._stages(pipeline), self._counter(name) if copy == "WARP_GROUP" else short
        stage = "" if stages == "1" else f"{counter}_stage"
        index = stage or "0"
        if pipeline.per_instance:
            index = f"{instances_of(self.kernel, pipeline)} * {stage} + {copy}" if stage else copy
        free = " + ".join([self._free(name), *([stage] if stage else [])])
        text = {"index": index, "stages": stages, "free": free, "counter": counter, "goes_on": counter == short}
        return {**text, "counted": pipeline.mbarrier_release, "threads": self._threads(name)}

    def _counter(self, name: str) -> str:
        """The name of the counter of a ring's slots in a role that takes from it."""
        places = next(
            (pipeline for pipeline in self.pipelines.values() if not pipeline.type.dims and not pipeline.beside), None
        )
        once = places is not None and self.pipelines[name].per_instance and self.pipelines[name].stages == places.stages
        return self._short(places.name if places and (once or self._alternates(name)) else self.leaders.get(name, name))

    def _alternates(self, name: str) -> bool:
        """Whether a taken ring is filled once for each of the program's tiles: it has one slot, in the phase of the
        place's, 0 or 1."""
        return (
            self.pipelines[name].mbarrier_release
            and bool(self.pipelines[name].type.dims)
            and not is_taken_in_turns(self.kernel, name)
        )

    @property
    def leaders(self) -> dict[str, str]:
        """Rings of whose slots a turn uses the same as of another ring, with that one: they have its counter."""
        return self._leaders_by_twos() if self.of_latents else self._leaders_of_backward

    @cached_property
    def _leaders_of_backward(self) -> dict[str, str]:
        """Rings whose slots a turn of the backward's loop uses as those of another ring, with that one: they have its
        counter.

        A turn uses a slot of each, and none but that of dS after it has given back the last tile that was copied.
        """
        found: dict[str, str] = {}
        for step in (
            self.kernel.block(op.step).ops for op in self.kernel.ops() if isinstance(op, PipelinedLoop) and not op.first
        ):
            pipelines = {op.name: op.pipeline for op in step if isinstance(op, ConsumerWait)}
            gives = [
                pipelines[op.value]
                for op in step
                if isinstance(op, ConsumerRelease) and not self.pipelines[pipelines[op.value]].per_instance
            ]
            copied = [pipeline for pipeline in gives if pipeline not in self.shared]
            if len(copied) > 1 and self.kernel.stands_for != FORWARD:
                alike = (
                    pipeline
                    for pipeline in gives
                    if self.pipelines[pipeline].stages == self.pipelines[copied[-1]].stages
                )
                found |= {pipeline: copied[-1] for pipeline in alike if pipeline != copied[-1]}
        return found

    def _place(self, access: Access, moved: str = "", column: str = "0") -> str:
        """The coordinates of a tile's first element; `moved` goes on to rows of a part."""
        moving = self.own if set(access.axes()) == {self.own, self.loop} else access.axes()[0]
        starts = {axis: f"{axis}_start{moved if axis == moving else ''}" for axis in (self.own, self.loop)}
        batch, *heads, rows, columns = access.index
        head = (
            heads[0] if len(heads) == 1 else heads[0] * symbol(self.kernel.type_of(access.tensor).dims[2]) + heads[1]
        )  # parts of each
        return ", ".join(
            starts.get(str(i), column if str(i) in AXIS_DIM else self.scalar(i)) for i in (batch, head, rows, columns)
        )

    def _producer_store(self, op: ProducerStore, cls: str) -> dict[str, Any]:
        """Where a copy writes its part, what it waits for before, and at whose barrier it arrives after that."""
        if self.pipelines[op.pipeline].exchange:
            return self._share_in_relay(op)
        if self._is_of_rows(op.pipeline):
            return self._share_rows(op)
        text, value = self._shared_stage(op.pipeline), self.kernel.type_of(op.value)
        one, alike = text["stage"] or "0", self._alike(op.pipeline)
        text |= {
            "phase": f"{self._counter(alike) if alike else self._short(op.pipeline)}_phase",
            "in_phase": self._short(alike),
        }
        if self.shared[op.pipeline] and self.pipelines[op.pipeline].columns:
            return {**text, "stored": self._stored_pieces(op), "index": one, "waits": True}
        if self.shared[op.pipeline]:
            place = (
                f"WARP_GROUP + {self.kernel.sharing_warp_group.instances} * {one}" if text["stage"] else "WARP_GROUP"
            )
            shape = ", ".join(self._dims(value.dims))
            tile = f"{text['pipeline']}_smem.index({place}).reshape([{shape}])"
            wide = self._columns(value.dims[1]) >= TURNED
            stored = (
                f"store_sums({tile}, {self.var(op.value)}, PARTS)" if wide else f"{tile}.store({self.var(op.value)})"
            )
            return {**text, "stored": [stored], "index": one, "waits": True}
        tile = f"{text['pipeline']}_smem.index({one}).slice(WARP_GROUP * ROWS, ROWS, 0)"
        return {**text, "stored": [f"{tile}.store(unpack({self.var(op.value)}, dtype))"], "index": one, "waits": False}

    def _stored_pieces(self, op: ProducerStore) -> list[str]:
        """Stores of a copy's part of dQ: of the halves of its piece, the first or the last, and of its half of the
        one between them."""
        (whole, rest), pipeline = self._parts(op.value), f"{self._short(op.pipeline)}_smem"
        shape = f"[{self._dims(self.kernel.type_of(op.value).dims)[0]}, {self.pipelines[op.pipeline].columns}]"
        sums = [("4 * WARP_GROUP", f"gl.convert_layout({whole}_left, REST, assert_trivial=True)")]
        sums += [
            ("4 * WARP_GROUP + 1", f"gl.convert_layout({whole}_right, REST, assert_trivial=True)"),
            ("2 + WARP_GROUP", rest),
        ]
        stores = [f"store_sums({pipeline}.index({at}).reshape({shape}), {value}, REST)" for at, value in sums]
        return [f"{whole}_left, {whole}_right = split_halves({whole})", *stores]

    def _shared_stage(self, name: str) -> dict[str, Any]:
        """The slot of a tile that copies share, and the named barrier of its first part, with the threads that meet
        there."""
        short, stages, instances = (
            self._short(name),
            self._stages(self.pipelines[name]),
            self.kernel.sharing_warp_group.instances,
        )
        stage, each = "" if stages == "1" else f"{self._counter(name)}_stage", barriers_of(self.kernel, name)
        barrier = " + ".join([self._free(name), *([f"{each} * {stage}" if each > 1 else stage] if stage else [])])
        text = {
            "pipeline": short,
            "stage": stage,
            "stages": stages,
            "barrier": barrier,
            "threads": instances * THREADS,
            "relay": False,
        }
        return {
            **text,
            "handed": self.shared[name],
            "goes_on": bool(stage) and name not in self.leaders,
            "round_robin": name in self.kernel.round_robin,
        }

    def _rematerialize(self, op: Rematerialize, cls: str) -> dict[str, Any]:
        take = self.kernel.op(op.value)
        assert isinstance(take, ConsumerWait)
        pipeline = self.pipelines[take.pipeline]
        index = self._stage(take.pipeline, "WARP_GROUP")["index"]
        at = "opaque_zero()" if index == "0" else f"{index} + opaque_zero()"
        return {
            "tiles": self._tiles_at(op.name, pipeline, at),
            "pipeline": self._short(take.pipeline),
            "shape": self._shape(pipeline),
        }

    def _local_load(self, op: LocalLoad, cls: str) -> dict[str, Any]:
        take = self.kernel.take_of(op.value)
        if take and self._is_of_rows(take.pipeline):
            return {
                "var": self.var(op.name),
                "tile": f"{self._short(take.pipeline)}_smem.index(0)",
                "layout": "gl.SliceLayout(1, SCORES)",
            }
        turned = self.kernel.type_of(op.value).dims != op.type.dims
        layout = "SCORES" if set(op.type.dims) == PAIR else "SUMS"
        return {"var": self.var(op.name), "tile": self.var(op.value) + ".permute((1, 0))" * turned, "layout": layout}

    def _row_of_tile(self, axis: str, tile: tuple[str, ...]) -> str:
        """A tile that is as wide as sums is read by the threads that have its rows of these."""
        return f"{axis}_rows" if tile[1:] == ("D_V",) or side_of(tile) else super()._row_of_tile(axis, tile)

    def _row_of_tensor(self, axis: str, tile: tuple[str, ...]) -> str:
        wide = tile[1:] == ("D_V",) or side_of(tile)
        return f"{axis}_start + {axis}_rows" if wide else super()._row_of_tensor(axis, tile)

    def _slice_rows(self, op: SliceRows, cls: str) -> dict[str, Any]:
        return {"pairs": list(zip(self._tile_vars(op.name), self._tile_vars(op.value)))}

    def _ordered_add(self, op: OrderedAdd | OrderedAccumulate, cls: str) -> dict[str, Any]:
        """The parts of a tile that the copy engine adds, and where; and the program's turn."""
        take = self.kernel.op(op.value)
        assert isinstance(take, ConsumerWait)
        assert isinstance(op, OrderedAdd)  # of merges are made puts
        rows, columns = self._part(op)
        moved, column = (f" + piece * {ROWS}", "0") if rows == str(ROWS) else ("", f"piece * {columns}")
        text = self._shared_stage(take.pipeline)
        tiles = self._tiles_of(self.pipelines[take.pipeline])
        first = f"{tiles} * {text['stage']} + piece" if text["stage"] else "piece"
        tile = {
            **text,
            "pieces": tiles,
            "tensor": op.dst.tensor,
            "place": self._place(op.dst, moved, column),
            "buffer": first,
        }
        if follow_of(self.kernel, op):
            return {**tile, "followed": True}
        assert op.semaphore is not None and op.order is not None
        start, ahead, rows = f"{self.loop}_start", self._next_start(), AXIS_DIM[self.loop]
        clamped = (
            f"gl.minimum({f'gl.maximum({ahead}, 0)' if self.reversed_group else ahead}, {AXIS_EXTENT[self.loop]} - 1)"
        )
        counter = self._counter_of(op.semaphore)
        further = (
            f"{start} + gl.where({REVERSED_GROUP} > 0, -{rows}, {rows})" if self.reversed_group else f"{start} + {rows}"
        )
        further = f"{self.loop}_ahead * {rows}" if self.module.blocks else further
        loop = next(
            o for o in self.kernel.ops() if isinstance(o, PipelinedLoop) and op in self.kernel.block(o.step).ops
        )
        member, following = symbol(MEMBER), op.semaphore
        if loop.by_tile:  # the next head is at the same tile, or, after the last one, the first at the next tile
            ((low, high),) = loop.heads
            further = f"gl.where({MEMBER} + 1 < {self.scalar(high)}, {start}, {further})"
            next_head = select(member + 1 < high, member + 1, low)
            following = Access(following.tensor, tuple(e.xreplace({member: next_head}) for e in following.index))
        seen = self._counter_of(following, clamped)
        turns = {
            "start": start,
            "ahead": ahead,
            "further": further,
            "counter": counter,
            "next": seen,
            "turn": self.scalar(op.order),
        }
        return {**tile, **turns, "followed": False}

    def _next_start(self) -> str:
        """The variable of where the next tile starts. Where tiles are listed, loops read its number a turn ahead, as
        `ahead`."""
        return f"{self.loop}_{'next' if self.module.blocks else 'ahead'}"

    def _counter_of(self, turns: Access, at: str = "") -> str:
        """The address of the number of programs that have added to a tile, or to the one whose first row is `at`."""
        tensor, (*head, row) = self.kernel.op(turns.tensor), turns.index
        if isinstance(tensor, Base):
            return f"{self.var(tensor.name)} + {self.scalar(row)}"
        assert isinstance(tensor, Arg)
        return f"{self._start(Access(turns.tensor, tuple(head)), tensor)} + {at or self.scalar(row)}"

    def _semaphore_release(self, op: SemaphoreRelease, cls: str) -> dict[str, Any]:
        return {"counter": self._counter_of(op.semaphore), "where": self._has_rows(op)}

    def _semaphore_acquire(self, op: SemaphoreAcquire, cls: str) -> dict[str, Any]:
        """The program's turn, in warps: each warp of a copy raises the number by one. An add after it needs the
        turn, too."""
        adds = any(follow_of(self.kernel, add) is op for add in self.kernel.ops() if isinstance(add, OrderedAdd))
        turn = self.scalar(self._warps(op) * op.order)
        return {"counter": self._counter_of(op.semaphore), "turn": turn, "where": self._has_rows(op), "adds": adds}

    def _has_rows(self, op: SemaphoreAcquire | SemaphoreRelease) -> str:
        """The condition that a copy has rows of the program's tile; empty text where turns are those of another
        tile."""
        start = f"{self.own}_start"
        return f"{start} < {AXIS_EXTENT[self.own]}" if symbol(start) in op.semaphore.index else ""

    def _consumer_wait(self, op: ConsumerWait, cls: str) -> dict[str, Any]:
        if self.pipelines[op.pipeline].exchange:
            return self._take_in_relay(op)
        if op.pipeline in self.shared:
            return {**self._shared_stage(op.pipeline), "var": self.var(op.name), "shared": True}
        short, pipeline = self._short(op.pipeline), self.pipelines[op.pipeline]
        stage, in_phase = self._stage(op.pipeline, "WARP_GROUP"), self._alternates(op.pipeline)
        phase = (
            f"{self._counter(op.pipeline)}_{'stage' if in_phase else 'phase'}"
            if is_reused(self.kernel, op.pipeline)
            else "0"
        )
        read = any(
            not isinstance(self.kernel.op(reader), (ConsumerRelease, Rematerialize))
            for reader in self.kernel.graph.successors(op.name)
        )
        at = "opaque_zero()" if self.of_latents and near_of(pipeline) else stage["index"]
        tiles = self._tiles_at(op.name, pipeline, at) if read else []
        return {
            "tiles": tiles,
            "pipeline": short,
            "phase": phase,
            "in_phase": in_phase,
            "shape": self._shape(pipeline),
            "shared": False,
            **stage,
        }

    def _tile_vars(self, ref: str) -> list[str]:
        """The variables of a tile: of its pieces, if it lies in some."""
        take, var = self.kernel.take_of(ref), self.var(ref)
        n = pieces(self.module, self.pipelines[take.pipeline]) if take else 1
        return [f"{var}_{i}" for i in range(n)] if n > 1 else [var]

    def _tiles_at(self, ref: str, pipeline: Pipeline, at: str) -> list[tuple[str, str]]:
        """The variables of a tile, or of its pieces, each with the number of its buffer; the tile is number `at` of
        the ring's."""
        first = self._times(pipeline, at)
        return [(var, f"{first} + {i}" if i else first) for i, var in enumerate(self._tile_vars(ref))]

    def _consumer_release(self, op: ConsumerRelease, cls: str) -> dict[str, Any]:
        take = self.kernel.op(op.value)
        assert isinstance(take, ConsumerWait)
        if take.pipeline in self.shared:
            return {**self._shared_stage(take.pipeline), "shared": True}
        readers = (self.kernel.op(name) for name in self.kernel.graph.successors(take.name))
        product = any(
            isinstance(reader, Wgmma) and reader.b == take.name and not (reader.acc and self.modifies)
            for reader in readers
        )
        return {
            "pipeline": self._short(take.pipeline),
            "soon": product,
            "shared": False,
            **self._stage(take.pipeline, "WARP_GROUP"),
        }

    def _producer_tail(self, op: ProducerTail, cls: str) -> dict[str, Any]:
        instances = instances_of(self.kernel, self.pipelines[op.pipeline])
        return {"pipeline": self._short(op.pipeline), "instances": instances, **self._stage(op.pipeline, "copy")}

    def _tma_store_wait(self, op: TmaStoreWait, cls: str) -> dict[str, Any]:
        puts = (o for o in self.kernel.ops() if isinstance(o, TmaStore) and o.staging == op.staging)
        return {"flag": "LEARN" * any(self._learned(o.dst.tensor) for o in puts)}

    def _work_loop(self, op: WorkLoop, cls: str) -> dict[str, Any]:
        before: list[str] = []
        place = self._place_of_tile() if op.draws and not self.kernel.kv_split else []
        if op.draws and self.kernel.kv_split:
            before, place = self._lines_of_parts()
        return {
            "parts": before,
            "pipeline": self._short(op.pipeline),
            "draws": op.draws,
            "releases": self.kernel.launches_dependents,
            "waits": self.kernel.adds,  # for programs that started before: so tiles are drawn when they are started
            "warps": self._warps(op),
            "place": place,
            "soon": False,
            **self._numbers(),
            **self._stage(op.pipeline, "" if op.draws else "WARP_GROUP"),
        }

    def _axes_told(self) -> int:
        """How many of the numbers that are passed say where a tile is."""
        return len(place_names(self.kernel)) if self.kernel.kv_split else len(self.kernel.grid)

    def _reload_tile(self, op: ReloadTile, cls: str) -> dict[str, Any]:
        return {
            "again": list(range(self._axes_told())),
            "pipeline": self._short(op.pipeline),
            "warps": self._warps(op),
            **self._numbers(),
            **self._stage(op.pipeline, "WARP_GROUP"),
        }

    def _warps(self, op: Op) -> int:
        """The warps of the role that an op belongs to."""
        warp_group = self.kernel.warp_group_of(op)
        assert warp_group is not None
        return warp_group.warps

    def _numbers(self) -> dict[str, Any]:
        """The variables that are passed: where a tile is, the first of them never negative, and what is known of it;
        how many say where."""
        return {"numbers": told_numbers(self.kernel), "axes": self._axes_told()}

    def _wgmma(self, op: Wgmma, cls: str) -> dict[str, Any]:
        a, b = self.kernel.type_of(op.a), self.kernel.type_of(op.b)
        left = [var if a.dims[1] == op.over else f"{var}.permute((1, 0))" for var in self._tile_vars(op.a)]
        right = [var if b.dims[0] == op.over else f"{var}.permute((1, 0))" for var in self._tile_vars(op.b)]
        spread = (
            "PARTS"
            if op.over in WHOLE.values()
            else "SUMS"
            if {"D_QK", "D_V", *SIDES.values()} & {*op.type.unpadded}
            else "SCORES"
        )
        if self._widths(op.type):
            return {"products": self._products(op, left[0], right)}
        if op.type.dims[0] == PARTS["BLOCK_Q"]:
            left = [f"{self.var(op.a)}.slice(WARP_GROUP * {ROWS}, {ROWS}, 1).permute((1, 0))"]
        if op.type.dims[1] == PARTS["D_QK"]:
            columns = self._dims(op.type.dims)[1]
            right = [f"{self.var(op.b)}.slice(WARP_GROUP * {columns}, {columns}, 1)"]
        shape = ", ".join(self._dims(op.type.dims))
        start = self.var(op.acc) if op.acc else f"gl.zeros([{shape}], gl.float32, {spread})"
        return {
            "products": [
                {"var": self.var(op.name), "pairs": list(zip(left, right)), "start": start, "adds": bool(op.acc)}
            ]
        }

    def _products(self, op: Wgmma, left: str, right: list[str]) -> list[dict[str, Any]]:
        """The products of a value's pieces: with those of the second operand, or of dQ with a copy's piece and its
        part of another."""
        widths, parts = self._widths(op.type), self._parts(op.name)
        starts = self._parts(op.acc) if op.acc else []
        if op.type.dims[1] == PARTS["D_QK"]:
            columns, rows = widths[1], self._dims(op.type.dims)[0]
            right = [
                f"{right[0]} if WARP_GROUP == 0 else {right[2]}",
                f"{right[1]}.slice(WARP_GROUP * {columns}, {columns}, 1)",
            ]
            starts = [f"gl.zeros([{rows}, {n}], gl.float32, {layout})" for n, layout in zip(widths, ("PARTS", "REST"))]
        return [
            {"var": var, "pairs": [(left, b)], "start": start, "adds": bool(op.acc)}
            for var, b, start in zip(parts, right, starts)
        ]

    def _wgmma_wait(self, op: WgmmaWait, block: str) -> dict[str, Any]:
        ops = self.kernel.block(block).ops
        names = [o.name for o in ops]
        since = ops[names.index(op.value) + 1 : names.index(op.name)]
        awaited = {o.value for o in since if isinstance(o, WgmmaWait)}
        pending = sum(self._count_of(o) for o in since if isinstance(o, Wgmma) and o.name not in awaited)
        held = [self.var(name) for name in op.keep_alive]
        return {
            "vars": ", ".join(self._parts(op.name) + held),
            "pending": pending,
            "deps": ", ".join(self._parts(op.value) + held),
        }

    def _count_of(self, op: Wgmma) -> int:
        """The products that are issued: one for each piece of what is summed, or of the sums."""
        return len(self._widths(op.type)) or len(self._tile_vars(op.b))

    def _scheduler_barrier(self, op: SchedulerBarrier, cls: str) -> dict[str, Any]:
        """The copies that take turns, and the named barrier of the first."""
        instances = turns(self.kernel)
        return {"do": op.do, "instances": instances, "first": NAMED_BARRIERS - instances, "threads": 2 * THREADS}

    def _tma_store(self, op: TmaStore, cls: str) -> dict[str, Any]:
        rows, columns = self._dims(self.kernel.type_of(op.value).dims)
        value, place, half = self.var(op.value), self._place(op.dst), self.pipelines[op.staging].type.dims[-1]
        halves = (
            [(f"{value}_left", place), (f"{value}_right", self._place(op.dst, column=half))] if half.isdigit() else []
        )
        widths, turned = self._widths(self.kernel.type_of(op.value)), op.is_of_scores(self.kernel)
        stage = f"{self._short(op.staging)}_smem.index({self._stage(op.staging, 'WARP_GROUP')['index'] if turned else 'WARP_GROUP'})"
        text = {"pipeline": self._short(op.staging), "tensor": op.dst.tensor, "again": self._before(op), "value": value}
        text |= {"turned": "yes" * turned, "flag": "LEARN" * self._learned(op.dst.tensor)}
        text["turn"] = self.scalar(op.order) if op.order is not None else ""
        if widths:
            return {**text, "split": "", **self._put_pieces(op, stage, f"{rows}, {widths[0]}")}
        groups = [[(part, at, stage)] for part, at in halves or [(value, place)]]
        shape = f"{columns}, {rows}" if turned else f"{rows}, {half if halves else columns}"
        return {**text, "split": "split_halves" if halves else "", "seen": "", "groups": groups, "shape": shape}

    def _put_pieces(self, op: TmaStore, stage: str, shape: str) -> dict[str, Any]:
        """An output in pieces, which leave through a slot as wide as a tile of V: so many at a time as it holds."""
        width = self._widths(self.kernel.type_of(op.value))[0]
        room = self.module.head_dim_v // width
        places = [self._place(op.dst, column=str(i * width)) for i, _ in enumerate(self._parts(op.value))]
        found = [
            (part, at, f"pieces.index({i % room})") for i, (part, at) in enumerate(zip(self._parts(op.value), places))
        ]
        seen = f"pieces = seen_as({stage}, dtype, [{room}, 1, 1, {shape}], {op.dst.tensor}.layout)"
        return {"seen": seen, "groups": [found[at : at + room] for at in range(0, len(found), room)], "shape": shape}

    def _before(self, op: TmaStore) -> str:
        """What has left through the same slot before, as a comment says; empty text for nothing."""
        same = [o for o in self.kernel.ops() if isinstance(o, TmaStore) and o.staging == op.staging]
        flushed = any(isinstance(o, TmaStoreWait) for o in self.kernel.block_of(op).ops)
        if self.kernel.is_persistent and not flushed:
            return "the outputs of the tile before have left"
        return "the output before has left" if same.index(op) else ""

    def _init(self, op: Init, cls: str) -> dict[str, Any]:
        text = super()._init(op, cls)
        del text["shape"]
        layouts = {(): "gl.SliceLayout(1, SCORES)", ("D_V",): "SUMS", ("D_QK",): "SUMS", (PARTIALS,): "CHAINED"}
        layouts |= {(dim,): "SUMS" for dim in SIDES.values()}
        layout = layouts.get(op.type.unpadded[1:], "SCORES")
        rows, *columns = self._dims(op.type.dims)
        if widths := self._widths(op.type):
            parts = [(part, f"{rows}, {n}") for part, n in zip(self._parts(op.name), widths)]
            return {**text, "parts": parts, "layout": "PARTS"}
        return {**text, "parts": [(text["var"], ", ".join([rows, *columns]))], "layout": layout}

    def _map(self, op: Map, cls: str) -> dict[str, Any]:
        """Of a value in pieces, each is computed of those of what it uses."""
        text, used = super()._map(op, cls), [ref for _, ref in op.uses if self._widths(self.kernel.type_of(ref))]
        if not self._widths(op.type):
            return {**text, "parts": [(text["var"], text["expr"])]}
        found = []
        for i, part in enumerate(self._parts(op.name)):
            expr = text["expr"]
            for ref in used:
                expr = re.sub(rf"\b{self.var(ref)}\b", self._parts(ref)[i], expr)
            found.append((part, expr))
        return {**text, "parts": found}

    def _convert_layout(self, op: ConvertLayout, cls: str) -> dict[str, Any]:
        text = super()._convert_layout(op, cls)
        users = (self.kernel.op(name) for name in self.kernel.graph.successors(op.name))
        in_parts = any(isinstance(user, Wgmma) and self._widths(user.type) for user in users)
        return {**text, "layout": "OPERAND_OF_PARTS"} if in_parts else text
