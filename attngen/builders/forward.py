"""The forward kernel as logical IR, in either loop order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy

from attngen.builders.common import KernelBuilder, in_bounds, kv_head, scores
from attngen.builders.quantised import interleave_values, load_latents, multiply_keys, multiply_values, split_queries
from attngen.builders.semantics import S, exact_partials, exact_sums, unbounded
from attngen.builders.signature import Signature, with_stats
from attngen.ir import AXIS_DIM, Expr, Kernel, KVSplit, Type, cdiv, exp2, finite, log2, select, symbol, tile
from attngen.ir.dtypes import ELEMENTS
from attngen.ir.names import OF_KEYS, OUTPUTS
from attngen.ir.split_axes import part
from attngen.ir.split_kv import work_item
from attngen.spec import Spec

FWD = Signature(
    "fwd",
    "q",
    ("Q", "K", "V"),
    ("O", "LSE"),
    about="Forward: online softmax over key tiles, for one query tile of a head.",
)
# FlashAttention-1's loop order (`order: kv_outer`): keys in the outer loop, queries in the inner one.
FWD_KV_OUTER = Signature(
    "fwd",
    "kv",
    ("Q", "K", "V"),
    rewrites=("O_ACC", "ROW_MAX", "ROW_SUM"),
    about="Forward: one program per head loops over key tiles, and for each over query tiles, whose accumulator, "
    "maximum and sum it rewrites in HBM.",
)
FWD_END = Signature(
    "fwd_end",
    "q",
    ("O_ACC", "ROW_MAX", "ROW_SUM"),
    ("O", "LSE"),
    about="After the forward: the outputs, normalised, in the element type, and the LSE.",
)


def sink_of(spec: Spec) -> Expr | None:
    """The sink logit of each row's softmax, or None."""
    return next((s.sink() for s in spec.score if s.sink() is not None), None)


def build_forward(spec: Spec, signature: Signature = FWD, kv_split: KVSplit | None = None) -> Kernel:
    """FlashAttention-2 (Dao 2023), Algorithm 1: each program has one query tile of a head, and runs the online softmax
    over key tiles.

    The accumulator stays unnormalised until the end, and LSE = ln(sum exp(score)) is saved for the backward. A row that
    sees no key gets zeros, and LSE = -inf, or its sink logit if the spec has a sink.

    With a latent (DeepSeek-V2, 2024, section 2.1.2, with its projections absorbed in q), q and k are in two tensors
    each: the part with v's head_dim, and the rotated part. In a cache the first part is also the values. A cache may
    hold keys and values in 8 bits (see attngen/builders/quantised.py).

    If the signature packs heads, a tile has the queries of all heads that share a K/V head. With split-KV, each program
    has one split of the keys, and stores partial results (see `_store_split`).
    """
    signature = _forward_signature(spec, signature)
    sink = sink_of(spec)
    b = KernelBuilder(spec, signature, [] if sink is None or signature.split_axis else [sink])
    b.kv_split = kv_split
    kv = b.heads[symbol("hkv")]
    head = kv if signature.pack_gqa else "h"
    b.declare_tensors()
    b.declare_scalar("scale")
    b.declare_sizes()
    b.declare_seed()

    b.compute_scale()
    for suffix, head_dim in _head_dims(spec).items():
        b.load(f"q{suffix}", f"Q{suffix.upper()}", ("b", head, "q", head_dim))
    quantised = signature.cache is not None and signature.cache.scale in ("head", "page")
    if quantised:
        split_queries(b, kv)
    accumulators = {f"acc_{half}": "PAIRS_V" for half in tile.HALVES} if quantised else {"acc": "D_V"}
    initial = _initial_state(b, accumulators)
    b.load_inputs()
    first, end = sympy.Integer(0), cdiv(b.extent("kv"), symbol("BLOCK_KV"))
    if b.split_axis:
        first, end = part(first, end, b.split_axis)
    b.loop("keys", "kv", end, "step", first=first, **initial)

    b.carried("step", **initial)
    (multiply_keys if quantised else _multiply_queries_keys)(b, kv)
    masked = _softmax_step(b, accumulators)
    carried = multiply_values(b, kv, "soft.p") if quantised else _multiply_weights_values(b, kv)
    b.reduce_sum("p_sum", "soft.p", "BLOCK_KV", "step")  # after the product, so that both can overlap
    if "e" in initial:
        carried["e"] = _entropy_sums(b, masked)
    b.map("l_next", symbol("l") * symbol("alpha") + symbol("p_sum"), "step", l="l", alpha="soft.alpha", p_sum="p_sum")
    b.add(tile.Yield("_yield_step", (("m", "soft.m"), ("l", "l_next"), *carried.items())), "step")

    final = {
        **{name: f"keys.{name}" for name in initial if name not in accumulators},
        "acc": interleave_values(b, "keys") if quantised else "keys.acc",
    }
    if b.split_axis:
        _store_split(b, head, final)
    else:
        store_results(b, head, sink, final, _probability_factor(b))
    return b.kernel()


def _forward_signature(spec: Spec, signature: Signature) -> Signature:
    """The signature of a forward kernel for the spec: with its outputs, and with a latent's tensors if it has one."""
    if spec.rope:
        signature = of_latent(signature)
    if "LSE" not in signature.writes:
        return signature
    outputs = ("O", *(OUTPUTS[name] for name in spec.outputs if name not in OF_KEYS))
    return with_stats(signature._replace(writes=outputs), exact_sums(spec) and signature.cache is None)


def _initial_state(b: KernelBuilder, accumulators: dict[str, str]) -> dict[str, str]:
    """Initial values of the loop over keys: running maximum, sum, accumulators, and the entropy's sum if it is needed.

    accumulators: names, each with its dimension of columns.
    """
    initial = {"m": b.init("m_init", -sympy.oo, "BLOCK_Q"), "l": b.init("l_init", 0, "BLOCK_Q")}
    initial |= {acc: b.init(f"{acc}_init", 0, "BLOCK_Q", columns) for acc, columns in accumulators.items()}
    if "ENTROPY" in b.signature.writes:
        initial["e"] = b.init("e_init", 0, "BLOCK_Q")
    return initial


def _head_dims(spec: Spec) -> dict[str, str]:
    """The contraction dimensions of Q K^T, keyed by the suffix in the names of the q and k tensors."""
    return {"": "d_v", "_rope": "d_rope"} if spec.rope else {"": "d_qk"}


def _multiply_queries_keys(b: KernelBuilder, kv: Any) -> None:
    """Compute `s`, the unscaled product Q K^T of a query tile and a key tile, both in the element type."""
    scaled, head_dims = b.signature.cache is not None and b.signature.cache.scale, _head_dims(b.spec)
    for suffix, head_dim in head_dims.items():
        if scaled and not suffix:
            load_latents(b, kv)
        else:
            b.load_keys(f"k{suffix}", f"K{suffix.upper()}", kv, head_dim, "step")
    b.dropout_mask(symbol("h"), "BLOCK_Q", "BLOCK_KV")
    of_rope = b.dot("s_rope", "q_rope", "k_rope", "D_ROPE", "step") if b.spec.rope else None
    b.dot("s", "q", "k", AXIS_DIM[head_dims[""]], "step", acc=of_rope)


def _softmax_step(b: KernelBuilder, accumulators: Iterable[str]) -> str:
    """Compute a tile's probabilities, relative to the running maximum, from the product `s`, and rescale the
    accumulators. Returns the masked scores."""
    scores(b)
    masked = b.mask("masked", "score", sympy.And(b.where, in_bounds("kv")), "step")
    guard = "always" if unbounded(b.spec) else "partial"
    b.add(tile.SoftmaxStep("soft", masked, "m", Type("f32", ("BLOCK_Q", "BLOCK_KV")), guard=guard), "step")
    for acc in accumulators:
        b.map(acc.replace("acc", "rescaled"), symbol("acc") * symbol("alpha"), "step", acc=acc, alpha="soft.alpha")
    return masked


def _multiply_weights_values(b: KernelBuilder, kv: Any) -> dict[str, str]:
    """Add P V for a tile of values of the element type; return the next accumulator. With a latent in a cache, the tile
    of K is also the tile of values."""
    v = "k"
    if "V" in b.signature.reads:
        b.load_keys("v", "V", kv, "d_v", "step")
        v = "v"
    p = _p_operand(b, b.dropped("soft.p"))
    return {"acc": b.dot("acc_next", p, v, "BLOCK_KV", "step", acc="rescaled")}


def of_latent(signature: Signature) -> Signature:
    """The signature with q and k in two tensors each. With a cache, the first one of k is also the values."""
    more = {"Q": ("Q", "Q_ROPE"), "K": ("K", "K_ROPE"), "V": () if signature.cache else ("V",)}
    return signature._replace(
        reads=tuple(part for name in signature.reads for part in more.get(name, (name,))), latent=True
    )


def _store_split(b: KernelBuilder, head: Any, end: dict[str, str]) -> None:
    """Store the output and the LSE to base 2 of a split of the keys.

    For `exact_partials`, store the maximum to base 2 and the sum of probabilities relative to it in place of the LSE.

    end: `m`, `l` and `acc` after the loop.
    """
    m, l, acc = map(symbol, ("m", "l", "acc"))  # noqa: E741
    index = (head, work_item(), "q")
    b.map("inv_l", select(l > 0, 1 / l, 0), l=end["l"])
    b.map("o_partial", acc * symbol("inv_l") / _probability_factor(b), acc=end["acc"], inv_l="inv_l")
    b.store("O_PARTIAL", (*index, "d_v"), "o_partial")
    if exact_partials(b.spec):
        b.map("m_partial", select(l > 0, m, -sympy.oo), m=end["m"], l=end["l"])
        b.store("M_PARTIAL", index, "m_partial")
        b.store("L_PARTIAL", index, end["l"])
    else:
        b.map("lse2_partial", select(l > 0, m + log2(l), -sympy.oo), m=end["m"], l=end["l"])
        b.store("LSE2_PARTIAL", index, "lse2_partial")


def _probability_factor(b: KernelBuilder) -> int:
    """The factor by which probabilities are multiplied before they are cast to the element type; outputs are divided by
    it.

    It is a power of two, and 1 for 16-bit types and fp32. An 8-bit type has too little range near zero for
    probabilities, which are at most 1.
    """
    return 1 << ELEMENTS[b.spec.dtype[0]].weights


def _p_operand(b: KernelBuilder, p: str) -> str:
    """The probabilities as operand of the product with V, before the cast to the element type."""
    factor = _probability_factor(b)
    return p if factor == 1 else b.map("p_raised", symbol("p") * factor, "step", p=p)


def _entropy_sums(b: KernelBuilder, masked: str) -> str:
    """The next value of e, the sum of p log2 p over the probabilities p of a row, from which the entropy is computed.

    With p = 2^(s - m), l is the sum of p and e the sum of p (s - m); hidden scores contribute nothing. Where the
    maximum grows by d, each p becomes 2^-d p, and its logarithm falls by d: e becomes 2^-d (e - d l), before the tile's
    terms are added. No term is above 0, so nothing cancels.
    """
    p, alpha, m_next, log2_p = map(symbol, ("p", "alpha", "m_next", "log2_p"))
    log2_weight = select(p > 0, symbol(masked) - m_next, 0)
    b.map("log2_p", log2_weight, "step", "f32", False, **{"p": "soft.p", masked: masked, "m_next": "soft.m"})
    b.map("terms", p * log2_p, "step", p="soft.p", log2_p="log2_p")
    b.reduce_sum("e_tile", "terms", "BLOCK_KV", "step")
    b.map("grown", select(alpha > 0, m_next - symbol("m"), 0), "step", alpha="soft.alpha", m_next="soft.m", m="m")
    e = alpha * (symbol("e") - symbol("grown") * symbol("l")) + symbol("e_tile")
    return b.map("e_next", e, "step", alpha="soft.alpha", e="e", grown="grown", l="l", e_tile="e_tile")


def _store_entropy(b: KernelBuilder, head: Any, end: dict[str, str], with_sink: bool) -> None:
    """Store each query's entropy in nats: -sum of P ln P = ln(l) - ln(2) e / l. A sink counts as one more probability.
    The entropy of a query that sees no key is 0."""
    l, e, m_all, shrunk, log2_sink = map(symbol, ("l", "e", "m_all", "shrunk", "log2_sink"))  # noqa: E741
    if with_sink:
        b.map("grown_all", select(shrunk > 0, m_all - symbol("m"), 0), shrunk="shrunk", m_all="m_all", m=end["m"])
        b.map("log2_sink", symbol("sink2") - m_all, sink2="sink2", m_all="m_all")
        b.map("e_sink", select(log2_sink > -sympy.oo, exp2(log2_sink) * log2_sink, 0), log2_sink="log2_sink")
        e_all = shrunk * (e - symbol("grown_all") * l) + symbol("e_sink")
        b.map("e_all", e_all, shrunk="shrunk", e=end["e"], grown_all="grown_all", l=end["l"], e_sink="e_sink")
    l_end, e_end = ("l_all", "e_all") if with_sink else (end["l"], end["e"])
    b.map("entropy", select(l > 0, (log2(l) - e / l) * symbol("LN2"), 0), l=l_end, e=e_end)
    b.store("ENTROPY", ("b", head, "q"), "entropy")


def store_results(b: KernelBuilder, head: Any, sink: Expr | None, end: dict[str, str], factor: int = 1) -> None:
    """Store the output, divided by the sum of probabilities, the LSE, and the other outputs that the spec asks for.

    The largest score of a query is the running maximum: it is -inf if no key is visible, and a sink does not count.

    head: the index of the program's head.
    end: `m`, `l` and `acc` after the loop.
    factor: the factor by which the probabilities in `acc` were multiplied (see `_probability_factor`).
    """
    m, l, acc, inv_l = map(symbol, ("m", "l", "acc", "inv_l"))  # noqa: E741
    if sink is not None:
        _add_sink(b, sink, end)
    else:
        b.map("inv_l", select(l > 0, 1 / l, 0), l=end["l"])
    if b.spec.dropout:  # kept probabilities are divided by 1 - dropout_p
        b.map("inv_l_kept", inv_l * symbol("keep_scale"), inv_l="inv_l", keep_scale="keep_scale")
        b.map("o", acc * symbol("inv_l_kept") / factor, dtype="T", acc=end["acc"], inv_l_kept="inv_l_kept")
    else:
        b.map("o", acc * inv_l / factor, dtype="T", acc=end["acc"], inv_l="inv_l")
    b.store("O", ("b", head, "q", "d_v"), "o")
    if sink is not None:
        uses = {"m": end["m"], "m_all": "m_all", "l_all": "l_all", **dict(b.uses((sink,)))}
        # at least the sink itself, whose value to base 2 may be too large for fp32
        lse = sympy.Max((symbol("m_all") + log2(symbol("l_all"))) * symbol("LN2"), sink)
        b.map("lse", select(m > -sympy.oo, lse, sink), "entry", "f32", False, **uses)
    else:
        b.map("lse", select(l > 0, (m + log2(l)) * symbol("LN2"), -sympy.oo), m=end["m"], l=end["l"])
    b.store("LSE", ("b", head, "q"), "lse")
    if "entropy" in b.spec.outputs:
        _store_entropy(b, head, end, sink is not None)
    store_stats(b, ("b", head, "q"), *(("m_all", "l_all") if sink is not None else (end["m"], end["l"])))
    if "max_score" in b.spec.outputs:
        b.map("max_score", m * symbol("LN2"), m=end["m"])
        b.store("MAX_SCORE", ("b", head, "q"), "max_score")


def store_stats(
    b: KernelBuilder,
    rows: tuple[Any, ...],
    m: str,
    l: str,  # noqa: E741
    maximum: Expr | None = None,
) -> None:
    """Store the statistics from which the backward recomputes probabilities, if the kernel writes them: each query's
    maximum to base 2, and the reciprocal of its sum l.

    A query that sees no key gets the maximum +inf and the reciprocal 0, so its probabilities are recomputed as 0.

    m, l: the values with the maximum and the sum.
    maximum: the maximum to base 2, if `m` is not to base 2.
    """
    if "M_ALL" not in b.signature.writes:
        return
    total, maximum = symbol("l"), maximum or symbol("m")
    scaled = {"qk_scale": "qk_scale"} if maximum.has(symbol("qk_scale")) else {}
    b.map("m_out", select(total > 0, maximum, sympy.oo), "entry", "f32", False, m=m, l=l, **scaled)
    b.store("M_ALL", rows, "m_out")
    b.map("inv_l_out", select(total > 0, 1 / total, 0), l=l)
    b.store("INV_L_ALL", rows, "inv_l_out")


def build_forward_kv_outer(spec: Spec) -> Kernel:
    """FlashAttention (Dao et al. 2022), Algorithm 1: one program per head loops over key tiles, and for each key tile
    over query tiles.

    A query tile's accumulator, maximum and sum are read from HBM and written back in each iteration. They start as 0,
    -inf and 0 and stay in fp32, and the accumulator stays unnormalised until `fwd_end`, as in FlashAttention-2: the
    element type would round it in every iteration.
    """
    b = KernelBuilder(spec, FWD_KV_OUTER)
    b.declare_tensors()
    b.declare_scalar("scale")
    b.declare_sizes()
    b.compute_scale()
    b.loop("keys", "kv", cdiv(b.extent("kv"), symbol("BLOCK_KV")), "tile", cls="all")

    kv = kv_head(spec)
    b.load("k", "K", ("b", kv, "kv", "d_qk"), "tile")
    b.load("v", "V", ("b", kv, "kv", "d_v"), "tile")
    b.loop("queries", "q", cdiv(b.extent("q"), symbol("BLOCK_Q")), "step", "tile")
    b.add(tile.Yield("_yield_tile", ()), "tile")

    rows = ("b", "h", "q")
    b.load("q", "Q", (*rows, "d_qk"), "step")
    b.load("m", "ROW_MAX", rows, "step")
    b.load("l", "ROW_SUM", rows, "step")
    b.load("acc", "O_ACC", (*rows, "d_v"), "step")
    b.dot("s", "q", "k", "D_QK", "step")
    # Without score modifiers the softmax step applies the scale. The maximum is then that of unscaled products, and
    # fwd_end scales it.
    scale = "qk_scale" if b.score == S else None
    if scale is None:
        scores(b)
    b.mask("masked", "s" if scale else "score", sympy.And(b.where, in_bounds("kv")), "step")
    guard = "always" if unbounded(spec) else "partial"
    b.add(tile.SoftmaxStep("soft", "masked", "m", Type("f32", ("BLOCK_Q", "BLOCK_KV")), scale, guard), "step")
    b.map("rescaled", symbol("acc") * symbol("alpha"), "step", acc="acc", alpha="soft.alpha")
    b.dot("acc_next", _p_operand(b, "soft.p"), "v", "BLOCK_KV", "step", acc="rescaled")
    b.reduce_sum("p_sum", "soft.p", "BLOCK_KV", "step")
    b.map("l_next", symbol("l") * symbol("alpha") + symbol("p_sum"), "step", l="l", alpha="soft.alpha", p_sum="p_sum")
    b.store("ROW_MAX", rows, "soft.m", "step")
    b.store("ROW_SUM", rows, "l_next", "step")
    b.store("O_ACC", (*rows, "d_v"), "acc_next", "step")
    b.add(tile.Yield("_yield_step", ()), "step")
    return b.kernel()


def build_forward_end(spec: Spec) -> Kernel:
    """After `fwd` has visited all keys, finish each row: O = acc / sum, and its LSE."""
    b = KernelBuilder(spec, with_stats(FWD_END, exact_sums(spec)))
    b.declare_tensors()
    for name in ("scale", "Hq", "Nq"):
        b.declare_scalar(name)
    rows = ("b", "h", "q")
    b.load("m", "ROW_MAX", rows)
    b.load("l", "ROW_SUM", rows)
    b.load("acc", "O_ACC", (*rows, "d_v"))
    m, l, acc, inv_l, qk_scale = map(symbol, ("m", "l", "acc", "inv_l", "qk_scale"))  # noqa: E741
    b.map("inv_l", select(l > 0, 1 / l, 0), l="l")
    b.map("o", acc * inv_l / _probability_factor(b), dtype="T", acc="acc", inv_l="inv_l")
    b.store("O", (*rows, "d_v"), "o")
    b.compute_scale()
    maximum = m * qk_scale if b.score == S else m
    b.compute("lse", select(l > 0, (maximum + log2(l)) * symbol("LN2"), -sympy.oo), "entry")
    b.store("LSE", rows, "lse")
    store_stats(b, rows, "m", "l", maximum)
    return b.kernel()


def _add_sink(b: KernelBuilder, sink: Expr, end: dict[str, str]) -> None:
    """Add the sink logit to every row's softmax: the sums are rescaled to the new maximum. So each row has a sum above
    0, even if it sees no key.

    The logit to base 2 is made finite, even if it is -inf, so that no infinity is subtracted from another in a row that
    sees no key.

    end: the final values of the row's maximum `m` and its sum `l`.
    """
    m, l, m_all, sink2 = map(symbol, ("m", "l", "m_all", "sink2"))  # noqa: E741
    b.compute("sink2_base", sink * symbol("LOG2E"), "entry")
    b.compute("sink2", finite(symbol("sink2_base")), "entry")
    b.map("m_all", sympy.Max(m, sink2), m=end["m"], sink2="sink2")
    b.map("shrunk", exp2(m - m_all), m=end["m"], m_all="m_all")
    b.map(
        "l_all", l * symbol("shrunk") + exp2(sink2 - m_all), l=end["l"], shrunk="shrunk", sink2="sink2", m_all="m_all"
    )
    b.map("inv_l", symbol("shrunk") / symbol("l_all"), shrunk="shrunk", l_all="l_all")
