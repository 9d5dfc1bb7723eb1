"""Makes the spec of a traced pair of FlexAttention's functions, as data and as YAML."""

from __future__ import annotations

import ast
import re
from typing import Any

from attngen.frontends.trace import Mod, Table, Traced, TraceError, occurs, trace
from attngen.ir.sizes import Sizes
from attngen.lang.names import ANY

_BLOCKS = re.compile(r"(q_idx|kv_idx) // ([0-9]+)")
_NATURAL = {"b": "B", "h": "H", "q_idx": "Nq", "kv_idx": "Nk", "q_pos": "Nk"}


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
    """Return the spec of FlexAttention's two functions, score_mod and mask_mod, as YAML.

    Args:
        score_mod: score_mod(score, b, h, q_idx, kv_idx), or None.
        mask_mod: mask_mod(b, h, q_idx, kv_idx), or None.
        name: the spec's name; by default made from the functions' names.
        head_dim: head dimension of q, k and v; or a pair, of q and k, and of v.
        sharing: how query heads share K/V heads: mha, mqa or gqa.
        dtype: element types of the module.
        sizes: (B, Hq, Hkv, Nq, Nk) of a call. With sizes, a dimension of a captured tensor is named B, H, Nq or Nk only
            if it has that length; without them, wherever it is read at b, h, q_idx or kv_idx. Other dimensions are the
            tensor's numbers. A one-dimensional tensor without a gradient that is read at an element of a tensor, or by
            distance, has `any` length.

    Returns:
        Text of a spec, which `attngen build` takes. A captured tensor is a parameter, under the function's name for it.

    Raises:
        TraceError: the language lacks an operation; one sentence with the function, the operation and the line.
        SpecError: the functions make no valid spec, for example a mask that hides everything.
    """
    import yaml

    traced = trace(score_mod, mask_mod)
    if traced.ignores_qk:
        title = getattr(score_mod, "__name__", type(score_mod).__name__)
        raise TraceError(
            f"score_mod `{title}` does not use the score, as that of a spec does; expected it to, or a call of "
            "attngen.flex_attention, which takes such a function"
        )
    title = name or title_of(score_mod, mask_mod)
    known = None if sizes is None else Sizes(*sizes)
    data = with_gradient_order(data_of(traced, title, head_dim, sharing, dtype, known))
    notes = [
        f"# {t.name}: {str(t.tensor.dtype).removeprefix('torch.')} {list(t.tensor.shape)}, captured"
        for t in traced.tables
    ]
    body = yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None, allow_unicode=True)
    return "\n".join(["# Traced from FlexAttention's functions.", *notes, body])


def title_of(score_mod: Mod | None, mask_mod: Mod | None) -> str:
    """Return a spec's name made from the functions' names."""
    words = [getattr(mod, "__name__", type(mod).__name__) for mod in (mask_mod, score_mod) if mod is not None]
    stem = re.sub("[^a-z0-9]+", "_", "_".join(words).lower()).strip("_")[:48]
    return f"flex_{stem}".rstrip("_") if stem else "flex"


def data_of(
    traced: Traced,
    name: str,
    head_dim: int | tuple[int, int],
    sharing: str,
    dtype: tuple[str, ...],
    sizes: Sizes | None,
    **more: Any,
) -> dict[str, Any]:
    """Return the spec as plain data. `with_gradient_order` adds the rest, for which it needs the compiler."""
    qk, v = (head_dim, head_dim) if isinstance(head_dim, int) else head_dim
    data: dict[str, Any] = {
        "name": name,
        "heads": {"sharing": sharing},
        "head_dim": qk if qk == v else {"qk": qk, "v": v},
        "dtype": list(dtype),
        **more,
    }
    if traced.mask is not None:
        data["mask"] = entry_of(traced.mask, traced.mask_parts, traced, sizes)
    if traced.score is not None:
        data["score"] = [entry_of(traced.score, traced.score_parts, traced, sizes)]
    return data


def with_gradient_order(data: dict[str, Any]) -> dict[str, Any]:
    """Return the spec with the order in which gradients are summed: deterministic, if all of them can be.

    Raise SpecError if it is not a valid spec.
    """
    from attngen.builders.gradient_inputs import in_fixed_order
    from attngen.spec import make_spec

    fixed = in_fixed_order(make_spec(data, f"the spec of `{data['name']}`"))
    return data if fixed else data | {"backward": {"deterministic": False}}


def entry_of(
    text: str, parts: dict[str, str], traced: Traced, sizes: Sizes | None, free: bool = True
) -> dict[str, Any]:
    """Return a mask or modifier as a spec's entry: its text, named parts and parameters. With `free`, a parameter's
    dimension may have `any` length."""
    whole = " ".join((text, *parts.values()))
    params = {
        t.name: _param(t, sizes, occurs(t.name, traced.of_score), free) for t in traced.tables if occurs(t.name, whole)
    }
    return {"expr": text} | ({"let": parts} if parts else {}) | ({"params": params} if params else {})


def _param(table: Table, sizes: Sizes | None, scored: bool, free: bool) -> dict[str, Any]:
    """Return the declaration of a captured tensor. If a score depends on it, it may have a gradient."""
    if len(table.shape) > 4:
        raise TraceError(f"the captured tensor `{table.name}` has {len(table.shape)} dimensions; expected at most 4")
    learned = scored and table.tensor.requires_grad and table.dtype == "fp32"
    return {"tensor": list(dims_of(table, sizes, free)), "dtype": table.dtype} | ({"grad": True} if learned else {})


def dims_of(table: Table, sizes: Sizes | None, free: bool = True) -> tuple[str | int, ...]:
    """Return the dimensions of a captured tensor: a name of the call's dimension where it is read by that position and
    has that length; otherwise the tensor's number.

    A single dimension that is read at a computed index has `any` length if there is no gradient: for example one
    element per document of a call.
    """
    dims = tuple(_dim(n, {read[d] for read in table.reads}, sizes) for d, n in enumerate(table.shape))
    free = free and len(dims) == 1 and isinstance(dims[0], int) and not table.tensor.requires_grad
    return (ANY,) if free and not all(_is_bounded(read[0]) for read in table.reads) else dims


def _is_bounded(index: str) -> bool:
    """True if constants bound an index: it is a constant, a reduction index, a remainder or a clamp. Such reads need no
    checks."""
    match ast.parse(index, mode="eval").body:
        case ast.Constant() | ast.UnaryOp() | ast.BinOp(op=ast.Mod()) | ast.Call(func=ast.Name(id="clamp")):
            return True
        case ast.Name(id=name):
            return name not in _NATURAL
    return False


def _dim(n: int, read: set[str], sizes: Sizes | None) -> str | int:
    """Return the declared dimension of length n that is read at these indices."""
    if read <= {"q_idx", "q_pos", "kv_idx"}:
        # Keys come first: where both positions are read, there are at most as many queries as keys.
        names = [_NATURAL[at] for at in sorted(read)]
    elif len(read) == 1 and (whole := _BLOCKS.fullmatch(next(iter(read)))):
        names = [f"{_NATURAL[whole[1]]}/{whole[2]}"]
    else:
        names = [_NATURAL[at] for at in read if at in _NATURAL] if len(read) == 1 else []
    length = sizes and (lambda name: sizes.of("Hq" if name == "H" else name))
    return next((name for name in names if length is None or length(name) == n), n)
