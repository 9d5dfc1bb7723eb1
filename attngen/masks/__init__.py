"""Masks, one file each. A new mask is a new file here; it is found by discovery, with no other edit.

A mask file holds one subclass of `Mask`: its parameters (pydantic fields), its run-time inputs, its expression over
`q_idx`, `kv_idx`, `Nq`, `Nk`, `b`, `h` and the inputs' names, and a hand-written eager oracle for the tests.
"""

from __future__ import annotations

import ast
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import sympy

from attngen.ir import Blocks, Bool, Derived, Fact, Input, Read, floordiv
from attngen.ir.sizes import Sizes
from attngen.lang.expression import Expression, parse_mask
from attngen.lang.part import KV, MAX_OFFSET, NK, NQ, Part, Q, WrittenPart, discover, evaluated, unique

if TYPE_CHECKING:
    import torch

__all__ = ["KV", "MAX_OFFSET", "NK", "NQ", "AllOf", "AnyOf", "Mask", "Not", "Q", "Sizes", "Written", "registry"]


class Mask(Part):
    """Base of every mask. A spec may set the fields of the subclass as parameters."""

    def blocks(self) -> Blocks | None:
        """The visible blocks of scores, if the mask names whole blocks, else None; inside them the expression holds."""
        return None

    def names_blocks(self) -> bool:
        """True if the mask, or a part of it, names whole blocks."""
        return False

    def unlisted(self) -> Mask:
        """The same mask as a condition without block lists.

        Needed under `any_of` or `not`, where other parts may show the blocks that it hides.
        """
        return self

    def expression(self) -> Bool:
        """True where query q_idx may attend to key kv_idx."""
        raise NotImplementedError

    def by_key(self) -> Bool:
        """The same condition for kernels whose programs own keys: in terms of tensors over keys, if the mask has
        any."""
        return self.expression()

    def facts(self) -> tuple[Fact, ...]:
        """Bounds of the parts of the expression that depend on data.

        For a part without a fact, a kernel lists blocks.
        """
        return ()

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        """The oracle, written by hand and independent of `expression`: a bool tensor that broadcasts to [B, H, n_q,
        n_kv]."""
        raise NotImplementedError


class Written(WrittenPart, Mask):
    """A mask that a spec writes out as an expression with parameters."""

    @cached_property
    def parsed(self) -> Expression:
        return parse_mask(self.expr, self.params, self.let)

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        return evaluated(self.parsed, sizes, device, inputs)


class Compound(Mask):
    """A combination of several masks."""

    masks: tuple[Mask, ...]

    def inputs(self) -> tuple[Input, ...]:
        return unique(i for m in self.masks for i in m.inputs())

    def derived(self) -> tuple[Derived, ...]:
        return unique(d for m in self.masks for d in m.derived())

    def reads(self) -> tuple[Read, ...]:
        return unique(r for m in self.masks for r in m.reads())

    def blocks(self) -> Blocks | None:
        return next((m.blocks() for m in self.masks if m.blocks()), None)

    def names_blocks(self) -> bool:
        return any(m.names_blocks() for m in self.masks)

    def unlisted(self) -> Mask:
        return self.model_copy(update={"masks": tuple(m.unlisted() for m in self.masks)})

    def facts(self) -> tuple[Fact, ...]:
        return unique(f for m in self.masks for f in m.facts())

    def sample(self, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor | float]:
        return {name: value for m in self.masks for name, value in m.sample(sizes, generator).items()}

    def workload(self, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor | float]:
        return {name: value for m in self.masks for name, value in m.workload(sizes, generator).items()}

    def notes(self) -> tuple[str, ...]:
        return unique(note for m in self.masks for note in m.notes())

    def _wrapped(self, m: Mask) -> str:
        """A part's text, in brackets if it combines several conditions."""
        several = isinstance(m, (AllOf, AnyOf)) or (
            isinstance(m, Written) and (m.let or isinstance(m.parsed.tree.body, ast.BoolOp))
        )
        return f"({m.describe()})" if several else m.describe()

    def data(self) -> Any:
        return {self.name: [m.data() for m in self.masks]}


class AllOf(Compound):
    """Visible where all masks are."""

    name: ClassVar[str] = "all_of"

    def expression(self) -> Bool:
        return sympy.And(*(m.expression() for m in self.masks))

    def by_key(self) -> Bool:
        return sympy.And(*(m.by_key() for m in self.masks))

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        first, *rest = (m.reference(sizes, device, inputs) for m in self.masks)
        for mask in rest:
            first = first & mask
        return first

    def describe(self) -> str:
        return " and ".join(map(self._wrapped, self.masks))


class AnyOf(Compound):
    """Visible where at least one mask is."""

    name: ClassVar[str] = "any_of"

    def expression(self) -> Bool:
        return sympy.Or(*(m.expression() for m in self.masks))

    def by_key(self) -> Bool:
        return sympy.Or(*(m.by_key() for m in self.masks))

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        first, *rest = (m.reference(sizes, device, inputs) for m in self.masks)
        for mask in rest:
            first = first | mask
        return first

    def describe(self) -> str:
        return " or ".join(map(self._wrapped, self.masks))


class Not(Compound):
    """Visible where the mask is not."""

    name: ClassVar[str] = "not"

    def expression(self) -> Bool:
        return sympy.Not(self.masks[0].expression())

    def by_key(self) -> Bool:
        return sympy.Not(self.masks[0].by_key())

    def reference(self, sizes: Sizes, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        return ~self.masks[0].reference(sizes, device, inputs)

    def describe(self) -> str:
        return f"not {self._wrapped(self.masks[0])}"

    def data(self) -> Any:
        return {self.name: self.masks[0].data()}


def union_note(mask: Mask) -> str | None:
    """A warning, to follow the key's name, about a union that shows later keys although some of its parts are causal;
    else None.

    A mask of the library that is such a union itself, such as `prefix_lm`, gets none.
    """
    if _is_causal(mask.expression()):
        return None
    if isinstance(mask, AnyOf):
        causal = [_is_causal(m.expression()) for m in mask.masks]
        if any(causal) and not all(causal):
            parts = ", ".join(f"`{m.describe()}`" for m, hides in zip(mask.masks, causal) if not hides)
            return (
                f"is a union in which some parts hide keys after the query, but {parts} shows them; "
                "if that is not meant, write {all_of: [causal, {any_of: [...]}]}"
            )
    if isinstance(mask, (AllOf, AnyOf)):
        return next((note for m in mask.masks if (note := union_note(m))), None)
    return None


def _is_causal(where: Any) -> bool:
    """True if a condition bounds keys by the query's position."""
    if isinstance(where, sympy.And):
        return any(map(_is_causal, where.args))
    if isinstance(where, sympy.Or):
        return all(map(_is_causal, where.args))
    if not isinstance(where, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)):
        return False
    # a quotient bounds positions as its floor does
    margin = sympy.expand((where.gts - where.lts).replace(floordiv, lambda x, n: x / n))
    of_query, of_key = margin.coeff(Q), margin.coeff(KV)
    return bool(of_query.is_number and of_key.is_number and of_query > 0 > of_key)


@cache
def registry() -> dict[str, type[Mask]]:
    """Every named mask by name, from the files of this folder."""
    return discover(__name__, __path__, Mask)
