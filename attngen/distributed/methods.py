"""The forward and the backward of a call on one rank: local kernels and the transfers between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attngen.distributed.collectives import (
    PartsUnderWay,
    Run,
    Transfer,
    add_parts,
    begin_gather,
    gather,
    heads_to_rows,
    rows_to_heads,
)
from attngen.distributed.local import Backward, LocalKernel, Stats
from attngen.distributed.merge import merge_parts
from attngen.distributed.shard import Shard

Inputs = Mapping[str, Any]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def rows_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return views [rows, B, H, ...] of tensors [B, H, rows, ...]."""
    return [x.movedim(2, 0) for x in tensors]


def rows_third(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return views [B, H, rows, ...] of tensors [rows, B, H, ...]."""
    return [x.movedim(0, 2) for x in tensors]


# ---------------------------------------------------------------------- Ulysses


def to_heads(shard: Shard, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Exchange rows for heads if the method is a Ulysses one: [B, H, this rank's rows, ...] becomes [B, this rank's
    heads, rows of its group, ...]."""
    if shard.heads_group is None:
        return list(tensors)
    return rows_third(*rows_to_heads(rows_first(*tensors), shard.to_heads, shard.heads_group))


def from_heads(shard: Shard, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Undo `to_heads`."""
    if shard.heads_group is None:
        return list(tensors)
    return rows_third(*heads_to_rows(rows_first(*tensors), shard.from_heads, shard.heads_group))


def _of_heads(shard: Shard, x: torch.Tensor, dims: tuple[str, ...]) -> torch.Tensor:
    """Return a view of this rank's heads of an input that is whole. A dimension of 1 is for all heads."""
    for dim, name in enumerate(dims):
        if name in ("Hq", "Hkv") and x.shape[dim] > 1:
            heads = x.shape[dim] // shard.heads
            x = x.narrow(dim, shard.rank % shard.heads * heads, heads)
    return x


def inputs_of_heads(kernel: LocalKernel, shard: Shard, inputs: Inputs) -> Inputs:
    """Return the inputs of this rank's heads."""
    if shard.heads == 1:
        return inputs
    return {
        name: _of_heads(shard, x, kernel.dims.get(name, ())) if isinstance(x, torch.Tensor) else x
        for name, x in inputs.items()
    }


def whole_gradient(
    kernel: LocalKernel, shard: Shard, name: str, x: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of a whole input x, fp32, from that of this rank's heads: 0 for other heads."""
    whole = torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    part = _of_heads(shard, whole, kernel.dims.get(name, ())) if shard.heads > 1 else whole
    part.copy_(gradient)
    return whole


# ---------------------------------------------------------------------- over the sequence


def forward(
    kernel: LocalKernel, shard: Shard, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: Inputs
) -> tuple[torch.Tensor, Stats]:
    """Return the output of this rank's queries and their row vectors, from tensors that have this rank's heads."""
    if shard.rings:
        return _ring_forward(kernel, shard, q, k, v, inputs)
    k, v = _gathered(shard, k, v)
    return kernel.forward(q, k, v, shard.sequence.owned[shard.at], shard.needs[shard.at], inputs)


def backward(kernel: LocalKernel, shard: Shard, of: Backward, inputs: Inputs, wanted: Collection[str]) -> Gradients:
    """Return the gradients of this rank's q, k and v, and this rank's part of those of the learned inputs in
    `wanted`."""
    if shard.rings:
        return _ring_backward(kernel, shard, of, inputs, wanted)
    k, v = _gathered(shard, of.k, of.v)
    chunks = shard.sequence.owned[shard.at], shard.needs[shard.at]
    dq, dk, dv, gradients = kernel.backward(replace(of, k=k, v=v), *chunks, inputs, wanted)
    if shard.sequence_group is not None:
        dk, dv = rows_third(*add_parts(_as_sent([dk, dv], k, v), shard.from_needs, shard.sequence_group))
    return dq, dk, dv, gradients


def _gathered(shard: Shard, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Return the chunks of K and V that this rank needs."""
    if shard.sequence_group is None:
        return [k, v]
    return rows_third(*gather(rows_first(k, v), shard.to_needs, shard.sequence_group))


def _as_sent(parts: list[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Return parts of dK and dV [rows, B, H, ...] as all ranks send them, whether kernels computed them or not."""
    return [part.to(x.dtype) for part, x in zip(rows_first(*parts), (k, v))]


def _without_sinks(kernel: LocalKernel, inputs: Inputs) -> Inputs:
    return {name: torch.full_like(x, -torch.inf) if name in kernel.sinks else x for name, x in inputs.items()}


def _following(shard: Shard, step: int, own: list[torch.Tensor]) -> tuple[list[torch.Tensor], Transfer | None]:
    """Start to receive the keys of the step after this one. Return nothing after the last."""
    if step == len(shard.to_steps):
        return [], None
    return begin_gather(own, shard.to_steps[step], shard.sequence_group)


def _taken(x: torch.Tensor, rows: tuple[Run, ...]) -> torch.Tensor:
    """Return some rows of a tensor [B, H, rows, ...]: a view if they are one run."""
    found = [x.narrow(2, run.source, run.rows) for run in rows]
    return found[0] if len(found) == 1 else torch.cat(found, 2)


class _Accumulated:
    """Some rows of a tensor [B, H, rows, ...], as sums in fp32 to which later steps add. The tensor's other rows are
    not touched. The tensor has to be the caller's own: `result` writes to it."""

    def __init__(self, x: torch.Tensor, rows: tuple[Run, ...]) -> None:
        self._x, self._rows = x, rows
        self.sums = _taken(x, rows).to(torch.float32, copy=True) if rows else x.new_empty((0,))

    def result(self) -> torch.Tensor:
        """Write the sums to the tensor, and return it."""
        for run in self._rows:
            self._x.narrow(2, run.source, run.rows).copy_(self.sums.narrow(2, run.target, run.rows))
        return self._x


def _ring_forward(
    kernel: LocalKernel, shard: Shard, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: Inputs
) -> tuple[torch.Tensor, Stats]:
    """Step 0 is computed even if it sees nothing: its part has the sinks, and is the result of rows without keys. In
    the other steps the queries are those that see a key of the step, and their rows alone are merged."""
    own = [x.contiguous() for x in rows_first(k, v)]
    held, out, stats = own, _Accumulated(q, ()), dict[str, _Accumulated]()  # step 0 makes out and stats
    for step, (keys, (queries, rows, merged)) in enumerate(zip(shard.step_keys, shard.step_queries)):
        coming, transfer = _following(shard, step, own)
        k, v = rows_third(*held)
        if step == 0:
            part, of_part = kernel.forward(q, k, v, queries, keys, inputs)
            out = _Accumulated(part, shard.merged_rows)
            stats = {name: _Accumulated(x, shard.merged_rows) for name, x in of_part.items()}
        elif queries:
            part, of_part = kernel.forward(_taken(q, rows), k, v, queries, keys, _without_sinks(kernel, inputs))
            for run in merged:
                totals = {name: x.sums.narrow(2, run.source, run.rows) for name, x in stats.items()}
                of_run = {name: x.narrow(2, run.target, run.rows) for name, x in of_part.items()}
                total = out.sums.narrow(2, run.source, run.rows)
                merge_parts(total, totals, part.narrow(2, run.target, run.rows), of_run)
        if transfer:
            transfer.wait()
        held = coming
    return out.result(), {name: x.result() for name, x in stats.items()}


def _ring_backward(
    kernel: LocalKernel, shard: Shard, of: Backward, inputs: Inputs, wanted: Collection[str]
) -> Gradients:
    """The parts of dK and dV of a step go back to the rank of the keys under the kernels of the next step. It adds them
    in fp32, in the order of steps."""
    own = [x.contiguous() for x in rows_first(of.k, of.v)]
    dq = _Accumulated(of.q, ())  # step 0 makes it
    sums: list[torch.Tensor] = []
    gradients: dict[str, torch.Tensor] = {}
    held, returning = own, None
    for step, (keys, (queries, rows, merged)) in enumerate(zip(shard.step_keys, shard.step_queries)):
        coming, transfer = _following(shard, step, own)
        parts = [x.new_empty((0, *x.shape[1:])) for x in own]
        if queries or step == 0:
            given = inputs if step == 0 else _without_sinks(kernel, inputs)
            needed = [name for name in wanted if step == 0 or name not in kernel.sinks]
            k, v = rows_third(*held)
            of_step = of.of_queries(partial(_taken, rows=rows)) if step else of
            part, *found, of_inputs = kernel.backward(replace(of_step, k=k, v=v), queries, keys, given, needed)
            if step == 0:
                dq = _Accumulated(part, shard.merged_rows)
            for run in merged if step else ():
                dq.sums.narrow(2, run.source, run.rows).add_(part.narrow(2, run.target, run.rows))
            parts = rows_first(*found) if step == 0 else _as_sent(found, k, v)
            for name, gradient in of_inputs.items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient.float()
        if returning:
            returning.add_to(sums)
        if step == 0:
            sums = [x.float() for x in parts]
        else:
            returning = PartsUnderWay(parts, shard.from_steps[step - 1], shard.sequence_group)
        if transfer:
            transfer.wait()
        held = coming
    if returning:
        returning.add_to(sums)
    dk, dv = rows_third(*sums)
    return dq.result(), dk, dv, gradients
