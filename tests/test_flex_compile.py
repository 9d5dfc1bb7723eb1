"""`attngen.flex_attention` inside torch.compile: calls in one graph, and calls that break it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, or_masks

import attngen
from attngen.frontends.compiled import OLD
from attngen.frontends.trace import TraceError
from attngen.ir.sizes import Sizes
from tests import flex_common
from tests.flex_common import Tensor, cumulative_score, inputs, lower_triangle

cache = flex_common.cache  # a fixture


@pytest.mark.share(8)
def test_a_score_that_does_not_use_s_in_a_graph(device: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q, k, v, _distances)

    check_same_bits(function, compiled(function), *inputs(Sizes(1, 2, 2, 20, 20), device))


def _distances(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 0.25 * (q_idx - kv_idx)


def compiled(function: Any, fullgraph: bool = True) -> Any:
    """The function compiled by torch.compile, which has forgotten other functions."""
    torch._dynamo.reset()
    return torch.compile(
        function, backend="inductor" if torch.cuda.is_available() else "aot_eager", fullgraph=fullgraph
    )


def check_same_bits(function: Any, graph: Any, *leaves: Tensor) -> None:
    """Check that a compiled function gives the bits of the function, also those of gradients."""
    found, right = graph(*leaves[:3]), function(*leaves[:3])
    found, right = ([x] if isinstance(x, Tensor) else [x[0], *x[1]] for x in (found, right))
    assert all(a.equal(b) for a, b in zip(found, right, strict=True))
    w = torch.randn_like(found[0])
    for a, b in zip(torch.autograd.grad(found[0], leaves, w), torch.autograd.grad(right[0], leaves, w)):
        assert a.equal(b)


@pytest.mark.share(16)
def test_a_call_in_a_graph_follows_changes_of_captured_values(device: str) -> None:
    """Values of tensors, tensors, numbers and lengths change; bits are those of calls outside of torch.compile."""
    slope, window, factor = torch.rand(2, device=device, requires_grad=True), 5, 0.5

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() <= window

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s * factor - slope[h] * (q_idx - kv_idx)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q * 2, k, v, score, mask, return_aux=AuxRequest(lse=True, max_scores=True))

    graph, qkv = compiled(function), inputs(Sizes(1, 2, 2, 20, 20), device)
    for _ in range(2):
        check_same_bits(function, graph, *qkv, slope)
    with torch.no_grad():
        slope.mul_(2)
    check_same_bits(function, graph, *qkv, slope)
    slope = torch.rand(2, device=device, requires_grad=True)
    check_same_bits(function, graph, *qkv, slope)
    for window, factor in ((3, 0.5), (2, 0.25), (7, 0.75)):  # noqa: B007 (the functions read them)
        check_same_bits(function, graph, *qkv, slope)
    check_same_bits(function, graph, *inputs(Sizes(1, 2, 2, 33, 33), device), slope)


@pytest.mark.share(16)
def test_lengths_are_symbols_of_a_graph_if_functions_capture_no_tensors(device: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(
        lambda q, k, v: attngen.flex_attention(q * 2, k, v, None, lower_triangle), backend=counter, fullgraph=True
    )
    for n in (20, 33, 70, 47):
        q, k, v = inputs(Sizes(1, 2, 2, n, n), device)
        assert graph(q, k, v).equal(attngen.flex_attention(q * 2, k, v, None, lower_triangle))
    assert counter.frame_count == 2


@pytest.mark.share(8)
def test_functions_with_the_same_code_are_distinguished_in_a_graph(device: str) -> None:
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


@pytest.mark.share(8)
def test_methods_and_block_masks_in_a_graph(device: str) -> None:
    """The graph has parameters and numbers of the object of a method, and the lists of a block mask that say more than
    its function."""

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
        check_same_bits(layer, graph, q, k, v, layer.slope)


NO_BLOCK_MASK_REASON = (
    "a block mask or a method is part of a graph from torch 2.12 on"
    if OLD
    else "a block mask is made inside of the compiled function; expected one from outside of it"
)


@pytest.mark.share(8)
def test_calls_that_cannot_be_in_a_graph_say_why_and_run_outside(device: str) -> None:
    class Hidden:
        tables = {"first": torch.rand(2, device=device)}

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx: s + h)

    def reads(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s + vars(Hidden)["tables"]["first"][h] * kv_idx

    def unseen(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q, k, v, reads)

    def refused(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.flex_attention(q, k, v, cumulative_score)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Any:
        block_mask = create_block_mask(lower_triangle, None, None, 20, 20, device=device)
        return attngen.flex_attention(q, k, v, None, block_mask)

    q, k, v = inputs(Sizes(1, 2, 2, 20, 20), device)
    for function, sentence in (
        (
            inside,
            "flex_attention: a function is defined inside of the compiled function; expected one from outside of it",
        ),
        (
            unseen,
            "flex_attention: `table` is not held by the functions, so torch.compile would not see it change",
        ),
        (refused, "`aten::cumsum` has no expression"),
        (masked, f"flex_attention: {NO_BLOCK_MASK_REASON}"),
    ):
        if not OLD or function is not inside:  # torch 2.11 follows functions that capture nothing
            with pytest.raises(torch._dynamo.exc.Unsupported) as error:
                compiled(function)(q, k, v)
            assert sentence in str(error.value)
        if function is not refused:
            assert compiled(function, fullgraph=False)(q, k, v).equal(function(q, k, v))
    with pytest.raises(TraceError, match="`aten::cumsum` has no expression"):
        compiled(refused, fullgraph=False)(q, k, v)
