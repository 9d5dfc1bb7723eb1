"""The names that kernels, host programs and generated code share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Calls keep lengths below 2**29, so that the sum of a position, a length and a mask's parameter (below 2**30) fits in
# 32 bits.
_LONGEST, _MOST_HEADS, _WIDEST_TILE = 2**29 - 1, 2**15 - 1, 2**10


class Name(NamedTuple):
    """An integer that kernels or host programs know by name.

    about: its meaning.
    math: how formulas write it, as (letter, index); None if they do not.
    least: 1 if it is never 0, else 0; None if expressions take it for any real number, as they do names outside the
    table.
    most: the largest value that it can have in a call; None if no text depends on it.
    letter: the letter for strides of a dimension of that size, as in `stride_q_h`; without one they are numbered.
    source: the Python expression that computes it from the tensors of a call and earlier names; empty if there is none.
    counts: the size, or the number, that this axis of a grid or this loop over heads counts.
    word: its name in expressions of specs.
    uses: `scalar`, kernels take it as an argument; `few`, a model has few values of it, and a kernel is compiled for
    each; `dim`, tensors of kernels have a dimension of that size; `everywhere`, every kernel knows it without an
    argument.
    """

    about: str
    math: tuple[str, str] | None = None
    least: int | None = None
    most: int | None = None
    letter: str = ""
    source: str = ""
    counts: str = ""
    word: str = ""
    uses: str = ""

    def is_(self, use: str) -> bool:
        return use in self.uses.split()


INTEGERS = {
    # Sizes of a call.
    "B": Name("sequences of a call", ("B", ""), 0, None, "b", "q.shape[0]", uses="scalar dim"),
    "Hq": Name("query heads", ("H", "q"), 1, None, "h", "q.shape[1]", uses="scalar few dim"),
    "Hkv": Name("K/V heads", ("H", "kv"), 1, None, "h", "k.shape[1]", uses="scalar few dim"),
    "group": Name(
        "query heads that share a K/V head", ("group", ""), 1, _MOST_HEADS, "", "Hq // max(Hkv, 1)", uses="scalar few"
    ),
    "splits": Name(
        "programs among which the query heads of a group are split",
        ("splits", ""),
        1,
        _MOST_HEADS,
        "s",
        uses="scalar few dim",
    ),
    "split_pairs": Name(
        "pairs of these programs, which sum gradients in place",
        ("pairs", ""),
        1,
        _MOST_HEADS,
        "s",
        uses="scalar few dim",
    ),
    "queries": Name(
        "queries of each head, of which a tile packs those of a group",
        ("queries", ""),
        1,
        _LONGEST,
        "n",
        uses="scalar few dim",
    ),
    "split": Name("number of such a program", ("split", ""), 0, _MOST_HEADS, counts="splits"),
    "Nq": Name("queries of a sequence", ("N", "q"), 0, _LONGEST, "n", "q.shape[2]", uses="scalar dim", word="q_len"),
    "Nk": Name("keys of a sequence", ("N", "k"), 0, _LONGEST, "n", "k.shape[2]", uses="scalar dim", word="kv_len"),
    "Gq": Name("queries of a sequence, of all heads of a group", source="group * Nq"),
    # Sizes of a call that has chunks of a sequence. Kernels then know its lengths as Nq and Nk; host programs know the
    # rows of the call's tensors by these names.
    "q_len": Name("queries of the whole sequence", ("N", "q"), 0, _LONGEST, "n", uses="dim"),
    "kv_len": Name("keys of the whole sequence", ("N", "k"), 0, _LONGEST, "n", uses="dim"),
    "Rq": Name("queries of a sequence that a call has", ("R", "q"), 0, _LONGEST, "n", uses="scalar dim"),
    "Rk": Name("keys of a sequence that a call has", ("R", "k"), 0, _LONGEST, "n", uses="scalar dim"),
    "Cq": Name("chunks of queries that a call has", ("C", "q"), source="-(-Nq // CHUNK)", uses="dim"),
    "Ck": Name("chunks of keys that a call has", ("C", "k"), source="-(-Nk // CHUNK)", uses="dim"),
    "Uq": Name("units of queries in a call's chunks", source="-(-Nq // CHUNK) * (CHUNK // UNIT)", uses="dim"),
    "Uk": Name("units of keys in a call's chunks", source="-(-Nk // CHUNK) * (CHUNK // UNIT)", uses="dim"),
    "Wq1": Name(
        "one more than units of queries in chunks of the sequence",
        source="-(-q_len // CHUNK) * (CHUNK // UNIT) + 1",
        uses="dim",
    ),
    "Wk1": Name(
        "one more than units of keys in chunks of the sequence",
        source="-(-kv_len // CHUNK) * (CHUNK // UNIT) + 1",
        uses="dim",
    ),
    # Sizes of a call that reads keys from a cache.
    "Nc": Name("keys for which a sequence has room in the cache", ("N", "c"), 0, _LONGEST, "n", uses="scalar dim"),
    "Nn": Name("new keys of a sequence, which a call appends", ("N", "n"), 0, _LONGEST, "n", uses="scalar dim"),
    "pages": Name("pages of the cache", ("P", ""), 0, None, "p", uses="dim"),
    "max_pages": Name("pages of a sequence, at most", ("P", "max"), 0, None, "p", uses="scalar dim"),
    "page_rows": Name("keys of a page", ("N", "p"), 1, _LONGEST, "n", uses="scalar few dim"),
    "items": Name(
        "work items (splits of the keys of all sequences), at most", ("items", ""), 1, None, "i", uses="scalar dim"
    ),
    "num_KV_splits": Name("splits of a sequence's keys, one per program", ("splits", ""), 1, None),
    "KV_split": Name("number of such a split", ("split", ""), 0, None, counts="num_KV_splits"),
    "first_item": Name("first work item of a sequence: splits of all sequences before it", None, 0, None),
    "num_SMs": Name("SMs of the device", None, 1, source="runtime.num_sms(q.device)"),
    "fused": Name(
        "1 if one kernel computes dQ, dK and dV",
        None,
        0,
        1,
        source='runtime.is_scheduled(kernels, "bwd", q, k.shape[2])',
    ),
    "Nlse": Name("Nq, or 0 if the LSE has no gradient", source="grad_lse.shape[2]", uses="scalar dim"),
    "Nentropy": Name("Nq, or 0 if the entropy has no gradient", source="grad_entropy.shape[2]", uses="scalar dim"),
    "Tq": Name("blocks along the queries", ("T", "q"), letter="t", source="-(-Nq // BLOCK)", uses="dim"),
    "Tk": Name("blocks along the keys", ("T", "k"), letter="t", source="-(-Nk // BLOCK)", uses="dim"),
    "Ts": Name("strips of blocks along the keys", ("T", "s"), source="Tk * (BLOCK // STRIP)", uses="dim"),
    "Tq1": Name("one more than blocks along the queries", ("T", "q1"), uses="dim"),
    "Tk1": Name("one more than blocks along the keys", ("T", "k1"), uses="dim"),
    "Td": Name("rows of partial sums by distance, of all tiles of queries", uses="dim"),
    "Nd": Name("distances of a query and a key: Nq + Nk", uses="dim"),
    # Programs, and heads that they loop over.
    "b": Name("number of a sequence", ("b", ""), 0, _MOST_HEADS, counts="B", word="b"),
    "h": Name("number of a query head", ("h", ""), 0, _MOST_HEADS, counts="Hq", word="h"),
    "hkv": Name("number of a K/V head", None, 0, _MOST_HEADS, counts="Hkv", word="hkv"),
    "g": Name("number of a query head in its group", None, 0, _MOST_HEADS, counts="group"),
    "side": Name("end of a sequence at which a search starts: 0, the first key; 1, the last", None, 0, 1, counts="2"),
    "halving": Name("number of a step of a binary search, whose first step is 2**28", None, 0, 28, counts="29"),
    "reversed_L2_group": Name("1 in the group of heads that runs in reversed order, else 0", None, 0, 1),
    # Positions.
    "q_idx": Name("number of a query", ("q", ""), 0, _LONGEST, uses="everywhere", word="q_idx"),
    "kv_idx": Name("number of a key", ("k", ""), 0, _LONGEST, uses="everywhere", word="kv_idx"),
    "q_start": Name("first query of a program's tile", ("q", "0"), 0, _LONGEST, uses="everywhere"),
    "kv_start": Name("first key of a program's tile", ("k", "0"), 0, _LONGEST, uses="everywhere"),
    "_q_row": Name("row of a tile's first query in the call's tensors", ("q", "0"), 0, _LONGEST, uses="everywhere"),
    "_kv_row": Name("row of a tile's first key in the call's tensors", ("k", "0"), 0, _LONGEST, uses="everywhere"),
    "KV_splits_idx": Name("number of a split of a sequence's keys", ("p", ""), 0, None, uses="everywhere"),
    "KV_splits_start": Name("first split of a tile that is combined", ("p", "0"), 0, None, uses="everywhere"),
    # Tile sizes, and other names in the closed forms of tiles' memory.
    "BLOCK_Q": Name("queries of a tile", ("B", "r"), 1, _WIDEST_TILE, uses="everywhere"),
    "BLOCK_KV": Name("keys of a tile", ("B", "c"), 1, _WIDEST_TILE, uses="everywhere"),
    "BLOCK_KV_splits": Name("splits of a tile that is combined", ("B", "p"), 1, uses="everywhere"),
    "D_QK_split": Name(
        "columns of q and k that one program computes, if programs split the head_dim; on chip, a power of two",
        ("o", "qk"),
        1,
        uses="everywhere",
    ),
    "D_V_split": Name(
        "columns of v that one program computes, if programs split the head_dim", ("o", "v"), 1, uses="everywhere"
    ),
    "D_QK": Name("columns of a head of q and k; on chip, the next power of two", ("d", "qk"), 1, uses="everywhere"),
    "D_V": Name("columns of a head of v; on chip, the next power of two", ("d", "v"), 1, uses="everywhere"),
    "D_ROPE": Name("columns of a head of q and k that the latent lacks", ("d", "rope"), 1, uses="everywhere"),
    "PAIRS_QK": Name(
        "pairs of columns of a head of k, each packed in 16 bits of a cache", ("p", "qk"), 1, uses="everywhere"
    ),
    "PAIRS_V": Name("pairs of columns of a head of v", ("p", "v"), 1, uses="everywhere"),
    "GROUPS_V": Name("groups of columns of a latent, each with one scale", ("g", "v"), 1, uses="everywhere"),
    "D_QK_PAD": Name("the next power of two", None, 1),
    "D_ROPE_PAD": Name("the next power of two", None, 1),
    "D_V_PAD": Name("the next power of two", None, 1),
    "PAIRS_QK_PAD": Name("the next power of two", None, 1),
    "PAIRS_V_PAD": Name("the next power of two", None, 1),
    "GROUPS_V_PAD": Name("the next power of two", None, 1),
    "elem": Name("bytes of an element of q, k and v", ("elem", ""), 1),
    "stages": Name("tiles in flight along a loop", ("stages", ""), 1),
}
# Axes of grids, and of loops over heads -> the size that each counts.
AXES = {name: n.counts for name, n in INTEGERS.items() if n.counts}
SIZES = tuple(name for name, n in INTEGERS.items() if n.is_("scalar"))  # scalars that the tensors' shapes give
DIMS = frozenset(name for name, n in INTEGERS.items() if n.is_("dim"))  # dimensions of tensors, except head dimensions
ROWS = frozenset(name for name in DIMS if INTEGERS[name].letter == "n")  # dimensions that count queries or keys
# Axes of grids along which programs split a loop (see ir/split_axes.py) -> their sizes.
SHARES = {axis: size for axis, size in AXES.items() if size in INTEGERS and not INTEGERS[size].source}
FOUND = {name: n.source for name, n in INTEGERS.items() if n.source}  # sizes that Python computes in a host program
ROW_AXES = ("q", "kv", "KV_splits")  # index letters of axes whose last tile may extend past the end
# A dimension `Nq/32` has one element per 32 queries; the last block may be shorter.
BLOCKS = "(Nq|Nk)/([1-9][0-9]{0,7})"
# Functions of expressions, defined in ir/expr.py.
CALLED = (
    *("floordiv", "cdiv", "select", "clamp", "exp2", "log2", "exp", "log", "tanh", "sigmoid", "sqrt", "erf", "sin"),
    *("cos", "bitand", "bitor", "bitxor", "divisor", "portion", "floor", "nearest", "trunc", "abs", "min", "max"),
)

SHAPES = {
    "Q": ("B", "Hq", "Nq", "D_QK"),
    "K": ("B", "Hkv", "Nk", "D_QK"),
    "V": ("B", "Hkv", "Nk", "D_V"),
    "O": ("B", "Hq", "Nq", "D_V"),
    "LSE": ("B", "Hq", "Nq"),
    "LSE2": ("B", "Hq", "Nq"),
    "M_ALL": ("B", "Hq", "Nq"),
    "INV_L_ALL": ("B", "Hq", "Nq"),
    "DELTA": ("B", "Hq", "Nq"),
    "dLSE": ("B", "Hq", "Nlse"),
    "COUNT": ("B", "Hq", "Tq", "Ts"),
    "O_ACC": ("B", "Hq", "Nq", "D_V"),
    "ROW_MAX": ("B", "Hq", "Nq"),
    "ROW_SUM": ("B", "Hq", "Nq"),
    "DQ_ACC": ("B", "Hq", "Nq", "D_QK"),
    "dQ_SEMAPHORE": ("B", "Hq", "Nq"),
    "dKdV_SEMAPHORE": ("B", "Hkv", "split_pairs", "Nk"),
    "DK_PARTIAL": ("B", "Hkv", "splits", "Nk", "D_QK"),
    "DV_PARTIAL": ("B", "Hkv", "splits", "Nk", "D_V"),
    "CACHE_SEQLENS": ("B",),
    "PAGE_TABLE": ("B", "max_pages"),
    "K_NEW": ("B", "Hkv", "Nn", "D_QK"),
    "V_NEW": ("B", "Hkv", "Nn", "D_V"),
    "Q_ROPE": ("B", "Hq", "Nq", "D_ROPE"),
    "K_ROPE": ("B", "Hkv", "Nk", "D_ROPE"),
    "K_ROPE_NEW": ("B", "Hkv", "Nn", "D_ROPE"),
    "K_SCALE": ("Hkv",),
    "V_SCALE": ("Hkv",),
    "ENTROPY": ("B", "Hq", "Nq"),
    "dENTROPY": ("B", "Hq", "Nentropy"),
    "DENTROPY2": ("B", "Hq", "Nq"),
    "MAX_SCORE": ("B", "Hq", "Nq"),
    "KEY_MASS": ("B", "Hq", "Nk"),
    "O_PARTIAL": ("Hkv", "items", "Nq", "D_V"),
    "LSE2_PARTIAL": ("Hkv", "items", "Nq"),
    "M_PARTIAL": ("Hkv", "items", "Nq"),
    "L_PARTIAL": ("Hkv", "items", "Nq"),
}
CACHED = ("K", "K_ROPE", "V")  # tensors that kernels read from a KV cache
PAIRS = "split_pairs"  # number of program pairs that split a group's query heads
GRADIENTS = {"dO": "O", "dQ": "Q", "dK": "K", "dV": "V"}  # gradient -> the tensor whose shape it has
TANGENTS = {f"t{x}": x for x in ("Q", "K", "V", "O", "LSE", "ENTROPY")}  # tangent -> the tensor whose shape it has
SHAPES |= {x: SHAPES[of] for x, of in (GRADIENTS | TANGENTS).items()}
# Tensors -> their names in generated Python, where these are not the lower-case names.
VARIABLES = {"O": "out", "dO": "grad_out", "dLSE": "grad_lse", "dENTROPY": "grad_entropy"}
VARIABLES |= {"tO": "tangent_out", "tLSE": "tangent_lse", "tENTROPY": "tangent_entropy"}
VARIABLES |= {"dQ_SEMAPHORE": "_dq_semaphore", "dKdV_SEMAPHORE": "_dkdv_semaphore"}
# Outputs that calls can request besides `out`, by their names in specs, with their tensors. The forward computes
# numbers per query, of which FLAT ones have no gradient and come last; a separate kernel computes numbers per key.
OUTPUTS = {"lse": "LSE", "entropy": "ENTROPY", "max_score": "MAX_SCORE", "key_mass": "KEY_MASS"}
FLAT, OF_KEYS = ("max_score",), ("key_mass",)
# The tensors from which, with scores, kernels recompute weights: the LSE; or, where one fp32 number is too coarse for
# it, as for fp32 arguments, the base-2 maximum and one over the sum of weights relative to it, which are +inf and 0 for
# a query that sees no key. Rounding the LSE gives each weight a relative error, 3e-5 for an LSE of a thousand; products
# of 16-bit operands have larger errors.
LSE, ROW_STATS = ("LSE",), ("M_ALL", "INV_L_ALL")
# The tensors by which the splits of a row's keys are combined: the base-2 LSE of each split; or, for fp32, its base-2
# maximum and its sum of weights relative to it.
LSE_PARTIALS, SUM_PARTIALS = ("LSE2_PARTIAL",), ("M_PARTIAL", "L_PARTIAL")
STATISTICS = (
    *("LSE", "LSE2", *ROW_STATS, "DELTA", "dLSE", "ROW_MAX", "ROW_SUM", "LSE2_PARTIAL", *SUM_PARTIALS),
    *("ENTROPY", "dENTROPY", "DENTROPY2", "MAX_SCORE", "KEY_MASS"),
    *("tLSE", "tENTROPY"),
)
SCALES = {"K": "K_SCALE", "V": "V_SCALE"}  # tensor of an 8-bit cache -> its scales
FP32 = (*STATISTICS, "COUNT", "O_ACC", "DQ_ACC", "O_PARTIAL", *SCALES.values())
INT32 = ("dQ_SEMAPHORE", "dKdV_SEMAPHORE", "CACHE_SEQLENS", "PAGE_TABLE")
SCALARS = {"scale": "f32", **dict.fromkeys(SIZES, "i32")}
DROPOUT_SCALARS = {"dropout_threshold": "i32", "keep_scale": "f32"}
INPUT_DIMS = ("B", "Hq", "Hkv", "Nq", "Nk", "*")  # dimensions of inputs; `*` is any length
SOURCES = ("B", "Hq", "Hkv", "Nq", "Nk", "device")  # arguments of derived tensors, besides inputs and numbers
# Symbols in the index at which an input with a gradient is read.
GRADIENT_SYMBOLS = {"b", "h", "hkv", "q", "kv", "entry", "distance", "Nq", "Nk"}
# Block lists. Tq and Tk are numbers of blocks; rank t is the number of listed blocks before block t, so there is one
# rank more (Tq1, Tk1) than there are blocks. Where data decides, full blocks come first in a list, with ranks of their
# own, and the ranks of the others count these too.
BLOCK_LISTS = {
    "q": {"KV_RANK": ("B", "Hq", "Tq", "Tk1"), "KV_LIST": ("B", "Hq", "Tq", "Tk")},
    "kv": {"Q_RANK": ("B", "Hq", "Tk", "Tq1"), "Q_LIST": ("B", "Hq", "Tk", "Tq")},
}
FULL_RANKS = {"q": "KV_FULL_RANK", "kv": "Q_FULL_RANK"}

# Positions of a call that has chunks of a sequence, in rising order. Kernels look them up for units: a chunk, or a part
# of it that is a power of two long. STARTS are the rows at which the call's units start in the whole sequence, and rank
# u is the number of them before unit u of the whole sequence.
STARTS = {"q": ("Q_STARTS", ("Uq",)), "kv": ("KV_STARTS", ("Uk",))}
START_RANKS = {"q": ("Q_START_RANK", ("Wq1",)), "kv": ("KV_START_RANK", ("Wk1",))}
CHUNKS = {"q": ("q_chunks", "Cq"), "kv": ("kv_chunks", "Ck")}  # inputs of a call: where its chunks start
CALL_ROWS = {"Nq": "Rq", "Nk": "Rk"}  # rows of a sequence -> those that a call with chunks has
WHOLE_LENGTHS = {"Nq": "q_len", "Nk": "kv_len"}  # rows of a sequence -> what host programs of such calls call them
LENGTHS_OF_WHOLE = {name: size for size, name in WHOLE_LENGTHS.items()}


def of_sequence(dims: Sequence[str]) -> tuple[str, ...]:
    """Dimensions as kernels, and programs that derive tensors, know them: Nq and Nk are lengths of the sequence, also
    where calls have chunks of it."""
    return tuple(LENGTHS_OF_WHOLE.get(dim, dim) for dim in dims)


# Further names, in kernels and functions, in modules whose calls have chunks of a sequence.
OF_CHUNKS = {name for name, _ in CHUNKS.values()} | {
    name.lower() for names in (STARTS, START_RANKS) for name, _ in names.values()
}

# Names in the generated module's functions that inputs may not have: arguments, values of host programs, modules.
WRAPPER = {
    "q",
    "k",
    "v",
    "out",
    "lse",
    "lse2",
    "delta",
    "dq",
    "dk",
    "dv",
    "grad_out",
    "grad_lse",
    "need_q",
    "need_kv",
    "need_inputs",
}
WRAPPER |= {
    "plan",
    "block_mask",
    "kv_rank",
    "kv_list",
    "q_rank",
    "q_list",
    "kv_full_rank",
    "q_full_rank",
    "count",
    "blocks",
    "inputs",
}
WRAPPER |= {
    "dropout_p",
    "seed",
    *DROPOUT_SCALARS,
    "scale",
    "return_lse",
    "check",
    "unknown",
    "shapes",
    "group",
    "splits",
    "queries",
    "device",
    "n_q",
    "n_kv",
}
WRAPPER |= {"m_all", "inv_l_all", "m_all_rows", "inv_l_all_rows"}
WRAPPER |= {"q_rows", "o_rows", "lse_rows", "dk_partial", "dv_partial", "o_acc", "row_max", "row_sum"}
WRAPPER |= {"tq", "tk", "tv", "tangent_out", "tangent_lse"}
WRAPPER |= {"dq_acc", "split_pairs", "dk_heads", "dv_heads", "fused"}
WRAPPER |= {"math", "torch", "triton", "kernels", "runtime", "attention", "distance", "self"}
# Further names, in kernels and functions, in modules with more outputs than the LSE.
OF_OUTPUTS = {f"{word}{name}{rows}" for name in OUTPUTS for word, rows in (("", ""), ("return_", ""), ("", "_rows"))}
OF_OUTPUTS |= {
    "tangent_entropy",
    "tentropy",
    "tentropy_init",
    "tentropy_next",
    "tentropy_all",
    "tentropy_out",
    "terms_sum",
}
OF_OUTPUTS |= {"results", "some", "grad_entropy", "dentropy", "dentropy2", "log2_p", "delta_sum", "terms"}
OF_OUTPUTS |= {"mass", "mass_init", "mass_next"}
OF_OUTPUTS |= {"e", "e_init", "e_next", "e_tile", "e_sink", "e_all", "grown", "grown_all", "log2_sink"}
# Further names, in kernels and functions, in modules with a cache.
OF_CACHE = {
    "q_latent",
    "q_all_latent",
    "q_all_rope",
    "q_rope",
    "k_latent",
    "k_rope",
    "k_new_latent",
    "k_new_rope",
}
OF_CACHE |= {
    "unit",
    "place",
    *(
        "at",
        "before",
        "ends",
        "end",
        "few",
        "first",
        "found",
        "i",
        "item",
        "length",
        "most",
        "n",
        "pages",
        "passed",
        "row",
    ),
    *("busy", "fitting", "there", "total", "wanted", "work"),
    "page",
    "page_ahead",
    "page_of_tile",
    "kv_next",
    "caches",
    "new",
}
OF_CACHE |= {
    "k_cache",
    "v_cache",
    "cache_seqlens",
    "page_table",
    "k_new",
    "v_new",
    "o_partial",
    "lse2_partial",
    "with_kvcache",
    "of_cache",
    "k_scale",
    "v_scale",
}
OF_CACHE |= {"half", "second", "size", "bits", "normal", "small", "number"}
# Values with even and odd columns.
_HALVES = ("acc", "k", "k_columns", "part", "q_columns", "rescaled", "s", "v", "v_columns")
OF_CACHE |= {f"{name}_{half}" for name in _HALVES for half in ("even", "odd")} | {
    f"{x}_{of}" for x in "kv" for of in ("pairs", "unit", "size")
}
OF_CACHE |= {"group_v", "k_abs", "k_rope_cache", "columns", "groups"}
OF_CACHE |= {
    "acc_scaled",
    "first_page",
    "p_scaled",
    "p_scaled_cast",
    "pair_qk",
    "pair_v",
    "q_abs",
    "q_size",
    "q_unit",
    "s_scale",
    "s_unit",
}
OF_CACHE |= {"operands", "before", "rows", "base", "m_next", "acc_next", "l_next", "greatest", "weighed"}
OF_CACHE |= {
    f"kv_{cls}_{end}{at}"
    for cls in ("full", "partial")
    for end in ("from", "to")
    for at in ("", "_2", "_3", "_4", "_5", "_6")
}
# Names in the warp-specialized kernel that decodes with latents. Each of its two warp groups has half of the columns
# and every other tile of keys.
OF_CACHE |= {"first_work", "k_other", "l_other", "left_v", "page_even", "page_odd", "places", "right_v"}
OF_CACHE |= {"s_own_flight", "tiles"}
ORDERS = ("q_outer", "kv_outer")  # loop orders; `kv_outer` is FlashAttention-1's
DIRECTIONS = ("forward", "backward")


def stride_names(tensor: str, dims: Sequence[str]) -> list[str]:
    """Stride parameters of a tensor: every dimension except the last, which is contiguous."""
    letters = [INTEGERS[d].letter if d in INTEGERS else "" for d in dims[:-1]]
    if dims[:1] == ("pages",) and len(dims) == 4:
        letters[-1] = "n"  # a row of the page
    return [f"stride_{tensor.lower()}_{c if c and letters.count(c) == 1 else at}" for at, c in enumerate(letters)]


def tensor_dtype(name: str) -> str:
    """The element type of a tensor; `T` unless it is the same in every module."""
    return "f32" if name in FP32 else "i32" if name in INT32 else "T"


def block_lists(axis: str, from_data: bool) -> dict[str, tuple[str, ...]]:
    """The tensors of block lists, with their dimensions, for kernels with this program axis."""
    ranks, *_ = BLOCK_LISTS[axis].values()
    return {FULL_RANKS[axis]: ranks, **BLOCK_LISTS[axis]} if from_data else {**BLOCK_LISTS[axis]}
