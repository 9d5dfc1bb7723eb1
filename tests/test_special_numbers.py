"""Infinities and the largest finite numbers in each input of a modifier, for rows that see keys and rows that see none.

If naive attention in fp64 gives no NaN, a module gives none either. A row that sees no key has an output of zeros, an
LSE of its sink or -inf, and no gradient of q.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from attngen.conformance.cases import Case, heads_for, make_all_gradients, make_inputs, torch_dtype
from attngen.conformance.harness import asked
from attngen.conformance.oracle import naive_attention, reference_mask, reference_scores
from attngen.spec import make_spec
from tests.helpers import cached_module

pytestmark = pytest.mark.numerics

LARGEST = torch.finfo(torch.float32).max
NUMBERS = (-torch.inf, -LARGEST, -3e38, LARGEST, torch.inf)
# Of 20 queries, aligned with the last of 15 keys, the first 5 see none.
WINDOW = {"sliding_window": {"left": 5, "right": 0}}
KINDS: dict[str, dict[str, Any]] = {
    "a sink": {"score": "sink", "heads": {"sharing": "gqa"}},
    "a sink and outputs": {"score": "sink", "outputs": ["entropy", "max_score", "key_mass"]},
    "a temperature": {"score": {"temperature": {"learnable": True}}},
    "a table by distance": {"score": {"relative_bias": {"max_distance": 8}}},
    "a bias": {"score": {"dense_bias": {"learnable": True}}},
    "a number of each key": {
        "score": {"expr": "s + far[kv_idx]", "params": {"far": {"tensor": ["Nk"], "dtype": "fp32"}}}
    },
}


def results(attend: Any, leaves: list[torch.Tensor], grads: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return outputs, gradients and tangents of attention along its own arguments."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    found = attend(*leaves)
    smooth = found[: len(grads)]
    made = torch.autograd.grad(smooth, leaves, [g.to(x.dtype) for g, x in zip(grads, smooth)], allow_unused=True)
    along = tuple(torch.ones_like(x) for x in leaves)
    tangents = torch.func.jvp(lambda *x: attend(*x)[: len(grads)], tuple(x.detach() for x in leaves), along)[1]
    return [x.detach() for x in (*found, *(x for x in made if x is not None), *tangents)]


def attended(attend: Any, x: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the results of attention. Its input x has a gradient only if it is among the leaves."""
    found: tuple[torch.Tensor, ...] = attend(*leaves, *([x] if len(leaves) == 3 else []))
    return found


@pytest.mark.share(32)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_number_makes_what_is_none(kind: str, dtype: str, device: str) -> None:
    spec = make_spec({"name": "special", "head_dim": 16, "dtype": dtype, "mask": WINDOW, **KINDS[kind]})
    module, case = cached_module(spec), Case(1, *heads_for(spec, 2), 20, 15)
    q, k, v, drawn = make_inputs(spec, case, torch_dtype(dtype), device, 0)
    grads = make_all_gradients(spec, case, torch_dtype(dtype), device, 0)
    mask = reference_mask(spec.mask, q, k, drawn)
    seen = mask.expand(1, case.q_heads, 20, 15).any(-1)
    ((name, learned),) = ((i.name, i.grad) for i in spec.inputs())

    def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        modify, sink = reference_scores(spec.score, q, k, {name: x})
        return naive_attention(q, k, v, mask, 0.25, modify=modify, sink=sink)

    def called(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = module.attention(q, k, v, **{name: x}, **asked(spec))
        return found

    wrong = []
    # In these kinds scores above 2.3e38 are +inf.
    per_score = dtype == "fp16" and "sink" not in kind and "temperature" not in kind
    for number in [x for x in NUMBERS if x < 0 or not per_score]:
        for whole in (False, True):
            x, limit = drawn[name].clone(), torch.finfo(drawn[name].dtype)
            value = number if abs(number) == torch.inf else max(limit.min, min(number, limit.max))
            (x if whole else x.view(-1)[: 1 + x.numel() // 7]).fill_(value)
            leaves = [q, k, v, x] if learned else [q, k, v]
            exact = partial(attended, naive, x.double())
            truth = results(exact, [t.double() for t in leaves], grads[:2])
            ours = results(partial(attended, called, x), leaves, grads)
            if any(t.isnan().any() for t in ours) and not any(t.isnan().any() for t in truth):
                wrong.append(f"{number} in {'all' if whole else 'some'} places gives NaN")
            out, lse, dq = ours[0], ours[1], ours[len(asked(spec)) + 1]
            expected = x[None, :, None].expand_as(lse) if "sink" in kind else torch.full_like(lse, -torch.inf)
            if out[~seen].any() or dq[~seen].any() or not torch.allclose(lse[~seen], expected[~seen], rtol=1e-6):
                wrong.append(
                    f"{number} in {'all' if whole else 'some'} places: rows that see no key have more than "
                    f"zeros, or another LSE"
                )
    assert not wrong


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "score", ["dense_bias", {"expr": "s + far[kv_idx]", "params": {"far": {"tensor": ["Nk"], "dtype": "fp32"}}}]
)
def test_rows_of_the_lowest_numbers_alone(score: Any, device: str) -> None:
    """In fp32 such a row has the mean of the values, as in PyTorch, forward and backward. A row with only -inf sees no
    key."""
    spec = make_spec({"name": "lowest", "head_dim": 16, "dtype": "fp32", "score": score})
    q, k, v, drawn = make_inputs(spec, Case(1, 2, 2, 20, 15), torch.float32, device, 0)
    (name,) = (i.name for i in spec.inputs())
    for number in (-LARGEST, -3e38):
        x = torch.full_like(drawn[name], number)
        if score == "dense_bias":
            x[..., :5] = -torch.inf  # also hide some keys
            x[:, :, 7] = -torch.inf
        v.requires_grad_()
        out, lse = cached_module(spec).attention(q, k, v, **{name: x}, return_lse=True)
        keys = slice(5, None) if score == "dense_bias" else slice(None)
        rows = [i for i in range(20) if score != "dense_bias" or i != 7]
        torch.testing.assert_close(
            out[:, :, rows], v[:, :, keys].mean(2, keepdim=True).expand(1, 2, len(rows), 16), rtol=1e-5, atol=1e-6
        )
        (found,) = torch.autograd.grad(out.sum(), v)
        expected = torch.zeros_like(v)
        expected[:, :, keys] = len(rows) / expected[:, :, keys].shape[2]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert lse[:, :, rows].isfinite().all() and not out[:, :, [i for i in range(20) if i not in rows]].any()
