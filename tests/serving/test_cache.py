"""Calls over a cache of keys and values, by the modules of specs that have one, against naive attention."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attngen.conformance.over_cache import POISON, CacheCase, cache_cases, make_call, run_cache_case
from attngen.errors import BuildError
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from tests.helpers import CUDA, SPECS, built, module_of, spec

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
    """Of 260 sequences with two heads, more rows are joined than sixteen parts at a time are chosen for."""
    lengths = tuple((i * 37) % 90 for i in range(sequences))
    result = run_cache_case(built("decode_gqa"), spec("decode_gqa"), CacheCase(2, 1, 1, lengths, 1, 90), "fp16", DEVICE)
    assert result.ok, str(result)


@pytest.mark.parametrize("sequences", [1, 260])
def test_parts_are_joined_in_several_turns(sequences: int, tmp_path: Path) -> None:
    """1,200 keys in parts of 64 are 19, of which a turn joins sixteen; eight where a call has many rows."""
    fixed = {"schedule": {"split": {"keys": 64}}, "backward": False}
    made = make_spec(
        {"name": "turns", "head_dim": 16, "heads": {"sharing": "gqa"}, "mask": "causal", "cache": "contiguous", **fixed}
    )
    lengths = (1200, *[3] * (sequences - 1))
    result = run_cache_case(module_of(made, tmp_path), made, CacheCase(2, 1, 1, lengths, 0, 1200), "fp16", DEVICE)
    assert result.ok, str(result)


def test_parts_are_joined_by_the_schedule_for_all_rows_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
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


# Masks and modifiers over a cache: what specs say of them is what they say in training.
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


@pytest.mark.parametrize("what", MASKS)
def test_masks_and_modifiers_of_training(what: str, tmp_path: Path) -> None:
    cache = "contiguous" if what in ("none", "alibi", "padding", "bias") else {"paged": {"page_size": 16}}
    sharing = {"alibi": "mha", "softcap": "mqa"}.get(what, "gqa")
    made = make_spec(
        {
            "name": "served",
            "heads": {"sharing": sharing},
            "head_dim": 32,
            "cache": cache,
            "backward": False,
            **MASKS[what],
        }
    )
    module = module_of(made, tmp_path / "served")
    for case in cache_cases(made, False):
        result = run_cache_case(module, made, case, "fp16", DEVICE)
        assert result.ok, f"{what}: {result}"


def test_head_dims_that_are_padded(tmp_path: Path) -> None:
    made = make_spec(
        {
            "name": "served",
            "heads": {"sharing": "gqa"},
            "head_dim": {"qk": 48, "v": 80},
            "mask": "causal",
            "cache": "paged",
            "backward": False,
        }
    )
    module = module_of(made, tmp_path / "served")
    for case in cache_cases(made, False):
        result = run_cache_case(module, made, case, "fp16", DEVICE)
        assert result.ok, str(result)


def _grown(module: ModuleType, made: Spec, steps: int, page: int) -> None:
    """Decode token after token, and hold each step, bit for bit, against a call over a cache that has all keys from
    the start."""
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
    """Heads after rows in memory, rows with room between them: the bits of a call with contiguous queries."""
    cache = spec(name).cache
    assert cache is not None
    page = {"": 0, "page_rows": 48}.get(cache.page)
    page = int(cache.page) if page is None else page
    for n_q in (1, 3, 70):
        heads = (8, 1) if spec(name).rope else (4, 2)
        call = make_call(spec(name), CacheCase(*heads, n_q, (5, 170), 0, 192, page), torch.float16, DEVICE)
        attend = built(name).attention.with_kvcache
        whole = attend(call.q, *call.caches, **call.arguments)
        apart = torch.zeros(2, heads[0], n_q, call.q.shape[3] + 16, dtype=call.q.dtype, device=DEVICE)[
            ..., : call.q.shape[3]
        ]
        for q in (call.q.transpose(1, 2).contiguous().transpose(1, 2), apart.copy_(call.q)):
            assert torch.equal(attend(q, *call.caches, **call.arguments), whole), f"{n_q} queries, strides {q.stride()}"


FAR = 2**32  # bytes, which are 2**31 numbers of 16 bits: an integer of 32 bits holds neither
WAYS = [
    (name, way)
    for name in CACHED
    for way in (("pages",) if getattr(spec(name).cache, "page", "") else ("sequences", "rows"))
]


def _far(x: torch.Tensor, way: str) -> torch.Tensor:
    """A copy of a cache that has pages more than FAR bytes before its own; or its third sequence, or row 256, as far
    behind the first."""
    shape, step, numbers = tuple(x.shape), x[0].numel(), x.shape[2:].numel()
    rows = numbers
    if way == "pages":
        shape = (FAR // (step * x.element_size()) + 1 + len(x), *shape[1:])
    elif way == "sequences":
        step = FAR // 2 // x.element_size()
    else:
        step, rows = numbers, FAR // 256 // x.element_size()
    size = (shape[0] - 1) * step + (shape[1] - 1) * rows + numbers
    far = torch.empty(size, dtype=x.dtype, device=x.device).as_strided(
        shape, (step, rows, *x.stride()[2:])
    )  # most of it nobody touches
    far[-len(x) :] = x
    return far


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_caches_of_more_bytes_than_32_bits_count(name: str, way: str) -> None:
    """A call that appends to such a cache and reads it gives the bits that it gives over a small one."""
    made, attend = spec(name), built(name).attention.with_kvcache
    page = 64 if way == "pages" else 0
    page = 16 if made.cache and made.cache.page == "16" else page
    heads = (4, 1) if made.rope else (4, 2)
    for n_q in (
        1,
        129 if made.rope else 40,
    ):  # of few queries keys are dealt among programs, more take the other kernel
        call = make_call(made, CacheCase(*heads, n_q, (5, 0, 262 - n_q), n_q, 320, page), torch.float16, DEVICE)
        caches = [_far(x, way) for x in call.caches]
        assert all(x.untyped_storage().nbytes() > FAR for x in caches)
        arguments = dict(call.arguments)
        if way == "pages":
            table = arguments["page_table"]
            arguments["page_table"] = torch.where(table < POISON, table + len(caches[0]) - len(call.caches[0]), table)
        assert torch.equal(attend(call.q, *caches, **arguments), attend(call.q, *call.caches, **call.arguments)), n_q


def test_bits_do_not_depend_on_other_sequences() -> None:
    """With parts of a fixed length, each sequence gets alone what it gets among others."""
    made, module = spec("decode_sinks_paged_gqa"), built("decode_sinks_paged_gqa")
    call = make_call(made, CacheCase(4, 2, 1, (5, 700, 2000, 0, 129), 1, 2016, 16), torch.float16, DEVICE)
    together = module.attention.with_kvcache(call.q, *call.caches, **call.arguments)
    for b in range(5):
        alone = {
            name: x[b : b + 1] if name != "sink" else x for name, x in call.arguments.items() if name not in ("k", "v")
        }
        alone["cache_seqlens"] = alone["cache_seqlens"] + 1  # the key has been appended
        assert torch.equal(module.attention.with_kvcache(call.q[b : b + 1], *call.caches, **alone), together[b : b + 1])


@pytest.mark.parametrize("n_q", [1, 4, 60])
def test_pages_before_a_window_are_not_read(n_q: int, tmp_path: Path) -> None:
    """Nor their numbers in the table: tiles that all queries' windows leave out are nobody's, and the bits stay."""
    window = {"sliding_window": {"left": 63, "right": 0}}
    shape: dict[str, Any] = {"heads": {"sharing": "gqa"}, "head_dim": 32, "mask": window, "backward": False}
    made = make_spec({"name": "served", **shape, "cache": {"paged": {"page_size": 16}}})
    module = module_of(made, tmp_path / "served")
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
    """Calls like the last valid one are admitted at once; one that differs in anything gets its sentence."""
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
    """A CUDA graph of a call, captured with short sequences, gives for any lengths what a call gives."""
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


# ---------------------------------------------------------------------------------------------- wrong calls and specs

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


# Of a buffer: two caches that share memory, with strides that caches of two buffers may have.
SHARED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "one": lambda x: (x, x),
    "a view": lambda x: (x, x.view(x.shape)),
    "rows": lambda x: (x[:, :5], x[:, 4:]),
    "columns": lambda x: (x, x[..., 64:]),
    "heads": lambda x: (x[:, :, :2], x[:, :, 1:]),
}
SET_APART: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
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
    """A call of decode_gqa over the first columns of two buffers."""
    k_cache, v_cache = (x[..., :128] for x in (k_cache, v_cache))
    heads = k_cache.shape[2]
    q, new = (torch.randn(3, h, 1, 128, dtype=torch.float16, device=DEVICE) for h in (2 * heads, heads))
    lengths = torch.tensor([0, 1, room - 1], dtype=torch.int32, device=DEVICE)
    return built("decode_gqa").attention.with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, **({"k": new, "v": new} if stores else {})
    )


@pytest.mark.parametrize("how", SHARED)
def test_keys_are_not_stored_in_caches_that_share_memory(how: str) -> None:
    """Nor if the call before had caches with the same strides, which were apart. Where nothing is stored, calls take
    them."""
    x, y = (torch.randn(3, 9, 3, 256, dtype=torch.float16, device=DEVICE) for _ in range(2))
    _stores(SHARED[how](x)[0], SHARED[how](y)[1])
    with pytest.raises(
        ValueError,
        match="k_cache and v_cache share memory; expected two caches that share none, as new keys are stored",
    ):
        _stores(*SHARED[how](x))
    assert _stores(*SHARED[how](x), stores=False).isfinite().all()


@pytest.mark.parametrize("how", SET_APART)
def test_keys_are_stored_in_caches_of_one_buffer(how: str) -> None:
    x = torch.zeros(3, 9, 3, 256, dtype=torch.float16, device=DEVICE)
    k_cache, v_cache = SET_APART[how](x)
    for _ in range(2):  # the second call's tensors are known
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
    with pytest.raises(BuildError, match="declares `unit`, a name that modules with a cache have themselves"):
        lower(make_spec({"name": "served", "head_dim": 64, "cache": "contiguous", "mask": mask}))


REFUSED = [
    ({"dropout": True, "backward": {}}, "drops weights"),
    ({"mask": {"block_sparse": {"block": 64}}}, "visits lists of blocks"),
    ({"mask": {"document": {"packed": True}}}, "has `packed` documents"),
    ({"schedule": {"order": "kv_outer"}}, "walks over keys"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_specs_that_no_cache_serves(changes: dict[str, Any], reason: str) -> None:
    made = make_spec({"name": "served", "head_dim": 64, "cache": "contiguous", "backward": False, **changes})
    with pytest.raises(BuildError, match=reason):
        lower(made)
