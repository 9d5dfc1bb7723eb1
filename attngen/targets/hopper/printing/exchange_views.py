"""What the templates see where two roles share the columns of a latent: tiles that pass to and fro, turns by twos, parts of keys."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from attngen.ir.graph import DEALT
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, SIDES, Block, Op
from attngen.ir.pipe import Clear, Fill, Give, Pipeline, Ranges, Read, Ring, Share, Take
from attngen.targets.hopper.configs.common import clearing
from attngen.targets.hopper.configs.mla_decode import is_of_latents
from attngen.targets.hopper.configs.sm90 import NAMED_BARRIERS, THREADS
from attngen.targets.hopper.printing.loop_views import PipelineContext, gluon
from attngen.targets.printing.split_kv import dealt_by
from attngen.targets.printing.views import Node, names_in

HALF = "HALF_V"  # the constant that says how many columns half of those of a latent are
BY_TWOS = {
    True: "tiles that the mask or the end of the sequence cuts, then those with nothing to mask, two by two",
    False: "tiles of keys, two by two",
}


class RelayContext(PipelineContext):
    """Views of these ops."""

    rings: dict[str, Ring]
    mine: Block  # the role that is being printed

    def _free(self, ring: str) -> str:
        raise NotImplementedError

    @property
    def of_latents(self) -> bool:
        return is_of_latents(self.kernel)

    # ------------------------------------------------------------------ tiles that pass to and fro

    def _relay_barrier(self, op: Share | Take) -> str:
        """The named barrier at which who shares a tile arrives, and who takes it waits: each of the two roles has one to share by."""
        roles = [
            role.name for role in self.kernel.roles if any(o.ring == op.ring for o in self.kernel.within(role.name) if isinstance(o, Share))
        ]
        mine = next(at for at, role in enumerate(roles) if any(o is op for o in self.kernel.within(role)))
        return str(int(self._free(op.ring)) + (mine if isinstance(op, Share) else 1 - mine))

    def _share_in_relay(self, op: Share) -> dict[str, Any]:
        stored = [f"{self._short(op.ring)}_ring.index(0).store(unpack({self.var(op.value)}, dtype))"]
        stored += [f"{self._short(ring)}_ring.index(0).store({self.var(ref)})" for ring, ref in op.beside]
        return {"ring": self._short(op.ring), "relay": True, "barrier": self._relay_barrier(op), "threads": 2 * THREADS, "stored": stored}

    def _take_in_relay(self, op: Take) -> dict[str, Any]:
        text = {"ring": self._short(op.ring), "relay": True, "shared": True, "var": self.var(op.name)}
        return {**text, "barrier": self._relay_barrier(op), "threads": 2 * THREADS}

    def _share_rows(self, op: Share) -> dict[str, Any]:
        """A number of each row, which another role takes."""
        short = self._short(op.ring)
        stored = [f"{short}_ring.index(0).store({self.var(op.value)})"]
        text = {"ring": short, "index": "0", "slots": "1", "phase": f"{short}_phase", "in_phase": "", "handed": True, "waits": True}
        return {**text, "relay": False, "stored": stored}

    def _is_of_rows(self, ring: str) -> bool:
        """Whether a ring passes a number of each row."""
        return len(self.rings[ring].type.dims) == 1 and not self.rings[ring].beside

    def _read_of_rows(self, op: Read) -> bool:
        return self.rings[op.ring].type.dims == (AXIS_DIM[self.kernel.own_axis],)

    # ------------------------------------------------------------------ rows past the end

    def _idle(self, op: Op, cls: str) -> bool:
        return cls == "full" if isinstance(op, Clear) else super()._idle(op, cls)

    def _clear(self, op: Clear, cls: str) -> dict[str, Any]:
        """Tiles that are cleared one after another, if the sequence ends in them. After that the threads of the role meet."""
        role = next(role.name for role in self.kernel.roles if any(o is op for o in self.kernel.within(role.name)))
        roles, axis = clearing(self.kernel), self.kernel.loop_axis
        return {
            "tiles": [self.var(o.value) for o in self._cleared_with(op)],
            "left": f"{AXIS_EXTENT[axis]} - {axis}_start",
            "rows": AXIS_DIM[axis],
            "barrier": NAMED_BARRIERS - len(roles) + roles.index(role),
            "threads": THREADS,
        }

    def _cleared_with(self, op: Clear) -> list[Clear]:
        """The ops that clear tiles one after another, of which this is one."""
        ops = self.kernel.block_of(op).ops
        runs = [[o for o in run if isinstance(o, Clear)] for _, run in groupby(ops, lambda o: isinstance(o, Clear))]
        return next(run for run in runs if op in run)

    # ------------------------------------------------------------------ turns by twos

    def _counts_by_twos(self, op: Pipeline) -> dict[str, Any]:
        sizes = {cls: self._number(ranges) for cls, ranges in (("partial", op.partial), ("full", op.full)) if ranges}
        lines = [f"{cls}_tiles = {text}" for cls, text in sizes.items()]
        return {"counts": [*lines, f"tiles = {' + '.join(f'{cls}_tiles' for cls in sizes)}"], "any": "", "first": [], "start": []}

    def _loop_by_twos(self, op: Pipeline) -> list[Node]:
        """A loop over even tiles, in whose turns the odd one comes after the even one; or both together, and the last even one alone."""
        even, other = self._turn_with_comment(op, op.step, "at"), self._turn_with_comment(op, op.odd or op.pair, "at + 1")
        masks = any(node.kind == "cut" for node in (*even, *other))
        header = {"before": [], "steps": [], "var": "at", "range": "0, tiles, 2", "comment": BY_TWOS[masks]}
        there = "at + 1 < tiles"
        if op.odd:
            body = [*even, Node("cut", {"condition": there, "lines": []}, other)]
        else:
            body = [Node("choice", {"condition": there}, [Node("body", {}, other), Node("body", {}, even)])]
        return [Node("loop", gluon(header), body)]

    def _leaders_by_twos(self) -> dict[str, str]:
        """Rings from which a role takes in the same bodies: all have the counter of the one that is given back last."""
        loops = [op for op in self.kernel.within(self.mine.name) if isinstance(op, Pipeline)]
        homes: dict[str, list[str]] = {}
        last: dict[str, int] = {}
        for body in dict.fromkeys(body for loop in loops for body in loop.bodies):
            ops = self.kernel.block(body).ops
            rings = {op.name: op.ring for op in ops if isinstance(op, Take) and not self.rings[op.ring].relay}
            for at, op in enumerate(ops):
                if isinstance(op, Give) and op.value in rings:
                    homes.setdefault(rings[op.value], []).append(body)
                    last[rings[op.value]] = at
        found = {ring: max((r for r in homes if homes[r] == of), key=lambda r: last[r]) for ring, of in homes.items()}
        return {ring: leader for ring, leader in found.items() if ring != leader}

    def _turn_with_comment(self, op: Pipeline, body: str, at: str) -> list[Node]:
        """The views of a turn, after what it is for."""
        about = self.kernel.block(body).about
        return [*([Node("lines", {"lines": [f"# {about}"]})] if about else []), *self._turn_of(op, body, at)]

    def _turn_of(self, op: Pipeline, body: str, at: str) -> list[Node]:
        """The views of a turn. What only partial tiles need is under a condition, with the place of the tile."""
        both = bool(op.partial and op.full)
        nodes, own, first = self._differing_in(body) if both else (self.block(body, "partial" if op.partial else "full"), [], 0)
        always = bool(self._where(op) & names_in([node for node in nodes if node not in own]))
        place = gluon({"lines": self._place_by_twos(op, at, not always, names_in(nodes))})
        start = [Node("lines", place)] if always else []
        if not own:
            return [*start, *nodes]
        cut = Node("cut", {"condition": f"{at} < partial_tiles", "lines": [], **({} if always else place)}, own)
        return [*start, *nodes[:first], cut, *nodes[first + len(own) :]]

    def _place_by_twos(self, op: Pipeline, at: str, partial: bool, words: set[str]) -> list[str]:
        """Where the tile of a turn is; of a partial one, if that is known."""
        tile, behind = f"{op.var}_tile", f"{at} - partial_tiles" if op.partial else at
        places = {"partial": self._tile_at(op.partial, at, f"partial_{tile}"), "full": self._tile_at(op.full, behind, f"full_{tile}")}
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
        """What the producer finds out before all parts, and of the part with the number `pid`; heads run faster than parts."""
        item, of_place, extents = self._split_place("pid")
        given = ", ".join(dealt_by(self.kernel))
        before = [
            f"q_tiles = {self.scalar(self.kernel.grid[0].extent)}",
            f"first_work = work_of(CACHE_SEQLENS, gl.arange(0, 128, layout=lengths_layout()), {given})",
            f"unit = unit_of_parts(CACHE_SEQLENS, first_work, {given})",
            " * ".join([f"places = parts_in_all(CACHE_SEQLENS, first_work, unit, {given})", *extents]),
        ]
        lines = [f"b, part, {', '.join(DEALT)} = part_of(CACHE_SEQLENS, first_work, {item}, unit, {given})"]
        return gluon(before), gluon([*lines, *of_place])

    # ------------------------------------------------------------------ places and columns

    def _place_of_fill(self, op: Fill) -> str:
        """The coordinates of a tile's first element: of a page, or of a sequence; of half of the columns."""
        *heads, rows, columns = op.src.index
        tensor, axis = self.kernel.type_of(op.src.tensor), str(rows)
        start = f"{axis}_start"
        if op.page:
            size = tensor.dims[2]
            blocks = {row.rows_of(axis) for row in self.module.rows(self.kernel.name, self.kernel.backend)}
            start = "0" if blocks == {int(size)} else f"{start} % {size}"
        column = HALF if str(columns) == list(SIDES)[-1] else "0"
        return ", ".join([*([self.var(op.page)] if op.page else []), *map(self.scalar, heads), start, column])

    def _threads(self, ring: str) -> str:
        """The threads that meet where a slot of a ring is free: of who fills it, and of all who take from it."""
        if not self.of_latents:
            return "THREADS"
        using = (Fill, Take)
        roles = [b.role for b in self.kernel.roles if any(isinstance(o, using) and o.ring == ring for o in self.kernel.within(b.name))]
        return str(sum(32 * role.warps * role.copies for role in roles if role))

    def _is_silent(self, op: Op) -> bool:
        """Whether nothing is printed for an op: who gives back a tile that passes to and fro tells nobody; tiles are cleared together."""
        if isinstance(op, Clear):
            return op is not self._cleared_with(op)[0]
        take = self.kernel.op(op.value) if isinstance(op, Give) else None
        return isinstance(take, Take) and self.rings[take.ring].relay


def side_of(dims: tuple[str, ...]) -> str:
    """The index letter of half of the columns, if a tile has these; else empty text."""
    return next((side for side, dim in SIDES.items() if dim in dims), "")


def near_of(ring: Ring) -> bool:
    """Whether the address of a tile is computed where the tile is taken: of half of the columns, or of rotated ones, beside these."""
    return bool({*ring.type.dims} & {*SIDES.values(), "D_ROPE"})
