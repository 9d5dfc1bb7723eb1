"""Functions of attngen/runtime on plain CPU tensors: shapes, strides, checks and sums, compared with torch.

Generated folders have copies; tests/test_private.py checks that they are the same. Other tests of generated modules
cover launches and operators.
"""

from __future__ import annotations

import math
import random
from dataclasses import fields
from typing import Any

import pytest
import torch

from attngen.runtime import checks, gradients, launch, memory
from attngen.runtime.cache import _repeats_elements, _share_memory


def laid_out(order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor [2, 3, 5, 8] with a given memory order of its first three dimensions."""
    shape = (2, 3, 5)
    return torch.randn(*(shape[d] for d in order), 8).permute(*(order.index(d) for d in range(3)), 3)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("width", [8, 12])
def test_results_have_the_memory_order_of_their_tensor(order: tuple[int, ...], width: int) -> None:
    x = laid_out(order)
    shape, strides = memory.rows_layout(x, width)
    made = memory.empty_rows(x, width)
    assert shape == made.shape == (2, 3, 5, width) and strides == made.stride() and made.dtype == x.dtype
    assert sorted(range(3), key=made.stride, reverse=True) == list(order)
    assert made.untyped_storage().nbytes() == 4 * math.prod(shape)  # without gaps


def test_a_layout_with_too_large_row_strides_is_replaced() -> None:
    far = torch.empty((1, 4, 2**18, 64), device="meta").permute(0, 2, 1, 3)
    assert far.stride(2) > memory.MAX_ROW_STRIDE
    assert memory.rows_layout(far, 64) == ((1, 2**18, 4, 64), (2**18 * 256, 256, 64, 1))


def test_only_tensors_that_kernels_cannot_read_are_copied() -> None:
    x = torch.randn(1, 2, 4, 8)
    assert memory.addressable(x) is x and memory.addressable(x[:, :, :, :4]).data_ptr() == x.data_ptr()
    transposed, negated = x.transpose(2, 3), torch._neg_view(x)
    for odd in (transposed, negated):
        found = memory.addressable(odd)
        assert found.equal(odd) and found.stride(3) == 1 and not found.is_neg()


@pytest.mark.parametrize("queries", [1, 3])
def test_rows_of_a_group_are_the_concatenated_rows_of_its_heads(queries: int) -> None:
    x = torch.randn(2, 6, queries, 8)
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        rows, strides = memory.by_group(given, 3)
        assert rows.as_strided((2, 2, 3 * queries, 8), strides).equal(x.reshape(2, 2, 3 * queries, 8))
    room, _ = memory.by_group(laid_out((0, 2, 1)), 3, fresh=True)
    assert room.is_contiguous()
    memory.copy_back(x, x)
    to = torch.empty_like(x)
    memory.copy_back(x, to)
    assert to.equal(x)


def test_the_buffer_of_one_split_is_the_tensor_itself() -> None:
    x = laid_out((0, 2, 1))
    same, strides = memory.room_for_splits(x, 1)
    assert same is x and x.as_strided((2, 3, 1, 5, 8), (*strides, 1)).equal(x.unsqueeze(2))
    room, strides = memory.room_for_splits(x, 4)
    assert (
        room.shape == (2, 3, 4, 5, 8)
        and room.is_contiguous()
        and room.stride() == (*strides, 1)
        and room.dtype == x.dtype
    )
    assert memory.nothing(x, 3, torch.float64).shape == (0, 0, 0)


def test_divisor_returns_the_greatest_divisor_up_to_a_limit() -> None:
    for a in range(1, 40):
        for b in range(1, 45):
            assert gradients.divisor(a, b) == max(n for n in range(1, b + 1) if a % n == 0)
    assert gradients.divisor(12, 0) == 1


def test_sums_by_distance_are_added_to_their_table_entries() -> None:
    """The table is [heads, 5] distances, clamped at its ends. Distances with an index out of range are dropped."""
    parts = torch.randn(2, 3, 4, 9, dtype=torch.float64)
    index = torch.tensor([0, 0, 1, 2, -1, 3, 4, 7, -6])
    found = gradients.by_distance(parts, torch.zeros(3, 5, dtype=torch.float64), 1, (1,), index)
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for at, place in enumerate([0, 0, 1, 2, 4, 3, 4]):
        expected[:, place] += parts.sum((0, 2))[:, at]
    assert torch.allclose(found, expected)
    whole = gradients.placed(torch.tensor([1.0, 2.0]), torch.zeros(3, 2), 1)
    assert whole.tolist() == [[0, 0], [1, 2], [0, 0]]


@pytest.mark.parametrize(("n", "kind"), [(1, 1), (16, 2), (17, 0), (2**31, 6), (2**31 + 1, 4)])
def test_kinds_of_integers_are_those_that_triton_specializes(n: int, kind: int) -> None:
    assert launch.kind_of(n) == kind


def test_interpreters_that_numpy_breaks_say_what_to_install() -> None:
    assert launch.interpreter_fails("3.6.0", "2.3.5") == launch.interpreter_fails("3.7.1", "2.4.6") == ""
    assert launch.interpreter_fails("3.6.0", "2.4.0").endswith("expected numpy below 2.4: pip install 'numpy<2.4'")


Q = torch.zeros(2, 3, 5, 8)


@pytest.mark.parametrize(
    ("x", "dtype", "shape", "error"),
    [
        (
            torch.zeros(2, dtype=torch.int16),
            torch.int32,
            [2],
            "ids is torch.int16; expected torch.int32 or torch.int64 [2]: what for",
        ),
        (torch.zeros(3, dtype=torch.int32), torch.int32, [2], "ids has shape [3]; expected [2]: what for"),
        (torch.zeros(2, 2), torch.float32, [2, (1, 3)], "ids has shape [2, 2]; expected [2, 1 or 3]: what for"),
        (torch.zeros(2, device="meta"), torch.float32, [2], "ids is on meta and q on cpu; expected one device"),
        ([0, 1], torch.int32, [2], "ids is a list; expected a dense torch.int32 tensor [2]: what for"),
        (
            torch.nested.nested_tensor([torch.zeros(2)]),
            torch.float32,
            [1],
            "ids is a nested tensor; expected a dense torch.float32",
        ),
    ],
    ids=["dtype", "shape", "broadcast", "device", "list", "nested"],
)
def test_wrong_inputs_are_one_sentence(x: Any, dtype: torch.dtype, shape: list[Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        checks.take_input(Q, "ids", x, dtype, shape, "what for")
    assert str(raised.value).startswith(f"attention: {error}")


def test_inputs_are_converted_expanded_and_differentiated_in_their_dtype() -> None:
    x = torch.randn(2, 1, dtype=torch.float16, requires_grad=True)
    found = checks.take_input(Q, "slope", x, torch.float32, [2, (1, 3)], "")
    assert found.shape == (2, 3) and found.dtype == torch.float32
    found.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float16 and x.grad.tolist() == [[3], [3]]
    far = torch.tensor([-(2**40), -1, 2**40])
    assert checks.take_input(Q, "ids", far, torch.int32, [3], "").tolist() == [1 - 2**31, -1, 2**31 - 1]


@pytest.mark.parametrize(
    ("x", "kind", "error"),
    [
        (True, int, "n is a bool"),
        (1.5, int, "n is a float"),
        ("1", float, "n is a str"),
        (2**30, int, "n is 1073741824"),
        (-1, int, "at least 0"),
    ],
)
def test_wrong_numbers_are_one_sentence(x: Any, kind: type, error: str) -> None:
    checks.check_number("n", 3, kind, 0, "a count")
    with pytest.raises((TypeError, ValueError), match=error):
        checks.check_number("n", x, kind, 0, "a count")


@pytest.mark.parametrize("gluon", [False, True])
def test_a_descriptor_equals_one_from_its_constructor(gluon: bool) -> None:
    """It is copied from a cached descriptor of the same form, which holds no tensor."""
    from attngen.runtime.descriptors import descriptor

    for x in (torch.zeros(2, 3, 100, 64, dtype=torch.bfloat16) for _ in range(2)):
        made = descriptor(x, 32, gluon=gluon)
        again = type(made)(*(getattr(made, f.name) for f in fields(made)))
        assert vars(made) == vars(again) and made.base is x and made.block_shape == [1, 1, 32, 64]
        assert made.strides == [3 * 100 * 64, 100 * 64, 64, 1] and made.shape == [2, 3, 100, 64]
    for parts, stride in ((1, 400 * 64), (4, 100 * 64)):
        x = torch.zeros(2, 3, parts, 400 // parts, 64, dtype=torch.bfloat16)
        made = descriptor(x, 32, gluon=gluon)
        assert (
            made.shape == [2, 3 * parts, x.shape[3], 64]
            and made.strides == [x.stride(0), stride, 64, 1]
            and made.base is x
        )
    odd = torch.zeros(2 * 3 * 100 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 3, 100, 64)
    narrow = torch.zeros(2, 3, 100, 65, dtype=torch.bfloat16)[..., :64]
    empty = torch.zeros(2, 3, 0, 64, dtype=torch.bfloat16)
    for x, rows in ((odd, 100), (narrow, 100), (empty, 1)):
        copied = descriptor(x, 32, gluon=gluon)
        assert copied.base is not x and copied.shape[2] == rows and copied.strides[3] == 1


def test_views_that_share_an_element_are_detected() -> None:
    """Random views of one buffer, with steps, slices and permuted dimensions, are compared by the addresses of all
    elements."""
    chance = random.Random(5)
    buffer = torch.arange(600)

    def view() -> torch.Tensor:
        x = buffer[:360].view(3, 4, 6, 5)
        for d in range(4):
            start = chance.randrange(x.shape[d])
            x = x.narrow(d, start, chance.randint(1, x.shape[d] - start))
            x = x[(slice(None),) * d + (slice(None, None, chance.choice((1, 1, 2, 3))),)]
        return x

    found = {True: 0, False: 0}
    for _ in range(2000):
        x = view()
        near = max(0, x.storage_offset() + chance.randint(-20, 20))
        y = buffer.as_strided(x.shape, x.stride(), near) if chance.random() < 0.5 else view()
        order = chance.sample(range(4), 4)
        x, y = x.permute(order), y.permute(order)
        alike = all(a == b for a, b, n, m in zip(x.stride(), y.stride(), x.shape, y.shape) if n > 1 or m > 1)
        share = bool(set(x.flatten().tolist()) & set(y.flatten().tolist()))
        assert not _repeats_elements(x)
        assert _share_memory(x, y) == (share if alike else x.data_ptr() == y.data_ptr())
        found[share] += alike
    assert min(found.values()) > 100
