"""Tensors of `any` length: one module serves all lengths, reads outside of them give zero, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen import api
from attngen.cache import store
from attngen.conformance.oracle import reference_mask, reference_scores, relative_error
from attngen.errors import SpecError, VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from attngen.verify.inputs import verify_interface
from tests.helpers import module_of
from tests.hopper.test_numerics import compare_with_naive

pytestmark = pytest.mark.numerics

IDS = {"tensor": ["Nq"], "dtype": "int32"}
PARTS: dict[str, Any] = {
    "mask": {
        "expr": "kv_idx >= starts[ids[q_idx]]",
        "params": {"starts": {"tensor": ["any"], "dtype": "int32"}, "ids": IDS},
    },
    "score": {"expr": "s + table[ids[q_idx] - 3, h % 2]", "params": {"table": {"tensor": ["any", 2]}, "ids": IDS}},
}
SPEC = make_spec({"name": "lengths", "head_dim": 16, "dtype": "fp32", **PARTS})
N_Q, N_KV = 40, 50


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return module_of(SPEC, tmp_path_factory.mktemp("lengths") / "lengths")


def inputs(documents: int, rows: int, device: str) -> dict[str, torch.Tensor]:
    """Return starts of documents, a table, and document ids, some of which are outside of both on either side."""
    g = torch.Generator().manual_seed(documents)
    found = {
        "starts": torch.randint(0, N_KV + 3, (documents,), generator=g, dtype=torch.int32),
        "ids": torch.randint(-4, max(documents, rows) + 2, (N_Q,), generator=g, dtype=torch.int32),
        "table": torch.randn(rows, 2, generator=g),
    }
    return {name: x.to(device) for name, x in found.items()}


@pytest.mark.share(16)
@pytest.mark.parametrize(("documents", "rows"), [(1, 1), (3, 7), (16, 2), (33, 64), (0, 5), (5, 0)])
@pytest.mark.parametrize("planned", [False, True])
def test_one_module_takes_any_length(documents: int, rows: int, planned: bool, module: Any, device: str) -> None:
    given = inputs(documents, rows, device)
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 2, n, 16, generator=g).to(device).requires_grad_() for n in (N_Q, N_KV, N_KV))
    more = {"plan": module.attention.plan(q, k, starts=given["starts"], ids=given["ids"])} if planned else {}
    out = module.attention(q, k, v, **given, **more)
    modify, _ = reference_scores(SPEC.score, q.double(), k.double(), given)
    mask = reference_mask(SPEC.mask, q, k, given)
    expected = by_hand(q.double(), k.double(), v.double(), mask, modify)
    w = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), w), torch.autograd.grad(expected, (q, k, v), w.double())
    for found, right in zip((out, *grads[0]), (expected, *grads[1])):
        assert relative_error(found, right) < 1e-5


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, modify: Any) -> torch.Tensor:
    scores = modify(q @ k.transpose(2, 3) / 4).masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def test_a_call_gives_no_length_and_a_wrong_shape_is_refused(module: Any, device: str) -> None:
    q = torch.zeros(1, 2, N_Q, 16, device=device)
    given = inputs(3, 4, device)
    with pytest.raises(
        TypeError,
        match="starts_len is no argument; expected q, k, v, starts, ids, table, plan, scale, return_lse, check",
    ):
        module.attention(q, q, q, **given, starts_len=3)
    with pytest.raises(ValueError, match=r"table has shape \[4, 3\]; expected \[any, 2\]: a parameter of the spec$"):
        module.attention(q, q, q, **{**given, "table": torch.zeros(4, 3, device=device)})
    assert "starts: torch.int32 or torch.int64 [any], a parameter of the spec." in module.attention.__doc__


@pytest.mark.share(16)
def test_lengths_are_symbols_of_compiled_graphs(module: Any, device: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(
        lambda q, **given: module.attention(q, q, q, **given), backend=counter, fullgraph=True, dynamic=True
    )
    q = torch.randn(1, 2, N_Q, 16, generator=torch.Generator().manual_seed(0)).to(device)
    for documents, rows in ((3, 4), (5, 9), (12, 7), (8, 20)):
        given = inputs(documents, rows, device)
        assert graph(q, **given).equal(module.attention(q, q, q, **given))
    assert counter.frame_count <= 2  # the second is for lengths that were equal in the first


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Set an empty cache, and yield a list of the names of the specs that are compiled."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    compiled: list[str] = []
    render = api._render
    monkeypatch.setattr(api, "_render", lambda spec, path: compiled.append(spec.name) or render(spec, path))
    yield compiled


@pytest.mark.share(4)
def test_another_number_of_documents_needs_no_other_module(cache: list[str], device: str) -> None:
    """Functions for FlexAttention capture tensors of any length, such as `starts`."""
    q = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0)).to(device)
    for count in (2, 3, 7):
        document = (torch.arange(40, device=device) * count // 40).int()
        starts = torch.searchsorted(document, torch.arange(count, device=device, dtype=torch.int32)).int()

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (document[q_idx] == document[kv_idx]) & (kv_idx - starts[document[kv_idx]] <= 4)  # noqa: B023

        at = torch.arange(40, device=device)
        seen = (document[:, None] == document) & (at - starts[document.long()] <= 4)
        expected = by_hand(q.double(), q.double(), q.double(), seen, lambda s: s)
        assert relative_error(attngen.flex_attention(q, q, q, None, mask), expected) < 1e-6
    assert len(cache) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"score": {"expr": "s + t[q_idx // 3]", "params": {"t": {"tensor": ["any"], "grad": True}}}},
            "has `grad: true` and a dimension of `any` length; expected a number, or a name",
        ),
        (
            {**PARTS, "cache": "contiguous", "backward": False},
            (
                "`mask` declares `starts` with `any` length, which calls with a cache do not take; expected a "
                "number, or a name"
            ),
        ),
        (
            {**PARTS, "score": {"expr": "s * starts_len", "params": {"starts_len": {"scalar": "float"}}}},
            "declares `starts_len` again, in another way; expected one declaration, or another name",
        ),
    ],
)
def test_what_has_no_length_of_its_own_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        make_spec({"name": "wrong", "head_dim": 16, **change})
    assert sentence in str(error.value)


def test_the_spec_and_the_ir_say_it_and_read_it_again() -> None:
    assert make_spec(SPEC.canonical()) == SPEC and isinstance(SPEC, Spec)
    text = print_module(lower(SPEC))
    assert (
        "input starts : i32[starts_len] a parameter of the spec" in text
        and "input starts_len : i32[] size | a length of `starts`" in text
    )
    assert print_module(parse_module(text)) == text


@pytest.mark.share(4)
def test_a_warp_specialized_kernel_takes_lengths() -> None:
    """It runs on NumPy, with its warp groups in random order."""
    spec = make_spec({"name": "lengths", "head_dim": 128, "dtype": "bf16", "schedule": {"backend": "hopper"}, **PARTS})
    module = lower(spec)
    for seed in range(4):
        compare_with_naive(module, "lengths", seed, of=spec)


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "input starts_len : i32[] size |",
            "input starts_len : i32[] |",
            "`input starts : i32[starts_len]`; expected b1",
        ),
        (
            "input starts_len : i32[] size |",
            "input starts_len : i32[Nq] size |",
            "`input starts : i32[starts_len]`; expected b1",
        ),
        (
            "input table : f32[table_len, 2] ",
            "input table : f32[table_len, 2] grad | ",
            "a dimension of an input without a gradient",
        ),
        (
            "input starts : i32[starts_len]",
            "input starts : i32[starts_length]",
            "expected b1, i32, f32 or T of B, Hq, Hkv, Nq, Nk, *, numbers",
        ),
    ],
)
def test_other_sizes_are_refused_in_the_ir(old: str, new: str, sentence: str) -> None:
    text = print_module(lower(SPEC))
    assert old in text
    with pytest.raises(VerifyError) as error:
        verify_interface(parse_module(text.replace(old, new)))
    assert sentence in str(error.value)
