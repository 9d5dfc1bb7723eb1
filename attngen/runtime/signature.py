"""The arguments and results of a module's operators, and their declarations to torch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Signature(NamedTuple):
    """The arguments (operands) of a module's operators after q, k and v, and their results.

    schema: declarations of the operands, such as "Tensor slope, float scale". The first `tensors` of them are tensors.
    learned: positions of the operands that get gradients.
    summed: the dQ kernel writes partial sums of such a gradient, so it has to run for that gradient too.
    unordered: names of the operands whose gradients are added atomically, in no fixed order.
    results: the dtype of outputs, if it is not that of q.
    rows: row vectors that calls return in addition to the output, fp32 [B, Hq, Nq]. The last `flat` of these have no
    gradient.
    kept: the rows that the backward and forward mode read; empty if they read exactly those with a gradient.
    dims: dimensions of each tensor operand, such as "B Nk". shards: the dimensions of q that may be sharded, because
    neither the mask nor the scores depend on positions along them.
    """

    schema: str
    tensors: int
    widths: tuple[int, int]  # head dimensions of q and k, and of v
    learned: tuple[int, ...] = ()
    summed: bool = False
    unordered: tuple[str, ...] = ()
    results: torch.dtype | None = None
    rows: tuple[str, ...] = ("lse",)
    flat: int = 0
    kept: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()
    shards: tuple[str, ...] = ("B", "Hq")

    @property
    def smooth(self) -> tuple[str, ...]:
        """The rows that have a gradient."""
        return self.rows[: len(self.rows) - self.flat]


def schemas_of(signature: Signature) -> tuple[str, str, str]:
    """Return the declarations to torch of the forward, the backward and the jvp operator, without their names."""
    operands, count = signature.schema, len(signature.learned)
    rows = ", ".join(f"Tensor {name}" for name in signature.rows)
    kept = ", ".join(f"Tensor {name}" for name in signature.kept or signature.smooth)
    saved = f"Tensor q, Tensor k, Tensor v, Tensor out, {kept}"
    grad_rows = ", ".join(f"Tensor? grad_{name}" for name in signature.smooth)
    needs = "bool need_q, bool need_kv" + (", bool need_inputs" if count else "")
    gradients = "".join(f", Tensor d_{i}" for i in range(count))
    tangents = "".join(f", Tensor t_{i}" for i in range(count))
    results = ", ".join(f"Tensor tangent_{name}" for name in ("out", *signature.smooth))
    return (
        f"(Tensor q, Tensor k, Tensor v, {operands}) -> (Tensor out, {rows})",
        f"(Tensor grad_out, {grad_rows}, {saved}, {operands}, {needs}) -> (Tensor dq, Tensor dk, Tensor dv{gradients})",
        f"({saved}, Tensor tq, Tensor tk, Tensor tv, {operands}{tangents}) -> ({results})",
    )
