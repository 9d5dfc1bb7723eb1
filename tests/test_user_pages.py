"""Statements of the docs that a user acts on: the FAQ's errors are those that calls raise, the tables of hardware and
versions are those of the code, and the tables of speed are those of the measurements."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import attngen
from attngen.devices import CLASSES, DEVICES, FALLBACK_CUDA, FALLBACK_HIP, KIB
from attngen.errors import AttngenError
from attngen.runtime.checks import Rules
from attngen.runtime.launch import interpreter_fails
from attngen.runtime.warp_specialized import TRUSTED
from attngen.targets.hopper.configs.sm90 import DEVICE
from attngen.versions import PAIRS
from tests.helpers import ROOT, built


def text(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def rows(page: str, first: str) -> Iterator[list[str]]:
    """Yield the cells of a page's table whose head begins with `first`."""
    body = text(page).partition(f"\n| {first} |")[2].partition("\n\n")[0]
    for line in body.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


# ---------------------------------------------------------------------------------------------- errors of the FAQ


def wrong_calls() -> Iterator[Callable[[], Any]]:
    """Calls that raise the errors of the FAQ, in its order."""
    attention, cached, paged = (built(name).attention for name in ("causal_gqa", "decode_gqa", "decode_paged_gqa"))
    half = {"dtype": torch.float16}
    q, k = torch.zeros(1, 4, 32, 128, **half), torch.zeros(1, 2, 32, 128, **half)
    one, learned = q[:, :, :1], q.clone().requires_grad_()
    room, pages = torch.zeros(2, 1, 64, 2, 128, **half), torch.zeros(2, 3, 64, 2, 128, **half)

    def count(n: int) -> torch.Tensor:
        return torch.tensor([n], dtype=torch.int32)

    def second_derivative() -> None:
        (grad,) = torch.autograd.grad(attention(learned, k, k).sum(), learned, create_graph=True)
        grad.sum().backward()

    yield lambda: paged.with_kvcache(one, *pages, cache_seqlens=count(5), page_table=count(7)[None], check=True)
    yield lambda: Rules("gqa", 128, 128, (torch.float16,), interpreted=False).check_device("q", q)
    yield lambda: attention(q.float(), k.float(), k.float())
    yield lambda: attention(q, k.bfloat16(), k)
    yield lambda: attention(q[..., :64], k, k)
    yield lambda: attention(q, *[k[:, :1].expand(1, 3, 32, 128)] * 2)
    yield lambda: attention(q.mT.contiguous().mT, k, k)
    yield lambda: attention(q, k, k, is_causal=True)
    yield lambda: attention(q, k, k, dropout_p=0.1)
    yield lambda: attention(q, k, k, return_max_score=True)
    yield lambda: cached(learned, k, k)
    yield lambda: cached.with_kvcache(learned[:, :, :1], *room, cache_seqlens=count(5))
    yield second_derivative
    yield lambda: torch.func.vmap(attention)(q[None], k[None], k[None])
    yield lambda: cached.with_kvcache(one, *room, cache_seqlens=count(65), check=True)
    yield lambda: cached.with_kvcache(one, room[0], room[0], cache_seqlens=count(5), k=k[:, :, :1], v=k[:, :, :1])
    spec: dict[str, Any] = {"name": "wrong", "head_dim": 64}
    yield lambda: attngen.build(spec | {"head_dim": 100})
    yield lambda: attngen.build(spec | {"mask": "windw"})
    yield lambda: attngen.build(spec | {"mask": {"expr": "kv_idx <= q_pos + n"}})
    bias = {"expr": "s + bias[kv_idx]", "params": {"bias": {"tensor": ["Nk"], "grad": True}}}
    yield lambda: attngen.build(spec | {"score": bias})
    names: dict[str, Any] = {}
    exec("def hidden(b, h, q_idx, kv_idx):\n    return bool(q_idx >= kv_idx)", names)
    yield lambda: attngen.flex_attention(q, q, q, None, names["hidden"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the calls are of tensors on the CPU")
def test_the_errors_in_the_faq_are_those_of_calls() -> None:
    shown = re.findall(r"^```text\n(.*?)^```", text("faq.md"), re.MULTILINE | re.DOTALL)
    sentences = [line for block in shown for line in block.splitlines()]
    assert sentences[0] == f"attention: {interpreter_fails('3.6.0', '2.4.6')}"
    raised = []
    for call in wrong_calls():
        with pytest.raises((ValueError, TypeError, RuntimeError, AttngenError)) as caught:
            call()
        raised.append(str(caught.value))
    assert sentences[1:] == raised


# ---------------------------------------------------------------------------------------------- hardware and versions


def test_the_table_of_gpus_is_that_of_the_device_classes() -> None:
    found = {}
    kinds = {DEVICE: "run, tested and measured", FALLBACK_CUDA: "compiled on request"}  # `verify` leaves out the latter
    for name, gpus, archs, memory, tma, specialized, configs, kind in rows("hardware.md", "class"):
        cls = CLASSES[name.strip("`")]
        found[cls.name] = gpus, archs
        assert memory == f"{cls.smem_per_block // KIB} KB"
        assert (tma, specialized) == ("yes" if cls.tma else "no", "yes" if cls.name == DEVICE else "no")
        assert kind == kinds.get(cls.name, "compiled only")
        assert configs == (f"measurements on an {cls.tuned_on}" if cls.tuned_on else "the cost model")
    assert found.keys() == CLASSES.keys()
    for device in DEVICES.values():
        assert device.name in found[device.cls][0]
    for cls in CLASSES.values():
        assert all(f"{major}.{minor}" in found[cls.name][1] for major, minor in cls.capabilities)
    assert "all other NVIDIA" in found[FALLBACK_CUDA][0] and "all other AMD" in found[FALLBACK_HIP][0]


def test_the_table_of_versions_is_that_of_the_pairs() -> None:
    expected = [
        [
            torch_,
            triton,
            "yes" if triton.rpartition(".")[0] in TRUSTED else "no",
            "before 2.4" if interpreter_fails(triton, "2.4.0") else "any",
        ]
        for torch_, triton in PAIRS.items()
    ]
    assert list(rows("hardware.md", "torch")) == expected


def test_the_table_of_python_and_packages_is_that_of_the_project() -> None:
    said = dict(rows("hardware.md", "what"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (least,) = re.findall(r'^requires-python = ">=([\d.]+)"', project, re.MULTILINE)
    assert said["Python"].startswith(least)
    needed = re.findall(r'"([a-z]+)>=', project.partition("\ndependencies = [")[2].partition("]")[0])
    listed = f"{said['needed by generated modules']}, {said['needed by attngen itself']}".lower()
    assert len(needed) > 9 and [name for name in needed if name not in listed] == []


# ---------------------------------------------------------------------------------------------- the glossary

SEARCHED = """KV cache, varlen, warp specialization, speculative decoding, MLA, sliding window, paged KV cache, GQA,
split-KV, ALiBi, soft cap, RoPE, prefill, decode, sink, block-sparse attention, packed sequences, fp8, Flash-Decoding,
TMA, ping-pong, persistent kernel, online softmax, ring attention"""


def test_the_glossary_has_the_words_that_people_search_for() -> None:
    terms = " ".join(re.findall(r"^\| (.*?) \|", text("glossary.md"), re.MULTILINE))
    assert [word for word in SEARCHED.replace("\n", " ").split(", ") if word not in terms] == []


# ---------------------------------------------------------------------------------------------- performance


def test_the_table_of_libraries_is_that_of_the_measurements() -> None:
    lines = json.loads(text("bench/h200.json"))["lines"]
    measured = {
        (line["spec"], line["n_q"], line["peer"], way): line[f"{way}_tflops"]
        for line in lines
        for way in ("fwd", "bwd")
        if f"{way}_tflops" in line
    }
    peers = ("ours", "flash", "flex", "cudnn", "fa4")
    table = list(rows("performance.md", "D"))
    for dim, mask, n, *cells in table:
        spec = f"{'causal' if mask == 'causal' else 'full'}_mha_d{dim}"
        keys = [(spec, 1024 * int(n.strip("k")), peer, way) for way in ("fwd", "bwd") for peer in peers]
        assert [int(cell) for cell in cells] == [round(measured[key]) for key in keys], (dim, mask, n)
    assert len(table) == 18


def test_the_table_of_the_papers_grid_is_that_of_the_measurements() -> None:
    lines = json.loads(text("bench/h200-paper.json"))["lines"]
    measured = {(line["spec"], line["n_q"], line["peer"]): line for line in lines}
    table = list(rows("performance.md", "mask"))
    for mask, heads, n, *cells in table:
        spec = f"{'causal' if mask == 'causal' else 'full'}_{heads}_d64"
        keys = [(peer, way) for way in ("fwd_ms", "bwd_ms") for peer in ("ours", "flash", "naive")]
        keys += [(peer, "allocated_mib") for peer in ("ours", "flash")]
        for cell, (peer, value) in zip(cells, keys, strict=True):
            found = measured.get((spec, int(n), peer), {}).get(value)
            assert is_rounded(cell, found), (mask, heads, n, peer, value, found)
    assert len(table) == 16


def test_the_table_of_decoding_is_that_of_the_measurements() -> None:
    """Each time is that of a case of its peer with the row's number of sequences, of keys and, for MLA, of heads."""
    lines = json.loads(text("bench/h200-decode.json"))["lines"]
    table = list(rows("performance.md", "sequences x keys"))
    for case, *cells in table:
        sequences, keys = re.search(r"(\d+) x (?:\d+ to )?(\d+)k", case).groups()  # type: ignore[union-attr]
        heads = re.search(r"MLA, (\d+) heads", case)
        sizes = {"batch": int(sequences), "n_kv": 1024 * int(keys), "heads": int(heads[1]) if heads else 32}
        for cell, peer in zip(cells, ("ours", "cudnn", "flash", "flex", "flashinfer"), strict=True):
            mine = [line for line in lines if line["peer"] == peer and sizes.items() <= line.items()]
            times = [1000 * line["fwd_ms"] for line in mine if "fwd_ms" in line]
            assert cell == "-" or any(is_rounded(cell, time) for time in times), (case, peer)
    assert len(table) == 13


def is_rounded(cell: str, value: float | None) -> bool:
    """True if a cell is the value rounded to as many digits as it has, or a dash where there is no value."""
    if cell == "-" or value is None:
        return cell == "-" and value is None
    digits = cell.replace(",", "")
    return abs(float(digits) - value) <= 0.501 * 10.0 ** -len(digits.partition(".")[2])
