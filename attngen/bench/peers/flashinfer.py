"""FlashInfer's decoding over pages, where it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attngen.bench.grids import Cell
from attngen.bench.peers.base import Call, importable
from attngen.masks.causal import Causal
from attngen.masks.none import NoMask
from attngen.masks.sliding_window import SlidingWindow
from attngen.scores.softcap import Softcap

if TYPE_CHECKING:
    import torch

    from attngen.bench.problem import Inputs, Problem

WORKSPACE = 2**27  # bytes, as its documentation has them
SHARED = 4  # query heads of a K/V head from which on its tensor cores pay, as SGLang and vLLM choose


def flashinfer_cannot(cell: Cell) -> str:
    mask = cell.spec.mask
    if not importable("flashinfer"):
        return "not installed"
    if not cell.page or cell.spec.rope:
        return "here over pages of keys and values alone"
    if cell.n_q > 1:
        return "one query of a sequence"
    if not isinstance(mask, NoMask) and not (isinstance(mask, (Causal, SlidingWindow)) and mask.align == "bottom_right"):
        return "no mask but causal, window and none"
    return "no score modifier but a softcap" if any(not isinstance(part, Softcap) for part in cell.spec.score) else ""


def flashinfer(problem: Problem) -> Call:
    """Its wrapper for one query of each sequence, planned before; q is [B, Hq, D], and the cache as `with_kvcache` takes it."""
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # type: ignore[import-not-found]

    c, mask = problem.cell, problem.cell.spec.mask
    lengths, table = problem.given["cache_seqlens"], problem.given["page_table"]
    used = (lengths + c.page - 1) // c.page
    ends = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    pages = table[torch.arange(table.shape[1], device=problem.device) < used[:, None]]
    options: dict[str, Any] = {"window_left": mask.left if isinstance(mask, SlidingWindow) else -1, "q_data_type": problem.dtype}
    options["logits_soft_cap"] = next((part.cap for part in c.spec.score if isinstance(part, Softcap)), None)
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=problem.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=c.heads >= SHARED * c.kv_heads)
    last = (lengths - 1) % c.page + 1
    wrapper.plan(ends, pages, last, c.heads, c.kv_heads, c.spec.head_dim.qk, c.page, **options)

    def forward(x: Inputs) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(x.q[:, :, 0], (x.k.transpose(1, 2), x.v.transpose(1, 2)))
        return out[:, :, None]

    return Call(forward)
