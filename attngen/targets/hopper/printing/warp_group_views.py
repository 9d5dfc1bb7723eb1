"""Builds the views of warp groups: their parameters, prologues, stage counters and work loops."""

from __future__ import annotations

import re
from typing import Any

from attngen.ir import AXIS_DIM, SIDES, Block, gl, only, pipe, tile
from attngen.ir.behaviour import handles
from attngen.ir.names import stride_names
from attngen.targets.hopper.configs.work_tiles import tile_coordinates, tile_metadata
from attngen.targets.hopper.lowering.shapes import HALF
from attngen.targets.hopper.lowering.statements import threads_of
from attngen.targets.hopper.printing.loop_views import gluon
from attngen.targets.hopper.printing.views import TileFunctionView, WarpGroupView
from attngen.targets.hopper.printing.wgmma_views import WgmmaContext
from attngen.targets.printing.views import Node, names_in


def _read_by(lines: list[str], words: set[str]) -> list[str]:
    """The assignments among `lines` that code with these words reads, directly or through a later line."""
    found: list[str] = []
    for line in reversed(lines):
        if line.split()[0] in words:
            found, words = [line, *found], words | {*re.findall(r"\w+", line)}
    return found


class WarpGroupContext(WgmmaContext):
    """Builds the views of warp groups."""

    def _program_tile(self) -> list[str]:
        """Lines that compute the rows, the head and the sequence of the program's tile.

        In a persistent kernel it is the tile with the number `pid`.
        """
        lines: list[str] = gluon(self._prologue(set())[0])
        if not self.source.traits.is_persistent:
            return lines
        return [line.replace("gl.num_programs(0)", "TILES") for line in lines[1:]]

    def _warp_group(self, block: Block, params: list[str]) -> WarpGroupView:
        assert block.warp_group is not None
        self.mine = block
        nodes = self.block(block.name, "entry")
        work = next((node for node in nodes if node.kind == "work_loop"), None)
        known = work.body.pop(0).body if work else []
        words = names_in(nodes) | self._names_of_pipelines(block)
        prologue = self._positions(words) if block.warp_group.rows else []
        prologue += [] if self.source.traits.is_persistent or not block.warp_group.rows else self._own_rows(words)
        of_tile = self._tile_function(work, known, params) if work else None
        if work:
            self._place_tiles(work, [] if of_tile else known, block, words, params)
        # With split-KV, programs compute the number of splits themselves.
        scheduler_args = {"COUNTER"} if self.kernel.kv_split else {"COUNTER", "TILES"}
        words |= scheduler_args if any(op.fetches for op in only(block.ops, pipe.WorkLoop)) else set()
        words |= names_in(nodes) | set(re.findall(r"\w+", " ".join(prologue)))
        entry = [op.name for op in self.source.block("entry").ops if not isinstance(op, (tile.Arg, pipe.Pipeline))]
        shared = [op.name for op in only(self.kernel.block("entry").ops, gl.AllocShared, gl.AllocMbarriers)]
        persistent, early = self.source.traits.is_persistent, self._loaded_early()
        given = [
            *(name for name in params if name not in early),
            *entry,
            *([] if persistent else tile_coordinates(self.source)),
            *shared,
            *(["COUNTER", "TILES"] if persistent else []),
        ]
        return WarpGroupView(
            f"{self.kernel.name}_{block.name}",
            block.warp_group.instances,
            block.warp_group.warps,
            block.warp_group.registers,
            [name for name in given if name in words],
            [
                t
                for t in ("BLOCK_Q", "BLOCK_KV", "STAGES", "DROPOUT", "_INPUT_GRADIENTS")
                if t in words or t == "STAGES"
            ],
            prologue,
            nodes,
            bool(block.warp_group.rows) or any(only(self.source.within(block.name), pipe.ProducerLoad)),
            [
                "THREADS",
                *(
                    ["_WARP_GROUP"]
                    if not self.of_latents and (block.warp_group.rows or block.warp_group.instances > 1)
                    else []
                ),
            ],
            of_tile,
        )

    def _names_of_pipelines(self, block: Block) -> set[str]:
        """The buffers, the barriers and the tensor of each pipeline that a warp group uses."""
        early = self._early()
        ops = [op for op in self.source.within(block.name) if op not in early]
        used = {ref for op in ops for ref in op.operands()} & self.pipelines.keys()
        used |= {self.source.op(op.value).pipeline for op in only(ops, pipe.ConsumerRelease, tile.OrderedAdd)}  # type: ignore[attr-defined]
        names = map(self._short, used)
        return {f"{name}{suffix}" for name in names for suffix in ("", "_smem", "_full", "_empty")}

    def _tile_function(self, work: Node, known: list[Node], params: list[str]) -> TileFunctionView | None:
        """The function that computes a work tile's place and scalars, if the body of the work loop prefetches the next
        tile. The loop calls it for the first tile, and where the body prefetches. Names that it adds begin with `_`,
        which no parameter of a spec does."""
        prefetch = next((node for node in work.body if node.kind == "prefetch_tile"), None)
        if prefetch is None:
            return None
        lines, passed = work.text["place"], work.text["numbers"]
        words = names_in([Node("lines", {"lines": lines}), *known])
        defined = [line.split()[0] for line in lines] + [node.text["var"] for node in known]
        read = names_in(work.body)
        results = passed + [name for name in defined if name in read and name not in passed]
        given = [name for name in params if name in words]
        tiles: list[str] = [name for name in ("BLOCK_Q", "BLOCK_KV") if name in words]
        kept = [f"{name} = _rematerialize({name})" for name in given if name in self._integers()]
        nodes = [Node("lines", {"lines": [*kept, "pid = gl.minimum(_number, TILES - 1)", *lines]}), *known]
        name = f"{self.kernel.name}_tile"
        following = [f"_next_{result.lstrip('_')}" for result in results]
        call = {"name": name, "args": [*given, "TILES", *tiles], "results": results, "next": following}
        work.text["place"], work.text["call"], prefetch.text["call"] = [], call, call
        return TileFunctionView(name, given, tiles, nodes, results)

    def _early(self) -> list[pipe.ProducerLoad]:
        """The loads that the kernel issues before its warp groups start."""
        return [op for op in only(self.source.ops(), pipe.ProducerLoad) if op.early]

    def _loaded_early(self) -> set[str]:
        """The tensors that only these loads read. No warp group takes them."""
        early = {op.name for op in self._early()}
        return {op.src.tensor for op in self._early() if {*self.source.graph.successors(op.src.tensor)} <= early}

    def _integers(self) -> set[str]:
        """The kernel's scalar arguments that are integers."""
        return {a.name for a in self.kernel.args if a.role == "scalar" and a.type.dtype == "i32"}

    def _place_tiles(self, work: Node, known: list[Node], block: Block, words: set[str], params: list[str]) -> None:
        """Insert, before the body of a work loop, the lines that compute the values of each tile and the warp group's
        own rows.

        The call's integers are rematerialized for each tile: values computed from them before the loop would hold
        registers during products. Strides of tensors to which threads store tiles are not, because that would hide
        their alignment.
        """
        body = list(work.body)
        needed = read = names_in([node for node in body if node.kind != "reload_tile"])
        mine = [node for node in known if work.text["fetches"] or node.text["var"] not in work.text["numbers"]]
        while (more := needed | names_in([node for node in mine if node.text["var"] in needed])) != needed:
            needed = more  # also the names that their definitions read
        of_tile = [node for node in mine if work.text["fetches"] or node.text["var"] in needed]
        rows = self._own_rows(words) if block.warp_group and block.warp_group.rows else []
        at = next((at for at, node in enumerate(body) if node.kind == "reload_tile"), len(body))
        before, axes = names_in([*of_tile, *body[:at]]), self._index_count()
        first = _read_by(rows, before) if self.source.traits.places else rows
        before |= {word for line in first for word in re.findall(r"\w+", line)} if self.source.traits.places else set()
        numbers = list(enumerate(work.text["numbers"]))
        work.text["before"] = [i for i, name in numbers[1:] if name in before or (i >= axes and name in read)]
        used = names_in([*of_tile, *(node for node in body if node.kind != "prefetch_tile")]) | set(
            re.findall(r"\w+", " ".join([*work.text["place"], *work.text["splits"]]))
        )
        integers, aligned = self._integers(), self._stored_strides(block)
        work.text["rematerialized"] = [
            name
            for name in params
            if name in used and (name in integers or name.startswith("stride_")) and name not in aligned
        ]
        work.body[:] = [Node("body", {}, of_tile), Node("lines", {"lines": first}), *body]
        for node in body[at : at + 1]:
            later = names_in(body[at + 1 :])
            node.text["rows"] = _read_by(rows, later)
            if self.kernel.kv_split:
                node.text["reread"] = [i for i, name in numbers[:axes] if i == 0 or name in later]

    def _stored_strides(self, block: Block) -> set[str]:
        """Strides of the tensors to which the threads of a warp group store tiles.

        Stores are wide only because the compiler knows that these strides are multiples of 16.
        """
        stores = [op for op in only(self.kernel.within(block.name), tile.Store) if not isinstance(op, tile.OrderedAdd)]
        bases = {op.name: op.src.tensor for op in only(self.kernel.ops(), tile.Base)}
        tensors = {
            bases.get(op.dst.tensor, op.dst.tensor) for op in stores if len(self.kernel.type_of(op.value).dims) == 2
        }
        return {
            name for arg in self.kernel.args if arg.name in tensors for name in stride_names(arg.name, arg.type.dims)
        }

    def _positions(self, words: set[str]) -> list[str]:
        """Lines that define layouts, and the offsets of rows and keys inside their tiles."""
        lines = [f"SCORES: gl.constexpr = _layout_of({AXIS_DIM[self.loop]})"]
        if words & {"ACC", "OPERAND"}:
            lines.append(f"ACC: gl.constexpr = _layout_of({HALF if self.of_latents else self._width('d_v')})")
        if "OPERAND" in words:
            lines.append("OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)")
        if "PARTS" in words:
            part = next(op.type for op in only(self.kernel.ops(), pipe.Wgmma) if op.over in pipe.TILE_DIM.values())
            lines.append(f"PARTS: gl.constexpr = _layout_of({[*self._widths(part), self._dims(part.dims)[1]][0]})")
        if "REST" in words:
            lines.append(f"REST: gl.constexpr = _layout_of({self._widths(part)[-1]})")
        if "OPERAND_OF_PARTS" in words:
            lines.append(
                "OPERAND_OF_PARTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PARTS, k_width=2)"
            )
        if "_PARTIALS_LAYOUT" in words:
            lines.append("_PARTIALS_LAYOUT: gl.constexpr = _partials_layout()")
        if f"{self.own}_off" in words or (f"{self.own}_idx" in words and not self.places_rows):
            lines.append(f"{self.own}_off = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))")
        if f"{self.own}_rows" in words:
            lines.append(f"{self.own}_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))")
            lines.append("d_v = gl.arange(0, D_V, layout=gl.SliceLayout(0, ACC))")
        if self.of_latents:
            lines = [line for line in lines if not line.startswith("d_v = ")]
            lines += [
                f"{side} = {at}gl.arange(0, {HALF}, layout=gl.SliceLayout(0, ACC))"
                for side, at in zip(SIDES, ("", f"{HALF} + "))
                if side in words
            ]
        if words & {f"{self.loop}_off", f"{self.loop}_idx"}:
            lines.append(f"{self.loop}_off = gl.arange(0, {AXIS_DIM[self.loop]}, layout=gl.SliceLayout(0, SCORES))")
        if "dtype" in words:
            lines.append(f"dtype = {self._output()}.dtype")
        return lines

    def _own_rows(self, words: set[str]) -> list[str]:
        """Lines that compute the positions of the rows that the consumer instance owns."""
        start, own = f"{self.own}_start", f"{self.own}_idx"
        placed = [f"{own} = {start} + {self.own}_off"] if own in words and not self.places_rows else []
        rows = dict.fromkeys((self.row(self.own), start))
        return placed if self.of_latents else [*(f"{row} = {row} + _WARP_GROUP * ROWS" for row in rows), *placed]

    def _stage(self, op: pipe.WorkLoop | pipe.ReloadTile, fetches: bool) -> dict[str, Any]:
        """The place of the next stage of the pipeline of work tiles, and the named barrier at which it is freed."""
        name = op.pipeline
        slot = self.counting.producer_slot(name) if fetches else self.counting.consumer_slot(name, self.mine)
        free = f"{self._short(name)}_free"
        number = ""
        if free in self.kernel.graph:
            barriers = self.kernel.op(free)
            assert isinstance(barriers, gl.NamedBarriers)
            number = self.integer(barriers.first + slot.stage)
        threads = threads_of(self.source, name)
        return {
            "index": self.integer(slot.index),
            "stages": self.integer(slot.stages),
            "free": number,
            "counter": slot.counter,
            "advances": slot.own,
            "counted": self.pipelines[name].mbarrier_release,
            "threads": str(threads) if threads else "THREADS",
        }

    @handles(pipe.WorkLoop)
    def _work_loop(self, op: pipe.WorkLoop, cls: str) -> dict[str, Any]:
        splits: list[str] = []
        place = self._program_tile() if op.fetches and not self.kernel.kv_split else []
        if op.fetches and self.kernel.kv_split:
            splits, place = self._split_lines()
        return {
            "splits": splits,
            "pipeline": self._short(op.pipeline),
            "fetches": op.fetches,
            "launches_dependents": self.kernel.launches_dependents,
            # A tile waits for programs that started earlier, so programs fetch a tile when they start it.
            "waits": self.source.traits.adds_in_order,
            "warps": self._warps(op),
            "place": place,
            "call": {},
            "early": False,
            **self._numbers(),
            **self._stage(op, op.fetches),
        }

    @handles(pipe.PrefetchTile)
    def _prefetch_tile(self, op: pipe.PrefetchTile, cls: str) -> dict[str, Any]:
        return {"call": {}}  # that of the work loop's `_tile_function`

    def _index_count(self) -> int:
        """The number of coordinates among the integers that the scheduler passes for a tile."""
        return (
            len(tile_coordinates(self.source))
            if self.kernel.kv_split
            else len(self.kernel.grid) + self.source.traits.places
        )

    @handles(pipe.ReloadTile)
    def _reload_tile(self, op: pipe.ReloadTile, cls: str) -> dict[str, Any]:
        return {
            "reread": list(range(self._index_count())),
            "pipeline": self._short(op.pipeline),
            "warps": self._warps(op),
            **self._numbers(),
            **self._stage(op, False),
        }

    def _numbers(self) -> dict[str, Any]:
        """The integers that the scheduler passes, and how many of them are the tile's coordinates.

        The coordinates come first, and the first one is never negative; integers computed for the tile follow.
        """
        return {"numbers": tile_metadata(self.source), "axes": self._index_count()}
