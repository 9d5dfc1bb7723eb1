"""One table of the names that kernels, host programs and generated code share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Calls keep lengths below 2**29: then a sum of a position, a length and a mask's parameter (below 2**30) has 32 bits.
_LONGEST, _MOST_HEADS, _WIDEST_TILE = 2**29 - 1, 2**15 - 1, 2**10


class Name(NamedTuple):
    """A whole number that kernels or host programs know by name.

    least: 1 if it is never 0, else 0. None if expressions take it for any real number, as they do a name that is not in the table.
    most: the largest value that it can have in a call; None if no text depends on it.
    letter: how the stride of a dimension of that size is named, as in `stride_q_h`. Without one it is named by its number.
    source: how Python computes it from the tensors of a call and the names before it; empty if it does not.
    is_scalar: kernels take it as an argument.
    is_few: a model has few values of it, and there is a compiled kernel for each.
    is_dim: tensors of kernels have a dimension of that size.
    is_everywhere: every kernel has it, and none takes it as an argument.
    word: what specs call it in expressions.
    """

    least: int | None = None
    most: int | None = None
    letter: str = ""
    source: str = ""
    is_scalar: bool = False
    is_few: bool = False
    is_dim: bool = False
    is_everywhere: bool = False
    word: str = ""


INTEGERS = {
    # Sizes of a call.
    "B": Name(0, None, "b", "q.shape[0]", is_scalar=True, is_dim=True),
    "Hq": Name(1, None, "h", "q.shape[1]", is_scalar=True, is_few=True, is_dim=True),
    "Hkv": Name(1, None, "h", "k.shape[1]", is_scalar=True, is_few=True, is_dim=True),
    "group": Name(1, _MOST_HEADS, source="Hq // max(Hkv, 1)", is_scalar=True, is_few=True),  # query heads that share a K/V head
    "splits": Name(1, _MOST_HEADS, "s", is_scalar=True, is_few=True, is_dim=True),  # parts of a group, each with programs of its own
    "queries": Name(1, _LONGEST, is_scalar=True, is_few=True),  # Nq, in a kernel whose rows are the queries of all heads of a group
    "Nq": Name(0, _LONGEST, "n", "q.shape[2]", is_scalar=True, is_dim=True, word="q_len"),
    "Nk": Name(0, _LONGEST, "n", "k.shape[2]", is_scalar=True, is_dim=True, word="kv_len"),
    "Gq": Name(source="group * Nq"),  # those rows
    "Nlse": Name(source="grad_lse.shape[2]", is_scalar=True, is_dim=True),  # Nq, or 0 if the LSE has no gradient
    "Tq": Name(letter="t", source="-(-Nq // BLOCK)", is_dim=True),  # blocks of a block-sparse mask, along each axis
    "Tk": Name(letter="t", source="-(-Nk // BLOCK)", is_dim=True),
    "Tq1": Name(is_dim=True),  # one more than there are blocks
    "Tk1": Name(is_dim=True),
    "Ts": Name(source="Tk * (BLOCK // STRIP)", is_dim=True),  # strips of a row of blocks
    "Td": Name(is_dim=True),  # tiles of queries, each with its part of a sum over distances
    "Nd": Name(is_dim=True),  # distances of a query and a key: Nq + Nk
    # Which program: the axes of the grid, and the head of its group that it has come to.
    "b": Name(0, _MOST_HEADS, word="b"),
    "h": Name(0, _MOST_HEADS, word="h"),
    "hkv": Name(0, _MOST_HEADS, word="hkv"),
    "split": Name(0, _MOST_HEADS),
    "g": Name(0, _MOST_HEADS),
    # Positions: of a query and a key, and of the first ones of a tile.
    "q_idx": Name(0, _LONGEST, is_everywhere=True, word="q_idx"),
    "kv_idx": Name(0, _LONGEST, is_everywhere=True, word="kv_idx"),
    "q_start": Name(0, _LONGEST, is_everywhere=True),
    "kv_start": Name(0, _LONGEST, is_everywhere=True),
    # Sizes of tiles, and what closed forms of memory name.
    "BLOCK_Q": Name(1, _WIDEST_TILE, is_everywhere=True),
    "BLOCK_KV": Name(1, _WIDEST_TILE, is_everywhere=True),
    "D_QK": Name(1, is_everywhere=True),
    "D_V": Name(1, is_everywhere=True),
    "D_QK_PAD": Name(1),
    "D_V_PAD": Name(1),
    "stages": Name(1),
    "elem": Name(1),
}
SIZES = tuple(name for name, n in INTEGERS.items() if n.is_scalar)  # scalars that the tensors' shapes give
DIMS = frozenset(name for name, n in INTEGERS.items() if n.is_dim)  # of tensors, besides head dimensions
FOUND = {name: n.source for name, n in INTEGERS.items() if n.source}  # sizes that Python computes in a host program

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
# How generated Python calls tensors that it does not name by their small letters.
VARIABLES = {"O": "out", "dO": "grad_out", "dLSE": "grad_lse"}
STATISTICS = ("LSE", "LSE2", "DELTA", "dLSE", "ROW_MAX", "ROW_SUM")
FP32 = (*STATISTICS, "COUNT", "O_ACC", "DQ_ACC")
SCALARS = {"scale": "f32", **dict.fromkeys(SIZES, "i32")}
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


def stride_names(tensor: str, dims: Sequence[str]) -> list[str]:
    """Stride parameters of a tensor: every dimension but the last, which is contiguous."""
    letters = [INTEGERS[d].letter if d in INTEGERS else "" for d in dims[:-1]]
    return [f"stride_{tensor.lower()}_{c if c and letters.count(c) == 1 else at}" for at, c in enumerate(letters)]


def tensor_dtype(name: str) -> str:
    """The element type of a tensor that has one in every module."""
    return "f32" if name in FP32 else "T"


def block_lists(own: str, from_data: bool) -> dict[str, tuple[str, ...]]:
    """The tensors, with their dimensions, by which kernels that own tiles of an axis find the blocks to visit."""
    ranks, *_ = BLOCK_LISTS[own].values()
    return {FULL_RANKS[own]: ranks, **BLOCK_LISTS[own]} if from_data else {**BLOCK_LISTS[own]}
