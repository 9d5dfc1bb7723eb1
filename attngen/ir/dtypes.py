"""One table of the element types that q, k, v and the results can have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Dtype = Literal["bf16", "fp16", "fp32"]  # as specs name them


class Element(NamedTuple):
    """An element type.

    bytes: of one element.
    torch: its name in torch.
    products: how products of it are computed. Empty where the module's precision says (`ieee` or `tf32`).
    rate: the peak rate of such products, by its name in devices.py.
    is_interpreted: Triton's interpreter can multiply it.
    """

    bytes: int
    torch: str
    products: str
    rate: str
    is_interpreted: bool = True


ELEMENTS: dict[str, Element] = {
    "bf16": Element(2, "bfloat16", "16-bit", "bf16", is_interpreted=False),
    "fp16": Element(2, "float16", "16-bit", "fp16"),
    "fp32": Element(4, "float32", "", "fp32"),
}


def of_size(dtypes: Iterable[str], elem_bytes: int) -> str:
    """The first of these element types that has so many bytes."""
    return next(d for d in dtypes if ELEMENTS[d].bytes == elem_bytes)


# The types of values in the IR, as generated Python names them. `T` is the element type of q, k, v and the results.
TORCH = {"f32": "torch.float32", "i32": "torch.int32", "b1": "torch.bool", "T": "q.dtype"}
