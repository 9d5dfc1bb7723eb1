"""Forward mode: the tangents of the output and of the row statistics, as logical IR. They are derived as the backward
is."""

from __future__ import annotations

from typing import Any

import sympy

from attngen.builders.common import KernelBuilder, kv_head
from attngen.builders.forward import sink_of
from attngen.builders.recompute import compute_lse2, load_stats, probabilities, where_seen
from attngen.builders.semantics import S, derivative, exact_sums, only_fp32
from attngen.builders.signature import Signature, with_stats
from attngen.ir import LARGEST, Kernel, Read, cdiv, exp2, finite, log2, select, symbol, tile
from attngen.spec import Spec

JVP = Signature(
    "jvp",
    "q",
    ("Q", "K", "V", "O", "LSE", "tQ", "tK", "tV"),
    ("tO", "tLSE"),
    about="Forward mode: tangents of the output and the LSE; one program per query tile, over key tiles.",
)
JVP_WITH_ENTROPY = JVP._replace(
    reads=(*JVP.reads[:5], "ENTROPY", *JVP.reads[5:]),
    writes=(*JVP.writes, "tENTROPY"),
    about=JVP.about.replace("the output and the LSE", "the output, the LSE and the entropy"),
)


def learned_reads(spec: Spec) -> tuple[Read, ...]:
    """The reads of inputs that have a tangent, which are those that get gradients."""
    grads = {i.name for i in spec.inputs() if i.grad}
    return tuple(read for read in spec.reads() if read.tensor in grads)


def build_jvp(spec: Spec) -> Kernel:
    """Build the kernel that runs after the forward and computes the tangents of O, the LSE and the entropy H from given
    tangents of q, k, v and learned inputs.

    The scaled score has the tangent scale * (tQ k^T + q tK^T). The score that the softmax sees has f_s times this, plus
    f_p times the tangent of each learned p that it reads: tscore. With P, recomputed as in the backward, tP = P *
    tscore is the change of the weights before they are normalised again. Then:

        tLSE = rowsum(tP)      tO = P tV + tP V - tLSE * O      tH = -rowsum(tP * ln P) - tLSE * H

    (the differential of softmax, dP = P * (dS - rowsum(P * dS))). These are five matrix products and no running
    maximum, since the forward has computed the statistics. A sink takes part in the sums over a row, and has no value
    vector. Dropout removes P and tP only from the products, as in the forward. A row that sees no key has tangents of
    zero.

    For `exact_sums`, P is computed from the row's maximum and sum in place of the LSE. If possible, the kernel divides
    the sums of the loop, not each weight, which takes fewer registers. Not so for the entropy, whose logarithm needs
    normalised weights, nor for 16-bit types, which may not hold tP of others.
    """
    score, sink, reads = spec.modified(), sink_of(spec), learned_reads(spec)
    f_s, *f_inputs = (derivative(score, by) for by in (S, *(symbol(read.name) for read in reads)))
    with_entropy = "entropy" in spec.outputs
    signature = with_stats(JVP_WITH_ENTROPY if with_entropy else JVP, exact_sums(spec))
    b = KernelBuilder(spec, signature, [f_s, *f_inputs, *([] if sink is None else [sink])])
    b.read_tangents(reads)
    b.declare_tensors()
    b.declare_scalar("scale")
    b.declare_sizes()
    b.declare_seed()

    rows = ("b", "h", "q")
    b.compute_scale()
    normalised = with_entropy or not only_fp32(spec)
    load_stats(b, rows, later=() if normalised else ("INV_L_ALL",))
    b.load("q", "Q", (*rows, "d_qk"))
    b.load("tq", "tQ", (*rows, "d_qk"))
    compute_lse2(b, "entry")
    starts = {"acc": b.init("acc_init", 0, "BLOCK_Q", "D_V"), "tlse": b.init("tlse_init", 0, "BLOCK_Q")}
    if with_entropy:
        starts["tentropy"] = b.init("tentropy_init", 0, "BLOCK_Q")
    b.load_inputs()
    b.loop("keys", "kv", cdiv(b.extent("kv"), symbol("BLOCK_KV")), "step", **starts)

    b.carried("step", **starts)
    b.load("k", "K", ("b", kv_head(spec), "kv", "d_qk"), "step")
    b.load("tk", "tK", ("b", kv_head(spec), "kv", "d_qk"), "step")
    b.dropout_mask(symbol("h"), "BLOCK_Q", "BLOCK_KV")
    b.dot("ts_part", "tq", "k", "D_QK", "step")
    b.dot("ts", "q", "tk", "D_QK", "step", acc="ts_part")
    f_s, *f_inputs = probabilities(b, "q", "k", f_s, *f_inputs, normalised=normalised)
    along = zip(f_inputs, reads)
    b.compute(
        "tscore",
        f_s * symbol("scale") * symbol("ts") + sympy.Add(*(slope * symbol(f"t{read.name}") for slope, read in along)),
    )
    b.add(tile.Yield("_yield_step", tuple(_add_tile(b, with_entropy).items())), "step")

    end = {field: f"keys.{field}" for field in starts}
    _store(b, rows, end if normalised else _normalised(b, rows, end), sink, reads)
    return b.kernel()


def _add_tile(b: KernelBuilder, with_entropy: bool) -> dict[str, str]:
    """The next values of the sums, from `p` and `tscore`: the accumulator P tV + tP V, and the tangents of the rows."""
    p = b.dropped("p")
    for weight, change in {"p": "tp", p: f"t{p}"}.items():
        b.compute(change, where_seen(b, symbol(weight) * symbol("tscore")))
    b.load("tv", "tV", ("b", kv_head(b.spec), "kv", "d_v"), "step")
    b.load("v", "V", ("b", kv_head(b.spec), "kv", "d_v"), "step")
    b.dot("acc_part", p, "tv", "BLOCK_KV", "step", acc="acc")
    b.dot("acc_next", f"t{p}", "v", "BLOCK_KV", "step", acc="acc_part")
    nexts = {"acc": "acc_next", "tlse": _add_tile_sum(b, "tlse", "tp")}
    if with_entropy:
        b.compute("terms", symbol("tp") * symbol("log2_p"))
        nexts["tentropy"] = _add_tile_sum(b, "tentropy", "terms")
    return nexts


def _normalised(b: KernelBuilder, rows: tuple[Any, ...], end: dict[str, str]) -> dict[str, str]:
    """The sums of the loop over the row's sum of weights."""
    by = b.load("inv_l_all", "INV_L_ALL", rows)
    return {
        field: b.map(f"{field}_divided", symbol(field) * symbol(by), "entry", "f32", False, **{field: ref, by: by})
        for field, ref in end.items()
    }


def _add_tile_sum(b: KernelBuilder, field: str, value: str) -> str:
    """The next value of a carried number per row: its value plus the sum of a tile over its keys."""
    b.reduce_sum(f"{value}_sum", value, "BLOCK_KV", "step")
    uses = {field: field, f"{value}_sum": f"{value}_sum"}
    return b.map(f"{field}_next", sympy.Add(*map(symbol, uses)), "step", "f32", False, **uses)


def _store(b: KernelBuilder, rows: tuple[Any, ...], end: dict[str, str], sink: Any, reads: tuple[Read, ...]) -> None:
    """Compute and store the tangents from the final sums of the loop, to which a sink adds its part."""
    if sink is not None:
        tsink = sympy.Add(*(derivative(sink, symbol(r.name)) * symbol(f"t{r.name}") for r in reads))
        log2_sink, of_sink = _sink_weight(b, sink)
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


def _sink_weight(b: KernelBuilder, sink: Any) -> tuple[Any, Any]:
    """(logarithm of a sink's weight to base 2, the weight).

    No infinity is subtracted from another in a row that sees no key.
    """
    log2_sink = symbol("log2_sink")
    if exact_sums(b.spec):
        b.compute("sink2", finite(sink * symbol("LOG2E")), "entry")
        b.compute("log2_sink", symbol("sink2") - symbol("m_all"), "entry")
        return log2_sink + log2(symbol("inv_l_all")), exp2(log2_sink) * symbol("inv_l_all")
    b.compute("log2_sink", (sink - sympy.Max(symbol("lse"), -LARGEST)) * symbol("LOG2E"), "entry")
    return log2_sink, exp2(log2_sink)


def _with_sink(b: KernelBuilder, field: str, end: dict[str, str], part: Any) -> str:
    """A sum over the keys of a row, plus the part of its sink."""
    uses = {field: end[field], **dict(b.uses((part,)))}
    return b.map(f"{field}_all", symbol(field) + part, "entry", "f32", False, **uses)
