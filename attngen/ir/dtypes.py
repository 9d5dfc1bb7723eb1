"""One table of the element types that q, k and v can have, and of those of their results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Element(NamedTuple):
    """An element type. Its key in ELEMENTS is what specs call it, and signatures of kernels that Triton compiles.

    bytes: of one element.
    torch: its name in torch.
    products: how products of it are computed. Empty where the module's precision says (`ieee` or `tf32`).
    rate: the peak rate of such products, by its name in devices.py.
    is_interpreted: Triton's interpreter can multiply it.
    results: the element type of outputs, by its key, of q, k and v of this one. Empty where it is the same.
    trains: there is a backward in it. One that has other results, or `weights`, has none.
    weights: where it has too few numbers near zero for the softmax's weights, which are at most 1, these are multiplied
    by 2**weights
        before they are cast to it, and the output is divided by that again.
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

# What a cache can hold in place of the element type of q: 8-bit numbers (Micikevicius et al. 2022, "FP8 formats for
# deep learning"). In kernels two of them, in columns side by side, are one value of 16 bits, which has this type in the
# IR. Products take them as fp16.
QUANTISED = {"fp8_e4m3": "fp8_e4m3x2"}
LATENT_GROUP = 128  # columns of a latent that have one factor, as in FlashMLA's cache of 8-bit latents
QUANTISED_TORCH = {"fp8_e4m3": "float8_e4m3fn"}  # their names in torch

# The types of values in the IR, as generated Python names them. `T` is the element type of q, k and v, and of the
# results unless the table names another one for these. Kernels call that by its key, and fp32 `f32`.
TORCH = {"f32": "torch.float32", "i32": "torch.int32", "b1": "torch.bool", "T": "q.dtype"}
TORCH |= {name: f"torch.{e.torch}" for name, e in ELEMENTS.items() if name != "fp32"}


def latent_bytes(latent: int, rope: int) -> int:
    """Bytes of a row of a cache of 8-bit latents: the numbers of the latent, their factors in fp32, the rotated
    columns in 16 bits."""
    return latent + 4 * (latent // LATENT_GROUP) + 2 * rope


def of_size(dtypes: Iterable[str], elem_bytes: int) -> str:
    """The first of these element types that has so many bytes."""
    return next(d for d in dtypes if ELEMENTS[d].bytes == elem_bytes)


def by_precision(dtypes: Iterable[str]) -> bool:
    """Whether products of some of these element types are computed as the module's precision says."""
    return any(not ELEMENTS[d].products for d in dtypes if d in ELEMENTS)


def result_of(dtype: str) -> str:
    """The element type of outputs where q, k and v have this one."""
    return ELEMENTS[dtype].results or dtype


def result_type(dtypes: Sequence[str]) -> str:
    """The IR's type of the outputs of a module for these element types, which agree on it: `T`, or the one that they
    name."""
    named = ELEMENTS[dtypes[0]].results if dtypes else ""
    return {"": "T", "fp32": "f32"}.get(named, named)


def agree(dtypes: Iterable[str]) -> bool:
    """Whether kernels and schedules are the same for all of these element types: outputs have one type in the IR,
    weights one factor, and products of as many bytes are computed in one way."""
    rows = [ELEMENTS[d] for d in dtypes]
    ways = {(row.bytes, row.products) for row in rows}
    return len({(row.results, row.weights) for row in rows}) <= 1 and len(ways) == len({size for size, _ in ways})
