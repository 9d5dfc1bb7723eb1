"""The forward kernel as logical IR."""

from __future__ import annotations

import sympy

from attngen.build.common import KernelBuilder, in_bounds, kv_head
from attngen.ir.expr import cdiv, log2, select, symbol
from attngen.ir.graph import Kernel
from attngen.ir.ops import SoftmaxStep, Type, Yield
from attngen.spec import Spec


def build_forward(spec: Spec) -> Kernel:
    """FlashAttention-2 (Dao 2023), Algorithm 1: one program per query tile, online softmax over key tiles.

    The accumulator stays unnormalised until the end, and LSE = ln(sum exp(score)) is saved for the backward.
    A row with nothing visible gives zeros and LSE = -inf.
    """
    b = KernelBuilder(spec, "fwd")
    b.tensors()
    b.scalar("scale")
    b.sizes()
    b.seed()

    b.map("qk_scale", symbol("scale") * symbol("LOG2E"), scale="scale")
    b.load("q", "Q", ("b", "h", "q", "d_qk"))
    starts = {
        "m": b.init("m_init", -sympy.oo, "BLOCK_Q"),
        "l": b.init("l_init", 0, "BLOCK_Q"),
        "acc": b.init("acc_init", 0, "BLOCK_Q", "D_V"),
    }
    reads = b.reads("step")
    b.loop("keys", "kv", cdiv(symbol("Nk"), symbol("BLOCK_KV")), "step", **starts)

    b.carried("step", **starts)
    b.load("k", "K", ("b", kv_head(spec), "kv", "d_qk"), "step")
    b.draw(symbol("h"), "BLOCK_Q", "BLOCK_KV")
    b.dot("s", "q", "k", "D_QK", "step")
    b.map("score", symbol("s") * symbol("qk_scale"), "step", score=True, s="s", qk_scale="qk_scale")
    where = sympy.And(spec.mask.expression(), in_bounds("kv"))
    b.mask("masked", "score", where, reads, "step")
    b.add(SoftmaxStep("soft", "masked", "m", Type("f32", ("BLOCK_Q", "BLOCK_KV"))), "step")
    b.map("rescaled", symbol("acc") * symbol("alpha"), "step", acc="acc", alpha="soft.alpha")
    b.load("v", "V", ("b", kv_head(spec), "kv", "d_v"), "step")
    p = b.dropped("soft.p")
    b.dot("acc_next", p, "v", "BLOCK_KV", "step", acc="rescaled")
    b.reduce_sum("p_sum", "soft.p", "BLOCK_KV", "step")  # after the product, beside which it runs
    b.map("l_next", symbol("l") * symbol("alpha") + symbol("p_sum"), "step", l="l", alpha="soft.alpha", p_sum="p_sum")
    b.add(Yield("yield_step", (("m", "soft.m"), ("l", "l_next"), ("acc", "acc_next"))), "step")

    m, l, acc, inv_l = map(symbol, ("m", "l", "acc", "inv_l"))  # noqa: E741
    b.map("inv_l", select(l > 0, 1 / l, 0), l="keys.l")
    if spec.dropout:  # what is kept makes up for what is dropped
        b.map("inv_l_kept", inv_l * symbol("keep_scale"), inv_l="inv_l", keep_scale="keep_scale")
        b.map("o", acc * symbol("inv_l_kept"), dtype="T", acc="keys.acc", inv_l_kept="inv_l_kept")
    else:
        b.map("o", acc * inv_l, dtype="T", acc="keys.acc", inv_l="inv_l")
    b.store("O", ("b", "h", "q", "d_v"), "o")
    b.map("lse", select(l > 0, (m + log2(l)) * symbol("LN2"), -sympy.oo), m="keys.m", l="keys.l")
    b.store("LSE", ("b", "h", "q"), "lse")
    return b.kernel()
