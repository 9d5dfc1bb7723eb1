"""What the generated wrapper launches: its kernels, the tensors each reads and writes, and its grid."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import sympy

from attngen.errors import VerifyError
from attngen.ir.expr import Expr, cdiv, floordiv, parse, symbol
from attngen.ir.graph import Blocks, Derived, GridAxis, Input, Learned, Module
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, BLOCKS, Arg, Type
from attngen.ir.text import print_module

SHAPES = {
    "Q": ("B", "Hq", "Nq", "D_QK"),
    "K": ("B", "Hkv", "Nk", "D_QK"),
    "V": ("B", "Hkv", "Nk", "D_V"),
    "O": ("B", "Hq", "Nq", "D_V"),
    "LSE": ("B", "Hq", "Nq"),
    "LSE2": ("B", "Hq", "Nq"),
    "DELTA": ("B", "Hq", "Nq"),
    "dLSE": ("B", "Hq", "Nlse"),
    "COUNT": ("B", "Hq", "Tq", "Ts"),
    "O_ACC": ("B", "Hq", "Nq", "D_V"),
    "ROW_MAX": ("B", "Hq", "Nq"),
    "ROW_SUM": ("B", "Hq", "Nq"),
    "DQ_ACC": ("B", "Hq", "Nq", "D_QK"),
}
STATISTICS = ("LSE", "LSE2", "DELTA", "dLSE", "ROW_MAX", "ROW_SUM")
FP32 = (*STATISTICS, "COUNT", "O_ACC", "DQ_ACC")
SCALARS = {"scale": "f32", **dict.fromkeys(("B", "Hq", "Hkv", "group", "splits", "queries", "Nq", "Nk", "Nlse"), "i32")}
DROPOUT_SCALARS = {"dropout_threshold": "i32", "keep_scale": "f32"}
INPUT_DIMS = ("B", "Hq", "Hkv", "Nq", "Nk", "*")  # of inputs; `*` is any length
SOURCES = ("B", "Hq", "Hkv", "Nq", "Nk", "device")  # of what is derived, besides inputs and numbers
LEARNED = {"b", "h", "hkv", "q", "kv", "distance", "Nq", "Nk"}  # of the places at which a learned input is read
# Lists of the blocks that count. Tq and Tk are numbers of blocks; ranks[t] blocks of a row come before block t, so there is
# one rank more (Tq1, Tk1) than there are blocks. Where data says which count, those with nothing to mask come first in a list,
# with ranks of their own; the ranks of the others count these, too.
BLOCK_LISTS = {
    "q": {"KV_RANK": ("B", "Hq", "Tq", "Tk1"), "KV_LIST": ("B", "Hq", "Tq", "Tk")},
    "kv": {"Q_RANK": ("B", "Hq", "Tk", "Tq1"), "Q_LIST": ("B", "Hq", "Tk", "Tq")},
}
# The query heads of a group are split among programs, so that those which own few keys keep a device busy: a multiprocessor has so
# many keys of all sequences and heads at least (docs/perf-log.md, section 18).
SPLIT_KEYS = 512
STRIP = 32  # keys in one of Ts strips of a row of blocks, for which the kernel `blocks` counts what is visible
FULL_RANKS = {"q": "KV_FULL_RANK", "kv": "Q_FULL_RANK"}

# Names of the generated module's functions, which inputs may not have: arguments, what host programs make, modules.
WRAPPER = {"q", "k", "v", "out", "lse", "lse2", "delta", "dq", "dk", "dv", "grad_out", "grad_lse", "need_q", "need_kv", "need_inputs"}
WRAPPER |= {"plan", "block_mask", "kv_rank", "kv_list", "q_rank", "q_list", "kv_full_rank", "q_full_rank", "count", "blocks", "inputs"}
WRAPPER |= {"dropout_p", "seed", *DROPOUT_SCALARS, "scale", "return_lse", "shapes", "group", "splits", "queries", "device", "n_q", "n_kv"}
WRAPPER |= {"q_rows", "o_rows", "lse_rows", "dk_parts", "dv_parts", "o_acc", "row_max", "row_sum", "dq_acc"}
WRAPPER |= {"math", "torch", "triton", "kernels", "runtime", "attention", "distance", "self"}


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
        return sharing != "mha" and self.by_key_head and not (self.rewrites or self.packs)


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
    "dk": Signature(
        "kv",
        ("Q", "K", "V", "dO", "LSE2", "DELTA"),
        ("dK",),
        about="Backward, dK: one program per key tile, over query tiles; scores are transposed.",
    ),
    "dv": Signature(
        "kv",
        ("Q", "K", "dO", "LSE2"),
        ("dV",),
        about="Backward, dV: one program per key tile, over query tiles; scores are transposed.",
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
ORDERS = ("q_outer", "kv_outer")  # of loops
FEW_QUERIES = 64  # so many fill a tile: with fewer, grouped heads that share keys are packed into one (docs/perf-log.md, section 18)
DIRECTIONS = ("forward", "backward")


def signature_of(kernel: str, order: str) -> Signature:
    """What a kernel reads and writes, under an order of loops."""
    return (KV_OUTER if order == "kv_outer" else SIGNATURES)[kernel]


def tensor_dtype(name: str) -> str:
    """The element type of a tensor that has one in every module."""
    return "f32" if name in FP32 else "T"


def block_lists(blocks: Blocks, own: str) -> dict[str, tuple[str, ...]]:
    """The tensors, with their dimensions, by which kernels that own tiles of an axis find the blocks to visit."""
    ranks, *_ = BLOCK_LISTS[own].values()
    return {FULL_RANKS[own]: ranks, **BLOCK_LISTS[own]} if blocks.data else {**BLOCK_LISTS[own]}


def tensor_type(name: str, signature: Signature, sharing: str) -> Type:
    """The type in device memory of a tensor that a kernel reads or writes; of one that splits of a group write, with a part for each."""
    batch, heads, *rest = SHAPES.get(name) or SHAPES[name.removeprefix("d")]
    split = ["splits"] if signature.is_split(sharing) and name in signature.writes else []
    return Type(tensor_dtype(name), (batch, "Hkv" if signature.packs else heads, *split, *rest))


def input_tensors(inputs: tuple[Input, ...], derived: tuple[Derived, ...]) -> dict[str, Type]:
    """What masks and modifiers read: input tensors, and what the wrapper derives from them."""
    given = {i.name: Type(i.dtype, i.shape) for i in inputs if i.shape}
    return given | {name: Type(d.dtype, shape) for d in derived for name, shape in zip(d.names, d.shapes)}


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
        args += [Arg(name, "in", Type("i32", dims)) for name, dims in block_lists(blocks, signature.own).items()]
    if dropout and kernel not in BESIDE:
        args.append(Arg("SEED", "in", Type("i64")))
    args += tensors(signature.rewrites, "inout") + tensors(signature.writes, "out")
    return [*args, *(parts if kernel == "dq" else ())]


def grid(signature: Signature, sharing: str) -> tuple[GridAxis, ...]:
    """One program per tile, head and sequence; or per head and sequence, if it rewrites tensors for each of its tiles.

    One that sums gradients of keys owns them for the whole group of query heads, or for a split of it; so does one that packs heads.
    """
    own = signature.own
    heads = {"mha": "h", "gqa": "hkv", "mqa": ""}[sharing] if signature.by_key_head else "h"
    extents = {"h": "Hq", "hkv": "Hkv"}
    tiles = () if signature.rewrites else (GridAxis(own, cdiv(symbol(AXIS_EXTENT[own]), symbol(AXIS_DIM[own]))),)
    splits = (GridAxis("split", symbol("splits")),) if signature.is_split(sharing) else ()
    return *tiles, *splits, *(GridAxis(h, symbol(extents[h])) for h in (heads,) if h), GridAxis("b", symbol("B"))


def query_heads(is_split: bool) -> tuple[Expr, Expr]:
    """First and end of the query heads, by number in their group, of a program that owns a tile of keys: all, or those of its split."""
    group, split, splits = map(symbol, ("group", "split", "splits"))
    return (floordiv(group * split, splits), floordiv(group * split + group, splits)) if is_split else (sympy.Integer(0), group)


def verify_interface(module: Module) -> Module:
    """The module itself, if its kernels are those that the wrapper launches; VerifyError with a reason otherwise."""
    for reason in _reasons(module):
        raise VerifyError("interface", reason, print_module(module))
    return module


def _reasons(module: Module) -> Iterator[str]:
    if module.order not in ORDERS:
        yield f"`order {module.order}`; expected {' or '.join(ORDERS)}"
    if [name for name, _ in module.schedules] != [kernel.name for kernel in module.kernels]:
        have = ", ".join(name for name, _ in module.schedules) or "nothing"
        yield f"there are schedules for {have}; expected one for each kernel, in order"
    if not {"forward", "backward"} <= {host.name for host in module.hosts}:
        yield f"the host programs are {', '.join(host.name for host in module.hosts) or 'none'}; expected forward and backward"
    given = {i.name: Type(i.dtype, i.shape) for i in module.inputs}
    names = [*(i.name for i in module.inputs), *(name for d in module.derived for name in d.names)]
    own = WRAPPER | {x.parts.lower() for x in module.learned}  # in which it has the parts of a gradient
    if module.blocks is None or module.blocks.data:  # a call gives no list of blocks
        own -= {"block_mask"}
    for name in names:
        taken = name in own or hasattr(builtins, name) or name.endswith("_strides")
        if names.count(name) > 1 or taken or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield f"`{name}` is declared twice, is a name of the wrapper's own, or is not in small letters"
    for name, type_ in given.items():
        sized = all(d in INPUT_DIMS or d.isdigit() or re.fullmatch(BLOCKS, d) for d in type_.dims)
        if type_.dtype not in ("b1", "i32", "f32", "T") or not sized:
            yield f"`input {name} : {type_.dtype}[{', '.join(type_.dims)}]`; expected b1, i32, f32 or T of {', '.join(INPUT_DIMS)}, numbers"
        if not type_.dims and type_.dtype not in ("i32", "f32"):
            yield f"`input {name} : {type_.dtype}[]`; expected a number, i32 or f32"
    for i in module.inputs:
        for option in i.options:
            if option not in ("grad", "broadcast") and not option.startswith("least="):
                yield f"`input {i.name}` has the option `{option}`; expected grad, broadcast or least=n"
    for d in module.derived:
        for source in d.sources:
            if source not in given and source not in SOURCES and not source.isdigit() and not re.fullmatch(BLOCKS, source):
                yield f"`derive {' '.join(d.names)}` is of `{source}`, which is no input"
        if len(d.names) != len(d.shapes) or d.dtype not in ("b1", "i32", "f32"):
            yield f"`derive {' '.join(d.names)}` needs a shape for each name, and is b1, i32 or f32"
    for x in module.learned:
        if not any(i.name == x.input and i.grad and len(x.index) in (0, len(i.shape)) for i in module.inputs):
            yield f"`learn {x}` is of no input with the option grad"
        if stray := {str(s) for e in x.index for s in parse(e).free_symbols} - LEARNED:
            yield f"`learn {x}` has `{min(stray)}`; expected {', '.join(sorted(LEARNED))} and numbers"
    if module.blocks and module.blocks.pattern and (module.blocks.pattern in WRAPPER or hasattr(builtins, module.blocks.pattern)):
        yield f"the pattern `{module.blocks.pattern}` is a name of the wrapper's own"
    read = {a.name.lower() for k in module.kernels for a in k.args if a.name not in SHAPES}
    for name in given:
        used = name in read or name in {s for d in module.derived for s in d.sources}
        if not used and not any(a.name == name for k in module.kernels for a in k.args):
            yield f"`input {name}` is read by no kernel"
