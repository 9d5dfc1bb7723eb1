"""Pictures of masks, element by element, computed by the masks' hand-written references on sample data, so that a
reader can check a formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import sympy

from attngen.ir import Input
from attngen.ir.heads import SHARINGS
from attngen.ir.sizes import Sizes
from attngen.masks import Mask, Written
from attngen.masks.none import NoMask
from attngen.report.charts import Drawing, element_map
from attngen.spec import Spec

if TYPE_CHECKING:
    import torch

SIDE = 24  # queries and keys of a picture
LARGEST = 4096  # most rows of the mask from which a second excerpt is taken
STRIPES = {"i32": 5, "b1": 8}  # number of stripes along the rows in sample data of an expression, by element type
SEQUENCES, HEADS = 2, 4  # in the sample


@dataclass(frozen=True)
class Picture:
    """An excerpt of a mask, with remarks; seen[i][j] is whether query q0 + i sees key k0 + j."""

    name: str
    q0: int
    k0: int
    seen: list[list[bool]]
    remarks: list[str]

    @property
    def drawing(self) -> Drawing:
        return element_map(self.name, self.seen, self.q0, self.k0)

    def rows(self) -> Iterator[list[str]]:
        """Yield rows of a table: a query, and the keys that it sees."""
        for q, row in enumerate(self.seen, self.q0):
            spans = [
                (key, [k for k, _ in group]) for key, group in groupby(enumerate(row, self.k0), lambda pair: pair[1])
            ]
            runs = [f"{keys[0]} .. {keys[-1]}" if len(keys) > 1 else str(keys[0]) for visible, keys in spans if visible]
            yield [str(q), ", ".join(runs) or "none"]


@dataclass(frozen=True)
class Sample:
    """A spec's mask on sample data, which is the same in every process."""

    spec: Spec

    def inputs(self, sizes: Sizes) -> dict[str, Any]:
        """Return sample inputs of the mask. Tensors by position that an expression reads hold document numbers (i32) or
        stripes (b1)."""
        import torch

        from attngen.conformance.cases import make_mask_inputs

        found = make_mask_inputs(self.spec, sizes, torch.float32, "cpu", torch.Generator().manual_seed(0))
        for part in _written(self.spec.mask):
            for i in part.inputs():
                if _is_striped(i):
                    found[i.name] = _striped([sizes.of(d) for d in i.shape], i.shape, i.dtype)
        return found

    def mask(self, sizes: Sizes, inputs: dict[str, Any] | None = None) -> torch.Tensor:
        """Return the reference's mask, bool [B, Hq, Nq, Nk]."""
        import torch

        found = self.spec.mask.reference(sizes, torch.device("cpu"), self.inputs(sizes) if inputs is None else inputs)
        return found.expand(sizes.batch, sizes.q_heads, sizes.n_q, sizes.n_kv)

    def blocks(self, n: int, size: int) -> list[list[int]]:
        """Return the number of visible elements in each block of size x size scores, for the first head, with n queries
        and n keys."""
        import torch

        mask = self.mask(Sizes(1, 1, 1, n, n))[0, 0]
        side = -(-n // size)
        padded = torch.nn.functional.pad(mask.int(), (0, side * size - n, 0, side * size - n))
        counts: list[list[int]] = padded.view(side, size, side, size).sum((1, 3)).tolist()
        return counts

    def listed(self, n: int, size: int) -> list[list[bool]]:
        """Return the sample's `block_mask` for the first head, with n queries and n keys."""
        table = self.inputs(Sizes(1, 1, 1, n, n))["block_mask"][0, 0]
        found: list[list[bool]] = table.tolist()
        return found

    @cached_property
    def pictures(self) -> list[Picture]:
        """A picture of the first elements, and a second one if the mask has an edge outside the first."""
        if isinstance(self.spec.mask, NoMask):
            return []
        sizes = Sizes(SEQUENCES, HEADS, SHARINGS[self.spec.heads.sharing].kv_heads(HEADS, 2), SIDE, SIDE)
        inputs = self.inputs(sizes)
        mask = self.mask(sizes, inputs)
        remarks = [f"{SIDE} queries and {SIDE} keys; blue elements are visible."]
        differs = [
            word for word, axis in (("sequences", 0), ("heads", 1)) if not bool((mask == mask.narrow(axis, 0, 1)).all())
        ]
        remarks.append(
            f"The first head of the first sequence; other {' and '.join(differs)} differ."
            if differs
            else "All heads are alike."
        )
        if SHARINGS[self.spec.heads.sharing].is_shared:
            remarks.append("Query heads that share a K/V head see through this mask each by itself.")
        remarks += [f"Sample: {value}." for value in self._values(inputs)]
        reach = self._reach()
        if reach > LARGEST - SIDE:
            remarks.append(f"The mask has numbers up to {reach}; edges so far away are not drawn.")
        first = Picture("the first elements", 0, 0, mask[0, 0].tolist(), remarks)
        return [first, *(self._further(reach) if SIDE <= reach <= LARGEST - SIDE else [])]

    def _reach(self) -> int:
        """Return the largest integer in the mask's expression; with blocks, at least the rows of 8 blocks."""
        blocks = self.spec.mask.blocks()
        numbers = [abs(int(i)) for i in self.spec.mask.expression().atoms(sympy.Integer)]
        return max([*numbers, 8 * blocks.size if blocks else 0])

    def _values(self, inputs: dict[str, Any]) -> Iterator[str]:
        """Yield a text for each input of the mask, for the first sequence and head: the values of numbers and vectors,
        or how the values were made."""
        striped = {i.name for part in _written(self.spec.mask) for i in part.inputs() if _is_striped(i)}
        for i in (i for i in self.spec.mask.inputs() if not i.is_size):
            value, first = inputs[i.name], 0
            while first < len(i.shape) and i.shape[first] in ("B", "Hq", "Hkv"):
                value, first = value[0], first + 1
            name = f"{i.name}[{', '.join('0' * first)}]" if first else i.name
            if not hasattr(value, "dim") or value.dim() == 0:
                yield f"{name} = {float(value):g}"
            elif value.dim() == 1:
                yield f"{name} = {' '.join(f'{float(x):.4g}' for x in value)}"
            elif i.name in striped:
                stripes = " + ".join(f"{letter} * {STRIPES[i.dtype]} // {SIDE}" for letter in "qk")
                yield f"{name}[q, k] = {f'({stripes}) % 4 != 3' if i.dtype == 'b1' else stripes}"
            else:
                yield f"{name} is random"

    def _further(self, reach: int) -> list[Picture]:
        """Return a picture across the sharpest edge away from the diagonal, in a mask of more than `reach` rows; none
        if there is no such edge."""
        n = 1 << (reach + SIDE).bit_length()
        mask = self.mask(Sizes(1, 1, 1, n, n))[0, 0]
        step = SIDE // 2
        quarters = mask.unfold(0, step, step).unfold(1, step, step).float().mean((2, 3)).unfold(0, 2, 1).unfold(1, 2, 1)
        edges = quarters.amax((2, 3)) - quarters.amin((2, 3))
        found = [
            (-edge, q * step, k * step)
            for q, row in enumerate(edges.tolist())
            for k, edge in enumerate(row)
            if edge > 0 and abs(q - k) * step >= SIDE
        ]
        if not found:
            return []
        _, q0, k0 = min(found)
        seen = mask[q0 : q0 + SIDE, k0 : k0 + SIDE].tolist()
        return [
            Picture(
                "elements further on",
                q0,
                k0,
                seen,
                [f"The same of {n} queries and keys, from query {q0} and key {k0} on."],
            )
        ]


def _written(mask: Mask) -> Iterator[Written]:
    """Yield the parts of a mask that a spec writes as expressions."""
    if isinstance(mask, Written):
        yield mask
    for part in getattr(mask, "masks", ()):
        yield from _written(part)


def _is_striped(i: Input) -> bool:
    """True if an input is a tensor of integers or bits with one element per query or key."""
    return bool(i.shape) and i.shape[-1] in ("Nq", "Nk") and i.dtype in STRIPES


def _striped(shape: list[int], dims: tuple[Any, ...], dtype: str) -> torch.Tensor:
    """Return sample data: integers number five documents along the rows, bits form stripes. With both a query and a key
    dimension, the numbers of both are added."""
    import torch

    along = [torch.arange(n).view([-1 if i == axis else 1 for i in range(len(shape))]) for axis, n in enumerate(shape)]
    found = torch.zeros(shape, dtype=torch.int32)
    for x, n, d in zip(along, shape, dims):
        if d in ("Nq", "Nk"):
            found += (x * STRIPES[dtype] // max(1, n)).int()
    return found if dtype == "i32" else found % 4 != 3
