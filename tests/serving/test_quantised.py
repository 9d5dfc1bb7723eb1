"""8-bit caches: number conversion, stored keys, the rules for kernels that read them, and wrong calls."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attngen.conformance.kv_cache import CacheCase, cache_cases, make_call, run_cache_case
from attngen.errors import SpecError, VerifyError
from attngen.interp.e4m3 import NUMBERS, numbers, pairs
from attngen.ir import Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.spec import Spec, make_spec
from attngen.verify import verify
from tests.helpers import CUDA, built, edit, module_of, spec, target

pytestmark = pytest.mark.numerics

DEVICE = "cuda" if CUDA else "cpu"
E4M3 = torch.float8_e4m3fn
NAME = "decode_paged_fp8_gqa"
SPEC: dict[str, Any] = {
    "name": "with_cache",
    "heads": {"sharing": "gqa"},
    "head_dim": 32,
    "mask": "causal",
    "backward": False,
}


def _spec(cache: dict[str, Any], **change: Any) -> Spec:
    return make_spec({**SPEC, "cache": {"dtype": "fp8_e4m3", **cache}, **change})


# ---------------------------------------------------------------------------------------------- numbers


def test_numbers_are_those_of_torch() -> None:
    found = torch.arange(256, dtype=torch.uint8).view(E4M3).double().numpy()
    np.testing.assert_array_equal(NUMBERS, found)
    first, second = numbers(np.array([0x3801, -1], np.int16))
    np.testing.assert_array_equal(first, [2.0**-9, np.nan])
    np.testing.assert_array_equal(second, [1.0, np.nan])


def test_pairs_are_the_next_numbers() -> None:
    """Every fp16 number becomes the nearest e4m3 number, ties to even, at most 448 in size; NaN stays NaN."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    wanted = every.float().clamp(-448, 448).to(E4M3).view(torch.uint8).numpy()
    found = pairs(every.double().numpy(), np.zeros(2**16)).view(np.uint16)
    same = (found == wanted) | (every.isnan().numpy() & ((found & 0x7F) == 0x7F)) | (every == 0).numpy()
    assert same.all(), every.numpy()[~same][:5]


@pytest.mark.share(4)
def test_kernels_store_the_next_numbers(tmp_path: Path) -> None:
    """The kernel that appends rounds in the same way."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    module = module_of(_spec({}, head_dim=128), tmp_path / "with_cache")
    new = every.view(1, 1, 512, 128).to(DEVICE)
    caches = [torch.zeros(1, 512, 1, 128, dtype=E4M3, device=DEVICE) for _ in "kv"]
    one = torch.ones(1, device=DEVICE)
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    q = torch.zeros(1, 1, 1, 128, dtype=torch.float16, device=DEVICE)
    module.attention.with_kvcache(q, *caches, cache_seqlens=lengths, k=new, v=new, k_scale=one, v_scale=one)
    wanted = every.float().clamp(-448, 448).to(E4M3).float()
    for cache in caches:
        found = cache.float().cpu().flatten()
        assert torch.equal(found.nan_to_num(1e9), wanted.nan_to_num(1e9))


# ---------------------------------------------------------------------------------------------- calls


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("cache", "change"),
    [
        ({"scale": "head"}, {"heads": {"sharing": "mha"}, "mask": {"sliding_window": {"left": 100, "right": 0}}}),
        ({"paged": {"page_size": 64}, "scale": "page"}, {}),
        ({"paged": {"page_size": 64}, "scale": "page"}, {"schedule": {"block_kv": 128}}),
        (
            {"paged": {"page_size": 16}, "scale": "page"},
            {"heads": {"sharing": "mqa"}, "score": [{"softcap": {"cap": 20.0}}, "sink"]},
        ),
        ({"paged": {"page_size": "any"}, "scale": "page"}, {"head_dim": {"qk": 48, "v": 80}}),
    ],
    ids=[
        "contiguous, window",
        "factor of a page",
        "tiles longer than pages",
        "short pages, sinks",
        "any pages, padded columns",
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_factors_of_heads_and_of_pages(
    cache: dict[str, Any], change: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    made = _spec(cache, **change)
    module = module_of(made, tmp_path / "with_cache")
    for case in cache_cases(made, False)[:: 1 if DEVICE == "cuda" else 3]:
        result = run_cache_case(module, made, case, dtype, DEVICE)
        assert result.ok, str(result)


def test_a_tile_reads_the_number_of_its_page_once(tmp_path: Path) -> None:
    """With TMA, scales come from the page number that the loop prefetches for descriptors: 2 kernels with 2 loops
    each."""
    module_of(_spec({"paged": {"page_size": 64}, "scale": "page"}, head_dim=128), tmp_path / "with_cache")
    lines = [line.strip() for line in (tmp_path / "with_cache" / "kernels.py").read_text().splitlines()]
    found = [lines[i - 3 : i] for i, line in enumerate(lines) if line == "first_page = tl.load("]
    assert found == [["if TMA:", "first_page = page_of_tile", "else:"]] * 4


def test_factors_and_queries_of_any_size() -> None:
    """Queries may exceed the range of fp16, and scales may have any size: rows are first divided by their largest
    element."""
    made, module = spec(NAME), built(NAME)
    call = make_call(made, CacheCase(4, 2, 2, (70, 5), 0, 128, 64), torch.bfloat16, DEVICE)
    plain = module.attention.with_kvcache(call.q, *call.caches, **call.arguments)
    for size in (2.0**40, 2.0**-40):
        q = call.q.clone()
        q[:, 1] *= size  # one row of a tile; the others stay the same
        arguments = {**call.arguments, "k_scale": call.arguments["k_scale"] / size, "scale": made.head_dim.qk**-0.5}
        found = module.attention.with_kvcache(q, *call.caches, **arguments)
        assert torch.equal(found[:, 1], plain[:, 1])
        arguments = {**call.arguments, "v_scale": call.arguments["v_scale"] * size}
        found = module.attention.with_kvcache(call.q, *call.caches, **arguments)
        torch.testing.assert_close(found.float() / size, plain.float(), rtol=1e-2, atol=0)


def test_nan_in_queries_stays_in_its_row() -> None:
    module = built(NAME)
    call = make_call(spec(NAME), CacheCase(4, 2, 1, (70, 5), 0, 128, 64), torch.bfloat16, DEVICE)
    plain = module.attention.with_kvcache(call.q, *call.caches, **call.arguments)
    call.q[0, 1] = math.nan
    call.q[1, 2, 0, 7] = math.inf
    found = module.attention.with_kvcache(call.q, *call.caches, **call.arguments)
    hit = torch.zeros(2, 4, dtype=torch.bool)
    hit[0, 1] = hit[1, 2] = True
    assert found[hit].isnan().all() and torch.equal(found[~hit], plain[~hit])


def test_a_number_of_the_cache_that_is_none_stays_none() -> None:
    module = built(NAME)
    call = make_call(spec(NAME), CacheCase(2, 1, 1, (70,), 1, 128, 64), torch.bfloat16, DEVICE)
    call.arguments["v"][..., 5] = math.nan
    found = module.attention.with_kvcache(call.q, *call.caches, **call.arguments)
    assert found[..., 5].isnan().all() and found[..., 4].isfinite().all()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k_cache": torch.zeros(3, 64, 1, 128, dtype=torch.float16)}, TypeError, "k_cache is torch.float16 on"),
    ({"v_cache": torch.zeros(3, 64, 1, 128, dtype=torch.float8_e5m2)}, TypeError, "v_cache is torch.float8_e5m2 on"),
    ({"k": torch.zeros(1, 1, 1, 128, dtype=E4M3)}, TypeError, "k is torch.float8_e4m3fn on"),
    ({"k_scale": 1.0}, TypeError, "k_scale is a float; expected torch.float32 [Hkv] on"),
    ({"v_scale": torch.ones(1, dtype=torch.float64)}, TypeError, "v_scale is torch.float64 on"),
    ({"v_scale": torch.ones(2)}, ValueError, "v_scale has shape [2]; expected [Hkv], and the cache has [1]"),
]


@pytest.mark.parametrize(("change", "error", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_wrong_calls(change: dict[str, Any], error: type[Exception], said: str) -> None:
    call = make_call(spec(NAME), CacheCase(2, 1, 1, (70,), 1, 128, 64), torch.float16, DEVICE)
    given = {"k_cache": call.caches[0], "v_cache": call.caches[1], **call.arguments}
    given |= {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    with pytest.raises(error) as raised:
        built(NAME).attention.with_kvcache(call.q, **given)
    assert said in str(raised.value) and "expected" in str(raised.value)


def test_caches_whose_pairs_cannot_be_read_are_refused() -> None:
    """Kernels read two numbers as one 16-bit element, so pairs must be aligned."""
    call = make_call(spec(NAME), CacheCase(2, 1, 1, (60,), 0, 64, 64), torch.float16, DEVICE)
    odd = call.caches[0].as_strided(call.caches[0].shape, (8192, 128, 7, 1))  # strides of the only head
    with pytest.raises(
        ValueError,
        match=r"k_cache starts at element 0 of its storage and has strides \[8192, 128, 7, 1\]; expected even",
    ):
        built(NAME).attention.with_kvcache(call.q, odd, call.caches[1], **call.arguments)
    negated = torch.view_as_complex(torch.tensor([[1.0, -1.0]], device=DEVICE)).conj().imag
    with pytest.raises(
        ValueError, match="k_scale is a negated view; expected numbers as they lie in memory: call .resolve_neg()"
    ):
        built(NAME).attention.with_kvcache(call.q, *call.caches, **{**call.arguments, "k_scale": negated})


def test_gradients_of_factors_are_refused() -> None:
    call = make_call(spec(NAME), CacheCase(2, 1, 1, (60,), 0, 64, 64), torch.float16, DEVICE)
    call.arguments["v_scale"].requires_grad_()
    with pytest.raises(NotImplementedError, match="has no backward; expected a call under torch.no_grad()"):
        built(NAME).attention.with_kvcache(call.q, *call.caches, **call.arguments)


@pytest.mark.share(4)
def test_factors_of_pages_are_checked(tmp_path: Path) -> None:
    made = _spec({"paged": {"page_size": 64}, "scale": "page"})
    module = module_of(made, tmp_path / "with_cache")
    call = make_call(made, CacheCase(2, 1, 1, (70,), 1, 128, 64), torch.float16, DEVICE)
    given = {**call.arguments, "k_scale": torch.ones(1, device=DEVICE)}
    with pytest.raises(
        ValueError, match=r"k_scale has shape \[1\]; expected \[pages, Hkv\], and the cache has \[5, 1\]"
    ):
        module.attention.with_kvcache(call.q, *call.caches, **given)


def test_narrow_heads_are_refused() -> None:
    """Matrix products take half the columns, and need at least 16."""
    with pytest.raises(
        SpecError, match="`head_dim` is 16, but the cache has 8 bits; expected a multiple of 16, 32 at least"
    ):
        _spec({}, head_dim=16)


# ---------------------------------------------------------------------------------------------- rules


def _of_page() -> Module:
    return lower(_spec({"paged": {"page_size": 64}, "scale": "page"}))


def _changed(text: str, kernel: str, old: str, new: str) -> Module:
    """Return the module with one kernel's text changed."""
    at = text.index(f"kernel @{kernel} ")
    end = text.find("\nkernel ", at + 1)
    end = len(text) if end < 0 else end
    return parse_module(text[:at] + edit(text[at:end], (old, new)) + text[end:])


@pytest.mark.parametrize(
    ("kernel", "old", "new", "said"),
    [
        ("decode", "load %K_SCALE[hkv]", "load %V_SCALE[hkv]", "computes weights by"),
        ("decode", "expr(k_scale*q_size)", "expr(q_size) ", "computes weights by"),
        ("decode", "dot %q_columns.odd %k.odd", "dot %q_columns.odd %k.even", "computes weights by"),
        ("decode", "select(q_size > 0, q/q_size, q)", "select(q_size > 0, q/q_size, 0)", "computes weights by"),
        ("decode", "expr(max(-q, q))", "expr(max(-q, 2*q))", "computes weights by"),
        ("decode", "expr(acc*v_scale)", "expr(acc*v_scale**2)", "expected the factor V_SCALE[hkv] in it, once"),
        ("decode", "dot %p_cast %v.odd", "dot %p_cast %v.even", "is no sum of odd columns"),
        ("append", "expr(k/k_scale)", "expr(k*k_scale)", "expected an element of K_NEW / K_SCALE[hkv]"),
        (
            "append",
            "interleave %v_columns.even %v_columns.odd",
            "interleave %v_columns.odd %v_columns.even",
            "the even and the odd columns of one tile",
        ),
        ("append", "append %V[hkv, kv, pair_v] %v_pairs", "append %V[hkv, kv, pair_v] %k_pairs", "rule `types`"),
        ("prefill", "load %V_SCALE[h // group]", "load %V_SCALE[h]", "rule `indexing`"),
        ("prefill", "dot %p_cast %v.even over(BLOCK_KV)", "dot %v.even %p_cast over(BLOCK_KV)", "rule `types`"),
    ],
)
def test_rules_of_heads(kernel: str, old: str, new: str, said: str) -> None:
    with pytest.raises(VerifyError) as error:
        verify(_changed(print_module(target(NAME)), kernel, old, new))
    assert said in str(error.value)


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("gather %V_SCALE[first_page, hkv]", "gather %K_SCALE[first_page, hkv]", "expected the factor"),
        (
            "expr(rescaled + summed*v_scale) uses(rescaled=%rescaled_odd",
            "expr(rescaled + summed) uses(rescaled=%rescaled_odd",
            "expected the",
        ),
        (
            "expr(rescaled + summed*v_scale) uses(rescaled=%rescaled_odd",
            "expr(summed*v_scale + 2*rescaled) uses(rescaled=%rescaled_odd",
            "combine",
        ),
        ("PAGE_TABLE[b, kv_start // 64]", "PAGE_TABLE[b, kv_start // 32]", "rule `indexing`"),
    ],
)
def test_rules_of_pages(old: str, new: str, said: str) -> None:
    with pytest.raises(VerifyError) as error:
        verify(_changed(print_module(_of_page()), "decode", old, new))
    assert said in str(error.value)


def test_tiles_with_one_factor_divide_pages() -> None:
    text = print_module(_of_page())
    at = text.index("schedule @decode")
    with pytest.raises(VerifyError, match="tiles of 128 keys, which have one scale each, do not divide pages of 64"):
        verify(
            parse_module(
                text[:at]
                + text[at:].replace(
                    "BLOCK_KV=64 num_warps=4 num_stages=3\n", "BLOCK_KV=128 num_warps=4 num_stages=3\n", 1
                )
            )
        )


def test_products_of_few_columns_are_refused() -> None:
    text = print_module(lower(_spec({})))
    with pytest.raises(
        VerifyError, match="rule `powers-of-two`: kernel @decode: %s_even sums 8 columns; Triton needs 16 at least"
    ):
        verify(parse_module(edit(text, ("head_dim qk=32", "head_dim qk=16"))))
