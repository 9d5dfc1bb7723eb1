"""The public calls: a plan from a mask and a sequence, and attention by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attngen.devices import LINKS
from attngen.distributed.attention import attention as over_ranks
from attngen.distributed.balance import Balance
from attngen.distributed.balance import balance as balanced
from attngen.distributed.inputs import is_starts
from attngen.distributed.layout import Layout, without_heads
from attngen.distributed.mesh import sizes_of
from attngen.distributed.model import Cluster, Heads, predict
from attngen.distributed.module_kernel import ModuleKernel, module_kernel
from attngen.distributed.proof import verify
from attngen.distributed.shard import Shard
from attngen.distributed.transfers import Method, Plan, divided, expanded, ring_steps
from attngen.distributed.visible import Visible, count
from attngen.errors import AttngenError
from attngen.ir import symbol_names

Q_HEADS, KV_HEADS = 32, {"mha": 32, "gqa": 8, "mqa": 1}  # that the model of time assumes where they are not given


def plan(
    module: Any,
    mesh: Any,
    *,
    seq_len: int | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    method: str = "auto",
    balance: Balance = "auto",
    layout: Layout | None = None,
    inputs: Mapping[str, Any] | None = None,
    q_heads: int | None = None,
    kv_heads: int | None = None,
    batch: int = 1,
    prove: bool = True,
) -> Shard:
    """Decide which rank holds which rows of a sequence, and what ranks send to each other. It sends nothing itself; all
    ranks call it with equal arguments, and the first call of `attention` compares their plans.

    Ranks get equal numbers of rows and, as far as chunks allow, equal numbers of visible scores, which are counted from
    the mask's formula. A rank needs only chunks with a key that one of its queries sees.

    Args:
        module: what `attngen.build` returns for a spec with `positions`, or its `attention`.
        mesh: a process group, or a DeviceMesh of one dimension; with a method "ulysses+..." a DeviceMesh of two
            dimensions, of which the second is exchanged for heads.
        seq_len: queries of the whole sequence, which has as many keys; by default the last of cu_seqlens.
        cu_seqlens: where each packed document starts, and the end of the last, for a mask that reads them: int32 or
            int64 [documents + 1], or a list. `attention` passes them to the module.
        method: "all_gather", "ring", "ulysses", "ulysses+all_gather" or "ulysses+ring", as in `Shard`; "auto" is the
            one that is predicted to take the least time, forward and backward, of those that fit in memory.
        balance: which rows ranks hold: "contiguous", "head_tail" or "greedy" (chunks by falling work, each to the rank
            with the least so far); "auto" compares these, improved by exchanges of chunks.
        layout: the rows of each rank, in place of `balance`, for several masks of one sequence: those of a model's
            layers, which pass rows to each other.
        inputs: what the mask reads, by the keywords of a call and of the whole sequence, such as lengths, document ids
            or a block mask.
        q_heads, kv_heads: numbers of heads, for masks that differ between heads, and for method "auto", which considers
            Ulysses only if they are given.
        batch: sequences of a call, for "auto".
        prove: prove that each visible score is computed once, with keys that its rank has.

    Returns:
        the plan. `Shard.scatter` takes this rank's rows of a tensor, `Shard.position_ids` are their positions.

    Raises:
        ValueError or AttngenError: one sentence that says what is wrong and what was expected.
    """
    kernel, given = module_kernel(module), dict(inputs or {})
    ends = None if cu_seqlens is None else [int(end) for end in cu_seqlens]
    heads = _heads(kernel, given, q_heads, kv_heads)
    counted = heads if None not in heads else (1, 1)  # where they are not known, the mask is the same for all
    visible = count(kernel.ir, _rows(seq_len, ends), kernel.chunk, given, ends, *counted)  # type: ignore[arg-type]
    if method == "auto":
        divides = _divides(kernel, given, mesh) and q_heads is not None
        method = _fastest(visible, sizes_of(mesh), _sizes(kernel, heads, batch), divides)
    cuts = {i.name: torch.tensor(ends, dtype=torch.int32) for i in kernel.ir.inputs if ends and is_starts(i)}
    shard = _shard(visible, mesh, method, layout or balance, cuts)
    if prove:
        verify(transfers_of(shard), visible)
    return shard


def attention(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: Shard,
    return_lse: bool = False,
    sum_gradients: bool = True,
    **inputs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries with the keys of the whole sequence, by a generated module; differentiable in q,
    k, v and learned inputs. All ranks call it, and all run its backward, also those that hold no rows.

    Args:
        module: what `attngen.build` returns for a spec with `positions`, or its `attention`; that of the plan.
        q: [B, Hq, rows, D] of this rank's rows, in the order of `plan.position_ids`: any strides with the last
            dimension contiguous, of the module's dtypes. Or a DTensor on the plan's mesh, with Shard(2) in each of its
            dimensions.
        k: [B, Hkv, rows, D], as q.
        v: [B, Hkv, rows, Dv], as q.
        plan: the result of `attngen.distributed.plan`.
        return_lse: also return the natural-log LSE of every query's scores and its sink, differentiable.
        sum_gradients: gradients of learned inputs are summed over the ranks, in fp32 and in the order of ranks, so that
            all have the gradient for the sum of the ranks' losses. False leaves each rank its own part, for data
            parallelism over the same ranks.
        inputs: the module's other arguments, whole on every rank, as in a call on one: lengths, document ids, biases,
            sinks, slopes, a block mask, scale, and dropout_p with the same seed on all ranks. cu_seqlens are passed by
            themselves if the plan was made from them. q_chunks, kv_chunks, q_len and kv_len are the plan's.

    Returns:
        [B, Hq, rows, Dv] in q's dtype, and with return_lse also [B, Hq, rows] fp32; DTensors if q is one.

    Raises:
        ValueError: one sentence. What is wrong in the first call of some sizes is the same error on every rank.
        RuntimeError: one sentence: another rank has exited or does not answer within the process group's timeout.
    """
    kernel = module_kernel(module)
    if plan.layout.chunk != kernel.chunk:
        raise ValueError(
            f"attention: the plan has chunks of {plan.layout.chunk} rows and the module of {kernel.chunk}; expected a "
            "plan of this module"
        )
    rows = plan.layout.seq_len
    given = {**plan.inputs, **inputs, "q_len": rows, "kv_len": rows}
    return over_ranks(kernel, q, k, v, plan=plan, return_lse=return_lse, sum_gradients=sum_gradients, **given)


def _rows(seq_len: int | None, ends: list[int] | None) -> int:
    """Return the rows of a sequence."""
    if seq_len is None and not ends:
        raise AttngenError("plan: seq_len is missing; expected the rows of the whole sequence, or cu_seqlens")
    end = ends[-1] if ends else 0
    if seq_len is not None and end > seq_len:
        raise AttngenError(f"plan: cu_seqlens end at {end} and seq_len is {seq_len}; expected an end within it")
    return end if seq_len is None else seq_len


def layout_of(visible: Visible, mesh: Any, method: str, balance: Balance = "auto") -> Layout:
    """Return which rank of a mesh holds which rows of a sequence, as `plan` decides it."""
    ranks = sizes_of(mesh)
    of_heads = ranks[-1] if method.startswith("ulysses") else 1
    return divided(balanced(visible, math.prod(ranks) // of_heads, balance).layout, of_heads)


def _shard(
    visible: Visible, mesh: Any, method: str, rows: Balance | Layout, inputs: Mapping[str, torch.Tensor]
) -> Shard:
    """Return the plan of a method for the visible scores of a sequence. rows: those of the ranks, or how to choose."""
    of_heads = sizes_of(mesh)[-1] if method.startswith("ulysses") else 1
    layout = rows if isinstance(rows, Layout) else layout_of(visible, mesh, method, rows)
    if (layout.seq_len, layout.chunk) != (visible.seq_len, visible.chunk):
        raise AttngenError(
            f"plan: the layout has {layout.seq_len} rows in chunks of {layout.chunk}; expected {visible.seq_len} in "
            f"chunks of {visible.chunk}, those of the module"
        )
    groups = without_heads(layout, of_heads)
    steps = ring_steps(visible, groups) if method.endswith("ring") else ()
    return Shard(layout, mesh, method, tuple(map(visible.needed, groups.owned)), steps, inputs)


def transfers_of(shard: Shard) -> Plan:
    """Return what the calls of a plan transfer and launch, with one head for each rank that divides heads, as
    `proof.verify` takes it."""
    method: Method = "ring" if shard.rings else "all_gather"
    return expanded(method, shard.layout, shard.heads, shard.needs, shard.steps, shard.heads, shard.heads)


def _heads(
    kernel: ModuleKernel, inputs: Mapping[str, Any], q_heads: int | None, kv_heads: int | None
) -> tuple[int | None, int | None]:
    """Return the numbers of heads, from the arguments or from inputs that have them; None where they are not known."""
    meaning, shapes = kernel.ir.meaning, dict[str, int]()
    for name, x in inputs.items():
        shapes |= {dim: n for dim, n in zip(kernel.dims.get(name, ()), getattr(x, "shape", ())) if n > 1}
    blocks = inputs.get("block_mask")
    if isinstance(blocks, torch.Tensor) and blocks.dim() > 2 and blocks.shape[-3] > 1:
        shapes["Hq"] = blocks.shape[-3]
    found = q_heads or shapes.get("Hq")
    of_sharing = {"mha": found, "mqa": 1}.get(kernel.module.SHARING)
    of_keys = kv_heads or shapes.get("Hkv") or of_sharing
    facts = [e for fact in meaning.known for e in (fact.needs, fact.enough)]
    names = {name for e in (meaning.where, *facts) for name in symbol_names(e)}
    names |= {name for r in meaning.reads if r.name in names for e in r.index for name in symbol_names(e)}
    if (found is None or of_keys is None) and {"h", "hkv", "Hq", "Hkv", "group"} & names:
        raise AttngenError(f"plan: the mask of {kernel.ir.name} differs between heads; expected q_heads and kv_heads")
    return found, of_keys


def _sizes(kernel: ModuleKernel, heads: tuple[int | None, int | None], batch: int) -> Heads:
    """Return the sizes of a call for the model of time."""
    q_heads, module = heads[0] or Q_HEADS, kernel.module
    kv_heads = heads[1] or min(q_heads, KV_HEADS[module.SHARING])
    return Heads(batch, q_heads, kv_heads, module.HEAD_DIM_QK, module.HEAD_DIM_V, module.DTYPES[0].itemsize)


def _divides(kernel: ModuleKernel, inputs: Mapping[str, Any], mesh: Any) -> bool:
    """Return whether ranks may compute a part of the heads. Raise AttngenError if the mesh is made for that and they
    cannot."""
    undivided = kernel.needs_all_heads(inputs)
    if undivided and len(sizes_of(mesh)) == 2:
        raise AttngenError(
            f"plan: {undivided}, and the mesh has a second dimension, in which heads are divided; expected a mesh of "
            "one dimension"
        )
    return not undivided and not kernel.ir.dropout


def _fastest(visible: Visible, ranks: tuple[int, ...], heads: Heads, divides: bool) -> str:
    """Return the method that is predicted to take the least time of those that fit in memory.

    With two dimensions of ranks, heads are divided among the second, and the methods between the first are compared.
    """
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    device = next((device for device in LINKS if device in name), "H200")
    gpus = math.gcd(ranks[0], LINKS[device].gpus)
    cluster = Cluster(device, gpus, ranks[0] // gpus)
    candidates: list[Method] = ["all_gather", "ring"]
    if len(ranks) == 1 and divides and heads.q_heads % ranks[0] == heads.kv_heads % ranks[0] == 0:
        candidates.append("ulysses")
    found = [predict(visible, cluster, heads, method) for method in candidates]
    best = min(found, key=lambda p: (p.memory > LINKS[device].memory_bytes, p.seconds))
    return f"ulysses+{best.method}" if len(ranks) == 2 else best.method
