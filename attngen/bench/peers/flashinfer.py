"""FlashInfer's decoding with pages of keys and values, or of latents, if it is installed."""

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

WORKSPACE = 2**27  # bytes, from its documentation
SHARED = 4  # query heads per K/V head from which on it uses tensor cores, as in SGLang and vLLM


def flashinfer_cannot(cell: Cell) -> str:
    mask = cell.spec.mask
    if not importable("flashinfer"):
        return "not installed"
    if not cell.page:
        return "here only with pages"
    if cell.n_q > 1:
        return "one query of a sequence"
    if cell.spec.rope and (cell.spec.score or not isinstance(mask, (Causal, NoMask))):
        return "with latents, no window and no score modifier"
    if not isinstance(mask, NoMask) and not (
        isinstance(mask, (Causal, SlidingWindow)) and mask.align == "bottom_right"
    ):
        return "no mask but causal, window and none"
    return "no score modifier but a softcap" if any(not isinstance(part, Softcap) for part in cell.spec.score) else ""


def flashinfer(problem: Problem) -> Call:
    """Return its wrapper's call for one query of each sequence, planned in advance."""
    return _of_latents(problem) if problem.cell.spec.rope else _of_heads(problem)


def _of_heads(problem: Problem) -> Call:
    """Return the call with keys and values. q is [B, Hq, D], and the cache has the layout of `with_kvcache`."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # type: ignore[import-not-found]

    c, mask = problem.cell, problem.cell.spec.mask
    lengths, ends, pages = _pages(problem)
    options: dict[str, Any] = {
        "window_left": mask.left if isinstance(mask, SlidingWindow) else -1,
        "q_data_type": problem.dtype,
    }
    options["logits_soft_cap"] = next((part.cap for part in c.spec.score if isinstance(part, Softcap)), None)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(problem), "NHD", use_tensor_cores=c.heads >= SHARED * c.kv_heads
    )
    last = (lengths - 1) % c.page + 1
    wrapper.plan(ends, pages, last, c.heads, c.kv_heads, c.spec.head_dim.qk, c.page, **options)

    def forward(x: Inputs) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(x.q[:, :, 0], (x.k.transpose(1, 2), x.v.transpose(1, 2)))
        return out[:, :, None]

    return Call(forward)


def _of_latents(problem: Problem) -> Call:
    """Return the call with latents: q [B, Hq, D_v] and [B, Hq, rope], the cache [pages, page, D_v] and [pages, page,
    rope], views of ours."""
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-not-found]

    c, dim = problem.cell, problem.cell.spec.head_dim
    lengths, ends, pages = _pages(problem)
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(problem))
    wrapper.plan(
        qo_indptr=torch.arange(c.batch + 1, dtype=torch.int32, device=problem.device),
        kv_indptr=ends,
        kv_indices=pages,
        kv_len_arr=lengths,
        num_heads=c.heads,
        head_dim_ckv=dim.v,
        head_dim_kpe=c.spec.rope,
        page_size=c.page,
        causal=False,  # of one query
        sm_scale=dim.qk**-0.5,
        q_data_type=problem.dtype,
        kv_data_type=problem.dtype,
    )

    def forward(x: Inputs) -> torch.Tensor:
        q, k = x.q[:, :, 0], x.k[:, 0]
        out: torch.Tensor = wrapper.run(
            q_nope=q[..., : dim.v], q_pe=q[..., dim.v :], ckv_cache=k[..., : dim.v], kpe_cache=k[..., dim.v :]
        )
        return out[:, :, None]

    return Call(forward)


def _pages(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three int32 tensors: the number of keys of each sequence, where its pages end in a list of all used pages,
    and that list."""
    import torch

    lengths, table = problem.given["cache_seqlens"], problem.given["page_table"]
    used = (lengths + problem.cell.page - 1) // problem.cell.page
    ends = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    return lengths, ends, table[torch.arange(table.shape[1], device=problem.device) < used[:, None]]


def _workspace(problem: Problem) -> torch.Tensor:
    import torch

    return torch.empty(WORKSPACE, dtype=torch.uint8, device=problem.device)
