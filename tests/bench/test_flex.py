"""Functions for FlexAttention that are generated from specs: torch evaluates them on the CPU, and they must equal the
oracles of masks and score modifiers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen.bench.cases.flex import Mods, cannot, mods, write
from attngen.conformance.cases import Case, heads_for, make_inputs
from attngen.conformance.oracle import naive_attention, reference_mask, reference_scores, relative_error
from attngen.ir.sizes import Sizes
from attngen.spec import Spec, make_spec
from tests.helpers import SPECS, spec

WRITTEN: dict[str, dict[str, Any]] = {
    "reads_outside": {
        "mask": {
            "expr": "first[b, q_idx] <= kv_idx and not hidden[kv_idx - 3] or q_idx % step == 2 and kv_idx // 7 < 2",
            "params": {
                "first": {"tensor": ["B", "Nq"], "dtype": "int32"},
                "hidden": {"tensor": ["Nk"], "dtype": "bool"},
                "step": {"scalar": "int", "min": 1},
            },
        }
    },
    "every_function": {
        "score": {
            "expr": "where(kv_idx <= q_idx, s * sharp, s - far) + max(slope[hkv] * min(q_idx, kv_idx, 9), tanh(s) / 2) "
            "- clamp(abs(q_idx - kv_idx) / 8, 0, sqrt(kv_idx + 1)) + table[-1] + sigmoid(s) ** 2 / (1 + "
            "exp(-kv_idx)) - log(2 + q_idx)",
            "params": {
                "sharp": {"scalar": "float"},
                "far": {"value": 0.5},
                "slope": {"tensor": ["Hkv"], "grad": True},
                "table": {"tensor": [3], "grad": True},
            },
        }
    },
    "row_sizes": {"mask": {"expr": "(kv_len - q_len + q_idx - kv_idx) % 3 != 1 and kv_idx < kv_len - 2 or h == 1"}},
    "two_modifiers": {"mask": {"not": "causal"}, "score": [{"alibi": {"slopes": "given"}}, {"softcap": 2}]},
    "per_batch": {"mask": {"any_of": [{"prefix_lm": {"per": "batch"}}, {"key_padding": {"lengths": True}}]}},
}
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
GRID = [(name, spec(name)) for name in SPECS] + [
    (name, make_spec({"name": name, "heads": {"sharing": "gqa"}, "head_dim": 16, **below}))
    for name, below in WRITTEN.items()
]
EXPRESSIBLE = [(name, s) for name, s in GRID if not cannot(s)]
CASES = [(name, s, (130, 150)) for name, s in EXPRESSIBLE] + [
    (name, s, (150, 130)) for name, s in EXPRESSIBLE if name in WRITTEN
]


def functions(s: Spec, n_q: int, n_kv: int) -> tuple[Mods, torch.Tensor, torch.Tensor, dict[str, Any], Sizes]:
    case = Case(2, *heads_for(s), n_q, n_kv)
    q, k, _, given = make_inputs(s, case, torch.float32, "cpu")
    sizes = Sizes(case.batch, case.q_heads, case.kv_heads, n_q, n_kv)
    return mods(s, sizes, given, "cpu"), q, k, given, sizes


def positions(sizes: Sizes) -> list[torch.Tensor]:
    lengths = (sizes.batch, sizes.q_heads, sizes.n_q, sizes.n_kv)
    return [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(lengths)]


@pytest.mark.parametrize(("name", "s", "size"), CASES, ids=[f"{name}-{n}x{m}" for name, _, (n, m) in CASES])
def test_masks_and_scores_equal_the_oracles(name: str, s: Spec, size: tuple[int, int]) -> None:
    found, q, k, given, sizes = functions(s, *size)
    expected = reference_mask(s.mask, q, k, given).expand(sizes.batch, sizes.q_heads, *size)
    mask = torch.tensor(True) if found.mask is None else found.mask(*positions(sizes))
    assert torch.equal(mask.expand_as(expected), expected)
    assert found.visible_pairs(sizes, "cpu", rows=64) == int(expected.sum())
    scores = torch.randn(sizes.batch, sizes.q_heads, *size, generator=torch.Generator().manual_seed(0))
    modify, _ = reference_scores(s.score, q, k, given)
    torch.testing.assert_close(
        found.score(scores, *positions(sizes)) if found.score else scores, modify(scores) if modify else scores
    )


@pytest.mark.share(16)
@pytest.mark.parametrize(("name", "s"), EXPRESSIBLE, ids=[name for name, _ in EXPRESSIBLE])
def test_flex_attention_accepts_the_functions(name: str, s: Spec) -> None:
    """FlexAttention runs eagerly, and maps the functions over scalars."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    found, q, k, given, sizes = functions(s, 130, 150)
    v = torch.randn(*k.shape[:3], s.head_dim.v)
    block_mask = None
    if found.mask:
        batch, heads = sizes.batch if found.by_batch else None, sizes.q_heads if found.by_head else None
        block_mask = create_block_mask(found.mask, batch, heads, 130, 150, device="cpu")
    out = flex_attention(q, k, v, score_mod=found.score, block_mask=block_mask, enable_gqa=True)
    modify, _ = reference_scores(s.score, q, k, given)
    expected, _ = naive_attention(q, k, v, reference_mask(s.mask, q, k, given), s.head_dim.qk**-0.5, None, modify)
    assert relative_error(out, expected) < 1e-5


def test_specs_with_a_sink_have_no_functions() -> None:
    assert [name for name, s in GRID if cannot(s)] == ["decode_sinks_paged_gqa", "sinks_window_gqa"]
    assert cannot(spec("sinks_window_gqa")) == "no sink in a score_mod"


def test_the_source_is_what_a_person_would_write() -> None:
    s = spec("softcap_window_gqa")
    written = write(s, Sizes(1, 16, 4, 4096, 4096), {}, {})
    assert written.source.endswith(
        "def _mods():\n"
        "    def _mask_mod(b, h, q_idx, kv_idx):\n"
        "        return (q_idx - kv_idx <= 4095) & (kv_idx - q_idx <= 0)\n"
        "\n"
        "    def _score_mod(score, b, h, q_idx, kv_idx):\n"
        "        score = 50.0 * torch.tanh(0.02 * score)\n"
        "        return score\n"
        "\n"
        "    return _mask_mod, _score_mod\n"
    )
    assert (written.tensors, written.by_batch, written.by_head) == ((), False, False)


@pytest.mark.parametrize(
    ("name", "by_batch", "by_head"),
    [
        ("causal_mha", False, False),
        ("document_gqa", True, False),
        ("block_sparse_mha", True, True),
        ("butterfly_gqa", False, False),
    ],
)
def test_a_mask_function_says_whether_it_depends_on_batch_and_head(name: str, by_batch: bool, by_head: bool) -> None:
    found = functions(spec(name), 130, 130)[0]
    assert (found.by_batch, found.by_head) == (by_batch, by_head)
