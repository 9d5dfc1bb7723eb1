"""A cell with its data on a device: inputs of calls, inputs of masks and modifiers, and the number of visible pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from attngen.bench.cases.flex import Mods, mods
from attngen.bench.cases.grids import Cell
from attngen.conformance.cases import make_workload, torch_dtype
from attngen.conformance.oracle import reference_mask, reference_scores
from attngen.ir.sizes import Sizes
from attngen.masks.none import NoMask


@dataclass(frozen=True)
class Inputs:
    """One set of tensors: q, k, v, the spec's inputs with gradients, and the gradient of the output.

    None requires a gradient if the spec has no backward.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    learned: tuple[torch.Tensor, ...]
    grad: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """The tensors for which the backward computes gradients."""
        return (self.q, self.k, self.v, *self.learned)

    def gradients(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the backward of a call on this set, which can run again; empty if the spec has none."""
        if not self.q.requires_grad:
            return ()
        return torch.autograd.grad(out, self.leaves, self.grad, retain_graph=True)


@dataclass(frozen=True, eq=False)
class Problem:
    """A cell on a device. `folder` holds the generated module of its spec. Data is the same in every process."""

    cell: Cell
    device: str
    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.cell.dtype)

    @property
    def sizes(self) -> Sizes:
        c = self.cell
        return Sizes(c.batch, c.heads, c.kv_heads, c.n_q, c.n_kv)

    @cached_property
    def given(self) -> dict[str, Any]:
        """The inputs of mask and modifiers, by name, the same for all sets of q, k and v."""
        found = make_workload(self.cell.spec, self.sizes, self.dtype, self.device) | self._asked()
        for i in self.cell.spec.learned():
            found[i.name].requires_grad_()
        return found

    @property
    def learned(self) -> tuple[torch.Tensor, ...]:
        """The inputs of mask and modifiers with gradients."""
        return tuple(self.given[i.name] for i in self.cell.spec.learned())

    def _asked(self) -> dict[str, torch.Tensor]:
        """Return the inputs that the cell's `call` determines."""
        c, found = self.cell, {}
        if rows := int(c.asked("document")):
            for i in c.spec.inputs():
                if i.dtype == "i32":
                    found[i.name] = (torch.arange(c.n_kv, device=self.device, dtype=torch.int32) // rows).repeat(
                        c.batch, 1
                    )
        blocks = c.spec.mask.blocks()
        if blocks and (share := int(c.asked("share"))):
            rows_q, rows_kv = (torch.arange(-(-n // blocks.size), device=self.device) for n in (c.n_q, c.n_kv))
            found["block_mask"] = (rows_q[:, None] + rows_kv) % share == 0
        return found

    @cached_property
    def mods(self) -> Mods:
        """The mask and the scores as functions of positions."""
        return mods(self.cell.spec, self.sizes, self.given, self.device)

    def pairs(self) -> int:
        """Return the number of visible (query, key) pairs in all sequences and query heads."""
        return self.mods.visible_pairs(self.sizes, self.device)

    @property
    def read_bytes(self) -> int:
        """Bytes of K and V that a forward must read."""
        c, dim = self.cell, self.cell.spec.head_dim
        return self.dtype.itemsize * c.batch * c.kv_heads * c.n_kv * (dim.qk + dim.v)

    def visible(self) -> torch.Tensor | None:
        """Return which keys each query sees: bool, four dimensions, broadcastable to [B, Hq, n_q, n_kv]; None if all
        are visible."""
        if isinstance(self.cell.spec.mask, NoMask):
            return None
        one = self.make_inputs(0)
        return reference_mask(self.cell.spec.mask, one.q, one.k, self.given)

    def scores(self) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, torch.Tensor | None]:
        """Return (the modifiers as a function of scores [B, Hq, n_q, n_kv], the sink's logits [Hq]); None for each that
        the spec lacks."""
        one = self.make_inputs(0)
        return reference_scores(self.cell.spec.score, one.q, one.k, self.given)

    def rows(self, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v of a set, [B, Hkv, n_kv, D]."""
        return x.k, x.v

    def make_inputs(self, number: int) -> Inputs:
        """Return a set of normal values, the same for the same number."""
        c, dim = self.cell, self.cell.spec.head_dim
        generator = torch.Generator(self.device).manual_seed(number)

        def normal(heads: int, rows: int, width: int) -> torch.Tensor:
            return torch.randn(c.batch, heads, rows, width, generator=generator, device=self.device).to(self.dtype)

        q, k, v = normal(c.heads, c.n_q, dim.qk), normal(c.kv_heads, c.n_kv, dim.qk), normal(c.kv_heads, c.n_kv, dim.v)
        grad = normal(c.heads, c.n_q, dim.v)
        q, k, v = (x.requires_grad_(c.spec.trains) for x in (q, k, v))
        return Inputs(q, k, v, self.learned, grad)

    @property
    def set_bytes(self) -> int:
        """Bytes of one set."""
        c, dim = self.cell, self.cell.spec.head_dim
        rows_q, rows_kv = c.batch * c.heads * c.n_q, c.batch * c.kv_heads * c.n_kv
        return self.dtype.itemsize * (rows_q + rows_kv) * (dim.qk + dim.v)
