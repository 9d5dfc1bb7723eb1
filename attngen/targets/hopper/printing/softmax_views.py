"""What the templates see of ops that are not of rings, products or roles: a softmax in parts, values in registers."""

from __future__ import annotations

from typing import Any

from attngen.ir.ops import Dropout, DropoutMask, Reduce, SoftmaxStep
from attngen.ir.pipe import (
    HALVES,
    PARTIALS,
    ConcatHalves,
    ConvertLayout,
    Pack,
    PartialReduce,
    PinAfterWait,
    PinBeforeWait,
    ScaledIota,
    SoftmaxStats,
    SoftmaxWeights,
    SplitHalves,
)
from attngen.targets.hopper.configs.common import PAIR
from attngen.targets.hopper.configs.fused_backward import is_signed
from attngen.targets.printing.context import KernelContext, transposed

_SPREAD = {"scores": "SCORES", "sums": "SUMS", "chains": "CHAINED", "operand": "OPERAND"}  # names of layouts


class SoftmaxContext(KernelContext):
    """Views of these ops."""

    def _variables(self) -> dict[str, str]:
        """Value -> Python variable: halves, and what weights are measured from, have the op's name in theirs. The
        old maximum is kept."""
        names = super()._variables()
        for op in self.kernel.ops():
            own = ("base",) if isinstance(op, SoftmaxStats) else op.results() if isinstance(op, SplitHalves) else ()
            names |= {f"{op.name}.{field}": f"{op.name}_{field}" for field in own}
            names |= {f"{op.name}.m": "m_new"} if isinstance(op, SoftmaxStats) else {}
        return names

    def _softmax_stats(self, op: SoftmaxStats, cls: str) -> dict[str, Any]:
        step = SoftmaxStep(op.name, op.s, op.m, op.type, op.scale, op.guard, op.shift)
        return {**self._softmax_step(step, cls), "base": self.var(f"{op.name}.base")}

    def _softmax_weights(self, op: SoftmaxWeights, cls: str) -> dict[str, Any]:
        return {
            "var": self.var(op.name),
            "s": self.var(op.s),
            "base": self.var(op.base),
            "scale": self.var(op.scale) if op.scale else "",
        }

    def _scaled_iota(self, op: ScaledIota, cls: str) -> dict[str, Any]:
        return {
            "var": self.var(op.name),
            "at": "kv_off",
            "step": self.var(op.value),
            "kept": "BLOCK_KV - 8" if op.kept else "0",
        }

    def _split_halves(self, op: SplitHalves, cls: str) -> dict[str, Any]:
        drawn = isinstance(self.kernel.op(op.value), DropoutMask)
        name = self._words if drawn else self.var
        made = ", ".join(name(f"{op.name}.{field}") for field in op.results())
        return {"vars": made, "value": name(op.value), "flag": "DROPOUT" if drawn else ""}

    def _concat_halves(self, op: ConcatHalves, cls: str) -> dict[str, Any]:
        return {"var": self.var(op.name), "a": self.var(op.a), "b": self.var(op.b)}

    def _convert_layout(self, op: ConvertLayout, cls: str) -> dict[str, Any]:
        layout = _SPREAD[op.to] if len(op.type.dims) == 2 else f"gl.SliceLayout(1, {_SPREAD[op.to]})"
        value = self.var(op.value)
        return {
            "var": self.var(op.name),
            "value": f"unpack({value}, dtype)" if op.to == "operand" else value,
            "layout": layout,
        }

    def _pack(self, op: Pack, cls: str) -> dict[str, Any]:
        return {"var": self.var(op.name), "value": self.var(op.value), "dtype": "dtype"}

    def _pin_before_wait(self, op: PinBeforeWait | PinAfterWait, cls: str) -> dict[str, Any]:
        text = {"var": self.var(op.name), "value": self.var(op.value), "each": 2 * len(op.type.dims)}
        return {**text, "tile": {*op.type.dims} == PAIR}

    _pin_after_wait = _pin_before_wait

    def _dropout_mask(self, op: DropoutMask, cls: str) -> dict[str, Any]:
        places = [self.var(op.seed), "b", self.scalar(op.head), "q_start", "kv_start"]
        args = [*places, op.type.dims[1], "SCORES", str(transposed(op))]
        return {"var": self._words(op.name), "args": args, "flag": "DROPOUT"}

    def _draw(self, keep: str) -> DropoutMask:
        op = self.kernel.op(keep)
        return super()._draw(op.value if isinstance(op, SplitHalves) else keep)

    def _dropout(self, op: Dropout, cls: str) -> dict[str, Any]:
        text = super()._dropout(op, cls)
        value, words, threshold, _, turned = text["args"]  # no zero, as `pack` hides the cast
        return {**text, "args": [value, words, threshold, turned], "signed": is_signed(self.module, self.kernel)}

    def _reduce(self, op: Reduce, cls: str) -> dict[str, Any]:
        chains = op.op == "sum" and op.over in (*HALVES, *HALVES.values())
        return {
            **super()._reduce(op, cls),
            "chains": chains,
            "half": op.over in HALVES.values(),
            "last": op.over in (PARTIALS, "D_V"),
        }

    def _partial_reduce(self, op: PartialReduce, cls: str) -> dict[str, Any]:
        return {"var": self.var(op.name), "value": self.var(op.value), "layout": "CHAINED"}
