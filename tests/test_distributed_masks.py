"""Context parallelism with generated modules: every mask and modifier over gloo gives the results of one process; plans
of modules; what a rank's kernel computes without queries or keys, remembers and refuses."""

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

import attngen
from attngen.distributed import module_kernel, plan
from attngen.distributed.local import Backward
from attngen.distributed.merge import merge_parts
from attngen.distributed.planned import transfers_of
from attngen.distributed.proof import PlanError, verify
from attngen.distributed.visible import count
from attngen.errors import AttngenError
from tests.distributed_cases import CHUNK, HEADS, NAMES, case, tensors
from tests.helpers import ROOT

FEW = ["sinks_and_documents", "causal_padding_dropout_mha", "relative_bias_mha", "sinks_fp32"]


def launch(folder: Path, ranks: int, rows: int, names: list[str]) -> None:
    """Run tests.distributed_masks on some processes."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    for name in names:
        case(name, rows)  # builds the modules, which ranks then load
    command = [sys.executable, "-m", "tests.distributed_masks"]
    arguments = [str(ranks), f"file://{folder}/ranks", str(folder), str(rows), *names]
    processes = []
    for rank in range(ranks):
        with (folder / f"errors{rank}").open("w") as errors:
            processes.append(
                subprocess.Popen(
                    [*command, str(rank), *arguments],
                    cwd=ROOT,
                    env=environment,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            )
    try:
        for rank, process in enumerate(processes):
            out, _ = process.communicate(timeout=3600)
            assert out == "right\n", (folder / f"errors{rank}").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()


def test_two_ranks_give_the_results_of_one(tmp_path: Path) -> None:
    """Packed documents with a sink and a temperature, key padding with dropout, a learned bias by distance,
    and fp32 with a sink, by all_gather, a ring and, where heads divide, Ulysses: out, LSE and all gradients, with the
    same bits twice."""
    launch(tmp_path, 2, 200, FEW)


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "rows"), [(2, 200), (4, 150)])
def test_every_mask_and_modifier_on_some_ranks(tmp_path: Path, ranks: int, rows: int) -> None:
    """All committed specs without a cache, and more. With 150 rows one of four ranks has none."""
    launch(tmp_path, ranks, rows, NAMES)


@pytest.mark.nightly
def test_ranks_with_several_chunks(tmp_path: Path) -> None:
    launch(tmp_path, 4, 330, [*FEW, "window_gqa", "document_gqa", "block_sparse_mha", "trees"])


# ---------------------------------------------------------------------- plans


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """Process groups of eight ranks, of which this process is the first, that send nothing."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def module_of(name: str = "window_gqa") -> Any:
    return case(name, 200).module


@pytest.mark.usefixtures("eight_ranks")
def test_a_plan_holds_what_its_mask_needs() -> None:
    line, square = init_device_mesh("cpu", (8,)), init_device_mesh("cpu", (4, 2))
    visible = count(module_of(), 1000, CHUNK)
    for method, mesh in (("all_gather", line), ("ring", line), ("ulysses", line), ("ulysses+ring", square)):
        shard = plan(module_of(), mesh, seq_len=1000, method=method)
        assert shard.method == method and sum(shard.layout.rows(rank) for rank in range(8)) == 1000
        verify(transfers_of(shard), visible)
    contiguous = plan(module_of(), dist.group.WORLD, seq_len=1000, method="ring", balance="contiguous")
    assert len(contiguous.steps) == 2  # the window reaches the neighbour's keys and no further
    broken = plan(module_of(), line, seq_len=1000, method="all_gather", prove=False)
    broken.needs = (broken.needs[0][1:], *broken.needs[1:])
    with pytest.raises(PlanError, match="are computed never"):
        verify(transfers_of(broken), visible)


@pytest.mark.usefixtures("eight_ranks")
def test_heads_that_cannot_be_divided_need_a_mesh_of_one_dimension() -> None:
    with pytest.raises(AttngenError, match="depend on the number of a head.*expected a mesh of one dimension"):
        plan(module_of("heads_apart"), init_device_mesh("cpu", (4, 2)), seq_len=1000, q_heads=4, kv_heads=4)


@pytest.mark.usefixtures("eight_ranks")
def test_masks_may_share_the_rows_of_ranks() -> None:
    """With a given layout, a plan needs what its own mask shows; it has to be of the module's chunks and the ranks."""
    line = init_device_mesh("cpu", (8,))
    causal = plan(module_of("causal_gqa"), line, seq_len=2048, method="all_gather")
    window = plan(module_of(), line, seq_len=2048, method="all_gather", layout=causal.layout)
    assert window.layout == causal.layout and window.position_ids.equal(causal.position_ids)
    needs = [[len(chunks) for chunks in shard.needs] for shard in (window, causal)]
    assert all(one <= other for one, other in zip(*needs)) and sum(needs[0]) < sum(needs[1])
    with pytest.raises(AttngenError, match="the layout has 2048 rows in chunks of 64; expected 1000 in chunks of 64"):
        plan(module_of(), line, seq_len=1000, method="ring", layout=causal.layout)


@pytest.mark.usefixtures("eight_ranks")
def test_a_method_is_chosen_among_those_that_the_call_allows() -> None:
    line, square = init_device_mesh("cpu", (8,)), init_device_mesh("cpu", (4, 2))
    causal = module_of("causal_gqa")
    assert plan(causal, line, seq_len=4096).method in ("all_gather", "ring")  # heads are not known
    assert plan(causal, line, seq_len=4096, q_heads=16, kv_heads=16, batch=4).method == "ulysses"
    assert plan(causal, square, seq_len=4096).method in ("ulysses+all_gather", "ulysses+ring")
    dropout = module_of("causal_padding_dropout_mha")
    padding = {"key_padding": torch.ones(1, 4096, dtype=torch.bool)}
    assert plan(dropout, line, seq_len=4096, inputs=padding, q_heads=64).method in ("all_gather", "ring")


@pytest.mark.usefixtures("eight_ranks")
def test_a_plan_keeps_its_documents() -> None:
    ends = [0, 10, 500, 700]
    shard = plan(module_of("packed_document_gqa"), dist.group.WORLD, cu_seqlens=ends)
    assert shard.layout.seq_len == 700 and [x.tolist() for x in shard.inputs.values()] == [ends, ends]
    other = plan(module_of("packed_document_gqa"), dist.group.WORLD, cu_seqlens=torch.tensor([0, 11, 500, 700]))
    assert other.plan_digest != shard.plan_digest


@pytest.mark.usefixtures("eight_ranks")
def test_wrong_plans_are_one_sentence() -> None:
    world = dist.group.WORLD
    cases: list[tuple[str, Any]] = [
        (
            "expected `positions: {chunk: 384}` in its spec",
            lambda: plan(case("causal_gqa", 200).plain, world, seq_len=9),
        ),
        ("expected what attngen.build returns", lambda: plan(print, world, seq_len=9)),
        ("plan: seq_len is missing", lambda: plan(module_of(), world)),
        ("reads no cu_seqlens", lambda: plan(module_of(), world, cu_seqlens=[0, 9])),
        (
            "cu_seqlens end at 9 and seq_len is 8",
            lambda: plan(module_of("packed_document_gqa"), world, seq_len=8, cu_seqlens=[0, 9]),
        ),
        ("expected q_heads and kv_heads", lambda: plan(module_of("heads_apart"), world, seq_len=999)),
        ("needs `document_ids`", lambda: plan(module_of("document_gqa"), world, seq_len=999)),
        ("method is 'rings'", lambda: plan(module_of(), world, seq_len=999, method="rings")),
        ("balance `fair` is unknown", lambda: plan(module_of(), world, seq_len=999, balance="fair")),  # type: ignore[arg-type]
        ("expected 2 with method 'ulysses+ring'", lambda: plan(module_of(), world, seq_len=9, method="ulysses+ring")),
    ]
    for text, call in cases:
        with pytest.raises((ValueError, AttngenError)) as error:
            call()
        assert text in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------- the kernel of a rank


def test_inputs_of_a_call_are_refused_in_one_clause() -> None:
    sizes = {"q_len": 200, "kv_len": 200}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("causal_dropout_mqa", {"dropout_p": 0.1}, "seed is missing"),
        ("causal_outputs_gqa", {"return_entropy": True}, "return_entropy is given, and attention over ranks returns"),
        ("causal_gqa", {"documents": 1}, "documents is given; expected inputs among check, kv_len, q_len, scale"),
        ("sinks_window_gqa", {}, "sink is missing; expected it: a logit of each head"),
        ("block_sparse_mha", {}, "block_mask is missing"),
        ("butterfly_gqa", {}, ""),
        ("causal_dropout_mqa", {}, ""),
    ]
    for name, inputs, text in cases:
        problem = module_kernel(module_of(name)).problem({**inputs, **sizes})
        assert problem.startswith(text) and bool(problem) == bool(text), (name, problem)
    assert "q_len is missing" in module_kernel(module_of("causal_gqa")).problem({})


def test_why_heads_cannot_be_divided_follows_from_the_ir() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("causal_dropout_mqa", {"dropout_p": 0.1}, "dropout depends on the number of a head"),
        ("causal_dropout_mqa", {}, ""),
        ("alibi_mha", {}, "alibi_slopes follows from the number of heads"),
        ("heads_apart", {}, "the mask or the scores depend on the number of a head"),
        ("block_sparse_mha", {"block_mask": torch.ones(4, 4, 4, dtype=torch.bool)}, "the block mask differs between"),
        ("block_sparse_mha", {"block_mask": torch.ones(1, 4, 4, dtype=torch.bool)}, ""),
        *((name, {}, "") for name in ("sinks_window_gqa", "relative_bias_mha", "document_gqa", "temperature_mha")),
    ]
    for name, inputs, text in cases:
        reason = module_kernel(module_of(name)).needs_all_heads(inputs)
        assert reason.startswith(text) and bool(reason) == bool(text), (name, reason)


@pytest.mark.parametrize("name", ["sinks_window_gqa", "sinks_fp32", "chunked_gqa"])
def test_queries_without_keys_are_those_whose_keys_are_hidden(name: str) -> None:
    """No launch gives what a launch gives with keys that its mask hides."""
    of = case(name, 200)
    kernel = module_kernel(of.module.attention)
    q, k, v, grad_out, grad_lse = tensors(of, 200)
    q, grad_out, grad_lse = (x[:, :, 128:192] for x in (q, grad_out, grad_lse))
    inputs = {**of.inputs, "q_len": 200, "kv_len": 200}
    found = []
    for chunks, keys in (((), 0), ((0,), CHUNK)):
        kv = (k[:, :, :keys], v[:, :, :keys])
        out, stats = kernel.forward(q, *kv, (2,), chunks, inputs)
        backward = kernel.backward(Backward(grad_out, grad_lse, q, *kv, out, stats), (2,), chunks, inputs, of.learned)
        found.append([out, *stats.values(), backward[0], *backward[3].values()])
    for x, y in zip(*found):
        torch.testing.assert_close(x, y)
    dq, dk, dv, learned = kernel.backward(
        Backward(grad_out[:, :, :0], None, q[:, :, :0], k, v, grad_out[:, :, :0], {}), (), (0, 1, 2, 3), inputs, ()
    )
    assert dq.shape[2] == 0 and dk.shape == k.shape and not dk.any() and not dv.any() and learned == {}


def test_derived_tensors_are_made_once_for_the_same_inputs() -> None:
    of = case("document_gqa", 200)
    kernel = module_kernel(of.module)
    operands = kernel.operands
    q, k, v, *_ = tensors(of, 200)
    ids = of.inputs["document_ids"].clone()
    inputs = {"document_ids": ids, "q_len": 200, "kv_len": 200}

    def called(inputs: dict[str, Any], chunk: int = 0) -> tuple[list[Any], int]:
        made = operands.calls.made
        rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        return operands.of(q[:, :, rows], k, v, (chunk,), (0, 1, 2, 3), inputs), operands.calls.made - made

    first, made = called(inputs)
    again, repeated = called(dict(inputs))
    assert made == 1 and repeated == 0 and all(x is y for x, y in zip(first, again) if isinstance(x, torch.Tensor))
    other, made = called(inputs, chunk=1)
    at = operands.names.index("document_first")
    assert made == 1 and other[at] is first[at]  # of the whole sequence, so shared by all chunks
    ids += 1  # in place
    assert called(inputs)[1] == 1
    assert called({**inputs, "document_ids": ids.clone()})[1] == 1
    assert called({**inputs, "scale": 0.5})[0][-1] == 0.5


def test_a_call_in_bf16() -> None:
    of = case("window_gqa", 200)
    kernel = module_kernel(of.module)
    q, k, v, grad_out, _ = (x.bfloat16() for x in tensors(of, 200))
    inputs, chunks = {"q_len": 200, "kv_len": 200}, (0, 1, 2, 3)
    out, stats = kernel.forward(q, k, v, chunks, chunks, inputs)
    whole, lse = of.plain.attention(q, k, v, return_lse=True)
    assert out.dtype == torch.bfloat16 and torch.equal(out, whole) and torch.equal(stats["lse"], lse)
    saved = Backward(grad_out, None, q, k, v, out, stats)
    assert kernel.backward(saved, chunks, chunks, inputs, ())[0].isfinite().all()


def test_sums_of_fp32_merge_to_the_whole_and_empty_rows_stay_empty() -> None:
    g = torch.Generator().manual_seed(0)
    s, v = torch.randn(3, 5, 8, generator=g) * 30, torch.randn(3, 8, 4, generator=g)
    s[:, 1], s[:, 2, :4], s[:, 3, 4:] = -torch.inf, -torch.inf, -torch.inf

    def part(keys: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        lse = torch.logsumexp(s[..., keys], -1)
        m = s[..., keys].amax(-1) / torch.log(torch.tensor(2.0))
        total = torch.exp2(s[..., keys] / torch.log(torch.tensor(2.0)) - m.clamp(min=-1e30)[..., None]).sum(-1)
        stats = {"lse": lse, "m_all": m.masked_fill(m == -torch.inf, torch.inf)}
        stats["inv_l_all"] = torch.where(total > 0, 1 / total, 0)
        return torch.softmax(s[..., keys], -1).nan_to_num() @ v[:, keys], stats

    (out, stats), (whole, expected) = part(slice(0, 4)), part(slice(0, 8))
    merge_parts(out, stats, *part(slice(4, 8)))
    torch.testing.assert_close(out, whole)
    for name, x in stats.items():
        torch.testing.assert_close(x, expected[name])


def test_a_module_without_a_backward_says_so() -> None:
    data = {"name": "only_forward", "head_dim": 32, "mask": "causal", "backward": False, "positions": {"chunk": CHUNK}}
    kernel = module_kernel(attngen.build(data))
    x = torch.zeros(1, HEADS, CHUNK, 32, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="has no backward; expected a spec without `backward: false`"):
        kernel.backward(Backward(x, None, x, x, x, x, {}), (0,), (0,), {"q_len": CHUNK, "kv_len": CHUNK}, ())
