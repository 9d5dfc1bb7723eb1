"""What is measured: ours, and its peers. Each says what it cannot do, and prepares a call for a problem.

A new peer is one function here and one line in PEERS. Nothing heavy is imported until a peer prepares, so lists of cells need no GPU.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from attngen.bench.flex import cannot
from attngen.bench.grids import Cell
from attngen.masks.causal import Causal
from attngen.masks.none import NoMask
from attngen.masks.sliding_window import SlidingWindow
from attngen.scores.softcap import Softcap

if TYPE_CHECKING:
    import torch

    from attngen.bench.problem import Inputs, Problem


Forward = Callable[["Inputs"], "torch.Tensor"]


class Call(NamedTuple):
    """A peer ready for a problem: its forward, what has to be around it (the choice of a backend, say), and a remark for the reader.

    Of a peer that prepares the mask before its calls: `masks`, functions that prepare it anew, by the name of the figure that their time
    is; `whole` makes a forward that prepares the mask itself, and is called once nothing else is measured any more.
    """

    forward: Forward
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    note: str = ""
    masks: Mapping[str, Callable[[], object]] = MappingProxyType({})
    whole: Callable[[], Forward] | None = None


@dataclass(frozen=True)
class Peer:
    """`cannot` gives the reason why it cannot do a cell in a few words, or nothing; `compiles`: its first call compiles for seconds."""

    title: str
    cannot: Callable[[Cell], str]
    prepare: Callable[[Problem], Call]
    compiles: bool = False


# ---------------------------------------------------------------------------------------------- ours


def _ours(problem: Problem) -> Call:
    """The generated module, with what the mask reads planned."""
    from attngen.testing import load_module

    attention = load_module(problem.folder).attention
    learned = [i.name for i in problem.cell.spec.learned()]
    p = problem.cell.asked("dropout_p")
    dropout = {"dropout_p": p} if p else {}

    def forward(given: Mapping[str, Any]) -> Forward:
        fixed = {name: x for name, x in given.items() if not getattr(x, "requires_grad", False)} | dropout
        return lambda x: attention(x.q, x.k, x.v, **fixed, **dict(zip(learned, x.learned)))

    make = _planner(attention, problem)
    if make is None:
        return Call(forward(problem.given))
    planned = dict(problem.given)
    if "block_mask" in planned:
        planned["block_mask"] = make()
    else:
        defaults = inspect.signature(attention).parameters
        planned = {name: x for name, x in planned.items() if defaults[name].default is inspect.Parameter.empty}  # the plan has the others
        planned["plan"] = make()
    return Call(forward(planned), masks={"mask_ms": make}, whole=lambda: forward(problem.given))


def _planner(attention: Any, problem: Problem) -> Callable[[], object] | None:
    """What makes the plan of a problem anew; None where nothing can be planned of it."""
    if not hasattr(attention, "plan"):
        return None
    wanted = inspect.signature(attention.plan).parameters
    if "block_mask" in wanted:
        return partial(attention.plan, problem.given["block_mask"]) if "block_mask" in problem.given else None
    one = problem.draw(0)
    have = {**problem.given, "q": one.q, "k": one.k, "n_q": problem.cell.n_q, "n_kv": problem.cell.n_kv}
    return partial(attention.plan, **{name: have[name] for name in wanted})


# ---------------------------------------------------------------------------------------------- torch


def _undropped(cannot: Callable[[Cell], str], cell: Cell) -> str:
    """Of a peer that cannot drop."""
    return "no dropout" if cell.asked("dropout_p") else cannot(cell)


def _sdpa_cannot(cell: Cell, single: bool = False) -> str:
    """`single`: the backend takes fp32."""
    mask = cell.spec.mask
    if cell.spec.score:
        return "no score modifiers"
    if not isinstance(mask, (NoMask, Causal)):
        return "no mask but causal and none"
    if isinstance(mask, Causal) and cell.n_q != cell.n_kv and mask.align == "bottom_right":
        return "its causal is top-left"
    return "no fp32" if cell.dtype == "fp32" and not single else ""


def _sdpa(backend: str, problem: Problem) -> Call:
    """SDPA held to one backend; where that wants as many K/V heads as query heads, it gets views of them."""
    import torch
    from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_efficient_attention, can_use_flash_attention
    from torch.nn.attention import SDPBackend, sdpa_kernel

    usable = {"flash": can_use_flash_attention, "cudnn": can_use_cudnn_attention, "efficient": can_use_efficient_attention}
    kind = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}[backend]
    causal, group = isinstance(problem.cell.spec.mask, Causal), problem.cell.heads // problem.cell.kv_heads
    p = problem.cell.asked("dropout_p")
    around = partial(sdpa_kernel, getattr(SDPBackend, kind))
    one = problem.draw(0)
    with around():
        expands = group > 1 and backend != "math" and not usable[backend](SDPAParams(one.q, one.k, one.v, None, p, causal, True))

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)

    def forward(x: Inputs) -> torch.Tensor:
        k, v = (repeated(x.k), repeated(x.v)) if expands else (x.k, x.v)
        gqa = group > 1 and not expands
        return torch.nn.functional.scaled_dot_product_attention(x.q, k, v, dropout_p=p, is_causal=causal, enable_gqa=gqa)

    with around(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            forward(one)
        except RuntimeError as error:
            raise RuntimeError(_reason([str(w.message) for w in said]) or str(error)) from error
    return Call(forward, around, "K/V heads repeated for it" if expands else "")


def _reason(said: list[str]) -> str:
    """Why torch cannot use a backend, as its warnings say; those of backends that were not asked for say that they are disabled."""
    reasons = (text.partition(" (Triggered")[0].strip() for text in said)
    return next((text for text in reasons if "not used because" not in text and "disabled" not in text), "")


EAGER_SCORES = 2**30  # up to so many, FlexAttention's block mask is made without compiling what makes it, which can take minutes


def _flex_flash_cannot(cell: Cell) -> str:
    if not _importable("flash_attn.cute"):
        return "FlashAttention-4 is not installed"
    return "no gradient of a learned bias" if cell.spec.learned() else cannot(cell.spec)


def _flex(problem: Problem, backend: str = "") -> Call:
    """FlexAttention, compiled, with its default options; the functions are written from the spec, and the block mask is made before.

    backend: `FLASH` for its backend that writes kernels by FlashAttention-4; its own Triton kernels without one.

    With a learned bias its backward gets two stages: its default of three needs more shared memory than an H200 has.
    """
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # else no backward can run twice on one graph
    made, c = problem.mods, problem.cell
    options: dict[str, Any] = {"score_mod": made.score, "enable_gqa": c.heads != c.kv_heads}
    if backend:
        options["kernel_options"] = {"BACKEND": backend}
    elif c.spec.learned():
        options["kernel_options"] = {"bwd_num_stages": 2}
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    if made.mask is None:
        return Call(lambda x: compiled(x.q, x.k, x.v, **options))
    sizes = (c.batch if made.by_batch else None, c.heads if made.by_head else None, c.n_q, c.n_kv)
    eager: Any = partial(create_block_mask, made.mask, *sizes, device=problem.device)
    quick: Any = partial(torch.compile(create_block_mask), made.mask, *sizes, device=problem.device)
    large = c.n_q * c.n_kv > EAGER_SCORES
    block_mask = quick() if large else eager()
    masks = {"mask_ms": quick} if large else {"mask_ms": quick, "mask_eager_ms": eager}

    def whole() -> Forward:
        torch.compiler.reset()  # what was compiled above keeps its buffers for a second backward

        def forward(x: Inputs) -> torch.Tensor:
            with torch._functorch.config.patch(donated_buffer=True):
                out: torch.Tensor = compiled(x.q, x.k, x.v, block_mask=quick(), **options)
            return out

        return forward

    return Call(lambda x: compiled(x.q, x.k, x.v, block_mask=block_mask, **options), masks=masks, whole=whole)


def _naive(problem: Problem) -> Call:
    """softmax(q @ k^T) @ v in plain torch, with the whole score matrix in memory, in the cell's dtype."""
    import torch

    from attngen.reference import reference_mask, reference_scores

    spec, one = problem.cell.spec, problem.draw(0)
    mask = None if isinstance(spec.mask, NoMask) else reference_mask(spec.mask, one.q, one.k, problem.given)
    hidden = None if mask is None else ~mask
    empty = None if mask is None or bool(mask.any(-1).all()) else ~mask.any(-1, keepdim=True)
    modify, sink = reference_scores(spec.score, one.q, one.k, problem.given)
    scale = spec.head_dim.qk**-0.5

    def forward(x: Inputs) -> torch.Tensor:
        b, heads, n_q, width = x.q.shape
        shared, n_kv = x.k.shape[1:3]
        rows = (x.q * scale).reshape(b, shared, heads // shared * n_q, width)  # the queries that share a K/V head, without copies of it
        scores = (rows @ x.k.transpose(-1, -2)).view(b, heads, n_q, n_kv)
        scores = scores if modify is None else modify(scores).to(x.q.dtype)
        scores = scores if hidden is None else scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        if sink is not None:
            scores = torch.cat([scores, sink.to(scores.dtype)[None, :, None, None].expand(b, heads, n_q, 1)], -1)
        probabilities = torch.softmax(scores, -1)[..., :n_kv]
        probabilities = probabilities if empty is None else probabilities.masked_fill(empty, 0.0)
        return (probabilities.reshape(b, shared, heads // shared * n_q, n_kv) @ x.v).view(b, heads, n_q, -1)

    return Call(forward)


# ---------------------------------------------------------------------------------------------- FlashAttention-4


def _fa4_cannot(cell: Cell) -> str:
    mask = cell.spec.mask
    if not _importable("flash_attn.cute"):
        return "not installed"
    if not isinstance(mask, (NoMask, Causal, SlidingWindow)):
        return "no mask but causal, window and none"
    if isinstance(mask, (Causal, SlidingWindow)) and cell.n_q != cell.n_kv and mask.align != "bottom_right":
        return "its masks are bottom-right"
    if any(not isinstance(part, Softcap) for part in cell.spec.score) or len(cell.spec.score) > 1:
        return "no score modifier but a softcap"
    return "no fp32" if cell.dtype == "fp32" else ""


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a package around it
        return False


def _fa4(problem: Problem) -> Call:
    """flash-attn-4, whose layout is [B, N, H, D]: it gets views."""
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


PEERS = {  # ours first: the others' results are held against the first's
    "ours": Peer("attngen", lambda cell: "", _ours, compiles=True),
    "flash": Peer("SDPA FLASH", _sdpa_cannot, partial(_sdpa, "flash")),
    "cudnn": Peer("SDPA CUDNN", _sdpa_cannot, partial(_sdpa, "cudnn")),
    "efficient": Peer("SDPA EFFICIENT", partial(_sdpa_cannot, single=True), partial(_sdpa, "efficient")),
    "math": Peer("SDPA MATH", partial(_sdpa_cannot, single=True), partial(_sdpa, "math")),
    "flex": Peer("FlexAttention", partial(_undropped, lambda cell: cannot(cell.spec)), _flex, compiles=True),
    "flex_flash": Peer("FlexAttention by FlashAttention-4", partial(_undropped, _flex_flash_cannot), partial(_flex, backend="FLASH"), True),
    "fa4": Peer("FlashAttention-4", partial(_undropped, _fa4_cannot), _fa4, compiles=True),
    "naive": Peer("naive", partial(_undropped, lambda cell: ""), _naive),
}
