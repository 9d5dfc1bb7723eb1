"""The element types of q, k and v, and the element types of outputs and caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Element(NamedTuple):
    """An element type. Its key in ELEMENTS is its name in specs and in the signatures of kernels that Triton compiles.

    bytes: bytes of one element.
    torch: its name in torch.
    products: how its matrix products are computed; empty if the module's precision decides (`ieee` or `tf32`).
    rate: the peak rate of such products, by its name in devices.py.
    is_interpreted: whether Triton's interpreter can multiply it.
    results: the element type of outputs, by its key; empty if it is the same.
    trains: whether it has a backward. A type with other `results`, or with `weights`, has none.
    weights: for a type with too little range near zero for softmax weights, which are at most 1: these are multiplied
    by 2**weights before they are cast, and the output is divided by it.
    """

    bytes: int
    torch: str
    products: str
    rate: str
    is_interpreted: bool = True
    results: str = ""
    trains: bool = True
    weights: int = 0


ELEMENTS: dict[str, Element] = {
    "bf16": Element(2, "bfloat16", "16-bit", "bf16", is_interpreted=False),
    "fp16": Element(2, "float16", "16-bit", "fp16"),
    "fp32": Element(4, "float32", "", "fp32"),
}

# 8-bit element types of caches (Micikevicius et al. 2022, "FP8 formats for deep learning") -> their type in the IR. In
# kernels two of them, in adjacent columns, are packed in one 16-bit value. Products take them as fp16.
QUANTISED = {"fp8_e4m3": "fp8_e4m3x2"}
LATENT_GROUP = 128  # columns of a latent that share one scale, as in FlashMLA's cache of 8-bit latents
QUANTISED_TORCH = {"fp8_e4m3": "float8_e4m3fn"}  # their names in torch

# The types of values in the IR -> their names in generated Python. `T` is the element type of q, k and v, and of
# outputs unless ELEMENTS names another one: kernels call that one by its key, and fp32 `f32`.
TORCH = {"f32": "torch.float32", "i32": "torch.int32", "b1": "torch.bool", "T": "q.dtype"}
TORCH |= {name: f"torch.{e.torch}" for name, e in ELEMENTS.items() if name != "fp32"}


def latent_bytes(latent: int, rope: int) -> int:
    """Bytes per row of an 8-bit latent cache: the latent's numbers, their fp32 scales, and the rotated columns in 16
    bits."""
    return latent + 4 * (latent // LATENT_GROUP) + 2 * rope


def of_size(dtypes: Iterable[str], elem_bytes: int) -> str:
    """The first of these element types with this size in bytes."""
    return next(d for d in dtypes if ELEMENTS[d].bytes == elem_bytes)


def by_precision(dtypes: Iterable[str]) -> bool:
    """True if the module's precision decides how products of at least one of these element types are computed."""
    return any(not ELEMENTS[d].products for d in dtypes if d in ELEMENTS)


def result_of(dtype: str) -> str:
    """The element type of outputs for q, k and v of this type."""
    return ELEMENTS[dtype].results or dtype


def result_type(dtypes: Sequence[str]) -> str:
    """The IR's type of a module's outputs: `T`, or the one that its element types name, which is the same for all of
    them."""
    named = ELEMENTS[dtypes[0]].results if dtypes else ""
    return {"": "T", "fp32": "f32"}.get(named, named)


def agree(dtypes: Iterable[str]) -> bool:
    """True if all these element types use the same kernels and schedules: outputs have one type in the IR, weights have
    one factor, and types of the same size compute products in the same way."""
    elements = [ELEMENTS[d] for d in dtypes]
    products = {(e.bytes, e.products) for e in elements}
    return len({(e.results, e.weights) for e in elements}) <= 1 and len(products) == len({size for size, _ in products})
