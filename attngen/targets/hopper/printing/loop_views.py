"""Builds the views of software-pipelined loops over tiles: their ranges, headers and bodies."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from attngen.ir import AXIS_DIM, MEMBER, REVERSED_GROUP, Expr, cdiv, floordiv, only, pipe, tile
from attngen.ir.behaviour import handles
from attngen.ir.names import START_RANKS
from attngen.targets.hopper.configs.barriers import ping_pong_barriers
from attngen.targets.hopper.configs.forward_schedule import FULL_REGISTERS
from attngen.targets.hopper.printing.softmax_views import SoftmaxContext
from attngen.targets.printing.views import LOOP_COMMENTS, Node, names_in
from attngen.tiles.intervals import mentions
from attngen.tiles.order import whole_range

OF_HEADS = "the program's query heads, one after another"
IN_ORDER = "tiles in order: those before and after the full ones are partial"
BOTH_CLASSES = "partial tiles, then full tiles"


def gluon(text: Any) -> Any:
    """Strings as Gluon source: the functions of `tl` become those of `gl`."""
    if isinstance(text, str):
        return re.sub(r"\btl\.", "gl.", text)
    if isinstance(text, dict):
        return {key: gluon(value) for key, value in text.items()}
    return [gluon(part) for part in text] if isinstance(text, (list, tuple)) else text


def _unguarded(node: Node) -> tuple[str, Any, list[Node]]:
    """A view's kind, strings and body, without the softmax guard for rows that have seen no key.

    The guard is ignored when partial and full steps are compared: to run it in all tiles costs four instructions each.
    """
    return node.kind, {**node.text, "guard": False}, node.body


class LoopContext(SoftmaxContext):
    """Builds the views of these loops."""

    @cached_property
    def places_rows(self) -> bool:
        """True if the positions of an instance's rows are recomputed where a tile is masked, and not kept in registers.

        That is so if only masks of partial tiles need them and the loop recomputes its integers in each iteration.
        """
        mine = frozenset({f"{self.kernel.program_axis}_idx"})
        steps = [op.step for op in only(self.kernel.ops(), pipe.PipelinedLoop) if op.recompute]
        needing = [
            op for step in steps for op in self.kernel.block(step).ops if any(mentions(e, mine) for e in op.expressions)
        ]
        consumers = [block for block in self.kernel.warp_groups if block.warp_group and block.warp_group.rows]
        read = any(isinstance(op, tile.Load) for block in consumers for op in block.ops)  # one value per row
        return bool(needing) and not read and all(isinstance(op, tile.Mask) and op.when == "partial" for op in needing)

    def _names_of_loop(self, body: list[Node]) -> set[str]:
        words = names_in(body)
        reads = any(node.kind == "gl_read_tile_start" for node in body)
        return words - {f"{self.kernel.loop_axis}_start", f"{self.kernel.loop_axis}_idx"} if reads else words

    def _position_lines(self, words: set[str]) -> list[str]:
        """Lines that define a tile's position, and those of its rows, as far as `words` name them, from the number that
        came with the tile."""
        start, index = f"{self.kernel.loop_axis}_start", f"{self.kernel.loop_axis}_idx"
        aligned = [f"{start} = _aligned({start}, {AXIS_DIM[self.kernel.loop_axis]})"] if {start, index} & words else []
        return [*aligned, *([f"{index} = {start} + {self.kernel.loop_axis}_off"] if index in words else [])]

    def _define_position(self, body: list[Node]) -> None:
        """Define a tile's position after the line that reads it, or drop that line if the other nodes do not need
        it."""
        words = names_in([node for node in body if node.kind != "gl_read_tile_start"])
        for node in [node for node in body if node.kind == "gl_read_tile_start"]:
            lines = self._position_lines(words)
            node.text["lines"] += lines
            if not lines:
                body.remove(node)

    def _name_counter(self, op: tile.Loop, text: dict[str, Any], body: list[Node]) -> None:
        """Name a loop's variable `_` if nothing reads it, omit a start of 0, and drop the lines that compute or read a
        tile's position if the body does not need it."""
        self._define_position(body)
        if not self._names_of_loop(body) & {f"{op.var}_start", f"{op.var}_idx", f"_{op.var}_row"}:
            text["steps"], text["before"] = [], [line for line in text["before"] if line.startswith(f"{op.var}_stop")]
        words = names_in(body) | set(re.findall(r"\w+", " ".join(text["steps"])))
        text["var"] = text["var"] if text["var"] in words else "_"
        if op.reversed:
            text["range"] = f"{text['stop']} - 1, {text['start']} - 1, -1"
            text["comment"] += ", from the last one to the first"
        else:
            text["range"] = text["stop"] if text["start"] == "0" else f"{text['start']}, {text['stop']}"

    # ------------------------------------------------------------------ pipelines

    @handles(pipe.PipelinedLoop)
    def _pipelined_loop(self, op: pipe.PipelinedLoop, cls: str) -> dict[str, Any]:
        """Lines that count the tiles of each class and find the first one."""
        if op.reversed:
            return self._reversed_counts(op)
        if op.in_order:
            return {"counts": [], "any": "", "first": []}
        if op.odd or op.pair:
            return self._counts_by_twos(op)
        both = bool(op.partial and op.full)
        sizes = {cls: self._number(ranges) for cls, ranges in (("partial", op.partial), ("full", op.full)) if ranges}
        lines = [f"{cls}_tiles = {text}" for cls, text in sizes.items()]
        if not op.first:
            return {"counts": lines if self._one_loop(op) else [], "any": "", "first": []}
        first = []
        for ranges, name in ((op.partial, "first_tile"), (op.full, "first_full" if both else "first_tile")):
            if ranges:
                first += [f"{name} = {self.scalar(ranges[0][0])}", *self._jumps(ranges, name)]
        if both:
            first.append("first_tile = gl.where(partial_tiles > 0, first_tile, first_full)")
        return {"counts": lines, "any": " + ".join(f"{cls}_tiles" for cls in sizes) + " > 0", "first": first}

    def _counts_by_twos(self, op: pipe.PipelinedLoop) -> dict[str, Any]:
        raise NotImplementedError

    def _loop_by_twos(self, op: pipe.PipelinedLoop) -> list[Node]:
        raise NotImplementedError

    def _reversed_counts(self, op: pipe.PipelinedLoop) -> dict[str, Any]:
        """The numbers of tiles of a loop whose partial tiles run in reversed order.

        They also count the tiles that no row of the instance sees (hidden), and those up to its first full one
        (masked).
        """
        lines = [
            f"{cls}_tiles = {self._number(ranges)}" for cls, ranges in (("partial", op.partial), ("full", op.full))
        ]
        for first, end in op.instance_partial:
            last = self.scalar(op.partial[0][1])
            lines += [f"own_end = {self._tile_of_instance(end)}", f"own_full_end = {self._tile_of_instance(first)}"]
            lines += [f"hidden_tiles = {last} - own_end", f"masked_tiles = {last} - own_full_end"]
        first = [f"first_tile = {self._reversed_tile(op, 'hidden_tiles', 'partial_tiles')}"] if op.first else []
        return {"counts": lines, "any": "hidden_tiles < partial_tiles + full_tiles" if op.first else "", "first": first}

    def _tile_of_instance(self, e: Expr) -> str:
        """A bound for the rows of an instance. If calls have chunks of a sequence, it is a tile of the whole sequence,
        and the result its position among those of the call."""
        text = self._of_instance(e)
        if not self.source.traits.places:
            return text
        axis = self.kernel.loop_axis
        return f"_tile_of_call({START_RANKS[axis][0]}, {text}, {AXIS_DIM[axis]}{self.lookup_options})"

    def _of_instance(self, e: Expr) -> str:
        """An expression with the rows of an instance in place of those of the program."""
        return re.sub(rf"\b{AXIS_DIM[self.kernel.program_axis]}\b", "ROWS", self.scalar(e))

    @handles(tile.Mask)
    def _mask(self, op: tile.Mask, cls: str) -> dict[str, Any]:
        return {**super()._mask(op, cls), "unswitch": "" if op.unswitch is None else self._of_instance(op.unswitch)}

    def _reversed_tile(self, op: pipe.PipelinedLoop, at: str, partial: str) -> str:
        """The tile at position `at`, where the first `partial` tiles are partial. If `partial` is empty, so is this
        tile."""
        lo, hi = self._term(op.full[0][0]), self._term(op.partial[0][1])
        full = f"{at} - partial_tiles" if lo == "0" else f"{lo} + {at} - partial_tiles"
        return f"gl.where({at} < {partial}, {hi} - 1 - {at}, {full})" if partial else f"{hi} - 1 - {at}"

    def _number(self, ranges: Any) -> str:
        """The number of tiles in ranges."""
        lengths = [self.scalar(hi) if lo == 0 else f"{self._term(hi)} - {self._term(lo)}" for lo, hi in ranges]
        return lengths[0] if len(lengths) == 1 else " + ".join(f"({text})" if " " in text else text for text in lengths)

    def _term(self, e: Expr) -> str:
        text = self.scalar(e)
        return text if text.isidentifier() or text.isdigit() else f"({text})"

    def _jumps(self, ranges: Any, at: str) -> list[str]:
        """Lines that move a position past the gaps between concatenated ranges."""
        pairs = zip(ranges, ranges[1:])
        return [
            f"{at} = gl.where({at} < {self.scalar(end)}, {at}, {at} + ({self.scalar(lo)} - {self._term(end)}))"
            for (_, end), (lo, _) in pairs
        ]

    def _bodies(self, op: pipe.PipelinedLoop, text: dict[str, Any]) -> list[Node]:
        """The bodies of a pipelined loop: skipped tiles, the first tile, loops over the others, the last product."""
        if op.odd or op.pair:
            text["about"] = {body: self.kernel.block(body).about for body in op.bodies}
            return [Node("body", {}, []), *self._loop_by_twos(op)]
        first = self.block(op.first, "partial") if op.first else []
        self._define_position(first)
        words = self._names_of_loop(first)
        start = [self._read_tile(op) if op.tile_indices else f"{op.var}_tile = {self._tile(op, 'first_tile')}"]
        start += self._tile_position(op.var, f"{op.var}_tile", words)
        text["start"] = start if words & self._where(op) else []
        text["first"] = text["first"] if text["start"] else []
        if op.listed and text["start"]:
            # The tile's number comes with the tile, or from device memory: it is read right before its first use.
            early = 0 if op.tile_indices else 1
            at = next(i for i, node in enumerate(first) if names_in([node]) & self._where(op))
            first.insert(at, Node("lines", {"lines": text["start"][early:]}))
            text["start"] = text["start"][:early]
        text["about"] = {body: self.kernel.block(body).about for body in op.bodies}
        skipped = []
        if op.skip:
            over = {
                "before": [],
                "steps": [],
                "var": "_",
                "range": "hidden_tiles",
                "comment": self.kernel.block(op.skip).about,
            }
            skipped = [Node("loop", over, self.block(op.skip, "full"))]
        merged = (
            self._reversed_loop(op) if op.reversed else self._loop_in_order(op) if op.in_order else self._one_loop(op)
        )
        loops = [merged] if merged else self._loops_by_class(op)
        last = self.block(op.last, "full") if op.last else []
        loops = [self._of_heads(op, loops)] if op.heads and not op.by_tile else loops
        return [Node("body", {}, skipped), Node("body", {}, first), *loops, Node("body", {}, last)]

    def _loops_by_class(self, op: pipe.PipelinedLoop) -> list[Node]:
        """One loop over the partial tiles and one over the full ones, both without a first tile that is peeled off."""
        loops = []
        for loop in op.by_class:
            cls, ranges = loop.cls, loop.ranges
            if not ranges or (op.first and cls == "partial" and self._is_one(ranges)):
                continue
            body = self.block(op.step, cls)
            header: dict[str, Any] = self._loop(loop, cls)
            (lo, hi), *more = header["ranges"]
            later = "1" if cls == "partial" or not op.partial else "gl.where(partial_tiles > 0, 0, 1)"
            header["ranges"] = (
                [(later if lo == "0" else f"{lo} + {later}", hi), *more] if op.first else header["ranges"]
            )
            self._loop_header(loop, header, body)
            header["comment"] = LOOP_COMMENTS[cls]
            self._name_counter(loop, header, body)
            loops.append(Node("loop", gluon(header), self._round_robin(op, body)))
        return loops

    def _round_robin(self, op: pipe.PipelinedLoop, body: list[Node]) -> list[Node]:
        """The views of an iteration. In a round-robin loop, only the instance that owns the next stage runs it, and
        all instances advance the stage."""
        if not op.round_robin:
            return body
        pipeline = self.kernel.op(op.round_robin)
        assert isinstance(pipeline, pipe.Pipeline)
        return [
            Node("round_robin", {"pipeline": self._short(op.round_robin), "stages": self.scalar(pipeline.stages)}, body)
        ]

    def _of_heads(self, op: pipe.PipelinedLoop, loops: list[Node]) -> Node:
        """A loop over the query heads of a group that the program has, around those over tiles."""
        ((first, end),) = op.heads
        var = MEMBER if MEMBER in names_in(loops) else "_"
        span = f"{self.scalar(first)}, {self.scalar(end)}"
        return Node("loop", {"before": [], "steps": [], "var": var, "range": span, "comment": OF_HEADS}, loops)

    def _reversed_loop(self, op: pipe.PipelinedLoop) -> Node:
        """One loop over the tiles of both classes, with the partial ones in reversed order."""
        begin = ("hidden_tiles + 1" if op.first else "hidden_tiles") if op.skip else "0"
        body, own, _ = parts = self._differing(op)
        always = bool(self._where(op) & self._names_of_loop([node for node in body if node not in own]))
        places = [f"{op.var}_tile = {self._reversed_tile(op, 'at', 'partial_tiles' if always else '')}"]
        return self._loop_of_both(op, parts, places, "at < masked_tiles", begin, always)

    def _loop_in_order(self, op: pipe.PipelinedLoop) -> Node:
        """One loop over the tiles of both classes, in order. If a tile's class is not known, all tiles are masked."""
        whole, tile = whole_range((*op.partial, *op.full)), f"{op.var}_tile"
        assert whole is not None
        body, own, _ = parts = self._differing(op)
        (lo, hi), *_ = op.full or (whole,)
        at = "at" if op.listed else tile
        outside = [f"{at} < {self._term(lo)}"] * (lo != whole[0]) + [f"{at} >= {self._term(hi)}"] * (hi != whole[1])
        condition = " | ".join(f"({text})" if len(outside) > 1 else text for text in outside)
        always = bool(self._where(op) & self._names_of_loop([node for node in body if node not in own]))
        loop = self._loop_of_both(op, parts, [], condition, "0", always)
        if op.recompute and self.places_rows:
            axis, unswitch = (
                self.kernel.program_axis,
                next((node for node in loop.body if node.kind == "unswitch"), None),
            )
            lines = unswitch.text["lines"] if unswitch else loop.text["steps"]
            lines.append(f"{axis}_idx = {axis}_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))")
        first, end, comment = self._term(whole[0]), self.scalar(whole[1]), IN_ORDER if own else "tiles in order"
        text: dict[str, Any] = {"var": at, "range": end if first == "0" else f"{first}, {end}", "comment": comment}
        if op.listed:
            text["before"] = gluon([self._ahead(op, first, f"{end} > {first}")])
            text["steps"] = [
                f"{tile} = {op.var}_ahead",
                *gluon([self._ahead(op, "at + 1", f"{end} > at + 1")]),
                *loop.text["steps"],
            ]
        if self.kernel.grid[0].reversed_group:
            last = f"{end} - 1" if first == "0" else f"{first} + {end} - 1"
            in_order = f"{tile} = gl.where({REVERSED_GROUP} > 0, {last} - at, at)"
            text |= {
                "var": "at",
                "steps": [in_order, *loop.text["steps"]],
                "comment": f"{comment}; in the last heads in reversed order",
            }
        made = Node("loop", {**loop.text, **text, "recompute": op.recompute}, self._round_robin(op, loop.body))
        return self._by_tile(op, made, first, end) if op.by_tile else made

    def _by_tile(self, op: pipe.PipelinedLoop, loop: Node, first: str, end: str) -> Node:
        """One loop over (tile, head) pairs in place of a loop over heads inside one over tiles, which is slower."""
        ((low, high),) = op.heads
        at, begin, past = loop.text["var"], self.scalar(low), self.scalar(high)
        tiles = end if first == "0" else f"({end} - {first})"
        text = {
            "var": "_",
            "range": f"{tiles} * ({past} - {begin})",
            "before": [*loop.text["before"], f"{at}, {MEMBER} = {first}, {begin}"],
            "comment": f"{loop.text['comment']}; each for all heads of the program",
        }
        after = Node("lines", {"lines": [f"{at}, {MEMBER} = _next_head({at}, {MEMBER}, {begin}, {past})"]})
        return Node("loop", {**loop.text, **text}, [*loop.body, after])

    def _loop_of_both(
        self,
        op: pipe.PipelinedLoop,
        parts: tuple[list[Node], list[Node], int],
        tile: list[str],
        condition: str,
        begin: str,
        always: bool = False,
    ) -> Node:
        """One loop over the tiles of both classes, in which ops for partial tiles stand under a condition.

        So do the lines that compute the tile's position, unless all tiles need it (`always`).
        """
        body, own, at = parts
        words = self._names_of_loop(body)
        places = [*tile, *self._tile_position(op.var, f"{op.var}_tile", words)]
        if any(node.kind == "gl_read_tile_start" for node in body):
            places = places if words & {f"{op.var}_tile", *self._where(op)} else []
            others = [node for node in body if node not in own and node.kind != "gl_read_tile_start"]
            if always or names_in(others) & self._where(op):
                self._define_position(body)
            else:
                places += self._position_lines(names_in(own))
        text = gluon({"condition": condition, "lines": [] if always else places})
        unswitch = [Node("unswitch", text, own)] if own else []
        end = "partial_tiles + full_tiles"
        header = {"before": [], "steps": places if always else [], "var": "at", "comment": BOTH_CLASSES}
        header["range"] = end if begin == "0" else f"{begin}, {end}"
        return Node("loop", gluon(header), [*body[:at], *unswitch, *body[at + len(own) :]])

    @staticmethod
    def _where(op: pipe.PipelinedLoop) -> set[str]:
        """The variables of a tile's position."""
        return {f"{op.var}_start", f"{op.var}_idx", f"_{op.var}_row"}

    def _differing(self, op: pipe.PipelinedLoop) -> tuple[list[Node], list[Node], int]:
        """`_differing_in` of the block @step of a loop."""
        return self._differing_in(op.step)

    def _differing_in(self, name: str) -> tuple[list[Node], list[Node], int]:
        """Return a block's views for partial tiles, those of them that only partial tiles need (none if they cannot be
        separated), and the index at which these start."""
        body, left, own = self.block(name, "partial"), self.block(name, "full"), []
        for node in body:
            if left and _unguarded(node) == _unguarded(left[0]):
                left.pop(0)
            else:
                own.append(node)
        at = body.index(own[0]) if own else 0
        separable = {node.kind for node in own} <= {"map", "mask", "smem_load", "zero_out_of_bounds"} and body[
            at : at + len(own)
        ] == own
        return (body, own, at) if separable and not left else (body, [], 0)

    def _is_one(self, ranges: Any) -> bool:
        """True if ranges have at most one tile, cut by the end of a tensor. Then @first runs it, and no loop over
        others is needed."""
        if len(ranges) > 1 or ping_pong_barriers(self.source) > FULL_REGISTERS:
            return False
        lo, hi = (self._made(bound) for bound in ranges[0])
        return isinstance(lo, floordiv) and isinstance(hi, cdiv) and lo.args == hi.args

    def _made(self, bound: Expr) -> Expr:
        """The expression of the map that a bound names, or whose result's position it names; other bounds stay as they
        are."""
        made = self.kernel.op(str(bound)) if str(bound) in self.kernel.graph else None
        if isinstance(made, tile.ListPosition) and self.source.traits.places:
            return self._made(made.tile)
        return made.expr if isinstance(made, tile.Map) else bound

    def _one_loop(self, op: pipe.PipelinedLoop) -> Node | None:
        """One loop over the tiles of both classes if they differ only in masks, so the code of a tile is there once.

        None if threads load a number for each score, or if tiles of several ranges read their position. Also None in
        ping-pong order: with three instances, which share the registers, ptxas spills if the two loops are merged; with
        two it was not tried.
        """
        separate = op.first and (ping_pong_barriers(self.source) or self._is_one(op.partial))
        if not op.partial or not op.full or separate or (op.listed and len(op.partial) > 1):
            return None
        _, own, _ = parts = self._differing(op)
        always = bool(self._where(op) & self._names_of_loop(self.block(op.step, "full")))
        if not own or (
            always and (self.source.traits.reads_pairs or op.listed or len(op.partial) > 1 or len(op.full) > 1)
        ):
            return None
        lo, tile = self._term(op.partial[0][0]), f"{op.var}_tile"
        places = [f"{tile} = at" if lo == "0" else f"{tile} = {lo} + at", *self._jumps(op.partial, tile)]
        if op.tile_indices:
            places = [self._read_tile(op)]
        elif op.listed:
            following = self._ahead(op, "at + 1" if lo == "0" else f"{lo} + at + 1", "at + 1 < partial_tiles")
            places = [f"{tile} = {op.var}_ahead", following]
        if always:
            full = self._term(op.full[0][0])
            rest = "at - partial_tiles" if full == "0" else f"{full} + at - partial_tiles"
            places = [f"{tile} = gl.where(at < partial_tiles, {'at' if lo == '0' else f'{lo} + at'}, {rest})"]
        loop = self._loop_of_both(op, parts, places, "at < partial_tiles", "1" if op.first else "0", always)
        if op.listed and not op.tile_indices:
            loop.text["before"] += gluon([self._ahead(op, "1" if lo == "0" else f"{lo} + 1", "partial_tiles > 1")])
        return loop

    def _read_tile(self, op: pipe.PipelinedLoop) -> str:
        """The line that reads the number of a listed tile from the metadata of its stage."""
        pipeline = self.kernel.op(str(op.tile_indices))
        assert isinstance(pipeline, pipe.Pipeline)
        stage = "0" if pipeline.stages == 1 else f"{self._short(str(pipeline.metadata_of))}_stage"
        return f"{op.var}_tile = _read_index({self._short(pipeline.name)}_smem.index({stage}))"

    @staticmethod
    def _short(pipeline: str) -> str:
        """`K` for %K_pipeline, as in `K_smem`."""
        return pipeline.removesuffix("_pipeline")

    def _ahead(self, op: pipe.PipelinedLoop, at: str, listed: str) -> str:
        """The line that reads the number of the listed tile at a position, one iteration ahead."""
        assert op.listed
        return f"{op.var}_ahead = _tile_at({self.var(op.listed)}, {at}, {listed}, BLOCK // {AXIS_DIM[op.var]})"

    def _tile(self, op: pipe.PipelinedLoop, at: str) -> str:
        if not op.listed:
            return at
        return f"_tile_at({self.var(op.listed)}, {at}, True, BLOCK // {AXIS_DIM[op.var]})"
