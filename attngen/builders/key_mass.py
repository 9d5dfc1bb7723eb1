"""The weight that all queries give each key, as logical IR: the sums of P over queries."""

from __future__ import annotations

from attngen.builders.common import KernelBuilder, kv_head
from attngen.builders.recompute import compute_lse2, load_stats, probabilities
from attngen.builders.semantics import exact_sums
from attngen.builders.signature import Signature, with_stats
from attngen.ir import Kernel, cdiv, symbol, tile
from attngen.spec import Spec

SIGNATURE = Signature(
    "key_mass",
    "kv",
    ("Q", "K", "LSE"),
    ("KEY_MASS",),
    per_query_head=True,
    about="The sum over queries of each key's probabilities: one program per key tile, over query tiles; "
    "scores are transposed.",
)


def build_key_mass(spec: Spec) -> Kernel:
    """The sum of each key's weights over queries, before dropout, from q, k and the LSE only.

    As in @dkdv, whose query tiles it visits, weights are recomputed, P = 2^(score - lse2), with lse2 = +inf for rows
    that see no key and for those past the end. Each query head has separate sums, accumulated in the order of the
    queries.
    """
    b = KernelBuilder(spec, with_stats(SIGNATURE, exact_sums(spec)))
    b.declare_tensors()
    b.declare_scalar("scale")
    b.declare_sizes()
    b.compute_scale()
    b.load("k", "K", ("b", kv_head(spec), "kv", "d_qk"))
    b.load_inputs()
    starts = {"mass": b.init("mass_init", 0, "BLOCK_KV")}
    b.loop("queries", "q", cdiv(b.extent("q"), symbol("BLOCK_Q")), "step", **starts)

    b.carried("step", **starts)
    b.load("q", "Q", ("b", "h", "q", "d_qk"), "step")
    load_stats(b, ("b", "h", "q"), "step")
    compute_lse2(b, "step")
    probabilities(b, "k", "q")
    b.reduce_sum("p_sum", "p", "BLOCK_Q", "step")
    b.map("mass_next", symbol("mass") + symbol("p_sum"), "step", mass="mass", p_sum="p_sum")
    b.add(tile.Yield("_yield_step", (("mass", "mass_next"),)), "step")
    b.store("KEY_MASS", ("b", "h", "kv"), "queries.mass")
    return b.kernel()
