"""FlashAttention-4, if it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attngen.bench.cases.grids import Cell
from attngen.bench.peers.base import Call, importable
from attngen.masks.causal import Causal
from attngen.masks.none import NoMask
from attngen.masks.sliding_window import SlidingWindow
from attngen.scores.softcap import Softcap

if TYPE_CHECKING:
    import torch

    from attngen.bench.cases.problem import Inputs, Problem


def fa4_cannot(cell: Cell) -> str:
    mask = cell.spec.mask
    if not importable("flash_attn.cute"):
        return "not installed"
    if not isinstance(mask, (NoMask, Causal, SlidingWindow)):
        return "no mask but causal, window and none"
    if isinstance(mask, (Causal, SlidingWindow)) and cell.n_q != cell.n_kv and mask.align != "bottom_right":
        return "its masks are bottom-right"
    if any(not isinstance(part, Softcap) for part in cell.spec.score) or len(cell.spec.score) > 1:
        return "no score modifier but a softcap"
    return "no fp32" if cell.dtype == "fp32" else ""


def fa4(problem: Problem) -> Call:
    """Return flash-attn-4's call. Its layout is [B, N, H, D], so it gets views."""
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    mask = problem.cell.spec.mask
    options: dict[str, Any] = {"causal": isinstance(mask, Causal)}
    if isinstance(mask, SlidingWindow):
        options["window_size"] = (mask.left, mask.right)
    options["softcap"] = next((part.cap for part in problem.cell.spec.score if isinstance(part, Softcap)), 0.0)

    def forward(x: Inputs) -> torch.Tensor:
        found = flash_attn_func(*(y.transpose(1, 2) for y in (x.q, x.k, x.v)), **options)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return Call(forward)
