"""Forward mode: the tangents of the output and of the rows' statistics, as logical IR. They are derived as the
backward is."""

from __future__ import annotations

from typing import Any

import sympy

from attngen.builders.backward import compute_lse2, load_sums, probabilities, where_seen
from attngen.builders.common import KernelBuilder, kv_head
from attngen.builders.forward import sink_of
from attngen.builders.semantics import S, derivative, exact_sums, only_fp32
from attngen.builders.signature import Signature, with_sums
from attngen.ir.expr import LARGEST, cdiv, exp2, finite, log2, select, symbol
from attngen.ir.graph import Kernel, Read
from attngen.ir.ops import Yield
from attngen.spec import Spec

JVP = Signature(
    "jvp",
    "q",
    ("Q", "K", "V", "O", "LSE", "tQ", "tK", "tV"),
    ("tO", "tLSE"),
    about="Forward mode: tangents of the output and the LSE; one program per query tile, over key tiles.",
)
OF_ENTROPY = JVP._replace(
    reads=(*JVP.reads[:5], "ENTROPY", *JVP.reads[5:]),
    writes=(*JVP.writes, "tENTROPY"),
    about=JVP.about.replace("the output and the LSE", "the output, the LSE and the entropy"),
)


def learned_reads(spec: Spec) -> tuple[Read, ...]:
    """The reads of inputs that have a tangent: of those that get gradients."""
    grads = {i.name for i in spec.inputs() if i.grad}
    return tuple(read for read in spec.reads() if read.tensor in grads)


def build_jvp(spec: Spec) -> Kernel:
    """The tangents of O, of the LSE and of the entropy H along given ones of q, k, v and learned inputs, after the
    forward.

    The scaled score has the tangent scale * (tQ k^T + q tK^T). The score that the softmax sees has f_s times this, and
    f_p times the tangent of each learned p that it reads: tscore. With P, computed anew as in the backward, tP = P *
    tscore is what weights change by before they are normalised anew. Then:

        tLSE = rowsum(tP)      tO = P tV + tP V - tLSE * O      tH = -rowsum(tP * ln P) - tLSE * H

    (the differential of softmax, dP = P * (dS - rowsum(P * dS))). These are five products, and no running maximum: the
    forward has made all that it is for. A sink takes part in the sums over a row, and has no value. Dropout takes P and
    tP away in the products alone, as in the forward. A row that sees no key has tangents of zero.

    For `exact_sums`, P is made of the row's maximum and sum in place of the LSE. If it can, the kernel divides what the
    loop adds up, not each weight: that takes fewer registers. A logarithm takes weights that are divided, and 16 bits
    may not hold tP of others.
    """
    score, sink, reads = spec.modified(), sink_of(spec), learned_reads(spec)
    steep, *slopes = (derivative(score, by) for by in (S, *(symbol(read.name) for read in reads)))
    with_entropy = "entropy" in spec.outputs
    signature = with_sums(OF_ENTROPY if with_entropy else JVP, exact_sums(spec))
    b = KernelBuilder(spec, signature, [steep, *slopes, *([] if sink is None else [sink])])
    b.read_tangents(reads)
    b.tensors()
    b.scalar("scale")
    b.sizes()
    b.seed()

    rows = ("b", "h", "q")
    b.scale()
    normalised = with_entropy or not only_fp32(spec)
    load_sums(b, rows, later=() if normalised else ("INV_L_ALL",))
    b.load("q", "Q", (*rows, "d_qk"))
    b.load("tq", "tQ", (*rows, "d_qk"))
    compute_lse2(b, "entry")
    starts = {"acc": b.init("acc_init", 0, "BLOCK_Q", "D_V"), "tlse": b.init("tlse_init", 0, "BLOCK_Q")}
    if with_entropy:
        starts["tentropy"] = b.init("tentropy_init", 0, "BLOCK_Q")
    b.reads()
    b.loop("keys", "kv", cdiv(symbol("Nk"), symbol("BLOCK_KV")), "step", **starts)

    b.carried("step", **starts)
    b.load("k", "K", ("b", kv_head(spec), "kv", "d_qk"), "step")
    b.load("tk", "tK", ("b", kv_head(spec), "kv", "d_qk"), "step")
    b.draw(symbol("h"), "BLOCK_Q", "BLOCK_KV")
    b.dot("ts_part", "tq", "k", "D_QK", "step")
    b.dot("ts", "q", "tk", "D_QK", "step", acc="ts_part")
    steep, *slopes = probabilities(b, "q", "k", steep, *slopes, normalised=normalised)
    along = zip(slopes, reads)
    b.compute(
        "tscore",
        steep * symbol("scale") * symbol("ts") + sympy.Add(*(slope * symbol(f"t{read.name}") for slope, read in along)),
    )
    p = b.dropped("p")
    for weight, change in {"p": "tp", p: f"t{p}"}.items():
        b.compute(change, where_seen(b, symbol(weight) * symbol("tscore")))
    b.load("tv", "tV", ("b", kv_head(spec), "kv", "d_v"), "step")
    b.load("v", "V", ("b", kv_head(spec), "kv", "d_v"), "step")
    b.dot("acc_part", p, "tv", "BLOCK_KV", "step", acc="acc")
    b.dot("acc_next", f"t{p}", "v", "BLOCK_KV", "step", acc="acc_part")
    nexts = {"acc": "acc_next", "tlse": _added(b, "tlse", "tp")}
    if with_entropy:
        b.compute("terms", symbol("tp") * symbol("log2_p"))
        nexts["tentropy"] = _added(b, "tentropy", "terms")
    b.add(Yield("yield_step", tuple(nexts.items())), "step")

    end = {field: f"keys.{field}" for field in starts}
    _store(b, rows, end if normalised else _normalised(b, rows, end), sink, reads)
    return b.kernel()


def _normalised(b: KernelBuilder, rows: tuple[Any, ...], end: dict[str, str]) -> dict[str, str]:
    """What the loop has added up of each row, over the row's sum of weights."""
    by = b.load("inv_l_all", "INV_L_ALL", rows)
    return {
        field: b.map(f"{field}_divided", symbol(field) * symbol(by), "entry", "f32", False, **{field: ref, by: by})
        for field, ref in end.items()
    }


def _added(b: KernelBuilder, field: str, value: str) -> str:
    """A carried number of each row, and the sum of a tile over its keys."""
    b.reduce_sum(f"{value}_sum", value, "BLOCK_KV", "step")
    uses = {field: field, f"{value}_sum": f"{value}_sum"}
    return b.map(f"{field}_next", sympy.Add(*map(symbol, uses)), "step", "f32", False, **uses)


def _store(b: KernelBuilder, rows: tuple[Any, ...], end: dict[str, str], sink: Any, reads: tuple[Read, ...]) -> None:
    """The tangents, of the sums that the loop ends with, to which a sink adds its part."""
    if sink is not None:
        tsink = sympy.Add(*(derivative(sink, symbol(r.name)) * symbol(f"t{r.name}") for r in reads))
        log2_sink, of_sink = _sinks_weight(b, sink)
        end = {**end, "tlse": _with_sink(b, "tlse", end, of_sink * tsink)}
        if "tentropy" in end:
            term = select(of_sink > 0, of_sink * log2_sink * tsink, sympy.Integer(0))
            end["tentropy"] = _with_sink(b, "tentropy", end, term)
    b.load("o", "O", (*rows, "d_v"))
    uses = {"acc": end["acc"], "tlse": end["tlse"], "o": "o"} | ({"keep_scale": "keep_scale"} if b.spec.dropout else {})
    kept = symbol("keep_scale") if b.spec.dropout else 1
    b.map("to", symbol("acc") * kept - symbol("tlse") * symbol("o"), "entry", "T", False, **uses)
    b.store("tO", (*rows, "d_v"), "to")
    b.store("tLSE", rows, end["tlse"])
    if "tentropy" in end:
        b.load("entropy", "ENTROPY", rows)
        e = -symbol("LN2") * symbol("tentropy") - symbol("tlse") * symbol("entropy")
        b.map("tentropy_out", e, tentropy=end["tentropy"], tlse=end["tlse"], entropy="entropy")
        b.store("tENTROPY", rows, "tentropy_out")


def _sinks_weight(b: KernelBuilder, sink: Any) -> tuple[Any, Any]:
    """The weight of a sink, its logarithm to base 2 first. No infinity is subtracted from another in a row that sees
    no key."""
    log2_sink = symbol("log2_sink")
    if exact_sums(b.spec):
        b.compute("sink2", finite(sink * symbol("LOG2E")), "entry")
        b.compute("log2_sink", symbol("sink2") - symbol("m_all"), "entry")
        return log2_sink + log2(symbol("inv_l_all")), exp2(log2_sink) * symbol("inv_l_all")
    b.compute("log2_sink", (sink - sympy.Max(symbol("lse"), -LARGEST)) * symbol("LOG2E"), "entry")
    return log2_sink, exp2(log2_sink)


def _with_sink(b: KernelBuilder, field: str, end: dict[str, str], part: Any) -> str:
    """A sum over the keys of a row, and the part of its sink."""
    uses = {field: end[field], **dict(b.uses((part,)))}
    return b.map(f"{field}_all", symbol(field) + part, "entry", "f32", False, **uses)
