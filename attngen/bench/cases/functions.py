"""Cells of functions that people write for FlexAttention (mods/). Both sides get the functions, ours by
`attngen.flex_attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from attngen.bench.cases.flex import Mods
from attngen.bench.cases.grids import Cell, cell
from attngen.bench.cases.problem import Problem
from attngen.bench.mods import MODS, Case, Made, Mod
from attngen.frontends.specs import spec_from_mods
from attngen.frontends.trace import occurs, trace
from attngen.ir.sizes import Sizes
from attngen.spec import parse_spec

HEAD_DIM, DTYPE = 128, "bf16"
PREFIX = "mod_"  # prefix of the specs' names


def mod_of(c: Cell) -> Mod:
    """Return the function of a cell."""
    return MODS[c.spec.name.removeprefix(PREFIX)]


def cell_of(grid: str, mod: Mod, case: Case) -> Cell:
    """Return the cell of a function at the sizes of one of its cases, with the spec traced from the function."""
    sizes = case.sizes
    made = mod.make(sizes, "cpu", torch.Generator().manual_seed(0))
    sharing = "mha" if sizes.q_heads == sizes.kv_heads else "mqa" if sizes.kv_heads == 1 else "gqa"
    text = spec_from_mods(
        made.score_mod,
        made.mask_mod,
        name=PREFIX + mod.name,
        head_dim=HEAD_DIM,
        sharing=sharing,
        dtype=(DTYPE,),
        sizes=sizes,
    )
    batch, heads, kv_heads, n_q, n_kv = sizes
    return cell(grid, parse_spec(text), n_q, n_kv, batch=batch, heads=heads, kv_heads=kv_heads, call={"function": 1})


@dataclass(frozen=True, eq=False)
class FunctionProblem(Problem):
    """A cell of a function on a device."""

    @cached_property
    def made(self) -> Made:
        """The function; its data is the same in every process with the same kind of device."""
        return mod_of(self.cell).make(Sizes(*self.sizes), self.device, torch.Generator(self.device).manual_seed(0))

    @property
    def given(self) -> dict[str, Any]:
        """No inputs: the function holds the tensors that it reads."""
        return {}

    @property
    def learned(self) -> tuple[torch.Tensor, ...]:
        return self.made.learned

    @cached_property
    def mods(self) -> Mods:
        text = trace(None, self.made.mask_mod).of_mask
        return Mods(self.made.mask_mod, self.made.score_mod, occurs("b", text), occurs("h", text))

    def block_mask(self) -> Any:
        """Return FlexAttention's block mask, or None if everything is visible."""
        from torch.nn.attention.flex_attention import create_block_mask

        if self.mods.mask is None:
            return None
        c = self.cell
        sizes = (c.batch if self.mods.by_batch else None, c.heads if self.mods.by_head else None, c.n_q, c.n_kv)
        return create_block_mask(self.mods.mask, *sizes, device=self.device)

    def visible(self) -> torch.Tensor | None:
        if self.made.mask_mod is None:
            return None
        seen: torch.Tensor = mod_of(self.cell).reference(self.made, Sizes(*self.sizes))
        return seen.view(*(1,) * (4 - seen.dim()), *seen.shape)

    def pairs(self) -> int:
        c, seen = self.cell, self.visible()
        whole = c.batch * c.heads * c.n_q * c.n_kv
        return whole if seen is None else int(seen.sum()) * (whole // seen.numel())

    def scores(self) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, torch.Tensor | None]:
        if self.made.score_mod is None:
            return None, None
        return mod_of(self.cell).reference(self.made, Sizes(*self.sizes)), None


def ours(problem: FunctionProblem) -> Callable[[Any], torch.Tensor]:
    """Return the function's call by attngen, with its block mask made in advance."""
    from attngen import flex_attention

    shared = problem.cell.heads != problem.cell.kv_heads
    call = partial(flex_attention, score_mod=problem.made.score_mod, block_mask=problem.block_mask(), enable_gqa=shared)
    return lambda x: call(x.q, x.k, x.v)
