"""The properties of a layer that determine its spec, and the module of that spec."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch

from attngen.integrations.transformers.fallback import warn_once
from attngen.integrations.transformers.formula import Formula

# The mask of padded keys in a cache: the others are contiguous in each sequence. The tensors of `key_padding` would be
# computed again in every call.
SPAN: dict[str, Any] = {
    "expr": "kv_idx >= span_first[b] and kv_idx < span_end[b]",
    "params": {name: {"tensor": ["B"], "dtype": "int32"} for name in ("span_first", "span_end")},
}
LONGEST_NAME = 64  # maximum length of a spec's name

Padded = Literal["", "spans", "padded"]  # which keys are not padding: all, a contiguous span, or any


@dataclass(frozen=True)
class Layer:
    """The properties of a layer that determine its spec, except its mask. chunk: rows of a chunk, if the rows of a
    sequence are on several ranks; else 0."""

    sharing: str
    widths: tuple[int, int]
    wide: bool
    tf32: bool
    softcap: float | None
    sink: bool
    bias: bool
    dropout: bool
    decodes: bool
    chunk: int = 0

    def spec(self, formula: Formula, padded: Padded) -> dict[str, Any]:
        """Return the spec of a layer with a mask, as plain data."""
        keys: dict[Padded, list[Any]] = {"": [], "spans": [SPAN], "padded": ["key_padding"]}
        parts = [*formula.parts, *keys[padded]]
        scores: list[Any] = [] if self.softcap is None else [{"softcap": self.softcap}]
        scores += [{"dense_bias": {"learnable": not self.decodes}}] if self.bias else []
        scores += [{"sink": {"learnable": not self.decodes}}] if self.sink else []
        qk, v = self.widths
        data = {
            "name": self._name(formula, padded),
            "heads": {"sharing": self.sharing},
            "head_dim": qk if qk == v else {"qk": qk, "v": v},
            "dtype": ["fp32"] if self.wide else ["bf16", "fp16"],
            "mask": parts[0] if len(parts) == 1 else {"all_of": parts} if parts else "none",
        }
        data |= {"fp32_precision": "tf32"} if self.tf32 else {}
        data |= {"score": scores} if scores else {}
        data |= {"dropout": True} if self.dropout else {}
        data |= {"positions": {"chunk": self.chunk}} if self.chunk else {}
        return data | ({"cache": "contiguous", "backward": False} if self.decodes else {})

    def _name(self, formula: Formula, padded: Padded) -> str:
        """Return a spec's name made from the layer's properties."""
        words = ["decode"] * self.decodes + [_word(part) for part in formula.parts]
        words += [padded] * bool(padded)
        words += ([] if self.softcap is None else [f"softcap_{self.softcap:g}"]) + ["bias"] * self.bias
        words += ["sink"] * self.sink + ["dropout"] * self.dropout + ["tf32" if self.tf32 else "fp32"] * self.wide
        words += [f"chunks_{self.chunk}"] * bool(self.chunk)
        qk, v = self.widths
        name = re.sub(
            "[^a-z0-9]", "_", "_".join(["layer", *words, self.sharing, f"d{qk}" if qk == v else f"d{qk}_{v}"])
        )
        return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 7]}_{_digest(name)}"


def _word(part: Any) -> str:
    if isinstance(part, str):
        return part
    if "expr" in part:
        return f"mask_{_digest(repr(part))}"
    name, fields = next(iter(part.items()))
    if name == "sliding_window":
        return f"window_{fields['left']}_{fields['right']}" if fields["right"] else f"window_{fields['left'] + 1}"
    return {"document": "packed"}.get(name, str(name))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


_MODULES: dict[tuple[Layer, Formula, Padded], ModuleType] = {}
FOUND: dict[str, ModuleType] = {}  # modules built ahead of time, by the hash of their spec; `prefer` adds to them


def prefer(modules: Iterable[ModuleType]) -> None:
    """Use these modules for layers with their specs from now on, in place of modules of the cache."""
    FOUND.update((module.SPEC_HASH, module) for module in modules)
    _MODULES.clear()


def layer_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    softcap: float | None,
    sink: bool,
    bias: bool,
    decodes: bool,
) -> Layer:
    """Return the properties of a layer by its tensors, [B, heads, rows, D], and its arguments."""
    wide = query.dtype == torch.float32
    groups = query.shape[1] // max(1, key.shape[1])
    return Layer(
        sharing="mha" if groups == 1 else "mqa" if key.shape[1] == 1 else "gqa",
        widths=(query.shape[3], value.shape[3]),
        wide=wide,
        tf32=wide and torch.get_float32_matmul_precision() != "highest",
        softcap=softcap,
        sink=sink,
        bias=bias,
        dropout=dropout > 0,
        decodes=decodes,
    )


def module_of(layer: Layer, formula: Formula, padded: Padded) -> ModuleType:
    """Return the module of a layer's spec: built ahead of time, from the cache, or built now."""
    from attngen.api import build
    from attngen.spec import make_spec

    key = (layer, formula, padded)
    found = _MODULES.get(key)
    if found is None:
        data = layer.spec(formula, padded)
        with warnings.catch_warnings():  # about masks that may not mean what their authors intended
            warnings.simplefilter("ignore")
            ahead = FOUND.get(make_spec(data).hash()) if FOUND else None
            found = _MODULES[key] = ahead or build(data)
        if FOUND and ahead is None:
            warn_once(
                f"no module that `register` was given is of `{data['name']}`; it was built now, or is the cache's",
                data["name"],
            )
    return found
