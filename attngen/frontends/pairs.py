"""Traces each pair of FlexAttention's functions once, builds modules for it, and calls them."""

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
from attngen.frontends.extra_matmuls import Product, append_columns, fits, split_products
from attngen.frontends.reach import check_reads
from attngen.frontends.specs import data_of, dims_of, title_of, with_gradient_order
from attngen.frontends.trace import Mod, Traced, leaves, trace
from attngen.ir.sizes import Sizes
from attngen.lang.limits import WIDEST_HEAD
from attngen.runtime.private import dispatch_modes, is_tracing


@dataclass
class Pair:
    """A traced pair of functions.

    whole: the trace. split: the trace without the dot products of rows, and these products.
    held: the state of the functions at the trace, as `_state` returns it; it is traced again when this changes.
    modules: those built for it, while they are held elsewhere.
    checked: sizes of calls in which nothing is read outside of a tensor.
    """

    whole: Traced
    split: tuple[Traced, tuple[Product, ...]]
    held: tuple[Any, ...]
    title: str
    modules: weakref.WeakValueDictionary[Any, ModuleType] = field(default_factory=weakref.WeakValueDictionary)
    checked: set[Sizes] = field(default_factory=set)


MOST_SIZES = 1024  # number of sizes that a pair remembers; one more clears them


def nothing() -> None:
    """Placeholder for a function that is not given."""


_PAIRS = WeakIdKeyDictionary()  # nested by the four objects that `identity_of` returns for both functions


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
    """Run flex_attention's call. The arguments have been checked."""
    sizes = Sizes(query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2])
    masked, pair = find_pair(score_mod, block_mask, sizes)
    traced, products = pair.split
    if products and fits(products, query.shape[3], sizes, WIDEST_HEAD):
        scale = query.shape[3] ** -0.5 if scale is None else scale
        query, key = append_columns(query, key, products, scale, sizes)
    else:
        traced = pair.whole
    if traced.ignores_qk:
        query, key = without_products(query, key)
    lse = return_lse or bool(return_aux is not None and return_aux.lse)
    largest = bool(return_aux is not None and return_aux.max_scores)
    module = module_of(pair, traced, query.dtype, (query.shape[3], value.shape[3]), sizes, largest)
    if _is_recorded(query):
        stay(module)
    inputs: dict[str, Any] = {table.name: as_input(table.tensor) for table in traced.tables}
    if masked and hasattr(module, "LISTS"):  # the mask is evaluated once, to find blocks
        inputs["plan"] = plan_for(masked, module, query, key, inputs, sizes)
    return results(module, query, key, value, inputs, scale, lse, largest, return_aux is not None)


def find_pair(score_mod: Mod | None, block_mask: Any, sizes: Sizes) -> tuple[Masked | None, Pair]:
    """Return the block mask, if it is one, and the traced pair. Raise if these are not for calls of these sizes."""
    masked = None
    if is_block_mask(block_mask):
        check_fits(block_mask, sizes)
        masked = masked_of(block_mask)
    pair = pair_of(score_mod, masked.mask_mod if masked else block_mask)
    if pair.whole.places and sizes not in pair.checked:
        check_reads(pair.whole, sizes)
        if len(pair.checked) >= MOST_SIZES:
            pair.checked.clear()
        pair.checked.add(sizes)
    return masked, pair


def plan_for(
    masked: Masked, module: ModuleType, query: torch.Tensor, key: torch.Tensor, inputs: dict[str, Any], sizes: Sizes
) -> Any:
    """Return the plan of a block mask for calls of these sizes, made at the first call."""
    plans, at = masked.plans.setdefault(module, {}), (sizes, query.device)
    if at not in plans:
        given = {name: x for name, x in inputs.items() if name in plan_arguments(module)}
        plans[at] = module.attention.plan(query, key, **given)
    return plans[at]


def _is_recorded(x: torch.Tensor) -> bool:
    """True if a tracer or a CUDA graph records the call: it keeps operators or addresses, but not the module."""
    return (
        torch.compiler.is_compiling()
        or is_tracing()
        or bool(dispatch_modes())
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def without_products(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k filled with 0, with gradients of 0: for a score that does not use q @ k."""
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
    """Call a module, and return its result in the form of FlexAttention's call: with `aux`, the output and an
    AuxOutput."""
    asked = {"return_lse": lse} | ({"return_max_score": True} if largest else {})
    result = module.attention(query, key, value, **inputs, scale=scale, **asked)
    if not aux:
        return result
    from torch.nn.attention.flex_attention import AuxOutput

    out, *more = result if lse or largest else (result,)
    return out, AuxOutput(lse=more[0] if lse else None, max_scores=more[-1] if largest else None)


def pair_of(score_mod: Mod | None, mask_mod: Mod | None) -> Pair:
    """Return the traced pair. It is traced again when a number or tensor that the functions hold is replaced."""
    for name, mod in (("score_mod", score_mod), ("block_mask", mask_mod)):
        if mod is not None and not callable(mod):
            expected = "a BlockMask, a function of (b, h, q_idx, kv_idx)" if name == "block_mask" else "a function"
            raise TypeError(f"flex_attention: {name} is a {type(mod).__name__}; expected {expected} or None")
    now = (*_state(score_mod), *_state(mask_mod))
    *path, last = (*identity_of(score_mod), *identity_of(mask_mod))
    known = _PAIRS
    for part in path:
        known = known.setdefault(part, WeakIdKeyDictionary())
    pair = known.get(last)
    if pair is None or pair.held != now:
        traced = trace(score_mod, mask_mod)
        pair = known[last] = Pair(traced, split_products(traced), now, title_of(score_mod, mask_mod))
    return pair


def identity_of(mod: Mod | None) -> tuple[Any, Any]:
    """Return a function, and the object that it is a method of: these persist, while Python makes a new method object
    at each access."""
    return (mod.__func__, mod.__self__) if inspect.ismethod(mod) else (mod or nothing, nothing)


def _state(mod: Any) -> tuple[Any, ...]:
    """Return the values on which a function depends and which may change: numbers by value, tensors by identity."""
    if mod is None:
        return ()
    return tuple(
        (name, id(x), x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else (name, x)
        for name, x in leaves(mod)
    )


def module_of(
    pair: Pair, traced: Traced, dtype: torch.dtype, widths: tuple[int, int], sizes: Sizes, largest: bool
) -> ModuleType:
    """Return the module for calls with this dtype, widths of q and v, and sizes; with `largest`, one that also returns
    the largest scores."""
    wide = dtype == torch.float32
    tf32 = wide and torch.get_float32_matmul_precision() != "highest"
    sharing = "mha" if sizes.q_heads == sizes.kv_heads else "mqa" if sizes.kv_heads == 1 else "gqa"
    at = (wide, tf32, sharing, widths, largest, *(dims_of(table, sizes) for table in traced.tables))
    module = pair.modules.get(at)
    if module is None or not is_held(module):
        more = ({"fp32_precision": "tf32"} if tf32 else {}) | ({"outputs": ["max_score"]} if largest else {})
        dtypes = ("fp32",) if wide else ("bf16", "fp16")
        data = data_of(traced, pair.title, widths, sharing, dtypes, sizes, **more)
        with warnings.catch_warnings():  # about how positions count: they count as in FlexAttention
            warnings.simplefilter("ignore")
            pair.modules[at] = module = build_completed(data, with_gradient_order)
    return module


def plan_arguments(module: ModuleType) -> frozenset[str]:
    """Names of the keyword arguments of a module's `plan`."""
    return frozenset(inspect.signature(module.attention.plan).parameters)


def as_input(x: torch.Tensor) -> torch.Tensor:
    """Return a captured tensor as a module takes it: with at least one dimension, in an element type of specs."""
    x = x if x.dim() else x.reshape(1)
    if not x.is_floating_point() and x.dtype not in (torch.bool, torch.int32, torch.int64):
        return x.int()
    return x.float() if x.dtype == torch.float64 else x
