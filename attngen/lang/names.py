"""The names of the language, and those that a parameter cannot have, each with its reason."""

from __future__ import annotations

import builtins
import keyword
import re
from typing import Any

from attngen.ir.names import CALLED, INTEGERS, ROW_AXES, WRAPPER
from attngen.lang.limits import MAX_EXTREMES

NAME = "[a-z][a-z0-9_]{0,31}"  # of a parameter

ANY = "any"  # a dimension whose length is the tensor's own
# The names of the language, as text of the IR. `q_pos` is the query's position among the keys: the last query is level
# with the last key.
POSITIONS = {n.word: name for name, n in INTEGERS.items() if n.word} | {"q_pos": "q_idx + Nk - Nq"}
CONDITIONS = {"true": True, "false": False}
SCORE = "s"
WHOLE = [name for name, n in INTEGERS.items() if n.least is not None]  # names of whole numbers in the IR
# What a function takes, in words, and the least and most arguments.
CALLS = {
    "min": (f"2 to {MAX_EXTREMES} numbers", 2, MAX_EXTREMES),
    "max": (f"2 to {MAX_EXTREMES} numbers", 2, MAX_EXTREMES),
    "abs": ("1 number", 1, 1),
    "clamp": ("3 numbers: x, the least, the most", 3, 3),
    "where": ("3 arguments: a condition, what holds if it is true, and if not", 3, 3),
    **dict.fromkeys(
        ("exp", "log", "tanh", "sigmoid", "sqrt", "erf", "sin", "cos", "relu", "gelu", "floor", "round"),
        ("1 number", 1, 1),
    ),
    **dict.fromkeys(
        ("any", "all"),
        ("3 arguments: a name, how many iterations, and a condition in which the name is 0, 1, ...", 3, 3),
    ),
    "sum": ("3 arguments: a name, how many iterations, and a number in which the name is 0, 1, ...", 3, 3),
    **dict.fromkeys(("int", "float"), ("1 number or condition", 1, 1)),
}
LANGUAGE = frozenset({*POSITIONS, *CONDITIONS, SCORE, *CALLS})
# A foreign name -> the name that is likely meant.
MEANT = {
    "q": "q_idx",
    "k": "kv_idx",
    "kv": "kv_idx",
    "Nq": "q_len",
    "Nk": "kv_len",
    "select": "where",
    "score": "s",
    "pow": "**",
}
MEANT |= {"ceil": "floor", "trunc": "int"}

# Names that are taken: by arguments of a call, by the generated code and by the IR's text. Who has the names -> the
# names.
RESERVED: dict[str, frozenset[str]] = {
    "an argument or a variable of generated functions": frozenset(WRAPPER),
    "a function or a module that kernels use": frozenset(CALLED) | {
        *("at", "dropout_keep", "dropout_words", "dropped", "floor_div"),
        *("floor_mod", "keep_mask", "math", "mod", "philox_round"),
        *("launch_dependents", "list_position", "running_max", "store_distances", "tile_at"),
        *("to_floor", "to_int", "to_round", "tl", "torch", "triton"),
    },
    "a function or a module that kernels for Hopper use": frozenset((
        *("rematerialize", "barrier_arrive", "barrier_arrive_early", "async_copy"),
        *("semaphore_acquire", "row_vector", "partials_layout", "partial_sums"),
        *("tma_load", "cp_async", "tma_store", "load_row_vector"),
        *("pin_after_wait", "fetch_next", "broadcast", "fence_async_shared"),
        *("next_stage", "gl", "gluon", "split_halves", "pin_before_wait"),
        *("pin_tile", "in_place", "concat_halves", "layout_of", "mbarrier"),
        *("barrier_sync", "pinned_moves_ptx", "pinned_moves_constraints", "next_head", "opaque_zero"),
        *("pack", "semaphore_release", "scaled_iota", "reset", "row_max", "row_sum"),
        *("rows_of", "reinterpret", "store_wait_read", "shared_layout", "groups_of_16"),
        *("count_tiles", "store_acc", "write_index", "tma", "read_index"),
        *("tma_reduce_add", "zero_out_of_bounds", "swizzled_layout", "semaphore_value"),
        *("unpack", "warpgroup_mma", "warpgroup_mma_wait"),
    )),
    "a variable of kernels": frozenset(
        ("split_qk", "split_qk_start", "split_v", "split_v_start")
    )
    | {"swizzle_heads", "d_qk", "d_rope", "d_v", "dtype", "first_head", "heads_in_group", "in_group", "inf", "nan"}
    | {"flat_head", "order", "pid", "order_seen"}
    | {"document_q_first_count", "k_own", "q_own", "v_own", "do_own"}
    | {"acc_part", "acc_part_flight", "keys_tlse", "keys_tlse_acc", "ts_part", "ts_part_flight"}
    | {f"{axis}_{part}" for axis in ROW_AXES for part in ("ahead", "at", "off", "rows", "stop", "tile", "tiles")}
    | {"first_full", "first_tile", "full_tiles", "hidden_tiles", "masked_tiles", "partial_tiles"}
    | {"own_end", "own_full_end"}
    | {"piece", "stage", "ticket"},
}  # fmt: skip
TAKEN = frozenset().union(*RESERVED.values())
# Values of the kernels, and how those made of them are named.
_VALUES = (
    "acc alpha count d[koqpsv] delta dlse dscore g group hq inv_l k keep keys kv l "
    "lse lse2 m masked n[kq] o o_do p pieces product q qk "
)
_VALUES += "p_steep queries rescaled s score shrunk sink2 soft t[0-9]+ total v visible work weights copy "
_VALUES += "log2_sink t[koqpsv] tlse tscore"  # the last of forward mode
_MADE = (
    "acc all alpha at base batch cast column concat deferred divided end first flight full halves head held in init "
)
_MADE += (
    "k kept keys l left list m needed new next o operand out partial partials place q rank remat right rope row rows "
)
_MADE += "scale scale2 seen skip step sum sums v weights words"
# Ops without a result, which have names in the IR only: what they do, and to which values, blocks or tiles.
_OPS = "load release tail reload acquire sync arrive store tma_store zero write yield"
_OPERANDS = f"{_MADE} d[koqsv] t[koqv] delta lse2 semaphore consumer tile total queries group copy write in"
_OF_PIPELINES = "[a-z0-9_]*_smem|stride_[a-z0-9_]*|(t?[qkvo]|d[oqs]|work)_(loads|empty|full|phase|stage)"
_OF_OPS = f"({_OPS.replace(' ', '|')})(_({_OPERANDS.replace(' ', '|')}|[0-9]+))+"
VALUE = f"(?:({_VALUES.replace(' ', '|')})(_({_MADE.replace(' ', '|')}|[0-9]+))*|{_OF_PIPELINES}|{_OF_OPS})"


def name_problem(name: Any) -> str | None:
    """Why a parameter cannot have that name, as a sentence that follows the name; None if it can."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        return "is not a name; expected small letters, digits and _, 32 at most, the first a letter"
    if keyword.iskeyword(name) or name in LANGUAGE or hasattr(builtins, name):
        return f"is a word of {'the language' if name in LANGUAGE else 'Python'}; expected another name"
    what = next((what for what, names in RESERVED.items() if name in names), None)
    if what is None and name in WHOLE:
        what = "a size or a position of kernels"
    if what is None and re.fullmatch(VALUE, name):
        what = "a value of kernels"
    return f"is reserved: {what} has that name; expected another name, as in `my_{name}`" if what else None


def names_schema() -> dict[str, Any]:
    """JSON schema of the names that parameters can have: `not` lists those that are reserved."""
    words = [*keyword.kwlist, *dir(builtins), *LANGUAGE, *TAKEN]
    words += WHOLE
    reserved = sorted({w for w in words if re.fullmatch(NAME, w)})
    return {
        "description": (
            "small letters, digits and _, 32 at most; words of the language, of Python and of generated code are "
            "reserved"
        ),
        "pattern": f"^{NAME}$",
        "not": {"anyOf": [{"enum": reserved}, {"pattern": f"^{VALUE}$"}]},
    }
