"""Context parallelism on several processes over gloo, compared with whole tensors on one.

tests/test_distributed.py runs this file: python -m tests.distributed_ranks RANK RANKS STORE PART
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded
from torch.utils.checkpoint import checkpoint

from attngen.distributed.attention import attention
from attngen.distributed.collectives import add_parts, route, sum_over_ranks
from attngen.distributed.layout import Layout, without_heads
from attngen.distributed.shard import Shard
from tests.distributed_reference import Eager, Mask, needs_of, positions, steps_of, whole_attention

N, CHUNK, B, HQ, HKV, D, DV = 37, 4, 2, 8, 4, 8, 6
DOCUMENTS = torch.tensor([0] * 5 + [1] * 16 + [2] + [3] * 15)

MASKS: dict[str, Mask] = {
    "causal": lambda q, k, _: k <= q,
    "window": lambda q, k, _: (k <= q) & (q - k < 7),
    "documents": lambda q, k, inputs: (k <= q) & (inputs["documents"][q] == inputs["documents"][k]),
    "prefix": lambda q, k, _: (k <= q) | (k < 11),
    "some rows see nothing": lambda q, k, _: (k <= q) & (q % 3 > 0) & (k >= 6),
    "past the start": lambda q, k, _: (k < q - 20) | (k < 2),
}


def layouts(ranks: int) -> dict[str, Layout]:
    """Ways to divide ten chunks among ranks, the last of which has one row."""
    chunks = range(10)
    size = -(-10 // ranks)
    owned = {
        "contiguous": [chunks[r * size : (r + 1) * size] for r in range(ranks)],
        "in turns": [[c for c in chunks if c % ranks == r] for r in range(ranks)],
        "head and tail": [[c for c in chunks if min(c, 9 - c) % ranks == r] for r in range(ranks)],
        "uneven": [[0], [*chunks[2:], 1]] + [[]] * (ranks - 2),
    }
    return {name: Layout(N, CHUNK, tuple(tuple(sorted(c)) for c in found)) for name, found in owned.items()}


def shard_of(layout: Layout, mesh: Any, method: str, mask: Mask, inputs: Any = None, heads: int = 1) -> Shard:
    inputs = inputs or {"documents": DOCUMENTS}
    inner = without_heads(layout, heads)
    return Shard(layout, mesh, method, needs_of(inner, mask, inputs), steps_of(inner, mask, inputs))


def tensors(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """q, k, v and learned inputs, and what a loss weighs out and lse with; equal on all ranks."""
    g = torch.Generator().manual_seed(0)
    shapes = [(B, HQ, N, D), (B, HKV, N, D), (B, HKV, N, DV), (B, HQ, N, DV), (B, HQ, N)]
    found = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
    return found, {"sink": torch.randn(HQ, generator=g), "slope": torch.rand(HQ, generator=g) * 0.2}


def loss_of(out: torch.Tensor, lse: torch.Tensor | None, weights: list[torch.Tensor]) -> torch.Tensor:
    loss = (out * weights[0]).sum()
    if lse is not None:
        loss = loss + torch.where(lse.isfinite(), lse * weights[1], 0).sum()
    return loss


def expected(mask: Mask, sink: bool, with_lse: bool = True) -> list[torch.Tensor]:
    """out, lse and the gradients of q, k, v, slope and sink, of whole tensors in fp64."""
    (*qkv, w_out, w_lse), learned = tensors(torch.float64)
    args = [x.requires_grad_() for x in (*qkv, learned["slope"].double(), learned["sink"].double())]
    inputs = {"documents": DOCUMENTS, "slope": args[3], **({"sink": args[4]} if sink else {})}
    out, lse = whole_attention(*args[:3], mask, inputs)
    loss = loss_of(out, lse if with_lse else None, [w_out, w_lse])
    return [out, lse, *torch.autograd.grad(loss, args if sink else args[:4])]


Call = Callable[..., Any]


def found(shard: Shard, mask: Mask, sink: bool, dtype: torch.dtype = torch.float32, call: Call | None = None) -> Any:
    """The same of this rank's rows. call(kernel, q, k, v, **arguments): how attention is called."""
    (*whole, w_out, w_lse), learned = tensors(dtype)
    q, k, v, w_out, w_lse = (shard.scatter(x).clone() for x in (*whole, w_out, w_lse))
    args = [x.requires_grad_() for x in (q, k, v, learned["slope"], *([learned["sink"]] if sink else []))]
    inputs = {"documents": DOCUMENTS, **dict(zip(("slope", "sink"), args[3:]))}
    kernel = Eager(shard.layout, mask)
    out, lse = (call or attention)(kernel, q, k, v, plan=shard, return_lse=True, **inputs)
    return [out, lse, *torch.autograd.grad(loss_of(out, lse, [w_out, w_lse]), args)]


def compare(shard: Shard, mask: Mask, sink: bool, dtype: torch.dtype = torch.float32, call: Call | None = None) -> None:
    """Compare all results with those of whole tensors, and those of a second run bit by bit."""
    ours, again = (found(shard, mask, sink, dtype, call) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(ours, again))
    rows = positions(shard.layout, shard.layout.owned[shard.rank])
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    names = ("out", "lse", "dq", "dk", "dv", "d slope", "d sink")
    for name, x, whole in zip(names, ours, expected(mask, sink)):
        y = whole if name.startswith("d ") else whole[:, :, rows]
        assert x.shape == y.shape and not x.isnan().any(), (name, x.shape, y.shape)
        assert x.dtype == (torch.float32 if name == "lse" or name.startswith("d ") else dtype), (name, x.dtype)
        hidden = y == -torch.inf
        assert torch.equal(hidden, x == -torch.inf), name
        x, y = (z.double().masked_fill(hidden, 0) for z in (x, y))
        error = (x - y).norm() / whole.double()[whole.isfinite()].norm()
        assert error < bound, (name, shard.method, shard.layout.owned, float(error))


def refused(text: str, call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert text in str(error), error
        return str(error)
    raise AssertionError(f"not refused: {text}")


# ---------------------------------------------------------------------- results


def shards(ranks: int, mask: Mask) -> Iterator[Shard]:
    line, world = init_device_mesh("cpu", (ranks,)), dist.group.WORLD
    for at, layout in enumerate(layouts(ranks).values()):
        for method in ("all_gather", "ring", "ulysses"):
            yield shard_of(layout, line if at % 2 else world, method, mask)
        if ranks == 4:
            square = init_device_mesh("cpu", (2, 2))
            for method in ("ulysses+all_gather", "ulysses+ring"):
                yield shard_of(layout, square, method, mask, heads=2)


def results(ranks: int) -> None:
    for at, (name, mask) in enumerate(MASKS.items()):
        for shard in shards(ranks, mask):
            compare(shard, mask, sink=bool(at % 2) or name == "causal")
    layout, mask = layouts(ranks)["head and tail"], MASKS["window"]
    for method in ("all_gather", "ring", "ulysses"):
        compare(shard_of(layout, dist.group.WORLD, method, mask), mask, sink=True, dtype=torch.bfloat16)


def ways_to_call(ranks: int) -> None:
    """Checkpoints, torch.compile, strided and DTensor arguments give the same results."""
    mask, mesh = MASKS["causal"], init_device_mesh("cpu", (ranks,))

    def checkpointed(kernel: Any, *qkv: torch.Tensor, **more: Any) -> Any:
        return checkpoint(lambda *qkv: attention(kernel, *qkv, **more), *qkv, use_reentrant=False)

    def strided(kernel: Any, *qkv: torch.Tensor, **more: Any) -> Any:
        return attention(kernel, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv), **more)

    def compiled(kernel: Any, *qkv: torch.Tensor, **more: Any) -> Any:
        def step(*qkv: torch.Tensor) -> Any:
            out, lse = attention(kernel, *(x * 1.0 for x in qkv), **more)
            return out + 0.0, lse

        return torch.compile(step, backend="aot_eager")(*qkv)

    def sharded(kernel: Any, *qkv: torch.Tensor, **more: Any) -> Any:
        placements = [Sharded(2)] * more["plan"].mesh.ndim
        shapes = [torch.Size((*x.shape[:2], N, x.shape[3])) for x in qkv]
        given = [
            DTensor.from_local(x, more["plan"].mesh, placements, shape=shape, stride=torch.empty(shape).stride())
            for x, shape in zip(qkv, shapes)
        ]
        out, lse = attention(kernel, *given, **more)
        assert isinstance(out, DTensor) and out.shape == (B, HQ, N, DV) and lse.shape == (B, HQ, N)
        assert list(out.placements) == list(lse.placements) == placements
        return out.to_local(), lse.to_local()

    for layout in ("contiguous", "uneven"):
        for method in ("all_gather", "ring", "ulysses"):
            shard = shard_of(layouts(ranks)[layout], mesh, method, mask)
            for call in (checkpointed, strided, sharded):
                compare(shard, mask, sink=True, call=call)
    compare(shard, mask, sink=True, call=compiled)
    if ranks == 4:
        square = init_device_mesh("cpu", (2, 2))
        compare(shard_of(layouts(4)["in turns"], square, "ulysses+ring", mask, heads=2), mask, sink=True, call=sharded)
    without_gradients(shard, mask)
    own_part_of_gradients(shard, mask)
    rows_and_positions(shard)


def without_gradients(shard: Shard, mask: Mask) -> None:
    (q, k, v, *_), learned = tensors()
    local = [shard.scatter(x) for x in (q.requires_grad_(), k, v)]
    kernel = Eager(shard.layout, mask)
    with torch.no_grad():
        out = attention(kernel, *local, plan=shard, **learned)
    assert isinstance(out, torch.Tensor) and not out.requires_grad
    assert torch.equal(out, attention(kernel, *local, plan=shard, **learned))


def own_part_of_gradients(shard: Shard, mask: Mask) -> None:
    """Without a sum over ranks, each rank has a part of the gradient of a learned input."""

    def call(kernel: Any, *qkv: torch.Tensor, **more: Any) -> Any:
        return attention(kernel, *qkv, sum_gradients=False, **more)

    part, whole = (found(shard, mask, sink=True, call=c)[-1] for c in (call, None))
    dist.all_reduce(part)
    assert torch.allclose(part, whole, rtol=1e-5, atol=1e-6)


def rows_and_positions(shard: Shard) -> None:
    """scatter and gather are inverse and differentiable; positions are those of the rows."""
    x = torch.arange(2.0 * N).view(2, N).requires_grad_()
    local = shard.scatter(x, 1)
    assert torch.equal(local[0].long(), shard.position_ids) and shard.rows == local.shape[1]
    whole = shard.gather(local, -1)
    assert torch.equal(whole, x)
    (grad,) = torch.autograd.grad((whole * x.detach().cos()).sum(), x)
    assert torch.equal(grad, x.detach().cos())


def kernels_that_need_not_run(ranks: int) -> None:
    """A ring computes only visible steps; a window's ring ends early; nothing is sent that no rank needs."""
    layout, mask = layouts(ranks)["contiguous"], MASKS["window"]
    shard = shard_of(layout, dist.group.WORLD, "ring", mask)
    assert len(shard.steps) == 2
    (q, k, v, *_), learned = tensors()
    kernel = Eager(layout, mask)
    attention(kernel, *(shard.scatter(x) for x in (q, k, v)), plan=shard, **learned)
    assert kernel.launches == (1 if shard.rank == 0 else 2)
    ways = shard_of(layout, dist.group.WORLD, "all_gather", mask).to_needs
    assert {of for of, _ in ways.receives} == ({shard.rank - 1} if shard.rank else set())


def order_of_sums(ranks: int) -> None:
    """Parts are added in fp32 in the order of ranks, though they differ by orders of magnitude."""
    world, rank, layout = dist.group.WORLD, dist.get_rank(), layouts(ranks)["in turns"]
    of_ranks = [torch.randn(N, 3, generator=torch.Generator().manual_seed(r)) * 1000.0**r for r in range(ranks)]
    total = of_ranks[0]
    for x in of_ranks[1:]:
        total = total + x
    assert torch.equal(sum_over_ranks(of_ranks[rank], world), total)
    assert ranks < 3 or not torch.equal(sum(reversed(of_ranks)), total)
    everything = [tuple(range(layout.chunks))] * ranks
    (own,) = add_parts([of_ranks[rank]], route(layout, everything, layout.owned, rank), world)
    assert torch.equal(own, total[positions(layout, layout.owned[rank])])


def sums_of_few_rows(ranks: int) -> None:
    """Of most rows one rank alone has a part, and its memory has the sums if they are at least half of it; of the
    others, parts are added in fp32."""
    world, rank, layout = dist.group.WORLD, dist.get_rank(), layouts(ranks)["contiguous"]
    needs = needs_of(layout, MASKS["window"], {})
    parts = []
    for r, chunks in enumerate(needs):
        chance = torch.Generator().manual_seed(r)
        parts.append(torch.randn(len(positions(layout, chunks)), 3, generator=chance).bfloat16())
    total = torch.zeros(N, 3)
    for chunks, part in zip(needs, parts):
        total[positions(layout, chunks)] += part
    (own,) = add_parts([parts[rank]], route(layout, needs, layout.owned, rank), world)
    assert torch.equal(own, total[positions(layout, layout.owned[rank])].bfloat16())
    shared = own.untyped_storage().data_ptr() == parts[rank].untyped_storage().data_ptr()
    assert shared == (2 * len(own) >= len(parts[rank])) and (shared or rank)


# ---------------------------------------------------------------------- faults


def wrong_calls(ranks: int) -> None:
    """What is wrong on one rank is the same sentence on all, and the next call is right."""
    rank, world, mask, layout = dist.get_rank(), dist.group.WORLD, MASKS["causal"], layouts(ranks)["contiguous"]
    (q, k, v, *_), learned = tensors()

    def call(shard: Shard, cut: int = 0, heads: int = HKV, batch: int = B, kernel: Any = None, **more: Any) -> Any:
        local = [shard.scatter(x)[:batch] for x in (q, k[:, :heads], v[:, :heads])]
        local = [x[:, :, cut:] for x in local] if rank == 1 else local
        return attention(kernel or Eager(layout, mask), *local, plan=shard, **{**learned, **more})

    last = rank == ranks - 1
    other = shard_of(layouts(ranks)["in turns" if rank % 2 else "contiguous"], world, "ring", mask)
    said = [refused("ranks 0 and 1 have different plans", other.check_equal)]
    method = "ring" if last else "all_gather"
    said.append(
        refused(f"ranks 0 and {ranks - 1} have different plans", lambda: call(shard_of(layout, world, method, mask)))
    )
    shard = shard_of(layout, world, "all_gather", mask)
    said.append(refused("on rank 1 q has 11 rows" if ranks == 4 else "on rank 1 q has", lambda: call(shard, cut=1)))
    said.append(refused(f"ranks 0 and {ranks - 1} make different calls", lambda: call(shard, batch=1 if last else B)))
    other = Eager(layout, mask, digest="other" if last else "")
    said.append(refused("expected on all ranks the same kernel", lambda: call(shard, kernel=other)))
    ulysses = shard_of(layout, world, "ulysses", mask)
    said.append(refused(f"k has 1 heads and ulysses divides them among {ranks}", lambda: call(ulysses, heads=1)))
    of_heads = Eager(layout, mask, whole_heads="dropout counts heads")
    said.append(refused("dropout counts heads, and ulysses divides heads", lambda: call(ulysses, kernel=of_heads)))
    kept = Eager(layout, mask)
    kept.rows = ("lse", "maximum")  # type: ignore[assignment]
    ring = shard_of(layout, world, "ring", mask)
    said.append(refused("the kernel keeps lse, maximum, and a ring merges only lse", lambda: call(ring, kernel=kept)))
    x = torch.zeros(1, shard.rows + last, 3)
    said.append(refused(f"on rank {ranks - 1} gather's x has", lambda: shard.gather(x, 1)))
    heard: list[Any] = [None] * ranks
    dist.all_gather_object(heard, said)
    assert all(sentences == said for sentences in heard), heard
    call(shard)
    if rank == 1:
        refused("on rank 1 q has", lambda: call(shard, cut=1))  # of equal sizes: this rank raises it alone
    call(shard)
    refused("scatter: x has 1 rows", lambda: shard.scatter(torch.zeros(1, 1, 1)))


class InFp32(Eager):
    """Attention whose parts of dK and dV are fp32, as those of modules for bf16 in Triton's interpreter."""

    def backward(self, *args: Any) -> Any:
        dq, dk, dv, of_inputs = super().backward(*args)
        return dq, dk.float(), dv.float(), of_inputs


def parts_of_one_dtype(ranks: int) -> None:
    """A rank whose kernels give fp32 sends to one that computes nothing, which knows only the dtype of k."""
    layout, mask = layouts(ranks)["contiguous"], MASKS["causal"]
    whole = [x.requires_grad_() for x in tensors()[0][:3]]
    weights = tensors()[0][3]
    expected = torch.autograd.grad(whole_attention(*whole, mask, {})[0], whole, weights)
    for method in ("ring", "all_gather"):
        shard = shard_of(layout, dist.group.WORLD, method, mask)
        local = [shard.scatter(x.detach()).bfloat16().requires_grad_() for x in whole]
        out = attention(InFp32(layout, mask), *local, plan=shard)
        found = torch.autograd.grad(out, local, shard.scatter(weights).bfloat16())
        for x, y in zip(found, map(shard.scatter, expected)):
            assert x.dtype == torch.bfloat16 and (x - y).norm() <= 2e-2 * y.norm(), method


def wrong_plans(ranks: int) -> None:
    world, layout, mask = dist.group.WORLD, layouts(ranks)["contiguous"], MASKS["causal"]
    refused("method is 'rings'; expected one of all_gather", lambda: Shard(layout, world, "rings"))
    refused("expected 2 with method 'ulysses+ring'", lambda: Shard(layout, world, "ulysses+ring"))
    refused(
        f"the layout is for {ranks + 1} ranks", lambda: Shard(Layout(N, CHUNK, (*layout.owned, ())), world, "ulysses")
    )
    refused("needs are ()", lambda: Shard(layout, world))
    refused("needs are", lambda: Shard(layout, world, needs=[(1, 0)] * ranks))
    refused(
        "in step 0 each rank as its own", lambda: Shard(layout, world, "ring", steps=steps_of(layout, mask, {})[1:])
    )
    steps, needs = steps_of(layout, mask, {}), needs_of(layout, mask, {})
    once = "expected each of these once, and no rank twice as a source"
    refused(once, lambda: Shard(layout, world, "ring", needs, steps[:1]))
    refused(once, lambda: Shard(layout, world, "ring", needs, [*steps, steps[1]]))
    idle = [steps[0], *([(of, ()) for of, _ in step] for step in steps[1:])]
    refused(once, lambda: Shard(layout, world, "ring", needs, idle))


def lost(ranks: int) -> None:
    """Where the last rank hangs, and where it has exited, each other rank raises one sentence in time."""
    seconds, mask, layout = 2, MASKS["causal"], layouts(ranks)["in turns"]
    (q, k, v, *_), learned = tensors()
    limit = datetime.timedelta(seconds=seconds)
    made = [shard_of(layout, dist.new_group(timeout=limit), method, mask) for method in ("ring", "all_gather") * 2]
    local = [made[0].scatter(x) for x in (q, k, v)]
    kernel = Eager(layout, mask)
    for shard in made:
        attention(kernel, *local, plan=shard, **learned)
    if dist.get_rank() == ranks - 1:
        time.sleep(2 * seconds + 3)
        os._exit(0)
    for at, shard in enumerate(made):
        if at == 2:
            time.sleep(4)  # until the last rank has exited
        start = time.monotonic()
        refused("a transfer with the ranks", lambda shard=shard: attention(kernel, *local, plan=shard, **learned))
        assert time.monotonic() - start < (seconds + 2 if at < 2 else 2)


PARTS: dict[str, tuple[Callable[[int], None], ...]] = {
    "right": (
        results,
        ways_to_call,
        kernels_that_need_not_run,
        order_of_sums,
        sums_of_few_rows,
        parts_of_one_dtype,
        wrong_plans,
        wrong_calls,
    ),
    "lost": (lost,),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=sys.argv[3], timeout=limit)
    for part in PARTS[sys.argv[4]]:
        start = time.monotonic()
        part(ranks)
        print(f"{part.__name__}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    print("right", flush=True)
    os._exit(0)  # without waiting for ranks that are lost
