"""transformers models on several ranks over gloo: losses and all gradients are those of one process; what shard_batch
returns, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import attngen.integrations.transformers as hf
from attngen.errors import AttngenError
from tests import transformers_models
from tests.helpers import ROOT
from tests.transformers_models import made
from tests.transformers_ranks import CHUNK, ENDS, MORE, ROWS, batch_of

cache = transformers_models.cache  # a fixture


def launch(folder: Path, ranks: int, method: str, *parts: str) -> None:
    """Run parts of tests.transformers_ranks on some processes."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "CHECKPOINT": str(folder / "checkpoint"),
    }
    arguments = [str(ranks), f"file://{folder}/ranks", str(folder), method, *parts]
    processes = []
    for rank in range(ranks):
        with (folder / f"errors{rank}").open("w") as errors:
            command = [sys.executable, "-m", "tests.transformers_ranks", str(rank), *arguments]
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=errors)
            )
    try:
        for rank, process in enumerate(processes):
            out, _ = process.communicate(timeout=1200)
            assert out == "right\n", (folder / f"errors{rank}").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    """gpt-oss (windows and sinks) by FSDP2, with its checkpoint; Gemma 3 (a window and full layers) with activation
    checkpoints; Llama with packed documents. Ranks notice if their first batches differ."""
    launch(tmp_path, 2, "auto", "different", "gpt_oss", "gemma3", "llama")


@pytest.mark.nightly
def test_two_ranks_train_as_one_process_by_torch_compile_by_ddp_and_with_padding(tmp_path: Path) -> None:
    launch(tmp_path, 2, "all_gather", "compiled", "ddp", "padded")


@pytest.mark.nightly
def test_two_ranks_train_as_one_process_in_the_loop_of_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    launch(tmp_path, 2, "auto", "accelerate")


@pytest.mark.nightly
def test_two_ranks_train_further_models_by_a_ring(tmp_path: Path) -> None:
    launch(tmp_path, 2, "ring", "packed gpt_oss", "mistral", "qwen3", "gemma2")


@pytest.mark.nightly
def test_four_ranks_share_two_sequences(tmp_path: Path) -> None:
    """A mesh of two dimensions: FSDP2 over both, and over that of sequences with `sum_gradients` over the other."""
    launch(tmp_path, 4, "auto", "square gpt_oss", "square gemma3")


# ---------------------------------------------------------------------- batches, by one of two ranks that sends nothing


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    hf.register(mesh=init_device_mesh("cpu", (2,)), chunk=CHUNK)
    yield
    dist.destroy_process_group()
    hf.register()


def model_of(name: str, **sizes: Any) -> Any:
    return made(name, "attngen", **MORE.get(name, {}), **sizes)


def test_a_part_has_the_labels_and_positions_of_whole_documents() -> None:
    batch, model = batch_of("packed"), model_of("llama")
    part = hf.shard_batch(batch, model)
    layout = part["batch_plan"].layout
    rows = torch.tensor([row for chunk in layout.owned[1] for row in layout.rows_of(chunk)])
    assert 0 < len(rows) < ROWS and sorted(chunk for owned in layout.owned for chunk in owned) == [0, 1, 2, 3]
    assert torch.equal(part["input_ids"], batch["input_ids"][:, rows])
    assert torch.equal(part["position_ids"], batch["position_ids"][:, rows])
    following = torch.cat([batch["labels"][0, 1:], torch.tensor([-100])])
    following[torch.tensor(ENDS[1:]) - 1] = -100
    assert torch.equal(part["labels"][0], following[rows]) and part["shift_labels"] is part["labels"]
    assert part["num_items_in_batch"] == (following != -100).sum() and part["use_cache"] is False
    starts = {"input_ids": batch["input_ids"], "labels": batch["input_ids"], "cu_seqlens": torch.tensor(ENDS)}
    same = hf.shard_batch(starts, model)
    assert torch.equal(same["position_ids"], part["position_ids"]) and same["batch_plan"].layout == layout
    assert same["num_items_in_batch"] == ROWS - len(ENDS) + 1  # the last token of a document predicts nothing


def test_layers_share_rows_that_balance_the_sum_of_their_work() -> None:
    plans = [hf.shard_batch(batch_of(), model_of(name))["batch_plan"] for name in ("gemma3", "gemma3", "llama")]
    model = model_of("gemma3")
    again = [hf.shard_batch(batch_of(), model)["batch_plan"] for _ in range(2)]
    assert again[0] is again[1] is plans[0]  # plans of equal masks and lengths are remembered
    assert [sum(plan.layout.rows(rank) for rank in range(2)) for plan in plans] == [ROWS] * 3
    long = {"input_ids": torch.zeros(1, 64 * 16, dtype=torch.long)}
    layout = hf.shard_batch(long, model)["batch_plan"].layout
    work = [sum(chunk for chunk in owned) for owned in layout.owned]  # of the full layers, nearly
    assert abs(work[0] - work[1]) <= 16


def test_accumulated_gradients_give_their_own_number_of_labels() -> None:
    part = hf.shard_batch({**batch_of(), "num_items_in_batch": 1000}, model_of("llama"))
    assert part["num_items_in_batch"] == 1000
    assert "labels" not in hf.shard_batch({"input_ids": batch_of()["input_ids"]}, model_of("llama"))


IDS = torch.zeros(1, ROWS, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"input_ids": IDS, "token_type_ids": IDS}, "the batch has `token_type_ids`; expected only input_ids"),
        ({"labels": IDS}, "neither `input_ids` nor `inputs_embeds`"),
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, r"labels is \[1, 199\]; expected \[1, 200\]"),
        ({"input_ids": IDS, "position_ids": IDS[None].expand(3, 1, -1)}, r"position_ids is \[3, 1, 200\]"),
        ({"input_ids": IDS, "cu_seqlens": torch.tensor([0, 9])}, r"cu_seqlens are \[0, 9\] for 1 sequences of 200"),
        ({"input_ids": IDS.expand(2, -1), "cu_seq_lens_q": torch.tensor([0, 200])}, "expected one row"),
        ({"input_ids": IDS[:, :64]}, "leave some of 2 ranks without any; expected 65 rows or more"),
    ],
)
def test_a_wrong_batch_is_one_sentence(batch: dict[str, Any], why: str) -> None:
    with pytest.raises(AttngenError, match=why) as found:
        hf.shard_batch(batch, model_of("llama"))
    assert "\n" not in str(found.value)


def test_a_model_that_ranks_cannot_run_is_one_sentence() -> None:
    batch = {"input_ids": IDS, "labels": IDS}
    router, eager, conv = model_of("gpt_oss"), model_of("llama"), model_of("llama")
    router.config.output_router_logits = True
    eager.set_attn_implementation("eager")
    conv.model.layers[0].mix = torch.nn.Conv1d(1, 1, 3)
    tuned = model_of("llama")
    tuned.config.attn_temperature_tuning = True
    linear = model_of("gemma3")
    linear.config.layer_types = ["full_attention", "linear_attention"]
    own, unplaced = model_of("llama"), model_of("llama")
    own._supports_attention_backend = False
    unplaced.forward = lambda input_ids, **more: None
    other = model_of("llama")
    other.loss_type = "ForMaskedLM"
    for model, why in (
        (router, "adds a loss of its router"),
        (eager, "attn_implementation is 'eager'; expected the name that was registered with"),
        (conv, r"a llama has layers \(Conv1d\) that read rows of other ranks"),
        (tuned, "scales queries by their number on the rank"),
        (linear, r"has layers \(linear_attention\) that read rows"),
        (other, "has the loss ForMaskedLM"),
        (own, "a llama does not take its attention from transformers' interface"),
        (unplaced, "takes no position_ids"),
        (model_of("t5"), "has an encoder and a decoder"),
    ):
        with pytest.raises(AttngenError, match=f"^shard_batch: .*{why}"):
            hf.shard_batch(batch, model)


def test_a_call_that_ranks_cannot_compute_is_one_sentence() -> None:
    model = model_of("llama")
    part = hf.shard_batch({"input_ids": IDS}, model)
    with pytest.raises(AttngenError, match="LlamaAttention: no plan of its batch arrives at its attention"):
        model(IDS, use_cache=False)
    with pytest.raises(AttngenError, match="`attention_mask` came with the batch of a rank"):
        model(**part, attention_mask=torch.ones_like(part["input_ids"]))
    with pytest.raises(AttngenError, match="own"):
        model(**part, attention_mask=torch.zeros(1, 1, 100, 100))
    with pytest.raises(AttngenError, match="which attngen does not know"):
        model(**part, other=IDS)
    for layer in model.train().model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(AttngenError, match="drops weights with probability 0.5; expected `attention_dropout=0`"):
        model(**part)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"chunk": 100}, "chunk is 100; expected a multiple of 64, up to 4096"),
        ({"method": "rings"}, "method is 'rings'; expected auto, all_gather, ring"),
        ({"balance": "even"}, "balance is 'even'; expected auto, contiguous"),
    ],
)
def test_wrong_options_are_one_sentence(options: dict[str, Any], why: str) -> None:
    with pytest.raises(AttngenError, match=f"^register: {why}"):
        hf.register(mesh=dist.group.WORLD, **options)
