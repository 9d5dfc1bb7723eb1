"""Memory of calls: kernels write every element of each buffer and nothing else, results have the layout of the inputs,
and rows that are too far apart are copied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from attngen.conformance.cases import Case, heads_for
from attngen.conformance.oracle import relative_error
from attngen.conformance.result import KEYS
from tests.helpers import CUDA, FEW, KINDS, built
from tests.helpers import spec as spec_of
from tests.test_numerics import SEQUENCES, alone, problem, run, small

pytestmark = pytest.mark.numerics
EMPTY_SIZES = {
    "no batch": (0, 4, 65, 65),
    "no heads": (2, 0, 65, 65),
    "no queries": (2, 4, 0, 65),
    "no keys": (2, 4, 65, 0),
}


@pytest.mark.parametrize("sizes", EMPTY_SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_empty_tensors(name: str, sizes: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, heads, n_q, n_kv = EMPTY_SIZES[sizes]
    kv_heads = 1 if spec_of(name).heads.sharing == "mqa" else heads_for(spec_of(name), heads)[1] if heads else 0
    leaves, inputs, grads = problem(name, Case(batch, heads, kv_heads, n_q, n_kv), device)
    guarded = fill_fresh_buffers(monkeypatch, built(name))
    found = run(name, leaves, inputs, grads)
    monkeypatch.undo()
    guarded.check()
    for key, x in zip(KEYS, (grads[0], grads[1], *leaves)):
        assert found[key].shape == x.shape
        assert (found[key] == (alone(name, inputs, x) if key == "lse" else 0)).all(), key


class Guarded:
    """Replaces torch.empty and similar functions: buffers are full of NaN, between margins that must not change."""

    MARGIN, FILL = 4096, 12345.0

    def __init__(self) -> None:
        self.buffers: list[tuple[torch.Tensor, int]] = []

    def empty(self, *size: Any, device: Any = None, dtype: Any = None, **options: Any) -> torch.Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        buffer = torch.full((shape.numel() + 2 * self.MARGIN,), self.FILL, device=device, dtype=dtype)
        self.buffers.append((buffer, shape.numel()))
        inside = buffer[self.MARGIN : self.MARGIN + shape.numel()]
        return (inside.fill_(torch.nan) if buffer.is_floating_point() else inside).view(shape)

    def empty_like(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.empty(x.shape, device=x.device, dtype=options.get("dtype", x.dtype))

    def new_empty(self, x: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        return self.empty(*size, **{"device": x.device, "dtype": x.dtype, **options})

    def empty_strided(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str
    ) -> torch.Tensor:
        reach = 1 + sum((n - 1) * step for n, step in zip(size, stride)) if 0 not in size else 0
        x = self.empty(reach, device=device, dtype=dtype)
        return x.as_strided(size, stride, x.storage_offset())

    def holds(self, x: torch.Tensor) -> bool:
        return any(buffer.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for buffer, _ in self.buffers)

    def check(self) -> None:
        for buffer, size in self.buffers:
            fill = torch.full((), self.FILL, dtype=buffer.dtype, device=buffer.device)
            assert (buffer[: self.MARGIN] == fill).all(), "written before a buffer's start"
            assert (buffer[self.MARGIN + size :] == fill).all(), "written past a buffer's end"


def without_storage(
    empty_strided: Callable[..., torch.Tensor], shape: Any, strides: Any, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Generated modules call torch.empty_strided only for the form of a TMA descriptor, on torch's `meta` device."""
    assert device == "meta"
    return empty_strided(shape, strides, dtype=dtype, device=device)


def fill_fresh_buffers(monkeypatch: pytest.MonkeyPatch, module: Any) -> Guarded:
    """Guard every buffer that calls of a generated module allocate."""
    module.runtime.no_rows(
        torch.device("cuda", 0) if CUDA else torch.device("cpu")
    )  # made once, before torch is patched
    guarded = Guarded()
    monkeypatch.setattr(torch, "empty", guarded.empty)
    monkeypatch.setattr(torch, "empty_like", guarded.empty_like)
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: guarded.empty(*size, **options).zero_())
    monkeypatch.setattr(torch, "zeros_like", lambda x: guarded.empty_like(x).zero_())
    monkeypatch.setattr(torch, "full_like", lambda x, value: guarded.empty_like(x).fill_(value))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **options: guarded.new_empty(x, *size, **options))
    monkeypatch.setattr(torch, "empty_strided", partial(without_storage, torch.empty_strided))
    monkeypatch.setattr(torch, "empty_permuted", None)  # generated modules do not use it
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(module.runtime, f"empty_{device}", partial(guarded.empty_strided, device=device))
    return guarded


@pytest.mark.parametrize(
    "shape", [(129, 129, "bhnd"), (300, 100, "island"), (1, 130, "bhnd"), (17, 130, "bnhd")], ids=str
)
@pytest.mark.parametrize("name", list(dict.fromkeys([*FEW, "causal_gqa"])))  # the last uses pack-GQA
def test_every_element_is_written_and_no_other(
    name: str, shape: tuple[int, int, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = built(name)
    leaves, inputs, grads = problem(name, small(name, *shape, batch=SEQUENCES), device)
    split = hasattr(module, "SPLIT_KEYS")
    if split:  # one program per query head, so that the wrapper allocates partial dK and dV
        monkeypatch.setattr(module, "SPLIT_KEYS", 2**30)
    with monkeypatch.context() as patches:
        guarded = fill_fresh_buffers(patches, module)
        found = run(name, leaves, inputs, grads)
    # out, lse, delta, lse2, dq, dk, dv, and two partial gradients
    assert sum(size > 0 for _, size in guarded.buffers) >= (9 if split else 7)
    guarded.check()
    expected = run(name, leaves, inputs, grads)  # last, because a write outside of its buffers may end the process
    for key in KEYS:
        assert guarded.holds(found[key]), key
        assert found[key].equal(expected[key]), f"{key} depends on what was in its buffer before"


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("name", FEW)
def test_results_lie_as_the_inputs_do(name: str, layout: str, device: str) -> None:
    leaves, inputs, grads = problem(name, small(name, layout=layout), device)
    for x in run(name, leaves, inputs, grads).values():
        assert (x.transpose(1, 2) if layout == "bnhd" and x.dim() == 4 else x).is_contiguous()


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "expanded rows"])
@pytest.mark.parametrize("limit", [100, 2**23])
@pytest.mark.parametrize("name", FEW)
def test_rows_too_far_apart(name: str, limit: int, layout: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments with row strides beyond 32-bit offsets are copied, and results have no such strides."""
    case = small(name, 3, 3, layout if layout == "bnhd" else "bhnd")
    leaves, inputs, grads = problem(name, case, device)
    if layout == "expanded rows":  # the order of strides makes rows the outermost dimension of results
        leaves = [x.detach()[:1, :1].expand(x.shape).requires_grad_() for x in leaves]
        grads = grads[0][:1, :1].expand(grads[0].shape), grads[1]
    expected = run(
        name, [x.detach().contiguous().requires_grad_() for x in leaves], inputs, (grads[0].contiguous(), grads[1])
    )
    monkeypatch.setattr(built(name).runtime, "MAX_ROW_STRIDE", limit)
    monkeypatch.setattr(
        built(name).runtime, "_known_layout", built(name).runtime._ordered_layout
    )  # which remembers none
    found = run(name, leaves, inputs, grads)
    for key in KEYS:
        x, y = (r[key].detach().nan_to_num(neginf=0.0) for r in (found, expected))
        assert relative_error(x, y) < 4 * torch.finfo(x.dtype).eps, key
        if limit == 100 and key != "lse":
            assert found[key].is_contiguous(), key
