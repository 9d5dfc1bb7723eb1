"""Calls of `attngen.flex_attention`: results and gradients against oracles, when functions are traced, the cache."""

from __future__ import annotations

import functools
import inspect
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, or_masks

import attngen
from attngen.bench.mods import MODS, Mod
from attngen.conformance.oracle import relative_error
from attngen.frontends import pairs
from attngen.frontends.block_masks import masked_of
from attngen.frontends.trace import TraceError, trace
from attngen.ir.sizes import Sizes
from attngen.spec import parse_spec
from tests import flex_common
from tests.flex_common import DOC, D, Tensor, inputs, naive
from tests.helpers import ROOT

cache = flex_common.cache  # a fixture


def compare_with_oracle(mod: Mod, sizes: Sizes, device: str) -> None:
    """Compare the output, the LSE and all gradients with those of the oracle."""
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


@pytest.mark.share(64)
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=[name for name, _ in CASES])
def test_functions_of_attention_gym(name: str, sizes: Sizes, device: str) -> None:
    compare_with_oracle(MODS[name], sizes, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, mod in MODS.items() if mod.kind == "mask"])
def test_long_masks_by_compiled_kernels(name: str) -> None:
    """In bf16, with D = 128, two heads and a benchmark's lengths, errors are at most twice those of naive attention."""
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


@pytest.mark.share(8)
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


SCORES_WITHOUT_S: dict[str, Any] = {  # scores that do not use the product of q and k
    "a bias": lambda s, h, q, k, bias: bias[q, k],
    "positions": lambda s, h, q, k, bias: 0.01 * (q - k) * (h + 1),
    "a number": lambda s, h, q, k, bias: torch.zeros_like(s),
    "nothing of it": lambda s, h, q, k, bias: s * 0 + bias[q, k].tanh(),
    "hidden": lambda s, h, q, k, bias: torch.where(q > k + 3, -math.inf, bias[q, k]),
}


@pytest.mark.share(16)
@pytest.mark.parametrize("name", SCORES_WITHOUT_S)
def test_scores_that_do_not_use_s(name: str, device: str) -> None:
    """Gradients of q and k are 0, and the other gradients are right."""
    sizes = Sizes(1, 2, 2, 40, 40)
    (q, k, v), bias = inputs(sizes, device), torch.randn(40, 40, device=device, requires_grad=True)
    at = [torch.arange(n, device=device) for n in (2, 40, 40)]
    heads, rows, columns = at[0].view(-1, 1, 1), at[1].view(-1, 1), at[2]
    learned = (
        [bias] if "bias[" in inspect.getsource(SCORES_WITHOUT_S[name]).split(f'"{name}"')[1].splitlines()[0] else []
    )

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return SCORES_WITHOUT_S[name](s, h, q_idx, kv_idx, bias)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q, k, v, score, return_aux=AuxRequest(lse=True))

    out, aux = function(q, k, v)
    expected, lse = naive(
        q, k, v, lambda s: torch.broadcast_to(SCORES_WITHOUT_S[name](s, heads, rows, columns, bias), s.shape).double()
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


@pytest.mark.share(16)
@pytest.mark.parametrize("kind", ["documents", "stripes"])
def test_a_soft_cap_of_a_modified_score(kind: str, device: str) -> None:
    """The spec of Gemma 2's soft cap over ALiBi builds a module with the right output and gradients."""
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


SCORES: dict[str, Any] = {  # functions of a score, the positions of query and key, and two tables
    "a number over each query's": lambda s, q, k, doc, flags: s + 1 / (q + 1.0) - (k + 2.0) ** -1,
    "a table read at a condition": lambda s, q, k, doc, flags: s + doc[flags[k].int() * 6] * (q % 2),
}


@pytest.mark.share(16)
@pytest.mark.parametrize("name", SCORES)
def test_scores_with_reciprocals_and_conditional_reads(name: str, device: str) -> None:
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


@pytest.mark.share(16)
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


class MaskState:
    """State that masks read: an attribute of the class, and attributes of an object in an attribute."""

    first = 0

    def __init__(self) -> None:
        self.inner = WithSlots(3)

    @property
    def width(self) -> int:
        return self.inner.most[0]

    def near(self, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() <= self.width


class WithSlots:
    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        self.most = [most]


SIZES_BY_NAME = {"most": 3}


def test_functions_are_traced_again_when_a_number_that_they_read_changes() -> None:
    """The number is in a class, a nested object, a method's object or a dictionary, or an inner function reads it."""
    kept, inner = MaskState(), {"by": {"name": 3}}

    def change(n: int) -> None:
        MaskState.first, kept.inner.most[0], SIZES_BY_NAME["most"], inner["by"]["name"] = n, n, n, n

    masks: list[Any] = [
        lambda b, h, q, k: q - k <= MaskState.first,
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


@pytest.mark.share(8)
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


@pytest.mark.share(16)
def test_block_masks(device: str) -> None:
    """The function alone describes a mask that create_block_mask made; lists that hide more, or show more, are
    respected."""
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
        for _ in range(2):  # with a new plan, and with the stored one
            out = attngen.flex_attention(q, k, v, block_mask=some)
            assert relative_error(out, naive(q, k, v, mask=mask)[0]) < 1e-6


def test_products_of_rows_extend_head_dim(device: str) -> None:
    """A score with products of rows is computed by the module of longer rows of q and k, at any scale."""
    mod = MODS["mla_rope"]
    sizes = mod.tests[-1].sizes
    made = mod.make(sizes, device, torch.Generator(device).manual_seed(0))
    assert made.score_mod is not None
    traced, products = pairs.pair_of(made.score_mod, None).split
    assert traced.score is None and len(products) == 1 and traced.tables == ()
    q, k, v = inputs(sizes, device)
    right = naive(q, k, v, lambda s: mod.reference(made, sizes)(s * 0.3 * math.sqrt(D)))[0]
    assert relative_error(attngen.flex_attention(q, k, v, made.score_mod, scale=0.3, enable_gqa=True), right) < 1e-6


@pytest.mark.share(32)
def test_a_second_process_takes_the_module_from_the_cache(device: str) -> None:
    """Other captured tensors change nothing about it; neither the compiler nor its dependencies are imported."""
    code = (
        "import sys, torch, attngen, attngen.api as api\n"
        f"torch.set_default_device('{device}')\n"
        "api._render = lambda *_: exit('compiled')\n"
        "bias = torch.ones(2)\n"
        "score, mask = lambda s, b, h, q, k: s + bias[h] * 3, lambda b, h, q, k: q >= k\n"
        "out = attngen.flex_attention(*[torch.zeros(1, 2, 8, 16)] * 3, score, mask)\n"
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


@pytest.mark.share(8)
def test_tracing_imports_nothing_of_pytorchs_compiler() -> None:
    """That import would take longer than the rest of a call whose module is in the cache."""
    code = (
        "import sys, torch, attngen\n"
        "table = torch.ones(2, 9)\n"
        "def score(s, b, h, q, k):\n"
        "    biased = s.tanh() + table[h, (q - k).abs() % 9] + torch.arange(3).sum()\n"
        "    return torch.where(q >= k, biased, -1.0)\n"
        "attngen.spec_from_mods(score, lambda b, h, q, k: (q // 4 >= k // 4) & ~(k == 7))\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_return_values(device: str) -> None:
    q, k, v = inputs(Sizes(1, 4, 2, 20, 20), device)
    out, lse = naive(q, k, v)
    out_only = attngen.flex_attention(q, k, v, enable_gqa=True)
    pair = attngen.flex_attention(q, k, v, enable_gqa=True, return_lse=True)
    both, aux = attngen.flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
    for x in (out_only, pair[0], both):
        assert relative_error(x, out) < 1e-6
    assert relative_error(pair[1], lse) < 1e-6 and torch.equal(aux.lse, pair[1]) and aux.max_scores is None


@pytest.mark.share(4)
def test_largest_scores(device: str) -> None:
    """`max_scores` is taken over scaled and modified scores, as in FlexAttention's eager implementation; it is -inf for
    queries that see no key."""
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


@pytest.mark.share(16)
def test_a_method_is_traced_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python makes a new method object at each access. The method of another object is traced, too."""

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
