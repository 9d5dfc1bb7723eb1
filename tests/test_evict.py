"""Modules of traced functions are evicted, from memory and from disk; whoever holds one can still compute with
it."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import attngen
from attngen import api
from attngen.cache import store
from attngen.frontends.block_masks import masked_of
from tests.helpers import CUDA

FAKE = """class OPERATORS:
    @staticmethod
    def release():
        pass
HASH = {!r}
def attention(q, k, v, *, scale=None, return_lse=False):
    return q
"""


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Keep two modules at most, and none of other tests; yield the hashes of the specs that are compiled."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    monkeypatch.setattr(api, "_LOADED", {})
    monkeypatch.setattr(api, "_RECENT", OrderedDict())
    monkeypatch.setattr(api, "_STAYING", set())
    monkeypatch.setattr(api, "MOST", 2)
    before = loaded()
    compiled: list[str] = []
    render = api._render

    def known(spec: Any, path: Path | None) -> dict[str, str]:
        compiled.append(spec.hash())
        if spec.hash() not in _RENDERED:
            _RENDERED[spec.hash()] = render(spec, path)
        return _RENDERED[spec.hash()]

    monkeypatch.setattr(api, "_render", known)
    yield compiled
    for name in loaded() - before:
        sys.modules.pop(name, None)


_RENDERED: dict[str, dict[str, str]] = {}


def loaded() -> set[str]:
    return {name for name in sys.modules if name.startswith("attngen.built.")}


def shifted(by: float) -> Callable[..., Any]:
    """A new score function at each call."""
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, score * 0.5 - by)


def qkv() -> list[torch.Tensor]:
    made = torch.randn(3, 1, 2, 16, 16, generator=torch.Generator().manual_seed(0)).to("cuda" if CUDA else "cpu")
    return [x.clone().requires_grad_() for x in made]


def naive(by: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    at = torch.arange(16)
    score = q @ k.transpose(2, 3) * 0.25
    return torch.softmax(torch.where(at[:, None] >= at, score, score * 0.5 - by), 3) @ v


def is_right(by: float, out: torch.Tensor, inputs: list[torch.Tensor]) -> bool:
    """Whether an output and the gradients of its backward are those of attention."""
    expected = naive(by, *inputs)
    found, right = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected))
    return all(torch.allclose(x, y, atol=2e-3) for x, y in zip((out, *found), (expected, *right)))


def operators() -> set[str]:
    """The names of the operators of this file's modules in the dispatcher."""
    return {x for x in torch._C._dispatch_get_all_op_names() if x.startswith("attngen::flex_")}


@pytest.mark.share(8)
def test_of_300_functions_few_modules_stay(few: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MOST", 20)
    monkeypatch.setattr(store, "MOST", 50)
    monkeypatch.setattr(
        api,
        "_render",
        lambda spec, path: {
            "__init__.py": FAKE.format(spec.hash()),
            "kernels.py": "",
            "runtime.py": "",
            "schedule.ir": "",
        },
    )
    before, texts = loaded(), len(linecache.cache)
    q, k, v = (x.detach() for x in qkv())
    functions = [shifted(by) for by in range(300)]  # all of them stay alive
    for function in functions:
        attngen.flex_attention(q, k, v, score_mod=function)
        attngen.flex_attention(q, k, v, score_mod=functions[0])  # used in each iteration, it stays
    gc.collect()
    assert len(api._RECENT) == len(api._LOADED) == len(loaded() - before) == 20
    assert len(linecache.cache) - texts <= 20 * 3
    assert len(store.modules()) == 50
    assert len(list((store.root() / ".receipts").iterdir())) <= 2 * 51
    assert len(list((store.root() / ".locks").iterdir())) <= 256
    assert len({module.HASH for module in api._RECENT}) == 20
    held = list(api._RECENT)
    attngen.flex_attention(q, k, v, score_mod=functions[0])
    assert list(api._RECENT) == held


@pytest.mark.share(8)
def test_what_is_forgotten_is_freed_and_comes_from_the_disk(few: list[str]) -> None:
    inputs, functions, before = qkv(), [shifted(by) for by in (0, 1, 2)], operators()
    outputs = [attngen.flex_attention(*inputs, score_mod=function) for function in functions]
    gc.collect()
    assert len(few) == 3 and len(api._RECENT) == 2
    assert len(operators() - before) == 9  # the first output's graph holds its module
    assert all(
        is_right(by, out, inputs) for by, out in enumerate(outputs)
    )  # so its backward still runs, the first one of its module
    outputs.clear()
    gc.collect()
    assert len(operators() - before) == 6
    for by in (0, 1, 2, 0):
        assert is_right(by, attngen.flex_attention(*inputs, score_mod=functions[by]), inputs)
    assert len(few) == 3  # not compiled again
    gc.collect()
    assert len(operators() - before) == 6 and len(api._RECENT) == 2


@pytest.mark.share(16)
def test_a_backward_needs_no_cache(few: list[str]) -> None:
    inputs = qkv()
    out = attngen.flex_attention(*inputs, score_mod=shifted(0))
    for by in (1, 2):
        attngen.flex_attention(*inputs, score_mod=shifted(by))
    store.clear()
    gc.collect()
    assert is_right(0, out, inputs)


@pytest.mark.share(8)
def test_what_a_graph_or_a_caller_has_stays(few: list[str]) -> None:
    inputs = qkv()
    first, second = shifted(0), shifted(1)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attngen.flex_attention(q, k, v, score_mod=first)

    graph = make_fx(call)(*(x.detach() for x in inputs))
    compiled = torch.compile(
        lambda q, k, v: attngen.flex_attention(q, k, v, score_mod=second), backend="aot_eager", fullgraph=True
    )
    compiled(*inputs)
    module = attngen.build({"name": "mine", "head_dim": 16, "mask": "causal"})
    for by in (2, 3, 4):
        attngen.flex_attention(*inputs, score_mod=shifted(by))
    gc.collect()
    assert len(api._STAYING) == 3 and module in api._STAYING and len(api._RECENT) == 2
    with torch.no_grad():
        assert torch.allclose(graph(*inputs), naive(0, *inputs), atol=2e-3)
    assert is_right(1, compiled(*inputs), inputs)
    assert attngen.build({"name": "mine", "head_dim": 16, "mask": "causal"}) is module


@pytest.mark.share(16)
def test_threads_forget_and_import_at_once(few: list[str]) -> None:
    inputs, functions, wrong = qkv(), [shifted(by) for by in (0, 1, 2)], []

    def work(start: int) -> None:
        for i in range(6):
            by = (start + i) % 3
            try:
                own = [x.detach().requires_grad_() for x in inputs]
                if not is_right(by, attngen.flex_attention(*own, score_mod=functions[by]), own):
                    wrong.append(str(by))
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(few) == 3 and len(api._RECENT) == 2


@pytest.mark.share(8)
def test_plans_of_block_masks_go_with_their_modules(few: list[str]) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    inputs = qkv()
    seen = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) > 0.5
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: seen[q_idx, kv_idx], None, None, 16, 16, device="cpu")
    for by in (0, 1, 2):
        attngen.flex_attention(*inputs, score_mod=shifted(by), block_mask=mask)
    gc.collect()
    assert set(masked_of(mask).plans) == set(api._RECENT) and len(api._RECENT) == 2
