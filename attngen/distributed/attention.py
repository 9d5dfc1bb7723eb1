"""Attention of a sequence whose rows are on several ranks, differentiable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded

from attngen.distributed import methods
from attngen.distributed.agreement import digest
from attngen.distributed.collectives import sum_over_ranks
from attngen.distributed.local import Backward, LocalKernel
from attngen.distributed.merge import SUMS, can_merge
from attngen.distributed.shard import Shard


@dataclass(frozen=True)
class _Call:
    """What a call has besides tensors. names: of the inputs that are tensors. numbers: the other inputs."""

    kernel: LocalKernel
    shard: Shard
    names: tuple[str, ...]
    numbers: dict[str, Any]
    return_lse: bool
    sum_gradients: bool

    def inputs(self, tensors: tuple[torch.Tensor, ...]) -> methods.Inputs:
        """Return the inputs of this rank's heads by name."""
        return methods.inputs_of_heads(self.kernel, self.shard, {**dict(zip(self.names, tensors)), **self.numbers})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    kernel: LocalKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: Shard,
    return_lse: bool = False,
    sum_gradients: bool = True,
    **inputs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries with the keys of the whole sequence; differentiable. All ranks call it, and all
    run its backward, also those that hold no rows.

    A backward gathers or passes K and V again, so a call saves only q, k, v and the output of this rank's rows. A
    Ulysses method saves them with this rank's heads instead, which are as many bytes.

    Args:
        kernel: attention of chunks on one rank.
        q: [B, Hq, rows, D] of this rank's rows, in the order of `plan.position_ids`; any strides, any dtype of the
            kernel. Or a DTensor on the plan's mesh, with Shard(2) in each of its dimensions.
        k: [B, Hkv, rows, D], as q.
        v: [B, Hkv, rows, Dv], as q.
        plan: the rows of the ranks and the method.
        return_lse: also return the natural-log LSE of every query's scores, differentiable.
        sum_gradients: gradients of learned inputs are summed over the ranks, in fp32 and in the order of ranks, so that
            all have the gradient for the sum of the ranks' losses. False leaves each rank its own part, for data
            parallelism over the same ranks, which sums the gradients of all parameters.
        inputs: inputs of the kernel by name. Those about the sequence are whole on every rank, as in a call on one.

    Returns:
        [B, Hq, rows, Dv] in q's dtype, and with return_lse also [B, Hq, rows] fp32; DTensors if q is one.

    Raises:
        ValueError: one sentence. What is wrong in the first call of some sizes is the same error on every rank, though
            only one may see it. In later calls a wrong rank raises it alone, and others wait until the timeout.
        RuntimeError: one sentence: another rank has exited or does not answer within the process group's timeout.
    """
    local, problem = _local_tensors(plan, q, k, v)
    problem = problem or _problem(kernel, plan, local, inputs)
    names = tuple(sorted(name for name, x in inputs.items() if isinstance(x, torch.Tensor)))
    numbers = {name: x for name, x in inputs.items() if name not in names}
    plan.check_equal(_sizes(kernel, local, names, inputs, return_lse, sum_gradients), problem)
    call = _Call(kernel, plan, names, numbers, return_lse, sum_gradients)
    out, lse = _Attention.apply(call, *local, *(inputs[name] for name in names))  # type: ignore[no-untyped-call]
    if isinstance(q, DTensor):
        out, lse = _as_dtensor(out, q, v.shape[-1:]), _as_dtensor(lse, q, ())
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor
    ) -> Any:
        kernel, shard = call.kernel, call.shard
        q, k, v = methods.to_heads(shard, q, k, v)
        out, stats = methods.forward(kernel, shard, q, k, v, call.inputs(tensors))
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, *(stats[name] for name in kernel.rows), *tensors)
        return tuple(methods.from_heads(shard, out, stats["lse"]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        call, (q, k, v, out, *rest) = ctx.call, ctx.saved_tensors
        kernel, shard = call.kernel, call.shard
        stats, tensors = dict(zip(kernel.rows, rest)), tuple(rest[len(kernel.rows) :])
        # All ranks exchange the same tensors, also where a rank's loss does not depend on one of them.
        rows = (out.shape[0], out.shape[1] * shard.heads, shard.rows)
        grad_out = out.new_zeros((*rows, out.shape[3])) if grad_out is None else grad_out
        if call.return_lse and grad_lse is None:
            grad_lse = out.new_zeros(rows, dtype=torch.float32)
        grad_out, *grad_rows = methods.to_heads(shard, grad_out, *([grad_lse] if grad_lse is not None else []))
        wanted = [name for name, needs in zip(call.names, ctx.needs_input_grad[4:]) if needs and name in kernel.learned]
        of = Backward(grad_out, grad_rows[0] if grad_rows else None, q, k, v, out, stats)
        dq, dk, dv, found = methods.backward(kernel, shard, of, call.inputs(tensors), wanted)
        dq, dk, dv = methods.from_heads(shard, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))
        of_inputs = (
            _of_input(call, name, x, found[name]) if name in wanted else None for name, x in zip(call.names, tensors)
        )
        return None, dq, dk, dv, *of_inputs


def _of_input(call: _Call, name: str, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an input from that of this rank's heads and rows."""
    gradient = methods.whole_gradient(call.kernel, call.shard, name, x, gradient)
    if call.sum_gradients:
        for group in reversed(call.shard.groups):
            gradient = sum_over_ranks(gradient, group)
    return gradient.to(x.dtype)


def _local_tensors(plan: Shard, *qkv: torch.Tensor) -> tuple[list[torch.Tensor], str]:
    """Return q, k and v of this rank, and what is wrong with DTensors; empty text if nothing is."""
    placements = [Sharded(2)] * len(plan.groups)
    problem = ""
    for name, x in zip("qkv", qkv):
        if isinstance(x, DTensor) != isinstance(qkv[0], DTensor):
            problem = problem or f"q is a {type(qkv[0]).__name__} and {name} a {type(x).__name__}; expected one kind"
        elif isinstance(x, DTensor) and (x.device_mesh != plan.mesh or list(x.placements) != placements):
            problem = problem or (
                f"{name} is on {x.device_mesh} with placements {list(x.placements)}; expected the plan's mesh and "
                f"{placements}"
            )
    return [x.to_local() if isinstance(x, DTensor) else x for x in qkv], problem


def _as_dtensor(x: torch.Tensor, q: DTensor, width: tuple[int, ...]) -> DTensor:
    """Return a DTensor of [B, Hq, N, *width] whose part on this rank is x, placed as q is."""
    shape = torch.Size((*q.shape[:3], *width))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, q.device_mesh, q.placements, run_check=False, shape=shape, stride=stride)


def _problem(kernel: LocalKernel, plan: Shard, qkv: list[torch.Tensor], inputs: dict[str, Any]) -> str:
    """Return what is wrong with the arguments on this rank, as a clause; empty text if nothing is."""
    for name, x in zip("qkv", qkv):
        if x.dim() != 4:
            return f"{name} has {x.dim()} dimensions; expected 4: sequences, heads, rows, head dimension"
        if x.shape[2] != plan.rows:
            return f"{name} has {x.shape[2]} rows; expected {plan.rows}, those of the rank in its layout: see scatter"
        if x.dtype != qkv[0].dtype or x.device != qkv[0].device:
            return f"{name} is {x.dtype} on {x.device}, and q {qkv[0].dtype} on {qkv[0].device}; expected the same"
    q, k, v = qkv
    if k.shape[:2] != v.shape[:2] or k.shape[0] != q.shape[0] or q.shape[1] % max(k.shape[1], 1):
        return (
            f"q, k and v have the sequences and heads {[tuple(x.shape[:2]) for x in qkv]}; expected equal numbers of "
            "sequences, equal heads of k and v, and query heads that are a multiple of them"
        )
    if k.shape[1] % plan.heads:
        return (
            f"k has {k.shape[1]} heads and {plan.method} divides them among {plan.heads} ranks; expected a multiple of "
            f"{plan.heads}: use fewer ranks for heads, or method all_gather or ring"
        )
    if plan.heads > 1 and (why := kernel.needs_all_heads(inputs)):
        return f"{why}, and {plan.method} divides heads among ranks; expected method all_gather or ring"
    if plan.rings and not can_merge(tuple(kernel.rows)):
        return (
            f"the kernel keeps {', '.join(kernel.rows)}, and a ring merges only lse, or {', '.join(SUMS)}; expected "
            "method all_gather"
        )
    return kernel.problem(inputs)


def _sizes(
    kernel: LocalKernel, qkv: list[torch.Tensor], names: tuple[str, ...], inputs: dict[str, Any], *flags: bool
) -> bytes:
    """Return a digest of what has to be equal on all ranks, other than numbers of rows and values."""
    shapes = [(*x.shape[:2], *x.shape[3:]) for x in qkv]
    of_inputs = [(name, tuple(inputs[name].shape), inputs[name].dtype) for name in names]
    needs = torch.is_grad_enabled() and [x.requires_grad for x in (*qkv, *(inputs[name] for name in names))]
    return digest(kernel.digest, shapes, [x.dtype for x in qkv], of_inputs, sorted(inputs), needs, flags)
