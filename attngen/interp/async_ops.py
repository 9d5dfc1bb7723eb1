"""Arithmetic of warp groups on NumPy: asynchronous products, and the steps of the online softmax."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngen.interp.tile import Launch
from attngen.interp.values import Values, applies, spread
from attngen.ir import pipe
from attngen.ir.behaviour import handles


class AsyncOps(Launch):
    """Asynchronous products, and ops on registers of a warp group."""

    @handles(pipe.Wgmma)
    def _wgmma(self, op: pipe.Wgmma, values: Values) -> Any:
        values[op.name] = op
        yield False

    @handles(pipe.WgmmaWait)
    def _wgmma_wait(self, op: pipe.WgmmaWait, values: Values) -> Any:
        """Compute the product from its operands as they are now, so that an operand overwritten too early shows."""
        wgmma = self.kernel.op(op.value)
        assert isinstance(wgmma, pipe.Wgmma)
        values[op.name] = self.product(wgmma, values)
        yield False

    def product(self, op: pipe.Wgmma, values: Values) -> Any:
        """A product, added to the accumulator that it continues."""
        of_a, of_b = self.dims[op.a], self.dims[op.b]
        rows, columns = (next(d for d in dims if d != op.over) for dims in (of_a, of_b))
        a, b = spread(values[op.a], of_a, (rows, op.over)), spread(values[op.b], of_b, (op.over, columns))
        n, m = self.shape(op.type.dims, values)  # of the instance's part, if instances split the product
        a = a[n * values["instance"] :][:n] if len(a) != n else a
        b = b[:, m * values["instance"] :][:, :m] if b.shape[1] != m else b
        found = np.matmul(a, b, dtype=self.dtypes[op.type.dtype])
        if op.acc is None:
            return found
        before = self.kernel.op(op.acc)
        return found + (self.product(before, values) if isinstance(before, pipe.Wgmma) else values[op.acc])

    @handles(pipe.ConvertLayout, pipe.PinAfterWait, pipe.PinBeforeWait, pipe.Pack)
    def _convert_layout(
        self, op: pipe.ConvertLayout | pipe.PinAfterWait | pipe.PinBeforeWait | pipe.Pack, values: Values
    ) -> Any:
        values[op.name] = self.tile(values[op.value], op.type, values)
        yield from ()

    @handles(pipe.SoftmaxStats)
    def _softmax_stats(self, op: pipe.SoftmaxStats, values: Values) -> Any:
        m, scale = values[op.m], values[op.scale] if op.scale else 1
        shift = values[op.shift] if op.shift else 0
        m_new = np.maximum(m, values[op.s].max(axis=1) + shift)
        seen = np.where(m_new == -np.inf, m_new.dtype.type(0), m_new) if applies(op.guard, values["cls"]) else m_new
        values |= {
            f"{op.name}.base": seen * scale - shift,
            f"{op.name}.alpha": np.exp2((m - seen) * scale),
            f"{op.name}.m": m_new,
        }
        yield from ()

    @handles(pipe.SoftmaxWeights)
    def _softmax_weights(self, op: pipe.SoftmaxWeights, values: Values) -> Any:
        values[op.name] = np.exp2(values[op.s] * (values[op.scale] if op.scale else 1) - values[op.base][:, None])
        yield from ()

    @handles(pipe.PartialReduce)
    def _partial_reduce(self, op: pipe.PartialReduce, values: Values) -> Any:
        value = values[op.value]
        values[op.name] = value.reshape(len(value), -1, values[pipe.PARTIALS]).sum(axis=1)
        yield from ()

    @handles(pipe.ScaledIota)
    def _scaled_iota(self, op: pipe.ScaledIota, values: Values) -> Any:
        (size,) = self.shape(op.type.dims, values)
        values[op.name] = (values[op.value] * np.arange(size)).astype(self.dtypes[op.type.dtype])
        yield from ()

    @handles(pipe.SplitHalves)
    def _split_halves(self, op: pipe.SplitHalves, values: Values) -> Any:
        halves = np.split(values[op.value], 2, axis=self.dims[op.value].index(op.over))
        values |= {f"{op.name}.{field}": half for field, half in zip(op.results(), halves)}
        yield from ()

    @handles(pipe.ConcatHalves)
    def _concat_halves(self, op: pipe.ConcatHalves, values: Values) -> Any:
        values[op.name] = np.concatenate([values[op.a], values[op.b]], axis=op.type.dims.index(op.over))
        yield from ()
