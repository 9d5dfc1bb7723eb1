"""Training of transformers models on several processes over gloo, compared with one process.

tests/test_transformers_distributed.py runs this file:
python -m tests.transformers_ranks RANK RANKS STORE FOLDER METHOD PART...
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import attngen.integrations.transformers as hf
from attngen.conformance.interpreter import lighten
from attngen.errors import AttngenError
from tests.transformers_models import WORDS, made

CHUNK, ROWS, BOUND = 64, 200, 2e-5
ENDS = [0, 50, 51, 130, ROWS]  # of packed documents
MORE: dict[str, dict[str, Any]] = {name: {"sliding_window": 40} for name in ("gpt_oss", "gemma3", "gemma2", "mistral")}
ONE = "one_process"  # the implementation without a mesh
Step = tuple[torch.Tensor, dict[str, torch.Tensor]]  # a loss and the gradients


def model_of(name: str, how: str = "attngen") -> Any:
    """A model with random weights, the same on all ranks, in training."""
    return made(name, how, **MORE.get(name, {})).train()


def batch_of(kind: str = "") -> dict[str, torch.Tensor]:
    """Whole sequences: one, or by `kind` "two", "padded" ones, or "packed" documents; with "starts" they are given, as
    in one process, documents of gpt-oss see each other, whatever their position ids."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, WORDS, (2 if kind in ("two", "padded") else 1, ROWS), generator=g)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -100)
    if kind == "padded":
        padding = torch.ones_like(ids)
        padding[0, :70], padding[1, -30:] = 0, 0
        labels[padding * padding.roll(1, 1) == 0] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": padding}
    if kind in ("", "two"):
        return {"input_ids": ids, "labels": labels}
    labels[:, ENDS[:-1]] = -100  # no document predicts the first token of the next
    positions = torch.cat([torch.arange(b - a) for a, b in zip(ENDS, ENDS[1:])])[None]
    starts = {"cu_seq_lens_q": torch.tensor(ENDS, dtype=torch.int32)} if kind == "starts" else {}
    return {"input_ids": ids, "labels": labels, "position_ids": positions, **starts}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of all parameters by name, whole if they are sharded."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x.clone() for name, x in found.items()}
    return {name.replace("_orig_mod.", ""): x for name, x in whole.items()}


def step_of_one(name: str, kind: str) -> Step:
    """The loss and the gradients of one process."""
    model = model_of(name, ONE)
    loss = model(**batch_of(kind), use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


def same(model: Any, loss: torch.Tensor, wanted: Step) -> None:
    """Compare the sum of the ranks' losses, and gradients, with those of one process."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    expected, of_one = wanted
    found, worst = gradients(model), ("the loss", abs(total.item() / expected.item() - 1))
    assert found.keys() == of_one.keys()
    for key, x in found.items():
        worst = max(worst, (key, float((x - of_one[key]).norm() / of_one[key].norm())), key=lambda pair: pair[1])
    print(f"  worst error {worst[1]:.1e}: {worst[0]}", file=sys.stderr)
    assert worst[1] < BOUND, worst


# ---------------------------------------------------------------------- ways to train


def plain(model: Any, batch: dict[str, Any], wanted: Step, mesh: Any) -> None:
    """Parameters that all ranks have, whose gradients are added up."""
    loss = model(**hf.shard_batch(batch, model)).loss
    loss.backward()
    hf.sum_gradients(model, mesh)
    same(model, loss, wanted)


def checkpointed(model: Any, batch: dict[str, Any], wanted: Step, mesh: Any) -> None:
    """The backward computes layers again, after another batch was sharded."""
    model.gradient_checkpointing_enable()
    loss = model(**hf.shard_batch(batch, model)).loss
    hf.shard_batch({name: x[:, :150] for name, x in batch.items()}, model)
    loss.backward()
    hf.sum_gradients(model, mesh)
    same(model, loss, wanted)


def compiled(model: Any, batch: dict[str, Any], wanted: Step, mesh: Any) -> None:
    """torch.compile breaks the graph at attention; the second call compiles nothing."""
    local = hf.shard_batch(batch, model)
    call = torch.compile(model, backend="aot_eager")
    call(**local).loss.backward()
    model.zero_grad()
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    loss = call(**hf.shard_batch(batch, model)).loss
    loss.backward()
    assert counted and torch._dynamo.utils.counters["stats"]["unique_graphs"] == counted
    hf.sum_gradients(model, mesh)
    same(model, loss, wanted)


def sharded(model: Any, mesh: Any) -> Any:
    """The model in FSDP's parts over a mesh."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def of_fsdp(model: Any, batch: dict[str, Any], wanted: Step, mesh: Any) -> None:
    """FSDP2 over the same ranks takes the mean of their gradients, so the loss is multiplied. Its checkpoint holds the
    weights of one process."""
    one = model_of(model.config.model_type.removesuffix("_text"), ONE)
    sharded(model, mesh)
    loss = model(**hf.shard_batch(batch, model)).loss
    (loss * mesh.size()).backward()
    same(model, loss, wanted)
    folder = os.environ["CHECKPOINT"]
    save({"model": model.state_dict()}, checkpoint_id=folder)
    state = {"model": {name: torch.zeros_like(x) for name, x in one.state_dict().items()}}
    load(state, checkpoint_id=folder)
    assert all(torch.equal(x, state["model"][name]) for name, x in one.state_dict().items())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    parts = {"model": model.state_dict()}
    load(parts, checkpoint_id=folder)
    model.load_state_dict(parts["model"])
    again = model(**hf.shard_batch(batch, model)).loss
    assert torch.equal(again, loss)


def of_ddp(model: Any, batch: dict[str, Any], wanted: Step, mesh: Any) -> None:
    """DDP over the same ranks takes the mean of their gradients, too."""
    wrapped = DistributedDataParallel(model)
    loss = wrapped(**hf.shard_batch(batch, wrapped)).loss
    (loss * mesh.size()).backward()
    same(model, loss, wanted)


def of_accelerate(model: Any, batch: dict[str, Any], wanted: Step, mesh: Any) -> None:
    """accelerate's loop as docs/cookbook/huggingface.md shows it. It has no FSDP2 on CPUs, so they are named GPUs."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
    from accelerate.utils import DistributedType

    class ContextAccelerator(Accelerator):
        def _prepare_cp(self, *prepared: Any) -> Any:
            return prepared

    place = mesh.get_local_rank()
    os.environ |= {"RANK": str(place), "LOCAL_RANK": str(place), "WORLD_SIZE": str(mesh.size())}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # of a group that exists
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    layers = [type(model.model.layers[0]).__name__]
    accelerator = ContextAccelerator(
        parallelism_config=ParallelismConfig(cp_size=mesh.size()),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=layers
        ),
    )
    hf.register(mesh=accelerator.torch_device_mesh["cp"], chunk=CHUNK)
    loader = torch.utils.data.DataLoader([{name: x[0] for name, x in batch.items()}] * 2, batch_size=1)
    steps = torch.optim.AdamW(model.parameters())
    model, steps, loader = accelerator.prepare(model, steps, loader)
    losses = []
    for whole in loader:
        loss = model(**hf.shard_batch(whole, model)).loss
        accelerator.backward(loss * accelerator.num_processes)
        if not losses:
            same(model, loss, wanted)
        dist.all_reduce(loss := loss.detach())
        losses.append(float(loss))
        steps.step()
        steps.zero_grad()
    assert len(losses) == 2 and losses[1] < losses[0]


def square(model: Any, batch: dict[str, Any], wanted: Step, mesh: Any) -> None:
    """Two ranks for each of two sequences: FSDP2 over both dimensions, and over that of sequences alone."""
    own = mesh["dp"].get_local_rank()
    of_rank = {name: x[own : own + 1] for name, x in batch.items()}
    other = model_of(model.config.model_type.removesuffix("_text"))
    sharded(model, init_device_mesh("cpu", (mesh.size(),)))
    loss = model(**hf.shard_batch(of_rank, model, data_parallel=mesh["dp"])).loss
    (loss * mesh.size()).backward()
    same(model, loss, wanted)
    sharded(other, mesh["dp"])
    loss = other(**hf.shard_batch(of_rank, other, data_parallel=mesh["dp"].get_group())).loss
    (loss * mesh["dp"].size()).backward()
    hf.sum_gradients(other, mesh["cp"])
    same(other, loss, wanted)


def different(model: Any, batch: dict[str, Any], wanted: Step, mesh: Any) -> None:
    """The first batch is compared, and all ranks say that it is not the same."""
    try:
        hf.shard_batch({name: x + mesh.get_local_rank() for name, x in batch.items()}, model)
    except AttngenError as error:
        assert "ranks of the mesh have different batches; expected the same whole batch" in str(error)
    else:
        raise AssertionError("not refused")
    hf.shard_batch(batch, model)


Way = Callable[[Any, dict[str, Any], Step, Any], None]
PARTS: dict[str, tuple[str, str, Way]] = {  # a model, a kind of batch, and how it is trained
    "gpt_oss": ("gpt_oss", "", of_fsdp),
    "gemma3": ("gemma3", "", checkpointed),
    "llama": ("llama", "packed", plain),
    "compiled": ("llama", "packed", compiled),
    "different": ("llama", "none", different),
    "padded": ("gemma3", "padded", plain),
    "ddp": ("llama", "packed", of_ddp),
    "accelerate": ("llama", "packed", of_accelerate),
    "packed gpt_oss": ("gpt_oss", "starts", plain),
    "mistral": ("mistral", "packed", plain),
    "qwen3": ("qwen3", "", plain),
    "gemma2": ("gemma2", "", plain),
    "square gpt_oss": ("gpt_oss", "two", square),
    "square gemma3": ("gemma3", "two", square),
}


def main(rank: int, ranks: int, folder: Path, method: str, parts: list[str]) -> None:
    line = init_device_mesh("cpu", (ranks,))
    hf.register(name=ONE)
    steps = [step for step in dict.fromkeys(PARTS[part][:2] for part in parts) if step[1] != "none"]
    for at, (name, kind) in enumerate(steps):
        if at % ranks == rank:
            torch.save(step_of_one(name, kind), folder / f"{name}{kind}")
    dist.barrier()
    for part in parts:
        start = time.monotonic()
        name, kind, run = PARTS[part]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")) if run is square else line
        hf.register(mesh=mesh["cp"] if run is square else mesh, chunk=CHUNK, method=method)
        wanted = None if kind == "none" else torch.load(folder / f"{name}{kind}")
        run(model_of(name), batch_of(kind), wanted, mesh)
        print(f"{part}: {time.monotonic() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    lighten()
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    limit = datetime.timedelta(seconds=1200)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=sys.argv[3], timeout=limit)
    main(rank, ranks, Path(sys.argv[4]), sys.argv[5], sys.argv[6:])
    print("right", flush=True)
    os._exit(0)  # without waiting for ranks that failed
