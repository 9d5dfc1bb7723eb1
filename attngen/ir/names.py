"""One table of the names that kernels, host programs and generated code share."""

from __future__ import annotations

from attngen.ir.graph import Blocks, Derived, Input
from attngen.ir.ops import Arg, Type

SIZES = ("B", "Hq", "Hkv", "group", "splits", "queries", "Nq", "Nk", "Nlse")  # scalars that the tensors' shapes give
LETTERS = {
    "B": "b",
    "Hq": "h",
    "Hkv": "h",
    "Nq": "n",
    "Nk": "n",
    "Tq": "t",
    "Tk": "t",
    "splits": "s",
}  # how strides are named; others by number

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
FULL_RANKS = {"q": "KV_FULL_RANK", "kv": "Q_FULL_RANK"}

# Names of the generated module's functions, which inputs may not have: arguments, what host programs make, modules.
WRAPPER = {"q", "k", "v", "out", "lse", "lse2", "delta", "dq", "dk", "dv", "grad_out", "grad_lse", "need_q", "need_kv", "need_inputs"}
WRAPPER |= {"plan", "block_mask", "kv_rank", "kv_list", "q_rank", "q_list", "kv_full_rank", "q_full_rank", "count", "blocks", "inputs"}
WRAPPER |= {"dropout_p", "seed", *DROPOUT_SCALARS, "scale", "return_lse", "shapes", "group", "splits", "queries", "device", "n_q", "n_kv"}
WRAPPER |= {"q_rows", "o_rows", "lse_rows", "dk_parts", "dv_parts", "o_acc", "row_max", "row_sum", "dq_acc"}
WRAPPER |= {"math", "torch", "triton", "kernels", "runtime", "attention", "distance", "self"}
ORDERS = ("q_outer", "kv_outer")  # of loops
DIRECTIONS = ("forward", "backward")


def stride_names(arg: Arg) -> list[str]:
    """Stride parameters of a tensor: every dimension but the last, which is contiguous."""
    letters = [LETTERS.get(d, str(at)) for at, d in enumerate(arg.type.dims[:-1])]
    return [f"stride_{arg.name.lower()}_{c if letters.count(c) == 1 else at}" for at, c in enumerate(letters)]


def tensor_dtype(name: str) -> str:
    """The element type of a tensor that has one in every module."""
    return "f32" if name in FP32 else "T"


def block_lists(blocks: Blocks, own: str) -> dict[str, tuple[str, ...]]:
    """The tensors, with their dimensions, by which kernels that own tiles of an axis find the blocks to visit."""
    ranks, *_ = BLOCK_LISTS[own].values()
    return {FULL_RANKS[own]: ranks, **BLOCK_LISTS[own]} if blocks.data else {**BLOCK_LISTS[own]}


def input_tensors(inputs: tuple[Input, ...], derived: tuple[Derived, ...]) -> dict[str, Type]:
    """What masks and modifiers read: input tensors, and what the wrapper derives from them."""
    given = {i.name: Type(i.dtype, i.shape) for i in inputs if i.shape}
    return given | {name: Type(d.dtype, shape) for d in derived for name, shape in zip(d.names, d.shapes)}
