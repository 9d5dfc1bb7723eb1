"""DTensors with sequences, heads or, if the mask allows it, queries on several ranks give the results of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from attngen.spec import make_spec
from tests.helpers import ROOT, SPECS, built, module_of, target

RANKS = 2


@pytest.mark.share(8)
def test_two_processes_give_the_results_of_one(tmp_path: Path) -> None:
    """Outputs, LSE and gradients of q, k, v and gradient inputs are equal for nine kinds of specs; shardings that are
    not supported get one sentence each."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.distributed_calls"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), f"file://{tmp_path}/ranks"],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]
    for process in processes:
        out, errors = process.communicate(timeout=600)
        assert process.returncode == 0 and out == "right\n", errors


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("full_mha", ("B", "Hq", "Nq")),
        ("padding_mha", ("B", "Hq", "Nq")),
        ("dense_bias_dropout_mha", ("B", "Hq", "Nq")),
        ("causal_gqa", ("B", "Hq")),
        ("packed_document_gqa", ("B", "Hq")),
        ("block_sparse_mha", ("B", "Hq")),
    ],
)
def test_a_mask_gives_the_dimensions_that_can_be_sharded(name: str, shards: tuple[str, ...]) -> None:
    assert built(name).SIGNATURE.shards == shards


def test_a_mask_that_depends_on_all_indices_cannot_be_sharded(tmp_path: Path) -> None:
    mask = {"expr": "(kv_idx + h + 2 * b) % 3 > 0 and kv_idx <= q_pos"}
    module = module_of(
        make_spec({"name": "indexed", "head_dim": 16, "dtype": "fp32", "mask": mask}), tmp_path / "indexed"
    )
    assert module.SIGNATURE.shards == ()


@pytest.mark.share(4)
@pytest.mark.parametrize("name", SPECS)
def test_operators_know_the_dimensions_of_their_tensors(name: str) -> None:
    signature = built(name).SIGNATURE
    assert (
        len(signature.dims)
        == signature.tensors
        == sum("Tensor" in declared for declared in signature.schema.split(", "))
    )
    assert signature.dims or not target(name).inputs or all(not i.shape for i in target(name).inputs)


def test_a_cache_of_dtensors_is_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/rank")
    try:
        mesh = init_device_mesh("cpu", (1,))
        q, cache = torch.zeros(1, 2, 1, 128).half(), torch.zeros(1, 8, 2, 128).half()
        given = {"cache_seqlens": torch.tensor([3], dtype=torch.int32)}
        with pytest.raises(TypeError, match=r"^attention.with_kvcache: q is a DTensor; expected a dense tensor"):
            built("decode_gqa").attention.with_kvcache(
                distribute_tensor(q, mesh, [Replicate()]), cache, cache.clone(), **given
            )
        with pytest.raises(TypeError, match=r"^attention.with_kvcache: k_cache is a DTensor; expected a dense tensor"):
            built("decode_gqa").attention.with_kvcache(q, distribute_tensor(cache, mesh, [Replicate()]), cache, **given)
    finally:
        dist.destroy_process_group()
