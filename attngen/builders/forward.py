"""The forward kernel as logical IR, in either order of loops."""

from __future__ import annotations

from typing import Any

import sympy

from attngen.builders.common import KernelBuilder, in_bounds, kv_head, scores
from attngen.builders.quantised import join_values, load_latents, multiply_keys, multiply_values, split_queries
from attngen.builders.semantics import S, exact_parts, exact_sums, unbounded
from attngen.builders.signature import Signature, with_sums
from attngen.ir.dtypes import ELEMENTS
from attngen.ir.expr import Expr, cdiv, exp2, finite, log2, select, symbol
from attngen.ir.graph import Kernel, KVSplit
from attngen.ir.names import OF_KEYS, OUTPUTS
from attngen.ir.ops import AXIS_DIM, HALVES, SoftmaxStep, Type, Yield
from attngen.ir.split_axes import part
from attngen.ir.split_kv import item
from attngen.spec import Spec

FWD = Signature(
    "fwd",
    "q",
    ("Q", "K", "V"),
    ("O", "LSE"),
    about="Forward: online softmax over key tiles, one program per query tile.",
)
# With keys in the outer loop.
FWD_BY_KEY = Signature(
    "fwd",
    "kv",
    ("Q", "K", "V"),
    rewrites=("O_ACC", "ROW_MAX", "ROW_SUM"),
    about="Forward: one program per head, over key tiles, and for each over query tiles, whose sums it rewrites in HBM.",
)
FWD_END = Signature(
    "fwd_end",
    "q",
    ("O_ACC", "ROW_MAX", "ROW_SUM"),
    ("O", "LSE"),
    about="After the forward: outputs in the element type, divided by their sums, and the LSE.",
)


def sink_of(spec: Spec) -> Expr | None:
    """One more logit of each row's softmax, if there is one."""
    return next((s.sink() for s in spec.score if s.sink() is not None), None)


def build_forward(spec: Spec, signature: Signature = FWD, kv_split: KVSplit | None = None) -> Kernel:
    """FlashAttention-2 (Dao 2023), Algorithm 1: one program per query tile, online softmax over key tiles.

    The accumulator stays unnormalised until the end, and LSE = ln(sum exp(score)) is saved for the backward.
    A row with nothing visible gives zeros and LSE = -inf.

    Of a latent (DeepSeek-V2, 2024, section 2.1.2, with its projections absorbed in q), q and k are in two tensors each:
    the columns that v has, too, and those that are rotated. In a cache the first are the values.

    A cache may hold keys and values in 8 bits (see attngen/builders/quantised.py).

    If the signature packs heads, a tile has the queries of all heads that share a K/V head. If keys are dealt, each
    program has a part of them, and stores what it finds of these (see `_store_part`).
    """
    if spec.rope:
        signature = of_latent(signature)
    if "LSE" in signature.writes:
        signature = signature._replace(writes=("O", *(OUTPUTS[name] for name in spec.outputs if name not in OF_KEYS)))
        signature = with_sums(signature, exact_sums(spec) and signature.cache is None)
    sink = sink_of(spec)
    b = KernelBuilder(spec, signature, [] if sink is None or signature.shares else [sink])
    b.kv_split = kv_split
    kv = b.heads[symbol("hkv")]
    own = kv if signature.pack_gqa else "h"
    b.tensors()
    b.scalar("scale")
    b.sizes()
    b.seed()

    b.scale()
    columns = {"": "d_v", "_rope": "d_rope"} if spec.rope else {"": "d_qk"}
    for part_of, column in columns.items():
        b.load(f"q{part_of}", f"Q{part_of.upper()}", ("b", own, "q", column))
    scaled_by = signature.cache.scale if signature.cache else ""  # of keys in 8 bits, what has a factor
    quantised = scaled_by in ("head", "page")
    if quantised:
        split_queries(b, kv)
    sums = {f"acc_{half}": "PAIRS_V" for half in HALVES} if quantised else {"acc": "D_V"}
    starts = {
        "m": b.init("m_init", -sympy.oo, "BLOCK_Q"),
        "l": b.init("l_init", 0, "BLOCK_Q"),
        **{acc: b.init(f"{acc}_init", 0, "BLOCK_Q", width) for acc, width in sums.items()},
    }
    if "ENTROPY" in signature.writes:
        starts["e"] = b.init("e_init", 0, "BLOCK_Q")
    b.reads()
    first, end = sympy.Integer(0), cdiv(symbol("Nk"), symbol("BLOCK_KV"))
    if b.shares:
        first, end = part(first, end, b.shares)
    b.loop("keys", "kv", end, "step", first=first, **starts)

    b.carried("step", **starts)
    if quantised:
        multiply_keys(b, kv)
    else:
        for part_of, column in columns.items():
            if scaled_by and not part_of:
                load_latents(b, kv)
            else:
                b.load_keys(f"k{part_of}", f"K{part_of.upper()}", kv, column, "step")
        b.draw(symbol("h"), "BLOCK_Q", "BLOCK_KV")
        of_rope = b.dot("s_rope", "q_rope", "k_rope", "D_ROPE", "step") if spec.rope else None
        b.dot("s", "q", "k", AXIS_DIM[columns[""]], "step", acc=of_rope)
    scores(b)
    masked = b.mask("masked", "score", sympy.And(b.where, in_bounds("kv")), "step")
    guard = "always" if unbounded(spec) else "partial"
    b.add(SoftmaxStep("soft", masked, "m", Type("f32", ("BLOCK_Q", "BLOCK_KV")), guard=guard), "step")
    for acc in sums:
        b.map(acc.replace("acc", "rescaled"), symbol("acc") * symbol("alpha"), "step", acc=acc, alpha="soft.alpha")
    if quantised:
        summed = multiply_values(b, kv, "soft.p")
    else:
        v = "k"
        if "V" in signature.reads:
            b.load_keys("v", "V", kv, "d_v", "step")
            v = "v"
        p = _raised(b, b.dropped("soft.p"))
        summed = {"acc": b.dot("acc_next", p, v, "BLOCK_KV", "step", acc="rescaled")}
    b.reduce_sum("p_sum", "soft.p", "BLOCK_KV", "step")  # after the product, so that both can overlap
    if "e" in starts:
        summed["e"] = _logarithms(b, masked)
    b.map("l_next", symbol("l") * symbol("alpha") + symbol("p_sum"), "step", l="l", alpha="soft.alpha", p_sum="p_sum")
    b.add(Yield("yield_step", (("m", "soft.m"), ("l", "l_next"), *summed.items())), "step")

    ends = {
        **{name: f"keys.{name}" for name in starts if name not in sums},
        "acc": join_values(b, "keys") if quantised else "keys.acc",
    }
    if b.shares:
        _store_part(b, own, ends)
    else:
        store_results(b, own, sink, ends, _factor(b))
    return b.kernel()


def of_latent(signature: Signature) -> Signature:
    """A signature whose q and k are of two tensors each. Where keys are in a cache, the first of k are the values,
    too."""
    more = {"Q": ("Q", "Q_ROPE"), "K": ("K", "K_ROPE"), "V": () if signature.cache else ("V",)}
    return signature._replace(
        reads=tuple(part for name in signature.reads for part in more.get(name, (name,))), latent=True
    )


def _store_part(b: KernelBuilder, own: Any, end: dict[str, str]) -> None:
    """The output of a part of the keys, and its LSE to base 2; for `exact_parts` its maximum to base 2, and its sum of
    weights at that.

    end: `m`, `l` and `acc` after the loop.
    """
    m, l, acc = map(symbol, ("m", "l", "acc"))  # noqa: E741
    place = (own, item(), "q")
    b.map("inv_l", select(l > 0, 1 / l, 0), l=end["l"])
    b.map("o_part", acc * symbol("inv_l") / _factor(b), acc=end["acc"], inv_l="inv_l")
    b.store("O_PARTS", (*place, "d_v"), "o_part")
    if exact_parts(b.spec):
        b.map("max_part", select(l > 0, m, -sympy.oo), m=end["m"], l=end["l"])
        b.store("MAX_PARTS", place, "max_part")
        b.store("SUM_PARTS", place, end["l"])
    else:
        b.map("lse2_part", select(l > 0, m + log2(l), -sympy.oo), m=end["m"], l=end["l"])
        b.store("LSE2_PARTS", place, "lse2_part")


def _factor(b: KernelBuilder) -> int:
    """What weights are multiplied by before they are cast to the element type, and outputs divided by: 1 unless the
    type asks for more."""
    return 1 << ELEMENTS[b.spec.dtype[0]].weights


def _raised(b: KernelBuilder, p: str) -> str:
    """Weights, as the product with V takes them."""
    return p if _factor(b) == 1 else b.map("p_raised", symbol("p") * _factor(b), "step", p=p)


def _logarithms(b: KernelBuilder, masked: str) -> str:
    """The next sum of weights times their logarithms to base 2, of which the entropy is made; hidden scores have no
    part in it.

    With p = 2^(s - m), l is the sum of p and e that of p (s - m). Where the maximum grows by d, each p becomes 2^-d p,
    and its logarithm falls by d: e becomes 2^-d (e - d l), before the tile's terms are added. It is never above 0, so
    that nothing cancels.
    """
    p, alpha, m_next, log2_p = map(symbol, ("p", "alpha", "m_next", "log2_p"))
    told = select(p > 0, symbol(masked) - m_next, 0)
    b.map("log2_p", told, "step", "f32", False, **{"p": "soft.p", masked: masked, "m_next": "soft.m"})
    b.map("terms", p * log2_p, "step", p="soft.p", log2_p="log2_p")
    b.reduce_sum("e_tile", "terms", "BLOCK_KV", "step")
    b.map("grown", select(alpha > 0, m_next - symbol("m"), 0), "step", alpha="soft.alpha", m_next="soft.m", m="m")
    e = alpha * (symbol("e") - symbol("grown") * symbol("l")) + symbol("e_tile")
    return b.map("e_next", e, "step", alpha="soft.alpha", e="e", grown="grown", l="l", e_tile="e_tile")


def _store_entropy(b: KernelBuilder, own: Any, end: dict[str, str], with_sink: bool) -> None:
    """Each query's entropy in nats, -sum of P ln P = ln l - e / l, of the sums with its sink if there is one; 0 if
    it sees nothing."""
    l, e, m_all, shrunk, log2_sink = map(symbol, ("l", "e", "m_all", "shrunk", "log2_sink"))  # noqa: E741
    if with_sink:
        b.map("grown_all", select(shrunk > 0, m_all - symbol("m"), 0), shrunk="shrunk", m_all="m_all", m=end["m"])
        b.map("log2_sink", symbol("sink2") - m_all, sink2="sink2", m_all="m_all")
        b.map("e_sink", select(log2_sink > -sympy.oo, exp2(log2_sink) * log2_sink, 0), log2_sink="log2_sink")
        e_all = shrunk * (e - symbol("grown_all") * l) + symbol("e_sink")
        b.map("e_all", e_all, shrunk="shrunk", e=end["e"], grown_all="grown_all", l=end["l"], e_sink="e_sink")
    l_end, e_end = ("l_all", "e_all") if with_sink else (end["l"], end["e"])
    b.map("entropy", select(l > 0, (log2(l) - e / l) * symbol("LN2"), 0), l=l_end, e=e_end)
    b.store("ENTROPY", ("b", own, "q"), "entropy")


def store_results(b: KernelBuilder, own: Any, sink: Expr | None, end: dict[str, str], factor: int = 1) -> None:
    """The output, divided by the sums of weights, the LSE, and what else the spec asks for.

    The largest score of a query is the running maximum: it is -inf where no key is visible, and no sink takes part in
    it.

    own: the index of the program's head. end: `m`, `l` and `acc` after the loop. factor: by which weights in `acc` are
    too large.
    """
    m, l, acc, inv_l = map(symbol, ("m", "l", "acc", "inv_l"))  # noqa: E741
    if sink is not None:
        _join_sink(b, sink, end)
    else:
        b.map("inv_l", select(l > 0, 1 / l, 0), l=end["l"])
    if b.spec.dropout:  # kept weights are scaled up for the dropped ones
        b.map("inv_l_kept", inv_l * symbol("keep_scale"), inv_l="inv_l", keep_scale="keep_scale")
        b.map("o", acc * symbol("inv_l_kept") / factor, dtype="T", acc=end["acc"], inv_l_kept="inv_l_kept")
    else:
        b.map("o", acc * inv_l / factor, dtype="T", acc=end["acc"], inv_l="inv_l")
    b.store("O", ("b", own, "q", "d_v"), "o")
    if sink is not None:
        uses = {"m": end["m"], "m_all": "m_all", "l_all": "l_all", **dict(b.uses((sink,)))}
        lse = sympy.Max(
            (symbol("m_all") + log2(symbol("l_all"))) * symbol("LN2"), sink
        )  # which to base 2 may be too large
        b.map("lse", select(m > -sympy.oo, lse, sink), "entry", "f32", False, **uses)
    else:
        b.map("lse", select(l > 0, (m + log2(l)) * symbol("LN2"), -sympy.oo), m=end["m"], l=end["l"])
    b.store("LSE", ("b", own, "q"), "lse")
    if "entropy" in b.spec.outputs:
        _store_entropy(b, own, end, sink is not None)
    store_sums(b, ("b", own, "q"), *(("m_all", "l_all") if sink is not None else (end["m"], end["l"])))
    if "max_score" in b.spec.outputs:
        b.map("max_score", m * symbol("LN2"), m=end["m"])
        b.store("MAX_SCORE", ("b", own, "q"), "max_score")


def store_sums(b: KernelBuilder, rows: tuple[Any, ...], m: str, l: str, maximum: Expr | None = None) -> None:  # noqa: E741
    """What weights are made of again, if the kernel writes it: each query's maximum to base 2, and one over its sum of
    weights.

    m, l: the values with the maximum and the sum; maximum: the first, to base 2, where it is not.
    """
    if "M_ALL" not in b.signature.writes:
        return
    total, maximum = symbol("l"), maximum or symbol("m")
    scaled = {"qk_scale": "qk_scale"} if maximum.has(symbol("qk_scale")) else {}
    b.map("m_out", select(total > 0, maximum, sympy.oo), "entry", "f32", False, m=m, l=l, **scaled)
    b.store("M_ALL", rows, "m_out")
    b.map("inv_l_out", select(total > 0, 1 / total, 0), l=l)
    b.store("INV_L_ALL", rows, "inv_l_out")


def build_forward_by_key(spec: Spec) -> Kernel:
    """FlashAttention (Dao et al. 2022), Algorithm 1: one program per head, over key tiles, and for each over query
    tiles.

    A query tile's accumulator, maximum and sum are read from HBM and written back in each turn. They start as 0, -inf
    and 0, stay in fp32, and the accumulator unnormalised until `fwd_end`, as in FlashAttention-2: the element type
    would round it in every turn.
    """
    b = KernelBuilder(spec, FWD_BY_KEY)
    b.tensors()
    b.scalar("scale")
    b.sizes()
    b.scale()
    b.loop("keys", "kv", cdiv(symbol("Nk"), symbol("BLOCK_KV")), "tile", cls="all")

    kv = kv_head(spec)
    b.load("k", "K", ("b", kv, "kv", "d_qk"), "tile")
    b.load("v", "V", ("b", kv, "kv", "d_v"), "tile")
    b.loop("queries", "q", cdiv(symbol("Nq"), symbol("BLOCK_Q")), "step", "tile")
    b.add(Yield("yield_tile", ()), "tile")

    rows = ("b", "h", "q")
    b.load("q", "Q", (*rows, "d_qk"), "step")
    b.load("m", "ROW_MAX", rows, "step")
    b.load("l", "ROW_SUM", rows, "step")
    b.load("acc", "O_ACC", (*rows, "d_v"), "step")
    b.dot("s", "q", "k", "D_QK", "step")
    scale = (
        "qk_scale" if b.score == S else None
    )  # folded here: the maximum is in units of the product, as fwd_end expects
    if scale is None:
        scores(b)
    b.mask("masked", "s" if scale else "score", sympy.And(b.where, in_bounds("kv")), "step")
    guard = "always" if unbounded(spec) else "partial"
    b.add(SoftmaxStep("soft", "masked", "m", Type("f32", ("BLOCK_Q", "BLOCK_KV")), scale, guard), "step")
    b.map("rescaled", symbol("acc") * symbol("alpha"), "step", acc="acc", alpha="soft.alpha")
    b.dot("acc_next", _raised(b, "soft.p"), "v", "BLOCK_KV", "step", acc="rescaled")
    b.reduce_sum("p_sum", "soft.p", "BLOCK_KV", "step")
    b.map("l_next", symbol("l") * symbol("alpha") + symbol("p_sum"), "step", l="l", alpha="soft.alpha", p_sum="p_sum")
    b.store("ROW_MAX", rows, "soft.m", "step")
    b.store("ROW_SUM", rows, "l_next", "step")
    b.store("O_ACC", (*rows, "d_v"), "acc_next", "step")
    b.add(Yield("yield_step", ()), "step")
    return b.kernel()


def build_forward_end(spec: Spec) -> Kernel:
    """After `fwd` has seen all keys, finish each row: O = acc / sum, and its LSE."""
    b = KernelBuilder(spec, with_sums(FWD_END, exact_sums(spec)))
    b.tensors()
    for name in ("scale", "Hq", "Nq"):
        b.scalar(name)
    rows = ("b", "h", "q")
    b.load("m", "ROW_MAX", rows)
    b.load("l", "ROW_SUM", rows)
    b.load("acc", "O_ACC", (*rows, "d_v"))
    m, l, acc, inv_l, qk_scale = map(symbol, ("m", "l", "acc", "inv_l", "qk_scale"))  # noqa: E741
    b.map("inv_l", select(l > 0, 1 / l, 0), l="l")
    b.map("o", acc * inv_l / _factor(b), dtype="T", acc="acc", inv_l="inv_l")
    b.store("O", (*rows, "d_v"), "o")
    b.scale()
    maximum = m * qk_scale if b.score == S else m
    b.compute("lse", select(l > 0, (maximum + log2(l)) * symbol("LN2"), -sympy.oo), "entry")
    b.store("LSE", rows, "lse")
    store_sums(b, rows, "m", "l", maximum)
    return b.kernel()


def _join_sink(b: KernelBuilder, sink: Expr, end: dict[str, str]) -> None:
    """Add one more logit to every row's softmax: the sums are rescaled to the new maximum. No row is empty then.

    To base 2 the logit is finite, though it be -inf, so that no infinity is subtracted from another in a row that sees
    no key.

    end: the values that the row's maximum `m` and its sum `l` have in the end.
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
