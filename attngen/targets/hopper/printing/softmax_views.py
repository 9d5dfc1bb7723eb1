"""Builds the views of ops on registers: a softmax in steps, dropout, conversions and pins."""

from __future__ import annotations

from typing import Any

from attngen.ir import Kernel, pipe, tile
from attngen.ir.behaviour import handles
from attngen.targets.hopper.configs.common import SCORE_DIMS
from attngen.targets.hopper.configs.fused_backward import is_signed
from attngen.targets.printing.context import KernelContext, transposed

# The layouts of the IR, and the constants of generated code that hold them.
_LAYOUTS = {"scores": "SCORES", "acc": "ACC", "partials": "_PARTIALS_LAYOUT", "operand": "OPERAND"}


class SoftmaxContext(KernelContext):
    """Builds the views of these ops."""

    source: Kernel  # the kernel before it was lowered

    def _variables(self) -> dict[str, str]:
        """Value -> Python variable.

        Halves, and the base of softmax weights, are prefixed with the op's name. A new maximum is `m_new`, so the old
        one stays readable.
        """
        names = super()._variables()
        for op in self.kernel.ops():
            own = (
                ("base",)
                if isinstance(op, pipe.SoftmaxStats)
                else op.results()
                if isinstance(op, pipe.SplitHalves)
                else ()
            )
            names |= {f"{op.name}.{field}": f"{op.name}_{field}" for field in own}
            names |= {f"{op.name}.m": "m_new"} if isinstance(op, pipe.SoftmaxStats) else {}
        return names

    @handles(pipe.SoftmaxStats)
    def _softmax_stats(self, op: pipe.SoftmaxStats, cls: str) -> dict[str, Any]:
        step = tile.SoftmaxStep(op.name, op.s, op.m, op.type, op.scale, op.guard, op.shift)
        return {**self._softmax_step(step, cls), "base": self.var(f"{op.name}.base")}

    @handles(pipe.SoftmaxWeights)
    def _softmax_weights(self, op: pipe.SoftmaxWeights, cls: str) -> dict[str, Any]:
        return {
            "var": self.var(op.name),
            "s": self.var(op.s),
            "base": self.var(op.base),
            "scale": self.var(op.scale) if op.scale else "",
        }

    @handles(pipe.ScaledIota)
    def _scaled_iota(self, op: pipe.ScaledIota, cls: str) -> dict[str, Any]:
        return {
            "var": self.var(op.name),
            "at": "kv_off",
            "step": self.var(op.value),
            "kept": "BLOCK_KV - 8" if op.kept else "0",
        }

    @handles(pipe.SplitHalves)
    def _split_halves(self, op: pipe.SplitHalves, cls: str) -> dict[str, Any]:
        is_random = isinstance(self.kernel.op(op.value), tile.DropoutMask)
        name = self._words if is_random else self.var
        halves = ", ".join(name(f"{op.name}.{field}") for field in op.results())
        return {"vars": halves, "value": name(op.value), "flag": "DROPOUT" if is_random else ""}

    @handles(pipe.ConcatHalves)
    def _concat_halves(self, op: pipe.ConcatHalves, cls: str) -> dict[str, Any]:
        return {"var": self.var(op.name), "a": self.var(op.a), "b": self.var(op.b)}

    @handles(pipe.ConvertLayout)
    def _convert_layout(self, op: pipe.ConvertLayout, cls: str) -> dict[str, Any]:
        layout = _LAYOUTS[op.to] if len(op.type.dims) == 2 else f"gl.SliceLayout(1, {_LAYOUTS[op.to]})"
        value = self.var(op.value)
        return {
            "var": self.var(op.name),
            "value": f"_unpack({value}, dtype)" if op.to == "operand" else value,
            "layout": layout,
        }

    @handles(pipe.Pack)
    def _pack(self, op: pipe.Pack, cls: str) -> dict[str, Any]:
        return {"var": self.var(op.name), "value": self.var(op.value), "dtype": "dtype"}

    @handles(pipe.PinBeforeWait, pipe.PinAfterWait)
    def _pin_before_wait(self, op: pipe.PinBeforeWait | pipe.PinAfterWait, cls: str) -> dict[str, Any]:
        text = {"var": self.var(op.name), "value": self.var(op.value), "each": 2 * len(op.type.dims)}
        return {**text, "tile": {*op.type.dims} == SCORE_DIMS}

    @handles(tile.DropoutMask)
    def _dropout_mask(self, op: tile.DropoutMask, cls: str) -> dict[str, Any]:
        places = [self.var(op.seed), "b", self.scalar(op.head), "q_start", "kv_start"]
        args = [*places, op.type.dims[1], "SCORES", str(transposed(op))]
        return {"var": self._words(op.name), "args": args, "flag": "DROPOUT"}

    def _philox(self, keep: str) -> tile.DropoutMask:
        op = self.kernel.op(keep)
        return super()._philox(op.value if isinstance(op, pipe.SplitHalves) else keep)

    @handles(tile.Dropout)
    def _dropout(self, op: tile.Dropout, cls: str) -> dict[str, Any]:
        text = super()._dropout(op, cls)
        value, words, threshold, _, is_transposed = text["args"]  # `zero` is not needed, because `pack` hides the cast
        args = [value, words, threshold, is_transposed]
        return {**text, "args": args, "signed": is_signed(self.module, self.source)}

    @handles(tile.Reduce)
    def _reduce(self, op: tile.Reduce, cls: str) -> dict[str, Any]:
        return {
            **super()._reduce(op, cls),
            "row_sum": op.op == "sum" and op.over in (*pipe.HALF_DIM, *pipe.HALF_DIM.values()),
            "half": op.over in pipe.HALF_DIM.values(),
            "row_vector": op.over in (pipe.PARTIALS, "D_V"),
        }

    @handles(pipe.PartialReduce)
    def _partial_reduce(self, op: pipe.PartialReduce, cls: str) -> dict[str, Any]:
        return {"var": self.var(op.name), "value": self.var(op.value), "layout": "_PARTIALS_LAYOUT"}
