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
        *("async_copy", "at", "fence_async_shared", "gl", "gluon", "keep_mask", "math", "mbarrier", "tl", "tma"),
        *("torch", "triton", "warpgroup_mma", "warpgroup_mma_wait"),
    },
    "a variable of kernels": frozenset(
        ("d_qk", "d_rope", "d_v", "dtype", "first_head", "inf", "nan", "pid", "piece", "ticket")
    )
    | {"document_q_first_count", "k_own", "q_own", "v_own", "do_own"}
    | {"acc_part", "acc_part_flight", "keys_tlse", "ts_part", "ts_part_flight"}
    | {f"{axis}_{part}" for axis in ROW_AXES for part in ("ahead", "at", "off", "rows", "stop", "tile", "tiles")}
    | {"first_full", "first_tile", "full_tiles", "hidden_tiles", "masked_tiles", "partial_tiles"}
    | {"own_end", "own_full_end"},
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
    "acc all alpha at base batch cast column deferred divided end first flight full halves head held in init "
    "k kept keys l left list m needed new next o operand out partial place q rank right rope row rows "
    "scale scale2 seen skip step sum sums v weights words"
)
VALUE = f"(?:({_VALUES.replace(' ', '|')})(_({_MADE.replace(' ', '|')}|[0-9]+))*|stride_[a-z0-9_]*)"


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
