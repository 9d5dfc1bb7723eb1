"""Builds the views of wgmma, of ping-pong barriers, and of values in accumulator layouts."""

from __future__ import annotations

import re
from typing import Any

from attngen.ir import SIDES, only, pipe, tile
from attngen.ir.behaviour import handles
from attngen.targets.hopper.configs.sm90 import ROWS
from attngen.targets.hopper.printing.statements import StatementContext


class WgmmaContext(StatementContext):
    """Builds the views of products and their accumulators."""

    @handles(pipe.Wgmma)
    def _wgmma(self, op: pipe.Wgmma, cls: str) -> dict[str, Any]:
        a, b = self.kernel.type_of(op.a), self.kernel.type_of(op.b)
        left = [var if a.dims[1] == op.over else f"{var}.permute((1, 0))" for var in self._tile_vars(op.a)]
        right = [var if b.dims[0] == op.over else f"{var}.permute((1, 0))" for var in self._tile_vars(op.b)]
        spread = (
            "PARTS"
            if op.over in pipe.TILE_DIM.values()
            else "ACC"
            if {"D_QK", "D_V", *SIDES.values()} & {*op.type.unpadded}
            else "SCORES"
        )
        if self._widths(op.type):
            return {"products": self._products(op, left[0], right)}
        if op.type.dims[0] == pipe.SLICE_DIM["BLOCK_Q"]:
            left = [f"{self.var(op.a)}.slice(_WARP_GROUP * {ROWS}, {ROWS}, 1).permute((1, 0))"]
        if op.type.dims[1] == pipe.SLICE_DIM["D_QK"]:
            columns = self._dims(op.type.dims)[1]
            right = [f"{self.var(op.b)}.slice(_WARP_GROUP * {columns}, {columns}, 1)"]
        shape = ", ".join(self._dims(op.type.dims))
        start = self.var(op.acc) if op.acc else f"gl.zeros([{shape}], gl.float32, {spread})"
        return {
            "products": [
                {"var": self.var(op.name), "pairs": list(zip(left, right)), "start": start, "adds": bool(op.acc)}
            ]
        }

    def _products(self, op: pipe.Wgmma, left: str, right: list[str]) -> list[dict[str, Any]]:
        """The products that make the pieces of an accumulator.

        Each takes a piece of the second operand; for dQ, the instance's own piece and its share of the piece between.
        """
        widths, parts = self._widths(op.type), self._parts(op.name)
        starts = self._parts(op.acc) if op.acc else []
        if op.type.dims[1] == pipe.SLICE_DIM["D_QK"]:
            columns, rows = widths[1], self._dims(op.type.dims)[0]
            right = [
                f"{right[0]} if _WARP_GROUP == 0 else {right[2]}",
                f"{right[1]}.slice(_WARP_GROUP * {columns}, {columns}, 1)",
            ]
            starts = [f"gl.zeros([{rows}, {n}], gl.float32, {layout})" for n, layout in zip(widths, ("PARTS", "REST"))]
        return [
            {"var": var, "pairs": [(left, b)], "start": start, "adds": bool(op.acc)}
            for var, b, start in zip(parts, right, starts)
        ]

    @handles(pipe.WgmmaWait)
    def _wgmma_wait(self, op: pipe.WgmmaWait, block: str) -> dict[str, Any]:
        ops = self.kernel.block(block).ops
        names = [o.name for o in ops]
        since = ops[names.index(op.value) + 1 : names.index(op.name)]
        awaited = {o.value for o in only(since, pipe.WgmmaWait)}
        pending = sum(self._count_of(o) for o in only(since, pipe.Wgmma) if o.name not in awaited)
        held = [self.var(name) for name in op.keep_alive]
        return {
            "vars": ", ".join(self._parts(op.name) + held),
            "pending": pending,
            "deps": ", ".join(self._parts(op.value) + held),
        }

    def _count_of(self, op: pipe.Wgmma) -> int:
        """The number of products that an op issues: one per piece of the accumulator, or of the right operand."""
        return len(self._widths(op.type)) or len(self._tile_vars(op.b))

    @handles(tile.Init)
    def _init(self, op: tile.Init, cls: str) -> dict[str, Any]:
        text = super()._init(op, cls)
        del text["shape"]
        layouts = {
            (): "gl.SliceLayout(1, SCORES)",
            ("D_V",): "ACC",
            ("D_QK",): "ACC",
            (pipe.PARTIALS,): "_PARTIALS_LAYOUT",
        }
        layouts |= {(dim,): "ACC" for dim in SIDES.values()}
        layout = layouts.get(op.type.unpadded[1:], "SCORES")
        rows, *columns = self._dims(op.type.dims)
        if widths := self._widths(op.type):
            parts = [(part, f"{rows}, {n}") for part, n in zip(self._parts(op.name), widths)]
            return {**text, "parts": parts, "layout": "PARTS"}
        return {**text, "parts": [(text["var"], ", ".join([rows, *columns]))], "layout": layout}

    @handles(tile.Map)
    def _map(self, op: tile.Map, cls: str) -> dict[str, Any]:
        """A value in pieces is computed piece by piece, from the pieces of its operands."""
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

    @handles(pipe.ConvertLayout)
    def _convert_layout(self, op: pipe.ConvertLayout, cls: str) -> dict[str, Any]:
        text = super()._convert_layout(op, cls)
        users = (self.kernel.op(name) for name in self.kernel.graph.successors(op.name))
        in_pieces = any(self._widths(user.type) for user in only(users, pipe.Wgmma))
        return {**text, "layout": "OPERAND_OF_PARTS"} if in_pieces else text
