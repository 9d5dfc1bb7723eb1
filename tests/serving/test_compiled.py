"""Calls with a KV cache under torch.compile: one operator in the graph, which stores new keys in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen.conformance.kv_cache import CacheCase, Call, make_call
from tests.helpers import CUDA, SPECS, built, spec

DEVICE = "cuda" if CUDA else "cpu"
CACHED = [name for name in SPECS if spec(name).cache]
BACKEND = "inductor" if CUDA else "aot_eager"


def _call(name: str, new: int, n_q: int = 1, seed: int = 0) -> Call:
    cache = spec(name).cache
    assert cache is not None
    page = {"": 0, "page_rows": 48}.get(cache.page)
    page = int(cache.page) if page is None else page
    heads = (8, 1) if spec(name).rope else (4, 2)
    return make_call(spec(name), CacheCase(*heads, n_q, (5, 70), new, 192, page), torch.float16, DEVICE, seed)


def _copied(call: Call) -> list[torch.Tensor]:
    return [cache.clone() for cache in call.caches]


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.share(16)
@pytest.mark.parametrize("new", [0, 1])
@pytest.mark.parametrize("name", CACHED)
def test_a_compiled_call_gives_the_bits_of_an_eager_call(name: str, new: int) -> None:
    """Output, LSE and caches have the same bits, without a graph break, for other lengths, too."""
    torch._dynamo.reset()
    module, call = built(name), _call(name, new)
    if "document_ids" in call.arguments:  # defined for the keys of the longer lengths, too
        call.arguments["document_ids"] = call.arguments["document_ids"].cummax(1).values

    def step(
        q: torch.Tensor, caches: list[torch.Tensor], arguments: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = module.attention.with_kvcache(q * 2, *caches, **arguments, return_lse=True)
        return out + 1, lse

    compiled = torch.compile(step, backend=BACKEND, fullgraph=True)
    for add in (0, 3):
        arguments = {**call.arguments, "cache_seqlens": call.arguments["cache_seqlens"] + add}
        ours, theirs = _copied(call), _copied(call)
        expected, found = step(call.q, ours, arguments), compiled(call.q, theirs, arguments)
        for x, y in zip((*expected, *ours), (*found, *theirs)):
            assert torch.equal(_bits(x), _bits(y))


@pytest.mark.share(16)
@pytest.mark.parametrize("name", ["decode_paged_fp8_gqa", "decode_sinks_paged_gqa", "decode_mla", "decode_fp8_mla"])
def test_operators_pass_opcheck(name: str) -> None:
    """torch.library checks that results do not share memory, that mutated arguments are declared, and that the fake
    implementation has the right shapes."""
    module, call = built(name), _call(name, 1)
    rest = [
        call.arguments[n] for n in ("cache_seqlens", "page_table", "k_scale", "v_scale", "sink") if n in call.arguments
    ]
    new = [call.arguments[n] for n in ("k", "v") if n in call.arguments]
    # test_schema multiplies tensors, which torch cannot do in 8 bits.
    tests = ("test_faketensor",) if "fp8" in name else ("test_schema", "test_faketensor")
    # The caches of a call have NaN past their ends, which equals nothing.
    caches = [torch.zeros_like(cache, dtype=torch.float16).to(cache.dtype) for cache in call.caches]
    torch.library.opcheck(module.CACHE_OPERATORS.served, (call.q, *caches, *rest, 0.1), test_utils=tests)
    torch.library.opcheck(module.CACHE_OPERATORS.stored, (call.q, *caches, *new, *rest, 0.1), test_utils=tests)


def test_values_without_keys_and_gradients_are_refused() -> None:
    torch._dynamo.reset()
    call = _call("decode_gqa", 1)
    attend = torch.compile(built("decode_gqa").attention.with_kvcache, backend="aot_eager")
    new_v = call.arguments.pop("v")
    del call.arguments["k"]
    with pytest.raises(Exception, match="k is a NoneType; expected both k and v"):
        attend(call.q, *call.caches, v=new_v, **call.arguments)
    with pytest.raises(NotImplementedError, match="has no backward; expected a call under torch.no_grad()"):
        attend(call.q.clone().requires_grad_(), *call.caches, **call.arguments)


def test_a_wrong_compiled_call_has_its_sentence() -> None:
    torch._dynamo.reset()
    call = _call("decode_gqa", 0)
    attend = torch.compile(built("decode_gqa").attention.with_kvcache, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="cache_seqlens is torch.int64; expected torch.int32"):
        attend(call.q, *call.caches, cache_seqlens=call.arguments["cache_seqlens"].long())
