"""The backends of torch's scaled_dot_product_attention (SDPA)."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import TYPE_CHECKING

from attngen.bench.cases.grids import Cell
from attngen.bench.peers.base import Call
from attngen.masks.causal import Causal
from attngen.masks.none import NoMask

if TYPE_CHECKING:
    import torch

    from attngen.bench.cases.problem import Inputs, Problem


def sdpa_cannot(cell: Cell, single: bool = False, masked: bool = True) -> str:
    """Return why a backend cannot do a cell. `single`: it takes fp32. `masked`: it takes a mask as a tensor, which it
    gets with a KV cache."""
    mask = cell.spec.mask
    if cell.spec.score:
        return "no score modifiers"
    if cell.cached:
        return "no pages" if cell.page else "" if masked or not _hides(cell) else "no mask as a tensor"
    if not isinstance(mask, (NoMask, Causal)):
        return "no mask but causal and none"
    if isinstance(mask, Causal) and cell.n_q != cell.n_kv and mask.align == "bottom_right":
        return "its causal is top-left"
    return "no fp32" if cell.dtype == "fp32" and not single else ""


def _numbers(visible: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask as numbers that are added to scores. From booleans SDPA would compute them again in each call."""
    return None if visible is None else visible.new_zeros(visible.shape, dtype=dtype).masked_fill(~visible, -math.inf)


def _hides(cell: Cell) -> bool:
    """True if some query sees fewer than all `n_kv` rows of the KV cache. Under a causal mask, the only query of a
    sequence sees all its keys."""
    mask = cell.spec.mask
    last = isinstance(mask, Causal) and mask.align == "bottom_right" and cell.n_q == 1
    return bool(cell.asked("ragged")) or not (last or isinstance(mask, NoMask))


def sdpa(backend: str, problem: Problem) -> Call:
    """Return SDPA's call with one backend. A backend that needs as many K/V heads as query heads gets expanded ones."""
    import torch
    from torch.backends.cuda import (
        SDPAParams,
        can_use_cudnn_attention,
        can_use_efficient_attention,
        can_use_flash_attention,
    )
    from torch.nn.attention import SDPBackend, sdpa_kernel

    usable = {
        "flash": can_use_flash_attention,
        "cudnn": can_use_cudnn_attention,
        "efficient": can_use_efficient_attention,
    }
    kind = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}[
        backend
    ]
    c, group = problem.cell, problem.cell.heads // problem.cell.kv_heads
    mask = _numbers(problem.visible(), problem.dtype) if c.cached else None
    causal = isinstance(c.spec.mask, Causal) and not c.cached
    p = c.asked("dropout_p")
    around = partial(sdpa_kernel, getattr(SDPBackend, kind))
    one = problem.make_inputs(0)
    with around():
        expands = (
            group > 1
            and backend != "math"
            and not usable[backend](SDPAParams(one.q, one.k, one.v, mask, p, causal, True))
        )

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)

    def forward(x: Inputs) -> torch.Tensor:
        k, v = (repeated(x.k), repeated(x.v)) if expands else (x.k, x.v)
        gqa = group > 1 and not expands
        return torch.nn.functional.scaled_dot_product_attention(
            x.q, k, v, mask, dropout_p=p, is_causal=causal, enable_gqa=gqa
        )

    with around(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            forward(one)
        except RuntimeError as error:
            raise RuntimeError(_reason([str(w.message) for w in caught]) or str(error)) from error
    notes = ["K/V heads repeated for it"] * expands
    if mask is not None:
        notes.append(f"mask as a tensor, all {problem.set_bytes / 2**20:.0f} MiB of the cache read")
    return Call(forward, around, "; ".join(notes))


def _reason(messages: list[str]) -> str:
    """Return why torch cannot use a backend, from its warnings. Those about other backends say that they are
    disabled."""
    reasons = (text.partition(" (Triggered")[0].strip() for text in messages)
    return next((text for text in reasons if "not used because" not in text and "disabled" not in text), "")
