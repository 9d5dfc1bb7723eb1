"""Training of transformers models on several processes over gloo, compared with one process.

tests/test_transformers_distributed.py runs this file:
python -m tests.transformers_ranks RANK RANKS STORE FOLDER PART...
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attngen.integrations.transformers as hf
from attngen.conformance.interpreter import lighten
from tests.transformers_models import WORDS, made

CHUNK, ROWS, BOUND = 64, 200, 2e-5
ENDS = [0, 50, 51, 130, ROWS]  # of packed documents
MORE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 40},
    "gemma3": {"sliding_window": 40},
    "llama": {},
}
ONE = "one_process"  # the implementation without a mesh


def model_of(name: str, how: str = "attngen") -> Any:
    """A model with random weights, the same on all ranks, in training."""
    return made(name, how, **MORE.get(name, {})).train()


@cache
def batch_of(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of whole sequences: packed documents for Llama, else two sequences."""
    g = torch.Generator().manual_seed(seed)
    packed = name == "llama"
    ids = torch.randint(3, WORDS, (1 if packed else 2, ROWS), generator=g)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -100)
    if not packed:
        return {"input_ids": ids, "labels": labels}
    labels[:, ENDS[:-1]] = -100  # no document predicts the first token of the next
    positions = torch.cat([torch.arange(b - a) for a, b in zip(ENDS, ENDS[1:])])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of all parameters by name, whole if they are sharded."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for name, x in found.items()}


def step_of_one(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of one process."""
    model = model_of(name, ONE)
    loss = model(**batch_of(name), use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


def same(name: str, model: Any, loss: torch.Tensor, wanted: Any) -> None:
    """Compare the sum of the ranks' losses, and gradients, with those of one process."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    expected, of_one = wanted
    error = abs(total.item() - expected.item()) / abs(expected.item())
    assert error < BOUND, (name, total, expected)
    found, worst = gradients(model), ("", 0.0)
    assert found.keys() == of_one.keys()
    for key, x in found.items():
        worst = max(worst, (key, float((x - of_one[key]).norm() / of_one[key].norm())), key=lambda pair: pair[1])
    print(f"{name}: loss {error:.1e}, worst gradient {worst[1]:.1e} of {worst[0]}", file=sys.stderr)
    assert worst[1] < BOUND, (name, worst)


def plain(name: str, wanted: Any) -> None:
    """Parameters on all ranks, whose gradients are added up."""
    model = model_of(name)
    loss = model(**hf.shard_batch(batch_of(name), model)).loss
    loss.backward()
    hf.sum_gradients(model, dist.group.WORLD)
    same(name, model, loss, wanted)


PARTS: dict[str, tuple[str, Callable[[str, Any], None]]] = {
    "gpt_oss": ("gpt_oss", plain),
    "gemma3": ("gemma3", plain),
    "llama": ("llama", plain),
}


def main(rank: int, ranks: int, folder: Path, parts: list[str]) -> None:
    hf.register(name=ONE)
    hf.register(mesh=init_device_mesh("cpu", (ranks,)), chunk=CHUNK)
    for at, name in enumerate(dict.fromkeys(PARTS[part][0] for part in parts)):
        if at % ranks == rank and not (folder / name).exists():
            torch.save(step_of_one(name), folder / name)
    dist.barrier()
    for part in parts:
        start = time.monotonic()
        name, run = PARTS[part]
        run(name, torch.load(folder / name))
        print(f"{part}: {time.monotonic() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    lighten()
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    limit = datetime.timedelta(seconds=1200)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=sys.argv[3], timeout=limit)
    main(rank, ranks, Path(sys.argv[4]), sys.argv[5:])
    print("right", flush=True)
    os._exit(0)  # without waiting for ranks that failed
