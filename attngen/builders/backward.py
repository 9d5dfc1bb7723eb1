"""The backward kernels as logical IR: `dq`, `dkdv`, and for the fused backward `bwd` and `dq_end`.

In FlashAttention-1's loop order they are `delta`, `bwd` and `dq_end`. Gradients of q, k and v use no atomics: each tile
has one owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy

from attngen.builders.common import KernelBuilder, kv_head
from attngen.builders.gradient_inputs import dq_factor, gradient_slopes, input_gradients, summed_gradients
from attngen.builders.recompute import has_sink, load_stats, probabilities, where_seen
from attngen.builders.row_statistics import gradient_lengths, load_outputs, store_statistics, with_entropy_gradient
from attngen.builders.semantics import S, derivative, exact_sums, listed_blocks, named_by, varies, without_common
from attngen.builders.signature import Signature, with_stats
from attngen.heuristics import WIDEST_FUSED
from attngen.ir import MEMBER, Access, InputGradient, Kernel, Read, cdiv, floordiv, select, symbol, tile
from attngen.ir.heads import SHARINGS
from attngen.ir.split_axes import part
from attngen.lang.part import KV, Q
from attngen.spec import Spec

_HEAD = symbol("h")
DKDV = Signature(
    "dkdv",
    "kv",
    ("Q", "K", "V", "dO", "LSE2", "DELTA"),
    ("dK", "dV"),
    about="Backward, dK and dV: one program per key tile, over query tiles; scores are transposed.",
)
DQ = Signature(
    "dq",
    "q",
    ("Q", "K", "V", "O", "dO", "LSE", "dLSE"),
    ("dQ", "DELTA", "LSE2"),
    about="Backward, dQ: one program per query tile, over key tiles; and delta and LSE2, for dK and dV.",
)
BWD = Signature(
    "bwd",
    "kv",
    ("Q", "K", "V", "dO", "LSE2", "DELTA"),
    ("dK", "dV"),
    ("DQ_ACC",),
    about=(
        "Backward: one program per head loops over key tiles, and for each over query tiles, whose dQ it rewrites in "
        "HBM."
    ),
)
# The fused backward: programs add their parts of dQ.
FUSED = Signature(
    "bwd",
    "kv",
    ("Q", "K", "V", "dO", "LSE2", "DELTA"),
    ("dK", "dV"),
    adds=("dQ_SEMAPHORE",),
    about="Fused backward: one program per key tile, over query tiles; it adds to the dQ of each.",
)
# The same, for programs that each handle some of the query heads that share a K/V head. Two of them store their sum of
# dK and dV.
PAIRED = FUSED._replace(split_axis="split", merges=True, adds=(*FUSED.adds, "dKdV_SEMAPHORE"))
DQ_END = Signature("dq_end", "q", ("DQ_ACC",), ("dQ",), about="After the backward: dQ in the element type.")
# For programs that each handle some of the query heads that share a K/V head.
DKDV_END = Signature(
    "dkdv_end",
    "kv",
    ("DK_PARTIAL", "DV_PARTIAL"),
    ("dK", "dV"),
    about="After the backward: dK and dV, summed over the programs among which the query heads of a group are split.",
)


def _score_gradients(b: KernelBuilder, kept: str, factor: Any, sums_input_gradients: bool = False) -> Any:
    """Compute dS = P * (dP - delta) (FlashAttention-2, Algorithm 2, line 14), without the factor `scale`, which is
    applied at the end.

    With dropout, dS = P * (Z * dP - delta), where Z is 1 / share for kept weights and 0 elsewhere (FlashAttention,
    Appendix B.4). Multiplied by the share, which `delta` already includes: dS = kept P * dP - P * delta. The factor 1 /
    share is applied at the end. Modifiers multiply dS by `factor`, the derivative of the score that the softmax sees:
    dscore is the gradient of that score. In the fused backward, P is multiplied by `factor` first, so that dS needs one
    number per score next to dP, not two. This is not done if `sums_input_gradients`, because gradients of inputs need
    dscore, which is returned. With a gradient of the entropy, delta also includes its part of each score.
    """
    subtrahend = (
        b.compute("delta_sum", symbol("delta") + symbol("dentropy2") * symbol("log2_p"))
        if "dentropy2" in b.types
        else "delta"
    )
    p, p_kept, dp, delta = map(symbol, ("p", "p_kept", "dp", subtrahend))
    if b.signature.adds and factor != 1 and not b.spec.dropout and not sums_input_gradients:
        b.compute("p_steep", where_seen(b, p * factor))
        uses = {"p_steep": "p_steep", "dp": "dp", subtrahend: subtrahend}
        b.map("ds", symbol("p_steep") * (dp - delta), "step", "f32", False, **uses)
        return None
    name = "ds" if factor == 1 else "dscore"
    if b.spec.dropout:
        uses = {"p": "p", "p_kept": kept, "dp": "dp", subtrahend: subtrahend}
        b.map(name, p_kept * dp - p * delta, "step", "f32", False, **uses)
    else:
        b.map(name, p * (dp - delta), "step", "f32", False, **{"p": "p", "dp": "dp", subtrahend: subtrahend})
    if factor != 1:
        b.compute("ds", where_seen(b, symbol("dscore") * factor))
    return symbol(name)


def _scaled(b: KernelBuilder, name: str, value: str, *factors: str, dtype: str = "T", block: str = "entry") -> None:
    """Add a gradient times the factors that were left to the end, cast to the stored type."""
    field = value.rpartition(".")[2]
    uses = {field: value} | {f: f for f in factors if f != "keep_scale" or b.spec.dropout}
    b.map(name, sympy.Mul(*map(symbol, uses)), block, dtype, False, **uses)


def unfused(spec: Spec) -> str:
    """Why no kernel computes dQ, dK and dV at once, as the end of a sentence; empty text if one can.

    Users never see the reasons that there is no backward or that the spec has another loop order. If data lists the
    blocks, full and partial blocks have separate lists, so that no list is in the semaphore order.
    """
    blocks = listed_blocks(spec)
    if not spec.trains:
        return "there is no backward"
    if spec.schedule.order == "kv_outer":
        return "keys are the outer loop"
    if spec.head_dim.qk + spec.head_dim.v > WIDEST_FUSED:
        return (
            f"its heads have head_dim {spec.head_dim.qk} for k and {spec.head_dim.v} for v, and "
            f"dK and dV have room for {WIDEST_FUSED} in all"
        )
    if blocks is not None and blocks.data:
        return "data lists the blocks of the mask"
    left = [x.input for x in summed_gradients(spec) if dq_factor(spec, x) is None]
    return f"the gradient of `{left[0]}` needs separate sums" if left else ""


def build_fused(spec: Spec) -> Kernel:
    """dQ, dK and dV in one kernel: @dkdv, whose programs also add their part of each query tile's dQ, in fp32.

    It has five matrix products in place of seven, since no kernel recomputes the scores (FlashAttention-2, Algorithm
    2). Programs add in the order of their keys, from the last key tile to the first; in arrival order they are slower.
    If query heads share a K/V head, a program handles some of them, and two programs write the sum of their dK and dV;
    @dkdv_end adds up these sums. If inputs differ by query head, a program handles one head, and @dkdv_end adds up the
    results of all programs of a group. Gradients of inputs per score are stored as they are computed.
    """
    return build_dkdv(spec, fused=True)


def build_dkdv(spec: Spec, fused: bool = False) -> Kernel:
    """dK and dV (FlashAttention-2, Algorithm 2): one program per key tile, over the query tiles of its head group.

    If there are few keys, several programs share a key tile, each for some heads of the group. The host sums their
    results.

    Scores are computed transposed, so that P^T and dS^T feed dV and dK straight from registers. Queries past the end
    load LSE2 = +inf, so their weight is zero. Loads come first, then the two products that depend only on them: the
    order that spills least (docs/perf-log.md).

    With keys in the outer loop it is `bwd`, FlashAttention's Algorithm 4: one program visits all key tiles of a head,
    and for each reads dQ from HBM, adds to it and writes it back. dQ starts as 0 and stays in fp32 until `dq_end`.
    """
    sharing, kv_outer = SHARINGS[spec.heads.sharing], spec.schedule.order == "kv_outer"
    signature = _dkdv_signature(spec, fused)
    common, factor = sympy.Integer(1), derivative(spec.modified(), S)
    gradients = tuple(x for x in input_gradients(spec) if x.reduction == "score") if fused else ()
    reads, slopes = gradient_slopes(spec, gradients)
    if fused:
        common, factor = without_common(spec, factor)
    b = KernelBuilder(spec, signature, [common, factor, *slopes])
    b.declare_tensors(gradients)
    b.declare_scalar("scale")
    b.declare_sizes()
    b.declare_seed()

    per_query_head = signature.per_query_head
    kv, head = (sharing.read, symbol("h")) if per_query_head else (sharing.owned, sharing.member)
    nested = sharing.is_shared and not fused
    b.compute_scale()
    home = "tile" if kv_outer else "entry"
    if kv_outer:
        b.loop("keys", "kv", cdiv(b.extent("kv"), symbol("BLOCK_KV")), home, cls="all")
    b.load("k", "K", ("b", kv, "kv", "d_qk"), home)
    b.load("v", "V", ("b", kv, "kv", "d_v"), home)
    b.load_inputs()
    dims = {"dk": "D_QK", "dv": "D_V"}
    starts = {name: b.init(f"{name}_init", 0, "BLOCK_KV", dim, block=home) for name, dim in dims.items()}
    _loop_over_queries(b, home, starts, nested)

    b.carried("step", **({"dk_step": "dk_init", "dv_step": "dv_init"} if nested else starts))
    dk, dv = ("dk_step", "dv_step") if nested else ("dk", "dv")
    _load_query_tile(b, head, kv_outer)
    b.dropout_mask(head, "BLOCK_KV", "BLOCK_Q")
    b.dot("dp", "v", "do", "D_V", "step")
    factor, *slopes = probabilities(b, "k", "q", factor, *slopes)
    p = b.dropped("p")
    dscore = _score_gradients(b, p, factor, sums_input_gradients=bool(gradients))
    for x, slope in zip(gradients, slopes):
        _add_input_gradient(b, x, reads[x.partials], slope, dscore, head=head)
    b.dot("dv_next", p, "do", "BLOCK_Q", "step", acc=dv)
    b.dot("dk_next", "ds", "q", "BLOCK_Q", "step", acc=dk)
    _add_query_gradients(b, head, fused, kv_outer)
    b.add(tile.Yield("_yield_step", ((dk, "dk_next"), (dv, "dv_next"))), "step")

    _store_key_gradients(b, head if per_query_head else kv, home, *_left_to_the_end(b, common))
    if kv_outer:
        b.add(tile.Yield("_yield_tile", ()), home)
    return b.kernel()


def _dkdv_signature(spec: Spec, fused: bool) -> Signature:
    """The signature of the kernel of dK and dV: `bwd` if it is fused or keys are the outer loop, else `dkdv`."""
    if fused:
        signature = _fused(spec)
    elif spec.schedule.order == "kv_outer":
        signature = BWD
    else:
        signature = DKDV._replace(split_axis="split" if SHARINGS[spec.heads.sharing].is_shared else "")
    return with_stats(with_entropy_gradient(spec, signature), exact_sums(spec))


def _load_query_tile(b: KernelBuilder, head: Any, kv_outer: bool) -> None:
    """Load a step's tiles of q, dO and row statistics; and of dQ, if keys are the outer loop."""
    rows = ("b", head, "q")
    b.load("q", "Q", (*rows, "d_qk"), "step")
    b.load("do", "dO", (*rows, "d_v"), "step")
    load_stats(b, rows, "step")
    b.load("delta", "DELTA", rows, "step")
    if "entropy" in b.spec.outputs:
        b.load("dentropy2", "DENTROPY2", rows, "step")
    if kv_outer:
        b.load("dq", "DQ_ACC", (*rows, "d_qk"), "step")


def _add_query_gradients(b: KernelBuilder, head: Any, fused: bool, kv_outer: bool) -> None:
    """Add a step's part of dQ to HBM: in semaphore order if the kernel is fused, in the program's own order if keys are
    the outer loop."""
    if fused:
        b.dot("dq", "ds", "k", "BLOCK_KV", "step")
        b.ordered_add("DQ_ACC", ("b", head, "q", "d_qk"), "dq", "dQ_SEMAPHORE")
    if kv_outer:
        b.dot("dq_next", "ds", "k", "BLOCK_KV", "step", acc="dq")
        b.store("DQ_ACC", ("b", head, "q", "d_qk"), "dq_next", "step")


def _fused(spec: Spec) -> Signature:
    """The signature of the fused kernel.

    The first program at a query tile writes dQ. With a sink, the LSE does not tell which rows see no key, so sums start
    from 0.
    """
    signature = FUSED
    if SHARINGS[spec.heads.sharing].is_shared:
        signature = FUSED._replace(per_query_head=True) if _differs_by_head(spec) else PAIRED
    if has_sink(spec):
        return signature._replace(adds=("DQ_ACC", *signature.adds))
    return signature._replace(writes=("DQ_ACC", *signature.writes))


def _differs_by_head(spec: Spec) -> bool:
    """True if the query heads of a group visit different tiles, or read different values that a program would load once
    for all its tiles."""
    expressions = (spec.visible_by_key(), spec.modified())
    kept = (
        e
        for read in spec.reads()
        if read.name in named_by(spec, expressions) and not varies(spec, read, Q)
        for e in read.index
    )
    return listed_blocks(spec) is not None or any(e.has(symbol("h")) for e in (*expressions, *kept))


def _loop_over_queries(b: KernelBuilder, home: str, starts: dict[str, str], nested: bool) -> None:
    """Add the loop over query tiles, for each query head of the program if heads share a K/V head.

    If `nested`, it is inside a loop over these heads.
    """
    q_tiles = cdiv(b.extent("q"), symbol("BLOCK_Q"))
    heads = sympy.Integer(0), symbol("group")
    first, end = part(*heads, b.split_axis) if b.split_axis else heads
    if not nested:
        ends = (
            [symbol(b.compute(f"{MEMBER}_{side}", e, home, "i32")) for side, e in (("first", first), ("end", end))]
            if b.split_axis
            else []
        )
        b.loop("total", "q", q_tiles, "step", home, heads=(tuple(ends),) if ends else (), **starts)
        return
    b.loop("total", "g", end, "group", home, cls="all", first=first, **starts)
    b.carried("group", **starts)
    b.loop("queries", "q", q_tiles, "step", "group", dk_step="dk", dv_step="dv")
    b.add(tile.Yield("_yield_group", (("dk", "queries.dk_step"), ("dv", "queries.dv_step"))), "group")


def _left_to_the_end(b: KernelBuilder, common: Any) -> list[str]:
    """Compute the factor of dS that all scores of a head share. Return its name, or no name if the factor is 1."""
    return [b.compute("ds_scale", common, "entry")] if common != 1 else []


def _store_key_gradients(b: KernelBuilder, head: Any, home: str, *of_ds: str) -> None:
    """Store dK and dV for the program's head, and for its split of the group, times the factors that were left to the
    end."""
    part = [symbol(b.split_axis.var)] if b.split_axis else []
    index = ("b", head, *(floordiv(x, sympy.Integer(2)) if b.signature.merges else x for x in part), "kv")
    for name, width, factors in (("dK", "d_qk", ("scale", "keep_scale", *of_ds)), ("dV", "d_v", ("keep_scale",))):
        field = name.lower()
        _scaled(b, f"{field}_out", f"total.{field}", *factors, block=home)
        if b.signature.merges:
            b.ordered_accumulate(name, (*index, width), f"{field}_out", ends=name == "dV")
        else:
            b.store(name, (*index, width), f"{field}_out", home)


def build_dq_end(spec: Spec) -> Kernel:
    """dQ in the element type, from the sums of `bwd`; in the fused backward also the gradients of inputs that follow
    from dQ.

    If the sums do not start from 0, rows that see no key get zeros here.
    """
    fused = spec.schedule.order != "kv_outer"
    ordered = fused and not has_sink(spec)
    common = without_common(spec, derivative(spec.modified(), S))[0] if fused else sympy.Integer(1)
    gradients = {x: dq_factor(spec, x) for x in summed_gradients(spec)} if fused else {}
    exact = exact_sums(spec)
    seen = ("INV_L_ALL" if exact else "LSE2") if ordered else ""
    reads = ("DQ_ACC", *([seen] if seen else []), *(["Q"] if gradients else []))
    b = KernelBuilder(spec, DQ_END._replace(reads=reads), [common, *gradients.values()])
    b.declare_tensors(gradients)
    b.declare_scalar("scale")
    b.declare_sizes()
    if spec.dropout:
        b.declare_scalar("keep_scale")
    rows = ("b", "h", "q", "d_qk")
    dq = b.load("dq", "DQ_ACC", rows)
    b.load_inputs()
    if ordered:
        number = b.load(seen.lower(), seen, rows[:3])
        there = symbol(number) > 0 if exact else symbol(number) < sympy.oo
        dq = b.map(
            "dq_seen", select(there, symbol("dq"), sympy.Integer(0)), "entry", "f32", False, dq="dq", **{number: number}
        )
    _scaled(b, "dq_out", dq, "scale", "keep_scale", *_left_to_the_end(b, common))
    b.store("dQ", rows, "dq_out")
    if gradients:
        b.load("q", "Q", rows)
        b.map("product", symbol("q") * symbol("dq"), q="q", dq=dq)
        b.reduce_sum("dq_rows", "product", "D_QK")
    for x, e in gradients.items():
        kept = symbol("keep_scale") if spec.dropout else 1
        part = b.compute(f"{x.partials.lower()}_out", e * symbol("dq_rows") * symbol("scale") * kept, "entry")
        b.store(x.partials, rows[:3], part)
    return b.kernel()


def build_dkdv_end(spec: Spec) -> Kernel:
    """dK and dV of each K/V head: sums in fp32 over the query heads that share it, in the order of the heads."""
    sharing, home = SHARINGS[spec.heads.sharing], "part"
    b = KernelBuilder(spec, DKDV_END)
    b.declare_tensors()
    for name in (*(("Hkv",) if sharing.axis else ()), "splits", "Nk"):
        b.declare_scalar(name)
    columns = {"dk": "D_QK", "dv": "D_V"}
    starts = {name: b.init(f"{name}_init", 0, "BLOCK_KV", width) for name, width in columns.items()}
    b.loop("total", "split", symbol("splits"), home, cls="all", **starts)
    b.carried(home, **starts)
    for name, width in columns.items():
        index = ("b", sharing.owned, "split", "kv", width.lower())
        part = b.load(f"{name}_partial", f"{name.upper()}_PARTIAL", index, home)
        b.map(f"{name}_next", symbol(name) + symbol(part), home, "f32", False, **{name: name, part: part})
    b.add(tile.Yield("_yield_part", tuple((name, f"{name}_next") for name in columns)), home)
    for name, width in columns.items():
        _scaled(b, f"{name}_out", f"total.{name}")
        b.store(f"d{name[1:].upper()}", ("b", sharing.owned, "kv", width.lower()), f"{name}_out")
    return b.kernel()


def build_dq(spec: Spec) -> Kernel:
    """dQ (FlashAttention-2, Algorithm 2, with the loop order of the forward): one program per query tile.

    It runs before the kernels of dK and dV and stores delta and LSE2 for them. That saves a pass over O and dO.
    """
    gradients = tuple(x for x in input_gradients(spec) if x.reduction != "delta")
    factor, (reads, slopes) = derivative(spec.modified(), S), gradient_slopes(spec, gradients)
    places = [e for x in gradients if x.reduction in ("element", "entry") for e in reads[x.partials].index]
    b = KernelBuilder(spec, with_stats(with_entropy_gradient(spec, DQ), exact_sums(spec)), [factor, *slopes, *places])
    b.declare_tensors(gradients)
    b.declare_scalar("scale")
    b.declare_sizes()
    for name in gradient_lengths(spec):
        b.declare_scalar(name)
    b.declare_seed()

    rows = ("b", "h", "q")
    b.compute_scale()
    load_outputs(b)
    b.load("q", "Q", (*rows, "d_qk"))
    b.load("do", "dO", (*rows, "d_v"))
    store_statistics(b)
    starts = {"dq": b.init("dq_init", 0, "BLOCK_Q", "D_QK")}
    sums = _carried_sums(spec, gradients, reads)
    names = [name for of_parts in sums.values() for name in of_parts]
    starts |= {f"{name}_sum": b.init(f"{name}_sum_init", 0, "BLOCK_Q") for name in names}
    b.load_inputs()
    b.loop("keys", "kv", cdiv(b.extent("kv"), symbol("BLOCK_KV")), "step", **starts)

    b.carried("step", **starts)
    b.load("k", "K", ("b", kv_head(spec), "kv", "d_qk"), "step")
    factor, *slopes = probabilities(b, "q", "k", factor, *slopes)
    b.load("v", "V", ("b", kv_head(spec), "kv", "d_v"), "step")
    b.dot("dp", "do", "v", "D_V", "step")
    b.dropout_mask(symbol("h"), "BLOCK_Q", "BLOCK_KV")
    dscore = _score_gradients(b, b.dropped("p"), factor)
    for x, slope in zip(gradients, slopes):
        _add_input_gradient(b, x, reads[x.partials], slope, dscore, sums.get(x.partials, ()))
    b.dot("dq_next", "ds", "k", "BLOCK_KV", "step", acc="dq")
    b.add(tile.Yield("_yield_step", (("dq", "dq_next"), *((f"{name}_sum", f"{name}_next") for name in names))), "step")

    _scaled(b, "dq_out", "keys.dq", "scale", "keep_scale")
    b.store("dQ", (*rows, "d_qk"), "dq_out")
    for x in gradients:
        for entry, name in enumerate(sums.get(x.partials, ())):
            _scaled(b, f"{name}_out", f"keys.{name}_sum", "keep_scale", dtype="f32")
            if x.reduction == "element":
                b.scatter(reads[x.partials], x.partials, f"{name}_out")
            else:
                b.store(
                    x.partials, ("b", "h", sympy.Integer(entry), "q") if x.reduction == "entry" else rows, f"{name}_out"
                )
    return b.kernel()


def _carried_sums(spec: Spec, gradients: Iterable[InputGradient], reads: dict[str, Read]) -> dict[str, list[str]]:
    """Names of the sums that `dq` carries through its loop for gradients of inputs: one per query, or one per entry."""
    by_row = [
        x
        for x in gradients
        if x.reduction == "query" or (x.reduction == "element" and not varies(spec, reads[x.partials], KV))
    ]
    sums = {x.partials: [x.partials.lower()] for x in by_row}
    for x in gradients:
        if x.reduction == "entry":
            sums[x.partials] = [f"{x.partials.lower()}_at_{entry}" for entry in range(_entries(spec, x))]
    return sums


def _entries(spec: Spec, x: InputGradient) -> int:
    """Size of the dimension of an input whose gradient is summed per entry."""
    (shape,) = (i.shape for i in spec.inputs() if i.name == x.input)
    return int(shape[x.index.index("entry")])


def _add_input_gradient(
    b: KernelBuilder, x: InputGradient, read: Read, slope: Any, dscore: Any, sums: Sequence[str] = (), head: Any = _HEAD
) -> None:
    """Add the ops of a loop step for the gradient of an input that is read: store it, scatter it, or add it to the
    carried `sums`."""

    def gradient(name: str, slope: Any) -> str:
        """The gradient per score with respect to the read value."""
        return b.compute(name, where_seen(b, dscore * slope)) if slope != 1 else str(dscore)

    name, kept = x.partials.lower(), symbol("keep_scale") if b.spec.dropout else 1
    if x.reduction == "distance":
        b.add(
            tile.Store(
                f"_{name}_sums", Access(x.partials, (symbol("b"), symbol("h"))), gradient(name, slope), by="distance"
            ),
            "step",
        )
    elif x.reduction == "entry":
        at, of_score = (
            symbol(b.index_value(read, x.index.index("entry"), f"{name}_at", "step")),
            symbol(gradient(name, slope)),
        )
        for entry, of_entry in enumerate(sums):
            _add_rows(b, of_entry, b.compute(of_entry, select(sympy.Eq(at, entry), of_score, sympy.Integer(0))))
    elif sums:
        _add_rows(b, name, gradient(name, slope))
    elif x.reduction == "element":
        b.scatter(read, x.partials, gradient(name, slope * kept), "step")
    else:  # one element per score, stored as it is
        b.compute(name, where_seen(b, dscore * slope * kept), dtype=b.types[x.partials].dtype)
        b.store(x.partials, ("b", head, "q", "kv"), name, "step")


def _add_rows(b: KernelBuilder, name: str, value: str) -> None:
    """Add the sum of each row of a tile to the sum that is carried under a name."""
    sums, rows = f"{name}_sum", b.reduce_sum(f"{name}_rows", value, "BLOCK_KV", "step")
    b.map(f"{name}_next", symbol(sums) + symbol(rows), "step", "f32", False, **{sums: sums, rows: rows})
