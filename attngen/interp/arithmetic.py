"""Ops that compute tiles from tiles, on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngen.interp.e4m3 import numbers, pairs
from attngen.interp.numeric import compiled
from attngen.interp.philox import keep_scores
from attngen.interp.values import Evaluator, Values, applies, spread
from attngen.ir import GROUPED, tile
from attngen.ir.behaviour import handles


class ArithmeticOps(Evaluator):
    @handles(tile.Init)
    def _init(self, op: tile.Init, values: Values, cls: str) -> Any:
        return self.tile(compiled(op.value)(values), op.type, values)

    @handles(tile.Map)
    def _map(self, op: tile.Map, values: Values, cls: str) -> Any:
        return self.tile(self.expression(op.expr, values, op.type.dims, op.uses), op.type, values)

    @handles(tile.Mask)
    def _mask(self, op: tile.Mask, values: Values, cls: str) -> Any:
        if not applies(op.when, cls) or (op.unswitch is not None and not self.expression(op.unswitch, values)):
            return values[op.value]
        return np.where(
            self.expression(op.where, values, op.type.dims, op.uses),
            values[op.value],
            self.dtypes[op.type.dtype](-np.inf),
        )

    @handles(tile.Dot)
    def _dot(self, op: tile.Dot, values: Values, cls: str) -> Any:
        of_a, of_b = self.dims[op.a], self.dims[op.b]
        rows, columns = (next(d for d in dims if d != op.over) for dims in (of_a, of_b))
        a, b = spread(values[op.a], of_a, (rows, op.over)), spread(values[op.b], of_b, (op.over, columns))
        found = np.matmul(a, b, dtype=self.dtypes[op.type.dtype])
        found = found if op.acc is None else found + values[op.acc]
        return spread(found, (rows, columns), op.type.dims)

    @handles(tile.SoftmaxStep)
    def _softmax_step(self, op: tile.SoftmaxStep, values: Values, cls: str) -> Values:
        s, m, scale = values[op.s], values[op.m], values[op.scale] if op.scale else 1
        shift = values[op.shift] if op.shift else 0
        m_new = np.maximum(m, s.max(axis=1) + shift)
        seen = np.where(m_new == -np.inf, m_new.dtype.type(0), m_new) if applies(op.guard, cls) else m_new
        p = np.exp2(s * scale - (seen * scale - shift)[:, None])
        return {f"{op.name}.p": p, f"{op.name}.alpha": np.exp2((m - seen) * scale), f"{op.name}.m": m_new}

    @handles(tile.Reduce)
    def _reduce(self, op: tile.Reduce, values: Values, cls: str) -> Any:
        x, axis = values[op.value], self.dims[op.value].index(op.over)
        if GROUPED.get(op.over) in op.type.dims:
            x, axis = x.reshape(*x.shape[:-1], values[GROUPED[op.over]], -1), -1
        reduced = getattr(np, op.op)(x, axis=axis)
        return self.tile(reduced, op.type, values)

    @handles(tile.Scan)
    def _scan(self, op: tile.Scan, values: Values, cls: str) -> Any:
        return np.maximum.accumulate(values[op.value], axis=self.dims[op.value].index(op.over))

    @handles(tile.Deinterleave)
    def _deinterleave(self, op: tile.Deinterleave, values: Values) -> Values:
        x, of = values[op.value], self.kernel.type_of(op.value)
        even, odd = numbers(x) if of.quantised else (x[:, ::2], x[:, 1::2])
        return {f"{op.name}.even": self.tile(even, op.type, values), f"{op.name}.odd": self.tile(odd, op.type, values)}

    @handles(tile.Interleave)
    def _interleave(self, op: tile.Interleave, values: Values, cls: str) -> Any:
        a, b = values[op.a], values[op.b]
        x = pairs(a, b) if op.type.quantised else np.stack([a, b], 2).reshape(len(a), -1)
        return self.tile(x, op.type, values)

    @handles(tile.Seed)
    def _seed(self, op: tile.Seed, values: Values, cls: str) -> int:
        return int(values[op.src])

    @handles(tile.DropoutMask)
    def _dropout_mask(self, op: tile.DropoutMask, values: Values, cls: str) -> Any:
        q, kv = (spread(values[name], self.dims[name], op.type.dims) for name in ("q_idx", "kv_idx"))
        head = int(self.expression(op.head, values))
        return keep_scores(values[op.seed], values["b"], head, q, kv, values[op.threshold])

    @handles(tile.Dropout)
    def _dropout(self, op: tile.Dropout, values: Values, cls: str) -> Any:
        return np.where(values[op.keep], values[op.value], self.dtypes[op.type.dtype](0))
