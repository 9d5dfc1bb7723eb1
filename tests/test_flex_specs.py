"""FlexAttention's functions as specs: `attngen.spec_from_mods`, and the expressions that tracing gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import yaml

import attngen
from attngen.conformance.oracle import relative_error
from attngen.frontends.trace import trace
from attngen.ir.sizes import Sizes
from attngen.spec import parse_spec
from tests import flex_common
from tests.flex_common import DOC, STARTS, Tensor, inputs, naive

cache = flex_common.cache  # a fixture


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
    """A dimension has a name if such a position indexes it or it has that length in the call; others are numbers."""
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


def test_one_dimensional_tables_with_computed_indices_have_any_length() -> None:
    """Tables with gradients, and tables whose indices have constant bounds, keep their lengths."""
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


def test_common_subexpressions_get_names() -> None:
    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = (q_idx * 3 + kv_idx // 5) % 17
        return (place * place > 5) | (place == kv_idx)

    traced = trace(None, mask)
    assert (
        traced.mask_parts == {"m1": "(q_idx * 3 + kv_idx // 5) % 17"} and traced.mask == "m1 * m1 > 5 or m1 == kv_idx"
    )


REAL, THIRD, LEFT = DOC + 0.5, torch.arange(12, dtype=torch.int32) % 3, "doc[q_idx] == doc[kv_idx]"
EQUAL_VALUES: dict[str, tuple[Any, str]] = {
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


@pytest.mark.parametrize("name", EQUAL_VALUES)
def test_equal_values_are_read_once(name: str) -> None:
    """The traced mask reads one of two equal values, and equals the function."""
    function, text = EQUAL_VALUES[name]
    traced = trace(None, lambda b, h, q, k: function(q, k))
    assert traced.mask == text
    tables = {t.name: t.tensor.tolist() for t in traced.tables}
    pairs_of = [(q, k) for q in range(12) for k in range(12)]
    said = [eval(text, {}, {"q_idx": q, "kv_idx": k, **tables}) for q, k in pairs_of]
    assert said == [bool(function(*torch.tensor(pair))) for pair in pairs_of] and len(set(said)) == 2


def test_sums_and_products_of_conditions_are_conditions() -> None:
    traced = trace(None, lambda b, h, q, k: torch.minimum((q >= k) * (q - k < 5) + (k < 3), h < 2))
    assert traced.mask == "(q_idx >= kv_idx and q_idx - kv_idx < 5 or kv_idx < 3) and h < 2"


@pytest.mark.share(4)
def test_minus_infinity_in_a_score_becomes_the_mask(device: str) -> None:
    """-inf as a branch of `torch.where` becomes the mask, so that its tiles are skipped."""

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
def test_views_of_a_score_keep_its_mask(name: str) -> None:
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


def _in_place(s: Tensor, i: Tensor) -> Tensor:
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


OPERATORS["in place"] = lambda s, i: _in_place(s.clone(), i.clone())
OPERATORS["shifts by a value"] = lambda s, i: (
    s + (1 << i.int()) / 9 + ((40 - i) >> (i % 5)) / 4 - ((i - 9) >> 40) - (i << -1) + (3 << (i - 3))
)
OPERATORS["shifts by more bits"] = lambda s, i: (
    s + ((i.int() - 5) >> (i * 6 - 12).int()) + ((i - 5).int() << (i * 6 - 12).int()) / 2**20
)
OPERATORS["one of several"] = lambda s, i: (
    s + torch.isin(i, torch.arange(3) * 2 + 3) + torch.isin(i, 4, invert=True) * 2
)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    """The evaluator of traced expressions gives PyTorch's values, and its derivatives with respect to the score."""
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
