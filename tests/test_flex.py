"""FlexAttention's call and functions: what `attngen.flex_attention` gives, what the functions say as a spec, and
what is refused."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention, or_masks

import attngen
from attngen.bench.mods import MODS, Mod
from attngen.conformance.oracle import relative_error
from attngen.errors import SpecError
from attngen.frontends import pairs
from attngen.frontends.block_masks import masked_of
from attngen.frontends.compiled import OLD
from attngen.frontends.trace import TraceError, trace
from attngen.frontends.tracer import OUTSIDE
from attngen.ir.sizes import Sizes
from attngen.spec import parse_spec
from tests.helpers import ROOT

D = 16
Tensor = torch.Tensor


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own, so that what is built here is built from this source, once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def inputs(sizes: Sizes, device: str, dtype: torch.dtype = torch.float32, width: int = D) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    lengths = ((sizes.q_heads, sizes.n_q), (sizes.kv_heads, sizes.n_kv), (sizes.kv_heads, sizes.n_kv))
    drawn = [torch.randn(sizes.batch, heads, n, width, generator=g) for heads, n in lengths]
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def naive(q: Tensor, k: Tensor, v: Tensor, score: Any = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64, by hand."""
    group = q.shape[1] // k.shape[1]
    s = q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3) / math.sqrt(q.shape[3])
    s = s if score is None else score(s)
    s = s if mask is None else s.masked_fill(~mask, -math.inf)
    p = torch.softmax(s, -1).nan_to_num(0.0)
    return p @ v.double().repeat_interleave(group, 1), s.logsumexp(-1)


def hold(mod: Mod, sizes: Sizes, device: str) -> None:
    """Compare the output, the LSE and every gradient with the oracle's."""
    made = mod.make(sizes, device, torch.Generator(device).manual_seed(0))
    q, k, v = inputs(sizes, device)
    leaves = [q, k, v, *made.learned]
    out, lse = attngen.flex_attention(
        q, k, v, made.score_mod, made.mask_mod, enable_gqa=sizes.q_heads != sizes.kv_heads, return_lse=True
    )
    reference = mod.reference(made, sizes)
    expected, expected_lse = naive(q, k, v, **{mod.kind: reference})
    seen = expected_lse > -math.inf
    w, w_lse = torch.randn_like(expected), torch.randn_like(expected_lse)
    grads = torch.autograd.grad((out * w).sum() + (lse * w_lse)[seen].sum(), leaves)
    truth = torch.autograd.grad((expected * w).sum() + (expected_lse * w_lse)[seen].sum(), leaves)
    for found, right in zip((out, lse[seen], *grads), (expected, expected_lse[seen], *truth)):
        assert relative_error(found, right) < 1e-5
    assert bool((lse == -math.inf)[~seen].all()) and bool((out == 0)[~seen].all())


CASES = [(name, case.sizes) for name, mod in MODS.items() for case in mod.tests[-1:]]


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=[name for name, _ in CASES])
def test_functions_of_attention_gym(name: str, sizes: Sizes, device: str) -> None:
    hold(MODS[name], sizes, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, mod in MODS.items() if mod.kind == "mask"])
def test_long_masks_by_compiled_kernels(name: str) -> None:
    """bf16, D = 128, the lengths of a benchmark, two heads: no error is over twice that of naive attention in bf16."""
    mod = MODS[name]
    sizes = mod.bench.sizes._replace(
        batch=1, q_heads=2, kv_heads=max(1, 2 * mod.bench.sizes.kv_heads // mod.bench.sizes.q_heads)
    )
    made = mod.make(sizes, "cuda", torch.Generator("cuda").manual_seed(0))
    leaves = inputs(sizes, "cuda", torch.bfloat16, 128)
    out = attngen.flex_attention(*leaves, None, made.mask_mod, enable_gqa=sizes.q_heads != sizes.kv_heads)
    w = torch.randn_like(out)
    mask = mod.reference(made, sizes)

    def by_hand(dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x.to(dtype) for x in leaves)
        s = (q @ k.transpose(2, 3) / math.sqrt(128)).masked_fill(~mask, -math.inf)
        o = torch.softmax(s, -1).nan_to_num(0.0) @ v
        return [o, *torch.autograd.grad(o, leaves, w.to(dtype))]

    ours = [out, *torch.autograd.grad(out, leaves, w)]
    for found, half, right in zip(ours, by_hand(torch.bfloat16), by_hand(torch.float32)):
        assert relative_error(found, right) <= 2 * relative_error(half, right)


# ---------------------------------------------------------------------------------------------- specs


def test_the_spec_of_a_pair_of_functions() -> None:
    window, slopes = 128, torch.rand(4, requires_grad=True)

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    def sloped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    text = attngen.spec_from_mods(sloped, causal, head_dim=(64, 32), sharing="gqa", dtype=("fp16",))
    assert yaml.safe_load(text) == {
        "name": "flex_causal_sloped",
        "heads": {"sharing": "gqa"},
        "head_dim": {"qk": 64, "v": 32},
        "dtype": ["fp16"],
        "mask": {"expr": "q_idx >= kv_idx and q_idx - kv_idx <= 128"},
        "score": [
            {
                "expr": "s - slopes[h] * (q_idx - kv_idx)",
                "params": {"slopes": {"tensor": ["H"], "dtype": "fp32", "grad": True}},
            }
        ],
    }
    assert "# slopes: float32 [4], captured" in text.splitlines()
    assert parse_spec(attngen.spec_from_mods(mask_mod=causal, name="mine")).name == "mine"
    assert "mask" not in yaml.safe_load(attngen.spec_from_mods(sloped)) and "score" not in yaml.safe_load(
        attngen.spec_from_mods(None, causal)
    )


def test_dimensions_of_captured_tensors() -> None:
    """They are named where they are read so, and where they have the call's length; other dimensions are numbers."""
    table, ids, blocks = torch.zeros(7, 3), torch.zeros(2, 40, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool)

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s + table[ids[b, q_idx] - ids[b, kv_idx], 2] + table[h, 1]

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return blocks[b, q_idx // 16]

    def params(sizes: tuple[int, ...] | None) -> list[Any]:
        data = yaml.safe_load(attngen.spec_from_mods(score, mask, sizes=sizes))  # type: ignore[arg-type]
        return [p["tensor"] for part in (data["mask"], data["score"][0]) for _, p in sorted(part["params"].items())]

    assert params(None) == [["B", "Nq/16"], ["B", "Nk"], [7, 3]]
    assert params((2, 4, 4, 40, 40)) == [["B", "Nq/16"], ["B", "Nk"], [7, 3]]
    assert params((2, 4, 4, 40, 50)) == [["B", "Nq/16"], ["B", "Nq"], [7, 3]]
    assert params((1, 4, 4, 64, 64)) == [[2, 3], [2, 40], [7, 3]]


def test_tables_of_one_dimension_that_are_computed_into_have_any_length() -> None:
    """But not those that get a gradient, nor those that are read at what numbers bound."""
    ids, starts, by_distance = torch.zeros(40, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), torch.zeros(79)
    learned, few, first = torch.zeros(79, requires_grad=True), torch.zeros(8), torch.zeros(3)

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        read = (
            s
            + by_distance[q_idx - kv_idx + 39]
            + learned[q_idx - kv_idx + 39]
            + few[(q_idx - kv_idx) % 8]
            + few[kv_idx.clamp(0, 7)]
        )
        return read + first[2] + first[torch.arange(3)].sum()

    data = yaml.safe_load(attngen.spec_from_mods(score, lambda b, h, q_idx, kv_idx: kv_idx >= starts[ids[q_idx]]))
    found = {name: p["tensor"] for part in (data["mask"], data["score"][0]) for name, p in part["params"].items()}
    assert found == {
        "ids": ["Nq"],
        "starts": ["any"],
        "by_distance": ["any"],
        "learned": [79],
        "few": [8],
        "first": [3],
    }


def test_parts_that_occur_twice_get_names() -> None:
    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = (q_idx * 3 + kv_idx // 5) % 17
        return (place * place > 5) | (place == kv_idx)

    traced = trace(None, mask)
    assert (
        traced.mask_parts == {"m1": "(q_idx * 3 + kv_idx // 5) % 17"} and traced.mask == "m1 * m1 > 5 or m1 == kv_idx"
    )


DOC, STARTS = torch.arange(12, dtype=torch.int32) // 5, torch.tensor([0, 5, 10])
REAL, THIRD, LEFT = DOC + 0.5, torch.arange(12, dtype=torch.int32) % 3, "doc[q_idx] == doc[kv_idx]"
EQUAL: dict[str, tuple[Any, str]] = {
    "terms of both sides": (
        lambda q, k: (DOC[q] == DOC[k]) & (q - STARTS[DOC[q]] >= k - STARTS[DOC[k]]),
        f"{LEFT} and q_idx >= kv_idx",
    ),
    "one of equal terms": (
        lambda q, k: (DOC[k] == DOC[q]) & (q * 2 + STARTS[DOC[q]] > STARTS[DOC[k]] + STARTS[DOC[k]] - 3),
        "doc[kv_idx] == doc[q_idx] and q_idx * 2 > starts[doc[q_idx]] - 3",
    ),
    "all terms": (lambda q, k: (DOC[q] == DOC[k]) & (STARTS[DOC[k]] <= STARTS[DOC[q]] + 4), f"{LEFT} and 0 <= 4"),
    "no comparison": (
        lambda q, k: (DOC[q] == DOC[k]) & ((STARTS[DOC[k]] > 4) | (k < 3)),
        f"{LEFT} and (starts[doc[q_idx]] > 4 or kv_idx < 3)",
    ),
    "the first of three": (
        lambda q, k: (q >= k) & (STARTS[DOC[k]] < q) & (DOC[q] == DOC[k]),
        f"q_idx >= kv_idx and starts[doc[q_idx]] < q_idx and ({LEFT})",
    ),
    "an equality of an equal": (
        lambda q, k: (DOC[q] == DOC[k]) & (STARTS[DOC[q]] == STARTS[DOC[k]]),
        f"{LEFT} and 0 == 0",
    ),
    "one of two": (
        lambda q, k: (DOC[q] == DOC[k]) | (STARTS[DOC[q]] == STARTS[DOC[k]]),
        f"{LEFT} or starts[doc[q_idx]] == starts[doc[kv_idx]]",
    ),
    "real numbers": (
        lambda q, k: (REAL[q] == REAL[k]) & (1 / REAL[k] > 0),
        "real[q_idx] == real[kv_idx] and 1.0 / real[kv_idx] > 0",
    ),
    "real terms": (
        lambda q, k: (DOC[q] == DOC[k]) & (REAL[DOC[q]] + 0.5 >= REAL[DOC[k]]),
        f"{LEFT} and real[doc[q_idx]] + 0.5 >= real[doc[q_idx]]",
    ),
    "both sides of one": (
        lambda q, k: (DOC[q] == DOC[k]) & (q - STARTS[DOC[q]] - (k - STARTS[DOC[k]]) < 3),
        f"{LEFT} and q_idx - kv_idx < 3",
    ),
    "inside of a function": (
        lambda q, k: (DOC[q] == DOC[k]) & ((STARTS[DOC[q]] - STARTS[DOC[k]]).abs() <= k),
        f"{LEFT} and abs(0) <= kv_idx",
    ),
    "three that are equal": (
        lambda q, k: (DOC[q] == DOC[k]) & (DOC[k] == THIRD[k]),
        f"{LEFT} and doc[q_idx] == third[kv_idx]",
    ),
    "two of keys": (
        lambda q, k: (DOC[k] == DOC[11 - k]) & (DOC[k] > 0),
        "doc[kv_idx] == doc[11 - kv_idx] and doc[kv_idx] > 0",
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_is_read_once(name: str) -> None:
    """And the mask that is traced says what the function says."""
    function, text = EQUAL[name]
    traced = trace(None, lambda b, h, q, k: function(q, k))
    assert traced.mask == text
    tables = {t.name: t.tensor.tolist() for t in traced.tables}
    pairs_of = [(q, k) for q in range(12) for k in range(12)]
    said = [eval(text, {}, {"q_idx": q, "kv_idx": k, **tables}) for q, k in pairs_of]
    assert said == [bool(function(*torch.tensor(pair))) for pair in pairs_of] and len(set(said)) == 2


def test_sums_and_products_of_conditions_are_conditions() -> None:
    traced = trace(None, lambda b, h, q, k: torch.minimum((q >= k) * (q - k < 5) + (k < 3), h < 2))
    assert traced.mask == "(q_idx >= kv_idx and q_idx - kv_idx < 5 or kv_idx < 3) and h < 2"


def test_what_is_hidden_by_a_score_is_masked(device: str) -> None:
    """-inf as a side of `torch.where` becomes the mask, whose tiles are then left out."""

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(q_idx >= kv_idx, s * 0.5, -math.inf) + 0.25 * h

    traced = trace(score, lambda b, h, q_idx, kv_idx: kv_idx < 30)
    assert (traced.mask, traced.score) == ("kv_idx < 30 and q_idx >= kv_idx", "s * 0.5 + h * 0.25")
    q, k, v = inputs(Sizes(1, 2, 2, 40, 40), device)
    heads = torch.arange(2, device=device)[:, None, None]
    mask = torch.ones(40, 40, dtype=torch.bool, device=device).tril()
    out, _ = naive(q, k, v, lambda s: s * 0.5 + 0.25 * heads, mask)
    assert relative_error(attngen.flex_attention(q, k, v, score), out) < 1e-6


VIEWS: dict[str, Any] = {
    "no dimension": lambda x: x.view(()),
    "one that goes": lambda x: x[None].squeeze(),
    "an element": lambda x: x.reshape(1)[0],
    "one of several": lambda x: x.expand(3)[2],
    "a sum of one": lambda x: (x.expand(3) + torch.arange(3))[0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_score_keep_what_is_hidden(name: str) -> None:
    traced = trace(lambda s, b, h, q, k: VIEWS[name](torch.where(q >= k, s, -math.inf)), None)
    assert traced.mask == "q_idx >= kv_idx"


OPERATORS: dict[str, Any] = {
    "sign": lambda s, i: s + torch.sign(i - 3),
    "silu": lambda s, i: torch.nn.functional.silu(s),
    "softplus": lambda s, i: torch.nn.functional.softplus(s),
    "tanh gelu": lambda s, i: torch.nn.functional.gelu(s, approximate="tanh"),
    "logs": lambda s, i: torch.log1p(s.abs()) + torch.log2(s.square() + 1) + torch.expm1(-s.abs()),
    "roots": lambda s, i: (s.square() + 1).rsqrt() + (s.abs() + 1).sqrt().reciprocal(),
    "extremes": lambda s, i: torch.minimum(s, torch.maximum(-s, i / 4)).clamp(min=-1.5),
    "rounding": lambda s, i: s + (i / 3).floor() + (i / 3).ceil() - (i / 3).round() + (i / 3).trunc(),
    "division": lambda s, i: (
        s + torch.div(i - 5, 3, rounding_mode="floor") - torch.div(i + 1, 3, rounding_mode="trunc") + (i / 2) % 1.5
    ),
    "powers": lambda s, i: (
        s**2 + 2 ** (-i / 8) + torch.exp2(-i / 4) + 2 ** (i // 3 + i % 2) / 8 + 3.0**-i + (2 ** torch.arange(3)).sum()
    ),
    "casts": lambda s, i: s + (i > 3).float() + (i > 2).int() * i.to(torch.float32) + ((i & 1).bool() ^ (i > 5)) * 0.5,
    "conditions": lambda s, i: (
        s + ((i > 3) + (i > 5)) - ((i > 2) * (i < 6)) / 2 + torch.maximum(i > 6, i < 1) * 3 + ((i > 4) + 1) / 8
    ),
    "masked_fill": lambda s, i: s.masked_fill(i > 6, -3.0) + torch.where((i > 2) == (i < 5), s, 1.0),
    "a row of numbers": lambda s, i: s + (torch.arange(4) * i).sum() / 8 + torch.arange(3).float().mean(),
    "waves": lambda s, i: s * torch.cos(i / 5) + torch.sin(s) + torch.erf(s),
    "bits": lambda s, i: s + ((i >> 1) ^ 3) / 8 + (i << 1 | 1) / 16 - (~i & 6) / 4,
}


def _changed(s: Tensor, i: Tensor) -> Tensor:
    s += i
    s -= 0.5
    s *= 2
    s /= 3
    s.clamp_(-2.5, 4)
    n = i + 1
    n <<= 2
    n >>= 1
    n //= 3
    n %= 4
    n |= 8
    n &= 11
    n ^= 1
    n *= i > 2
    seen = i > 1
    seen &= i < 7
    seen |= i == 5
    return s.masked_fill_(~seen, 1.5) + n


OPERATORS["in place"] = lambda s, i: _changed(s.clone(), i.clone())
OPERATORS["shifts by a value"] = lambda s, i: (
    s + (1 << i.int()) / 9 + ((40 - i) >> (i % 5)) / 4 - ((i - 9) >> 40) - (i << -1) + (3 << (i - 3))
)
OPERATORS["shifts by more bits"] = lambda s, i: (
    s + ((i.int() - 5) >> (i * 6 - 12).int()) + ((i - 5).int() << (i * 6 - 12).int()) / 2**20
)
OPERATORS["one of several"] = lambda s, i: (
    s + torch.isin(i, torch.arange(3) * 2 + 3) + torch.isin(i, 4, invert=True) * 2
)


def test_no_sentence_names_a_module_of_attngen() -> None:
    """All texts in the front end that are raised: people cannot act on the name of a module."""
    for path in (ROOT / "attngen" / "frontends").glob("*.py"):
        raised = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Raise)]
        texts = [
            x.value
            for node in raised
            for x in ast.walk(node)
            if isinstance(x, ast.Constant) and isinstance(x.value, str)
        ]
        assert not [text for text in texts if re.search(r"attngen\.[a-z_]+\.", text)], path


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    """The language's evaluator gives what PyTorch gives, and the same derivative in the score."""
    from attngen.lang.evaluate import evaluate

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return OPERATORS[name](s, q_idx + kv_idx)

    spec = parse_spec(attngen.spec_from_mods(score))
    s = torch.linspace(-4, 4, 63, dtype=torch.float64).view(1, 1, 7, 9).requires_grad_()
    sizes = {"batch": 1, "q_heads": 1, "kv_heads": 1, "n_q": 7, "n_kv": 9}
    found = evaluate(spec.score[0].parsed, **sizes, s=s, values={})  # type: ignore[attr-defined]
    places = torch.cartesian_prod(torch.arange(7), torch.arange(9))
    right = torch.stack([OPERATORS[name](x, at.sum()) for x, at in zip(s.flatten(), places)]).view(s.shape)
    assert relative_error(found, right) < 1e-7
    for a, b in zip(torch.autograd.grad(found.sum(), s), torch.autograd.grad(right.sum(), s)):
        assert relative_error(a, b) < 1e-7


# ---------------------------------------------------------------------------------------------- calls


def test_functions_are_traced_once_and_again_when_they_change(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    monkeypatch.setattr(pairs, "trace", lambda *mods: traced.append(1) or trace(*mods))
    window, first = 5, torch.zeros(2, device=device)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() <= window

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s + first[h]

    q, k, v = inputs(Sizes(1, 2, 2, 20, 20), device)
    distance = (torch.arange(20, device=device)[:, None] - torch.arange(20, device=device)).abs()
    for call, (now, expected) in enumerate(((5, 1), (5, 1), (7, 2))):
        window = now
        first.fill_(call)  # the values of a tensor are read at each call
        out = attngen.flex_attention(q, k, v, score, mask)
        assert len(traced) == expected and relative_error(out, naive(q, k, v, mask=distance <= now)[0]) < 1e-6
    first = torch.ones(2, device=device)
    attngen.flex_attention(q, k, v, score, mask)
    assert len(traced) == 3


FORGETFUL: dict[str, Any] = {  # scores that do not use the product of q and k
    "a bias": lambda s, h, q, k, bias: bias[q, k],
    "positions": lambda s, h, q, k, bias: 0.01 * (q - k) * (h + 1),
    "a number": lambda s, h, q, k, bias: torch.zeros_like(s),
    "nothing of it": lambda s, h, q, k, bias: s * 0 + bias[q, k].tanh(),
    "hidden": lambda s, h, q, k, bias: torch.where(q > k + 3, -math.inf, bias[q, k]),
}


@pytest.mark.parametrize("name", FORGETFUL)
def test_scores_without_the_score(name: str, device: str) -> None:
    """Gradients of q and k are 0, and others are right, whatever q and k are."""
    sizes = Sizes(1, 2, 2, 40, 40)
    (q, k, v), bias = inputs(sizes, device), torch.randn(40, 40, device=device, requires_grad=True)
    at = [torch.arange(n, device=device) for n in (2, 40, 40)]
    heads, rows, columns = at[0].view(-1, 1, 1), at[1].view(-1, 1), at[2]
    learned = [bias] if "bias[" in inspect.getsource(FORGETFUL[name]).split(f'"{name}"')[1].splitlines()[0] else []

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return FORGETFUL[name](s, h, q_idx, kv_idx, bias)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q, k, v, score, return_aux=AuxRequest(lse=True))

    out, aux = function(q, k, v)
    expected, lse = naive(
        q, k, v, lambda s: torch.broadcast_to(FORGETFUL[name](s, heads, rows, columns, bias), s.shape).double()
    )
    assert relative_error(out, expected) < 1e-6 and relative_error(aux.lse, lse) < 1e-6
    w = torch.randn_like(out)
    dq, dk, *grads = torch.autograd.grad(out, [q, k, v, *learned], w)
    assert not dq.any() and not dk.any() and dq.shape == q.shape
    for found, right in zip(grads, torch.autograd.grad(expected, [v, *learned], w.double())):
        assert relative_error(found, right) < 1e-6
    with pytest.raises(
        TraceError,
        match="^score_mod `score` does not use the score, as that of a spec does; expected it to, or a call of",
    ):
        attngen.spec_from_mods(score)


def test_a_score_without_the_score_in_a_graph(device: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q, k, v, _distances)

    alike(function, compiled(function), *inputs(Sizes(1, 2, 2, 20, 20), device))


def _distances(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 0.25 * (q_idx - kv_idx)


@pytest.mark.parametrize("kind", ["documents", "stripes"])
def test_a_soft_cap_of_a_modified_score(kind: str, device: str) -> None:
    """Gemma 2's soft cap with ALiBi: its spec, and the module of that, forward and backward."""
    q, k, v = inputs(Sizes(1, 2, 2, 12, 12), device)
    rows, columns, doc = torch.arange(12, device=device)[:, None], torch.arange(12, device=device), DOC.to(device)
    slope = torch.tensor([0.5, 2.0], device=device, requires_grad=True)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 20 * torch.tanh((s - slope[h] * (q - k).abs()) / 20)

    def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return doc[q] == doc[k]

    def stripes(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k) % 3 == 0

    mask = {"documents": documents, "stripes": stripes}[kind]
    spec = parse_spec(attngen.spec_from_mods(score, mask, head_dim=D, dtype=("fp32",)))
    data = {"doc": doc} if kind == "documents" else {}
    out = attngen.build(spec).attention(q, k, v, slope=slope, **data)
    seen = (doc[:, None] == doc) if kind == "documents" else (rows - columns) % 3 == 0
    expected, _ = naive(
        q, k, v, lambda s: 20 * torch.tanh((s - slope[:, None, None].double() * (rows - columns).abs()) / 20), seen
    )
    w = torch.randn_like(out)
    leaves = [q, k, v, slope]
    truth = torch.autograd.grad(expected, leaves, w.double())
    for found, right in zip((out, *torch.autograd.grad(out, leaves, w)), (expected, *truth)):
        assert relative_error(found, right) < 1e-5


SCORES: dict[str, Any] = {  # of a score, a query's and a key's position, and of two tables
    "a number over each query's": lambda s, q, k, doc, flags: s + 1 / (q + 1.0) - (k + 2.0) ** -1,
    "a table read at a condition": lambda s, q, k, doc, flags: s + doc[flags[k].int() * 6] * (q % 2),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_that_calls_compute(name: str, device: str) -> None:
    q, k, v = inputs(Sizes(1, 2, 2, 20, 20), device)
    rows, columns = torch.arange(20, device=device)[:, None], torch.arange(20, device=device)
    doc, flags = DOC.to(device), columns % 3 == 0
    out = attngen.flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx: SCORES[name](s, q_idx, kv_idx, doc, flags))
    expected, _ = naive(q, k, v, lambda s: SCORES[name](s, rows, columns, doc, flags))
    w = torch.randn_like(out)
    for found, right in zip(
        (out, *torch.autograd.grad(out, q, w)), (expected, *torch.autograd.grad(expected, q, w.double()))
    ):
        assert relative_error(found, right) < 1e-5


SHIFTS: dict[str, Any] = {  # masks of 4 heads
    "a window by head": lambda b, h, q, k: (q - k).abs() < (1 << h),
    "strides by head": lambda b, h, q, k: (q >= k) & (((q - k) >> h) % 2 == 0),
    "blocks by head": lambda b, h, q, k: q >> (h + 1) >= k >> (h + 1),
    "a bit of a set": lambda b, h, q, k: (0b1011001110 >> (k % 16)) & 1 == 1,
    "by positions": lambda b, h, q, k: (1 << (q % 6)) > (k - q),
    "by more than there are": lambda b, h, q, k: ((1 << (h * 16)) > 0) & (((q - k - 1) >> (h * 16 - 8)) < 1),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_masks_that_shift_by_a_value(name: str, device: str) -> None:
    q, k, v = inputs(Sizes(1, 4, 4, 70, 70), device)
    places = [torch.arange(n, device=device, dtype=torch.int32) for n in (1, 4, 70, 70)]
    mask = SHIFTS[name](*(x.view(-1, *[1] * (3 - d)) for d, x in enumerate(places)))
    out, lse = attngen.flex_attention(q, k, v, None, SHIFTS[name], return_lse=True)
    expected, right = naive(q, k, v, mask=mask)
    w = torch.randn_like(out)
    assert (
        bool((~mask).any())
        and relative_error(out, expected) < 1e-5
        and relative_error(lse[right > -math.inf], right[right > -math.inf]) < 1e-5
    )
    for a, b in zip(torch.autograd.grad(out, [q, k, v], w), torch.autograd.grad(expected, [q, k, v], w.double())):
        assert relative_error(a, b) < 1e-5


class Kept:
    """What a mask reads: a number of the class, and of objects inside of an object."""

    first = 0

    def __init__(self) -> None:
        self.inner = Slotted(3)

    @property
    def width(self) -> int:
        return self.inner.most[0]

    def near(self, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() <= self.width


class Slotted:
    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        self.most = [most]


SIZES_BY_NAME = {"most": 3}


def test_functions_are_traced_again_where_they_read_a_number_elsewhere() -> None:
    """In a class, an object inside of another one, a method's, a dictionary, or a function inside of the function."""
    kept, inner = Kept(), {"by": {"name": 3}}

    def change(n: int) -> None:
        Kept.first, kept.inner.most[0], SIZES_BY_NAME["most"], inner["by"]["name"] = n, n, n, n

    masks: list[Any] = [
        lambda b, h, q, k: q - k <= Kept.first,
        lambda b, h, q, k: q - k <= kept.first,
        lambda b, h, q, k: q - k <= kept.inner.most[0],
        lambda b, h, q, k: q - k <= kept.width,
        lambda b, h, q, k: kept.near(q, k),
        lambda b, h, q, k: q - k <= SIZES_BY_NAME["most"],
        lambda b, h, q, k: q - k <= inner["by"]["name"],
        lambda b, h, q, k: (lambda x: x <= SIZES_BY_NAME["most"])(q - k),
        functools.partial(lambda most, b, h, q, k: q - k <= most.first, kept),
    ]
    change(3)
    first = [pairs.pair_of(None, mask) for mask in masks]
    assert [pairs.pair_of(None, mask) for mask in masks] == first
    change(4)
    for mask in masks:
        text = pairs.pair_of(None, mask).whole.mask
        assert text is not None and text.endswith("<= 4")


def test_partials_and_callables(device: str) -> None:
    class Window:
        def __init__(self, size: int) -> None:
            self.size = size

        def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx - kv_idx).abs() <= self.size

    def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, size: int) -> Tensor:
        return (q_idx - kv_idx).abs() <= size

    q, k, v = inputs(Sizes(1, 2, 2, 20, 20), device)
    distance = (torch.arange(20, device=device)[:, None] - torch.arange(20, device=device)).abs()
    right, _ = naive(q, k, v, mask=distance <= 4)
    for mask in (Window(4), functools.partial(within, size=4), or_masks(Window(4), Window(3))):
        assert relative_error(attngen.flex_attention(q, k, v, block_mask=mask), right) < 1e-6


def test_block_masks(device: str) -> None:
    """Of a mask that create_block_mask made, the function says all; lists that hide more, or show more, count as
    well."""
    n = 256

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    q, k, v = inputs(Sizes(1, 2, 2, n, n), device)
    lower = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    whole = create_block_mask(causal, None, None, n, n, device=device)
    assert masked_of(whole).mask_mod is causal
    assert relative_error(attngen.flex_attention(q, k, v, block_mask=whole), naive(q, k, v, mask=lower)[0]) < 1e-6

    count = torch.tensor([[[1, 1, 2, 2]]], dtype=torch.int32, device=device)  # of blocks of 64
    at = torch.tensor([[[[0, 0, 0, 0], [1, 0, 0, 0], [0, 2, 0, 0], [1, 3, 0, 0]]]], dtype=torch.int32, device=device)
    dense = torch.zeros(4, 4, dtype=torch.bool, device=device)
    dense[[0, 1, 2, 2, 3, 3], [0, 1, 0, 2, 1, 3]] = True
    blocks = dense.repeat_interleave(64, 0).repeat_interleave(64, 1)
    for mask_mod, mask in ((causal, blocks & lower), (None, blocks)):
        some = BlockMask.from_kv_blocks(count, at, BLOCK_SIZE=64, mask_mod=mask_mod, seq_lengths=(n, n))
        for _ in range(2):  # with a plan that is made, and one that was
            out = attngen.flex_attention(q, k, v, block_mask=some)
            assert relative_error(out, naive(q, k, v, mask=mask)[0]) < 1e-6


def test_columns_for_products_of_rows(device: str) -> None:
    """They need no module of their own: that of longer rows of q and k is used, whatever the scale is."""
    mod = MODS["mla_rope"]
    sizes = mod.tests[-1].sizes
    made = mod.make(sizes, device, torch.Generator(device).manual_seed(0))
    assert made.score_mod is not None
    traced, products = pairs.pair_of(made.score_mod, None).apart
    assert traced.score is None and len(products) == 1 and traced.tables == ()
    q, k, v = inputs(sizes, device)
    right = naive(q, k, v, lambda s: mod.reference(made, sizes)(s * 0.3 * math.sqrt(D)))[0]
    assert relative_error(attngen.flex_attention(q, k, v, made.score_mod, scale=0.3, enable_gqa=True), right) < 1e-6


def test_a_second_process_takes_the_module_from_the_cache(device: str) -> None:
    """Captured tensors do not matter for it, nothing is compiled again, and the compiler is not imported: nor is
    what it takes."""
    code = (
        "import sys, torch, attngen, attngen.api as api\n"
        f"torch.set_default_device('{device}')\n"
        "api._render = lambda *_: exit('compiled')\n"
        "bias = torch.ones(2)\n"
        "out = attngen.flex_attention(*[torch.zeros(1, 2, 8, 16)] * 3, lambda s, b, h, q, k: s + bias[h] * 3, lambda b, h, q, k: q >= k)\n"
        "print({'attngen.transforms', 'sympy', 'pydantic', 'networkx', 'jinja2', 'yaml'} & set(sys.modules))\n"
    )
    attempt = functools.partial(subprocess.run, [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "compiled" in attempt().stderr
    bias = torch.zeros(2, device=device)
    attngen.flex_attention(
        *[torch.zeros(1, 2, 9, 16, device=device)] * 3, lambda s, b, h, q, k: s + bias[h] * 3, lambda b, h, q, k: q >= k
    )
    again = attempt(env=None if device == "cuda" else {**os.environ, "TRITON_INTERPRET": "1"})
    assert (again.returncode, again.stdout) == (0, "set()\n"), again.stderr


def test_tracing_imports_nothing_of_pytorchs_compiler() -> None:
    """Which would take longer than all else of a call that finds its module in the cache."""
    code = (
        "import sys, torch, attngen\n"
        "table = torch.ones(2, 9)\n"
        "def score(s, b, h, q, k): return torch.where(q >= k, s.tanh() + table[h, (q - k).abs() % 9] + torch.arange(3).sum(), -1.0)\n"
        "attngen.spec_from_mods(score, lambda b, h, q, k: (q // 4 >= k // 4) & ~(k == 7))\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_results_of_the_call(device: str) -> None:
    q, k, v = inputs(Sizes(1, 4, 2, 20, 20), device)
    out, lse = naive(q, k, v)
    alone = attngen.flex_attention(q, k, v, enable_gqa=True)
    pair = attngen.flex_attention(q, k, v, enable_gqa=True, return_lse=True)
    both, aux = attngen.flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
    for x in (alone, pair[0], both):
        assert relative_error(x, out) < 1e-6
    assert relative_error(pair[1], lse) < 1e-6 and torch.equal(aux.lse, pair[1]) and aux.max_scores is None


def test_largest_scores(device: str) -> None:
    """Of scores that are scaled and modified, as FlexAttention's eager implementation gives them; -inf for queries
    that see nothing."""
    from torch._higher_order_ops.flex_attention import math_attention

    results = torch.tensor([0.5, -2.0], device=device)  # a name that modules with outputs have themselves

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s * results[h] - (q_idx - kv_idx).abs() / 8

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx - 3) | (q_idx > 35)

    q, k, v = inputs(Sizes(2, 2, 2, 40, 50), device)
    blocks = create_block_mask(mask, None, None, 40, 50, device=device)
    _, right_lse, right = math_attention(q, k, v, score, blocks.as_tuple(), 0.3, {})
    for lse in (False, True):
        out, aux = attngen.flex_attention(
            q, k, v, score, mask, scale=0.3, return_aux=AuxRequest(lse=lse, max_scores=True)
        )
        found, expected = aux.max_scores, right.detach() * math.log(2)
        assert found.dtype == torch.float32 and found.shape == (2, 2, 40) and not found.requires_grad
        seen = expected > -math.inf
        assert (
            bool((found == -math.inf).equal(~seen))
            and bool((~seen).any())
            and relative_error(found[seen], expected[seen]) < 1e-6
        )
        assert (aux.lse is not None) == lse and out.requires_grad
        if lse:
            assert relative_error(aux.lse[seen], right_lse[seen] * math.log(2)) < 1e-6


# ---------------------------------------------------------------------------------------------- inside torch.compile


def compiled(function: Any, fullgraph: bool = True) -> Any:
    torch._dynamo.reset()
    return torch.compile(
        function, backend="inductor" if torch.cuda.is_available() else "aot_eager", fullgraph=fullgraph
    )


def alike(function: Any, graph: Any, *leaves: Tensor) -> None:
    """A compiled function gives the bits of the function, and of its gradients."""
    found, right = graph(*leaves[:3]), function(*leaves[:3])
    found, right = ([x] if isinstance(x, Tensor) else [x[0], *x[1]] for x in (found, right))
    assert all(a.equal(b) for a, b in zip(found, right, strict=True))
    w = torch.randn_like(found[0])
    for a, b in zip(torch.autograd.grad(found[0], leaves, w), torch.autograd.grad(right[0], leaves, w)):
        assert a.equal(b)


def test_a_call_is_part_of_one_graph_and_follows_what_its_functions_hold(device: str) -> None:
    """Values of tensors, other tensors and numbers, other lengths; the same bits as outside of torch.compile."""
    slope, window, factor = torch.rand(2, device=device, requires_grad=True), 5, 0.5

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() <= window

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s * factor - slope[h] * (q_idx - kv_idx)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q * 2, k, v, score, mask, return_aux=AuxRequest(lse=True, max_scores=True))

    graph, qkv = compiled(function), inputs(Sizes(1, 2, 2, 20, 20), device)
    for _ in range(2):
        alike(function, graph, *qkv, slope)
    with torch.no_grad():
        slope.mul_(2)
    alike(function, graph, *qkv, slope)
    slope = torch.rand(2, device=device, requires_grad=True)
    alike(function, graph, *qkv, slope)
    for window, factor in ((3, 0.5), (2, 0.25), (7, 0.75)):  # noqa: B007 (the functions read them)
        alike(function, graph, *qkv, slope)
    alike(function, graph, *inputs(Sizes(1, 2, 2, 33, 33), device), slope)


def test_lengths_are_symbols_of_a_graph_where_functions_hold_no_tensors(device: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(
        lambda q, k, v: attngen.flex_attention(q * 2, k, v, None, _lower), backend=counter, fullgraph=True
    )
    for n in (20, 33, 70, 47):
        q, k, v = inputs(Sizes(1, 2, 2, n, n), device)
        assert graph(q, k, v).equal(attngen.flex_attention(q * 2, k, v, None, _lower))
    assert counter.frame_count == 2


def test_functions_of_one_code_are_told_apart_in_a_graph(device: str) -> None:
    def within(size: int, first: Tensor) -> Any:
        return lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx).abs() <= size) | (first[kv_idx] > 0)

    def partial(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, size: int) -> Tensor:
        return (q_idx - kv_idx).abs() <= size

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Any:
        return attngen.flex_attention(q, k, v, None, mask)

    graph, (q, k, v) = compiled(function), inputs(Sizes(1, 2, 2, 20, 20), device)
    first = torch.zeros(20, device=device)
    second = first.clone()
    second[:2] = 1
    masks = [within(4, first), within(4, second), within(5, second), or_masks(within(2, first), within(1, second))]
    for mask in (*masks, functools.partial(partial, size=3)):
        assert graph(q, k, v, mask).equal(function(q, k, v, mask))


def test_methods_and_block_masks_in_a_graph(device: str) -> None:
    """A method's module has its parameters and numbers; a mask has its lists, where they say more than the function,
    and its plan."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope, self.every = torch.nn.Parameter(torch.rand(2)), 3
            at = torch.tensor([[[[0, 0], [0, 1]]]], dtype=torch.int32, device=device)
            count = torch.tensor([[[1, 1]]], dtype=torch.int32, device=device)  # of blocks of 16
            self.blocks = BlockMask.from_kv_blocks(count, at, BLOCK_SIZE=16, mask_mod=self.mask, seq_lengths=(32, 32))

        def mask(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx >= kv_idx) & (kv_idx % self.every != 1)

        def score(self, s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return s - self.slope[h] * (q_idx - kv_idx)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            whole = attngen.flex_attention(q, k, v, self.score, self.mask)
            result: Tensor = attngen.flex_attention(q, k, v, self.score, self.blocks) + whole
            return result

    layer, (q, k, v) = Attention().to(device), inputs(Sizes(1, 2, 2, 32, 32), device)
    graph = compiled(layer, fullgraph=not OLD)
    for layer.every in (3, 4):
        layer.blocks.mask_mod = layer.mask
        alike(layer, graph, q, k, v, layer.slope)


WHY_NO_BLOCK_MASK = (
    "a block mask or a method is part of a graph from torch 2.12 on"
    if OLD
    else "a block mask is made inside of what is compiled; expected one from outside of it"
)


def test_what_cannot_be_part_of_a_graph_says_so_and_is_called_outside_of_it(device: str) -> None:
    class Hidden:
        tables = {"first": torch.rand(2, device=device)}

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx: s + h)

    def reads(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s + vars(Hidden)["tables"]["first"][h] * kv_idx

    def unseen(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q, k, v, reads)

    def refused(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q, k, v, _cumulative)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Any:
        block_mask = create_block_mask(_lower, None, None, 20, 20, device=device)
        return attngen.flex_attention(q, k, v, None, block_mask)

    q, k, v = inputs(Sizes(1, 2, 2, 20, 20), device)
    for function, sentence in (
        (inside, "flex_attention: a function is defined inside of what is compiled; expected one from outside of it"),
        (
            unseen,
            "flex_attention: `table` is not among what the functions hold, so torch.compile would not see it change",
        ),
        (refused, "`aten::cumsum` has no expression"),
        (masked, f"flex_attention: {WHY_NO_BLOCK_MASK}"),
    ):
        if not OLD or function is not inside:  # torch 2.11 follows functions that hold nothing
            with pytest.raises(torch._dynamo.exc.Unsupported) as error:
                compiled(function)(q, k, v)
            assert sentence in str(error.value)
        if function is not refused:
            assert compiled(function, fullgraph=False)(q, k, v).equal(function(q, k, v))
    with pytest.raises(TraceError, match="`aten::cumsum` has no expression"):
        compiled(refused, fullgraph=False)(q, k, v)


def test_a_method_is_traced_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though Python makes it anew each time that somebody asks for it; another object's is traced, too."""

    @dataclass
    class Window:
        size: int

        def mask(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx - kv_idx).abs() <= self.size

    traced: list[int] = []
    monkeypatch.setattr(pairs, "trace", lambda *mods: traced.append(1) or trace(*mods))
    q, k, v = inputs(Sizes(1, 2, 2, 20, 20), device)
    distance = (torch.arange(20, device=device)[:, None] - torch.arange(20, device=device)).abs()
    near, far = Window(2), Window(6)
    for window, expected in ((near, 1), (near, 1), (far, 2), (near, 2), (far, 2)):
        out = attngen.flex_attention(q, k, v, block_mask=window.mask)
        assert len(traced) == expected and relative_error(out, naive(q, k, v, mask=distance <= window.size)[0]) < 1e-6
    near.size = 3
    assert (
        relative_error(attngen.flex_attention(q, k, v, block_mask=near.mask), naive(q, k, v, mask=distance <= 3)[0])
        < 1e-6
    )


# ---------------------------------------------------------------------------------------------- what is refused

HERE = str(Path(__file__))


def _cumulative(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s + torch.cumsum(s.view(1), 0)[0]


def _lower(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def _branching(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s if q_idx > 3 else -s


def _infinite(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.exp(torch.where(q_idx > 3, s, -math.inf))


def _no_condition(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx - kv_idx


def _a_condition(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s > 0


def _of_too_many(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s + torch.ones(500).mul(q_idx).sum()


def _a_row(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s + torch.arange(3)


def _detached(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s - s.detach() / 2


def _sum_of_infinite(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(q_idx > 3, s, -math.inf).sum()


def _infinite_as_condition(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(torch.where(q_idx > 3, s, -math.inf).bool(), s, 0.0)


def _power(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s * 2 ** (-(h + 1))


def _rounded(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.round(s, decimals=2)


def _in_many(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.isin(kv_idx, torch.arange(200))


def _of_a_view(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    row = s.view(1)
    row += 1
    return s


def _of_a_table(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    table = DOC
    table += 1
    return s + table[q_idx]


def _of_another_type(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    h += 0.5
    return s + h


def _line(function: Any, further: int = 1) -> int:
    return int(function.__code__.co_firstlineno) + further


@pytest.mark.parametrize(
    ("score", "mask", "sentence"),
    [
        (
            _cumulative,
            None,
            f"score_mod `_cumulative`, line {_line(_cumulative)} of {HERE}: `aten::cumsum` has no expression; expected arithmetic, "
            f"comparisons, `torch.where` and the like, or {OUTSIDE}",
        ),
        (
            _infinite,
            None,
            f"score_mod `_infinite`, line {_line(_infinite)} of {HERE}: `aten::exp` computes with -inf; expected -inf as a side of "
            "`torch.where`, and sums with it alone after that",
        ),
        (
            _detached,
            None,
            f"score_mod `_detached`, line {_line(_detached)} of {HERE}: `aten::detach` stops a gradient, which expressions do not; "
            "expected a tensor that was detached outside of the function",
        ),
        *(
            (
                function,
                None,
                f"score_mod `{function.__name__}`, line {_line(function)} of {HERE}: `aten::{operator}` computes with -inf; "
                "expected -inf as a side of `torch.where`, and sums with it alone after that",
            )
            for function, operator in ((_sum_of_infinite, "sum"), (_infinite_as_condition, "_to_copy"))
        ),
        (
            _power,
            None,
            f"score_mod `_power`, line {_line(_power)} of {HERE}: `aten::pow` of integers is one, so that `2 ** -3` is 0; "
            "expected a real base, as in `2.0 ** x`, or an exponent that is not negative",
        ),
        (None, _no_condition, "mask_mod `_no_condition` gives a number; expected a condition"),
        (_a_condition, None, "score_mod `_a_condition` gives a condition; expected a number"),
        (_a_row, None, "score_mod `_a_row` gives a tensor of shape [3]; expected a number"),
        (
            _of_too_many,
            None,
            f"score_mod `_of_too_many`, line {_line(_of_too_many)} of {HERE}: `aten::sum` reduces 500 elements; expected at most 128, "
            f"which are written out: {OUTSIDE}",
        ),
        (
            _rounded,
            None,
            f"score_mod `_rounded`, line {_line(_rounded)} of {HERE}: `aten::round` has no expression with these arguments; "
            f"expected fewer, or {OUTSIDE}",
        ),
        (
            None,
            _in_many,
            f"mask_mod `_in_many`, line {_line(_in_many)} of {HERE}: `aten::isin` compares with 200 elements; expected at most 128, or "
            "what `torch.isin` says of all positions, made outside of the function: a bool tensor, read at one",
        ),
        *(
            (
                function,
                None,
                f"score_mod `{function.__name__}`, line {_line(function, further)} of {HERE}: `aten::add_` changes {what}, in place; "
                f"expected a new one, as in `x = x + {by}`",
            )
            for function, further, what, by in (
                (_of_a_view, 2, "a view, or a tensor that has one", 1),
                (_of_a_table, 2, "a captured tensor", 1),
                (_of_another_type, 1, "the type or the shape of a tensor", 0.5),
            )
        ),
    ],
)
def test_refused_functions(score: Any, mask: Any, sentence: str) -> None:
    with pytest.raises(TraceError) as error:
        attngen.spec_from_mods(score, mask)
    assert str(error.value) == sentence


def test_a_branch_on_a_position_is_refused_in_one_sentence() -> None:
    with pytest.raises(TraceError) as error:
        attngen.spec_from_mods(_branching)
    reason = "a number is taken out of a tensor, as by `if`, `and` and `int`; expected `torch.where`, `&`, or an index that is a tensor"
    assert str(error.value) == f"score_mod `_branching`, line {_line(_branching)} cannot be traced: {reason}"


def test_what_a_function_keeps_of_a_trace_is_refused() -> None:
    kept: list[Tensor] = []
    attngen.spec_from_mods(None, lambda b, h, q_idx, kv_idx: kept.append(q_idx) or q_idx > kv_idx)
    with pytest.raises(RuntimeError, match="a position or a score is used after the function has ended"):
        kept[0] + 1


def test_refused_calls() -> None:
    q = torch.zeros(1, 4, 8, 16)
    for args, kwargs, sentence in (
        (
            (q, q[:, :2], q[:, :2]),
            {},
            "flex_attention: 4 query heads and 2 key heads without enable_gqa; expected as many, or enable_gqa=True",
        ),
        ((q[0], q, q), {}, "flex_attention: query has 3 dimensions; expected a tensor [B, H, N, D]"),
        (
            (q, q.half(), q.double()),
            {},
            "flex_attention: value is torch.float64; expected torch.bfloat16, torch.float16 or torch.float32",
        ),
        ((q, q, None), {}, "flex_attention: value is a NoneType; expected a tensor [B, H, N, D]"),
        ((q, q, q, 3), {}, "flex_attention: score_mod is a int; expected a function or None"),
        (
            (q, q, q, None, q),
            {},
            "flex_attention: block_mask is a Tensor; expected a BlockMask, a function of (b, h, q_idx, kv_idx) or None",
        ),
        (
            (q, q, q),
            {"return_lse": True, "return_aux": AuxRequest(lse=True)},
            "flex_attention: return_lse stands beside return_aux; expected one of them: AuxRequest(lse=True) says the same",
        ),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            attngen.flex_attention(*args, **kwargs)  # type: ignore[arg-type]
        assert str(error.value) == sentence


IDS, HEADS, ROWS = torch.arange(128) // 30, torch.arange(2.0), torch.zeros(2, 128, dtype=torch.int64)
READS: dict[str, Any] = {  # of score, batch, head, query and key, in calls of 2 sequences, 4 heads and 150 positions
    "a position": lambda s, b, h, q, k: s + IDS[k],
    "both positions": lambda s, b, h, q, k: torch.where(IDS[q] == IDS[k], s, 0.0),
    "the second dimension": lambda s, b, h, q, k: s + ROWS[b, q],
    "a head of a table of key heads": lambda s, b, h, q, k: s + HEADS[h],
    "a key head": lambda s, b, h, q, k: s + HEADS[h // 2],
    "a sequence": lambda s, b, h, q, k: s + HEADS[b],
    "a sequence of one": lambda s, b, h, q, k: s + ROWS[:1][b, 0],
    "a distance": lambda s, b, h, q, k: s + IDS[(q - k).abs()],
    "a distance that is clamped": lambda s, b, h, q, k: s + IDS[(q - k).clamp(-128, 127)],
    "a distance that is clamped beyond": lambda s, b, h, q, k: s + IDS[(q - k).clamp(-129, 127)],
    "a remainder": lambda s, b, h, q, k: s + IDS[(q + k) % 128],
    "blocks": lambda s, b, h, q, k: s + HEADS[q // 64],
    "fewer blocks": lambda s, b, h, q, k: s + HEADS[q // 75],
    "a number": lambda s, b, h, q, k: s + HEADS[2],
    "a negative number": lambda s, b, h, q, k: s + HEADS[-2],
    "a selected number": lambda s, b, h, q, k: s + HEADS.select(0, 1),
    "a view": lambda s, b, h, q, k: s + IDS[:100][q % 101],
    "the end of a view": lambda s, b, h, q, k: s + IDS[:100][-1] + IDS[3:][k % 2 - 2] + torch.arange(5)[-1],
    "what the function makes": lambda s, b, h, q, k: s + torch.arange(4)[h + 1],
    "where it does not count": lambda s, b, h, q, k: torch.where(k < 128, s + IDS[k], s),
    "each turn": lambda s, b, h, q, k: s + IDS[torch.arange(4) * 40 + h].sum(),
    "fewer turns": lambda s, b, h, q, k: s + IDS[torch.arange(3) * 40 + h].sum(),
}


@pytest.mark.parametrize("name", READS)
def test_reads_outside_of_a_tensor_are_refused_where_pytorch_refuses_them(name: str) -> None:
    """And others give what PyTorch gives. The tensors are shorter than the call, in one dimension or another, or
    not."""
    q, k, v = (torch.randn(2, 4, 150, D) for _ in range(3))
    found: list[Any] = []
    for call in (flex_attention, attngen.flex_attention):
        try:
            found.append(call(q, k, v, READS[name]))
        except IndexError as error:
            found.append(str(error))
    right, ours = found
    assert isinstance(right, str) == isinstance(ours, str), found
    if isinstance(right, str):
        assert ours.startswith(f"score_mod `<lambda>`, line {_line(READS[name], 0)} of {HERE}: reads ")
        assert ours.endswith("; expected a tensor as long as the call, or an index inside of it")
    else:
        assert relative_error(ours, right) < 1e-5


@pytest.mark.parametrize("n_q", [64, 128, 256])
@pytest.mark.parametrize("n_kv", [64, 128, 256])
@pytest.mark.parametrize("listed", [False, True])
def test_block_masks_are_for_calls_of_their_lengths(n_q: int, n_kv: int, listed: bool) -> None:
    """As PyTorch has it, whether their lists say more than their functions or not."""
    block_mask = create_block_mask(_lower, None, None, n_q, n_kv, device="cpu", BLOCK_SIZE=64)
    if listed:
        lists = block_mask.kv_num_blocks, block_mask.kv_indices
        block_mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, seq_lengths=(n_q, n_kv))
    q, k, v = (torch.zeros(1, 1, 128, D) for _ in range(3))
    calls: list[Any] = [flex_attention, attngen.flex_attention]
    if (n_q, n_kv) == (128, 128):
        assert calls[0](q, k, v, block_mask=block_mask).equal(calls[1](q, k, v, block_mask=block_mask))
        return
    for call in calls:
        with pytest.raises(ValueError) as error:
            call(q, k, v, block_mask=block_mask)
    sentence = f"flex_attention: block_mask is for {n_q} queries and {n_kv} keys, and the call has 128 and 128; expected one that "
    assert str(error.value).startswith(sentence + "`create_block_mask` made for these")
    assert ("_adjust" in str(error.value)) == (min(n_q, n_kv) >= 128)


def test_lists_of_a_block_mask_are_as_many_as_it_and_the_call_have() -> None:
    q = torch.zeros(3, 4, 128, D)

    def call(counts: Any, indices: Any, heads: int = 1, n: int = 128) -> Any:
        count, at = torch.tensor(counts, dtype=torch.int32), torch.tensor(indices, dtype=torch.int32)
        count, at = (x.expand(x.shape[0], heads, *x.shape[2:]).contiguous() for x in (count, at))
        mask = BlockMask.from_kv_blocks(count, at, BLOCK_SIZE=64, seq_lengths=(n, n), compute_q_blocks=False)
        return attngen.flex_attention(q, q, q, block_mask=mask)

    one, two = [[[1, 1]]], [[[[0, 1], [1, 0]]]]
    for heads in (1, 4):
        assert call(one, two, heads).shape == q.shape
    with pytest.raises(
        ValueError, match="has lists of blocks for 2 sequences, and the call has 3; expected as many, or one for all"
    ):
        call(one * 2, two * 2)
    with pytest.raises(
        ValueError, match="has lists of blocks for 2 heads, and the call has 4; expected as many, or one for all"
    ):
        call(one, two, 2)
    with pytest.raises(ValueError, match="block_mask lists 1 rows of blocks; expected 2, by its lengths"):
        call([[[1]]], [[[[0, 1]]]])
    with pytest.raises(
        ValueError, match="block_mask lists blocks beyond the last; expected numbers from 0 to 1, by its lengths"
    ):
        call(one, [[[[0, 1], [2, 0]]]])


def test_a_mask_that_hides_all_is_refused() -> None:
    with pytest.raises(SpecError, match="^the spec of `flex_lambda`: `mask` hides every key from every query"):
        attngen.spec_from_mods(None, lambda b, h, q, k: q < 0)
