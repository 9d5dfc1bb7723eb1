"""FlexAttention's call and functions: `flex_attention(q, k, v, score_mod, block_mask)`, and the YAML that a pair of functions says.

Functions are traced once. What they say is a spec, whose module is built, cached and called; captured tensors are its inputs.
"""

from __future__ import annotations

import re
import warnings
import weakref
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
import yaml

from attngen.frontends.products import Product, fits, longer, taken_apart
from attngen.frontends.trace import Mod, Table, Traced, TraceError, held, occurs, trace
from attngen.parts import Sizes
from attngen.spec.model import WIDEST_HEAD

_BLOCKS = re.compile(r"(q_idx|kv_idx) // ([0-9]+)")
_NATURAL = {"b": "B", "h": "H", "q_idx": "Nq", "kv_idx": "Nk", "q_pos": "Nk"}
SHORT = 1 << 28  # scores that are evaluated at a time, to hold a block mask against its function


# ---------------------------------------------------------------------------------------------- specs


def spec_from_mods(
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    *,
    name: str | None = None,
    head_dim: int | tuple[int, int] = 64,
    sharing: str = "mha",
    dtype: tuple[str, ...] = ("bf16", "fp16"),
    sizes: tuple[int, int, int, int, int] | None = None,
) -> str:
    """The YAML of the spec that a pair of FlexAttention's functions says.

    Args:
        score_mod: score_mod(score, b, h, q_idx, kv_idx), or None.
        mask_mod: mask_mod(b, h, q_idx, kv_idx), or None.
        name: the spec's name; of the functions without it.
        head_dim: columns of q and k, and of v; or a pair of these.
        sharing: how query heads share K/V heads: mha, mqa or gqa.
        dtype: element types of the module.
        sizes: (B, Hq, Hkv, Nq, Nk) of a call. With them a dimension of a captured tensor is B, H, Nq or Nk only where it is as long;
            without them, wherever it is read at b, h, q_idx or kv_idx. Other dimensions are numbers: those of the tensor.

    Returns:
        text of a spec, which `attngen build` takes. A captured tensor is a parameter, with the name that the function has for it.

    Raises:
        TraceError: an operation that the language does not have; one sentence with the function, the operation and the line.
        SpecError: what the functions say is no spec, as a mask that hides everything.
    """
    traced = trace(score_mod, mask_mod)
    title = name or _title(score_mod, mask_mod)
    known = None if sizes is None else Sizes(*sizes)
    data = _data(traced, title, head_dim, sharing, dtype, known)
    notes = [f"# {t.name}: {str(t.tensor.dtype).removeprefix('torch.')} {list(t.tensor.shape)}, captured" for t in traced.tables]
    body = yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None, allow_unicode=True)
    return "\n".join(["# Traced from FlexAttention's functions.", *notes, body])


def _title(score_mod: Mod | None, mask_mod: Mod | None) -> str:
    """A spec's name made of the functions' names."""
    words = [getattr(mod, "__name__", type(mod).__name__) for mod in (mask_mod, score_mod) if mod is not None]
    stem = re.sub("[^a-z0-9]+", "_", "_".join(words).lower()).strip("_")[:48]
    return f"flex_{stem}".rstrip("_") if stem else "flex"


def _data(
    traced: Traced, name: str, head_dim: int | tuple[int, int], sharing: str, dtype: tuple[str, ...], sizes: Sizes | None, **more: Any
) -> dict[str, Any]:
    """The spec as plain data."""
    from attngen.logical.backward import in_fixed_order
    from attngen.spec import make_spec

    qk, v = (head_dim, head_dim) if isinstance(head_dim, int) else head_dim
    data: dict[str, Any] = {
        "name": name,
        "heads": {"sharing": sharing},
        "head_dim": qk if qk == v else {"qk": qk, "v": v},
        "dtype": list(dtype),
        **more,
    }
    if traced.mask is not None:
        data["mask"] = written(traced.mask, traced.mask_parts, traced, sizes)
    if traced.score is not None:
        data["score"] = [written(traced.score, traced.score_parts, traced, sizes)]
    spec = make_spec(data, f"the spec of `{name}`")
    if not in_fixed_order(spec):
        data["backward"] = {"deterministic": False}
    return data


def written(text: str, parts: dict[str, str], traced: Traced, sizes: Sizes | None) -> dict[str, Any]:
    """A mask or modifier as a spec has it: its text, named parts and parameters."""
    whole = " ".join((text, *parts.values()))
    params = {t.name: _param(t, sizes, occurs(t.name, traced.of_score)) for t in traced.tables if occurs(t.name, whole)}
    return {"expr": text} | ({"let": parts} if parts else {}) | ({"params": params} if params else {})


def _param(table: Table, sizes: Sizes | None, scored: bool) -> dict[str, Any]:
    """The declaration of a captured tensor. One that a score depends on may have a gradient."""
    if len(table.shape) > 4:
        raise TraceError(f"the captured tensor `{table.name}` has {len(table.shape)} dimensions; expected at most 4")
    learned = scored and table.tensor.requires_grad and table.dtype == "fp32"
    return {"tensor": list(_dims(table, sizes)), "dtype": table.dtype} | ({"grad": True} if learned else {})


def _dims(table: Table, sizes: Sizes | None) -> tuple[str | int, ...]:
    """The dimensions of a captured tensor: those of a call by name, where they are read so and have that length; else its own numbers."""
    return tuple(_dim(n, {read[d] for read in table.reads}, sizes) for d, n in enumerate(table.shape))


def _dim(n: int, read: set[str], sizes: Sizes | None) -> str | int:
    """A dimension of length n that is read at these indices."""
    if read <= {"q_idx", "q_pos", "kv_idx"}:
        names = [_NATURAL[at] for at in sorted(read)]  # keys first: where both are read, queries are no more than keys
    elif len(read) == 1 and (whole := _BLOCKS.fullmatch(next(iter(read)))):
        names = [f"{_NATURAL[whole[1]]}/{whole[2]}"]
    else:
        names = [_NATURAL[at] for at in read if at in _NATURAL] if len(read) == 1 else []
    length = sizes and (lambda name: sizes.of("Hq" if name == "H" else name))
    return next((name for name in names if length is None or length(name) == n), n)


# ---------------------------------------------------------------------------------------------- calls


@dataclass
class _Pair:
    """A traced pair of functions, what these depended on, and the modules that were built for it."""

    whole: Traced
    apart: tuple[Traced, tuple[Product, ...]]  # the same without products of rows, and these
    held: tuple[Any, ...]
    title: str
    modules: dict[Any, ModuleType] = field(default_factory=dict)


@dataclass
class _Masked:
    """What a block mask says: the function with its lists, where they say more than the function, and plans by module and sizes."""

    mask_mod: Mod | None
    plans: dict[Any, Any] = field(default_factory=dict)


def _nothing() -> None:
    """Stands for a function that is not given."""


_PAIRS: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, _Pair]] = weakref.WeakKeyDictionary()
_MASKS: weakref.WeakKeyDictionary[Any, _Masked] = weakref.WeakKeyDictionary()


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention's call, by kernels that attngen builds for the pair of functions.

    Args:
        query: [B, Hq, L, E], any strides with the last dimension contiguous, bf16, fp16 or fp32.
        key: [B, Hkv, S, E], same dtype and device; Hkv divides Hq, and is Hq without `enable_gqa`.
        value: [B, Hkv, S, Ev], same dtype and device.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score, or None.
        block_mask: a BlockMask, or mask_mod(b, h, q_idx, kv_idx) -> bool, or None. Of a BlockMask the function counts. Where its lists
            hide more than its function, or its full blocks show more, they count too; lists are read at the first call with it.
        scale: factor on the scores; None means 1 / sqrt(E).
        enable_gqa: whether query heads may share K/V heads.
        return_lse: also return the natural-log LSE, [B, Hq, L] fp32, differentiable.
        kernel_options: not used. Schedules are chosen by attngen.
        return_aux: an AuxRequest, of which `lse` is known.

    Returns:
        [B, Hq, L, Ev], laid out as query is; with `return_lse` a pair with the LSE, with `return_aux` a pair with an AuxOutput. A query
        that sees no key gets zeros and an LSE of -inf. Differentiable in query, key, value and captured tensors that require a gradient.

    Raises:
        TraceError: a function has no expression; one sentence with the function, the operation and the line.
        ValueError or TypeError: an argument is not what was expected.

    The first call with a pair of functions traces them and builds a module, in seconds; later calls and processes take it from the
    cache (see `attngen.build`). The module's element type, head dimension and head sharing are those of the call. Captured tensors may
    change their values between calls, and numbers and tensors may be exchanged: then the functions are traced again.
    """
    _check(query, key, value, enable_gqa, return_aux)
    masked = _masked(block_mask) if hasattr(block_mask, "kv_num_blocks") else None
    mask_mod = masked.mask_mod if masked else block_mask
    pair = _pair(score_mod, mask_mod)
    sizes = Sizes(query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2])
    traced, products = pair.apart
    if products and fits(products, query.shape[3], sizes, WIDEST_HEAD):
        scale = query.shape[3] ** -0.5 if scale is None else scale
        query, key = longer(query, key, products, scale, sizes)
    else:
        traced = pair.whole
    module = _module(pair, traced, query, value, sizes)
    inputs: dict[str, Any] = {table.name: _given(table) for table in traced.tables}
    if masked and hasattr(module, "LISTS"):  # the mask is evaluated once, to find blocks
        at = (id(module), sizes, query.device)
        if at not in masked.plans:
            given = {name: x for name, x in inputs.items() if name in _of_plan(module)}
            masked.plans[at] = module.attention.plan(query, key, **given)
        inputs["plan"] = masked.plans[at]
    lse_too = return_lse or bool(return_aux is not None and return_aux.lse)
    result = module.attention(query, key, value, **inputs, scale=scale, return_lse=lse_too)
    if return_aux is None:
        return result
    from torch.nn.attention.flex_attention import AuxOutput

    return (result[0], AuxOutput(lse=result[1])) if lse_too else (result, AuxOutput())


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool, return_aux: Any) -> None:
    """Raise where the arguments are not those of FlexAttention; the module checks the rest."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            given = f"has {x.dim()} dimensions" if isinstance(x, torch.Tensor) else f"is a {type(x).__name__}"
            raise ValueError(f"flex_attention: {name} {given}; expected a tensor [B, H, N, D]")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        heads = f"{query.shape[1]} query heads and {key.shape[1]} key heads"
        raise ValueError(f"flex_attention: {heads} without enable_gqa; expected as many, or enable_gqa=True")
    if getattr(return_aux, "max_scores", False):
        raise ValueError("flex_attention: return_aux asks for max_scores; expected `lse` alone")


def _masked(block_mask: Any) -> _Masked:
    if block_mask not in _MASKS:
        _MASKS[block_mask] = _Masked(_with_lists(block_mask))
    return _MASKS[block_mask]


def _pair(score_mod: Mod | None, mask_mod: Mod | None) -> _Pair:
    """The traced pair: traced again where something that the functions hold is another number or tensor than before."""
    for name, mod in (("score_mod", score_mod), ("block_mask", mask_mod)):
        if mod is not None and not callable(mod):
            expected = "a BlockMask, a function of (b, h, q_idx, kv_idx)" if name == "block_mask" else "a function"
            raise TypeError(f"flex_attention: {name} is a {type(mod).__name__}; expected {expected} or None")
    now = (*_state(score_mod), *_state(mask_mod))
    known = _PAIRS.setdefault(score_mod or _nothing, weakref.WeakKeyDictionary())
    pair = known.get(mask_mod or _nothing)
    if pair is None or pair.held != now:
        traced = trace(score_mod, mask_mod)
        pair = known[mask_mod or _nothing] = _Pair(traced, taken_apart(traced), now, _title(score_mod, mask_mod))
    return pair


def _state(mod: Any, depth: int = 0) -> tuple[Any, ...]:
    """What a function depends on, so far as it may change: numbers by value, tensors by identity."""
    found: list[Any] = []
    for name, x in held(mod) if mod is not None and depth < 8 else ():
        if isinstance(x, torch.Tensor):
            found.append((name, id(x), x.shape, x.dtype, x.requires_grad))
        elif isinstance(x, (bool, int, float, str)):
            found.append((name, x))
        elif isinstance(x, (list, tuple)):
            found += [
                (name, id(y)) if isinstance(y, torch.Tensor) else (name, y) for y in x if isinstance(y, (torch.Tensor, bool, int, float))
            ]
            found += [part for y in x if callable(y) and not isinstance(y, torch.Tensor) for part in _state(y, depth + 1)]
        elif callable(x) and not isinstance(x, type):
            found += _state(x, depth + 1)
    return tuple(found)


def _module(pair: _Pair, traced: Traced, query: torch.Tensor, value: torch.Tensor, sizes: Sizes) -> ModuleType:
    """The module for calls like this one."""
    from attngen import build

    wide = query.dtype == torch.float32
    tf32 = wide and torch.get_float32_matmul_precision() != "highest"
    sharing = "mha" if sizes.q_heads == sizes.kv_heads else "mqa" if sizes.kv_heads == 1 else "gqa"
    widths = (query.shape[3], value.shape[3])
    at = (wide, tf32, sharing, widths, *(_dims(table, sizes) for table in traced.tables))
    if at not in pair.modules:
        more = {"fp32_precision": "tf32"} if tf32 else {}
        dtype = ("fp32",) if wide else ("bf16", "fp16")
        with warnings.catch_warnings():  # of how positions count, which is FlexAttention's way
            warnings.simplefilter("ignore")
            pair.modules[at] = build(_data(traced, pair.title, widths, sharing, dtype, sizes, **more))
    return pair.modules[at]


@cache
def _of_plan(module: ModuleType) -> frozenset[str]:
    """The keyword arguments of a module's plan."""
    import inspect

    return frozenset(inspect.signature(module.attention.plan).parameters)


def _given(table: Table) -> torch.Tensor:
    """A captured tensor as a module takes it."""
    x = table.tensor.reshape(table.shape)
    if table.dtype == "int32" and x.dtype not in (torch.int32, torch.int64):
        return x.int()
    return x.float() if x.dtype == torch.float64 else x


# ---------------------------------------------------------------------------------------------- block masks


def _with_lists(block_mask: Any) -> Mod | None:
    """The function of a block mask; where its lists are not those of the function, one that reads which blocks they have, too."""
    mask_mod: Mod | None = block_mask.mask_mod
    rows, columns = block_mask.BLOCK_SIZE
    n_q, n_kv = block_mask.seq_lengths
    tiles_q, tiles_kv = -(-n_q // rows), -(-n_kv // columns)
    cut = _dense(block_mask.kv_num_blocks, block_mask.kv_indices, tiles_q, tiles_kv)
    full = torch.zeros_like(cut)
    if block_mask.full_kv_num_blocks is not None:
        full = _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, tiles_q, tiles_kv)
    listed = cut | full
    if mask_mod is not None and _agree(mask_mod, listed, full, (rows, columns), (n_q, n_kv)):
        return mask_mod
    by_b, by_h = int(listed.shape[0] > 1), int(listed.shape[1] > 1)

    def in_blocks(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        at = (b if by_b else 0, h if by_h else 0, q_idx // rows, kv_idx // columns)
        inside = full[at] if mask_mod is None else full[at] | mask_mod(b, h, q_idx, kv_idx)
        return listed[at] & inside

    return in_blocks


def _dense(counts: torch.Tensor, indices: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Bool [B, H, rows, columns]: which blocks a list has."""
    at = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    made = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    made.scatter_(-1, torch.where(at, indices, columns).long(), True)
    return made[:, :, :rows, :columns]


def _agree(mask_mod: Mod, listed: torch.Tensor, full: torch.Tensor, block: tuple[int, int], lengths: tuple[int, int]) -> bool:
    """Whether lists hide nothing that a function shows, and their full blocks show nothing that it hides."""
    (rows, columns), (n_q, n_kv), device = block, lengths, listed.device
    each = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    each = torch.vmap(torch.vmap(each, (None, 0, None, None)), (0, None, None, None))
    b, h = (torch.arange(n, device=device, dtype=torch.int32) for n in listed.shape[:2])
    kv = torch.arange(n_kv, device=device, dtype=torch.int32)
    step = max(1, SHORT // max(1, n_kv * rows * len(b) * len(h))) * rows
    for start in range(0, n_q, step):
        q = torch.arange(start, min(start + step, n_q), device=device, dtype=torch.int32)
        seen = each(b, h, q, kv)
        span = slice(start // rows, -(-(start + len(q)) // rows))
        in_lists, in_full = (
            x[:, :, span].repeat_interleave(rows, 2)[:, :, : len(q)].repeat_interleave(columns, 3)[..., :n_kv] for x in (listed, full)
        )
        if bool((seen & ~in_lists).any()) or bool((in_full & ~seen).any()):
            return False
    return True
