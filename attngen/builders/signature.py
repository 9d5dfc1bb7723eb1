"""What signatures of kernels say: what each reads and writes, the tiles its programs own, its grid. They stand
beside their builders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from attngen.ir.dtypes import QUANTISED
from attngen.ir.expr import cdiv, symbol
from attngen.ir.graph import Blocks, Cache, GridAxis, Input, Learned
from attngen.ir.heads import SHARINGS
from attngen.ir.names import (
    BLOCK_LISTS,
    CACHED,
    FLAT,
    GRADIENTS,
    OUTPUTS,
    PAIRS,
    SCALES,
    SHAPES,
    SHARES,
    SUMS,
    block_lists,
    tensor_dtype,
)
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Arg, Type


class Signature(NamedTuple):
    """A kernel's name, the axis of which its programs own tiles, and its tensors; a gradient is shaped as what it is
    the gradient of.

    What it `rewrites`, once for each tile of its own that a program walks over, it reads and writes; others own one
    tile. One that `packs` has the queries of all heads of a group as its rows, head after head: `queries` of each.
    Programs along the axis `shares` of the grid share one loop. Of a gradient, each of them writes its part; if it
    `merges`, two of them write the sum of theirs. To what it `adds` to, other programs add, too. If its heads are
    `apart`, a program has one of the query heads that share a K/V head, and writes gradients for that. Its keys and
    values lie in `cache`, if it has one. Of a `latent`, what is named after q or k has the columns of v.
    """

    name: str
    own: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    pack_gqa: bool = False
    shares: str = ""
    adds: tuple[str, ...] = ()
    apart: bool = False
    merges: bool = False
    about: str = ""
    cache: Cache | None = None
    latent: bool = False

    @property
    def transposed(self) -> bool:
        """Whether it sums gradients or weights of keys: these are the rows of its scores."""
        return not {"dK", "dV", "KEY_MASS"}.isdisjoint(self.writes)

    @property
    def by_key_head(self) -> bool:
        """Whether a program owns a K/V head, for all query heads that share it."""
        return self.pack_gqa or "K" in self.writes or (self.transposed and not self.apart)

    @property
    def scores(self) -> bool:
        """Whether it computes scores. For others nothing is listed, and nothing dropped."""
        return "K" in self.reads

    @property
    def drops(self) -> bool:
        """Whether dropout takes some of its weights away."""
        return self.scores and "KEY_MASS" not in self.writes

    @property
    def masks(self) -> bool:
        """Whether it evaluates the mask. Others have rows alone."""
        return self.scores or "COUNT" in self.writes


def with_sums(signature: Signature, exact: bool) -> Signature:
    """The signature of a kernel that makes weights again, or what these are made of: in SUMS if that is to be
    `exact`, else in the LSE."""
    if not exact:
        return signature
    reads = tuple(part for name in signature.reads for part in (SUMS if name in ("LSE", "LSE2") else (name,)))
    writes = [name for name in signature.writes if name != "LSE2"]
    if "LSE" in writes:
        at = next((i for i, name in enumerate(writes) if name in map(OUTPUTS.get, FLAT)), len(writes))
        writes[at:at] = SUMS
    about = signature.about
    for said, here in (
        (", and the LSE in base 2 (+inf for empty rows)", ""),
        ("delta and LSE2", "delta"),
        ("delta, LSE2 and", "delta and"),
    ):
        about = about.replace(said, here)
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
    if "items" in SHAPES[name]:  # parts of all sequences
        return Type(tensor_dtype(name), (*SHAPES[name][:-1], _column(name, signature)))
    batch, heads, *rest = SHAPES[name]
    written = name in signature.writes and name in GRADIENTS
    parts = [PAIRS if signature.merges else SHARES[signature.shares]] if signature.shares and written else []
    heads = "Hkv" if signature.pack_gqa else "Hq" if written and signature.apart else heads
    return Type(tensor_dtype(name), (batch, heads, *parts, *rest[:-1], _column(name, signature)))


def cached_type(cache: Cache, name: str, column: str) -> Type:
    """The type of a tensor of the cache, which has as many columns as `column` says: of 8-bit numbers, pairs of
    columns.

    Columns that are rotated have the element type of q in any cache.
    """
    if cache.dtype and name != "K_ROPE":
        return Type(QUANTISED[cache.dtype], (*cache.rows, column.replace("D_", "PAIRS_")))
    return Type(tensor_dtype(name), (*cache.rows, column))


def _column(name: str, signature: Signature) -> str:
    """The last dimension of a tensor. Of a latent, what is named as q or k has the columns of v."""
    column = SHAPES[name][-1]
    return "D_V" if signature.latent and column == "D_QK" else column


def parts_of(learned: Iterable[Learned], inputs: tuple[Input, ...]) -> list[Arg]:
    """The tensors that hold parts of inputs' gradients: an element for each query, score, distance or element (see
    Learned.by)."""
    dtypes, shapes = {i.name: i.dtype for i in inputs}, {i.name: i.shape for i in inputs}
    types = {
        "query": lambda x: Type("f32", ("B", "Hq", "Nq")),
        "entry": lambda x: Type("f32", ("B", "Hq", shapes[x.input][x.index.index("entry")], "Nq")),
        "score": lambda x: Type(dtypes[x.input], ("B", "Hq", "Nq", "Nk")),
        "distance": lambda x: Type("f32", ("B", "Hq", "Td", "Nd")),
        "element": lambda x: Type("f32", shapes[x.input]),
    }
    return [Arg(x.parts, "out", types[x.by](x)) for x in learned if x.by != "row"]


def tensor_args(
    signature: Signature,
    read: dict[str, Type],
    blocks: Blocks | None = None,
    dropout: bool = False,
    parts: Iterable[Arg] = (),
) -> list[Arg]:
    """The tensors of a kernel: what it reads, what mask and modifiers, its block lists and dropout read, what it
    writes."""

    def tensors(names: Iterable[str], role: str) -> list[Arg]:
        return [Arg(name, role, tensor_type(name, signature)) for name in names]

    args = tensors(signature.reads, "in")
    args += [Arg(name, "in", type_) for name, type_ in read.items()]
    if blocks and signature.scores:
        listed = block_lists(signature.own, blocks.data)
        if "DQ_SEMAPHORE" in signature.adds:  # turns are made of the ranks in the lists of queries
            ranks, *_ = BLOCK_LISTS["q"]
            listed[ranks] = BLOCK_LISTS["q"][ranks]
        args += [Arg(name, "in", Type("i32", dims)) for name, dims in listed.items()]
    if dropout and signature.drops:
        args.append(Arg("SEED", "in", Type("i64")))
    return [
        *args,
        *tensors(signature.rewrites, "inout"),
        *tensors(signature.adds, "sum"),
        *tensors(signature.writes, "out"),
        *parts,
    ]


def grid(signature: Signature, sharing: str) -> tuple[GridAxis, ...]:
    """One program per tile, head and sequence; or per head and sequence, if it rewrites tensors for each of its tiles.

    One that sums gradients of keys owns them for the whole group of query heads; so does one that packs heads. Several
    programs share each of these, if it shares.
    """
    own = signature.own
    heads = SHARINGS[sharing].axis if signature.by_key_head else "h"
    extents = {"h": "Hq", "hkv": "Hkv"}
    tiles = () if signature.rewrites else (GridAxis(own, cdiv(symbol(AXIS_EXTENT[own]), symbol(AXIS_DIM[own]))),)
    parts = (GridAxis(signature.shares, symbol(SHARES[signature.shares])),) if signature.shares else ()
    return *tiles, *parts, *(GridAxis(h, symbol(extents[h])) for h in (heads,) if h), GridAxis("b", symbol("B"))
