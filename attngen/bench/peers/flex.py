"""FlexAttention, with functions printed from the spec."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attngen.bench.cases.flex import cannot
from attngen.bench.cases.grids import Cell
from attngen.bench.peers.base import Call, Forward, importable

if TYPE_CHECKING:
    import torch

    from attngen.bench.cases.problem import Inputs, Problem


# Terms of a sum in a function, which only compiles if the compiler unrolls the sum; by default it unrolls up to 7.
LONGEST_SUM = 64
# Up to this many scores, FlexAttention's block mask is made without compiling `create_block_mask`, which can take
# minutes.
EAGER_SCORES = 2**30


def flex_flash_cannot(cell: Cell) -> str:
    if not importable("flash_attn.cute"):
        return "FlashAttention-4 is not installed"
    return "no gradient of a learned bias" if cell.spec.learned() else cannot(cell.spec)


def flex(problem: Problem, backend: str = "") -> Call:
    """Return FlexAttention's call, compiled with its default options. The functions are printed from the spec, and the
    block mask is made in advance.

    PyTorch's compiler is configured to unroll the sums of functions, which do not compile otherwise.

    backend: `FLASH` for its backend with FlashAttention-4's kernels; by default its Triton kernels.

    With a learned bias its backward gets two stages, because its default of three needs more shared memory than an H200
    has.
    """
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # else no backward can run twice on one graph
    made, c = problem.mods, problem.cell
    if c.page:
        return _paged(problem)
    options: dict[str, Any] = {"score_mod": made.score, "enable_gqa": c.heads != c.kv_heads}
    if backend:
        options["kernel_options"] = {"BACKEND": backend}
    elif c.spec.learned():
        options["kernel_options"] = {"bwd_num_stages": 2}
    compiled: Any = torch.compile(
        flex_attention, dynamic=False, options={"unroll_reductions_threshold": LONGEST_SUM + 1}
    )
    if made.mask is None:
        return Call(lambda x: compiled(x.q, x.k, x.v, **options))
    sizes = (c.batch if made.by_batch else None, c.heads if made.by_head else None, c.n_q, c.n_kv)
    eager: Any = partial(create_block_mask, made.mask, *sizes, device=problem.device)
    quick: Any = partial(torch.compile(create_block_mask), made.mask, *sizes, device=problem.device)
    large = c.n_q * c.n_kv * (sizes[0] or 1) > EAGER_SCORES
    block_mask = quick() if large else eager()
    if c.cached:
        return Call(lambda x: compiled(x.q, x.k, x.v, block_mask=block_mask, **options))
    masks = {"mask_ms": quick} if large else {"mask_ms": quick, "mask_eager_ms": eager}

    def whole() -> Forward:
        torch.compiler.reset()  # the functions compiled above keep their buffers for a second backward

        def forward(x: Inputs) -> torch.Tensor:
            with torch._functorch.config.patch(donated_buffer=True):
                out: torch.Tensor = compiled(x.q, x.k, x.v, block_mask=quick(), **options)
            return out

        return forward

    return Call(lambda x: compiled(x.q, x.k, x.v, block_mask=block_mask, **options), masks=masks, whole=whole)


def _paged(problem: Problem) -> Call:
    """Return FlexAttention's call with pages, by torch's PagedAttention: all pages are the keys of one sequence, and a
    block mask says to which sequence they belong."""
    import torch
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

    made, c = problem.mods, problem.cell
    table = problem.given["page_table"].long()
    owned = torch.arange(table.shape[1], device=problem.device) * c.page < problem.given["cache_seqlens"][:, None]
    pages = PagedAttention(int(owned.sum()), c.page, c.batch, device=problem.device)
    sequence, place = owned.nonzero(as_tuple=True)
    pages.page_table[sequence, place] = table[owned]
    pages.physical_to_logical[sequence, table[owned]] = place
    sizes = (c.batch, c.heads if made.by_head else None, c.n_q, c.n_kv)
    make: Any = torch.compile(create_block_mask) if c.batch * c.n_q * c.n_kv > EAGER_SCORES else create_block_mask
    logical = make(made.mask or noop_mask, *sizes, device=problem.device, BLOCK_SIZE=(128, c.page))
    block_mask = pages.convert_logical_block_mask(logical)
    score = None if made.score is None else pages.get_score_mod(made.score)
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def rows(x: torch.Tensor) -> torch.Tensor:
        """Return [pages, Hkv, page, D] as [1, Hkv, pages * page, D]."""
        return x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]

    def forward(x: Inputs) -> torch.Tensor:
        out: torch.Tensor = compiled(x.q, rows(x.k), rows(x.v), score, block_mask, enable_gqa=c.heads != c.kv_heads)
        return out

    return Call(forward)
