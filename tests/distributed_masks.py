"""Context parallelism with generated modules on several processes over gloo, compared with one process.

tests/test_distributed_masks.py runs this file:
python -m tests.distributed_masks RANK RANKS STORE FOLDER ROWS NAME...
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attngen.conformance.interpreter import lighten
from attngen.distributed import attention, module_kernel, plan
from tests.distributed_cases import HEADS, Case, case, expected, results, tensors

BOUNDS = {torch.float16: 2e-3, torch.float32: 5e-6}
OF_RANKS = {
    2: ("all_gather", "ring", "ulysses"),
    4: ("all_gather", "ring", "ulysses", "ulysses+ring", "ulysses+all_gather"),
}


def error(x: torch.Tensor, y: torch.Tensor, whole: torch.Tensor) -> float:
    """The error of x, of which y is expected, relative to the whole tensor of which y is a part."""
    hidden = y == -torch.inf
    assert x.shape == y.shape and not x.isnan().any() and torch.equal(hidden, x == -torch.inf), (x.shape, y.shape)
    scale = whole.double()[whole.isfinite()].norm().clamp(min=1e-6)
    return float((x.double() - y.double()).masked_fill(hidden, 0).norm() / scale)


def why_not(of: Case, heads: int) -> str:
    """Why a method that divides heads among `heads` ranks cannot run a case; empty text if it can."""
    kernel = module_kernel(of.module)
    return "too few heads" if of.kv_heads % heads else kernel.needs_all_heads(of.inputs)


def compare(name: str, rows: int, method: str, mesh: Any, wanted: dict[str, torch.Tensor]) -> None:
    """Compare the results of a method with those of one process, and with those of a second run bit by bit."""
    of, start = case(name, rows), time.monotonic()
    heads = mesh.size(mesh.ndim - 1) if method.startswith("ulysses") else 1
    if heads > 1 and (reason := why_not(of, heads)):
        print(f"{name:28}{method:20}{reason}", file=sys.stderr)
        return
    cu_seqlens = of.inputs.get("cu_seqlens_q")
    inputs = {n: x for n, x in of.inputs.items() if not n.startswith("cu_seqlens")}
    shard = plan(
        of.module.attention,
        mesh,
        seq_len=rows,
        cu_seqlens=cu_seqlens,
        method=method,
        inputs=inputs,
        q_heads=HEADS,
        kv_heads=of.kv_heads,
        prove=True,
    )
    given = [shard.scatter(x).clone() for x in tensors(of, rows)]

    def call(*qkv: torch.Tensor, **inputs: Any) -> Any:
        return attention(of.module, *qkv, plan=shard, return_lse=True, **inputs)

    found = results(call, of, given, inputs)
    made = module_kernel(of.module).operands.calls.made
    again = results(call, of, given, inputs)
    assert module_kernel(of.module).operands.calls.made == made, "operands are made again"
    errors = {}
    for key, x in found.items():
        whole = wanted[key]
        y = whole if key[1:] in of.learned else whole[:, :, shard.position_ids]
        assert torch.equal(x, again[key]), f"{name}, {method}: {key} has other bits in a second run"
        errors[key] = error(x, y, whole)
        assert errors[key] < BOUNDS[of.dtype], (name, method, key, errors[key])
    shown = " ".join(f"{key} {e:.1e}" for key, e in errors.items())
    print(f"{name:28}{method:20}{time.monotonic() - start:5.1f} s  {shown}", file=sys.stderr)


def main(rank: int, ranks: int, folder: Path, rows: int, names: list[str]) -> None:
    for at, name in enumerate(names):
        if at % ranks == rank and not (folder / f"{name}_{rows}").exists():
            torch.save(expected(name, rows), folder / f"{name}_{rows}")
    dist.barrier()
    line = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (2, 2)) if ranks == 4 else line
    for name in names:
        wanted = torch.load(folder / f"{name}_{rows}")
        for method in OF_RANKS[ranks]:
            compare(name, rows, method, square if "+" in method else line, wanted)


if __name__ == "__main__":
    torch.set_num_threads(1)
    lighten()
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    limit = datetime.timedelta(seconds=1200)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=sys.argv[3], timeout=limit)
    main(rank, ranks, Path(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
    print("right", flush=True)
    os._exit(0)  # without waiting for ranks that failed
