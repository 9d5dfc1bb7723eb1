"""The signatures of kernels: what each reads and writes, the tiles its programs own, its grid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from attngen.ir.expr import cdiv, symbol
from attngen.ir.graph import Blocks, GridAxis, Input, Learned
from attngen.ir.heads import SHARINGS
from attngen.ir.names import SHAPES, block_lists, tensor_dtype
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Arg, Type


class Signature(NamedTuple):
    """The axis of which a kernel's programs own tiles, and its tensors; a gradient is shaped as what it is the gradient of.

    What it `rewrites`, once for each tile of its own that a program walks over, it reads and writes; others own one tile.
    One that `packs` has the queries of all heads of a group as its rows, head after head: `queries` of each.
    """

    own: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    packs: bool = False
    about: str = ""

    @property
    def by_key_head(self) -> bool:
        """Whether a program owns a K/V head, for all query heads that share it."""
        return self.packs or not {"dK", "dV"}.isdisjoint(self.writes)

    def is_split(self, sharing: str) -> bool:
        """Whether several programs may share a tile of keys, each for some query heads of the group: the wrapper sums what they write."""
        return SHARINGS[sharing].is_shared and self.by_key_head and not (self.rewrites or self.packs)


_STATISTICS_OF_ROWS = "delta = rowsum(o * do) - dlse, and the LSE in base 2 (+inf for empty rows)."
SIGNATURES = {
    "fwd": Signature("q", ("Q", "K", "V"), ("O", "LSE"), about="Forward: online softmax over key tiles, one program per query tile."),
    "packed": Signature(
        "q",
        ("Q", "K", "V"),
        ("O", "LSE"),
        packs=True,
        about="Forward of few queries: as rows of one tile those of all heads that share a K/V head, head after head.",
    ),
    "blocks": Signature("q", (), ("COUNT",), about="Before all: how many pairs the mask leaves visible, of each strip of a block."),
    "delta": Signature(
        "q",
        ("O", "dO", "LSE", "dLSE"),
        ("DELTA", "LSE2"),
        about=f"Before dK and dV, where no dQ is wanted: {_STATISTICS_OF_ROWS}",
    ),
    "dkdv": Signature(
        "kv",
        ("Q", "K", "V", "dO", "LSE2", "DELTA"),
        ("dK", "dV"),
        about="Backward, dK and dV: one program per key tile, over query tiles; scores are transposed.",
    ),
    "dq": Signature(
        "q",
        ("Q", "K", "V", "O", "dO", "LSE", "dLSE"),
        ("dQ", "DELTA", "LSE2"),
        about="Backward, dQ: one program per query tile, over key tiles; and delta and LSE2, for dK and dV.",
    ),
}
KV_OUTER = {
    "fwd": Signature(
        "kv",
        ("Q", "K", "V"),
        rewrites=("O_ACC", "ROW_MAX", "ROW_SUM"),
        about="Forward: one program per head, over key tiles, and for each over query tiles, whose sums it rewrites in HBM.",
    ),
    "fwd_end": Signature(
        "q",
        ("O_ACC", "ROW_MAX", "ROW_SUM"),
        ("O", "LSE"),
        about="After the forward: outputs in the element type, divided by their sums, and the LSE.",
    ),
    "delta": SIGNATURES["delta"]._replace(about=f"Before the backward: {_STATISTICS_OF_ROWS}"),
    "bwd": Signature(
        "kv",
        ("Q", "K", "V", "dO", "LSE2", "DELTA"),
        ("dK", "dV"),
        ("DQ_ACC",),
        about="Backward: one program per head, over key tiles, and for each over query tiles, whose dQ it rewrites in HBM.",
    ),
    "dq_end": Signature("q", ("DQ_ACC",), ("dQ",), about="After the backward: dQ in the element type."),
}
ROWS = ("delta", "fwd_end", "dq_end")  # kernels of rows alone
BESIDE = ("blocks", *ROWS)  # kernels that compute no scores: nothing is listed for them, and nothing dropped


def signature_of(kernel: str, order: str) -> Signature:
    """What a kernel reads and writes, under an order of loops."""
    return (KV_OUTER if order == "kv_outer" else SIGNATURES)[kernel]


def tensor_type(name: str, signature: Signature, sharing: str) -> Type:
    """The type in device memory of a tensor that a kernel reads or writes; of one that splits of a group write, with a part for each."""
    batch, heads, *rest = SHAPES.get(name) or SHAPES[name.removeprefix("d")]
    split = ["splits"] if signature.is_split(sharing) and name in signature.writes else []
    return Type(tensor_dtype(name), (batch, "Hkv" if signature.packs else heads, *split, *rest))


def parts_of(learned: Iterable[Learned], inputs: tuple[Input, ...]) -> list[Arg]:
    """The tensors that hold parts of inputs' gradients: an element for each query, score, distance or element (see Learned.by)."""
    dtypes, shapes = {i.name: i.dtype for i in inputs}, {i.name: i.shape for i in inputs}
    types = {
        "query": lambda x: Type("f32", ("B", "Hq", "Nq")),
        "score": lambda x: Type(dtypes[x.input], ("B", "Hq", "Nq", "Nk")),
        "distance": lambda x: Type("f32", ("B", "Hq", "Td", "Nd")),
        "element": lambda x: Type("f32", shapes[x.input]),
    }
    return [Arg(x.parts, "out", types[x.by](x)) for x in learned if x.by != "row"]


def tensor_args(
    kernel: str,
    signature: Signature,
    sharing: str,
    read: dict[str, Type],
    blocks: Blocks | None = None,
    dropout: bool = False,
    parts: Iterable[Arg] = (),
) -> list[Arg]:
    """The tensors of a kernel: what it reads, what mask and modifiers, its block lists and dropout read, what it writes."""

    def tensors(names: Iterable[str], role: str) -> list[Arg]:
        return [Arg(name, role, tensor_type(name, signature, sharing)) for name in names]

    args = tensors(signature.reads, "in")
    args += [Arg(name.upper(), "in", type_) for name, type_ in read.items()]
    if blocks and kernel not in BESIDE:
        args += [Arg(name, "in", Type("i32", dims)) for name, dims in block_lists(signature.own, blocks.data).items()]
    if dropout and kernel not in BESIDE:
        args.append(Arg("SEED", "in", Type("i64")))
    args += tensors(signature.rewrites, "inout") + tensors(signature.writes, "out")
    return [*args, *(parts if kernel == "dq" else ())]


def grid(signature: Signature, sharing: str) -> tuple[GridAxis, ...]:
    """One program per tile, head and sequence; or per head and sequence, if it rewrites tensors for each of its tiles.

    One that sums gradients of keys owns them for the whole group of query heads, or for a split of it; so does one that packs heads.
    """
    own = signature.own
    heads = SHARINGS[sharing].axis if signature.by_key_head else "h"
    extents = {"h": "Hq", "hkv": "Hkv"}
    tiles = () if signature.rewrites else (GridAxis(own, cdiv(symbol(AXIS_EXTENT[own]), symbol(AXIS_DIM[own]))),)
    splits = (GridAxis("split", symbol("splits")),) if signature.is_split(sharing) else ()
    return *tiles, *splits, *(GridAxis(h, symbol(extents[h])) for h in (heads,) if h), GridAxis("b", symbol("B"))
