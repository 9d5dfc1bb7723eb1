"""What the templates see where two roles share the columns of a latent: tiles that pass to and fro, turns by twos,
parts of keys."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from attngen.ir.graph import SPLIT_SYMBOLS
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, SIDES, Block, Op
from attngen.ir.pipe import (
    ConsumerRelease,
    ConsumerWait,
    Pipeline,
    PipelinedLoop,
    ProducerLoad,
    ProducerStore,
    Ranges,
    ReadMetadata,
    ZeroOutOfBounds,
)
from attngen.targets.hopper.configs.common import clearing
from attngen.targets.hopper.configs.mla_decode import is_of_latents
from attngen.targets.hopper.configs.sm90 import NAMED_BARRIERS, THREADS
from attngen.targets.hopper.printing.loop_views import LoopContext, gluon
from attngen.targets.printing.split_kv import split_args
from attngen.targets.printing.views import Node, names_in

HALF = "HALF_V"  # the constant that says how many columns half of those of a latent are
BY_TWOS = {
    True: "tiles that the mask or the end of the sequence cuts, then those with nothing to mask, two by two",
    False: "tiles of keys, two by two",
}


class RelayContext(LoopContext):
    """Views of these ops."""

    pipelines: dict[str, Pipeline]
    mine: Block  # the role that is being printed

    def _free(self, pipeline: str) -> str:
        raise NotImplementedError

    @property
    def of_latents(self) -> bool:
        return is_of_latents(self.kernel)

    # ------------------------------------------------------------------ tiles that pass to and fro

    def _relay_barrier(self, op: ProducerStore | ConsumerWait) -> str:
        """The named barrier at which who shares a tile arrives, and who takes it waits: each of the two roles has
        one to share by."""
        warp_groups = [
            warp_group.name
            for warp_group in self.kernel.warp_groups
            if any(
                o.pipeline == op.pipeline for o in self.kernel.within(warp_group.name) if isinstance(o, ProducerStore)
            )
        ]
        mine = next(
            at for at, warp_group in enumerate(warp_groups) if any(o is op for o in self.kernel.within(warp_group))
        )
        return str(int(self._free(op.pipeline)) + (mine if isinstance(op, ProducerStore) else 1 - mine))

    def _share_in_relay(self, op: ProducerStore) -> dict[str, Any]:
        stored = [f"{self._short(op.pipeline)}_smem.index(0).store(unpack({self.var(op.value)}, dtype))"]
        stored += [f"{self._short(pipeline)}_smem.index(0).store({self.var(ref)})" for pipeline, ref in op.beside]
        return {
            "pipeline": self._short(op.pipeline),
            "relay": True,
            "barrier": self._relay_barrier(op),
            "threads": 2 * THREADS,
            "stored": stored,
        }

    def _take_in_relay(self, op: ConsumerWait) -> dict[str, Any]:
        text = {"pipeline": self._short(op.pipeline), "relay": True, "shared": True, "var": self.var(op.name)}
        return {**text, "barrier": self._relay_barrier(op), "threads": 2 * THREADS}

    def _share_rows(self, op: ProducerStore) -> dict[str, Any]:
        """A number of each row, which another role takes."""
        short = self._short(op.pipeline)
        stored = [f"{short}_smem.index(0).store({self.var(op.value)})"]
        text = {
            "pipeline": short,
            "index": "0",
            "stages": "1",
            "phase": f"{short}_phase",
            "in_phase": "",
            "handed": True,
            "waits": True,
        }
        return {**text, "relay": False, "stored": stored}

    def _is_of_rows(self, pipeline: str) -> bool:
        """Whether a ring passes a number of each row."""
        return len(self.pipelines[pipeline].type.dims) == 1 and not self.pipelines[pipeline].beside

    def _read_of_rows(self, op: ReadMetadata) -> bool:
        return self.pipelines[op.pipeline].type.dims == (AXIS_DIM[self.kernel.program_axis],)

    # ------------------------------------------------------------------ rows past the end

    def _idle(self, op: Op, cls: str) -> bool:
        return cls == "full" if isinstance(op, ZeroOutOfBounds) else super()._idle(op, cls)

    def _zero_out_of_bounds(self, op: ZeroOutOfBounds, cls: str) -> dict[str, Any]:
        """Tiles that are cleared one after another, if the sequence ends in them. After that the threads of the role
        meet."""
        warp_group = next(
            warp_group.name
            for warp_group in self.kernel.warp_groups
            if any(o is op for o in self.kernel.within(warp_group.name))
        )
        warp_groups, axis = clearing(self.kernel), self.kernel.loop_axis
        return {
            "tiles": [self.var(o.value) for o in self._cleared_with(op)],
            "left": f"{AXIS_EXTENT[axis]} - {axis}_start",
            "rows": AXIS_DIM[axis],
            "barrier": NAMED_BARRIERS - len(warp_groups) + warp_groups.index(warp_group),
            "threads": THREADS,
        }

    def _cleared_with(self, op: ZeroOutOfBounds) -> list[ZeroOutOfBounds]:
        """The ops that clear tiles one after another, of which this is one."""
        ops = self.kernel.block_of(op).ops
        runs = [
            [o for o in run if isinstance(o, ZeroOutOfBounds)]
            for _, run in groupby(ops, lambda o: isinstance(o, ZeroOutOfBounds))
        ]
        return next(run for run in runs if op in run)

    # ------------------------------------------------------------------ turns by twos

    def _counts_by_twos(self, op: PipelinedLoop) -> dict[str, Any]:
        sizes = {cls: self._number(ranges) for cls, ranges in (("partial", op.partial), ("full", op.full)) if ranges}
        lines = [f"{cls}_tiles = {text}" for cls, text in sizes.items()]
        return {
            "counts": [*lines, f"tiles = {' + '.join(f'{cls}_tiles' for cls in sizes)}"],
            "any": "",
            "first": [],
            "start": [],
        }

    def _loop_by_twos(self, op: PipelinedLoop) -> list[Node]:
        """A loop over even tiles, in whose turns the odd one comes after the even one; or both together, and the
        last even one alone."""
        even, other = (
            self._turn_with_comment(op, op.step, "at"),
            self._turn_with_comment(op, op.odd or op.pair, "at + 1"),
        )
        masks = any(node.kind == "unswitch" for node in (*even, *other))
        header = {"before": [], "steps": [], "var": "at", "range": "0, tiles, 2", "comment": BY_TWOS[masks]}
        there = "at + 1 < tiles"
        if op.odd:
            body = [*even, Node("unswitch", {"condition": there, "lines": []}, other)]
        else:
            body = [Node("choice", {"condition": there}, [Node("body", {}, other), Node("body", {}, even)])]
        return [Node("loop", gluon(header), body)]

    def _leaders_by_twos(self) -> dict[str, str]:
        """Rings from which a role takes in the same bodies: all have the counter of the one that is given back last."""
        loops = [op for op in self.kernel.within(self.mine.name) if isinstance(op, PipelinedLoop)]
        homes: dict[str, list[str]] = {}
        last: dict[str, int] = {}
        for body in dict.fromkeys(body for loop in loops for body in loop.bodies):
            ops = self.kernel.block(body).ops
            pipelines = {
                op.name: op.pipeline
                for op in ops
                if isinstance(op, ConsumerWait) and not self.pipelines[op.pipeline].exchange
            }
            for at, op in enumerate(ops):
                if isinstance(op, ConsumerRelease) and op.value in pipelines:
                    homes.setdefault(pipelines[op.value], []).append(body)
                    last[pipelines[op.value]] = at
        found = {
            pipeline: max((r for r in homes if homes[r] == of), key=lambda r: last[r]) for pipeline, of in homes.items()
        }
        return {pipeline: leader for pipeline, leader in found.items() if pipeline != leader}

    def _turn_with_comment(self, op: PipelinedLoop, body: str, at: str) -> list[Node]:
        """The views of a turn, after what it is for."""
        about = self.kernel.block(body).about
        return [*([Node("lines", {"lines": [f"# {about}"]})] if about else []), *self._turn_of(op, body, at)]

    def _turn_of(self, op: PipelinedLoop, body: str, at: str) -> list[Node]:
        """The views of a turn. What only partial tiles need is under a condition, with the place of the tile."""
        both = bool(op.partial and op.full)
        nodes, own, first = (
            self._differing_in(body) if both else (self.block(body, "partial" if op.partial else "full"), [], 0)
        )
        always = bool(self._where(op) & names_in([node for node in nodes if node not in own]))
        place = gluon({"lines": self._place_by_twos(op, at, not always, names_in(nodes))})
        start = [Node("lines", place)] if always else []
        if not own:
            return [*start, *nodes]
        cut = Node("unswitch", {"condition": f"{at} < partial_tiles", "lines": [], **({} if always else place)}, own)
        return [*start, *nodes[:first], cut, *nodes[first + len(own) :]]

    def _place_by_twos(self, op: PipelinedLoop, at: str, partial: bool, words: set[str]) -> list[str]:
        """Where the tile of a turn is; of a partial one, if that is known."""
        tile, behind = f"{op.var}_tile", f"{at} - partial_tiles" if op.partial else at
        places = {
            "partial": self._tile_at(op.partial, at, f"partial_{tile}"),
            "full": self._tile_at(op.full, behind, f"full_{tile}"),
        }
        if partial or not (op.partial and op.full):
            (text, lines) = places["partial" if op.partial else "full"]
            lines = [*lines, f"{tile} = {text}"]
        else:
            (cut, before), (whole, after) = places.values()
            lines = [*before, *after, f"{tile} = gl.where({at} < partial_tiles, {cut}, {whole})"]
        lines.append(f"{op.var}_start = {tile} * {AXIS_DIM[op.var]}")
        return [*lines, *([f"{op.var}_idx = {op.var}_start + {op.var}_off"] if f"{op.var}_idx" in words else [])]

    def _tile_at(self, ranges: Ranges, at: str, name: str) -> tuple[str, list[str]]:
        """The tile at a place in joined ranges, and the lines that come before: of several ranges it is a variable."""
        if not ranges:
            return "", []
        first = at if ranges[0][0] == 0 else f"{self._term(ranges[0][0])} + {at}"
        return (first, []) if len(ranges) == 1 else (name, [f"{name} = {first}", *self._jumps(ranges, name)])

    # ------------------------------------------------------------------ parts of keys

    def _lines_of_parts(self) -> tuple[list[str], list[str]]:
        """What the producer finds out before all parts, and of the part with the number `pid`; heads run faster than
        parts."""
        item, of_place, extents = self._split_place("pid")
        given = ", ".join(split_args(self.kernel))
        before = [
            f"q_tiles = {self.scalar(self.kernel.grid[0].extent)}",
            f"first_work = work_of(CACHE_SEQLENS, gl.arange(0, 128, layout=lengths_layout()), {given})",
            f"unit = split_size(CACHE_SEQLENS, first_work, {given})",
            " * ".join([f"places = total_splits(CACHE_SEQLENS, first_work, unit, {given})", *extents]),
        ]
        lines = [f"b, part, {', '.join(SPLIT_SYMBOLS)} = split_of(CACHE_SEQLENS, first_work, {item}, unit, {given})"]
        return gluon(before), gluon([*lines, *of_place])

    # ------------------------------------------------------------------ places and columns

    def _place_of_fill(self, op: ProducerLoad) -> str:
        """The coordinates of a tile's first element: of a page, or of a sequence; of half of the columns."""
        *heads, rows, columns = op.src.index
        tensor, axis = self.kernel.type_of(op.src.tensor), str(rows)
        start = f"{axis}_start"
        if op.page:
            size = tensor.dims[2]
            blocks = {row.rows_of(axis) for row in self.module.configs(self.kernel.name, self.kernel.backend)}
            start = "0" if blocks == {int(size)} else f"{start} % {size}"
        column = HALF if str(columns) == list(SIDES)[-1] else "0"
        return ", ".join([*([self.var(op.page)] if op.page else []), *map(self.scalar, heads), start, column])

    def _threads(self, pipeline: str) -> str:
        """The threads that meet where a slot of a ring is free: of who fills it, and of all who take from it."""
        if not self.of_latents:
            return "THREADS"
        using = (ProducerLoad, ConsumerWait)
        warp_groups = [
            b.warp_group
            for b in self.kernel.warp_groups
            if any(isinstance(o, using) and o.pipeline == pipeline for o in self.kernel.within(b.name))
        ]
        return str(sum(32 * warp_group.warps * warp_group.instances for warp_group in warp_groups if warp_group))

    def _is_silent(self, op: Op) -> bool:
        """Whether nothing is printed for an op: who gives back a tile that passes to and fro tells nobody; tiles are
        cleared together."""
        if isinstance(op, ZeroOutOfBounds):
            return op is not self._cleared_with(op)[0]
        take = self.kernel.op(op.value) if isinstance(op, ConsumerRelease) else None
        return isinstance(take, ConsumerWait) and self.pipelines[take.pipeline].exchange


def side_of(dims: tuple[str, ...]) -> str:
    """The index letter of half of the columns, if a tile has these; else empty text."""
    return next((side for side, dim in SIDES.items() if dim in dims), "")


def near_of(pipeline: Pipeline) -> bool:
    """Whether the address of a tile is computed where the tile is taken: of half of the columns, or of rotated ones,
    beside these."""
    return bool({*pipeline.type.dims} & {*SIDES.values(), "D_ROPE"})
