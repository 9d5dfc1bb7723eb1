"""Cells with a KV cache: the number of keys of each sequence, their memory layout, and the bytes that must be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from attngen.bench.cases.flex import Mods, mods
from attngen.bench.cases.functions import FunctionProblem
from attngen.bench.cases.grids import Cell
from attngen.bench.cases.problem import Inputs, Problem
from attngen.conformance.kv_cache import latent_rows, latents_of
from attngen.conformance.oracle import reference_scores
from attngen.ir.dtypes import latent_bytes

AT_ONCE = 1024  # pages, or sequences, whose latents are rounded together
# Scale of 8-bit numbers: normal values over it are below 448, and the products are exact in 16 bits.
FACTOR = 2.0**-6


def problem_of(cell: Cell, device: str, folder: Path) -> Problem:
    """Return a cell on a device: with a KV cache, of a function for FlexAttention, or of a module's call."""
    return (CacheProblem if cell.cached else FunctionProblem if cell.asked("function") else Problem)(
        cell, device, folder
    )


@dataclass(frozen=True, eq=False)
class CacheProblem(Problem):
    """A cell with a KV cache. `given` has the arguments of `attention.with_kvcache` other than q and the cache, the
    same for all sets.

    k and v of a set are the cache, with shape [B, Hkv, n_kv, D] or [pages, Hkv, page, D]. In memory rows are outside
    heads, as `with_kvcache` expects. For a latent, v is the first elements of k; for rows of bytes, v is k.
    """

    @cached_property
    def lengths(self) -> list[int]:
        """Number of keys of each sequence."""
        c, generator = self.cell, torch.Generator().manual_seed(0)
        found: list[int] = torch.randint(
            int(c.asked("ragged")) or c.n_kv, c.n_kv + 1, (c.batch,), generator=generator
        ).tolist()
        return found

    @cached_property
    def used(self) -> list[int]:
        """Number of pages of each sequence."""
        return [-(-n // self.cell.page) for n in self.lengths]

    @property
    def pages(self) -> int:
        """Number of pages of all sequences."""
        return sum(self.used)

    @cached_property
    def page_table(self) -> torch.Tensor:
        """Page indices in random order: int32 [B, pages of n_kv keys]; 0 past the last page of a sequence."""
        numbers = torch.randperm(self.pages, generator=torch.Generator().manual_seed(0)).int()
        table = torch.zeros(self.cell.batch, -(-self.cell.n_kv // self.cell.page), dtype=torch.int32)
        for row, indices in zip(table, numbers.split(self.used)):
            row[: len(indices)] = indices
        return table.to(self.device)

    @cached_property
    def given(self) -> dict[str, Any]:
        c = self.cell
        room = self.page_table.shape[1] * c.page if c.page else c.n_kv
        found = {**super().given, "cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32, device=self.device)}
        found |= {"page_table": self.page_table} if c.page else {}
        of_keys = [i.name for i in c.spec.inputs() if i.shape[-1:] == ("Nk",)]
        found |= {name: pad(found[name], (0, room - c.n_kv)) for name in of_keys if room > c.n_kv}
        return found | (
            dict.fromkeys(("k_scale", "v_scale"), self.factors) if c.quantised and not self.of_latents else {}
        )

    @property
    def of_latents(self) -> bool:
        """True if the cache holds 8-bit latents, whose rows are bytes."""
        return self.cell.spec.factors == "columns"

    @cached_property
    def factors(self) -> torch.Tensor:
        """Scales of 8-bit numbers: one per K/V head, or per page and head."""
        cache = self.cell.spec.cache
        shape = (self.pages, self.cell.kv_heads) if cache and cache.scale == "page" else (self.cell.kv_heads,)
        return torch.full(shape, FACTOR, device=self.device)

    @cached_property
    def mods(self) -> Mods:
        """The mask and the scores as functions of positions, with constant sizes if all sequences have `n_kv` keys in
        whole pages."""
        whole = {self.cell.n_kv} == set(self.lengths) and self.cell.n_kv % (self.cell.page or 1) == 0
        given = {name: x for name, x in self.given.items() if not (whole and name == "cache_seqlens")}
        return mods(self.cell.spec, self.sizes, given, self.device)

    @property
    def key_bytes(self) -> int:
        """Bytes of K and V in the cache per key and K/V head."""
        dim = self.cell.spec.head_dim
        if self.of_latents:
            return latent_bytes(dim.v, self.cell.spec.rope)
        return (dim.qk + (0 if self.cell.spec.rope else dim.v)) * (1 if self.cell.quantised else self.dtype.itemsize)

    @property
    def read_bytes(self) -> int:
        """Bytes of K and V that some query sees; with a window only those inside it."""
        return self.mods.visible_keys(self.sizes, self.device) * self.key_bytes

    @property
    def set_bytes(self) -> int:
        c = self.cell
        keys = self.pages * c.page if c.page else c.batch * c.n_kv
        return keys * c.kv_heads * self.key_bytes

    def make_inputs(self, number: int) -> Inputs:
        c, dim = self.cell, self.cell.spec.head_dim
        generator = torch.Generator(self.device).manual_seed(number)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        def stored(width: int) -> torch.Tensor:
            rows = (self.pages, c.page) if c.page else (c.batch, c.n_kv)
            made = normal(*rows, c.kv_heads, width)
            if self.of_latents:
                return torch.cat([latent_rows(part, dim.v)[0] for part in made.split(AT_ONCE)]).transpose(1, 2)
            return ((made / FACTOR).to(torch.float8_e4m3fn) if c.quantised else made).transpose(1, 2)

        q, k = normal(c.batch, c.heads, c.n_q, dim.qk), stored(dim.qk)
        v = k if self.of_latents else k[..., : dim.v] if c.spec.rope else stored(dim.v)
        return Inputs(q, k, v, (), q)  # no gradient of the output is read

    def visible(self) -> torch.Tensor | None:
        """Return which keys each query sees: bool, four dimensions, broadcastable to [B, Hq, n_q, n_kv]; None if all
        are visible."""
        if self.mods.mask is None:
            return None
        c = self.cell
        mask: torch.Tensor = self.mods.mask(
            *self._positions(c.batch if self.mods.by_batch else 1, c.heads if self.mods.by_head else 1)
        )
        return None if bool(mask.all()) else mask

    def scores(self) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, torch.Tensor | None]:
        modify, unread = self.mods.score, torch.empty(0)
        _, sink = reference_scores(self.cell.spec.score, unread, unread, self.given)
        return (None if modify is None else lambda s: modify(s, *self._positions(*s.shape[:2]))), sink

    def _positions(self, batch: int, heads: int) -> list[torch.Tensor]:
        """Return the indices of sequences, heads, queries and keys, each along its dimension of the scores."""
        sizes = (batch, heads, self.cell.n_q, self.cell.n_kv)
        return [
            torch.arange(n, device=self.device).view([-1 if i == axis else 1 for i in range(4)])
            for axis, n in enumerate(sizes)
        ]

    def rows(self, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v of a set, [B, Hkv, n_kv, D]: copies of pages, and 8-bit numbers in the cell's dtype."""
        k, v = (self._widened(y) for y in (x.k, x.v)) if self.cell.quantised else (x.k, x.v)
        v = v[..., : self.cell.spec.head_dim.v]
        if not self.cell.page:
            return k, v
        k, v = (y[self.page_table].transpose(2, 3).flatten(1, 2)[:, : self.cell.n_kv].transpose(1, 2) for y in (k, v))
        return k, v

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        if self.of_latents:
            return latents_of(x, self.cell.spec.head_dim.v, self.dtype)
        return x.to(self.dtype) * FACTOR
