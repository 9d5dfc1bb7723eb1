"""The spec that a pair of FlexAttention's functions says: as data, and as YAML."""

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
    """The YAML of the spec that a pair of FlexAttention's functions says.

    Args:
        score_mod: score_mod(score, b, h, q_idx, kv_idx), or None.
        mask_mod: mask_mod(b, h, q_idx, kv_idx), or None.
        name: the spec's name; of the functions without it.
        head_dim: columns of q and k, and of v; or a pair of these.
        sharing: how query heads share K/V heads: mha, mqa or gqa.
        dtype: element types of the module.
        sizes: (B, Hq, Hkv, Nq, Nk) of a call. With them a dimension of a captured tensor is B, H, Nq or Nk only where
        it is as long;
            without them, wherever it is read at b, h, q_idx or kv_idx. Other dimensions are numbers: those of the
            tensor. A tensor of one dimension without a gradient that is read at what it or another one says, or by
            distance, has `any` length.

    Returns:
        text of a spec, which `attngen build` takes. A captured tensor is a parameter, with the name that the function
        has for it.

    Raises:
        TraceError: an operation that the language does not have; one sentence with the function, the operation and the
        line. SpecError: what the functions say is no spec, as a mask that hides everything.
    """
    import yaml

    traced = trace(score_mod, mask_mod)
    if traced.forgets:
        what = getattr(score_mod, "__name__", type(score_mod).__name__)
        raise TraceError(
            f"score_mod `{what}` does not use the score, as that of a spec does; expected it to, or a call of attngen.flex_attention, "
            "which takes such a function"
        )
    title = name or title_of(score_mod, mask_mod)
    known = None if sizes is None else Sizes(*sizes)
    data = settled(data_of(traced, title, head_dim, sharing, dtype, known))
    notes = [
        f"# {t.name}: {str(t.tensor.dtype).removeprefix('torch.')} {list(t.tensor.shape)}, captured"
        for t in traced.tables
    ]
    body = yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None, allow_unicode=True)
    return "\n".join(["# Traced from FlexAttention's functions.", *notes, body])


def title_of(score_mod: Mod | None, mask_mod: Mod | None) -> str:
    """A spec's name made of the functions' names."""
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
    """The spec as plain data. `settled` says the rest, which takes the compiler."""
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
    return data


def settled(data: dict[str, Any]) -> dict[str, Any]:
    """The spec with how its gradients are summed: in a fixed order, where all can be. SpecError if the language does
    not have it."""
    from attngen.builders.backward import in_fixed_order
    from attngen.spec import make_spec

    fixed = in_fixed_order(make_spec(data, f"the spec of `{data['name']}`"))
    return data if fixed else data | {"backward": {"deterministic": False}}


def written(text: str, parts: dict[str, str], traced: Traced, sizes: Sizes | None, free: bool = True) -> dict[str, Any]:
    """A mask or modifier as a spec has it: its text, named parts and parameters. If not `free`, no dimension of
    these has any length."""
    whole = " ".join((text, *parts.values()))
    params = {
        t.name: _param(t, sizes, occurs(t.name, traced.of_score), free) for t in traced.tables if occurs(t.name, whole)
    }
    return {"expr": text} | ({"let": parts} if parts else {}) | ({"params": params} if params else {})


def _param(table: Table, sizes: Sizes | None, scored: bool, free: bool) -> dict[str, Any]:
    """The declaration of a captured tensor. One that a score depends on may have a gradient."""
    if len(table.shape) > 4:
        raise TraceError(f"the captured tensor `{table.name}` has {len(table.shape)} dimensions; expected at most 4")
    learned = scored and table.tensor.requires_grad and table.dtype == "fp32"
    return {"tensor": list(dims_of(table, sizes, free)), "dtype": table.dtype} | ({"grad": True} if learned else {})


def dims_of(table: Table, sizes: Sizes | None, free: bool = True) -> tuple[str | int, ...]:
    """The dimensions of a captured tensor: those of a call by name, where they are read so and have that length; else
    its own numbers.

    One that is computed with has `any` length, if it is the only one, and there is no gradient: as many documents as a
    call has.
    """
    dims = tuple(_dim(n, {read[d] for read in table.reads}, sizes) for d, n in enumerate(table.shape))
    free = free and len(dims) == 1 and isinstance(dims[0], int) and not table.tensor.requires_grad
    return (ANY,) if free and not all(_is_bounded(read[0]) for read in table.reads) else dims


def _is_bounded(index: str) -> bool:
    """Whether numbers bound an index: it is one, or the name of a turn, a remainder or a clamp. Such reads need no
    checks."""
    match ast.parse(index, mode="eval").body:
        case ast.Constant() | ast.UnaryOp() | ast.BinOp(op=ast.Mod()) | ast.Call(func=ast.Name(id="clamp")):
            return True
        case ast.Name(id=name):
            return name not in _NATURAL
    return False


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
