"""The mask of a module, and the values of the names in it: what a plan is made from before any kernel runs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from attngen.builders.positions import without_chunks
from attngen.conformance.derive import function
from attngen.errors import AttngenError
from attngen.interp.host import execute_host
from attngen.interp.numeric import value
from attngen.ir import Input, Module, symbol_names
from attngen.ir.names import INTEGERS
from attngen.ir.parser import parse_module
from attngen.ir.sizes import Sizes

IR_FILE = "schedule.ir"  # in the folder of a generated module
TILE = 1 << 16  # positions per program of an executed host program
PLANE = ("b", "h")  # a plane is the score matrix of one sequence and one query head
Arrays = Mapping[str, Any]


def ir_of(source: Module | ModuleType | str | os.PathLike[str] | Any) -> Module:
    """Return the IR of a module: of a generated module, its `attention` function, its folder or its file of IR. An IR
    module is returned as it is.

    Of a file, only the header is parsed unless the mask needs host programs, so the result may have no kernels. Raises
    AttngenError if there is no IR.
    """
    if isinstance(source, Module):
        return source
    if not isinstance(source, (str, os.PathLike)):
        owner = source if isinstance(source, ModuleType) else sys.modules.get(getattr(source, "__module__", ""))
        if owner is None or not getattr(owner, "__file__", None):
            raise AttngenError(
                f"{source!r} belongs to no generated module; expected `module.attention`, the module, or its folder"
            )
        source = Path(str(owner.__file__)).parent
    path = Path(source)
    path = path / IR_FILE if path.is_dir() else path
    if not path.is_file():
        raise AttngenError(f"{path} does not exist; expected the IR of a generated module: build the spec again")
    return _parsed(path, path.stat().st_mtime_ns)


@cache
def _parsed(path: Path, changed: int) -> Module:
    text = path.read_text(encoding="utf-8")
    programs = re.search(r"^(schedule|host|kernel)\b", text, re.MULTILINE)
    header = text[: programs.start()] if programs else text
    derived = re.search(r"^\s*derive .* = @", header, re.MULTILINE)
    return parse_module(text if derived else header, str(path))


class MaskValues(NamedTuple):
    """The values of a mask's names in a call of `seq_len` queries and keys.

    scalars: numbers by name.
    tensors: arrays by name, with the dimensions of each.
    planes: the planes (b, h) whose masks may differ; one if all are equal.
    group: query heads that share a K/V head.
    """

    scalars: dict[str, Any]
    tensors: dict[str, tuple[tuple[str, ...], np.ndarray]]
    planes: list[tuple[int, int]]
    group: int


def mask_values(
    module: Module, seq_len: int, inputs: Arrays, cu_seqlens: list[int] | None, q_heads: int, kv_heads: int
) -> MaskValues:
    """Return the values of all names in a module's mask.

    inputs: what a call passes, by keyword: numbers, NumPy arrays or torch tensors.
    cu_seqlens: where each packed document starts, and the end of the last, for masks that read them.
    Raises AttngenError if an input of the mask is missing.
    """
    module = without_chunks(module)
    given = {name: _array(x) for name, x in inputs.items()}
    if cu_seqlens is not None:
        starts = [i.name for i in module.inputs if is_starts(i)]
        if not starts:
            raise AttngenError(f"the mask of {module.name} reads no cu_seqlens; leave them out, or pass document ids")
        given |= dict.fromkeys(starts, np.asarray(cu_seqlens, np.int32))
    names = {name for e in _expressions(module) for name in symbol_names(e)}
    read = names | {r.tensor for r in module.meaning.reads if r.name in names}
    if module.blocks and not module.blocks.data and not module.blocks.pattern:
        read.add("block_mask")
        if "block_mask" not in given:
            raise AttngenError(f"the mask of {module.name} needs `block_mask`; pass it in `inputs`")
    shapes = {i.name: i.shape for i in module.inputs}
    batches = [len(given[name]) for name, shape in shapes.items() if shape[:1] == ("B",) and name in given]
    sizes = Sizes(max(batches, default=1), q_heads, kv_heads, seq_len, seq_len)
    for d in module.derived:
        if read & set(d.names):
            given |= _derived(module, d, given, sizes)
            shapes |= dict(zip(d.names, d.shapes))
    missing = sorted(read & shapes.keys() - given.keys())
    if missing:
        raise AttngenError(f"the mask of {module.name} needs `{missing[0]}`; pass it in `inputs`")
    scalars = {name: given[name].item() for name, shape in shapes.items() if not shape and name in given}
    tensors = {name: (shape, given[name]) for name, shape in shapes.items() if shape and name in given}
    if "block_mask" in read and "block_mask" not in shapes:
        tensors["block_mask"] = (("*",) * given["block_mask"].ndim, given["block_mask"])
    scalars |= {"Nq": seq_len, "Nk": seq_len, "Hq": q_heads, "Hkv": kv_heads, "B": sizes.batch}
    scalars["group"] = q_heads // kv_heads
    return MaskValues(scalars, tensors, _planes(module, names, tensors, sizes, given), q_heads // kv_heads)


def _array(x: Any) -> np.ndarray:
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def is_starts(i: Input) -> bool:
    """True for an input with the starts of packed documents: its numbers rise from 0 to the number of rows."""
    return i.promises.get("first") == "0" and "rising" in i.promises


def _expressions(module: Module) -> list[Any]:
    """Return the mask, the bounds on its data, and the indices of elements that it reads."""
    meaning = module.meaning
    found = [meaning.where, *(e for fact in meaning.known for e in (fact.needs, fact.enough))]
    names = {name for e in found for name in symbol_names(e)}
    return found + [e for r in reversed(meaning.reads) if r.name in names for e in r.index]


def _derived(module: Module, d: Any, given: dict[str, np.ndarray], sizes: Sizes) -> dict[str, np.ndarray]:
    """Return the tensors that a call derives from its inputs before kernels run."""
    missing = [s for s in d.sources if any(i.name == s for i in module.inputs) and s not in given]
    if missing:
        raise AttngenError(f"the mask of {module.name} needs `{missing[0]}`; pass it in `inputs`")
    if d.program:
        tile = min(TILE, 1 << max(4, (sizes.n_kv - 1).bit_length()))
        sources = {s.upper() if s in given else s: given[s] if s in given else sizes.of(s) for s in d.sources}
        made = execute_host(module, module.host(d.program), sources, {"BLOCK_Q": tile, "BLOCK_KV": tile})
        return {name: made[name.upper()] for name in d.names}
    cpu = torch.device("cpu")
    args = [torch.as_tensor(given[s]) if s in given else cpu if s == "device" else sizes.of(s) for s in d.sources]
    results = function(d.function)(*args)
    return dict(zip(d.names, map(_array, results if isinstance(results, tuple) else (results,))))


def _planes(module: Module, names: set[str], tensors: Any, sizes: Sizes, given: Any) -> list[tuple[int, int]]:
    """Return the planes whose masks may differ."""
    used = {dim for r in module.meaning.reads if r.name in names for e in r.index for dim in symbol_names(e)} | names
    dims = {dim for name, (shape, _) in tensors.items() if name in names for dim in shape}
    by_sequence, by_head = "b" in used or "B" in dims, bool({"h", "hkv"} & used or {"Hq", "Hkv"} & dims)
    batch = sizes.batch
    if module.blocks and "block_mask" in given and not module.blocks.data:
        listed = np.shape(given["block_mask"])
        by_sequence |= len(listed) > 3 and listed[-4] > 1
        by_head |= len(listed) > 2 and listed[-3] > 1
        batch = max(batch, listed[-4] if len(listed) > 3 else 1)
    return [(b, h) for b in range(batch if by_sequence else 1) for h in range(sizes.q_heads if by_head else 1)]


def row_values(module: Module, known: MaskValues, plane: tuple[int, int]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the values of one plane's mask that do not depend on the key, as numbers or arrays [seq_len], and the
    names of those that depend on it or are no integers."""
    b, h = plane
    n = known.scalars["Nq"]
    values: dict[str, Any] = {**known.scalars, "b": b, "h": h, "hkv": h // known.group, "q_idx": np.arange(n)}
    others = set()
    read = {r.name for r in module.meaning.reads}
    for name, (shape, array) in known.tensors.items():
        if name in read:
            continue
        at = _at_plane(shape, array, b, h, known.group)
        rest = [dim for dim in shape if dim not in ("B", "Hq", "Hkv")]
        if rest in ([], ["Nq"]):
            values[name] = at.astype(np.int64) if at.dtype.kind in "iu" else at
        if rest not in ([], ["Nq"]) or at.dtype.kind not in "iu":
            others.add(name)
    for r in module.meaning.reads:
        if any(set(symbol_names(e)) & ({"kv_idx"} | (others - values.keys())) for e in r.index):
            others.add(r.name)
        elif r.tensor in known.tensors:
            values[r.name] = _element(known.tensors[r.tensor][1], [value(e, values) for e in r.index])
            if values[r.name].dtype.kind not in "iu":
                others.add(r.name)
    unknown = {s for e in _expressions(module) for s in symbol_names(e)} - values.keys() - INTEGERS.keys()
    return values, frozenset(others | unknown)


def pair_values(
    module: Module, known: MaskValues, plane: tuple[int, int], rows: np.ndarray, keys: np.ndarray
) -> dict[str, Any]:
    """Return the values of one plane's mask at some rows [r, 1] and keys [k], broadcast to [r, k]."""
    b, h = plane
    values: dict[str, Any] = {**known.scalars, "b": b, "h": h, "hkv": h // known.group, "q_idx": rows, "kv_idx": keys}
    places = {"B": b, "Hq": h, "Hkv": h // known.group, "Nq": rows, "Nk": keys}
    read = {r.name for r in module.meaning.reads}
    for name, (shape, array) in known.tensors.items():
        if name not in read and all(dim in places for dim in shape):
            values[name] = array[tuple(_within(places[dim], array.shape[i]) for i, dim in enumerate(shape))]
    for r in module.meaning.reads:
        if r.tensor in known.tensors:
            values[r.name] = _element(known.tensors[r.tensor][1], [value(e, values) for e in r.index])
    return values


def _within(index: Any, length: int) -> Any:
    """An index along a dimension, which is 0 if its length is 1, for inputs that broadcast."""
    return 0 if length == 1 else index


def _at_plane(shape: tuple[str, ...], array: np.ndarray, b: int, h: int, group: int) -> np.ndarray:
    at = {"B": b, "Hq": h, "Hkv": h // group}
    index = tuple(_within(at[dim], array.shape[i]) if dim in at else slice(None) for i, dim in enumerate(shape))
    return np.asarray(array[index])


def _element(array: np.ndarray, index: list[Any]) -> np.ndarray:
    """Return the elements at an index; a negative one counts from the end, and out of bounds they are 0 (false)."""
    index = [np.asarray(x) for x in np.broadcast_arrays(*index)]
    index = [_within(x, array.shape[i]) if array.shape[i] == 1 else x for i, x in enumerate(index)]
    index = [np.where(np.asarray(x) < 0, np.asarray(x) + length, x) for x, length in zip(index, array.shape)]
    inside = np.logical_and.reduce([(x >= 0) & (x < length) for x, length in zip(index, array.shape)])
    found = array[tuple(np.clip(x, 0, length - 1) for x, length in zip(index, array.shape))]
    return np.where(inside, found, np.zeros((), array.dtype))
