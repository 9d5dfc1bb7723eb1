"""Committed modules on CUDA with large tensors: long sequences, offsets beyond 32 bits, more than 2**31 elements, and a
device that is not current."""

from __future__ import annotations

import pytest
import torch

from attngen.conformance.cases import Case, heads_for
from attngen.conformance.harness import run_case
from attngen.conformance.oracle import relative_error
from attngen.conformance.result import KEYS
from tests.helpers import WRAPPERS, built
from tests.helpers import spec as spec_of
from tests.test_numerics import dtypes, problem, run, small, with_dtypes

pytestmark = pytest.mark.numerics


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        (name, dtype, shape)
        for name, dtype in with_dtypes(WRAPPERS)
        for shape in [(4096, 4096, 4), (8191, 8191, 2), (1, 32768, 2)]
        # not one query with many keys in fp32: cuBLAS splits naive attention's sum over the keys, and ours is one sum
        # (docs/perf-log.md, section 4)
        if dtype != "fp32" or shape[0] > 1
    ],
    ids=str,
)
def test_large(name: str, dtype: str, shape: tuple[int, int, int], device: str) -> None:
    n_q, n_kv, heads = shape
    spec = spec_of(name)
    result = run_case(built(name), spec, Case(1, *heads_for(spec, heads), n_q, n_kv), dtype, device)
    torch.cuda.empty_cache()
    assert result.ok, str(result)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "strides", [(2**31 + 128, 2**26, 128), (2**21, 2**31 + 128, 128), (2**21, 128, 2**22)], ids=["batch", "head", "row"]
)
@pytest.mark.parametrize("name", ["causal_mqa", "causal_mha", "padding_mha", "full_mha"])
def test_offsets_beyond_32_bits(name: str, strides: tuple[int, int, int], device: str) -> None:
    """q, k, v and dO as views of a buffer of more than 2**31 elements give the results of dense copies.

    Rounding may differ, as Triton compiles other kernels for 64-bit strides.
    """
    case = Case(2, *heads_for(spec_of(name), 2), 600, 600)
    leaves, inputs, (grad_out, grad_lse) = problem(name, case, device)
    expected = run(name, leaves, inputs, (grad_out, grad_lse))

    def spread(x: torch.Tensor) -> torch.Tensor:
        steps = (*strides, 1)
        reach = 1 + sum((size - 1) * step for size, step in zip(x.shape, steps))
        if strides[2] > 2**20:
            reach = max(reach, 2**31)
        view = torch.empty(reach, device=device, dtype=x.dtype).as_strided(x.shape, steps)
        return view.copy_(x)

    for i, x in enumerate((*leaves, grad_out)):  # one at a time: each buffer is gigabytes
        moved = [*leaves, grad_out]
        moved[i] = spread(x.detach()).requires_grad_(i < 3)
        assert (
            moved[i].storage_offset() + sum((s - 1) * t for s, t in zip(x.shape, moved[i].stride())) >= 2**31
            or x.shape[1] == 1
        )
        found = run(name, moved[:3], inputs, (moved[3], grad_lse))
        for key in KEYS:
            error = relative_error(found[key], expected[key])
            assert error < 4 * torch.finfo(expected[key].dtype).eps, f"{key} with argument {i} spread out: {error}"
        del moved, found
        torch.cuda.empty_cache()


@pytest.mark.gpu
def test_more_than_2_31_elements(device: str) -> None:
    """In results with that many elements the last heads have the bits that they have by themselves."""
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    attention = built("full_mha").attention
    shape = (3, 2**15 // 3 * 2 + 1024, 520, 64)
    assert torch.Size(shape).numel() > 2**31
    q, k, v, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, return_lse=True)
    grads = torch.autograd.grad(out, leaves, grad)
    last = (slice(2, 3), slice(-512, None))  # as many heads as take the same backward kernels as all of them
    ends = [x[last].detach().clone().requires_grad_() for x in leaves]
    out_end, lse_end = attention(*ends, return_lse=True)
    grads_end = torch.autograd.grad(out_end, ends, grad[last].clone())
    for whole, end in zip((out, lse, *grads), (out_end, lse_end, *grads_end)):
        assert whole[last].equal(end)


@pytest.mark.gpu
def test_expanded_arguments_and_more_than_2_31_elements(device: str) -> None:
    """Arguments are expanded over batch and heads, so all heads are equal. In the order of their strides, rows of
    results would be too far apart."""
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    shape = (1024, 264, 132, 64)  # rows as the outermost dimension would be more than 2**24 elements apart
    one = [torch.randn(1, 1, *shape[2:], device=device, dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, grad = (x.expand(shape) for x in one)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    alone = [x.detach().requires_grad_() for x in one[:3]]
    out, out_alone = built("full_mha").attention(*leaves), built("full_mha").attention(*alone)
    assert out.numel() > 2**31
    found, expected = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(out_alone, alone, one[3])
    for x, y in zip((out, *found), (out_alone, *expected)):
        assert all(part.equal(x[:1, :1].expand(part.shape)) for part in x.split(32))
        assert relative_error(x[:1, :1].detach(), y.detach()) < 4 * torch.finfo(y.dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal_gqa", "padding_mha"])
def test_a_device_that_is_not_current(name: str, device: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.cuda.device(0):
        result = run_case(built(name), spec_of(name), small(name, 129, 200), dtypes(name)[0], "cuda:1")
    assert result.ok, str(result)
