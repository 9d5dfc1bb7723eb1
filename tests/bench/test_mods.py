"""Functions of the benchmark `mods`, which users write for FlexAttention: torch evaluates them, and they must equal
their oracles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_mask, flex_attention

from attngen.bench.mods import MODS, Case, Made, Mod
from attngen.conformance.oracle import relative_error
from attngen.errors import AttngenError
from attngen.ir.sizes import Sizes
from tests.helpers import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
MASKS, SCORES = ([name for name, mod in MODS.items() if mod.kind == kind] for kind in ("mask", "score"))
CASES = [(name, case) for name, mod in MODS.items() for case in mod.tests]
NAMED = [f"{name}-{case.sizes.n_q}x{case.sizes.n_kv}" for name, case in CASES]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def scores_of(sizes: Sizes) -> torch.Tensor:
    return 3 * torch.randn(sizes.batch, sizes.q_heads, sizes.n_q, sizes.n_kv, generator=generator())


def positions(sizes: Sizes) -> list[torch.Tensor]:
    lengths = (sizes.batch, sizes.q_heads, sizes.n_q, sizes.n_kv)
    return [
        torch.arange(n, dtype=torch.int32).view([n if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(lengths)
    ]


def everywhere(score_mod: Callable[..., torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
    """Evaluate a score modifier at every position; each call sees tensors without dimensions."""
    at = [i.expand(scores.shape).flatten() for i in positions(Sizes(*scores.shape[:2], 1, *scores.shape[2:]))]
    with TransformGetItemToIndex():
        return torch.vmap(score_mod)(scores.flatten(), *at).view(scores.shape)


def agrees(mod: Mod, made: Made, sizes: Sizes, oracle: Made) -> bool:
    """Return whether the function equals the oracle on that data."""
    if mod.kind == "mask":
        found = create_mask(made.mask_mod, sizes.batch, sizes.q_heads, sizes.n_q, sizes.n_kv, device="cpu")
        return torch.equal(found, mod.reference(oracle, sizes).expand(found.shape))
    scores = scores_of(sizes)
    found, expected = everywhere(made.score_mod, scores), mod.reference(oracle, sizes)(scores)
    assert found.dtype == expected.dtype == torch.float32
    return relative_error(found, expected) < 1e-6


@pytest.mark.parametrize("name, case", CASES, ids=NAMED)
def test_a_function_equals_its_oracle(name: str, case: Case) -> None:
    made = MODS[name].make(case.sizes, "cpu", generator())
    assert agrees(MODS[name], made, case.sizes, made)
    assert all(x.requires_grad and x.is_leaf for x in made.learned)


@pytest.mark.parametrize("name", MASKS)
def test_each_mask_shows_some_pairs_and_hides_others(name: str) -> None:
    mod, both = MODS[name], 0
    for case in mod.tests:
        visible = mod.reference(mod.make(case.sizes, "cpu", generator()), case.sizes)
        both += bool(visible.any()) and not bool(visible.all())
    assert both


@pytest.mark.share(16)
@pytest.mark.parametrize("name", MASKS)
def test_each_mask_is_right_at_the_lengths_of_the_benchmark(name: str) -> None:
    mod = MODS[name]
    sizes = mod.bench.sizes._replace(q_heads=2, kv_heads=1)
    made, random = mod.make(sizes, "cpu", generator()), generator()
    visible = mod.reference(made, sizes).expand(sizes.batch, sizes.q_heads, sizes.n_q, sizes.n_kv)
    b, h, q, kv = (torch.randint(n, (4000,), generator=random) for n in visible.shape)
    away = torch.randint(-200, 201, (2000,), generator=random)
    # Near the diagonal, where masks of windows have their edges
    kv[:2000] = (q[:2000] * sizes.n_kv // sizes.n_q + away).clamp(0, sizes.n_kv - 1)
    with TransformGetItemToIndex():
        found = torch.vmap(made.mask_mod)(b, h, q, kv)
    assert torch.equal(found, visible[b, h, q, kv])
    assert found.any() and not found.all()


@pytest.mark.share(4)
@pytest.mark.parametrize("name", MODS)
def test_a_traced_function_is_right_at_every_position(name: str) -> None:
    """A function that is traced at the first position is right at all others: no branch depends on a position."""
    mod = MODS[name]
    sizes = mod.tests[-1].sizes
    made, scores = mod.make(sizes, "cpu", generator()), scores_of(sizes)
    zeros = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    function, first = (made.mask_mod, []) if mod.kind == "mask" else (made.score_mod, [torch.zeros(())])
    with TransformGetItemToIndex():
        traced = make_fx(function)(*first, *zeros)
    oracle = (
        mod.reference(made, sizes).expand(scores.shape) if mod.kind == "mask" else mod.reference(made, sizes)(scores)
    )
    random = generator()
    for _ in range(20):
        at = [torch.randint(n, (), generator=random, dtype=torch.int32) for n in scores.shape]
        element = [scores[tuple(at)]] if first else []
        torch.testing.assert_close(traced(*element, *at), oracle[tuple(at)])


@pytest.mark.share(16)
@pytest.mark.parametrize("name", SCORES)
def test_eager_flex_attention_agrees_with_the_oracle(name: str) -> None:
    mod = MODS[name]
    sizes = mod.tests[-1].sizes
    made, random = mod.make(sizes, "cpu", generator()), generator()
    q = torch.randn(sizes.batch, sizes.q_heads, sizes.n_q, 16, generator=random)
    k, v = (torch.randn(sizes.batch, sizes.kv_heads, sizes.n_kv, 16, generator=random) for _ in range(2))
    with torch.no_grad():
        found = flex_attention(q, k, v, score_mod=made.score_mod, enable_gqa=True)
    assert relative_error(found, attention(mod, made, sizes, q, k, v)) < 1e-5


def attention(mod: Mod, made: Made, sizes: Sizes, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention with the oracle's scores."""
    k, v = (x.repeat_interleave(sizes.q_heads // sizes.kv_heads, dim=1) for x in (k, v))
    return mod.reference(made, sizes)(q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


@pytest.mark.parametrize("name", SCORES)
def test_derivatives_of_a_score_equal_those_of_its_oracle(name: str) -> None:
    mod = MODS[name]
    sizes = mod.tests[-1].sizes
    made, scores = mod.make(sizes, "cpu", generator()), scores_of(sizes).requires_grad_()
    weights = torch.randn(scores.shape, generator=generator().manual_seed(1))
    leaves = (scores, *made.learned)
    found = torch.autograd.grad(everywhere(made.score_mod, scores), leaves, weights)
    expected = torch.autograd.grad(mod.reference(made, sizes)(scores), leaves, weights)
    assert len(found) == 1 + name.startswith("graphormer")
    for mine, theirs in zip(found, expected):
        assert relative_error(mine, theirs) < 1e-5


def later(x: tuple[int, ...]) -> tuple[int, ...]:
    return (x[0] + 1, x[1] - 1, *x[2:])


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "batchify_causal": ("group", lambda x: x - 1),
    "batchify_all": ("group", lambda x: x - 1),
    "sliding_window": ("back", lambda x: x + 1),
    "dilated_sliding_window": ("step", lambda x: x + 1),
    "global_sliding_window": ("marked", lambda x: x.roll(1)),
    "prefix_lm": ("prefix", lambda x: x + 1),
    "document": ("lengths", later),
    "packed_document": ("lengths", later),
    "shared_prefix": ("prompts", lambda x: tuple(range(len(x)))),
    "flamingo": ("spans", lambda x: (later(x[0]), *x[1:])),
    "block_diffusion": ("block", lambda x: x + 1),
    "jetspec_tree": ("parents", lambda x: [i - 1 for i in range(len(x))]),
    "jetspec_training": ("block", lambda x: x + 1),
    "vsa": ("counts", lambda x: x.flip(0)),
    "vsa_block_map": ("chosen", lambda x: x.flip(2)),
    "natten": ("kernel", lambda x: (x[0] - 2, x[1])),
    "tiled_natten": ("order", lambda x: x.mT.contiguous()),
    "morton_natten": ("order", lambda x: x.mT.contiguous()),
    "sta_2d": ("text", lambda x: x + 1),
    "sta_3d": ("kernel", lambda x: (x[0], x[1], x[2] * 2)),
    "svg_spatial": ("band", lambda x: x - 1),
    "svg_temporal": ("band", lambda x: x + 1),
    "alibi": ("slopes", lambda x: x[::-1]),
    "softcap": ("cap", lambda x: x + 1),
    "softcap_approx": ("cap", lambda x: x + 1),
    "sandwich": ("width", lambda x: x - 2),
    "mla_rope": ("keys", lambda x: x.flip(2)),
    "activation_gelu": ("function", lambda x: "relu"),
    "activation_relu": ("offset", lambda x: x * 1.01),
    "graphormer_spatial": ("distances", lambda x: x.roll(1, 1)),
    "graphormer_edge": ("lengths", lambda x: x - (x > 1).int()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_oracle_with_changed_data_disagrees(name: str) -> None:
    mod, (key, change) = MODS[name], CHANGES[name]
    sizes = mod.tests[-1].sizes
    made = mod.make(sizes, "cpu", generator())
    other = replace(made, data=made.data | {key: change(made.data[key])})
    assert not agrees(mod, made, sizes, other)


def test_every_function_with_data_has_a_changed_oracle() -> None:
    assert set(CHANGES) == set(MODS) - {"causal"}
    assert (len(MASKS), len(SCORES)) == (23, 9)


def test_lengths_without_parameters_are_refused() -> None:
    with pytest.raises(
        AttngenError,
        match="mod `natten` has no parameters for 7 queries and 9 keys; it has some for 35 x 35, .*, 8192 x 8192",
    ):
        MODS["natten"].make(Sizes(1, 1, 1, 7, 9), "cpu", generator())


def test_no_two_cases_of_a_function_have_the_same_lengths() -> None:
    for mod in MODS.values():
        lengths = [case.sizes[3:] for case in (*mod.tests, mod.bench)]
        assert len(set(lengths)) == len(lengths), mod.name


@pytest.mark.share(16)
def test_the_functions_are_imported_without_the_compiler() -> None:
    code = "import sys, attngen.bench.mods; print(*(m for m in sys.modules if m.startswith('attngen.')))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    light = {"attngen.errors", "attngen.ir.sizes", "attngen.ir", "attngen.ir.names"}
    assert {m for m in found if not m.startswith("attngen.bench")} == light
    assert {m for m in found if not m.startswith("attngen.bench.mods")} == {*light, "attngen.bench"}
