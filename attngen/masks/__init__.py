"""Masks, one file each. A new mask is a new file here: it is found by discovery, with no other edit.

A mask file holds one subclass of `Mask`: its parameters (pydantic fields), its run-time inputs, its expression over
`q_idx`, `kv_idx`, `Nq`, `Nk` and the inputs' names, and a hand-written eager oracle for the tests.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import sympy
from pydantic import BaseModel, ConfigDict
from sympy.core.relational import Relational

from attngen.ir.expr import Bool, conjuncts, symbol
from attngen.ir.graph import Blocks, Derived, Input

if TYPE_CHECKING:
    import torch

Q, KV, NQ, NK = symbol("q_idx"), symbol("kv_idx"), symbol("Nq"), symbol("Nk")

# The largest parameter that an expression may add to positions: kernels sum it, a position and a length in 32 bits, and calls
# keep positions and lengths below 2**29.
MAX_OFFSET = 2**30 - 1


def is_linear(expression: Bool) -> bool:
    """Whether the expression is a conjunction of comparisons: what classify-tiles can bound."""
    return all(isinstance(c, Relational) for c in conjuncts(expression))


class Mask(BaseModel):
    """Base of every mask. Fields of the subclass are the parameters that a spec may give."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str]
    functions: ClassVar[tuple[Callable[..., Any], ...]] = ()  # those that `derived` names; generated modules hold their source

    def inputs(self) -> tuple[Input, ...]:
        """Run-time tensors the mask reads; in the expression their names stand for the element at (b, h, q, kv)."""
        return ()

    def derived(self) -> tuple[Derived, ...]:
        """Scalars per sequence that one of `functions` computes from an input before the kernels run, for `needs` and `enough`."""
        return ()

    def blocks(self) -> Blocks | None:
        """Whole blocks of the score matrix that count, if the mask names them; the expression holds inside them."""
        return None

    def expression(self) -> Bool:
        """True where query q_idx may attend to key kv_idx."""
        raise NotImplementedError

    def needs(self) -> Bool:
        """A linear condition that holds wherever the parts of the expression that are not linear do."""
        return sympy.true

    def enough(self) -> Bool:
        """A linear condition under which the parts of the expression that are not linear hold; false if none is known."""
        return sympy.true if is_linear(self.expression()) else sympy.false

    def reference(self, n_q: int, n_kv: int, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        """The oracle: a bool tensor that broadcasts to [B, H, n_q, n_kv], written by hand, apart from `expression`."""
        raise NotImplementedError

    def describe(self) -> str:
        """One line for docs: the name, and the parameters that differ from their defaults."""
        given = self.model_dump(exclude_defaults=True)
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in given.items())})" if given else self.name


class AllOf(Mask):
    """Several masks at once: visible where every one of them says so."""

    name: ClassVar[str] = "all_of"
    masks: tuple[Mask, ...]

    def inputs(self) -> tuple[Input, ...]:
        return tuple({i.name: i for m in self.masks for i in m.inputs()}.values())

    def derived(self) -> tuple[Derived, ...]:
        return tuple({d.names: d for m in self.masks for d in m.derived()}.values())

    def blocks(self) -> Blocks | None:
        return next((m.blocks() for m in self.masks if m.blocks()), None)

    def expression(self) -> Bool:
        return sympy.And(*(m.expression() for m in self.masks))

    def needs(self) -> Bool:
        return sympy.And(*(m.needs() for m in self.masks))

    def enough(self) -> Bool:
        return sympy.And(*(m.enough() for m in self.masks))

    def reference(self, n_q: int, n_kv: int, device: torch.device, inputs: dict[str, Any]) -> torch.Tensor:
        first, *rest = (m.reference(n_q, n_kv, device, inputs) for m in self.masks)
        for mask in rest:
            first = first & mask
        return first

    def describe(self) -> str:
        return " and ".join(m.describe() for m in self.masks)


@cache
def registry() -> dict[str, type[Mask]]:
    """Every mask by name, from the files of this folder."""
    found: dict[str, type[Mask]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, Mask) and cls.__module__ == module.__name__:
                found[cls.name] = cls
    return dict(sorted(found.items()))


def derive_functions() -> dict[str, Callable[..., Any]]:
    """Every function that a mask declares, by name."""
    return {f.__name__: f for mask in registry().values() for f in mask.functions}
