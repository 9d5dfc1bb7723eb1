"""Signatures of kernels: the tensors read and written, the axis whose tiles programs own, and the grid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from attngen.builders.positions import chunk_args, with_call_rows
from attngen.ir import AXIS_DIM, AXIS_EXTENT, Blocks, Cache, GridAxis, Input, InputGradient, Type, cdiv, symbol, tile
from attngen.ir.dtypes import QUANTISED
from attngen.ir.heads import SHARINGS
from attngen.ir.names import (
    BLOCK_LISTS,
    CACHED,
    CALL_ROWS,
    FLAT,
    GRADIENTS,
    OUTPUTS,
    PAIRS,
    ROW_STATS,
    SCALES,
    SHAPES,
    SHARES,
    block_lists,
    tensor_dtype,
)


class Signature(NamedTuple):
    """A kernel's name, the axis whose tiles its programs own, and its tensors. A gradient has the shape of its tensor.

    A program that `rewrites` tensors visits all tiles of its axis, and reads and writes these tensors once per tile;
    other programs own one tile. With `pack_gqa` the rows are the queries of all heads of a group, head after head,
    `queries` of each. Programs along `split_axis` of the grid share one loop; each writes its part of a gradient, or
    with `merges`, pairs of programs write the sum of their parts. Several programs add to the tensors in `adds`. With
    `per_query_head`, a program has one of the query heads that share a K/V head, and writes gradients for that query
    head. Keys and values lie in `cache`, if there is one. With `latent`, q and k have v's head_dim.
    With `chunk`, a call has chunks of so many rows of a sequence.
    """

    name: str
    axis: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    pack_gqa: bool = False
    split_axis: str = ""
    adds: tuple[str, ...] = ()
    per_query_head: bool = False
    merges: bool = False
    about: str = ""
    cache: Cache | None = None
    latent: bool = False
    chunk: int = 0

    @property
    def transposed(self) -> bool:
        """True if the kernel sums gradients or weights per key, so that keys are the rows of its scores."""
        return not {"dK", "dV", "KEY_MASS"}.isdisjoint(self.writes)

    @property
    def by_key_head(self) -> bool:
        """True if a program owns a K/V head, for all query heads that share it."""
        return self.pack_gqa or "K" in self.writes or (self.transposed and not self.per_query_head)

    @property
    def scores(self) -> bool:
        """True if the kernel computes scores. Other kernels use no block lists and no dropout."""
        return "K" in self.reads

    @property
    def places(self) -> bool:
        """True if calls say where their rows lie, and the kernel computes with these positions."""
        return bool(self.chunk) and self.masks

    @property
    def drops(self) -> bool:
        return self.scores and "KEY_MASS" not in self.writes

    @property
    def masks(self) -> bool:
        """True if the kernel evaluates the mask. Other kernels process only rows."""
        return self.scores or "COUNT" in self.writes


def with_stats(signature: Signature, exact: bool) -> Signature:
    """The signature of a kernel that writes or recomputes weights: with ROW_STATS in place of the LSE, if it must be
    `exact`."""
    if not exact:
        return signature
    reads = tuple(part for name in signature.reads for part in (ROW_STATS if name in ("LSE", "LSE2") else (name,)))
    writes = [name for name in signature.writes if name != "LSE2"]
    if "LSE" in writes:
        at = next((i for i, name in enumerate(writes) if name in map(OUTPUTS.get, FLAT)), len(writes))
        writes[at:at] = ROW_STATS
    about = signature.about
    for text, replacement in (
        (", and the LSE in base 2 (+inf for empty rows)", ""),
        ("delta and LSE2", "delta"),
        ("delta, LSE2 and", "delta and"),
    ):
        about = about.replace(text, replacement)
    return signature._replace(reads=reads, writes=tuple(writes), about=about)


def tensor_type(name: str, signature: Signature) -> Type:
    """The type in device memory of a tensor that a kernel reads or writes."""
    cache = signature.cache
    if cache and name in SCALES.values():
        return Type(tensor_dtype(name), cache.scales)
    if len(SHAPES[name]) < 3:
        return Type(tensor_dtype(name), SHAPES[name])
    if cache and name in CACHED:
        return cached_type(cache, name, _column(name, signature))
    if "items" in SHAPES[name]:  # work items: splits of all sequences
        return Type(tensor_dtype(name), (*SHAPES[name][:-1], _column(name, signature)))
    batch, heads, *rest = SHAPES[name]
    written = name in signature.writes and name in GRADIENTS
    parts = [PAIRS if signature.merges else SHARES[signature.split_axis]] if signature.split_axis and written else []
    heads = "Hkv" if signature.pack_gqa else "Hq" if written and signature.per_query_head else heads
    type_ = Type(tensor_dtype(name), (batch, heads, *parts, *rest[:-1], _column(name, signature)))
    return with_call_rows(type_) if signature.places else type_


def cached_type(cache: Cache, name: str, column: str) -> Type:
    """The type of a cache tensor with head_dim `column`; an 8-bit cache stores pairs of numbers.

    The rotated part of a key has the element type of q in any cache.
    """
    if cache.dtype and name != "K_ROPE":
        return Type(QUANTISED[cache.dtype], (*cache.rows, column.replace("D_", "PAIRS_")))
    return Type(tensor_dtype(name), (*cache.rows, column))


def _column(name: str, signature: Signature) -> str:
    """The last dimension of a tensor. With a latent, q and k have v's head_dim."""
    column = SHAPES[name][-1]
    return "D_V" if signature.latent and column == "D_QK" else column


def partial_tensors(
    gradients: Iterable[InputGradient], inputs: tuple[Input, ...], places: bool = False
) -> list[tile.Arg]:
    """The tensors of inputs' partial gradients: one element per query, score, distance or element (see
    InputGradient.reduction).

    places: for a kernel that computes positions in the whole sequence. Partial gradients that are summed over queries
    have the rows of the call, others those of the whole sequence.
    """
    dtypes, shapes = {i.name: i.dtype for i in inputs}, {i.name: i.shape for i in inputs}
    types = {
        "query": lambda x: Type("f32", ("B", "Hq", "Nq")),
        "entry": lambda x: Type("f32", ("B", "Hq", shapes[x.input][x.index.index("entry")], "Nq")),
        "score": lambda x: Type(dtypes[x.input], ("B", "Hq", "Nq", "Nk")),
        "distance": lambda x: Type("f32", ("B", "Hq", "Td", "Nd")),
        "element": lambda x: Type("f32", shapes[x.input]),
    }
    made = [(x, types[x.reduction](x)) for x in gradients if x.reduction != "delta"]
    return [tile.Arg(x.partials, "out", with_call_rows(type_) if places and x.by_row else type_) for x, type_ in made]


def tensor_args(
    signature: Signature,
    read: dict[str, Type],
    blocks: Blocks | None = None,
    dropout: bool = False,
    parts: Iterable[tile.Arg] = (),
) -> list[tile.Arg]:
    """The tensor arguments of a kernel: its inputs, those of mask and modifiers, block lists, the dropout seed, its
    outputs."""

    def tensors(names: Iterable[str], role: str) -> list[tile.Arg]:
        return [tile.Arg(name, role, tensor_type(name, signature)) for name in names]

    args = tensors(signature.reads, "in")
    args += [tile.Arg(name, "in", type_) for name, type_ in read.items()]
    if blocks and signature.scores:
        listed = block_lists(signature.axis, blocks.data)
        if "dQ_SEMAPHORE" in signature.adds:  # semaphore tickets are computed from the ranks in the lists of queries
            ranks, *_ = BLOCK_LISTS["q"]
            listed[ranks] = BLOCK_LISTS["q"][ranks]
        args += [tile.Arg(name, "in", Type("i32", dims)) for name, dims in listed.items()]
    if signature.places:
        args += chunk_args(signature.axis, "dQ_SEMAPHORE" in signature.adds)
    if dropout and signature.drops:
        args.append(tile.Arg("SEED", "in", Type("i64")))
    return [
        *args,
        *tensors(signature.rewrites, "inout"),
        *tensors(signature.adds, "sum"),
        *tensors(signature.writes, "out"),
        *parts,
    ]


def grid(signature: Signature, sharing: str) -> tuple[GridAxis, ...]:
    """The grid: one program per tile, head and sequence; or per head and sequence, if a program visits all tiles.

    A kernel that sums gradients per key, or packs heads, has one program for the whole group of query heads. With a
    split axis, several programs share each tile.
    """
    axis = signature.axis
    heads = SHARINGS[sharing].axis if signature.by_key_head else "h"
    extents = {"h": "Hq", "hkv": "Hkv"}
    rows = symbol(CALL_ROWS[AXIS_EXTENT[axis]] if signature.places else AXIS_EXTENT[axis])
    tiles = () if signature.rewrites else (GridAxis(axis, cdiv(rows, symbol(AXIS_DIM[axis]))),)
    parts = (GridAxis(signature.split_axis, symbol(SHARES[signature.split_axis])),) if signature.split_axis else ()
    return *tiles, *parts, *(GridAxis(h, symbol(extents[h])) for h in (heads,) if h), GridAxis("b", symbol("B"))
