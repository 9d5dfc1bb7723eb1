"""Benchmark problems: cells, grids of cells, and grids in YAML. attngen's own grids are in catalog.py.

A grid's file holds blocks of cells, each the product of its lists (SPEC files are relative to the current folder):

    peers: [ours, flash, flex]         # optional
    cells:
      - specs: [specs/causal_gqa.yaml, specs/window_gqa.yaml]
        n: [1024, 4096, [1, 65536]]    # rows of q, k and v; [rows of q, rows of k and v] if they differ
        tokens: 16384                  # tokens / rows sequences; or batch: 4
        heads: 16
        kv_heads: 4                    # of gqa; by default a quarter of the heads
        dtype: bf16                    # by default the spec's first dtype
      - specs: [specs/decode_gqa.yaml, specs/decode_sinks_paged_gqa.yaml]
        n: [[1, 65536]]                # for specs with a cache: queries, and keys of each sequence in the cache
        batch: 64
        ragged: 512                    # numbers of keys are uniform from 512 to the number above
        page_size: 16                  # if the spec's page_size is `any`; by default 64
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attngen.errors import AttngenError, shown, suggest
from attngen.ir.dtypes import ELEMENTS
from attngen.ir.heads import SHARINGS
from attngen.spec import Spec, load_spec
from attngen.spec.document import read_document

TOKENS, HEADS = 16384, 16  # defaults: rows of all sequences, query heads
_SIZES = ("tokens", "batch", "heads", "kv_heads")
_CALL = {"ragged": "ragged", "page_size": "page"}  # keys of a block in YAML -> keys of `Cell.call`
_KEYS = ("specs", "n", *_SIZES, "dtype", *_CALL)
PAGE = 64  # default keys per page
_MOST = 2**24


@dataclass(frozen=True, eq=False)
class Cell:
    """One problem: a spec in one element type, with its sizes. `grid` names the plot or tables to which it belongs.

    Calls of a spec with a KV cache read keys and values from it, by `attention.with_kvcache`, and have no backward.

    `call` has the options of its calls:
        dropout_p  probability of dropout
        document   rows of each document, if the spec reads document numbers
        share      one of this many blocks is visible, if the spec reads a block mask
        ragged     fewest keys of a sequence; their numbers are uniform from this to n_kv
        page       keys per page, if the spec takes any
        function   1 if the spec is that of a function for FlexAttention, which both sides get (functions.py)
    """

    grid: str
    spec: Spec
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_kv: int
    call: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        rows = f"N{self.n_q}" if self.n_q == self.n_kv else f"Nq{self.n_q} Nk{self.n_kv}"
        return " ".join(
            [self.spec.name, self.dtype, f"B{self.batch}", f"H{heads}", rows, *(f"{k}={x:g}" for k, x in self.call)]
        )

    def asked(self, name: str) -> float:
        """Return an option of `call`; 0 if it is not given."""
        return dict(self.call).get(name, 0)

    @property
    def cached(self) -> bool:
        return self.spec.cache is not None

    @property
    def quantised(self) -> bool:
        """True if the KV cache holds 8-bit numbers."""
        return self.spec.cache is not None and self.spec.cache.dtype is not None

    @property
    def trains(self) -> bool:
        return self.spec.trains and not self.cached

    @property
    def page(self) -> int:
        """Keys per page; 0 without pages."""
        paged = self.spec.cache.paged if self.spec.cache else None
        if paged is None:
            return 0
        return int(self.asked("page")) or PAGE if paged.page_size == "any" else paged.page_size

    @property
    def score(self) -> str:
        """The modifiers as text."""
        return ", ".join(part.describe() for part in self.spec.score)

    def words(self) -> dict[str, str]:
        """Return the words by which `--only` selects cells, one of each kind."""
        cache = (
            {"lengths": "ragged" if self.asked("ragged") else "even", "page": f"page{self.page}"} if self.cached else {}
        )
        return {
            "spec": self.spec.name,
            "mask": self.spec.mask.describe(),
            "sharing": self.spec.heads.sharing,
            "dtype": self.dtype,
            "dim": f"D{self.spec.head_dim.qk}",
            "rows": f"N{self.n_kv}",
            "queries": f"Nq{self.n_q}",
            "batch": f"B{self.batch}",
            "heads": f"H{self.heads}",
            **cache,
        }


@dataclass(frozen=True)
class Grid:
    """Cells under a name, and their default peers."""

    name: str
    cells: tuple[Cell, ...]
    peers: tuple[str, ...]


def cell(
    grid: str,
    spec: Spec,
    n_q: int,
    n_kv: int,
    *,
    tokens: int = TOKENS,
    batch: int | None = None,
    heads: int = HEADS,
    kv_heads: int | None = None,
    dtype: str | None = None,
    call: Mapping[str, float] = MappingProxyType({}),
) -> Cell:
    """Return a cell, with defaults for missing sizes; AttngenError if the spec does not support the sizes."""
    sharing = SHARINGS[spec.heads.sharing]
    shared = kv_heads if kv_heads and sharing.counts_group else sharing.kv_heads(heads, 4)
    if kv_heads is not None and kv_heads != shared:
        raise AttngenError(
            f"{spec.name} is {sharing.name}, which has {shared} K/V heads for {heads} query heads, not {kv_heads}"
        )
    if heads % shared:
        raise AttngenError(f"{spec.name}: {heads} query heads are not a multiple of {shared} K/V heads")
    if dtype is not None and dtype not in spec.dtype:
        raise AttngenError(f"{spec.name} is not built for {dtype}; expected {' or '.join(spec.dtype)}")
    if "ragged" in call and (spec.cache is None or call["ragged"] > n_kv):
        raise AttngenError(
            f"{spec.name}: `ragged` is {call['ragged']:g}; expected a spec with `cache`, and {n_kv}, the keys, at most"
        )
    if "page" in call and (spec.cache is None or spec.cache.page != "page_rows"):
        raise AttngenError(
            f"{spec.name}: `page_size` is {call['page']:g}; expected a spec with `cache: {{paged: {{page_size: any}}}}`"
        )
    return Cell(
        grid,
        spec,
        dtype or spec.dtype[0],
        batch or max(1, tokens // n_kv),
        heads,
        shared,
        n_q,
        n_kv,
        tuple(call.items()),
    )


# ---------------------------------------------------------------------------------------------- grids in YAML


def read_grid(path: Path) -> Grid:
    """Read a grid from its file; AttngenError, with the line, if it is not valid."""
    try:
        data, lines = read_document(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise AttngenError(f"{path}: byte {error.start} is not UTF-8 text; expected a grid in YAML") from None
    reader = _Reader(path, lines)
    if not isinstance(data, dict) or not isinstance(data.get("cells"), list) or not data["cells"]:
        raise AttngenError(f"{path}: expected a list under `cells:`, each with `specs` and `n`")
    reader.known(data, ("peers", "cells"), ())
    peers = data.get("peers", [])
    if not isinstance(peers, list) or not all(isinstance(p, str) for p in peers):
        raise reader.error(("peers",), "expected a list of names, as in [ours, flash]")
    cells = [c for i, block in enumerate(data["cells"]) for c in reader.block(block, ("cells", i))]
    return Grid(path.stem, tuple(cells), tuple(peers))


class _Reader:
    """A reader of the blocks of cells in one file; errors name the line."""

    def __init__(self, path: Path, lines: dict[tuple[str | int, ...], int]) -> None:
        self.path, self.lines = path, lines

    def error(self, place: tuple[str | int, ...], text: str) -> AttngenError:
        line = next((self.lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in self.lines), None)
        key = next((f"`{key}`: " for key in reversed(place) if isinstance(key, str)), "")
        return AttngenError(f"{self.path}{f', line {line}' if line else ''}: {key}{text}")

    def known(self, data: dict[str, Any], keys: Sequence[str], place: tuple[str | int, ...]) -> None:
        for key in data:
            if key not in keys:
                raise self.error((*place, key), f"is no key of a grid; {suggest(key, keys)}")

    def block(self, data: Any, place: tuple[str | int, ...]) -> Iterator[Cell]:
        if not isinstance(data, dict):
            raise self.error(place, f"is `{shown(data)}`; expected `specs`, `n` and sizes")
        self.known(data, _KEYS, place)
        if "tokens" in data and "batch" in data:
            raise self.error((*place, "batch"), "is given together with `tokens`; expected one of them")
        numbers = {key: self.whole(data[key], (*place, key)) for key in (*_SIZES, *_CALL) if key in data}
        sizes: dict[str, Any] = {key: numbers[key] for key in _SIZES if key in numbers}
        call = {name: numbers[key] for key, name in _CALL.items() if key in numbers}
        dtype = data.get("dtype")
        if dtype not in (None, *ELEMENTS):
            *most, last = ELEMENTS
            raise self.error((*place, "dtype"), f"is `{shown(dtype)}`; expected {', '.join(most)} or {last}")
        for path in self.several(data, "specs", place):
            if not isinstance(path, str):
                raise self.error(
                    (*place, "specs"), f"is `{shown(path)}`; expected files, as in [specs/causal_gqa.yaml]"
                )
            spec = load_spec(path)
            for rows in self.several(data, "n", place):
                pair = rows if isinstance(rows, list) and len(rows) == 2 else [rows, rows]
                n_q, n_kv = (self.whole(n, (*place, "n")) for n in pair)
                try:
                    yield cell(self.path.stem, spec, n_q, n_kv, dtype=dtype, call=call, **sizes)
                except AttngenError as error:
                    raise self.error(place, str(error)) from None

    def several(self, data: dict[str, Any], key: str, place: tuple[str | int, ...]) -> list[Any]:
        found = data.get(key)
        if found is None or found == []:
            raise self.error(place, f"has no `{key}`; expected a list of them")
        return found if isinstance(found, list) else [found]

    def whole(self, value: Any, place: tuple[str | int, ...]) -> int:
        if type(value) is not int or not 1 <= value <= _MOST:
            raise self.error(place, f"is `{shown(value)}`; expected a whole number from 1 to {_MOST}")
        return value


# ---------------------------------------------------------------------------------------------- parts of a grid


def only(cells: Sequence[Cell], text: str) -> list[Cell]:
    """Return the cells that have one of the given words of each kind, such as `D64,D128,causal,N4096`; AttngenError for
    a word that no cell has."""
    known = [{kind: word.lower() for kind, word in c.words().items()} for c in cells]
    given: dict[str, set[str]] = {}
    for word in (w.strip().lower() for w in text.split(",") if w.strip()):
        word = f"n{word}" if word.isdigit() else word
        kinds = {kind for words in known for kind, value in words.items() if value == word}
        if not kinds:
            raise AttngenError(
                f"--only: no cell has `{shown(word)}`; {suggest(word, {w for words in known for w in words.values()})}"
            )
        for kind in kinds:
            given.setdefault(kind, set()).add(word)
    found = [c for c, words in zip(cells, known) if all(words.get(kind) in some for kind, some in given.items())]
    if not found:
        raise AttngenError(f"--only {shown(text)} leaves no cell")
    return found
