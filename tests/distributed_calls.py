"""Calls with DTensors on several processes over gloo, each compared with the call with whole tensors.

tests/test_dtensor.py runs this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from attngen.ir.sizes import Sizes
from tests.helpers import built, spec

B, HEADS, N = 2, 4, 24
WHOLE, BATCH, ON_HEADS, QUERIES = Replicate(), Shard(0), Shard(1), Shard(2)


def tensors_of(name: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v and the inputs of a committed spec; equal on all ranks."""
    made, g = spec(name), torch.Generator().manual_seed(0)
    kv = {"mha": HEADS, "mqa": 1, "gqa": 2}[made.heads.sharing]
    sizes = Sizes(B, HEADS, kv, N, N)
    inputs = {**made.mask.sample(sizes, g), **{key: x for m in made.score for key, x in m.sample(sizes, g).items()}}
    if "temperature" in inputs:
        inputs["temperature"] = inputs["temperature"].abs() + 0.5  # type: ignore[union-attr]
    shapes = [(B, HEADS, N, made.head_dim.qk), (B, kv, N, made.head_dim.qk), (B, kv, N, made.head_dim.v)]
    return [torch.randn(shape, generator=g) for shape in shapes], inputs


def compare(
    name: str, mesh: Any, q_placements: list[Any], kv_placements: list[Any], sharded_inputs: bool = False
) -> None:
    """Compare outputs, LSE and all gradients of DTensors with those of whole tensors."""
    attention = built(name).attention
    found = []
    for distributed in (False, True):
        qkv, inputs = tensors_of(name)
        args: list[torch.Tensor] = [x.half() for x in qkv]
        learned = {
            key: x.requires_grad_()
            for key, x in inputs.items()
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        }
        given = dict(inputs)
        if distributed:
            args = [distribute_tensor(x, mesh, q_placements if at == 0 else kv_placements) for at, x in enumerate(args)]
            if sharded_inputs:
                given |= {
                    key: distribute_tensor(x, mesh, [WHOLE] * mesh.ndim)
                    for key, x in inputs.items()
                    if isinstance(x, torch.Tensor)
                }
        for x in args:
            x.requires_grad_()
        out, lse = attention(*args, **given, return_lse=True)
        if distributed:
            assert (
                isinstance(out, DTensor)
                and list(out.placements) == q_placements
                and list(lse.placements) == q_placements
            )
            out, lse = out.full_tensor(), lse.full_tensor()
        seen = lse.isfinite()
        loss = (out.float() * torch.arange(out.shape[-1]).cos()).sum() + lse[seen].sin().sum()
        gradients = torch.autograd.grad(loss, (*args, *learned.values()))
        found.append(
            [out, lse.nan_to_num(neginf=-1.0), *(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)]
        )
    for whole, ours in zip(*found):
        error = (whole.double() - ours.double()).norm() / whole.double().norm().clamp(min=1e-6)
        assert error < 2e-3, (name, q_placements, kv_placements, float(error))


def refused(text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except (TypeError, ValueError, NotImplementedError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"not refused: {text}")


def all_cases(mesh: Any, pair: Any) -> None:
    for name in (
        "causal_gqa",
        "causal_padding_gqa",
        "padding_mha",
        "alibi_mha",
        "sinks_window_gqa",
        "temperature_mha",
        "document_gqa",
    ):
        compare(name, mesh, [BATCH], [BATCH])
        compare(name, mesh, [ON_HEADS], [ON_HEADS])
    for name in ("packed_document_gqa", "relative_bias_mha"):
        compare(name, mesh, [ON_HEADS], [ON_HEADS])
    compare("causal_gqa", mesh, [WHOLE], [WHOLE])
    compare("causal_gqa", mesh, [ON_HEADS], [WHOLE])
    compare("causal_mqa", mesh, [ON_HEADS], [WHOLE])
    compare("full_mha", mesh, [QUERIES], [WHOLE])
    compare("padding_mha", mesh, [QUERIES], [WHOLE])
    compare("causal_padding_gqa", mesh, [BATCH], [BATCH], sharded_inputs=True)
    compare("causal_padding_gqa", pair, [BATCH, ON_HEADS], [BATCH, ON_HEADS])
    compare("causal_mqa", pair, [BATCH, ON_HEADS], [BATCH, WHOLE])

    def placed(name: str, *placements: Any, **more: Any) -> Callable[[], Any]:
        qkv, inputs = tensors_of(name)
        args = [distribute_tensor(x.half(), mesh, [p]) if p is not None else x.half() for x, p in zip(qkv, placements)]
        return lambda: built(name).attention(*args, **inputs, **more)

    refused("q has the placement S(2)", placed("causal_gqa", QUERIES, WHOLE, WHOLE))
    refused("expected Replicate, Shard(0) (sequences) or Shard(1) (heads)", placed("causal_gqa", QUERIES, WHOLE, WHOLE))
    refused("q has the placement S(3)", placed("full_mha", Shard(3), WHOLE, WHOLE))
    refused("k has placements [Shard(dim=2)]", placed("full_mha", QUERIES, QUERIES, QUERIES))
    refused("k is a Tensor; expected DTensors of one mesh", placed("causal_gqa", ON_HEADS, None, None))
    refused(
        "dropout counts sequences and heads from 0 on each rank",
        placed("causal_dropout_mqa", BATCH, BATCH, BATCH, dropout_p=0.5),
    )
    refused(
        "return_key_mass is not known of DTensors",
        placed("causal_outputs_gqa", BATCH, BATCH, BATCH, return_key_mass=True),
    )


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(sys.argv[1]), world_size=int(sys.argv[2]), init_method=sys.argv[3])
    world = int(sys.argv[2])
    all_cases(init_device_mesh("cpu", (2,)) if world == 2 else None, init_device_mesh("cpu", (1, 2)))
    dist.destroy_process_group()
    print("right")
