"""Pairs of FlexAttention's functions, each traced once; the modules that are built for them, and how these are
called."""

from __future__ import annotations

import inspect
import warnings
import weakref
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from attngen.api import build_completed, is_held, stay
from attngen.frontends.block_masks import Masked, check_fits, is_block_mask, masked_of
from attngen.frontends.extra_matmuls import Product, fits, longer, taken_apart
from attngen.frontends.reach import check_reads
from attngen.frontends.specs import data_of, dims_of, settled, title_of
from attngen.frontends.trace import Mod, Traced, leaves, trace
from attngen.ir.sizes import Sizes
from attngen.lang.limits import WIDEST_HEAD
from attngen.runtime.private import dispatch_modes, is_tracing


@dataclass
class Pair:
    """A traced pair of functions, what these depended on, and the modules that were built for it, while these are
    held."""

    whole: Traced
    apart: tuple[Traced, tuple[Product, ...]]  # the same without products of rows, and these
    held: tuple[Any, ...]
    title: str
    modules: weakref.WeakValueDictionary[Any, ModuleType] = field(default_factory=weakref.WeakValueDictionary)
    within: set[Sizes] = field(default_factory=set)  # of calls in which nothing is read outside of a tensor


MOST_SIZES = 1024  # that a pair remembers; with one more all are forgotten


def nothing() -> None:
    """Stands for a function that is not given."""


_PAIRS = WeakIdKeyDictionary()  # by what `owned` says of both functions, one below the other


def call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    block_mask: Any,
    scale: float | None,
    return_lse: bool,
    return_aux: Any,
) -> Any:
    """flex_attention's call, with arguments that were checked."""
    sizes = Sizes(query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2])
    masked, pair = found(score_mod, block_mask, sizes)
    traced, products = pair.apart
    if products and fits(products, query.shape[3], sizes, WIDEST_HEAD):
        scale = query.shape[3] ** -0.5 if scale is None else scale
        query, key = longer(query, key, products, scale, sizes)
    else:
        traced = pair.whole
    if traced.forgets:
        query, key = without_products(query, key)
    lse = return_lse or bool(return_aux is not None and return_aux.lse)
    largest = bool(return_aux is not None and return_aux.max_scores)
    module = module_of(pair, traced, query.dtype, (query.shape[3], value.shape[3]), sizes, largest)
    if _is_recorded(query):
        stay(module)
    inputs: dict[str, Any] = {table.name: as_input(table.tensor) for table in traced.tables}
    if masked and hasattr(module, "LISTS"):  # the mask is evaluated once, to find blocks
        inputs["plan"] = planned(masked, module, query, key, inputs, sizes)
    return results(module, query, key, value, inputs, scale, lse, largest, return_aux is not None)


def found(score_mod: Mod | None, block_mask: Any, sizes: Sizes) -> tuple[Masked | None, Pair]:
    """What a block mask says, if it is one, and the traced pair. Raises if these are not for calls of these sizes."""
    masked = None
    if is_block_mask(block_mask):
        check_fits(block_mask, sizes)
        masked = masked_of(block_mask)
    pair = pair_of(score_mod, masked.mask_mod if masked else block_mask)
    if pair.whole.places and sizes not in pair.within:
        check_reads(pair.whole, sizes)
        if len(pair.within) >= MOST_SIZES:
            pair.within.clear()
        pair.within.add(sizes)
    return masked, pair


def planned(
    masked: Masked, module: ModuleType, query: torch.Tensor, key: torch.Tensor, inputs: dict[str, Any], sizes: Sizes
) -> Any:
    """The plan of a block mask for calls of these sizes, made at the first one."""
    plans, at = masked.plans.setdefault(module, {}), (sizes, query.device)
    if at not in plans:
        given = {name: x for name, x in inputs.items() if name in of_plan(module)}
        plans[at] = module.attention.plan(query, key, **given)
    return plans[at]


def _is_recorded(x: torch.Tensor) -> bool:
    """Whether something records a call and keeps operators or addresses, but not the module: a tracer, or a CUDA
    graph."""
    return (
        torch.compiler.is_compiling()
        or is_tracing()
        or bool(dispatch_modes())
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def without_products(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of 0, whose gradients are 0: for a score that is made of positions and tables alone."""
    query, key = (x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0.0) for x in (query, key))
    return query, key


def results(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inputs: dict[str, Any],
    scale: float | None,
    lse: bool,
    largest: bool,
    aux: bool,
) -> Any:
    """What a module's call gives, as FlexAttention's call does; with `aux`, an AuxOutput beside the output."""
    asked = {"return_lse": lse} | ({"return_max_score": True} if largest else {})
    result = module.attention(query, key, value, **inputs, scale=scale, **asked)
    if not aux:
        return result
    from torch.nn.attention.flex_attention import AuxOutput

    out, *more = result if lse or largest else (result,)
    return out, AuxOutput(lse=more[0] if lse else None, max_scores=more[-1] if largest else None)


def pair_of(score_mod: Mod | None, mask_mod: Mod | None) -> Pair:
    """The traced pair: traced again where something that the functions hold is another number or tensor than before."""
    for name, mod in (("score_mod", score_mod), ("block_mask", mask_mod)):
        if mod is not None and not callable(mod):
            expected = "a BlockMask, a function of (b, h, q_idx, kv_idx)" if name == "block_mask" else "a function"
            raise TypeError(f"flex_attention: {name} is a {type(mod).__name__}; expected {expected} or None")
    now = (*_state(score_mod), *_state(mask_mod))
    *path, last = (*owned(score_mod), *owned(mask_mod))
    known = _PAIRS
    for part in path:
        known = known.setdefault(part, WeakIdKeyDictionary())
    pair = known.get(last)
    if pair is None or pair.held != now:
        traced = trace(score_mod, mask_mod)
        pair = known[last] = Pair(traced, taken_apart(traced), now, title_of(score_mod, mask_mod))
    return pair


def owned(mod: Mod | None) -> tuple[Any, Any]:
    """A function, and the object that it is a method of: Python makes a method anew each time that somebody asks for
    it."""
    return (mod.__func__, mod.__self__) if inspect.ismethod(mod) else (mod or nothing, nothing)


def _state(mod: Any) -> tuple[Any, ...]:
    """What a function depends on, so far as it may change: numbers by value, tensors by identity."""
    if mod is None:
        return ()
    return tuple(
        (name, id(x), x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else (name, x)
        for name, x in leaves(mod)
    )


def module_of(
    pair: Pair, traced: Traced, dtype: torch.dtype, widths: tuple[int, int], sizes: Sizes, largest: bool
) -> ModuleType:
    """The module for calls with this type of q, widths of q and v, and sizes; if `largest`, one that gives largest
    scores too."""
    wide = dtype == torch.float32
    tf32 = wide and torch.get_float32_matmul_precision() != "highest"
    sharing = "mha" if sizes.q_heads == sizes.kv_heads else "mqa" if sizes.kv_heads == 1 else "gqa"
    at = (wide, tf32, sharing, widths, largest, *(dims_of(table, sizes) for table in traced.tables))
    module = pair.modules.get(at)
    if module is None or not is_held(module):
        more = ({"fp32_precision": "tf32"} if tf32 else {}) | ({"outputs": ["max_score"]} if largest else {})
        dtypes = ("fp32",) if wide else ("bf16", "fp16")
        data = data_of(traced, pair.title, widths, sharing, dtypes, sizes, **more)
        with warnings.catch_warnings():  # of how positions count, which is FlexAttention's way
            warnings.simplefilter("ignore")
            pair.modules[at] = module = build_completed(data, settled)
    return module


def of_plan(module: ModuleType) -> frozenset[str]:
    """The keyword arguments of a module's plan."""
    return frozenset(inspect.signature(module.attention.plan).parameters)


def as_input(x: torch.Tensor) -> torch.Tensor:
    """A captured tensor as a module takes it: with a dimension, and of an element type that it has."""
    x = x if x.dim() else x.reshape(1)
    if not x.is_floating_point() and x.dtype not in (torch.bool, torch.int32, torch.int64):
        return x.int()
    return x.float() if x.dtype == torch.float64 else x
