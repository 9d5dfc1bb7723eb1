"""Dimensions of tiles: their names, the index letters of axes, and the tensor dimensions that they are tiles of."""

from __future__ import annotations

import re
from functools import cache

import sympy

from attngen.ir.expr import Expr, cdiv, symbol
from attngen.ir.names import BLOCKS

# Index letter -> dimension of columns: single columns, pairs of packed 8-bit numbers, or groups that share one scale.
COLUMN_DIM = {
    "d_qk": "D_QK",
    "d_v": "D_V",
    "d_rope": "D_ROPE",
    "pair_qk": "PAIRS_QK",
    "pair_v": "PAIRS_V",
    "group_v": "GROUPS_V",
}
# Dimension of columns -> dimension of the groups that adjacent columns form.
GROUPED = {"D_V": "GROUPS_V", "PAIRS_V": "GROUPS_V"}
# Index letter -> dimension of the left or the right half of D_V's columns.
SIDES = {"left_v": "LEFT_V", "right_v": "RIGHT_V"}
# Index letter -> dimension of a program's own columns, where several programs share the head_dim (split-d).
SPLIT_DIM = {"split_QK": "D_QK_split", "split_V": "D_V_split"}
WHOLE = {"D_QK_split": "D_QK", "D_V_split": "D_V"}  # a program's own columns -> all columns
# Index letter -> dimension of a tile.
AXIS_DIM = {"q": "BLOCK_Q", "kv": "BLOCK_KV", "KV_splits": "BLOCK_KV_splits", **COLUMN_DIM, **SIDES, **SPLIT_DIM}
# Index letter -> length of the whole axis.
AXIS_EXTENT = {"q": "Nq", "kv": "Nk", "KV_splits": "num_KV_splits", **COLUMN_DIM}
AXIS_EXTENT |= {axis: WHOLE[dim] for axis, dim in SPLIT_DIM.items()}
# Dimension of a tile -> the field of a config that gives its length.
TILED = {"BLOCK_Q": "block_q", "BLOCK_KV": "block_kv", "BLOCK_KV_splits": "block_kv"}
TILED |= dict.fromkeys(WHOLE, "columns")
MEMBER = "g"  # the number of a query head among those that share a K/V head
# Dimension of columns -> its name in tiles, where it is padded to a power of two.
PADDED = {dim: f"{dim}_PAD" for dim in COLUMN_DIM.values()}
_UNPADDED = {padded: dim for dim, padded in PADDED.items()}


def first_row(axis: str, places: bool) -> str:
    """The name of the first row of a tile in the tensors of a call. If calls say where their rows lie in a sequence
    (`places`), `q_start` and `kv_start` are positions in the whole sequence, and rows have names of their own."""
    return f"_{axis}_row" if places else f"{axis}_start"


def unpadded(dim: str) -> str:
    """The tensor's dimension for a tile's dimension: `D_QK` for `D_QK_PAD`; other names unchanged."""
    return _UNPADDED.get(dim, dim)


def dimension(dim: str) -> Expr:
    """The length of a tensor's dimension: a number, a size of the call, or for `Nq/32` the number of blocks of 32
    queries."""
    if blocks := re.fullmatch(BLOCKS, dim):
        return cdiv(symbol(blocks[1]), sympy.Integer(int(blocks[2])))
    return sympy.Integer(int(dim)) if dim.isdigit() else symbol(dim)


@cache
def axis_of(index: Expr) -> str:
    """The axis whose current tile an index stands for; the empty string for a number."""
    return next((str(term) for term in sympy.Add.make_args(index) if term.is_Symbol and str(term) in AXIS_DIM), "")
