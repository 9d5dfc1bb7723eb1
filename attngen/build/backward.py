"""The backward kernels as logical IR: `delta` (preprocess), `dkdv`, `dq`. No atomics: each tile has one owner."""

from __future__ import annotations

from typing import Any

import sympy

from attngen.build.common import KernelBuilder, in_bounds, kv_head
from attngen.ir.expr import cdiv, exp2, select, symbol
from attngen.ir.graph import Kernel
from attngen.ir.ops import Yield
from attngen.spec import Spec


def build_delta(spec: Spec) -> Kernel:
    """Per query: delta = rowsum(O * dO) (FlashAttention-2, Algorithm 2, line 4), times the share kept, and LSE in base 2.

    An empty row (LSE = -inf) gets LSE2 = +inf, so that every probability recomputed from it is 2^-inf = 0.
    """
    b = KernelBuilder(spec, "delta")
    b.tensors(masked=False)
    for name in ("Hq", "Nq", *(("keep_scale",) if spec.dropout else ())):
        b.scalar(name)
    rows = ("b", "h", "q")
    b.load("o", "O", (*rows, "d_v"))
    b.load("do", "dO", (*rows, "d_v"))
    b.map("product", symbol("o") * symbol("do"), o="o", do="do")
    b.reduce_sum("delta", "product", "D_V")
    if spec.dropout:
        b.map("delta_kept", symbol("delta") / symbol("keep_scale"), delta="delta", keep_scale="keep_scale")
    b.store("DELTA", rows, "delta_kept" if spec.dropout else "delta")
    b.load("lse", "LSE", rows)
    lse = symbol("lse")
    b.map("lse2", select(lse > -sympy.oo, lse * symbol("LOG2E"), sympy.oo), lse="lse")
    b.store("LSE2", rows, "lse2")
    return b.kernel()


def _probabilities(b: KernelBuilder, where: Any, reads: dict[str, str], a: str, c: str) -> None:
    """p = 2^(score - lse2), recomputed from the tiles of a and c, whose order gives S or its transpose."""
    b.dot("s", a, c, "D_QK", "step")
    b.map("score", symbol("s") * symbol("qk_scale"), "step", score=True, s="s", qk_scale="qk_scale")
    masked = b.mask("masked", "score", where, reads, "step")
    b.map("p", exp2(symbol("x") - symbol("lse2")), "step", x=masked, lse2="lse2")


def _score_gradients(b: KernelBuilder, kept: str) -> None:
    """dS = P * (dP - delta) (FlashAttention-2, Algorithm 2, line 14), without the factor `scale`, applied at the end.

    With dropout, dS = P * (Z * dP - delta), where Z is 1 / share for what is kept and 0 elsewhere (FlashAttention, Appendix B.4).
    Times the share, with delta that `delta` has multiplied by it: dS = kept P * dP - P * delta. The factor is applied at the end.
    """
    p, p_kept, dp, delta = map(symbol, ("p", "p_kept", "dp", "delta"))
    if b.spec.dropout:
        b.map("ds", p_kept * dp - p * delta, "step", p="p", p_kept=kept, dp="dp", delta="delta")
    else:
        b.map("ds", p * (dp - delta), "step", p="p", dp="dp", delta="delta")


def _scaled(b: KernelBuilder, name: str, value: str, *factors: str) -> None:
    """A gradient times the factors left to the end, as it is stored."""
    field = value.rpartition(".")[2]
    uses = {field: value} | {f: f for f in factors if f != "keep_scale" or b.spec.dropout}
    b.map(name, sympy.Mul(*map(symbol, uses)), "entry", "T", False, **uses)


def build_dkdv(spec: Spec) -> Kernel:
    """dK and dV (FlashAttention-2, Algorithm 2): one program per key tile, over the query tiles of its whole head group.

    Scores are computed transposed, so that P^T and dS^T feed dV and dK straight from registers. Queries past the end load
    LSE2 = +inf, so they weigh nothing. Loads first, then the two products that need nothing else: the order that spills least
    (docs/perf-log.md).
    """
    shared = spec.heads.sharing != "mha"
    b = KernelBuilder(spec, "dkdv")
    b.tensors()
    b.scalar("scale")
    b.sizes()
    b.seed()

    group, g = symbol("group"), symbol("g")
    kv = {"mha": "h", "mqa": sympy.Integer(0), "gqa": "hkv"}[spec.heads.sharing]
    head = {"mha": symbol("h"), "mqa": g, "gqa": symbol("hkv") * group + g}[spec.heads.sharing]
    b.map("qk_scale", symbol("scale") * symbol("LOG2E"), scale="scale")
    b.load("k", "K", ("b", kv, "kv", "d_qk"))
    b.load("v", "V", ("b", kv, "kv", "d_v"))
    reads = b.reads("step")
    starts = {"dk": b.init("dk_init", 0, "BLOCK_KV", "D_QK"), "dv": b.init("dv_init", 0, "BLOCK_KV", "D_V")}
    q_tiles = cdiv(symbol("Nq"), symbol("BLOCK_Q"))
    if shared:
        b.loop("total", "g", group, "group", cls="all", **starts)
        b.carried("group", **starts)
        b.loop("queries", "q", q_tiles, "step", "group", dk_step="dk", dv_step="dv")
        b.add(Yield("yield_group", (("dk", "queries.dk_step"), ("dv", "queries.dv_step"))), "group")
    else:
        b.loop("total", "q", q_tiles, "step", **starts)

    b.carried("step", **({"dk_step": "dk_init", "dv_step": "dv_init"} if shared else starts))
    dk, dv = ("dk_step", "dv_step") if shared else ("dk", "dv")
    b.load("q", "Q", ("b", head, "q", "d_qk"), "step")
    b.load("do", "dO", ("b", head, "q", "d_v"), "step")
    b.load("lse2", "LSE2", ("b", head, "q"), "step", other=sympy.oo)
    b.load("delta", "DELTA", ("b", head, "q"), "step")
    b.draw(head, "BLOCK_KV", "BLOCK_Q")
    b.dot("dp", "v", "do", "D_V", "step")
    _probabilities(b, spec.mask.expression(), reads, "k", "q")
    p = b.dropped("p")
    _score_gradients(b, p)
    b.dot("dv_next", p, "do", "BLOCK_Q", "step", acc=dv)
    b.dot("dk_next", "ds", "q", "BLOCK_Q", "step", acc=dk)
    b.add(Yield("yield_step", ((dk, "dk_next"), (dv, "dv_next"))), "step")

    _scaled(b, "dk_out", "total.dk", "scale", "keep_scale")
    b.store("dK", ("b", kv, "kv", "d_qk"), "dk_out")
    _scaled(b, "dv_out", "total.dv", "keep_scale")
    b.store("dV", ("b", kv, "kv", "d_v"), "dv_out")
    return b.kernel()


def build_dq(spec: Spec) -> Kernel:
    """dQ (FlashAttention-2, Algorithm 2, with the loop order of the forward): one program per query tile."""
    b = KernelBuilder(spec, "dq")
    b.tensors()
    b.scalar("scale")
    b.sizes()
    b.seed()

    rows = ("b", "h", "q")
    b.map("qk_scale", symbol("scale") * symbol("LOG2E"), scale="scale")
    b.load("q", "Q", (*rows, "d_qk"))
    b.load("do", "dO", (*rows, "d_v"))
    b.load("lse2", "LSE2", rows, other=sympy.oo)
    b.load("delta", "DELTA", rows)
    starts = {"dq": b.init("dq_init", 0, "BLOCK_Q", "D_QK")}
    reads = b.reads("step")
    b.loop("keys", "kv", cdiv(symbol("Nk"), symbol("BLOCK_KV")), "step", **starts)

    b.carried("step", **starts)
    b.load("k", "K", ("b", kv_head(spec), "kv", "d_qk"), "step")
    _probabilities(b, sympy.And(spec.mask.expression(), in_bounds("kv")), reads, "q", "k")
    b.load("v", "V", ("b", kv_head(spec), "kv", "d_v"), "step")
    b.dot("dp", "do", "v", "D_V", "step")
    b.draw(symbol("h"), "BLOCK_Q", "BLOCK_KV")
    _score_gradients(b, b.dropped("p"))
    b.dot("dq_next", "ds", "k", "BLOCK_KV", "step", acc="dq")
    b.add(Yield("yield_step", (("dq", "dq_next"),)), "step")

    _scaled(b, "dq_out", "keys.dq", "scale", "keep_scale")
    b.store("dQ", (*rows, "d_qk"), "dq_out")
    return b.kernel()
