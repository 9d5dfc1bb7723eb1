"""Wrong calls with a KV cache, caches that share memory, and specs that cannot have a cache: each gets one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attngen.conformance.kv_cache import CacheCase, make_call
from attngen.errors import BuildError
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from tests.helpers import CUDA, built, spec

pytestmark = pytest.mark.numerics
DEVICE = "cuda" if CUDA else "cpu"
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(2, 2, 1, 64)}, ValueError, "q has shape [2, 2, 1, 64]; expected [B, Hq, Nq, 128]"),
    ({"q": 3}, TypeError, "q is a int; expected a dense tensor [B, Hq, Nq, 128]"),
    (
        {"q": torch.zeros(2, 2, 1, 128, dtype=torch.float64)},
        TypeError,
        "q is torch.float64; expected torch.bfloat16 or torch.float16",
    ),
    ({"k_cache": torch.zeros(2, 8, 1, 64)}, ValueError, "k_cache has shape [2, 8, 1, 64]; expected [B, S, Hkv, 128]"),
    ({"k_cache": torch.zeros(2, 8, 1, 128)}, TypeError, "k_cache is torch.float32 on"),
    (
        {"v_cache": torch.zeros(2, 9, 1, 128).half()},
        ValueError,
        "k_cache and v_cache have shapes [2, 8, 1, 128] and [2, 9, 1, 128]",
    ),
    ({"k_cache": torch.zeros(2, 128, 1, 8).half().mT.mT.transpose(1, 3)}, ValueError, "k_cache has strides"),
    (
        {"k_cache": torch.zeros(2 * 8 * 132 + 8, device=DEVICE).half()[4:-4].view(2, 8, 1, 132)[..., :128]},
        ValueError,
        "expected rows at multiples of 16 bytes",
    ),
    (
        {"cache_seqlens": torch.zeros(2)},
        TypeError,
        "cache_seqlens is torch.float32; expected torch.int32 [B], on the device",
    ),
    ({"cache_seqlens": [1, 2]}, TypeError, "cache_seqlens is a list; expected torch.int32 [B]"),
    ({"cache_seqlens": torch.zeros(3).int()}, ValueError, "cache_seqlens has shape [3]; expected [B], and q has B = 2"),
    (
        {"k": torch.zeros(2, 1, 1, 128).half()},
        TypeError,
        "v is a NoneType; expected both k and v, [2, 1, new, 128], or neither",
    ),
    ({"v": torch.zeros(2, 1, 1, 128).half()}, TypeError, "k is a NoneType; expected both k and v"),
    (
        {"k": torch.zeros(2, 1, 2, 128).half(), "v": torch.zeros(2, 1, 1, 128).half()},
        ValueError,
        "v has shape [2, 1, 1, 128]; expected [2, 1, new, 128], with as many new ones in k and v",
    ),
    ({"k": torch.zeros(2, 1, 1, 128), "v": torch.zeros(2, 1, 1, 128)}, TypeError, "k is torch.float32 on"),
    ({"scale": -1.0}, ValueError, "scale is -1.0; expected a number from 1e-30 to 1e6"),
]


@pytest.mark.parametrize(("changes", "error", "reason"), WRONG, ids=[reason[:40] for _, _, reason in WRONG])
def test_wrong_calls_say_what_was_expected(changes: dict[str, Any], error: type[Exception], reason: str) -> None:
    call = make_call(spec("decode_gqa"), CacheCase(2, 1, 1, (4, 5), 0, 8), torch.float16, DEVICE)
    given = {"q": call.q, "k_cache": call.caches[0], "v_cache": call.caches[1], **call.arguments}
    given |= {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
    before = [x.clone() for x in call.caches]
    with pytest.raises(error, match=re.escape(reason)):
        built("decode_gqa").attention.with_kvcache(**given)
    for x, was in zip(call.caches, before):
        assert torch.equal(x.nan_to_num(7.0), was.nan_to_num(7.0))


def test_wrong_calls_of_pages() -> None:
    call = make_call(spec("decode_paged_gqa"), CacheCase(2, 1, 1, (4, 5), 0, 64, 64), torch.float16, DEVICE)
    attend = built("decode_paged_gqa").attention.with_kvcache
    with pytest.raises(ValueError, match="k_cache has pages of 32 keys; expected 64, as the spec says"):
        attend(call.q, *(x[:, :32] for x in call.caches), **call.arguments)
    with pytest.raises(TypeError, match=r"page_table is torch.int64; expected torch.int32 \[B, max_pages\]"):
        attend(call.q, *call.caches, **{**call.arguments, "page_table": call.arguments["page_table"].long()})


# Two caches in one buffer that share memory; their strides are also possible for caches in two buffers.
SHARED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "one": lambda x: (x, x),
    "a view": lambda x: (x, x.view(x.shape)),
    "rows": lambda x: (x[:, :5], x[:, 4:]),
    "columns": lambda x: (x, x[..., 64:]),
    "heads": lambda x: (x[:, :, :2], x[:, :, 1:]),
}
SEPARATE: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "rows": lambda x: (x[:, :4], x[:, 4:8]),
    "every other row": lambda x: (x[:, ::2][:, :4], x[:, 1::2]),
    "columns": lambda x: (x, x[..., 128:]),
    "heads": lambda x: (x[:, :, 2:], x[:, :, :1]),
}
REPEATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sequences": lambda x: x[:1].expand(3, -1, -1, -1),
    "rows": lambda x: x[:, :1].expand(-1, 9, -1, -1),
    "heads": lambda x: x[:, :, :1].expand(-1, -1, 3, -1),
    "windows": lambda x: x.as_strided(x.shape, (*x.stride()[:1], 256, 256, 1)),
}


def _stores(k_cache: torch.Tensor, v_cache: torch.Tensor, stores: bool = True, room: int = 4) -> torch.Tensor:
    """Call decode_gqa with the first columns of two buffers as caches."""
    k_cache, v_cache = (x[..., :128] for x in (k_cache, v_cache))
    heads = k_cache.shape[2]
    q, new = (torch.randn(3, h, 1, 128, dtype=torch.float16, device=DEVICE) for h in (2 * heads, heads))
    lengths = torch.tensor([0, 1, room - 1], dtype=torch.int32, device=DEVICE)
    return built("decode_gqa").attention.with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, **({"k": new, "v": new} if stores else {})
    )


@pytest.mark.parametrize("how", SHARED)
def test_keys_are_not_stored_in_caches_that_share_memory(how: str) -> None:
    """They are not stored either if the call before had separate caches with the same strides. Calls that store nothing
    accept such caches."""
    x, y = (torch.randn(3, 9, 3, 256, dtype=torch.float16, device=DEVICE) for _ in range(2))
    _stores(SHARED[how](x)[0], SHARED[how](y)[1])
    with pytest.raises(
        ValueError,
        match="k_cache and v_cache share memory; expected two caches that share none, as new keys are stored",
    ):
        _stores(*SHARED[how](x))
    assert _stores(*SHARED[how](x), stores=False).isfinite().all()


@pytest.mark.parametrize("how", SEPARATE)
def test_keys_are_stored_in_caches_of_one_buffer(how: str) -> None:
    x = torch.zeros(3, 9, 3, 256, dtype=torch.float16, device=DEVICE)
    k_cache, v_cache = SEPARATE[how](x)
    for _ in range(2):  # the second call skips checks
        _stores(k_cache, v_cache)
    assert all(bool(x[b, (0, 1, 3)[b], :, :128].any()) for x in (k_cache, v_cache) for b in range(3))


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize("how", REPEATED)
def test_keys_are_not_stored_in_a_cache_that_repeats_elements(how: str, which: str) -> None:
    x, y = (torch.randn(3, 9, 3, 256, dtype=torch.float16, device=DEVICE) for _ in range(2))
    caches = [REPEATED[how](x), y] if which == "k_cache" else [y, REPEATED[how](x)]
    with pytest.raises(
        ValueError,
        match=rf"{which} has strides \[.*\], by which elements share memory; expected a place for each element",
    ):
        _stores(*caches)
    assert _stores(*caches, stores=False).isfinite().all()


def test_keys_are_not_stored_in_pages_that_all_sequences_have() -> None:
    call = make_call(spec("decode_paged_gqa"), CacheCase(2, 1, 1, (4, 5), 1, 64, 64), torch.float16, DEVICE)
    table = call.arguments["page_table"][:1].expand(2, -1)
    attend = built("decode_paged_gqa").attention.with_kvcache
    with pytest.raises(
        ValueError,
        match=r"page_table has strides \[0, 1\], by which all sequences have the same pages; expected pages of its own",
    ):
        attend(call.q, *call.caches, **{**call.arguments, "page_table": table})
    reads = {name: x for name, x in call.arguments.items() if name not in ("k", "v")}
    attend(call.q, *call.caches, **{**reads, "page_table": table})


def test_a_gradient_is_refused() -> None:
    call = make_call(spec("decode_gqa"), CacheCase(2, 1, 1, (4, 5), 0, 8), torch.float16, DEVICE)
    with pytest.raises(
        NotImplementedError, match=r"attention.with_kvcache has no backward; expected a call under torch.no_grad\(\)"
    ):
        built("decode_gqa").attention.with_kvcache(call.q.requires_grad_(), *call.caches, **call.arguments)


def test_a_gradient_of_an_input_is_refused() -> None:
    call = make_call(spec("decode_sinks_paged_gqa"), CacheCase(2, 1, 1, (4, 5), 0, 16, 16), torch.float16, DEVICE)
    call.arguments["sink"].requires_grad_()
    with pytest.raises(NotImplementedError, match="attention.with_kvcache has no backward"):
        built("decode_sinks_paged_gqa").attention.with_kvcache(call.q, *call.caches, **call.arguments)


def test_names_that_modules_with_a_cache_need() -> None:
    mask = {"expr": "kv_idx < unit", "params": {"unit": {"scalar": "int"}}}
    with pytest.raises(BuildError, match="declares `unit`, which is a name of modules with a cache"):
        lower(make_spec({"name": "with_cache", "head_dim": 64, "cache": "contiguous", "mask": mask}))


REFUSED = [
    ({"dropout": True, "backward": {}}, "drops weights"),
    ({"mask": {"block_sparse": {"block": 64}}}, "uses block lists"),
    ({"mask": {"document": {"packed": True}}}, "has `packed` documents"),
    ({"schedule": {"order": "kv_outer"}}, "has keys in the outer loop"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_specs_that_no_cache_serves(changes: dict[str, Any], reason: str) -> None:
    made = make_spec({"name": "with_cache", "head_dim": 64, "cache": "contiguous", "backward": False, **changes})
    with pytest.raises(BuildError, match=reason):
        lower(made)
