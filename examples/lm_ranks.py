"""A language model's sequences on several ranks (context parallelism), by modules that are built with `positions`."""

from __future__ import annotations

import functools
import io
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import yaml
from decoder import PLAIN, ROOT, Attend, Variant, stop
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

CHUNKS = {"cuda": 384, "cpu": 64}  # rows that ranks get at a time


def start(ranks: int, device: str) -> DeviceMesh:
    """The mesh of the processes that torchrun started. Only the first of them prints."""
    found = int(os.environ.get("WORLD_SIZE", 1))
    if found != ranks:
        stop(
            f"--context-parallel {ranks}: {found} processes run; start it by "
            f"`torchrun --nproc-per-node {ranks} examples/train_lm.py ...`"
        )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("cp",))
    if dist.get_rank():
        sys.stdout = io.StringIO()
    return mesh


class Part:
    """What a rank computes of sequences of some length with a module, or all of it with another attention.

    positions: those of its rows in a sequence, int64 [rows]; None if it has all. attend: attention of its rows.
    """

    def __init__(self, chosen: Variant, mesh: DeviceMesh | None, device: str, seq: int, exact: Attend) -> None:
        self.mesh = None if chosen.name in PLAIN else mesh
        self.positions: torch.Tensor | None = None
        self.attend = exact
        if self.mesh is not None:
            from attngen.distributed import plan

            module = module_with_positions(chosen.name, CHUNKS[device])
            self.plan = plan(module, self.mesh, seq_len=seq)
            self.positions = self.plan.position_ids
            self.attend = functools.partial(over_ranks, module, self.plan)

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's columns of tokens [B, seq]."""
        return batch if self.mesh is None else self.plan.scatter(batch, 1)

    def sum_gradients(self, model: torch.nn.Module) -> None:
        if self.mesh is not None:
            from attngen.distributed import sum_gradients

            sum_gradients(model, self.mesh)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, of a tensor without gradients."""
        if self.mesh is not None:
            dist.all_reduce(x, group=self.mesh.get_group())
        return x


def over_ranks(
    module: Any, plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0
) -> torch.Tensor:
    """Attention of this rank's rows. All ranks draw the same seed of dropout, from generators in the same state."""
    from attngen.distributed import attention

    dropout = {"dropout_p": dropout_p, "seed": int(torch.randint(2**31, ()))} if dropout_p else {}
    out = attention(module, q, k, v, plan=plan, sum_gradients=False, **dropout)
    assert isinstance(out, torch.Tensor)
    return out


@functools.cache
def module_with_positions(name: str, chunk: int) -> Any:
    """The module of a committed spec, for chunks of sequences."""
    import attngen

    path = ROOT / "specs" / f"{name}.yaml"
    if not path.is_file():
        stop(f"--context-parallel: {path} does not exist; expected a module of a spec in specs/")
    return attngen.build({**yaml.safe_load(path.read_text()), "positions": {"chunk": chunk}})
