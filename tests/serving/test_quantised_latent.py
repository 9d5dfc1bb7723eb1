"""8-bit latent caches: the layout of a row, stored keys, the rules for kernels that read them, and wrong calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.conformance.kv_cache import CacheCase, Call, cache_cases, make_call, run_cache_case
from attngen.errors import SpecError, VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.spec import make_spec
from attngen.verify import verify
from tests.helpers import CUDA, built, edit, module_of, spec, target

pytestmark = pytest.mark.numerics

DEVICE = "cuda" if CUDA else "cpu"
NAME = "decode_fp8_mla"
SPEC: dict[str, Any] = {
    "name": "with_cache",
    "heads": {"sharing": "mqa"},
    "head_dim": {"qk": 528, "v": 512},
    "mask": "causal",
    "backward": False,
    "kv": {"latent": {"rope": 16}},
}


# ---------------------------------------------------------------------------------------------- specs


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"cache": {"dtype": "fp8_e4m3", "scale": "head"}},
            "`cache.scale` is `head`, but a latent has one scale per key and 128 numbers; expected the key left out",
        ),
        (
            {"head_dim": {"qk": 272, "v": 256}},
            "`head_dim` is 256 for v; expected 512, the head_dim of an 8-bit latent",
        ),
        ({"dtype": "fp32"}, "`dtype` names `fp32`, but the cache has 8 bits; expected `bf16`, `fp16` or both"),
    ],
)
def test_what_latents_of_8_bits_need(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError) as error:
        make_spec({**SPEC, "cache": {"dtype": "fp8_e4m3"}, **change})
    assert reason in str(error.value)


# ---------------------------------------------------------------------------------------------- calls


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("cache", "change"),
    [
        ({}, {"mask": {"sliding_window": {"left": 100, "right": 0}}}),
        ({"paged": {"page_size": 16}}, {"score": [{"softcap": {"cap": 20.0}}, "sink"]}),
        ({"paged": {"page_size": "any"}}, {"dtype": "fp16"}),
    ],
    ids=["contiguous, window", "short pages, sinks", "any pages"],
)
def test_caches_and_masks(cache: dict[str, Any], change: dict[str, Any], tmp_path: Path) -> None:
    made = make_spec({**SPEC, "cache": {"dtype": "fp8_e4m3", **cache}, **change})
    module = module_of(made, tmp_path / "with_cache")
    for case in cache_cases(made, False)[:: 1 if DEVICE == "cuda" else 2]:
        result = run_cache_case(module, made, case, made.dtype[-1], DEVICE)
        assert result.ok, str(result)


def _stored_call(new: torch.Tensor) -> tuple[Call, torch.Tensor]:
    """Return a call that stores keys [1, 1, n, 576] in an empty cache, and their rows, [n, 656] bytes."""
    n = new.shape[2]
    call = make_call(spec(NAME), CacheCase(1, 1, 1, (0,), n, 64, 64), new.dtype, DEVICE)
    call.arguments["k"] = new.to(DEVICE)
    built(NAME).attention.with_kvcache(call.q, *call.caches, **call.arguments)
    page = int(call.arguments["page_table"][0, 0])
    return call, call.caches[0][page, :n, 0].cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_has_numbers_factors_and_rotated_columns(dtype: torch.dtype) -> None:
    """FlashMLA's layout: 512 e4m3 numbers, 4 fp32 scales, and 64 16-bit RoPE elements."""
    torch.manual_seed(0)
    new = (torch.randn(1, 1, 40, 576) * torch.exp(2 * torch.randn(1, 1, 40, 1))).to(dtype)
    _, rows = _stored_call(new)
    numbers = rows[:, :512].view(torch.float8_e4m3fn).double().unflatten(1, (4, 128))
    factors = rows[:, 512:528].contiguous().view(torch.float32).double()
    groups = new[0, 0, :, :512].double().unflatten(1, (4, 128))
    torch.testing.assert_close(factors, groups.abs().amax(2) / 448, rtol=1e-6, atol=0)
    assert (numbers.abs().amax(2) == 448).all()
    near = (numbers * factors[..., None] - groups).abs()  # half an ulp, or half the smallest number
    assert (near <= (groups.abs() / 16).maximum(factors[..., None] * 2.0**-10) * (1 + 1e-5)).all()
    assert torch.equal(rows[:, 528:].contiguous().view(dtype), new[0, 0, :, 512:])


def test_latents_of_zeros_and_of_no_numbers() -> None:
    """Zeros have a scale above 0, and stay zeros. NaN makes its group NaN, and no other key."""
    new = torch.ones(1, 1, 3, 576, dtype=torch.float16)
    new[0, 0, 0] = 0
    new[0, 0, 1, 130] = float("nan")
    call, rows = _stored_call(new)
    factors = rows[:, 512:528].contiguous().view(torch.float32)
    assert (factors[0] > 0).all() and not rows[0, :512].any()
    numbers = rows[:, :512].view(torch.float8_e4m3fn).float()
    assert numbers[1, 130].isnan() and (numbers[2] == 448).all()
    call.arguments["k"] = None
    call.arguments["cache_seqlens"] += 3
    found = built(NAME).attention.with_kvcache(
        call.q, *call.caches, **{k: v for k, v in call.arguments.items() if v is not None}
    )
    assert found[..., 130].isnan().all()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"k_cache": torch.zeros(3, 64, 1, 576, dtype=torch.uint8)},
        ValueError,
        r"k_cache has shape \[3, 64, 1, 576\]; expected \[pages, 64, Hkv, 656\]",
    ),
    (
        {"k_cache": torch.zeros(3, 64, 1, 656, dtype=torch.float8_e4m3fn)},
        TypeError,
        "k_cache is torch.float8_e4m3fn on .*; expected torch.uint8",
    ),
    (
        {"k": torch.zeros(1, 1, 1, 656, dtype=torch.uint8)},
        ValueError,
        r"k has shape \[1, 1, 1, 656\]; expected \[1, 1, new, 576\]",
    ),
    ({"k_scale": torch.ones(1)}, TypeError, "k_scale"),
]


@pytest.mark.parametrize(("change", "error", "reason"), WRONG, ids=[reason[:30] for _, _, reason in WRONG])
def test_wrong_calls(change: dict[str, Any], error: type[Exception], reason: str) -> None:
    call = make_call(spec(NAME), CacheCase(2, 1, 1, (5,), 1, 64, 64), torch.float16, DEVICE)
    given = {
        "q": call.q,
        "k_cache": call.caches[0],
        **call.arguments,
        **{name: x.to(DEVICE) for name, x in change.items()},
    }
    with pytest.raises(error, match=reason):
        built(NAME).attention.with_kvcache(**given)


def test_rows_start_at_multiples_of_16_bytes() -> None:
    call = make_call(spec(NAME), CacheCase(2, 1, 1, (5,), 0, 64, 64), torch.float16, DEVICE)
    rows = torch.zeros(3, 64, 1, 664, dtype=torch.uint8, device=DEVICE)[..., :656]
    with pytest.raises(ValueError, match="rows at multiples of 16 bytes"):
        built(NAME).attention.with_kvcache(call.q, rows, **call.arguments)


# ---------------------------------------------------------------------------------------------- rules


LATENTS = "multiplies weights by %k; expected a tile of %K, multiplied by its scales"


@pytest.mark.parametrize(
    ("kernel", "old", "new", "said"),
    [
        ("decode", "expr(k_scale*k_unit)", "expr(k_unit) ", LATENTS),
        ("decode", "expr(k_scale*k_unit)", "expr(2*k_scale*k_unit)", LATENTS),
        ("decode", "interleave %k_columns.even %k_columns.odd", "interleave %k_columns.odd %k_columns.even", LATENTS),
        ("decode", "load %K_SCALE[0, kv, group_v]", "load %K_SCALE[0, q, group_v]", LATENTS),
        ("prefill", "load %K_SCALE[0, kv, group_v]", "load %K_SCALE[0, kv, pair_v]", LATENTS),
        ("append", "expr(k/k_scale)", "expr(k*k_scale)", "expected an element of K_NEW /"),
        (
            "append",
            "reduce max %k_abs over(D_V)",
            "reduce sum %k_abs over(D_V)",
            "expected the largest size in a group of K_NEW / 448",
        ),
        ("append", "expr(max(-k, k))", "expr(max(k, 2*k))", "expected the largest size in a group of K_NEW / 448"),
        ("append", "k_size/448", "k_size/224", "expected the largest size in a group of K_NEW / 448"),
    ],
)
def test_rules(kernel: str, old: str, new: str, said: str) -> None:
    text = print_module(target(NAME))
    at = text.index(f"kernel @{kernel} ")
    end = text.find("\nkernel ", at + 1)
    with pytest.raises(VerifyError) as error:
        verify(parse_module(text[:at] + edit(text[at:end], (old, new)) + text[end:]))
    assert said in str(error.value)


def test_groups_broadcast_to_columns_alone() -> None:
    """A scale per group of columns broadcasts only to a value that has these columns."""
    text = print_module(target(NAME))
    at = text.index("kernel @decode ")
    line = "%alone = map expr(2*k_scale) uses(k_scale=%k_scale) : f32[BLOCK_KV] @reg\n    %s_rope ="
    with pytest.raises(
        VerifyError, match=r"%alone: the expression is of \[BLOCK_KV, GROUPS_V\], the value of \[BLOCK_KV\]"
    ):
        verify(parse_module(text[:at] + edit(text[at:], ("%s_rope =", line))))
