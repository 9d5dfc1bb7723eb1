"""Builds the views of latent decoding, where two warp groups split the latent's columns.

They exchange tiles of P, loop over key tiles in pairs, and process one split of the keys after another.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from attngen.ir import AXIS_DIM, AXIS_EXTENT, SPLIT_SYMBOLS, Op, Ranges, only, pipe
from attngen.ir.behaviour import handles
from attngen.targets.hopper.configs.barriers import zeroing_warp_groups
from attngen.targets.hopper.configs.mla_decode import is_mla_decode
from attngen.targets.hopper.configs.sm90 import NAMED_BARRIERS, THREADS
from attngen.targets.hopper.printing.loop_views import LoopContext, gluon
from attngen.targets.printing.split_kv import split_args
from attngen.targets.printing.views import Node, names_in

BY_TWOS = {
    True: "partial tiles, then full tiles, two per iteration",
    False: "tiles of keys, two per iteration",
}


class ExchangeContext(LoopContext):
    """Builds the views of these ops."""

    @property
    def of_latents(self) -> bool:
        return is_mla_decode(self.source)

    # ------------------------------------------------------------------ rows past the end

    def _idle(self, op: Op, cls: str) -> bool:
        return cls == "full" if isinstance(op, pipe.ZeroOutOfBounds) else super()._idle(op, cls)

    @handles(pipe.ZeroOutOfBounds)
    def _zero_out_of_bounds(self, op: pipe.ZeroOutOfBounds, cls: str) -> dict[str, Any]:
        """Consecutive tiles whose rows past the end are zeroed, after which the threads of the warp group meet."""
        warp_group = next(
            warp_group.name
            for warp_group in self.kernel.warp_groups
            if any(o is op for o in self.kernel.within(warp_group.name))
        )
        warp_groups, axis = zeroing_warp_groups(self.source), self.kernel.loop_axis
        return {
            "tiles": [self.var(o.value) for o in self._zeroed_with(op)],
            "left": f"{AXIS_EXTENT[axis]} - {axis}_start",
            "rows": AXIS_DIM[axis],
            "barrier": NAMED_BARRIERS - len(warp_groups) + warp_groups.index(warp_group),
            "threads": THREADS,
        }

    def _zeroed_with(self, op: pipe.ZeroOutOfBounds) -> list[pipe.ZeroOutOfBounds]:
        """The run of consecutive zero_out_of_bounds ops that contains this one."""
        ops = self.kernel.block_of(op).ops
        runs = [
            list(only(run, pipe.ZeroOutOfBounds))
            for _, run in groupby(ops, lambda o: isinstance(o, pipe.ZeroOutOfBounds))
        ]
        return next(run for run in runs if op in run)

    # ------------------------------------------------------------------ loops over pairs of tiles

    def _counts_by_twos(self, op: pipe.PipelinedLoop) -> dict[str, Any]:
        sizes = {cls: self._number(ranges) for cls, ranges in (("partial", op.partial), ("full", op.full)) if ranges}
        lines = [f"{cls}_tiles = {text}" for cls, text in sizes.items()]
        return {
            "counts": [*lines, f"tiles = {' + '.join(f'{cls}_tiles' for cls in sizes)}"],
            "any": "",
            "first": [],
            "start": [],
        }

    def _loop_by_twos(self, op: pipe.PipelinedLoop) -> list[Node]:
        """A loop over pairs of tiles: each iteration runs the even tile, then the odd one if there is one; or it runs
        both together, and the last even tile by itself."""
        even, other = (
            self._step_with_comment(op, op.step, "at"),
            self._step_with_comment(op, op.odd or op.pair, "at + 1"),
        )
        masks = any(node.kind == "unswitch" for node in (*even, *other))
        header = {"before": [], "steps": [], "var": "at", "range": "0, tiles, 2", "comment": BY_TWOS[masks]}
        has_odd = "at + 1 < tiles"
        if op.odd:
            body = [*even, Node("unswitch", {"condition": has_odd, "lines": []}, other)]
        else:
            body = [Node("choice", {"condition": has_odd}, [Node("body", {}, other), Node("body", {}, even)])]
        return [Node("loop", gluon(header), body)]

    def _step_with_comment(self, op: pipe.PipelinedLoop, body: str, at: str) -> list[Node]:
        """The views of one tile's step, after a comment with its purpose."""
        about = self.kernel.block(body).about
        return [*([Node("lines", {"lines": [f"# {about}"]})] if about else []), *self._step(op, body, at)]

    def _step(self, op: pipe.PipelinedLoop, body: str, at: str) -> list[Node]:
        """The views of one tile's step. Ops that only partial tiles need stand under a condition; so does the tile's
        position, unless other ops read it."""
        both = bool(op.partial and op.full)
        nodes, own, first = (
            self._differing_in(body) if both else (self.block(body, "partial" if op.partial else "full"), [], 0)
        )
        always = bool(self._where(op) & names_in([node for node in nodes if node not in own]))
        place = gluon({"lines": self._place_by_twos(op, at, not always, names_in(nodes))})
        start = [Node("lines", place)] if always else []
        if not own:
            return [*start, *nodes]
        text = {"condition": f"{at} < partial_tiles", "lines": [], **({} if always else place)}
        return [*start, *nodes[:first], Node("unswitch", text, own), *nodes[first + len(own) :]]

    def _place_by_twos(self, op: pipe.PipelinedLoop, at: str, partial: bool, words: set[str]) -> list[str]:
        """Lines that compute where an iteration's tile is; `partial` says that it is known to be a partial one."""
        tile, behind = f"{op.var}_tile", f"{at} - partial_tiles" if op.partial else at
        places = {
            "partial": self._tile_at(op.partial, at, f"partial_{tile}"),
            "full": self._tile_at(op.full, behind, f"full_{tile}"),
        }
        if partial or not (op.partial and op.full):
            (text, lines) = places["partial" if op.partial else "full"]
            lines = [*lines, f"{tile} = {text}"]
        else:
            (partial_tile, before), (full_tile, after) = places.values()
            lines = [*before, *after, f"{tile} = gl.where({at} < partial_tiles, {partial_tile}, {full_tile})"]
        return [*lines, *self._tile_position(op.var, tile, words)]

    def _tile_at(self, ranges: Ranges, at: str, name: str) -> tuple[str, list[str]]:
        """The tile at a position in concatenated ranges, and the lines before it, which set `name` if there are
        several ranges."""
        if not ranges:
            return "", []
        first = at if ranges[0][0] == 0 else f"{self._term(ranges[0][0])} + {at}"
        return (first, []) if len(ranges) == 1 else (name, [f"{name} = {first}", *self._jumps(ranges, name)])

    # ------------------------------------------------------------------ split-KV

    def _split_lines(self) -> tuple[list[str], list[str]]:
        """Lines that the producer runs once, and lines that it runs for the split with the number `pid`.

        Heads vary faster than splits.
        """
        item, of_place, extents = self._split_place("pid")
        args = ", ".join(split_args(self.kernel))
        before = [
            f"q_tiles = {self.scalar(self.kernel.grid[0].extent)}",
            f"first_work = _work_of(CACHE_SEQLENS, gl.arange(0, 128, layout=_lengths_layout()), {args})",
            f"unit = _split_size(CACHE_SEQLENS, first_work, {args})",
            " * ".join([f"places = _total_splits(CACHE_SEQLENS, first_work, unit, {args})", *extents]),
        ]
        lines = [
            f"b, KV_split, {', '.join(SPLIT_SYMBOLS)} = _split_of(CACHE_SEQLENS, first_work, {item}, unit, {args})"
        ]
        return gluon(before), gluon([*lines, *of_place])

    def _is_silent(self, op: Op) -> bool:
        """True if nothing is printed for an op: the first of a run of zero_out_of_bounds ops prints them all."""
        return isinstance(op, pipe.ZeroOutOfBounds) and op is not self._zeroed_with(op)[0]
