"""Calls with a KV cache, by the modules of specs that have one, against naive attention."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attngen.conformance.kv_cache import POISON, CacheCase, cache_cases, make_call, run_cache_case
from attngen.spec import Spec, make_spec
from tests.helpers import CUDA, SPECS, built, module_of, spec

pytestmark = pytest.mark.numerics

DEVICE = "cuda" if CUDA else "cpu"
CACHED = [name for name in SPECS if spec(name).cache]
DTYPES = ("bf16", "fp16") if CUDA else ("fp16",)
OF_SPECS = [(name, case) for name in CACHED for case in cache_cases(spec(name), CUDA)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "case"), OF_SPECS, ids=[f"{name}-{case}" for name, case in OF_SPECS])
def test_calls_agree_with_naive_attention(name: str, case: CacheCase, dtype: str) -> None:
    result = run_cache_case(built(name), spec(name), case, dtype, DEVICE)
    assert result.ok, str(result)


@pytest.mark.parametrize("sequences", [32, 33, 140, 260])
def test_lengths_are_read_32_or_128_at_a_time(sequences: int) -> None:
    """260 sequences with two heads have more rows than the combine kernel takes with sixteen splits at a time."""
    lengths = tuple((i * 37) % 90 for i in range(sequences))
    result = run_cache_case(built("decode_gqa"), spec("decode_gqa"), CacheCase(2, 1, 1, lengths, 1, 90), "fp16", DEVICE)
    assert result.ok, str(result)


@pytest.mark.share(16)
@pytest.mark.parametrize("sequences", [1, 260])
def test_splits_are_combined_in_several_iterations(sequences: int, tmp_path: Path) -> None:
    """1,200 keys in splits of 64 are 19 splits. An iteration combines sixteen of them, or eight in a call with many
    rows."""
    fixed = {"schedule": {"split": {"keys": 64}}, "backward": False}
    made = make_spec(
        {
            "name": "iterations",
            "head_dim": 16,
            "heads": {"sharing": "gqa"},
            "mask": "causal",
            "cache": "contiguous",
            **fixed,
        }
    )
    lengths = (1200, *[3] * (sequences - 1))
    result = run_cache_case(module_of(made, tmp_path), made, CacheCase(2, 1, 1, lengths, 0, 1200), "fp16", DEVICE)
    assert result.ok, str(result)


def test_splits_are_combined_by_the_schedule_for_all_rows_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module, found = built("decode_gqa"), []
    launch = module.COMBINE
    monkeypatch.setattr(
        module,
        "COMBINE",
        lambda x, rows, programs, *rest: found.append((rows, programs)) or launch(x, rows, programs, *rest),
    )
    q, kv = (
        torch.randn(3, 8, 2, 128, dtype=torch.float16, device=DEVICE),
        torch.randn(3, 70, 4, 128, dtype=torch.float16, device=DEVICE),
    )
    module.attention.with_kvcache(q, kv, kv, cache_seqlens=torch.full((3,), 70, dtype=torch.int32, device=DEVICE))
    assert found == [(3 * 8 * 2, 1)]


# Masks and modifiers with a KV cache. Specs write them as they do for training.
MASKS: dict[str, dict[str, Any]] = {
    "none": {"mask": "none"},
    "top_left": {"mask": {"expr": "kv_idx <= q_pos and (kv_idx % 3 != 1 or q_pos - kv_idx < 5)"}},
    "streaming": {
        "mask": {"all_of": ["causal", {"any_of": [{"sink_tokens": {"count": 4}}, {"sliding_window": {"left": 63}}]}]}
    },
    "chunked": {"mask": {"all_of": ["causal", {"chunked": {"size": 50}}]}},
    "prefix": {"mask": "prefix_lm"},
    "padding": {"mask": {"all_of": ["causal", "key_padding"]}},
    "alibi": {"mask": "causal", "score": "alibi"},
    "tree": {"mask": "tree"},
    "softcap": {"mask": "causal", "score": {"softcap": 5.0}},
    "bias": {"mask": "causal", "score": "dense_bias"},
    "temperature": {"mask": "causal", "score": "temperature"},
}


@pytest.mark.share(16)
@pytest.mark.parametrize("what", MASKS)
def test_masks_and_modifiers_of_training(what: str, tmp_path: Path) -> None:
    cache = "contiguous" if what in ("none", "alibi", "padding", "bias") else {"paged": {"page_size": 16}}
    sharing = {"alibi": "mha", "softcap": "mqa"}.get(what, "gqa")
    made = make_spec(
        {
            "name": "with_cache",
            "heads": {"sharing": sharing},
            "head_dim": 32,
            "cache": cache,
            "backward": False,
            **MASKS[what],
        }
    )
    module = module_of(made, tmp_path / "with_cache")
    for case in cache_cases(made, False):
        result = run_cache_case(module, made, case, "fp16", DEVICE)
        assert result.ok, f"{what}: {result}"


def test_head_dims_that_are_padded(tmp_path: Path) -> None:
    made = make_spec(
        {
            "name": "with_cache",
            "heads": {"sharing": "gqa"},
            "head_dim": {"qk": 48, "v": 80},
            "mask": "causal",
            "cache": "paged",
            "backward": False,
        }
    )
    module = module_of(made, tmp_path / "with_cache")
    for case in cache_cases(made, False):
        result = run_cache_case(module, made, case, "fp16", DEVICE)
        assert result.ok, str(result)


def _grown(module: ModuleType, made: Spec, steps: int, page: int) -> None:
    """Decode token by token, and compare each step bit for bit with a call on a cache that has all keys from the
    start."""
    case = CacheCase(2, 1, 1, (0, 3, 129), steps, 129 + steps if not page else -(-(129 + steps) // page) * page, page)
    call = make_call(made, case, torch.float16, DEVICE)
    lengths, new = (
        call.arguments["cache_seqlens"],
        {name: call.arguments.pop(name) for name in ("k", "v") if name in call.arguments},
    )
    after = [x.clone() for x in call.caches]
    attend = module.attention.with_kvcache
    attend(call.q, *after, **new, **call.arguments)
    for step in range(steps):
        token = {name: x[:, :, step : step + 1] for name, x in new.items()}
        arguments = {**call.arguments, "cache_seqlens": lengths + step}
        out = attend(call.q, *call.caches, **token, **arguments)
        whole = attend(call.q, *after, **{**arguments, "cache_seqlens": lengths + step + 1})
        assert torch.equal(out, whole), f"step {step}"
    for grown, at_once in zip(call.caches, after):
        assert torch.equal(grown.float().nan_to_num(7.0), at_once.float().nan_to_num(7.0))


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_that_grows_gives_the_bits_of_one_that_is_whole(name: str) -> None:
    cache = spec(name).cache
    assert cache is not None
    page = {"": 0, "page_rows": 48}.get(cache.page)
    _grown(built(name), spec(name), 1000 if CUDA else 12, int(cache.page) if page is None else page)


@pytest.mark.parametrize("name", CACHED)
def test_queries_may_have_any_layout(name: str) -> None:
    """Queries in another order of dimensions, or with gaps between rows, give the bits of contiguous queries."""
    cache = spec(name).cache
    assert cache is not None
    page = {"": 0, "page_rows": 48}.get(cache.page)
    page = int(cache.page) if page is None else page
    for n_q in (1, 3, 70):
        heads = (8, 1) if spec(name).rope else (4, 2)
        call = make_call(spec(name), CacheCase(*heads, n_q, (5, 170), 0, 192, page), torch.float16, DEVICE)
        attend = built(name).attention.with_kvcache
        whole = attend(call.q, *call.caches, **call.arguments)
        strided = torch.zeros(2, heads[0], n_q, call.q.shape[3] + 16, dtype=call.q.dtype, device=DEVICE)[
            ..., : call.q.shape[3]
        ]
        for q in (call.q.transpose(1, 2).contiguous().transpose(1, 2), strided.copy_(call.q)):
            assert torch.equal(attend(q, *call.caches, **call.arguments), whole), f"{n_q} queries, strides {q.stride()}"


FAR = 2**32  # bytes, or 2**31 elements of 16 bits; neither fits in an int32
FAR_AXES = [  # along which axis of a cache the stride is FAR
    (name, axis)
    for name in CACHED
    for axis in (("pages",) if getattr(spec(name).cache, "page", "") else ("sequences", "rows"))
]


def _far(x: torch.Tensor, axis: str) -> torch.Tensor:
    """Return a copy of a cache in which the pages start more than FAR bytes after the first, or in which the third
    sequence, or row 256, is FAR bytes after the first."""
    shape, step, numbers = tuple(x.shape), x[0].numel(), x.shape[2:].numel()
    rows = numbers
    if axis == "pages":
        shape = (FAR // (step * x.element_size()) + 1 + len(x), *shape[1:])
    elif axis == "sequences":
        step = FAR // 2 // x.element_size()
    else:
        step, rows = numbers, FAR // 256 // x.element_size()
    size = (shape[0] - 1) * step + (shape[1] - 1) * rows + numbers
    far = torch.empty(size, dtype=x.dtype, device=x.device).as_strided(
        shape, (step, rows, *x.stride()[2:])
    )  # most of the memory is never touched
    far[-len(x) :] = x
    return far


@pytest.mark.parametrize(("name", "axis"), FAR_AXES)
def test_caches_of_more_bytes_than_32_bits_count(name: str, axis: str) -> None:
    """A call that appends to such a cache and reads it gives the bits that it gives with a small one."""
    made, attend = spec(name), built(name).attention.with_kvcache
    page = 64 if axis == "pages" else 0
    page = 16 if made.cache and made.cache.page == "16" else page
    heads = (4, 1) if made.rope else (4, 2)
    for n_q in (
        1,
        129 if made.rope else 40,
    ):  # few queries run the split-KV kernel, more run @prefill
        call = make_call(made, CacheCase(*heads, n_q, (5, 0, 262 - n_q), n_q, 320, page), torch.float16, DEVICE)
        caches = [_far(x, axis) for x in call.caches]
        assert all(x.untyped_storage().nbytes() > FAR for x in caches)
        arguments = dict(call.arguments)
        if axis == "pages":
            table = arguments["page_table"]
            arguments["page_table"] = torch.where(table < POISON, table + len(caches[0]) - len(call.caches[0]), table)
        assert torch.equal(attend(call.q, *caches, **arguments), attend(call.q, *call.caches, **call.arguments)), n_q


def test_bits_do_not_depend_on_other_sequences() -> None:
    """With splits of a fixed length, a sequence by itself gives the bits that it gives in a batch."""
    made, module = spec("decode_sinks_paged_gqa"), built("decode_sinks_paged_gqa")
    call = make_call(made, CacheCase(4, 2, 1, (5, 700, 2000, 0, 129), 1, 2016, 16), torch.float16, DEVICE)
    together = module.attention.with_kvcache(call.q, *call.caches, **call.arguments)
    for b in range(5):
        alone = {
            name: x[b : b + 1] if name != "sink" else x for name, x in call.arguments.items() if name not in ("k", "v")
        }
        alone["cache_seqlens"] = alone["cache_seqlens"] + 1  # the key has been appended
        assert torch.equal(module.attention.with_kvcache(call.q[b : b + 1], *call.caches, **alone), together[b : b + 1])


@pytest.mark.share(16)
@pytest.mark.parametrize("n_q", [1, 4, 60])
def test_pages_before_a_window_are_not_read(n_q: int, tmp_path: Path) -> None:
    """Neither are their entries in the page table: no program has the tiles before all windows, and the bits stay the
    same."""
    window = {"sliding_window": {"left": 63, "right": 0}}
    shape: dict[str, Any] = {"heads": {"sharing": "gqa"}, "head_dim": 32, "mask": window, "backward": False}
    made = make_spec({"name": "with_cache", **shape, "cache": {"paged": {"page_size": 16}}})
    module = module_of(made, tmp_path / "with_cache")
    call = make_call(made, CacheCase(4, 2, n_q, (1000, 700), 0, 1008, 16), torch.float16, DEVICE)
    outs = []
    for poisoned in (False, True):
        for b, keys in enumerate((1000, 700) if poisoned else ()):
            unseen = (keys - n_q - 63) // 128 * 128 // 16  # pages of tiles of up to 128 keys
            table = call.arguments["page_table"][b]
            for cache in call.caches:
                cache[table[:unseen].long()] = math.nan
            table[:unseen] = POISON
        outs.append(module.attention.with_kvcache(call.q, *call.caches, **call.arguments))
    assert outs[1].isfinite().all() and torch.equal(*outs)


def test_calls_after_a_valid_one_are_checked_too() -> None:
    """Calls like the last valid one skip checks; a call that differs in any way is checked and gets its sentence."""
    module = built("decode_gqa")
    call = make_call(spec("decode_gqa"), CacheCase(4, 2, 1, (5, 9), 1, 16), torch.float16, DEVICE)
    attend, (k_cache, v_cache), lengths = module.attention.with_kvcache, call.caches, call.arguments["cache_seqlens"]
    attend(call.q, k_cache, v_cache, **call.arguments)
    attend(call.q.clone(), k_cache, v_cache, **call.arguments)
    shifted = torch.zeros(k_cache.numel() + 1, dtype=k_cache.dtype, device=DEVICE)[1:].view(k_cache.shape)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((call.q.double(), k_cache, v_cache), call.arguments),
        ((call.q[:, :3], k_cache, v_cache), call.arguments),
        ((call.q, shifted, v_cache), call.arguments),
        ((call.q, k_cache[:1], v_cache), call.arguments),
        (([], k_cache, v_cache), call.arguments),
        ((call.q, k_cache, v_cache), {**call.arguments, "cache_seqlens": lengths.long()}),
        ((call.q, k_cache, v_cache), {**call.arguments, "v": None}),
    ]
    for args, arguments in wrong:
        with pytest.raises((TypeError, ValueError), match="attention.with_kvcache: .* expected"):
            attend(*args, **arguments)
    paged = built("decode_paged_gqa").attention.with_kvcache
    of_pages = make_call(spec("decode_paged_gqa"), CacheCase(4, 2, 1, (5, 9), 0, 64, 64), torch.float16, DEVICE)
    paged(of_pages.q, *of_pages.caches, **of_pages.arguments)
    with pytest.raises(TypeError, match="page_table is a NoneType"):
        table = of_pages.arguments.pop("page_table")
        paged(of_pages.q, *of_pages.caches, page_table=None, k=table, **of_pages.arguments)
    same = attend(call.q, k_cache, k_cache, cache_seqlens=lengths)  # one tensor twice
    assert torch.equal(same, attend(call.q, k_cache, k_cache.clone(), cache_seqlens=lengths))


def test_keys_without_room_are_left_out() -> None:
    made, module = spec("decode_gqa"), built("decode_gqa")
    case = CacheCase(2, 1, 1, (4, 6), 3, 8)  # the second sequence has room for two of its three new keys
    result = run_cache_case(module, made, case, "fp16", DEVICE, check=False)
    assert result.ok, str(result)


def test_lengths_below_zero_count_as_none() -> None:
    module = built("decode_gqa")
    call = make_call(spec("decode_gqa"), CacheCase(2, 1, 1, (0, 5), 0, 8), torch.float16, DEVICE)
    call.arguments["cache_seqlens"][0] = -3
    out, lse = module.attention.with_kvcache(call.q, *call.caches, **call.arguments, return_lse=True, check=False)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all() and out[1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CACHED)
def test_a_graph_serves_other_lengths(name: str) -> None:
    """A CUDA graph that is captured with short sequences gives the results of a call for any lengths."""
    made, module = spec(name), built(name)
    assert made.cache is not None
    page = {"": 0, "page_rows": 16}.get(made.cache.page)
    page = int(made.cache.page) if page is None else page
    room = 4096
    heads = (16, 1) if made.rope else (8, 2)
    call = make_call(made, CacheCase(*heads, 1, (room - 1, room - 1, room - 1), 0, room, page), torch.bfloat16, DEVICE)
    lengths = call.arguments["cache_seqlens"]
    attend = lambda: module.attention.with_kvcache(call.q, *call.caches, **call.arguments)  # noqa: E731
    lengths.fill_(1)
    for _ in range(3):
        attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for of_sequences in ((1, 2, 3), (4095, 0, 64), (100, 4000, 1025)):
        lengths.copy_(torch.tensor(of_sequences, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, attend()), of_sequences
